/* Links: the two sides of a signal name one word, no two signals share a word or a count, and words
 * and halves lie apart inside the memory. */
#include <stdlib.h>

#include "check.h"
#include "hcp/link.h"

enum { RANKS = 5, BUFFER = 10 * HCP_PAGE_BYTES + 77 };

static int64_t bases[RANKS];

/* The links of all ranks, each of which has mapped all memories. */
static void make_links(hcp_link *links[RANKS]) {
  hcp_error err;
  for (int32_t rank = 0; rank < RANKS; rank++) bases[rank] = (int64_t)(rank + 1) << 32;
  for (int32_t rank = 0; rank < RANKS; rank++)
    CHECK(hcp_link_create(rank, RANKS, bases, BUFFER, &links[rank], &err) == HCP_OK);
}

static hcp_signal signal_of(const hcp_link *link, hcp_link_signals which, int64_t peer,
                            int64_t half, int64_t met) {
  hcp_link_place place = {peer, half, met};
  hcp_signal signal = {0};
  hcp_error err;
  CHECK(hcp_link_signals_of(link, which, &place, 1, &signal, &err) == HCP_OK);
  CHECK_INT(signal.peer, peer);
  return signal;
}

/* What one rank raises, another waits for. */
static void check_sides(hcp_link *const links[RANKS]) {
  for (int32_t owner = 0; owner < RANKS; owner++)
    for (int32_t reader = 0; reader < RANKS; reader++)
      for (int64_t half = 0; half < HCP_HALVES; half++) {
        hcp_signal free = signal_of(links[owner], HCP_LINK_FREE, reader, half, 0);
        hcp_signal filled = signal_of(links[owner], HCP_LINK_FILLED, reader, half, 0);
        hcp_signal full = signal_of(links[reader], HCP_LINK_FULL, owner, half, 0);
        hcp_signal done = signal_of(links[reader], HCP_LINK_DONE, owner, half, 0);
        CHECK(filled.word == full.word && done.word == free.word && free.word != full.word);
        CHECK_INT(free.count, filled.count);
        CHECK_INT(full.count, done.count);
        CHECK(free.count != full.count);
        CHECK(!free.more && filled.more && full.more && !done.more);
        CHECK_INT(signal_of(links[reader], HCP_LINK_FULL, owner, half, 1).more, 0);
      }
}

/* Of one rank, whose words and counts are marked as they come. */
static void check_apart(const hcp_link *link) {
  hcp_error err;
  int64_t bytes = hcp_link_bytes(RANKS, BUFFER), begin, end, counts = hcp_link_counts(RANKS);
  CHECK(hcp_link_rows(link, 0, 1, link->half_bytes, &begin, &err) == HCP_OK);
  char *words = calloc((size_t)begin / sizeof(uint64_t), 1), *counted = calloc((size_t)counts, 1);
  for (int32_t which = HCP_LINK_FREE; which <= HCP_LINK_FULL; which += 2)
    for (int64_t peer = 0; peer < RANKS; peer++)
      for (int64_t half = 0; half < HCP_HALVES; half++) {
        hcp_signal signal = signal_of(link, (hcp_link_signals)which, peer, half, 0);
        int64_t first = (int64_t)((uint64_t)(uintptr_t)signal.word - link->bases[link->rank]) / 8;
        CHECK(first >= 0 && (first + HCP_PIECES) * 8 <= begin);
        for (int64_t word = first; word < first + HCP_PIECES; word++) CHECK(!words[word]++);
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
  hcp_error err;
  hcp_link *none = NULL;
  hcp_signal signal;
  int64_t begin;
  CHECK(hcp_link_create(RANKS, RANKS, bases, BUFFER, &none, &err) == HCP_INVALID);
  CHECK(hcp_link_create(0, RANKS, bases, -1, &none, &err) == HCP_INVALID);
  CHECK(none == NULL);
  CHECK(hcp_link_signals_of(link, HCP_LINK_FREE, &(hcp_link_place){RANKS, 0, 0}, 1, &signal,
                            &err) == HCP_INVALID);
  CHECK(hcp_link_rows(link, HCP_HALVES, 1, 1, &begin, &err) == HCP_INVALID);
  CHECK(hcp_link_rows(link, 0, link->half_bytes + 1, 1, &begin, &err) == HCP_INVALID);
  CHECK_TEXT(err.message, "peer_buffer_bytes=");
}

int main(void) {
  hcp_link *links[RANKS] = {NULL};
  make_links(links);
  check_sides(links);
  for (int32_t rank = 0; rank < RANKS; rank++) check_apart(links[rank]);
  check_refused(links[0]);
  for (int32_t rank = 0; rank < RANKS; rank++) hcp_link_destroy(links[rank]);
  return check_report("test_link");
}
