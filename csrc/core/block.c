/* block.c - exchanges of fixed sizes within ranks that follow each other. */
#include "internal.h"

static const int32_t widths[HCP_BLOCK_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_BLOCK_SECTIONS(WIDTH)
#undef WIDTH
};

/* What concerns the rank at place i, for the rank at `place` of so many. */
static void append_place(hcp__lists *lists, const int32_t place, int32_t i, int32_t peer,
                         int64_t rows) {
  int64_t part = i == place ? 0 : i < place ? i + 1 : i;
  /* A rank stages its parts of all rows but its own, end to end. */
  int64_t staged = i == place ? 0 : (place - (place > i)) * rows;
  if (i != place) hcp__append(lists, HCP_BLOCK_OTHERS, (const int64_t[]){peer});
  hcp__append(lists, HCP_BLOCK_OWN, (const int64_t[]){peer, 0, rows});
  hcp__append(lists, HCP_BLOCK_ALL, (const int64_t[]){peer, i * rows, rows});
  hcp__append(lists, HCP_BLOCK_SUM, (const int64_t[]){0, rows, 0, i * rows});
  hcp__append(lists, HCP_BLOCK_GATHER_READ, (const int64_t[]){i * rows, rows, part, 0});
  hcp__append(lists, HCP_BLOCK_SUM_READ, (const int64_t[]){0, rows, part, staged});
}

static void append_staged(hcp__lists *lists, int32_t place, int32_t ranks, int64_t rows) {
  int64_t before = place * rows, after = (ranks - 1 - place) * rows;
  hcp__append(lists, HCP_BLOCK_GATHER_STAGED, (const int64_t[]){0, rows, 0, 0});
  if (before > 0) hcp__append(lists, HCP_BLOCK_SUM_STAGED, (const int64_t[]){0, before, 0, 0});
  if (after > 0)
    hcp__append(lists, HCP_BLOCK_SUM_STAGED, (const int64_t[]){before, after, 0, before + rows});
}

hcp_status hcp_block_create(int32_t first, int32_t ranks, int32_t rank, int64_t rows,
                            hcp_table **block, hcp_error *err) {
  hcp__lists lists;
  if (first < 0 || ranks < 1 || ranks > HCP__RANKS_MAX || rank < first || rank - first >= ranks)
    return hcp__fail(err, HCP_INVALID, "rank is %d, expected one of %d ranks from rank %d on", rank,
                     ranks, first);
  if (rows < 1 || rows > HCP__LENGTH_MAX)
    return hcp__fail(err, HCP_INVALID, "rows is %lld, expected 1 to %lld", (long long)rows,
                     (long long)HCP__LENGTH_MAX);
  hcp__lists_init(&lists, widths, HCP_BLOCK_SECTION_COUNT);
  for (int32_t i = 0; i < ranks; i++) append_place(&lists, rank - first, i, first + i, rows);
  append_staged(&lists, rank - first, ranks, rows);
  hcp_status status = hcp__table_create(&lists, HCP_BLOCK_SECTION_COUNT, block, err);
  hcp__lists_release(&lists);
  return status;
}
