#pragma once

#include <ATen/native/cpu/AttnTiles.h>

namespace at::native {
inline namespace CPU_CAPABILITY {

// Tiles of so few rows that packing k and v costs more than the products. The
// rows of these are read where they are, each once for all rows of the tile:
//   a product with a transposed matrix is dot products with its rows,
//   one with the matrix itself a sum of multiples of its rows.
// See Note [Tiles of attn].
template <typename S>
class RowTiles {
 public:
  using T = at::opmath_type<S>;
  static constexpr int64_t MAX_ROWS = 4;
  static constexpr int64_t ROW_STEP = MAX_ROWS;

  static bool fits(int64_t m) {
    return m <= MAX_ROWS;
  }
  static int64_t forward_scratch(
      int64_t /*rows*/, int64_t n, int64_t d, int64_t e) {
    return RowTiles(nullptr, n, d, e).size_;
  }
  static int64_t backward_scratch(
      int64_t rows, int64_t n, int64_t d, int64_t e) {
    return RowTiles(nullptr, rows, n, d, e).size_;
  }

  RowTiles(T* scratch, int64_t /*n*/, int64_t d, int64_t e)
      : scratch_(scratch), d_(d), e_(e) {
    q_ = slice(MAX_ROWS * d);
    tile_ = slice(MAX_ROWS * ATTN_LD);
    sums_ = slice(MAX_ROWS * e);
    right_ = slice(W * std::max(d, e));
  }

  RowTiles(T* scratch, int64_t /*rows*/, int64_t /*n*/, int64_t d, int64_t e)
      : scratch_(scratch), d_(d), e_(e) {
    q_ = slice(MAX_ROWS * d);
    grad_output_ = slice(MAX_ROWS * e);
    tile_ = slice(MAX_ROWS * ATTN_LD);
    attn_tile_ = slice(MAX_ROWS * ATTN_LD);
    sums_ = slice(MAX_ROWS * d);
    right_ = slice(W * std::max(d, e));
  }

  void forward(
      bool first,
      const Matrix<const S>& q,
      const Matrix<const S>& k,
      const Matrix<const S>& v,
      const Matrix<S>& attn,
      bool stream,
      T* out) {
    rows_ = q.rows;
    copy_rows(q_, d_, q);
    multiply_transposed(q_, k, [&](int64_t r, int64_t col, const Pair<T>& x) {
      const auto y = attn_tanh_for<S>(x);
      store(attn.data + r * attn.row_stride + col, y, attn.cols - col, stream);
      store(tile_ + r * ATTN_LD + col, rounded<S>(y));
    });
    multiply(first, v, out);
  }

  void start_tile(
      bool with_scores,
      const Matrix<const S>& q,
      const Matrix<const S>& v,
      const Matrix<const S>& attn,
      const Matrix<const S>& grad_output,
      const Matrix<const S>& grad_attn) {
    rows_ = attn.rows;
    cols_ = attn.cols;
    copy_rows(attn_tile_, ATTN_LD, attn);
    copy_rows(q_, d_, q);
    copy_rows(grad_output_, grad_output.cols, grad_output);
    if (!with_scores) {
      return;
    }
    const bool has_grad = grad_attn.data != nullptr;
    if (has_grad) {
      copy_rows(tile_, ATTN_LD, grad_attn);
    }
    multiply_transposed(
        grad_output_,
        v.block(0, 0, v.rows, grad_output.cols),
        [&](int64_t r, int64_t col, const Pair<T>& x) {
          T* tile = tile_ + r * ATTN_LD + col;
          const auto y = load<T>(attn_tile_ + r * ATTN_LD + col);
          store(tile, tanh_backward(has_grad ? load<T>(tile) + x : x, y));
        });
  }

  void add_grad_q(bool first, const Matrix<const S>& k, T* total) {
    multiply(first, k, total);
  }
  void add_grad_k(bool first, T* total) {
    multiply_tile_transposed(first, tile_, q_, d_, total);
  }
  void add_grad_v(bool first, T* total) {
    multiply_tile_transposed(first, attn_tile_, grad_output_, e_, total);
  }
  static void finish_block(const Matrix<S>& dst, const T* total) {
    convert(dst.data, total, dst.rows * dst.cols);
  }

 private:
  using Vec = vec::Vectorized<T>;
  static constexpr int64_t W = pair_size<T>;
  static constexpr int64_t LANES = Vec::size();
  static constexpr int TERMS = 4; // of a sum that are read together

  T* slice(int64_t size) {
    T* begin = scratch_ == nullptr ? nullptr : scratch_ + size_;
    size_ += round_up(size, 64);
    return begin;
  }

  // f(the number of rows, as a constant)
  template <typename F>
  void with_rows(const F& f) {
    static_assert(MAX_ROWS == 4);
    switch (rows_) {
      case 1:
        return f(std::integral_constant<int, 1>());
      case 2:
        return f(std::integral_constant<int, 2>());
      case 3:
        return f(std::integral_constant<int, 3>());
      default:
        return f(std::integral_constant<int, 4>());
    }
  }

  // f(row, rows row, row + 1, ... of x) for each W of them, which it gets as
  // they are or, if its columns are not contiguous, as a copy.
  template <typename F>
  void with_blocks(const Matrix<const S>& x, const F& f) {
    for (int64_t row = 0; row < x.rows; row += W) {
      const auto block = x.block(row, 0, std::min(W, x.rows - row), x.cols);
      if (x.col_stride == 1) {
        f(row, block);
      } else {
        copy_rows(right_, x.cols, block);
        f(row, Matrix<const T>{right_, block.rows, x.cols, x.cols, 1});
      }
    }
  }

  // partial_[r][col + c] = vectors of which the elements' sum is the dot
  // product of row r of a and row c of x, for r < R and c < C
  template <int R, int C, typename X>
  void add_products(const T* a, const Matrix<X>& x, int64_t col) {
    auto lo = zeros<T>(std::make_index_sequence<R * C>());
    auto hi = lo;
    const auto add_terms = [&](int64_t p,
                               auto... count) C10_ALWAYS_INLINE_ATTRIBUTE {
      c10::ForcedUnroll<C>{}([&](auto c) C10_ALWAYS_INLINE_ATTRIBUTE {
        const auto right = load<T>(x.data + c * x.row_stride + p, count...);
        c10::ForcedUnroll<R>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
          constexpr int i = decltype(r)::value * C + decltype(c)::value;
          const auto left = load<T>(a + r * x.cols + p, count...);
          lo[i] = vec::fmadd(left.lo, right.lo, lo[i]);
          hi[i] = vec::fmadd(left.hi, right.hi, hi[i]);
        });
      });
    };
    int64_t p = 0;
    for (; p + W <= x.cols; p += W) {
      add_terms(p);
    }
    if (p < x.cols) {
      add_terms(p, x.cols - p);
    }
    c10::ForcedUnroll<R * C>{}([&](auto i) C10_ALWAYS_INLINE_ATTRIBUTE {
      (lo[i] + hi[i]).store(partial_[i / C][col + i % C]);
    });
  }

  // The sum of each of as many vectors as one has elements.
  Vec sums_of(const T (*vectors)[LANES]) {
#if defined(CPU_CAPABILITY_AVX512)
    // Halves of two vectors, added, are one with half the terms of both.
    std::array<Vec, LANES> x;
    for (const auto i : c10::irange(LANES)) {
      x[i] = Vec::loadu(vectors[i]);
    }
    if constexpr (std::is_same_v<T, float>) {
      for (const auto i : c10::irange(8)) {
        const __m512 a = x[2 * i], b = x[2 * i + 1];
        x[i] = Vec(_mm512_unpacklo_ps(a, b)) + Vec(_mm512_unpackhi_ps(a, b));
      }
      for (const auto i : c10::irange(4)) {
        const auto a = _mm512_castps_pd(x[2 * i]);
        const auto b = _mm512_castps_pd(x[2 * i + 1]);
        x[i] = Vec(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b))) +
               Vec(_mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
      }
      for (const auto size : {2, 1}) {
        for (const auto i : c10::irange(size)) {
          const __m512 a = x[2 * i], b = x[2 * i + 1];
          x[i] = Vec(_mm512_shuffle_f32x4(a, b, 0x88)) +
                 Vec(_mm512_shuffle_f32x4(a, b, 0xdd));
        }
      }
    } else {
      for (const auto i : c10::irange(4)) {
        const __m512d a = x[2 * i], b = x[2 * i + 1];
        x[i] = Vec(_mm512_unpacklo_pd(a, b)) + Vec(_mm512_unpackhi_pd(a, b));
      }
      for (const auto size : {2, 1}) {
        for (const auto i : c10::irange(size)) {
          const __m512d a = x[2 * i], b = x[2 * i + 1];
          x[i] = Vec(_mm512_shuffle_f64x2(a, b, 0x88)) +
                 Vec(_mm512_shuffle_f64x2(a, b, 0xdd));
        }
      }
    }
    return x[0];
#else
    vec::transpose_mxn<T, LANES, LANES>(vectors[0], LANES, lanes_, LANES);
    Vec sum = Vec::loadu(lanes_);
    for (int64_t i = 1; i < LANES; ++i) {
      sum = sum + Vec::loadu(lanes_ + i * LANES);
    }
    return sum;
#endif
  }

  // finish(r, col, a part of row r of a xᵀ)
  template <typename F>
  void multiply_transposed(
      const T* a, const Matrix<const S>& x, const F& finish) {
    with_rows([&](auto rows) {
      constexpr int R = decltype(rows)::value;
      constexpr int C = MAX_ROWS / R; // as many sums at once as hide latency
      with_blocks(x, [&](int64_t col, const auto& block) {
        int64_t c = 0;
        for (; c + C <= block.rows; c += C) {
          add_products<R, C>(a, block.block(c, 0, C, x.cols), c);
        }
        for (; c < block.rows; ++c) {
          add_products<R, 1>(a, block.block(c, 0, 1, x.cols), c);
        }
        for (const auto r : c10::irange(R)) {
          const auto lo = sums_of(partial_[r]);
          finish(r, col, {lo, sums_of(partial_[r] + LANES)});
        }
      });
    });
  }

  // sums_ (+)= columns col, col + 1, ... of the tile times rows 0, 1, ... of x
  template <int R, int C, typename X>
  void add_multiples(int64_t col, const Matrix<X>& x) {
    const bool first = col == 0;
    const auto add = [&](int64_t p, auto... count) C10_ALWAYS_INLINE_ATTRIBUTE {
      auto right_lo = zeros<T>(std::make_index_sequence<C>());
      auto right_hi = right_lo;
      c10::ForcedUnroll<C>{}([&](auto c) C10_ALWAYS_INLINE_ATTRIBUTE {
        const auto right = load<T>(x.data + c * x.row_stride + p, count...);
        right_lo[c] = right.lo;
        right_hi[c] = right.hi;
      });
      c10::ForcedUnroll<R>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
        T* dst = sums_ + r * x.cols + p;
        auto sum =
            first ? Pair<T>{Vec(T(0)), Vec(T(0))} : load<T>(dst, count...);
        c10::ForcedUnroll<C>{}([&](auto c) C10_ALWAYS_INLINE_ATTRIBUTE {
          const Vec left(tile_[r * ATTN_LD + col + c]);
          sum = fmadd({left, left}, {right_lo[c], right_hi[c]}, sum);
        });
        store(dst, sum, count...);
      });
    };
    int64_t p = 0;
    for (; p + W <= x.cols; p += W) {
      add(p);
    }
    if (p < x.cols) {
      add(p, x.cols - p);
    }
  }

  // out (+)= tile x
  void multiply(bool first, const Matrix<const S>& x, T* out) {
    with_rows([&](auto rows) {
      constexpr int R = decltype(rows)::value;
      with_blocks(x, [&](int64_t col, const auto& block) {
        int64_t j = 0;
        for (; j + TERMS <= block.rows; j += TERMS) {
          add_multiples<R, TERMS>(col + j, block.block(j, 0, TERMS, x.cols));
        }
        for (; j < block.rows; ++j) {
          add_multiples<R, 1>(col + j, block.block(j, 0, 1, x.cols));
        }
      });
    });
    add_sum(first, out, sums_, rows_ * x.cols);
  }

  // out (+)= tileᵀ x, for `rows_` rows of `width`
  void multiply_tile_transposed(
      bool first, const T* tile, const T* x, int64_t width, T* out) {
    for (int64_t j = 0; j < cols_; ++j, out += width) {
      const auto add = [&](int64_t p,
                           auto... count) C10_ALWAYS_INLINE_ATTRIBUTE {
        Pair<T> sum{Vec(T(0)), Vec(T(0))};
        for (int64_t r = 0; r < rows_; ++r) {
          const Vec left(tile[r * ATTN_LD + j]);
          sum = fmadd({left, left}, load<T>(x + r * width + p, count...), sum);
        }
        store(
            out + p, first ? sum : load<T>(out + p, count...) + sum, count...);
      };
      int64_t p = 0;
      for (; p + W <= width; p += W) {
        add(p);
      }
      if (p < width) {
        add(p, width - p);
      }
    }
  }

  T* scratch_;
  int64_t size_ = 0;
  int64_t d_, e_, rows_ = 0, cols_ = 0;
  T *q_, *grad_output_ = nullptr, *tile_, *attn_tile_ = nullptr, *sums_;
  T* right_;
  alignas(64) T partial_[MAX_ROWS][W][LANES] = {};
  alignas(64) T lanes_[LANES * LANES] = {};
};

} // namespace CPU_CAPABILITY
} // namespace at::native
