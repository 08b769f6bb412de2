/* judge.c - the makespan of an attempt, by which the search keeps the best one. */
#include <stdlib.h>

#include "plan.h"

typedef hcp__search search;

/* ---- makespan ---- */

int64_t hcp__start_of(const hcp_group *group, int32_t m, const hcp__problem *p,
                      const hcp__rank *ranks) {
  int64_t start = 0;
  for (int32_t r = group->first_rank; r < group->first_rank + group->degree; r++) {
    int64_t idle = hcp__launches(p->limits, p->cost, r, m - ranks[r].next);
    start = hcp__most(start, hcp__later(ranks[r].free_from, idle));
  }
  return start;
}

void hcp__run_until(const hcp_group *group, int32_t m, int64_t end, hcp__rank *ranks) {
  for (int32_t r = group->first_rank; r < group->first_rank + group->degree; r++)
    ranks[r] = (hcp__rank){end, m + 1};
}

static int64_t stepwise(const hcp__draft *draft, const hcp__problem *p, hcp__rank *ranks) {
  int64_t last = 0;
  int32_t count = draft->micro_batch_count;
  for (int32_t m = 0; m < count && last < INT64_MAX / 2; m++) {
    const hcp_micro_batch *batch = &draft->micro_batches[m];
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
      const hcp_group *group = &draft->groups[g];
      int64_t start = hcp__start_of(group, m, p, ranks);
      int64_t end = hcp__later(start, hcp__group_time(draft, p, group));
      hcp__run_until(group, m, end, ranks);
      last = hcp__most(last, end);
    }
  }
  for (int32_t r = 0; r < p->limits->ranks; r++) {
    int64_t idle = hcp__launches(p->limits, p->cost, r, count - ranks[r].next);
    last = hcp__most(last, hcp__later(ranks[r].free_from, idle));
  }
  return last;
}

static int64_t lockstep(const hcp__draft *draft, const hcp__problem *p) {
  int64_t sum = 0;
  for (int32_t m = 0; m < draft->micro_batch_count && sum < INT64_MAX / 2; m++) {
    const hcp_micro_batch *batch = &draft->micro_batches[m];
    int64_t slowest = 0;
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) {
      int64_t time = hcp__group_time(draft, p, &draft->groups[g]);
      if (time > slowest) slowest = time;
    }
    sum += slowest;
  }
  return sum;
}

hcp_status hcp__makespan(const hcp__draft *draft, const hcp__problem *p, int64_t *makespan,
                         hcp_error *err) {
  int64_t result;
  if (p->limits->pipeline.stages > 1) return hcp__pipeline_makespan(draft, p, makespan, err);
  if (p->limits->sync == HCP_SYNC_MICRO_BATCH) {
    result = lockstep(draft, p);
  } else {
    hcp__rank *ranks = calloc((size_t)p->limits->ranks, sizeof *ranks);
    if (ranks == NULL)
      return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d ranks", p->limits->ranks);
    result = stepwise(draft, p, ranks);
    free(ranks);
  }
  if (result >= INT64_MAX / 2)
    return hcp__fail(err, HCP_OVERFLOW, "the cost of all sequences exceeds 63 bits");
  *makespan = result;
  return HCP_OK;
}

/* ---- keeping the best ---- */

static void keep(search *s, int64_t makespan) {
  if (makespan > s->makespan) return;
  if (makespan == s->makespan && s->draft.micro_batch_count >= s->best->micro_batch_count) return;
  hcp__draft swap = *s->best;
  *s->best = s->draft;
  s->draft = swap;
  s->makespan = makespan;
}

hcp_status hcp__search_judge(search *s, hcp_error *err) {
  int64_t makespan;
  hcp_status status = hcp__go_on(s->p, err);
  if (status == HCP_OK) status = hcp__makespan(&s->draft, s->p, &makespan, err);
  if (status == HCP_OK) keep(s, makespan);
  return status;
}

/* ---- waves ---- */

/* Where ranks need not wait, every second micro-batch turned around may start
 * earlier on the ranks that the one before leaves first. */
static void turn(search *s) {
  for (int32_t b = 0; b < s->blocks.count; b++) {
    hcp__block *block = &s->blocks.block[b];
    if (block->micro_batch % 2 == 1)
      block->first_rank = s->p->limits->ranks - block->first_rank - block->degree;
  }
}

hcp_status hcp__search_judge_waves(search *s, hcp_error *err) {
  int32_t even = s->p->limits->ranks % hcp__node_ranks(s->p->limits) == 0; /* nodes stay nodes */
  int32_t placed, ways = even && hcp__is_free(s->p) && hcp__is_few(s->p) ? 2 : 1;
  hcp_status status = hcp__place_waves(s->p, &s->blocks, &placed, err);
  if (status != HCP_OK || !placed) return status;
  for (int32_t way = 0; way < ways && status == HCP_OK; way++) {
    if (way > 0) turn(s);
    status = hcp__draft_by_micro_batch(&s->draft, &s->blocks, err);
    if (status == HCP_OK) status = hcp__search_judge(s, err);
  }
  return status;
}
