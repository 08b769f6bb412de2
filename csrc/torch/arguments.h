// arguments.h - arguments of the operators, checked and turned into what the
// kernels take. Every device's operators use the same checks.
//
// A refusal is a std::runtime_error, RuntimeError in Python, that says the
// argument, its value and the expectation.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "hcp/kernels.h"

namespace hcp {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Sizes = std::vector<int64_t>;

// A result's dtype where it is not the inputs' own. A ScalarType? of a schema: torch 2.10 and later
// pass it by a pointer to the dtype's code, NULL for None.
using Dtype = std::optional<torch::headeronly::ScalarType>;

template <class... Words>
[[noreturn]] void refuse(const Words &...words) {
  std::ostringstream text;
  (text << ... << words);
  throw std::runtime_error(text.str());
}

// An argument, or its i-th element, as messages say it: put together only for them.
struct Name {
  Name(const char *argument, int64_t i = -1) : text(argument), element(i) {}
  const char *text;
  int64_t element;
};
std::ostream &operator<<(std::ostream &out, const Name &name);
inline Name element(const char *name, size_t i) { return {name, static_cast<int64_t>(i)}; }

// Borrowed from the tensor that holds it.
template <class Record>
struct Records {
  const Record *data;
  int64_t n;
};
using Segments = Records<hcp_segment>;
using Runs = Records<hcp_run>;
using Signals = Records<hcp_signal>;
// Rows of a buffer that a peer is sent, or sends.
struct Move {
  int64_t peer, row, rows;
};
using Moves = Records<Move>;
// Rows of a tensor.
struct Cut {
  int64_t row, rows;
};
using Cuts = Records<Cut>;
// Heads of a tensor that one rank computes, in a block that has room for `most`.
struct Block {
  int64_t first, heads, most;
};
using Blocks = Records<Block>;
// What a library's call gives: rows x heads x size in the dtype of its rows, or rows x heads in
// float32.
struct Result {
  enum Kind : int64_t { ROWS, FLOATS, ZEROS };
  int64_t kind, rows, heads, size;
};
using Results = Records<Result>;

Sizes sizes_of(const Tensor &tensor);
// (2, 3), as messages say it.
std::string shape_text(const Sizes &sizes);

// ---- Checks of one property ------------------------------------------------

// Gradients, merges and sums need one of HCP_DTYPES.
hcp_dtype dtype_of(const Name &name, const Tensor &tensor);
// What sums of a dtype, and log-sum-exps, are in.
torch::headeronly::ScalarType wide_dtype(hcp_dtype dtype);
// Which cast makes the dtype of a tensor; nothing where it has it, whichever that is.
std::optional<hcp_cast> cast_of(const Name &name, const Tensor &tensor, const Dtype &dtype);
void expect_dtype(const Name &name, const Tensor &tensor, torch::headeronly::ScalarType dtype);
void expect_same_dtype(const Name &name, const Tensor &tensor, const Name &like_name,
                       const Tensor &like);
void expect_same_device(const Name &name, const Tensor &tensor, const Name &like_name,
                        const Tensor &like);
void expect_dim(const Name &name, const Tensor &tensor, int64_t dim);
// Any dimensions, the first of which is rows.
void expect_rows(const Name &name, const Tensor &tensor);
// -1 in sizes stands for any.
void expect_sizes(const Name &name, const Tensor &tensor, const Sizes &sizes);
void expect_contiguous(const Name &name, const Tensor &tensor);
void expect_at_least(const Name &name, int64_t value, int64_t least);

// Throws the error of a call of the core that has failed.
void expect_ok(hcp_status status, const hcp_error &error);

// Sums and products of sizes, refused beyond 63 bits: a tensor without rows may be that wide.
int64_t added(int64_t a, int64_t b);
int64_t times(int64_t a, int64_t b);

// ---- Arguments of the operators --------------------------------------------

// rows x width, elements of a row side by side.
hcp_column column_of(const Name &name, const Tensor &tensor);
// The same to be written: a lazy copy gets memory of its own.
hcp_column output_of(const Name &name, const Tensor &tensor);
// Not empty, of one dtype, device and number of rows.
std::vector<hcp_column> columns_of(const char *name, const Tensors &tensors);
// Consecutive columns of one tensor; the widths sum to its width.
std::vector<hcp_column> split_column(const Name &name, const Tensor &tensor, const Sizes &widths);
int64_t width_of(const Tensors &tensors);

Segments segments_of(const Tensor &tensor, int64_t rows, int64_t out_rows);
Runs runs_of(const Tensor &tensor, const Sizes &part_rows, int64_t out_rows);
// Of so many counts.
Signals signals_of(const char *name, const Tensor &tensor, int64_t counts);
Moves moves_of(const Tensor &tensor, int64_t rows);
Cuts cuts_of(const Tensor &tensor);
// Of query heads, then as many of key-value heads; all of a kind have room for as many.
Blocks blocks_of(const Tensor &tensor);
Results results_of(const Tensor &tensor);

// Partial results of attention: parts[p] is outs[p] (rows x heads x head_dim)
// with lses[p] (rows x heads).
struct Parts {
  hcp_dtype dtype;
  int64_t heads, head_dim;
  Sizes rows;
  std::vector<hcp_part> parts;
};
Parts parts_of(const Tensors &outs, const Tensors &lses);

// Parts of several columns each: columns[p * n_columns + c].
struct Summands {
  hcp_dtype dtype;
  int32_t n_columns;
  int64_t width;
  Sizes rows;
  std::vector<hcp_column> columns;
};
Summands summands_of(const Tensors &parts, int64_t columns);

// cos and sin, (rows, elements of a head that turn), for heads of head_dim.
hcp_rotation rotation_of(const Tensor &cos, const Tensor &sin, hcp_dtype dtype, const Tensor &like,
                         int64_t rows, int64_t head_dim, bool interleaved, bool inverse);
// rows x heads x head_dim, elements of a head side by side.
hcp_heads heads_of(const Name &name, const Tensor &tensor);

}  // namespace hcp
