/* pack.cu - rows gathered, several tensors side by side, and back.
 *
 * A few threads, a warp for long rows, move one row of one column. Neighbours move
 * neighbouring vectors, so that both sides are read and written in full lines, and
 * each thread has several loads under way. */
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
struct copy_table {
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

/* Segments of a launch. */
enum { FEW = 512, MANY = 4000 };

template <class V, int SEGMENTS>
__global__ void __launch_bounds__(HCP_THREADS)
    copy_rows(const __grid_constant__ copy_table<SEGMENTS> table) {
  const copied_column &column = table.columns[blockIdx.y];
  int lanes = 1 << table.lane_bits, lane = (int)threadIdx.x & (lanes - 1);
  int rows_at_once = HCP_THREADS >> table.lane_bits;
  int64_t step = (int64_t)gridDim.x * rows_at_once;
  int64_t row = (int64_t)blockIdx.x * rows_at_once + (threadIdx.x >> table.lane_bits);
  for (; row < table.target_row[table.n]; row += step) {
    int s = hcp_place_of_row_32(table.target_row, table.n, (int32_t)row);
    bool zeros = table.source_row[s] == table.ZEROS;
    int64_t source_row =
        zeros ? 0 : table.first_source + table.source_row[s] + row - table.target_row[s];
    const V *source =
        reinterpret_cast<const V *>(column.source + source_row * column.source_stride);
    V *target =
        reinterpret_cast<V *>(column.target + (table.first_target + row) * column.target_stride);
    for (int64_t i = lane; i < column.vectors; i += IN_FLIGHT * lanes) {
      V value[IN_FLIGHT] = {};
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k)
        if (!zeros && i + k * lanes < column.vectors) value[k] = source[i + k * lanes];
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k)
        if (i + k * lanes < column.vectors) target[i + k * lanes] = value[k];
    }
  }
}

/* The widest vector that every address and row of the columns allows. */
static int64_t vector_bytes(const copied_column *columns, const int64_t *row_bytes, int32_t n) {
  uintptr_t bits = 16;
  for (int32_t c = 0; c < n; ++c)
    bits |= (uintptr_t)columns[c].source | (uintptr_t)columns[c].target |
            (uintptr_t)columns[c].source_stride | (uintptr_t)columns[c].target_stride |
            (uintptr_t)row_bytes[c];
  return (int64_t)(bits & (~bits + 1));
}

template <int SEGMENTS>
static hcp_status launch(copy_table<SEGMENTS> *table, const int64_t *row_bytes, int32_t n_columns,
                         cudaStream_t stream, hcp_error *err) {
  int64_t bytes = vector_bytes(table->columns, row_bytes, n_columns), most = 0;
  int64_t rows = table->target_row[table->n];
  for (int32_t c = 0; c < n_columns; ++c) {
    table->columns[c].vectors = row_bytes[c] / bytes;
    if (table->columns[c].vectors > most) most = table->columns[c].vectors;
  }
  if (rows * most == 0) return HCP_OK;
  table->lane_bits = hcp_cuda_lane_bits(most);
  dim3 grid(hcp_cuda_blocks(rows << table->lane_bits), (unsigned)n_columns);
  switch (bytes) {
    case 16:
      copy_rows<int4><<<grid, HCP_THREADS, 0, stream>>>(*table);
      break;
    case 8:
      copy_rows<int2><<<grid, HCP_THREADS, 0, stream>>>(*table);
      break;
    case 4:
      copy_rows<int><<<grid, HCP_THREADS, 0, stream>>>(*table);
      break;
    case 2:
      copy_rows<short><<<grid, HCP_THREADS, 0, stream>>>(*table);
      break;
    default:
      copy_rows<char><<<grid, HCP_THREADS, 0, stream>>>(*table);
  }
  return hcp_cuda_launched("pack", err);
}

/* Launches that carry all segments, in tables of a few or of many: a short table
 * is a cheaper launch. */
template <int SEGMENTS>
static hcp_status copy_by(const copied_column *columns, const int64_t *row_bytes, int32_t n_columns,
                          const hcp_segment *segments, int64_t n_segments, cudaStream_t stream,
                          hcp_error *err) {
  copy_table<SEGMENTS> table;
  for (int32_t c = 0; c < n_columns; ++c) table.columns[c] = columns[c];
  table.first_target = 0;
  for (int64_t s = 0, done = 0; s < n_segments;) {
    table.n = table.target_row[0] = 0;
    table.first_source = segments[s].row + done;
    for (; s < n_segments && table.add(segments[s], &done);)
      if (done == segments[s].rows) ++s, done = 0;
    hcp_status status = launch(&table, row_bytes, n_columns, stream, err);
    if (status != HCP_OK) return status;
    table.first_target += table.target_row[table.n];
  }
  return HCP_OK;
}

static hcp_status copy_all(const copied_column *columns, const int64_t *row_bytes,
                           int32_t n_columns, const hcp_segment *segments, int64_t n_segments,
                           cudaStream_t stream, hcp_error *err) {
  auto copy = n_segments <= FEW ? copy_by<FEW> : copy_by<MANY>;
  return copy(columns, row_bytes, n_columns, segments, n_segments, stream, err);
}

static hcp_status check_columns(int32_t n, hcp_error *err) {
  if (n <= HCP_CUDA_COLUMNS_MAX) return HCP_OK;
  return hcp__fail(err, HCP_INVALID, "%d tensors side by side, expected <= %d on a GPU", n,
                   HCP_CUDA_COLUMNS_MAX);
}

hcp_status hcp_cuda_pack(const hcp_column *sources, int32_t n_sources, const hcp_segment *segments,
                         int64_t n_segments, hcp_column out, void *stream, hcp_error *err) {
  copied_column columns[HCP_CUDA_COLUMNS_MAX];
  int64_t row_bytes[HCP_CUDA_COLUMNS_MAX], offset = 0;
  hcp_status status = check_columns(n_sources, err);
  if (status != HCP_OK) return status;
  for (int32_t c = 0; c < n_sources; ++c) {
    columns[c] = {(const char *)sources[c].data, (char *)out.data + offset,
                  sources[c].row_stride_bytes, out.row_stride_bytes, 0};
    row_bytes[c] = sources[c].row_bytes;
    offset += sources[c].row_bytes;
  }
  return copy_all(columns, row_bytes, n_sources, segments, n_segments, (cudaStream_t)stream, err);
}

hcp_status hcp_cuda_unpack(hcp_column source, const hcp_segment *segments, int64_t n_segments,
                           const hcp_column *outs, int32_t n_outs, void *stream, hcp_error *err) {
  copied_column columns[HCP_CUDA_COLUMNS_MAX];
  int64_t row_bytes[HCP_CUDA_COLUMNS_MAX], offset = 0;
  hcp_status status = check_columns(n_outs, err);
  if (status != HCP_OK) return status;
  for (int32_t c = 0; c < n_outs; ++c) {
    columns[c] = {(const char *)source.data + offset, (char *)outs[c].data, source.row_stride_bytes,
                  outs[c].row_stride_bytes, 0};
    row_bytes[c] = outs[c].row_bytes;
    offset += outs[c].row_bytes;
  }
  return copy_all(columns, row_bytes, n_outs, segments, n_segments, (cudaStream_t)stream, err);
}
