#pragma once

#include <ATen/native/cpu/AttnCopy.h>
#include <ATen/native/cpu/AttnSchedule.h>

// brgemm's operands are made with AVX-512 below.
#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/CPUBlas.h>
#endif

#include <exception>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The leading dimension of operands and sums. It is no power of two, so that
// rows don't share cache sets.
constexpr int64_t BRGEMM_LD = KC + 16;
static_assert(NC <= KC, "a tile is one operand");

// The sizes of a product by brgemm.
struct BrgemmSizes {
  int64_t rows, cols, terms;
};

// cpublas keeps a kernel for each set of sizes as long as the thread lives. So
// there are only 20 sets: 2 x 5 sizes that set sums, and 2 x 5 that add to
// them.
constexpr int64_t BRGEMM_COLS = 32;
constexpr int64_t BRGEMM_ROWS[] = {64, 16};
constexpr int64_t BRGEMM_TERMS[] = {KC, 128, 64, 32, 16};

// Returns how many terms are summed for a product of `terms`. The rest are
// zeros.
inline int64_t brgemm_terms(int64_t terms) {
  return at::round_up(terms, BRGEMM_TERMS[4]);
}

// Calls fn(sizes, row, term) for each part of a product of at most 64 rows. How
// the terms are divided, and so how sums are rounded, depends on their number
// only.
template <typename F>
void for_brgemm_parts(int64_t rows, int64_t terms, const F& fn) {
  const auto [most, few] = BRGEMM_ROWS;
  const auto step = rows > most - few ? most : few;
  const auto end = brgemm_terms(terms);
  for (int64_t p = 0, count = 0; p < end; p += count) {
    const auto fits = [&](int64_t size) { return size <= end - p; };
    count =
        *std::find_if(std::begin(BRGEMM_TERMS), std::end(BRGEMM_TERMS), fits);
    for (int64_t row = 0; row < rows; row += step) {
      fn(BrgemmSizes{step, BRGEMM_COLS, count}, row, p);
    }
  }
}

// Returns whether brgemm(sizes, accumulate, a, vnni, sums) computes
// sums (+)= a x for an x in VNNI layout. On some machines it fails, on others
// it takes x in rows. All numbers are integers, so the sums are exact.
template <typename S, typename F>
bool multiplies_vnni(const F& brgemm) {
  constexpr int64_t M = 16, N = BRGEMM_COLS, K = 16;
  const auto left = [](int64_t i, int64_t p) { return (i + 2 * p) % 5 - 2; };
  const auto right = [](int64_t p, int64_t j) {
    return (3 * p + 5 * j + p * j) % 7 - 3;
  };
  S a[M * BRGEMM_LD] = {};
  S vnni[K * N] = {};
  float acc[M * BRGEMM_LD];
  std::fill_n(acc, M * BRGEMM_LD, 1.0f);
  for (const auto p : c10::irange(K)) {
    for (const auto i : c10::irange(M)) {
      a[i * BRGEMM_LD + p] = static_cast<S>(static_cast<float>(left(i, p)));
    }
    for (const auto j : c10::irange(N)) {
      vnni[p / 2 * 2 * N + 2 * j + p % 2] =
          static_cast<S>(static_cast<float>(right(p, j)));
    }
  }
  try {
    for (const bool accumulate : {false, true}) {
      brgemm(BrgemmSizes{M, N, K}, accumulate, a, vnni, acc);
    }
  } catch (const std::exception&) {
    return false;
  }
  for (const auto i : c10::irange(M)) {
    for (const auto j : c10::irange(N)) {
      int64_t sum = 0;
      for (const auto p : c10::irange(K)) {
        sum += left(i, p) * right(p, j);
      }
      if (acc[i * BRGEMM_LD + j] != static_cast<float>(2 * sum)) {
        return false;
      }
    }
  }
  return true;
}

#if defined(CPU_CAPABILITY_AVX512)

// Releases what brgemm holds for a thread, such as AMX's tiles. A destructor
// must not throw, and failure is harmless: the next product configures the
// tiles again.
struct BrgemmContext {
  ~BrgemmContext() {
    try {
      cpublas::brgemm_release();
    } catch (const std::exception&) {
    }
  }
};

// Products by oneDNN's brgemm, which multiplies bfloat16 or half by the widest
// instruction of the machine and sums in float:
//   C (M x N) (+)= A (M x K) B (K x N)
// Both operands are copies, whose leading dimensions are fixed.
template <typename S>
class BrgemmProducts {
 public:
  using T = float;
  using Vec = vec::Vectorized<S>;
  static constexpr int64_t W = Vec::size();
  static constexpr int64_t MC = BRGEMM_ROWS[0]; // rows of A and C
  static_assert(W == BRGEMM_COLS);
  // If attn has at most this many rows, FMA computes the backward: the
  // gradients of k and v are sums of m terms. With 40 rows it takes a tenth to
  // a third less than brgemm, with 64 as much (Zen 5).
  static constexpr int64_t FEW_ROWS = 48;

  // Returns whether brgemm is available and worth the copies. Columns are
  // padded to 32 and terms to 16: with n = 16 or d + e = 16 FMA takes a quarter
  // less time, with 32 the same, with 64 a third more (Zen 5). A sum without
  // terms would not be set to zero.
  static bool fits(const Sizes& sizes, const Runtime& runtime) {
    const auto [batch, m, n, d, e] = sizes;
    return runtime.may_use_brgemm && available() && m > 8 && n > 16 &&
           d + e > 32 && std::min(d, e) > 0;
  }

  // A left operand, as matrices of KC columns each.
  //   at(i, j)[0] = x[i][j]
  struct Left {
    S* data;
    int64_t rows, cols;

    S* at(int64_t row, int64_t col) const {
      const auto first = col / KC * at::round_up(rows, MC);
      return data + (first + row) * BRGEMM_LD + col % KC;
    }
  };

  // A right operand: panels of W columns, in VNNI layout.
  //   at(i, j)[c * 2 + i % 2] = x[i][j + c] for even i, j = 0, W, ...
  struct Right {
    S* data;
    int64_t rows, cols;

    S* at(int64_t row, int64_t col) const {
      return data + col * brgemm_terms(rows) + row * W;
    }
    // Writes zeros in the rows below the last pair.
    void clear_after() const {
      const auto begin = at::round_up<int64_t>(rows, 2);
      for (int64_t col = 0; col < cols; col += W) {
        std::fill(at(begin, col), at(brgemm_terms(rows), col), S(0));
      }
    }
  };

  // Return the sizes of operands, in elements of T.
  static int64_t left_size(int64_t rows, int64_t cols) {
    return at::ceil_div(cols, KC) * at::round_up(rows, MC) * BRGEMM_LD / 2;
  }
  static int64_t right_size(int64_t rows, int64_t cols) {
    return brgemm_terms(rows) * at::round_up(cols, W) / 2;
  }

  static Pair<T> as_float(const Vec& x) {
    auto [lo, hi] = vec::convert_to_float<S>(x);
    return {lo, hi};
  }

  // Loads the first `count` of the W elements from x[row][col] on; the rest are
  // zeros.
  static C10_ALWAYS_INLINE Vec
  load_row(const Matrix<const S>& x, int64_t row, int64_t col, int64_t count) {
    const S* p = x.data + row * x.row_stride + col * x.col_stride;
    if (x.col_stride == 1) {
      return count >= W ? Vec::loadu(p) : Vec::loadu(p, count);
    }
    if (x.col_stride == 0 && count >= W) {
      return Vec(*p);
    }
    alignas(64) S gathered[W] = {};
    for (const auto j : c10::irange(std::min(count, W))) {
      gathered[j] = p[j * x.col_stride];
    }
    return Vec::loadu(gathered);
  }

  // Calls fn(i, count) for i = 0, W, ... In all calls but the last, count is
  // the constant W.
  template <typename F>
  static C10_ALWAYS_INLINE void for_vectors(int64_t size, const F& fn) {
    int64_t i = 0;
    for (; i + W <= size; i += W) {
      fn(i, W);
    }
    if (i < size) {
      fn(i, size - i);
    }
  }

  // C = at most MC rows of A, from `row` on, times B
  static void multiply(const Left& a, int64_t row, const Right& b, T* c) {
    for (int64_t col = 0; col < b.cols; col += W) {
      multiply_panel(a, row, b, col, c + col);
    }
  }

  // out (+)= A B. The product is computed in `acc` first.
  template <typename O>
  static void add_product(
      bool accumulate, const Left& a, const Right& b, T* acc, O* out) {
    for (int64_t row = 0; row < a.rows; row += MC, out += MC * b.cols) {
      const auto rows = std::min(MC, a.rows - row);
      for_vectors(b.cols, [&](int64_t col, int64_t count) {
        O* dst = out + col;
        for (int64_t r = 0; accumulate && r < rows; ++r) {
          for (int64_t c = 0; c < count; c += 64 / sizeof(O)) {
            prefetch_line(dst + r * b.cols + c);
          }
        }
        multiply_panel(a, row, b, col, acc);
        for (int64_t r = 0; r < rows; ++r, dst += b.cols) {
          const auto x = load<T>(acc + r * BRGEMM_LD, count);
          store(dst, accumulate ? load<T>(dst, count) + x : x, count);
        }
      });
    }
  }

  // Calls fn(i, j, block rows, block cols) for each block of a (rows x cols)
  // matrix that vec::transpose_mxn can transpose. It can't for 31 rows or
  // columns, whose mask overflows an int.
  template <typename F>
  static void for_blocks(int64_t rows, int64_t cols, const F& fn) {
    const auto size = [](int64_t left) {
      return left == W - 1 ? W / 2 : std::min(W, left);
    };
    for (int64_t i = 0; i < rows; i += size(rows - i)) {
      for (int64_t j = 0; j < cols; j += size(cols - j)) {
        fn(i, j, size(rows - i), size(cols - j));
      }
    }
  }

  // dst[2 * j] = x[j], dst[2 * j + 1] = y[j]
  static C10_ALWAYS_INLINE void store_vnni(S* dst, const Vec& x, const Vec& y) {
    alignas(64) static constexpr uint16_t order[2 * W] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const Vec lo = _mm512_permutex2var_epi16(x, _mm512_load_si512(order), y);
    const Vec hi =
        _mm512_permutex2var_epi16(x, _mm512_load_si512(order + W), y);
    lo.store(dst);
    hi.store(dst + W);
  }

  // Copies x. No result depends on the columns right of x in its last panel.
  static Right right(S* copy, const Matrix<const S>& x) {
    const Right result{copy, x.rows, x.cols};
    if (x.row_stride == 1 && x.col_stride != 1) {
      constexpr int64_t LANES = W / 2;
      for (int64_t col = 0; col < x.cols; col += LANES) {
        if (col + LANES < x.cols) {
          prefetch_rows(&x.at(0, col), x.col_stride, LANES, x.rows);
        }
        transpose_rows<T>(
            &x.at(0, col),
            x.col_stride,
            x.cols - col,
            x.rows,
            [&](int64_t i, __m512i vnni) C10_ALWAYS_INLINE_ATTRIBUTE {
              S* to = result.at(i, col / W * W) + 2 * (col % W);
              _mm512_storeu_si512(to, vnni);
            });
      }
      result.clear_after();
      return result;
    }
    for (int64_t i = 0; i < x.rows; i += 2) {
      for_vectors(
          x.cols, [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
            store_vnni(
                result.at(i, col),
                load_row(x, i, col, count),
                i + 1 < x.rows ? load_row(x, i + 1, col, count) : Vec(0));
          });
    }
    result.clear_after();
    return result;
  }

  // Copies x and appends columns of zeros. No result depends on the rows below.
  static Left left(S* copy, const Matrix<const S>& x) {
    const Left result{copy, x.rows, x.cols};
    const auto terms = brgemm_terms(x.cols);
    if (x.row_stride != 1 || x.col_stride == 1) {
      for (const auto i : c10::irange(x.rows)) {
        for (int64_t j = 0; j < terms; j += W) {
          const auto count = std::max<int64_t>(x.cols - j, 0);
          load_row(x, i, j, count).store(result.at(i, j));
        }
      }
      return result;
    }
    for_blocks(
        x.cols, x.rows, [&](int64_t j, int64_t i, int64_t count, int64_t rows) {
          for (int64_t p = 0; p < count; ++p) {
            prefetch_line(&x.at(i, j + p) + 2 * W);
          }
          vec::transpose_mxn<S>(
              &x.at(i, j),
              x.col_stride,
              result.at(i, j),
              BRGEMM_LD,
              static_cast<int>(count),
              static_cast<int>(rows));
        });
    const auto after = terms - x.cols;
    for (int64_t i = 0; after > 0 && i < x.rows; ++i) {
      std::fill_n(result.at(i, x.cols), after, S(0));
    }
    return result;
  }

 private:
  // Returns whether brgemm multiplies more numbers in a cycle than float's FMA:
  // by AMX, or if VDPBF16PS starts as often as FMA. No feature bit says that.
  // It starts as often on AMD's processors, which have SSE4A, and half as often
  // on Intel's without AMX. If it were measured, the kernel and so the bits
  // could differ between runs.
  static bool outruns_fma() {
    if (cpublas::could_pack(c10::CppTypeToScalarType<S>::value)) { // AMX
      return true;
    }
#if defined(__x86_64__) && defined(__GNUC__)
    return std::is_same_v<S, at::BFloat16> && __builtin_cpu_supports("sse4a");
#else
    return false;
#endif
  }

  static bool available() {
    // There is no other way to ask. If the machine lacks the instruction,
    // oneDNN throws. If it multiplies half without AMX, oneDNN takes the right
    // operand in rows.
    static const bool available = [] {
      if (!outruns_fma()) {
        return false;
      }
      const BrgemmContext context;
      return multiplies_vnni<S>(brgemm);
    }();
    return available;
  }

  // acc (+)= a x for a panel x in VNNI layout. This is the only call of brgemm:
  // cpublas keeps one kernel for each `sizes` and `accumulate`.
  static void brgemm(
      const BrgemmSizes& sizes,
      bool accumulate,
      const S* a,
      const S* vnni,
      T* acc) {
    const auto [rows, cols, terms] = sizes;
    cpublas::brgemm(
        rows,
        cols,
        terms,
        BRGEMM_LD,
        cols,
        BRGEMM_LD,
        accumulate,
        a,
        vnni,
        acc);
  }

  // C = at most MC rows of A, from `row` on, times the panel of B that begins
  // with column `col`
  static void multiply_panel(
      const Left& a, int64_t row, const Right& b, int64_t col, T* c) {
    for_brgemm_parts(
        std::min(MC, a.rows - row),
        a.cols,
        [&](const BrgemmSizes& sizes, int64_t r, int64_t p) {
          brgemm(
              sizes, p > 0, a.at(row + r, p), b.at(p, col), c + r * BRGEMM_LD);
        });
  }
};

#endif

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
