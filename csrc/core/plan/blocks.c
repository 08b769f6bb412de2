/* blocks.c - groups while they are filled, and the plan that they make. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* ---- blocks ---- */

hcp_status hcp__blocks_init(hcp__blocks *blocks, int32_t n, hcp_error *err) {
  blocks->count = 0;
  blocks->placed_on = NULL;
  blocks->block = malloc(((size_t)n + 1) * sizeof *blocks->block);
  blocks->next = malloc(((size_t)n + 1) * sizeof *blocks->next);
  if (blocks->block != NULL && blocks->next != NULL) return HCP_OK;
  hcp__blocks_release(blocks);
  return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", n);
}

void hcp__blocks_release(hcp__blocks *blocks) {
  free(blocks->next);
  free(blocks->block);
  *blocks = (hcp__blocks){0};
}

int32_t hcp__block_open(hcp__blocks *blocks, int32_t first_rank, int32_t degree, int64_t start,
                        int64_t launch) {
  int32_t b = blocks->count++;
  const hcp_limits *limits = blocks->placed_on;
  int32_t slowness = limits == NULL ? HCP_FULL_SPEED : hcp__slowness(limits, first_rank, degree);
  blocks->block[b] = (hcp__block){.start = start,
                                  .end = hcp__sum(start, hcp__slowed(launch, slowness)),
                                  .slowness = slowness,
                                  .first_rank = first_rank,
                                  .degree = degree,
                                  .first = -1,
                                  .last = -1};
  return b;
}

void hcp__block_add(hcp__blocks *blocks, int32_t b, int32_t sequence, int64_t rows, int64_t time) {
  hcp__block *block = &blocks->block[b];
  blocks->next[sequence] = -1;
  if (block->last >= 0)
    blocks->next[block->last] = sequence;
  else
    block->first = sequence;
  block->last = sequence;
  block->sequences++;
  block->rows += rows;
  block->end = hcp__sum(block->end, hcp__slowed(time, block->slowness));
}

/* ---- draft ---- */

hcp_status hcp__draft_init(hcp__draft *draft, int32_t n, hcp_error *err) {
  *draft = (hcp__draft){0};
  draft->micro_batches = malloc(((size_t)n + 1) * sizeof *draft->micro_batches);
  draft->groups = malloc(((size_t)n + 1) * sizeof *draft->groups);
  draft->sequences = malloc(((size_t)n + 1) * sizeof *draft->sequences);
  if (draft->micro_batches != NULL && draft->groups != NULL && draft->sequences != NULL)
    return HCP_OK;
  hcp__draft_release(draft);
  return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", n);
}

void hcp__draft_release(hcp__draft *draft) {
  free(draft->sequences);
  free(draft->groups);
  free(draft->micro_batches);
  *draft = (hcp__draft){0};
}

/* ---- order ---- */

typedef struct entry {
  int64_t key;
  int32_t first_rank;
  int32_t block;
} entry;

static int by_key_and_rank(const void *left, const void *right) {
  const entry *a = left, *b = right;
  if (a->key != b->key) return a->key < b->key ? -1 : 1;
  return (a->first_rank > b->first_rank) - (a->first_rank < b->first_rank);
}

static void emit(hcp__draft *draft, const hcp__blocks *blocks, int32_t count, const entry *order) {
  int32_t sequence = 0;
  draft->micro_batch_count = 0;
  draft->group_count = count;
  for (int32_t i = 0; i < count; i++) {
    const hcp__block *b = &blocks->block[order[i].block];
    if (i == 0 || order[i].key != order[i - 1].key)
      draft->micro_batches[draft->micro_batch_count++] = (hcp_micro_batch){i, 0};
    draft->micro_batches[draft->micro_batch_count - 1].groups++;
    draft->groups[i] = (hcp_group){b->first_rank, b->degree, sequence, b->sequences};
    for (int32_t s = b->first; s >= 0; s = blocks->next[s]) draft->sequences[sequence++] = s;
  }
}

/* A block runs in the first micro-batch in which all its ranks are free. */
static void assign_micro_batches(const hcp__blocks *blocks, int32_t count, entry *order,
                                 int32_t *depth) {
  for (int32_t i = 0; i < count; i++) {
    const hcp__block *b = &blocks->block[order[i].block];
    int32_t batch = 0;
    for (int32_t r = b->first_rank; r < b->first_rank + b->degree; r++)
      if (depth[r] > batch) batch = depth[r];
    for (int32_t r = b->first_rank; r < b->first_rank + b->degree; r++) depth[r] = batch + 1;
    order[i].key = batch;
  }
}

/* The block that came last on all ranks of b, if those are its own; else -1. */
static int32_t before(const hcp__blocks *blocks, const hcp__block *b, const int32_t *last) {
  int32_t found = last[b->first_rank];
  if (found < 0 || blocks->block[found].degree != b->degree ||
      blocks->block[found].first_rank != b->first_rank)
    return -1;
  for (int32_t r = b->first_rank + 1; r < b->first_rank + b->degree; r++)
    if (last[r] != found) return -1;
  return found;
}

static void append(hcp__blocks *blocks, hcp__block *to, const hcp__block *from) {
  blocks->next[to->last] = from->first;
  to->last = from->last;
  to->rows += from->rows;
  to->sequences += from->sequences;
}

/* Blocks that follow each other on the same ranks become one where rows allow: it takes one launch,
 * and all other ranks launch once less beside it. Returns how many are left of the order. */
static int32_t join_blocks(hcp__blocks *blocks, int64_t capacity, entry *order, int32_t *last) {
  int32_t kept = 0;
  for (int32_t i = 0; i < blocks->count; i++) {
    hcp__block *b = &blocks->block[order[i].block];
    int32_t found = before(blocks, b, last);
    if (found >= 0 && b->rows <= capacity - blocks->block[found].rows) {
      append(blocks, &blocks->block[found], b);
      continue;
    }
    for (int32_t r = b->first_rank; r < b->first_rank + b->degree; r++) last[r] = order[i].block;
    order[kept++] = order[i];
  }
  return kept;
}

hcp_status hcp__draft_by_start(hcp__draft *draft, hcp__blocks *blocks, const hcp__problem *p,
                               hcp_error *err) {
  size_t count = (size_t)blocks->count, ranks = (size_t)p->limits->ranks;
  entry *order = malloc((count + 1) * sizeof *order);
  int32_t *depth = calloc(2 * ranks, sizeof *depth);
  hcp_status status = HCP_OK;
  if (order == NULL || depth == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d groups", blocks->count);
    goto done;
  }
  for (int32_t b = 0; b < blocks->count; b++)
    order[b] = (entry){blocks->block[b].start, blocks->block[b].first_rank, b};
  for (size_t r = 0; r < ranks; r++) depth[ranks + r] = -1;
  qsort(order, count, sizeof *order, by_key_and_rank);
  int32_t kept = join_blocks(blocks, p->capacity, order, depth + ranks);
  assign_micro_batches(blocks, kept, order, depth);
  qsort(order, (size_t)kept, sizeof *order, by_key_and_rank);
  emit(draft, blocks, kept, order);
done:
  free(depth);
  free(order);
  return status;
}

hcp_status hcp__draft_by_micro_batch(hcp__draft *draft, const hcp__blocks *blocks, hcp_error *err) {
  size_t count = (size_t)blocks->count;
  entry *order = malloc((count + 1) * sizeof *order);
  if (order == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d groups", blocks->count);
  for (int32_t b = 0; b < blocks->count; b++)
    order[b] = (entry){blocks->block[b].micro_batch, blocks->block[b].first_rank, b};
  qsort(order, count, sizeof *order, by_key_and_rank);
  emit(draft, blocks, blocks->count, order);
  free(order);
  return HCP_OK;
}

/* ---- time ---- */

int64_t hcp__time_of(const hcp_limits *limits, const hcp_cost *cost, const int64_t *lengths,
                     const hcp_group *group, const int32_t *sequences, int64_t *ends) {
  int32_t slowness = hcp__slowness(limits, group->first_rank, group->degree);
  int64_t work = 0, most = INT64_MAX / 2 - cost->launch, time;
  for (int32_t s = 0; s < group->sequences; s++) {
    hcp__size size = hcp__size_of(cost, lengths, sequences[s]);
    work = hcp__least(most, work + hcp__cost(cost, size, group->degree, limits->ranks_per_node));
    time = hcp__slowed(cost->launch + work, slowness);
    if (ends != NULL) ends[s] = hcp__least(INT64_MAX / 2, time);
  }
  time = hcp__least(INT64_MAX / 2, hcp__slowed(hcp__launched(cost, work), slowness));
  if (ends != NULL && group->sequences > 0) ends[group->sequences - 1] = time;
  return time;
}

int64_t hcp__launches(const hcp_limits *limits, const hcp_cost *cost, int32_t rank, int32_t count) {
  int64_t one = hcp__slowed(hcp__launched(cost, 0), hcp__slowness(limits, rank, 1));
  return hcp__least(INT64_MAX / 2, hcp__scaled(one, count, 1));
}

int64_t hcp__group_time(const hcp__draft *draft, const hcp__problem *p, const hcp_group *group) {
  const int32_t *sequences = draft->sequences + group->first_sequence;
  return hcp__time_of(p->limits, p->cost, p->lengths, group, sequences, NULL);
}
