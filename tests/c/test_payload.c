/* test_payload.c - payloads and their results travel on all ranks at once, in one process:
 * csrc/core/payload.c and csrc/core/payload_route.c. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 7, UNITS = 2048, ROWS = 16384, TOKENS = 512 };

/* A payload of a plan: of each sequence its units, and the tokens that take rows. Row r of a
 * sequence has the value VALUE(sequence, r). */
#define VALUE(sequence, row) ((int64_t)(sequence) * ROWS + (row))

typedef struct drawn {
  hcp_split split;
  int32_t takes, sources[DRAW_SEQUENCES];
  int64_t units[DRAW_SEQUENCES], rows[DRAW_SEQUENCES], runs_of[DRAW_SEQUENCES];
  int64_t unit_rows[UNITS];
  hcp_taker_run runs[DRAW_SEQUENCES][TOKENS];
  int64_t each[DRAW_SEQUENCES][TOKENS]; /* rows that each token takes */
} drawn;

typedef struct one_rank {
  hcp_payload *payload;
  hcp_table *table;
  int64_t source[ROWS], wire[ROWS], received[ROWS], output[ROWS];
} one_rank;

static drawn of;
static one_rank all[RANKS];

/* Every token takes no row or `rows` of them, and a unit has the rows of some takers. */
static void draw_sequence(const hcp_plan *plan, int32_t i, int64_t *unit) {
  int64_t rows = draw(1, 3), in_unit = 0;
  of.rows[i] = of.units[i] = of.runs_of[i] = 0;
  for (int64_t t = 0; t < plan->lengths[i]; t++) {
    of.each[i][t] = draw(0, 1) ? rows : 0;
    if (of.each[i][t] == 0) continue;
    of.runs[i][of.runs_of[i]++] = (hcp_taker_run){t, 1, rows};
    of.rows[i] += rows;
    in_unit += rows;
    if (draw(0, 2) > 0) continue;
    of.unit_rows[(*unit)++] = in_unit;
    of.units[i]++;
    in_unit = 0;
  }
  if (in_unit == 0) return;
  of.unit_rows[(*unit)++] = in_unit;
  of.units[i]++;
}

static void draw_payload(const hcp_plan *plan) {
  int64_t unit = 0;
  of.split = (hcp_split)draw(0, HCP_SPLIT_COUNT - 1);
  of.takes = of.split == HCP_SPLIT_TOKENS || draw(0, 1);
  for (int32_t i = 0; i < plan->n; i++) {
    of.sources[i] = draw(0, plan->limits.ranks - 1);
    draw_sequence(plan, i, &unit);
  }
}

static int64_t append_runs(int32_t sequence, hcp_taker_run *to) {
  for (int64_t r = 0; r < of.runs_of[sequence]; r++) to[r] = of.runs[sequence][r];
  return of.runs_of[sequence];
}

static const hcp_group *group_of(const hcp_plan *plan, int32_t micro_batch, int32_t rank) {
  const hcp_micro_batch *batch = &plan->micro_batches[micro_batch];
  for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
    const hcp_group *group = &plan->groups[g];
    if (rank >= group->first_rank && rank < group->first_rank + group->degree) return group;
  }
  return NULL;
}

static void create(const hcp_plan *plan, int32_t rank) {
  static hcp_taker_run loaded[DRAW_SEQUENCES * TOKENS], computed[DRAW_SEQUENCES * TOKENS];
  hcp_takers takers = {of.sources, rank, of.runs_of, 0, loaded, 0, computed};
  for (int32_t i = 0; i < plan->n; i++)
    if (of.sources[i] == rank) takers.loaded_count += append_runs(i, loaded + takers.loaded_count);
  for (int32_t m = 0; m < plan->micro_batch_count; m++) {
    const hcp_group *group = group_of(plan, m, rank);
    for (int32_t s = 0; group != NULL && s < group->sequences; s++)
      takers.computed_count +=
          append_runs(plan->sequences[group->first_sequence + s], computed + takers.computed_count);
  }
  CHECK_INT(hcp_payload_create(plan, of.split, of.units, of.unit_rows, of.takes ? &takers : NULL,
                               &all[rank].payload, NULL),
            HCP_OK);
}

/* ---- on their way ---- */

static void deliver(int32_t from, const int64_t *move) {
  const hcp_table *table = all[move[0]].table;
  for (int64_t i = 0; i < records(table, HCP_ROUTE_RECEIVES); i++) {
    const int64_t *receive = section(table, HCP_ROUTE_RECEIVES) + 3 * i;
    if (receive[0] != from) continue;
    CHECK_INT(receive[2], move[2]);
    memcpy(all[move[0]].received + receive[1], all[from].wire + move[1],
           (size_t)move[2] * sizeof(int64_t));
    return;
  }
  CHECK_TEXT("no receive", "a receive for every send");
}

/* From the sources of all ranks to their outputs. */
static void travel(int32_t ranks) {
  for (int32_t r = 0; r < ranks; r++)
    CHECK_INT(gather_rows(all[r].table, HCP_ROUTE_PACK, all[r].source, all[r].wire),
              section(all[r].table, HCP_ROUTE_SIZES)[1]);
  for (int32_t r = 0; r < ranks; r++)
    for (int64_t i = 0; i < records(all[r].table, HCP_ROUTE_SENDS); i++)
      deliver(r, section(all[r].table, HCP_ROUTE_SENDS) + 3 * i);
  for (int32_t r = 0; r < ranks; r++) {
    CHECK_INT(gather_rows(all[r].table, HCP_ROUTE_ARRANGE, all[r].received, all[r].output),
              section(all[r].table, HCP_ROUTE_SIZES)[3]);
    hcp_table_destroy(all[r].table);
  }
}

/* ---- rows ---- */

static int64_t row_before(int32_t sequence, int64_t token) {
  int64_t row = 0;
  for (int64_t t = 0; t < token; t++) row += of.each[sequence][t];
  return row;
}

static void expect_rows(const int64_t *output, int64_t *at, int32_t sequence, int64_t row,
                        int64_t rows) {
  for (int64_t r = row; r < row + rows; r++) CHECK_INT(output[(*at)++], VALUE(sequence, r));
}

/* The rows that a rank has by the rules, but for EVEN, of which `next` knows those that earlier
 * ranks have: `rows` are the next ones. */
static void check_group_rows(const hcp_plan *plan, int32_t micro_batch, const hcp_group *group,
                             int32_t rank, int64_t *at, int64_t rows, int64_t next[]) {
  hcp_layout *layout;
  int64_t end = *at + rows, *output = all[rank].output;
  CHECK_INT(hcp_layout_create(plan, micro_batch, rank, &layout, NULL), HCP_OK);
  if (of.split == HCP_SPLIT_TOKENS)
    for (int32_t p = 0; p < layout->span_count; p++) {
      hcp_span span = layout->spans[p];
      int32_t i = layout->sequences[span.index];
      int64_t row = row_before(i, span.start);
      expect_rows(output, at, i, row, row_before(i, span.start + span.rows) - row);
    }
  for (int32_t s = 0; s < group->sequences; s++) {
    int32_t i = plan->sequences[group->first_sequence + s];
    int64_t left = of.rows[i] - next[i];
    if (of.split == HCP_SPLIT_WHOLE || (of.split == HCP_SPLIT_FIRST && rank == group->first_rank))
      expect_rows(output, at, i, 0, of.rows[i]);
    if (of.split != HCP_SPLIT_EVEN) continue;
    int64_t here = left < end - *at ? left : end - *at;
    expect_rows(output, at, i, next[i], here);
    next[i] += here;
  }
  CHECK_INT(*at, end);
  hcp_layout_destroy(layout);
}

static void check_rows(const hcp_plan *plan) {
  static int64_t next[DRAW_SEQUENCES];
  memset(next, 0, sizeof next);
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    int64_t filled = 0;
    create(plan, r);
    for (int32_t i = 0; i < plan->n; i++)
      for (int64_t row = 0; of.sources[i] == r && row < of.rows[i]; row++)
        all[r].source[filled++] = VALUE(i, row);
    CHECK_INT(hcp_payload_route(plan, all[r].payload, 0, of.sources, r, &all[r].table, NULL),
              HCP_OK);
    CHECK_INT(section(all[r].table, HCP_ROUTE_SIZES)[0], filled);
  }
  static int64_t parts[RANKS][DRAW_SEQUENCES];
  for (int32_t r = 0; r < plan->limits.ranks; r++)
    for (int32_t m = 0; m < plan->micro_batch_count; m++)
      parts[r][m] = section(all[r].table, HCP_ROUTE_PARTS)[m];
  travel(plan->limits.ranks);
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    int64_t at = 0;
    for (int32_t m = 0; m < plan->micro_batch_count; m++) {
      const hcp_group *group = group_of(plan, m, r);
      if (group != NULL) check_group_rows(plan, m, group, r, &at, parts[r][m], next);
      if (group == NULL) CHECK_INT(parts[r][m], 0);
    }
  }
  for (int32_t i = 0; of.split == HCP_SPLIT_EVEN && i < plan->n; i++)
    CHECK_INT(next[i], of.rows[i]);
}

/* ---- results ---- */

/* The bounds of units and sequences agree, and every unit is one of the payload's. */
static void check_bounds(const hcp_plan *plan, int32_t micro_batch, int32_t rank) {
  hcp_table *rows;
  const hcp_group *group = group_of(plan, micro_batch, rank);
  CHECK_INT(hcp_payload_measure(plan, all[rank].payload, 0, micro_batch, rank, &rows, NULL),
            HCP_OK);
  int64_t sequences = records(rows, HCP_PAYLOAD_SEQUENCES),
          units = records(rows, HCP_PAYLOAD_UNITS);
  CHECK_INT(sequences, group == NULL ? 1 : group->sequences + 1);
  CHECK_INT(units > 0, of.split != HCP_SPLIT_TOKENS);
  if (units > 0)
    CHECK_INT(section(rows, HCP_PAYLOAD_UNITS)[units - 1],
              section(rows, HCP_PAYLOAD_SEQUENCES)[sequences - 1]);
  hcp_table_destroy(rows);
}

/* A result is the value of the taker's first row: a rank has those of its rows, in their order. */
static void fill_results(const hcp_plan *plan, int32_t micro_batch, int32_t rank) {
  hcp_table *rows;
  const hcp_group *group = group_of(plan, micro_batch, rank);
  int64_t filled = 0, first_of[DRAW_SEQUENCES] = {0};
  CHECK_INT(hcp_payload_measure(plan, all[rank].payload, 0, micro_batch, rank, &rows, NULL),
            HCP_OK);
  for (int32_t s = 0; group != NULL && s < group->sequences; s++) {
    int32_t i = plan->sequences[group->first_sequence + s];
    /* Under EVEN the rows begin where those of the ranks before end. */
    for (int32_t k = group->first_rank; of.split == HCP_SPLIT_EVEN && k < rank; k++) {
      hcp_table *other;
      CHECK_INT(hcp_payload_measure(plan, all[k].payload, 0, micro_batch, k, &other, NULL), HCP_OK);
      first_of[s] +=
          section(other, HCP_PAYLOAD_SEQUENCES)[s + 1] - section(other, HCP_PAYLOAD_SEQUENCES)[s];
      hcp_table_destroy(other);
    }
    int64_t here =
        section(rows, HCP_PAYLOAD_SEQUENCES)[s + 1] - section(rows, HCP_PAYLOAD_SEQUENCES)[s];
    int64_t row = 0;
    for (int64_t t = 0; t < plan->lengths[i]; row += of.each[i][t++])
      if (of.each[i][t] > 0 && row >= first_of[s] && row < first_of[s] + here)
        all[rank].source[filled++] = VALUE(i, row);
  }
  if (of.split != HCP_SPLIT_TOKENS) CHECK_INT(section(all[rank].table, HCP_ROUTE_SIZES)[0], filled);
  hcp_table_destroy(rows);
}

/* Under TOKENS a rank has the takers of its own spans. */
static int64_t fill_own(const hcp_plan *plan, int32_t micro_batch, int32_t rank, int64_t *to,
                        int64_t *taking) {
  hcp_layout *layout;
  int64_t filled = 0, row = 0;
  CHECK_INT(hcp_layout_create(plan, micro_batch, rank, &layout, NULL), HCP_OK);
  for (int32_t p = 0; p < layout->span_count; p++) {
    hcp_span span = layout->spans[p];
    int32_t i = layout->sequences[span.index];
    for (int64_t t = span.start; t < span.start + span.rows; t++, row++) {
      if (of.each[i][t] == 0) continue;
      taking[filled] = row;
      to[filled++] = VALUE(i, row_before(i, t));
    }
  }
  hcp_layout_destroy(layout);
  return filled;
}

static void check_results(const hcp_plan *plan, int32_t micro_batch) {
  static int64_t wanted[ROWS], taking[ROWS];
  hcp_table *rows;
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    CHECK_INT(
        hcp_payload_route_to_tokens(plan, all[r].payload, micro_batch, r, &all[r].table, NULL),
        HCP_OK);
    if (of.split == HCP_SPLIT_TOKENS)
      fill_own(plan, micro_batch, r, all[r].source, taking);
    else
      fill_results(plan, micro_batch, r);
  }
  travel(plan->limits.ranks);
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    int64_t n = fill_own(plan, micro_batch, r, wanted, taking);
    CHECK_INT(hcp_payload_measure(plan, all[r].payload, 0, micro_batch, r, &rows, NULL), HCP_OK);
    CHECK_INT(records(rows, HCP_PAYLOAD_TAKING), n);
    for (int64_t i = 0; i < n; i++) {
      CHECK_INT(all[r].output[i], wanted[i]);
      CHECK_INT(section(rows, HCP_PAYLOAD_TAKING)[i], taking[i]);
    }
    hcp_table_destroy(rows);
  }
}

/* ---- a row of each sequence ---- */

static void check_by_sequence(const hcp_plan *plan, int32_t micro_batch) {
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    const hcp_group *group = group_of(plan, micro_batch, r);
    for (int32_t s = 0; group != NULL && s < group->sequences; s++)
      all[r].source[s] = plan->sequences[group->first_sequence + s];
    CHECK_INT(hcp_route_by_sequence(plan, of.sources, micro_batch, r, &all[r].table, NULL), HCP_OK);
  }
  travel(plan->limits.ranks);
  const hcp_micro_batch *batch = &plan->micro_batches[micro_batch];
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    int64_t at = 0;
    for (int32_t i = 0; i < plan->n; i++)
      for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++)
        for (int32_t s = 0; s < plan->groups[g].sequences; s++)
          if (plan->sequences[plan->groups[g].first_sequence + s] == i && of.sources[i] == r)
            CHECK_INT(all[r].output[at++], i);
  }
}

static void payloads_arrive(void) {
  for (int32_t k = 0; k < 300; k++) {
    hcp_plan *plan = draw_plan(RANKS);
    draw_payload(plan);
    check_rows(plan);
    for (int32_t m = 0; m < plan->micro_batch_count; m++) {
      check_by_sequence(plan, m);
      for (int32_t r = 0; r < plan->limits.ranks; r++) check_bounds(plan, m, r);
      if (of.takes) check_results(plan, m);
    }
    for (int32_t r = 0; r < plan->limits.ranks; r++) hcp_payload_destroy(all[r].payload);
    hcp_plan_destroy(plan);
  }
}

/* A unit goes to the rank in whose share its middle lies: where it lies on a border, to the later
 * one. */
static void check_shares(const hcp_plan *plan, const int64_t *unit_rows, int64_t units,
                         const int64_t expected[2]) {
  hcp_payload *payload;
  hcp_table *rows;
  CHECK_INT(hcp_payload_create(plan, HCP_SPLIT_EVEN, &units, unit_rows, NULL, &payload, NULL),
            HCP_OK);
  for (int32_t rank = 0; rank < 2; rank++) {
    CHECK_INT(hcp_payload_measure(plan, payload, 0, 0, rank, &rows, NULL), HCP_OK);
    CHECK_INT(section(rows, HCP_PAYLOAD_SEQUENCES)[1], expected[rank]);
    hcp_table_destroy(rows);
  }
  hcp_payload_destroy(payload);
}

static void units_go_where_their_middle_lies(void) {
  hcp_limits limits = draw_limits(2, 2, 2, 8);
  hcp_cost cost = {.pair = 1};
  const int64_t length = 8;
  hcp_plan *plan;
  CHECK_INT(hcp_plan_create(&length, 1, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  check_shares(plan, (const int64_t[]){2, 2}, 2, (const int64_t[]){2, 2});
  check_shares(plan, (const int64_t[]){4}, 1, (const int64_t[]){0, 4});
  check_shares(plan, (const int64_t[]){4, 1}, 2, (const int64_t[]){4, 1});
  check_shares(plan, (const int64_t[]){1, 4}, 2, (const int64_t[]){1, 4});
  check_shares(plan, NULL, 5, (const int64_t[]){2, 3});
  check_shares(plan, NULL, 0, (const int64_t[]){0, 0});
  hcp_plan_destroy(plan);
}

/* ---- what is refused ---- */

static void tokens_of_two_units_are_refused(void) {
  const int64_t units[] = {3, 3};
  const hcp_taker_run runs[] = {{4, 3, 2}}, wide[] = {{0, 1, INT64_MAX}, {1, INT64_MAX, 1}};
  hcp_error err;
  CHECK_INT(hcp_units_check(units, 2, runs, 1, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "token 5 takes rows before and after row 3, where a unit ends");
  CHECK_INT(hcp_units_check((const int64_t[]){2, 4}, 2, runs, 1, NULL), HCP_OK);
  CHECK_INT(hcp_units_check(units, 2, wide, 1, &err), HCP_INVALID);
  CHECK_INT(hcp_units_check(units, 2, wide + 1, 1, &err), HCP_INVALID);
  CHECK_INT(hcp_units_check((const int64_t[]){INT64_MAX, 1}, 2, runs, 1, &err), HCP_INVALID);
}

static void what_is_no_payload_is_refused(void) {
  hcp_limits limits = draw_limits(2, 1, 2, 8);
  hcp_cost cost = {.pair = 1};
  hcp_plan *plan;
  hcp_payload *payload = NULL;
  hcp_table *table = NULL;
  hcp_error err;
  const int64_t lengths[] = {8, 5}, units[] = {1, 1}, counts[] = {1, 1};
  const int32_t sources[] = {0, 1};
  const hcp_taker_run runs[] = {{0, 1, 1}, {0, 1, 1}};
  hcp_takers takers = {sources, 0, counts, 2, runs, 0, runs};
  CHECK_INT(hcp_plan_create(lengths, 2, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  CHECK_INT(hcp_payload_create(plan, HCP_SPLIT_COUNT, units, NULL, NULL, &payload, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "split is 4, expected 0 to 3");
  CHECK_INT(hcp_payload_create(plan, HCP_SPLIT_TOKENS, units, NULL, NULL, &payload, &err),
            HCP_INVALID);
  CHECK_INT(hcp_payload_create(plan, HCP_SPLIT_EVEN, units, NULL, &takers, &payload, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "takers have 2 runs of loaded");
  CHECK(payload == NULL);
  CHECK_INT(hcp_payload_create(plan, HCP_SPLIT_EVEN, units, NULL, NULL, &payload, &err), HCP_OK);
  CHECK_INT(hcp_payload_route_to_tokens(plan, payload, 0, 0, &table, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "the payload has no takers");
  CHECK_INT(hcp_payload_route(plan, payload, 0, sources, 2, &table, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "rank is 2, expected 0 to 1");
  hcp_payload_destroy(payload);
  hcp_payload_destroy(NULL);
  hcp_plan_destroy(plan);
}

int main(void) {
  payloads_arrive();
  units_go_where_their_middle_lies();
  tokens_of_two_units_are_refused();
  what_is_no_payload_is_refused();
  return check_report("test_payload");
}
