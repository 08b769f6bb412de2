/* waves_fill.c - the ways in which micro-batches are filled.
 *
 * Either boxes of given heights stand from the start, or a box is opened for a
 * sequence that fits in none, as high as the sequence, or as many of its length
 * as a rank holds, need: then long ones meet long ones. The many short sequences
 * at the end, dust, are poured like a fluid where only heights are asked for. */
#include <stdlib.h>
#include <string.h>

#include "waves.h"

enum { BEST_FIT = 1024 };

/* ---- dust ---- */

/* What a sequence of the dust's mean length takes on degree ranks, < 1: unknown to the cost table.
 */
static int64_t dust_time(const hcp__waves *w, int32_t degree) {
  int64_t *time = &w->dust_times[degree];
  if (*time == 0) {
    *time = hcp__cost(w->p->cost, w->dust_size, degree, w->p->limits->ranks_per_node);
    if (*time < 1) *time = -1;
  }
  return *time;
}

/* Tokens of dust beside what the group holds, within height. */
static int64_t room_beside(const hcp__waves *w, const hcp__block *block, int64_t height) {
  int64_t left = height - block->end, rows = (w->p->capacity - block->rows) * block->degree;
  if (left <= 0 || rows <= 0) return 0;
  if (block->degree == 1) return hcp__least(rows, left / w->dust_pace);
  int64_t time = dust_time(w, block->degree);
  return time < 1 ? 0 : hcp__least(rows / w->dust_size.length, left / time) * w->dust_size.length;
}

/* Tokens of dust that the wave holds within height. */
static int64_t room_in(const hcp__waves *w, int32_t wave, int64_t height) {
  int64_t room = 0;
  for (int32_t b = w->first_block[wave]; b >= 0; b = w->next_block[b])
    room += room_beside(w, &w->blocks->block[b], height);
  return room + w->left[wave] * hcp__least(w->p->capacity, height / w->dust_pace);
}

/* Whether dust fits beside what is placed. Lowers heights to what both need. */
static int pour(const hcp__waves *w, int64_t *heights) {
  int64_t least = 0, most = 0, share = 0;
  for (int32_t wave = 0; wave < w->count; wave++) {
    if (w->dust_rows > 0) {
      least += room_in(w, wave, w->tops[wave]);
      most += room_in(w, wave, w->heights[wave]);
    }
  }
  if (most < w->dust_rows) return 0;
  if (least < w->dust_rows) share = hcp__scaled(w->dust_rows - least, 1024, most - least);
  for (int32_t wave = 0; wave < w->count; wave++)
    heights[wave] = w->tops[wave] + (w->heights[wave] - w->tops[wave]) / 1024 * share;
  return 1;
}

/* ---- ways ---- */

int32_t hcp__waves_hold(hcp__waves *w, int32_t count, const int64_t *heights, int64_t *needed) {
  hcp__waves_stand(w, count, 1, heights, &w->own);
  return hcp__waves_place(w, 0, w->placed) && pour(w, needed);
}

int32_t hcp__waves_fill(hcp__waves *w, int32_t count, const int64_t *heights, hcp__blocks *blocks) {
  hcp__waves_stand(w, count, 0, heights, blocks);
  return hcp__waves_place(w, 0, w->p->n);
}

int32_t hcp__waves_rise(hcp__waves *w, int32_t count, const int64_t *heights, const int64_t *needed,
                        hcp__blocks *blocks) {
  hcp__waves_stand(w, count, 1, heights, blocks);
  w->rises = 1;
  if (!hcp__waves_place(w, 0, w->placed)) return 0;
  for (int32_t wave = 0; wave < count; wave++)
    w->heights[wave] = needed[wave] > w->tops[wave] ? needed[wave] : w->tops[wave];
  return hcp__waves_place(w, w->placed, w->p->n);
}

int64_t hcp__dust_height(const hcp__waves *w) {
  return hcp__least(hcp__scaled(w->dust_pace, w->p->capacity, 1), HCP__NO_TARGET - 1);
}

/* Waves for the dust that the others have no room for. */
static void open_for_dust(hcp__waves *w) {
  int64_t room = 0;
  for (int32_t wave = 0; wave < w->count; wave++) room += room_in(w, wave, w->heights[wave]);
  while (room < w->dust_rows && w->count < w->most) {
    hcp__wave_reset(w, w->count++, hcp__dust_height(w));
    room += room_in(w, w->count - 1, w->heights[w->count - 1]);
  }
}

int32_t hcp__waves_open(hcp__waves *w, int64_t target, int64_t *heights, int64_t *needed) {
  hcp__waves_open_as_needed(w, target, &w->own);
  if (!hcp__waves_place(w, 0, w->placed)) return 0;
  open_for_dust(w);
  if (!pour(w, needed)) return 0;
  memcpy(heights, w->heights, (size_t)w->count * sizeof *heights);
  return w->count;
}

int32_t hcp__waves_by_memory(hcp__waves *w, hcp__blocks *blocks) {
  if (w->p->n > BEST_FIT) return 0; /* every sequence looks at all groups */
  hcp__waves_open_as_needed(w, HCP__NO_TARGET, blocks);
  return hcp__waves_place(w, 0, w->p->n);
}

/* The first group of the widest degree that has rows left, or one in a micro-batch that has
 * ranks left, or in one more; -1: none. */
static int32_t widest_with_room(hcp__waves *w, int32_t degree, int64_t rows) {
  int32_t b = 0;
  while (b < w->blocks->count && w->blocks->block[b].rows + rows > w->p->capacity) b++;
  if (b < w->blocks->count) return b;
  b = w->count > 0 ? hcp__wave_open_group(w, w->count - 1, degree) : -1;
  if (b >= 0 || w->count == w->most) return b;
  hcp__wave_reset(w, w->count++, HCP__NO_TARGET);
  return hcp__wave_open_group(w, w->count - 1, degree);
}

int32_t hcp__waves_widest(hcp__waves *w, hcp__blocks *blocks) {
  const hcp__problem *p = w->p;
  int32_t degree = p->limits->max_degree;
  if (p->n > BEST_FIT || !hcp__degree_allowed(p->limits, p->cost, degree)) return 0;
  hcp__waves_open_as_needed(w, HCP__NO_TARGET, blocks);
  for (int32_t i = 0; i < p->n; i++) {
    int32_t s = p->order[i];
    int64_t rows = hcp__load(p, s, degree);
    int64_t time = hcp__cost(p->cost, hcp__size_at(p, s), degree, p->limits->ranks_per_node);
    int32_t b = rows > p->capacity || time < 1 ? -1 : widest_with_room(w, degree, rows);
    if (b < 0) return 0;
    hcp__wave_add(w, b, s, rows, time);
  }
  return 1;
}
