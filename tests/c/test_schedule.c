/* test_schedule.c - schedules run on all ranks at once, with tokens for rows:
 * every query meets every key that it sees, once, and every partial gradient
 * comes home to the key that it belongs to. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 7, ROWS = 1024, PARTS = 256, TOKENS = DRAW_SEQUENCES * 512 };

typedef struct rank_state {
  hcp_layout *layout;
  hcp_table *schedule;
  int32_t local[ROWS];          /* token numbers of the local rows    */
  int32_t keys[ROWS];           /* of the stage's keys, in key order  */
  int32_t wire[ROWS], received[ROWS];
  int32_t parts[PARTS][ROWS];   /* for each entry: queries that met its key rows */
  int32_t part_tokens[PARTS][ROWS];
  int32_t home_sent[ROWS], home_received[ROWS]; /* summed meetings            */
  int32_t home_tokens[ROWS];
} rank_state;

static rank_state ranks[RANKS];
static int32_t rank_count;
static char met[TOKENS][512]; /* met[query token][key's place in its sequence] */

static int32_t token(int32_t sequence, int64_t place) { return sequence * 512 + (int32_t)place; }

static const int64_t *stage_of(const rank_state *r, int64_t stage) {
  return section(r->schedule, HCP_SCHEDULE_STAGES) + 8 * stage;
}

static int64_t begin_of(const rank_state *r, int64_t stage, int32_t column) {
  return stage == 0 ? 0 : stage_of(r, stage - 1)[column];
}

static void open_rank(const hcp_plan *plan, int32_t m, int32_t rank, hcp_comm_type type,
                      const hcp_mask *mask) {
  rank_state *r = &ranks[rank];
  int64_t row = 0;
  CHECK_INT(hcp_layout_create(plan, m, rank, &r->layout, NULL), HCP_OK);
  CHECK_INT(hcp_schedule_create(plan, m, rank, type, mask, &r->schedule, NULL), HCP_OK);
  for (int32_t s = 0; s < r->layout->span_count; s++)
    for (int64_t t = 0; t < r->layout->spans[s].rows; t++)
      r->local[row++] =
          token(r->layout->sequences[r->layout->spans[s].slot], r->layout->spans[s].start + t);
  CHECK_INT(section(r->schedule, HCP_SCHEDULE_SIZES)[0], row);
  memcpy(r->keys, r->local, sizeof r->keys);
}

static int64_t gather(const rank_state *r, int32_t s, int64_t begin, int64_t end,
                      const int32_t *from, int32_t *to) {
  int64_t filled = 0;
  for (int64_t i = begin; i < end; i++) {
    const int64_t *segment = section(r->schedule, s) + 2 * i;
    for (int64_t k = 0; k < segment[1]; k++) to[filled++] = from[segment[0] + k];
  }
  return filled;
}

/* ---- fetching keys ---- */

static void fill_wires(int32_t first, int32_t end_rank, int64_t stage) {
  for (int32_t k = first; k < end_rank; k++) {
    rank_state *r = &ranks[k];
    int64_t begin = begin_of(r, stage, 0), end = stage_of(r, stage)[0];
    if (end > begin)
      CHECK_INT(gather(r, HCP_SCHEDULE_PACK, begin, end, r->local, r->wire), stage_of(r, stage)[5]);
    else
      memcpy(r->wire, r->received, sizeof r->wire);
  }
}

static const int64_t *receive_from(const rank_state *r, int32_t s, int64_t begin, int64_t end,
                                   int32_t peer) {
  for (int64_t i = begin; i < end; i++)
    if (section(r->schedule, s)[3 * i] == peer) return section(r->schedule, s) + 3 * i;
  return NULL;
}

static void send_keys(int32_t from, int64_t stage) {
  const rank_state *r = &ranks[from];
  for (int64_t i = begin_of(r, stage, 1); i < stage_of(r, stage)[1]; i++) {
    const int64_t *move = section(r->schedule, HCP_SCHEDULE_SENDS) + 3 * i;
    rank_state *to = &ranks[move[0]];
    const int64_t *receive = receive_from(to, HCP_SCHEDULE_RECEIVES, begin_of(to, stage, 2),
                                          stage_of(to, stage)[2], from);
    CHECK(receive != NULL && receive[2] == move[2]);
    if (receive != NULL)
      memcpy(to->received + receive[1], r->wire + move[1], (size_t)move[2] * sizeof *r->wire);
  }
}

static void arrange_keys(int32_t first, int32_t end_rank, int64_t stage) {
  for (int32_t k = first; k < end_rank; k++) {
    rank_state *r = &ranks[k];
    int64_t begin = begin_of(r, stage, 3), end = stage_of(r, stage)[3];
    if (end > begin)
      CHECK_INT(gather(r, HCP_SCHEDULE_ARRANGE, begin, end, r->received, r->keys),
                stage_of(r, stage)[7]);
    else
      memcpy(r->keys, r->received, sizeof r->keys);
  }
}

/* ---- meeting ---- */

static void meet(rank_state *r, int64_t e) {
  const int64_t *entry = section(r->schedule, HCP_SCHEDULE_ENTRIES) + 6 * e;
  CHECK(entry[1] > 0 && entry[3] > 0);
  CHECK(entry[4] >= 1 - entry[1] && entry[5] <= entry[3] - 1);
  for (int64_t q = 0; q < entry[1]; q++) /* no query without a key */
    CHECK(q + entry[4] < entry[3] && q + entry[5] >= 0);
  for (int64_t k = 0; k < entry[3]; k++) {
    int32_t key = r->keys[entry[2] + k];
    r->part_tokens[e][k] = key;
    r->parts[e][k] = 0;
    for (int64_t q = 0; q < entry[1]; q++) {
      int32_t query = r->local[entry[0] + q];
      if (k - q < entry[4] || k - q > entry[5]) continue;
      CHECK_INT(query / 512, key / 512);
      met[query][key % 512]++;
      r->parts[e][k]++;
    }
    CHECK(r->parts[e][k] > 0);
  }
}

/* One stage of one group: its ranks have as many stages as each other. */
static void run_stage(int32_t first, int32_t end_rank, int64_t stage) {
  if (stage > 0) {
    fill_wires(first, end_rank, stage);
    for (int32_t k = first; k < end_rank; k++) send_keys(k, stage);
    arrange_keys(first, end_rank, stage);
  }
  for (int32_t k = first; k < end_rank; k++)
    for (int64_t e = begin_of(&ranks[k], stage, 4); e < stage_of(&ranks[k], stage)[4]; e++)
      meet(&ranks[k], e);
}

/* ---- gradients ---- */

static void check_runs(const rank_state *r, int32_t s, int64_t rows) {
  int64_t end = 0;
  for (int64_t i = 0; i < records(r->schedule, s); i++) {
    const int64_t *run = section(r->schedule, s) + 4 * i;
    int same = i > 0 && run[0] == run[-4] && run[1] == run[-3];
    CHECK(run[1] > 0 && (same || run[0] >= end) && run[0] + run[1] <= rows);
    end = run[0] + run[1];
  }
}

static void pack_home(rank_state *r) {
  const int64_t *size = section(r->schedule, HCP_SCHEDULE_SIZES);
  memset(r->home_sent, 0, sizeof r->home_sent);
  check_runs(r, HCP_SCHEDULE_HOME_RUNS, size[1]);
  for (int64_t i = 0; i < records(r->schedule, HCP_SCHEDULE_HOME_RUNS); i++) {
    const int64_t *run = section(r->schedule, HCP_SCHEDULE_HOME_RUNS) + 4 * i;
    for (int64_t k = 0; k < run[1]; k++) {
      r->home_sent[run[0] + k] += r->parts[run[2]][run[3] + k];
      r->home_tokens[run[0] + k] = r->part_tokens[run[2]][run[3] + k];
    }
  }
}

static void send_home(int32_t from) {
  const rank_state *r = &ranks[from];
  for (int64_t i = 0; i < records(r->schedule, HCP_SCHEDULE_HOME_SENDS); i++) {
    const int64_t *move = section(r->schedule, HCP_SCHEDULE_HOME_SENDS) + 3 * i;
    rank_state *to = &ranks[move[0]];
    const int64_t *receive = receive_from(to, HCP_SCHEDULE_HOME_RECEIVES, 0,
                                          records(to->schedule, HCP_SCHEDULE_HOME_RECEIVES), from);
    CHECK(receive != NULL && receive[2] == move[2]);
    for (int64_t k = 0; receive != NULL && k < move[2]; k++) {
      to->home_received[receive[1] + k] = r->home_sent[move[1] + k];
      to->received[receive[1] + k] = r->home_tokens[move[1] + k];
    }
  }
}

static int sees(const hcp_mask *mask, int64_t query, int64_t key) {
  return (mask->left < 0 || key >= query - mask->left) &&
         (mask->right < 0 || key <= query + mask->right);
}

static int64_t queries_that_see(const rank_state *r, int64_t row, const hcp_mask *mask) {
  int32_t slot = 0;
  int64_t queries = 0;
  while (r->layout->cu_seqlens[slot + 1] <= row) slot++;
  for (int64_t query = 0; query < r->layout->lengths[slot]; query++)
    queries += sees(mask, query, r->layout->positions[row]);
  return queries;
}

/* No row travels that nobody sees. */
static void check_fetched(const rank_state *r, const hcp_mask *mask) {
  for (int64_t stage = 1; stage < records(r->schedule, HCP_SCHEDULE_STAGES); stage++)
    for (int64_t k = 0; k < stage_of(r, stage)[7]; k++) {
      int seen = 0;
      for (int64_t row = 0; row < r->layout->rows; row++)
        seen |= r->local[row] / 512 == r->keys[k] / 512 &&
                sees(mask, r->local[row] % 512, r->keys[k] % 512);
      CHECK(seen);
    }
}

static void check_sums(rank_state *r, const hcp_mask *mask) {
  static int64_t sums[ROWS];
  int64_t local_entries = records(r->schedule, HCP_SCHEDULE_STAGES) ? stage_of(r, 0)[4] : 0;
  memset(sums, 0, sizeof sums);
  check_runs(r, HCP_SCHEDULE_LOCAL_RUNS, r->layout->rows);
  for (int64_t i = 0; i < records(r->schedule, HCP_SCHEDULE_LOCAL_RUNS); i++) {
    const int64_t *run = section(r->schedule, HCP_SCHEDULE_LOCAL_RUNS) + 4 * i;
    int home = run[2] == local_entries;
    CHECK(run[2] <= local_entries);
    for (int64_t k = 0; k < run[1]; k++) {
      int32_t owner = home ? r->received[run[3] + k] : r->part_tokens[run[2]][run[3] + k];
      CHECK_INT(owner, r->local[run[0] + k]);
      sums[run[0] + k] += home ? r->home_received[run[3] + k] : r->parts[run[2]][run[3] + k];
    }
  }
  for (int64_t row = 0; row < r->layout->rows; row++)
    CHECK_INT(sums[row], queries_that_see(r, row, mask));
}

/* Each part of a run is the entry that has these queries. */
static void check_outputs(const rank_state *r) {
  check_runs(r, HCP_SCHEDULE_OUTPUT_RUNS, r->layout->rows);
  int64_t covered = 0, entry_rows = 0;
  for (int64_t i = 0; i < records(r->schedule, HCP_SCHEDULE_OUTPUT_RUNS); i++) {
    const int64_t *run = section(r->schedule, HCP_SCHEDULE_OUTPUT_RUNS) + 4 * i;
    const int64_t *entry = section(r->schedule, HCP_SCHEDULE_ENTRIES) + 6 * run[2];
    CHECK_INT(entry[0] + run[3], run[0]);
    CHECK(run[3] >= 0 && run[3] + run[1] <= entry[1]);
    covered += run[1];
  }
  for (int64_t e = 0; e < records(r->schedule, HCP_SCHEDULE_ENTRIES); e++)
    entry_rows += section(r->schedule, HCP_SCHEDULE_ENTRIES)[6 * e + 1];
  CHECK_INT(covered, entry_rows);
}

/* ---- all of it ---- */

static void check_meetings(const hcp_mask *mask) {
  for (int32_t k = 0; k < rank_count; k++)
    for (int64_t row = 0; row < ranks[k].layout->rows; row++) {
      int32_t slot = 0, query = ranks[k].local[row];
      while (ranks[k].layout->cu_seqlens[slot + 1] <= row) slot++;
      for (int64_t key = 0; key < 512; key++) {
        int seen = key < ranks[k].layout->lengths[slot] && sees(mask, query % 512, key);
        CHECK_INT(met[query][key], seen);
      }
    }
}

static void meet_all(void) {
  for (int32_t first = 0, end; first < rank_count; first = end) {
    const rank_state *r = &ranks[first];
    end = first + (r->layout->degree > 0 ? r->layout->degree : 1);
    for (int64_t stage = 0; stage < records(r->schedule, HCP_SCHEDULE_STAGES); stage++)
      run_stage(first, end, stage);
  }
}

static void run(const hcp_plan *plan, int32_t m, hcp_comm_type type, const hcp_mask *mask) {
  memset(met, 0, sizeof met);
  rank_count = plan->limits.ranks;
  for (int32_t k = 0; k < rank_count; k++) open_rank(plan, m, k, type, mask);
  meet_all();
  check_meetings(mask);
  for (int32_t k = 0; k < rank_count && type == HCP_COMM_ALL_GATHER; k++)
    check_fetched(&ranks[k], mask);
  for (int32_t k = 0; k < rank_count; k++) pack_home(&ranks[k]);
  for (int32_t k = 0; k < rank_count; k++) send_home(k);
  for (int32_t k = 0; k < rank_count; k++) {
    check_outputs(&ranks[k]);
    check_sums(&ranks[k], mask);
    hcp_layout_destroy(ranks[k].layout);
    hcp_table_destroy(ranks[k].schedule);
  }
}

/* Half of them have no window, and windows are of all sizes. */
static hcp_mask draw_mask(void) {
  if (draw(0, 1)) return (hcp_mask){-1, draw(-1, 0)};
  int32_t longest = draw(0, 1) ? 5 : 200;
  return (hcp_mask){draw(-1, longest), draw(0, 1) ? 0 : draw(-1, longest)};
}

static void every_query_meets_every_key_it_sees_once(void) {
  for (int32_t i = 0; i < 100; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    for (int32_t m = 0; m < plan->micro_batch_count && m < 3; m++)
      for (int32_t type = 0; type < HCP_COMM_A2A; type++) {
        hcp_mask mask = draw_mask();
        run(plan, m, (hcp_comm_type)type, &mask);
      }
    hcp_plan_destroy(plan);
  }
}

/* ---- heads for sequence ---- */

static void check_whole_sequences(rank_state *r, int32_t first, int32_t degree) {
  static int32_t wire[ROWS], whole[ROWS], back[ROWS];
  int64_t rows = 0, received = 0;
  for (int32_t k = 0; k < degree; k++) {
    const int64_t *receive = section(r->schedule, HCP_SCHEDULE_RECEIVES) + 3 * k;
    const int64_t *send = section(r->schedule, HCP_SCHEDULE_SENDS) + 3 * k;
    CHECK(receive[0] == first + k && receive[1] == received);
    CHECK(receive[2] == ranks[first + k].layout->rows);
    CHECK(send[0] == first + k && send[1] == 0 && send[2] == r->layout->rows);
    memcpy(wire + received, ranks[first + k].local, (size_t)receive[2] * sizeof *wire);
    received += receive[2];
  }
  CHECK_INT(stage_of(r, 0)[7], received);
  CHECK_INT(gather(r, HCP_SCHEDULE_ARRANGE, 0, stage_of(r, 0)[3], wire, whole), received);
  CHECK_INT(gather(r, HCP_SCHEDULE_PACK, 0, stage_of(r, 0)[0], whole, back), received);
  CHECK(memcmp(back, wire, (size_t)received * sizeof *wire) == 0);
  for (int32_t s = 0; s < r->layout->sequence_count; s++) {
    const int64_t *entry = section(r->schedule, HCP_SCHEDULE_ENTRIES) + 6 * s;
    CHECK(entry[0] == rows && entry[1] == r->layout->lengths[s]);
    CHECK(entry[2] == rows && entry[3] == r->layout->lengths[s]);
    for (int64_t t = 0; t < r->layout->lengths[s]; t++)
      CHECK_INT(whole[rows++], token(r->layout->sequences[s], t));
  }
  CHECK_INT(rows, received);
}

static void heads_for_sequence_gives_whole_sequences_and_back(void) {
  for (int32_t i = 0; i < 40; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    hcp_mask mask = draw_mask();
    rank_count = plan->limits.ranks;
    for (int32_t m = 0; m < plan->micro_batch_count && m < 3; m++) {
      for (int32_t k = 0; k < rank_count; k++) open_rank(plan, m, k, HCP_COMM_A2A, &mask);
      for (int32_t k = 0; k < rank_count; k++)
        if (ranks[k].layout->degree > 0)
          check_whole_sequences(&ranks[k], ranks[k].layout->first_rank, ranks[k].layout->degree);
      for (int32_t k = 0; k < rank_count; k++) {
        hcp_layout_destroy(ranks[k].layout);
        hcp_table_destroy(ranks[k].schedule);
      }
    }
    hcp_plan_destroy(plan);
  }
}

static void bad_requests_are_refused(void) {
  const int64_t length = 9;
  const hcp_limits limits = draw_limits(2, 2, 2, 8);
  const hcp_mask causal = {-1, 0};
  hcp_plan *plan = NULL;
  hcp_table *schedule = NULL;
  hcp_error err;
  CHECK_INT(
      hcp_plan_create(&length, 1, &limits, &(hcp_cost){.pair = 1, .token = 1}, 1, &plan, NULL),
      HCP_OK);
  CHECK_INT(hcp_schedule_create(plan, 0, 0, HCP_COMM_TYPE_COUNT, &causal, &schedule, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "comm_type is 3, expected 0 to 2");
  CHECK_INT(hcp_schedule_create(plan, 1, 0, HCP_COMM_P2P, &causal, &schedule, &err), HCP_INVALID);
  CHECK(schedule == NULL);
  CHECK_TEXT(hcp_comm_type_name(HCP_COMM_ALL_GATHER), "all_gather");
  CHECK(hcp_comm_type_name(HCP_COMM_TYPE_COUNT) == NULL);
  hcp_plan_destroy(plan);
}

int main(void) {
  every_query_meets_every_key_it_sees_once();
  heads_for_sequence_gives_whole_sequences_and_back();
  bad_requests_are_refused();
  return check_report("test_schedule");
}
