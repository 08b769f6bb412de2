/* table.c - sections of records, built one record at a time, that become one table. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

void hcp__lists_init(hcp__lists *lists, const int32_t *widths, int32_t n) {
  memset(lists, 0, sizeof *lists);
  lists->header_words = HCP_TABLE_HEADER;
  for (int32_t i = 0; i < n; i++) lists->list[i].width = widths[i];
}

void hcp__lists_release(hcp__lists *lists) {
  for (int32_t i = 0; i < HCP__LISTS_MAX; i++) free(lists->list[i].words);
}

static int grow(hcp__list *list) {
  int64_t capacity = list->capacity ? 2 * list->capacity : 16 * (int64_t)list->width;
  int64_t *words = realloc(list->words, (size_t)capacity * sizeof *words);
  if (words == NULL) return 0;
  list->words = words;
  list->capacity = capacity;
  return 1;
}

void hcp__append(hcp__lists *lists, int32_t section, const int64_t *record) {
  hcp__list *list = &lists->list[section];
  if (lists->failed || (list->count == list->capacity && !grow(list))) {
    lists->failed = 1;
    return;
  }
  memcpy(list->words + list->count, record, (size_t)list->width * sizeof *record);
  list->count += list->width;
}

void hcp__append_rows(hcp__lists *lists, int32_t section, int64_t row, int64_t rows) {
  hcp__list *list = &lists->list[section];
  if (rows == 0) return;
  if (list->count > 0) {
    int64_t *last = list->words + list->count - 2;
    int continues = row < 0 ? last[0] < 0 : last[0] >= 0 && last[0] + last[1] == row;
    if (continues) {
      last[1] += rows;
      return;
    }
  }
  hcp__append(lists, section, (const int64_t[]){row, rows});
}

void hcp__append_peers(hcp__lists *lists, int32_t section, const int64_t *starts, int32_t ranks) {
  for (int32_t peer = 0; peer < ranks; peer++)
    if (starts[peer + 1] > starts[peer])
      hcp__append(lists, section,
                  (const int64_t[]){peer, starts[peer], starts[peer + 1] - starts[peer]});
}

int64_t hcp__records(const hcp__lists *lists, int32_t section) {
  return lists->list[section].count / lists->list[section].width;
}

const int64_t *hcp__record(const hcp__lists *lists, int32_t section, int64_t i) {
  return lists->list[section].words + i * lists->list[section].width;
}

/* ---- order ---- */

static int compare(int64_t a, int64_t b) { return (a > b) - (a < b); }

static int by_word_0(const void *a, const void *b) {
  return compare(((const int64_t *)a)[0], ((const int64_t *)b)[0]);
}

static int by_word_1(const void *a, const void *b) {
  return compare(((const int64_t *)a)[1], ((const int64_t *)b)[1]);
}

static int by_row_and_part(const void *a, const void *b) {
  const int64_t *left = a, *right = b;
  int order = compare(left[0], right[0]);
  if (order == 0) order = compare(left[2], right[2]);
  return order ? order : compare(left[3], right[3]);
}

static void sort(hcp__list *list, int (*order)(const void *, const void *)) {
  size_t bytes = (size_t)list->width * sizeof *list->words;
  if (list->count > 0) qsort(list->words, (size_t)(list->count / list->width), bytes, order);
}

void hcp__sort_by(hcp__lists *lists, int32_t section, int32_t word) {
  sort(&lists->list[section], word == 0 ? by_word_0 : by_word_1);
}

/* ---- runs ---- */

/* Where any record begins or ends, ascending, each once. Returns NULL when out
 * of memory. */
static int64_t *cuts_of(const hcp__list *list, int64_t *n) {
  int64_t records = list->count / 4, kept = 0;
  int64_t *cuts = malloc((size_t)(2 * records + 1) * sizeof *cuts);
  if (cuts == NULL) return NULL;
  for (int64_t i = 0; i < records; i++) {
    cuts[2 * i] = list->words[4 * i];
    cuts[2 * i + 1] = list->words[4 * i] + list->words[4 * i + 1];
  }
  qsort(cuts, (size_t)(2 * records), sizeof *cuts, by_word_0);
  for (int64_t i = 0; i < 2 * records; i++)
    if (kept == 0 || cuts[kept - 1] != cuts[i]) cuts[kept++] = cuts[i];
  *n = kept;
  return cuts;
}

/* The first cut after row. There is one: every record ends at a cut. */
static int64_t cut_after(const int64_t *cuts, int64_t n, int64_t row) {
  int64_t low = 0, high = n - 1;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (cuts[middle] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

void hcp__align_runs(hcp__lists *lists, int32_t section) {
  hcp__list raw = lists->list[section];
  int64_t n = 0, *cuts = NULL;
  if (lists->failed || raw.count <= raw.width) return; /* one record is its own run */
  cuts = cuts_of(&raw, &n);
  if (cuts == NULL) {
    lists->failed = 1;
    return;
  }
  lists->list[section] = (hcp__list){.width = raw.width};
  for (const int64_t *record = raw.words; record < raw.words + raw.count; record += 4) {
    int64_t end = record[0] + record[1], row = record[0];
    for (int64_t c = cut_after(cuts, n, row); row < end; row = cuts[c++])
      hcp__append(lists, section,
                  (const int64_t[]){row, cuts[c] - row, record[2], record[3] + row - record[0]});
  }
  sort(&lists->list[section], by_row_and_part);
  free(cuts);
  free(raw.words);
}

void hcp__end_stage(hcp__lists *lists, int64_t sent, int64_t received, int64_t keys,
                    int64_t relayed) {
  hcp__append(
      lists, HCP_SCHEDULE_STAGES,
      (const int64_t[]){
          hcp__records(lists, HCP_SCHEDULE_PACK), hcp__records(lists, HCP_SCHEDULE_SENDS),
          hcp__records(lists, HCP_SCHEDULE_RECEIVES), hcp__records(lists, HCP_SCHEDULE_ARRANGE),
          hcp__records(lists, HCP_SCHEDULE_ENTRIES), hcp__records(lists, HCP_SCHEDULE_PULLS),
          hcp__records(lists, HCP_SCHEDULE_RELAY_PACK),
          hcp__records(lists, HCP_SCHEDULE_RELAY_SENDS),
          hcp__records(lists, HCP_SCHEDULE_RELAY_RECEIVES), sent, received, keys, relayed});
}

void hcp__append_callers(hcp__lists *lists, const hcp_plan *plan, const hcp_group *group) {
  for (int32_t j = 0; group->degree > 2 && j < group->degree; j++)
    if (hcp__rank_rows(plan, group, j) + hcp__padding(plan, group, j) > 0)
      hcp__append(lists, HCP_SCHEDULE_CALLERS, (const int64_t[]){group->first_rank + j});
}

void hcp_schedule_set_header(hcp_table *schedule, const hcp_schedule_header *header) {
  memcpy(schedule->words, header, sizeof *header);
}

/* ---- the table ---- */

hcp_table *hcp__table_allocate(int32_t header_words, int32_t n, const int64_t *records,
                               const int32_t *widths) {
  int64_t words = header_words + 2 * (int64_t)n, at = words;
  for (int32_t s = 0; s < n; s++) words += records[s] * widths[s];
  hcp_table *table = calloc(1, sizeof *table + (size_t)words * sizeof *table->words);
  if (table == NULL) return NULL;
  table->words = (int64_t *)(table + 1);
  table->word_count = words;
  table->header_words = header_words;
  int64_t *heads = table->words + header_words;
  for (int32_t s = 0; s < n; s++) {
    *heads++ = at;
    *heads++ = records[s];
    at += records[s] * widths[s];
  }
  return table;
}

hcp_status hcp__table_create(const hcp__lists *lists, int32_t n, hcp_table **table,
                             hcp_error *err) {
  int64_t counts[HCP__LISTS_MAX] = {0};
  int32_t widths[HCP__LISTS_MAX] = {0};
  for (int32_t s = 0; s < n; s++) {
    counts[s] = hcp__records(lists, s);
    widths[s] = lists->list[s].width;
  }
  hcp_table *made =
      lists->failed ? NULL : hcp__table_allocate(lists->header_words, n, counts, widths);
  if (made == NULL) return hcp__fail(err, HCP_NO_MEMORY, "out of memory for a table");
  const int64_t *heads = made->words + made->header_words;
  for (int32_t s = 0; s < n; s++) {
    const hcp__list *list = &lists->list[s];
    int64_t at = *heads;
    heads += 2;
    if (list->count > 0)
      memcpy(made->words + at, list->words, (size_t)list->count * sizeof *list->words);
  }
  *table = made;
  return HCP_OK;
}

void hcp_table_destroy(hcp_table *table) { free(table); }
