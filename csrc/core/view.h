/* view.h - who holds which tokens of a group's sequences, and who sees which, in one layer.
 *
 * The places of a group hold pieces of each sequence. A reader, a place or a whole node, needs
 * ranges of tokens: the keys that its queries see. Of these an owner has some rows: the reader
 * sees them. */
#ifndef HCP_CORE_VIEW_H
#define HCP_CORE_VIEW_H

#include "internal.h"

/* The view's lists, after the sections.
 *   SLICES  an hcp_slice: of a sequence, under the layer's limits
 *   NEEDS   (first token, end): what a reader sees of a sequence */
enum { HCP__SLICES = HCP_SCHEDULE_SECTION_COUNT, HCP__NEEDS, HCP__VIEW_END };

typedef struct hcp__sequence {
  int64_t length;
  const int64_t *starts; /* 2 * degree + 1: of each chunk                    */
  hcp__cut *cut;         /* NULL: each place holds a chunk from either end   */
} hcp__sequence;

typedef struct hcp__view {
  const hcp_plan *plan;
  const hcp_group *group;
  const hcp_masks *masks; /* the layer's, NULL: of a plan without masks     */
  hcp_mask limits;        /* no limit is HCP__LENGTH_MAX                    */
  int32_t degree;         /* places of the group                            */
  int32_t j;              /* this rank's place                              */
  int32_t seats;          /* places of a node; all, if borders do not count */
  int32_t nodes;          /* of the group: degree / seats                   */
  hcp__sequence *sequences;
  int64_t *slices, *needs; /* where those of each sequence, or reader, begin */
  hcp__lists *lists;       /* of the schedule; with masks, two of them are the view's */
} hcp__view;

/* Consecutive tokens that consecutive rows of their owner hold. */
typedef struct hcp__rows {
  int64_t token, rows;
  int64_t owner, row; /* the first one, among the owner's rows of the sequence */
} hcp__rows;

/* Ascending by token, so that rows of one owner ascend, too. */
typedef struct hcp__seen {
  hcp__rows *list;
  int64_t count, room;
} hcp__seen;

/* Opens a view whose members but for the arrays are set. */
hcp_status hcp__view_open(hcp__view *v, hcp_error *err);
void hcp__view_close(hcp__view *v);

static inline int32_t hcp__node_of(const hcp__view *v, int32_t k) { return k / v->seats; }
static inline int32_t hcp__seat_of(const hcp__view *v, int32_t k) { return k % v->seats; }
static inline int32_t hcp__place_at(const hcp__view *v, int32_t node, int32_t seat) {
  return node * v->seats + seat;
}

/* Readers are places, then nodes. */
static inline int32_t hcp__node_reader(const hcp__view *v, int32_t node) {
  return v->degree + node;
}
static inline int32_t hcp__own_node(const hcp__view *v) {
  return hcp__node_reader(v, hcp__node_of(v, v->j));
}

/* ---- pieces ---- */

/* Those of place k in token order; *pieces is own where they are zigzag. Returns how many. */
int32_t hcp__pieces_of(const hcp__view *v, int32_t s, int32_t k, hcp__piece own[2],
                       const hcp__piece **pieces);
int64_t hcp__rows_of(const hcp__view *v, int32_t s, int32_t k);
/* Rows of place k that are tokens before end. */
int64_t hcp__rows_up_to(const hcp__view *v, int32_t s, int32_t k, int64_t end);

/* ---- slices under the layer's limits: they ascend by their queries ---- */

int64_t hcp__slice_count(const hcp__view *v, int32_t s);
hcp_slice hcp__slice_at(const hcp__view *v, int32_t s, int64_t i);
/* What is left of a slice for queries and keys of two ranges: each query sees a key and each
 * key is seen. 0: nothing. */
int hcp__narrow(hcp_slice *x, int64_t query_begin, int64_t query_end, int64_t key_begin,
                int64_t key_end);

/* ---- rows that a reader sees ---- */

/* Of one owner. Two records of adjacent rows have tokens that lie apart. */
void hcp__find_tokens(hcp__view *v, int32_t s, int32_t owner, int32_t reader, hcp__seen *seen);
/* Makes one record of adjacent rows. */
void hcp__join_rows(hcp__seen *seen);
/* Of one owner, joined in a plan without masks. Returns how many rows. */
int64_t hcp__find_rows(hcp__view *v, int32_t s, int32_t owner, int32_t reader, hcp__seen *seen);
/* What this rank sees of the places from begin on up to end, but for itself. Of all places without
 * masks, records are parts of chunks. */
void hcp__find_keys(hcp__view *v, int32_t s, int32_t begin, int32_t end, hcp__seen *seen);

int64_t hcp__count_rows(const hcp__seen *seen);
/* Where a row that was seen lies when all are laid end to end, and which row lies at a place. */
int64_t hcp__place_in(const hcp__seen *seen, int64_t row);
int64_t hcp__row_at(const hcp__seen *seen, int64_t place);

#endif
