#pragma once

#include <ATen/native/cpu/AttnTiles.h>

namespace at::native {
inline namespace CPU_CAPABILITY {

// Tiles by fused multiply-add of vectors, in the precision that sums are made
// in. One loop, multiply(), makes all products:
//   a strip of at most MR rows of the left operand, in any layout,
//   times a panel, W columns of the right operand, packed row after row;
//   the MR x W sums are in registers, and then in sums_.
// See Note [Tiles of attn].
template <typename S>
class FmaTiles {
 public:
  using T = at::opmath_type<S>;

  // As many rows as sums fit in the registers beside a row of the panel.
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int64_t MR = 12;
#elif defined(CPU_CAPABILITY_AVX2) || !defined(__x86_64__)
  static constexpr int64_t MR = 6;
#else
  static constexpr int64_t MR = 3;
#endif
  // The rows of a task are a multiple of this.
  static constexpr int64_t ROW_STEP = MR;

  // What a task of `rows` rows needs of scratch memory.
  static int64_t forward_scratch(
      int64_t /*rows*/, int64_t n, int64_t d, int64_t e) {
    return FmaTiles(nullptr, n, d, e).size_;
  }
  static int64_t backward_scratch(
      int64_t rows, int64_t n, int64_t d, int64_t e) {
    return FmaTiles(nullptr, rows, n, d, e).size_;
  }

  FmaTiles(T* scratch, int64_t n, int64_t d, int64_t e)
      : scratch_(scratch), d_(d), e_(e) {
    n = std::min(n, BLOCK);
    panels_ = slice(panels_size(n, std::min(d, BLOCK)));
    v_panels_ = slice(panels_size(std::min(e, BLOCK), n));
    strip_ = slice(MR * LD);
    tile_ = slice((fits() ? MR : ROWS) * LD);
  }

  FmaTiles(T* scratch, int64_t rows, int64_t n, int64_t d, int64_t e)
      : scratch_(scratch), d_(d), e_(e) {
    n = std::min(n, BLOCK);
    d = std::min(d, BLOCK);
    e = std::min(e, BLOCK);
    panels_ = slice(
        std::max(
            {panels_size(n, e),
             panels_size(d, std::max(n, rows)),
             panels_size(e, rows)}));
    strip_ = slice(MR * LD);
    tile_ = slice(round_up(rows, MR) * LD);
    attn_tile_ = slice(round_up(rows, MR) * LD);
    if constexpr (!std::is_same_v<T, S>) {
      products_ = slice(std::max(n, rows) * std::max(d, e));
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
    const auto pack_k = [&](int64_t p) {
      pack(panels_, k.block(0, p, k.rows, std::min(BLOCK, d_ - p)).t());
    };
    const auto pack_v = [&](int64_t p) {
      pack(v_panels_, v.block(0, p, v.rows, std::min(BLOCK, e_ - p)));
    };
    // Rows at once: a strip, whose tile stays in the first cache, if k and v
    // are packed for all of them; else many, for which their parts are packed
    // in turn.
    const auto step = fits() ? MR : ROWS;
    if (fits()) {
      pack_k(0);
      pack_v(0);
    }
    for (int64_t i = 0; i < q.rows; i += step) {
      const auto rows = std::min(step, q.rows - i);
      clear_after(tile_, rows, k.rows);
      for (int64_t p = 0; p == 0 || p < d_; p += BLOCK) {
        if (!fits()) {
          pack_k(p);
        }
        const auto terms = std::min(BLOCK, d_ - p);
        const bool last = p + terms == d_;
        multiply_all(
            q.block(i, p, rows, terms), k.rows, [&](int64_t row, int64_t col) {
              T* tile = tile_ + row * LD + col;
              const auto strip_rows = std::min(MR, rows - row);
              if (p > 0) {
                add_tile(strip_rows, tile);
              }
              if (last) {
                S* dst = attn.data + (i + row) * attn.row_stride + col;
                finish_attn(
                    strip_rows,
                    k.rows - col,
                    tile,
                    dst,
                    attn.row_stride,
                    stream);
              } else {
                copy_sums(strip_rows, tile);
              }
            });
      }
      for (int64_t p = 0; p < e_; p += BLOCK) {
        if (!fits()) {
          pack_v(p);
        }
        const auto cols = std::min(BLOCK, e_ - p);
        add_product<LD, 1>(
            first, rows, v.rows, cols, tile_, v_panels_, out + i * e_ + p, e_);
      }
    }
  }

  void add_output(
      bool first,
      const Matrix<const S>& attn,
      const Matrix<const S>& v,
      T* out) {
    const auto step = fits() ? MR : ROWS;
    for (int64_t p = 0; p < v.cols; p += BLOCK) {
      const auto cols = std::min(BLOCK, v.cols - p);
      pack(v_panels_, v.block(0, p, v.rows, cols));
      for (int64_t i = 0; i < attn.rows; i += step) {
        const auto rows = std::min(step, attn.rows - i);
        clear_after(tile_, rows, v.rows);
        copy_rows(tile_, LD, attn.block(i, 0, rows, v.rows));
        add_product<LD, 1>(
            first,
            rows,
            v.rows,
            cols,
            tile_,
            v_panels_,
            out + i * v.cols + p,
            v.cols);
      }
    }
  }

  void start_tile(
      bool with_scores,
      const Matrix<const S>& q,
      const Matrix<const S>& v,
      const Matrix<const S>& attn,
      const Matrix<const S>& grad_output,
      const Matrix<const S>& grad_attn) {
    q_ = q;
    grad_output_ = grad_output;
    cols_ = attn.cols;
    clear_after(tile_, attn.rows, cols_);
    clear_after(attn_tile_, attn.rows, cols_);
    // What cannot be read as vectors comes in by way of the tile that it goes
    // to.
    const bool attn_in_tile = attn.col_stride != 1 || !with_scores;
    if (attn_in_tile) {
      copy_rows(attn_tile_, LD, attn);
    }
    if (!with_scores) {
      return;
    }
    const bool has_grad = grad_attn.data != nullptr;
    const bool grad_in_tile =
        has_grad && (grad_attn.col_stride != 1 || grad_output_.cols > BLOCK);
    if (grad_in_tile) {
      copy_rows(tile_, LD, grad_attn);
    }
    for (int64_t p = 0; p == 0 || p < grad_output_.cols; p += BLOCK) {
      const auto terms = std::min(BLOCK, grad_output_.cols - p);
      const bool last = p + terms == grad_output_.cols;
      pack(panels_, v.block(0, p, cols_, terms).t());
      multiply_all(
          grad_output_.block(0, p, attn.rows, terms),
          cols_,
          [&](int64_t row, int64_t col) {
            T* tile = tile_ + row * LD + col;
            const auto strip_rows = std::min(MR, attn.rows - row);
            if (p > 0 || grad_in_tile) {
              add_tile(strip_rows, tile);
            } else if (has_grad) {
              add_rows(strip_rows, grad_attn.block(row, col, 0, cols_ - col));
            }
            if (!last) {
              copy_sums(strip_rows, tile);
              return;
            }
            T* attn_tile = attn_tile_ + row * LD + col;
            if (!attn_in_tile) {
              copy_attn(
                  strip_rows, attn.block(row, col, 0, cols_ - col), attn_tile);
            }
            finish_gradient(strip_rows, attn_tile, tile);
          },
          attn_in_tile ? Matrix<const S>{} : attn);
    }
  }

  template <typename O>
  void add_grad_q(bool first, const Matrix<const S>& k, O* total) {
    add_to<LD, 1>(first, q_.rows, tile_, k, total);
  }
  template <typename O>
  void add_grad_k(bool first, O* total) {
    add_to<1, LD>(first, cols_, tile_, q_, total);
  }
  template <typename O>
  void add_grad_v(bool first, O* total) {
    add_to<1, LD>(first, cols_, attn_tile_, grad_output_, total);
  }
  static void finish_block(const Matrix<S>& dst, const T* total) {
    convert(dst.data, total, dst.rows * dst.cols);
  }

 private:
  using Vec = vec::Vectorized<T>;
  static constexpr int64_t W = pair_size<T>;
  static constexpr int64_t BLOCK = ATTN_BLOCK;
  static constexpr int64_t LD = ATTN_LD;
  static constexpr int64_t ROWS = 32 * MR;
  static constexpr int64_t LINE = 64 / sizeof(T);
  static constexpr int64_t AHEAD = 4; // terms, for which a line is on its way
  static constexpr int64_t PANEL_AHEAD = 8;

  bool fits() const {
    return std::max(d_, e_) <= BLOCK;
  }
  static int64_t panels_size(int64_t cols, int64_t rows) {
    return round_up(cols, W) * rows;
  }
  T* slice(int64_t size) {
    T* begin = scratch_ == nullptr ? nullptr : scratch_ + size_;
    size_ += round_up(size, 64);
    return begin;
  }

  // The rows of a strip and panel, which are read soon.
  template <typename X>
  static void prefetch(int64_t rows, const X* p, int64_t ld) {
    for (int64_t r = 0; r < rows; ++r, p += ld) {
      prefetch_line(p);
      prefetch_line(p + W / 2);
    }
  }

  // Zeros, up to a multiple of MR, below the rows of a tile and right of its
  // columns. They are read, though nothing is made of them, and what memory
  // happens to hold, read as numbers, is often denormal and slow.
  static void clear_after(T* tile, int64_t rows, int64_t cols) {
    const auto all_cols = round_up(cols, MR);
    for (int64_t i = 0; i < round_up(rows, MR); ++i, tile += LD) {
      const auto begin = i < rows ? cols : 0;
      std::fill(tile + begin, tile + all_cols, T(0));
    }
  }

  // dst[i * W + j] = x[i][j], for an x whose columns are contiguous
  static void transpose(T* dst, const Matrix<const S>& x) {
    const int cols = static_cast<int>(x.cols);
    if constexpr (std::is_same_v<T, S>) {
      const int rows = static_cast<int>(x.rows);
      vec::transpose_mxn<T>(x.data, x.col_stride, dst, W, cols, rows);
    } else {
      alignas(64) T widened[W * W];
      for (int64_t i = 0; i < x.rows; i += W) {
        const auto rows = std::min(W, x.rows - i);
        for (const auto j : c10::irange(x.cols)) {
          store(widened + j * W, load<T>(x.data + i + j * x.col_stride, rows));
        }
        vec::transpose_mxn<T>(
            widened, W, dst + i * W, W, cols, static_cast<int>(rows));
      }
    }
  }

  // dst[p][i][j] = x[i][p W + j]: the panels of x, the last filled up with
  // zeros
  static void pack(T* dst, const Matrix<const S>& x) {
    if (x.col_stride == 1) {
      const S* src = x.data;
      for (int64_t i = 0; i < x.rows; ++i, src += x.row_stride) {
        T* panel = dst + i * W;
        for (int64_t col = 0; col < x.cols; col += W, panel += x.rows * W) {
          store(panel, load<T>(src + col, x.cols - col));
        }
      }
      return;
    }
    for (int64_t col = 0; col < x.cols; col += W, dst += x.rows * W) {
      const int64_t cols = std::min(W, x.cols - col);
      const S* src = x.data + col * x.col_stride;
      if (x.row_stride == 1) {
        if (cols < W) {
          std::fill_n(dst, x.rows * W, T(0));
        }
        transpose(dst, x.block(0, col, x.rows, cols));
        continue;
      }
      for (const auto i : c10::irange(x.rows)) {
        for (const auto j : c10::irange(W)) {
          dst[i * W + j] =
              j < cols
                  ? static_cast<T>(src[i * x.row_stride + j * x.col_stride])
                  : T(0);
        }
      }
    }
  }

  // sums[r] = sum of a[r * RS + p * PS] * panel[p] over p < terms, for r < R,
  // each made of C sums of every Cth term; of the panel only the first V
  // vectors
  template <int R, int C, int V, int64_t RS, int64_t PS>
  static void multiply_strip(
      int64_t terms, const T* a, const T* panel, T* sums) {
    auto lo = zeros<T>(std::make_index_sequence<R * C>());
    auto hi = lo;
    const auto add_term = [&](auto c, int64_t p) C10_ALWAYS_INLINE_ATTRIBUTE {
      if constexpr (W >= LINE) { // panels are in the second cache
        for (int64_t j = 0; j < V * Vec::size(); j += LINE) {
          prefetch_line(panel + (p + PANEL_AHEAD) * W + j);
        }
      }
      if constexpr (PS != 1) { // a line of a each, far from the one before
        const T* ahead = a + (p + AHEAD) * PS;
        prefetch_line(ahead);
        prefetch_line(ahead + R - 1);
      }
      const Vec panel_lo = Vec::loadu(panel + p * W);
      const Vec panel_hi =
          V == 1 ? panel_lo : Vec::loadu(panel + p * W + Vec::size());
      c10::ForcedUnroll<R>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
        constexpr int i = decltype(c)::value * R + decltype(r)::value;
        const Vec x(a[r * RS + p * PS]);
        lo[i] = vec::fmadd(x, panel_lo, lo[i]);
        if constexpr (V == 2) {
          hi[i] = vec::fmadd(x, panel_hi, hi[i]);
        }
      });
    };
    int64_t p = 0;
    for (; p + C <= terms; p += C) {
      c10::ForcedUnroll<C>{}(
          [&](auto c) C10_ALWAYS_INLINE_ATTRIBUTE { add_term(c, p + c); });
    }
    for (; p < terms; ++p) {
      add_term(std::integral_constant<int, 0>(), p);
    }
    c10::ForcedUnroll<R>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
      Pair<T> sum{lo[r], hi[r]};
      if constexpr (C > 1) {
        c10::ForcedUnroll<C - 1>{}([&](auto c) C10_ALWAYS_INLINE_ATTRIBUTE {
          sum = sum + Pair<T>{lo[(c + 1) * R + r], hi[(c + 1) * R + r]};
        });
      }
      store(sums + r * W, sum);
    });
  }

  // The rows of a up to a multiple of MR are read as well. With few rows, the
  // registers hold several sums for each, which don't wait for one another.
  template <int V, int64_t RS, int64_t PS>
  void multiply_rows(int64_t terms, const T* a, const T* panel, int64_t rows) {
    constexpr int R = MR;
    if (rows > R / 2) {
      multiply_strip<R, 1, V, RS, PS>(terms, a, panel, sums_);
    } else if (rows > 1) {
      multiply_strip<R / 2, 2, V, RS, PS>(terms, a, panel, sums_);
    } else {
      multiply_strip<1, R / 2, V, RS, PS>(terms, a, panel, sums_);
    }
  }
  template <int64_t RS, int64_t PS>
  void multiply(
      int64_t terms, const T* a, const T* panel, int64_t rows, int64_t cols) {
    if (cols > Vec::size()) {
      multiply_rows<2, RS, PS>(terms, a, panel, rows);
    } else {
      multiply_rows<1, RS, PS>(terms, a, panel, rows);
    }
  }

  // For each strip and panel: sums = their part of a times the packed panels,
  // then finish(row, col). `next` is what finish will read of memory.
  template <typename F>
  void multiply_all(
      const Matrix<const S>& a,
      int64_t cols,
      const F& finish,
      const Matrix<const S>& next = {}) {
    for (int64_t row = 0; row < a.rows; row += MR) {
      const auto rows = std::min(MR, a.rows - row);
      clear_after(strip_, rows, a.cols);
      copy_rows(strip_, LD, a.block(row, 0, rows, a.cols));
      const T* panel = panels_;
      for (int64_t col = 0; col < cols; col += W, panel += a.cols * W) {
        if (next.data != nullptr) {
          prefetch(
              rows, next.data + row * next.row_stride + col, next.row_stride);
        }
        multiply<LD, 1>(a.cols, strip_, panel, rows, cols - col);
        finish(row, col);
      }
    }
  }

  // sums += tile
  void add_tile(int64_t rows, const T* tile) {
    for (int64_t r = 0; r < rows; ++r) {
      store(sums_ + r * W, load<T>(sums_ + r * W) + load<T>(tile + r * LD));
    }
  }
  // sums += x
  void add_rows(int64_t rows, const Matrix<const S>& x) {
    for (int64_t r = 0; r < rows; ++r) {
      const auto y = load<T>(x.data + r * x.row_stride, x.cols);
      store(sums_ + r * W, load<T>(sums_ + r * W) + y);
    }
  }
  // tile = sums
  void copy_sums(int64_t rows, T* tile) {
    for (int64_t r = 0; r < rows; ++r) {
      store(tile + r * LD, load<T>(sums_ + r * W));
    }
  }
  // tile = x
  static void copy_attn(int64_t rows, const Matrix<const S>& x, T* tile) {
    for (int64_t r = 0; r < rows; ++r) {
      store(tile + r * LD, load<T>(x.data + r * x.row_stride, x.cols));
    }
  }
  // tile = sums (1 - attn²)
  void finish_gradient(int64_t rows, const T* attn, T* tile) {
    for (int64_t r = 0; r < rows; ++r) {
      const auto y = load<T>(attn + r * LD);
      store(tile + r * LD, tanh_backward(load<T>(sums_ + r * W), y));
    }
  }
  // attn = tile = tanh(sums)
  void finish_attn(
      int64_t rows,
      int64_t count,
      T* tile,
      S* attn,
      int64_t attn_ld,
      bool stream) {
    for (int64_t r = 0; r < rows; ++r) {
      const auto x = attn_tanh_for<S>(load<T>(sums_ + r * W));
      store(attn + r * attn_ld, x, count, stream);
      store(tile + r * LD, rounded<S>(x));
    }
  }

  // out (+)= a panels
  template <int64_t RS, int64_t PS>
  void add_product(
      bool first,
      int64_t rows,
      int64_t terms,
      int64_t cols,
      const T* a,
      const T* panels,
      T* out,
      int64_t out_ld) {
    for (int64_t col = 0; col < cols; col += W, panels += terms * W) {
      const int64_t count = cols - col;
      for (int64_t row = 0; row < rows; row += MR) {
        const auto strip_rows = std::min(MR, rows - row);
        T* p = out + row * out_ld + col;
        prefetch(strip_rows, p, out_ld);
        multiply<RS, PS>(terms, a + row * RS, panels, rows - row, count);
        for (int64_t r = 0; r < strip_rows; ++r, p += out_ld) {
          const auto x = load<T>(sums_ + r * W);
          store(p, first ? x : load<T>(p, count) + x, count);
        }
      }
    }
  }

  // out (+)= a x, for a tile or its transpose; all of it if out is of lower
  // precision
  template <int64_t RS, int64_t PS, typename O>
  void add_to(
      bool first, int64_t rows, const T* a, const Matrix<const S>& x, O* out) {
    for (int64_t p = 0; p < x.cols; p += BLOCK) {
      const auto cols = std::min(BLOCK, x.cols - p);
      pack(panels_, x.block(0, p, x.rows, cols));
      if constexpr (std::is_same_v<T, O>) {
        add_product<RS, PS>(
            first, rows, x.rows, cols, a, panels_, out + p, x.cols);
      } else {
        add_product<RS, PS>(
            true, rows, x.rows, cols, a, panels_, products_, cols);
        for (const auto i : c10::irange(rows)) {
          convert(out + i * x.cols + p, products_ + i * cols, cols);
        }
      }
    }
  }

  T* scratch_;
  int64_t size_ = 0;
  int64_t d_, e_, cols_ = 0;
  T *panels_, *v_panels_ = nullptr, *strip_, *tile_, *attn_tile_ = nullptr;
  T* products_ = nullptr;
  Matrix<const S> q_{}, grad_output_{};
  alignas(64) T sums_[MR * W];
};

} // namespace CPU_CAPABILITY
} // namespace at::native
