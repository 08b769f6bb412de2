/* prefix_tree.c - rollouts that begin alike, as trees that have what they share once.
 *
 * Rollouts are put in an order in which those that begin alike are neighbours, as strings are
 * sorted by their characters from the first on, but with branches in the order in which they are
 * given. How much each shares with the one before it then says all of the trees. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* After the sections: (row, rows) of each record of PATHS. */
enum { RUNS = HCP_TREES_SECTION_COUNT, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_TREES_SECTIONS(WIDTH)
#undef WIDTH
        2};

enum { BLOCK = 64, LOOK_EVERY = 256 };

/* Rollouts order[first] to order[end - 1], of which the first `same` tokens are the same. */
typedef struct group {
  int64_t first, end;
  int64_t same;
  int64_t shared; /* rows of the parts that they share so far */
} group;

/* A token that begins a branch of the group with this stamp, and the number of the branch. */
typedef struct slot {
  int64_t token, stamp, branch;
} slot;

typedef struct forest {
  const hcp_rollouts *given;
  const hcp_tree_limits *limits;
  const hcp_stop *stop;
  int64_t *starts; /* n + 1: the first token of each rollout */
  int64_t *order;  /* n: rollouts */
  int64_t *shared; /* n: rows that order[i] shares with order[i - 1] */
  int64_t *moved, *branch, *ends; /* n, n, n + 1: scratch */
  slot *slots;                    /* a power of two, twice the rollouts at least */
  group *groups;                  /* a stack: groups of several rollouts, none in two of them */
  int64_t stacked, stamp, looks;
  int32_t stopped;
} forest;

static hcp_status check(const hcp_rollouts *given, const hcp_tree_limits *limits, hcp_error *err) {
  if (limits->min_shared < 1)
    return hcp__fail(err, HCP_INVALID, "min_shared is %lld, expected >= 1",
                     (long long)limits->min_shared);
  if (limits->max_rows < 0 || limits->max_tokens_per_rank < 0)
    return hcp__fail(err, HCP_INVALID,
                     "max_tokens is %lld and max_tokens_per_rank %lld, expected "
                     ">= 1, or none",
                     (long long)limits->max_rows, (long long)limits->max_tokens_per_rank);
  int64_t most = limits->max_rows ? hcp__least(limits->max_rows, INT32_MAX) : INT32_MAX;
  for (int64_t i = 0; i < given->n; i++)
    if (given->lengths[i] < 1 || given->lengths[i] > most)
      return hcp__fail(err, HCP_INVALID,
                       "rollouts[%lld] has %lld tokens, expected 1 to %lld: a tree has whole "
                       "rollouts",
                       (long long)i, (long long)given->lengths[i], (long long)most);
  return limits->cost == NULL ? HCP_OK : hcp__cost_check(limits->cost, err);
}

static int64_t slots_for(int64_t n) {
  int64_t slots = 2;
  while (slots < 2 * n) slots *= 2;
  return slots;
}

static hcp_status forest_create(const hcp_rollouts *given, const hcp_tree_limits *limits,
                                const hcp_stop *stop, forest *f, hcp_error *err) {
  int64_t n = given->n;
  size_t numbers = 6 * (size_t)n + 2;
  *f = (forest){.given = given, .limits = limits, .stop = stop};
  f->starts = calloc(1, numbers * sizeof(int64_t) + (size_t)slots_for(n) * sizeof(slot) +
                            ((size_t)n / 2 + 1) * sizeof(group));
  if (f->starts == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %lld rollouts", (long long)n);
  f->order = f->starts + n + 1;
  f->shared = f->order + n;
  f->moved = f->shared + n;
  f->branch = f->moved + n;
  f->ends = f->branch + n;
  f->slots = (slot *)(f->starts + numbers);
  f->groups = (group *)(f->slots + slots_for(n));
  for (int64_t i = 0; i < n; i++) {
    f->order[i] = i;
    f->starts[i + 1] = f->starts[i] + given->lengths[i];
  }
  return HCP_OK;
}

/* ---- order ---- */

static const char *token_at(const forest *f, int64_t rollout, int64_t token) {
  return (const char *)f->given->tokens +
         (size_t)(f->starts[rollout] + token) * (size_t)f->given->token_bytes;
}

static int64_t token_of(const forest *f, int64_t rollout, int64_t token) {
  int64_t wide;
  int32_t narrow;
  const char *at = token_at(f, rollout, token);
  if (f->given->token_bytes == 8) {
    memcpy(&wide, at, sizeof wide);
    return wide;
  }
  memcpy(&narrow, at, sizeof narrow);
  return narrow;
}

/* The first token from `token` on at which two rollouts differ, or end. */
static int64_t same_up_to(const forest *f, int64_t a, int64_t b, int64_t token, int64_t end) {
  size_t width = (size_t)f->given->token_bytes;
  const char *left = token_at(f, a, token), *right = token_at(f, b, token);
  int64_t n = end - token, at = 0;
  while (n - at >= BLOCK &&
         memcmp(left + (size_t)at * width, right + (size_t)at * width, BLOCK * width) == 0)
    at += BLOCK;
  while (at < n && memcmp(left + (size_t)at * width, right + (size_t)at * width, width) == 0) at++;
  return token + at;
}

static void look(forest *f) {
  if (f->stop == NULL || f->looks++ % LOOK_EVERY != 0) return;
  f->stopped = f->stopped || f->stop->stopped(f->stop->context);
}

/* How many tokens are the same in all rollouts of a group. */
static int64_t common(forest *f, const group *g) {
  int64_t first = f->order[g->first], end = f->given->lengths[first];
  for (int64_t i = g->first + 1; i < g->end && end > g->same && !f->stopped; i++) {
    int64_t other = f->order[i];
    end = same_up_to(f, first, other, g->same, hcp__least(end, f->given->lengths[other]));
    look(f);
  }
  return end;
}

/* The number of the branch that a token begins; a new one gets `next`. */
static int64_t branch_of(forest *f, int64_t token, int64_t members, int64_t next) {
  uint64_t mask = (uint64_t)slots_for(members) - 1;
  uint64_t at = (uint64_t)token * 0x9e3779b97f4a7c15u;
  for (at = (at ^ at >> 32) & mask;; at = (at + 1) & mask) {
    slot *s = &f->slots[at];
    if (s->stamp != f->stamp) *s = (slot){token, f->stamp, next};
    if (s->token == token) return s->branch;
  }
}

/* Numbers the branches of a group by first appearance. A rollout that ends is a branch of its
 * own. ends[b] becomes how many rollouts branch b has. Returns the branches. */
static int64_t find_branches(forest *f, const group *g, int64_t same) {
  int64_t members = g->end - g->first, branches = 0;
  f->stamp++;
  for (int64_t i = 0; i < members; i++) {
    int64_t rollout = f->order[g->first + i], own = branches;
    if (f->given->lengths[rollout] > same)
      own = branch_of(f, token_of(f, rollout, same), members, branches);
    if (own == branches) f->ends[branches++] = 0;
    f->branch[i] = own;
    f->ends[own]++;
  }
  return branches;
}

/* Makes the branches of a group neighbours, each in its own order. ends[b] becomes where branch b
 * ends. */
static void gather_branches(forest *f, const group *g, int64_t branches) {
  int64_t members = g->end - g->first, begin = 0;
  for (int64_t b = 0; b < branches; b++) {
    int64_t count = f->ends[b];
    f->ends[b] = begin;
    begin += count;
  }
  for (int64_t i = 0; i < members; i++) f->moved[f->ends[f->branch[i]]++] = f->order[g->first + i];
  memcpy(f->order + g->first, f->moved, (size_t)members * sizeof *f->order);
}

static void divide(forest *f, group g) {
  int64_t same = common(f, &g), rows = hcp__most(same - 1, 0), begin = 0;
  if (f->stopped) return;
  if (rows - g.shared >= f->limits->min_shared) g.shared = rows;
  int64_t branches = find_branches(f, &g, same);
  gather_branches(f, &g, branches);
  for (int64_t b = 0; b < branches; b++) {
    int64_t end = f->ends[b];
    if (b > 0) f->shared[g.first + begin] = g.shared;
    if (end - begin > 1)
      f->groups[f->stacked++] = (group){g.first + begin, g.first + end, same + 1, g.shared};
    begin = end;
  }
}

static hcp_status put_in_order(forest *f, hcp_error *err) {
  if (f->given->n > 1) f->groups[f->stacked++] = (group){0, f->given->n, 0, 0};
  while (f->stacked > 0 && !f->stopped) divide(f, f->groups[--f->stacked]);
  if (f->stopped)
    return hcp__fail(err, HCP_CALLBACK, "the caller has stopped the search for trees");
  return HCP_OK;
}

/* ---- trees ---- */

/* Rollouts order[first] to order[end - 1]. */
typedef struct tree {
  int64_t first, end;
  int64_t rows;
  hcp__wide pairs;
} tree;

static hcp__wide causal(int64_t rows) { return (hcp__wide)rows * (rows + 1) / 2; }

static int64_t length_at(const forest *f, int64_t i) { return f->given->lengths[f->order[i]]; }

/* The largest tree from order[first] on within the limit. */
static tree tree_from(const forest *f, int64_t first) {
  int64_t most = f->limits->max_rows ? f->limits->max_rows : HCP__LENGTH_MAX;
  tree t = {first, first + 1, length_at(f, first), causal(length_at(f, first))};
  for (; t.end < f->given->n && f->shared[t.end] > 0; t.end++) {
    int64_t length = length_at(f, t.end), shared = f->shared[t.end];
    if (length - shared > most - t.rows) break;
    t.rows += length - shared;
    t.pairs += causal(length) - causal(shared);
  }
  return t;
}

/* The time of all ranks that compute a sequence. */
static hcp_status add_price(const forest *f, int64_t rows, hcp__wide pairs, hcp__wide *price,
                            hcp_error *err) {
  const hcp_tree_limits *limits = f->limits;
  int64_t most = limits->max_tokens_per_rank, time;
  int64_t degree = most ? (rows + most - 1) / most : 1;
  if (pairs > INT64_MAX || degree > HCP__RANKS_MAX)
    return hcp__fail(err, HCP_OVERFLOW, "a tree of %lld rows has too many pairs, or ranks",
                     (long long)rows);
  hcp_status status = hcp_cost_time(limits->cost, rows, (int64_t)pairs, (int32_t)degree,
                                    limits->ranks_per_node, &time, err);
  if (status == HCP_OK) *price += (hcp__wide)time * degree;
  return status;
}

static hcp_status costs_more(const forest *f, const tree *t, int *more, hcp_error *err) {
  hcp__wide together = 0, alone = 0;
  *more = 0;
  if (f->limits->cost == NULL || t->end - t->first < 2) return HCP_OK;
  hcp_status status = add_price(f, t->rows, t->pairs, &together, err);
  for (int64_t i = t->first; i < t->end && status == HCP_OK; i++)
    status = add_price(f, length_at(f, i), causal(length_at(f, i)), &alone, err);
  *more = together > alone;
  return status;
}

/* Of each rollout in order, the first after it that shares less with the one before it. */
static void find_less(const forest *f, int64_t *less) {
  for (int64_t i = f->given->n - 1; i >= 0; i--) {
    int64_t next = i + 1;
    while (next < f->given->n && f->shared[next] >= f->shared[i]) next = less[next];
    less[i] = next;
  }
}

/* A part on the way to a rollout's last row, of which `end` rows of the rollout are there. */
typedef struct step {
  int64_t part, end;
  int64_t row; /* the first, of all trees' */
} step;

/* Trees while their parts are appended. */
typedef struct growing {
  forest *f;
  hcp__lists lists;
  tree tree;
  step *path; /* n + 1: to the rollout before the next one */
  int64_t depth;
  int64_t parts;       /* of this tree */
  int64_t leaves, row; /* of the trees before, and rows up to here */
} growing;

/* Scratch of the order serves again. */
static int64_t *less_of(const forest *f) { return f->branch; }
static int64_t *met_of(const forest *f) { return f->moved; }
static int64_t *path_begins_of(const forest *f) { return f->ends; }

/* Appends rows of rollout i from the end of the path up to `end`, for the rollouts before
 * `after`. */
static void append_part(growing *g, int64_t i, int64_t end, int64_t after) {
  const step *last = g->depth ? &g->path[g->depth - 1] : &(step){-1, 0, 0};
  int64_t begin = last->end, rows = end - begin;
  hcp__append(&g->lists, HCP_TREES_PARTS,
              (const int64_t[]){begin, rows, last->part, i - g->tree.first, after - i});
  hcp__append(&g->lists, HCP_TREES_FIRST,
              (const int64_t[]){g->f->starts[g->f->order[i]] + begin, rows});
  g->path[g->depth++] = (step){g->parts++, end, g->row};
  g->row += rows;
}

static void append_leaf(growing *g, int64_t i) {
  int64_t rollout = g->f->order[i], leaf = i - g->tree.first, begin = 0;
  hcp__append(&g->lists, HCP_TREES_LEAVES, (const int64_t[]){rollout, g->parts - 1});
  path_begins_of(g->f)[rollout] = hcp__records(&g->lists, HCP_TREES_PATHS);
  for (int64_t d = 0; d < g->depth; d++) {
    hcp__append(&g->lists, HCP_TREES_PATHS, (const int64_t[]){leaf, g->path[d].part});
    hcp__append(&g->lists, RUNS, (const int64_t[]){g->path[d].row, g->path[d].end - begin});
    begin = g->path[d].end;
  }
}

/* Appends the parts that begin with rollout i, each of which ends where later rollouts share no
 * more: the outermost first, which is met last. */
static void append_rollout(growing *g, int64_t i) {
  const forest *f = g->f;
  int64_t shared = i == g->tree.first ? 0 : f->shared[i], met = 0;
  while (g->depth > 0 && g->path[g->depth - 1].end > shared) g->depth--;
  for (int64_t next = i + 1; next < g->tree.end && f->shared[next] > shared;
       next = less_of(f)[next])
    met_of(f)[met++] = next;
  while (met > 0) {
    int64_t next = met_of(f)[--met];
    append_part(g, i, f->shared[next], hcp__least(less_of(f)[next], g->tree.end));
  }
  append_part(g, i, length_at(f, i), i + 1);
  append_leaf(g, i);
}

/* row: the first of the tree. */
static void append_sums(growing *g, int64_t row) {
  int64_t end = hcp__records(&g->lists, HCP_TREES_PARTS);
  for (int64_t p = end - g->parts; p < end; p++) {
    const int64_t *part = hcp__record(&g->lists, HCP_TREES_PARTS, p);
    int64_t token = part[0], rows = part[1], leaf = g->leaves + part[3];
    for (int64_t i = leaf; i < leaf + part[4]; i++) {
      int64_t rollout = hcp__record(&g->lists, HCP_TREES_LEAVES, i)[0];
      hcp__append(&g->lists, HCP_TREES_SUMS,
                  (const int64_t[]){row, rows, 0, g->f->starts[rollout] + token});
    }
    row += rows;
  }
}

static void append_mask(growing *g) {
  if (g->parts < 2 || g->lists.failed) return;
  int64_t first = hcp__records(&g->lists, HCP_TREES_PARTS) - g->parts;
  const int64_t *part = hcp__record(&g->lists, HCP_TREES_PARTS, first);
  const hcp_tree_parts parts = {part + 1, part + 2, widths[HCP_TREES_PARTS], g->parts};
  hcp__append_tree_mask(&parts, &g->lists, HCP_TREES_SLICES, HCP_TREES_POSITIONS);
}

static void append_tree(growing *g, const tree *t) {
  int64_t row = g->row;
  g->tree = *t;
  g->depth = g->parts = 0;
  for (int64_t i = t->first; i < t->end; i++) append_rollout(g, i);
  append_sums(g, row);
  append_mask(g);
  g->leaves += t->end - t->first;
  hcp__append(&g->lists, HCP_TREES_TREES,
              (const int64_t[]){hcp__records(&g->lists, HCP_TREES_PARTS), g->leaves,
                                hcp__records(&g->lists, HCP_TREES_PATHS), t->rows,
                                (int64_t)t->pairs, hcp__records(&g->lists, HCP_TREES_SLICES),
                                hcp__records(&g->lists, HCP_TREES_POSITIONS)});
}

static void append_alone(growing *g, const tree *t) {
  for (int64_t i = t->first; i < t->end; i++) {
    int64_t length = length_at(g->f, i);
    append_tree(g, &(tree){i, i + 1, length, causal(length)});
  }
}

/* The order of PATHS is that of trees, and the order of BACK that of rollouts. */
static void append_back(growing *g) {
  for (int64_t r = 0; r < g->f->given->n; r++)
    for (int64_t p = path_begins_of(g->f)[r], tokens = g->f->given->lengths[r]; tokens > 0; p++) {
      const int64_t *run = hcp__record(&g->lists, RUNS, p);
      hcp__append(&g->lists, HCP_TREES_BACK, run);
      tokens -= run[1];
    }
}

static hcp_status append_trees(growing *g, hcp_error *err) {
  hcp_status status = HCP_OK;
  for (int64_t i = 0; i < g->f->given->n && status == HCP_OK && !g->lists.failed;) {
    int alone;
    tree t = tree_from(g->f, i);
    if (t.pairs > INT64_MAX)
      return hcp__fail(err, HCP_OVERFLOW, "a tree of %lld rows has too many pairs",
                       (long long)t.rows);
    status = costs_more(g->f, &t, &alone, err);
    if (status != HCP_OK) break;
    if (alone)
      append_alone(g, &t);
    else
      append_tree(g, &t);
    i = t.end;
  }
  if (status == HCP_OK && !g->lists.failed) append_back(g);
  return status;
}

hcp_status hcp_trees_create(const hcp_rollouts *rollouts, const hcp_tree_limits *limits,
                            const hcp_stop *stop, hcp_table **trees, hcp_error *err) {
  forest f;
  hcp_status status = check(rollouts, limits, err);
  if (status == HCP_OK) status = forest_create(rollouts, limits, stop, &f, err);
  if (status != HCP_OK) return status;
  growing g = {.f = &f, .path = malloc(((size_t)rollouts->n + 1) * sizeof *g.path)};
  hcp__lists_init(&g.lists, widths, LIST_COUNT);
  if (g.path == NULL)
    status =
        hcp__fail(err, HCP_NO_MEMORY, "out of memory for %lld rollouts", (long long)rollouts->n);
  if (status == HCP_OK) status = put_in_order(&f, err);
  if (status == HCP_OK) {
    find_less(&f, less_of(&f));
    status = append_trees(&g, err);
  }
  if (status == HCP_OK) status = hcp__table_create(&g.lists, HCP_TREES_SECTION_COUNT, trees, err);
  hcp__lists_release(&g.lists);
  free(g.path);
  free(f.starts);
  return status;
}
