/* documents.c - documents of masked sequences: where they begin, and which sequences have
 * branches.
 *
 * A joint is a token whose position is not one more than that of the token before it. There
 *   - a document begins, if under no mask a token on one side sees one on the other;
 *   - else the sequence goes on, if some mask lets the token see the one before it, as where
 *     positions have gaps or repeat (images);
 *   - else a branch begins: it continues an earlier token, as in a tree of texts. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* The joints of a sequence. */
typedef struct search {
  const hcp_plan *plan;
  int32_t sequence;
  int64_t count;
  int64_t *joints; /* count: ascending */
  char *crossed;   /* count: whether tokens on one side see some on the other */
} search;

static int sees(const hcp_slice *x, int64_t query, int64_t key) {
  return x->query_begin <= query && query < x->query_end && x->key_begin <= key &&
         key < x->key_end && x->low <= key - query && key - query <= x->high;
}

/* Whether a query of one range sees a key of another. */
static int any_pair(const hcp_slice *x, int64_t query, int64_t query_end, int64_t key,
                    int64_t key_end) {
  query = hcp__most(query, x->query_begin);
  query_end = hcp__least(query_end, x->query_end);
  key = hcp__most(key, x->key_begin);
  key_end = hcp__least(key_end, x->key_end);
  if (query >= query_end || key >= key_end) return 0;
  int64_t low = hcp__most(x->low, key - query_end + 1);
  return low <= hcp__least(x->high, key_end - 1 - query);
}

static int crosses(const hcp_slice *x, int64_t joint) {
  return any_pair(x, 0, joint, joint, HCP__LENGTH_MAX) ||
         any_pair(x, joint, HCP__LENGTH_MAX, 0, joint);
}

static int goes_on(const search *of, int64_t joint) {
  for (int32_t m = 0; m < of->plan->mask_count; m++) {
    const hcp_masks *mask = &of->plan->masks[m];
    for (int64_t i = mask->first[of->sequence]; i < mask->first[of->sequence + 1]; i++)
      if (sees(&mask->slices[i], joint, joint - 1)) return 1;
  }
  return 0;
}

/* The first joint after a token. */
static int64_t joint_after(const search *of, int64_t token) {
  int64_t low = 0, high = of->count;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (of->joints[middle] > token)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/* Marks the joints that a slice crosses. Returns whether a branch begins at one of them. */
static int cross(search *of, const hcp_slice *x) {
  int64_t end = hcp__most(x->query_end, x->key_end);
  int64_t j = joint_after(of, hcp__least(x->query_begin, x->key_begin));
  for (; j < of->count && of->joints[j] < end; j++) {
    int64_t joint = of->joints[j];
    if (of->crossed[j] || !crosses(x, joint)) continue;
    if (!sees(x, joint, joint - 1) && !goes_on(of, joint)) return 1;
    of->crossed[j] = 1;
  }
  return 0;
}

static int has_branches(search *of) {
  for (int32_t m = 0; of->count > 0 && m < of->plan->mask_count; m++) {
    const hcp_masks *mask = &of->plan->masks[m];
    for (int64_t i = mask->first[of->sequence]; i < mask->first[of->sequence + 1]; i++)
      if (cross(of, &mask->slices[i])) return 1;
  }
  return 0;
}

static void find_joints(search *of) {
  const hcp_masks *mask = of->plan->masks;
  of->count = 0;
  for (int64_t r = mask->first_run[of->sequence] + 1; r < mask->first_run[of->sequence + 1]; r++) {
    const hcp_position_run *x = &mask->runs[r];
    if (x->position - x->token == x[-1].position - x[-1].token) continue;
    of->crossed[of->count] = 0;
    of->joints[of->count++] = x->token;
  }
}

/* Leaves the joints at which documents begin. Returns 0 for a sequence with branches, which is
 * left whole. */
static int find_documents(search *of) {
  int64_t kept = 0;
  find_joints(of);
  int branching = has_branches(of);
  for (int64_t j = 0; !branching && j < of->count; j++)
    if (!of->crossed[j]) of->joints[kept++] = of->joints[j];
  of->count = kept;
  return !branching;
}

/* `branching` has room for whether each sequence is. */
static void find_all(const hcp_plan *plan, hcp__documents *made, char *crossed, char *branching) {
  int64_t *first = (int64_t *)(made + 1), *starts = first + plan->n + 1;
  made->first = first;
  made->starts = starts;
  made->branching = -1;
  first[0] = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    search of = {plan, i, 0, starts + first[i] + 1, crossed};
    starts[first[i]] = 0;
    branching[i] = (char)!find_documents(&of);
    if (branching[i] && made->branching < 0) made->branching = i;
    first[i + 1] = first[i] + 1 + of.count;
  }
}

int hcp__documents_create(const hcp_plan *plan, char *branching, hcp__documents **documents) {
  *documents = NULL;
  if (plan->masks->first_run == NULL) return 1;
  size_t n = (size_t)plan->n, runs = (size_t)plan->masks->first_run[n];
  hcp__documents *made = malloc(sizeof *made + (n + 1 + n + runs) * sizeof(int64_t));
  char *crossed = malloc(runs + 1);
  if (made != NULL && crossed != NULL) {
    find_all(plan, made, crossed, branching);
    made->stretches = NULL;
    *documents = made;
  } else {
    free(made);
  }
  free(crossed);
  return *documents != NULL;
}

void hcp__documents_release(hcp__documents *documents) {
  if (documents != NULL) free(documents->stretches);
  free(documents);
}

int64_t hcp__document_count(const hcp_plan *plan, int32_t sequence) {
  const hcp__documents *all = plan->documents;
  return all == NULL ? 1 : all->first[sequence + 1] - all->first[sequence];
}

int64_t hcp__document_at(const hcp_plan *plan, int32_t sequence, int64_t token) {
  if (plan->documents == NULL) return 0;
  const int64_t *starts = plan->documents->starts + plan->documents->first[sequence];
  return hcp__last_up_to(starts, 1, hcp__document_count(plan, sequence), token);
}

hcp__piece hcp__document(const hcp_plan *plan, int32_t sequence, int64_t i) {
  if (plan->documents == NULL) return (hcp__piece){0, plan->lengths[sequence]};
  const int64_t *starts = plan->documents->starts + plan->documents->first[sequence];
  int last = i == hcp__document_count(plan, sequence) - 1;
  return (hcp__piece){starts[i], (last ? plan->lengths[sequence] : starts[i + 1]) - starts[i]};
}

hcp_status hcp_plan_expect_no_branches(const hcp_plan *plan, const char *operation,
                                       hcp_error *err) {
  if (plan->documents == NULL || plan->documents->branching < 0) return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "%s is called in a plan in which the mask of sequence %d has branches (a tree, "
                   "a shared prefix), expected none: a branch goes on from tokens other than "
                   "those just before it; plan each branch as a sequence of its own",
                   operation, plan->documents->branching);
}
