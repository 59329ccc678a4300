#include "kernels.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

// The operators of torch_attn for CPU tensors. What the kernels don't take goes
// to composed.py, which also says what is wrong with wrong arguments.

namespace torch_attn {

// Within a region of parallel work AttnTensors.h returns 1. The stable ABI
// cannot tell whether a call is in one.
int64_t max_threads() {
  return torch::stable::get_num_threads();
}

void run(
    int64_t threads,
    void (*task)(void* context, int64_t thread),
    void* context) {
  if (threads == 1) {
    return task(context, 0);
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (auto thread = begin; thread < end; ++thread) {
      task(context, thread);
    }
  });
}

void* allocate(size_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (memory == nullptr && bytes > 0) {
    throw std::bad_alloc();
  }
  return memory;
}

void release(void* memory) {
  std::free(memory);
}

namespace {

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;
using Results = std::tuple<Tensor, Tensor, Tensor>;
using SecondOrderResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::array<Optional, 3>;
using Mask = torch::headeronly::HeaderOnlyArrayRef<bool>;

// Its number may be one that the stable headers have no name for.
int32_t dtype(const Tensor& x) {
  int32_t found = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &found));
  return found;
}

// Calls f with a value of x's dtype; returns false if no kernel has that dtype.
template <typename F>
bool with_dtype(const Tensor& x, const F& f) {
  const auto type = dtype(x);
  if (type == aoti_torch_dtype_float32()) {
    f(float());
  } else if (type == aoti_torch_dtype_bfloat16()) {
    f(c10::BFloat16());
  } else if (type == aoti_torch_dtype_float16()) {
    f(c10::Half());
  } else if (type == aoti_torch_dtype_float64()) {
    f(double());
  } else {
    return false;
  }
  return true;
}

// Returns whether the kernels take q, k and v: composed.check finds nothing
// wrong with them, they are real, and not too wide. If `grouped`, batch
// dimensions of both k and v may be 1.
bool fits(const Tensor& q, const Tensor& k, const Tensor& v, bool grouped) {
  const auto dim = q.dim();
  if (dtype(q) != dtype(k) || dtype(q) != dtype(v) ||
      !with_dtype(q, [](auto) {}) || dim < 2 || k.dim() != dim ||
      v.dim() != dim) {
    return false;
  }
  const auto q_sizes = q.sizes(), k_sizes = k.sizes(), v_sizes = v.sizes();
  for (int64_t i = 0; i < dim - 2; ++i) {
    if (k_sizes[i] != v_sizes[i] ||
        (k_sizes[i] != q_sizes[i] && !(grouped && k_sizes[i] == 1))) {
      return false;
    }
  }
  return q_sizes[dim - 1] == k_sizes[dim - 1] &&
         k_sizes[dim - 2] == v_sizes[dim - 2] &&
         std::max(q_sizes[dim - 1], v_sizes[dim - 1]) <= max_width();
}

// q's sizes, but for the last one.
std::vector<int64_t> result_sizes(const Tensor& q, int64_t cols) {
  std::vector<int64_t> sizes(q.sizes().begin(), q.sizes().end());
  sizes.back() = cols;
  return sizes;
}

// Returns whether x is missing, or has the dtype and the sizes of a result of
// attn with `cols` columns.
bool is_result(const Optional& x, const Tensor& q, int64_t cols) {
  if (!x) {
    return true;
  }
  const auto sizes = result_sizes(q, cols);
  return dtype(*x) == dtype(q) &&
         std::equal(
             sizes.begin(), sizes.end(), x->sizes().begin(), x->sizes().end());
}

// Calls an operator that fused.py defines. Its results come first on the stack.
template <typename... Args>
auto call(const std::string& op, const Args&... args) {
  std::array<StableIValue, std::max<size_t>(sizeof...(Args), 4)> stack{
      torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(
      ("torch_attn::" + op).c_str(), "", stack.data(), TORCH_ABI_VERSION));
  return stack;
}

// Has composed.py compute what the kernels don't take. First asks what is wrong
// with the arguments: an error raised there would lose its text on the way.
template <typename Found, typename... Args>
Found composed(const std::string& op, const Args&... args) {
  const auto wrong = torch::stable::detail::to<std::string>(
      call("_wrong_" + op, args...).front());
  if (!wrong.empty()) {
    throw std::runtime_error(wrong);
  }
  auto results = call("_composed_" + op, args...);
  return [&]<typename... X>(std::tuple<X...>*) {
    return torch::stable::detail::unbox_to_tuple<X...>(results.data());
  }(static_cast<Found*>(nullptr));
}

// A new contiguous tensor of the dtype and the device of `like`.
Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (auto i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()),
      sizes.data(),
      strides.data(),
      dtype(like),
      aoti_torch_device_type_cpu(),
      0,
      &made));
  return Tensor(made);
}

// x[..., begin:, :] = 0 for a contiguous x
void set_zero(const Optional& x, int64_t begin = 0) {
  if (!x || x->numel() == 0) {
    return;
  }
  const int64_t rows = x->size(-2);
  const auto row = static_cast<int64_t>(x->element_size()) * x->size(-1);
  auto* data = static_cast<char*>(x->mutable_data_ptr());
  for (auto left = x->numel() / (rows * x->size(-1)); left-- > 0;) {
    std::memset(data + begin * row, 0, (rows - begin) * row);
    data += rows * row;
  }
}

// Presents tensors as batches whose batch dimensions are q's. The samples that
// share k and v follow each other.
class SharedBatch {
 public:
  SharedBatch(const Tensor& q, const Tensor& k)
      : batch_(q.sizes().begin(), q.sizes().end()) {
    const auto dims = static_cast<int64_t>(batch_.size()) - 2;
    std::vector<int64_t> shared;
    for (int64_t i = 0; i < dims; ++i) {
      const bool is_shared = k.size(i) != batch_[i];
      (is_shared ? shared : order_).push_back(i);
      group_ *= is_shared ? batch_[i] : 1;
    }
    order_.insert(order_.end(), shared.begin(), shared.end());
  }

  int64_t group() const {
    return group_;
  }

  template <typename S>
  MatrixBatch<S> operator()(const Optional& x) {
    if (!x) {
      return {};
    }
    const auto of_x = x->sizes(), strides_of_x = x->strides();
    auto& sizes = arrays_[used_++];
    auto& strides = arrays_[used_++];
    for (const auto i : order_) {
      sizes.push_back(batch_[i]);
      strides.push_back(of_x[i] == batch_[i] ? strides_of_x[i] : 0);
    }
    sizes.insert(sizes.end(), of_x.end() - 2, of_x.end());
    strides.insert(strides.end(), strides_of_x.end() - 2, strides_of_x.end());
    S* data = nullptr;
    if constexpr (std::is_const_v<S>) {
      data = static_cast<S*>(x->const_data_ptr());
    } else {
      data = static_cast<S*>(x->mutable_data_ptr());
    }
    return {data, sizes.data(), strides.data(), x->dim()};
  }

 private:
  std::vector<int64_t> batch_, order_;
  int64_t group_ = 1;
  std::array<std::vector<int64_t>, 30> arrays_; // of at most 15 tensors
  size_t used_ = 0;
};

// If is_causal, the columns of attn that are masked in all rows don't count.
Sizes sizes_of(const Tensor& q, const Tensor& v, bool is_causal) {
  const auto m = q.size(-2);
  const auto n = is_causal ? std::min(m, v.size(-2)) : v.size(-2);
  const auto begin = q.sizes().begin(), end = q.sizes().end() - 2;
  const auto batch = std::accumulate(begin, end, int64_t(1), std::multiplies());
  return {m * n == 0 ? 0 : batch, m, n, q.size(-1), v.size(-1)};
}

// attn = tanh(scale q kᵀ), or 0 above the diagonal if is_causal, output = attn
// v
void run_forward(
    const Tensor& output,
    const Optional& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale) {
  const auto sizes = sizes_of(q, v, is_causal);
  if (sizes.batch == 0) { // no attn: a sum without terms
    return set_zero(output);
  }
  SharedBatch batch_of(q, k);
  with_dtype(q, [&](auto one) {
    using S = decltype(one);
    forward(
        ForwardArgs<S>{
            sizes,
            batch_of.operator()<S>(output),
            batch_of.operator()<S>(attn),
            batch_of.operator()<const S>(q),
            batch_of.operator()<const S>(k),
            batch_of.operator()<const S>(v),
            form_of(is_causal, scale)});
  });
}

// With S̄ = scale (grad_output vᵀ + grad_attn) (1 - attn²), or 0 above the
// diagonal if is_causal:
//   grad_q = S̄ k, grad_k = S̄ᵀ q, grad_v = attnᵀ grad_output
// The gradients of k and v are sums over the samples that share them. A given
// gradient that is missing is zero; a missing attn is computed again.
void run_backward(
    const Gradients& grads,
    const Optional& grad_output,
    const Optional& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Optional& attn,
    bool is_causal,
    double scale) {
  const auto& [grad_q, grad_k, grad_v] = grads;
  if (!grad_q && !grad_k && !grad_v) {
    return;
  }
  const auto sizes = sizes_of(q, v, is_causal);
  if (sizes.batch == 0) {
    set_zero(grad_q);
    set_zero(grad_k);
    set_zero(grad_v);
    return;
  }
  set_zero(grad_k, sizes.n);
  set_zero(grad_v, sizes.n);
  SharedBatch batch_of(q, k);
  with_dtype(q, [&](auto one) {
    using S = decltype(one);
    backward(
        BackwardArgs<S>{
            sizes,
            batch_of.operator()<S>(grad_q),
            batch_of.operator()<S>(grad_k),
            batch_of.operator()<S>(grad_v),
            batch_of.operator()<const S>(grad_output),
            batch_of.operator()<const S>(grad_attn),
            batch_of.operator()<const S>(q),
            batch_of.operator()<const S>(k),
            batch_of.operator()<const S>(v),
            batch_of.operator()<const S>(attn),
            form_of(is_causal, scale),
            batch_of.group()});
  });
}

// Which results are wanted.
template <size_t N>
std::array<bool, N> mask_of(const std::vector<bool>& output_mask) {
  if (output_mask.size() != N) {
    throw std::runtime_error(
        "output_mask must have " + std::to_string(N) + " elements");
  }
  std::array<bool, N> mask;
  std::copy(output_mask.begin(), output_mask.end(), mask.begin());
  return mask;
}

Optional empty_like(const Tensor& x, bool wanted) {
  if (!wanted) {
    return {};
  }
  return empty(x, {x.sizes().begin(), x.sizes().end()});
}

// A missing one becomes an undefined tensor.
Results results_of(const Gradients& grads) {
  const auto& [grad_q, grad_k, grad_v] = grads;
  return {
      grad_q ? *grad_q : Tensor(),
      grad_k ? *grad_k : Tensor(),
      grad_v ? *grad_v : Tensor()};
}

std::tuple<Tensor, Tensor> attn(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!fits(q, k, v, false)) {
    return composed<std::tuple<Tensor, Tensor>>("attn", q, k, v);
  }
  auto output = empty(q, result_sizes(q, v.size(-1)));
  auto attn = empty(q, result_sizes(q, k.size(-2)));
  run_forward(output, attn, q, k, v, false, 1);
  return {output, attn};
}

Results attn_backward(
    const Optional& grad_output,
    const Optional& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn,
    const std::vector<bool>& output_mask) {
  const auto mask = mask_of<3>(output_mask);
  if (!fits(q, k, v, false) || !is_result(attn, q, k.size(-2)) ||
      !is_result(grad_attn, q, k.size(-2)) ||
      !is_result(grad_output, q, v.size(-1))) {
    return composed<Results>(
        "attn_backward", grad_output, grad_attn, q, k, v, attn, Mask(mask));
  }
  const bool any = grad_output || grad_attn;
  const Gradients grads{
      empty_like(q, mask[0] && any),
      empty_like(k, mask[1] && any),
      empty_like(v, mask[2] && grad_output)};
  run_backward(grads, grad_output, grad_attn, q, k, v, attn, false, 1);
  return results_of(grads);
}

Tensor attn_output(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale) {
  if (!fits(q, k, v, true)) {
    return std::get<0>(
        composed<std::tuple<Tensor>>("attn_output", q, k, v, is_causal, scale));
  }
  auto output = empty(q, result_sizes(q, v.size(-1)));
  run_forward(output, {}, q, k, v, is_causal, scale);
  return output;
}

Results attn_output_backward(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    bool is_causal,
    double scale,
    const std::vector<bool>& output_mask) {
  const auto mask = mask_of<3>(output_mask);
  if (!fits(q, k, v, true) || !is_result(grad_output, q, v.size(-1))) {
    return composed<Results>(
        "attn_output_backward",
        grad_output,
        q,
        k,
        v,
        is_causal,
        scale,
        Mask(mask));
  }
  const Gradients grads{
      empty_like(q, mask[0]), empty_like(k, mask[1]), empty_like(v, mask[2])};
  run_backward(grads, grad_output, {}, q, k, v, {}, is_causal, scale);
  return results_of(grads);
}

// Tangents of q, k, v and grad_output; what is missing is zero.
struct OptionalTangents {
  Optional q, k, v, grad_output;

  // Returns whether attn has a tangent.
  bool of_scores() const {
    return q || k;
  }
  bool fit(const Tensor& of_q, const Tensor& of_k, const Tensor& of_v) const {
    const auto like = [](const Optional& x, const Tensor& y) {
      return !x ||
             (dtype(*x) == dtype(y) && x->dim() == y.dim() &&
              std::equal(
                  x->sizes().begin(), x->sizes().end(), y.sizes().begin()));
    };
    return like(q, of_q) && like(k, of_k) && like(v, of_v) &&
           is_result(grad_output, of_q, of_v.size(-1));
  }
  template <typename S>
  Tangents<S> in(SharedBatch& batch_of) const {
    return {
        batch_of.operator()<const S>(q),
        batch_of.operator()<const S>(k),
        batch_of.operator()<const S>(v),
        batch_of.operator()<const S>(grad_output)};
  }
};

// Returns whether the kernels take these inputs and the tangents u and, if it
// is there, w.
bool fits(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const OptionalTangents& u,
    const OptionalTangents* w = nullptr) {
  const bool has_tangents =
      w ? u.of_scores() && w->of_scores() : u.of_scores() || u.v;
  return has_tangents && fits(q, k, v, true) && q.numel() * v.numel() > 0 &&
         u.fit(q, k, v) && (!w || w->fit(q, k, v));
}

// The tangent of attn_output along u, and its gradients for grad_output, which
// is u's; or all these differentiated along w. Those that `mask` leaves out,
// and gradients without a grad_output, are undefined.
SecondOrderResults run_derivatives(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const OptionalTangents& u,
    const OptionalTangents* w,
    bool is_causal,
    double scale,
    std::array<bool, 4> mask) {
  const bool has_grad = u.grad_output || (w && w->grad_output);
  const auto sizes = sizes_of(q, v, is_causal);
  Optional output_tangent;
  if (mask[0]) {
    output_tangent = empty(q, result_sizes(q, v.size(-1)));
  }
  const Gradients grads{
      empty_like(q, mask[1] && has_grad),
      empty_like(k, mask[2] && has_grad),
      empty_like(v, mask[3] && has_grad && u.of_scores())};
  const auto& [grad_q, grad_k, grad_v] = grads;
  const auto results = std::tuple_cat(
      std::make_tuple(output_tangent.value_or(Tensor())), results_of(grads));
  if (!w && !u.of_scores()) { // linear in v: its tangent takes its place
    if (output_tangent) {
      run_forward(*output_tangent, {}, q, k, *u.v, is_causal, scale);
    }
    run_backward(grads, u.grad_output, {}, q, k, *u.v, {}, is_causal, scale);
    return results;
  }
  set_zero(grad_k, sizes.n);
  set_zero(grad_v, sizes.n);
  SharedBatch batch_of(q, k);
  with_dtype(q, [&](auto one) {
    using S = decltype(one);
    const auto tangent = batch_of.operator()<S>(output_tangent);
    const auto of_u = u.in<S>(batch_of);
    const BackwardArgs<S> args{
        sizes,
        batch_of.operator()<S>(grad_q),
        batch_of.operator()<S>(grad_k),
        batch_of.operator()<S>(grad_v),
        of_u.grad_output,
        {},
        batch_of.operator()<const S>(q),
        batch_of.operator()<const S>(k),
        batch_of.operator()<const S>(v),
        {},
        form_of(is_causal, scale),
        batch_of.group()};
    if (w) {
      third_order(tangent, args, of_u, w->in<S>(batch_of));
    } else {
      second_order(tangent, args, of_u);
    }
  });
  return results;
}

Tensor attn_output_jvp(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Optional& q_tangent,
    const Optional& k_tangent,
    const Optional& v_tangent,
    bool is_causal,
    double scale) {
  const OptionalTangents u{q_tangent, k_tangent, v_tangent, {}};
  if (!fits(q, k, v, u)) {
    return std::get<0>(composed<std::tuple<Tensor>>(
        "attn_output_jvp",
        q,
        k,
        v,
        q_tangent,
        k_tangent,
        v_tangent,
        is_causal,
        scale));
  }
  return std::get<0>(run_derivatives(
      q, k, v, u, nullptr, is_causal, scale, {true, false, false, false}));
}

SecondOrderResults attn_output_double_backward(
    const Tensor& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Optional& q_tangent,
    const Optional& k_tangent,
    const Optional& v_tangent,
    bool is_causal,
    double scale,
    const std::vector<bool>& output_mask) {
  const auto mask = mask_of<4>(output_mask);
  const OptionalTangents u{q_tangent, k_tangent, v_tangent, grad_output};
  if (!fits(q, k, v, u)) {
    return composed<SecondOrderResults>(
        "attn_output_double_backward",
        grad_output,
        q,
        k,
        v,
        q_tangent,
        k_tangent,
        v_tangent,
        is_causal,
        scale,
        Mask(mask));
  }
  return run_derivatives(q, k, v, u, nullptr, is_causal, scale, mask);
}

SecondOrderResults attn_output_triple_backward(
    const Optional& grad_output,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Optional& u_q,
    const Optional& u_k,
    const Optional& u_v,
    const Optional& w_grad_output,
    const Optional& w_q,
    const Optional& w_k,
    const Optional& w_v,
    bool is_causal,
    double scale,
    const std::vector<bool>& output_mask) {
  const auto mask = mask_of<4>(output_mask);
  const OptionalTangents u{u_q, u_k, u_v, grad_output};
  const OptionalTangents w{w_q, w_k, w_v, w_grad_output};
  if (!fits(q, k, v, u, &w)) {
    return composed<SecondOrderResults>(
        "attn_output_triple_backward",
        grad_output,
        q,
        k,
        v,
        u_q,
        u_k,
        u_v,
        w_grad_output,
        w_q,
        w_k,
        w_v,
        is_causal,
        scale,
        Mask(mask));
  }
  return run_derivatives(q, k, v, u, &w, is_causal, scale, mask);
}

} // namespace
} // namespace torch_attn

// The schemas are those of native_functions.edit.yaml.
STABLE_TORCH_LIBRARY(torch_attn, m) {
  m.def("attn(Tensor q, Tensor k, Tensor v) -> (Tensor output, Tensor attn)");
  m.def(
      "_attn_backward(Tensor? grad_output, Tensor? grad_attn, Tensor q, "
      "Tensor k, Tensor v, Tensor attn, bool[3] output_mask) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  m.def(
      "attn_output(Tensor q, Tensor k, Tensor v, *, bool is_causal=False, "
      "float scale=1.0) -> Tensor");
  m.def(
      "_attn_output_backward(Tensor grad_output, Tensor q, Tensor k, Tensor v, "
      "bool is_causal, float scale, bool[3] output_mask) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  m.def(
      "_attn_output_jvp(Tensor q, Tensor k, Tensor v, Tensor? q_tangent, "
      "Tensor? k_tangent, Tensor? v_tangent, bool is_causal, float scale) "
      "-> Tensor");
  m.def(
      "_attn_output_double_backward(Tensor grad_output, Tensor q, Tensor k, "
      "Tensor v, Tensor? q_tangent, Tensor? k_tangent, Tensor? v_tangent, "
      "bool is_causal, float scale, bool[4] output_mask) -> (Tensor "
      "output_tangent, Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  m.def(
      "_attn_output_triple_backward(Tensor? grad_output, Tensor q, Tensor k, "
      "Tensor v, Tensor? u_q, Tensor? u_k, Tensor? u_v, Tensor? w_grad_output, "
      "Tensor? w_q, Tensor? w_k, Tensor? w_v, bool is_causal, float scale, "
      "bool[4] output_mask) -> (Tensor output_tangent, Tensor grad_q, Tensor "
      "grad_k, Tensor grad_v)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_attn, CPU, m) {
  m.impl("attn", TORCH_BOX(&torch_attn::attn));
  m.impl("_attn_backward", TORCH_BOX(&torch_attn::attn_backward));
  m.impl("attn_output", TORCH_BOX(&torch_attn::attn_output));
  m.impl("_attn_output_backward", TORCH_BOX(&torch_attn::attn_output_backward));
  m.impl("_attn_output_jvp", TORCH_BOX(&torch_attn::attn_output_jvp));
  m.impl(
      "_attn_output_double_backward",
      TORCH_BOX(&torch_attn::attn_output_double_backward));
  m.impl(
      "_attn_output_triple_backward",
      TORCH_BOX(&torch_attn::attn_output_triple_backward));
}
