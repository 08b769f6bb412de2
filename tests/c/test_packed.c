/* test_packed.c - packed entries keep each row, blocks of ranks gather and sum each row once, kept
 * moves fit their receives, and what no table is is refused. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { ENTRIES = 9, ROWS = 256, RANKS = 9, BLOCK_ROWS = 8 };

/* ---- packed entries ---- */

/* Entries that ascend, with gaps or without. Returns how many there are. */
static int64_t draw_entries(int64_t entries[ENTRIES][6]) {
  int64_t n = draw(1, ENTRIES), query = draw(0, 5), key = draw(0, 5);
  for (int64_t i = 0; i < n; i++) {
    int64_t queries = draw(0, 8), keys = draw(0, 8);
    query += draw(0, 2);
    key += draw(0, 2);
    entries[i][0] = query;
    entries[i][1] = queries;
    entries[i][2] = key;
    entries[i][3] = keys;
    entries[i][4] = draw(-9, 0);
    entries[i][5] = draw(0, 9);
    query += queries;
    key += keys;
  }
  return n;
}

/* Bounds name every entry in order, and between them rows of one side alone. */
static void check_bounds(const hcp_table *packed, int64_t entries[ENTRIES][6], int64_t n) {
  const int64_t *bounds = section(packed, HCP_PACKED_BOUNDS);
  int64_t e = 0, count = records(packed, HCP_PACKED_BOUNDS);
  for (int64_t i = 0; i + 1 < count; i++) {
    const int64_t *from = bounds + 2 * i, *to = bounds + 2 * i + 2;
    int is_entry = e < n && from[0] == entries[e][0] - entries[0][0] &&
                   from[1] == entries[e][2] - entries[0][2];
    CHECK(to[0] >= from[0] && to[1] >= from[1]);
    if (is_entry) {
      CHECK_INT(to[0] - from[0], entries[e][1]);
      CHECK_INT(to[1] - from[1], entries[e++][3]);
    } else {
      CHECK(to[0] == from[0] || to[1] == from[1]);
    }
  }
  CHECK_INT(e, n);
  CHECK_INT(bounds[2 * count - 2], entries[n - 1][0] + entries[n - 1][1] - entries[0][0]);
  CHECK_INT(bounds[2 * count - 1], entries[n - 1][2] + entries[n - 1][3] - entries[0][2]);
}

static void check_places(const hcp_table *packed, int64_t entries[ENTRIES][6], int64_t n,
                         int64_t sequences) {
  const int64_t *starts = section(packed, HCP_PACKED_STARTS);
  const int64_t *rows = section(packed, HCP_PACKED_ROWS);
  CHECK_INT(records(packed, HCP_PACKED_STARTS), sequences > 0 ? sequences + 1 : 0);
  CHECK_INT(records(packed, HCP_PACKED_ROWS), sequences);
  for (int64_t i = 0; i < sequences; i++) {
    const int64_t *entry = entries[i < n ? i : n - 1];
    for (int32_t side = 0; side < 2; side++) {
      CHECK_INT(rows[2 * i + side], i < n ? entry[2 * side + 1] : 0);
      CHECK_INT(starts[2 * i + side],
                entry[2 * side] + (i < n ? 0 : entry[2 * side + 1]) - entries[0][2 * side]);
    }
  }
}

static int64_t pairs_of(const int64_t *entry) {
  int64_t pairs = 0;
  for (int64_t q = 0; q < entry[1]; q++)
    for (int64_t k = 0; k < entry[3]; k++) pairs += entry[4] <= k - q && k - q <= entry[5];
  return pairs;
}

static void check_sizes(const hcp_table *packed, int64_t entries[ENTRIES][6], int64_t n) {
  hcp_packed_sizes sizes;
  int64_t pairs = 0, queries = 0, keys = 0;
  memcpy(&sizes, section(packed, HCP_PACKED_SIZES), sizeof sizes);
  for (int64_t i = 0; i < n; i++) {
    pairs += pairs_of(entries[i]);
    queries += entries[i][1];
    keys += entries[i][3];
    CHECK(entries[i][1] <= sizes.most_queries && sizes.most_queries <= sizes.most_bound_queries);
    CHECK(entries[i][3] <= sizes.most_keys && sizes.most_keys <= sizes.most_bound_keys);
    if (sizes.square) CHECK_INT(entries[i][1], entries[i][3]);
  }
  CHECK_INT(sizes.pairs, pairs);
  CHECK_INT(sizes.queries, queries);
  CHECK_INT(sizes.keys, keys);
}

static void packed_entries_keep_each_row(void) {
  int64_t entries[ENTRIES][6];
  hcp_table *packed;
  for (int32_t i = 0; i < 500; i++) {
    int64_t n = draw_entries(entries), sequences = draw(0, 1) ? 0 : n + draw(0, 5);
    CHECK_INT(hcp_packed_create(entries[0], n, sequences, &packed, NULL), HCP_OK);
    check_bounds(packed, entries, n);
    check_places(packed, entries, n, sequences);
    check_sizes(packed, entries, n);
    hcp_table_destroy(packed);
  }
}

static void any_entries_are_packed_or_refused(void) {
  static const int64_t values[] = {-1, 0, 1, 99, INT32_MAX, INT64_MAX, INT64_MIN};
  int64_t entries[ENTRIES][6];
  for (int32_t i = 0; i < 3000; i++) {
    int64_t n = draw_entries(entries);
    for (int32_t spoiled = draw(1, 3); spoiled > 0; spoiled--) {
      int32_t at = draw(0, (int32_t)n - 1), word = draw(0, 5);
      entries[at][word] = values[draw(0, 6)];
    }
    hcp_table *packed = NULL;
    hcp_error err;
    hcp_status status = hcp_packed_create(entries[0], n, 0, &packed, &err);
    CHECK(status == HCP_OK || status == HCP_INVALID);
    if (status == HCP_INVALID) CHECK_TEXT(err.message, "expected rows from");
    hcp_table_destroy(packed);
  }
}

/* ---- blocks ---- */

/* What rank r stages by the runs of a section, of the rows that it has. */
static void stage(const hcp_table *block, int32_t s, const int64_t *rows, int64_t *staged) {
  for (int64_t i = 0; i < records(block, s); i++) {
    const int64_t *run = section(block, s) + 4 * i;
    CHECK_INT(run[2], 0);
    memcpy(staged + run[0], rows + run[3], (size_t)run[1] * sizeof *rows);
  }
}

/* Adds up what a rank reads: part 0 is its own rows, the others are what other ranks staged. */
static void read_parts(const hcp_table *block, int32_t s, int32_t first, const int64_t *own,
                       int64_t staged[RANKS][RANKS * BLOCK_ROWS], int64_t *out) {
  for (int64_t i = 0; i < records(block, s); i++) {
    const int64_t *run = section(block, s) + 4 * i;
    const int64_t *part =
        run[2] == 0 ? own : staged[section(block, HCP_BLOCK_OTHERS)[run[2] - 1] - first];
    for (int64_t r = 0; r < run[1]; r++) out[run[0] + r] += part[run[3] + r];
  }
}

static int64_t value_of(int32_t from, int64_t row) { return 1000 * (from + 1) + row; }

static void check_rank(hcp_table *const *blocks, int32_t first, int32_t ranks, int32_t rank,
                       int64_t rows) {
  static int64_t given[RANKS * BLOCK_ROWS], staged[RANKS][RANKS * BLOCK_ROWS];
  static int64_t gathered[RANKS * BLOCK_ROWS], summed[BLOCK_ROWS];
  memset(gathered, 0, sizeof gathered);
  memset(summed, 0, sizeof summed);
  for (int32_t r = 0; r < ranks; r++) {
    for (int64_t i = 0; i < rows; i++) given[i] = value_of(r, i);
    stage(blocks[r], HCP_BLOCK_GATHER_STAGED, given, staged[r]);
  }
  for (int64_t i = 0; i < rows; i++) given[i] = value_of(rank, i);
  read_parts(blocks[rank], HCP_BLOCK_GATHER_READ, first, given, staged, gathered);
  for (int64_t i = 0; i < ranks * rows; i++)
    CHECK_INT(gathered[i], value_of((int32_t)(i / rows), i % rows));
  for (int32_t r = 0; r < ranks; r++) {
    for (int64_t i = 0; i < ranks * rows; i++) given[i] = value_of(r, i);
    stage(blocks[r], HCP_BLOCK_SUM_STAGED, given, staged[r]);
  }
  for (int64_t i = 0; i < rows; i++) given[i] = value_of(rank, rank * rows + i);
  read_parts(blocks[rank], HCP_BLOCK_SUM_READ, first, given, staged, summed);
  for (int64_t i = 0; i < rows; i++) {
    int64_t wanted = 0;
    for (int32_t r = 0; r < ranks; r++) wanted += value_of(r, rank * rows + i);
    CHECK_INT(summed[i], wanted);
  }
}

/* What a rank sends another is what that one receives. */
static void check_moves(hcp_table *const *blocks, int32_t first, int32_t ranks, int64_t rows) {
  for (int32_t r = 0; r < ranks; r++)
    for (int32_t peer = 0; peer < ranks; peer++) {
      const int64_t *own = section(blocks[r], HCP_BLOCK_OWN) + 3 * peer;
      const int64_t *all = section(blocks[r], HCP_BLOCK_ALL) + 3 * peer;
      const int64_t *sum = section(blocks[r], HCP_BLOCK_SUM) + 4 * peer;
      CHECK_INT(own[0], first + peer);
      CHECK(own[1] == 0 && own[2] == rows && all[2] == rows && sum[1] == rows);
      CHECK(all[0] == own[0] && all[1] == peer * rows && sum[3] == all[1] && sum[0] == 0);
    }
}

static void a_block_gathers_and_sums_each_row_once(void) {
  for (int32_t i = 0; i < 200; i++) {
    int32_t first = draw(0, 99), ranks = draw(1, RANKS);
    int64_t rows = draw(1, BLOCK_ROWS);
    hcp_table *blocks[RANKS];
    for (int32_t r = 0; r < ranks; r++)
      CHECK_INT(hcp_block_create(first, ranks, first + r, rows, &blocks[r], NULL), HCP_OK);
    check_moves(blocks, first, ranks, rows);
    for (int32_t r = 0; r < ranks; r++) check_rank(blocks, first, ranks, r, rows);
    for (int32_t r = 0; r < ranks; r++) hcp_table_destroy(blocks[r]);
  }
}

static void what_is_no_block_is_refused(void) {
  hcp_table *block = NULL;
  hcp_error err;
  CHECK_INT(hcp_block_create(4, 2, 6, 1, &block, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "expected one of 2 ranks from rank 4 on");
  CHECK_INT(hcp_block_create(INT32_MAX, 2, INT32_MIN, 1, &block, &err), HCP_INVALID);
  CHECK_INT(hcp_block_create(0, 2, 1, (int64_t)1 << 41, &block, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "expected 1 to");
}

/* ---- moves ---- */

static void kept_moves_name_each_kept_row_once(void) {
  for (int32_t i = 0; i < 500; i++) {
    uint8_t kept[ROWS] = {0};
    int64_t given[RANKS][3], made[RANKS][3], rows = 0, count = draw(0, RANKS), n = 0, row = 0;
    for (int64_t m = 0; m < count; m++) {
      given[m][0] = m;
      given[m][1] = rows;
      given[m][2] = draw(0, 9);
      rows += given[m][2];
    }
    for (int64_t r = 0; r < rows; r++) kept[r] = (uint8_t)(draw(0, 2) == 0 ? draw(1, 255) : 0);
    const hcp_moves all = {given[0], count};
    CHECK_INT(hcp_moves_keep(&all, kept, rows, made[0], &n, NULL), HCP_OK);
    const int64_t *next = made[0];
    for (int64_t m = 0; m < count; m++) {
      int64_t wanted = 0;
      for (int64_t r = 0; r < given[m][2]; r++) wanted += kept[given[m][1] + r] != 0;
      if (wanted == 0) continue;
      CHECK(next[0] == m && next[1] == row && next[2] == wanted);
      row += wanted;
      next += 3;
    }
    CHECK_INT(next - made[0], 3 * n);
  }
}

static void moves_of_rows_that_are_not_there_are_refused(void) {
  static const int64_t wrong[][3] = {{0, 0, 4},  {0, 4, 0},         {0, -1, 1},
                                     {0, 1, -1}, {0, 2, INT64_MAX}, {0, INT64_MAX, 1}};
  const uint8_t kept[3] = {1, 0, 1};
  int64_t made[3], n;
  hcp_error err;
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const hcp_moves all = {wrong[i], 1};
    CHECK_INT(hcp_moves_keep(&all, kept, 3, made, &n, &err), HCP_INVALID);
    CHECK_TEXT(err.message, "expected <= 3");
  }
}

/* ---- words ---- */

/* Sections of any words lie inside of them, or the words are refused. */
static void read_spoiled(const hcp_table *schedule) {
  static const int64_t values[] = {-1, 0, 1, 2, 9, INT64_MAX, INT64_MIN, (int64_t)1 << 56};
  hcp_section found[HCP_SCHEDULE_SECTION_COUNT];
  hcp_schedule_header header;
  hcp_schedule_sizes sizes;
  hcp_error err;
  int64_t count = schedule->word_count - (draw(0, 9) == 0 ? draw(0, 60) : 0);
  int64_t *words = malloc(((size_t)count + 1) * sizeof *words);
  if (words == NULL) abort();
  memcpy(words, schedule->words, (size_t)count * sizeof *words);
  if (draw(0, 1)) words[draw(0, (int32_t)count - 1)] = values[draw(0, 7)];
  hcp_status status = hcp_schedule_read(words, count, found, &header, &sizes, &err);
  if (status == HCP_INVALID) CHECK_TEXT(err.message, "that are no schedule");
  for (int32_t s = 0; status == HCP_OK && s < HCP_SCHEDULE_SECTION_COUNT; s++)
    CHECK(0 <= found[s].first && found[s].first <= found[s].end && found[s].end <= count);
  free(words);
}

static void words_say_what_they_are_or_are_refused(void) {
  for (int32_t i = 0; i < 100; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    for (int32_t rank = 0; plan->micro_batch_count > 0 && rank < plan->limits.ranks; rank++) {
      hcp_section found[HCP_SCHEDULE_SECTION_COUNT];
      hcp_schedule_header header, set = {.rank = rank, .mask = -1, .step = i};
      hcp_schedule_sizes sizes;
      hcp_table *schedule;
      hcp_mask mask = {rank % 2 ? -1 : 5, 0, -1};
      CHECK_INT(hcp_schedule_create(plan, 0, rank, HCP_COMM_ALL_GATHER, 1, &mask, 64, 0, 0,
                                    &schedule, NULL),
                HCP_OK);
      hcp_schedule_set_header(schedule, &set);
      CHECK_INT(
          hcp_schedule_read(schedule->words, schedule->word_count, found, &header, &sizes, NULL),
          HCP_OK);
      CHECK(header.rank == rank && header.mask == -1 && header.step == i);
      CHECK_INT(sizes.rows, section(schedule, HCP_SCHEDULE_SIZES)[0]);
      CHECK_INT(sizes.comm_type, HCP_COMM_ALL_GATHER);
      CHECK_INT(sizes.query_rows, section(schedule, HCP_SCHEDULE_STAGES)[11]);
      for (int32_t n = 0; n < 30; n++) read_spoiled(schedule);
      hcp_table_destroy(schedule);
    }
    hcp_plan_destroy(plan);
  }
}

int main(void) {
  packed_entries_keep_each_row();
  any_entries_are_packed_or_refused();
  a_block_gathers_and_sums_each_row_once();
  what_is_no_block_is_refused();
  kept_moves_name_each_kept_row_once();
  moves_of_rows_that_are_not_there_are_refused();
  words_say_what_they_are_or_are_refused();
  return check_report("test_packed");
}
