/* nccl.h - rows exchanged on a communicator that somebody else made.
 *
 * NCCL is found in the process at run time, where torch has loaded it: hcp links
 * to none, and a machine without NCCL is told so at the first call. */
#ifndef HCP_NCCL_H
#define HCP_NCCL_H

#include <stddef.h>

#include "hcp/hcp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes that go to, or come from, a rank of the communicator. */
typedef struct hcp_transfer {
  int32_t peer;
  void *data;
  size_t bytes;
} hcp_transfer;

/* Send and receive all of them as one group, queued on a stream (a cudaStream_t):
 * nothing is waited for. communicator is an ncclComm_t, borrowed for the call;
 * its ranks have been connected before, so that only those that exchange call. */
hcp_status hcp_nccl_exchange(void *communicator, const hcp_transfer *sends, int64_t n_sends,
                             const hcp_transfer *receives, int64_t n_receives, void *stream,
                             hcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
