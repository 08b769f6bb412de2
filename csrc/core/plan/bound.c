/* bound.c - times that no plan can beat, whatever its packing and order.
 *
 * A guess X is refuted when no plan ends within X. Every rank spends launches, so a
 * sequence of a plan within X ends within Y = X - launches, and no rank computes two
 * sequences that each take more than Y / 2. Each sequence therefore either takes at most Y / 2
 * (small), or is big and has its ranks for itself as far as big ones go: those ranks sum to at most
 * N. The least rank-time under that one constraint is a fractional knapsack; X is refuted when it
 * does not fit in N X, launches included. */
#include <stdlib.h>

#include "plan.h"

/* No plan takes longer (hcp__makespan), so that guesses need not. */
#define LAST_GUESS (INT64_MAX / 2)

/* The guess that follows a refuted one: guesses rise by at least 1, and end at the last. */
static int64_t next_guess(int64_t guess, hcp__wide more) {
  return more < LAST_GUESS - guess ? guess + (int64_t)more : LAST_GUESS;
}

/* Making a kind big instead of small saves this much rank-time a rank. */
typedef struct offer {
  int64_t saving; /* rounded up */
  int64_t ranks;  /* of all the kind's sequences */
} offer;

static int by_saving(const void *left, const void *right) {
  const offer *a = left, *b = right;
  if (a->saving != b->saving) return a->saving > b->saving ? -1 : 1;
  return (a->ranks < b->ranks) - (a->ranks > b->ranks); /* qsort may leave ties in any order */
}

/* Launches of every rank: where ranks meet at the end of the step, also those of micro-batches in
 * which it has no rows, of which there are as many as hold all rows. */
static int64_t launches_each(const hcp__problem *p) {
  int step = p->limits->sync == HCP_SYNC_STEP && p->limits->pipeline.stages < 2;
  return step ? hcp__least_count(p) : 1;
}

/* What they take of the guess, on fast ranks. */
static int64_t launch_time(const hcp__problem *p) {
  return hcp__scaled(p->cost->launch, launches_each(p), 1);
}

/* A micro-batch on one rank holds at most capacity rows, and a rank that
 * computes anything has at least one: ranks left idle would cost as much, unless
 * they are slow ones, which have less to give, and launch nothing without rows. */
static int64_t launch_area(const hcp__problem *p) {
  int64_t launches = p->tokens / p->capacity + (p->tokens % p->capacity != 0), area;
  int64_t each = launches_each(p), all = each * p->limits->ranks;
  if (launches < all && (each > 1 || p->limits->slowness == NULL)) launches = all;
  return __builtin_mul_overflow(launches, p->cost->launch, &area) ? INT64_MAX / 2 : area;
}

/* Rank-time of a kind when X holds, small if that can be; *offered says what
 * being big saves. Returns -1 when no degree is fast enough. */
static int64_t area_within(const hcp__problem *p, const hcp__kind *kind, int64_t time,
                           int64_t *forced_ranks, offer *offered) {
  const hcp__option *big = hcp__first_within(p, kind, time);
  const hcp__option *small = hcp__first_within(p, kind, time / 2);
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
  int64_t ranks = p->limits->ranks, forced = 0, area = launch_area(p);
  int64_t limit = hcp__rank_time(p->limits, guess);
  int32_t count = 0;
  for (int32_t k = 0; k < p->kind_count; k++) {
    int64_t one = area_within(p, &p->kinds[k], guess - launch_time(p), &forced, &offers[count]);
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
    if (__builtin_mul_overflow(offers[i].saving, used, &saved) ||
        __builtin_sub_overflow(area, saved, &area))
      return 0;
    forced += used;
  }
  return area > limit;
}

/* area / N, and the longest sequence at its fastest. */
static int64_t simple_bound(const hcp__problem *p) {
  int64_t area = p->least + launch_area(p), ranks = p->limits->ranks;
  int64_t bound = area / ranks + (area % ranks != 0);
  for (int32_t k = 0; k < p->kind_count; k++) {
    if (hcp__first_within(p, &p->kinds[k], bound - launch_time(p)) != NULL) continue;
    bound = hcp__sum(hcp__fastest(p, &p->kinds[k]), launch_time(p));
  }
  return bound;
}

/* Where all ranks run as many micro-batches as hold all rows, each takes its host's time for
 * every one. */
static int64_t host_bound(const hcp__problem *p) {
  int all = p->limits->sync == HCP_SYNC_MICRO_BATCH || p->limits->pipeline.stages < 2;
  return hcp__scaled(hcp__launched(p->cost, 0), all ? hcp__least_count(p) : 1, 1);
}

/* ---- whole launches ---- */

/* Least work per token of any sequence, rounded down. */
static int64_t lightest(const hcp__problem *p) {
  int64_t least = INT64_MAX;
  for (int32_t k = 0; k < p->kind_count; k++) {
    const hcp__kind *kind = &p->kinds[k];
    int64_t rate = hcp__leanest(p, kind)->area_floor / kind->size.length;
    if (rate < least) least = rate;
  }
  return least;
}

/* What a rank of so many launches can do at most, when a token counts as worth
 * times its least work, in addition to the work itself. */
static hcp__wide most_of(const hcp__problem *p, int64_t guess, int64_t rate, int64_t worth,
                         int64_t launches) {
  hcp__wide time = guess - (hcp__wide)launches * p->cost->launch;
  hcp__wide tokens = (hcp__wide)launches * p->capacity * rate;
  return time <= 0 ? 0 : worth * (tokens < time ? tokens : time) + time;
}

/* Launches are whole: a rank that pays few holds few tokens, one that pays many
 * has little time. Either may be enough, so three counts are looked at: the least, and
 * both next to that at which rows and time run out together. */
static int launches_refute(const hcp__problem *p, int64_t guess, int64_t rate) {
  static const int64_t worths[] = {1, 2, 4, 16};
  /* Division of 128 bits would call for more than libc. */
  hcp__wide full = (hcp__wide)p->capacity * rate + p->cost->launch;
  int64_t even = full > guess ? 0 : guess / (int64_t)full, least = launches_each(p);
  for (size_t i = 0; i < sizeof worths / sizeof *worths; i++) {
    hcp__wide most = most_of(p, guess, rate, worths[i], least);
    for (int64_t k = hcp__most(even, least); k <= even + 1; k++) {
      hcp__wide one = most_of(p, guess, rate, worths[i], k);
      if (one > most) most = one;
    }
    if ((hcp__wide)worths[i] * rate * p->tokens + p->least > most * p->limits->ranks) return 1;
  }
  return 0;
}

static void raise_for_launches(hcp__problem *p) {
  int64_t rate = lightest(p), low = p->bound - 1, high = p->bound;
  if (p->cost->launch == 0 || rate == 0) return;
  while (high < LAST_GUESS && launches_refute(p, high, rate)) {
    low = high;
    high = next_guess(high, high / 8 + 1);
  }
  while (high - low > 1 && high - low > low >> 12) {
    int64_t middle = low + (high - low) / 2;
    if (launches_refute(p, middle, rate))
      low = middle;
    else
      high = middle;
  }
  p->bound = low + 1;
}

/* The least guess that is not refuted, to a part in 2^12; LAST_GUESS: each is. */
static int64_t least_guess(const hcp__problem *p, offer *offers) {
  int64_t low = simple_bound(p) - 1, high = low + 1; /* low is refuted */
  while (refuted(p, high, offers)) {
    hcp__wide step = high - low;
    if (high >= LAST_GUESS) return LAST_GUESS;
    low = high;
    high = next_guess(high, 2 * step + high / 64);
  }
  while (high - low > 1 && high - low > low >> 12) {
    int64_t middle = low + (high - low) / 2;
    if (refuted(p, middle, offers))
      low = middle;
    else
      high = middle;
  }
  return low + 1;
}

hcp_status hcp__stage_bound(hcp__problem *p, hcp_error *err) {
  p->bound = 0;
  if (launch_area(p) > INT64_MAX / 4)
    return hcp__fail(err, HCP_OVERFLOW, "the cost of all launches exceeds 63 bits");
  offer *offers = malloc(((size_t)p->kind_count + 1) * sizeof *offers);
  if (offers == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", p->n);
  p->bound = hcp__most(least_guess(p, offers), host_bound(p));
  free(offers);
  if (p->bound >= LAST_GUESS)
    return hcp__fail(err, HCP_OVERFLOW, "the cost of all sequences exceeds 63 bits");
  raise_for_launches(p);
  return p->limits->sync == HCP_SYNC_MICRO_BATCH ? hcp__lockstep_bound(p, err) : HCP_OK;
}

hcp_status hcp__bound(hcp__problem *p, hcp_error *err) {
  p->bound = 0;
  if (p->n == 0) return HCP_OK;
  hcp_status status = hcp__stage_bound(p, err);
  return status == HCP_OK ? hcp__pipeline_bound(p, err) : status;
}
