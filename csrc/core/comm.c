/* comm.c - the comm types that a group may use, and their times by the plan's prices.
 *
 * All times are whole numbers of one fraction of the prices' unit, so that they are compared as
 * they are: 1 / (16 d^2 H (H / G + 1)), which every divisor in hcp_comm_times divides. */
#include "internal.h"

/* Times from here on are too long, and cannot overflow when a few of them are added up. */
#define WIDE_BITS 120
#define WIDE_MAX ((hcp__wide)1 << WIDE_BITS)

enum {
  LAUNCHES = 16
}; /* kernel launches of a decoder layer, about: the price launch pays them all */

static int32_t bits_of(hcp__wide value) {
  int64_t high = (int64_t)(value >> 63), low = (int64_t)(value & INT64_MAX);
  if (high > 0) return 127 - __builtin_clzll((uint64_t)high);
  return low > 0 ? 64 - __builtin_clzll((uint64_t)low) : 0;
}

static hcp__wide sum(hcp__wide a, hcp__wide b) { return a + b < WIDE_MAX ? a + b : WIDE_MAX; }

static hcp__wide product(hcp__wide a, hcp__wide b) {
  return bits_of(a) + bits_of(b) <= WIDE_BITS ? a * b : WIDE_MAX;
}

/* value / unit, rounded up: bit by bit, as division of 128 bits would call for more than libc. */
static int64_t divided(hcp__wide value, hcp__wide unit) {
  hcp__wide quotient = 0, rest = 0;
  for (int32_t bit = WIDE_BITS; bit >= 0; bit--) {
    rest = 2 * rest + (value >> bit & 1);
    quotient = 2 * quotient + (rest >= unit);
    if (rest >= unit) rest -= unit;
  }
  quotient += rest > 0;
  return quotient < INT64_MAX ? (int64_t)quotient : INT64_MAX;
}

/* ---- neighbours ---- */

static int fits_nodes(const hcp_plan *plan, const hcp_group *group, int32_t inner) {
  int32_t end = group->first_rank + group->degree, node = plan->limits.ranks_per_node;
  for (int32_t first = group->first_rank; first < end; first += inner)
    if (hcp_nodes_of(first, inner, node) > 1) return 0;
  return 1;
}

/* Whether so many neighbours may exchange rows for heads. */
static int may_exchange(const hcp_plan *plan, const hcp_group *group, int32_t query_heads,
                        int32_t inner) {
  return inner <= query_heads && group->degree % inner == 0 && fits_nodes(plan, group, inner);
}

hcp_status hcp_comm_inner(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                          int32_t query_heads, int32_t most, int32_t *inner, hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  int32_t found = 1;
  for (int32_t m = 2; group != NULL && m <= group->degree && m <= most; m++)
    if (may_exchange(plan, group, query_heads, m)) found = m;
  *inner = found;
  return HCP_OK;
}

/* ---- what a group is priced by ---- */

typedef struct priced {
  const hcp_plan *plan;
  const hcp_group *group;
  const hcp_priced_layer *layer;
  int64_t degree, per_key; /* ranks, query heads of a key head */
  int64_t stage_tokens;
  hcp__wide tokens, unit; /* all times are in 1 / unit */
} priced;

static int64_t length_at(const priced *g, int32_t i) {
  return g->plan->lengths[g->plan->sequences[g->group->first_sequence + i]];
}

static priced priced_of(const hcp_plan *plan, const hcp_group *group, const hcp_priced_layer *layer,
                        int64_t stage_tokens) {
  priced g = {.plan = plan, .group = group, .layer = layer, .stage_tokens = stage_tokens};
  g.degree = group->degree;
  g.per_key = layer->query_heads / layer->key_heads;
  g.tokens = hcp__group_tokens(plan, group);
  g.unit = product((hcp__wide)LAUNCHES * g.degree * g.degree,
                   (hcp__wide)layer->query_heads * (g.per_key + 1));
  return g;
}

/* Prices of one token. Both are bytes of the same links: where one is 0, the other says both. */
typedef struct moving {
  hcp__wide keys;    /* of all key heads, in 1 / (per_key + 1)                 */
  hcp__wide element; /* of one head, D + E elements, in 1 / (G * (per_key + 1)) */
} moving;

static moving moving_of(const priced *g, int32_t ranks_per_node) {
  hcp__links links = hcp__links_of(&g->plan->cost, g->degree, ranks_per_node);
  hcp__wide by_keys = (hcp__wide)links.exchange * (g->per_key + 1), by_heads = links.all_to_all;
  return (moving){by_keys > 0 ? by_keys : by_heads, by_heads > 0 ? by_heads : by_keys};
}

/* Key heads of the neighbours, of whom each has consecutive query heads: two may have the same. */
typedef struct copies {
  int64_t most, all;
} copies;

static copies copies_of(const priced *g, int64_t inner) {
  copies found = {0, 0};
  for (int64_t j = 0; j < inner; j++) {
    int64_t first = j * g->layer->query_heads / inner,
            end = (j + 1) * g->layer->query_heads / inner;
    int64_t own = first == end ? 0 : (end - 1) / g->per_key - first / g->per_key + 1;
    found.most = hcp__most(found.most, own);
    found.all += own;
  }
  return found;
}

/* ---- times, in 1 / unit ---- */

/* Attention of the busiest of so many neighbours, over the degree. */
static hcp__wide attention_share(const priced *g, int64_t inner) {
  const hcp_cost *cost = &g->plan->cost;
  int64_t queries = (g->layer->query_heads + inner - 1) / inner;
  hcp__wide pairs = 0;
  for (int32_t i = 0; i < g->group->sequences; i++) {
    int64_t rows = hcp__tiled(cost, length_at(g, i), g->degree / inner);
    pairs = sum(pairs, hcp__pairs(rows, g->layer->left, g->layer->right));
  }
  return product(product(pairs, cost->pair),
                 (hcp__wide)LAUNCHES * inner * queries * (g->per_key + 1));
}

static hcp__wide fixed(const priced *g, int64_t exchanges, int64_t calls) {
  const hcp_cost *cost = &g->plan->cost;
  hcp__wide half = cost->step > 0 ? (hcp__wide)cost->step * (LAUNCHES / 2) : cost->launch;
  return product(product(half, exchanges + calls), g->unit / LAUNCHES);
}

/* What attention does not hide of an exchange. */
static hcp__wide exposed(const priced *g, hcp__wide moved, hcp__wide hidden) {
  if (g->plan->cost.overlap == 0) return moved;
  return moved > hidden ? moved - hidden : 0;
}

/* Attention of the stage of a place's own rows: an even share, or that of its two chunks, which is
 * more under a window. */
static hcp__wide own_attention(const priced *g, int64_t inner) {
  const hcp_cost *cost = &g->plan->cost;
  int64_t places = g->degree / inner, queries = (g->layer->query_heads + inner - 1) / inner;
  hcp__wide pairs = 0, even = product(attention_share(g, inner), inner);
  for (int32_t i = 0; i < g->group->sequences; i++) {
    int64_t chunk = hcp__tiled(cost, length_at(g, i), places) / (2 * places);
    pairs = sum(pairs, product(2, hcp__pairs(chunk, g->layer->left, g->layer->right)));
  }
  hcp__wide own = product(
      product(pairs, cost->pair),
      product((hcp__wide)LAUNCHES * g->degree * g->degree, (hcp__wide)queries * (g->per_key + 1)));
  return own > even ? own : even;
}

/* Rows that the busiest place receives, times the places: those in the windows of its chunks. */
static hcp__wide seen(const priced *g, int64_t places) {
  hcp__wide rows = 0, sides = (hcp__wide)2 * places;
  int64_t left = g->layer->left, right = g->layer->right;
  for (int32_t i = 0; i < g->group->sequences; i++) {
    hcp__wide others = (hcp__wide)length_at(g, i) * (places - 1);
    hcp__wide most = left < 0 || right < 0 ? others : product((hcp__wide)left + right, sides);
    rows = sum(rows, others < most ? others : most);
  }
  return rows;
}

/* Owners of a sequence's rows that the busiest place sees: as many on each side as the window has
 * chunks. */
static int64_t owners(const priced *g, int32_t i, int64_t places) {
  int64_t left = g->layer->left, right = g->layer->right;
  if (left < 0 || right < 0) return places - 1;
  hcp__wide reach = product(left > right ? left : right, (hcp__wide)2 * places);
  int64_t chunks = divided(reach, length_at(g, i));
  return chunks < places / 2 ? 2 * chunks : places - 1;
}

/* What a ring brings: all rows of others in as many stages, or those that are seen. */
typedef struct rounds {
  hcp__wide rows; /* times the places */
  int64_t stages, calls;
} rounds;

static rounds rounds_of(const priced *g, int64_t places) {
  int in_place = g->layer->in_place;
  rounds found = {in_place ? seen(g, places) : product(g->tokens, places - 1), 0, 0};
  for (int32_t i = 0; i < g->group->sequences; i++) {
    int64_t stages = in_place ? owners(g, i, places) : places - 1;
    found.stages = hcp__most(found.stages, stages);
    found.calls += stages;
  }
  if (g->layer->packed) found.calls = found.stages;
  return found;
}

static hcp__wide ring(const priced *g, moving price, int64_t inner) {
  rounds x = rounds_of(g, g->degree / inner);
  hcp__wide share = attention_share(g, inner), own = own_attention(g, inner);
  hcp__wide moved = product(product(price.keys, x.rows), copies_of(g, inner).most);
  moved = product(moved, (hcp__wide)LAUNCHES * g->degree * inner * g->per_key);
  hcp__wide hidden = product(share, (hcp__wide)inner * x.stages);
  if (g->layer->in_place && own > hidden) hidden = own;
  hcp__wide time = sum(product(share, g->degree), exposed(g, moved, hidden));
  return sum(time, fixed(g, x.stages, x.calls));
}

static hcp__wide gather(const priced *g, moving price) {
  hcp__wide share = attention_share(g, 1), rows = seen(g, g->degree);
  hcp__wide moved =
      product(product(price.keys, rows), (hcp__wide)LAUNCHES * g->degree * g->layer->query_heads);
  int64_t stages = 1, most = hcp__least(HCP_SCHEDULE_GATHERS_MAX, g->group->sequences);
  while (stages < most && rows >= product((hcp__wide)(stages + 1) * g->degree, g->stage_tokens))
    stages++;
  int64_t calls = g->layer->packed ? stages : g->group->sequences; /* each is in one stage */
  hcp__wide time = sum(product(share, g->degree), exposed(g, moved, own_attention(g, 1)));
  return sum(time, fixed(g, stages, calls));
}

static hcp__wide exchange_of_heads(const priced *g, moving price, int64_t inner) {
  int64_t heads = g->layer->query_heads + copies_of(g, inner).all;
  hcp__wide moved = product(product(price.element, g->tokens), (hcp__wide)heads * (inner - 1));
  moved = product(moved, (hcp__wide)LAUNCHES * g->per_key * (g->degree / inner));
  return sum(moved, fixed(g, 2, 0));
}

/* ---- all types ---- */

typedef struct listed {
  hcp_comm_time *times;
  int32_t count, fastest;
  hcp__wide least, longest;
} listed;

static void list(listed *l, const priced *g, hcp_comm_type type, int64_t inner, hcp__wide time) {
  if (l->count == 0 || time < l->least) l->fastest = l->count;
  l->least = l->count == 0 || time < l->least ? time : l->least;
  l->longest = time > l->longest ? time : l->longest;
  l->times[l->count++] = (hcp_comm_time){type, (int32_t)inner, divided(time, g->unit)};
}

/* In the order in which equal ones are preferred: a gather sends least. */
static void list_all(listed *l, const priced *g) {
  moving price = moving_of(g, g->plan->limits.ranks_per_node), near = moving_of(g, 0);
  list(l, g, HCP_COMM_ALL_GATHER, 1, gather(g, price));
  list(l, g, HCP_COMM_P2P, 1, ring(g, price, 1));
  for (int64_t m = g->layer->rows_only ? 1 : g->degree; m > 1; m--) {
    int inside = may_exchange(g->plan, g->group, g->layer->query_heads, (int32_t)m);
    if (!inside && m < g->degree) continue;
    /* Where neighbours stand in one node, so do the ranks that exchange heads. */
    hcp__wide time = sum(ring(g, price, m), exchange_of_heads(g, inside ? near : price, m));
    list(l, g, m == g->degree ? HCP_COMM_A2A : HCP_COMM_A2A_P2P, m, time);
  }
}

static hcp_status check(const hcp_cost *cost, const hcp_priced_layer *layer, int64_t stage_tokens,
                        hcp_error *err) {
  if (layer->query_heads < 1 || layer->key_heads < 1 || layer->query_heads % layer->key_heads != 0)
    return hcp__fail(err, HCP_INVALID, "query has %d heads, expected a multiple of the %d of key",
                     layer->query_heads, layer->key_heads);
  if (stage_tokens < 1)
    return hcp__fail(err, HCP_INVALID, "stage_tokens is %lld, expected >= 1",
                     (long long)stage_tokens);
  if (cost->tile > HCP__LENGTH_MAX)
    return hcp__fail(err, HCP_OVERFLOW, "cost.tile is %lld, expected at most %lld",
                     (long long)cost->tile, (long long)HCP__LENGTH_MAX);
  return HCP_OK;
}

hcp_status hcp_comm_times(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                          const hcp_priced_layer *layer, int64_t stage_tokens, hcp_comm_time *times,
                          int32_t *count, int32_t *fastest, hcp_error *err) {
  listed l = {.times = times};
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status == HCP_OK) status = check(&plan->cost, layer, stage_tokens, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  if (group == NULL || group->degree < 2)
    return hcp__fail(err, HCP_INVALID, "rank %d is in a group of %d ranks, expected >= 2", rank,
                     group == NULL ? 0 : group->degree);
  priced g = priced_of(plan, group, layer, stage_tokens);
  list_all(&l, &g);
  if (l.longest >= WIDE_MAX)
    return hcp__fail(err, HCP_OVERFLOW,
                     "the time of a comm type for %lld tokens on %d ranks does not fit: prices are "
                     "too large",
                     (long long)g.tokens, group->degree);
  *count = l.count;
  *fastest = l.fastest;
  return HCP_OK;
}
