/* test_absent.c - a process without NCCL is told so. */
#include "../check.h"
#include "hcp/nccl.h"

int main(void) {
  hcp_error err;
  hcp_column none = {NULL, 1, 1};
  CHECK_INT(hcp_nccl_exchange(NULL, none, NULL, 0, none, NULL, 0, NULL, &err), HCP_DEVICE);
  CHECK_TEXT(err.message, "libnccl.so.2 is not loaded: expected a torch that was built with NCCL");
  return check_report("test_absent");
}
