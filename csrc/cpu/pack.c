/* pack.c - rows gathered, several tensors side by side. */
#include "rows.h"

/* Rows named by the segments, one after the other; both are row_bytes wide. */
static void gather(hcp_column target, hcp_column source, const hcp_segment *segments,
                   int64_t n_segments) {
  int64_t target_row = 0;
  for (int64_t s = 0; s < n_segments; ++s) {
    if (segments[s].row < 0)
      clear_rows(target, target_row, segments[s].rows);
    else
      copy_rows(target, target_row, source, segments[s].row, segments[s].rows);
    target_row += segments[s].rows;
  }
}

void hcp_cpu_pack(const hcp_column *sources, int32_t n_sources, const hcp_segment *segments,
                  int64_t n_segments, hcp_column out) {
  int64_t offset_bytes = 0;
  for (int32_t c = 0; c < n_sources; ++c) {
    if (sources[c].row_bytes == 0) continue;
    gather(column_slice(out, offset_bytes, sources[c].row_bytes), sources[c], segments, n_segments);
    offset_bytes += sources[c].row_bytes;
  }
}

void hcp_cpu_unpack(hcp_column source, const hcp_segment *segments, int64_t n_segments,
                    const hcp_column *outs, int32_t n_outs) {
  int64_t offset_bytes = 0;
  for (int32_t c = 0; c < n_outs; ++c) {
    if (outs[c].row_bytes == 0) continue;
    gather(outs[c], column_slice(source, offset_bytes, outs[c].row_bytes), segments, n_segments);
    offset_bytes += outs[c].row_bytes;
  }
}
