/* bound_pipeline.c - times that no pipeline can beat.
 *
 * What bounds one stage bounds the last one, which begins after a forward of
 * some micro-batch through all others, and after whose end a backward follows:
 * the ramp. Small micro-batches make a short ramp, but must grow slowly. On one
 * rank, let t_1 .. t_M be the times of the micro-batches that it computes, T
 * their sum, p the stages, v the chunks of each, a third of each time forward. A
 * pass takes a v-th. For m <= n, work
 *
 *   on the first stage, all before m's forward over its first chunk, and that,
 *   that forward on the others but the last,
 *   on the last stage, all from that forward to n's backward over its first chunk,
 *   that backward on the others,
 *   on the first stage, it and all after it
 *
 * follows each other, and takes T + front(m) + back(n) with
 *
 *   front(m) = (p - 1) / 3 v t_m - the backward passes that the last stage runs before
 *              that forward, and the first one does not,
 *   back(n)  = 2 (p - 1) / 3 v t_n - the forward passes that the last stage runs after
 *              that backward, and the first one does not.
 *
 * By the lists of pipeline_time.c such passes are 2 (p - 1) at most, of p - 1 where v
 * is 1, in a row. A micro-batch is among them twice at most, as it comes again after as
 * many passes as are in a group, which is p at least. They are of other groups where v is
 * more than 1: there is none in front of the first group, and none behind the last.
 *
 * So for any cut k, with a the largest front of m <= k and b the largest back of
 * n > k, T + a + b is a bound. Those fronts limit how fast times grow: a t_m is at most
 * 3 v a / (p - 1), and a 2 / (p - 1)-th of the p - 1 before it, twice that where v is more
 * than 1. Those backs limit the others to half of that. With reach(M) the larger of both
 * sums, of M micro-batches at the cut where that is least, a + b is at least T / reach(M);
 * and some rank has at least its share of all work, so that T is that and M launches. The M
 * that gives the least is a bound.
 *
 * One of them that takes t, with P before it and S after it, makes that, with q for
 * (p - 1) / v,
 *
 *   T + max(0, q / 3 t - 2 / 3 P) + max(0, 2 q / 3 t - 1 / 3 S),
 *
 * least where P has what it can use, q / 2 t: the larger of T,
 * (4 T + (5 q + 2) t) / 6 and (T + (3 q + 2) t) / 3. So a rank that ends by X computes
 * at most u(t) beside a sequence of time t. With U the most that any rank computes,
 * by its reach, it leaves U - u(t) of the longest it has undone, and at least
 * t' (U / u(t') - 1) for each of its sequences, since those sum to u(t) at most.
 * X is refuted when no choice of degrees has sum of d t U / u(t) within N U, or when
 * what one sequence leaves undone does not fit beside all work.
 *
 * Where ranks run in lockstep, all of them are busy for the same T and wait for the
 * slowest sequence: either that is slow, or many are wide and T is larger. All have the
 * same micro-batches then, whole groups of them where v is more than 1; only where the
 * sequences are no whole groups may the last one have fewer, and empty ones after it. */
#include <stdlib.h>

#include "plan.h"

/* Micro-batches of one rank that are looked at, and the unit of a reach. */
enum { COUNTS = 2048, ONE = 1 << 20 };
#define FAR ((int64_t)1 << 60) /* a reach that is as good as endless */

static int is_lockstep(const hcp__problem *p) { return p->limits->sync == HCP_SYNC_MICRO_BATCH; }

/* Chunks of a stage. */
static int64_t chunks_of(const hcp__problem *p) {
  int32_t chunks = p->limits->pipeline.virtual_stages;
  return chunks > 1 ? chunks : 1;
}

/* Whether a rank that has work may have it in so many micro-batches. Where they are whole groups,
 * empty ones only follow as many as there are sequences, rounded up. */
static int may_have(const hcp__problem *p, int64_t count) {
  int64_t group = hcp__multiple(&p->limits->pipeline);
  if (count > p->n) return 0;
  return !is_lockstep(p) || count % group == 0 || p->n % group != 0;
}

/* Micro-batches of some rank with its share of all work: where ranks run in
 * lockstep, as many as hold all rows. */
static int32_t least_count(const hcp__problem *p) {
  int32_t count = is_lockstep(p) ? hcp__least_count(p) : 1;
  while (count < COUNTS && count < p->n && !may_have(p, count)) count++;
  return count < COUNTS ? count : COUNTS;
}

/* The most micro-batches of one rank that are looked at. */
static int32_t most_count(const hcp__problem *p) { return p->n < COUNTS ? p->n : COUNTS; }

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
  int64_t stages = p->limits->pipeline.stages, chunks = chunks_of(p);
  if (whole > INT64_MAX / 64 || tall > INT64_MAX / 64 / stages) return INT64_MAX / 2;
  int64_t short_after = (4 * whole + (5 * (stages - 1) * tall) / chunks + 2 * tall) / 6;
  int64_t short_before = (whole + (3 * (stages - 1) * tall) / chunks + 2 * tall) / 3;
  return hcp__most(whole, hcp__most(short_after, short_before));
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
  int64_t stages = p->limits->pipeline.stages, launch = p->cost->launch, chunks = chunks_of(p);
  tall += launch;
  if (tall > time / stages) return 0;
  int64_t short_after = (6 * time - (5 * (stages - 1) * tall) / chunks - 2 * tall) / 4 + 1;
  int64_t short_before = 3 * time - (3 * (stages - 1) * tall) / chunks - 2 * tall;
  int64_t most = hcp__least(time, hcp__least(short_after, short_before));
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

/* The sums of the first micro-batches from one end, in ONE, as long as they may be: the first
 * `alone` have none of the passes before them that let times grow. weight: 2 at the front, 1 at the
 * back. */
static void fill_end(const hcp__problem *p, int32_t alone, int64_t weight, int64_t *sums) {
  int64_t window = p->limits->pipeline.stages - 1, chunks = chunks_of(p), twice = 1 + (chunks > 1);
  int64_t parts = window * (3 - weight);
  int32_t count = most_count(p);
  sums[0] = 0;
  for (int32_t k = 0; k < count; k++) {
    int64_t from = k > window ? sums[k - window] : 0; /* where those before it begin */
    int64_t near = k < alone ? 0 : sums[k] - from;
    int64_t sum = sums[k] + (3 * chunks * ONE + twice * weight * near) / parts + 1;
    sums[k + 1] = sum < FAR ? sum : FAR;
  }
}

/* The most that count micro-batches take together when a + b is ONE: those before first are limited
 * by a, those after the next `width` by b, and these by both. The most of three: a alone, b alone,
 * and where the limits of those in the middle meet. */
static int64_t shared_reach(int32_t count, int32_t first, int32_t width, const int64_t *front,
                            const int64_t *back) {
  int32_t end = first + width, after = count - end;
  if (first < 0 || after < 0 || front[end] >= FAR || back[count - first] >= FAR) return FAR;
  int64_t by_front = front[end] - front[end - 1];
  int64_t by_back = back[count - first] - back[count - first - 1], both = by_front + by_back;
  int64_t middle = hcp__scaled(front[first], by_back, both);
  middle = hcp__sum(middle, hcp__scaled(back[after], by_front, both));
  middle = hcp__sum(middle, hcp__scaled(width, hcp__scaled(by_front, by_back, both), 1));
  return hcp__most(middle, hcp__most(front[first], back[after]));
}

/* Fronts rise with the cut and backs fall: *cut, which only grows with count, is
 * the first where the front is the larger. */
static int64_t reach_of(int32_t count, int32_t width, const int64_t *front, const int64_t *back,
                        int32_t *cut) {
  while (*cut < count && front[*cut] < back[count - *cut]) ++*cut;
  int64_t reach = hcp__most(front[*cut], back[count - *cut]);
  if (*cut > 0) reach = hcp__least(reach, back[count - *cut + 1]);
  for (int32_t k = *cut / width - 1; k <= *cut / width; k++)
    reach = hcp__least(reach, shared_reach(count, k * width, width, front, back));
  return reach;
}

/* Of counts of which so many at the front, and at the back, are the only ones of their group. */
static void fill_reaches(const hcp__problem *p, int32_t front_alone, int32_t back_alone,
                         int64_t *reaches) {
  int64_t *front = &reaches[COUNTS + 1], *back = &front[COUNTS + 1];
  int32_t cut = 0, most = most_count(p);
  fill_end(p, front_alone, 2, front);
  fill_end(p, back_alone, 1, back);
  for (int32_t count = 0; count <= most; count++)
    reaches[count] = reach_of(count, back_alone, front, back, &cut);
}

/* The most work of a rank that ends by time: the largest over M of
 * time reach / (reach + 1) less M launches. */
static int64_t most_work(const hcp__problem *p, int64_t time, int32_t least_count,
                         const int64_t *reaches) {
  int64_t most = 0;
  for (int32_t count = least_count, last = most_count(p); count <= last; count++) {
    int64_t left = time - count * p->cost->launch;
    if (left <= most) return most;
    if (!may_have(p, count)) continue;
    int64_t reach = reaches[count];
    if (reach < FAR) left = hcp__scaled(time, reach, reach + ONE) - count * p->cost->launch;
    if (left > most) most = left;
  }
  int64_t left = time - COUNTS * p->cost->launch;
  return left > most && p->n > COUNTS ? left : most;
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

/* Reaches of every count: those of whole groups in lockstep are shorter. */
static void fill_all_reaches(const hcp__problem *p, int64_t *reaches) {
  int32_t group = hcp__multiple(&p->limits->pipeline);
  fill_reaches(p, is_lockstep(p) ? group : 1, 1, reaches);
  if (group < 2 || !is_lockstep(p)) return;
  int64_t *whole = &reaches[3 * ((size_t)COUNTS + 1)];
  fill_reaches(p, group, group, whole);
  for (int64_t count = 0; count <= most_count(p); count += group) reaches[count] = whole[count];
}

hcp_status hcp__pipeline_bound(hcp__problem *p, hcp_error *err) {
  if (p->limits->pipeline.stages < 2) return HCP_OK;
  int64_t *reaches = malloc(6 * (size_t)(COUNTS + 1) * sizeof *reaches);
  if (reaches == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a bound");
  int64_t bound = ramp_bound(p);
  if (p->cost->launch < INT64_MAX / 8 / COUNTS) {
    if (is_lockstep(p)) bound = hcp__most(bound, tall_bound(p));
    p->bound = hcp__most(p->bound, bound);
    fill_all_reaches(p, reaches);
    bound = grown_bound(p, reaches);
  }
  free(reaches);
  p->bound = hcp__most(p->bound, bound);
  if (p->bound < INT64_MAX / 2) return HCP_OK;
  return hcp__fail(err, HCP_OVERFLOW, "the cost of all micro-batches exceeds 63 bits");
}
