/* test_exchange.c - which calls an exchange makes, by a library that only notes them. */
#include "../check.h"
#include "hcp/nccl.h"
#include "stub.h"

enum { IN_PROGRESS = 7, INVALID_USAGE = 5, UINT8 = 1 };

static char sent[60], received[40];
static int communicator, stream;
static const hcp_move sends[] = {{1, 2, 3}, {4, 5, 0}};
static const hcp_move receives[] = {{3, 1, 2}};
static hcp_error err;

static hcp_status exchange(int failing, int failure) {
  nccl_n = 0;
  nccl_failing = failing;
  nccl_failure = failure;
  return hcp_nccl_exchange(&communicator, (hcp_column){sent, 6, 6}, sends, 2,
                           (hcp_column){received, 10, 10}, receives, 1, &stream, &err);
}

static const char *noted(void) {
  static char text[NCCL_CALLS + 1];
  for (int i = 0; i < nccl_n; i++) text[i] = nccl_calls[i].what;
  text[nccl_n] = 0;
  return text;
}

static void check_move(int i, const void *data, size_t bytes, int peer) {
  CHECK(nccl_calls[i].data == data);
  CHECK_INT(nccl_calls[i].count, bytes);
  CHECK_INT(nccl_calls[i].type, UINT8);
  CHECK_INT(nccl_calls[i].peer, peer);
  CHECK(nccl_calls[i].communicator == &communicator);
  CHECK(nccl_calls[i].stream == &stream);
}

static void test_rows_travel_as_bytes_in_one_group(void) {
  CHECK_INT(exchange(-1, 0), HCP_OK);
  CHECK(strcmp(noted(), "(<>>)") == 0);
  check_move(1, received + 10, 20, 3);
  check_move(2, sent + 12, 18, 1);
  check_move(3, sent + 30, 0, 4);
}

static void test_a_group_whose_end_is_in_progress_is_queued(void) {
  CHECK_INT(exchange(4, IN_PROGRESS), HCP_OK);
}

static void test_a_failure_ends_the_group_and_says_why(void) {
  const char *calls[] = {"(", "(<)", "(<>)", "(<>>)", "(<>>)"};
  for (int k = 0; k < 5; k++) {
    CHECK_INT(exchange(k, INVALID_USAGE), HCP_DEVICE);
    CHECK(strcmp(noted(), calls[k]) == 0);
    CHECK_TEXT(err.message,
               k == 0 ? "ncclGroupStart: invalid usage" : "exchange by NCCL: invalid usage");
  }
}

int main(void) {
  test_rows_travel_as_bytes_in_one_group();
  test_a_group_whose_end_is_in_progress_is_queued();
  test_a_failure_ends_the_group_and_says_why();
  return check_report("test_exchange");
}
