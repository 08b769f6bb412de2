// blocks.h - rows of some heads that ranks exchange as blocks.
//
// A block is the columns of one rank's heads: those of several tensors (rows, heads, ...) of any
// dtype, side by side, each filled up to whole vectors of 16 bytes and to the heads of the rank
// with the most. A tensor that lies in memory as its blocks do is read there; others are copied.
//
// The host's time counts here: no view is made of any block. Only hcp/attention/head_reads.py and
// the transports call these operators: they have no gradients, and no shapes without data.
#pragma once

#include "calls.h"
#include "shared.h"

namespace hcp {

enum { VECTOR_BYTES = 16, WORD_BYTES = 8 };

// One tensor's columns of so many blocks. A row of a block has width elements that heads fill, and
// whole vectors of memory.
struct BlockColumn {
  const Block *blocks;
  int64_t n, size, item, vectors;

  BlockColumn(const Name &name, const Tensor &tensor, const Blocks &all, bool by_query)
      : blocks(all.data + (by_query ? 0 : all.n / 2)), n(all.n / 2), size(1) {
    if (tensor.dim() < 2) expect_dim(name, tensor, 2);
    for (int64_t d = 2; d < tensor.dim(); ++d) size = times(size, tensor.size(d));
    item = static_cast<int64_t>(tensor.element_size());
    int64_t bytes = times(times(n > 0 ? blocks[0].most : 0, size), item);
    vectors = added(bytes, VECTOR_BYTES - 1) / VECTOR_BYTES;
  }

  int64_t width() const { return n > 0 ? blocks[0].most * size : 0; }
  int64_t bytes() const { return times(vectors, VECTOR_BYTES); }
  bool is_filled() const { return width() * item == bytes(); }

  // Whether blocks are as wide as each other, and their heads side by side.
  bool is_even() const {
    for (int64_t i = 0; i < n; ++i)
      if (blocks[i].heads != blocks[i].most ||
          blocks[i].first != blocks[0].first + i * blocks[i].most)
        return false;
    return true;
  }

  int64_t heads() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum = added(sum, blocks[i].heads);
    return sum;
  }
};

// Vectors [low, high) of the rows of a tensor as blocks, in its own memory or in a copy: none are
// laid out before some are taken.
struct GivenColumn {
  BlockColumn column;
  Tensor memory;
  const char *data = nullptr;
  int64_t rows, low = 0, high = 0, block_bytes = 0, row_bytes = 0;

  GivenColumn(const Name &name, const Tensor &tensor, const Blocks &all, bool by_query)
      : column(name, tensor, all, by_query), memory(tensor), rows(tensor.size(0)) {
    for (int64_t i = 0; i < column.n; ++i)
      if (column.blocks[i].heads > tensor.size(1) - column.blocks[i].first)
        refuse(name, " has ", tensor.size(1), " heads, expected those of blocks[", i,
               "]: ", column.blocks[i].heads, " from ", column.blocks[i].first, " on");
  }

  // Of vectors [from, until), those that it has.
  void take(int64_t from, int64_t until) {
    low = std::max<int64_t>(from, 0);
    high = std::min(until, column.vectors);
    if (!is_taken()) return;
    if (lies_in_blocks())
      block_bytes = column.bytes();
    else
      copy(memory);
  }

  bool is_taken() const { return low < high; }

  bool lies_in_blocks() {
    if (!column.is_even() || !column.is_filled() || !is_dense(memory)) return false;
    int64_t first = column.n > 0 ? column.blocks[0].first * column.size * column.item : 0;
    data = static_cast<const char *>(memory.const_data_ptr()) + first;
    row_bytes = times(memory.stride(0), column.item);
    return reinterpret_cast<uintptr_t>(data) % VECTOR_BYTES == 0 && row_bytes % VECTOR_BYTES == 0;
  }

  void copy(Tensor tensor) {
    int64_t elements = column.bytes() / column.item;
    memory = fresh(tensor, {column.n, rows, elements});
    bool even = column.is_even();
    if (!(even && column.is_filled()) && aoti_torch_zero_(memory.get()) != 0)
      refuse("torch wrote no zeros; its own message says why");
    for (int64_t i = 0; i < column.n; i += even ? column.n : 1)
      copy_blocks(tensor, i, even ? column.n : 1, elements);
    data = static_cast<const char *>(memory.const_data_ptr());
    row_bytes = column.bytes();
    block_bytes = times(rows, row_bytes);
  }

  void copy_blocks(const Tensor &tensor, int64_t first, int64_t count, int64_t elements) {
    const Block &block = column.blocks[first];
    Sizes sizes = {count, rows, block.heads}, dense(static_cast<size_t>(tensor.dim()) + 1, 1);
    Sizes strides = {block.heads * tensor.stride(1), tensor.stride(0), tensor.stride(1)};
    for (int64_t d = 2; d < tensor.dim(); ++d) {
      sizes.push_back(tensor.size(d));
      strides.push_back(tensor.stride(d));
    }
    for (size_t d = sizes.size(); d-- > 3;) dense[d - 1] = dense[d] * sizes[d];
    dense[1] = elements;
    dense[0] = rows * elements;
    copied(view_of(memory, sizes, dense, first * rows * elements),
           view_of(tensor, sizes, strides, block.first * tensor.stride(1)));
  }

  hcp_column part(int64_t block) const {
    return {const_cast<char *>(data + block * block_bytes + low * VECTOR_BYTES), row_bytes,
            (high - low) * VECTOR_BYTES};
  }
};

// Some vectors of the blocks of all columns. Sums are of words: each has one part.
struct GivenBlocks {
  std::vector<GivenColumn> columns;
  int64_t vectors;

  GivenBlocks(const Tensors &tensors, const Blocks &blocks, int64_t by_query, int64_t begin,
              int64_t count)
      : vectors(count) {
    if (tensors.empty()) refuse("columns has 0 tensors, expected >= 1");
    int64_t of_all = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      Name name = element("columns", i);
      columns.emplace_back(name, tensors[i], blocks, static_cast<int64_t>(i) < by_query);
      of_all = added(of_all, columns[i].column.vectors);
      Sizes sizes = sizes_of(tensors[i]);
      sizes[0] = tensors[0].size(0);
      expect_sizes(name, tensors[i], sizes);
      expect_same_device(name, tensors[i], "columns[0]", tensors[0]);
    }
    if (begin < 0 || count < 0 || count > of_all - begin)
      refuse("vectors are ", count, " from ", begin, " on, expected some of ", of_all);
    for (GivenColumn &given : columns) {
      given.take(begin, begin + count);
      begin -= given.column.vectors;
    }
  }

  // Of blocks [from, until).
  Summands parts(int64_t from, int64_t until) const {
    Summands all = {HCP_FLOAT64, 0, times(vectors, VECTOR_BYTES / WORD_BYTES), {}, {}};
    for (int64_t block = from; block < until; ++block) {
      all.n_columns = 0;
      for (const GivenColumn &given : columns)
        if (given.is_taken()) {
          all.columns.push_back(given.part(block));
          ++all.n_columns;
        }
      all.rows.push_back(columns[0].rows);
    }
    return all;
  }
};

// What others have staged, into rows of bytes that this rank's own rows go into meanwhile.
struct BlockReading {
  Tensors given;
  Reduction sum;
  Signals before, after;
  int64_t next;
  uint32_t *progress;

  BlockReading(const Tensors &parts, const Tensor &runs, int64_t first, const Tensor &staged,
               const Tensor &done, const Tensor &ended, const Exchange &exchange, int64_t rows,
               int64_t words, hcp_column out, const Tensor &like)
      : given(flat("read_parts", parts)),
        before(signals_of("read_staged", staged, exchange.counts.n)),
        after(signals_of("read_done", done, exchange.counts.n)),
        next(first) {
    expect_at_least("next", next, 0);
    Summands summands = summands_of(given, 1);
    expect_sizes("read_parts[0]", given[0], {-1, words});
    expect_dtype("read_parts[0]", given[0], torch::headeronly::ScalarType::Double);
    expect_same_device("read_parts[0]", given[0], "columns[0]", like);
    progress = progress_of(ended, given[0]);
    if (before.n > static_cast<int64_t>(given.size()))
      refuse("read_staged has ", before.n, " owners, expected at most the ", given.size(),
             " parts that are read");
    sum = {summands, runs_of(runs, summands.rows, rows), rows, out};
  }

  template <class Device>
  void queue(const Device &device, const Exchange &exchange) const {
    hcp_sum read = sum.sum();
    hcp_staged staged = {exchange.awaited(before, exchange.tag, given[0]),
                         static_cast<int32_t>(next),
                         static_cast<int32_t>(static_cast<int64_t>(given.size()) - before.n),
                         sum.summands.rows.data(), true};
    device.read(&read, sum.out, &staged, counted(after, exchange.counts, HCP_READ_TAG), progress);
  }
};

// Stage some vectors of the blocks for those who read them, read what others have staged for this
// rank, and place its own block's rows meanwhile: rows of bytes, in the dtype of the first column.
//
// The reading stream follows the current one up to the staging. In a CUDA graph (not at_once) it
// follows the staging, too. A graph may run its branches one after the other, in any order: a rank
// that read first would wait for peers that wait for its rows.
template <class Device>
Tensor exchange_blocks(Tensors columns, Tensor blocks, int64_t by_query, int64_t first, int64_t own,
                       Tensor own_runs, int64_t rows, Tensor out, Tensor runs, Tensor freed,
                       Tensor staged, Tensor stage_progress, bool stages, Tensors read_parts,
                       Tensor read_runs, int64_t next, Tensor read_staged, Tensor read_done,
                       Tensor read_progress, bool at_once, Tensor counts, int64_t tag,
                       int64_t timeout_ns, Tensor failure, int64_t stream) {
  Exchange exchange(counts, stage_progress, tag, timeout_ns, failure);
  Blocks records = blocks_of(blocks);
  expect_dim("out", out, 2);
  expect_dtype("out", out, torch::headeronly::ScalarType::Double);
  expect_at_least("rows", rows, 0);
  int64_t words = out.size(1), row_bytes = times(words, WORD_BYTES);
  if (words == 0 || words % (VECTOR_BYTES / WORD_BYTES) != 0)
    refuse("out has ", words, " words in a row, expected vectors of ", VECTOR_BYTES, " bytes");
  GivenBlocks given(columns, records, by_query, first, row_bytes / VECTOR_BYTES);
  if (own < 0 || own >= records.n / 2)
    refuse("own is ", own, ", expected one of ", records.n / 2, " blocks");
  expect_same_device("out", out, "columns[0]", columns[0]);
  Tensor made = fresh(columns[0], {rows, row_bytes / given.columns[0].column.item});
  hcp_column target = {made.mutable_data_ptr(), row_bytes, row_bytes};
  std::optional<Staging> staging;
  if (stages)
    staging.emplace(out, Tensors{columns[0]}, given.parts(0, records.n / 2), runs, freed, staged,
                    stage_progress, exchange);
  std::optional<BlockReading> reading;
  if (!read_parts.empty())
    reading.emplace(read_parts, read_runs, next, read_staged, read_done, read_progress, exchange,
                    rows, words, target, columns[0]);
  Summands own_parts = given.parts(own, own + 1);
  Reduction placed = {own_parts, runs_of(own_runs, own_parts.rows, rows), rows, target};
  Device device(made);
  std::optional<Device> ahead;
  if (reading && at_once) ahead.emplace(made, stream);
  if (staging) staging->queue(device, exchange);
  if (reading && !at_once) ahead.emplace(made, stream);
  if (reading) reading->queue(*ahead, exchange);
  hcp_sum sum = placed.sum();
  if (placed.runs.n > 0) device.place(&sum, target);
  return made;
}

// The way back: rows of the blocks from each neighbour, one block after the other, as rows of all
// heads of each column (rows, heads, ...), in its dtype.
template <class Device>
Tensors join_blocks(Tensor rows, Tensors like, Tensor blocks, int64_t by_query) {
  Blocks records = blocks_of(blocks);
  int64_t n = records.n / 2, item = static_cast<int64_t>(rows.element_size()), offset = 0;
  expect_contiguous("rows", rows);
  expect_dim("rows", rows, 2);
  if (n == 0 || rows.size(0) % n != 0)
    refuse("rows has ", rows.size(0), " rows, expected as many of each of ", n, " blocks");
  std::vector<BlockColumn> columns;
  for (size_t i = 0; i < like.size(); ++i) {
    columns.emplace_back(element("like", i), like[i], records, static_cast<int64_t>(i) < by_query);
    expect_same_device(element("like", i), like[i], "rows", rows);
    offset = added(offset, columns[i].bytes());
  }
  int64_t row_bytes = times(rows.size(1), item), count = rows.size(0) / n;
  if (offset > row_bytes)
    refuse("like has columns of ", offset, " bytes, expected at most the ", row_bytes, " of rows");
  Tensors joined;
  const char *data = static_cast<const char *>(rows.const_data_ptr());
  for (size_t i = 0; i < like.size(); ++i) {
    const BlockColumn &column = columns[i];
    Sizes sizes = sizes_of(like[i]);
    sizes[0] = count;
    sizes[1] = column.heads();
    joined.push_back(fresh(like[i], sizes));
    std::vector<hcp_column> parts;
    for (int64_t block = 0; block < n; ++block)
      if (column.blocks[block].heads > 0)
        parts.push_back({const_cast<char *>(data + block * count * row_bytes), row_bytes,
                         column.blocks[block].heads * column.size * column.item});
    data += column.bytes();
    int64_t width = times(times(sizes[1], column.size), column.item);
    hcp_segment all = {0, count};
    hcp_column target = {joined.back().mutable_data_ptr(), width, width};
    if (width > 0 && count > 0)
      Device(rows).pack(nullptr, parts.data(), hcp::count(parts), &all, 1, target);
  }
  return joined;
}

template <class Device>
void implement_blocks(torch::stable::detail::StableLibrary &m) {
  m.impl("exchange_blocks", TORCH_BOX(&exchange_blocks<Device>));
  m.impl("join_blocks", TORCH_BOX(&join_blocks<Device>));
}

}  // namespace hcp
