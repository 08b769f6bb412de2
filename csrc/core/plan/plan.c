/* plan.c - plans as values: checked, measured, summed up. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* ---- checks ---- */

static hcp_status check_lengths(const int64_t *lengths, int32_t n, hcp_error *err) {
  for (int32_t i = 0; i < n; i++)
    if (lengths[i] < 1 || lengths[i] > HCP__LENGTH_MAX)
      return hcp__fail(err, HCP_INVALID, "lengths[%d] is %lld, expected 1 to 2^40", i,
                       (long long)lengths[i]);
  return HCP_OK;
}

/* A sequence has length^2 pairs at most. */
static hcp_status check_pairs(const int64_t *lengths, int32_t n, const hcp_cost *cost,
                              hcp_error *err) {
  if (cost->pairs == NULL) return HCP_OK;
  if (cost->times != NULL)
    return hcp__fail(err, HCP_INVALID,
                     "pairs are given with a cost table, expected prices: a table has whole times "
                     "of lengths");
  for (int32_t i = 0; i < n; i++)
    if (cost->pairs[i] < 0 || cost->pairs[i] > (hcp__wide)lengths[i] * lengths[i])
      return hcp__fail(err, HCP_INVALID, "pairs[%d] is %lld, expected 0 to the square of %lld", i,
                       (long long)cost->pairs[i], (long long)lengths[i]);
  return HCP_OK;
}

static hcp_status check_place(const hcp_group *group, int32_t g, const hcp__problem *p,
                              hcp_error *err) {
  const hcp_limits *limits = p->limits;
  if (group->degree < limits->min_degree || group->degree > limits->max_degree)
    return hcp__fail(err, HCP_INVALID, "groups[%d].degree is %d, expected %d to %d", g,
                     group->degree, limits->min_degree, limits->max_degree);
  if (group->first_rank < 0 || group->first_rank > limits->ranks - group->degree)
    return hcp__fail(err, HCP_INVALID,
                     "groups[%d] has ranks %d to %d, expected them within 0 to %d", g,
                     group->first_rank, group->first_rank + group->degree - 1, limits->ranks - 1);
  if (!hcp__degree_allowed(limits, p->cost, group->degree))
    return hcp__fail(err, HCP_INVALID,
                     "groups[%d].degree is %d, expected one that pow2, ranks_per_node and the cost "
                     "table permit",
                     g, group->degree);
  if (!hcp__place_allowed(limits, group->first_rank, group->degree))
    return hcp__fail(err, HCP_INVALID,
                     "groups[%d] starts at rank %d, expected a multiple of its degree (pow2), or "
                     "one that keeps %d ranks in one node or on whole ones",
                     g, group->first_rank, group->degree);
  return HCP_OK;
}

/* Bytes count only where they are limited. */
static int64_t bytes_of(const hcp__problem *p, int32_t sequence, int32_t degree) {
  return p->limits->memory.limit > 0 ? hcp__bytes(&p->limits->memory, p->lengths[sequence], degree)
                                     : 0;
}

static hcp_status check_group(const hcp_group *group, int32_t g, const hcp__problem *p,
                              const int32_t *sequences, char *seen, hcp_error *err) {
  int32_t n = p->n;
  hcp_status status = check_place(group, g, p, err);
  if (status != HCP_OK) return status;
  if (group->sequences < 1 || group->first_sequence < 0 ||
      group->first_sequence > n - group->sequences)
    return hcp__fail(err, HCP_INVALID, "groups[%d] has %d sequences, expected 1 to %d", g,
                     group->sequences, n);
  int64_t rows = 0, bytes = 0;
  for (int32_t s = 0; s < group->sequences; s++) {
    int32_t sequence = sequences[group->first_sequence + s];
    if (sequence < 0 || sequence >= n)
      return hcp__fail(err, HCP_INVALID, "groups[%d] has sequence %d, expected 0 to %d", g,
                       sequence, n - 1);
    if (seen[sequence])
      return hcp__fail(err, HCP_INVALID, "groups[%d] has sequence %d, which is there already", g,
                       sequence);
    seen[sequence] = 1;
    if (!hcp__sequence_allows(p->limits, sequence, group->degree))
      return hcp__fail(err, HCP_INVALID,
                       "groups[%d].degree is %d, expected one within min_degrees[%d] and "
                       "max_degrees[%d]",
                       g, group->degree, sequence, sequence);
    if (hcp__cost(p->cost, hcp__size_at(p, sequence), group->degree, 0) < 1)
      return hcp__fail(err, HCP_INVALID,
                       "groups[%d].degree is %d, at which the cost table has no time for %lld "
                       "tokens, expected one",
                       g, group->degree, (long long)p->lengths[sequence]);
    rows += hcp_rows_max(p->lengths[sequence], group->degree);
    if (__builtin_add_overflow(bytes, bytes_of(p, sequence, group->degree), &bytes))
      bytes = INT64_MAX;
  }
  if (rows > p->capacity)
    return hcp__fail(err, HCP_INVALID,
                     "groups[%d] puts up to %lld rows on a rank, expected <= %lld "
                     "(max_tokens_per_rank)",
                     g, (long long)rows, (long long)p->capacity);
  int64_t limit = hcp__bytes_limit(p->limits, group->degree);
  if (bytes > limit)
    return hcp__fail(
        err, HCP_INVALID,
        "groups[%d] needs up to %lld bytes on a rank, what alignment may add included, "
        "expected <= %lld (memory.limit)",
        g, (long long)hcp__sum(p->limits->memory.limit - limit, bytes),
        (long long)p->limits->memory.limit);
  return HCP_OK;
}

/* Whether empty micro-batches may end the plan: where groups cannot be split any
 * further to give an interleaved pipeline its multiple. */
static int may_be_empty(const hcp__draft *draft, const hcp__problem *p) {
  int32_t multiple = hcp__multiple(&p->limits->pipeline), count = draft->micro_batch_count;
  return multiple > 1 && count > p->n && count - p->n < multiple;
}

/* Groups of a micro-batch: at least one, but for the empty ones at the end, before which there are
 * as many micro-batches as sequences. */
static hcp_status check_count(const hcp__draft *draft, int32_t m, const hcp__problem *p,
                              int32_t next_group, hcp_error *err) {
  const hcp_micro_batch *batch = &draft->micro_batches[m];
  int32_t least = may_be_empty(draft, p) && m >= p->n ? 0 : 1;
  if (batch->first_group == next_group && batch->groups >= least &&
      batch->groups <= draft->group_count - next_group)
    return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "micro_batches[%d] has %d groups from %d, expected >= %d from %d", m,
                   batch->groups, batch->first_group, least, next_group);
}

static hcp_status check_multiple(const hcp__draft *draft, const hcp__problem *p, hcp_error *err) {
  int32_t multiple = hcp__multiple(&p->limits->pipeline);
  if (draft->micro_batch_count % multiple == 0) return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "the plan has %d micro-batches, expected a multiple of %d (micro_batch_group of "
                   "an interleaved pipeline)",
                   draft->micro_batch_count, multiple);
}

static hcp_status check_draft(const hcp__draft *draft, const hcp__problem *p, char *seen,
                              hcp_error *err) {
  int32_t next_group = 0, planned = 0;
  hcp_status status = check_multiple(draft, p, err);
  if (status != HCP_OK) return status;
  for (int32_t m = 0; m < draft->micro_batch_count; m++) {
    const hcp_micro_batch *batch = &draft->micro_batches[m];
    status = check_count(draft, m, p, next_group, err);
    if (status != HCP_OK) return status;
    int32_t free_rank = 0;
    for (int32_t g = next_group; g < next_group + batch->groups; g++) {
      const hcp_group *group = &draft->groups[g];
      status = check_group(group, g, p, draft->sequences, seen, err);
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
  if (next_group != draft->group_count || planned != p->n)
    return hcp__fail(err, HCP_INVALID,
                     "micro_batches have %d groups with %d sequences, expected %d with %d",
                     next_group, planned, draft->group_count, p->n);
  return HCP_OK;
}

/* ---- the value ---- */

static uint64_t mix_times(uint64_t sum, const hcp_times *times) {
  if (times == NULL) return sum;
  size_t rows = (size_t)times->length_count, columns = (size_t)times->degree_count;
  sum = hcp__mix(sum, times->lengths, rows * sizeof *times->lengths);
  sum = hcp__mix(sum, times->degrees, columns * sizeof *times->degrees);
  return hcp__mix(sum, times->times, rows * columns * sizeof *times->times);
}

static size_t bytes_if(const int32_t *values, int32_t n) {
  return values == NULL ? 0 : (size_t)n * sizeof *values;
}

/* The lists among the limits. */
static uint64_t mix_lists(uint64_t sum, const hcp_limits *limits, int32_t n) {
#define MIX(name, count) sum = hcp__mix(sum, limits->name, bytes_if(limits->name, count));
  HCP_LIMIT_LISTS(MIX)
#undef MIX
  return sum;
}

static uint64_t mix_pairs(uint64_t sum, const int64_t *pairs, int32_t n) {
  return pairs == NULL ? sum : hcp__mix(sum, pairs, (size_t)n * sizeof *pairs);
}

static uint64_t checksum(const hcp_plan *plan) {
#define NUMBER(type, field, name) plan->limits.field,
#define IS_LIST(name, count) plan->limits.name != NULL,
#define PRICE(name) plan->cost.name,
  const int64_t head[] = {HCP_LIMITS(NUMBER) HCP_LIMIT_LISTS(IS_LIST) HCP_PRICES(PRICE) plan->n,
                          plan->micro_batch_count, plan->group_count};
#undef NUMBER
#undef IS_LIST
#undef PRICE
  uint64_t sum = hcp__mix(0xcbf29ce484222325u, head, sizeof head);
  sum = mix_times(sum, plan->cost.times);
  sum = mix_lists(sum, &plan->limits, plan->n);
  sum = mix_pairs(sum, plan->cost.pairs, plan->n);
  sum = hcp__mix(sum, plan->lengths, (size_t)plan->n * sizeof *plan->lengths);
  sum = hcp__mix(sum, plan->micro_batches,
                 (size_t)plan->micro_batch_count * sizeof *plan->micro_batches);
  sum = hcp__mix(sum, plan->groups, (size_t)plan->group_count * sizeof *plan->groups);
  return hcp__mix(sum, plan->sequences, (size_t)plan->n * sizeof *plan->sequences);
}

static size_t times_bytes(const hcp_times *times) {
  if (times == NULL) return 0;
  size_t rows = (size_t)times->length_count, columns = (size_t)times->degree_count;
  return sizeof *times + (rows + rows * columns) * sizeof(int64_t) + columns * sizeof(int32_t);
}

static void copy(const void *to, const void *from, size_t n, size_t size) {
  if (n > 0) memcpy((void *)(uintptr_t)to, from, n * size);
}

/* A copy of the cost table, in memory of times_bytes. */
static const hcp_times *copy_times(void *memory, const hcp_times *times) {
  if (times == NULL) return NULL;
  size_t rows = (size_t)times->length_count, columns = (size_t)times->degree_count;
  hcp_times *made = memory;
  *made = *times;
  made->ask = NULL;
  made->lengths = (int64_t *)(made + 1);
  made->times = made->lengths + rows;
  made->degrees = (int32_t *)(uintptr_t)(made->times + rows * columns);
  copy(made->lengths, times->lengths, rows, sizeof *times->lengths);
  copy(made->times, times->times, rows * columns, sizeof *times->times);
  copy(made->degrees, times->degrees, columns, sizeof *times->degrees);
  return made;
}

/* A list of the limits at *at, which moves past it; NULL stays NULL. */
static const int32_t *copy_list(int32_t **at, const int32_t *values, int32_t n) {
  if (values == NULL) return NULL;
  int32_t *made = *at;
  copy(made, values, (size_t)n, sizeof *values);
  *at += n;
  return made;
}

static void copy_lists(hcp_limits *limits, int32_t n, int32_t *at) {
#define COPY(name, count) limits->name = copy_list(&at, limits->name, count);
  HCP_LIMIT_LISTS(COPY)
#undef COPY
}

static size_t lists_bytes(const hcp_limits *limits, int32_t n) {
  size_t bytes = 0;
#define ADD(name, count) bytes += bytes_if(limits->name, count);
  HCP_LIMIT_LISTS(ADD)
#undef ADD
  return bytes;
}

/* The plan and its arrays are one allocation, widest elements first; its cost table,
 * when there is one, comes before the narrow ones. */
static hcp_plan *allocate(const hcp__problem *p, const hcp__draft *draft) {
  size_t n = (size_t)p->n, batches = (size_t)draft->micro_batch_count;
  size_t groups = (size_t)draft->group_count, times = (times_bytes(p->cost->times) + 7) / 8 * 8;
  size_t pairs = p->cost->pairs == NULL ? 0 : n * sizeof *p->cost->pairs;
  size_t bytes = sizeof(hcp_plan) + pairs + n * (sizeof(int64_t) + sizeof(int32_t)) + times +
                 batches * sizeof(hcp_micro_batch) + groups * sizeof(hcp_group) +
                 lists_bytes(p->limits, p->n);
  hcp_plan *plan = malloc(bytes);
  if (plan == NULL) return NULL;
  memset(plan, 0, sizeof *plan);
  int64_t *lengths = (int64_t *)(plan + 1);
  hcp_group *group = (hcp_group *)((char *)(lengths + n) + times + pairs);
  hcp_micro_batch *batch = (hcp_micro_batch *)(group + groups);
  plan->limits = *p->limits;
  plan->cost = *p->cost;
  plan->cost.times = copy_times(lengths + n, p->cost->times);
  plan->lengths = lengths;
  if (pairs > 0) {
    plan->cost.pairs = (int64_t *)(uintptr_t)((char *)(lengths + n) + times);
    copy(plan->cost.pairs, p->cost->pairs, n, sizeof *p->cost->pairs);
  }
  plan->groups = group;
  plan->micro_batches = batch;
  plan->sequences = (int32_t *)(batch + batches);
  plan->n = p->n;
  plan->micro_batch_count = draft->micro_batch_count;
  plan->group_count = draft->group_count;
  copy_lists(&plan->limits, plan->n, (int32_t *)(batch + batches) + n);
  return plan;
}

static hcp_status create(const hcp__draft *draft, const hcp__problem *p, hcp_plan **out,
                         hcp_error *err) {
  int64_t makespan;
  hcp_status status = hcp__makespan(draft, p, &makespan, err);
  if (status != HCP_OK) return status;
  hcp_plan *plan = allocate(p, draft);
  if (plan == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", p->n);
  copy(plan->lengths, p->lengths, (size_t)p->n, sizeof *p->lengths);
  copy(plan->groups, draft->groups, (size_t)draft->group_count, sizeof *draft->groups);
  copy(plan->micro_batches, draft->micro_batches, (size_t)draft->micro_batch_count,
       sizeof *draft->micro_batches);
  copy(plan->sequences, draft->sequences, (size_t)p->n, sizeof *draft->sequences);
  plan->makespan = makespan;
  plan->bound = p->bound;
  plan->work = p->work;
  plan->turns = hcp__turns_create(plan);
  if (plan->turns == NULL) {
    free(plan);
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", p->n);
  }
  plan->checksum = checksum(plan);
  *out = plan;
  return HCP_OK;
}

hcp_status hcp__effort_check(int32_t effort, hcp_error *err) {
  if (effort >= 1 && effort <= 1000) return HCP_OK;
  return hcp__fail(err, HCP_INVALID, "effort is %d, expected 1 to 1000", effort);
}

hcp_status hcp__prepare(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                        const hcp_cost *cost, const hcp_stop *stop, hcp__problem *problem,
                        hcp_error *err) {
  if (n < 0) return hcp__fail(err, HCP_INVALID, "n is %d, expected >= 0", n);
  hcp_status status = hcp__domain_check(limits, err);
  if (status == HCP_OK) status = hcp__cost_check(cost, err);
  if (status == HCP_OK) status = hcp__limits_check(limits, n, err);
  if (status == HCP_OK) status = check_lengths(lengths, n, err);
  if (status == HCP_OK) status = check_pairs(lengths, n, cost, err);
  if (status == HCP_OK) status = hcp__problem_init(problem, lengths, n, limits, cost, err);
  if (status != HCP_OK) return status;
  problem->stop = stop;
  status = hcp__go_on(problem, err);
  if (status == HCP_OK) status = hcp__bound(problem, err);
  if (status == HCP_OK) status = hcp__go_on(problem, err);
  if (status != HCP_OK) hcp__problem_release(problem);
  return status;
}

/* So few sequences have few plans: what is looked at grows with the effort, and with 4^n it has
 * seen each of them many times. */
static int32_t useful_effort(int32_t n, int32_t effort) {
  int32_t most = n < 5 ? 1 << (2 * n) : effort;
  return effort < most ? effort : most;
}

/* As create, with the bound of the times that a cost table was asked for. */
static hcp_status create_settled(const hcp__draft *draft, const hcp__problem *p, hcp_plan **out,
                                 hcp_error *err) {
  if (p->cost->times == NULL || p->cost->times->ask == NULL) return create(draft, p, out, err);
  hcp_times times = *p->cost->times;
  hcp_cost cost = *p->cost;
  hcp__problem settled;
  times.ask = NULL;
  cost.times = &times;
  hcp_status status = hcp__prepare(p->lengths, p->n, p->limits, &cost, p->stop, &settled, err);
  if (status != HCP_OK) return status;
  status = create(draft, &settled, out, err);
  hcp__problem_release(&settled);
  return status;
}

hcp_status hcp_plan_create(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                           const hcp_cost *cost, int32_t effort, const hcp_stop *stop,
                           hcp_plan **plan, hcp_error *err) {
  hcp__problem problem;
  hcp__draft draft;
  hcp_status status = hcp__effort_check(effort, err);
  if (status == HCP_OK) status = hcp__prepare(lengths, n, limits, cost, stop, &problem, err);
  if (status != HCP_OK) return status;
  status = hcp__draft_init(&draft, n, err);
  if (status != HCP_OK) goto fail_draft;
  effort = useful_effort(n, effort);
  status = limits->pipeline.stages > 1 ? hcp__plan_pipeline(&problem, effort, &draft, err)
                                       : hcp__plan_best(&problem, effort, &draft, err);
  if (status == HCP_OK) status = hcp__go_on(&problem, err);
  if (status == HCP_OK) status = create_settled(&draft, &problem, plan, err);
  hcp__draft_release(&draft);
fail_draft:
  hcp__problem_release(&problem);
  return status;
}

hcp_status hcp_plan_create_from(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                                const hcp_cost *cost, const hcp_micro_batch *micro_batches,
                                int32_t micro_batch_count, const hcp_group *groups,
                                int32_t group_count, const int32_t *sequences, hcp_plan **plan,
                                hcp_error *err) {
  hcp__problem problem;
  hcp_status status = hcp__prepare(lengths, n, limits, cost, NULL, &problem, err);
  if (status != HCP_OK) return status;
  /* The draft is only read from here on. */
  hcp__draft draft = {micro_batch_count, (hcp_micro_batch *)(uintptr_t)micro_batches, group_count,
                      (hcp_group *)(uintptr_t)groups, (int32_t *)(uintptr_t)sequences};
  char *seen = calloc((size_t)n + 1, 1);
  if (seen == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", n);
    goto fail_seen;
  }
  status = check_draft(&draft, &problem, seen, err);
  if (status == HCP_OK) status = create(&draft, &problem, plan, err);
  free(seen);
fail_seen:
  hcp__problem_release(&problem);
  return status;
}

void hcp_plan_destroy(hcp_plan *plan) {
  if (plan == NULL) return;
  hcp__masks_release(plan);
  free((void *)(uintptr_t)plan->turns);
  free(plan);
}
