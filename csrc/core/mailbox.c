/* mailbox.c - messages through mailboxes of some rows, cut into rounds.
 *
 * The two ends of a message cut it alike: each knows the rows of all moves between the two, in
 * their order, and the rows of a mailbox. */
#include <stdlib.h>

#include "internal.h"

static const int32_t widths[HCP_MAILBOX_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_MAILBOX_SECTIONS(WIDTH)
#undef WIDTH
};

enum { PEER, MOVE_ROW, MOVE_ROWS, MOVE_WORDS };

/* A move, and where its message goes on. */
typedef struct move {
  int64_t peer, row, rows;
  int64_t start;  /* rows of the peer's message before it */
  int64_t number; /* of the move, in the order given      */
} move;

/* Rows of a move that go in a round. */
typedef struct piece {
  int64_t peer, row, rows, mailbox_row;
  int64_t first; /* number of the first piece of the peer in the round */
} piece;

typedef struct maker {
  int64_t mailbox_rows;
  move *moves; /* of one direction, by number */
  piece *pieces;
  hcp__lists lists;
} maker;

static int compare(int64_t a, int64_t b) { return (a > b) - (a < b); }

static int by_peer(const void *a, const void *b) {
  const move *left = a, *right = b;
  int order = compare(left->peer, right->peer);
  return order ? order : compare(left->number, right->number);
}

static int by_move(const void *a, const void *b) {
  return compare(((const move *)a)->number, ((const move *)b)->number);
}

static int by_reader(const void *a, const void *b) {
  const piece *left = a, *right = b;
  int order = compare(left->first, right->first);
  return order ? order : compare(left->mailbox_row, right->mailbox_row);
}

static int by_row(const void *a, const void *b) {
  const piece *left = a, *right = b;
  int order = compare(left->row, right->row);
  if (order == 0) order = compare(left->rows, right->rows);
  return order ? order : compare(left->peer, right->peer);
}

/* Copies the moves, and finds where each stands in the message of its peer. */
static void take_moves(maker *m, const hcp_moves *given) {
  size_t n = (size_t)given->count;
  for (int64_t i = 0; i < given->count; i++) {
    const int64_t *record = given->moves + i * MOVE_WORDS;
    m->moves[i] = (move){record[PEER], record[MOVE_ROW], record[MOVE_ROWS], 0, i};
  }
  if (n > 0) qsort(m->moves, n, sizeof *m->moves, by_peer);
  for (int64_t i = 1; i < given->count; i++)
    if (m->moves[i].peer == m->moves[i - 1].peer)
      m->moves[i].start = m->moves[i - 1].start + m->moves[i - 1].rows;
  if (n > 0) qsort(m->moves, n, sizeof *m->moves, by_move);
}

/* The rows of each message from `begin` on that fit into a mailbox, as pieces in the order of the
 * moves. Returns how many. */
static int64_t cut_round(maker *m, int64_t count, int64_t begin) {
  int64_t n = 0, end = begin + m->mailbox_rows;
  for (int64_t i = 0; i < count; i++) {
    const move *x = &m->moves[i];
    int64_t from = hcp__most(x->start, begin), to = x->start + x->rows;
    if (to > end) to = end;
    if (from >= to) continue;
    int64_t first = 0;
    while (first < n && m->pieces[first].peer != x->peer) first++;
    m->pieces[n++] = (piece){x->peer, x->row + from - x->start, to - from, from - begin, first};
  }
  return n;
}

/* Appends what is put into each reader's mailbox in a round of n pieces. */
static void append_writes(maker *m, int64_t n) {
  int64_t rows = 0;
  if (n > 0) qsort(m->pieces, (size_t)n, sizeof *m->pieces, by_reader);
  for (int64_t i = 0; i < n; i++) {
    const piece *x = &m->pieces[i];
    hcp__append(&m->lists, HCP_MAILBOX_WRITE_RUNS,
                (const int64_t[]){x->mailbox_row, x->rows, 0, x->row});
    rows += x->rows;
    if (i + 1 < n && x[1].peer == x->peer) continue;
    hcp__append(&m->lists, HCP_MAILBOX_WRITES,
                (const int64_t[]){x->peer, rows, hcp__records(&m->lists, HCP_MAILBOX_WRITE_RUNS)});
    rows = 0;
  }
}

/* Whether one of the pieces [begin, end) is of the peer. */
static int names(const maker *m, int64_t begin, int64_t end, int64_t peer) {
  while (begin < end && m->pieces[begin].peer != peer) begin++;
  return begin < end;
}

static int64_t rows_of(const maker *m, int64_t n, int64_t peer) {
  int64_t rows = 0;
  for (int64_t i = 0; i < n; i++)
    if (m->pieces[i].peer == peer) rows += m->pieces[i].rows;
  return rows;
}

/* Appends the pieces [begin, end) of n, which follow each other where they are received. */
static void append_read(maker *m, int64_t begin, int64_t end, int64_t n) {
  int64_t first = m->pieces[begin].row, owners = hcp__records(&m->lists, HCP_MAILBOX_OWNERS);
  for (int64_t i = begin; i < end; i++) {
    const piece *x = &m->pieces[i];
    int64_t part = 0, known = hcp__records(&m->lists, HCP_MAILBOX_OWNERS) - owners;
    while (part < known && hcp__record(&m->lists, HCP_MAILBOX_OWNERS, owners + part)[0] != x->peer)
      part++;
    if (part == known)
      hcp__append(&m->lists, HCP_MAILBOX_OWNERS,
                  (const int64_t[]){x->peer, rows_of(m, n, x->peer), names(m, 0, begin, x->peer),
                                    !names(m, end, n, x->peer)});
    hcp__append(&m->lists, HCP_MAILBOX_READ_RUNS,
                (const int64_t[]){x->row - first, x->rows, part, x->mailbox_row});
  }
  int64_t rows = m->pieces[end - 1].row + m->pieces[end - 1].rows - first;
  hcp__append(&m->lists, HCP_MAILBOX_READS,
              (const int64_t[]){first, rows, hcp__records(&m->lists, HCP_MAILBOX_OWNERS),
                                hcp__records(&m->lists, HCP_MAILBOX_READ_RUNS)});
}

static void append_reads(maker *m, int64_t n) {
  if (n > 0) qsort(m->pieces, (size_t)n, sizeof *m->pieces, by_row);
  for (int64_t begin = 0, end; begin < n && !m->lists.failed; begin = end) {
    for (end = begin + 1; end < n; end++)
      if (m->pieces[end].row != m->pieces[end - 1].row + m->pieces[end - 1].rows) break;
    append_read(m, begin, end, n);
  }
}

/* Rows of the longest message: they say how many rounds there are. */
static int64_t longest(const maker *m, int64_t count) {
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) rows = hcp__most(rows, m->moves[i].start + m->moves[i].rows);
  return rows;
}

static void make(maker *m, const hcp_moves *sends, const hcp_moves *receives, move *received) {
  move *sent = m->moves;
  take_moves(m, sends);
  int64_t most = longest(m, sends->count);
  m->moves = received;
  take_moves(m, receives);
  most = hcp__most(most, longest(m, receives->count));
  for (int64_t begin = 0; begin < most && !m->lists.failed; begin += m->mailbox_rows) {
    m->moves = sent;
    append_writes(m, cut_round(m, sends->count, begin));
    m->moves = received;
    append_reads(m, cut_round(m, receives->count, begin));
    hcp__append(&m->lists, HCP_MAILBOX_ROUNDS,
                (const int64_t[]){hcp__records(&m->lists, HCP_MAILBOX_WRITES),
                                  hcp__records(&m->lists, HCP_MAILBOX_READS)});
  }
}

static hcp_status check_moves(const hcp_moves *given, const char *name, hcp_error *err) {
  for (int64_t i = 0; i < given->count * MOVE_WORDS; i++)
    if (given->moves[i] < 0 || given->moves[i] >= HCP__LENGTH_MAX)
      return hcp__fail(err, HCP_INVALID, "%s[%lld] has %lld, expected a rank and rows >= 0", name,
                       (long long)(i / MOVE_WORDS), (long long)given->moves[i]);
  return HCP_OK;
}

hcp_status hcp_mailbox_create(const hcp_moves *sends, const hcp_moves *receives,
                              int64_t mailbox_rows, hcp_table **rounds, hcp_error *err) {
  if (mailbox_rows < 1)
    return hcp__fail(err, HCP_INVALID, "mailbox_rows is %lld, expected >= 1",
                     (long long)mailbox_rows);
  hcp_status status = check_moves(sends, "sends", err);
  if (status == HCP_OK) status = check_moves(receives, "receives", err);
  if (status != HCP_OK) return status;
  size_t moves = (size_t)(sends->count + receives->count);
  char *block = calloc(moves + 1, sizeof(move) + sizeof(piece));
  if (block == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for mailboxes");
  maker m = {.mailbox_rows = mailbox_rows, .moves = (move *)(void *)block};
  m.pieces = (piece *)(m.moves + moves);
  hcp__lists_init(&m.lists, widths, HCP_MAILBOX_SECTION_COUNT);
  make(&m, sends, receives, m.moves + sends->count);
  status = hcp__table_create(&m.lists, HCP_MAILBOX_SECTION_COUNT, rounds, err);
  hcp__lists_release(&m.lists);
  free(block);
  return status;
}
