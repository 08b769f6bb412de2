/* columns.c - the few long sequences of a plan whose ranks meet at the end of the
 * step: columns that are filled up to the target, so that no gap arises.
 *
 * All ranks are one region, free from 0 on. Widest first, sequences of one degree
 * are stacked in a region as wide as they are, or in one that is cut in two for
 * them: the top of the stack and what is left beside it are flat again. So ranks
 * are idle at the target only, and little, as sums of a dozen times come near to
 * any number: a stack is the subset whose sum leaves what sums of narrower
 * sequences can fill.
 *
 * Which regions to cut is tried with the sequences of a degree poured like a
 * fluid, in many ways that a hash tells apart; the first ways that hold all are
 * tried with sequences. Where there are more than few sequences, lists place the
 * narrow ones on top. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

enum {
  LEVELS = 1 << 16, /* of the target, where sequences are poured */
  GRAINS = 1 << 11, /* of the target, where they are summed up   */
  WORDS = GRAINS / 64 + 1,
  WAYS = 256,       /* that are poured                       */
  TRIES = 16,       /* that are tried with sequences         */
  LOOKS = 16,       /* at sums for what they are exactly     */
  NEARLY = 3,       /* grains that a full region may lack,   */
  WASTE = 64,       /* and one that narrower ones fill       */
  WIDER = 4         /* ranks by which a stack may be widened */
};

/* Ranks that are free from floor on. */
typedef struct region {
  int32_t first, width;
  int32_t level; /* of the floor */
  int64_t floor;
} region;

typedef struct item {
  const hcp__option *option;
  int32_t place; /* in problem.order */
  int32_t taken;
  int32_t own;    /* grains of its option and launch  */
  int32_t grains; /* the same in the stack that is considered */
} item;

/* Sequences of one degree: items from first on. */
typedef struct width_class {
  int32_t degree, first, count;
  int32_t level, least;     /* of all together, of the shortest          */
  int32_t widened[WIDER];   /* [i]: of all together on i + 1 ranks more  */
  uint64_t narrower[WORDS]; /* bit GRAINS - s: narrower ones can sum to s */
} width_class;

typedef struct columns {
  const hcp__problem *p;
  hcp__blocks *blocks;
  int64_t target, unit, grain;
  int32_t top; /* level of the target */
  int32_t least; /* degree */
  int32_t n;     /* sequences of at least that degree */
  item *items;   /* n, widest first, longest first among equals */
  width_class *classes;
  int32_t class_count, narrowest;
  region *regions; /* of at most as many as ranks */
  int32_t region_count;
  uint32_t way;
  int64_t *budget; /* looks at regions, and at words of sums */
  uint64_t sums[WORDS];
  int32_t from[WORDS * 64]; /* the item by which each sum was reached first */
} columns;

static int64_t needed(const columns *c, const hcp__option *option) {
  return option->time + c->p->cost->launch;
}

static int32_t level_of(const columns *c, int64_t time) {
  return (int32_t)(time / c->unit + (time % c->unit != 0));
}

static int32_t grains_of(const columns *c, int64_t time) {
  int32_t grains = (int32_t)((time + c->grain / 2) / c->grain);
  return grains > 0 ? grains : 1;
}

static const hcp__kind *kind_of(const columns *c, const item *one) {
  return &c->p->kinds[c->p->kind_of[one->place]];
}

/* The fastest option on at most width ranks, which hold the item's own. */
static const hcp__option *fastest_on(const columns *c, const item *one, int32_t width) {
  return hcp__fastest_on(c->p, kind_of(c, one), width);
}

/* ---- regions ---- */

static uint32_t hash(uint32_t way, int32_t degree, const region *r) {
  uint64_t h = way * UINT64_C(0x9E3779B97F4A7C15) ^
               ((uint64_t)degree << 42 | (uint64_t)r->first << 21 | (uint64_t)r->width) *
                   UINT64_C(0xBF58476D1CE4E5B9);
  h = (h ^ h >> 31) * UINT64_C(0xD6E8FEB86659FD93);
  return (uint32_t)(h >> 40);
}

/* How much speaks for stacking the degree in the region. Its own width most; then
 * that what is left beside it is narrower, that there is room for about all that
 * are left, and chance, except in the first way. */
static int32_t score(const columns *c, const region *r, int32_t degree, int32_t left) {
  int32_t beside = r->width - degree, room = c->top - r->level;
  int32_t points = c->way == 0 ? 0 : (int32_t)(hash(c->way, degree, r) % 2048);
  if (beside == 0) return points + 2048;
  if (beside < c->narrowest)
    points -= 1024;
  else if (beside < degree)
    points += 512;
  return points - (left > room ? left - room : room - left) / (LEVELS / 512) + 512;
}

/* The region for a stack of the degree, in which the shortest has room; NULL: none. */
static region *choose(const columns *c, int32_t degree, int32_t left, int32_t least) {
  int32_t best = -1, most = 0;
  *c->budget -= c->region_count;
  for (int32_t i = 0; i < c->region_count; i++) {
    const region *r = &c->regions[i];
    if (r->width < degree || c->top - r->level < least) continue;
    int32_t points = score(c, r, degree, left);
    if (best >= 0 && points <= most) continue;
    best = i;
    most = points;
  }
  return best < 0 ? NULL : &c->regions[best];
}

/* Cuts the region where the stack ends, unless what is left would be too narrow for
 * all others, or, in some ways, a single rank: then the stack is that much wider.
 * Returns by how much. */
static int32_t cut(columns *c, region *r, int32_t degree) {
  int32_t beside = r->width - degree;
  int idle = beside < c->narrowest || (beside == 1 && hash(~c->way, degree, r) % 4 == 0);
  if (idle && beside <= WIDER) return beside;
  c->regions[c->region_count++] = (region){r->first + degree, beside, r->level, r->floor};
  r->width = degree;
  return 0;
}

static void start(columns *c) {
  c->regions[0] = (region){0, c->p->limits->ranks, 0, 0};
  c->region_count = 1;
}

/* Groups of that degree stay within a node, unless they are whole nodes: then so are all
 * regions that were cut before, but for a last one that has what nodes leave. */
static void keep_to_nodes(columns *c, int32_t degree) {
  int32_t node = hcp__node_ranks(c->p->limits);
  for (int32_t i = 0; degree <= node && i < c->region_count; i++) {
    region *r = &c->regions[i];
    if (r->width <= node) continue;
    c->regions[c->region_count++] = (region){r->first + node, r->width - node, r->level, r->floor};
    r->width = node;
  }
}

/* ---- pouring ---- */

/* What is left when the region is filled with as much as it holds. */
static int32_t fill(const columns *c, region *r, const width_class *k, int32_t wider,
                    int32_t left) {
  int64_t room = c->top - r->level, all = wider > 0 ? k->widened[wider - 1] : k->level;
  int64_t level = left * all / k->level;
  if (level <= room) {
    r->level += (int32_t)level;
    return 0;
  }
  int64_t held = room * k->level / all;
  r->level = c->top;
  return left - (int32_t)(held < left ? held : left);
}

static int32_t pours(columns *c) {
  start(c);
  for (int32_t i = 0; i < c->class_count; i++) {
    const width_class *k = &c->classes[i];
    keep_to_nodes(c, k->degree);
    for (int32_t left = k->level; left > 0;) {
      region *r = choose(c, k->degree, left, k->least < left ? k->least : left);
      if (r == NULL) return 0;
      left = fill(c, r, k, cut(c, r, k->degree), left);
    }
  }
  return 1;
}

/* ---- sums ---- */

/* Word i of the bits moved up by so many. */
static uint64_t moved_up(const uint64_t *bits, int32_t i, int32_t by) {
  int32_t from = i - by / 64, rest = by % 64;
  uint64_t word = from >= 0 ? bits[from] << rest : 0;
  return rest > 0 && from > 0 ? word | bits[from - 1] >> (64 - rest) : word;
}

static uint64_t moved_down(const uint64_t *bits, int32_t i, int32_t by) {
  int32_t from = i + by / 64, rest = by % 64;
  uint64_t word = from < WORDS ? bits[from] >> rest : 0;
  return rest > 0 && from + 1 < WORDS ? word | bits[from + 1] << (64 - rest) : word;
}

/* Sums below the end of a word that one more item makes possible. */
static void add_sums(columns *c, int32_t index, int32_t last) {
  int32_t grains = c->items[index].grains;
  *c->budget -= last + 1;
  for (int32_t i = last; i >= grains / 64; i--) {
    uint64_t more = moved_up(c->sums, i, grains) & ~c->sums[i];
    c->sums[i] |= more;
    for (; more != 0; more &= more - 1) c->from[i * 64 + __builtin_ctzll(more)] = index;
  }
}

/* For every class the sums of all narrower ones: any, where short ones follow. */
static void sum_narrower(columns *c) {
  for (int32_t i = c->class_count - 1; i >= 0; i--) {
    width_class *k = &c->classes[i], *wider = k - 1;
    if (i == c->class_count - 1) {
      memset(k->narrower, c->least > 1 ? 255 : 0, sizeof k->narrower);
      k->narrower[GRAINS / 64] |= (uint64_t)1 << GRAINS % 64;
    }
    if (i == 0) continue;
    memcpy(wider->narrower, k->narrower, sizeof k->narrower);
    for (int32_t j = k->first; j < k->first + k->count; j++)
      for (int32_t w = 0; w < WORDS; w++)
        wider->narrower[w] |= moved_down(wider->narrower, w, c->items[j].own);
  }
}

/* ---- stacks ---- */

/* Exactly what the items of that sum need. */
static int64_t time_of(const columns *c, int32_t sum, int32_t width) {
  int64_t time = 0;
  for (const item *one; sum > 0; sum -= one->grains) {
    one = &c->items[c->from[sum]];
    time += needed(c, fastest_on(c, one, width));
  }
  return time;
}

/* The largest sum from least on that fits, 0: none. */
static int32_t largest_sum(const columns *c, int64_t room, int32_t width, int32_t least) {
  for (int32_t sum = (int32_t)(room / c->grain); sum >= least; sum--)
    if ((c->sums[sum / 64] >> sum % 64 & 1) && time_of(c, sum, width) <= room) return sum;
  return 0;
}

/* Of words [first, end), a sum that fits and leaves what narrower sequences fill
 * but for the waste, 0: none. */
static int32_t sum_within(const columns *c, const width_class *k, int64_t room, int32_t width,
                          int32_t waste, int32_t first, int32_t end) {
  int32_t less = GRAINS - (int32_t)(room / c->grain) + waste, looks = LOOKS;
  for (int32_t w = end - 1; w >= first; w--) {
    uint64_t sums = c->sums[w] & moved_down(k->narrower, w, less);
    for (; sums != 0 && looks > 0; looks--) {
      int32_t bit = 63 - __builtin_clzll(sums), sum = w * 64 + bit;
      sums ^= (uint64_t)1 << bit;
      if (sum > 0 && time_of(c, sum, width) <= room) return sum;
    }
  }
  return 0;
}

/* A sum that leaves what narrower sequences fill but for a little. From where the
 * search begins depends on the way: else all stacks would want the same few above
 * them. 0: none. */
static int32_t leaving_sum(const columns *c, const width_class *k, const region *r) {
  int64_t room = c->target - r->floor;
  int32_t words = (int32_t)(room / c->grain) / 64 + 1, sum = 0;
  int32_t begin = c->way == 0 ? words : (int32_t)(hash(c->way, k->degree, r) % (uint32_t)words) + 1;
  if (c->least == 1 && k == &c->classes[c->class_count - 1]) return 0;
  for (int32_t waste = 0; waste < WASTE && sum == 0; waste++) {
    sum = sum_within(c, k, room, r->width, waste, 0, begin);
    if (sum == 0) sum = sum_within(c, k, room, r->width, waste, begin, words);
  }
  return sum;
}

/* The sum of a stack in the region: as soon as one fills it, of the longest sequences
 * that are left; 0: none fits. */
static int32_t choose_sum(columns *c, const width_class *k, const region *r, int32_t wider) {
  int64_t room = c->target - r->floor;
  int32_t grains = (int32_t)(room / c->grain), sum = 0;
  memset(c->sums, 0, sizeof c->sums);
  c->sums[0] = 1;
  for (int32_t i = k->first; i < k->first + k->count && sum == 0; i++) {
    item *one = &c->items[i];
    if (one->taken) continue;
    one->grains = wider == 0 ? one->own : grains_of(c, needed(c, fastest_on(c, one, r->width)));
    if (one->grains > grains) continue;
    add_sums(c, i, grains / 64);
    sum = largest_sum(c, room, r->width, grains > NEARLY ? grains - NEARLY : 1);
  }
  if (sum == 0) sum = leaving_sum(c, k, r);
  return sum > 0 ? sum : largest_sum(c, room, r->width, 1);
}

static int64_t put(columns *c, const region *r, item *one, int64_t floor) {
  const hcp__option *option = fastest_on(c, one, r->width);
  int32_t b = hcp__block_open(c->blocks, r->first, option->degree, floor, c->p->cost->launch);
  hcp__block_add(c->blocks, b, c->p->order[one->place], option->rows, option->time);
  one->taken = 1;
  return c->blocks->block[b].end;
}

/* Returns how many were stacked, 0: no subset fits. */
static int32_t stack(columns *c, const width_class *k, region *r, int32_t wider) {
  int32_t sum = choose_sum(c, k, r, wider), count = 0;
  for (; sum > 0; count++) {
    item *one = &c->items[c->from[sum]];
    r->floor = put(c, r, one, r->floor);
    sum -= one->grains;
  }
  r->level = level_of(c, r->floor);
  return count;
}

/* Level of those that are left, and of the shortest of them. */
static int32_t left_of(const columns *c, const width_class *k, int32_t *least) {
  int32_t left = 0;
  *least = c->top;
  for (int32_t i = k->first; i < k->first + k->count; i++) {
    if (c->items[i].taken) continue;
    int32_t level = level_of(c, needed(c, c->items[i].option));
    left += level;
    if (level < *least) *least = level;
  }
  return left;
}

static int32_t stack_all(columns *c) {
  start(c);
  c->blocks->count = 0;
  for (int32_t i = 0; i < c->n; i++) c->items[i].taken = 0;
  for (int32_t i = 0; i < c->class_count; i++) {
    const width_class *k = &c->classes[i];
    keep_to_nodes(c, k->degree);
    for (int32_t todo = k->count, stacked; todo > 0; todo -= stacked) {
      int32_t least, left = left_of(c, k, &least);
      region *r = choose(c, k->degree, left, least);
      stacked = r == NULL || hcp__stopped(c->p) ? 0 : stack(c, k, r, cut(c, r, k->degree));
      if (stacked == 0) return 0;
    }
  }
  return 1;
}

/* ---- classes ---- */

static int widest_first(const void *left, const void *right) {
  const item *a = left, *b = right;
  if (a->option->degree != b->option->degree) return a->option->degree > b->option->degree ? -1 : 1;
  return (a->place > b->place) - (a->place < b->place);
}

/* Returns 0 when a sequence is too long for the target, or not as many stand in columns
 * as can. */
static int32_t make_items(columns *c) {
  for (int32_t i = 0; i < c->p->n; i++) {
    item one = {.place = i};
    one.option = hcp__allot(c->p, kind_of(c, &one), c->target - c->p->cost->launch);
    if (needed(c, one.option) > c->target) return 0;
    if (one.option->degree < c->least) continue;
    one.own = grains_of(c, needed(c, one.option));
    c->items[c->n++] = one;
  }
  qsort(c->items, (size_t)c->n, sizeof *c->items, widest_first);
  return c->n > 0 && c->n <= HCP_COLUMNS_MAX;
}

static void measure(const columns *c, width_class *k) {
  k->level = left_of(c, k, &k->least);
  for (int32_t wider = 1; wider <= WIDER; wider++) {
    k->widened[wider - 1] = 0;
    for (int32_t i = k->first; i < k->first + k->count; i++)
      k->widened[wider - 1] +=
          level_of(c, needed(c, fastest_on(c, &c->items[i], k->degree + wider)));
  }
}

static void make_classes(columns *c) {
  int32_t n = c->n;
  c->narrowest = c->least > 1 ? 1 : c->items[n - 1].option->degree;
  for (int32_t i = 0; i < n; i++) {
    int32_t degree = c->items[i].option->degree;
    if (i == 0 || c->classes[c->class_count - 1].degree != degree)
      c->classes[c->class_count++] = (width_class){.degree = degree, .first = i};
    c->classes[c->class_count - 1].count++;
  }
  for (int32_t i = 0; i < c->class_count; i++) measure(c, &c->classes[i]);
  sum_narrower(c);
}

static int32_t find(columns *c, uint32_t round) {
  int32_t tries = 0;
  if (!make_items(c)) return 0;
  make_classes(c);
  for (c->way = round * WAYS; c->way < (round + 1) * WAYS && tries < TRIES && *c->budget > 0;
       c->way++) {
    if (hcp__stopped(c->p)) return 0;
    if (!pours(c)) continue;
    if (stack_all(c)) return 1;
    tries++;
  }
  return 0;
}

static int columns_init(columns *c) {
  c->unit = c->target / LEVELS + 1;
  c->grain = c->target / GRAINS + 1;
  c->top = (int32_t)(c->target / c->unit);
  c->items = malloc(((size_t)c->p->n + 1) * sizeof *c->items);
  c->classes = malloc(((size_t)c->p->n + 1) * sizeof *c->classes);
  c->regions = malloc((size_t)c->p->limits->ranks * sizeof *c->regions);
  return c->items != NULL && c->classes != NULL && c->regions != NULL;
}

static void columns_release(columns *c) {
  free(c->regions);
  free(c->classes);
  free(c->items);
}

hcp_status hcp__plan_columns(const hcp__problem *p, int64_t target, int32_t round, int32_t least,
                             int64_t *budget, hcp__blocks *blocks, int32_t *found, hcp_error *err) {
  columns c = {.p = p, .blocks = blocks, .target = target, .budget = budget, .least = least};
  hcp_status status = HCP_OK;
  blocks->placed_on = p->limits;
  if (columns_init(&c))
    *found = find(&c, (uint32_t)round);
  else
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", p->n);
  columns_release(&c);
  return status == HCP_OK ? hcp__go_on(p, err) : status;
}
