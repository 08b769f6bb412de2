/* test_fixed.c - tables of fixed capacity name the keys that each token sees, on every rank. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 8, ROWS = 64 };

/* The token of each gathered row: sequence and place; -1: none. */
typedef struct token {
  int32_t sequence;
  int64_t place;
} token;

static token gathered[RANKS * ROWS];

static void gather(const hcp_plan *plan, int32_t micro_batch, int32_t first,
                   const hcp_capacity *capacity) {
  for (int32_t k = 0; k < capacity->ranks; k++) {
    hcp_layout *layout;
    int64_t row = k * capacity->rows;
    CHECK_INT(hcp_layout_create(plan, micro_batch, first + k, &layout, NULL), HCP_OK);
    for (int64_t i = 0; i < capacity->rows; i++) gathered[row + i] = (token){-1, -1};
    for (int32_t p = 0; p < layout->span_count; p++)
      for (int64_t i = 0; i < layout->spans[p].rows; i++)
        gathered[row++] =
            (token){layout->sequences[layout->spans[p].index], layout->spans[p].start + i};
    hcp_layout_destroy(layout);
  }
}

/* The keys of span p are the tokens of its sequence up to its end. */
static void check_keys(const hcp_table *table, const hcp_capacity *capacity, hcp_span span,
                       int32_t sequence, int32_t p, int second) {
  const int64_t *bounds = section(table, HCP_FIXED_KEY_BOUNDS);
  const int64_t *keys = section(table, HCP_FIXED_KEYS), *places = section(table, HCP_FIXED_PLACES);
  CHECK_INT(bounds[p + 1] - bounds[p], span.start + span.rows);
  for (int64_t i = 0; capacity->ranks > 1 && i < span.start + span.rows; i++) {
    int64_t row = keys[bounds[p] + i];
    CHECK_INT(gathered[row].sequence, sequence);
    CHECK_INT(gathered[row].place, i);
    CHECK_INT(places[(second ? capacity->ranks * capacity->rows : 0) + row], bounds[p] + i);
  }
}

/* Each place is that of a key, or the last row, which is none. */
static void check_places(const hcp_table *table, int64_t keys_seen) {
  int64_t last = records(table, HCP_FIXED_KEYS) - 1, found = 0;
  for (int64_t i = 0; i < records(table, HCP_FIXED_PLACES); i++)
    found += section(table, HCP_FIXED_PLACES)[i] != last;
  if (last >= 0) CHECK_INT(found, keys_seen);
}

static void check_rank(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                       const hcp_capacity *capacity) {
  hcp_layout *layout;
  hcp_table *table;
  CHECK_INT(hcp_layout_create(plan, micro_batch, rank, &layout, NULL), HCP_OK);
  CHECK_INT(hcp_fixed_create(plan, micro_batch, rank, capacity, &table, NULL), HCP_OK);
  int64_t row = 0;
  for (int32_t p = 0; p < layout->span_count; p++) {
    hcp_span span = layout->spans[p];
    int second = p > 0 && layout->spans[p - 1].index == span.index;
    CHECK_INT(section(table, HCP_FIXED_QUERY_BOUNDS)[p], row);
    check_keys(table, capacity, span, layout->sequences[span.index], p, second);
    for (int64_t i = 0; i < span.rows; i++, row++)
      CHECK_INT(section(table, HCP_FIXED_POSITIONS)[row], span.start + i);
  }
  for (int64_t p = layout->span_count; p < records(table, HCP_FIXED_QUERY_BOUNDS); p++)
    CHECK_INT(section(table, HCP_FIXED_QUERY_BOUNDS)[p], row);
  for (int64_t i = 0; i < capacity->rows; i++)
    CHECK_INT(section(table, HCP_FIXED_EMPTY)[i], i >= row);
  int64_t bounds = records(table, HCP_FIXED_KEY_BOUNDS);
  check_places(table, section(table, HCP_FIXED_KEY_BOUNDS)[bounds - 1]);
  hcp_table_destroy(table);
  hcp_layout_destroy(layout);
}

static void tables_name_what_tokens_see(void) {
  for (int32_t k = 0; k < 300; k++) {
    hcp_plan *plan = draw_plan(RANKS);
    hcp_capacity capacity = {draw(42, ROWS), DRAW_SEQUENCES, 1 << 10, plan->limits.ranks};
    for (int32_t m = 0; m < plan->micro_batch_count; m++) {
      gather(plan, m, 0, &capacity);
      for (int32_t r = 0; r < plan->limits.ranks; r++) check_rank(plan, m, r, &capacity);
    }
    hcp_plan_destroy(plan);
  }
}

static void a_plan_without_room_is_refused_on_all_ranks(void) {
  hcp_limits limits = draw_limits(2, 2, 2, 8);
  hcp_cost cost = {.pair = 1};
  const int64_t lengths[] = {15};
  hcp_plan *plan;
  hcp_table *table = NULL;
  hcp_error err;
  CHECK_INT(hcp_plan_create(lengths, 1, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  for (int32_t rank = 0; rank < 2; rank++) {
    CHECK_INT(hcp_fixed_create(plan, 0, rank, &(hcp_capacity){7, 1, 15, 2}, &table, &err),
              HCP_INVALID);
    CHECK_TEXT(err.message, "rows is 8, expected <= 7, the capacity of this GraphHandler");
    CHECK_INT(hcp_fixed_create(plan, 0, rank, &(hcp_capacity){8, 1, 14, 2}, &table, &err),
              HCP_INVALID);
    CHECK_TEXT(err.message, "max_seqlen is 15, expected <= 14");
    CHECK_INT(hcp_fixed_create(plan, 0, rank, &(hcp_capacity){8, 1, 15, 1}, &table, &err),
              HCP_INVALID);
    CHECK_TEXT(err.message, "its group is the ranks 0 to 1, expected ranks within");
    CHECK_INT(hcp_fixed_create(plan, 0, rank, &(hcp_capacity){8, 0, 15, 2}, &table, &err),
              HCP_INVALID);
    CHECK_TEXT(err.message, "sequences is 0, expected 1 to");
  }
  CHECK(table == NULL);
  hcp_plan_destroy(plan);
}

int main(void) {
  tables_name_what_tokens_see();
  a_plan_without_room_is_refused_on_all_ranks();
  return check_report("test_fixed");
}
