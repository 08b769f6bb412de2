/* pipeline_search.c - plans whose micro-batches grow from both ends of the step.
 *
 * A pipeline is full only between its ramps. Small micro-batches at both ends
 * make them short, many of them cost launches, and each may only be a little
 * larger than those before it, or stages wait for it (bound_pipeline.c). So
 * shapes, that is counts of micro-batches and ramps, are first simulated as if
 * work could be cut at will; waves of the most promising ones are then planned.
 * So are some without shapes: that of one stage, and those of stricter requests. The best
 * plans of several counts are the finalists: small steps improve them and their orders
 * (waves_polish.c), and the best of them once more. Ranks that do not wait for each other have two
 * more candidates: the plan of one stage by small steps of its own, and that of ranks that wait. */
#include <stdlib.h>

#include "plan.h"

enum {
  ONE = 1024,         /* of a full height */
  RAMPS = 5,          /* first heights that are tried at either end */
  SHAPES = 6, /* that are planned, times effort */
  COUNTS_APART = 8,
  SHAPES_MAX = 48,
  COUNT_MAX = 96,     /* micro-batches */
  RAISES = 10,        /* of a height until it holds all */
  HALVINGS = 5,       /* of the interval of heights */
  VISITS = 1 << 12,      /* of simulation, to order a candidate, */
  VISITS_NEAR = 1 << 19, /* a finalist, times effort, */
  VISITS_MAX = 1 << 22,  /* and the best of them, times effort */
  LARGE = 1 << 13,     /* sequences times ranks from which no stricter request is tried */
  HOPELESS = 4, /* the part of the best, as a shift, beyond which no finalist is improved */
  FINALIST_SHARE = 6, /* of the usual looks, as a divisor, for each finalist, */
  BEST_SHARE = 2, /* and for the best of them, */
  FEW = 16, /* which of so few sequences */
  ROUNDS = 4, /* begins anew so often */
  FINALISTS = 4 /* plans of different counts that are improved */
};

static const int32_t ramps[RAMPS] = {ONE, ONE / 2, ONE / 3, ONE / 5, ONE / 8};

/* Micro-batches by height: one at each end, and as much more further on as does
 * not make a stage wait. */
typedef struct shape {
  int32_t count, front, back; /* heights of the first and the last */
  int64_t predicted;
} shape;

typedef struct search {
  const hcp__problem *p;
  int32_t effort;
  hcp__blocks blocks;
  hcp__waves *waves; /* NULL: too many ranks for them */
  hcp__draft found, rounded, ordered; /* a candidate, on its way */
  hcp__draft finalists[FINALISTS];
  int64_t makespans[FINALISTS]; /* INT64_MAX: there is none */
  int64_t *heights; /* COUNT_MAX */
  int64_t longest; /* the fastest that the slowest sequence can be */
} search;

/* ---- shapes ---- */

/* What each place may have of a full height; returns their sum. */
static int64_t profile(const hcp__problem *p, const shape *x, int64_t *heights) {
  int64_t ahead = p->limits->pipeline.stages - 1, sum = 0;
  for (int32_t m = 0; m < x->count; m++) {
    int64_t height = x->front + 2 * sum / ahead;
    heights[m] = height < ONE ? height : ONE;
    sum += heights[m];
  }
  sum = 0;
  for (int32_t m = x->count - 1; m >= 0; m--) {
    int64_t height = x->back + sum / (2 * ahead);
    if (height < heights[m]) heights[m] = height;
    sum += heights[m];
  }
  return sum;
}

/* Heights of the shape with so much for a full one; the tallest holds any sequence. */
static void scale(const search *s, const shape *x, int64_t height) {
  int32_t tallest = 0;
  profile(s->p, x, s->heights);
  for (int32_t m = 0; m < x->count; m++) {
    if (s->heights[m] > s->heights[tallest]) tallest = m;
    s->heights[m] = hcp__scaled(height, s->heights[m], ONE);
  }
  if (s->heights[tallest] < s->longest) s->heights[tallest] = s->longest;
}

/* A full height by which the shape holds as much work as there is. */
static int64_t full_height(const search *s, const shape *x) {
  int64_t share = s->p->least / s->p->limits->ranks, sum = profile(s->p, x, s->heights);
  int64_t height = hcp__scaled(share, ONE, sum);
  if (height >= s->longest || sum <= ONE) return height;
  return hcp__scaled(share > s->longest ? share - s->longest : 0, ONE, sum - ONE);
}

static hcp_status predict(search *s, shape *x, hcp_error *err) {
  scale(s, x, full_height(s, x));
  for (int32_t m = 0; m < x->count; m++) s->heights[m] = hcp__launched(s->p->cost, s->heights[m]);
  return hcp_pipeline_time(&s->p->limits->pipeline, s->heights, x->count, &x->predicted, err);
}

/* The ramps that promise most for a count. */
static hcp_status best_ramps(search *s, int32_t count, shape *best, hcp_error *err) {
  best->predicted = INT64_MAX;
  for (int32_t i = 0; i < RAMPS * RAMPS; i++) {
    shape x = {.count = count, .front = ramps[i / RAMPS], .back = ramps[i % RAMPS]};
    hcp_status status = hcp__go_on(s->p, err);
    if (status == HCP_OK) status = predict(s, &x, err);
    if (status != HCP_OK) return status;
    if (x.predicted < best->predicted) *best = x;
  }
  return HCP_OK;
}

/* Keeps the shapes that promise most, best first. */
static void insert(shape *shapes, int32_t *count, int32_t most, shape x) {
  int32_t i = *count < most ? (*count)++ : most;
  if (i == most && shapes[most - 1].predicted <= x.predicted) return;
  if (i == most) i--;
  for (; i > 0 && shapes[i - 1].predicted > x.predicted; i--) shapes[i] = shapes[i - 1];
  shapes[i] = x;
}

/* Counts grow by an eighth at most: one shape for each. */
static hcp_status choose_shapes(search *s, shape *shapes, int32_t most, int32_t *count,
                                hcp_error *err) {
  int32_t multiple = hcp__multiple(&s->p->limits->pipeline), first = hcp__least_count(s->p);
  int32_t last = s->p->n < COUNT_MAX ? s->p->n : COUNT_MAX;
  *count = 0;
  for (int32_t n = (first + multiple - 1) / multiple * multiple; n <= last;
       n += (n / COUNTS_APART / multiple + 1) * multiple) {
    shape best = {0};
    hcp_status status = best_ramps(s, n, &best, err);
    if (status != HCP_OK) return status;
    insert(shapes, count, most, best);
  }
  return HCP_OK;
}

/* ---- plans ---- */

static void swap(hcp__draft *x, hcp__draft *y) {
  hcp__draft kept = *x;
  *x = *y;
  *y = kept;
}

/* Where a plan of so many micro-batches would stand: in place of one of as many, or of the worst.
 */
static int32_t place_of(const search *s, int32_t count) {
  int32_t worst = 0;
  for (int32_t i = 0; i < FINALISTS; i++) {
    if (s->makespans[i] < INT64_MAX && s->finalists[i].micro_batch_count == count) return i;
    if (s->makespans[i] > s->makespans[worst]) worst = i;
  }
  return worst;
}

/* Orders s->found, rounded up, and makes it a finalist if it is better than the one in its place.
 */
static hcp_status keep(search *s, int64_t budget, hcp_error *err) {
  int64_t makespan = 0;
  hcp_status status = hcp__draft_round_up(&s->found, s->p, &s->rounded, err);
  if (status == HCP_OK)
    status = hcp__draft_order(&s->rounded, s->p, budget, &s->ordered, &makespan, err);
  if (status != HCP_OK) return status;
  int32_t i = place_of(s, s->ordered.micro_batch_count);
  if (makespan >= s->makespans[i]) return HCP_OK;
  s->makespans[i] = makespan;
  swap(&s->ordered, &s->finalists[i]);
  return HCP_OK;
}

static int descending(const void *left, const void *right) {
  const int64_t *a = left, *b = right;
  return (*a < *b) - (*a > *b);
}

/* Waves of the shape, with full ones of that height. */
static hcp_status try_height(search *s, const shape *x, int64_t height, int32_t *fits,
                             hcp_error *err) {
  scale(s, x, height);
  qsort(s->heights, (size_t)x->count, sizeof *s->heights, descending);
  *fits = hcp__waves_fill(s->waves, x->count, s->heights, &s->blocks);
  hcp_status status = *fits ? hcp__place_waves(s->p, &s->blocks, fits, err) : HCP_OK;
  if (status != HCP_OK || !*fits) return status;
  status = hcp__draft_by_micro_batch(&s->found, &s->blocks, err);
  return status == HCP_OK ? keep(s, VISITS, err) : status;
}

/* The least height that holds all, about. */
static hcp_status try_shape(search *s, const shape *x, hcp_error *err) {
  int64_t low = full_height(s, x);
  int64_t high = hcp__sum(low, low / 16 + 1);
  int32_t fits = 0;
  hcp_status status = HCP_OK;
  for (int32_t i = 0; i < RAISES && !fits && status == HCP_OK; i++) {
    status = try_height(s, x, high, &fits, err);
    if (!fits) low = high, high = hcp__sum(high, high / 8 + 1);
  }
  for (int32_t i = 0; i < HALVINGS && fits && status == HCP_OK && high - low > low >> 8; i++) {
    int64_t middle = low + (high - low) / 2;
    int32_t held;
    status = try_height(s, x, middle, &held, err);
    if (held)
      high = middle;
    else
      low = middle;
  }
  return status;
}

static hcp_status try_shapes(search *s, hcp_error *err) {
  shape shapes[SHAPES_MAX];
  int32_t count, most = s->effort < SHAPES_MAX / SHAPES ? SHAPES * s->effort : SHAPES_MAX;
  hcp_status status = choose_shapes(s, shapes, most, &count, err);
  for (int32_t i = 0; i < count && status == HCP_OK; i++) status = try_shape(s, &shapes[i], err);
  return status;
}

/* A plan of one stage of a stricter request, in a few attempts. */
static hcp_status try_stricter(search *s, const hcp_limits *limits, hcp_error *err) {
  hcp__problem strict;
  int32_t exists;
  hcp_status status = hcp__stricter(s->p, limits, &strict, &exists, err);
  if (status != HCP_OK || !exists) return status;
  strict.bound = s->p->bound; /* no plan of a stricter request beats it, either */
  status = hcp__plan_search(&strict, s->effort, 1, &s->found, err);
  if (status == HCP_OK) status = keep(s, VISITS, err);
  hcp__problem_release(&strict);
  return status;
}

/* A request with less freedom: what is denied. */
typedef struct denial {
  int32_t pow2, least, waiting;
} denial;

static int deny(const hcp_limits *limits, const denial *x, hcp_limits *strict) {
  int32_t node = limits->ranks_per_node;
  *strict = *limits;
  if (x->pow2 && (limits->pow2 || (node & (node - 1)) != 0)) return 0;
  if (x->waiting && limits->sync == HCP_SYNC_MICRO_BATCH) return 0;
  if (x->pow2) strict->pow2 = 1;
  if (x->waiting) strict->sync = HCP_SYNC_MICRO_BATCH;
  if (x->least > limits->min_degree) strict->min_degree = x->least;
  return strict->min_degree <= limits->max_degree;
}

/* Those with fewer degrees, and under step those of ranks that wait. */
static hcp_status try_all_stricter(search *s, hcp_error *err) {
  static const denial denials[] = {{1, 1, 0}, {1, 2, 0}, {0, 2, 0}, {0, 3, 0}, {0, 1, 1}};
  const hcp_limits *limits = s->p->limits;
  hcp_limits strict;
  hcp_status status = HCP_OK;
  if ((int64_t)s->p->n * limits->ranks > LARGE || limits->min_degree == limits->max_degree)
    return HCP_OK;
  for (size_t i = 0; i < sizeof denials / sizeof *denials && status == HCP_OK; i++)
    if (deny(limits, &denials[i], &strict)) status = try_stricter(s, &strict, err);
  return status;
}

/* Orders a plan, and makes it the finalist i if it is better. */
static hcp_status order(search *s, const hcp__draft *from, int32_t i, int64_t budget,
                        hcp_error *err) {
  int64_t makespan;
  hcp_status status = hcp__draft_order(from, s->p, budget * s->effort, &s->ordered, &makespan, err);
  if (status != HCP_OK || makespan >= s->makespans[i]) return status;
  s->makespans[i] = makespan;
  swap(&s->ordered, &s->finalists[i]);
  return HCP_OK;
}

/* Improves a finalist by small steps, in round 0 by those that make it no worse on the way. */
static hcp_status polish(search *s, int32_t i, int32_t share, int32_t round, hcp_error *err) {
  int32_t placed = 0;
  hcp_status status = hcp__polish_blocks(s->p, &s->finalists[i], s->makespans[i], s->effort + round,
                                         share, round, &s->blocks, err);
  if (status == HCP_OK && s->blocks.count > 0)
    status = hcp__place_waves(s->p, &s->blocks, &placed, err);
  if (status != HCP_OK || !placed) return status;
  status = hcp__draft_by_micro_batch(&s->found, &s->blocks, err);
  if (status == HCP_OK) status = hcp__draft_round_up(&s->found, s->p, &s->rounded, err);
  return status == HCP_OK ? order(s, &s->rounded, i, VISITS_NEAR, err) : status;
}

static int32_t best_of(const search *s) {
  int32_t least = 0;
  for (int32_t i = 1; i < FINALISTS; i++)
    if (s->makespans[i] < s->makespans[least]) least = i;
  return least;
}

/* Improves the finalists; *best is the one that becomes the best, *makespan its time. */
static hcp_status improve_finalists(search *s, hcp__draft *best, int64_t *makespan,
                                    hcp_error *err) {
  int32_t least = best_of(s);
  int64_t most = s->makespans[least] + (s->makespans[least] >> HOPELESS);
  hcp_status status = HCP_OK;
  for (int32_t i = 0; i < FINALISTS && status == HCP_OK; i++) {
    if (s->makespans[i] > most) continue;
    status = order(s, &s->finalists[i], i, VISITS_NEAR, err);
    if (status == HCP_OK) status = polish(s, i, FINALIST_SHARE, 0, err);
  }
  least = best_of(s);
  int32_t rounds = s->p->n <= FEW ? ROUNDS : 1;
  for (int32_t i = 1; i <= rounds && status == HCP_OK; i++)
    status = polish(s, least, BEST_SHARE, i, err);
  if (status == HCP_OK) status = order(s, &s->finalists[least], least, VISITS_MAX, err);
  *makespan = s->makespans[least];
  swap(&s->finalists[least], best);
  return status;
}

/* The best plan of one stage, whose small steps know that ranks do not wait: the only finalist. */
static hcp_status begin_with(search *s, hcp__problem *one, hcp_error *err) {
  for (int32_t i = 0; i < FINALISTS; i++) s->makespans[i] = INT64_MAX;
  hcp_status status = hcp__bound(one, err);
  if (status == HCP_OK) status = hcp__plan_best(one, 1, &s->found, err);
  return status == HCP_OK ? keep(s, VISITS, err) : status;
}

/* In as many groups as there are micro-batches at least, so that each may have some ranks alone. */
static hcp_status try_one_stage(search *s, hcp__draft *best, int64_t *makespan, hcp_error *err) {
  hcp_limits limits = *s->p->limits;
  int32_t alone = limits.ranks - hcp__multiple(&limits.pipeline) + 1, exists;
  hcp__problem one;
  hcp_error failed = {0};
  if ((int64_t)s->p->n * limits.ranks > LARGE || limits.sync == HCP_SYNC_MICRO_BATCH ||
      limits.min_degree == limits.max_degree)
    return HCP_OK;
  if (limits.max_degree > alone && alone >= limits.min_degree) limits.max_degree = alone;
  limits.pipeline = (hcp_pipeline){0};
  hcp_status status = hcp__stricter(s->p, &limits, &one, &exists, err);
  if (status != HCP_OK || !exists) return status;
  status = begin_with(s, &one, &failed);
  hcp__problem_release(&one);
  if (status != HCP_OK) return hcp__none_of_another(status, &failed, err);
  int32_t i = best_of(s);
  if (s->makespans[i] - *makespan > *makespan >> HOPELESS) return HCP_OK;
  status = order(s, &s->finalists[i], i, VISITS_NEAR, err);
  if (status == HCP_OK) status = polish(s, i, FINALIST_SHARE, 1, err);
  if (status != HCP_OK || s->makespans[i] >= *makespan) return status;
  *makespan = s->makespans[i];
  swap(&s->finalists[i], best);
  return HCP_OK;
}

static int64_t longest_of(const hcp__problem *p) {
  int64_t longest = 0;
  for (int32_t k = 0; k < p->kind_count; k++) {
    const hcp__kind *kind = &p->kinds[k];
    const hcp__choices *all = hcp__choices_of(p, kind);
    int64_t time = all->options[all->count - 1].time;
    if (time > longest && !all->pruned) longest = time;
  }
  return longest;
}

static hcp_status try_all(search *s, hcp__draft *best, int64_t *makespan, hcp_error *err) {
  s->longest = longest_of(s->p);
  hcp_status status = keep(s, VISITS, err); /* what the search found */
  if (status == HCP_OK) status = try_all_stricter(s, err);
  if (status == HCP_OK && s->waves != NULL) status = try_shapes(s, err);
  if (status == HCP_OK) status = improve_finalists(s, best, makespan, err);
  return status == HCP_OK ? try_one_stage(s, best, makespan, err) : status;
}

static hcp_status search_init(search *s, hcp_error *err) {
  hcp_status status = hcp__blocks_init(&s->blocks, s->p->n, err);
  if (status == HCP_OK) status = hcp__draft_init_for(&s->rounded, s->p, err);
  if (status == HCP_OK) status = hcp__draft_init_for(&s->ordered, s->p, err);
  for (int32_t i = 0; i < FINALISTS; i++) {
    s->makespans[i] = INT64_MAX;
    if (status == HCP_OK) status = hcp__draft_init_for(&s->finalists[i], s->p, err);
  }
  /* Ranks beyond this have more waves than are worth their scratch. */
  if (status == HCP_OK && (int64_t)s->p->limits->ranks * COUNT_MAX <= 1 << 24)
    status = hcp__waves_create(s->p, COUNT_MAX, &s->waves, err);
  s->heights = malloc((COUNT_MAX + 1) * sizeof *s->heights);
  if (status == HCP_OK && s->heights == NULL)
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d heights", COUNT_MAX);
  return status;
}

static void search_release(search *s) {
  free(s->heights);
  hcp__waves_destroy(s->waves);
  for (int32_t i = 0; i < FINALISTS; i++) hcp__draft_release(&s->finalists[i]);
  hcp__draft_release(&s->ordered);
  hcp__draft_release(&s->rounded);
  hcp__draft_release(&s->found);
  hcp__blocks_release(&s->blocks);
}

/* *draft has the plan that the search found without them. */
static hcp_status plan_once(const hcp__problem *p, int32_t effort, hcp__draft *draft,
                            int64_t *makespan, hcp_error *err) {
  search s = {.p = p, .effort = effort, .found = *draft};
  *draft = (hcp__draft){0}; /* becomes the best */
  hcp_status status = hcp__draft_init_for(draft, p, err);
  if (status == HCP_OK) status = search_init(&s, err);
  if (status == HCP_OK) status = try_all(&s, draft, makespan, err);
  search_release(&s);
  return status;
}

static hcp_status plan_at(const hcp__problem *p, int32_t effort, hcp__draft *draft,
                          int64_t *makespan, hcp_error *err);

/* The plan of the waiting problem, ordered by the clock of p: the better of it and *best. */
static hcp_status keep_waiting(const hcp__problem *p, hcp__problem *waiting, int32_t effort,
                               hcp__draft *best, int64_t *makespan, hcp_error *err) {
  hcp__draft found, ordered = {0};
  int64_t time;
  hcp_status status = hcp__draft_init(&found, p->n, err);
  if (status == HCP_OK) status = hcp__draft_init_for(&ordered, p, err);
  if (status == HCP_OK) status = hcp__bound(waiting, err);
  if (status == HCP_OK) status = plan_at(waiting, effort, &found, &time, err);
  if (status == HCP_OK)
    status = hcp__draft_order(&found, p, (int64_t)VISITS_NEAR * effort, &ordered, &time, err);
  if (status == HCP_OK && time < *makespan) {
    *makespan = time;
    swap(&ordered, best);
  }
  hcp__draft_release(&ordered);
  hcp__draft_release(&found);
  return status;
}

/* What the request would get if its ranks waited: no plan of ranks that do not is slower. */
static hcp_status try_waiting(const hcp__problem *p, int32_t effort, hcp__draft *best,
                              int64_t *makespan, hcp_error *err) {
  hcp_limits limits = *p->limits;
  hcp__problem waiting;
  hcp_error failed = {0};
  int32_t exists;
  if (limits.sync == HCP_SYNC_MICRO_BATCH || (int64_t)p->n * limits.ranks > LARGE) return HCP_OK;
  limits.sync = HCP_SYNC_MICRO_BATCH;
  hcp_status status = hcp__stricter(p, &limits, &waiting, &exists, err);
  if (status != HCP_OK || !exists) return status;
  status = keep_waiting(p, &waiting, effort, best, makespan, &failed);
  hcp__problem_release(&waiting);
  return hcp__none_of_another(status, &failed, err);
}

static hcp_status plan_at(const hcp__problem *p, int32_t effort, hcp__draft *draft,
                          int64_t *makespan, hcp_error *err) {
  hcp_status status = hcp__plan_search(p, effort, 0, draft, err);
  if (status == HCP_OK) status = plan_once(p, effort, draft, makespan, err);
  return status == HCP_OK ? try_waiting(p, effort, draft, makespan, err) : status;
}

/* Doubled, so that more effort tries what less does. */
hcp_status hcp__plan_pipeline(const hcp__problem *p, int32_t effort, hcp__draft *best,
                              hcp_error *err) {
  int64_t least = INT64_MAX, makespan = 0;
  hcp_status status = HCP_OK;
  for (int32_t e = 1; e <= effort && p->n > 0 && status == HCP_OK; e *= 2) {
    hcp__draft draft;
    status = hcp__draft_init(&draft, p->n, err);
    if (status == HCP_OK) status = plan_at(p, e, &draft, &makespan, err);
    if (status == HCP_OK && makespan < least) {
      least = makespan;
      swap(&draft, best);
    }
    hcp__draft_release(&draft);
  }
  return status;
}
