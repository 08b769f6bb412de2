/* pipeline_order.c - micro-batches of a plan split and ordered for a pipeline. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

hcp_status hcp__draft_init_for(hcp__draft *draft, const hcp__problem *p, hcp_error *err) {
  return hcp__draft_init(draft, p->n + hcp__multiple(&p->limits->pipeline), err);
}

/* ---- emitting ---- */

/* Groups of a draft and the micro-batch that each belongs to. */
typedef struct grouping {
  const hcp__draft *from;
  int32_t *batch_of; /* groups */
  int32_t count;     /* micro-batches, those without groups included */
} grouping;

/* Where the groups of each place begin: a counting sort. places: of each
 * micro-batch, NULL: as they are numbered. */
static void count_groups(const grouping *x, const int32_t *places, hcp__draft *to) {
  for (int32_t m = 0; m < x->count; m++) to->micro_batches[m] = (hcp_micro_batch){0, 0};
  for (int32_t g = 0; g < x->from->group_count; g++)
    to->micro_batches[places == NULL ? x->batch_of[g] : places[x->batch_of[g]]].groups++;
  for (int32_t m = 1; m < x->count; m++)
    to->micro_batches[m].first_group =
        to->micro_batches[m - 1].first_group + to->micro_batches[m - 1].groups;
}

/* The groups in that order, and their sequences in the order of the groups. */
static void emit(const grouping *x, const int32_t *places, hcp__draft *to) {
  int32_t sequence = 0;
  count_groups(x, places, to);
  for (int32_t g = 0; g < x->from->group_count; g++) {
    hcp_micro_batch *batch =
        &to->micro_batches[places == NULL ? x->batch_of[g] : places[x->batch_of[g]]];
    to->groups[batch->first_group++] = x->from->groups[g];
  }
  for (int32_t m = 0; m < x->count; m++)
    to->micro_batches[m].first_group -= to->micro_batches[m].groups;
  for (int32_t g = 0; g < x->from->group_count; g++) {
    hcp_group *group = &to->groups[g];
    memcpy(&to->sequences[sequence], &x->from->sequences[group->first_sequence],
           (size_t)group->sequences * sizeof *to->sequences);
    group->first_sequence = sequence;
    sequence += group->sequences;
  }
  to->micro_batch_count = x->count;
  to->group_count = x->from->group_count;
}

/* room: for groups that splitting may add. */
static hcp_status grouping_init(grouping *x, const hcp__draft *from, int32_t room, hcp_error *err) {
  x->from = from;
  x->count = from->micro_batch_count;
  x->batch_of = calloc((size_t)from->group_count + (size_t)room + 1, sizeof *x->batch_of);
  if (x->batch_of == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d groups", from->group_count);
  for (int32_t m = 0; m < from->micro_batch_count; m++)
    for (int32_t g = 0; g < from->micro_batches[m].groups; g++)
      x->batch_of[from->micro_batches[m].first_group + g] = m;
  return HCP_OK;
}

/* ---- the multiple ---- */

/* The shortest group of a micro-batch that has others, -1: none. */
static int32_t cheapest_group(const hcp__draft *draft, const hcp__problem *p, const grouping *x,
                              const int32_t *left) {
  int32_t best = -1;
  int64_t least = INT64_MAX;
  for (int32_t g = 0; g < draft->group_count; g++) {
    int64_t time = hcp__group_time(draft, p, &draft->groups[g]);
    if (left[x->batch_of[g]] < 2 || time >= least) continue;
    best = g;
    least = time;
  }
  return best;
}

/* The last sequence of a group of several becomes a group, -1: none has several. */
static int32_t split_group(hcp__draft *draft) {
  for (int32_t g = 0; g < draft->group_count; g++) {
    hcp_group *group = &draft->groups[g];
    if (group->sequences < 2) continue;
    group->sequences--;
    draft->groups[draft->group_count] =
        (hcp_group){group->first_rank, group->degree, group->first_sequence + group->sequences, 1};
    return draft->group_count++;
  }
  return -1;
}

hcp_status hcp__draft_round_up(hcp__draft *from, const hcp__problem *p, hcp__draft *to,
                               hcp_error *err) {
  int32_t multiple = hcp__multiple(&p->limits->pipeline), count = from->micro_batch_count;
  int32_t missing = (multiple - count % multiple) % multiple;
  grouping x;
  hcp_status status = grouping_init(&x, from, missing, err);
  if (status != HCP_OK) return status;
  int32_t *left = calloc((size_t)count + (size_t)missing + 1, sizeof *left);
  if (left == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d micro-batches", count);
    goto done;
  }
  for (int32_t m = 0; m < count; m++) left[m] = from->micro_batches[m].groups;
  for (; x.count < count + missing; x.count++) {
    int32_t g = cheapest_group(from, p, &x, left);
    if (g >= 0) left[x.batch_of[g]]--;
    if (g < 0) g = split_group(from);
    if (g < 0) continue; /* stays empty */
    x.batch_of[g] = x.count;
    left[x.count] = 1;
  }
  emit(&x, NULL, to);
  free(left);
done:
  free(x.batch_of);
  return status;
}

/* ---- order ---- */

typedef struct ordering {
  const hcp__draft *draft;
  const hcp__problem *p;
  hcp__passes passes;
  int64_t *times;  /* as hcp__pipeline_times gives them */
  int32_t count;   /* micro-batches that have groups: empty ones stay after them */
  int32_t *order;  /* places to micro-batches */
  int32_t *latest; /* tried */
  int64_t makespan;
  int64_t budget; /* visits that simulation may still make */
  int64_t visits; /* of one simulation */
} ordering;

static hcp_status judge(ordering *o, hcp_error *err) {
  int64_t makespan = 0;
  hcp_status status = hcp__go_on(o->p, err);
  if (status == HCP_OK)
    status =
        hcp__pipeline_simulate(&o->passes, o->draft, o->p, o->times, o->latest, &makespan, err);
  o->budget -= o->visits;
  if (status != HCP_OK || makespan >= o->makespan) return status;
  o->makespan = makespan;
  memcpy(o->order, o->latest, (size_t)o->draft->micro_batch_count * sizeof *o->order);
  return HCP_OK;
}

typedef struct height {
  int64_t time;
  int32_t micro_batch;
} height;

static int by_time(const void *left, const void *right) {
  const height *a = left, *b = right;
  if (a->time != b->time) return a->time < b->time ? -1 : 1;
  return (a->micro_batch > b->micro_batch) - (a->micro_batch < b->micro_batch);
}

static int64_t slowest_of(const ordering *o, int32_t m) {
  const hcp_micro_batch *batch = &o->draft->micro_batches[m];
  int64_t slowest = 0;
  if (o->p->limits->sync == HCP_SYNC_MICRO_BATCH) return o->times[m];
  for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++)
    if (o->times[g] > slowest) slowest = o->times[g];
  return slowest;
}

/* Shortest first, each to the end whose ramp it makes less long: what
 * bound_pipeline.c calls front and back. */
static hcp_status start_with_ramps(ordering *o, hcp_error *err) {
  int64_t stages = o->p->limits->pipeline.stages, before = 0, after = 0;
  int32_t first = 0, last = o->count - 1;
  height *heights = malloc(((size_t)o->count + 1) * sizeof *heights);
  if (heights == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d micro-batches", o->count);
  for (int32_t m = 0; m < o->count; m++) heights[m] = (height){slowest_of(o, m), m};
  qsort(heights, (size_t)o->count, sizeof *heights, by_time);
  for (int32_t i = 0; i < o->count; i++) {
    int64_t time = heights[i].time / 4 / stages; /* so that nothing overflows */
    if ((stages - 1) * time - 2 * before <= 2 * (stages - 1) * time - after) {
      o->latest[first++] = heights[i].micro_batch;
      before += time;
    } else {
      o->latest[last--] = heights[i].micro_batch;
      after += time;
    }
  }
  free(heights);
  return judge(o, err);
}

static void swap(int32_t *order, int32_t i, int32_t j) {
  int32_t kept = order[i];
  order[i] = order[j];
  order[j] = kept;
}

/* Swaps two places as long as that helps. */
static hcp_status climb(ordering *o, hcp_error *err) {
  for (int64_t before = INT64_MAX; o->makespan < before;) {
    before = o->makespan;
    for (int32_t gap = 1; gap < o->count; gap++)
      for (int32_t i = 0; i + gap < o->count && o->budget > 0; i++) {
        memcpy(o->latest, o->order, (size_t)o->draft->micro_batch_count * sizeof *o->latest);
        swap(o->latest, i, i + gap);
        hcp_status status = judge(o, err);
        if (status != HCP_OK) return status;
      }
  }
  return HCP_OK;
}

/* Work of one simulation, in visits to a rank. */
static int64_t visits_of(const hcp__draft *draft, const hcp__problem *p) {
  const hcp_pipeline *pipeline = &p->limits->pipeline;
  int64_t visits = draft->micro_batch_count;
  for (int32_t g = 0; g < draft->group_count && p->limits->sync == HCP_SYNC_STEP; g++)
    visits += draft->groups[g].degree;
  return 2 * visits * pipeline->stages *
         (pipeline->virtual_stages > 1 ? pipeline->virtual_stages : 1);
}

static int32_t filled(const hcp__draft *draft) {
  int32_t count = draft->micro_batch_count;
  while (count > 0 && draft->micro_batches[count - 1].groups == 0) count--;
  return count;
}

static hcp_status search_order(ordering *o, hcp_error *err) {
  for (int32_t m = 0; m < o->draft->micro_batch_count; m++) o->latest[m] = o->order[m] = m;
  o->makespan = INT64_MAX;
  hcp_status status = hcp__pipeline_times(o->draft, o->p, o->times, err);
  if (status == HCP_OK) status = judge(o, err);
  if (status == HCP_OK) status = start_with_ramps(o, err);
  return status == HCP_OK ? climb(o, err) : status;
}

static hcp_status emit_order(const ordering *o, hcp__draft *to, hcp_error *err) {
  grouping x;
  hcp_status status = grouping_init(&x, o->draft, 0, err);
  if (status != HCP_OK) return status;
  for (int32_t m = 0; m < x.count; m++) o->latest[o->order[m]] = m; /* its place */
  emit(&x, o->latest, to);
  free(x.batch_of);
  return HCP_OK;
}

hcp_status hcp__draft_order(const hcp__draft *from, const hcp__problem *p, int64_t budget,
                            hcp__draft *to, int64_t *makespan, hcp_error *err) {
  size_t count = (size_t)from->micro_batch_count, groups = (size_t)from->group_count;
  ordering o = {.draft = from, .p = p, .budget = budget, .visits = visits_of(from, p)};
  o.count = filled(from);
  o.times = malloc((count + groups + 1) * sizeof *o.times);
  o.order = calloc(2 * count + 1, sizeof *o.order);
  hcp_status status =
      hcp__passes_make(&p->limits->pipeline, from->micro_batch_count, &o.passes, err);
  if (status == HCP_OK && (o.times == NULL || o.order == NULL)) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d groups", from->group_count);
  } else if (status == HCP_OK) {
    o.latest = o.order + count;
    status = search_order(&o, err);
    if (status == HCP_OK) status = emit_order(&o, to, err);
    *makespan = o.makespan;
  }
  hcp__passes_release(&o.passes);
  free(o.order);
  free(o.times);
  return status;
}
