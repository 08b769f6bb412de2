/* test_schedule.c - schedules run on all ranks at once, with tokens for rows:
 * every query meets every key that it sees, once for each share of the heads,
 * and every partial gradient comes home to the key that it belongs to. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 7, ROWS = 1024, PARTS = 256, TOKENS = DRAW_SEQUENCES * 512 };

typedef struct rank_state {
  hcp_layout *layout;
  hcp_table *schedule;
  int32_t own[ROWS];            /* token numbers of the layout's rows */
  int32_t local[ROWS];          /* of the rows after heads came       */
  int64_t rows;                 /* of these                           */
  int32_t keys[ROWS];           /* of the stage's keys, in key order  */
  int32_t wire[ROWS], received[ROWS];
  int32_t parts[PARTS][ROWS];   /* for each entry: queries that met its key rows */
  int32_t part_tokens[PARTS][ROWS];
  int32_t return_sent[ROWS], return_received[ROWS]; /* summed meetings            */
  int32_t return_tokens[ROWS];
  int32_t relayed[ROWS], relayed_tokens[ROWS]; /* what goes on to owners in other nodes */
} rank_state;

/* Columns of STAGES. */
enum { PACK, SENDS, RECEIVES, ARRANGE, ENTRIES, PULLS, RELAY_PACK, RELAY_SENDS, RELAY_RECEIVES };
enum { SENT_ROWS = RELAY_RECEIVES + 1, RECEIVED_ROWS, KEY_ROWS, RELAYED_ROWS, STAGE_WIDTH };

static rank_state ranks[RANKS];
static int32_t rank_count;
static int64_t stage_tokens;
static int32_t by_nodes, in_place;
static char met[TOKENS][512]; /* met[query token][key's place in its sequence] */

static int32_t token(int32_t sequence, int64_t place) { return sequence * 512 + (int32_t)place; }

static const int64_t *stage_of(const rank_state *r, int64_t stage) {
  return section(r->schedule, HCP_SCHEDULE_STAGES) + STAGE_WIDTH * stage;
}

static int64_t begin_of(const rank_state *r, int64_t stage, int32_t column) {
  return stage == 0 ? 0 : stage_of(r, stage - 1)[column];
}

static void open_rank(const hcp_plan *plan, int32_t m, int32_t rank, hcp_comm_type type,
                      int32_t wish, const hcp_mask *mask) {
  rank_state *r = &ranks[rank];
  int64_t row = 0;
  int32_t inner = wish;
  CHECK_INT(hcp_layout_create(plan, m, rank, &r->layout, NULL), HCP_OK);
  while (r->layout->degree % inner != 0) inner--;
  CHECK_INT(hcp_schedule_create(plan, m, rank, type, inner, mask, stage_tokens, by_nodes, in_place,
                                &r->schedule, NULL),
            HCP_OK);
  for (int32_t s = 0; s < r->layout->span_count; s++)
    for (int64_t t = 0; t < r->layout->spans[s].rows; t++)
      r->own[row++] =
          token(r->layout->sequences[r->layout->spans[s].index], r->layout->spans[s].start + t);
  CHECK_INT(section(r->schedule, HCP_SCHEDULE_SIZES)[0], row);
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

/* ---- rows for heads ---- */

/* Sequence after sequence, each in token order. */
static void check_order(const rank_state *r) {
  int32_t slot = 0;
  for (int64_t row = 0; row < r->rows; row++) {
    while (r->layout->sequences[slot] != r->local[row] / 512) slot++;
    CHECK(row == 0 || r->local[row - 1] / 512 != r->local[row] / 512 ||
          r->local[row - 1] < r->local[row]);
  }
}

static void exchange_heads(rank_state *r) {
  static int32_t back[ROWS];
  int64_t peers = records(r->schedule, HCP_SCHEDULE_HEAD_RECEIVES), received = 0;
  for (int64_t i = 0; i < peers; i++) {
    const int64_t *move = section(r->schedule, HCP_SCHEDULE_HEAD_RECEIVES) + 3 * i;
    CHECK_INT(move[1], received);
    CHECK_INT(move[2], ranks[move[0]].layout->rows);
    memcpy(r->wire + received, ranks[move[0]].own, (size_t)move[2] * sizeof *r->wire);
    received += move[2];
  }
  r->rows = gather(r, HCP_SCHEDULE_GATHER, 0, records(r->schedule, HCP_SCHEDULE_GATHER), r->wire,
                   r->local);
  CHECK_INT(r->rows, received);
  CHECK_INT(gather(r, HCP_SCHEDULE_SCATTER, 0, records(r->schedule, HCP_SCHEDULE_SCATTER), r->local,
                   back),
            received);
  CHECK(memcmp(back, r->wire, (size_t)received * sizeof *back) == 0);
  check_order(r);
}

static void exchange_all_heads(hcp_comm_type type) {
  for (int32_t k = 0; k < rank_count; k++) {
    rank_state *r = &ranks[k];
    if (type == HCP_COMM_A2A || type == HCP_COMM_A2A_P2P) {
      exchange_heads(r);
    } else {
      CHECK_INT(records(r->schedule, HCP_SCHEDULE_HEAD_RECEIVES), 0);
      memcpy(r->local, r->own, sizeof r->local);
      r->rows = r->layout->rows;
    }
    CHECK_INT(stage_of(r, 0)[KEY_ROWS], r->rows);
    memcpy(r->keys, r->local, sizeof r->keys);
  }
}

/* How many ranks compute each query, each with other heads. */
static int64_t shares_of(const rank_state *r) {
  int64_t neighbours = records(r->schedule, HCP_SCHEDULE_HEAD_RECEIVES);
  return neighbours > 0 ? neighbours : 1;
}

/* ---- fetching keys ---- */

static void fill_wires(int32_t first, int32_t end_rank, int64_t stage) {
  for (int32_t k = first; k < end_rank; k++) {
    rank_state *r = &ranks[k];
    int64_t begin = begin_of(r, stage, PACK), end = stage_of(r, stage)[PACK];
    if (end > begin)
      CHECK_INT(gather(r, HCP_SCHEDULE_PACK, begin, end, r->local, r->wire),
                stage_of(r, stage)[SENT_ROWS]);
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

/* Rows of a stage from a rank to its peers, `rows` those that are packed. */
static void send_rows(int32_t from, int64_t stage, int32_t sends, int32_t section_of_sends,
                      const int32_t *rows) {
  const rank_state *r = &ranks[from];
  int32_t receives = sends + 1, section_of_receives = section_of_sends + 1;
  for (int64_t i = begin_of(r, stage, sends); i < stage_of(r, stage)[sends]; i++) {
    const int64_t *move = section(r->schedule, section_of_sends) + 3 * i;
    rank_state *to = &ranks[move[0]];
    const int64_t *receive = receive_from(to, section_of_receives, begin_of(to, stage, receives),
                                          stage_of(to, stage)[receives], from);
    CHECK(receive != NULL && receive[2] == move[2]);
    if (receive != NULL)
      memcpy(to->received + receive[1], rows + move[1], (size_t)move[2] * sizeof *rows);
  }
}

/* Rows that came over a border of nodes go on inside the node. */
static void relay_keys(int32_t first, int32_t end_rank, int64_t stage) {
  for (int32_t k = first; k < end_rank; k++) {
    rank_state *r = &ranks[k];
    CHECK_INT(gather(r, HCP_SCHEDULE_RELAY_PACK, begin_of(r, stage, RELAY_PACK),
                     stage_of(r, stage)[RELAY_PACK], r->received, r->relayed),
              stage_of(r, stage)[RELAYED_ROWS]);
  }
  for (int32_t k = first; k < end_rank; k++)
    send_rows(k, stage, RELAY_SENDS, HCP_SCHEDULE_RELAY_SENDS, ranks[k].relayed);
}

static void arrange_keys(int32_t first, int32_t end_rank, int64_t stage) {
  for (int32_t k = first; k < end_rank; k++) {
    rank_state *r = &ranks[k];
    int64_t begin = begin_of(r, stage, ARRANGE), end = stage_of(r, stage)[ARRANGE];
    if (end > begin)
      CHECK_INT(gather(r, HCP_SCHEDULE_ARRANGE, begin, end, r->received, r->keys),
                stage_of(r, stage)[KEY_ROWS]);
    else
      memcpy(r->keys, r->received, sizeof r->keys);
  }
}

/* The keys as they received are the rows that PULLS names, in their owners' memory. */
static void check_pulls(const rank_state *r, int64_t stage) {
  int64_t pulled = 0;
  for (int64_t i = begin_of(r, stage, PULLS); i < stage_of(r, stage)[PULLS]; i++) {
    const int64_t *pull = section(r->schedule, HCP_SCHEDULE_PULLS) + 4 * i;
    for (int64_t k = 0; k < pull[1]; k++)
      CHECK_INT(r->keys[pull[0] + k], ranks[pull[2]].local[pull[3] + k]);
    pulled += pull[1];
  }
  CHECK_INT(pulled, stage_of(r, stage)[KEY_ROWS]);
}

/* Ranks that have the same heads, and their rows after the exchange. */
static void check_key_owners(const rank_state *r, int32_t rank) {
  int64_t inner = shares_of(r);
  int64_t first = r->layout->first_rank + (rank - r->layout->first_rank) % inner;
  CHECK_INT(records(r->schedule, HCP_SCHEDULE_KEY_OWNERS) * inner, r->layout->degree);
  for (int64_t k = 0; k < records(r->schedule, HCP_SCHEDULE_KEY_OWNERS); k++) {
    const int64_t *owner = section(r->schedule, HCP_SCHEDULE_KEY_OWNERS) + 2 * k;
    CHECK_INT(owner[0], first + k * inner);
    CHECK_INT(owner[1], ranks[owner[0]].rows);
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

static int sees(const hcp_mask *mask, int64_t query, int64_t key) {
  return (mask->left < 0 || key >= query - mask->left) &&
         (mask->right < 0 || key <= query + mask->right);
}

/* No key of a stage that no query here sees. */
static void check_fetched(const rank_state *r, int64_t stage, const hcp_mask *mask) {
  for (int64_t k = 0; k < stage_of(r, stage)[KEY_ROWS]; k++) {
    int seen = 0;
    for (int64_t row = 0; row < r->rows; row++)
      seen |= r->local[row] / 512 == r->keys[k] / 512 &&
              sees(mask, r->local[row] % 512, r->keys[k] % 512);
    CHECK(seen);
  }
}

/* One stage of one group: its ranks have as many stages as each other. */
static void run_stage(int32_t first, int32_t end_rank, int64_t stage, hcp_comm_type type,
                      const hcp_mask *mask) {
  if (stage > 0) {
    fill_wires(first, end_rank, stage);
    for (int32_t k = first; k < end_rank; k++)
      send_rows(k, stage, SENDS, HCP_SCHEDULE_SENDS, ranks[k].wire);
    relay_keys(first, end_rank, stage);
    arrange_keys(first, end_rank, stage);
    for (int32_t k = first; k < end_rank; k++) check_pulls(&ranks[k], stage);
    for (int32_t k = first; k < end_rank && type == HCP_COMM_ALL_GATHER; k++)
      check_fetched(&ranks[k], stage, mask);
  }
  for (int32_t k = first; k < end_rank; k++)
    for (int64_t e = begin_of(&ranks[k], stage, ENTRIES); e < stage_of(&ranks[k], stage)[ENTRIES];
         e++)
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
  memset(r->return_sent, 0, sizeof r->return_sent);
  check_runs(r, HCP_SCHEDULE_RETURN_RUNS, size[1]);
  for (int64_t i = 0; i < records(r->schedule, HCP_SCHEDULE_RETURN_RUNS); i++) {
    const int64_t *run = section(r->schedule, HCP_SCHEDULE_RETURN_RUNS) + 4 * i;
    for (int64_t k = 0; k < run[1]; k++) {
      r->return_sent[run[0] + k] += r->parts[run[2]][run[3] + k];
      r->return_tokens[run[0] + k] = r->part_tokens[run[2]][run[3] + k];
    }
  }
}

/* Gradients, and the tokens that they are of, to the peers that `sends` names. */
static void send_home(int32_t from, int32_t sends, const int32_t *sums, const int32_t *tokens) {
  const rank_state *r = &ranks[from];
  for (int64_t i = 0; i < records(r->schedule, sends); i++) {
    const int64_t *move = section(r->schedule, sends) + 3 * i;
    rank_state *to = &ranks[move[0]];
    const int64_t *receive = receive_from(to, sends + 1, 0, records(to->schedule, sends + 1), from);
    CHECK(receive != NULL && receive[2] == move[2]);
    for (int64_t k = 0; receive != NULL && k < move[2]; k++) {
      to->return_received[receive[1] + k] = sums[move[1] + k];
      to->received[receive[1] + k] = tokens[move[1] + k];
    }
  }
}

/* Sums what goes on to owners in other nodes. */
static void relay_home(rank_state *r) {
  int64_t rows = section(r->schedule, HCP_SCHEDULE_SIZES)[3];
  memset(r->relayed, 0, sizeof r->relayed);
  memset(r->relayed_tokens, -1, sizeof r->relayed_tokens);
  check_runs(r, HCP_SCHEDULE_RETURN_RELAY_RUNS, rows);
  for (int64_t i = 0; i < records(r->schedule, HCP_SCHEDULE_RETURN_RELAY_RUNS); i++) {
    const int64_t *run = section(r->schedule, HCP_SCHEDULE_RETURN_RELAY_RUNS) + 4 * i;
    int came = run[2] == HCP_RELAYED_RECEIVED;
    for (int64_t k = 0; k < run[1]; k++) {
      int32_t of = came ? r->received[run[3] + k] : r->return_tokens[run[3] + k];
      CHECK(r->relayed_tokens[run[0] + k] < 0 || r->relayed_tokens[run[0] + k] == of);
      r->relayed_tokens[run[0] + k] = of;
      r->relayed[run[0] + k] += came ? r->return_received[run[3] + k] : r->return_sent[run[3] + k];
    }
  }
  for (int64_t row = 0; row < rows; row++) CHECK(r->relayed_tokens[row] >= 0);
}

static void bring_home(void) {
  for (int32_t k = 0; k < rank_count; k++) pack_home(&ranks[k]);
  for (int32_t k = 0; k < rank_count; k++)
    send_home(k, HCP_SCHEDULE_RETURN_SENDS, ranks[k].return_sent, ranks[k].return_tokens);
  for (int32_t k = 0; k < rank_count; k++) relay_home(&ranks[k]);
  for (int32_t k = 0; k < rank_count; k++)
    send_home(k, HCP_SCHEDULE_RETURN_RELAY_SENDS, ranks[k].relayed, ranks[k].relayed_tokens);
}

static int64_t queries_that_see(const rank_state *r, int64_t row, const hcp_mask *mask) {
  int32_t slot = 0;
  int64_t queries = 0;
  while (r->layout->sequences[slot] != r->local[row] / 512) slot++;
  for (int64_t query = 0; query < r->layout->lengths[slot]; query++)
    queries += sees(mask, query, r->local[row] % 512);
  return queries;
}

/* No row that the rank does not see, and none twice. */
static void check_reads(const rank_state *r) {
  int64_t fetched = 0;
  for (int64_t stage = 1; stage < records(r->schedule, HCP_SCHEDULE_STAGES); stage++)
    fetched += stage_of(r, stage)[KEY_ROWS];
  CHECK_INT(fetched, section(r->schedule, HCP_SCHEDULE_SIZES)[1]);
}

/* As many stages as the group's other ranks. */
static void check_stages(const rank_state *r) {
  int64_t stages = records(r->schedule, HCP_SCHEDULE_STAGES), tokens = 0;
  for (int32_t s = 0; s < r->layout->sequence_count; s++) tokens += r->layout->lengths[s];
  if (r->layout->degree > 1) {
    CHECK_INT(stages, records(ranks[r->layout->first_rank].schedule, HCP_SCHEDULE_STAGES));
    CHECK(stages >= 2 && stages <= 1 + HCP_SCHEDULE_GATHERS_MAX);
    CHECK(stages == 2 || (stages - 1) * stage_tokens <= tokens);
    CHECK(stages <= 1 + r->layout->sequence_count);
  }
}

static void check_sums(rank_state *r, const hcp_mask *mask) {
  static int64_t sums[ROWS];
  int64_t local_entries = records(r->schedule, HCP_SCHEDULE_STAGES) ? stage_of(r, 0)[ENTRIES] : 0;
  memset(sums, 0, sizeof sums);
  check_runs(r, HCP_SCHEDULE_LOCAL_RUNS, r->rows);
  for (int64_t i = 0; i < records(r->schedule, HCP_SCHEDULE_LOCAL_RUNS); i++) {
    const int64_t *run = section(r->schedule, HCP_SCHEDULE_LOCAL_RUNS) + 4 * i;
    int home = run[2] == local_entries;
    CHECK(run[2] <= local_entries);
    for (int64_t k = 0; k < run[1]; k++) {
      int32_t owner = home ? r->received[run[3] + k] : r->part_tokens[run[2]][run[3] + k];
      CHECK_INT(owner, r->local[run[0] + k]);
      sums[run[0] + k] += home ? r->return_received[run[3] + k] : r->parts[run[2]][run[3] + k];
    }
  }
  for (int64_t row = 0; row < r->rows; row++) CHECK_INT(sums[row], queries_that_see(r, row, mask));
}

/* Each part of a run is the entry that has these queries. */
static void check_outputs(const rank_state *r) {
  check_runs(r, HCP_SCHEDULE_OUTPUT_RUNS, r->rows);
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
      int32_t slot = 0, query = ranks[k].own[row];
      while (ranks[k].layout->cu_seqlens[slot + 1] <= row) slot++;
      for (int64_t key = 0; key < 512; key++) {
        int seen = key < ranks[k].layout->lengths[slot] && sees(mask, query % 512, key);
        CHECK_INT(met[query][key], seen * shares_of(&ranks[k]));
      }
    }
}

static void meet_all(hcp_comm_type type, const hcp_mask *mask) {
  for (int32_t first = 0, end; first < rank_count; first = end) {
    const rank_state *r = &ranks[first];
    end = first + (r->layout->degree > 0 ? r->layout->degree : 1);
    for (int64_t stage = 0; stage < records(r->schedule, HCP_SCHEDULE_STAGES); stage++)
      run_stage(first, end, stage, type, mask);
  }
}

/* Rows over borders: SENDS of all stages, and gradients. */
static void count_crossings(const hcp_plan *plan, int64_t *keys, int64_t *gradients) {
  int32_t node = plan->limits.ranks_per_node;
  *keys = *gradients = 0;
  for (int32_t k = 0; k < rank_count; k++) {
    const int32_t sections[] = {HCP_SCHEDULE_SENDS, HCP_SCHEDULE_RELAY_SENDS,
                                HCP_SCHEDULE_RETURN_SENDS, HCP_SCHEDULE_RETURN_RELAY_SENDS};
    for (int32_t s = 0; s < 4; s++)
      for (int64_t i = 0; i < records(ranks[k].schedule, sections[s]); i++) {
        const int64_t *move = section(ranks[k].schedule, sections[s]) + 3 * i;
        if (move[0] / node != k / node) *(s < 2 ? keys : gradients) += move[2];
      }
  }
}

/* Whether a query on a rank of the node sees the key. */
static int node_sees(int32_t first, int32_t node, int32_t key, const hcp_mask *mask) {
  for (int32_t k = first; k < first + node; k++)
    for (int64_t row = 0; row < ranks[k].layout->rows; row++)
      if (ranks[k].own[row] / 512 == key / 512 && sees(mask, ranks[k].own[row] % 512, key % 512))
        return 1;
  return 0;
}

/* A row that a node sees comes there once, whoever reads it there; where neighbours exchange heads,
 * once for each share of them. */
static void check_borders(const hcp_plan *plan, hcp_comm_type type, const hcp_mask *mask) {
  int32_t node = plan->limits.ranks_per_node;
  int64_t least = 0, keys, gradients, inner = shares_of(&ranks[0]);
  for (int32_t k = 0; k < rank_count; k++)
    for (int64_t row = 0; row < ranks[k].layout->rows; row++)
      for (int32_t first = 0; first < rank_count; first += node)
        if (first / node != k / node) least += node_sees(first, node, ranks[k].own[row], mask);
  count_crossings(plan, &keys, &gradients);
  if (type == HCP_COMM_A2A || node % inner != 0) return;
  CHECK_INT(keys, least * inner);
  CHECK_INT(gradients, least * inner);
}

static void run(const hcp_plan *plan, int32_t m, hcp_comm_type type, int32_t wish,
                const hcp_mask *mask) {
  memset(met, 0, sizeof met);
  rank_count = plan->limits.ranks;
  for (int32_t k = 0; k < rank_count; k++) open_rank(plan, m, k, type, wish, mask);
  exchange_all_heads(type);
  for (int32_t k = 0; k < rank_count; k++) check_key_owners(&ranks[k], k);
  meet_all(type, mask);
  check_meetings(mask);
  for (int32_t k = 0; k < rank_count && type == HCP_COMM_ALL_GATHER; k++) check_stages(&ranks[k]);
  for (int32_t k = 0; k < rank_count && (in_place || type == HCP_COMM_ALL_GATHER); k++)
    check_reads(&ranks[k]);
  bring_home();
  if (plan->limits.ranks_per_node > 0) check_borders(plan, type, mask);
  for (int32_t k = 0; k < rank_count; k++) {
    check_outputs(&ranks[k]);
    check_sums(&ranks[k], mask);
    hcp_layout_destroy(ranks[k].layout);
    hcp_table_destroy(ranks[k].schedule);
  }
}

/* Half of them have no window, and windows are of all sizes. */
static hcp_mask draw_mask(void) {
  if (draw(0, 1)) return (hcp_mask){-1, draw(-1, 0), 0};
  int32_t longest = draw(0, 1) ? 5 : 200;
  int32_t left = draw(-1, longest), right = draw(0, 1) ? 0 : draw(-1, longest);
  return (hcp_mask){left, right, 0};
}

static void every_query_meets_every_key_it_sees_once(void) {
  for (int32_t i = 0; i < 100; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    for (int32_t m = 0; m < plan->micro_batch_count && m < 3; m++)
      for (int32_t type = 0; type < HCP_COMM_TYPE_COUNT; type++) {
        hcp_mask mask = draw_mask();
        stage_tokens = draw(0, 1) ? draw(1, 9) : draw(10, 300);
        in_place = draw(0, 1);
        run(plan, m, (hcp_comm_type)type, draw(1, RANKS), &mask);
      }
    in_place = 0;
    hcp_plan_destroy(plan);
  }
}

/* Groups of several whole nodes. */
static void rows_cross_borders_once(void) {
  const int32_t shapes[][2] = {{2, 2}, {2, 3}, {3, 2}, {1, 4}, {1, 2}, {2, 1}};
  const int32_t order[] = {0, 1, 2, 3};
  for (int32_t i = 0; i < 150; i++) {
    const int32_t *shape = shapes[draw(0, 5)];
    int32_t all = shape[0] * shape[1], sequences = draw(1, 4);
    int64_t lengths[4];
    for (int32_t s = 0; s < sequences; s++) lengths[s] = draw(s == 0 ? 2 * all : 1, 60);
    hcp_limits limits = draw_limits(all, 1, all, 512);
    limits.ranks_per_node = shape[0];
    const hcp_group group = {0, all, 0, sequences};
    hcp_plan *plan = NULL;
    CHECK_INT(hcp_plan_create_from(lengths, sequences, &limits, &(hcp_cost){.pair = 1},
                                   &(hcp_micro_batch){0, 1}, 1, &group, 1, order, &plan, NULL),
              HCP_OK);
    by_nodes = 1;
    for (int32_t type = 0; type < HCP_COMM_TYPE_COUNT; type++) {
      hcp_mask mask = draw_mask();
      stage_tokens = draw(0, 1) ? draw(1, 9) : draw(10, 300);
      run(plan, 0, (hcp_comm_type)type, draw(1, RANKS), &mask);
    }
    by_nodes = 0;
    hcp_plan_destroy(plan);
  }
}

/* Neighbours of a group hold together what one rank of a smaller group does, where both round
 * alike: each sequence but the first one has whole chunks. */
static void neighbours_hold_what_a_rank_of_a_smaller_group_does(void) {
  for (int32_t i = 0; i < 40; i++) {
    int32_t inner = draw(1, 3), degree = draw(1, 4), sequences = draw(1, 4);
    int64_t lengths[4];
    int32_t order[] = {0, 1, 2, 3};
    lengths[0] = draw(1, 60);
    for (int32_t s = 1; s < sequences; s++) lengths[s] = 2 * degree * inner * draw(1, 4);
    hcp_mask mask = draw_mask();
    hcp_table *tables[2][12];
    for (int32_t which = 0; which < 2; which++) {
      int32_t ranks_of = which == 0 ? degree * inner : degree;
      const hcp_limits limits = draw_limits(ranks_of, 1, ranks_of, 512);
      const hcp_group group = {0, ranks_of, 0, sequences};
      hcp_plan *plan = NULL;
      CHECK_INT(hcp_plan_create_from(lengths, sequences, &limits, &(hcp_cost){.pair = 1},
                                     &(hcp_micro_batch){0, 1}, 1, &group, 1, order, &plan, NULL),
                HCP_OK);
      for (int32_t k = 0; k < ranks_of; k++)
        CHECK_INT(hcp_schedule_create(plan, 0, k, which == 0 ? HCP_COMM_A2A_P2P : HCP_COMM_P2P,
                                      inner, &mask, 1, 0, 0, &tables[which][k], NULL),
                  HCP_OK);
      hcp_plan_destroy(plan);
    }
    for (int32_t k = 0; k < degree * inner; k++) {
      const hcp_table *whole = tables[0][k], *small = tables[1][k / inner];
      CHECK_INT(records(whole, HCP_SCHEDULE_ENTRIES), records(small, HCP_SCHEDULE_ENTRIES));
      CHECK(memcmp(section(whole, HCP_SCHEDULE_ENTRIES), section(small, HCP_SCHEDULE_ENTRIES),
                   (size_t)records(small, HCP_SCHEDULE_ENTRIES) * 6 * sizeof(int64_t)) == 0);
      CHECK_INT(records(whole, HCP_SCHEDULE_SENDS), records(small, HCP_SCHEDULE_SENDS));
      for (int64_t m = 0; m < records(small, HCP_SCHEDULE_SENDS); m++)
        CHECK_INT(section(whole, HCP_SCHEDULE_SENDS)[3 * m],
                  section(small, HCP_SCHEDULE_SENDS)[3 * m] * inner + k % inner);
      hcp_table_destroy(tables[0][k]);
    }
    for (int32_t k = 0; k < degree; k++) hcp_table_destroy(tables[1][k]);
  }
}

/* Key rows of each stage of the last of two ranks. */
static void check_cut(const int64_t *lengths, int32_t n, hcp_mask mask, int64_t least_rows,
                      const int64_t *expected, int32_t stages) {
  const hcp_limits limits = draw_limits(2, 2, 2, 512);
  const hcp_group group = {0, 2, 0, n};
  const int32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7};
  hcp_plan *plan = NULL;
  hcp_table *schedule = NULL;
  CHECK_INT(hcp_plan_create_from(lengths, n, &limits, &(hcp_cost){.pair = 1},
                                 &(hcp_micro_batch){0, 1}, 1, &group, 1, order, &plan, NULL),
            HCP_OK);
  CHECK_INT(hcp_schedule_create(plan, 0, 1, HCP_COMM_ALL_GATHER, 1, &mask, least_rows, 0, 0,
                                &schedule, NULL),
            HCP_OK);
  CHECK_INT(records(schedule, HCP_SCHEDULE_STAGES), stages);
  for (int32_t i = 0; i < stages && i < records(schedule, HCP_SCHEDULE_STAGES); i++)
    CHECK_INT(section(schedule, HCP_SCHEDULE_STAGES)[STAGE_WIDTH * i + KEY_ROWS], expected[i]);
  hcp_table_destroy(schedule);
  hcp_plan_destroy(plan);
}

static void keys_come_in_stages_of_whole_sequences(void) {
  const hcp_mask full = {-1, -1, 0}, narrow = {1, 0, 0};
  const int64_t equal[] = {8, 8, 8, 8, 8, 8, 8, 8}, falling[] = {32, 16, 8, 4};
  check_cut(equal, 8, full, 16, (const int64_t[]){32, 8, 8, 8, 8}, 5);
  check_cut(equal, 8, full, 1, (const int64_t[]){32, 8, 8, 8, 8}, 5);
  check_cut(equal, 8, full, 32, (const int64_t[]){32, 16, 16}, 3);
  check_cut(equal, 8, full, 33, (const int64_t[]){32, 32}, 2);
  check_cut(equal, 1, full, 1, (const int64_t[]){4, 4}, 2);
  check_cut(falling, 4, full, 1, (const int64_t[]){30, 16, 8, 6}, 4);
  check_cut(falling, 4, full, 13, (const int64_t[]){30, 16, 14}, 3);
  check_cut(equal, 8, narrow, 16, (const int64_t[]){32, 8}, 2); /* at most 2 rows of each come */
}

/* Rank 0 of three sees owner 2's rows, then owner 1's: where one stage's end on the
 * wire, those of the next one start. */
static void stages_share_no_segment(void) {
  const int64_t lengths[] = {24, 24, 24, 24};
  const hcp_limits limits = draw_limits(3, 3, 3, 512);
  const hcp_group group = {0, 3, 0, 4};
  const int32_t order[] = {0, 1, 2, 3};
  const hcp_mask mask = {6, 0, 0};
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create_from(lengths, 4, &limits, &(hcp_cost){.pair = 1},
                                 &(hcp_micro_batch){0, 1}, 1, &group, 1, order, &plan, NULL),
            HCP_OK);
  stage_tokens = 8;
  run(plan, 0, HCP_COMM_ALL_GATHER, 1, &mask);
  hcp_plan_destroy(plan);
}

static void bad_requests_are_refused(void) {
  const int64_t length = 9;
  const hcp_limits limits = draw_limits(2, 2, 2, 8);
  const hcp_mask causal = {-1, 0, 0};
  hcp_plan *plan = NULL;
  hcp_table *schedule = NULL;
  hcp_error err;
  CHECK_INT(hcp_plan_create(&length, 1, &limits, &(hcp_cost){.pair = 1, .token = 1}, 1, NULL, &plan,
                            NULL),
            HCP_OK);
  CHECK_INT(
      hcp_schedule_create(plan, 0, 0, HCP_COMM_TYPE_COUNT, 1, &causal, 1, 0, 0, &schedule, &err),
      HCP_INVALID);
  CHECK_TEXT(err.message, "comm_type is 4, expected 0 to 3");
  CHECK_INT(hcp_schedule_create(plan, 0, 0, HCP_COMM_A2A_P2P, 3, &causal, 1, 0, 0, &schedule, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "inner is 3, expected a divisor of the group's degree, 2");
  CHECK_INT(hcp_schedule_create(plan, 0, 0, HCP_COMM_A2A_P2P, 0, &causal, 1, 0, 0, &schedule, &err),
            HCP_INVALID);
  CHECK_INT(hcp_schedule_create(plan, 1, 0, HCP_COMM_P2P, 1, &causal, 1, 0, 0, &schedule, &err),
            HCP_INVALID);
  CHECK_INT(hcp_schedule_create(plan, 0, 0, HCP_COMM_P2P, 1, &causal, 0, 0, 0, &schedule, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, "stage_tokens is 0, expected >= 1");
  CHECK(schedule == NULL);
  CHECK_TEXT(hcp_comm_type_name(HCP_COMM_ALL_GATHER), "all_gather");
  CHECK(hcp_comm_type_name(HCP_COMM_TYPE_COUNT) == NULL);
  hcp_plan_destroy(plan);
}

int main(void) {
  every_query_meets_every_key_it_sees_once();
  rows_cross_borders_once();
  neighbours_hold_what_a_rank_of_a_smaller_group_does();
  keys_come_in_stages_of_whole_sequences();
  stages_share_no_segment();
  bad_requests_are_refused();
  return check_report("test_schedule");
}
