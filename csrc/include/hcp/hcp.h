/* hcp.h - context parallelism (CP) as plain values.
 *
 * This header is the whole contract of the core, in the order in which a
 * training step meets it:
 *
 *   1. status and error   the result of every call
 *   2. cost               the cost of one sequence at a degree
 *   3. plan               the ranks that compute each sequence
 *   4. layout             the rows that one rank holds in one micro-batch
 *   5. route              moves rows to where they are computed, and back
 *   6. states             how states of recurrent layers get from rank to rank
 *   7. schedule           the steps of one attention layer on one rank
 *   8. launches           a schedule's blocks of attention as launches of a kernel
 *   9. grid               the ranks that form tp, pp, cp, dp, ...
 *  10. rebind             swaps the process groups that a model holds, all or none
 *
 * The core is C11 and libc: it knows no tensor, no language, no device and no
 * communicator, keeps no globals, starts no threads and does no I/O. Every
 * value is immutable once its create call has returned, so any thread may read
 * it. Arguments are borrowed for the call unless a comment says more. Outputs
 * are written on success only. Every destroy call accepts NULL.
 *
 * Functions, structs and their order may change in any minor release, and do not
 * in a patch release. No library with these symbols is installed: a caller
 * compiles csrc/core/ of the same release into its own program. It says at its
 * top which release it was written for:
 *
 *   #if HCP_VERSION_MAJOR != 0 || HCP_VERSION_MINOR != 2
 *   #error "written for hcp 0.2"
 *   #endif
 */
#ifndef HCP_HCP_H
#define HCP_HCP_H

/* The release of this header. */
#define HCP_VERSION_MAJOR 0
#define HCP_VERSION_MINOR 3

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Status and error ------------------------------------------------ */

#define HCP_STATUS_MAP(X)                                  \
  X(OK, "success")                                         \
  X(INVALID, "an argument is not what was expected")       \
  X(INFEASIBLE, "no plan keeps the limits")                \
  X(NO_MEMORY, "out of memory")                            \
  X(OVERFLOW, "a count or a cost does not fit in 63 bits") \
  X(CALLBACK, "a callback reported failure")               \
  X(DEVICE, "a device reported failure")

typedef enum hcp_status {
#define HCP_STATUS_ENUM(name, text) HCP_##name,
  HCP_STATUS_MAP(HCP_STATUS_ENUM)
#undef HCP_STATUS_ENUM
} hcp_status;

/* Belongs to the caller, who may pass NULL where the status alone is enough.
 * message gives the value, the expectation and the place. */
typedef struct hcp_error {
  hcp_status status;
  char message[480];
} hcp_error;

/* The name without its prefix, such as "INVALID". Never NULL. */
const char *hcp_status_name(hcp_status status);
/* What the status means, in words. Never NULL. */
const char *hcp_status_text(hcp_status status);

/* ---- 2. Cost ------------------------------------------------------------ */

/* Who knows the times that a cost table does not have yet. time is called on the thread of the call
 * that plans, once for each time that this needs, and returns 1 to 2^42: the same whenever it is
 * asked. One that cannot returns anything, and lets hcp_stop end the call. */
typedef struct hcp_ask {
  int64_t (*time)(void *context, int64_t length, int32_t degree);
  void *context;
} hcp_ask;

/* A cost table: times that somebody measured or computed, row after row, one row
 * per length. A plan under it uses these degrees and no others, and none at which a length has no
 * time. */
typedef struct hcp_times {
  int32_t length_count;
  int32_t degree_count;
  const int64_t *lengths; /* length_count, ascending */
  const int32_t *degrees; /* degree_count, ascending */
  const int64_t *times;   /* length_count * degree_count, 1 to 2^42 each; 0: there is none */
  const hcp_ask *ask;     /* NULL, or gives those that are 0: hcp_plan_create and hcp_plan_bound
                             then write them to times */
} hcp_times;

/* Integer prices, in one unit of the caller's choice (picoseconds, say). Only
 * integers decide a plan: ranks that round differently would hold different
 * plans and hang in the next exchange. A price of 0 costs nothing.
 *
 * A group that spans nodes (degree > hcp_limits.ranks_per_node) pays the far
 * prices, which are at least the near ones. */
typedef struct hcp_cost {
  int64_t pair;           /* one query-key pair of causal attention */
  int64_t token;          /* one token through everything that is not attention */
  int64_t exchange;       /* one token's keys and values received by one rank */
  int64_t launch;         /* one micro-batch on one rank, whatever it holds */
  int64_t exchange_far;   /* exchange, between nodes */
  int64_t all_to_all;     /* one token of a rank to heads and back, no overlap */
  int64_t all_to_all_far; /* all_to_all, between nodes */
  int64_t step;           /* one more rank in the group */
  int64_t window;         /* keys that a query sees at most; 0: all before it */
  int64_t tile;           /* rows that a chunk is rounded up to; 0: none */
  int64_t overlap;        /* 1: exchange hides behind attention, as in a ring */
  int64_t host;           /* the least time of one micro-batch on one rank: its host queues it */
  const hcp_times *times; /* NULL, or a cost table, which replaces all but launch and host */
  /* NULL, or the pairs of each sequence, >= 0, in place of those of the window. There is no cost
   * table then, and only calls that take sequences read it. */
  const int64_t *pairs;
} hcp_cost;

/* The names of the prices, in the order of the fields. */
#define HCP_PRICES(X) \
  X(pair)             \
  X(token)            \
  X(exchange)         \
  X(launch)           \
  X(exchange_far)     \
  X(all_to_all)       \
  X(all_to_all_far)   \
  X(step)             \
  X(window)           \
  X(tile)             \
  X(overlap)          \
  X(host)

/* These prices are the only model of time: a plan, the time of a group (hcp_group_times) and the
 * comm type of a group (hcp_comm_times) are computed from them, and hcp_plan_replay from those of
 * a machine, in seconds.
 *
 * Time of one sequence of length L tokens computed by d ranks, without launch:
 *
 *   ceil((attention + token * rows) / d) + moved + (d - 1) * step
 *
 * where rows is L, or L with its 2 d chunks rounded up to tiles; attention is
 * pair times the pairs of rows tokens under the window; and moved is
 * exchange * (L - floor(L / d)) + ceil(all_to_all * L / d) for d > 1. With
 * overlap only what attention does not hide of the exchange counts: beyond
 * ceil(attention / d) * (d - 1) / d.
 *
 * pairs, where it is not negative, are the sequence's own, in place of the window's. What has no
 * price takes 1.
 *
 * A rank's micro-batch takes the larger of host and of launch + the times of its sequences: the GPU
 * computes what the host has queued. Without sequences it takes the larger of host and launch.
 *
 * HCP_OVERFLOW when that does not fit in 62 bits. length >= 1, degree >= 1. */
hcp_status hcp_cost_time(const hcp_cost *cost, int64_t length, int64_t pairs, int32_t degree,
                         int32_t ranks_per_node, int64_t *time, hcp_error *err);

/* ---- 3. Plan ------------------------------------------------------------ */

#define HCP_SYNCS(X) \
  X(STEP, "step")    \
  X(MICRO_BATCH, "micro_batch")

/* When ranks wait for ranks outside their own group: at the end of the step
 * (DDP), or after every micro-batch (FSDP, experts, pipelines). */
typedef enum hcp_sync {
#define HCP_SYNC_ENUM(name, text) HCP_SYNC_##name,
  HCP_SYNCS(HCP_SYNC_ENUM)
#undef HCP_SYNC_ENUM
      HCP_SYNC_COUNT
} hcp_sync;

/* Never NULL for a valid one; NULL otherwise. */
const char *hcp_sync_name(hcp_sync sync);

/* Every number among a plan's limits, once: X(type, field, name). name is the word
 * that errors and hcp.plan use; "in" comes before each field. The structs below, a
 * plan's checksum and the glue to Python follow from these lists, all in this order.
 * From the fifth on, 0 asks for nothing. */
#define HCP_DOMAIN_LIMITS(X, in)                                 \
  /* the domain: ranks 0 .. ranks - 1 */                         \
  X(int32_t, in ranks, ranks)                                    \
  /* >= 1 */                                                     \
  X(int32_t, in min_degree, min_degree)                          \
  /* >= min_degree, <= ranks */                                  \
  X(int32_t, in max_degree, max_degree)                          \
  /* rows that one rank may hold in one micro-batch */           \
  X(int64_t, in max_tokens_per_rank, max_tokens_per_rank)        \
  /* rows of a rank are padded to a multiple of this */          \
  X(int32_t, in alignment, alignment)                            \
  /* degrees up to it stay in a node, others take whole nodes */ \
  X(int32_t, in ranks_per_node, ranks_per_node)                  \
  /* 1: degrees are powers of two, at multiples of them */       \
  X(int32_t, in pow2, pow2)                                      \
  X(hcp_sync, in sync, sync)

#define HCP_PIPELINE_LIMITS(X, in)                                                  \
  X(int32_t, in stages, pipeline_stages)                                            \
  /* chunks of layers that a stage has: more than 1 is interleaved */               \
  X(int32_t, in virtual_stages, virtual_stages)                                     \
  /* micro-batches in a row of one chunk, stages to 4096; 0: stages. Interleaved */ \
  /* micro-batches come in multiples of it */                                       \
  X(int32_t, in micro_batch_group, micro_batch_group)

#define HCP_MEMORY_LIMITS(X, in)                                       \
  /* bytes that one row keeps for the backward */                      \
  X(int64_t, in activation, memory.activation)                         \
  /* bytes of one row's logits */                                      \
  X(int64_t, in logit, memory.logit)                                   \
  /* keys and values of one token, while a layer has them all */       \
  X(int64_t, in gathered, memory.gathered)                             \
  /* most bytes of one rank in one micro-batch; 0: no limit */         \
  X(int64_t, in limit, memory.limit)                                   \
  /* bytes of one row in attention's own buffers, where ranks share */ \
  X(int64_t, in attention, memory.attention)                           \
  /* most chunks of heads that attention is computed in; 0: one */     \
  X(int64_t, in head_chunks, memory.head_chunks)                       \
  /* bytes of the limit that buffers of exchanges always hold */       \
  X(int64_t, in buffer, memory.buffer)

/* All of them, each field from hcp_limits on. */
#define HCP_LIMITS(X) \
  HCP_DOMAIN_LIMITS(X, ) HCP_PIPELINE_LIMITS(X, pipeline.) HCP_MEMORY_LIMITS(X, memory.)

/* The lists among the limits: X(name, count). count is an expression of limits and
 * of n, the number of sequences. */
#define HCP_LIMIT_LISTS(X)                                                         \
  /* of each sequence, in addition to min_degree; NULL: no more bounds */          \
  X(min_degrees, n)                                                                \
  /* of each sequence, in addition to max_degree; NULL: no more bounds */          \
  X(max_degrees, n)                                                                \
  /* of each rank, HCP_FULL_SPEED (the fastest) and more; a group takes as long */ \
  /* as its slowest rank; NULL: all are equal */                                   \
  X(slowness, limits->ranks)

/* The slowness of a rank as fast as the cost says. */
#define HCP_FULL_SPEED 65536

#define HCP_LIMIT_FIELD(type, field, name) type field;
#define HCP_LIMIT_LIST_FIELD(name, count) const int32_t *name;

/* Pipeline stages: each has ranks of its own, all follow one plan, and every
 * micro-batch passes through them forward and then backward. Zeros: no pipeline. */
typedef struct hcp_pipeline {
  HCP_PIPELINE_LIMITS(HCP_LIMIT_FIELD, )
} hcp_pipeline;

/* Bytes that a micro-batch takes on a rank, in addition to what the rank always
 * holds:
 *
 *   rows * (activation + logit) + (attention * rows + gathered * tokens) / head_chunks
 *
 * where rows are those of the fullest rank, sequence by sequence, and tokens those of the
 * group's sequences. The second term counts when its degree is more than 1, rounded up for
 * each sequence. Alignment may add a sequence of alignment - 1 tokens on one rank. The limit
 * holds these bytes and the buffer. */
typedef struct hcp_memory {
  HCP_MEMORY_LIMITS(HCP_LIMIT_FIELD, )
} hcp_memory;

/* What a plan must keep. */
typedef struct hcp_limits {
  HCP_DOMAIN_LIMITS(HCP_LIMIT_FIELD, )
  hcp_pipeline pipeline;
  hcp_memory memory;
  HCP_LIMIT_LISTS(HCP_LIMIT_LIST_FIELD)
} hcp_limits;

#undef HCP_LIMIT_FIELD
#undef HCP_LIMIT_LIST_FIELD

/* A contiguous interval of ranks that computes one packed set of sequences. */
typedef struct hcp_group {
  int32_t first_rank;
  int32_t degree;
  int32_t first_sequence; /* into hcp_plan.sequences */
  int32_t sequences;
} hcp_group;

/* Groups that run side by side: their rank intervals are disjoint and ascend.
 * Ranks outside all of them hold no rows in the micro-batch. */
typedef struct hcp_micro_batch {
  int32_t first_group; /* into hcp_plan.groups */
  int32_t groups;
} hcp_micro_batch;

/* Pairs of a query and a key of one sequence: those of queries [query_begin, query_end) and
 * keys [key_begin, key_end) with low <= key - query <= high. */
typedef struct hcp_slice {
  int64_t query_begin, query_end;
  int64_t key_begin, key_end;
  int64_t low, high;
} hcp_slice;

/* Count the pairs of queries [first, end) that slices of one mask see. Tokens are below 2^31, and
 * the slices have no pair in common. */
int64_t hcp_slices_pairs(const hcp_slice *slices, int64_t n, int64_t first, int64_t end);

/* A query and a key that two slices see. */
typedef struct hcp_common_pair {
  int64_t slice, other; /* their places, ascending */
  int64_t query, key;
} hcp_common_pair;

/* Find a pair that two of n slices see: *overlap is 1, and *found says which; else it is 0. */
hcp_status hcp_slices_overlap(const hcp_slice *slices, int64_t n, int32_t *overlap,
                              hcp_common_pair *found, hcp_error *err);

/* Consecutive tokens of a sequence from this one on, up to the next run: their positions
 * ascend one by one. */
typedef struct hcp_position_run {
  int64_t token, position;
} hcp_position_run;

/* A mask of each of n sequences. That of sequence i is the slices from first[i] up to
 * first[i + 1]. They ascend by their first query and have no pair in common. A query that
 * is in none sees nothing. Positions of its tokens are the runs from first_run[i] up to
 * first_run[i + 1], which ascend from token 0 on; without any they are places. */
typedef struct hcp_masks {
  const int64_t *first; /* n + 1 */
  const hcp_slice *slices;
  const int64_t *first_run; /* n + 1, NULL: no sequence has runs */
  const hcp_position_run *runs;
} hcp_masks;

typedef struct hcp_plan {
  hcp_limits limits;
  hcp_cost cost;
  int32_t n; /* sequences planned */
  const int64_t *lengths; /* n */
  int32_t micro_batch_count;
  const hcp_micro_batch *micro_batches; /* in the order in which every rank runs them */
  int32_t group_count;
  const hcp_group *groups;
  const int32_t *sequences; /* n: the lengths' indices, group after group */
  const int32_t *turns; /* n: the chunk of 2 * degree at which rounding begins */
  int64_t makespan; /* cost units: when the last rank ends */
  int64_t bound; /* no plan under this cost is faster */
  int64_t work; /* rank-time of all sequences at degree 1 */
  uint64_t checksum; /* of the request and of what was decided */
  int32_t mask_count; /* 0: each layer's causal mask and window */
  const hcp_masks *masks; /* mask_count: for layers of several kinds */
  const struct hcp__cut *const *cuts; /* n, NULL without masks; NULL for zigzag */
  const struct hcp__documents *documents; /* NULL: each sequence is one document */
} hcp_plan;

/* Rows when degree ranks share length tokens zigzag: rank j holds chunks j and
 * 2 * degree - 1 - j of 2 * degree, and chunk k is
 * [floor(k * length / (2 * degree)), floor((k + 1) * length / (2 * degree))). Sequences of a group
 * whose lengths leave the same rest by 2 * degree would all put their spare rows on the same ranks:
 * the second one is rounded as if it began at chunk 1, the third one at chunk 2, and so on.
 *
 * hcp_rows_held: those of rank j without others. hcp_rows_max: those of the fullest rank; added up
 * over a group they are no less than what its fullest rank has. hcp_rows_up_to: the most
 * of any length up to that one. A shorter sequence may need a row more than the longest: on 4 ranks
 * 11 tokens put 4 on one of them, and 12 tokens 3 on each. */
int64_t hcp_rows_held(int64_t length, int32_t degree, int32_t j);
int64_t hcp_rows_max(int64_t length, int32_t degree);
int64_t hcp_rows_up_to(int64_t length, int32_t degree);

/* Nodes that ranks [first_rank, first_rank + degree) are in: 1 where ranks_per_node is 0. */
int32_t hcp_nodes_of(int32_t first_rank, int32_t degree, int32_t ranks_per_node);
/* Whether a group may have so many ranks: at most those of a node, or whole nodes. */
int32_t hcp_nodes_allow(int32_t degree, int32_t ranks_per_node);

/* Bytes of hcp_memory on a rank that has so many rows of sequences of so many tokens; INT64_MAX
 * where they do not fit. */
int64_t hcp_memory_bytes(const hcp_memory *memory, int64_t rows, int64_t tokens, int32_t degree);
/* The fewest chunks of heads with which these bytes keep the limit; head_chunks where none do. */
int64_t hcp_memory_chunks(const hcp_memory *memory, int64_t rows, int64_t tokens, int32_t degree);

/* Simulate n micro-batches in a pipeline, in the order given: one forward, one
 * backward (1F1B), interleaved where virtual_stages is more than 1. times[i] is the
 * time of one stage for micro-batch i, a third of it forward; passing on is free.
 * *makespan is rounded up. HCP_INVALID when n is not a multiple of the
 * micro_batch_group of an interleaved pipeline. */
hcp_status hcp_pipeline_time(const hcp_pipeline *pipeline, const int64_t *times, int32_t n,
                             int64_t *makespan, hcp_error *err);

/* How a caller ends a search before its end, which effort alone decides otherwise. stopped is asked
 * many times a second, on the thread of the call; once it has returned anything but 0 it has to
 * stay so, and the call ends with HCP_CALLBACK. */
typedef struct hcp_stop {
  int32_t (*stopped)(void *context);
  void *context;
} hcp_stop;

/* Assign n sequences to ranks.
 *
 * The same lengths, limits, cost and effort give the same plan on every rank and
 * every machine: only integer arithmetic decides, effort is counted in attempts
 * and never in time, and ties go to the lower index. effort is 1 for the usual
 * search, more for a longer one. HCP_INFEASIBLE names the sequence that no
 * allowed degree can hold. n may be 0, stop may be NULL. On success the caller owns *plan.
 *
 * Where a cost table asks for its times, the plan keeps those that were asked for, and its bound
 * holds for plans of these: of all, if no length needs less rank-time at more ranks. */
hcp_status hcp_plan_create(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                           const hcp_cost *cost, int32_t effort, const hcp_stop *stop,
                           hcp_plan **plan, hcp_error *err);

/* Find a time that no plan beats, and the least rank-time that the sequences need. effort
 * is 1 for the bound of plans; under HCP_SYNC_MICRO_BATCH more looks for a sharper one, in
 * seconds. stop may be NULL. It is in csrc/bounds/, which plans and tables do without. */
hcp_status hcp_plan_bound(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                          const hcp_cost *cost, int32_t effort, const hcp_stop *stop,
                          int64_t *bound, int64_t *work, hcp_error *err);

/* Make a plan of groups that somebody else chose, checked against every rule that
 * hcp_plan_create keeps: each sequence once, intervals inside the domain,
 * disjoint and ascending in a micro-batch, no group without a sequence, degrees,
 * rows and bytes within the limits. A micro-batch has groups, except that an
 * interleaved pipeline with fewer sequences than micro-batches ends with some
 * that have none. */
hcp_status hcp_plan_create_from(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                                const hcp_cost *cost, const hcp_micro_batch *micro_batches,
                                int32_t micro_batch_count, const hcp_group *groups,
                                int32_t group_count, const int32_t *sequences, hcp_plan **plan,
                                hcp_error *err);

/* Give a plan masks, each of all its sequences, as the last step of its creation: nobody else
 * has the plan yet, and it has none. Its checksum becomes one of them too. *masks is copied.
 *
 * Where zigzag would give the ranks of a group unequal numbers of pairs, under all masks
 * together, the sequence gets a cut of its own, in which every rank has as many rows as under
 * zigzag. HCP_INVALID for a slice or a run outside its sequence, for positions of 2^39 or more,
 * and for sequences of 2^28 tokens or more. mask_count is 1 to 64. After a failure the plan is as
 * it was. */
hcp_status hcp_plan_set_masks(hcp_plan *plan, const hcp_masks *masks, int32_t mask_count,
                              hcp_error *err);

/* Where a sequence's positions do not ascend one by one, its first mask's, a document begins
 * if no token on one side sees one on the other. If not, and if no mask lets the token see the
 * one before it, a branch begins there, as in a tree of texts. HCP_INVALID, naming the
 * operation, where some sequence has branches: what goes from token to token is then refused. */
hcp_status hcp_plan_expect_no_branches(const hcp_plan *plan, const char *operation, hcp_error *err);

/* A branch continues its parent: of the tokens that it sees, the last at the position before its
 * own. One that sees no token before it begins a text. HCP_INVALID, naming the operation, where
 * some branch has no such token before it, or sees others than those of its text. */
hcp_status hcp_plan_expect_trees(const hcp_plan *plan, const char *operation, hcp_error *err);

void hcp_plan_destroy(hcp_plan *plan);

/* The time at which each of n sequences ends in a group of these ranks that runs them one after the
 * other: launch, then hcp_cost_time of each, all slowed to the slowest rank. It is that of one
 * stage, counted from the group's start. HCP_INVALID for a sequence or ranks that the plan has not,
 * and where a cost table has no time. */
hcp_status hcp_group_times(const hcp_plan *plan, int32_t first_rank, int32_t degree,
                           const int32_t *sequences, int32_t n, int64_t *ends, hcp_error *err);

/* The fewest chunks of heads with which every rank of this rank's group keeps the plan's memory
 * limit: alike on all of them. 1 for a rank without a group. */
hcp_status hcp_group_chunks(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                            int64_t *chunks, hcp_error *err);

/* What a rank does in a step. A group starts when all of its ranks are free, or when all ranks are,
 * under HCP_SYNC_MICRO_BATCH. Under HCP_SYNC_STEP, without a pipeline, a rank takes launch for each
 * micro-batch in which it is in no group. Times are those of one stage that never waits for its
 * neighbours. */
typedef struct hcp_rank_work {
  int64_t rows; /* of all micro-batches, without padding */
  int64_t bytes; /* the most of a micro-batch, by the plan's memory; its buffer without rows */
  int64_t busy; /* time of its groups */
  int64_t end; /* of its last micro-batch */
} hcp_rank_work;

typedef struct hcp_plan_work {
  int64_t peak_rows; /* of the fullest rank in one micro-batch, padding included */
  int64_t padding; /* rows that alignment adds, on all ranks */
  int64_t crossings; /* sum over tokens of the nodes that keys and values enter from outside */
} hcp_plan_work;

/* Measures a plan. ranks has room for plan->limits.ranks. */
void hcp_plan_measure(const hcp_plan *plan, hcp_rank_work *ranks, hcp_plan_work *work);

/* The seconds of a machine: X(name). */
#define HCP_MACHINE_TIMES(X)                                               \
  X(pair)        /* one query-key pair of attention                     */ \
  X(token)       /* one row through everything else                     */ \
  X(launch)      /* what the GPU does once in a micro-batch             */ \
  X(shared)      /* one row of a sequence on several ranks, in addition */ \
  X(step)        /* one more rank in the group, for each sequence       */ \
  X(near)        /* one token's keys and values from the same node      */ \
  X(far)         /* the same from another node                          */ \
  X(host)        /* the host's, to queue a micro-batch on one rank      */ \
  X(host_shared) /* the host's, to queue one of several ranks           */

typedef struct hcp_machine {
#define HCP_MACHINE_FIELD(name) double name;
  HCP_MACHINE_TIMES(HCP_MACHINE_FIELD)
#undef HCP_MACHINE_FIELD
  int32_t overlap; /* 1: a ring, whose rows attention hides but for the last stage's */
  int32_t ranks_per_node; /* 0: all ranks are in one node */
  int32_t once; /* 1: a row enters a node once, and goes on inside it */
  hcp_memory memory; /* limit 0: none */
} hcp_machine;

/* Seconds of a rank in a replay. */
typedef struct hcp_rank_seconds {
  double busy; /* its GPU has work, or waits for rows of its own micro-batch */
  double exposed; /* of these, it only waits for rows that nothing hides */
  double starved; /* its GPU waits for its host */
  double end;
  double queued; /* its host is free */
} hcp_rank_seconds;

/* Simulate a step on a machine that has more than a cost: hosts that queue ahead of their GPUs, and
 * links of two classes that work at once. It decides nothing, and is in floating point.
 *
 * A sequence of n tokens on d ranks works for (pair * pairs + token * n) / d on each of them, and
 * where d > 1 for shared * n / d + step * (d - 1) more. Its rows take
 *
 *   near * (n - n / d)                            in one node
 *   max(near * (k - 1), far * (d - k)) * n / d    on a rank with k of the d ranks in its node; the
 *                                                 slowest rank counts
 *   max(near * (d - 1), far * (d - k) / k) * n / d    the same with once
 *
 * In a ring attention hides them, but for 1 / d of it. Else attention over the rank's own rows, 1 /
 * d of it, hides two thirds of them; the third that are gradients is never hidden.
 *
 * A group starts when the GPUs of all of its ranks are free and all of its hosts have begun to
 * queue, and ends no sooner than the slowest host has queued it. Hosts never wait for GPUs.
 *
 * ranks has room for plan->limits.ranks. HCP_INVALID for a pipeline, and for a micro-batch that
 * takes more bytes on a rank than the machine's memory allows. */
hcp_status hcp_plan_replay(const hcp_plan *plan, const hcp_machine *machine,
                           hcp_rank_seconds *ranks, hcp_error *err);

/* ---- 4. Layout ---------------------------------------------------------- */

/* Consecutive tokens of one document. */
typedef struct hcp_span {
  int32_t index; /* of the sequence, among the group's */
  int32_t document; /* among those of the group */
  int64_t start; /* first token, in the sequence */
  int64_t rows; /* >= 1 */
} hcp_span;

/* What rank holds in a micro-batch: the rows of span 0, span 1, ... end to end.
 * The spans of one sequence follow each other in token order, so the local rows
 * of a sequence, though not consecutive tokens, are in causal order. After them
 * come the rows that hcp_limits.alignment asks for: they belong to no sequence,
 * hold zeros when they arrive, see each other only, and never travel. A rank that
 * no group contains has degree 0 and nothing else.
 *
 * A document is a sequence, or a part of one, that its masks let neither see nor be seen by
 * the rest: states and neighbouring rows go along documents.
 *
 * A stretch is a document or, of one with branches, tokens of one part of its tree without a
 * branch point among them but the last. Each continues another at its end, or begins a text: paths
 * of stretches are texts. A span is of one stretch. */
typedef struct hcp_layout {
  int32_t rank;
  int32_t micro_batch;
  int32_t first_rank; /* of the group */
  int32_t degree; /* of the group, 0: no rows */
  int32_t sequence_count;
  const int32_t *sequences; /* sequence_count: indices of the plan's lengths */
  const int64_t *lengths; /* sequence_count */
  const int32_t *cu_seqlens; /* sequence_count + 1: local rows of each, summed */
  int32_t document_count;
  const hcp_span *documents; /* document_count: whole, sequence after sequence */
  int32_t stretch_count;
  const hcp_span *stretches; /* stretch_count: whole, sequence after sequence */
  const int32_t *parents; /* stretch_count: the stretch that each continues, -1: none */
  int32_t span_count;
  const hcp_span *spans;
  int64_t rows; /* padding included */
  int64_t padding; /* the last of them */
  const int64_t *positions; /* rows: each row's place in its sequence, 0: padding */
  const int64_t *paddings; /* degree: of each rank of the group */
} hcp_layout;

hcp_status hcp_layout_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                             hcp_layout **layout, hcp_error *err);
void hcp_layout_destroy(hcp_layout *layout);

/* ---- Tables ------------------------------------------------------------- */

/* A route, states, a schedule and others: sections of records of integers in one array, so that
 * it travels as one tensor. Elsewhere in this header, a table of costs is a cost table.
 *
 * The first words, header_words of them, are the caller's own (zero at first): HCP_TABLE_HEADER of
 * them, and those of hcp_schedule_header in a schedule. After them come two words for each section,
 * its first word and its number of records, in the order in which HCP_ROUTE_SECTIONS
 * or another list of sections names them. The caller owns the table. */
typedef struct hcp_table {
  int64_t *words;
  int64_t word_count;
  int64_t header_words;
} hcp_table;

enum { HCP_TABLE_HEADER = 2 };

void hcp_table_destroy(hcp_table *table);

/* Where a section lies among the words of its table. */
typedef struct hcp_section {
  int64_t first, end; /* words */
  int64_t records;
} hcp_section;

/* Find the n sections of a table of which a caller has the words alone. widths: words of a record
 * of each. HCP_INVALID unless every section lies inside. */
hcp_status hcp_table_read(const int64_t *words, int64_t word_count, int64_t header_words, int32_t n,
                          const int32_t *widths, hcp_section *sections, hcp_error *err);

/* Rows of a buffer that are sent to ranks, or received from them: (peer, row, rows) each. */
typedef struct hcp_moves {
  const int64_t *moves;
  int64_t count;
} hcp_moves;

/* The same moves of the rows alone that are kept: kept[row] is not 0. Kept rows lie end to end.
 * Moves without any are left out. made has room for as many moves as are given. HCP_INVALID for a
 * move of rows beyond those. */
hcp_status hcp_moves_keep(const hcp_moves *moves, const uint8_t *kept, int64_t rows, int64_t *made,
                          int64_t *made_count, hcp_error *err);

/* ---- 5. Route ----------------------------------------------------------- */

/* X(name, words per record). Rows go source -> wire -> output:
 *
 *   SIZES     source_rows, sent_rows, received_rows, output_rows
 *   PACK      (row, rows): source rows, in the order in which the wire wants them
 *   SENDS     (peer, row, rows): of the packed rows, at most one per peer
 *   RECEIVES  (peer, row, rows): into the received rows, at most one per peer
 *   ARRANGE   (row, rows): received rows in output order; row -1 is rows of zeros
 *   PARTS     (rows): what each micro-batch has of the output, in order; of dispatch, not in
 *             reverse, and of payloads
 *
 * A rank sends to itself by the same records; peers are domain ranks. */
#define HCP_ROUTE_SECTIONS(X) \
  X(SIZES, 4)                 \
  X(PACK, 2)                  \
  X(SENDS, 3)                 \
  X(RECEIVES, 3)              \
  X(ARRANGE, 2)               \
  X(PARTS, 1)

enum {
#define HCP_ROUTE_ENUM(name, width) HCP_ROUTE_##name,
  HCP_ROUTE_SECTIONS(HCP_ROUTE_ENUM)
#undef HCP_ROUTE_ENUM
      HCP_ROUTE_SECTION_COUNT
};

/* Route rows of micro-batches [first, first + count) from the ranks that loaded them
 * to the ranks that compute them. sources[i] is the rank that loaded sequence
 * i. The source holds whole sequences end to end, those that rank loaded and
 * that these micro-batches use, by ascending index; the output is the rank's
 * layouts end to end, padding included. reverse is the way back: source and
 * output swapped. */
hcp_status hcp_route_dispatch(const hcp_plan *plan, const int32_t *sources, int32_t rank,
                              int32_t first, int32_t count, int32_t reverse, hcp_table **route,
                              hcp_error *err);

/* Route rows within a group, shifted along their documents: the output row at token t
 * is the source row at token t - shift of the same document, or zeros where the
 * document has no such token, and in padding. In a tree, of the text that ends at token t. A
 * branch point has several tokens after it: HCP_INVALID for a shift < 0 in a plan with branches. */
hcp_status hcp_route_roll(const hcp_plan *plan, int32_t micro_batch, int32_t rank, int64_t shift,
                          hcp_table **route, hcp_error *err);

/* Route to each span of the rank (see hcp_layout) the `before` tokens that precede it in
 * its document, in a tree in its text: they come before the span's own rows, and are rows of
 * zeros where the document has not begun. So the output has `before` rows more for each span.
 * HCP_INVALID where hcp_plan_expect_trees refuses, and, on every rank alike, for a `before` with
 * which some rank could have 2^31 rows or more. */
hcp_status hcp_route_halo(const hcp_plan *plan, int32_t micro_batch, int32_t rank, int64_t before,
                          hcp_table **route, hcp_error *err);

/* Route a row of each sequence of a micro-batch from the first rank of its group, which has one
 * of each of the group's sequences, to the rank that loaded it. The output is those of the
 * sequences that rank loaded, by ascending index. */
hcp_status hcp_route_by_sequence(const hcp_plan *plan, const int32_t *sources, int32_t micro_batch,
                                 int32_t rank, hcp_table **route, hcp_error *err);

/* ---- Payloads ----------------------------------------------------------- */

/* A payload is rows of which each sequence has a number of its own: those of its units (images,
 * audio clips), end to end. Tokens of the sequence may take rows, in order. The ranks of each
 * group split the rows of its sequences by one of these rules:
 *
 *   WHOLE   each rank has all rows
 *   FIRST   the first rank has all rows
 *   EVEN    a rank has the units whose middle lies in its share of the group's rows
 *   TOKENS  a rank has the rows that its own tokens take, span after span (see hcp_layout)
 */
#define HCP_SPLITS(X) \
  X(WHOLE, "whole")   \
  X(FIRST, "first")   \
  X(EVEN, "even")     \
  X(TOKENS, "tokens")

typedef enum hcp_split {
#define HCP_SPLIT_ENUM(name, text) HCP_SPLIT_##name,
  HCP_SPLITS(HCP_SPLIT_ENUM)
#undef HCP_SPLIT_ENUM
      HCP_SPLIT_COUNT
} hcp_split;

/* Never NULL for a valid one; NULL otherwise. */
const char *hcp_split_name(hcp_split split);

/* Tokens that follow each other and take rows. Runs of a sequence ascend. */
typedef struct hcp_taker_run {
  int64_t token, tokens;
  int64_t rows; /* of each token. -k: k tokens after each other take one row, in every run */
} hcp_taker_run;

/* The tokens that take rows, of the sequences that a rank loaded or computes. */
typedef struct hcp_takers {
  const int32_t *sources; /* n: the rank that loaded each sequence */
  int32_t rank;
  const int64_t *counts; /* n: runs of each sequence */
  int64_t loaded_count;
  const hcp_taker_run *loaded; /* of what rank loaded, by ascending index, end to end */
  int64_t computed_count;
  const hcp_taker_run *computed; /* of what its groups compute, in the order of the plan */
} hcp_takers;

/* The rows of all sequences of a plan, and a rule. */
typedef struct hcp_payload hcp_payload;

/* units: n, the number of units of each sequence. unit_rows: of each unit, sequence after
 * sequence; NULL: one each. takers: NULL where no tokens take rows, which TOKENS needs.
 * HCP_INVALID where the takers of a sequence do not take all of its rows. All is copied. */
hcp_status hcp_payload_create(const hcp_plan *plan, hcp_split split, const int64_t *units,
                              const int64_t *unit_rows, const hcp_takers *takers,
                              hcp_payload **payload, hcp_error *err);
void hcp_payload_destroy(hcp_payload *payload);

/* HCP_INVALID where a token of a sequence takes rows of two units. */
hcp_status hcp_units_check(const int64_t *unit_rows, int32_t units, const hcp_taker_run *runs,
                           int32_t run_count, hcp_error *err);

/* Below, *plan is the one that the payload was made with. of_units: not the payload's rows, but
 * one row per unit, which goes where the unit's rows go; not under TOKENS.
 *
 * Route the rows from the ranks that loaded the sequences. The source holds the rows of those
 * that rank loaded, by ascending index; the output, what it has in each micro-batch. A row may
 * go to several ranks. */
hcp_status hcp_payload_route(const hcp_plan *plan, const hcp_payload *payload, int32_t of_units,
                             const int32_t *sources, int32_t rank, hcp_table **route,
                             hcp_error *err);

/* Route results, one of each token whose rows a rank has, to the ranks that have the tokens.
 * HCP_INVALID without takers, and where a rank's rows end inside those of a token. */
hcp_status hcp_payload_route_to_tokens(const hcp_plan *plan, const hcp_payload *payload,
                                       int32_t micro_batch, int32_t rank, hcp_table **route,
                                       hcp_error *err);

/* What a rank has in a micro-batch. X(name, words per record):
 *
 *   SEQUENCES  (row): where its rows of each of the group's sequences begin, and the last ends
 *   UNITS      (row): where each unit that it has begins, and the last ends. None under TOKENS
 *   TAKING     (row): those of its layout's rows that are tokens that take rows
 */
#define HCP_PAYLOAD_SECTIONS(X) \
  X(SEQUENCES, 1)               \
  X(UNITS, 1)                   \
  X(TAKING, 1)

enum {
#define HCP_PAYLOAD_ENUM(name, width) HCP_PAYLOAD_##name,
  HCP_PAYLOAD_SECTIONS(HCP_PAYLOAD_ENUM)
#undef HCP_PAYLOAD_ENUM
      HCP_PAYLOAD_SECTION_COUNT
};

hcp_status hcp_payload_measure(const hcp_plan *plan, const hcp_payload *payload, int32_t of_units,
                               int32_t micro_batch, int32_t rank, hcp_table **rows, hcp_error *err);

/* ---- 6. States ---------------------------------------------------------- */

/* Recurrent layers map the state that enters a span (see hcp_layout) to the one that leaves it.
 * Maps of consecutive spans make one of the same kind, so that ranks exchange maps, and none waits
 * for another to compute. States start anew in each document. A rank's padding is a document of
 * its own, with one span, the rank's last. In a tree each stretch starts from the state at the end
 * of the one that it continues. The depth of a span is the number of spans before it in its
 * document, or text.
 *
 * Gathering: every rank gets the maps of all spans before its own, and composes them.
 * Rounds: in each, a span gets a map of twice as many spans as in the round before (the scan of
 * Hillis and Steele, https://doi.org/10.1145/7902.7903). A span of depth 0 wants none.
 *
 * X(name, words per record). PACK to ARRANGE are as in HCP_ROUTE_SECTIONS, of one path after the
 * other: the gathering has one, each round has one.
 *
 *   PATHS     ends of the path's records in PACK, SENDS, RECEIVES and ARRANGE, then its sent rows
 *             and its output rows. A received row may be several of these
 *   WANTING   (span): rounds; the own span that each output row is for, round after round
 *   SIZES     gathering; documents and texts of own spans
 *   LEVELS    (states): gathering; how many states a level has. The output rows are its maps. A
 *             level comes before the first one: the states that documents start with
 *   KEPT      (state): gathering; which state of the level before each map is applied to
 *   ENTERING  (state): gathering; the state that enters each own span, of all levels end to end */
#define HCP_STATES_SECTIONS(X) \
  X(PATHS, 6)                  \
  X(PACK, 2)                   \
  X(SENDS, 3)                  \
  X(RECEIVES, 3)               \
  X(ARRANGE, 2)                \
  X(WANTING, 1)                \
  X(SIZES, 1)                  \
  X(LEVELS, 1)                 \
  X(KEPT, 1)                   \
  X(ENTERING, 1)

enum {
#define HCP_STATES_ENUM(name, width) HCP_STATES_##name,
  HCP_STATES_SECTIONS(HCP_STATES_ENUM)
#undef HCP_STATES_ENUM
      HCP_STATES_SECTION_COUNT
};

/* Rows that the busiest rank of a group gets from others, of all rounds together. */
typedef struct hcp_states_rows {
  int64_t gathered, by_rounds;
  int32_t rounds;
} hcp_states_rows;

/* The same on all ranks of a group. */
hcp_status hcp_states_measure(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                              hcp_states_rows *rows, hcp_error *err);

/* A recurrent layer over several ranks, of all heads. Ranks either scan their own rows, and states
 * travel; or scan whole sequences of some heads, and rows travel. */
typedef struct hcp_scanned {
  int64_t row_bytes;   /* of a row, to whole sequences and back */
  int64_t state_bytes; /* of the map of a span */
  int64_t row_work;    /* what a row costs more where states travel, in bytes that a near link
                          carries in the same time */
  int64_t round_bytes; /* the same for one round of messages */
  int32_t exchanges;   /* rounds in which rows travel */
} hcp_scanned;

/* Costs of the busiest rank's forward, in bytes that a near link carries in the same time, at most
 * INT64_MAX / 4. d ranks, N tokens, R rows of the rank that has most:
 *
 *   states  link * rows of hcp_states_rows * state_bytes + rounds * round_bytes + R * row_work,
 *           the less of both ways
 *   heads   link * N * (d - 1) / d^2 * row_bytes + exchanges * round_bytes + R * row_bytes / 2
 *
 * Rows that travel are read and written four times more, laid out and put back, in memory that
 * moves 16 bytes while a link moves one: measured of gated delta nets of 32,768 and 131,072 tokens
 * on two H200s. link is 1, or in a group that spans nodes the far price of exchange over the near
 * one, in sixteenths. What both ways compute alike does not count. The same on all ranks of a
 * group; 0 for one rank or none. */
typedef struct hcp_scan_costs {
  int64_t states, heads;
} hcp_scan_costs;

hcp_status hcp_scan_price(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                          const hcp_scanned *layer, hcp_scan_costs *costs, hcp_error *err);

/* Whether states of so many bytes cost less by rounds than gathered, as hcp_scan_price prices both
 * ways; where both cost the same they are gathered. The same on all ranks of a group. */
hcp_status hcp_states_choose(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                             int64_t state_bytes, int64_t round_bytes, int32_t *by_rounds,
                             hcp_error *err);

/* HCP_INVALID where hcp_plan_expect_trees refuses, and for a rank without rows. */
hcp_status hcp_states_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                             int32_t by_rounds, hcp_table **states, hcp_error *err);

/* ---- Cross-attention ---------------------------------------------------- */

/* Queries of one plan attend to keys of another: of the same ranks, and of sequences by the same
 * numbers. Queries of a document see keys of the document of its number in the same sequence. Both
 * are aligned at their ends: of N queries and M keys, query i stands at key i + M - N.
 *
 * X(name, words per record). SIZES to ARRANGE are as in HCP_ROUTE_SECTIONS. The source is the
 * rank's layout of keys; the output is all keys that its queries see, by document and token, each
 * once.
 *
 *   PLACES      (row, rows): the output rows of the received rows, in the order of these
 *   ENTRIES     (query_row, query_rows, key_row, key_rows, low, high): consecutive queries of a
 *               document and the keys that they see, as in HCP_SCHEDULE_SECTIONS
 *   QUERY_RUNS  (row, rows, part, part_row): rows of the queries' layout <- entries
 *   KEY_RUNS    (row, rows, part, part_row): output rows <- entries */
#define HCP_CROSS_SECTIONS(X) \
  X(SIZES, 4)                 \
  X(PACK, 2)                  \
  X(SENDS, 3)                 \
  X(RECEIVES, 3)              \
  X(ARRANGE, 2)               \
  X(PLACES, 2)                \
  X(ENTRIES, 6)               \
  X(QUERY_RUNS, 4)            \
  X(KEY_RUNS, 4)

enum {
#define HCP_CROSS_ENUM(name, width) HCP_CROSS_##name,
  HCP_CROSS_SECTIONS(HCP_CROSS_ENUM)
#undef HCP_CROSS_ENUM
      HCP_CROSS_SECTION_COUNT
};

/* Whose layouts are meant. */
typedef struct hcp_cross_side {
  const hcp_plan *plan;
  int32_t micro_batch;
} hcp_cross_side;

/* A query at key i sees keys i - left to i + right; negative: no limit on that side. HCP_INVALID,
 * on every rank alike, unless both plans have as many ranks, the keys' micro-batch has all
 * sequences of the queries' with as many documents, and the keys' plan has no branches. A tree of
 * queries, which has several ends, is one document: its queries see all keys. HCP_INVALID for one
 * under a limit, and for one of several roots. */
hcp_status hcp_cross_create(const hcp_cross_side *queries, const hcp_cross_side *keys, int32_t rank,
                            int64_t left, int64_t right, hcp_table **cross, hcp_error *err);

/* ---- 7. Schedule -------------------------------------------------------- */

#define HCP_COMM_TYPES(X)     \
  X(P2P, "p2p")               \
  X(ALL_GATHER, "all_gather") \
  X(A2A, "a2a")               \
  X(A2A_P2P, "a2a+p2p")

typedef enum hcp_comm_type {
#define HCP_COMM_ENUM(name, text) HCP_COMM_##name,
  HCP_COMM_TYPES(HCP_COMM_ENUM)
#undef HCP_COMM_ENUM
      HCP_COMM_TYPE_COUNT
} hcp_comm_type;

/* Never NULL for a valid type; NULL otherwise. */
const char *hcp_comm_type_name(hcp_comm_type type);

/* What the price of a layer's attention depends on. */
typedef struct hcp_priced_layer {
  int64_t left, right; /* window, as in hcp_mask */
  int32_t query_heads;
  int32_t key_heads; /* of which query_heads is a multiple */
  int32_t packed; /* 1: one call of the kernel computes all sequences of a stage */
  int32_t rows_only; /* 1: rows have no heads to exchange, as latent ones */
  int32_t in_place; /* 1: ranks read keys where their owners hold them */
} hcp_priced_layer;

/* A comm type that a group may use, and its time in the unit of the prices, rounded up. */
typedef struct hcp_comm_time {
  hcp_comm_type comm_type;
  int32_t inner; /* neighbours that exchange rows for heads: 1, all under A2A */
  int64_t time;
} hcp_comm_time;

/* No degree has more divisors. */
enum { HCP_COMM_TIMES_MAX = 256 };

/* The most neighbours, up to `most`, that may exchange rows for heads in this rank's group: they
 * divide its degree, each of them has a query head, and each neighbourhood is in one node. */
hcp_status hcp_comm_inner(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                          int32_t query_heads, int32_t most, int32_t *inner, hcp_error *err);

/* Price attention of one layer in this rank's group, under each comm type that it may use, by the
 * plan's prices. Exact fractions decide which is the fastest, an index of times, so that
 * every rank of the group decides alike; of equal ones the first. times has room for
 * HCP_COMM_TIMES_MAX.
 *
 * d ranks, N tokens in S sequences, H query and G key heads; m neighbours exchange rows for heads,
 * n = d / m places form a ring; q = ceil(H / m) query heads of the busiest neighbour.
 *
 *   attention(m)  pair * pairs / d * m * q / H. Pairs are those under the window, of sequences
 *                 whose 2 n chunks are rounded up to tiles
 *   ring(m)       attention(m) + [keys * k / G * N * (n - 1) / n - attention(m) * (n - 1) / n]
 *                 + fixed(n - 1, n - 1), k: most key heads of a neighbour
 *   read(m)       attention(m) + [keys * k / G * seen(n) - max(own(m), attention(m) * s / n)]
 *                 + fixed(s, s), the ring of ranks that read in_place: of each sequence s of n - 1
 *                 owners, at most 2 for each chunk that the longer of left and right reaches
 *   gather        attention(1) + [keys * seen(d) - own(1)] + fixed(stages, stages). A stage is
 *                 stage_tokens of the rows that are seen, with limits as in hcp_schedule_create
 *   seen(n)       of each sequence of L tokens L - L / n rows, at most 2 (left + right)
 *   own(m)        attention(m) / n, or that of a place's two chunks, if a window makes it more
 *   heads(m)      element * (H + K) * N / d * (m - 1) / m + fixed(2, 0), K: key heads of all
 *                 neighbours together, who may have copies
 *   fixed(e, c)   step / 2 for each of e exchanges and c calls of the kernel. S calls instead of
 *                 one if it is not packed, but S in all the stages of a gather. Without a price of
 *                 step it is launch / 8
 *
 *   ALL_GATHER gather, P2P ring(1), A2A ring(d) + heads(d), A2A_P2P ring(m) + heads(m), with
 *   read(m) for ring(m) in_place
 *
 * [x - hidden] is x without overlap, and max(0, x - hidden) with it. keys is exchange, and element
 * all_to_all / (H + G); where one of the two is 0, it follows from the other: keys / G = element.
 * Between nodes both are the far prices; neighbours that hcp_comm_inner allows are near.
 *
 * HCP_INVALID for a rank whose group has fewer than 2 ranks. */
hcp_status hcp_comm_times(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                          const hcp_priced_layer *layer, int64_t stage_tokens, hcp_comm_time *times,
                          int32_t *count, int32_t *fastest, hcp_error *err);

/* Which keys of its sequence a query sees, as in FlashAttention: query i
 * sees key j when i - left <= j <= i + right. Negative: no limit on that side.
 * Causal is right = 0. In a plan with masks, both are limits in addition to the
 * mask with this index, and count positions: those of a path, in a tree. Elsewhere
 * index is not read. */
typedef struct hcp_mask {
  int64_t left, right;
  int32_t index;
} hcp_mask;

/* The stages of a schedule are steps of attention, and no stages of a pipeline. Stage 0
 * attends local rows to local rows; padding is one more sequence there, which no other
 * rank sees. Each further stage receives key and value rows and attends local queries to
 * them. An entry is query rows against key rows through a band: query q of the entry sees
 * its key k when low <= k - q <= high. Every query sees a key and every key is seen;
 * low >= 1 - query_rows and high <= key_rows - 1, with equality where the band
 * does not cut. The partial output of an entry covers its query rows. A run lists, for
 * rows of a result, the parts that are merged or summed there.
 *
 *   SIZES          rows, return_sent_rows, return_received_rows, return_relayed_rows,
 *                  comm_type, inner, left, right
 *   STAGES         ends of the stage's records in PACK, SENDS, RECEIVES,
 *                  ARRANGE, ENTRIES, PULLS, RELAY_PACK, RELAY_SENDS and
 *                  RELAY_RECEIVES, then its sent, received, key and relayed rows
 *   PACK           (row, rows) of the local rows; a stage without any forwards
 *                  the keys and values of the stage before
 *   SENDS          (peer, row, rows)
 *   RECEIVES       (peer, row, rows)
 *   ARRANGE        (row, rows) of the received rows in key order; a stage
 *                  without any uses them as they arrive
 *   ENTRIES        (query_row, query_rows, key_row, key_rows, low, high);
 *                  key_row counts in the stage's keys: the local rows in stage 0
 *   OUTPUT_RUNS    (row, rows, part, part_row): local rows <- entries
 *   RETURN_RUNS    (row, rows, part, part_row): rows sent back <- entries
 *   RETURN_SENDS   (peer, row, rows): partial gradients to the keys' owners
 *   RETURN_RECEIVES  (peer, row, rows)
 *   LOCAL_RUNS     (row, rows, part, part_row): local rows <- entries of stage
 *                  0, then, as one more part, the gradients that others
 *                  returned: this node's ranks, ascending, then the sums
 *                  of other nodes, ascending
 *   PULLS          (row, rows, peer, peer_row): key rows <- local rows of their
 *                  owner, for ranks that read each other's memory: what PACK,
 *                  SENDS, RECEIVES and ARRANGE come to
 *   KEY_OWNERS     (peer, rows): the ranks that keys come from, this one among
 *                  them, with the number of their local rows. Under masks and
 *                  A2A the group's first rank stands for all of them
 *   CALLERS        (peer): the ranks of the group that have rows, in a group of three or more.
 *                  They compare their calls with each other: two ranks meet in any exchange
 *
 * Runs ascend by row; records with the same row and rows are one run, and
 * different runs do not overlap. The records of a run ascend by part, then by
 * part_row, in whatever order they were found, and its parts are summed in that
 * order.
 *
 * By nodes, a row crosses a border of nodes once: from its owner to one rank of a node that
 * has readers, which relays it to the readers when SENDS and RECEIVES are over. Partial
 * gradients come back likewise: RETURN_SENDS brings them to the rank that relays, which sums
 * those of a row, and sends the sum to the owner when RETURN_SENDS and RETURN_RECEIVES are over.
 *
 *   RELAY_PACK           (row, rows) of the received rows
 *   RELAY_SENDS          (peer, row, rows) of the packed rows
 *   RELAY_RECEIVES       (peer, row, rows) into the received rows
 *   RETURN_RELAY_RUNS    (row, rows, part, part_row): rows that go on <- parts
 *                        HCP_RELAYED_RECEIVED and HCP_RELAYED_SENT: what this
 *                        node's ranks returned, ascending, and last what this
 *                        rank itself packed to be sent
 *   RETURN_RELAY_SENDS   (peer, row, rows) of the sums
 *   RETURN_RELAY_RECEIVES  (peer, row, rows) into what came back
 *
 * A2A and A2A_P2P exchange rows for heads before stage 0, and back after the last
 * stage: each neighbour gives the others its rows of the heads that they take. It
 * then has all neighbours' rows of its own heads, and after those the padding of
 * each. Every section but SIZES and HEAD_RECEIVES counts these rows, and peers are the
 * ranks of the other neighbourhoods that have the same heads. Under A2A all ranks of
 * the group are neighbours: the rows are whole sequences, and there is one stage.
 *
 *   HEAD_RECEIVES  (peer, row, rows): the rows that come from each of the neighbours,
 *                  in order, this rank among them; rows may be 0. Each of them gets
 *                  this rank's rows
 *   GATHER         (row, rows) of the rows that came, in token order
 *   SCATTER        (row, rows) of the gathered rows as they came: the way back
 */
#define HCP_SCHEDULE_SECTIONS(X) \
  X(SIZES, 8)                    \
  X(STAGES, 13)                  \
  X(PACK, 2)                     \
  X(SENDS, 3)                    \
  X(RECEIVES, 3)                 \
  X(ARRANGE, 2)                  \
  X(ENTRIES, 6)                  \
  X(OUTPUT_RUNS, 4)              \
  X(RETURN_RUNS, 4)              \
  X(RETURN_SENDS, 3)             \
  X(RETURN_RECEIVES, 3)          \
  X(LOCAL_RUNS, 4)               \
  X(PULLS, 4)                    \
  X(KEY_OWNERS, 2)               \
  X(HEAD_RECEIVES, 3)            \
  X(GATHER, 2)                   \
  X(SCATTER, 2)                  \
  X(RELAY_PACK, 2)               \
  X(RELAY_SENDS, 3)              \
  X(RELAY_RECEIVES, 3)           \
  X(RETURN_RELAY_RUNS, 4)        \
  X(RETURN_RELAY_SENDS, 3)       \
  X(RETURN_RELAY_RECEIVES, 3)    \
  X(CALLERS, 1)

enum {
#define HCP_SCHEDULE_ENUM(name, width) HCP_SCHEDULE_##name,
  HCP_SCHEDULE_SECTIONS(HCP_SCHEDULE_ENUM)
#undef HCP_SCHEDULE_ENUM
      HCP_SCHEDULE_SECTION_COUNT
};

/* What a schedule says of itself, since its words may be all that a program has of it:
 *
 *   serial       a number that names it in its process
 *   transport    what its rows travel by, as a number of the caller's
 *   plan         a checksum of the plan, the same on all ranks
 *   step         the step's number among those of the domain
 *   micro_batch
 *   rank
 *   mask         the plan's mask, -1 in a plan without
 *   head_chunks  chunks in which heads are computed, one after the other
 *   in_place     1: ranks read keys where their owners hold them; 0: owners send them */
#define HCP_SCHEDULE_HEADER(X) \
  X(serial)                    \
  X(transport)                 \
  X(plan)                      \
  X(step)                      \
  X(micro_batch)               \
  X(rank)                      \
  X(mask)                      \
  X(head_chunks)               \
  X(in_place)

/* The first words of a schedule. */
typedef struct hcp_schedule_header {
#define HCP_SCHEDULE_FIELD(name) int64_t name;
  HCP_SCHEDULE_HEADER(HCP_SCHEDULE_FIELD)
#undef HCP_SCHEDULE_FIELD
} hcp_schedule_header;

enum { HCP_SCHEDULE_HEADER_WORDS = sizeof(hcp_schedule_header) / sizeof(int64_t) };

/* Write the header of a schedule that nobody else has yet. */
void hcp_schedule_set_header(hcp_table *schedule, const hcp_schedule_header *header);

/* Its SIZES by name; -1: no limit on that side of the window. What the other sections say follows:
 * query_rows, the rows that ENTRIES count in, and staged_rows, which no rank of KEY_OWNERS exceeds
 * when it stages its own keys, or gradients of all others' keys. */
#define HCP_SCHEDULE_SIZES_OF(X) \
  X(rows)                        \
  X(return_sent_rows)            \
  X(return_received_rows)        \
  X(return_relayed_rows)         \
  X(comm_type)                   \
  X(inner)                       \
  X(left)                        \
  X(right)                       \
  X(query_rows)                  \
  X(staged_rows)

typedef struct hcp_schedule_sizes {
#define HCP_SCHEDULE_SIZE(name) int64_t name;
  HCP_SCHEDULE_SIZES_OF(HCP_SCHEDULE_SIZE)
#undef HCP_SCHEDULE_SIZE
} hcp_schedule_sizes;

enum { HCP_SCHEDULE_SIZE_WORDS = sizeof(hcp_schedule_sizes) / sizeof(int64_t) };

/* Read what a schedule's words say. sections has room for HCP_SCHEDULE_SECTION_COUNT. HCP_INVALID
 * for words that are no schedule. */
hcp_status hcp_schedule_read(const int64_t *words, int64_t word_count, hcp_section *sections,
                             hcp_schedule_header *header, hcp_schedule_sizes *sizes,
                             hcp_error *err);

/* Parts of RETURN_RELAY_RUNS, in the order in which they are summed. */
enum { HCP_RELAYED_RECEIVED, HCP_RELAYED_SENT };

/* Most stages in which ALL_GATHER fetches keys. */
enum { HCP_SCHEDULE_GATHERS_MAX = 4 };

/* Make the schedule of a rank. P2P passes all local rows of each rank around the ring of
 * the group; ALL_GATHER fetches just the rows that this rank's queries see; A2A exchanges
 * rows for heads among all ranks, A2A_P2P among `inner` neighbours each, which then form a ring
 * with the others. inner divides the group's degree (HCP_INVALID else) and counts for
 * A2A_P2P only. *mask is read only.
 *
 * ALL_GATHER fetches the keys of some sequences in each stage, so that the next
 * ones come while these are computed. A stage has whole sequences, with
 * stage_tokens tokens or more in all (of a sequence only as many as windows let
 * ranks fetch), stage_tokens >= 1; with fewer than twice as many there is one stage.
 * All ranks of a group name the same stage_tokens, and get as many stages.
 *
 * by_nodes: whether the borders of the plan's nodes count, for groups of several whole nodes
 * whose ranks all have rows. Then rows cross a border once. P2P passes blocks around a ring in each
 * node; after each round, the node gets those of the next node, each rank another one.
 *
 * In a plan with masks, entries are the parts of slices that lie here; a query may have
 * none. P2P sends to one rank a stage, and like ALL_GATHER just the rows that are seen
 * there. HCP_INVALID for A2A_P2P.
 *
 * in_place: whether ranks read key rows where their owners hold them. Then P2P and A2A_P2P, too,
 * have just the rows that are seen, which nobody passes on, of one owner a stage. */
hcp_status hcp_schedule_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                               hcp_comm_type comm_type, int32_t inner, const hcp_mask *mask,
                               int64_t stage_tokens, int32_t by_nodes, int32_t in_place,
                               hcp_table **schedule, hcp_error *err);

/* ---- 8. Launches -------------------------------------------------------- */

/* How a kernel of attention takes entries of a schedule. */
typedef struct hcp_kernel {
  /* 0: a launch has one entry. 1: it has as many as ascend without overlap, in queries and in
   * keys, and have one window. */
  int32_t packs;
  /* The most stages whose outputs wait for the last one. With more stages, the outputs go into a
   * total, those of HCP_LAUNCHES_TOGETHER stages at a time. */
  int64_t waiting;
} hcp_kernel;

enum { HCP_LAUNCHES_TOGETHER = 3 };

/* Launches are numbered over all stages. Under `packs` an entry joins the first launch of its
 * stage that takes it. Runs are those of the schedule, over launches in place of entries, and
 * their records keep the order of entries.
 *
 *   SIZES          launches, query rows, 1 if each launch has all queries, 1 if a single launch
 *                  computes all rows on all keys, which lie here: nothing is merged or summed; rows
 *                  that this rank stages
 *   STAGES         ends of the stage's records in LAUNCHES, RUNNING_RUNS, READ_OWNERS and
 *                  READ_RUNS; 1 if what waits goes into a total when it ends; 1 in stage 0 if each
 *                  launch has all keys; key rows
 *   LAUNCHES       (end of its ENTRIES, first query, end of queries, first key, end of keys,
 *                  left, right): the window as FlashAttention has it, aligned bottom right
 *   ENTRIES        as in the schedule, launch after launch
 *   QUERY_CUTS     (row, rows): queries of each launch
 *   KEY_CUTS       (row, rows): keys of each launch
 *   RUNNING_RUNS   a total <- what waits, counted from the first launch that waits
 *   OUTPUT_RUNS    local rows <- what no total has when the last stage ends, counted likewise
 *   SUNK_RUNS      OUTPUT_RUNS with one more part of all rows, after those launches
 *   RETURN_RUNS    rows sent back <- launches
 *   LOCAL_RUNS     local rows <- launches of stage 0, then the gradients that others returned
 *
 * Where ranks read keys in place, further sections say what is read. A read has owners, (peer, all
 * rows that it holds, 1 if no later read of the exchange reads it), ascending, and runs, (row,
 * rows, part, part_row): rows that are read <- rows of those owners.
 *
 *   READ_OWNERS    of each stage that has entries
 *   READ_RUNS
 *   ALL_OWNERS     of one read of all of them, the rows of one stage after those of the other
 *   ALL_RUNS
 *   ALL_KEY_CUTS   KEY_CUTS of their launches in these rows
 *   STAGED_RUNS    staged gradients <- launches. Each rank stages, for each of the others, as many
 *                  rows as that owner has
 *   READERS        (peer): owners that staged rows are for, ascending
 *   RETURN_OWNERS  of the read of gradients that others staged for this rank
 *   RETURN_READ_RUNS local rows <- launches of stage 0, then those owners */
#define HCP_LAUNCHES_SECTIONS(X) \
  X(SIZES, 5)                    \
  X(STAGES, 7)                   \
  X(LAUNCHES, 7)                 \
  X(ENTRIES, 6)                  \
  X(QUERY_CUTS, 2)               \
  X(KEY_CUTS, 2)                 \
  X(RUNNING_RUNS, 4)             \
  X(OUTPUT_RUNS, 4)              \
  X(SUNK_RUNS, 4)                \
  X(RETURN_RUNS, 4)              \
  X(LOCAL_RUNS, 4)               \
  X(READ_OWNERS, 3)              \
  X(READ_RUNS, 4)                \
  X(ALL_OWNERS, 3)               \
  X(ALL_RUNS, 4)                 \
  X(ALL_KEY_CUTS, 2)             \
  X(STAGED_RUNS, 4)              \
  X(READERS, 1)                  \
  X(RETURN_OWNERS, 3)            \
  X(RETURN_READ_RUNS, 4)

enum {
#define HCP_LAUNCHES_ENUM(name, width) HCP_LAUNCHES_##name,
  HCP_LAUNCHES_SECTIONS(HCP_LAUNCHES_ENUM)
#undef HCP_LAUNCHES_ENUM
      HCP_LAUNCHES_SECTION_COUNT
};

/* Make the launches of a schedule, which is given as words, its header among them: they may be all
 * that a backward has. words is read during the call only. HCP_INVALID for words that are no
 * schedule. */
hcp_status hcp_launches_create(const int64_t *words, int64_t word_count, const hcp_kernel *kernel,
                               hcp_table **launches, hcp_error *err);

/* Entries that stand in no schedule, such as those of cross-attention, and runs over them: (row,
 * rows, entry, row of the entry). Runs may be NULL where there are none. */
typedef struct hcp_entries {
  const int64_t *entries; /* each as in ENTRIES */
  int64_t count;
  const int64_t *query_runs;
  int64_t query_run_count;
  const int64_t *key_runs;
  int64_t key_run_count;
} hcp_entries;

/* Join the entries of one stage to launches. Of the sections, LAUNCHES, ENTRIES, QUERY_CUTS and
 * KEY_CUTS have records; OUTPUT_RUNS has those of the queries, and RETURN_RUNS those of the keys,
 * over launches. HCP_INVALID for a run of an entry that is not there. */
hcp_status hcp_launches_join(const hcp_entries *entries, const hcp_kernel *kernel,
                             hcp_table **launches, hcp_error *err);

/* ---- Heads -------------------------------------------------------------- */

/* The exchange of heads of a schedule, among neighbours that read each other's memory. Each stages
 * a block of rows for each of the others, who reads it. A rank reads all neighbours' rows of the
 * heads that it computes, in token order. BACK_ is the way back: it reads a block of its own rows
 * from each neighbour, in their order. A neighbour that computes no heads reads nothing, and stages
 * nothing on the way back.
 *
 *   SIZES         rows that this rank stages, the most that any neighbour does; the same back
 *   BLOCKS        (first, heads, most): the query heads of each neighbour's block, and the most of
 *                 any, which all blocks have room for; then the same of the key-value heads
 *   STAGED_RUNS   (row, rows, part, part_row): staged rows <- this rank's rows. A part is the
 *                 columns of a neighbour's heads, by the neighbour's number
 *   READERS       (peer): the ranks that read them, ascending
 *   OWNERS        (peer, all rows that it stages): the ranks that this one reads from, ascending
 *   READ_RUNS     rows in token order <- those owners' rows
 *   OWN_RUNS      rows in token order <- this rank's own rows
 *   BACK_BLOCKS   the same of the one block that this rank computes, among its own heads
 *   BACK_STAGED_RUNS  staged rows <- the one part of rows in token order
 *   BACK_READERS
 *   BACK_OWNERS
 *   BACK_READ_RUNS  the blocks <- those owners' rows
 *   BACK_OWN_RUNS   the blocks <- this rank's own rows in token order */
#define HCP_HEADS_SECTIONS(X) \
  X(SIZES, 4)                 \
  X(BLOCKS, 3)                \
  X(STAGED_RUNS, 4)           \
  X(READERS, 1)               \
  X(OWNERS, 2)                \
  X(READ_RUNS, 4)             \
  X(OWN_RUNS, 4)              \
  X(BACK_BLOCKS, 3)           \
  X(BACK_STAGED_RUNS, 4)      \
  X(BACK_READERS, 1)          \
  X(BACK_OWNERS, 2)           \
  X(BACK_READ_RUNS, 4)        \
  X(BACK_OWN_RUNS, 4)

enum {
#define HCP_HEADS_ENUM(name, width) HCP_HEADS_##name,
  HCP_HEADS_SECTIONS(HCP_HEADS_ENUM)
#undef HCP_HEADS_ENUM
      HCP_HEADS_SECTION_COUNT
};

/* The heads that a neighbour computes. */
typedef struct hcp_head_share {
  int64_t first_query, end_query;
  int64_t first_key, end_key; /* key-value heads */
} hcp_head_share;

/* Make the exchange of heads of a schedule, which is given as words. shares: of each of count
 * neighbours. HCP_INVALID for words that are no schedule, or of one in which the rank exchanges no
 * rows for heads, for another number of neighbours, and for shares that end before they begin. */
hcp_status hcp_heads_create(const int64_t *words, int64_t word_count, const hcp_head_share *shares,
                            int64_t count, hcp_table **heads, hcp_error *err);

/* ---- Packed entries ----------------------------------------------------- */

/* What libraries of attention ask of many entries that they compute at once. X(name), of SIZES:
 *
 *   most_queries, most_keys   of an entry
 *   most_bound_queries,
 *   most_bound_keys           of a sequence of BOUNDS
 *   queries, keys             of all entries
 *   pairs                     of a query and a key that it sees
 *   square                    1: each entry has as many queries as keys */
#define HCP_PACKED_SIZES_OF(X) \
  X(most_queries)              \
  X(most_keys)                 \
  X(most_bound_queries)        \
  X(most_bound_keys)           \
  X(queries)                   \
  X(keys)                      \
  X(pairs)                     \
  X(square)

typedef struct hcp_packed_sizes {
#define HCP_PACKED_SIZE(name) int64_t name;
  HCP_PACKED_SIZES_OF(HCP_PACKED_SIZE)
#undef HCP_PACKED_SIZE
} hcp_packed_sizes;

/* X(name, words per record). Rows count from the first entry's first query and key:
 *
 *   SIZES   see above
 *   BOUNDS  (query, key): 0, then where each sequence ends. Sequences are the entries and, between
 *           them, rows of no entry: queries without keys, and keys without queries
 *   STARTS  (query, key): where each entry begins, and, for each spare sequence and once more,
 * where the last one ends ROWS    (queries, keys): of each entry; 0 of each spare sequence */
#define HCP_PACKED_SECTIONS(X) \
  X(SIZES, 8)                  \
  X(BOUNDS, 2)                 \
  X(STARTS, 2)                 \
  X(ROWS, 2)

enum {
#define HCP_PACKED_ENUM(name, width) HCP_PACKED_##name,
  HCP_PACKED_SECTIONS(HCP_PACKED_ENUM)
#undef HCP_PACKED_ENUM
      HCP_PACKED_SECTION_COUNT
};

/* entries: count of them, as in ENTRIES of a schedule. sequences: as many as STARTS and ROWS have
 * room for, 0: neither has records. HCP_INVALID for no entries, for fewer sequences, and for
 * entries that overlap or do not ascend, in queries or in keys. */
hcp_status hcp_packed_create(const int64_t *entries, int64_t count, int64_t sequences,
                             hcp_table **packed, hcp_error *err);

/* ---- Mailboxes ---------------------------------------------------------- */

/* Messages between ranks that reach each other's memory. A rank has mailboxes for each of the
 * others, of some rows. A message is all rows between two ranks, in the order of the moves; what
 * does not fit goes in further rounds. A read has rows that follow each other where they are
 * received.
 *
 *   ROUNDS      ends of the round's records in WRITES and READS
 *   WRITES      (reader, rows, end of its WRITE_RUNS): what is put into the reader's mailbox
 *   WRITE_RUNS  (row, rows, 0, sent row): rows of the mailbox <- rows that are sent
 *   READS       (first row, rows, end of its OWNERS, end of its READ_RUNS)
 *   OWNERS      (peer, rows in its mailbox, 1 if an earlier read of the round has read it, 1 if no
 *               later read of the round reads it): parts of the read, in order
 *   READ_RUNS   (row, rows, part, mailbox row): rows from the first row on <- mailboxes */
#define HCP_MAILBOX_SECTIONS(X) \
  X(ROUNDS, 2)                  \
  X(WRITES, 3)                  \
  X(WRITE_RUNS, 4)              \
  X(READS, 4)                   \
  X(OWNERS, 4)                  \
  X(READ_RUNS, 4)

enum {
#define HCP_MAILBOX_ENUM(name, width) HCP_MAILBOX_##name,
  HCP_MAILBOX_SECTIONS(HCP_MAILBOX_ENUM)
#undef HCP_MAILBOX_ENUM
      HCP_MAILBOX_SECTION_COUNT
};

/* Cut one rank's messages into rounds. HCP_INVALID for mailbox_rows < 1, and for numbers of moves
 * below 0. */
hcp_status hcp_mailbox_create(const hcp_moves *sends, const hcp_moves *receives,
                              int64_t mailbox_rows, hcp_table **rounds, hcp_error *err);

/* ---- Fixed capacity ----------------------------------------------------- */

/* What the tables of a layer in a CUDA graph have room for, whatever the plan. Ranks 0 to
 * ranks - 1 of the domain are a block, and so on: a sequence is computed within one. */
typedef struct hcp_capacity {
  int64_t rows;       /* of a rank, C */
  int64_t sequences;  /* that a rank has rows of */
  int64_t max_seqlen; /* tokens of the longest */
  int32_t ranks;      /* of a block, d */
} hcp_capacity;

/* Each rank of a block gathers the keys of all of them, C rows each. Spans are those of the layout,
 * at most 2 * sequences, and sequences where d is 1. All records are one word:
 *
 *   POSITIONS     C: each row's place in its sequence, 0 where no token is
 *   EMPTY         C: 1 where no token is
 *   QUERY_BOUNDS  spans + 1: rows of each span, summed; spans beyond those of the plan are empty
 *   KEY_BOUNDS    spans + 1: keys that each span sees under a causal mask, summed
 *   KEYS          K = d C + C / 2 + 1: the gathered row of each key, span after span. The last
 *                 belongs to no key. None where d is 1
 *   PLACES        2 d C: where each gathered row lies among the keys, for the first and for the
 *                 second span of its sequence; K - 1: nowhere. None where d is 1
 *
 * They lie end to end, in this order. */
#define HCP_FIXED_SECTIONS(X) \
  X(POSITIONS, 1)             \
  X(EMPTY, 1)                 \
  X(QUERY_BOUNDS, 1)          \
  X(KEY_BOUNDS, 1)            \
  X(KEYS, 1)                  \
  X(PLACES, 1)

enum {
#define HCP_FIXED_ENUM(name, width) HCP_FIXED_##name,
  HCP_FIXED_SECTIONS(HCP_FIXED_ENUM)
#undef HCP_FIXED_ENUM
      HCP_FIXED_SECTION_COUNT
};

/* The records of each section. HCP_INVALID for a number below 1, or rows of 2^40 and more. */
hcp_status hcp_fixed_sizes(const hcp_capacity *capacity, int64_t sizes[HCP_FIXED_SECTION_COUNT],
                           hcp_error *err);

/* HCP_INVALID, alike on all ranks of a block, where one of them has no room, where a group reaches
 * over the block, and for a plan with masks. */
hcp_status hcp_fixed_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                            const hcp_capacity *capacity, hcp_table **fixed, hcp_error *err);

/* ---- Blocks ------------------------------------------------------------- */

/* Ranks that follow each other, C rows of each: all gather all rows, end to end, and all sum all
 * rows, of which each gets its own. X(name, words per record):
 *
 *   OTHERS         (peer)
 *   OWN            (peer, row, rows): this rank's rows, to each of the ranks
 *   ALL            (peer, row, rows): those of each of the ranks, among all
 *   SUM            (row, rows, part, part_row): own rows <- the parts of them that each rank sent
 *
 * Where ranks read each other's rows, (row, rows, part, part_row); part 0 lies here, the others
 * are in the order of OTHERS:
 *
 *   GATHER_STAGED  what a rank stages <- its rows
 *   GATHER_READ    all rows <- what each of the ranks has
 *   SUM_STAGED     what a rank stages <- its part of the others' rows
 *   SUM_READ       own rows <- the parts of them that each of the ranks has */
#define HCP_BLOCK_SECTIONS(X) \
  X(OTHERS, 1)                \
  X(OWN, 3)                   \
  X(ALL, 3)                   \
  X(SUM, 4)                   \
  X(GATHER_STAGED, 4)         \
  X(GATHER_READ, 4)           \
  X(SUM_STAGED, 4)            \
  X(SUM_READ, 4)

enum {
#define HCP_BLOCK_ENUM(name, width) HCP_BLOCK_##name,
  HCP_BLOCK_SECTIONS(HCP_BLOCK_ENUM)
#undef HCP_BLOCK_ENUM
      HCP_BLOCK_SECTION_COUNT
};

/* Of `rank`, one of the ranks first to first + ranks - 1. HCP_INVALID for another rank, and for
 * numbers below 1. */
hcp_status hcp_block_create(int32_t first, int32_t ranks, int32_t rank, int64_t rows,
                            hcp_table **block, hcp_error *err);

/* ---- Prefix trees -------------------------------------------------------- */

/* Texts that share beginnings, each part of them once. Parts lie end to end. A token sees the parts
 * that its own continues, and its own part up to itself; its position is its place in its text. */
typedef struct hcp_tree_parts {
  const int64_t *rows;    /* of part i: rows[i * stride], >= 1 */
  const int64_t *parents; /* the earlier part that it continues, or -1: parents[i * stride] */
  int64_t stride;
  int64_t n;
} hcp_tree_parts;

/* X(name, words per record)
 *
 *   SLICES     hcp_slice of each part, ascending by the first query, then by the first key: parts
 *              that it continues, and last its own rows, with what lies just before them
 *   POSITIONS  hcp_position_run, where a position is not one more than the one before it */
#define HCP_TREE_MASK_SECTIONS(X) \
  X(SLICES, 6)                    \
  X(POSITIONS, 2)

enum {
#define HCP_TREE_MASK_ENUM(name, width) HCP_TREE_MASK_##name,
  HCP_TREE_MASK_SECTIONS(HCP_TREE_MASK_ENUM)
#undef HCP_TREE_MASK_ENUM
      HCP_TREE_MASK_SECTION_COUNT
};

/* What the tokens of a tree see. HCP_INVALID for rows < 1, more than 2^40 in all, and a parent that
 * is no earlier part. On success the caller owns *mask. */
hcp_status hcp_tree_mask_create(const hcp_tree_parts *parts, hcp_table **mask, hcp_error *err);

/* Rollouts are sequences of tokens, such as answers to one prompt. Those that begin alike become
 * a tree, which has what they share once.
 *
 * Row j of a rollout holds its token j, and its target is token j + 1. Two rollouts share row j
 * where they have the same tokens up to token j + 1. So each row of a tree has one target: the row
 * before a branch is there once for each branch. A rollout's last row has no target and belongs to
 * no other rollout. Rows of a tree are edges of the trie of its rollouts.
 *
 * A part is rows that the same rollouts share. Parts lie end to end, each after the one that it
 * continues. Rollouts that begin alike come side by side, else in the order in which they are
 * given.
 *
 * X(name, words per record)
 *
 *   TREES   (parts, leaves, paths, rows, pairs, slices, positions): ends of the tree's records in
 *           PARTS, LEAVES and PATHS, its rows, the pairs of a query and a key that these see, and
 *           ends of its records in SLICES and POSITIONS
 *   PARTS   (token, rows, parent, leaf, leaves): rows of the tokens from this one on of the
 *           rollout of this leaf; the part that they continue, -1: none; the leaves below are this
 *           one and those after it. Parts and leaves are numbered in their tree
 *   LEAVES  (rollout, part): a rollout, and the part that has its last row
 *   PATHS   (leaf, part): the parts of each leaf, from the first on
 *   FIRST   (token, rows): rows of all trees end to end <- tokens of all rollouts end to end: of
 *           each part, those of its first rollout
 *   BACK    (row, rows): tokens of all rollouts <- rows of all trees
 *   SUMS    (row, rows, 0, token): rows of all trees <- tokens of all rollouts, summed: as
 *           HCP_CROSS_SECTIONS has runs
 *   SLICES, POSITIONS  as HCP_TREE_MASK_SECTIONS has them; none of a tree of one part, which is
 *           causal */
#define HCP_TREES_SECTIONS(X) \
  X(TREES, 7)                 \
  X(PARTS, 5)                 \
  X(LEAVES, 2)                \
  X(PATHS, 2)                 \
  X(FIRST, 2)                 \
  X(BACK, 2)                  \
  X(SUMS, 4)                  \
  X(SLICES, 6)                \
  X(POSITIONS, 2)

enum {
#define HCP_TREES_ENUM(name, width) HCP_TREES_##name,
  HCP_TREES_SECTIONS(HCP_TREES_ENUM)
#undef HCP_TREES_ENUM
      HCP_TREES_SECTION_COUNT
};

typedef struct hcp_rollouts {
  const void *tokens; /* of all rollouts end to end */
  int32_t token_bytes; /* 4 or 8: of one token, an integer */
  const int64_t *lengths; /* n, >= 1 */
  int64_t n;
} hcp_rollouts;

typedef struct hcp_tree_limits {
  int64_t max_rows;   /* of a tree; 0: no limit. A larger tree is divided, and its pieces repeat
                         what they share */
  int64_t min_shared; /* >= 1: rows of a part that several rollouts share */
  /* NULL, or prices: rollouts that cost less alone than as a tree stay alone. A sequence costs the
   * time of its ranks together, at the least degree at which a rank has at most
   * max_tokens_per_rank rows (0: one rank has them all). */
  const hcp_cost *cost;
  int64_t max_tokens_per_rank;
  int32_t ranks_per_node;
} hcp_tree_limits;

/* Make trees. It looks at each token that rollouts share a few times, and at no other. stop may be
 * NULL. On success the caller owns *trees. */
hcp_status hcp_trees_create(const hcp_rollouts *rollouts, const hcp_tree_limits *limits,
                            const hcp_stop *stop, hcp_table **trees, hcp_error *err);

/* ---- 9. Grid ------------------------------------------------------------ */

#define HCP_DIMENSIONS(X) \
  X(TP, "tp")             \
  X(CP, "cp")             \
  X(DP, "dp")             \
  X(PP, "pp")

typedef enum hcp_dimension {
#define HCP_DIMENSION_ENUM(name, text) HCP_DIMENSION_##name,
  HCP_DIMENSIONS(HCP_DIMENSION_ENUM)
#undef HCP_DIMENSION_ENUM
      HCP_DIMENSION_COUNT
} hcp_dimension;

/* Ranks of a job as a box of dimensions. */
typedef struct hcp_grid {
  int32_t ranks;
  int32_t sizes[HCP_DIMENSION_COUNT];
  hcp_dimension order[HCP_DIMENSION_COUNT]; /* fastest-varying first */
} hcp_grid;

/* order is all four names joined by '-', fastest first, such as "tp-cp-dp-pp".
 * sizes are by hcp_dimension, each >= 1. Fills *grid: nothing to destroy. */
hcp_status hcp_grid_init(const int32_t sizes[HCP_DIMENSION_COUNT], const char *order,
                         hcp_grid *grid, hcp_error *err);

/* The name of a dimension. Never NULL for a valid one; NULL otherwise. */
const char *hcp_dimension_name(hcp_dimension dimension);

/* List the process groups of a role: the role is dimension names joined by '_' in any
 * order, such as "dp_cp". Ranks of a group differ in these dimensions only and ascend.
 * group_count groups of group_size ranks fill ranks_out, grid->ranks in all,
 * group after group, groups ascending by their first rank. */
hcp_status hcp_grid_groups(const hcp_grid *grid, const char *role, int32_t *ranks_out,
                           int32_t *group_count, int32_t *group_size, hcp_error *err);

/* Tell whether two grids of the same ranks form the same process groups in a role: then
 * every rank also keeps its place in its group. */
hcp_status hcp_grid_shares(const hcp_grid *a, const hcp_grid *b, const char *role, int32_t *same,
                           hcp_error *err);

/* ---- 10. Rebind ---------------------------------------------------------- */

/* How the caller reads and writes slot i, a place in a model that holds a process group.
 * Callbacks return 0 for success; anything else stops the switch and is undone. get hands over one
 * reference, which release ends; a NULL value is a slot that holds nothing. set borrows value and
 * keeps a reference of its own; when it fails, the slot must hold what it held before the call. */
typedef struct hcp_slots {
  int32_t (*get)(void *context, int32_t i, void **value);
  int32_t (*set)(void *context, int32_t i, void *value);
  void (*release)(void *context, void *value);
  void *context;
} hcp_slots;

/* A switch under way: what each slot held before. */
typedef struct hcp_rebinding hcp_rebinding;

/* Put values[i] in slot i for every i < n, all or none: when slot k fails,
 * slots k - 1 .. 0 get back what they held and HCP_CALLBACK says which k. When
 * undoing fails too, the message says so and names the slot. values are
 * borrowed for the call. n may be 0. *slots is copied; on success the caller
 * owns *rebinding, and slots->context must outlive it. */
hcp_status hcp_rebinding_create(const hcp_slots *slots, void *const *values, int32_t n,
                                hcp_rebinding **rebinding, hcp_error *err);

/* Give every slot what it held, last first, and forget it. A slot that fails
 * does not stop the others; HCP_CALLBACK names the first that failed. Calling
 * it again, also from within a callback, does nothing twice. */
hcp_status hcp_rebinding_restore(hcp_rebinding *rebinding, hcp_error *err);

/* Slots still to be restored. 0 for NULL. */
int32_t hcp_rebinding_pending(const hcp_rebinding *rebinding);

/* What slot i held, for 0 <= i < pending; borrowed, for collectors that must see
 * every reference. NULL outside that range. */
void *hcp_rebinding_held(const hcp_rebinding *rebinding, int32_t i);

/* Releases what is still held, without restoring. */
void hcp_rebinding_destroy(hcp_rebinding *rebinding);

#ifdef __cplusplus
}
#endif
#endif
