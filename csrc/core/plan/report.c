/* report.c - what a plan gives its ranks to do: times of a group, rows, bytes. */
#include "plan.h"

static hcp_status check_group(const hcp_plan *plan, int32_t first_rank, int32_t degree,
                              const int32_t *sequences, int32_t n, hcp_error *err) {
  if (first_rank < 0 || degree < 1 || degree > plan->limits.ranks - first_rank)
    return hcp__fail(err, HCP_INVALID,
                     "a group has %d ranks from rank %d on, expected some of the %d of the plan",
                     degree, first_rank, plan->limits.ranks);
  for (int32_t i = 0; i < n; i++)
    if (sequences[i] < 0 || sequences[i] >= plan->n)
      return hcp__fail(err, HCP_INVALID, "sequences[%d] is %d, expected 0 to %d", i, sequences[i],
                       plan->n - 1);
  return HCP_OK;
}

static hcp_status check_times(const hcp_plan *plan, int32_t degree, const int32_t *sequences,
                              int32_t n, hcp_error *err) {
  hcp_status status = HCP_OK;
  for (int32_t i = 0; i < n && status == HCP_OK; i++) {
    hcp__size size = hcp__size_of(&plan->cost, plan->lengths, sequences[i]);
    status = hcp__cost_fits(&plan->cost, size, degree, err);
    if (status == HCP_OK && hcp__cost(&plan->cost, size, degree, plan->limits.ranks_per_node) < 1)
      status = hcp__fail(err, HCP_INVALID,
                         "the cost table has no time for %lld tokens on %d ranks, expected one",
                         (long long)size.length, degree);
  }
  return status;
}

hcp_status hcp_group_times(const hcp_plan *plan, int32_t first_rank, int32_t degree,
                           const int32_t *sequences, int32_t n, int64_t *ends, hcp_error *err) {
  hcp_group group = {first_rank, degree, 0, n};
  hcp_status status = check_group(plan, first_rank, degree, sequences, n, err);
  if (status == HCP_OK) status = check_times(plan, degree, sequences, n, err);
  if (status != HCP_OK) return status;
  hcp__time_of(&plan->limits, &plan->cost, plan->lengths, &group, sequences, ends);
  return HCP_OK;
}

int64_t hcp__group_bytes(const hcp_plan *plan, const hcp_memory *memory, const hcp_group *group,
                         int32_t j) {
  int64_t padding = hcp__padding(plan, group, j), tokens = hcp__group_tokens(plan, group);
  int64_t rows = hcp__rank_rows(plan, group, j) + padding;
  return hcp__sum(memory->buffer, hcp_memory_bytes(memory, rows, tokens + padding, group->degree));
}

hcp_status hcp_group_chunks(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                            int64_t *chunks, hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  int64_t most = 1;
  for (int32_t j = 0; group != NULL && group->degree > 1 && j < group->degree; j++) {
    int64_t padding = hcp__padding(plan, group, j), tokens = hcp__group_tokens(plan, group);
    int64_t rows = hcp__rank_rows(plan, group, j) + padding;
    most = hcp__most(
        most, hcp_memory_chunks(&plan->limits.memory, rows, tokens + padding, group->degree));
  }
  *chunks = most;
  return HCP_OK;
}

/* ---- the whole plan ---- */

static void add_group(const hcp_plan *plan, const hcp_group *group, hcp_rank_work *ranks,
                      hcp_plan_work *work) {
  const int32_t *sequences = plan->sequences + group->first_sequence;
  int64_t time = hcp__time_of(&plan->limits, &plan->cost, plan->lengths, group, sequences, NULL);
  int64_t start = 0;
  int32_t nodes = hcp_nodes_of(group->first_rank, group->degree, plan->limits.ranks_per_node);
  work->crossings += hcp__group_tokens(plan, group) * (nodes - 1);
  for (int32_t j = 0; j < group->degree; j++)
    start = hcp__most(start, ranks[group->first_rank + j].end);
  for (int32_t j = 0; j < group->degree; j++) {
    hcp_rank_work *rank = &ranks[group->first_rank + j];
    int64_t rows = hcp__rank_rows(plan, group, j), padding = hcp__padding(plan, group, j);
    rank->rows += rows;
    rank->busy += time;
    rank->end = start + time;
    rank->bytes = hcp__most(rank->bytes, hcp__group_bytes(plan, &plan->limits.memory, group, j));
    work->padding += padding;
    work->peak_rows = hcp__most(work->peak_rows, rows + padding);
  }
}

/* All ranks wait for the slowest. */
static void meet(const hcp_plan *plan, hcp_rank_work *ranks) {
  int64_t end = 0;
  for (int32_t r = 0; r < plan->limits.ranks; r++) end = hcp__most(end, ranks[r].end);
  for (int32_t r = 0; r < plan->limits.ranks; r++) ranks[r].end = end;
}

/* A rank without rows runs its model all the same. */
static void idle(const hcp_plan *plan, int32_t m, hcp_rank_work *ranks) {
  const hcp_micro_batch *batch = &plan->micro_batches[m];
  int32_t next = 0;
  for (int32_t g = 0; g <= batch->groups; g++) {
    const hcp_group *group = &plan->groups[batch->first_group + g];
    int32_t end = g < batch->groups ? group->first_rank : plan->limits.ranks;
    for (; next < end; next++)
      ranks[next].end += hcp__launches(&plan->limits, &plan->cost, next, 1);
    if (g < batch->groups) next = group->first_rank + group->degree;
  }
}

void hcp_plan_measure(const hcp_plan *plan, hcp_rank_work *ranks, hcp_plan_work *work) {
  *work = (hcp_plan_work){0};
  for (int32_t r = 0; r < plan->limits.ranks; r++)
    ranks[r] = (hcp_rank_work){.bytes = plan->limits.memory.buffer};
  for (int32_t m = 0; m < plan->micro_batch_count; m++) {
    const hcp_micro_batch *batch = &plan->micro_batches[m];
    if (plan->limits.sync == HCP_SYNC_MICRO_BATCH) meet(plan, ranks);
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++)
      add_group(plan, &plan->groups[g], ranks, work);
    if (plan->limits.sync == HCP_SYNC_STEP && plan->limits.pipeline.stages < 2)
      idle(plan, m, ranks);
  }
}
