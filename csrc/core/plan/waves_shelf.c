/* waves_shelf.c - micro-batches filled one after the other, each as well as can be.
 *
 * A shelf is as high as the longest sequence left needs at one of its least
 * degrees. A knapsack chooses the others that run at the same time: of the sequences
 * that need more than half of the height, those that fit on the ranks and are most
 * work. Shorter ones then fill the ranks and the time that are left. */
#include <stdlib.h>
#include <string.h>

#include "waves.h"

/* Sequences in one knapsack; degrees of the longest that are tried; and ranks and
 * sequences up to which there are shelves, as knapsacks take their product. */
enum { ITEMS = 256, DEGREES = 5, RANKS = 256, SEQUENCES = 1024 };

typedef struct item {
  int32_t place; /* in problem.order */
  const hcp__option *option;
  int64_t work;
} item;

typedef struct shelves {
  hcp__waves *w;
  int32_t ranks, first_left;
  char *done;    /* n */
  item items[ITEMS];
  int64_t *most; /* ranks + 1: work on so many ranks, -1: none */
  char *taken;   /* ITEMS * (ranks + 1): whether the item is in it */
} shelves;

static const hcp__option *option_of(const shelves *s, int32_t place, int64_t height) {
  const hcp__problem *p = s->w->p;
  return hcp__allot(p, &p->kinds[p->kind_of[place]], height);
}

static int32_t list_items(shelves *s, int64_t height) {
  const hcp__problem *p = s->w->p;
  int32_t count = 0;
  for (int32_t i = s->first_left; i < s->w->placed && count < ITEMS; i++) {
    const hcp__option *option = option_of(s, i, height);
    if (s->done[i] || option->time > height || option->time <= height - option->time) continue;
    int64_t work = hcp__leanest(p, &p->kinds[p->kind_of[i]])->area_floor;
    s->items[count++] = (item){i, option, work};
  }
  return count;
}

/* The first item is always there. Returns the work. */
static int64_t pack_items(shelves *s, int32_t count) {
  if (count == 0) return -1;
  int32_t first = s->items[0].option->degree;
  for (int32_t r = 0; r <= s->ranks; r++) s->most[r] = r < first ? -1 : s->items[0].work;
  for (int32_t i = 1; i < count; i++) {
    int32_t degree = s->items[i].option->degree;
    char *taken = s->taken + (size_t)i * ((size_t)s->ranks + 1);
    memset(taken, 0, (size_t)s->ranks + 1);
    for (int32_t r = s->ranks; r >= degree && s->most[r - degree] >= 0; r--) {
      int64_t with = s->most[r - degree] + s->items[i].work;
      taken[r] = with > s->most[r] ? 1 : 0;
      if (taken[r]) s->most[r] = with;
    }
  }
  return s->most[s->ranks];
}

static void put(shelves *s, int32_t wave, const item *one) {
  int32_t b = hcp__wave_open_group(s->w, wave, one->option->degree);
  if (b < 0) return; /* nodes may leave no interval: it stays for a later shelf */
  hcp__wave_add(s->w, b, s->w->p->order[one->place], one->option->rows, one->option->time);
  s->done[one->place] = 1;
}

static void put_items(shelves *s, int32_t wave, int32_t count) {
  int32_t left = s->ranks;
  for (int32_t i = count - 1; i > 0; i--) {
    if (!s->taken[(size_t)i * ((size_t)s->ranks + 1) + (size_t)left]) continue;
    put(s, wave, &s->items[i]);
    left -= s->items[i].option->degree;
  }
  put(s, wave, &s->items[0]);
}

/* Which degree of the longest sequence leaves the least idle. */
static int64_t choose_height(shelves *s) {
  const hcp__problem *p = s->w->p;
  const hcp__kind *kind = &p->kinds[p->kind_of[s->first_left]];
  const hcp__choices *all = hcp__choices_of(p, kind);
  int64_t best = -1, height = 0;
  for (int32_t i = 0; i < all->count && i < DEGREES; i++) {
    int64_t tried = all->options[i].time;
    int64_t share = pack_items(s, list_items(s, tried)) / ((tried >> 20) + 1);
    if (share <= best) continue;
    best = share;
    height = tried;
  }
  return height;
}

static void fill_beside(shelves *s, int32_t wave, int64_t height) {
  for (int32_t i = s->first_left; i < s->w->placed; i++) {
    const hcp__option *option = option_of(s, i, height);
    if (!s->done[i] && option->time <= height)
      s->done[i] = (char)hcp__wave_place(s->w, wave, s->w->p->order[i], option);
  }
}

static int32_t shelve(shelves *s) {
  hcp__waves *w = s->w;
  while (s->first_left < w->placed) {
    if (w->count == w->most) return 0;
    int64_t height = choose_height(s);
    int32_t wave = w->count++, count = list_items(s, height);
    if (count == 0) return 0;
    hcp__wave_reset(w, wave, height);
    pack_items(s, count);
    put_items(s, wave, count);
    fill_beside(s, wave, height);
    if (!s->done[s->first_left]) return 0;
    while (s->first_left < w->placed && s->done[s->first_left]) s->first_left++;
  }
  return hcp__waves_place(w, w->placed, w->p->n);
}

int32_t hcp__waves_shelve(hcp__waves *w, hcp__blocks *blocks) {
  size_t ranks = (size_t)w->p->limits->ranks + 1;
  if (ranks > RANKS || w->p->n > SEQUENCES) return 0;
  shelves s = {.w = w, .ranks = w->p->limits->ranks};
  s.done = calloc((size_t)w->p->n + 1, 1);
  s.most = malloc(ranks * sizeof *s.most);
  s.taken = malloc(ITEMS * ranks);
  hcp__waves_open_as_needed(w, hcp__dust_height(w), blocks);
  int32_t shelved = s.done != NULL && s.most != NULL && s.taken != NULL && shelve(&s);
  free(s.taken);
  free(s.most);
  free(s.done);
  return shelved;
}
