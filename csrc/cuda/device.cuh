/* device.cuh - elements in memory, vectors of them, and errors of launches. */
#ifndef HCP_CUDA_DEVICE_CUH
#define HCP_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

#include "hcp/fail.h"
#include "hcp/kernels.h"

/* Threads of a block, whatever the kernel. */
enum { HCP_THREADS = 256 };

static inline hcp_status hcp_cuda_status(cudaError_t error, const char *what, hcp_error *err) {
  if (error == cudaSuccess) return HCP_OK;
  return hcp__fail(err, HCP_DEVICE, "%s: %s (%s)", what, cudaGetErrorString(error),
                   cudaGetErrorName(error));
}

static inline hcp_status hcp_cuda_launched(const char *kernel, hcp_error *err) {
  return hcp_cuda_status(cudaGetLastError(), kernel, err);
}

/* Blocks of the whole device, so many on each multiprocessor. */
static inline unsigned hcp_cuda_resident(int32_t blocks) {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return (unsigned)(blocks * processors);
}

/* Enough blocks to fill the device several times over; kernels stride over the
 * rest. */
static inline unsigned hcp_cuda_blocks(int64_t items) {
  int64_t blocks = (items + HCP_THREADS - 1) / HCP_THREADS, most = hcp_cuda_resident(16);
  return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

/* Loads that a thread has under way before it uses the first. */
enum { IN_FLIGHT = 4 };

/* Threads of a row, as a power of two: a warp for long rows, fewer for short. */
static inline int32_t hcp_cuda_lane_bits(int64_t vectors) {
  int32_t bits = 0;
  while (bits < 5 && (int64_t)IN_FLIGHT << bits < vectors) ++bits;
  return bits;
}

/* Pieces of a row of so many vectors, one for each warp: more than one where its rows fill so few
 * of the device's blocks that others would idle, as states of recurrent layers do. */
static inline unsigned hcp_cuda_row_pieces(int64_t vectors, int32_t lane_bits, int64_t blocks) {
  int64_t pieces = (vectors - 1) / ((int64_t)IN_FLIGHT << lane_bits) + 1;
  int64_t idle = hcp_cuda_resident(16) / blocks;
  return (unsigned)(pieces < idle ? pieces : idle > 1 ? idle : 1);
}

/* ---- elements ---- */

/* Sums are in wide: float64 for float64, float32 for the rest. */
template <class T>
struct element {
  using wide = float;
};
template <>
struct element<double> {
  using wide = double;
};

__device__ inline double load(double x) { return x; }
__device__ inline float load(float x) { return x; }
__device__ inline float load(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float load(__half x) { return __half2float(x); }

template <class T>
__device__ inline T store(typename element<T>::wide x);
template <>
__device__ inline double store<double>(double x) {
  return x;
}
template <>
__device__ inline float store<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 store<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half store<__half>(float x) {
  return __float2half_rn(x);
}

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

/* What an element of one dtype is on its way to another: float64 where either is. */
template <class From, class To>
using between = decltype(typename element<From>::wide() + typename element<To>::wide());

/* Of N elements that travel in one instruction, or in several of 16 bytes. */
template <class T, int N>
constexpr size_t vector_alignment() {
  return sizeof(T) * N < 16 ? sizeof(T) * N : 16;
}

template <class T, int N>
struct alignas(vector_alignment<T, N>()) vector {
  T at[N];
};

/* The widest word of which a vector that leaves so many bytes over has a whole number. */
template <size_t bytes_over>
struct word_of {
  using type = uint16_t;
};
template <>
struct word_of<0> {
  using type = uint32_t;
};

/* The same as words, until its elements are needed: a compiler that sees elements
 * of 16 bits takes them apart where they are loaded, and so waits for each load. */
template <class T, int N>
struct alignas(vector_alignment<T, N>()) packed {
  using word = typename word_of<sizeof(T) * N % 4>::type;
  word at[sizeof(T) * N / sizeof(word)];

  template <class Wide>
  __device__ void widen(Wide *to) const {
    vector<T, N> elements;
    memcpy(&elements, at, sizeof elements);
#pragma unroll
    for (int e = 0; e < N; ++e) to[e] = load(elements.at[e]);
  }
  template <class Wide>
  __device__ void round(const Wide *from) {
    vector<T, N> elements;
#pragma unroll
    for (int e = 0; e < N; ++e)
      elements.at[e] = store<T>(static_cast<typename element<T>::wide>(from[e]));
    memcpy(at, &elements, sizeof elements);
  }
};

/* Elements of a vector: 16 bytes where every address allows it, else one. */
template <class T>
constexpr int vector_elements() {
  return 16 / (int)sizeof(T);
}

static inline bool aligned(const void *pointer, int64_t stride_bytes, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) | (uintptr_t)stride_bytes) % (uintptr_t)bytes == 0;
}

/* The statement under using T, the type of dtype. */
#define HCP_CUDA_DISPATCH(dtype, ...) \
  switch (dtype) {                    \
    case HCP_FLOAT64: {               \
      using T = double;               \
      __VA_ARGS__;                    \
      break;                          \
    }                                 \
    case HCP_FLOAT32: {               \
      using T = float;                \
      __VA_ARGS__;                    \
      break;                          \
    }                                 \
    case HCP_BFLOAT16: {              \
      using T = __nv_bfloat16;        \
      __VA_ARGS__;                    \
      break;                          \
    }                                 \
    case HCP_FLOAT16: {               \
      using T = __half;               \
      __VA_ARGS__;                    \
      break;                          \
    }                                 \
  }

#endif
