/* stretches.c - trees of texts: where their stretches begin, and which one each continues.
 *
 * A part of a tree begins at a token that no mask lets see the one before it. It continues its
 * parent: of the tokens that it sees, the one whose position is one less. A stretch ends where a
 * part ends, and at each token that a later part continues. So a stretch is continued at its end
 * only, by any number of others. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct hcp__stretches {
  int32_t unclear;       /* a sequence that is no tree, -1: none */
  int64_t unclear_token; /* that goes on from no one other, or sees some beside its path */
  int64_t unclear_position;
  const int64_t *first;   /* n + 1 */
  const int64_t *starts;  /* tokens, of each sequence from first[i] on; none without branches */
  const int64_t *parents; /* of each, -1: none */
};

enum {
  MAYBE,  /* (token): where parts may begin */
  PARTS,  /* (token, parent's token or NONE), ascending */
  LAST,   /* (token): of those that a part sees, those one position before it */
  BOUNDS, /* (token, parent's token or NONE, whether a part begins) */
  STARTS, /* (token, parent stretch or NONE) of all sequences, end to end */
  FIRST,  /* (stretch) at which each sequence begins */
  LIST_COUNT
};

static const int32_t widths[LIST_COUNT] = {1, 2, 1, 3, 2, 1};

enum { NONE = -1, UNCLEAR = -2, GOES_ON = -3 };

/* One sequence, while its stretches are found. */
typedef struct search {
  const hcp_plan *plan;
  int32_t sequence;
  const hcp_position_run *runs;
  int64_t run_count;
  hcp__lists *lists;
} search;

/* ---- parts ---- */

/* The last run that begins at or before a token. */
static int64_t run_at(const search *of, int64_t token) {
  return hcp__last_up_to(&of->runs->token, HCP__RUN_WORDS, of->run_count, token);
}

static int64_t position_of(const search *of, int64_t token) {
  const hcp_position_run *run = &of->runs[run_at(of, token)];
  return run->position + token - run->token;
}

/* Notes the tokens of [begin, end) at a position. */
static void note_at(const search *of, int64_t position, int64_t begin, int64_t end) {
  for (int64_t r = run_at(of, begin); r < of->run_count && of->runs[r].token < end; r++) {
    int64_t last = r + 1 < of->run_count ? of->runs[r + 1].token : of->plan->lengths[of->sequence];
    int64_t token = of->runs[r].token + position - of->runs[r].position;
    if (token >= hcp__most(begin, of->runs[r].token) && token < hcp__least(end, last))
      hcp__append(of->lists, LAST, &token);
  }
}

/* Tokens of [begin, end) on the path that ends at a token. */
static int64_t count_on_path(const search *of, int64_t begin, int64_t end, int64_t token) {
  int64_t i = hcp__records(of->lists, PARTS) - 1, count = 0;
  while (token >= begin) { /* paths descend */
    while (hcp__record(of->lists, PARTS, i)[0] > token) i--;
    const int64_t *part = hcp__record(of->lists, PARTS, i);
    count += hcp__most(0, hcp__least(end, token + 1) - hcp__most(begin, part[0]));
    token = part[1];
  }
  return count;
}

/* Of the tokens noted for a part, the last one. */
static int64_t parent_among(const search *of, int64_t token, int64_t sees_before) {
  int64_t count = hcp__records(of->lists, LAST), parent = NONE;
  for (int64_t i = 0; i < count; i++)
    parent = hcp__most(parent, hcp__record(of->lists, LAST, i)[0]);
  if (parent == NONE) return sees_before ? UNCLEAR : NONE;
  if (parent >= token) return UNCLEAR;
  return parent;
}

/* The keys of a slice that a token of it sees. */
static hcp__piece keys_of(const hcp_slice *x, int64_t token) {
  int64_t begin = hcp__most(x->key_begin, token + x->low);
  return (hcp__piece){begin, hcp__most(0, hcp__least(x->key_end, token + x->high + 1) - begin)};
}

/* The token that one continues, if it does not go on from the one before it. */
static int64_t find_parent(const search *of, int64_t token) {
  int64_t before = position_of(of, token) - 1, sees_before = 0;
  of->lists->list[LAST].count = 0;
  for (int32_t m = 0; m < of->plan->mask_count; m++) {
    const hcp_masks *mask = &of->plan->masks[m];
    for (int64_t i = mask->first[of->sequence]; i < mask->first[of->sequence + 1]; i++) {
      const hcp_slice *x = &mask->slices[i];
      if (x->query_begin > token) break; /* they ascend */
      if (x->query_end <= token) continue;
      hcp__piece keys = keys_of(x, token);
      if (keys.rows == 0) continue;
      if (keys.start < token && token <= keys.start + keys.rows) return GOES_ON;
      sees_before |= keys.start < token;
      note_at(of, before, keys.start, keys.start + keys.rows);
    }
  }
  return parent_among(of, token, sees_before);
}

/* Whether tokens of [begin, end), which all lie in one part, see tokens before that part which are
 * not on the path that ends at its parent. Keys of neighbours in a slice touch: those of all of
 * them have no gap. */
static int see_beside(const search *of, const hcp_slice *x, int64_t begin, int64_t end,
                      const int64_t *part) {
  begin = hcp__most(begin, hcp__most(x->query_begin, x->key_begin - x->high));
  end = hcp__least(end, hcp__least(x->query_end, x->key_end - x->low));
  if (begin >= end) return 0;
  hcp__piece last = keys_of(x, end - 1);
  int64_t first = keys_of(x, begin).start, stop = hcp__least(part[0], last.start + last.rows);
  return first < stop && count_on_path(of, first, stop, part[1]) < stop - first;
}

/* The first token of a part that sees tokens before the part beside its path; NONE: there is
 * none. */
static int64_t beside_in(const search *of, const int64_t *part, int64_t part_end) {
  for (int32_t m = 0; m < of->plan->mask_count; m++) {
    const hcp_masks *mask = &of->plan->masks[m];
    for (int64_t i = mask->first[of->sequence]; i < mask->first[of->sequence + 1]; i++) {
      const hcp_slice *x = &mask->slices[i];
      if (x->query_begin >= part_end) break; /* they ascend */
      if (x->query_end <= part[0] || !see_beside(of, x, part[0], part_end, part)) continue;
      int64_t token = part[0];
      while (!see_beside(of, x, token, token + 1, part)) token++;
      return token;
    }
  }
  return NONE;
}

static int64_t find_beside(const search *of) {
  int64_t count = hcp__records(of->lists, PARTS), token = NONE;
  for (int64_t i = 0; i < count && token == NONE; i++)
    token = beside_in(
        of, hcp__record(of->lists, PARTS, i),
        i + 1 < count ? hcp__record(of->lists, PARTS, i + 1)[0] : of->plan->lengths[of->sequence]);
  return token;
}

static void find_candidates(const search *of) {
  for (int64_t r = 0; r < of->run_count; r++) hcp__append(of->lists, MAYBE, &of->runs[r].token);
  for (int32_t m = 0; m < of->plan->mask_count; m++) {
    const hcp_masks *mask = &of->plan->masks[m];
    for (int64_t i = mask->first[of->sequence]; i < mask->first[of->sequence + 1]; i++)
      hcp__append(of->lists, MAYBE, &mask->slices[i].query_begin);
  }
  hcp__sort_by(of->lists, MAYBE, 0);
}

/* Positions that go on from one token to the next say nothing of a part: there it begins only
 * where it clearly continues another token. Returns a token that goes on from no one other, or sees
 * some that are not on its path; NONE: there is none. */
static int64_t find_parts(const search *of) {
  int64_t last = 0;
  hcp__append(of->lists, PARTS, (const int64_t[]){0, NONE});
  for (int64_t i = 0; i < hcp__records(of->lists, MAYBE); i++) {
    int64_t token = hcp__record(of->lists, MAYBE, i)[0];
    if (token == last) continue;
    last = token;
    int64_t parent = find_parent(of, token);
    int jumps = position_of(of, token) != position_of(of, token - 1) + 1;
    if (parent == UNCLEAR && jumps) return token;
    if (parent >= 0 || (parent == NONE && jumps))
      hcp__append(of->lists, PARTS, (const int64_t[]){token, parent});
  }
  return of->lists->failed ? NONE : find_beside(of);
}

/* ---- stretches ---- */

static void find_bounds(const search *of) {
  for (int64_t i = 0; i < hcp__records(of->lists, PARTS); i++) {
    const int64_t *part = hcp__record(of->lists, PARTS, i);
    int64_t start = part[0], parent = part[1];
    hcp__append(of->lists, BOUNDS, (const int64_t[]){start, parent, 1});
    if (parent != NONE) hcp__append(of->lists, BOUNDS, (const int64_t[]){parent + 1, parent, 0});
  }
  hcp__sort_by(of->lists, BOUNDS, 0);
}

/* The stretch of this sequence that ends at a token. */
static int64_t ending_at(const search *of, int64_t first, int64_t token) {
  int64_t count = hcp__records(of->lists, STARTS) - first;
  return hcp__last_up_to(hcp__record(of->lists, STARTS, first), widths[STARTS], count, token);
}

/* Where a part begins just after a branch point, the part says what it continues. */
static void append_stretches(const search *of) {
  int64_t first = hcp__records(of->lists, STARTS), bounds = hcp__records(of->lists, BOUNDS);
  for (int64_t i = 0, next; i < bounds; i = next) {
    int64_t record[2] = {hcp__record(of->lists, BOUNDS, i)[0], NONE};
    int is_part = 0;
    for (next = i; next < bounds && hcp__record(of->lists, BOUNDS, next)[0] == record[0]; next++) {
      const int64_t *bound = hcp__record(of->lists, BOUNDS, next);
      if (next == i || (bound[2] && !is_part)) record[1] = bound[1];
      is_part |= bound[2] != 0;
    }
    if (record[1] != NONE) record[1] = ending_at(of, first, record[1]);
    hcp__append(of->lists, STARTS, record);
  }
}

static void find_stretches(search *of, hcp__stretches *made) {
  const hcp_masks *mask = of->plan->masks;
  of->runs = mask->runs + mask->first_run[of->sequence];
  of->run_count = mask->first_run[of->sequence + 1] - mask->first_run[of->sequence];
  for (int32_t list = MAYBE; list <= BOUNDS; list++) of->lists->list[list].count = 0;
  find_candidates(of);
  int64_t unclear = of->lists->failed ? NONE : find_parts(of);
  if (unclear == NONE && !of->lists->failed) {
    find_bounds(of);
    append_stretches(of);
  } else if (made->unclear < 0) {
    made->unclear = of->sequence;
    made->unclear_token = unclear;
    made->unclear_position = position_of(of, unclear);
  }
}

static hcp__stretches *copied(const hcp__lists *lists, const hcp__stretches *found) {
  size_t firsts = (size_t)hcp__records(lists, FIRST), count = (size_t)hcp__records(lists, STARTS);
  if (lists->failed) return NULL;
  hcp__stretches *made = malloc(sizeof *made + (firsts + 2 * count) * sizeof(int64_t));
  if (made == NULL) return NULL;
  int64_t *first = (int64_t *)(made + 1), *starts = first + firsts, *parents = starts + count;
  *made = *found;
  memcpy(first, lists->list[FIRST].words, firsts * sizeof *first);
  for (size_t i = 0; i < count; i++) {
    const int64_t *record = hcp__record(lists, STARTS, (int64_t)i);
    starts[i] = record[0];
    parents[i] = record[1];
  }
  made->first = first;
  made->starts = starts;
  made->parents = parents;
  return made;
}

hcp__stretches *hcp__stretches_create(const hcp_plan *plan, const char *branching) {
  hcp__lists lists;
  hcp__stretches found = {.unclear = -1};
  hcp__lists_init(&lists, widths, LIST_COUNT);
  for (int32_t i = 0; i < plan->n; i++) {
    search of = {.plan = plan, .sequence = i, .lists = &lists};
    int64_t first = hcp__records(&lists, STARTS);
    hcp__append(&lists, FIRST, &first);
    if (branching[i]) find_stretches(&of, &found);
  }
  int64_t end = hcp__records(&lists, STARTS);
  hcp__append(&lists, FIRST, &end);
  hcp__stretches *made = copied(&lists, &found);
  hcp__lists_release(&lists);
  return made;
}

/* ---- what they are ---- */

/* NULL: the sequence's stretches are its documents. */
static const hcp__stretches *stretches_of(const hcp_plan *plan, int32_t sequence) {
  const hcp__stretches *all = plan->documents == NULL ? NULL : plan->documents->stretches;
  return all == NULL || all->first[sequence] == all->first[sequence + 1] ? NULL : all;
}

int64_t hcp__stretch_count(const hcp_plan *plan, int32_t sequence) {
  const hcp__stretches *all = stretches_of(plan, sequence);
  return all == NULL ? hcp__document_count(plan, sequence)
                     : all->first[sequence + 1] - all->first[sequence];
}

int64_t hcp__stretch_at(const hcp_plan *plan, int32_t sequence, int64_t token) {
  const hcp__stretches *all = stretches_of(plan, sequence);
  if (all == NULL) return hcp__document_at(plan, sequence, token);
  const int64_t *starts = all->starts + all->first[sequence];
  return hcp__last_up_to(starts, 1, hcp__stretch_count(plan, sequence), token);
}

hcp__piece hcp__stretch(const hcp_plan *plan, int32_t sequence, int64_t i) {
  const hcp__stretches *all = stretches_of(plan, sequence);
  if (all == NULL) return hcp__document(plan, sequence, i);
  const int64_t *starts = all->starts + all->first[sequence];
  int last = i == hcp__stretch_count(plan, sequence) - 1;
  return (hcp__piece){starts[i], (last ? plan->lengths[sequence] : starts[i + 1]) - starts[i]};
}

int64_t hcp__stretch_parent(const hcp_plan *plan, int32_t sequence, int64_t i) {
  const hcp__stretches *all = stretches_of(plan, sequence);
  return all == NULL ? NONE : all->parents[all->first[sequence] + i];
}

hcp_status hcp_plan_expect_trees(const hcp_plan *plan, const char *operation, hcp_error *err) {
  const hcp__stretches *all = plan->documents == NULL ? NULL : plan->documents->stretches;
  if (all == NULL || all->unclear < 0) return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "%s is called in a plan in which the mask of sequence %d has branches that are "
                   "no tree: expected that token %lld goes on from one earlier token, at position "
                   "%lld, and sees no others before it than that one sees; plan its texts as "
                   "sequences of their own",
                   operation, all->unclear, (long long)all->unclear_token,
                   (long long)all->unclear_position - 1);
}
