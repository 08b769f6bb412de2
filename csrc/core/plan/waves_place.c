/* waves_place.c - micro-batches that are filled get their ranks: groups are widened
 * onto the ranks left over, then stand side by side. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* Sequences that widening may price again for one micro-batch. */
enum { WIDEN = 4096 };

/* Blocks of one micro-batch. */
typedef struct wave {
  hcp__block **blocks;
  int32_t count;
} wave;

/* ---- together ---- */

/* Groups of one degree, one node after the other; 0: not all stand. */
static int fill_nodes(int32_t degree, int32_t count, int32_t node, int32_t *room) {
  for (int32_t left = degree; left <= node && count > 0;) {
    if (room[left] == 0) {
      left++;
      continue;
    }
    int32_t held = left / degree < count ? left / degree : count;
    room[left]--;
    room[left - held * degree]++;
    count -= held;
  }
  return count == 0;
}

int32_t hcp__stand_together(const hcp_limits *limits, const int32_t *counts, int32_t *room) {
  int32_t node = hcp__node_ranks(limits), nodes = limits->ranks / node;
  int64_t whole = 0;
  for (int32_t i = 2; i <= nodes; i++) whole += (int64_t)counts[(ptrdiff_t)i * node] * i;
  if (whole > nodes) return 0;
  memset(room, 0, ((size_t)node + 1) * sizeof *room); /* nodes with so many ranks free */
  room[node] = nodes - (int32_t)whole;
  room[limits->ranks % node]++;
  for (int32_t degree = node; degree > 0; degree--)
    if (counts[degree] > 0 && !fill_nodes(degree, counts[degree], node, room)) return 0;
  return 1;
}

/* ---- widening ---- */

static int64_t time_at(const hcp__problem *p, const hcp__blocks *blocks, const hcp__block *block,
                       int32_t degree) {
  int64_t time = 0;
  for (int32_t s = block->first; s >= 0; s = blocks->next[s]) {
    if (hcp__load(p, s, degree) > p->capacity) return INT64_MAX;
    int64_t one = hcp__cost(p->cost, hcp__size_at(p, s), degree, p->limits->ranks_per_node);
    if (one < 1) return INT64_MAX;
    time = hcp__sum(time, one);
  }
  return time;
}

static int64_t rows_at(const hcp__problem *p, const hcp__blocks *blocks, const hcp__block *block,
                       int32_t degree) {
  int64_t rows = 0;
  for (int32_t s = block->first; s >= 0; s = blocks->next[s]) rows += hcp__load(p, s, degree);
  return rows;
}

/* How many groups of a micro-batch have each degree; ranks + 1, and as many of scratch. */
typedef struct degrees {
  int32_t *counts, *room;
} degrees;

/* Whether the groups still stand beside each other when one has another degree. */
static int fits(const hcp__problem *p, const degrees *all, int32_t from, int32_t to) {
  if (hcp__node_ranks(p->limits) == p->limits->ranks) return 1; /* `most` counts its ranks */
  all->counts[from]--;
  all->counts[to]++;
  int32_t stand = hcp__stand_together(p->limits, all->counts, all->room);
  all->counts[from]++;
  all->counts[to]--;
  return stand;
}

/* The least wider degree that makes the group faster, 0: none. */
static int32_t wider(const hcp__problem *p, const hcp__blocks *blocks, const hcp__block *block,
                     int32_t most, const degrees *all, int64_t *time, int32_t *budget) {
  for (int32_t d = block->degree + 1; d <= most && *budget > 0; d++) {
    if (!hcp__degree_allowed(p->limits, p->cost, d) || !fits(p, all, block->degree, d)) continue;
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
static void widen(const hcp__problem *p, const hcp__blocks *blocks, const wave *w,
                  const degrees *all) {
  int32_t budget = WIDEN, left = p->limits->ranks;
  memset(all->counts, 0, ((size_t)p->limits->ranks + 1) * sizeof *all->counts);
  for (int32_t i = 0; i < w->count; i++) {
    left -= w->blocks[i]->degree;
    all->counts[w->blocks[i]->degree]++;
  }
  while (left > 0 && budget > 0) {
    int64_t time;
    hcp__block *block = slowest(w);
    int32_t degree = wider(p, blocks, block, block->degree + left, all, &time, &budget);
    if (degree == 0) return;
    all->counts[block->degree]--;
    all->counts[degree]++;
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
  int32_t best = -1, least = at->node_ranks + 1;
  for (int32_t node = at->used_whole / at->node_ranks; node < at->nodes; node++) {
    int32_t end = (node + 1) * at->node_ranks;
    int32_t left = (end < p->limits->ranks ? end : p->limits->ranks) - at->next[node];
    if (left < block->degree || left >= least) continue;
    best = node;
    least = left;
  }
  if (best < 0) return 0;
  block->first_rank = at->next[best];
  at->next[best] += block->degree;
  return 1;
}

static int widest_first(const void *left, const void *right) {
  const hcp__block *const *a = left, *const *b = right;
  if ((*a)->micro_batch != (*b)->micro_batch) return (*a)->micro_batch < (*b)->micro_batch ? -1 : 1;
  if ((*a)->degree != (*b)->degree) return (*a)->degree > (*b)->degree ? -1 : 1;
  return (*a > *b) - (*a < *b);
}

/* Ranks from the left of each node, widest groups first, as in hcp__stand_together. */
static int place_wave(const hcp__problem *p, places *at, const wave *w) {
  at->used_whole = 0;
  for (int32_t node = 0; node < at->nodes; node++) at->next[node] = node * at->node_ranks;
  for (int32_t i = 0; i < w->count; i++)
    if (!place_one(p, at, w->blocks[i])) return 0;
  return 1;
}

hcp_status hcp__place_waves(const hcp__problem *p, hcp__blocks *blocks, int32_t *placed,
                            hcp_error *err) {
  size_t ranks = (size_t)p->limits->ranks;
  places at = {.node_ranks = hcp__node_ranks(p->limits)};
  at.nodes = (p->limits->ranks + at.node_ranks - 1) / at.node_ranks;
  at.next = malloc((size_t)at.nodes * sizeof *at.next);
  degrees all = {.counts = malloc(2 * (ranks + 1) * sizeof *all.counts)};
  hcp__block **order = malloc(((size_t)blocks->count + 1) * sizeof *order);
  hcp_status status = HCP_OK;
  *placed = 0;
  if (at.next == NULL || all.counts == NULL || order == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d groups", blocks->count);
    goto done;
  }
  all.room = all.counts + ranks + 1;
  *placed = 1;
  for (int32_t b = 0; b < blocks->count; b++) order[b] = &blocks->block[b];
  qsort(order, (size_t)blocks->count, sizeof *order, widest_first);
  for (int32_t i = 0, count; *placed && i < blocks->count; i += count) {
    for (count = 1;
         i + count < blocks->count && order[i + count]->micro_batch == order[i]->micro_batch;)
      count++;
    wave w = {order + i, count};
    status = hcp__go_on(p, err);
    if (status != HCP_OK) break;
    widen(p, blocks, &w, &all);
    qsort(w.blocks, (size_t)count, sizeof *w.blocks, widest_first);
    *placed = place_wave(p, &at, &w);
  }
done:
  free(order);
  free(all.counts);
  free(at.next);
  return status;
}
