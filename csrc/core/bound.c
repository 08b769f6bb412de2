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

/* Making a kind big instead of small saves this much rank-time a rank. */
typedef struct offer {
  int64_t saving; /* rounded up */
  int64_t ranks;  /* of all the kind's sequences */
} offer;

static int by_saving(const void *left, const void *right) {
  const offer *a = left, *b = right;
  return (a->saving < b->saving) - (a->saving > b->saving);
}

/* A micro-batch on one rank holds at most capacity rows. */
static int64_t launch_area(const hcp__problem *p) {
  int64_t launches = p->tokens / p->capacity + (p->tokens % p->capacity != 0), area;
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
  int64_t area = p->work + launch_area(p), ranks = p->limits->ranks;
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

/* Ranks that wait for each other after every micro-batch pay each launch. */
static int64_t lockstep_bound(const hcp__problem *p) {
  int64_t mean = p->work / p->limits->ranks + (p->work % p->limits->ranks != 0);
  return mean + waves_needed(p) * p->cost->launch;
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
  if (p->limits->sync == HCP_SYNC_MICRO_BATCH && lockstep_bound(p) > p->bound)
    p->bound = lockstep_bound(p);
  return HCP_OK;
}
