/* test_masks.c - plans with masks: every token lies on one rank, whose rows are as many as
 * without masks; the entries of all ranks have as many pairs as the masks; what is sent
 * is received. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { MASKS = 3, SLICES = DRAW_SEQUENCES * 12, RUNS = DRAW_SEQUENCES * 4 };

typedef struct mask_data {
  int64_t first[DRAW_SEQUENCES + 1];
  hcp_slice slices[SLICES];
  int64_t first_run[DRAW_SEQUENCES + 1];
  hcp_position_run runs[RUNS];
} mask_data;

static mask_data data[MASKS];

/* Queries of a sequence one part after the other, each part with up to two ranges of keys. */
static void draw_mask(mask_data *mask, const hcp_plan *plan) {
  int64_t n = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    int32_t length = (int32_t)plan->lengths[i], query = 0;
    mask->first[i] = n;
    for (int32_t parts = draw(0, 5); parts > 0 && query < length; parts--) {
      int32_t end = draw(query + 1, length), key = 0;
      for (int32_t ranges = draw(0, 2); ranges > 0 && key < length; ranges--) {
        int32_t begin = draw(key, length - 1);
        key = draw(begin + 1, length);
        hcp_slice x = {query, end, begin, key, draw(-length, 1), draw(-2, length)};
        mask->slices[n++] = x;
      }
      query = end;
    }
  }
  mask->first[plan->n] = n;
}

/* Up to three runs of positions in every other sequence. */
static void draw_runs(mask_data *mask, const hcp_plan *plan) {
  int64_t n = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    int32_t length = (int32_t)plan->lengths[i], token = 0;
    mask->first_run[i] = n;
    for (int32_t runs = i % 2 ? draw(1, 3) : 0; runs > 0 && token < length; runs--) {
      mask->runs[n++] = (hcp_position_run){token, draw(0, 2 * length)};
      token = draw(token + 1, length + 1);
    }
  }
  mask->first_run[plan->n] = n;
}

static int64_t position_of(const mask_data *mask, int32_t sequence, int64_t token) {
  int64_t position = token;
  for (int64_t r = mask->first_run[sequence]; r < mask->first_run[sequence + 1]; r++)
    if (mask->runs[r].token <= token)
      position = mask->runs[r].position + token - mask->runs[r].token;
  return position;
}

static int64_t pairs_of(int64_t queries, int64_t keys, int64_t low, int64_t high) {
  int64_t pairs = 0;
  for (int64_t q = 0; q < queries; q++)
    for (int64_t k = 0; k < keys; k++) pairs += low <= k - q && k - q <= high;
  return pairs;
}

/* Pairs of a mask's sequences in a micro-batch, under a window of positions. */
static int64_t pairs_in(const hcp_plan *plan, const mask_data *mask, const hcp_group *group,
                        const hcp_mask *window) {
  int64_t pairs = 0;
  for (int32_t s = 0; s < group->sequences; s++) {
    int32_t sequence = plan->sequences[group->first_sequence + s];
    for (int64_t i = mask->first[sequence]; i < mask->first[sequence + 1]; i++) {
      const hcp_slice *x = &mask->slices[i];
      for (int64_t q = x->query_begin; q < x->query_end; q++)
        for (int64_t k = x->key_begin; k < x->key_end; k++) {
          int64_t ahead = position_of(mask, sequence, k) - position_of(mask, sequence, q);
          pairs += x->low <= k - q && k - q <= x->high &&
                   (window->left < 0 || ahead >= -window->left) &&
                   (window->right < 0 || ahead <= window->right);
        }
    }
  }
  return pairs;
}

/* Pairs of all entries, less those of padding, which sees itself. Each query of an entry sees
 * a key, and each key is seen. */
static int64_t pairs_computed(const hcp_table *schedule, int64_t paddings) {
  int64_t pairs = -paddings;
  for (int64_t e = 0; e < records(schedule, HCP_SCHEDULE_ENTRIES); e++) {
    const int64_t *x = section(schedule, HCP_SCHEDULE_ENTRIES) + 6 * e;
    CHECK(x[4] >= 1 - x[1] && x[5] <= x[3] - 1 && x[4] <= x[5]);
    CHECK(x[5] >= 0 && x[1] - 1 + x[4] <= x[3] - 1);  /* the first and the last query see some */
    CHECK(x[4] <= 0 && x[1] - 1 + x[5] >= x[3] - 1);  /* the first and the last key are seen  */
    pairs += pairs_of(x[1], x[3], x[4], x[5]);
  }
  return pairs;
}

static int64_t rows_moved(const hcp_table *schedule, int32_t which) {
  int64_t rows = 0;
  for (int64_t i = 0; i < records(schedule, which); i++)
    rows += section(schedule, which)[3 * i + 2];
  return rows;
}

static void group_computes_all_pairs(const hcp_plan *plan, int32_t m, const hcp_group *group,
                                     hcp_comm_type type) {
  hcp_mask window = {maybe_draw(1, 30) - 1, maybe_draw(1, 30) - 1, draw(0, MASKS - 1)};
  int64_t pairs = 0, balance = 0, home = 0, shares = type == HCP_COMM_A2A ? group->degree : 1;
  for (int32_t rank = group->first_rank; rank < group->first_rank + group->degree; rank++) {
    hcp_table *schedule = NULL;
    hcp_layout *layout = NULL;
    int64_t paddings = 0;
    CHECK_INT(hcp_layout_create(plan, m, rank, &layout, NULL), HCP_OK);
    CHECK_INT(hcp_schedule_create(plan, m, rank, type, 1, &window, 64, 0, 0, &schedule, NULL),
              HCP_OK);
    for (int32_t j = 0; j < layout->degree; j++)
      if (type == HCP_COMM_A2A || j == rank - layout->first_rank)
        paddings += layout->paddings[j] * layout->paddings[j];
    pairs += pairs_computed(schedule, paddings);
    balance +=
        rows_moved(schedule, HCP_SCHEDULE_SENDS) - rows_moved(schedule, HCP_SCHEDULE_RECEIVES);
    home += rows_moved(schedule, HCP_SCHEDULE_RETURN_SENDS) -
            rows_moved(schedule, HCP_SCHEDULE_RETURN_RECEIVES);
    CHECK_INT(rows_moved(schedule, HCP_SCHEDULE_RECEIVES),
              rows_moved(schedule, HCP_SCHEDULE_RETURN_SENDS));
    hcp_table_destroy(schedule);
    hcp_layout_destroy(layout);
  }
  CHECK_INT(balance, 0);
  CHECK_INT(home, 0);
  CHECK_INT(pairs, shares * pairs_in(plan, &data[window.index], group, &window));
}

static void tokens_lie_where_rows_were(const hcp_plan *plan, const hcp_plan *bare) {
  static char held[DRAW_SEQUENCES][512];
  memset(held, 0, sizeof held);
  for (int32_t m = 0; m < plan->micro_batch_count; m++)
    for (int32_t rank = 0; rank < plan->limits.ranks; rank++) {
      hcp_layout *layout = NULL, *before = NULL;
      CHECK_INT(hcp_layout_create(plan, m, rank, &layout, NULL), HCP_OK);
      CHECK_INT(hcp_layout_create(bare, m, rank, &before, NULL), HCP_OK);
      CHECK_INT(layout->rows, before->rows);
      for (int32_t s = 0; s < layout->span_count; s++)
        for (int64_t t = 0; t < layout->spans[s].rows; t++)
          held[layout->sequences[layout->spans[s].index]][layout->spans[s].start + t]++;
      hcp_layout_destroy(before);
      hcp_layout_destroy(layout);
    }
  for (int32_t i = 0; i < plan->n; i++)
    for (int64_t t = 0; t < plan->lengths[i]; t++) CHECK_INT(held[i][t], 1);
}

static void drawn_masks_are_computed(void) {
  const hcp_comm_type types[] = {HCP_COMM_P2P, HCP_COMM_ALL_GATHER, HCP_COMM_A2A};
  for (int32_t i = 0; i < 150; i++) {
    uint64_t state = draw_state;
    hcp_plan *bare = draw_plan(7);
    draw_state = state;
    hcp_plan *plan = draw_plan(7);
    hcp_masks masks[MASKS];
    CHECK_INT(plan->checksum, bare->checksum);
    for (int32_t m = 0; m < MASKS; m++) {
      draw_mask(&data[m], plan);
      draw_runs(&data[m], plan);
      masks[m] = (hcp_masks){data[m].first, data[m].slices, data[m].first_run, data[m].runs};
    }
    CHECK_INT(hcp_plan_set_masks(plan, masks, MASKS, NULL), HCP_OK);
    CHECK(plan->checksum != bare->checksum);
    tokens_lie_where_rows_were(plan, bare);
    for (int32_t m = 0; m < plan->micro_batch_count; m++) {
      const hcp_micro_batch *batch = &plan->micro_batches[m];
      for (int32_t g = batch->first_group; g < batch->first_group + batch->groups; g++)
        group_computes_all_pairs(plan, m, &plan->groups[g], types[draw(0, 2)]);
    }
    hcp_plan_destroy(plan);
    hcp_plan_destroy(bare);
  }
}

static void bad_masks_are_refused(void) {
  const int64_t length = 9, first[] = {0, 1};
  const hcp_limits limits = draw_limits(2, 2, 2, 8);
  hcp_slice slice = {0, 9, 0, 10, 0, 0};
  const int64_t first_run[] = {0, 2};
  hcp_position_run runs[] = {{0, 3}, {9, 0}};
  hcp_masks masks = {first, &slice, first_run, runs};
  hcp_mask mask = {-1, -1, 1};
  hcp_plan *plan = NULL;
  hcp_table *schedule = NULL;
  hcp_error err;
  CHECK_INT(hcp_plan_create(&length, 1, &limits, &(hcp_cost){.pair = 1, .token = 1}, 1, NULL, &plan,
                            NULL),
            HCP_OK);
  uint64_t before = plan->checksum;
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 1, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "masks[0] has queries 0 to 9 and keys 0 to 10 of sequence 0, expected");
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 65, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "mask_count is 65, expected 1 to 64");
  CHECK(plan->checksum == before);
  slice.key_end = 9;
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 1, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "masks[0] has position 0 at token 9 of sequence 0, expected positions");
  runs[1] = (hcp_position_run){0, 0};
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 1, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "masks[0] has position 0 at token 0 of sequence 0, expected positions");
  runs[1] = (hcp_position_run){4, (int64_t)1 << 39};
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 1, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "masks[0] has position 549755813888 at token 4 of sequence 0, expected");
  runs[1].position = 0;
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 1, &err), HCP_OK);
  CHECK_INT(hcp_plan_set_masks(plan, &masks, 1, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "the plan has 1 masks already, expected none");
  CHECK_INT(hcp_schedule_create(plan, 0, 0, HCP_COMM_P2P, 1, &mask, 1, 0, 0, &schedule, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "mask.index is 1, expected 0 to 0");
  mask.index = 0;
  CHECK_INT(hcp_schedule_create(plan, 0, 0, HCP_COMM_A2A_P2P, 2, &mask, 1, 0, 0, &schedule, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "comm_type is 'a2a+p2p' in a plan with masks, expected 'all_gather'");
  hcp_plan_destroy(plan);
}

int main(void) {
  drawn_masks_are_computed();
  bad_masks_are_refused();
  return check_report("test_masks");
}
