// layer.h - the operators of one attention layer, except its attention calls.
//
// The host's time counts here: each operator does the work of several public operators and views
// in one call, and takes rows (N, ...) of any layout. Only hcp/attention/layer.py and
// key_transfer.py call them: they have no gradients, and no shapes without data.
#pragma once

#include <optional>

#include "operators.h"

namespace hcp {

inline Tensor view_of(const Tensor &tensor, const Sizes &sizes, const Sizes &strides,
                      int64_t offset) {
  AtenTensorHandle made = nullptr;
  if (aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                     strides.data(), offset, &made) != 0)
    refuse("torch made no view of shape ", shape_text(sizes), "; its own message says why");
  return Tensor(made);
}

// Whether the elements of a row lie side by side.
inline bool is_dense(const Tensor &tensor) {
  int64_t expected = 1;
  for (int64_t i = tensor.dim(); i-- > 1; expected *= tensor.size(i))
    if (tensor.size(i) != 1 && tensor.stride(i) != expected) return false;
  return true;
}

inline int64_t row_width(const Tensor &tensor) {
  int64_t width = 1;
  for (int64_t d = 1; d < tensor.dim(); ++d) width = times(width, tensor.size(d));
  return width;
}

// (N, ...) as (N, width): a view, or a copy where the elements of a row are apart.
inline Tensor flat(const char *name, size_t i, const Tensor &tensor) {
  if (tensor.dim() == 2 && is_dense(tensor)) return tensor;
  if (tensor.dim() < 2) expect_dim(element(name, i), tensor, 2);
  Tensor rows = is_dense(tensor) ? tensor : torch::stable::contiguous(tensor);
  return view_of(rows, {rows.size(0), row_width(rows)}, {rows.stride(0), 1}, 0);
}

inline Tensors flat(const char *name, const Tensors &tensors) {
  Tensors rows;
  for (size_t i = 0; i < tensors.size(); ++i) rows.push_back(flat(name, i, tensors[i]));
  return rows;
}

// ---- Rows of tensors -------------------------------------------------------

inline void expect_cut(const Cuts &cuts, int64_t i, const Name &name, int64_t rows) {
  const Cut &cut = cuts.data[i];
  if (cut.row < 0 || cut.rows < 0 || cut.rows > rows - cut.row)
    refuse("cuts[", i, "] is rows [", cut.row, ", ", cut.row, " + ", cut.rows, ") of ", name,
           ", expected rows of [0, ", rows, ")");
}

inline Tensor rows_of(const Tensor &tensor, const Cut &cut) {
  if (cut.rows == tensor.size(0)) return tensor;
  Sizes sizes = sizes_of(tensor);
  Sizes strides(tensor.strides().begin(), tensor.strides().end());
  sizes[0] = cut.rows;
  return view_of(tensor, sizes, strides, cut.row * strides[0]);
}

// Views of the rows of each cut, of all tensors, then those of the next cut.
inline Tensors cut(Tensors tensors, Tensor table) {
  Cuts cuts = cuts_of(table);
  for (size_t t = 0; t < tensors.size(); ++t) expect_rows(element("tensors", t), tensors[t]);
  Tensors views;
  views.reserve(tensors.size() * static_cast<size_t>(cuts.n));
  for (int64_t i = 0; i < cuts.n; ++i)
    for (size_t t = 0; t < tensors.size(); ++t) {
      expect_cut(cuts, i, element("tensors", t), tensors[t].size(0));
      views.push_back(rows_of(tensors[t], cuts.data[i]));
    }
  return views;
}

// Columns of rows (N, width), from the first of them on, as (rows of the cut, ...).
inline Tensor column_view(const Tensor &rows, const Cut &cut, int64_t first, Sizes sizes) {
  sizes[0] = cut.rows;
  Sizes strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 2;) strides[d - 1] = strides[d] * sizes[d];
  strides[0] = rows.stride(0);
  return view_of(rows, sizes, strides, cut.row * strides[0] + first);
}

// All rows as columns side by side, each shaped as one of these.
inline Tensors columns_beside(const char *name, const Tensor &rows, const Tensors &like) {
  Tensors views;
  expect_contiguous(name, rows);
  int64_t width = 0;
  for (const Tensor &one : like) width += row_width(one);
  expect_sizes(name, rows, {-1, width});
  int64_t first = 0;
  for (const Tensor &one : like) {
    views.push_back(column_view(rows, {0, rows.size(0)}, first, sizes_of(one)));
    first += row_width(one);
  }
  return views;
}

// ---- On their way ----------------------------------------------------------

// Rows packed to be sent, and room for those that will be received.
template <class Device>
std::tuple<Tensor, Tensor> pack_to_send(Tensors sources, Tensor segments, int64_t sent_rows,
                                        int64_t received_rows) {
  expect_at_least("received_rows", received_rows, 0);
  Tensor sent = pack<Device>(flat("sources", sources), segments, sent_rows);
  return {sent, fresh(sent, {received_rows, sent.size(1)})};
}

// Sums, packed to be sent.
template <class Device>
Tensor reduce_to_send(Tensors parts, Tensor runs, int64_t columns, int64_t sent_rows) {
  return reduce<Device>(flat("parts", parts), runs, sent_rows, columns);
}

// Received rows of keys (heads, head_dim) beside values (heads, value_dim), arranged where there
// are segments: keys and values of each cut.
template <class Device>
Tensors arrive(Tensor received, Tensor segments, int64_t rows, int64_t heads, int64_t head_dim,
               int64_t value_dim, Tensor table) {
  expect_at_least("heads", heads, 0);
  expect_at_least("head_dim", head_dim, 0);
  expect_at_least("value_dim", value_dim, 0);
  expect_sizes("received", received, {-1, times(heads, added(head_dim, value_dim))});
  expect_contiguous("received", received);
  expect_dim("segments", segments, 2);
  Cuts cuts = cuts_of(table);
  Tensor keys = segments.size(0) > 0 ? pack<Device>({received}, segments, rows) : received;
  Tensors views;
  views.reserve(2 * static_cast<size_t>(cuts.n));
  for (int64_t i = 0; i < cuts.n; ++i) {
    expect_cut(cuts, i, "received", keys.size(0));
    views.push_back(column_view(keys, cuts.data[i], 0, {0, heads, head_dim}));
    views.push_back(column_view(keys, cuts.data[i], heads * head_dim, {0, heads, value_dim}));
  }
  return views;
}

// ---- Sums ------------------------------------------------------------------

// Gradients summed, and rounded once: those of this rank's calls, (N, heads, size) in columns, and
// home, where the columns of what others sent, already rounded, lie side by side. With cos and sin,
// the first column is turned back. Views of the sums, a column each, shaped as the parts.
template <class Device>
Tensors sum_gradients(Tensors parts, std::optional<Tensor> home, Tensor runs, int64_t rows,
                      int64_t columns, std::optional<Tensor> cos, std::optional<Tensor> sin,
                      bool interleaved) {
  Tensors given = flat("parts", parts);
  if (cos.has_value() != sin.has_value())
    refuse(cos ? "sin" : "cos", " is None, expected a tensor as ", cos ? "cos" : "sin",
           " is, or None for both");
  if (columns < 1 || static_cast<int64_t>(given.size()) < columns)
    refuse("columns is ", columns, ", expected from 1 to the ", given.size(), " tensors of parts");
  if (home)
    for (Tensor &column :
         columns_beside("home", *home, Tensors(given.begin(), given.begin() + columns)))
      given.push_back(std::move(column));
  Tensor out = cos ? reduce_rotated<Device>(given, runs, rows, columns, *cos, *sin,
                                            parts[0].size(-1), 1, interleaved, true)
                   : reduce<Device>(given, runs, rows, columns);
  return columns_beside("out", out, Tensors(parts.begin(), parts.begin() + columns));
}

// ---- Totals ----------------------------------------------------------------
//
// What the launches of some stages gave goes into a total before those of further stages begin.

// A total of parts of a dtype and with so many heads of so many elements, beside the first of them.
inline void expect_total(const Tensor &total, hcp_dtype dtype, const char *first_name,
                         const Tensor &first, int64_t heads, int64_t head_dim) {
  expect_sizes("total", total, {-1, heads, head_dim});
  expect_dtype("total", total, wide_dtype(dtype));
  expect_same_device("total", total, first_name, first);
  expect_contiguous("total", total);
}

inline const void *total_lse_of(const Tensor &lse, hcp_dtype dtype, const Tensor &total) {
  expect_sizes("total_lse", lse, {total.size(0), total.size(1)});
  expect_dtype("total_lse", lse, wide_dtype(dtype));
  expect_same_device("total_lse", lse, "total", total);
  expect_contiguous("total_lse", lse);
  return lse.const_data_ptr();
}

// Parts merged into a total, in its place; without total_lse it holds nothing yet. The log-sum-exp
// of both.
template <class Device>
Tensor merge_on(Tensor total, std::optional<Tensor> total_lse, Tensors outs, Tensors lses,
                Tensor runs) {
  Parts parts = parts_of(outs, lses);
  expect_total(total, parts.dtype, "outs[0]", outs[0], parts.heads, parts.head_dim);
  int64_t rows = total.size(0);
  hcp_merge call = merge_of(parts, runs_of(runs, parts.rows, rows), rows);
  if (total_lse) call.total_lse = total_lse_of(*total_lse, parts.dtype, total);
  call.total = total.const_data_ptr();
  Tensor lse = fresh(lses[0], {rows, parts.heads});
  Device(outs[0]).merge_on(&call, total.mutable_data_ptr(), lse.mutable_data_ptr());
  return lse;
}

// A total merged with the last parts, of their dtype; and its log-sum-exp.
template <class Device>
std::tuple<Tensor, Tensor> merge_last(Tensor total, Tensor total_lse, Tensors outs, Tensors lses,
                                      Tensor runs) {
  Parts parts = parts_of(outs, lses);
  expect_total(total, parts.dtype, "outs[0]", outs[0], parts.heads, parts.head_dim);
  int64_t rows = total.size(0);
  hcp_merge call = merge_of(parts, runs_of(runs, parts.rows, rows), rows);
  call.total = total.const_data_ptr();
  call.total_lse = total_lse_of(total_lse, parts.dtype, total);
  Tensor out = fresh(outs[0], {rows, parts.heads, parts.head_dim});
  Tensor lse = fresh(lses[0], {rows, parts.heads});
  Device(outs[0]).merge(&call, out.mutable_data_ptr(), lse.mutable_data_ptr());
  return {out, lse};
}

// Parts (N, heads, size) summed into a total, in its place; unless begun, it holds nothing yet.
template <class Device>
void sum_on(Tensor total, bool begun, Tensors parts, Tensor runs) {
  Tensors given = flat("parts", parts);
  Summands summands = summands_of(given, 1);
  expect_dim("parts[0]", parts[0], 3);
  expect_total(total, summands.dtype, "parts[0]", parts[0], parts[0].size(1), parts[0].size(2));
  Runs records = runs_of(runs, summands.rows, total.size(0));
  hcp_column out = output_of("total", flat("total", 0, total));
  hcp_sum sum = sum_of(summands, records, total.size(0));
  if (begun) {
    Device(total).reduce_on(&sum, out);
    return;
  }
  hcp_cast cast = {summands.dtype, dtype_of("total", total)};
  Device(total).reduce(&sum, cast.to == cast.from ? nullptr : &cast, out);
}

template <class Device>
void implement_layer(torch::stable::detail::StableLibrary &m) {
  m.impl("cut", TORCH_BOX(&cut));
  m.impl("pack_to_send", TORCH_BOX(&pack_to_send<Device>));
  m.impl("reduce_to_send", TORCH_BOX(&reduce_to_send<Device>));
  m.impl("arrive", TORCH_BOX(&arrive<Device>));
  m.impl("sum_gradients", TORCH_BOX(&sum_gradients<Device>));
  m.impl("merge_on", TORCH_BOX(&merge_on<Device>));
  m.impl("merge_last", TORCH_BOX(&merge_last<Device>));
  m.impl("sum_on", TORCH_BOX(&sum_on<Device>));
}

}  // namespace hcp
