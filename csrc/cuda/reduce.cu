/* reduce.cu - partial rows summed, each read once, rounded once, to their dtype or another.
 *
 * A few threads, a warp for long rows, sum one row of one column in registers, over
 * the records of the row's run, in their order. Each thread has several
 * loads under way: rows may lie behind a link. */
#include "runs.cuh"
#include "signal.cuh"

/* What one launch sums: the same rows of several columns, such as keys and values. */
struct summed_columns {
  const char *part[HCP_CUDA_PARTS_MAX];    /* of the launch's columns, part by part */
  int64_t part_stride[HCP_CUDA_PARTS_MAX]; /* bytes */
  char *out[HCP_CUDA_COLUMNS_MAX];
  int64_t vectors[HCP_CUDA_COLUMNS_MAX]; /* of a row */
  int64_t out_stride;                    /* bytes */
  int32_t n, lane_bits;
  int32_t keeps; /* 1: rows without records keep what they hold; 0: they become zeros */
};

/* Where a record's row of a column lies. */
template <class V>
static __device__ const V *source_of(const carried_runs &carried, const summed_columns &columns,
                                     int record, int run, int64_t row, int column) {
  int part = carried.part[record] * columns.n + column;
  int64_t part_row = carried.part_row[record] + row - carried.row[run];
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
 * their way. value, which is read into, is zeros, and sum itself where nothing is cast. With on,
 * sum is other memory than value, and the sum goes on from what it holds. */
template <class From, class To, int N, bool on>
static __device__ void sum_vectors(packed<From, N> (&value)[IN_FLIGHT],
                                   packed<To, N> (&sum)[IN_FLIGHT], const carried_runs &carried,
                                   const summed_columns &columns, int run, int64_t row, int column,
                                   int64_t at, int lanes) {
  using V = packed<From, N>;
  int first = carried.record[run], end = carried.record[run + 1];
  int64_t vectors = columns.vectors[column];
  if (first == end) return;
  read_vectors(value, source_of<V>(carried, columns, first, run, row, column), at, lanes, vectors);
  if (!on && same<From, To> && first + 1 == end) return;
  between<From, To> total[IN_FLIGHT][N], more[N];
  if (on)
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) sum[k].widen(total[k]);
  V next[IN_FLIGHT] = {};
  for (int r = first; r < end; ++r) {
    if (r + 1 < end)
      read_vectors(next, source_of<V>(carried, columns, r + 1, run, row, column), at, lanes,
                   vectors);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
      value[k].widen(more);
      /* The first is not added to zero: a sum of negative zeros stays one. */
#pragma unroll
      for (int e = 0; e < N; ++e) total[k][e] = !on && r == first ? more[e] : total[k][e] + more[e];
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

/* Rows [low, high) of the block's column, those of `blocks` blocks in turns, and of each its piece
 * of so many. With on, they are added to what lies there. */
template <class From, class To, int N, bool on = false>
static __device__ void sum_between(const carried_runs &carried, const summed_columns &columns,
                                   int64_t low, int64_t high, int block, int blocks,
                                   unsigned piece = 0, unsigned pieces = 1) {
  using V = packed<From, N>;
  using W = packed<To, N>;
  int column = (int)blockIdx.y, lanes = 1 << columns.lane_bits;
  int lane = (int)threadIdx.x & (lanes - 1), at_once = HCP_THREADS >> columns.lane_bits;
  int64_t vectors = columns.vectors[column], step = (int64_t)blocks * at_once;
  int64_t row = low + (int64_t)block * at_once + (threadIdx.x >> columns.lane_bits);
  for (; row < high; row += step) {
    int run = carried.find(row);
    if ((on || columns.keeps) && carried.record[run] == carried.record[run + 1]) continue;
    W *out = reinterpret_cast<W *>(columns.out[column] + row * columns.out_stride);
    int64_t at = (int64_t)piece * IN_FLIGHT * lanes + lane;
    for (; at < vectors; at += (int64_t)pieces * IN_FLIGHT * lanes) {
      W sum[IN_FLIGHT] = {};
      if (on) read_vectors(sum, out, at, lanes, vectors);
      if constexpr (same<From, To> && !on) {
        sum_vectors<From, To, N, on>(sum, sum, carried, columns, run, row, column, at, lanes);
      } else {
        V value[IN_FLIGHT] = {};
        sum_vectors<From, To, N, on>(value, sum, carried, columns, run, row, column, at, lanes);
      }
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k)
        if (at + k * lanes < vectors) out[at + k * lanes] = sum[k];
    }
  }
}

template <class From, class To, int N, bool on>
__global__ void __launch_bounds__(HCP_THREADS, (least_blocks<From, To>()))
    sum_rows(const __grid_constant__ carried_runs carried,
             const __grid_constant__ summed_columns columns) {
  int64_t first = carried.first_row();
  sum_between<From, To, N, on>(carried, columns, first, first + carried.rows(), (int)blockIdx.x,
                               (int)gridDim.x, blockIdx.z, gridDim.z);
}

/* ---- between GPUs ---- */

/* Rows go by pieces, so many at once. */
struct staging {
  carried_signals staged;
  uint32_t *progress;
  int32_t pieces_at_once;
};

template <class T, int N>
__global__ void __launch_bounds__(HCP_THREADS)
    stage_rows(const __grid_constant__ carried_runs carried,
               const __grid_constant__ summed_columns columns,
               const __grid_constant__ staging stage) {
  int64_t rows = carried.rows();
  for (int32_t piece = 0; piece < HCP_PIECES; piece += stage.pieces_at_once) {
    int32_t next = piece + stage.pieces_at_once;
    sum_between<T, T, N>(carried, columns, hcp_piece_start(rows, piece),
                         hcp_piece_start(rows, next), (int)blockIdx.x, (int)gridDim.x);
    if (comes_last(&stage.progress[piece])) set_words(stage.staged, piece, next);
  }
}

struct reading {
  carried_awaited staged;
  carried_signals read;
  uint32_t *progress;
  int32_t pieces_at_once;
  int16_t signal[HCP_CUDA_PARTS_MAX]; /* of the launch's parts, -1: nobody stages it */
  int64_t rows[HCP_CUDA_PARTS_MAX];   /* of these parts */
};

/* Waits until the pieces have come that the run's rows [low, high) read. */
static __device__ void wait_for_run(const carried_runs &carried, const reading &read, int run,
                                    int64_t low, int64_t high) {
  for (int r = carried.record[run]; r < carried.record[run + 1]; ++r) {
    int part = carried.part[r];
    if (read.signal[part] < 0) continue;
    int64_t from = carried.part_row[r] - carried.row[run];
    int32_t last = hcp_piece_of_row(read.rows[part], from + high - 1);
    for (int32_t piece = hcp_piece_of_row(read.rows[part], from + low); piece <= last; ++piece)
      wait_for(read.staged, read.signal[part], piece);
  }
}

/* Waits until the pieces have come that rows [low, high) read. */
static __device__ void wait_for_rows(const carried_runs &carried, const reading &read, int64_t low,
                                     int64_t high) {
  for (int run = carried.find(low) + (int)threadIdx.x; run < carried.n; run += HCP_THREADS) {
    int64_t from = carried.row[run] > low ? carried.row[run] : low;
    int64_t to = carried.row[run + 1] < high ? carried.row[run + 1] : high;
    if (from < to) wait_for_run(carried, read, run, from, to);
  }
  __syncthreads();
}

/* Each block reads its own stretch of the pieces: blocks far apart in the result read
 * from different peers at any time, and all ranks' together from all. */
template <class T, int N>
__global__ void __launch_bounds__(HCP_THREADS, 1) /* else some spill */
    read_rows(const __grid_constant__ carried_runs carried,
              const __grid_constant__ summed_columns columns,
              const __grid_constant__ reading read) {
  for (int32_t piece = 0; piece < HCP_PIECES; piece += read.pieces_at_once) {
    int64_t first = hcp_piece_start(carried.rows(), piece);
    int64_t rows = hcp_piece_start(carried.rows(), piece + read.pieces_at_once) - first;
    int64_t low = first + rows * blockIdx.x / gridDim.x;
    int64_t high = first + rows * (blockIdx.x + 1) / gridDim.x;
    wait_for_rows(carried, read, low, high);
    sum_between<T, T, N>(carried, columns, low, high, 0, 1);
  }
  if (!comes_last(read.progress)) return;
  count(read.staged.signals);
  set_words(read.read, 0, 1);
}

/* ---- launches ---- */

/* Elements of a vector that a sum reads at once. Vectors of what is read, which is most, have 16
 * bytes, or the 4 elements whose sums in float64 leave registers for another block; a wider
 * result takes several. */
template <class From, class To>
constexpr int summed_elements() {
  constexpr int most = 32 / (int)sizeof(between<From, To>);
  return vector_elements<From>() < most ? vector_elements<From>() : most;
}

/* The kernels of a dtype, or of a cast. */
struct summer {
  using kernel = void (*)(const carried_runs, const summed_columns);
  kernel of_vectors, of_elements;
  int64_t vector_bytes, out_vector_bytes; /* of the result 16 at most: what aligns it */
  int64_t element_bytes, out_element_bytes;
};

template <class From, class To, bool on = false>
static summer summer_of() {
  constexpr int N = summed_elements<From, To>();
  return {sum_rows<From, To, N, on>,
          sum_rows<From, To, 1, on>,
          sizeof(From) * N,
          vector_alignment<To, N>(),
          sizeof(From),
          sizeof(To)};
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

/* The kernels that add a dtype to a total. */
static summer adder_of(hcp_dtype dtype) {
  summer found = {};
  HCP_CUDA_DISPATCH(dtype, found = (summer_of<T, typename element<T>::wide, true>()))
  return found;
}

/* The kernels between GPUs of a dtype. */
struct linker {
  void (*stage)(const carried_runs, const summed_columns, const staging);
  void (*read)(const carried_runs, const summed_columns, const reading);
};

template <class T>
static linker linker_by(bool by_vectors) {
  constexpr int N = summed_elements<T, T>(); /* launch() chose by_vectors by this width */
  return by_vectors ? linker{stage_rows<T, N>, read_rows<T, N>}
                    : linker{stage_rows<T, 1>, read_rows<T, 1>};
}

static linker linker_of(hcp_dtype dtype, bool by_vectors) {
  linker found = {};
  HCP_CUDA_DISPATCH(dtype, found = linker_by<T>(by_vectors))
  return found;
}

/* Blocks that keep a link busy, each about half of what a multiprocessor has room for, and
 * one on each at most: the rest is left to whatever runs meanwhile, and to the staging that
 * peers wait for, which blocks that wait must never keep out.
 * Blocks of a multiprocessor that stage. Bytes of a piece that are worth a signal. */
enum { READING_BLOCKS = 128, STAGING_BLOCKS = 2, PIECE_BYTES = 1 << 23 };

/* What launches between GPUs wait for and tell. */
struct linked {
  hcp_awaited awaited;
  hcp_signals told;
  uint32_t *progress;
  bool stages;                /* or else reads: */
  int32_t first_staged;       /* part */
  const int64_t *part_rows;

  /* Words of what is awaited, and of what is told. */
  int32_t awaited_words() const { return stages ? 1 : HCP_PIECES; }
  int32_t told_words() const { return stages ? HCP_PIECES : 1; }

  /* Who stages counts before it does, who reads after it has. */
  hcp_signals counted_before() const { return stages ? told : hcp_signals{}; }
  hcp_signals counted_after() const { return stages ? hcp_signals{} : awaited.signals; }
};

/* Waits and tells are launches of their own, except where one launch takes all rows and
 * does both. */
static hcp_status wait_before(const linked *peers, bool whole, cudaStream_t stream,
                              hcp_error *err) {
  if (peers == NULL || (whole && !peers->stages)) return HCP_OK;
  return hcp_cuda_signal_wait(peers->awaited, 0, peers->awaited_words(), peers->counted_before(),
                              stream, err);
}

static hcp_status tell_after(const linked *peers, bool whole, cudaStream_t stream, hcp_error *err) {
  if (peers == NULL || whole) return HCP_OK;
  return hcp_cuda_signal_tell(peers->counted_after(), peers->told, peers->told_words(), stream,
                              err);
}

/* Blocks of each column when there may be so many of all. */
static unsigned shared_out(unsigned blocks, dim3 grid) {
  unsigned each = blocks / grid.y > 0 ? blocks / grid.y : 1;
  return grid.x < each ? grid.x : each;
}

static int32_t pieces_at_once(int64_t bytes) {
  int32_t pieces = 1;
  while (pieces < HCP_PIECES && bytes / HCP_PIECES * pieces < PIECE_BYTES) pieces *= 2;
  return pieces;
}

static hcp_status launch_staging(const linker &by, const carried_runs &carried,
                                 const summed_columns &columns, dim3 grid, int64_t bytes,
                                 const linked &peers, cudaStream_t stream, hcp_error *err) {
  staging stage;
  hcp_status status = fill(&stage.staged, peers.told, err);
  if (status != HCP_OK) return status;
  stage.progress = peers.progress;
  stage.pieces_at_once = pieces_at_once(bytes);
  /* All at once: one that had to wait for room would delay the first piece. */
  if (stage.pieces_at_once < HCP_PIECES)
    grid.x = shared_out(hcp_cuda_resident(STAGING_BLOCKS), grid);
  by.stage<<<grid, HCP_THREADS, 0, stream>>>(carried, columns, stage);
  return hcp_cuda_launched("stage", err);
}

static hcp_status launch_reading(const linker &by, const run_launches &launches,
                                 const summed_columns &columns, dim3 grid, int64_t bytes,
                                 const linked &peers, cudaStream_t stream, hcp_error *err) {
  reading read;
  hcp_status status = fill(&read.staged, peers.awaited, err);
  if (status == HCP_OK) status = fill(&read.read, peers.told, err);
  if (status != HCP_OK) return status;
  read.progress = peers.progress;
  /* Of several peers all pieces at once: the first rows may all be one peer's, and every
   * rank would read from that one. */
  read.pieces_at_once = read.staged.signals.n == 1 ? pieces_at_once(bytes) : HCP_PIECES;
  for (int32_t p = 0; p < launches.parts; ++p) {
    int32_t part = launches.part_of[p];
    read.signal[p] = (int16_t)(part < peers.first_staged ? -1 : part - peers.first_staged);
    read.rows[p] = peers.part_rows[part];
  }
  unsigned most = hcp_cuda_resident(1);
  grid.x = shared_out(most < READING_BLOCKS ? most : READING_BLOCKS, grid);
  by.read<<<grid, HCP_THREADS, 0, stream>>>(launches.carried, columns, read);
  return hcp_cuda_launched("read", err);
}

static hcp_status launch(const summer &by, hcp_dtype dtype, const run_launches &launches,
                         summed_columns *columns, const int64_t *row_bytes, const linked *peers,
                         cudaStream_t stream, hcp_error *err) {
  bool by_vectors = true;
  for (int32_t i = 0; i < launches.parts * columns->n; ++i)
    by_vectors = by_vectors && aligned(columns->part[i], columns->part_stride[i], by.vector_bytes);
  for (int32_t c = 0; c < columns->n; ++c)
    by_vectors = by_vectors && row_bytes[c] % by.vector_bytes == 0 &&
                 aligned(columns->out[c], columns->out_stride, by.out_vector_bytes);
  int64_t most = 0, bytes = 0,
          rows = launches.carried.row[launches.carried.n] - launches.carried.row[0];
  for (int32_t c = 0; c < columns->n; ++c) {
    columns->vectors[c] = row_bytes[c] / (by_vectors ? by.vector_bytes : by.element_bytes);
    if (columns->vectors[c] > most) most = columns->vectors[c];
    bytes += rows * row_bytes[c];
  }
  if (bytes == 0) return HCP_OK;
  columns->lane_bits = hcp_cuda_lane_bits(most);
  dim3 grid(hcp_cuda_blocks(rows << columns->lane_bits), (unsigned)columns->n);
  if (peers != NULL && peers->stages)
    return launch_staging(linker_of(dtype, by_vectors), launches.carried, *columns, grid, bytes,
                          *peers, stream, err);
  if (peers != NULL)
    return launch_reading(linker_of(dtype, by_vectors), launches, *columns, grid, bytes, *peers,
                          stream, err);
  grid.z = hcp_cuda_row_pieces(most, columns->lane_bits, (int64_t)grid.x * grid.y);
  (by_vectors ? by.of_vectors : by.of_elements)<<<grid, HCP_THREADS, 0, stream>>>(launches.carried,
                                                                                  *columns);
  return hcp_cuda_launched("reduce", err);
}

/* The columns from number `from` on, as many at once as a launch carries. */
static hcp_status sum_in_launches(const summer &by, const hcp_sum &of, int32_t from, hcp_column out,
                                  bool keeps, const linked *peers, void *on, hcp_error *err) {
  cudaStream_t stream = (cudaStream_t)on;
  run_launches launches(of.runs, of.n_runs, of.rows, true);
  int more = launches.advance();
  bool whole = more > 0 && launches.is_last() && out.row_bytes > 0 &&
               (of.n_columns - from) * launches.parts <= HCP_CUDA_PARTS_MAX &&
               of.n_columns - from <= HCP_CUDA_COLUMNS_MAX;
  hcp_status status = wait_before(peers, whole, stream, err);
  for (; more > 0 && status == HCP_OK; more = launches.advance()) {
    int32_t at_once = HCP_CUDA_PARTS_MAX / (launches.parts > 0 ? launches.parts : 1);
    if (at_once > HCP_CUDA_COLUMNS_MAX) at_once = HCP_CUDA_COLUMNS_MAX;
    int64_t offset = 0;
    for (int32_t first = from; first < of.n_columns && status == HCP_OK; first += at_once) {
      summed_columns columns;
      int64_t row_bytes[HCP_CUDA_COLUMNS_MAX];
      columns.n = of.n_columns - first < at_once ? of.n_columns - first : at_once;
      columns.out_stride = out.row_stride_bytes;
      columns.keeps = keeps;
      for (int32_t c = 0; c < columns.n; ++c) {
        row_bytes[c] = of.parts[first + c].row_bytes;
        columns.out[c] = (char *)out.data + offset;
        offset += row_bytes[c] / by.element_bytes * by.out_element_bytes;
      }
      for (int32_t p = 0; p < launches.parts; ++p)
        for (int32_t c = 0; c < columns.n; ++c) {
          const hcp_column &part =
              of.parts[(int64_t)launches.part_of[p] * of.n_columns + first + c];
          columns.part[p * columns.n + c] = (const char *)part.data;
          columns.part_stride[p * columns.n + c] = part.row_stride_bytes;
        }
      status =
          launch(by, of.dtype, launches, &columns, row_bytes, whole ? peers : NULL, stream, err);
    }
  }
  if (status == HCP_OK && more < 0) status = row_too_long(launches, err);
  return status == HCP_OK ? tell_after(peers, whole, stream, err) : status;
}

hcp_status hcp_cuda_reduce_from(const hcp_sum *sum, int32_t from, hcp_column out, void *stream,
                                hcp_error *err) {
  return sum_in_launches(summer_of({sum->dtype, sum->dtype}), *sum, from, out, false, NULL, stream,
                         err);
}

hcp_status hcp_cuda_reduce(const hcp_sum *sum, const hcp_cast *cast, hcp_column out, void *stream,
                           hcp_error *err) {
  hcp_cast none = {sum->dtype, sum->dtype};
  return sum_in_launches(summer_of(cast != NULL ? *cast : none), *sum, 0, out, false, NULL, stream,
                         err);
}

hcp_status hcp_cuda_place(const hcp_sum *sum, hcp_column out, void *stream, hcp_error *err) {
  return sum_in_launches(summer_of({sum->dtype, sum->dtype}), *sum, 0, out, true, NULL, stream,
                         err);
}

hcp_status hcp_cuda_reduce_on(const hcp_sum *sum, hcp_column total, void *stream, hcp_error *err) {
  hcp_sum named = *sum;
  named.rows = 0; /* up to the last one that a run names */
  if (sum->n_runs > 0)
    named.rows = sum->runs[sum->n_runs - 1].row + sum->runs[sum->n_runs - 1].rows;
  return sum_in_launches(adder_of(sum->dtype), named, 0, total, true, NULL, stream, err);
}

hcp_status hcp_cuda_stage(const hcp_sum *sum, hcp_column out, hcp_awaited free, hcp_signals staged,
                          uint32_t *progress, void *stream, hcp_error *err) {
  linked peers = {free, staged, progress, true, 0, NULL};
  return sum_in_launches(summer_of({sum->dtype, sum->dtype}), *sum, 0, out, false, &peers, stream,
                         err);
}

hcp_status hcp_cuda_read_by_blocks(const hcp_sum *sum, hcp_column out, const hcp_staged *staged,
                                   hcp_signals read, uint32_t *progress, void *stream,
                                   hcp_error *err) {
  linked peers = {staged->awaited, read, progress, false, staged->first, staged->part_rows};
  return sum_in_launches(summer_of({sum->dtype, sum->dtype}), *sum, 0, out, staged->keeps != 0,
                         &peers, stream, err);
}
