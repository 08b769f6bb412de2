/* bound.c - times that no plan can beat, whatever its packing and order. */
#include "internal.h"

/* The longest sequence is the slowest at every degree, so it alone decides. */
static hcp_status longest_time(const int64_t *lengths, const int32_t *least_degrees, int32_t n,
                               const hcp_limits *limits, const hcp_cost *cost, int64_t *longest,
                               hcp_error *err) {
  int32_t slowest = 0;
  for (int32_t i = 1; i < n; i++)
    if (lengths[i] > lengths[slowest]) slowest = i;
  int64_t least = INT64_MAX;
  for (int32_t degree = least_degrees[slowest]; degree <= limits->max_degree; degree++) {
    int64_t time;
    hcp_status status = hcp_cost_time(cost, lengths[slowest], degree, &time, err);
    if (status != HCP_OK) return status;
    if (time < least) least = time;
  }
  *longest = least;
  return HCP_OK;
}

hcp_status hcp__bound(const int64_t *lengths, const int32_t *least_degrees, int32_t n,
                      const hcp_limits *limits, const hcp_cost *cost, int64_t *work, int64_t *bound,
                      hcp_error *err) {
  int64_t area = 0, total = 0, tokens = 0, longest, launches;
  if (n == 0) {
    *work = *bound = 0;
    return HCP_OK;
  }
  for (int32_t i = 0; i < n; i++) {
    int64_t alone, least;
    hcp_status status = hcp__cost_work(cost, lengths[i], 1, &alone, err);
    if (status == HCP_OK) status = hcp__cost_work(cost, lengths[i], least_degrees[i], &least, err);
    if (status != HCP_OK) return status;
    total += alone; /* alone <= least */
    if (__builtin_add_overflow(area, least, &area))
      return hcp__fail(err, HCP_OVERFLOW, "the cost of all sequences exceeds 63 bits");
    tokens += lengths[i]; /* n * HCP__LENGTH_MAX does not fit, but their costs would not either */
  }
  hcp_status status = longest_time(lengths, least_degrees, n, limits, cost, &longest, err);
  if (status != HCP_OK) return status;
  /* A micro-batch on one rank holds at most max_tokens_per_rank rows. */
  launches = tokens / limits->max_tokens_per_rank + (tokens % limits->max_tokens_per_rank != 0);
  int64_t launch_area, ranks = limits->ranks;
  if (__builtin_mul_overflow(launches, cost->launch, &launch_area) ||
      __builtin_add_overflow(launch_area, area, &launch_area) ||
      __builtin_add_overflow(longest, cost->launch, &longest))
    return hcp__fail(err, HCP_OVERFLOW, "the cost of all sequences exceeds 63 bits");
  int64_t mean = launch_area / ranks + (launch_area % ranks != 0);
  *work = total;
  *bound = mean > longest ? mean : longest;
  return HCP_OK;
}
