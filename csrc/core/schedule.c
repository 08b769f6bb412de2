/* schedule.c - the steps of one attention layer on one rank.
 *
 * A rank's rows of a sequence, in local order, are in token order, and lie in pieces of
 * consecutive tokens. A piece of queries sees, of every slice of a mask, consecutive keys. A
 * part of a slice, for a piece of queries and consecutive keys, is a block, whose band is that
 * of the slice. Without masks a sequence is one slice, which the layer's limits bound. Without
 * a window much of this joins: local queries against local keys are one causal square, and of
 * another rank's rows a query piece sees a prefix.
 *
 * Some ranks first exchange rows for heads. Then each holds, for its heads, the
 * adjacent chunks of all of them: m neighbours of d ranks have the rows of one of
 * d / m ranks. So everything after the exchange is written for the places of a
 * smaller group, and a lane of ranks, one of each place, shares its heads.
 *
 * A group may lie in several nodes. Then rows cross a border of nodes once, between the
 * places of two nodes that have the same seat, and go on inside. A node's places hold what
 * one place of a group of nodes would hold, so they see what that place would see. */
#include <stdlib.h>

#include "view.h"

/* Scratch lists after the view's.
 *   HEAD_ROWS  (wire row, row, rows): the rows that came for heads
 *   KEYS       (token, rows, key row): of a stage and a sequence, joined */
enum { HEAD_ROWS = HCP__VIEW_END, KEYS, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_SCHEDULE_SECTIONS(WIDTH)
#undef WIDTH
        6,
    2, 3, 3};

typedef struct builder {
  hcp__view view;
  int32_t inner; /* neighbours that exchange heads, 1: none           */
  int32_t lane;  /* this rank among the neighbours that have its place */
  int32_t in_place; /* 1: rows are read where their owners hold them   */
  int64_t stage_tokens;
  hcp__lists lists;
  hcp__seen seen, of_node; /* scratch: what a reader sees, and what its node does           */
  int64_t *wire;    /* places: where the next row of each lies on the wire                  */
  int64_t *base;    /* places: where the present sequence starts among each one's rows      */
  int64_t *return_row; /* places: where the gradient of the next row of each travels        */
  int64_t *relayed; /* nodes: where what goes on to each starts                             */
  int64_t return_sent, return_received, return_relayed; /* rows so far */
} builder;

const char *hcp_comm_type_name(hcp_comm_type type) {
  switch (type) {
#define NAME(name, text) \
  case HCP_COMM_##name:  \
    return text;
    HCP_COMM_TYPES(NAME)
#undef NAME
    case HCP_COMM_TYPE_COUNT:
      break;
  }
  return NULL;
}

static int has_masks(const builder *b) { return b->view.masks != NULL; }

static int32_t own_node(const builder *b) { return hcp__node_of(&b->view, b->view.j); }
static int32_t own_seat(const builder *b) { return hcp__seat_of(&b->view, b->view.j); }

/* Whether rows of k come to this rank's node by this rank. */
static int relays(const builder *b, int32_t k) {
  return hcp__node_of(&b->view, k) != own_node(b) && hcp__seat_of(&b->view, k) == own_seat(b);
}

/* Of neighbour m of place k. */
static int64_t padding_of(const builder *b, int32_t k, int32_t m) {
  return hcp__padding(b->view.plan, b->view.group, k * b->inner + m);
}

/* All rows of place k, padding included. */
static int64_t place_rows(const builder *b, int32_t k) {
  int64_t rows = 0;
  for (int32_t s = 0; s < b->view.group->sequences; s++) rows += hcp__rows_of(&b->view, s, k);
  for (int32_t m = 0; m < b->inner; m++) rows += padding_of(b, k, m);
  return rows;
}

/* Sequences of the group from index begin on, up to end. */
typedef struct sequences {
  int32_t begin, end;
} sequences;

static sequences all_sequences(const builder *b) {
  return (sequences){0, b->view.group->sequences};
}

static int64_t all_rows_seen(builder *b, sequences of, int32_t owner, int32_t reader) {
  int64_t rows = 0;
  for (int32_t s = of.begin; s < of.end; s++)
    rows += hcp__find_rows(&b->view, s, owner, reader, &b->seen);
  return rows;
}

/* ---- records ---- */

/* Places under masks are ranks, or all ranks together, which the first one stands for. */
static int32_t peer_of(const builder *b, int32_t k) {
  return b->view.group->first_rank + k * b->inner + (has_masks(b) ? 0 : b->lane);
}

static void append_peer(builder *b, int32_t section, int32_t k, int64_t row, int64_t rows) {
  if (rows > 0) hcp__append(&b->lists, section, (const int64_t[]){peer_of(b, k), row, rows});
}

/* Appends (row, rows), joined to the last record but for a stage's first one. */
static void append_joined(builder *b, int32_t section, int is_first, int64_t row, int64_t rows) {
  if (is_first)
    hcp__append(&b->lists, section, (const int64_t[]){row, rows});
  else
    hcp__append_rows(&b->lists, section, row, rows);
}

static void append_pull(builder *b, int64_t key_row, const hcp__rows *seen) {
  int32_t owner = (int32_t)seen->owner;
  hcp__append(
      &b->lists, HCP_SCHEDULE_PULLS,
      (const int64_t[]){key_row, seen->rows, peer_of(b, owner), b->base[owner] + seen->row});
}

/* ---- blocks: what becomes an entry ---- */

/* Records of ENTRIES: (query_row, query_rows, key_row, key_rows, low, high). */
static int is_full(const int64_t *x) { return x[4] <= 1 - x[1] && x[5] >= x[3] - 1; }

static int64_t entry_count(const builder *b) {
  return b->lists.list[HCP_SCHEDULE_ENTRIES].count / 6;
}

static const int64_t *entry_at(const builder *b, int64_t i) {
  return b->lists.list[HCP_SCHEDULE_ENTRIES].words + 6 * i;
}

/* Whether the entry goes on with the keys, or the queries, of the last one. */
static int join(int64_t *last, const int64_t *next) {
  if (!is_full(last) || !is_full(next)) return 0;
  int keys = last[0] == next[0] && last[1] == next[1] && last[2] + last[3] == next[2];
  int queries = last[2] == next[2] && last[3] == next[3] && last[0] + last[1] == next[0];
  if (!keys && !queries) return 0;
  if (keys)
    last[3] += next[3];
  else
    last[1] += next[1];
  last[4] = 1 - last[1];
  last[5] = last[3] - 1;
  return 1;
}

/* Joins the last two entries, if that is possible. */
static int join_last(builder *b) {
  hcp__list *list = &b->lists.list[HCP_SCHEDULE_ENTRIES];
  int64_t *end = list->words + list->count;
  if (!join(end - 12, end - 6)) return 0;
  list->count -= 6;
  return 1;
}

/* A block whose queries and keys begin at these rows. It joins entries from the first one on. */
static void append_entry(builder *b, const hcp_slice *x, int64_t query_row, int64_t key_row,
                         int64_t first) {
  int64_t queries = x->query_end - x->query_begin, keys = x->key_end - x->key_begin;
  int64_t ahead = x->key_begin - x->query_begin;
  const int64_t entry[] = {query_row,
                           queries,
                           key_row,
                           keys,
                           hcp__most(x->low - ahead, 1 - queries),
                           hcp__least(x->high - ahead, keys - 1)};
  hcp__append(&b->lists, HCP_SCHEDULE_ENTRIES, entry);
  while (!b->lists.failed && entry_count(b) >= first + 2)
    if (!join_last(b)) return;
}

/* Entries of one piece of queries, which begins at query_row, against KEYS. */
static void append_piece(builder *b, int32_t s, const hcp__piece *piece, int64_t query_row,
                         int64_t first) {
  int64_t start = piece->start, end = start + piece->rows;
  int64_t slices = hcp__slice_count(&b->view, s);
  const hcp__list *keys = &b->lists.list[KEYS];
  for (int64_t i = 0; i < slices; i++) {
    hcp_slice whole = hcp__slice_at(&b->view, s, i);
    if (whole.query_begin >= end) break; /* slices ascend by their queries */
    if (whole.query_end <= start) continue;
    for (const int64_t *k = keys->words; k < keys->words + keys->count; k += 3) {
      hcp_slice x = whole;
      if (hcp__narrow(&x, start, end, k[0], k[0] + k[1]))
        append_entry(b, &x, query_row + x.query_begin - start, k[2] + x.key_begin - k[0], first);
    }
  }
}

/* Entries of this rank's pieces of a sequence, from query_row on, against KEYS. With masks,
 * blocks of several pieces join as soon as they can; without, blocks of one piece do first. */
static void append_entries(builder *b, int32_t s, int64_t query_row) {
  hcp__piece own[2];
  const hcp__piece *pieces;
  int32_t n = hcp__pieces_of(&b->view, s, b->view.j, own, &pieces);
  int64_t first = entry_count(b), last = first;
  for (int32_t p = 0; p < n; p++) {
    last = entry_count(b);
    append_piece(b, s, &pieces[p], query_row, has_masks(b) ? first : last);
    query_row += pieces[p].rows;
  }
  int each_made_one = last == first + 1 && entry_count(b) == last + 1;
  if (each_made_one && !has_masks(b)) join_last(b);
}

static void clear_keys(builder *b) { b->lists.list[KEYS].count = 0; }

static void append_keys(builder *b, int64_t token, int64_t rows, int64_t key_row) {
  const hcp__list *list = &b->lists.list[KEYS];
  int64_t *end = list->words + list->count;
  if (list->count > 0 && end[-3] + end[-2] == token)
    end[-2] += rows;
  else
    hcp__append(&b->lists, KEYS, (const int64_t[]){token, rows, key_row});
}

/* ---- stage 0: local rows ---- */

/* Whether a slice's limits are none, or exact: then they are the same among the rows of a
 * rank, whatever tokens lie between them. Without masks each piece of queries that see nothing
 * before themselves has an entry. */
static int keeps_its_band(const builder *b, const hcp_slice *x) {
  return ((x->low == 0 && has_masks(b)) || x->low <= x->key_begin - x->query_end + 1) &&
         (x->high == 0 || x->high >= x->key_end - x->query_begin - 1);
}

/* A slice among a rank's rows of the sequence, counted as tokens. */
static hcp_slice among_rows(const builder *b, int32_t s, const hcp_slice *x, int64_t rows) {
  const hcp__view *v = &b->view;
  return (hcp_slice){hcp__rows_up_to(v, s, v->j, x->query_begin),
                     hcp__rows_up_to(v, s, v->j, x->query_end),
                     hcp__rows_up_to(v, s, v->j, x->key_begin),
                     hcp__rows_up_to(v, s, v->j, x->key_end),
                     x->low == 0 ? 0 : -rows,
                     x->high == 0 ? 0 : rows};
}

static int keep_their_bands(const builder *b, int32_t s) {
  for (int64_t i = 0; i < hcp__slice_count(&b->view, s); i++) {
    hcp_slice x = hcp__slice_at(&b->view, s, i);
    if (!keeps_its_band(b, &x)) return 0;
  }
  return 1;
}

static void local_entries(builder *b, int32_t s, int64_t row, int64_t rows) {
  int64_t first = entry_count(b);
  if (keep_their_bands(b, s)) {
    for (int64_t i = 0; i < hcp__slice_count(&b->view, s); i++) {
      hcp_slice x = hcp__slice_at(&b->view, s, i);
      x = among_rows(b, s, &x, rows);
      if (hcp__narrow(&x, 0, rows, 0, rows))
        append_entry(b, &x, row + x.query_begin, row + x.key_begin, first);
    }
    return;
  }
  hcp__piece own[2];
  const hcp__piece *pieces;
  int32_t n = hcp__pieces_of(&b->view, s, b->view.j, own, &pieces);
  int64_t key_row = row;
  clear_keys(b);
  for (int32_t p = 0; p < n; p++) {
    append_keys(b, pieces[p].start, pieces[p].rows, key_row);
    key_row += pieces[p].rows;
  }
  append_entries(b, s, row);
}

/* Padding: one more sequence, of one rank alone. Masks have no limits for it. */
static void padding_entry(builder *b, int64_t row, int64_t rows) {
  int64_t left = has_masks(b) ? rows : b->view.limits.left;
  int64_t right = has_masks(b) ? rows : b->view.limits.right;
  if (rows > 0)
    append_entry(b, &(hcp_slice){0, rows, 0, rows, -left, right}, row, row, entry_count(b));
}

/* The gradients of the keys of all entries, as parts of local rows. */
static void append_local_runs(builder *b) {
  for (int64_t e = 0; e < entry_count(b); e++) {
    const int64_t *made = entry_at(b, e);
    hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS, (const int64_t[]){made[2], made[3], e, 0});
  }
}

static void local_stage(builder *b) {
  int64_t row = 0;
  for (int32_t s = 0; s < b->view.group->sequences; s++) {
    int64_t rows = hcp__rows_of(&b->view, s, b->view.j);
    local_entries(b, s, row, rows);
    row += rows;
  }
  for (int32_t m = 0; m < b->inner; m++) {
    int64_t rows = padding_of(b, b->view.j, m);
    padding_entry(b, row, rows);
    row += rows;
  }
  append_local_runs(b);
  hcp__end_stage(&b->lists, 0, 0, row, 0);
}

/* ---- gradients on their way back ---- */

/* Where the gradients of each owner's rows lie in what is sent, those of all stages together:
 * after each other those of one seat, which go to that seat of this node. */
static void find_return_rows(builder *b) {
  const hcp__view *v = &b->view;
  for (int32_t seat = 0; seat < v->seats; seat++) {
    int64_t first = b->return_sent;
    for (int32_t node = 0; node < v->nodes; node++) {
      int32_t owner = hcp__place_at(v, node, seat);
      b->return_row[owner] = b->return_sent;
      if (owner != v->j) b->return_sent += all_rows_seen(b, all_sequences(b), owner, v->j);
    }
    if (seat != own_seat(b))
      append_peer(b, HCP_SCHEDULE_RETURN_SENDS, hcp__place_at(v, own_node(b), seat), first,
                  b->return_sent - first);
  }
}

/* Local rows that a reader saw, as a part that it returns. */
static void append_parts(builder *b, int32_t reader, int64_t part) {
  int32_t j = b->view.j;
  int64_t row = 0;
  for (int32_t s = 0; s < b->view.group->sequences; s++) {
    hcp__find_rows(&b->view, s, j, reader, &b->seen);
    for (int64_t i = 0; i < b->seen.count; i++) {
      const hcp__rows *seen = &b->seen.list[i];
      hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS,
                  (const int64_t[]){row + seen->row, seen->rows, part, b->return_received});
      b->return_received += seen->rows;
    }
    row += hcp__rows_of(&b->view, s, j);
  }
}

/* What a reader in this node saw of one owner in another node, as a part of what goes on to that
 * owner. Returns the row of the part after it. */
static int64_t append_relayed_parts(builder *b, int32_t owner, int32_t reader, int64_t part,
                                    int64_t from) {
  hcp__view *v = &b->view;
  int64_t to = b->relayed[hcp__node_of(v, owner)];
  for (int32_t s = 0; s < v->group->sequences; s++) {
    int64_t rows = hcp__find_rows(v, s, owner, hcp__own_node(v), &b->of_node);
    hcp__find_rows(v, s, owner, reader, &b->seen);
    for (int64_t i = 0; i < b->seen.count; i++) {
      const hcp__rows *seen = &b->seen.list[i];
      hcp__append(
          &b->lists, HCP_SCHEDULE_RETURN_RELAY_RUNS,
          (const int64_t[]){to + hcp__place_in(&b->of_node, seen->row), seen->rows, part, from});
      from += seen->rows;
    }
    to += rows;
  }
  return from;
}

/* What goes on to the owners in other nodes. */
static void relay_returns(builder *b) {
  const hcp__view *v = &b->view;
  for (int32_t node = 0; node < v->nodes; node++) {
    int32_t owner = hcp__place_at(v, node, own_seat(b));
    if (owner == v->j) continue;
    int64_t rows = all_rows_seen(b, all_sequences(b), owner, hcp__own_node(v));
    b->relayed[node] = b->return_relayed;
    append_peer(b, HCP_SCHEDULE_RETURN_RELAY_SENDS, owner, b->return_relayed, rows);
    b->return_relayed += rows;
    append_relayed_parts(b, owner, v->j, HCP_RELAYED_SENT, b->return_row[owner]);
  }
}

/* What comes from a reader of this node: parts of local rows, and of the rows of other nodes'
 * places with this seat. */
static void append_parts_of(builder *b, int32_t reader, int64_t local_entry_count) {
  int64_t first = b->return_received;
  for (int32_t node = 0; node < b->view.nodes; node++)
    if (node == own_node(b))
      append_parts(b, reader, local_entry_count);
    else
      b->return_received = append_relayed_parts(b, hcp__place_at(&b->view, node, own_seat(b)),
                                                reader, HCP_RELAYED_RECEIVED, b->return_received);
  append_peer(b, HCP_SCHEDULE_RETURN_RECEIVES, reader, first, b->return_received - first);
}

/* What others return is one more part after the entries of stage 0: from the readers of this node,
 * then summed from other nodes. */
static void append_returned(builder *b, int64_t local_entry_count) {
  const hcp__view *v = &b->view;
  for (int32_t seat = 0; seat < v->seats; seat++)
    if (seat != own_seat(b))
      append_parts_of(b, hcp__place_at(v, own_node(b), seat), local_entry_count);
  for (int32_t node = 0; node < v->nodes; node++) {
    int64_t first = b->return_received;
    if (node == own_node(b)) continue;
    append_parts(b, hcp__node_reader(v, node), local_entry_count);
    append_peer(b, HCP_SCHEDULE_RETURN_RELAY_RECEIVES, hcp__place_at(v, node, own_seat(b)), first,
                b->return_received - first);
  }
}

/* ---- p2p without masks: blocks around the ring of a node, one of each node after the other ----
 */

/* KEYS: the rows of `owner` that this node sees, from key_row on. */
static void find_ring_keys(builder *b, int32_t s, int32_t owner, int64_t key_row) {
  hcp__find_tokens(&b->view, s, owner, hcp__own_node(&b->view), &b->of_node);
  clear_keys(b);
  for (int64_t i = 0; i < b->of_node.count; i++) {
    append_keys(b, b->of_node.list[i].token, b->of_node.list[i].rows, key_row);
    key_row += b->of_node.list[i].rows;
  }
  hcp__join_rows(&b->of_node);
}

/* Queries against the rows of `owner` that this node sees, and the way back of their gradients.
 * Returns the key row after them. */
static int64_t ring_sequence(builder *b, int32_t s, int32_t owner, int64_t key_row) {
  int64_t entry = entry_count(b);
  int64_t rows = hcp__find_rows(&b->view, s, owner, b->view.j, &b->seen);
  find_ring_keys(b, s, owner, key_row);
  append_entries(b, s, b->base[b->view.j]);
  for (int64_t end = entry_count(b); entry < end; entry++) {
    const int64_t *made = entry_at(b, entry);
    int64_t row = hcp__row_at(&b->of_node, made[2] - key_row);
    hcp__append(
        &b->lists, HCP_SCHEDULE_RETURN_RUNS,
        (const int64_t[]){b->return_row[owner] + hcp__place_in(&b->seen, row), made[3], entry, 0});
  }
  for (int64_t i = 0; i < b->of_node.count; i++) {
    append_pull(b, key_row, &b->of_node.list[i]);
    key_row += b->of_node.list[i].rows;
  }
  b->return_row[owner] += rows;
  return key_row;
}

/* All sequences of one owner. Returns the number of keys. */
static int64_t ring_entries(builder *b, int32_t owner) {
  int64_t key_row = 0;
  b->base[b->view.j] = b->base[owner] = 0;
  for (int32_t s = 0; s < b->view.group->sequences; s++) {
    key_row = ring_sequence(b, s, owner, key_row);
    b->base[b->view.j] += hcp__rows_of(&b->view, s, b->view.j);
    b->base[owner] += hcp__rows_of(&b->view, s, owner);
  }
  return key_row;
}

/* Local rows that a node sees. Returns their number. */
static int64_t pack_for(builder *b, int32_t node) {
  int64_t row = 0, sent = 0;
  for (int32_t s = 0; s < b->view.group->sequences; s++) {
    hcp__find_rows(&b->view, s, b->view.j, hcp__node_reader(&b->view, node), &b->seen);
    for (int64_t i = 0; i < b->seen.count; i++) {
      const hcp__rows *seen = &b->seen.list[i];
      append_joined(b, HCP_SCHEDULE_PACK, sent == 0, row + seen->row, seen->rows);
      sent += seen->rows;
    }
    row += hcp__rows_of(&b->view, s, b->view.j);
  }
  return sent;
}

/* Whose rows a rank has after so many steps. */
static int32_t owner_after(const builder *b, int32_t step) {
  int32_t seats = b->view.seats, nodes = b->view.nodes;
  int32_t node = (own_node(b) + nodes - step / seats) % nodes;
  return hcp__place_at(&b->view, node, (own_seat(b) + seats - step % seats) % seats);
}

/* To the next rank of the node's ring, or of one's own rows to the node whose turn it is. */
static int32_t reader_at(const builder *b, int32_t step) {
  int32_t node = own_node(b), seat = own_seat(b), seats = b->view.seats;
  if (step % seats != 0) return hcp__place_at(&b->view, node, (seat + 1) % seats);
  return hcp__place_at(&b->view, (node + step / seats) % b->view.nodes, seat);
}

static void ring_stages(builder *b) {
  int32_t seats = b->view.seats;
  int32_t before = hcp__place_at(&b->view, own_node(b), (own_seat(b) + seats - 1) % seats);
  int64_t forwarded = 0;
  for (int32_t step = 1; step < b->view.degree; step++) {
    int32_t owner = owner_after(b, step), reader = reader_at(b, step), enters = step % seats == 0;
    int64_t sent = step == 1 || enters ? pack_for(b, hcp__node_of(&b->view, reader)) : forwarded;
    int64_t received = ring_entries(b, owner);
    append_peer(b, HCP_SCHEDULE_SENDS, reader, 0, sent);
    append_peer(b, HCP_SCHEDULE_RECEIVES, enters ? owner : before, 0, received);
    hcp__end_stage(&b->lists, sent, received, received, 0);
    forwarded = received;
  }
}

/* ---- stages of just the rows that are seen ---- */

/* Places from begin on, up to end. */
typedef struct interval {
  int32_t begin, end;
} interval;

/* Some sequences, the places whose rows arrive, and those that read here. */
typedef struct stage {
  sequences of;
  interval owners, readers;
} stage;

/* As whom k gets rows from this rank, or this rank gets those of k: as itself inside a node, else
 * for its node. -1: not from here. */
static int32_t reader_for(const builder *b, int32_t k, int32_t reader) {
  if (k == b->view.j) return -1;
  if (hcp__node_of(&b->view, k) == own_node(b)) return reader;
  return relays(b, k) ? hcp__node_reader(&b->view, hcp__node_of(&b->view, reader)) : -1;
}

/* Rows for every reader, in the order in which it has them arranged by owner. */
static int64_t append_sends(builder *b, const stage *x) {
  int32_t j = b->view.j;
  int64_t sent = 0;
  for (int32_t k = x->readers.begin; k < x->readers.end; k++) {
    int64_t first = sent, row = b->base[j];
    int32_t reader = reader_for(b, k, k);
    for (int32_t s = x->of.begin; s < x->of.end && reader >= 0; s++) {
      sent += hcp__find_rows(&b->view, s, j, reader, &b->seen);
      for (int64_t i = 0; i < b->seen.count; i++)
        /* Peers may be given the same rows: never join their segments. */
        hcp__append(&b->lists, HCP_SCHEDULE_PACK,
                    (const int64_t[]){row + b->seen.list[i].row, b->seen.list[i].rows});
      row += hcp__rows_of(&b->view, s, j);
    }
    append_peer(b, HCP_SCHEDULE_SENDS, k, first, sent - first);
  }
  return sent;
}

static int64_t append_receives(builder *b, const stage *x) {
  int64_t received = 0;
  for (int32_t k = x->owners.begin; k < x->owners.end; k++) {
    int32_t reader = reader_for(b, k, b->view.j);
    int64_t rows = reader < 0 ? 0 : all_rows_seen(b, x->of, k, reader);
    b->wire[k] = received;
    append_peer(b, HCP_SCHEDULE_RECEIVES, k, received, rows);
    received += rows;
  }
  return received;
}

/* What came from an owner in another node, for another reader of this node. Returns the row after
 * what is sent to it. */
static int64_t relay_to(builder *b, sequences of, int32_t owner, int32_t reader, int64_t sent) {
  hcp__view *v = &b->view;
  int64_t row = b->wire[owner];
  for (int32_t s = of.begin; s < of.end; s++) {
    int64_t rows = hcp__find_rows(v, s, owner, hcp__own_node(v), &b->of_node);
    sent += hcp__find_rows(v, s, owner, reader, &b->seen);
    for (int64_t i = 0; i < b->seen.count; i++)
      hcp__append(&b->lists, HCP_SCHEDULE_RELAY_PACK,
                  (const int64_t[]){row + hcp__place_in(&b->of_node, b->seen.list[i].row),
                                    b->seen.list[i].rows});
    row += rows;
  }
  return sent;
}

/* What goes on inside the node; *received counts what comes. Returns the rows that are sent. */
static int64_t append_relays(builder *b, const stage *x, int64_t *received) {
  const hcp__view *v = &b->view;
  int64_t sent = 0;
  for (int32_t seat = 0; seat < v->seats && v->nodes > 1; seat++) {
    int32_t k = hcp__place_at(v, own_node(b), seat);
    int64_t first_sent = sent, first = *received;
    for (int32_t node = 0; node < v->nodes && k != v->j; node++) {
      int32_t owner = hcp__place_at(v, node, seat);
      if (node == own_node(b) || owner < x->owners.begin || owner >= x->owners.end) continue;
      sent = relay_to(b, x->of, hcp__place_at(v, node, own_seat(b)), k, sent);
      b->wire[owner] = *received;
      *received += all_rows_seen(b, x->of, owner, v->j);
    }
    append_peer(b, HCP_SCHEDULE_RELAY_SENDS, k, first_sent, sent - first_sent);
    append_peer(b, HCP_SCHEDULE_RELAY_RECEIVES, k, first, *received - first);
  }
  return sent;
}

/* Where the next rows of an owner lie on the wire: one after the other, but for those that this
 * rank relays, which other readers see, too. */
static int64_t next_on_wire(builder *b, int32_t s, const hcp__rows *seen) {
  int32_t owner = (int32_t)seen->owner;
  int64_t wire = b->wire[owner];
  if (!relays(b, owner)) {
    b->wire[owner] += seen->rows;
    return wire;
  }
  hcp__find_rows(&b->view, s, owner, hcp__own_node(&b->view), &b->of_node);
  return wire + hcp__place_in(&b->of_node, seen->row);
}

/* The next keys: where they lie on the wire and at their owner, and where the gradients go that
 * entries from `entry` on have of them. */
static void place_keys(builder *b, int32_t s, const hcp__rows *seen, int64_t key_row,
                       int64_t entry) {
  int64_t *to = &b->return_row[seen->owner];
  append_joined(b, HCP_SCHEDULE_ARRANGE, key_row == 0, next_on_wire(b, s, seen), seen->rows);
  append_pull(b, key_row, seen);
  for (; entry < entry_count(b); entry++) {
    const int64_t *made = entry_at(b, entry);
    int64_t begin = hcp__most(key_row, made[2]),
            end = hcp__least(key_row + seen->rows, made[2] + made[3]);
    if (begin < end)
      hcp__append(&b->lists, HCP_SCHEDULE_RETURN_RUNS,
                  (const int64_t[]){*to + begin - key_row, end - begin, entry, begin - made[2]});
  }
  *to += seen->rows;
}

/* Entries of one sequence, and the way of its keys. Returns the key row after them. */
static int64_t stage_sequence(builder *b, const stage *x, int32_t s, int64_t key_row) {
  int64_t entry = entry_count(b), row = key_row;
  hcp__find_keys(&b->view, s, x->owners.begin, x->owners.end, &b->seen);
  clear_keys(b);
  for (int64_t i = 0; i < b->seen.count; i++) {
    append_keys(b, b->seen.list[i].token, b->seen.list[i].rows, row);
    row += b->seen.list[i].rows;
  }
  append_entries(b, s, b->base[b->view.j]);
  for (int64_t i = 0; i < b->seen.count; i++) {
    place_keys(b, s, &b->seen.list[i], key_row, entry);
    key_row += b->seen.list[i].rows;
  }
  return key_row;
}

/* Goes on to the sequence after s. */
static void pass_sequence(builder *b, const stage *x, int32_t s) {
  hcp__view *v = &b->view;
  int32_t j = v->j;
  for (int32_t k = x->owners.begin; k < x->owners.end; k++) {
    if (k != j) b->base[k] += hcp__rows_of(v, s, k);
    if (relays(b, k)) b->wire[k] += hcp__find_rows(v, s, k, hcp__own_node(v), &b->of_node);
  }
  b->base[j] += hcp__rows_of(v, s, j);
}

static void append_stage(builder *b, const stage *x) {
  int64_t keys = 0, sent = append_sends(b, x), received = append_receives(b, x);
  int64_t relayed = append_relays(b, x, &received);
  for (int32_t s = x->of.begin; s < x->of.end; s++) {
    keys = stage_sequence(b, x, s, keys);
    pass_sequence(b, x, s);
  }
  hcp__end_stage(&b->lists, sent, received, keys, relayed);
}

/* With masks, or where rows are read in place: one owner a stage, or the owners of one node, so
 * many before this rank's, while the one as far after it reads here. */
static void p2p_stages(builder *b) {
  const hcp__view *v = &b->view;
  int32_t each = v->nodes > 1 ? v->seats : 1, units = v->degree / each, own = v->j / each;
  for (int32_t step = v->nodes > 1 ? 0 : 1; step < units; step++) {
    int32_t owner = (own + units - step) % units * each, reader = (own + step) % units * each;
    if (step == 0 && v->seats == 1) continue; /* no others in its node */
    for (int32_t k = owner; k < owner + each; k++) b->base[k] = 0;
    b->base[v->j] = 0;
    append_stage(b, &(stage){all_sequences(b), {owner, owner + each}, {reader, reader + each}});
  }
}

/* Most rows of a sequence that the ranks of the group fetch: alike on all of them,
 * as their stages must be. */
static int64_t fetched_most(const builder *b, int32_t s) {
  int64_t length = b->view.sequences[s].length;
  if (has_masks(b)) return length;
  return hcp__least(length, 2 * (b->view.limits.left + b->view.limits.right));
}

/* Some sequences a stage, so that the next ones come while these are computed. */
static void all_gather_stages(builder *b) {
  int32_t end = b->view.group->sequences, degree = b->view.degree;
  int64_t left = 0, rows = 0;
  stage x = {{0, 0}, {0, degree}, {0, degree}};
  for (int32_t s = 0; s < end; s++) left += fetched_most(b, s);
  int64_t stages = hcp__most(1, hcp__least(left / b->stage_tokens, HCP_SCHEDULE_GATHERS_MAX));
  int64_t share = (left + stages - 1) / stages;
  while (x.of.end < end) {
    rows += fetched_most(b, x.of.end);
    left -= fetched_most(b, x.of.end++);
    if (x.of.end < end && (rows < share || left < b->stage_tokens)) continue;
    append_stage(b, &x);
    x.of.begin = x.of.end;
    rows = 0;
  }
}

/* ---- rows for heads: the exchange before stage 0 ---- */

/* Rows that the k-th rank of the group has before the exchange. */
static int64_t rank_rows(const builder *b, int32_t k) {
  return hcp__rank_rows(b->view.plan, b->view.group, k) +
         hcp__padding(b->view.plan, b->view.group, k);
}

/* Rows that each neighbour gives; b->wire[m] is where those of neighbour m start. */
static void head_receives(builder *b) {
  int32_t first = b->view.j * b->inner;
  int64_t given = 0;
  for (int32_t m = 0; m < b->inner; m++) {
    int64_t rows = rank_rows(b, first + m);
    b->wire[m] = given;
    hcp__append(&b->lists, HCP_SCHEDULE_HEAD_RECEIVES,
                (const int64_t[]){b->view.group->first_rank + first + m, given, rows});
    given += rows;
  }
}

/* The place's next rows are the next ones of neighbour m. Returns the row after them. */
static int64_t exchange_rows(builder *b, int32_t m, int64_t row, int64_t rows) {
  if (rows == 0) return row;
  hcp__append(&b->lists, HEAD_ROWS, (const int64_t[]){b->wire[m], row, rows});
  hcp__append_rows(&b->lists, HCP_SCHEDULE_GATHER, b->wire[m], rows);
  b->wire[m] += rows;
  return row + rows;
}

/* The place's next rows are those of neighbour after neighbour, in chunks from this one on. Returns
 * the row after them. */
static int64_t exchange_chunks(builder *b, int32_t s, int64_t chunk, int32_t descending,
                               int64_t row) {
  int32_t sequence = b->view.plan->sequences[b->view.group->first_sequence + s];
  hcp__zigzag z = hcp__zigzag_of(b->view.plan, sequence, b->view.group->degree);
  int64_t start = hcp__chunk_start(&z, chunk);
  for (int32_t i = 0; i < b->inner; i++) {
    int64_t end = hcp__chunk_start(&z, chunk + i + 1);
    row = exchange_rows(b, descending ? b->inner - 1 - i : i, row, end - start);
    start = end;
  }
  return row;
}

/* The place's rows of a sequence, from row on. Under masks all ranks are neighbours, and hold what
 * these cut. Returns the row after them. */
static int64_t exchange_sequence(builder *b, int32_t s, int64_t row) {
  const hcp_plan *plan = b->view.plan;
  int32_t sequence = plan->sequences[b->view.group->first_sequence + s];
  const hcp__cut *cut = plan->cuts == NULL ? NULL : plan->cuts[sequence];
  if (cut == NULL) {
    int64_t chunk = (int64_t)b->view.j * b->inner, chunks = 2 * (int64_t)b->view.group->degree;
    row = exchange_chunks(b, s, chunk, 0, row);
    return exchange_chunks(b, s, chunks - chunk - b->inner, 1, row);
  }
  for (int32_t c = 0; c < cut->count; c++)
    row = exchange_rows(b, cut->chunks[c].place, row, cut->chunks[c].rows);
  return row;
}

static void exchange_heads(builder *b) {
  int64_t row = 0;
  head_receives(b);
  for (int32_t s = 0; s < b->view.group->sequences; s++) row = exchange_sequence(b, s, row);
  for (int32_t m = 0; m < b->inner; m++)
    row = exchange_rows(b, m, row, padding_of(b, b->view.j, m));
  hcp__sort_by(&b->lists, HEAD_ROWS, 0);
  for (int64_t i = 0; i < hcp__records(&b->lists, HEAD_ROWS); i++) {
    const int64_t *record = hcp__record(&b->lists, HEAD_ROWS, i);
    hcp__append_rows(&b->lists, HCP_SCHEDULE_SCATTER, record[1], record[2]);
  }
}

/* ---- the table ---- */

static void append_output_runs(builder *b) {
  for (int64_t e = 0; e < entry_count(b); e++) {
    const int64_t *made = entry_at(b, e);
    hcp__append(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS, (const int64_t[]){made[0], made[1], e, 0});
  }
}

static void stages(builder *b, hcp_comm_type comm_type) {
  if (comm_type == HCP_COMM_A2A || comm_type == HCP_COMM_A2A_P2P) exchange_heads(b);
  local_stage(b);
  int64_t local_entry_count = entry_count(b);
  if (b->view.degree > 1) {
    find_return_rows(b);
    relay_returns(b);
    if (comm_type == HCP_COMM_ALL_GATHER)
      all_gather_stages(b);
    else if (has_masks(b) || b->in_place) /* nobody passes on what only the next ranks see */
      p2p_stages(b);
    else
      ring_stages(b);
    append_returned(b, local_entry_count);
  }
  append_output_runs(b);
}

/* The ranks of the group that compare their calls. */
static void append_callers(hcp__lists *lists, const hcp_plan *plan, const hcp_group *group) {
  for (int32_t j = 0; group->degree > 2 && j < group->degree; j++)
    if (hcp__rank_rows(plan, group, j) + hcp__padding(plan, group, j) > 0)
      hcp__append(lists, HCP_SCHEDULE_CALLERS, (const int64_t[]){group->first_rank + j});
}

static hcp_status group_stages(builder *b, hcp_comm_type comm_type, hcp_error *err) {
  size_t ranks = (size_t)b->view.group->degree;
  int64_t *places = calloc(4 * ranks, sizeof *places);
  hcp_status status = hcp__view_open(&b->view, err);
  if (status == HCP_OK && places == NULL)
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for a schedule");
  if (status == HCP_OK) {
    b->wire = places;
    b->base = places + ranks;
    b->return_row = b->base + ranks;
    b->relayed = b->return_row + ranks;
    stages(b, comm_type);
    for (int32_t k = 0; k < b->view.degree; k++)
      hcp__append(&b->lists, HCP_SCHEDULE_KEY_OWNERS,
                  (const int64_t[]){peer_of(b, k), place_rows(b, k)});
    append_callers(&b->lists, b->view.plan, b->view.group);
  }
  hcp__view_close(&b->view);
  free(b->seen.list);
  free(b->of_node.list);
  free(places);
  return status;
}

static hcp_status build(builder *b, hcp_comm_type comm_type, hcp_table **schedule, hcp_error *err) {
  const hcp__view *v = &b->view;
  int64_t rows = 0;
  hcp_status status = HCP_OK;
  if (v->group == NULL) { /* no rows: one stage of nothing */
    hcp__end_stage(&b->lists, 0, 0, 0, 0);
  } else {
    status = group_stages(b, comm_type, err);
    rows = rank_rows(b, v->j * b->inner + b->lane);
  }
  if (status != HCP_OK) return status;
  hcp__append(&b->lists, HCP_SCHEDULE_SIZES,
              (const int64_t[]){rows, b->return_sent, b->return_received, b->return_relayed,
                                comm_type, b->inner, v->limits.left, v->limits.right});
  hcp__align_runs(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_RETURN_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_RETURN_RELAY_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_LOCAL_RUNS);
  return hcp__table_create(&b->lists, HCP_SCHEDULE_SECTION_COUNT, schedule, err);
}

/* A limit past the end of every sequence is none. */
static int64_t limit_of(int64_t tokens) {
  return tokens < 0 ? HCP__LENGTH_MAX : hcp__least(tokens, HCP__LENGTH_MAX);
}

/* Who exchanges heads with whom, and this rank's place after it. */
static hcp_status place(builder *b, int32_t rank, hcp_comm_type comm_type, int32_t inner,
                        int32_t by_nodes, hcp_error *err) {
  hcp__view *v = &b->view;
  int32_t ranks = v->group == NULL ? 1 : v->group->degree;
  if (comm_type == HCP_COMM_A2A_P2P && (inner < 1 || (v->group != NULL && ranks % inner != 0)))
    return hcp__fail(err, HCP_INVALID, "inner is %d, expected a divisor of the group's degree, %d",
                     inner, ranks);
  b->inner = comm_type == HCP_COMM_A2A_P2P ? inner : comm_type == HCP_COMM_A2A ? ranks : 1;
  v->degree = v->seats = ranks / b->inner;
  v->nodes = 1;
  if (v->group == NULL) return HCP_OK;
  v->j = (rank - v->group->first_rank) / b->inner;
  b->lane = (rank - v->group->first_rank) % b->inner;
  if (!by_nodes) return HCP_OK;
  int32_t node = hcp__whole_nodes(v->plan, v->group);
  if (node == 0 || node % b->inner != 0) return HCP_OK;
  v->seats = node / b->inner;
  v->nodes = v->degree / v->seats;
  return HCP_OK;
}

/* The masks of a plan that the layer is under; *masks is NULL in a plan without. */
static hcp_status masks_of(const hcp_plan *plan, const hcp_mask *mask, hcp_comm_type comm_type,
                           const hcp_masks **masks, hcp_error *err) {
  *masks = NULL;
  if (plan->mask_count == 0) return HCP_OK;
  if (comm_type == HCP_COMM_A2A_P2P)
    return hcp__fail(err, HCP_INVALID,
                     "comm_type is '%s' in a plan with masks, expected '%s', '%s' or '%s'",
                     hcp_comm_type_name(comm_type), hcp_comm_type_name(HCP_COMM_ALL_GATHER),
                     hcp_comm_type_name(HCP_COMM_P2P), hcp_comm_type_name(HCP_COMM_A2A));
  if (mask->index < 0 || mask->index >= plan->mask_count)
    return hcp__fail(err, HCP_INVALID, "mask.index is %d, expected 0 to %d", mask->index,
                     plan->mask_count - 1);
  *masks = &plan->masks[mask->index];
  return HCP_OK;
}

hcp_status hcp_schedule_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                               hcp_comm_type comm_type, int32_t inner, const hcp_mask *mask,
                               int64_t stage_tokens, int32_t by_nodes, int32_t in_place,
                               hcp_table **schedule, hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  if (hcp_comm_type_name(comm_type) == NULL)
    return hcp__fail(err, HCP_INVALID, "comm_type is %d, expected 0 to %d", (int)comm_type,
                     HCP_COMM_TYPE_COUNT - 1);
  if (stage_tokens < 1)
    return hcp__fail(err, HCP_INVALID, "stage_tokens is %lld, expected >= 1",
                     (long long)stage_tokens);
  builder b = {.stage_tokens = stage_tokens, .in_place = in_place};
  b.view.lists = &b.lists;
  b.view.plan = plan;
  b.view.group = hcp__group_of(plan, micro_batch, rank);
  b.view.limits = (hcp_mask){limit_of(mask->left), limit_of(mask->right), mask->index};
  status = masks_of(plan, mask, comm_type, &b.view.masks, err);
  if (status != HCP_OK) return status;
  status = place(&b, rank, comm_type, inner, by_nodes, err);
  if (status != HCP_OK) return status;
  hcp__lists_init(&b.lists, widths, LIST_COUNT);
  b.lists.header_words = HCP_SCHEDULE_HEADER_WORDS;
  status = build(&b, comm_type, schedule, err);
  hcp__lists_release(&b.lists);
  return status;
}
