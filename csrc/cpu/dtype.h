/* dtype.h - elements in memory, and the type in which they are summed.
 *
 * For each name of a dtype: storage_<name>, wide_<name> (float, or double for
 * float64), load_<name>, store_<name>, exp_<name>, log_<name>. The conversions
 * are integer arithmetic and selects, without branches, so that loops over
 * them vectorise on any x86-64 or Arm machine. */
#ifndef HCP_CPU_DTYPE_H
#define HCP_CPU_DTYPE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "hcp/kernels.h"

typedef double storage_float64, wide_float64;
typedef float storage_float32, wide_float32;
typedef uint16_t storage_bfloat16;
typedef float wide_bfloat16;
typedef uint16_t storage_float16;
typedef float wide_float16;

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* condition ? yes : no, in arithmetic: of a choice between floating-point results
 * gcc makes a branch, so as not to compute the other, and then no vectors. */
static inline uint32_t choose(int condition, uint32_t yes, uint32_t no) {
  uint32_t mask = 0u - (uint32_t)condition;
  return (yes & mask) | (no & ~mask);
}

static inline double load_float64(double value) { return value; }
static inline double store_float64(double value) { return value; }
static inline float load_float32(float value) { return value; }
static inline float store_float32(float value) { return value; }

static inline float load_bfloat16(uint16_t bits) { return bits_float((uint32_t)bits << 16); }

/* To nearest, ties to even. NaN is set aside: rounding could carry its mantissa
 * into the exponent and make it infinite or zero. */
static inline uint16_t store_bfloat16(float value) {
  uint32_t bits = float_bits(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* float16 has 5 bits of exponent with bias 15, float32 8 with bias 127. */
enum { EXPONENT_SHIFT = 23, MANTISSA_SHIFT = 13, BIAS_DIFFERENCE = 127 - 15 };

static inline float load_float16(uint16_t half) {
  const uint32_t rebias = (uint32_t)BIAS_DIFFERENCE << EXPONENT_SHIFT;
  const uint32_t largest_exponent = 31u << EXPONENT_SHIFT;
  const uint32_t one_exponent = 1u << EXPONENT_SHIFT;
  uint32_t magnitude = (uint32_t)(half & 0x7fffu) << MANTISSA_SHIFT;
  uint32_t exponent = magnitude & largest_exponent;
  /* Infinity and NaN move to float32's own largest exponent, 255. */
  uint32_t normal = magnitude + rebias + (exponent == largest_exponent ? rebias : 0u);
  /* A subnormal has no leading one: add it as an exponent, subtract its value. */
  float subnormal =
      bits_float(magnitude + rebias + one_exponent) - bits_float(rebias + one_exponent);
  uint32_t bits = choose(exponent == 0u, float_bits(subnormal), normal);
  return bits_float(bits | (uint32_t)(half & 0x8000u) << 16);
}

/* To nearest, ties to even; beyond 65504 to infinity. */
static inline uint16_t store_float16(float value) {
  const uint32_t overflow = (127u + 16u) << EXPONENT_SHIFT;
  const uint32_t smallest_normal = (127u - 14u) << EXPONENT_SHIFT;
  /* Adding this number lets the addition itself round at a subnormal's last bit. */
  const uint32_t aligner = (127u - 15u + 23u - 10u + 1u) << EXPONENT_SHIFT;
  uint32_t bits = float_bits(value);
  uint32_t sign = bits & 0x80000000u;
  uint32_t magnitude = bits ^ sign;
  uint32_t odd = (magnitude >> MANTISSA_SHIFT) & 1u;
  uint32_t normal =
      (magnitude - ((uint32_t)BIAS_DIFFERENCE << EXPONENT_SHIFT) + 0xfffu + odd) >> MANTISSA_SHIFT;
  uint32_t subnormal = float_bits(bits_float(magnitude) + bits_float(aligner)) - aligner;
  uint32_t special = choose(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);
  uint32_t finite = choose(magnitude < smallest_normal, subnormal, normal);
  return (uint16_t)(choose(magnitude >= overflow, special, finite) | sign >> 16);
}

static inline double exp_float64(double value) { return exp(value); }
static inline double log_float64(double value) { return log(value); }
static inline float exp_float32(float value) { return expf(value); }
static inline float log_float32(float value) { return logf(value); }
#define exp_bfloat16 exp_float32
#define log_bfloat16 log_float32
#define exp_float16 exp_float32
#define log_float16 log_float32

#define turn_float64 hcp_turn_float64
#define turn_float32 hcp_turn_float32
#define turn_bfloat16 hcp_turn_float32
#define turn_float16 hcp_turn_float32

/* OF(load) is load_float32 where DTYPE is float32. */
#define HCP_JOIN_(a, b) a##_##b
#define HCP_JOIN(a, b) HCP_JOIN_(a, b)
#define OF(name) HCP_JOIN(name, DTYPE)
#define STORAGE OF(storage)
#define WIDE OF(wide)

/* Calls the function of a dtype that is known at run time. */
#define DISPATCH(dtype, function, ...)  \
  switch (dtype) {                      \
    case HCP_FLOAT64:                   \
      function##_float64(__VA_ARGS__);  \
      break;                            \
    case HCP_FLOAT32:                   \
      function##_float32(__VA_ARGS__);  \
      break;                            \
    case HCP_BFLOAT16:                  \
      function##_bfloat16(__VA_ARGS__); \
      break;                            \
    case HCP_FLOAT16:                   \
      function##_float16(__VA_ARGS__);  \
      break;                            \
  }

/* Elements summed at a time: the sums stay in the first-level cache, and on the
 * stack, whatever the width of a row. */
enum { TILE = 256 };

static inline int64_t tile_length(int64_t total, int64_t first) {
  return total - first < TILE ? total - first : TILE;
}

#endif
