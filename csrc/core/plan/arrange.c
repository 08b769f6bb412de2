/* arrange.c - which group of a micro-batch stands where, if ranks meet at the end of the step.
 *
 * Groups of one degree may change places: of each micro-batch, the longest goes where ranks are
 * free soonest. That depends on the order of the micro-batches, so the reverse is tried, too. */
#include <stdlib.h>

#include "plan.h"

/* A place, by when its ranks are free, or a group, longest first. */
typedef struct entry {
  int64_t key;
  int32_t degree, group;
} entry;

typedef struct arrangement {
  const hcp__problem *p;
  const hcp__draft *from;
  hcp__draft *to;
  hcp__rank *ranks;
  entry *places, *groups; /* of a micro-batch */
  int32_t *taker;         /* of each of its places: the group that goes there */
  int32_t sequences; /* so far */
} arrangement;

static int in_order(const void *left, const void *right) {
  const entry *a = left, *b = right;
  if (a->degree != b->degree) return a->degree < b->degree ? -1 : 1;
  if (a->key != b->key) return a->key < b->key ? -1 : 1;
  return (a->group > b->group) - (a->group < b->group);
}

/* Puts a group of the first draft into that of the second one, whose ranks it takes. */
static void put(arrangement *a, int32_t m, const hcp_group *place, const hcp_group *group,
                hcp_group *made) {
  for (int32_t s = 0; s < group->sequences; s++)
    a->to->sequences[a->sequences + s] = a->from->sequences[group->first_sequence + s];
  *made = (hcp_group){place->first_rank, place->degree, a->sequences, group->sequences};
  a->sequences += group->sequences;
  int64_t start = hcp__start_of(made, m, a->p, a->ranks);
  hcp__run_until(made, m, hcp__later(start, hcp__group_time(a->to, a->p, made)), a->ranks);
}

/* Micro-batch m becomes that with the groups of another, whose places come in the same order. */
static void arrange(arrangement *a, int32_t m, const hcp_micro_batch *from) {
  hcp_micro_batch *to = &a->to->micro_batches[m];
  const hcp_group *groups = a->from->groups + from->first_group;
  *to = (hcp_micro_batch){a->to->group_count, from->groups};
  for (int32_t g = 0; g < from->groups; g++) {
    const hcp_group *one = &groups[g];
    a->places[g] = (entry){hcp__start_of(one, m, a->p, a->ranks), one->degree, g};
    a->groups[g] = (entry){-hcp__group_time(a->from, a->p, one), one->degree, g};
  }
  qsort(a->places, (size_t)from->groups, sizeof *a->places, in_order);
  qsort(a->groups, (size_t)from->groups, sizeof *a->groups, in_order);
  for (int32_t g = 0; g < from->groups; g++) a->taker[a->places[g].group] = a->groups[g].group;
  for (int32_t g = 0; g < from->groups; g++)
    put(a, m, &groups[g], &groups[a->taker[g]], &a->to->groups[to->first_group + g]);
  a->to->group_count += from->groups;
}

static void arrange_all(arrangement *a, int32_t reversed) {
  int32_t count = a->from->micro_batch_count;
  for (int32_t r = 0; r < a->p->limits->ranks; r++) a->ranks[r] = (hcp__rank){0, 0};
  a->to->group_count = a->sequences = 0;
  a->to->micro_batch_count = count;
  for (int32_t m = 0; m < count; m++)
    arrange(a, m, &a->from->micro_batches[reversed ? count - 1 - m : m]);
}

hcp_status hcp__arrange(hcp__search *s, hcp_error *err) {
  const hcp_limits *limits = s->p->limits;
  hcp_status status = HCP_OK;
  if (limits->sync != HCP_SYNC_STEP || limits->pipeline.stages > 1) return HCP_OK;
  arrangement a = {.p = s->p};
  a.ranks = malloc((size_t)limits->ranks * sizeof *a.ranks);
  a.places = malloc(2 * (size_t)limits->ranks * sizeof *a.places);
  a.taker = malloc((size_t)limits->ranks * sizeof *a.taker);
  if (a.ranks == NULL || a.places == NULL || a.taker == NULL)
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d ranks", limits->ranks);
  for (int32_t way = 0; way < 2 && status == HCP_OK; way++) {
    a.groups = a.places + limits->ranks;
    a.from = s->best;
    a.to = &s->draft;
    arrange_all(&a, way);
    status = hcp__search_judge(s, err);
  }
  free(a.taker);
  free(a.places);
  free(a.ranks);
  return status;
}
