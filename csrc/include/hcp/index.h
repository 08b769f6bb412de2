/* index.h - index arithmetic that all row kernels share.
 *
 * C, C++ and CUDA compilers all compile it, so that the CPU tests also prove
 * the code of the GPU.
 */
#ifndef HCP_INDEX_H
#define HCP_INDEX_H

#include "hcp/kernels.h"

#ifdef __CUDACC__
#define HCP_INLINE static inline __host__ __device__
#else
#define HCP_INLINE static inline
#endif

/* Bytes of an element. */
HCP_INLINE int64_t hcp_dtype_bytes(hcp_dtype dtype) {
#define HCP_DTYPE_BYTES(name, bytes) bytes,
  const int64_t bytes[] = {HCP_DTYPES(HCP_DTYPE_BYTES)};
#undef HCP_DTYPE_BYTES
  return bytes[dtype];
}

/* Bytes that so many bytes become by a cast. */
HCP_INLINE int64_t hcp_cast_bytes(hcp_cast cast, int64_t bytes) {
  return bytes / hcp_dtype_bytes(cast.from) * hcp_dtype_bytes(cast.to);
}

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

/* The run, or segment, that a row belongs to: the last of n >= 1 ascending first rows that
 * is at or before row, or else the first. Rows of 32 bits take half the room. */
#define HCP_PLACE_OF_ROW(name, integer)                                                       \
  HCP_INLINE int32_t hcp_place_of_##name(const integer *first_rows, int32_t n, integer row) { \
    int32_t low = 0, high = n - 1;                                                            \
    while (low < high) {                                                                      \
      int32_t middle = (low + high + 1) / 2;                                                  \
      if (first_rows[middle] <= row)                                                          \
        low = middle;                                                                         \
      else                                                                                    \
        high = middle - 1;                                                                    \
    }                                                                                         \
    return low;                                                                               \
  }
HCP_PLACE_OF_ROW(row, int64_t)
HCP_PLACE_OF_ROW(row_32, int32_t)
#undef HCP_PLACE_OF_ROW

/* The row at which piece i begins, and the piece of a row: see hcp_signal. */
HCP_INLINE int64_t hcp_piece_start(int64_t rows, int32_t i) { return rows * i / HCP_PIECES; }

HCP_INLINE int32_t hcp_piece_of_row(int64_t rows, int64_t row) {
  return (int32_t)(((row + 1) * HCP_PIECES - 1) / rows);
}

/* ---- rotary embedding ----
 *
 * Where the two elements of pair p stand, of the `pairs` pairs of a head. */
HCP_INLINE int64_t hcp_pair_first(int64_t p, int interleaved) { return interleaved ? 2 * p : p; }

HCP_INLINE int64_t hcp_pair_second(int64_t p, int64_t pairs, int interleaved) {
  return interleaved ? 2 * p + 1 : p + pairs;
}

/* x times a plus y times b, each product rounded: a compiler that fused one of
 * them would make GPUs differ from CPUs. */
HCP_INLINE float hcp_weigh_float32(float x, float a, float y, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(__fmul_rn(x, a), __fmul_rn(y, b));
#else
  return x * a + y * b;
#endif
}

HCP_INLINE double hcp_weigh_float64(double x, double a, double y, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(__dmul_rn(x, a), __dmul_rn(y, b));
#else
  return x * a + y * b;
#endif
}

/* Turn a pair (x, y), each element by its own angle (in general the same):
 *
 *   x' = x cos_x - y sin_x,  y' = y cos_y + x sin_y
 *
 * or, inverse, by the transpose of this matrix, which is its gradient. */
/* NOLINTBEGIN(bugprone-macro-parentheses): a type */
#define HCP_TURN(dtype, real)                                                                \
  HCP_INLINE void hcp_turn_##dtype(real *x, real *y, real cos_x, real sin_x, real cos_y,     \
                                   real sin_y, int inverse) {                                \
    real from_y = inverse ? sin_y : -sin_x, from_x = inverse ? -sin_x : sin_y, given_x = *x; \
    *x = hcp_weigh_##dtype(given_x, cos_x, *y, from_y);                                      \
    *y = hcp_weigh_##dtype(*y, cos_y, given_x, from_x);                                      \
  }
/* NOLINTEND(bugprone-macro-parentheses) */
HCP_TURN(float32, float)
HCP_TURN(float64, double)
#undef HCP_TURN

#endif
