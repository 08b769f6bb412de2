/* exchange.c - one group of sends and receives.
 *
 * NCCL's functions are declared by hcp/nccl.h, so that hcp builds where NCCL's
 * own header is not. */
#include <dlfcn.h>
#include <stdio.h>

#include "hcp/fail.h"
#include "hcp/nccl.h"

enum { NCCL_SUCCESS = 0, NCCL_UINT8 = 1, NCCL_IN_PROGRESS = 7 };

/* Functions come from dlsym as data pointers, which C may not convert. */
static int find(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  *(void **)function = symbol;
  return symbol != NULL;
}

hcp_status hcp_nccl_load(hcp_nccl *nccl, hcp_error *err) {
  void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL)
    return hcp__fail(err, HCP_DEVICE,
                     "libnccl.so.2 is not loaded: expected a torch that was built with NCCL");
  find(library, "ncclGetLastError", &nccl->last_error);
  if (!find(library, "ncclGroupStart", &nccl->group_start) ||
      !find(library, "ncclGroupEnd", &nccl->group_end) || !find(library, "ncclSend", &nccl->send) ||
      !find(library, "ncclRecv", &nccl->receive) ||
      !find(library, "ncclGetErrorString", &nccl->error_text))
    return hcp__fail(err, HCP_DEVICE, "libnccl.so.2 lacks a function: expected NCCL 2.7 or later");
  return HCP_OK;
}

/* A call that failed. */
typedef struct failure {
  int result;
  const char *call;
  int32_t peer; /* -1: all */
} failure;

static failure queue_all(const hcp_nccl *nccl, void *communicator, const hcp_transfer *sends,
                         int64_t n_sends, const hcp_transfer *receives, int64_t n_receives,
                         void *stream) {
  for (int64_t i = 0; i < n_receives; i++) {
    const hcp_transfer *from = &receives[i];
    int result =
        nccl->receive(from->data, from->bytes, NCCL_UINT8, from->peer, communicator, stream);
    if (result != NCCL_SUCCESS) return (failure){result, "ncclRecv", from->peer};
  }
  for (int64_t i = 0; i < n_sends; i++) {
    const hcp_transfer *to = &sends[i];
    int result = nccl->send(to->data, to->bytes, NCCL_UINT8, to->peer, communicator, stream);
    if (result != NCCL_SUCCESS) return (failure){result, "ncclSend", to->peer};
  }
  return (failure){NCCL_SUCCESS, "", -1};
}

static hcp_status report(const hcp_nccl *nccl, void *communicator, failure f, hcp_error *err) {
  const char *last = nccl->last_error ? nccl->last_error(communicator) : NULL;
  char peer[32] = "";
  if (f.peer >= 0) snprintf(peer, sizeof peer, " with rank %d", (int)f.peer);
  return hcp__fail(err, HCP_DEVICE, "%s%s: %s (%d)%s%s", f.call, peer, nccl->error_text(f.result),
                   f.result, last && *last ? ": " : "", last ? last : "");
}

hcp_status hcp_nccl_exchange(const hcp_nccl *nccl, void *communicator, const hcp_transfer *sends,
                             int64_t n_sends, const hcp_transfer *receives, int64_t n_receives,
                             void *stream, hcp_error *err) {
  int result = nccl->group_start();
  if (result != NCCL_SUCCESS)
    return report(nccl, communicator, (failure){result, "ncclGroupStart", -1}, err);
  failure f = queue_all(nccl, communicator, sends, n_sends, receives, n_receives, stream);
  int ended = nccl->group_end(); /* also after a failure, or the group would stay open */
  if (f.result == NCCL_SUCCESS && ended != NCCL_SUCCESS && ended != NCCL_IN_PROGRESS)
    f = (failure){ended, "ncclGroupEnd", -1};
  return f.result == NCCL_SUCCESS ? HCP_OK : report(nccl, communicator, f, err);
}
