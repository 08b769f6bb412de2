/* exchange.c - one group of sends and receives.
 *
 * hcp/nccl.h declares NCCL's functions, so that hcp builds without NCCL's own
 * header. */
#define _POSIX_C_SOURCE 199309L /* NOLINT(bugprone-reserved-identifier): POSIX's own name */
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

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
      !find(library, "ncclCommGetAsyncError", &nccl->async_error) ||
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

/* What a communicator that does not block accepts, it is at work on. */
static int refused(int result) { return result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS; }

static failure queue_all(const hcp_nccl *nccl, void *communicator, const hcp_transfer *sends,
                         int64_t n_sends, const hcp_transfer *receives, int64_t n_receives,
                         void *stream) {
  for (int64_t i = 0; i < n_receives; i++) {
    const hcp_transfer *from = &receives[i];
    int result =
        nccl->receive(from->data, from->bytes, NCCL_UINT8, from->peer, communicator, stream);
    if (refused(result)) return (failure){result, "ncclRecv", from->peer};
  }
  for (int64_t i = 0; i < n_sends; i++) {
    const hcp_transfer *to = &sends[i];
    int result = nccl->send(to->data, to->bytes, NCCL_UINT8, to->peer, communicator, stream);
    if (refused(result)) return (failure){result, "ncclSend", to->peer};
  }
  return (failure){NCCL_SUCCESS, "", -1};
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* What comes of a result: until the work is on its stream, nothing may be queued
 * behind it. */
static int settled(const hcp_nccl *nccl, void *communicator, int result, int64_t timeout_ns) {
  const struct timespec pause = {0, 20000};
  int64_t start = nanoseconds();
  while (result == NCCL_IN_PROGRESS && nanoseconds() - start <= timeout_ns) {
    int asked = nccl->async_error(communicator, &result);
    if (asked != NCCL_SUCCESS) return asked;
    if (result == NCCL_IN_PROGRESS) nanosleep(&pause, NULL);
  }
  return result;
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
                             int64_t timeout_ns, void *stream, hcp_error *err) {
  int result = nccl->group_start();
  if (result != NCCL_SUCCESS)
    return report(nccl, communicator, (failure){result, "ncclGroupStart", -1}, err);
  failure f = queue_all(nccl, communicator, sends, n_sends, receives, n_receives, stream);
  int ended = nccl->group_end(); /* also after a failure, or the group would stay open */
  if (f.result == NCCL_SUCCESS)
    f = (failure){settled(nccl, communicator, ended, timeout_ns), "ncclGroupEnd", -1};
  return f.result == NCCL_SUCCESS ? HCP_OK : report(nccl, communicator, f, err);
}
