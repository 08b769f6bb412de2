/* check.c - segments and runs proved against the sizes of the tensors they index. */
#include <inttypes.h>

#include "hcp/fail.h"
#include "hcp/kernels.h"

#define LONG "%" PRId64

static hcp_status check_segment(const hcp_segment *segment, int64_t s, int64_t rows,
                                hcp_error *err) {
  if (segment->rows < 0)
    return hcp__fail(err, HCP_INVALID, "segments[" LONG "].rows is " LONG ", expected >= 0", s,
                     segment->rows);
  if (segment->row < -1)
    return hcp__fail(err, HCP_INVALID,
                     "segments[" LONG "].row is " LONG ", expected >= 0, or -1 for zeros", s,
                     segment->row);
  if (segment->row >= 0 && (segment->rows > rows || segment->row > rows - segment->rows))
    return hcp__fail(err, HCP_INVALID,
                     "segments[" LONG "] is " LONG " rows from row " LONG
                     ", expected inside the source's " LONG " rows",
                     s, segment->rows, segment->row, rows);
  return HCP_OK;
}

hcp_status hcp_check_segments(const hcp_segment *segments, int64_t n, int64_t rows,
                              int64_t out_rows, hcp_error *err) {
  int64_t missing = out_rows; /* counted down: the sum of the rows could overflow */
  for (int64_t s = 0; s < n; ++s) {
    hcp_status status = check_segment(&segments[s], s, rows, err);
    if (status != HCP_OK) return status;
    if (segments[s].rows > missing)
      return hcp__fail(err, HCP_INVALID,
                       "segments[0 .. " LONG "] have more rows than rows = " LONG
                       ", expected as many",
                       s, out_rows);
    missing -= segments[s].rows;
  }
  if (missing != 0)
    return hcp__fail(err, HCP_INVALID, "segments have " LONG " rows, expected rows = " LONG,
                     out_rows - missing, out_rows);
  return HCP_OK;
}

static hcp_status check_run_target(const hcp_run *run, int64_t r, int64_t out_rows,
                                   hcp_error *err) {
  if (run->rows < 1)
    return hcp__fail(err, HCP_INVALID, "runs[" LONG "].rows is " LONG ", expected >= 1", r,
                     run->rows);
  if (run->row < 0 || run->rows > out_rows || run->row > out_rows - run->rows)
    return hcp__fail(err, HCP_INVALID,
                     "runs[" LONG "] is " LONG " rows from row " LONG
                     ", expected inside the result's " LONG " rows",
                     r, run->rows, run->row, out_rows);
  return HCP_OK;
}

static hcp_status check_run_part(const hcp_run *run, int64_t r, const int64_t *part_rows,
                                 int64_t parts, hcp_error *err) {
  if (run->part < 0 || run->part >= parts)
    return hcp__fail(err, HCP_INVALID,
                     "runs[" LONG "].part is " LONG ", expected >= 0 and < " LONG " parts", r,
                     run->part, parts);
  int64_t rows = part_rows[run->part];
  if (run->part_row < 0 || run->rows > rows || run->part_row > rows - run->rows)
    return hcp__fail(err, HCP_INVALID,
                     "runs[" LONG "] takes " LONG " rows from row " LONG " of part " LONG
                     ", expected inside its " LONG " rows",
                     r, run->rows, run->part_row, run->part, rows);
  return HCP_OK;
}

/* A record continues the run before it, or starts after it. */
static hcp_status check_run_order(const hcp_run *before, const hcp_run *run, int64_t r,
                                  hcp_error *err) {
  if (run->row == before->row && run->rows == before->rows) return HCP_OK;
  if (run->row >= before->row + before->rows) return HCP_OK;
  return hcp__fail(err, HCP_INVALID,
                   "runs[" LONG "] is " LONG " rows from row " LONG
                   ", expected the same rows as runs[" LONG "] (" LONG " from " LONG
                   ") or rows after them",
                   r, run->rows, run->row, r - 1, before->rows, before->row);
}

hcp_status hcp_check_runs(const hcp_run *runs, int64_t n, const int64_t *part_rows, int64_t parts,
                          int64_t out_rows, hcp_error *err) {
  for (int64_t r = 0; r < n; ++r) {
    hcp_status status = check_run_target(&runs[r], r, out_rows, err);
    if (status == HCP_OK) status = check_run_part(&runs[r], r, part_rows, parts, err);
    if (status == HCP_OK && r > 0) status = check_run_order(&runs[r - 1], &runs[r], r, err);
    if (status != HCP_OK) return status;
  }
  return HCP_OK;
}
