/* waves_polish.c - the best micro-batches of few sequences, improved by small steps.
 *
 * A sequence joins another group or begins one, or two of nearly one length change
 * places. The ranks of their micro-batches are then divided anew: one after the other
 * goes from the group that is fastest without it to the slowest. A step that lowers
 * the groups' work but no height may pay later, so a little of the work counts, too.
 * A step that raises the sum of both is undone. In a pipeline its makespan stands for
 * the sum of the heights, and two micro-batches may change places in its order. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* Times of all sequences at all degrees up to which there are steps; groups and
 * sequences that these look at, for each sequence and for so many more, on one node and on
 * several, where plans begin worse; how much more a height counts than what is computed;
 * and the share of the sequences among which two change places. */
enum { TIMES = 1 << 17, LOOKS = 1792, NODE_LOOKS = 7168, MORE = 128, HEIGHT = 31, NEAR = 32 };

/* The part of the makespan, as a shift, that a first step may lose, less how warm it is. */
enum { WARM = 9 };

/* Passes of a pipeline that are one look; of so many steps one changes its order. */
enum { BETWEEN = 64, LOOK_PASSES = 4, ORDERS = 8, PIPELINE_LOOKS = 1024, PIPELINE_MORE = 32 };

typedef struct group {
  int32_t wave, degree;
  int32_t first, next; /* its first sequence, -1: empty; the next group of the wave */
  int64_t time, less;  /* on its ranks, and on one rank less */
} group;

typedef struct wave {
  int32_t first;
  int64_t height, area; /* of its slowest group, and of ranks and time of all */
} wave;

typedef struct undo {
  int32_t at;
  group was;
} undo;

typedef struct polish {
  const hcp__problem *p;
  int32_t ranks, waves, groups;
  int64_t never; /* no group of a better plan takes as long */
  int64_t looks; /* left */
  uint32_t chance;
  hcp__needs needs;
  wave *wave;
  group *group; /* n + waves */
  int32_t *next, *in; /* n: the next sequence of the same group, and that group */
  undo *log;    /* of the latest step */
  int32_t logged, log_size;
  int32_t *below;         /* ranks + 1: the next allowed degree, 0: none */
  int32_t *counts, *room; /* ranks + 1: groups of each degree in a wave, and scratch */
  hcp__passes passes;     /* of a pipeline: */
  int32_t whole;          /* their number stays as it is: none may become empty */
  int32_t *order;         /* waves: places to micro-batches */
  int64_t *heights, *ends, makespan; /* waves, and scratch for stages and waves */
  int64_t warm, all_looks; /* what a first step may lose, and the looks of all steps */
  int64_t best;            /* value of what is kept, INT64_MAX: nothing */
  int64_t now;             /* value of what stands */
  int32_t kept_groups;
  wave *kept_wave;
  group *kept_group;
  int32_t *kept_next, *kept_in, *kept_order;
} polish;

/* ---- groups ---- */

/* o->never: the group does not fit, or takes limit or longer. */
static int64_t time_within(polish *o, int32_t g, int32_t degree, int64_t limit) {
  int64_t time = 0, rows = 0;
  if (degree < 1 || degree > o->ranks) return o->never;
  for (int32_t s = o->group[g].first; s >= 0; s = o->next[s]) {
    hcp__need one = hcp__need_of(&o->needs, s, degree);
    o->looks--;
    time += one.time;
    rows += one.rows;
    if (time >= limit || rows > o->p->capacity) return o->never;
  }
  return time;
}

static int64_t time_at(polish *o, int32_t g, int32_t degree) {
  return time_within(o, g, degree, o->never);
}

static void resize(polish *o, int32_t g, int32_t degree, int64_t time) {
  group *one = &o->group[g];
  one->degree = degree;
  one->time = time;
  one->less = one->first < 0 ? o->never : time_at(o, g, o->below[degree]);
}

static void note(polish *o, int32_t g) { o->log[o->logged++] = (undo){g, o->group[g]}; }

/* ---- ranks ---- */

typedef struct look {
  int32_t used, slowest, cheapest; /* groups: the slowest, and that which is fastest on less */
} look;

static look look_at(polish *o, int32_t w) {
  look l = {0, -1, -1};
  o->wave[w].area = 0;
  for (int32_t g = o->wave[w].first; g >= 0; g = o->group[g].next) {
    const group *one = &o->group[g];
    o->looks--;
    if (one->first < 0) continue;
    l.used += one->degree;
    o->wave[w].area += one->time * one->degree;
    if (l.slowest < 0 || one->time > o->group[l.slowest].time) l.slowest = g;
    if (l.cheapest < 0 || one->less < o->group[l.cheapest].less) l.cheapest = g;
  }
  return l;
}

/* Whether the groups of the wave, on used ranks, fit beside each other. */
static int stand(polish *o, int32_t w, int32_t used) {
  if (used > o->ranks || hcp__node_ranks(o->p->limits) == o->ranks) return used <= o->ranks;
  memset(o->counts, 0, ((size_t)o->ranks + 1) * sizeof *o->counts);
  for (int32_t g = o->wave[w].first; g >= 0; g = o->group[g].next)
    if (o->group[g].first >= 0) o->counts[o->group[g].degree]++;
  return hcp__stand_together(o->p->limits, o->counts, o->room);
}

/* The group gets the next degree on which it is faster. */
static int widen(polish *o, int32_t g) {
  group *one = &o->group[g];
  for (int32_t degree = one->degree + 1; degree <= o->ranks; degree++) {
    int64_t time = time_within(o, g, degree, one->time);
    if (time >= one->time) continue;
    note(o, g);
    resize(o, g, degree, time);
    return 1;
  }
  return 0;
}

/* The group that loses least gives up ranks, until all fit; 0: none is within time
 * without them. */
static int make_room(polish *o, int32_t w, int64_t time, look *l) {
  for (*l = look_at(o, w); !stand(o, w, l->used); *l = look_at(o, w)) {
    group *one = &o->group[l->cheapest];
    if (one->less >= time || o->logged == o->log_size) return 0;
    note(o, l->cheapest);
    resize(o, l->cheapest, o->below[one->degree], one->less);
  }
  return 1;
}

static void revert(polish *o, int32_t logged) {
  while (o->logged > logged) {
    const undo *last = &o->log[--o->logged];
    int32_t first = o->group[last->at].first;
    o->group[last->at] = last->was;
    o->group[last->at].first = first;
  }
}

/* The slowest group gets ranks, also of groups that stay faster without them. For fixed
 * groups whose times fall with the degree, no division of one node is better. 0: the
 * groups do not fit beside each other. */
static int divide(polish *o, int32_t w) {
  look l;
  if (!make_room(o, w, o->never, &l)) return 0;
  for (int32_t logged = o->logged; l.slowest >= 0; logged = o->logged) {
    int64_t height = o->group[l.slowest].time, area = o->wave[w].area;
    if ((l.used < o->ranks || o->group[l.cheapest].less < height) && o->logged < o->log_size &&
        widen(o, l.slowest) && make_room(o, w, height, &l))
      continue;
    revert(o, logged);
    o->wave[w].area = area;
    o->wave[w].height = hcp__launched(o->p->cost, height);
    return height < o->never;
  }
  o->wave[w].height = 0;
  return 1;
}

/* ---- steps ---- */

static void enter(polish *o, int32_t g, int32_t s) {
  o->next[s] = o->group[g].first;
  o->group[g].first = s;
  o->in[s] = g;
}

static void leave(polish *o, int32_t s) {
  int32_t *at = &o->group[o->in[s]].first;
  while (*at != s) at = &o->next[*at];
  *at = o->next[s];
}

/* On as many ranks as before, or as rows need. */
static void remeasure(polish *o, int32_t g) {
  int32_t degree = o->group[g].degree > 0 ? o->group[g].degree : 1;
  if (o->group[g].first < 0) {
    resize(o, g, 0, 0);
    return;
  }
  int64_t time = time_at(o, g, degree);
  while (time >= o->never && degree < o->ranks) time = time_at(o, g, ++degree);
  resize(o, g, degree, time);
}

static int is_pipeline(const polish *o) { return o->passes.count > 0; }

static int64_t pipeline_time(polish *o) {
  o->looks -= 1 + o->passes.count / LOOK_PASSES;
  for (int32_t w = 0; w < o->waves; w++) o->heights[w] = o->wave[w].height;
  return hcp__passes_time(&o->passes, o->heights, o->order, o->waves, o->ends);
}

/* What a step in two micro-batches may not raise. */
static int64_t value(const polish *o, int32_t a, int32_t b) {
  int64_t heights = o->wave[a].height, areas = o->wave[a].area / o->ranks;
  if (a != b) heights += o->wave[b].height;
  if (a != b) areas += o->wave[b].area / o->ranks;
  return HEIGHT * (is_pipeline(o) ? o->makespan : heights) + areas;
}

/* ---- worse for a while ---- */

/* What a step may lose: less and less, and nothing at the end. */
static int64_t slack(const polish *o) {
  int64_t left = o->looks - o->all_looks / 4;
  return left <= 0 ? 0 : hcp__scaled(o->warm, left, o->all_looks);
}

static int64_t value_of_all(const polish *o) {
  int64_t sum = 0;
  for (int32_t w = 0; w < o->waves; w++)
    sum += (is_pipeline(o) ? 0 : HEIGHT * o->wave[w].height) + o->wave[w].area / o->ranks;
  return sum + (is_pipeline(o) ? HEIGHT * o->makespan : 0);
}

static void copy_state(const polish *o, int back) {
  size_t n = (size_t)o->p->n, waves = (size_t)o->waves;
  size_t groups = (size_t)(back ? o->kept_groups : o->groups);
#define COPY(to, from, count) \
  memcpy(back ? (from) : (to), back ? (to) : (from), (count) * sizeof *(to))
  COPY(o->kept_wave, o->wave, waves);
  COPY(o->kept_group, o->group, groups);
  COPY(o->kept_next, o->next, n);
  COPY(o->kept_in, o->in, n);
  COPY(o->kept_order, o->order, waves);
#undef COPY
}

/* Keeps what stands where it is the best so far. */
static void keep_best(polish *o) {
  if (o->warm == 0 || o->now >= o->best) return; /* what stands is the best */
  o->best = o->now;
  o->kept_groups = o->groups;
  copy_state(o, 0);
}

/* s goes to group g, t, unless -1, from there to where s was. */
static void step(polish *o, int32_t s, int32_t g, int32_t t) {
  int32_t from = o->in[s], a = o->group[from].wave, b = o->group[g].wave;
  wave was_a = o->wave[a], was_b = o->wave[b];
  int64_t before = value(o, a, b), makespan = o->makespan;
  o->logged = 0;
  note(o, from);
  note(o, g);
  leave(o, s);
  if (t >= 0) leave(o, t);
  enter(o, g, s);
  if (t >= 0) enter(o, from, t);
  remeasure(o, from);
  remeasure(o, g);
  if (divide(o, a) && (a == b || divide(o, b)) && !(o->whole && o->wave[a].height == 0)) {
    if (is_pipeline(o)) o->makespan = pipeline_time(o);
    int64_t after = value(o, a, b);
    if (after <= before + slack(o)) {
      o->now += after - before;
      keep_best(o);
      return;
    }
  }
  leave(o, s);
  if (t >= 0) leave(o, t);
  enter(o, from, s);
  if (t >= 0) enter(o, g, t);
  revert(o, 0);
  o->wave[a] = was_a;
  o->wave[b] = was_b;
  o->makespan = makespan;
}

static int32_t draw(polish *o, int32_t below) {
  o->chance = o->chance * 1664525u + 1013904223u;
  return (int32_t)(((uint64_t)o->chance * (uint64_t)below) >> 32);
}

/* An empty group of the wave, -1: none. */
static int32_t empty_in(polish *o, int32_t w) {
  for (int32_t g = o->wave[w].first; g >= 0; g = o->group[g].next)
    if (o->group[g].first < 0) return g;
  if (o->groups == o->p->n + o->waves) return -1;
  o->group[o->groups] = (group){w, 0, -1, o->wave[w].first, 0, o->never};
  return o->wave[w].first = o->groups++;
}

/* The micro-batch at a place goes to another one, past those between them. */
static void move_place(polish *o, int32_t from, int32_t to) {
  int32_t moved = o->order[from], on = from < to ? 1 : -1;
  for (; from != to; from += on) o->order[from] = o->order[from + on];
  o->order[to] = moved;
}

/* A micro-batch goes to another place, or two change places, unless that takes longer. */
static void step_in_order(polish *o) {
  int32_t i = draw(o, o->waves), k = draw(o, o->waves), other = i < k ? k - 1 : k + 1;
  int32_t swaps = draw(o, 2) && i != k;
  move_place(o, i, k);
  if (swaps) move_place(o, other, i);
  int64_t makespan = pipeline_time(o);
  if (HEIGHT * (makespan - o->makespan) <= slack(o)) {
    o->now += HEIGHT * (makespan - o->makespan);
    o->makespan = makespan;
    keep_best(o);
    return;
  }
  if (swaps) move_place(o, i, other);
  move_place(o, k, i);
}

static void step_anywhere(polish *o) {
  int32_t n = o->p->n, i = draw(o, n), way = draw(o, 8);
  int32_t k = way < 2 ? draw(o, n) : (i + 1 + draw(o, n / NEAR + 1)) % n;
  int32_t s = o->p->order[i], t = o->p->order[k], g = o->in[t];
  o->looks--;
  if (g == o->in[s] && (way > 0 || o->warm == 0)) return;
  if (way == 0) g = empty_in(o, is_pipeline(o) ? draw(o, o->waves) : o->group[g].wave);
  if (way < 2 && g >= 0) step(o, s, g, -1);
  if (way >= 2 && !hcp__same_size(o->p, s, t)) step(o, s, g, t);
}

/* ---- from a plan to a plan ---- */

static void load(polish *o, const hcp__draft *draft) {
  for (int32_t w = 0; w < o->waves; w++) o->wave[w] = (wave){.first = -1};
  for (int32_t w = 0; w < draft->micro_batch_count; w++) {
    const hcp_micro_batch *m = &draft->micro_batches[w];
    for (int32_t i = m->first_group; i < m->first_group + m->groups; i++) {
      const hcp_group *from = &draft->groups[i];
      int32_t g = o->groups++;
      o->group[g] = (group){w, from->degree, -1, o->wave[w].first, 0, o->never};
      o->wave[w].first = g;
      for (int32_t s = 0; s < from->sequences; s++)
        enter(o, g, draft->sequences[from->first_sequence + s]);
      remeasure(o, g);
    }
    o->logged = 0;
    divide(o, w);
  }
}

static void unload(polish *o, hcp__blocks *blocks) {
  int32_t *places = o->order + o->waves;
  for (int32_t i = 0; i < o->waves; i++) places[o->order[i]] = i;
  blocks->count = 0;
  blocks->placed_on = NULL;
  for (int32_t g = 0; g < o->groups; g++) {
    const group *one = &o->group[g];
    if (one->first < 0) continue;
    int32_t b = hcp__block_open(blocks, 0, one->degree, 0, 0);
    blocks->block[b].micro_batch = places[one->wave];
    for (int32_t s = one->first; s >= 0; s = o->next[s]) {
      hcp__need taken = hcp__need_of(&o->needs, s, one->degree);
      hcp__block_add(blocks, b, s, taken.rows, taken.time);
    }
  }
}

/* Whether steps would keep all limits, and sums of their times fit. */
static int may_step(const hcp__problem *p, int64_t makespan) {
  const hcp_limits *limits = p->limits;
  int64_t stages = limits->pipeline.stages > 1 ? limits->pipeline.stages : 1;
  int64_t chunks = limits->pipeline.virtual_stages > 1 ? limits->pipeline.virtual_stages : 1;
  return limits->slowness == NULL && (int64_t)p->n * limits->ranks <= TIMES &&
         makespan - p->bound > p->bound >> 9 &&
         makespan < INT64_MAX / 1024 / limits->ranks / stages / chunks;
}

static void release(polish *o) {
  hcp__passes_release(&o->passes);
  free(o->ends);
  free(o->order);
  free(o->below);
  free(o->log);
  free(o->next);
  free(o->group);
  free(o->wave);
  hcp__needs_release(&o->needs);
}

static int allocate(polish *o) {
  size_t n = (size_t)o->p->n, ranks = (size_t)o->ranks, waves = (size_t)o->waves;
  o->wave = calloc(2 * waves, sizeof *o->wave);
  o->group = calloc(2 * (n + waves), sizeof *o->group);
  o->next = calloc(4 * n, sizeof *o->next);
  o->log_size = 8 * o->ranks + 2;
  o->log = malloc((size_t)o->log_size * sizeof *o->log);
  o->below = calloc(3 * (ranks + 1), sizeof *o->below);
  if (o->below == NULL) return 0;
  o->counts = o->below + ranks + 1;
  o->room = o->counts + ranks + 1;
  for (int32_t d = 1; d < o->ranks; d++)
    o->below[d + 1] = hcp__degree_allowed(o->p->limits, o->p->cost, d) ? d : o->below[d];
  o->order = calloc(3 * waves, sizeof *o->order);
  o->ends = calloc((size_t)o->p->limits->pipeline.stages + 2 * waves, sizeof *o->ends);
  if (o->order == NULL || o->ends == NULL) return 0;
  o->heights = o->ends + o->p->limits->pipeline.stages + waves;
  for (int32_t w = 0; w < o->waves; w++) o->order[w] = w;
  if (!hcp__needs_init(&o->needs, o->p, o->never) || o->wave == NULL || o->group == NULL ||
      o->next == NULL || o->log == NULL)
    return 0;
  o->in = o->next + n;
  o->kept_next = o->in + n;
  o->kept_in = o->kept_next + n;
  o->kept_wave = o->wave + waves;
  o->kept_group = o->group + n + waves;
  o->kept_order = o->order + 2 * waves;
  return 1;
}

hcp_status hcp__polish_blocks(const hcp__problem *p, const hcp__draft *from, int64_t makespan,
                              int32_t effort, int32_t share, int32_t warm, hcp__blocks *blocks,
                              hcp_error *err) {
  polish o = {.p = p, .ranks = p->limits->ranks, .waves = from->micro_batch_count};
  o.whole = warm > 0 && hcp__multiple(&p->limits->pipeline) > 1;
  if (p->limits->pipeline.stages > 1 && !o.whole) o.waves++; /* one that sequences may begin */
  o.never = makespan + 1;
  blocks->count = 0;
  if (!may_step(p, makespan)) return HCP_OK;
  int32_t looks = hcp__node_ranks(p->limits) < o.ranks ? NODE_LOOKS : LOOKS;
  o.looks = p->limits->pipeline.stages > 1
                ? (int64_t)PIPELINE_LOOKS * (p->n + PIPELINE_MORE) * effort / share
                : (int64_t)looks * (p->n + MORE) * effort / share;
  o.chance = (uint32_t)effort;
  hcp_status status = HCP_OK;
  if (!allocate(&o))
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d micro-batches", o.waves);
  if (status == HCP_OK && p->limits->pipeline.stages > 1)
    status = hcp__passes_make(&p->limits->pipeline, o.waves, &o.passes, err);
  if (status == HCP_OK) {
    load(&o, from);
    if (is_pipeline(&o)) o.makespan = pipeline_time(&o);
    o.all_looks = o.looks;
    o.warm = warm > 0 ? HEIGHT * (makespan >> (WARM - warm)) : 0;
    o.best = INT64_MAX;
    o.now = value_of_all(&o);
    keep_best(&o);
    for (uint32_t i = 1; o.looks > 0 && (i % BETWEEN != 0 || !hcp__stopped(p)); i++)
      if (is_pipeline(&o) && draw(&o, ORDERS) == 0)
        step_in_order(&o);
      else
        step_anywhere(&o);
    if (o.now > o.best) {
      copy_state(&o, 1);
      o.groups = o.kept_groups;
    }
    unload(&o, blocks);
  }
  release(&o);
  return status;
}

hcp_status hcp__polish(hcp__search *s, int32_t effort, int32_t share, int32_t warm,
                       hcp_error *err) {
  const hcp_limits *limits = s->p->limits;
  hcp_status status = HCP_OK;
  if (limits->sync != HCP_SYNC_MICRO_BATCH || limits->pipeline.stages > 1 || !hcp__is_few(s->p))
    return HCP_OK;
  status = hcp__polish_blocks(s->p, s->best, s->makespan, effort, share, warm, &s->blocks, err);
  return status == HCP_OK && s->blocks.count > 0 ? hcp__search_judge_waves(s, err) : status;
}
