#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/AttnBackward.h>
#include <ATen/native/cpu/AttnBrgemm.h>
#include <ATen/native/cpu/AttnFma.h>
#include <ATen/native/cpu/AttnForward.h>
#include <ATen/native/cpu/AttnTiny.h>

#include <algorithm>
#include <type_traits>

// Note [Tiles of attn]
// attn, its gradient and that of the scores are m x n. Of these only attn is
// ever in memory, and written once. They exist as tiles, blocks of some rows
// and at most ATTN_BLOCK columns, in a thread's scratch memory. Every sum over
// a tile starts from zero, and the sums of tiles are added in the tiles' order,
// whichever threads they are on: results don't depend on the number of threads.
// Scratch memory is bounded, whatever the sizes: what grows with d or e is made
// in blocks of columns.
//
// The kernels know no Tensor. From the outside in:
//   AttnKernel.cpp    tensors to pointers, and the choice of a kernel
//   AttnForward.h     the tasks of the forward, some rows each
//   AttnBackward.h    the tasks of the backward, a tile each
//   AttnSchedule.h    the order of tiles, and tickets
//   AttnFma.h         micro-kernels that multiply in registers, for any shape
//   AttnDot.h         dot products, for a tile of few rows
//   AttnBrgemm.h      half and bfloat16 by oneDNN's brgemm
//   AttnTiny.h        tiny samples, by plain loops
//   AttnTanh.h        tanh of vectors in registers
//   AttnVec.h         loads, stores and copies by vectors
//   AttnMatrix.h      pointers, sizes and strides
//
// A new kind of kernel is a pair of classes like FmaForward and FmaBackward,
// and a line in with_kernels below. Each has a Layout, what it needs of scratch
// memory for tiles of some size, and is made for a task from that layout and
// memory:
//   forward     attn = tanh(q kᵀ), out (+)= attn v, for a block of columns
//   output      out (+)= attn v, of an attn that was made before
//   start       S̄ = (grad_output vᵀ + grad_attn) (1 - attn²), and attn
//   add_grad_q, add_grad_k, add_grad_v
//               total (+)= S̄ k, S̄ᵀ q, attnᵀ grad_output
//   finish_block
//               the total of a block of grad_k or grad_v, to where it belongs
// and says
//   T             the precision of the sums
//   ROW_STEP      of which the rows of a task are a multiple
//   any_width     e may be so large that `output` has to make it in parts
//   MIN_ROWS      of a tile of the backward, if attn has as many
//   sums_columns  a total of grad_k or grad_v is of T, though a single tile
//   adds
//                 to it

namespace at::native {

namespace {

// The threads of ATen.
struct Parallel {
  // As many as there is work for.
  int64_t threads(double work) const {
    constexpr double WORK_OF_ONE = 1 << 18;
    if (at::in_parallel_region()) {
      return 1;
    }
    return std::clamp<int64_t>(
        static_cast<int64_t>(std::min(work / WORK_OF_ONE, 1e6)),
        1,
        at::get_num_threads());
  }

  // fn(thread) on each of some threads
  template <typename F>
  void run(int64_t threads, const F& fn) const {
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (const auto thread : c10::irange(begin, end)) {
        fn(thread);
      }
    });
  }
};

template <typename S>
MatrixBatch<S> batch_of(const Tensor& x) {
  if (!x.defined()) {
    return {};
  }
  S* data;
  if constexpr (std::is_const_v<S>) {
    data = x.const_data_ptr<std::remove_const_t<S>>();
  } else {
    data = x.mutable_data_ptr<S>();
  }
  return {data, x.sizes().data(), x.strides().data(), x.dim()};
}

AttnSizes sizes_of(const Tensor& q, const Tensor& v, const Tensor& attn) {
  const auto m = q.size(-2), n = v.size(-2);
  const auto batch = m * n == 0 ? 0 : attn.numel() / (m * n);
  return {batch, m, n, q.size(-1), v.size(-1)};
}

template <typename ForwardKernel, typename BackwardKernel>
struct Kernels {
  using Forward = ForwardKernel;
  using Backward = BackwardKernel;
};

// fn(the kernels for these sizes)
template <typename S, typename F>
void with_kernels(const AttnSizes& sizes, const F& fn) {
  const auto [batch, m, n, d, e] = sizes;
  if (AttnTiny<S>::fits(m, n, d, e)) {
    return fn(Kernels<TinyForward<S>, TinyBackward<S>>());
  }
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    if (AttnBrgemm<S>::fits(m, n, d, e)) {
      return fn(Kernels<BrgemmForward<S>, BrgemmBackward<S>>());
    }
  }
#endif
  fn(Kernels<FmaForward<S>, FmaBackward<S>>());
}

void attn_kernel(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v) {
  const auto sizes = sizes_of(q, v, attn);
  if (sizes.batch == 0) { // no attn: a sum without terms
    output.zero_();
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, q.scalar_type(), "attn", [&] {
        using S = scalar_t;
        const AttnForwardArgs<S> args{
            sizes,
            batch_of<S>(output),
            batch_of<S>(attn),
            batch_of<const S>(q),
            batch_of<const S>(k),
            batch_of<const S>(v)};
        with_kernels<S>(sizes, [&](auto kernels) {
          using Tiles = typename decltype(kernels)::Forward;
          attn_forward_by<S, Tiles>(args, Parallel());
        });
      });
}

void attn_backward_kernel(
    const Tensor& grad_q,
    const Tensor& grad_k,
    const Tensor& grad_v,
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn) {
  const auto sizes = sizes_of(q, v, attn);
  if (sizes.batch == 0) {
    for (const auto& grad : {grad_q, grad_k, grad_v}) {
      if (grad.defined()) {
        grad.zero_();
      }
    }
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, q.scalar_type(), "_attn_backward", [&] {
        using S = scalar_t;
        const AttnBackwardArgs<S> args{
            sizes,
            batch_of<S>(grad_q),
            batch_of<S>(grad_k),
            batch_of<S>(grad_v),
            batch_of<const S>(grad_output),
            batch_of<const S>(grad_attn),
            batch_of<const S>(q),
            batch_of<const S>(k),
            batch_of<const S>(v),
            batch_of<const S>(attn)};
        with_kernels<S>(sizes, [&](auto kernels) {
          using Tiles = typename decltype(kernels)::Backward;
          attn_backward_by<S, Tiles>(args, Parallel());
        });
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(attn_stub, &attn_kernel)
ALSO_REGISTER_AVX512_DISPATCH(attn_backward_stub, &attn_backward_kernel)

} // namespace at::native
