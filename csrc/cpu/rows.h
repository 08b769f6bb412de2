/* rows.h - whole rows addressed, copied and cleared. */
#ifndef HCP_CPU_ROWS_H
#define HCP_CPU_ROWS_H

#include <string.h>

#include "hcp/kernels.h"

static inline char *row_at(hcp_column column, int64_t row) {
  return (char *)column.data + row * column.row_stride_bytes;
}

/* Narrows a column to row_bytes bytes from offset_bytes on. */
static inline hcp_column column_slice(hcp_column column, int64_t offset_bytes, int64_t row_bytes) {
  column.data = (char *)column.data + offset_bytes;
  column.row_bytes = row_bytes;
  return column;
}

static inline int rows_touch(hcp_column column) {
  return column.row_stride_bytes == column.row_bytes;
}

/* source and target have the same row_bytes. */
static inline void copy_rows(hcp_column target, int64_t target_row, hcp_column source,
                             int64_t source_row, int64_t rows) {
  size_t row_bytes = (size_t)target.row_bytes;
  if (rows == 0 || row_bytes == 0) return; /* data may be NULL, which memcpy refuses */
  if (rows_touch(target) && rows_touch(source)) {
    memcpy(row_at(target, target_row), row_at(source, source_row), (size_t)rows * row_bytes);
    return;
  }
  for (int64_t i = 0; i < rows; ++i)
    memcpy(row_at(target, target_row + i), row_at(source, source_row + i), row_bytes);
}

static inline void clear_rows(hcp_column target, int64_t row, int64_t rows) {
  if (target.row_bytes == 0) return;
  for (int64_t i = 0; i < rows; ++i) memset(row_at(target, row + i), 0, (size_t)target.row_bytes);
}

#endif
