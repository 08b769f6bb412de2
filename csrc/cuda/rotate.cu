/* rotate.cu - rows of heads turned (RoPE): alone, with copies for those who read
 * them, or on the way out of a sum.
 *
 * A thread has one cell of a row's heads: two vectors, the first and the second
 * elements of its pairs, or, interleaved, two vectors side by side. What does not
 * turn follows as vectors side by side, too. All heads of a row turn alike: a
 * thread keeps the cosines and sines of its cell and takes several heads at once,
 * whose loads are under way together. */
#include "runs.cuh"

/* Heads that a thread has in registers. */
enum { HEADS = 4, SUMMED_HEADS = 2 };

struct turned_rows {
  const char *part[HCP_CUDA_PARTS_MAX];
  int64_t part_stride[HCP_CUDA_PARTS_MAX]; /* bytes */
  int64_t head_stride;                     /* elements, of the parts */
  char *out, *wire;                        /* wire: NULL where a sum is turned */
  int64_t out_stride, wire_stride;         /* bytes */
  int32_t heads, cells, turning_cells;     /* cells of a head */
  hcp_rotation rotation;
};

/* Elements of a head where the two vectors of a cell start. Of an odd rest there is
 * only the first, which is then read twice: loads without branches are under way
 * together. */
struct cell_place {
  int64_t x, y;
};

template <bool INTERLEAVED>
static __device__ cell_place place_of(const turned_rows &rows, int32_t cell, int n) {
  const hcp_rotation &r = rows.rotation;
  if (cell >= rows.turning_cells) {
    int64_t x = 2 * r.pairs + (int64_t)(cell - rows.turning_cells) * 2 * n;
    return {x, x + n < r.head_dim ? x + n : x};
  }
  int64_t x = hcp_pair_first((int64_t)cell * n, INTERLEAVED);
  return {x, INTERLEAVED ? x + n : hcp_pair_second(x, r.pairs, 0)};
}

/* Both vectors of a cell. */
template <class T, int N>
struct cell_vectors {
  packed<T, N> x, y;

  __device__ void read(const T *head, cell_place place) {
    x = *reinterpret_cast<const packed<T, N> *>(head + place.x);
    y = *reinterpret_cast<const packed<T, N> *>(head + place.y);
  }
  __device__ void write(T *head, cell_place place) const {
    *reinterpret_cast<packed<T, N> *>(head + place.x) = x;
    if (place.y != place.x) *reinterpret_cast<packed<T, N> *>(head + place.y) = y;
  }
  __device__ void widen(typename element<T>::wide (&at)[2 * N]) const {
    x.widen(at);
    y.widen(at + N);
  }
  __device__ void round(const typename element<T>::wide (&at)[2 * N]) {
    x.round(at);
    y.round(at + N);
  }
};

/* A cell's elements, or their angles, pair by pair: all first ones, then all second
 * ones, whichever way they lie. Indices that the compiler knows keep them in
 * registers. */
template <class W, int N, bool INTERLEAVED>
static __device__ void to_pairs(W (&at)[2 * N], const W (&given)[2 * N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) {
    at[e] = INTERLEAVED ? given[2 * e] : given[e];
    at[e + N] = INTERLEAVED ? given[2 * e + 1] : given[e + N];
  }
}

template <class W, int N, bool INTERLEAVED>
static __device__ void from_pairs(W (&at)[2 * N], const W (&given)[2 * N]) {
#pragma unroll
  for (int e = 0; e < 2 * N; ++e) at[e] = INTERLEAVED ? given[e / 2 + e % 2 * N] : given[e];
}

static __device__ void turn(float *x, float *y, float cos_x, float sin_x, float cos_y,
                            float sin_y) {
  hcp_turn_float32(x, y, cos_x, sin_x, cos_y, sin_y, 0);
}
static __device__ void turn(double *x, double *y, double cos_x, double sin_x, double cos_y,
                            double sin_y) {
  hcp_turn_float64(x, y, cos_x, sin_x, cos_y, sin_y, 0);
}

/* The cosines and sines of a cell, pair by pair; none where it does not turn. */
template <class W, int N, bool INTERLEAVED>
struct cell_angles {
  W cos[2 * N], sin[2 * N];
  bool turns;

  __device__ cell_angles(const turned_rows &rows, int64_t row, int32_t cell, cell_place place)
      : turns(cell < rows.turning_cells) {
    if (!turns) return;
    const hcp_rotation &r = rows.rotation;
    cell_vectors<W, N> c, s;
    c.read((const W *)r.cos + row * 2 * r.pairs, place);
    s.read((const W *)r.sin + row * 2 * r.pairs, place);
    W given[2 * N];
    c.widen(given);
    to_pairs<W, N, INTERLEAVED>(cos, given);
    s.widen(given);
    to_pairs<W, N, INTERLEAVED>(sin, given);
    /* The transpose of a turn is one, too. */
#pragma unroll
    for (int e = 0; e < N; ++e) {
      W x = sin[e], y = sin[e + N];
      sin[e] = r.inverse ? -y : x;
      sin[e + N] = r.inverse ? -x : y;
    }
  }

  __device__ void turn_all(W (&at)[2 * N]) const {
    if (!turns) return;
    W pair[2 * N];
    to_pairs<W, N, INTERLEAVED>(pair, at);
#pragma unroll
    for (int e = 0; e < N; ++e)
      turn(&pair[e], &pair[e + N], cos[e], sin[e], cos[e + N], sin[e + N]);
    from_pairs<W, N, INTERLEAVED>(at, pair);
  }
};

/* A cell of COUNT heads, every blockDim.y-th from `first` on. */
template <class T, int N, int COUNT>
struct cell_heads {
  cell_vectors<T, N> vectors[COUNT];

  /* The last head stands for those beyond it. */
  __device__ void read(const T *row, int32_t first, const turned_rows &rows, cell_place place) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int32_t head = min(first + i * (int32_t)blockDim.y, rows.heads - 1);
      vectors[i].read(row + head * rows.head_stride, place);
    }
  }
  __device__ void write(T *row, int32_t first, const turned_rows &rows, cell_place place) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int32_t head = first + i * (int32_t)blockDim.y;
      if (head < rows.heads) vectors[i].write(row + head * rows.rotation.head_dim, place);
    }
  }
};

template <class T>
static __device__ const T *part_row_of(const carried_runs &carried, const turned_rows &rows,
                                       int64_t row, int run, int record) {
  int part = carried.part[record];
  int64_t part_row = carried.part_row[record] + row - carried.row[run];
  return (const T *)(rows.part[part] + part_row * rows.part_stride[part]);
}

/* One cell of all heads of a row, read, turned, and written to the result and to the
 * wire. The first heads are on their way before the angles are waited for. */
template <class T, int N, bool INTERLEAVED>
static __device__ void turn_cell(const carried_runs &carried, const turned_rows &rows, int64_t row,
                                 int run, int32_t cell) {
  using W = typename element<T>::wide;
  cell_place place = place_of<INTERLEAVED>(rows, cell, N);
  const T *source = (const T *)(rows.part[0] + row * rows.part_stride[0]);
  int32_t first = (int32_t)threadIdx.y;
  cell_heads<T, N, HEADS> heads;
  heads.read(source, first, rows, place);
  const cell_angles<W, N, INTERLEAVED> angles(rows, row, cell, place);
  for (int32_t head = first; head < rows.heads; head += HEADS * (int32_t)blockDim.y) {
    if (head != first) heads.read(source, head, rows, place);
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
      W at[2 * N];
      heads.vectors[i].widen(at);
      angles.turn_all(at);
      heads.vectors[i].round(at);
    }
    heads.write((T *)(rows.out + row * rows.out_stride), head, rows, place);
    for (int r = carried.record[run]; r < carried.record[run + 1]; ++r) {
      int64_t wire_row = carried.part_row[r] + row - carried.row[run];
      heads.write((T *)(rows.wire + wire_row * rows.wire_stride), head, rows, place);
    }
  }
}

/* The same of heads that are summed over their parts first, the next of which is on
 * its way. A row without parts is 0, not what 0 turns to: -0. */
template <class T, int N, bool INTERLEAVED>
static __device__ void sum_cell(const carried_runs &carried, const turned_rows &rows, int64_t row,
                                int run, int32_t cell) {
  using W = typename element<T>::wide;
  cell_place place = place_of<INTERLEAVED>(rows, cell, N);
  int begin = carried.record[run], end = carried.record[run + 1];
  int32_t first = (int32_t)threadIdx.y, step = SUMMED_HEADS * (int32_t)blockDim.y;
  cell_heads<T, N, SUMMED_HEADS> heads = {}, next = {};
  auto read = [&](cell_heads<T, N, SUMMED_HEADS> &to, int32_t head, int record) {
    if (record < end) to.read(part_row_of<T>(carried, rows, row, run, record), head, rows, place);
  };
  read(heads, first, begin);
  read(next, first, begin + 1);
  const cell_angles<W, N, INTERLEAVED> angles(rows, row, cell, place);
  for (int32_t head = first; head < rows.heads; head += step) {
    W total[SUMMED_HEADS][2 * N], at[2 * N];
    if (head != first) {
      read(heads, head, begin);
      read(next, head, begin + 1);
    }
    /* The first is not added to zero: a sum of negative zeros stays one. */
#pragma unroll
    for (int i = 0; i < SUMMED_HEADS; ++i) heads.vectors[i].widen(total[i]);
    for (int r = begin + 1; r < end; ++r) {
      heads = next;
      read(next, head, r + 1);
#pragma unroll
      for (int i = 0; i < SUMMED_HEADS; ++i) {
        heads.vectors[i].widen(at);
#pragma unroll
        for (int e = 0; e < 2 * N; ++e) total[i][e] += at[e];
      }
    }
#pragma unroll
    for (int i = 0; i < SUMMED_HEADS; ++i) {
      if (begin < end) angles.turn_all(total[i]);
      heads.vectors[i].round(total[i]);
    }
    heads.write((T *)(rows.out + row * rows.out_stride), head, rows, place);
  }
}

/* A block is cells x heads x rows. */
template <class T, int N, bool SUM, bool INTERLEAVED>
__global__ void __launch_bounds__(HCP_THREADS, 2)
    turn_rows(const __grid_constant__ carried_runs carried,
              const __grid_constant__ turned_rows rows) {
  int64_t end = carried.first_row() + carried.rows(), step = (int64_t)gridDim.x * blockDim.z;
  int64_t row = carried.first_row() + (int64_t)blockIdx.x * blockDim.z + threadIdx.z;
  for (; row < end; row += step) {
    int run = carried.find(row);
    for (int32_t cell = (int32_t)threadIdx.x; cell < rows.cells; cell += (int32_t)blockDim.x) {
      if constexpr (SUM)
        sum_cell<T, N, INTERLEAVED>(carried, rows, row, run, cell);
      else
        turn_cell<T, N, INTERLEAVED>(carried, rows, row, run, cell);
    }
  }
}

/* Whether every vector of N elements is aligned, and every cell whole. */
template <class T, int N>
static bool fits(const turned_rows &rows, int parts) {
  const hcp_rotation &r = rows.rotation;
  int64_t bytes = N * (int64_t)sizeof(T), pairs = r.pairs;
  int64_t angle_bytes = N * (int64_t)sizeof(typename element<T>::wide);
  bool whole = pairs % N == 0 && (r.head_dim - 2 * pairs) % (2 * N) == 0 &&
               rows.head_stride * (int64_t)sizeof(T) % bytes == 0 &&
               aligned(r.cos, 0, angle_bytes) && aligned(r.sin, 0, angle_bytes) &&
               aligned(rows.out, rows.out_stride, bytes) &&
               aligned(rows.wire, rows.wire_stride, bytes);
  for (int p = 0; p < parts; ++p)
    whole = whole && aligned(rows.part[p], rows.part_stride[p], bytes);
  return whole;
}

template <class T, int N, bool SUM>
static void launch(const carried_runs &carried, turned_rows *rows, cudaStream_t stream) {
  const hcp_rotation &r = rows->rotation;
  rows->turning_cells = (int32_t)((r.pairs + N - 1) / N);
  rows->cells = rows->turning_cells + (int32_t)((r.head_dim - 2 * r.pairs + 2 * N - 1) / (2 * N));
  int32_t count = SUM ? SUMMED_HEADS : HEADS, groups = (rows->heads + count - 1) / count;
  dim3 block;
  block.x = (unsigned)(rows->cells < HCP_THREADS ? rows->cells : HCP_THREADS);
  block.y = HCP_THREADS / block.x < (unsigned)groups ? HCP_THREADS / block.x : (unsigned)groups;
  block.z = HCP_THREADS / (block.x * block.y);
  if (block.z > 64) block.z = 64; /* CUDA allows no more */
  int64_t items = (carried.row[carried.n] - carried.row[0]) * HCP_THREADS / block.z;
  auto kernel = r.interleaved ? turn_rows<T, N, SUM, true> : turn_rows<T, N, SUM, false>;
  kernel<<<hcp_cuda_blocks(items), block, 0, stream>>>(carried, *rows);
}

template <class T, bool SUM>
static hcp_status launch_any(const run_launches &launches, turned_rows *rows, int parts,
                             cudaStream_t stream, hcp_error *err) {
  constexpr int N = vector_elements<T>();
  if (fits<T, N>(*rows, parts))
    launch<T, N, SUM>(launches.carried, rows, stream);
  else
    launch<T, 1, SUM>(launches.carried, rows, stream);
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
  turned.heads = (int32_t)(out.row_bytes / (int64_t)sizeof(T) / rotation->head_dim);
  run_launches launches(runs, n_runs, rows, true);
  int more;
  while ((more = launches.advance()) > 0) {
    hcp_status status = launch_any<T, false>(launches, &turned, 1, stream, err);
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
static hcp_status turn_column(const hcp_sum &of, int32_t c, const hcp_rotation *rotation,
                              hcp_column out, cudaStream_t stream, hcp_error *err) {
  run_launches launches(of.runs, of.n_runs, of.rows, true);
  int more;
  while ((more = launches.advance()) > 0) {
    turned_rows turned = {};
    for (int32_t p = 0; p < launches.parts; ++p) {
      const hcp_column &part = of.parts[(int64_t)launches.part_of[p] * of.n_columns + c];
      turned.part[p] = (const char *)part.data;
      turned.part_stride[p] = part.row_stride_bytes;
    }
    turned.head_stride = rotation->head_dim;
    turned.out = (char *)out.data;
    turned.out_stride = out.row_stride_bytes;
    turned.rotation = *rotation;
    turned.heads = (int32_t)(out.row_bytes / (int64_t)sizeof(T) / rotation->head_dim);
    hcp_status status = launch_any<T, true>(launches, &turned, launches.parts, stream, err);
    if (status != HCP_OK) return status;
  }
  return more < 0 ? row_too_long(launches, err) : HCP_OK;
}

hcp_status hcp_cuda_reduce_rotated(const hcp_sum *sum, const hcp_rotation *rotation,
                                   int32_t rotated, hcp_column out, void *stream, hcp_error *err) {
  hcp_status status = HCP_OK;
  for (int32_t c = 0; status == HCP_OK && c < rotated; ++c) {
    hcp_column own = out;
    own.row_bytes = sum->parts[c].row_bytes;
    if (own.row_bytes > 0)
      HCP_CUDA_DISPATCH(sum->dtype,
                        status = turn_column<T>(*sum, c, rotation, own, (cudaStream_t)stream, err))
    out.data = (char *)out.data + sum->parts[c].row_bytes;
  }
  if (status != HCP_OK || rotated == sum->n_columns) return status;
  return hcp_cuda_reduce_from(sum, rotated, out, stream, err);
}
