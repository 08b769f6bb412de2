/* route.c - rows to where they are computed, and back; rows along a sequence. */
#include <stdlib.h>

#include "internal.h"

/* Scratch lists after the sections: moves of (here, wire, rows), where here is
 * a row of the source (LOADS) or of the output (STORES). */
enum { LOADS = HCP_ROUTE_SECTION_COUNT, STORES, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_ROUTE_SECTIONS(WIDTH)
#undef WIDTH
        3,
    3};

typedef struct totals {
  int64_t source, sent, received, output;
} totals;

static void append_move(hcp__lists *lists, int32_t list, int64_t here, int64_t wire, int64_t rows) {
  if (rows > 0) hcp__append(lists, list, (const int64_t[]){here, wire, rows});
}

/* PACK is the loads in wire order. */
static void append_pack(hcp__lists *lists, int32_t loads) {
  hcp__sort_by(lists, loads, 1);
  for (int64_t i = 0; i < hcp__records(lists, loads); i++) {
    const int64_t *move = hcp__record(lists, loads, i);
    hcp__append_rows(lists, HCP_ROUTE_PACK, move[0], move[2]);
  }
}

/* ARRANGE is the stores in output order; what none of them fills is zeros. */
static void append_arrange(hcp__lists *lists, int32_t stores, int64_t output_rows) {
  int64_t filled = 0;
  hcp__sort_by(lists, stores, 0);
  for (int64_t i = 0; i < hcp__records(lists, stores); i++) {
    const int64_t *move = hcp__record(lists, stores, i);
    hcp__append_rows(lists, HCP_ROUTE_ARRANGE, -1, move[0] - filled);
    hcp__append_rows(lists, HCP_ROUTE_ARRANGE, move[1], move[2]);
    filled = move[0] + move[2];
  }
  hcp__append_rows(lists, HCP_ROUTE_ARRANGE, -1, output_rows - filled);
}

/* The way back packs what the way there stores, and the other way round. */
static hcp_status finish(hcp__lists *lists, totals total, int32_t reverse, hcp_table **route,
                         hcp_error *err) {
  if (reverse) total = (totals){total.output, total.received, total.sent, total.source};
  hcp__append(lists, HCP_ROUTE_SIZES,
              (const int64_t[]){total.source, total.sent, total.received, total.output});
  append_pack(lists, reverse ? STORES : LOADS);
  append_arrange(lists, reverse ? LOADS : STORES, total.output);
  return hcp__table_create(lists, HCP_ROUTE_SECTION_COUNT, route, err);
}

/* ---- dispatch ---- */

typedef struct dispatch {
  const hcp_plan *plan;
  const int32_t *sources;
  int32_t rank, first, count;
  /* n: where each sequence that rank loaded starts in its source; -1: none of the micro-batches
   * has it. Until place_sources, 0: one has. */
  int64_t *rows;
  int64_t *sends;    /* ranks + 1: wire rows to each peer, first counted, then placed */
  int64_t *receives; /* ranks + 1 */
} dispatch;

/* Calls visit for every sequence of the chosen micro-batches, in their order. */
static void each_sequence(const dispatch *d, hcp__lists *lists, totals *total,
                          void (*visit)(const dispatch *, hcp__lists *, totals *, const hcp_group *,
                                        int32_t)) { /* the last is an index of the group's */
  for (int32_t m = d->first; m < d->first + d->count; m++) {
    const hcp_micro_batch *batch = &d->plan->micro_batches[m];
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
      const hcp_group *group = &d->plan->groups[g];
      for (int32_t s = 0; s < group->sequences; s++) visit(d, lists, total, group, s);
    }
  }
}

/* A rank's rows in each micro-batch. */
static void append_parts(const dispatch *d, hcp__lists *lists) {
  for (int32_t m = d->first; m < d->first + d->count; m++) {
    const hcp_group *group = hcp__group_of(d->plan, m, d->rank);
    int32_t j = group == NULL ? 0 : d->rank - group->first_rank;
    int64_t rows = group == NULL ? 0 : hcp__rank_rows(d->plan, group, j);
    if (group != NULL) rows += hcp__padding(d->plan, group, j);
    hcp__append(lists, HCP_ROUTE_PARTS, &rows);
  }
}

/* Whether the rank loaded a sequence of that source, or holds rows of the group.
 * Most sequences of a large domain are neither: nothing else is read of them. */
static int takes_part(const dispatch *d, const hcp_group *group, int32_t source) {
  int32_t j = d->rank - group->first_rank;
  return source == d->rank || (j >= 0 && j < group->degree);
}

static void count_sequence(const dispatch *d, hcp__lists *lists, totals *total,
                           const hcp_group *group, int32_t index) {
  int32_t sequence = d->plan->sequences[group->first_sequence + index];
  int32_t source = d->sources[sequence], j = d->rank - group->first_rank;
  (void)lists;
  if (!takes_part(d, group, source)) return;
  hcp__zigzag z = hcp__zigzag_of(d->plan, sequence, group->degree);
  if (source == d->rank) {
    d->rows[sequence] = 0; /* chosen: placed by index afterwards */
    total->source += z.length;
    for (int32_t k = 0; k < group->degree; k++)
      d->sends[group->first_rank + k + 1] += hcp__zigzag_rows(&z, k);
  }
  if (j >= 0 && j < group->degree) d->receives[source + 1] += hcp__zigzag_rows(&z, j);
}

static void place_sequence(const dispatch *d, hcp__lists *lists, totals *total,
                           const hcp_group *group, int32_t index) {
  int32_t sequence = d->plan->sequences[group->first_sequence + index];
  int32_t source = d->sources[sequence], j = d->rank - group->first_rank;
  hcp__piece own[2];
  const hcp__piece *pieces;
  if (!takes_part(d, group, source)) return;
  hcp__zigzag z = hcp__zigzag_of(d->plan, sequence, group->degree);
  for (int32_t k = 0; source == d->rank && k < group->degree; k++) {
    int32_t n = hcp__held(d->plan, group, index, k, own, &pieces);
    int64_t *wire = &d->sends[group->first_rank + k];
    for (int32_t p = 0; p < n; p++) {
      append_move(lists, LOADS, d->rows[sequence] + pieces[p].start, *wire, pieces[p].rows);
      *wire += pieces[p].rows;
      total->sent += pieces[p].rows;
    }
  }
  if (j < 0 || j >= group->degree) return;
  int64_t rows = hcp__zigzag_rows(&z, j);
  append_move(lists, STORES, total->output, d->receives[source], rows);
  d->receives[source] += rows;
  total->received += rows;
  total->output += rows;
  if (index == group->sequences - 1) total->output += hcp__padding(d->plan, group, j);
}

static void prefix_sums(int64_t *starts, int32_t ranks) {
  for (int32_t r = 0; r < ranks; r++) starts[r + 1] += starts[r];
}

static void place_sources(const dispatch *d) {
  int64_t row = 0;
  for (int32_t i = 0; i < d->plan->n; i++)
    if (d->rows[i] == 0) {
      d->rows[i] = row;
      row += d->plan->lengths[i];
    }
}

hcp_status hcp__check_sources(const hcp_plan *plan, const int32_t *sources, int32_t rank,
                              hcp_error *err) {
  if (rank < 0 || rank >= plan->limits.ranks)
    return hcp__fail(err, HCP_INVALID, "rank is %d, expected 0 to %d", rank,
                     plan->limits.ranks - 1);
  for (int32_t i = 0; i < plan->n; i++)
    if (sources[i] < 0 || sources[i] >= plan->limits.ranks)
      return hcp__fail(err, HCP_INVALID, "sources[%d] is %d, expected 0 to %d", i, sources[i],
                       plan->limits.ranks - 1);
  return HCP_OK;
}

static hcp_status check_dispatch(const hcp_plan *plan, const int32_t *sources, int32_t rank,
                                 int32_t first, int32_t count, hcp_error *err) {
  if (first < 0 || count < 0 || first > plan->micro_batch_count - count)
    return hcp__fail(err, HCP_INVALID,
                     "first is %d and count %d, expected first >= 0, count >= 0 and first + count "
                     "<= %d (the plan's micro-batches)",
                     first, count, plan->micro_batch_count);
  return hcp__check_sources(plan, sources, rank, err);
}

static hcp_status build_dispatch(const dispatch *d, int32_t reverse, hcp_table **route,
                                 hcp_error *err) {
  hcp__lists lists;
  totals total = {0, 0, 0, 0};
  int32_t ranks = d->plan->limits.ranks;
  hcp__lists_init(&lists, widths, LIST_COUNT);
  for (int32_t i = 0; i < d->plan->n; i++) d->rows[i] = -1;
  each_sequence(d, &lists, &total, count_sequence);
  place_sources(d);
  prefix_sums(d->sends, ranks);
  prefix_sums(d->receives, ranks);
  hcp__append_peers(&lists, reverse ? HCP_ROUTE_RECEIVES : HCP_ROUTE_SENDS, d->sends, ranks);
  hcp__append_peers(&lists, reverse ? HCP_ROUTE_SENDS : HCP_ROUTE_RECEIVES, d->receives, ranks);
  each_sequence(d, &lists, &total, place_sequence);
  if (!reverse) append_parts(d, &lists);
  hcp_status status = finish(&lists, total, reverse, route, err);
  hcp__lists_release(&lists);
  return status;
}

hcp_status hcp_route_dispatch(const hcp_plan *plan, const int32_t *sources, int32_t rank,
                              int32_t first, int32_t count, int32_t reverse, hcp_table **route,
                              hcp_error *err) {
  hcp_status status = check_dispatch(plan, sources, rank, first, count, err);
  if (status != HCP_OK) return status;
  size_t n = (size_t)plan->n, ranks = (size_t)plan->limits.ranks;
  dispatch d = {.plan = plan, .sources = sources, .rank = rank, .first = first, .count = count};
  d.rows = calloc(n + 2 * (ranks + 1), sizeof *d.rows);
  if (d.rows == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a route");
  d.sends = d.rows + n;
  d.receives = d.sends + ranks + 1;
  status = build_dispatch(&d, reverse, route, err);
  free(d.rows);
  return status;
}

/* ---- roll ---- */

/* Each piece of a rank becomes the tokens from `shift` before its start on, on its path,
 * `more` tokens more than it has. */
typedef struct roll {
  const hcp_plan *plan;
  const hcp_group *group;
  int64_t shift, more;
  int64_t *rows; /* scratch for every piece of a place */
} roll;

/* Pieces of a sequence that one rank holds. */
typedef struct holding {
  const hcp__piece *pieces;
  int32_t count;
} holding;

/* The owner's side of an exchange of a sequence's rows, and where these are noted. */
typedef struct exchange {
  holding owned;
  const int64_t *rows; /* of the owner's, where each piece begins */
  int loads;
  hcp__lists *lists;
  int64_t *wire;
} exchange;

/* The first piece that ends after a token. */
static int32_t piece_after(const holding *of, int64_t token) {
  int32_t low = 0, high = of->count;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (of->pieces[middle].start + of->pieces[middle].rows > token)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/* Appends the owner's tokens of [begin, end), of which the reader wants the first at a row. */
static void append_tokens(const exchange *x, int64_t begin, int64_t end, int64_t reader_row) {
  if (begin >= end) return;
  for (int32_t o = piece_after(&x->owned, begin); o < x->owned.count; o++) {
    const hcp__piece *piece = &x->owned.pieces[o];
    if (piece->start >= end) return;
    int64_t first = hcp__most(piece->start, begin);
    int64_t last = hcp__least(piece->start + piece->rows, end);
    int64_t here = x->loads ? x->rows[o] + first - piece->start : reader_row + first - begin;
    append_move(x->lists, x->loads ? LOADS : STORES, here, *x->wire, last - first);
    *x->wire += last - first;
  }
}

/* Appends the rows of an owner's pieces that a reader's piece wants: of its stretch, then of those
 * that this one continues. */
static void append_piece(const roll *r, const exchange *x, int32_t sequence, hcp__piece wanted,
                         int64_t reader_row) {
  int64_t i = hcp__stretch_at(r->plan, sequence, wanted.start);
  int64_t from = wanted.start - r->shift, end = from + wanted.rows + r->more;
  hcp__piece stretch = hcp__stretch(r->plan, sequence, i);
  int64_t start = stretch.start,
          stop = stretch.start + stretch.rows; /* as if its path had no gap */
  for (;;) {
    int64_t begin = hcp__most(from, start), ahead = stretch.start - start;
    append_tokens(x, begin + ahead, hcp__least(end, stop) + ahead, reader_row + begin - from);
    i = start > from ? hcp__stretch_parent(r->plan, sequence, i) : -1;
    if (i < 0) return;
    stretch = hcp__stretch(r->plan, sequence, i);
    stop = start;
    start -= stretch.rows;
  }
}

/* Appends the rows of `owner` that `reader` wants, in the order in which they
 * travel: sequence by sequence, the reader's pieces, the owner's pieces. The
 * owner notes where it loads them, the reader where it stores them. */
static void append_exchange(const roll *r, int32_t owner, int32_t reader, int loads,
                            hcp__lists *lists, int64_t *wire) {
  exchange x = {.rows = r->rows, .loads = loads, .lists = lists, .wire = wire};
  int64_t owner_row = 0, reader_row = 0;
  for (int32_t s = 0; s < r->group->sequences; s++) {
    hcp__piece own[2], theirs[2];
    const hcp__piece *wanted;
    int32_t sequence = r->plan->sequences[r->group->first_sequence + s];
    x.owned.count = hcp__held(r->plan, r->group, s, owner, own, &x.owned.pieces);
    int32_t count = hcp__held(r->plan, r->group, s, reader, theirs, &wanted);
    for (int32_t o = 0; o < x.owned.count; o++) {
      r->rows[o] = owner_row;
      owner_row += x.owned.pieces[o].rows;
    }
    for (int32_t w = 0; w < count; w++) {
      append_piece(r, &x, sequence, wanted[w], reader_row);
      reader_row += wanted[w].rows + r->more;
    }
  }
}

static int64_t pieces_of(const roll *r, int32_t j) {
  int64_t pieces = 0;
  for (int32_t s = 0; s < r->group->sequences; s++) {
    hcp__piece own[2];
    const hcp__piece *held;
    pieces += hcp__held(r->plan, r->group, s, j, own, &held);
  }
  return pieces;
}

static void append_peer(hcp__lists *lists, int32_t section, int32_t peer, int64_t start,
                        int64_t end) {
  if (end > start) hcp__append(lists, section, (const int64_t[]){peer, start, end - start});
}

static void roll_rows(const roll *r, int32_t j, hcp__lists *lists, totals *total) {
  for (int32_t k = 0; k < r->group->degree; k++) {
    int32_t peer = r->group->first_rank + k;
    int64_t sent = total->sent, received = total->received;
    append_exchange(r, j, k, 1, lists, &total->sent);
    append_exchange(r, k, j, 0, lists, &total->received);
    append_peer(lists, HCP_ROUTE_SENDS, peer, sent, total->sent);
    append_peer(lists, HCP_ROUTE_RECEIVES, peer, received, total->received);
  }
  total->source = hcp__rank_rows(r->plan, r->group, j) + hcp__padding(r->plan, r->group, j);
  total->output = total->source + pieces_of(r, j) * r->more;
}

/* The most pieces that a place has of a sequence. */
static int32_t most_pieces(const roll *r) {
  int32_t most = 1;
  for (int32_t s = 0; r->group != NULL && s < r->group->sequences; s++) {
    int32_t held = hcp__held_most(r->plan, r->group, s);
    most = held > most ? held : most;
  }
  return most;
}

static hcp_status build_roll(const hcp_plan *plan, int32_t micro_batch, int32_t rank, int64_t shift,
                             int64_t more, hcp_table **route, hcp_error *err) {
  hcp__lists lists;
  totals total = {0, 0, 0, 0};
  roll r = {plan, hcp__group_of(plan, micro_batch, rank), shift, more, NULL};
  r.rows = malloc((size_t)most_pieces(&r) * sizeof *r.rows);
  if (r.rows == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a route");
  hcp__lists_init(&lists, widths, LIST_COUNT);
  if (r.group != NULL) roll_rows(&r, rank - r.group->first_rank, &lists, &total);
  hcp_status status = finish(&lists, total, 0, route, err);
  hcp__lists_release(&lists);
  free(r.rows);
  return status;
}

static hcp_status expect_one_after(const hcp_plan *plan, int64_t shift, hcp_error *err) {
  if (hcp_plan_expect_no_branches(plan, "", NULL) == HCP_OK) return HCP_OK;
  return hcp__fail(
      err, HCP_INVALID,
      "cp.roll_tensor is called in a plan in which the mask of sequence %d has branches "
      "(a tree, a shared prefix), expected none: shifts is %lld, and several tokens may "
      "follow one; load what follows each row as a field, such as the labels of "
      "hcp.prefix_trees, or plan each branch as a sequence of its own",
      plan->documents->branching, (long long)shift);
}

hcp_status hcp_route_roll(const hcp_plan *plan, int32_t micro_batch, int32_t rank, int64_t shift,
                          hcp_table **route, hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status == HCP_OK)
    status = shift < 0 ? expect_one_after(plan, shift, err)
                       : hcp_plan_expect_trees(plan, "hcp_route_roll", err);
  if (status != HCP_OK) return status;
  if (shift < -HCP__LENGTH_MAX || shift > HCP__LENGTH_MAX)
    return hcp__fail(err, HCP_INVALID, "shift is %lld, expected -2^40 to 2^40", (long long)shift);
  return build_roll(plan, micro_batch, rank, shift, 0, route, err);
}

/* Rows before each span with which no rank of the group has 2^31 rows or more. */
static int64_t most_before_in(const hcp_plan *plan, const hcp_group *group) {
  int64_t rows = plan->limits.alignment, spans = 0;
  for (int32_t s = 0; s < group->sequences; s++) {
    int64_t length = plan->lengths[plan->sequences[group->first_sequence + s]];
    rows += hcp_rows_max(length, group->degree);
    spans += hcp__held_most(plan, group, s);
  }
  return rows < INT32_MAX && spans > 0 ? (INT32_MAX - rows) / spans : 0;
}

/* The same for all ranks of the micro-batch, so that none refuses alone. */
static int64_t most_before(const hcp_plan *plan, int32_t micro_batch) {
  const hcp_micro_batch *batch = &plan->micro_batches[micro_batch];
  int64_t least = INT32_MAX;
  for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
    int64_t most = most_before_in(plan, &plan->groups[g]);
    if (most < least) least = most;
  }
  return least;
}

hcp_status hcp_route_halo(const hcp_plan *plan, int32_t micro_batch, int32_t rank, int64_t before,
                          hcp_table **route, hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status == HCP_OK) status = hcp_plan_expect_trees(plan, "hcp_route_halo", err);
  if (status != HCP_OK) return status;
  int64_t most = most_before(plan, micro_batch);
  if (before < 0 || before > most)
    return hcp__fail(err, HCP_INVALID,
                     "before is %lld, expected 0 to %lld, so that each rank has fewer than 2^31 "
                     "rows in micro-batch %d, those before every span counted",
                     (long long)before, (long long)most, micro_batch);
  return build_roll(plan, micro_batch, rank, before, before, route, err);
}
