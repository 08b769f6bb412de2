/* merge.cu - partial attention outputs merged by log-sum-exp.
 *
 * A thread merges one vector of one row and head in registers, several
 * parts under way at once. Every thread of a head reads the few log-sum-exps of its
 * parts, from the cache. */
#include <math.h>

#include "runs.cuh"

struct merged {
  hcp_part part[HCP_CUDA_PARTS_MAX];
  int64_t heads, head_dim;
  const void *out, *lse; /* what was merged before, wide; NULL: nothing */
};

#define OF(name) name
#define WIDE float
#include "hcp/merging.h"
#undef WIDE
#define WIDE double
#include "hcp/merging.h"
#undef WIDE
#undef OF

template <class T>
__device__ inline const T *part_out(const carried_runs &carried, const merged &m, int run, int r,
                                    int64_t row, int64_t head) {
  const hcp_part &part = m.part[carried.part[r]];
  int64_t part_row = carried.part_row[r] + row - carried.row[run];
  return (const T *)part.out + part_row * part.out_row_stride + head * part.out_head_stride;
}

template <class T>
__device__ inline typename element<T>::wide earlier_lse(const merged &m, int64_t row,
                                                        int64_t head) {
  using W = typename element<T>::wide;
  return m.lse == NULL ? -(W)INFINITY : ((const W *)m.lse)[row * m.heads + head];
}

/* Where one part has the row that a block is at. */
template <class T>
struct part_row {
  const T *out;
  const typename element<T>::wide *lse;
  int64_t out_head_stride, lse_head_stride;
};

/* One row and head at one vector. Each part is read once: what is summed so far
 * is scaled down when a part with a larger log-sum-exp comes. */
template <class T, int N>
struct merged_vector {
  using W = typename element<T>::wide;
  using V = vector<T, N>;
  W sum[N] = {};
  W shares = 0;
  W largest = -(W)INFINITY; /* -inf: nothing takes part, NaN: some part has it */

  /* A head without elements still has a log-sum-exp. */
  __device__ void begin(const merged &m, int64_t row, int64_t head, int64_t at) {
    largest = earlier_lse<T>(m, row, head);
    if (absent(largest)) return;
    shares = 1;
    if (m.head_dim == 0) return;
    auto value = reinterpret_cast<const vector<W, N> *>((const W *)m.out +
                                                        (row * m.heads + head) * m.head_dim)[at];
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] = value.at[e];
  }

  __device__ void raise(W to) {
    W scale = share(largest, to);
    shares *= scale;
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] *= scale;
    largest = to;
  }

  __device__ void add(W lse, const V &value) {
    if (absent(lse)) return;
    W its_share = share(lse, largest);
    shares += its_share;
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] += its_share * load(value.at[e]);
  }

  /* A part past the last is the last one again, with no say: loads without a
   * branch between them are all under way together. */
  __device__ void add_parts(const part_row<T> *parts, int first, int n, int64_t head, int64_t at) {
    V value[IN_FLIGHT];
    W lse[IN_FLIGHT], highest = largest;
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
      const part_row<T> &part = parts[first + k < n ? first + k : n - 1];
      lse[k] = part.lse[head * part.lse_head_stride];
      value[k] = reinterpret_cast<const V *>(part.out + head * part.out_head_stride)[at];
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
      if (first + k >= n) lse[k] = -(W)INFINITY;
      highest = larger(highest, lse[k]);
    }
    if (highest != largest) raise(highest);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) add(lse[k], value[k]);
  }

  __device__ void add_lses(const part_row<T> *parts, int n, int64_t head) {
    for (int k = 0; k < n; ++k) {
      W lse = parts[k].lse[head * parts[k].lse_head_stride], highest = larger(largest, lse);
      if (highest != largest) raise(highest);
      add(lse, V{});
    }
  }

  __device__ W lse() const { return merged_lse(largest, shares); }

  /* What makes the mean of the sum; NaN where some part has it. */
  __device__ W scale() const {
    if (is_nan(largest)) return largest;
    return absent(largest) ? W(0) : W(1) / shares;
  }
};

/* Addresses of a row's parts, worked out once for all threads of the block. */
template <class T>
__device__ inline int find_parts(const carried_runs &carried, const merged &m, int64_t row,
                                 part_row<T> *parts) {
  int run = carried.find(row), begin = carried.record[run], n = carried.record[run + 1] - begin;
  __syncthreads(); /* nobody reads those of the row before */
  for (int k = (int)threadIdx.x; k < n; k += (int)blockDim.x) {
    const hcp_part &part = m.part[carried.part[begin + k]];
    parts[k] = {part_out<T>(carried, m, run, begin + k, row, 0),
                (const typename element<T>::wide *)part.lse +
                    (carried.part_row[begin + k] + row - carried.row[run]) * part.lse_row_stride,
                part.out_head_stride, part.lse_head_stride};
  }
  __syncthreads();
  return n;
}

/* A block takes a row at a time, a thread one vector of one head. out is of type O: T, or wide
 * where it is what was merged before. */
template <class T, class O, int N>
__global__ void __launch_bounds__(HCP_THREADS)
    merge_rows(const __grid_constant__ carried_runs carried, const __grid_constant__ merged m,
               O *out, typename element<T>::wide *lse) {
  using W = typename element<T>::wide;
  __shared__ part_row<T> parts[carried_runs::RECORDS];
  unsigned vectors = (unsigned)(m.head_dim / N), threads = vectors > 0 ? vectors : 1;
  unsigned items = (unsigned)m.heads * threads;
  for (int64_t r = blockIdx.x; r < carried.rows(); r += gridDim.x) {
    int64_t row = carried.first_row() + r;
    int n = find_parts(carried, m, row, parts);
    if (n == 0 && out == m.out) { /* the row stays as it is */
      for (unsigned head = threadIdx.x; head < m.heads; head += blockDim.x)
        lse[row * m.heads + head] = earlier_lse<T>(m, row, head);
      continue;
    }
    for (unsigned item = threadIdx.x; item < items; item += blockDim.x) {
      unsigned head = item / threads, at = item % threads;
      merged_vector<T, N> sum;
      sum.begin(m, row, head, at);
      if (vectors == 0) sum.add_lses(parts, n, head);
      for (int first = 0; first < n && vectors > 0; first += IN_FLIGHT)
        sum.add_parts(parts, first, n, head, at);
      if (at == 0) lse[row * m.heads + head] = sum.lse();
      if (vectors == 0) continue;
      W scale = sum.scale();
      vector<O, N> result;
#pragma unroll
      for (int e = 0; e < N; ++e) result.at[e] = store<O>(sum.sum[e] * scale);
      reinterpret_cast<vector<O, N> *>(out + (row * m.heads + head) * m.head_dim)[at] = result;
    }
  }
}

/* ---- launches ---- */

template <class T>
static bool vectors_fit(const merged &m, int32_t parts, const void *out) {
  int64_t element_bytes = sizeof(T), row = m.head_dim * element_bytes;
  bool fit = aligned(out, row, 16) && aligned(m.out, row, 16);
  for (int32_t p = 0; p < parts; ++p)
    fit =
        fit && aligned(m.part[p].out,
                       (m.part[p].out_row_stride | m.part[p].out_head_stride) * element_bytes, 16);
  return fit;
}

template <class T, class O>
static hcp_status merge_all(const hcp_merge &call, void *out, void *lse, void *stream,
                            hcp_error *err) {
  using W = typename element<T>::wide;
  constexpr int N = vector_elements<T>();
  run_launches launches(call.runs, call.n_runs, call.rows, true);
  merged m;
  m.heads = call.heads;
  m.head_dim = call.head_dim;
  m.out = call.total_lse == NULL ? NULL : call.total;
  m.lse = call.total_lse;
  int more;
  while ((more = launches.advance()) > 0) {
    for (int32_t p = 0; p < launches.parts; ++p) m.part[p] = call.parts[launches.part_of[p]];
    int64_t launch_rows = launches.carried.row[launches.carried.n] - launches.carried.row[0];
    bool wide = vectors_fit<T>(m, launches.parts, out);
    int64_t items = m.heads * (m.head_dim / (wide ? N : 1) + (m.head_dim == 0));
    unsigned threads = (unsigned)(items < HCP_THREADS ? (items + 31) / 32 * 32 : HCP_THREADS);
    unsigned blocks = hcp_cuda_blocks(launch_rows * HCP_THREADS);
    if (items == 0) continue;
    if (wide)
      merge_rows<T, O, N>
          <<<blocks, threads, 0, (cudaStream_t)stream>>>(launches.carried, m, (O *)out, (W *)lse);
    else
      merge_rows<T, O, 1>
          <<<blocks, threads, 0, (cudaStream_t)stream>>>(launches.carried, m, (O *)out, (W *)lse);
    hcp_status status = hcp_cuda_launched("merge", err);
    if (status != HCP_OK) return status;
  }
  return more < 0 ? row_too_long(launches, err) : HCP_OK;
}

hcp_status hcp_cuda_merge(const hcp_merge *merge, void *out, void *lse, void *stream,
                          hcp_error *err) {
  hcp_status status = HCP_OK;
  HCP_CUDA_DISPATCH(merge->dtype, status = (merge_all<T, T>(*merge, out, lse, stream, err)))
  return status;
}

hcp_status hcp_cuda_merge_on(const hcp_merge *merge, void *total, void *lse, void *stream,
                             hcp_error *err) {
  hcp_status status = HCP_OK;
  HCP_CUDA_DISPATCH(merge->dtype, status = (merge_all<T, typename element<T>::wide>(
                                      *merge, total, lse, stream, err)))
  return status;
}
