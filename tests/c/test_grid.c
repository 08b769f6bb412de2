/* test_grid.c - grids by example and against a slow reference. */
#include "check.h"
#include "hcp/hcp.h"

enum { MAX_RANKS = 64 };

static hcp_grid grid_of(int32_t tp, int32_t cp, int32_t dp, int32_t pp, const char *order) {
  const int32_t sizes[HCP_DIMENSION_COUNT] = {tp, cp, dp, pp};
  hcp_grid grid = {0};
  hcp_error err = {0};
  CHECK_INT(hcp_grid_init(sizes, order, &grid, &err), HCP_OK);
  return grid;
}

static void check_groups(const hcp_grid *grid, const char *role, int32_t count, int32_t size,
                         const int32_t *expected) {
  int32_t ranks[MAX_RANKS], group_count = 0, group_size = 0;
  CHECK_INT(hcp_grid_groups(grid, role, ranks, &group_count, &group_size, NULL), HCP_OK);
  CHECK_INT(group_count, count);
  CHECK_INT(group_size, size);
  for (int32_t i = 0; i < count * size; i++) CHECK_INT(ranks[i], expected[i]);
}

static void groups_of_a_small_job(void) {
  hcp_grid grid = grid_of(2, 2, 1, 2, "tp-cp-dp-pp");
  CHECK_INT(grid.ranks, 8);
  check_groups(&grid, "tp", 4, 2, (int32_t[]){0, 1, 2, 3, 4, 5, 6, 7});
  check_groups(&grid, "cp", 4, 2, (int32_t[]){0, 2, 1, 3, 4, 6, 5, 7});
  check_groups(&grid, "dp", 8, 1, (int32_t[]){0, 1, 2, 3, 4, 5, 6, 7});
  check_groups(&grid, "pp", 4, 2, (int32_t[]){0, 4, 1, 5, 2, 6, 3, 7});
  check_groups(&grid, "tp_pp", 2, 4, (int32_t[]){0, 1, 4, 5, 2, 3, 6, 7});
  check_groups(&grid, "pp_tp", 2, 4, (int32_t[]){0, 1, 4, 5, 2, 3, 6, 7});
  check_groups(&grid, "tp_cp_dp_pp", 1, 8, (int32_t[]){0, 1, 2, 3, 4, 5, 6, 7});
}

/* The places of all ranks, counted up like an odometer. */
static void slow_places(const hcp_grid *grid, int32_t place[MAX_RANKS][HCP_DIMENSION_COUNT]) {
  int32_t now[HCP_DIMENSION_COUNT] = {0};
  for (int32_t rank = 0; rank < grid->ranks; rank++) {
    memcpy(place[rank], now, sizeof now);
    for (int32_t i = 0; i < HCP_DIMENSION_COUNT; i++) {
      if (++now[grid->order[i]] < grid->sizes[grid->order[i]]) break;
      now[grid->order[i]] = 0;
    }
  }
}

static int has(const char *role, const char *name) { return strstr(role, name) != NULL; }

static void check_against_places(const hcp_grid *grid, const char *role) {
  int32_t place[MAX_RANKS][HCP_DIMENSION_COUNT];
  int32_t ranks[MAX_RANKS], seen[MAX_RANKS] = {0}, count = 0, size = 0, last_first = -1;
  slow_places(grid, place);
  CHECK_INT(hcp_grid_groups(grid, role, ranks, &count, &size, NULL), HCP_OK);
  CHECK_INT(count * size, grid->ranks);
  for (int32_t i = 0; i < count * size; i++) {
    int32_t first = ranks[i / size * size];
    seen[ranks[i]]++;
    if (i % size > 0) CHECK(ranks[i] > ranks[i - 1]);
    if (i % size == 0) {
      CHECK(first > last_first);
      last_first = first;
    }
    for (hcp_dimension d = 0; d < HCP_DIMENSION_COUNT; d++)
      if (!has(role, hcp_dimension_name(d))) CHECK_INT(place[ranks[i]][d], place[first][d]);
  }
  for (int32_t rank = 0; rank < grid->ranks; rank++) CHECK_INT(seen[rank], 1);
}

static void groups_equal_the_slow_reference(void) {
  static const char *const orders[] = {"tp-cp-dp-pp", "pp-dp-cp-tp", "tp-cp-pp-dp", "dp-pp-tp-cp"};
  static const char *const roles[] = {"tp",    "cp",    "dp",    "pp",       "dp_cp",
                                      "tp_cp", "tp_pp", "pp_cp", "tp_dp_cp", "tp_cp_dp_pp"};
  for (size_t o = 0; o < sizeof orders / sizeof *orders; o++)
    for (size_t r = 0; r < sizeof roles / sizeof *roles; r++) {
      hcp_grid wide = grid_of(2, 3, 4, 2, orders[o]);
      hcp_grid flat = grid_of(1, 1, 7, 1, orders[o]);
      check_against_places(&wide, roles[r]);
      check_against_places(&flat, roles[r]);
    }
}

static int32_t shares(const hcp_grid *a, const hcp_grid *b, const char *role) {
  int32_t same = -1;
  CHECK_INT(hcp_grid_shares(a, b, role, &same, NULL), HCP_OK);
  return same;
}

static void another_cp_changes_three_roles_of_the_usual_order(void) {
  hcp_grid train = grid_of(2, 1, 4, 2, "tp-cp-dp-pp");
  hcp_grid eval = grid_of(2, 2, 2, 2, "tp-cp-dp-pp");
  CHECK_INT(shares(&train, &eval, "tp"), 1);
  CHECK_INT(shares(&train, &eval, "pp"), 1);
  CHECK_INT(shares(&train, &eval, "tp_pp"), 1);
  CHECK_INT(shares(&train, &eval, "dp_cp"), 1);
  CHECK_INT(shares(&train, &eval, "tp_dp_cp"), 1);
  CHECK_INT(shares(&train, &eval, "cp"), 0);
  CHECK_INT(shares(&train, &eval, "dp"), 0);
  CHECK_INT(shares(&train, &eval, "tp_cp"), 0);
}

static void another_cp_moves_pp_when_pp_is_inside_dp(void) {
  hcp_grid train = grid_of(1, 1, 4, 2, "tp-cp-pp-dp");
  hcp_grid eval = grid_of(1, 2, 2, 2, "tp-cp-pp-dp");
  CHECK_INT(shares(&train, &eval, "pp"), 0);
  CHECK_INT(shares(&train, &eval, "tp"), 1);
}

static void check_refused(int32_t tp, const char *order, hcp_status status, const char *text) {
  const int32_t sizes[HCP_DIMENSION_COUNT] = {tp, 65536, 1, 1};
  hcp_grid grid = {.ranks = -7};
  hcp_error err = {0};
  CHECK_INT(hcp_grid_init(sizes, order, &grid, &err), status);
  CHECK_TEXT(err.message, text);
  CHECK_INT(grid.ranks, -7);
}

static void bad_grids_are_refused(void) {
  check_refused(0, "tp-cp-dp-pp", HCP_INVALID, "tp is 0, expected >= 1");
  check_refused(32768, "tp-cp-dp-pp", HCP_OVERFLOW, "more ranks than");
  check_refused(1, "", HCP_INVALID, "order is \"\", expected");
  check_refused(1, "tp-cp-dp", HCP_INVALID, "order is \"tp-cp-dp\"");
  check_refused(1, "tp-cp-dp-dp", HCP_INVALID, "each once");
  check_refused(1, "tp-cp-dp-pp-", HCP_INVALID, "each once");
  check_refused(1, "tp_cp_dp_pp", HCP_INVALID, "joined by '-'");
}

static void bad_roles_are_refused(void) {
  static const char *const roles[] = {"", "ep", "dp_", "_dp", "dp__cp", "dp_dp", "dp-cp", "t"};
  hcp_grid grid = grid_of(1, 2, 2, 1, "tp-cp-dp-pp");
  hcp_grid other = grid_of(1, 2, 1, 1, "tp-cp-dp-pp");
  hcp_error err = {0};
  int32_t ranks[4], count = -1, size = -1, same = -1;
  for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
    CHECK_INT(hcp_grid_groups(&grid, roles[i], ranks, &count, &size, &err), HCP_INVALID);
    CHECK_TEXT(err.message, roles[i]);
    CHECK_INT(hcp_grid_shares(&grid, &grid, roles[i], &same, NULL), HCP_INVALID);
  }
  CHECK_INT(hcp_grid_shares(&grid, &other, "dp", &same, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "4 and 2 ranks");
  CHECK_INT(count, -1);
  CHECK_INT(same, -1);
}

int main(void) {
  groups_of_a_small_job();
  groups_equal_the_slow_reference();
  another_cp_changes_three_roles_of_the_usual_order();
  another_cp_moves_pp_when_pp_is_inside_dp();
  bad_grids_are_refused();
  bad_roles_are_refused();
  return check_report("test_grid");
}
