/* list.c - plans whose ranks meet at the end of the step only.
 *
 * Every sequence gets the least degree that ends within the target. Those that
 * need several ranks are placed widest first on the interval that is free
 * soonest. Where such an interval was not free at once on all its ranks, gaps
 * stay; later, narrower sequences go into the tightest gap that holds them.
 * Sequences on single ranks, longest first, go into the roomiest gap while they
 * fit, and otherwise to the rank that is free soonest. */
#include <stdlib.h>

#include "plan.h"

/* Blocks of a rank that a further sequence may join, latest first; and the most
 * ranks of a pod, within which one wide group is placed. */
enum { JOINABLE = 6, POD = 256, GAPS = 256, OPEN = 8 };

/* Free time of neighbouring ranks before a wide group. */
typedef struct gap {
  int64_t from, room;
  int32_t rank, width;
  int32_t block; /* open in it, -1: none */
} gap;

typedef struct list {
  const hcp__problem *p;
  hcp__blocks *blocks;
  int64_t *loads;   /* ranks: when each is free */
  int32_t *top;     /* ranks: the last block on each, -1: none */
  int32_t *heap;    /* ranks, by load then number */
  int32_t *below;   /* blocks: the block before, on single ranks */
  gap *gaps;
  int32_t gap_count, gap_capacity;
  int64_t *pod_areas;
  int32_t pods, pod_ranks;
  int32_t open;    /* first of the ranks that are being packed */
  int32_t slowest; /* slowness of the slowest rank */
} list;

static int64_t slowed_on(const list *l, int32_t rank, int64_t time) {
  return hcp__slowed(time, hcp__slowness(l->p->limits, rank, 1));
}

/* ---- intervals ---- */

static int64_t load_of(const list *l, int32_t first, int32_t degree) {
  int64_t load = 0;
  for (int32_t r = first; r < first + degree; r++)
    if (l->loads[r] > load) load = l->loads[r];
  return load;
}

/* Among intervals that begin in [low, high - degree], the one free soonest and
 * lowest; improves on *load or leaves it. */
static void soonest_within(const list *l, int32_t low, int32_t high, int32_t degree, int64_t *load,
                           int32_t *best) {
  for (int32_t first = low; first + degree <= high;) {
    int64_t latest = 0;
    int32_t late = first - 1; /* the last rank that rules the interval out */
    for (int32_t r = first + degree - 1; r >= first; r--) {
      if (l->loads[r] >= *load) {
        late = r;
        break;
      }
      if (l->loads[r] > latest) latest = l->loads[r];
    }
    if (late < first) {
      *best = first++;
      *load = latest;
    } else {
      first = late + 1;
    }
  }
}

static void soonest_at(const list *l, int32_t low, int32_t high, int32_t degree, int32_t stride,
                       int64_t *load, int32_t *best) {
  for (int32_t first = (low + stride - 1) / stride * stride; first + degree <= high;
       first += stride) {
    if (!hcp__place_allowed(l->p->limits, first, degree)) continue;
    int64_t latest = load_of(l, first, degree);
    if (latest < *load) {
      *best = first;
      *load = latest;
    }
  }
}

static void soonest(const list *l, int32_t low, int32_t high, int32_t degree, int64_t *load,
                    int32_t *best) {
  int32_t node = l->p->limits->ranks_per_node;
  *load = INT64_MAX;
  *best = -1;
  if (l->p->limits->pow2 || (node > 0 && degree > node)) {
    soonest_at(l, low, high, degree, l->p->limits->pow2 ? degree : node, load, best);
  } else if (node > 0) {
    for (int32_t start = low - low % node; start < high; start += node)
      soonest_within(l, start > low ? start : low, start + node < high ? start + node : high,
                     degree, load, best);
  } else {
    soonest_within(l, low, high, degree, load, best);
  }
}

/* ---- joining ---- */

static int is_top(const list *l, int32_t b) {
  const hcp__block *block = &l->blocks->block[b];
  for (int32_t r = block->first_rank; r < block->first_rank + block->degree; r++)
    if (l->top[r] != b) return 0;
  return 1;
}

/* The group of the same degree that ends soonest and can take the sequence.
 * Widest first, so those are the last ones. -1: none. */
static int32_t joinable(const list *l, const hcp__option *option) {
  int32_t best = -1, looked = 0;
  for (int32_t b = l->blocks->count - 1; b >= 0 && looked < 4 * POD; b--, looked++) {
    const hcp__block *block = &l->blocks->block[b];
    if (block->degree != option->degree) break;
    if (block->rows + option->rows > l->p->capacity) continue;
    if (best >= 0 && block->end > l->blocks->block[best].end) continue;
    if (is_top(l, b)) best = b;
  }
  return best;
}

/* ---- gaps ---- */

static int add_gap(list *l, int32_t rank, int32_t width, int64_t from, int64_t room) {
  if (width < 1 || room <= l->p->cost->launch) return 1;
  if (l->gap_count == l->gap_capacity) {
    int32_t capacity = 2 * l->gap_capacity + 64;
    gap *grown = realloc(l->gaps, (size_t)capacity * sizeof *grown);
    if (grown == NULL) return 0;
    l->gaps = grown;
    l->gap_capacity = capacity;
  }
  l->gaps[l->gap_count++] = (gap){from, room, rank, width, -1};
  return 1;
}

/* What an interval leaves free before start: one gap for neighbours of equal load. */
static int add_gaps(list *l, int32_t first, int32_t degree, int64_t start) {
  for (int32_t r = first, next; r < first + degree; r = next) {
    for (next = r + 1; next < first + degree && l->loads[next] == l->loads[r];) next++;
    if (!add_gap(l, r, next - r, l->loads[r], start - l->loads[r])) return 0;
  }
  return 1;
}

/* Where in the gap the group may begin, -1: nowhere. */
static int32_t place_in(const list *l, const gap *g, int32_t degree) {
  if (g->width < degree) return -1;
  if (hcp__place_allowed(l->p->limits, g->rank, degree)) return g->rank;
  int32_t last = g->rank + g->width - degree;
  return hcp__place_allowed(l->p->limits, last, degree) ? last : -1;
}

/* Of the latest gaps, the one that leaves the least width, then time. */
static int32_t tightest(const list *l, int32_t degree, int64_t needed) {
  int32_t best = -1, oldest = l->gap_count > GAPS ? l->gap_count - GAPS : 0;
  for (int32_t i = l->gap_count - 1; i >= oldest; i--) {
    const gap *g = &l->gaps[i];
    if (g->room < needed || g->width < degree || place_in(l, g, degree) < 0) continue;
    const gap *b = best < 0 ? NULL : &l->gaps[best];
    if (b == NULL || g->width < b->width || (g->width == b->width && g->room < b->room)) best = i;
  }
  return best;
}

/* 1: placed, 0: no gap holds it, -1: out of memory. */
static int place_in_gap(list *l, int32_t sequence, const hcp__option *option) {
  int64_t launch = l->p->cost->launch;
  int64_t needed = hcp__slowed(launch + option->time, l->slowest);
  int32_t i = tightest(l, option->degree, needed);
  if (i < 0) return 0;
  gap g = l->gaps[i];
  int32_t first = place_in(l, &g, option->degree);
  int32_t b = hcp__block_open(l->blocks, first, option->degree, g.from, launch);
  hcp__block_add(l->blocks, b, sequence, option->rows, option->time);
  l->gaps[i] = l->gaps[--l->gap_count];
  return add_gap(l, g.rank, first - g.rank, g.from, g.room) &&
                 add_gap(l, first + option->degree, g.rank + g.width - first - option->degree,
                         g.from, g.room) &&
                 add_gap(l, first, option->degree, g.from + needed, g.room - needed)
             ? 1
             : -1;
}

/* Gaps of several ranks become gaps of one. */
static int split_gaps(list *l) {
  for (int32_t i = 0, count = l->gap_count; i < count; i++) {
    gap g = l->gaps[i];
    l->gaps[i].width = 1;
    for (int32_t r = g.rank + 1; r < g.rank + g.width; r++)
      if (!add_gap(l, r, 1, g.from, g.room)) return 0;
  }
  return 1;
}

/* ---- pods ---- */

static int32_t pod_end(const list *l, int32_t pod) {
  int32_t end = (pod + 1) * l->pod_ranks;
  return end < l->p->limits->ranks ? end : l->p->limits->ranks;
}

/* The pod with the least work a rank so far, so that only its ranks are searched. */
static void choose_pod(const list *l, int32_t degree, int32_t *low, int32_t *high) {
  *low = 0;
  *high = l->p->limits->ranks;
  if (l->pods < 2 || degree > l->pod_ranks / 4) return;
  int32_t least = 0;
  for (int32_t i = 1; i < l->pods; i++)
    if (l->pod_areas[i] / (pod_end(l, i) - i * l->pod_ranks) <
        l->pod_areas[least] / (pod_end(l, least) - least * l->pod_ranks))
      least = i;
  *low = least * l->pod_ranks;
  *high = pod_end(l, least);
}

static void charge_pods(list *l, const hcp__block *block, int64_t time) {
  for (int32_t r = block->first_rank, last = r + block->degree; r < last;) {
    int32_t pod = r / l->pod_ranks, end = pod_end(l, pod) < last ? pod_end(l, pod) : last;
    l->pod_areas[pod] = hcp__sum(l->pod_areas[pod], hcp__scaled(time, end - r, 1));
    r = end;
  }
}

/* ---- wide groups ---- */

static int place_wide(list *l, int32_t sequence, const hcp__option *option) {
  int64_t start, launch = l->p->cost->launch;
  int32_t first, low, high;
  int placed = place_in_gap(l, sequence, option);
  if (placed != 0) return placed > 0;
  choose_pod(l, option->degree, &low, &high);
  soonest(l, low, high, option->degree, &start, &first);
  if (first < 0) soonest(l, 0, l->p->limits->ranks, option->degree, &start, &first);
  int32_t b = launch > 0 ? joinable(l, option) : -1;
  if (b < 0 || l->blocks->block[b].end > start + launch) {
    b = hcp__block_open(l->blocks, first, option->degree, start, launch);
    if (!add_gaps(l, first, option->degree, start)) return 0;
    for (int32_t r = first; r < first + option->degree; r++) l->top[r] = b;
  }
  hcp__block_add(l->blocks, b, sequence, option->rows, option->time);
  const hcp__block *block = &l->blocks->block[b];
  charge_pods(l, block, option->time + (block->sequences == 1 ? launch : 0));
  for (int32_t r = block->first_rank; r < block->first_rank + block->degree; r++)
    l->loads[r] = block->end;
  return 1;
}

/* ---- single ranks ---- */

static int gap_before(const gap *a, const gap *b) {
  return a->room != b->room ? a->room > b->room : a->rank < b->rank;
}

static void sift_gap(list *l, int32_t i) {
  gap moved = l->gaps[i];
  for (int32_t child = 2 * i + 1; child < l->gap_count; child = 2 * i + 1) {
    if (child + 1 < l->gap_count && gap_before(&l->gaps[child + 1], &l->gaps[child])) child++;
    if (!gap_before(&l->gaps[child], &moved)) break;
    l->gaps[i] = l->gaps[child];
    i = child;
  }
  l->gaps[i] = moved;
}

static int rank_before(const list *l, int32_t a, int32_t b) {
  return l->loads[a] != l->loads[b] ? l->loads[a] < l->loads[b] : a < b;
}

static void sift_rank(list *l, int32_t i) {
  int32_t moved = l->heap[i], ranks = l->p->limits->ranks;
  for (int32_t child = 2 * i + 1; child < ranks; child = 2 * i + 1) {
    if (child + 1 < ranks && rank_before(l, l->heap[child + 1], l->heap[child])) child++;
    if (!rank_before(l, l->heap[child], moved)) break;
    l->heap[i] = l->heap[child];
    i = child;
  }
  l->heap[i] = moved;
}

static void heapify(list *l) {
  for (int32_t r = 0; r < l->p->limits->ranks; r++) l->heap[r] = r;
  for (int32_t i = l->p->limits->ranks / 2; i >= 0; i--) sift_rank(l, i);
  for (int32_t i = l->gap_count / 2; i >= 0 && l->gap_count > 0; i--) sift_gap(l, i);
}

/* Into the widest gap, when it fits there. */
static int fill_gap(list *l, int32_t sequence, const hcp__option *option) {
  if (l->gap_count == 0) return 0;
  gap *widest = &l->gaps[0];
  int32_t b = widest->block;
  int joins = b >= 0 && l->blocks->block[b].rows + option->rows <= l->p->capacity;
  int64_t needed = hcp__slowed(option->time + (joins ? 0 : l->p->cost->launch), l->slowest);
  if (needed > widest->room) return 0;
  if (!joins) b = hcp__block_open(l->blocks, widest->rank, 1, widest->from, l->p->cost->launch);
  hcp__block_add(l->blocks, b, sequence, option->rows, option->time);
  widest->block = b;
  widest->from += needed;
  widest->room -= needed;
  sift_gap(l, 0);
  return 1;
}

/* A group at the end of the rank that the sequence can join, -1: none. Those
 * after it move back, which delays nobody else. */
static int32_t joinable_single(const list *l, int32_t rank, int64_t rows) {
  int32_t b = l->top[rank];
  for (int32_t i = 0; i < JOINABLE && b >= 0 && l->blocks->block[b].degree == 1; i++) {
    if (l->blocks->block[b].rows + rows <= l->p->capacity) return b;
    b = l->below[b];
  }
  return -1;
}

static void place_single(list *l, int32_t sequence, const hcp__option *option) {
  int32_t rank = l->heap[0], b = joinable_single(l, rank, option->rows);
  int64_t launch = 0;
  if (b < 0) {
    launch = l->p->cost->launch;
    b = hcp__block_open(l->blocks, rank, 1, l->loads[rank], launch);
    l->below[b] = l->top[rank];
    l->top[rank] = b;
  }
  hcp__block_add(l->blocks, b, sequence, option->rows, option->time);
  l->loads[rank] = hcp__sum(l->loads[rank], slowed_on(l, rank, launch + option->time));
  sift_rank(l, 0);
}

/* Onto the rank when the sequence ends there within the limit. */
static int place_within(list *l, int32_t sequence, const hcp__option *option, int32_t rank,
                        int64_t limit) {
  int32_t b = joinable_single(l, rank, option->rows);
  int64_t launch = b < 0 ? l->p->cost->launch : 0;
  if (slowed_on(l, rank, launch + option->time) > limit - l->loads[rank]) return 0;
  if (b < 0) {
    b = hcp__block_open(l->blocks, rank, 1, l->loads[rank], launch);
    l->below[b] = l->top[rank];
    l->top[rank] = b;
  }
  hcp__block_add(l->blocks, b, sequence, option->rows, option->time);
  l->loads[rank] = hcp__sum(l->loads[rank], slowed_on(l, rank, launch + option->time));
  return 1;
}

/* Rank after rank, so that ranks with long sequences need one launch and those
 * with many short ones more: the first of a few open ranks that takes the
 * sequence within the limit. */
static int place_packed(list *l, int32_t sequence, const hcp__option *option, int64_t limit) {
  int32_t ranks = l->p->limits->ranks, last = l->open + OPEN < ranks ? l->open + OPEN : ranks;
  for (int32_t i = l->open; i < last; i++)
    if (place_within(l, sequence, option, l->heap[i], limit)) return 1;
  if (last == ranks) return 0;
  l->open++;
  return place_within(l, sequence, option, l->heap[last], limit);
}

/* ---- all of them ---- */

typedef struct task {
  int32_t degree;
  int32_t place; /* in problem.order */
  const hcp__option *option;
} task;

/* The first option at a power of two ranks: such widths lie
 * inside each other, so that their groups stack without gaps. */
static const hcp__option *widened(const hcp__problem *p, const hcp__kind *kind,
                                  const hcp__option *option) {
  if ((option->degree & (option->degree - 1)) == 0) return option;
  const hcp__choices *all = hcp__choices_of(p, kind);
  for (const hcp__option *o = all->options; o < all->options + all->count; o++)
    if (o->degree > option->degree && (o->degree & (o->degree - 1)) == 0) return o;
  return option;
}

/* Widest first, longest first among equals: a counting sort by degree. */
static hcp_status sort_tasks(const hcp__problem *p, int64_t target, int32_t nested, task *tasks,
                             hcp_error *err) {
  int32_t most = p->limits->max_degree;
  int32_t *starts = calloc((size_t)most + 2, sizeof *starts);
  const hcp__option **chosen = malloc(((size_t)p->kind_count + 1) * sizeof *chosen);
  hcp_status status = HCP_OK;
  if (starts == NULL || chosen == NULL) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d degrees", most);
    goto done;
  }
  for (int32_t k = 0; k < p->kind_count; k++) {
    chosen[k] = hcp__allot(p, &p->kinds[k], target);
    if (nested) chosen[k] = widened(p, &p->kinds[k], chosen[k]);
    starts[most - chosen[k]->degree + 1] += p->kinds[k].count;
  }
  for (int32_t d = 0; d < most; d++) starts[d + 1] += starts[d];
  for (int32_t i = 0; i < p->n; i++) {
    const hcp__option *option = chosen[p->kind_of[i]];
    tasks[starts[most - option->degree]++] = (task){option->degree, i, option};
  }
done:
  free(chosen);
  free(starts);
  return status;
}

/* Sequences on single ranks that end within the limit; returns how many tasks
 * are done. */
static int32_t pack_singles(list *l, const task *tasks, int32_t i, int64_t limit) {
  for (; i < l->p->n; i++) {
    /* sort_tasks has filled all n: the analyzer loses sight of n on the way. */
    int32_t sequence = l->p->order[tasks[i].place]; /* NOLINT(clang-analyzer-core.*) */
    if (fill_gap(l, sequence, tasks[i].option)) continue;
    if (!place_packed(l, sequence, tasks[i].option, limit)) break;
  }
  for (int32_t r = l->p->limits->ranks / 2; r >= 0; r--) sift_rank(l, r);
  return i;
}

/* The widest may stand in blocks of their own already, in columns without gaps. */
static void start_above(list *l) {
  for (int32_t b = 0; b < l->blocks->count; b++) {
    const hcp__block *block = &l->blocks->block[b];
    charge_pods(l, block, block->end - block->start);
    for (int32_t r = block->first_rank; r < block->first_rank + block->degree; r++) {
      if (block->end <= l->loads[r]) continue;
      l->loads[r] = block->end;
      l->top[r] = b;
    }
  }
}

static hcp_status place_all(list *l, const task *tasks, int64_t limit, hcp_error *err) {
  int32_t i = l->blocks->count, n = l->p->n;
  start_above(l);
  for (; i < n && tasks[i].degree > 1; i++)
    if (!place_wide(l, l->p->order[tasks[i].place], tasks[i].option))
      return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", n);
  if (!split_gaps(l)) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", n);
  heapify(l);
  if (limit > 0) i = pack_singles(l, tasks, i, limit);
  for (; i < n; i++) {
    int32_t sequence = l->p->order[tasks[i].place]; /* NOLINT(clang-analyzer-core.*): as above */
    if (!fill_gap(l, sequence, tasks[i].option)) place_single(l, sequence, tasks[i].option);
  }
  return HCP_OK;
}

static int list_init(list *l) {
  size_t ranks = (size_t)l->p->limits->ranks;
  int32_t node = l->p->limits->ranks_per_node;
  int32_t count = (l->p->limits->ranks + POD - 1) / POD, unit = node > 0 ? node : 16;
  l->pod_ranks = ((l->p->limits->ranks + count - 1) / count + unit - 1) / unit * unit;
  l->pods = (l->p->limits->ranks + l->pod_ranks - 1) / l->pod_ranks;
  l->loads = calloc(ranks, sizeof *l->loads);
  l->top = malloc(ranks * sizeof *l->top);
  l->heap = malloc(ranks * sizeof *l->heap);
  l->below = malloc(((size_t)l->p->n + 1) * sizeof *l->below);
  l->pod_areas = calloc((size_t)l->pods, sizeof *l->pod_areas);
  if (l->loads == NULL || l->top == NULL || l->heap == NULL || l->below == NULL ||
      l->pod_areas == NULL)
    return 0;
  for (size_t r = 0; r < ranks; r++) l->top[r] = -1;
  return 1;
}

static void list_release(list *l) {
  free(l->gaps);
  free(l->pod_areas);
  free(l->below);
  free(l->heap);
  free(l->top);
  free(l->loads);
}

hcp_status hcp__plan_list(const hcp__problem *p, int64_t target, int32_t nested, int64_t limit,
                          int32_t stacked, hcp__blocks *blocks, hcp_error *err) {
  list l = {.p = p, .blocks = blocks};
  l.slowest = hcp__slowness(p->limits, 0, p->limits->ranks);
  task *tasks = malloc(((size_t)p->n + 1) * sizeof *tasks);
  hcp_status status = HCP_OK;
  if (!stacked) blocks->count = 0;
  blocks->placed_on = p->limits;
  if (tasks == NULL || !list_init(&l))
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", p->n);
  if (status == HCP_OK) status = sort_tasks(p, target, nested, tasks, err);
  if (status == HCP_OK) status = place_all(&l, tasks, limit, err);
  free(tasks);
  list_release(&l);
  return status;
}
