/* cost.c - what one sequence costs at a degree. */
#include "internal.h"

static int work_of(const hcp_cost *cost, int64_t length, int64_t *work) {
  int64_t twice_pairs, pairs_cost, tokens_cost;
  return __builtin_mul_overflow(length, length + 1, &twice_pairs) ||
         __builtin_mul_overflow(twice_pairs / 2, cost->pair, &pairs_cost) ||
         __builtin_mul_overflow(length, cost->token, &tokens_cost) ||
         __builtin_add_overflow(pairs_cost, tokens_cost, work);
}

hcp_status hcp_cost_time(const hcp_cost *cost, int64_t length, int32_t degree, int64_t *time,
                         hcp_error *err) {
  int64_t work, exchange, result;
  if (length < 1 || length > HCP__LENGTH_MAX || degree < 1)
    return hcp__fail(err, HCP_INVALID, "length is %lld and degree %d, expected both >= 1",
                     (long long)length, degree);
  if (work_of(cost, length, &work) ||
      __builtin_mul_overflow(cost->exchange, length - length / degree, &exchange) ||
      __builtin_add_overflow(work / degree + (work % degree != 0), exchange, &result))
    return hcp__fail(err, HCP_OVERFLOW, "the cost of a sequence of %lld tokens exceeds 63 bits",
                     (long long)length);
  *time = result;
  return HCP_OK;
}

/* Total rank-time at a degree, before it is rounded up to whole units a rank:
 * it never falls as the degree grows, so the least degree gives the least. */
hcp_status hcp__cost_work(const hcp_cost *cost, int64_t length, int32_t degree, int64_t *work,
                          hcp_error *err) {
  int64_t compute, exchange;
  if (work_of(cost, length, &compute) ||
      __builtin_mul_overflow(cost->exchange, length - length / degree, &exchange) ||
      __builtin_mul_overflow(exchange, degree, &exchange) ||
      __builtin_add_overflow(compute, exchange, work))
    return hcp__fail(err, HCP_OVERFLOW, "the cost of a sequence of %lld tokens exceeds 63 bits",
                     (long long)length);
  return HCP_OK;
}
