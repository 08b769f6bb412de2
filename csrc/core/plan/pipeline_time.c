/* pipeline_time.c - the time of a plan in a pipeline: every pass of every micro-batch
 * over every stage, in the order in which each stage runs them.
 *
 * A pass is one micro-batch forward or backward over one chunk of layers, which
 * are numbered along the pipeline: chunk c of stage s is link c * stages + s.
 * Each stage runs a fixed list of passes: forward ones until the pipeline is
 * full, then one forward and one backward, then what is left. A pass begins when
 * the link before it is done and the ranks have ended their pass before. */
#include <stdlib.h>
#include <string.h>

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

/* ---- all lists at once ---- */

/* How far the micro-batches and the stages are: links passed, and passes run. */
typedef struct progress {
  int32_t *links; /* 2 * micro-batches: forward, and backward */
  int64_t *next;  /* stages */
} progress;

static int is_ready(const shape *s, const progress *at, int32_t stage, pass p) {
  int32_t links = s->stages * s->chunks, link = p.chunk * s->stages + stage;
  const int32_t *passed = &at->links[2 * (int64_t)p.micro_batch];
  return p.backward ? passed[0] == links && passed[1] == links - 1 - link : passed[0] == link;
}

/* Lists what the stage can run now; returns how many passes. Empty micro-batches, at the
 * end, have none. */
static int64_t advance(const shape *s, int32_t filled, int32_t stage, const progress *at,
                       hcp__passes *to) {
  int64_t all = 2 * s->count * s->chunks, begun = at->next[stage];
  for (; at->next[stage] < all; at->next[stage]++) {
    pass p = next_pass(s, stage, at->next[stage]);
    if (!is_ready(s, at, stage, p)) break;
    at->links[2 * (int64_t)p.micro_batch + p.backward]++;
    if (p.micro_batch < filled)
      to->pass[to->count++] = (hcp__pass){stage, p.micro_batch, p.backward ? BACKWARD : 1};
  }
  return at->next[stage] - begun;
}

/* Every stage's list waits for others' earlier passes only, so some stage can
 * always go on. */
static void run_stages(const shape *s, int32_t filled, const progress *at, hcp__passes *to) {
  for (int64_t moved = 1; moved > 0;) {
    moved = 0;
    for (int32_t stage = 0; stage < s->stages; stage++) moved += advance(s, filled, stage, at, to);
  }
}

hcp_status hcp__passes_make(const hcp_pipeline *pipeline, int32_t count, hcp__passes *to,
                            hcp_error *err) {
  shape s = shape_of(pipeline, count);
  size_t links = (size_t)s.stages * (size_t)s.chunks;
  *to = (hcp__passes){.stages = s.stages, .parts = WHOLE * s.chunks};
  to->pass = malloc((2 * links * (size_t)count + 1) * sizeof *to->pass);
  progress at = {.links = calloc(2 * (size_t)s.count + 1, sizeof *at.links),
                 .next = calloc((size_t)s.stages, sizeof *at.next)};
  hcp_status status = HCP_OK;
  if (to->pass == NULL || at.links == NULL || at.next == NULL)
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d micro-batches in %d stages", count,
                       s.stages);
  else
    run_stages(&s, count, &at, to);
  free(at.next);
  free(at.links);
  if (status != HCP_OK) hcp__passes_release(to);
  return status;
}

void hcp__passes_release(hcp__passes *x) {
  free(x->pass);
  *x = (hcp__passes){0};
}

/* A pass over a chunk takes a WHOLE-th of a chunk-th of its group's time, so all
 * times are counted in such parts and divided at the end. */
static int64_t whole_of(const hcp__passes *x, int64_t last) {
  return last / x->parts + (last % x->parts != 0);
}

static hcp_status check_sum(const hcp__passes *x, const int64_t *times, int32_t n, hcp_error *err) {
  int64_t sum = 0;
  for (int32_t i = 0; i < n; i++)
    if (__builtin_add_overflow(sum, times[i], &sum)) sum = INT64_MAX;
  if (sum > INT64_MAX / 2 / x->parts / x->stages)
    return hcp__fail(err, HCP_OVERFLOW, "the cost of all micro-batches exceeds 63 bits");
  return HCP_OK;
}

/* ---- one lane: all ranks of a stage ---- */

int64_t hcp__passes_time(const hcp__passes *x, const int64_t *times, const int32_t *order,
                         int32_t count, int64_t *ends) {
  int64_t *available = ends, *arrived = ends + x->stages, last = 0;
  memset(ends, 0, ((size_t)x->stages + (size_t)count) * sizeof *ends);
  for (int64_t i = 0; i < x->count; i++) {
    hcp__pass p = x->pass[i];
    int64_t start = available[p.stage] > arrived[p.place] ? available[p.stage] : arrived[p.place];
    int64_t end = start + times[order == NULL ? p.place : order[p.place]] * p.forwards;
    available[p.stage] = arrived[p.place] = end;
    if (end > last) last = end;
  }
  return whole_of(x, last);
}

static hcp_status simulate_times(const hcp__passes *x, const int64_t *times, int32_t n,
                                 const int32_t *order, int64_t *makespan, hcp_error *err) {
  hcp_status status = check_sum(x, times, n, err);
  if (status != HCP_OK) return status;
  int64_t *ends = malloc(((size_t)x->stages + (size_t)n) * sizeof *ends);
  if (ends == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d stages", x->stages);
  *makespan = hcp__passes_time(x, times, order, n, ends);
  free(ends);
  return HCP_OK;
}

hcp_status hcp__passes_makespan(const hcp__passes *x, const int64_t *times, int32_t n,
                                int64_t *makespan, hcp_error *err) {
  return simulate_times(x, times, n, NULL, makespan, err);
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
  hcp__passes passes;
  hcp_status status = hcp__pipeline_check(pipeline, err);
  if (status == HCP_OK) status = check_times(pipeline, times, n, err);
  if (status == HCP_OK) status = hcp__passes_make(pipeline, n, &passes, err);
  if (status != HCP_OK) return status;
  status = simulate_times(&passes, times, n, NULL, makespan, err);
  hcp__passes_release(&passes);
  return status;
}

/* ---- a lane for each rank ---- */

static int64_t group_pass(int64_t *available, int64_t *arrived, const hcp_group *group,
                          int64_t time) {
  int64_t start = *arrived;
  available += group->first_rank;
  for (int32_t k = 0; k < group->degree; k++)
    if (available[k] > start) start = available[k];
  for (int32_t k = 0; k < group->degree; k++) available[k] = start + time;
  return *arrived = start + time;
}

/* ends: scratch for the ranks of all stages and the groups. */
static int64_t simulate_ranks(const hcp__passes *x, const hcp__draft *draft, int32_t ranks,
                              const int64_t *times, const int32_t *order, int64_t *ends) {
  int64_t *arrived = ends + (int64_t)x->stages * ranks, last = 0;
  for (int64_t i = 0; i < x->count; i++) {
    hcp__pass p = x->pass[i];
    const hcp_micro_batch *batch = &draft->micro_batches[order == NULL ? p.place : order[p.place]];
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
      int64_t end = group_pass(&ends[(int64_t)p.stage * ranks], &arrived[g], &draft->groups[g],
                               times[g] * p.forwards);
      if (end > last) last = end;
    }
  }
  return whole_of(x, last);
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

hcp_status hcp__pipeline_simulate(const hcp__passes *x, const hcp__draft *draft,
                                  const hcp__problem *p, const int64_t *times, const int32_t *order,
                                  int64_t *makespan, hcp_error *err) {
  int32_t ranks = p->limits->ranks, groups = draft->group_count;
  if (p->limits->sync == HCP_SYNC_MICRO_BATCH)
    return simulate_times(x, times, draft->micro_batch_count, order, makespan, err);
  hcp_status status = check_sum(x, times, groups, err);
  if (status != HCP_OK) return status;
  int64_t *ends = calloc((size_t)x->stages * (size_t)ranks + (size_t)groups, sizeof *ends);
  if (ends == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d stages", x->stages);
  *makespan = simulate_ranks(x, draft, ranks, times, order, ends);
  free(ends);
  return HCP_OK;
}

hcp_status hcp__pipeline_makespan(const hcp__draft *draft, const hcp__problem *p, int64_t *makespan,
                                  hcp_error *err) {
  hcp__passes passes;
  hcp_status status =
      hcp__passes_make(&p->limits->pipeline, draft->micro_batch_count, &passes, err);
  if (status != HCP_OK) return status;
  int64_t *times =
      malloc(((size_t)draft->group_count + (size_t)draft->micro_batch_count + 1) * sizeof *times);
  if (times == NULL)
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d groups", draft->group_count);
  if (status == HCP_OK) status = hcp__pipeline_times(draft, p, times, err);
  if (status == HCP_OK)
    status = hcp__pipeline_simulate(&passes, draft, p, times, NULL, makespan, err);
  free(times);
  hcp__passes_release(&passes);
  return status;
}
