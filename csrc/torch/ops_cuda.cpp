// ops_cuda.cpp - the operators on GPUs. Compiled where nvcc is.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include "hcp/nccl.h"
#include "operators.h"

namespace hcp {

// From the library that torch has loaded already: hcp links to no CUDA build of
// torch, so that one binary serves machines with and without one.
static void *current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void **);
  static const Function function = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void *symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Function>(symbol);
  }();
  void *stream = nullptr;
  if (function == nullptr || function(device, &stream) != 0)
    refuse("this torch does not tell its CUDA stream: libtorch_cuda.so is ",
           function ? "loaded and refused"
                    : "not loaded, or lacks "
                      "aoti_torch_get_current_cuda_stream",
           ", expected torch 2.10 or later with CUDA");
  return stream;
}

struct Cuda {
  explicit Cuda(const Tensor &like)
      : guard_(like.get_device_index()), stream_(current_stream(like.get_device_index())) {}

#define KERNEL(name)                                              \
  template <class... Arguments>                                   \
  void name(const Arguments &...arguments) const {                \
    hcp_error error;                                              \
    if (hcp_cuda_##name(arguments..., stream_, &error) != HCP_OK) \
      throw std::runtime_error(error.message);                    \
  }
  KERNEL(pack)
  KERNEL(unpack)
  KERNEL(merge)
  KERNEL(merge_backward)
  KERNEL(reduce)
  KERNEL(signal_set)
  KERNEL(signal_wait)
#undef KERNEL

  template <class... Arguments>
  void nccl_exchange(const Arguments &...arguments) const {
    hcp_error error;
    if (hcp_nccl_exchange(arguments..., stream_, &error) != HCP_OK)
      throw std::runtime_error(error.message);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void *stream_;
};

// ---- Between GPUs ----------------------------------------------------------

static void signal_set(Tensor memory, Tensor signals) {
  Signals table = signals_of(signals);
  Cuda(memory).signal_set(table.data, table.n);
}

// Host memory that the device reaches, or the device's own.
static void expect_failure(const Tensor &failure, const Tensor &like) {
  expect_dtype("failure", failure, torch::headeronly::ScalarType::Long);
  expect_sizes("failure", failure, {sizeof(hcp_signal_failure) / sizeof(int64_t)});
  expect_contiguous("failure", failure);
  if (!failure.is_cpu()) expect_same_device("failure", failure, "out", like);
}

// Waits, sums into memory that others may read, or from such memory, and tells.
static void reduce_signalled(Tensor out, Tensors parts, Tensor runs, int64_t columns, Tensor before,
                             Tensor after, int64_t timeout_ns, Tensor failure) {
  Signals expected = signals_of(before), told = signals_of(after);
  expect_at_least("timeout_ns", timeout_ns, 0);
  expect_failure(failure, out);
  Reduction sum = expect_reduction(out, parts, runs, columns);
  Cuda device(out);
  device.signal_wait(expected.data, expected.n, timeout_ns,
                     static_cast<hcp_signal_failure *>(failure.mutable_data_ptr()));
  reduce_into(device, sum, out.size(0));
  device.signal_set(told.data, told.n);
}

// Rows that follow each other, so that a move is one piece of memory.
static hcp_column end_to_end(const char *name, const Tensor &buffer, const hcp_column &column) {
  if (column.row_stride_bytes != column.row_bytes && buffer.size(0) > 1)
    refuse(name, " has rows ", column.row_stride_bytes, " bytes apart, expected ", column.row_bytes,
           ": end to end");
  return column;
}

static void nccl_exchange(Tensor sent, Tensor sends, Tensor received, Tensor receives,
                          int64_t communicator) {
  hcp_column source = end_to_end("sent", sent, column_of("sent", sent));
  hcp_column target = end_to_end("received", received, output_of("received", received));
  Moves out = moves_of(sends, sent.size(0)), in = moves_of(receives, received.size(0));
  Cuda(sent).nccl_exchange(reinterpret_cast<void *>(communicator), source, out.data, out.n, target,
                           in.data, in.n);
}

}  // namespace hcp

STABLE_TORCH_LIBRARY_IMPL(hcp, CUDA, m) {
  hcp::implement<hcp::Cuda>(m);
  m.impl("signal_set", TORCH_BOX(&hcp::signal_set));
  m.impl("reduce_signalled", TORCH_BOX(&hcp::reduce_signalled));
  m.impl("nccl_exchange", TORCH_BOX(&hcp::nccl_exchange));
}
