/* stream.cu - the order of two streams. */
#include "device.cuh"

hcp_status hcp_cuda_follow(void *stream, void *ahead, hcp_error *err) {
  cudaEvent_t event;
  cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error != cudaSuccess) return hcp_cuda_status(error, "cudaEventCreate", err);
  error = cudaEventRecord(event, (cudaStream_t)ahead);
  if (error == cudaSuccess) error = cudaStreamWaitEvent((cudaStream_t)stream, event, 0);
  cudaEventDestroy(event); /* what waits for it still does */
  return hcp_cuda_status(error, "one stream after another", err);
}
