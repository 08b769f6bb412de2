/* reduce_rows.h - the rows of one run, for one DTYPE: included once for each. */

/* Not added to zero: a sum of negative zeros stays one. */
static void OF(sum_begin)(WIDE *restrict total, const STORAGE *restrict row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] = OF(load)(row[i]);
}

static void OF(sum_add)(WIDE *restrict total, const STORAGE *restrict row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += OF(load)(row[i]);
}

static void OF(sum_end)(STORAGE *restrict out, const WIDE *restrict total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = OF(store)(total[i]);
}

static const STORAGE *OF(sum_row)(const sum *s, int64_t record, int64_t row) {
  const hcp_run *run = &s->records[record];
  return (const STORAGE *)(const void *)row_at(*sum_part(s, run), hcp_run_part_row(run, row));
}

static void OF(reduce_row)(const sum *s, int64_t row, STORAGE *out, int64_t width) {
  WIDE total[TILE];
  for (int64_t first = 0; first < width; first += TILE) {
    int64_t n = tile_length(width, first);
    OF(sum_begin)(total, OF(sum_row)(s, 0, row) + first, n);
    for (int64_t r = 1; r < s->n_records; ++r)
      OF(sum_add)(total, OF(sum_row)(s, r, row) + first, n);
    OF(sum_end)(out + first, total, n);
  }
}

static void OF(reduce_rows)(const sum *s, hcp_column out) {
  int64_t width = out.row_bytes / (int64_t)sizeof(STORAGE);
  int64_t begin = s->records->row, end = begin + s->records->rows;
  for (int64_t row = begin; row < end; ++row)
    OF(reduce_row)(s, row, (STORAGE *)(void *)row_at(out, row), width);
}
