/* table.c - sections of records, built one record at a time, that become one table. */
#include <stddef.h>
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

/* Fourfold: room that nobody writes to costs no memory, and a copy costs time. */
static int grow(hcp__list *list) {
  int64_t capacity = list->capacity ? 4 * list->capacity : 16 * (int64_t)list->width;
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

/* Where each of 256 values of a digit begins, among n records that have it in `word`. */
static void find_begins(const int64_t *words, int64_t n, int32_t width, int64_t least,
                        int32_t digit, int64_t begins[256]) {
  int64_t at = 0;
  memset(begins, 0, 256 * sizeof *begins);
  for (int64_t i = 0; i < n; i++) begins[(uint64_t)(words[i * width] - least) >> digit & 255]++;
  for (int32_t value = 0; value < 256; value++) {
    int64_t here = begins[value];
    begins[value] = at;
    at += here;
  }
}

/* Whether records ascend by their first words; else the least and the most of these. */
static int ascends(const int64_t *words, int64_t n, int32_t width, int64_t *least, int64_t *most) {
  int64_t descents = 0;
  *least = *most = words[0];
  for (int64_t i = 1; i < n; i++) {
    descents += words[i * width] < words[(i - 1) * width];
    *least = hcp__least(*least, words[i * width]);
    *most = hcp__most(*most, words[i * width]);
  }
  return descents == 0;
}

/* Sorts n records of so many words by one of them, digit by digit: equal ones keep their order.
 * `room` is for as many words. Returns where the records are: in `words` or in `room`. Is inlined
 * where the width is known, which makes it twice as fast. */
static inline int64_t *sort_records(int64_t *words, int64_t n, int32_t width, int32_t word,
                                    int64_t *room) {
  int64_t least, most, begins[256];
  if (n == 0 || ascends(words + word, n, width, &least, &most)) return words;
  uint64_t range = (uint64_t)(most - least);
  for (int32_t digit = 0; digit < 64 && range >> digit > 0; digit += 8) {
    find_begins(words + word, n, width, least, digit, begins);
    for (int64_t i = 0; i < n; i++) {
      const int64_t *record = words + i * width;
      int64_t to = begins[(uint64_t)(record[word] - least) >> digit & 255]++;
      memcpy(room + to * width, record, (size_t)width * sizeof *record);
    }
    int64_t *sorted = room;
    room = words;
    words = sorted;
  }
  return words;
}

void hcp__sort_by(hcp__lists *lists, int32_t section, int32_t word) {
  hcp__list *list = &lists->list[section];
  if (lists->failed || list->count == 0) return;
  int64_t *room = malloc((size_t)list->capacity * sizeof *room);
  if (room == NULL) {
    lists->failed = 1;
    return;
  }
  int64_t *sorted = sort_records(list->words, list->count / list->width, list->width, word, room);
  free(sorted == room ? list->words : room);
  list->words = sorted;
}

static int compare(int64_t a, int64_t b) { return (a > b) - (a < b); }

/* Of (row, rows, part, part_row) records. */
static int by_part(const void *a, const void *b) {
  const int64_t *left = a, *right = b;
  int order = compare(left[2], right[2]);
  return order ? order : compare(left[3], right[3]);
}

/* ---- runs ---- */

/* Where records begin and end, as (row, which record begins there; -1: one ends). An end is left
 * out where the next record begins. Returns their number. */
static int64_t find_edges(const hcp__list *raw, int64_t *edges) {
  int64_t n = 0, records = raw->count / 4;
  for (int64_t i = 0; i < records; i++) {
    const int64_t *x = raw->words + 4 * i;
    edges[n++] = x[0];
    edges[n++] = i;
    if (i + 1 < records && x[4] == x[0] + x[1]) continue;
    edges[n++] = x[0] + x[1];
    edges[n++] = -1;
  }
  return n / 2;
}

/* The rows of sorted edges, each once, and the cut at which each record begins. Returns how many
 * cuts there are. */
static int64_t find_cuts(const int64_t *edges, int64_t n, int64_t *cuts, int64_t *firsts) {
  int64_t found = 0;
  for (const int64_t *edge = edges; edge < edges + 2 * n; edge += 2) {
    if (found == 0 || cuts[found - 1] != edge[0]) cuts[found++] = edge[0];
    if (edge[1] >= 0) firsts[edge[1]] = found - 1;
  }
  return found;
}

/* Finds where the parts of the rows from each cut up to the next one begin among all parts. Returns
 * how many parts there are. */
static int64_t count_parts(const hcp__list *raw, const int64_t *cuts, int64_t n,
                           const int64_t *firsts, int64_t *begins) {
  int64_t parts = 0;
  memset(begins, 0, (size_t)n * sizeof *begins);
  for (const int64_t *x = raw->words; x < raw->words + raw->count; x += 4)
    for (int64_t c = *firsts++; cuts[c] < x[0] + x[1]; c++) begins[c]++;
  for (int64_t c = 0; c < n; c++) {
    int64_t here = begins[c];
    begins[c] = parts;
    parts += here;
  }
  return parts;
}

/* Lays out the parts of all records by their cut, those of one cut in the records' order. Then
 * begins[c] is where those of cut c end. */
static void lay_out_parts(const hcp__list *raw, const int64_t *cuts, const int64_t *firsts,
                          int64_t *begins, int64_t *parts) {
  for (const int64_t *x = raw->words; x < raw->words + raw->count; x += 4)
    for (int64_t c = *firsts++; cuts[c] < x[0] + x[1]; c++) {
      int64_t *part = parts + 4 * begins[c]++;
      part[0] = cuts[c];
      part[1] = cuts[c + 1] - cuts[c];
      part[2] = x[2];
      part[3] = x[3] + cuts[c] - x[0];
    }
}

/* Sorts n parts of the same rows. Most ascend already: records come stage after stage. */
static void sort_parts(int64_t *parts, int64_t n) {
  int64_t i = 1;
  while (i < n && by_part(parts + 4 * i - 4, parts + 4 * i) <= 0) i++;
  if (i < n) qsort(parts, (size_t)n, 4 * sizeof *parts, by_part);
}

/* Makes the runs of at least two records. `room` is for nine words of each. Returns whether there
 * was memory. */
static int align(const hcp__list *raw, int64_t *room, hcp__list *runs) {
  int64_t records = raw->count / 4, *edges = room, *firsts = room + 8 * records;
  int64_t edge_count = find_edges(raw, edges);
  int64_t *sorted = sort_records(edges, edge_count, 2, 0, edges + 4 * records);
  int64_t *cuts = sorted == edges ? edges + 4 * records : edges, *begins = cuts + 2 * records;
  int64_t n = find_cuts(sorted, edge_count, cuts, firsts);
  runs->count = runs->capacity = 4 * count_parts(raw, cuts, n, firsts, begins);
  runs->words = malloc((size_t)(runs->count + 1) * sizeof *runs->words);
  if (runs->words == NULL) return 0;
  lay_out_parts(raw, cuts, firsts, begins, runs->words);
  for (int64_t c = 0, first = 0; c < n; first = begins[c++])
    sort_parts(runs->words + 4 * first, begins[c] - first);
  return 1;
}

void hcp__align_runs(hcp__lists *lists, int32_t section) {
  hcp__list *list = &lists->list[section], runs = {.width = list->width};
  if (lists->failed || list->count <= list->width) return; /* one record is its own run */
  int64_t *room = malloc((size_t)(9 * list->count / 4) * sizeof *room);
  if (room != NULL && align(list, room, &runs)) {
    free(list->words);
    *list = runs;
  } else {
    lists->failed = 1;
  }
  free(room);
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

void hcp_schedule_set_header(hcp_table *schedule, const hcp_schedule_header *header) {
  memcpy(schedule->words, header, sizeof *header);
}

const int32_t hcp__schedule_widths[HCP_SCHEDULE_SECTION_COUNT] = {
#define WIDTH(name, width) width,
    HCP_SCHEDULE_SECTIONS(WIDTH)
#undef WIDTH
};

/* A limit past the end of every sequence is none. */
static int64_t limit_from(int64_t word) { return word >= HCP__LENGTH_MAX ? -1 : word; }

hcp_status hcp__no_schedule(int64_t word_count, const char *what, hcp_error *err) {
  return hcp__fail(err, HCP_INVALID, "words has %lld items that are no schedule: %s",
                   (long long)word_count, what);
}

/* Owners are (peer, rows): the rows of the fullest, or all but those of the emptiest. */
static int64_t staged_rows(const int64_t *words, const hcp_section *owners) {
  int64_t all = 0, most = 0, least = INT64_MAX;
  for (int64_t at = owners->first; at < owners->end; at += 2) {
    int64_t rows = words[at + 1];
    if (rows < 0 || rows > HCP__LENGTH_MAX || all > HCP__LENGTH_MAX) return HCP__LENGTH_MAX;
    all += rows;
    most = most > rows ? most : rows;
    least = least < rows ? least : rows;
  }
  return owners->records == 0 || most > all - least ? most : all - least;
}

hcp_status hcp_schedule_read(const int64_t *words, int64_t word_count, hcp_section *sections,
                             hcp_schedule_header *header, hcp_schedule_sizes *sizes,
                             hcp_error *err) {
  const size_t written = offsetof(hcp_schedule_sizes, query_rows);
  if (!hcp__find_sections(words, word_count, HCP_SCHEDULE_HEADER_WORDS, HCP_SCHEDULE_SECTION_COUNT,
                          hcp__schedule_widths, sections))
    return hcp__no_schedule(word_count, "a section lies outside", err);
  if (sections[HCP_SCHEDULE_SIZES].records < 1 || sections[HCP_SCHEDULE_STAGES].records < 1)
    return hcp__no_schedule(word_count, "it has no stage", err);
  memcpy(header, words, sizeof *header);
  memcpy(sizes, words + sections[HCP_SCHEDULE_SIZES].first, written);
  if (sizes->comm_type < 0 || sizes->comm_type >= HCP_COMM_TYPE_COUNT)
    return hcp__no_schedule(word_count, "it names no comm type", err);
  sizes->left = limit_from(sizes->left);
  sizes->right = limit_from(sizes->right);
  sizes->query_rows = words[sections[HCP_SCHEDULE_STAGES].first + HCP__STAGE_KEYS];
  sizes->staged_rows = staged_rows(words, &sections[HCP_SCHEDULE_KEY_OWNERS]);
  return HCP_OK;
}

/* ---- the table ---- */

int hcp__find_sections(const int64_t *words, int64_t word_count, int64_t header_words, int32_t n,
                       const int32_t *widths, hcp_section *sections) {
  int64_t first = header_words + 2 * (int64_t)n;
  if (word_count < first) return 0;
  for (int32_t s = 0; s < n; s++) {
    const int64_t *head = words + header_words + (int64_t)s * 2;
    int64_t start = head[0], records = head[1];
    if (start < first || start > word_count || records < 0) return 0;
    if (records > (word_count - start) / widths[s]) return 0;
    sections[s] = (hcp_section){start, start + records * widths[s], records};
  }
  return 1;
}

hcp_status hcp_table_read(const int64_t *words, int64_t word_count, int64_t header_words, int32_t n,
                          const int32_t *widths, hcp_section *sections, hcp_error *err) {
  if (hcp__find_sections(words, word_count, header_words, n, widths, sections)) return HCP_OK;
  return hcp__fail(err, HCP_INVALID, "words has %lld items that are no table of %d sections",
                   (long long)word_count, n);
}

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

/* ---- moves ---- */

enum { MOVE_PEER, MOVE_ROW, MOVE_ROWS, MOVE_WORDS };

/* Kept rows before each row, and before the end. */
static int64_t *count_kept(const uint8_t *kept, int64_t rows) {
  int64_t *before = malloc(((size_t)rows + 1) * sizeof *before);
  if (before == NULL) return NULL;
  before[0] = 0;
  for (int64_t i = 0; i < rows; i++) before[i + 1] = before[i] + (kept[i] != 0);
  return before;
}

hcp_status hcp_moves_keep(const hcp_moves *moves, const uint8_t *kept, int64_t rows, int64_t *made,
                          int64_t *made_count, hcp_error *err) {
  for (const int64_t *move = moves->moves; move < moves->moves + MOVE_WORDS * moves->count;
       move += MOVE_WORDS)
    if (move[MOVE_ROW] < 0 || move[MOVE_ROWS] < 0 || move[MOVE_ROW] > rows ||
        move[MOVE_ROWS] > rows - move[MOVE_ROW])
      return hcp__fail(err, HCP_INVALID, "a move has %lld rows from row %lld on, expected <= %lld",
                       (long long)move[MOVE_ROWS], (long long)move[MOVE_ROW], (long long)rows);
  int64_t *before = count_kept(kept, rows), n = 0;
  if (before == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %lld rows", (long long)rows);
  for (int64_t i = 0; i < moves->count; i++) {
    const int64_t *move = moves->moves + MOVE_WORDS * i;
    int64_t row = before[move[MOVE_ROW]], end = before[move[MOVE_ROW] + move[MOVE_ROWS]];
    if (end == row) continue;
    memcpy(made + MOVE_WORDS * n++, (const int64_t[]){move[MOVE_PEER], row, end - row},
           MOVE_WORDS * sizeof *made);
  }
  free(before);
  *made_count = n;
  return HCP_OK;
}
