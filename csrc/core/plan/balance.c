/* balance.c - the last ranks of a plan whose ranks meet at the end of the step, balanced.
 *
 * Sequences on single ranks that no wide group follows are numbers to be divided among ranks. A
 * list leaves the fullest rank a little above the others. Two sequences of it and of one of the
 * emptiest ranks change places, or one goes there alone, so that the two ranks end as nearly
 * together as can be. Both are sorted, so the best pair is found in one pass, which keeps rows and
 * launches. The same begins once more from the division of differencing.c, which is better where
 * each rank has few sequences. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* Emptiest ranks that the fullest looks at; looks at sequences and ranks in all, for each of them,
 * and at most; and the part of the bound, as a shift, within which none are worth it. */
enum { EMPTIEST = 16, LOOKS = 64, MOST = 1 << 16, NEAR = 20 };

/* Sequences times ranks up to which they are divided anew. */
enum { DIVIDED = 1 << 14 };

/* A sequence, or a free place of a rank, which takes no time. */
typedef struct item {
  int64_t time, rows;
  int32_t sequence; /* -1: none */
  int32_t group;
} item;

typedef struct balance {
  const hcp__problem *p;
  const hcp__draft *from;
  item *items;      /* n + ranks: rank after rank, longest first */
  int32_t *first;   /* ranks + 1: of items */
  int64_t *ends;    /* ranks */
  int32_t *wide;    /* ranks: the last wide group, -1: none */
  int32_t *tail;    /* ranks: the last group, -1: none      */
  int32_t *next;    /* ranks: the first micro-batch not run */
  int64_t *rows;    /* groups: on its rank */
  int32_t *members; /* groups */
  int32_t *first_group; /* ranks + 1: of groups */
  int32_t *groups; /* those whose sequences items are */
  int64_t looks;
} balance;

/* Two items that may change places. */
typedef struct pair {
  int32_t a, b;
  int64_t off; /* by how much they miss half of the gap, INT64_MAX: there are none */
} pair;

static int is_last(const balance *o, int32_t g) {
  const hcp_group *group = &o->from->groups[g];
  return group->degree == 1 && g > o->wide[group->first_rank];
}

/* ---- from a draft ---- */

static void launch(balance *o, int32_t rank, int32_t m) {
  o->ends[rank] += hcp__launches(o->p->limits, o->p->cost, rank, m - o->next[rank]);
  o->next[rank] = m;
}

static void run(balance *o, int32_t g, int32_t m) {
  const hcp_group *group = &o->from->groups[g];
  int32_t first = group->first_rank, last = first + group->degree;
  int64_t start = 0;
  for (int32_t r = first; r < last; r++) {
    launch(o, r, m);
    start = hcp__most(start, o->ends[r]);
  }
  start += hcp__group_time(o->from, o->p, group);
  for (int32_t r = first; r < last; r++) {
    o->ends[r] = start;
    o->next[r] = m + 1;
    o->tail[r] = g;
    if (group->degree > 1) o->wide[r] = g;
  }
}

static void find_ends(balance *o) {
  int32_t ranks = o->p->limits->ranks, count = o->from->micro_batch_count;
  for (int32_t r = 0; r < ranks; r++) o->tail[r] = o->wide[r] = -1;
  for (int32_t m = 0; m < count; m++) {
    const hcp_micro_batch *batch = &o->from->micro_batches[m];
    for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++) run(o, g, m);
  }
  for (int32_t r = 0; r < ranks; r++) launch(o, r, count);
}

static int longest_first(const void *left, const void *right) {
  const item *a = left, *b = right;
  if (a->time != b->time) return a->time > b->time ? -1 : 1;
  return (a->sequence > b->sequence) - (a->sequence < b->sequence);
}

static void add_items(balance *o, int32_t g, int32_t *count) {
  const hcp_group *group = &o->from->groups[g];
  for (int32_t i = 0; i < group->sequences; i++) {
    int32_t s = o->from->sequences[group->first_sequence + i];
    item one = {0, hcp__load(o->p, s, 1), s, g};
    one.time = hcp__cost(o->p->cost, hcp__size_at(o->p, s), 1, o->p->limits->ranks_per_node);
    o->rows[g] += one.rows;
    o->items[(*count)++] = one;
  }
  o->members[g] = group->sequences;
}

/* Of every rank with such groups: their sequences, and a free place in the last one. */
static int load(balance *o) {
  int32_t ranks = o->p->limits->ranks, count = 0, groups = 0;
  int32_t *next = malloc(((size_t)o->from->group_count + (size_t)ranks) * sizeof *next);
  if (next == NULL) return 0;
  int32_t *top = next + o->from->group_count;
  for (int32_t r = 0; r < ranks; r++) top[r] = -1;
  for (int32_t g = 0; g < o->from->group_count; g++) {
    if (!is_last(o, g)) continue;
    next[g] = top[o->from->groups[g].first_rank];
    top[o->from->groups[g].first_rank] = g;
  }
  for (int32_t r = 0; r < ranks; r++) {
    o->first[r] = count;
    o->first_group[r] = groups;
    for (int32_t g = top[r]; g >= 0; g = next[g]) {
      o->groups[groups++] = g;
      add_items(o, g, &count);
    }
    if (top[r] >= 0) o->items[count++] = (item){0, 0, -1, top[r]};
    qsort(o->items + o->first[r], (size_t)(count - o->first[r]), sizeof *o->items, longest_first);
  }
  o->first[ranks] = count;
  o->first_group[ranks] = groups;
  free(next);
  return 1;
}

/* ---- pairs ---- */

static int may_hold(const balance *o, const item *leaves, const item *comes) {
  int32_t members = o->members[leaves->group] - (leaves->sequence >= 0) + (comes->sequence >= 0);
  return members > 0 && o->rows[leaves->group] - leaves->rows + comes->rows <= o->p->capacity;
}

/* Offers items a of the fuller rank and b of the other. */
static void offer(const balance *o, int32_t a, int32_t b, int64_t gap, pair *best) {
  const item *x = &o->items[a], *y = &o->items[b];
  int64_t moved = x->time - y->time;
  if (moved <= 0 || moved >= gap) return;
  int64_t off = moved > gap / 2 ? moved - gap / 2 : gap / 2 - moved;
  if (off < best->off && may_hold(o, x, y) && may_hold(o, y, x)) *best = (pair){a, b, off};
}

/* The pair after which both ranks end most nearly together. */
static pair find_pair(balance *o, int32_t full, int32_t other) {
  pair best = {-1, -1, INT64_MAX};
  int64_t gap = o->ends[full] - o->ends[other];
  int32_t b = o->first[other], end = o->first[other + 1];
  for (int32_t a = o->first[full]; a < o->first[full + 1] && b < end; a++) {
    while (b < end && o->items[b].time > o->items[a].time - gap / 2) b++;
    if (b > o->first[other]) offer(o, a, b - 1, gap, &best);
    if (b < end) offer(o, a, b, gap, &best);
  }
  o->looks -= o->first[full + 1] - o->first[full] + end - o->first[other];
  return best;
}

/* Moves an item of the rank to where its time is in order. */
static void settle(balance *o, int32_t rank, int32_t i) {
  item moved = o->items[i];
  for (; i > o->first[rank] && o->items[i - 1].time < moved.time; i--)
    o->items[i] = o->items[i - 1];
  for (; i + 1 < o->first[rank + 1] && o->items[i + 1].time > moved.time; i++)
    o->items[i] = o->items[i + 1];
  o->items[i] = moved;
}

static void exchange(balance *o, int32_t full, int32_t other, const pair *one) {
  item *x = &o->items[one->a], *y = &o->items[one->b], moved = *x;
  int32_t group = x->group;
  int64_t rows = x->rows - y->rows, time = x->time - y->time;
  o->rows[x->group] -= rows;
  o->rows[y->group] += rows;
  o->members[x->group] += (y->sequence >= 0) - (x->sequence >= 0);
  o->members[y->group] += (x->sequence >= 0) - (y->sequence >= 0);
  o->ends[full] -= time;
  o->ends[other] += time;
  moved.group = y->group;
  *x = *y;
  x->group = group;
  *y = moved;
  settle(o, full, one->a);
  settle(o, other, one->b);
}

/* The rank that ends first of those after the last one, which ends there; -1: none. Ranks
 * without items take no part. */
static int32_t next_emptiest(const balance *o, int32_t last) {
  int32_t best = -1;
  for (int32_t r = 0; r < o->p->limits->ranks; r++) {
    if (o->first[r] == o->first[r + 1]) continue;
    if (last >= 0 && (o->ends[r] < o->ends[last] || (o->ends[r] == o->ends[last] && r <= last)))
      continue;
    if (best < 0 || o->ends[r] < o->ends[best]) best = r;
  }
  return best;
}

static int32_t fullest(const balance *o) {
  int32_t best = 0;
  for (int32_t r = 1; r < o->p->limits->ranks; r++)
    if (o->ends[r] > o->ends[best]) best = r;
  return best;
}

/* 0: the fullest rank stays as it is. */
static int improve(balance *o) {
  int32_t full = fullest(o), other = -1;
  o->looks -= (int64_t)EMPTIEST * o->p->limits->ranks;
  for (int32_t i = 0; i < EMPTIEST; i++) {
    other = next_emptiest(o, other);
    if (other < 0 || o->ends[other] >= o->ends[full]) return 0;
    pair one = find_pair(o, full, other);
    if (one.off == INT64_MAX) continue;
    exchange(o, full, other, &one);
    return 1;
  }
  return 0;
}

/* ---- a division anew ---- */

/* What is to be divided: the sequences of all ranks that have such groups. */
typedef struct division {
  item *all;      /* count */
  int64_t *times; /* count */
  int32_t *rank_of; /* count: places among the ranks that take part */
  int64_t *busy;  /* ranks that take part: until their first of these sequences */
  int32_t *ranks; /* the same: which they are */
  int32_t count, parts;
} division;

static void list_parts(const balance *o, division *d) {
  for (int32_t r = 0; r < o->p->limits->ranks; r++) {
    if (o->first[r] == o->first[r + 1]) continue;
    d->ranks[d->parts] = r;
    d->busy[d->parts] = o->ends[r];
    for (int32_t i = o->first[r]; i < o->first[r + 1]; i++) {
      if (o->items[i].sequence < 0) continue;
      d->busy[d->parts] -= o->items[i].time;
      d->times[d->count] = o->items[i].time;
      d->all[d->count++] = o->items[i];
    }
    d->parts++;
  }
}

/* The first of a rank's groups that holds the sequence, -1: none. */
static int32_t group_for(const balance *o, int32_t rank, const item *one) {
  int32_t begin = o->first_group[rank], end = o->first_group[rank + 1];
  for (int32_t i = begin; i < end; i++)
    if (o->rows[o->groups[i]] + one->rows <= o->p->capacity) return o->groups[i];
  return -1;
}

/* 0: rows do not fit, or a group would be empty. */
static int enter_all(balance *o, division *d) {
  for (int32_t i = 0; i < o->first_group[o->p->limits->ranks]; i++)
    o->rows[o->groups[i]] = o->members[o->groups[i]] = 0;
  for (int32_t i = 0; i < d->count; i++) {
    item *one = &d->all[i];
    one->group = group_for(o, d->ranks[d->rank_of[i]], one);
    if (one->group < 0) return 0;
    o->rows[one->group] += one->rows;
    o->members[one->group]++;
  }
  for (int32_t i = 0; i < o->first_group[o->p->limits->ranks]; i++)
    if (o->members[o->groups[i]] == 0) return 0;
  return 1;
}

/* Rank after rank, as load leaves them. */
static void settle_all(balance *o, const division *d) {
  int32_t count = 0;
  for (int32_t i = 0; i < d->parts; i++) o->ends[d->ranks[i]] = d->busy[i];
  for (int32_t r = 0; r < o->p->limits->ranks; r++) {
    int32_t group = o->first_group[r], takes_part = group < o->first_group[r + 1];
    o->first[r] = count;
    for (int32_t i = 0; takes_part && i < d->count; i++) {
      if (d->ranks[d->rank_of[i]] != r) continue;
      o->ends[r] += d->all[i].time;
      o->items[count++] = d->all[i];
    }
    if (takes_part) o->items[count++] = (item){0, 0, -1, o->groups[group]};
    qsort(o->items + o->first[r], (size_t)(count - o->first[r]), sizeof *o->items, longest_first);
  }
  o->first[o->p->limits->ranks] = count;
}

/* 1: all sequences are divided anew, 0: they stay, -1: out of memory. */
static int divide(balance *o) {
  size_t n = (size_t)o->p->n, ranks = (size_t)o->p->limits->ranks;
  division d = {.all = malloc(n * sizeof *d.all)};
  d.times = malloc((n + ranks) * sizeof *d.times);
  d.rank_of = malloc((n + ranks) * sizeof *d.rank_of);
  int done = d.all != NULL && d.times != NULL && d.rank_of != NULL ? 1 : -1;
  if (done > 0) {
    d.busy = d.times + n;
    d.ranks = d.rank_of + n;
    list_parts(o, &d);
    if ((int64_t)d.count * d.parts > DIVIDED) done = 0;
  }
  if (done > 0 && !hcp__difference(d.times, d.count, d.busy, d.parts, d.rank_of)) done = -1;
  if (done > 0) done = enter_all(o, &d);
  if (done > 0) settle_all(o, &d);
  free(d.rank_of);
  free(d.times);
  free(d.all);
  return done;
}

/* ---- to a draft ---- */

/* The draft has the groups of the other one, with what they hold now. */
static void unload(const balance *o, hcp__draft *to) {
  int32_t at = 0;
  for (int32_t g = 0; g < o->from->group_count; g++) {
    const hcp_group *group = &o->from->groups[g];
    int32_t last = is_last(o, g), count = last ? o->members[g] : group->sequences;
    to->groups[g] = (hcp_group){group->first_rank, group->degree, at, count};
    if (!last)
      memcpy(to->sequences + at, o->from->sequences + group->first_sequence,
             (size_t)count * sizeof *to->sequences);
    else
      o->members[g] = at; /* where its next sequence goes */
    at += count;
  }
  for (int32_t i = 0; i < o->first[o->p->limits->ranks]; i++)
    if (o->items[i].sequence >= 0)
      to->sequences[o->members[o->items[i].group]++] = o->items[i].sequence;
  memcpy(to->micro_batches, o->from->micro_batches,
         (size_t)o->from->micro_batch_count * sizeof *to->micro_batches);
  to->micro_batch_count = o->from->micro_batch_count;
  to->group_count = o->from->group_count;
}

static int init(balance *o) {
  size_t ranks = (size_t)o->p->limits->ranks, groups = (size_t)o->from->group_count;
  o->items = malloc(((size_t)o->p->n + ranks) * sizeof *o->items);
  o->first = malloc((ranks + 1) * sizeof *o->first);
  o->ends = calloc(ranks, sizeof *o->ends);
  o->wide = calloc(3 * ranks, sizeof *o->wide);
  o->rows = calloc(groups + 1, sizeof *o->rows);
  o->members = calloc(groups + 1, sizeof *o->members);
  o->first_group = calloc(ranks + groups + 2, sizeof *o->first_group);
  if (o->wide == NULL) return 0;
  o->tail = o->wide + ranks;
  o->next = o->tail + ranks;
  if (o->first_group == NULL) return 0;
  o->groups = o->first_group + ranks + 1;
  return o->items != NULL && o->first != NULL && o->ends != NULL && o->rows != NULL &&
         o->members != NULL;
}

static void release(balance *o) {
  free(o->first_group);
  free(o->members);
  free(o->rows);
  free(o->wide);
  free(o->ends);
  free(o->first);
  free(o->items);
}

/* Whether single ranks end the plan, which may then end sooner. */
static int may_balance(const balance *o) {
  int32_t full = fullest(o);
  return o->tail[full] > o->wide[full];
}

/* anew: the sequences are divided anew first. 1: something has moved, 0: nothing, -1: out of
 * memory. */
static int improve_all(balance *o, int32_t anew, hcp__draft *to) {
  if (!init(o)) return -1;
  find_ends(o);
  if (!may_balance(o)) return 0;
  if (!load(o)) return -1;
  int moved = anew ? divide(o) : 0;
  if (moved < anew) return moved;
  while (o->looks > 0 && improve(o)) moved = 1;
  if (moved) unload(o, to);
  return moved;
}

static hcp_status balance_once(hcp__search *s, int32_t anew, hcp_error *err) {
  int64_t looks = (int64_t)LOOKS * (s->p->n + s->p->limits->ranks);
  balance o = {.p = s->p, .from = s->best, .looks = hcp__least(MOST, looks)};
  if (s->makespan - s->p->bound <= s->p->bound >> NEAR) return HCP_OK;
  int moved = improve_all(&o, anew, &s->draft);
  release(&o);
  if (moved < 0) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", s->p->n);
  return moved ? hcp__search_judge(s, err) : HCP_OK;
}

hcp_status hcp__balance(hcp__search *s, hcp_error *err) {
  if (s->p->limits->slowness != NULL || s->p->limits->pipeline.stages > 1) return HCP_OK;
  hcp_status status = balance_once(s, 0, err);
  return status == HCP_OK ? balance_once(s, 1, err) : status;
}
