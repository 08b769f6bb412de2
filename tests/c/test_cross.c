/* test_cross.c - keys of one plan travel to the queries of another on all ranks at once, in one
 * process: every query meets exactly the keys that it sees, and every key's gradient comes from
 * exactly the entries that have it. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 7, ROWS = 4096, DOCUMENTS = 4, PARTS = DRAW_SEQUENCES * DOCUMENTS };

/* A key's name. */
static int64_t name_of(int64_t sequence, int64_t token) { return sequence << 32 | token; }

typedef struct one_rank {
  hcp_layout *queries, *keys;
  hcp_table *table;
  int64_t source[ROWS], wire[ROWS], received[ROWS], output[ROWS];
} one_rank;

static one_rank all[RANKS];

/* The documents of both plans: where each ends in its sequence. */
typedef struct cut_up {
  int32_t counts[DRAW_SEQUENCES];
  int64_t ends[DRAW_SEQUENCES][DOCUMENTS];
} cut_up;

static cut_up of_queries, of_keys;

/* ---- plans ---- */

/* Documents end in places of their own, the last one with the sequence. */
static void draw_ends(cut_up *cut, const hcp_plan *plan, const int32_t *counts) {
  for (int32_t i = 0; i < plan->n; i++) {
    int32_t left = counts[i], end = 0;
    cut->counts[i] = counts[i];
    for (int32_t d = 0; d < counts[i]; d++) {
      left--;
      end = left == 0 ? (int32_t)plan->lengths[i] : draw(end + 1, (int32_t)plan->lengths[i] - left);
      cut->ends[i][d] = end;
    }
  }
}

/* Each document sees itself alone. */
static void set_documents(hcp_plan *plan, const cut_up *cut) {
  static hcp_slice slices[PARTS];
  static hcp_position_run runs[PARTS];
  int64_t first[DRAW_SEQUENCES + 1] = {0};
  int64_t n = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    int64_t begin = 0;
    for (int32_t d = 0; d < cut->counts[i]; d++) {
      int64_t end = cut->ends[i][d];
      slices[n] = (hcp_slice){begin, end, begin, end, begin - end, draw(0, 1) ? 0 : end};
      runs[n++] = (hcp_position_run){begin, 0};
      begin = end;
    }
    first[i + 1] = n;
  }
  hcp_masks mask = {first, slices, first, runs};
  CHECK_INT(hcp_plan_set_masks(plan, &mask, 1, NULL), HCP_OK);
}

/* All sequences in one micro-batch, in groups with gaps between them. */
static hcp_plan *draw_keys(int32_t n, int32_t ranks, const int64_t *lengths) {
  hcp_group groups[DRAW_SEQUENCES];
  int32_t sequences[DRAW_SEQUENCES], rank = 0, done = 0, count = 0;
  for (int32_t i = 0; i < n; i++) sequences[i] = (i + 5) % n;
  while (done < n) {
    int32_t first = draw(rank, ranks - 1);
    int32_t degree = draw(1, ranks - first), own = draw(1, n - done);
    if (first + degree == ranks || count + 1 == ranks) own = n - done;
    groups[count++] = (hcp_group){first, degree, done, own};
    rank = first + degree;
    done += own;
  }
  hcp_micro_batch batch = {0, count};
  hcp_limits limits = draw_limits(ranks, 1, ranks, ROWS);
  limits.alignment = draw(1, 4);
  hcp_cost cost = {.pair = 1};
  hcp_plan *plan = NULL;
  CHECK_INT(hcp_plan_create_from(lengths, n, &limits, &cost, &batch, 1, groups, count, sequences,
                                 &plan, NULL),
            HCP_OK);
  return plan;
}

/* ---- the exchange ---- */

static int64_t size_of(const hcp_table *table, int32_t word) {
  return section(table, HCP_CROSS_SIZES)[word];
}

static void deliver(int32_t from, const int64_t *move) {
  const hcp_table *table = all[move[0]].table;
  for (int64_t i = 0; i < records(table, HCP_CROSS_RECEIVES); i++) {
    const int64_t *receive = section(table, HCP_CROSS_RECEIVES) + 3 * i;
    if (receive[0] != from) continue;
    CHECK_INT(receive[2], move[2]);
    memcpy(all[move[0]].received + receive[1], all[from].wire + move[1],
           (size_t)move[2] * sizeof(int64_t));
    return;
  }
  CHECK_TEXT("no receive", "a receive for every send");
}

static void travel(int32_t ranks) {
  for (int32_t r = 0; r < ranks; r++) {
    const hcp_layout *keys = all[r].keys;
    CHECK_INT(size_of(all[r].table, 0), keys->rows);
    int64_t row = 0;
    for (int32_t s = 0; s < keys->span_count; s++)
      for (int64_t i = 0; i < keys->spans[s].rows; i++)
        all[r].source[row++] =
            name_of(keys->sequences[keys->spans[s].index], keys->spans[s].start + i);
    CHECK_INT(gather_rows(all[r].table, HCP_CROSS_PACK, all[r].source, all[r].wire),
              size_of(all[r].table, 1));
  }
  for (int32_t r = 0; r < ranks; r++)
    for (int64_t i = 0; i < records(all[r].table, HCP_CROSS_SENDS); i++)
      deliver(r, section(all[r].table, HCP_CROSS_SENDS) + 3 * i);
  for (int32_t r = 0; r < ranks; r++)
    CHECK_INT(gather_rows(all[r].table, HCP_CROSS_ARRANGE, all[r].received, all[r].output),
              size_of(all[r].table, 3));
}

/* ---- what queries meet ---- */

/* Keys that a query sees, as tokens of the sequence from *begin up to *end, by the definition. */
static void keys_seen(int32_t sequence, int64_t token, int64_t left, int64_t right, int64_t *begin,
                      int64_t *end) {
  int32_t d = 0;
  while (of_queries.ends[sequence][d] <= token) d++;
  int64_t first = d == 0 ? 0 : of_keys.ends[sequence][d - 1], last = of_keys.ends[sequence][d];
  int64_t at = token + last - of_queries.ends[sequence][d];
  *begin = left < 0 || at - left < first ? first : at - left;
  *end = right < 0 || at + right >= last ? last : at + right + 1;
}

/* Checks the keys of a query row against those that its entry names. A query without keys is in
 * none. */
static void check_query(const one_rank *own, int64_t row, int64_t sequence, int64_t begin,
                        int64_t end) {
  int64_t met = 0;
  for (int64_t i = 0; i < records(own->table, HCP_CROSS_ENTRIES); i++) {
    const int64_t *x = section(own->table, HCP_CROSS_ENTRIES) + 6 * i;
    if (row < x[0] || row >= x[0] + x[1]) continue;
    CHECK(begin < end);
    for (int64_t k = 0; k < x[3]; k++) {
      if (k - (row - x[0]) < x[4] || k - (row - x[0]) > x[5]) continue;
      CHECK_INT(own->output[x[2] + k], name_of(sequence, begin + met));
      met++;
    }
  }
  CHECK_INT(met, end > begin ? end - begin : 0);
}

static void check_queries(const one_rank *own, int64_t left, int64_t right) {
  const hcp_layout *layout = own->queries;
  int64_t row = 0;
  for (int32_t s = 0; s < layout->span_count; s++) {
    hcp_span span = layout->spans[s];
    int32_t sequence = layout->sequences[span.index];
    for (int64_t i = 0; i < span.rows; i++) {
      int64_t begin, end;
      keys_seen(sequence, span.start + i, left, right, &begin, &end);
      check_query(own, row++, sequence, begin, end);
    }
  }
}

/* Keys lie by sequence, as the group has these, and token. */
static void check_order(const one_rank *own) {
  int32_t s = 0;
  for (int64_t row = 0; row < size_of(own->table, 3); row++) {
    while (s < own->queries->sequence_count && own->queries->sequences[s] != own->output[row] >> 32)
      s++;
    CHECK(s < own->queries->sequence_count);
    if (row > 0 && own->output[row] >> 32 == own->output[row - 1] >> 32)
      CHECK(own->output[row] > own->output[row - 1]);
  }
}

/* PLACES is ARRANGE the other way. */
static void check_places(one_rank *own) {
  static int64_t back[ROWS];
  CHECK_INT(gather_rows(own->table, HCP_CROSS_PLACES, own->output, back), size_of(own->table, 2));
  CHECK(memcmp(back, own->received, (size_t)size_of(own->table, 2) * sizeof *back) == 0);
}

/* Runs of queries or of keys name each row of each entry once; column: 0 queries, 2 keys. */
static void check_runs(const hcp_table *table, int32_t s, int32_t column) {
  static int64_t rows[ROWS];
  memset(rows, 0, sizeof rows);
  for (int64_t i = 0; i < records(table, s); i++) {
    const int64_t *run = section(table, s) + 4 * i;
    const int64_t *x = section(table, HCP_CROSS_ENTRIES) + 6 * run[2];
    CHECK_INT(run[0] - x[column], run[3]);
    CHECK(run[3] >= 0 && run[3] + run[1] <= x[column + 1]);
    if (i > 0) CHECK(run[0] == run[-4] ? run[1] == run[-3] : run[0] >= run[-4] + run[-3]);
    rows[run[2]] += run[1];
  }
  for (int64_t i = 0; i < records(table, HCP_CROSS_ENTRIES); i++)
    CHECK_INT(rows[i], section(table, HCP_CROSS_ENTRIES)[6 * i + column + 1]);
}

static void check_micro_batch(const hcp_cross_side *queries, const hcp_cross_side *keys) {
  int32_t ranks = queries->plan->limits.ranks;
  int64_t left = maybe_draw(0, 30) - 1, right = maybe_draw(0, 30) - 1;
  for (int32_t r = 0; r < ranks; r++) {
    CHECK_INT(hcp_layout_create(queries->plan, queries->micro_batch, r, &all[r].queries, NULL),
              HCP_OK);
    CHECK_INT(hcp_layout_create(keys->plan, keys->micro_batch, r, &all[r].keys, NULL), HCP_OK);
    CHECK_INT(hcp_cross_create(queries, keys, r, left, right, &all[r].table, NULL), HCP_OK);
  }
  travel(ranks);
  for (int32_t r = 0; r < ranks; r++) {
    check_queries(&all[r], left, right);
    check_order(&all[r]);
    check_places(&all[r]);
    check_runs(all[r].table, HCP_CROSS_QUERY_RUNS, 0);
    check_runs(all[r].table, HCP_CROSS_KEY_RUNS, 2);
    hcp_table_destroy(all[r].table);
    hcp_layout_destroy(all[r].queries);
    hcp_layout_destroy(all[r].keys);
  }
}

static void every_query_meets_its_keys(void) {
  for (int32_t i = 0; i < 300; i++) {
    hcp_plan *queries = draw_plan(RANKS);
    int64_t lengths[DRAW_SEQUENCES];
    int32_t counts[DRAW_SEQUENCES], documents = draw(0, 1) ? DOCUMENTS : 1;
    for (int32_t s = 0; s < queries->n; s++) {
      lengths[s] = draw(1, 60);
      int64_t least = lengths[s] < queries->lengths[s] ? lengths[s] : queries->lengths[s];
      counts[s] = draw(1, least < documents ? (int32_t)least : documents);
    }
    if (queries->n > 0) {
      hcp_plan *keys = draw_keys(queries->n, queries->limits.ranks, lengths);
      draw_ends(&of_queries, queries, counts);
      draw_ends(&of_keys, keys, counts);
      if (documents > 1) set_documents(queries, &of_queries);
      if (documents > 1) set_documents(keys, &of_keys);
      for (int32_t m = 0; m < queries->micro_batch_count; m++)
        check_micro_batch(&(hcp_cross_side){queries, m}, &(hcp_cross_side){keys, 0});
      hcp_plan_destroy(keys);
    }
    hcp_plan_destroy(queries);
  }
}

/* ---- errors ---- */

static hcp_plan *plan_of(int32_t n, int32_t ranks, int64_t length) {
  int64_t lengths[DRAW_SEQUENCES];
  hcp_limits limits = draw_limits(ranks, 1, ranks, ROWS);
  hcp_cost cost = {.pair = 1};
  hcp_plan *plan = NULL;
  for (int32_t i = 0; i < n; i++) lengths[i] = length;
  CHECK_INT(hcp_plan_create(lengths, n, &limits, &cost, 1, NULL, &plan, NULL), HCP_OK);
  return plan;
}

/* Of rank 0, with all keys. */
static void refuse(hcp_plan *queries, hcp_plan *keys, const char *part) {
  hcp_table *table = NULL;
  hcp_error err;
  CHECK_INT(hcp_cross_create(&(hcp_cross_side){queries, 0}, &(hcp_cross_side){keys, 0}, 0, -1, -1,
                             &table, &err),
            HCP_INVALID);
  CHECK_TEXT(err.message, part);
  CHECK(table == NULL);
  hcp_plan_destroy(queries);
  hcp_plan_destroy(keys);
}

static void sides_that_do_not_belong_together_are_refused(void) {
  refuse(plan_of(2, 1, 5), plan_of(1, 1, 7),
         "the queries' micro-batch has sequences [0, 1] on 1 ranks, the keys' [0] on 1, expected");
  refuse(plan_of(1, 1, 5), plan_of(1, 2, 7),
         "sequences [0] on 1 ranks, the keys' [0] on 2, expect");
  refuse(plan_of(12, 1, 5), plan_of(9, 1, 7),
         "has sequences [0, 1, 2, 3, 4, 5, 6, 7, ... (12)] on 1 ranks, the keys' [0, 1, 2, 3, 4, "
         "5, 6, 7, ... (9)] on 1, expected the same ranks");
  refuse(plan_of(0, 1, 1), plan_of(1, 1, 7), "micro_batch is 0, expected none: the plan of no");
  refuse(plan_of(1, 1, 7), plan_of(0, 1, 1), "micro_batch is 0, expected none: the plan of no");
  hcp_plan *queries = plan_of(1, 1, 8), *keys = plan_of(1, 1, 8);
  set_documents(queries, &(cut_up){.counts = {2}, .ends = {{3, 8}}});
  refuse(queries, keys, "sequence 0 has 2 documents in the queries' plan and 1 in the keys', expe");
}

int main(void) {
  every_query_meets_its_keys();
  sides_that_do_not_belong_together_are_refused();
  return check_report("test_cross");
}
