/* test_layout.c - every token of a micro-batch lies on one rank, in one place. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

/* Marks the tokens of one rank and checks what its layout says of them. */
static void mark(const hcp_plan *plan, const hcp_layout *layout, char *seen, int64_t width) {
  int64_t row = 0;
  for (int32_t s = 0; s < layout->span_count; s++) {
    hcp_span span = layout->spans[s];
    CHECK(span.rows >= 1);
    CHECK(row >= layout->cu_seqlens[span.slot]);
    CHECK(row + span.rows <= layout->cu_seqlens[span.slot + 1]);
    for (int64_t i = 0; i < span.rows; i++) {
      CHECK_INT(layout->positions[row++], span.start + i);
      seen[layout->sequences[span.slot] * width + span.start + i]++;
    }
    CHECK_INT(layout->lengths[span.slot], plan->lengths[layout->sequences[span.slot]]);
  }
  CHECK_INT(row, layout->rows);
  CHECK_INT(layout->cu_seqlens[layout->sequence_count], layout->rows);
  CHECK(layout->rows <= plan->limits.max_tokens_per_rank);
}

static void every_token_lies_on_one_rank(void) {
  enum { WIDTH = 13 * 40 };
  for (int32_t i = 0; i < 300; i++) {
    hcp_plan *plan = draw_plan(13);
    char *seen = calloc(DRAW_SEQUENCES * WIDTH, 1);
    for (int32_t m = 0; m < plan->micro_batch_count; m++)
      for (int32_t rank = 0; rank < plan->limits.ranks; rank++) {
        hcp_layout *layout = NULL;
        CHECK_INT(hcp_layout_create(plan, m, rank, &layout, NULL), HCP_OK);
        mark(plan, layout, seen, WIDTH);
        hcp_layout_destroy(layout);
      }
    for (int32_t s = 0; s < plan->n; s++)
      for (int64_t t = 0; t < WIDTH; t++) CHECK_INT(seen[s * WIDTH + t], t < plan->lengths[s]);
    free(seen);
    hcp_plan_destroy(plan);
  }
}

static void bad_places_are_refused(void) {
  const int64_t length = 9;
  const hcp_limits limits = draw_limits(2, 2, 2, 8);
  hcp_plan *plan = NULL;
  hcp_layout *layout = NULL;
  hcp_error err;
  CHECK_INT(
      hcp_plan_create(&length, 1, &limits, &(hcp_cost){.pair = 1, .token = 1}, 1, &plan, NULL),
      HCP_OK);
  CHECK_INT(hcp_layout_create(plan, 1, 0, &layout, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "micro_batch is 1, expected 0 to 0");
  CHECK_INT(hcp_layout_create(plan, 0, -1, &layout, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "rank is -1, expected 0 to 1");
  CHECK(layout == NULL);
  hcp_plan_destroy(plan);
}

int main(void) {
  every_token_lies_on_one_rank();
  bad_places_are_refused();
  hcp_layout_destroy(NULL);
  return check_report("test_layout");
}
