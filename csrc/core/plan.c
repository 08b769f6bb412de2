/* plan.c - plans as values: checked, measured, summed up. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

int64_t hcp_rows_max(int64_t length, int32_t degree) {
  /* Rank j holds (floor + ceil)((j + 1) x) - (floor + ceil)(j x) rows with
   * x = length / (2 * degree). The fullest rank has one row more than 2 floor(x)
   * when multiples of x only ever meet an integer, two when one passes it. */
  int64_t chunks = 2 * (int64_t)degree, rest = length % chunks, whole = 2 * (length / chunks);
  if (rest == 0) return whole;
  return whole + (chunks % rest == 0 ? 1 : 2);
}

int32_t hcp__least_degree(int64_t length, const hcp_limits *limits) {
  int64_t capacity = limits->max_tokens_per_rank;
  int64_t degree = length / capacity + (length % capacity != 0);
  if (degree < limits->min_degree) degree = limits->min_degree;
  for (; degree <= limits->max_degree; degree++)
    if (hcp_rows_max(length, (int32_t)degree) <= capacity) return (int32_t)degree;
  return 0;
}

/* ---- checks ---- */

static hcp_status check_limits(const hcp_limits *limits, hcp_error *err) {
  if (limits->ranks < 1)
    return hcp__fail(err, HCP_INVALID, "ranks is %d, expected >= 1", limits->ranks);
  if (limits->ranks > HCP__RANKS_MAX)
    return hcp__fail(err, HCP_INVALID, "ranks is %d, expected <= %d", limits->ranks,
                     HCP__RANKS_MAX);
  if (limits->min_degree < 1 || limits->min_degree > limits->ranks)
    return hcp__fail(err, HCP_INVALID, "min_degree is %d, expected 1 to ranks (%d)",
                     limits->min_degree, limits->ranks);
  if (limits->max_degree < limits->min_degree || limits->max_degree > limits->ranks)
    return hcp__fail(err, HCP_INVALID, "max_degree is %d, expected min_degree (%d) to ranks (%d)",
                     limits->max_degree, limits->min_degree, limits->ranks);
  /* Local row counts travel as 32-bit cu_seqlens. */
  if (limits->max_tokens_per_rank < 1 || limits->max_tokens_per_rank > INT32_MAX)
    return hcp__fail(err, HCP_INVALID, "max_tokens_per_rank is %lld, expected 1 to 2^31 - 1",
                     (long long)limits->max_tokens_per_rank);
  return HCP_OK;
}

static hcp_status check_cost(const hcp_cost *cost, hcp_error *err) {
  const int64_t prices[] = {cost->pair, cost->token, cost->exchange, cost->launch};
  const char *const names[] = {"pair", "token", "exchange", "launch"};
  for (size_t i = 0; i < sizeof prices / sizeof *prices; i++)
    if (prices[i] < 0)
      return hcp__fail(err, HCP_INVALID, "cost.%s is %lld, expected >= 0", names[i],
                       (long long)prices[i]);
  if (cost->pair == 0 && cost->token == 0)
    return hcp__fail(err, HCP_INVALID, "cost.pair and cost.token are 0, expected one of them > 0");
  return HCP_OK;
}

/* Fills least_degrees, since holding a sequence is what there is to check. */
static hcp_status check_lengths(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                                int32_t *least_degrees, hcp_error *err) {
  for (int32_t i = 0; i < n; i++) {
    if (lengths[i] < 1 || lengths[i] > HCP__LENGTH_MAX)
      return hcp__fail(err, HCP_INVALID, "lengths[%d] is %lld, expected 1 to 2^40", i,
                       (long long)lengths[i]);
    least_degrees[i] = hcp__least_degree(lengths[i], limits);
    if (least_degrees[i] == 0)
      return hcp__fail(err, HCP_INFEASIBLE,
                       "lengths[%d] is %lld: the fullest of %d ranks (max_degree) would hold %lld "
                       "rows, expected <= %lld (max_tokens_per_rank); raise either, or split the "
                       "sequence",
                       i, (long long)lengths[i], limits->max_degree,
                       (long long)hcp_rows_max(lengths[i], limits->max_degree),
                       (long long)limits->max_tokens_per_rank);
  }
  return HCP_OK;
}

static hcp_status check_group(const hcp_group *group, int32_t g, const int64_t *lengths, int32_t n,
                              const hcp_limits *limits, const int32_t *sequences, char *seen,
                              hcp_error *err) {
  if (group->degree < limits->min_degree || group->degree > limits->max_degree)
    return hcp__fail(err, HCP_INVALID, "groups[%d].degree is %d, expected %d to %d", g,
                     group->degree, limits->min_degree, limits->max_degree);
  if (group->first_rank < 0 || group->first_rank > limits->ranks - group->degree)
    return hcp__fail(err, HCP_INVALID,
                     "groups[%d] has ranks %d to %d, expected them within 0 to %d", g,
                     group->first_rank, group->first_rank + group->degree - 1, limits->ranks - 1);
  if (group->sequences < 1 || group->first_sequence < 0 ||
      group->first_sequence > n - group->sequences)
    return hcp__fail(err, HCP_INVALID, "groups[%d] has %d sequences, expected 1 to %d", g,
                     group->sequences, n);
  int64_t rows = 0;
  for (int32_t s = 0; s < group->sequences; s++) {
    int32_t sequence = sequences[group->first_sequence + s];
    if (sequence < 0 || sequence >= n)
      return hcp__fail(err, HCP_INVALID, "groups[%d] has sequence %d, expected 0 to %d", g,
                       sequence, n - 1);
    if (seen[sequence])
      return hcp__fail(err, HCP_INVALID, "groups[%d] has sequence %d, which is there already", g,
                       sequence);
    seen[sequence] = 1;
    rows += hcp_rows_max(lengths[sequence], group->degree);
  }
  if (rows > limits->max_tokens_per_rank)
    return hcp__fail(err, HCP_INVALID,
                     "groups[%d] puts up to %lld rows on a rank, expected <= %lld "
                     "(max_tokens_per_rank)",
                     g, (long long)rows, (long long)limits->max_tokens_per_rank);
  return HCP_OK;
}

static hcp_status check_draft(const hcp__draft *draft, const int64_t *lengths, int32_t n,
                              const hcp_limits *limits, char *seen, hcp_error *err) {
  int32_t next_group = 0, planned = 0;
  for (int32_t m = 0; m < draft->micro_batch_count; m++) {
    const hcp_micro_batch *batch = &draft->micro_batches[m];
    if (batch->first_group != next_group || batch->groups < 1 ||
        batch->groups > draft->group_count - next_group)
      return hcp__fail(err, HCP_INVALID,
                       "micro_batches[%d] has %d groups from %d, expected >= 1 from %d", m,
                       batch->groups, batch->first_group, next_group);
    int32_t free_rank = 0;
    for (int32_t g = next_group; g < next_group + batch->groups; g++) {
      const hcp_group *group = &draft->groups[g];
      hcp_status status = check_group(group, g, lengths, n, limits, draft->sequences, seen, err);
      if (status != HCP_OK) return status;
      if (group->first_rank < free_rank)
        return hcp__fail(
            err, HCP_INVALID,
            "groups[%d] starts at rank %d of micro-batch %d, expected >= %d: groups of a "
            "micro-batch are disjoint and ascend",
            g, group->first_rank, m, free_rank);
      free_rank = group->first_rank + group->degree;
      planned += group->sequences;
    }
    next_group += batch->groups;
  }
  if (next_group != draft->group_count || planned != n)
    return hcp__fail(err, HCP_INVALID,
                     "micro_batches have %d groups with %d sequences, expected %d with %d",
                     next_group, planned, draft->group_count, n);
  return HCP_OK;
}

/* ---- the value ---- */

static uint64_t mix(uint64_t sum, const void *data, size_t bytes) {
  const unsigned char *at = data;
  for (size_t i = 0; i < bytes; i++) sum = (sum ^ at[i]) * 0x100000001b3u; /* FNV-1a */
  return sum;
}

static uint64_t checksum(const hcp_plan *plan) {
  const int64_t head[] = {plan->limits.ranks,
                          plan->limits.min_degree,
                          plan->limits.max_degree,
                          plan->limits.max_tokens_per_rank,
                          plan->cost.pair,
                          plan->cost.token,
                          plan->cost.exchange,
                          plan->cost.launch,
                          plan->n,
                          plan->micro_batch_count,
                          plan->group_count};
  uint64_t sum = mix(0xcbf29ce484222325u, head, sizeof head);
  sum = mix(sum, plan->lengths, (size_t)plan->n * sizeof *plan->lengths);
  sum =
      mix(sum, plan->micro_batches, (size_t)plan->micro_batch_count * sizeof *plan->micro_batches);
  sum = mix(sum, plan->groups, (size_t)plan->group_count * sizeof *plan->groups);
  return mix(sum, plan->sequences, (size_t)plan->n * sizeof *plan->sequences);
}

/* The plan and its arrays are one block, widest elements first. */
static hcp_plan *allocate(int32_t n, int32_t micro_batches, int32_t groups) {
  size_t bytes = sizeof(hcp_plan) + (size_t)n * (sizeof(int64_t) + sizeof(int32_t)) +
                 (size_t)micro_batches * sizeof(hcp_micro_batch) +
                 (size_t)groups * sizeof(hcp_group);
  hcp_plan *plan = malloc(bytes);
  if (plan == NULL) return NULL;
  memset(plan, 0, sizeof *plan);
  int64_t *lengths = (int64_t *)(plan + 1);
  hcp_group *group = (hcp_group *)(lengths + n);
  hcp_micro_batch *batch = (hcp_micro_batch *)(group + groups);
  plan->lengths = lengths;
  plan->groups = group;
  plan->micro_batches = batch;
  plan->sequences = (int32_t *)(batch + micro_batches);
  plan->n = n;
  plan->micro_batch_count = micro_batches;
  plan->group_count = groups;
  return plan;
}

static void copy(const void *to, const void *from, int32_t n, size_t size) {
  if (n > 0) memcpy((void *)(uintptr_t)to, from, (size_t)n * size);
}

static hcp_status create(const hcp__draft *draft, const int64_t *lengths, int32_t n,
                         const hcp_limits *limits, const hcp_cost *cost, int64_t work,
                         int64_t bound, hcp_plan **out, hcp_error *err) {
  int64_t makespan;
  int64_t *available = calloc((size_t)limits->ranks, sizeof *available);
  if (available == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d ranks", limits->ranks);
  hcp_status status = hcp__makespan(draft, lengths, limits, cost, available, &makespan, err);
  free(available);
  if (status != HCP_OK) return status;
  hcp_plan *plan = allocate(n, draft->micro_batch_count, draft->group_count);
  if (plan == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", n);
  copy(plan->lengths, lengths, n, sizeof *lengths);
  copy(plan->groups, draft->groups, draft->group_count, sizeof *draft->groups);
  copy(plan->micro_batches, draft->micro_batches, draft->micro_batch_count,
       sizeof *draft->micro_batches);
  copy(plan->sequences, draft->sequences, n, sizeof *draft->sequences);
  plan->limits = *limits;
  plan->cost = *cost;
  plan->makespan = makespan;
  plan->bound = bound;
  plan->work = work;
  plan->checksum = checksum(plan);
  *out = plan;
  return HCP_OK;
}

/* Checks shared by both ways to a plan. On success *scratch is n least degrees. */
static hcp_status prepare(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                          const hcp_cost *cost, int32_t **scratch, int64_t *work, int64_t *bound,
                          hcp_error *err) {
  if (n < 0) return hcp__fail(err, HCP_INVALID, "n is %d, expected >= 0", n);
  hcp_status status = check_limits(limits, err);
  if (status == HCP_OK) status = check_cost(cost, err);
  if (status != HCP_OK) return status;
  int32_t *least_degrees = malloc(((size_t)n + 1) * sizeof *least_degrees);
  if (least_degrees == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", n);
  status = check_lengths(lengths, n, limits, least_degrees, err);
  if (status == HCP_OK)
    status = hcp__bound(lengths, least_degrees, n, limits, cost, work, bound, err);
  if (status != HCP_OK) goto fail_check;
  *scratch = least_degrees;
  return HCP_OK;

fail_check:
  free(least_degrees);
  return status;
}

hcp_status hcp_plan_create(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                           const hcp_cost *cost, hcp_plan **plan, hcp_error *err) {
  int32_t *least_degrees;
  int64_t work, bound;
  hcp__draft draft = {0};
  hcp_status status = prepare(lengths, n, limits, cost, &least_degrees, &work, &bound, err);
  if (status != HCP_OK) return status;
  draft.micro_batches = malloc(((size_t)n + 1) * sizeof *draft.micro_batches);
  draft.groups = malloc(((size_t)n + 1) * sizeof *draft.groups);
  draft.sequences = malloc(((size_t)n + 1) * sizeof *draft.sequences);
  if (draft.micro_batches == NULL || draft.groups == NULL || draft.sequences == NULL)
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", n);
  if (status == HCP_OK)
    status = hcp__plan_greedy(lengths, least_degrees, n, limits, cost, bound, &draft, err);
  if (status == HCP_OK) status = create(&draft, lengths, n, limits, cost, work, bound, plan, err);
  free(draft.sequences);
  free(draft.groups);
  free(draft.micro_batches);
  free(least_degrees);
  return status;
}

hcp_status hcp_plan_create_from(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                                const hcp_cost *cost, const hcp_micro_batch *micro_batches,
                                int32_t micro_batch_count, const hcp_group *groups,
                                int32_t group_count, const int32_t *sequences, hcp_plan **plan,
                                hcp_error *err) {
  int32_t *least_degrees;
  int64_t work, bound;
  hcp_status status = prepare(lengths, n, limits, cost, &least_degrees, &work, &bound, err);
  if (status != HCP_OK) return status;
  /* The draft is only read from here on. */
  hcp__draft draft = {micro_batch_count, (hcp_micro_batch *)(uintptr_t)micro_batches, group_count,
                      (hcp_group *)(uintptr_t)groups, (int32_t *)(uintptr_t)sequences};
  char *seen = calloc((size_t)n + 1, 1);
  if (seen == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", n);
    goto fail_seen;
  }
  status = check_draft(&draft, lengths, n, limits, seen, err);
  if (status == HCP_OK) status = create(&draft, lengths, n, limits, cost, work, bound, plan, err);
  free(seen);
fail_seen:
  free(least_degrees);
  return status;
}

void hcp_plan_destroy(hcp_plan *plan) { free(plan); }
