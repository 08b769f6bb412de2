/* bound_pipeline.c - times that no pipeline can beat.
 *
 * What bounds one stage bounds the last one, which begins after a forward of
 * some micro-batch through all others, and after whose end a backward follows:
 * the ramp. Small micro-batches make a short ramp, but must grow slowly. On one
 * rank, let t_1 .. t_M be the times of the micro-batches that it computes, T
 * their sum, p the stages, a third of each time forward. For m <= n, work
 *
 *   forward of 1 .. m on the first stage, of m on the others but the last,
 *   m .. n on the last stage,
 *   backward of n on the others, of n + 1 .. M on the first stage
 *
 * follows each other, and takes T + front(m) + back(n) with
 *
 *   front(m) = (p - 1) / 3 t_m - 2 / 3 (t_1 + .. + t_(m - 1))
 *   back(n)  = 2 (p - 1) / 3 t_n - 1 / 3 (t_(n + 1) + .. + t_M).
 *
 * So for any cut k, with a the largest front of m <= k and b the largest back of
 * n > k, T + a + b is a bound. Those fronts limit how fast times grow, and so
 * the sum of the first k to a * 3 / 2 ((1 + 2 / (p - 1))^k - 1); those backs the
 * sum of the others to b * 3 ((1 + 1 / (2 (p - 1)))^(M - k) - 1). With reach(M)
 * the larger of both factors, at the cut where that is least, a + b is at least
 * T / reach(M); and some rank has at least its share of all work, so that T is
 * that and M launches. The M that gives the least is a bound.
 *
 * One of them that takes t, with P before it and S after it, makes that
 *
 *   T + max(0, (p - 1) / 3 t - 2 / 3 P) + max(0, 2 (p - 1) / 3 t - 1 / 3 S),
 *
 * least where P has what it can use, (p - 1) / 2 t: the larger of T,
 * (4 T + (5 p - 3) t) / 6 and (T + (3 p - 1) t) / 3. So a rank that ends by X computes
 * at most u(t) beside a sequence of time t. With U the most that any rank computes,
 * by its reach, it leaves U - u(t) of the longest it has undone, and at least
 * t' (U / u(t') - 1) for each of its sequences, since those sum to u(t) at most.
 * X is refuted when no choice of degrees has sum of d t U / u(t) within N U, or when
 * what one sequence leaves undone does not fit beside all work.
 *
 * Where ranks run in lockstep, all of them are busy for the same T and wait for the
 * slowest sequence: either that is slow, or many are wide and T is larger.
 *
 * This is for stages of one chunk; interleaved, only the ramp counts. */
#include <stdlib.h>

#include "plan.h"

/* Micro-batches of one rank that are looked at, and the unit of a reach. */
enum { COUNTS = 2048, ONE = 1 << 20 };
#define FAR ((int64_t)1 << 60) /* a reach that is as good as endless */

/* Micro-batches of some rank with its share of all work: where ranks run in
 * lockstep, as many as hold all rows. */
static int32_t least_count(const hcp__problem *p) {
  int32_t count = p->limits->sync == HCP_SYNC_STEP ? 1 : hcp__least_count(p);
  return count < COUNTS ? count : COUNTS;
}

/* ---- the ramp ---- */

static int64_t ramp_bound(const hcp__problem *p) {
  const hcp_pipeline *pipeline = &p->limits->pipeline;
  int64_t least = INT64_MAX, most = 0, chunks = pipeline->virtual_stages, bound;
  for (int32_t k = 0; k < p->kind_count; k++) {
    int64_t time = hcp__fastest(p, &p->kinds[k]);
    if (time < least) least = time;
    if (time > most) most = time;
  }
  int64_t ramp = (p->cost->launch + least) / (chunks > 1 ? chunks : 1);
  if (__builtin_mul_overflow(ramp, pipeline->stages - 1, &ramp) ||
      __builtin_add_overflow(p->bound, ramp, &bound))
    return INT64_MAX / 2;
  int64_t one = hcp__scaled(p->cost->launch + most, pipeline->stages, 1);
  return one > bound ? one : bound;
}

/* ---- one that is long ---- */

/* The least that a rank takes which is busy for whole, a micro-batch of time tall
 * included. */
static int64_t with_tall(const hcp__problem *p, int64_t whole, int64_t tall) {
  int64_t stages = p->limits->pipeline.stages, time = whole;
  if (whole > INT64_MAX / 64 || tall > INT64_MAX / 64 / stages) return INT64_MAX / 2;
  if ((4 * whole + (5 * stages - 3) * tall) / 6 > time)
    time = (4 * whole + (5 * stages - 3) * tall) / 6;
  if ((whole + (3 * stages - 1) * tall) / 3 > time) time = (whole + (3 * stages - 1) * tall) / 3;
  return time;
}

/* An option's rank-time, both floors respected. */
static int64_t area_of(const hcp__option *option) {
  int64_t area;
  if (__builtin_mul_overflow((int64_t)option->least_degree, option->time_floor, &area))
    return option->area_floor;
  return area > option->area_floor ? area : option->area_floor;
}

/* Rank-time that a kind needs on top of its least so that each takes less than
 * time; -1: it cannot. */
static int64_t area_below(const hcp__problem *p, const hcp__kind *kind, int64_t time) {
  const hcp__choices *all = hcp__choices_of(p, kind);
  int64_t least = -1, cheapest = all->options[0].area_floor;
  if (all->pruned) return 0;
  for (int32_t i = 0; i < all->count; i++) {
    const hcp__option *option = &all->options[i];
    if (option->time_floor >= time) continue;
    if (least < 0 || area_of(option) < least) least = area_of(option);
  }
  return least < 0 ? -1 : hcp__scaled(least - cheapest, kind->count, 1);
}

/* The least that ranks in lockstep are busy for when each sequence takes less than
 * below; -1: some cannot. The longest are looked at. */
static int64_t busy_below(const hcp__problem *p, int64_t below) {
  int64_t area = p->least, ranks = p->limits->ranks;
  for (int32_t k = 0; k < p->kind_count; k++) {
    if (hcp__leanest(p, &p->kinds[k])->time_floor < below) break;
    int64_t more = area_below(p, &p->kinds[k], below);
    if (more < 0) return -1;
    if (__builtin_add_overflow(area, more, &area)) return p->bound;
  }
  int64_t busy = area / ranks + least_count(p) * p->cost->launch;
  return p->limits->slowness == NULL && busy > p->bound ? busy : p->bound;
}

/* Ranks in lockstep all wait for the slowest sequence, which is as slow as the
 * longest at least: a wide one is less of a ramp and more work for all. */
static int64_t tall_bound(const hcp__problem *p) {
  const hcp__choices *all = hcp__choices_of(p, &p->kinds[0]);
  int64_t below = INT64_MAX, best = INT64_MAX / 2;
  if (all->pruned) return p->bound;
  for (int32_t i = 0; i < all->count; i++) {
    int64_t tall = all->options[i].time_floor, busy = busy_below(p, below);
    int64_t time = busy < 0 ? best : with_tall(p, busy, tall + p->cost->launch);
    if (time < best) best = time;
    below = tall;
  }
  return best;
}

/* The most work of a rank that ends by time with a sequence that takes tall, and a
 * launch for it. */
static int64_t most_beside(const hcp__problem *p, int64_t time, int64_t tall) {
  int64_t stages = p->limits->pipeline.stages, launch = p->cost->launch, most = time;
  tall += launch;
  if (tall > time / stages) return 0;
  if ((6 * time - (5 * stages - 3) * tall) / 4 + 1 < most)
    most = (6 * time - (5 * stages - 3) * tall) / 4 + 1;
  if (3 * time - (3 * stages - 1) * tall < most) most = 3 * time - (3 * stages - 1) * tall;
  return most > launch ? most - launch : 0;
}

/* Rank-time of a sequence by the option that needs the least, -1: too long at any. */
typedef struct charge {
  int64_t shared; /* with the part that it keeps its ranks from using */
  int64_t alone;  /* with all that they leave unused, more than the least */
} charge;

static charge charge_of(const hcp__problem *p, const hcp__kind *kind, int64_t time, int64_t share) {
  charge least = {-1, -1};
  const hcp__choices *all = hcp__choices_of(p, kind);
  int64_t cheapest = all->options[0].area_floor;
  if (all->pruned) return (charge){cheapest, 0};
  for (int32_t i = 0; i < all->count; i++) {
    const hcp__option *option = &all->options[i];
    int64_t most = most_beside(p, time, option->time_floor), area = area_of(option);
    if (most < option->time_floor) continue;
    int64_t unused = most < share ? hcp__scaled(share - most, option->least_degree, 1) : 0;
    int64_t shared = most > 0 && most < share ? hcp__scaled(area, share, most) - 1 : area;
    if (least.shared < 0 || shared < least.shared) least.shared = shared;
    int64_t alone = hcp__sum(area - cheapest, unused);
    if (least.alone < 0 || alone < least.alone) least.alone = alone;
  }
  return least;
}

/* Whether no plan ends by time, on whose ranks share is the most work. What slow
 * ranks leave unused is less. */
static int long_refute(const hcp__problem *p, int64_t time, int64_t share) {
  int64_t area = 0, limit = hcp__rank_time(p->limits, share);
  for (int32_t k = 0; k < p->kind_count; k++) {
    charge one = charge_of(p, &p->kinds[k], time, share);
    if (one.shared < 0) return 1;
    if (p->limits->slowness == NULL && one.alone > limit - p->least) return 1;
    if (__builtin_mul_overflow(one.shared, p->kinds[k].count, &one.shared) ||
        __builtin_add_overflow(area, one.shared, &area))
      return 0;
  }
  return area > limit;
}

/* ---- the reach ---- */

/* Of count micro-batches growing from the front, and from the back, in ONE. */
static void fill_ends(int64_t stages, int64_t *front, int64_t *back) {
  front[0] = back[0] = 0;
  for (int32_t k = 0; k < COUNTS; k++) {
    int64_t grown = front[k] + (2 * front[k] + 3 * (int64_t)ONE) / (stages - 1) + 1;
    int64_t risen = back[k] + (back[k] + 3 * (int64_t)ONE) / (2 * (stages - 1)) + 1;
    front[k + 1] = grown < FAR ? grown : FAR;
    back[k + 1] = risen < FAR ? risen : FAR;
  }
}

/* Fronts rise with the cut and backs fall: *cut, which only grows with count, is
 * the first where the front is the larger. */
static int64_t reach_of(int32_t count, const int64_t *front, const int64_t *back, int32_t *cut) {
  while (*cut < count && front[*cut] < back[count - *cut]) ++*cut;
  int64_t reach = front[*cut] > back[count - *cut] ? front[*cut] : back[count - *cut];
  if (*cut > 0 && back[count - *cut + 1] < reach) reach = back[count - *cut + 1];
  return reach;
}

static void fill_reaches(int64_t stages, int64_t *reaches) {
  int64_t *front = &reaches[COUNTS + 1], *back = &front[COUNTS + 1];
  int32_t cut = 0;
  fill_ends(stages, front, back);
  for (int32_t count = 0; count <= COUNTS; count++)
    reaches[count] = reach_of(count, front, back, &cut);
}

/* The most work of a rank that ends by time: the largest over M of
 * time reach / (reach + 1) less M launches. */
static int64_t most_work(const hcp__problem *p, int64_t time, int32_t least_count,
                         const int64_t *reaches) {
  int64_t most = 0;
  for (int32_t count = least_count; count <= COUNTS; count++) {
    int64_t left = time - count * p->cost->launch;
    if (left <= most) return most;
    int64_t reach = reaches[count];
    if (reach < FAR) left = hcp__scaled(time, reach, reach + ONE) - count * p->cost->launch;
    if (left > most) most = left;
  }
  int64_t left = time - COUNTS * p->cost->launch;
  return left > most ? left : most;
}

static int refuted(const hcp__problem *p, int64_t time, const int64_t *reaches) {
  int64_t share = most_work(p, time, least_count(p), reaches);
  return share < 1 || long_refute(p, time, share);
}

/* The least time that is not refuted. */
static int64_t grown_bound(const hcp__problem *p, const int64_t *reaches) {
  int64_t low = p->bound - 1, high = p->bound;
  /* Guesses rise by at least 1, up to what pipeline_time.c can add up. */
  do {
    if (high > INT64_MAX / 16) return INT64_MAX / 2;
    if (!refuted(p, high, reaches)) break;
    low = high;
    high += high / 8 + 1;
  } while (1);
  while (high - low > 1 && high - low > low >> 12) {
    int64_t middle = low + (high - low) / 2;
    if (refuted(p, middle, reaches))
      low = middle;
    else
      high = middle;
  }
  return low + 1;
}

hcp_status hcp__pipeline_bound(hcp__problem *p, hcp_error *err) {
  const hcp_pipeline *pipeline = &p->limits->pipeline;
  if (pipeline->stages < 2) return HCP_OK;
  int64_t *reaches = malloc(3 * (size_t)(COUNTS + 1) * sizeof *reaches);
  if (reaches == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a bound");
  int64_t bound = ramp_bound(p);
  if (pipeline->virtual_stages < 2 && p->cost->launch < INT64_MAX / 8 / COUNTS) {
    if (p->limits->sync == HCP_SYNC_MICRO_BATCH && tall_bound(p) > bound) bound = tall_bound(p);
    if (bound > p->bound) p->bound = bound;
    fill_reaches(pipeline->stages, reaches);
    bound = grown_bound(p, reaches);
  }
  free(reaches);
  if (bound > p->bound) p->bound = bound;
  if (p->bound < INT64_MAX / 2) return HCP_OK;
  return hcp__fail(err, HCP_OVERFLOW, "the cost of all micro-batches exceeds 63 bits");
}
