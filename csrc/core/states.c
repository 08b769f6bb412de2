/* states.c - states passed from rank to rank along documents, for recurrent layers.
 *
 * A stretch is a document, or a part of one with branches: see stretches.c. The order of a span is
 * its number in its stretch, over all ranks; its depth, that on its path; the place of a rank, its
 * number in the group. A rank's padding is a document of its own, which nothing enters. */
#include <stdlib.h>

#include "internal.h"

/* Scratch lists after the sections: spans that others want of this rank, and that this rank
 * wants, as (key, place in the output). A key orders spans by holder, then by number. */
enum { GIVEN = HCP_STATES_SECTION_COUNT, TAKEN, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_STATES_SECTIONS(WIDTH)
#undef WIDTH
        2,
    2};

/* A span, and who holds it. */
typedef struct held {
  int64_t start;
  int32_t place, span; /* span: its number on that rank */
} held;

/* Where a span stands. */
typedef struct standing {
  int64_t stretch, order;
} standing;

/* All spans of a group, by stretch and order. */
typedef struct group_spans {
  const hcp_group *group;
  int32_t place, own_count; /* of this rank, padding not counted */
  int64_t stretches;
  int64_t *first;       /* stretches + 1 */
  int64_t *parents;     /* stretches: that each continues, -1: none */
  int64_t *depths;      /* stretches: those of their first spans */
  int64_t *reach; /* stretches: how many of its first spans a place wants, -1: it has none */
  int64_t *touched; /* touched_count: stretches with a reach */
  int64_t touched_count;
  held *held; /* first[stretches] */
  int64_t *first_of; /* degree + 1: where the spans of a place begin among these */
  standing *by_place; /* first[stretches]: spans of place 0, then those of place 1 ... */
  const standing *own; /* own_count */
  int64_t *counts; /* degree, 2 for each: scratch */
} group_spans;

/* ---- spans by stretch ---- */

static int by_start(const void *a, const void *b) {
  int64_t left = ((const held *)a)->start, right = ((const held *)b)->start;
  return (left > right) - (left < right);
}

static void count_spans(const hcp_plan *plan, const hcp_group *group, int64_t *spans,
                        int64_t *stretches) {
  *spans = *stretches = 0;
  for (int32_t s = 0; s < group->sequences; s++) {
    hcp__piece own[2];
    const hcp__piece *pieces;
    *stretches += hcp__stretch_count(plan, plan->sequences[group->first_sequence + s]);
    for (int32_t j = 0; j < group->degree; j++)
      *spans += hcp__held(plan, group, s, j, own, &pieces);
  }
}

/* Appends the spans of a sequence in the order of tokens. Returns how many. */
static int64_t hold_sequence(const hcp_plan *plan, group_spans *all, int32_t s, held *out) {
  int64_t n = 0;
  for (int32_t j = 0; j < all->group->degree; j++) {
    hcp__piece own[2];
    const hcp__piece *pieces;
    int32_t count = hcp__held(plan, all->group, s, j, own, &pieces);
    for (int32_t p = 0; p < count; p++)
      out[n++] = (held){pieces[p].start, j, (int32_t)all->counts[j]++};
  }
  qsort(out, (size_t)n, sizeof *out, by_start);
  return n;
}

static int64_t spans_of(const group_spans *all, int64_t stretch) {
  return all->first[stretch + 1] - all->first[stretch];
}

/* A stretch comes after the one that it continues. */
static void find_depth(const hcp_plan *plan, group_spans *all, int32_t sequence, int64_t i) {
  int64_t stretch = all->stretches - 1, parent = hcp__stretch_parent(plan, sequence, i);
  if (parent >= 0) parent += stretch - i;
  all->parents[stretch] = parent;
  all->depths[stretch] = parent < 0 ? 0 : all->depths[parent] + spans_of(all, parent);
  all->reach[stretch] = -1;
}

static void find_spans(const hcp_plan *plan, group_spans *all) {
  int64_t at = 0;
  for (int32_t j = 0; j < all->group->degree; j++) all->counts[j] = 0;
  for (int32_t s = 0; s < all->group->sequences; s++) {
    int32_t sequence = plan->sequences[all->group->first_sequence + s];
    int64_t end = at + hold_sequence(plan, all, s, all->held + at);
    for (int64_t i = 0; i < hcp__stretch_count(plan, sequence); i++) {
      hcp__piece stretch = hcp__stretch(plan, sequence, i);
      all->first[all->stretches++] = at;
      while (at < end && all->held[at].start < stretch.start + stretch.rows) at++;
      find_depth(plan, all, sequence, i);
    }
  }
  all->first[all->stretches] = at;
}

static void find_places(group_spans *all) {
  all->first_of[0] = 0;
  for (int32_t j = 0; j < all->group->degree; j++)
    all->first_of[j + 1] = all->first_of[j] + all->counts[j];
  for (int64_t d = 0; d < all->stretches; d++)
    for (int64_t i = all->first[d]; i < all->first[d + 1]; i++)
      all->by_place[all->first_of[all->held[i].place] + all->held[i].span] =
          (standing){d, i - all->first[d]};
  all->own = all->by_place + all->first_of[all->place];
  all->own_count = (int32_t)all->counts[all->place];
}

/* One allocation, which begins at all->held. */
static hcp_status spans_create(const hcp_plan *plan, const hcp_group *group, int32_t rank,
                               group_spans *all, hcp_error *err) {
  int64_t spans, stretches;
  count_spans(plan, group, &spans, &stretches);
  *all = (group_spans){.group = group, .place = rank - group->first_rank};
  size_t words = 5 * (size_t)stretches + 1 + 3 * (size_t)group->degree + 1;
  all->held = calloc(
      1, (size_t)spans * (sizeof *all->held + sizeof *all->by_place) + words * sizeof(int64_t));
  if (all->held == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %lld spans", (long long)spans);
  all->by_place = (standing *)(all->held + spans);
  all->first = (int64_t *)(all->by_place + spans);
  all->parents = all->first + stretches + 1;
  all->depths = all->parents + stretches;
  all->reach = all->depths + stretches;
  all->touched = all->reach + stretches;
  all->first_of = all->touched + stretches;
  all->counts = all->first_of + group->degree + 1;
  find_spans(plan, all);
  find_places(all);
  return HCP_OK;
}

static int64_t depth_of(const group_spans *all, standing at) {
  return all->depths[at.stretch] + at.order;
}

/* The span so many before one, at most its depth, on its path. */
static standing before(const group_spans *all, standing at, int64_t back) {
  while (back > at.order) {
    back -= at.order;
    at.stretch = all->parents[at.stretch];
    at.order = spans_of(all, at.stretch);
  }
  return (standing){at.stretch, at.order - back};
}

static const held *held_at(const group_spans *all, standing at) {
  return &all->held[all->first[at.stretch] + at.order];
}

/* ---- what a place wants of a gathering ---- */

static void touch(group_spans *all, int64_t stretch, int64_t spans) {
  if (all->reach[stretch] < 0) all->touched[all->touched_count++] = stretch;
  all->reach[stretch] = hcp__most(all->reach[stretch], spans);
}

/* Notes in `reach` all spans before those of a place, on their paths. */
static void find_reach(group_spans *all, int32_t place) {
  for (int64_t i = 0; i < all->touched_count; i++) all->reach[all->touched[i]] = -1;
  all->touched_count = 0;
  for (int64_t s = all->first_of[place]; s < all->first_of[place + 1]; s++) {
    standing at = all->by_place[s];
    touch(all, at.stretch, at.order);
    for (int64_t up = all->parents[at.stretch]; up >= 0; up = all->parents[up]) {
      if (all->reach[up] == spans_of(all, up)) break; /* and so are those that it continues */
      touch(all, up, spans_of(all, up));
    }
  }
}

static int is_wanted(const group_spans *all, standing at) {
  return all->reach[at.stretch] > at.order;
}

/* ---- what travels ---- */

static int64_t longest(const group_spans *all) {
  int64_t most = 0;
  for (int64_t d = 0; d < all->stretches; d++)
    most = hcp__most(most, all->depths[d] + spans_of(all, d) - 1);
  return most;
}

/* How far back a round looks: in the first, a span gets the map of the one before. */
static int64_t stride_of(int32_t round) { return round < 2 ? 1 : (int64_t)1 << (round - 1); }

static int32_t rounds_for(int64_t most) {
  int32_t rounds = 1;
  while (stride_of(rounds) < most) rounds++;
  return rounds;
}

/* The least depth that wants a map in a round. A span of depth 0 has none of spans before it: from
 * the second round on, nobody wants it. */
static int64_t least_depth(int32_t round) { return stride_of(round) + (round == 0 ? 0 : 1); }

static int64_t most_of(const int64_t *counts, int32_t n) {
  int64_t most = 0;
  for (int32_t j = 0; j < n; j++) most = hcp__most(most, counts[j]);
  return most;
}

/* Rows that the busiest rank gets from others when each gets the maps of all spans before its
 * last ones, but for its own. */
static int64_t rows_gathered(group_spans *all) {
  for (int32_t j = 0; j < all->group->degree; j++) {
    int64_t rows = 0;
    find_reach(all, j);
    for (int64_t i = 0; i < all->touched_count; i++) rows += all->reach[all->touched[i]];
    for (int64_t s = all->first_of[j]; s < all->first_of[j + 1]; s++)
      rows -= is_wanted(all, all->by_place[s]);
    all->counts[j] = rows;
  }
  return most_of(all->counts, all->group->degree);
}

/* Those that a place gets in a round, each once. *seen has, of all spans, the last place that
 * wanted each. */
static int64_t rows_of_round(const group_spans *all, int32_t place, int32_t round, int32_t *seen) {
  int64_t rows = 0;
  for (int64_t s = all->first_of[place]; s < all->first_of[place + 1]; s++) {
    standing at = all->by_place[s];
    if (depth_of(all, at) < least_depth(round)) continue;
    const held *wanted = held_at(all, before(all, at, stride_of(round)));
    int32_t *last = &seen[wanted - all->held];
    rows += wanted->place != place && *last != place;
    *last = place;
  }
  return rows;
}

static int64_t rows_by_rounds(group_spans *all, int32_t rounds, int32_t *seen) {
  for (int32_t j = 0; j < all->group->degree; j++) all->counts[j] = 0;
  for (int32_t r = 0; r < rounds; r++) {
    for (int64_t i = 0; i < all->first[all->stretches]; i++) seen[i] = -1;
    for (int32_t j = 0; j < all->group->degree; j++)
      all->counts[j] += rows_of_round(all, j, r, seen);
  }
  return most_of(all->counts, all->group->degree);
}

hcp_status hcp_states_measure(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                              hcp_states_rows *rows, hcp_error *err) {
  group_spans all;
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  *rows = (hcp_states_rows){0, 0, 1};
  if (group == NULL) return HCP_OK;
  status = spans_create(plan, group, rank, &all, err);
  if (status != HCP_OK) return status;
  int32_t *seen = malloc((size_t)all.first[all.stretches] * sizeof *seen + 1);
  if (seen == NULL) {
    free(all.held);
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for rounds of states");
  }
  rows->rounds = rounds_for(longest(&all));
  rows->gathered = rows_gathered(&all);
  rows->by_rounds = rows_by_rounds(&all, rows->rounds, seen);
  free(seen);
  free(all.held);
  return HCP_OK;
}

/* ---- the price of a layer ---- */

enum { PARTS = 16 }; /* of a near link's price, in which that of another is told */

static int64_t product(int64_t a, int64_t b) {
  int64_t found;
  return __builtin_mul_overflow(a, b, &found) || found > HCP__LATE ? HCP__LATE : found;
}

/* Bytes over the slowest link of a group, in those of a near one. */
static int64_t over_link(const hcp_plan *plan, const hcp_group *group, int64_t bytes) {
  const hcp_cost *cost = &plan->cost;
  int64_t node = plan->limits.ranks_per_node, near = cost->exchange;
  int64_t far = hcp__links_of(cost, group->degree, (int32_t)node).exchange;
  if (near == 0 || far <= near) return bytes;
  int64_t parts = product(far, PARTS) / near;
  return hcp__sum(product(bytes / PARTS, parts), product(bytes % PARTS, parts) / PARTS);
}

static int64_t most_rows(const hcp_plan *plan, const hcp_group *group) {
  int64_t most = 0;
  for (int32_t j = 0; j < group->degree; j++)
    most = hcp__most(most, hcp__rank_rows(plan, group, j));
  return most;
}

static int64_t price_of_way(const hcp_plan *plan, const hcp_group *group, const hcp_scanned *layer,
                            int64_t states, int64_t rounds) {
  int64_t moved = over_link(plan, group, product(states, layer->state_bytes));
  return hcp__sum(moved, product(rounds, layer->round_bytes));
}

/* What the states of a layer cost the busiest rank, by each way. */
typedef struct way_costs {
  int64_t gathered, by_rounds;
} way_costs;

static hcp_status price_ways(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                             const hcp_scanned *layer, way_costs *costs, hcp_error *err) {
  hcp_states_rows rows;
  *costs = (way_costs){0, 0};
  hcp_status status = hcp_states_measure(plan, micro_batch, rank, &rows, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  if (group == NULL || group->degree < 2) return HCP_OK;
  costs->gathered = price_of_way(plan, group, layer, rows.gathered, 1);
  costs->by_rounds = price_of_way(plan, group, layer, rows.by_rounds, rows.rounds);
  return HCP_OK;
}

static int64_t price_of_heads(const hcp_plan *plan, const hcp_group *group,
                              const hcp_scanned *layer) {
  int64_t degree = group->degree, tokens = hcp__group_tokens(plan, group);
  int64_t moved = product(product(tokens, degree - 1), layer->row_bytes) / (degree * degree);
  return hcp__sum(over_link(plan, group, moved), product(layer->exchanges, layer->round_bytes));
}

hcp_status hcp_scan_price(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                          const hcp_scanned *layer, hcp_scan_costs *costs, hcp_error *err) {
  way_costs ways;
  if (layer->row_bytes < 0 || layer->state_bytes < 0 || layer->row_work < 0 ||
      layer->round_bytes < 0 || layer->exchanges < 0)
    return hcp__fail(err, HCP_INVALID,
                     "row_bytes is %lld, state_bytes %lld, row_work %lld, round_bytes %lld and "
                     "exchanges %d, expected none below 0",
                     (long long)layer->row_bytes, (long long)layer->state_bytes,
                     (long long)layer->row_work, (long long)layer->round_bytes, layer->exchanges);
  hcp_status status = price_ways(plan, micro_batch, rank, layer, &ways, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  *costs = (hcp_scan_costs){0, 0};
  if (group == NULL || group->degree < 2) return HCP_OK;
  int64_t rows = most_rows(plan, group);
  costs->states =
      hcp__sum(hcp__least(ways.gathered, ways.by_rounds), product(rows, layer->row_work));
  costs->heads = hcp__sum(price_of_heads(plan, group, layer), product(rows, layer->row_bytes / 2));
  return HCP_OK;
}

hcp_status hcp_states_choose(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                             int64_t state_bytes, int64_t round_bytes, int32_t *by_rounds,
                             hcp_error *err) {
  hcp_scanned layer = {.state_bytes = state_bytes, .round_bytes = round_bytes};
  way_costs ways;
  if (state_bytes < 0 || round_bytes < 0)
    return hcp__fail(err, HCP_INVALID,
                     "state_bytes is %lld and round_bytes %lld, expected none below 0",
                     (long long)state_bytes, (long long)round_bytes);
  hcp_status status = price_ways(plan, micro_batch, rank, &layer, &ways, err);
  if (status == HCP_OK) *by_rounds = ways.by_rounds < ways.gathered;
  return status;
}

/* ---- one path ---- */

static int64_t key_of(int32_t place, int32_t span) { return (int64_t)place << 32 | span; }

static void append_key(hcp__lists *lists, int32_t list, int32_t place, int32_t span) {
  hcp__append(lists, list, (const int64_t[]){key_of(place, span), hcp__records(lists, list)});
}

/* A list that ascends by its keys. Returns how many different ones it has. */
static int64_t append_moves(hcp__lists *lists, int32_t section, int32_t list, int32_t first_rank) {
  int64_t n = hcp__records(lists, list), begin = 0, end = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t key = hcp__record(lists, list, i)[0], next = -1;
    if (i + 1 < n) next = hcp__record(lists, list, i + 1)[0];
    end += next != key;
    if (next >= 0 && next >> 32 == key >> 32) continue;
    hcp__append(lists, section, (const int64_t[]){first_rank + (key >> 32), begin, end - begin});
    begin = end;
  }
  return end;
}

/* Joined to the last record when it continues that one, which no path shares with another. */
static void append_row(hcp__lists *lists, int32_t section, int32_t first_of_path, int64_t row) {
  if (first_of_path)
    hcp__append(lists, section, (const int64_t[]){row, 1});
  else
    hcp__append_rows(lists, section, row, 1);
}

/* Own spans, each once for each rank that wants it. */
static void append_pack(hcp__lists *lists) {
  int64_t last = -1;
  for (int64_t i = 0; i < hcp__records(lists, GIVEN); i++) {
    int64_t key = hcp__record(lists, GIVEN, i)[0];
    if (key != last) append_row(lists, HCP_STATES_PACK, i == 0, key & INT32_MAX);
    last = key;
  }
}

/* Gives the received rows, which come by holder, the order of the output. */
static void append_arrange(hcp__lists *lists) {
  hcp__list *taken = &lists->list[TAKEN];
  int64_t row = -1, last = -1;
  for (int64_t i = 0; i < hcp__records(lists, TAKEN); i++) {
    int64_t *word = &taken->words[i * taken->width];
    row += *word != last;
    last = *word;
    *word = row;
  }
  hcp__sort_by(lists, TAKEN, 1);
  for (int64_t i = 0; i < hcp__records(lists, TAKEN); i++)
    append_row(lists, HCP_STATES_ARRANGE, i == 0, hcp__record(lists, TAKEN, i)[0]);
}

/* Makes a path of what the scratch lists hold, and empties them. */
static void end_path(const group_spans *all, hcp__lists *lists) {
  int64_t output = hcp__records(lists, TAKEN);
  hcp__sort_by(lists, GIVEN, 0);
  hcp__sort_by(lists, TAKEN, 0);
  append_pack(lists);
  int64_t sent = append_moves(lists, HCP_STATES_SENDS, GIVEN, all->group->first_rank);
  append_moves(lists, HCP_STATES_RECEIVES, TAKEN, all->group->first_rank);
  append_arrange(lists);
  hcp__append(
      lists, HCP_STATES_PATHS,
      (const int64_t[]){hcp__records(lists, HCP_STATES_PACK), hcp__records(lists, HCP_STATES_SENDS),
                        hcp__records(lists, HCP_STATES_RECEIVES),
                        hcp__records(lists, HCP_STATES_ARRANGE), sent, output});
  lists->list[GIVEN].count = lists->list[TAKEN].count = 0;
}

/* ---- rounds ---- */

/* What others want of this rank in a round, and what it wants of a place. */
static void append_wanted(const group_spans *all, int32_t round, int32_t place, hcp__lists *lists) {
  for (int64_t s = all->first_of[place]; s < all->first_of[place + 1]; s++) {
    standing at = all->by_place[s];
    if (depth_of(all, at) < least_depth(round)) continue;
    const held *wanted = held_at(all, before(all, at, stride_of(round)));
    if (wanted->place == all->place) append_key(lists, GIVEN, place, wanted->span);
    if (place != all->place) continue;
    append_key(lists, TAKEN, wanted->place, wanted->span);
    hcp__append(lists, HCP_STATES_WANTING, (const int64_t[]){s - all->first_of[place]});
  }
}

static void append_round(const group_spans *all, int32_t round, hcp__lists *lists) {
  for (int32_t j = 0; j < all->group->degree; j++) append_wanted(all, round, j, lists);
  end_path(all, lists);
}

/* ---- gathering ---- */

/* Every own span of which a later one of some place wants the map, once for each place. */
static void give_to_later(group_spans *all, hcp__lists *lists) {
  for (int32_t j = 0; j < all->group->degree; j++) {
    find_reach(all, j);
    for (int32_t s = 0; s < all->own_count; s++)
      if (is_wanted(all, all->own[s])) append_key(lists, GIVEN, j, s);
  }
}

static int ascending(const void *a, const void *b) {
  int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
  return (left > right) - (left < right);
}

/* Where states are found while levels are made: numbers among those of all levels. */
typedef struct numbers {
  int64_t *starts; /* stretches: of the state that enters one that continues none */
  int64_t *after; /* spans of the group: of the state after each */
  int64_t end;
} numbers;

static int64_t number_before(const group_spans *all, const numbers *of, standing at) {
  if (depth_of(all, at) == 0) return of->starts[at.stretch];
  return of->after[held_at(all, before(all, at, 1)) - all->held];
}

/* A level is the states after the spans of one depth that this rank wants. It follows from the
 * level before, which begins at a number: KEPT says which of those states it takes. Returns how
 * many states it has. */
static int64_t append_level(const group_spans *all, int64_t depth, int64_t begin, numbers *of,
                            hcp__lists *lists) {
  int64_t end = of->end;
  for (int64_t i = 0; i < all->touched_count; i++) {
    standing at = {all->touched[i], depth - all->depths[all->touched[i]]};
    if (at.order < 0 || !is_wanted(all, at)) continue;
    const held *wanted = held_at(all, at);
    append_key(lists, TAKEN, wanted->place, wanted->span);
    hcp__append(lists, HCP_STATES_KEPT, (const int64_t[]){number_before(all, of, at) - begin});
    of->after[wanted - all->held] = of->end++;
  }
  if (of->end > end) hcp__append(lists, HCP_STATES_LEVELS, (const int64_t[]){of->end - end});
  return of->end - end;
}

/* Documents and texts start from states of their own, after that of padding. */
static void number_starts(group_spans *all, numbers *of) {
  qsort(all->touched, (size_t)all->touched_count, sizeof *all->touched, ascending);
  for (int64_t i = 0; i < all->touched_count; i++)
    if (all->parents[all->touched[i]] < 0) of->starts[all->touched[i]] = of->end++;
}

static int append_gathering(group_spans *all, int64_t padded, hcp__lists *lists) {
  size_t spans = (size_t)all->first[all->stretches];
  numbers of = {.end = padded};
  of.starts = malloc(((size_t)all->stretches + spans + 1) * sizeof *of.starts);
  if (of.starts == NULL) return 0;
  of.after = of.starts + all->stretches;
  give_to_later(all, lists);
  find_reach(all, all->place);
  number_starts(all, &of);
  hcp__append(lists, HCP_STATES_SIZES, &of.end);
  for (int64_t depth = 0, begin = 0, next = of.end; append_level(all, depth, begin, &of, lists) > 0;
       depth++) {
    begin = next;
    next = of.end;
  }
  for (int32_t s = 0; s < all->own_count; s++)
    hcp__append(lists, HCP_STATES_ENTERING,
                (const int64_t[]){number_before(all, &of, all->own[s])});
  if (padded) hcp__append(lists, HCP_STATES_ENTERING, (const int64_t[]){0});
  free(of.starts);
  end_path(all, lists);
  return 1;
}

/* ---- the table ---- */

static hcp_status build_states(const hcp_plan *plan, int32_t rank, group_spans *all,
                               int32_t by_rounds, hcp_table **states, hcp_error *err) {
  hcp__lists lists;
  hcp__lists_init(&lists, widths, LIST_COUNT);
  int64_t padded = hcp__padding(plan, all->group, rank - all->group->first_rank) > 0;
  if (!by_rounds && !append_gathering(all, padded, &lists)) lists.failed = 1;
  int32_t rounds = by_rounds ? rounds_for(longest(all)) : 0;
  for (int32_t round = 0; round < rounds; round++) append_round(all, round, &lists);
  hcp_status status = hcp__table_create(&lists, HCP_STATES_SECTION_COUNT, states, err);
  hcp__lists_release(&lists);
  return status;
}

hcp_status hcp_states_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                             int32_t by_rounds, hcp_table **states, hcp_error *err) {
  group_spans all;
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status == HCP_OK) status = hcp_plan_expect_trees(plan, "hcp_states_create", err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  if (group == NULL)
    return hcp__fail(err, HCP_INVALID,
                     "rank is %d, which has no rows in micro-batch %d, expected one of a group",
                     rank, micro_batch);
  status = spans_create(plan, group, rank, &all, err);
  if (status != HCP_OK) return status;
  status = build_states(plan, rank, &all, by_rounds, states, err);
  free(all.held);
  return status;
}
