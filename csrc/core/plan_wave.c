/* plan_wave.c - plans whose ranks meet after every micro-batch.
 *
 * Each micro-batch is a box of all ranks and a height. Sequences, longest first,
 * go to the first box that takes them, with the least degree that ends within
 * its height: into a group that has rows and time left, or on ranks that are
 * still free. Those that need one rank fill what is left evenly, by time and by
 * rows, whichever is scarcer. Ranks left over widen the slowest groups.
 *
 * Either all boxes stand from the start, with one height or falling ones, or a
 * box is opened for a sequence that fits in none, as high as the sequence, or as
 * many of its length as a rank holds, need: then long ones meet long ones. */
#include <stdlib.h>

#include "internal.h"

/* Groups that a sequence looks at before it opens one, and after it could not;
 * sequences that widening may price again for one micro-batch; and sequences up
 * to which all groups are looked at. */
enum { LOOK = 24, LOOK_FAR = 192, WIDEN = 4096, BEST_FIT = 1024 };

/* A rank that no wide group has taken. */
typedef struct bin {
  int64_t fill; /* of height or capacity, in 2^-20 */
  int64_t load, rows;
  int32_t block; /* -1: none yet */
} bin;

typedef struct waves {
  const hcp__problem *p;
  hcp__blocks *blocks;
  int64_t *heights;    /* count, without launch */
  int32_t *whole;      /* count: ranks taken from the left by groups wider than a node */
  int32_t *node_free;  /* count * nodes */
  int32_t count, nodes, node_ranks;
  int32_t *first_block, *next_block; /* per wave, for widening and placing */
  bin *bins;                         /* heaps by fill, one per wave */
  int32_t *first_bin, *bin_counts;   /* per wave */
  int32_t tall_first;                /* single ranks fill wave after wave, not evenly */
  int32_t most;                      /* micro-batches that may be opened */
  int64_t target;                    /* their height, when > 0 they open as needed */
} waves;

static int32_t *free_in(const waves *w, int32_t wave, int32_t node) {
  return &w->node_free[(int64_t)wave * w->nodes + node];
}

/* ---- ranks ---- */

/* Takes degree ranks of the wave, when it has them side by side. */
static int take(waves *w, int32_t wave, int32_t degree) {
  if (degree > w->node_ranks) {
    /* cppcheck-suppress zerodivcond ; a node has at least one rank */
    int32_t first = w->whole[wave], last = first + degree / w->node_ranks - 1;
    if (last >= w->nodes) return 0;
    for (int32_t node = first; node <= last; node++)
      if (*free_in(w, wave, node) < w->node_ranks) return 0;
    for (int32_t node = first; node <= last; node++) *free_in(w, wave, node) = 0;
    w->whole[wave] = last + 1;
    return 1;
  }
  for (int32_t node = w->whole[wave]; node < w->nodes; node++) {
    int32_t *left = free_in(w, wave, node);
    if (*left < degree) continue;
    *left -= degree;
    return 1;
  }
  return 0;
}

/* ---- wide groups ---- */

static void add(waves *w, int32_t b, int32_t sequence, int64_t rows, int64_t time) {
  hcp__block_add(w->blocks, b, sequence, rows, time);
}

static int joins(const waves *w, int32_t b, int64_t rows, int64_t time) {
  const hcp__block *block = &w->blocks->block[b];
  return block->rows + rows <= w->p->capacity &&
         block->end + time <= w->heights[block->micro_batch];
}

/* The fullest of the latest groups of that micro-batch and degree that takes
 * the sequence, -1: none. */
static int32_t joinable(const waves *w, int32_t wave, const hcp__option *option) {
  int32_t best = -1, looked = 0;
  for (int32_t b = w->first_block[wave]; b >= 0 && looked < LOOK; b = w->next_block[b], looked++) {
    const hcp__block *block = &w->blocks->block[b];
    if (block->degree != option->degree || !joins(w, b, option->rows, option->time)) continue;
    if (best < 0 || block->end > w->blocks->block[best].end) best = b;
  }
  return best;
}

/* A group that its caller adds a sequence to, -1: no ranks for it. */
static int32_t open_group(waves *w, int32_t wave, int32_t degree) {
  if (!take(w, wave, degree)) return -1;
  int32_t b = hcp__block_open(w->blocks, 0, degree, 0, 0);
  w->blocks->block[b].micro_batch = wave;
  w->next_block[b] = w->first_block[wave];
  w->first_block[wave] = b;
  return b;
}

/* Any group at all with room, at its own degree. */
static int squeeze(waves *w, int32_t sequence, const hcp__kind *kind) {
  int32_t looked = 0;
  for (int32_t b = 0; b < w->blocks->count && looked < LOOK_FAR; b++, looked++) {
    int32_t degree = w->blocks->block[b].degree;
    int64_t rows = hcp_rows_max(kind->length, degree);
    if (!joins(w, b, rows, 1)) continue;
    int64_t time = hcp__cost(w->p->cost, kind->length, degree, w->p->limits->ranks_per_node);
    if (time < 1 || !joins(w, b, rows, time)) continue;
    add(w, b, sequence, rows, time);
    return 1;
  }
  return 0;
}

static int place_wide(waves *w, int32_t sequence, const hcp__kind *kind) {
  for (int32_t wave = 0; wave < w->count; wave++) {
    const hcp__option *option = hcp__allot(w->p, kind, w->heights[wave]);
    if (w->target > 0 && option->time > w->heights[wave]) continue;
    int32_t b = joinable(w, wave, option);
    if (b < 0) b = open_group(w, wave, option->degree);
    if (b < 0) continue;
    add(w, b, sequence, option->rows, option->time);
    if (option->time > w->heights[wave]) w->heights[wave] = option->time;
    return 1;
  }
  return w->target == 0 && squeeze(w, sequence, kind);
}

/* ---- memory first ---- */

/* Of all groups, the one whose rows the sequence fills best, -1: none. */
static int32_t best_fit(const waves *w, const hcp__kind *kind, int64_t *rows, int64_t *time) {
  int32_t best = -1;
  int64_t left = INT64_MAX;
  for (int32_t b = 0; b < w->blocks->count; b++) {
    const hcp__block *block = &w->blocks->block[b];
    int64_t needed = hcp_rows_max(kind->length, block->degree);
    int64_t room = w->p->capacity - block->rows - needed;
    if (room < 0 || room >= left) continue;
    int64_t taken =
        hcp__cost(w->p->cost, kind->length, block->degree, w->p->limits->ranks_per_node);
    if (taken < 1) continue;
    left = room;
    best = b;
    *rows = needed;
    *time = taken;
  }
  return best;
}

static int place_by_memory(waves *w, int32_t sequence, const hcp__kind *kind) {
  const hcp__option *option = &w->p->options[kind->first_option];
  int64_t rows = option->rows, time = option->time;
  int32_t b = best_fit(w, kind, &rows, &time);
  for (int32_t wave = 0; b < 0 && wave < w->count; wave++) b = open_group(w, wave, option->degree);
  if (b < 0) return 0;
  add(w, b, sequence, rows, time);
  return 1;
}

/* ---- single ranks ---- */

static void sift(const waves *w, int32_t wave) {
  bin *heap = &w->bins[w->first_bin[wave]], moved = heap[0];
  int32_t i = 0, count = w->bin_counts[wave];
  for (int32_t child = 1; child < count; child = 2 * i + 1) {
    if (child + 1 < count && heap[child + 1].fill < heap[child].fill) child++;
    if (heap[child].fill >= moved.fill) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = moved;
}

static int64_t fill_of(const waves *w, int32_t wave, const bin *b) {
  int64_t by_time = b->load / ((w->heights[wave] >> 20) + 1);
  int64_t by_rows = (b->rows << 20) / w->p->capacity;
  return by_time > by_rows ? by_time : by_rows;
}

/* What is free becomes bins; single-rank groups that exist stay groups. */
static void open_bins(waves *w, int32_t wave) {
  int32_t count = 0;
  for (int32_t node = 0; node < w->nodes; node++) count += *free_in(w, wave, node);
  for (int32_t i = 0; i < count; i++) w->bins[w->first_bin[wave] + i] = (bin){.block = -1};
  w->bin_counts[wave] = count;
}

/* Sequences that joined a bin's group by another way count before it is used. */
static void refresh(const waves *w, int32_t wave) {
  while (w->bin_counts[wave] > 0) {
    bin *b = &w->bins[w->first_bin[wave]];
    const hcp__block *block = b->block < 0 ? NULL : &w->blocks->block[b->block];
    if (block == NULL || block->rows == b->rows) return;
    b->load = block->end;
    b->rows = block->rows;
    b->fill = fill_of(w, wave, b);
    sift(w, wave);
  }
}

/* The least full bin of the wave when it takes the sequence, else NULL. */
static bin *open_bin(waves *w, int32_t wave, const hcp__option *option) {
  if (w->bin_counts[wave] < 0) open_bins(w, wave);
  refresh(w, wave);
  bin *b = &w->bins[w->first_bin[wave]];
  int takes = w->bin_counts[wave] > 0 && b->load + option->time <= w->heights[wave] &&
              b->rows + option->rows <= w->p->capacity;
  return takes ? b : NULL;
}

/* The wave whose emptiest rank is the least full, or the first that has room;
 * -1: none. */
static int32_t choose_wave(waves *w, const hcp__option *option) {
  const bin *best = NULL;
  int32_t chosen = -1;
  for (int32_t wave = 0; wave < w->count && (chosen < 0 || !w->tall_first); wave++) {
    const bin *b = open_bin(w, wave, option);
    if (b == NULL || (best != NULL && b->fill >= best->fill)) continue;
    best = b;
    chosen = wave;
  }
  return chosen;
}

static int place_single(waves *w, int32_t sequence, const hcp__kind *kind,
                        const hcp__option *option) {
  for (int32_t wave; (wave = choose_wave(w, option)) >= 0;) {
    bin *b = &w->bins[w->first_bin[wave]];
    if (b->block < 0) b->block = open_group(w, wave, 1);
    if (b->block < 0) { /* a wide group came late and took the rank */
      *b = w->bins[w->first_bin[wave] + --w->bin_counts[wave]];
      sift(w, wave);
      continue;
    }
    add(w, b->block, sequence, option->rows, option->time);
    b->load += option->time;
    b->rows += option->rows;
    b->fill = fill_of(w, wave, b);
    sift(w, wave);
    return 1;
  }
  return w->target == 0 && squeeze(w, sequence, kind);
}

/* ---- widening ---- */

static int64_t time_at(const waves *w, const hcp__block *block, int32_t degree) {
  int64_t time = 0;
  for (int32_t s = block->first; s >= 0; s = w->blocks->next[s]) {
    if (hcp_rows_max(w->p->lengths[s], degree) > w->p->capacity) return INT64_MAX;
    int64_t one = hcp__cost(w->p->cost, w->p->lengths[s], degree, w->p->limits->ranks_per_node);
    if (one < 1) return INT64_MAX;
    time += one;
  }
  return time;
}

static int64_t rows_at(const waves *w, const hcp__block *block, int32_t degree) {
  int64_t rows = 0;
  for (int32_t s = block->first; s >= 0; s = w->blocks->next[s])
    rows += hcp_rows_max(w->p->lengths[s], degree);
  return rows;
}

static int32_t slowest(const waves *w, int32_t wave) {
  int32_t worst = -1;
  for (int32_t b = w->first_block[wave]; b >= 0; b = w->next_block[b])
    if (worst < 0 || w->blocks->block[b].end > w->blocks->block[worst].end) worst = b;
  return worst;
}

/* The least wider degree that makes the group faster, 0: none. */
static int32_t wider(const waves *w, const hcp__block *block, int32_t most, int64_t *time,
                     int32_t *budget) {
  for (int32_t d = block->degree + 1; d <= most && *budget > 0; d++) {
    if (!hcp__degree_allowed(w->p->limits, w->p->cost, d)) continue;
    *budget -= block->sequences;
    *time = time_at(w, block, d);
    if (*time < block->end && rows_at(w, block, d) <= w->p->capacity) return d;
  }
  return 0;
}

/* The next rank goes to the slowest group: for fixed groups whose times fall
 * with the degree, no other division of the ranks ends sooner. */
static void widen(waves *w, int32_t wave) {
  int32_t budget = WIDEN, *left = free_in(w, wave, 0);
  while (*left > 0 && budget > 0) {
    int64_t time;
    int32_t b = slowest(w, wave);
    if (b < 0) return;
    hcp__block *block = &w->blocks->block[b];
    int32_t degree = wider(w, block, block->degree + *left, &time, &budget);
    if (degree == 0) return;
    *left -= degree - block->degree;
    block->rows = rows_at(w, block, degree);
    block->degree = degree;
    block->end = time;
    budget -= 16;
  }
}

/* ---- places ---- */

/* Ranks from the left of each node, widest groups first. Groups of one wave are
 * listed latest first, so degrees mostly ascend along the list. */
static int by_degree(const void *left, const void *right) {
  const hcp__block *const *a = left, *const *b = right;
  if ((*a)->degree != (*b)->degree) return (*a)->degree > (*b)->degree ? -1 : 1;
  return (*a > *b) - (*a < *b);
}

static int place_wave(const waves *w, int32_t wave, hcp__block **scratch) {
  int32_t count = 0, used_whole = 0, ranks = w->p->limits->ranks;
  for (int32_t b = w->first_block[wave]; b >= 0; b = w->next_block[b])
    scratch[count++] = &w->blocks->block[b];
  qsort(scratch, (size_t)count, sizeof *scratch, by_degree);
  int32_t *next = free_in(w, wave, 0); /* from here on: the next free rank of each node */
  for (int32_t node = 0; node < w->nodes; node++) next[node] = node * w->node_ranks;
  for (int32_t i = 0; i < count; i++) {
    if (scratch[i]->degree > w->node_ranks) {
      scratch[i]->first_rank = used_whole;
      used_whole += scratch[i]->degree;
      continue;
    }
    int32_t node = used_whole / w->node_ranks;
    for (; node < w->nodes; node++) {
      int32_t end = (node + 1) * w->node_ranks;
      if (next[node] + scratch[i]->degree <= (end < ranks ? end : ranks)) break;
    }
    if (node == w->nodes) return 0;
    scratch[i]->first_rank = next[node];
    next[node] += scratch[i]->degree;
  }
  return 1;
}

/* ---- all of them ---- */

static void reset_wave(waves *w, int32_t wave, int64_t height) {
  w->heights[wave] = height > 1 ? height : 1;
  w->first_block[wave] = -1;
  w->first_bin[wave] = wave * w->p->limits->ranks;
  w->bin_counts[wave] = -1; /* not opened */
  w->whole[wave] = 0;
  for (int32_t node = 0; node < w->nodes; node++) {
    int32_t left = w->p->limits->ranks - node * w->node_ranks;
    *free_in(w, wave, node) = left < w->node_ranks ? left : w->node_ranks;
  }
}

/* As high as the sequence needs, or as a rank full of its like, up to target;
 * where nothing limits the height, rows alone decide. */
static int open_wave(waves *w, const hcp__option *option) {
  if (w->target == 0 || w->count == w->most) return 0;
  int64_t height = option->time * (w->p->capacity / option->rows);
  if (height > w->target) height = w->target;
  if (height < option->time) height = option->time;
  if (w->target == HCP__NO_TARGET) height = w->target;
  reset_wave(w, w->count++, height);
  return 1;
}

static int place(waves *w, int32_t i, int64_t lowest) {
  const hcp__kind *kind = &w->p->kinds[w->p->kind_of[i]];
  const hcp__option *option = hcp__allot(w->p, kind, lowest);
  int by_memory = w->target == HCP__NO_TARGET && w->p->n <= BEST_FIT;
  for (int32_t tries = 0; tries < 2; tries++) {
    if (by_memory && place_by_memory(w, w->p->order[i], kind)) return 1;
    if (!by_memory && (option->degree > 1 ? place_wide(w, w->p->order[i], kind)
                                          : place_single(w, w->p->order[i], kind, option)))
      return 1;
    if (!open_wave(w, option)) return 0;
  }
  return 0;
}

static int place_sequences(waves *w) {
  int64_t lowest = w->target > 0 ? w->target : w->heights[w->count - 1];
  for (int32_t i = 0; i < w->p->n; i++)
    if (!place(w, i, lowest)) return 0;
  return 1;
}

static int waves_init(waves *w) {
  size_t count = (size_t)w->most, n = (size_t)w->p->n + 1;
  w->heights = calloc(count, sizeof *w->heights);
  w->whole = malloc(count * sizeof *w->whole);
  w->node_free = malloc(count * (size_t)w->nodes * sizeof *w->node_free);
  w->first_block = malloc(count * sizeof *w->first_block);
  w->next_block = malloc(n * sizeof *w->next_block);
  w->first_bin = malloc(count * sizeof *w->first_bin);
  w->bin_counts = malloc(count * sizeof *w->bin_counts);
  w->bins = malloc(count * (size_t)w->p->limits->ranks * sizeof *w->bins);
  return w->heights != NULL && w->whole != NULL && w->node_free != NULL && w->first_block != NULL &&
         w->next_block != NULL && w->first_bin != NULL && w->bin_counts != NULL && w->bins != NULL;
}

static void waves_release(waves *w) {
  free(w->bin_counts);
  free(w->first_bin);
  free(w->bins);
  free(w->next_block);
  free(w->first_block);
  free(w->node_free);
  free(w->whole);
  free(w->heights);
}

static int finish(waves *w) {
  hcp__block **scratch = malloc(((size_t)w->blocks->count + 1) * sizeof *scratch);
  int placed = scratch != NULL;
  for (int32_t wave = 0; placed && wave < w->count; wave++) {
    if (w->nodes == 1) widen(w, wave);
    placed = place_wave(w, wave, scratch);
  }
  free(scratch);
  return placed;
}

static hcp_status run(waves *w, int64_t height, int32_t slope, int32_t *fits, hcp_error *err) {
  hcp_status status = HCP_OK;
  *fits = 0;
  w->blocks->count = 0;
  if (waves_init(w)) {
    for (int32_t wave = 0; wave < w->count; wave++) {
      int64_t drop = w->count > 1 ? height / 8 * slope / (w->count - 1) * wave : 0;
      reset_wave(w, wave, height - drop);
    }
    *fits = place_sequences(w) && finish(w);
  } else {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d micro-batches", w->most);
  }
  waves_release(w);
  return status;
}

static waves waves_of(const hcp__problem *p, hcp__blocks *blocks) {
  int32_t node = p->limits->ranks_per_node, ranks = p->limits->ranks;
  waves w = {.p = p, .blocks = blocks};
  w.node_ranks = node > 0 && node < ranks ? node : ranks;
  w.nodes = (ranks + w.node_ranks - 1) / w.node_ranks;
  return w;
}

hcp_status hcp__plan_waves(const hcp__problem *p, int32_t count, int64_t height, int32_t slope,
                           int32_t tall_first, hcp__blocks *blocks, int32_t *fits, hcp_error *err) {
  waves w = waves_of(p, blocks);
  w.count = w.most = count;
  w.tall_first = tall_first;
  return run(&w, height, slope, fits, err);
}

hcp_status hcp__plan_shelves(const hcp__problem *p, int32_t most, int64_t target,
                             hcp__blocks *blocks, int32_t *fits, hcp_error *err) {
  waves w = waves_of(p, blocks);
  w.most = most;
  w.target = target;
  w.tall_first = 1;
  return run(&w, 0, 0, fits, err);
}
