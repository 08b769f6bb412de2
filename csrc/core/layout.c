/* layout.c - the rows that one rank holds in one micro-batch. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

int64_t hcp_rows_max(int64_t length, int32_t degree) {
  /* Rank j holds (floor + ceil)((j + 1) x) - (floor + ceil)(j x) rows with
   * x = length / (2 * degree). The fullest rank has one row more than 2 floor(x)
   * when multiples of x only ever meet an integer, two when one passes it. */
  int64_t chunks = 2 * (int64_t)degree, rest = length % chunks, whole = 2 * (length / chunks);
  if (rest == 0) return whole;
  return whole + (chunks % rest == 0 ? 1 : 2);
}

int64_t hcp_rows_up_to(int64_t length, int32_t degree) {
  /* A rank holds two chunks. The least remainder that rounds up both of them on some rank is the
   * least one above 2 that does not divide the number of chunks: see hcp_rows_max. */
  int64_t chunks = 2 * (int64_t)degree, rest = length % chunks, both = 3;
  while (chunks % both == 0) both++;
  return 2 * (length / chunks) + (rest > 0) + (rest >= both);
}

int64_t hcp_rows_held(int64_t length, int32_t degree, int32_t j) {
  return hcp__zigzag_rows(&(hcp__zigzag){length, degree, 0}, j);
}

hcp__zigzag hcp__zigzag_of(const hcp_plan *plan, int32_t sequence, int32_t degree) {
  return (hcp__zigzag){plan->lengths[sequence], degree, plan->turns[sequence]};
}

int64_t hcp__chunk_start(const hcp__zigzag *z, int64_t k) {
  int64_t chunks = 2 * (int64_t)z->degree, rest = z->length % chunks;
  int64_t over = (k + z->turn) * rest / chunks - z->turn * rest / chunks;
  return z->length / chunks * k + over;
}

int32_t hcp__pieces(const hcp__zigzag *z, int32_t j, hcp__piece pieces[2]) {
  int64_t mirrored = 2 * (int64_t)z->degree - 1 - j;
  return hcp__pieces_between(hcp__chunk_start(z, j), hcp__chunk_start(z, j + 1),
                             hcp__chunk_start(z, mirrored), hcp__chunk_start(z, mirrored + 1),
                             pieces);
}

int64_t hcp__zigzag_rows(const hcp__zigzag *z, int32_t j) {
  hcp__piece pieces[2];
  int32_t n = hcp__pieces(z, j, pieces);
  int64_t rows = 0;
  for (int32_t p = 0; p < n; p++) rows += pieces[p].rows;
  return rows;
}

/* ---- turns ---- */

static int32_t widest(const hcp_plan *plan) {
  int32_t degree = 1;
  for (int32_t g = 0; g < plan->group_count; g++)
    if (plan->groups[g].degree > degree) degree = plan->groups[g].degree;
  return degree;
}

/* Sequences of a group whose lengths leave the same rest are rounded alike. Each of them begins a
 * chunk after the one before it: k of them put on a chunk what one puts on k neighbouring chunks,
 * which is less than a row from its share. So no place is two rows from its share for each rest,
 * however many sequences there are. The first one of each rest lies as if it were alone, whole
 * chunks always do, and hcp_rows_max of all of them together stays the most of a place. */
static void turn_group(const hcp_plan *plan, const hcp_group *group, int32_t *next,
                       int32_t *turns) {
  int64_t chunks = 2 * (int64_t)group->degree;
  const int32_t *sequences = plan->sequences + group->first_sequence;
  for (int32_t s = 0; s < group->sequences; s++) {
    int64_t rest = plan->lengths[sequences[s]] % chunks;
    if (rest == 0) continue;
    turns[sequences[s]] = next[rest];
    next[rest] = next[rest] + 1 < chunks ? next[rest] + 1 : 0;
  }
  for (int32_t s = 0; s < group->sequences; s++) next[plan->lengths[sequences[s]] % chunks] = 0;
}

int32_t *hcp__turns_create(const hcp_plan *plan) {
  int32_t *turns = calloc((size_t)plan->n + 1, sizeof *turns);
  int32_t *next = calloc(2 * (size_t)widest(plan), sizeof *next);
  for (int32_t g = 0; turns != NULL && next != NULL && g < plan->group_count; g++)
    if (plan->groups[g].degree > 1) turn_group(plan, &plan->groups[g], next, turns);
  if (next == NULL) {
    free(turns);
    return NULL;
  }
  free(next);
  return turns;
}

/* ---- what a rank holds ---- */

int32_t hcp__held(const hcp_plan *plan, const hcp_group *group, int32_t index, int32_t j,
                  hcp__piece own[2], const hcp__piece **pieces) {
  int32_t sequence = plan->sequences[group->first_sequence + index];
  const hcp__cut *cut = plan->cuts == NULL ? NULL : plan->cuts[sequence];
  if (cut == NULL) {
    *pieces = own;
    hcp__zigzag z = hcp__zigzag_of(plan, sequence, group->degree);
    return hcp__pieces(&z, j, own);
  }
  *pieces = cut->pieces + cut->first[j];
  return cut->first[j + 1] - cut->first[j];
}

int32_t hcp__held_most(const hcp_plan *plan, const hcp_group *group, int32_t index) {
  int32_t sequence = plan->sequences[group->first_sequence + index];
  const hcp__cut *cut = plan->cuts == NULL ? NULL : plan->cuts[sequence];
  return cut == NULL ? 2 : cut->most;
}

const hcp_group *hcp__group_of(const hcp_plan *plan, int32_t micro_batch, int32_t rank) {
  const hcp_micro_batch *batch = &plan->micro_batches[micro_batch];
  if (batch->groups == 0) return NULL;
  int32_t low = batch->first_group, high = low + batch->groups - 1;
  while (low < high) { /* the last group that starts at or before rank */
    int32_t middle = low + (high - low + 1) / 2;
    if (plan->groups[middle].first_rank <= rank)
      low = middle;
    else
      high = middle - 1;
  }
  const hcp_group *group = &plan->groups[low];
  return rank >= group->first_rank && rank < group->first_rank + group->degree ? group : NULL;
}

int64_t hcp__rank_rows(const hcp_plan *plan, const hcp_group *group, int32_t j) {
  int64_t rows = 0;
  for (int32_t s = 0; s < group->sequences; s++) {
    hcp__zigzag z = hcp__zigzag_of(plan, plan->sequences[group->first_sequence + s], group->degree);
    rows += hcp__zigzag_rows(&z, j);
  }
  return rows;
}

int64_t hcp__group_tokens(const hcp_plan *plan, const hcp_group *group) {
  int64_t tokens = 0;
  for (int32_t s = 0; s < group->sequences; s++)
    tokens += plan->lengths[plan->sequences[group->first_sequence + s]];
  return tokens;
}

int64_t hcp__padding(const hcp_plan *plan, const hcp_group *group, int32_t j) {
  int32_t alignment = plan->limits.alignment;
  if (alignment < 2) return 0;
  int64_t over = hcp__rank_rows(plan, group, j) % alignment;
  return over == 0 ? 0 : alignment - over;
}

int32_t hcp__whole_nodes(const hcp_plan *plan, const hcp_group *group) {
  int32_t node = plan->limits.ranks_per_node;
  if (node < 1 || node >= group->degree || group->first_rank % node != 0 ||
      group->degree % node != 0)
    return 0;
  for (int32_t j = 0; j < group->degree; j++)
    if (hcp__rank_rows(plan, group, j) == 0) return 0;
  return node;
}

hcp_status hcp__check_place(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                            hcp_error *err) {
  if (plan->micro_batch_count == 0)
    return hcp__fail(err, HCP_INVALID,
                     "micro_batch is %d, expected none: the plan of no sequences has no "
                     "micro-batches",
                     micro_batch);
  if (micro_batch < 0 || micro_batch >= plan->micro_batch_count)
    return hcp__fail(err, HCP_INVALID,
                     "micro_batch is %d, expected >= 0 and < %d (the plan's micro-batches)",
                     micro_batch, plan->micro_batch_count);
  if (rank < 0 || rank >= plan->limits.ranks)
    return hcp__fail(err, HCP_INVALID, "rank is %d, expected 0 to %d", rank,
                     plan->limits.ranks - 1);
  return HCP_OK;
}

/* ---- the value ---- */

typedef struct sizes {
  int32_t sequences, documents, stretches, spans, degree;
  int64_t rows; /* padding included */
} sizes;

static sizes measure(const hcp_plan *plan, const hcp_group *group, int32_t rank) {
  sizes size = {0};
  if (group == NULL) return size;
  size.sequences = group->sequences;
  size.degree = group->degree;
  size.rows = hcp__padding(plan, group, rank - group->first_rank);
  for (int32_t s = 0; s < group->sequences; s++) {
    hcp__piece own[2];
    const hcp__piece *pieces;
    int32_t n = hcp__held(plan, group, s, rank - group->first_rank, own, &pieces);
    int32_t sequence = plan->sequences[group->first_sequence + s];
    size.documents += (int32_t)hcp__document_count(plan, sequence);
    size.stretches += (int32_t)hcp__stretch_count(plan, sequence);
    size.spans += n;
    for (int32_t p = 0; p < n; p++) size.rows += pieces[p].rows;
  }
  return size;
}

/* The layout and its arrays are one allocation, widest elements first. */
static hcp_layout *allocate(const sizes *size) {
  size_t sequences = (size_t)size->sequences, documents = (size_t)size->documents;
  size_t stretches = (size_t)size->stretches, spans = (size_t)size->spans + documents + stretches;
  hcp_layout *layout =
      malloc(sizeof *layout + spans * sizeof(hcp_span) + sequences * sizeof(int64_t) +
             (size_t)size->rows * sizeof(int64_t) + (size_t)size->degree * sizeof(int64_t) +
             (2 * sequences + 1 + stretches) * sizeof(int32_t));
  if (layout == NULL) return NULL;
  memset(layout, 0, sizeof *layout);
  hcp_span *span = (hcp_span *)(layout + 1);
  int64_t *lengths = (int64_t *)(span + spans), *positions = lengths + sequences;
  int64_t *paddings = positions + size->rows;
  int32_t *cu_seqlens = (int32_t *)(paddings + size->degree);
  layout->documents = span;
  layout->stretches = span + documents;
  layout->spans = span + documents + stretches;
  layout->lengths = lengths;
  layout->positions = positions;
  layout->paddings = paddings;
  layout->cu_seqlens = cu_seqlens;
  layout->sequences = cu_seqlens + sequences + 1;
  layout->parents = layout->sequences + sequences;
  return layout;
}

/* Rows after all sequences, each at position 0. */
static void fill_padding(const hcp_plan *plan, const hcp_group *group, hcp_layout *layout) {
  int64_t *positions = (int64_t *)(uintptr_t)layout->positions;
  int64_t *paddings = (int64_t *)(uintptr_t)layout->paddings;
  for (int32_t j = 0; j < layout->degree; j++) paddings[j] = hcp__padding(plan, group, j);
  if (layout->degree > 0) layout->padding = paddings[layout->rank - layout->first_rank];
  for (int64_t i = 0; i < layout->padding; i++) positions[layout->rows++] = 0;
}

static void fill_documents(const hcp_plan *plan, int32_t sequence, int32_t index,
                           hcp_layout *layout) {
  hcp_span *documents = (hcp_span *)(uintptr_t)layout->documents;
  for (int64_t i = 0; i < hcp__document_count(plan, sequence); i++) {
    hcp__piece document = hcp__document(plan, sequence, i);
    int32_t number = layout->document_count++;
    documents[number] = (hcp_span){index, number, document.start, document.rows};
  }
}

/* After the sequence's documents, of which `first` is the first. */
static void fill_stretches(const hcp_plan *plan, int32_t sequence, int32_t index, int64_t first,
                           hcp_layout *layout) {
  hcp_span *stretches = (hcp_span *)(uintptr_t)layout->stretches;
  int32_t *parents = (int32_t *)(uintptr_t)layout->parents, before = layout->stretch_count;
  for (int64_t i = 0; i < hcp__stretch_count(plan, sequence); i++) {
    hcp__piece stretch = hcp__stretch(plan, sequence, i);
    int64_t parent = hcp__stretch_parent(plan, sequence, i);
    int64_t document = first + hcp__document_at(plan, sequence, stretch.start);
    parents[layout->stretch_count] = parent < 0 ? -1 : before + (int32_t)parent;
    stretches[layout->stretch_count++] =
        (hcp_span){index, (int32_t)document, stretch.start, stretch.rows};
  }
}

static void fill(const hcp_plan *plan, const hcp_group *group, hcp_layout *layout) {
  /* Constant for readers, ours to write once. */
  hcp_span *spans = (hcp_span *)(uintptr_t)layout->spans;
  int64_t *lengths = (int64_t *)(uintptr_t)layout->lengths;
  int64_t *positions = (int64_t *)(uintptr_t)layout->positions;
  int32_t *cu_seqlens = (int32_t *)(uintptr_t)layout->cu_seqlens;
  int32_t *sequences = (int32_t *)(uintptr_t)layout->sequences;
  cu_seqlens[0] = 0;
  for (int32_t s = 0; s < layout->sequence_count; s++) {
    hcp__piece own[2];
    const hcp__piece *pieces;
    sequences[s] = plan->sequences[group->first_sequence + s];
    lengths[s] = plan->lengths[sequences[s]];
    int32_t first = layout->document_count;
    fill_documents(plan, sequences[s], s, layout);
    fill_stretches(plan, sequences[s], s, first, layout);
    int32_t n = hcp__held(plan, group, s, layout->rank - group->first_rank, own, &pieces);
    for (int32_t p = 0; p < n; p++) {
      int64_t document = first + hcp__document_at(plan, sequences[s], pieces[p].start);
      spans[layout->span_count++] =
          (hcp_span){s, (int32_t)document, pieces[p].start, pieces[p].rows};
      for (int64_t i = 0; i < pieces[p].rows; i++) positions[layout->rows++] = pieces[p].start + i;
    }
    cu_seqlens[s + 1] = (int32_t)layout->rows;
  }
}

hcp_status hcp_layout_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                             hcp_layout **out, hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  sizes size = measure(plan, group, rank);
  hcp_layout *layout = allocate(&size);
  if (layout == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a layout of %lld rows",
                     (long long)size.rows);
  layout->rank = rank;
  layout->micro_batch = micro_batch;
  layout->sequence_count = size.sequences;
  if (group != NULL) {
    layout->first_rank = group->first_rank;
    layout->degree = group->degree;
  }
  fill(plan, group, layout);
  fill_padding(plan, group, layout);
  *out = layout;
  return HCP_OK;
}

void hcp_layout_destroy(hcp_layout *layout) { free(layout); }
