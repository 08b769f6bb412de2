/* schedule.c - the steps of one attention layer on one rank.
 *
 * A rank's rows of a sequence, in local order, are in token order, and lie in
 * at most two pieces of consecutive tokens. A piece of queries sees a piece of
 * keys through a band, and so a run of its rows. Without a window much of this
 * joins: local queries against local keys are one causal square, and of another
 * rank's rows a query piece sees a prefix. */
#include <stdlib.h>

#include "internal.h"

static const int32_t widths[HCP_SCHEDULE_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_SCHEDULE_SECTIONS(WIDTH)
#undef WIDTH
};

typedef struct builder {
  const hcp_plan *plan;
  const hcp_group *group;
  int32_t j; /* this rank's place in the group */
  hcp_mask mask; /* no limit is HCP__LENGTH_MAX */
  hcp__lists lists;
  int64_t home_sent, home_received; /* rows so far */
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

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t length_of(const builder *b, int32_t slot) {
  return b->plan->lengths[b->plan->sequences[b->group->first_sequence + slot]];
}

static int32_t pieces_of(const builder *b, int32_t slot, int32_t k, hcp__piece pieces[2]) {
  return hcp__pieces(length_of(b, slot), b->group->degree, k, pieces);
}

static int64_t rows_of(const builder *b, int32_t slot, int32_t k) {
  int64_t length = length_of(b, slot);
  return hcp__rows_before(length, b->group->degree, k, length);
}

static int64_t block_rows(const builder *b, int32_t k) {
  int64_t rows = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) rows += rows_of(b, s, k);
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
  return (range){most(keys.start, queries.start - b->mask.left),
                 least(keys.start + keys.rows, queries.start + queries.rows + b->mask.right)};
}

static void add_range(ranges *list, range added) {
  range *last = list->n > 0 ? &list->range[list->n - 1] : NULL;
  if (last != NULL && added.begin <= last->end)
    last->end = most(last->end, added.end);
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
static ranges seen_by(const builder *b, int32_t slot, int32_t owner, int32_t reader) {
  hcp__piece queries[2], keys[2];
  int32_t query_pieces = pieces_of(b, slot, reader, queries);
  int32_t key_pieces = pieces_of(b, slot, owner, keys);
  return rows_seen(b, queries, query_pieces, keys, key_pieces);
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
    place += least(row, list->range[i].end) - list->range[i].begin;
  return place;
}

static int64_t all_rows_seen(const builder *b, int32_t owner, int32_t reader) {
  int64_t rows = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    ranges seen = seen_by(b, s, owner, reader);
    rows += rows_in(&seen);
  }
  return rows;
}

/* ---- records ---- */

static int32_t peer_of(const builder *b, int32_t k) { return b->group->first_rank + k; }

static void append_peer(builder *b, int32_t section, int32_t k, int64_t row, int64_t rows) {
  if (rows > 0) hcp__append(&b->lists, section, (const int64_t[]){peer_of(b, k), row, rows});
}

static void append_home_run(builder *b, int64_t row, int64_t rows, int64_t entry,
                            int64_t part_row) {
  if (rows > 0)
    hcp__append(&b->lists, HCP_SCHEDULE_HOME_RUNS, (const int64_t[]){row, rows, entry, part_row});
}

static void end_stage(builder *b, int64_t sent, int64_t received, int64_t keys) {
  hcp__append(
      &b->lists, HCP_SCHEDULE_STAGES,
      (const int64_t[]){hcp__records(&b->lists, HCP_SCHEDULE_PACK),
                        hcp__records(&b->lists, HCP_SCHEDULE_SENDS),
                        hcp__records(&b->lists, HCP_SCHEDULE_RECEIVES),
                        hcp__records(&b->lists, HCP_SCHEDULE_ARRANGE),
                        hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES), sent, received, keys});
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
  int64_t low = most(x->low, 1 - x->query_rows), high = least(x->high, x->key_rows - 1);
  hcp__append(&b->lists, HCP_SCHEDULE_ENTRIES,
              (const int64_t[]){x->query_row, x->query_rows, x->key_row, x->key_rows, low, high});
  hcp__append(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS,
              (const int64_t[]){x->query_row, x->query_rows, entry, 0});
}

/* Queries and keys of two pieces that meet at all: each query of the block sees
 * some of its keys, and each key is seen. */
static block block_of(const builder *b, hcp__piece queries, hcp__piece keys, range tokens) {
  int64_t begin = most(queries.start, tokens.begin - b->mask.right);
  int64_t end = least(queries.start + queries.rows, tokens.end + b->mask.left);
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

static void local_entries(builder *b, int32_t slot, int64_t row) {
  hcp__piece pieces[2];
  int64_t rows = rows_of(b, slot, b->j);
  int32_t n = pieces_of(b, slot, b->j, pieces);
  if (n > 0 && b->mask.right == 0 && b->mask.left >= length_of(b, slot) - 1)
    append_entry(b, &(block){row, rows, row, rows, -rows, 0}); /* whatever lies between pieces */
  else
    append_entries(b, row, pieces, n, row, pieces, n, &(ranges){{{0, rows}}, 1});
}

static void local_stage(builder *b) {
  int64_t row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    int64_t entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
    local_entries(b, s, row);
    for (; entry < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); entry++) {
      const int64_t *made = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, entry);
      hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS,
                  (const int64_t[]){made[2], made[3], entry, 0});
    }
    row += rows_of(b, s, b->j);
  }
  end_stage(b, 0, 0, row);
}

/* ---- gradients on their way home ---- */

/* What comes home is one more part behind the entries of stage 0. */
static void append_homecoming(builder *b, int64_t local_entry_count) {
  for (int32_t k = 0; k < b->group->degree; k++) {
    int64_t row = 0, first = b->home_received;
    if (k == b->j) continue;
    for (int32_t s = 0; s < b->group->sequences; s++) {
      ranges seen = seen_by(b, s, b->j, k);
      for (int32_t i = 0; i < seen.n; i++) {
        int64_t rows = seen.range[i].end - seen.range[i].begin;
        hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS,
                    (const int64_t[]){row + seen.range[i].begin, rows, local_entry_count,
                                      b->home_received});
        b->home_received += rows;
      }
      row += rows_of(b, s, b->j);
    }
    append_peer(b, HCP_SCHEDULE_HOME_RECEIVES, k, first, b->home_received - first);
  }
}

/* ---- p2p: blocks around the ring ---- */

/* Queries against the block of `owner`, and the way home of its gradients. */
static void ring_entries(builder *b, int32_t owner) {
  int64_t query_row = 0, key_row = 0, home_first = b->home_sent;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    hcp__piece queries[2], keys[2];
    int32_t query_pieces = pieces_of(b, s, b->j, queries),
            key_pieces = pieces_of(b, s, owner, keys);
    int64_t rows = rows_of(b, s, owner), entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
    ranges seen = seen_by(b, s, owner, b->j);
    append_entries(b, query_row, queries, query_pieces, key_row, keys, key_pieces,
                   &(ranges){{{0, rows}}, 1});
    for (; entry < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); entry++) {
      const int64_t *made = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, entry);
      append_home_run(b, b->home_sent + place_in(&seen, made[2] - key_row), made[3], entry, 0);
    }
    b->home_sent += rows_in(&seen);
    query_row += rows_of(b, s, b->j);
    key_row += rows;
  }
  append_peer(b, HCP_SCHEDULE_HOME_SENDS, owner, home_first, b->home_sent - home_first);
}

static void p2p_stages(builder *b) {
  int32_t degree = b->group->degree, next = (b->j + 1) % degree,
          previous = (b->j + degree - 1) % degree;
  int64_t sent = block_rows(b, b->j);
  for (int32_t step = 1; step < degree; step++) {
    int32_t owner = (b->j + degree - step) % degree;
    int64_t received = block_rows(b, owner);
    if (step == 1) hcp__append_rows(&b->lists, HCP_SCHEDULE_PACK, 0, sent);
    append_peer(b, HCP_SCHEDULE_SENDS, next, 0, sent);
    append_peer(b, HCP_SCHEDULE_RECEIVES, previous, 0, received);
    ring_entries(b, owner);
    end_stage(b, sent, received, received);
    sent = received;
  }
}

/* ---- all_gather: just the rows that are seen, in one stage ---- */

/* Rows for every peer, in the order in which it reads them. */
static int64_t gather_sends(builder *b) {
  int64_t sent = 0;
  for (int32_t k = 0; k < b->group->degree; k++) {
    int64_t first = sent, row = 0;
    if (k == b->j) continue;
    for (int32_t s = 0; s < b->group->sequences; s++) {
      ranges seen = seen_by(b, s, b->j, k);
      for (int32_t i = 0; i < seen.n; i++) {
        int64_t rows = seen.range[i].end - seen.range[i].begin;
        /* Peers may be given the same rows: never join their segments. */
        hcp__append(&b->lists, HCP_SCHEDULE_PACK,
                    (const int64_t[]){row + seen.range[i].begin, rows});
        sent += rows;
      }
      row += rows_of(b, s, b->j);
    }
    append_peer(b, HCP_SCHEDULE_SENDS, k, first, sent - first);
  }
  return sent;
}

/* wire[k]: where the rows of peer k start. */
static int64_t gather_receives(builder *b, int64_t *wire) {
  int64_t received = 0;
  for (int32_t k = 0; k < b->group->degree; k++) {
    int64_t rows = k == b->j ? 0 : all_rows_seen(b, k, b->j);
    wire[k] = received;
    append_peer(b, HCP_SCHEDULE_RECEIVES, k, received, rows);
    append_peer(b, HCP_SCHEDULE_HOME_SENDS, k, received, rows);
    received += rows;
  }
  return received;
}

/* Rows of one peer in key order: where they lie on the wire, and which entries
 * from first_entry on see which of them. */
static void place_keys(builder *b, int64_t wire_row, int64_t key_row, int64_t rows,
                       int64_t first_entry) {
  hcp__append_rows(&b->lists, HCP_SCHEDULE_ARRANGE, wire_row, rows);
  for (int64_t e = first_entry; e < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); e++) {
    const int64_t *entry = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, e);
    int64_t begin = most(key_row, entry[2]), end = least(key_row + rows, entry[2] + entry[3]);
    append_home_run(b, wire_row + begin - key_row, end - begin, e, begin - entry[2]);
  }
}

/* Tokens that belong to others, in token order: their owners send each its own
 * in that order too. Returns the key row behind them. */
static int64_t gather_tokens(builder *b, int32_t slot, range tokens, int64_t *wire, int64_t key_row,
                             int64_t first_entry) {
  int32_t degree = b->group->degree;
  int64_t length = length_of(b, slot);
  for (int32_t chunk = 0; chunk < 2 * degree; chunk++) {
    int32_t owner = chunk < degree ? chunk : 2 * degree - 1 - chunk;
    int64_t begin = most(tokens.begin, hcp__chunk_start(length, degree, chunk));
    int64_t end = least(tokens.end, hcp__chunk_start(length, degree, chunk + 1));
    if (end <= begin) continue;
    place_keys(b, wire[owner], key_row, end - begin, first_entry);
    wire[owner] += end - begin;
    key_row += end - begin;
  }
  return key_row;
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

/* Entries and keys of one sequence. Returns the key row behind them. */
static int64_t gather_sequence(builder *b, int32_t slot, int64_t query_row, int64_t key_row,
                               int64_t *wire) {
  hcp__piece queries[2], gaps[PIECES_MAX];
  int32_t query_pieces = pieces_of(b, slot, b->j, queries);
  int32_t gap_count = gaps_of(length_of(b, slot), queries, query_pieces, gaps);
  int64_t first_entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES), row = 0;
  ranges seen = rows_seen(b, queries, query_pieces, gaps, gap_count);
  append_entries(b, query_row, queries, query_pieces, key_row, gaps, gap_count, &seen);
  for (int32_t g = 0; g < gap_count; g++) {
    for (int32_t i = 0; i < seen.n; i++) {
      range tokens = {most(seen.range[i].begin, row), least(seen.range[i].end, row + gaps[g].rows)};
      tokens.begin += gaps[g].start - row;
      tokens.end += gaps[g].start - row;
      key_row = gather_tokens(b, slot, tokens, wire, key_row, first_entry);
    }
    row += gaps[g].rows;
  }
  return key_row;
}

static void gather_entries(builder *b, int64_t *wire) {
  int64_t query_row = 0, key_row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    key_row = gather_sequence(b, s, query_row, key_row, wire);
    query_row += rows_of(b, s, b->j);
  }
}

static void all_gather_stage(builder *b, int64_t *wire) {
  int64_t sent = gather_sends(b), received = gather_receives(b, wire);
  gather_entries(b, wire);
  end_stage(b, sent, received, received);
  b->home_sent = received;
}

/* ---- a2a: heads for sequence ---- */

/* wire[k]: where the rows of rank k start. */
static int64_t a2a_moves(builder *b, int64_t *wire) {
  int64_t received = 0, rows = block_rows(b, b->j);
  for (int32_t k = 0; k < b->group->degree; k++) {
    int64_t theirs = block_rows(b, k);
    wire[k] = received;
    hcp__append(&b->lists, HCP_SCHEDULE_SENDS, (const int64_t[]){peer_of(b, k), 0, rows});
    hcp__append(&b->lists, HCP_SCHEDULE_RECEIVES,
                (const int64_t[]){peer_of(b, k), received, theirs});
    received += theirs;
  }
  return received;
}

static void a2a_way_back(builder *b, int32_t k) {
  int64_t row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    hcp__piece pieces[2];
    int32_t n = pieces_of(b, s, k, pieces);
    for (int32_t p = 0; p < n; p++)
      hcp__append_rows(&b->lists, HCP_SCHEDULE_PACK, row + pieces[p].start, pieces[p].rows);
    row += length_of(b, s);
  }
}

static void a2a_stage(builder *b, int64_t *wire) {
  int64_t received = a2a_moves(b, wire), row = 0;
  for (int32_t k = 0; k < b->group->degree; k++) a2a_way_back(b, k);
  for (int32_t s = 0; s < b->group->sequences; s++) {
    int64_t length = length_of(b, s);
    append_entry(b, &(block){row, length, row, length, -b->mask.left, b->mask.right});
    row = gather_tokens(b, s, (range){0, length}, wire, row,
                        hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES));
  }
  end_stage(b, block_rows(b, b->j), received, received);
}

/* ---- the table ---- */

static void row_stages(builder *b, hcp_comm_type comm_type, int64_t *wire) {
  local_stage(b);
  int64_t local_entry_count = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
  if (b->group->degree > 1 && comm_type == HCP_COMM_P2P) p2p_stages(b);
  if (b->group->degree > 1 && comm_type == HCP_COMM_ALL_GATHER) all_gather_stage(b, wire);
  append_homecoming(b, local_entry_count);
}

static hcp_status build(builder *b, hcp_comm_type comm_type, hcp_table **schedule, hcp_error *err) {
  if (b->group == NULL) { /* no rows: one stage of nothing */
    end_stage(b, 0, 0, 0);
  } else {
    int64_t *wire = calloc((size_t)b->group->degree, sizeof *wire);
    if (wire == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a schedule");
    if (comm_type == HCP_COMM_A2A)
      a2a_stage(b, wire);
    else
      row_stages(b, comm_type, wire);
    free(wire);
  }
  int64_t rows = b->group == NULL ? 0 : block_rows(b, b->j);
  hcp__append(&b->lists, HCP_SCHEDULE_SIZES,
              (const int64_t[]){rows, b->home_sent, b->home_received, comm_type, b->mask.left,
                                b->mask.right});
  hcp__align_runs(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_HOME_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_LOCAL_RUNS);
  return hcp__table_create(&b->lists, HCP_SCHEDULE_SECTION_COUNT, schedule, err);
}

/* A limit behind the end of every sequence is none. */
static int64_t limit_of(int64_t tokens) {
  return tokens < 0 ? HCP__LENGTH_MAX : least(tokens, HCP__LENGTH_MAX);
}

hcp_status hcp_schedule_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                               hcp_comm_type comm_type, const hcp_mask *mask, hcp_table **schedule,
                               hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  if (hcp_comm_type_name(comm_type) == NULL)
    return hcp__fail(err, HCP_INVALID, "comm_type is %d, expected 0 to %d", (int)comm_type,
                     HCP_COMM_TYPE_COUNT - 1);
  builder b = {.plan = plan,
               .group = hcp__group_of(plan, micro_batch, rank),
               .mask = {limit_of(mask->left), limit_of(mask->right)}};
  if (b.group != NULL) b.j = rank - b.group->first_rank;
  hcp__lists_init(&b.lists, widths, HCP_SCHEDULE_SECTION_COUNT);
  status = build(&b, comm_type, schedule, err);
  hcp__lists_release(&b.lists);
  return status;
}
