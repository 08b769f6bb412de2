/* test_prefix_tree.c - each rollout finds its tokens in the rows of its path, and two share a row
 * exactly where they share its token and its target. */
#include "check.h"
#include "hcp/hcp.h"

enum { ROLLOUTS = 9, TOKENS = 7, ALL = ROLLOUTS * TOKENS };

static uint32_t state = 5;

static int64_t draw(int64_t below) {
  state = state * 1664525u + 1013904223u;
  return (int64_t)(state >> 8) % below;
}

/* Rollouts of which each has its tokens at starts[i]. */
typedef struct drawn {
  int64_t tokens[ALL], lengths[ROLLOUTS], starts[ROLLOUTS], n;
} drawn;

static drawn draw_rollouts(void) {
  drawn d = {.n = draw(ROLLOUTS + 1)};
  int64_t tokens = 0, kinds = 1 + draw(3);
  for (int64_t i = 0; i < d.n; i++) {
    d.starts[i] = tokens;
    d.lengths[i] = 1 + draw(TOKENS);
    for (int64_t j = 0; j < d.lengths[i]; j++) d.tokens[tokens++] = draw(kinds) - 1;
  }
  return d;
}

static const int64_t *records_of(const hcp_table *table, int32_t s, int64_t *count) {
  const int64_t *head = table->words + table->header_words + 2 * s;
  *count = head[1];
  return table->words + head[0];
}

/* The row of each token of all rollouts, by BACK. Returns how many. */
static int64_t rows_of_tokens(const hcp_table *trees, int64_t rows[ALL]) {
  int64_t count, filled = 0;
  const int64_t *back = records_of(trees, HCP_TREES_BACK, &count);
  for (int64_t i = 0; i < count; i++)
    for (int64_t r = 0; r < back[2 * i + 1]; r++) rows[filled++] = back[2 * i] + r;
  return filled;
}

static int64_t tokens_of_rows(const hcp_table *trees, int64_t tokens[ALL]) {
  int64_t count, filled = 0;
  const int64_t *first = records_of(trees, HCP_TREES_FIRST, &count);
  for (int64_t i = 0; i < count; i++)
    for (int64_t r = 0; r < first[2 * i + 1]; r++) tokens[filled++] = first[2 * i] + r;
  return filled;
}

/* Whether two rollouts have the same tokens up to the target of row j. */
static int share(const drawn *d, int64_t a, int64_t b, int64_t j) {
  if (j + 1 >= d->lengths[a] || j + 1 >= d->lengths[b]) return 0;
  return memcmp(d->tokens + d->starts[a], d->tokens + d->starts[b],
                (size_t)(j + 2) * sizeof *d->tokens) == 0;
}

static void check_shares(const drawn *d, const int64_t *rows) {
  for (int64_t a = 0; a < d->n; a++)
    for (int64_t b = a + 1; b < d->n; b++)
      for (int64_t j = 0; j < d->lengths[a] && j < d->lengths[b]; j++)
        CHECK_INT(rows[d->starts[a] + j] == rows[d->starts[b] + j], share(d, a, b, j));
}

/* Every token of a rollout is added to its row once. */
static void check_sums(const drawn *d, const hcp_table *trees, const int64_t *rows) {
  int64_t count, summed[ALL] = {0}, total = 0;
  const int64_t *sums = records_of(trees, HCP_TREES_SUMS, &count);
  for (int64_t i = 0; i < count; i++, sums += 4)
    for (int64_t r = 0; r < sums[1]; r++) {
      CHECK_INT(rows[sums[3] + r], sums[0] + r);
      summed[sums[3] + r]++;
    }
  for (int64_t i = 0; i < d->n; i++) total += d->lengths[i];
  for (int64_t t = 0; t < total; t++) CHECK_INT(summed[t], 1);
}

static void check_trees(const drawn *d, const hcp_table *trees, int whole) {
  int64_t rows[ALL] = {0}, tokens[ALL] = {0}, count, all = 0;
  int64_t filled = rows_of_tokens(trees, rows), own = tokens_of_rows(trees, tokens);
  const int64_t *ends = records_of(trees, HCP_TREES_TREES, &count);
  for (int64_t i = 0; i < count; i++) all += ends[7 * i + 3];
  CHECK_INT(own, all);
  for (int64_t t = 0; t < filled; t++) CHECK_INT(d->tokens[tokens[rows[t]]], d->tokens[t]);
  if (whole) check_shares(d, rows);
  check_sums(d, trees, rows);
}

static void trees_hold_rollouts(void) {
  for (int32_t i = 0; i < 2000; i++) {
    drawn d = draw_rollouts();
    int32_t narrow[ALL];
    for (int64_t t = 0; t < ALL; t++) narrow[t] = (int32_t)d.tokens[t];
    hcp_rollouts rollouts = {d.tokens, 8, d.lengths, d.n}, same = {narrow, 4, d.lengths, d.n};
    hcp_tree_limits limits = {.min_shared = 1};
    hcp_cost cost = {.pair = 1, .token = 10, .exchange = draw(30)};
    hcp_table *trees, *others;
    CHECK_INT(hcp_trees_create(&rollouts, &limits, NULL, &trees, NULL), HCP_OK);
    CHECK_INT(hcp_trees_create(&same, &limits, NULL, &others, NULL), HCP_OK);
    CHECK_INT(trees->word_count, others->word_count);
    CHECK(memcmp(trees->words, others->words, (size_t)trees->word_count * sizeof(int64_t)) == 0);
    check_trees(&d, trees, 1);
    hcp_table_destroy(trees);
    hcp_table_destroy(others);
    limits = (hcp_tree_limits){TOKENS + draw(4), 1 + draw(3), &cost, 1 + draw(9), 0};
    CHECK_INT(hcp_trees_create(&rollouts, &limits, NULL, &trees, NULL), HCP_OK);
    check_trees(&d, trees, 0);
    hcp_table_destroy(trees);
  }
}

static int32_t at_once(void *context) {
  (void)context;
  return 1;
}

static void a_caller_stops_it(void) {
  int64_t tokens[4] = {1, 2, 1, 3}, lengths[2] = {2, 2};
  hcp_rollouts rollouts = {tokens, 8, lengths, 2};
  hcp_tree_limits limits = {.min_shared = 1};
  hcp_stop stop = {at_once, NULL};
  hcp_table *trees = NULL;
  hcp_error err;
  CHECK_INT(hcp_trees_create(&rollouts, &limits, &stop, &trees, &err), HCP_CALLBACK);
  CHECK(trees == NULL);
}

static void what_is_too_long_is_named(void) {
  int64_t tokens[4] = {1, 2, 1, 3}, lengths[2] = {1, 3};
  hcp_rollouts rollouts = {tokens, 8, lengths, 2};
  hcp_tree_limits limits = {.min_shared = 1, .max_rows = 2};
  hcp_table *trees;
  hcp_error err;
  CHECK_INT(hcp_trees_create(&rollouts, &limits, NULL, &trees, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "rollouts[1] has 3 tokens, expected 1 to 2");
  limits = (hcp_tree_limits){.min_shared = 0};
  CHECK_INT(hcp_trees_create(&rollouts, &limits, NULL, &trees, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "min_shared is 0, expected >= 1");
}

/* Parts 0 and 1 lie end to end, as do 2 and 3; part 4 continues 1. */
static void a_mask_joins_parts_that_follow_each_other(void) {
  const int64_t rows[] = {3, 2, 2, 1, 4}, parents[] = {-1, 0, 0, 2, 1};
  const int64_t slices[] = {0,  3,  0,  3, -2, 0,  3,  5, 0,   5,  -4, 0,  5,  7,  0,  3,
                            -6, -3, 5,  7, 5,  7,  -1, 0, 7,   8,  0,  3,  -7, -5, 7,  8,
                            5,  8,  -2, 0, 8,  12, 0,  5, -11, -4, 8,  12, 8,  12, -3, 0};
  const int64_t positions[] = {0, 0, 5, 3, 8, 5};
  hcp_table *mask;
  int64_t count;
  CHECK_INT(hcp_tree_mask_create(&(hcp_tree_parts){rows, parents, 1, 5}, &mask, NULL), HCP_OK);
  const int64_t *found = records_of(mask, HCP_TREE_MASK_SLICES, &count);
  CHECK_INT(count, 8);
  CHECK(memcmp(found, slices, sizeof slices) == 0);
  found = records_of(mask, HCP_TREE_MASK_POSITIONS, &count);
  CHECK_INT(count, 3);
  CHECK(memcmp(found, positions, sizeof positions) == 0);
  hcp_table_destroy(mask);
}

static void parts_that_make_no_tree_are_named(void) {
  const int64_t rows[] = {3, 0}, parents[] = {-1, 1};
  hcp_table *mask;
  hcp_error err;
  CHECK_INT(hcp_tree_mask_create(&(hcp_tree_parts){rows, parents, 1, 2}, &mask, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "lengths[1] is 0, expected >= 1, and a sum up to 2^40");
  CHECK_INT(hcp_tree_mask_create(&(hcp_tree_parts){rows, parents, 0, 2}, &mask, &err), HCP_OK);
  hcp_table_destroy(mask);
  CHECK_INT(hcp_tree_mask_create(&(hcp_tree_parts){rows, parents + 1, 1, 1}, &mask, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "parents[0] is 1, expected an earlier part, or -1");
}

int main(void) {
  trees_hold_rollouts();
  a_caller_stops_it();
  what_is_too_long_is_named();
  a_mask_joins_parts_that_follow_each_other();
  parts_that_make_no_tree_are_named();
  return check_report("test_prefix_tree");
}
