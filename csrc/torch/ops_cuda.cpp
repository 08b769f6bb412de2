// ops_cuda.cpp - the operators on GPUs. It is compiled if nvcc is installed.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include "blocks.h"
#include "calls.h"
#include "hcp/nccl.h"
#include "mail.h"
#include "shared.h"

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

  // On another stream (a cudaStream_t), which follows the current one.
  Cuda(const Tensor &like, int64_t stream) : Cuda(like) {
    void *other = reinterpret_cast<void *>(stream);
    follow(other, stream_);
    stream_ = other;
  }

  void join(int64_t stream) const { follow(stream_, reinterpret_cast<void *>(stream)); }

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
  KERNEL(merge_on)
  KERNEL(reduce)
  KERNEL(reduce_on)
  KERNEL(place)
  KERNEL(stage)
  KERNEL(read)
  KERNEL(reduce_rotated)
  KERNEL(rotate)
  KERNEL(signal_set)
  KERNEL(stamp_set)
  KERNEL(exchange_end)
#undef KERNEL

  template <class... Arguments>
  void nccl_exchange(const Arguments &...arguments) const {
    hcp_error error;
    if (hcp_nccl_exchange(arguments..., stream_, &error) != HCP_OK)
      throw std::runtime_error(error.message);
  }

 private:
  static void follow(void *stream, void *ahead) {
    hcp_error error;
    if (hcp_cuda_follow(stream, ahead, &error) != HCP_OK) throw std::runtime_error(error.message);
  }

  torch::stable::accelerator::DeviceGuard guard_;
  void *stream_;
};

// ---- Between GPUs ----------------------------------------------------------

// Moves (peer, row, rows) of a buffer's rows, as bytes to and from peers.
static std::vector<hcp_transfer> transfers_of(const char *name, const Tensor &buffer,
                                              const hcp_column &column, const Tensor &moves) {
  if (column.row_stride_bytes != column.row_bytes && buffer.size(0) > 1)
    refuse(name, " has rows ", column.row_stride_bytes, " bytes apart, expected ", column.row_bytes,
           ": end to end");
  Moves records = moves_of(moves, buffer.size(0));
  std::vector<hcp_transfer> transfers;
  for (int64_t i = 0; i < records.n; ++i) {
    const Move &move = records.data[i];
    transfers.push_back({static_cast<int32_t>(move.peer),
                         static_cast<char *>(column.data) + move.row * column.row_bytes,
                         static_cast<size_t>(move.rows * column.row_bytes)});
  }
  return transfers;
}

// NCCL's functions, found at the first exchange.
static const hcp_nccl &nccl() {
  static const hcp_nccl functions = [] {
    hcp_nccl found;
    hcp_error error;
    if (hcp_nccl_load(&found, &error) != HCP_OK) throw std::runtime_error(error.message);
    return found;
  }();
  return functions;
}

static hcp_watch *watch_of(const Tensor &watch) {
  expect_dtype("watch", watch, torch::headeronly::ScalarType::Long);
  expect_sizes("watch", watch, {sizeof(hcp_watch) / sizeof(int64_t)});
  expect_contiguous("watch", watch);
  if (!watch.is_cpu()) refuse("watch is not on the cpu, expected it there, pinned");
  return static_cast<hcp_watch *>(watch.mutable_data_ptr());
}

// Words of the device for the stamps that go with rows: this rank's, then what comes from each
// rank.
struct Stamps {
  uint64_t *words;
  int64_t ranks;

  Stamps(const Tensor &stamps, const Tensor &like) {
    expect_dtype("stamps", stamps, torch::headeronly::ScalarType::Long);
    expect_dim("stamps", stamps, 1);
    expect_contiguous("stamps", stamps);
    expect_same_device("stamps", stamps, "sent", like);
    words = static_cast<uint64_t *>(stamps.mutable_data_ptr());
    ranks = stamps.size(0) - 1;
  }

  uint64_t *from(int64_t rank) const {
    if (rank < 0 || rank >= ranks)
      refuse("a stamp's rank is ", rank, ", expected 0 to ", ranks - 1, ": one of the stamps'");
    return words + 1 + rank;
  }
};

// On a stream that follows the current one, and then its end. The stamp goes with the rows to some
// peers, and is compared with what comes with the rows of others.
static void nccl_exchange(Tensor sent, Tensor sends, Tensor received, Tensor receives,
                          int64_t communicator, Tensor watch, int64_t number, int64_t timeout_ns,
                          int64_t stream, Tensor stamps, Sizes stamped_to, Sizes stamped_from,
                          int64_t stamp) {
  hcp_watch *watched = watch_of(watch);
  expect_at_least("number", number, 0);
  expect_same_device("received", received, "sent", sent);
  std::vector<hcp_transfer> out = transfers_of("sent", sent, column_of("sent", sent), sends);
  std::vector<hcp_transfer> in =
      transfers_of("received", received, output_of("received", received), receives);
  Stamps words(stamps, sent);
  std::vector<hcp_stamp> expected;
  for (int64_t peer : stamped_from) {
    in.push_back({static_cast<int32_t>(peer), words.from(peer), sizeof(uint64_t)});
    expected.push_back({words.from(peer), static_cast<uint64_t>(stamp), peer});
  }
  for (int64_t peer : stamped_to) {
    words.from(peer);
    out.push_back({static_cast<int32_t>(peer), words.words, sizeof(uint64_t)});
  }
  Cuda device(sent, stream);
  if (!stamped_to.empty()) device.stamp_set(words.words, static_cast<uint64_t>(stamp));
  device.nccl_exchange(&nccl(), reinterpret_cast<void *>(communicator), out.data(),
                       static_cast<int64_t>(out.size()), in.data(), static_cast<int64_t>(in.size()),
                       timeout_ns);
  device.exchange_end(watched, static_cast<uint64_t>(number), expected.data(),
                      static_cast<int64_t>(expected.size()));
}

}  // namespace hcp

STABLE_TORCH_LIBRARY_IMPL(hcp, CUDA, m) {
  hcp::implement<hcp::Cuda>(m);
  hcp::implement_layer<hcp::Cuda>(m);
  hcp::implement_calls(m);
  hcp::implement_shared<hcp::Cuda>(m);
  hcp::implement_mail<hcp::Cuda>(m);
  hcp::implement_blocks<hcp::Cuda>(m);
  m.impl("nccl_exchange", TORCH_BOX(&hcp::nccl_exchange));
}
