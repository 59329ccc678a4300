#include "kernels.h"

#include <ATen/native/cpu/AttnKernel.h>
#include <ATen/native/cpu/AttnKernels.h>

namespace torch_attn {

namespace {

constexpr Runtime runtime{
    [](double work) { return threads_for(work, max_threads()); },
    run,
    allocate,
    release};

} // namespace

int64_t max_width() {
  return at::native::ATTN_MAX_WIDTH;
}

template <typename S>
void forward(const ForwardArgs<S>& args) {
  at::native::attn_cpu::forward(args, runtime);
}

template <typename S>
void backward(const BackwardArgs<S>& args) {
  at::native::attn_cpu::backward(args, runtime);
}

template void forward(const ForwardArgs<at::Half>& args);
template void forward(const ForwardArgs<at::BFloat16>& args);
template void forward(const ForwardArgs<float>& args);
template void forward(const ForwardArgs<double>& args);
template void backward(const BackwardArgs<at::Half>& args);
template void backward(const BackwardArgs<at::BFloat16>& args);
template void backward(const BackwardArgs<float>& args);
template void backward(const BackwardArgs<double>& args);

} // namespace torch_attn
