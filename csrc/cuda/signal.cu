/* signal.cu - signals set and waited for by launches of their own, and the end of an exchange. */
#include "signal.cuh"

__global__ void set_signals(const __grid_constant__ signal_table table, int32_t words) {
  set_words(table, 0, words);
}

__global__ void wait_signals(const __grid_constant__ awaited_table awaited, int32_t from,
                             int32_t words) {
  for (int i = (int)threadIdx.x; i < awaited.table.n * words; i += (int)blockDim.x)
    wait_for(awaited, i / words, from + i % words);
}

/* Acquires from the host: whatever ended the exchange, `aborted` was set before. */
__global__ void end_exchange(hcp_watch *watch, uint64_t number) {
  if (acquired(&watch->aborted) != 0) __trap();
  if (number != 0) release(&watch->ended, number);
}

hcp_status hcp_cuda_signal_set(hcp_signals signals, int32_t words, void *stream, hcp_error *err) {
  signal_table table;
  hcp_status status = fill(&table, signals, err);
  if (status != HCP_OK || table.n == 0) return status;
  set_signals<<<1, HCP_THREADS, 0, (cudaStream_t)stream>>>(table, words);
  return hcp_cuda_launched("signal_set", err);
}

hcp_status hcp_cuda_signal_wait(hcp_awaited awaited, int32_t from, int32_t to, cudaStream_t stream,
                                hcp_error *err) {
  awaited_table table;
  hcp_status status = fill(&table, awaited, err);
  if (status != HCP_OK || table.table.n == 0) return status;
  wait_signals<<<1, HCP_THREADS, 0, stream>>>(table, from, to - from);
  return hcp_cuda_launched("signal_wait", err);
}

hcp_status hcp_cuda_exchange_end(hcp_watch *watch, uint64_t number, void *stream, hcp_error *err) {
  end_exchange<<<1, 1, 0, (cudaStream_t)stream>>>(watch, number);
  return hcp_cuda_launched("exchange_end", err);
}
