/* waves.c - micro-batches as boxes of all ranks and a height.
 *
 * Sequences, longest first, go to the first box that takes them, with the least
 * degree that ends within its height: into a group that has rows and time left,
 * or on ranks that are still free. Those that need one rank fill what is left
 * evenly, by time and by rows, whichever is scarcer. */
#include <stdlib.h>
#include <string.h>

#include "waves.h"

/* What a sequence looks at is bounded, so that time grows with the sequences and not
 * with their product with groups and waves. */
enum {
  LOOK = 24,      /* groups that a sequence looks at before it opens one, */
  LOOK_FAR = 192, /* after it could not, */
  LOOK_RISE = 64, /* and where it makes a wave longer */
  NEAR = 64,      /* waves that a sequence looks at before others */
  HINTS = 16,     /* degrees for which a wave knows where to look */
  DUST = 2        /* dust has at most 1 / DUST of a rank's rows: poured, not placed */
};

static int32_t *free_in(const hcp__waves *w, int32_t wave, int32_t node) {
  return &w->node_free[(int64_t)wave * w->nodes + node];
}

static hcp__bin *bins_of(const hcp__waves *w, int32_t wave) {
  return &w->bins[(int64_t)wave * w->p->limits->ranks];
}

/* ---- ranks ---- */

/* Whole nodes from the left. */
static int take_nodes(hcp__waves *w, int32_t wave, int32_t degree) {
  /* cppcheck-suppress zerodivcond ; a node has at least one rank */
  int32_t first = w->whole[wave], last = first + degree / w->node_ranks - 1;
  if (last >= w->nodes) return 0;
  for (int32_t node = first; node <= last; node++)
    if (*free_in(w, wave, node) < w->node_ranks) return 0;
  for (int32_t node = first; node <= last; node++) *free_in(w, wave, node) = 0;
  w->whole[wave] = last + 1;
  w->left[wave] -= degree;
  return 1;
}

/* Where to look first for a node with degree ranks free: none gets any back. */
static int32_t *hint(const hcp__waves *w, int32_t wave, int32_t degree) {
  return &w->first_free[(int64_t)wave * HINTS + (degree < HINTS ? degree : HINTS) - 1];
}

/* Takes degree ranks of the wave, when it has them side by side. */
static int take(hcp__waves *w, int32_t wave, int32_t degree) {
  if (w->left[wave] < degree) return 0;
  if (degree > w->node_ranks) return take_nodes(w, wave, degree);
  int32_t *node = hint(w, wave, degree), *left;
  while (*node < w->nodes && *free_in(w, wave, *node) < (degree < HINTS ? degree : HINTS)) ++*node;
  for (int32_t i = *node; i < w->nodes; i++) {
    left = free_in(w, wave, i);
    if (*left < degree) continue;
    *left -= degree;
    w->left[wave] -= degree;
    return 1;
  }
  return 0;
}

/* ---- wide groups ---- */

void hcp__wave_add(hcp__waves *w, int32_t b, int32_t sequence, int64_t rows, int64_t time) {
  hcp__block_add(w->blocks, b, sequence, rows, time);
  const hcp__block *block = &w->blocks->block[b];
  if (block->end > w->tops[block->micro_batch]) w->tops[block->micro_batch] = block->end;
}

/* By how much the group's wave has to rise for the time, INT64_MAX: rows do not fit. */
static int64_t growth_of(const hcp__waves *w, int32_t b, int64_t rows, int64_t time) {
  const hcp__block *block = &w->blocks->block[b];
  int64_t growth = block->end + time - w->heights[block->micro_batch];
  if (block->rows + rows > w->p->capacity) return INT64_MAX;
  return growth > 0 ? growth : 0;
}

static int joins(const hcp__waves *w, int32_t b, int64_t rows, int64_t time) {
  const hcp__block *block = &w->blocks->block[b];
  return block->rows + rows <= w->p->capacity &&
         block->end + time <= w->heights[block->micro_batch];
}

/* The fullest of the latest groups of that micro-batch and degree that takes
 * the sequence, -1: none. */
static int32_t joinable(const hcp__waves *w, int32_t wave, const hcp__option *option) {
  int32_t best = -1, looked = 0;
  hcp__room *room = &w->rooms[wave];
  /* Groups hold longer sequences, which leave even less. */
  if (2 * option->rows > w->p->capacity + 2 || option->time > w->heights[wave] - option->time)
    return -1;
  if (room->rows > w->p->capacity - option->rows || room->end > w->heights[wave] - option->time)
    return -1;
  *room = (hcp__room){INT64_MAX, INT64_MAX};
  for (int32_t b = w->first_block[wave]; b >= 0 && looked < LOOK; b = w->next_block[b], looked++) {
    const hcp__block *block = &w->blocks->block[b];
    *room = (hcp__room){hcp__least(room->rows, block->rows), hcp__least(room->end, block->end)};
    if (block->degree != option->degree || !joins(w, b, option->rows, option->time)) continue;
    if (best < 0 || block->end > w->blocks->block[best].end) best = b;
  }
  return best;
}

/* A group that its caller adds a sequence to, -1: no ranks for it. */
int32_t hcp__wave_open_group(hcp__waves *w, int32_t wave, int32_t degree) {
  if (!take(w, wave, degree)) return -1;
  int32_t b = hcp__block_open(w->blocks, 0, degree, 0, 0);
  w->blocks->block[b].micro_batch = wave;
  w->next_block[b] = w->first_block[wave];
  w->first_block[wave] = b;
  w->rooms[wave] = (hcp__room){0, 0};
  return b;
}

/* Whether the sequence may have room in the group: its load is not looked at yet. */
static int may_hold(const hcp__waves *w, const hcp__block *block, int64_t length) {
  return (w->p->capacity - block->rows) * block->degree >= length;
}

/* Any group at all with room, at its own degree. The next search begins where
 * this one ends, as groups before it are full for sequences like this. */
static int squeeze(hcp__waves *w, int32_t sequence, const hcp__kind *kind) {
  int32_t count = w->blocks->count;
  for (int32_t looked = 0; looked < LOOK_FAR && looked < count; looked++, w->cursor++) {
    if (w->cursor >= count) w->cursor = 0;
    int32_t degree = w->blocks->block[w->cursor].degree;
    if (!may_hold(w, &w->blocks->block[w->cursor], kind->size.length)) continue;
    int64_t rows = hcp__load(w->p, sequence, degree);
    if (!joins(w, w->cursor, rows, 1)) continue;
    int64_t time = hcp__cost(w->p->cost, kind->size, degree, w->p->limits->ranks_per_node);
    if (time < 1 || !joins(w, w->cursor, rows, time)) continue;
    hcp__wave_add(w, w->cursor, sequence, rows, time);
    return 1;
  }
  return 0;
}

/* ---- memory first ---- */

/* Of all groups, the one whose rows the sequence fills best, -1: none. */
static int32_t best_fit(const hcp__waves *w, int32_t sequence, int64_t *rows, int64_t *time) {
  int32_t best = -1;
  int64_t left = INT64_MAX;
  for (int32_t b = 0; b < w->blocks->count; b++) {
    const hcp__block *block = &w->blocks->block[b];
    if (!may_hold(w, block, w->p->lengths[sequence])) continue;
    int64_t needed = hcp__load(w->p, sequence, block->degree);
    int64_t room = w->p->capacity - block->rows - needed;
    if (room < 0 || room >= left) continue;
    int64_t taken = hcp__cost(w->p->cost, hcp__size_at(w->p, sequence), block->degree,
                              w->p->limits->ranks_per_node);
    if (taken < 1) continue;
    left = room;
    best = b;
    *rows = needed;
    *time = taken;
  }
  return best;
}

static int place_by_memory(hcp__waves *w, int32_t sequence, const hcp__kind *kind) {
  const hcp__option *option = hcp__leanest(w->p, kind);
  int64_t rows = option->rows, time = option->time;
  int32_t b = best_fit(w, sequence, &rows, &time);
  for (int32_t wave = 0; b < 0 && wave < w->count; wave++)
    b = hcp__wave_open_group(w, wave, option->degree);
  if (b < 0) return 0;
  hcp__wave_add(w, b, sequence, rows, time);
  return 1;
}

/* ---- single ranks ---- */

static void sift(const hcp__waves *w, int32_t wave, int32_t i) {
  hcp__bin *heap = bins_of(w, wave), moved = heap[i];
  int32_t count = w->bin_counts[wave];
  for (int32_t child = 2 * i + 1; child < count; child = 2 * i + 1) {
    if (child + 1 < count && heap[child + 1].fill < heap[child].fill) child++;
    if (heap[child].fill >= moved.fill) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = moved;
}

static void set_fill(const hcp__waves *w, int32_t wave, hcp__bin *b) {
  int64_t by_time = b->load / ((w->heights[wave] >> 20) + 1);
  int64_t by_rows = (b->rows << 20) / w->p->capacity;
  b->fill = by_time > by_rows ? by_time : by_rows;
}

static void open_bins(hcp__waves *w, int32_t wave) {
  int32_t count = w->left[wave];
  for (int32_t i = 0; i < count; i++) bins_of(w, wave)[i] = (hcp__bin){.block = -1};
  w->bin_counts[wave] = count;
}

static int takes(const hcp__waves *w, int32_t wave, const hcp__bin *b, const hcp__option *option) {
  return b->load + option->time <= w->heights[wave] && b->rows + option->rows <= w->p->capacity;
}

/* Sequences that were squeezed into the bin's group count too. */
static int is_stale(const hcp__waves *w, const hcp__bin *b) {
  return b->block >= 0 && w->blocks->block[b->block].rows != b->rows;
}

static void refresh(const hcp__waves *w, int32_t wave) {
  hcp__bin *b = bins_of(w, wave);
  b->load = w->blocks->block[b->block].end;
  b->rows = w->blocks->block[b->block].rows;
  set_fill(w, wave, b);
  sift(w, wave, 0);
}

/* The least full bin of the wave, NULL: wide groups took all ranks. */
static hcp__bin *emptiest(hcp__waves *w, int32_t wave) {
  if (w->bin_counts[wave] < 0) open_bins(w, wave);
  hcp__bin *b = bins_of(w, wave);
  while (w->bin_counts[wave] > 0) {
    if (is_stale(w, b)) {
      refresh(w, wave);
    } else if (b->block >= 0 || w->left[wave] > 0) {
      return b;
    } else { /* a wide group came late and took the rank */
      *b = b[--w->bin_counts[wave]];
      sift(w, wave, 0);
    }
  }
  return NULL;
}

/* A group on the least full rank, which holds nothing yet; -1: wide groups took all ranks. */
static int32_t open_emptiest(hcp__waves *w, int32_t wave) {
  /* Looked for first: once its group is open, a wave's last rank is no longer free. */
  hcp__bin *b = emptiest(w, wave);
  if (b == NULL) return -1;
  b->block = hcp__wave_open_group(w, wave, 1);
  return b->block;
}

/* The least full bin when it takes the sequence, else NULL. */
static hcp__bin *find_bin(hcp__waves *w, int32_t wave, const hcp__option *option) {
  hcp__bin *b = emptiest(w, wave);
  return b != NULL && takes(w, wave, b, option) ? b : NULL;
}

static void put(hcp__waves *w, int32_t wave, int32_t sequence, const hcp__option *option) {
  hcp__bin *b = bins_of(w, wave);
  if (b->block < 0) b->block = hcp__wave_open_group(w, wave, 1);
  hcp__wave_add(w, b->block, sequence, option->rows, option->time);
  refresh(w, wave);
}

/* To the wave, of the next ones, whose emptiest rank is the least full. */
static int place_evenly(hcp__waves *w, int32_t sequence, const hcp__option *option) {
  const hcp__bin *best = NULL;
  int32_t chosen = -1, begin = 0, looks = w->count;
  if (w->count > NEAR) {
    begin = w->turn;
    looks = NEAR;
    w->turn = (w->turn + NEAR) % w->count;
  }
  for (int32_t i = 0; i < looks; i++) {
    int32_t wave = (begin + i) % w->count;
    const hcp__bin *b = find_bin(w, wave, option);
    if (b == NULL || (best != NULL && b->fill >= best->fill)) continue;
    best = b;
    chosen = wave;
  }
  if (chosen >= 0) put(w, chosen, sequence, option);
  return chosen >= 0;
}

/* ---- raising ---- */

/* Where a sequence may go when its wave rises. */
typedef struct spot {
  int64_t growth; /* of the wave, and so of the makespan */
  int64_t rows, time;
  int32_t wave, block, degree; /* block -1: one to be opened */
} spot;

static void rise_by(spot *best, spot one) {
  if (one.growth < best->growth) *best = one;
}

/* A group that holds others. */
static void rise_beside(hcp__waves *w, int32_t sequence, const hcp__kind *kind, spot *best) {
  int32_t count = w->blocks->count;
  for (int32_t looked = 0; looked < LOOK_RISE && looked < count; looked++) {
    int32_t b = (w->cursor + looked) % count, degree = w->blocks->block[b].degree;
    if (!may_hold(w, &w->blocks->block[b], kind->size.length)) continue;
    int64_t rows = hcp__load(w->p, sequence, degree);
    if (growth_of(w, b, rows, 0) >= best->growth) continue;
    int64_t time = hcp__cost(w->p->cost, kind->size, degree, w->p->limits->ranks_per_node);
    if (time < 1) continue;
    rise_by(best, (spot){growth_of(w, b, rows, time), rows, time, w->blocks->block[b].micro_batch,
                         b, degree});
  }
}

/* The least full single rank of the wave. */
static void rise_single(hcp__waves *w, int32_t wave, const hcp__option *option, spot *best) {
  const hcp__bin *b = emptiest(w, wave);
  if (b == NULL || b->rows + option->rows > w->p->capacity) return;
  int64_t growth = b->load + option->time - w->heights[wave];
  rise_by(best, (spot){growth > 0 ? growth : 0, option->rows, option->time, wave, b->block, 1});
}

/* Ranks of the wave that are left. */
static void rise_wide(const hcp__waves *w, int32_t wave, const hcp__kind *kind, spot *best) {
  const hcp__option *o = hcp__fastest_on(w->p, kind, w->left[wave]);
  if (o == NULL) return;
  int64_t growth = o->time - w->heights[wave];
  rise_by(best, (spot){growth > 0 ? growth : 0, o->rows, o->time, wave, -1, o->degree});
}

/* A wave of its own. */
static void rise_alone(const hcp__waves *w, const hcp__kind *kind, spot *best) {
  const hcp__choices *all = hcp__choices_of(w->p, kind);
  const hcp__option *o = &all->options[all->count - 1];
  if (w->count < w->most)
    rise_by(best, (spot){w->p->cost->launch + o->time, o->rows, o->time, w->count, -1, o->degree});
}

/* Where the makespan grows least; 0: nowhere. */
static int place_higher(hcp__waves *w, int32_t sequence, const hcp__kind *kind) {
  const hcp__option *first = hcp__leanest(w->p, kind);
  spot best = {.growth = INT64_MAX};
  for (int32_t i = 0; i < w->count && i < NEAR; i++) {
    int32_t wave = (w->turn + i) % w->count;
    if (first->degree == 1)
      rise_single(w, wave, first, &best);
    else
      rise_wide(w, wave, kind, &best);
  }
  w->turn = (w->turn + NEAR) % w->count;
  rise_beside(w, sequence, kind, &best);
  rise_alone(w, kind, &best);
  if (best.growth == INT64_MAX) return 0;
  if (best.wave == w->count) hcp__wave_reset(w, w->count++, best.time);
  if (best.block < 0 && best.degree == 1) best.block = open_emptiest(w, best.wave);
  if (best.block < 0) best.block = hcp__wave_open_group(w, best.wave, best.degree);
  if (best.block < 0) return 0; /* nodes may leave no interval */
  hcp__wave_add(w, best.block, sequence, best.rows, best.time);
  if (w->tops[best.wave] > w->heights[best.wave]) w->heights[best.wave] = w->tops[best.wave];
  return 1;
}

/* ---- one sequence ---- */

int32_t hcp__wave_place(hcp__waves *w, int32_t wave, int32_t sequence, const hcp__option *option) {
  if (option->degree == 1) {
    if (find_bin(w, wave, option) == NULL) return 0;
    put(w, wave, sequence, option);
    return 1;
  }
  int32_t b = joinable(w, wave, option);
  if (b < 0) b = hcp__wave_open_group(w, wave, option->degree);
  if (b >= 0) hcp__wave_add(w, b, sequence, option->rows, option->time);
  return b >= 0;
}

/* The first wave that takes the sequence, with the least degree fast enough; of
 * many, first those from a little before the one that took the last. */
static int place_first_fit(hcp__waves *w, int32_t sequence, const hcp__kind *kind) {
  int32_t wave = w->latest > NEAR ? w->latest - NEAR : 0;
  for (int32_t i = 0; i < w->count; i++, wave = wave + 1 < w->count ? wave + 1 : 0) {
    const hcp__option *option = hcp__allot(w->p, kind, w->heights[wave]);
    if (option->time > w->heights[wave] || !hcp__wave_place(w, wave, sequence, option)) continue;
    w->latest = wave;
    return 1;
  }
  return 0;
}

static int place_somewhere(hcp__waves *w, int32_t sequence, const hcp__kind *kind) {
  if (w->target == HCP__NO_TARGET) return place_by_memory(w, sequence, kind);
  if (!w->tall_first) {
    const hcp__option *option = hcp__allot(w->p, kind, w->lowest);
    if (option->degree == 1 && place_evenly(w, sequence, option)) return 1;
  }
  return place_first_fit(w, sequence, kind) || (w->target == 0 && squeeze(w, sequence, kind)) ||
         (w->rises && place_higher(w, sequence, kind));
}

/* ---- all of them ---- */

void hcp__wave_reset(hcp__waves *w, int32_t wave, int64_t height) {
  w->heights[wave] = height > 1 ? height : 1;
  w->tops[wave] = 0;
  w->first_block[wave] = -1;
  w->rooms[wave] = (hcp__room){0, 0};
  w->bin_counts[wave] = -1;
  w->whole[wave] = 0;
  memset(hint(w, wave, 1), 0, HINTS * sizeof *w->first_free);
  w->left[wave] = w->p->limits->ranks;
  for (int32_t node = 0; node < w->nodes; node++) {
    int32_t left = w->p->limits->ranks - node * w->node_ranks;
    *free_in(w, wave, node) = left < w->node_ranks ? left : w->node_ranks;
  }
}

/* As high as the sequence needs, or as a rank full of its like, up to target;
 * where nothing limits the height, rows alone decide. */
static int open_wave(hcp__waves *w, const hcp__kind *kind) {
  if (w->target == 0 || w->count == w->most) return 0;
  const hcp__option *option = hcp__allot(w->p, kind, w->lowest);
  int64_t height = hcp__scaled(option->time, w->p->capacity / option->rows, 1);
  if (height > w->target) height = w->target;
  if (height < option->time) height = option->time;
  if (w->target == HCP__NO_TARGET) height = w->target;
  hcp__wave_reset(w, w->count++, height);
  return 1;
}

int32_t hcp__waves_place(hcp__waves *w, int32_t first, int32_t end) {
  for (int32_t i = first; i < end; i++) {
    const hcp__kind *kind = &w->p->kinds[w->p->kind_of[i]];
    int placed = place_somewhere(w, w->p->order[i], kind);
    if (!placed && open_wave(w, kind)) placed = place_somewhere(w, w->p->order[i], kind);
    if (!placed) return 0;
  }
  return 1;
}

void hcp__waves_stand(hcp__waves *w, int32_t count, int32_t tall_first, const int64_t *heights,
                      hcp__blocks *blocks) {
  w->blocks = blocks;
  w->blocks->count = 0;
  w->blocks->placed_on = NULL;
  w->target = 0;
  w->cursor = w->turn = w->latest = 0;
  w->tall_first = tall_first;
  w->rises = 0;
  w->count = count;
  w->lowest = heights[0];
  for (int32_t wave = 0; wave < count; wave++) {
    hcp__wave_reset(w, wave, heights[wave]);
    if (heights[wave] < w->lowest) w->lowest = heights[wave];
  }
}

void hcp__waves_open_as_needed(hcp__waves *w, int64_t target, hcp__blocks *blocks) {
  w->blocks = blocks;
  w->blocks->count = 0;
  w->blocks->placed_on = NULL;
  w->count = w->cursor = w->turn = w->latest = 0;
  w->tall_first = 1;
  w->rises = 0;
  w->target = w->lowest = target;
}

/* ---- room for them ---- */

/* The mean sequence of the dust. */
static hcp__size dust_size(const hcp__waves *w) {
  const hcp__problem *p = w->p;
  int64_t count = p->n - w->placed;
  if (count < 1) return (hcp__size){1, -1};
  hcp__size mean = {w->dust_rows / count, p->cost->pairs == NULL ? -1 : 0};
  for (int32_t k = p->kind_count - 1; mean.pairs >= 0 && k >= 0; k--) {
    const hcp__kind *kind = &p->kinds[k];
    if (kind->first < w->placed) break;
    mean.pairs += kind->size.pairs / count * kind->count;
    mean.pairs += kind->size.pairs % count * kind->count / count;
  }
  return mean;
}

/* Sequences at the end of the order that are short beside a rank's rows, and so
 * many that no rank waits for one of them. */
static void sweep_dust(hcp__waves *w) {
  const hcp__problem *p = w->p;
  int64_t time = 0;
  w->placed = p->n;
  for (int32_t k = p->kind_count - 1; k >= 0; k--) {
    const hcp__kind *kind = &p->kinds[k];
    const hcp__option *option = hcp__leanest(p, kind);
    if (option->degree > 1 || option->rows > p->capacity / DUST) break;
    if (kind->first < p->limits->ranks) break;
    w->placed = kind->first;
    w->dust_rows += option->rows * kind->count;
    time = hcp__sum(time, hcp__scaled(option->time, kind->count, 1));
  }
  w->dust_pace = w->dust_rows > 0 ? time / w->dust_rows + 1 : 1;
  w->dust_size = dust_size(w);
}

static int allocate(hcp__waves *w) {
  size_t count = (size_t)w->most, n = (size_t)w->p->n + 1;
  w->heights = calloc(count, sizeof *w->heights);
  w->tops = calloc(count, sizeof *w->tops);
  w->whole = malloc(count * sizeof *w->whole);
  w->node_free = malloc(count * (size_t)w->nodes * sizeof *w->node_free);
  w->left = malloc(count * sizeof *w->left);
  w->first_free = malloc(count * HINTS * sizeof *w->first_free);
  w->first_block = malloc(count * sizeof *w->first_block);
  w->rooms = malloc(count * sizeof *w->rooms);
  w->next_block = malloc(n * sizeof *w->next_block);
  w->bin_counts = malloc(count * sizeof *w->bin_counts);
  w->dust_times = calloc((size_t)w->p->limits->ranks + 1, sizeof *w->dust_times);
  w->bins = malloc(count * (size_t)w->p->limits->ranks * sizeof *w->bins);
  return w->heights != NULL && w->tops != NULL && w->whole != NULL && w->node_free != NULL &&
         w->left != NULL && w->first_free != NULL && w->first_block != NULL && w->rooms != NULL &&
         w->next_block != NULL && w->bin_counts != NULL && w->dust_times != NULL && w->bins != NULL;
}

hcp_status hcp__waves_create(const hcp__problem *p, int32_t most, hcp__waves **out,
                             hcp_error *err) {
  int32_t node = p->limits->ranks_per_node, ranks = p->limits->ranks;
  hcp__waves *w = calloc(1, sizeof *w);
  if (w == NULL || hcp__blocks_init(&w->own, p->n, err) != HCP_OK) goto fail;
  w->p = p;
  w->most = most;
  w->node_ranks = node > 0 && node < ranks ? node : ranks;
  w->nodes = (ranks + w->node_ranks - 1) / w->node_ranks;
  sweep_dust(w);
  if (!allocate(w)) goto fail;
  *out = w;
  return HCP_OK;
fail:
  hcp__waves_destroy(w);
  return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d micro-batches", most);
}

void hcp__waves_destroy(hcp__waves *w) {
  if (w == NULL) return;
  free(w->bins);
  free(w->dust_times);
  free(w->bin_counts);
  free(w->next_block);
  free(w->rooms);
  free(w->first_block);
  free(w->first_free);
  free(w->left);
  free(w->node_free);
  free(w->whole);
  free(w->tops);
  free(w->heights);
  hcp__blocks_release(&w->own);
  free(w);
}
