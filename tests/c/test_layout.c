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
    CHECK(row >= layout->cu_seqlens[span.index]);
    CHECK(row + span.rows <= layout->cu_seqlens[span.index + 1]);
    for (int64_t i = 0; i < span.rows; i++) {
      CHECK_INT(layout->positions[row++], span.start + i);
      seen[layout->sequences[span.index] * width + span.start + i]++;
    }
    CHECK_INT(layout->lengths[span.index], plan->lengths[layout->sequences[span.index]]);
  }
  CHECK_INT(row, layout->rows - layout->padding);
  CHECK_INT(layout->cu_seqlens[layout->sequence_count], row);
  for (; row < layout->rows; row++) CHECK_INT(layout->positions[row], 0);
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

static hcp_plan *draw_aligned_plan(void) {
  hcp_plan *plan = NULL;
  draw_case c = draw_request(9);
  c.limits.alignment = draw(2, 9);
  c.limits.max_tokens_per_rank += 2 * c.limits.alignment; /* room for what was drawn */
  CHECK_INT(hcp_plan_create(c.lengths, c.n, &c.limits, &c.cost, 1, NULL, &plan, NULL), HCP_OK);
  return plan;
}

/* Rows that the rank has in all micro-batches; counts tokens into *tokens. */
static int64_t aligned_rows(const hcp_plan *plan, int32_t rank, int64_t *tokens) {
  int64_t rows = 0;
  for (int32_t m = 0; m < plan->micro_batch_count; m++) {
    hcp_layout *layout = NULL;
    CHECK_INT(hcp_layout_create(plan, m, rank, &layout, NULL), HCP_OK);
    CHECK_INT(layout->rows % plan->limits.alignment, 0);
    CHECK(layout->padding < plan->limits.alignment);
    CHECK(layout->rows <= plan->limits.max_tokens_per_rank);
    CHECK_INT(layout->cu_seqlens[layout->sequence_count], layout->rows - layout->padding);
    if (layout->degree > 0) CHECK_INT(layout->paddings[rank - layout->first_rank], layout->padding);
    *tokens += layout->rows - layout->padding;
    rows += layout->rows;
    hcp_layout_destroy(layout);
  }
  return rows;
}

/* What arrives is tokens, and zeros for the rest. */
static void alignment_pads_rows_and_what_is_sent_to_them(void) {
  static int32_t sources[DRAW_SEQUENCES];
  for (int32_t i = 0; i < 200; i++) {
    hcp_plan *plan = draw_aligned_plan();
    int64_t tokens = 0, wanted = 0;
    for (int32_t s = 0; s < plan->n; s++) wanted += plan->lengths[s];
    for (int32_t rank = 0; rank < plan->limits.ranks; rank++) {
      for (int32_t reverse = 0; reverse < 2; reverse++) {
        hcp_table *route = NULL;
        CHECK_INT(hcp_route_dispatch(plan, sources, rank, 0, plan->micro_batch_count, reverse,
                                     &route, NULL),
                  HCP_OK);
        int64_t before = tokens, rows = aligned_rows(plan, rank, &tokens);
        const int64_t *sizes = section(route, HCP_ROUTE_SIZES);
        CHECK_INT(sizes[reverse ? 0 : 3], rows);
        CHECK_INT(sizes[reverse ? 1 : 2], tokens - before);
        if (reverse) tokens = before;
        hcp_table_destroy(route);
      }
    }
    CHECK_INT(tokens, wanted);
    hcp_plan_destroy(plan);
  }
}

/* Ways of rounding: rests of lengths by twice the degree, but for 0. */
static int32_t count_rests(const int64_t *lengths, int32_t n, int32_t degree) {
  int32_t count = 0;
  for (int32_t rest = 1; rest < 2 * degree; rest++)
    for (int32_t i = 0; i < n; i++)
      if (lengths[i] % (2 * (int64_t)degree) == rest) {
        count++;
        break;
      }
  return count;
}

/* A group of all ranks, as static context parallelism has it. */
static hcp_plan *plan_of_one_group(const int64_t *lengths, int32_t n, int32_t degree) {
  int32_t *order = calloc((size_t)n, sizeof *order);
  for (int32_t i = 0; i < n; i++) order[i] = i;
  const hcp_limits limits = draw_limits(degree, degree, degree, 1 << 20);
  const hcp_micro_batch batch = {.first_group = 0, .groups = 1};
  const hcp_group group = {.degree = degree, .sequences = n};
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create_from(lengths, n, &limits, &(hcp_cost){.pair = 1, .token = 1}, &batch, 1,
                                 &group, 1, order, &plan, NULL),
            HCP_OK);
  free(order);
  return plan;
}

static void no_rank_is_two_rows_from_its_share_for_each_rest(void) {
  enum { MOST = 300 };
  for (int32_t i = 0; i < 200; i++) {
    int64_t lengths[MOST], total = 0;
    int32_t n = draw(1, MOST), degree = draw(1, 9), kinds = draw(1, 40), least = draw(1, 20);
    for (int32_t s = 0; s < n; s++) total += lengths[s] = draw(least, least + kinds - 1);
    hcp_plan *plan = plan_of_one_group(lengths, n, degree);
    int64_t most = 2 * (int64_t)count_rests(lengths, n, degree) * degree;
    for (int32_t rank = 0; rank < degree; rank++) {
      hcp_layout *layout = NULL;
      CHECK_INT(hcp_layout_create(plan, 0, rank, &layout, NULL), HCP_OK);
      CHECK(layout->rows * degree - total <= most);
      CHECK(total - layout->rows * degree <= most);
      hcp_layout_destroy(layout);
    }
    hcp_plan_destroy(plan);
  }
}

static void bad_places_are_refused(void) {
  const int64_t length = 9;
  const hcp_limits limits = draw_limits(2, 2, 2, 8);
  hcp_plan *plan = NULL;
  hcp_layout *layout = NULL;
  hcp_error err;
  CHECK_INT(hcp_plan_create(&length, 1, &limits, &(hcp_cost){.pair = 1, .token = 1}, 1, NULL, &plan,
                            NULL),
            HCP_OK);
  CHECK_INT(hcp_layout_create(plan, 1, 0, &layout, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "micro_batch is 1, expected >= 0 and < 1 (the plan's micro-batches)");
  CHECK_INT(hcp_layout_create(plan, 0, -1, &layout, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "rank is -1, expected 0 to 1");
  CHECK(layout == NULL);
  hcp_plan_destroy(plan);
}

int main(void) {
  every_token_lies_on_one_rank();
  alignment_pads_rows_and_what_is_sent_to_them();
  no_rank_is_two_rows_from_its_share_for_each_rest();
  bad_places_are_refused();
  hcp_layout_destroy(NULL);
  return check_report("test_layout");
}
