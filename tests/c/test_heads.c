/* test_heads.c - neighbours that stage and read rows get those of their heads, and their own back.
 */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 9, ROWS = 4096, BLOCKS = RANKS * ROWS };

/* What neighbours have, by neighbour. */
static hcp_table *schedules[RANKS], *tables[RANKS];
static int64_t staged[RANKS][BLOCKS], found[BLOCKS];
static hcp_head_share shares[RANKS];
static int64_t neighbours;

static const int64_t *move_of(int64_t i) {
  return section(schedules[0], HCP_SCHEDULE_HEAD_RECEIVES) + 3 * i;
}

static int computes(int64_t i) { return shares[i].end_query > shares[i].first_query; }

static int64_t place_of(int64_t rank) {
  int64_t i = 0;
  while (move_of(i)[0] != rank) i++;
  return i;
}

static int64_t whole_rows(void) { return move_of(neighbours - 1)[1] + move_of(neighbours - 1)[2]; }

/* A number for a row of one neighbour and what it is for another. */
static int64_t value_of(int64_t of, int64_t row, int64_t with) {
  return ((int64_t)ROWS * of + row) * RANKS + with;
}

/* Rows <- parts, whose values are `given` a part. Returns how many. */
static int64_t run_all(const hcp_table *table, int32_t runs, const int64_t *(*given)(int64_t part),
                       int64_t *to) {
  int64_t end = 0, made = 0;
  for (int64_t i = 0; i < records(table, runs); i++) {
    const int64_t *run = section(table, runs) + 4 * i;
    CHECK(run[0] >= end && run[1] > 0 && run[3] >= 0);
    end = run[0] + run[1];
    made += run[1];
    memcpy(to + run[0], given(run[2]) + run[3], (size_t)run[1] * sizeof *to);
  }
  return made;
}

/* The table whose owners' staged rows are parts. */
static const hcp_table *reading;
static int32_t owner_section;

static const int64_t *staged_of(int64_t part) {
  CHECK(part >= 0 && part < records(reading, owner_section));
  return staged[place_of(section(reading, owner_section)[2 * part])];
}

/* Rows that are read, and rows that lie here, each of them once. Returns how many. */
static int64_t read_all(const hcp_table *table, int32_t owners, int32_t runs, int32_t own,
                        const int64_t *(*given)(int64_t part)) {
  int64_t most = neighbours * whole_rows(), filled = 0;
  memset(found, 0xff, (size_t)most * sizeof *found);
  reading = table;
  owner_section = owners;
  int64_t made = run_all(table, runs, staged_of, found);
  made += run_all(table, own, given, found);
  for (int64_t row = 0; row < most; row++) filled += found[row] >= 0;
  CHECK_INT(filled, made);
  return made;
}

/* ---- to heads ---- */

static int64_t parts[RANKS][ROWS];
static const int64_t *block_for(int64_t reader) { return parts[reader]; }
static int64_t self;
static const int64_t *own_block(int64_t part) {
  CHECK_INT(part, 0);
  return parts[self];
}

static void fill_blocks(int64_t i) {
  self = i;
  for (int64_t reader = 0; reader < neighbours; reader++)
    for (int64_t row = 0; row < move_of(i)[2]; row++) parts[reader][row] = value_of(i, row, reader);
}

static void stage_all(void) {
  int64_t most = 0;
  for (int64_t i = 0; i < neighbours; i++) {
    const int64_t *sizes = section(tables[i], HCP_HEADS_SIZES);
    fill_blocks(i);
    CHECK_INT(run_all(tables[i], HCP_HEADS_STAGED_RUNS, block_for, staged[i]), sizes[0]);
    if (sizes[0] > most) most = sizes[0];
  }
  for (int64_t i = 0; i < neighbours; i++) CHECK_INT(section(tables[i], HCP_HEADS_SIZES)[1], most);
}

static void check_read(int64_t i) {
  static int64_t came[ROWS], wanted[ROWS];
  fill_blocks(i);
  int64_t rows =
      read_all(tables[i], HCP_HEADS_OWNERS, HCP_HEADS_READ_RUNS, HCP_HEADS_OWN_RUNS, own_block);
  CHECK_INT(rows, computes(i) ? whole_rows() : 0);
  for (int64_t from = 0; from < neighbours; from++)
    for (int64_t row = 0; row < move_of(from)[2]; row++)
      came[move_of(from)[1] + row] = value_of(from, row, i);
  gather_rows(schedules[i], HCP_SCHEDULE_GATHER, came, wanted);
  for (int64_t row = 0; row < rows; row++) CHECK_INT(found[row], wanted[row]);
}

/* ---- and back ---- */

static int64_t results[ROWS];
static const int64_t *result(int64_t part) {
  CHECK_INT(part, 0);
  return results;
}

static void fill_results(int64_t i) {
  for (int64_t row = 0; row < whole_rows(); row++) results[row] = value_of(0, row, i);
}

static void stage_all_back(void) {
  int64_t most = 0;
  for (int64_t i = 0; i < neighbours; i++) {
    const int64_t *sizes = section(tables[i], HCP_HEADS_SIZES);
    fill_results(i);
    CHECK_INT(run_all(tables[i], HCP_HEADS_BACK_STAGED_RUNS, result, staged[i]), sizes[2]);
    CHECK_INT(sizes[2], computes(i) ? whole_rows() - move_of(i)[2] : 0);
    if (sizes[2] > most) most = sizes[2];
  }
  for (int64_t i = 0; i < neighbours; i++) CHECK_INT(section(tables[i], HCP_HEADS_SIZES)[3], most);
}

static void check_read_back(int64_t i) {
  static int64_t tokens[ROWS], came[ROWS];
  int64_t own = move_of(i)[2];
  fill_results(i);
  read_all(tables[i], HCP_HEADS_BACK_OWNERS, HCP_HEADS_BACK_READ_RUNS, HCP_HEADS_BACK_OWN_RUNS,
           result);
  for (int64_t row = 0; row < whole_rows(); row++) tokens[row] = row;
  gather_rows(schedules[i], HCP_SCHEDULE_SCATTER, tokens, came);
  for (int64_t from = 0; from < neighbours; from++)
    for (int64_t row = 0; row < own && computes(from); row++)
      CHECK_INT(found[from * own + row], value_of(0, came[move_of(i)[1] + row], from));
}

/* ---- who reads whom ---- */

static int names(const hcp_table *table, int32_t s, int32_t width, int64_t rank) {
  for (int64_t i = 0; i < records(table, s); i++)
    if (section(table, s)[width * i] == rank) return 1;
  return 0;
}

static void check_pairs(int32_t readers, int32_t owners) {
  for (int64_t i = 0; i < neighbours; i++)
    for (int64_t j = 0; j < neighbours; j++)
      CHECK_INT(names(tables[i], readers, 1, move_of(j)[0]),
                names(tables[j], owners, 2, move_of(i)[0]));
}

/* Each begins with another owner, whose rows for it are staged first. */
static void check_first(void) {
  for (int64_t i = 0; i < neighbours; i++) {
    int64_t owner = (i + 1) % neighbours;
    if (!computes(i) || owner == i || move_of(owner)[2] == 0) continue;
    CHECK_INT(section(tables[owner], HCP_HEADS_STAGED_RUNS)[2], i);
  }
}

/* ---- whose heads ---- */

static void check_block(const int64_t *block, int64_t first, int64_t end, int64_t most) {
  CHECK_INT(block[0], first);
  CHECK_INT(block[1], end - first);
  CHECK_INT(block[2], most);
}

static void check_blocks(int64_t of) {
  const int64_t *blocks = section(tables[of], HCP_HEADS_BLOCKS);
  const int64_t *back = section(tables[of], HCP_HEADS_BACK_BLOCKS);
  int64_t queries = 0, keys = 0;
  CHECK_INT(records(tables[of], HCP_HEADS_BLOCKS), 2 * neighbours);
  CHECK_INT(records(tables[of], HCP_HEADS_BACK_BLOCKS), 2);
  for (int64_t i = 0; i < neighbours; i++) {
    if (shares[i].end_query - shares[i].first_query > queries)
      queries = shares[i].end_query - shares[i].first_query;
    if (shares[i].end_key - shares[i].first_key > keys)
      keys = shares[i].end_key - shares[i].first_key;
  }
  for (int64_t i = 0; i < neighbours; i++) {
    check_block(blocks + 3 * i, shares[i].first_query, shares[i].end_query, queries);
    check_block(blocks + 3 * (neighbours + i), shares[i].first_key, shares[i].end_key, keys);
  }
  check_block(back, 0, shares[of].end_query - shares[of].first_query, queries);
  check_block(back + 3, 0, shares[of].end_key - shares[of].first_key, keys);
}

/* ---- drawn groups ---- */

static hcp_table *schedule_of(const hcp_plan *plan, int32_t m, int32_t rank, int32_t inner) {
  hcp_table *schedule;
  hcp_mask mask = {-1, -1, -1};
  hcp_comm_type type = inner > 0 ? HCP_COMM_A2A_P2P : HCP_COMM_A2A;
  CHECK_INT(hcp_schedule_create(plan, m, rank, type, inner > 0 ? inner : 1, &mask, 64, 0, 0,
                                &schedule, NULL),
            HCP_OK);
  hcp_schedule_header header = {.rank = rank, .mask = -1, .head_chunks = 1, .in_place = 1};
  hcp_schedule_set_header(schedule, &header);
  return schedule;
}

static void check_all(void) {
  stage_all();
  for (int64_t i = 0; i < neighbours; i++) check_read(i);
  stage_all_back();
  for (int64_t i = 0; i < neighbours; i++) check_read_back(i);
  for (int64_t i = 0; i < neighbours; i++) check_blocks(i);
  check_pairs(HCP_HEADS_READERS, HCP_HEADS_OWNERS);
  check_pairs(HCP_HEADS_BACK_READERS, HCP_HEADS_BACK_OWNERS);
  check_first();
}

/* The neighbours of a group's first rank. */
static void check_group(const hcp_plan *plan, int32_t m, const hcp_group *group) {
  int32_t inner = draw(0, group->degree);
  if (inner > 0 && group->degree % inner != 0) inner = 0;
  schedules[0] = schedule_of(plan, m, group->first_rank, inner);
  neighbours = records(schedules[0], HCP_SCHEDULE_HEAD_RECEIVES);
  int64_t someone = draw(0, (int32_t)neighbours - 1);
  for (int64_t i = 0; i < neighbours; i++) {
    int32_t query = draw(0, 9), key = draw(0, 9), some = i == someone || draw(0, 3) > 0;
    shares[i] = (hcp_head_share){query, query + (some ? draw(1, 5) : 0), key,
                                 key + (some ? draw(1, 3) : 0)};
  }
  for (int64_t i = 0; i < neighbours; i++) {
    if (i > 0) schedules[i] = schedule_of(plan, m, (int32_t)move_of(i)[0], inner);
    CHECK_INT(hcp_heads_create(schedules[i]->words, schedules[i]->word_count, shares, neighbours,
                               &tables[i], NULL),
              HCP_OK);
  }
  check_all();
  for (int64_t i = 0; i < neighbours; i++) {
    hcp_table_destroy(schedules[i]);
    hcp_table_destroy(tables[i]);
  }
}

static void rows_come_and_go_back(void) {
  for (int32_t i = 0; i < 400; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    for (int32_t m = 0; m < plan->micro_batch_count; m++)
      for (int32_t g = 0; g < plan->micro_batches[m].groups; g++)
        check_group(plan, m, &plan->groups[plan->micro_batches[m].first_group + g]);
    hcp_plan_destroy(plan);
  }
}

/* ---- words from anywhere ---- */

static void refused(hcp_comm_type type, int64_t count, hcp_head_share other, const char *why) {
  const int64_t lengths[] = {40};
  hcp_limits limits = draw_limits(2, 2, 2, 40);
  hcp_plan *plan;
  hcp_table *schedule, *heads;
  hcp_cost cost = {.pair = 1};
  hcp_mask mask = {-1, -1, -1};
  hcp_error err;
  CHECK_INT(hcp_plan_create(lengths, 1, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  CHECK_INT(hcp_schedule_create(plan, 0, 0, type, 1, &mask, 64, 0, 0, &schedule, NULL), HCP_OK);
  shares[0] = (hcp_head_share){0, 1, 0, 1};
  shares[1] = other;
  CHECK_INT(hcp_heads_create(schedule->words, schedule->word_count, shares, count, &heads, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, why);
  hcp_table_destroy(schedule);
  hcp_plan_destroy(plan);
}

static void what_is_no_exchange_of_heads_is_refused(void) {
  const hcp_head_share other = {1, 2, 0, 1};
  refused(HCP_COMM_P2P, 2, other, "this rank exchanges no rows for heads");
  refused(HCP_COMM_A2A, 3, other, "shares has 3 records, expected 2: one a neighbour");
  refused(HCP_COMM_A2A, 2, (hcp_head_share){1, 2, 3, 2},
          "shares[1] is query heads 1 to 2 and key-value heads 3 to 2, expected 0 <= first <= end");
  refused(HCP_COMM_A2A, 2, (hcp_head_share){-1, 2, 0, 1}, "shares[1] is query heads -1 to 2");
  refused(HCP_COMM_A2A, 2, (hcp_head_share){0, INT64_MAX, 0, 1}, "shares[1] is query heads 0 to 9");
}

static void spoil(const hcp_table *schedule) {
  int64_t count, *words = draw_spoiled(schedule, &count);
  hcp_table *heads = NULL;
  hcp_error err;
  hcp_status status = hcp_heads_create(words, count, shares, neighbours, &heads, &err);
  CHECK(status == HCP_OK || status == HCP_INVALID);
  hcp_table_destroy(heads);
  free(words);
}

static void spoiled_words_are_refused_or_harmless(void) {
  for (int32_t i = 0; i < 200; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    if (plan->micro_batch_count > 0) {
      const hcp_group *group = &plan->groups[0];
      hcp_table *schedule = schedule_of(plan, 0, group->first_rank, 0);
      neighbours = records(schedule, HCP_SCHEDULE_HEAD_RECEIVES);
      for (int64_t j = 0; j < neighbours; j++) shares[j] = (hcp_head_share){j, j + 1, 0, 1};
      for (int32_t n = 0; n < 50; n++) spoil(schedule);
      hcp_table_destroy(schedule);
    }
    hcp_plan_destroy(plan);
  }
}

int main(void) {
  rows_come_and_go_back();
  what_is_no_exchange_of_heads_is_refused();
  spoiled_words_are_refused_or_harmless();
  return check_report("test_heads");
}
