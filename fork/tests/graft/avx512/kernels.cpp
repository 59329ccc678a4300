// attn's kernels in AVX-512 by products of any kind, for test_avx512.py.

#include "emulated.h"

#include <ATen/native/cpu/AttnKernels.h>
#include <ATen/native/cpu/AttnThirdOrderTile.h>

#include <cstdlib>
#include <type_traits>

namespace {

using namespace at::native::attn_cpu;

// One thread. Memory has no number that the kernel has not written: NaN.
const Runtime runtime{
    [](double) { return int64_t(1); },
    [](int64_t threads, void (*task)(void*, int64_t), void* context) {
      for (int64_t i = 0; i < threads; ++i) {
        task(context, i);
      }
    },
    [](size_t bytes) {
      const auto size = (bytes + 127) / 64 * 64;
      return std::memset(std::aligned_alloc(64, size), 0xff, size);
    },
    std::free};

// A tensor, or none.
template <typename X>
struct Dense {
  X* data;
  int64_t sizes[2], strides[2];

  Dense(void* x, int64_t rows, int64_t cols)
      : data(static_cast<X*>(x)), sizes{rows, cols}, strides{cols, 1} {}
  operator MatrixBatch<X>() const {
    return data ? MatrixBatch<X>{data, sizes, strides, 2} : MatrixBatch<X>{};
  }
};

template <typename Tiles>
void run(
    const std::string& what,
    int64_t m,
    int64_t n,
    int64_t d,
    int64_t e,
    bool is_causal,
    double scale,
    void** x) {
  using S = typename Tiles::S;
  const Sizes sizes{1, m, is_causal ? std::min(m, n) : n, d, e};
  const auto form = form_of(is_causal, scale);
  const Dense<const S> q(x[0], m, d), k(x[1], n, d), v(x[2], n, e),
      grad_output(x[3], m, e), grad_attn(x[4], m, n), given(x[5], m, n),
      q_tangent(x[6], m, d), k_tangent(x[7], n, d), v_tangent(x[8], n, e);
  const Dense<S> output(x[9], m, e), attn(x[10], m, n), grad_q(x[11], m, d),
      grad_k(x[12], n, d), grad_v(x[13], n, e);
  if (what == "forward") {
    return forward_by<S, ForwardTile<Tiles>>(
        {sizes, output, attn, q, k, v, form}, runtime);
  }
  if (what == "backward") {
    const BackwardArgs<S> args{
        sizes,
        grad_q,
        grad_k,
        grad_v,
        grad_output,
        grad_attn,
        q,
        k,
        v,
        given,
        form};
    return backward_by<S, BackwardTile<Tiles>>(args, runtime);
  }
  const SecondOrderArgs<S> args{
      {sizes, grad_q, grad_k, grad_v, grad_output, {}, q, k, v, {}, form},
      output,
      q_tangent,
      k_tangent,
      v_tangent};
  if (what == "second order") {
    return backward_by<S, SecondOrderTile<Tiles>>(args, runtime);
  }
  const Dense<const S> w_q(x[14], m, d), w_k(x[15], n, d), w_v(x[16], n, e),
      w_grad_output(x[17], m, e);
  backward_by<S, ThirdOrderTile<Tiles>>(
      ThirdOrderArgs<S>{args, w_grad_output, w_q, w_k, w_v}, runtime);
}

} // namespace

#define KIND(name, ...)                                         \
  extern "C" void name(                                         \
      const char* what,                                         \
      int64_t m,                                                \
      int64_t n,                                                \
      int64_t d,                                                \
      int64_t e,                                                \
      int causal,                                               \
      double scale,                                             \
      void** tensors) {                                         \
    run<__VA_ARGS__>(what, m, n, d, e, causal, scale, tensors); \
  }
KIND(pairs_bfloat16, VnniTiles<Pairs>)
KIND(brgemm_bfloat16, VnniTiles<Brgemm<at::BFloat16>>)
KIND(brgemm_half, VnniTiles<Brgemm<at::Half>>)
KIND(fma_float, FmaTiles<float>)
KIND(fma_double, FmaTiles<double>)
KIND(fma_bfloat16, FmaTiles<at::BFloat16>)
KIND(fma_half, FmaTiles<at::Half>)
