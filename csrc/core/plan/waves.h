/* waves.h - micro-batches while they are filled: declarations for waves.c,
 * waves_fill.c and waves_shelf.c. */
#ifndef HCP_CORE_WAVES_H
#define HCP_CORE_WAVES_H

#include "plan.h"

/* A rank that no wide group has taken. */
typedef struct hcp__bin {
  int64_t fill; /* of height or capacity, in 2^-20 */
  int64_t load, rows;
  int32_t block; /* -1: none yet */
} hcp__bin;

/* What each of the latest groups of a wave has at least, so that a full wave is not looked at. */
typedef struct hcp__room {
  int64_t rows, end;
} hcp__room;

struct hcp__waves {
  const hcp__problem *p;
  hcp__blocks own, *blocks;
  int32_t most;        /* micro-batches that may be opened */
  int32_t count;
  int64_t *heights;    /* count, without launch */
  int64_t *tops;       /* count: ends of the slowest groups */
  int32_t nodes, node_ranks;
  int32_t *whole;      /* count: ranks taken from the left by groups wider than a node */
  int32_t *node_free;  /* count * nodes */
  int32_t *left;       /* count: the sum of those */
  int32_t *first_free; /* count * HINTS: nodes before it have fewer ranks free */
  int32_t *first_block, *next_block; /* per wave, latest first */
  hcp__room *rooms;                  /* per wave */
  hcp__bin *bins;                    /* heaps by fill, one per wave */
  int32_t *bin_counts;               /* per wave, -1: not opened */
  int32_t cursor;                    /* the block to squeeze into next */
  int32_t turn, latest;              /* of many waves: next to fill evenly, last that took one */
  int32_t rises;                     /* waves may, for a sequence that fits in none */
  int32_t tall_first;                /* single ranks fill wave after wave, not evenly */
  int64_t lowest;                    /* height of the lowest */
  int64_t target;                    /* their height, when > 0 they open as needed */
  int32_t placed;                    /* sequences of problem.order; the rest is dust */
  int64_t dust_rows;                 /* of it */
  hcp__size dust_size;               /* of one sequence of it */
  int64_t dust_pace;                 /* its time per row on one rank, rounded up */
  int64_t *dust_times;               /* ranks + 1: of such a sequence, 0: not asked yet */
};

void hcp__wave_reset(hcp__waves *waves, int32_t wave, int64_t height);
/* A group that its caller adds a sequence to, -1: no ranks for it. */
int32_t hcp__wave_open_group(hcp__waves *waves, int32_t wave, int32_t degree);
void hcp__wave_add(hcp__waves *waves, int32_t block, int32_t sequence, int64_t rows, int64_t time);
/* 1: in that wave, in a group that has room or in one of its own. */
int32_t hcp__wave_place(hcp__waves *waves, int32_t wave, int32_t sequence,
                        const hcp__option *option);
/* Sequences of problem.order from first to before end, in any wave; 0: one did
 * not fit. */
int32_t hcp__waves_place(hcp__waves *waves, int32_t first, int32_t end);
/* The height of a wave whose ranks are full of dust. */
int64_t hcp__dust_height(const hcp__waves *waves);
/* Waves that stand, and waves that open as needed. */
void hcp__waves_stand(hcp__waves *waves, int32_t count, int32_t tall_first, const int64_t *heights,
                      hcp__blocks *blocks);
void hcp__waves_open_as_needed(hcp__waves *waves, int64_t target, hcp__blocks *blocks);

#endif
