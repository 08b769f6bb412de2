/* read.cu - staged rows read from peers: by the copy engine if they lie in long runs, and
 * by a kernel otherwise.
 *
 * The copy engine is faster than any kernel and takes no multiprocessor from attention,
 * but each of its copies costs the host time, and each call the link a pause. */
#include "signal.cuh"

/* Runs of so many bytes are worth the copy engine: where one call takes many of them, and
 * where each costs a call. */
enum { RUN_BYTES = 1 << 20, LONE_RUN_BYTES = 1 << 24 };

/* Pieces up to which a peer's rows are copied, one call after the other, while the later
 * ones are staged: that is two to three times as fast as the link. */
static const int32_t STEPS[] = {HCP_PIECES / 16, HCP_PIECES * 3 / 16, HCP_PIECES / 2, HCP_PIECES};

/* A call for fewer bytes is not worth its pause: they go with the next. */
enum { STEP_BYTES = 1 << 22 };

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

/* The bytes of a copy on average, where every row that is written is one row of a peer's, and 0
 * otherwise. Runs that go on where the one before ends are one copy. */
static int64_t bytes_of_a_copy(const hcp_sum &of, hcp_column out, const hcp_staged &staged) {
  int64_t row = 0, rows = 0, copies = 0;
  for (int64_t r = 0; r < of.n_runs; ++r) {
    const hcp_run *run = &of.runs[r], *before = r > 0 ? run - 1 : NULL;
    if (run->row < row || (run->row > row && !staged.keeps) || run->part < staged.first) return 0;
    if (!is_stretch(&of.parts[run->part * of.n_columns], of.n_columns, out)) return 0;
    bool goes_on = before != NULL && run->row == row && before->part == run->part &&
                   before->part_row + before->rows == run->part_row;
    copies += !goes_on;
    row = run->row + run->rows;
    rows += run->rows;
  }
  bool all = row == of.rows || staged.keeps;
  return all && copies > 0 ? rows * out.row_bytes / copies : 0;
}

/* Whether one call takes many copies on a stream: CUDA has that since 12.8, not on its default
 * stream, and not while a graph captures. */
static bool takes_many(cudaStream_t stream) {
  int version = 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  return CUDART_VERSION >= 12080 && stream != NULL && stream != cudaStreamLegacy &&
         cudaDriverGetVersion(&version) == cudaSuccess && version >= 12080 &&
         cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
         capture == cudaStreamCaptureStatusNone;
}

/* Copies that are queued together. */
struct copies {
  enum { MOST = 256 };
  void *to[MOST];
  void *from[MOST];
  size_t bytes[MOST];
  size_t n;
  bool in_one_call;
  cudaStream_t stream;

  hcp_status add(char *target, const char *source, int64_t size, hcp_error *err) {
    if (n > 0 && (char *)to[n - 1] + bytes[n - 1] == target &&
        (char *)from[n - 1] + bytes[n - 1] == source) {
      bytes[n - 1] += (size_t)size;
      return HCP_OK;
    }
    hcp_status status = n == MOST ? queue(err) : HCP_OK;
    to[n] = target;
    from[n] = (void *)source;
    bytes[n++] = (size_t)size;
    return status;
  }

  hcp_status queue(hcp_error *err) {
    cudaError_t error = cudaSuccess;
    if (in_one_call && n > 1)
      error = call();
    else
      for (size_t i = 0; i < n && error == cudaSuccess; ++i)
        error = cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDeviceToDevice, stream);
    n = 0;
    return hcp_cuda_status(error, "copy from a peer's memory", err);
  }

  cudaError_t call() {
#if CUDART_VERSION >= 12080
    cudaMemcpyAttributes how = {};
    how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
#endif
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(to, from, bytes, n, &how, &first, 1, stream);
#elif CUDART_VERSION >= 12080
    size_t failed = 0;
    return cudaMemcpyBatchAsync(to, from, bytes, n, &how, &first, 1, &failed, stream);
#else
    return cudaErrorNotSupported;
#endif
  }
};

/* Rows of one peer's part, and the runs of the result that are made of them. */
struct peer_rows {
  const char *data;
  int64_t rows; /* of the part */
  int64_t part;
  const hcp_run *runs;
  int64_t n_runs;

  /* The end of the last row that is read. */
  int64_t end() const {
    int64_t last = 0;
    for (int64_t r = 0; r < n_runs; ++r)
      if (runs[r].part == part && runs[r].part_row + runs[r].rows > last)
        last = runs[r].part_row + runs[r].rows;
    return last;
  }

  /* Add copies of rows [low, high) of the part. */
  hcp_status add(copies *to, int64_t low, int64_t high, hcp_column out, hcp_error *err) const {
    hcp_status status = HCP_OK;
    for (int64_t r = 0; r < n_runs && status == HCP_OK; ++r) {
      const hcp_run &run = runs[r];
      int64_t from = run.part_row > low ? run.part_row : low;
      int64_t until = run.part_row + run.rows < high ? run.part_row + run.rows : high;
      if (run.part != part || from >= until) continue;
      char *target = (char *)out.data + (run.row + from - run.part_row) * out.row_bytes;
      status = to->add(target, data + from * out.row_bytes, (until - from) * out.row_bytes, err);
    }
    return status;
  }
};

/* Copy a peer's rows, step by step or all in one, as they are staged. */
static hcp_status copy_peer(const peer_rows &peer, bool by_steps, hcp_awaited staged,
                            copies *queued, hcp_column out, hcp_error *err) {
  int64_t end = peer.end(), copied = 0;
  int32_t pieces = end > 0 ? hcp_piece_of_row(peer.rows, end - 1) + 1 : 0, waited = 0;
  hcp_status status = HCP_OK;
  for (int32_t step : STEPS) {
    int64_t until = step < pieces ? hcp_piece_start(peer.rows, step) : end;
    bool is_last = until == end;
    if (!is_last && (!by_steps || (until - copied) * out.row_bytes < STEP_BYTES)) continue;
    int32_t awaited = step < pieces ? step : pieces;
    if (awaited > waited)
      status = hcp_cuda_signal_wait(staged, waited, awaited, {}, queued->stream, err);
    if (status == HCP_OK) status = peer.add(queued, copied, until, out, err);
    if (status == HCP_OK) status = queued->queue(err);
    waited = awaited;
    copied = until;
    if (is_last || status != HCP_OK) break;
  }
  return status;
}

/* From one peer after the other, from the next one on: where all ranks read from all,
 * no two read from the same at any time. The first one's rows are still being staged. */
static hcp_status read_by_copies(const hcp_sum &of, hcp_column out, const hcp_staged &staged,
                                 hcp_signals read, bool in_one_call, cudaStream_t stream,
                                 hcp_error *err) {
  const hcp_signals &owners = staged.awaited.signals;
  copies queued;
  queued.n = 0;
  queued.in_one_call = in_one_call;
  queued.stream = stream;
  hcp_status status = HCP_OK;
  for (int64_t i = 0; i < owners.n && status == HCP_OK; ++i) {
    int64_t number = (staged.next + i) % owners.n, part = staged.first + number;
    const char *data = (const char *)of.parts[part * of.n_columns].data;
    peer_rows peer = {data, staged.part_rows[part], part, of.runs, of.n_runs};
    hcp_awaited one = staged.awaited;
    one.signals.data += number;
    one.signals.n = 1;
    status = copy_peer(peer, i == 0, one, &queued, out, err);
  }
  return status == HCP_OK ? hcp_cuda_signal_tell(owners, read, 1, stream, err) : status;
}

hcp_status hcp_cuda_read(const hcp_sum *sum, hcp_column out, const hcp_staged *staged,
                         hcp_signals read, uint32_t *progress, void *stream, hcp_error *err) {
  int64_t bytes = 0;
  if (staged->awaited.signals.n <= HCP_CUDA_SIGNALS_MAX && sum->rows * out.row_bytes >= RUN_BYTES)
    bytes = bytes_of_a_copy(*sum, out, *staged);
  bool in_one_call = bytes >= RUN_BYTES && takes_many((cudaStream_t)stream);
  if (bytes >= (in_one_call ? RUN_BYTES : LONE_RUN_BYTES))
    return read_by_copies(*sum, out, *staged, read, in_one_call, (cudaStream_t)stream, err);
  return hcp_cuda_read_by_blocks(sum, out, staged, read, progress, stream, err);
}
