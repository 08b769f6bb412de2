/* replay.c - a plan on a machine: GPUs, their hosts, links of two classes, and memory. */
#include "plan.h"

/* Conversion of 128 bits would call for more than libc. */
static double number(hcp__wide value) {
  return (double)(int64_t)(value >> 32) * 0x1p32 + (double)(uint32_t)value;
}

static double larger(double a, double b) { return a > b ? a : b; }

/* ---- times of a sequence ---- */

static double arrival_beside(const hcp_machine *m, double own, int32_t degree, int32_t inside) {
  double others = degree - inside;
  if (m->once) return larger(m->near * (degree - 1), m->far * others / inside) * own;
  return larger(m->near * (inside - 1), m->far * others) * own;
}

/* Until the slowest rank of a group has all keys and values. */
static double arrival_of(const hcp_machine *m, const hcp_group *group, double tokens) {
  int32_t node = m->ranks_per_node, first = group->first_rank, end = first + group->degree;
  double own = tokens / group->degree, slowest = 0;
  if (hcp_nodes_of(first, group->degree, node) == 1) return m->near * (tokens - own);
  for (int64_t border = first - first % node; border < end; border += node) {
    int32_t inside = (int32_t)(hcp__least(end, border + node) - hcp__most(first, border));
    slowest = larger(slowest, arrival_beside(m, own, group->degree, inside));
  }
  return slowest;
}

/* What attention on a rank does not hide. */
static double exposed(const hcp_machine *m, double arrival, double attention, int32_t degree) {
  if (m->overlap) return larger(0, arrival - (attention - attention / degree));
  double gradients =
      arrival / 3; /* on their way back, after the last of the backward's attention */
  return larger(0, arrival - gradients - attention / degree) + gradients;
}

typedef struct seconds {
  double work, waited;
} seconds;

static seconds times_of(const hcp_plan *plan, const hcp_machine *m, const hcp_group *group) {
  seconds all = {m->launch, 0};
  double d = group->degree;
  for (int32_t i = 0; i < group->sequences; i++) {
    int32_t sequence = plan->sequences[group->first_sequence + i];
    hcp__size size = hcp__size_of(&plan->cost, plan->lengths, sequence);
    double n = (double)size.length;
    double pairs = size.pairs >= 0 ? (double)size.pairs : number(hcp__pairs(size.length, -1, 0));
    double attention = m->pair * pairs / d;
    all.work += attention + m->token * n / d;
    if (group->degree == 1) continue;
    all.work += m->shared * n / d + m->step * (d - 1);
    all.waited += exposed(m, arrival_of(m, group, n), attention, group->degree);
  }
  all.work /=
      (double)HCP_FULL_SPEED / hcp__slowness(&plan->limits, group->first_rank, group->degree);
  return all;
}

/* ---- the step ---- */

static void run(const hcp_plan *plan, const hcp_machine *m, const hcp_group *group,
                hcp_rank_seconds *ranks) {
  seconds taken = times_of(plan, m, group);
  double by_host = group->degree == 1 ? m->host : m->host_shared, begun = 0, told = 0;
  hcp_rank_seconds *first = ranks + group->first_rank, *end = first + group->degree;
  for (hcp_rank_seconds *r = first; r < end; r++) {
    begun = larger(begun, larger(r->end, r->queued));
    told = larger(told, r->queued);
  }
  double over = begun + taken.work + taken.waited, last = larger(over, told + by_host);
  for (hcp_rank_seconds *r = first; r < end; r++) {
    r->starved += last - over;
    r->busy += taken.work + taken.waited;
    r->exposed += taken.waited;
    r->queued += by_host;
    r->end = last;
  }
}

/* Ranks without rows run their model all the same. */
static void run_idle(const hcp_plan *plan, const hcp_machine *machine, int32_t m,
                     hcp_rank_seconds *ranks) {
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    hcp_group alone = {r, 1, 0, 0};
    if (hcp__group_of(plan, m, r) == NULL) run(plan, machine, &alone, ranks);
  }
}

static void meet(const hcp_plan *plan, hcp_rank_seconds *ranks) {
  double end = 0;
  for (int32_t r = 0; r < plan->limits.ranks; r++) end = larger(end, ranks[r].end);
  for (int32_t r = 0; r < plan->limits.ranks; r++) ranks[r].end = end;
}

static hcp_status check_bytes(const hcp_plan *plan, const hcp_memory *memory, int32_t m,
                              const hcp_group *group, hcp_error *err) {
  int64_t needed = 0;
  for (int32_t j = 0; j < group->degree; j++)
    needed = hcp__most(needed, hcp__group_bytes(plan, memory, group, j));
  if (needed <= memory->limit) return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "micro-batch %d needs %lld bytes on a rank from rank %d on, expected <= "
                   "memory.limit (%lld): plan with this memory model, or with fewer "
                   "max_tokens_per_rank",
                   m, (long long)needed, group->first_rank, (long long)memory->limit);
}

static hcp_status check(const hcp_plan *plan, const hcp_machine *machine, hcp_error *err) {
  hcp_status status = HCP_OK;
  if (plan->limits.pipeline.stages > 1)
    return hcp__fail(err, HCP_INVALID,
                     "the plan has %d pipeline stages, expected 1: its makespan is a simulation of "
                     "the pipeline already",
                     plan->limits.pipeline.stages);
  if (machine->once && machine->ranks_per_node < 1)
    return hcp__fail(err, HCP_INVALID, "machine.ranks_per_node is %d, expected >= 1 with once",
                     machine->ranks_per_node);
  for (int32_t m = 0; machine->memory.limit > 0 && m < plan->micro_batch_count; m++) {
    const hcp_micro_batch *batch = &plan->micro_batches[m];
    for (int32_t g = 0; g < batch->groups && status == HCP_OK; g++)
      status = check_bytes(plan, &machine->memory, m, &plan->groups[batch->first_group + g], err);
  }
  return status;
}

hcp_status hcp_plan_replay(const hcp_plan *plan, const hcp_machine *machine,
                           hcp_rank_seconds *ranks, hcp_error *err) {
  hcp_status status = check(plan, machine, err);
  if (status != HCP_OK) return status;
  for (int32_t r = 0; r < plan->limits.ranks; r++) ranks[r] = (hcp_rank_seconds){0};
  for (int32_t m = 0; m < plan->micro_batch_count; m++) {
    const hcp_micro_batch *batch = &plan->micro_batches[m];
    if (plan->limits.sync == HCP_SYNC_MICRO_BATCH) meet(plan, ranks);
    for (int32_t g = 0; g < batch->groups; g++)
      run(plan, machine, &plan->groups[batch->first_group + g], ranks);
    run_idle(plan, machine, m, ranks);
  }
  return HCP_OK;
}
