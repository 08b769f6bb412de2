/* cut.c - which tokens of a masked sequence each rank of its group holds.
 *
 * Under a causal mask zigzag gives every rank equal work. Under others it may not. A
 * sequence is then cut into more chunks, dealt so that every rank has as many rows as
 * under zigzag, and about as many pairs of a query and a key: the heaviest chunk left
 * goes to the rank with the least work that has room, as in MagiAttention
 * (https://arxiv.org/abs/2505.13211); afterwards chunks are exchanged. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* A cut is good when no rank has more than 1 + 1 / GOOD of the mean work. Chunks are of one
 * rank, and of all together. */
enum { GOOD = 50, FEWEST_CHUNKS = 4, MOST_CHUNKS = 256, CHUNKS_MAX = 4096 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

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
  for (int32_t k = 0, at = 0; k < degree; k++)
    for (int32_t i = 0; i < cut->count; i++)
      if (chunk[i].place == k) piece[at++] = (hcp__piece){chunk[i].start, chunk[i].rows};
  cut->chunks = chunk;
  cut->pieces = piece;
  cut->first = first;
  return cut;
}

hcp__cut *hcp__cut_zigzag(int64_t length, int32_t degree) {
  int32_t count = 2 * degree;
  hcp__chunk *chunks = malloc((size_t)count * sizeof *chunks);
  if (chunks == NULL) return NULL;
  for (int32_t k = 0; k < count; k++) {
    int64_t start = hcp__chunk_start(length, degree, k);
    chunks[k] = (hcp__chunk){start, hcp__chunk_start(length, degree, k + 1) - start,
                             k < degree ? k : count - 1 - k};
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
    int64_t n = side == 0 ? one + queries - 1 : one - 1, rising = most(0, least(n, keys));
    int64_t sum = rising * (rising + 1) / 2 + most(0, n - rising) * keys;
    pairs += side == 0 ? sum : -sum;
  }
  return pairs;
}

/* Pairs of a slice's queries before `end`. */
static int64_t pairs_before(const hcp_slice *x, int64_t end) {
  int64_t queries = most(0, least(end, x->query_end) - x->query_begin);
  if (x->low > x->high) return 0;
  return pairs_up_to(x, queries, x->high) - pairs_up_to(x, queries, x->low - 1);
}

/* What is cut, and the room to do it in. */
typedef struct problem {
  const hcp_plan *plan;
  int32_t sequence, degree, count, room; /* of chunks, and most of them */
  int64_t length, total;
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
  for (int32_t k = 0; k < p->degree; k++) top = most(top, p->sums[k]);
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
      int64_t top = most(p->sums[a] - less, p->sums[b] + less);
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
    int64_t rows = hcp__rows_before(p->length, p->degree, k, p->length);
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
  for (int32_t tries = 4 * p->degree; tries > 0 && exchange(p); tries--) {
  }
  give_rows(p, each);
  return busiest(p);
}

static void zigzag_chunks(problem *p) {
  p->count = 2 * p->degree;
  for (int32_t c = 0; c < p->count; c++) {
    int64_t start = hcp__chunk_start(p->length, p->degree, c);
    p->chunks[c] = (hcp__chunk){start, hcp__chunk_start(p->length, p->degree, c + 1) - start,
                                c < p->degree ? c : p->count - 1 - c};
  }
}

/* The best cut with as few chunks as are good; *cut stays NULL where that is zigzag. */
static int solve(problem *p, hcp__cut **cut) {
  zigzag_chunks(p);
  int64_t top = busiest(p);
  for (int32_t each = FEWEST_CHUNKS; each <= MOST_CHUNKS && !is_good(p, top); each *= 2) {
    if (p->length / p->degree < each || each * p->degree > p->room) break;
    int64_t found = cut_into(p, each);
    if (found >= top) continue;
    free(*cut);
    *cut = hcp__cut_create(p->chunks, p->count, p->degree);
    if (*cut == NULL) return 0;
    top = found;
  }
  return 1;
}

int hcp__cut_balanced(const hcp_plan *plan, int32_t sequence, int32_t degree, hcp__cut **cut) {
  int32_t room = degree * MOST_CHUNKS < CHUNKS_MAX ? degree * MOST_CHUNKS : CHUNKS_MAX;
  if (room < degree * FEWEST_CHUNKS) room = degree * FEWEST_CHUNKS;
  size_t places = (size_t)degree, chunks = (size_t)room;
  problem p = {.plan = plan, .sequence = sequence, .degree = degree, .room = room};
  p.length = plan->lengths[sequence];
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
