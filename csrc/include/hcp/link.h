/* link.h - one rank's end of memory that ranks have mapped: what lies where in it, which words the
 * rank raises and waits for, and the messages that go through it.
 *
 * The memory of a rank begins with the words that its peers write: HCP_PIECES side by side for each
 * kind of signal, half and writer. The halves follow, each a multiple of HCP_PAGE_BYTES. The counts
 * of a rank, one for each kind, half and peer, are in the same order: how often it has staged for
 * the peer in a half, and read from it. signal.h has the protocol.
 *
 * Memory for messages is used by no other exchange. Each of its halves has a mailbox of the same
 * size for each of the other ranks that have mapped it. Messages to a rank take its two mailboxes
 * by turns, so their number tells both sides where a message lies. */
#ifndef HCP_LINK_H
#define HCP_LINK_H

#include "hcp/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a rank knows of one of the ranks, which may be itself. */
typedef struct hcp_link_peer {
  uint64_t base;          /* where its memory lies here, 0: it is not mapped */
  int64_t place;          /* number of mapped ranks before it */
  int64_t sent, received; /* messages to it, and from it, so far */
} hcp_link_peer;

/* Begins a block of hcp_link_words words: the peers follow, by rank. */
typedef struct hcp_link {
  int64_t rank, ranks, half_bytes;
  int64_t mailbox_bytes; /* 0 where no other rank is mapped */
} hcp_link;

/* A rank's end of the memory of so many ranks, each of which gives buffer_bytes for rows: halves of
 * half_bytes. HCP_INVALID for a rank that is not among them or not mapped, and for negative bytes.
 */
hcp_status hcp_link_create(int32_t rank, int32_t ranks, const int64_t *bases, int64_t buffer_bytes,
                           hcp_link **link, hcp_error *err);
void hcp_link_destroy(hcp_link *link);

/* Words of a link, and whether so many words at an address are one. */
int64_t hcp_link_words(int64_t ranks);
hcp_status hcp_link_check(const hcp_link *link, int64_t words, hcp_error *err);

/* Bytes that each rank needs in all, and the number of its counts. */
int64_t hcp_link_bytes(int64_t ranks, int64_t buffer_bytes);

/* The least buffer_bytes with which an exchange may stage so many bytes. */
int64_t hcp_link_buffer_bytes(int64_t staged);
int64_t hcp_link_counts(int64_t ranks);

/* The byte at which a half begins, the same in the memory of each rank. HCP_INVALID where rows do
 * not fit into it. */
hcp_status hcp_link_rows(const hcp_link *link, int64_t half, int64_t rows, int64_t row_bytes,
                         int64_t *begin, hcp_error *err);

/* ---- Rows that are read where they are staged ---- */

/* One of the reads of an exchange: its owners, in the order of its parts, and those that no later
 * read of the exchange reads. */
typedef struct hcp_link_read {
  const int64_t *owners, *done;
  int64_t owner_count, done_count;
} hcp_link_read;

/* The signals of an exchange through one half, hcp_signal each. The owner waits until the half is
 * FREE: whoever may have read what it held, has. Then it tells its readers that it is FILLED. A
 * read waits until the owners' halves are FULL, and tells them that it is DONE.
 *
 *   READS  (end of its FULL, end of its DONE, number of its owners that are ranks before this one:
 *          the first of those after it is read first) */
#define HCP_LINK_SECTIONS(X) \
  X(FREE, 4)                 \
  X(FILLED, 4)               \
  X(READS, 3)                \
  X(FULL, 4)                 \
  X(DONE, 4)

enum {
#define HCP_LINK_ENUM(name, width) HCP_LINK_##name,
  HCP_LINK_SECTIONS(HCP_LINK_ENUM)
#undef HCP_LINK_ENUM
      HCP_LINK_SECTION_COUNT
};

/* HCP_INVALID for a rank that is not mapped, and for no half. */
hcp_status hcp_link_exchange(const hcp_link *link, int64_t half, const int64_t *readers,
                             int64_t reader_count, const hcp_link_read *reads, int64_t read_count,
                             hcp_table **table, hcp_error *err);

/* ---- Messages through mailboxes ---- */

/* hcp_mailbox_create for rows of so many bytes. HCP_INVALID where a row does not fit into a
 * mailbox, or a move is for a rank that has none. */
hcp_status hcp_link_rounds(const hcp_link *link, const hcp_moves *sends, const hcp_moves *receives,
                           int64_t row_bytes, hcp_table **rounds, hcp_error *err);

/* The records of a rounds table: see HCP_MAILBOX_SECTIONS. */
typedef struct hcp_mail_round {
  int64_t writes_end, reads_end;
} hcp_mail_round;

typedef struct hcp_mail_write {
  int64_t reader, rows, runs_end;
} hcp_mail_write;

typedef struct hcp_mail_read {
  int64_t first_row, rows, owners_end, runs_end;
} hcp_mail_read;

typedef struct hcp_mail_owner {
  int64_t peer, rows, met, done;
} hcp_mail_owner;

typedef struct hcp_mail {
  const hcp_mail_round *rounds;
  const hcp_mail_write *writes;
  const hcp_run *write_runs;
  const hcp_mail_read *reads;
  const hcp_mail_owner *owners;
  const hcp_run *read_runs;
  int64_t count[HCP_MAILBOX_SECTION_COUNT]; /* of each of them */
} hcp_mail;

/* Find the records in a rounds table's words. HCP_INVALID unless all that they name lies among
 * them: mailboxes of the link, of rows of so many bytes, and rows that are received. Rows that runs
 * name are not looked at: see hcp_check_runs. */
typedef struct hcp_mail_sizes {
  int64_t sent_row_bytes, received_row_bytes, received_rows;
} hcp_mail_sizes;

hcp_status hcp_link_read_rounds(const hcp_link *link, const int64_t *words, int64_t word_count,
                                hcp_mail_sizes sizes, hcp_mail *mail, hcp_error *err);

/* Where a message lies, what is waited for before it is written or read, and what is told then. */
typedef struct hcp_message {
  void *rows;
  hcp_signal awaited, told;
} hcp_message;

/* The next message to a rank. */
hcp_message hcp_link_next_sent(hcp_link *link, int64_t reader);

/* The next message from a rank, or (met) once more the one before, of which a part is still to be
 * read. */
hcp_message hcp_link_next_received(hcp_link *link, int64_t owner, int met);

#ifdef __cplusplus
}
#endif
#endif
