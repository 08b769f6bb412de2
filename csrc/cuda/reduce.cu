/* reduce.cu - partial rows summed, each read once, rounded once, to their dtype or another.
 *
 * A few threads, a warp for long rows, sum one row of one column in registers, over
 * the records of the row's run, in the order of the table. Each thread has several
 * loads under way: rows may lie behind a link. */
#include "runs.cuh"

struct summed_columns {
  const char *part[HCP_CUDA_PARTS_MAX];    /* of the launch's columns, part by part */
  int64_t part_stride[HCP_CUDA_PARTS_MAX]; /* bytes */
  char *out[HCP_CUDA_COLUMNS_MAX];
  int64_t vectors[HCP_CUDA_COLUMNS_MAX]; /* of a row */
  int64_t out_stride;                    /* bytes */
  int32_t n, lane_bits;
  bool far;
};

/* Blocks that keep a link busy. The others' multiprocessors are left to whatever
 * runs meanwhile. */
enum { FAR_BLOCKS = 64 };

/* Where a record's row of a column lies. */
template <class V>
static __device__ const V *source_of(const run_table &table, const summed_columns &columns,
                                     int record, int run, int64_t row, int column) {
  int part = table.part[record] * columns.n + column;
  int64_t part_row = table.part_row[record] + row - table.row[run];
  return reinterpret_cast<const V *>(columns.part[part] + part_row * columns.part_stride[part]);
}

/* IN_FLIGHT vectors of a row, `lanes` apart, from number `at` on. */
template <class V>
static __device__ void read_vectors(V (&value)[IN_FLIGHT], const V *source, int64_t at, int lanes,
                                    int64_t vectors) {
#pragma unroll
  for (int k = 0; k < IN_FLIGHT; ++k)
    if (at + k * lanes < vectors) value[k] = source[at + k * lanes];
}

/* The vectors' sum over the records of a run; those of the next record are on
 * their way. value, which is read into, is zeros, and sum itself where nothing is cast. */
template <class From, class To, int N>
static __device__ void sum_vectors(packed<From, N> (&value)[IN_FLIGHT],
                                   packed<To, N> (&sum)[IN_FLIGHT], const run_table &table,
                                   const summed_columns &columns, int run, int64_t row, int column,
                                   int64_t at, int lanes) {
  using V = packed<From, N>;
  int first = table.record[run], end = table.record[run + 1];
  int64_t vectors = columns.vectors[column];
  if (first == end) return;
  read_vectors(value, source_of<V>(table, columns, first, run, row, column), at, lanes, vectors);
  if (same<From, To> && first + 1 == end) return;
  between<From, To> total[IN_FLIGHT][N], more[N];
  V next[IN_FLIGHT] = {};
  for (int r = first; r < end; ++r) {
    if (r + 1 < end)
      read_vectors(next, source_of<V>(table, columns, r + 1, run, row, column), at, lanes, vectors);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
      value[k].widen(more);
      /* The first is not added to zero: a sum of negative zeros stays one. */
#pragma unroll
      for (int e = 0; e < N; ++e) total[k][e] = r == first ? more[e] : total[k][e] + more[e];
      value[k] = next[k];
    }
  }
#pragma unroll
  for (int k = 0; k < IN_FLIGHT; ++k) sum[k].round(total[k]);
}

/* Blocks that a multiprocessor has room for at least; 0: left to the compiler, which for casts
 * to 16 bits chooses so many that a register is spilled. */
template <class From, class To>
constexpr int least_blocks() {
  return same<From, To> ? 0 : 2;
}

template <class From, class To, int N>
__global__ void __launch_bounds__(HCP_THREADS, (least_blocks<From, To>()))
    sum_rows(const __grid_constant__ run_table table,
             const __grid_constant__ summed_columns columns) {
  using V = packed<From, N>;
  using W = packed<To, N>;
  int column = (int)blockIdx.y, lanes = 1 << columns.lane_bits;
  int lane = (int)threadIdx.x & (lanes - 1), at_once = HCP_THREADS >> columns.lane_bits;
  int64_t vectors = columns.vectors[column], first = table.first_row(), rows = table.rows();
  int64_t row = first + (int64_t)blockIdx.x * at_once, end = first + rows;
  int64_t step = (int64_t)gridDim.x * at_once;
  if (columns.far) {
    /* Blocks far apart in the result read from different peers at any time, and
     * all ranks' together from all. */
    row = first + rows * blockIdx.x / gridDim.x;
    end = first + rows * (blockIdx.x + 1) / gridDim.x;
    step = at_once;
  }
  for (row += threadIdx.x >> columns.lane_bits; row < end; row += step) {
    int run = table.find(row);
    W *out = reinterpret_cast<W *>(columns.out[column] + row * columns.out_stride);
    for (int64_t at = lane; at < vectors; at += IN_FLIGHT * lanes) {
      W sum[IN_FLIGHT] = {};
      if constexpr (same<From, To>) {
        sum_vectors(sum, sum, table, columns, run, row, column, at, lanes);
      } else {
        V value[IN_FLIGHT] = {};
        sum_vectors(value, sum, table, columns, run, row, column, at, lanes);
      }
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k)
        if (at + k * lanes < vectors) out[at + k * lanes] = sum[k];
    }
  }
}

/* The kernels of a dtype, or of a cast. Vectors of what is read, which is most, have 16
 * bytes, or the 4 elements whose sums in float64 leave registers for another block; a wider
 * result takes several. */
struct summer {
  using kernel = void (*)(const run_table, const summed_columns);
  kernel of_vectors, of_elements;
  int64_t vector_bytes, out_vector_bytes; /* of the result 16 at most: what aligns it */
  int64_t element_bytes, out_element_bytes;
};

template <class From, class To>
static summer summer_of() {
  constexpr int most = 32 / (int)sizeof(between<From, To>);
  constexpr int N = vector_elements<From>() < most ? vector_elements<From>() : most;
  return {sum_rows<From, To, N>,     sum_rows<From, To, 1>, sizeof(From) * N,
          vector_alignment<To, N>(), sizeof(From),          sizeof(To)};
}

template <class From>
static summer summer_from(hcp_dtype to) {
  summer found = {};
  HCP_CUDA_DISPATCH(to, found = (summer_of<From, T>()))
  return found;
}

static summer summer_of(hcp_cast cast) {
  summer found = {};
  HCP_CUDA_DISPATCH(cast.from, found = summer_from<T>(cast.to))
  return found;
}

static hcp_status launch(const summer &by, const run_launches &launches, summed_columns *columns,
                         const int64_t *row_bytes, cudaStream_t stream, hcp_error *err) {
  bool wide = true;
  for (int32_t i = 0; i < launches.parts * columns->n; ++i)
    wide = wide && aligned(columns->part[i], columns->part_stride[i], by.vector_bytes);
  for (int32_t c = 0; c < columns->n; ++c)
    wide = wide && row_bytes[c] % by.vector_bytes == 0 &&
           aligned(columns->out[c], columns->out_stride, by.out_vector_bytes);
  int64_t most = 0, rows = launches.table.row[launches.table.n] - launches.table.row[0];
  for (int32_t c = 0; c < columns->n; ++c) {
    columns->vectors[c] = row_bytes[c] / (wide ? by.vector_bytes : by.element_bytes);
    if (columns->vectors[c] > most) most = columns->vectors[c];
  }
  if (most == 0) return HCP_OK;
  columns->lane_bits = hcp_cuda_lane_bits(most);
  dim3 grid(hcp_cuda_blocks(rows << columns->lane_bits), (unsigned)columns->n);
  if (columns->far && grid.x > FAR_BLOCKS) grid.x = FAR_BLOCKS;
  summer::kernel kernel = wide ? by.of_vectors : by.of_elements;
  kernel<<<grid, HCP_THREADS, 0, stream>>>(launches.table, *columns);
  return hcp_cuda_launched("reduce", err);
}

/* The columns from number `from` on, as many at once as a launch carries. */
static hcp_status sum_columns(hcp_cast cast, const hcp_column *parts, int32_t from,
                              int32_t n_columns, const hcp_run *runs, int64_t n_runs, int64_t rows,
                              hcp_column out, bool far, cudaStream_t stream, hcp_error *err) {
  summer by = summer_of(cast);
  run_launches launches(runs, n_runs, rows, true);
  int more;
  while ((more = launches.advance()) > 0) {
    int32_t at_once = HCP_CUDA_PARTS_MAX / (launches.parts > 0 ? launches.parts : 1);
    if (at_once > HCP_CUDA_COLUMNS_MAX) at_once = HCP_CUDA_COLUMNS_MAX;
    int64_t offset = 0;
    for (int32_t first = from; first < n_columns; first += at_once) {
      summed_columns columns;
      int64_t row_bytes[HCP_CUDA_COLUMNS_MAX];
      columns.n = n_columns - first < at_once ? n_columns - first : at_once;
      columns.out_stride = out.row_stride_bytes;
      columns.far = far;
      for (int32_t c = 0; c < columns.n; ++c) {
        row_bytes[c] = parts[first + c].row_bytes;
        columns.out[c] = (char *)out.data + offset;
        offset += row_bytes[c] / by.element_bytes * by.out_element_bytes;
      }
      for (int32_t p = 0; p < launches.parts; ++p)
        for (int32_t c = 0; c < columns.n; ++c) {
          const hcp_column &part = parts[(int64_t)launches.part_of[p] * n_columns + first + c];
          columns.part[p * columns.n + c] = (const char *)part.data;
          columns.part_stride[p * columns.n + c] = part.row_stride_bytes;
        }
      hcp_status status = launch(by, launches, &columns, row_bytes, stream, err);
      if (status != HCP_OK) return status;
    }
  }
  return more < 0 ? row_too_long(launches, err) : HCP_OK;
}

hcp_status hcp_cuda_reduce_from(hcp_dtype dtype, const hcp_column *parts, int32_t from,
                                int32_t n_columns, const hcp_run *runs, int64_t n_runs,
                                int64_t rows, hcp_column out, cudaStream_t stream, hcp_error *err) {
  hcp_cast none = {dtype, dtype};
  return sum_columns(none, parts, from, n_columns, runs, n_runs, rows, out, false, stream, err);
}

hcp_status hcp_cuda_reduce_cast(hcp_cast cast, const hcp_column *parts, int32_t n_columns,
                                const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                                void *stream, hcp_error *err) {
  return sum_columns(cast, parts, 0, n_columns, runs, n_runs, rows, out, false,
                     (cudaStream_t)stream, err);
}

hcp_status hcp_cuda_reduce(hcp_dtype dtype, const hcp_column *parts, int32_t n_columns,
                           const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                           void *stream, hcp_error *err) {
  return hcp_cuda_reduce_cast({dtype, dtype}, parts, n_columns, runs, n_runs, rows, out, stream,
                              err);
}

hcp_status hcp_cuda_reduce_far(hcp_dtype dtype, const hcp_column *parts, int32_t n_columns,
                               const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                               void *stream, hcp_error *err) {
  return sum_columns({dtype, dtype}, parts, 0, n_columns, runs, n_runs, rows, out, true,
                     (cudaStream_t)stream, err);
}
