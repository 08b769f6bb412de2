/* test_plan.c - plans keep every rule, and say what is wrong with a request. */
#include <string.h>

#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

static int64_t chunk_start(int64_t length, int32_t degree, int64_t k) {
  return k * length / (2 * (int64_t)degree);
}

static int64_t rows_held(int64_t length, int32_t degree, int32_t j) {
  int64_t mirrored = 2 * (int64_t)degree - 1 - j;
  return chunk_start(length, degree, j + 1) - chunk_start(length, degree, j) +
         chunk_start(length, degree, mirrored + 1) - chunk_start(length, degree, mirrored);
}

static void rows_max_is_what_the_fullest_rank_holds(void) {
  for (int32_t degree = 1; degree <= 40; degree++)
    for (int64_t length = 0; length <= 300; length++) {
      int64_t most = 0;
      for (int32_t j = 0; j < degree; j++)
        if (rows_held(length, degree, j) > most) most = rows_held(length, degree, j);
      CHECK_INT(hcp_rows_max(length, degree), most);
    }
}

/* hcp_plan_create_from checks every rule with code of its own. */
static void every_drawn_plan_keeps_every_rule(void) {
  for (int32_t i = 0; i < 2000; i++) {
    hcp_plan *plan = draw_plan(13), *again = NULL;
    hcp_error err = {HCP_OK, ""};
    hcp_status status = hcp_plan_create_from(
        plan->lengths, plan->n, &plan->limits, &plan->cost, plan->micro_batches,
        plan->micro_batch_count, plan->groups, plan->group_count, plan->sequences, &again, &err);
    CHECK_INT(status, HCP_OK);
    CHECK_TEXT(err.message, "");
    CHECK(plan->bound <= plan->makespan);
    CHECK(plan->work <= plan->makespan * plan->limits.ranks);
    if (status == HCP_OK) {
      CHECK(again->checksum == plan->checksum);
      CHECK_INT(again->makespan, plan->makespan);
    }
    hcp_plan_destroy(again);
    hcp_plan_destroy(plan);
  }
}

/* Also of requests with limits, pipelines and costs of any kind. */
static void no_sharper_bound_is_above_a_drawn_plan(void) {
  for (int32_t i = 0; i < 300; i++) {
    hcp_plan *plan = draw_plan(13);
    int64_t bound = 0, work = 0;
    hcp_status status = hcp_plan_bound(plan->lengths, plan->n, &plan->limits, &plan->cost, 2, NULL,
                                       &bound, &work, NULL);
    CHECK_INT(status, HCP_OK);
    CHECK(plan->bound <= bound && bound <= plan->makespan);
    CHECK_INT(work, plan->work);
    hcp_plan_destroy(plan);
  }
}

static void a_costly_exchange_keeps_degrees_least(void) {
  const int64_t lengths[] = {1024, 1025, 4096, 1};
  const hcp_limits limits = draw_limits(8, 1, 8, 1024);
  const hcp_cost cost = {.pair = 1, .exchange = (int64_t)1 << 38};
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create(lengths, 4, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  for (int32_t g = 0; g < plan->group_count; g++) {
    const hcp_group *group = &plan->groups[g];
    for (int32_t s = 0; s < group->sequences; s++) {
      int64_t length = lengths[plan->sequences[group->first_sequence + s]];
      CHECK_INT(group->degree, (length + 1023) / 1024);
    }
  }
  hcp_plan_destroy(plan);
}

/* Too many for knapsacks, and pieces that do not pour: each goes where its
 * micro-batch has to rise least. */
static void chunky_short_sequences_in_lockstep_end_near_the_bound(void) {
  enum { COUNT = 1500 };
  int64_t lengths[COUNT];
  for (int32_t i = 0; i < COUNT; i++) lengths[i] = draw(1000, 4000) + (i % 50 == 0 ? 20000 : 0);
  hcp_limits limits = draw_limits(16, 1, 16, 8192);
  limits.sync = HCP_SYNC_MICRO_BATCH;
  const hcp_cost cost = {.pair = 2, .token = 24576, .exchange = 4096, .launch = 1048576};
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create(lengths, COUNT, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  CHECK(plan->makespan <= plan->bound + plan->bound / 70);
  hcp_plan_destroy(plan);
}

/* Nothing short fills gaps: columns that end together leave none. */
static void few_long_sequences_end_near_the_bound(void) {
  enum { COUNT = 128 };
  int64_t lengths[COUNT];
  for (int32_t i = 0; i < COUNT; i++) {
    int32_t power = 1 << draw(0, 2);
    lengths[i] = draw(8192 * power, 16384 * power);
  }
  const hcp_limits limits = draw_limits(32, 1, 32, 8192);
  const hcp_cost cost = {.pair = 2, .token = 24576, .exchange = 4096, .launch = 1048576};
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create(lengths, COUNT, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  CHECK(plan->makespan <= plan->bound + plan->bound / 60);
  hcp_plan_destroy(plan);
}

/* What greedy filling leaves is 1.116 of the bound: steps find lower micro-batches. */
static void few_sequences_in_lockstep_are_polished(void) {
  enum { COUNT = 128 };
  int64_t lengths[COUNT];
  for (int32_t i = 0; i < COUNT; i++) {
    int32_t power = i < 8 ? 8 : i < 24 ? 4 : i < 56 ? 2 : 1;
    lengths[i] = draw(8400 * power, 10000 * power);
  }
  hcp_limits limits = draw_limits(64, 1, 64, 8192);
  limits.sync = HCP_SYNC_MICRO_BATCH;
  const hcp_cost cost = {.pair = 2, .token = 24576, .exchange = 4096, .launch = 1048576};
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create(lengths, COUNT, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  CHECK(plan->makespan <= plan->bound + plan->bound / 9);
  hcp_plan_destroy(plan);
}

static void bad_requests_are_refused_with_their_values(void) {
  const int64_t lengths[] = {5, 17};
  const hcp_cost cost = {.pair = 1, .token = 1, .exchange = 1, .launch = 1};
  hcp_plan *untouched = (hcp_plan *)&untouched, *plan = untouched;
  hcp_error err;
  const hcp_limits none = draw_limits(0, 1, 1, 8), over = draw_limits(2, 1, 3, 8);
  const hcp_limits small = draw_limits(2, 1, 2, 8);
  CHECK_INT(hcp_plan_create(lengths, 2, &none, &cost, 1, NULL, &plan, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "ranks is 0, expected >= 1");
  CHECK_INT(hcp_plan_create(lengths, 2, &over, &cost, 1, NULL, &plan, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "max_degree is 3, expected min_degree (1) to ranks (2)");
  CHECK_INT(hcp_plan_create(lengths, 2, &small, &cost, 1, NULL, &plan, &err), HCP_INFEASIBLE);
  CHECK_TEXT(err.message, "lengths[1] is 17");
  CHECK_INT(hcp_plan_create(lengths, -1, &small, &cost, 1, NULL, &plan, &err), HCP_INVALID);
  CHECK_INT(hcp_plan_create(lengths, 2, &small, &(hcp_cost){.launch = 1}, 1, NULL, &plan, NULL),
            HCP_INVALID);
  CHECK_INT(
      hcp_plan_create(lengths, 1, &small, &(hcp_cost){.pair = INT64_MAX}, 1, NULL, &plan, &err),
      HCP_OVERFLOW);
  CHECK(plan == untouched);
  CHECK_INT(err.status, HCP_OVERFLOW);
}

static void cost_follows_its_formula(void) {
  const hcp_cost cost = {.pair = 3, .token = 5, .exchange = 7, .launch = 11};
  int64_t time = 0;
  CHECK_INT(hcp_cost_time(&cost, 10, -1, 4, 0, &time, NULL), HCP_OK);
  CHECK_INT(time, (3 * 55 + 5 * 10 + 3) / 4 + 7 * (10 - 2));
  CHECK_INT(hcp_cost_time(&cost, 0, -1, 4, 0, &time, NULL), HCP_INVALID);
  CHECK_INT(hcp_cost_time(&cost, 10, -1, 0, 0, &time, NULL), HCP_INVALID);
}

static void refuse_cost(const hcp_cost *cost, const char *message) {
  int64_t untouched = -7;
  hcp_error err = {HCP_OK, ""};
  CHECK_INT(hcp_cost_time(cost, 10, -1, 2, 0, &untouched, &err), HCP_INVALID);
  CHECK_TEXT(err.message, message);
  CHECK_INT(untouched, -7);
}

static void a_time_by_bad_prices_or_a_bad_table_is_refused(void) {
  const int64_t lengths[] = {20, 10}, times[] = {4, 4};
  const int32_t degree = 2;
  const hcp_times unsorted = {2, 1, lengths, &degree, times, NULL};
  refuse_cost(&(hcp_cost){.pair = 1, .window = -INT64_MAX}, "cost.window is -9223372036854775807");
  refuse_cost(&(hcp_cost){.pair = 1, .step = -1}, "cost.step is -1, expected >= 0");
  refuse_cost(&(hcp_cost){.launch = 1}, "cost.pair and cost.token are 0");
  refuse_cost(&(hcp_cost){.times = &unsorted}, "the cost table's lengths[1] is 10, expected asc");
}

/* The last free rank of a micro-batch, taken by a sequence that makes it take longer. */
static void a_sequence_that_fits_nowhere_opens_the_last_rank(void) {
  const int64_t lengths[] = {7, 8, 4};
  hcp_limits limits = draw_limits(1, 1, 1, 10);
  limits.sync = HCP_SYNC_MICRO_BATCH;
  const hcp_cost cost = {.pair = 2, .token = 24576, .exchange = 4096, .launch = 1 << 20};
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create(lengths, 3, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  CHECK_INT(plan->micro_batch_count, 3);
  hcp_plan_destroy(plan);
}

static void every_status_has_a_name_and_a_text(void) {
  CHECK_TEXT(hcp_status_name(HCP_INFEASIBLE), "INFEASIBLE");
  CHECK_TEXT(hcp_status_text(HCP_OK), "success");
  CHECK_TEXT(hcp_status_name((hcp_status)99), "UNKNOWN");
}

/* ---- times that are asked for ---- */

enum { ASKED_DEGREES = 9 };

typedef struct asked {
  const draw_case *c;
  int64_t calls;
  int32_t stopped;
} asked;

static int64_t time_asked(void *context, int64_t length, int32_t degree) {
  asked *a = context;
  int64_t time = 1;
  a->calls++;
  CHECK_INT(hcp_cost_time(&a->c->cost, length, -1, degree, 0, &time, NULL), HCP_OK);
  return time;
}

static int32_t asked_stopped(void *context) {
  asked *a = context;
  if (a->stopped > 0 && a->calls >= a->stopped) a->stopped = -1;
  return a->stopped < 0;
}

/* Ascending, each once. */
static int32_t distinct(const draw_case *c, int64_t *lengths) {
  int32_t count = 0;
  for (int64_t length = 1; length <= 400; length++)
    for (int32_t i = 0; i < c->n; i++)
      if (c->lengths[i] == length && (count == 0 || lengths[count - 1] < length))
        lengths[count++] = length;
  return count;
}

/* The same groups and bound as by a table of all times, where none needs less rank-time at more
 * ranks. */
static void times_that_are_asked_for_make_the_plan_of_all_times(void) {
  int32_t degrees[ASKED_DEGREES];
  int64_t lengths[DRAW_SEQUENCES], calls = 0, all = 0;
  for (int32_t d = 0; d < ASKED_DEGREES; d++) degrees[d] = d + 1;
  for (int32_t i = 0; i < 400; i++) {
    draw_case c = draw_request(ASKED_DEGREES);
    c.cost.tile = c.cost.overlap = 0;
    int64_t eager[DRAW_SEQUENCES * ASKED_DEGREES], lazy[DRAW_SEQUENCES * ASKED_DEGREES] = {0};
    int32_t rows = distinct(&c, lengths);
    asked a = {.c = &c};
    hcp_ask ask = {time_asked, &a};
    for (int32_t k = 0; k < rows * ASKED_DEGREES; k++)
      CHECK_INT(hcp_cost_time(&c.cost, lengths[k / ASKED_DEGREES], -1, k % ASKED_DEGREES + 1, 0,
                              &eager[k], NULL),
                HCP_OK);
    hcp_times whole = {rows, ASKED_DEGREES, lengths, degrees, eager, NULL};
    hcp_times parts = {rows, ASKED_DEGREES, lengths, degrees, lazy, &ask};
    hcp_cost cost = {.launch = c.cost.launch, .times = &whole};
    hcp_plan *plan = NULL, *other = NULL;
    CHECK_INT(hcp_plan_create(c.lengths, c.n, &c.limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
    cost.times = &parts;
    CHECK_INT(hcp_plan_create(c.lengths, c.n, &c.limits, &cost, 1, NULL, &other, NULL), HCP_OK);
    if (plan != NULL && other != NULL) {
      CHECK_INT(plan->makespan, other->makespan);
      CHECK_INT(plan->bound, other->bound);
      CHECK_INT(plan->group_count, other->group_count);
      CHECK(other->cost.times->ask == NULL);
      CHECK(memcmp(plan->sequences, other->sequences, (size_t)c.n * sizeof *plan->sequences) == 0);
    }
    for (int32_t k = 0; k < rows * ASKED_DEGREES; k++) CHECK(lazy[k] == 0 || lazy[k] == eager[k]);
    calls += a.calls;
    all += rows * ASKED_DEGREES;
    hcp_plan_destroy(other);
    hcp_plan_destroy(plan);
  }
  CHECK(calls < all);
}

static void one_who_cannot_say_a_time_ends_the_search(void) {
  draw_case c = {.n = 3, .lengths = {30, 20, 10}, .cost = {.pair = 1}};
  const int64_t lengths[] = {10, 20, 30};
  const int32_t degrees[] = {1, 2, 3, 4};
  int64_t times[12] = {0};
  asked a = {.c = &c, .stopped = 2};
  hcp_ask ask = {time_asked, &a};
  hcp_stop stop = {asked_stopped, &a};
  hcp_times table = {3, 4, lengths, degrees, times, &ask};
  hcp_cost cost = {.times = &table};
  hcp_limits limits = draw_limits(4, 1, 4, 16);
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create(c.lengths, 3, &limits, &cost, 1, &stop, &plan, NULL), HCP_CALLBACK);
  CHECK(plan == NULL);
}

int main(void) {
  rows_max_is_what_the_fullest_rank_holds();
  every_drawn_plan_keeps_every_rule();
  no_sharper_bound_is_above_a_drawn_plan();
  a_costly_exchange_keeps_degrees_least();
  chunky_short_sequences_in_lockstep_end_near_the_bound();
  few_long_sequences_end_near_the_bound();
  few_sequences_in_lockstep_are_polished();
  bad_requests_are_refused_with_their_values();
  cost_follows_its_formula();
  a_time_by_bad_prices_or_a_bad_table_is_refused();
  a_sequence_that_fits_nowhere_opens_the_last_rank();
  every_status_has_a_name_and_a_text();
  hcp_plan_destroy(NULL);
  times_that_are_asked_for_make_the_plan_of_all_times();
  one_who_cannot_say_a_time_ends_the_search();
  return check_report("test_plan");
}
