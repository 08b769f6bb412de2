/* merge_rows.h - the rows of one run, for one DTYPE: included once for each. */
#define TOTAL OF(total)
#include "hcp/merging.h"

static WIDE OF(part_lse)(const merge *m, int64_t record, int64_t row, int64_t head) {
  const hcp_run *run = &m->records[record];
  const hcp_part *part = &m->of->parts[run->part];
  return ((const WIDE *)part->lse)[hcp_run_part_row(run, row) * part->lse_row_stride +
                                   head * part->lse_head_stride];
}

static const STORAGE *OF(part_out)(const merge *m, int64_t record, int64_t row, int64_t head) {
  const hcp_run *run = &m->records[record];
  const hcp_part *part = &m->of->parts[run->part];
  return (const STORAGE *)part->out + hcp_run_part_row(run, row) * part->out_row_stride +
         head * part->out_head_stride;
}

/* What the parts of one row and head come to. */
typedef struct TOTAL {
  WIDE largest; /* lse; -inf: nothing takes part, NaN: some part has it */
  WIDE shares;  /* summed */
} TOTAL;

static WIDE OF(earlier_lse)(const merge *m, int64_t row, int64_t head) {
  return m->of->total_lse == NULL ? -(WIDE)INFINITY
                                  : ((const WIDE *)m->of->total_lse)[row * m->of->heads + head];
}

static TOTAL OF(merge_total)(const merge *m, int64_t row, int64_t head) {
  WIDE earlier = OF(earlier_lse)(m, row, head);
  TOTAL total = {earlier, 0};
  for (int64_t r = 0; r < m->n_records; ++r)
    total.largest = OF(larger)(total.largest, OF(part_lse)(m, r, row, head));
  if (OF(is_nan)(total.largest)) return (TOTAL){total.largest, total.largest};
  if (OF(absent)(total.largest)) return total;
  if (m->of->total_lse != NULL) total.shares = OF(share)(earlier, total.largest);
  for (int64_t r = 0; r < m->n_records; ++r)
    total.shares += OF(share)(OF(part_lse)(m, r, row, head), total.largest);
  return total;
}

static WIDE OF(weight)(TOTAL total, WIDE lse) {
  if (OF(absent)(lse)) return 0;
  return OF(share)(lse, total.largest) / total.shares;
}

static void OF(add_weighted)(WIDE *restrict sum, WIDE weight, const STORAGE *restrict values,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += weight * OF(load)(values[i]);
}

static void OF(add_earlier)(WIDE *restrict sum, WIDE weight, const WIDE *restrict values,
                            int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += weight * values[i];
}

/* Elements [first, first + n) of one row and head. */
static void OF(merge_tile)(const merge *m, TOTAL total, int64_t row, int64_t head, int64_t first,
                           int64_t n, WIDE *restrict sum) {
  WIDE earlier = OF(earlier_lse)(m, row, head);
  for (int64_t i = 0; i < n; ++i) sum[i] = 0;
  if (!OF(absent)(earlier))
    OF(add_earlier)(
        sum, OF(weight)(total, earlier),
        (const WIDE *)m->of->total + (row * m->of->heads + head) * m->of->head_dim + first, n);
  for (int64_t r = 0; r < m->n_records; ++r) {
    WIDE lse = OF(part_lse)(m, r, row, head);
    if (OF(absent)(lse)) continue;
    OF(add_weighted)(sum, OF(weight)(total, lse), OF(part_out)(m, r, row, head) + first, n);
  }
}

static void OF(round_tile)(STORAGE *restrict out, const WIDE *restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = OF(store)(sum[i]);
}

/* Elements of a row from number `first` on, of the dtype or wide. */
static void OF(merge_store)(const merge *m, void *out, int64_t first, const WIDE *sum, int64_t n) {
  if (m->stays_wide)
    memcpy((WIDE *)out + first, sum, (size_t)n * sizeof(WIDE));
  else
    OF(round_tile)((STORAGE *)out + first, sum, n);
}

static void OF(merge_row)(const merge *m, int64_t row, void *out, WIDE *lse) {
  WIDE sum[TILE];
  for (int64_t head = 0; head < m->of->heads; ++head) {
    TOTAL total = OF(merge_total)(m, row, head);
    lse[head] = OF(merged_lse)(total.largest, total.shares);
    for (int64_t first = 0; first < m->of->head_dim; first += TILE) {
      int64_t n = tile_length(m->of->head_dim, first);
      OF(merge_tile)(m, total, row, head, first, n, sum);
      OF(merge_store)(m, out, (row * m->of->heads + head) * m->of->head_dim + first, sum, n);
    }
  }
}

static void OF(merge_run)(const merge *m, int64_t row, int64_t rows, void *out, void *lse) {
  if (m->n_records == 0 && m->stays_wide && m->of->total_lse != NULL) { /* they stay as they are */
    int64_t first = row * m->of->heads;
    memcpy((WIDE *)lse + first, (const WIDE *)m->of->total_lse + first,
           (size_t)(rows * m->of->heads) * sizeof(WIDE));
    return;
  }
  for (int64_t i = row; i < row + rows; ++i)
    OF(merge_row)(m, i, out, (WIDE *)lse + i * m->of->heads);
}

#undef TOTAL
