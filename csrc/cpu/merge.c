/* merge.c - partial attention outputs merged by log-sum-exp. */
#include <stdbool.h>

#include "dtype.h"
#include "hcp/index.h"

/* What the rows of one run need, whatever the dtype. */
typedef struct merge {
  const void *out, *lse; /* what was merged before, wide; NULL: nothing */
  bool stays_wide;       /* the result */
  const hcp_part *parts;
  const hcp_run *records; /* one run */
  int64_t n_records;
  int64_t heads, head_dim;
} merge;

#define DTYPE float64
#include "merge_rows.h"
#undef DTYPE
#define DTYPE float32
#include "merge_rows.h"
#undef DTYPE
#define DTYPE bfloat16
#include "merge_rows.h"
#undef DTYPE
#define DTYPE float16
#include "merge_rows.h"
#undef DTYPE

/* A merge without records is the value of rows that no run names. */
static void merge_run(hcp_dtype dtype, const merge *m, int64_t row, int64_t rows, void *out,
                      void *lse) {
  DISPATCH(dtype, merge_run, m, row, rows, out, lse)
}

static void merge_runs(hcp_dtype dtype, merge m, const hcp_run *runs, int64_t n_runs, int64_t rows,
                       void *out, void *lse) {
  int64_t row = 0;
  if (m.heads == 0) return; /* any number of rows may hold nothing */
  for (int64_t first = 0, end; first < n_runs; first = end) {
    end = hcp_run_end(runs, n_runs, first);
    m.n_records = 0;
    merge_run(dtype, &m, row, runs[first].row - row, out, lse);
    m.records = &runs[first];
    m.n_records = end - first;
    merge_run(dtype, &m, runs[first].row, runs[first].rows, out, lse);
    row = runs[first].row + runs[first].rows;
  }
  m.n_records = 0;
  merge_run(dtype, &m, row, rows - row, out, lse);
}

void hcp_cpu_merge(hcp_dtype dtype, const hcp_part *parts, const hcp_run *runs, int64_t n_runs,
                   int64_t rows, int64_t heads, int64_t head_dim, void *out, void *lse) {
  merge m = {NULL, NULL, false, parts, NULL, 0, heads, head_dim};
  merge_runs(dtype, m, runs, n_runs, rows, out, lse);
}

void hcp_cpu_merge_on(hcp_dtype dtype, const void *total_lse, const hcp_part *parts,
                      const hcp_run *runs, int64_t n_runs, int64_t rows, int64_t heads,
                      int64_t head_dim, void *total, void *lse) {
  merge m = {total, total_lse, true, parts, NULL, 0, heads, head_dim};
  merge_runs(dtype, m, runs, n_runs, rows, total, lse);
}

void hcp_cpu_merge_last(hcp_dtype dtype, const void *total, const void *total_lse,
                        const hcp_part *parts, const hcp_run *runs, int64_t n_runs, int64_t rows,
                        int64_t heads, int64_t head_dim, void *out, void *lse) {
  merge m = {total, total_lse, false, parts, NULL, 0, heads, head_dim};
  merge_runs(dtype, m, runs, n_runs, rows, out, lse);
}
