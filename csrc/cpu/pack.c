/* pack.c - rows gathered, several tensors side by side. */
#include "hcp/index.h"
#include "sum.h"

/* A sum of one part, itself. */
static void cast_rows(hcp_cast cast, hcp_column target, int64_t target_row, hcp_column source,
                      int64_t source_row, int64_t rows) {
  hcp_run run = {target_row, rows, 0, source_row};
  hcp__cast_rows(cast, &(sum){&source, 1, &run, 1, 0}, target);
}

/* Rows named by the segments, one after the other; cast is NULL where both are row_bytes
 * wide. */
static void gather(const hcp_cast *cast, hcp_column target, hcp_column source,
                   const hcp_segment *segments, int64_t n_segments) {
  int64_t target_row = 0;
  for (int64_t s = 0; s < n_segments; ++s) {
    if (segments[s].row < 0)
      clear_rows(target, target_row, segments[s].rows);
    else if (cast != NULL)
      cast_rows(*cast, target, target_row, source, segments[s].row, segments[s].rows);
    else
      copy_rows(target, target_row, source, segments[s].row, segments[s].rows);
    target_row += segments[s].rows;
  }
}

/* Bytes of a row after the cast, and before it. */
static int64_t target_bytes(const hcp_cast *cast, int64_t bytes) {
  return cast != NULL ? hcp_cast_bytes(*cast, bytes) : bytes;
}

static int64_t source_bytes(const hcp_cast *cast, int64_t bytes) {
  return cast != NULL ? hcp_cast_bytes((hcp_cast){cast->to, cast->from}, bytes) : bytes;
}

void hcp_cpu_pack(const hcp_cast *cast, const hcp_column *sources, int32_t n_sources,
                  const hcp_segment *segments, int64_t n_segments, hcp_column out) {
  int64_t offset_bytes = 0;
  for (int32_t c = 0; c < n_sources; ++c) {
    int64_t row_bytes = target_bytes(cast, sources[c].row_bytes);
    if (row_bytes == 0) continue;
    gather(cast, column_slice(out, offset_bytes, row_bytes), sources[c], segments, n_segments);
    offset_bytes += row_bytes;
  }
}

void hcp_cpu_unpack(const hcp_cast *cast, hcp_column source, const hcp_segment *segments,
                    int64_t n_segments, const hcp_column *outs, int32_t n_outs) {
  int64_t offset_bytes = 0;
  for (int32_t c = 0; c < n_outs; ++c) {
    int64_t row_bytes = source_bytes(cast, outs[c].row_bytes);
    if (row_bytes == 0) continue;
    gather(cast, outs[c], column_slice(source, offset_bytes, row_bytes), segments, n_segments);
    offset_bytes += row_bytes;
  }
}
