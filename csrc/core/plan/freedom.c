/* freedom.c - the search, as it would be with less freedom, and the best plan of all.
 *
 * A plan of a stricter request is a plan of this one. With fewer choices a search may end with a
 * better one, so requests with fewer degrees, less memory or the other sync are searched too, in
 * fewer attempts, while the best plan is above its bound by more than is worth a search. What is
 * best is then improved by small steps. Ranks that do not wait have the whole plan of those that do
 * as a candidate, where their own is far from its bound. Of small requests every degree alone is
 * searched as its own request would be: no such plan is slower than that of one degree. Of larger
 * ones static CP is, where its bound promises much. */
#include "plan.h"

/* Requests by size, and what is tried for them. */
enum {
  FORCED = 1 << 9, /* sequences times ranks up to which every degree is searched alone, */
  LARGE = 1 << 13, /* beyond which few other requests are, */
  HUGE = 1 << 18,  /* and beyond which only those of less memory are */
  KINDS = 8        /* kinds of sequences up to which less memory is tried at all */
};

/* Parts of a bound, as divisors. */
enum {
  NEAR = 200,    /* within which the best plan is near enough: nothing else is tried */
  FAR = 64,      /* the same of requests whose search takes longer */
  PROMISING = 50 /* by which static CP may end sooner than the best plan, to be searched as its own
                    request would be */
};

/* Parts of the best makespan, as shifts, within which plans of other requests are worth small
 * steps. */
enum {
  CLOSE = 6,
  WIDE = 3 /* of stricter requests, where degrees are powers of two */
};

/* The share of the usual looks, as a divisor, that small steps have: in the best plan under either
 * sync, in those of stricter requests, in those whose ranks wait for each other, in those of one
 * degree, and as if they waited, beside the steps of those that do not. */
enum { STEP_SHARE = 8, WAVES_SHARE = 8, LATE_SHARE = 1, POW2_SHARE = 3 };
enum { STRICT_SHARE = 12, FREE_SHARE = 24, WAITING_SHARE = 20, ONE_SHARE = 24, BOX_SHARE = 2 };

/* The part of the makespan, as a shift, by which ranks that do not wait may end sooner and still be
 * improved as if they did. */
enum { BOXES = 5 };

/* Least degrees of lists of even groups. */
static const int32_t evens[] = {2, 3, 4, 6, 8, 12};

/* The same of small requests, up to so many sequences and ranks, how near they come to the bound,
 * and how often they begin anew. */
enum { SMALL = 16, SMALL_RANKS = 8, SMALL_SHARE = 24, SMALL_NEAR = 1000, ROUNDS = 6 };

typedef struct best {
  const hcp__problem *p;
  int32_t effort;
  hcp__draft *draft;
  int64_t makespan;
} best;

static int is_small(const hcp__problem *p) {
  return p->n <= SMALL && p->limits->ranks <= SMALL_RANKS;
}

static void swap(hcp__draft *x, hcp__draft *y) {
  hcp__draft kept = *x;
  *x = *y;
  *y = kept;
}

static int is_near(const best *b, int64_t part) {
  return b->makespan - b->p->bound <= b->p->bound / part;
}

/* Where ranks hardly start before others have ended, the steps of ranks that wait (waves_polish.c)
 * find more: they divide all ranks of a micro-batch anew. */
static hcp_status polish_as_boxes(hcp__search *s, int32_t effort, int32_t share, int32_t warm,
                                  hcp_error *err) {
  hcp__problem waiting = *s->p;
  hcp_limits limits = *s->p->limits;
  int64_t makespan;
  limits.sync = HCP_SYNC_MICRO_BATCH;
  waiting.limits = &limits;
  hcp_status status = hcp__makespan(s->best, &waiting, &makespan, err);
  if (status != HCP_OK || !hcp__is_few(s->p) || makespan - s->makespan > s->makespan >> BOXES)
    return status;
  status =
      hcp__polish_blocks(s->p, s->best, makespan, effort, BOX_SHARE * share, warm, &s->blocks, err);
  return status == HCP_OK && s->blocks.count > 0 ? hcp__search_judge_waves(s, err) : status;
}

/* Improves a plan of the problem by small steps, in a share of the usual looks. */
static hcp_status polish(const hcp__problem *p, int32_t effort, int32_t share, int32_t warm,
                         hcp__draft *draft, int64_t *makespan, hcp_error *err) {
  hcp__search s = {.p = p, .effort = effort, .best = draft, .makespan = *makespan};
  hcp_status status = hcp__blocks_init(&s.blocks, p->n, err);
  if (status != HCP_OK) return status;
  status = hcp__draft_init(&s.draft, p->n, err);
  if (status == HCP_OK && p->limits->sync == HCP_SYNC_STEP)
    status = polish_as_boxes(&s, effort, share, warm, err);
  if (status == HCP_OK)
    status = p->limits->sync == HCP_SYNC_MICRO_BATCH
                 ? hcp__polish(&s, effort, share, warm, err)
                 : hcp__polish_step(&s, effort, share, warm, err);
  hcp__draft_release(&s.draft);
  hcp__blocks_release(&s.blocks);
  *makespan = s.makespan;
  return status;
}

static hcp_status arrange(best *b, hcp_error *err) {
  hcp__search s = {.p = b->p, .best = b->draft, .makespan = b->makespan};
  if (is_near(b, NEAR)) return HCP_OK;
  hcp_status status = hcp__draft_init(&s.draft, b->p->n, err);
  if (status == HCP_OK) status = hcp__arrange(&s, err);
  hcp__draft_release(&s.draft);
  b->makespan = s.makespan;
  return status;
}

/* ---- a stricter request ---- */

/* Finds a plan of the stricter problem: a search in few attempts. */
static hcp_status search_lean(const best *b, const hcp__problem *strict, hcp__draft *draft,
                              int64_t *makespan, hcp_error *err) {
  hcp_status status = hcp__plan_search(strict, b->effort, 1, draft, err);
  if (status == HCP_OK && strict->limits->sync != b->p->limits->sync) {
    status = hcp__makespan(draft, strict, makespan, err);
    if (status == HCP_OK)
      status = polish(strict, b->effort, WAITING_SHARE, 1, draft, makespan, err);
  }
  if (status == HCP_OK) status = hcp__makespan(draft, b->p, makespan, err);
  int32_t pow2 = b->p->limits->pow2; /* small steps find most of what it can reach */
  int32_t free = b->p->limits->sync == HCP_SYNC_STEP;
  if (status == HCP_OK && free && *makespan - b->makespan < b->makespan >> CLOSE)
    status = polish(b->p, b->effort, FREE_SHARE, 1, draft, makespan, err);
  if (status == HCP_OK && !free && *makespan - b->makespan < b->makespan >> (pow2 ? WIDE : CLOSE))
    status = polish(b->p, b->effort, pow2 ? POW2_SHARE : STRICT_SHARE, 1, draft, makespan, err);
  return status;
}

static hcp_status plan_at(const hcp__problem *p, int32_t effort, hcp__draft *draft,
                          int64_t *makespan, hcp_error *err);

/* Keeps what is found for a stricter problem, if it is better. whole: by all that its own request
 * would try. */
static hcp_status keep_better(best *b, const hcp__problem *strict, int32_t whole, hcp_error *err) {
  int64_t makespan;
  hcp__draft draft;
  hcp_status status = hcp__draft_init(&draft, strict->n, err);
  if (status == HCP_OK)
    status = whole ? plan_at(strict, b->effort, &draft, &makespan, err)
                   : search_lean(b, strict, &draft, &makespan, err);
  if (status == HCP_OK && whole) status = hcp__makespan(&draft, b->p, &makespan, err);
  if (status == HCP_OK && whole && strict->limits->sync != b->p->limits->sync &&
      makespan - b->makespan < b->makespan >> CLOSE)
    status = polish(b->p, b->effort, FREE_SHARE, 1, &draft, &makespan, err);
  if (status == HCP_OK && makespan < b->makespan) {
    swap(&draft, b->draft);
    b->makespan = makespan;
  }
  hcp__draft_release(&draft);
  return status;
}

int hcp__static_degree(const hcp__problem *p, int32_t degree) {
  const hcp_limits *limits = p->limits;
  int32_t least = hcp__leanest(p, &p->kinds[0])->degree;
  int even = degree == least || limits->ranks % degree == 0 || (degree & (degree - 1)) == 0;
  return even && degree >= least && hcp__degree_allowed(limits, p->cost, degree);
}

hcp_status hcp__stricter(const hcp__problem *p, const hcp_limits *limits, hcp__problem *strict,
                         int32_t *exists, hcp_error *err) {
  hcp_error refused = {0}; /* some sequence has no such degree, or does not fit */
  hcp_status status = hcp__problem_init(strict, p->lengths, p->n, limits, p->cost, &refused);
  *exists = status == HCP_OK;
  if (status == HCP_NO_MEMORY) return hcp__fail(err, status, "%s", refused.message);
  if (status == HCP_OK) strict->stop = p->stop;
  return HCP_OK;
}

hcp_status hcp__none_of_another(hcp_status status, const hcp_error *failed, hcp_error *err) {
  if (status == HCP_OK || status == HCP_OVERFLOW) return HCP_OK;
  *err = *failed;
  return status;
}

/* How much a stricter request gets: a search in few attempts, all that its own request would try,
 * or the one or the other by what its bound promises. */
typedef enum much { LITTLE, ALL, PROMISED } much;

static int is_whole(const best *b, const hcp__problem *strict, much x) {
  return x == ALL || (x == PROMISED && b->makespan - strict->bound > strict->bound / PROMISING);
}

static hcp_status try_limits(best *b, const hcp_limits *limits, much share, hcp_error *err) {
  const hcp__problem *p = b->p;
  hcp__problem strict;
  int32_t exists;
  hcp_status status = hcp__stricter(p, limits, &strict, &exists, err);
  if (status != HCP_OK || !exists) return status;
  if (strict.least / limits->ranks < b->makespan || limits->slowness != NULL) {
    status = hcp__bound(&strict, err);
    /* A bound of lockstep is none of the step's clock. */
    if (status == HCP_OK && (strict.bound < b->makespan || limits->sync != p->limits->sync))
      status = keep_better(b, &strict, is_whole(b, &strict, share), err);
  }
  hcp__problem_release(&strict);
  return status;
}

/* ---- even groups ---- */

/* Lists of groups of one least degree: short sequences share them, and take one launch. */
static hcp_status list_from(const best *b, int32_t least, hcp__draft *draft, int64_t *makespan,
                            hcp_error *err) {
  hcp_limits limits = *b->p->limits;
  hcp__problem strict;
  int32_t exists;
  limits.min_degree = least;
  *makespan = INT64_MAX;
  hcp_status status = hcp__stricter(b->p, &limits, &strict, &exists, err);
  if (status != HCP_OK || !exists) return status;
  strict.bound = b->p->bound; /* no plan of a stricter request beats it, either */
  status = hcp__plan_lists(&strict, draft, err);
  if (status == HCP_OK) status = hcp__makespan(draft, b->p, makespan, err);
  hcp__problem_release(&strict);
  return status;
}

/* The best of them, improved by small steps. */
static hcp_status try_even(best *b, hcp_error *err) {
  const hcp_limits *limits = b->p->limits;
  hcp__draft found, even;
  int64_t makespan, least = INT64_MAX;
  if (is_near(b, NEAR) || !hcp__polish_late(b->p)) return HCP_OK;
  hcp_status status = hcp__draft_init(&found, b->p->n, err);
  if (status != HCP_OK) return status;
  status = hcp__draft_init(&even, b->p->n, err);
  for (size_t i = 0; i < sizeof evens / sizeof *evens && status == HCP_OK; i++) {
    makespan = INT64_MAX;
    if (evens[i] > limits->min_degree && evens[i] <= limits->max_degree / 2 &&
        hcp__degree_allowed(limits, b->p->cost, evens[i]))
      status = list_from(b, evens[i], &found, &makespan, err);
    if (status != HCP_OK || makespan >= least) continue;
    least = makespan;
    swap(&found, &even);
  }
  if (status == HCP_OK && least - b->makespan < b->makespan >> CLOSE)
    status = polish(b->p, b->effort, limits->sync == HCP_SYNC_STEP ? FREE_SHARE : STRICT_SHARE, 1,
                    &even, &least, err);
  if (status == HCP_OK && least < b->makespan) {
    swap(&even, b->draft);
    b->makespan = least;
  }
  hcp__draft_release(&even);
  hcp__draft_release(&found);
  return status;
}

/* ---- one degree ---- */

static hcp_status try_degrees(best *b, hcp_error *err) {
  hcp_limits limits = *b->p->limits;
  int32_t least = limits.min_degree, most = limits.max_degree;
  hcp_status status = HCP_OK;
  if (least == most || (int64_t)b->p->n * limits.ranks > FORCED) return HCP_OK;
  for (int32_t d = least; d <= most && status == HCP_OK; d++) {
    if (!hcp__degree_allowed(b->p->limits, b->p->cost, d)) continue;
    limits.min_degree = limits.max_degree = d;
    status = try_limits(b, &limits, ALL, err);
  }
  return status;
}

/* ---- fewer choices ---- */

static hcp_status try_step(best *b, hcp_error *err) {
  hcp_limits limits = *b->p->limits;
  if (limits.sync == HCP_SYNC_MICRO_BATCH || (is_near(b, FAR) && !is_small(b->p))) return HCP_OK;
  limits.sync = HCP_SYNC_MICRO_BATCH;
  return try_limits(b, &limits, is_small(b->p) ? ALL : LITTLE, err);
}

static hcp_status try_pow2(best *b, int32_t least, hcp_error *err) {
  hcp_limits limits = *b->p->limits;
  int32_t node = limits.ranks_per_node;
  if (least < limits.min_degree) least = limits.min_degree;
  if (is_near(b, NEAR) || least > limits.max_degree || (node > 0 && (node & (node - 1)) != 0))
    return HCP_OK;
  limits.pow2 = 1;
  limits.min_degree = least;
  return try_limits(b, &limits, LITTLE, err);
}

static hcp_status try_least(best *b, int32_t least, hcp_error *err) {
  hcp_limits limits = *b->p->limits;
  if (is_near(b, NEAR) || least > limits.max_degree || least <= limits.min_degree) return HCP_OK;
  limits.min_degree = least;
  return try_limits(b, &limits, LITTLE, err);
}

/* Ranks that are not full leave sequences of few kinds where they fit better; a rank that does not
 * wait for others goes on to its next micro-batch instead. */
static hcp_status try_memories(best *b, hcp_error *err) {
  hcp_limits limits = *b->p->limits;
  int64_t rows = limits.max_tokens_per_rank;
  hcp_status status = HCP_OK;
  if (limits.sync == HCP_SYNC_STEP) return HCP_OK;
  for (int32_t eighths = 7; eighths > 4 && status == HCP_OK && !is_near(b, NEAR); eighths--) {
    limits.max_tokens_per_rank = rows / 8 * eighths;
    if (limits.max_tokens_per_rank < 1 || limits.alignment > limits.max_tokens_per_rank) break;
    status = try_limits(b, &limits, LITTLE, err);
  }
  return status;
}

/* One degree for all: static CP, which fills memory evenly. */
static hcp_status try_static(best *b, hcp_error *err) {
  hcp_limits limits = *b->p->limits;
  int32_t most = limits.max_degree;
  hcp_status status = HCP_OK;
  if (limits.min_degree == most) return HCP_OK;
  for (int32_t d = 1; d <= most && status == HCP_OK && !is_near(b, NEAR); d++) {
    hcp_error failed = {0};
    if (!hcp__static_degree(b->p, d)) continue;
    limits.min_degree = limits.max_degree = d;
    status = hcp__none_of_another(try_limits(b, &limits, PROMISED, &failed), &failed, err);
  }
  return status;
}

/* A rank of its own for each sequence of more than half a rank's rows leaves much of their memory
 * empty, and many micro-batches: shared ranks hold more. */
static hcp_status try_shared(best *b, hcp_error *err) {
  const hcp_limits *limits = b->p->limits;
  int64_t size = (int64_t)b->p->n * limits->ranks;
  if (size > HUGE || is_near(b, FAR)) return HCP_OK;
  if (limits->sync == HCP_SYNC_STEP) return try_static(b, err);
  hcp_status status = try_least(b, 2, err);
  if (status == HCP_OK && !limits->pow2 && !is_near(b, FAR)) status = try_pow2(b, 1, err);
  if (status == HCP_OK && !is_near(b, FAR)) status = try_pow2(b, 2, err);
  return status == HCP_OK ? try_static(b, err) : status;
}

/* Those that have been found to pay. */
static hcp_status try_stricter(best *b, hcp_error *err) {
  const hcp_limits *limits = b->p->limits;
  int32_t free = limits->sync == HCP_SYNC_STEP;
  hcp_status status = HCP_OK;
  if (b->p->kind_count <= KINDS) status = try_memories(b, err);
  if ((int64_t)b->p->n * limits->ranks > LARGE)
    return status == HCP_OK ? try_shared(b, err) : status;
  if (status == HCP_OK && !free && !limits->pow2) status = try_pow2(b, 1, err);
  if (status == HCP_OK) status = try_pow2(b, 2, err);
  if (status == HCP_OK) status = try_least(b, 2, err);
  if (status == HCP_OK) status = try_even(b, err);
  if (status == HCP_OK) status = try_static(b, err);
  return status == HCP_OK ? try_step(b, err) : status;
}

/* ---- the other sync ---- */

/* What the request would get if its ranks waited, improved as if they do not: a plan that is far
 * from its bound is no slower. */
static hcp_status try_waiting(best *b, hcp_error *err) {
  hcp_limits limits = *b->p->limits;
  hcp_error failed = {0};
  if (limits.sync == HCP_SYNC_MICRO_BATCH || limits.min_degree == limits.max_degree ||
      is_near(b, FAR) || is_small(b->p) || (int64_t)b->p->n * limits.ranks > LARGE)
    return HCP_OK;
  limits.sync = HCP_SYNC_MICRO_BATCH;
  hcp_status status = try_limits(b, &limits, ALL, &failed);
  return hcp__none_of_another(status, &failed, err);
}

/* ---- all of it ---- */

static int32_t share_of(const hcp__problem *p) {
  if (p->limits->min_degree == p->limits->max_degree) return ONE_SHARE;
  if (p->limits->sync == HCP_SYNC_STEP) return STEP_SHARE;
  if (hcp__polish_late(p) && !p->limits->pow2) return LATE_SHARE;
  return p->limits->pow2 ? POW2_SHARE : WAVES_SHARE; /* pow2 has had no steps before */
}

/* Improves the best plan by small steps, a small request by many from several beginnings. */
static hcp_status polish_best(best *b, hcp_error *err) {
  int32_t small = is_small(b->p) && b->p->limits->min_degree < b->p->limits->max_degree,
          rounds = small ? ROUNDS : 1;
  int32_t share = small ? SMALL_SHARE : share_of(b->p);
  hcp_status status = HCP_OK;
  for (int32_t i = 0; i < rounds && status == HCP_OK && !is_near(b, small ? SMALL_NEAR : NEAR); i++)
    status = polish(b->p, b->effort + i, share, 1 + i, b->draft, &b->makespan, err);
  return status;
}

static hcp_status plan_at(const hcp__problem *p, int32_t effort, hcp__draft *draft,
                          int64_t *makespan, hcp_error *err) {
  best b = {.p = p, .effort = effort, .draft = draft};
  hcp_status status = hcp__plan_search(p, effort, 0, draft, err);
  if (status == HCP_OK) status = hcp__makespan(draft, p, &b.makespan, err);
  if (status == HCP_OK && p->limits->min_degree < p->limits->max_degree) {
    status = try_stricter(&b, err);
    if (status == HCP_OK) status = try_degrees(&b, err);
  }
  if (status == HCP_OK) status = polish_best(&b, err);
  if (status == HCP_OK) status = try_waiting(&b, err);
  if (status == HCP_OK) status = arrange(&b, err);
  *makespan = b.makespan;
  return status;
}

/* Doubled, so that more effort tries what less does. */
hcp_status hcp__plan_best(const hcp__problem *p, int32_t effort, hcp__draft *draft,
                          hcp_error *err) {
  int64_t least = INT64_MAX, makespan;
  hcp_status status = HCP_OK;
  for (int32_t e = 1; e <= effort && p->n > 0 && status == HCP_OK; e *= 2) {
    hcp__draft found;
    status = hcp__draft_init(&found, p->n, err);
    if (status == HCP_OK) status = plan_at(p, e, &found, &makespan, err);
    if (status == HCP_OK && makespan < least) {
      least = makespan;
      swap(&found, draft);
    }
    hcp__draft_release(&found);
  }
  return status;
}
