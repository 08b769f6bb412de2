/* merge.c - partial attention outputs merged by log-sum-exp. */
#include <stdbool.h>

#include "dtype.h"
#include "hcp/index.h"

/* What the rows of one run need, whatever the dtype. */
typedef struct merge {
  const hcp_merge *of;
  bool stays_wide;        /* the result */
  const hcp_run *records; /* one run */
  int64_t n_records;
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
static void merge_run(const merge *m, int64_t row, int64_t rows, void *out, void *lse) {
  DISPATCH(m->of->dtype, merge_run, m, row, rows, out, lse)
}

static void merge_runs(merge m, void *out, void *lse) {
  const hcp_run *runs = m.of->runs;
  int64_t row = 0, n_runs = m.of->n_runs;
  if (m.of->heads == 0) return; /* any number of rows may hold nothing */
  for (int64_t first = 0, end; first < n_runs; first = end) {
    end = hcp_run_end(runs, n_runs, first);
    m.n_records = 0;
    merge_run(&m, row, runs[first].row - row, out, lse);
    m.records = &runs[first];
    m.n_records = end - first;
    merge_run(&m, runs[first].row, runs[first].rows, out, lse);
    row = runs[first].row + runs[first].rows;
  }
  m.n_records = 0;
  merge_run(&m, row, m.of->rows - row, out, lse);
}

void hcp_cpu_merge(const hcp_merge *of, void *out, void *lse) {
  merge_runs((merge){of, false, NULL, 0}, out, lse);
}

void hcp_cpu_merge_on(const hcp_merge *of, void *total, void *lse) {
  merge_runs((merge){of, true, NULL, 0}, total, lse);
}
