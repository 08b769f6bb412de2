/* view.c - who holds which tokens of a group's sequences, and who sees which, in one layer.
 *
 * Without masks a sequence is one slice and its cut is the zigzag, so that what a place holds
 * and needs has closed forms. With masks both are lists.
 *
 * A layer's limits count positions. In a run of positions, position less token is one
 * number: slices that are cut where runs meet have limits that count tokens. */
#include "view.h"

#include <stdlib.h>

static int32_t sequence_of(const hcp__view *v, int32_t s) {
  return v->plan->sequences[v->group->first_sequence + s];
}

/* Who sees keys: each place and, of several nodes, each as a whole. */
static int64_t readers_of(const hcp__view *v) { return v->degree + (v->nodes > 1 ? v->nodes : 0); }

static int64_t chunks_of(const hcp__view *v) { return 2 * (int64_t)v->degree; }

/* ---- pieces ---- */

/* What `count` places from the first one on hold under zigzag. */
static int32_t zigzag_of(const hcp__view *v, int32_t s, int32_t first, int32_t count,
                         hcp__piece pieces[2]) {
  const int64_t *front = v->sequences[s].starts + first;
  const int64_t *back_end = v->sequences[s].starts + chunks_of(v) - first;
  return hcp__pieces_between(front[0], front[count], back_end[-count], back_end[0], pieces);
}

int32_t hcp__pieces_of(const hcp__view *v, int32_t s, int32_t k, hcp__piece own[2],
                       const hcp__piece **pieces) {
  const hcp__cut *cut = v->sequences[s].cut;
  *pieces = own;
  if (cut == NULL) return zigzag_of(v, s, k, 1, own);
  *pieces = cut->pieces + cut->first[k];
  return cut->first[k + 1] - cut->first[k];
}

int64_t hcp__rows_up_to(const hcp__view *v, int32_t s, int32_t k, int64_t end) {
  hcp__piece own[2];
  const hcp__piece *pieces;
  int32_t n = hcp__pieces_of(v, s, k, own, &pieces);
  int64_t rows = 0;
  for (int32_t p = 0; p < n && pieces[p].start < end; p++)
    rows += hcp__least(pieces[p].rows, end - pieces[p].start);
  return rows;
}

int64_t hcp__rows_of(const hcp__view *v, int32_t s, int32_t k) {
  if (v->sequences[s].cut != NULL) return hcp__rows_up_to(v, s, k, v->sequences[s].length);
  const int64_t *front = v->sequences[s].starts + k;
  const int64_t *back_end = v->sequences[s].starts + chunks_of(v) - k;
  return front[1] - front[0] + back_end[0] - back_end[-1];
}

/* ---- slices under the layer's limits ---- */

int64_t hcp__slice_count(const hcp__view *v, int32_t s) {
  return v->masks == NULL ? 1 : v->slices[s + 1] - v->slices[s];
}

hcp_slice hcp__slice_at(const hcp__view *v, int32_t s, int64_t i) {
  int64_t length = v->sequences[s].length;
  if (v->masks == NULL) return (hcp_slice){0, length, 0, length, -v->limits.left, v->limits.right};
  const int64_t *x = hcp__record(v->lists, HCP__SLICES, v->slices[s] + i);
  return (hcp_slice){x[0], x[1], x[2], x[3], x[4], x[5]};
}

int hcp__narrow(hcp_slice *x, int64_t query_begin, int64_t query_end, int64_t key_begin,
                int64_t key_end) {
  x->query_begin = hcp__most(x->query_begin, query_begin);
  x->query_end = hcp__least(x->query_end, query_end);
  x->key_begin = hcp__most(x->key_begin, key_begin);
  x->key_end = hcp__least(x->key_end, key_end);
  if (x->low > x->high) return 0;
  x->query_begin = hcp__most(x->query_begin, x->key_begin - x->high);
  x->query_end = hcp__least(x->query_end, x->key_end - x->low);
  x->key_begin = hcp__most(x->key_begin, x->query_begin + x->low);
  x->key_end = hcp__least(x->key_end, x->query_end + x->high);
  return x->query_begin < x->query_end && x->key_begin < x->key_end;
}

/* Runs of positions of a sequence, one after the other. */
typedef struct runs {
  const hcp_position_run *run;
  int64_t count, length; /* runs, and tokens */
} runs;

/* One run of all tokens where no limit counts positions. */
static runs runs_of(const hcp__view *v, int32_t s) {
  static const hcp_position_run places = {0, 0};
  const int64_t *first = v->masks->first_run;
  int32_t sequence = sequence_of(v, s);
  int limited = v->limits.left < HCP__LENGTH_MAX || v->limits.right < HCP__LENGTH_MAX;
  if (!limited || first == NULL || first[sequence] == first[sequence + 1])
    return (runs){&places, 1, v->sequences[s].length};
  return (runs){v->masks->runs + first[sequence], first[sequence + 1] - first[sequence],
                v->sequences[s].length};
}

static int64_t run_end(const runs *of, int64_t r) {
  return r + 1 < of->count ? of->run[r + 1].token : of->length;
}

/* The run that has the token. */
static int64_t run_at(const runs *of, int64_t token) {
  return hcp__last_up_to(&of->run->token, HCP__RUN_WORDS, of->count, token);
}

/* What is left of a slice for queries of one run and keys of another. */
static void append_limited(hcp__view *v, hcp_slice x, const runs *of, int64_t queries,
                           int64_t keys) {
  const hcp_position_run *q = &of->run[queries], *k = &of->run[keys];
  /* A key's position less a query's, beyond the tokens between them. */
  int64_t shift = (k->position - k->token) - (q->position - q->token);
  x.low = hcp__most(x.low, -v->limits.left - shift);
  x.high = hcp__least(x.high, v->limits.right - shift);
  if (hcp__narrow(&x, q->token, run_end(of, queries), k->token, run_end(of, keys)))
    hcp__append(
        v->lists, HCP__SLICES,
        (const int64_t[]){x.query_begin, x.query_end, x.key_begin, x.key_end, x.low, x.high});
}

/* Cuts a slice where runs meet. */
static void append_slices(hcp__view *v, const hcp_slice *x, const runs *of) {
  for (int64_t q = run_at(of, x->query_begin); q < of->count; q++) {
    if (of->run[q].token >= x->query_end) break;
    for (int64_t k = run_at(of, x->key_begin); k < of->count; k++) {
      if (of->run[k].token >= x->key_end) break;
      append_limited(v, *x, of, q, k);
    }
  }
}

/* By the first query, the first key, and the lower limit: no two slices have all three. */
static int by_corner(const void *a, const void *b) {
  const int64_t *x = a, *y = b;
  for (int32_t i = 0; i < 4; i += 2)
    if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
  return (x[4] > y[4]) - (x[4] < y[4]);
}

/* Finds the slices of all sequences of the group. */
static void find_slices(hcp__view *v) {
  for (int32_t s = 0; s < v->group->sequences; s++) {
    int32_t sequence = sequence_of(v, s);
    runs of = runs_of(v, s);
    int64_t first = v->slices[s] = hcp__records(v->lists, HCP__SLICES);
    for (int64_t i = v->masks->first[sequence]; i < v->masks->first[sequence + 1]; i++)
      append_slices(v, &v->masks->slices[i], &of);
    int64_t count = hcp__records(v->lists, HCP__SLICES) - first;
    if (count > 1)
      qsort(v->lists->list[HCP__SLICES].words + 6 * first, (size_t)count, 6 * sizeof(int64_t),
            by_corner);
  }
  v->slices[v->group->sequences] = hcp__records(v->lists, HCP__SLICES);
}

/* ---- needs ---- */

/* (first token, end): ascending; they do not touch. */
typedef int64_t need[2];

static int by_begin(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* Joins needs that touch, in ascending order. Returns how many are left. */
static int64_t join_needs(need *list, int64_t count) {
  int64_t kept = 0;
  for (int64_t i = 1; i < count; i++) {
    if (list[i][0] <= list[kept][1]) {
      list[kept][1] = hcp__most(list[kept][1], list[i][1]);
    } else {
      kept++;
      list[kept][0] = list[i][0];
      list[kept][1] = list[i][1];
    }
  }
  return count > 0 ? kept + 1 : 0;
}

/* Appends what place k sees of a sequence. */
static void append_needs(hcp__view *v, int32_t s, int32_t k) {
  hcp__piece own[2];
  const hcp__piece *pieces;
  int32_t n = hcp__pieces_of(v, s, k, own, &pieces);
  int64_t length = v->sequences[s].length;
  for (int32_t p = 0; p < n; p++)
    for (int64_t i = 0; i < hcp__slice_count(v, s); i++) {
      hcp_slice x = hcp__slice_at(v, s, i);
      if (x.query_begin >= pieces[p].start + pieces[p].rows) break;
      if (hcp__narrow(&x, pieces[p].start, pieces[p].start + pieces[p].rows, 0, length))
        hcp__append(v->lists, HCP__NEEDS, (const int64_t[]){x.key_begin, x.key_end});
    }
}

static void find_needs(hcp__view *v, int32_t s, int32_t reader) {
  hcp__list *list = &v->lists->list[HCP__NEEDS];
  int64_t first = hcp__records(v->lists, HCP__NEEDS);
  int32_t begin = reader, end = reader + 1;
  if (reader >= v->degree) {
    begin = hcp__place_at(v, reader - v->degree, 0);
    end = begin + v->seats;
  }
  v->needs[s * readers_of(v) + reader] = first;
  for (int32_t k = begin; k < end; k++) append_needs(v, s, k);
  int64_t count = hcp__records(v->lists, HCP__NEEDS) - first;
  if (v->lists->failed || count == 0) return;
  need *found = (need *)(list->words + 2 * first);
  qsort(found, (size_t)count, sizeof *found, by_begin);
  list->count = 2 * (first + join_needs(found, count));
}

static void find_all_needs(hcp__view *v) {
  for (int32_t s = 0; s < v->group->sequences; s++)
    for (int32_t k = 0; k < readers_of(v); k++) find_needs(v, s, k);
  v->needs[v->group->sequences * readers_of(v)] = hcp__records(v->lists, HCP__NEEDS);
}

/* What a reader needs of a sequence; *needs is own where that has a closed form. */
static int64_t needs_of(const hcp__view *v, int32_t s, int32_t reader, need own[2],
                        const need **needs) {
  const hcp__sequence *of = &v->sequences[s];
  if (v->masks != NULL) {
    const int64_t *first = &v->needs[s * readers_of(v) + reader];
    *needs = (const need *)hcp__record(v->lists, HCP__NEEDS, first[0]);
    return first[1] - first[0];
  }
  hcp__piece queries[2];
  int32_t whole = reader >= v->degree; /* a node holds what its places do */
  int32_t n = zigzag_of(v, s, whole ? (reader - v->degree) * v->seats : reader,
                        whole ? v->seats : 1, queries);
  for (int32_t q = 0; q < n; q++) {
    own[q][0] = hcp__most(0, queries[q].start - v->limits.left);
    own[q][1] = hcp__least(of->length, queries[q].start + queries[q].rows + v->limits.right);
  }
  *needs = (const need *)own;
  return join_needs(own, n);
}

/* ---- rows that a reader sees ---- */

static int grow(hcp__seen *seen) {
  int64_t room = seen->room ? 2 * seen->room : 16;
  hcp__rows *list = realloc(seen->list, (size_t)room * sizeof *list);
  if (list == NULL) return 0;
  seen->list = list;
  seen->room = room;
  return 1;
}

static void add(hcp__view *v, hcp__seen *seen, int64_t token, int64_t rows, int64_t owner,
                int64_t row) {
  if (seen->count == seen->room && !grow(seen))
    v->lists->failed = 1;
  else
    seen->list[seen->count++] = (hcp__rows){token, rows, owner, row};
}

static void add_tokens(hcp__view *v, int32_t s, int32_t owner, int32_t reader, hcp__seen *seen) {
  hcp__piece held[2];
  need needed[2];
  const hcp__piece *pieces;
  const need *needs;
  int32_t n = hcp__pieces_of(v, s, owner, held, &pieces), p = 0;
  int64_t count = needs_of(v, s, reader, needed, &needs), row = 0;
  for (int64_t i = 0; i < count; i++) {
    while (p < n && pieces[p].start + pieces[p].rows <= needs[i][0]) row += pieces[p++].rows;
    int64_t at = row;
    for (int32_t q = p; q < n && pieces[q].start < needs[i][1]; q++) {
      int64_t begin = hcp__most(needs[i][0], pieces[q].start);
      int64_t end = hcp__least(needs[i][1], pieces[q].start + pieces[q].rows);
      add(v, seen, begin, end - begin, owner, at + begin - pieces[q].start);
      at += pieces[q].rows;
    }
  }
}

void hcp__find_tokens(hcp__view *v, int32_t s, int32_t owner, int32_t reader, hcp__seen *seen) {
  seen->count = 0;
  if (!v->lists->failed) add_tokens(v, s, owner, reader, seen);
}

void hcp__join_rows(hcp__seen *seen) {
  int64_t kept = 0;
  for (int64_t i = 1; i < seen->count; i++) {
    hcp__rows *last = &seen->list[kept];
    if (last->row + last->rows == seen->list[i].row)
      last->rows += seen->list[i].rows;
    else
      seen->list[++kept] = seen->list[i];
  }
  if (seen->count > 0) seen->count = kept + 1;
}

int64_t hcp__find_rows(hcp__view *v, int32_t s, int32_t owner, int32_t reader, hcp__seen *seen) {
  hcp__find_tokens(v, s, owner, reader, seen);
  if (v->masks == NULL) hcp__join_rows(seen);
  return hcp__count_rows(seen);
}

static int by_token(const void *a, const void *b) {
  const hcp__rows *x = a, *y = b;
  return (x->token > y->token) - (x->token < y->token);
}

/* The chunk that has a token. */
static int64_t chunk_at(const hcp__view *v, int32_t s, int64_t token) {
  const int64_t *starts = v->sequences[s].starts;
  return hcp__last_up_to(starts, 1, chunks_of(v), token);
}

/* Tokens that other places hold, chunk after chunk. */
static void add_chunks(hcp__view *v, int32_t s, const need tokens, hcp__seen *seen) {
  const int64_t *starts = v->sequences[s].starts;
  int64_t begin = tokens[0], chunks = chunks_of(v);
  for (int64_t c = chunk_at(v, s, begin); begin < tokens[1]; c++) {
    int64_t owner = hcp__least(c, chunks - 1 - c), end = hcp__least(tokens[1], starts[c + 1]);
    int64_t before = owner == c ? 0 : starts[owner + 1] - starts[owner];
    if (begin < end && owner != v->j)
      add(v, seen, begin, end - begin, owner, before + begin - starts[c]);
    begin = end;
  }
}

void hcp__find_keys(hcp__view *v, int32_t s, int32_t begin, int32_t end, hcp__seen *seen) {
  seen->count = 0;
  if (v->lists->failed) return;
  if (v->masks == NULL && end - begin == v->degree) { /* chunks say who has what */
    need needed[2];
    const need *needs;
    int64_t count = needs_of(v, s, v->j, needed, &needs);
    for (int64_t i = 0; i < count; i++) add_chunks(v, s, needs[i], seen);
    return;
  }
  for (int32_t k = begin; k < end; k++)
    if (k != v->j) add_tokens(v, s, k, v->j, seen);
  if (seen->count > 1) qsort(seen->list, (size_t)seen->count, sizeof *seen->list, by_token);
}

int64_t hcp__count_rows(const hcp__seen *seen) {
  int64_t rows = 0;
  for (int64_t i = 0; i < seen->count; i++) rows += seen->list[i].rows;
  return rows;
}

int64_t hcp__place_in(const hcp__seen *seen, int64_t row) {
  int64_t place = 0;
  for (int64_t i = 0; i < seen->count && seen->list[i].row <= row; i++)
    place += hcp__least(row - seen->list[i].row, seen->list[i].rows);
  return place;
}

int64_t hcp__row_at(const hcp__seen *seen, int64_t place) {
  int64_t i = 0;
  for (; i + 1 < seen->count && place >= seen->list[i].rows; i++) place -= seen->list[i].rows;
  return seen->list[i].row + place;
}

/* ---- the value ---- */

/* Where the chunks of a sequence start, as hcp__chunk_start has it. */
static void find_starts(const hcp__view *v, int32_t s, int64_t *starts) {
  int64_t chunks = 2 * (int64_t)v->group->degree;
  int64_t inner = v->group->degree / v->degree; /* chunks of the group that are one of the view's */
  hcp__zigzag z = hcp__zigzag_of(v->plan, sequence_of(v, s), v->group->degree);
  int64_t rest = z.length % chunks, each = z.length / chunks * inner + rest * inner / chunks;
  int64_t start = 0, over = z.turn * rest % chunks, more = rest * inner % chunks;
  for (int64_t k = 0; k <= chunks_of(v); k++) {
    starts[k] = start;
    start += each;
    over += more;
    if (over < chunks) continue;
    over -= chunks;
    start++;
  }
}

/* Places hold what masks cut, unless one place has everything. */
static int make_cuts(hcp__view *v, int64_t *starts) {
  for (int32_t s = 0; s < v->group->sequences; s++) {
    hcp__sequence *of = &v->sequences[s];
    const hcp__cut *cut = v->masks == NULL ? NULL : v->plan->cuts[sequence_of(v, s)];
    of->length = v->plan->lengths[sequence_of(v, s)];
    of->starts = starts;
    find_starts(v, s, starts);
    starts += chunks_of(v) + 1;
    if (cut == NULL || v->degree == 1) continue;
    of->cut = hcp__cut_create(cut->chunks, cut->count, v->degree); /* without documents' borders */
    if (of->cut == NULL) return 0;
  }
  return 1;
}

/* One allocation: the sequences, then the arrays. */
hcp_status hcp__view_open(hcp__view *v, hcp_error *err) {
  size_t sequences = (size_t)v->group->sequences, starts = sequences * (size_t)(chunks_of(v) + 1);
  size_t firsts = v->masks == NULL ? 0 : sequences + 1 + sequences * (size_t)readers_of(v) + 1;
  v->sequences = calloc(1, sequences * sizeof *v->sequences + (starts + firsts) * sizeof(int64_t));
  if (v->sequences == NULL || !make_cuts(v, (int64_t *)(v->sequences + sequences)))
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a schedule");
  if (v->masks == NULL) return HCP_OK;
  v->slices = (int64_t *)(v->sequences + sequences) + starts;
  v->needs = v->slices + sequences + 1;
  find_slices(v);
  if (v->degree > 1) find_all_needs(v);
  return HCP_OK;
}

void hcp__view_close(hcp__view *v) {
  for (int32_t s = 0; v->sequences != NULL && s < v->group->sequences; s++)
    free(v->sequences[s].cut);
  free(v->sequences);
}
