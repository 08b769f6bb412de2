/* bound_lockstep.c - a time that no plan beats whose ranks wait for each other after
 * every micro-batch: the sum of the heights.
 *
 * Let H be the height of the tallest micro-batch that is still open. No sequence in
 * it or in a lower one has a degree that takes longer than H, so each needs at least
 * its least rank-time among the degrees that are fast enough: short micro-batches
 * make wide groups, which exchange more. High ones leave ranks idle, as a rank holds
 * few rows and short sequences are little work a row.
 *
 *   left(k, H)  least work that the k - 1 tallest micro-batches leave, as they hold
 *               so many rows and at most the densest work, when no other is above H
 *   s(k, H)     sum of the heights from the k-th on, which is H high
 *               >= left(k, H) / N, and >= H + the least s(k + 1, H') with H' <= H
 *
 * Heights are intervals between levels: left() takes the upper end, H the lower one.
 * The interval that decides is split until it is narrow. The tallest micro-batch
 * costs more still: see idle_beside(). */
#include <stdlib.h>

#include "plan.h"

enum {
  LEVELS = 24,   /* intervals of heights, */
  FEW_LEVELS = 12, /* those of more kinds than MANY, */
  MANY = 1 << 12,
  STEP = 8,      /* each this part lower than the one before */
  BUNDLES = 24,     /* of micro-batches that are looked at as one */
  SINGLE = 16,   /* of them, those of one micro-batch */
  SPLITS = 16,   /* of the interval that decides */
  NARROW = 8,    /* log2 of what is narrow, as a part of the height */
  LOOKED_AT = 4, /* longest kinds beside which ranks may be idle */
  LIMIT_BITS = 61
};

#define MOST ((int64_t)1 << LIMIT_BITS)

/* Kinds, densest first. Sums of all up to this one. */
typedef struct dense {
  int64_t rate; /* work per row, rounded up, and at least that of those after it */
  int64_t rows;
  int64_t work; /* at that rate */
} dense;

/* Sequences as they are when no micro-batch is higher than some height. */
typedef struct level {
  dense *kinds;      /* those before head: at degrees fast enough */
  int32_t head;      /* the others have their least degrees */
  int64_t area;      /* of all that some degree makes fast enough */
  int64_t must_rows; /* of those that no degree does */
} level;

typedef struct lockstep {
  const hcp__problem *p;
  int64_t *slowest; /* kinds: longest time at least degrees, of it and those after it */
  dense *least;     /* kinds: at least degrees */
  int64_t *area;    /* kinds: of all up to this one, at least degrees */
  level now;
  int32_t bundle_count;
  int64_t bundles[BUNDLES]; /* micro-batches in each, tallest first */
  int32_t level_count;
  int64_t bottoms[LEVELS], tops[LEVELS];
  int64_t left[BUNDLES][LEVELS]; /* -1: what must be before does not fit there */
} lockstep;

static int64_t saturated(hcp__wide value) { return value < MOST ? (int64_t)value : MOST; }

/* Micro-batches that every plan needs to hold all rows. */
static int64_t waves_needed(const hcp__problem *p) {
  int64_t rows = p->capacity * p->limits->ranks;
  return p->tokens / rows + (p->tokens % rows != 0);
}

/* ---- sequences under a height ---- */

static int64_t rate_of(int64_t area, int64_t length) {
  return area / length + (area % length != 0);
}

/* Rates become at least those after them, so that what some rows hold at these rates
 * is never less than what they can; then sums. after: the rate that follows the last. */
static void sum_up(dense *kinds, int32_t count, int64_t after) {
  for (int32_t k = count - 1; k >= 0; k--) {
    if (kinds[k].rate < after) kinds[k].rate = after;
    after = kinds[k].rate;
  }
  for (int32_t k = 0; k < count; k++) {
    kinds[k].work = saturated((hcp__wide)kinds[k].rate * kinds[k].rows);
    if (k == 0) continue;
    kinds[k].rows += kinds[k - 1].rows;
    kinds[k].work = saturated((hcp__wide)kinds[k].work + kinds[k - 1].work);
  }
}

static void make_least(lockstep *l) {
  const hcp__problem *p = l->p;
  int64_t slowest = 0, area = 0;
  for (int32_t k = p->kind_count - 1; k >= 0; k--) {
    const hcp__kind *kind = &p->kinds[k];
    const hcp__option *option = hcp__leanest(p, kind);
    if (option->time_floor > slowest) slowest = option->time_floor;
    l->slowest[k] = slowest;
    l->least[k] =
        (dense){rate_of(option->area_floor, kind->size.length), kind->size.length * kind->count, 0};
  }
  sum_up(l->least, p->kind_count, 0);
  for (int32_t k = 0; k < p->kind_count; k++) {
    area += hcp__leanest(p, &p->kinds[k])->area_floor * p->kinds[k].count;
    l->area[k] = area;
  }
}

/* Kinds before this one may need more than their least degree. */
static int32_t head_of(const lockstep *l, int64_t height) {
  int32_t low = 0, high = l->p->kind_count;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (l->slowest[middle] > height)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static void look_at(lockstep *l, int64_t height) {
  const hcp__problem *p = l->p;
  level *now = &l->now;
  int32_t last = p->kind_count - 1;
  hcp__wide area = 0;
  now->head = head_of(l, height);
  now->must_rows = 0;
  for (int32_t k = 0; k < now->head; k++) {
    const hcp__kind *kind = &p->kinds[k];
    const hcp__option *option = hcp__first_within(p, kind, height);
    int64_t rows = kind->size.length * kind->count;
    now->kinds[k] = option == NULL
                        ? (dense){0, 0, 0}
                        : (dense){rate_of(option->area_floor, kind->size.length), rows, 0};
    if (option == NULL)
      now->must_rows += rows;
    else
      area += (hcp__wide)option->area_floor * kind->count;
  }
  sum_up(now->kinds, now->head, now->head <= last ? l->least[now->head].rate : 0);
  area += l->area[last] - (now->head > 0 ? l->area[now->head - 1] : 0);
  now->area = saturated(area);
}

/* Work of whole kinds from first on, and of part of the next. */
static int64_t work_of(const dense *kinds, int32_t first, int32_t count, int64_t rows) {
  int64_t rows_before = first > 0 ? kinds[first - 1].rows : 0;
  int64_t work_before = first > 0 ? kinds[first - 1].work : 0;
  int32_t low = first, high = count; /* the first that does not fit */
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (kinds[middle].rows - rows_before <= rows)
      low = middle + 1;
    else
      high = middle;
  }
  int64_t whole = low > first ? kinds[low - 1].work - work_before : 0;
  int64_t left = rows - (low > first ? kinds[low - 1].rows - rows_before : 0);
  return low == count ? whole : saturated(whole + (hcp__wide)kinds[low].rate * left);
}

/* At least the most work that rows hold. */
static int64_t densest(const lockstep *l, int64_t rows) {
  const level *now = &l->now;
  int64_t head_rows = now->head > 0 ? now->kinds[now->head - 1].rows : 0;
  if (rows <= head_rows) return work_of(now->kinds, 0, now->head, rows);
  int64_t head_work = now->head > 0 ? now->kinds[now->head - 1].work : 0;
  int64_t rest = work_of(l->least, now->head, l->p->kind_count, rows - head_rows);
  return saturated((hcp__wide)head_work + rest);
}

/* Least work that micro-batches of so many rows leave, -1: they cannot hold what
 * must be in them. */
static int64_t left_by(const lockstep *l, int64_t rows) {
  if (rows < l->now.must_rows) return -1;
  int64_t held = densest(l, rows - l->now.must_rows);
  return held < l->now.area ? l->now.area - held : 0;
}

/* ---- the tallest ---- */

/* Rank-time that the micro-batch with a sequence of the kind leaves idle, and that the
 * sequence takes beyond its least. Let it have degree d and time T. Its micro-batch
 * is h >= T high. Of the N h rank-time there, its own d ranks compute nothing else
 * for T; the other N - d ranks compute at most (N - d) h, and at most what their
 * (N - d) C rows hold of the densest work. Raising h by one adds N to the rank-time
 * and at most N to what may fill it, so that h = T is least. */
static int64_t idle_beside(const lockstep *l, const hcp__kind *kind, int64_t height) {
  const hcp__problem *p = l->p;
  const hcp__choices *all = hcp__choices_of(p, kind);
  const hcp__option *own = hcp__first_within(p, kind, height), *end = all->options + all->count;
  int64_t ranks = p->limits->ranks, least = MOST;
  if (all->pruned || own == NULL) return 0;
  for (const hcp__option *o = own; o < end && o->area_floor - own->area_floor < least; o++) {
    int64_t others = ranks - o->least_degree, rows = p->capacity * others;
    hcp__wide room = (hcp__wide)others * o->time_floor;
    int64_t work = densest(l, rows);
    /* Without the sequence itself, when it is among the densest. */
    int64_t without = densest(l, rows + kind->size.length) - own->area_floor;
    if (without < work) work = without;
    if (work > room) work = (int64_t)room;
    int64_t idle = saturated((hcp__wide)ranks * o->time_floor - own->area_floor - work);
    if (idle < least) least = idle;
  }
  return least < 0 ? 0 : least;
}

/* s(1, H) for H from bottom to top is no less, whatever must be in so many micro-batches. */
static int64_t heights_alone(const lockstep *l, int64_t bottom, int64_t below) {
  return saturated((hcp__wide)bottom + (hcp__wide)l->bundles[0] * l->p->cost->launch + below);
}

/* s(1, H) for H from bottom to top. */
static int64_t tallest(lockstep *l, int64_t bottom, int64_t top, int64_t below) {
  const hcp__problem *p = l->p;
  int64_t idle = 0, sum = heights_alone(l, bottom, below);
  look_at(l, top);
  if (l->now.must_rows > 0) return MOST;
  for (int32_t k = 0; k < p->kind_count && k < LOOKED_AT; k++) {
    int64_t one = idle_beside(l, &p->kinds[k], top);
    if (one > idle) idle = one;
  }
  int64_t work = saturated((hcp__wide)l->now.area + idle) / p->limits->ranks;
  work = saturated((hcp__wide)work + waves_needed(p) * (hcp__wide)p->cost->launch);
  return work > sum ? work : sum;
}

/* ---- all of them ---- */

static void make_bundles(lockstep *l) {
  int64_t left = waves_needed(l->p);
  for (l->bundle_count = 0; left > 0; l->bundle_count++) {
    int32_t open = BUNDLES - l->bundle_count;
    int64_t waves = l->bundle_count < SINGLE ? 1 : (left + open - 1) / open;
    l->bundles[l->bundle_count] = waves;
    left -= waves;
  }
}

static void make_levels(lockstep *l) {
  int64_t top = MOST, bottom = l->slowest[0];
  int32_t most = l->p->kind_count > MANY ? FEW_LEVELS : LEVELS;
  for (l->level_count = 0; l->level_count < most && top > 0; l->level_count++) {
    l->tops[l->level_count] = top;
    l->bottoms[l->level_count] = bottom;
    top = bottom - 1;
    bottom = top - top / STEP;
  }
  l->bottoms[l->level_count - 1] = 0;
}

/* The lowest level first: options are made once then. */
static void make_left(lockstep *l) {
  for (int32_t g = l->level_count - 1; g >= 0; g--) {
    hcp__wide rows = 0;
    look_at(l, l->tops[g]);
    for (int32_t i = 0; i < l->bundle_count; i++) {
      l->left[i][g] = left_by(l, saturated(rows));
      rows += (hcp__wide)l->bundles[i] * l->p->capacity * l->p->limits->ranks;
    }
  }
}

/* sums[g], the least s(i + 1, H') for H' in the level or below, becomes s(i, H) for H
 * in the level, and then the least of it and those below. The others of a bundle are
 * as high as the first of the next one, at least. */
static void add_bundle(const lockstep *l, int32_t i, int64_t launches, int64_t *sums) {
  int64_t least = MOST, own = saturated((hcp__wide)l->bundles[i] * l->p->cost->launch);
  for (int32_t g = l->level_count - 1; g >= 0; g--) {
    int64_t high = saturated((hcp__wide)l->bottoms[g] + own + sums[g]);
    int64_t wide = saturated((hcp__wide)(l->left[i][g] / l->p->limits->ranks) + launches);
    int64_t sum = l->left[i][g] < 0 ? MOST : wide > high ? wide : high;
    if (i > 0) sum = saturated(sum + (hcp__wide)l->bottoms[g] * (l->bundles[i - 1] - 1));
    if (sum < least) least = sum;
    sums[g] = least;
  }
}

/* Heights of the tallest from bottom to top, the least sum of those below it, and of all: no less
 * than that until it was looked at. */
typedef struct interval {
  int64_t bottom, top, below, sum;
  int32_t seen;
} interval;

static interval interval_of(const lockstep *l, int64_t bottom, int64_t top, int64_t below) {
  return (interval){bottom, top, below, heights_alone(l, bottom, below), 0};
}

/* The one of the least sum, looked at. */
static interval *deciding(lockstep *l, interval *all, int32_t count) {
  for (;;) {
    interval *least = all;
    for (interval *i = all; i < all + count; i++)
      if (i->sum < least->sum) least = i;
    if (least->seen) return least;
    least->sum = tallest(l, least->bottom, least->top, least->below);
    least->seen = 1;
  }
}

/* Halves the interval that decides, again and again. */
static int64_t split(lockstep *l, const int64_t *below) {
  interval all[LEVELS + SPLITS];
  int32_t count = 0;
  do all[count] = interval_of(l, l->bottoms[count], l->tops[count], below[count]);
  while (++count < l->level_count);
  for (;;) {
    interval *least = deciding(l, all, count);
    int64_t width = least->top - least->bottom;
    if (count == LEVELS + SPLITS || least->sum <= l->p->bound || least->top == MOST ||
        width <= least->top >> NARROW)
      return least->sum;
    int64_t middle = least->bottom + width / 2 + 1;
    all[count++] = interval_of(l, middle, least->top, least->below);
    *least = interval_of(l, least->bottom, middle - 1, least->below);
  }
}

static int64_t lockstep_bound(lockstep *l) {
  int64_t below[LEVELS] = {0}, launches = 0;
  make_least(l);
  make_bundles(l);
  make_levels(l);
  make_left(l);
  for (int32_t i = l->bundle_count - 1; i > 0; i--) {
    launches = saturated(launches + (hcp__wide)l->bundles[i] * l->p->cost->launch);
    add_bundle(l, i, launches, below);
  }
  return split(l, below);
}

hcp_status hcp__lockstep_bound(hcp__problem *p, hcp_error *err) {
  lockstep l = {.p = p};
  size_t count = (size_t)p->kind_count + 1;
  l.slowest = calloc(count, sizeof *l.slowest);
  l.least = malloc(count * sizeof *l.least);
  l.area = malloc(count * sizeof *l.area);
  l.now.kinds = malloc(count * sizeof *l.now.kinds);
  hcp_status status = HCP_OK;
  if (l.slowest == NULL || l.least == NULL || l.area == NULL || l.now.kinds == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", p->n);
  } else {
    int64_t bound = lockstep_bound(&l);
    if (bound > p->bound && bound < MOST) p->bound = bound;
  }
  free(l.now.kinds);
  free(l.area);
  free(l.least);
  free(l.slowest);
  return status;
}
