/* waves_level.c - micro-batches filled one after the other, as full as ranks that end together
 * allow.
 *
 * The longest sequence left begins a micro-batch, at its least degree. Its height is 17/16 of the
 * time of ranks that are full of such rows. Every other sequence, longest first, joins
 * the group or takes the free ranks where the micro-batch rises least, and waits for a later one
 * where it would rise above its height. Of groups that raise it alike, the one with the fewest rows
 * left takes the sequence, so that memory that many short sequences share is filled well; where
 * memory is tight, that decides first. */
#include <stdlib.h>
#include <string.h>

#include "waves.h"

/* Sequences times ranks, as each has a price for each degree, and sequences: each looks at all
 * groups of its micro-batches. */
enum { PRICES = 1 << 18, SEQUENCES = 2048 };

/* The part of a micro-batch's height by which it may be higher. */
enum { MORE = 16 };

typedef struct level {
  hcp__waves *w;
  hcp__needs needs;
  int32_t tight; /* the fewest rows left come before the least rise */
  int32_t first_left;
  int64_t height; /* of the micro-batch that is filled */
  char *done;     /* n, by places in problem.order */
} level;

/* Where a sequence may go. */
typedef struct spot {
  int64_t top, left; /* of the micro-batch with it, and rows that its group has left */
  int32_t block, degree; /* block -1: one to be opened */
  hcp__need need;
} spot;

static const hcp__kind *kind_of(const level *l, int32_t place) {
  const hcp__problem *p = l->w->p;
  return &p->kinds[p->kind_of[place]];
}

static int is_better(const level *l, const spot *one, const spot *best) {
  if (l->tight && one->left != best->left) return one->left < best->left;
  return one->top < best->top || (one->top == best->top && one->left < best->left);
}

static void offer(const level *l, spot *best, spot one) {
  if (one.top <= l->height && is_better(l, &one, best)) *best = one;
}

static void offer_groups(const level *l, int32_t wave, int32_t sequence, spot *best) {
  const hcp__waves *w = l->w;
  for (int32_t b = w->first_block[wave]; b >= 0; b = w->next_block[b]) {
    const hcp__block *block = &w->blocks->block[b];
    int64_t room = w->p->capacity - block->rows;
    if (room <= 0) continue;
    hcp__need need = hcp__need_of(&l->needs, sequence, block->degree);
    if (need.time >= l->needs.never || need.rows > room) continue;
    int64_t top = hcp__most(w->tops[wave], block->end + need.time);
    offer(l, best, (spot){top, room - need.rows, b, block->degree, need});
  }
}

static void offer_ranks(const level *l, int32_t wave, int32_t place, spot *best) {
  const hcp__waves *w = l->w;
  const hcp__choices *all = hcp__choices_of(w->p, kind_of(l, place));
  for (int32_t i = 0; i < all->count && all->options[i].degree <= w->left[wave]; i++) {
    const hcp__option *o = &all->options[i];
    int64_t top = hcp__most(w->tops[wave], o->time);
    offer(l, best, (spot){top, w->p->capacity - o->rows, -1, o->degree, {o->time, o->rows}});
  }
}

/* 1: it has a place. */
static int put(level *l, int32_t wave, int32_t place) {
  hcp__waves *w = l->w;
  int32_t sequence = w->p->order[place];
  spot best = {.top = INT64_MAX, .left = INT64_MAX};
  offer_groups(l, wave, sequence, &best);
  offer_ranks(l, wave, place, &best);
  if (best.top == INT64_MAX) return 0;
  if (best.block < 0) best.block = hcp__wave_open_group(w, wave, best.degree);
  if (best.block < 0) return 0; /* nodes may leave no interval */
  hcp__wave_add(w, best.block, sequence, best.need.rows, best.need.time);
  l->done[place] = 1;
  return 1;
}

static int64_t height_of(const level *l, const hcp__option *longest) {
  int64_t full = hcp__scaled(longest->time, l->w->p->capacity, hcp__most(1, longest->rows));
  full = hcp__most(full, longest->time);
  return hcp__sum(full, full / MORE);
}

static int32_t fill(level *l) {
  hcp__waves *w = l->w;
  int32_t n = w->p->n;
  while (l->first_left < n) {
    if (w->count == w->most) return 0;
    const hcp__option *longest = hcp__leanest(w->p, kind_of(l, l->first_left));
    int32_t wave = w->count++;
    l->height = height_of(l, longest);
    hcp__wave_reset(w, wave, l->height);
    int32_t b = hcp__wave_open_group(w, wave, longest->degree);
    if (b < 0) return 0;
    hcp__wave_add(w, b, w->p->order[l->first_left], longest->rows, longest->time);
    l->done[l->first_left] = 1;
    for (int32_t i = l->first_left + 1; i < n; i++)
      if (!l->done[i]) put(l, wave, i);
    while (l->first_left < n && l->done[l->first_left]) l->first_left++;
  }
  return 1;
}

int32_t hcp__waves_level(hcp__waves *w, int32_t tight, hcp__blocks *blocks) {
  size_t n = (size_t)w->p->n;
  if (n > SEQUENCES || n * ((size_t)w->p->limits->ranks + 1) > PRICES) return 0;
  level l = {.w = w, .tight = tight, .done = calloc(n + 1, 1)};
  int32_t filled = 0;
  if (hcp__needs_init(&l.needs, w->p, HCP__NO_TARGET) && l.done != NULL) {
    hcp__waves_open_as_needed(w, HCP__NO_TARGET, blocks);
    filled = fill(&l);
  }
  hcp__needs_release(&l.needs);
  free(l.done);
  return filled;
}
