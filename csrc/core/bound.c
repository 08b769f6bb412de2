/* bound.c - times that no plan can beat, whatever its packing and order.
 *
 * A guess X is refuted when no plan ends within X. Every micro-batch spends
 * launch before it computes, so a sequence of a plan within X ends within
 * Y = X - launch, and no rank computes two sequences that each take more than
 * Y / 2. Each sequence therefore either takes at most Y / 2 (small), or is big
 * and has its ranks for itself as far as big ones go: those ranks sum to at
 * most N. The least rank-time under that one constraint is a fractional
 * knapsack; X is refuted when it does not fit in N X, launches included. */
#include <stdlib.h>

#include "internal.h"

/* Longest kinds that the lockstep bound looks at. */
enum { LOOKED_AT = 32 };

/* Making a kind big instead of small saves this much rank-time a rank. */
typedef struct offer {
  int64_t saving; /* rounded up */
  int64_t ranks;  /* of all the kind's sequences */
} offer;

static int by_saving(const void *left, const void *right) {
  const offer *a = left, *b = right;
  return (a->saving < b->saving) - (a->saving > b->saving);
}

/* A micro-batch on one rank holds at most capacity rows, and a rank that
 * computes anything has at least one: ranks left idle would cost as much. */
static int64_t launch_area(const hcp__problem *p) {
  int64_t launches = p->tokens / p->capacity + (p->tokens % p->capacity != 0), area;
  if (launches < p->limits->ranks) launches = p->limits->ranks;
  return __builtin_mul_overflow(launches, p->cost->launch, &area) ? INT64_MAX / 2 : area;
}

static const hcp__option *first_within(const hcp__problem *p, const hcp__kind *kind, int64_t time) {
  const hcp__option *options = &p->options[kind->first_option];
  for (int32_t i = 0; i < kind->options; i++)
    if (options[i].time_floor <= time) return &options[i];
  return kind->pruned ? &options[kind->options - 1] : NULL;
}

/* Rank-time of a kind when X holds, small if that can be; *offered says what
 * being big saves. Returns -1 when no degree is fast enough. */
static int64_t area_within(const hcp__problem *p, const hcp__kind *kind, int64_t time,
                           int64_t *forced_ranks, offer *offered) {
  const hcp__option *big = first_within(p, kind, time);
  const hcp__option *small = first_within(p, kind, time / 2);
  offered->ranks = 0;
  if (big == NULL) return -1;
  if (small == NULL) *forced_ranks += (int64_t)big->least_degree * kind->count;
  if (small == NULL || small == big) return big->area_floor;
  int64_t saving = small->area_floor - big->area_floor;
  if (saving > 0) {
    offered->ranks = (int64_t)big->least_degree * kind->count;
    offered->saving = saving / big->least_degree + (saving % big->least_degree != 0);
  }
  return small->area_floor;
}

static int refuted(const hcp__problem *p, int64_t guess, offer *offers) {
  int64_t ranks = p->limits->ranks, forced = 0, area = launch_area(p), limit;
  int32_t count = 0;
  if (__builtin_mul_overflow(ranks, guess, &limit)) limit = INT64_MAX;
  for (int32_t k = 0; k < p->kind_count; k++) {
    int64_t one = area_within(p, &p->kinds[k], guess - p->cost->launch, &forced, &offers[count]);
    if (one < 0) return 1;
    if (__builtin_mul_overflow(one, p->kinds[k].count, &one) ||
        __builtin_add_overflow(area, one, &area))
      area = INT64_MAX / 2;
    if (offers[count].ranks > 0) count++;
  }
  if (forced > ranks) return 1;
  if (area <= limit) return 0;
  qsort(offers, (size_t)count, sizeof *offers, by_saving);
  for (int32_t i = 0; i < count && forced < ranks; i++) {
    int64_t used = offers[i].ranks < ranks - forced ? offers[i].ranks : ranks - forced, saved;
    if (__builtin_mul_overflow(offers[i].saving, used, &saved)) return 0;
    area -= saved;
    forced += used;
  }
  return area > limit;
}

/* area / N, and the longest sequence at its fastest. */
static int64_t simple_bound(const hcp__problem *p) {
  int64_t area = p->least + launch_area(p), ranks = p->limits->ranks;
  int64_t bound = area / ranks + (area % ranks != 0);
  for (int32_t k = 0; k < p->kind_count; k++) {
    const hcp__option *options = &p->options[p->kinds[k].first_option];
    int64_t fastest = p->kinds[k].pruned ? 1 : INT64_MAX;
    for (int32_t i = 0; i < p->kinds[k].options; i++)
      if (options[i].time_floor < fastest) fastest = options[i].time_floor;
    if (fastest + p->cost->launch > bound) bound = fastest + p->cost->launch;
  }
  return bound;
}

/* Micro-batches that every plan needs to hold all rows. */
static int64_t waves_needed(const hcp__problem *p) {
  int64_t rows = p->capacity * p->limits->ranks;
  return p->tokens / rows + (p->tokens % rows != 0);
}

/* ---- lockstep ---- */

/* Rank-time per row of a kind, rounded up. */
typedef struct density {
  int64_t work, rows;
} density;

static int64_t least_area(const hcp__problem *p, const hcp__kind *kind) {
  return p->options[kind->first_option].area_floor;
}

static int by_density(const void *left, const void *right) {
  const density *a = left, *b = right;
  return (a->work < b->work) - (a->work > b->work);
}

/* Most work that rows can hold, beside what is taken. */
static int64_t densest(const density *kinds, int32_t count, int64_t rows) {
  int64_t area = 0;
  for (int32_t k = 0; k < count && rows > 0; k++) {
    int64_t taken = kinds[k].rows < rows ? kinds[k].rows : rows;
    if (kinds[k].work > (INT64_MAX / 2 - area) / taken) return INT64_MAX / 2;
    area += kinds[k].work * taken;
    rows -= taken;
  }
  return area;
}

/* A sequence shares its micro-batch with at most as much work as the rows of
 * all ranks hold, and everybody waits for it: what is not in that micro-batch
 * comes on top. The best degree for it gives the bound. */
static int64_t beside(const hcp__problem *p, const hcp__kind *kind, const density *kinds) {
  int64_t ranks = p->limits->ranks, best = INT64_MAX, least = least_area(p, kind);
  int64_t content = least + densest(kinds, p->kind_count, p->capacity * ranks - kind->length);
  for (int32_t i = 0; i < kind->options; i++) {
    const hcp__option *option = &p->options[kind->first_option + i];
    int64_t extra = option->area_floor - least, time = option->time_floor, sum;
    if (time > INT64_MAX / 2 / ranks) continue;
    if (content > ranks * time - extra)
      sum = (p->least + extra) / ranks;
    else
      sum = time + (p->least - content > 0 ? p->least - content : 0) / ranks;
    if (sum < best) best = sum;
  }
  return best == INT64_MAX || kind->pruned ? 0 : best;
}

/* Ranks that wait for each other after every micro-batch pay each launch. */
static int64_t lockstep_bound(const hcp__problem *p, density *kinds) {
  int64_t best = p->least / p->limits->ranks;
  for (int32_t k = 0; k < p->kind_count; k++) {
    const hcp__kind *kind = &p->kinds[k];
    int64_t area = least_area(p, kind);
    kinds[k] =
        (density){area / kind->length + (area % kind->length != 0), kind->length * kind->count};
  }
  qsort(kinds, (size_t)p->kind_count, sizeof *kinds, by_density);
  for (int32_t k = 0; k < p->kind_count && k < LOOKED_AT; k++) {
    int64_t bound = beside(p, &p->kinds[k], kinds);
    if (bound > best) best = bound;
  }
  return best + waves_needed(p) * p->cost->launch;
}

static hcp_status raise_for_lockstep(hcp__problem *p, hcp_error *err) {
  density *kinds = malloc(((size_t)p->kind_count + 1) * sizeof *kinds);
  if (kinds == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", p->n);
  int64_t bound = lockstep_bound(p, kinds);
  free(kinds);
  if (bound > p->bound) p->bound = bound;
  return HCP_OK;
}

hcp_status hcp__bound(hcp__problem *p, hcp_error *err) {
  p->bound = 0;
  if (p->n == 0) return HCP_OK;
  if (launch_area(p) > INT64_MAX / 4)
    return hcp__fail(err, HCP_OVERFLOW, "the cost of all launches exceeds 63 bits");
  offer *offers = malloc(((size_t)p->kind_count + 1) * sizeof *offers);
  if (offers == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", p->n);
  int64_t low = simple_bound(p) - 1, high = low + 1; /* low is refuted */
  while (refuted(p, high, offers)) {
    int64_t step = high - low;
    low = high;
    high += 2 * step + high / 64;
  }
  while (high - low > 1 && high - low > low >> 12) {
    int64_t middle = low + (high - low) / 2;
    if (refuted(p, middle, offers))
      low = middle;
    else
      high = middle;
  }
  free(offers);
  p->bound = low + 1;
  return p->limits->sync == HCP_SYNC_MICRO_BATCH ? raise_for_lockstep(p, err) : HCP_OK;
}
