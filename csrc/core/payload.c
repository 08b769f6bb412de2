/* payload.c - rows of which each sequence has a number of its own, and the ranks that get them. */
#include <stdlib.h>
#include <string.h>

#include "payload.h"

const char *hcp_split_name(hcp_split split) {
  switch (split) {
#define NAME(name, text) \
  case HCP_SPLIT_##name: \
    return text;
    HCP_SPLITS(NAME)
#undef NAME
    case HCP_SPLIT_COUNT:
      break;
  }
  return NULL;
}

/* ---- units ---- */

int64_t hcp__unit_count(const hcp_payload *payload, int32_t sequence) {
  return payload->first[sequence + 1] - payload->first[sequence];
}

/* A sequence's rows in its units before this one. */
static int64_t end_of(const hcp_payload *payload, int32_t sequence, int64_t unit) {
  return payload->ends == NULL ? unit : payload->ends[payload->first[sequence] + sequence + unit];
}

int64_t hcp__payload_rows(const hcp_payload *payload, int32_t sequence) {
  return end_of(payload, sequence, hcp__unit_count(payload, sequence));
}

int64_t hcp__unit_at(const hcp_payload *payload, int32_t sequence, int64_t row) {
  int64_t low = 0, high = hcp__unit_count(payload, sequence);
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (end_of(payload, sequence, middle) >= row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

int64_t hcp__unit_rows(const hcp_payload *payload, int32_t sequence, int64_t unit) {
  return end_of(payload, sequence, unit + 1) - end_of(payload, sequence, unit);
}

/* ---- tokens that take rows ---- */

/* The last run that begins at or before a value, -1: none. */
static int64_t last_run(const hcp__takers *takers, int mark, int64_t value) {
  int64_t low = 0, high = takers->count + 1;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (takers->runs[middle].begins[mark] <= value)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1;
}

int64_t hcp__takers_before(const hcp__takers *takers, int64_t token) {
  int64_t r = last_run(takers, HCP__TOKEN, token);
  if (r < 0) return 0;
  const hcp__run *run = &takers->runs[r];
  return run->begins[HCP__TAKER] + hcp__least(token - run->begins[HCP__TOKEN], run->tokens);
}

/* The first row that a taker takes, counted as often as tokens take it; all for the number of
 * takers. */
static int64_t first_row(const hcp__takers *takers, int64_t taker) {
  const hcp__run *run = &takers->runs[last_run(takers, HCP__TAKER, taker)];
  return run->begins[HCP__ROW] + (taker - run->begins[HCP__TAKER]) * run->each;
}

hcp_status hcp__takers_before_row(const hcp__takers *takers, int64_t row, int64_t *before,
                                  hcp_error *err) {
  row *= takers->tokens_of_row;
  const hcp__run *run = &takers->runs[last_run(takers, HCP__ROW, row)];
  int64_t rows = row - run->begins[HCP__ROW], whole = rows / run->each;
  if (rows % run->each != 0)
    return hcp__fail(err, HCP_INVALID,
                     "token %lld takes rows before and after row %lld, where a unit ends, "
                     "expected rows of one unit",
                     (long long)(run->begins[HCP__TOKEN] + whole), (long long)row);
  *before = run->begins[HCP__TAKER] + whole;
  return HCP_OK;
}

/* ---- what they are made of ---- */

static int run_is_sound(const hcp_taker_run *run, int64_t end, int64_t length, int64_t first_rows) {
  return run->token >= end && run->tokens >= 1 && run->tokens <= length &&
         run->token <= length - run->tokens && run->rows >= -length &&
         run->rows <= HCP__LENGTH_MAX &&
         (first_rows < 0 ? run->rows == first_rows : run->rows >= 1);
}

/* Reads the runs of one sequence of `length` tokens, which take `rows` rows, to *at, which moves
 * on; after them comes one that nothing lies behind. */
static hcp_status read_runs(const hcp_taker_run *runs, int64_t count, int64_t length, int64_t rows,
                            hcp__run **at, hcp__takers *takers, hcp_error *err) {
  hcp__run *made = *at;
  int64_t end = 0, taken = 0;
  hcp__wide sum = 0;
  for (int64_t r = 0; r < count; r++) {
    const hcp_taker_run *run = &runs[r];
    if (!run_is_sound(run, end, length, runs[0].rows))
      return hcp__fail(err, HCP_INVALID,
                       "takers are %lld tokens from token %lld on with %lld rows each, expected "
                       "tokens from %lld to %lld, and rows like those of the run before",
                       (long long)run->tokens, (long long)run->token, (long long)run->rows,
                       (long long)end, (long long)length - 1);
    made[r] =
        (hcp__run){{run->token, taken, (int64_t)sum}, run->tokens, run->rows < 1 ? 1 : run->rows};
    end = run->token + run->tokens;
    taken += run->tokens;
    sum += (hcp__wide)run->tokens * made[r].each;
    if (sum > INT64_MAX / 2) break;
  }
  int64_t tokens_of_row = count > 0 && runs[0].rows < 0 ? -runs[0].rows : 1;
  if (sum != (hcp__wide)rows * tokens_of_row)
    return hcp__fail(err, HCP_INVALID, "takers take other rows than the %lld that there are",
                     (long long)rows);
  made[count] = (hcp__run){{INT64_MAX, taken, (int64_t)sum}, 0, 1};
  *takers = (hcp__takers){made, count, tokens_of_row};
  *at = made + count + 1;
  return HCP_OK;
}

hcp_status hcp_units_check(const int64_t *unit_rows, int32_t units, const hcp_taker_run *runs,
                           int32_t run_count, hcp_error *err) {
  int64_t end = 0, before;
  hcp__takers takers;
  for (int32_t i = 0; i < units; i++) {
    if (unit_rows[i] < 0 || unit_rows[i] > HCP__LENGTH_MAX - end)
      return hcp__fail(err, HCP_INVALID, "unit %d has %lld rows, expected 0 to 2^40 of all", i,
                       (long long)unit_rows[i]);
    end += unit_rows[i];
  }
  hcp__run *made = malloc(((size_t)run_count + 1) * sizeof *made), *at = made;
  if (made == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d runs", run_count);
  hcp_status status = read_runs(runs, run_count, HCP__LENGTH_MAX, end, &at, &takers, err);
  end = 0;
  for (int32_t i = 0; status == HCP_OK && i < units; i++) {
    end += unit_rows[i];
    status = hcp__takers_before_row(&takers, end, &before, err);
  }
  free(made);
  return status;
}

/* ---- creation ---- */

static hcp_status check_units(const hcp_plan *plan, const int64_t *units, const int64_t *unit_rows,
                              int64_t *count, hcp_error *err) {
  int64_t n = 0, rows = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    if (units[i] < 0 || units[i] > HCP__LENGTH_MAX - n)
      return hcp__fail(err, HCP_INVALID, "units[%d] is %lld, expected >= 0 and 2^40 of all", i,
                       (long long)units[i]);
    n += units[i];
  }
  for (int64_t u = 0; unit_rows != NULL && u < n; u++) {
    if (unit_rows[u] < 0 || unit_rows[u] > HCP__LENGTH_MAX - rows)
      return hcp__fail(err, HCP_INVALID, "unit_rows[%lld] is %lld, expected >= 0 and 2^40 of all",
                       (long long)u, (long long)unit_rows[u]);
    rows += unit_rows[u];
  }
  *count = n;
  return HCP_OK;
}

/* Whether counts of runs add up to as many as there are, and sources are ranks. */
static hcp_status check_takers(const hcp_plan *plan, const hcp_takers *takers, hcp_error *err) {
  int64_t loaded = 0, computed = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    if (takers->counts[i] < 0 || takers->counts[i] > INT32_MAX)
      return hcp__fail(err, HCP_INVALID, "counts[%d] is %lld, expected 0 to 2^31 - 1", i,
                       (long long)takers->counts[i]);
    if (takers->sources[i] == takers->rank) loaded += takers->counts[i];
  }
  for (int32_t m = 0; m < plan->micro_batch_count; m++) {
    const hcp_group *group = hcp__group_of(plan, m, takers->rank);
    for (int32_t s = 0; group != NULL && s < group->sequences; s++)
      computed += takers->counts[plan->sequences[group->first_sequence + s]];
  }
  if (loaded == takers->loaded_count && computed == takers->computed_count) return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "takers have %lld runs of loaded and %lld of computed sequences, expected %lld "
                   "and %lld",
                   (long long)takers->loaded_count, (long long)takers->computed_count,
                   (long long)loaded, (long long)computed);
}

static void fill_units(const hcp_plan *plan, const int64_t *units, const int64_t *unit_rows,
                       int64_t *first, int64_t *ends) {
  int64_t u = 0;
  first[0] = 0;
  for (int32_t i = 0; i < plan->n; i++) {
    first[i + 1] = first[i] + units[i];
    if (unit_rows == NULL) continue;
    int64_t rows = 0;
    for (; u < first[i + 1]; u++) {
      ends[u + i] = rows;
      rows += unit_rows[u];
    }
    ends[u + i] = rows;
  }
}

static hcp_status fill_takers(const hcp_plan *plan, const hcp_takers *given,
                              const hcp_payload *payload, hcp__takers *takers, hcp__run *at,
                              hcp_error *err) {
  const hcp_taker_run *next = given->loaded;
  hcp_status status = HCP_OK;
  for (int32_t i = 0; status == HCP_OK && i < plan->n; i++) {
    if (given->sources[i] != given->rank) continue;
    status = read_runs(next, given->counts[i], plan->lengths[i], hcp__payload_rows(payload, i), &at,
                       &takers[i], err);
    next += given->counts[i];
  }
  next = given->computed;
  for (int32_t m = 0; m < plan->micro_batch_count; m++) {
    const hcp_group *group = hcp__group_of(plan, m, given->rank);
    for (int32_t s = 0; status == HCP_OK && group != NULL && s < group->sequences; s++) {
      int32_t i = plan->sequences[group->first_sequence + s];
      status = read_runs(next, given->counts[i], plan->lengths[i], hcp__payload_rows(payload, i),
                         &at, &takers[i], err);
      next += given->counts[i];
    }
  }
  return status;
}

/* One allocation. A sequence may be loaded and computed: its runs are then read twice. */
static hcp_payload *allocate(size_t n, size_t units, int has_rows, const hcp_takers *takers) {
  size_t words = n + 1 + (has_rows ? units + n : 0), runs = 0;
  if (takers != NULL) runs = (size_t)takers->loaded_count + (size_t)takers->computed_count + 2 * n;
  hcp_payload *payload =
      calloc(1, sizeof *payload + words * sizeof(int64_t) + runs * sizeof(hcp__run) +
                    (takers != NULL ? n : 0) * sizeof(hcp__takers));
  if (payload == NULL) return NULL;
  int64_t *first = (int64_t *)(payload + 1);
  payload->first = first;
  if (has_rows) payload->ends = first + n + 1;
  if (takers != NULL) payload->takers = (hcp__takers *)(first + words);
  return payload;
}

hcp_status hcp_payload_create(const hcp_plan *plan, hcp_split split, const int64_t *units,
                              const int64_t *unit_rows, const hcp_takers *takers,
                              hcp_payload **payload, hcp_error *err) {
  int64_t count = 0;
  if (hcp_split_name(split) == NULL)
    return hcp__fail(err, HCP_INVALID, "split is %d, expected 0 to %d", (int)split,
                     HCP_SPLIT_COUNT - 1);
  if (split == HCP_SPLIT_TOKENS && takers == NULL)
    return hcp__fail(err, HCP_INVALID,
                     "takers is NULL, expected the tokens that take rows, under \"tokens\"");
  hcp_status status = check_units(plan, units, unit_rows, &count, err);
  if (status == HCP_OK && takers != NULL) status = check_takers(plan, takers, err);
  if (status != HCP_OK) return status;
  hcp_payload *made = allocate((size_t)plan->n, (size_t)count, unit_rows != NULL, takers);
  if (made == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a payload of %lld units",
                     (long long)count);
  made->split = split;
  fill_units(plan, units, unit_rows, (int64_t *)(uintptr_t)made->first,
             (int64_t *)(uintptr_t)made->ends);
  hcp__takers *of = (hcp__takers *)(uintptr_t)made->takers;
  if (takers != NULL) status = fill_takers(plan, takers, made, of, (hcp__run *)(of + plan->n), err);
  if (status == HCP_OK)
    *payload = made;
  else
    free(made);
  return status;
}

void hcp_payload_destroy(hcp_payload *payload) { free(payload); }

/* ---- who gets what ---- */

/* The first unit of a sequence whose middle lies at or after border `k` of the group's shares.
 * `before`: rows of the group's sequences before this one. */
static int64_t unit_after(const hcp_payload *payload, int32_t sequence, int64_t before,
                          int64_t total, int64_t k, int32_t degree) {
  int64_t low = 0, high = hcp__unit_count(payload, sequence);
  while (low < high) {
    int64_t unit = low + (high - low) / 2;
    int64_t twice = 2 * before + end_of(payload, sequence, unit);
    twice += end_of(payload, sequence, unit + 1);
    if (twice * degree >= 2 * total * k)
      high = unit;
    else
      low = unit + 1;
  }
  return low;
}

static void append_units(const hcp__share *of, int32_t s, int32_t sequence, int64_t first,
                         int64_t end, hcp__lists *lists, int32_t list) {
  if (!of->of_units) {
    first = end_of(of->payload, sequence, first);
    end = end_of(of->payload, sequence, end);
  }
  hcp__append(lists, list, (const int64_t[]){s, first, end - first});
}

static void append_even(const hcp__share *of, const hcp_group *group, int32_t place,
                        hcp__lists *lists, int32_t list) {
  const int32_t *sequences = of->plan->sequences + group->first_sequence;
  int64_t total = 0, before = 0;
  for (int32_t s = 0; s < group->sequences; s++)
    total += hcp__payload_rows(of->payload, sequences[s]);
  for (int32_t s = 0; s < group->sequences; s++) {
    int32_t sequence = sequences[s];
    int64_t first = unit_after(of->payload, sequence, before, total, place, group->degree);
    int64_t end =
        unit_after(of->payload, sequence, before, total, (int64_t)place + 1, group->degree);
    append_units(of, s, sequence, first, end, lists, list);
    before += hcp__payload_rows(of->payload, sequence);
  }
}

/* Under TOKENS, of the sequences whose takers are known. */
static void append_taken(const hcp__share *of, const hcp_group *group, int32_t place,
                         hcp__lists *lists, int32_t list) {
  for (int32_t s = 0; s < group->sequences; s++) {
    hcp__piece own[2];
    const hcp__piece *spans;
    const hcp__takers *takers =
        &of->payload->takers[of->plan->sequences[group->first_sequence + s]];
    int32_t n = takers->runs == NULL ? 0 : hcp__held(of->plan, group, s, place, own, &spans);
    for (int32_t p = 0; p < n; p++) {
      int64_t first = hcp__takers_before(takers, spans[p].start);
      int64_t end = hcp__takers_before(takers, spans[p].start + spans[p].rows);
      int64_t row = first_row(takers, first);
      hcp__append(lists, list, (const int64_t[]){s, row, first_row(takers, end) - row});
    }
  }
}

void hcp__append_pieces(const hcp__share *of, const hcp_group *group, int32_t place,
                        hcp__lists *lists, int32_t list) {
  hcp_split split = of->payload->split;
  if (split == HCP_SPLIT_FIRST && place > 0) return;
  if (split == HCP_SPLIT_EVEN) {
    append_even(of, group, place, lists, list);
  } else if (split == HCP_SPLIT_TOKENS) {
    append_taken(of, group, place, lists, list);
  } else {
    for (int32_t s = 0; s < group->sequences; s++) {
      int32_t sequence = of->plan->sequences[group->first_sequence + s];
      append_units(of, s, sequence, 0, hcp__unit_count(of->payload, sequence), lists, list);
    }
  }
}
