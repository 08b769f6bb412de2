/* pipeline_time.c - the time of a plan in a pipeline: every pass of every micro-batch
 * over every stage, in the order in which each stage runs them.
 *
 * A pass is one micro-batch forward or backward over one chunk of layers, which
 * are numbered along the pipeline: chunk c of stage s is link c * stages + s.
 * Each stage runs a fixed list of passes: forward ones until the pipeline is
 * full, then one forward and one backward, then what is left. A pass begins when
 * the link before it is done and the ranks have ended their pass before. */
#include <stdlib.h>

#include "plan.h"

/* A backward takes so many times its forward, and both together so many. */
enum { BACKWARD = 2, WHOLE = 1 + BACKWARD };

int32_t hcp__multiple(const hcp_pipeline *pipeline) {
  if (pipeline->virtual_stages < 2) return 1;
  return pipeline->micro_batch_group > 0 ? pipeline->micro_batch_group : pipeline->stages;
}

/* ---- the lists ---- */

typedef struct shape {
  int32_t stages, chunks, micro_batch_group;
  int64_t count; /* micro-batches, a multiple of micro_batch_group */
} shape;

static shape shape_of(const hcp_pipeline *pipeline, int64_t count) {
  int32_t multiple = hcp__multiple(pipeline);
  int32_t chunks = pipeline->virtual_stages > 1 ? pipeline->virtual_stages : 1;
  return (shape){pipeline->stages, chunks, multiple, (count + multiple - 1) / multiple * multiple};
}

typedef struct pass {
  int32_t micro_batch, chunk, backward;
} pass;

/* The i-th forward of a stage, or its i-th backward: a group of micro-batches over
 * a chunk, then the same ones over the next chunk. */
static pass pass_of(const shape *s, int64_t i, int32_t backward) {
  int64_t turn = (int64_t)s->micro_batch_group * s->chunks, within = i % turn;
  int32_t chunk = (int32_t)(within / s->micro_batch_group);
  return (pass){(int32_t)(i / turn * s->micro_batch_group + within % s->micro_batch_group),
                backward ? s->chunks - 1 - chunk : chunk, backward};
}

/* Forward passes of a stage before its first backward. */
static int64_t warmup(const shape *s, int32_t stage) {
  int64_t all = s->count * s->chunks, ahead = s->stages - 1 - stage;
  if (s->chunks > 1) ahead = 2 * ahead + (int64_t)(s->chunks - 1) * s->micro_batch_group;
  return ahead < all ? ahead : all;
}

/* The i-th of all passes of a stage. */
static pass next_pass(const shape *s, int32_t stage, int64_t i) {
  int64_t all = s->count * s->chunks, first = warmup(s, stage), steady = 2 * (all - first);
  if (i < first) return pass_of(s, i, 0);
  if (i >= first + steady) return pass_of(s, i - all, 1);
  return (i - first) % 2 == 0 ? pass_of(s, first + (i - first) / 2, 0)
                              : pass_of(s, (i - first) / 2, 1);
}

/* ---- the simulation ---- */

/* What is simulated. A lane is a rank, or all ranks where they wait for each other. */
typedef struct lanes {
  int32_t count;
  const hcp_micro_batch *micro_batches;
  const int32_t *order; /* places to micro-batches, NULL: as they are */
  int32_t micro_batch_count;
  const hcp_group *groups;
  const int64_t *times; /* of groups */
} lanes;

typedef struct simulation {
  const shape *s;
  const lanes *l;
  int64_t *available; /* stages * lanes */
  int64_t *arrived;   /* groups: when their latest pass ended */
  int32_t *links;     /* 2 * micro-batches: links passed forward, and backward */
  int64_t *next;      /* stages: passes that each has run */
} simulation;

static const hcp_micro_batch *batch_at(const lanes *l, int32_t place) {
  static const hcp_micro_batch empty = {0, 0};
  if (place >= l->micro_batch_count) return &empty;
  return &l->micro_batches[l->order == NULL ? place : l->order[place]];
}

static int is_ready(const simulation *r, int32_t stage, pass p) {
  int32_t links = r->s->stages * r->s->chunks, link = p.chunk * r->s->stages + stage;
  const int32_t *passed = &r->links[2 * (int64_t)p.micro_batch];
  return p.backward ? passed[0] == links && passed[1] == links - 1 - link : passed[0] == link;
}

static int64_t group_pass(const simulation *r, int32_t stage, const hcp_group *group, int32_t g,
                          int64_t time) {
  int64_t *available = &r->available[(int64_t)stage * r->l->count + group->first_rank];
  int64_t start = r->arrived[g];
  for (int32_t k = 0; k < group->degree; k++)
    if (available[k] > start) start = available[k];
  for (int32_t k = 0; k < group->degree; k++) available[k] = start + time;
  r->arrived[g] = start + time;
  return start + time;
}

/* Runs what the stage can run now; returns how many passes. */
static int64_t advance(const simulation *r, int32_t stage, int64_t *last) {
  int64_t all = 2 * r->s->count * r->s->chunks, begun = r->next[stage];
  for (; r->next[stage] < all; r->next[stage]++) {
    pass p = next_pass(r->s, stage, r->next[stage]);
    if (!is_ready(r, stage, p)) break;
    const hcp_micro_batch *batch = batch_at(r->l, p.micro_batch);
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
      int64_t time = r->l->times[g] * (p.backward ? BACKWARD : 1);
      int64_t end = group_pass(r, stage, &r->l->groups[g], g, time);
      if (end > *last) *last = end;
    }
    r->links[2 * (int64_t)p.micro_batch + p.backward]++;
  }
  return r->next[stage] - begun;
}

/* Every stage's list waits for others' earlier passes only, so some stage can
 * always go on. */
static int64_t run_stages(const simulation *r) {
  int64_t last = 0, moved = 1;
  while (moved > 0) {
    moved = 0;
    for (int32_t stage = 0; stage < r->s->stages; stage++) moved += advance(r, stage, &last);
  }
  return last;
}

/* A pass over a chunk takes a WHOLE-th of a chunk-th of its group's time, so all
 * times are counted in such parts and divided at the end. */
static hcp_status simulate(const hcp_pipeline *pipeline, const lanes *l, int32_t group_count,
                           int64_t *makespan, hcp_error *err) {
  shape s = shape_of(pipeline, l->micro_batch_count);
  int64_t parts = (int64_t)WHOLE * s.chunks, sum = 0;
  for (int32_t g = 0; g < group_count; g++)
    if (__builtin_add_overflow(sum, l->times[g], &sum)) sum = INT64_MAX;
  if (sum > INT64_MAX / 2 / parts / s.stages)
    return hcp__fail(err, HCP_OVERFLOW, "the cost of all micro-batches exceeds 63 bits");
  simulation r = {.s = &s, .l = l};
  size_t stages = (size_t)s.stages, lane_count = stages * (size_t)l->count;
  r.available = calloc(lane_count + (size_t)group_count + stages, sizeof *r.available);
  r.links = calloc(2 * (size_t)s.count + 1, sizeof *r.links);
  hcp_status status = HCP_OK;
  if (r.available == NULL || r.links == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d stages", s.stages);
  } else {
    r.arrived = r.available + lane_count;
    r.next = r.arrived + group_count;
    int64_t last = run_stages(&r);
    *makespan = last / parts + (last % parts != 0);
  }
  free(r.links);
  free(r.available);
  return status;
}

/* ---- one lane ---- */

/* times of micro-batches as groups of one lane. */
static hcp_status simulate_times(const hcp_pipeline *pipeline, const int64_t *times, int32_t n,
                                 const int32_t *order, int64_t *makespan, hcp_error *err) {
  hcp_micro_batch *batches = malloc(((size_t)n + 1) * sizeof *batches);
  hcp_group *groups = malloc(((size_t)n + 1) * sizeof *groups);
  hcp_status status = HCP_OK;
  if (batches == NULL || groups == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d micro-batches", n);
  } else {
    for (int32_t m = 0; m < n; m++) {
      batches[m] = (hcp_micro_batch){m, 1};
      groups[m] = (hcp_group){.first_rank = 0, .degree = 1};
    }
    const lanes l = {1, batches, order, n, groups, times};
    status = simulate(pipeline, &l, n, makespan, err);
  }
  free(groups);
  free(batches);
  return status;
}

static hcp_status check_times(const hcp_pipeline *pipeline, const int64_t *times, int32_t n,
                              hcp_error *err) {
  if (pipeline->stages < 1 || n < 0)
    return hcp__fail(err, HCP_INVALID, "%d micro-batches in %d stages, expected >= 0 and >= 1", n,
                     pipeline->stages);
  if (n % hcp__multiple(pipeline) != 0)
    return hcp__fail(err, HCP_INVALID, "%d micro-batches, expected a multiple of %d", n,
                     hcp__multiple(pipeline));
  for (int32_t m = 0; m < n; m++)
    if (times[m] < 0)
      return hcp__fail(err, HCP_INVALID, "times[%d] is %lld, expected >= 0", m,
                       (long long)times[m]);
  return HCP_OK;
}

hcp_status hcp_pipeline_time(const hcp_pipeline *pipeline, const int64_t *times, int32_t n,
                             int64_t *makespan, hcp_error *err) {
  hcp_status status = hcp__pipeline_check(pipeline, err);
  if (status == HCP_OK) status = check_times(pipeline, times, n, err);
  return status == HCP_OK ? simulate_times(pipeline, times, n, NULL, makespan, err) : status;
}

/* ---- a plan ---- */

hcp_status hcp__pipeline_times(const hcp__draft *draft, const hcp__problem *p, int64_t *times,
                               hcp_error *err) {
  int64_t sum = 0;
  int32_t lockstep = p->limits->sync == HCP_SYNC_MICRO_BATCH;
  for (int32_t m = 0; m < draft->micro_batch_count; m++) {
    const hcp_micro_batch *batch = &draft->micro_batches[m];
    if (lockstep) times[m] = 0;
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
      int64_t time = hcp__group_time(draft, p, &draft->groups[g]);
      if (__builtin_add_overflow(sum, time, &sum))
        return hcp__fail(err, HCP_OVERFLOW, "the cost of all sequences exceeds 63 bits");
      if (!lockstep)
        times[g] = time;
      else if (time > times[m])
        times[m] = time;
    }
  }
  return HCP_OK;
}

hcp_status hcp__pipeline_simulate(const hcp__draft *draft, const hcp__problem *p,
                                  const int64_t *times, const int32_t *order, int64_t *makespan,
                                  hcp_error *err) {
  const hcp_pipeline *pipeline = &p->limits->pipeline;
  if (p->limits->sync == HCP_SYNC_MICRO_BATCH)
    return simulate_times(pipeline, times, draft->micro_batch_count, order, makespan, err);
  const lanes l = {p->limits->ranks,         draft->micro_batches, order,
                   draft->micro_batch_count, draft->groups,        times};
  return simulate(pipeline, &l, draft->group_count, makespan, err);
}

hcp_status hcp__pipeline_makespan(const hcp__draft *draft, const hcp__problem *p, int64_t *makespan,
                                  hcp_error *err) {
  int64_t *times =
      malloc(((size_t)draft->group_count + (size_t)draft->micro_batch_count + 1) * sizeof *times);
  if (times == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d groups", draft->group_count);
  hcp_status status = hcp__pipeline_times(draft, p, times, err);
  if (status == HCP_OK) status = hcp__pipeline_simulate(draft, p, times, NULL, makespan, err);
  free(times);
  return status;
}
