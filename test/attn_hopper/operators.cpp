// The operators of AttnSweep.cu, for tensors on the CPU.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/native/cuda/AttnSweep.cu>

#include <torch/library.h>

TORCH_LIBRARY(attn_hopper, m) {
  using namespace at::native;
  m.def("attn", &attn_cuda);
  m.def("_attn_backward", &_attn_backward_cuda);
  m.def(
      "attn_output(Tensor q, Tensor k, Tensor v, *, bool is_causal=False, "
      "float scale=1.0) -> Tensor",
      &attn_output_cuda);
  m.def("_attn_output_backward", &_attn_output_backward_cuda);
  m.def("seed", [](int64_t seed) { machine().random.seed(seed); });
  m.def("launches", [] { return launches; });
}
