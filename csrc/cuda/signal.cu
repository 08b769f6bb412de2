/* signal.cu - signals set and waited for by launches of their own, and the end of an exchange. */
#include "signal.cuh"

__global__ void set_signals(const __grid_constant__ carried_signals carried, int32_t words) {
  set_words(carried, 0, words);
}

__global__ void wait_signals(const __grid_constant__ carried_awaited awaited, int32_t from,
                             int32_t words) {
  for (int i = (int)threadIdx.x; i < awaited.signals.n * words; i += (int)blockDim.x)
    wait_for(awaited, i / words, from + i % words);
}

__global__ void set_stamp(uint64_t *word, uint64_t stamp) { *word = stamp; }

/* Acquires from the host: whatever ended the exchange, `aborted` was set before. */
__global__ void end_exchange(hcp_watch *watch, uint64_t number,
                             const __grid_constant__ carried_signals stamps) {
  if (acquired(&watch->aborted) != 0) __trap();
  for (int32_t i = 0; i < stamps.n; ++i) {
    const hcp_signal &stamp = stamps.signal[i];
    if (*stamp.word != stamp.value) report(&watch->other, 2, stamp, *stamp.word);
  }
  if (number != 0) release(&watch->ended, number);
}

hcp_status hcp_cuda_signal_set(hcp_signals signals, int32_t words, void *stream, hcp_error *err) {
  carried_signals carried;
  hcp_status status = fill(&carried, signals, err);
  if (status != HCP_OK || carried.n == 0) return status;
  set_signals<<<1, HCP_THREADS, 0, (cudaStream_t)stream>>>(carried, words);
  return hcp_cuda_launched("signal_set", err);
}

hcp_status hcp_cuda_signal_wait(hcp_awaited awaited, int32_t from, int32_t to, cudaStream_t stream,
                                hcp_error *err) {
  carried_awaited carried;
  hcp_status status = fill(&carried, awaited, err);
  if (status != HCP_OK || carried.signals.n == 0) return status;
  wait_signals<<<1, HCP_THREADS, 0, stream>>>(carried, from, to - from);
  return hcp_cuda_launched("signal_wait", err);
}

hcp_status hcp_cuda_stamp_set(uint64_t *word, uint64_t stamp, void *stream, hcp_error *err) {
  set_stamp<<<1, 1, 0, (cudaStream_t)stream>>>(word, stamp);
  return hcp_cuda_launched("stamp_set", err);
}

/* As many launches as it takes to carry all stamps; the last one says that it has ended. */
hcp_status hcp_cuda_exchange_end(hcp_watch *watch, uint64_t number, hcp_signals stamps,
                                 void *stream, hcp_error *err) {
  hcp_status status = HCP_OK;
  for (int64_t first = 0; status == HCP_OK; first += HCP_CUDA_SIGNALS_MAX) {
    int64_t left = stamps.n - first;
    bool last = left <= HCP_CUDA_SIGNALS_MAX;
    carried_signals carried;
    status = fill(&carried, {stamps.data + first, last ? left : HCP_CUDA_SIGNALS_MAX}, err);
    if (status != HCP_OK) break;
    end_exchange<<<1, 1, 0, (cudaStream_t)stream>>>(watch, last ? number : 0, carried);
    status = hcp_cuda_launched("exchange_end", err);
    if (last) break;
  }
  return status;
}
