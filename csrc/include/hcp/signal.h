/* signal.h - how ranks that read each other's memory count their exchanges.
 *
 * For each half of its memory and each peer, a rank counts two things in its own memory:
 * exchanges that it has staged for the peer, and exchanges of the peer's that it has read.
 * Each of the two has a signal, whose words the other side writes:
 *
 *   owner                                     reader
 *   wait until `read` is at its count
 *   count one more
 *   stage, set `staged` to its count, tag     wait until `staged` is at its count + 1, tag
 *                                             read
 *                                             count one more, set `read` to its count
 *
 * So no half is staged before its last rows have been read, whichever half an exchange uses
 * and however often one is replayed: nothing but the counts says which exchange it is.
 *
 * C, C++ and CUDA compilers all compile it: tests/c/test_signals.c proves what kernels run.
 */
#ifndef HCP_SIGNAL_H
#define HCP_SIGNAL_H

#include "hcp/index.h"

/* A word: the lower 32 bits of a count, then the tag. */
HCP_INLINE uint64_t hcp_signal_word(uint64_t count, uint32_t tag) { return count << 32 | tag; }

HCP_INLINE uint32_t hcp_signal_tag(uint64_t word) { return (uint32_t)word; }

/* The word that a signal is set to, once it has counted. */
HCP_INLINE uint64_t hcp_signal_told(const uint64_t *counts, int64_t place, uint32_t tag) {
  return hcp_signal_word(counts[place], tag);
}

/* The word that is waited for, before the exchange is counted by `more`. */
HCP_INLINE uint64_t hcp_signal_expected(const uint64_t *counts, int64_t place, uint64_t more,
                                        uint32_t tag) {
  return hcp_signal_word(counts[place] + more, tag);
}

/* Whether a word has yet to come to the count of the expected one. Counts wrap; the two sides
 * of a signal are never more than one apart. */
HCP_INLINE int hcp_signal_is_behind(uint64_t found, uint64_t expected) {
  return (uint32_t)(found >> 32) - (uint32_t)(expected >> 32) >= 1u << 31;
}

HCP_INLINE void hcp_signal_count(uint64_t *counts, int64_t place, uint64_t more) {
  counts[place] += more;
}

#endif
