/* heads.c - the exchange of heads where neighbours read each other's memory.
 *
 * An owner stages the rows for each reader as one block. The block of the neighbour before it comes
 * first, then that of the one before that one, and so on: each reader begins with the owner after
 * it, whose block for it is staged first. So no two readers begin with the same owner. */
#include "internal.h"

static const int32_t widths[HCP_HEADS_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_HEADS_SECTIONS(WIDTH)
#undef WIDTH
};

enum { PEER, MOVE_ROW, MOVE_ROWS, MOVE_WORDS };

typedef struct maker {
  const int64_t *words;
  hcp_section sections[HCP_SCHEDULE_SECTION_COUNT];
  const int64_t *neighbours; /* (peer, row, rows) each */
  int64_t count, place;      /* neighbours; which of them this rank is */
  const hcp_head_share *shares; /* by neighbour */
  int64_t all;               /* rows of all neighbours */
  hcp__lists lists;
} maker;

static int64_t peer_of(const maker *m, int64_t i) { return m->neighbours[i * MOVE_WORDS + PEER]; }

static int64_t base_of(const maker *m, int64_t i) {
  return m->neighbours[i * MOVE_WORDS + MOVE_ROW];
}

static int64_t rows_of(const maker *m, int64_t i) {
  return m->neighbours[i * MOVE_WORDS + MOVE_ROWS];
}

static int64_t heads_in(const hcp_head_share *share, int keys) {
  return keys ? share->end_key - share->first_key : share->end_query - share->first_query;
}

static int computes(const maker *m, int64_t i) { return heads_in(&m->shares[i], 0) > 0; }

/* The reader whose block is number `number` among those of an owner. */
static int64_t reader_at(const maker *m, int64_t owner, int64_t number) {
  return (owner - 1 - number + m->count) % m->count;
}

/* Rows in a block of a reader: those of an owner that the reader computes, or, on the way back,
 * the reader's own that the owner has computed. */
static int64_t block_rows(const maker *m, int back, int64_t owner, int64_t reader) {
  if (!computes(m, back ? owner : reader)) return 0;
  return rows_of(m, back ? reader : owner);
}

/* Rows that an owner stages before the block of a reader; of the owner itself: all of them. */
static int64_t rows_before(const maker *m, int back, int64_t owner, int64_t reader) {
  int64_t rows = 0;
  for (int64_t i = 0; reader_at(m, owner, i) != reader; i++)
    rows += block_rows(m, back, owner, reader_at(m, owner, i));
  return rows;
}

static int64_t staged_rows(const maker *m, int back, int64_t owner) {
  return rows_before(m, back, owner, owner);
}

static int64_t most_staged(const maker *m, int back) {
  int64_t most = 0;
  for (int64_t i = 0; i < m->count; i++) most = hcp__most(most, staged_rows(m, back, i));
  return most;
}

static void append_run(maker *m, int32_t section, int64_t row, int64_t rows, int64_t part,
                       int64_t part_row) {
  if (rows > 0) hcp__append(&m->lists, section, (const int64_t[]){row, rows, part, part_row});
}

/* Appends the rows of a neighbour as runs of part 0, which has all rows in token order, from `row`
 * on. */
static void append_scattered(maker *m, int32_t section, int64_t neighbour, int64_t row) {
  const hcp_section *scatter = &m->sections[HCP_SCHEDULE_SCATTER];
  int64_t begin = base_of(m, neighbour), end = begin + rows_of(m, neighbour), at = 0;
  for (int64_t w = scatter->first; w < scatter->end && at < end; at += m->words[w + 1], w += 2) {
    int64_t from = hcp__most(at, begin), to = hcp__least(at + m->words[w + 1], end);
    append_run(m, section, row + from - begin, to - from, 0, m->words[w] + from - at);
  }
}

/* ---- to heads ---- */

static void append_staged(maker *m) {
  int64_t row = 0;
  for (int64_t i = 0; i + 1 < m->count; i++) {
    int64_t reader = reader_at(m, m->place, i), rows = block_rows(m, 0, m->place, reader);
    append_run(m, HCP_HEADS_STAGED_RUNS, row, rows, reader, 0);
    row += rows;
  }
}

/* The rows that came, in token order: owners' and, apart from them, this rank's own. */
static void append_read(maker *m) {
  const hcp_section *gather = &m->sections[HCP_SCHEDULE_GATHER];
  int64_t row = 0;
  for (int64_t w = gather->first; w < gather->end; w += 2)
    for (int64_t i = 0, owners = 0; i < m->count; i++) {
      int64_t base = base_of(m, i), from = hcp__most(m->words[w], base), own = i == m->place;
      int64_t rows = hcp__least(m->words[w] + m->words[w + 1], base + rows_of(m, i)) - from;
      if (rows > 0 && own) append_run(m, HCP_HEADS_OWN_RUNS, row, rows, 0, from - base);
      if (rows > 0 && !own)
        append_run(m, HCP_HEADS_READ_RUNS, row, rows, owners,
                   rows_before(m, 0, i, m->place) + from - base);
      row += hcp__most(rows, 0);
      owners += !own && rows_of(m, i) > 0;
    }
}

/* ---- and back ---- */

static void append_staged_back(maker *m) {
  int64_t row = 0;
  for (int64_t i = 0; i + 1 < m->count; i++) {
    int64_t reader = reader_at(m, m->place, i);
    append_scattered(m, HCP_HEADS_BACK_STAGED_RUNS, reader, row);
    row += rows_of(m, reader);
  }
}

/* A block of this rank's rows from each neighbour, in order. */
static void append_read_back(maker *m) {
  int64_t own = rows_of(m, m->place), owners = 0;
  for (int64_t i = 0; i < m->count; i++) {
    if (!computes(m, i)) continue;
    if (i == m->place)
      append_scattered(m, HCP_HEADS_BACK_OWN_RUNS, i, i * own);
    else
      append_run(m, HCP_HEADS_BACK_READ_RUNS, i * own, own, owners++,
                 rows_before(m, 1, i, m->place));
  }
}

/* ---- the table ---- */

/* Those who read what this rank stages, and those whose rows it reads. */
static void append_peers(maker *m, int back, int32_t readers, int32_t owners) {
  for (int64_t i = 0; i < m->count; i++) {
    if (i == m->place) continue;
    if (block_rows(m, back, m->place, i) > 0)
      hcp__append(&m->lists, readers, (const int64_t[]){peer_of(m, i)});
    if (block_rows(m, back, i, m->place) > 0)
      hcp__append(&m->lists, owners, (const int64_t[]){peer_of(m, i), staged_rows(m, back, i)});
  }
}

/* Blocks of query heads, then of key-value heads. */
static void append_blocks(maker *m) {
  for (int keys = 0; keys < 2; keys++) {
    int64_t most = 0, own = 0;
    for (int64_t i = 0; i < m->count; i++) most = hcp__most(most, heads_in(&m->shares[i], keys));
    for (int64_t i = 0; i < m->count; i++) {
      const hcp_head_share *share = &m->shares[i];
      int64_t first = keys ? share->first_key : share->first_query, heads = heads_in(share, keys);
      if (i == m->place) own = heads;
      hcp__append(&m->lists, HCP_HEADS_BLOCKS, (const int64_t[]){first, heads, most});
    }
    hcp__append(&m->lists, HCP_HEADS_BACK_BLOCKS, (const int64_t[]){0, own, most});
  }
}

static void make(maker *m) {
  const int64_t sizes[] = {staged_rows(m, 0, m->place), most_staged(m, 0),
                           staged_rows(m, 1, m->place), most_staged(m, 1)};
  hcp__append(&m->lists, HCP_HEADS_SIZES, sizes);
  append_blocks(m);
  append_staged(m);
  append_peers(m, 0, HCP_HEADS_READERS, HCP_HEADS_OWNERS);
  append_peers(m, 1, HCP_HEADS_BACK_READERS, HCP_HEADS_BACK_OWNERS);
  if (computes(m, m->place)) {
    append_read(m);
    append_staged_back(m);
  }
  append_read_back(m);
}

/* ---- the schedule's words ---- */

/* Whether (row, rows) records name each of the rows once or less, `all` in sum. */
static int are_rows(const maker *m, int32_t section) {
  int64_t sum = 0;
  for (int64_t w = m->sections[section].first; w < m->sections[section].end; w += 2) {
    int64_t row = m->words[w], rows = m->words[w + 1];
    if (row < 0 || rows < 0 || rows > m->all || row > m->all - rows || sum > m->all - rows)
      return 0;
    sum += rows;
  }
  return sum == m->all;
}

/* Finds the neighbours, whose rows lie end to end, and this rank among them. */
static int find_neighbours(maker *m, int64_t rank) {
  const hcp_section *section = &m->sections[HCP_SCHEDULE_HEAD_RECEIVES];
  m->neighbours = m->words + section->first;
  m->place = -1;
  for (int64_t i = 0; i < section->records; i++) {
    if (base_of(m, i) != m->all || rows_of(m, i) < 0 || rows_of(m, i) > HCP__LENGTH_MAX) return 0;
    m->all += rows_of(m, i);
    if (m->all > HCP__LENGTH_MAX) return 0;
    if (peer_of(m, i) == rank) m->place = i;
  }
  return m->place >= 0;
}

static int are_heads(int64_t first, int64_t end) {
  return first >= 0 && first <= end && end <= HCP__LENGTH_MAX;
}

static hcp_status check_shares(const maker *m, hcp_error *err) {
  for (int64_t i = 0; i < m->count; i++) {
    const hcp_head_share *s = &m->shares[i];
    if (are_heads(s->first_query, s->end_query) && are_heads(s->first_key, s->end_key)) continue;
    return hcp__fail(err, HCP_INVALID,
                     "shares[%lld] is query heads %lld to %lld and key-value heads %lld to %lld, "
                     "expected 0 <= first <= end",
                     (long long)i, (long long)s->first_query, (long long)s->end_query,
                     (long long)s->first_key, (long long)s->end_key);
  }
  return HCP_OK;
}

static hcp_status check_words(maker *m, int64_t word_count, hcp_error *err) {
  hcp_schedule_header header;
  hcp_schedule_sizes sizes;
  hcp_status status = hcp_schedule_read(m->words, word_count, m->sections, &header, &sizes, err);
  if (status != HCP_OK) return status;
  if (!find_neighbours(m, header.rank))
    return hcp__no_schedule(word_count, "this rank exchanges no rows for heads", err);
  if (!are_rows(m, HCP_SCHEDULE_GATHER) || !are_rows(m, HCP_SCHEDULE_SCATTER))
    return hcp__no_schedule(word_count, "a row is of no neighbour", err);
  if (m->count != m->sections[HCP_SCHEDULE_HEAD_RECEIVES].records)
    return hcp__fail(err, HCP_INVALID, "shares has %lld records, expected %lld: one a neighbour",
                     (long long)m->count,
                     (long long)m->sections[HCP_SCHEDULE_HEAD_RECEIVES].records);
  return check_shares(m, err);
}

hcp_status hcp_heads_create(const int64_t *words, int64_t word_count, const hcp_head_share *shares,
                            int64_t count, hcp_table **heads, hcp_error *err) {
  maker m = {.words = words, .count = count, .shares = shares};
  hcp_status status = check_words(&m, word_count, err);
  if (status != HCP_OK) return status;
  hcp__lists_init(&m.lists, widths, HCP_HEADS_SECTION_COUNT);
  make(&m);
  status = hcp__table_create(&m.lists, HCP_HEADS_SECTION_COUNT, heads, err);
  hcp__lists_release(&m.lists);
  return status;
}
