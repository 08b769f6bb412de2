/* plan_greedy.c - the planner: allot degrees for a target time, then place the
 * widest sequences first on the ranks that are free soonest.
 *
 * For a target X, every sequence gets the least degree that finishes it within
 * X. Widest first, longest first among equals, each goes to the interval of
 * ranks that is free soonest, or joins a group that is already there when that
 * ends no later. A handful of targets around the lower bound are tried, and the
 * plan that ends first is kept: small targets widen sequences that leave ranks
 * idle at the end, large ones save exchange. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { TARGETS = 16, TARGET_UNIT = 8 }; /* bound * 1/8, 2/8, ... 16/8 */

typedef struct task {
  int64_t length;
  int64_t time;
  int32_t index;
  int32_t degree;
} task;

/* A group being filled. Sequences of one group are a list in task order. */
typedef struct block {
  int32_t first_rank;
  int32_t degree;
  int32_t first_task, last_task; /* indices of tasks */
  int32_t sequences;
  int32_t below; /* the block before it on first_rank, -1: none */
  int64_t rows;  /* on the fullest rank, at most */
} block;

typedef struct planner {
  const int64_t *lengths;
  const int32_t *least_degrees;
  int32_t n;
  const hcp_limits *limits;
  const hcp_cost *cost;
  task *tasks;         /* n */
  int32_t *next_task;  /* n: the next task of the same block, -1: none */
  block *blocks;       /* n */
  int32_t block_count;
  int64_t *loads;      /* ranks: when each is free */
  int32_t *top;        /* ranks: the last block on each, -1: none */
  int32_t *depth;      /* ranks: micro-batches so far */
  int32_t *block_batch; /* n: the micro-batch of each block */
  int32_t *order;      /* n: blocks by micro-batch and rank */
} planner;

/* ---- allot ---- */

static int64_t time_at(const planner *p, int64_t length, int32_t degree) {
  int64_t time = 0;
  /* hcp__bound has computed greater costs of the same lengths already. */
  (void)hcp_cost_time(p->cost, length, degree, &time, NULL);
  return time;
}

/* The least degree that ends by target, or else the fastest one. */
static task allot(const planner *p, int32_t i, int64_t target) {
  task best = {p->lengths[i], INT64_MAX, i, 0};
  for (int32_t degree = p->least_degrees[i]; degree <= p->limits->max_degree; degree++) {
    /* Rounding may overfill a degree that a smaller one does not. */
    if (hcp_rows_max(best.length, degree) > p->limits->max_tokens_per_rank) continue;
    int64_t time = time_at(p, best.length, degree);
    if (time < best.time) {
      best.time = time;
      best.degree = degree;
    }
    if (time <= target) break;
  }
  return best;
}

static int by_width(const void *left, const void *right) {
  const task *a = left, *b = right;
  if (a->degree != b->degree) return a->degree > b->degree ? -1 : 1;
  if (a->length != b->length) return a->length > b->length ? -1 : 1;
  return a->index < b->index ? -1 : 1;
}

/* ---- place ---- */

static int64_t load_of(const planner *p, int32_t first, int32_t degree) {
  int64_t load = 0;
  for (int32_t r = first; r < first + degree; r++)
    if (p->loads[r] > load) load = p->loads[r];
  return load;
}

/* The interval that is free soonest, the lowest one of several. */
static int32_t soonest(const planner *p, int32_t degree, int64_t *start) {
  int32_t best = 0;
  int64_t best_load = load_of(p, 0, degree);
  for (int32_t first = 1; first + degree <= p->limits->ranks;) {
    int64_t load = 0;
    int32_t late = first - 1; /* the last rank that rules the interval out */
    for (int32_t r = first + degree - 1; r >= first; r--) {
      if (p->loads[r] >= best_load) {
        late = r;
        break;
      }
      if (p->loads[r] > load) load = p->loads[r];
    }
    if (late < first) {
      best = first;
      best_load = load;
      first++;
    } else {
      first = late + 1;
    }
  }
  *start = best_load;
  return best;
}

static int fits(const planner *p, const block *b, const task *t, int32_t first) {
  return b->first_rank == first && b->degree == t->degree &&
         b->rows + hcp_rows_max(t->length, t->degree) <= p->limits->max_tokens_per_rank;
}

static int is_top(const planner *p, int32_t b) {
  for (int32_t r = p->blocks[b].first_rank; r < p->blocks[b].first_rank + p->blocks[b].degree; r++)
    if (p->top[r] != b) return 0;
  return 1;
}

/* A group on the interval that the task can join, -1: none. Only the last group
 * of its ranks can grow without delaying wider ones after it; on a single rank
 * nothing but single-rank groups follow, and any may grow. */
static int32_t joinable(const planner *p, const task *t, int32_t first) {
  int32_t b = p->top[first];
  if (t->degree > 1) return b >= 0 && fits(p, &p->blocks[b], t, first) && is_top(p, b) ? b : -1;
  while (b >= 0 && p->blocks[b].degree == 1) {
    if (fits(p, &p->blocks[b], t, first)) return b;
    b = p->blocks[b].below;
  }
  return -1;
}

static void set_loads(planner *p, const block *b, int64_t load) {
  for (int32_t r = b->first_rank; r < b->first_rank + b->degree; r++) p->loads[r] = load;
}

static void join(planner *p, int32_t b, int32_t t) {
  block *joined = &p->blocks[b];
  const task *added = &p->tasks[t];
  p->next_task[joined->last_task] = t;
  joined->last_task = t;
  joined->sequences++;
  joined->rows += hcp_rows_max(added->length, added->degree);
  set_loads(p, joined, load_of(p, joined->first_rank, joined->degree) + added->time);
}

static void open_block(planner *p, int32_t t, int32_t first, int64_t start) {
  const task *added = &p->tasks[t];
  int32_t b = p->block_count++;
  p->blocks[b] = (block){
      first, added->degree, t, t, 1, p->top[first], hcp_rows_max(added->length, added->degree)};
  for (int32_t r = first; r < first + added->degree; r++) p->top[r] = b;
  set_loads(p, &p->blocks[b], start + p->cost->launch + added->time);
}

static void place(planner *p, int32_t t) {
  int64_t start;
  const task *placed = &p->tasks[t];
  int32_t first = soonest(p, placed->degree, &start);
  int32_t b = joinable(p, placed, first);
  p->next_task[t] = -1;
  if (b >= 0)
    join(p, b, t);
  else
    open_block(p, t, first, start);
}

static void place_all(planner *p, int64_t target) {
  for (int32_t i = 0; i < p->n; i++) p->tasks[i] = allot(p, i, target);
  qsort(p->tasks, (size_t)p->n, sizeof *p->tasks, by_width);
  p->block_count = 0;
  for (int32_t r = 0; r < p->limits->ranks; r++) {
    p->loads[r] = 0;
    p->top[r] = -1;
  }
  for (int32_t t = 0; t < p->n; t++) place(p, t);
}

/* ---- emit ---- */

/* A block runs in the first micro-batch in which all its ranks are free. */
static int32_t assign_micro_batches(planner *p) {
  int32_t batches = 0;
  memset(p->depth, 0, (size_t)p->limits->ranks * sizeof *p->depth);
  for (int32_t b = 0; b < p->block_count; b++) {
    const block *placed = &p->blocks[b];
    int32_t batch = 0;
    for (int32_t r = placed->first_rank; r < placed->first_rank + placed->degree; r++)
      if (p->depth[r] > batch) batch = p->depth[r];
    for (int32_t r = placed->first_rank; r < placed->first_rank + placed->degree; r++)
      p->depth[r] = batch + 1;
    p->block_batch[b] = batch;
    if (batch + 1 > batches) batches = batch + 1;
  }
  return batches;
}

/* Blocks by micro-batch, then by rank: two stable counting passes. */
static void order_blocks(planner *p, int32_t batches, int32_t *starts) {
  int32_t *by_rank = p->next_task + p->n; /* second half of the scratch */
  int32_t filled = 0;
  for (int32_t r = 0; r < p->limits->ranks; r++) p->depth[r] = 0;
  for (int32_t b = 0; b < p->block_count; b++) p->depth[p->blocks[b].first_rank]++;
  for (int32_t r = 0; r < p->limits->ranks; r++) {
    int32_t count = p->depth[r];
    p->depth[r] = filled;
    filled += count;
  }
  for (int32_t b = 0; b < p->block_count; b++) by_rank[p->depth[p->blocks[b].first_rank]++] = b;
  for (int32_t m = 0; m <= batches; m++) starts[m] = 0;
  for (int32_t b = 0; b < p->block_count; b++) starts[p->block_batch[b] + 1]++;
  for (int32_t m = 0; m < batches; m++) starts[m + 1] += starts[m];
  for (int32_t i = 0; i < p->block_count; i++)
    p->order[starts[p->block_batch[by_rank[i]]]++] = by_rank[i];
}

static void emit(planner *p, hcp__draft *draft) {
  int32_t batches = assign_micro_batches(p), sequence = 0;
  int32_t *starts = p->order + p->n; /* n + 2 more */
  order_blocks(p, batches, starts);
  draft->micro_batch_count = 0;
  draft->group_count = p->block_count;
  for (int32_t i = 0; i < p->block_count; i++) {
    const block *b = &p->blocks[p->order[i]];
    if (i == 0 || p->block_batch[p->order[i]] != p->block_batch[p->order[i - 1]])
      draft->micro_batches[draft->micro_batch_count++] = (hcp_micro_batch){i, 0};
    draft->micro_batches[draft->micro_batch_count - 1].groups++;
    draft->groups[i] = (hcp_group){b->first_rank, b->degree, sequence, b->sequences};
    for (int32_t t = b->first_task; t >= 0; t = p->next_task[t])
      draft->sequences[sequence++] = p->tasks[t].index;
  }
}

/* ---- judge ---- */

hcp_status hcp__makespan(const hcp__draft *draft, const int64_t *lengths, const hcp_limits *limits,
                         const hcp_cost *cost, int64_t *available, int64_t *makespan,
                         hcp_error *err) {
  int64_t last = 0;
  for (int32_t r = 0; r < limits->ranks; r++) available[r] = 0;
  for (int32_t g = 0; g < draft->group_count; g++) { /* groups are in micro-batch order */
    const hcp_group *group = &draft->groups[g];
    int64_t end = 0;
    for (int32_t r = group->first_rank; r < group->first_rank + group->degree; r++)
      if (available[r] > end) end = available[r];
    int32_t overflow = __builtin_add_overflow(end, cost->launch, &end);
    for (int32_t s = 0; s < group->sequences; s++) {
      int64_t time;
      hcp_status status = hcp_cost_time(cost, lengths[draft->sequences[group->first_sequence + s]],
                                        group->degree, &time, err);
      if (status != HCP_OK) return status;
      overflow |= __builtin_add_overflow(end, time, &end);
    }
    if (overflow) return hcp__fail(err, HCP_OVERFLOW, "the cost of all sequences exceeds 63 bits");
    for (int32_t r = group->first_rank; r < group->first_rank + group->degree; r++)
      available[r] = end;
    if (end > last) last = end;
  }
  *makespan = last;
  return HCP_OK;
}

/* ---- the search ---- */

static int64_t target_of(int64_t bound, int32_t k) {
  return bound / TARGET_UNIT * k + bound % TARGET_UNIT * k / TARGET_UNIT;
}

static hcp_status search(planner *p, int64_t bound, hcp__draft *draft, hcp_error *err) {
  int64_t best = INT64_MAX, best_target = bound;
  int32_t best_batches = 0;
  for (int32_t k = 1; k <= TARGETS; k++) {
    int64_t makespan;
    place_all(p, target_of(bound, k));
    emit(p, draft);
    hcp_status status =
        hcp__makespan(draft, p->lengths, p->limits, p->cost, p->loads, &makespan, err);
    if (status != HCP_OK) return status;
    if (makespan < best || (makespan == best && draft->micro_batch_count < best_batches)) {
      best = makespan;
      best_batches = draft->micro_batch_count;
      best_target = target_of(bound, k);
    }
  }
  place_all(p, best_target);
  emit(p, draft);
  return HCP_OK;
}

static int allocate(planner *p) {
  size_t n = (size_t)p->n + 1, ranks = (size_t)p->limits->ranks;
  p->tasks = malloc(n * sizeof *p->tasks);
  p->next_task = malloc(2 * n * sizeof *p->next_task);
  p->blocks = malloc(n * sizeof *p->blocks);
  p->loads = malloc(ranks * sizeof *p->loads);
  p->top = malloc(ranks * sizeof *p->top);
  p->depth = malloc(ranks * sizeof *p->depth);
  p->block_batch = malloc(n * sizeof *p->block_batch);
  p->order = malloc((2 * n + 1) * sizeof *p->order);
  return p->tasks && p->next_task && p->blocks && p->loads && p->top && p->depth &&
         p->block_batch && p->order;
}

static void release(planner *p) {
  free(p->order);
  free(p->block_batch);
  free(p->depth);
  free(p->top);
  free(p->loads);
  free(p->blocks);
  free(p->next_task);
  free(p->tasks);
}

hcp_status hcp__plan_greedy(const int64_t *lengths, const int32_t *least_degrees, int32_t n,
                            const hcp_limits *limits, const hcp_cost *cost, int64_t bound,
                            hcp__draft *draft, hcp_error *err) {
  planner p = {
      .lengths = lengths, .least_degrees = least_degrees, .n = n, .limits = limits, .cost = cost};
  hcp_status status =
      allocate(&p) ? search(&p, bound, draft, err)
                   : hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", n);
  release(&p);
  return status;
}
