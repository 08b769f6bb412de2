/* packed.c - many entries as one launch: what libraries of attention ask of them. */
#include <stdlib.h>

#include "internal.h"

static const int32_t widths[HCP_PACKED_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_PACKED_SECTIONS(WIDTH)
#undef WIDTH
};

enum { QUERY_ROW, QUERY_ROWS, KEY_ROW, KEY_ROWS, LOW, HIGH, ENTRY_WORDS };
enum { SIDES = 2 }; /* queries and keys */

static int64_t row_of(const int64_t *entry, int64_t side) { return entry[2 * side]; }
static int64_t rows_of(const int64_t *entry, int64_t side) { return entry[2 * side + 1]; }
static int64_t end_of(const int64_t *entry, int64_t side) {
  return row_of(entry, side) + rows_of(entry, side);
}

/* ---- what is given ---- */

/* Entries ascend without overlap, within 2^31 rows: then no sum of rows or pairs overflows. */
static hcp_status check_entries(const int64_t *entries, int64_t count, hcp_error *err) {
  if (count < 1)
    return hcp__fail(err, HCP_INVALID, "entries has %lld records, expected >= 1", (long long)count);
  for (int32_t side = 0; side < SIDES; side++) {
    int64_t first = row_of(entries, side), end = first;
    for (int64_t i = 0; i < count; i++) {
      const int64_t *entry = entries + i * ENTRY_WORDS;
      int64_t row = row_of(entry, side), rows = rows_of(entry, side);
      if (row < 0 || row < end || rows < 0 || row > INT32_MAX || rows > INT32_MAX - row)
        return hcp__fail(err, HCP_INVALID,
                         "entries[%lld] has %lld %s from row %lld on, expected rows from %lld on, "
                         "after those of the entry before, and below 2^31",
                         (long long)i, (long long)rows, side ? "keys" : "queries", (long long)row,
                         (long long)end);
      end = row + rows;
    }
  }
  return HCP_OK;
}

/* ---- sections ---- */

static void measure(const int64_t *entries, int64_t count, hcp_packed_sizes *of) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t *entry = entries + i * ENTRY_WORDS;
    const hcp_slice all = {.query_end = entry[QUERY_ROWS],
                           .key_end = entry[KEY_ROWS],
                           .low = entry[LOW],
                           .high = entry[HIGH]};
    of->most_queries = hcp__most(of->most_queries, entry[QUERY_ROWS]);
    of->most_keys = hcp__most(of->most_keys, entry[KEY_ROWS]);
    of->queries += entry[QUERY_ROWS];
    of->keys += entry[KEY_ROWS];
    of->pairs += hcp_slices_pairs(&all, 1, 0, entry[QUERY_ROWS]);
    of->square &= entry[QUERY_ROWS] == entry[KEY_ROWS];
  }
}

/* One more sequence of so many rows: where it ends. */
static void append_bounds(hcp__lists *lists, int64_t bounds[SIDES], int64_t queries, int64_t keys,
                          hcp_packed_sizes *of) {
  of->most_bound_queries = hcp__most(of->most_bound_queries, queries);
  of->most_bound_keys = hcp__most(of->most_bound_keys, keys);
  bounds[0] += queries;
  bounds[1] += keys;
  hcp__append(lists, HCP_PACKED_BOUNDS, bounds);
}

/* Rows between two entries are queries without keys, then keys without queries. */
static void find_bounds(const int64_t *entries, int64_t count, hcp__lists *lists,
                        hcp_packed_sizes *of) {
  int64_t bounds[SIDES] = {0};
  hcp__append(lists, HCP_PACKED_BOUNDS, bounds);
  for (int64_t i = 0; i < count; i++) {
    const int64_t *entry = entries + i * ENTRY_WORDS;
    int64_t queries = row_of(entry, 0) - row_of(entries, 0) - bounds[0];
    int64_t keys = row_of(entry, 1) - row_of(entries, 1) - bounds[1];
    if (queries > 0) append_bounds(lists, bounds, queries, 0, of);
    if (keys > 0) append_bounds(lists, bounds, 0, keys, of);
    append_bounds(lists, bounds, entry[QUERY_ROWS], entry[KEY_ROWS], of);
  }
}

/* Where the entries lie, and `spare` sequences of no rows after them. */
static void find_places(const int64_t *entries, int64_t count, int64_t spare, hcp__lists *lists) {
  const int64_t *last = entries + (count - 1) * ENTRY_WORDS;
  int64_t query = row_of(entries, 0), key = row_of(entries, 1);
  for (int64_t i = 0; i < count; i++) {
    const int64_t *entry = entries + i * ENTRY_WORDS;
    hcp__append(lists, HCP_PACKED_STARTS,
                (const int64_t[]){row_of(entry, 0) - query, row_of(entry, 1) - key});
    hcp__append(lists, HCP_PACKED_ROWS, (const int64_t[]){rows_of(entry, 0), rows_of(entry, 1)});
  }
  for (int64_t i = 0; i <= spare; i++)
    hcp__append(lists, HCP_PACKED_STARTS,
                (const int64_t[]){end_of(last, 0) - query, end_of(last, 1) - key});
  for (int64_t i = 0; i < spare; i++) hcp__append(lists, HCP_PACKED_ROWS, (const int64_t[]){0, 0});
}

hcp_status hcp_packed_create(const int64_t *entries, int64_t count, int64_t sequences,
                             hcp_table **packed, hcp_error *err) {
  hcp__lists lists;
  hcp_packed_sizes sizes = {.square = 1};
  hcp_status status = check_entries(entries, count, err);
  if (status != HCP_OK) return status;
  if (sequences != 0 && sequences < count)
    return hcp__fail(err, HCP_INVALID, "sequences is %lld, expected 0 or >= %lld, the entries",
                     (long long)sequences, (long long)count);
  hcp__lists_init(&lists, widths, HCP_PACKED_SECTION_COUNT);
  measure(entries, count, &sizes);
  find_bounds(entries, count, &lists, &sizes);
  if (sequences > 0) find_places(entries, count, sequences - count, &lists);
  hcp__append(&lists, HCP_PACKED_SIZES, (const int64_t *)(const void *)&sizes);
  status = hcp__table_create(&lists, HCP_PACKED_SECTION_COUNT, packed, err);
  hcp__lists_release(&lists);
  return status;
}
