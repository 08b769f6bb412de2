/* How ranks count their exchanges: every order in which the streams of two ranks can run, and
 * many orders of three. Each order must end, and every read find the rows of its exchange. */
#include "hcp/signal.h"

#include <stdlib.h>

#include "check.h"

enum { RANKS = 3, HALVES = 2, PIECES = 2, EXCHANGES = 16, STREAMS = 2 * RANKS, STEPS = 400 };
enum { STAGED, READ, KINDS };

/* An exchange in which every member stages for, and reads from, all others. */
typedef struct exchange {
  int half;
  uint32_t tag;
  int members; /* bits */
  int graph;   /* whether a graph replays it: a rank reads after it has staged */
} exchange;

/* How the protocol is broken on purpose. */
typedef enum fault {
  NO_FAULT,
  STAGES_AT_ONCE,    /* without a wait for those who read */
  TELLS_BEFORE_READ, /* "has been read", before it has */
  COUNTS_OF_HOST,    /* a replay carries the counts of the capture */
  OTHER_TAG,         /* the last rank is in another call in the last exchange */
  READS_FIRST,       /* in one queue, where a graph may put both streams */
  ONE_QUEUE,         /* the same, staging first: no fault */
} fault;

typedef enum what {
  FREE,
  COUNT_STAGED,
  STAGE,
  TELL_STAGED,
  HERE,
  LOOK,
  COUNT_READ,
  TELL_READ,
  AFTER
} what;

typedef struct step {
  what what;
  int exchange, peer, piece;
  int stream, until; /* AFTER: where another stream has to be */
} step;

typedef struct program {
  const exchange *exchanges;
  int ranks, n;
  fault fault;
  step steps[STREAMS][STEPS];
  int length[STREAMS];
} program;

typedef struct state {
  int at[STREAMS];
  uint64_t counts[RANKS][KINDS * HALVES * RANKS];
  uint64_t words[RANKS][KINDS][HALVES][RANKS][PIECES]; /* owner, then writer */
  int rows[RANKS][HALVES][PIECES];                     /* of which exchange */
} state;

typedef enum outcome { MOVED, BLOCKED, OTHER_CALL, OTHER_ROWS } outcome;

static int64_t place(int kind, int half, int peer) { return (kind * HALVES + half) * RANKS + peer; }

/* ---- programs ---- */

static void add(program *p, int stream, step next) {
  if (p->length[stream] == STEPS) abort();
  p->steps[stream][p->length[stream]++] = next;
}

static int is_peer(const program *p, int e, int rank, int peer) {
  return peer < p->ranks && peer != rank && p->exchanges[e].members >> peer & 1;
}

#define EACH_PEER                          \
  for (int peer = 0; peer < RANKS; ++peer) \
    if (is_peer(p, e, rank, peer))
#define EACH_PIECE for (int piece = 0; piece < PIECES; ++piece)

static void add_staging(program *p, int stream, int rank, int e) {
  if (p->fault != STAGES_AT_ONCE)
    for (int peer = 0; peer < p->ranks; ++peer) add(p, stream, (step){FREE, e, peer, 0, 0, 0});
  add(p, stream, (step){COUNT_STAGED, e, 0, 0, 0, 0});
  EACH_PIECE {
    add(p, stream, (step){STAGE, e, 0, piece, 0, 0});
    EACH_PEER add(p, stream, (step){TELL_STAGED, e, peer, piece, 0, 0});
  }
}

static void add_reading(program *p, int stream, int rank, int e) {
  int early = p->fault == TELLS_BEFORE_READ;
  EACH_PEER EACH_PIECE {
    add(p, stream, (step){HERE, e, peer, piece, 0, 0});
    if (!early) add(p, stream, (step){LOOK, e, peer, piece, 0, 0});
  }
  add(p, stream, (step){COUNT_READ, e, 0, 0, 0, 0});
  EACH_PEER add(p, stream, (step){TELL_READ, e, peer, 0, 0, 0});
  if (early) EACH_PEER EACH_PIECE add(p, stream, (step){LOOK, e, peer, piece, 0, 0});
}

/* A rank's streams: one stages, the other follows it and reads. The first goes on when what was
 * read before the last exchange is there, which is later than attention would. */
static void add_rank(program *p, int rank) {
  int stages = 2 * rank, reads = 2 * rank + 1, joined[EXCHANGES + 1] = {0}, before = 0;
  for (int e = 0; e < p->n; ++e) {
    if (!(p->exchanges[e].members >> rank & 1)) continue;
    if (p->fault == ONE_QUEUE || p->fault == READS_FIRST) {
      if (p->fault == READS_FIRST) add_reading(p, stages, rank, e);
      add_staging(p, stages, rank, e);
      if (p->fault == ONE_QUEUE) add_reading(p, stages, rank, e);
      continue;
    }
    add(p, stages, (step){AFTER, e, 0, 0, reads, joined[before]});
    before = e;
    joined[e] = p->length[reads];
    int begun = p->length[stages];
    add_staging(p, stages, rank, e);
    if (p->exchanges[e].graph) begun = p->length[stages];
    add(p, reads, (step){AFTER, e, 0, 0, stages, begun});
    add_reading(p, reads, rank, e);
  }
}

static program *program_of(const exchange *exchanges, int n, int ranks, fault broken) {
  program *p = calloc(1, sizeof *p);
  if (p == NULL) abort();
  p->exchanges = exchanges;
  p->n = n;
  p->ranks = ranks;
  p->fault = broken;
  for (int rank = 0; rank < ranks; ++rank) add_rank(p, rank);
  return p;
}

/* As memory is when the job begins, but that so many exchanges have been. */
static state begun(uint64_t so_far) {
  state s;
  memset(&s, 0, sizeof s);
  for (int rank = 0; rank < RANKS; ++rank)
    for (int half = 0; half < HALVES; ++half)
      for (int peer = 0; peer < RANKS; ++peer)
        for (int kind = 0; kind < KINDS; ++kind) {
          s.counts[rank][place(kind, half, peer)] = so_far;
          EACH_PIECE s.words[rank][kind][half][peer][piece] = hcp_signal_word(so_far, 0);
        }
  return s;
}

/* ---- steps ---- */

static outcome compare(uint64_t found, uint64_t expected) {
  if (hcp_signal_is_behind(found, expected)) return BLOCKED;
  return found == expected ? MOVED : OTHER_CALL;
}

static void count_peers(const program *p, uint64_t *counts, int rank, int e, int kind) {
  EACH_PEER hcp_signal_count(counts, place(kind, p->exchanges[e].half, peer), 1);
}

static outcome move(const program *p, state *s, int stream) {
  const step *next = &p->steps[stream][s->at[stream]];
  const exchange *of = &p->exchanges[next->exchange];
  int rank = stream / 2, half = of->half, peer = next->peer;
  int is_other = p->fault == OTHER_TAG && next->exchange == p->n - 1 && rank == p->ranks - 1;
  uint32_t tag = of->tag + (uint32_t)is_other;
  uint64_t captured[KINDS * HALVES * RANKS] = {0};
  uint64_t *counts = s->counts[rank];
  const uint64_t *expected = p->fault == COUNTS_OF_HOST && of->graph ? captured : counts;
  outcome found = MOVED;
  switch (next->what) {
    case FREE:
      found = compare(s->words[rank][READ][half][peer][0],
                      hcp_signal_expected(expected, place(STAGED, half, peer), 0, 0));
      break;
    case COUNT_STAGED:
      count_peers(p, counts, rank, next->exchange, STAGED);
      break;
    case STAGE:
      s->rows[rank][half][next->piece] = next->exchange;
      break;
    case TELL_STAGED:
      s->words[peer][STAGED][half][rank][next->piece] =
          hcp_signal_told(counts, place(STAGED, half, peer), tag);
      break;
    case HERE:
      found = compare(s->words[rank][STAGED][half][peer][next->piece],
                      hcp_signal_expected(expected, place(READ, half, peer), 1, tag));
      break;
    case LOOK:
      if (s->rows[peer][half][next->piece] != next->exchange) found = OTHER_ROWS;
      break;
    case COUNT_READ:
      count_peers(p, counts, rank, next->exchange, READ);
      break;
    case TELL_READ:
      s->words[peer][READ][half][rank][0] = hcp_signal_told(counts, place(READ, half, peer), 0);
      break;
    case AFTER:
      if (s->at[next->stream] < next->until) found = BLOCKED;
      break;
  }
  if (found == MOVED) ++s->at[stream];
  return found;
}

/* What was found in the orders that were run. */
typedef struct report {
  int64_t states, ends, hangs, other_calls, other_rows;
} report;

static int is_over(const program *p, const state *s) {
  for (int stream = 0; stream < 2 * p->ranks; ++stream)
    if (s->at[stream] < p->length[stream]) return 0;
  return 1;
}

/* ---- every order ---- */

enum { SEEN = 1 << 22 };
static uint64_t seen[SEEN];

/* Where streams are says all: every word and row has one writer. */
static int is_new(const state *s) {
  uint64_t key = 1;
  for (int stream = 0; stream < STREAMS; ++stream) key = key * STEPS + (uint64_t)s->at[stream];
  uint64_t at = key * 0x9E3779B97F4A7C15u >> 42;
  for (int tries = 0; tries < SEEN; ++tries, at = (at + 1) % SEEN) {
    if (seen[at] == key) return 0;
    if (seen[at] == 0) {
      seen[at] = key;
      return 1;
    }
  }
  abort();
}

static void explore(const program *p, const state *s, report *found) {
  if (!is_new(s)) return;
  ++found->states;
  if (is_over(p, s)) {
    ++found->ends;
    return;
  }
  int moved = 0;
  for (int stream = 0; stream < 2 * p->ranks; ++stream) {
    if (s->at[stream] == p->length[stream]) continue;
    state after = *s;
    outcome next = move(p, &after, stream);
    if (next == BLOCKED) continue;
    moved = 1;
    found->other_calls += next == OTHER_CALL;
    found->other_rows += next == OTHER_ROWS;
    if (next == MOVED) explore(p, &after, found);
  }
  found->hangs += !moved;
}

static report every_order(const exchange *exchanges, int n, fault broken, uint64_t so_far) {
  program *p = program_of(exchanges, n, 2, broken);
  report found = {0, 0, 0, 0, 0};
  state first = begun(so_far);
  memset(seen, 0, sizeof seen);
  explore(p, &first, &found);
  free(p);
  return found;
}

/* ---- many orders ---- */

static uint64_t drawn = 1;

static int draw(int n) {
  drawn = drawn * 6364136223846793005u + 1442695040888963407u;
  return (int)((drawn >> 33) % (uint64_t)n);
}

static void run_once(const program *p, report *found) {
  state s = begun(0);
  while (!is_over(p, &s)) {
    int first = draw(2 * p->ranks), moved = 0;
    for (int i = 0; i < 2 * p->ranks && !moved; ++i) {
      int stream = (first + i) % (2 * p->ranks);
      if (s.at[stream] == p->length[stream]) continue;
      outcome next = move(p, &s, stream);
      moved = next != BLOCKED;
      found->other_calls += next == OTHER_CALL;
      found->other_rows += next == OTHER_ROWS;
      if (next == OTHER_CALL || next == OTHER_ROWS) return;
      /* Some streams run far ahead. */
      while (moved && draw(4) && s.at[stream] < p->length[stream] && move(p, &s, stream) == MOVED) {
      }
    }
    if (!moved) {
      ++found->hangs;
      return;
    }
  }
  ++found->ends;
}

/* ---- tests ---- */

#define BOTH 3
/* An exchange, a graph of two that begins with the other half, the same again, exchanges of one
 * half in a row, the graph once more. */
static const exchange replayed[] = {
    {0, 7, BOTH, 0}, {1, 8, BOTH, 1}, {0, 9, BOTH, 1}, {1, 8, BOTH, 1}, {0, 9, BOTH, 1},
    {0, 5, BOTH, 0}, {0, 6, BOTH, 0}, {1, 8, BOTH, 1}, {0, 9, BOTH, 1},
};
enum { N = sizeof replayed / sizeof *replayed };

static void check_clean(report found, int64_t ends) {
  CHECK_INT(found.hangs, 0);
  CHECK_INT(found.other_calls, 0);
  CHECK_INT(found.other_rows, 0);
  CHECK_INT(found.ends, ends);
}

static void test_no_order_of_two_ranks_loses_a_row(void) {
  report found = every_order(replayed, N, NO_FAULT, 0);
  check_clean(found, 1);
  CHECK(found.states > 10000);
  check_clean(every_order(replayed, N, ONE_QUEUE, 0), 1);
}

static void test_counts_wrap(void) {
  for (uint64_t before = 1; before <= 5; before += 2)
    check_clean(every_order(replayed, N, NO_FAULT, (1ull << 32) - before), 1);
  CHECK(hcp_signal_is_behind(hcp_signal_word((1ull << 32) - 1, 5), hcp_signal_word(1ull << 32, 5)));
  CHECK(!hcp_signal_is_behind(hcp_signal_word(3, 4), hcp_signal_word(3, 5)));
  CHECK(!hcp_signal_is_behind(hcp_signal_word(4, 0), hcp_signal_word(3, ~0u)));
}

static void test_every_fault_shows_in_some_order(void) {
  CHECK(every_order(replayed, N, STAGES_AT_ONCE, 0).other_rows > 0);
  CHECK(every_order(replayed, N, TELLS_BEFORE_READ, 0).other_rows > 0);
  CHECK_INT(every_order(replayed, N, COUNTS_OF_HOST, 0).ends, 0);
  CHECK_INT(every_order(replayed, N, READS_FIRST, 0).ends, 0);
  CHECK(every_order(replayed, N, READS_FIRST, 0).hangs > 0);
}

static void test_ranks_in_different_calls_hear_it_before_they_use_rows(void) {
  report found = every_order(replayed, N, OTHER_TAG, 0);
  CHECK(found.other_calls > 0);
  CHECK_INT(found.other_rows, 0);
  CHECK_INT(found.ends, 0);
}

static void test_many_orders_of_three_ranks_in_changing_groups(void) {
  exchange exchanges[EXCHANGES];
  report found = {0, 0, 0, 0, 0}, broken = {0, 0, 0, 0, 0};
  const int members[] = {7, 3, 5, 6};
  for (int round = 0; round < 600; ++round) {
    for (int e = 0; e < EXCHANGES; ++e)
      exchanges[e] = (exchange){draw(HALVES), (uint32_t)draw(9), members[draw(4)], draw(2)};
    program *p = program_of(exchanges, EXCHANGES, 3, NO_FAULT);
    run_once(p, &found);
    free(p);
    p = program_of(exchanges, EXCHANGES, 3, STAGES_AT_ONCE);
    run_once(p, &broken);
    free(p);
  }
  check_clean(found, 600);
  CHECK(broken.ends < 600);
}

int main(void) {
  test_no_order_of_two_ranks_loses_a_row();
  test_counts_wrap();
  test_every_fault_shows_in_some_order();
  test_ranks_in_different_calls_hear_it_before_they_use_rows();
  test_many_orders_of_three_ranks_in_changing_groups();
  return check_report("test_signals");
}
