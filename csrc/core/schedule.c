/* schedule.c - the steps of one attention layer on one rank.
 *
 * Everything follows from one fact: a rank's rows of a sequence, in local
 * order, are in token order. So local queries against local keys are a plain
 * causal square, and of another rank's rows a query piece sees a prefix: those
 * before the piece begins (all of them without a mask). */
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
  int32_t causal;
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

/* ---- who sees what ---- */

static int64_t length_of(const builder *b, int32_t slot) {
  return b->plan->lengths[b->plan->sequences[b->group->first_sequence + slot]];
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

/* Tokens before this one may be seen by the query piece. */
static int64_t horizon(const builder *b, int64_t length, hcp__piece query) {
  return b->causal ? query.start : length;
}

/* How many rows of `owner`, a prefix, any query of `reader` sees. */
static int64_t seen_rows(const builder *b, int32_t slot, int32_t owner, int32_t reader) {
  hcp__piece pieces[2];
  int64_t length = length_of(b, slot);
  int32_t n = hcp__pieces(length, b->group->degree, reader, pieces);
  if (n == 0) return 0;
  return hcp__rows_before(length, b->group->degree, owner, horizon(b, length, pieces[n - 1]));
}

static int64_t all_seen_rows(const builder *b, int32_t owner, int32_t reader) {
  int64_t rows = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) rows += seen_rows(b, s, owner, reader);
  return rows;
}

/* ---- records ---- */

static int32_t peer_of(const builder *b, int32_t k) { return b->group->first_rank + k; }

static void append_peer(builder *b, int32_t section, int32_t k, int64_t row, int64_t rows) {
  if (rows > 0) hcp__append(&b->lists, section, (const int64_t[]){peer_of(b, k), row, rows});
}

static void append_entry(builder *b, int64_t query_row, int64_t query_rows, int64_t key_row,
                         int64_t key_rows, int32_t causal) {
  int64_t entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
  if (query_rows == 0 || key_rows == 0) return;
  hcp__append(&b->lists, HCP_SCHEDULE_ENTRIES,
              (const int64_t[]){query_row, query_rows, key_row, key_rows, causal});
  hcp__append(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS,
              (const int64_t[]){query_row, query_rows, entry, 0});
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

/* Entries of one sequence against keys that start at key_row. seen[p] says how
 * many of them query piece p sees; pieces that see the same are one entry. */
static void append_remote_entries(builder *b, int64_t query_row, const hcp__piece *pieces,
                                  int32_t n, int64_t key_row, const int64_t *seen) {
  if (n == 2 && seen[0] == seen[1]) {
    append_entry(b, query_row, pieces[0].rows + pieces[1].rows, key_row, seen[0], 0);
    return;
  }
  for (int32_t p = 0; p < n; p++) {
    append_entry(b, query_row, pieces[p].rows, key_row, seen[p], 0);
    query_row += pieces[p].rows;
  }
}

/* ---- stage 0: local rows ---- */

static void local_stage(builder *b) {
  int64_t row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    int64_t rows = rows_of(b, s, b->j), entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
    append_entry(b, row, rows, row, rows, b->causal);
    if (rows > 0)
      hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS, (const int64_t[]){row, rows, entry, 0});
    row += rows;
  }
  end_stage(b, 0, 0, row);
}

/* ---- gradients on their way home ---- */

/* What comes home is one more part behind the entries of stage 0. */
static void append_homecoming(builder *b, int64_t local_entries) {
  for (int32_t k = 0; k < b->group->degree; k++) {
    int64_t row = 0, first = b->home_received;
    if (k == b->j) continue;
    for (int32_t s = 0; s < b->group->sequences; s++) {
      int64_t seen = seen_rows(b, s, b->j, k);
      if (seen > 0)
        hcp__append(&b->lists, HCP_SCHEDULE_LOCAL_RUNS,
                    (const int64_t[]){row, seen, local_entries, b->home_received});
      b->home_received += seen;
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
    hcp__piece pieces[2];
    int64_t seen[2] = {0, 0}, length = length_of(b, s);
    int32_t n = hcp__pieces(length, b->group->degree, b->j, pieces);
    for (int32_t p = 0; p < n; p++)
      seen[p] = hcp__rows_before(length, b->group->degree, owner, horizon(b, length, pieces[p]));
    int64_t entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
    append_remote_entries(b, query_row, pieces, n, key_row, seen);
    for (; entry < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); entry++)
      append_home_run(b, b->home_sent, hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, entry)[3],
                      entry, 0);
    b->home_sent += seen_rows(b, s, owner, b->j);
    query_row += rows_of(b, s, b->j);
    key_row += rows_of(b, s, owner);
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
      int64_t seen = seen_rows(b, s, b->j, k);
      /* Peers may be given the same rows: never join their segments. */
      if (seen > 0) hcp__append(&b->lists, HCP_SCHEDULE_PACK, (const int64_t[]){row, seen});
      sent += seen;
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
    int64_t rows = k == b->j ? 0 : all_seen_rows(b, k, b->j);
    wire[k] = received;
    append_peer(b, HCP_SCHEDULE_RECEIVES, k, received, rows);
    append_peer(b, HCP_SCHEDULE_HOME_SENDS, k, received, rows);
    received += rows;
  }
  return received;
}

/* One run of a peer's rows in key order: where it lies on the wire, and which
 * entries from first_entry on see it. */
static void place_keys(builder *b, int64_t wire_row, int64_t key_row, int64_t rows,
                       int64_t first_key, int64_t first_entry) {
  hcp__append_rows(&b->lists, HCP_SCHEDULE_ARRANGE, wire_row, rows);
  for (int64_t e = first_entry; e < hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES); e++) {
    int64_t offset = key_row - first_key;
    int64_t seen = hcp__record(&b->lists, HCP_SCHEDULE_ENTRIES, e)[3] - offset;
    append_home_run(b, wire_row, seen < rows ? seen : rows, e, offset);
  }
}

/* Keys of one sequence: the peers' front pieces by rising rank, then their back
 * pieces by falling rank, which is token order: the fronts are the first half. */
static int64_t gather_keys(builder *b, int32_t slot, int64_t *wire, int64_t key_row,
                           int64_t first_entry) {
  int32_t degree = b->group->degree;
  int64_t first_key = key_row, length = length_of(b, slot);
  for (int32_t chunk = 0; chunk < 2 * degree; chunk++) {
    int32_t owner = chunk < degree ? chunk : 2 * degree - 1 - chunk;
    if (owner == b->j) continue;
    int64_t seen = seen_rows(b, slot, owner, b->j);
    int64_t front = hcp__rows_before(length, degree, owner, length / 2);
    if (front > seen) front = seen;
    int64_t rows = chunk < degree ? front : seen - front;
    place_keys(b, wire[owner], key_row, rows, first_key, first_entry);
    wire[owner] += rows;
    key_row += rows;
  }
  return key_row;
}

static void gather_entries(builder *b, int64_t *wire) {
  int64_t query_row = 0, key_row = 0;
  for (int32_t s = 0; s < b->group->sequences; s++) {
    hcp__piece pieces[2];
    int64_t seen[2] = {0, 0}, length = length_of(b, s), entry;
    int32_t n = hcp__pieces(length, b->group->degree, b->j, pieces);
    for (int32_t p = 0; p < n; p++) {
      int64_t end = horizon(b, length, pieces[p]);
      seen[p] = end - hcp__rows_before(length, b->group->degree, b->j, end);
    }
    entry = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
    append_remote_entries(b, query_row, pieces, n, key_row, seen);
    key_row = gather_keys(b, s, wire, key_row, entry);
    query_row += rows_of(b, s, b->j);
  }
}

static void all_gather_stage(builder *b, int64_t *wire) {
  int64_t sent = gather_sends(b), received = gather_receives(b, wire);
  gather_entries(b, wire);
  end_stage(b, sent, received, received);
  b->home_sent = received;
}

/* ---- the table ---- */

static hcp_status build(builder *b, hcp_comm_type comm_type, hcp_table **schedule, hcp_error *err) {
  if (b->group == NULL) { /* no rows: one stage of nothing */
    end_stage(b, 0, 0, 0);
  } else {
    int64_t *wire = calloc((size_t)b->group->degree, sizeof *wire);
    if (wire == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a schedule");
    local_stage(b);
    int64_t local_entries = hcp__records(&b->lists, HCP_SCHEDULE_ENTRIES);
    if (b->group->degree > 1 && comm_type == HCP_COMM_P2P) p2p_stages(b);
    if (b->group->degree > 1 && comm_type == HCP_COMM_ALL_GATHER) all_gather_stage(b, wire);
    append_homecoming(b, local_entries);
    free(wire);
  }
  int64_t rows = b->group == NULL ? 0 : block_rows(b, b->j);
  hcp__append(&b->lists, HCP_SCHEDULE_SIZES,
              (const int64_t[]){rows, b->home_sent, b->home_received, comm_type, b->causal != 0});
  hcp__align_runs(&b->lists, HCP_SCHEDULE_OUTPUT_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_HOME_RUNS);
  hcp__align_runs(&b->lists, HCP_SCHEDULE_LOCAL_RUNS);
  return hcp__table_create(&b->lists, HCP_SCHEDULE_SECTION_COUNT, schedule, err);
}

hcp_status hcp_schedule_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                               hcp_comm_type comm_type, int32_t causal, hcp_table **schedule,
                               hcp_error *err) {
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  if (hcp_comm_type_name(comm_type) == NULL)
    return hcp__fail(err, HCP_INVALID, "comm_type is %d, expected 0 to %d", (int)comm_type,
                     HCP_COMM_TYPE_COUNT - 1);
  builder b = {.plan = plan, .group = hcp__group_of(plan, micro_batch, rank), .causal = causal};
  if (b.group != NULL) b.j = rank - b.group->first_rank;
  hcp__lists_init(&b.lists, widths, HCP_SCHEDULE_SECTION_COUNT);
  status = build(&b, comm_type, schedule, err);
  hcp__lists_release(&b.lists);
  return status;
}
