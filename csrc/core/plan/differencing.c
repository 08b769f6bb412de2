/* differencing.c - numbers divided among ranks by the largest differencing method of Karmarkar and
 * Karp (Stanford TR STAN-CS-82-911), for ranks that may be busy for a while already.
 *
 * A division gives every rank a sum. Each number begins as a division of its own, on one rank, and
 * so do the times until which ranks are busy. The two divisions whose sums differ most become one:
 * the fullest rank of one takes what the emptiest of the other has. The last one is the answer. */
#include <stdlib.h>

#include "plan.h"

/* A rank of a division. */
typedef struct part {
  int64_t sum;
  int32_t rank; /* that is busy already, -1: any */
  int32_t first, last; /* of its numbers, -1: none */
} part;

typedef struct differencing {
  int32_t ranks;
  part *parts;    /* ranks of each division, fullest first */
  part *joined;   /* ranks */
  int32_t *heap;  /* divisions, those whose sums differ most first */
  int32_t count;
  int32_t *next;  /* of each number, the next one of its part */
} differencing;

static part *parts_of(const differencing *d, int32_t division) {
  return d->parts + (size_t)division * (size_t)d->ranks;
}

static int64_t spread(const differencing *d, int32_t division) {
  const part *parts = parts_of(d, division);
  return parts[0].sum - parts[d->ranks - 1].sum;
}

static int comes_before(const differencing *d, int32_t a, int32_t b) {
  int64_t x = spread(d, a), y = spread(d, b);
  return x != y ? x > y : a < b;
}

static void sift(differencing *d, int32_t i) {
  int32_t moved = d->heap[i];
  for (int32_t child = 2 * i + 1; child < d->count; child = 2 * i + 1) {
    if (child + 1 < d->count && comes_before(d, d->heap[child + 1], d->heap[child])) child++;
    if (!comes_before(d, d->heap[child], moved)) break;
    d->heap[i] = d->heap[child];
    i = child;
  }
  d->heap[i] = moved;
}

static int fullest_first(const void *left, const void *right) {
  const part *a = left, *b = right;
  if (a->sum != b->sum) return a->sum > b->sum ? -1 : 1;
  if (a->first != b->first) return a->first > b->first ? -1 : 1;
  return (a->rank > b->rank) - (a->rank < b->rank);
}

static part join(const differencing *d, const part *a, const part *b) {
  part both = {a->sum + b->sum, a->rank >= 0 ? a->rank : b->rank, a->first, a->last};
  if (b->first < 0) return both;
  if (both.first < 0)
    both.first = b->first;
  else
    d->next[both.last] = b->first;
  both.last = b->last;
  return both;
}

/* Division b becomes part of division a. */
static void difference(differencing *d, int32_t a, int32_t b) {
  part *x = parts_of(d, a), *y = parts_of(d, b);
  for (int32_t r = 0; r < d->ranks; r++) d->joined[r] = join(d, &x[r], &y[d->ranks - 1 - r]);
  qsort(d->joined, (size_t)d->ranks, sizeof *d->joined, fullest_first);
  for (int32_t r = 0; r < d->ranks; r++) x[r] = d->joined[r];
}

static void begin(differencing *d, const int64_t *times, int32_t n, const int64_t *busy) {
  for (int32_t i = 0; i < n; i++) {
    part *parts = parts_of(d, i);
    for (int32_t r = 0; r < d->ranks; r++) parts[r] = (part){0, -1, -1, -1};
    parts[0] = (part){times[i], -1, i, i};
    d->next[i] = -1;
  }
  for (int32_t r = 0; r < d->ranks; r++) parts_of(d, n)[r] = (part){busy[r], r, -1, -1};
  qsort(parts_of(d, n), (size_t)d->ranks, sizeof(part), fullest_first);
  d->count = n + 1;
  for (int32_t i = 0; i <= n; i++) d->heap[i] = i;
  for (int32_t i = d->count / 2; i >= 0; i--) sift(d, i);
}

int hcp__difference(const int64_t *times, int32_t n, const int64_t *busy, int32_t ranks,
                    int32_t *rank_of) {
  size_t divisions = (size_t)n + 1, k = (size_t)ranks;
  differencing d = {.ranks = ranks};
  d.parts = malloc((divisions + 1) * k * sizeof *d.parts);
  d.heap = malloc(2 * divisions * sizeof *d.heap);
  int made = d.parts != NULL && d.heap != NULL;
  if (made) {
    d.joined = d.parts + divisions * k;
    d.next = d.heap + divisions;
    begin(&d, times, n, busy);
    while (d.count > 1) {
      int32_t a = d.heap[0];
      d.heap[0] = d.heap[--d.count];
      sift(&d, 0);
      difference(&d, d.heap[0], a);
      sift(&d, 0);
    }
    const part *last = parts_of(&d, d.heap[0]);
    for (int32_t r = 0; r < ranks; r++)
      for (int32_t i = last[r].first; i >= 0; i = d.next[i]) rank_of[i] = last[r].rank;
  }
  free(d.heap);
  free(d.parts);
  return made;
}
