/* link.c - what lies where in memory that ranks have mapped, the signals of an exchange, and the
 * messages that go through mailboxes. */
#include "hcp/link.h"

#include <stdlib.h>

#include "../core/internal.h"

enum { WORD_BYTES = sizeof(uint64_t) };

/* Whose memory a signal lies in, what it says, and by which count. */
typedef struct meaning {
  int to_peer; /* 0: in this rank's own memory, where the peer writes it */
  int kind, counted, counts;
} meaning;

static const meaning FREE = {.to_peer = 0, .kind = HCP_READ, .counted = HCP_STAGED, .counts = 0};
static const meaning FILLED = {
    .to_peer = 1, .kind = HCP_STAGED, .counted = HCP_STAGED, .counts = 1};
static const meaning FULL = {.to_peer = 0, .kind = HCP_STAGED, .counted = HCP_READ, .counts = 1};
static const meaning DONE = {.to_peer = 1, .kind = HCP_READ, .counted = HCP_READ, .counts = 0};

static const int32_t widths[HCP_LINK_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_LINK_SECTIONS(WIDTH)
#undef WIDTH
};

static const int32_t mail_widths[HCP_MAILBOX_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_MAILBOX_SECTIONS(WIDTH)
#undef WIDTH
};

/* ---- places ---- */

static int64_t whole_pages(int64_t bytes) { return bytes / HCP_PAGE_BYTES * HCP_PAGE_BYTES; }

static int64_t half_bytes(int64_t buffer_bytes) { return whole_pages(buffer_bytes / HCP_HALVES); }

/* The place of a signal or a count among those of so many ranks. */
static int64_t place_of(int64_t ranks, int kind, int64_t half, int64_t peer) {
  return ((int64_t)kind * HCP_HALVES + half) * ranks + peer;
}

int64_t hcp_link_counts(int64_t ranks) { return place_of(ranks, HCP_KINDS, 0, 0); }

static int64_t words_bytes(int64_t ranks) {
  return whole_pages(hcp_link_counts(ranks) * HCP_PIECES * WORD_BYTES + HCP_PAGE_BYTES - 1);
}

int64_t hcp_link_buffer_bytes(int64_t staged) {
  return HCP_HALVES * whole_pages(staged + HCP_PAGE_BYTES - 1);
}

int64_t hcp_link_bytes(int64_t ranks, int64_t buffer_bytes) {
  return words_bytes(ranks) + HCP_HALVES * half_bytes(buffer_bytes);
}

static const hcp_link_peer *peer_of(const hcp_link *link, int64_t rank) {
  return (const hcp_link_peer *)(link + 1) + rank;
}

static int is_mapped(const hcp_link *link, int64_t rank) {
  return rank >= 0 && rank < link->ranks && peer_of(link, rank)->base != 0;
}

/* ---- a link ---- */

int64_t hcp_link_words(int64_t ranks) {
  return ((int64_t)sizeof(hcp_link) + ranks * (int64_t)sizeof(hcp_link_peer)) / WORD_BYTES;
}

hcp_status hcp_link_create(int32_t rank, int32_t ranks, const int64_t *bases, int64_t buffer_bytes,
                           hcp_link **link, hcp_error *err) {
  if (buffer_bytes < 0)
    return hcp__fail(err, HCP_INVALID, "buffer_bytes is %lld, expected >= 0",
                     (long long)buffer_bytes);
  if (rank < 0 || rank >= ranks || ranks > HCP__RANKS_MAX || bases[rank] == 0)
    return hcp__fail(err, HCP_INVALID,
                     "rank is %d, expected one of the %d ranks, whose own memory is mapped",
                     (int)rank, (int)ranks);
  hcp_link *made = calloc((size_t)hcp_link_words(ranks), WORD_BYTES);
  if (made == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a link");
  hcp_link_peer *peers = (hcp_link_peer *)(made + 1);
  int64_t mapped = 0;
  for (int32_t i = 0; i < ranks; i++) {
    peers[i] = (hcp_link_peer){.base = (uint64_t)bases[i], .place = mapped};
    mapped += bases[i] != 0;
  }
  *made = (hcp_link){.rank = rank, .ranks = ranks, .half_bytes = half_bytes(buffer_bytes)};
  if (mapped > 1) made->mailbox_bytes = whole_pages(made->half_bytes / (mapped - 1));
  *link = made;
  return HCP_OK;
}

void hcp_link_destroy(hcp_link *link) { free(link); }

hcp_status hcp_link_check(const hcp_link *link, int64_t words, hcp_error *err) {
  int is_link = words >= hcp_link_words(1) && link->ranks >= 1 && link->ranks <= HCP__RANKS_MAX &&
                words == hcp_link_words(link->ranks) && is_mapped(link, link->rank);
  if (is_link) return HCP_OK;
  return hcp__fail(err, HCP_INVALID, "link has %lld words that are no link", (long long)words);
}

static hcp_status check_half(int64_t half, hcp_error *err) {
  if (half >= 0 && half < HCP_HALVES) return HCP_OK;
  return hcp__fail(err, HCP_INVALID, "half is %lld, expected 0 to %d", (long long)half,
                   HCP_HALVES - 1);
}

static hcp_status check_peers(const hcp_link *link, const int64_t *peers, int64_t n,
                              hcp_error *err) {
  for (int64_t i = 0; i < n; i++)
    if (!is_mapped(link, peers[i]))
      return hcp__fail(err, HCP_INVALID, "rank %lld is not one whose memory rank %lld has mapped",
                       (long long)peers[i], (long long)link->rank);
  return HCP_OK;
}

static int64_t half_begin(const hcp_link *link, int64_t half) {
  return words_bytes(link->ranks) + half * link->half_bytes;
}

hcp_status hcp_link_rows(const hcp_link *link, int64_t half, int64_t rows, int64_t row_bytes,
                         int64_t *begin, hcp_error *err) {
  hcp_status status = check_half(half, err);
  if (status != HCP_OK) return status;
  if (rows < 0 || row_bytes < 0 || rows > HCP__LENGTH_MAX || row_bytes > HCP__LATE / (rows + 1))
    return hcp__fail(err, HCP_INVALID, "rows are %lld of %lld bytes, expected less than 2^61 bytes",
                     (long long)rows, (long long)row_bytes);
  int64_t used = rows * row_bytes;
  if (used > link->half_bytes)
    return hcp__fail(err, HCP_INVALID,
                     "an exchange stages %lld bytes (%lld rows of %lld), expected <= %lld: build "
                     "the process groups with peer_buffer_bytes=%lld or more",
                     (long long)used, (long long)rows, (long long)row_bytes,
                     (long long)link->half_bytes, (long long)hcp_link_buffer_bytes(used));
  *begin = half_begin(link, half);
  return HCP_OK;
}

/* ---- rows that are read where they are staged ---- */

static hcp_signal signal_of(const hcp_link *link, meaning is, int64_t peer, int64_t half, int met) {
  int64_t owner = is.to_peer ? peer : link->rank, writer = is.to_peer ? link->rank : peer;
  int64_t word = place_of(link->ranks, is.kind, half, writer) * HCP_PIECES;
  uint64_t address = peer_of(link, owner)->base + (uint64_t)word * WORD_BYTES;
  return (hcp_signal){(uint64_t *)(uintptr_t)address, place_of(link->ranks, is.counted, half, peer),
                      peer, is.counts && !met};
}

static void append(hcp__lists *lists, int32_t section, hcp_signal signal) {
  hcp__append(
      lists, section,
      (const int64_t[]){(int64_t)(uintptr_t)signal.word, signal.count, signal.peer, signal.more});
}

static void append_owner(hcp__lists *lists, const hcp_link *link, const int64_t *readers, int64_t n,
                         int64_t half) {
  for (int64_t peer = 0; peer < link->ranks; peer++)
    if (is_mapped(link, peer)) append(lists, HCP_LINK_FREE, signal_of(link, FREE, peer, half, 0));
  for (int64_t i = 0; i < n; i++)
    append(lists, HCP_LINK_FILLED, signal_of(link, FILLED, readers[i], half, 0));
}

/* Whether one of the first n reads has this owner. */
static int has_met(const hcp_link_read *reads, int64_t n, int64_t owner) {
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = 0; i < reads[r].owner_count; i++)
      if (reads[r].owners[i] == owner) return 1;
  return 0;
}

static void append_read(hcp__lists *lists, const hcp_link *link, const hcp_link_read *reads,
                        int64_t number, int64_t half) {
  const hcp_link_read *read = &reads[number];
  int64_t before = 0;
  for (int64_t i = 0; i < read->owner_count; i++) {
    int64_t owner = read->owners[i];
    before += owner < link->rank;
    append(lists, HCP_LINK_FULL, signal_of(link, FULL, owner, half, has_met(reads, number, owner)));
  }
  for (int64_t i = 0; i < read->done_count; i++)
    append(lists, HCP_LINK_DONE, signal_of(link, DONE, read->done[i], half, 0));
  hcp__append(lists, HCP_LINK_READS,
              (const int64_t[]){hcp__records(lists, HCP_LINK_FULL),
                                hcp__records(lists, HCP_LINK_DONE), before});
}

hcp_status hcp_link_exchange(const hcp_link *link, int64_t half, const int64_t *readers,
                             int64_t reader_count, const hcp_link_read *reads, int64_t read_count,
                             hcp_table **table, hcp_error *err) {
  hcp_status status = check_half(half, err);
  if (status == HCP_OK) status = check_peers(link, readers, reader_count, err);
  for (int64_t i = 0; i < read_count && status == HCP_OK; i++) {
    status = check_peers(link, reads[i].owners, reads[i].owner_count, err);
    if (status == HCP_OK) status = check_peers(link, reads[i].done, reads[i].done_count, err);
  }
  if (status != HCP_OK) return status;
  hcp__lists lists;
  hcp__lists_init(&lists, widths, HCP_LINK_SECTION_COUNT);
  append_owner(&lists, link, readers, reader_count, half);
  for (int64_t i = 0; i < read_count; i++) append_read(&lists, link, reads, i, half);
  status = hcp__table_create(&lists, HCP_LINK_SECTION_COUNT, table, err);
  hcp__lists_release(&lists);
  return status;
}

/* ---- messages ---- */

static int has_mailbox(const hcp_link *link, int64_t peer) {
  return is_mapped(link, peer) && peer != link->rank;
}

static hcp_status check_moves(const hcp_link *link, const hcp_moves *given, hcp_error *err) {
  for (int64_t i = 0; i < given->count; i++)
    if (!has_mailbox(link, given->moves[3 * i]))
      return hcp__fail(err, HCP_INVALID,
                       "a move is for rank %lld, with which rank %lld has no "
                       "mailboxes",
                       (long long)given->moves[3 * i], (long long)link->rank);
  return HCP_OK;
}

static int64_t mapped_ranks(const hcp_link *link) {
  int64_t n = 0;
  for (int64_t peer = 0; peer < link->ranks; peer++) n += is_mapped(link, peer);
  return n;
}

static hcp_status check_row(const hcp_link *link, int64_t row_bytes, hcp_error *err) {
  if (row_bytes >= 1 && row_bytes <= link->mailbox_bytes) return HCP_OK;
  int64_t ranks = mapped_ranks(link);
  return hcp__fail(err, HCP_INVALID,
                   "a row has %lld bytes, expected <= %lld, the size of a mailbox in a node of "
                   "%lld ranks: build the process groups with peer_buffer_bytes=%lld or more",
                   (long long)row_bytes, (long long)link->mailbox_bytes, (long long)ranks,
                   (long long)(HCP_HALVES * ranks * (row_bytes + HCP_PAGE_BYTES)));
}

hcp_status hcp_link_rounds(const hcp_link *link, const hcp_moves *sends, const hcp_moves *receives,
                           int64_t row_bytes, hcp_table **rounds, hcp_error *err) {
  hcp_status status = check_row(link, row_bytes, err);
  if (status == HCP_OK) status = check_moves(link, sends, err);
  if (status == HCP_OK) status = check_moves(link, receives, err);
  if (status != HCP_OK) return status;
  return hcp_mailbox_create(sends, receives, link->mailbox_bytes / row_bytes, rounds, err);
}

/* Whether an end among the records of a section comes after the one before, inside the section. */
static int goes_on(const hcp_mail *mail, int32_t section, int64_t before, int64_t end) {
  return end >= before && end <= mail->count[section];
}

static int rounds_are_sound(const hcp_mail *mail) {
  hcp_mail_round before = {0, 0};
  for (int64_t i = 0; i < mail->count[HCP_MAILBOX_ROUNDS]; before = mail->rounds[i++])
    if (!goes_on(mail, HCP_MAILBOX_WRITES, before.writes_end, mail->rounds[i].writes_end) ||
        !goes_on(mail, HCP_MAILBOX_READS, before.reads_end, mail->rounds[i].reads_end))
      return 0;
  return 1;
}

/* Whether so many rows fit into a mailbox that this rank shares with the peer. */
static int fits(const hcp_link *link, int64_t peer, int64_t rows, int64_t row_bytes) {
  return has_mailbox(link, peer) && rows >= 0 && row_bytes >= 1 &&
         rows <= link->mailbox_bytes / row_bytes;
}

static int writes_are_sound(const hcp_link *link, const hcp_mail *mail, int64_t row_bytes) {
  int64_t before = 0;
  for (int64_t i = 0; i < mail->count[HCP_MAILBOX_WRITES]; before = mail->writes[i++].runs_end)
    if (!fits(link, mail->writes[i].reader, mail->writes[i].rows, row_bytes) ||
        !goes_on(mail, HCP_MAILBOX_WRITE_RUNS, before, mail->writes[i].runs_end))
      return 0;
  return 1;
}

static int reads_are_sound(const hcp_link *link, const hcp_mail *mail, hcp_mail_sizes sizes) {
  hcp_mail_read before = {0, 0, 0, 0};
  for (int64_t i = 0; i < mail->count[HCP_MAILBOX_READS]; before = mail->reads[i++]) {
    const hcp_mail_read *read = &mail->reads[i];
    if (read->first_row < 0 || read->rows < 0 ||
        read->rows > sizes.received_rows - read->first_row ||
        !goes_on(mail, HCP_MAILBOX_OWNERS, before.owners_end, read->owners_end) ||
        !goes_on(mail, HCP_MAILBOX_READ_RUNS, before.runs_end, read->runs_end))
      return 0;
  }
  for (int64_t i = 0; i < mail->count[HCP_MAILBOX_OWNERS]; i++)
    if (!fits(link, mail->owners[i].peer, mail->owners[i].rows, sizes.received_row_bytes)) return 0;
  return 1;
}

static int find_sections(const int64_t *words, int64_t word_count, hcp_mail *mail) {
  const int64_t *found[HCP_MAILBOX_SECTION_COUNT], *heads = words + HCP_TABLE_HEADER;
  if (word_count < HCP_TABLE_HEADER + 2 * HCP_MAILBOX_SECTION_COUNT) return 0;
  for (int64_t s = 0; s < HCP_MAILBOX_SECTION_COUNT; s++) {
    int64_t first = heads[2 * s], records = heads[2 * s + 1];
    if (first < 0 || first > word_count || records < 0 ||
        records > (word_count - first) / mail_widths[s])
      return 0;
    found[s] = words + first;
    mail->count[s] = records;
  }
  mail->rounds = (const void *)found[HCP_MAILBOX_ROUNDS];
  mail->writes = (const void *)found[HCP_MAILBOX_WRITES];
  mail->write_runs = (const void *)found[HCP_MAILBOX_WRITE_RUNS];
  mail->reads = (const void *)found[HCP_MAILBOX_READS];
  mail->owners = (const void *)found[HCP_MAILBOX_OWNERS];
  mail->read_runs = (const void *)found[HCP_MAILBOX_READ_RUNS];
  return 1;
}

hcp_status hcp_link_read_rounds(const hcp_link *link, const int64_t *words, int64_t word_count,
                                hcp_mail_sizes sizes, hcp_mail *mail, hcp_error *err) {
  if (find_sections(words, word_count, mail) && rounds_are_sound(mail) &&
      writes_are_sound(link, mail, sizes.sent_row_bytes) && reads_are_sound(link, mail, sizes))
    return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "rounds has %lld words that are no rounds of sent rows of %lld bytes and %lld "
                   "received rows of %lld bytes",
                   (long long)word_count, (long long)sizes.sent_row_bytes,
                   (long long)sizes.received_rows, (long long)sizes.received_row_bytes);
}

/* The mailbox that an owner has for a reader in a half. */
static void *mailbox(const hcp_link *link, int64_t owner, int64_t reader, int64_t half) {
  const hcp_link_peer *of = peer_of(link, owner), *place = peer_of(link, reader);
  int64_t number = place->place - (place->place > of->place);
  int64_t begin = half_begin(link, half) + number * link->mailbox_bytes;
  return (void *)(uintptr_t)(of->base + (uint64_t)begin);
}

hcp_message hcp_link_next_sent(hcp_link *link, int64_t reader) {
  hcp_link_peer *peer = (hcp_link_peer *)(link + 1) + reader;
  int64_t half = ++peer->sent % HCP_HALVES;
  return (hcp_message){mailbox(link, link->rank, reader, half),
                       signal_of(link, FREE, reader, half, 0),
                       signal_of(link, FILLED, reader, half, 0)};
}

hcp_message hcp_link_next_received(hcp_link *link, int64_t owner, int met) {
  hcp_link_peer *peer = (hcp_link_peer *)(link + 1) + owner;
  int64_t half = (peer->received += !met) % HCP_HALVES;
  return (hcp_message){mailbox(link, owner, link->rank, half),
                       signal_of(link, FULL, owner, half, met),
                       signal_of(link, DONE, owner, half, 0)};
}
