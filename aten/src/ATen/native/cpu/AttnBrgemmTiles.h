#pragma once

#include <ATen/native/cpu/AttnTiles.h>

// brgemm's operands are made with AVX-512 below.
#if defined(CPU_CAPABILITY_AVX512)

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include <exception>

namespace at::native {
inline namespace CPU_CAPABILITY {

// Tiles by oneDNN's brgemm, which multiplies bfloat16 or half with the widest
// instruction that the machine has and sums in float. Its right operand is in
// pairs:
//   pairs[i / 2][j][i % 2] = x[i][j], with a row of zeros below an odd number
// grad_k and grad_v are made transposed, so that the tile is the right operand
// and need not be. See Note [Tiles of attn].
template <typename S>
class BrgemmTiles {
 public:
  using T = float;
  static constexpr int64_t ROW_STEP = 2;

  // Whether this machine and build can, and that it is worth a kernel's
  // generation.
  static bool fits(int64_t m, int64_t n, int64_t d, int64_t e) {
    return at::globalContext().userEnabledMkldnn() && available() && m >= 16 &&
           n >= 32 && std::min(d, e) >= 16 && std::max(d, e) <= 1024;
  }

  static int64_t forward_scratch(
      int64_t rows, int64_t n, int64_t d, int64_t e) {
    return BrgemmTiles(nullptr, n, d, e).size_;
  }
  static int64_t backward_scratch(
      int64_t rows, int64_t n, int64_t d, int64_t e) {
    return BrgemmTiles(nullptr, rows, n, d, e).size_;
  }

  BrgemmTiles(T* scratch, int64_t n, int64_t d, int64_t e)
      : scratch_(scratch), d_(d), e_(e) {
    n = std::min(n, ATTN_BLOCK);
    sums_ = slice<T>(ROWS * std::max(ATTN_LD, e));
    k_pairs_ = slice<S>(round_up(d, 2) * n);
    v_pairs_ = slice<S>(round_up(n, 2) * e);
    rows_ = slice<S>(ROWS * round_up(d, 2));
    tile_ = slice<S>(ROWS * ATTN_LD);
  }

  BrgemmTiles(T* scratch, int64_t rows, int64_t n, int64_t d, int64_t e)
      : scratch_(scratch), d_(d), e_(e) {
    n = std::min(n, ATTN_BLOCK);
    sums_ = slice<T>(rows * ATTN_LD);
    k_pairs_ = slice<S>(round_up(n, 2) * d);
    v_pairs_ = slice<S>(round_up(e, 2) * n);
    rows_ = slice<S>(rows * round_up(e, 2));
    q_transposed_ = slice<S>(d * round_up(rows, 2));
    grad_output_transposed_ = slice<S>(e * round_up(rows, 2));
    tile_ = slice<S>(rows * ATTN_LD);
    tile_pairs_ = slice<S>(round_up(rows, 2) * n);
    attn_pairs_ = slice<S>(round_up(rows, 2) * n);
  }

  ~BrgemmTiles() {
    if (scratch_ != nullptr) {
      cpublas::brgemm_release();
    }
  }

  void forward(
      bool first,
      const Matrix<const S>& q,
      const Matrix<const S>& k,
      const Matrix<const S>& v,
      const Matrix<S>& attn,
      bool stream,
      T* out) {
    const auto n = k.rows;
    pack(k_pairs_, k.t());
    pack(v_pairs_, v);
    for (int64_t i = 0; i < q.rows; i += ROWS) {
      const auto rows = std::min(ROWS, q.rows - i);
      multiply(
          left(rows_, q.block(i, 0, rows, d_)), k_pairs_, n, sums_, ATTN_LD);
      for (const auto r : c10::irange(rows)) {
        S* dst = attn.data + (i + r) * attn.row_stride;
        for (int64_t col = 0; col < n; col += W) {
          const auto x =
              attn_tanh_for<S>(load<T>(sums_ + r * ATTN_LD + col, n - col));
          store(dst + col, x, n - col, stream);
          store(tile_ + r * ATTN_LD + col, x);
        }
      }
      multiply({tile_, rows, n, ATTN_LD, 1}, v_pairs_, e_, sums_, e_);
      add_sum(first, out + i * e_, sums_, rows * e_);
    }
  }

  void start_tile(
      bool with_scores,
      const Matrix<const S>& q,
      const Matrix<const S>& v,
      const Matrix<const S>& attn,
      const Matrix<const S>& grad_output,
      const Matrix<const S>& grad_attn) {
    q_ = left(q_transposed_, q.t());
    if (grad_output.data != nullptr) {
      grad_output_ = left(rows_, grad_output);
      grad_output_t_ = left(grad_output_transposed_, grad_output.t());
    }
    n_ = attn.cols;
    const bool has_product = with_scores && grad_output_.data != nullptr;
    if (has_product) {
      pack(v_pairs_, v.t());
      multiply(grad_output_, v_pairs_, n_, sums_, ATTN_LD);
    }
    for (int64_t r = 0; r < attn.rows; r += 2) {
      // Rows of attn are far from one another.
      for (const auto i : {AHEAD, AHEAD + 1}) {
        const S* row = attn.data + (r + i) * attn.row_stride;
        for (int64_t col = 0; r + i < attn.rows && col < n_; col += W) {
          prefetch_line(row + col);
        }
      }
      int64_t col = 0;
      for (; col + W <= n_; col += W) {
        finish_pairs(r, col, W, with_scores, has_product, grad_attn, attn);
      }
      if (col < n_) {
        finish_pairs(
            r, col, n_ - col, with_scores, has_product, grad_attn, attn);
      }
    }
    rows_count_ = attn.rows;
  }

  void add_grad_q(bool first, const Matrix<const S>& k, T* total) {
    pack(k_pairs_, k);
    multiply(
        {tile_, rows_count_, n_, ATTN_LD, 1}, k_pairs_, d_, total, d_, !first);
  }
  void add_grad_k(bool first, T* total) {
    multiply(q_, tile_pairs_, n_, total, n_, !first);
  }
  void add_grad_v(bool first, T* total) {
    multiply(grad_output_t_, attn_pairs_, n_, total, n_, !first);
  }
  static void finish_block(const Matrix<S>& dst, const T* total) {
    for (const auto i : c10::irange(dst.rows)) {
      for (const auto j : c10::irange(dst.cols)) {
        dst.data[i * dst.cols + j] = static_cast<S>(total[j * dst.rows + i]);
      }
    }
  }

 private:
  using Vec = vec::Vectorized<S>;
  static constexpr int64_t W = Vec::size();
  static constexpr int64_t ROWS = 96;
  static constexpr int64_t AHEAD = 6;

  static bool available() {
    // There is no other way to ask. oneDNN's own exception says that the
    // machine lacks the instruction.
    static const bool available = [] {
      alignas(64) S a[2] = {}, b[2 * 16] = {};
      float c[16];
      try {
        cpublas::brgemm(1, 16, 2, 2, 16, 16, false, a, b, c);
        cpublas::brgemm_release();
      } catch (const std::exception&) {
        return false;
      }
      return true;
    }();
    return available;
  }

  template <typename X>
  X* slice(int64_t count) {
    X* begin =
        scratch_ == nullptr ? nullptr : reinterpret_cast<X*>(scratch_ + size_);
    size_ += round_up(count * sizeof(X), 256) / sizeof(T);
    return begin;
  }

  static Pair<T> widened(const Vec& x) {
    auto [lo, hi] = vec::convert_to_float<S>(x);
    return {lo, hi};
  }

  // The first `count` of the W elements from there on, and zeros.
  static C10_ALWAYS_INLINE Vec
  load_row(const Matrix<const S>& x, int64_t row, int64_t col, int64_t count) {
    const S* p = x.data + row * x.row_stride + col * x.col_stride;
    if (x.col_stride == 1) {
      return count >= W ? Vec::loadu(p) : Vec::loadu(p, count);
    }
    alignas(64) S gathered[W] = {};
    for (const auto j : c10::irange(std::min(count, W))) {
      gathered[j] = p[j * x.col_stride];
    }
    return Vec::loadu(gathered);
  }

  // A part of two rows of the tiles, from the product or without one.
  C10_ALWAYS_INLINE void finish_pairs(
      int64_t row,
      int64_t col,
      int64_t count,
      bool with_scores,
      bool has_product,
      const Matrix<const S>& grad_attn,
      const Matrix<const S>& attn) {
    const bool odd = row + 1 < attn.rows; // else the second row is of zeros
    const auto gradient = [&](int64_t i, const Vec& y) {
      Pair<T> sum{0, 0};
      if (has_product) {
        sum = load<T>(sums_ + i * ATTN_LD + col, count);
      }
      if (grad_attn.data != nullptr) {
        sum = sum + widened(load_row(grad_attn, i, col, count));
      }
      sum = tanh_backward(sum, widened(y));
      const Vec x = vec::convert_from_float<S>(sum.lo, sum.hi);
      x.store(tile_ + i * ATTN_LD + col);
      return x;
    };
    const auto at = row * n_ + 2 * col;
    const Vec y = load_row(attn, row, col, count);
    const Vec y_odd = odd ? load_row(attn, row + 1, col, count) : Vec(0);
    store_pairs(attn_pairs_ + at, y, y_odd, count);
    if (with_scores) {
      const Vec x = gradient(row, y);
      const Vec x_odd = odd ? gradient(row + 1, y_odd) : Vec(0);
      store_pairs(tile_pairs_ + at, x, x_odd, count);
    }
  }

  // dst[j] = (x[j], y[j]) for j < count
  static C10_ALWAYS_INLINE void store_pairs(
      S* dst, const Vec& x, const Vec& y, int64_t count) {
    alignas(64) static constexpr uint16_t order[2 * W] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const Vec lo = _mm512_permutex2var_epi16(x, _mm512_load_si512(order), y);
    const Vec hi =
        _mm512_permutex2var_epi16(x, _mm512_load_si512(order + W), y);
    if (count >= W) {
      lo.store(dst);
      hi.store(dst + W);
    } else {
      lo.store(dst, std::min(2 * count, W));
      hi.store(dst + W, std::max<int64_t>(2 * count - W, 0));
    }
  }

  // The pairs of x
  static void pack(S* dst, const Matrix<const S>& x) {
    const auto pairs = x.rows / 2;
    int64_t i = 0;
    if (x.row_stride == 1 && x.col_stride % 2 == 0) {
      // Both of a pair are one float for this.
      vec::transpose_mxn<float>(
          reinterpret_cast<const float*>(x.data),
          x.col_stride / 2,
          reinterpret_cast<float*>(dst),
          x.cols,
          static_cast<int>(x.cols),
          static_cast<int>(pairs));
      i = 2 * pairs;
    }
    for (; i < x.rows; i += 2) {
      for (int64_t col = 0; col < x.cols; col += W) {
        const auto count = x.cols - col;
        store_pairs(
            dst + i * x.cols + 2 * col,
            load_row(x, i, col, count),
            i + 1 < x.rows ? load_row(x, i + 1, col, count) : Vec(0),
            count);
      }
    }
  }

  // A left operand: x itself, or a copy of it with a column of zeros after an
  // odd number.
  static Matrix<const S> left(S* copy, const Matrix<const S>& x) {
    if (x.col_stride == 1 && x.cols % 2 == 0) {
      return x;
    }
    const auto cols = round_up(x.cols, 2);
    if (x.row_stride == 1) {
      // transpose_mxn's mask for 31 is not an int.
      const auto part = [](int64_t left) {
        return left == W - 1 ? W / 2 : std::min(W, left);
      };
      for (int64_t i = 0, rows = 0; i < x.rows; i += rows) {
        rows = part(x.rows - i);
        for (int64_t j = 0, terms = 0; j < x.cols; j += terms) {
          terms = part(x.cols - j);
          vec::transpose_mxn<S>(
              &x.at(i, j),
              x.col_stride,
              copy + i * cols + j,
              cols,
              static_cast<int>(terms),
              static_cast<int>(rows));
        }
      }
    } else {
      copy_rows(copy, cols, x);
    }
    if (cols > x.cols) {
      for (const auto i : c10::irange(x.rows)) {
        copy[i * cols + x.cols] = S(0);
      }
    }
    return {copy, x.rows, x.cols, cols, 1};
  }

  // sums (+)= a x for x in pairs
  static void multiply(
      const Matrix<const S>& a,
      const S* pairs,
      int64_t cols,
      T* sums,
      int64_t ld,
      bool add = false) {
    cpublas::brgemm(
        a.rows,
        cols,
        round_up(a.cols, 2),
        a.row_stride,
        cols,
        ld,
        add,
        a.data,
        pairs,
        sums);
  }

  T* scratch_;
  int64_t size_ = 0;
  int64_t d_, e_, n_ = 0, rows_count_ = 0;
  T* sums_;
  S *k_pairs_, *v_pairs_, *rows_, *tile_;
  S *q_transposed_ = nullptr, *grad_output_transposed_ = nullptr;
  S *tile_pairs_ = nullptr, *attn_pairs_ = nullptr;
  Matrix<const S> q_{}, grad_output_{}, grad_output_t_{};
};

} // namespace CPU_CAPABILITY
} // namespace at::native

#endif
