/* masked.c - the steps of one attention layer on one rank, in a plan with masks.
 *
 * A place of the group holds pieces of each sequence (see hcp__cut). Its queries see, of
 * every slice, keys that are consecutive tokens for each piece: its needs. Of these, other
 * places send what they hold. A part of a slice, for a piece of queries and consecutive
 * keys, is a block, whose band is that of the slice.
 *
 * A layer's limits count positions. In a run of positions, position less token is one
 * number: slices that are cut where runs meet have limits that count tokens. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Scratch lists after the sections.
 *   NEEDS   (first token, end): what a place sees of a sequence
 *   SEEN    (token, rows, place, its row of the sequence): of a stage
 *   KEYS    (token, rows, key row): the same as a stage's keys, joined
 *   SLICES  an hcp_slice: of a sequence, under the layer's limits */
enum { NEEDS = HCP_SCHEDULE_SECTION_COUNT, SEEN, KEYS, SLICES, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_SCHEDULE_SECTIONS(WIDTH)
#undef WIDTH
        2,
    4, 3, 6};

typedef struct builder {
  const hcp_plan *plan;
  const hcp_group *group;
  const hcp_masks *masks;
  int32_t ranks;  /* of the group */
  int32_t degree; /* places: its ranks, or one under A2A */
  int32_t j;      /* this rank's place */
  int32_t seats;  /* places of a node; all, if borders do not count */
  int32_t nodes;  /* of the group: degree / seats */
  hcp_mask limits;
  int64_t stage_rows;
  hcp__lists lists;
  hcp__cut **cuts;   /* sequences of the group: who holds what */
  int64_t *slices;   /* sequences + 1: the first of SLICES of each */
  int64_t *needs;    /* sequences * readers + 1: the first of NEEDS of each */
  int64_t *wire;     /* places: where the next row of each lies on the wire */
  int64_t *base;     /* places: where the present sequence starts among each one's rows */
  int64_t *home;     /* places: where the gradient of the next row of each travels */
  int64_t *relayed;  /* nodes: where what goes on to each starts */
  int64_t home_sent, home_received, home_relayed;
} builder;

static int32_t sequence_of(const builder *b, int32_t s) {
  return b->plan->sequences[b->group->first_sequence + s];
}

static int64_t length_of(const builder *b, int32_t s) {
  return b->plan->lengths[sequence_of(b, s)];
}

static int32_t pieces_of(const builder *b, int32_t s, int32_t k, const hcp__piece **pieces) {
  *pieces = b->cuts[s]->pieces + b->cuts[s]->first[k];
  return b->cuts[s]->first[k + 1] - b->cuts[s]->first[k];
}

/* Rows of place k that are tokens before end. */
static int64_t rows_before(const builder *b, int32_t s, int32_t k, int64_t end) {
  const hcp__piece *pieces;
  int32_t n = pieces_of(b, s, k, &pieces);
  int64_t rows = 0;
  for (int32_t p = 0; p < n && pieces[p].start < end; p++)
    rows += hcp__least(pieces[p].rows, end - pieces[p].start);
  return rows;
}

static int64_t rows_of(const builder *b, int32_t s, int32_t k) {
  return rows_before(b, s, k, length_of(b, s));
}

/* Slices of a sequence under the layer's limits: they ascend by their queries. */
static int64_t slice_count(const builder *b, int32_t s) { return b->slices[s + 1] - b->slices[s]; }

static hcp_slice slice_at(const builder *b, int32_t s, int64_t i) {
  const int64_t *x = hcp__record(&b->lists, SLICES, b->slices[s] + i);
  return (hcp_slice){x[0], x[1], x[2], x[3], x[4], x[5]};
}

/* ---- slices under the layer's limits ---- */

/* What is left of a slice for queries and keys of two ranges: each query sees a key and each
 * key is seen. 0: nothing. */
static int narrow(hcp_slice *x, int64_t query_begin, int64_t query_end, int64_t key_begin,
                  int64_t key_end) {
  x->query_begin = hcp__most(x->query_begin, query_begin);
  x->query_end = hcp__least(x->query_end, query_end);
  x->key_begin = hcp__most(x->key_begin, key_begin);
  x->key_end = hcp__least(x->key_end, key_end);
  if (x->low > x->high) return 0;
  x->query_begin = hcp__most(x->query_begin, x->key_begin - x->high);
  x->query_end = hcp__least(x->query_end, x->key_end - x->low);
  x->key_begin = hcp__most(x->key_begin, x->query_begin + x->low);
  x->key_end = hcp__least(x->key_end, x->query_end + x->high);
  return x->query_begin < x->query_end && x->key_begin < x->key_end;
}

/* Runs of positions of a sequence, one after the other. */
typedef struct runs {
  const hcp_position_run *run;
  int64_t count, length; /* runs, and tokens */
} runs;

/* One run of all tokens where no limit counts positions. */
static runs runs_of(const builder *b, int32_t s) {
  static const hcp_position_run places = {0, 0};
  const int64_t *first = b->masks->first_run;
  int32_t sequence = sequence_of(b, s);
  int limited = b->limits.left < HCP__LENGTH_MAX || b->limits.right < HCP__LENGTH_MAX;
  if (!limited || first == NULL || first[sequence] == first[sequence + 1])
    return (runs){&places, 1, length_of(b, s)};
  return (runs){b->masks->runs + first[sequence], first[sequence + 1] - first[sequence],
                length_of(b, s)};
}

static int64_t run_end(const runs *of, int64_t r) {
  return r + 1 < of->count ? of->run[r + 1].token : of->length;
}

/* The run that has the token. */
static int64_t run_at(const runs *of, int64_t token) {
  int64_t low = 0, high = of->count - 1;
  while (low < high) { /* the last run that starts at or before the token */
    int64_t middle = low + (high - low + 1) / 2;
    if (of->run[middle].token <= token)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/* What is left of a slice for queries of one run and keys of another. */
static void append_limited(builder *b, hcp_slice x, const runs *of, int64_t queries, int64_t keys) {
  const hcp_position_run *q = &of->run[queries], *k = &of->run[keys];
  /* A key's position less a query's, beyond the tokens between them. */
  int64_t shift = (k->position - k->token) - (q->position - q->token);
  x.low = hcp__most(x.low, -b->limits.left - shift);
  x.high = hcp__least(x.high, b->limits.right - shift);
  if (narrow(&x, q->token, run_end(of, queries), k->token, run_end(of, keys)))
    hcp__append(
        &b->lists, SLICES,
        (const int64_t[]){x.query_begin, x.query_end, x.key_begin, x.key_end, x.low, x.high});
}

/* Cuts a slice where runs meet. */
static void append_slices(builder *b, const hcp_slice *x, const runs *of) {
  for (int64_t q = run_at(of, x->query_begin); q < of->count; q++) {
    if (of->run[q].token >= x->query_end) break;
    for (int64_t k = run_at(of, x->key_begin); k < of->count; k++) {
      if (of->run[k].token >= x->key_end) break;
      append_limited(b, *x, of, q, k);
    }
  }
}

/* By the first query, the first key, and the lower limit: no two slices have all three. */
static int by_corner(const void *a, const void *b) {
  const int64_t *x = a, *y = b;
  for (int32_t i = 0; i < 4; i += 2)
    if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
  return (x[4] > y[4]) - (x[4] < y[4]);
}

/* Finds the slices of all sequences of the group. */
static void find_slices(builder *b) {
  for (int32_t s = 0; s < b->group->sequences; s++) {
    int32_t sequence = sequence_of(b, s);
    runs of = runs_of(b, s);
    int64_t first = b->slices[s] = hcp__records(&b->lists, SLICES);
    for (int64_t i = b->masks->first[sequence]; i < b->masks->first[sequence + 1]; i++)
      append_slices(b, &b->masks->slices[i], &of);
    int64_t count = hcp__records(&b->lists, SLICES) - first;
    if (count > 1)
      qsort(b->lists.list[SLICES].words + 6 * first, (size_t)count, 6 * sizeof(int64_t), by_corner);
  }
  b->slices[b->group->sequences] = hcp__records(&b->lists, SLICES);
}

/* ---- blocks ---- */

/* Records of ENTRIES: (query_row, query_rows, key_row, key_rows, low, high). */
static int is_full(const int64_t *x) { return x[4] <= 1 - x[1] && x[5] >= x[3] - 1; }

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

/* A block whose queries and keys begin at these rows; first: the first entry of its sequence. */
static void append_entry(builder *b, const hcp_slice *x, int64_t query_row, int64_t key_row,
                         int64_t first) {
  int64_t queries = x->query_end - x->query_begin, keys = x->key_end - x->key_begin;
  int64_t ahead = x->key_begin - x->query_begin, n = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
  const int64_t entry[] = {query_row,
                           queries,
                           key_row,
                           keys,
                           hcp__most(x->low - ahead, 1 - queries),
                           hcp__least(x->high - ahead, keys - 1)};
  int64_t *words = b->lists.list[HCP_SCHEDULE_ENTRIES].words;
  if (n == first || !join(words + 6 * (n - 1), entry))
    hcp__append(&b->lists, HCP_SCHEDULE_ENTRIES, entry);
  for (n = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); n >= first + 2; n--) {
    words = b->lists.list[HCP_SCHEDULE_ENTRIES].words;
    if (!join(words + 6 * (n - 2), words + 6 * (n - 1))) return;
    b->lists.list[HCP_SCHEDULE_ENTRIES].count -= 6;
  }
}

/* Entries of this rank's pieces of a sequence, from query_row on, against KEYS. */
static void append_entries(builder *b, int32_t s, int64_t query_row) {
  const hcp__piece *pieces;
  int32_t n = pieces_of(b, s, b->j, &pieces);
  int64_t first = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
  for (int32_t p = 0; p < n; p++) {
    int64_t start = pieces[p].start, end = start + pieces[p].rows;
    for (int64_t i = 0; i < slice_count(b, s); i++) {
      hcp_slice whole = slice_at(b, s, i);
      if (whole.query_begin >= end) break; /* slices ascend by their queries */
      if (whole.query_end <= start) continue;
      for (int64_t k = 0; k < hcp__records(&b->lists, KEYS); k++) {
        const int64_t *keys = hcp__record(&b->lists, KEYS, k);
        hcp_slice x = whole;
        if (narrow(&x, start, end, keys[0], keys[0] + keys[1]))
          append_entry(b, &x, query_row + x.query_begin - start, keys[2] + x.key_begin - keys[0],
                       first);
      }
    }
    query_row += pieces[p].rows;
  }
}

/* ---- stage 0: local rows ---- */

/* Whether a slice's limits are none, or exact: then they are the same among the rows of a
 * rank, whatever tokens lie between them. */
static int keeps_its_band(const hcp_slice *x) {
  return (x->low == 0 || x->low <= x->key_begin - x->query_end + 1) &&
         (x->high == 0 || x->high >= x->key_end - x->query_begin - 1);
}

/* A slice among a rank's rows of the sequence, counted as tokens. */
static hcp_slice among_rows(const builder *b, int32_t s, const hcp_slice *x) {
  int64_t rows = rows_of(b, s, b->j);
  return (hcp_slice){rows_before(b, s, b->j, x->query_begin),
                     rows_before(b, s, b->j, x->query_end),
                     rows_before(b, s, b->j, x->key_begin),
                     rows_before(b, s, b->j, x->key_end),
                     x->low == 0 ? 0 : -rows,
                     x->high == 0 ? 0 : rows};
}

static void local_entries(builder *b, int32_t s, int64_t row) {
  int64_t first = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES), rows = rows_of(b, s, b->j);
  int keep = 1;
  for (int64_t i = 0; i < slice_count(b, s) && keep; i++) {
    hcp_slice x = slice_at(b, s, i);
    keep = keeps_its_band(&x);
  }
  b->lists.list[KEYS].count = 0;
  if (!keep) {
    const hcp__piece *pieces;
    int32_t n = pieces_of(b, s, b->j, &pieces);
    for (int32_t p = 0, at = 0; p < n; at += (int32_t)pieces[p++].rows)
      hcp__append(&b->lists, KEYS, (const int64_t[]){pieces[p].start, pieces[p].rows, row + at});
    append_entries(b, s, row);
    return;
  }
  for (int64_t i = 0; i < slice_count(b, s); i++) {
    hcp_slice x = slice_at(b, s, i);
    x = among_rows(b, s, &x);
    if (narrow(&x, 0, rows, 0, rows))
      append_entry(b, &x, row + x.query_begin, row + x.key_begin, first);
  }
}

static int64_t padding_of(const builder *b, int32_t rank) {
  return hcp__padding(b->plan, b->group, rank);
}

/* Padding sees itself. Under A2A it is that of all ranks. */
static int64_t padding_entries(builder *b, int64_t row) {
  int32_t begin = b->degree == 1 ? 0 : b->j, end = b->degree == 1 ? b->ranks : b->j + 1;
  for (int32_t m = begin; m < end; m++) {
    int64_t rows = padding_of(b, m);
    if (rows > 0)
      hcp__append(&b->lists, HCP_SCHEDULE_ENTRIES,
                  (const int64_t[]){row, rows, row, rows, 1 - rows, rows - 1});
    row += rows;
  }
  return row;
}

static void local_stage(builder *b) {
  int64_t row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    local_entries(b, s, row);
    row += rows_of(b, s, b->j);
  }
  row = padding_entries(b, row);
  for (int64_t e = 0; e < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); e++) {
    const int64_t *made = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, e);
    hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS, (const int64_t[]){made[2], made[3], e, 0});
  }
  hcp__end_stage(&b->lists, 0, 0, row, 0);
}

/* ---- needs ---- */

static int by_begin(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* Sorts and joins the ranges of NEEDS from `first` on. */
static void join_needs(builder *b, int64_t first) {
  hcp__list *list = &b->lists.list[NEEDS];
  int64_t n = list->count / 2 - first, kept = 0;
  int64_t *at = list->words + 2 * first;
  if (n < 1) return;
  qsort(at, (size_t)n, 2 * sizeof *at, by_begin);
  for (int64_t i = 1; i < n; i++) {
    if (at[2 * i] <= at[2 * kept + 1]) {
      at[2 * kept + 1] = hcp__most(at[2 * kept + 1], at[2 * i + 1]);
    } else {
      kept++;
      at[2 * kept] = at[2 * i];
      at[2 * kept + 1] = at[2 * i + 1];
    }
  }
  list->count = 2 * (first + kept + 1);
}

/* ---- nodes ---- */

static int32_t node_of(const builder *b, int32_t k) { return k / b->seats; }
static int32_t seat_of(const builder *b, int32_t k) { return k % b->seats; }
static int32_t place_at(const builder *b, int32_t node, int32_t seat) {
  return node * b->seats + seat;
}

/* Whether rows of k come to this rank's node by this rank. */
static int relays(const builder *b, int32_t k) {
  return node_of(b, k) != node_of(b, b->j) && seat_of(b, k) == seat_of(b, b->j);
}

/* Who sees keys: each place and, of several nodes, each as a whole. */
static int32_t readers_of(const builder *b) { return b->degree + (b->nodes > 1 ? b->nodes : 0); }
static int32_t node_reader(const builder *b, int32_t node) { return b->degree + node; }
static int32_t own_node(const builder *b) { return node_reader(b, node_of(b, b->j)); }

/* Appends what place k sees of a sequence. */
static void append_needs(builder *b, int32_t s, int32_t k) {
  const hcp__piece *pieces;
  int32_t n = pieces_of(b, s, k, &pieces);
  int64_t length = length_of(b, s);
  for (int32_t p = 0; p < n; p++)
    for (int64_t i = 0; i < slice_count(b, s); i++) {
      hcp_slice x = slice_at(b, s, i);
      if (x.query_begin >= pieces[p].start + pieces[p].rows) break;
      if (narrow(&x, pieces[p].start, pieces[p].start + pieces[p].rows, 0, length))
        hcp__append(&b->lists, NEEDS, (const int64_t[]){x.key_begin, x.key_end});
    }
}

static void find_needs(builder *b, int32_t s, int32_t reader) {
  int64_t first = hcp__records(&b->lists, NEEDS);
  int32_t begin = reader, end = reader + 1;
  if (reader >= b->degree) {
    begin = place_at(b, reader - b->degree, 0);
    end = begin + b->seats;
  }
  b->needs[(int64_t)s * readers_of(b) + reader] = first;
  for (int32_t k = begin; k < end; k++) append_needs(b, s, k);
  if (!b->lists.failed) join_needs(b, first);
}

static void find_all_needs(builder *b) {
  for (int32_t s = 0; s < b->group->sequences; s++)
    for (int32_t k = 0; k < readers_of(b); k++) find_needs(b, s, k);
  b->needs[(int64_t)b->group->sequences * readers_of(b)] = hcp__records(&b->lists, NEEDS);
}

/* Counts what `reader` sees of `owner`'s first rows of a sequence, which it appends to SEEN if
 * it should. */
static int64_t count_seen(builder *b, int32_t s, int32_t owner, int32_t reader, int64_t first_rows,
                          int append) {
  const hcp__piece *pieces;
  int32_t n = pieces_of(b, s, owner, &pieces), p = 0;
  int64_t row = 0, rows = 0, *first = &b->needs[(int64_t)s * readers_of(b) + reader];
  for (int64_t i = first[0]; i < first[1] && !b->lists.failed; i++) {
    const int64_t *need = hcp__record(&b->lists, NEEDS, i);
    while (p < n && pieces[p].start + pieces[p].rows <= need[0]) row += pieces[p++].rows;
    int64_t at = row;
    for (int32_t q = p; q < n && pieces[q].start < need[1]; at += pieces[q++].rows) {
      int64_t begin = hcp__most(need[0], pieces[q].start);
      int64_t end = hcp__least(need[1], pieces[q].start + pieces[q].rows);
      int64_t own = at + begin - pieces[q].start, seen = hcp__least(end - begin, first_rows - own);
      if (seen <= 0) return rows;
      if (append) hcp__append(&b->lists, SEEN, (const int64_t[]){begin, seen, owner, own});
      rows += seen;
    }
  }
  return rows;
}

static int64_t append_seen(builder *b, int32_t s, int32_t owner, int32_t reader) {
  return count_seen(b, s, owner, reader, length_of(b, s), 1);
}

static int64_t rows_seen(builder *b, int32_t s, int32_t owner, int32_t reader) {
  return count_seen(b, s, owner, reader, length_of(b, s), 0);
}

/* Where a row of the owner lies among those that a reader sees. */
static int64_t place_seen(builder *b, int32_t s, int32_t owner, int32_t reader, int64_t row) {
  return count_seen(b, s, owner, reader, row, 0);
}

static void clear_seen(builder *b) { b->lists.list[SEEN].count = 0; }

static int64_t all_rows_seen(builder *b, int32_t begin, int32_t end, int32_t owner,
                             int32_t reader) {
  int64_t rows = 0;
  for (int32_t s = begin; s < end; s++) rows += rows_seen(b, s, owner, reader);
  return rows;
}

/* ---- gradients on their way home ---- */

static int32_t peer_of(const builder *b, int32_t k) { return b->group->first_rank + k; }

static void append_peer(builder *b, int32_t section, int32_t k, int64_t row, int64_t rows) {
  if (rows > 0) hcp__append(&b->lists, section, (const int64_t[]){peer_of(b, k), row, rows});
}

/* Where the gradients of each owner's rows lie in what is sent, those of all stages together:
 * after each other those of one seat, which go to that seat of this node. */
static void find_homes(builder *b) {
  for (int32_t seat = 0; seat < b->seats; seat++) {
    int64_t first = b->home_sent;
    for (int32_t node = 0; node < b->nodes; node++) {
      int32_t owner = place_at(b, node, seat);
      b->home[owner] = b->home_sent;
      if (owner != b->j) b->home_sent += all_rows_seen(b, 0, b->group->sequences, owner, b->j);
    }
    if (seat != seat_of(b, b->j))
      append_peer(b, HCP_SCHEDULE_HOME_SENDS, place_at(b, node_of(b, b->j), seat), first,
                  b->home_sent - first);
  }
}

/* Local rows that a reader saw, as a part that came home. */
static void append_parts(builder *b, int32_t reader, int64_t part) {
  int64_t row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    clear_seen(b);
    append_seen(b, s, b->j, reader);
    for (int64_t i = 0; i < hcp__records(&b->lists, SEEN); i++) {
      const int64_t *seen = hcp__record(&b->lists, SEEN, i);
      hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS,
                  (const int64_t[]){row + seen[3], seen[1], part, b->home_received});
      b->home_received += seen[1];
    }
    row += rows_of(b, s, b->j);
  }
}

/* What a reader in this node saw of one owner in another node, as a part of what goes on to that
 * owner. Returns the row of the part after it. */
static int64_t append_relayed_parts(builder *b, int32_t owner, int32_t reader, int64_t part,
                                    int64_t from) {
  int64_t to = b->relayed[node_of(b, owner)];
  for (int32_t s = 0; s < b->group->sequences; s++) {
    clear_seen(b);
    append_seen(b, s, owner, reader);
    for (int64_t i = 0; i < hcp__records(&b->lists, SEEN); i++) {
      const int64_t *seen = hcp__record(&b->lists, SEEN, i);
      hcp__append(&b->lists, HCP_SCHEDULE_HOME_RELAY_RUNS,
                  (const int64_t[]){to + place_seen(b, s, owner, own_node(b), seen[3]), seen[1],
                                    part, from});
      from += seen[1];
    }
    to += rows_seen(b, s, owner, own_node(b));
  }
  return from;
}

/* What goes on to the owners in other nodes. */
static void relay_homes(builder *b) {
  for (int32_t node = 0; node < b->nodes; node++) {
    int32_t owner = place_at(b, node, seat_of(b, b->j));
    if (owner == b->j) continue;
    int64_t rows = all_rows_seen(b, 0, b->group->sequences, owner, own_node(b));
    b->relayed[node] = b->home_relayed;
    append_peer(b, HCP_SCHEDULE_HOME_RELAY_SENDS, owner, b->home_relayed, rows);
    b->home_relayed += rows;
    append_relayed_parts(b, owner, b->j, HCP_RELAYED_SENT, b->home[owner]);
  }
}

/* What comes home is one more part after the entries of stage 0: from the readers of this node,
 * then summed from other nodes. */
static void append_homecoming(builder *b, int64_t local_entry_count) {
  int32_t own = node_of(b, b->j), own_seat = seat_of(b, b->j);
  for (int32_t seat = 0; seat < b->seats; seat++) {
    int32_t reader = place_at(b, own, seat);
    int64_t first = b->home_received;
    for (int32_t node = 0; node < b->nodes && seat != own_seat; node++)
      if (node == own)
        append_parts(b, reader, local_entry_count);
      else
        b->home_received = append_relayed_parts(b, place_at(b, node, own_seat), reader,
                                                HCP_RELAYED_RECEIVED, b->home_received);
    append_peer(b, HCP_SCHEDULE_HOME_RECEIVES, reader, first, b->home_received - first);
  }
  for (int32_t node = 0; node < b->nodes; node++) {
    int64_t first = b->home_received;
    if (node == own) continue;
    append_parts(b, node_reader(b, node), local_entry_count);
    append_peer(b, HCP_SCHEDULE_HOME_RELAY_RECEIVES, place_at(b, node, own_seat), first,
                b->home_received - first);
  }
}

/* ---- stages of rows that arrive ---- */

/* Sequences [begin, end), and the places whose rows arrive: all others, or those of one place, or
 * of one node where borders count: so many before this rank's, while the one as far after it
 * reads here. */
typedef struct stage {
  int32_t begin, end, step; /* -1: all */
} stage;

static int is_ahead(const builder *b, const stage *of, int32_t from, int32_t to) {
  int32_t units = b->nodes > 1 ? b->nodes : b->degree, each = b->nodes > 1 ? b->seats : 1;
  return from != to && (of->step < 0 || to / each == (from / each + of->step) % units);
}

static int is_owner(const builder *b, const stage *of, int32_t k) {
  return is_ahead(b, of, k, b->j);
}

static int is_reader(const builder *b, const stage *of, int32_t k) {
  return is_ahead(b, of, b->j, k);
}

/* As whom k gets rows from this rank, or this rank gets those of k: as itself inside a node, else
 * for its node. -1: not from here. */
static int32_t reader_for(const builder *b, int32_t k, int32_t reader) {
  if (node_of(b, k) == node_of(b, b->j)) return reader;
  return relays(b, k) ? node_reader(b, node_of(b, reader)) : -1;
}

/* Rows for every reader, in the order in which it has them arranged by owner. */
static int64_t append_sends(builder *b, const stage *of) {
  int64_t sent = 0;
  for (int32_t k = 0; k < b->degree; k++) {
    int64_t first = sent, row = b->base[b->j];
    int32_t reader = reader_for(b, k, k);
    if (!is_reader(b, of, k) || reader < 0) continue;
    for (int32_t s = of->begin; s < of->end; s++) {
      clear_seen(b);
      sent += append_seen(b, s, b->j, reader);
      for (int64_t i = 0; i < hcp__records(&b->lists, SEEN); i++) {
        const int64_t *seen = hcp__record(&b->lists, SEEN, i);
        /* Peers may be given the same rows: never join their segments. */
        hcp__append(&b->lists, HCP_SCHEDULE_PACK, (const int64_t[]){row + seen[3], seen[1]});
      }
      row += rows_of(b, s, b->j);
    }
    append_peer(b, HCP_SCHEDULE_SENDS, k, first, sent - first);
  }
  return sent;
}

static int64_t append_receives(builder *b, const stage *of) {
  int64_t received = 0;
  for (int32_t k = 0; k < b->degree; k++) {
    int32_t reader = is_owner(b, of, k) ? reader_for(b, k, b->j) : -1;
    int64_t rows = reader < 0 ? 0 : all_rows_seen(b, of->begin, of->end, k, reader);
    b->wire[k] = received;
    append_peer(b, HCP_SCHEDULE_RECEIVES, k, received, rows);
    received += rows;
  }
  return received;
}

/* What came from an owner in another node, for another reader of this node. Returns the row after
 * what is sent to it. */
static int64_t relay_to(builder *b, const stage *of, int32_t owner, int32_t reader, int64_t sent) {
  int64_t row = b->wire[owner];
  for (int32_t s = of->begin; s < of->end; s++) {
    clear_seen(b);
    sent += append_seen(b, s, owner, reader);
    for (int64_t i = 0; i < hcp__records(&b->lists, SEEN); i++) {
      const int64_t *seen = hcp__record(&b->lists, SEEN, i);
      hcp__append(&b->lists, HCP_SCHEDULE_RELAY_PACK,
                  (const int64_t[]){row + place_seen(b, s, owner, own_node(b), seen[3]), seen[1]});
    }
    row += rows_seen(b, s, owner, own_node(b));
  }
  return sent;
}

/* What goes on inside the node; *received counts what comes. Returns the rows that are sent. */
static int64_t append_relays(builder *b, const stage *of, int64_t *received) {
  int32_t own = node_of(b, b->j), own_seat = seat_of(b, b->j);
  int64_t sent = 0;
  for (int32_t seat = 0; seat < b->seats; seat++) {
    int32_t k = place_at(b, own, seat);
    int64_t first_sent = sent, first = *received;
    for (int32_t node = 0; node < b->nodes && k != b->j; node++) {
      int32_t owner = place_at(b, node, seat);
      if (node == own || !is_owner(b, of, owner)) continue;
      sent = relay_to(b, of, place_at(b, node, own_seat), k, sent);
      b->wire[owner] = *received;
      *received += all_rows_seen(b, of->begin, of->end, owner, b->j);
    }
    append_peer(b, HCP_SCHEDULE_RELAY_SENDS, k, first_sent, sent - first_sent);
    append_peer(b, HCP_SCHEDULE_RELAY_RECEIVES, k, first, *received - first);
  }
  return sent;
}

/* Where the next rows of an owner lie on the wire, which start at `row` of a sequence: one after
 * the other, but for those that this rank relays, which other readers see, too. */
static int64_t next_on_wire(builder *b, int32_t s, int32_t owner, int64_t row, int64_t rows) {
  int64_t wire = b->wire[owner];
  if (relays(b, owner)) return wire + place_seen(b, s, owner, own_node(b), row);
  b->wire[owner] += rows;
  return wire;
}

/* KEYS of a sequence: SEEN in token order, from key_row on. Returns the row after them. */
static int64_t find_keys(builder *b, const stage *of, int32_t s, int64_t key_row) {
  clear_seen(b);
  for (int32_t k = 0; k < b->degree; k++)
    if (is_owner(b, of, k)) append_seen(b, s, k, b->j);
  hcp__sort_by(&b->lists, SEEN, 0);
  b->lists.list[KEYS].count = 0;
  for (int64_t i = 0; i < hcp__records(&b->lists, SEEN); i++) {
    const int64_t *seen = hcp__record(&b->lists, SEEN, i);
    int64_t n = hcp__records(&b->lists, KEYS), *words = b->lists.list[KEYS].words;
    if (n > 0 && words[3 * n - 3] + words[3 * n - 2] == seen[0])
      words[3 * n - 2] += seen[1];
    else
      hcp__append(&b->lists, KEYS, (const int64_t[]){seen[0], seen[1], key_row});
    key_row += seen[1];
  }
  return key_row;
}

/* Gradients of the entries from `entry` on, of these key rows, go home from row `home` on. */
static void append_homes(builder *b, int64_t entry, int64_t key_row, int64_t rows, int64_t home) {
  for (; entry < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); entry++) {
    const int64_t *made = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, entry);
    int64_t begin = hcp__most(key_row, made[2]),
            end = hcp__least(key_row + rows, made[2] + made[3]);
    if (begin < end)
      hcp__append(&b->lists, HCP_SCHEDULE_HOME_RUNS,
                  (const int64_t[]){home + begin - key_row, end - begin, entry, begin - made[2]});
  }
}

/* Entries of one sequence, and the way of its keys. Returns the key row after them. */
static int64_t stage_sequence(builder *b, const stage *of, int32_t s, int64_t key_row) {
  int64_t after = find_keys(b, of, s, key_row);
  int64_t entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
  append_entries(b, s, b->base[b->j]);
  for (int64_t i = 0; i < hcp__records(&b->lists, SEEN); i++) {
    const int64_t *seen = hcp__record(&b->lists, SEEN, i);
    int64_t rows = seen[1], owner = seen[2];
    int64_t wire = next_on_wire(b, s, (int32_t)owner, seen[3], rows);
    if (key_row == 0) /* never join what a stage before received */
      hcp__append(&b->lists, HCP_SCHEDULE_ARRANGE, (const int64_t[]){wire, rows});
    else
      hcp__append_rows(&b->lists, HCP_SCHEDULE_ARRANGE, wire, rows);
    hcp__append(
        &b->lists, HCP_SCHEDULE_PULLS,
        (const int64_t[]){key_row, rows, peer_of(b, (int32_t)owner), b->base[owner] + seen[3]});
    append_homes(b, entry, key_row, rows, b->home[owner]);
    b->home[owner] += rows;
    key_row += rows;
  }
  return after;
}

static void append_stage(builder *b, const stage *of) {
  int64_t key_row = 0, sent = append_sends(b, of), received = append_receives(b, of);
  int64_t relayed = append_relays(b, of, &received);
  for (int32_t s = of->begin; s < of->end; s++) {
    key_row = stage_sequence(b, of, s, key_row);
    for (int32_t k = 0; k < b->degree; k++) {
      b->base[k] += rows_of(b, s, k);
      if (relays(b, k)) b->wire[k] += rows_seen(b, s, k, own_node(b));
    }
  }
  hcp__end_stage(&b->lists, sent, received, key_row, relayed);
}

/* One owner a stage, or the owners of one node. */
static void p2p_stages(builder *b) {
  int32_t first = b->nodes > 1 ? 0 : 1, end = b->nodes > 1 ? b->nodes : b->degree;
  for (int32_t step = first; step < end; step++) {
    if (step == 0 && b->seats == 1) continue; /* no others in its node */
    for (int32_t k = 0; k < b->degree; k++) b->base[k] = 0;
    append_stage(b, &(stage){0, b->group->sequences, step});
  }
}

/* Some sequences a stage, so that the next ones come while these are computed; the lengths
 * alone decide, alike on all ranks. */
static void all_gather_stages(builder *b) {
  int64_t left = 0, rows = 0;
  stage of = {0, 0, -1};
  for (int32_t s = 0; s < b->group->sequences; s++) left += length_of(b, s);
  int64_t stages = hcp__most(1, hcp__least(left / b->stage_rows, HCP_SCHEDULE_GATHERS_MAX));
  int64_t share = (left + stages - 1) / stages;
  while (of.end < b->group->sequences) {
    rows += length_of(b, of.end);
    left -= length_of(b, of.end++);
    if (of.end < b->group->sequences && (rows < share || left < b->stage_rows)) continue;
    append_stage(b, &of);
    of.begin = of.end;
    rows = 0;
  }
}

/* ---- a2a: rows for heads, before stage 0 ---- */

static int64_t rank_rows(const builder *b, int32_t m) {
  return hcp__rank_rows(b->plan, b->group, m) + padding_of(b, m);
}

/* The next row of the whole sequences is the next one of rank m. */
static int64_t exchange_rows(builder *b, int64_t *wire, int32_t m, int64_t row, int64_t rows) {
  if (rows == 0) return row;
  hcp__append(&b->lists, SEEN, (const int64_t[]){wire[m], row, rows, 0});
  hcp__append_rows(&b->lists, HCP_SCHEDULE_GATHER, wire[m], rows);
  wire[m] += rows;
  return row + rows;
}

/* `cuts`: who holds the sequences before the exchange, NULL after the last. wire: room for every
 * rank. */
static void exchange_heads(builder *b, hcp__cut *const *cuts, int64_t *wire) {
  int64_t given = 0, row = 0;
  for (int32_t m = 0; m < b->ranks; m++) {
    wire[m] = given;
    hcp__append(&b->lists, HCP_SCHEDULE_HEAD_RECEIVES,
                (const int64_t[]){b->group->first_rank + m, given, rank_rows(b, m)});
    given += rank_rows(b, m);
  }
  for (int32_t s = 0; cuts[s] != NULL; s++)
    for (int32_t c = 0; c < cuts[s]->count; c++)
      row = exchange_rows(b, wire, cuts[s]->chunks[c].place, row, cuts[s]->chunks[c].rows);
  for (int32_t m = 0; m < b->ranks; m++) row = exchange_rows(b, wire, m, row, padding_of(b, m));
  hcp__sort_by(&b->lists, SEEN, 0);
  for (int64_t i = 0; i < hcp__records(&b->lists, SEEN); i++) {
    const int64_t *record = hcp__record(&b->lists, SEEN, i);
    hcp__append_rows(&b->lists, HCP_SCHEDULE_SCATTER, record[1], record[2]);
  }
}

/* ---- the table ---- */

static void append_stages(builder *b, hcp_comm_type comm_type) {
  local_stage(b);
  int64_t local_entry_count = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
  if (b->degree > 1) {
    find_all_needs(b);
    find_homes(b);
    relay_homes(b);
    if (comm_type == HCP_COMM_ALL_GATHER)
      all_gather_stages(b);
    else
      p2p_stages(b);
    append_homecoming(b, local_entry_count);
  }
  for (int64_t e = 0; e < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); e++) {
    const int64_t *made = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, e);
    hcp__append(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS, (const int64_t[]){made[0], made[1], e, 0});
  }
  for (int32_t k = 0; k < b->degree; k++) {
    int64_t rows = 0;
    for (int32_t m = 0; m < b->ranks; m++) rows += b->degree == 1 || m == k ? rank_rows(b, m) : 0;
    hcp__append(&b->lists, HCP_SCHEDULE_KEY_OWNERS, (const int64_t[]){peer_of(b, k), rows});
  }
}

static void free_cuts(hcp__cut **cuts, int32_t n) {
  for (int32_t s = 0; cuts != NULL && s < n; s++) free(cuts[s]);
  free(cuts);
}

static hcp__cut *copy_cut(const hcp__cut *cut, int32_t degree) {
  return hcp__cut_create(cut->chunks, cut->count, degree);
}

/* Who holds the group's sequences, on its ranks; NULL after the last. */
static hcp__cut **make_cuts(const builder *b, int32_t degree) {
  hcp__cut **cuts = calloc((size_t)b->group->sequences + 1, sizeof *cuts);
  for (int32_t s = 0; cuts != NULL && s < b->group->sequences; s++) {
    const hcp__cut *own = b->plan->cuts[sequence_of(b, s)];
    cuts[s] = own != NULL && degree > 1 ? copy_cut(own, degree)
                                        : hcp__cut_zigzag(length_of(b, s), degree);
    if (cuts[s] == NULL) {
      free_cuts(cuts, s);
      return NULL;
    }
  }
  return cuts;
}

static hcp_status build_group(builder *b, hcp_comm_type comm_type, int32_t by_nodes,
                              hcp_error *err) {
  size_t places = (size_t)b->ranks, sequences = (size_t)b->group->sequences;
  hcp__cut **cuts = make_cuts(b, b->ranks), **whole = NULL;
  int64_t *room = calloc(4 * places + (2 * places + 1) * sequences + 2, sizeof *room);
  hcp_status status = HCP_OK;
  if (comm_type == HCP_COMM_A2A) whole = make_cuts(b, 1);
  if (cuts == NULL || room == NULL || (comm_type == HCP_COMM_A2A && whole == NULL)) {
    status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for a schedule");
  } else {
    b->wire = room;
    b->base = room + places;
    b->home = b->base + places;
    b->relayed = b->home + places;
    b->slices = b->relayed + places;
    b->needs = b->slices + sequences + 1;
    find_slices(b);
    if (whole != NULL) exchange_heads(b, cuts, b->wire);
    b->degree = whole != NULL ? 1 : b->ranks;
    int32_t node = by_nodes && whole == NULL ? hcp__whole_nodes(b->plan, b->group) : 0;
    b->seats = node > 0 ? node : b->degree;
    b->nodes = b->degree / b->seats;
    b->cuts = whole != NULL ? whole : cuts;
    if (whole != NULL) b->j = 0;
    append_stages(b, comm_type);
  }
  free(room);
  free_cuts(whole, b->group->sequences);
  free_cuts(cuts, b->group->sequences);
  return status;
}

static hcp_status finish(builder *b, int64_t rows, hcp_comm_type comm_type, hcp_table **schedule,
                         hcp_error *err) {
  hcp__append(
      &b->lists, HCP_SCHEDULE_SIZES,
      (const int64_t[]){rows, b->home_sent, b->home_received, b->home_relayed, comm_type,
                        comm_type == HCP_COMM_A2A ? b->ranks : 1, b->limits.left, b->limits.right});
  hcp__align_runs(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_HOME_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_HOME_RELAY_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_LOCAL_RUNS);
  return hcp__table_create(&b->lists, HCP_SCHEDULE_SECTION_COUNT, schedule, err);
}

hcp_status hcp__masked_schedule(const hcp_plan *plan, const hcp_group *group, int32_t rank,
                                hcp_comm_type comm_type, const hcp_mask *mask, int64_t stage_rows,
                                int32_t by_nodes, hcp_table **schedule, hcp_error *err) {
  if (mask->index < 0 || mask->index >= plan->mask_count)
    return hcp__fail(err, HCP_INVALID, "mask.index is %d, expected 0 to %d", mask->index,
                     plan->mask_count - 1);
  builder b = {.plan = plan,
               .group = group,
               .masks = &plan->masks[mask->index],
               .ranks = group == NULL ? 1 : group->degree,
               .limits = *mask,
               .stage_rows = stage_rows};
  int64_t rows = 0;
  hcp_status status = HCP_OK;
  hcp__lists_init(&b.lists, widths, LIST_COUNT);
  if (group == NULL) {
    hcp__end_stage(&b.lists, 0, 0, 0, 0);
  } else {
    b.j = rank - group->first_rank;
    rows = rank_rows(&b, b.j);
    status = build_group(&b, comm_type, by_nodes, err);
  }
  if (status == HCP_OK) status = finish(&b, rows, comm_type, schedule, err);
  hcp__lists_release(&b.lists);
  return status;
}
