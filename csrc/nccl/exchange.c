/* exchange.c - one group of sends and receives.
 *
 * NCCL's functions are declared here, by its stable C interface, so that
 * hcp builds where its header is not. */
#include <dlfcn.h>
#include <stdio.h>

#include "hcp/nccl.h"

enum { NCCL_SUCCESS = 0, NCCL_UINT8 = 1, NCCL_IN_PROGRESS = 7 };

typedef struct nccl {
  int (*group_start)(void);
  int (*group_end)(void);
  int (*send)(const void *data, size_t count, int type, int peer, void *communicator, void *stream);
  int (*receive)(void *data, size_t count, int type, int peer, void *communicator, void *stream);
  const char *(*error_text)(int result);
} nccl;

static hcp_status fail(hcp_error *err, hcp_status status, const char *what, const char *why) {
  if (err != NULL) {
    err->status = status;
    snprintf(err->message, sizeof err->message, "%s: %s", what, why);
  }
  return status;
}

/* Functions come from dlsym as data pointers, which C may not convert. */
static int find(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  *(void **)function = symbol;
  return symbol != NULL;
}

static hcp_status load(nccl *n, hcp_error *err) {
  void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL)
    return fail(err, HCP_DEVICE, "libnccl.so.2 is not loaded",
                "expected a torch that was built with NCCL");
  if (!find(library, "ncclGroupStart", &n->group_start) ||
      !find(library, "ncclGroupEnd", &n->group_end) || !find(library, "ncclSend", &n->send) ||
      !find(library, "ncclRecv", &n->receive) ||
      !find(library, "ncclGetErrorString", &n->error_text))
    return fail(err, HCP_DEVICE, "libnccl.so.2 lacks a function", "expected NCCL 2.7 or later");
  return HCP_OK;
}

static char *rows_of(hcp_column buffer, const hcp_move *move) {
  return (char *)buffer.data + move->row * buffer.row_bytes;
}

static size_t bytes_of(hcp_column buffer, const hcp_move *move) {
  return (size_t)(move->rows * buffer.row_bytes);
}

static int receive_all(const nccl *n, void *communicator, hcp_column received,
                       const hcp_move *receives, int64_t n_receives, void *stream) {
  int result = NCCL_SUCCESS;
  for (const hcp_move *m = receives; m < receives + n_receives && result == NCCL_SUCCESS; m++)
    result = n->receive(rows_of(received, m), bytes_of(received, m), NCCL_UINT8, (int)m->peer,
                        communicator, stream);
  return result;
}

static int send_all(const nccl *n, void *communicator, hcp_column sent, const hcp_move *sends,
                    int64_t n_sends, void *stream) {
  int result = NCCL_SUCCESS;
  for (const hcp_move *m = sends; m < sends + n_sends && result == NCCL_SUCCESS; m++)
    result = n->send(rows_of(sent, m), bytes_of(sent, m), NCCL_UINT8, (int)m->peer, communicator,
                     stream);
  return result;
}

hcp_status hcp_nccl_exchange(void *communicator, hcp_column sent, const hcp_move *sends,
                             int64_t n_sends, hcp_column received, const hcp_move *receives,
                             int64_t n_receives, void *stream, hcp_error *err) {
  nccl n;
  hcp_status status = load(&n, err);
  if (status != HCP_OK) return status;
  int result = n.group_start();
  if (result != NCCL_SUCCESS) return fail(err, HCP_DEVICE, "ncclGroupStart", n.error_text(result));
  result = receive_all(&n, communicator, received, receives, n_receives, stream);
  if (result == NCCL_SUCCESS) result = send_all(&n, communicator, sent, sends, n_sends, stream);
  int ended = n.group_end(); /* also after a failure, or the group would stay open */
  if (result == NCCL_SUCCESS && ended != NCCL_IN_PROGRESS) result = ended;
  if (result != NCCL_SUCCESS)
    return fail(err, HCP_DEVICE, "exchange by NCCL", n.error_text(result));
  return HCP_OK;
}
