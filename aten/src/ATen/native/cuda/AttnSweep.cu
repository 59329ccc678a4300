#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/native/Attn.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/irange.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_attn_backward_native.h>
#include <ATen/ops/_attn_output_backward_native.h>
#include <ATen/ops/_portable_attn.h>
#include <ATen/ops/_portable_attn_backward.h>
#include <ATen/ops/_portable_attn_output.h>
#include <ATen/ops/_portable_attn_output_backward.h>
#include <ATen/ops/attn_native.h>
#include <ATen/ops/attn_output_native.h>
#include <ATen/ops/empty.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#if !defined(USE_ROCM) && CUDART_VERSION >= 12000
#define ATTN_HAS_SWEEP
#include <ATen/native/cuda/AttnSweep.cuh>
#endif

namespace at::native {

#ifdef ATTN_HAS_SWEEP
namespace {

using namespace attn_sweep;

// With this many keys a forward of width 64 goes by LongForward.
constexpr int64_t kLong = 8192;

constexpr int64_t kWidest = 128;
// Blocks and rows are ints.
constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
// A block goes through Y alone. With few blocks and a long Y most of the GPU
// would wait, and products that are split over K are faster. An estimate.
constexpr int64_t kFewBlocks = 32, kLongAlone = 2048;

// Whether the device is one that the kernels are for, and has their code: a
// build for older architectures runs on it too, by their PTX.
bool is_for(const Device& device) {
  const auto* about = at::cuda::getDeviceProperties(device.index());
  if (about->major != 9 || about->minor != 0) {
    return false;
  }
  static const bool has_code = [] {
    cudaFuncAttributes found;
    using P = PlanOf<__half, Sweep::kForward, 64>::type;
    C10_CUDA_CHECK(cudaFuncGetAttributes(
        &found, reinterpret_cast<const void*>(&attn_sweep::attn_sweep<P>)));
    return found.ptxVersion >= 90;
  }();
  return has_code;
}

// Whether TMA can read x: rows of neighboring elements, and all else at
// multiples of 16 bytes.
bool is_readable(const Tensor& x) {
  if (x.stride(-1) != 1 || (x.size(-2) > 1 && x.stride(-2) == 0) ||
      reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 != 0) {
    return false;
  }
  for (const auto i : c10::irange(x.dim() - 1)) {
    if (x.size(i) > 1 && x.stride(i) % 8 != 0) {
      return false;
    }
  }
  return true;
}

enum Matrix { kQ, kK, kV, kG, kAttn, kGradAttn, kMatrices };

// A call that the kernels take: the matrices as TMA can read them, and their
// batch dimensions, merged where all of them allow it.
class Call {
 public:
  // q, k and v are there, the others where the call has them. None for what the
  // kernels don't take; the arguments are those of an operator that has checked
  // them.
  static std::optional<Call> of(
      const std::array<Tensor, kMatrices>& matrices,
      bool is_causal = false,
      double scale = 1) {
    const auto& q = matrices[kQ];
    const auto& v = matrices[kV];
    const auto takes = [](int64_t width) {
      return width % 8 == 0 && width <= kWidest;
    };
    const auto dtype = q.scalar_type();
    if ((dtype != kBFloat16 && dtype != kHalf) || q.numel() == 0 ||
        v.numel() == 0 || !takes(q.size(-1)) || !takes(v.size(-1)) ||
        !std::isfinite(static_cast<float>(scale)) || !is_for(q.device())) {
      return std::nullopt;
    }
    Call call;
    call.matrices_ = matrices;
    for (const auto which : c10::irange(int(kMatrices))) {
      auto& x = call.matrices_[which];
      if (x.defined() && !is_readable(x)) {
        if (which >= kAttn) { // too large to copy
          return std::nullopt;
        }
        x = x.clone(MemoryFormat::Contiguous);
      }
    }
    call.is_causal_ = is_causal;
    call.scale_ = static_cast<float>(scale);
    // Where attn is read, samples have one number.
    const int least = matrices[kAttn].defined() ? kBatchDims - 1 : 0;
    const bool fits = call.merge_batch() >= least && call.is_worth_it();
    return fits ? std::optional<Call>(std::move(call)) : std::nullopt;
  }

  void forward(const Tensor& output) const {
    if (width() <= 64 && keys() >= kLong) {
      return of_dtype(
          [&](auto type) { run<LongForward<decltype(type)>>(output, {}); });
    }
    sweep<Sweep::kForward, Stored::kNothing>(output, {});
  }
  // attn is contiguous, and its rows are multiples of 16 bytes.
  void forward(const Tensor& output, const Tensor& attn) const {
    sweep<Sweep::kForward, Stored::kAttn>(output, {}, attn);
  }
  // Any gradient may be undefined.
  void backward(
      const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v) const {
    if (matrices_[kGradAttn].defined()) {
      backward<Stored::kAttnAndGradient>(grad_q, grad_k, grad_v);
    } else if (matrices_[kAttn].defined()) {
      backward<Stored::kAttn>(grad_q, grad_k, grad_v);
    } else {
      backward<Stored::kNothing>(grad_q, grad_k, grad_v);
    }
  }

 private:
  int64_t width() const {
    return std::max(matrices_[kQ].size(-1), matrices_[kV].size(-1));
  }
  int64_t queries() const {
    return matrices_[kQ].size(-2);
  }
  // Those that some query sees: the others may hold anything.
  int64_t keys() const {
    const auto n = matrices_[kK].size(-2);
    return is_causal_ ? std::min(n, queries()) : n;
  }

  // Merges neighboring dimensions, the last one first. Returns the place of the
  // first that is left, and -1 if there are more than kBatchDims.
  int merge_batch() {
    const auto& q = matrices_[kQ];
    sizes_.fill(1);
    k_sizes_.fill(1);
    int place = kBatchDims;
    for (auto i = q.dim() - 3; i >= 0; --i) {
      const auto size = q.size(i), k_size = matrices_[kK].size(i);
      if (size == 1) {
        continue;
      }
      std::array<int64_t, kMatrices> strides{};
      for (const auto which : c10::irange(int(kMatrices))) {
        const auto& x = matrices_[which];
        strides[which] = x.defined() && x.size(i) > 1 ? x.stride(i) : 0;
      }
      bool merges = place < kBatchDims &&
                    (k_sizes_[place] == sizes_[place]) == (k_size == size);
      for (const auto which : c10::irange(int(kMatrices))) {
        merges =
            merges && strides[which] == strides_[which][place] * sizes_[place];
      }
      if (!merges) {
        if (place == 0) {
          return -1;
        }
        --place;
        for (const auto which : c10::irange(int(kMatrices))) {
          strides_[which][place] = strides[which];
        }
      }
      sizes_[place] *= size;
      k_sizes_[place] *= k_size;
    }
    return place;
  }

  static int64_t product(const std::array<int64_t, kBatchDims>& sizes) {
    return sizes[0] * sizes[1] * sizes[2];
  }

  bool is_worth_it() const {
    const auto m = queries(), n = matrices_[kK].size(-2);
    const auto samples = product(sizes_), k_samples = product(k_sizes_);
    const auto fits = [](int64_t samples, int64_t rows, int64_t length) {
      return samples * ((rows + 127) / 128) >= kFewBlocks ||
             length <= kLongAlone;
    };
    return samples * std::max(m, n) < kMost && fits(samples, m, n) &&
           (!matrices_[kG].defined() ||
            fits(k_samples, n, m * (samples / k_samples)));
  }

  template <typename F>
  void of_dtype(F fn) const {
    if (matrices_[kQ].scalar_type() == kHalf) {
      fn(__half{});
    } else {
      fn(__nv_bfloat16{});
    }
  }

  template <Stored kStored>
  void backward(
      const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v) const {
    if (grad_q.defined()) {
      sweep<Sweep::kRows, kStored>({}, grad_q);
    }
    if (grad_k.defined() || grad_v.defined()) {
      sweep<Sweep::kColumns, kStored>(grad_v, grad_k);
    }
  }

  template <Sweep kSweep, Stored kStored>
  void sweep(
      const Tensor& values,
      const Tensor& gradients,
      const Tensor& attn = {}) const {
    of_dtype([&](auto type) {
      using T = decltype(type);
      if (width() <= 64) {
        run<typename PlanOf<T, kSweep, 64, kStored>::type>(
            values, gradients, attn);
      } else {
        run<typename PlanOf<T, kSweep, 128, kStored>::type>(
            values, gradients, attn);
      }
    });
  }

  // The first `rows` rows of each sample. A dimension that samples share is
  // left out: its size is 1.
  CUtensorMap tensor_map(Matrix which, int64_t rows, int box) const {
    const auto& x = matrices_[which];
    cuuint64_t sizes[2 + kBatchDims], strides[1 + kBatchDims];
    sizes[0] = x.size(-1);
    sizes[1] = rows;
    strides[0] = x.size(-2) > 1 ? 2 * x.stride(-2) : 16;
    for (const auto i : c10::irange(kBatchDims)) {
      const auto place = kBatchDims - 1 - i;
      const auto stride = strides_[which][place];
      sizes[2 + i] = stride ? sizes_[place] : 1;
      strides[1 + i] = stride ? 2 * stride : 16;
    }
    return tensor_map(x, sizes, strides, box);
  }

  // A contiguous matrix, its samples by one number.
  CUtensorMap tensor_map(const Tensor& x, int box) const {
    const cuuint64_t n = x.size(-1), m = x.size(-2);
    const cuuint64_t sizes[] = {n, m, x.numel() / (m * n), 1, 1};
    const cuuint64_t strides[] = {2 * n, 2 * m * n, 16, 16};
    return tensor_map(x, sizes, strides, box);
  }

  // Describes a matrix to TMA, which reads and writes it in boxes of 64
  // columns. Strides are bytes.
  static CUtensorMap tensor_map(
      const Tensor& x,
      const cuuint64_t (&sizes)[2 + kBatchDims],
      const cuuint64_t (&strides)[1 + kBatchDims],
      int box) {
    static const auto encode = [] {
      void* function = nullptr;
      cudaDriverEntryPointQueryResult result;
      const char* name = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
      C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion(
          name, &function, 12000, cudaEnableDefault, &result));
#else
      C10_CUDA_CHECK(
          cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result));
#endif
      TORCH_CHECK(function != nullptr, "the driver has no ", name);
      return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    const cuuint32_t boxes[] = {64, static_cast<cuuint32_t>(box), 1, 1, 1};
    const cuuint32_t steps[] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const auto result = encode(
        &map,
        x.scalar_type() == kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2 + kBatchDims,
        const_cast<void*>(x.const_data_ptr()),
        sizes,
        strides,
        boxes,
        steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    TORCH_CHECK(
        result == CUDA_SUCCESS,
        "cuTensorMapEncodeTiled: error ",
        static_cast<int>(result));
    return map;
  }

  template <class P>
  void run(
      const Tensor& values,
      const Tensor& gradients,
      const Tensor& attn = {}) const {
    using T = typename P::T;
    constexpr bool kColumns = P::kSweep == Sweep::kColumns;
    constexpr Matrix kOfQueries[] = {kQ, kG}, kOfKeys[] = {kK, kV};
    const auto& x = kColumns ? kOfKeys : kOfQueries;
    const auto& y = kColumns ? kOfQueries : kOfKeys;
    Args<T> args{};
    args.x_rows = kColumns ? matrices_[kK].size(-2) : queries();
    args.y_rows = kColumns ? queries() : keys();
    const auto describe =
        [&](Matrix which, auto& map, bool* has, int rows, int box) {
          map = tensor_map(which, rows, box);
          for (const auto i : c10::irange(kBatchDims)) {
            has[i] = strides_[which][i] != 0;
          }
        };
    for (const auto i : c10::irange(P::kOperands)) {
      const auto which = x[P::kReadsAttn ? 1 : i];
      describe(which, args.x[i], args.x_has[i], args.x_rows, P::kRows);
    }
    for (const auto i : c10::irange(2)) {
      describe(y[i], args.y[i], args.y_has[i], args.y_rows, P::kTile);
    }
    for (const auto i : c10::irange(P::kStreams)) {
      const auto which = i ? kGradAttn : kAttn;
      const int box = kColumns ? P::kTile : P::kRows;
      describe(which, args.attn[i], args.attn_has[i], queries(), box);
    }
    if (P::kWritesAttn) {
      args.attn[0] = tensor_map(attn, 16);
    }
    args.samples = args.shares = 1;
    for (const auto i : c10::irange(kBatchDims)) {
      args.x_sizes[i] = kColumns ? k_sizes_[i] : sizes_[i];
      args.share_sizes[i] = kColumns ? sizes_[i] / k_sizes_[i] : 1;
      args.samples *= args.x_sizes[i];
      args.shares *= args.share_sizes[i];
    }
    const auto result = [](const Tensor& to, T*& data, int& width) {
      data = to.defined() ? static_cast<T*>(to.mutable_data_ptr()) : nullptr;
      width = to.defined() ? to.size(-1) : 0;
    };
    result(values, args.values, args.values_width);
    result(gradients, args.gradients, args.gradients_width);
    args.scale = scale_;
    args.is_causal = is_causal_;

    constexpr int kBytes = sizeof(Shared<P>) + 1024; // for its alignment
    static_assert(kBytes <= 232448);
    const auto kernel = &attn_sweep::attn_sweep<P>;
    C10_CUDA_CHECK(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const int blocks = (args.x_rows + P::kRows - 1) / P::kRows * args.samples;
    const int processors =
        at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    cudaLaunchConfig_t config{};
    config.gridDim = std::min(blocks, processors);
    config.blockDim = P::kThreads;
    config.dynamicSmemBytes = kBytes;
    config.stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
  }

  std::array<Tensor, kMatrices> matrices_;
  // Of the merged dimensions, the last of which runs fastest; k has 1 where
  // samples of q share its own. Strides are 0 where samples share a matrix.
  std::array<int64_t, kBatchDims> sizes_, k_sizes_;
  std::array<std::array<int64_t, kBatchDims>, kMatrices> strides_{};
  bool is_causal_;
  float scale_;
};

// Gradients of q, k and v, to be written.
std::array<Tensor, 3> new_gradients(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const std::array<bool, 3>& wanted) {
  std::array<Tensor, 3> grads;
  const Tensor* const inputs[] = {&q, &k, &v};
  for (const auto i : c10::irange(3)) {
    if (wanted[i]) {
      grads[i] = at::empty(inputs[i]->sizes(), q.options());
    }
  }
  return grads;
}

} // namespace
#endif // ATTN_HAS_SWEEP

// output = attn v, with attn = tanh(q kᵀ): by the kernel for compute capability
// 9.0, or what a build has besides for any GPU.
std::tuple<Tensor, Tensor> attn_cuda(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  check_attn_inputs(q, k, v, q.sym_sizes(), k.sym_sizes(), v.sym_sizes());
#ifdef ATTN_HAS_SWEEP
  const auto call = k.size(-2) % 8 == 0 ? Call::of({q, k, v}) : std::nullopt;
  if (call) {
    c10::DimVector sizes(q.sizes());
    sizes.back() = v.size(-1);
    auto output = at::empty(sizes, q.options());
    sizes.back() = k.size(-2);
    auto attn = at::empty(sizes, q.options());
    call->forward(output, attn);
    return std::make_tuple(std::move(output), std::move(attn));
  }
#endif
  return at::_portable_attn(q, k, v);
}

// The backward of attn, likewise. The kernels read attn. They take no call
// without grad_output, which has no products to wait for.
std::tuple<Tensor, Tensor, Tensor> _attn_backward_cuda(
    const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    std::array<bool, 3> output_mask) {
  const auto g = grad_output.value_or(Tensor());
  const auto h = grad_attn.value_or(Tensor());
  check_attn_backward_inputs(g, h, q, k, v, attn);
#ifdef ATTN_HAS_SWEEP
  const auto call =
      g.defined() ? Call::of({q, k, v, g, attn, h}) : std::nullopt;
  if (call) {
    auto [grad_q, grad_k, grad_v] = new_gradients(q, k, v, output_mask);
    call->backward(grad_q, grad_k, grad_v);
    return std::make_tuple(
        std::move(grad_q), std::move(grad_k), std::move(grad_v));
  }
#endif
  return at::_portable_attn_backward(
      grad_output, grad_attn, q, k, v, attn, output_mask);
}

// Returns output alone, with attn = tanh(scale q kᵀ), or 0 above the diagonal
// if is_causal, likewise.
Tensor attn_output_cuda(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale) {
  check_attn_output_inputs(q, k, v);
#ifdef ATTN_HAS_SWEEP
  if (const auto call = Call::of({q, k, v}, is_causal, scale)) {
    c10::DimVector sizes(q.sizes());
    sizes.back() = v.size(-1);
    auto output = at::empty(sizes, q.options());
    call->forward(output);
    return output;
  }
#endif
  return at::_portable_attn_output(q, k, v, is_causal, scale);
}

// The backward of attn_output, likewise. The kernels make each tile of attn
// again, and add the gradients of k and v over the samples that share them.
std::tuple<Tensor, Tensor, Tensor> _attn_output_backward_cuda(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale,
    std::array<bool, 3> output_mask) {
  check_attn_output_backward_inputs(grad_output, q, k, v);
#ifdef ATTN_HAS_SWEEP
  if (const auto call = Call::of({q, k, v, grad_output}, is_causal, scale)) {
    auto [grad_q, grad_k, grad_v] = new_gradients(q, k, v, output_mask);
    call->backward(grad_q, grad_k, grad_v);
    return std::make_tuple(
        std::move(grad_q), std::move(grad_k), std::move(grad_v));
  }
#endif
  return at::_portable_attn_output_backward(
      grad_output, q, k, v, is_causal, scale, output_mask);
}

} // namespace at::native
