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

// Words with the place of their count as value, which is checked before anything is queued.
inline Signals places_of(const char *name, const Tensor &table, const Counts &counts) {
  Signals places = signals_of(table);
  for (int64_t i = 0; i < places.n; ++i)
    if (places.data[i].value >= static_cast<uint64_t>(counts.n))
      refuse(name, "[", i, "] counts in place ", places.data[i].value, ", expected < ", counts.n);
  return places;
}

// "The rows are there": one exchange more.
inline std::vector<hcp_signal> filled(const Signals &places, const Counts &counts, int64_t tag) {
  std::vector<hcp_signal> signals(places.data, places.data + places.n);
  for (hcp_signal &signal : signals)
    signal.value = static_cast<uint64_t>(++counts.data[signal.value] << 32 | tag);
  return signals;
}

// "They have been read", as often as there were any.
inline std::vector<hcp_signal> emptied(const Signals &places, const Counts &counts) {
  std::vector<hcp_signal> signals;
  for (int64_t i = 0; i < places.n; ++i) {
    hcp_signal signal = places.data[i];
    signal.value = static_cast<uint64_t>(counts.data[signal.value] << 32);
    if (signal.value > 0) signals.push_back(signal);
  }
  return signals;
}

inline int64_t n_of(const std::vector<hcp_signal> &signals) {
  return static_cast<int64_t>(signals.size());
}

template <class Device>
void signal_set(Tensor memory, Tensor signals) {
  Signals table = signals_of(signals);
  Device(memory).signal_set(table.data, table.n);
}

// Sums into memory that others read: waits for those who read what it held, and tells the readers.
template <class Device>
void reduce_signalled(Tensor out, Tensors parts, Tensor runs, int64_t columns, Tensor before,
                      Tensor after, Tensor counts, int64_t tag, int64_t timeout_ns,
                      Tensor failure) {
  Counts counted = counts_of(counts);
  Signals readers_before = places_of("before", before, counted);
  Signals readers = places_of("after", after, counted);
  expect_at_least("timeout_ns", timeout_ns, 0);
  Tensors given = flat("parts", parts);
  Summands summands = summands_of(given, columns);
  hcp_signal_failure *report = failure_of(failure, given[0]);
  expect_dim("out", out, 2);
  expect_result(out, given[0], summands.width);
  Reduction sum = reduction_of(summands, runs, out);
  std::vector<hcp_signal> expected = emptied(readers_before, counted);
  std::vector<hcp_signal> told = filled(readers, counted, tag);
  Device device(out);
  device.signal_wait(expected.data(), n_of(expected), timeout_ns, report);
  reduce_into(device, sum, out.size(0));
  device.signal_set(told.data(), n_of(told));
}

// Waits for what others stage, sums it, and tells them, on a stream that follows the current one.
template <class Device>
Tensor read_signalled(Tensors parts, Tensor runs, int64_t rows, int64_t columns, Tensor before,
                      Tensor after, Tensor counts, int64_t tag, int64_t timeout_ns, Tensor failure,
                      int64_t stream) {
  Counts counted = counts_of(counts);
  Signals owners = places_of("before", before, counted);
  Signals owners_done = places_of("after", after, counted);
  expect_at_least("timeout_ns", timeout_ns, 0);
  expect_at_least("rows", rows, 0);
  Tensors given = flat("parts", parts);
  Summands summands = summands_of(given, columns);
  hcp_signal_failure *report = failure_of(failure, given[0]);
  Tensor out = fresh(given[0], {rows, summands.width});
  Reduction sum = reduction_of(summands, runs, out);
  std::vector<hcp_signal> expected = filled(owners, counted, tag);
  std::vector<hcp_signal> told = emptied(owners_done, counted);
  Device device(out, stream);
  device.signal_wait(expected.data(), n_of(expected), timeout_ns, report);
  device.reduce_far(sum.summands.dtype, sum.summands.columns.data(), sum.summands.n_columns,
                    sum.runs.data, sum.runs.n, rows, sum.out);
  device.signal_set(told.data(), n_of(told));
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
  m.impl("reduce_signalled", TORCH_BOX(&reduce_signalled<Device>));
  m.impl("read_signalled", TORCH_BOX(&read_signalled<Device>));
  m.impl("join", TORCH_BOX(&join<Device>));
}

}  // namespace hcp
