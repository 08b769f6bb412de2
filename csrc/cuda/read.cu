/* read.cu - staged rows read from peers: by the copy engine if they lie in few long
 * runs, and by a kernel otherwise.
 *
 * The copy engine is faster than any kernel and takes no multiprocessor from attention,
 * but each of its copies costs the host a call and the link a pause. */
#include "signal.cuh"

/* A copy of so many bytes is worth both. A part of twice as many goes in two: the first
 * pieces while the others are staged, which is faster than the link. */
enum { COPY_BYTES = 1 << 24, FIRST_PIECES = HCP_PIECES / 4 };

/* Whether the columns lie side by side in every part as they do in the result, so that
 * rows that follow each other are one stretch of memory. */
static bool is_stretch(const hcp_column *columns, int32_t n_columns, hcp_column out) {
  const char *end = (const char *)columns[0].data;
  for (int32_t c = 0; c < n_columns; ++c) {
    if (columns[c].data != end || columns[c].row_stride_bytes != out.row_bytes) return false;
    end += columns[c].row_bytes;
  }
  return out.row_stride_bytes == out.row_bytes;
}

/* Whether every row of the result is one row of a peer's, in long runs. */
static bool copies_pay(const hcp_column *parts, int32_t n_columns, const hcp_run *runs,
                       int64_t n_runs, int64_t rows, hcp_column out, int32_t first_staged) {
  if (n_runs == 0 || rows * out.row_bytes / n_runs < COPY_BYTES) return false;
  int64_t row = 0;
  for (int64_t r = 0; r < n_runs; ++r) {
    if (runs[r].row != row || runs[r].part < first_staged) return false;
    if (!is_stretch(&parts[runs[r].part * n_columns], n_columns, out)) return false;
    row += runs[r].rows;
  }
  return row == rows;
}

struct reader {
  hcp_awaited staged;
  int32_t there[HCP_CUDA_SIGNALS_MAX]; /* pieces of each peer that have been waited for */
  cudaStream_t stream;

  hcp_status wait_for_pieces(int64_t number, int32_t pieces, hcp_error *err) {
    if (there[number] >= pieces) return HCP_OK;
    hcp_awaited one = staged;
    one.signals.data += number;
    one.signals.n = 1;
    hcp_status status = hcp_cuda_signal_wait(one, there[number], pieces, {}, stream, err);
    there[number] = pieces;
    return status;
  }

  /* Rows [from, to) of a run's part, all of them within the first `pieces` of it. */
  hcp_status copy(const hcp_run &run, int64_t from, int64_t to, const char *part, hcp_column out,
                  hcp_error *err) const {
    if (from >= to) return HCP_OK;
    char *target = (char *)out.data + (run.row + from - run.part_row) * out.row_bytes;
    cudaError_t error =
        cudaMemcpyAsync(target, part + from * out.row_bytes, (size_t)((to - from) * out.row_bytes),
                        cudaMemcpyDeviceToDevice, stream);
    return hcp_cuda_status(error, "cudaMemcpyAsync from a peer's memory", err);
  }

  hcp_status read(const hcp_run &run, int64_t number, const char *part, int64_t part_rows,
                  hcp_column out, hcp_error *err) {
    int64_t end = run.part_row + run.rows, split = hcp_piece_start(part_rows, FIRST_PIECES);
    if (run.rows * out.row_bytes < 2 * COPY_BYTES || split < run.part_row) split = run.part_row;
    if (split > end) split = end;
    hcp_status status = HCP_OK;
    if (split > run.part_row) status = wait_for_pieces(number, FIRST_PIECES, err);
    if (status == HCP_OK) status = copy(run, run.part_row, split, part, out, err);
    if (status == HCP_OK && split < end)
      status = wait_for_pieces(number, hcp_piece_of_row(part_rows, end - 1) + 1, err);
    return status == HCP_OK ? copy(run, split, end, part, out, err) : status;
  }
};

/* From one peer after the other, from the next one on: where all ranks read from all,
 * no two read from the same at any time. */
static hcp_status read_by_copies(const hcp_column *parts, int32_t n_columns, const hcp_run *runs,
                                 int64_t n_runs, hcp_column out, hcp_awaited staged, int32_t next,
                                 int32_t first_staged, const int64_t *part_rows, hcp_signals read,
                                 cudaStream_t stream, hcp_error *err) {
  reader from = {staged, {}, stream};
  hcp_status status = HCP_OK;
  for (int64_t i = 0; i < staged.signals.n; ++i) {
    int64_t number = (next + i) % staged.signals.n, part = first_staged + number;
    for (int64_t r = 0; r < n_runs && status == HCP_OK; ++r)
      if (runs[r].part == part)
        status = from.read(runs[r], number, (const char *)parts[part * n_columns].data,
                           part_rows[part], out, err);
  }
  return status == HCP_OK ? hcp_cuda_signal_tell(staged.signals, read, 1, stream, err) : status;
}

hcp_status hcp_cuda_read(hcp_dtype dtype, const hcp_column *parts, int32_t n_columns,
                         const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                         hcp_awaited staged, int32_t next, int32_t first_staged,
                         const int64_t *part_rows, hcp_signals read, uint32_t *progress,
                         void *stream, hcp_error *err) {
  if (staged.signals.n <= HCP_CUDA_SIGNALS_MAX &&
      copies_pay(parts, n_columns, runs, n_runs, rows, out, first_staged))
    return read_by_copies(parts, n_columns, runs, n_runs, out, staged, next, first_staged,
                          part_rows, read, (cudaStream_t)stream, err);
  return hcp_cuda_read_by_blocks(dtype, parts, n_columns, runs, n_runs, rows, out, staged,
                                 first_staged, part_rows, read, progress, stream, err);
}
