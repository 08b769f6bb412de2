/* internal.h - what the core's files share. */
#ifndef HCP_CORE_INTERNAL_H
#define HCP_CORE_INTERNAL_H

#include "hcp/hcp.h"

/* Lengths and costs stay far enough from 2^63 that sums over a plan, which are
 * checked, are the only place where they can overflow. */
#define HCP__LENGTH_MAX ((int64_t)1 << 40)
#define HCP__RANKS_MAX (1 << 20)

/* Fills *err (when there is one) and returns status, so that a check, its
 * status and its message are one statement. */
hcp_status hcp__fail(hcp_error *err, hcp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- cost.c, bound.c ---- */

hcp_status hcp__cost_work(const hcp_cost *cost, int64_t length, int32_t degree, int64_t *work,
                          hcp_error *err);

/* The rank-time of all sequences at degree 1, and a time that no plan beats.
 * least_degrees[i] is the smallest degree that may hold sequence i. */
hcp_status hcp__bound(const int64_t *lengths, const int32_t *least_degrees, int32_t n,
                      const hcp_limits *limits, const hcp_cost *cost, int64_t *work, int64_t *bound,
                      hcp_error *err);

/* ---- plan.c ---- */

/* Smallest degree within the limits whose fullest rank can hold the sequence,
 * 0 when there is none. */
int32_t hcp__least_degree(int64_t length, const hcp_limits *limits);

/* Groups as the greedy planner found them, not yet a plan. */
typedef struct hcp__draft {
  int32_t micro_batch_count;
  hcp_micro_batch *micro_batches;
  int32_t group_count;
  hcp_group *groups;
  int32_t *sequences;
} hcp__draft;

/* ---- plan_greedy.c ---- */

/* Fills the draft's arrays, which hold n records each. bound is that of
 * hcp__bound. Returns HCP_OK or HCP_NO_MEMORY. */
hcp_status hcp__plan_greedy(const int64_t *lengths, const int32_t *least_degrees, int32_t n,
                            const hcp_limits *limits, const hcp_cost *cost, int64_t bound,
                            hcp__draft *draft, hcp_error *err);

/* The time at which the last rank ends when every group starts as soon as its
 * ranks are free. available is scratch for limits->ranks values. */
hcp_status hcp__makespan(const hcp__draft *draft, const int64_t *lengths, const hcp_limits *limits,
                         const hcp_cost *cost, int64_t *available, int64_t *makespan,
                         hcp_error *err);

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
enum { HCP__LISTS_MAX = 16 };

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
