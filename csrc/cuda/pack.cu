/* pack.cu - rows gathered, several tensors side by side, and back, cast on the way or not.
 *
 * A few threads, a warp for long rows, move one row of one column; where rows are too few for the
 * device, several warps move one. Neighbours move neighbouring vectors, so that both sides are read
 * and written in full lines, and each thread has several loads under way. */
#include "device.cuh"
#include "hcp/index.h"

struct copied_column {
  const char *source;
  char *target;
  int64_t source_stride, target_stride; /* bytes */
  int64_t vectors;                      /* of a row */
};

/* Rows are counted from the launch's first, in 32 bits, so that parameters of
 * 32,764 bytes, all that a launch may carry, take as many segments as they can. */
template <int SEGMENTS>
struct carried_segments {
  enum : int32_t { ZEROS = INT32_MIN };
  int64_t first_target, first_source;
  copied_column columns[HCP_CUDA_COLUMNS_MAX];
  int32_t n;
  int32_t lane_bits;
  int32_t target_row[SEGMENTS + 1]; /* where each segment's rows go, then the end */
  int32_t source_row[SEGMENTS];     /* ZEROS: rows of zeros */

  /* Adds the rows of a segment from number *done on, as many as 32 bits count: false
   * when this launch takes none of them. */
  bool add(const hcp_segment &segment, int64_t *done) {
    int64_t row = target_row[n], most = INT32_MAX - row, rows = segment.rows - *done;
    int64_t from = segment.row < 0 ? ZEROS : segment.row + *done - first_source;
    bool far = segment.row >= 0 && (from > INT32_MAX || from < -INT32_MAX);
    if (n == SEGMENTS || far || (most == 0 && rows > 0)) return false;
    if (rows > most) rows = most;
    source_row[n] = (int32_t)from;
    target_row[++n] = (int32_t)(row + rows);
    *done += rows;
    return true;
  }
};

/* The columns that a launch carries. */
struct moved_columns {
  copied_column column[HCP_CUDA_COLUMNS_MAX];
  int64_t source_bytes[HCP_CUDA_COLUMNS_MAX]; /* of a row */
  int32_t n = 0;

  bool full() const { return n == HCP_CUDA_COLUMNS_MAX; }
  void add(const copied_column &one, int64_t row_bytes) {
    column[n] = one;
    source_bytes[n++] = row_bytes;
  }
};

/* Segments of a launch. */
enum { FEW = 512, MANY = 4000 };

/* Vectors as they are read, and as they are written. */
template <class V>
struct copied {
  using source = V;
  using target = V;
  static __device__ V moved(V value) { return value; }
};

/* The wider of them has 16 bytes, so that neighbours write, too, in full lines. */
template <class From, class To, int N>
struct cast {
  using source = packed<From, N>;
  using target = packed<To, N>;
  static __device__ target moved(const source &value) {
    between<From, To> elements[N];
    target rounded;
    value.widen(elements);
    rounded.round(elements);
    return rounded;
  }
};

template <class Move, int SEGMENTS>
__global__ void __launch_bounds__(HCP_THREADS)
    move_rows(const __grid_constant__ carried_segments<SEGMENTS> carried) {
  using V = typename Move::source;
  using W = typename Move::target;
  const copied_column &column = carried.columns[blockIdx.y];
  int lanes = 1 << carried.lane_bits, lane = (int)threadIdx.x & (lanes - 1);
  int rows_at_once = HCP_THREADS >> carried.lane_bits;
  int64_t step = (int64_t)gridDim.x * rows_at_once;
  int64_t row = (int64_t)blockIdx.x * rows_at_once + (threadIdx.x >> carried.lane_bits);
  for (; row < carried.target_row[carried.n]; row += step) {
    int s = hcp_place_of_row_32(carried.target_row, carried.n, (int32_t)row);
    bool zeros = carried.source_row[s] == carried.ZEROS;
    int64_t source_row =
        zeros ? 0 : carried.first_source + carried.source_row[s] + row - carried.target_row[s];
    const V *source =
        reinterpret_cast<const V *>(column.source + source_row * column.source_stride);
    W *target =
        reinterpret_cast<W *>(column.target + (carried.first_target + row) * column.target_stride);
    int64_t i = (int64_t)blockIdx.z * IN_FLIGHT * lanes + lane;
    for (; i < column.vectors; i += (int64_t)gridDim.z * IN_FLIGHT * lanes) {
      V value[IN_FLIGHT] = {};
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k)
        if (!zeros && i + k * lanes < column.vectors) value[k] = source[i + k * lanes];
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k)
        if (i + k * lanes < column.vectors) target[i + k * lanes] = Move::moved(value[k]);
    }
  }
}

/* A kernel, and the bytes of a vector that it reads. */
template <int SEGMENTS>
struct mover {
  void (*kernel)(const carried_segments<SEGMENTS>);
  int64_t vector_bytes;
};

/* The widest vector that every address and row of the columns allows. */
template <int SEGMENTS>
static mover<SEGMENTS> copy_of(const moved_columns &columns) {
  uintptr_t bits = 16;
  for (int32_t c = 0; c < columns.n; ++c) {
    const copied_column &column = columns.column[c];
    bits |= (uintptr_t)column.source | (uintptr_t)column.target | (uintptr_t)column.source_stride |
            (uintptr_t)column.target_stride | (uintptr_t)columns.source_bytes[c];
  }
  switch (bits & (~bits + 1)) {
    case 16:
      return {move_rows<copied<int4>, SEGMENTS>, 16};
    case 8:
      return {move_rows<copied<int2>, SEGMENTS>, 8};
    case 4:
      return {move_rows<copied<int>, SEGMENTS>, 4};
    case 2:
      return {move_rows<copied<short>, SEGMENTS>, 2};
    default:
      return {move_rows<copied<char>, SEGMENTS>, 1};
  }
}

/* Vectors where every address and row of the columns allows them, else elements: those where
 * a launch carries many alone, since who moves elements waits for them and not for the launch. */
template <int SEGMENTS, class From, class To>
static mover<SEGMENTS> cast_of(const moved_columns &columns) {
  constexpr int N = 16 / (int)(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  bool wide = true;
  for (int32_t c = 0; c < columns.n; ++c) {
    const copied_column &column = columns.column[c];
    wide = wide && aligned(column.target, column.target_stride, sizeof(To) * N) &&
           aligned(column.source, column.source_stride | columns.source_bytes[c], sizeof(From) * N);
  }
  if (wide) return {move_rows<cast<From, To, N>, SEGMENTS>, sizeof(From) * N};
  if constexpr (SEGMENTS == MANY)
    return {move_rows<cast<From, To, 1>, SEGMENTS>, sizeof(From)};
  else
    return {};
}

template <int SEGMENTS, class From>
static mover<SEGMENTS> cast_from(hcp_dtype to, const moved_columns &columns) {
  mover<SEGMENTS> found = {};
  HCP_CUDA_DISPATCH(to, if constexpr (!same<From, T>) found = cast_of<SEGMENTS, From, T>(columns))
  return found;
}

/* cast is NULL where bytes are copied. Without a kernel where such launches have none. */
template <int SEGMENTS>
static mover<SEGMENTS> mover_of(const hcp_cast *cast, const moved_columns &columns) {
  if (cast == NULL) return copy_of<SEGMENTS>(columns);
  mover<SEGMENTS> found = {};
  HCP_CUDA_DISPATCH(cast->from, found = (cast_from<SEGMENTS, T>(cast->to, columns)))
  return found;
}

template <int SEGMENTS>
static hcp_status launch(const mover<SEGMENTS> &mover, carried_segments<SEGMENTS> *carried,
                         const moved_columns &columns, cudaStream_t stream, hcp_error *err) {
  int64_t most = 0, rows = carried->target_row[carried->n];
  for (int32_t c = 0; c < columns.n; ++c) {
    carried->columns[c].vectors = columns.source_bytes[c] / mover.vector_bytes;
    if (carried->columns[c].vectors > most) most = carried->columns[c].vectors;
  }
  if (rows * most == 0) return HCP_OK;
  carried->lane_bits = hcp_cuda_lane_bits(most);
  dim3 grid(hcp_cuda_blocks(rows << carried->lane_bits), (unsigned)columns.n);
  grid.z = hcp_cuda_row_pieces(most, carried->lane_bits, (int64_t)grid.x * grid.y);
  mover.kernel<<<grid, HCP_THREADS, 0, stream>>>(*carried);
  return hcp_cuda_launched("pack", err);
}

/* Launches that carry all segments, few or many each: one that carries few is cheaper. */
template <int SEGMENTS>
static hcp_status move_by(const mover<SEGMENTS> &mover, const moved_columns &columns,
                          const hcp_segment *segments, int64_t n_segments, cudaStream_t stream,
                          hcp_error *err) {
  carried_segments<SEGMENTS> carried;
  for (int32_t c = 0; c < columns.n; ++c) carried.columns[c] = columns.column[c];
  carried.first_target = 0;
  for (int64_t s = 0, done = 0; s < n_segments;) {
    carried.n = carried.target_row[0] = 0;
    carried.first_source = segments[s].row + done;
    for (; s < n_segments && carried.add(segments[s], &done);)
      if (done == segments[s].rows) ++s, done = 0;
    hcp_status status = launch(mover, &carried, columns, stream, err);
    if (status != HCP_OK) return status;
    carried.first_target += carried.target_row[carried.n];
  }
  return HCP_OK;
}

static hcp_status move_all(const hcp_cast *cast, const moved_columns &columns,
                           const hcp_segment *segments, int64_t n_segments, void *stream,
                           hcp_error *err) {
  auto on = (cudaStream_t)stream;
  mover<FEW> few = mover_of<FEW>(cast, columns);
  if (n_segments <= FEW && few.kernel) return move_by(few, columns, segments, n_segments, on, err);
  return move_by(mover_of<MANY>(cast, columns), columns, segments, n_segments, on, err);
}

hcp_status hcp_cuda_pack(const hcp_cast *cast, const hcp_column *sources, int32_t n_sources,
                         const hcp_segment *segments, int64_t n_segments, hcp_column out,
                         void *stream, hcp_error *err) {
  moved_columns columns;
  char *target = (char *)out.data;
  hcp_status status = HCP_OK;
  for (int32_t c = 0; c < n_sources && status == HCP_OK; ++c) {
    const hcp_column &source = sources[c];
    columns.add({(const char *)source.data, target, source.row_stride_bytes, out.row_stride_bytes},
                source.row_bytes);
    target += cast == NULL ? source.row_bytes : hcp_cast_bytes(*cast, source.row_bytes);
    if (!columns.full() && c < n_sources - 1) continue;
    status = move_all(cast, columns, segments, n_segments, stream, err);
    columns.n = 0;
  }
  return status;
}

hcp_status hcp_cuda_unpack(const hcp_cast *cast, hcp_column source, const hcp_segment *segments,
                           int64_t n_segments, const hcp_column *outs, int32_t n_outs, void *stream,
                           hcp_error *err) {
  moved_columns columns;
  const char *from = (const char *)source.data;
  hcp_status status = HCP_OK;
  for (int32_t c = 0; c < n_outs && status == HCP_OK; ++c) {
    int64_t bytes = outs[c].row_bytes;
    if (cast != NULL) bytes = hcp_cast_bytes({cast->to, cast->from}, bytes);
    columns.add({from, (char *)outs[c].data, source.row_stride_bytes, outs[c].row_stride_bytes},
                bytes);
    from += bytes;
    if (!columns.full() && c < n_outs - 1) continue;
    status = move_all(cast, columns, segments, n_segments, stream, err);
    columns.n = 0;
  }
  return status;
}
