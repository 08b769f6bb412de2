/* cost.c - the cost of one sequence at a degree. */
#include "internal.h"

/* Costs stay below 2^62, so that two of them can be added without a check. */
#define COST_MAX ((int64_t)1 << 62)

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t hcp__tiled(const hcp_cost *cost, int64_t length, int64_t degree) {
  if (cost->tile <= 1) return length;
  int64_t chunk = 2 * degree * cost->tile;
  return ceil_div(length, chunk) * chunk;
}

static hcp__links far_links(const hcp_cost *cost) {
  return (hcp__links){larger(cost->exchange, cost->exchange_far),
                      larger(cost->all_to_all, cost->all_to_all_far)};
}

hcp__links hcp__links_of(const hcp_cost *cost, int64_t degree, int32_t ranks_per_node) {
  if (ranks_per_node > 0 && degree > ranks_per_node) return far_links(cost);
  return (hcp__links){cost->exchange, cost->all_to_all};
}

static int64_t step_time(const hcp_cost *cost, int64_t length, int64_t degree, hcp__links price,
                         int64_t attention) {
  if (degree == 1) return 0;
  int64_t moved = price.exchange * (length - length / degree);
  if (cost->overlap != 0) {
    int64_t share = ceil_div(attention, degree);
    moved = larger(0, moved - (share - share / degree));
  }
  return moved + ceil_div(price.all_to_all * length, degree) + (degree - 1) * cost->step;
}

/* A sequence's own pairs, or those of so many rows under the window, which counts a query's own
 * key. */
static int64_t attention_of(const hcp_cost *cost, hcp__size size, int64_t rows) {
  return cost->pair *
         (size.pairs >= 0 ? size.pairs : (int64_t)hcp__pairs(rows, cost->window - 1, 0));
}

/* What has no price at all, as a sequence without pairs may, takes 1: a time of 0 stands for none,
 * and searches could not tell groups of such sequences from empty ones. */
static int64_t priced(const hcp_cost *cost, hcp__size size, int32_t degree,
                      int32_t ranks_per_node) {
  int64_t rows = hcp__tiled(cost, size.length, degree);
  int64_t attention = attention_of(cost, size, rows);
  hcp__links price = hcp__links_of(cost, degree, ranks_per_node);
  return larger(1, ceil_div(attention + cost->token * rows, degree) +
                       step_time(cost, size.length, degree, price, attention));
}

/* Compute never takes less than spread over most ranks; the exchange of a range
 * of degrees never less than its least one needs (hidden by all attention). */
int64_t hcp__time_floor(const hcp_cost *cost, hcp__size size, int32_t least, int32_t most,
                        int32_t ranks_per_node) {
  int64_t length = size.length, rows = hcp__tiled(cost, length, 1);
  int64_t attention = attention_of(cost, size, rows), moved = 0;
  if (cost->overlap == 0 && least > 1)
    moved = hcp__links_of(cost, least, ranks_per_node).exchange * (length - length / least);
  if (least > 1) moved += (least - 1) * cost->step;
  return larger(1, ceil_div(attention + cost->token * rows, most) + moved);
}

/* Rank-time at any degree >= least: compute is what one rank needs, since more
 * ranks only round up more, and every term of the exchange grows with degree
 * when it is summed over the ranks. */
int64_t hcp__area_floor(const hcp_cost *cost, hcp__size size, int32_t least,
                        int32_t ranks_per_node) {
  int64_t length = size.length, rows = hcp__tiled(cost, length, 1);
  int64_t attention = attention_of(cost, size, rows);
  int64_t area = attention + cost->token * rows;
  if (least == 1) return larger(1, area);
  hcp__links price = hcp__links_of(cost, least, ranks_per_node);
  int64_t moved = price.exchange * (length - length / least) * least;
  if (cost->overlap != 0)
    moved = larger(0, moved - (attention - attention / least) - 2 * (int64_t)HCP__RANKS_MAX);
  return larger(
      1, area + moved + price.all_to_all * length + ((int64_t)least - 1) * least * cost->step);
}

/* Whether everything above fits for degrees up to most. */
static int fits(const hcp_cost *cost, hcp__size size, int64_t most) {
  int64_t length = size.length, rows, pairs, own, attention, tokens, exchange, heads, steps;
  hcp__links price = far_links(cost);
  if (cost->tile > HCP__LENGTH_MAX) return 0;
  if (__builtin_mul_overflow(2 * most, cost->tile, &rows) ||
      __builtin_add_overflow(rows, length, &rows) ||
      __builtin_mul_overflow(rows, rows + 1, &pairs) ||
      __builtin_mul_overflow(pairs / 2, cost->pair, &attention) ||
      __builtin_mul_overflow(size.pairs < 0 ? 0 : size.pairs, cost->pair, &own) ||
      __builtin_mul_overflow(rows, cost->token, &tokens) ||
      __builtin_mul_overflow(length * most, price.exchange, &exchange) ||
      __builtin_mul_overflow(length, price.all_to_all, &heads) ||
      __builtin_mul_overflow(most * most, cost->step, &steps))
    return 0;
  attention = larger(attention, own);
  return !__builtin_add_overflow(attention, tokens, &attention) &&
         !__builtin_add_overflow(attention, exchange, &attention) &&
         !__builtin_add_overflow(attention, heads, &attention) &&
         !__builtin_add_overflow(attention, steps, &attention) &&
         !__builtin_add_overflow(attention, cost->launch, &attention) && attention < COST_MAX &&
         cost->host < COST_MAX;
}

hcp_status hcp__cost_fits(const hcp_cost *cost, hcp__size size, int32_t most, hcp_error *err) {
  if (cost->times != NULL || fits(cost, size, most)) return HCP_OK;
  return hcp__fail(err, HCP_OVERFLOW, "the cost of a sequence of %lld tokens exceeds 62 bits",
                   (long long)size.length);
}

/* ---- cost tables ---- */

int32_t hcp__times_row(const hcp_times *times, int64_t length) {
  int32_t low = 0, high = times->length_count - 1;
  while (low <= high) {
    int32_t middle = low + (high - low) / 2;
    if (times->lengths[middle] == length) return middle;
    if (times->lengths[middle] < length)
      low = middle + 1;
    else
      high = middle - 1;
  }
  return -1;
}

int32_t hcp__times_column(const hcp_times *times, int32_t degree) {
  int32_t low = 0, high = times->degree_count - 1;
  int64_t near = (int64_t)degree - times->degrees[0]; /* its place among consecutive ones */
  if (near >= 0 && near <= high && times->degrees[near] == degree) return (int32_t)near;
  while (low <= high) {
    int32_t middle = low + (high - low) / 2;
    if (times->degrees[middle] == degree) return middle;
    if (times->degrees[middle] < degree)
      low = middle + 1;
    else
      high = middle - 1;
  }
  return -1;
}

static int64_t tabulated(const hcp_times *times, int64_t length, int32_t degree) {
  int32_t row = hcp__times_row(times, length), column = hcp__times_column(times, degree);
  if (row < 0 || column < 0) return 0;
  const int64_t *time = &times->times[(int64_t)row * times->degree_count + column];
  if (*time == 0 && times->ask != NULL)
    *(int64_t *)(uintptr_t)time = times->ask->time(times->ask->context, length, degree);
  return *time;
}

int64_t hcp__cost(const hcp_cost *cost, hcp__size size, int32_t degree, int32_t ranks_per_node) {
  return cost->times != NULL ? tabulated(cost->times, size.length, degree)
                             : priced(cost, size, degree, ranks_per_node);
}

static hcp_status check_times(const hcp_times *times, hcp_error *err) {
  if (times->length_count < 0 || times->degree_count < 1)
    return hcp__fail(err, HCP_INVALID,
                     "the cost table has %d lengths and %d degrees, expected >= 0 and >= 1",
                     times->length_count, times->degree_count);
  for (int32_t i = 0; i < times->length_count; i++)
    if (times->lengths[i] < 1 || (i > 0 && times->lengths[i] <= times->lengths[i - 1]))
      return hcp__fail(err, HCP_INVALID, "the cost table's lengths[%d] is %lld, expected ascending",
                       i, (long long)times->lengths[i]);
  for (int32_t i = 0; i < times->degree_count; i++)
    if (times->degrees[i] < 1 || (i > 0 && times->degrees[i] <= times->degrees[i - 1]))
      return hcp__fail(err, HCP_INVALID, "the cost table's degrees[%d] is %d, expected ascending",
                       i, times->degrees[i]);
  int64_t count = (int64_t)times->length_count * times->degree_count;
  for (int64_t i = 0; i < count; i++)
    if (times->times[i] < 0 || times->times[i] > COST_MAX / HCP__RANKS_MAX)
      return hcp__fail(err, HCP_INVALID, "the cost table's times[%lld] is %lld, expected 0 to 2^42",
                       (long long)i, (long long)times->times[i]);
  return HCP_OK;
}

hcp_status hcp__cost_check(const hcp_cost *cost, hcp_error *err) {
#define PRICE(name) {#name, cost->name},
  const struct {
    const char *name;
    int64_t value;
  } prices[] = {HCP_PRICES(PRICE)};
#undef PRICE
  for (size_t i = 0; i < sizeof prices / sizeof *prices; i++)
    if (prices[i].value < 0)
      return hcp__fail(err, HCP_INVALID, "cost.%s is %lld, expected >= 0", prices[i].name,
                       (long long)prices[i].value);
  if (cost->times != NULL) return check_times(cost->times, err);
  if (cost->pair == 0 && cost->token == 0)
    return hcp__fail(err, HCP_INVALID, "cost.pair and cost.token are 0, expected one of them > 0");
  return HCP_OK;
}

hcp_status hcp_cost_time(const hcp_cost *cost, int64_t length, int64_t pairs, int32_t degree,
                         int32_t ranks_per_node, int64_t *time, hcp_error *err) {
  hcp__size size = {length, pairs < 0 ? -1 : pairs};
  hcp_status status = hcp__cost_check(cost, err);
  if (status != HCP_OK) return status;
  if (length < 1 || length > HCP__LENGTH_MAX || degree < 1 || degree > HCP__RANKS_MAX)
    return hcp__fail(err, HCP_INVALID,
                     "length is %lld and degree %d, expected 1 to %lld and 1 to %d",
                     (long long)length, degree, (long long)HCP__LENGTH_MAX, HCP__RANKS_MAX);
  status = hcp__cost_fits(cost, size, degree, err);
  if (status != HCP_OK) return status;
  int64_t result = hcp__cost(cost, size, degree, ranks_per_node);
  if (result < 1)
    return hcp__fail(err, HCP_INVALID,
                     "the cost table has no time for %lld tokens on %d ranks, expected one",
                     (long long)length, degree);
  *time = result;
  return HCP_OK;
}
