#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/AttnMatrix.h>
#include <ATen/native/cpu/AttnSchedule.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// Converts tensors to what the kernels take, and gives them ATen's threads.

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Returns the Runtime that uses ATen's threads and memory.
inline Runtime aten_runtime() {
  const auto threads = [](double work) {
    return threads_for(
        work, at::in_parallel_region() ? 1 : at::get_num_threads());
  };
  const auto run = [](int64_t threads,
                      void (*task)(void* context, int64_t thread),
                      void* context) {
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (const auto thread : c10::irange(begin, end)) {
        task(context, thread);
      }
    });
  };
  return {threads, run, c10::alloc_cpu, c10::free_cpu};
}

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

// If is_causal, the columns of attn that are masked in all rows don't count.
inline Sizes sizes_of(const Tensor& q, const Tensor& v, bool is_causal) {
  const auto m = q.size(-2);
  const auto n = is_causal ? std::min(m, v.size(-2)) : v.size(-2);
  const auto dims = q.sizes().slice(0, q.dim() - 2);
  const auto batch = m * n == 0 ? 0 : c10::multiply_integers(dims);
  return {batch, m, n, q.size(-1), v.size(-1)};
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
