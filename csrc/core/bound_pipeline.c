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
 * Where ranks run in lockstep, all this holds for the micro-batch of the longest
 * sequence, too, and T is what bounds one stage. With t its time and P the sum of
 * those before it, T + front + back falls with P, and T + back, which counts a
 * front of any other, rises: both meet at P = (p - 1) / 2 t.
 *
 * This is for stages of one chunk; interleaved, only the ramp counts. */
#include <stdlib.h>

#include "internal.h"

/* Micro-batches of one rank that are looked at, and the unit of a reach. */
enum { COUNTS = 2048, ONE = 1 << 20 };
#define FAR ((int64_t)1 << 60) /* a reach that is as good as endless */

static int64_t fastest(const hcp__problem *p, const hcp__kind *kind) {
  int64_t time = kind->pruned ? 1 : INT64_MAX;
  for (int32_t i = 0; i < kind->options; i++)
    if (p->options[kind->first_option + i].time_floor < time)
      time = p->options[kind->first_option + i].time_floor;
  return time;
}

/* ---- the ramp ---- */

static int64_t ramp_bound(const hcp__problem *p) {
  const hcp_pipeline *pipeline = &p->limits->pipeline;
  int64_t least = INT64_MAX, most = 0, chunks = pipeline->virtual_stages, bound;
  for (int32_t k = 0; k < p->kind_count; k++) {
    int64_t time = fastest(p, &p->kinds[k]);
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

/* T + (p - 1) t - 2 / 3 P - 1 / 3 (T - t - P), at that P or the most there is. */
static int64_t tall_bound(const hcp__problem *p) {
  int64_t ahead = p->limits->pipeline.stages - 1, tall = 0, whole = p->bound;
  for (int32_t k = 0; k < p->kind_count; k++) {
    int64_t time = fastest(p, &p->kinds[k]) + p->cost->launch;
    if (time > tall) tall = time;
  }
  if (whole > INT64_MAX / 8 || tall > INT64_MAX / 8 / (ahead + 1)) return INT64_MAX / 2;
  int64_t others = whole - tall, before = (ahead * tall + 1) / 2;
  if (before > others) before = others;
  return whole + ahead * tall - (others + before + 2) / 3;
}

/* ---- the reach ---- */

/* Of count micro-batches growing from the front, and from the back, in ONE. */
static void fill_reaches(int64_t stages, int64_t *front, int64_t *back) {
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

/* The least over M of (share + M launch) (1 + 1 / reach). */
static int64_t least_grown(int64_t share, int64_t launch, int32_t least_count, const int64_t *front,
                           const int64_t *back) {
  int64_t best = INT64_MAX / 2;
  int32_t cut = 0, count = least_count;
  for (; count <= COUNTS; count++) {
    int64_t whole = share + count * launch;
    if (whole >= best) return best;
    int64_t reach = reach_of(count, front, back, &cut);
    int64_t time = whole + (reach < FAR ? hcp__scaled(whole, ONE, reach) - 1 : 0);
    if (time < best) best = time;
  }
  return share + count * launch < best ? share + count * launch : best;
}

/* Micro-batches of some rank with its share of all work: where ranks run in
 * lockstep, as many as hold all rows. */
static int32_t least_count(const hcp__problem *p) {
  int64_t rows = p->capacity * p->limits->ranks, count = p->tokens / rows + (p->tokens % rows != 0);
  if (p->limits->sync == HCP_SYNC_STEP) return 1;
  return count < COUNTS ? (int32_t)count : COUNTS;
}

/* What the fastest rank computes when all share the work. */
static int64_t share_of(const hcp__problem *p) {
  int64_t low = 0, high = p->least;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (hcp__rank_time(p->limits, middle) < p->least)
      low = middle + 1;
    else
      high = middle;
  }
  return low > 0 ? low - 1 : 0; /* shares of work are rounded down */
}

hcp_status hcp__pipeline_bound(hcp__problem *p, hcp_error *err) {
  const hcp_pipeline *pipeline = &p->limits->pipeline;
  if (pipeline->stages < 2) return HCP_OK;
  int64_t *front = malloc(2 * (size_t)(COUNTS + 2) * sizeof *front);
  if (front == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a bound");
  int64_t *back = front + COUNTS + 2;
  int64_t bound = ramp_bound(p), grown = 0;
  if (pipeline->virtual_stages < 2 && p->cost->launch < INT64_MAX / 8 / COUNTS) {
    fill_reaches(pipeline->stages, front, back);
    grown = least_grown(share_of(p), p->cost->launch, least_count(p), front, back);
    if (p->limits->sync == HCP_SYNC_MICRO_BATCH && tall_bound(p) > grown) grown = tall_bound(p);
  }
  free(front);
  p->bound = grown > bound ? grown : bound;
  if (p->bound < INT64_MAX / 2) return HCP_OK;
  return hcp__fail(err, HCP_OVERFLOW, "the cost of all micro-batches exceeds 63 bits");
}
