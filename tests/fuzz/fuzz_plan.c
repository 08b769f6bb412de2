/* fuzz_plan.c - any request: a plan that keeps every rule, or a clear refusal.
 *
 *   clang -fsanitize=fuzzer,address,undefined -Icsrc/include tests/fuzz/fuzz_plan.c \
 *     and the files of csrc/core, csrc/core/plan and csrc/bounds, -lm
 *   gcc -DHCP_FUZZ_MAIN -fsanitize=address,undefined ... && ./a.out 100000 7
 *     requests, seed; any compiler, no libFuzzer
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hcp/hcp.h"

enum { FEW = 96, SEQUENCES = 420, RANKS = 64 };

typedef struct bytes {
  const uint8_t *at;
  size_t left;
} bytes;

/* low <= result <= high; zeros when the bytes have run out. One a statement, so that bytes give the
 * same request whatever the compiler: C leaves open in which order elements of a list, arguments of
 * a call and sides of an operator are computed. */
static int64_t take(bytes *b, int64_t low, int64_t high) {
  uint64_t value = 0;
  size_t n = b->left < 4 ? b->left : 4;
  memcpy(&value, b->at, n);
  b->at += n;
  b->left -= n;
  return low + (int64_t)(value % (uint64_t)(high - low + 1));
}

static int64_t maybe(bytes *b, int64_t high) { return take(b, 0, 1) ? take(b, 0, high) : 0; }

static hcp_limits take_limits(bytes *b) {
  hcp_limits limits = {.ranks = (int32_t)take(b, 1, RANKS)};
  limits.min_degree = take(b, 0, 3) ? 1 : (int32_t)take(b, 1, limits.ranks);
  limits.max_degree =
      take(b, 0, 3) ? limits.ranks : (int32_t)take(b, limits.min_degree, limits.ranks);
  limits.max_tokens_per_rank = take(b, 0, 15) ? take(b, 1, 1 << take(b, 1, 14)) : INT32_MAX;
  limits.alignment = take(b, 0, 2) ? 1 : (int32_t)take(b, 0, 1 + limits.max_tokens_per_rank / 8);
  limits.ranks_per_node = (int32_t)(take(b, 0, 1) ? take(b, 0, 3) * 4 : maybe(b, 9));
  int32_t node = limits.ranks_per_node;
  limits.pow2 = (int32_t)take(b, 0, 1) && ((node & (node - 1)) == 0 || !take(b, 0, 19));
  limits.sync = take(b, 0, 1) ? HCP_SYNC_STEP : HCP_SYNC_MICRO_BATCH;
  return limits;
}

static void take_pipeline(bytes *b, hcp_limits *limits) {
  hcp_pipeline *pipeline = &limits->pipeline;
  if (take(b, 0, 2) > 0) return;
  pipeline->stages = (int32_t)take(b, 0, 8);
  pipeline->virtual_stages = (int32_t)maybe(b, 3);
  pipeline->micro_batch_group = take(b, 0, 3) || pipeline->virtual_stages < 2
                                    ? 0
                                    : pipeline->stages + (int32_t)take(b, -1, 3);
}

static void take_memory(bytes *b, hcp_limits *limits) {
  hcp_memory *memory = &limits->memory;
  if (take(b, 0, 3) > 0) return;
  memory->activation = take(b, 0, 1000);
  memory->logit = maybe(b, 100000);
  memory->gathered = maybe(b, 1000);
  memory->attention = maybe(b, 1000);
  memory->head_chunks = maybe(b, 4);
  int64_t share = take(b, 1, 4), more = take(b, 0, 1000);
  int64_t full = (memory->activation + memory->logit + 1) * limits->max_tokens_per_rank;
  memory->buffer = maybe(b, 1000);
  memory->limit = full / share + more + memory->buffer;
}

/* Arrays that limits point to. */
typedef struct lists {
  int32_t min_degrees[SEQUENCES], max_degrees[SEQUENCES], slowness[RANKS];
} lists;

static void take_lists(bytes *b, hcp_limits *limits, int32_t n, lists *x) {
  if (take(b, 0, 3) == 0) {
    for (int32_t i = 0; i < n; i++) {
      x->min_degrees[i] = (int32_t)(1 + maybe(b, limits->ranks - 1));
      x->max_degrees[i] =
          take(b, 0, 2) ? limits->ranks : (int32_t)take(b, x->min_degrees[i], limits->ranks);
    }
    limits->min_degrees = x->min_degrees;
    limits->max_degrees = x->max_degrees;
  }
  if (take(b, 0, 3) == 0) {
    for (int32_t r = 0; r < limits->ranks; r++)
      x->slowness[r] = HCP_FULL_SPEED + (int32_t)(r == 0 ? 0 : maybe(b, HCP_FULL_SPEED));
    limits->slowness = x->slowness;
  }
}

/* Nothing, little, or as much as 63 bits hold. */
static int64_t take_price(bytes *b) {
  static const int64_t small[] = {0, 0, 1, 2};
  int64_t kind = take(b, 0, 5);
  if (kind < 4) return small[kind];
  int32_t bits = (int32_t)take(b, 1, 62);
  return take(b, 0, 1) ? (int64_t)1 << bits : INT64_MAX >> (62 - bits);
}

/* Prices of any size, few of which belong together. */
static hcp_cost take_wild_cost(bytes *b) {
  hcp_cost cost = {0};
#define TAKE(name) cost.name = take_price(b);
  HCP_PRICES(TAKE)
#undef TAKE
  cost.overlap = take(b, 0, 1);
  return cost;
}

static hcp_cost take_cost(bytes *b) {
  if (take(b, 0, 3) == 0) return take_wild_cost(b);
  hcp_cost cost = {.pair = take(b, 0, 100)};
  cost.token = take(b, 0, 100000);
  cost.exchange = maybe(b, 100000);
  cost.launch = maybe(b, 1 << take(b, 0, 30));
  cost.exchange_far = maybe(b, 100000);
  cost.all_to_all = maybe(b, 100000);
  cost.all_to_all_far = maybe(b, 100000);
  cost.step = maybe(b, 100000);
  cost.window = maybe(b, 5000);
  cost.tile = maybe(b, 200);
  cost.overlap = take(b, 0, 1);
  cost.host = maybe(b, 1 << take(b, 0, 30));
  return cost;
}

static int32_t take_lengths(bytes *b, const hcp_limits *limits, int64_t *lengths) {
  int32_t n = (int32_t)take(b, 0, take(b, 0, 63) ? FEW : SEQUENCES);
  int32_t wild = take(b, 0, 9) == 0, widest = limits->max_degree;
  while (limits->ranks_per_node > 0 && widest > limits->ranks_per_node &&
         widest % limits->ranks_per_node != 0)
    widest--;
  while (limits->pow2 && (widest & (widest - 1)) != 0) widest &= widest - 1;
  for (int32_t i = 0; i < n; i++) {
    int64_t room = limits->max_tokens_per_rank - limits->alignment;
    int64_t longest = (room > 3 ? room - 2 : 1) * take(b, 1, widest);
    lengths[i] = wild ? take(b, -1, 2 * longest) : take(b, 1, longest);
  }
  return n;
}

/* Pairs of each sequence, often none of any; NULL: those of the window. */
static const int64_t *take_pairs(bytes *b, const int64_t *lengths, int32_t n, int64_t *pairs) {
  int64_t kind = take(b, 0, 5);
  if (kind > 1) return NULL;
  for (int32_t i = 0; i < n; i++) {
    int64_t side = kind == 0 ? 0 : maybe(b, lengths[i] > 0 ? lengths[i] : 0);
    pairs[i] = side * (side < INT32_MAX ? side : 1);
  }
  return pairs;
}

static void expect(int held, const char *what) {
  if (held) return;
  fprintf(stderr, "broken: %s\n", what);
  abort();
}

static void judge(const hcp_plan *plan, const hcp_plan *again) {
  hcp_plan *checked = NULL;
  hcp_error err;
  hcp_status status = hcp_plan_create_from(
      plan->lengths, plan->n, &plan->limits, &plan->cost, plan->micro_batches,
      plan->micro_batch_count, plan->groups, plan->group_count, plan->sequences, &checked, &err);
  expect(status == HCP_OK, status == HCP_OK ? "" : err.message);
  expect(plan->checksum == again->checksum, "the same request gave two plans");
  expect(checked->makespan == plan->makespan, "makespan");
  expect(plan->bound <= plan->makespan, "a plan beats the bound");
  hcp_plan_destroy(checked);
}

/* Whether d ranks may compute the sequence, by its own bounds and by bytes. */
static int fits(const hcp_limits *limits, int64_t length, int32_t i, int32_t d) {
  const hcp_memory *memory = &limits->memory;
  int64_t chunks = memory->head_chunks > 1 ? memory->head_chunks : 1;
  int64_t padding = limits->alignment > 1 ? limits->alignment - 1 : 0;
  int64_t rows = hcp_rows_max(length, d), row = memory->activation + memory->logit;
  int64_t buffers = rows * memory->attention + length * memory->gathered;
  int64_t padded = padding * (memory->attention + memory->gathered);
  int64_t needed = memory->buffer + (rows + padding) * row;
  if (d > 1) needed += (buffers + chunks - 1) / chunks + (padded + chunks - 1) / chunks;
  if (limits->min_degrees != NULL && d < limits->min_degrees[i]) return 0;
  if (limits->max_degrees != NULL && d > limits->max_degrees[i]) return 0;
  return memory->limit == 0 || needed <= memory->limit;
}

/* A sequence that the widest allowed degree holds has a plan. */
static int feasible(const hcp_limits *limits, const int64_t *lengths, int32_t n) {
  int64_t capacity = limits->max_tokens_per_rank;
  if (limits->alignment > 1) capacity -= capacity % limits->alignment;
  for (int32_t i = 0; i < n; i++) {
    int held = 0;
    for (int32_t d = limits->min_degree; d <= limits->max_degree; d++) {
      int32_t node = limits->ranks_per_node;
      if (limits->pow2 && (d & (d - 1)) != 0) continue;
      if (node > 0 && d > node && d % node != 0) continue;
      held |= hcp_rows_max(lengths[i], d) <= capacity && fits(limits, lengths[i], i, d);
    }
    if (!held) return 0;
  }
  return 1;
}

/* At any effort the bound is one. */
static void judge_bound(const hcp_plan *plan, int32_t effort) {
  int64_t bound, work;
  hcp_error err;
  hcp_status status = hcp_plan_bound(plan->lengths, plan->n, &plan->limits, &plan->cost, effort,
                                     NULL, &bound, &work, &err);
  expect(status == HCP_OK, status == HCP_OK ? "" : err.message);
  expect(bound >= plan->bound && bound <= plan->makespan, "a plan beats the bound of more effort");
  expect(work == plan->work, "work");
}

static uint64_t mix(uint64_t digest, uint64_t value) {
  return ((digest ^ value) * 0x9e3779b97f4a7c15u) ^ (digest >> 29);
}

/* What came of a request, as a number. */
static uint64_t digest_of(hcp_status status, const hcp_plan *plan, const char *message) {
  uint64_t digest = mix(1, (uint64_t)status);
  if (status == HCP_OK) {
    digest = mix(digest, plan->checksum);
    digest = mix(digest, (uint64_t)plan->makespan);
    return mix(digest, (uint64_t)plan->bound);
  }
  for (; *message != 0; message++) digest = mix(digest, (uint8_t)*message);
  return digest;
}

static uint64_t try_request(const uint8_t *data, size_t size, int *planned) {
  bytes b = {data, size};
  int64_t lengths[SEQUENCES], pairs[SEQUENCES];
  hcp_limits limits = take_limits(&b);
  take_pipeline(&b, &limits);
  take_memory(&b, &limits);
  hcp_cost cost = take_cost(&b);
  hcp_plan *plan = NULL, *again = NULL;
  hcp_error err;
  int32_t n = take_lengths(&b, &limits, lengths);
  lists arrays;
  take_lists(&b, &limits, n, &arrays);
  cost.pairs = take_pairs(&b, lengths, n, pairs);
  if (cost.pairs != NULL && take(&b, 0, 1)) cost.token = 0;
  int32_t effort = take(&b, 0, 15) ? 1 : 2;
  hcp_status status = hcp_plan_create(lengths, n, &limits, &cost, 1, NULL, &plan, &err);
  if (status == HCP_OK) {
    expect(hcp_plan_create(lengths, n, &limits, &cost, 1, NULL, &again, &err) == HCP_OK,
           "a second time");
    judge(plan, again);
    judge_bound(plan, effort);
  } else {
    expect(status == HCP_INVALID || status == HCP_INFEASIBLE || status == HCP_OVERFLOW,
           err.message);
    expect(strstr(err.message, "expected") != NULL || strstr(err.message, "hold at most") != NULL ||
               strstr(err.message, "exceed") != NULL,
           err.message);
    expect(status != HCP_INFEASIBLE || !feasible(&limits, lengths, n), err.message);
  }
  uint64_t digest = digest_of(status, plan, err.message);
  hcp_plan_destroy(again);
  hcp_plan_destroy(plan);
  *planned = status == HCP_OK;
  return digest;
}

#ifdef HCP_FUZZ_MAIN
/* The digest says whether two compilers gave the same plans and the same refusals. */
int main(int argc, char **argv) {
  long count = argc > 1 ? atol(argv[1]) : 10000, plans = 0;
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 0, digest = 0;
  uint64_t state = 0x9e3779b97f4a7c15u * (2 * seed + 1);
  uint8_t data[40 * SEQUENCES + 1000];
  for (long i = 0; i < count; i++) {
    int planned;
    for (size_t k = 0; k < sizeof data; k++) {
      state ^= state << 13; /* xorshift64 */
      state ^= state >> 7;
      state ^= state << 17;
      data[k] = (uint8_t)(state >> 32);
    }
    digest = mix(digest, try_request(data, sizeof data, &planned));
    plans += planned;
  }
  printf("%ld requests of seed %llu, %ld plans, %ld refused, digest %016llx\n", count,
         (unsigned long long)seed, plans, count - plans, (unsigned long long)digest);
  return 0;
}
#else
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  int planned;
  try_request(data, size, &planned);
  return 0;
}
#endif
