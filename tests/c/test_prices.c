/* test_prices.c - rows, bytes and times of groups, comm types and replays. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 13 };

static void rows_of_all_ranks_are_the_length(void) {
  for (int32_t degree = 1; degree <= 24; degree++) {
    int64_t up_to = 0;
    for (int64_t length = 0; length <= 200; length++) {
      int64_t rows = 0, most = 0;
      for (int32_t j = 0; j < degree; j++) {
        int64_t held = hcp_rows_held(length, degree, j);
        rows += held;
        if (held > most) most = held;
      }
      if (most > up_to) up_to = most;
      CHECK_INT(rows, length);
      CHECK_INT(hcp_rows_max(length, degree), most);
      CHECK_INT(hcp_rows_up_to(length, degree), up_to);
    }
  }
}

static void nodes_are_those_that_ranks_are_in(void) {
  CHECK_INT(hcp_nodes_of(5, 9, 0), 1);
  CHECK_INT(hcp_nodes_of(4, 4, 4), 1);
  CHECK_INT(hcp_nodes_of(3, 2, 4), 2);
  CHECK_INT(hcp_nodes_of(0, 12, 4), 3);
  CHECK(hcp_nodes_allow(3, 4) && hcp_nodes_allow(8, 4) && hcp_nodes_allow(5, 0));
  CHECK(!hcp_nodes_allow(6, 4));
}

static void the_fewest_chunks_that_fit_are_found(void) {
  for (int32_t i = 0; i < 2000; i++) {
    hcp_memory memory = {.activation = draw(0, 9), .gathered = draw(0, 99)};
    memory.attention = draw(0, 99);
    memory.head_chunks = draw(0, 12);
    memory.limit = draw(1, 9000);
    memory.buffer = draw(0, 900);
    int64_t rows = draw(0, 50), tokens = draw(0, 200), chunks = 1;
    int32_t degree = draw(1, 3);
    hcp_memory tried = memory;
    for (; chunks < memory.head_chunks; chunks++) {
      tried.head_chunks = chunks;
      if (hcp_memory_bytes(&tried, rows, tokens, degree) + memory.buffer <= memory.limit) break;
    }
    CHECK_INT(hcp_memory_chunks(&memory, rows, tokens, degree), chunks);
  }
  hcp_memory huge = {.activation = INT64_MAX, .logit = INT64_MAX, .head_chunks = INT64_MAX};
  CHECK(hcp_memory_bytes(&huge, 3, 4, 2) == INT64_MAX);
  huge.limit = 1;
  CHECK(hcp_memory_chunks(&huge, 3, 4, 2) == INT64_MAX);
}

static void a_drawn_plan_is_measured(void) {
  for (int32_t i = 0; i < 1000; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    hcp_rank_work ranks[RANKS];
    hcp_plan_work work;
    int64_t rows = 0, tokens = 0, last = 0;
    hcp_plan_measure(plan, ranks, &work);
    for (int32_t r = 0; r < plan->limits.ranks; r++) {
      rows += ranks[r].rows;
      if (ranks[r].end > last) last = ranks[r].end;
      CHECK(ranks[r].busy <= ranks[r].end);
    }
    for (int32_t s = 0; s < plan->n; s++) tokens += plan->lengths[s];
    CHECK_INT(rows, tokens);
    CHECK(work.peak_rows <= plan->limits.max_tokens_per_rank);
    if (plan->limits.pipeline.stages < 2) CHECK_INT(last, plan->makespan);
    hcp_plan_destroy(plan);
  }
}

static void a_group_ends_with_its_last_sequence(void) {
  for (int32_t i = 0; i < 500; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    for (int32_t g = 0; g < plan->group_count; g++) {
      const hcp_group *group = &plan->groups[g];
      int64_t ends[DRAW_SEQUENCES], before = 0;
      CHECK_INT(
          hcp_group_times(plan, group->first_rank, group->degree,
                          plan->sequences + group->first_sequence, group->sequences, ends, NULL),
          HCP_OK);
      for (int32_t s = 0; s < group->sequences; s++) {
        CHECK(ends[s] > before);
        before = ends[s];
      }
      CHECK(before <= plan->makespan || plan->limits.pipeline.stages > 1);
    }
    hcp_plan_destroy(plan);
  }
}

/* One group of 4 ranks in a node of 4, or in two of 2. */
static hcp_plan *four_ranks(const hcp_cost *cost, int64_t length, int32_t node) {
  hcp_limits limits = draw_limits(4, 4, 4, 1 << 20);
  hcp_plan *plan = NULL;
  limits.ranks_per_node = node;
  CHECK_INT(hcp_plan_create(&length, 1, &limits, cost, 1, NULL, &plan, NULL), HCP_OK);
  return plan;
}

/* 64 tokens, 4 query and 2 key heads: see hcp_comm_times. The exchange of 4 neighbours has a copy
 * of each key head, that of 2 none. */
static void times_of_comm_types_are_those_of_the_header(void) {
  hcp_cost costs[] = {{.token = 1, .exchange = 400, .step = 7},
                      {.token = 1, .all_to_all = 1200, .step = 7}};
  hcp_priced_layer layer = {.left = -1, .query_heads = 4, .key_heads = 2};
  hcp_comm_time times[HCP_COMM_TIMES_MAX];
  int32_t count, fastest;
  for (int32_t i = 0; i < 2; i++) {
    hcp_plan *plan = four_ranks(&costs[i], 64, 0);
    CHECK_INT(hcp_comm_times(plan, 0, 0, &layer, 8192, times, &count, &fastest, NULL), HCP_OK);
    CHECK_INT(count, 4);
    CHECK_INT(times[0].time, 400 * 48 + 7);
    CHECK_INT(times[1].time, 400 * 48 + 3 * 7);
    CHECK_INT(times[2].time, 200 * (4 + 4) * 16 * 3 / 4 + 7);
    CHECK_INT(times[3].time, 200 * (4 + 2) * 16 / 2 + 7 + 400 / 2 * 32 + 7);
    CHECK_INT(times[2].comm_type, HCP_COMM_A2A);
    CHECK_INT(times[3].inner, 2);
    CHECK_INT(fastest, 3);
    hcp_plan_destroy(plan);
  }
}

static void neighbours_have_heads_and_stand_in_one_node(void) {
  hcp_cost cost = {.pair = 1};
  hcp_plan *plan = four_ranks(&cost, 64, 2);
  int32_t inner;
  CHECK_INT(hcp_comm_inner(plan, 0, 3, 8, 8, &inner, NULL), HCP_OK);
  CHECK_INT(inner, 2);
  CHECK_INT(hcp_comm_inner(plan, 0, 3, 1, 8, &inner, NULL), HCP_OK);
  CHECK_INT(inner, 1);
  CHECK_INT(hcp_comm_inner(plan, 0, 4, 8, 8, &inner, NULL), HCP_INVALID);
  hcp_plan_destroy(plan);
}

static void what_has_no_comm_time_is_refused(void) {
  hcp_cost cost = {.pair = 1}, table = {.pair = INT64_MAX};
  int64_t length = (int64_t)1 << 31, one = 1;
  int32_t degree = 4;
  table.times = &(hcp_times){1, 1, &length, &degree, &one, NULL};
  hcp_priced_layer layer = {.left = -1, .query_heads = 3, .key_heads = 2};
  hcp_comm_time times[HCP_COMM_TIMES_MAX];
  int32_t count, fastest;
  hcp_error err;
  hcp_plan *plan = four_ranks(&cost, 64, 0);
  hcp_comm_times(plan, 0, 0, &layer, 8192, times, &count, &fastest, &err);
  CHECK_TEXT(err.message, "query has 3 heads, expected a multiple of the 2 of key");
  layer.query_heads = 4;
  hcp_comm_times(plan, 0, 0, &layer, 0, times, &count, &fastest, &err);
  CHECK_TEXT(err.message, "stage_tokens is 0, expected >= 1");
  hcp_comm_times(plan, 1, 0, &layer, 1, times, &count, &fastest, &err);
  CHECK_TEXT(err.message, "micro_batch is 1, expected >= 0 and < 1");
  hcp_plan_destroy(plan);
  hcp_limits limits = draw_limits(4, 4, 4, 1 << 30);
  CHECK_INT(hcp_plan_create(&length, 1, &limits, &table, 1, NULL, &plan, NULL), HCP_OK);
  CHECK_INT(hcp_comm_times(plan, 0, 0, &layer, 1, times, &count, &fastest, &err), HCP_OVERFLOW);
  hcp_plan_destroy(plan);
}

static void a_replay_adds_prices_up_and_keeps_to_memory(void) {
  hcp_cost cost = {.pair = 1};
  hcp_machine machine = {.pair = 1, .token = 10, .launch = 100, .near = 1};
  hcp_plan *plan = four_ranks(&cost, 64, 0);
  hcp_rank_seconds ranks[4];
  hcp_error err;
  CHECK_INT(hcp_plan_replay(plan, &machine, ranks, &err), HCP_OK);
  /* 2080 pairs; 48 rows arrive, of which a third are gradients that nothing hides. */
  CHECK_NEAR(ranks[3].end, 2080.0 / 4 + 10 * 16 + 100 + 48.0 / 3, 1e-9);
  CHECK_NEAR(ranks[0].exposed, 48.0 / 3, 1e-9);
  machine.memory = (hcp_memory){.activation = 3, .limit = 47};
  CHECK_INT(hcp_plan_replay(plan, &machine, ranks, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "micro-batch 0 needs 48 bytes on a rank from rank 0 on");
  machine.memory.limit = 48;
  CHECK_INT(hcp_plan_replay(plan, &machine, ranks, &err), HCP_OK);
  machine.once = 1;
  CHECK_INT(hcp_plan_replay(plan, &machine, ranks, &err), HCP_INVALID);
  hcp_plan_destroy(plan);
}

int main(void) {
  rows_of_all_ranks_are_the_length();
  nodes_are_those_that_ranks_are_in();
  the_fewest_chunks_that_fit_are_found();
  a_drawn_plan_is_measured();
  a_group_ends_with_its_last_sequence();
  times_of_comm_types_are_those_of_the_header();
  neighbours_have_heads_and_stand_in_one_node();
  what_has_no_comm_time_is_refused();
  a_replay_adds_prices_up_and_keeps_to_memory();
  return check_report("test_prices");
}
