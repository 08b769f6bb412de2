/* nccl.h - rows exchanged on a communicator that somebody else made.
 *
 * NCCL is found in the process at run time, where torch has loaded it: hcp links
 * to none, and a machine without NCCL is told so at the first call. */
#ifndef HCP_NCCL_H
#define HCP_NCCL_H

#include "hcp/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of two buffers sent and received as one group, queued on a stream (a
 * cudaStream_t): nothing is waited for. Rows of a buffer lie end to end. Peers are
 * ranks of the communicator, an ncclComm_t, borrowed for the call; its ranks have
 * been connected before, so that only those that exchange call. */
hcp_status hcp_nccl_exchange(void *communicator, hcp_column sent, const hcp_move *sends,
                             int64_t n_sends, hcp_column received, const hcp_move *receives,
                             int64_t n_receives, void *stream, hcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
