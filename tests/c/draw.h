/* draw.h - random cases for C tests: a seed gives the same cases everywhere. */
#ifndef HCP_TESTS_DRAW_H
#define HCP_TESTS_DRAW_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "hcp/hcp.h"

static uint64_t draw_state = 0x9e3779b97f4a7c15u;

static inline uint64_t draw_bits(void) { /* xorshift64 */
  draw_state ^= draw_state << 13;
  draw_state ^= draw_state >> 7;
  draw_state ^= draw_state << 17;
  return draw_state;
}

/* low <= result <= high. One draw a statement: C leaves open in which order the elements of a list,
 * the arguments of a call and the sides of an operator are computed. */
static inline int32_t draw(int32_t low, int32_t high) {
  return low + (int32_t)(draw_bits() % (uint64_t)(high - low + 1));
}

/* The same, or 0. */
static inline int32_t maybe_draw(int32_t low, int32_t high) {
  return draw(0, 1) ? draw(low, high) : 0;
}

enum { DRAW_SEQUENCES = 12 };

static inline hcp_limits draw_limits(int32_t ranks, int32_t min_degree, int32_t max_degree,
                                     int64_t max_tokens_per_rank) {
  return (hcp_limits){.ranks = ranks,
                      .min_degree = min_degree,
                      .max_degree = max_degree,
                      .max_tokens_per_rank = max_tokens_per_rank};
}

typedef struct draw_case {
  int32_t n;
  int64_t lengths[DRAW_SEQUENCES];
  hcp_limits limits;
  hcp_cost cost;
} draw_case;

/* A request that has a plan. */
static inline draw_case draw_request(int32_t max_ranks) {
  draw_case c = {0};
  c.limits.ranks = draw(1, max_ranks);
  c.limits.min_degree = draw(1, c.limits.ranks);
  c.limits.max_degree = draw(c.limits.min_degree, c.limits.ranks);
  c.limits.max_tokens_per_rank = draw(3, 40);
  c.limits.sync = draw(0, 1) ? HCP_SYNC_STEP : HCP_SYNC_MICRO_BATCH;
  c.cost.pair = draw(1, 9);
  c.cost.token = draw(0, 99);
  c.cost.exchange = draw(0, 99);
  c.cost.launch = draw(0, 999);
  c.cost.all_to_all = maybe_draw(0, 99);
  c.cost.step = maybe_draw(0, 99);
  c.cost.window = maybe_draw(1, 50);
  c.cost.tile = maybe_draw(1, 8);
  c.cost.overlap = draw(0, 1);
  c.cost.host = maybe_draw(0, 4999);
  c.n = draw(0, DRAW_SEQUENCES);
  for (int32_t i = 0; i < c.n; i++)
    c.lengths[i] = draw(1, c.limits.max_degree * ((int32_t)c.limits.max_tokens_per_rank - 2));
  return c;
}

static inline hcp_plan *draw_plan(int32_t max_ranks) {
  hcp_plan *plan = NULL;
  draw_case c = draw_request(max_ranks);
  if (hcp_plan_create(c.lengths, c.n, &c.limits, &c.cost, 1, NULL, &plan, NULL) != HCP_OK) abort();
  return plan;
}

/* ---- trees ---- */

enum { DRAW_PARTS = 6, DRAW_LENGTH = 512 };

/* Where the parts of a tree begin, and the part that each continues, -1: none. */
typedef struct draw_tree {
  int32_t count;
  int32_t starts[DRAW_PARTS + 1], parents[DRAW_PARTS];
} draw_tree;

static inline draw_tree draw_parts(int32_t length) {
  draw_tree t = {.starts = {0}};
  for (int32_t left = draw(1, DRAW_PARTS); t.starts[t.count] < length; left--) {
    int32_t start = t.starts[t.count];
    t.parents[t.count] = draw(-1, t.count - 1);
    t.starts[++t.count] = left > 1 ? draw(start + 1, length) : length;
  }
  return t;
}

/* The token before one on its path, -1: none. */
static inline int32_t draw_before(const draw_tree *t, int32_t token) {
  for (int32_t p = 0; p < t->count; p++)
    if (t->starts[p] == token) return t->parents[p] < 0 ? -1 : t->starts[t->parents[p] + 1] - 1;
  return token - 1;
}

/* Gives each sequence of a plan the mask of a tree: a token sees its path. */
static inline void draw_trees(hcp_plan *plan, draw_tree *trees) {
  static hcp_slice slices[DRAW_SEQUENCES * DRAW_PARTS * DRAW_PARTS];
  static hcp_position_run runs[DRAW_SEQUENCES * DRAW_PARTS];
  int64_t first[DRAW_SEQUENCES + 1] = {0}, first_run[DRAW_SEQUENCES + 1] = {0}, n = 0, r = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    draw_tree *t = &trees[i];
    *t = draw_parts((int32_t)plan->lengths[i]);
    for (int32_t p = 0; p < t->count; p++, r++) {
      int64_t start = t->starts[p], end = t->starts[p + 1], far = plan->lengths[i];
      runs[r] = (hcp_position_run){start, 0};
      for (int32_t up = t->parents[p]; up >= 0; up = t->parents[up]) {
        slices[n++] = (hcp_slice){start, end, t->starts[up], t->starts[up + 1], -far, far};
        runs[r].position += t->starts[up + 1] - t->starts[up];
      }
      slices[n++] = (hcp_slice){start, end, start, end, -far, 0};
    }
    first[i + 1] = n;
    first_run[i + 1] = r;
  }
  hcp_masks masks = {first, slices, first_run, runs};
  if (hcp_plan_set_masks(plan, &masks, 1, NULL) != HCP_OK) abort();
}

/* ---- tables, read as a caller would ---- */

static inline const int64_t *section(const hcp_table *table, int32_t s) {
  return table->words + table->words[table->header_words + 2 * s];
}

static inline int64_t records(const hcp_table *table, int32_t s) {
  return table->words[table->header_words + 2 * s + 1];
}

/* Words of a table, some of them others and perhaps some of the last ones gone: *count of them,
 * which the caller frees. */
static inline int64_t *draw_spoiled(const hcp_table *table, int64_t *count) {
  static const int64_t values[] = {-1, 0, 1, 2, 9, INT64_MAX, INT64_MIN, (int64_t)1 << 56};
  *count = table->word_count - (draw(0, 9) == 0 ? draw(0, 30) : 0);
  int64_t *words = malloc((size_t)*count * sizeof *words);
  if (words == NULL) abort();
  memcpy(words, table->words, (size_t)*count * sizeof *words);
  for (int32_t i = draw(1, 3); i > 0; i--) {
    int32_t at = draw(0, (int32_t)*count - 1);
    words[at] = values[draw(0, 7)];
  }
  return words;
}

/* Copies the rows of a section of (row, rows), end to end; a row below 0 is a zero. Returns how
 * many there are. */
static inline int64_t gather_rows(const hcp_table *table, int32_t s, const int64_t *from,
                                  int64_t *to) {
  int64_t filled = 0;
  for (int64_t i = 0; i < records(table, s); i++) {
    const int64_t *segment = section(table, s) + 2 * i;
    for (int64_t r = 0; r < segment[1]; r++)
      to[filled++] = segment[0] < 0 ? 0 : from[segment[0] + r];
  }
  return filled;
}

#endif
