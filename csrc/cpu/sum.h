/* sum.h - the rows of one run, each the sum of its records. */
#ifndef HCP_CPU_SUM_H
#define HCP_CPU_SUM_H

#include "rows.h"

/* What they need, whatever the dtype. */
typedef struct sum {
  const hcp_column *parts; /* of this column: the others stand n_columns apart */
  int32_t n_columns;
  const hcp_run *records; /* one run */
  int64_t n_records;
  int on; /* to what the result holds already; cast */
} sum;

static inline const hcp_column *sum_part(const sum *s, const hcp_run *record) {
  return &s->parts[record->part * s->n_columns];
}

/* The run's rows in out, of cast.to, from parts of cast.from. */
void hcp__cast_rows(hcp_cast cast, const sum *s, hcp_column out);

#endif
