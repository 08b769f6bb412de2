/* launches.c - a schedule's entries as launches of a kernel.
 *
 * All is made from a schedule's words, for a backward may have nothing else. They may come from
 * anywhere, so they are checked before any of them is used as an index. */
#include <stdlib.h>

#include "internal.h"

/* A scratch list after the sections: (row, rows, part, part_row) of all outputs. */
enum { OUTPUTS = HCP_LAUNCHES_SECTION_COUNT, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_LAUNCHES_SECTIONS(WIDTH)
#undef WIDTH
        4};

/* Fields of records. */
enum { QUERY_ROW, QUERY_ROWS, KEY_ROW, KEY_ROWS, LOW, HIGH, ENTRY_WORDS };
enum { RUN_ROW, RUN_ROWS, PART, PART_ROW, RUN_WORDS };
enum { PEER, MOVE_ROW, MOVE_ROWS, MOVE_WORDS };
enum { PULL_ROW, PULL_ROWS, PULL_PEER, PULL_PEER_ROW, PULL_WORDS };

/* Where an entry is computed, and where its rows start there. */
typedef struct place {
  int64_t launch, query, key;
} place;

/* A launch while entries join it. */
typedef struct launch {
  int64_t query, query_end, key, key_end; /* rows */
  int64_t left, right;                    /* window */
  int64_t entries;
} launch;

/* A rank that has keys. */
typedef struct owner {
  int64_t peer, rows;
  int64_t before; /* rows of lower ranks                                     */
  int64_t last;   /* the last stage whose keys it has, -1: none              */
  int64_t seen;   /* the present stage, once its number there is known       */
  int64_t part;   /* its number among those of a stage, or of all, -1: none  */
  int64_t done;   /* 1: a read of keys is the last that reads it             */
} owner;

typedef struct maker {
  const int64_t *words;
  int64_t word_count;
  hcp_schedule_header header;
  hcp_section sections[HCP_SCHEDULE_SECTION_COUNT];
  const hcp_kernel *kernel;
  int64_t entry_count, stage_count, owner_count, launch_count;
  int64_t query_rows, local_launches; /* launches of stage 0 */
  place *places;                      /* entry_count */
  launch *launches;                   /* entry_count */
  owner *owners;                      /* owner_count, ascending */
  int64_t *scratch;                   /* entry_count + owner_count */
  hcp__lists lists;
} maker;

/* ---- the schedule's words ---- */

static int64_t count_of(const maker *m, int32_t section) { return m->sections[section].records; }

static const int64_t *record_of(const maker *m, int32_t section, int64_t i) {
  return m->words + m->sections[section].first + i * hcp__schedule_widths[section];
}

static const int64_t *stage_of(const maker *m, int64_t i) {
  return record_of(m, HCP_SCHEDULE_STAGES, i);
}

/* The first of a stage's records in a section; `end` is the field that says where they end. */
static int64_t begin_of(const maker *m, int64_t stage, int32_t end) {
  return stage == 0 ? 0 : stage_of(m, stage - 1)[end];
}

static hcp_status no_schedule(const maker *m, const char *what, hcp_error *err) {
  return hcp__no_schedule(m->word_count, what, err);
}

/* More than any row or rank. Sums of some of them fit. */
#define WORD_MAX ((int64_t)1 << 56)

/* No word is so large that sums would not fit. */
static int words_are_small(const maker *m) {
  for (int64_t i = HCP_SCHEDULE_HEADER_WORDS; i < m->word_count; i++)
    if (m->words[i] < -WORD_MAX || m->words[i] > WORD_MAX) return 0;
  return 1;
}

static int ends_ascend(const maker *m, int32_t section, int32_t end) {
  int64_t before = 0;
  for (int64_t i = 0; i < m->stage_count; i++) {
    int64_t here = stage_of(m, i)[end];
    if (here < before) return 0;
    before = here;
  }
  return before == count_of(m, section);
}

static int parts_exist(const maker *m, int32_t section, int64_t parts) {
  for (int64_t i = 0; i < count_of(m, section); i++) {
    const int64_t *run = record_of(m, section, i);
    if (run[PART] < 0 || run[PART] >= parts) return 0;
  }
  return 1;
}

static hcp_status check_words(maker *m, hcp_error *err) {
  hcp_schedule_sizes sizes;
  hcp_status status =
      hcp_schedule_read(m->words, m->word_count, m->sections, &m->header, &sizes, err);
  if (status != HCP_OK) return status;
  if (!words_are_small(m)) return no_schedule(m, "a number is no row", err);
  m->entry_count = count_of(m, HCP_SCHEDULE_ENTRIES);
  m->stage_count = count_of(m, HCP_SCHEDULE_STAGES);
  m->owner_count = count_of(m, HCP_SCHEDULE_KEY_OWNERS);
  if (!ends_ascend(m, HCP_SCHEDULE_ENTRIES, HCP__STAGE_ENTRIES) ||
      !ends_ascend(m, HCP_SCHEDULE_PULLS, HCP__STAGE_PULLS))
    return no_schedule(m, "a stage ends before it begins", err);
  if (!parts_exist(m, HCP_SCHEDULE_OUTPUT_RUNS, m->entry_count) ||
      !parts_exist(m, HCP_SCHEDULE_RETURN_RUNS, m->entry_count) ||
      !parts_exist(m, HCP_SCHEDULE_LOCAL_RUNS, stage_of(m, 0)[HCP__STAGE_ENTRIES] + 1))
    return no_schedule(m, "a run names an entry that is not there", err);
  m->query_rows = sizes.query_rows;
  return HCP_OK;
}

/* ---- entries to launches ---- */

/* FlashAttention's window, aligned bottom right: (-1, -1) is full, (-1, 0) causal. */
static void window_of(const int64_t *entry, launch *of) {
  int64_t ahead = entry[KEY_ROWS] - entry[QUERY_ROWS];
  of->left = entry[LOW] <= 1 - entry[QUERY_ROWS] ? -1 : ahead - entry[LOW];
  of->right = entry[HIGH] >= entry[KEY_ROWS] - 1 ? -1 : entry[HIGH] - ahead;
}

static int accepts(const launch *made, const launch *next) {
  return made->left == next->left && made->right == next->right && next->query >= made->query_end &&
         next->key >= made->key_end;
}

/* The first of the launches from `first` on that the entry can join, else a new one. */
static int64_t launch_for(maker *m, const launch *next, int64_t first) {
  int64_t i = m->kernel->packs ? first : m->launch_count;
  while (i < m->launch_count && !accepts(&m->launches[i], next)) i++;
  if (i == m->launch_count) {
    m->launches[m->launch_count++] = *next;
  } else {
    m->launches[i].query_end = next->query_end;
    m->launches[i].key_end = next->key_end;
  }
  m->launches[i].entries++;
  return i;
}

/* Joins the entries [begin, end) of one stage, which `entries` holds, to launches. */
static void join(maker *m, const int64_t *entries, int64_t begin, int64_t end) {
  int64_t first = m->launch_count;
  for (int64_t e = begin; e < end; e++) {
    const int64_t *entry = entries + e * ENTRY_WORDS;
    launch next = {.query = entry[QUERY_ROW],
                   .query_end = entry[QUERY_ROW] + entry[QUERY_ROWS],
                   .key = entry[KEY_ROW],
                   .key_end = entry[KEY_ROW] + entry[KEY_ROWS]};
    window_of(entry, &next);
    int64_t i = launch_for(m, &next, first);
    m->places[e] = (place){i, next.query - m->launches[i].query, next.key - m->launches[i].key};
  }
}

/* Appends the launches from `first` on, and their entries [begin, end). */
static void append_launches(maker *m, const int64_t *entries, int64_t first, int64_t begin,
                            int64_t end) {
  int64_t *at = m->scratch, next = begin;
  for (int64_t i = first; i < m->launch_count; i++) {
    const launch *l = &m->launches[i];
    at[i - first] = next - begin;
    next += l->entries;
    hcp__append(
        &m->lists, HCP_LAUNCHES_LAUNCHES,
        (const int64_t[]){next, l->query, l->query_end, l->key, l->key_end, l->left, l->right});
    hcp__append(&m->lists, HCP_LAUNCHES_QUERY_CUTS,
                (const int64_t[]){l->query, l->query_end - l->query});
    hcp__append(&m->lists, HCP_LAUNCHES_KEY_CUTS, (const int64_t[]){l->key, l->key_end - l->key});
  }
  for (int64_t e = begin; e < end; e++) hcp__append(&m->lists, HCP_LAUNCHES_ENTRIES, entries);
  if (m->lists.failed) return;
  int64_t *made = m->lists.list[HCP_LAUNCHES_ENTRIES].words;
  for (int64_t e = begin; e < end; e++) {
    int64_t to = begin + at[m->places[e].launch - first]++;
    for (int32_t w = 0; w < ENTRY_WORDS; w++)
      made[to * ENTRY_WORDS + w] = entries[e * ENTRY_WORDS + w];
  }
}

/* ---- runs over launches ---- */

/* Appends n runs over entries as runs over launches. The part `returned`, if runs have it, is
 * that of the gradients that others returned, which come after the launches of stage 0. A run's
 * records keep their order, which is that of entries: launches need not ascend. */
static void renumber(maker *m, const int64_t *run, int64_t n, int32_t to, int64_t returned) {
  for (; n > 0; n--, run += RUN_WORDS) {
    place at = {m->local_launches, 0, 0};
    if (run[PART] != returned) at = m->places[run[PART]];
    int64_t first = to == OUTPUTS || to == HCP_LAUNCHES_OUTPUT_RUNS ? at.query : at.key;
    hcp__append(&m->lists, to,
                (const int64_t[]){run[RUN_ROW], run[RUN_ROWS], at.launch, run[PART_ROW] + first});
  }
}

/* The same of a section of the schedule. */
static void renumber_section(maker *m, int32_t from, int32_t to, int64_t returned) {
  renumber(m, record_of(m, from, 0), count_of(m, from), to, returned);
}

/* Appends the outputs of the launches [first, end), counted from the first of them. */
static void append_outputs(maker *m, int32_t section, int64_t first, int64_t end) {
  for (int64_t i = 0; i < hcp__records(&m->lists, OUTPUTS); i++) {
    const int64_t *run = hcp__record(&m->lists, OUTPUTS, i);
    if (run[PART] >= first && run[PART] < end)
      hcp__append(&m->lists, section,
                  (const int64_t[]){run[RUN_ROW], run[RUN_ROWS], run[PART] - first, run[PART_ROW]});
  }
}

/* Appends rows in which one more part stands alone, from `row` up to `end`. */
static void append_gap(maker *m, int64_t row, int64_t end, int64_t part) {
  if (end > row)
    hcp__append(&m->lists, HCP_LAUNCHES_SUNK_RUNS, (const int64_t[]){row, end - row, part, row});
}

/* The outputs that are left, with one more part in every run, and in rows that no run names. */
static void append_sunk(maker *m, int64_t part) {
  int64_t row = 0, n = hcp__records(&m->lists, HCP_LAUNCHES_OUTPUT_RUNS);
  for (int64_t i = 0; i < n; i++) {
    const int64_t *run = hcp__record(&m->lists, HCP_LAUNCHES_OUTPUT_RUNS, i);
    int last = i + 1 == n || run[RUN_WORDS] != run[RUN_ROW];
    append_gap(m, row, run[RUN_ROW], part);
    hcp__append(&m->lists, HCP_LAUNCHES_SUNK_RUNS, run);
    row = run[RUN_ROW];
    if (last) append_gap(m, row, row + run[RUN_ROWS], part);
    if (last) row += run[RUN_ROWS];
  }
  append_gap(m, row, m->query_rows, part);
}

/* Whether runs of one part are that part, row by row. */
static int covers(const maker *m, int32_t section) {
  int64_t rows = 0;
  for (int64_t i = 0; i < hcp__records(&m->lists, section); i++) {
    const int64_t *run = hcp__record(&m->lists, section, i);
    if (run[RUN_ROW] != run[PART_ROW]) return 0;
    rows = hcp__sum(rows, hcp__most(0, run[RUN_ROWS]));
  }
  return rows == m->query_rows;
}

static int all_rows(const maker *m, int32_t section, int64_t first, int64_t end) {
  for (int64_t i = first; i < end; i++)
    if (hcp__record(&m->lists, section, i)[1] != m->query_rows) return 0;
  return 1;
}

/* ---- reads of keys where their owners hold them ---- */

static int by_peer(const void *a, const void *b) {
  int64_t left = ((const owner *)a)->peer, right = ((const owner *)b)->peer;
  return (left > right) - (left < right);
}

static int by_number(const void *a, const void *b) {
  int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
  return (left > right) - (left < right);
}

/* By the first number, then by the second. */
static int by_pair(const void *a, const void *b) {
  int order = by_number(a, b);
  return order ? order : by_number((const int64_t *)a + 1, (const int64_t *)b + 1);
}

static owner *owner_of(const maker *m, int64_t peer) {
  owner wanted = {.peer = peer};
  return bsearch(&wanted, m->owners, (size_t)m->owner_count, sizeof wanted, by_peer);
}

static void find_owners(maker *m) {
  int64_t before = 0;
  for (int64_t i = 0; i < m->owner_count; i++) {
    const int64_t *own = record_of(m, HCP_SCHEDULE_KEY_OWNERS, i);
    m->owners[i] = (owner){.peer = own[0], .rows = own[1], .last = -1, .seen = -1, .part = -1};
  }
  if (m->owner_count > 0) qsort(m->owners, (size_t)m->owner_count, sizeof *m->owners, by_peer);
  for (int64_t i = 0; i < m->owner_count; i++) {
    m->owners[i].before = before;
    before = hcp__sum(before, hcp__most(0, m->owners[i].rows));
  }
}

/* Returns 0 where a stage has keys of nobody. */
static int find_last_stages(maker *m) {
  for (int64_t s = 0; s < m->stage_count; s++)
    for (int64_t i = begin_of(m, s, HCP__STAGE_PULLS); i < stage_of(m, s)[HCP__STAGE_PULLS]; i++) {
      owner *of = owner_of(m, record_of(m, HCP_SCHEDULE_PULLS, i)[PULL_PEER]);
      if (of == NULL) return 0;
      of->last = s;
    }
  return 1;
}

/* The owners of a stage's keys, as numbers in m->scratch, ascending. Returns how many. */
static int64_t find_owners_of(maker *m, int64_t stage) {
  int64_t n = 0;
  for (int64_t i = begin_of(m, stage, HCP__STAGE_PULLS); i < stage_of(m, stage)[HCP__STAGE_PULLS];
       i++) {
    owner *of = owner_of(m, record_of(m, HCP_SCHEDULE_PULLS, i)[PULL_PEER]);
    if (of->seen == stage) continue;
    of->seen = stage;
    m->scratch[n++] = of - m->owners;
  }
  if (n > 0) qsort(m->scratch, (size_t)n, sizeof *m->scratch, by_number);
  return n;
}

/* Appends the keys of a stage, `row` rows further on. */
static void append_pulls(maker *m, int64_t stage, int32_t section, int64_t row) {
  for (int64_t i = begin_of(m, stage, HCP__STAGE_PULLS); i < stage_of(m, stage)[HCP__STAGE_PULLS];
       i++) {
    const int64_t *pull = record_of(m, HCP_SCHEDULE_PULLS, i);
    hcp__append(&m->lists, section,
                (const int64_t[]){pull[PULL_ROW] + row, pull[PULL_ROWS],
                                  owner_of(m, pull[PULL_PEER])->part, pull[PULL_PEER_ROW]});
  }
}

static int attends(const maker *m, int64_t stage) {
  return stage_of(m, stage)[HCP__STAGE_ENTRIES] > begin_of(m, stage, HCP__STAGE_ENTRIES);
}

static void append_read(maker *m, int64_t stage) {
  int64_t n = find_owners_of(m, stage);
  for (int64_t part = 0; part < n; part++) {
    owner *of = &m->owners[m->scratch[part]];
    of->part = part;
    of->done |= of->last == stage;
    hcp__append(&m->lists, HCP_LAUNCHES_READ_OWNERS,
                (const int64_t[]){of->peer, of->rows, of->last == stage});
  }
  append_pulls(m, stage, HCP_LAUNCHES_READ_RUNS, 0);
}

/* Appends one read of what all stages read, the rows of one after those of the other. Its owners
 * are those that a read of a stage names. */
static void append_read_of_all(maker *m) {
  int64_t part = 0, row = 0, launches = 0;
  for (int64_t i = 0; i < m->owner_count; i++) {
    owner *of = &m->owners[i];
    if (of->part < 0) continue;
    of->part = part++;
    hcp__append(&m->lists, HCP_LAUNCHES_ALL_OWNERS,
                (const int64_t[]){of->peer, of->rows, of->done});
  }
  for (int64_t s = 0; s < m->stage_count; s++) {
    int64_t end = hcp__record(&m->lists, HCP_LAUNCHES_STAGES, s)[0];
    int reads =
        attends(m, s) && stage_of(m, s)[HCP__STAGE_PULLS] > begin_of(m, s, HCP__STAGE_PULLS);
    for (int64_t i = launches; reads && i < end; i++) {
      const int64_t *cut = hcp__record(&m->lists, HCP_LAUNCHES_KEY_CUTS, i);
      hcp__append(&m->lists, HCP_LAUNCHES_ALL_KEY_CUTS, (const int64_t[]){cut[0] + row, cut[1]});
    }
    if (reads) append_pulls(m, s, HCP_LAUNCHES_ALL_RUNS, row);
    if (reads) row = hcp__sum(row, hcp__most(0, stage_of(m, s)[HCP__STAGE_KEYS]));
    launches = end;
  }
}

/* ---- gradients that their owners read ---- */

/* Where a rank stages the rows of an owner: after those of the owners before, itself not among
 * them. */
static int64_t staged_at(const maker *m, int64_t stager, int64_t peer) {
  const owner *own = owner_of(m, stager);
  return owner_of(m, peer)->before - (own != NULL && stager < peer ? own->rows : 0);
}

/* Moves as pairs (row, number) in m->scratch, by row. Returns how many. */
static int64_t order_moves(maker *m, int32_t section) {
  int64_t n = count_of(m, section);
  for (int64_t i = 0; i < n; i++) {
    m->scratch[2 * i] = record_of(m, section, i)[MOVE_ROW];
    m->scratch[2 * i + 1] = i;
  }
  if (n > 0) qsort(m->scratch, (size_t)n, 2 * sizeof *m->scratch, by_pair);
  return n;
}

static int64_t peer_of(const maker *m, int32_t section, int64_t k) {
  return record_of(m, section, m->scratch[2 * k + 1])[PEER];
}

/* The last of n ordered moves that starts at a row or before it. */
static int64_t move_at(const maker *m, int64_t n, int64_t row) {
  int64_t low = 0, high = n - 1;
  while (low < high) {
    int64_t middle = low + (high - low + 1) / 2;
    if (m->scratch[2 * middle] <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/* The first of the returned runs that starts at a row or after it. */
static int64_t return_run_at(const maker *m, int64_t row) {
  int64_t low = 0, high = hcp__records(&m->lists, HCP_LAUNCHES_RETURN_RUNS);
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (hcp__record(&m->lists, HCP_LAUNCHES_RETURN_RUNS, middle)[RUN_ROW] < row)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* Appends the returned runs that begin in [row, end), moved to start at `to`. */
static void append_staged_runs(maker *m, int64_t row, int64_t end, int64_t to) {
  for (int64_t i = return_run_at(m, row); i < return_run_at(m, end); i++) {
    const int64_t *run = hcp__record(&m->lists, HCP_LAUNCHES_RETURN_RUNS, i);
    hcp__append(
        &m->lists, HCP_LAUNCHES_STAGED_RUNS,
        (const int64_t[]){run[RUN_ROW] - row + to, run[RUN_ROWS], run[PART], run[PART_ROW]});
  }
}

/* What this rank stages, owner after owner, and who reads it. */
static void append_staged(maker *m) {
  int64_t n = order_moves(m, HCP_SCHEDULE_RETURN_SENDS), *order = m->scratch + 2 * n;
  for (int64_t k = 0; k < n; k++) {
    order[2 * k] = peer_of(m, HCP_SCHEDULE_RETURN_SENDS, k);
    order[2 * k + 1] = k;
  }
  if (n > 0) qsort(order, (size_t)n, 2 * sizeof *order, by_pair);
  for (int64_t i = 0; i < n; i++) {
    int64_t peer = order[2 * i], k = order[2 * i + 1];
    hcp__append(&m->lists, HCP_LAUNCHES_READERS, &peer);
    append_staged_runs(m, m->scratch[2 * k], k + 1 < n ? m->scratch[2 * k + 2] : HCP__LATE,
                       staged_at(m, m->header.rank, peer));
  }
}

/* What this rank reads: local rows, some of them where others staged them. */
static void append_return_read(maker *m, int64_t total) {
  int64_t n = order_moves(m, HCP_SCHEDULE_RETURN_RECEIVES);
  for (int64_t k = 0; k < n; k++) {
    const owner *of = owner_of(m, peer_of(m, HCP_SCHEDULE_RETURN_RECEIVES, k));
    hcp__append(&m->lists, HCP_LAUNCHES_RETURN_OWNERS,
                (const int64_t[]){of->peer, total - of->rows, 1});
  }
  for (int64_t i = 0; i < hcp__records(&m->lists, HCP_LAUNCHES_LOCAL_RUNS); i++) {
    const int64_t *run = hcp__record(&m->lists, HCP_LAUNCHES_LOCAL_RUNS, i);
    int64_t made[RUN_WORDS] = {run[RUN_ROW], run[RUN_ROWS], run[PART], run[PART_ROW]};
    if (run[PART] == m->local_launches && n > 0) {
      int64_t k = move_at(m, n, run[PART_ROW]);
      int64_t stager = peer_of(m, HCP_SCHEDULE_RETURN_RECEIVES, k);
      made[PART] += k;
      made[PART_ROW] += staged_at(m, stager, m->header.rank) - m->scratch[2 * k];
    }
    hcp__append(&m->lists, HCP_LAUNCHES_RETURN_READ_RUNS, made);
  }
}

static int owns_keys(const maker *m, int32_t section) {
  for (int64_t i = 0; i < count_of(m, section); i++)
    if (owner_of(m, record_of(m, section, i)[PEER]) == NULL) return 0;
  return 1;
}

/* ---- the table ---- */

/* Whether a total takes what has been computed when each stage ends. */
static void find_totals(const maker *m, const int64_t *launch_ends, int64_t *totals) {
  int64_t busy = 0, seen = 0;
  for (int64_t s = 0; s < m->stage_count; s++)
    busy += launch_ends[s] > (s == 0 ? 0 : launch_ends[s - 1]);
  for (int64_t s = 0; s < m->stage_count; s++) {
    seen += launch_ends[s] > (s == 0 ? 0 : launch_ends[s - 1]);
    int computes = launch_ends[s] > (s == 0 ? 0 : launch_ends[s - 1]);
    totals[s] =
        computes && busy > m->kernel->waiting && seen < busy && seen % HCP_LAUNCHES_TOGETHER == 0;
  }
}

/* Joins all entries; launch_ends[s] is where those of stage s end. */
static void join_stages(maker *m, int64_t *launch_ends) {
  const int64_t *entries = record_of(m, HCP_SCHEDULE_ENTRIES, 0);
  for (int64_t s = 0; s < m->stage_count; s++) {
    int64_t first = m->launch_count, begin = begin_of(m, s, HCP__STAGE_ENTRIES);
    int64_t end = stage_of(m, s)[HCP__STAGE_ENTRIES];
    join(m, entries, begin, end);
    append_launches(m, entries, first, begin, end);
    launch_ends[s] = m->launch_count;
  }
  m->local_launches = launch_ends[0];
}

/* Appends the stages, their running totals and their reads. Returns the first launch that is in
 * no total when the last stage ends. */
static int64_t append_stages(maker *m, const int64_t *launch_ends, const int64_t *totals) {
  int64_t waiting = 0, before = 0;
  for (int64_t s = 0; s < m->stage_count; s++) {
    int64_t end = launch_ends[s];
    if (totals[s]) append_outputs(m, HCP_LAUNCHES_RUNNING_RUNS, waiting, end);
    if (totals[s]) waiting = end;
    if (m->header.in_place && attends(m, s)) append_read(m, s);
    int whole = s == 0 && all_rows(m, HCP_LAUNCHES_KEY_CUTS, before, end);
    hcp__append(&m->lists, HCP_LAUNCHES_STAGES,
                (const int64_t[]){end, hcp__records(&m->lists, HCP_LAUNCHES_RUNNING_RUNS),
                                  hcp__records(&m->lists, HCP_LAUNCHES_READ_OWNERS),
                                  hcp__records(&m->lists, HCP_LAUNCHES_READ_RUNS), totals[s], whole,
                                  stage_of(m, s)[HCP__STAGE_KEYS]});
    before = end;
  }
  return waiting;
}

/* Returns the rows that this rank stages. */
static int64_t append_reads(maker *m) {
  int64_t total = 0;
  for (int64_t i = 0; i < m->owner_count; i++) total = hcp__sum(total, m->owners[i].rows);
  append_read_of_all(m);
  append_staged(m);
  append_return_read(m, total);
  return total - m->query_rows;
}

static void make(maker *m, int64_t *launch_ends, int64_t *totals) {
  join_stages(m, launch_ends);
  if (m->lists.failed) return;
  renumber_section(m, HCP_SCHEDULE_OUTPUT_RUNS, OUTPUTS, -1);
  renumber_section(m, HCP_SCHEDULE_RETURN_RUNS, HCP_LAUNCHES_RETURN_RUNS, -1);
  renumber_section(m, HCP_SCHEDULE_LOCAL_RUNS, HCP_LAUNCHES_LOCAL_RUNS,
                   stage_of(m, 0)[HCP__STAGE_ENTRIES]);
  find_totals(m, launch_ends, totals);
  int64_t left = append_stages(m, launch_ends, totals);
  append_outputs(m, HCP_LAUNCHES_OUTPUT_RUNS, left, m->launch_count);
  if (m->lists.failed) return;
  append_sunk(m, m->launch_count - left);
  int one = m->launch_count == 1 && m->stage_count == 1 && covers(m, HCP_LAUNCHES_OUTPUT_RUNS) &&
            covers(m, HCP_LAUNCHES_LOCAL_RUNS);
  int whole = all_rows(m, HCP_LAUNCHES_QUERY_CUTS, 0, m->launch_count);
  int64_t staged = m->header.in_place ? append_reads(m) : 0;
  hcp__append(&m->lists, HCP_LAUNCHES_SIZES,
              (const int64_t[]){m->launch_count, m->query_rows, whole, one, staged});
}

static hcp_status check_reads(maker *m, hcp_error *err) {
  if (!m->header.in_place) return HCP_OK;
  find_owners(m);
  for (int64_t i = 0; i < m->owner_count; i++)
    if (m->owners[i].rows < 0) return no_schedule(m, "a rank has less than no rows", err);
  if (!find_last_stages(m) || !owns_keys(m, HCP_SCHEDULE_RETURN_SENDS) ||
      !owns_keys(m, HCP_SCHEDULE_RETURN_RECEIVES) ||
      (count_of(m, HCP_SCHEDULE_RETURN_RECEIVES) > 0 && owner_of(m, m->header.rank) == NULL))
    return no_schedule(m, "it names a rank that has no keys", err);
  return HCP_OK;
}

/* Memory for all scratch, in one block. */
static void *reserve(maker *m, int64_t **launch_ends, int64_t **totals) {
  int64_t moves =
      count_of(m, HCP_SCHEDULE_RETURN_SENDS) + count_of(m, HCP_SCHEDULE_RETURN_RECEIVES);
  size_t entries = (size_t)m->entry_count, owners = (size_t)m->owner_count;
  size_t numbers = entries + owners + 4 * (size_t)moves, stages = (size_t)m->stage_count;
  char *block =
      calloc(1, entries * (sizeof *m->places + sizeof *m->launches) + owners * sizeof *m->owners +
                    (numbers + 2 * stages) * sizeof *m->scratch);
  if (block == NULL) return NULL;
  m->places = (place *)(void *)block;
  m->launches = (launch *)(m->places + entries);
  m->owners = (owner *)(m->launches + entries);
  m->scratch = (int64_t *)(m->owners + owners);
  *launch_ends = m->scratch + numbers;
  *totals = *launch_ends + stages;
  return block;
}

hcp_status hcp_launches_create(const int64_t *words, int64_t word_count, const hcp_kernel *kernel,
                               hcp_table **launches, hcp_error *err) {
  maker m = {.words = words, .word_count = word_count, .kernel = kernel};
  int64_t *launch_ends, *totals;
  hcp_status status = check_words(&m, err);
  if (status != HCP_OK) return status;
  void *block = reserve(&m, &launch_ends, &totals);
  if (block == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for launches");
  status = check_reads(&m, err);
  if (status == HCP_OK) {
    hcp__lists_init(&m.lists, widths, LIST_COUNT);
    make(&m, launch_ends, totals);
    status = hcp__table_create(&m.lists, HCP_LAUNCHES_SECTION_COUNT, launches, err);
    hcp__lists_release(&m.lists);
  }
  free(block);
  return status;
}

/* Numbers that a table may have, and runs of entries that are there. */
static hcp_status check_entries(const hcp_entries *given, hcp_error *err) {
  for (int64_t i = 0; i < given->count * ENTRY_WORDS; i++)
    if (given->entries[i] < -WORD_MAX || given->entries[i] > WORD_MAX)
      return hcp__fail(err, HCP_INVALID, "entries[%lld] is %lld, expected rows",
                       (long long)(i / ENTRY_WORDS), (long long)given->entries[i]);
  for (int32_t of_keys = 0; of_keys < 2; of_keys++) {
    const int64_t *runs = of_keys ? given->key_runs : given->query_runs;
    int64_t n = of_keys ? given->key_run_count : given->query_run_count;
    for (int64_t i = 0; i < n; i++)
      if (runs[i * RUN_WORDS + PART] < 0 || runs[i * RUN_WORDS + PART] >= given->count)
        return hcp__fail(err, HCP_INVALID, "%s_runs[%lld] names entry %lld, expected one of %lld",
                         of_keys ? "key" : "query", (long long)i,
                         (long long)runs[i * RUN_WORDS + PART], (long long)given->count);
  }
  return HCP_OK;
}

hcp_status hcp_launches_join(const hcp_entries *given, const hcp_kernel *kernel,
                             hcp_table **launches, hcp_error *err) {
  int64_t n = given->count;
  maker m = {.kernel = kernel, .entry_count = n};
  hcp_status status = check_entries(given, err);
  if (status != HCP_OK) return status;
  char *block =
      calloc(1, ((size_t)n + 1) * (sizeof *m.places + sizeof *m.launches + sizeof *m.scratch));
  if (block == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for launches");
  m.places = (place *)(void *)block;
  m.launches = (launch *)(m.places + n + 1);
  m.scratch = (int64_t *)(m.launches + n + 1);
  hcp__lists_init(&m.lists, widths, LIST_COUNT);
  join(&m, given->entries, 0, n);
  append_launches(&m, given->entries, 0, 0, n);
  renumber(&m, given->query_runs, given->query_run_count, HCP_LAUNCHES_OUTPUT_RUNS, -1);
  renumber(&m, given->key_runs, given->key_run_count, HCP_LAUNCHES_RETURN_RUNS, -1);
  status = hcp__table_create(&m.lists, HCP_LAUNCHES_SECTION_COUNT, launches, err);
  hcp__lists_release(&m.lists);
  free(block);
  return status;
}
