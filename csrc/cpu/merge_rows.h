/* merge_rows.h - the rows of one run, for one DTYPE: included once for each. */
#define TOTAL OF(total)

static WIDE OF(part_lse)(const merge *m, int64_t record, int64_t row, int64_t head) {
  const hcp_run *run = &m->records[record];
  const hcp_part *part = &m->parts[run->part];
  return ((const WIDE *)part->lse)[hcp_run_part_row(run, row) * part->lse_row_stride +
                                   head * part->lse_head_stride];
}

static const STORAGE *OF(part_out)(const merge *m, int64_t record, int64_t row, int64_t head) {
  const hcp_run *run = &m->records[record];
  const hcp_part *part = &m->parts[run->part];
  return (const STORAGE *)part->out + hcp_run_part_row(run, row) * part->out_row_stride +
         head * part->out_head_stride;
}

/* exp(lse - largest), where two equal infinities would give NaN: parts whose
 * lse is +inf share alike. */
static WIDE OF(share)(WIDE lse, WIDE largest) {
  return lse == largest ? 1 : OF(exp)(lse - largest);
}

/* What the parts of one row and head come to. */
typedef struct TOTAL {
  WIDE largest; /* lse; -inf: nothing takes part */
  WIDE shares;  /* summed */
} TOTAL;

static TOTAL OF(merge_total)(const merge *m, int64_t row, int64_t head) {
  TOTAL total = {-(WIDE)INFINITY, 0};
  for (int64_t r = 0; r < m->n_records; ++r) {
    WIDE lse = OF(part_lse)(m, r, row, head);
    if (!(lse <= total.largest)) total.largest = lse; /* takes NaN too */
    if (total.largest != total.largest) return (TOTAL){total.largest, total.largest};
  }
  if (total.largest == -(WIDE)INFINITY) return total;
  for (int64_t r = 0; r < m->n_records; ++r)
    total.shares += OF(share)(OF(part_lse)(m, r, row, head), total.largest);
  return total;
}

/* A part without a say is left out, not multiplied by zero: its output may hold
 * NaN. One whose weight rounds to zero is multiplied, so that its NaN counts, as
 * in a softmax over all keys. */
static bool OF(absent)(WIDE lse) { return lse == -(WIDE)INFINITY; }

static WIDE OF(weight)(TOTAL total, WIDE lse) {
  if (OF(absent)(lse)) return 0;
  return OF(share)(lse, total.largest) / total.shares;
}

static void OF(add_weighted)(WIDE *restrict sum, WIDE weight, const STORAGE *restrict values,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += weight * OF(load)(values[i]);
}

/* Elements [first, first + n) of one row and head. */
static void OF(merge_tile)(const merge *m, TOTAL total, int64_t row, int64_t head, int64_t first,
                           int64_t n, STORAGE *restrict out) {
  WIDE sum[TILE] = {0};
  for (int64_t r = 0; r < m->n_records; ++r) {
    WIDE lse = OF(part_lse)(m, r, row, head);
    if (OF(absent)(lse)) continue;
    OF(add_weighted)(sum, OF(weight)(total, lse), OF(part_out)(m, r, row, head) + first, n);
  }
  for (int64_t i = 0; i < n; ++i) out[i] = OF(store)(sum[i]);
}

static void OF(merge_row)(const merge *m, int64_t row, STORAGE *out, WIDE *lse) {
  for (int64_t head = 0; head < m->heads; ++head) {
    TOTAL total = OF(merge_total)(m, row, head);
    lse[head] = total.shares == 0 ? total.largest : total.largest + OF(log)(total.shares);
    for (int64_t first = 0; first < m->head_dim; first += TILE)
      OF(merge_tile)(m, total, row, head, first, tile_length(m->head_dim, first),
                     out + head * m->head_dim + first);
  }
}

static void OF(merge_run)(const merge *m, int64_t row, int64_t rows, void *out, void *lse) {
  for (int64_t i = row; i < row + rows; ++i)
    OF(merge_row)(m, i, (STORAGE *)out + i * m->heads * m->head_dim, (WIDE *)lse + i * m->heads);
}

#undef TOTAL
