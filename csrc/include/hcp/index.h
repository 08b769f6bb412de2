/* index.h - index arithmetic that every kernel shares.
 *
 * Compiled by C, C++ and CUDA compilers alike, so that what the CPU tests
 * prove of it holds for the GPU.
 */
#ifndef HCP_INDEX_H
#define HCP_INDEX_H

#include "hcp/kernels.h"

#ifdef __CUDACC__
#define HCP_INLINE static inline __host__ __device__
#else
#define HCP_INLINE static inline
#endif

/* One past the last record of the run that starts at record first. */
HCP_INLINE int64_t hcp_run_end(const hcp_run *runs, int64_t n, int64_t first) {
  int64_t end = first + 1;
  while (end < n && runs[end].row == runs[first].row && runs[end].rows == runs[first].rows) ++end;
  return end;
}

/* Where row r of the run stands in the part of one of its records. */
HCP_INLINE int64_t hcp_run_part_row(const hcp_run *record, int64_t row) {
  return record->part_row + (row - record->row);
}

/* The last of n >= 1 ascending first rows that is at or before row, or else the first:
 * which run, or segment, a row belongs to. */
HCP_INLINE int32_t hcp_place_of_row(const int64_t *first_rows, int32_t n, int64_t row) {
  int32_t low = 0, high = n - 1;
  while (low < high) {
    int32_t middle = (low + high + 1) / 2;
    if (first_rows[middle] <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

#endif
