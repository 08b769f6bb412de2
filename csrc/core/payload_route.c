/* payload_route.c - the tables of a payload: rows to where they are used, results to tokens. */
#include <stdlib.h>

#include "payload.h"

/* Scratch lists after the sections. SENT has (peer, row, rows), GOT (peer, rows): in the order of
 * the output; the runs between two ranks are listed in one order by both. LOADS has (row, wire,
 * rows). PIECES has what hcp__append_pieces gives; TAKEN (index of the sequence, first taker, end)
 * of a rank's spans, and HELD the same of what ranks have, then how many come before. */
enum { SENT = HCP_ROUTE_SECTION_COUNT, GOT, LOADS, PIECES, TAKEN, HELD, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_ROUTE_SECTIONS(WIDTH)
#undef WIDTH
        [SENT] = 3,
    [GOT] = 2,
    [LOADS] = 3,
    [PIECES] = 3,
    [TAKEN] = 3,
    [HELD] = 4};

/* ---- a route of runs ---- */

static void append_sent(hcp__lists *lists, int64_t peer, int64_t row, int64_t rows) {
  if (rows > 0) hcp__append(lists, SENT, (const int64_t[]){peer, row, rows});
}

static void append_got(hcp__lists *lists, int64_t peer, int64_t rows) {
  if (rows > 0) hcp__append(lists, GOT, (const int64_t[]){peer, rows});
}

/* Where the rows of each peer begin, for ranks + 1 of them: `rows` is a word of the list. Returns
 * how many there are. */
static int64_t place_peers(const hcp__lists *lists, int32_t list, int32_t rows, int64_t *starts,
                           int32_t ranks) {
  for (int64_t i = 0; i < hcp__records(lists, list); i++)
    starts[hcp__record(lists, list, i)[0] + 1] += hcp__record(lists, list, i)[rows];
  for (int32_t r = 0; r < ranks; r++) starts[r + 1] += starts[r];
  return starts[ranks];
}

static void append_pack(hcp__lists *lists, int64_t *starts) {
  for (int64_t i = 0; i < hcp__records(lists, SENT); i++) {
    const int64_t *run = hcp__record(lists, SENT, i);
    hcp__append(lists, LOADS, (const int64_t[]){run[1], starts[run[0]], run[2]});
    starts[run[0]] += run[2];
  }
  hcp__sort_by(lists, LOADS, 1);
  for (int64_t i = 0; i < hcp__records(lists, LOADS); i++)
    hcp__append_rows(lists, HCP_ROUTE_PACK, hcp__record(lists, LOADS, i)[0],
                     hcp__record(lists, LOADS, i)[2]);
}

static void append_arrange(hcp__lists *lists, int64_t *starts) {
  for (int64_t i = 0; i < hcp__records(lists, GOT); i++) {
    const int64_t *run = hcp__record(lists, GOT, i);
    hcp__append_rows(lists, HCP_ROUTE_ARRANGE, starts[run[0]], run[1]);
    starts[run[0]] += run[1];
  }
}

/* Makes the route that SENT and GOT say, and releases the lists. */
static hcp_status finish(hcp__lists *lists, int32_t ranks, int64_t source_rows, hcp_table **route,
                         hcp_error *err) {
  int64_t *sends = calloc(2 * ((size_t)ranks + 1), sizeof *sends);
  hcp_status status = HCP_NO_MEMORY;
  if (sends == NULL || lists->failed) {
    hcp__fail(err, HCP_NO_MEMORY, "out of memory for a route");
    goto fail;
  }
  int64_t *receives = sends + ranks + 1;
  int64_t sent = place_peers(lists, SENT, 2, sends, ranks);
  int64_t received = place_peers(lists, GOT, 1, receives, ranks);
  hcp__append(lists, HCP_ROUTE_SIZES, (const int64_t[]){source_rows, sent, received, received});
  hcp__append_peers(lists, HCP_ROUTE_SENDS, sends, ranks);
  hcp__append_peers(lists, HCP_ROUTE_RECEIVES, receives, ranks);
  append_pack(lists, sends);
  append_arrange(lists, receives);
  status = hcp__table_create(lists, HCP_ROUTE_SECTION_COUNT, route, err);
fail:
  free(sends);
  hcp__lists_release(lists);
  return status;
}

static void clear(hcp__lists *lists, int32_t list) { lists->list[list].count = 0; }

/* of_units asks for units, which TOKENS cuts. */
static hcp_status check_share(const hcp__share *of, hcp_error *err) {
  if (!of->of_units || of->payload->split != HCP_SPLIT_TOKENS) return HCP_OK;
  return hcp__fail(err, HCP_INVALID, "of_units is %d under \"tokens\", which cut units, expected 0",
                   of->of_units);
}

/* ---- a row of each sequence ---- */

hcp_status hcp_route_by_sequence(const hcp_plan *plan, const int32_t *sources, int32_t micro_batch,
                                 int32_t rank, hcp_table **route, hcp_error *err) {
  hcp__lists lists;
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status == HCP_OK) status = hcp__check_sources(plan, sources, rank, err);
  if (status != HCP_OK) return status;
  hcp__lists_init(&lists, widths, LIST_COUNT);
  const hcp_micro_batch *batch = &plan->micro_batches[micro_batch];
  for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
    const hcp_group *group = &plan->groups[g];
    for (int32_t s = 0; s < group->sequences; s++) {
      int32_t sequence = plan->sequences[group->first_sequence + s];
      if (group->first_rank == rank || sources[sequence] == rank)
        hcp__append(&lists, PIECES, (const int64_t[]){sequence, group->first_rank, s});
    }
  }
  hcp__sort_by(&lists, PIECES, 0);
  for (int64_t i = 0; i < hcp__records(&lists, PIECES); i++) {
    const int64_t *each = hcp__record(&lists, PIECES, i);
    if (each[1] == rank) append_sent(&lists, sources[each[0]], each[2], 1);
    if (sources[each[0]] == rank) append_got(&lists, each[1], 1);
  }
  const hcp_group *own = hcp__group_of(plan, micro_batch, rank);
  return finish(&lists, plan->limits.ranks, own == NULL ? 0 : own->sequences, route, err);
}

/* ---- rows from where they were loaded ---- */

/* Where each sequence that the rank loaded begins in its source; -1: it did not. */
static int64_t place_loaded(const hcp__share *of, const int32_t *sources, int32_t rank,
                            int64_t *loaded) {
  int64_t row = 0;
  for (int32_t i = 0; i < of->plan->n; i++) {
    loaded[i] = sources[i] == rank ? row : -1;
    if (sources[i] != rank) continue;
    row += of->of_units ? hcp__unit_count(of->payload, i) : hcp__payload_rows(of->payload, i);
  }
  return row;
}

static int has_loaded(const hcp_plan *plan, const hcp_group *group, const int64_t *loaded) {
  for (int32_t s = 0; s < group->sequences; s++)
    if (loaded[plan->sequences[group->first_sequence + s]] >= 0) return 1;
  return 0;
}

static void append_group_sent(const hcp__share *of, const hcp_group *group, const int64_t *loaded,
                              hcp__lists *lists) {
  for (int32_t k = 0; k < group->degree; k++) {
    clear(lists, PIECES);
    hcp__append_pieces(of, group, k, lists, PIECES);
    for (int64_t i = 0; i < hcp__records(lists, PIECES); i++) {
      const int64_t *piece = hcp__record(lists, PIECES, i);
      int64_t row = loaded[of->plan->sequences[group->first_sequence + piece[0]]];
      if (row >= 0) append_sent(lists, group->first_rank + k, row + piece[1], piece[2]);
    }
  }
}

/* Returns the rows of the micro-batch. */
static int64_t append_group_got(const hcp__share *of, const hcp_group *group, int32_t place,
                                const int32_t *sources, hcp__lists *lists) {
  int64_t rows = 0;
  clear(lists, PIECES);
  hcp__append_pieces(of, group, place, lists, PIECES);
  for (int64_t i = 0; i < hcp__records(lists, PIECES); i++) {
    const int64_t *piece = hcp__record(lists, PIECES, i);
    append_got(lists, sources[of->plan->sequences[group->first_sequence + piece[0]]], piece[2]);
    rows += piece[2];
  }
  return rows;
}

hcp_status hcp_payload_route(const hcp_plan *plan, const hcp_payload *payload, int32_t of_units,
                             const int32_t *sources, int32_t rank, hcp_table **route,
                             hcp_error *err) {
  hcp__share of = {plan, payload, of_units};
  hcp__lists lists;
  hcp_status status = hcp__check_sources(plan, sources, rank, err);
  if (status == HCP_OK) status = check_share(&of, err);
  if (status != HCP_OK) return status;
  int64_t *loaded = malloc(((size_t)plan->n + 1) * sizeof *loaded);
  if (loaded == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a route");
  hcp__lists_init(&lists, widths, LIST_COUNT);
  int64_t source_rows = place_loaded(&of, sources, rank, loaded);
  for (int32_t m = 0; m < plan->micro_batch_count; m++) {
    const hcp_micro_batch *batch = &plan->micro_batches[m];
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++)
      if (has_loaded(plan, &plan->groups[g], loaded))
        append_group_sent(&of, &plan->groups[g], loaded, &lists);
    const hcp_group *own = hcp__group_of(plan, m, rank);
    int64_t rows =
        own == NULL ? 0 : append_group_got(&of, own, rank - own->first_rank, sources, &lists);
    hcp__append(&lists, HCP_ROUTE_PARTS, &rows);
  }
  free(loaded);
  return finish(&lists, plan->limits.ranks, source_rows, route, err);
}

/* ---- results to the tokens that take them ---- */

/* A group, its ranks' takers in HELD from first[place] up to first[place + 1], and the places that
 * this rank exchanges results with. */
typedef struct results {
  const hcp__share *of;
  const hcp_group *group;
  int64_t *first; /* degree + 1 */
  int32_t place, begin, end;
} results;

static const hcp__takers *takers_of(const results *r, int64_t s) {
  return &r->of->payload->takers[r->of->plan->sequences[r->group->first_sequence + s]];
}

static hcp_status append_held(const results *r, int32_t place, hcp__lists *lists, hcp_error *err) {
  int64_t at = 0, first, end;
  clear(lists, PIECES);
  hcp__append_pieces(r->of, r->group, place, lists, PIECES);
  for (int64_t i = 0; i < hcp__records(lists, PIECES); i++) {
    const int64_t *piece = hcp__record(lists, PIECES, i);
    const hcp__takers *takers = takers_of(r, piece[0]);
    hcp_status status = hcp__takers_before_row(takers, piece[1], &first, err);
    if (status == HCP_OK) status = hcp__takers_before_row(takers, piece[1] + piece[2], &end, err);
    if (status != HCP_OK) return status;
    hcp__append(lists, HELD, (const int64_t[]){piece[0], first, end, at});
    at += end - first;
  }
  return HCP_OK;
}

static hcp_status append_all_held(results *r, hcp__lists *lists, hcp_error *err) {
  hcp_status status = HCP_OK;
  for (int32_t k = 0; status == HCP_OK && k < r->group->degree; k++) {
    r->first[k] = hcp__records(lists, HELD);
    if (k >= r->begin && k < r->end) status = append_held(r, k, lists, err);
  }
  r->first[r->group->degree] = hcp__records(lists, HELD);
  return status;
}

/* The takers among a place's tokens. */
static void append_spans(const results *r, int32_t place, hcp__lists *lists) {
  clear(lists, TAKEN);
  for (int32_t s = 0; s < r->group->sequences; s++) {
    hcp__piece own[2];
    const hcp__piece *spans;
    int32_t n = hcp__held(r->of->plan, r->group, s, place, own, &spans);
    for (int32_t p = 0; p < n; p++) {
      int64_t first = hcp__takers_before(takers_of(r, s), spans[p].start);
      int64_t end = hcp__takers_before(takers_of(r, s), spans[p].start + spans[p].rows);
      hcp__append(lists, TAKEN, (const int64_t[]){s, first, end});
    }
  }
}

/* The first record of HELD, of a place, with takers after the beginning of these. */
static int64_t first_common(const results *r, int32_t place, const int64_t *taken,
                            const hcp__lists *lists) {
  int64_t low = r->first[place], high = r->first[place + 1];
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    const int64_t *held = hcp__record(lists, HELD, middle);
    if (held[0] > taken[0] || (held[0] == taken[0] && held[2] > taken[1]))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/* Appends what `holder` has of a span of `taker`, to SENT or GOT. */
static void append_common(const results *r, int32_t holder, int32_t taker, const int64_t taken[3],
                          int sends, hcp__lists *lists) {
  for (int64_t i = first_common(r, holder, taken, lists); i < r->first[holder + 1]; i++) {
    const int64_t *held = hcp__record(lists, HELD, i);
    int64_t begin = hcp__most(taken[1], held[1]), end = hcp__least(taken[2], held[2]);
    if (held[0] != taken[0] || held[1] >= taken[2]) return;
    if (begin >= end) continue;
    if (sends)
      append_sent(lists, r->group->first_rank + taker, held[3] + begin - held[1], end - begin);
    else
      append_got(lists, r->group->first_rank + holder, end - begin);
  }
}

static void append_results(const results *r, hcp__lists *lists) {
  for (int32_t k = r->begin; k < r->end; k++) {
    append_spans(r, k, lists);
    for (int64_t i = 0; i < hcp__records(lists, TAKEN); i++)
      append_common(r, r->place, k, hcp__record(lists, TAKEN, i), 1, lists);
  }
  append_spans(r, r->place, lists);
  for (int64_t i = 0; i < hcp__records(lists, TAKEN); i++)
    for (int32_t k = r->begin; k < r->end; k++)
      append_common(r, k, r->place, hcp__record(lists, TAKEN, i), 0, lists);
}

/* Results that a place has: one of each taker. */
static int64_t held_by(const results *r, const hcp__lists *lists) {
  if (r->first[r->place] == r->first[r->place + 1]) return 0;
  const int64_t *last = hcp__record(lists, HELD, r->first[r->place + 1] - 1);
  return last[3] + last[2] - last[1];
}

/* Where every rank has what its own tokens take, none asks another. */
static results results_of(const hcp__share *of, const hcp_group *group, int32_t rank) {
  int32_t place = rank - group->first_rank;
  hcp_split split = of->payload->split;
  int alone = split == HCP_SPLIT_WHOLE || split == HCP_SPLIT_TOKENS;
  return (results){.of = of,
                   .group = group,
                   .place = place,
                   .begin = alone ? place : 0,
                   .end = alone ? place + 1 : group->degree};
}

static hcp_status expect_takers(const hcp__share *of, const hcp_group *group, hcp_error *err) {
  if (of->payload->takers == NULL)
    return hcp__fail(err, HCP_INVALID, "the payload has no takers, expected tokens that take rows");
  for (int32_t s = 0; group != NULL && s < group->sequences; s++) {
    int32_t sequence = of->plan->sequences[group->first_sequence + s];
    if (of->payload->takers[sequence].runs == NULL)
      return hcp__fail(err, HCP_INVALID,
                       "takers of sequence %d are not known here, expected a rank that computes it",
                       sequence);
  }
  return HCP_OK;
}

hcp_status hcp_payload_route_to_tokens(const hcp_plan *plan, const hcp_payload *payload,
                                       int32_t micro_batch, int32_t rank, hcp_table **route,
                                       hcp_error *err) {
  hcp__share of = {plan, payload, 0};
  hcp__lists lists;
  int64_t rows = 0;
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  status = expect_takers(&of, group, err);
  if (status != HCP_OK) return status;
  hcp__lists_init(&lists, widths, LIST_COUNT);
  if (group != NULL) {
    results r = results_of(&of, group, rank);
    r.first = malloc(((size_t)group->degree + 1) * sizeof *r.first);
    status = r.first == NULL ? hcp__fail(err, HCP_NO_MEMORY, "out of memory for a route")
                             : append_all_held(&r, &lists, err);
    if (status == HCP_OK && !lists.failed) {
      append_results(&r, &lists);
      rows = held_by(&r, &lists);
    }
    free(r.first);
  }
  if (status == HCP_OK) return finish(&lists, plan->limits.ranks, rows, route, err);
  hcp__lists_release(&lists);
  return status;
}

/* ---- what a rank has ---- */

static const int32_t own_widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_PAYLOAD_SECTIONS(WIDTH)
#undef WIDTH
        [PIECES] = 3};

static void append_sequences(const hcp_group *group, hcp__lists *lists) {
  int64_t i = 0, row = 0;
  hcp__append(lists, HCP_PAYLOAD_SEQUENCES, &row);
  for (int32_t s = 0; s < group->sequences; s++) {
    for (; i < hcp__records(lists, PIECES) && hcp__record(lists, PIECES, i)[0] == s; i++)
      row += hcp__record(lists, PIECES, i)[2];
    hcp__append(lists, HCP_PAYLOAD_SEQUENCES, &row);
  }
}

static void append_own_units(const hcp__share *of, const hcp_group *group, hcp__lists *lists) {
  int64_t row = 0;
  hcp__append(lists, HCP_PAYLOAD_UNITS, &row);
  for (int64_t i = 0; i < hcp__records(lists, PIECES); i++) {
    const int64_t *piece = hcp__record(lists, PIECES, i);
    int32_t sequence = of->plan->sequences[group->first_sequence + piece[0]];
    int64_t unit = of->of_units ? piece[1] : hcp__unit_at(of->payload, sequence, piece[1]);
    for (int64_t end = row + piece[2]; row < end; unit++) {
      row += of->of_units ? 1 : hcp__unit_rows(of->payload, sequence, unit);
      hcp__append(lists, HCP_PAYLOAD_UNITS, &row);
    }
  }
}

static void append_taking(const hcp__takers *takers, const hcp__piece *span, int64_t offset,
                          hcp__lists *lists) {
  int64_t end = span->start + span->rows;
  for (int64_t r = 0; r < takers->count; r++) {
    int64_t first = takers->runs[r].begins[HCP__TOKEN], last = first + takers->runs[r].tokens;
    if (first >= end) return;
    first = hcp__most(first, span->start);
    for (int64_t t = first; t < hcp__least(last, end); t++) {
      int64_t row = offset + t - span->start;
      hcp__append(lists, HCP_PAYLOAD_TAKING, &row);
    }
  }
}

static void append_all_taking(const hcp__share *of, const hcp_group *group, int32_t place,
                              hcp__lists *lists) {
  int64_t offset = 0;
  for (int32_t s = 0; s < group->sequences; s++) {
    hcp__piece own[2];
    const hcp__piece *spans;
    int32_t n = hcp__held(of->plan, group, s, place, own, &spans);
    int32_t sequence = of->plan->sequences[group->first_sequence + s];
    for (int32_t p = 0; p < n; p++) {
      append_taking(&of->payload->takers[sequence], &spans[p], offset, lists);
      offset += spans[p].rows;
    }
  }
}

hcp_status hcp_payload_measure(const hcp_plan *plan, const hcp_payload *payload, int32_t of_units,
                               int32_t micro_batch, int32_t rank, hcp_table **rows,
                               hcp_error *err) {
  static const hcp_group nothing;
  hcp__share of = {plan, payload, of_units};
  hcp__lists lists;
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  const hcp_group *group = status == HCP_OK ? hcp__group_of(plan, micro_batch, rank) : NULL;
  int takes = payload->takers != NULL && !of_units;
  if (status == HCP_OK) status = check_share(&of, err);
  if (status == HCP_OK && takes) status = expect_takers(&of, group, err);
  if (status != HCP_OK) return status;
  int32_t place = group == NULL ? 0 : rank - group->first_rank;
  if (group == NULL) group = &nothing;
  hcp__lists_init(&lists, own_widths, LIST_COUNT);
  hcp__append_pieces(&of, group, place, &lists, PIECES);
  append_sequences(group, &lists);
  if (payload->split != HCP_SPLIT_TOKENS) append_own_units(&of, group, &lists);
  if (takes) append_all_taking(&of, group, place, &lists);
  status = hcp__table_create(&lists, HCP_PAYLOAD_SECTION_COUNT, rows, err);
  hcp__lists_release(&lists);
  return status;
}
