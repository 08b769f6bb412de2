/* stub.h - a library of NCCL's name and functions that notes what it is asked for. */
#ifndef HCP_TESTS_NCCL_STUB_H
#define HCP_TESTS_NCCL_STUB_H

#include <stddef.h>

typedef struct nccl_call {
  char what; /* ( ) group, > send, < receive */
  const void *data;
  size_t count;
  int type, peer;
  void *communicator, *stream;
} nccl_call;

enum { NCCL_CALLS = 16 };

extern nccl_call nccl_calls[NCCL_CALLS];
extern int nccl_n;
extern int nccl_failing;   /* the call that fails, counted from 0, or -1 */
extern int nccl_failure;   /* with which result */

#endif
