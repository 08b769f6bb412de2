/* slices.c - what slices of one mask see: how many pairs, and whether two see the same one. */
#include <stdlib.h>

#include "internal.h"

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- pairs ---- */

/* Pairs of so many queries on so many keys: the first sees one key, each next one more. */
static int64_t rising_pairs(int64_t queries, int64_t keys) {
  int64_t rising = hcp__most(0, least(queries, keys));
  return rising * (rising + 1) / 2 + hcp__most(0, queries - rising) * keys;
}

/* Pairs of a slice's rectangle whose key is at most `ahead` tokens ahead of its query. */
static int64_t pairs_up_to(const hcp_slice *x, int64_t ahead) {
  int64_t keys = x->key_end - x->key_begin;
  int64_t one = x->query_begin + ahead - x->key_begin + 1; /* of the first query, without edges */
  return rising_pairs(one + x->query_end - x->query_begin - 1, keys) - rising_pairs(one - 1, keys);
}

int64_t hcp_slices_pairs(const hcp_slice *slices, int64_t n, int64_t first, int64_t end) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < n; i++) {
    hcp_slice x = slices[i];
    x.query_begin = hcp__most(x.query_begin, first);
    x.query_end = least(x.query_end, end);
    x.low = hcp__most(x.low, x.key_begin - x.query_end + 1); /* limits may be far away */
    x.high = least(x.high, x.key_end - x.query_begin - 1);
    if (x.query_begin < x.query_end && x.low <= x.high)
      pairs += pairs_up_to(&x, x.high) - pairs_up_to(&x, x.low - 1);
  }
  return pairs;
}

/* ---- pairs that two slices see ---- */

/* Finds a query and a key that both slices have. Returns 0 if there are none. */
static int common_pair(const hcp_slice *a, const hcp_slice *b, hcp_common_pair *found) {
  int64_t first = hcp__most(a->query_begin, b->query_begin);
  int64_t end = least(a->query_end, b->query_end);
  int64_t first_key = hcp__most(a->key_begin, b->key_begin);
  int64_t end_key = least(a->key_end, b->key_end);
  int64_t low = hcp__most(hcp__most(a->low, b->low), first_key - end + 1);
  int64_t high = least(least(a->high, b->high), end_key - first - 1);
  if (first >= end || first_key >= end_key || low > high) return 0;
  found->query = hcp__most(first, first_key - low);
  found->key = found->query + low;
  if (found->key >= end_key) {
    found->query = first_key - low;
    found->key = first_key;
  }
  return 1;
}

/* A slice, and its place in what was given. */
typedef struct placed {
  const hcp_slice *slice;
  int64_t place;
} placed;

static int by_queries(const void *a, const void *b) {
  const placed *left = a, *right = b;
  const hcp_slice *x = left->slice, *y = right->slice;
  int order = (x->query_begin > y->query_begin) - (x->query_begin < y->query_begin);
  if (order == 0) order = (x->query_end > y->query_end) - (x->query_end < y->query_end);
  return order ? order : (left->place > right->place) - (left->place < right->place);
}

/* Compares each slice with those before it, by their queries, that have not ended. */
static int find_common(const placed *order, int64_t n, placed *open, hcp_common_pair *found) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t kept = 0;
    for (int64_t k = 0; k < count; k++)
      if (open[k].slice->query_end > order[i].slice->query_begin) open[kept++] = open[k];
    count = kept;
    for (int64_t k = 0; k < count; k++)
      if (common_pair(order[i].slice, open[k].slice, found)) {
        found->slice = least(order[i].place, open[k].place);
        found->other = hcp__most(order[i].place, open[k].place);
        return 1;
      }
    open[count++] = order[i];
  }
  return 0;
}

hcp_status hcp_slices_overlap(const hcp_slice *slices, int64_t n, int32_t *overlap,
                              hcp_common_pair *found, hcp_error *err) {
  placed *order = malloc(2 * ((size_t)n + 1) * sizeof *order);
  if (order == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a mask");
  for (int64_t i = 0; i < n; i++) order[i] = (placed){&slices[i], i};
  if (n > 0) qsort(order, (size_t)n, sizeof *order, by_queries);
  *overlap = find_common(order, n, order + n, found);
  free(order);
  return HCP_OK;
}
