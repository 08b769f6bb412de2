/* reduce.cu - partial rows summed, each read once, rounded once.
 *
 * A thread sums one vector of one row of one column in registers, over the
 * records of the row's run, in the order of the table. */
#include "runs.cuh"

struct summed_column {
  const char *part[HCP_CUDA_PARTS_MAX];
  int64_t part_stride[HCP_CUDA_PARTS_MAX]; /* bytes */
  char *out;
  int64_t out_stride; /* bytes */
  int64_t vectors;    /* of a row */
};

template <class T, int N>
__global__ void __launch_bounds__(HCP_THREADS)
    sum_rows(const __grid_constant__ run_table table,
             const __grid_constant__ summed_column column) {
  using wide = typename element<T>::wide;
  using V = vector<T, N>;
  int64_t items = table.rows() * column.vectors, step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < items; i += step) {
    int64_t row = table.first_row() + i / column.vectors, at = i % column.vectors;
    int run = table.find(row);
    wide total[N] = {};
    for (int r = table.record[run]; r < table.record[run + 1]; ++r) {
      int part = table.part[r];
      int64_t part_row = table.part_row[r] + row - table.row[run];
      const char *source = column.part[part] + part_row * column.part_stride[part];
      V value = reinterpret_cast<const V *>(source)[at];
      /* The first is not added to zero: a sum of negative zeros stays one. */
      for (int e = 0; e < N; ++e)
        total[e] = r == table.record[run] ? load(value.at[e]) : total[e] + load(value.at[e]);
    }
    V result;
    for (int e = 0; e < N; ++e) result.at[e] = store<T>(total[e]);
    reinterpret_cast<V *>(column.out + row * column.out_stride)[at] = result;
  }
}

template <class T>
static hcp_status launch(const run_launches &launches, summed_column *column, int64_t row_bytes,
                         cudaStream_t stream, hcp_error *err) {
  constexpr int N = vector_elements<T>();
  bool wide = aligned(column->out, column->out_stride | row_bytes, 16);
  for (int32_t p = 0; p < launches.parts; ++p)
    wide = wide && aligned(column->part[p], column->part_stride[p], 16);
  column->vectors = row_bytes / (int64_t)sizeof(T) / (wide ? N : 1);
  int64_t rows = launches.table.row[launches.table.n] - launches.table.row[0];
  unsigned blocks = hcp_cuda_blocks(rows * column->vectors);
  if (wide)
    sum_rows<T, N><<<blocks, HCP_THREADS, 0, stream>>>(launches.table, *column);
  else
    sum_rows<T, 1><<<blocks, HCP_THREADS, 0, stream>>>(launches.table, *column);
  return hcp_cuda_launched("reduce", err);
}

template <class T>
static hcp_status sum_columns(const hcp_column *parts, int32_t from, int32_t n_columns,
                              const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                              cudaStream_t stream, hcp_error *err) {
  run_launches launches(runs, n_runs, rows, true);
  int more;
  while ((more = launches.advance()) > 0) {
    int64_t offset = 0;
    for (int32_t c = from; c < n_columns; ++c) {
      summed_column column;
      int64_t row_bytes = 0;
      for (int32_t p = 0; p < launches.parts; ++p) {
        const hcp_column &part = parts[(int64_t)launches.part_of[p] * n_columns + c];
        column.part[p] = (const char *)part.data;
        column.part_stride[p] = part.row_stride_bytes;
      }
      row_bytes = parts[c].row_bytes;
      column.out = (char *)out.data + offset;
      column.out_stride = out.row_stride_bytes;
      offset += row_bytes;
      if (row_bytes == 0) continue;
      hcp_status status = launch<T>(launches, &column, row_bytes, stream, err);
      if (status != HCP_OK) return status;
    }
  }
  return more < 0 ? row_too_long(launches, err) : HCP_OK;
}

hcp_status hcp_cuda_reduce_from(hcp_dtype dtype, const hcp_column *parts, int32_t from,
                                int32_t n_columns, const hcp_run *runs, int64_t n_runs,
                                int64_t rows, hcp_column out, cudaStream_t stream, hcp_error *err) {
  hcp_status status = HCP_OK;
  HCP_CUDA_DISPATCH(
      dtype, status = sum_columns<T>(parts, from, n_columns, runs, n_runs, rows, out, stream, err))
  return status;
}

hcp_status hcp_cuda_reduce(hcp_dtype dtype, const hcp_column *parts, int32_t n_columns,
                           const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                           void *stream, hcp_error *err) {
  return hcp_cuda_reduce_from(dtype, parts, 0, n_columns, runs, n_runs, rows, out,
                              (cudaStream_t)stream, err);
}
