// shared.h - the operators on rows in memory that ranks share, and their signals.
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

// Exchanges counted by peer and half, where the device counts them.
struct Counts {
  uint64_t *data;
  int64_t n;
};
inline Counts counts_of(const Tensor &counts, const Name &like_name, const Tensor &like) {
  if (!like.defined()) refuse(like_name, " is None, expected a tensor");
  expect_dtype("counts", counts, torch::headeronly::ScalarType::Long);
  expect_dim("counts", counts, 1);
  expect_contiguous("counts", counts);
  expect_same_device("counts", counts, like_name, like);
  return {static_cast<uint64_t *>(counts.mutable_data_ptr()), counts.size(0)};
}

inline hcp_signals counted(const Signals &signals, const Counts &counts, int64_t tag) {
  return {signals.data, signals.n, counts.data, static_cast<uint32_t>(tag)};
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
void signal_set(Tensor memory, Tensor signals, Tensor counts, int64_t tag) {
  Counts own = counts_of(counts, "memory", memory);
  Signals records = signals_of("signals", signals, own.n);
  Device(memory).signal_set(counted(records, own, tag), 1);
}

// What the operators of one exchange have in common.
struct Exchange {
  Counts counts;
  int64_t tag, timeout_ns;
  const Tensor &failure;

  Exchange(const Tensor &counted, const Tensor &progress, int64_t tag_of_all, int64_t timeout,
           const Tensor &report)
      : counts(counts_of(counted, "progress", progress)),
        tag(tag_of_all),
        timeout_ns(timeout),
        failure(report) {
    expect_at_least("timeout_ns", timeout, 0);
  }
  hcp_awaited awaited(const Signals &signals, int64_t expected_tag, const Tensor &like) const {
    return {counted(signals, counts, expected_tag), timeout_ns, failure_of(failure, like)};
  }
};

// A sum into memory that others read, checked as a whole: it waits for those who read what it
// held, and tells the readers. `held` are tensors on the parts' device.
struct Staging {
  Tensors given;
  Reduction sum;
  Signals before, after;
  uint32_t *progress;

  Staging(const Tensor &out, Tensors held, const Summands &summands, const Tensor &runs,
          const Tensor &freed, const Tensor &staged, const Tensor &ended, const Exchange &exchange)
      : given(std::move(held)),
        before(signals_of("free", freed, exchange.counts.n)),
        after(signals_of("staged", staged, exchange.counts.n)) {
    progress = progress_of(ended, given[0]);
    sum = reduction_of(summands, runs, out);
  }

  template <class Device>
  void queue(const Device &device, const Exchange &exchange) const {
    hcp_sum staged = sum.sum();
    device.stage(&staged, sum.out, exchange.awaited(before, HCP_READ_TAG, given[0]),
                 counted(after, exchange.counts, exchange.tag), progress);
  }
};

inline Staging staging_of(const Tensor &out, const Tensors &parts, const Tensor &runs,
                          int64_t columns, const Tensor &freed, const Tensor &staged,
                          const Tensor &ended, const Exchange &exchange) {
  Tensors given = flat("parts", parts);
  Summands summands = summands_of(given, columns);
  expect_dim("out", out, 2);
  expect_result(out, given[0], summands.width);
  return Staging(out, std::move(given), summands, runs, freed, staged, ended, exchange);
}

// A sum of what others stage, the last of the parts: it waits for them, and tells them.
struct Reading {
  Tensors given;
  Tensor out;
  Reduction sum;
  Signals before, after;
  int64_t next, own;
  uint32_t *progress;

  Reading(const Tensors &parts, const Tensor &runs, int64_t rows, int64_t columns, int64_t first,
          const Tensor &staged, const Tensor &done, const Tensor &ended, const Exchange &exchange)
      : given(flat("parts", parts)),
        before(signals_of("staged", staged, exchange.counts.n)),
        after(signals_of("done", done, exchange.counts.n)),
        next(first) {
    expect_at_least("rows", rows, 0);
    expect_at_least("next", next, 0);
    Summands summands = summands_of(given, columns);
    progress = progress_of(ended, given[0]);
    own = static_cast<int64_t>(summands.rows.size()) - before.n;
    if (own < 0)
      refuse("staged has ", before.n, " owners, expected at most the ", summands.rows.size(),
             " parts that are read");
    out = fresh(given[0], {rows, summands.width});
    sum = reduction_of(summands, runs, out);
  }

  template <class Device>
  void queue(const Device &device, const Exchange &exchange) const {
    hcp_sum read = sum.sum();
    hcp_staged staged = {exchange.awaited(before, exchange.tag, given[0]),
                         static_cast<int32_t>(next), static_cast<int32_t>(own),
                         sum.summands.rows.data(), false};
    device.read(&read, sum.out, &staged, counted(after, exchange.counts, HCP_READ_TAG), progress);
  }
};

template <class Device>
void stage(Tensor out, Tensors parts, Tensor runs, int64_t columns, Tensor freed, Tensor staged,
           Tensor progress, Tensor counts, int64_t tag, int64_t timeout_ns, Tensor failure) {
  Exchange exchange(counts, progress, tag, timeout_ns, failure);
  Staging staging = staging_of(out, parts, runs, columns, freed, staged, progress, exchange);
  staging.queue(Device(out), exchange);
}

// On a stream that follows the current one.
template <class Device>
Tensor read(Tensors parts, Tensor runs, int64_t rows, int64_t columns, int64_t next, Tensor staged,
            Tensor done, Tensor progress, Tensor counts, int64_t tag, int64_t timeout_ns,
            Tensor failure, int64_t stream) {
  Exchange exchange(counts, progress, tag, timeout_ns, failure);
  Reading reading(parts, runs, rows, columns, next, staged, done, progress, exchange);
  reading.queue(Device(reading.out, stream), exchange);
  return reading.out;
}

// Both at once: the stream follows the current one up to the staging, so that what others have
// staged is read while this rank stages.
template <class Device>
Tensor stage_and_read(Tensor out, Tensors parts, Tensor runs, Tensor freed, Tensor staged,
                      Tensor stage_progress, Tensors read_parts, Tensor read_runs, int64_t rows,
                      int64_t next, Tensor read_staged, Tensor read_done, Tensor read_progress,
                      int64_t columns, Tensor counts, int64_t tag, int64_t timeout_ns,
                      Tensor failure, int64_t stream) {
  Exchange exchange(counts, stage_progress, tag, timeout_ns, failure);
  Staging staging = staging_of(out, parts, runs, columns, freed, staged, stage_progress, exchange);
  Reading reading(read_parts, read_runs, rows, columns, next, read_staged, read_done, read_progress,
                  exchange);
  Device ahead(reading.out, stream);
  staging.queue(Device(out), exchange);
  reading.queue(ahead, exchange);
  return reading.out;
}

// A sum of parts into rows that runs name. The others keep what they hold.
template <class Device>
void place(Tensor out, Tensors parts, Tensor runs, int64_t columns) {
  Tensors given = flat("parts", parts);
  Summands summands = summands_of(given, columns);
  expect_dim("out", out, 2);
  expect_result(out, given[0], summands.width);
  Reduction reduction = reduction_of(summands, runs, out);
  hcp_sum sum = reduction.sum();
  Device(out).place(&sum, reduction.out);
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
  m.impl("stage_and_read", TORCH_BOX(&stage_and_read<Device>));
  m.impl("place", TORCH_BOX(&place<Device>));
  m.impl("join", TORCH_BOX(&join<Device>));
}

}  // namespace hcp
