/* problem.c - a request as the planner sees it: distinct lengths, and the
 * degrees that are worth a thought for each. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* Above DENSE ranks, degrees are tried in steps of at most 1/STEPS of themselves. Below
 * bound / NEGLIGIBLE a sequence is never made faster, and below bound / LIKELY only when that is
 * asked for. Options are kept in pieces of so many at least. */
enum { DENSE = 128, STEPS = 128, NEGLIGIBLE = 32, LIKELY = 3, PIECE = 1 << 9 };

/* ---- the menu: degrees to look at ---- */

typedef struct menu {
  int32_t *degrees; /* ascending, all allowed */
  int32_t count;
} menu;

static int32_t stride(int32_t degree) { return degree < DENSE ? 1 : degree / STEPS; }

/* The first allowed degree from d on, 0: none. */
static int32_t next_allowed(const hcp_limits *limits, const hcp_cost *cost, int32_t degree) {
  for (; degree <= limits->max_degree; degree++)
    if (hcp__degree_allowed(limits, cost, degree)) return degree;
  return 0;
}

static int32_t last_allowed(const hcp_limits *limits, const hcp_cost *cost) {
  for (int32_t degree = limits->max_degree; degree >= limits->min_degree; degree--)
    if (hcp__degree_allowed(limits, cost, degree)) return degree;
  return 0;
}

static hcp_status menu_init(menu *m, const hcp_limits *limits, const hcp_cost *cost,
                            hcp_error *err) {
  int32_t last = last_allowed(limits, cost), count = 0;
  if (last == 0)
    return hcp__fail(err, HCP_INVALID,
                     "no degree from min_degree (%d) to max_degree (%d) is allowed: expected one "
                     "that pow2, ranks_per_node and the cost table permit",
                     limits->min_degree, limits->max_degree);
  int32_t sparse = cost->times == NULL;
  for (int32_t d = next_allowed(limits, cost, limits->min_degree); d != 0;
       d = d == last ? 0 : next_allowed(limits, cost, d + (sparse ? stride(d) : 1)), count++) {
  }
  m->degrees = malloc(((size_t)count + 1) * sizeof *m->degrees);
  if (m->degrees == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d degrees", count);
  m->count = 0;
  for (int32_t d = next_allowed(limits, cost, limits->min_degree); d != 0;
       d = d == last ? 0 : next_allowed(limits, cost, d + (sparse ? stride(d) : 1)))
    m->degrees[m->count++] = d;
  if (m->degrees[m->count - 1] != last) m->degrees[m->count++] = last;
  return HCP_OK;
}

/* ---- kinds ---- */

/* The bounds of a sequence as one number. */
static int64_t bounds_of(const hcp_limits *limits, int32_t sequence) {
  int64_t least = limits->min_degrees != NULL ? limits->min_degrees[sequence] : 0;
  int64_t most = limits->max_degrees != NULL ? limits->max_degrees[sequence] : 0;
  return least * 2 * HCP__RANKS_MAX + most;
}

typedef struct bounded {
  int64_t pairs, bounds;
  int32_t sequence;
} bounded;

static int by_bounds(const void *left, const void *right) {
  const bounded *a = left, *b = right;
  if (a->pairs != b->pairs) return a->pairs > b->pairs ? -1 : 1;
  if (a->bounds != b->bounds) return a->bounds < b->bounds ? -1 : 1;
  return (a->sequence > b->sequence) - (a->sequence < b->sequence);
}

/* Among equal lengths, those of equal pairs and bounds side by side, most pairs first. */
static hcp_status sort_bounds(hcp__problem *p, hcp_error *err) {
  if (p->limits->min_degrees == NULL && p->limits->max_degrees == NULL && p->cost->pairs == NULL)
    return HCP_OK;
  bounded *equal = malloc(((size_t)p->n + 1) * sizeof *equal);
  if (equal == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", p->n);
  for (int32_t i = 0, end; i < p->n; i = end) {
    int64_t length = p->lengths[p->order[i]];
    for (end = i; end < p->n && p->lengths[p->order[end]] == length; end++)
      equal[end - i] = (bounded){hcp__size_at(p, p->order[end]).pairs,
                                 bounds_of(p->limits, p->order[end]), p->order[end]};
    qsort(equal, (size_t)(end - i), sizeof *equal, by_bounds);
    for (int32_t k = i; k < end; k++) p->order[k] = equal[k - i].sequence;
  }
  free(equal);
  return HCP_OK;
}

/* Longest first, equal ones by index: a radix sort, as there may be many. */
static hcp_status sort_lengths(hcp__problem *p, hcp_error *err) {
  int32_t *from = p->order, *to = p->kind_of; /* free until kinds are made */
  int64_t longest = 0;
  for (int32_t i = 0; i < p->n; i++)
    if (p->lengths[i] > longest) longest = p->lengths[i];
  for (int32_t i = 0; i < p->n; i++) from[i] = i;
  for (int32_t shift = 0; shift == 0 || (longest >> shift) > 0; shift += 11) {
    int32_t starts[2049] = {0};
    for (int32_t i = 0; i < p->n; i++) starts[2048 - ((p->lengths[i] >> shift) & 2047)]++;
    for (int32_t b = 0; b < 2048; b++) starts[b + 1] += starts[b];
    for (int32_t i = 0; i < p->n; i++)
      to[starts[2047 - ((p->lengths[from[i]] >> shift) & 2047)]++] = from[i];
    int32_t *swap = from;
    from = to;
    to = swap;
  }
  if (from != p->order) memcpy(p->order, from, (size_t)p->n * sizeof *from);
  return sort_bounds(p, err);
}

static void make_kinds(hcp__problem *p) {
  p->kind_count = 0;
  for (int32_t i = 0; i < p->n; i++) {
    if (i == 0 || !hcp__same_size(p, p->order[i], p->order[i - 1]) ||
        bounds_of(p->limits, p->order[i]) != bounds_of(p->limits, p->order[i - 1]))
      p->kinds[p->kind_count++] = (hcp__kind){.size = hcp__size_at(p, p->order[i]), .first = i};
    p->kinds[p->kind_count - 1].count++;
    p->kind_of[i] = p->kind_count - 1;
  }
}

/* ---- the shop: where options are made, and kept ---- */

typedef struct piece {
  struct piece *before;
  int32_t used, room;
  hcp__option options[];
} piece;

struct hcp__shop {
  menu degrees;
  int32_t *least;       /* kinds: degrees of their first options */
  int64_t enough;       /* time at which a sequence is fast enough */
  int64_t likely;       /* time below which options are made when they are asked for */
  hcp__option *counter; /* options of one kind, while they are made */
  int64_t *floors;      /* with a cost table: least areas from each degree of it on */
  piece *pieces;
  int32_t gaps;         /* whether the cost table lacks times, and has nobody to ask */
  int32_t empty;        /* no memory was left */
};

/* Memory for count options that stays where it is. NULL: none is left. */
static hcp__option *kept(hcp__shop *shop, int32_t count) {
  piece *last = shop->pieces;
  if (last == NULL || last->room - last->used < count) {
    int32_t room = last == NULL ? PIECE : last->room < 1 << 16 ? 2 * last->room : last->room;
    if (room < count) room = count;
    piece *more = malloc(sizeof *more + (size_t)room * sizeof *more->options);
    if (more == NULL) return NULL;
    *more = (piece){.before = last, .room = room};
    shop->pieces = last = more;
  }
  last->used += count;
  return &last->options[last->used - count];
}

static void close_shop(hcp__shop *shop) {
  if (shop == NULL) return;
  for (piece *last = shop->pieces; last != NULL;) {
    piece *before = last->before;
    free(last);
    last = before;
  }
  free(shop->floors);
  free(shop->counter);
  free(shop->least);
  free(shop->degrees.degrees);
  free(shop);
}

static int has_gaps(const hcp_times *times) {
  if (times == NULL || times->ask != NULL) return 0;
  int64_t count = (int64_t)times->length_count * times->degree_count, i = 0;
  while (i < count && times->times[i] > 0) i++;
  return i < count;
}

static hcp_status open_shop(hcp__problem *p, hcp_error *err) {
  const hcp_times *times = p->cost->times;
  hcp__shop *shop = calloc(1, sizeof *shop);
  if (shop == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan");
  p->shop = shop;
  shop->gaps = has_gaps(times);
  hcp_status status = menu_init(&shop->degrees, p->limits, p->cost, err);
  if (status != HCP_OK) return status;
  shop->least = malloc(((size_t)p->n + 1) * sizeof *shop->least);
  shop->counter = malloc(((size_t)shop->degrees.count + 1) * sizeof *shop->counter);
  if (times != NULL) shop->floors = malloc((size_t)times->degree_count * sizeof *shop->floors);
  if (shop->least == NULL || shop->counter == NULL || (times != NULL && shop->floors == NULL))
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", p->n);
  return HCP_OK;
}

/* ---- load ---- */

int64_t hcp__load(const hcp__problem *p, int32_t sequence, int32_t degree) {
  int64_t length = p->lengths[sequence], rows = hcp_rows_max(length, degree);
  if (!hcp__sequence_allows(p->limits, sequence, degree)) return HCP__NO_LOAD;
  if (p->shop->gaps && hcp__cost(p->cost, hcp__size_at(p, sequence), degree, 0) < 1)
    return HCP__NO_LOAD;
  if (p->limits->memory.limit == 0) return rows;
  int64_t limit = hcp__bytes_limit(p->limits, degree);
  int64_t bytes = hcp__bytes(&p->limits->memory, length, degree);
  if (bytes > limit) return HCP__NO_LOAD;
  int64_t load = hcp__scaled(bytes, p->capacity, limit);
  return load > rows ? load : rows;
}

/* ---- options ---- */

/* The least area in the cost table from each degree on: of all that it has. */
static void look_up(const hcp__problem *p, const hcp__kind *kind) {
  const hcp_times *times = p->cost->times;
  if (times == NULL) return;
  int64_t row = (int64_t)hcp__times_row(times, kind->size.length) * times->degree_count;
  int64_t area = INT64_MAX;
  for (int32_t c = times->degree_count - 1; c >= 0; c--) {
    int64_t time = times->times[row + c];
    if (time > 0 && time * times->degrees[c] < area &&
        hcp__degree_allowed(p->limits, p->cost, times->degrees[c]))
      area = time * times->degrees[c];
    p->shop->floors[c] = area;
  }
}

static int64_t tabulated_floor(const hcp__problem *p, int32_t least) {
  return p->shop->floors[hcp__times_column(p->cost->times, least)];
}

static int64_t area_floor(const hcp__problem *p, hcp__size size, int32_t least) {
  return p->cost->times != NULL ? tabulated_floor(p, least)
                                : hcp__area_floor(p->cost, size, least, p->limits->ranks_per_node);
}

/* Least degree that rounding lets hold a kind, 0: none. */
static int32_t least_degree(const hcp__problem *p, const hcp__kind *kind) {
  int64_t length = kind->size.length;
  int64_t degree = length / p->capacity + (length % p->capacity != 0);
  if (degree < p->limits->min_degree) degree = p->limits->min_degree;
  for (; degree <= p->limits->max_degree; degree++)
    if (hcp__degree_allowed(p->limits, p->cost, (int32_t)degree) &&
        hcp__load(p, p->order[kind->first], (int32_t)degree) <= p->capacity)
      return (int32_t)degree;
  return 0;
}

static int32_t menu_from(const menu *m, int32_t degree) {
  int32_t low = 0, high = m->count;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (m->degrees[middle] < degree)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* Keeps a degree that is faster than every lesser one, without its area. gap: degrees since the
 * last option were skipped, so the floors must hold for them too. Returns how many are kept. */
static int32_t consider(const hcp__problem *p, const hcp__kind *kind, int32_t degree, int32_t gap,
                        int32_t count) {
  hcp__option *made = p->shop->counter;
  int64_t rows = hcp__load(p, p->order[kind->first], degree);
  /* Rounding may overfill a degree that a smaller one does not. */
  if (rows > p->capacity) return count;
  int32_t node = p->limits->ranks_per_node;
  int64_t time = hcp__cost(p->cost, kind->size, degree, node);
  if (time < 1 || (count > 0 && time >= made[count - 1].time)) return count;
  int32_t least = gap && count > 0 ? made[count - 1].degree + 1 : degree;
  made[count] = (hcp__option){degree, least, rows, time, time, 0};
  if (gap) made[count].time_floor = hcp__time_floor(p->cost, kind->size, least, degree, node);
  return count + 1;
}

/* Makes the options of a kind up to the first that is as fast as `enough` at most. Returns how many
 * there are; *ended tells whether slower ones than the last were looked at in vain. */
static int32_t make_until(const hcp__problem *p, const hcp__kind *kind, int64_t enough,
                          int32_t *ended) {
  const menu *m = &p->shop->degrees;
  hcp__option *made = p->shop->counter;
  int32_t previous = p->shop->least[kind - p->kinds], gap = 0;
  int32_t count = consider(p, kind, previous, 0, 0);
  *ended = 0;
  for (int32_t i = menu_from(m, previous + 1); i < m->count; i++) {
    int32_t had = count;
    if (had > 0 && made[had - 1].time <= enough) return count;
    gap |= m->degrees[i] - previous > 1 && p->cost->times == NULL;
    previous = m->degrees[i];
    count = consider(p, kind, previous, gap, count);
    if (count > had) gap = 0;
  }
  *ended = 1;
  return count;
}

/* Makes options of a kind, and keeps them. 0: no memory is left. */
static int make_choices(const hcp__problem *p, const hcp__kind *kind, int64_t enough) {
  hcp__choices *choices = &p->choices[kind - p->kinds];
  int32_t ended, count = make_until(p, kind, enough, &ended);
  hcp__option *made = p->shop->counter, *options = kept(p->shop, count);
  if (options == NULL) return 0;
  int32_t falls = 1;
  look_up(p, kind);
  for (int32_t i = 0; i < count; i++) {
    options[i] = made[i];
    options[i].area_floor = area_floor(p, kind->size, made[i].least_degree);
    falls &= i == 0 || made[i].time_floor <= made[i - 1].time_floor;
  }
  int pruned = !ended && made[count - 1].time <= p->shop->enough;
  *choices = (hcp__choices){options, count, ended || pruned, pruned, falls};
  return 1;
}

/* A little further than was asked for, so that few are made again. */
const hcp__choices *hcp__choices_within(const hcp__problem *p, const hcp__kind *kind,
                                        int64_t time) {
  hcp__choices *choices = &p->choices[kind - p->kinds];
  int64_t until = hcp__most(time - time / 4, p->shop->enough);
  if (!choices->whole && !make_choices(p, kind, until)) p->shop->empty = 1;
  return choices;
}

const hcp__choices *hcp__choices_of(const hcp__problem *p, const hcp__kind *kind) {
  return hcp__choices_within(p, kind, p->shop->enough);
}

hcp_status hcp__go_on(const hcp__problem *p, hcp_error *err) {
  if (hcp__stopped(p)) return hcp__fail(err, HCP_CALLBACK, "the caller has stopped the search");
  if (p->shop->empty)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", p->n);
  return HCP_OK;
}

/* Ways to less memory of attention, to be named in an error. */
static const char *smaller_buffers(const hcp_memory *memory) {
  if (memory->gathered > 0) return ", a comm type that holds fewer keys, more head_chunks";
  return memory->attention > 0 ? ", more head_chunks" : "";
}

static const char *smaller_peer_buffer(const hcp_memory *memory) {
  return memory->buffer > 0 ? ", a smaller peer_buffer_bytes" : "";
}

/* What the bytes of a refused sequence have beside those of its rows. */
static const char *beside_rows(const hcp_limits *limits) {
  if (limits->memory.buffer == 0)
    return limits->alignment > 1 ? " with what alignment may add" : "";
  return limits->alignment > 1 ? " with what alignment may add and memory.buffer"
                               : " with memory.buffer";
}

/* Rows fit at some degree that everything else forbids. */
static hcp_status refused_beside_rows(const hcp__problem *p, const hcp__kind *kind,
                                      hcp_error *err) {
  const hcp_limits *limits = p->limits;
  int32_t sequence = p->order[kind->first], leanest = 0;
  int64_t needed = 0; /* bytes; more ranks need not take fewer, since they gather keys */
  for (int32_t d = limits->min_degree; d <= limits->max_degree; d++) {
    if (!hcp__degree_allowed(limits, p->cost, d) || !hcp__sequence_allows(limits, sequence, d) ||
        hcp_rows_max(kind->size.length, d) > p->capacity)
      continue;
    int64_t padding = limits->memory.limit - hcp__bytes_limit(limits, d);
    int64_t bytes = hcp__sum(padding, hcp__bytes(&limits->memory, kind->size.length, d));
    if (leanest == 0 || bytes < needed) leanest = d, needed = bytes;
  }
  if (leanest == 0)
    return hcp__fail(err, HCP_INFEASIBLE,
                     "lengths[%d] is %lld: no degree that min_degrees[%d] and max_degrees[%d] "
                     "permit holds it, expected one; widen them",
                     sequence, (long long)kind->size.length, sequence, sequence);
  return hcp__fail(
      err, HCP_INFEASIBLE,
      "lengths[%d] is %lld: the fullest of %d ranks would need %lld bytes%s, expected "
      "<= %lld (memory.limit); use more ranks%s%s%s, recompute activations and calibrate "
      "again, or split the sequence",
      sequence, (long long)kind->size.length, leanest, (long long)needed, beside_rows(limits),
      (long long)limits->memory.limit, limits->alignment > 1 ? ", a smaller alignment" : "",
      smaller_buffers(&limits->memory), smaller_peer_buffer(&limits->memory));
}

static hcp_status infeasible(const hcp__problem *p, const hcp__kind *kind, hcp_error *err) {
  const hcp_limits *limits = p->limits;
  if (p->cost->times != NULL && hcp__times_row(p->cost->times, kind->size.length) < 0)
    return hcp__fail(err, HCP_INVALID, "lengths[%d] is %lld, which the cost table does not have",
                     p->order[kind->first], (long long)kind->size.length);
  if (p->shop->gaps)
    return hcp__fail(
        err, HCP_INVALID,
        "lengths[%d] is %lld, and at no degree that holds it does the cost table have a "
        "time for it, expected one",
        p->order[kind->first], (long long)kind->size.length);
  int32_t widest = last_allowed(limits, p->cost);
  if (hcp_rows_max(kind->size.length, widest) <= p->capacity)
    return refused_beside_rows(p, kind, err);
  return hcp__fail(err, HCP_INFEASIBLE,
                   "lengths[%d] is %lld: the fullest of %d ranks (%s) would hold %lld rows, "
                   "expected <= %lld (max_tokens_per_rank%s); raise either, or split the sequence",
                   p->order[kind->first], (long long)kind->size.length, widest,
                   widest == limits->max_degree ? "max_degree" : "the widest degree allowed",
                   (long long)hcp_rows_max(kind->size.length, widest), (long long)p->capacity,
                   limits->alignment > 1 ? ", aligned" : "");
}

/* What a sequence needs whatever a plan adds: one rank's time, or the least
 * area in the cost table. */
static int64_t work_of(const hcp__problem *p, hcp__size size) {
  const hcp_times *times = p->cost->times;
  if (times == NULL) return hcp__area_floor(p->cost, size, 1, p->limits->ranks_per_node);
  int64_t row = (int64_t)hcp__times_row(times, size.length) * times->degree_count;
  int64_t work = INT64_MAX;
  hcp__cost(p->cost, size, times->degrees[0], 0);
  for (int32_t c = 0; c < times->degree_count; c++)
    if (times->times[row + c] > 0)
      work = hcp__least(work, times->times[row + c] * times->degrees[c]);
  return work;
}

/* The least degree that may hold a kind; 0: none. */
static int32_t start_of(const hcp__problem *p, const hcp__kind *kind) {
  const hcp_times *times = p->cost->times;
  if (times != NULL && hcp__times_row(times, kind->size.length) < 0) return 0;
  int32_t least = least_degree(p, kind);
  if (times != NULL && least > 0)
    hcp__cost(p->cost, kind->size, least, 0); /* so that it is known */
  return p->shop->least[kind - p->kinds] = least;
}

/* Least degrees first, as what is negligible follows from all of them. */
static hcp_status make_options(hcp__problem *p, hcp_error *err) {
  for (int32_t k = 0; k < p->kind_count; k++) {
    hcp__kind *kind = &p->kinds[k];
    int32_t least = start_of(p, kind);
    if (least == 0) return infeasible(p, kind, err);
    hcp_status status = hcp__cost_fits(p->cost, kind->size, p->limits->max_degree, err);
    if (status != HCP_OK) return status;
    look_up(p, kind);
    int64_t area = area_floor(p, kind->size, least);
    if (__builtin_mul_overflow(area, kind->count, &area) ||
        __builtin_add_overflow(p->least, area, &p->least) || p->least > INT64_MAX / 4)
      return hcp__fail(err, HCP_OVERFLOW, "the cost of all sequences exceeds 63 bits");
    p->work += work_of(p, kind->size) * kind->count; /* each at most its area */
    p->tokens = hcp__sum(p->tokens, hcp__scaled(kind->size.length, kind->count, 1));
    if (p->tokens == HCP__LATE)
      return hcp__fail(err, HCP_OVERFLOW, "the tokens of all sequences exceed 61 bits");
  }
  p->shop->enough = p->least / p->limits->ranks / NEGLIGIBLE;
  int64_t likely = p->least / p->limits->ranks / LIKELY;
  for (int32_t k = 0; k < p->kind_count; k++)
    if (!make_choices(p, &p->kinds[k], likely))
      return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", p->n);
  return HCP_OK;
}

hcp_status hcp__problem_init(hcp__problem *p, const int64_t *lengths, int32_t n,
                             const hcp_limits *limits, const hcp_cost *cost, hcp_error *err) {
  *p = (hcp__problem){.lengths = lengths, .n = n, .limits = limits, .cost = cost};
  p->capacity = hcp__capacity(limits);
  hcp_status status = open_shop(p, err);
  p->order = malloc(((size_t)n + 1) * sizeof *p->order);
  p->kind_of = malloc(((size_t)n + 1) * sizeof *p->kind_of);
  p->kinds = malloc(((size_t)n + 1) * sizeof *p->kinds);
  p->choices = malloc(((size_t)n + 1) * sizeof *p->choices);
  if (status == HCP_OK &&
      (p->order == NULL || p->kind_of == NULL || p->kinds == NULL || p->choices == NULL))
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", n);
  if (status == HCP_OK && n > 0) status = sort_lengths(p, err);
  if (status == HCP_OK) make_kinds(p);
  if (status == HCP_OK) status = make_options(p, err);
  if (status != HCP_OK) hcp__problem_release(p);
  return status;
}

void hcp__problem_release(hcp__problem *p) {
  close_shop(p->shop);
  free(p->choices);
  free(p->kinds);
  free(p->kind_of);
  free(p->order);
}

/* ---- to choose among them ---- */

static const hcp__option *within(const hcp__choices *choices, int64_t time) {
  const hcp__option *options = choices->options;
  int32_t low = 0, high = choices->count;
  if (options[0].time_floor <= time) return options;
  if (!choices->falls) {
    while (low < high && options[low].time_floor > time) low++;
    return low < high ? &options[low] : NULL;
  }
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (options[middle].time_floor > time)
      low = middle + 1;
    else
      high = middle;
  }
  return low < choices->count ? &options[low] : NULL;
}

const hcp__option *hcp__first_within(const hcp__problem *p, const hcp__kind *kind, int64_t time) {
  const hcp__choices *choices = &p->choices[kind - p->kinds];
  const hcp__option *first = within(choices, time);
  if (first != NULL) return first;
  if (!choices->whole) first = within(hcp__choices_within(p, kind, time), time);
  return first != NULL || !choices->pruned ? first : &choices->options[choices->count - 1];
}

int64_t hcp__fastest(const hcp__problem *p, const hcp__kind *kind) {
  const hcp__choices *all = hcp__choices_of(p, kind);
  int64_t time = all->pruned ? 1 : INT64_MAX;
  for (int32_t i = 0; i < all->count; i++) time = hcp__least(time, all->options[i].time_floor);
  return time;
}

const hcp__option *hcp__fastest_on(const hcp__problem *p, const hcp__kind *kind, int32_t width) {
  const hcp__choices *all = &p->choices[kind - p->kinds];
  if (!all->whole && all->options[all->count - 1].degree < width) all = hcp__choices_of(p, kind);
  int32_t low = 0, high = all->count; /* the first that is wider */
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (all->options[middle].degree <= width)
      low = middle + 1;
    else
      high = middle;
  }
  return low > 0 ? &all->options[low - 1] : NULL;
}
