/* Links: the two sides of a signal name one word, and those of a message one mailbox; no two share
 * a word, a count or memory; and rounds are read only where they are sound. */
#include <stdlib.h>

#include "check.h"
#include "hcp/link.h"

enum { RANKS = 5, BUFFER = 20 * HCP_PAGE_BYTES + 77 };

static int64_t bases[RANKS];

/* The links of all ranks, each of which has mapped all memories. */
static void make_links(hcp_link *links[RANKS]) {
  hcp_error err;
  for (int32_t rank = 0; rank < RANKS; rank++) bases[rank] = (int64_t)(rank + 1) << 32;
  for (int32_t rank = 0; rank < RANKS; rank++)
    CHECK(hcp_link_create(rank, RANKS, bases, BUFFER, &links[rank], &err) == HCP_OK);
}

/* The only signal of a section of an exchange between a rank and a peer. */
static hcp_signal signal_of(const hcp_link *link, int32_t section, int64_t peer, int64_t half) {
  const hcp_link_read read = {&peer, &peer, 1, 1};
  hcp_table *table;
  hcp_error err;
  hcp_signal signal = {0};
  CHECK(hcp_link_exchange(link, half, &peer, 1, &read, 1, &table, &err) == HCP_OK);
  const int64_t *head = table->words + HCP_TABLE_HEADER + 2 * section;
  CHECK_INT(head[1], section == HCP_LINK_FREE ? RANKS : 1);
  memcpy(&signal, table->words + head[0] + (section == HCP_LINK_FREE ? 4 * peer : 0),
         sizeof signal);
  CHECK_INT(signal.peer, peer);
  hcp_table_destroy(table);
  return signal;
}

/* What one rank raises, another waits for. */
static void check_sides(hcp_link *const links[RANKS]) {
  for (int32_t owner = 0; owner < RANKS; owner++)
    for (int32_t reader = 0; reader < RANKS; reader++)
      for (int64_t half = 0; half < HCP_HALVES; half++) {
        hcp_signal free = signal_of(links[owner], HCP_LINK_FREE, reader, half);
        hcp_signal filled = signal_of(links[owner], HCP_LINK_FILLED, reader, half);
        hcp_signal full = signal_of(links[reader], HCP_LINK_FULL, owner, half);
        hcp_signal done = signal_of(links[reader], HCP_LINK_DONE, owner, half);
        CHECK(filled.word == full.word && done.word == free.word && free.word != full.word);
        CHECK_INT(free.count, filled.count);
        CHECK_INT(full.count, done.count);
        CHECK(free.count != full.count);
        CHECK(!free.more && filled.more && full.more && !done.more);
      }
}

/* An owner that an earlier read has met is not counted again; ranks before this one are. */
static void check_reads(const hcp_link *link) {
  const int64_t owners[] = {3, 0, 1}, later[] = {1, 4};
  const hcp_link_read reads[] = {{owners, later, 3, 0}, {later, owners, 2, 3}};
  static const int64_t met[] = {0, 0, 0, 1, 0};
  hcp_table *table;
  hcp_error err;
  CHECK(hcp_link_exchange(link, 1, NULL, 0, reads, 2, &table, &err) == HCP_OK);
  const int64_t *heads = table->words + HCP_TABLE_HEADER;
  const int64_t *found = table->words + heads[2 * HCP_LINK_READS];
  CHECK(memcmp(found, (const int64_t[]){3, 0, 2, 5, 3, 1}, 6 * sizeof *found) == 0);
  const int64_t *full = table->words + heads[2 * HCP_LINK_FULL];
  for (int64_t i = 0; i < 5; i++) CHECK_INT(full[4 * i + 3], !met[i]);
  CHECK_INT(heads[2 * HCP_LINK_FILLED + 1], 0);
  hcp_table_destroy(table);
}

/* Of one rank, whose words and counts are marked as they come. */
static void check_apart(const hcp_link *link) {
  hcp_error err;
  int64_t bytes = hcp_link_bytes(RANKS, BUFFER), begin, end = 0, counts = hcp_link_counts(RANKS);
  CHECK(hcp_link_rows(link, 0, 1, link->half_bytes, &begin, &err) == HCP_OK);
  char *words = calloc((size_t)begin / 8, 1), *counted = calloc((size_t)counts, 1);
  for (int32_t section = 0; section < 2; section++)
    for (int64_t peer = 0; peer < RANKS; peer++)
      for (int64_t half = 0; half < HCP_HALVES; half++) {
        hcp_signal signal = signal_of(link, section ? HCP_LINK_FREE : HCP_LINK_FULL, peer, half);
        int64_t first = (int64_t)((uint64_t)(uintptr_t)signal.word - (uint64_t)bases[link->rank]);
        CHECK(first >= 0 && first + HCP_PIECES * 8 <= begin);
        for (int64_t word = first / 8; word < first / 8 + HCP_PIECES; word++) CHECK(!words[word]++);
        CHECK(!counted[signal.count]++);
      }
  for (int64_t half = 0; half < HCP_HALVES; half++) {
    CHECK(hcp_link_rows(link, half, 1, link->half_bytes, &end, &err) == HCP_OK);
    CHECK_INT(end, begin + half * link->half_bytes);
    CHECK_INT(end % HCP_PAGE_BYTES, 0);
  }
  CHECK_INT(end + link->half_bytes, bytes);
  CHECK(HCP_HALVES * link->half_bytes <= BUFFER);
  free(words);
  free(counted);
}

static void check_refused(const hcp_link *link) {
  const int64_t nobody = RANKS;
  hcp_error err;
  hcp_link *none = NULL;
  hcp_table *table = NULL;
  int64_t begin;
  CHECK(hcp_link_create(RANKS, RANKS, bases, BUFFER, &none, &err) == HCP_INVALID);
  CHECK(hcp_link_create(0, RANKS, bases, -1, &none, &err) == HCP_INVALID);
  CHECK(none == NULL);
  CHECK(hcp_link_exchange(link, 0, &nobody, 1, NULL, 0, &table, &err) == HCP_INVALID);
  CHECK(hcp_link_exchange(link, HCP_HALVES, NULL, 0, NULL, 0, &table, &err) == HCP_INVALID);
  CHECK(hcp_link_rows(link, HCP_HALVES, 1, 1, &begin, &err) == HCP_INVALID);
  CHECK(hcp_link_rows(link, 0, link->half_bytes + 1, 1, &begin, &err) == HCP_INVALID);
  CHECK_TEXT(err.message, "peer_buffer_bytes=");
  for (int64_t staged = 1; staged <= 3 * HCP_PAGE_BYTES; staged += 37) {
    hcp_link *least = NULL;
    CHECK(hcp_link_create(0, RANKS, bases, hcp_link_buffer_bytes(staged), &least, &err) == HCP_OK);
    CHECK(hcp_link_rows(least, 1, 1, staged, &begin, &err) == HCP_OK);
    CHECK(hcp_link_rows(least, 1, 1, staged + HCP_PAGE_BYTES, &begin, &err) == HCP_INVALID);
    hcp_link_destroy(least);
  }
  CHECK(hcp_link_check(link, hcp_link_words(RANKS), &err) == HCP_OK);
  CHECK(hcp_link_check(link, hcp_link_words(RANKS) - 1, &err) == HCP_INVALID);
  CHECK(hcp_link_check(link, 0, &err) == HCP_INVALID);
  CHECK(table == NULL);
}

/* ---- messages ---- */

/* Both ends of messages name the same mailboxes and words, and no two pairs share one. */
static void check_messages(hcp_link *const links[RANKS]) {
  char *taken[HCP_HALVES * RANKS * RANKS];
  int n = 0;
  for (int64_t owner = 0; owner < RANKS; owner++)
    for (int64_t reader = 0; reader < RANKS; reader++)
      for (int message = 0; message < 2 * HCP_HALVES && owner != reader; message++) {
        hcp_message out = hcp_link_next_sent(links[owner], reader);
        hcp_message in = hcp_link_next_received(links[reader], owner, 0);
        hcp_message again = hcp_link_next_received(links[reader], owner, 1);
        CHECK(out.rows == in.rows && in.rows == again.rows);
        CHECK(out.told.word == in.awaited.word && in.told.word == out.awaited.word);
        CHECK(in.awaited.more && !again.awaited.more);
        uint64_t begin = (uint64_t)(uintptr_t)out.rows - (uint64_t)bases[owner];
        CHECK_INT(begin % HCP_PAGE_BYTES, 0);
        CHECK((int64_t)begin + links[owner]->mailbox_bytes <= hcp_link_bytes(RANKS, BUFFER));
        for (int i = 0; i < n && message < HCP_HALVES; i++) {
          int64_t apart = (char *)out.rows > taken[i] ? (char *)out.rows - taken[i]
                                                      : taken[i] - (char *)out.rows;
          CHECK(apart >= links[owner]->mailbox_bytes);
        }
        if (message < HCP_HALVES) taken[n++] = out.rows;
      }
}

static hcp_status read_rounds(const hcp_link *link, const int64_t *words, int64_t n) {
  hcp_mail mail;
  hcp_error err;
  /* Of memory of just that size, so that the sanitizer sees what is read beyond. */
  int64_t *copy = malloc((size_t)(n ? n : 1) * sizeof *copy);
  memcpy(copy, words, (size_t)n * sizeof *copy);
  hcp_status status =
      hcp_link_read_rounds(link, copy, n, (hcp_mail_sizes){64, 64, 400}, &mail, &err);
  volatile int64_t seen = 0; /* whatever was found sound can be read */
  for (int64_t i = 0; status == HCP_OK && i < mail.count[HCP_MAILBOX_READ_RUNS]; i++)
    seen = mail.read_runs[i].rows;
  for (int64_t i = 0; status == HCP_OK && i < mail.count[HCP_MAILBOX_WRITES]; i++) {
    CHECK(mail.writes[i].runs_end <= mail.count[HCP_MAILBOX_WRITE_RUNS]);
    CHECK(mail.writes[i].rows * 64 <= link->mailbox_bytes);
  }
  (void)seen;
  free(copy);
  return status;
}

/* Rounds as they are made are sound; with any word changed, or cut, what is sound can be read. */
static void check_rounds(const hcp_link *link) {
  const int64_t out[] = {1, 0, 100, 3, 100, 9, 1, 109, 40}, back[] = {3, 0, 200, 2, 200, 7};
  const int64_t bad[] = {-1, 1, 1 << 20, INT64_MAX, INT64_MIN};
  const hcp_moves sends = {out, 3}, receives = {back, 2};
  hcp_table *table;
  hcp_error err;
  CHECK(hcp_link_rounds(link, &sends, &receives, 64, &table, &err) == HCP_OK);
  CHECK(read_rounds(link, table->words, table->word_count) == HCP_OK);
  for (int64_t i = 0; i < table->word_count; i++)
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
      int64_t kept = table->words[i];
      table->words[i] = bad[k];
      read_rounds(link, table->words, table->word_count);
      table->words[i] = kept;
    }
  for (int64_t n = 0; n < table->word_count; n++)
    CHECK(n > 14 || read_rounds(link, table->words, n) == HCP_INVALID);
  hcp_table_destroy(table);
  const hcp_moves to_itself = {(const int64_t[]){link->rank, 0, 1}, 1}, none = {NULL, 0};
  CHECK(hcp_link_rounds(link, &to_itself, &none, 64, &table, &err) == HCP_INVALID);
  CHECK(hcp_link_rounds(link, &none, &receives, link->mailbox_bytes + 1, &table, &err) ==
        HCP_INVALID);
  CHECK_TEXT(err.message, "peer_buffer_bytes=");
}

int main(void) {
  hcp_link *links[RANKS] = {NULL};
  make_links(links);
  check_sides(links);
  for (int32_t rank = 0; rank < RANKS; rank++) check_apart(links[rank]);
  check_reads(links[2]);
  check_refused(links[0]);
  check_rounds(links[0]);
  check_messages(links);
  for (int32_t rank = 0; rank < RANKS; rank++) hcp_link_destroy(links[rank]);
  return check_report("test_link");
}
