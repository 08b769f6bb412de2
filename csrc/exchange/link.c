/* link.c - what lies where in memory that ranks have mapped, and the signals of an exchange. */
#include "hcp/link.h"

#include <stdlib.h>
#include <string.h>

#include "../core/internal.h"

/* Whose memory a signal lies in, what it says, and by which count. */
typedef struct meaning {
  int to_peer; /* 0: in this rank's own memory, where the peer writes it */
  int kind, counted, counts;
} meaning;

static const meaning meanings[HCP_LINK_SIGNAL_COUNT] = {
    [HCP_LINK_FREE] = {.to_peer = 0, .kind = HCP_READ, .counted = HCP_STAGED, .counts = 0},
    [HCP_LINK_FILLED] = {.to_peer = 1, .kind = HCP_STAGED, .counted = HCP_STAGED, .counts = 1},
    [HCP_LINK_FULL] = {.to_peer = 0, .kind = HCP_STAGED, .counted = HCP_READ, .counts = 1},
    [HCP_LINK_DONE] = {.to_peer = 1, .kind = HCP_READ, .counted = HCP_READ, .counts = 0},
};

static int64_t pages(int64_t bytes) { return (bytes + HCP_PAGE_BYTES - 1) / HCP_PAGE_BYTES; }

static int64_t half_bytes(int64_t buffer_bytes) {
  return buffer_bytes / HCP_HALVES / HCP_PAGE_BYTES * HCP_PAGE_BYTES;
}

/* The place of a signal or a count among those of so many ranks. */
static int64_t place_of(int32_t ranks, int kind, int64_t half, int64_t peer) {
  return ((int64_t)kind * HCP_HALVES + half) * ranks + peer;
}

int64_t hcp_link_counts(int32_t ranks) { return place_of(ranks, HCP_KINDS, 0, 0); }

static int64_t words_bytes(int32_t ranks) {
  return pages(hcp_link_counts(ranks) * HCP_PIECES * (int64_t)sizeof(uint64_t)) * HCP_PAGE_BYTES;
}

int64_t hcp_link_bytes(int32_t ranks, int64_t buffer_bytes) {
  return words_bytes(ranks) + HCP_HALVES * half_bytes(buffer_bytes);
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
  hcp_link *made = malloc(sizeof *made + (size_t)ranks * sizeof *bases);
  if (made == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a link");
  memcpy(made + 1, bases, (size_t)ranks * sizeof *bases);
  *made = (hcp_link){rank, ranks, half_bytes(buffer_bytes), (const uint64_t *)(made + 1)};
  *link = made;
  return HCP_OK;
}

void hcp_link_destroy(hcp_link *link) { free(link); }

static hcp_status check_half(int64_t half, hcp_error *err) {
  if (half >= 0 && half < HCP_HALVES) return HCP_OK;
  return hcp__fail(err, HCP_INVALID, "half is %lld, expected 0 to %d", (long long)half,
                   HCP_HALVES - 1);
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
                     (long long)link->half_bytes, (long long)(HCP_HALVES * used));
  *begin = words_bytes(link->ranks) + half * link->half_bytes;
  return HCP_OK;
}

static hcp_status check_place(const hcp_link *link, hcp_link_place place, hcp_error *err) {
  if (place.peer < 0 || place.peer >= link->ranks || link->bases[place.peer] == 0)
    return hcp__fail(err, HCP_INVALID, "rank %lld is not one whose memory rank %d has mapped",
                     (long long)place.peer, (int)link->rank);
  return check_half(place.half, err);
}

static hcp_signal signal_of(const hcp_link *link, meaning is, hcp_link_place place) {
  int64_t owner = is.to_peer ? place.peer : link->rank;
  int64_t writer = is.to_peer ? link->rank : place.peer;
  int64_t signal = place_of(link->ranks, is.kind, place.half, writer);
  uint64_t address = link->bases[owner] + (uint64_t)signal * HCP_PIECES * sizeof(uint64_t);
  return (hcp_signal){(uint64_t *)(uintptr_t)address,
                      place_of(link->ranks, is.counted, place.half, place.peer), place.peer,
                      is.counts && !place.met};
}

hcp_status hcp_link_signals_of(const hcp_link *link, hcp_link_signals which,
                               const hcp_link_place *places, int64_t n, hcp_signal *signals,
                               hcp_error *err) {
  for (int64_t i = 0; i < n; i++) {
    hcp_status status = check_place(link, places[i], err);
    if (status != HCP_OK) return status;
    signals[i] = signal_of(link, meanings[which], places[i]);
  }
  return HCP_OK;
}
