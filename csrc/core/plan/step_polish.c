/* step_polish.c - a plan of few sequences whose ranks meet at the end of the step, improved by
 * small steps.
 *
 * A plan is an order of groups, each on ranks of its own: it starts when they are free. A sequence
 * joins another group or begins one, two change places, a group gets another degree or another
 * place in the order, or all groups from one on are placed anew, each where ranks are free
 * soonest. What is left idle below the last group counts a little, since it may pay later. At
 * first a step may make the plan a little worse, so that the search leaves plans that no single
 * step improves. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* Looks at ranks and sequences, for each sequence and for so many more, times effort; how much
 * more the makespan counts than what ranks take; and the part of it, as a shift, that a first step
 * may lose, of few sequences and of others. */
enum { LOOKS = 1 << 12, MORE = 96, MAKESPAN = 31, FEW = 32, WARM_FEW = 8, WARM = 11 };
enum { TIMES = 1 << 17, BETWEEN = 64 };

typedef struct group {
  int64_t time; /* of its sequences, launch included, on ranks of full speed */
  int32_t first_rank; /* -1: wherever ranks are free soonest */
  int32_t degree;
  int32_t first; /* sequence, -1: the group is not in use */
} group;

/* A plan: groups in use come in an order. */
typedef struct state {
  group *groups;  /* n */
  int32_t *order; /* n: groups, count of them in use */
  int32_t *next;  /* n: the next sequence of the same group */
  int32_t *in;    /* n: the group of each sequence */
  int32_t count;
  int64_t value, makespan;
} state;

typedef struct polish {
  const hcp__problem *p;
  hcp__needs needs;
  int32_t ranks;
  int64_t looks, all_looks, warm;
  uint32_t chance;
  state now, tried, best;
  int64_t *free_from; /* ranks: when each is free, without the launches of its micro-batches */
  int32_t *batches;   /* ranks: how many it has run, with rows or without */
} polish;

static int32_t draw(polish *o, int32_t below) {
  o->chance = o->chance * 1664525u + 1013904223u;
  return (int32_t)(((uint64_t)o->chance * (uint64_t)below) >> 32);
}

/* ---- states ---- */

static void copy_state(state *to, const state *from, int32_t n) {
  size_t bytes = (size_t)n * sizeof(int32_t);
  memcpy(to->groups, from->groups, (size_t)n * sizeof *to->groups);
  memcpy(to->order, from->order, bytes);
  memcpy(to->next, from->next, bytes);
  memcpy(to->in, from->in, bytes);
  to->count = from->count;
  to->value = from->value;
  to->makespan = from->makespan;
}

static void swap_states(state *x, state *y) {
  state kept = *x;
  *x = *y;
  *y = kept;
}

static void enter(state *x, int32_t g, int32_t s) {
  x->next[s] = x->groups[g].first;
  x->groups[g].first = s;
  x->in[s] = g;
}

static void leave(state *x, int32_t s) {
  int32_t *at = &x->groups[x->in[s]].first;
  while (*at != s) at = &x->next[*at];
  *at = x->next[s];
}

static int32_t place_of(const state *x, int32_t g) {
  int32_t place = 0;
  while (x->order[place] != g) place++;
  return place;
}

static void take_out(state *x, int32_t place) {
  for (x->count--; place < x->count; place++) x->order[place] = x->order[place + 1];
}

static void put_in(state *x, int32_t place, int32_t g) {
  for (int32_t i = x->count++; i > place; i--) x->order[i] = x->order[i - 1];
  x->order[place] = g;
}

/* ---- time ---- */

/* Measures the group at its degree; 0: it may not have that one. */
static int measure(polish *o, state *x, int32_t g) {
  group *one = &x->groups[g];
  int64_t rows = 0;
  int64_t work = 0;
  for (int32_t s = one->first; s >= 0; s = x->next[s]) {
    hcp__need need = hcp__need_of(&o->needs, s, one->degree);
    o->looks--;
    work += need.time;
    rows += need.rows;
    if (o->p->cost->launch + work >= o->needs.never || rows > o->p->capacity) return 0;
  }
  one->time = hcp__launched(o->p->cost, work);
  return one->time < o->needs.never;
}

/* Where a group would begin. */
typedef struct spot {
  int64_t start; /* without launches */
  int32_t batch;
} spot;

static spot spot_at(const polish *o, int32_t first, int32_t degree) {
  spot found = {0, 0};
  for (int32_t r = first; r < first + degree; r++) {
    if (o->free_from[r] > found.start) found.start = o->free_from[r];
    if (o->batches[r] > found.batch) found.batch = o->batches[r];
  }
  return found;
}

static int64_t launches(const polish *o, int32_t count) {
  return count * hcp__launched(o->p->cost, 0);
}

/* The last of these ranks on which a group would begin at that time or later, -1: none. */
static int32_t last_late(const polish *o, int32_t first, int32_t degree, int64_t time) {
  int32_t r = first + degree - 1;
  while (r >= first && o->free_from[r] + launches(o, o->batches[r]) < time) r--;
  return r < first ? -1 : r;
}

/* The ranks that are free soonest, -1: none may be taken. */
static int32_t soonest(polish *o, int32_t degree) {
  int32_t best = -1;
  int64_t least = INT64_MAX;
  for (int32_t first = 0; first + degree <= o->ranks; first++) {
    int32_t late = last_late(o, first, degree, least);
    if (late >= 0) first = late; /* no interval that has it is better */
    if (late >= 0 || !hcp__place_allowed(o->p->limits, first, degree)) continue;
    spot found = spot_at(o, first, degree);
    int64_t from = found.start + launches(o, found.batch);
    if (from >= least) continue;
    least = from;
    best = first;
  }
  o->looks -= o->ranks;
  return best;
}

/* Places the group in use and returns its end, without launches. batches: of its ranks, then. */
static int64_t run(polish *o, const group *one, int32_t *batches) {
  spot at = spot_at(o, one->first_rank, one->degree);
  int32_t slowness = hcp__slowness(o->p->limits, one->first_rank, one->degree);
  int64_t end = at.start + hcp__slowed(one->time, slowness) - launches(o, 1);
  for (int32_t r = one->first_rank; r < one->first_rank + one->degree; r++) {
    o->free_from[r] = end;
    o->batches[r] = at.batch + 1;
  }
  *batches = at.batch + 1;
  o->looks -= one->degree;
  return end;
}

static void clear(polish *o) {
  memset(o->free_from, 0, (size_t)o->ranks * sizeof *o->free_from);
  memset(o->batches, 0, (size_t)o->ranks * sizeof *o->batches);
}

/* Places the groups and fills in the value. 0: some group has no place, or ends after limit. */
static int decode(polish *o, state *x, int64_t limit) {
  int64_t sum = 0, last = 0;
  int32_t batches = 0;
  clear(o);
  for (int32_t i = 0; i < x->count; i++) {
    group one = x->groups[x->order[i]];
    if (one.first_rank < 0) one.first_rank = soonest(o, one.degree);
    if (one.first_rank < 0) return 0;
    x->groups[x->order[i]] = one;
    int32_t own;
    last = hcp__most(last, run(o, &one, &own));
    if (own > batches) batches = own;
    if (last + launches(o, batches) > limit) return 0;
  }
  for (int32_t r = 0; r < o->ranks; r++) sum += o->free_from[r];
  x->makespan = last + launches(o, batches);
  x->value = MAKESPAN * x->makespan + sum / o->ranks;
  o->looks -= x->count + o->ranks / 4;
  return 1;
}

/* ---- steps ---- */

static void place_anew(state *x, int32_t from) {
  for (int32_t i = from; i < x->count; i++) x->groups[x->order[i]].first_rank = -1;
}

/* Some of the ranks of one group become another's: all of an empty one's. */
static int give(polish *o, state *x, int32_t from, int32_t to) {
  group *a = &x->groups[from], *b = &x->groups[to];
  int32_t ranks = a->first < 0 ? a->degree : 1 + draw(o, a->degree) / 2;
  if ((a->first >= 0 && ranks == a->degree) || b->degree + ranks > o->ranks) return 0;
  a->degree -= a->first < 0 ? 0 : ranks;
  b->degree += ranks;
  place_anew(x, 0);
  return 1;
}

/* The group after a sequence has left or joined it; 0: it may not be. */
static int settle(polish *o, state *x, int32_t g) {
  if (x->groups[g].first >= 0) return measure(o, x, g);
  take_out(x, place_of(x, g));
  return 1;
}

static int join(polish *o, state *x, int32_t s, int32_t t) {
  int32_t from = x->in[s], to = x->in[t];
  if (from == to) return 0;
  leave(x, s);
  enter(x, to, s);
  if (draw(o, 2) == 0) give(o, x, from, to);
  return settle(o, x, from) && settle(o, x, to);
}

static int exchange(polish *o, state *x, int32_t s, int32_t t) {
  int32_t from = x->in[s], to = x->in[t];
  if (from == to || hcp__same_size(o->p, s, t)) return 0;
  leave(x, s);
  leave(x, t);
  enter(x, to, s);
  enter(x, from, t);
  return measure(o, x, from) && measure(o, x, to);
}

static int32_t another_degree(polish *o, int32_t degree) {
  switch (draw(o, 4)) {
    case 0:
      return 1 + draw(o, o->ranks);
    case 1:
      return degree < o->ranks ? degree + 1 : degree;
    case 2:
      return degree > 1 ? degree - 1 : degree;
    default:
      return degree;
  }
}

static int begin(polish *o, state *x, int32_t s) {
  int32_t from = x->in[s], g = 0;
  if (x->next[x->groups[from].first] < 0) return 0; /* it is alone */
  while (x->groups[g].first >= 0) g++;
  leave(x, s);
  x->groups[g] = (group){0, -1, 0, -1};
  if (draw(o, 2) == 0 || !give(o, x, from, g))
    x->groups[g].degree = another_degree(o, x->groups[from].degree);
  enter(x, g, s);
  put_in(x, draw(o, x->count + 1), g);
  return measure(o, x, from) && measure(o, x, g);
}

/* All sequences of a group go to another one. */
static int merge(polish *o, state *x, int32_t from, int32_t to) {
  if (from == to) return 0;
  group *a = &x->groups[from], *b = &x->groups[to];
  for (int32_t s = a->first; s >= 0; s = a->first) {
    a->first = x->next[s];
    enter(x, to, s);
  }
  take_out(x, place_of(x, from));
  int32_t both = a->degree + b->degree, most = a->degree > b->degree ? a->degree : b->degree;
  b->degree = draw(o, 2) == 0 && both <= o->ranks ? both : most;
  place_anew(x, 0);
  return measure(o, x, to);
}

/* A group becomes two that share its ranks, the next sequence to the one that ends first. */
static int split(polish *o, state *x, int32_t from) {
  group *a = &x->groups[from];
  int32_t g = 0, s = a->first;
  if (a->degree < 2 || x->next[s] < 0) return 0;
  while (x->groups[g].first >= 0) g++;
  group *b = &x->groups[g];
  *b = (group){0, -1, draw(o, 2) == 0 ? a->degree / 2 : 1 + draw(o, a->degree - 1), -1};
  a->degree -= b->degree;
  a->first = -1;
  int64_t times[2] = {0, 0};
  for (int32_t next; s >= 0; s = next) {
    next = x->next[s];
    int64_t t[2] = {times[0] + hcp__need_of(&o->needs, s, a->degree).time,
                    times[1] + hcp__need_of(&o->needs, s, b->degree).time};
    int32_t to = t[1] < t[0];
    times[to] = t[to];
    enter(x, to ? g : from, s);
    o->looks -= 2;
  }
  if (a->first < 0 || b->first < 0) return 0;
  put_in(x, place_of(x, from) + 1, g);
  place_anew(x, 0);
  return measure(o, x, from) && measure(o, x, g);
}

static int resize(polish *o, state *x, int32_t g) {
  group *one = &x->groups[g];
  int32_t degree = another_degree(o, one->degree);
  if (degree == one->degree) return 0;
  one->degree = degree;
  one->first_rank = -1;
  return measure(o, x, g);
}

static int trade(polish *o, state *x, int32_t from, int32_t to) {
  return from != to && give(o, x, from, to) && measure(o, x, from) && measure(o, x, to);
}

static int move(polish *o, state *x, int32_t g) {
  take_out(x, place_of(x, g));
  put_in(x, draw(o, x->count + 1), g);
  x->groups[g].first_rank = -1;
  return 1;
}

/* 0: the step is none, or not allowed. */
static int change(polish *o, state *x) {
  int32_t n = o->p->n, s = draw(o, n), t = draw(o, n);
  switch (draw(o, 11)) {
    case 10:
      return draw(o, 2) == 0 ? split(o, x, x->in[s]) : merge(o, x, x->in[s], x->in[t]);
    case 0:
      return begin(o, x, s);
    case 1:
      return resize(o, x, x->in[s]);
    case 2:
      return move(o, x, x->in[s]);
    case 3:
      return trade(o, x, x->in[s], x->in[t]);
    case 4:
    case 5:
      return join(o, x, s, t);
    default:
      return exchange(o, x, s, t);
  }
}

static int64_t slack(const polish *o) {
  int64_t left = o->looks - o->all_looks / 4;
  return left <= 0 ? 0 : hcp__scaled(o->warm, left, o->all_looks);
}

static void step(polish *o) {
  int32_t n = o->p->n;
  o->looks -= n / 4 + 8;
  copy_state(&o->tried, &o->now, n);
  if (!change(o, &o->tried)) return;
  if (draw(o, 4) == 0) place_anew(&o->tried, draw(o, o->tried.count));
  int64_t most = slack(o);
  if (!decode(o, &o->tried, o->now.makespan + most / MAKESPAN + 1)) return;
  if (o->tried.value > o->now.value + most) return;
  swap_states(&o->tried, &o->now);
  if (o->now.value < o->best.value) copy_state(&o->best, &o->now, n);
}

/* ---- from a plan to a plan ---- */

static int load(polish *o, const hcp__draft *draft) {
  state *x = &o->now;
  for (int32_t g = 0; g < o->p->n; g++) x->groups[g].first = -1;
  x->count = draft->group_count;
  for (int32_t g = 0; g < x->count; g++) {
    const hcp_group *from = &draft->groups[g];
    x->order[g] = g;
    x->groups[g] = (group){0, from->first_rank, from->degree, -1};
    for (int32_t s = 0; s < from->sequences; s++)
      enter(x, g, draft->sequences[from->first_sequence + s]);
    if (!measure(o, x, g)) return 0;
  }
  return decode(o, x, INT64_MAX);
}

static void unload(polish *o, hcp__blocks *blocks) {
  const state *x = &o->best;
  blocks->count = 0;
  blocks->placed_on = o->p->limits;
  clear(o);
  for (int32_t i = 0; i < x->count; i++) {
    const group *one = &x->groups[x->order[i]];
    spot at = spot_at(o, one->first_rank, one->degree);
    int64_t start = at.start + launches(o, at.batch);
    int32_t b = hcp__block_open(blocks, one->first_rank, one->degree, start, o->p->cost->launch);
    for (int32_t s = one->first; s >= 0; s = x->next[s]) {
      hcp__need need = hcp__need_of(&o->needs, s, one->degree);
      hcp__block_add(blocks, b, s, need.rows, need.time);
    }
    run(o, one, &(int32_t){0});
  }
}

static int state_init(state *x, int32_t n) {
  x->groups = malloc((size_t)n * sizeof *x->groups);
  x->order = malloc((size_t)n * 3 * sizeof *x->order);
  if (x->groups == NULL || x->order == NULL) return 0;
  x->next = x->order + n;
  x->in = x->next + n;
  return 1;
}

static void state_release(state *x) {
  free(x->order);
  free(x->groups);
}

static int init(polish *o, int64_t makespan) {
  o->free_from = malloc((size_t)o->ranks * sizeof *o->free_from);
  o->batches = malloc((size_t)o->ranks * sizeof *o->batches);
  return hcp__needs_init(&o->needs, o->p, makespan + 1) && o->free_from != NULL &&
         o->batches != NULL && state_init(&o->now, o->p->n) && state_init(&o->tried, o->p->n) &&
         state_init(&o->best, o->p->n);
}

static void release(polish *o) {
  state_release(&o->best);
  state_release(&o->tried);
  state_release(&o->now);
  free(o->batches);
  free(o->free_from);
  hcp__needs_release(&o->needs);
}

hcp_status hcp__polish_step(hcp__search *s, int32_t effort, int32_t share, int32_t warm,
                            hcp_error *err) {
  const hcp__problem *p = s->p;
  polish o = {.p = p, .ranks = p->limits->ranks, .chance = (uint32_t)effort};
  if (p->limits->sync != HCP_SYNC_STEP || !hcp__is_few(p) ||
      s->makespan - p->bound <= p->bound >> 9 || (int64_t)p->n * o.ranks > TIMES ||
      s->makespan > INT64_MAX / (1 << 14))
    return HCP_OK;
  hcp_status status = HCP_OK;
  int found = 0;
  if (!init(&o, s->makespan)) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", p->n);
  } else if (load(&o, s->best)) {
    o.looks = o.all_looks = (int64_t)LOOKS * (p->n + MORE) * effort / share;
    o.warm = MAKESPAN * (s->makespan >> ((p->n <= FEW ? WARM_FEW : WARM) - warm));
    copy_state(&o.best, &o.now, p->n);
    while (o.looks > 0 && !hcp__stopped(p))
      for (int32_t i = 0; i < BETWEEN && o.looks > 0; i++) step(&o);
    found = 1;
    unload(&o, &s->blocks);
  }
  release(&o);
  if (status != HCP_OK || !found) return status;
  status = hcp__draft_by_start(&s->draft, &s->blocks, p, err);
  return status == HCP_OK ? hcp__search_judge(s, err) : status;
}
