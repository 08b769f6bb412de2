/* skyline.c - plans of few long sequences whose ranks meet at the end of the
 * step. No short sequence can fill a gap there, so none may arise.
 *
 * The ranks that are free soonest form a valley. The longest sequence that fits
 * in it and ends within the target goes there, on as few ranks as that takes,
 * against the wall whose top is nearer to its end. A valley that takes nothing in
 * time is given up to the lower of its walls, as in best-fit strip packing
 * (Burke, Kendall and Whitwell, doi 10.1287/opre.1040.0109). */
#include <stdlib.h>

#include "plan.h"

typedef struct skyline {
  const hcp__problem *p;
  hcp__blocks *blocks;
  int64_t *loads; /* ranks */
  char *done;     /* n, of problem.order */
  int64_t target;
  int32_t widen;  /* onto ranks that no other sequence could use */
  int32_t first_left;
} skyline;

typedef struct valley {
  int32_t first, width;
  int64_t floor;
  int64_t left, right; /* tops of the walls, INT64_MAX: none */
} valley;

/* Ranks of one node, or whole nodes: there a group may stand at either wall. */
static valley find_valley(const skyline *s) {
  int32_t ranks = s->p->limits->ranks, node = hcp__node_ranks(s->p->limits), first = 0, end;
  for (int32_t r = 1; r < ranks; r++)
    if (s->loads[r] < s->loads[first]) first = r;
  for (end = first + 1; end < ranks && s->loads[end] == s->loads[first];) end++;
  if (first % node + end - first > node)
    end = first % node > 0 ? first - first % node + node : end - end % node;
  return (valley){first, end - first, s->loads[first],
                  first % node > 0 ? s->loads[first - 1] : INT64_MAX,
                  end % node > 0 && end < ranks ? s->loads[end] : INT64_MAX};
}

/* To what the valley may rise: its lower wall, or else what other nodes have above it;
 * INT64_MAX: nothing. */
static int64_t above(const skyline *s, const valley *v) {
  int64_t top = v->left < v->right ? v->left : v->right;
  for (int32_t r = 0; r < s->p->limits->ranks && v->left == v->right; r++)
    if (s->loads[r] > v->floor && s->loads[r] < top) top = s->loads[r];
  return top;
}

static const hcp__kind *kind_at(const skyline *s, int32_t place) {
  return &s->p->kinds[s->p->kind_of[place]];
}

/* The longest that ends within the target; *option says how. -1: none. */
static int32_t longest_in_time(const skyline *s, const valley *v, const hcp__option **option) {
  int64_t time = s->target - v->floor - s->p->cost->launch;
  for (int32_t i = s->first_left; i < s->p->n; i++) {
    if (s->done[i]) continue;
    *option = hcp__allot(s->p, kind_at(s, i), time);
    if ((*option)->degree <= v->width && (*option)->time <= time) return i;
  }
  return -1;
}

/* The one that ends soonest with the whole valley, -1: none fits. */
static int32_t soonest(const skyline *s, const valley *v, const hcp__option **option) {
  int32_t best = -1;
  for (int32_t i = s->first_left; i < s->p->n; i++) {
    const hcp__option *one = s->done[i] ? NULL : hcp__fastest_on(s->p, kind_at(s, i), v->width);
    if (one == NULL || (best >= 0 && one->time >= (*option)->time)) continue;
    best = i;
    *option = one;
  }
  return best;
}

/* The least degree that any other sequence left could do with. */
static int32_t least_left(const skyline *s, int32_t but) {
  int32_t least = INT32_MAX;
  for (int32_t i = s->first_left; i < s->p->n; i++) {
    int32_t degree = hcp__leanest(s->p, kind_at(s, i))->degree;
    if (i != but && !s->done[i] && degree < least) least = degree;
  }
  return least;
}

static void put(skyline *s, const valley *v, int32_t place, const hcp__option *option) {
  int64_t launch = s->p->cost->launch, end = v->floor + launch + option->time;
  if (s->widen && v->width - option->degree < least_left(s, place)) {
    option = hcp__fastest_on(s->p, kind_at(s, place), v->width);
    end = v->floor + launch + option->time;
  }
  int64_t to_left = v->left > end ? v->left - end : end - v->left;
  int64_t to_right = v->right > end ? v->right - end : end - v->right;
  int32_t first = to_left <= to_right ? v->first : v->first + v->width - option->degree;
  int32_t b = hcp__block_open(s->blocks, first, option->degree, v->floor, launch);
  hcp__block_add(s->blocks, b, s->p->order[place], option->rows, option->time);
  end = s->blocks->block[b].end;
  for (int32_t r = first; r < first + option->degree; r++) s->loads[r] = end;
  s->done[place] = 1;
  while (s->first_left < s->p->n && s->done[s->first_left]) s->first_left++;
}

static void give_up(skyline *s, const valley *v) {
  int64_t top = above(s, v);
  for (int32_t r = v->first; r < v->first + v->width; r++) s->loads[r] = top;
}

static void place_all(skyline *s) {
  while (s->first_left < s->p->n) {
    const hcp__option *option = NULL;
    valley v = find_valley(s);
    int32_t place = longest_in_time(s, &v, &option);
    int walled = above(s, &v) < INT64_MAX;
    if (place < 0 && walled && v.floor < s->target - s->target / 64) {
      give_up(s, &v);
      continue;
    }
    if (place < 0) place = soonest(s, &v, &option);
    if (place < 0)
      give_up(s, &v); /* narrower than all that is left, so others are higher */
    else
      put(s, &v, place, option);
  }
}

hcp_status hcp__plan_skyline(const hcp__problem *p, int64_t target, int32_t widen,
                             hcp__blocks *blocks, hcp_error *err) {
  skyline s = {.p = p, .blocks = blocks, .target = target, .widen = widen};
  s.loads = calloc((size_t)p->limits->ranks, sizeof *s.loads);
  s.done = calloc((size_t)p->n + 1, 1);
  hcp_status status = HCP_OK;
  blocks->count = 0;
  blocks->placed_on = p->limits;
  if (s.loads != NULL && s.done != NULL)
    place_all(&s);
  else
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for a plan of %d sequences", p->n);
  free(s.done);
  free(s.loads);
  return status;
}
