/* cross.c - keys of one plan for the queries of another.
 *
 * Documents of queries and of keys are aligned at their ends, so a query stands at the key as far
 * from the end. A piece of queries sees consecutive keys; what a rank sees of a document is ranges.
 * Every rank knows both plans, and so what each other rank sees of its keys. */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

/* Scratch lists after the sections: keys that this rank's queries see, as (sequence, first token,
 * token after the last, output row), and rows that come, as (output row, wire row, rows). */
enum { SEEN = HCP_CROSS_SECTION_COUNT, STORES, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_CROSS_SECTIONS(WIDTH)
#undef WIDTH
        4,
    3};

/* Tokens of a sequence. */
typedef struct range {
  int64_t begin, end;
} range;

/* Where the keys of a sequence are. */
typedef struct spot {
  const hcp_group *group; /* NULL: not in the micro-batch                    */
  int32_t index;          /* of the sequence, among the group's              */
  int32_t first, count;   /* of this rank's pieces of it, among all of them */
} spot;

typedef struct builder {
  const hcp_plan *queries, *keys;
  const hcp_micro_batch *query_batch, *key_batch;
  const hcp_group *own_queries, *own_keys; /* NULL: this rank has none  */
  int64_t left, right;                     /* no limit is HCP__LENGTH_MAX */
  int32_t full;                            /* neither is a limit         */
  spot *spots;                             /* of each sequence of keys   */
  hcp__piece *own;                         /* this rank's keys           */
  int64_t *rows;                           /* the row of each such piece */
  hcp__lists lists;
  int64_t sent, received, seen; /* rows so far                    */
  int64_t first_seen;           /* record of the present document */
} builder;

static const int32_t *sequences_of(const hcp_plan *plan, const hcp_group *group) {
  return plan->sequences + group->first_sequence;
}

/* ---- checks ---- */

static int32_t sequence_count(const hcp_plan *plan, const hcp_micro_batch *batch) {
  int32_t count = 0;
  for (int32_t g = 0; g < batch->groups; g++)
    count += plan->groups[batch->first_group + g].sequences;
  return count;
}

/* Sequences of a micro-batch follow each other, group after group. */
static const int32_t *all_sequences(const hcp_plan *plan, const hcp_micro_batch *batch) {
  if (batch->groups == 0) return plan->sequences;
  return sequences_of(plan, &plan->groups[batch->first_group]);
}

enum { LISTED = 8, LIST_BYTES = 16 * LISTED };

/* Writes the first sequences, in the order of their numbers: "[0, 3]". */
static void list_sequences(const hcp_plan *plan, const hcp_micro_batch *batch,
                           char text[LIST_BYTES]) {
  int32_t count = sequence_count(plan, batch), last = -1, at = 0;
  const int32_t *sequences = all_sequences(plan, batch);
  text[at++] = '[';
  for (int32_t i = 0; i < count && i < LISTED; i++) {
    int32_t next = INT32_MAX;
    for (int32_t k = 0; k < count; k++)
      if (sequences[k] > last && sequences[k] < next) next = sequences[k];
    at += snprintf(text + at, LIST_BYTES - (size_t)at, "%s%d", i > 0 ? ", " : "", next);
    last = next;
  }
  if (count > LISTED) at += snprintf(text + at, LIST_BYTES - (size_t)at, ", ... (%d)", count);
  snprintf(text + at, LIST_BYTES - (size_t)at, "]");
}

static hcp_status refuse_sequences(const builder *b, hcp_error *err) {
  char wanted[LIST_BYTES], there[LIST_BYTES];
  list_sequences(b->queries, b->query_batch, wanted);
  list_sequences(b->keys, b->key_batch, there);
  return hcp__fail(err, HCP_INVALID,
                   "the queries' micro-batch has sequences %s on %d ranks, the keys' %s on %d, "
                   "expected the same ranks and the keys of every sequence: plan both so that "
                   "their micro-batches belong together",
                   wanted, b->queries->limits.ranks, there, b->keys->limits.ranks);
}

/* Texts that begin in a sequence, on none that it continues. */
static int64_t roots_of(const hcp_plan *plan, int32_t sequence) {
  int64_t roots = 0;
  for (int64_t i = 0; i < hcp__stretch_count(plan, sequence); i++)
    roots += hcp__stretch_parent(plan, sequence, i) < 0;
  return roots;
}

static hcp_status check_sequences(const builder *b, hcp_error *err) {
  int32_t count = sequence_count(b->queries, b->query_batch);
  const int32_t *sequences = all_sequences(b->queries, b->query_batch);
  for (int32_t i = 0; i < count; i++)
    if (sequences[i] >= b->keys->n || b->spots[sequences[i]].group == NULL)
      return refuse_sequences(b, err);
  for (int32_t i = 0; i < count; i++) {
    int64_t wanted = roots_of(b->queries, sequences[i]); /* without branches, documents */
    int64_t there = hcp__document_count(b->keys, sequences[i]);
    if (wanted != hcp__document_count(b->queries, sequences[i]))
      return hcp__fail(err, HCP_INVALID,
                       "sequence %d of the queries' plan has branches and %lld texts that continue "
                       "no other, expected one: plan each tree as a sequence of its own",
                       sequences[i], (long long)wanted);
    if (wanted != there)
      return hcp__fail(err, HCP_INVALID,
                       "sequence %d has %lld documents in the queries' plan and %lld in the "
                       "keys', expected as many: queries see the keys of the document of their "
                       "own's number",
                       sequences[i], (long long)wanted, (long long)there);
  }
  return HCP_OK;
}

/* ---- where keys are ---- */

static void find_spots(builder *b) {
  for (int32_t g = 0; g < b->key_batch->groups; g++) {
    const hcp_group *group = &b->keys->groups[b->key_batch->first_group + g];
    for (int32_t s = 0; s < group->sequences; s++)
      b->spots[sequences_of(b->keys, group)[s]] = (spot){.group = group, .index = s};
  }
}

/* Pieces of keys that this rank has at most. */
static int64_t most_pieces(const builder *b) {
  int64_t pieces = 0;
  for (int32_t s = 0; b->own_keys != NULL && s < b->own_keys->sequences; s++)
    pieces += hcp__held_most(b->keys, b->own_keys, s);
  return pieces;
}

static int64_t find_own(builder *b, int32_t rank) {
  int64_t row = 0;
  int32_t n = 0;
  if (b->own_keys == NULL) return 0;
  for (int32_t s = 0; s < b->own_keys->sequences; s++) {
    hcp__piece own[2];
    const hcp__piece *pieces;
    spot *of = &b->spots[sequences_of(b->keys, b->own_keys)[s]];
    of->first = n;
    of->count = hcp__held(b->keys, b->own_keys, s, rank - b->own_keys->first_rank, own, &pieces);
    for (int32_t p = 0; p < of->count; p++) {
      b->own[n] = pieces[p];
      b->rows[n++] = row;
      row += pieces[p].rows;
    }
  }
  return row + hcp__padding(b->keys, b->own_keys, rank - b->own_keys->first_rank);
}

/* Takes from the front of a range what the pieces hold of it, one piece at a time. *p is the piece
 * that holds the part; ranges ascend, so it never goes back. Returns whether there is a part. */
static int next_part(range *rest, const hcp__piece *pieces, int32_t n, int32_t *p, range *part) {
  while (*p < n && pieces[*p].start + pieces[*p].rows <= rest->begin) ++*p;
  if (*p == n || rest->begin >= rest->end || pieces[*p].start >= rest->end) return 0;
  part->begin = hcp__most(rest->begin, pieces[*p].start);
  part->end = hcp__least(rest->end, pieces[*p].start + pieces[*p].rows);
  rest->begin = part->end;
  return 1;
}

/* ---- who sees what ---- */

/* A piece of queries, and what it sees. */
typedef struct sight {
  int64_t document; /* its number in the sequence */
  hcp__piece keys;  /* that document's            */
  int64_t at;       /* the key at which the first query stands */
  range seen;
} sight;

static sight look(const builder *b, int32_t sequence, hcp__piece queries) {
  sight x = {.document = hcp__document_at(b->queries, sequence, queries.start)};
  hcp__piece document = hcp__document(b->queries, sequence, x.document);
  x.keys = hcp__document(b->keys, sequence, x.document);
  int64_t end = x.keys.start + x.keys.rows;
  x.at = queries.start + end - (document.start + document.rows);
  x.seen.begin = hcp__most(x.keys.start, x.at - b->left);
  x.seen.end = hcp__least(end, x.at + queries.rows + b->right);
  return x;
}

/* ---- what this rank's queries see ---- */

/* Returns the output row of the first key of the range. */
static int64_t add_seen(builder *b, int32_t sequence, range seen) {
  int64_t n = hcp__records(&b->lists, SEEN);
  if (n > b->first_seen && !b->lists.failed) {
    int64_t *last = b->lists.list[SEEN].words + (n - 1) * widths[SEEN];
    if (seen.begin <= last[2]) {
      int64_t end = hcp__most(last[2], seen.end);
      b->seen += end - last[2];
      last[2] = end;
      return last[3] + seen.begin - last[1];
    }
  }
  hcp__append(&b->lists, SEEN, (const int64_t[]){sequence, seen.begin, seen.end, b->seen});
  b->seen += seen.end - seen.begin;
  return b->seen - (seen.end - seen.begin);
}

/* The queries of a run that see any key, which are the last ones, and all keys that they see. */
static void append_entry(builder *b, int32_t sequence, int64_t row, hcp__piece queries) {
  sight x = look(b, sequence, queries);
  if (x.seen.begin >= x.seen.end) return;
  int64_t key_row = add_seen(b, sequence, x.seen), keys = x.seen.end - x.seen.begin;
  int64_t blind = hcp__most(0, x.keys.start - b->right - x.at), rows = queries.rows - blind;
  int64_t ahead = x.at + blind - x.seen.begin, entry = hcp__records(&b->lists, HCP_CROSS_ENTRIES);
  hcp__append(
      &b->lists, HCP_CROSS_ENTRIES,
      (const int64_t[]){row + blind, rows, key_row, keys, hcp__most(1 - rows, ahead - b->left),
                        hcp__least(keys - 1, ahead + b->right)});
  hcp__append(&b->lists, HCP_CROSS_QUERY_RUNS, (const int64_t[]){row + blind, rows, entry, 0});
  hcp__append(&b->lists, HCP_CROSS_KEY_RUNS, (const int64_t[]){key_row, keys, entry, 0});
}

/* Returns the row after those of the sequence. */
static int64_t append_entries(builder *b, int32_t rank, int32_t s, int64_t row) {
  hcp__piece own[2];
  const hcp__piece *pieces;
  int32_t p = 0, sequence = sequences_of(b->queries, b->own_queries)[s];
  int32_t n =
      hcp__held(b->queries, b->own_queries, s, rank - b->own_queries->first_rank, own, &pieces);
  for (int64_t d = 0; d < hcp__document_count(b->queries, sequence); d++) {
    hcp__piece document = hcp__document(b->queries, sequence, d);
    int64_t end = document.start + document.rows;
    b->first_seen = hcp__records(&b->lists, SEEN);
    while (p < n && pieces[p].start < end) {
      hcp__piece run = pieces[p++];
      if (b->full) { /* nothing tells its pieces apart */
        run.start = document.start;
        while (p < n && pieces[p].start < end) run.rows += pieces[p++].rows;
      }
      append_entry(b, sequence, row, run);
      row += run.rows;
    }
  }
  return row;
}

static void see(builder *b, int32_t rank) {
  int64_t row = 0;
  for (int32_t s = 0; b->own_queries != NULL && s < b->own_queries->sequences; s++)
    row = append_entries(b, rank, s, row);
  hcp__align_runs(&b->lists, HCP_CROSS_KEY_RUNS);
}

/* ---- receives ---- */

/* What place j of a group holds of the keys that are seen here. */
static void receive_from(builder *b, const hcp_group *group, int32_t j) {
  hcp__piece own[2];
  const hcp__piece *pieces = own;
  int64_t first = b->received, sequence = -1;
  int32_t n = 0, p = 0;
  for (int64_t i = 0; i < hcp__records(&b->lists, SEEN); i++) {
    const int64_t *seen = hcp__record(&b->lists, SEEN, i);
    const spot *of = &b->spots[seen[0]];
    if (of->group != group) continue;
    if (seen[0] != sequence) n = hcp__held(b->keys, group, of->index, j, own, &pieces), p = 0;
    sequence = seen[0];
    range rest = {seen[1], seen[2]}, part;
    while (next_part(&rest, pieces, n, &p, &part)) {
      int64_t row = seen[3] + part.begin - seen[1], rows = part.end - part.begin;
      hcp__append(&b->lists, HCP_CROSS_PLACES, (const int64_t[]){row, rows});
      hcp__append(&b->lists, STORES, (const int64_t[]){row, b->received, rows});
      b->received += rows;
    }
  }
  if (b->received > first)
    hcp__append(&b->lists, HCP_CROSS_RECEIVES,
                (const int64_t[]){group->first_rank + j, first, b->received - first});
}

static void receive(builder *b) {
  for (int32_t g = 0; g < b->key_batch->groups; g++) {
    const hcp_group *group = &b->keys->groups[b->key_batch->first_group + g];
    for (int32_t j = 0; j < group->degree; j++) receive_from(b, group, j);
  }
  hcp__sort_by(&b->lists, STORES, 0);
  for (int64_t i = 0; i < hcp__records(&b->lists, STORES); i++)
    hcp__append(&b->lists, HCP_CROSS_ARRANGE, hcp__record(&b->lists, STORES, i) + 1);
}

/* ---- sends ---- */

static void pack_range(builder *b, const spot *of, int32_t *p, range seen) {
  const hcp__piece *pieces = b->own + of->first;
  range part;
  while (next_part(&seen, pieces, of->count, p, &part)) {
    int64_t row = b->rows[of->first + *p] + part.begin - pieces[*p].start;
    hcp__append(&b->lists, HCP_CROSS_PACK, (const int64_t[]){row, part.end - part.begin});
    b->sent += part.end - part.begin;
  }
}

/* Packs what place j of a group sees of this rank's keys of a sequence. Ranges of one document
 * that touch are one. */
static void pack_sequence(builder *b, const hcp_group *group, int32_t s, int32_t j) {
  hcp__piece own[2];
  const hcp__piece *pieces;
  int32_t sequence = sequences_of(b->queries, group)[s], p = 0;
  const spot *of = &b->spots[sequence];
  if (of->group != b->own_keys || of->count == 0) return;
  int32_t n = hcp__held(b->queries, group, s, j, own, &pieces);
  range seen = {0, 0};
  int64_t document = -1;
  for (int32_t i = 0; i < n; i++) {
    sight x = look(b, sequence, pieces[i]);
    if (x.seen.begin >= x.seen.end) continue;
    if (x.document == document && x.seen.begin <= seen.end) {
      seen.end = hcp__most(seen.end, x.seen.end);
      continue;
    }
    pack_range(b, of, &p, seen);
    seen = x.seen;
    document = x.document;
  }
  pack_range(b, of, &p, seen);
}

static void send_all(builder *b) {
  for (int32_t g = 0; g < b->query_batch->groups; g++) {
    const hcp_group *group = &b->queries->groups[b->query_batch->first_group + g];
    for (int32_t j = 0; j < group->degree; j++) {
      int64_t first = b->sent;
      for (int32_t s = 0; s < group->sequences; s++) pack_sequence(b, group, s, j);
      if (b->sent > first)
        hcp__append(&b->lists, HCP_CROSS_SENDS,
                    (const int64_t[]){group->first_rank + j, first, b->sent - first});
    }
  }
}

/* ---- the table ---- */

static hcp_status build(builder *b, int32_t rank, hcp_table **cross, hcp_error *err) {
  hcp__lists_init(&b->lists, widths, LIST_COUNT);
  int64_t source_rows = find_own(b, rank);
  see(b, rank);
  receive(b);
  send_all(b);
  hcp__append(&b->lists, HCP_CROSS_SIZES,
              (const int64_t[]){source_rows, b->sent, b->received, b->seen});
  hcp_status status = hcp__table_create(&b->lists, HCP_CROSS_SECTION_COUNT, cross, err);
  hcp__lists_release(&b->lists);
  return status;
}

static hcp_status find_keys(builder *b, hcp_error *err) {
  size_t sequences = (size_t)b->keys->n, pieces = (size_t)most_pieces(b);
  b->spots =
      calloc(1, sequences * sizeof *b->spots + (pieces + 1) * (sizeof *b->own + sizeof *b->rows));
  if (b->spots == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %zu sequences", sequences);
  b->own = (hcp__piece *)(b->spots + sequences);
  b->rows = (int64_t *)(b->own + pieces + 1);
  find_spots(b);
  return HCP_OK;
}

/* What is aligned at its end has one. A tree has one end for each leaf: its queries see all keys.
 */
static hcp_status check_branches(const hcp_plan *queries, const hcp_plan *keys, int32_t full,
                                 hcp_error *err) {
  hcp_status status = hcp_plan_expect_no_branches(keys, "hcp_cross_create", err);
  if (status != HCP_OK) return status;
  return full ? hcp_plan_expect_trees(queries, "hcp_cross_create", err)
              : hcp_plan_expect_no_branches(queries, "hcp_cross_create", err);
}

static hcp_status check_sides(const hcp_cross_side *queries, const hcp_cross_side *keys,
                              int32_t rank, int32_t full, hcp_error *err) {
  hcp_status status = hcp__check_place(queries->plan, queries->micro_batch, rank, err);
  if (status == HCP_OK)
    status = hcp__check_place(keys->plan, keys->micro_batch, 0, err); /* ranks: see below */
  if (status == HCP_OK) status = check_branches(queries->plan, keys->plan, full, err);
  return status;
}

hcp_status hcp_cross_create(const hcp_cross_side *queries, const hcp_cross_side *keys, int32_t rank,
                            int64_t left, int64_t right, hcp_table **cross, hcp_error *err) {
  hcp_status status = check_sides(queries, keys, rank, left < 0 && right < 0, err);
  if (status != HCP_OK) return status;
  builder b = {
      .queries = queries->plan,
      .keys = keys->plan,
      .query_batch = &queries->plan->micro_batches[queries->micro_batch],
      .key_batch = &keys->plan->micro_batches[keys->micro_batch],
      .left = left < 0 ? HCP__LENGTH_MAX : hcp__least(left, HCP__LENGTH_MAX),
      .right = right < 0 ? HCP__LENGTH_MAX : hcp__least(right, HCP__LENGTH_MAX),
      .full = left < 0 && right < 0,
  };
  if (b.queries->limits.ranks != b.keys->limits.ranks) return refuse_sequences(&b, err);
  b.own_queries = hcp__group_of(b.queries, queries->micro_batch, rank);
  b.own_keys = hcp__group_of(b.keys, keys->micro_batch, rank);
  status = find_keys(&b, err);
  if (status == HCP_OK) status = check_sequences(&b, err);
  if (status == HCP_OK) status = build(&b, rank, cross, err);
  free(b.spots);
  return status;
}
