/* reduce.c - partial rows summed, each read once, turned on the way, rounded once. */
#include "dtype.h"
#include "hcp/index.h"
#include "sum.h"

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

static void turn_rows(hcp_dtype dtype, const sum *s, const hcp_rotation *r, int64_t head_stride,
                      int64_t begin, int64_t end, hcp_column out) {
  DISPATCH(dtype, turn_rows, s, r, head_stride, begin, end, out)
}

/* rotation is NULL where nothing turns; what turns is not cast. */
static void reduce_run(hcp_cast cast, const sum *s, const hcp_rotation *rotation, hcp_column out) {
  const hcp_run *record = s->records;
  hcp_dtype dtype = cast.from;
  if (cast.to != dtype)
    hcp__cast_rows(cast, s, out);
  else if (rotation != NULL)
    turn_rows(dtype, s, rotation, rotation->head_dim, record->row, record->row + record->rows, out);
  else if (s->n_records == 1)
    copy_rows(out, record->row, *sum_part(s, record), record->part_row, record->rows);
  else
    reduce_rows(dtype, s, out);
}

/* Column c. keeps: rows that no run names keep what they hold; else they become zeros. */
static void reduce_column(const hcp_sum *of, hcp_cast cast, int32_t c, const hcp_rotation *rotation,
                          int keeps, hcp_column out) {
  const hcp_run *runs = of->runs;
  int64_t row = 0;
  for (int64_t first = 0, end; first < of->n_runs; first = end) {
    end = hcp_run_end(runs, of->n_runs, first);
    if (!keeps) clear_rows(out, row, runs[first].row - row);
    reduce_run(cast, &(sum){&of->parts[c], of->n_columns, &runs[first], end - first, 0}, rotation,
               out);
    row = runs[first].row + runs[first].rows;
  }
  if (!keeps) clear_rows(out, row, of->rows - row);
}

static void reduce_columns(const hcp_sum *of, hcp_cast cast, const hcp_rotation *rotation,
                           int32_t rotated, int keeps, hcp_column out) {
  int64_t offset_bytes = 0;
  for (int32_t c = 0; c < of->n_columns; ++c) {
    int64_t row_bytes = hcp_cast_bytes(cast, of->parts[c].row_bytes);
    if (row_bytes == 0) continue;
    reduce_column(of, cast, c, c < rotated ? rotation : NULL, keeps,
                  column_slice(out, offset_bytes, row_bytes));
    offset_bytes += row_bytes;
  }
}

void hcp_cpu_reduce_rotated(const hcp_sum *of, const hcp_rotation *rotation, int32_t rotated,
                            hcp_column out) {
  reduce_columns(of, (hcp_cast){of->dtype, of->dtype}, rotation, rotated, 0, out);
}

void hcp_cpu_reduce(const hcp_sum *of, const hcp_cast *cast, hcp_column out) {
  hcp_cast none = {of->dtype, of->dtype};
  reduce_columns(of, cast != NULL ? *cast : none, NULL, 0, 0, out);
}

void hcp_cpu_place(const hcp_sum *of, hcp_column out) {
  reduce_columns(of, (hcp_cast){of->dtype, of->dtype}, NULL, 0, 1, out);
}

void hcp_cpu_reduce_on(const hcp_sum *of, hcp_column total) {
  hcp_cast wide = {of->dtype, of->dtype == HCP_FLOAT64 ? HCP_FLOAT64 : HCP_FLOAT32};
  for (int64_t first = 0, end; first < of->n_runs; first = end) {
    end = hcp_run_end(of->runs, of->n_runs, first);
    hcp__cast_rows(wide, &(sum){of->parts, 1, &of->runs[first], end - first, 1}, total);
  }
}

/* Rows that are turned before they are copied: few enough to be in the cache still,
 * enough that no copy waits for the stores of the row before it. */
enum { ROWS_AT_ONCE = 16 };

static void copy_turned(const hcp_run *records, int64_t n, int64_t row, int64_t rows,
                        hcp_column out, hcp_column wire) {
  for (int64_t r = 0; r < n; ++r)
    copy_rows(wire, hcp_run_part_row(&records[r], row), out, row, rows);
}

void hcp_cpu_rotate(hcp_dtype dtype, hcp_heads source, const hcp_rotation *rotation,
                    const hcp_run *runs, int64_t n_runs, int64_t rows, hcp_column out,
                    hcp_column wire) {
  /* A sum of one part, itself. */
  hcp_column column = {(void *)(intptr_t)source.data, source.row_stride * hcp_dtype_bytes(dtype),
                       0};
  hcp_run whole = {0, rows, 0, 0};
  sum one = {&column, 1, &whole, 1, 0};
  int64_t row = 0;
  if (out.row_bytes == 0) return; /* any number of rows may hold nothing */
  for (int64_t first = 0, end; first < n_runs; first = end) {
    int64_t begin = runs[first].row, stop = begin + runs[first].rows;
    end = hcp_run_end(runs, n_runs, first);
    turn_rows(dtype, &one, rotation, source.head_stride, row, begin, out);
    for (row = begin; row < stop; row += ROWS_AT_ONCE) {
      int64_t few = stop - row < ROWS_AT_ONCE ? stop - row : ROWS_AT_ONCE;
      turn_rows(dtype, &one, rotation, source.head_stride, row, row + few, out);
      copy_turned(&runs[first], end - first, row, few, out, wire);
    }
    row = stop;
  }
  turn_rows(dtype, &one, rotation, source.head_stride, row, rows, out);
}
