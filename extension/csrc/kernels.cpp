#include "kernels.h"

#include <ATen/native/cpu/AttnKernel.h>
#include <ATen/native/cpu/AttnKernels.h>
#include <ATen/native/cpu/AttnSecondOrderTile.h>
#include <ATen/native/cpu/AttnThirdOrderTile.h>

namespace torch_attn {

namespace {

constexpr Runtime runtime{
    [](double work) { return threads_for(work, max_threads()); },
    run,
    allocate,
    release};

// Has the backward's tasks compute the tiles of TileOf.
template <template <typename> class TileOf, typename S, typename Args>
void derivatives(const Args& args) {
  with_tiles<S>(true, args.sizes, [&](auto tiles) {
    using Tile = TileOf<typename decltype(tiles)::type>;
    at::native::attn_cpu::backward_by<S, Tile>(args, runtime);
  });
}

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

template <typename S>
void second_order(
    const MatrixBatch<S>& output_tangent,
    const BackwardArgs<S>& args,
    const Tangents<S>& u) {
  derivatives<SecondOrderTile, S>(
      SecondOrderArgs<S>{args, output_tangent, u.q, u.k, u.v});
}

template <typename S>
void third_order(
    const MatrixBatch<S>& output_tangent,
    const BackwardArgs<S>& args,
    const Tangents<S>& u,
    const Tangents<S>& w) {
  derivatives<ThirdOrderTile, S>(ThirdOrderArgs<S>{
      {args, output_tangent, u.q, u.k, u.v}, w.grad_output, w.q, w.k, w.v});
}

#define INSTANTIATE(S)                                                    \
  template void forward(const ForwardArgs<S>&);                           \
  template void backward(const BackwardArgs<S>&);                         \
  template void second_order(                                             \
      const MatrixBatch<S>&, const BackwardArgs<S>&, const Tangents<S>&); \
  template void third_order(                                              \
      const MatrixBatch<S>&,                                              \
      const BackwardArgs<S>&,                                             \
      const Tangents<S>&,                                                 \
      const Tangents<S>&);
INSTANTIATE(at::Half)
INSTANTIATE(at::BFloat16)
INSTANTIATE(float)
INSTANTIATE(double)

} // namespace torch_attn
