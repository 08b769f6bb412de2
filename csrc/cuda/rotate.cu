/* rotate.cu - rows of heads turned (RoPE): alone, with copies for those who read
 * them, or on the way out of a sum.
 *
 * A thread has two vectors of one head of one row in registers: the first and the
 * second elements of its pairs, or, interleaved, two vectors side by side. What
 * does not turn follows as vectors side by side, too. */
#include "runs.cuh"

struct turned_rows {
  const char *part[HCP_CUDA_PARTS_MAX];
  int64_t part_stride[HCP_CUDA_PARTS_MAX]; /* bytes */
  int64_t head_stride;                     /* elements, of the parts */
  char *out, *wire;                        /* wire: NULL where a sum is turned */
  int64_t out_stride, wire_stride;         /* bytes */
  int64_t heads, slots, turning_slots;     /* slots of a head: a thread each */
  hcp_rotation rotation;
};

struct slot_place {
  int64_t x, y; /* elements of the head where the two vectors start */
};

static __device__ slot_place place_of(const turned_rows &rows, int64_t slot, int n) {
  const hcp_rotation &r = rows.rotation;
  if (slot >= rows.turning_slots) {
    int64_t x = 2 * r.pairs + (slot - rows.turning_slots) * 2 * n;
    return {x, x + n};
  }
  int64_t x = hcp_pair_first(slot * n, r.interleaved);
  return {x, r.interleaved ? x + n : hcp_pair_second(slot * n, r.pairs, 0)};
}

static __device__ void turn(float *x, float *y, float cos_x, float sin_x, float cos_y, float sin_y,
                            int inverse) {
  hcp_turn_float32(x, y, cos_x, sin_x, cos_y, sin_y, inverse);
}
static __device__ void turn(double *x, double *y, double cos_x, double sin_x, double cos_y,
                            double sin_y, int inverse) {
  hcp_turn_float64(x, y, cos_x, sin_x, cos_y, sin_y, inverse);
}

/* Both vectors, laid end to end as a head of N pairs. */
template <class W, int N>
static __device__ void turn_slot(W (&at)[2 * N], const hcp_rotation &r, int64_t row, int64_t slot) {
  const W *cos = (const W *)r.cos + row * 2 * r.pairs, *sin = (const W *)r.sin + row * 2 * r.pairs;
#pragma unroll
  for (int e = 0; e < N; ++e) {
    int64_t x = hcp_pair_first(slot * N + e, r.interleaved);
    int64_t y = hcp_pair_second(slot * N + e, r.pairs, r.interleaved);
    /* Indices that the compiler knows keep the elements in registers. */
    if (r.interleaved)
      turn(&at[2 * e], &at[2 * e + 1], cos[x], sin[x], cos[y], sin[y], r.inverse);
    else
      turn(&at[e], &at[e + N], cos[x], sin[x], cos[y], sin[y], r.inverse);
  }
}

template <class T, int N>
static __device__ void add_row(typename element<T>::wide (&total)[2 * N], const T *head,
                               slot_place place, bool both, bool first) {
  using V = vector<T, N>;
  V x = *reinterpret_cast<const V *>(head + place.x);
  V y = both ? *reinterpret_cast<const V *>(head + place.y) : V();
  for (int e = 0; e < N; ++e) {
    total[e] = first ? load(x.at[e]) : total[e] + load(x.at[e]);
    if (both) total[e + N] = first ? load(y.at[e]) : total[e + N] + load(y.at[e]);
  }
}

template <class T, int N>
static __device__ void put_row(const typename element<T>::wide (&total)[2 * N], T *head,
                               slot_place place, bool both) {
  using V = vector<T, N>;
  V x, y;
  for (int e = 0; e < N; ++e) {
    x.at[e] = store<T>(total[e]);
    y.at[e] = store<T>(total[e + N]);
  }
  *reinterpret_cast<V *>(head + place.x) = x;
  if (both) *reinterpret_cast<V *>(head + place.y) = y;
}

template <class T, int N>
__global__ void __launch_bounds__(HCP_THREADS)
    turn_rows(const __grid_constant__ run_table table, const __grid_constant__ turned_rows rows) {
  using W = typename element<T>::wide;
  int64_t of_row = rows.heads * rows.slots, head_dim = rows.rotation.head_dim;
  int64_t items = table.rows() * of_row, step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < items; i += step) {
    int64_t row = table.first_row() + i / of_row, head = i % of_row / rows.slots,
            slot = i % rows.slots;
    int run = table.find(row);
    slot_place place = place_of(rows, slot, N);
    bool both = place.y < head_dim; /* of an odd rest only the first */
    W total[2 * N] = {};
    if (rows.wire) {
      const T *source = (const T *)(rows.part[0] + row * rows.part_stride[0]);
      add_row<T, N>(total, source + head * rows.head_stride, place, both, true);
    } else {
      for (int r = table.record[run]; r < table.record[run + 1]; ++r) {
        int part = table.part[r];
        int64_t part_row = table.part_row[r] + row - table.row[run];
        const T *source = (const T *)(rows.part[part] + part_row * rows.part_stride[part]);
        add_row<T, N>(total, source + head * rows.head_stride, place, both, r == table.record[run]);
      }
    }
    if (slot < rows.turning_slots) turn_slot<W, N>(total, rows.rotation, row, slot);
    put_row<T, N>(total, (T *)(rows.out + row * rows.out_stride) + head * head_dim, place, both);
    if (rows.wire == nullptr) continue;
    for (int r = table.record[run]; r < table.record[run + 1]; ++r) {
      int64_t wire_row = table.part_row[r] + row - table.row[run];
      T *target = (T *)(rows.wire + wire_row * rows.wire_stride);
      put_row<T, N>(total, target + head * head_dim, place, both);
    }
  }
}

/* Whether every vector of N elements is aligned, and every slot whole. */
template <class T, int N>
static bool fits(const turned_rows &rows, int parts) {
  const hcp_rotation &r = rows.rotation;
  int64_t bytes = N * (int64_t)sizeof(T), pairs = r.pairs;
  bool whole = pairs % N == 0 && (r.head_dim - 2 * pairs) % (2 * N) == 0 &&
               rows.head_stride * (int64_t)sizeof(T) % bytes == 0 &&
               aligned(rows.out, rows.out_stride, bytes) &&
               aligned(rows.wire, rows.wire_stride, bytes);
  for (int p = 0; p < parts; ++p)
    whole = whole && aligned(rows.part[p], rows.part_stride[p], bytes);
  return whole;
}

template <class T, int N>
static void launch(const run_table &table, turned_rows *rows, cudaStream_t stream) {
  const hcp_rotation &r = rows->rotation;
  rows->turning_slots = (r.pairs + N - 1) / N;
  rows->slots = rows->turning_slots + (r.head_dim - 2 * r.pairs + 2 * N - 1) / (2 * N);
  int64_t items = (table.row[table.n] - table.row[0]) * rows->heads * rows->slots;
  turn_rows<T, N><<<hcp_cuda_blocks(items), HCP_THREADS, 0, stream>>>(table, *rows);
}

template <class T>
static hcp_status launch_any(const run_launches &launches, turned_rows *rows, int parts,
                             cudaStream_t stream, hcp_error *err) {
  constexpr int N = vector_elements<T>();
  if (fits<T, N>(*rows, parts))
    launch<T, N>(launches.table, rows, stream);
  else
    launch<T, 1>(launches.table, rows, stream);
  return hcp_cuda_launched("rotate", err);
}

template <class T>
static hcp_status rotate_rows(hcp_heads source, const hcp_rotation *rotation, const hcp_run *runs,
                              int64_t n_runs, int64_t rows, hcp_column out, hcp_column wire,
                              cudaStream_t stream, hcp_error *err) {
  turned_rows turned = {};
  turned.part[0] = (const char *)source.data;
  turned.part_stride[0] = source.row_stride * (int64_t)sizeof(T);
  turned.head_stride = source.head_stride;
  turned.out = (char *)out.data;
  turned.out_stride = out.row_stride_bytes;
  /* Without runs nothing is written there: any address that is not NULL. */
  turned.wire = n_runs > 0 ? (char *)wire.data : (char *)out.data;
  turned.wire_stride = n_runs > 0 ? wire.row_stride_bytes : out.row_stride_bytes;
  turned.rotation = *rotation;
  turned.heads = out.row_bytes / (int64_t)sizeof(T) / rotation->head_dim;
  run_launches launches(runs, n_runs, rows, true);
  int more;
  while ((more = launches.advance()) > 0) {
    hcp_status status = launch_any<T>(launches, &turned, 1, stream, err);
    if (status != HCP_OK) return status;
  }
  return more < 0 ? row_too_long(launches, err) : HCP_OK;
}

hcp_status hcp_cuda_rotate(hcp_dtype dtype, hcp_heads source, const hcp_rotation *rotation,
                           const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                           hcp_column wire, void *stream, hcp_error *err) {
  hcp_status status = HCP_OK;
  if (out.row_bytes == 0) return HCP_OK;
  HCP_CUDA_DISPATCH(dtype, status = rotate_rows<T>(source, rotation, runs, n_runs, rows, out, wire,
                                                   (cudaStream_t)stream, err))
  return status;
}

template <class T>
static hcp_status turn_column(const hcp_column *parts, int32_t n_columns, const hcp_run *runs,
                              int64_t n_runs, int64_t rows, const hcp_rotation *rotation,
                              hcp_column out, cudaStream_t stream, hcp_error *err) {
  run_launches launches(runs, n_runs, rows, true);
  int more;
  while ((more = launches.advance()) > 0) {
    turned_rows turned = {};
    for (int32_t p = 0; p < launches.parts; ++p) {
      const hcp_column &part = parts[(int64_t)launches.part_of[p] * n_columns];
      turned.part[p] = (const char *)part.data;
      turned.part_stride[p] = part.row_stride_bytes;
    }
    turned.head_stride = rotation->head_dim;
    turned.out = (char *)out.data;
    turned.out_stride = out.row_stride_bytes;
    turned.rotation = *rotation;
    turned.heads = out.row_bytes / (int64_t)sizeof(T) / rotation->head_dim;
    hcp_status status = launch_any<T>(launches, &turned, launches.parts, stream, err);
    if (status != HCP_OK) return status;
  }
  return more < 0 ? row_too_long(launches, err) : HCP_OK;
}

hcp_status hcp_cuda_reduce_rotated(hcp_dtype dtype, const hcp_column *parts, int32_t n_columns,
                                   const hcp_run *runs, int64_t n_runs, int64_t rows,
                                   const hcp_rotation *rotation, int32_t rotated, hcp_column out,
                                   void *stream, hcp_error *err) {
  hcp_status status = HCP_OK;
  for (int32_t c = 0; status == HCP_OK && c < rotated; ++c) {
    hcp_column own = out;
    own.row_bytes = parts[c].row_bytes;
    if (own.row_bytes > 0)
      HCP_CUDA_DISPATCH(dtype, status = turn_column<T>(parts + c, n_columns, runs, n_runs, rows,
                                                       rotation, own, (cudaStream_t)stream, err))
    out.data = (char *)out.data + parts[c].row_bytes;
  }
  if (status != HCP_OK || rotated == n_columns) return status;
  return hcp_cuda_reduce_from(dtype, parts, rotated, n_columns, runs, n_runs, rows, out,
                              (cudaStream_t)stream, err);
}
