/* test_pipeline.c - what micro-batches take in a pipeline, by formulas and slowly. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { MOST = 24, LINKS = 40 };

static int64_t time_of(hcp_pipeline pipeline, const int64_t *times, int32_t n) {
  int64_t makespan = -1;
  hcp_error err = {HCP_OK, ""};
  CHECK_INT(hcp_pipeline_time(&pipeline, times, n, &makespan, &err), HCP_OK);
  CHECK_TEXT(err.message, "");
  return makespan;
}

static void fill(int64_t *times, int32_t n, int64_t time) {
  for (int32_t m = 0; m < n; m++) times[m] = time;
}

static void equal_micro_batches_take_one_more_for_each_further_stage(void) {
  int64_t times[MOST];
  fill(times, MOST, 30);
  for (int32_t stages = 1; stages <= 6; stages++)
    for (int32_t n = 1; n <= MOST; n++)
      CHECK_INT(time_of((hcp_pipeline){stages, 1, 0}, times, n), 30 * (n + stages - 1));
}

static void interleaving_divides_the_bubble_by_the_chunks(void) {
  int64_t times[MOST];
  fill(times, MOST, 3 * 2 * 3 * 4);
  for (int32_t stages = 2; stages <= 6; stages++)
    for (int32_t chunks = 2; chunks <= 4; chunks++)
      for (int32_t n = stages; n <= MOST; n += stages)
        CHECK_INT(time_of((hcp_pipeline){stages, chunks, 0}, times, n),
                  72 * n + 72 * (stages - 1) / chunks);
}

/* A small one first and last leaves a shorter ramp than a large one. */
static void the_order_decides_the_ramp(void) {
  const int64_t good[] = {3, 30, 30, 3}, bad[] = {30, 3, 3, 30};
  const hcp_pipeline pipeline = {4, 1, 0};
  CHECK(time_of(pipeline, good, 4) < time_of(pipeline, bad, 4));
}

static void nothing_takes_no_time_and_one_takes_every_stage(void) {
  const int64_t one[] = {7};
  CHECK_INT(time_of((hcp_pipeline){5, 1, 0}, one, 0), 0);
  CHECK_INT(time_of((hcp_pipeline){5, 1, 0}, one, 1), 35);
}

/* ---- slowly: ends of all passes, again and again until none changes ---- */

typedef struct slow {
  int64_t forward[MOST][LINKS], backward[MOST][LINKS]; /* ends, of links of the pipeline */
} slow;

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* One sweep over a plain 1F1B order; returns whether an end moved. */
static int sweep(slow *x, int32_t stages, const int64_t *times, int32_t n) {
  int moved = 0;
  for (int32_t s = 0; s < stages; s++) {
    int64_t free = 0;
    int32_t ahead = stages - 1 - s < n ? stages - 1 - s : n, f = 0, b = 0;
    while (b < n) {
      int forward = f < n && f <= b + ahead;
      int32_t m = forward ? f++ : b++;
      int64_t ready = forward ? (s > 0 ? x->forward[m][s - 1] : 0)
                              : (s < stages - 1 ? x->backward[m][s + 1] : x->forward[m][s]);
      int64_t end = most(free, ready) + times[m] * (forward ? 1 : 2);
      int64_t *at = forward ? &x->forward[m][s] : &x->backward[m][s];
      moved |= *at != end;
      *at = free = end;
    }
  }
  return moved;
}

static void drawn_times_take_what_slow_passes_take(void) {
  for (int32_t i = 0; i < 300; i++) {
    static slow x;
    int64_t times[MOST], last = 0;
    int32_t stages = draw(1, 7), n = draw(1, MOST);
    for (int32_t m = 0; m < n; m++) times[m] = draw(0, 50);
    for (int32_t m = 0; m < n; m++)
      for (int32_t s = 0; s < stages; s++) x.forward[m][s] = x.backward[m][s] = 0;
    while (sweep(&x, stages, times, n)) {
    }
    for (int32_t m = 0; m < n; m++)
      for (int32_t s = 0; s < stages; s++) last = most(last, x.backward[m][s]);
    CHECK_INT(time_of((hcp_pipeline){stages, 1, 0}, times, n), (last + 2) / 3);
  }
}

static void refuse(hcp_pipeline pipeline, int32_t n, const char *message) {
  const int64_t times[] = {5, -1, 5};
  int64_t untouched = 77;
  hcp_error err = {HCP_OK, ""};
  CHECK(hcp_pipeline_time(&pipeline, times, n, &untouched, &err) != HCP_OK);
  CHECK_TEXT(err.message, message);
  CHECK_INT(untouched, 77);
}

static void bad_pipelines_are_refused_with_their_values(void) {
  refuse((hcp_pipeline){0, 1, 0}, 1, "0 stages, expected >= 0 and >= 1");
  refuse((hcp_pipeline){-2, 1, 0}, 1, "pipeline_stages is -2");
  refuse((hcp_pipeline){1, 2, 0}, 1, "virtual_stages is 2");
  refuse((hcp_pipeline){4, 2, 3}, 1,
         "micro_batch_group is 3, expected pipeline_stages (4) to 4096");
  refuse((hcp_pipeline){4, 2, 4097}, 1, "micro_batch_group is 4097, expected pipeline_stages (4)");
  refuse((hcp_pipeline){4, 2, INT32_MAX}, 1, "micro_batch_group is 2147483647, expected");
  refuse((hcp_pipeline){2, 2, 0}, 3, "3 micro-batches, expected a multiple of 2");
  refuse((hcp_pipeline){2, 1, 0}, 3, "times[1] is -1, expected >= 0");
  const int64_t large[] = {INT64_MAX};
  const hcp_pipeline pipeline = {2, 1, 0};
  int64_t time;
  CHECK_INT(hcp_pipeline_time(&pipeline, large, 1, &time, NULL), HCP_OVERFLOW);
}

/* ---- plans ---- */

static void every_drawn_plan_keeps_its_multiple_and_its_bound(void) {
  for (int32_t i = 0; i < 500; i++) {
    draw_case c = draw_request(9);
    c.limits.pipeline.stages = draw(2, 4);
    c.limits.pipeline.virtual_stages = draw(1, 3);
    hcp_plan *plan = NULL, *again = NULL;
    hcp_error err = {HCP_OK, ""};
    hcp_plan_create(c.lengths, c.n, &c.limits, &c.cost, 1, NULL, &plan, &err);
    CHECK_TEXT(err.message, "");
    if (plan == NULL) continue;
    CHECK(c.limits.pipeline.virtual_stages == 1 ||
          plan->micro_batch_count % c.limits.pipeline.stages == 0);
    CHECK(plan->bound <= plan->makespan);
    hcp_plan_create_from(plan->lengths, plan->n, &plan->limits, &plan->cost, plan->micro_batches,
                         plan->micro_batch_count, plan->groups, plan->group_count, plan->sequences,
                         &again, &err);
    CHECK_TEXT(err.message, "");
    if (again != NULL) CHECK(again->checksum == plan->checksum);
    if (again != NULL) CHECK_INT(again->makespan, plan->makespan);
    hcp_plan_destroy(again);
    hcp_plan_destroy(plan);
  }
}

int main(void) {
  equal_micro_batches_take_one_more_for_each_further_stage();
  interleaving_divides_the_bubble_by_the_chunks();
  the_order_decides_the_ramp();
  nothing_takes_no_time_and_one_takes_every_stage();
  drawn_times_take_what_slow_passes_take();
  bad_pipelines_are_refused_with_their_values();
  every_drawn_plan_keeps_its_multiple_and_its_bound();
  return check_report("test_pipeline");
}
