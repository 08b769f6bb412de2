/* signal.cuh - words that GPUs write into each other's memory, and wait for. */
#ifndef HCP_CUDA_SIGNAL_CUH
#define HCP_CUDA_SIGNAL_CUH

#include "device.cuh"
#include "hcp/signal.h"

/* A signal as a launch carries it. */
struct carried_signal {
  uint64_t *word;
  int32_t count;
  int16_t peer, more;
};

struct carried_signals {
  carried_signal signal[HCP_CUDA_SIGNALS_MAX];
  uint64_t *counts;
  uint32_t tag;
  int32_t n;
};

/* Signals that are waited for, as a launch carries them. */
struct carried_awaited {
  carried_signals signals;
  int64_t timeout_ns;
  hcp_signal_failure *failure;
};

static inline hcp_status fill(carried_signals *carried, const hcp_signals &signals,
                              hcp_error *err) {
  if (signals.n > HCP_CUDA_SIGNALS_MAX)
    return hcp__fail(err, HCP_INVALID, "%lld signals, expected <= %d", (long long)signals.n,
                     HCP_CUDA_SIGNALS_MAX);
  for (int64_t i = 0; i < signals.n; ++i) {
    const hcp_signal &signal = signals.data[i];
    carried->signal[i] = {signal.word, (int32_t)signal.count, (int16_t)signal.peer,
                          (int16_t)signal.more};
  }
  carried->counts = signals.counts;
  carried->tag = signals.tag;
  carried->n = (int32_t)signals.n;
  return HCP_OK;
}

static inline hcp_status fill(carried_awaited *carried, const hcp_awaited &awaited,
                              hcp_error *err) {
  carried->timeout_ns = awaited.timeout_ns;
  carried->failure = awaited.failure;
  return fill(&carried->signals, awaited.signals, err);
}

static __device__ inline uint64_t acquired(const uint64_t *word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

static __device__ inline void release(uint64_t *word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

static __device__ inline int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

/* The first of several late peers is reported whole: its thread alone writes,
 * kind last, and no other traps before that. */
static __device__ inline void report(hcp_signal_failure *failure, int64_t kind, int64_t peer,
                                     uint64_t expected, uint64_t found) {
  unsigned long long *claim = (unsigned long long *)&failure->kind;
  if (atomicCAS(claim, 0ULL, (unsigned long long)(int64_t)HCP_BEING_WRITTEN) != 0) {
    while (*(volatile int64_t *)&failure->kind == HCP_BEING_WRITTEN) {
    }
    __trap();
  }
  failure->peer = peer;
  failure->expected = expected;
  failure->found = found;
  __threadfence_system();
  failure->kind = kind;
  __threadfence_system();
  __trap();
}

/* Spins on this device's own memory, never over the link. */
static __device__ inline void wait_for(const carried_awaited &awaited, int32_t number,
                                       int32_t word) {
  const carried_signals &signals = awaited.signals;
  const carried_signal &signal = signals.signal[number];
  uint64_t expected =
      hcp_signal_expected(signals.counts, signal.count, (uint64_t)signal.more, signals.tag);
  int64_t start = nanoseconds();
  uint64_t found = acquired(signal.word + word);
  while (hcp_signal_is_behind(found, expected)) {
    if (nanoseconds() - start > awaited.timeout_ns)
      report(awaited.failure, HCP_LATE, signal.peer, expected, found);
    found = acquired(signal.word + word);
  }
  if (found != expected) report(awaited.failure, HCP_OTHER_CALL, signal.peer, expected, found);
}

/* One exchange more, by all threads of a block: nobody else looks at these counts meanwhile. */
static __device__ inline void count(const carried_signals &carried) {
  __syncthreads();
  for (int i = (int)threadIdx.x; i < carried.n; i += (int)blockDim.x)
    hcp_signal_count(carried.counts, carried.signal[i].count, (uint64_t)carried.signal[i].more);
  __syncthreads();
}

/* Words [from, to) of every signal, by all threads of a block. */
static __device__ inline void set_words(const carried_signals &carried, int32_t from, int32_t to) {
  for (int i = (int)threadIdx.x; i < carried.n * (to - from); i += (int)blockDim.x) {
    const carried_signal &signal = carried.signal[i / (to - from)];
    release(signal.word + from + i % (to - from),
            hcp_signal_told(carried.counts, signal.count, carried.tag));
  }
}

/* Whether this block is the launch's last that comes here, all others' memory being
 * visible to whoever sees what it releases. *arrived is zero before and after. */
static __device__ inline bool comes_last(uint32_t *arrived) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t blocks = gridDim.x * gridDim.y;
    __threadfence();
    last = atomicInc(arrived, blocks - 1) == blocks - 1;
    if (last) __threadfence_system();
  }
  __syncthreads();
  return last;
}

/* Holds the stream until words [from, to) of every signal are as expected; then counts. */
hcp_status hcp_cuda_signal_wait(hcp_awaited awaited, int32_t from, int32_t to, hcp_signals counted,
                                cudaStream_t stream, hcp_error *err);

/* Counts, then writes so many words of every signal. */
hcp_status hcp_cuda_signal_tell(hcp_signals counted, hcp_signals signals, int32_t words,
                                cudaStream_t stream, hcp_error *err);

/* hcp_cuda_read by a kernel. */
hcp_status hcp_cuda_read_by_blocks(const hcp_sum *sum, hcp_column out, const hcp_staged *staged,
                                   hcp_signals read, uint32_t *progress, void *stream,
                                   hcp_error *err);

#endif
