/* schedule.c - the steps of one attention layer on one rank.
 *
 * A rank's rows of a sequence, in local order, are in token order, and lie in
 * at most two pieces of consecutive tokens. A piece of queries sees a piece of
 * keys through a band, and so consecutive rows of it. Without a window much of this
 * joins: local queries against local keys are one causal square, and of another
 * rank's rows a query piece sees a prefix.
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

#include "internal.h"

/* A scratch list after the sections: (wire row, row, rows) of the rows that came. */
enum { HEAD_ROWS = HCP_SCHEDULE_SECTION_COUNT, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_SCHEDULE_SECTIONS(WIDTH)
#undef WIDTH
        3};

typedef struct builder {
  const hcp_plan *plan;
  const hcp_group *group;
  int32_t inner;  /* neighbours that exchange heads, 1: none            */
  int32_t degree; /* places of the group: its ranks / inner             */
  int32_t j;      /* this rank's place                                  */
  int32_t lane;   /* and its own among the neighbours that have it      */
  int32_t seats;  /* places of a node; all, if borders do not count     */
  int32_t nodes;  /* of the group: degree / seats                       */
  hcp_mask mask;  /* no limit is HCP__LENGTH_MAX                        */
  int64_t stage_rows;
  hcp__lists lists;
  int64_t home_sent, home_received; /* rows so far */
  int64_t *wire; /* where the next row of each rank lies on the wire          */
  int64_t *base; /* where the present sequence starts among each place's rows */
  int64_t *home; /* where the gradient of the next row of each place travels  */
  int64_t *relayed;     /* where what goes on to each node starts */
  int64_t home_relayed; /* rows so far */
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

static int64_t length_of(const builder *b, int32_t index) {
  return b->plan->lengths[b->plan->sequences[b->group->first_sequence + index]];
}

static int32_t pieces_of(const builder *b, int32_t index, int32_t k, hcp__piece pieces[2]) {
  return hcp__pieces(length_of(b, index), b->degree, k, pieces);
}

static int64_t rows_of(const builder *b, int32_t index, int32_t k) {
  int64_t length = length_of(b, index);
  return hcp__rows_before(length, b->degree, k, length);
}

static int64_t block_rows(const builder *b, int32_t k) {
  int64_t rows = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) rows += rows_of(b, s, k);
  return rows;
}

/* Of neighbour m of place k. */
static int64_t padding_of(const builder *b, int32_t k, int32_t m) {
  return hcp__padding(b->plan, b->group, k * b->inner + m);
}

/* All rows of place k, padding included. */
static int64_t place_rows(const builder *b, int32_t k) {
  int64_t rows = block_rows(b, k);
  for (int32_t m = 0; m < b->inner; m++) rows += padding_of(b, k, m);
  return rows;
}

/* ---- who sees what ---- */

/* Tokens, or rows of a list of pieces laid end to end. */
typedef struct range {
  int64_t begin, end;
} range;

enum { PIECES_MAX = 3, RANGES_MAX = 2 * PIECES_MAX };

typedef struct ranges {
  range range[RANGES_MAX]; /* ascending; they do not touch */
  int32_t n;
} ranges;

/* Tokens of the keys that some of the queries see, empty where end <= begin. */
static range tokens_seen(const builder *b, hcp__piece queries, hcp__piece keys) {
  return (range){hcp__most(keys.start, queries.start - b->mask.left),
                 hcp__least(keys.start + keys.rows, queries.start + queries.rows + b->mask.right)};
}

static void add_range(ranges *list, range added) {
  range *last = list->n > 0 ? &list->range[list->n - 1] : NULL;
  if (last != NULL && added.begin <= last->end)
    last->end = hcp__most(last->end, added.end);
  else
    list->range[list->n++] = added;
}

/* Rows of the key pieces that any of the query pieces sees. */
static ranges rows_seen(const builder *b, const hcp__piece *queries, int32_t query_pieces,
                        const hcp__piece *keys, int32_t key_pieces) {
  ranges seen = {.n = 0};
  int64_t row = 0;
  for (int32_t k = 0; k < key_pieces; k++) {
    for (int32_t q = 0; q < query_pieces; q++) {
      range tokens = tokens_seen(b, queries[q], keys[k]);
      int64_t shift = row - keys[k].start;
      if (tokens.begin < tokens.end)
        add_range(&seen, (range){tokens.begin + shift, tokens.end + shift});
    }
    row += keys[k].rows;
  }
  return seen;
}

/* Rows of `owner` that any query of `reader` sees. */
static ranges seen_by(const builder *b, int32_t index, int32_t owner, int32_t reader) {
  hcp__piece queries[2], keys[2];
  int32_t query_pieces = pieces_of(b, index, reader, queries);
  int32_t key_pieces = pieces_of(b, index, owner, keys);
  return rows_seen(b, queries, query_pieces, keys, key_pieces);
}

/* Rows of `owner` that any query of a node sees. */
static ranges seen_in(const builder *b, int32_t index, int32_t owner, int32_t node) {
  hcp__piece queries[2], keys[2];
  int32_t query_pieces = hcp__pieces(length_of(b, index), b->nodes, node, queries);
  int32_t key_pieces = pieces_of(b, index, owner, keys);
  return rows_seen(b, queries, query_pieces, keys, key_pieces);
}

static int32_t node_of(const builder *b, int32_t k) { return k / b->seats; }
static int32_t seat_of(const builder *b, int32_t k) { return k % b->seats; }
static int32_t place_at(const builder *b, int32_t node, int32_t seat) {
  return node * b->seats + seat;
}

/* Whether rows of k come to this rank's node by this rank. */
static int relays(const builder *b, int32_t k) {
  return node_of(b, k) != node_of(b, b->j) && seat_of(b, k) == seat_of(b, b->j);
}

static int64_t rows_in(const ranges *list) {
  int64_t rows = 0;
  for (int32_t i = 0; i < list->n; i++) rows += list->range[i].end - list->range[i].begin;
  return rows;
}

/* Where a row that the ranges contain lies when they are laid end to end. */
static int64_t place_in(const ranges *list, int64_t row) {
  int64_t place = 0;
  for (int32_t i = 0; i < list->n && list->range[i].begin <= row; i++)
    place += hcp__least(row, list->range[i].end) - list->range[i].begin;
  return place;
}

/* The row that lies at a place of the ranges laid end to end. */
static int64_t row_at(const ranges *list, int64_t place) {
  for (int32_t i = 0; i < list->n; i++) {
    int64_t rows = list->range[i].end - list->range[i].begin;
    if (place < rows) return list->range[i].begin + place;
    place -= rows;
  }
  return -1;
}

/* Sequences of the group from index begin on, up to end. */
typedef struct sequences {
  int32_t begin, end;
} sequences;

static sequences all_sequences(const builder *b) { return (sequences){0, b->group->sequences}; }

static int64_t all_rows_seen(const builder *b, sequences of, int32_t owner, int32_t reader) {
  int64_t rows = 0;
  for (int32_t s = of.begin; s < of.end; s++) {
    ranges seen = seen_by(b, s, owner, reader);
    rows += rows_in(&seen);
  }
  return rows;
}

static int64_t all_rows_seen_in(const builder *b, sequences of, int32_t owner, int32_t node) {
  int64_t rows = 0;
  for (int32_t s = of.begin; s < of.end; s++) {
    ranges seen = seen_in(b, s, owner, node);
    rows += rows_in(&seen);
  }
  return rows;
}

/* ---- records ---- */

static int32_t peer_of(const builder *b, int32_t k) {
  return b->group->first_rank + k * b->inner + b->lane;
}

static void append_peer(builder *b, int32_t section, int32_t k, int64_t row, int64_t rows) {
  if (rows > 0) hcp__append(&b->lists, section, (const int64_t[]){peer_of(b, k), row, rows});
}

static void append_home_run(builder *b, int64_t row, int64_t rows, int64_t entry,
                            int64_t part_row) {
  if (rows > 0)
    hcp__append(&b->lists, HCP_SCHEDULE_HOME_RUNS, (const int64_t[]){row, rows, entry, part_row});
}

static void append_pull(builder *b, int64_t row, int64_t rows, int32_t k, int64_t peer_row) {
  if (rows > 0)
    hcp__append(&b->lists, HCP_SCHEDULE_PULLS,
                (const int64_t[]){row, rows, peer_of(b, k), peer_row});
}

/* ---- blocks: what becomes an entry ---- */

typedef struct block {
  int64_t query_row, query_rows, key_row, key_rows;
  int64_t low, high; /* query q sees key k when low <= k - q <= high */
} block;

static int is_full(const block *x) {
  return x->low <= 1 - x->query_rows && x->high >= x->key_rows - 1;
}

static void append_entry(builder *b, const block *x) {
  int64_t entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
  int64_t low = hcp__most(x->low, 1 - x->query_rows), high = hcp__least(x->high, x->key_rows - 1);
  hcp__append(&b->lists, HCP_SCHEDULE_ENTRIES,
              (const int64_t[]){x->query_row, x->query_rows, x->key_row, x->key_rows, low, high});
  hcp__append(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS,
              (const int64_t[]){x->query_row, x->query_rows, entry, 0});
}

/* Queries and keys of two pieces that meet at all: each query of the block sees
 * some of its keys, and each key is seen. */
static block block_of(const builder *b, hcp__piece queries, hcp__piece keys, range tokens) {
  int64_t begin = hcp__most(queries.start, tokens.begin - b->mask.right);
  int64_t end = hcp__least(queries.start + queries.rows, tokens.end + b->mask.left);
  int64_t ahead = tokens.begin - begin;
  return (block){begin - queries.start,     end - begin,           tokens.begin - keys.start,
                 tokens.end - tokens.begin, -b->mask.left - ahead, b->mask.right - ahead};
}

static int join_keys(block *left, const block *right) {
  if (left->query_row != right->query_row || left->query_rows != right->query_rows ||
      left->key_row + left->key_rows != right->key_row || !is_full(left) || !is_full(right))
    return 0;
  left->key_rows += right->key_rows;
  left->high = left->key_rows;
  return 1;
}

static int join_queries(block *upper, const block *lower) {
  if (upper->key_row != lower->key_row || upper->key_rows != lower->key_rows ||
      upper->query_row + upper->query_rows != lower->query_row || !is_full(upper) ||
      !is_full(lower))
    return 0;
  upper->query_rows += lower->query_rows;
  upper->low = -upper->query_rows;
  return 1;
}

/* Entries of query pieces, whose rows start at query_row, against those rows of
 * the key pieces that `present` names, which start at key_row. */
static void append_entries(builder *b, int64_t query_row, const hcp__piece *queries,
                           int32_t query_pieces, int64_t key_row, const hcp__piece *keys,
                           int32_t key_pieces, const ranges *present) {
  block blocks[2 * PIECES_MAX];
  int32_t n = 0;
  for (int32_t q = 0; q < query_pieces; q++) {
    int64_t row = 0;
    int32_t first = n;
    for (int32_t k = 0; k < key_pieces; k++) {
      range tokens = tokens_seen(b, queries[q], keys[k]);
      if (tokens.begin < tokens.end) {
        block found = block_of(b, queries[q], keys[k], tokens);
        found.query_row += query_row;
        found.key_row = key_row + place_in(present, row + found.key_row);
        if (n == first || !join_keys(&blocks[n - 1], &found)) blocks[n++] = found;
      }
      row += keys[k].rows;
    }
    if (first == 1 && n == 2 && join_queries(&blocks[0], &blocks[1])) n = 1;
    query_row += queries[q].rows;
  }
  for (int32_t i = 0; i < n; i++) append_entry(b, &blocks[i]);
}

/* ---- stage 0: local rows ---- */

static void local_entries(builder *b, int32_t index, int64_t row) {
  hcp__piece pieces[2];
  int64_t rows = rows_of(b, index, b->j);
  int32_t n = pieces_of(b, index, b->j, pieces);
  if (n > 0 && b->mask.right == 0 && b->mask.left >= length_of(b, index) - 1)
    append_entry(b, &(block){row, rows, row, rows, -rows, 0}); /* whatever lies between pieces */
  else
    append_entries(b, row, pieces, n, row, pieces, n, &(ranges){{{0, rows}}, 1});
}

/* Padding: one more sequence, of one rank alone. */
static void padding_entry(builder *b, int64_t row, int64_t rows) {
  if (rows > 0) append_entry(b, &(block){row, rows, row, rows, -b->mask.left, b->mask.right});
}

/* The gradients of the keys of all entries, as parts of local rows. */
static void append_local_runs(builder *b) {
  for (int64_t e = 0; e < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); e++) {
    const int64_t *made = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, e);
    hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS, (const int64_t[]){made[2], made[3], e, 0});
  }
}

static void local_stage(builder *b) {
  int64_t row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    local_entries(b, s, row);
    row += rows_of(b, s, b->j);
  }
  for (int32_t m = 0; m < b->inner; m++) {
    padding_entry(b, row, padding_of(b, b->j, m));
    row += padding_of(b, b->j, m);
  }
  append_local_runs(b);
  hcp__end_stage(&b->lists, 0, 0, row, 0);
}

/* ---- gradients on their way home ---- */

/* Where the gradients of each owner's rows lie in what is sent, those of all stages together:
 * after each other those of one seat, which go to that seat of this node. */
static void find_homes(builder *b) {
  for (int32_t seat = 0; seat < b->seats; seat++) {
    int64_t first = b->home_sent;
    for (int32_t node = 0; node < b->nodes; node++) {
      int32_t owner = place_at(b, node, seat);
      b->home[owner] = b->home_sent;
      if (owner != b->j) b->home_sent += all_rows_seen(b, all_sequences(b), owner, b->j);
    }
    if (seat != seat_of(b, b->j))
      append_peer(b, HCP_SCHEDULE_HOME_SENDS, place_at(b, node_of(b, b->j), seat), first,
                  b->home_sent - first);
  }
}

/* Parts of local rows that came home together, from row `from` on: `seen` of a sequence that
 * starts at row. Returns the row after them. */
static int64_t append_parts(builder *b, int64_t row, const ranges *seen, int64_t part,
                            int64_t from) {
  for (int32_t i = 0; i < seen->n; i++) {
    int64_t rows = seen->range[i].end - seen->range[i].begin;
    hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS,
                (const int64_t[]){row + seen->range[i].begin, rows, part, from});
    from += rows;
  }
  return from;
}

/* What a reader in this node saw of one owner in another node, as a part of what goes on to that
 * owner from row `to` on. Returns the row of the part after it. */
static int64_t append_relayed_parts(builder *b, int32_t owner, int32_t reader, int64_t to,
                                    int64_t part, int64_t from) {
  for (int32_t s = 0; s < b->group->sequences; s++) {
    ranges own = seen_by(b, s, owner, reader), all = seen_in(b, s, owner, node_of(b, b->j));
    for (int32_t i = 0; i < own.n; i++) {
      int64_t rows = own.range[i].end - own.range[i].begin;
      hcp__append(&b->lists, HCP_SCHEDULE_HOME_RELAY_RUNS,
                  (const int64_t[]){to + place_in(&all, own.range[i].begin), rows, part, from});
      from += rows;
    }
    to += rows_in(&all);
  }
  return from;
}

/* What comes from a reader of this node: parts of local rows, and of the rows of other nodes'
 * places with this seat. */
static void append_parts_of(builder *b, int32_t reader, int64_t local_entry_count) {
  int64_t first = b->home_received;
  for (int32_t node = 0; node < b->nodes; node++) {
    int32_t owner = place_at(b, node, seat_of(b, b->j));
    int64_t row = 0;
    if (owner != b->j) {
      b->home_received = append_relayed_parts(b, owner, reader, b->relayed[node],
                                              HCP_RELAYED_RECEIVED, b->home_received);
      continue;
    }
    for (int32_t s = 0; s < b->group->sequences; s++) {
      ranges seen = seen_by(b, s, owner, reader);
      b->home_received = append_parts(b, row, &seen, local_entry_count, b->home_received);
      row += rows_of(b, s, owner);
    }
  }
  append_peer(b, HCP_SCHEDULE_HOME_RECEIVES, reader, first, b->home_received - first);
}

/* What goes on to the owners in other nodes. */
static void relay_homes(builder *b) {
  for (int32_t node = 0; node < b->nodes; node++) {
    int32_t owner = place_at(b, node, seat_of(b, b->j));
    int64_t rows =
        owner == b->j ? 0 : all_rows_seen_in(b, all_sequences(b), owner, node_of(b, b->j));
    b->relayed[node] = b->home_relayed;
    append_peer(b, HCP_SCHEDULE_HOME_RELAY_SENDS, owner, b->home_relayed, rows);
    b->home_relayed += rows;
    if (owner != b->j)
      append_relayed_parts(b, owner, b->j, b->relayed[node], HCP_RELAYED_SENT, b->home[owner]);
  }
}

/* What comes home is one more part after the entries of stage 0: from the readers of this node,
 * then summed from other nodes. */
static void append_homecoming(builder *b, int64_t local_entry_count) {
  for (int32_t seat = 0; seat < b->seats; seat++)
    if (seat != seat_of(b, b->j))
      append_parts_of(b, place_at(b, node_of(b, b->j), seat), local_entry_count);
  for (int32_t node = 0; node < b->nodes; node++) {
    int64_t row = 0, first = b->home_received;
    if (node == node_of(b, b->j)) continue;
    for (int32_t s = 0; s < b->group->sequences; s++) {
      ranges seen = seen_in(b, s, b->j, node);
      b->home_received = append_parts(b, row, &seen, local_entry_count, b->home_received);
      row += rows_of(b, s, b->j);
    }
    append_peer(b, HCP_SCHEDULE_HOME_RELAY_RECEIVES, place_at(b, node, seat_of(b, b->j)), first,
                b->home_received - first);
  }
}

/* ---- p2p: blocks around the ring of a node, one of each node after the other ---- */

/* Queries against the rows of `owner` that this node sees, and the way home of their gradients.
 * Returns the number of these rows. */
static int64_t ring_entries(builder *b, int32_t owner) {
  int64_t query_row = 0, key_row = 0, home = b->home[owner], owner_row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    hcp__piece queries[2], keys[2];
    int32_t query_pieces = pieces_of(b, s, b->j, queries),
            key_pieces = pieces_of(b, s, owner, keys);
    int64_t entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
    ranges seen = seen_by(b, s, owner, b->j), present = seen_in(b, s, owner, node_of(b, b->j));
    append_entries(b, query_row, queries, query_pieces, key_row, keys, key_pieces, &present);
    for (; entry < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); entry++) {
      const int64_t *made = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, entry);
      int64_t row = row_at(&present, made[2] - key_row);
      append_home_run(b, home + place_in(&seen, row), made[3], entry, 0);
    }
    for (int32_t i = 0; i < present.n; i++) {
      int64_t rows = present.range[i].end - present.range[i].begin;
      append_pull(b, key_row, rows, owner, owner_row + present.range[i].begin);
      key_row += rows;
    }
    home += rows_in(&seen);
    query_row += rows_of(b, s, b->j);
    owner_row += rows_of(b, s, owner);
  }
  return key_row;
}

/* Local rows that a node sees. Returns their number. */
static int64_t pack_for(builder *b, int32_t node) {
  int64_t row = 0, sent = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    ranges seen = seen_in(b, s, b->j, node);
    for (int32_t i = 0; i < seen.n; i++) {
      int64_t rows = seen.range[i].end - seen.range[i].begin;
      const int64_t record[] = {row + seen.range[i].begin, rows};
      if (sent == 0) /* never join what a stage before sent */
        hcp__append(&b->lists, HCP_SCHEDULE_PACK, record);
      else
        hcp__append_rows(&b->lists, HCP_SCHEDULE_PACK, record[0], record[1]);
      sent += rows;
    }
    row += rows_of(b, s, b->j);
  }
  return sent;
}

/* Whose rows a rank has after so many steps. */
static int32_t owner_after(const builder *b, int32_t step) {
  int32_t node = (node_of(b, b->j) + b->nodes - step / b->seats) % b->nodes;
  return place_at(b, node, (seat_of(b, b->j) + b->seats - step % b->seats) % b->seats);
}

/* To the next rank of the node's ring, or of one's own rows to the node whose turn it is. */
static int32_t reader_at(const builder *b, int32_t step) {
  int32_t node = node_of(b, b->j), seat = seat_of(b, b->j);
  if (step % b->seats != 0) return place_at(b, node, (seat + 1) % b->seats);
  return place_at(b, (node + step / b->seats) % b->nodes, seat);
}

static void p2p_stages(builder *b) {
  int32_t node = node_of(b, b->j);
  int64_t before = 0;
  for (int32_t step = 1; step < b->degree; step++) {
    int32_t owner = owner_after(b, step), reader = reader_at(b, step),
            enters = step % b->seats == 0;
    int64_t sent = step == 1 || enters ? pack_for(b, node_of(b, reader)) : before;
    int64_t received = ring_entries(b, owner);
    append_peer(b, HCP_SCHEDULE_SENDS, reader, 0, sent);
    append_peer(b, HCP_SCHEDULE_RECEIVES,
                enters ? owner : place_at(b, node, (seat_of(b, b->j) + b->seats - 1) % b->seats), 0,
                received);
    hcp__end_stage(&b->lists, sent, received, received, 0);
    before = received;
  }
}

/* ---- all_gather: just the rows that are seen, some sequences a stage ---- */

/* The next of the rows that are packed: those of a sequence that ranges name. Returns the row
 * after them. */
static int64_t pack_rows(builder *b, int32_t section, const ranges *seen, int64_t row,
                         int64_t sent) {
  for (int32_t i = 0; i < seen->n; i++) {
    int64_t rows = seen->range[i].end - seen->range[i].begin;
    /* Peers may be given the same rows: never join their segments. */
    hcp__append(&b->lists, section, (const int64_t[]){row + seen->range[i].begin, rows});
    sent += rows;
  }
  return sent;
}

/* Rows for every reader in this node, and for every other node, in the order in which they read
 * them. */
static int64_t gather_sends(builder *b, sequences of) {
  int64_t sent = 0;
  for (int32_t k = 0; k < b->degree; k++) {
    int64_t first = sent, row = b->base[b->j];
    int inside = node_of(b, k) == node_of(b, b->j);
    if (k == b->j || (!inside && !relays(b, k))) continue;
    for (int32_t s = of.begin; s < of.end; s++) {
      ranges seen = inside ? seen_by(b, s, b->j, k) : seen_in(b, s, b->j, node_of(b, k));
      sent = pack_rows(b, HCP_SCHEDULE_PACK, &seen, row, sent);
      row += rows_of(b, s, b->j);
    }
    append_peer(b, HCP_SCHEDULE_SENDS, k, first, sent - first);
  }
  return sent;
}

static int64_t gather_receives(builder *b, sequences of) {
  int64_t received = 0;
  for (int32_t k = 0; k < b->degree; k++) {
    int inside = k != b->j && node_of(b, k) == node_of(b, b->j);
    int64_t rows = inside         ? all_rows_seen(b, of, k, b->j)
                   : relays(b, k) ? all_rows_seen_in(b, of, k, node_of(b, b->j))
                                  : 0;
    b->wire[k] = received;
    append_peer(b, HCP_SCHEDULE_RECEIVES, k, received, rows);
    received += rows;
  }
  return received;
}

/* What came from other nodes, for another reader of this node. Returns the row after what is sent
 * to it. */
static int64_t relay_to(builder *b, sequences of, int32_t reader, int64_t sent) {
  for (int32_t node = 0; node < b->nodes; node++) {
    int32_t owner = place_at(b, node, seat_of(b, b->j));
    int64_t row = b->wire[owner];
    if (owner == b->j) continue;
    for (int32_t s = of.begin; s < of.end; s++) {
      ranges all = seen_in(b, s, owner, node_of(b, b->j)), own = seen_by(b, s, owner, reader);
      for (int32_t i = 0; i < own.n; i++) {
        int64_t rows = own.range[i].end - own.range[i].begin;
        hcp__append(&b->lists, HCP_SCHEDULE_RELAY_PACK,
                    (const int64_t[]){row + place_in(&all, own.range[i].begin), rows});
        sent += rows;
      }
      row += rows_in(&all);
    }
  }
  return sent;
}

/* What goes on inside the node; *received counts what comes. Returns the rows that are sent. */
static int64_t gather_relays(builder *b, sequences of, int64_t *received) {
  int64_t sent = 0;
  for (int32_t seat = 0; seat < b->seats && b->nodes > 1; seat++) {
    int32_t k = place_at(b, node_of(b, b->j), seat);
    int64_t first_sent = sent, first = *received;
    if (k == b->j) continue;
    sent = relay_to(b, of, k, sent);
    append_peer(b, HCP_SCHEDULE_RELAY_SENDS, k, first_sent, sent - first_sent);
    for (int32_t node = 0; node < b->nodes; node++) {
      int32_t owner = place_at(b, node, seat);
      if (owner == k) continue;
      b->wire[owner] = *received;
      *received += all_rows_seen(b, of, owner, b->j);
    }
    append_peer(b, HCP_SCHEDULE_RELAY_RECEIVES, k, first, *received - first);
  }
  return sent;
}

/* The next rows of an owner in key order: where they lie on the wire, and which
 * entries from first_entry on see which of them. */
static void place_keys(builder *b, int32_t owner, int64_t wire, int64_t key_row, int64_t rows,
                       int64_t first_entry) {
  if (key_row == 0) /* never join what a stage before received */
    hcp__append(&b->lists, HCP_SCHEDULE_ARRANGE, (const int64_t[]){wire, rows});
  else
    hcp__append_rows(&b->lists, HCP_SCHEDULE_ARRANGE, wire, rows);
  for (int64_t e = first_entry; e < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); e++) {
    const int64_t *entry = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, e);
    int64_t begin = hcp__most(key_row, entry[2]),
            end = hcp__least(key_row + rows, entry[2] + entry[3]);
    append_home_run(b, b->home[owner] + begin - key_row, end - begin, e, begin - entry[2]);
  }
  b->home[owner] += rows;
}

/* Where the next rows of an owner lie on the wire, which start at `row` of a sequence: one after
 * the other, but for those that this rank relays, which other readers see, too. */
static int64_t next_on_wire(builder *b, int32_t index, int32_t owner, int64_t row, int64_t rows) {
  int64_t wire = b->wire[owner];
  if (!relays(b, owner)) {
    b->wire[owner] += rows;
    return wire;
  }
  ranges all = seen_in(b, index, owner, node_of(b, b->j));
  return wire + place_in(&all, row);
}

/* Tokens that belong to others, in token order: their owners send each its own
 * in that order too. Returns the key row after them. */
static int64_t gather_tokens(builder *b, int32_t index, range tokens, int64_t key_row,
                             int64_t first_entry) {
  int32_t degree = b->degree;
  int64_t length = length_of(b, index);
  for (int32_t chunk = 0; chunk < 2 * degree; chunk++) {
    int32_t owner = chunk < degree ? chunk : 2 * degree - 1 - chunk;
    int64_t begin = hcp__most(tokens.begin, hcp__chunk_start(length, degree, chunk));
    int64_t end = hcp__least(tokens.end, hcp__chunk_start(length, degree, chunk + 1));
    if (end <= begin) continue;
    int64_t row = hcp__rows_before(length, degree, owner, begin);
    int64_t wire = next_on_wire(b, index, owner, row, end - begin);
    place_keys(b, owner, wire, key_row, end - begin, first_entry);
    append_pull(b, key_row, end - begin, owner, b->base[owner] + row);
    key_row += end - begin;
  }
  return key_row;
}

/* Goes on to the sequence after index. */
static void pass_sequence(builder *b, int32_t index) {
  for (int32_t k = 0; k < b->degree; k++) {
    b->base[k] += rows_of(b, index, k);
    if (!relays(b, k)) continue;
    ranges all = seen_in(b, index, k, node_of(b, b->j));
    b->wire[k] += rows_in(&all);
  }
}

/* What lies between and around a rank's own pieces. */
static int32_t gaps_of(int64_t length, const hcp__piece *pieces, int32_t n,
                       hcp__piece gaps[PIECES_MAX]) {
  int64_t start = 0;
  int32_t found = 0;
  for (int32_t p = 0; p <= n; p++) {
    int64_t end = p < n ? pieces[p].start : length;
    if (end > start) gaps[found++] = (hcp__piece){start, end - start};
    if (p < n) start = end + pieces[p].rows;
  }
  return found;
}

/* Entries and keys of one sequence. Returns the key row after them. */
static int64_t gather_sequence(builder *b, int32_t index, int64_t query_row, int64_t key_row) {
  hcp__piece queries[2], gaps[PIECES_MAX];
  int32_t query_pieces = pieces_of(b, index, b->j, queries);
  int32_t gap_count = gaps_of(length_of(b, index), queries, query_pieces, gaps);
  int64_t first_entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES), row = 0;
  ranges seen = rows_seen(b, queries, query_pieces, gaps, gap_count);
  append_entries(b, query_row, queries, query_pieces, key_row, gaps, gap_count, &seen);
  for (int32_t g = 0; g < gap_count; g++) {
    for (int32_t i = 0; i < seen.n; i++) {
      range tokens = {hcp__most(seen.range[i].begin, row),
                      hcp__least(seen.range[i].end, row + gaps[g].rows)};
      tokens.begin += gaps[g].start - row;
      tokens.end += gaps[g].start - row;
      key_row = gather_tokens(b, index, tokens, key_row, first_entry);
    }
    row += gaps[g].rows;
  }
  return key_row;
}

/* Returns the number of keys. */
static int64_t gather_entries(builder *b, sequences of) {
  int64_t key_row = 0;
  for (int32_t s = of.begin; s < of.end; s++) {
    key_row = gather_sequence(b, s, b->base[b->j], key_row);
    pass_sequence(b, s);
  }
  return key_row;
}

static void gather_stage(builder *b, sequences of) {
  int64_t sent = gather_sends(b, of), received = gather_receives(b, of);
  int64_t relayed = gather_relays(b, of, &received), keys = gather_entries(b, of);
  hcp__end_stage(&b->lists, sent, received, keys, relayed);
}

/* Most rows of a sequence that the ranks of the group fetch: alike on all of them,
 * as their stages must be. */
static int64_t fetched_most(const builder *b, int32_t index) {
  return hcp__least(length_of(b, index), 2 * (b->mask.left + b->mask.right));
}

static void all_gather_stages(builder *b) {
  int64_t left = 0, rows = 0;
  sequences of = {0, 0};
  for (int32_t s = 0; s < b->group->sequences; s++) left += fetched_most(b, s);
  int64_t stages = hcp__most(1, hcp__least(left / b->stage_rows, HCP_SCHEDULE_GATHERS_MAX));
  int64_t share = (left + stages - 1) / stages;
  while (of.end < b->group->sequences) {
    rows += fetched_most(b, of.end);
    left -= fetched_most(b, of.end++);
    if (of.end < b->group->sequences && (rows < share || left < b->stage_rows)) continue;
    gather_stage(b, of);
    of.begin = of.end;
    rows = 0;
  }
}

/* ---- rows for heads: the exchange before stage 0 ---- */

/* Rows that the k-th rank of the group has before the exchange. */
static int64_t rank_rows(const builder *b, int32_t k) {
  return hcp__rank_rows(b->plan, b->group, k) + hcp__padding(b->plan, b->group, k);
}

/* Rows that each neighbour gives; b->wire[m] is where those of neighbour m start. */
static void head_receives(builder *b) {
  int32_t first = b->j * b->inner;
  int64_t given = 0;
  for (int32_t m = 0; m < b->inner; m++) {
    int64_t rows = rank_rows(b, first + m);
    b->wire[m] = given;
    hcp__append(&b->lists, HCP_SCHEDULE_HEAD_RECEIVES,
                (const int64_t[]){b->group->first_rank + first + m, given, rows});
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

/* The place's rows of a sequence, from row on: those of neighbour after neighbour
 * from its early chunk on, then back again. Returns the row after them. */
static int64_t exchange_sequence(builder *b, int32_t index, int64_t row) {
  int64_t length = length_of(b, index);
  for (int32_t i = 0; i < 2 * b->inner; i++) {
    int32_t m = i < b->inner ? i : 2 * b->inner - 1 - i, ranks = b->group->degree;
    int32_t chunk = b->j * b->inner + m;
    if (i >= b->inner) chunk = 2 * ranks - 1 - chunk;
    row = exchange_rows(
        b, m, row,
        hcp__chunk_start(length, ranks, chunk + 1) - hcp__chunk_start(length, ranks, chunk));
  }
  return row;
}

static void exchange_heads(builder *b) {
  int64_t row = 0;
  head_receives(b);
  for (int32_t s = 0; s < b->group->sequences; s++) row = exchange_sequence(b, s, row);
  for (int32_t m = 0; m < b->inner; m++) row = exchange_rows(b, m, row, padding_of(b, b->j, m));
  hcp__sort_by(&b->lists, HEAD_ROWS, 0);
  for (int64_t i = 0; i < hcp__records(&b->lists, HEAD_ROWS); i++) {
    const int64_t *record = hcp__record(&b->lists, HEAD_ROWS, i);
    hcp__append_rows(&b->lists, HCP_SCHEDULE_SCATTER, record[1], record[2]);
  }
}

/* ---- the table ---- */

static void stages(builder *b, hcp_comm_type comm_type) {
  if (comm_type == HCP_COMM_A2A || comm_type == HCP_COMM_A2A_P2P) exchange_heads(b);
  local_stage(b);
  int64_t local_entry_count = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
  if (b->degree == 1) return;
  find_homes(b);
  relay_homes(b);
  if (comm_type == HCP_COMM_ALL_GATHER)
    all_gather_stages(b);
  else
    p2p_stages(b);
  append_homecoming(b, local_entry_count);
}

static hcp_status group_stages(builder *b, hcp_comm_type comm_type, hcp_error *err) {
  int64_t *places = calloc(4 * (size_t)b->group->degree, sizeof *places);
  if (places == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a schedule");
  b->wire = places;
  b->base = places + b->group->degree;
  b->home = b->base + b->group->degree;
  b->relayed = b->home + b->group->degree;
  stages(b, comm_type);
  for (int32_t k = 0; k < b->degree; k++)
    hcp__append(&b->lists, HCP_SCHEDULE_KEY_OWNERS,
                (const int64_t[]){peer_of(b, k), place_rows(b, k)});
  free(places);
  return HCP_OK;
}

static hcp_status build(builder *b, hcp_comm_type comm_type, hcp_table **schedule, hcp_error *err) {
  int64_t rows = 0;
  hcp_status status = HCP_OK;
  if (b->group == NULL) { /* no rows: one stage of nothing */
    hcp__end_stage(&b->lists, 0, 0, 0, 0);
  } else {
    status = group_stages(b, comm_type, err);
    rows = rank_rows(b, b->j * b->inner + b->lane);
  }
  if (status != HCP_OK) return status;
  hcp__append(&b->lists, HCP_SCHEDULE_SIZES,
              (const int64_t[]){rows, b->home_sent, b->home_received, b->home_relayed, comm_type,
                                b->inner, b->mask.left, b->mask.right});
  hcp__align_runs(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_HOME_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_HOME_RELAY_RUNS);
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
  int32_t ranks = b->group == NULL ? 1 : b->group->degree;
  if (comm_type == HCP_COMM_A2A_P2P && (inner < 1 || (b->group != NULL && ranks % inner != 0)))
    return hcp__fail(err, HCP_INVALID, "inner is %d, expected a divisor of the group's degree, %d",
                     inner, ranks);
  b->inner = comm_type == HCP_COMM_A2A_P2P ? inner : comm_type == HCP_COMM_A2A ? ranks : 1;
  b->degree = b->seats = ranks / b->inner;
  b->nodes = 1;
  if (b->group == NULL) return HCP_OK;
  b->j = (rank - b->group->first_rank) / b->inner;
  b->lane = (rank - b->group->first_rank) % b->inner;
  if (!by_nodes) return HCP_OK;
  int32_t node = hcp__whole_nodes(b->plan, b->group);
  if (node == 0 || node % b->inner != 0) return HCP_OK;
  b->seats = node / b->inner;
  b->nodes = b->degree / b->seats;
  return HCP_OK;
}

hcp_status hcp_schedule_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                               hcp_comm_type comm_type, int32_t inner, const hcp_mask *mask,
                               int64_t stage_rows, int32_t by_nodes, hcp_table **schedule,
                               hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  if (hcp_comm_type_name(comm_type) == NULL)
    return hcp__fail(err, HCP_INVALID, "comm_type is %d, expected 0 to %d", (int)comm_type,
                     HCP_COMM_TYPE_COUNT - 1);
  if (stage_rows < 1)
    return hcp__fail(err, HCP_INVALID, "stage_rows is %lld, expected >= 1", (long long)stage_rows);
  hcp_mask limits = {limit_of(mask->left), limit_of(mask->right), mask->index};
  if (plan->mask_count > 0 && comm_type == HCP_COMM_A2A_P2P)
    return hcp__fail(err, HCP_INVALID,
                     "comm_type is '%s' in a plan with masks, expected '%s', '%s' or '%s'",
                     hcp_comm_type_name(comm_type), hcp_comm_type_name(HCP_COMM_ALL_GATHER),
                     hcp_comm_type_name(HCP_COMM_P2P), hcp_comm_type_name(HCP_COMM_A2A));
  if (plan->mask_count > 0)
    return hcp__masked_schedule(plan, hcp__group_of(plan, micro_batch, rank), rank, comm_type,
                                &limits, stage_rows, by_nodes, schedule, err);
  builder b = {.plan = plan,
               .group = hcp__group_of(plan, micro_batch, rank),
               .mask = limits,
               .stage_rows = stage_rows};
  status = place(&b, rank, comm_type, inner, by_nodes, err);
  if (status != HCP_OK) return status;
  hcp__lists_init(&b.lists, widths, LIST_COUNT);
  status = build(&b, comm_type, schedule, err);
  hcp__lists_release(&b.lists);
  return status;
}
