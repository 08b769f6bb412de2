/* signal.cu - words that GPUs write into each other's memory, and wait for.
 *
 * One thread per word: a rank has few peers. A waiting thread spins on its own
 * device's memory, never over the link. */
#include "device.cuh"

struct signal_table {
  hcp_signal signals[HCP_CUDA_SIGNALS_MAX];
  int32_t n;
};

static __device__ uint64_t acquired(const uint64_t *word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

static __device__ void release(uint64_t *word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

static __device__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void set_signals(const __grid_constant__ signal_table table) {
  if ((int32_t)threadIdx.x < table.n)
    release(table.signals[threadIdx.x].word, table.signals[threadIdx.x].value);
}

/* The first of several late peers is reported whole: its thread alone writes,
 * kind last, and no other traps before that. */
static __device__ void report(hcp_signal_failure *failure, int64_t kind, const hcp_signal &signal,
                              uint64_t found) {
  unsigned long long *claim = (unsigned long long *)&failure->kind;
  if (atomicCAS(claim, 0ULL, ~0ULL) != 0) {
    while (*(volatile int64_t *)&failure->kind == -1) {
    }
    __trap();
  }
  failure->peer = signal.peer;
  failure->expected = signal.value;
  failure->found = found;
  __threadfence_system();
  failure->kind = kind;
  __threadfence_system();
  __trap();
}

__global__ void wait_signals(const __grid_constant__ signal_table table, int64_t timeout_ns,
                             hcp_signal_failure *failure) {
  if ((int32_t)threadIdx.x >= table.n) return;
  const hcp_signal &signal = table.signals[threadIdx.x];
  int64_t start = nanoseconds();
  uint64_t found = acquired(signal.word);
  while (found >> 32 < signal.value >> 32) {
    if (nanoseconds() - start > timeout_ns) report(failure, 1, signal, found);
    found = acquired(signal.word);
  }
  if (found != signal.value) report(failure, 2, signal, found);
}

static hcp_status fill(signal_table *table, const hcp_signal *signals, int64_t n, hcp_error *err) {
  if (n > HCP_CUDA_SIGNALS_MAX)
    return hcp__fail(err, HCP_INVALID, "%lld signals, expected <= %d", (long long)n,
                     HCP_CUDA_SIGNALS_MAX);
  for (int64_t i = 0; i < n; ++i) table->signals[i] = signals[i];
  table->n = (int32_t)n;
  return HCP_OK;
}

hcp_status hcp_cuda_signal_set(const hcp_signal *signals, int64_t n, void *stream, hcp_error *err) {
  signal_table table;
  hcp_status status = fill(&table, signals, n, err);
  if (status != HCP_OK || n == 0) return status;
  set_signals<<<1, HCP_CUDA_SIGNALS_MAX, 0, (cudaStream_t)stream>>>(table);
  return hcp_cuda_launched("signal_set", err);
}

hcp_status hcp_cuda_signal_wait(const hcp_signal *signals, int64_t n, int64_t timeout_ns,
                                hcp_signal_failure *failure, void *stream, hcp_error *err) {
  signal_table table;
  hcp_status status = fill(&table, signals, n, err);
  if (status != HCP_OK || n == 0) return status;
  wait_signals<<<1, HCP_CUDA_SIGNALS_MAX, 0, (cudaStream_t)stream>>>(table, timeout_ns, failure);
  return hcp_cuda_launched("signal_wait", err);
}
