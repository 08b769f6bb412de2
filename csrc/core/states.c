/* states.c - states passed from rank to rank along documents, for recurrent layers.
 *
 * The order of a span is its number in its document, over all ranks; the place of a rank is
 * its number in the group. A rank's padding is a document of its own, which nothing enters. */
#include <stdlib.h>

#include "internal.h"

/* Scratch lists after the sections: spans that others want of this rank, and that this rank
 * wants, as (key, place in the output). A key orders spans by holder, then by number. */
enum { GIVEN = HCP_STATES_SECTION_COUNT, TAKEN, LIST_COUNT };
_Static_assert(LIST_COUNT <= HCP__LISTS_MAX, "a table has room for every list");

static const int32_t widths[LIST_COUNT] = {
#define WIDTH(name, width) width,
    HCP_STATES_SECTIONS(WIDTH)
#undef WIDTH
        2,
    2};

/* A span, and who holds it. */
typedef struct held {
  int64_t start;
  int32_t place, span; /* span: its number on that rank */
} held;

/* Own spans: where they stand in documents. */
typedef struct standing {
  int64_t document, order;
} standing;

/* All spans of a group, by document and order. */
typedef struct group_spans {
  const hcp_group *group;
  int32_t place, own_count; /* of this rank, padding not counted */
  int64_t documents;
  int64_t *first;  /* documents + 1 */
  held *held;      /* first[documents] */
  int64_t *counts; /* degree, 2 for each: scratch */
  standing *own;   /* own_count */
} group_spans;

/* ---- spans by document ---- */

static int by_start(const void *a, const void *b) {
  int64_t left = ((const held *)a)->start, right = ((const held *)b)->start;
  return (left > right) - (left < right);
}

static void count_spans(const hcp_plan *plan, const hcp_group *group, int64_t *spans,
                        int64_t *documents) {
  *spans = *documents = 0;
  for (int32_t s = 0; s < group->sequences; s++) {
    hcp__piece own[2];
    const hcp__piece *pieces;
    *documents += hcp__document_count(plan, plan->sequences[group->first_sequence + s]);
    for (int32_t j = 0; j < group->degree; j++)
      *spans += hcp__held(plan, group, s, j, own, &pieces);
  }
}

/* Appends the spans of a sequence in the order of tokens. Returns how many. */
static int64_t hold_sequence(const hcp_plan *plan, group_spans *all, int32_t s, held *out) {
  int64_t n = 0;
  for (int32_t j = 0; j < all->group->degree; j++) {
    hcp__piece own[2];
    const hcp__piece *pieces;
    int32_t count = hcp__held(plan, all->group, s, j, own, &pieces);
    for (int32_t p = 0; p < count; p++)
      out[n++] = (held){pieces[p].start, j, (int32_t)all->counts[j]++};
  }
  qsort(out, (size_t)n, sizeof *out, by_start);
  return n;
}

static void find_spans(const hcp_plan *plan, group_spans *all) {
  int64_t at = 0;
  for (int32_t j = 0; j < all->group->degree; j++) all->counts[j] = 0;
  for (int32_t s = 0; s < all->group->sequences; s++) {
    int32_t sequence = plan->sequences[all->group->first_sequence + s];
    int64_t end = at + hold_sequence(plan, all, s, all->held + at);
    for (int64_t d = 0; d < hcp__document_count(plan, sequence); d++) {
      hcp__piece document = hcp__document(plan, sequence, d);
      all->first[all->documents++] = at;
      while (at < end && all->held[at].start < document.start + document.rows) at++;
    }
  }
  all->first[all->documents] = at;
  all->own_count = (int32_t)all->counts[all->place];
}

static void find_own(group_spans *all) {
  for (int64_t d = 0; d < all->documents; d++)
    for (int64_t i = all->first[d]; i < all->first[d + 1]; i++)
      if (all->held[i].place == all->place)
        all->own[all->held[i].span] = (standing){d, i - all->first[d]};
}

static hcp_status spans_create(const hcp_plan *plan, const hcp_group *group, int32_t rank,
                               group_spans *all, hcp_error *err) {
  int64_t spans, documents;
  count_spans(plan, group, &spans, &documents);
  *all = (group_spans){.group = group, .place = rank - group->first_rank};
  size_t counts = 2 * (size_t)group->degree;
  all->held = calloc(1, (size_t)spans * (sizeof *all->held + sizeof *all->own) +
                            ((size_t)documents + 1 + counts) * sizeof(int64_t));
  if (all->held == NULL)
    return hcp__fail(err, HCP_NO_MEMORY, "out of memory for %lld spans", (long long)spans);
  all->own = (standing *)(all->held + spans);
  all->first = (int64_t *)(all->own + spans);
  all->counts = all->first + documents + 1;
  find_spans(plan, all);
  find_own(all);
  return HCP_OK;
}

static int64_t spans_of(const group_spans *all, int64_t document) {
  return all->first[document + 1] - all->first[document];
}

/* ---- what travels ---- */

static int64_t longest(const group_spans *all) {
  int64_t most = 0;
  for (int64_t d = 0; d < all->documents; d++) most = hcp__most(most, spans_of(all, d) - 1);
  return most;
}

/* How far back a round looks: in the first, a span gets the map of the one before. */
static int64_t stride_of(int32_t round) { return round < 2 ? 1 : (int64_t)1 << (round - 1); }

static int32_t rounds_for(int64_t most) {
  int32_t rounds = 1;
  while (stride_of(rounds) < most) rounds++;
  return rounds;
}

/* The first order that wants a map in a round. A document's first span has none of spans before
 * it: from the second round on, nobody wants it. */
static int64_t least_order(int32_t round) { return stride_of(round) + (round == 0 ? 0 : 1); }

static int64_t most_of(const int64_t *counts, int32_t n) {
  int64_t most = 0;
  for (int32_t j = 0; j < n; j++) most = hcp__most(most, counts[j]);
  return most;
}

/* Rows that the busiest rank gets from others when each gets the maps of all spans before its
 * last ones: of a document, as many as the order of its last span, but for its own. */
static int64_t rows_gathered(group_spans *all) {
  int64_t *rows = all->counts, *seen = rows + all->group->degree;
  for (int32_t j = 0; j < all->group->degree; j++) rows[j] = 0, seen[j] = -1;
  for (int64_t d = 0; d < all->documents; d++)
    for (int64_t i = all->first[d + 1] - 1; i >= all->first[d]; i--) {
      int32_t j = all->held[i].place;
      rows[j] += seen[j] == d ? -1 : i - all->first[d];
      seen[j] = d;
    }
  return most_of(rows, all->group->degree);
}

static int64_t rows_by_rounds(group_spans *all, int32_t rounds) {
  int64_t *rows = all->counts;
  for (int32_t j = 0; j < all->group->degree; j++) rows[j] = 0;
  for (int32_t r = 0; r < rounds; r++)
    for (int64_t d = 0; d < all->documents; d++)
      for (int64_t i = all->first[d] + least_order(r); i < all->first[d + 1]; i++)
        rows[all->held[i].place] += all->held[i].place != all->held[i - stride_of(r)].place;
  return most_of(rows, all->group->degree);
}

hcp_status hcp_states_measure(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                              hcp_states_rows *rows, hcp_error *err) {
  group_spans all;
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  *rows = (hcp_states_rows){0, 0, 1};
  if (group == NULL) return HCP_OK;
  status = spans_create(plan, group, rank, &all, err);
  if (status != HCP_OK) return status;
  rows->rounds = rounds_for(longest(&all));
  rows->gathered = rows_gathered(&all);
  rows->by_rounds = rows_by_rounds(&all, rows->rounds);
  free(all.held);
  return HCP_OK;
}

/* ---- one path ---- */

static int64_t key_of(int32_t place, int32_t span) { return (int64_t)place << 32 | span; }

static void append_key(hcp__lists *lists, int32_t list, int32_t place, int32_t span) {
  hcp__append(lists, list, (const int64_t[]){key_of(place, span), hcp__records(lists, list)});
}

static void append_moves(hcp__lists *lists, int32_t section, int32_t list, int32_t first_rank) {
  int64_t n = hcp__records(lists, list), begin = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t peer = hcp__record(lists, list, i)[0] >> 32;
    if (i + 1 < n && hcp__record(lists, list, i + 1)[0] >> 32 == peer) continue;
    hcp__append(lists, section, (const int64_t[]){first_rank + peer, begin, i + 1 - begin});
    begin = i + 1;
  }
}

/* Joined to the last record when it continues that one, which no path shares with another. */
static void append_row(hcp__lists *lists, int32_t section, int32_t first_of_path, int64_t row) {
  if (first_of_path)
    hcp__append(lists, section, (const int64_t[]){row, 1});
  else
    hcp__append_rows(lists, section, row, 1);
}

/* Gives the received rows, which come by holder, the order of the output. */
static void append_arrange(hcp__lists *lists) {
  hcp__list *taken = &lists->list[TAKEN];
  for (int64_t i = 0; i < hcp__records(lists, TAKEN); i++) taken->words[i * taken->width] = i;
  hcp__sort_by(lists, TAKEN, 1);
  for (int64_t i = 0; i < hcp__records(lists, TAKEN); i++)
    append_row(lists, HCP_STATES_ARRANGE, i == 0, hcp__record(lists, TAKEN, i)[0]);
}

/* Makes a path of what the scratch lists hold, and empties them. */
static void end_path(const group_spans *all, hcp__lists *lists) {
  int64_t given = hcp__records(lists, GIVEN), taken = hcp__records(lists, TAKEN);
  hcp__sort_by(lists, GIVEN, 0);
  hcp__sort_by(lists, TAKEN, 0);
  for (int64_t i = 0; i < given; i++)
    append_row(lists, HCP_STATES_PACK, i == 0, hcp__record(lists, GIVEN, i)[0] & INT32_MAX);
  append_moves(lists, HCP_STATES_SENDS, GIVEN, all->group->first_rank);
  append_moves(lists, HCP_STATES_RECEIVES, TAKEN, all->group->first_rank);
  append_arrange(lists);
  hcp__append(
      lists, HCP_STATES_PATHS,
      (const int64_t[]){hcp__records(lists, HCP_STATES_PACK), hcp__records(lists, HCP_STATES_SENDS),
                        hcp__records(lists, HCP_STATES_RECEIVES),
                        hcp__records(lists, HCP_STATES_ARRANGE), given, taken});
  lists->list[GIVEN].count = lists->list[TAKEN].count = 0;
}

/* ---- rounds ---- */

static void append_round(const group_spans *all, int32_t round, hcp__lists *lists) {
  int64_t stride = stride_of(round), least = least_order(round);
  for (int32_t s = 0; s < all->own_count; s++) {
    standing at = all->own[s];
    const held *document = all->held + all->first[at.document];
    int64_t later = at.order + stride;
    if (later >= least && later < spans_of(all, at.document))
      append_key(lists, GIVEN, document[later].place, s);
    if (at.order < least) continue;
    const held *wanted = &document[at.order - stride];
    append_key(lists, TAKEN, wanted->place, wanted->span);
    hcp__append(lists, HCP_STATES_WANTING, (const int64_t[]){s});
  }
  end_path(all, lists);
}

/* ---- gathering ---- */

/* Every rank of which a later span of the document wants the own one, once. */
static void give_to_later(const group_spans *all, int32_t span, hcp__lists *lists) {
  standing at = all->own[span];
  const held *document = all->held + all->first[at.document];
  for (int64_t o = at.order + 1; o < spans_of(all, at.document); o++) {
    if (all->counts[document[o].place] == span) continue;
    all->counts[document[o].place] = span;
    append_key(lists, GIVEN, document[o].place, span);
  }
}

/* A document of own spans, while levels are made. */
typedef struct reach {
  int64_t document, last; /* last: the order of the last own span */
  int64_t number;         /* of its newest state, among those of all levels */
  int32_t next;           /* the first own span that no state has entered */
} reach;

/* Documents ascend over own spans. Returns how many there are. */
static int64_t find_reaches(const group_spans *all, int64_t padded, reach *reaches) {
  int64_t n = 0;
  for (int32_t s = 0; s < all->own_count; s++) {
    standing at = all->own[s];
    if (n == 0 || reaches[n - 1].document != at.document) {
      reaches[n] = (reach){.document = at.document, .number = padded + n, .next = s};
      n++;
    }
    reaches[n - 1].last = at.order;
  }
  return n;
}

static void enter(const group_spans *all, reach *of, int64_t order, int64_t *entering) {
  if (of->next < all->own_count && all->own[of->next].document == of->document &&
      all->own[of->next].order == order)
    entering[of->next++] = of->number;
}

/* A level is the states that enter the spans of one order, of the documents that reach so far.
 * It follows from the level before: KEPT says which of those states it takes. */
static void append_levels(const group_spans *all, reach *reaches, int64_t n, int64_t padded,
                          int64_t *entering, hcp__lists *lists) {
  int64_t before = 0, end = padded + n, kept = n;
  for (int64_t i = 0; i < n; i++) enter(all, &reaches[i], 0, entering);
  for (int64_t order = 0; kept > 0; order++) {
    kept = 0;
    for (int64_t i = 0; i < n; i++) {
      if (reaches[i].last <= order) continue;
      const held *wanted = &all->held[all->first[reaches[i].document] + order];
      append_key(lists, TAKEN, wanted->place, wanted->span);
      hcp__append(lists, HCP_STATES_KEPT, (const int64_t[]){reaches[i].number - before});
      reaches[i].number = end + kept++;
      enter(all, &reaches[i], order + 1, entering);
    }
    if (kept > 0) hcp__append(lists, HCP_STATES_LEVELS, (const int64_t[]){kept});
    before = end;
    end += kept;
  }
}

static int append_gathering(const group_spans *all, int64_t padded, hcp__lists *lists) {
  size_t spans = (size_t)all->own_count + 1;
  reach *reaches = calloc(spans, sizeof *reaches + sizeof(int64_t));
  if (reaches == NULL) return 0;
  int64_t *entering = (int64_t *)(reaches + spans), n = find_reaches(all, padded, reaches);
  for (int32_t j = 0; j < all->group->degree; j++) all->counts[j] = -1;
  for (int32_t s = 0; s < all->own_count; s++) give_to_later(all, s, lists);
  append_levels(all, reaches, n, padded, entering, lists);
  entering[all->own_count] = 0; /* the padding's document is the first one */
  for (int64_t i = 0; i < all->own_count + padded; i++)
    hcp__append(lists, HCP_STATES_ENTERING, &entering[i]);
  hcp__append(lists, HCP_STATES_SIZES, (const int64_t[]){padded + n});
  free(reaches);
  end_path(all, lists);
  return 1;
}

/* ---- the table ---- */

static hcp_status build_states(const hcp_plan *plan, int32_t rank, group_spans *all,
                               int32_t by_rounds, hcp_table **states, hcp_error *err) {
  hcp__lists lists;
  hcp__lists_init(&lists, widths, LIST_COUNT);
  int64_t padded = hcp__padding(plan, all->group, rank - all->group->first_rank) > 0;
  if (!by_rounds && !append_gathering(all, padded, &lists)) lists.failed = 1;
  int32_t rounds = by_rounds ? rounds_for(longest(all)) : 0;
  for (int32_t round = 0; round < rounds; round++) append_round(all, round, &lists);
  hcp_status status = hcp__table_create(&lists, HCP_STATES_SECTION_COUNT, states, err);
  hcp__lists_release(&lists);
  return status;
}

hcp_status hcp_states_create(const hcp_plan *plan, int32_t micro_batch, int32_t rank,
                             int32_t by_rounds, hcp_table **states, hcp_error *err) {
  group_spans all;
  hcp_status status = hcp__check_place(plan, micro_batch, rank, err);
  if (status == HCP_OK) status = hcp_plan_expect_no_branches(plan, "hcp_states_create", err);
  if (status != HCP_OK) return status;
  const hcp_group *group = hcp__group_of(plan, micro_batch, rank);
  if (group == NULL)
    return hcp__fail(err, HCP_INVALID,
                     "rank is %d, which has no rows in micro-batch %d, expected one of a group",
                     rank, micro_batch);
  status = spans_create(plan, group, rank, &all, err);
  if (status != HCP_OK) return status;
  status = build_states(plan, rank, &all, by_rounds, states, err);
  free(all.held);
  return status;
}
