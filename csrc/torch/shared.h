// shared.h - the operators on rows in memory that ranks share, and the signals beside them.
#pragma once

#include "layer.h"

namespace hcp {

// Host memory that the device reaches, or the device's own.
inline hcp_signal_failure *failure_of(const Tensor &failure, const Tensor &like) {
  expect_dtype("failure", failure, torch::headeronly::ScalarType::Long);
  expect_sizes("failure", failure, {sizeof(hcp_signal_failure) / sizeof(int64_t)});
  expect_contiguous("failure", failure);
  if (!failure.is_cpu()) expect_same_device("failure", failure, "the parts", like);
  return static_cast<hcp_signal_failure *>(failure.mutable_data_ptr());
}

// Exchanges counted by peer and slot, in the host's memory.
struct Counts {
  int64_t *data;
  int64_t n;
};
inline Counts counts_of(const Tensor &counts) {
  expect_dtype("counts", counts, torch::headeronly::ScalarType::Long);
  expect_dim("counts", counts, 1);
  expect_contiguous("counts", counts);
  if (!counts.is_cpu()) refuse("counts is not on the cpu, expected it there");
  return {static_cast<int64_t *>(counts.mutable_data_ptr()), counts.size(0)};
}

using SignalList = std::vector<hcp_signal>;

inline hcp_signal signal_at(const Place &place, int64_t count, int64_t tag) {
  return {place.word, static_cast<uint64_t>(count << 32 | tag), place.peer};
}

// "The rows are there": one exchange more.
inline SignalList filled(const Places &places, const Counts &counts, int64_t tag) {
  SignalList signals;
  for (int64_t i = 0; i < places.n; ++i) {
    const Place &place = places.data[i];
    counts.data[place.count] += place.first;
    signals.push_back(signal_at(place, counts.data[place.count], tag));
  }
  return signals;
}

// "They have been read", as often as there were any.
inline SignalList emptied(const Places &places, const Counts &counts) {
  SignalList signals;
  for (int64_t i = 0; i < places.n; ++i) {
    const Place &place = places.data[i];
    if (counts.data[place.count] > 0)
      signals.push_back(signal_at(place, counts.data[place.count], 0));
  }
  return signals;
}

inline hcp_signals borrowed(const SignalList &signals) {
  return {signals.data(), static_cast<int64_t>(signals.size())};
}

// Words for launches that count their blocks.
inline uint32_t *progress_of(const Tensor &progress, const Tensor &like) {
  expect_dtype("progress", progress, torch::headeronly::ScalarType::Int);
  expect_sizes("progress", progress, {HCP_CUDA_PROGRESS_WORDS});
  expect_contiguous("progress", progress);
  expect_same_device("progress", progress, "the parts", like);
  return static_cast<uint32_t *>(progress.mutable_data_ptr());
}

template <class Device>
void signal_set(Tensor memory, Tensor signals) {
  Signals table = signals_of(signals);
  Device(memory).signal_set(hcp_signals{table.data, table.n}, 1);
}

// Sums into memory that others read: waits for those who read what it held, and tells the readers.
template <class Device>
void stage(Tensor out, Tensors parts, Tensor runs, int64_t columns, Tensor before, Tensor after,
           Tensor counts, int64_t tag, int64_t timeout_ns, Tensor failure, Tensor progress) {
  Counts counted = counts_of(counts);
  Places readers_before = places_of("before", before, counted.n);
  Places readers = places_of("after", after, counted.n);
  expect_at_least("timeout_ns", timeout_ns, 0);
  Tensors given = flat("parts", parts);
  Summands summands = summands_of(given, columns);
  hcp_signal_failure *report = failure_of(failure, given[0]);
  uint32_t *ended = progress_of(progress, given[0]);
  expect_dim("out", out, 2);
  expect_result(out, given[0], summands.width);
  Reduction sum = reduction_of(summands, runs, out);
  SignalList expected = emptied(readers_before, counted);
  SignalList told = filled(readers, counted, tag);
  Device(out).stage(summands.dtype, summands.columns.data(), summands.n_columns, sum.runs.data,
                    sum.runs.n, out.size(0), sum.out,
                    hcp_awaited{borrowed(expected), timeout_ns, report}, borrowed(told), ended);
}

// Waits for what others stage, the last of the parts, sums it, and tells them, on a stream that
// follows the current one.
template <class Device>
Tensor read(Tensors parts, Tensor runs, int64_t rows, int64_t columns, Tensor before, Tensor after,
            Tensor counts, int64_t tag, int64_t timeout_ns, Tensor failure, Tensor progress,
            int64_t stream) {
  Counts counted = counts_of(counts);
  Places owners = places_of("before", before, counted.n);
  Places owners_done = places_of("after", after, counted.n);
  expect_at_least("timeout_ns", timeout_ns, 0);
  expect_at_least("rows", rows, 0);
  Tensors given = flat("parts", parts);
  Summands summands = summands_of(given, columns);
  hcp_signal_failure *report = failure_of(failure, given[0]);
  uint32_t *ended = progress_of(progress, given[0]);
  int64_t own = static_cast<int64_t>(summands.rows.size()) - owners.n;
  if (own < 0)
    refuse("before has ", owners.n, " owners, expected at most the ", summands.rows.size(),
           " parts that are read");
  Tensor out = fresh(given[0], {rows, summands.width});
  Reduction sum = reduction_of(summands, runs, out);
  SignalList expected = filled(owners, counted, tag);
  SignalList told = emptied(owners_done, counted);
  Device(out, stream)
      .read(summands.dtype, summands.columns.data(), summands.n_columns, sum.runs.data, sum.runs.n,
            rows, sum.out, hcp_awaited{borrowed(expected), timeout_ns, report},
            static_cast<int32_t>(own), summands.rows.data(), borrowed(told), ended);
  return out;
}

// What the current stream does from now on follows what the other one has been given.
template <class Device>
void join(Tensor like, int64_t stream) {
  Device(like).join(stream);
}

template <class Device>
void implement_shared(torch::stable::detail::StableLibrary &m) {
  m.impl("signal_set", TORCH_BOX(&signal_set<Device>));
  m.impl("stage", TORCH_BOX(&stage<Device>));
  m.impl("read", TORCH_BOX(&read<Device>));
  m.impl("join", TORCH_BOX(&join<Device>));
}

}  // namespace hcp
