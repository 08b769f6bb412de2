/* internal.h - what the core's files share. */
#ifndef HCP_CORE_INTERNAL_H
#define HCP_CORE_INTERNAL_H

#include "hcp/fail.h"

/* Lengths and costs stay far enough from 2^63 that sums over a plan, which are
 * checked, are the only place where they can overflow. */
#define HCP__LENGTH_MAX ((int64_t)1 << 40)
#define HCP__RANKS_MAX (1 << 20)

/* For products of two of them. */
__extension__ typedef __int128 hcp__wide;

/* ---- cost.c ---- */

hcp_status hcp__cost_check(const hcp_cost *cost, hcp_error *err);

/* Whether times of the sequence at degrees up to most, times these, fit. */
hcp_status hcp__cost_fits(const hcp_cost *cost, int64_t length, int32_t most, hcp_error *err);

/* hcp_cost_time of what hcp__cost_fits: 0 where a table has no such time. */
int64_t hcp__cost(const hcp_cost *cost, int64_t length, int32_t degree, int32_t ranks_per_node);

/* For costs without a table: a time that no degree from least to most beats,
 * and a rank-time that no degree from least on beats. */
int64_t hcp__time_floor(const hcp_cost *cost, int64_t length, int32_t least, int32_t most,
                        int32_t ranks_per_node);
int64_t hcp__area_floor(const hcp_cost *cost, int64_t length, int32_t least,
                        int32_t ranks_per_node);

/* The row of a length, -1: none. */
int32_t hcp__times_row(const hcp_times *times, int64_t length);

/* ---- problem.c ---- */

/* Rows that one rank may hold when they are padded to whole alignments. */
int64_t hcp__capacity(const hcp_limits *limits);

/* Whether plans under these limits may use the degree at all. */
int32_t hcp__degree_allowed(const hcp_limits *limits, const hcp_cost *cost, int32_t degree);

/* Whether a group of that degree may begin at that rank. */
int32_t hcp__place_allowed(const hcp_limits *limits, int32_t first_rank, int32_t degree);

/* ---- limits.c ---- */

/* ceil(a * b / c) for a, b >= 0 and c > 0: exact below 2^62, beyond it either
 * exact or INT64_MAX. */
int64_t hcp__scaled(int64_t a, int64_t b, int64_t c);

hcp_status hcp__pipeline_check(const hcp_pipeline *pipeline, hcp_error *err);
/* Checks of what hcp_limits has beyond degrees and rows, for n sequences. */
hcp_status hcp__limits_check(const hcp_limits *limits, int32_t n, hcp_error *err);

/* Whether the sequence's own bounds allow the degree. */
int32_t hcp__sequence_allows(const hcp_limits *limits, int32_t sequence, int32_t degree);

/* Bytes of a sequence on the fullest of degree ranks. */
int64_t hcp__bytes(const hcp_memory *memory, int64_t length, int32_t degree);
/* Bytes that sequences may take together; 0: any. */
int64_t hcp__bytes_limit(const hcp_limits *limits);

/* The largest slowness of ranks [first_rank, first_rank + degree). */
int32_t hcp__slowness(const hcp_limits *limits, int32_t first_rank, int32_t degree);
/* time on ranks of that slowness. */
static inline int64_t hcp__slowed(int64_t time, int32_t slowness) {
  return slowness == HCP_FULL_SPEED ? time : hcp__scaled(time, slowness, HCP_FULL_SPEED);
}
/* What all ranks together compute in time, in time of the fastest. */
int64_t hcp__rank_time(const hcp_limits *limits, int64_t time);

/* One way to compute a sequence. Options of a length ascend in degree and fall
 * in time. The floors hold for all degrees from least_degree on, also those
 * between two options that were not looked at. */
typedef struct hcp__option {
  int32_t degree;
  int32_t least_degree;
  int64_t rows; /* of the fullest rank: its hcp__load */
  int64_t time;
  int64_t time_floor;
  int64_t area_floor;
} hcp__option;

/* Sequences of one length and one pair of bounds. */
typedef struct hcp__kind {
  int64_t length;
  int32_t first, count;           /* of problem.order   */
  int32_t first_option, options;  /* of problem.options */
  int32_t pruned;                 /* faster ones were not worth keeping */
} hcp__kind;

/* A request, checked and laid out for the planner: longest sequences first. */
typedef struct hcp__problem {
  const int64_t *lengths;
  int32_t n;
  const hcp_limits *limits;
  const hcp_cost *cost;
  int64_t capacity;
  int32_t *order;   /* n: sequences, longest first, then by index */
  int32_t *kind_of; /* n: of order's members                      */
  hcp__kind *kinds;
  int32_t kind_count;
  hcp__option *options;
  int32_t option_count, option_capacity;
  int64_t tokens;
  int64_t work;  /* rank-time of all sequences, each on one rank            */
  int64_t least; /* the same, each at the least of its allowed degrees      */
  int64_t bound;
} hcp__problem;

/* Whether groups may stand anywhere and start when they like. */
static inline int hcp__is_free(const hcp__problem *p) {
  return p->limits->sync == HCP_SYNC_STEP && !p->limits->pow2 && p->limits->ranks_per_node == 0;
}

/* Whether the sequences are so few that more may be tried. */
#define HCP__FEW 256
static inline int hcp__is_few(const hcp__problem *p) { return p->n <= HCP__FEW; }

hcp_status hcp__problem_init(hcp__problem *problem, const int64_t *lengths, int32_t n,
                             const hcp_limits *limits, const hcp_cost *cost, hcp_error *err);
void hcp__problem_release(hcp__problem *problem);

/* The fewest micro-batches of all ranks that hold all rows; far more than there can be where they
 * are too many to count. */
static inline int32_t hcp__least_count(const hcp__problem *p) {
  int64_t rows = p->capacity * p->limits->ranks, count = p->tokens / rows + (p->tokens % rows != 0);
  return count < INT32_MAX / 8 ? (int32_t)count : INT32_MAX / 8;
}

/* What a sequence takes of the capacity of its fullest rank: rows, or more where
 * bytes are scarcer, so that loads within the capacity keep both limits. Above
 * the capacity where the sequence must not have that degree. */
#define HCP__NO_LOAD (INT64_MAX / 8)
int64_t hcp__load(const hcp__problem *problem, int32_t sequence, int32_t degree);

/* The option of the least degree that ends within target, else the fastest. */
static inline const hcp__option *hcp__allot(const hcp__problem *p, const hcp__kind *kind,
                                            int64_t target) {
  const hcp__option *options = &p->options[kind->first_option];
  int32_t low = 0, high = kind->options - 1; /* the first fast enough is in between */
  if (options[0].time <= target) return options;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (options[middle].time <= target)
      high = middle;
    else
      low = middle + 1;
  }
  return &options[low];
}

/* The option before which no degree ends within time, NULL: none does. The area floor of
 * the option holds for every degree that does. */
const hcp__option *hcp__first_within(const hcp__problem *problem, const hcp__kind *kind,
                                     int64_t time);

/* ---- bound.c ---- */

/* Fills problem->bound with a time that no plan beats. */
hcp_status hcp__bound(hcp__problem *problem, hcp_error *err);

/* ---- bound_lockstep.c ---- */

/* Raises problem->bound for ranks that wait for each other after every micro-batch. */
hcp_status hcp__lockstep_bound(hcp__problem *problem, hcp_error *err);

/* ---- bound_pipeline.c ---- */

/* Raises problem->bound, a bound of every stage, to one of the pipeline. */
hcp_status hcp__pipeline_bound(hcp__problem *problem, hcp_error *err);

/* ---- blocks.c ---- */

/* A group being filled. Its sequences are a list in hcp__blocks.next. */
typedef struct hcp__block {
  int64_t start;
  int64_t end;
  int64_t rows; /* on the fullest rank, at most */
  int32_t first_rank;
  int32_t degree;
  int32_t first, last; /* sequences */
  int32_t sequences;
  int32_t micro_batch;
  int32_t slowness; /* of the ranks, where they are known */
} hcp__block;

typedef struct hcp__blocks {
  int32_t count;
  hcp__block *block; /* n */
  int32_t *next;     /* n: the next sequence of the same block, -1: none */
  const hcp_limits *placed_on; /* when blocks are opened on the ranks they keep, else NULL */
} hcp__blocks;

hcp_status hcp__blocks_init(hcp__blocks *blocks, int32_t n, hcp_error *err);
void hcp__blocks_release(hcp__blocks *blocks);
int32_t hcp__block_open(hcp__blocks *blocks, int32_t first_rank, int32_t degree, int64_t start,
                        int64_t launch);
void hcp__block_add(hcp__blocks *blocks, int32_t block, int32_t sequence, int64_t rows,
                    int64_t time);

/* Groups as a planner found them, not yet a plan. */
typedef struct hcp__draft {
  int32_t micro_batch_count;
  hcp_micro_batch *micro_batches;
  int32_t group_count;
  hcp_group *groups;
  int32_t *sequences;
} hcp__draft;

hcp_status hcp__draft_init(hcp__draft *draft, int32_t n, hcp_error *err);
void hcp__draft_release(hcp__draft *draft);

/* Blocks in an order that every rank can follow: by start, each in the first
 * micro-batch in which all its ranks are free. */
hcp_status hcp__draft_by_start(hcp__draft *draft, const hcp__blocks *blocks, int32_t ranks,
                               hcp_error *err);
/* Blocks by the micro-batches that they name. */
hcp_status hcp__draft_by_micro_batch(hcp__draft *draft, const hcp__blocks *blocks, hcp_error *err);

/* What each rank of a group computes in it, its launch included; at most INT64_MAX / 2. */
int64_t hcp__group_time(const hcp__draft *draft, const hcp__problem *problem,
                        const hcp_group *group);

/* ---- pipeline_time.c ---- */

/* Micro-batches of an interleaved pipeline come in multiples of this, else 1. */
int32_t hcp__multiple(const hcp_pipeline *pipeline);

/* What the groups take, or under HCP_SYNC_MICRO_BATCH the micro-batches: times
 * has room for either. */
hcp_status hcp__pipeline_times(const hcp__draft *draft, const hcp__problem *problem, int64_t *times,
                               hcp_error *err);
/* The makespan for those times, with the micro-batches in an order. */
hcp_status hcp__pipeline_run(const hcp__draft *draft, const hcp__problem *problem,
                             const int64_t *times, const int32_t *order, int64_t *makespan,
                             hcp_error *err);
/* hcp__makespan of a pipeline. A count of micro-batches that the pipeline does
 * not take is rounded up by empty ones. */
hcp_status hcp__pipeline_makespan(const hcp__draft *draft, const hcp__problem *problem,
                                  int64_t *makespan, hcp_error *err);

/* ---- list.c ---- */

/* Degrees that end within target; nested rounds them up to powers of two. limit
 * packs single ranks one after the other up to that time; 0 balances them. The widest
 * may be stacked already, one a block, by hcp__plan_columns for launch and target. */
hcp_status hcp__plan_list(const hcp__problem *problem, int64_t target, int32_t nested,
                          int64_t limit, int32_t stacked, hcp__blocks *blocks, hcp_error *err);

/* ---- skyline.c ---- */

/* One group per sequence, ends within target hoped for. Without pow2 and nodes. */
hcp_status hcp__plan_skyline(const hcp__problem *problem, int64_t target, int32_t widen,
                             hcp__blocks *blocks, hcp_error *err);

/* ---- columns.c ---- */

/* Sequences that may stand in columns. */
enum { HCP_COLUMNS_MAX = 256 };

/* One group for each sequence whose degree is at least least; all end within target.
 * *found is 0 when that was not found before the budget, which falls with the work, was
 * spent. Rounds try different ways. On equal ranks, without pow2 and nodes. */
hcp_status hcp__plan_columns(const hcp__problem *problem, int64_t target, int32_t round,
                             int32_t least, int64_t *budget, hcp__blocks *blocks, int32_t *found,
                             hcp_error *err);

/* ---- waves.c, waves_fill.c, waves_shelf.c, waves_place.c ---- */

/* Boxes of all ranks and a height, launch aside. count is at most most. */
typedef struct hcp__waves hcp__waves;
hcp_status hcp__waves_create(const hcp__problem *problem, int32_t most, hcp__waves **waves,
                             hcp_error *err);
void hcp__waves_destroy(hcp__waves *waves);
/* Whether boxes of these heights hold all sequences, the shortest ones taken for
 * a fluid; needed become the heights that this takes. Single ranks are filled
 * wave after wave, so that long sequences meet. */
int32_t hcp__waves_hold(hcp__waves *waves, int32_t count, const int64_t *heights, int64_t *needed);
/* The same with boxes that open as sequences need them, up to target high or as
 * one sequence needs. Returns their count, 0: more than most. */
int32_t hcp__waves_open(hcp__waves *waves, int64_t target, int64_t *heights, int64_t *needed);
/* Every sequence, as blocks without ranks; single ranks evenly. 0: they do not fit. */
int32_t hcp__waves_fill(hcp__waves *waves, int32_t count, const int64_t *heights,
                        hcp__blocks *blocks);
/* Every sequence, where hcp__waves_hold said so: boxes of those heights for long ones,
 * needed for those that were poured. What fits in none raises the box that has to
 * rise least. 0: not even that helps. */
int32_t hcp__waves_rise(hcp__waves *waves, int32_t count, const int64_t *heights,
                        const int64_t *needed, hcp__blocks *blocks);
/* Least degrees in as few boxes as rows need. */
#define HCP__NO_TARGET (INT64_MAX / 4)
int32_t hcp__waves_by_memory(hcp__waves *waves, hcp__blocks *blocks);
/* The largest degree for all, in as few boxes. */
int32_t hcp__waves_widest(hcp__waves *waves, hcp__blocks *blocks);
int32_t hcp__waves_shelve(hcp__waves *waves, hcp__blocks *blocks);

/* Ranks for blocks that name their micro-batches; *placed is 0 when they do not
 * fit beside each other. Ranks left over widen the slowest ones. */
hcp_status hcp__place_waves(const hcp__problem *problem, hcp__blocks *blocks, int32_t *placed,
                            hcp_error *err);

/* ---- judge.c, search.c, waves_lockstep.c ---- */

/* The time at which the last rank ends when every group starts as soon as its
 * ranks are free, or as soon as all ranks are, under HCP_SYNC_MICRO_BATCH; in a
 * pipeline, when the last stage does. */
hcp_status hcp__makespan(const hcp__draft *draft, const hcp__problem *problem, int64_t *makespan,
                         hcp_error *err);

/* Attempts, of which the best is kept. */
typedef struct hcp__search {
  const hcp__problem *p;
  int32_t effort;
  hcp__blocks blocks; /* of the latest attempt */
  hcp__draft draft;   /* the same              */
  hcp__draft *best;
  int64_t makespan;   /* of the best           */
} hcp__search;

/* Judges the draft. */
hcp_status hcp__search_judge(hcp__search *search, hcp_error *err);
/* Judges the blocks, which name their micro-batches. */
hcp_status hcp__search_judge_waves(hcp__search *search, hcp_error *err);
hcp_status hcp__search_waves(hcp__search *search, hcp_error *err);

/* ---- waves_polish.c ---- */

/* Looks for micro-batches a little lower than the best, of few sequences that may have
 * any ranks. */
hcp_status hcp__polish(hcp__search *search, int32_t effort, hcp_error *err);

hcp_status hcp__plan_search(const hcp__problem *problem, int32_t effort, hcp__draft *draft,
                            hcp_error *err);

/* ---- pipeline_search.c, pipeline_order.c ---- */

/* Makes *draft, a plan, the best found for the problem's pipeline. */
hcp_status hcp__plan_pipeline(const hcp__problem *problem, int32_t effort, hcp__draft *draft,
                              hcp_error *err);

/* A draft with room for empty micro-batches. */
hcp_status hcp__draft_init_for(hcp__draft *draft, const hcp__problem *problem, hcp_error *err);
/* Splits micro-batches, at the least cost, until their count is the multiple that
 * the pipeline asks for; empty ones follow where nothing can be split. *to has
 * room for them and is made anew; *from loses its order. */
hcp_status hcp__draft_round_up(hcp__draft *from, const hcp__problem *problem, hcp__draft *to,
                               hcp_error *err);
/* *to is *from with its micro-batches in another order, small ones at both ends,
 * improved by swaps that take at most budget passes of simulation. */
hcp_status hcp__draft_order(const hcp__draft *from, const hcp__problem *problem, int64_t budget,
                            hcp__draft *to, int64_t *makespan, hcp_error *err);

/* ---- layout.c ---- */

/* Consecutive tokens of one sequence. */
typedef struct hcp__piece {
  int64_t start, rows;
} hcp__piece;

/* The first token of chunk k of 2 * degree, for 0 <= k <= 2 * degree. */
int64_t hcp__chunk_start(int64_t length, int32_t degree, int64_t k);

/* What rank j of degree holds of a sequence: at most two pieces in token order,
 * none empty, joined when they touch. Returns how many. */
int32_t hcp__pieces(int64_t length, int32_t degree, int32_t j, hcp__piece pieces[2]);

/* Rows of rank j, those of them before token end. They come first among the
 * rank's rows of the sequence. */
int64_t hcp__rows_before(int64_t length, int32_t degree, int32_t j, int64_t end);

/* The group of a micro-batch that contains rank, NULL when none does. */
const hcp_group *hcp__group_of(const hcp_plan *plan, int32_t micro_batch, int32_t rank);

/* Rows of rank j of a group, and those that alignment adds behind them. */
int64_t hcp__rank_rows(const hcp_plan *plan, const hcp_group *group, int32_t j);
int64_t hcp__padding(const hcp_plan *plan, const hcp_group *group, int32_t j);

hcp_status hcp__check_place(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                            hcp_error *err);

/* ---- table.c ---- */

/* Records of one width. */
typedef struct hcp__list {
  int64_t *words;
  int64_t count, capacity; /* words */
  int32_t width;           /* words per record */
} hcp__list;

/* The sections of a table while it is built, followed by scratch lists. A
 * failed append is remembered, to be checked once at the end. */
#define HCP__LISTS_MAX 20

typedef struct hcp__lists {
  hcp__list list[HCP__LISTS_MAX];
  int32_t failed;
} hcp__lists;

void hcp__lists_init(hcp__lists *lists, const int32_t *widths, int32_t n);
void hcp__lists_release(hcp__lists *lists);
void hcp__append(hcp__lists *lists, int32_t section, const int64_t *record);
/* Appends (row, rows), joined to the last record when it continues that. */
void hcp__append_rows(hcp__lists *lists, int32_t section, int64_t row, int64_t rows);
int64_t hcp__records(const hcp__lists *lists, int32_t section);
const int64_t *hcp__record(const hcp__lists *lists, int32_t section, int64_t i);
/* Sorts a section's records by one of their words; equal ones keep no order. */
void hcp__sort_by(hcp__lists *lists, int32_t section, int32_t word);
/* Makes runs of (row, rows, part, part_row) records that overlap anyhow: cut
 * wherever one begins or ends, then sorted by row and part. */
void hcp__align_runs(hcp__lists *lists, int32_t section);
/* One block of the first n sections, or HCP_NO_MEMORY after a failed append. */
hcp_status hcp__table_create(const hcp__lists *lists, int32_t n, hcp_table **table, hcp_error *err);

#endif
