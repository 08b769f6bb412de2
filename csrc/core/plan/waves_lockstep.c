/* waves_lockstep.c - the heights of the micro-batches.
 *
 * The makespan is the sum of the heights, so a plan is as good as its heights
 * are. They start from boxes that open as needed, and from equal or falling ones
 * of each count; the best starts then descend: one height is lowered, or one
 * raised and another lowered by more, as long as the boxes hold everything.
 * Whether they do is asked of waves.c, with the shortest sequences taken for
 * a fluid; only what comes out is filled sequence by sequence. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

enum {
  TARGET_UNIT = 64, /* of the bound */
  STARTS = 2,       /* that descend */
  ATTEMPTS = 100,   /* for all starts, and what they leave for each to descend */
  COUNTS = 4,       /* of micro-batches from the least on */
  RAISES = 12,      /* of a height until it holds all */
  HALVINGS = 2,     /* of the interval of equal heights */
  MANY = 1 << 12,   /* sequences from which less is tried */
  LARGE = 1 << 15,
  LARGE_ATTEMPTS = 50,
  FEW_ATTEMPTS = 200,
  LEAN_ATTEMPTS = 20
};

typedef struct heights {
  int32_t count;
  int64_t sum;  /* of at, launches included */
  int64_t *at;  /* count: what is needed     */
  int64_t *box; /* count: what was asked for */
} heights;

typedef struct lockstep {
  hcp__search *s;
  hcp__waves *waves;
  int32_t most;
  int32_t budget; /* attempts left */
  heights best[STARTS], tried;
} lockstep;

/* ---- attempts ---- */

static void set(heights *to, const heights *from) {
  memcpy(to->at, from->at, (size_t)from->count * sizeof *to->at);
  memcpy(to->box, from->box, (size_t)from->count * sizeof *to->box);
  to->count = from->count;
  to->sum = from->sum;
}

/* Sums the heights and drops empty micro-batches. */
static void sum_up(const lockstep *l, heights *h) {
  int32_t kept = 0;
  h->sum = 0;
  for (int32_t w = 0; w < h->count; w++) {
    if (h->at[w] <= 0) continue;
    h->sum = hcp__sum(h->sum, hcp__launched(l->s->p->cost, h->at[w]));
    h->box[kept] = h->box[w];
    h->at[kept++] = h->at[w];
  }
  h->count = kept;
}

/* What no plan beats needs no look. Heights are of one stage and of fast ranks. */
static int beats_bound(const lockstep *l, const heights *h) {
  const hcp_limits *limits = l->s->p->limits;
  if (limits->pipeline.stages > 1 || limits->slowness != NULL) return 0;
  int64_t sum = 0, bound = l->s->p->bound;
  for (int32_t w = 0; w < h->count && sum < bound; w++)
    sum = hcp__sum(sum, hcp__launched(l->s->p->cost, h->at[w]));
  return sum < bound;
}

static int holds(lockstep *l, heights *h) {
  if (beats_bound(l, h)) return 0;
  l->budget = hcp__stopped(l->s->p) ? 0 : l->budget - 1;
  memcpy(h->box, h->at, (size_t)h->count * sizeof *h->box);
  if (!hcp__waves_hold(l->waves, h->count, h->box, h->at)) return 0;
  sum_up(l, h);
  return 1;
}

/* Keeps the heights among the best starts, which ascend. */
static void offer(lockstep *l, const heights *h) {
  for (int32_t i = 0; i < STARTS; i++) {
    if (l->best[i].sum == h->sum) return;
    if (l->best[i].sum < h->sum) continue;
    heights last = l->best[STARTS - 1];
    for (int32_t k = STARTS - 1; k > i; k--) l->best[k] = l->best[k - 1];
    l->best[i] = last;
    set(&l->best[i], h);
    return;
  }
}

/* ---- starts ---- */

static void start_open(lockstep *l) {
  static const int32_t shares[] = {64, 48, 32, 24, 16, 12, 8, 6, 4};
  int32_t count = l->s->p->n >= LARGE ? 4 : 9;
  for (int32_t i = 0; i < count; i++) {
    int64_t target = l->s->p->bound / TARGET_UNIT * shares[i] - l->s->p->cost->launch;
    l->budget--;
    l->tried.count = hcp__waves_open(l->waves, target > 1 ? target : 1, l->tried.box, l->tried.at);
    if (l->tried.count == 0) continue;
    sum_up(l, &l->tried);
    offer(l, &l->tried);
  }
}

static int holds_profile(lockstep *l, int32_t count, int32_t steep, int64_t height) {
  l->tried.count = count;
  int64_t drop = count > 1 ? height / 8 * 7 / (count - 1) : 0, next = height;
  for (int32_t w = 0; w < count; w++) {
    l->tried.at[w] = steep ? next : height - drop * w;
    next -= next / (1 + steep) * steep;
  }
  if (!holds(l, &l->tried)) return 0;
  offer(l, &l->tried);
  return 1;
}

/* The least height that holds all in count micro-batches: the last one an eighth as
 * high as the first, or each 1 / (1 + steep) as high as the one before. */
static void start_falling(lockstep *l, int32_t count, int32_t steep) {
  int64_t low = l->s->p->least / l->s->p->limits->ranks / (steep ? 2 : count), high = 2 * low;
  int32_t raises = 0;
  while (raises < RAISES && !holds_profile(l, count, steep, ++high)) {
    raises++;
    low = high;
    high += high < HCP__NO_TARGET / 2 ? high / 2 : 0;
  }
  for (int32_t i = 0; raises < RAISES && i < HALVINGS; i++) {
    int64_t middle = low + (high - low) / 2;
    if (holds_profile(l, count, steep, middle))
      high = middle;
    else
      low = middle;
  }
}

static void start(lockstep *l, int32_t effort) {
  const hcp__problem *p = l->s->p;
  int32_t counts = p->n >= LARGE ? 1 : p->n >= MANY ? 2 : COUNTS;
  for (int32_t i = 0; i < STARTS; i++) l->best[i].sum = INT64_MAX;
  start_open(l);
  for (int32_t i = 0; i < counts * effort && hcp__least_count(p) + i <= l->most; i++) {
    start_falling(l, hcp__least_count(p) + i, 0);
    /* A long tail of many sequences: the longest are far longer than the next. */
    if (p->n < MANY) continue;
    start_falling(l, hcp__least_count(p) + i, 1);
    if (hcp__least_count(p) + i < l->most) start_falling(l, hcp__least_count(p) + i + 1, 2);
  }
}

/* ---- descent ---- */

/* Whether heights with a raised by up and b lowered by down are better. */
static int move(lockstep *l, heights *h, int32_t a, int64_t up, int32_t b, int64_t down) {
  if (l->budget <= 0 || h->at[b] <= down) return 0;
  set(&l->tried, h);
  l->tried.at[a] += up;
  l->tried.at[b] -= down;
  if (!holds(l, &l->tried) || l->tried.sum >= h->sum) return 0;
  set(h, &l->tried);
  return 1;
}

static int lower_each(lockstep *l, heights *h, int32_t share) {
  int moved = 0;
  for (int32_t w = 0; w < h->count; w++)
    while (w < h->count && move(l, h, w, 0, w, h->at[w] / share + 1)) moved = 1;
  return moved;
}

/* One lowered, and all others raised by a little less in sum. */
static int spread_each(lockstep *l, heights *h, int32_t share) {
  int moved = 0;
  for (int32_t b = 0; b < h->count && h->count > 2; b++) {
    int64_t down = h->at[b] / share + 1, up = down / 8 * 7 / (h->count - 1);
    if (l->budget <= 0 || h->at[b] <= down) continue;
    set(&l->tried, h);
    for (int32_t a = 0; a < h->count; a++) l->tried.at[a] += a == b ? -down : up;
    if (!holds(l, &l->tried) || l->tried.sum >= h->sum) continue;
    set(h, &l->tried);
    moved = 1;
  }
  return moved;
}

static int trade_each(lockstep *l, heights *h, int32_t share) {
  int moved = 0;
  for (int32_t a = 0; a < h->count; a++)
    for (int32_t b = 0; b < h->count; b++) {
      if (a == b || a >= h->count) continue;
      int64_t up = h->at[a] / share;
      moved |= move(l, h, a, up, b, up + up / 8 + 1);
    }
  return moved;
}

static void descend(lockstep *l, heights *h) {
  for (int32_t share = 4; share <= 256; share *= 4)
    for (int moved = 1; moved && l->budget > 0;) {
      moved = lower_each(l, h, share);
      moved |= spread_each(l, h, share);
      moved |= trade_each(l, h, share);
    }
}

/* ---- every sequence ---- */

static hcp_status fill(lockstep *l, const heights *h, hcp_error *err) {
  if (h->sum >= l->s->makespan) return HCP_OK;
  if (!hcp__waves_rise(l->waves, h->count, h->box, h->at, &l->s->blocks)) return HCP_OK;
  return hcp__search_judge_waves(l->s, err);
}

static int allocate_heights(heights *h, size_t most) {
  h->at = malloc(2 * most * sizeof *h->at);
  h->box = h->at == NULL ? NULL : h->at + most;
  return h->at != NULL;
}

static int allocate(lockstep *l) {
  int allocated = allocate_heights(&l->tried, (size_t)l->most + 1);
  for (int32_t i = 0; i < STARTS; i++)
    allocated &= allocate_heights(&l->best[i], (size_t)l->most + 1);
  return allocated;
}

/* Plans that need no heights: memory first, all ranks for all, shelf after shelf, and one full
 * micro-batch after the other. */
static hcp_status fill_greedily(lockstep *l, hcp_error *err) {
  hcp_status status = HCP_OK;
  if (hcp__waves_by_memory(l->waves, &l->s->blocks)) status = hcp__search_judge_waves(l->s, err);
  if (status == HCP_OK && hcp__waves_widest(l->waves, &l->s->blocks))
    status = hcp__search_judge_waves(l->s, err);
  if (status == HCP_OK && hcp__waves_shelve(l->waves, &l->s->blocks))
    status = hcp__search_judge_waves(l->s, err);
  /* Few sequences have small steps, which do better. */
  for (int32_t tight = hcp__is_few(l->s->p) ? 2 : 0; tight < 2 && status == HCP_OK; tight++)
    if (hcp__waves_level(l->waves, tight, &l->s->blocks))
      status = hcp__search_judge_waves(l->s, err);
  return status;
}

static int32_t attempts(const hcp__problem *p, int32_t lean) {
  if (lean) return hcp__is_few(p) ? LEAN_ATTEMPTS : LEAN_ATTEMPTS / 2;
  if (p->n >= LARGE) return LARGE_ATTEMPTS;
  return hcp__is_few(p) && p->limits->sync == HCP_SYNC_MICRO_BATCH ? FEW_ATTEMPTS : ATTEMPTS;
}

static hcp_status descend_all(lockstep *l, int32_t effort, hcp_error *err) {
  hcp_status status = HCP_OK;
  l->budget = attempts(l->s->p, l->s->lean) * effort;
  start(l, effort);
  int32_t budget = l->budget;
  for (int32_t i = 0; i < STARTS && l->best[i].sum < INT64_MAX && status == HCP_OK; i++) {
    l->budget = budget;
    descend(l, &l->best[i]);
    status = fill(l, &l->best[i], err);
  }
  return status;
}

hcp_status hcp__search_waves(hcp__search *s, hcp_error *err) {
  lockstep l = {.s = s};
  int32_t least = hcp__least_count(s->p), limit = (1 << 24) / s->p->limits->ranks + 1;
  if (least > limit / 8) return HCP_OK; /* scratch grows with the ranks: lists do */
  l.most = 4 * least + 16;
  hcp_status status = hcp__waves_create(s->p, l.most, &l.waves, err);
  if (status != HCP_OK) return status;
  status = allocate(&l)
               ? fill_greedily(&l, err)
               : hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d micro-batches", l.most);
  if (status == HCP_OK) status = descend_all(&l, s->effort, err);
  if (status == HCP_OK && !s->lean && !s->p->limits->pow2)
    status = hcp__polish(s, s->effort, hcp__polish_late(s->p) ? 4 : 1, hcp__polish_late(s->p), err);
  for (int32_t i = 0; i < STARTS; i++) free(l.best[i].at);
  free(l.tried.at);
  hcp__waves_destroy(l.waves);
  return status;
}
