/* merging.h - how log-sum-exps merge, the same on hosts and devices.
 *
 * Included once for each type in which they are computed: WIDE. OF(name) is what a function of
 * that type is called, OF(exp) and OF(log) among them. */
#include <math.h>
#include <stdbool.h>

#ifdef __CUDACC__
#define MERGING __device__ inline
#else
#define MERGING static inline
#endif

MERGING bool OF(is_nan)(WIDE x) { return x != x; }

/* A part without a say is left out, not multiplied by zero: its output may hold
 * NaN. One whose weight rounds to zero is multiplied, so that its NaN counts, as
 * in a softmax over all keys. */
MERGING bool OF(absent)(WIDE lse) { return lse == -(WIDE)INFINITY; }

/* The larger of two, NaN where either is. */
MERGING WIDE OF(larger)(WIDE a, WIDE b) { return OF(is_nan)(a) || b <= a ? a : b; }

/* exp(lse - largest), where two equal infinities would give NaN: parts whose
 * lse is +inf share alike. */
MERGING WIDE OF(share)(WIDE lse, WIDE largest) {
  return lse == largest ? (WIDE)1 : OF(exp)(lse - largest);
}

/* Of all parts together, from the largest lse and the sum of their shares. */
MERGING WIDE OF(merged_lse)(WIDE largest, WIDE shares) {
  return OF(absent)(largest) || OF(is_nan)(largest) ? largest : largest + OF(log)(shares);
}

#undef MERGING
