/* payload.h - what the files of payloads share. payload.c has the value and who gets what of it,
 * payload_route.c the tables. */
#ifndef HCP_CORE_PAYLOAD_H
#define HCP_CORE_PAYLOAD_H

#include "internal.h"

/* What a run of tokens begins with: a token, the number of takers before it, and their rows. A row
 * counts as often as tokens take it. */
enum { HCP__TOKEN, HCP__TAKER, HCP__ROW, HCP__MARK_COUNT };

typedef struct hcp__run {
  int64_t begins[HCP__MARK_COUNT];
  int64_t tokens, each; /* each: rows of a token, >= 1 */
} hcp__run;

/* The tokens of a sequence that take rows. */
typedef struct hcp__takers {
  const hcp__run *runs; /* count + 1, the last of no tokens; NULL: not known here */
  int64_t count;
  int64_t tokens_of_row;
} hcp__takers;

struct hcp_payload {
  hcp_split split;
  const int64_t *first; /* n + 1: units before those of each sequence */
  const int64_t *ends; /* rows before each unit of a sequence, then all; NULL: one each */
  const hcp__takers *takers; /* n, NULL: no tokens take rows */
};

int64_t hcp__unit_count(const hcp_payload *payload, int32_t sequence);
int64_t hcp__payload_rows(const hcp_payload *payload, int32_t sequence);
int64_t hcp__unit_rows(const hcp_payload *payload, int32_t sequence, int64_t unit);
/* The first unit that has no row before this one. */
int64_t hcp__unit_at(const hcp_payload *payload, int32_t sequence, int64_t row);

/* Tokens that take rows before a token; and that take rows before a row, HCP_INVALID where one
 * takes rows on both sides. */
int64_t hcp__takers_before(const hcp__takers *takers, int64_t token);
hcp_status hcp__takers_before_row(const hcp__takers *takers, int64_t row, int64_t *before,
                                  hcp_error *err);

/* A split of a payload's rows, or of one row per unit. */
typedef struct hcp__share {
  const hcp_plan *plan;
  const hcp_payload *payload;
  int32_t of_units;
} hcp__share;

/* Appends what a place of a group has, in order: (index of the sequence in the group, row, rows).
 * Rows may be 0. */
void hcp__append_pieces(const hcp__share *of, const hcp_group *group, int32_t place,
                        hcp__lists *lists, int32_t list);

#endif
