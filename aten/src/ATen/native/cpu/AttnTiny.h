#pragma once

#include <ATen/native/cpu/AttnBackwardArgs.h>
#include <ATen/native/cpu/AttnForward.h>
#include <ATen/native/cpu/AttnTile.h>

#include <cmath>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Samples this small are faster by plain loops, without vectors and packing. A
// task is a sample or, in the backward, a group.
template <typename S>
class Tiny {
 public:
  using T = at::opmath_type<S>;
  // attn has at most this many elements. At 8 x 8, d = e = 2, tiles take a
  // tenth longer; at 8 x 16, d = e = 1, plain loops twice as long (Zen 5).
  static constexpr int64_t MAX_SIZE = 64;

  static bool fits(const Sizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    return m * n <= MAX_SIZE && m * n * (d + e) <= 4 * MAX_SIZE;
  }

  static void forward(const ForwardArgs<S>& args, const Runtime& runtime) {
    const auto [batch, m, n, d, e] = args.sizes;
    for_tasks(args.sizes.work(), batch, runtime, [&, n = n, e = e](int64_t b) {
      S own[MAX_SIZE];
      S* made = args.attn ? args.attn[b].data : own;
      const auto k = args.k[b].block(0, 0, n, args.sizes.d);
      const auto v = args.v[b].block(0, 0, n, e);
      const auto attn = make_attn(args.q[b], k, args.form, made);
      multiply(attn, v, args.output[b].data, false, args.form);
    });
  }

  static void backward(const BackwardArgs<S>& args, const Runtime& runtime) {
    const auto work = 2 * args.sizes.work();
    const auto groups = args.sizes.batch / args.group;
    for_tasks(work, groups, runtime, [&](int64_t group) {
      const auto first = group * args.group;
      if (args.group == 1) {
        S* grad_k = args.grad_k[first].data;
        return add_sample(args, first, false, grad_k, args.grad_v[first].data);
      }
      T grad_k[4 * MAX_SIZE], grad_v[4 * MAX_SIZE]; // see `fits`
      for (const auto i : c10::irange(args.group)) {
        add_sample(args, first + i, i > 0, grad_k, grad_v);
      }
      if (args.grad_k) {
        convert(args.grad_k[first].data, grad_k, args.sizes.n * args.sizes.d);
      }
      if (args.grad_v) {
        convert(args.grad_v[first].data, grad_v, args.sizes.n * args.sizes.e);
      }
    });
  }

 private:
  // Computes grad_q of a sample. Adds its grad_k and grad_v, or sets them.
  template <typename O>
  static void add_sample(
      const BackwardArgs<S>& args,
      int64_t b,
      bool accumulate,
      O* grad_k,
      O* grad_v) {
    const auto [batch, m, n, d, e] = args.sizes;
    const auto q = args.q[b];
    const auto k = args.k[b].block(0, 0, n, d);
    S own[MAX_SIZE];
    const Matrix<const S> attn =
        args.attn ? args.attn[b] : make_attn(q, k, args.form, own);
    const auto grad_output = args.grad_output[b];
    if (args.grad_v) {
      multiply(attn.t(), grad_output, grad_v, accumulate, args.form, true);
    }
    if (!args.grad_q && !args.grad_k) {
      return;
    }
    T sums[MAX_SIZE] = {};
    if (args.grad_output) {
      multiply(grad_output, args.v[b].block(0, 0, n, e).t(), sums);
    }
    const auto grad_attn = args.grad_attn[b];
    const auto scale = static_cast<T>(args.form.scale);
    for (const auto i : c10::irange(m)) {
      T* row = sums + i * n;
      for (const auto j : c10::irange(n)) {
        if (args.grad_attn) {
          row[j] += static_cast<T>(grad_attn.at(i, j));
        }
        const T y = static_cast<T>(attn.at(i, j));
        row[j] *= multiply_add(-y, y, T(1)) * scale;
      }
      mask_row(row, i, n, args.form, false);
    }
    const Matrix<const T> scores{sums, m, n, n, 1};
    if (args.grad_q) {
      multiply(scores, k, args.grad_q[b].data, false, args.form);
    }
    if (args.grad_k) {
      multiply(scores.t(), q, grad_k, accumulate, args.form, true);
    }
  }

  // attn = tanh(scale q kᵀ), or 0 where it is masked
  static Matrix<const S> make_attn(
      const Matrix<const S>& q,
      const Matrix<const S>& k,
      const Form& form,
      S* attn) {
    const auto m = q.rows, n = k.rows, size = m * n;
    alignas(64) T scores[MAX_SIZE + pair_size<T>];
    multiply(q, k.t(), scores);
    std::fill_n(scores + size, pair_size<T>, T(0)); // the last load reads it
    const Pair<T> scale(static_cast<T>(form.scale));
    for (int64_t i = 0; i < size; i += pair_size<T>) {
      const auto x = attn_tanh_for<S>(load<T>(scores + i) * scale, size - i);
      store(attn + i, x, size - i);
    }
    for (const auto i : c10::irange(m)) {
      mask_row(attn + i * n, i, n, form, false);
    }
    return {attn, m, n, n, 1};
  }

  template <typename F>
  static void for_tasks(
      double work, int64_t tasks, const Runtime& runtime, const F& run) {
    const auto threads = runtime.threads(work);
    Progress progress;
    run_in_order(
        runtime,
        tasks,
        tasks_at_once(tasks, threads),
        threads,
        progress,
        [&](int64_t task, int64_t /*thread*/) { run(task); });
  }

  // Returns x y + z, with one rounding if the machine has FMA, else with two.
  // If the compiler chose, it could choose differently for different strides.
  static T multiply_add(T x, T y, T z) {
#if defined(__FP_FAST_FMA) && defined(__FP_FAST_FMAF)
    return std::fma(x, y, z);
#else
    return x * y + z;
#endif
  }

  // out (+)= a x. `form` masks a or, if that is `transposed`, its transpose.
  // Masked elements are left out, because 0 times NaN is NaN.
  template <typename A, typename O>
  static void multiply(
      const Matrix<const A>& a,
      const Matrix<const S>& x,
      O* out,
      bool accumulate = false,
      const Form& form = {},
      bool transposed = false) {
    for (const auto i : c10::irange(a.rows)) {
      const auto begin = transposed ? form.first_row(i, a.cols) : 0;
      const auto end = transposed ? a.cols : form.kept(i, a.cols);
      for (const auto j : c10::irange(x.cols)) {
        T sum(0);
        for (const auto p : c10::irange(begin, end)) {
          sum = multiply_add(
              static_cast<T>(a.at(i, p)), static_cast<T>(x.at(p, j)), sum);
        }
        *out = static_cast<O>(accumulate ? static_cast<T>(*out) + sum : sum);
        ++out;
      }
    }
  }
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
