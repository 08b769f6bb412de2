/* test_states.c - states pass along documents on all ranks at once, in one process. */
#include "check.h"
#include "draw.h"
#include "hcp/hcp.h"

enum { RANKS = 7, SPANS = 512, ROWS = 16384 };

/* A map adds a number to a state, and states start at 0: the state that enters a span is the sum
 * of the numbers of all spans before it. */
typedef struct one_rank {
  hcp_layout *layout;
  hcp_table *table;
  int32_t spans; /* padding included */
  int64_t maps[SPANS], before[SPANS], wire[ROWS], received[ROWS], output[ROWS], entered[SPANS];
} one_rank;

static one_rank all[RANKS];

/* Trees of the plan's sequences. */
static draw_tree trees[DRAW_SEQUENCES];

/* The map of the span that ends with a token, 0: none ends there. */
static int64_t map_to(const hcp_plan *plan, int32_t rank, int32_t sequence, int64_t token) {
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    const hcp_layout *layout = all[r].layout;
    if (layout->degree == 0 || layout->first_rank != all[rank].layout->first_rank) continue;
    for (int32_t s = 0; s < layout->span_count; s++) {
      const hcp_span *x = &layout->spans[s];
      if (layout->sequences[x->index] == sequence && x->start + x->rows == token + 1)
        return all[r].maps[s];
    }
  }
  return 0;
}

static int64_t sum_on_path(const hcp_plan *plan, int32_t rank, hcp_span span) {
  int32_t sequence = all[rank].layout->sequences[span.index];
  int64_t sum = 0;
  for (int32_t token = draw_before(&trees[sequence], (int32_t)span.start); token >= 0;
       token = draw_before(&trees[sequence], token))
    sum += map_to(plan, rank, sequence, token);
  return sum;
}

static int64_t sum_before(const hcp_plan *plan, int32_t rank, hcp_span span) {
  const hcp_layout *own = all[rank].layout;
  int64_t sum = 0;
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    const hcp_layout *layout = all[r].layout;
    if (layout->degree == 0 || layout->first_rank != own->first_rank) continue;
    for (int32_t s = 0; s < layout->span_count; s++)
      if (layout->spans[s].document == span.document && layout->spans[s].start < span.start)
        sum += all[r].maps[s];
  }
  return sum;
}

/* Record `path` of PATHS; ends before the first path are 0. */
static int64_t end_of(const hcp_table *table, int64_t path, int32_t word) {
  return path < 0 ? 0 : section(table, HCP_STATES_PATHS)[6 * path + word];
}

static int64_t gather(const hcp_table *table, int32_t s, int64_t begin, int64_t end,
                      const int64_t *from, int64_t *to) {
  int64_t filled = 0;
  for (int64_t i = begin; i < end; i++)
    for (int64_t r = 0; r < section(table, s)[2 * i + 1]; r++)
      to[filled++] = from[section(table, s)[2 * i] + r];
  return filled;
}

static void deliver(int32_t from, const int64_t *move, int64_t path) {
  const hcp_table *table = all[move[0]].table;
  for (int64_t i = end_of(table, path - 1, 2); i < end_of(table, path, 2); i++) {
    const int64_t *receive = section(table, HCP_STATES_RECEIVES) + 3 * i;
    if (receive[0] != from) continue;
    CHECK_INT(receive[2], move[2]);
    memcpy(all[move[0]].received + receive[1], all[from].wire + move[1],
           (size_t)move[2] * sizeof(int64_t));
    return;
  }
  CHECK_TEXT("no receive", "a receive for every send");
}

static int takes_part(int32_t rank, int64_t path) {
  return all[rank].table != NULL && path < records(all[rank].table, HCP_STATES_PATHS);
}

/* Rows that each rank gives go to `output`. */
static void travel(int32_t ranks, int64_t path, int from_before) {
  for (int32_t r = 0; r < ranks; r++) {
    const hcp_table *table = all[r].table;
    if (!takes_part(r, path)) continue;
    CHECK_INT(gather(table, HCP_STATES_PACK, end_of(table, path - 1, 0), end_of(table, path, 0),
                     from_before ? all[r].before : all[r].maps, all[r].wire),
              end_of(table, path, 4));
  }
  for (int32_t r = 0; r < ranks; r++)
    if (takes_part(r, path))
      for (int64_t i = end_of(all[r].table, path - 1, 1); i < end_of(all[r].table, path, 1); i++)
        deliver(r, section(all[r].table, HCP_STATES_SENDS) + 3 * i, path);
  for (int32_t r = 0; r < ranks; r++) {
    const hcp_table *table = all[r].table;
    if (!takes_part(r, path)) continue;
    CHECK_INT(gather(table, HCP_STATES_ARRANGE, end_of(table, path - 1, 3), end_of(table, path, 3),
                     all[r].received, all[r].output),
              end_of(table, path, 5));
  }
}

static void enter_by_levels(one_rank *own) {
  static int64_t states[ROWS];
  const hcp_table *table = own->table;
  int64_t end = section(table, HCP_STATES_SIZES)[0], before = 0, row = 0;
  memset(states, 0, sizeof states);
  for (int64_t i = 0; i < records(table, HCP_STATES_LEVELS); i++) {
    int64_t begin = end;
    for (int64_t k = 0; k < section(table, HCP_STATES_LEVELS)[i]; k++, row++)
      states[end++] = states[before + section(table, HCP_STATES_KEPT)[row]] + own->output[row];
    before = begin;
  }
  CHECK_INT(records(table, HCP_STATES_ENTERING), own->spans);
  for (int32_t s = 0; s < own->spans; s++)
    own->entered[s] = states[section(table, HCP_STATES_ENTERING)[s]];
}

static void gather_states(int32_t ranks) {
  travel(ranks, 0, 0);
  for (int32_t r = 0; r < ranks; r++)
    if (all[r].table != NULL) enter_by_levels(&all[r]);
}

static void add_round(one_rank *own, int64_t *wanted, int64_t rows) {
  for (int64_t i = 0; i < rows; i++)
    own->before[section(own->table, HCP_STATES_WANTING)[(*wanted)++]] += own->output[i];
}

static void pass_by_rounds(int32_t ranks) {
  int64_t wanted[RANKS] = {0}, rounds = 0;
  for (int32_t r = 0; r < ranks; r++) {
    memset(all[r].before, 0, sizeof all[r].before);
    if (all[r].table != NULL && records(all[r].table, HCP_STATES_PATHS) > rounds)
      rounds = records(all[r].table, HCP_STATES_PATHS);
  }
  for (int64_t round = 0; round < rounds; round++) {
    travel(ranks, round, round > 0);
    for (int32_t r = 0; r < ranks; r++)
      if (takes_part(r, round)) add_round(&all[r], &wanted[r], end_of(all[r].table, round, 5));
  }
  for (int32_t r = 0; r < ranks; r++) memcpy(all[r].entered, all[r].before, sizeof all[r].before);
}

typedef int64_t (*expected_sum)(const hcp_plan *plan, int32_t rank, hcp_span span);

static void check_way(const hcp_plan *plan, int32_t micro_batch, int32_t by_rounds,
                      expected_sum expected) {
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    all[r].table = NULL;
    if (all[r].layout->degree > 0)
      CHECK_INT(hcp_states_create(plan, micro_batch, r, by_rounds, &all[r].table, NULL), HCP_OK);
  }
  if (by_rounds)
    pass_by_rounds(plan->limits.ranks);
  else
    gather_states(plan->limits.ranks);
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    for (int32_t s = 0; s < all[r].layout->span_count; s++)
      CHECK_INT(all[r].entered[s], expected(plan, r, all[r].layout->spans[s]));
    if (all[r].layout->padding > 0) CHECK_INT(all[r].entered[all[r].spans - 1], 0);
    if (all[r].table != NULL) hcp_table_destroy(all[r].table);
  }
}

static void check_micro_batch(const hcp_plan *plan, int32_t micro_batch, expected_sum expected) {
  for (int32_t r = 0; r < plan->limits.ranks; r++) {
    CHECK_INT(hcp_layout_create(plan, micro_batch, r, &all[r].layout, NULL), HCP_OK);
    all[r].spans = all[r].layout->span_count + (all[r].layout->padding > 0);
    for (int32_t s = 0; s < all[r].spans; s++) all[r].maps[s] = draw(1, 1 << 20);
  }
  check_way(plan, micro_batch, 0, expected);
  check_way(plan, micro_batch, 1, expected);
  for (int32_t r = 0; r < plan->limits.ranks; r++) hcp_layout_destroy(all[r].layout);
}

static void states_enter_spans(void) {
  for (int32_t i = 0; i < 300; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    for (int32_t m = 0; m < plan->micro_batch_count; m++) check_micro_batch(plan, m, sum_before);
    hcp_plan_destroy(plan);
  }
}

static void states_enter_branches(void) {
  for (int32_t i = 0; i < 300; i++) {
    hcp_plan *plan = draw_plan(RANKS);
    draw_trees(plan, trees);
    for (int32_t m = 0; m < plan->micro_batch_count; m++) check_micro_batch(plan, m, sum_on_path);
    hcp_plan_destroy(plan);
  }
}

int main(void) {
  states_enter_spans();
  states_enter_branches();
  return check_report("test_states");
}
