/* nccl.h - exchange of rows on a communicator that somebody else made.
 *
 * hcp does not link to NCCL. It finds the one that torch has loaded, at run time. If
 * there is none, the first call returns an error. */
#ifndef HCP_NCCL_H
#define HCP_NCCL_H

#include <stddef.h>

#include "hcp/hcp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes that go to a rank of the communicator, or come from it. */
typedef struct hcp_transfer {
  int32_t peer;
  void *data;
  size_t bytes;
} hcp_transfer;

/* NCCL's functions, by its stable C interface. A result is 0, or an error's number. */
typedef struct hcp_nccl {
  int (*group_start)(void);
  int (*group_end)(void);
  int (*send)(const void *data, size_t count, int type, int peer, void *communicator, void *stream);
  int (*receive)(void *data, size_t count, int type, int peer, void *communicator, void *stream);
  int (*async_error)(void *communicator, int *result);
  const char *(*error_text)(int result);
  const char *(*last_error)(void *communicator); /* NULL before NCCL 2.13 */
} hcp_nccl;

/* Find them in the process, once for all exchanges. HCP_DEVICE: no NCCL is loaded,
 * or it is older than 2.7. */
hcp_status hcp_nccl_load(hcp_nccl *nccl, hcp_error *err);

/* Send and receive all of them as one group, queued on a stream (a cudaStream_t):
 * nothing is waited for. communicator is an ncclComm_t, borrowed for the call;
 * its ranks have been connected before, so that only those that exchange call.
 * One that does not block queues in the background: the call returns when it has,
 * or after timeout_ns with what it still says.
 *
 * HCP_DEVICE carries NCCL's words, and the peer whose transfer it refused. */
hcp_status hcp_nccl_exchange(const hcp_nccl *nccl, void *communicator, const hcp_transfer *sends,
                             int64_t n_sends, const hcp_transfer *receives, int64_t n_receives,
                             int64_t timeout_ns, void *stream, hcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
