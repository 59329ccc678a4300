// The kernel of attn_output and attn for compute capability 9.0, by wgmma and
// TMA: one template, three uses.
//
//   S = X0 Y0ᵀ   T = X1 Y1ᵀ   P = tanh(scale S), or 0 where it is masked
//   D = T ∘ (1 - P²), or 0    values = P Y1    gradients = scale D Y0
//
//   sweep     X (stationary)  Y (streamed)  results
//   kForward  q               k, v          values = output
//   kRows     q, G            k, v          gradients = grad_q
//   kColumns  k, v            q, G          values = grad_v,
//                                           gradients = grad_k
//
// Those of attn have P in memory. Its forward writes P. Its backward reads it,
// so that X is G or v alone, and may read a gradient H of it:
// D = (T + H) ∘ (1 - P²).
//
// A block holds 64 rows of X for each consumer warpgroup. One producer thread
// streams tiles of Y through a ring of stages. Blocks are persistent: the ring
// runs on from one piece of work to the next. Each result is the sum of one
// warpgroup over its tiles in turn, so it has the same bits each time.
//
// A tile is rows of 64 columns, swizzled as TMA writes them; a wider matrix has
// several side by side. TMA gives zeros for what is beyond a matrix.
#pragma once
#include <ATen/native/cuda/AttnPtx.cuh>

namespace at::native::attn_sweep {

enum class Sweep { kForward, kRows, kColumns };

// Says what of attn is in memory.
enum class Stored { kNothing, kAttn, kAttnAndGradient };

// When the scores of the next tile are issued. kLate: before this tile's
// products, whose end they hide, so that the elementwise work of a tile runs
// under the products of the last one. kEager: after them, so that it runs under
// this tile's own.
enum class Order { kEager, kLate };

// What a kernel is compiled for. `width` is that of q, k, v and G: 64 or 128,
// `tile` the rows of a tile of Y, `groups` the consumer warpgroups. If
// `resident`, X is read from registers, and not from shared memory.
template <
    typename scalar_t,
    Sweep sweep,
    Stored stored,
    int width,
    int tile,
    int stages,
    int groups,
    Order order,
    bool resident>
struct Plan {
  using T = scalar_t;
  static constexpr Sweep kSweep = sweep;
  static constexpr Stored kStored = stored;
  static constexpr int kWidth = width, kTile = tile, kStages = stages;
  static constexpr int kGroups = groups, kRows = 64 * groups;
  static constexpr int kThreads = 128 * (groups + 1);
  static constexpr bool kLate = order == Order::kLate, kResident = resident;
  static constexpr bool kValues = sweep != Sweep::kRows;
  static constexpr bool kGradients = sweep != Sweep::kForward;
  static constexpr bool kWritesAttn = stored != Stored::kNothing && !kGradients;
  static constexpr bool kReadsAttn = stored != Stored::kNothing && kGradients;
  static constexpr int kStreams = // attn, and its gradient
      !kReadsAttn               ? 0
      : stored == Stored::kAttn ? 1
                                : 2;
  static constexpr int kOperands = kGradients && !kReadsAttn ? 2 : 1; // of X
  // Floats of a thread's share of S, and of a result.
  static constexpr int kScores = tile / 2, kResults = width / 2;
  // There are too few registers for P and D of a tile and the next one's
  // scores.
  static constexpr bool kTight =
      sweep == Sweep::kColumns && width == 128 && !kReadsAttn;
  // There are enough to pack a tile while products still read the last one.
  static constexpr bool kDouble =
      kLate &&
      (kReadsAttn ? !kValues : width + tile < (kWritesAttn ? 192 : 256));
  // Elements of attn in shared memory: those of the ring, or of two tiles for
  // each consumer that are on their way out.
  static constexpr int kAttnSize = kReadsAttn
                                       ? stages * kStreams * kRows * tile
                                       : (kWritesAttn ? 2 * kRows * tile : 1);
  // Together these are what a block's threads get when it starts.
  static constexpr int kProducerRegisters = groups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = groups == 2 ? 240 : 160;

  static_assert((width == 64 || width == 128) && (tile == 64 || tile == 128));
  static_assert(groups == 2 || groups == 3);
  // With fewer stages the producer and the consumers wait for each other.
  static_assert(
      stages >= (kLate && kGradients && (kValues || !kReadsAttn) ? 3 : 2));
  static_assert(kDouble || !kLate || kReadsAttn || kWritesAttn);
  static_assert(kLate ? !kTight : !kReadsAttn);
};

template <class P>
struct Shared {
  alignas(1024) typename P::T x[P::kOperands][P::kRows * P::kWidth];
  alignas(1024) typename P::T y[P::kStages][2][P::kTile * P::kWidth];
  alignas(1024) typename P::T attn[P::kAttnSize];
  // mbarriers: the tile has come; all warps have read it. What is read of attn
  // comes and goes with Y0.
  uint64_t x_full, x_empty, y_full[P::kStages][2], y_empty[P::kStages][2];
};

constexpr int kBatchDims = 3;

// Samples of X go by kBatchDims numbers, the last of which runs fastest. For
// each there are `shares` samples of Y, whose numbers are added to X's.
template <typename T>
struct Args {
  CUtensorMap x[2], y[2];
  CUtensorMap attn[2]; // P, H
  // Whether a matrix has that batch dimension. Otherwise its samples share it.
  bool x_has[2][kBatchDims], y_has[2][kBatchDims], attn_has[2][kBatchDims];
  int x_sizes[kBatchDims], share_sizes[kBatchDims];
  int samples, shares; // the products of these sizes
  int x_rows, y_rows;
  int values_width, gradients_width;
  T *values, *gradients; // contiguous; null if it is not wanted
  float scale;
  bool is_causal;
};

// ---- addresses --------------------------------------------------------------

// Returns the byte of an element of a tile: the 16-byte chunk c of row r lies
// at chunk c ^ (r % 8).
__host__ __device__ constexpr int swizzled(int row, int column) {
  return row * 128 + ((column / 8 ^ row % 8) * 16) + column % 8 * 2;
}

// wgmma's descriptor of a swizzled matrix: bits 0 to 13 are the address / 16,
// 16 to 29 the leading offset / 16, 32 to 45 the stride offset / 16, 62 and 63
// the swizzle (1: 128 bytes). The stride offset is that of 8 rows of 128 bytes.
// The leading offset is that of the next 64 columns, if columns are M or N.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, int leading) {
  const uint32_t low =
      (address & 0x3FFFF) >> 4 | static_cast<uint32_t>(leading >> 4) << 16;
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | low;
}

// Loads kRows rows of a sample, kWidth wide. `full` is told of the bytes. If
// kOnce, nobody reads them again.
template <int kWidth, int kRows, bool kOnce = false, typename T>
__device__ __forceinline__ void load(
    T* to,
    const CUtensorMap* map,
    int column,
    int row,
    const int (&sample)[kBatchDims],
    const bool (&has)[kBatchDims],
    uint64_t* full) {
#pragma unroll
  for (int tile = 0; tile < kWidth / 64; ++tile) {
    load_box<kOnce>(
        address(to + tile * kRows * 64),
        map,
        {column + tile * 64,
         row,
         has[2] ? sample[2] : 0,
         has[1] ? sample[1] : 0,
         has[0] ? sample[0] : 0},
        full);
  }
}

// s (64 x kTile) = X Yᵀ over kWidth columns; x: 64 rows of tiles of kRows.
template <class P>
__device__ __forceinline__ void score(
    float (&s)[P::kScores], uint32_t x, uint32_t y) {
  constexpr typename P::T type{};
  multiply<false>(type, s, descriptor(x, 16), descriptor(y, 16));
#pragma unroll
  for (int k = 1; k < P::kWidth / 16; ++k) { // 16 columns are 32 bytes of a row
    multiply<true>(
        type,
        s,
        descriptor(x + k / 4 * P::kRows * 128 + k % 4 * 32, 16),
        descriptor(y + k / 4 * P::kTile * 128 + k % 4 * 32, 16));
  }
}

// The same with X as A fragments: 4 registers for 16 columns.
template <class P>
__device__ __forceinline__ void score(
    float (&s)[P::kScores], const uint32_t (&x)[P::kWidth / 4], uint32_t y) {
  constexpr typename P::T type{};
  multiply<false, false>(type, s, x, descriptor(y, 16));
#pragma unroll
  for (int k = 1; k < P::kWidth / 16; ++k) {
    multiply<true, false>(
        type,
        s,
        x + 4 * k,
        descriptor(y + k / 4 * P::kTile * 128 + k % 4 * 32, 16));
  }
}

// c (64 x kWidth) += A Y; A's fragments are 4 registers for 16 rows of Y.
template <class P>
__device__ __forceinline__ void accumulate(
    float (&c)[P::kResults], const uint32_t (&a)[P::kTile / 4], uint32_t y) {
#pragma unroll
  for (int k = 0; k < P::kTile / 16; ++k) {
    multiply<true, true>(
        typename P::T{},
        c,
        a + 4 * k,
        descriptor(y + k * 16 * 128, P::kTile * 128));
  }
}

// Returns where this lane's row of the A fragment of columns 16 k to 16 k + 15
// lies in a tile of kRows rows; `row` is the warp's first.
template <int kRows>
__device__ __forceinline__ int of_fragment(int row, int k) {
  const int lane = threadIdx.x % 32;
  return k / 4 * kRows * 128 +
         swizzled(row + lane % 16, k % 4 * 16 + lane / 16 * 8);
}

// The same if the tile is stored transposed, so that its rows are columns of
// the fragment, and its columns, from `column`, rows.
__device__ __forceinline__ int of_transposed(int column, int k) {
  const int lane = threadIdx.x % 32;
  return swizzled(k * 16 + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8);
}

// The A fragments of 64 rows of X.
template <class P>
__device__ __forceinline__ void read(uint32_t (&a)[P::kWidth / 4], uint32_t x) {
#pragma unroll
  for (int k = 0; k < P::kWidth / 16; ++k) {
    const int row = threadIdx.x / 32 % 4 * 16;
    read<false>(a + 4 * k, x + of_fragment<P::kRows>(row, k));
  }
}

// ---- elementwise ------------------------------------------------------------

// In a thread's share of a 64 x N accumulator, register 4 j + 2 h + e is row
// 16 warp + lane / 4 + 8 h and column 8 j + 2 (lane % 4) + e. Packed in pairs,
// registers 8 k to 8 k + 7 are the A fragment of columns 16 k to 16 k + 15.

// tanh(x), for a result that is rounded to T. For bfloat16 it is an instruction
// whose relative error is 2^-11. For half it is x p(x²) / q(x²), or 1 where
// that is as near, with an error of 2^-14.6: see ATen/native/cpu/AttnTanh.h.
template <typename T>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    const float u = x * x;
    const float p = fmaf(fmaf(u, 26.0717049f, 1908.06311f), u, 16466.6973f);
    const float q = fmaf(fmaf(u + 296.548828f, u, 7396.62695f), u, 16466.6973f);
    return fabsf(x) >= 5.5f ? copysignf(1, x) : __fdividef(x * p, q);
  } else {
    return tanh_approx(x);
  }
}

// ---- work -------------------------------------------------------------------

// Rows [row, row + kRows) of a sample of X against tiles [begin, end) of each
// of its samples of Y.
struct Work {
  int sample, row, begin, end;
};

// Finds the round-th piece of this block. Causal ones go from the longest to
// the shortest, dealt out to and fro. Returns false if there is none.
template <class P>
__device__ __forceinline__ bool find(
    const Args<typename P::T>& args, int round, Work& work) {
  constexpr bool kColumns = P::kSweep == Sweep::kColumns;
  const int blocks = (args.x_rows + P::kRows - 1) / P::kRows;
  const int grid = gridDim.x, own = blockIdx.x;
  const int index = round * grid + (round & 1 ? grid - 1 - own : own);
  if (index >= blocks * args.samples) {
    return false;
  }
  int block = index % blocks;
  work.sample = index / blocks;
  if (args.is_causal) {
    work.sample = index % args.samples;
    block = index / args.samples;
    block = kColumns ? block : blocks - 1 - block;
  }
  work.row = block * P::kRows;
  work.begin = 0;
  work.end = (args.y_rows + P::kTile - 1) / P::kTile;
  if (args.is_causal && kColumns) {
    work.begin = min(work.row / P::kTile, work.end);
  } else if (args.is_causal) {
    work.end = min((work.row + P::kRows - 1) / P::kTile + 1, work.end);
  }
  return true;
}

// Adds the numbers of a sample, given its place among samples of these sizes.
// Where attn is read there is one number: there are few registers for more.
template <class P>
__device__ __forceinline__ void add_numbers(
    int (&numbers)[kBatchDims], int place, const int (&sizes)[kBatchDims]) {
  if constexpr (P::kReadsAttn) {
    numbers[kBatchDims - 1] += place;
  } else {
#pragma unroll
    for (int i = kBatchDims - 1; i >= 0; --i) {
      numbers[i] += place % sizes[i];
      place /= sizes[i];
    }
  }
}

// A tile of attn in a stage of the ring, or of its gradient.
template <class P>
__device__ __forceinline__ typename P::T* attn_tile(
    Shared<P>& shared, int stage, int stream) {
  return shared.attn + (stage * P::kStreams + stream) * P::kRows * P::kTile;
}

// ---- producer: one thread ---------------------------------------------------

template <class P>
__device__ __forceinline__ void produce(
    const Args<typename P::T>& args, Shared<P>& shared) {
  constexpr bool kColumns = P::kSweep == Sweep::kColumns;
  constexpr bool kShares = kColumns && !P::kReadsAttn; // attn's don't
  const int shares = kShares ? args.shares : 1;
  // Finds a piece of work again: there are few registers to keep it in.
  const auto again = [&](int round) {
    hide(round);
    Work work;
    find<P>(args, round, work);
    return work;
  };
  Work work;
  unsigned slot = 0, fills = 0;
  for (int round = 0; find<P>(args, round, work); ++round) {
    // X is free once the last work's scores are done. Until then the ring runs
    // ahead for so many tiles.
    int ahead =
        fills ? min((work.end - work.begin) * shares, P::kStages) - 1 : 0;
    for (int share = 0; share < shares; ++share) {
      work = again(round);
      int sample[kBatchDims] = {};
      add_numbers<P>(sample, work.sample, args.x_sizes);
      if (kShares) {
        add_numbers<P>(sample, share, args.share_sizes);
      }
      for (int tile = work.begin; tile < work.end; ++tile, ++slot, --ahead) {
        if (ahead == 0) {
          wait(&shared.x_empty, ~fills & 1);
          int x_sample[kBatchDims] = {};
          const Work x_work = again(round);
          add_numbers<P>(x_sample, x_work.sample, args.x_sizes);
#pragma unroll
          for (int i = 0; i < P::kOperands; ++i) {
            expect(&shared.x_full, P::kRows * P::kWidth * 2);
            load<P::kWidth, P::kRows>(
                shared.x[i],
                &args.x[i],
                0,
                x_work.row,
                x_sample,
                args.x_has[i],
                &shared.x_full);
          }
          ++fills;
        }
        const int stage = slot % P::kStages;
        const int row = tile * P::kTile;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int i = P::kReadsAttn ? 1 - j : j; // first what scores read
          uint64_t* full = &shared.y_full[stage][i];
          wait(&shared.y_empty[stage][i], ~(slot / P::kStages) & 1);
          constexpr int kAttn = P::kStreams * P::kRows * P::kTile;
          expect(full, 2 * (P::kTile * P::kWidth + (i ? 0 : kAttn)));
          load<P::kWidth, P::kTile>(
              shared.y[stage][i],
              &args.y[i],
              0,
              row,
              sample,
              args.y_has[i],
              full);
          if (i == 0) {
#pragma unroll
            for (int stream = 0; stream < P::kStreams; ++stream) {
              const int x_row = again(round).row;
              load<
                  kColumns ? P::kRows : P::kTile,
                  kColumns ? P::kTile : P::kRows,
                  true>(
                  attn_tile<P>(shared, stage, stream),
                  &args.attn[stream],
                  kColumns ? x_row : row,
                  kColumns ? row : x_row,
                  sample,
                  args.attn_has[stream],
                  full);
            }
          }
        }
      }
    }
  }
}

// ---- consumer: a warpgroup, 64 rows of X ------------------------------------

// P and D as A fragments.
template <class P>
struct Fragments {
  uint32_t p[P::kValues ? P::kScores / 2 : 1];
  uint32_t d[P::kGradients ? P::kScores / 2 : 1];
};

// Zeroes what is beyond the end of Y and, if causal, of a key after its query,
// whatever it holds: S = T = 0 make P = D = 0.
template <class P>
__device__ __forceinline__ void mask(
    const Args<typename P::T>& args, float (&c)[P::kScores], int x, int y) {
#pragma unroll
  for (int i = 0; i < P::kScores; ++i) {
    const int row = x + i / 2 % 2 * 8, column = y + i / 4 * 8 + i % 2;
    const bool late =
        P::kSweep == Sweep::kColumns ? column < row : column > row;
    c[i] = column >= args.y_rows || (args.is_causal && late) ? 0 : c[i];
  }
}

// Writes factor c: rows `row` and row + 8 of a sample.
template <class P>
__device__ __forceinline__ void store(
    typename P::T* to,
    const float (&c)[P::kResults],
    float factor,
    const Args<typename P::T>& args,
    int width,
    int sample,
    int row) {
  if (to == nullptr) {
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h, row += 8) {
    if (row >= args.x_rows) {
      continue;
    }
    auto* line = to + (int64_t{sample} * args.x_rows + row) * width;
#pragma unroll
    for (int j = 0; j < P::kResults / 4; ++j) {
      if (8 * j < width) { // a multiple of 8
        *reinterpret_cast<uint32_t*>(line + 8 * j + threadIdx.x % 4 * 2) =
            pack<typename P::T>(
                c[4 * j + 2 * h] * factor, c[4 * j + 2 * h + 1] * factor);
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void consume(
    const Args<typename P::T>& args, Shared<P>& shared, int group) {
  using T = typename P::T;
  constexpr bool kEager = !P::kLate;
  // Groups of wgmma for a tile: of scores, of products.
  constexpr int kScoreGroups = P::kOperands;
  constexpr int kProductGroups = P::kValues + P::kGradients;
  constexpr int kX = P::kRows * P::kWidth * 2; // bytes
  constexpr int kY = P::kTile * P::kWidth * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t x = address(shared.x) + group * 64 * 128;
  const uint32_t y = address(shared.y);
  const float scale = args.scale;

  float values[P::kValues ? P::kResults : 1];
  float gradients[P::kGradients ? P::kResults : 1];
  float s[P::kReadsAttn ? 1 : P::kScores];
  float t[P::kGradients ? P::kScores : 1];
  Fragments<P> fragments[P::kDouble ? 2 : 1];
  uint32_t resident[P::kOperands][P::kWidth / 4];
  Work work;
  unsigned slot = 0, fills = 0; // of the tile in hand; of X
  int column = 0;               // where that tile begins in Y

  const auto stage = [](unsigned slot) { return slot % P::kStages; };
  const auto tile = [&](unsigned slot, int i) {
    return y + (stage(slot) * 2 + i) * kY;
  };
  const auto await = [&](unsigned slot, int i) {
    wait(&shared.y_full[stage(slot)][i], slot / P::kStages & 1);
  };
  const auto await_scores = [&](unsigned slot) {
    if (!P::kReadsAttn) {
      await(slot, 0);
    }
    if (P::kGradients) {
      await(slot, 1);
    }
  };
  const auto release = [&](uint64_t* barrier) {
    if (lane == 0) {
      arrive(barrier);
    }
  };
  // Those tiles that products read. Scores alone read the others.
  const auto release_products = [&](unsigned slot) {
    if (P::kGradients) {
      release(&shared.y_empty[stage(slot)][0]);
    }
    if (P::kValues) {
      release(&shared.y_empty[stage(slot)][1]);
    }
  };
  const auto issue_scores = [&](unsigned slot) {
    const auto issue = [&](float (&c)[P::kScores], int i, int operand) {
      wgmma_fence();
      if constexpr (P::kResident) {
        score<P>(c, resident[operand], tile(slot, i));
      } else {
        score<P>(c, x + operand * kX, tile(slot, i));
      }
      wgmma_commit();
    };
    if constexpr (!P::kReadsAttn) {
      issue(s, 0, 0);
    }
    if constexpr (P::kGradients) {
      issue(t, 1, P::kOperands - 1);
    }
  };
  const auto issue_values = [&](unsigned slot, const Fragments<P>& f) {
    if constexpr (P::kValues) {
      wgmma_fence();
      accumulate<P>(values, f.p, tile(slot, 1));
      wgmma_commit();
    }
  };
  const auto issue_gradients = [&](unsigned slot, const Fragments<P>& f) {
    if constexpr (P::kGradients) {
      wgmma_fence();
      accumulate<P>(gradients, f.d, tile(slot, 0));
      wgmma_commit();
    }
  };

  // Reads the A fragment of columns 16 k to 16 k + 15 of P, or of H.
  const auto read_attn = [&](uint32_t (&a)[4], int stream, int k) {
    const uint32_t from = address(attn_tile<P>(shared, stage(slot), stream));
    if constexpr (P::kSweep == Sweep::kColumns) {
      const int place = of_transposed(16 * warp, k);
      read<true>(a, from + group * P::kTile * 128 + place);
    } else {
      read<false>(a, from + of_fragment<P::kRows>(64 * group + 16 * warp, k));
    }
  };
  // t = (t [+ H]) ∘ (1 - P²), and p = P if it is not null.
  const auto differentiate = [&](float (&t)[P::kScores], uint32_t* p) {
#pragma unroll
    for (int k = 0; k < P::kTile / 16; ++k) {
      uint32_t a[4], h[4];
      read_attn(a, 0, k);
      if constexpr (P::kStreams == 2) {
        read_attn(h, 1, k);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& c = t[8 * k + i];
        if constexpr (P::kStreams == 2) {
          c += unpack<T>(h[i / 2], i % 2);
        }
        const float attn = unpack<T>(a[i / 2], i % 2);
        c *= fmaf(-attn, attn, 1);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (p != nullptr) {
          p[4 * k + i] = a[i];
        }
      }
    }
  };
  // The tile of attn that this warp is writing: 16 rows.
  const auto outgoing = [&] {
    return address(shared.attn) +
           ((group * 2 + slot % 2) * 4 + warp) * (16 * P::kTile * 2);
  };
  const auto write_attn = [&](const uint32_t* p) {
#pragma unroll
    for (int k = 0; k < P::kTile / 16; ++k) {
      write(outgoing() + of_fragment<16>(0, k), p + 4 * k);
    }
  };
  // Copies that tile to memory, where its first row is `row`.
  const auto store_attn = [&](int row) {
    show_writes();
    warp_wait();
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < P::kTile / 64; ++i) {
        if (row < args.x_rows && column + 64 * i < args.y_rows) {
          store_box(
              outgoing() + i * 16 * 128,
              &args.attn[0],
              {column + 64 * i, row, work.sample, 0, 0});
        }
      }
      store_commit();
    }
  };
  const auto pack_into = [&](uint32_t* to, const float (&c)[P::kScores]) {
#pragma unroll
    for (int i = 0; i < P::kScores / 2; ++i) {
      to[i] = pack<T>(c[2 * i], c[2 * i + 1]);
    }
  };

  for (int round = 0; find<P>(args, round, work); ++round) {
#pragma unroll
    for (float& c : values) {
      c = 0;
    }
#pragma unroll
    for (float& c : gradients) {
      c = 0;
    }
    pin(values);
    pin(gradients);
    const int count = (work.end - work.begin) * args.shares;
    const int corner = work.row + 64 * group;
    const int row = corner + 16 * warp + lane / 4;
    column = work.begin * P::kTile;

    // Makes what the tile in hand adds. `is_first` and `is_last` are those of
    // this piece of work.
    const auto step = [&](bool is_first, auto is_last, Fragments<P>& f) {
      constexpr bool kLast = is_last.value;
      // Groups of wgmma that are unfinished, the oldest first:
      //   eager: the last tile's products, S, T
      //   late: S, T, the last tile's products
      constexpr int kBefore = kEager ? 0 : kProductGroups;
      // P and D must not go to f while products may still read it.
      [[maybe_unused]] Fragments<P> apart;
      auto& made = kEager || P::kDouble ? f : apart;
      const bool is_edge =
          column + P::kTile > args.y_rows ||
          (args.is_causal &&
           (P::kSweep == Sweep::kColumns ? column < corner + 63
                                         : column + P::kTile - 1 > corner));
      const auto mask_edge = [&](float (&c)[P::kScores]) {
        if (is_edge) {
          mask<P>(args, c, row, column + lane % 4 * 2);
        }
      };
      if constexpr (P::kWritesAttn) { // the tile of two steps ago has gone
        if (lane == 0) {
          store_wait<1>();
        }
        warp_wait();
      }
      wgmma_wait<kScoreGroups - 1 + kBefore>();
      if constexpr (P::kReadsAttn) {
        pin(t);
      } else {
        pin(s);
      }
      if (!P::kGradients) {
        release(&shared.y_empty[stage(slot)][0]);
      }
      if (kEager && !P::kTight && !is_first) {
        release_products(slot - 1);
      }
      if constexpr (P::kReadsAttn) {
        if (!P::kValues) {
          release(&shared.y_empty[stage(slot)][1]);
        }
        await(slot, 0);
        mask_edge(t);
        differentiate(t, P::kValues ? made.p : nullptr);
      } else {
        mask_edge(s);
#pragma unroll
        for (float& c : s) {
          c = tanh_of<T>(c * scale);
        }
      }
      if constexpr (P::kValues && !P::kReadsAttn) {
        pack_into(made.p, s);
      }
      if constexpr (P::kWritesAttn) {
        write_attn(made.p);
      }
      if constexpr (kEager) {
        if constexpr (!P::kGradients) {
          await(slot, 1);
        }
        issue_values(slot, f);
      }
      if constexpr (P::kGradients && !P::kReadsAttn) {
        await(slot, 1); // long ago: a branch, as below
        wgmma_wait<kEager ? P::kValues : kBefore>();
        pin(t);
        if (!P::kValues) {
          release(&shared.y_empty[stage(slot)][1]);
        }
        mask_edge(t);
#pragma unroll
        for (int i = 0; i < P::kScores; ++i) {
          t[i] *= fmaf(-s[i], s[i], 1);
        }
      }
      if constexpr (P::kGradients) {
        pack_into(made.d, t);
      }
      if constexpr (kLast && !P::kResident) {
        release(&shared.x_empty);
      }
      // Branches here keep ptxas from moving the elementwise work beyond the
      // next wait, and out from under the products.
      if constexpr (!kEager) {
        await(slot, P::kValues); // not the tile that was released above
      }
      if constexpr (!kLast && !P::kTight) {
        await_scores(slot + 1);
      }
      if constexpr (!kEager) {
        wgmma_wait<0>();
        if (!is_first) {
          release_products(slot - 1);
        }
        if constexpr (!P::kDouble) {
          f = apart;
        }
        if constexpr (!kLast) {
          issue_scores(slot + 1);
        }
        issue_values(slot, f);
      }
      issue_gradients(slot, f);
      if constexpr (P::kTight && !kLast) {
        await_scores(slot + 1);
        wgmma_wait<0>();
        release_products(slot);
      }
      if constexpr (kEager && !kLast) {
        issue_scores(slot + 1);
      }
      if constexpr (P::kWritesAttn) {
        store_attn(corner + 16 * warp);
      }
      ++slot;
      column += P::kTile;
      if (P::kSweep == Sweep::kColumns && column >= work.end * P::kTile) {
        column = work.begin * P::kTile; // of the next sample
      }
    };

    if (count > 0) {
      wait(&shared.x_full, fills++ & 1);
      if constexpr (P::kResident) {
#pragma unroll
        for (int i = 0; i < P::kOperands; ++i) {
          read<P>(resident[i], x + i * kX);
        }
      }
      await_scores(slot);
      issue_scores(slot);
      if constexpr (P::kResident) {
        release(&shared.x_empty); // the products above have their registers
      }
      if constexpr (!kEager) {
#pragma unroll
        for (int i = 0; i < kProductGroups; ++i) {
          wgmma_commit(); // empty: of a tile before the first
        }
      }
      int i = 0;
      if constexpr (P::kDouble) {
        for (; i + 2 < count; i += 2) {
          step(i == 0, std::false_type{}, fragments[0]);
          step(false, std::false_type{}, fragments[1]);
        }
        if (i + 1 < count) {
          step(i == 0, std::false_type{}, fragments[0]);
          step(false, std::true_type{}, fragments[1]);
        } else {
          step(i == 0, std::true_type{}, fragments[0]);
        }
      } else {
        for (; i + 1 < count; ++i) {
          step(i == 0, std::false_type{}, fragments[0]);
        }
        step(i == 0, std::true_type{}, fragments[0]);
      }
      wgmma_wait<0>();
      release_products(slot - 1);
    }
    if constexpr (P::kWritesAttn) {
      store_wait<0>(); // here, and not at the end, where it costs registers
    }
    pin(values);
    pin(gradients);
    if constexpr (P::kValues) {
      store<P>(
          args.values, values, 1, args, args.values_width, work.sample, row);
    }
    if constexpr (P::kGradients) {
      store<P>(
          args.gradients,
          gradients,
          scale,
          args,
          args.gradients_width,
          work.sample,
          row);
    }
  }
}

// ---- kernel -----------------------------------------------------------------

// On other architectures it has no body, and is not launched.
template <class P>
__global__ void __launch_bounds__(P::kThreads, 1)
    attn_sweep(const __grid_constant__ Args<typename P::T> args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  Shared<P>& shared =
      *reinterpret_cast<Shared<P>*>(memory + (-address(memory) & 1023));
  if (threadIdx.x == 0) {
    init(&shared.x_full, P::kOperands);
    init(&shared.x_empty, 4 * P::kGroups); // an arrival a warp
    for (int i = 0; i < 2 * P::kStages; ++i) {
      init(&shared.y_full[i / 2][i % 2], 1);
      init(&shared.y_empty[i / 2][i % 2], 4 * P::kGroups);
    }
    show_barriers();
  }
  __syncthreads();
  const int group = of_warp(threadIdx.x / 128);
  if (group == 0) {
    give_registers<P::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<P>(args, shared);
    }
  } else {
    take_registers<P::kConsumerRegisters>();
    consume<P>(args, shared, group - 1);
  }
#endif
}

// ---- plans ------------------------------------------------------------------

// The plans, by what is swept and the width. An H200 measured a program with
// those that store nothing: of 16 heads in bfloat16, m = n = 4096, the forward
// takes 141 us and 193 us (488 and 713 TFLOPS), the backward 422 us and 699 us
// (408 and 492). The backward's figure at 128 is of a kRows whose groups took
// turns, which these do not. The first plan is that of attn's backward.
template <typename T, Sweep sweep, int width, Stored stored = Stored::kNothing>
struct PlanOf {
  static constexpr int kStages = width == 64 ? 4 : 3;
  using type =
      Plan<T, sweep, stored, width, 64, kStages, 2, Order::kLate, width == 64>;
};
#define ATTN_PLAN(SWEEP, STORED, WIDTH, ...)                                \
  template <typename T>                                                     \
  struct PlanOf<T, Sweep::SWEEP, WIDTH, Stored::STORED> {                   \
    using type = Plan<T, Sweep::SWEEP, Stored::STORED, WIDTH, __VA_ARGS__>; \
  };
ATTN_PLAN(kForward, kNothing, 64, 128, 4, 2, Order::kLate, false)
ATTN_PLAN(kForward, kNothing, 128, 128, 2, 2, Order::kEager, true)
ATTN_PLAN(kRows, kNothing, 64, 128, 3, 2, Order::kEager, false)
ATTN_PLAN(kRows, kNothing, 128, 64, 3, 2, Order::kLate, false)
ATTN_PLAN(kColumns, kNothing, 64, 64, 4, 2, Order::kEager, true)
ATTN_PLAN(kColumns, kNothing, 128, 64, 2, 2, Order::kEager, false)
ATTN_PLAN(kForward, kAttn, 64, 128, 4, 2, Order::kLate, false)
ATTN_PLAN(kForward, kAttn, 128, 128, 2, 2, Order::kEager, true)
#undef ATTN_PLAN
// For a forward of this many keys: 585 TFLOPS at n = 16384, and not 529.
template <typename T>
using LongForward = Plan<
    T,
    Sweep::kForward,
    Stored::kNothing,
    64,
    128,
    4,
    3,
    Order::kEager,
    false>;

} // namespace at::native::attn_sweep
