/* Mailboxes: rounds of drawn messages move every row once, in at most a mailbox of rows. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "hcp/hcp.h"

enum { RANKS = 5, MOVES = 12, ROWS = 200 };

static const int32_t widths[HCP_MAILBOX_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_MAILBOX_SECTIONS(WIDTH)
#undef WIDTH
};

static uint32_t state = 7;

static int64_t draw(int64_t below) {
  state = state * 1664525u + 1013904223u;
  return (int64_t)(state >> 8) % below;
}

static int64_t records(const hcp_table *table, int32_t section) {
  return table->words[table->header_words + 2 * section + 1];
}

static const int64_t *record(const hcp_table *table, int32_t section, int64_t i) {
  return table->words + table->words[table->header_words + 2 * section] + i * widths[section];
}

/* Moves of drawn ranks, end to end in a buffer. Returns how many. */
static int64_t draw_moves(int64_t *moves) {
  int64_t n = draw(MOVES + 1), row = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t rows = draw(10);
    memcpy(moves + 3 * i, (const int64_t[]){draw(RANKS), row, rows}, 3 * sizeof *moves);
    row += rows;
  }
  return n;
}

/* Every row of the moves is in `times` as often as it should be: once. */
static void check_once(const int64_t *moves, int64_t n, const int32_t *times) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t row = moves[3 * i + 1]; row < moves[3 * i + 1] + moves[3 * i + 2]; row++)
      CHECK_INT(times[row], 1);
}

static void count_writes(const hcp_table *table, int64_t mailbox_rows, int32_t *times) {
  int64_t begin = 0;
  for (int64_t i = 0; i < records(table, HCP_MAILBOX_WRITES); i++) {
    const int64_t *write = record(table, HCP_MAILBOX_WRITES, i);
    CHECK(write[1] >= 1 && write[1] <= mailbox_rows);
    int64_t at = 0;
    for (int64_t r = begin; r < write[2]; r++) {
      const int64_t *run = record(table, HCP_MAILBOX_WRITE_RUNS, r);
      CHECK_INT(run[0], at); /* a mailbox is filled from its first row on */
      for (int64_t k = 0; k < run[1]; k++) times[run[3] + k]++;
      at += run[1];
    }
    CHECK_INT(at, write[1]);
    begin = write[2];
  }
}

static void count_reads(const hcp_table *table, int32_t *times) {
  int64_t owners = 0, begin = 0;
  for (int64_t i = 0; i < records(table, HCP_MAILBOX_READS); i++) {
    const int64_t *read = record(table, HCP_MAILBOX_READS, i);
    for (int64_t r = begin; r < read[3]; r++) {
      const int64_t *run = record(table, HCP_MAILBOX_READ_RUNS, r);
      CHECK(run[2] >= 0 && owners + run[2] < read[2]);
      const int64_t *owner = record(table, HCP_MAILBOX_OWNERS, owners + run[2]);
      CHECK(run[3] + run[1] <= owner[1]);
      for (int64_t k = 0; k < run[1]; k++) times[read[0] + run[0] + k]++;
    }
    owners = read[2];
    begin = read[3];
  }
}

static void every_row_moves_once(void) {
  for (int32_t i = 0; i < 500; i++) {
    int64_t sent[3 * MOVES], received[3 * MOVES], rows = 1 + draw(12);
    int32_t given[ROWS] = {0}, taken[ROWS] = {0};
    hcp_moves sends = {sent, draw_moves(sent)}, receives = {received, draw_moves(received)};
    hcp_table *table;
    CHECK_INT(hcp_mailbox_create(&sends, &receives, rows, &table, NULL), HCP_OK);
    count_writes(table, rows, given);
    count_reads(table, taken);
    check_once(sent, sends.count, given);
    check_once(received, receives.count, taken);
    hcp_table_destroy(table);
  }
}

static void what_is_no_move_is_refused(void) {
  const int64_t move[3] = {1, -2, 3};
  hcp_moves one = {move, 1}, none = {NULL, 0};
  hcp_table *table;
  hcp_error err;
  CHECK_INT(hcp_mailbox_create(&none, &one, 4, &table, &err), HCP_INVALID);
  CHECK_INT(hcp_mailbox_create(&none, &none, 0, &table, &err), HCP_INVALID);
}

int main(void) {
  every_row_moves_once();
  what_is_no_move_is_refused();
  return check_report("test_mailbox");
}
