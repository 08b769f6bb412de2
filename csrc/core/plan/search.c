/* search.c - several plans for one request, of which the best is kept.
 *
 * The attempts do not depend on the clock. Lists try targets around the bound. Waves
 * try counts of micro-batches, each with the least height that holds all. */
#include <stdlib.h>

#include "plan.h"

enum {
  TARGET_UNIT = 64,   /* of the bound */
  TARGETS = 12,
  LEAN_TARGETS = 3,
  MANY = 1 << 12,     /* sequences from which fewer plans are tried */
  LARGE = 1 << 15,    /* and fewer still */
  PACKINGS = 8,       /* limits to which single ranks are packed */
  SHARPENINGS = 10,   /* targets above the bound, */
  SHARPENING = 400,   /* each by this part of it  */
  LARGE_SHARPENINGS = 2,
  LARGE_SHARPENING = 160,
  SKYLINES = 12,      /* their targets */
  COLUMNS = 1 << 18,  /* what looking for them may cost, */
  CUTS = 16,          /* and targets that they are tried for */
  WIDEST = 200,       /* of many sequences, those that stand in them */
  MISSES = 4          /* targets that columns may miss */
};

/* In 1/TARGET_UNIT of the bound, the most promising first. */
static const int32_t targets[TARGETS] = {64, 66, 60, 48, 69, 32, 74, 56, 40, 80, 24, 96};

typedef hcp__search search;

/* ---- when to go on ---- */

/* Within 1/512 of the bound nothing is left to find. */
static int is_done(const search *s) { return s->makespan - s->p->bound <= s->p->bound >> 9; }

/* Whether plans of another kind may end much sooner. */
static int is_far(const search *s) {
  return s->makespan - s->p->bound > s->p->bound >> (hcp__is_few(s->p) ? 7 : 5);
}

/* What every rank launches in so many micro-batches, those in which it has no rows included. */
static int64_t launches(const search *s, int32_t count) {
  if (s->makespan == INT64_MAX || s->p->limits->sync != HCP_SYNC_STEP ||
      s->p->limits->pipeline.stages > 1)
    count = 1;
  return hcp__launches(s->p->limits, s->p->cost, 0, count);
}

/* A problem without launches, for attempts that count those of all ranks beforehand. */
typedef struct bare {
  hcp__problem p;
  hcp_cost cost;
} bare;

static void strip(bare *b, const hcp__problem *p) {
  b->p = *p;
  b->cost = *p->cost;
  b->cost.launch = b->cost.host = 0;
  b->p.cost = &b->cost;
}

/* ---- lists ---- */

static hcp_status try_list(search *s, int64_t target, int32_t nested, int64_t limit,
                           hcp_error *err) {
  hcp_status status =
      hcp__plan_list(s->p, target > 1 ? target : 1, nested, limit, 0, &s->blocks, err);
  if (status == HCP_OK) status = hcp__draft_by_start(&s->draft, &s->blocks, s->p, err);
  return status == HCP_OK ? hcp__search_judge(s, err) : status;
}

static hcp_status try_lists(search *s, hcp_error *err) {
  int32_t count = TARGETS;
  int32_t nested_count = count;
  if (s->p->n >= MANY) {
    count = s->p->n >= LARGE ? 2 : 5;
    nested_count = s->p->n >= LARGE ? 0 : 1;
  }
  if (s->lean) count = nested_count = LEAN_TARGETS;
  count *= s->effort;
  if (count > TARGETS) count = TARGETS;
  for (int32_t i = 0; i < count && !is_done(s); i++) {
    int64_t target = s->p->bound / TARGET_UNIT * targets[i];
    target -=
        targets[i] < TARGET_UNIT ? s->p->cost->launch : launches(s, s->best->micro_batch_count);
    for (int32_t nested = 0; nested < 1 + (i < nested_count * s->effort); nested++) {
      hcp_status status = try_list(s, target, nested, 0, err);
      if (status != HCP_OK) return status;
    }
  }
  return HCP_OK;
}

/* Where launches weigh, single ranks are packed up to the time that is hoped
 * for: the least limit by which everything fits is about the makespan. */
static hcp_status try_packed(search *s, hcp_error *err) {
  int64_t low = s->p->bound, high = s->makespan, launch = s->p->cost->launch;
  for (int32_t i = 0; i < PACKINGS && high - low > low >> 9; i++) {
    int64_t middle = low + (high - low) / 2, before = s->makespan;
    hcp_status status = try_list(s, middle - launch, 0, middle, err);
    if (status != HCP_OK) return status;
    if (s->makespan < before)
      high = s->makespan < middle ? s->makespan : middle;
    else
      low = middle;
  }
  return HCP_OK;
}

/* Where degrees go up between two targets a list ends much later: targets follow
 * each other closely from the bound on, as long as ending in time would pay. */
static hcp_status sharpen(search *s, hcp_error *err) {
  int32_t large = s->p->n >= LARGE;
  int32_t count = large ? LARGE_SHARPENINGS : (s->lean ? LEAN_TARGETS : SHARPENINGS) * s->effort;
  int64_t beside = launches(s, s->best->micro_batch_count), target = s->p->bound - beside;
  for (int32_t i = 0; i < count && !is_done(s) && target < s->makespan - beside; i++) {
    target += (s->p->bound + target) / 2 / (large ? LARGE_SHARPENING : SHARPENING);
    hcp_status status = try_list(s, target, 0, 0, err);
    if (status != HCP_OK) return status;
  }
  return HCP_OK;
}

/* ---- skylines ---- */

static hcp_status try_skyline(search *s, const hcp__problem *p, int64_t target, int32_t widen,
                              hcp_error *err) {
  hcp_status status = hcp__plan_skyline(p, target, widen, &s->blocks, err);
  if (status == HCP_OK) status = hcp__draft_by_start(&s->draft, &s->blocks, s->p, err);
  return status == HCP_OK ? hcp__search_judge(s, err) : status;
}

static hcp_status try_skylines(search *s, hcp_error *err) {
  static const int32_t above[SKYLINES] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 26};
  int32_t parts = s->effort < 8 ? s->effort : 8; /* targets between two of these */
  bare b;
  strip(&b, s->p);
  for (int32_t i = 0; i < SKYLINES * parts && !is_done(s); i++)
    for (int32_t widen = 0; widen < 2; widen++) {
      int64_t unit = s->p->bound / 256, share = above[i / parts];
      int64_t target = s->p->bound + unit * share - unit / parts * (i % parts);
      target -= launches(s, s->best->micro_batch_count);
      hcp_status status = try_skyline(s, &b.p, target > 1 ? target : 1, widen, err);
      if (status != HCP_OK) return status;
    }
  return HCP_OK;
}

/* ---- columns ---- */

/* Whether columns that end together are a plan that does, and one worth looking for. */
static int may_cut(const search *s) {
  return !s->lean && hcp__is_free(s->p) && s->p->limits->slowness == NULL &&
         s->p->limits->pipeline.stages < 2 &&
         (hcp__is_few(s->p) || (s->p->n < LARGE && s->makespan - s->p->bound > s->p->bound >> 7));
}

/* The least degree that stands in columns: of many sequences, those of the longest.
 * They are fewer than columns take, and than many sequences are. */
_Static_assert(WIDEST < HCP__FEW && HCP__FEW <= HCP_COLUMNS_MAX, "what stands in columns");
static int32_t least_cut(const hcp__problem *p) {
  if (hcp__is_few(p)) return 1;
  return hcp__allot(p, &p->kinds[p->kind_of[WIDEST]], p->bound)->degree + 1;
}

/* Targets for columns. */
typedef struct cuts {
  const hcp__problem *p; /* with launches of each group in its time, or without */
  int32_t round;
  int64_t budget;
  int32_t count; /* micro-batches of the latest plan */
  int64_t end;   /* what was reached, without what is beside the target */
} cuts;

/* Launches that are part of a target but not of the columns' times, and those of ranks without rows
 * where a target has only those of groups. */
static int64_t inside(const search *s, const cuts *c) {
  return c->p == s->p ? 0 : launches(s, c->count);
}
static int64_t beside(const search *s, const cuts *c) {
  return c->p == s->p ? launches(s, c->count) - launches(s, 1) : 0;
}

/* Columns that end within busy, with all the rest, as a plan. */
static hcp_status try_cut(search *s, cuts *c, int64_t busy, hcp_error *err) {
  int32_t found, least = least_cut(s->p);
  int64_t makespan;
  hcp_status status =
      hcp__plan_columns(c->p, busy, c->round, least, &c->budget, &s->blocks, &found, err);
  if (status != HCP_OK || !found) return status;
  status = hcp__plan_list(c->p, busy - c->p->cost->launch, 0, 0, 1, &s->blocks, err);
  if (status == HCP_OK) status = hcp__draft_by_start(&s->draft, &s->blocks, s->p, err);
  if (status == HCP_OK) status = hcp__makespan(&s->draft, s->p, &makespan, err);
  if (status != HCP_OK) return status;
  c->count = s->draft.micro_batch_count;
  c->end = hcp__least(c->end, makespan - beside(s, c));
  return hcp__search_judge(s, err);
}

/* Targets that columns reach are cheap: they come down by a third of what is above the
 * bound, and by half of that after each one that was missed. Lists place the rest. */
static hcp_status cut_columns(search *s, const hcp__problem *p, int32_t round, hcp_error *err) {
  cuts c = {p, round, p == s->p ? COLUMNS / 4 : COLUMNS, s->best->micro_batch_count, 0};
  int32_t misses = 0;
  c.end = s->makespan - beside(s, &c);
  for (int32_t i = 0; i < CUTS && !is_done(s) && misses < MISSES && c.budget > 0; i++) {
    int64_t above = c.end - s->p->bound;
    int64_t target = s->p->bound + above - above / (3 << misses) - 1;
    if (above <= 0) break;
    hcp_status status = try_cut(s, &c, hcp__most(1, target - inside(s, &c)), err);
    if (status != HCP_OK) return status;
    misses += c.end > target;
  }
  return HCP_OK;
}

static hcp_status try_columns(search *s, hcp_error *err) {
  hcp_status status = HCP_OK;
  bare b;
  strip(&b, s->p);
  for (int32_t round = 0; round < s->effort && status == HCP_OK; round++) {
    status = cut_columns(s, &b.p, round, err);
    if (status == HCP_OK && s->p->cost->launch > 0) status = cut_columns(s, s->p, round, err);
  }
  return status;
}

/* ---- both ---- */

static hcp_status try_all(search *s, hcp_error *err) {
  if (s->p->limits->sync == HCP_SYNC_MICRO_BATCH) {
    hcp_status status = try_list(s, s->p->bound, 0, 0, err); /* always ends with a plan */
    return status == HCP_OK && !is_done(s) ? hcp__search_waves(s, err) : status;
  }
  hcp_status status = try_lists(s, err);
  int32_t cut = may_cut(s);
  if (status == HCP_OK && cut) status = try_columns(s, err);
  if (status == HCP_OK && (!cut || is_far(s))) status = sharpen(s, err);
  if (status == HCP_OK && s->p->cost->launch > s->p->bound >> 6 && !is_done(s))
    status = try_packed(s, err);
  if (status == HCP_OK && !s->lean && hcp__is_free(s->p) && hcp__is_few(s->p) && is_far(s))
    status = try_skylines(s, err);
  /* Few long sequences: micro-batches of one height may end sooner. */
  if (status == HCP_OK && !s->lean && is_far(s) && s->p->n < LARGE)
    status = hcp__search_waves(s, err);
  return status == HCP_OK ? hcp__balance(s, err) : status;
}

typedef hcp_status attempts(search *s, hcp_error *err);

static hcp_status search_by(attempts *try, const hcp__problem *p, int32_t effort, int32_t lean,
                            hcp__draft *draft, hcp_error *err) {
  search s = {.p = p, .effort = effort, .lean = lean, .best = draft, .makespan = INT64_MAX};
  if (p->n == 0) return HCP_OK;
  hcp_status status = hcp__blocks_init(&s.blocks, p->n, err);
  if (status != HCP_OK) return status;
  status = hcp__draft_init(&s.draft, p->n, err);
  if (status == HCP_OK) status = try(&s, err);
  hcp__draft_release(&s.draft);
  hcp__blocks_release(&s.blocks);
  return status;
}

hcp_status hcp__plan_search(const hcp__problem *p, int32_t effort, int32_t lean, hcp__draft *draft,
                            hcp_error *err) {
  return search_by(try_all, p, effort, lean, draft, err);
}

hcp_status hcp__plan_lists(const hcp__problem *p, hcp__draft *draft, hcp_error *err) {
  return search_by(try_lists, p, 1, 1, draft, err);
}
