#pragma once

#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <ATen/native/cpu/AttnCopy.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// Products by fused multiply-add of vectors, as in BLIS, in the precision T of
// the sums:
//   C (M x N) (+)= A (M x K) B (K x N)
// A micro-kernel keeps MR x NR sums in registers, the accumulator tile. It
// reads a micro-panel of A (MR rows) one number at a time and a micro-panel of
// B (NR columns) by vectors. The latter is packed row by row. If A has few
// rows, B is read in place.
template <typename T>
class FmaProducts {
 public:
  using Vec = vec::Vectorized<T>;
  static constexpr int64_t LANES = Vec::size();

  // The accumulators fill the registers that NV vectors of B and one of A leave
  // free. For NEON, GCC loads MR numbers of A before their use: 8 rows spill.
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_SVE256)
  static constexpr int64_t MR = 8, NV = 3;
#elif defined(CPU_CAPABILITY_AVX2) || !defined(__x86_64__)
  static constexpr int64_t MR = sizeof(Vec) > 16 ? 4 : LANES + 2, NV = 3;
#else
  static constexpr int64_t MR = 3, NV = 2;
#endif
  static constexpr int64_t NR = NV * LANES;

  // Whether a B of lower precision S can be read in place. Only AVX-512 loads
  // part of a vector of it as fast as a whole one.
  template <typename S>
  static constexpr bool reads_in_place =
#if defined(CPU_CAPABILITY_AVX512)
      !std::is_same_v<T, S>;
#else
      false;
#endif

  // Whether part of a vector is loaded about as fast as a whole one.
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  static constexpr bool has_masks = true;
#else
  static constexpr bool has_masks = false;
#endif

  // Calls fn(col, width) for each micro-panel of `cols` columns. Widths are
  // counted in vectors and differ by at most one.
  template <typename F>
  static C10_ALWAYS_INLINE void for_panels(int64_t cols, const F& fn) {
    const auto vectors = at::ceil_div(cols, LANES);
    const auto panels = at::ceil_div(vectors, NV);
    int64_t col = 0;
    for (int64_t i = 0; i < panels; ++i) {
      const auto width = (vectors + panels - 1 - i) / panels;
      fn(col, width);
      col += width * LANES;
    }
  }

  static int64_t packed_size(int64_t rows, int64_t cols) {
    return rows * at::round_up(cols, LANES);
  }

  // `count` columns of the right operand, in `width` vectors. Only the last
  // vector may be partly filled or, of lower precision, empty.
  template <typename B>
  struct Panel {
    const B* data;
    int64_t ld, width, count;
  };

  // The right operand, in micro-panels if `packed`, else in place.
  struct Right {
    const T* data;
    int64_t ld, rows;
    bool packed;

    // Returns `count` columns from `col`, `row` on, in `width` vectors.
    Panel<T> panel(
        int64_t col, int64_t width, int64_t count, int64_t row = 0) const {
      if (!packed) {
        return {data + col + row * ld, ld, width, count};
      }
      const auto all = width * LANES;
      return {data + col * rows + row * all, all, width, count};
    }
  };

  // Packs all of x into dst.
  template <typename S>
  static Right pack(T* dst, const Matrix<const S>& x) {
    for_panels(x.cols, [&](int64_t col, int64_t width) {
      const auto cols = std::min(width * LANES, x.cols - col);
      const auto ld = width * LANES;
      copy_rows(dst + col * x.rows, ld, x.block(0, col, x.rows, cols), ld);
    });
    return {dst, 0, x.rows, true};
  }

  // Returns x as the right operand of a product with `rows` rows. If there are
  // many, x is packed, unless it has been before, else it is read in place.
  template <typename S>
  static Right right(
      T* dst, const Matrix<const S>& x, int64_t rows, bool again = false) {
    if constexpr (std::is_same_v<T, S>) {
      if (rows <= UNPACKED_ROWS && x.col_stride == 1 &&
          (has_masks || x.cols % LANES == 0)) {
        return {x.data, x.row_stride, x.rows, false};
      }
    }
    return again ? Right{dst, 0, x.rows, true} : pack(dst, x);
  }

  // The left operand: A(r, p) is data[r * ld + p] or, transposed, data[r + p *
  // ld].
  struct Left {
    const T* data;
    int64_t ld;
    bool transposed = false;

    Left from(int64_t row, int64_t term) const {
      const auto offset = transposed ? row + term * ld : row * ld + term;
      return {data + offset, ld, transposed};
    }
    // Returns A as a matrix.
    Matrix<const T> matrix(int64_t rows, int64_t terms) const {
      return {data, rows, terms, transposed ? 1 : ld, transposed ? ld : 1};
    }
  };

  // Returns at most MR rows of x as a left operand: in place or, if needed, as
  // a copy.
  template <typename S>
  static Left left(T* copy, const Matrix<const S>& x) {
    if constexpr (std::is_same_v<T, S>) {
      if (x.col_stride == 1 && x.rows == kernel_rows(x.rows)) {
        return {x.data, x.row_stride};
      }
    }
    copy_rows(copy, x.cols, x);
    const auto end = kernel_rows(x.rows);
    std::fill(copy + x.rows * x.cols, copy + end * x.cols, T(0));
    return {copy, x.cols};
  }

  // C (+)= A times a panel of B, for the first `terms` terms. Reads
  // kernel_rows(rows) rows of A.
  template <typename B>
  static C10_ALWAYS_INLINE void multiply(
      int64_t rows,
      int64_t terms,
      const Left& a,
      const Panel<B>& b,
      bool accumulate,
      T* c,
      int64_t ldc) {
    const auto with_rows = [&](auto v, auto transposed) {
      constexpr int V = decltype(v)::value;
      constexpr bool is_t = decltype(transposed)::value;
      if (rows > MR / 2) {
        kernel<MR, 1, V, is_t>(rows, terms, a, b, accumulate, c, ldc);
      } else if (rows > 1) {
        kernel<MR / 2, 2, V, is_t>(rows, terms, a, b, accumulate, c, ldc);
      } else {
        kernel<1, MR / 2, V, is_t>(rows, terms, a, b, accumulate, c, ldc);
      }
    };
    const auto with_width = [&](auto transposed) {
      if constexpr (!std::is_same_v<T, B>) {
        with_rows(std::integral_constant<int, 2>(), transposed);
      } else if (NV > 2 && b.width == NV) {
        with_rows(std::integral_constant<int, NV>(), transposed);
      } else if (b.width == 2) {
        with_rows(std::integral_constant<int, 2>(), transposed);
      } else {
        with_rows(std::integral_constant<int, 1>(), transposed);
      }
    };
    if (a.transposed) {
      with_width(std::true_type());
    } else {
      with_width(std::false_type());
    }
  }
  static int64_t kernel_rows(int64_t rows) {
    return rows > MR / 2 ? MR : rows > 1 ? MR / 2 : 1;
  }

  // C (+)= A B. Reads the rows of A up to a multiple of MR.
  static void product(
      bool accumulate,
      int64_t rows,
      int64_t cols,
      const Left& a,
      const Right& b,
      T* c,
      int64_t ldc) {
    for (int64_t p = 0; p == 0 || p < b.rows; p += KC) {
      const auto terms = std::min(KC, b.rows - p);
      const bool adds = accumulate || p > 0;
      for_panels(cols, [&](int64_t col, int64_t width) {
        const auto count = std::min(width * LANES, cols - col);
        const auto panel = b.panel(col, width, count, p);
        for (int64_t row = 0; row < rows; row += MR) {
          const auto panel_rows = std::min(MR, rows - row);
          T* dst = c + row * ldc + col;
          for (int64_t r = 0; r < panel_rows; ++r) {
            for (int64_t j = 0; j < count; j += LINE) {
              prefetch_line(dst + (C_AHEAD + r) * ldc + j);
            }
          }
          multiply(panel_rows, terms, a.from(row, p), panel, adds, dst, ldc);
        }
      });
    }
  }

  // C (+)= A B, also for a C of lower precision, which is overwritten, and for
  // more than KC terms, whose sum must start from zero. These use `acc`: it
  // holds the sums of some rows at a time, which fit in the L1 cache.
  template <typename O>
  static void product_by(
      T* acc,
      bool accumulate,
      int64_t rows,
      int64_t cols,
      const Left& a,
      const Right& b,
      O* c,
      int64_t ldc) {
    if constexpr (std::is_same_v<T, O>) {
      if (!accumulate || b.rows <= KC) {
        // A small B stays in the cache, and C is written row by row.
        const auto some = b.rows * cols <= SMALL ? rows_of_sums(cols) : rows;
        for (int64_t row = 0; row < rows; row += some) {
          const auto count = std::min(some, rows - row);
          T* dst = c + row * ldc;
          product(accumulate, count, cols, a.from(row, 0), b, dst, ldc);
        }
        return;
      }
    }
    const auto some = rows_of_sums(cols);
    const bool flat = cols == ldc;
    for (int64_t row = 0; row < rows; row += some) {
      const auto count = std::min(some, rows - row);
      product(false, count, cols, a.from(row, 0), b, acc, cols);
      for (int64_t i = 0; i < (flat ? 1 : count); ++i) {
        O* dst = c + (row + i) * ldc;
        add_sum(accumulate, dst, acc + i * cols, flat ? count * cols : cols);
      }
    }
  }

  // C (+)= A x for few rows of A and an x of lower precision, which is read in
  // place and converted as it is loaded: once for each MR rows. Returns false
  // if x can't be, or A has more rows. Then product_by, which gives the same
  // bits, must be called with x packed.
  template <typename S, typename O>
  static bool product_in_place(
      T* acc,
      bool accumulate,
      int64_t rows,
      const Left& a,
      const Matrix<const S>& x,
      O* c,
      int64_t ldc) {
    if constexpr (reads_in_place<S>) {
      if (rows > 2 * MR || x.col_stride != 1) {
        return false;
      }
      for (int64_t row = 0; row < rows; row += MR) {
        const auto count = std::min(MR, rows - row);
        sum_in_place(count, a.from(row, 0), x, acc);
        for (int64_t i = 0; i < count; ++i) {
          O* dst = c + (row + i) * ldc;
          add_sum(accumulate, dst, acc + i * x.cols, x.cols);
        }
      }
      return true;
    }
    return false;
  }

  // Returns the size of `acc` for at most `cols` columns.
  static int64_t sums_size(int64_t cols) {
    return std::max(SMALL, MR * cols);
  }

  // C (+)= A B for a packed B of `cols` columns, one micro-panel of A at a
  // time.
  template <typename S>
  static C10_ALWAYS_INLINE void product_by_a_panels(
      bool accumulate,
      const Matrix<const S>& a,
      const Right& b,
      int64_t cols,
      T* a_copy,
      T* c,
      int64_t ldc) {
    for (int64_t row = 0; row < a.rows; row += MR) {
      const auto rows = std::min(MR, a.rows - row);
      const auto operand = left(a_copy, a.block(row, 0, rows, a.cols));
      for_panels(cols, [&](int64_t col, int64_t width) {
        const auto panel =
            b.panel(col, width, std::min(width * LANES, cols - col));
        multiply(
            rows, a.cols, operand, panel, accumulate, c + row * ldc + col, ldc);
      });
    }
  }

 private:
  // acc = A x for at most MR rows
  template <typename S>
  static void sum_in_place(
      int64_t rows, const Left& a, const Matrix<const S>& x, T* acc) {
    for (int64_t p = 0; p < x.rows; p += KC) {
      const auto terms = std::min(KC, x.rows - p);
      for (int64_t col = 0; col < x.cols; col += 2 * LANES) {
        const auto count = std::min(2 * LANES, x.cols - col);
        const Panel<S> panel{&x.at(p, col), x.row_stride, 2, count};
        multiply(rows, terms, a.from(0, p), panel, p > 0, acc + col, x.cols);
      }
    }
  }

  static int64_t rows_of_sums(int64_t cols) {
    return std::max<int64_t>(1, SMALL / (MR * cols + 1)) * MR;
  }

  static constexpr int64_t LINE = 64 / sizeof(T);
  // A and B are prefetched so many terms ahead, and C so many rows. The latter
  // makes a product of one term, with a C past the caches, 1.4 times as fast.
  static constexpr int64_t A_AHEAD = 4, B_AHEAD = 32, C_AHEAD = 4 * MR;
  // With packing, products of 4 rows take half as long again, of 32 up to 7%
  // longer, of 96 as long (Zen 5).
  static constexpr int64_t UNPACKED_ROWS = 96;
  // Fits in the L1 cache. 12 or 48 KB take as long (Zen 5).
  static constexpr int64_t SMALL = (24 << 10) / sizeof(T);

  // The first `count` elements of a vector.
  struct PartOfVector {
#if defined(CPU_CAPABILITY_AVX512)
    explicit PartOfVector(int64_t count) : mask((1u << count) - 1) {}

    template <typename B>
    C10_ALWAYS_INLINE Vec load(const B* p) const {
      if constexpr (std::is_same_v<B, float>) {
        return _mm512_maskz_loadu_ps(mask, p);
      } else if constexpr (std::is_same_v<B, double>) {
        return _mm512_maskz_loadu_pd(mask, p);
      } else {
        const auto x = _mm256_maskz_loadu_epi16(mask, p);
        if constexpr (std::is_same_v<B, at::Half>) {
          return _mm512_cvtph_ps(x);
        } else { // bfloat16 is the upper half of a float
          const auto bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
          return _mm512_castsi512_ps(bits);
        }
      }
    }
    C10_ALWAYS_INLINE void store(T* p, const Vec& x) const {
      if constexpr (std::is_same_v<T, float>) {
        _mm512_mask_storeu_ps(p, mask, x);
      } else {
        _mm512_mask_storeu_pd(p, mask, x);
      }
    }

    std::conditional_t<std::is_same_v<T, float>, __mmask16, __mmask8> mask;
#else
    C10_ALWAYS_INLINE Vec load(const T* p) const {
      if (count == LANES) {
        return Vec::loadu(p);
      }
#if defined(CPU_CAPABILITY_AVX2)
      if constexpr (std::is_same_v<T, float>) {
        const auto lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const auto all = _mm256_set1_epi32(static_cast<int>(count));
        return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(all, lanes));
      } else {
        const auto lanes = _mm256_setr_epi64x(0, 1, 2, 3);
        const auto all = _mm256_set1_epi64x(count);
        return _mm256_maskload_pd(p, _mm256_cmpgt_epi64(all, lanes));
      }
#else
      return Vec::loadu(p, count);
#endif
    }
    C10_ALWAYS_INLINE void store(T* p, const Vec& x) const {
      x.store(p, count);
    }

    int64_t count;
#endif
  };

  // The micro-kernel. For each of R rows and V vectors it has C accumulators,
  // each of which sums every Cth term. If there are few rows, one accumulator
  // would make each addition wait for the one before.
  template <int R, int C, int V, bool transposed, typename B>
  static void kernel(
      int64_t rows,
      int64_t terms,
      const Left& left,
      const Panel<B>& panel,
      bool accumulate,
      T* c,
      int64_t ldc) {
    const T* a = left.data;
    const auto lda = left.ld;
    const B* b = panel.data;
    const auto ldb = panel.ld;
    const PartOfVector first{std::min(panel.count, LANES)};
    const PartOfVector last{
        std::max<int64_t>(panel.count - (V - 1) * LANES, 0)};
    auto acc = zeros<T>(std::make_index_sequence<R * C * V>());
    const auto add_term = [&](auto chain,
                              int64_t p) C10_ALWAYS_INLINE_ATTRIBUTE {
      if constexpr (transposed) { // each term is in another line of a
        const T* ahead = a + (p + A_AHEAD) * lda;
        prefetch_line(ahead);
        prefetch_line(ahead + R - 1);
      }
      if constexpr (C > 1 || !std::is_same_v<T, B>) { // B is read from memory
        c10::ForcedUnroll<V>{}([&](auto v) C10_ALWAYS_INLINE_ATTRIBUTE {
          prefetch_line(b + (p + B_AHEAD) * ldb + v * LANES);
        });
      }
      auto right = zeros<T>(std::make_index_sequence<V>());
      if constexpr (V > 1) {
        c10::ForcedUnroll<V - 1>{}([&](auto v) C10_ALWAYS_INLINE_ATTRIBUTE {
          const B* from = b + p * ldb + v * LANES;
          if constexpr (std::is_same_v<T, B>) {
            right[v] = Vec::loadu(from);
          } else {
            right[v] = first.load(from);
          }
        });
      }
      // NEON has no partial loads. Rows of B are whole vectors: see `right`.
      const B* from = b + p * ldb + (V - 1) * LANES;
      right[V - 1] = sizeof(Vec) > 16 ? last.load(from) : Vec::loadu(from);
      c10::ForcedUnroll<R>{}([&](auto r) C10_ALWAYS_INLINE_ATTRIBUTE {
        constexpr int i = (decltype(chain)::value * R + decltype(r)::value) * V;
        const Vec x(transposed ? a[r + p * lda] : a[r * lda + p]);
        c10::ForcedUnroll<V>{}([&](auto v) C10_ALWAYS_INLINE_ATTRIBUTE {
          acc[i + v] = vec::fmadd(x, right[v], acc[i + v]);
        });
      });
    };
    int64_t p = 0;
    for (; p + C <= terms; p += C) {
      c10::ForcedUnroll<C>{}(
          [&](auto i) C10_ALWAYS_INLINE_ATTRIBUTE { add_term(i, p + i); });
    }
    for (; p < terms; ++p) {
      add_term(std::integral_constant<int, 0>(), p);
    }
    c10::ForcedUnroll<R * V>{}([&](auto i) C10_ALWAYS_INLINE_ATTRIBUTE {
      if (i / V >= rows) {
        return;
      }
      Vec sum = acc[i];
      if constexpr (C > 1) {
        c10::ForcedUnroll<C - 1>{}([&](auto chain) C10_ALWAYS_INLINE_ATTRIBUTE {
          sum = sum + acc[(chain + 1) * R * V + i];
        });
      }
      T* dst = c + i / V * ldc + i % V * LANES;
      constexpr bool is_last = decltype(i)::value % V == V - 1;
      if constexpr (is_last || !std::is_same_v<T, B>) {
        const auto& part = is_last ? last : first;
        part.store(dst, accumulate ? part.load(dst) + sum : sum);
      } else {
        (accumulate ? Vec::loadu(dst) + sum : sum).store(dst);
      }
    });
  }
};

// Returns the leading dimension of a tile. It is no power of two, so that rows
// don't share cache sets. Each row has a gap after it, because whole vectors
// are stored.
template <typename T>
int64_t tile_ld(int64_t cols) {
  constexpr auto LANES = FmaProducts<T>::LANES;
  return at::round_up(cols, LANES) + LANES;
}

// Returns the number of elements of a tile, including those below and right of
// it that are read or written.
template <typename T>
int64_t tile_size(int64_t rows, int64_t cols) {
  return at::round_up(rows, FmaProducts<T>::MR) * tile_ld<T>(cols) +
         FmaProducts<T>::NR;
}

// Writes zeros below and right of a tile, up to a multiple of MR. These are
// read and multiplied, but no result depends on them. Without zeros they are
// often denormal, which is slow.
template <typename T>
void clear_edges(T* tile, int64_t rows, int64_t cols, int64_t ld) {
  constexpr auto MR = FmaProducts<T>::MR;
  const auto end = at::round_up(cols, MR);
  for (int64_t i = 0; cols < end && i < rows; ++i) {
    store(tile + i * ld + cols, Pair<T>(T(0)), end - cols);
  }
  std::fill(tile + rows * ld, tile + at::round_up(rows, MR) * ld + MR, T(0));
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
