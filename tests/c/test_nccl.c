/* NCCL's functions, called in order, and what a refusal says: with functions of
 * this test in their place. */
#include "hcp/nccl.h"

#include "check.h"

static char called[512];
/* What the functions give. */
static int refused_peer, refused_start, ended;
static int asked, at_work, settled, refused_asking;

static void note(const char *what, int peer, size_t bytes) {
  size_t used = strlen(called);
  snprintf(called + used, sizeof called - used, "%s %d %zu; ", what, peer, bytes);
}

static int start(void) {
  note("start", 0, 0);
  return refused_start;
}

static int end(void) {
  note("end", 0, 0);
  return ended;
}

static int send(const void *data, size_t bytes, int type, int peer, void *communicator,
                void *stream) {
  CHECK(data != NULL && communicator == called && stream == &ended && type == 1);
  note("send", peer, bytes);
  return peer == refused_peer ? 4 : ended == 7 ? 7 : 0;
}

static int receive(void *data, size_t bytes, int type, int peer, void *communicator, void *stream) {
  CHECK(data != NULL && communicator == called && stream == &ended && type == 1);
  note("receive", peer, bytes);
  return peer == refused_peer ? 4 : 0;
}

/* In progress for so many questions. */
static int async_error(void *communicator, int *result) {
  CHECK(communicator == called);
  *result = asked++ < at_work ? 7 : settled;
  return refused_asking;
}

static const char *text(int result) {
  return result == 4 ? "invalid argument" : result == 7 ? "in progress" : "system error";
}

static const char *details(void *communicator) {
  CHECK(communicator == called);
  return "the peer is gone";
}

static hcp_nccl functions(void) {
  return (hcp_nccl){start, end, send, receive, async_error, text, details};
}

static hcp_status exchange_within(int64_t timeout_ns, hcp_nccl nccl, hcp_error *err) {
  static char memory[8];
  const hcp_transfer sends[] = {{1, memory, 3}, {2, memory, 5}}, receives[] = {{2, memory, 8}};
  called[0] = '\0';
  return hcp_nccl_exchange(&nccl, called, sends, 2, receives, 1, timeout_ns, &ended, err);
}

static hcp_status exchange(hcp_nccl nccl, hcp_error *err) {
  return exchange_within(INT64_C(60000000000), nccl, err);
}

static void all_transfers_are_one_group(void) {
  refused_peer = -1;
  refused_start = ended = 0;
  CHECK_INT(exchange(functions(), NULL), HCP_OK);
  CHECK_TEXT(called, "start 0 0; receive 2 8; send 1 3; send 2 5; end 0 0; ");
  CHECK_INT(asked, 0);
}

static void work_in_progress_is_waited_for(void) {
  hcp_error err;
  refused_peer = -1;
  refused_start = 0;
  ended = 7;
  at_work = 3;
  CHECK_INT(exchange(functions(), NULL), HCP_OK);
  CHECK_INT(asked, 4);
  asked = 0;
  settled = 2;
  CHECK_INT(exchange(functions(), &err), HCP_DEVICE);
  CHECK_INT(asked, 4);
  CHECK_TEXT(err.message, "ncclGroupEnd: system error (2): the peer is gone");
  refused_asking = 4;
  CHECK_INT(exchange(functions(), &err), HCP_DEVICE);
  CHECK_TEXT(err.message, "ncclGroupEnd: invalid argument (4)");
  refused_asking = asked = 0;
  at_work = INT32_MAX;
  CHECK_INT(exchange_within(1000000, functions(), &err), HCP_DEVICE);
  CHECK_TEXT(err.message, "ncclGroupEnd: in progress (7)");
  refused_peer = 1; /* a refusal is not waited for */
  asked = 0;
  CHECK_INT(exchange(functions(), &err), HCP_DEVICE);
  CHECK_INT(asked, 0);
  CHECK_TEXT(err.message, "ncclSend with rank 1: invalid argument (4)");
}

static void a_refusal_names_the_call_and_the_peer(void) {
  hcp_error err;
  refused_start = ended = 0;
  refused_peer = 1;
  CHECK_INT(exchange(functions(), &err), HCP_DEVICE);
  CHECK_TEXT(called, "send 1 3; end 0 0; "); /* the group is closed, and nothing follows */
  CHECK_TEXT(err.message, "ncclSend with rank 1: invalid argument (4): the peer is gone");
  refused_peer = 2;
  CHECK_INT(exchange(functions(), &err), HCP_DEVICE);
  CHECK_TEXT(err.message, "ncclRecv with rank 2: invalid argument (4)");
  CHECK_INT(exchange(functions(), NULL), HCP_DEVICE);
}

static void what_concerns_no_peer_names_none(void) {
  hcp_error err;
  hcp_nccl old = functions();
  old.last_error = NULL;
  refused_peer = -1;
  ended = 2;
  CHECK_INT(exchange(old, &err), HCP_DEVICE);
  CHECK_INT(strcmp(err.message, "ncclGroupEnd: system error (2)"), 0);
  refused_start = 4;
  CHECK_INT(exchange(functions(), &err), HCP_DEVICE);
  CHECK_TEXT(err.message, "ncclGroupStart: invalid argument (4)");
  CHECK_INT(strcmp(called, "start 0 0; "), 0);
}

static void a_process_without_nccl_is_told(void) {
  hcp_error err;
  hcp_nccl nccl;
  CHECK_INT(hcp_nccl_load(&nccl, &err), HCP_DEVICE);
  CHECK_TEXT(err.message, "libnccl.so.2 is not loaded: expected a torch that was built with NCCL");
}

int main(void) {
  all_transfers_are_one_group();
  work_in_progress_is_waited_for();
  a_refusal_names_the_call_and_the_peer();
  what_concerns_no_peer_names_none();
  a_process_without_nccl_is_told();
  return check_report("test_nccl");
}
