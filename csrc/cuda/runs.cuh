/* runs.cuh - runs as a launch carries them: by value, as many as fit. */
#ifndef HCP_CUDA_RUNS_CUH
#define HCP_CUDA_RUNS_CUH

#include "device.cuh"
#include "hcp/index.h"

/* What one launch carries. A kernel's parameters are read through the constant
 * cache, and copied when it is queued: nothing has to be allocated, uploaded
 * or kept. All of it stays well below the 32,764 bytes that parameters may have. */
struct carried_runs {
  enum { RUNS = 384, RECORDS = HCP_CUDA_RECORDS_MAX };
  int64_t row[RUNS + 1];      /* first row of each run, in the result; then the end */
  int32_t record[RUNS + 1];   /* first record of each run                          */
  int64_t part_row[RECORDS];  /* of the run's first row                            */
  uint8_t part[RECORDS];      /* among the launch's parts                          */
  int32_t n;                  /* runs, those without records included              */

  __device__ int64_t first_row() const { return row[0]; }
  __device__ int64_t rows() const { return row[n] - row[0]; }

  /* The run of a row: the last one that starts at or before it. */
  __device__ int find(int64_t result_row) const { return hcp_place_of_row(row, n, result_row); }
};

/* Cuts runs into launches. Rows between runs become runs without
 * records, where fill is asked for. The numbers of parts are replaced by their
 * places in the launch, whose order is in part_of. */
struct run_launches {
  const hcp_run *runs;
  int64_t n_runs, rows;
  bool fill;
  int64_t next = 0; /* record */
  int64_t row = 0;  /* result rows handed out */
  carried_runs carried;
  int32_t part_of[HCP_CUDA_PARTS_MAX];
  int32_t parts = 0;

  run_launches(const hcp_run *the_runs, int64_t n, int64_t result_rows, bool fill_gaps)
      : runs(the_runs), n_runs(n), rows(result_rows), fill(fill_gaps) {}

  int32_t place_of(int64_t part) {
    for (int32_t p = 0; p < parts; ++p)
      if (part_of[p] == part) return p;
    if (parts == HCP_CUDA_PARTS_MAX) return -1;
    part_of[parts] = (int32_t)part;
    return parts++;
  }

  void add_gap(int64_t end) {
    if (end > row) {
      carried.row[carried.n] = row;
      carried.record[carried.n + 1] = carried.record[carried.n];
      ++carried.n;
    }
    row = end;
    carried.row[carried.n] = row;
  }

  /* False, and nothing changed but unused places, when the launch is full. */
  bool add_run(int64_t first, int64_t end) {
    int32_t at = carried.record[carried.n];
    if (carried.n == carried_runs::RUNS || at + (end - first) > carried_runs::RECORDS) return false;
    for (int64_t r = first; r < end; ++r) {
      int32_t place = place_of(runs[r].part);
      if (place < 0) return false;
      carried.part[at + (r - first)] = (uint8_t)place;
      carried.part_row[at + (r - first)] = runs[r].part_row;
    }
    carried.row[carried.n] = runs[first].row;
    carried.record[++carried.n] = at + (int32_t)(end - first);
    carried.row[carried.n] = runs[first].row + runs[first].rows;
    return true;
  }

  /* Fills the next launch. 1: launch it; 0: there is none; -1: a row has too
   * many parts or records for any launch. */
  int advance() {
    carried.n = 0;
    carried.record[0] = 0;
    parts = 0;
    while (next < n_runs) {
      bool gap = runs[next].row > row;
      if (gap && fill) {
        if (carried.n == carried_runs::RUNS) return 1;
        add_gap(runs[next].row);
      } else if (gap) {
        if (carried.n > 0) return 1; /* a launch's rows follow each other */
        row = runs[next].row;
      }
      int64_t end = hcp_run_end(runs, n_runs, next);
      if (!add_run(next, end)) return carried.n > 0 ? 1 : -1;
      row = carried.row[carried.n];
      next = end;
    }
    if (fill && row < rows && carried.n < carried_runs::RUNS) add_gap(rows);
    return carried.n > 0;
  }

  /* Whether nothing is left for another launch. */
  bool is_last() const { return next == n_runs && (!fill || row == rows); }
};

static inline hcp_status row_too_long(const run_launches &launches, hcp_error *err) {
  int64_t records = hcp_run_end(launches.runs, launches.n_runs, launches.next) - launches.next;
  if (records > HCP_CUDA_RECORDS_MAX)
    return hcp__fail(err, HCP_INVALID, "runs[%lld] begins %lld records of one row, expected <= %d",
                     (long long)launches.next, (long long)records, HCP_CUDA_RECORDS_MAX);
  return hcp__fail(err, HCP_INVALID, "runs[%lld] is a row of more than %d parts",
                   (long long)launches.next, HCP_CUDA_PARTS_MAX);
}

/* The columns of a reduce from number `from` on; out starts with the first of
 * them. */
hcp_status hcp_cuda_reduce_from(const hcp_sum *sum, int32_t from, hcp_column out, void *stream,
                                hcp_error *err);

#endif
