/* reduce.c - partial rows summed, each read once, rounded once. */
#include "dtype.h"
#include "hcp/index.h"
#include "rows.h"

/* What the rows of one run need, whatever the dtype. */
typedef struct sum {
  const hcp_column *parts; /* of this column: the others stand n_columns apart */
  int32_t n_columns;
  const hcp_run *records; /* one run */
  int64_t n_records;
} sum;

static const hcp_column *sum_part(const sum *s, const hcp_run *record) {
  return &s->parts[record->part * s->n_columns];
}

#define DTYPE float64
#include "reduce_rows.h"
#undef DTYPE
#define DTYPE float32
#include "reduce_rows.h"
#undef DTYPE
#define DTYPE bfloat16
#include "reduce_rows.h"
#undef DTYPE
#define DTYPE float16
#include "reduce_rows.h"
#undef DTYPE

static void reduce_rows(hcp_dtype dtype, const sum *s, hcp_column out) {
  DISPATCH(dtype, reduce_rows, s, out)
}

static void reduce_run(hcp_dtype dtype, const sum *s, hcp_column out) {
  const hcp_run *record = s->records;
  if (s->n_records == 1)
    copy_rows(out, record->row, *sum_part(s, record), record->part_row, record->rows);
  else
    reduce_rows(dtype, s, out);
}

static void reduce_column(hcp_dtype dtype, const hcp_column *parts, int32_t n_columns,
                          const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out) {
  int64_t row = 0;
  for (int64_t first = 0, end; first < n_runs; first = end) {
    end = hcp_run_end(runs, n_runs, first);
    clear_rows(out, row, runs[first].row - row);
    reduce_run(dtype, &(sum){parts, n_columns, &runs[first], end - first}, out);
    row = runs[first].row + runs[first].rows;
  }
  clear_rows(out, row, rows - row);
}

void hcp_cpu_reduce(hcp_dtype dtype, const hcp_column *parts, int32_t n_columns,
                    const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out) {
  int64_t offset_bytes = 0;
  for (int32_t c = 0; c < n_columns; ++c) {
    int64_t row_bytes = parts[c].row_bytes;
    if (row_bytes == 0) continue;
    reduce_column(dtype, &parts[c], n_columns, runs, n_runs, rows,
                  column_slice(out, offset_bytes, row_bytes));
    offset_bytes += row_bytes;
  }
}
