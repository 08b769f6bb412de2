/* needs.c - what every sequence takes at every degree, for the searches by small steps. */
#include <stdlib.h>

#include "plan.h"

int hcp__needs_init(hcp__needs *needs, const hcp__problem *p, int64_t never) {
  *needs = (hcp__needs){.p = p, .never = never, .row = (size_t)p->limits->ranks + 1};
  needs->table = calloc((size_t)p->n * needs->row, sizeof *needs->table);
  return needs->table != NULL;
}

void hcp__needs_release(hcp__needs *needs) { free(needs->table); }

hcp__need hcp__need_ask(const hcp__needs *needs, hcp__need *one, int32_t s, int32_t degree) {
  const hcp__problem *p = needs->p;
  one->time = needs->never;
  if (!hcp__degree_allowed(p->limits, p->cost, degree)) return *one;
  one->rows = hcp__load(p, s, degree);
  int64_t time = hcp__cost(p->cost, hcp__size_at(p, s), degree, p->limits->ranks_per_node);
  if (time > 0 && time < needs->never && one->rows <= p->capacity) one->time = time;
  return *one;
}
