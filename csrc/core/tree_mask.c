/* tree_mask.c - what tokens of a tree of texts see: slices, and runs of positions. */
#include <stdlib.h>

#include "internal.h"

/* A tree's parts while its mask is appended. */
typedef struct parts {
  const hcp_tree_parts *given;
  int64_t *start; /* n + 1: the first token of each part */
  int64_t *head; /* n: the first of the parts that end with this one and follow each other, each of
                    which continues the one before it */
  int64_t *depth; /* n: the position of each part's first token */
  int64_t *chain; /* n: scratch */
} parts;

static int64_t rows_of(const hcp_tree_parts *given, int64_t i) {
  return given->rows[i * given->stride];
}

static int64_t parent_of(const hcp_tree_parts *given, int64_t i) {
  return given->parents[i * given->stride];
}

static int parts_create(const hcp_tree_parts *given, parts *p) {
  size_t n = (size_t)given->n;
  *p = (parts){.given = given, .start = malloc((4 * n + 1) * sizeof(int64_t))};
  if (p->start == NULL) return 0;
  p->head = p->start + n + 1;
  p->depth = p->head + n;
  p->chain = p->depth + n;
  p->start[0] = 0;
  for (int64_t i = 0; i < given->n; i++) {
    int64_t parent = parent_of(given, i);
    p->start[i + 1] = p->start[i] + rows_of(given, i);
    p->head[i] = parent >= 0 && parent == i - 1 ? p->head[parent] : i;
    p->depth[i] = parent < 0 ? 0 : p->depth[parent] + rows_of(given, parent);
  }
  return 1;
}

/* Part i sees whole parts that it continues, those that lie next to each other as one slice, and
 * its own rows up to each. */
static void append_slices(const parts *p, int64_t i, hcp__lists *lists, int32_t section) {
  int64_t begin = p->start[i], end = p->start[i + 1], first = p->start[p->head[i]], count = 0;
  for (int64_t up = parent_of(p->given, p->head[i]); up >= 0; up = parent_of(p->given, p->head[up]))
    p->chain[count++] = up;
  while (count-- > 0) {
    int64_t key = p->start[p->head[p->chain[count]]], key_end = p->start[p->chain[count] + 1];
    hcp__append(lists, section,
                (const int64_t[]){begin, end, key, key_end, key - end + 1, key_end - begin - 1});
  }
  hcp__append(lists, section, (const int64_t[]){begin, end, first, end, first - end + 1, 0});
}

void hcp__append_tree_mask(const hcp_tree_parts *given, hcp__lists *lists, int32_t slices,
                           int32_t positions) {
  parts p;
  if (!parts_create(given, &p)) {
    lists->failed = 1;
    return;
  }
  for (int64_t i = 0; i < given->n; i++) {
    append_slices(&p, i, lists, slices);
    if (i == 0 || p.depth[i] - p.depth[i - 1] != p.start[i] - p.start[i - 1])
      hcp__append(lists, positions, (const int64_t[]){p.start[i], p.depth[i]});
  }
  free(p.start);
}

static hcp_status check(const hcp_tree_parts *given, hcp_error *err) {
  int64_t tokens = 0;
  for (int64_t i = 0; i < given->n; i++) {
    int64_t rows = rows_of(given, i), parent = parent_of(given, i);
    if (rows < 1 || rows > HCP__LENGTH_MAX - tokens)
      return hcp__fail(err, HCP_INVALID,
                       "lengths[%lld] is %lld, expected >= 1, and a sum up to 2^40", (long long)i,
                       (long long)rows);
    if (parent < -1 || parent >= i)
      return hcp__fail(err, HCP_INVALID, "parents[%lld] is %lld, expected an earlier part, or -1",
                       (long long)i, (long long)parent);
    tokens += rows;
  }
  return HCP_OK;
}

hcp_status hcp_tree_mask_create(const hcp_tree_parts *given, hcp_table **mask, hcp_error *err) {
  static const int32_t widths[] = {
#define WIDTH(name, width) width,
      HCP_TREE_MASK_SECTIONS(WIDTH)
#undef WIDTH
  };
  hcp_status status = check(given, err);
  if (status != HCP_OK) return status;
  hcp__lists lists;
  hcp__lists_init(&lists, widths, HCP_TREE_MASK_SECTION_COUNT);
  hcp__append_tree_mask(given, &lists, HCP_TREE_MASK_SLICES, HCP_TREE_MASK_POSITIONS);
  status = hcp__table_create(&lists, HCP_TREE_MASK_SECTION_COUNT, mask, err);
  hcp__lists_release(&lists);
  return status;
}
