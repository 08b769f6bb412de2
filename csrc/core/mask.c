/* mask.c - what masks add to a plan: a copy of them, and the cuts that follow. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Sums over all masks of a sequence's pairs stay far below 2^63. */
enum { MASKS_MAX = 64 };
#define MASKED_LENGTH_MAX ((int64_t)1 << 28)
/* A layer without a limit has HCP__LENGTH_MAX, which no two positions are apart. */
#define POSITION_MAX (HCP__LENGTH_MAX / 2)

static hcp_status check_slice(const hcp_slice *x, int64_t length, int32_t mask, int32_t sequence,
                              hcp_error *err) {
  if (x->query_begin >= 0 && x->query_begin < x->query_end && x->query_end <= length &&
      x->key_begin >= 0 && x->key_begin < x->key_end && x->key_end <= length)
    return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "masks[%d] has queries %lld to %lld and keys %lld to %lld of sequence %d, "
                   "expected parts of its %lld tokens",
                   mask, (long long)x->query_begin, (long long)x->query_end,
                   (long long)x->key_begin, (long long)x->key_end, sequence, (long long)length);
}

static hcp_status check_slices(const hcp_plan *plan, const hcp_masks *masks, int32_t m, int32_t i,
                               hcp_error *err) {
  for (int64_t s = masks[m].first[i]; s < masks[m].first[i + 1]; s++) {
    const hcp_slice *x = &masks[m].slices[s];
    hcp_status status = check_slice(x, plan->lengths[i], m, i, err);
    if (status != HCP_OK) return status;
    if (s > masks[m].first[i] && x[-1].query_begin > x->query_begin)
      return hcp__fail(err, HCP_INVALID,
                       "masks[%d] has slices of sequence %d that do not ascend by their "
                       "queries, expected that they do",
                       m, i);
  }
  return HCP_OK;
}

static hcp_status check_runs(const hcp_plan *plan, const hcp_masks *masks, int32_t m, int32_t i,
                             hcp_error *err) {
  if (masks[m].first_run == NULL) return HCP_OK;
  int64_t first = masks[m].first_run[i], token = 0;
  for (int64_t r = first; r < masks[m].first_run[i + 1]; r++) {
    const hcp_position_run *x = &masks[m].runs[r];
    if (x->token < token || (r == first && x->token != 0) || x->token >= plan->lengths[i] ||
        x->position < 0 || x->position >= POSITION_MAX)
      return hcp__fail(err, HCP_INVALID,
                       "masks[%d] has position %lld at token %lld of sequence %d, expected "
                       "positions < 2^39 at tokens < %lld that ascend from 0",
                       m, (long long)x->position, (long long)x->token, i,
                       (long long)plan->lengths[i]);
    token = x->token + 1;
  }
  return HCP_OK;
}

static hcp_status check(const hcp_plan *plan, const hcp_masks *masks, int32_t count,
                        hcp_error *err) {
  if (count < 1 || count > MASKS_MAX)
    return hcp__fail(err, HCP_INVALID, "mask_count is %d, expected 1 to %d", count, MASKS_MAX);
  if (plan->mask_count > 0)
    return hcp__fail(err, HCP_INVALID, "the plan has %d masks already, expected none",
                     plan->mask_count);
  for (int32_t i = 0; i < plan->n; i++)
    if (plan->lengths[i] >= MASKED_LENGTH_MAX)
      return hcp__fail(err, HCP_INVALID, "lengths[%d] is %lld, expected < 2^28 under masks", i,
                       (long long)plan->lengths[i]);
  for (int32_t m = 0; m < count; m++)
    for (int32_t i = 0; i < plan->n; i++) {
      hcp_status status = check_slices(plan, masks, m, i, err);
      if (status == HCP_OK) status = check_runs(plan, masks, m, i, err);
      if (status != HCP_OK) return status;
    }
  return HCP_OK;
}

static size_t run_count(const hcp_masks *mask, int32_t n) {
  return mask->first_run == NULL ? 0 : (size_t)mask->first_run[n];
}

/* Copies an array to *at, which moves on. */
static const void *put(char **at, const void *from, size_t bytes) {
  const void *made = *at;
  if (bytes > 0) memcpy(*at, from, bytes);
  *at += bytes;
  return made;
}

/* One allocation: the masks, then the arrays of each. */
static hcp_masks *copy_of(const hcp_masks *masks, int32_t count, int32_t n) {
  size_t firsts = ((size_t)n + 1) * sizeof(int64_t), bytes = (size_t)count * sizeof *masks;
  for (int32_t m = 0; m < count; m++)
    bytes += 2 * firsts + (size_t)masks[m].first[n] * sizeof(hcp_slice) +
             run_count(&masks[m], n) * sizeof(hcp_position_run);
  hcp_masks *made = malloc(bytes);
  if (made == NULL) return NULL;
  char *at = (char *)(made + count);
  for (int32_t m = 0; m < count; m++) {
    const hcp_masks *from = &masks[m];
    made[m] = (hcp_masks){0};
    made[m].first = put(&at, from->first, firsts);
    made[m].slices = put(&at, from->slices, (size_t)from->first[n] * sizeof(hcp_slice));
    if (from->first_run == NULL) continue;
    made[m].first_run = put(&at, from->first_run, firsts);
    made[m].runs = put(&at, from->runs, run_count(from, n) * sizeof(hcp_position_run));
  }
  return made;
}

/* Divides the pieces of a sequence where its stretches begin; under zigzag, too. */
static int divide(const hcp_plan *plan, int32_t sequence, int32_t degree, hcp__cut **cut) {
  hcp__zigzag z = hcp__zigzag_of(plan, sequence, degree);
  if (*cut == NULL) *cut = hcp__cut_zigzag(&z);
  if (*cut == NULL) return 0;
  hcp__cut *divided = hcp__cut_by_stretches(*cut, plan, sequence, degree);
  free(*cut);
  *cut = divided;
  return divided != NULL;
}

static int make_cuts(const hcp_plan *plan, hcp__cut **cuts) {
  for (int32_t g = 0; g < plan->group_count; g++) {
    const hcp_group *group = &plan->groups[g];
    for (int32_t s = 0; s < group->sequences; s++) {
      int32_t sequence = plan->sequences[group->first_sequence + s], degree = group->degree;
      if (degree > 1 && !hcp__cut_balanced(plan, sequence, degree, &cuts[sequence])) return 0;
      if (hcp__stretch_count(plan, sequence) > 1 &&
          !divide(plan, sequence, degree, &cuts[sequence]))
        return 0;
    }
  }
  return 1;
}

static uint64_t checksum_with_masks(const hcp_plan *plan) {
  const int64_t count = plan->mask_count;
  uint64_t sum = hcp__mix(plan->checksum, &count, sizeof count);
  for (int32_t m = 0; m < plan->mask_count; m++) {
    const hcp_masks *masks = &plan->masks[m];
    sum = hcp__mix(sum, masks->first, ((size_t)plan->n + 1) * sizeof *masks->first);
    sum = hcp__mix(sum, masks->slices, (size_t)masks->first[plan->n] * sizeof *masks->slices);
    if (run_count(masks, plan->n) == 0) continue;
    sum = hcp__mix(sum, masks->first_run, ((size_t)plan->n + 1) * sizeof *masks->first_run);
    sum = hcp__mix(sum, masks->runs, run_count(masks, plan->n) * sizeof *masks->runs);
  }
  return sum;
}

void hcp__masks_release(hcp_plan *plan) {
  for (int32_t i = 0; plan->cuts != NULL && i < plan->n; i++)
    free((void *)(uintptr_t)plan->cuts[i]);
  free((void *)(uintptr_t)plan->cuts);
  hcp__documents_release((hcp__documents *)(uintptr_t)plan->documents);
  free((void *)(uintptr_t)plan->masks);
  plan->cuts = NULL;
  plan->documents = NULL;
  plan->masks = NULL;
  plan->mask_count = 0;
}

/* Where documents and stretches of trees begin. Returns 0 when out of memory. */
static int find_documents(hcp_plan *plan) {
  hcp__documents *documents = NULL;
  char *branching = malloc((size_t)plan->n + 1);
  int found = branching != NULL && hcp__documents_create(plan, branching, &documents);
  if (documents != NULL && documents->branching >= 0) {
    documents->stretches = hcp__stretches_create(plan, branching);
    found = documents->stretches != NULL;
  }
  free(branching);
  plan->documents = documents;
  return found;
}

hcp_status hcp_plan_set_masks(hcp_plan *plan, const hcp_masks *masks, int32_t mask_count,
                              hcp_error *err) {
  hcp_status status = check(plan, masks, mask_count, err);
  if (status != HCP_OK) return status;
  hcp__cut **cuts = calloc((size_t)plan->n + 1, sizeof *cuts);
  plan->masks = copy_of(masks, mask_count, plan->n);
  plan->cuts = (const hcp__cut *const *)cuts;
  plan->mask_count = mask_count;
  int made = cuts != NULL && plan->masks != NULL && find_documents(plan);
  if (!made || !make_cuts(plan, cuts)) {
    hcp__masks_release(plan);
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for the masks of a plan");
  }
  plan->checksum = checksum_with_masks(plan);
  return HCP_OK;
}
