// arguments.cpp - arguments of the operators, checked and turned into those of the kernels.
#include "arguments.h"

#include <numeric>

namespace hcp {

using torch::headeronly::ScalarType;

std::ostream &operator<<(std::ostream &out, const Name &name) {
  out << name.text;
  return name.element < 0 ? out : out << "[" << name.element << "]";
}

std::string shape_text(const Sizes &sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i)
    text += (i ? ", " : "") + (sizes[i] < 0 ? std::string("any") : std::to_string(sizes[i]));
  return text + ")";
}

Sizes sizes_of(const Tensor &tensor) { return Sizes(tensor.sizes().begin(), tensor.sizes().end()); }

// ---- Checks of one property ------------------------------------------------

static std::optional<hcp_dtype> find_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return HCP_FLOAT64;
    case ScalarType::Float:
      return HCP_FLOAT32;
    case ScalarType::BFloat16:
      return HCP_BFLOAT16;
    case ScalarType::Half:
      return HCP_FLOAT16;
    default:
      return {};
  }
}

static const char *const FLOATS = "Double, Float, BFloat16 or Half";

hcp_dtype dtype_of(const Name &name, const Tensor &tensor) {
  std::optional<hcp_dtype> dtype = find_dtype(tensor.scalar_type());
  if (!dtype)
    refuse(name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()), ", expected ",
           FLOATS);
  return *dtype;
}

std::optional<hcp_cast> cast_of(const Name &name, const Tensor &tensor, const Dtype &dtype) {
  ScalarType own = tensor.scalar_type();
  if (!dtype || *dtype == own) return {};
  std::optional<hcp_dtype> from = find_dtype(own), to = find_dtype(*dtype);
  if (!from)
    refuse(name, " has dtype ", torch::headeronly::toString(own), ", expected ", FLOATS,
           " for a result of dtype ", torch::headeronly::toString(*dtype),
           ": cast it before, by .to(), or leave dtype out");
  if (!to)
    refuse("dtype is ", torch::headeronly::toString(*dtype), ", expected ", FLOATS, " where ", name,
           " has dtype ", torch::headeronly::toString(own),
           ": leave dtype out and cast the result, by .to()");
  return hcp_cast{*from, *to};
}

void expect_dtype(const Name &name, const Tensor &tensor, ScalarType dtype) {
  if (tensor.scalar_type() == dtype) return;
  refuse(name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()), ", expected ",
         torch::headeronly::toString(dtype));
}

void expect_same_dtype(const Name &name, const Tensor &tensor, const Name &like_name,
                       const Tensor &like) {
  if (tensor.scalar_type() == like.scalar_type()) return;
  refuse(name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()), ", expected ",
         torch::headeronly::toString(like.scalar_type()), " as ", like_name);
}

static std::string device_text(const Tensor &tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "neither cpu nor cuda";
}

void expect_same_device(const Name &name, const Tensor &tensor, const Name &like_name,
                        const Tensor &like) {
  if (tensor.device() == like.device()) return;
  refuse(name, " is on device ", device_text(tensor), ", expected ", device_text(like), " as ",
         like_name);
}

void expect_dim(const Name &name, const Tensor &tensor, int64_t dim) {
  if (tensor.dim() == dim) return;
  refuse(name, " has shape ", shape_text(sizes_of(tensor)), ", expected ", dim, " dimensions");
}

void expect_rows(const Name &name, const Tensor &tensor) {
  if (tensor.dim() == 0) refuse(name, " has shape (), expected rows: at least 1 dimension");
}

void expect_sizes(const Name &name, const Tensor &tensor, const Sizes &sizes) {
  bool same = tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; same && i < sizes.size(); ++i)
    same = sizes[i] < 0 || sizes[i] == tensor.sizes()[i];
  if (!same)
    refuse(name, " has shape ", shape_text(sizes_of(tensor)), ", expected ", shape_text(sizes));
}

void expect_contiguous(const Name &name, const Tensor &tensor) {
  if (tensor.is_contiguous()) return;
  Sizes strides(tensor.strides().begin(), tensor.strides().end());
  refuse(name, " has strides ", shape_text(strides), " for shape ", shape_text(sizes_of(tensor)),
         ", expected contiguous");
}

// Elements of a row side by side: the kernels stride over everything else.
static void expect_dense_rows(const Name &name, const Tensor &tensor) {
  int64_t last = tensor.dim() - 1;
  if (tensor.numel() == 0 || tensor.size(last) == 1 || tensor.stride(last) == 1) return;
  refuse(name, " has stride ", tensor.stride(last), " in its last dimension, expected 1");
}

void expect_at_least(const Name &name, int64_t value, int64_t least) {
  if (value < least) refuse(name, " is ", value, ", expected >= ", least);
}

int64_t added(int64_t a, int64_t b) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum))
    refuse("sizes are ", a, " and ", b, ", expected a sum below 2^63");
  return sum;
}

int64_t times(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product))
    refuse("sizes are ", a, " and ", b, ", expected a product below 2^63");
  return product;
}

static void expect_some(const char *name, const Tensors &tensors) {
  if (tensors.empty())
    refuse(name, " has 0 tensors, expected >= 1: the first gives the dtype and the width");
}

// ---- Arguments of the operators --------------------------------------------

// Kernels only read it: what they write to is an output_of.
hcp_column column_of(const Name &name, const Tensor &tensor) {
  expect_dim(name, tensor, 2);
  expect_dense_rows(name, tensor);
  int64_t bytes = static_cast<int64_t>(tensor.element_size());
  return {const_cast<void *>(tensor.const_data_ptr()), times(tensor.stride(0), bytes),
          times(tensor.size(1), bytes)};
}

hcp_column output_of(const Name &name, const Tensor &tensor) {
  hcp_column column = column_of(name, tensor);
  if (tensor.size(0) > 1 && column.row_stride_bytes < column.row_bytes)
    refuse(name, " has rows ", column.row_stride_bytes, " bytes apart, expected at least ",
           column.row_bytes, ": rows that overlap cannot be written");
  column.data = tensor.mutable_data_ptr();
  return column;
}

std::vector<hcp_column> columns_of(const char *name, const Tensors &tensors) {
  expect_some(name, tensors);
  Name first = element(name, 0);
  std::vector<hcp_column> columns;
  for (size_t i = 0; i < tensors.size(); ++i) {
    columns.push_back(column_of(element(name, i), tensors[i]));
    expect_sizes(element(name, i), tensors[i], {tensors[0].size(0), -1});
    expect_same_dtype(element(name, i), tensors[i], first, tensors[0]);
    expect_same_device(element(name, i), tensors[i], first, tensors[0]);
  }
  return columns;
}

int64_t width_of(const Tensors &tensors) {
  int64_t width = 0;
  for (const Tensor &tensor : tensors) width = added(width, tensor.size(1));
  return width;
}

// Counts down, because the sum of the widths could overflow.
static void expect_widths(const Name &name, const Tensor &tensor, const Sizes &widths) {
  int64_t left = tensor.size(1);
  for (size_t i = 0; i < widths.size(); ++i) {
    expect_at_least(element("widths", i), widths[i], 0);
    if (widths[i] > left) {
      left = -1;
      break;
    }
    left -= widths[i];
  }
  if (left != 0)
    refuse("widths are ", shape_text(widths), ", expected to sum to the ", tensor.size(1),
           " columns of ", name);
}

std::vector<hcp_column> split_column(const Name &name, const Tensor &tensor, const Sizes &widths) {
  hcp_column whole = column_of(name, tensor);
  expect_widths(name, tensor, widths);
  std::vector<hcp_column> columns;
  for (int64_t width : widths) {
    whole.row_bytes = width * static_cast<int64_t>(tensor.element_size());
    columns.push_back(whole);
    whole.data = static_cast<char *>(whole.data) + whole.row_bytes;
  }
  return columns;
}

template <class Record>
static Records<Record> records_of(const char *name, const Tensor &tensor) {
  constexpr int64_t words = sizeof(Record) / sizeof(int64_t);
  expect_dtype(name, tensor, ScalarType::Long);
  expect_sizes(name, tensor, {-1, words});
  if (!tensor.is_cpu())
    refuse(name, " is on device ", device_text(tensor), ", expected cpu: it is checked there");
  expect_contiguous(name, tensor);
  return {static_cast<const Record *>(tensor.const_data_ptr()), tensor.size(0)};
}

void expect_ok(hcp_status status, const hcp_error &error) {
  if (status != HCP_OK) throw std::runtime_error(error.message);
}

Segments segments_of(const Tensor &tensor, int64_t rows, int64_t out_rows) {
  Segments segments = records_of<hcp_segment>("segments", tensor);
  expect_at_least("rows", out_rows, 0);
  hcp_error error;
  expect_ok(hcp_check_segments(segments.data, segments.n, rows, out_rows, &error), error);
  return segments;
}

Runs runs_of(const Tensor &tensor, const Sizes &part_rows, int64_t out_rows) {
  Runs runs = records_of<hcp_run>("runs", tensor);
  expect_at_least("rows", out_rows, 0);
  hcp_error error;
  expect_ok(hcp_check_runs(runs.data, runs.n, part_rows.data(),
                           static_cast<int64_t>(part_rows.size()), out_rows, &error),
            error);
  return runs;
}

// All that an address itself can tell.
static void expect_word(const Name &name, const void *word) {
  uintptr_t address = reinterpret_cast<uintptr_t>(word);
  if (address == 0 || address % alignof(uint64_t) != 0)
    refuse(name, " has a word at ", address, ", expected the address of 8 aligned bytes");
}

Signals signals_of(const char *name, const Tensor &tensor, int64_t counts) {
  Signals signals = records_of<hcp_signal>(name, tensor);
  for (int64_t i = 0; i < signals.n; ++i) {
    const hcp_signal &signal = signals.data[i];
    expect_word({name, i}, signal.word);
    if (signal.count < 0 || signal.count >= counts)
      refuse(name, "[", i, "] counts in place ", signal.count, ", expected < ", counts);
  }
  return signals;
}

Cuts cuts_of(const Tensor &tensor) { return records_of<Cut>("cuts", tensor); }

Blocks blocks_of(const Tensor &tensor) {
  Blocks blocks = records_of<Block>("blocks", tensor);
  if (blocks.n % 2 != 0)
    refuse("blocks has ", blocks.n, " records, expected as many of queries as of keys");
  for (int64_t i = 0; i < blocks.n; ++i) {
    const Block &block = blocks.data[i], &first = blocks.data[i < blocks.n / 2 ? 0 : blocks.n / 2];
    if (block.first < 0 || block.heads < 0 || block.heads > block.most || block.most != first.most)
      refuse("blocks[", i, "] is ", block.heads, " heads from ", block.first, " on in a block of ",
             block.most, ", expected 0 or more in one of ", first.most);
  }
  return blocks;
}

Results results_of(const Tensor &tensor) {
  Results results = records_of<Result>("results", tensor);
  for (int64_t i = 0; i < results.n; ++i) {
    const Result &result = results.data[i];
    if (result.kind < Result::ROWS || result.kind > Result::ZEROS)
      refuse("results[", i, "] is of kind ", result.kind, ", expected 0 (rows), 1 (float32) or ",
             "2 (float32 zeros)");
    if (result.rows < 0 || result.heads < 0 || result.size < 0)
      refuse("results[", i, "] is ", result.rows, " x ", result.heads, " x ", result.size,
             ", expected sizes >= 0");
  }
  return results;
}

Moves moves_of(const Tensor &tensor, int64_t rows) {
  Moves moves = records_of<Move>("moves", tensor);
  for (int64_t i = 0; i < moves.n; ++i) {
    const Move &move = moves.data[i];
    if (move.peer < 0 || move.row < 0 || move.rows < 0 || move.rows > rows - move.row)
      refuse("moves[", i, "] is rows [", move.row, ", ", move.row, " + ", move.rows, ") for peer ",
             move.peer, ", expected rows of [0, ", rows, ")");
  }
  return moves;
}

ScalarType wide_dtype(hcp_dtype dtype) {
  return dtype == HCP_FLOAT64 ? ScalarType::Double : ScalarType::Float;
}

static hcp_part part_of(const Tensor &out, const Tensor &lse) {
  return {out.const_data_ptr(), out.stride(0), out.stride(1),
          lse.const_data_ptr(), lse.stride(0), lse.stride(1)};
}

static void expect_part(const Parts &all, const Tensor &out, const Tensor &lse, const Tensor &first,
                        size_t p) {
  Name out_name = element("outs", p), lse_name = element("lses", p);
  expect_sizes(out_name, out, {-1, all.heads, all.head_dim});
  expect_same_dtype(out_name, out, "outs[0]", first);
  expect_same_device(out_name, out, "outs[0]", first);
  expect_dense_rows(out_name, out);
  expect_sizes(lse_name, lse, {out.size(0), all.heads});
  expect_dtype(lse_name, lse, wide_dtype(all.dtype));
  expect_same_device(lse_name, lse, "outs[0]", first);
}

Parts parts_of(const Tensors &outs, const Tensors &lses) {
  expect_some("outs", outs);
  if (lses.size() != outs.size())
    refuse("lses has ", lses.size(), " tensors, expected ", outs.size(), " as outs");
  expect_dim("outs[0]", outs[0], 3);
  Parts all = {dtype_of("outs[0]", outs[0]), outs[0].size(1), outs[0].size(2), {}, {}};
  for (size_t p = 0; p < outs.size(); ++p) {
    expect_part(all, outs[p], lses[p], outs[0], p);
    all.rows.push_back(outs[p].size(0));
    all.parts.push_back(part_of(outs[p], lses[p]));
  }
  return all;
}

static void expect_summand(const Tensors &parts, size_t i, size_t columns) {
  size_t first_column = i - i % columns;
  Name name = element("parts", i);
  expect_sizes(name, parts[i], {parts[first_column].size(0), parts[i % columns].size(1)});
  expect_same_dtype(name, parts[i], "parts[0]", parts[0]);
  expect_same_device(name, parts[i], "parts[0]", parts[0]);
}

Summands summands_of(const Tensors &parts, int64_t columns) {
  expect_some("parts", parts);
  expect_at_least("columns", columns, 1);
  size_t n = static_cast<size_t>(columns);
  if (parts.size() % n != 0)
    refuse("parts has ", parts.size(), " tensors, expected a multiple of columns = ", columns);
  Summands all = {dtype_of("parts[0]", parts[0]), static_cast<int32_t>(columns), 0, {}, {}};
  for (size_t i = 0; i < parts.size(); ++i)
    all.columns.push_back(column_of(element("parts", i), parts[i]));
  for (size_t i = 0; i < parts.size(); ++i) expect_summand(parts, i, n);
  for (size_t i = 0; i < n; ++i) all.width = added(all.width, parts[i].size(1));
  for (size_t i = 0; i < parts.size(); i += n) all.rows.push_back(parts[i].size(0));
  return all;
}

hcp_rotation rotation_of(const Tensor &cos, const Tensor &sin, hcp_dtype dtype, const Tensor &like,
                         int64_t rows, int64_t head_dim, bool interleaved, bool inverse) {
  expect_at_least("head_dim", head_dim, 1);
  expect_dim("cos", cos, 2);
  int64_t turned = cos.size(1);
  if (turned % 2 != 0 || turned > head_dim)
    refuse("cos has ", turned, " columns, expected an even number up to the head size ", head_dim);
  const Tensor *both[] = {&cos, &sin};
  for (int i = 0; i < 2; ++i) {
    const char *name = i == 0 ? "cos" : "sin";
    expect_sizes(name, *both[i], {rows, turned});
    expect_dtype(name, *both[i], wide_dtype(dtype));
    expect_same_device(name, *both[i], "the rows", like);
    expect_contiguous(name, *both[i]);
  }
  return {cos.const_data_ptr(), sin.const_data_ptr(), head_dim, turned / 2, interleaved, inverse};
}

hcp_heads heads_of(const Name &name, const Tensor &tensor) {
  expect_dim(name, tensor, 3);
  expect_dense_rows(name, tensor);
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

}  // namespace hcp
