/* cut.c - which tokens of a masked sequence each rank of its group holds.
 *
 * Under a causal mask zigzag gives every rank equal work. Under others it may not. A
 * sequence is then cut into more chunks, so that every rank has as many rows as under
 * zigzag, and about as many pairs of a query and a key. There are two ways; the one with
 * fewer chunks is tried first.
 *
 * Phases: from token to token the keys that a query sees grow or shrink evenly, except at
 * the edges of slices. Between two edges zigzag is even, so each such phase gets a zigzag of
 * its own. This serves a mask of few slices, however few of its queries have the most pairs.
 *
 * Dealing: equal chunks, the heaviest left to the rank with the least work that has room, as
 * in MagiAttention (https://arxiv.org/abs/2505.13211); afterwards chunks are exchanged. This
 * serves a mask of many slices. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* A cut is good when no rank has more than 1 + 1 / GOOD of the mean work. Chunks are of one
 * rank, and of all together. */
enum { GOOD = 50, FEWEST_CHUNKS = 4, MOST_CHUNKS = 256, CHUNKS_MAX = 4096 };

/* Looks at a chunk, to deal and to exchange them: more than thousands of ranks take. */
#define LOOKS ((int64_t)1 << 28)

/* ---- the value ---- */

/* Whether piece i of the chunks goes on where the piece before it, of the same place, ends. */
static int goes_on(const hcp__chunk *chunks, int32_t i, int32_t before) {
  return before >= 0 && chunks[before].place == chunks[i].place;
}

hcp__cut *hcp__cut_create(const hcp__chunk *chunks, int32_t count, int32_t degree) {
  size_t n = (size_t)count;
  hcp__cut *cut =
      calloc(1, sizeof *cut + 2 * n * sizeof(hcp__chunk) + ((size_t)degree + 1) * sizeof(int32_t));
  if (cut == NULL) return NULL;
  hcp__chunk *chunk = (hcp__chunk *)(cut + 1);
  hcp__piece *piece = (hcp__piece *)(chunk + n);
  int32_t *first = (int32_t *)(chunk + 2 * n), last = -1;
  for (int32_t i = 0; i < count; i++) {
    if (chunks[i].rows == 0) continue;
    if (goes_on(chunks, i, last)) {
      chunk[cut->count - 1].rows += chunks[i].rows;
    } else {
      chunk[cut->count++] = chunks[i];
    }
    last = i;
  }
  for (int32_t i = 0; i < cut->count; i++) first[chunk[i].place + 1]++;
  for (int32_t k = 0; k < degree; k++) {
    cut->most = first[k + 1] > cut->most ? first[k + 1] : cut->most;
    first[k + 1] += first[k];
  }
  for (int32_t i = 0; i < cut->count; i++)
    piece[first[chunk[i].place]++] = (hcp__piece){chunk[i].start, chunk[i].rows};
  for (int32_t k = degree; k > 0; k--) first[k] = first[k - 1]; /* each became the next one */
  first[0] = 0;
  cut->chunks = chunk;
  cut->pieces = piece;
  cut->first = first;
  return cut;
}

hcp__cut *hcp__cut_by_stretches(const hcp__cut *cut, const hcp_plan *plan, int32_t sequence,
                                int32_t degree) {
  size_t n = (size_t)cut->count, stretches = (size_t)hcp__stretch_count(plan, sequence);
  hcp__cut *made =
      calloc(1, sizeof *made + n * sizeof(hcp__chunk) + (n + stretches) * sizeof(hcp__piece) +
                    ((size_t)degree + 1) * sizeof(int32_t));
  if (made == NULL) return NULL;
  hcp__chunk *chunk = (hcp__chunk *)(made + 1);
  hcp__piece *piece = (hcp__piece *)(chunk + n);
  int32_t *first = (int32_t *)(piece + n + stretches), at = 0;
  memcpy(chunk, cut->chunks, n * sizeof *chunk);
  for (int32_t k = 0; k < degree; k++) {
    for (int32_t p = cut->first[k]; p < cut->first[k + 1]; p++) {
      int64_t token = cut->pieces[p].start, end = token + cut->pieces[p].rows;
      while (token < end) {
        int64_t i = hcp__stretch_at(plan, sequence, token);
        hcp__piece stretch = hcp__stretch(plan, sequence, i);
        int64_t next = hcp__least(end, stretch.start + stretch.rows);
        piece[at++] = (hcp__piece){token, next - token};
        token = next;
      }
    }
    first[k + 1] = at;
    made->most = at - first[k] > made->most ? at - first[k] : made->most;
  }
  made->count = cut->count;
  made->chunks = chunk;
  made->pieces = piece;
  made->first = first;
  return made;
}

hcp__cut *hcp__cut_zigzag(const hcp__zigzag *z) {
  int32_t degree = z->degree, count = 2 * degree;
  hcp__chunk *chunks = malloc((size_t)count * sizeof *chunks);
  if (chunks == NULL) return NULL;
  for (int32_t k = 0; k < count; k++) {
    int64_t start = hcp__chunk_start(z, k);
    chunks[k] =
        (hcp__chunk){start, hcp__chunk_start(z, k + 1) - start, k < degree ? k : count - 1 - k};
  }
  hcp__cut *cut = hcp__cut_create(chunks, count, degree);
  free(chunks);
  return cut;
}

/* ---- work ---- */

/* Pairs of the first queries of a slice whose key is at most `ahead` tokens ahead. */
static int64_t pairs_up_to(const hcp_slice *x, int64_t queries, int64_t ahead) {
  int64_t keys = x->key_end - x->key_begin;
  int64_t one = x->query_begin + ahead - x->key_begin + 1, pairs = 0;
  for (int32_t side = 0; side < 2; side++) {
    int64_t n = side == 0 ? one + queries - 1 : one - 1, rising = hcp__most(0, hcp__least(n, keys));
    int64_t sum = rising * (rising + 1) / 2 + hcp__most(0, n - rising) * keys;
    pairs += side == 0 ? sum : -sum;
  }
  return pairs;
}

/* Pairs of a slice's queries before `end`. */
static int64_t pairs_before(const hcp_slice *x, int64_t end) {
  int64_t queries = hcp__most(0, hcp__least(end, x->query_end) - x->query_begin);
  if (x->low > x->high) return 0;
  return pairs_up_to(x, queries, x->high) - pairs_up_to(x, queries, x->low - 1);
}

/* What is cut, and the room to do it in. */
typedef struct problem {
  const hcp_plan *plan;
  int32_t sequence, degree, count, room; /* of chunks, and most of them */
  int64_t length, total;
  hcp__zigzag zigzag;
  int64_t *loads;   /* count: pairs of each chunk */
  int64_t *sums;    /* degree: pairs of each place */
  int32_t *held;    /* degree: chunks of each place */
  int32_t *order;   /* count: chunks, heaviest first */
  hcp__chunk *chunks;
} problem;

/* Where chunk i begins among chunks in token order. */
static int32_t chunk_at(const problem *p, int64_t token) {
  int32_t low = 0, high = p->count - 1;
  while (low < high) { /* the last chunk that starts at or before the token */
    int32_t middle = low + (high - low + 1) / 2;
    if (p->chunks[middle].start <= token)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

static void add_slice(problem *p, const hcp_slice *x) {
  int64_t before = 0;
  for (int32_t c = chunk_at(p, x->query_begin); c < p->count; c++) {
    if (p->chunks[c].start >= x->query_end) break;
    int64_t upto = pairs_before(x, p->chunks[c].start + p->chunks[c].rows);
    p->loads[c] += upto - before;
    before = upto;
  }
}

/* Pairs of each chunk under all masks together, and of all of them. */
static void measure(problem *p) {
  memset(p->loads, 0, (size_t)p->count * sizeof *p->loads);
  for (int32_t m = 0; m < p->plan->mask_count; m++) {
    const hcp_masks *masks = &p->plan->masks[m];
    for (int64_t i = masks->first[p->sequence]; i < masks->first[p->sequence + 1]; i++)
      add_slice(p, &masks->slices[i]);
  }
  p->total = 0;
  for (int32_t c = 0; c < p->count; c++) p->total += p->loads[c];
}

/* Pairs of each place; returns those of the busiest. */
static int64_t busiest(problem *p) {
  int64_t top = 0;
  measure(p);
  memset(p->sums, 0, (size_t)p->degree * sizeof *p->sums);
  for (int32_t c = 0; c < p->count; c++) p->sums[p->chunks[c].place] += p->loads[c];
  for (int32_t k = 0; k < p->degree; k++) top = hcp__most(top, p->sums[k]);
  return top;
}

static int is_good(const problem *p, int64_t top) {
  int64_t mean = p->total / p->degree;
  return top <= mean + mean / GOOD + 1;
}

/* ---- dealing ---- */

static void equal_chunks(problem *p, int32_t count) {
  p->count = count;
  for (int32_t c = 0; c < count; c++) {
    int64_t start = p->length / count * c + p->length % count * c / count, next = c + 1;
    int64_t end = p->length / count * next + p->length % count * next / count;
    p->chunks[c] = (hcp__chunk){start, end - start, 0};
  }
}

/* Heaviest first, equal ones by index: a heap sort, as qsort takes no context. */
static int comes_later(const problem *p, int32_t a, int32_t b) {
  return p->loads[a] != p->loads[b] ? p->loads[a] < p->loads[b] : a > b;
}

static void sift(problem *p, int32_t root, int32_t end) {
  for (int32_t child; (child = 2 * root + 1) < end; root = child) {
    if (child + 1 < end && comes_later(p, p->order[child + 1], p->order[child])) child++;
    if (!comes_later(p, p->order[child], p->order[root])) return;
    int32_t swap = p->order[root];
    p->order[root] = p->order[child];
    p->order[child] = swap;
  }
}

/* The heap has the lightest on top, which goes to the end. */
static void sort_by_load(problem *p) {
  for (int32_t c = 0; c < p->count; c++) p->order[c] = c;
  for (int32_t root = p->count / 2 - 1; root >= 0; root--) sift(p, root, p->count);
  for (int32_t end = p->count - 1; end > 0; end--) {
    int32_t swap = p->order[0];
    p->order[0] = p->order[end];
    p->order[end] = swap;
    sift(p, 0, end);
  }
}

static void deal(problem *p, int32_t each) {
  sort_by_load(p);
  memset(p->sums, 0, (size_t)p->degree * sizeof *p->sums);
  memset(p->held, 0, (size_t)p->degree * sizeof *p->held);
  for (int32_t i = 0; i < p->count; i++) {
    int32_t chosen = -1;
    for (int32_t k = 0; k < p->degree; k++)
      if (p->held[k] < each && (chosen < 0 || p->sums[k] < p->sums[chosen])) chosen = k;
    p->chunks[p->order[i]].place = chosen;
    p->sums[chosen] += p->loads[p->order[i]];
    p->held[chosen]++;
  }
}

/* Exchanges a chunk of the busiest place for one of another: the pair that leaves the busier
 * of the two with the least. 0: none helps. */
static int exchange(problem *p) {
  int32_t a = 0, best_mine = -1, best_theirs = -1;
  for (int32_t k = 1; k < p->degree; k++)
    if (p->sums[k] > p->sums[a]) a = k;
  int64_t best = p->sums[a];
  for (int32_t x = 0; x < p->count; x++) {
    if (p->chunks[x].place != a) continue;
    for (int32_t y = 0; y < p->count; y++) {
      int64_t less = p->loads[x] - p->loads[y];
      int32_t b = p->chunks[y].place;
      if (b == a || less <= 0) continue;
      int64_t top = hcp__most(p->sums[a] - less, p->sums[b] + less);
      if (top < best) best = top, best_mine = x, best_theirs = y;
    }
  }
  if (best_mine < 0) return 0;
  int32_t b = p->chunks[best_theirs].place;
  int64_t less = p->loads[best_mine] - p->loads[best_theirs];
  p->chunks[best_mine].place = b;
  p->chunks[best_theirs].place = a;
  p->sums[a] -= less;
  p->sums[b] += less;
  return 1;
}

/* Chunks of a place share its rows under zigzag, so that no rank has more. */
static void give_rows(problem *p, int32_t each) {
  int64_t start = 0;
  memset(p->held, 0, (size_t)p->degree * sizeof *p->held);
  for (int32_t c = 0; c < p->count; c++) {
    int32_t k = p->chunks[c].place;
    int64_t rows = hcp__zigzag_rows(&p->zigzag, k);
    p->chunks[c].start = start;
    p->chunks[c].rows = rows / each + (p->held[k]++ < rows % each);
    start += p->chunks[c].rows;
  }
}

/* Deals `each` chunks to every place. Returns the pairs of the busiest. */
static int64_t cut_into(problem *p, int32_t each) {
  equal_chunks(p, each * p->degree);
  measure(p);
  deal(p, each);
  int64_t looks = LOOKS / p->count / (each + 1);
  for (int64_t tries = hcp__least((int64_t)4 * p->degree, looks); tries > 0 && exchange(p);
       tries--) {
  }
  give_rows(p, each);
  return busiest(p);
}

static void zigzag_chunks(problem *p) {
  p->count = 2 * p->degree;
  for (int32_t c = 0; c < p->count; c++) {
    int64_t start = hcp__chunk_start(&p->zigzag, c);
    p->chunks[c] = (hcp__chunk){start, hcp__chunk_start(&p->zigzag, c + 1) - start,
                                c < p->degree ? c : p->count - 1 - c};
  }
}

/* ---- phases ---- */

/* Consecutive tokens of which each sees as many keys more than the one before it. */
typedef struct phase {
  int64_t start, rows;
  int64_t pairs;
  int32_t flat; /* all see equally many */
} phase;

typedef struct phases {
  int32_t count;
  int32_t each;    /* chunks of a place, 0: there are too many */
  phase *list;     /* count                                                */
  int32_t *order;  /* count: the most pairs of a token first               */
  int64_t *rows;   /* count x degree: of each phase, those of each place   */
  int64_t *spare;  /* degree: rows that a place can still take             */
  int64_t *edges;  /* where phases begin                                   */
} phases;

static int ascending(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* Where the keys that queries of a slice see grow or shrink in another way: at both ends, and
 * where a limit begins or ceases to hold. There the ways before and after meet, so that one at
 * an end's own token divides nothing. */
enum { EDGES = 6 };

static int32_t add_edges(const hcp_slice *x, int64_t *edges) {
  const int64_t meet[] = {x->key_begin - x->low, x->key_end - 1 - x->high,
                          x->key_begin - x->high - 1, x->key_end - x->low};
  int32_t count = 0;
  edges[count++] = x->query_begin;
  edges[count++] = x->query_end;
  for (int32_t i = 0; i < EDGES - 2; i++)
    if (meet[i] > x->query_begin && meet[i] < x->query_end - 1) edges[count++] = meet[i];
  return count;
}

/* The edges of all slices, ascending, each once, and both ends of the sequence. */
static int32_t find_edges(const problem *p, int64_t *edges) {
  int32_t found = 0, count = 0;
  edges[found++] = 0;
  edges[found++] = p->length;
  for (int32_t m = 0; m < p->plan->mask_count; m++) {
    const hcp_masks *masks = &p->plan->masks[m];
    for (int64_t i = masks->first[p->sequence]; i < masks->first[p->sequence + 1]; i++)
      found += add_edges(&masks->slices[i], edges + found);
  }
  qsort(edges, (size_t)found, sizeof *edges, ascending);
  for (int32_t i = 0; i < found; i++)
    if (count == 0 || edges[i] != edges[count - 1]) edges[count++] = edges[i];
  return count;
}

/* Pairs of each phase, and whether its first and last token have equally many. */
static void measure_phases(problem *p, phases *f) {
  p->count = 3 * f->count;
  for (int32_t i = 0; i < f->count; i++) {
    const phase *x = &f->list[i];
    int64_t end = x->start + x->rows, last = hcp__most(x->start + 1, end - 1);
    hcp__chunk *cut = p->chunks + 3 * (ptrdiff_t)i;
    cut[0] = (hcp__chunk){x->start, 1, 0};
    cut[1] = (hcp__chunk){x->start + 1, last - x->start - 1, 0};
    cut[2] = (hcp__chunk){last, end - last, 0};
  }
  measure(p);
  for (int32_t i = 0; i < f->count; i++) {
    const int64_t *loads = p->loads + 3 * (ptrdiff_t)i;
    f->list[i].pairs = loads[0] + loads[1] + loads[2];
    f->list[i].flat = f->list[i].rows == 1 || loads[0] == loads[2];
    f->each += f->list[i].flat ? 1 : 2;
  }
}

/* Pairs of a token, in the mean: an integer, so that every rank cuts alike. */
static int64_t density(const phase *x) { return x->pairs / x->rows; }

static void sort_by_density(phases *f) {
  for (int32_t i = 0; i < f->count; i++) {
    int32_t at = i;
    for (; at > 0 && density(&f->list[i]) > density(&f->list[f->order[at - 1]]); at--)
      f->order[at] = f->order[at - 1];
    f->order[at] = i;
  }
}

static int64_t slices_of(const problem *p) {
  int64_t count = 0;
  for (int32_t m = 0; m < p->plan->mask_count; m++) {
    const int64_t *first = p->plan->masks[m].first;
    count += first[p->sequence + 1] - first[p->sequence];
  }
  return count;
}

/* Finds the phases, if their chunks are not too many. Returns 0 when out of memory. */
static int find_phases(problem *p, phases *f) {
  int64_t slices = slices_of(p);
  memset(f, 0, sizeof *f);
  if (slices > p->room) return 1;
  f->edges = malloc((size_t)(EDGES * slices + 2) * sizeof *f->edges);
  if (f->edges == NULL) return 0;
  f->count = find_edges(p, f->edges) - 1;
  if (f->count > p->room / (2 * p->degree)) return 1;
  size_t count = (size_t)f->count, places = (size_t)p->degree;
  f->list = malloc(count * (sizeof *f->list + sizeof *f->order + places * sizeof *f->rows) +
                   places * sizeof *f->spare);
  if (f->list == NULL) return 0;
  f->rows = (int64_t *)(f->list + count);
  f->spare = f->rows + count * places;
  f->order = (int32_t *)(f->spare + places);
  for (int32_t i = 0; i < f->count; i++)
    f->list[i] = (phase){f->edges[i], f->edges[i + 1] - f->edges[i], 0, 0};
  measure_phases(p, f);
  sort_by_density(f);
  return 1;
}

static void free_phases(phases *f) {
  free(f->list);
  free(f->edges);
}

static void take_rows(problem *p, phases *f, int32_t i, int32_t k, int64_t rows) {
  f->rows[(ptrdiff_t)i * p->degree + k] += rows;
  f->spare[k] -= rows;
  p->sums[k] += density(&f->list[i]) * rows;
}

/* Shares a phase's rows between places: equally, and what is left over one by one to the place
 * with the fewest pairs that has room. Every phase leaves less than a row for each place, and
 * those before it: all places together have room for exactly the rows that there are. */
static void share_phase(problem *p, phases *f, int32_t i) {
  int64_t left = f->list[i].rows;
  for (int32_t k = 0; k < p->degree; k++) {
    int64_t rows = hcp__least(f->list[i].rows / p->degree, f->spare[k]);
    take_rows(p, f, i, k, rows);
    left -= rows;
  }
  for (; left > 0; left--) {
    int32_t chosen = -1;
    for (int32_t k = 0; k < p->degree; k++)
      if (f->spare[k] > 0 && (chosen < 0 || p->sums[k] < p->sums[chosen])) chosen = k;
    take_rows(p, f, i, chosen, 1);
  }
}

/* One chunk of a phase for each place, up or down. */
static void add_chunks(problem *p, const int64_t *rows, int32_t half, int32_t down) {
  for (int32_t at = 0; at < p->degree; at++) {
    int32_t k = down ? p->degree - 1 - at : at;
    int64_t part = half < 0 ? rows[k] : (rows[k] + (half == (k & 1))) / 2;
    hcp__chunk *before = p->count > 0 ? &p->chunks[p->count - 1] : NULL;
    int64_t start = before == NULL ? 0 : before->start + before->rows;
    p->chunks[p->count++] = (hcp__chunk){start, part, k};
  }
}

/* Cuts each phase in a zigzag of its own: one chunk for each place where it is flat, and two
 * otherwise. Every place gets its rows under zigzag. Returns the pairs of the busiest. */
static int64_t cut_in_phases(problem *p, phases *f) {
  memset(p->sums, 0, (size_t)p->degree * sizeof *p->sums);
  memset(f->rows, 0, (size_t)f->count * (size_t)p->degree * sizeof *f->rows);
  for (int32_t k = 0; k < p->degree; k++) f->spare[k] = hcp__zigzag_rows(&p->zigzag, k);
  for (int32_t i = 0; i < f->count; i++) share_phase(p, f, f->order[i]);
  p->count = 0;
  for (int32_t i = 0, down = 0; i < f->count; i++) {
    const int64_t *rows = f->rows + (ptrdiff_t)i * p->degree;
    if (f->list[i].flat) {
      add_chunks(p, rows, -1, down);
      down = !down;
    } else {
      add_chunks(p, rows, 0, down);
      add_chunks(p, rows, 1, !down);
    }
  }
  return busiest(p);
}

/* ---- the best of both ---- */

/* Keeps the chunks as the best cut if they are. Returns 0 when out of memory. */
static int keep_best(const problem *p, int64_t found, int64_t *top, hcp__cut **cut) {
  if (found >= *top) return 1;
  free(*cut);
  *cut = hcp__cut_create(p->chunks, p->count, p->degree);
  *top = found;
  return *cut != NULL;
}

/* The best cut with as few chunks as are good; *cut stays NULL where that is zigzag. */
static int try_cuts(problem *p, phases *f, int64_t top, hcp__cut **cut) {
  int done = 1;
  for (int32_t each = FEWEST_CHUNKS; done && each <= MOST_CHUNKS && !is_good(p, top); each *= 2) {
    if (f->each > 0 && f->each <= each) {
      done = keep_best(p, cut_in_phases(p, f), &top, cut);
      f->each = 0;
      if (!done || is_good(p, top)) break;
    }
    if (p->length / p->degree >= each && each * p->degree <= p->room &&
        (int64_t)each * p->degree * p->degree <= LOOKS)
      done = keep_best(p, cut_into(p, each), &top, cut);
  }
  return done;
}

static int solve(problem *p, hcp__cut **cut) {
  zigzag_chunks(p);
  int64_t top = busiest(p);
  if (is_good(p, top)) return 1;
  phases f;
  int done = find_phases(p, &f) && try_cuts(p, &f, top, cut);
  free_phases(&f);
  return done;
}

int hcp__cut_balanced(const hcp_plan *plan, int32_t sequence, int32_t degree, hcp__cut **cut) {
  int32_t room = degree * MOST_CHUNKS < CHUNKS_MAX ? degree * MOST_CHUNKS : CHUNKS_MAX;
  if (room < degree * FEWEST_CHUNKS) room = degree * FEWEST_CHUNKS;
  size_t places = (size_t)degree, chunks = (size_t)room;
  problem p = {.plan = plan, .sequence = sequence, .degree = degree, .room = room};
  p.length = plan->lengths[sequence];
  p.zigzag = hcp__zigzag_of(plan, sequence, degree);
  *cut = NULL;
  p.chunks = malloc(chunks * (sizeof *p.chunks + sizeof *p.loads + sizeof *p.order) +
                    places * (sizeof *p.sums + sizeof *p.held));
  if (p.chunks == NULL) return 0;
  p.loads = (int64_t *)(p.chunks + chunks);
  p.sums = p.loads + chunks;
  p.order = (int32_t *)(p.sums + places);
  p.held = p.order + chunks;
  int done = solve(&p, cut);
  free(p.chunks);
  return done;
}
