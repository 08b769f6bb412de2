// ops.cpp - the schemas of torch.ops.hcp.*, and the operators on the CPU.
#include <chrono>
#include <thread>

#include "blocks.h"
#include "calls.h"
#include "hcp/signal.h"
#include "mail.h"
#include "shared.h"

namespace hcp {

// Holds the thread until a word of memory that ranks of one process share is as expected, as
// hcp_cuda_signal_wait holds a stream.
static void wait_for(const hcp_awaited &awaited, const hcp_signal &signal, int32_t word) {
  uint64_t expected = hcp_signal_expected(awaited.signals.counts, signal.count,
                                          static_cast<uint64_t>(signal.more), awaited.signals.tag);
  auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(awaited.timeout_ns);
  auto acquired = [&] { return __atomic_load_n(signal.word + word, __ATOMIC_ACQUIRE); };
  uint64_t found = acquired();
  for (; hcp_signal_is_behind(found, expected); found = acquired()) {
    if (std::chrono::steady_clock::now() > end) break;
    std::this_thread::yield();
  }
  if (found == expected) return;
  *awaited.failure = {hcp_signal_is_behind(found, expected) ? HCP_LATE : HCP_OTHER_CALL,
                      signal.peer, expected, found};
  refuse("the signal of rank ", signal.peer, " is ", found, ", expected ", expected);
}

static void wait_for_all(const hcp_awaited &awaited, int32_t words) {
  for (int64_t i = 0; i < awaited.signals.n; ++i)
    for (int32_t word = 0; word < words; ++word) wait_for(awaited, awaited.signals.data[i], word);
}

static void count_all(const hcp_signals &signals) {
  for (int64_t i = 0; i < signals.n; ++i)
    hcp_signal_count(signals.counts, signals.data[i].count,
                     static_cast<uint64_t>(signals.data[i].more));
}

static void tell(const hcp_signals &signals, int32_t words) {
  for (int64_t i = 0; i < signals.n; ++i) {
    const hcp_signal &signal = signals.data[i];
    uint64_t told = hcp_signal_told(signals.counts, signal.count, signals.tag);
    for (int32_t word = 0; word < words; ++word)
      __atomic_store_n(signal.word + word, told, __ATOMIC_RELEASE);
  }
}

// The thread is its own stream.
struct Cpu {
  explicit Cpu(const Tensor &, int64_t = 0) {}

  void join(int64_t) const {}

  void signal_set(hcp_signals signals, int32_t words) const {
    count_all(signals);
    tell(signals, words);
  }

#define KERNEL(name)                               \
  template <class... Arguments>                    \
  void name(const Arguments &...arguments) const { \
    hcp_cpu_##name(arguments...);                  \
  }
  KERNEL(pack)
  KERNEL(unpack)
  KERNEL(merge)
  KERNEL(merge_on)
  KERNEL(reduce)
  KERNEL(reduce_on)
  KERNEL(place)
  KERNEL(reduce_rotated)
  KERNEL(rotate)
#undef KERNEL

  void stage(const hcp_sum *sum, hcp_column out, const hcp_awaited &free, hcp_signals staged,
             uint32_t *) const {
    wait_for_all(free, 1);
    count_all(staged);
    reduce(sum, nullptr, out);
    tell(staged, HCP_PIECES);
  }

  void read(const hcp_sum *sum, hcp_column out, const hcp_staged *staged, hcp_signals done,
            uint32_t *) const {
    wait_for_all(staged->awaited, HCP_PIECES);
    if (staged->keeps)
      place(sum, out);
    else
      reduce(sum, nullptr, out);
    count_all(staged->awaited.signals);
    tell(done, 1);
  }
};

}  // namespace hcp

// Sizes are SymInt: one compiled graph then serves every size.
STABLE_TORCH_LIBRARY(hcp, m) {
  m.def(
      "pack(Tensor[] sources, Tensor segments, SymInt rows, *, ScalarType? dtype=None) -> Tensor");
  m.def(
      "pack_backward(Tensor grad, Tensor segments, SymInt[] widths, SymInt rows, "
      "*, ScalarType? dtype=None) -> Tensor[]");
  m.def(
      "unpack(Tensor source, Tensor segments, SymInt[] widths, SymInt rows, "
      "*, ScalarType? dtype=None) -> Tensor[]");
  m.def(
      "unpack_backward(Tensor[] grads, Tensor segments, SymInt rows, *, ScalarType? dtype=None) "
      "-> Tensor");
  m.def("merge(Tensor[] outs, Tensor[] lses, Tensor runs, SymInt rows) -> (Tensor, Tensor)");
  m.def(
      "reduce(Tensor[] parts, Tensor runs, SymInt rows, int columns, *, ScalarType? dtype=None) "
      "-> Tensor");
  m.def(
      "reduce_backward(Tensor grad, Tensor runs, SymInt[] part_rows, SymInt[] widths, "
      "*, ScalarType? dtype=None) -> Tensor[]");
  m.def(
      "reduce_rotated(Tensor[] parts, Tensor runs, SymInt rows, int columns, Tensor cos, "
      "Tensor sin, SymInt head_dim, int rotated, bool interleaved, bool inverse) -> Tensor");
  m.def("rotate(Tensor t, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor");
  m.def(
      "rotate_pack(Tensor t, Tensor cos, Tensor sin, bool interleaved, Tensor[] beside, "
      "Tensor segments, SymInt rows) -> (Tensor, Tensor)");
  m.def("cut(Tensor(a)[] tensors, Tensor cuts) -> Tensor(a)[]");
  m.def(
      "pack_to_send(Tensor[] sources, Tensor segments, int sent_rows, int received_rows) "
      "-> (Tensor, Tensor)");
  m.def("reduce_to_send(Tensor[] parts, Tensor runs, int columns, int sent_rows) -> Tensor");
  m.def(
      "arrive(Tensor(a) received, Tensor segments, int rows, int heads, int head_dim, "
      "int value_dim, Tensor cuts) -> Tensor(a)[]");
  m.def(
      "sum_gradients(Tensor[] parts, Tensor? home, Tensor runs, int rows, int columns, "
      "Tensor? cos, Tensor? sin, bool interleaved) -> Tensor[]");
  m.def(
      "merge_on(Tensor(a!) total, Tensor? total_lse, Tensor[] outs, Tensor[] lses, Tensor runs) "
      "-> Tensor");
  m.def(
      "merge_last(Tensor total, Tensor total_lse, Tensor[] outs, Tensor[] lses, Tensor runs) "
      "-> (Tensor, Tensor)");
  m.def("sum_on(Tensor(a!) total, bool begun, Tensor[] parts, Tensor runs) -> ()");
  m.def("call_memory(Tensor(a)[] rows, Tensor(a)[] sums, Tensor results) -> Tensor(a)[]");
  m.def("signal_set(Tensor(a!) memory, Tensor signals, Tensor(b!) counts, int tag) -> ()");
  m.def(
      "stage(Tensor(a!) out, Tensor[] parts, Tensor runs, int columns, Tensor free, "
      "Tensor staged, Tensor(b!) progress, Tensor(c!) counts, int tag, int timeout_ns, "
      "Tensor(d!) failure) -> ()");
  m.def(
      "read(Tensor[] parts, Tensor runs, int rows, int columns, int next, Tensor staged, Tensor "
      "done, "
      "Tensor(a!) progress, Tensor(b!) counts, int tag, int timeout_ns, Tensor(c!) failure, "
      "int stream) -> Tensor");
  m.def(
      "mail(Tensor sent, Tensor(a!) received, Tensor rounds, Tensor(b!) link, "
      "Tensor(c!) stage_progress, Tensor(d!) read_progress, Tensor(e!) counts, int tag, "
      "int timeout_ns, Tensor(f!) failure, int stream) -> ()");
  m.def(
      "stage_and_read(Tensor(a!) out, Tensor[] parts, Tensor runs, Tensor free, Tensor staged, "
      "Tensor(b!) stage_progress, Tensor[] read_parts, Tensor read_runs, int rows, int next, "
      "Tensor read_staged, Tensor read_done, Tensor(c!) read_progress, int columns, "
      "Tensor(d!) counts, int tag, int timeout_ns, Tensor(e!) failure, int stream) -> Tensor");
  m.def(
      "exchange_blocks(Tensor[] columns, Tensor blocks, int by_query, int first, int own, "
      "Tensor own_runs, int rows, Tensor(a!) out, Tensor runs, Tensor free, Tensor staged, "
      "Tensor(b!) stage_progress, bool stages, Tensor[] read_parts, Tensor read_runs, int next, "
      "Tensor read_staged, Tensor read_done, Tensor(c!) read_progress, bool at_once, "
      "Tensor(d!) counts, int tag, int timeout_ns, Tensor(e!) failure, int stream) -> Tensor");
  m.def("join_blocks(Tensor rows, Tensor[] like, Tensor blocks, int by_query) -> Tensor[]");
  m.def("place(Tensor(a!) out, Tensor[] parts, Tensor runs, int columns) -> ()");
  m.def("join(Tensor like, int stream) -> ()");
  m.def(
      "nccl_exchange(Tensor sent, Tensor sends, Tensor(a!) received, Tensor receives, "
      "int communicator, Tensor(b!) watch, int number, int timeout_ns, int stream, "
      "Tensor(c!) stamps, int[] stamped_to, int[] stamped_from, int stamp) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hcp, CPU, m) {
  hcp::implement<hcp::Cpu>(m);
  hcp::implement_layer<hcp::Cpu>(m);
  hcp::implement_calls(m);
  hcp::implement_shared<hcp::Cpu>(m);
  hcp::implement_mail<hcp::Cpu>(m);
  hcp::implement_blocks<hcp::Cpu>(m);
}
