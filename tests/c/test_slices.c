/* Slices of a mask: pairs counted one by one, and pairs that two slices see. */
#include <stdlib.h>

#include "check.h"
#include "hcp/hcp.h"

enum { TOKENS = 9, SLICES = 5 };

static uint32_t state = 11;

static int64_t draw(int64_t below) {
  state = state * 1664525u + 1013904223u;
  return (int64_t)(state >> 8) % below;
}

static hcp_slice draw_slice(void) {
  hcp_slice x;
  x.query_begin = draw(TOKENS);
  x.query_end = x.query_begin + 1 + draw(TOKENS - x.query_begin);
  x.key_begin = draw(TOKENS);
  x.key_end = x.key_begin + 1 + draw(TOKENS - x.key_begin);
  /* Limits as slices have them: each of a corner of the rectangle. */
  x.low = draw(2) ? x.key_begin - x.query_begin : x.key_begin - x.query_end + 1;
  x.high = draw(2) ? x.key_end - x.query_end : x.key_end - x.query_begin - 1;
  return x;
}

static int sees(const hcp_slice *x, int64_t query, int64_t key) {
  return query >= x->query_begin && query < x->query_end && key >= x->key_begin &&
         key < x->key_end && key - query >= x->low && key - query <= x->high;
}

static int64_t count(const hcp_slice *slices, int64_t n, int64_t first, int64_t end) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < n; i++)
    for (int64_t query = first; query < end; query++)
      for (int64_t key = 0; key < TOKENS; key++) pairs += sees(&slices[i], query, key);
  return pairs;
}

static int share(const hcp_slice *a, const hcp_slice *b) {
  for (int64_t query = 0; query < TOKENS; query++)
    for (int64_t key = 0; key < TOKENS; key++)
      if (sees(a, query, key) && sees(b, query, key)) return 1;
  return 0;
}

static int any_share(const hcp_slice *slices, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t k = i + 1; k < n; k++)
      if (share(&slices[i], &slices[k])) return 1;
  return 0;
}

static void pairs_are_those_counted_one_by_one(void) {
  for (int32_t i = 0; i < 2000; i++) {
    hcp_slice slices[SLICES];
    int64_t n = draw(SLICES + 1), first = draw(TOKENS + 1);
    int64_t end = first + draw(TOKENS + 1 - first);
    for (int64_t k = 0; k < n; k++) slices[k] = draw_slice();
    CHECK_INT(hcp_slices_pairs(slices, n, first, end), count(slices, n, first, end));
  }
}

static void a_common_pair_is_found_where_there_is_one(void) {
  int32_t seen = 0;
  for (int32_t i = 0; i < 2000; i++) {
    hcp_slice slices[SLICES];
    hcp_common_pair found;
    int64_t n = draw(SLICES + 1);
    int32_t overlap;
    for (int64_t k = 0; k < n; k++) slices[k] = draw_slice();
    CHECK_INT(hcp_slices_overlap(slices, n, &overlap, &found, NULL), HCP_OK);
    CHECK_INT(overlap, any_share(slices, n));
    if (!overlap) continue;
    seen++;
    CHECK(found.slice < found.other);
    CHECK(sees(&slices[found.slice], found.query, found.key));
    CHECK(sees(&slices[found.other], found.query, found.key));
  }
  CHECK(seen > 100);
}

int main(void) {
  pairs_are_those_counted_one_by_one();
  a_common_pair_is_found_where_there_is_one();
  return check_report("test_slices");
}
