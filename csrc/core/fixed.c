/* fixed.c - tables of fixed sizes, for a layer that a CUDA graph captures once for many plans. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

hcp_status hcp_fixed_sizes(const hcp_capacity *capacity, int64_t sizes[HCP_FIXED_SECTION_COUNT],
                           hcp_error *err) {
  const struct {
    const char *name;
    int64_t value, most;
  } numbers[] = {{"rows", capacity->rows, HCP__LENGTH_MAX},
                 {"sequences", capacity->sequences, HCP__LENGTH_MAX},
                 {"max_seqlen", capacity->max_seqlen, INT64_MAX},
                 {"ranks", capacity->ranks, HCP__RANKS_MAX}};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    if (numbers[i].value < 1 || numbers[i].value > numbers[i].most)
      return hcp__fail(err, HCP_INVALID, "%s is %lld, expected 1 to %lld", numbers[i].name,
                       (long long)numbers[i].value, (long long)numbers[i].most);
  int64_t rows = capacity->rows, ranks = capacity->ranks;
  /* A rank has one span of a sequence that it computes alone, at most two of others. Chunks j and
   * 2 d - 1 - j of a sequence of L tokens see L + L / 2d keys together, and two more by rounding.
   */
  int64_t bounds = (ranks == 1 ? 1 : 2) * capacity->sequences + 1;
  sizes[HCP_FIXED_POSITIONS] = sizes[HCP_FIXED_EMPTY] = rows;
  sizes[HCP_FIXED_QUERY_BOUNDS] = sizes[HCP_FIXED_KEY_BOUNDS] = bounds;
  sizes[HCP_FIXED_KEYS] = ranks == 1 ? 0 : ranks * rows + rows / 2 + 2 * capacity->sequences + 1;
  sizes[HCP_FIXED_PLACES] = ranks == 1 ? 0 : 2 * ranks * rows;
  return HCP_OK;
}

/* ---- room ---- */

typedef struct block {
  const hcp_plan *plan;
  const hcp_capacity *capacity;
  int32_t micro_batch;
  int32_t first; /* its first rank */
} block;

static hcp_status expect_within(const block *b, const hcp_group *group, int32_t rank,
                                hcp_error *err) {
  int32_t last = group->first_rank + group->degree - 1, ranks = b->capacity->ranks;
  if (group->first_rank >= b->first && last < b->first + ranks) return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "micro-batch %d, rank %d: its group is the ranks %d to %d, expected ranks "
                   "within %d to %d, whose keys the graph gathers: make the handler with more "
                   "ranks, or the plan with a smaller max_degree and ranks_per_node=%d, "
                   "max_degree=%d",
                   b->micro_batch, rank, group->first_rank, last, b->first, b->first + ranks - 1,
                   ranks, ranks);
}

static hcp_status expect_most(const block *b, int32_t rank, const char *name, int64_t found,
                              int64_t most, hcp_error *err) {
  if (found <= most) return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "micro-batch %d, rank %d: %s is %lld, expected <= %lld, the capacity of this "
                   "GraphHandler: capture a layer of a larger capacity, or run this micro-batch "
                   "without the graph",
                   b->micro_batch, rank, name, (long long)found, (long long)most);
}

static hcp__zigzag zigzag_at(const block *b, const hcp_group *group, int32_t s) {
  return hcp__zigzag_of(b->plan, b->plan->sequences[group->first_sequence + s], group->degree);
}

static hcp_status expect_room(const block *b, int32_t rank, hcp_error *err) {
  const hcp_group *group = hcp__group_of(b->plan, b->micro_batch, rank);
  int64_t held = 0, longest = 0;
  if (b->plan->mask_count > 0)
    return hcp__fail(err, HCP_INVALID,
                     "micro-batch %d, rank %d: the plan has masks, expected none for layers in "
                     "CUDA graphs",
                     b->micro_batch, rank);
  if (group == NULL) return HCP_OK;
  int32_t place = rank - group->first_rank;
  for (int32_t s = 0; s < group->sequences; s++) {
    hcp__piece pieces[2];
    hcp__zigzag z = zigzag_at(b, group, s);
    held += hcp__pieces(&z, place, pieces) > 0;
    longest = hcp__most(longest, z.length);
  }
  int64_t rows = hcp__rank_rows(b->plan, group, place) + hcp__padding(b->plan, group, place);
  const hcp_capacity *most = b->capacity;
  hcp_status status = expect_within(b, group, rank, err);
  if (status == HCP_OK) status = expect_most(b, rank, "rows", rows, most->rows, err);
  if (status == HCP_OK) status = expect_most(b, rank, "sequences", held, most->sequences, err);
  if (status == HCP_OK) status = expect_most(b, rank, "max_seqlen", longest, most->max_seqlen, err);
  return status;
}

static hcp_status expect_block(const block *b, hcp_error *err) {
  hcp_status status = HCP_OK;
  for (int32_t k = 0; status == HCP_OK && k < b->capacity->ranks; k++)
    status = hcp__check_place(b->plan, b->micro_batch, b->first + k, err);
  for (int32_t k = 0; status == HCP_OK && k < b->capacity->ranks; k++)
    status = expect_room(b, b->first + k, err);
  return status;
}

/* ---- the tables ---- */

static const int32_t widths[HCP_FIXED_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_FIXED_SECTIONS(WIDTH)
#undef WIDTH
};

static int64_t *section_of(hcp_table *table, int32_t s) {
  return table->words + table->words[HCP_TABLE_HEADER + 2 * s];
}

/* Where tables are written. */
typedef struct cursor {
  int64_t *positions, *queries, *keys;
  int64_t row, key; /* so far */
} cursor;

static void append_span(cursor *at, const hcp__piece *span, int64_t seen) {
  for (int64_t i = 0; i < span->rows; i++) at->positions[at->row + i] = span->start + i;
  at->row += span->rows;
  at->key += seen;
  *++at->queries = at->row;
  *++at->keys = at->key;
}

/* The gathered row of each token of a sequence, up to the end of what this rank's spans see.
 * rows: of each place of the group, its rows of the sequences before, to be moved on. */
static void fill_gathered(const block *b, const hcp_group *group, const hcp__zigzag *z,
                          int64_t seen, int64_t *rows, int64_t *gathered) {
  for (int32_t k = 0; k < group->degree; k++) {
    hcp__piece pieces[2];
    int32_t n = hcp__pieces(z, k, pieces);
    int64_t first = (group->first_rank + k - b->first) * b->capacity->rows;
    for (int32_t p = 0; p < n; p++) {
      for (int64_t i = 0; i < pieces[p].rows && pieces[p].start + i < seen; i++)
        gathered[pieces[p].start + i] = first + rows[k] + i;
      rows[k] += pieces[p].rows;
    }
  }
}

/* A span sees the first `seen` tokens of its sequence: as keys from row `at` on. */
static void arrange(const int64_t *gathered, int64_t seen, int64_t at, int64_t *keys,
                    int64_t *places) {
  for (int64_t i = 0; i < seen; i++) {
    keys[at + i] = gathered[i];
    places[gathered[i]] = at + i;
  }
}

static void fill_sequence(const block *b, const hcp_group *group, int32_t place, int32_t s,
                          int64_t *scratch, hcp_table *table, cursor *at) {
  hcp__piece spans[2];
  hcp__zigzag z = zigzag_at(b, group, s);
  int32_t n = hcp__pieces(&z, place, spans);
  int64_t gathered_rows = b->capacity->ranks * b->capacity->rows;
  int64_t *rows = scratch, *gathered = scratch + group->degree;
  int shared = b->capacity->ranks > 1;
  int64_t end = n == 0 ? 0 : spans[n - 1].start + spans[n - 1].rows;
  if (shared) fill_gathered(b, group, &z, end, rows, gathered);
  for (int32_t p = 0; p < n; p++) {
    int64_t seen = spans[p].start + spans[p].rows;
    if (shared)
      arrange(gathered, seen, at->key, section_of(table, HCP_FIXED_KEYS),
              section_of(table, HCP_FIXED_PLACES) + p * gathered_rows);
    append_span(at, &spans[p], seen);
  }
}

/* Spans after the last one are empty, at the end. */
static void fill_rest(int64_t *last, const int64_t *end) {
  for (int64_t *bound = last + 1; bound < end; bound++) *bound = *last;
}

static void fill(const block *b, int32_t rank, const int64_t *sizes, int64_t *scratch,
                 hcp_table *table) {
  const hcp_group *group = hcp__group_of(b->plan, b->micro_batch, rank);
  int64_t *places = section_of(table, HCP_FIXED_PLACES);
  int64_t *empty = section_of(table, HCP_FIXED_EMPTY);
  int64_t *queries = section_of(table, HCP_FIXED_QUERY_BOUNDS);
  int64_t *keys = section_of(table, HCP_FIXED_KEY_BOUNDS);
  cursor at = {section_of(table, HCP_FIXED_POSITIONS), queries, keys, 0, 0};
  for (int64_t i = 0; i < sizes[HCP_FIXED_PLACES]; i++) places[i] = sizes[HCP_FIXED_KEYS] - 1;
  for (int32_t s = 0; group != NULL && s < group->sequences; s++)
    fill_sequence(b, group, rank - group->first_rank, s, scratch, table, &at);
  fill_rest(at.queries, queries + sizes[HCP_FIXED_QUERY_BOUNDS]);
  fill_rest(at.keys, keys + sizes[HCP_FIXED_KEY_BOUNDS]);
  for (int64_t i = at.row; i < b->capacity->rows; i++) empty[i] = 1;
}

/* Words of scratch: rows of each rank of the group so far, and the longest sequence. */
static int64_t scratch_for(const block *b, int32_t rank) {
  const hcp_group *group = hcp__group_of(b->plan, b->micro_batch, rank);
  int64_t longest = 1;
  if (group == NULL) return 1;
  for (int32_t s = 0; s < group->sequences; s++)
    longest = hcp__most(longest, b->plan->lengths[b->plan->sequences[group->first_sequence + s]]);
  return group->degree + longest;
}

hcp_status hcp_fixed_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                            const hcp_capacity *capacity, hcp_table **fixed, hcp_error *err) {
  int64_t sizes[HCP_FIXED_SECTION_COUNT];
  hcp_status status = hcp_fixed_sizes(capacity, sizes, err);
  if (status == HCP_OK) status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  block b = {plan, capacity, micro_batch, rank - rank % capacity->ranks};
  status = expect_block(&b, err);
  if (status != HCP_OK) return status;
  hcp_table *table = hcp__table_allocate(HCP_TABLE_HEADER, HCP_FIXED_SECTION_COUNT, sizes, widths);
  int64_t *scratch = calloc((size_t)scratch_for(&b, rank), sizeof *scratch);
  if (table == NULL || scratch == NULL) {
    free(table);
    free(scratch);
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for tables of %lld rows",
                     (long long)capacity->rows);
  }
  fill(&b, rank, sizes, scratch, table);
  free(scratch);
  *fixed = table;
  return HCP_OK;
}
