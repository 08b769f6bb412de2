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
 * more candidates: the plan of one stage by small steps of its own, and that of ranks that wait.
 * At last come plans of one degree, as far as their bounds promise more than the best has. */
#include <stdlib.h>

#include "plan.h"

enum {
  SHAPES = 6,         /* that are planned, times effort */
  SHAPES_MAX = 48,
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

/* The same of plans of one degree. */
enum {
  SMALL = 1 << 9,    /* sequences times ranks up to which every degree gets all attempts, */
  HUGE = 1 << 18,    /* and from which none is tried */
  PROMISING = 5,     /* the part of what may be saved, as a divisor, that the bound of the most
                        promising degree may lose to get them in between */
  NEAR = 200,        /* the part of its bound, as a divisor, within which no degree is tried */
  STATIC_SHAPES = 3, /* that are planned, */
  DOUBT = 5,         /* if they promise to take at most this part, as a shift, longer */
  STATIC_NEAR = 6,   /* the part of the best, as a shift, within which finalists are improved, */
  STATIC_APART = 7   /* and the part of the best of them */
};

typedef struct search {
  const hcp__problem *p;
  int32_t effort;
  hcp__blocks blocks;
  hcp__waves *waves; /* NULL: too many ranks for them */
  hcp__draft found, rounded, ordered; /* a candidate, on its way */
  hcp__draft finalists[FINALISTS];
  int64_t makespans[FINALISTS]; /* INT64_MAX: there is none */
  hcp__shapes shapes;
} search;

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
static hcp_status try_height(search *s, const hcp__shape *x, int64_t height, int32_t *fits,
                             hcp_error *err) {
  hcp__shape_scale(&s->shapes, x, height);
  qsort(s->shapes.heights, (size_t)x->count, sizeof *s->shapes.heights, descending);
  *fits = hcp__waves_fill(s->waves, x->count, s->shapes.heights, &s->blocks);
  hcp_status status = *fits ? hcp__place_waves(s->p, &s->blocks, fits, err) : HCP_OK;
  if (status != HCP_OK || !*fits) return status;
  status = hcp__draft_by_micro_batch(&s->found, &s->blocks, err);
  return status == HCP_OK ? keep(s, VISITS, err) : status;
}

/* The least height that holds all, about. */
static hcp_status try_shape(search *s, const hcp__shape *x, hcp_error *err) {
  int64_t low = hcp__shape_height(&s->shapes, x);
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

/* Plans the shapes that promise most, so many for each effort. *worth is 0, and none is planned,
 * where all promise to end long after limit. */
static hcp_status try_shapes(search *s, int32_t each, int64_t limit, int32_t *worth,
                             hcp_error *err) {
  hcp__shape shapes[SHAPES_MAX];
  int32_t count, most = s->effort < SHAPES_MAX / each ? each * s->effort : SHAPES_MAX;
  *worth = 1;
  if (s->waves == NULL) return HCP_OK;
  hcp_status status = hcp__shapes_choose(&s->shapes, most, shapes, &count, err);
  *worth = count == 0 || shapes[0].predicted - (shapes[0].predicted >> DOUBT) < limit;
  for (int32_t i = 0; i < count && *worth && status == HCP_OK; i++)
    status = try_shape(s, &shapes[i], err);
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

/* Improves the finalists that are within a part of the best, a shift; *best is the one that becomes
 * the best, *makespan its time. */
static hcp_status improve_finalists(search *s, int32_t part, hcp__draft *best, int64_t *makespan,
                                    hcp_error *err) {
  int32_t least = best_of(s);
  int64_t most = s->makespans[least] + (s->makespans[least] >> part);
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

static hcp_status try_all(search *s, hcp__draft *best, int64_t *makespan, hcp_error *err) {
  int32_t worth;
  hcp_status status = keep(s, VISITS, err); /* what the search found */
  if (status == HCP_OK) status = try_all_stricter(s, err);
  if (status == HCP_OK) status = try_shapes(s, SHAPES, INT64_MAX, &worth, err);
  if (status == HCP_OK) status = improve_finalists(s, HOPELESS, best, makespan, err);
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
  if (status == HCP_OK && (int64_t)s->p->limits->ranks * HCP_SHAPE_MAX <= 1 << 24)
    status = hcp__waves_create(s->p, HCP_SHAPE_MAX, &s->waves, err);
  return status == HCP_OK ? hcp__shapes_init(&s->shapes, s->p, err) : status;
}

static void search_release(search *s) {
  hcp__shapes_release(&s->shapes);
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

static hcp_status try_degrees(const hcp__problem *p, int32_t effort, hcp__draft *best,
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
  if (status == HCP_OK) status = try_waiting(p, effort, draft, makespan, err);
  return status == HCP_OK ? try_degrees(p, effort, draft, makespan, err) : status;
}

/* ---- static CP ---- */

/* A plan of one degree, which is improved where it comes near the best. */
static hcp_status try_static(const hcp__problem *p, const hcp__problem *strict, int32_t effort,
                             hcp__draft *best, int64_t *makespan, hcp_error *err) {
  search s = {.p = strict, .effort = effort};
  hcp__draft improved = {0};
  int64_t time;
  int32_t worth = 0;
  hcp_status status = hcp__draft_init_for(&s.found, p, err);
  if (status == HCP_OK) status = search_init(&s, err);
  if (status == HCP_OK) status = try_shapes(&s, STATIC_SHAPES, *makespan, &worth, err);
  if (status == HCP_OK && worth) status = hcp__plan_search(strict, effort, 1, &s.found, err);
  if (status == HCP_OK && worth) status = keep(&s, VISITS, err);
  if (status == HCP_OK && worth &&
      s.makespans[best_of(&s)] - *makespan <= *makespan >> STATIC_NEAR) {
    status = improve_finalists(&s, STATIC_APART, &improved, &time, err);
    if (status == HCP_OK && time < *makespan) {
      *makespan = time;
      swap(&improved, best);
    }
  }
  search_release(&s);
  hcp__draft_release(&improved);
  return status;
}

/* All that a request of the strict problem would try. */
static hcp_status keep_whole(const hcp__problem *p, const hcp__problem *strict, int32_t effort,
                             hcp__draft *best, int64_t *makespan, hcp_error *err) {
  hcp__draft found;
  int64_t time;
  hcp_status status = hcp__draft_init(&found, p->n, err);
  if (status == HCP_OK) status = plan_at(strict, effort, &found, &time, err);
  if (status == HCP_OK && time < *makespan) {
    *makespan = time;
    swap(&found, best);
  }
  hcp__draft_release(&found);
  return status;
}

/* The same request at one degree, with its bound; *exists is 0 where it has no plan. */
static hcp_status prepare_degree(const hcp__problem *p, int32_t degree, hcp_limits *limits,
                                 hcp__problem *strict, int32_t *exists, hcp_error *err) {
  hcp_error failed = {0};
  *limits = *p->limits;
  limits->min_degree = limits->max_degree = degree;
  hcp_status status = hcp__stricter(p, limits, strict, exists, err);
  if (status != HCP_OK || !*exists) return status;
  status = hcp__bound(strict, &failed);
  if (status == HCP_OK) return HCP_OK;
  *exists = 0;
  hcp__problem_release(strict);
  return hcp__none_of_another(status, &failed, err);
}

/* The degree of the least bound, 0: no degree has a plan. */
static hcp_status most_promising(const hcp__problem *p, int32_t *degree, hcp_error *err) {
  int64_t least = INT64_MAX;
  hcp_status status = HCP_OK;
  *degree = 0;
  for (int32_t d = 1; d <= p->limits->max_degree && status == HCP_OK; d++) {
    hcp_limits limits;
    hcp__problem strict;
    int32_t exists;
    if (!hcp__static_degree(p, d)) continue;
    status = prepare_degree(p, d, &limits, &strict, &exists, err);
    if (status != HCP_OK || !exists) continue;
    if (strict.bound < least) *degree = d;
    least = hcp__least(least, strict.bound);
    hcp__problem_release(&strict);
  }
  return status;
}

/* Whether a degree gets all that its own request would try: where there are few sequences, and the
 * most promising one where its bound loses little of what the best plan may still save. */
static int is_whole(const hcp__problem *p, const hcp__problem *strict, int32_t first,
                    int64_t makespan) {
  int64_t size = (int64_t)p->n * p->limits->ranks;
  return size <= SMALL || (strict->limits->max_degree == first &&
                           strict->bound - p->bound < (makespan - p->bound) / PROMISING);
}

static hcp_status try_degree(const hcp__problem *p, int32_t degree, int32_t first, int32_t effort,
                             hcp__draft *best, int64_t *makespan, hcp_error *err) {
  hcp_limits limits;
  hcp__problem strict;
  hcp_error failed = {0};
  int32_t exists;
  hcp_status status = prepare_degree(p, degree, &limits, &strict, &exists, err);
  if (status != HCP_OK || !exists) return status;
  if (*makespan - strict.bound > strict.bound / NEAR)
    status = is_whole(p, &strict, first, *makespan)
                 ? keep_whole(p, &strict, effort, best, makespan, &failed)
                 : try_static(p, &strict, effort, best, makespan, &failed);
  hcp__problem_release(&strict);
  return hcp__none_of_another(status, &failed, err);
}

/* The most promising one comes first: others have to beat it. */
static hcp_status try_degrees(const hcp__problem *p, int32_t effort, hcp__draft *best,
                              int64_t *makespan, hcp_error *err) {
  int32_t most = p->limits->max_degree, first;
  if (p->limits->min_degree == most || (int64_t)p->n * p->limits->ranks > HUGE) return HCP_OK;
  hcp_status status = most_promising(p, &first, err);
  if (status == HCP_OK && first > 0)
    status = try_degree(p, first, first, effort, best, makespan, err);
  for (int32_t d = 1; d <= most && status == HCP_OK; d++)
    if (d != first && hcp__static_degree(p, d))
      status = try_degree(p, d, first, effort, best, makespan, err);
  return status;
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
