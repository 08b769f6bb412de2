/* test_launches.c - launches give each row what the entries of a schedule give it. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 9, ROWS = 4096, LAUNCHES = 1024, PARTS = 65536 };

/* A number of each query of each launch, and of each row what all that it gets sums up to. */
static int64_t parts[PARTS], first_part[LAUNCHES + 1], wanted[ROWS], found[ROWS];

static uint64_t mix(uint64_t a, uint64_t b) { return (a * 0x9e3779b97f4a7c15u) ^ (b + 77 * a); }

/* What a row of an entry gives: entries of one stage differ in queries or keys. */
static int64_t value_of(const int64_t *entry, int64_t stage, int64_t row) {
  uint64_t sum = (uint64_t)stage + 1;
  for (int32_t w = 0; w < 6; w++) sum = mix(sum, (uint64_t)entry[w]);
  return (int64_t)(mix(sum, (uint64_t)row) % 1000003);
}

static int64_t stage_of_entry(const hcp_table *schedule, int64_t e) {
  int64_t stage = 0;
  while (section(schedule, HCP_SCHEDULE_STAGES)[13 * stage + 4] <= e) stage++;
  return stage;
}

static void add_wanted(const hcp_table *schedule) {
  memset(wanted, 0, sizeof wanted);
  for (int64_t i = 0; i < records(schedule, HCP_SCHEDULE_OUTPUT_RUNS); i++) {
    const int64_t *run = section(schedule, HCP_SCHEDULE_OUTPUT_RUNS) + 4 * i;
    const int64_t *entry = section(schedule, HCP_SCHEDULE_ENTRIES) + 6 * run[2];
    for (int64_t r = 0; r < run[1]; r++)
      wanted[run[0] + r] += value_of(entry, stage_of_entry(schedule, run[2]), run[3] + r);
  }
}

/* Entries of a launch ascend without overlap, in queries and in keys. */
static void check_launch(const hcp_table *launches, const int64_t *launch, int64_t begin,
                         int32_t packs) {
  int64_t query = launch[1], key = launch[3];
  CHECK(launch[0] > begin);
  if (!packs) CHECK_INT(launch[0], begin + 1);
  for (int64_t e = begin; e < launch[0]; e++) {
    const int64_t *entry = section(launches, HCP_LAUNCHES_ENTRIES) + 6 * e;
    CHECK(entry[0] >= query && entry[2] >= key);
    query = entry[0] + entry[1];
    key = entry[2] + entry[3];
  }
  CHECK_INT(query, launch[2]);
  CHECK_INT(key, launch[4]);
}

/* Each launch computes its entries. */
static void compute(const hcp_table *launches, int32_t packs) {
  int64_t begin = 0, stage = 0;
  for (int64_t i = 0; i < records(launches, HCP_LAUNCHES_LAUNCHES); i++) {
    const int64_t *launch = section(launches, HCP_LAUNCHES_LAUNCHES) + 7 * i;
    while (section(launches, HCP_LAUNCHES_STAGES)[7 * stage] <= i) stage++;
    first_part[i + 1] = first_part[i] + launch[2] - launch[1];
    check_launch(launches, launch, begin, packs);
    for (; begin < launch[0]; begin++) {
      const int64_t *entry = section(launches, HCP_LAUNCHES_ENTRIES) + 6 * begin;
      for (int64_t r = 0; r < entry[1]; r++)
        parts[first_part[i] + entry[0] - launch[1] + r] = value_of(entry, stage, r);
    }
  }
}

static void add_runs(const hcp_table *launches, int32_t s, int64_t begin, int64_t end,
                     int64_t first) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t *run = section(launches, s) + 4 * i;
    for (int64_t r = 0; r < run[1]; r++)
      found[run[0] + r] += parts[first_part[first + run[2]] + run[3] + r];
  }
}

static void add_found(const hcp_table *launches) {
  int64_t waiting = 0, begin = 0;
  memset(found, 0, sizeof found);
  for (int64_t s = 0; s < records(launches, HCP_LAUNCHES_STAGES); s++) {
    const int64_t *stage = section(launches, HCP_LAUNCHES_STAGES) + 7 * s;
    add_runs(launches, HCP_LAUNCHES_RUNNING_RUNS, begin, stage[1], waiting);
    if (stage[4]) waiting = stage[0];
    begin = stage[1];
  }
  add_runs(launches, HCP_LAUNCHES_OUTPUT_RUNS, 0, records(launches, HCP_LAUNCHES_OUTPUT_RUNS),
           waiting);
}

/* The part of all rows stands in each row once. */
static void check_sunk(const hcp_table *launches, int64_t rows) {
  int64_t extra = 0, most = 0;
  for (int64_t i = 0; i < records(launches, HCP_LAUNCHES_SUNK_RUNS); i++) {
    const int64_t *run = section(launches, HCP_LAUNCHES_SUNK_RUNS) + 4 * i;
    if (run[2] > most) most = run[2];
  }
  for (int64_t i = 0; i < records(launches, HCP_LAUNCHES_SUNK_RUNS); i++) {
    const int64_t *run = section(launches, HCP_LAUNCHES_SUNK_RUNS) + 4 * i;
    if (run[2] != most) continue;
    CHECK_INT(run[0], run[3]);
    CHECK_INT(run[0], extra);
    extra = run[0] + run[1];
  }
  CHECK_INT(extra, rows);
}

static void check_launches(const hcp_table *schedule, int32_t packs, int64_t waiting) {
  hcp_table *launches;
  hcp_kernel kernel = {packs, waiting};
  CHECK_INT(hcp_launches_create(schedule->words, schedule->word_count, &kernel, &launches, NULL),
            HCP_OK);
  int64_t rows = section(launches, HCP_LAUNCHES_SIZES)[1];
  compute(launches, packs);
  add_wanted(schedule);
  add_found(launches);
  for (int64_t r = 0; r < rows; r++) CHECK_INT(found[r], wanted[r]);
  CHECK_INT(records(launches, HCP_LAUNCHES_ENTRIES), records(schedule, HCP_SCHEDULE_ENTRIES));
  check_sunk(launches, rows);
  hcp_table_destroy(launches);
}

static hcp_table *draw_schedule(const hcp_plan *plan) {
  hcp_table *schedule;
  int32_t left = draw(0, 1) ? -1 : draw(0, 30), right = draw(0, 1) ? 0 : -1;
  int32_t m = draw(0, plan->micro_batch_count - 1), rank = draw(0, plan->limits.ranks - 1);
  hcp_comm_type type = (hcp_comm_type)draw(0, HCP_COMM_A2A);
  hcp_mask mask = {left, right, -1};
  CHECK_INT(hcp_schedule_create(plan, m, rank, type, 1, &mask, 64, 0, 0, &schedule, NULL), HCP_OK);
  hcp_schedule_header header = {.rank = rank, .mask = -1, .head_chunks = 1, .in_place = draw(0, 1)};
  hcp_schedule_set_header(schedule, &header);
  return schedule;
}

static void rows_get_the_same(void) {
  for (int32_t i = 0; i < 400; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    if (plan->micro_batch_count > 0) {
      hcp_table *schedule = draw_schedule(plan);
      check_launches(schedule, 0, draw(0, 9));
      check_launches(schedule, 1, draw(0, 9));
      hcp_table_destroy(schedule);
    }
    hcp_plan_destroy(plan);
  }
}

/* Any words give launches or an error, and nothing is read outside of them. */
static void spoil(const hcp_table *schedule) {
  int64_t count, *words = draw_spoiled(schedule, &count);
  hcp_table *launches = NULL;
  hcp_kernel kernel = {draw(0, 1), 5};
  hcp_error err;
  hcp_status status = hcp_launches_create(words, count, &kernel, &launches, &err);
  CHECK(status == HCP_OK || status == HCP_INVALID);
  if (status == HCP_INVALID) CHECK_TEXT(err.message, "that are no schedule");
  hcp_table_destroy(launches);
  free(words);
}

static void spoiled_words_are_refused_or_harmless(void) {
  for (int32_t i = 0; i < 200; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    if (plan->micro_batch_count > 0) {
      hcp_table *schedule = draw_schedule(plan);
      for (int32_t n = 0; n < 50; n++) spoil(schedule);
      hcp_table_destroy(schedule);
    }
    hcp_plan_destroy(plan);
  }
}

static void entries_of_unlike_windows_do_not_join(void) {
  const int64_t entries[3][6] = {{0, 4, 0, 4, -3, 0}, {4, 4, 4, 4, -3, 3}, {8, 4, 8, 4, -3, 0}};
  hcp_table *launches;
  hcp_kernel kernel = {.packs = 1};
  hcp_entries given = {.entries = entries[0], .count = 3};
  CHECK_INT(hcp_launches_join(&given, &kernel, &launches, NULL), HCP_OK);
  CHECK_INT(records(launches, HCP_LAUNCHES_LAUNCHES), 2);
  CHECK_INT(section(launches, HCP_LAUNCHES_LAUNCHES)[0], 2); /* the first and the last */
  CHECK_INT(section(launches, HCP_LAUNCHES_LAUNCHES)[2], 12);
  CHECK_INT(section(launches, HCP_LAUNCHES_LAUNCHES)[6], 0); /* causal */
  hcp_table_destroy(launches);
  CHECK_INT(hcp_launches_join(&(hcp_entries){0}, &kernel, &launches, NULL), HCP_OK);
  CHECK_INT(records(launches, HCP_LAUNCHES_LAUNCHES), 0);
  hcp_table_destroy(launches);
}

static void runs_over_entries_become_runs_over_their_launches(void) {
  const int64_t entries[2][6] = {{0, 4, 0, 6, -9, 9}, {5, 3, 7, 2, -9, 9}};
  int64_t queries[2][4] = {{0, 4, 0, 0}, {4, 2, 1, 1}}, keys[1][4] = {{3, 2, 1, 0}};
  hcp_entries given = {entries[0], 2, queries[0], 2, keys[0], 1};
  hcp_kernel kernel = {.packs = 1};
  hcp_table *launches;
  CHECK_INT(hcp_launches_join(&given, &kernel, &launches, NULL), HCP_OK);
  const int64_t *run = section(launches, HCP_LAUNCHES_OUTPUT_RUNS) + 4;
  CHECK_INT(run[2], 0); /* both are in one launch */
  CHECK_INT(run[3], 6); /* in which row 1 of the second entry is row 6 */
  CHECK_INT(section(launches, HCP_LAUNCHES_RETURN_RUNS)[3], 7);
  hcp_table_destroy(launches);
  for (int64_t part = -1; part <= 2; part += 3) {
    keys[0][2] = part;
    hcp_error err;
    CHECK_INT(hcp_launches_join(&given, &kernel, &launches, &err), HCP_INVALID);
  }
}

int main(void) {
  rows_get_the_same();
  spoiled_words_are_refused_or_harmless();
  entries_of_unlike_windows_do_not_join();
  runs_over_entries_become_runs_over_their_launches();
  return check_report("test_launches");
}
