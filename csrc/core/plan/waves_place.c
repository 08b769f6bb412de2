/* waves_place.c - micro-batches that are filled get their ranks: groups are widened
 * onto the ranks left over, then stand side by side. */
#include <stdlib.h>

#include "plan.h"

/* Sequences that widening may price again for one micro-batch. */
enum { WIDEN = 4096 };

/* Blocks of one micro-batch. */
typedef struct wave {
  hcp__block **blocks;
  int32_t count;
} wave;

/* ---- widening ---- */

static int64_t time_at(const hcp__problem *p, const hcp__blocks *blocks, const hcp__block *block,
                       int32_t degree) {
  int64_t time = 0;
  for (int32_t s = block->first; s >= 0; s = blocks->next[s]) {
    if (hcp__load(p, s, degree) > p->capacity) return INT64_MAX;
    int64_t one = hcp__cost(p->cost, hcp__size_at(p, s), degree, p->limits->ranks_per_node);
    if (one < 1) return INT64_MAX;
    time += one;
  }
  return time;
}

static int64_t rows_at(const hcp__problem *p, const hcp__blocks *blocks, const hcp__block *block,
                       int32_t degree) {
  int64_t rows = 0;
  for (int32_t s = block->first; s >= 0; s = blocks->next[s]) rows += hcp__load(p, s, degree);
  return rows;
}

/* The least wider degree that makes the group faster, 0: none. */
static int32_t wider(const hcp__problem *p, const hcp__blocks *blocks, const hcp__block *block,
                     int32_t most, int64_t *time, int32_t *budget) {
  for (int32_t d = block->degree + 1; d <= most && *budget > 0; d++) {
    if (!hcp__degree_allowed(p->limits, p->cost, d)) continue;
    *budget -= block->sequences;
    *time = time_at(p, blocks, block, d);
    if (*time < block->end && rows_at(p, blocks, block, d) <= p->capacity) return d;
  }
  return 0;
}

static hcp__block *slowest(const wave *w) {
  hcp__block *worst = w->blocks[0];
  for (int32_t i = 1; i < w->count; i++)
    if (w->blocks[i]->end > worst->end) worst = w->blocks[i];
  return worst;
}

/* The next rank goes to the slowest group: for fixed groups whose times fall
 * with the degree, no other division of the ranks ends sooner. */
static void widen(const hcp__problem *p, const hcp__blocks *blocks, const wave *w) {
  int32_t budget = WIDEN, left = p->limits->ranks;
  for (int32_t i = 0; i < w->count; i++) left -= w->blocks[i]->degree;
  while (left > 0 && budget > 0) {
    int64_t time;
    hcp__block *block = slowest(w);
    int32_t degree = wider(p, blocks, block, block->degree + left, &time, &budget);
    if (degree == 0) return;
    left -= degree - block->degree;
    block->rows = rows_at(p, blocks, block, degree);
    block->degree = degree;
    block->end = time;
    budget -= 16;
  }
}

/* ---- places ---- */

/* The next free rank of each node, those of groups wider than a node first. */
typedef struct places {
  int32_t *next;
  int32_t nodes, node_ranks, used_whole;
} places;

static int place_one(const hcp__problem *p, places *at, hcp__block *block) {
  if (block->degree > at->node_ranks) {
    block->first_rank = at->used_whole;
    at->used_whole += block->degree;
    return 1;
  }
  for (int32_t node = at->used_whole / at->node_ranks; node < at->nodes; node++) {
    int32_t end = (node + 1) * at->node_ranks;
    if (end > p->limits->ranks) end = p->limits->ranks;
    if (at->next[node] + block->degree > end) continue;
    block->first_rank = at->next[node];
    at->next[node] += block->degree;
    return 1;
  }
  return 0;
}

static int widest_first(const void *left, const void *right) {
  const hcp__block *const *a = left, *const *b = right;
  if ((*a)->micro_batch != (*b)->micro_batch) return (*a)->micro_batch < (*b)->micro_batch ? -1 : 1;
  if ((*a)->degree != (*b)->degree) return (*a)->degree > (*b)->degree ? -1 : 1;
  return (*a > *b) - (*a < *b);
}

/* Ranks from the left of each node, widest groups first. */
static int place_wave(const hcp__problem *p, places *at, const wave *w) {
  at->used_whole = 0;
  for (int32_t node = 0; node < at->nodes; node++) at->next[node] = node * at->node_ranks;
  for (int32_t i = 0; i < w->count; i++)
    if (!place_one(p, at, w->blocks[i])) return 0;
  return 1;
}

hcp_status hcp__place_waves(const hcp__problem *p, hcp__blocks *blocks, int32_t *placed,
                            hcp_error *err) {
  int32_t node = p->limits->ranks_per_node, ranks = p->limits->ranks;
  places at = {.node_ranks = node > 0 && node < ranks ? node : ranks};
  at.nodes = (ranks + at.node_ranks - 1) / at.node_ranks;
  at.next = malloc((size_t)at.nodes * sizeof *at.next);
  hcp__block **order = malloc(((size_t)blocks->count + 1) * sizeof *order);
  *placed = at.next != NULL && order != NULL;
  hcp_status status =
      *placed ? HCP_OK
              : hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d groups", blocks->count);
  for (int32_t b = 0; *placed && b < blocks->count; b++) order[b] = &blocks->block[b];
  if (*placed) qsort(order, (size_t)blocks->count, sizeof *order, widest_first);
  for (int32_t i = 0, count; *placed && i < blocks->count; i += count) {
    for (count = 1;
         i + count < blocks->count && order[i + count]->micro_batch == order[i]->micro_batch;)
      count++;
    wave w = {order + i, count};
    if (at.nodes == 1) {
      widen(p, blocks, &w);
      qsort(w.blocks, (size_t)count, sizeof *w.blocks, widest_first);
    }
    *placed = place_wave(p, &at, &w);
  }
  free(order);
  free(at.next);
  return status;
}
