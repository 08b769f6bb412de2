/* plan.h - the planner: the declarations that its files share, idea by idea.
 *
 *   plan.c      checks a request, asks for a plan, and makes the value that callers get
 *   problem.c   lays the request out: kinds of sequences, and options for each
 *   bound*.c    finds a time that no plan beats
 *   freedom.c   searches the request and stricter ones, and keeps the best plan of all
 *   search.c    makes attempts, of which judge.c keeps the best
 *   list.c, columns.c, skyline.c   attempts where ranks meet at the end of the step
 *   waves*.c    attempts in micro-batches of a height, for ranks in lockstep and others
 *   pipeline*.c split, order and time the micro-batches of a pipeline
 *   balance.c, differencing.c  balance the single ranks that end a plan
 *   step_polish.c, needs.c   improve plans whose ranks meet at the end of the step
 *   report.c    measures what a plan gives its ranks; replay.c runs it on a machine
 *
 * Words:
 *
 *   area       Rank-time: the ranks of a group times its time.
 *   attempt    Blocks, and the draft made of them: one way to plan the request.
 *   bin        A rank of a wave that no wide group has taken.
 *   block      A group while it is being filled.
 *   bound      A time that no plan beats.
 *   box        The room of a wave: all ranks, for the time that is the wave's height.
 *   budget     How much an attempt may still try, counted in work and never in time.
 *   capacity   The rows that one rank may hold.
 *   column     Neighbouring ranks on which groups are stacked without gaps, up to a target.
 *   draft      The micro-batches and groups of an attempt, not yet a plan.
 *   dust       The many short sequences at the end of the order, counted as tokens and
 *              poured like a fluid while only heights are looked for.
 *   floor      A time, or an area, that no degree of a range beats.
 *   gap        A time in which neighbouring ranks are free before a wide group begins.
 *   height     The time that a wave gives to its groups, without launch.
 *   kind       The sequences of one length, one number of pairs and one pair of degree bounds.
 *   launch     The price of one micro-batch on one rank, whatever it holds.
 *   list       Sequences placed one after the other, widest first, where ranks are free
 *              soonest.
 *   load       What a sequence takes of its fullest rank's capacity: rows, or bytes as rows.
 *   lockstep   All ranks wait for each other after every micro-batch (HCP_SYNC_MICRO_BATCH).
 *   makespan   The time at which the last rank ends.
 *   option     A degree worth a thought for a kind, with its rows and its time.
 *   pass       One micro-batch, forward or backward, over one chunk of a pipeline's layers.
 *   pod        Up to 256 neighbouring ranks, within which one wide group is placed.
 *   polish     To improve micro-batches of few sequences by small steps.
 *   ramp       The time in which a pipeline fills or empties, and stages wait.
 *   region     Neighbouring ranks that are free from one time on.
 *   shelf      A wave as high as the longest sequence left needs, filled before the next opens.
 *   skyline    The times from which the ranks are free, side by side; its lowest part is a
 *              valley.
 *   target     The time by which an attempt hopes to end.
 *   top        The end of a wave's slowest group.
 *   wave       A micro-batch while it is being filled.
 */
#ifndef HCP_CORE_PLAN_H
#define HCP_CORE_PLAN_H

#include "../internal.h"

/* ---- Limits: what a plan must keep (limits.c) ---- */

/* ceil(a * b / c) for a, b >= 0 and c > 0: exact below 2^62, beyond it either
 * exact or INT64_MAX. */
int64_t hcp__scaled(int64_t a, int64_t b, int64_t c);

/* Check the limits of the domain, those of a pipeline, and then all that are left, for n
 * sequences: hcp__limits_check includes hcp__pipeline_check. */
hcp_status hcp__domain_check(const hcp_limits *limits, hcp_error *err);
hcp_status hcp__pipeline_check(const hcp_pipeline *pipeline, hcp_error *err);
hcp_status hcp__limits_check(const hcp_limits *limits, int32_t n, hcp_error *err);

/* Rows that one rank may hold when they are padded to whole alignments. */
int64_t hcp__capacity(const hcp_limits *limits);

/* Whether plans under these limits may use the degree at all. */
int32_t hcp__degree_allowed(const hcp_limits *limits, const hcp_cost *cost, int32_t degree);

/* Whether a group of that degree may begin at that rank. */
int32_t hcp__place_allowed(const hcp_limits *limits, int32_t first_rank, int32_t degree);

/* Whether the sequence's own bounds allow the degree. */
int32_t hcp__sequence_allows(const hcp_limits *limits, int32_t sequence, int32_t degree);

/* Bytes of a sequence on the fullest of degree ranks. */
int64_t hcp__bytes(const hcp_memory *memory, int64_t length, int32_t degree);
/* Bytes that sequences may take together on such ranks, less what alignment may add; INT64_MAX:
 * any. */
int64_t hcp__bytes_limit(const hcp_limits *limits, int32_t degree);

/* Bytes of rank j of a plan's group, alignment included (report.c). */
int64_t hcp__group_bytes(const hcp_plan *plan, const hcp_memory *memory, const hcp_group *group,
                         int32_t j);

/* The largest slowness of ranks [first_rank, first_rank + degree). */
int32_t hcp__slowness(const hcp_limits *limits, int32_t first_rank, int32_t degree);
/* time on ranks of that slowness. */
static inline int64_t hcp__slowed(int64_t time, int32_t slowness) {
  return slowness == HCP_FULL_SPEED ? time : hcp__scaled(time, slowness, HCP_FULL_SPEED);
}
/* What all ranks together compute in time, in time of the fastest. */
int64_t hcp__rank_time(const hcp_limits *limits, int64_t time);

/* ---- The problem: kinds and options (problem.c) ---- */

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

/* Sequences of one length, one number of pairs and one pair of bounds. */
typedef struct hcp__kind {
  hcp__size size;
  int32_t first, count; /* of problem.order */
} hcp__kind;

/* Options of a kind. Most are asked only for those that are slow: the others are made when they are
 * asked for, in another place, so that the first ones stay where they are. */
typedef struct hcp__choices {
  const hcp__option *options;
  int32_t count;  /* 1 at least */
  int32_t whole;  /* whether these are all */
  int32_t pruned; /* where they are: whether faster ones were not worth keeping */
  int32_t falls;  /* whether no time_floor is above the one before */
} hcp__choices;

/* Where options are made (problem.c). */
typedef struct hcp__shop hcp__shop;

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
  hcp__choices *choices; /* kinds: as far as they were asked for, by the functions below */
  hcp__shop *shop;
  int64_t tokens;
  int64_t work;  /* area of all sequences, each on one rank                 */
  int64_t least; /* the same, each at the least of its allowed degrees      */
  int64_t bound; /* 0 until hcp__bound                                      */
  const hcp_stop *stop; /* NULL: nobody ends the search                     */
} hcp__problem;

/* Asked by every loop that may take long: what it has found so far is not used then. */
static inline int hcp__stopped(const hcp__problem *p) {
  return p->stop != NULL && p->stop->stopped(p->stop->context) != 0;
}
/* Also fails where there was no memory for options that were asked for. */
hcp_status hcp__go_on(const hcp__problem *problem, hcp_error *err);

static inline hcp__size hcp__size_at(const hcp__problem *p, int32_t sequence) {
  return hcp__size_of(p->cost, p->lengths, sequence);
}

static inline int hcp__same_size(const hcp__problem *p, int32_t a, int32_t b) {
  hcp__size x = hcp__size_at(p, a), y = hcp__size_at(p, b);
  return x.length == y.length && x.pairs == y.pairs;
}

hcp_status hcp__problem_init(hcp__problem *problem, const int64_t *lengths, int32_t n,
                             const hcp_limits *limits, const hcp_cost *cost, hcp_error *err);
void hcp__problem_release(hcp__problem *problem);

/* Whether groups have any degrees and start when they like. */
static inline int hcp__is_free(const hcp__problem *p) {
  return p->limits->sync == HCP_SYNC_STEP && !p->limits->pow2;
}

/* Ranks of a node; all, where there are no nodes. */
static inline int32_t hcp__node_ranks(const hcp_limits *limits) {
  int32_t node = limits->ranks_per_node;
  return node > 0 && node < limits->ranks ? node : limits->ranks;
}

/* Whether the sequences are so few that more may be tried. */
#define HCP__FEW 256
static inline int hcp__is_few(const hcp__problem *p) { return p->n <= HCP__FEW; }

/* Whether small steps begin late, from the best plan of all: they are enough for any beginning. */
static inline int hcp__polish_late(const hcp__problem *p) { return p->n <= HCP__FEW / 4; }

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

/* All options of a kind, and those up to one that takes time at most, if there is one. */
const hcp__choices *hcp__choices_of(const hcp__problem *problem, const hcp__kind *kind);
const hcp__choices *hcp__choices_within(const hcp__problem *problem, const hcp__kind *kind,
                                        int64_t time);

/* The option of the least degree. */
static inline const hcp__option *hcp__leanest(const hcp__problem *p, const hcp__kind *kind) {
  return p->choices[kind - p->kinds].options;
}

/* The fastest option on at most width ranks, NULL: none. */
const hcp__option *hcp__fastest_on(const hcp__problem *problem, const hcp__kind *kind,
                                   int32_t width);

/* The option of the least degree that ends within target, else the fastest. */
static inline const hcp__option *hcp__allot(const hcp__problem *p, const hcp__kind *kind,
                                            int64_t target) {
  const hcp__choices *made = &p->choices[kind - p->kinds];
  if (made->options[0].time <= target) return made->options;
  if (!made->whole && made->options[made->count - 1].time > target)
    made = hcp__choices_within(p, kind, target);
  const hcp__option *options = made->options;
  int32_t low = 0, high = made->count - 1; /* the first fast enough is in between */
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
/* A time that no degree of the kind beats. */
int64_t hcp__fastest(const hcp__problem *problem, const hcp__kind *kind);

/* What every sequence takes at every degree, asked once (needs.c). */
typedef struct hcp__need {
  int64_t time, rows; /* time 0: not asked yet */
} hcp__need;

typedef struct hcp__needs {
  const hcp__problem *p;
  hcp__need *table; /* n * row */
  size_t row;       /* ranks + 1 */
  int64_t never;    /* the time where a degree is not allowed, or would take longer */
} hcp__needs;

int hcp__needs_init(hcp__needs *needs, const hcp__problem *problem, int64_t never);
void hcp__needs_release(hcp__needs *needs);
hcp__need hcp__need_ask(const hcp__needs *needs, hcp__need *one, int32_t sequence, int32_t degree);
static inline hcp__need hcp__need_of(const hcp__needs *needs, int32_t sequence, int32_t degree) {
  hcp__need *one = &needs->table[(size_t)sequence * needs->row + (size_t)degree];
  return one->time > 0 ? *one : hcp__need_ask(needs, one, sequence, degree);
}

/* ---- Bounds (bound.c, bound_lockstep.c, bound_pipeline.c; csrc/bounds has a sharper one) ---- */

/* What every call that takes a request begins with: its checks, the problem and its bound. The
 * caller releases the problem. */
hcp_status hcp__prepare(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                        const hcp_cost *cost, const hcp_stop *stop, hcp__problem *problem,
                        hcp_error *err);
hcp_status hcp__effort_check(int32_t effort, hcp_error *err);

/* Fills problem->bound with a time that no plan beats. */
hcp_status hcp__bound(hcp__problem *problem, hcp_error *err);
/* The same of one stage of a pipeline, for one sequence or more. */
hcp_status hcp__stage_bound(hcp__problem *problem, hcp_error *err);

/* Raises problem->bound for ranks that wait for each other after every micro-batch. */
hcp_status hcp__lockstep_bound(hcp__problem *problem, hcp_error *err);

/* Raises problem->bound, a bound of every stage, to one of the pipeline. */
hcp_status hcp__pipeline_bound(hcp__problem *problem, hcp_error *err);

/* ---- Blocks and drafts (blocks.c) ---- */

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
/* Opens a block without sequences and returns its number. */
int32_t hcp__block_open(hcp__blocks *blocks, int32_t first_rank, int32_t degree, int64_t start,
                        int64_t launch);
void hcp__block_add(hcp__blocks *blocks, int32_t block, int32_t sequence, int64_t rows,
                    int64_t time);

/* Groups as an attempt found them, not yet a plan. */
typedef struct hcp__draft {
  int32_t micro_batch_count;
  hcp_micro_batch *micro_batches;
  int32_t group_count;
  hcp_group *groups;
  int32_t *sequences;
} hcp__draft;

hcp_status hcp__draft_init(hcp__draft *draft, int32_t n, hcp_error *err);
void hcp__draft_release(hcp__draft *draft);

/* Makes a draft of blocks in an order that every rank can follow: by start, each in the
 * first micro-batch in which all its ranks are free. Joins blocks. */
hcp_status hcp__draft_by_start(hcp__draft *draft, hcp__blocks *blocks, const hcp__problem *problem,
                               hcp_error *err);
/* Makes a draft of blocks by the micro-batches that they name. */
hcp_status hcp__draft_by_micro_batch(hcp__draft *draft, const hcp__blocks *blocks, hcp_error *err);

/* What each rank of a group of these sequences computes in it, its launch included; at most
 * INT64_MAX / 2. ends: NULL, or of each sequence the time at which it ends. */
int64_t hcp__time_of(const hcp_limits *limits, const hcp_cost *cost, const int64_t *lengths,
                     const hcp_group *group, const int32_t *sequences, int64_t *ends);
/* What a rank takes for micro-batches in which it has no rows: it runs its model all the same. */
int64_t hcp__launches(const hcp_limits *limits, const hcp_cost *cost, int32_t rank, int32_t count);
/* hcp__time_of a draft's group. */
int64_t hcp__group_time(const hcp__draft *draft, const hcp__problem *problem,
                        const hcp_group *group);

/* ---- The search (search.c, judge.c, freedom.c) ---- */

/* Makes *draft the best plan found for the problem without its order in a pipeline. lean leaves
 * out the attempts that take longest. */
hcp_status hcp__plan_search(const hcp__problem *problem, int32_t effort, int32_t lean,
                            hcp__draft *draft, hcp_error *err);

/* The same of a few lists alone. */
hcp_status hcp__plan_lists(const hcp__problem *problem, hcp__draft *draft, hcp_error *err);

/* Makes *draft the best plan found for the problem and for stricter ones, without an order in a
 * pipeline (freedom.c). */
hcp_status hcp__plan_best(const hcp__problem *problem, int32_t effort, hcp__draft *draft,
                          hcp_error *err);

/* The same request under limits that allow less (freedom.c). *exists is 0 where some sequence has
 * no place then; else the caller releases the problem, which has no bound yet. */
hcp_status hcp__stricter(const hcp__problem *problem, const hcp_limits *limits,
                         hcp__problem *strict, int32_t *exists, hcp_error *err);

/* Whether static CP would choose the degree for all sequences: it is the least that holds the
 * longest, or leaves no rank without a group, or is a power of two (freedom.c). */
int hcp__static_degree(const hcp__problem *problem, int32_t degree);

/* What came of another request: that its times do not fit in 63 bits is no error of this one. */
hcp_status hcp__none_of_another(hcp_status status, const hcp_error *failed, hcp_error *err);

/* Attempts, of which the best is kept. */
typedef struct hcp__search {
  const hcp__problem *p;
  int32_t effort;
  int32_t lean; /* without the attempts that take longest */
  hcp__blocks blocks; /* of the latest attempt */
  hcp__draft draft;   /* the same              */
  hcp__draft *best;
  int64_t makespan;   /* of the best           */
} hcp__search;

/* The time at which the last rank ends when every group starts as soon as its
 * ranks are free, or as soon as all ranks are, under HCP_SYNC_MICRO_BATCH; in a
 * pipeline, when the last stage does. */
hcp_status hcp__makespan(const hcp__draft *draft, const hcp__problem *problem, int64_t *makespan,
                         hcp_error *err);

/* A rank on the way through a plan whose ranks meet at the end of the step. */
typedef struct hcp__rank {
  int64_t free_from;
  int32_t next; /* the first micro-batch that it has not run yet */
} hcp__rank;

/* When a group of micro-batch m may start on its ranks. */
int64_t hcp__start_of(const hcp_group *group, int32_t m, const hcp__problem *problem,
                      const hcp__rank *ranks);
/* Its ranks, once it has ended. */
void hcp__run_until(const hcp_group *group, int32_t m, int64_t end, hcp__rank *ranks);
/* a + b for a and b up to INT64_MAX / 2, which is too late for any plan. */
static inline int64_t hcp__later(int64_t a, int64_t b) { return hcp__least(INT64_MAX / 2, a + b); }

/* Keeps the draft if it is better than the best. */
hcp_status hcp__search_judge(hcp__search *search, hcp_error *err);
/* Judges the blocks, which name their micro-batches: gives them ranks first. */
hcp_status hcp__search_judge_waves(hcp__search *search, hcp_error *err);

/* ---- Attempts for ranks that meet at the end of the step (list.c, columns.c, skyline.c) ---- */

/* Takes the degrees that end within target; nested rounds them up to powers of two. limit
 * packs single ranks one after the other up to that time; 0 balances them. The widest
 * may be stacked already, one a block, by hcp__plan_columns for launch and target. */
hcp_status hcp__plan_list(const hcp__problem *problem, int64_t target, int32_t nested,
                          int64_t limit, int32_t stacked, hcp__blocks *blocks, hcp_error *err);

/* Balances the ranks that end the best plan with groups of their own (balance.c). */
hcp_status hcp__balance(hcp__search *search, hcp_error *err);

/* Groups of the best plan change places, where ranks meet at the end of the step (arrange.c). */
hcp_status hcp__arrange(hcp__search *search, hcp_error *err);

/* Divides n times among ranks that are busy already, so that all end most nearly together.
 * 0: out of memory. */
int hcp__difference(const int64_t *times, int32_t n, const int64_t *busy, int32_t ranks,
                    int32_t *rank_of);

/* Sequences that may stand in columns. */
enum { HCP_COLUMNS_MAX = 256 };

/* One group for each sequence whose degree is at least least; all end within target.
 * *found is 0 when that was not found before the budget, which falls with the work, was
 * spent. Rounds try different ways. On equal ranks, without pow2. */
hcp_status hcp__plan_columns(const hcp__problem *problem, int64_t target, int32_t round,
                             int32_t least, int64_t *budget, hcp__blocks *blocks, int32_t *found,
                             hcp_error *err);

/* One group for each sequence; all end within target where that is found. widen gives a
 * group all ranks of its valley where no other sequence left fits beside it. Without
 * pow2. */
hcp_status hcp__plan_skyline(const hcp__problem *problem, int64_t target, int32_t widen,
                             hcp__blocks *blocks, hcp_error *err);

/* ---- Attempts in waves (waves.c, waves_fill.c, waves_shelf.c, waves_level.c) ---- */

/* Boxes of all ranks and a height, launch aside. count is at most most. */
typedef struct hcp__waves hcp__waves;
hcp_status hcp__waves_create(const hcp__problem *problem, int32_t most, hcp__waves **waves,
                             hcp_error *err);
void hcp__waves_destroy(hcp__waves *waves);
/* Whether boxes of these heights hold all sequences, with dust poured; needed become
 * the heights that this takes. Single ranks are filled wave after wave, so that long
 * sequences meet. */
int32_t hcp__waves_hold(hcp__waves *waves, int32_t count, const int64_t *heights, int64_t *needed);
/* As hcp__waves_hold, with boxes that open as sequences need them, up to target high or
 * as one sequence needs. Returns their count, 0: more than most. */
int32_t hcp__waves_open(hcp__waves *waves, int64_t target, int64_t *heights, int64_t *needed);
/* Places every sequence in blocks without ranks; single ranks evenly. 0: they do not fit. */
int32_t hcp__waves_fill(hcp__waves *waves, int32_t count, const int64_t *heights,
                        hcp__blocks *blocks);
/* Places every sequence, where hcp__waves_hold said so: boxes of those heights for long
 * ones, needed for dust. What fits in none raises the box that has to rise least.
 * 0: not even that helps. */
int32_t hcp__waves_rise(hcp__waves *waves, int32_t count, const int64_t *heights,
                        const int64_t *needed, hcp__blocks *blocks);
/* Places every sequence at its least degree, in as few boxes as rows need. */
#define HCP__NO_TARGET (INT64_MAX / 4)
int32_t hcp__waves_by_memory(hcp__waves *waves, hcp__blocks *blocks);
/* Places every sequence at the largest degree, in as few boxes. */
int32_t hcp__waves_widest(hcp__waves *waves, hcp__blocks *blocks);
/* Places every sequence shelf after shelf. */
int32_t hcp__waves_shelve(hcp__waves *waves, hcp__blocks *blocks);
/* Places every sequence in one micro-batch after the other, each as full as ranks that end together
 * allow. tight: by the rows that stay free, before the time. */
int32_t hcp__waves_level(hcp__waves *waves, int32_t tight, hcp__blocks *blocks);

/* ---- Ranks and heights of waves (waves_place.c, waves_lockstep.c, waves_polish.c) ---- */

/* Whether groups stand beside each other, so many of each degree up to ranks, the
 * narrow ones each in the fullest node that still holds it. room is scratch for ranks + 1. */
int32_t hcp__stand_together(const hcp_limits *limits, const int32_t *counts, int32_t *room);
/* Finds ranks for blocks that name their micro-batches; *placed is 0 when they do not
 * fit beside each other. Ranks left over widen the slowest ones. */
hcp_status hcp__place_waves(const hcp__problem *problem, hcp__blocks *blocks, int32_t *placed,
                            hcp_error *err);

/* Looks for heights whose sum is least, fills waves of them, and judges what comes out. */
hcp_status hcp__search_waves(hcp__search *search, hcp_error *err);

/* Looks for micro-batches a little lower than the best, of few sequences that may have
 * any ranks, in a share of the usual looks. warm: steps may first make it worse, the more the
 * warmer; 0: not. */
hcp_status hcp__polish(hcp__search *search, int32_t effort, int32_t share, int32_t warm,
                       hcp_error *err);
/* Looks for a plan of few sequences that ends a little sooner than the best, where ranks meet at
 * the end of the step (step_polish.c). */
hcp_status hcp__polish_step(hcp__search *search, int32_t effort, int32_t share, int32_t warm,
                            hcp_error *err);
/* The same for a plan of micro-batches in which all ranks wait for the slowest, in a pipeline or
 * not. Blocks name their micro-batches; there are none when steps are not possible. */
hcp_status hcp__polish_blocks(const hcp__problem *problem, const hcp__draft *from, int64_t makespan,
                              int32_t effort, int32_t share, int32_t warm, hcp__blocks *blocks,
                              hcp_error *err);

/* ---- Pipelines (pipeline_time.c, pipeline_order.c, pipeline_shapes.c, pipeline_search.c) ---- */

/* Micro-batches of an interleaved pipeline come in multiples of this, else 1. */
int32_t hcp__multiple(const hcp_pipeline *pipeline);

/* A pass of the micro-batch at a place of the order, which takes so many forwards. */
typedef struct hcp__pass {
  int32_t stage, place, forwards;
} hcp__pass;

/* The passes of all stages, each after those that it waits for. */
typedef struct hcp__passes {
  int32_t stages, parts; /* parts: forwards over one chunk in a group's time */
  int64_t count;
  hcp__pass *pass;
} hcp__passes;

/* The passes of so many micro-batches, and of the empty ones that round them up. The caller
 * releases them. */
hcp_status hcp__passes_make(const hcp_pipeline *pipeline, int32_t count, hcp__passes *passes,
                            hcp_error *err);
void hcp__passes_release(hcp__passes *passes);
/* The makespan of micro-batches that take times, which sum to an eighth of INT64_MAX at most when
 * they are multiplied by stages and parts. order: places to micro-batches, NULL: as they are.
 * ends is scratch for stages + count. */
int64_t hcp__passes_time(const hcp__passes *passes, const int64_t *times, const int32_t *order,
                         int32_t count, int64_t *ends);

/* The same of n micro-batches in their order, for any times. */
hcp_status hcp__passes_makespan(const hcp__passes *passes, const int64_t *times, int32_t n,
                                int64_t *makespan, hcp_error *err);

/* What the groups take, or under HCP_SYNC_MICRO_BATCH the micro-batches: times
 * has room for either. */
hcp_status hcp__pipeline_times(const hcp__draft *draft, const hcp__problem *problem, int64_t *times,
                               hcp_error *err);
/* The makespan for those times and the passes of the draft's micro-batches, in an order. */
hcp_status hcp__pipeline_simulate(const hcp__passes *passes, const hcp__draft *draft,
                                  const hcp__problem *problem, const int64_t *times,
                                  const int32_t *order, int64_t *makespan, hcp_error *err);
/* hcp__makespan of a pipeline. A count of micro-batches that the pipeline does
 * not take is rounded up by empty ones. */
hcp_status hcp__pipeline_makespan(const hcp__draft *draft, const hcp__problem *problem,
                                  int64_t *makespan, hcp_error *err);

/* A draft with room for empty micro-batches. */
hcp_status hcp__draft_init_for(hcp__draft *draft, const hcp__problem *problem, hcp_error *err);
/* Splits micro-batches, at the least cost, until their count is the multiple that
 * the pipeline asks for; empty ones follow where nothing can be split. *to has
 * room for them and is made anew; *from loses its order. */
hcp_status hcp__draft_round_up(hcp__draft *from, const hcp__problem *problem, hcp__draft *to,
                               hcp_error *err);
/* Makes *to of *from with its micro-batches in another order, small ones at both ends,
 * improved by swaps that take at most budget passes of simulation. */
hcp_status hcp__draft_order(const hcp__draft *from, const hcp__problem *problem, int64_t budget,
                            hcp__draft *to, int64_t *makespan, hcp_error *err);

/* Micro-batches by height: one at each end, and as much more further on as does not make a stage
 * wait. */
enum { HCP_SHAPE_MAX = 96 };
typedef struct hcp__shape {
  int32_t count, front, back; /* HCP_SHAPE_MAX at most; heights of the first and the last */
  int64_t predicted;          /* its makespan if work could be cut at will */
} hcp__shape;

typedef struct hcp__shapes {
  const hcp__problem *p;
  int64_t longest;  /* the fastest that the slowest sequence can be */
  int64_t *heights; /* scratch: HCP_SHAPE_MAX */
} hcp__shapes;

hcp_status hcp__shapes_init(hcp__shapes *shapes, const hcp__problem *problem, hcp_error *err);
void hcp__shapes_release(hcp__shapes *shapes);
/* The shapes that promise most, at most so many, best first. */
hcp_status hcp__shapes_choose(const hcp__shapes *shapes, int32_t most, hcp__shape *chosen,
                              int32_t *count, hcp_error *err);
/* Fills shapes->heights, with so much for a full one; the tallest holds any sequence. */
void hcp__shape_scale(const hcp__shapes *shapes, const hcp__shape *shape, int64_t height);
/* A full height by which the shape holds as much work as there is. */
int64_t hcp__shape_height(const hcp__shapes *shapes, const hcp__shape *shape);

/* Makes *draft the best plan found for the problem's pipeline. */
hcp_status hcp__plan_pipeline(const hcp__problem *problem, int32_t effort, hcp__draft *draft,
                              hcp_error *err);

#endif
