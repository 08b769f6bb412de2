/* kernels.h - hcp's row kernels as C functions: rows gathered, merged, summed and turned.
 *
 * Tensors are rows: row i of a tensor starts at data + i * row_stride, and its
 * elements follow each other. Strides are in elements. Segments and runs name rows.
 * They are records of 64-bit integers, as in the sections of an hcp_table. The
 * functions allocate nothing and keep nothing, and results do not depend on the
 * number of threads.
 *
 * The functions trust segments and runs: hcp_check_* proves them against the sizes of
 * the tensors first, and belongs to the caller's glue.
 */
#ifndef HCP_KERNELS_H
#define HCP_KERNELS_H

#include "hcp/hcp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, bytes of an element) */
#define HCP_DTYPES(X) \
  X(FLOAT64, 8)       \
  X(FLOAT32, 4)       \
  X(BFLOAT16, 2)      \
  X(FLOAT16, 2)

typedef enum hcp_dtype {
#define HCP_DTYPE_ENUM(name, bytes) HCP_##name,
  HCP_DTYPES(HCP_DTYPE_ENUM)
#undef HCP_DTYPE_ENUM
} hcp_dtype;

/* Elements are read as `from` and written as `to`, another dtype. They are rounded to
 * nearest, ties to even; beyond the largest number they become infinity, and NaN becomes
 * some NaN. On the way they are float32, or float64 where either side is; float64 gets to
 * 16 bits through float32, as in PyTorch. */
typedef struct hcp_cast {
  hcp_dtype from, to;
} hcp_cast;

/* Rows that a gather takes from its source; row -1 stands for rows of zeros. */
typedef struct hcp_segment {
  int64_t row, rows;
} hcp_segment;

/* Rows of a result, and the rows of a part that contribute to them. Records ascend by
 * row; those with equal row and rows are one run. */
typedef struct hcp_run {
  int64_t row, rows, part, part_row;
} hcp_run;

/* One tensor, counted in bytes: gathers move any element type. */
typedef struct hcp_column {
  void *data;
  int64_t row_stride_bytes;
  int64_t row_bytes;
} hcp_column;

/* One partial result of attention: rows x heads x head_dim, and its
 * log-sum-exp, rows x heads, natural log. */
typedef struct hcp_part {
  const void *out;
  int64_t out_row_stride, out_head_stride;
  const void *lse; /* double for FLOAT64, float for the rest */
  int64_t lse_row_stride, lse_head_stride;
} hcp_part;

/* What is merged. A record of runs names rows of a part. total holds what was merged before, for
 * each row of the result one part more: rows x heads x head_dim and contiguous, float32 (float64
 * for FLOAT64), as is its log-sum-exp, rows x heads. total_lse is NULL where that is nothing. */
typedef struct hcp_merge {
  hcp_dtype dtype; /* of the parts */
  const hcp_part *parts;
  const hcp_run *runs;
  int64_t n_runs;
  int64_t rows, heads, head_dim;
  const void *total, *total_lse;
} hcp_merge;

/* What is summed: parts of n_columns tensors, parts[p * n_columns + c] is column c of part p. A
 * record of runs names rows of a part. rows are those of the result. */
typedef struct hcp_sum {
  hcp_dtype dtype; /* of the parts */
  const hcp_column *parts;
  int32_t n_columns;
  const hcp_run *runs;
  int64_t n_runs;
  int64_t rows;
} hcp_sum;

/* Rotary embedding (RoPE). Of each head's head_dim elements the first 2 * pairs are
 * turned in pairs: elements (p, p + pairs), or (2 p, 2 p + 1) where interleaved. The rest
 * pass unchanged. cos and sin have a row for each row of the result and a number for each
 * element that is turned, in a head's order: contiguous, double for FLOAT64, float for the
 * rest. The index arithmetic and the turn of one pair are in index.h. inverse turns by the
 * transpose, which is the gradient. */
typedef struct hcp_rotation {
  const void *cos, *sin;
  int64_t head_dim, pairs;
  int32_t interleaved, inverse;
} hcp_rotation;

/* A tensor of rows x heads x head_dim, the elements of a head side by side. */
typedef struct hcp_heads {
  const void *data;
  int64_t row_stride, head_stride; /* in elements */
} hcp_heads;

/* Check that every segment lies inside rows or is zeros, and that all together are
 * out_rows long. A segment may have no rows; the same rows may be named again. */
hcp_status hcp_check_segments(const hcp_segment *segments, int64_t n, int64_t rows,
                              int64_t out_rows, hcp_error *err);

/* Check that runs have rows, ascend, do not overlap and lie inside out_rows, and that
 * each of their parts lies inside part_rows[part]. The same rows of a part may be named
 * again. */
hcp_status hcp_check_runs(const hcp_run *runs, int64_t n, const int64_t *part_rows, int64_t parts,
                          int64_t out_rows, hcp_error *err);

/* Gather rows of several tensors into one: row r of out is the r-th row that the
 * segments name, with the columns of all sources side by side. All of out is written.
 *
 * cast is NULL to move bytes as they are: out.row_bytes is then the sum of the
 * sources'. With a cast, row_bytes count each side's own elements. */
void hcp_cpu_pack(const hcp_cast *cast, const hcp_column *sources, int32_t n_sources,
                  const hcp_segment *segments, int64_t n_segments, hcp_column out);

/* Gather rows of one tensor and split its columns into several: the inverse of pack's
 * columns side by side. cast is as in pack. */
void hcp_cpu_unpack(const hcp_cast *cast, hcp_column source, const hcp_segment *segments,
                    int64_t n_segments, const hcp_column *outs, int32_t n_outs);

/* Merge partial outputs by log-sum-exp, once, in float32 (float64 for
 * FLOAT64):
 *
 *   lse = log(sum_p exp(lse_p)),  out = sum_p exp(lse_p - lse) * out_p
 *
 * out, of the dtype, is rows x heads x head_dim and contiguous, lse rows x heads and
 * contiguous, other memory than total_lse. A part with lse -inf takes no part, whatever its
 * output holds. A row without parts gives 0 and -inf. A part with lse +inf outweighs all finite
 * ones; several of one call share the row equally. A part with lse NaN makes the row NaN, and
 * so does an output that holds NaN or infinity, however little its part weighs. */
void hcp_cpu_merge(const hcp_merge *merge, void *out, void *lse);

/* The same, and the result stays float32 (float64 for FLOAT64), in the place of the total: total is
 * merge->total. Rows that no run names stay as they are. */
void hcp_cpu_merge_on(const hcp_merge *merge, void *total, void *lse);

/* Sum partial rows once, in float32 (float64 for FLOAT64). The columns
 * stand side by side in out. Records of a run are summed in their order; a run of
 * one record is copied. Rows that no run names become 0.
 *
 * cast is NULL where out is of the parts' dtype. Otherwise cast->from is
 * that dtype and cast->to is that of out: elements are summed in the dtype in which a cast
 * passes them on, then rounded once, and a run of one record is cast. */
void hcp_cpu_reduce(const hcp_sum *sum, const hcp_cast *cast, hcp_column out);

/* Add parts of one column to a total of float32 (float64 for FLOAT64), record by record. Rows that
 * no run names stay as they are, and sum->rows is not read. */
void hcp_cpu_reduce_on(const hcp_sum *sum, hcp_column total);

/* Reduce without a cast into the rows that runs name. The others keep what they hold. */
void hcp_cpu_place(const hcp_sum *sum, hcp_column out);

/* As hcp_cpu_reduce without a cast, and the first `rotated` columns, of whole heads each, are
 * turned before they are rounded: a gradient of rotated rows is summed and turned back in one pass.
 */
void hcp_cpu_reduce_rotated(const hcp_sum *sum, const hcp_rotation *rotation, int32_t rotated,
                            hcp_column out);

/* Turn rows of heads, in float32 (float64 for FLOAT64), and copy them to wherever
 * they are sent from: row `row` of out goes to row part_row of wire, too, for every
 * record that names it (part is not looked at). out and wire are rows x
 * (heads * head_dim); wire may be anything when there are no runs. Rows of wire
 * that no run names are not written. */
void hcp_cpu_rotate(hcp_dtype dtype, hcp_heads source, const hcp_rotation *rotation,
                    const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                    hcp_column wire);

/* ---- On a GPU -----------------------------------------------------------
 *
 * The same results from memory of the current device: bit for bit for pack,
 * unpack and reduce (of NaN, some NaN), up to rounding for merges. Work is queued
 * on a stream (a cudaStream_t) and the call returns: nothing is allocated, nothing is waited for,
 * so that a CUDA graph can capture it. Segments, runs, columns and parts lie in host memory and
 * travel with the launch; they may be freed when the call returns. Many of them take several
 * launches.
 *
 * HCP_DEVICE carries the text of a CUDA error. HCP_INVALID: a row of more parts
 * or more records than a launch can carry. */

/* Parts and records of one row, and columns, that a launch can carry. A gradient has
 * a record for each time that a row was gathered. */
#define HCP_CUDA_PARTS_MAX 128
#define HCP_CUDA_RECORDS_MAX 512
#define HCP_CUDA_COLUMNS_MAX 16

hcp_status hcp_cuda_pack(const hcp_cast *cast, const hcp_column *sources, int32_t n_sources,
                         const hcp_segment *segments, int64_t n_segments, hcp_column out,
                         void *stream, hcp_error *err);

hcp_status hcp_cuda_unpack(const hcp_cast *cast, hcp_column source, const hcp_segment *segments,
                           int64_t n_segments, const hcp_column *outs, int32_t n_outs, void *stream,
                           hcp_error *err);

hcp_status hcp_cuda_merge(const hcp_merge *merge, void *out, void *lse, void *stream,
                          hcp_error *err);

hcp_status hcp_cuda_merge_on(const hcp_merge *merge, void *total, void *lse, void *stream,
                             hcp_error *err);

hcp_status hcp_cuda_reduce(const hcp_sum *sum, const hcp_cast *cast, hcp_column out, void *stream,
                           hcp_error *err);

hcp_status hcp_cuda_reduce_on(const hcp_sum *sum, hcp_column total, void *stream, hcp_error *err);

hcp_status hcp_cuda_place(const hcp_sum *sum, hcp_column out, void *stream, hcp_error *err);

hcp_status hcp_cuda_reduce_rotated(const hcp_sum *sum, const hcp_rotation *rotation,
                                   int32_t rotated, hcp_column out, void *stream, hcp_error *err);

hcp_status hcp_cuda_rotate(hcp_dtype dtype, hcp_heads source, const hcp_rotation *rotation,
                           const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                           hcp_column wire, void *stream, hcp_error *err);

/* ---- Between GPUs that reach each other's memory ------------------------
 *
 * Rows that a rank stages in its memory are read by its peers where they lie;
 * signals say when. A signal is HCP_PIECES words side by side in such memory, one
 * for each piece of the rows: its upper half counts, its lower half tells calls
 * apart. Piece i of R rows is rows [R i / HCP_PIECES, R (i + 1) / HCP_PIECES), so
 * that the first are read while the last are staged.
 *
 * Each rank keeps its counts in its own device's memory, where kernels take and raise
 * them: a launch that is replayed counts on by itself. signal.h has the arithmetic. */

/* X(name, value): the numbers of signals and of the memory in which they lie, for the host, for
 * devices, and for Python, which reads them as hcp._core.SIGNALS. */
#define HCP_SIGNAL_NUMBERS(X)                                                                     \
  X(HALVES, 2)          /* of each rank's memory: one exchange is staged while another is read */ \
  X(PIECES, 16)         /* of the rows of an exchange, and words of a signal */                   \
  X(PAGE_BYTES, 4096)   /* halves and mailboxes begin at a multiple of it */                      \
  X(STAGED, 0)          /* kinds of signals: rows have been staged, */                            \
  X(READ, 1)            /* and have been read */                                                  \
  X(KINDS, 2)           /* of signals */                                                          \
  X(READ_TAG, 0)        /* the tag of "they have been read" */                                    \
  X(LATE, 1)            /* kinds of failures: a signal has not come in time, */                   \
  X(OTHER_CALL, 2)      /* or has come with the tag of another call than the one expected, */     \
  X(BEING_WRITTEN, -1)  /* or the failure is being written */

enum {
#define HCP_SIGNAL_ENUM(name, value) HCP_##name = (value),
  HCP_SIGNAL_NUMBERS(HCP_SIGNAL_ENUM)
#undef HCP_SIGNAL_ENUM
};

typedef struct hcp_signal {
  uint64_t *word; /* the first */
  int64_t count;  /* its place among the counts */
  int64_t peer;   /* for the report of a failure */
  int64_t more;   /* 1: it counts this exchange; 0: that was counted before */
} hcp_signal;

#define HCP_CUDA_SIGNALS_MAX 128

/* The first thing that a waiting kernel found wrong, in host memory that the device
 * reaches: X(type, name). kind is 0 until then, else LATE, OTHER_CALL or BEING_WRITTEN. Of the
 * words, see hcp_signal_tag. */
#define HCP_SIGNAL_FAILURE(X) \
  X(int64_t, kind) X(int64_t, peer) X(uint64_t, expected) X(uint64_t, found)

typedef struct hcp_signal_failure {
#define HCP_FIELD(type, name) type name;
  HCP_SIGNAL_FAILURE(HCP_FIELD)
} hcp_signal_failure;

/* Signals of one tag: they count in the launches' order, which is one on all streams. */
typedef struct hcp_signals {
  const hcp_signal *data;
  int64_t n;
  uint64_t *counts; /* memory of the device */
  uint32_t tag;
} hcp_signals;

/* Signals that are waited for. When one has not come within timeout_ns, or counts as
 * far with another tag, *failure says so and the kernel traps: later work of
 * this process on the device fails, instead of reading rows that are not there. */
typedef struct hcp_awaited {
  hcp_signals signals;
  int64_t timeout_ns;
  hcp_signal_failure *failure;
} hcp_awaited;

/* Parts that peers stage: signal i of awaited is of part first + i, which has
 * part_rows[first + i] rows. */
typedef struct hcp_staged {
  hcp_awaited awaited;
  int32_t next; /* signal whose peer's rows are copied first */
  int32_t first;
  const int64_t *part_rows;
  int32_t keeps; /* 1: as hcp_cuda_place; 0: rows that no run names become zeros */
} hcp_staged;

/* Count one more by each signal, and write its first words, visible to all devices after
 * whatever the stream did before. */
hcp_status hcp_cuda_signal_set(hcp_signals signals, int32_t words, void *stream, hcp_error *err);

/* Zeroed words of the device that launches one after the other on one stream may
 * share: how many blocks have ended, or have ended a piece. */
#define HCP_CUDA_PROGRESS_WORDS HCP_PIECES

/* Reduce as hcp_cuda_reduce does without a cast, into memory that peers read. Waits for
 * the first word of `free` before it writes, then counts by `staged`, and sets all words of
 * it, piece by piece. */
hcp_status hcp_cuda_stage(const hcp_sum *sum, hcp_column out, hcp_awaited free, hcp_signals staged,
                          uint32_t *progress, void *stream, hcp_error *err);

/* Reduce as hcp_cuda_reduce does without a cast, with parts that peers stage. Then
 * count by what was awaited, and set the first word of `read`. Waits for no piece after those that
 * it reads. Long runs are copied; the rest is read in few blocks: as
 * many as keep a link busy, which read from all peers at any time. */
hcp_status hcp_cuda_read(const hcp_sum *sum, hcp_column out, const hcp_staged *staged,
                         hcp_signals read, uint32_t *progress, void *stream, hcp_error *err);

/* Words by which a thread of the host and the device tell each other of exchanges that
 * others carry, in host memory that the device reaches: X(type, name). `ended` is the number of the
 * last exchange that has; the host sets `aborted` before it ends what hangs, without its rows;
 * `other` is of kind OTHER_CALL: a peer whose stamp is not the one expected. */
#define HCP_WATCH(X) X(uint64_t, ended) X(uint64_t, aborted) X(hcp_signal_failure, other)

typedef struct hcp_watch {
  HCP_WATCH(HCP_FIELD)
#undef HCP_FIELD
} hcp_watch;

/* A word of the device that came with a peer's rows, and the value expected there. */
typedef struct hcp_stamp {
  const uint64_t *word;
  uint64_t value;
  int64_t peer;
} hcp_stamp;

/* Write a word of the device: the stamp that this rank sends with its rows. */
hcp_status hcp_cuda_stamp_set(uint64_t *word, uint64_t stamp, void *stream, hcp_error *err);

/* Compare n stamps that came with an exchange's rows, each with its value, after the
 * exchange on its stream; then set `ended` to the exchange's number, unless that is 0.
 * When a stamp differs, `other` says so and the kernel traps. Once `aborted` is set, it
 * traps too, as it does where a signal does not come. A graph may capture it. */
hcp_status hcp_cuda_exchange_end(hcp_watch *watch, uint64_t number, const hcp_stamp *stamps,
                                 int64_t n, void *stream, hcp_error *err);

/* Make what a stream is given from now on follow what another, `ahead`, has been given so
 * far. */
hcp_status hcp_cuda_follow(void *stream, void *ahead, hcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
