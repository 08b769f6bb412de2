// operators.h - the operators torch.ops.hcp.*, for any device.
//
// An operator checks every argument, allocates its results and calls one kernel.
// A Device is made from a tensor on it and has the kernels as methods, with the
// arguments of the C functions hcp_cpu_*. Gradients and shapes without data are
// registered from hcp/ops.py, where each operator is documented.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "adjoint.h"

namespace hcp {

inline int32_t torch_dtype(hcp_dtype dtype) {
  switch (dtype) {
    case HCP_FLOAT64:
      return aoti_torch_dtype_float64();
    case HCP_FLOAT32:
      return aoti_torch_dtype_float32();
    case HCP_BFLOAT16:
      return aoti_torch_dtype_bfloat16();
    case HCP_FLOAT16:
      return aoti_torch_dtype_float16();
  }
  return -1;
}

// Uninitialised and contiguous, of another tensor's device and, unless there is a cast, its type.
// By torch's own new_empty the operator would be looked up by name at every call.
inline Tensor fresh(const Tensor &like, const Sizes &sizes,
                    const std::optional<hcp_cast> &cast = {}) {
  Sizes strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;)
    strides[i - 1] = times(strides[i], std::max<int64_t>(sizes[i], 1));
  int32_t dtype = cast ? torch_dtype(cast->to) : 0, device = 0;
  AtenTensorHandle made = nullptr;
  if ((!cast && aoti_torch_get_dtype(like.get(), &dtype) != 0) ||
      aoti_torch_get_device_type(like.get(), &device) != 0 ||
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               dtype, device, like.get_device_index(), &made) != 0)
    refuse("torch made no tensor of shape ", shape_text(sizes), "; its own message says why");
  return Tensor(made);
}

inline int32_t count(const std::vector<hcp_column> &columns) {
  return static_cast<int32_t>(columns.size());
}

inline const hcp_cast *borrowed(const std::optional<hcp_cast> &cast) {
  return cast ? &*cast : nullptr;
}

// ---- Gathers ---------------------------------------------------------------

template <class Device>
Tensor pack(Tensors sources, Tensor segments, int64_t rows, Dtype dtype = {}) {
  std::vector<hcp_column> columns = columns_of("sources", sources);
  std::optional<hcp_cast> cast = cast_of("sources[0]", sources[0], dtype);
  Segments records = segments_of(segments, sources[0].size(0), rows);
  Tensor out = fresh(sources[0], {rows, width_of(sources)}, cast);
  hcp_column target = output_of("out", out);
  Device device(sources[0]);
  device.pack(borrowed(cast), columns.data(), count(columns), records.data, records.n, target);
  return out;
}

template <class Device>
Tensors unpack(Tensor source, Tensor segments, Sizes widths, int64_t rows, Dtype dtype = {}) {
  split_column("source", source, widths);
  std::optional<hcp_cast> cast = cast_of("source", source, dtype);
  Segments records = segments_of(segments, source.size(0), rows);
  Tensors outs;
  for (int64_t width : widths) outs.push_back(fresh(source, {rows, width}, cast));
  if (outs.empty()) return outs;
  std::vector<hcp_column> columns;
  for (const Tensor &out : outs) columns.push_back(output_of("out", out));
  hcp_column from = column_of("source", source);
  Device device(source);
  device.unpack(borrowed(cast), from, records.data, records.n, columns.data(), count(columns));
  return outs;
}

inline Runs borrowed(const std::vector<hcp_run> &runs) {
  return {runs.data(), static_cast<int64_t>(runs.size())};
}

// A column for each width, all summed by the same runs from one part.
template <class Device>
Tensors sum_columns(const Tensor &grad, const Sizes &widths, const std::vector<hcp_run> &runs,
                    int64_t rows, const Dtype &to) {
  hcp_dtype dtype = dtype_of("grad", grad);
  std::optional<hcp_cast> cast = cast_of("grad", grad, to);
  Runs records = borrowed(runs);
  Tensors outs;
  for (const hcp_column &column : split_column("grad", grad, widths)) {
    outs.push_back(fresh(grad, {rows, widths[outs.size()]}, cast));
    hcp_sum sum = {dtype, &column, 1, records.data, records.n, rows};
    Device(grad).reduce(&sum, borrowed(cast), output_of("grad_source", outs.back()));
  }
  return outs;
}

template <class Device>
Tensors pack_backward(Tensor grad, Tensor segments, Sizes widths, int64_t rows, Dtype dtype) {
  expect_dim("grad", grad, 2);
  expect_at_least("rows", rows, 0);
  Segments records = segments_of(segments, rows, grad.size(0));
  return sum_columns<Device>(grad, widths, adjoint_of(records), rows, dtype);
}

template <class Device>
Tensor unpack_backward(Tensors grads, Tensor segments, int64_t rows, Dtype to) {
  std::vector<hcp_column> columns = columns_of("grads", grads);
  hcp_dtype dtype = dtype_of("grads[0]", grads[0]);
  std::optional<hcp_cast> cast = cast_of("grads[0]", grads[0], to);
  expect_at_least("rows", rows, 0);
  std::vector<hcp_run> runs = adjoint_of(segments_of(segments, rows, grads[0].size(0)));
  Runs records = borrowed(runs);
  Tensor out = fresh(grads[0], {rows, width_of(grads)}, cast);
  hcp_sum sum = {dtype, columns.data(), count(columns), records.data, records.n, rows};
  Device(grads[0]).reduce(&sum, borrowed(cast), output_of("grad_source", out));
  return out;
}

// ---- Sums ------------------------------------------------------------------

inline hcp_sum sum_of(const Summands &summands, const Runs &runs, int64_t rows) {
  return {summands.dtype, summands.columns.data(), summands.n_columns, runs.data, runs.n, rows};
}

// A given result must look like the one that would have been made.
inline void expect_result(const Tensor &out, const Tensor &like, int64_t width) {
  expect_sizes("out", out, {-1, width});
  expect_same_dtype("out", out, "the input", like);
  expect_same_device("out", out, "the input", like);
}

// What a sum takes, checked as a whole: nothing is queued before.
struct Reduction {
  Summands summands;
  Runs runs;
  int64_t rows;
  hcp_column out;

  hcp_sum sum() const { return sum_of(summands, runs, rows); }
};
inline Reduction reduction_of(const Summands &summands, const Tensor &runs, const Tensor &out) {
  int64_t rows = out.size(0);
  return {summands, runs_of(runs, summands.rows, rows), rows, output_of("out", out)};
}

template <class Device>
Tensor reduce(Tensors parts, Tensor runs, int64_t rows, int64_t columns, Dtype dtype = {}) {
  Summands summands = summands_of(parts, columns);
  std::optional<hcp_cast> cast = cast_of("parts[0]", parts[0], dtype);
  expect_at_least("rows", rows, 0);
  Tensor out = fresh(parts[0], {rows, summands.width}, cast);
  hcp_sum sum = sum_of(summands, runs_of(runs, summands.rows, rows), rows);
  Device(parts[0]).reduce(&sum, borrowed(cast), output_of("out", out));
  return out;
}

template <class Device>
Tensors reduce_backward(Tensor grad, Tensor runs, Sizes part_rows, Sizes widths, Dtype dtype) {
  expect_dim("grad", grad, 2);
  for (size_t p = 0; p < part_rows.size(); ++p)
    expect_at_least(element("part_rows", p), part_rows[p], 0);
  Runs records = runs_of(runs, part_rows, grad.size(0));
  Tensors grads;
  for (size_t p = 0; p < part_rows.size(); ++p) {
    std::vector<hcp_run> adjoint = adjoint_of(records, static_cast<int64_t>(p));
    for (Tensor &column : sum_columns<Device>(grad, widths, adjoint, part_rows[p], dtype))
      grads.push_back(std::move(column));
  }
  return grads;
}

// ---- Rotary embedding --------------------------------------------------------

template <class Device>
Tensor reduce_rotated(Tensors parts, Tensor runs, int64_t rows, int64_t columns, Tensor cos,
                      Tensor sin, int64_t head_dim, int64_t rotated, bool interleaved,
                      bool inverse) {
  expect_at_least("rows", rows, 0);
  Summands summands = summands_of(parts, columns);
  Runs records = runs_of(runs, summands.rows, rows);
  if (rotated < 0 || rotated > columns)
    refuse("rotated is ", rotated, ", expected from 0 to columns = ", columns);
  hcp_rotation rotation =
      rotation_of(cos, sin, summands.dtype, parts[0], rows, head_dim, interleaved, inverse);
  for (size_t c = 0; c < static_cast<size_t>(rotated); ++c)
    if (parts[c].size(1) % head_dim != 0)
      refuse(element("parts", c), " has ", parts[c].size(1),
             " columns, expected a multiple of head_dim = ", head_dim);
  Tensor out = fresh(parts[0], {rows, summands.width});
  hcp_sum sum = sum_of(summands, records, rows);
  Device(parts[0]).reduce_rotated(&sum, &rotation, static_cast<int32_t>(rotated),
                                  output_of("out", out));
  return out;
}

// t turned into out, and rows of it into wire by runs from out to wire.
template <class Device>
Tensor rotated(const Tensor &t, const Tensor &cos, const Tensor &sin, bool interleaved,
               bool inverse, const std::vector<hcp_run> &runs, hcp_column wire) {
  hcp_heads source = heads_of("t", t);
  hcp_dtype dtype = dtype_of("t", t);
  int64_t rows = t.size(0), heads = t.size(1), head_dim = t.size(2);
  hcp_rotation rotation = rotation_of(cos, sin, dtype, t, rows, head_dim, interleaved, inverse);
  Tensor out = fresh(t, {rows, heads, head_dim});
  int64_t row_bytes = times(times(heads, head_dim), static_cast<int64_t>(t.element_size()));
  hcp_column target = {out.mutable_data_ptr(), row_bytes, row_bytes};
  Device(t).rotate(dtype, source, &rotation, runs.data(), static_cast<int64_t>(runs.size()), rows,
                   target, wire);
  return out;
}

template <class Device>
Tensor rotate(Tensor t, Tensor cos, Tensor sin, bool interleaved, bool inverse) {
  return rotated<Device>(t, cos, sin, interleaved, inverse, {}, {nullptr, 0, 0});
}

template <class Device>
std::tuple<Tensor, Tensor> rotate_pack(Tensor t, Tensor cos, Tensor sin, bool interleaved,
                                       Tensors beside, Tensor segments, int64_t rows) {
  std::vector<hcp_column> columns = columns_of("beside", beside);
  expect_dim("t", t, 3);
  expect_sizes("beside[0]", beside[0], {t.size(0), -1});
  expect_same_dtype("beside[0]", beside[0], "t", t);
  expect_same_device("beside[0]", beside[0], "t", t);
  Segments records = segments_of(segments, t.size(0), rows);
  for (int64_t s = 0; s < records.n; ++s)
    if (records.data[s].row < 0)
      refuse("segments[", s, "].row is ", records.data[s].row, ", expected >= 0");
  int64_t width = times(t.size(1), t.size(2));
  Tensor wire = fresh(t, {rows, added(width, width_of(beside))});
  hcp_column whole = output_of("wire", wire), first = whole, rest = whole;
  int64_t bytes = width * static_cast<int64_t>(t.element_size());
  first.row_bytes = bytes;
  rest.data = static_cast<char *>(whole.data) + bytes;
  rest.row_bytes -= bytes;
  Tensor out = rotated<Device>(t, cos, sin, interleaved, false, adjoint_of(records), first);
  Device(t).pack(nullptr, columns.data(), count(columns), records.data, records.n, rest);
  return {out, wire};
}

// ---- Merge -----------------------------------------------------------------

inline hcp_merge merge_of(const Parts &parts, const Runs &runs, int64_t rows) {
  return {parts.dtype, parts.parts.data(), runs.data, runs.n, rows,
          parts.heads, parts.head_dim,     nullptr,   nullptr};
}

template <class Device>
std::tuple<Tensor, Tensor> merge(Tensors outs, Tensors lses, Tensor runs, int64_t rows) {
  Parts parts = parts_of(outs, lses);
  Runs records = runs_of(runs, parts.rows, rows);
  Tensor out = fresh(outs[0], {rows, parts.heads, parts.head_dim});
  Tensor lse = fresh(lses[0], {rows, parts.heads});
  hcp_merge call = merge_of(parts, records, rows);
  Device(outs[0]).merge(&call, out.mutable_data_ptr(), lse.mutable_data_ptr());
  return {out, lse};
}

template <class Device>
void implement(torch::stable::detail::StableLibrary &m) {
  m.impl("pack", TORCH_BOX(&pack<Device>));
  m.impl("pack_backward", TORCH_BOX(&pack_backward<Device>));
  m.impl("unpack", TORCH_BOX(&unpack<Device>));
  m.impl("unpack_backward", TORCH_BOX(&unpack_backward<Device>));
  m.impl("merge", TORCH_BOX(&merge<Device>));
  m.impl("reduce", TORCH_BOX(&reduce<Device>));
  m.impl("reduce_backward", TORCH_BOX(&reduce_backward<Device>));
  m.impl("reduce_rotated", TORCH_BOX(&reduce_rotated<Device>));
  m.impl("rotate", TORCH_BOX(&rotate<Device>));
  m.impl("rotate_pack", TORCH_BOX(&rotate_pack<Device>));
}

}  // namespace hcp
