// ops.cpp - the schemas of torch.ops.hcp.*, and the operators on the CPU.
#include "operators.h"

namespace hcp {

struct Cpu {
  explicit Cpu(const Tensor &) {}

#define KERNEL(name)                               \
  template <class... Arguments>                    \
  void name(const Arguments &...arguments) const { \
    hcp_cpu_##name(arguments...);                  \
  }
  KERNEL(pack)
  KERNEL(unpack)
  KERNEL(merge)
  KERNEL(merge_backward)
  KERNEL(reduce)
  KERNEL(reduce_rotated)
  KERNEL(rotate)
#undef KERNEL
};

}  // namespace hcp

// Sizes are SymInt: one compiled graph then serves every size.
STABLE_TORCH_LIBRARY(hcp, m) {
  m.def("pack(Tensor[] sources, Tensor segments, SymInt rows) -> Tensor");
  m.def("pack_backward(Tensor grad, Tensor segments, SymInt[] widths, SymInt rows) -> Tensor[]");
  m.def("unpack(Tensor source, Tensor segments, SymInt[] widths, SymInt rows) -> Tensor[]");
  m.def("unpack_backward(Tensor[] grads, Tensor segments, SymInt rows) -> Tensor");
  m.def("merge(Tensor[] outs, Tensor[] lses, Tensor runs, SymInt rows) -> (Tensor, Tensor)");
  m.def(
      "merge_backward(Tensor[] outs, Tensor[] lses, Tensor runs, Tensor out, Tensor lse, "
      "Tensor grad_out, Tensor grad_lse) -> (Tensor[], Tensor[])");
  m.def("reduce(Tensor[] parts, Tensor runs, SymInt rows, int columns) -> Tensor");
  m.def(
      "reduce_backward(Tensor grad, Tensor runs, SymInt[] part_rows, SymInt[] widths) "
      "-> Tensor[]");
  m.def(
      "reduce_rotated(Tensor[] parts, Tensor runs, SymInt rows, int columns, Tensor cos, "
      "Tensor sin, SymInt head_dim, int rotated, bool interleaved, bool inverse) -> Tensor");
  m.def("rotate(Tensor t, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor");
  m.def(
      "rotate_pack(Tensor t, Tensor cos, Tensor sin, bool interleaved, Tensor[] beside, "
      "Tensor segments, SymInt rows) -> (Tensor, Tensor)");
  m.def("signal_set(Tensor(a!) memory, Tensor signals) -> ()");
  m.def(
      "reduce_signalled(Tensor(a!) out, Tensor[] parts, Tensor runs, int columns, Tensor before, "
      "Tensor after, int timeout_ns, Tensor(b!) failure) -> ()");
  m.def(
      "nccl_exchange(Tensor sent, Tensor sends, Tensor(a!) received, Tensor receives, "
      "int communicator) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hcp, CPU, m) { hcp::implement<hcp::Cpu>(m); }
