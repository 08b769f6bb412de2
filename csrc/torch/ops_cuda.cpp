// ops_cuda.cpp - the operators on GPUs. Compiled where nvcc is.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

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
#undef KERNEL

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void *stream_;
};

}  // namespace hcp

STABLE_TORCH_LIBRARY_IMPL(hcp, CUDA, m) { hcp::implement<hcp::Cuda>(m); }
