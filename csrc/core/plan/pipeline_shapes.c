/* pipeline_shapes.c - heights of micro-batches that grow from both ends of the step. */
#include <stdlib.h>

#include "plan.h"

enum {
  ONE = 1024, /* of a full height */
  RAMPS = 5,  /* first heights that are tried at either end */
  COUNTS_APART = 8
};

static const int32_t ramps[RAMPS] = {ONE, ONE / 2, ONE / 3, ONE / 5, ONE / 8};

/* The fastest that the slowest sequence can be. */
static int64_t longest_of(const hcp__problem *p) {
  int64_t longest = 0;
  for (int32_t k = 0; k < p->kind_count; k++) {
    const hcp__kind *kind = &p->kinds[k];
    const hcp__choices *all = hcp__choices_of(p, kind);
    int64_t time = all->options[all->count - 1].time;
    if (time > longest && !all->pruned) longest = time;
  }
  return longest;
}

/* What each place may have of a full height; returns their sum. */
static int64_t profile(const hcp__problem *p, const hcp__shape *x, int64_t *heights) {
  int64_t ahead = p->limits->pipeline.stages - 1, sum = 0;
  for (int32_t m = 0; m < x->count; m++) {
    int64_t height = x->front + 2 * sum / ahead;
    heights[m] = height < ONE ? height : ONE;
    sum += heights[m];
  }
  sum = 0;
  for (int32_t m = x->count - 1; m >= 0; m--) {
    int64_t height = x->back + sum / (2 * ahead);
    if (height < heights[m]) heights[m] = height;
    sum += heights[m];
  }
  return sum;
}

void hcp__shape_scale(const hcp__shapes *s, const hcp__shape *x, int64_t height) {
  int32_t tallest = 0;
  profile(s->p, x, s->heights);
  for (int32_t m = 0; m < x->count; m++) {
    if (s->heights[m] > s->heights[tallest]) tallest = m;
    s->heights[m] = hcp__scaled(height, s->heights[m], ONE);
  }
  if (s->heights[tallest] < s->longest) s->heights[tallest] = s->longest;
}

int64_t hcp__shape_height(const hcp__shapes *s, const hcp__shape *x) {
  int64_t share = s->p->least / s->p->limits->ranks, sum = profile(s->p, x, s->heights);
  int64_t height = hcp__scaled(share, ONE, sum);
  if (height >= s->longest || sum <= ONE) return height;
  return hcp__scaled(share > s->longest ? share - s->longest : 0, ONE, sum - ONE);
}

static hcp_status predict(const hcp__shapes *s, const hcp__passes *passes, hcp__shape *x,
                          hcp_error *err) {
  hcp__shape_scale(s, x, hcp__shape_height(s, x));
  for (int32_t m = 0; m < x->count; m++) s->heights[m] = hcp__launched(s->p->cost, s->heights[m]);
  return hcp__passes_makespan(passes, s->heights, x->count, &x->predicted, err);
}

/* The ramps that promise most for a count. */
static hcp_status best_ramps(const hcp__shapes *s, int32_t count, hcp__shape *best,
                             hcp_error *err) {
  hcp__passes passes;
  hcp_status status = hcp__passes_make(&s->p->limits->pipeline, count, &passes, err);
  if (status != HCP_OK) return status;
  best->predicted = INT64_MAX;
  for (int32_t i = 0; i < RAMPS * RAMPS && status == HCP_OK; i++) {
    hcp__shape x = {.count = count, .front = ramps[i / RAMPS], .back = ramps[i % RAMPS]};
    status = hcp__go_on(s->p, err);
    if (status == HCP_OK) status = predict(s, &passes, &x, err);
    if (status == HCP_OK && x.predicted < best->predicted) *best = x;
  }
  hcp__passes_release(&passes);
  return status;
}

/* Keeps the shapes that promise most, best first. */
static void insert(hcp__shape *shapes, int32_t *count, int32_t most, hcp__shape x) {
  int32_t i = *count < most ? (*count)++ : most;
  if (i == most && shapes[most - 1].predicted <= x.predicted) return;
  if (i == most) i--;
  for (; i > 0 && shapes[i - 1].predicted > x.predicted; i--) shapes[i] = shapes[i - 1];
  shapes[i] = x;
}

/* Counts grow by an eighth at most: one shape for each. */
hcp_status hcp__shapes_choose(const hcp__shapes *s, int32_t most, hcp__shape *chosen,
                              int32_t *count, hcp_error *err) {
  int32_t multiple = hcp__multiple(&s->p->limits->pipeline), first = hcp__least_count(s->p);
  int32_t last = s->p->n < HCP_SHAPE_MAX ? s->p->n : HCP_SHAPE_MAX;
  *count = 0;
  for (int32_t n = (first + multiple - 1) / multiple * multiple; n <= last;
       n += (n / COUNTS_APART / multiple + 1) * multiple) {
    hcp__shape best = {0};
    hcp_status status = best_ramps(s, n, &best, err);
    if (status != HCP_OK) return status;
    insert(chosen, count, most, best);
  }
  return HCP_OK;
}

hcp_status hcp__shapes_init(hcp__shapes *s, const hcp__problem *p, hcp_error *err) {
  *s = (hcp__shapes){.p = p, .longest = longest_of(p)};
  s->heights = malloc((HCP_SHAPE_MAX + 1) * sizeof *s->heights);
  if (s->heights != NULL) return HCP_OK;
  return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d heights", HCP_SHAPE_MAX);
}

void hcp__shapes_release(hcp__shapes *s) { free(s->heights); }
