/* link.h - one rank's end of memory that ranks have mapped: what lies where in it, and which words
 * the rank raises and waits for.
 *
 * The memory of a rank begins with the words that its peers write: HCP_PIECES side by side for each
 * kind of signal, half and writer. The halves follow, each a multiple of HCP_PAGE_BYTES. The counts
 * of a rank, one for each kind, half and peer, are in the same order: how often it has staged for
 * the peer in a half, and read from it. signal.h has the protocol. */
#ifndef HCP_LINK_H
#define HCP_LINK_H

#include "hcp/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hcp_link {
  int32_t rank, ranks;
  int64_t half_bytes;
  const uint64_t *bases; /* where the memory of each rank lies here, 0: it is not mapped */
} hcp_link;

/* X(name): the signals that a rank waits for or raises, in the order of the protocol. An owner
 * waits until its half is FREE: its readers have read what it held. Then it tells them that the
 * half is FILLED. A reader waits until the owners' halves are FULL, and tells them that it is
 * DONE. */
#define HCP_LINK_SIGNALS(X) X(FREE) X(FILLED) X(FULL) X(DONE)

typedef enum hcp_link_signals {
#define HCP_LINK_ENUM(name) HCP_LINK_##name,
  HCP_LINK_SIGNALS(HCP_LINK_ENUM)
#undef HCP_LINK_ENUM
      HCP_LINK_SIGNAL_COUNT
} hcp_link_signals;

/* A peer's half, or a rank's own one for the peer. */
typedef struct hcp_link_place {
  int64_t peer, half;
  int64_t met; /* 1: the exchange has counted this place before */
} hcp_link_place;

/* A rank's end of the memory of so many ranks, each of which gives buffer_bytes for rows: halves of
 * half_bytes. `bases` has `ranks` addresses, of which it takes a copy. HCP_INVALID for a rank that
 * is not among them or not mapped, and for negative bytes. */
hcp_status hcp_link_create(int32_t rank, int32_t ranks, const int64_t *bases, int64_t buffer_bytes,
                           hcp_link **link, hcp_error *err);
void hcp_link_destroy(hcp_link *link);

/* Bytes that each rank needs in all, and the number of its counts. */
int64_t hcp_link_bytes(int32_t ranks, int64_t buffer_bytes);
int64_t hcp_link_counts(int32_t ranks);

/* The byte at which a half begins, the same in the memory of each rank. HCP_INVALID where rows do
 * not fit into it. */
hcp_status hcp_link_rows(const hcp_link *link, int64_t half, int64_t rows, int64_t row_bytes,
                         int64_t *begin, hcp_error *err);

/* The signals of n places. HCP_INVALID for a peer that is not mapped, and for no half. */
hcp_status hcp_link_signals_of(const hcp_link *link, hcp_link_signals which,
                               const hcp_link_place *places, int64_t n, hcp_signal *signals,
                               hcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
