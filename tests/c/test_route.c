/* test_route.c - rows follow their routes on all ranks at once, in one process. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 7, ROWS = 8192 };

/* A row is a number: which sequence, which token. Zero is no row. */
static int64_t row_name(int32_t sequence, int64_t token) { return 100000 * (sequence + 1) + token; }

typedef struct domain {
  int32_t ranks;
  hcp_table *routes[RANKS];
  int64_t source[RANKS][ROWS], wire[RANKS][ROWS], received[RANKS][ROWS], output[RANKS][ROWS];
} domain;

static domain d;

static const int64_t *sizes(int32_t rank) { return section(d.routes[rank], HCP_ROUTE_SIZES); }

static void send(int32_t from, const int64_t *move) {
  const hcp_table *receiver = d.routes[move[0]];
  for (int64_t i = 0; i < records(receiver, HCP_ROUTE_RECEIVES); i++) {
    const int64_t *expected = section(receiver, HCP_ROUTE_RECEIVES) + 3 * i;
    if (expected[0] != from) continue;
    CHECK_INT(expected[2], move[2]);
    for (int64_t r = 0; r < move[2]; r++)
      d.received[move[0]][expected[1] + r] = d.wire[from][move[1] + r];
    return;
  }
  CHECK_TEXT("no receive", "a receive for every send");
}

static void travel(void) {
  memset(d.received, 0, sizeof d.received);
  for (int32_t rank = 0; rank < d.ranks; rank++)
    CHECK_INT(gather_rows(d.routes[rank], HCP_ROUTE_PACK, d.source[rank], d.wire[rank]),
              sizes(rank)[1]);
  int64_t sent = 0, received = 0;
  for (int32_t rank = 0; rank < d.ranks; rank++)
    for (int64_t i = 0; i < records(d.routes[rank], HCP_ROUTE_SENDS); i++) {
      send(rank, section(d.routes[rank], HCP_ROUTE_SENDS) + 3 * i);
      sent++;
    }
  for (int32_t rank = 0; rank < d.ranks; rank++) {
    received += records(d.routes[rank], HCP_ROUTE_RECEIVES);
    CHECK_INT(gather_rows(d.routes[rank], HCP_ROUTE_ARRANGE, d.received[rank], d.output[rank]),
              sizes(rank)[3]);
  }
  CHECK_INT(sent, received);
}

static void release(void) {
  for (int32_t rank = 0; rank < d.ranks; rank++) hcp_table_destroy(d.routes[rank]);
}

/* ---- dispatch ---- */

static int64_t fill_sources(const hcp_plan *plan, const int32_t *sources, int32_t rank,
                            const char *chosen) {
  int64_t row = 0;
  for (int32_t i = 0; i < plan->n; i++)
    if (sources[i] == rank && chosen[i])
      for (int64_t t = 0; t < plan->lengths[i]; t++) d.source[rank][row++] = row_name(i, t);
  return row;
}

static int64_t check_layouts(const hcp_plan *plan, int32_t rank, int32_t first, int32_t count) {
  int64_t row = 0;
  for (int32_t m = first; m < first + count; m++) {
    hcp_layout *layout = NULL;
    CHECK_INT(hcp_layout_create(plan, m, rank, &layout, NULL), HCP_OK);
    for (int32_t s = 0; s < layout->span_count; s++)
      for (int64_t t = 0; t < layout->spans[s].rows; t++)
        CHECK_INT(d.output[rank][row++],
                  row_name(layout->sequences[layout->spans[s].index], layout->spans[s].start + t));
    hcp_layout_destroy(layout);
  }
  return row;
}

static void choose(const hcp_plan *plan, int32_t first, int32_t count, char *chosen) {
  memset(chosen, 0, DRAW_SEQUENCES);
  for (int32_t m = first; m < first + count; m++)
    for (int32_t g = 0; g < plan->micro_batches[m].groups; g++) {
      const hcp_group *group = &plan->groups[plan->micro_batches[m].first_group + g];
      for (int32_t s = 0; s < group->sequences; s++)
        chosen[plan->sequences[group->first_sequence + s]] = 1;
    }
}

static void dispatch_and_back(const hcp_plan *plan, const int32_t *sources, int32_t first,
                              int32_t count) {
  char chosen[DRAW_SEQUENCES];
  choose(plan, first, count, chosen);
  for (int32_t rank = 0; rank < d.ranks; rank++) {
    CHECK_INT(hcp_route_dispatch(plan, sources, rank, first, count, 0, &d.routes[rank], NULL),
              HCP_OK);
    CHECK_INT(sizes(rank)[0], fill_sources(plan, sources, rank, chosen));
  }
  travel();
  for (int32_t rank = 0; rank < d.ranks; rank++)
    CHECK_INT(sizes(rank)[3], check_layouts(plan, rank, first, count));
  memcpy(d.source, d.output, sizeof d.source);
  release();
  for (int32_t rank = 0; rank < d.ranks; rank++)
    CHECK_INT(hcp_route_dispatch(plan, sources, rank, first, count, 1, &d.routes[rank], NULL),
              HCP_OK);
  travel();
  for (int32_t rank = 0; rank < d.ranks; rank++) {
    int64_t rows = fill_sources(plan, sources, rank, chosen);
    CHECK_INT(sizes(rank)[3], rows);
    CHECK(memcmp(d.source[rank], d.output[rank], (size_t)rows * sizeof(int64_t)) == 0);
  }
  release();
}

static void rows_arrive_and_come_back(void) {
  for (int32_t i = 0; i < 300; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    int32_t sources[DRAW_SEQUENCES];
    for (int32_t s = 0; s < plan->n; s++) sources[s] = draw(0, plan->limits.ranks - 1);
    d.ranks = plan->limits.ranks;
    int32_t first = draw(0, plan->micro_batch_count);
    dispatch_and_back(plan, sources, 0, plan->micro_batch_count);
    dispatch_and_back(plan, sources, first, draw(0, plan->micro_batch_count - first));
    hcp_plan_destroy(plan);
  }
}

/* ---- roll ---- */

/* Of the plan's sequences, where they have trees. */
static draw_tree trees[DRAW_SEQUENCES];
static int in_trees;

/* The token so many before one on its path, -1: none. */
static int64_t token_before(int32_t sequence, int64_t token, int64_t back) {
  for (; back > 0 && token >= 0; back--) token = draw_before(&trees[sequence], (int32_t)token);
  return token;
}

static int64_t fill_layout(const hcp_layout *layout, int64_t *rows, int64_t shift, int64_t more) {
  int64_t row = 0;
  for (int32_t s = 0; s < layout->span_count; s++)
    for (int64_t t = 0; t < layout->spans[s].rows + more; t++) {
      hcp_span span = layout->spans[s];
      hcp_span document = layout->documents[span.document];
      int64_t token = span.start + t - shift;
      if (in_trees) /* a halo's first rows come before the span's first token */
        token = token_before(layout->sequences[span.index],
                             span.start + (t > shift ? t - shift : 0), t > shift ? 0 : shift - t);
      int inside = token >= document.start && token < document.start + document.rows;
      rows[row++] = inside ? row_name(layout->sequences[span.index], token) : 0;
    }
  return row;
}

/* Rolled by shift, or, where it is to have rows more, with a halo of shift rows. */
static void roll_once(const hcp_plan *plan, int32_t m, int64_t shift, int64_t more) {
  static int64_t expected[ROWS];
  hcp_layout *layouts[RANKS];
  for (int32_t rank = 0; rank < d.ranks; rank++) {
    CHECK_INT(hcp_layout_create(plan, m, rank, &layouts[rank], NULL), HCP_OK);
    hcp_status (*route)(const hcp_plan *, int32_t, int32_t, int64_t, hcp_table **, hcp_error *) =
        more ? hcp_route_halo : hcp_route_roll;
    CHECK_INT(route(plan, m, rank, shift, &d.routes[rank], NULL), HCP_OK);
    fill_layout(layouts[rank], d.source[rank], 0, 0);
    CHECK_INT(sizes(rank)[0], layouts[rank]->rows);
  }
  travel();
  for (int32_t rank = 0; rank < d.ranks; rank++) {
    int64_t rows = fill_layout(layouts[rank], expected, shift, more);
    CHECK_INT(sizes(rank)[3], rows);
    CHECK(memcmp(d.output[rank], expected, (size_t)rows * sizeof(int64_t)) == 0);
    hcp_layout_destroy(layouts[rank]);
  }
  release();
}

/* Gives a plan's sequences up to 5 causal documents each, but for some sequences. */
static void draw_documents(hcp_plan *plan) {
  static hcp_slice slices[5 * DRAW_SEQUENCES];
  static hcp_position_run runs[5 * DRAW_SEQUENCES];
  int64_t first[DRAW_SEQUENCES + 1] = {0}, n = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    int32_t length = (int32_t)plan->lengths[i], end = 0;
    for (int32_t left = draw(1, 5); end < length; left--) {
      int32_t start = end;
      end = left > 1 ? draw(start + 1, length) : length;
      slices[n] = (hcp_slice){start, end, start, end, -length, 0};
      runs[n++] = (hcp_position_run){start, 0};
    }
    first[i + 1] = n;
  }
  hcp_masks masks = {first, slices, first, runs};
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 1, NULL), HCP_OK);
}

/* Documents lie end to end, and every span in one of them, which begins where a mask says so. */
static void check_documents(const hcp_plan *plan, int32_t m, int32_t rank) {
  hcp_layout *layout = NULL;
  CHECK_INT(hcp_layout_create(plan, m, rank, &layout, NULL), HCP_OK);
  for (int32_t i = 0, n = 0; i < layout->sequence_count; i++) {
    int32_t sequence = layout->sequences[i];
    int64_t run = plan->masks[0].first_run[sequence], at = 0;
    for (; at < layout->lengths[i]; at += layout->documents[n++].rows) {
      CHECK_INT(layout->documents[n].index, i);
      CHECK_INT(layout->documents[n].document, n);
      CHECK_INT(layout->documents[n].start, at);
      CHECK_INT(plan->masks[0].runs[run++].token, at);
    }
    CHECK_INT(at, layout->lengths[i]);
    CHECK_INT(run, plan->masks[0].first_run[sequence + 1]);
  }
  for (int32_t s = 0; s < layout->span_count; s++) {
    hcp_span span = layout->spans[s], document = layout->documents[span.document];
    CHECK(span.rows >= 1 && span.index == document.index && span.start >= document.start);
    CHECK(span.start + span.rows <= document.start + document.rows);
  }
  hcp_layout_destroy(layout);
}

static void rolled_rows_stay_in_their_texts(void) {
  for (int32_t i = 0; i < 200; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    draw_trees(plan, trees);
    in_trees = 1;
    d.ranks = plan->limits.ranks;
    for (int32_t m = 0; m < plan->micro_batch_count; m++) {
      roll_once(plan, m, draw(0, 50), 0);
      int64_t before = draw(1, 20);
      roll_once(plan, m, before, before);
    }
    in_trees = 0;
    hcp_plan_destroy(plan);
  }
}

static void rolled_rows_stay_in_their_documents(void) {
  for (int32_t i = 0; i < 200; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    draw_documents(plan);
    d.ranks = plan->limits.ranks;
    for (int32_t m = 0; m < plan->micro_batch_count; m++) {
      for (int32_t rank = 0; rank < d.ranks; rank++) check_documents(plan, m, rank);
      roll_once(plan, m, draw(-50, 50), 0);
      int64_t before = draw(1, 20);
      roll_once(plan, m, before, before);
    }
    hcp_plan_destroy(plan);
  }
}

/* A prompt of 2 tokens and two answers of one. */
static void rolls_back_of_branches_are_refused(void) {
  const int64_t length = 4, first[] = {0, 3}, first_run[] = {0, 2};
  const hcp_limits limits = draw_limits(1, 1, 1, 4);
  const hcp_slice slices[] = {{0, 3, 0, 3, -4, 0}, {3, 4, 0, 2, -4, 4}, {3, 4, 3, 4, 0, 0}};
  const hcp_position_run runs[] = {{0, 0}, {3, 2}};
  hcp_masks masks = {first, slices, first_run, runs};
  hcp_plan *plan = NULL;
  hcp_table *route = NULL;
  hcp_error err;
  CHECK_INT(hcp_plan_create(&length, 1, &limits, &(hcp_cost){.pair = 1, .token = 1}, 1, NULL, &plan,
                            NULL),
            HCP_OK);
  CHECK_INT(hcp_plan_expect_no_branches(plan, "a", NULL), HCP_OK);
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 1, &err), HCP_OK);
  CHECK_INT(hcp_route_roll(plan, 0, 0, -1, &route, &err), HCP_INVALID);
  CHECK_TEXT(
      err.message,
      "cp.roll_tensor is called in a plan in which the mask of sequence 0 has branches (a "
      "tree, a shared prefix), expected none: shifts is -1, and several tokens may follow one");
  CHECK_INT(hcp_route_halo(plan, 0, 0, 1, &route, &err), HCP_OK);
  hcp_table_destroy(route);
  hcp_plan_destroy(plan);
}

static void rolled_rows_stay_in_their_sequences(void) {
  for (int32_t i = 0; i < 200; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    d.ranks = plan->limits.ranks;
    for (int32_t m = 0; m < plan->micro_batch_count; m++) roll_once(plan, m, draw(-50, 50), 0);
    hcp_plan_destroy(plan);
  }
}

static void halos_are_the_rows_before_each_span(void) {
  for (int32_t i = 0; i < 200; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    d.ranks = plan->limits.ranks;
    for (int32_t m = 0; m < plan->micro_batch_count; m++) {
      int64_t before = draw(1, 20);
      roll_once(plan, m, before, before);
    }
    hcp_plan_destroy(plan);
  }
}

static void bad_routes_are_refused(void) {
  const int64_t length = 9;
  const int32_t outside = 2;
  const hcp_limits limits = draw_limits(2, 2, 2, 8);
  hcp_plan *plan = NULL;
  hcp_table *route = NULL;
  hcp_error err;
  CHECK_INT(hcp_plan_create(&length, 1, &limits, &(hcp_cost){.pair = 1, .token = 1}, 1, NULL, &plan,
                            NULL),
            HCP_OK);
  CHECK_INT(hcp_route_dispatch(plan, &outside, 0, 0, 1, 0, &route, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "sources[0] is 2, expected 0 to 1");
  CHECK_INT(hcp_route_dispatch(plan, &outside, 0, 0, 2, 0, &route, &err), HCP_INVALID);
  CHECK_TEXT(err.message,
             "first is 0 and count 2, expected first >= 0, count >= 0 and first + "
             "count <= 1 (the plan's micro-batches)");
  CHECK_INT(hcp_route_dispatch(plan, &outside, 0, INT32_MAX, INT32_MAX, 0, &route, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "first is 2147483647 and count 2147483647, expected");
  CHECK_INT(hcp_route_roll(plan, 0, 2, 1, &route, &err), HCP_INVALID);
  CHECK_INT(hcp_route_halo(plan, 0, 0, -1, &route, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "before is -1, expected 0 to ");
  CHECK_INT(hcp_route_halo(plan, 0, 0, (int64_t)1 << 31, &route, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "before is 2147483648, expected 0 to 10737418");
  CHECK(route == NULL);
  hcp_plan_destroy(plan);
}

int main(void) {
  rows_arrive_and_come_back();
  rolled_rows_stay_in_their_sequences();
  halos_are_the_rows_before_each_span();
  rolled_rows_stay_in_their_documents();
  rolled_rows_stay_in_their_texts();
  rolls_back_of_branches_are_refused();
  bad_routes_are_refused();
  hcp_table_destroy(NULL);
  return check_report("test_route");
}
