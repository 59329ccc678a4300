#pragma once

#include <ATen/native/cpu/AttnCopy.h>
#include <ATen/native/cpu/AttnSchedule.h>

// brgemm's operands are made with AVX-512 below.
#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#endif

#include <exception>

namespace at::native {
inline namespace CPU_CAPABILITY {

// The sizes of a product by brgemm.
struct BrgemmSizes {
  int64_t rows, cols, terms;
};

// Whether brgemm(sizes, add, a, pairs, sums) is sums (+)= a x for x in pairs:
// not where it fails, nor where it takes x as it is. The numbers are integers
// and so are the sums, whatever their order.
template <typename S, typename F>
bool multiplies_pairs(const F& brgemm) {
  constexpr int64_t M = 4, N = 16, K = 8;
  const auto left = [](int64_t i, int64_t p) { return (i + 2 * p) % 5 - 2; };
  const auto right = [](int64_t p, int64_t j) {
    return (3 * p + 5 * j + p * j) % 7 - 3;
  };
  S a[M * ATTN_LD] = {};
  S pairs[K * N] = {};
  float acc[M * ATTN_LD];
  std::fill_n(acc, M * ATTN_LD, 1.0f);
  for (const auto p : c10::irange(K)) {
    for (const auto i : c10::irange(M)) {
      a[i * ATTN_LD + p] = static_cast<S>(static_cast<float>(left(i, p)));
    }
    for (const auto j : c10::irange(N)) {
      pairs[p / 2 * 2 * N + 2 * j + p % 2] =
          static_cast<S>(static_cast<float>(right(p, j)));
    }
  }
  try {
    for (const bool add : {false, true}) {
      brgemm(BrgemmSizes{M, N, K}, add, a, pairs, acc);
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
      if (acc[i * ATTN_LD + j] != static_cast<float>(2 * sum)) {
        return false;
      }
    }
  }
  return true;
}

#if defined(CPU_CAPABILITY_AVX512)

// Products by oneDNN's brgemm, which multiplies bfloat16 or half with the
// widest instruction that the machine has and sums in float:
//   C (M x N) (+)= A (M x K) B (K x N)
// B is in pairs:
//   pairs[i / 2][j][i % 2] = b[i][j]
//
// cpublas keeps a kernel for each set of sizes and strides as long as the
// thread lives. So a product is made of few:
//   both operands are copies, with leading dimensions of our own,
//   B in panels of 288, 128, 64, 32 or 16 columns,
//   rows of A are multiplied by 96, 64, 32, 16 or 4 at once, and
//   terms, filled up with zeros, are summed at once: in 21 sizes up to 288, and
//   beyond by 256, 192, 128 or 64, which are added to a sum.
// These are at most 5 x 5 x 25 = 625 kernels for each S and thread, whatever
// the shapes: 30 MB.
template <typename S>
class AttnBrgemm {
 public:
  using T = float;
  using Vec = vec::Vectorized<S>;
  static constexpr int64_t W = Vec::size();
  static constexpr int64_t MC = 96; // rows of A and C

  // Whether this machine and build can, and that it is worth the copies: few
  // columns are filled up to 16.
  static bool fits(const AttnSizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    const auto width = std::max(d, e);
    return at::globalContext().userEnabledMkldnn() && available() && m > 4 &&
           (n > 8 || width >= 64) && width <= 1024;
  }

  // A left operand. Of more than ATTN_BLOCK columns, each CHUNK are a matrix.
  //   at(i, j)[0] = x[i][j]
  struct Left {
    S* data;
    int64_t rows, cols;

    int64_t chunk() const {
      return cols <= ATTN_BLOCK ? ATTN_BLOCK : CHUNK;
    }
    S* at(int64_t row, int64_t col) const {
      const auto matrix = col / chunk();
      return data + (matrix * at::round_up(rows, ROOM) + row) * ATTN_LD + col -
             matrix * chunk();
    }
  };

  // The sizes of operands, in elements of T.
  static int64_t in_sums(int64_t count) {
    return at::ceil_div<int64_t>(count * sizeof(S), sizeof(T));
  }
  static int64_t left_size(int64_t rows, int64_t cols) {
    const auto matrices = cols <= ATTN_BLOCK ? 1 : at::ceil_div(cols, CHUNK);
    return in_sums(matrices * at::round_up(rows, ROOM) * ATTN_LD);
  }
  static int64_t pairs_size(int64_t rows, int64_t cols) {
    int64_t width = 0;
    for_panels(cols, [&](int64_t, int64_t, int64_t w) { width += w; });
    return in_sums(terms_of(rows) * width);
  }

  // How many terms a product of `terms` is made of, with zeros
  static int64_t terms_of(int64_t terms) {
    if (terms > ATTN_BLOCK) {
      return at::round_up(terms, CHUNK_STEP);
    }
    return at::round_up<int64_t>(
        terms,
        terms <= 96    ? 8
        : terms <= 192 ? 16
                       : 32);
  }
  // The width of the next panel, if there are so many columns left
  static int64_t width_of(int64_t left) {
    return left > 272    ? ATTN_BLOCK
           : left >= 128 ? 128
           : left > 48   ? 64
           : left > 16   ? 32
                         : 16;
  }
  // The rows that are multiplied next, if there are so many left. Those that
  // are not there are multiplied with the others.
  static int64_t rows_of(int64_t left) {
    return left >= MC  ? MC
           : left > 48 ? 64
           : left > 20 ? 32
           : left > 4  ? 16
                       : 4;
  }

  static Pair<T> as_float(const Vec& x) {
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
    if (x.col_stride == 0 && count >= W) {
      return Vec(*p);
    }
    alignas(64) S gathered[W] = {};
    for (const auto j : c10::irange(std::min(count, W))) {
      gathered[j] = p[j * x.col_stride];
    }
    return Vec::loadu(gathered);
  }

  // f(col, the columns, the width) for each panel
  template <typename F>
  static C10_ALWAYS_INLINE void for_panels(int64_t all, const F& fn) {
    for (int64_t col = 0, width = 0; col < all; col += width) {
      width = width_of(all - col);
      fn(col, std::min(width, all - col), width);
    }
  }

  // f(i, count) for i = 0, W, ...: count is W, a constant, but in the last
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

  // C = rows row, row + 1, ... of A, at most MC, times all panels of `cols`
  // columns
  static void multiply(
      const Left& a, int64_t row, const S* pairs, int64_t cols, T* c) {
    for_panels(cols, [&](int64_t col, int64_t /*cols*/, int64_t width) {
      const S* panel = pairs + col * terms_of(a.cols);
      multiply_panel(a, row, panel, width, c + col);
    });
  }

  // out (+)= A B, by way of `sums`
  template <typename O>
  static void add_product(
      bool first, const Left& a, const S* pairs, int64_t all, T* acc, O* out) {
    for (int64_t row = 0; row < a.rows; row += MC, out += MC * all) {
      const auto rows = std::min(MC, a.rows - row);
      for_panels(all, [&](int64_t begin, int64_t cols, int64_t width) {
        O* dst = out + begin;
        for (int64_t r = 0; !first && r < rows; ++r) {
          for (int64_t col = 0; col < cols; col += 64 / sizeof(O)) {
            prefetch_line(dst + r * all + col);
          }
        }
        const S* panel = pairs + begin * terms_of(a.cols);
        multiply_panel(a, row, panel, width, acc);
        for (int64_t r = 0; r < rows; ++r, dst += all) {
          const T* src = acc + r * ATTN_LD;
          for_vectors(
              cols,
              [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
                const auto x = load<T>(src + col, count);
                store(
                    dst + col,
                    first ? x : load<T>(dst + col, count) + x,
                    count);
              });
        }
      });
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

  // Zeros in the pairs below `rows` rows.
  static void clear_after(S* pairs, int64_t rows, int64_t cols) {
    const auto begin = at::round_up<int64_t>(rows, 2), end = terms_of(rows);
    for_panels(cols, [&](int64_t col, int64_t /*cols*/, int64_t width) {
      S* panel = pairs + col * end;
      std::fill(panel + begin * width, panel + end * width, S(0));
    });
  }

  // The panels of x, each in pairs. What is right of x is of no account.
  static void pack(S* dst, const Matrix<const S>& x) {
    const auto pairs = x.rows / 2;
    for_panels(x.cols, [&](int64_t begin, int64_t cols, int64_t width) {
      S* panel = dst + begin * terms_of(x.rows);
      int64_t i = 0;
      if (x.row_stride == 1) {
        // Both of a pair are one float for this.
        constexpr int64_t LANES = vec::Vectorized<float>::size();
        for (int64_t c = 0; c < cols; c += LANES) {
          transpose_rows(
              &x.at(0, begin + c),
              x.col_stride * sizeof(S),
              reinterpret_cast<float*>(panel) + c,
              width,
              std::min(LANES, cols - c),
              pairs);
        }
        i = 2 * pairs;
      }
      for (; i < x.rows; i += 2) {
        for_vectors(
            cols, [&](int64_t c, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
              store_pairs(
                  panel + i * width + 2 * c,
                  load_row(x, i, begin + c, count),
                  i + 1 < x.rows ? load_row(x, i + 1, begin + c, count)
                                 : Vec(0),
                  count);
            });
      }
    });
    clear_after(dst, x.rows, x.cols);
  }

  // A copy of x, with columns of zeros after it. Rows below it are of no
  // account.
  static Left left(S* copy, const Matrix<const S>& x) {
    const Left result{copy, x.rows, x.cols};
    const auto terms = terms_of(x.cols);
    if (x.row_stride != 1 || x.col_stride == 1) {
      for (int64_t begin = 0; begin < terms; begin += result.chunk()) {
        const auto end = std::min(terms, begin + result.chunk());
        S* dst = result.at(0, begin);
        for (int64_t i = 0; i < x.rows; ++i, dst += ATTN_LD) {
          for (auto j = begin; j < end; j += W) {
            const auto count = std::max<int64_t>(x.cols - j, 0);
            load_row(x, i, j, count).store(dst + j - begin);
          }
        }
      }
      return result;
    }
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
            result.at(i, j),
            ATTN_LD,
            static_cast<int>(terms),
            static_cast<int>(rows));
      }
    }
    const auto after = terms - x.cols;
    for (int64_t i = 0; after > 0 && i < x.rows; ++i) {
      std::fill_n(result.at(i, x.cols), after, S(0));
    }
    return result;
  }

 private:
  // A left operand has room for a multiple of so many rows, which rows_of
  // needs.
  static constexpr int64_t ROOM = 32;
  static constexpr int64_t CHUNK = 256, CHUNK_STEP = 64;

  // Whether it multiplies more numbers in a cycle than float's FMA: by AMX, or
  // where products of pairs of bfloat16 start as often as FMA does. On Intel's
  // machines they start half as often.
  static bool outruns_fma() {
    if (cpublas::could_pack(c10::CppTypeToScalarType<S>::value)) { // AMX
      return true;
    }
#if defined(__x86_64__) && defined(__GNUC__)
    return !std::is_same_v<S, at::Half> && !__builtin_cpu_is("intel");
#else
    return !std::is_same_v<S, at::Half>;
#endif
  }

  static bool available() {
    // There is no other way to ask. oneDNN's own exception says that the
    // machine lacks the instruction. On one that multiplies half without AMX,
    // oneDNN takes the right operand as it is.
    static const bool available = [] {
      if (!outruns_fma()) {
        return false;
      }
      const bool multiplies = multiplies_pairs<S>(brgemm);
      cpublas::brgemm_release();
      return multiplies;
    }();
    return available;
  }

  // sums (+)= a x for a panel x in pairs. The only caller of brgemm: what
  // cpublas keeps a kernel for is `sizes` and `add`.
  static void brgemm(
      const BrgemmSizes& sizes, bool add, const S* a, const S* pairs, T* acc) {
    const auto [rows, cols, terms] = sizes;
    cpublas::brgemm(
        rows, cols, terms, ATTN_LD, cols, ATTN_LD, add, a, pairs, acc);
  }

  // C = rows row, row + 1, ... of A, at most MC, times a panel in pairs
  static void multiply_panel(
      const Left& a, int64_t row, const S* panel, int64_t width, T* acc) {
    const auto row_count = std::min(MC, a.rows - row);
    const auto all = terms_of(a.cols);
    for (int64_t p = 0, terms = 0; p < all; p += terms) {
      terms = std::min(a.chunk(), all - p);
      for (int64_t r = 0, rows = 0; r < row_count; r += rows) {
        rows = rows_of(row_count - r);
        brgemm(
            {rows, width, terms},
            p > 0,
            a.at(row + r, p),
            panel + p * width,
            acc + r * ATTN_LD);
      }
    }
  }
};

// The forward of a task by brgemm. See Note [Tiles of attn].
template <typename S>
class BrgemmForward {
 public:
  using T = float;
  static constexpr int64_t ROW_STEP = 32;

  // Of scratch memory, in elements of T.
  struct Layout {
    int64_t acc, k_pairs, v_pairs, rows, tile, size;

    Layout(int64_t /*rows*/, int64_t /*m*/, int64_t n, int64_t d, int64_t e) {
      n = std::min(n, ATTN_BLOCK);
      ScratchLayout layout;
      acc = layout.add(MC * ATTN_LD);
      k_pairs = layout.add(Brgemm::pairs_size(d, n));
      v_pairs = layout.add(Brgemm::pairs_size(n, e));
      rows = layout.add(Brgemm::left_size(MC, d));
      tile = layout.add(Brgemm::left_size(MC, n));
      size = layout.size();
    }
  };

  BrgemmForward(const Layout& layout, T* scratch)
      : acc_(scratch + layout.acc),
        k_pairs_(reinterpret_cast<S*>(scratch + layout.k_pairs)),
        v_pairs_(reinterpret_cast<S*>(scratch + layout.v_pairs)),
        rows_(reinterpret_cast<S*>(scratch + layout.rows)),
        tile_(reinterpret_cast<S*>(scratch + layout.tile)) {}

  ~BrgemmForward() {
    cpublas::brgemm_release();
  }

  template <typename O>
  void forward(
      bool first,
      const Matrix<const S>& q,
      const Matrix<const S>& k,
      const Matrix<const S>& v,
      const Matrix<S>& attn,
      bool stream,
      O* out) {
    const auto n = k.rows;
    Brgemm::pack(k_pairs_, k.t());
    Brgemm::pack(v_pairs_, v);
    for (int64_t i = 0; i < q.rows; i += MC) {
      const auto rows = std::min(MC, q.rows - i);
      const auto left = Brgemm::left(rows_, q.block(i, 0, rows, q.cols));
      Brgemm::multiply(left, 0, k_pairs_, n, acc_);
      for (const auto r : c10::irange(rows)) {
        S* dst = attn.data + (i + r) * attn.row_stride;
        S* tile = tile_ + r * ATTN_LD;
        const T* acc = acc_ + r * ATTN_LD;
        Brgemm::for_vectors(
            n, [&](int64_t col, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
              const auto x = attn_tanh_for<S>(load<T>(acc + col, count), count);
              store(dst + col, x, count, stream);
              store(tile + col, x);
            });
      }
      O* dst = out + i * v.cols;
      Brgemm::add_product(first, {tile_, rows, n}, v_pairs_, v.cols, acc_, dst);
    }
  }

 private:
  using Brgemm = AttnBrgemm<S>;
  static constexpr auto MC = Brgemm::MC;

  T* acc_;
  S *k_pairs_, *v_pairs_, *rows_, *tile_;
};

// The backward of a tile by brgemm. grad_k and grad_v are made transposed, so
// that the tile is the right operand and need not be.
template <typename S>
class BrgemmBackward {
 public:
  using T = float;
  static constexpr int64_t ROW_STEP = 32;
  static constexpr int64_t MIN_ROWS = 48;
  static constexpr bool sums_columns = true;

  // Of scratch memory, in elements of T, for tiles of so many rows and columns.
  struct Layout {
    int64_t acc, k_pairs, v_pairs, rows, q_transposed, grad_output_transposed;
    int64_t tile, tile_pairs, attn_pairs, size;

    Layout(int64_t tile_rows, int64_t cols, int64_t d, int64_t e) {
      ScratchLayout layout;
      acc = layout.add(MC * ATTN_LD);
      k_pairs = layout.add(Brgemm::pairs_size(cols, d));
      v_pairs = layout.add(Brgemm::pairs_size(e, cols));
      rows = layout.add(Brgemm::left_size(tile_rows, e));
      q_transposed = layout.add(Brgemm::left_size(d, tile_rows));
      grad_output_transposed = layout.add(Brgemm::left_size(e, tile_rows));
      tile = layout.add(Brgemm::left_size(tile_rows, cols));
      tile_pairs = layout.add(Brgemm::pairs_size(tile_rows, cols));
      attn_pairs = layout.add(Brgemm::pairs_size(tile_rows, cols));
      size = layout.size();
    }
  };

  BrgemmBackward(const Layout& layout, T* scratch)
      : acc_(scratch + layout.acc),
        k_pairs_(reinterpret_cast<S*>(scratch + layout.k_pairs)),
        v_pairs_(reinterpret_cast<S*>(scratch + layout.v_pairs)),
        rows_(reinterpret_cast<S*>(scratch + layout.rows)),
        q_transposed_(reinterpret_cast<S*>(scratch + layout.q_transposed)),
        grad_output_transposed_(
            reinterpret_cast<S*>(scratch + layout.grad_output_transposed)),
        tile_(reinterpret_cast<S*>(scratch + layout.tile)),
        tile_pairs_(reinterpret_cast<S*>(scratch + layout.tile_pairs)),
        attn_pairs_(reinterpret_cast<S*>(scratch + layout.attn_pairs)) {}

  ~BrgemmBackward() {
    cpublas::brgemm_release();
  }

  void start(const AttnTile<S>& matrices, bool with_scores) {
    const auto& [q, k, v, attn, grad_output, grad_attn] = matrices;
    k_ = k;
    q_ = Brgemm::left(q_transposed_, q.t());
    if (grad_output.data != nullptr) {
      grad_output_t_ = Brgemm::left(grad_output_transposed_, grad_output.t());
    }
    rows_count_ = attn.rows;
    n_ = attn.cols;
    Brgemm::clear_after(attn_pairs_, attn.rows, n_);
    if (with_scores) {
      Brgemm::clear_after(tile_pairs_, attn.rows, n_);
    }
    const bool has_product = with_scores && grad_output.data != nullptr;
    typename Brgemm::Left a{};
    if (has_product) {
      Brgemm::pack(v_pairs_, v.t());
      a = Brgemm::left(rows_, grad_output);
    }
    for (int64_t row = 0; row < attn.rows; row += MC) {
      if (has_product) {
        Brgemm::multiply(a, row, v_pairs_, n_, acc_);
        finish_rows<true, true>(row, grad_attn, attn);
      } else if (with_scores) {
        finish_rows<true, false>(row, grad_attn, attn);
      } else {
        finish_rows<false, false>(row, grad_attn, attn);
      }
    }
  }

  template <typename O>
  void add_grad_q(bool first, O* total) {
    Brgemm::pack(k_pairs_, k_);
    Brgemm::add_product(
        first, {tile_, rows_count_, n_}, k_pairs_, k_.cols, acc_, total);
  }
  void add_grad_k(bool first, T* total) {
    Brgemm::add_product(first, q_, tile_pairs_, n_, acc_, total);
  }
  void add_grad_v(bool first, T* total) {
    Brgemm::add_product(first, grad_output_t_, attn_pairs_, n_, acc_, total);
  }
  // dst = totalᵀ
  static void finish_block(const Matrix<S>& dst, const T* total) {
    alignas(64) T block[W * W];
    for (int64_t i = 0; i < dst.rows; i += W) {
      const auto rows = std::min(W, dst.rows - i);
      for (int64_t j = 0; j < dst.cols; j += W) {
        const auto cols = std::min(W, dst.cols - j);
        transpose(total + j * dst.rows + i, dst.rows, block, W, cols, rows);
        for (const auto r : c10::irange(rows)) {
          S* row = dst.data + (i + r) * dst.cols + j;
          store(row, load<T>(block + r * W), cols);
        }
      }
    }
  }

 private:
  using Brgemm = AttnBrgemm<S>;
  using Vec = typename Brgemm::Vec;
  static constexpr auto MC = Brgemm::MC, W = Brgemm::W;
  static constexpr int64_t AHEAD = 6; // rows, of which a line is on its way

  // At most MC rows of the tiles, from the product in sums_ or without one.
  template <bool with_scores, bool has_product>
  void finish_rows(
      int64_t begin,
      const Matrix<const S>& grad_attn,
      const Matrix<const S>& attn) {
    const auto terms = Brgemm::terms_of(attn.rows);
    const auto end = std::min(attn.rows, begin + MC);
    for (int64_t row = begin; row < end; row += 2) {
      // Rows of attn are far from one another.
      for (const auto i : {row + AHEAD, row + AHEAD + 1}) {
        const S* p = attn.data + i * attn.row_stride;
        for (int64_t col = 0; i < attn.rows && col < n_; col += W) {
          prefetch_line(p + col);
        }
      }
      const bool odd = row + 1 < attn.rows; // else the second is of zeros
      Brgemm::for_panels(
          n_,
          [&](int64_t first,
              int64_t cols,
              int64_t width) C10_ALWAYS_INLINE_ATTRIBUTE {
            const auto panel = first * terms + row * width;
            Brgemm::for_vectors(
                cols,
                [&](int64_t c, int64_t count) C10_ALWAYS_INLINE_ATTRIBUTE {
                  const auto col = first + c;
                  const auto gradient =
                      [&](int64_t i, const Vec& y) C10_ALWAYS_INLINE_ATTRIBUTE {
                        Pair<T> sum(0);
                        if constexpr (has_product) {
                          sum = load<T>(
                              acc_ + (i - begin) * ATTN_LD + col, count);
                        }
                        if (grad_attn.data != nullptr) {
                          sum = sum +
                                Brgemm::as_float(
                                    Brgemm::load_row(grad_attn, i, col, count));
                        }
                        sum = tanh_backward(sum, Brgemm::as_float(y));
                        const Vec x =
                            vec::convert_from_float<S>(sum[0], sum[1]);
                        x.store(tile_ + i * ATTN_LD + col);
                        return x;
                      };
                  const Vec y = Brgemm::load_row(attn, row, col, count);
                  const Vec y_odd =
                      odd ? Brgemm::load_row(attn, row + 1, col, count)
                          : Vec(0);
                  Brgemm::store_pairs(
                      attn_pairs_ + panel + 2 * c, y, y_odd, count);
                  if constexpr (with_scores) {
                    const Vec x = gradient(row, y);
                    const Vec x_odd = odd ? gradient(row + 1, y_odd) : Vec(0);
                    Brgemm::store_pairs(
                        tile_pairs_ + panel + 2 * c, x, x_odd, count);
                  }
                });
          });
    }
  }

  T* acc_;
  S *k_pairs_, *v_pairs_, *rows_, *q_transposed_, *grad_output_transposed_;
  S *tile_, *tile_pairs_, *attn_pairs_;
  int64_t n_ = 0, rows_count_ = 0;
  Matrix<const S> k_{};
  typename Brgemm::Left q_{}, grad_output_t_{};
};

#endif

} // namespace CPU_CAPABILITY
} // namespace at::native
