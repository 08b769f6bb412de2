/* stub.c - built as libnccl.so.2. */
#include "stub.h"

nccl_call nccl_calls[NCCL_CALLS];
int nccl_n, nccl_failing = -1, nccl_failure;

static int note(nccl_call call) {
  nccl_calls[nccl_n] = call;
  return nccl_n++ == nccl_failing ? nccl_failure : 0;
}

int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclSend(const void *data, size_t count, int type, int peer, void *communicator, void *stream);
int ncclRecv(void *data, size_t count, int type, int peer, void *communicator, void *stream);
const char *ncclGetErrorString(int result);

int ncclGroupStart(void) { return note((nccl_call){.what = '('}); }

int ncclGroupEnd(void) { return note((nccl_call){.what = ')'}); }

int ncclSend(const void *data, size_t count, int type, int peer, void *communicator, void *stream) {
  return note((nccl_call){'>', data, count, type, peer, communicator, stream});
}

int ncclRecv(void *data, size_t count, int type, int peer, void *communicator, void *stream) {
  return note((nccl_call){'<', data, count, type, peer, communicator, stream});
}

const char *ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "another"; }
