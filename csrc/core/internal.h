/* internal.h - declarations for all files of the core. plan/plan.h has the planner's. */
#ifndef HCP_CORE_INTERNAL_H
#define HCP_CORE_INTERNAL_H

#include "hcp/fail.h"

/* Lengths and costs stay far enough from 2^63 that sums over a plan, which are
 * checked, are the only place where they can overflow. */
#define HCP__LENGTH_MAX ((int64_t)1 << 40)
#define HCP__RANKS_MAX (1 << 20)

/* For products of two of them. */
__extension__ typedef __int128 hcp__wide;

static inline int64_t hcp__least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t hcp__most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Words of an hcp_position_run. */
enum { HCP__RUN_WORDS = sizeof(hcp_position_run) / sizeof(int64_t) };

/* The last of `count` records, each of so many words, whose first word is at most `value`. These
 * ascend; 0 where there is none. */
static inline int64_t hcp__last_up_to(const int64_t *records, int64_t words, int64_t count,
                                      int64_t value) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    int64_t middle = low + (high - low + 1) / 2;
    if (records[middle * words] <= value)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/* a + b for a and b >= 0, at most HCP__LATE. No plan takes that long; two times and
 * one such sum fit in 63 bits. */
#define HCP__LATE (INT64_MAX / 4)
static inline int64_t hcp__sum(int64_t a, int64_t b) {
  return a < HCP__LATE - b ? a + b : HCP__LATE;
}

/* A checksum that has seen more data. */
static inline uint64_t hcp__mix(uint64_t sum, const void *data, size_t bytes) {
  const unsigned char *at = data;
  for (size_t i = 0; i < bytes; i++) sum = (sum ^ at[i]) * 0x100000001b3u; /* FNV-1a */
  return sum;
}

/* ---- What a sequence costs (cost.c) ---- */

/* A sequence as its price sees it. */
typedef struct hcp__size {
  int64_t length;
  int64_t pairs; /* -1: those of the cost's window */
} hcp__size;

static inline hcp__size hcp__size_of(const hcp_cost *cost, const int64_t *lengths,
                                     int32_t sequence) {
  return (hcp__size){lengths[sequence], cost->pairs == NULL ? -1 : cost->pairs[sequence]};
}

/* Pairs of a query and a key of length tokens: of each query its own, and so many keys on each side
 * of it at most; negative: all. */
static inline hcp__wide hcp__side(int64_t length, int64_t limit) {
  int64_t most = length - 1, keys = limit < 0 || limit > most ? most : limit;
  if (limit == 0) return 0;
  if (length <= INT32_MAX) return (keys * (keys + 1) >> 1) + (most - keys) * keys; /* is faster */
  return ((hcp__wide)keys * (keys + 1) >> 1) + (hcp__wide)(most - keys) * keys;
}
static inline hcp__wide hcp__pairs(int64_t length, int64_t left, int64_t right) {
  return length + hcp__side(length, left) + hcp__side(length, right);
}

/* Tokens when each of the 2 * degree chunks of a sequence is rounded up to whole tiles. */
int64_t hcp__tiled(const hcp_cost *cost, int64_t length, int64_t degree);

/* Prices of what moves between the ranks of a group, in a node or between nodes. */
typedef struct hcp__links {
  int64_t exchange, all_to_all;
} hcp__links;

hcp__links hcp__links_of(const hcp_cost *cost, int64_t degree, int32_t ranks_per_node);

/* What a rank takes for a micro-batch with so much work, 0: for one without rows. */
static inline int64_t hcp__launched(const hcp_cost *cost, int64_t work) {
  int64_t time = cost->launch + work;
  return time > cost->host ? time : cost->host;
}

hcp_status hcp__cost_check(const hcp_cost *cost, hcp_error *err);

/* Whether times of the sequence at degrees up to most, times these, fit. */
hcp_status hcp__cost_fits(const hcp_cost *cost, hcp__size size, int32_t most, hcp_error *err);

/* hcp_cost_time of what hcp__cost_fits: 0 where a cost table has no such time. */
int64_t hcp__cost(const hcp_cost *cost, hcp__size size, int32_t degree, int32_t ranks_per_node);

/* For costs without a cost table: a time that no degree from least to most beats,
 * and an area (rank-time) that no degree from least on beats. */
int64_t hcp__time_floor(const hcp_cost *cost, hcp__size size, int32_t least, int32_t most,
                        int32_t ranks_per_node);
int64_t hcp__area_floor(const hcp_cost *cost, hcp__size size, int32_t least,
                        int32_t ranks_per_node);

/* The row of a length in a cost table, -1: none. */
int32_t hcp__times_row(const hcp_times *times, int64_t length);
int32_t hcp__times_column(const hcp_times *times, int32_t degree);

/* ---- What a rank holds (layout.c) ---- */

/* Consecutive tokens of one sequence. */
typedef struct hcp__piece {
  int64_t start, rows;
} hcp__piece;

/* How a sequence is cut in 2 * degree chunks. A chunk's rows are rounded as those of the chunk
 * `turn` places after it would be, if the sequence came again and again. */
typedef struct hcp__zigzag {
  int64_t length;
  int32_t degree;
  int32_t turn; /* 0 to 2 * degree - 1 */
} hcp__zigzag;

hcp__zigzag hcp__zigzag_of(const hcp_plan *plan, int32_t sequence, int32_t degree);

/* The turns of a plan's sequences, NULL: out of memory. The caller frees them. */
int32_t *hcp__turns_create(const hcp_plan *plan);

/* The first token of chunk k of 2 * degree, for 0 <= k <= 2 * degree. */
int64_t hcp__chunk_start(const hcp__zigzag *z, int64_t k);

/* Two chunks as at most two pieces in token order, none empty, joined when they touch. Returns how
 * many. */
static inline int32_t hcp__pieces_between(int64_t front, int64_t front_end, int64_t back,
                                          int64_t back_end, hcp__piece pieces[2]) {
  int32_t n = 0;
  if (front_end == back) back = front, front_end = front;
  if (front_end > front) pieces[n++] = (hcp__piece){front, front_end - front};
  if (back_end > back) pieces[n++] = (hcp__piece){back, back_end - back};
  return n;
}

/* What place j holds of a sequence: at most two pieces in token order,
 * none empty, joined when they touch. Returns how many. */
int32_t hcp__pieces(const hcp__zigzag *z, int32_t j, hcp__piece pieces[2]);

/* Rows of place j. */
int64_t hcp__zigzag_rows(const hcp__zigzag *z, int32_t j);

/* The pieces that place j of the group holds of its sequence `index`, in token order; *pieces
 * is own where they are zigzag. Returns how many. */
int32_t hcp__held(const hcp_plan *plan, const hcp_group *group, int32_t index, int32_t j,
                  hcp__piece own[2], const hcp__piece **pieces);

/* Most pieces that a place of the group holds of its sequence `index`. */
int32_t hcp__held_most(const hcp_plan *plan, const hcp_group *group, int32_t index);

/* The group of a micro-batch that contains rank, NULL when none does. */
const hcp_group *hcp__group_of(const hcp_plan *plan, int32_t micro_batch, int32_t rank);

/* Rows of rank j of a group, and those that alignment adds after them. */
int64_t hcp__rank_rows(const hcp_plan *plan, const hcp_group *group, int32_t j);
int64_t hcp__padding(const hcp_plan *plan, const hcp_group *group, int32_t j);
int64_t hcp__group_tokens(const hcp_plan *plan, const hcp_group *group);

/* Ranks of a node, for a group of several whole nodes whose ranks all have rows; else 0. */
int32_t hcp__whole_nodes(const hcp_plan *plan, const hcp_group *group);

hcp_status hcp__check_place(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                            hcp_error *err);

/* Whether rank and the rank that loaded each sequence are in the domain (route.c). */
hcp_status hcp__check_sources(const hcp_plan *plan, const int32_t *sources, int32_t rank,
                              hcp_error *err);

/* ---- Cuts of masked sequences (cut.c) ---- */

/* Consecutive tokens, and the place of the group that holds them. */
typedef struct hcp__chunk {
  int64_t start, rows;
  int32_t place;
} hcp__chunk;

/* Who holds which tokens of a sequence. Chunks ascend; neighbours have different places. */
typedef struct hcp__cut {
  int32_t count;
  int32_t most;              /* pieces of a place                                      */
  const hcp__chunk *chunks;  /* count                                                  */
  const hcp__piece *pieces;  /* the chunks of place 0, then those of place 1 ...       */
  const int32_t *first;      /* degree + 1: where the pieces of each place begin       */
} hcp__cut;

/* A cut of chunks in token order, NULL: out of memory. Empty ones are left out, neighbours of
 * one place joined. The caller frees it. */
hcp__cut *hcp__cut_create(const hcp__chunk *chunks, int32_t count, int32_t degree);
hcp__cut *hcp__cut_zigzag(const hcp__zigzag *z);

/* *cut is the cut that balances the work of a sequence under the plan's masks, NULL: zigzag.
 * Every place has as many rows as under zigzag. Returns 0 when out of memory. */
int hcp__cut_balanced(const hcp_plan *plan, int32_t sequence, int32_t degree, hcp__cut **cut);

/* The cut of a sequence with its pieces divided where stretches begin, NULL: out of memory. */
hcp__cut *hcp__cut_by_stretches(const hcp__cut *cut, const hcp_plan *plan, int32_t sequence,
                                int32_t degree);

/* ---- Documents of masked sequences (documents.c) ---- */

/* The stretches of a plan's sequences with branches. */
typedef struct hcp__stretches hcp__stretches;

/* Where the documents of all sequences begin. */
typedef struct hcp__documents {
  int32_t branching;         /* the first sequence with branches, -1: none  */
  hcp__stretches *stretches; /* NULL: no sequence has branches              */
  const int64_t *first;      /* n + 1                                       */
  const int64_t *starts;     /* tokens, of each sequence from first[i] on   */
} hcp__documents;

/* Of a plan that has its masks, without stretches. *documents is NULL where no sequence has
 * positions of its own; branching[i], of n, says whether a sequence has branches. Returns 0 when
 * out of memory.
 */
int hcp__documents_create(const hcp_plan *plan, char *branching, hcp__documents **documents);
void hcp__documents_release(hcp__documents *documents);

/* Documents of a sequence, 1 without masks; the number of the one that has a token; its tokens. */
int64_t hcp__document_count(const hcp_plan *plan, int32_t sequence);
int64_t hcp__document_at(const hcp_plan *plan, int32_t sequence, int64_t token);
hcp__piece hcp__document(const hcp_plan *plan, int32_t sequence, int64_t i);

/* ---- Stretches of trees (stretches.c) ---- */

/* Of the plan's sequences that are `branching` (n). NULL: out of memory. The caller frees it. */
hcp__stretches *hcp__stretches_create(const hcp_plan *plan, const char *branching);

/* Stretches of a sequence, which ascend by their tokens; without branches they are its documents.
 * The number of the one that has a token; its tokens; the one that it continues, -1: none. */
int64_t hcp__stretch_count(const hcp_plan *plan, int32_t sequence);
int64_t hcp__stretch_at(const hcp_plan *plan, int32_t sequence, int64_t token);
hcp__piece hcp__stretch(const hcp_plan *plan, int32_t sequence, int64_t i);
int64_t hcp__stretch_parent(const hcp_plan *plan, int32_t sequence, int64_t i);

/* What masks add to a plan (mask.c). */
void hcp__masks_release(hcp_plan *plan);

/* ---- Tables of sections (table.c) ---- */

/* Records of one width. */
typedef struct hcp__list {
  int64_t *words;
  int64_t count, capacity; /* words */
  int32_t width;           /* words per record */
} hcp__list;

/* The sections of a table while it is built, followed by scratch lists. A
 * failed append is remembered, to be checked once at the end. */
#define HCP__LISTS_MAX 28

typedef struct hcp__lists {
  hcp__list list[HCP__LISTS_MAX];
  int32_t header_words; /* of the table */
  int32_t failed;
} hcp__lists;

/* The table's header has HCP_TABLE_HEADER words, unless the caller changes that. */
void hcp__lists_init(hcp__lists *lists, const int32_t *widths, int32_t n);
void hcp__lists_release(hcp__lists *lists);
void hcp__append(hcp__lists *lists, int32_t section, const int64_t *record);
/* Appends the record of a stage of a schedule, whose other records come before it. */
void hcp__end_stage(hcp__lists *lists, int64_t sent, int64_t received, int64_t keys,
                    int64_t relayed);
/* Appends (row, rows), joined to the last record when it continues that. */
void hcp__append_rows(hcp__lists *lists, int32_t section, int64_t row, int64_t rows);
/* Appends (peer, row, rows) of each rank with rows: those from starts[peer] up to the next. */
void hcp__append_peers(hcp__lists *lists, int32_t section, const int64_t *starts, int32_t ranks);
int64_t hcp__records(const hcp__lists *lists, int32_t section);
const int64_t *hcp__record(const hcp__lists *lists, int32_t section, int64_t i);
/* Sorts a section's records by one of their words; equal ones keep no order. */
void hcp__sort_by(hcp__lists *lists, int32_t section, int32_t word);
/* Makes runs of (row, rows, part, part_row) records that overlap in any way: cuts them
 * wherever one begins or ends, then sorts them by row and part. */
void hcp__align_runs(hcp__lists *lists, int32_t section);
/* Lays out a table of n sections of so many records and of so many words a record, all zeros. NULL:
 * out of memory. */
hcp_table *hcp__table_allocate(int32_t header_words, int32_t n, const int64_t *records,
                               const int32_t *widths);
/* Finds the sections of words that a caller has, of a table of its kind: see hcp_table_read.
 * Returns 0 unless every one lies inside. */
int hcp__find_sections(const int64_t *words, int64_t word_count, int64_t header_words, int32_t n,
                       const int32_t *widths, hcp_section *sections);
extern const int32_t hcp__schedule_widths[HCP_SCHEDULE_SECTION_COUNT];
/* The fields of a stage's record that are not read in order. */
enum { HCP__STAGE_ENTRIES = 4, HCP__STAGE_PULLS = 5, HCP__STAGE_KEYS = 11 };
hcp_status hcp__no_schedule(int64_t word_count, const char *what, hcp_error *err);
/* Makes a table of the first n sections, or HCP_NO_MEMORY after a failed append. */
hcp_status hcp__table_create(const hcp__lists *lists, int32_t n, hcp_table **table, hcp_error *err);

/* ---- Masks of trees (tree_mask.c) ---- */

/* Appends what HCP_TREE_MASK_SECTIONS has of parts that are checked. */
void hcp__append_tree_mask(const hcp_tree_parts *parts, hcp__lists *lists, int32_t slices,
                           int32_t positions);

#endif
