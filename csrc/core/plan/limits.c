/* limits.c - the limits of a plan: rows, degrees and places, bytes, bounds of single
 * sequences, ranks of different speed, pipelines. */
#include "plan.h"

enum { STAGES_MAX = 4096, GROUP_MAX = STAGES_MAX, SLOWNESS_MAX = 1 << 26 };

/* Long multiplication, bit by bit of b, that divides on its way: division of 128
 * bits would call for more than libc. */
static int64_t scaled_slowly(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t whole = 0, rest = 0, quotient = a / c, remainder = a % c;
  for (int32_t bit = 62; bit >= 0; bit--) {
    uint64_t taken = (b >> bit) & 1;
    if (whole > INT64_MAX / 4) return INT64_MAX;
    whole = 2 * whole + taken * quotient;
    rest = 2 * rest;
    if (rest >= c) whole++, rest -= c;
    if (taken) rest += remainder;
    if (rest >= c) whole++, rest -= c;
  }
  return whole < INT64_MAX ? (int64_t)(whole + (rest != 0)) : INT64_MAX;
}

int64_t hcp__scaled(int64_t a, int64_t b, int64_t c) {
  int64_t product;
  if (!__builtin_mul_overflow(a, b, &product)) return product / c + (product % c != 0);
  return scaled_slowly((uint64_t)a, (uint64_t)b, (uint64_t)c);
}

const char *hcp_sync_name(hcp_sync sync) {
  static const char *const names[] = {
#define HCP_SYNC_NAME(name, text) text,
      HCP_SYNCS(HCP_SYNC_NAME)
#undef HCP_SYNC_NAME
  };
  return sync < HCP_SYNC_COUNT ? names[sync] : NULL;
}

/* ---- checks ---- */

static hcp_status check_ranks_and_rows(const hcp_limits *limits, hcp_error *err) {
  if (limits->ranks < 1)
    return hcp__fail(err, HCP_INVALID, "ranks is %d, expected >= 1", limits->ranks);
  if (limits->ranks > HCP__RANKS_MAX)
    return hcp__fail(err, HCP_INVALID, "ranks is %d, expected <= %d", limits->ranks,
                     HCP__RANKS_MAX);
  if (limits->min_degree < 1 || limits->min_degree > limits->ranks)
    return hcp__fail(err, HCP_INVALID, "min_degree is %d, expected 1 to ranks (%d)",
                     limits->min_degree, limits->ranks);
  if (limits->max_degree < limits->min_degree || limits->max_degree > limits->ranks)
    return hcp__fail(err, HCP_INVALID, "max_degree is %d, expected min_degree (%d) to ranks (%d)",
                     limits->max_degree, limits->min_degree, limits->ranks);
  /* Local row counts travel as 32-bit cu_seqlens. */
  if (limits->max_tokens_per_rank < 1 || limits->max_tokens_per_rank > INT32_MAX)
    return hcp__fail(err, HCP_INVALID, "max_tokens_per_rank is %lld, expected 1 to 2^31 - 1",
                     (long long)limits->max_tokens_per_rank);
  return HCP_OK;
}

static hcp_status check_placing(const hcp_limits *limits, hcp_error *err) {
  int32_t node = limits->ranks_per_node;
  if (limits->alignment < 0 || limits->alignment > limits->max_tokens_per_rank)
    return hcp__fail(err, HCP_INVALID,
                     "alignment is %d, expected 0 (none) to max_tokens_per_rank (%lld)",
                     limits->alignment, (long long)limits->max_tokens_per_rank);
  if (node < 0) return hcp__fail(err, HCP_INVALID, "ranks_per_node is %d, expected >= 0", node);
  if (limits->pow2 && node > 0 && (node & (node - 1)) != 0)
    return hcp__fail(err, HCP_INVALID,
                     "ranks_per_node is %d, expected a power of two as degrees are", node);
  if (hcp_sync_name(limits->sync) == NULL)
    return hcp__fail(err, HCP_INVALID, "sync is %d, expected 0 to %d", (int)limits->sync,
                     HCP_SYNC_COUNT - 1);
  return HCP_OK;
}

hcp_status hcp__domain_check(const hcp_limits *limits, hcp_error *err) {
  hcp_status status = check_ranks_and_rows(limits, err);
  return status == HCP_OK ? check_placing(limits, err) : status;
}

hcp_status hcp__pipeline_check(const hcp_pipeline *pipeline, hcp_error *err) {
  int32_t stages = pipeline->stages, chunks = pipeline->virtual_stages;
  if (stages < 0 || stages > STAGES_MAX)
    return hcp__fail(err, HCP_INVALID, "pipeline_stages is %d, expected 0 (none) to %d", stages,
                     STAGES_MAX);
  if (chunks < 0 || chunks > STAGES_MAX || (chunks > 1 && stages < 2))
    return hcp__fail(err, HCP_INVALID,
                     "virtual_stages is %d, expected 0 or 1, or up to %d in a pipeline of 2 stages "
                     "or more",
                     chunks, STAGES_MAX);
  if (pipeline->micro_batch_group != 0 && (chunks < 2 || pipeline->micro_batch_group < stages ||
                                           pipeline->micro_batch_group > GROUP_MAX))
    return hcp__fail(err, HCP_INVALID,
                     "micro_batch_group is %d, expected pipeline_stages (%d) to %d of a pipeline "
                     "with virtual_stages > 1, or 0",
                     pipeline->micro_batch_group, stages, GROUP_MAX);
  return HCP_OK;
}

/* ---- bytes ---- */

int64_t hcp_memory_bytes(const hcp_memory *memory, int64_t rows, int64_t tokens, int32_t degree) {
  int64_t shared = degree > 1, row, local, gathered, own;
  int64_t chunks = memory->head_chunks > 1 ? memory->head_chunks : 1;
  if (__builtin_add_overflow(memory->activation, memory->logit, &row) ||
      __builtin_mul_overflow(rows, row, &local) ||
      __builtin_mul_overflow(shared * tokens, memory->gathered, &gathered) ||
      __builtin_mul_overflow(shared * rows, memory->attention, &own) ||
      __builtin_add_overflow(gathered, own, &gathered) ||
      __builtin_add_overflow(local, gathered / chunks + (gathered % chunks != 0), &local))
    return INT64_MAX;
  return local;
}

/* Of the rows that alignment may add: attention computes them as one more sequence, whose tokens
 * are all on this rank. */
static int64_t padding_bytes(const hcp_limits *limits, int32_t degree) {
  int64_t rows = limits->alignment > 1 ? limits->alignment - 1 : 0;
  return hcp_memory_bytes(&limits->memory, rows, rows, degree);
}

int64_t hcp_memory_chunks(const hcp_memory *memory, int64_t rows, int64_t tokens, int32_t degree) {
  hcp_memory tried = *memory;
  int64_t low = 1, high = memory->head_chunks > 1 ? memory->head_chunks : 1;
  int64_t most = memory->limit - memory->buffer;
  if (memory->limit == 0) return 1;
  while (low < high) { /* the fewest that fit, if any, are in between */
    tried.head_chunks = low + (high - low) / 2;
    if (hcp_memory_bytes(&tried, rows, tokens, degree) <= most)
      high = tried.head_chunks;
    else
      low = tried.head_chunks + 1;
  }
  return low;
}

static hcp_status check_memory(const hcp_limits *limits, hcp_error *err) {
  const hcp_memory *memory = &limits->memory;
#define CHECK_BYTES(type, field, name)                                             \
  if (limits->field < 0 || limits->field > (int64_t)1 << 50)                       \
    return hcp__fail(err, HCP_INVALID, #name " is %lld bytes, expected 0 to 2^50", \
                     (long long)limits->field);
  HCP_MEMORY_LIMITS(CHECK_BYTES, memory.)
#undef CHECK_BYTES
  if (memory->limit == 0 || hcp__bytes_limit(limits, 1) >= 1) return HCP_OK;
  if (limits->alignment <= 1)
    return hcp__fail(err, HCP_INVALID,
                     "memory.limit is %lld bytes, expected more than the %lld that exchanges hold "
                     "(memory.buffer)",
                     (long long)memory->limit, (long long)memory->buffer);
  return hcp__fail(err, HCP_INVALID,
                   "memory.limit is %lld bytes, expected more than the %lld bytes of the %d rows "
                   "that alignment may add and the %lld that exchanges hold (memory.buffer)",
                   (long long)memory->limit, (long long)padding_bytes(limits, 1),
                   limits->alignment - 1, (long long)memory->buffer);
}

static hcp_status check_bounds(const hcp_limits *limits, int32_t n, hcp_error *err) {
  for (int32_t i = 0; i < n; i++) {
    int32_t least = limits->min_degrees != NULL ? limits->min_degrees[i] : 1;
    int32_t most = limits->max_degrees != NULL ? limits->max_degrees[i] : limits->ranks;
    if (least < 1 || least > limits->ranks)
      return hcp__fail(err, HCP_INVALID, "min_degrees[%d] is %d, expected 1 to ranks (%d)", i,
                       least, limits->ranks);
    if (most < least || most > limits->ranks)
      return hcp__fail(err, HCP_INVALID,
                       "max_degrees[%d] is %d, expected its least degree (%d) to ranks (%d)", i,
                       most, least, limits->ranks);
  }
  return HCP_OK;
}

static hcp_status check_slowness(const hcp_limits *limits, hcp_error *err) {
  int32_t fastest = SLOWNESS_MAX;
  for (int32_t r = 0; r < limits->ranks; r++) {
    if (limits->slowness[r] < HCP_FULL_SPEED || limits->slowness[r] > SLOWNESS_MAX)
      return hcp__fail(err, HCP_INVALID, "slowness[%d] is %d, expected %d (full speed) to %d", r,
                       limits->slowness[r], HCP_FULL_SPEED, SLOWNESS_MAX);
    if (limits->slowness[r] < fastest) fastest = limits->slowness[r];
  }
  if (fastest > HCP_FULL_SPEED)
    return hcp__fail(err, HCP_INVALID, "the least slowness is %d, expected %d of some rank",
                     fastest, HCP_FULL_SPEED);
  return HCP_OK;
}

hcp_status hcp__limits_check(const hcp_limits *limits, int32_t n, hcp_error *err) {
  hcp_status status = hcp__pipeline_check(&limits->pipeline, err);
  if (status == HCP_OK) status = check_memory(limits, err);
  if (status == HCP_OK) status = check_bounds(limits, n, err);
  if (status == HCP_OK && limits->slowness != NULL) status = check_slowness(limits, err);
  return status;
}

/* ---- rows, degrees and places ---- */

int32_t hcp_nodes_of(int32_t first_rank, int32_t degree, int32_t ranks_per_node) {
  if (ranks_per_node == 0) return 1;
  return (first_rank + degree - 1) / ranks_per_node - first_rank / ranks_per_node + 1;
}

int32_t hcp_nodes_allow(int32_t degree, int32_t ranks_per_node) {
  return ranks_per_node == 0 || degree <= ranks_per_node || degree % ranks_per_node == 0;
}

int64_t hcp__capacity(const hcp_limits *limits) {
  int64_t rows = limits->max_tokens_per_rank;
  return limits->alignment > 1 ? rows - rows % limits->alignment : rows;
}

int32_t hcp__degree_allowed(const hcp_limits *limits, const hcp_cost *cost, int32_t degree) {
  if (degree < limits->min_degree || degree > limits->max_degree) return 0;
  if (limits->pow2 && (degree & (degree - 1)) != 0) return 0;
  if (!hcp_nodes_allow(degree, limits->ranks_per_node)) return 0;
  return cost->times == NULL || hcp__times_column(cost->times, degree) >= 0;
}

int32_t hcp__place_allowed(const hcp_limits *limits, int32_t first_rank, int32_t degree) {
  int32_t node = limits->ranks_per_node;
  if (limits->pow2 && first_rank % degree != 0) return 0;
  if (node > 0 && degree > node) return first_rank % node == 0;
  return hcp_nodes_of(first_rank, degree, node) == 1;
}

/* ---- bounds of single sequences ---- */

int32_t hcp__sequence_allows(const hcp_limits *limits, int32_t sequence, int32_t degree) {
  if (limits->min_degrees != NULL && degree < limits->min_degrees[sequence]) return 0;
  return limits->max_degrees == NULL || degree <= limits->max_degrees[sequence];
}

int64_t hcp__bytes(const hcp_memory *memory, int64_t length, int32_t degree) {
  return hcp_memory_bytes(memory, hcp_rows_max(length, degree), length, degree);
}

int64_t hcp__bytes_limit(const hcp_limits *limits, int32_t degree) {
  const hcp_memory *memory = &limits->memory;
  if (memory->limit == 0) return INT64_MAX;
  return memory->limit - memory->buffer - padding_bytes(limits, degree);
}

/* ---- speed ---- */

int32_t hcp__slowness(const hcp_limits *limits, int32_t first_rank, int32_t degree) {
  int32_t most = HCP_FULL_SPEED;
  for (int32_t r = first_rank; limits->slowness != NULL && r < first_rank + degree; r++)
    if (limits->slowness[r] > most) most = limits->slowness[r];
  return most;
}

int64_t hcp__rank_time(const hcp_limits *limits, int64_t time) {
  int64_t shares = 0; /* of the fastest rank, each rounded up, in 1 / HCP_FULL_SPEED */
  if (limits->slowness == NULL) return hcp__scaled(time, limits->ranks, 1);
  for (int32_t r = 0; r < limits->ranks; r++)
    shares += hcp__scaled(HCP_FULL_SPEED, HCP_FULL_SPEED, limits->slowness[r]);
  return hcp__scaled(time, shares, HCP_FULL_SPEED);
}
