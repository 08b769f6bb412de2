/* test_read.cpp - which copies csrc/cuda/read.cu queues, and after which waits.
 *
 * CUDA's calls are stand-ins: they note rows instead of moving them, and fail where rows are not
 * staged by then. Addresses are numbers that nobody reads from. */
#include <stdlib.h>

#include <vector>

#include "check.h"
#include "hcp/fail.h"
#include "hcp/index.h"

/* ---- CUDA, and the launches of signal.cu and reduce.cu ---- */

#define HCP_CUDA_SIGNAL_CUH /* read.cu takes what is below instead */
#ifndef CUDART_VERSION
#define CUDART_VERSION 13000
#endif

typedef int cudaError_t;
typedef int cudaStreamCaptureStatus;
typedef struct stream *cudaStream_t;
typedef struct cudaMemcpyAttributes {
  int srcAccessOrder;
} cudaMemcpyAttributes;
#define cudaStreamLegacy ((cudaStream_t)0x1)
enum { cudaSuccess, cudaErrorNotSupported = 801 };
enum { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum { cudaMemcpyDeviceToDevice = 3, cudaMemcpySrcAccessOrderStream = 1 };

/* A read, and what has become of it. */
static struct {
  int32_t peers, next, first_staged, keeps;
  int64_t rows, row_bytes;
  std::vector<int64_t> part_rows;
  std::vector<hcp_run> runs;
  std::vector<int32_t> waited;     /* pieces, of each peer */
  std::vector<int64_t> part, from; /* of each row of the result; part -1: not written */
  std::vector<int32_t> order;      /* peers, as they are copied from */
  int64_t copies, calls, batches, told, by_blocks, early, torn, again, out_of_order, refused;
  int64_t fails_at; /* the call that fails, from 1 on; 0: none */
  int driver, captures, names_a_stream;
} now;

static const uintptr_t RESULT = (uintptr_t)1 << 60;
static uintptr_t address_of(int64_t part) { return (uintptr_t)(part + 1) << 48; }
static hcp_signal signals[HCP_CUDA_SIGNALS_MAX];

static void note_row(int64_t part, int64_t part_row, int64_t row) {
  int64_t peer = part - now.first_staged;
  if (peer < 0 || part_row >= now.part_rows[(size_t)part] || row >= now.rows) {
    ++now.torn;
    return;
  }
  now.early += hcp_piece_of_row(now.part_rows[(size_t)part], part_row) >= now.waited[(size_t)peer];
  now.again += now.part[(size_t)row] >= 0;
  now.part[(size_t)row] = part;
  now.from[(size_t)row] = part_row;
}

static void note_copy(const void *to, const void *from, size_t bytes) {
  int64_t part = (int64_t)((uintptr_t)from >> 48) - 1, width = now.row_bytes;
  int64_t source = (int64_t)((uintptr_t)from - address_of(part));
  int64_t target = (int64_t)((uintptr_t)to - RESULT), size = (int64_t)bytes;
  ++now.copies;
  now.out_of_order += now.told != 0;
  now.torn += size == 0 || source % width != 0 || target % width != 0 || size % width != 0;
  int32_t peer = (int32_t)part - now.first_staged;
  if (now.order.empty() || now.order.back() != peer) now.order.push_back(peer);
  for (int64_t r = 0; r < size / width; ++r) note_row(part, source / width + r, target / width + r);
}

static cudaError_t call(void) { return ++now.calls == now.fails_at ? cudaErrorNotSupported : 0; }

static cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, cudaStream_t) {
  note_copy(to, from, bytes);
  return call();
}

[[maybe_unused]] static cudaError_t note_batch(void **to, void **from, size_t *bytes, size_t n,
                                               size_t n_how, const size_t *first, int order) {
  ++now.batches;
  now.refused += n == 0 || n > 256 || n_how != 1 || *first != 0 || now.captures != 0 ||
                 !now.names_a_stream || now.driver < 12080 ||
                 order != cudaMemcpySrcAccessOrderStream;
  for (size_t i = 0; i < n; ++i) note_copy(to[i], from[i], bytes[i]);
  return call();
}

#if CUDART_VERSION >= 13000
static cudaError_t cudaMemcpyBatchAsync(void **to, void **from, size_t *bytes, size_t n,
                                        cudaMemcpyAttributes *how, size_t *first, size_t n_how,
                                        cudaStream_t) {
  return note_batch(to, from, bytes, n, n_how, first, how->srcAccessOrder);
}
#elif CUDART_VERSION >= 12080
static cudaError_t cudaMemcpyBatchAsync(void **to, void **from, size_t *bytes, size_t n,
                                        cudaMemcpyAttributes *how, size_t *first, size_t n_how,
                                        size_t *, cudaStream_t) {
  return note_batch(to, from, bytes, n, n_how, first, how->srcAccessOrder);
}
#endif

static cudaError_t cudaDriverGetVersion(int *version) {
  *version = now.driver;
  return cudaSuccess;
}

static cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = now.captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

static hcp_status hcp_cuda_status(cudaError_t error, const char *what, hcp_error *err) {
  return error == cudaSuccess ? HCP_OK : hcp__fail(err, HCP_DEVICE, "%s: %d", what, error);
}

/* The pieces that rows of a peer's lie in, from its first one on: as many are waited for. */
static int32_t pieces_read(int64_t peer) {
  int64_t part = now.first_staged + peer;
  int32_t pieces = 0;
  for (const hcp_run &run : now.runs)
    if (run.part == part) {
      int64_t last = run.part_row + run.rows - 1;
      int32_t needed = hcp_piece_of_row(now.part_rows[(size_t)part], last) + 1;
      pieces = needed > pieces ? needed : pieces;
    }
  return pieces;
}

static hcp_status hcp_cuda_signal_wait(hcp_awaited awaited, int32_t from, int32_t to,
                                       hcp_signals counted, cudaStream_t, hcp_error *err) {
  int64_t peer = awaited.signals.data - signals;
  int32_t *waited = &now.waited[(size_t)peer];
  now.out_of_order += awaited.signals.n != 1 || counted.n != 0 || from != *waited || to <= from ||
                      to > pieces_read(peer);
  *waited = to;
  return hcp_cuda_status(call(), "wait", err);
}

static hcp_status hcp_cuda_signal_tell(hcp_signals counted, hcp_signals read, int32_t words,
                                       cudaStream_t, hcp_error *err) {
  now.out_of_order +=
      counted.data != signals || counted.n != now.peers || read.n != 7 || words != 1;
  ++now.told;
  return hcp_cuda_status(call(), "tell", err);
}

static hcp_status hcp_cuda_read_by_blocks(const hcp_sum *, hcp_column, const hcp_staged *,
                                          hcp_signals, uint32_t *, void *, hcp_error *) {
  ++now.by_blocks;
  return HCP_OK;
}

#include "../../csrc/cuda/read.cu"

/* ---- cases ---- */

static uint64_t drawn = 0x9e3779b97f4a7c15u;

static int64_t draw(int64_t low, int64_t high) {
  drawn = drawn * 6364136223846793005u + 1442695040888963407u;
  return low + (int64_t)((drawn >> 33) % (uint64_t)(high - low + 1));
}

/* A run after the last one: of some part's rows, or where the run before it ends. */
static void draw_run(int64_t most_rows) {
  int64_t row = now.rows + (now.keeps ? draw(0, 2) : 0);
  hcp_run run = {row, 0, draw(now.first_staged, now.first_staged + now.peers - 1), 0};
  if (!now.runs.empty() && draw(0, 2) == 0) {
    run.part = now.runs.back().part;
    run.part_row = now.runs.back().part_row + now.runs.back().rows;
  } else if (now.part_rows[(size_t)run.part] > 0) {
    run.part_row = draw(0, now.part_rows[(size_t)run.part] - 1);
  }
  int64_t left = now.part_rows[(size_t)run.part] - run.part_row;
  if (left < 1) return;
  run.rows = draw(1, left < most_rows ? left : most_rows);
  now.runs.push_back(run);
  now.rows = row + run.rows;
}

static void begin(int32_t peers, int64_t row_bytes) {
  now = {};
  now.peers = peers;
  now.row_bytes = row_bytes;
  now.driver = 13000;
  now.names_a_stream = 1;
  now.waited.assign((size_t)peers, 0);
}

static void draw_case(void) {
  const int64_t widths[] = {1 << 12, 1 << 16, 1 << 20, (1 << 20) + 16, 1 << 24};
  begin((int32_t)draw(1, 5), widths[draw(0, 4)]);
  now.next = (int32_t)draw(0, now.peers);
  now.first_staged = (int32_t)draw(0, 2);
  now.keeps = draw(0, 1) != 0;
  now.driver = draw(0, 3) ? 13000 : 12070;
  now.captures = draw(0, 3) == 0;
  now.names_a_stream = draw(0, 7) != 0;
  for (int32_t p = 0; p < now.first_staged + now.peers; ++p) {
    const int64_t most[] = {0, 1, 3, HCP_PIECES, 40, 700};
    now.part_rows.push_back(draw(0, most[draw(0, 5)]));
  }
  int64_t n = draw(0, 3) ? draw(0, 12) : draw(0, 700), most_rows = draw(0, 1) ? 4 : 700;
  for (int64_t r = 0; r < n; ++r) draw_run(most_rows);
  if (now.keeps) now.rows += draw(0, 2);
}

static hcp_status read(int64_t stream) {
  now.part.assign((size_t)now.rows, -1);
  now.from.assign((size_t)now.rows, -1);
  std::vector<hcp_column> parts;
  for (size_t p = 0; p < now.part_rows.size(); ++p) {
    char *data = (char *)address_of((int64_t)p);
    parts.push_back({data, now.row_bytes, now.row_bytes / 4});
    parts.push_back({data + now.row_bytes / 4, now.row_bytes, now.row_bytes - now.row_bytes / 4});
  }
  hcp_sum sum = {HCP_FLOAT32, parts.data(), 2, now.runs.data(), (int64_t)now.runs.size(), now.rows};
  hcp_awaited awaited = {{signals, now.peers, NULL, 5}, 0, NULL};
  hcp_staged staged = {awaited, now.next, now.first_staged, now.part_rows.data(), now.keeps};
  hcp_error err = {};
  return hcp_cuda_read(&sum, {(void *)RESULT, now.row_bytes, now.row_bytes}, &staged,
                       {NULL, 7, NULL, 0}, NULL, (void *)stream, &err);
}

static hcp_status read_drawn(void) {
  const int64_t streams[] = {0, (int64_t)(intptr_t)cudaStreamLegacy};
  return read(now.names_a_stream ? 64 : streams[draw(0, 1)]);
}

/* Every row is that of its run, from a piece that was there, and each peer is told once. */
static void check_copied(void) {
  CHECK_INT(now.by_blocks, 0);
  CHECK_INT(now.told, 1);
  CHECK_INT(now.early + now.torn + now.again + now.out_of_order + now.refused, 0);
  int64_t others = 0, named = 0, written = 0;
  for (int64_t part : now.part) written += part >= 0;
  for (const hcp_run &run : now.runs) named += run.rows;
  CHECK_INT(written, named);
  for (const hcp_run &run : now.runs)
    for (int64_t r = 0; r < run.rows; ++r)
      others += now.part[(size_t)(run.row + r)] != run.part ||
                now.from[(size_t)(run.row + r)] != run.part_row + r;
  CHECK_INT(others, 0);
  for (int32_t p = 0; p < now.peers; ++p) CHECK_INT(now.waited[(size_t)p], pieces_read(p));
  for (size_t i = 1; i < now.order.size(); ++i) {
    int32_t before = (now.order[i - 1] - now.next + 2 * now.peers) % now.peers;
    CHECK(before < (now.order[i] - now.next + 2 * now.peers) % now.peers);
  }
}

/* Whether rows lie in stretches of enough bytes each, on average. */
static bool is_worth_copies(void) {
  int64_t stretches = 0, part = -1, part_row = 0, row = 0, rows = 0;
  for (const hcp_run &run : now.runs) {
    stretches += run.part != part || run.part_row != part_row || run.row != row;
    part = run.part;
    part_row = run.part_row + run.rows;
    row = run.row + run.rows;
    rows += run.rows;
  }
  bool many = CUDART_VERSION >= 12080 && now.driver >= 12080 && !now.captures && now.names_a_stream;
  int64_t least = many ? 1 << 20 : 1 << 24;
  return stretches > 0 && rows * now.row_bytes >= least * stretches;
}

static void test_rows_are_copied_once_and_after_their_pieces(void) {
  int64_t copied = 0, batches = 0, calls = 0;
  for (int32_t i = 0; i < 20000 && check_failures == 0; ++i) {
    draw_case();
    CHECK_INT(read_drawn(), HCP_OK);
    CHECK_INT(now.by_blocks, !is_worth_copies());
    if (now.by_blocks > 0) {
      CHECK_INT(now.calls, 0);
      continue;
    }
    check_copied();
    ++copied;
    batches += now.batches;
    calls += now.batches == 0;
  }
  CHECK(copied > 2000);
  CHECK(calls > 100);
  if (CUDART_VERSION >= 12080) CHECK(batches > 2000);
}

static void test_a_call_that_fails_ends_the_read(void) {
  int64_t failed = 0;
  for (int32_t i = 0; i < 5000 && check_failures == 0; ++i) {
    draw_case();
    now.fails_at = draw(1, 12);
    hcp_status status = read_drawn();
    CHECK_INT(status, now.calls >= now.fails_at ? HCP_DEVICE : HCP_OK);
    CHECK(now.calls <= now.fails_at || now.fails_at == 0);
    failed += status != HCP_OK;
  }
  CHECK(failed > 500);
}

static void test_many_copies_go_in_calls_of_256(void) {
  begin(1, CUDART_VERSION >= 12080 ? 1 << 20 : 1 << 24);
  now.part_rows = {2000};
  for (int64_t r = 0; r < 1000; ++r) now.runs.push_back({r, 1, 0, 2 * (999 - r)}); /* backwards */
  now.rows = 1000;
  CHECK_INT(read(64), HCP_OK);
  check_copied();
  CHECK_INT(now.copies, 1000);
#if CUDART_VERSION >= 12080
  /* 63, 125, 312 and 500 copies, after a wait each, and the tell. */
  CHECK_INT(now.calls, 4 + 1 + 1 + 2 + 2 + 1);
#endif
}

/* Columns that are not side by side, own rows, sums and rows of zeros are the kernel's. */
static void test_other_rows_are_read_by_blocks(void) {
  for (int32_t other = 0; other < 4; ++other) {
    begin(1, 1 << 24);
    now.first_staged = 1;
    now.part_rows = {64, 64};
    now.runs = {{0, 32, 1, 0}, {32, 32, 1, 32}};
    now.rows = other == 3 ? 65 : 64;
    if (other == 1) now.runs[1].part = 0;
    if (other == 2) now.runs[1] = now.runs[0];
    CHECK_INT(read(64), HCP_OK);
    CHECK_INT(now.by_blocks, other != 0);
    CHECK_INT(now.calls > 0, other == 0);
  }
}

int main(void) {
  test_rows_are_copied_once_and_after_their_pieces();
  test_a_call_that_fails_ends_the_read();
  test_many_copies_go_in_calls_of_256();
  test_other_rows_are_read_by_blocks();
  return check_report("test_read");
}
