#pragma once

#include <ATen/native/cpu/AttnTiles.h>

namespace at::native {
inline namespace CPU_CAPABILITY {

// Tiles of so few rows that packing k and v costs more than the products. The
// rows of these are read where they are, each once for all rows of the tile:
//   a product with a transposed matrix is dot products with its rows,
//   one with the matrix itself a sum of multiples of its rows.
// Of long rows, MAX_COLS elements at a time.
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
      : scratch_(scratch) {
    d = std::min(d, MAX_COLS);
    e = std::min(e, MAX_COLS);
    q_.copy = slice(MAX_ROWS * d);
    tile_ = slice(MAX_ROWS * ATTN_LD);
    sums_ = slice(MAX_ROWS * e);
    right_ = slice(W * std::max(d, e));
  }

  RowTiles(T* scratch, int64_t /*rows*/, int64_t /*n*/, int64_t d, int64_t e)
      : scratch_(scratch) {
    d = std::min(d, MAX_COLS);
    e = std::min(e, MAX_COLS);
    q_.copy = slice(MAX_ROWS * d);
    grad_output_.copy = slice(MAX_ROWS * e);
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
    q_.set(q);
    multiply_transposed(q_, k, [&](int64_t r, int64_t col, const Pair<T>& x) {
      const auto y = attn_tanh_for<S>(x);
      store(attn.data + r * attn.row_stride + col, y, attn.cols - col, stream);
      store(tile_ + r * ATTN_LD + col, rounded<S>(y));
    });
    multiply(first, v, out);
  }

  void add_output(
      bool first,
      const Matrix<const S>& attn,
      const Matrix<const S>& v,
      T* out) {
    rows_ = attn.rows;
    copy_rows(tile_, ATTN_LD, attn);
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
    q_.set(q);
    grad_output_.set(grad_output);
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

  template <typename O>
  void add_grad_q(bool first, const Matrix<const S>& k, O* total) {
    multiply(first, k, total);
  }
  template <typename O>
  void add_grad_k(bool first, O* total) {
    multiply_tile_transposed(first, tile_, q_, total);
  }
  template <typename O>
  void add_grad_v(bool first, O* total) {
    multiply_tile_transposed(first, attn_tile_, grad_output_, total);
  }
  static void finish_block(const Matrix<S>& dst, const T* total) {
    convert(dst.data, total, dst.rows * dst.cols);
  }

 private:
  using Vec = vec::Vectorized<T>;
  static constexpr int64_t W = pair_size<T>;
  static constexpr int64_t LANES = Vec::size();
  static constexpr int TERMS = 4;           // of a sum that are read together
  static constexpr int64_t MAX_COLS = 2048; // of which copies are made

  // A left operand, of which a copy is made, row after row: of all columns at
  // once, or of those that are read.
  struct Left {
    Matrix<const S> x{};
    T* copy = nullptr;

    void set(const Matrix<const S>& matrix) {
      x = matrix;
      if (x.cols <= MAX_COLS) {
        copy_rows(copy, x.cols, x);
      }
    }
    const T* block(int64_t col, int64_t cols) const {
      if (x.cols > MAX_COLS) {
        copy_rows(copy, cols, x.block(0, col, x.rows, cols));
      }
      return copy;
    }
  };

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

  // f(x), for at most W rows, as they are or, if their columns are not
  // contiguous, as a copy
  template <typename F>
  void with_contiguous(const Matrix<const S>& x, const F& f) {
    if (x.col_stride == 1) {
      f(x);
    } else {
      copy_rows(right_, x.cols, x);
      f(Matrix<const T>{right_, x.rows, x.cols, x.cols, 1});
    }
  }

  // partial_[r][col + c] (+)= vectors of which the elements' sum is the dot
  // product of row r of a and row c of x, for r < R and c < C
  template <int R, int C, typename X>
  void add_products(bool first, const T* a, const Matrix<X>& x, int64_t col) {
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
      T* dst = partial_[i / C][col + i % C];
      const auto sum = lo[i] + hi[i];
      (first ? sum : Vec::loadu(dst) + sum).store(dst);
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
      const Left& a, const Matrix<const S>& x, const F& finish) {
    with_rows([&](auto rows) {
      constexpr int R = decltype(rows)::value;
      constexpr int C = MAX_ROWS / R; // as many sums at once as hide latency
      for (int64_t col = 0; col < x.rows; col += W) {
        const auto cols = std::min(W, x.rows - col);
        for (int64_t p = 0; p == 0 || p < x.cols; p += MAX_COLS) {
          const auto terms = std::min(MAX_COLS, x.cols - p);
          const T* left = a.block(p, terms);
          with_contiguous(x.block(col, p, cols, terms), [&](const auto& right) {
            int64_t c = 0;
            for (; c + C <= cols; c += C) {
              const auto block = right.block(c, 0, C, terms);
              add_products<R, C>(p == 0, left, block, c);
            }
            for (; c < cols; ++c) {
              const auto block = right.block(c, 0, 1, terms);
              add_products<R, 1>(p == 0, left, block, c);
            }
          });
        }
        for (const auto r : c10::irange(R)) {
          const auto lo = sums_of(partial_[r]);
          finish(r, col, {lo, sums_of(partial_[r] + LANES)});
        }
      }
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

  // sums_ = tile x
  void multiply_block(const Matrix<const S>& x) {
    with_rows([&](auto rows) {
      constexpr int R = decltype(rows)::value;
      for (int64_t col = 0; col < x.rows; col += W) {
        const auto terms = std::min(W, x.rows - col);
        with_contiguous(x.block(col, 0, terms, x.cols), [&](const auto& right) {
          int64_t j = 0;
          for (; j + TERMS <= terms; j += TERMS) {
            const auto block = right.block(j, 0, TERMS, x.cols);
            add_multiples<R, TERMS>(col + j, block);
          }
          for (; j < terms; ++j) {
            add_multiples<R, 1>(col + j, right.block(j, 0, 1, x.cols));
          }
        });
      }
    });
  }

  // out (+)= tile x
  template <typename O>
  void multiply(bool first, const Matrix<const S>& x, O* out) {
    for (int64_t p = 0; p < x.cols; p += MAX_COLS) {
      const auto cols = std::min(MAX_COLS, x.cols - p);
      multiply_block(x.block(0, p, x.rows, cols));
      if (cols == x.cols) {
        add_sum(first, out, sums_, rows_ * cols);
        return;
      }
      for (const auto r : c10::irange(rows_)) {
        add_sum(first, out + r * x.cols + p, sums_ + r * cols, cols);
      }
    }
  }

  // out (+)= tileᵀ x
  template <typename O>
  void multiply_tile_transposed(
      bool first, const T* tile, const Left& x, O* out) {
    const auto width = x.x.cols;
    for (int64_t col = 0; col < width; col += MAX_COLS) {
      const auto cols = std::min(MAX_COLS, width - col);
      const T* right = x.block(col, cols);
      O* dst = out + col;
      for (int64_t j = 0; j < cols_; ++j, dst += width) {
        const auto add = [&](int64_t p,
                             auto... count) C10_ALWAYS_INLINE_ATTRIBUTE {
          Pair<T> sum{Vec(T(0)), Vec(T(0))};
          for (int64_t r = 0; r < rows_; ++r) {
            const Vec left(tile[r * ATTN_LD + j]);
            const auto row = load<T>(right + r * cols + p, count...);
            sum = fmadd({left, left}, row, sum);
          }
          store(
              dst + p,
              first ? sum : load<T>(dst + p, count...) + sum,
              count...);
        };
        int64_t p = 0;
        for (; p + W <= cols; p += W) {
          add(p);
        }
        if (p < cols) {
          add(p, cols - p);
        }
      }
    }
  }

  T* scratch_;
  int64_t size_ = 0;
  int64_t rows_ = 0, cols_ = 0;
  Left q_, grad_output_;
  T *tile_, *attn_tile_ = nullptr, *sums_, *right_;
  alignas(64) T partial_[MAX_ROWS][W][LANES] = {};
  alignas(64) T lanes_[LANES * LANES] = {};
};

} // namespace CPU_CAPABILITY
} // namespace at::native
