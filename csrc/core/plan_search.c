/* plan_search.c - several plans for one request, of which the best is kept.
 *
 * What is tried does not depend on time: a target around the bound for lists, a
 * count of micro-batches and the least height that holds all for waves. */
#include <stdlib.h>

#include "internal.h"

enum {
  TARGET_UNIT = 64,   /* of the bound */
  LARGE = 1 << 16,    /* sequences from which fewer plans are tried */
  WAVE_COUNTS = 6,    /* counts of micro-batches tried beyond the least */
  HALVINGS = 12       /* of the interval of heights */
};

/* In 1/TARGET_UNIT of the bound, the most promising first. */
static const int32_t targets[] = {64, 60, 48, 32, 72, 56, 40, 96, 24, 80, 16, 128};

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

static hcp_status try_list(search *s, int64_t target, int32_t nested, hcp_error *err) {
  hcp_status status = hcp__plan_list(s->p, target, nested, &s->blocks, err);
  if (status == HCP_OK)
    status = hcp__draft_by_start(&s->draft, &s->blocks, s->p->limits->ranks, err);
  return status == HCP_OK ? judge(s, err) : status;
}

static hcp_status try_lists(search *s, hcp_error *err) {
  int32_t count = (int32_t)(sizeof targets / sizeof *targets);
  if (s->p->n >= LARGE) count = 2;
  for (int32_t i = 0; i < count && !is_done(s); i++) {
    int64_t target = s->p->bound / TARGET_UNIT * targets[i] - s->p->cost->launch;
    for (int32_t nested = 0; nested < 2; nested++) {
      hcp_status status = try_list(s, target > 1 ? target : 1, nested, err);
      if (status != HCP_OK) return status;
    }
  }
  return HCP_OK;
}

/* ---- waves ---- */

static hcp_status try_waves(search *s, int32_t count, int64_t height, int32_t slope, int32_t *fits,
                            hcp_error *err) {
  hcp_status status = hcp__plan_waves(s->p, count, height, slope, &s->blocks, fits, err);
  if (status != HCP_OK || !*fits) return status;
  status = hcp__draft_by_micro_batch(&s->draft, &s->blocks, err);
  return status == HCP_OK ? judge(s, err) : status;
}

/* The least height at which count micro-batches hold all. */
static hcp_status try_count(search *s, int32_t count, int32_t slope, hcp_error *err) {
  int64_t low = s->p->work / s->p->limits->ranks / count, high = low + low / 16 + 1;
  int32_t fits = 0;
  for (int32_t doublings = 0; !fits; doublings++) {
    hcp_status status = try_waves(s, count, high, slope, &fits, err);
    if (status != HCP_OK || (!fits && doublings == 2 * HALVINGS)) return status;
    if (!fits) {
      low = high;
      high += high / 2;
    }
  }
  for (int32_t i = 0; i < HALVINGS && high - low > low >> 9; i++) {
    int64_t middle = low + (high - low) / 2;
    hcp_status status = try_waves(s, count, middle, slope, &fits, err);
    if (status != HCP_OK) return status;
    if (fits)
      high = middle;
    else
      low = middle;
  }
  return HCP_OK;
}

static hcp_status try_all_waves(search *s, int32_t counts, hcp_error *err) {
  static const int32_t slopes[] = {0, 4, 7};
  int64_t rows = s->p->capacity * s->p->limits->ranks;
  int32_t least = (int32_t)(s->p->tokens / rows + (s->p->tokens % rows != 0));
  int32_t shapes = s->p->n >= LARGE ? 1 : 3;
  for (int32_t i = 0; i < counts && !is_done(s) && least + i <= s->p->n; i++)
    for (int32_t j = 0; j < (least + i > 1 ? shapes : 1); j++) {
      hcp_status status = try_count(s, least + i, slopes[j], err);
      if (status != HCP_OK) return status;
    }
  return HCP_OK;
}

/* ---- both ---- */

static hcp_status run(search *s, hcp_error *err) {
  if (s->p->limits->sync == HCP_SYNC_MICRO_BATCH) {
    hcp_status status = try_list(s, s->p->bound, 0, err); /* always ends with a plan */
    return status == HCP_OK ? try_all_waves(s, WAVE_COUNTS * s->effort, err) : status;
  }
  return try_lists(s, err);
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
