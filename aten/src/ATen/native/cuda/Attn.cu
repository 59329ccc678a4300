#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/cpu/AttnKernel.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_backward_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#endif

#if !defined(USE_ROCM)
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/native/cuda/AttnColumns.cuh>
#include <ATen/native/cuda/AttnRows.cuh>
#include <ATen/native/cuda/AttnWideColumns.cuh>
#include <ATen/native/cuda/AttnWideRows.cuh>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

namespace at::native {

namespace {

// attn = tanh(q kᵀ), output = attn v, for what the kernels don't do.
void attn_composed(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v) {
  const NoGradGuard no_grad; // matmul_out refuses what requires grad
  Tensor to = attn;
  at::matmul_out(to, q, k.mT()).tanh_();
  to = output;
  at::matmul_out(to, attn, v);
}

void attn_backward_composed(
    const Tensor& grad_q,
    const Tensor& grad_k,
    const Tensor& grad_v,
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn) {
  const std::array<bool, 3> wanted = {
      grad_q.defined(), grad_k.defined(), grad_v.defined()};
  const auto [q_, k_, v_] =
      native::_attn_backward(grad_output, grad_attn, q, k, v, attn, wanted);
  if (q_.defined()) {
    grad_q.copy_(q_);
  }
  if (k_.defined()) {
    grad_k.copy_(k_);
  }
  if (v_.defined()) {
    grad_v.copy_(v_);
  }
}

#if !defined(USE_ROCM)

using attn_tiles::Batch;
using attn_tiles::kBatchDims;
using attn_tiles::Operand;
using attn_tiles::Scores;

// Of the batch dimensions of N tensors, the neighbours that are one dimension
// in each tensor are merged; none if too many remain, or too large ones.
template <size_t N>
struct MergedBatch {
  Batch batch{};
  int64_t strides[N][kBatchDims] = {};
};

template <size_t N>
std::optional<MergedBatch<N>> merge_batch(
    const std::array<const Tensor*, N>& tensors) {
  MergedBatch<N> merged;
  for (auto& size : merged.batch.sizes) {
    size = 1;
  }
  int at = kBatchDims; // what dimensions are merged into
  for (int64_t dim = tensors[0]->dim() - 3; dim >= 0; --dim) {
    const int64_t size = tensors[0]->size(dim);
    if (size == 1) {
      continue;
    }
    bool merges = at < kBatchDims;
    for (size_t i = 0; merges && i < N; ++i) {
      merges = !tensors[i]->defined() ||
               tensors[i]->stride(dim) ==
                   merged.strides[i][at] * merged.batch.sizes[at];
    }
    if (!merges) {
      if (at == 0) {
        return std::nullopt;
      }
      --at;
      for (size_t i = 0; i < N; ++i) {
        merged.strides[i][at] =
            tensors[i]->defined() ? tensors[i]->stride(dim) : 0;
      }
    }
    if (size > std::numeric_limits<int>::max() / merged.batch.sizes[at]) {
      return std::nullopt;
    }
    merged.batch.sizes[at] *= size;
  }
  return merged;
}

// Whether each row starts at a multiple of 16 bytes, and is contiguous.
bool has_aligned_rows(const Tensor& x) {
  const int64_t step = 16 / x.element_size();
  bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 &&
                 (x.size(-1) == 1 || x.stride(-1) == 1);
  for (int64_t dim = 0; dim < x.dim() - 1; ++dim) {
    aligned = aligned && (x.size(dim) == 1 || x.stride(dim) % step == 0);
  }
  return aligned;
}

// x, or a copy of it with such rows, of which those that are one in memory
// (x is expanded) remain one.
Tensor with_aligned_rows(const Tensor& x) {
  if (!x.defined() || has_aligned_rows(x)) {
    return x;
  }
  Tensor once = x;
  for (int64_t dim = 0; dim < x.dim() - 1; ++dim) {
    if (x.stride(dim) == 0) {
      once = once.narrow(dim, 0, 1);
    }
  }
  const int64_t step = 16 / x.element_size();
  DimVector sizes(once.sizes());
  sizes.back() = (sizes.back() + step - 1) / step * step;
  return at::empty(sizes, x.options())
      .narrow(-1, 0, x.size(-1))
      .copy_(once)
      .expand(x.sizes());
}

template <typename T>
Operand<T> operand_of(const Tensor& x, const int64_t (&batch)[kBatchDims]) {
  Operand<T> to{};
  if (x.defined()) {
    to.data = static_cast<const T*>(x.const_data_ptr());
    to.row = x.stride(-2);
    std::copy(std::begin(batch), std::end(batch), to.batch);
  }
  return to;
}

// The same, for writing unless T is const.
template <typename T>
Scores<T> scores_of(const Tensor& x, const int64_t (&batch)[kBatchDims]) {
  Scores<T> to{};
  if (x.defined()) {
    if constexpr (std::is_const_v<T>) {
      to.data = static_cast<T*>(x.const_data_ptr());
    } else {
      to.data = static_cast<T*>(x.mutable_data_ptr());
    }
    to.row = x.stride(-2);
    to.column = x.stride(-1);
    std::copy(std::begin(batch), std::end(batch), to.batch);
    to.aligned = x.size(-1) % 8 == 0 && has_aligned_rows(x);
  }
  return to;
}

// With fewer blocks, smaller ones are faster, though they read more of what
// the others do: that takes less time than what float's products do.
template <typename T>
int64_t enough_blocks() {
  const int64_t processors =
      at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  return (sizeof(T) < sizeof(float) ? 2 : 4) * processors / 3;
}

// Whether there are kernels for such sizes, of such a dtype, on this device.
bool has_kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  constexpr int64_t widest = 128;
  constexpr int64_t most = std::numeric_limits<int>::max() - widest;
  return q.size(-1) <= widest && v.size(-1) <= widest && q.size(-2) <= most &&
         k.size(-2) <= most &&
         at::cuda::getCurrentDeviceProperties()->major >= 8;
}

// How many blocks a sweep over so many rows, or columns, of every sample has.
int64_t blocks_of(const Batch& batch, int64_t lines, int64_t lines_of_block) {
  const auto& [x, y, z] = batch.sizes;
  return static_cast<int64_t>(x) * y * z *
         ((lines + lines_of_block - 1) / lines_of_block);
}

// Launches a sweep over the rows, or the columns, of every sample; false if
// this device has too little room for that.
template <typename Sweep, typename Args>
bool launch(
    void (*kernel)(Args),
    const Args& args,
    int64_t lines,
    int64_t lines_of_block) {
  const int64_t blocks = blocks_of(args.batch, lines, lines_of_block);
  constexpr size_t shared = Sweep::shared;
  if (blocks > std::numeric_limits<int>::max() ||
      shared > at::cuda::getCurrentDeviceProperties()->sharedMemPerBlockOptin) {
    return false;
  }
  constexpr int without_asking = 48 << 10;
  if constexpr (Sweep::shared > without_asking) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sweep::shared));
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  kernel<<<static_cast<int>(blocks), Sweep::threads, Sweep::shared, stream>>>(
      args);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

// Calls of with how many warps share a block's rows or columns: the first, with
// which blocks are largest, or the next, until there are enough blocks, or what
// takes less shared memory than there is. False if nothing does.
template <int first, int... others, typename F>
bool for_across_of(
    std::integer_sequence<int, first, others...> /*across*/,
    const Batch& batch,
    int64_t lines,
    int64_t lines_of_block, // without sharing
    int64_t enough,
    const F& of) {
  const std::integral_constant<int, first> across{};
  if constexpr (sizeof...(others) > 0) {
    const std::integer_sequence<int, others...> next{};
    if ((blocks_of(batch, lines, lines_of_block / first) >= enough &&
         of(across)) ||
        for_across_of(next, batch, lines, lines_of_block, enough, of)) {
      return true;
    }
  }
  return of(across);
}

// Calls of with the least width of tiles that has room for d and e columns;
// false if there is none for T.
template <typename T, typename F>
bool for_width_of(int d, int e, const F& of) {
  if (d <= 64 && e <= 64) {
    return of(std::integral_constant<int, 64>{});
  }
  if constexpr (sizeof(T) <= sizeof(float)) {
    return of(std::integral_constant<int, 128>{});
  }
  return false;
}

// Calls of with how T, float or double, is multiplied.
template <typename T, typename F>
bool for_precision_of(const F& of) {
  using attn_tiles::Precision;
  if constexpr (std::is_same_v<T, float>) {
    const auto precision = at::globalContext().float32Precision(
        Float32Backend::CUDA, Float32Op::MATMUL);
    if (precision != Float32Precision::TF32) {
      return of(std::integral_constant<Precision, Precision::split>{});
    }
  }
  return of(std::integral_constant<Precision, Precision::plain>{});
}

// Of S = x yᵀ, element by element, P is made, and z = P w: see AttnRows.cuh.
template <typename T, bool backward>
bool sweep_rows(
    const Tensor& x,
    const Tensor& y,
    const Tensor& w,
    const Tensor& attn,
    const Tensor& grad_attn,
    const Tensor& z) {
  const auto merged = merge_batch<5>({&attn, &x, &y, &w, &grad_attn});
  if (!merged) {
    return false;
  }
  const auto& strides = merged->strides;
  attn_tiles::RowArgs<T, backward> args{};
  args.batch = merged->batch;
  args.attn =
      scores_of<std::conditional_t<backward, const T, T>>(attn, strides[0]);
  args.x = operand_of<T>(x, strides[1]);
  args.y = operand_of<T>(y, strides[2]);
  args.w = operand_of<T>(w, strides[3]);
  args.grad_attn = scores_of<const T>(grad_attn, strides[4]);
  args.z = static_cast<T*>(z.mutable_data_ptr());
  args.m = attn.size(-2);
  args.n = attn.size(-1);
  args.d = x.defined() ? x.size(-1) : 0;
  args.e = w.size(-1);
  const int64_t enough = enough_blocks<T>();
  return for_width_of<T>(args.d, args.e, [&](auto width) {
    if constexpr (sizeof(T) >= sizeof(float)) {
      constexpr int rows = attn_tiles::WideRowSweep<T, width, 1>::rows;
      return for_precision_of<T>([&](auto precision) {
        const attn_tiles::WideAcross<T, precision> all{};
        return for_across_of(
            all, args.batch, args.m, rows, enough, [&](auto across) {
              using Sweep = attn_tiles::WideRowSweep<T, width, across>;
              return launch<Sweep>(
                  attn_tiles::
                      attn_wide_rows<T, width, backward, precision, across>,
                  args,
                  args.m,
                  Sweep::rows);
            });
      });
    } else {
      constexpr int rows = attn_tiles::RowSweep<width, 1>::rows;
      const attn_tiles::Across<width> all{};
      return for_across_of(
          all, args.batch, args.m, rows, enough, [&](auto across) {
            using Sweep = attn_tiles::RowSweep<width, across>;
            return launch<Sweep>(
                attn_tiles::attn_rows<T, width, backward, across>,
                args,
                args.m,
                Sweep::rows);
          });
    }
  });
}

// Calls of with each launch's arguments, and whether it makes both gradients,
// which it does if both are wanted and `fit` into registers.
template <bool fit, typename T, typename F>
bool for_gradients_of(const attn_tiles::ColumnArgs<T>& args, const F& of) {
  if (!args.grad_k || !args.grad_v) {
    return of(args, std::false_type{});
  }
  if constexpr (fit) {
    return of(args, std::true_type{});
  } else {
    auto of_k = args, of_v = args;
    of_k.grad_v = of_v.grad_k = nullptr;
    return of(of_k, std::false_type{}) && of(of_v, std::false_type{});
  }
}

// S̄ᵀ = (v G_oᵀ + G_aᵀ) ∘ (1 - attnᵀ²), grad_k = S̄ᵀ q, grad_v = attnᵀ G_o
template <typename T>
bool sweep_columns(
    const Tensor& q,
    const Tensor& v,
    const Tensor& attn,
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& grad_k,
    const Tensor& grad_v) {
  const auto merged = merge_batch<5>({&attn, &q, &v, &grad_output, &grad_attn});
  if (!merged) {
    return false;
  }
  const auto& strides = merged->strides;
  attn_tiles::ColumnArgs<T> args{};
  args.batch = merged->batch;
  args.attn = scores_of<const T>(attn, strides[0]);
  args.q = operand_of<T>(q, strides[1]);
  args.v = operand_of<T>(v, strides[2]);
  args.grad_output = operand_of<T>(grad_output, strides[3]);
  args.grad_attn = scores_of<const T>(grad_attn, strides[4]);
  if (grad_k.defined()) {
    args.grad_k = static_cast<T*>(grad_k.mutable_data_ptr());
  }
  if (grad_v.defined()) {
    args.grad_v = static_cast<T*>(grad_v.mutable_data_ptr());
  }
  args.m = attn.size(-2);
  args.n = attn.size(-1);
  args.d = q.size(-1);
  args.e = v.size(-1);
  const int64_t enough = enough_blocks<T>();
  return for_width_of<T>(args.d, args.e, [&](auto width) {
    if constexpr (sizeof(T) >= sizeof(float)) {
      constexpr int columns = attn_tiles::WideColumnSweep<T, width, 1>::columns;
      constexpr bool fit = width * sizeof(T) <= 64 * sizeof(float);
      return for_precision_of<T>([&](auto precision) {
        const attn_tiles::WideAcross<T, precision> all{};
        return for_gradients_of<fit>(args, [&](const auto& some, auto both) {
          return for_across_of(
              all, args.batch, args.n, columns, enough, [&](auto across) {
                using Sweep = attn_tiles::WideColumnSweep<T, width, across>;
                return launch<Sweep>(
                    attn_tiles::
                        attn_wide_columns<T, width, precision, both, across>,
                    some,
                    args.n,
                    Sweep::columns);
              });
        });
      });
    } else {
      constexpr int columns = attn_tiles::ColumnSweep<width, 1>::columns;
      const attn_tiles::Across<width> all{};
      return for_gradients_of<true>(args, [&](const auto& some, auto both) {
        return for_across_of(
            all, args.batch, args.n, columns, enough, [&](auto across) {
              using Sweep = attn_tiles::ColumnSweep<width, across>;
              return launch<Sweep>(
                  attn_tiles::attn_columns<T, width, both, across>,
                  some,
                  args.n,
                  Sweep::columns);
            });
      });
    }
  });
}

// Calls of with an element as the kernels know it; false if they don't.
template <typename F>
bool for_dtype_of(const Tensor& q, const F& of) {
  switch (q.scalar_type()) {
    case kHalf:
      return of(__half{});
    case kBFloat16:
      return of(__nv_bfloat16{});
    case kFloat:
      return of(float{});
    case kDouble:
      return of(double{});
    default:
      return false;
  }
}

#endif // !USE_ROCM

void attn_kernel_cuda(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v) {
#if !defined(USE_ROCM)
  if (attn.numel() && has_kernels(q, k, v) && for_dtype_of(q, [&](auto type) {
        return sweep_rows<decltype(type), false>(
            with_aligned_rows(q),
            with_aligned_rows(k),
            with_aligned_rows(v),
            attn,
            {},
            output);
      })) {
    return;
  }
#endif
  attn_composed(output, attn, q, k, v);
}

void attn_backward_kernel_cuda(
    const Tensor& grad_q,
    const Tensor& grad_k,
    const Tensor& grad_v,
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn) {
  // The dispatcher's is grad_output's, which may be undefined.
  const c10::cuda::CUDAGuard guard(q.device());
#if !defined(USE_ROCM)
  if (attn.numel() && has_kernels(q, k, v) && for_dtype_of(q, [&](auto type) {
        using T = decltype(type);
        const Tensor v_ = with_aligned_rows(v);
        const Tensor grad = with_aligned_rows(grad_output);
        return (!grad_q.defined() ||
                sweep_rows<T, true>(
                    grad, v_, with_aligned_rows(k), attn, grad_attn, grad_q)) &&
               ((!grad_k.defined() && !grad_v.defined()) ||
                sweep_columns<T>(
                    with_aligned_rows(q),
                    v_,
                    attn,
                    grad,
                    grad_attn,
                    grad_k,
                    grad_v));
      })) {
    return;
  }
#endif
  attn_backward_composed(
      grad_q, grad_k, grad_v, grad_output, grad_attn, q, k, v, attn);
}

} // namespace

REGISTER_CUDA_DISPATCH(attn_stub, &attn_kernel_cuda)
REGISTER_CUDA_DISPATCH(attn_backward_stub, &attn_backward_kernel_cuda)

} // namespace at::native
