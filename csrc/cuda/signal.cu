/* signal.cu - signals set and waited for by launches of their own, and the end of an exchange. */
#include "signal.cuh"

__global__ void set_signals(const __grid_constant__ carried_signals counted,
                            const __grid_constant__ carried_signals carried, int32_t words) {
  count(counted);
  set_words(carried, 0, words);
}

__global__ void wait_signals(const __grid_constant__ carried_awaited awaited, int32_t from,
                             int32_t words, const __grid_constant__ carried_signals counted) {
  for (int i = (int)threadIdx.x; i < awaited.signals.n * words; i += (int)blockDim.x)
    wait_for(awaited, i / words, from + i % words);
  count(counted);
}

__global__ void set_stamp(uint64_t *word, uint64_t stamp) { *word = stamp; }

/* Stamps as a launch carries them. */
struct carried_stamps {
  hcp_stamp stamp[HCP_CUDA_SIGNALS_MAX];
  int32_t n;
};

/* Acquires from the host: whatever ended the exchange, `aborted` was set before. */
__global__ void end_exchange(hcp_watch *watch, uint64_t number,
                             const __grid_constant__ carried_stamps stamps) {
  if (acquired(&watch->aborted) != 0) __trap();
  for (int32_t i = 0; i < stamps.n; ++i) {
    const hcp_stamp &stamp = stamps.stamp[i];
    if (*stamp.word != stamp.value)
      report(&watch->other, HCP_OTHER_CALL, stamp.peer, stamp.value, *stamp.word);
  }
  if (number != 0) release(&watch->ended, number);
}

hcp_status hcp_cuda_signal_tell(hcp_signals counted, hcp_signals signals, int32_t words,
                                cudaStream_t stream, hcp_error *err) {
  carried_signals raised, carried;
  hcp_status status = fill(&raised, counted, err);
  if (status == HCP_OK) status = fill(&carried, signals, err);
  if (status != HCP_OK || raised.n + carried.n == 0) return status;
  set_signals<<<1, HCP_THREADS, 0, stream>>>(raised, carried, words);
  return hcp_cuda_launched("signal_set", err);
}

hcp_status hcp_cuda_signal_set(hcp_signals signals, int32_t words, void *stream, hcp_error *err) {
  return hcp_cuda_signal_tell(signals, signals, words, (cudaStream_t)stream, err);
}

hcp_status hcp_cuda_signal_wait(hcp_awaited awaited, int32_t from, int32_t to, hcp_signals counted,
                                cudaStream_t stream, hcp_error *err) {
  carried_awaited carried;
  carried_signals raised;
  hcp_status status = fill(&carried, awaited, err);
  if (status == HCP_OK) status = fill(&raised, counted, err);
  if (status != HCP_OK || carried.signals.n + raised.n == 0) return status;
  wait_signals<<<1, HCP_THREADS, 0, stream>>>(carried, from, to - from, raised);
  return hcp_cuda_launched("signal_wait", err);
}

hcp_status hcp_cuda_stamp_set(uint64_t *word, uint64_t stamp, void *stream, hcp_error *err) {
  set_stamp<<<1, 1, 0, (cudaStream_t)stream>>>(word, stamp);
  return hcp_cuda_launched("stamp_set", err);
}

/* As many launches as it takes to carry all stamps; the last one says that it has ended. */
hcp_status hcp_cuda_exchange_end(hcp_watch *watch, uint64_t number, const hcp_stamp *stamps,
                                 int64_t n, void *stream, hcp_error *err) {
  bool last = false;
  for (int64_t first = 0; !last; first += HCP_CUDA_SIGNALS_MAX) {
    last = n - first <= HCP_CUDA_SIGNALS_MAX;
    carried_stamps carried;
    carried.n = last ? (int32_t)(n - first) : HCP_CUDA_SIGNALS_MAX;
    for (int32_t i = 0; i < carried.n; ++i) carried.stamp[i] = stamps[first + i];
    end_exchange<<<1, 1, 0, (cudaStream_t)stream>>>(watch, last ? number : 0, carried);
    hcp_status status = hcp_cuda_launched("exchange_end", err);
    if (status != HCP_OK) return status;
  }
  return HCP_OK;
}
