/* plan_search.c - several plans for one request, of which the best is kept.
 *
 * What is tried does not depend on time: a target around the bound for lists, a
 * count of micro-batches and the least height that holds all for waves. */
#include <stdlib.h>

#include "internal.h"

enum {
  TARGET_UNIT = 64,   /* of the bound */
  TARGETS = 12,
  MANY = 1 << 12,     /* sequences from which fewer plans are tried */
  LARGE = 1 << 15,    /* and fewer still */
  FEW = 256,          /* sequences up to which more are tried */
  FEW_COUNTS = 5,
  WAVE_COUNTS = 6,    /* counts of micro-batches tried beyond the least */
  PACKINGS = 8,        /* limits to which single ranks are packed */
  RAISES = 12,         /* of a height until it holds all */
  ROUGH_HALVINGS = 3, /* of the interval of heights, for every shape */
  FINE_HALVINGS = 6   /* and then for the best */
};

/* In 1/TARGET_UNIT of the bound, the most promising first. */
static const int32_t targets[TARGETS] = {64, 66, 60, 48, 69, 32, 74, 56, 40, 80, 24, 96};

typedef struct search {
  const hcp__problem *p;
  int32_t effort;
  hcp__blocks blocks;
  hcp__draft draft; /* of the latest attempt */
  hcp__draft *best;
  int64_t makespan;
} search;

/* ---- keeping the best ---- */

static void keep(search *s, int64_t makespan) {
  if (makespan > s->makespan) return;
  if (makespan == s->makespan && s->draft.micro_batch_count >= s->best->micro_batch_count) return;
  hcp__draft swap = *s->best;
  *s->best = s->draft;
  s->draft = swap;
  s->makespan = makespan;
}

static hcp_status judge(search *s, hcp_error *err) {
  int64_t makespan;
  hcp_status status = hcp__makespan(&s->draft, s->p, &makespan, err);
  if (status == HCP_OK) keep(s, makespan);
  return status;
}

/* Within 1/512 of the bound nothing is left to find. */
static int is_done(const search *s) { return s->makespan - s->p->bound <= s->p->bound >> 9; }

/* ---- lists ---- */

static hcp_status try_list(search *s, int64_t target, int32_t nested, int64_t limit,
                           hcp_error *err) {
  hcp_status status = hcp__plan_list(s->p, target > 1 ? target : 1, nested, limit, &s->blocks, err);
  if (status == HCP_OK)
    status = hcp__draft_by_start(&s->draft, &s->blocks, s->p->limits->ranks, err);
  return status == HCP_OK ? judge(s, err) : status;
}

static hcp_status try_lists(search *s, hcp_error *err) {
  int32_t count = TARGETS;
  int32_t nested_count = count;
  if (s->p->n >= MANY) {
    count = s->p->n >= LARGE ? 2 : 5;
    nested_count = s->p->n >= LARGE ? 0 : 1;
  }
  count *= s->effort;
  if (count > TARGETS) count = TARGETS;
  for (int32_t i = 0; i < count && !is_done(s); i++) {
    int64_t target = s->p->bound / TARGET_UNIT * targets[i] - s->p->cost->launch;
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

/* ---- waves ---- */

/* Where ranks need not wait, every second micro-batch turned around may start
 * earlier on the ranks that the one before leaves first. */
static int may_turn(const search *s) {
  return s->p->limits->sync == HCP_SYNC_STEP && !s->p->limits->pow2 &&
         s->p->limits->ranks_per_node == 0 && s->p->n <= FEW;
}

static void turn(search *s) {
  for (int32_t b = 0; b < s->blocks.count; b++) {
    hcp__block *block = &s->blocks.block[b];
    if (block->micro_batch % 2 == 1)
      block->first_rank = s->p->limits->ranks - block->first_rank - block->degree;
  }
}

/* Judges the blocks as they are, and turned. */
static hcp_status judge_waves(search *s, int64_t *makespan, hcp_error *err) {
  for (int32_t turned = 0; turned <= may_turn(s); turned++) {
    int64_t ends;
    if (turned) turn(s);
    hcp_status status = hcp__draft_by_micro_batch(&s->draft, &s->blocks, err);
    if (status == HCP_OK) status = hcp__makespan(&s->draft, s->p, &ends, err);
    if (status != HCP_OK) return status;
    if (ends < *makespan) *makespan = ends;
    keep(s, ends);
  }
  return HCP_OK;
}

/* Micro-batches of one count and profile; *high is the least height known to
 * hold all sequences, *low the largest known not to. */
typedef struct shape {
  int32_t count;
  int32_t slope;
  int32_t tall_first;
  int64_t low, high;
  int64_t makespan; /* the best seen */
} shape;

static hcp_status try_height(search *s, shape *tried, int64_t height, int32_t *fits,
                             hcp_error *err) {
  hcp_status status = hcp__plan_waves(s->p, tried->count, height, tried->slope, tried->tall_first,
                                      &s->blocks, fits, err);
  if (status != HCP_OK || !*fits) return status;
  return judge_waves(s, &tried->makespan, err);
}

static hcp_status halve(search *s, shape *tried, int32_t times, hcp_error *err) {
  for (int32_t i = 0; i < times && tried->high - tried->low > tried->low >> 9; i++) {
    int32_t fits;
    int64_t middle = tried->low + (tried->high - tried->low) / 2;
    hcp_status status = try_height(s, tried, middle, &fits, err);
    if (status != HCP_OK) return status;
    if (fits)
      tried->high = middle;
    else
      tried->low = middle;
  }
  return HCP_OK;
}

/* Some height that holds all, then a rough search for the least. */
static hcp_status try_shape(search *s, shape *tried, hcp_error *err) {
  int64_t mean = s->p->least / s->p->limits->ranks / tried->count;
  int32_t fits = 0;
  tried->makespan = INT64_MAX;
  tried->low = mean;
  tried->high = mean + mean / 8 * (1 + tried->slope) + 1;
  for (int32_t i = 0; i < RAISES && !fits; i++) {
    hcp_status status = try_height(s, tried, tried->high, &fits, err);
    if (status != HCP_OK) return status;
    if (fits) break;
    tried->low = tried->high;
    tried->high += tried->high / 2;
  }
  return fits ? halve(s, tried, ROUGH_HALVINGS, err) : HCP_OK;
}

static int32_t least_count(const search *s) {
  int64_t rows = s->p->capacity * s->p->limits->ranks;
  int64_t count = s->p->tokens / rows + (s->p->tokens % rows != 0);
  return count < INT32_MAX / 8 ? (int32_t)count : INT32_MAX / 8;
}

/* Scratch of a wave grows with the ranks: beyond this many, lists do. */
static int32_t most_count(const search *s) { return (1 << 24) / s->p->limits->ranks + 1; }

static hcp_status try_shelves(search *s, hcp_error *err) {
  int32_t most = least_count(s) > most_count(s) / 8 ? most_count(s) : 4 * least_count(s) + 16;
  static const int32_t heights[] = {0, 64, 56, 48, 40, 32, 24, 16, 12, 8, 80};
  for (int32_t i = 0; i < (int32_t)(sizeof heights / sizeof *heights); i++) {
    int32_t fits;
    int64_t target = s->p->bound / TARGET_UNIT * heights[i] - s->p->cost->launch;
    if (heights[i] == 0) target = HCP__NO_TARGET;
    hcp_status status =
        hcp__plan_shelves(s->p, most, target > 1 ? target : 1, &s->blocks, &fits, err);
    int64_t makespan = INT64_MAX;
    if (status == HCP_OK && fits) status = judge_waves(s, &makespan, err);
    if (status != HCP_OK) return status;
  }
  return HCP_OK;
}

static hcp_status try_all_waves(search *s, int32_t counts, hcp_error *err) {
  static const shape profiles[] = {{.slope = 0, .tall_first = 0},
                                   {.slope = 0, .tall_first = 1},
                                   {.slope = 4, .tall_first = 1},
                                   {.slope = 7, .tall_first = 1}};
  int32_t least = least_count(s);
  int32_t kinds = s->p->n >= LARGE ? 1 : s->p->n >= MANY ? 2 : 4;
  shape best = {.makespan = INT64_MAX};
  if (least > most_count(s)) return HCP_OK;
  for (int32_t i = 0; i < counts && !is_done(s) && least + i <= s->p->n; i++)
    for (int32_t j = 0; j < (least + i > 1 ? kinds : 1); j++) {
      shape tried = profiles[j];
      tried.count = least + i;
      hcp_status status = try_shape(s, &tried, err);
      if (status != HCP_OK) return status;
      if (tried.makespan < best.makespan) best = tried;
    }
  return best.makespan < INT64_MAX && !is_done(s) ? halve(s, &best, FINE_HALVINGS, err) : HCP_OK;
}

/* ---- both ---- */

static hcp_status run(search *s, hcp_error *err) {
  if (s->p->limits->sync == HCP_SYNC_MICRO_BATCH) {
    hcp_status status = try_list(s, s->p->bound, 0, 0, err); /* always ends with a plan */
    if (status == HCP_OK) status = try_shelves(s, err);
    return status == HCP_OK ? try_all_waves(s,
                                            (s->p->n >= LARGE  ? 1
                                             : s->p->n >= MANY ? 2
                                                               : WAVE_COUNTS) *
                                                s->effort,
                                            err)
                            : status;
  }
  hcp_status status = try_lists(s, err);
  /* Few long sequences: micro-batches of one height may end sooner. */
  if (status == HCP_OK && s->p->cost->launch > s->p->bound >> 6 && !is_done(s))
    status = try_packed(s, err);
  if (status == HCP_OK && s->makespan - s->p->bound > s->p->bound >> (s->p->n <= FEW ? 7 : 5) &&
      s->p->n < MANY * s->effort) {
    status = try_shelves(s, err);
    if (status == HCP_OK)
      status = try_all_waves(s, (s->p->n <= FEW ? FEW_COUNTS : 2) * s->effort, err);
  }
  return status;
}

hcp_status hcp__plan_search(const hcp__problem *p, int32_t effort, hcp__draft *draft,
                            hcp_error *err) {
  search s = {.p = p, .effort = effort, .best = draft, .makespan = INT64_MAX};
  if (p->n == 0) return HCP_OK;
  hcp_status status = hcp__blocks_init(&s.blocks, p->n, err);
  if (status != HCP_OK) return status;
  status = hcp__draft_init(&s.draft, p->n, err);
  if (status == HCP_OK) status = run(&s, err);
  hcp__draft_release(&s.draft);
  hcp__blocks_release(&s.blocks);
  return status;
}
