// calls.h - memory of a library's attention call: its rows as the library reads them, and room for
// what it gives.
//
// The host's time counts here: one call does what took a dozen calls of torch. Only
// hcp/attention/kernels calls it: it has no gradient, and no shapes without data.
#pragma once

#include "layer.h"

namespace hcp {

// Copied into a tensor made for it. torch's own copy_ would be looked up by name at every call.
inline Tensor copied(Tensor to, const Tensor &from) {
  if (aoti_torch_copy_(to.get(), from.get(), 0) != 0)
    refuse("torch copied no rows of shape ", shape_text(sizes_of(from)),
           "; its own message says why");
  return to;
}

// Whether rows (n, heads, size) can be read in units of 16 bytes, each element at its own place.
inline bool is_aligned(const Tensor &rows, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 != 0 || rows.stride(2) != 1)
    return false;
  return rows.stride(0) != 0 && rows.stride(1) != 0 && rows.stride(0) * bytes % 16 == 0 &&
         rows.stride(1) * bytes % 16 == 0;
}

// Rows as they are, or a copy that is aligned. Without a gradient: libraries refuse tensors that
// want one.
inline Tensor aligned(const Name &name, const Tensor &rows) {
  expect_dim(name, rows, 3);
  Sizes sizes = sizes_of(rows);
  if (!is_aligned(rows, static_cast<int64_t>(rows.element_size())))
    return copied(fresh(rows, sizes), rows);
  return view_of(rows, sizes, {rows.stride(0), rows.stride(1), 1}, 0);
}

// (n, heads) as (heads, n), its elements end to end.
inline Tensor heads_first(const Name &name, const Tensor &sums) {
  expect_dim(name, sums, 2);
  expect_dtype(name, sums, torch::headeronly::ScalarType::Float);
  int64_t rows = sums.size(0), heads = sums.size(1);
  Tensor turned = view_of(sums, {heads, rows}, {sums.stride(1), sums.stride(0)}, 0);
  bool end_to_end = sums.stride(0) == 1 && sums.stride(1) == rows;
  return end_to_end ? turned : copied(fresh(sums, {heads, rows}), turned);
}

// Where a matrix begins among others: as far apart as torch places tensors of their own.
inline int64_t padded(int64_t elements) {
  constexpr int64_t unit = 512 / sizeof(float);
  return times(added(elements, unit - 1) / unit, unit);
}

// Float32 matrices in one allocation, those of zeros before the others, as `results` has them.
inline Tensors matrices(const Results &results, const Tensor &like) {
  Sizes starts(static_cast<size_t>(results.n), 0);
  int64_t zeros = 0, end = 0;
  for (Result::Kind kind : {Result::ZEROS, Result::FLOATS}) {
    for (int64_t i = 0; i < results.n; ++i) {
      if (results.data[i].kind != kind) continue;
      starts[static_cast<size_t>(i)] = end;
      end = added(end, padded(times(results.data[i].rows, results.data[i].heads)));
    }
    if (kind == Result::ZEROS) zeros = end;
  }
  Tensors views;
  if (end == 0) return views;
  Tensor memory = fresh(like, {end}, hcp_cast{dtype_of("rows[0]", like), HCP_FLOAT32});
  if (zeros > 0 && aoti_torch_zero_(view_of(memory, {zeros}, {1}, 0).get()) != 0)
    refuse("torch wrote no ", zeros, " zeros; its own message says why");
  for (int64_t i = 0; i < results.n; ++i) {
    const Result &result = results.data[i];
    if (result.kind != Result::ROWS)
      views.push_back(view_of(memory, {result.rows, result.heads}, {result.heads, 1},
                              starts[static_cast<size_t>(i)]));
  }
  return views;
}

// The rows (n, heads, size) aligned, the sums (n, heads) with their heads first, and the results:
// those of the rows' dtype, then the matrices.
inline Tensors call_memory(Tensors rows, Tensors sums, Tensor table) {
  Results results = results_of(table);
  if (rows.empty()) refuse("rows is empty, expected a tensor at least");
  Tensors given;
  for (size_t i = 0; i < rows.size(); ++i) given.push_back(aligned(element("rows", i), rows[i]));
  for (size_t i = 0; i < sums.size(); ++i)
    given.push_back(heads_first(element("sums", i), sums[i]));
  for (int64_t i = 0; i < results.n; ++i) {
    const Result &result = results.data[i];
    if (result.kind == Result::ROWS)
      given.push_back(fresh(rows[0], {result.rows, result.heads, result.size}));
  }
  for (Tensor &matrix : matrices(results, rows[0])) given.push_back(std::move(matrix));
  return given;
}

inline void implement_calls(torch::stable::detail::StableLibrary &m) {
  m.impl("call_memory", TORCH_BOX(&call_memory));
}

}  // namespace hcp
