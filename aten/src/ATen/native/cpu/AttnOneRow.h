#pragma once

#include <ATen/native/cpu/AttnFma.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// c += sum of a(0, p) B(p) over K rows of B, which are ldb apart
template <int K, typename T>
C10_ALWAYS_INLINE void add_rows(
    const typename FmaProducts<T>::Left& a,
    const T* b,
    int64_t ldb,
    int64_t cols,
    T* c) {
  for (int64_t j = 0; j < cols; j += pair_size<T>) {
    const auto count = cols - j;
    auto sum = load<T>(c + j, count);
    for (int p = 0; p < K; ++p) {
      const Pair<T> x(*a.from(0, p).data);
      sum = vec::fmadd(x, load<T>(b + p * ldb + j, count), sum);
    }
    store(c + j, sum, count);
  }
}

// c (+)= a x for one row a, by rows of x. The micro-kernel would read a few
// vectors of each row, which is slow if rows are pages apart. Returns false if
// it is not slower: if x has few columns, or is of lower precision and read in
// place. `acc` has room for a row. If x's columns are not contiguous, it is
// copied to `panels`.
template <typename T, typename S, typename O>
bool product_of_row(
    T* panels,
    T* acc,
    bool accumulate,
    const typename FmaProducts<T>::Left& a,
    const Matrix<const S>& x,
    O* c) {
  // At 64 columns it is as fast as the micro-kernel, at 512 1.9 times (Zen 5).
  constexpr int64_t MIN_COLS = 64;
  if constexpr (std::is_same_v<T, S>) {
    if (x.cols < MIN_COLS) {
      return false;
    }
    const T* b = x.data;
    auto ldb = x.row_stride;
    if (x.col_stride != 1) {
      copy_rows(panels, x.cols, x);
      b = panels;
      ldb = x.cols;
    }
    std::fill_n(acc, x.cols, T(0));
    constexpr int64_t K = 4;
    int64_t p = 0;
    for (; p + K <= x.rows; p += K) {
      add_rows<K>(a.from(0, p), b + p * ldb, ldb, x.cols, acc);
    }
    for (; p < x.rows; ++p) {
      add_rows<1>(a.from(0, p), b + p * ldb, ldb, x.cols, acc);
    }
    add_sum(accumulate, c, acc, x.cols);
    return true;
  }
  return false;
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
