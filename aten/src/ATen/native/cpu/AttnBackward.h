#pragma once

#include <ATen/native/cpu/AttnBackwardArgs.h>
#include <ATen/native/cpu/AttnForward.h>

#include <array>
#include <tuple>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// A gradient, as blocks of rows. Each block is a sum over some tiles.
template <typename S, typename Tiles>
class GradBlocks {
  using T = typename Tiles::T;
  static constexpr bool has_totals = !std::is_same_v<T, S>;

 public:
  // The tiles that add to one block are `stride` tasks apart. Without slots,
  // one thread computes all of a block.
  GradBlocks(
      int64_t blocks,
      int64_t addends,
      int64_t stride,
      int64_t block_size,
      int64_t slots,
      const Runtime& runtime,
      Progress& progress)
      : addends_(addends),
        is_shared_(addends > 1 && slots > 0),
        totals_(has_totals && addends > 1 ? blocks : 0, block_size, runtime),
        sums_(
            is_shared_ ? blocks : 0,
            addends,
            stride,
            is_shared_ ? slots : 0,
            block_size,
            runtime,
            progress) {}

  // Adds a tile's product to a block. multiply(accumulate, dst) writes the
  // product to dst, or adds it. A tile for which is_zero(turn) adds nothing.
  template <typename F, typename Z>
  void add(
      int64_t task,
      int64_t index,
      int64_t turn,
      const Matrix<S>& block,
      const F& multiply,
      const Z& is_zero) {
    const auto size = block.rows * block.cols;
    if (addends_ == 1) {
      multiply(false, block.data);
      return;
    }
    T* total = total_of(block, index);
    const auto finish_last = [&](int64_t added) {
      if (has_totals && added == addends_ - 1) {
        convert(block.data, total, block.rows * block.cols);
      }
    };
    if (!is_shared_) {
      if (!is_zero(turn)) {
        multiply(turn > 0, total);
      } else if (turn == 0) {
        std::fill_n(total, size, T(0));
      }
      finish_last(turn);
      return;
    }
    T* slot = sums_.slot(task);
    if (!is_zero(turn)) {
      multiply(false, slot);
    } else if (turn == 0) {
      std::fill_n(slot, size, T(0));
    }
    sums_.hand_in(task, index, turn, [&](int64_t next, const T* addend) {
      if (next == 0 || !is_zero(next)) {
        add_sum(next > 0, total, addend, size);
      }
      finish_last(next);
    });
  }

 private:
  T* total_of(const Matrix<S>& block, [[maybe_unused]] int64_t index) const {
    if constexpr (has_totals) {
      return totals_[index];
    } else {
      return block.data;
    }
  }

  int64_t addends_;
  bool is_shared_;
  Scratch<T> totals_;
  OrderedSums<T> sums_;
};

// The tiles of the backward are as large as allowed, but there are at least
// TILES, so that threads can share them: half and twice as many take as long
// (Zen 5, two threads). They depend only on the sizes of one sample, and so
// does the order of sums.
template <typename Tiles>
struct Grid {
  static constexpr int64_t TILES = 36, MAX_ROWS = 192;

  int64_t rows, cols, row_blocks, col_blocks;

  explicit Grid(const Sizes& sizes) {
    const auto [batch, m, n, d, e] = sizes;
    // Tiles of few rows or columns are longer, so that each has enough work for
    // a task. Without, 1 x 100,000 or 50,000 x 2 takes 8% longer (Zen 5).
    constexpr int64_t FEW = 8, WIDTH = 64;
    const auto longer =
        std::clamp<int64_t>(WIDTH / (d + e + 1), 1, Tiles::LONGEST);
    const auto max_rows = MAX_ROWS * (n <= FEW ? longer : 1);
    const auto max_cols = NC * (m <= FEW ? longer : 1);

    const auto wanted_cols = at::ceil_div<int64_t>(n, 6);
    cols = std::min(max_cols, at::round_up(wanted_cols, Tiles::MIN_TILE));
    col_blocks = at::ceil_div(n, cols);
    const auto wanted_blocks =
        std::max(at::ceil_div(TILES, col_blocks), at::ceil_div(m, max_rows));
    const auto wanted_rows = at::ceil_div(m, wanted_blocks);
    rows = at::round_up(
        std::max(wanted_rows, std::min(m, Tiles::MIN_TILE)), Tiles::ROW_STEP);
    row_blocks = at::ceil_div(m, rows);
  }
};

// Computes the gradients of args.gradients(). With S̄ = scale (grad_output vᵀ +
// grad_attn) (1 - attn²), or 0 where attn is masked, these are
//   grad_q = S̄ k, grad_k = S̄ᵀ q, grad_v = attnᵀ grad_output
template <typename S, typename Tiles, typename Args = BackwardArgs<S>>
void backward_by(const Args& args, const Runtime& runtime) {
  using T = typename Tiles::T;
  const auto [batch, m, n, d, e] = args.sizes;
  const Grid<Tiles> grid(args.sizes);
  const auto tiles = grid.row_blocks * grid.col_blocks;
  const auto rows = std::min(grid.rows, m), cols = std::min(grid.cols, n);
  const auto group = args.group;
  const auto groups = batch / group;

  // A gradient is divided into `count` blocks of at most `size` elements. Each
  // is a sum over tiles that are `stride` tasks apart.
  const auto gradients = args.gradients();
  struct Blocks {
    int64_t count, addends, stride, size;
  };
  const auto blocks_of = [&](const Gradient<S>& x) -> Blocks {
    if (!x.grad) {
      return {0, 1, 1, 0};
    }
    const auto width = x.grad[0].cols;
    if (x.of_rows) {
      return {grid.row_blocks, grid.col_blocks, 1, rows * width};
    }
    const auto addends = group * grid.row_blocks;
    return {grid.col_blocks, addends, grid.col_blocks, cols * width};
  };

  // Groups of samples are processed some at a time, which bounds the memory of
  // sums and of totals in T. If each group is one thread's, there is one set a
  // thread.
  constexpr int64_t MAX_TOTALS = 1 << 22, MAX_SUMS = 1 << 15;
  constexpr bool has_totals = !std::is_same_v<T, S>;
  int64_t sums = 0, totals = 0, largest = 0;
  for (const auto& x : gradients) {
    const auto blocks = blocks_of(x);
    const auto of_group = (x.of_rows ? group : 1) * blocks.count;
    sums += blocks.addends > 1 ? of_group : 0;
    totals += has_totals && blocks.addends > 1 ? of_group * blocks.size : 0;
    largest = std::max(largest, blocks.size);
  }
  const auto threads = runtime.threads(2 * args.sizes.work());
  constexpr int64_t GROUPS = 8;
  const bool by_groups = threads == 1 || groups >= GROUPS * threads;
  const auto groups_at_once =
      by_groups ? groups
                : std::clamp<int64_t>(
                      std::min(
                          MAX_TOTALS / std::max<int64_t>(totals, 1),
                          MAX_SUMS / std::max<int64_t>(sums, 1)),
                      1,
                      groups);
  const auto samples = groups_at_once * group;
  const auto step = by_groups
                        ? group * tiles * tasks_at_once(groups, threads)
                        : tasks_at_once(samples * tiles, threads, largest);
  const typename Tiles::Layout layout(args, grid.rows, cols);
  const Scratch<T> scratch(threads, layout.size, runtime);
  Progress progress;

  for (int64_t begin = 0; begin < batch && !progress.failed();
       begin += samples) {
    const auto count = std::min(samples, batch - begin);
    const auto make_sums = [&](const Gradient<S>& x) {
      const auto [blocks, addends, stride, size] = blocks_of(x);
      const auto places =
          by_groups ? threads : (x.of_rows ? count : count / group);
      return GradBlocks<S, Tiles>(
          places * blocks,
          addends,
          stride,
          size,
          size > 0 && !by_groups ? slots_for(size, threads, step) : 0,
          runtime,
          progress);
    };
    auto all_sums = std::apply(
        [&](const auto&... x) {
          return std::array<GradBlocks<S, Tiles>, sizeof...(x)>{
              make_sums(x)...};
        },
        gradients);
    run_in_order(
        runtime,
        count * tiles,
        step,
        threads,
        progress,
        [&, m = m, n = n](int64_t task, int64_t thread) {
          const auto [sample, tile] = divide(task, tiles);
          const auto [row_block, col_block] = divide(tile, grid.col_blocks);
          const auto b = begin + sample;
          const auto [in_group, member] = divide(sample, group);
          const auto i = row_block * grid.rows;
          const auto j = col_block * grid.cols;
          const auto tile_rows = std::min(grid.rows, m - i);
          const auto tile_cols = std::min(grid.cols, n - j);

          // Returns whether all of a tile is masked.
          const auto is_masked = [&](int64_t row_tile, int64_t col_tile) {
            const auto end = std::min((row_tile + 1) * grid.rows, m);
            return args.form.kept(end - 1, n) <= col_tile * grid.cols;
          };

          Tiles operations(layout, scratch[thread]);
          if (!is_masked(row_block, col_block)) {
            operations.start(
                args.tile(b, i, j, tile_rows, tile_cols), args.has_scores());
          }
          for (const auto index : c10::irange(gradients.size())) {
            const auto& [grad, of_rows] = gradients[index];
            if (!grad) {
              continue;
            }
            const auto whole = grad[b];
            const auto multiply = [&](bool accumulate, auto* dst) {
              operations.add(index, accumulate, dst);
            };
            if (of_rows) {
              all_sums[index].add(
                  task,
                  (by_groups ? thread : sample) * grid.row_blocks + row_block,
                  col_block,
                  whole.block(i, 0, tile_rows, whole.cols),
                  multiply,
                  [&, row_block = row_block](int64_t turn) {
                    return is_masked(row_block, turn);
                  });
            } else {
              all_sums[index].add(
                  task,
                  (by_groups ? thread : in_group) * grid.col_blocks + col_block,
                  member * grid.row_blocks + row_block,
                  whole.block(j, 0, tile_cols, whole.cols),
                  multiply,
                  [&, col_block = col_block](int64_t turn) {
                    return is_masked(turn % grid.row_blocks, col_block);
                  });
            }
          }
        });
  }
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
