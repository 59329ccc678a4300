#pragma once

#include <ATen/native/cpu/AttnForward.h>
#include <ATen/native/cpu/AttnTileOrder.h>

#include <optional>

namespace at::native {
inline namespace CPU_CAPABILITY {

// Some blocks of rows of a gradient, to each of which some tiles add.
template <typename S, typename Tiles>
class AttnGradBlocks {
  using T = typename Tiles::T;

 public:
  AttnGradBlocks(
      int64_t places, int64_t tiles, int64_t size, std::atomic<bool>& failed)
      : tiles_(tiles),
        tickets_(tiles > 1 ? places : 0, failed),
        totals_(tiles > 1 ? size : 0) {}

  // add(first, total) for the tile whose turn it is, and finish(block, total)
  // after the last if the total isn't the block itself: it begins with element
  // `begin` of the totals or, of a single tile and if `in_sums`, is in `own`
  // memory.
  template <bool in_sums, typename F, typename G>
  void add(
      const Matrix<S>& block,
      int64_t place,
      int64_t begin,
      int64_t turn,
      [[maybe_unused]] T* own,
      const F& add,
      const G& finish) {
    if (tiles_ == 1) {
      if constexpr (in_sums) {
        add(true, own);
        finish(block, own);
      } else {
        add(true, block.data);
      }
      return;
    }
    T* total = totals_(block, begin);
    tickets_.wait(place, turn);
    add(turn == 0, total);
    if (!std::is_same_v<T, S> && turn == tiles_ - 1) {
      finish(block, total);
    }
    tickets_.next(place);
  }

 private:
  int64_t tiles_;
  AttnTickets tickets_;
  AttnTotals<T, S> totals_;
};

// With S̄ = (grad_output vᵀ + grad_attn) (1 - attn²):
//   grad_q = S̄ k, grad_k = S̄ᵀ q, grad_v = attnᵀ grad_output
template <typename S, typename Tiles, typename Parallel>
void attn_backward_by(
    const AttnBackwardArgs<S>& args, const Parallel& parallel) {
  using T = typename Tiles::T;
  const auto [batch, m, n, d, e] = args.sizes;

  // Tiles are as large as they may be, but so that there are at least TILES for
  // threads to share, if these are worth packing k and v for them. Their size
  // depends on the shape only, lest the sums depend on the number of threads.
  constexpr int64_t TILES = 12, MAX_ROWS = 192, COL_STEP = 96;
  const auto tiles = std::max<int64_t>(1, TILES / batch);
  const auto block_cols = std::min(
      ATTN_BLOCK,
      at::round_up(at::ceil_div(n, std::min<int64_t>(tiles, 3)), COL_STEP));
  const auto col_blocks = at::ceil_div(n, block_cols);
  const auto rows_wanted = at::ceil_div(
      m, std::max(at::ceil_div(tiles, col_blocks), at::ceil_div(m, MAX_ROWS)));
  const auto rows = at::round_up<int64_t>(
      std::max(rows_wanted, std::min(m, Tiles::MIN_ROWS)), Tiles::ROW_STEP);
  const auto row_blocks = at::ceil_div(m, rows);
  const auto threads = parallel.threads(2 * args.sizes.work());
  // Where a single tile is all that is added, its sums need no other place.
  const bool q_shared = col_blocks > 1, columns_shared = row_blocks > 1;
  const auto row_width = args.grad_q ? d : 0;
  const auto col_width = (args.grad_k ? d : 0) + (args.grad_v ? e : 0);
  constexpr bool has_totals = !std::is_same_v<T, S>;
  int64_t own_size = 0;
  if (Tiles::sums_columns && !columns_shared) {
    own_size =
        at::round_up<int64_t>(std::min(block_cols, n) * std::max(d, e), 64);
  }

  // The sums of some samples at a time are in memory, or of a part of one: of
  // some of its row blocks, or some of its column blocks.
  constexpr int64_t MAX_TOTALS = 1 << 22, MAX_TICKETS = 1 << 18, MIN_BLOCKS = 8;
  const auto row_totals = has_totals && q_shared ? m * row_width : 0;
  const auto col_totals = has_totals && columns_shared ? n * col_width : 0;
  const auto tickets =
      (q_shared ? row_blocks : 0) + (columns_shared ? 2 * col_blocks : 0);
  const auto samples = std::clamp<int64_t>(
      std::min(
          MAX_TOTALS / std::max<int64_t>(row_totals + col_totals, 1),
          MAX_TICKETS / std::max<int64_t>(tickets, 1)),
      1,
      batch);
  auto row_step = row_blocks, col_step = col_blocks;
  if (row_totals + col_totals > MAX_TOTALS) {
    const bool by_rows = row_totals > col_totals;
    const auto size = by_rows ? rows * row_width : block_cols * col_width;
    auto& step = by_rows ? row_step : col_step;
    step = std::min(step, std::max(MAX_TOTALS / size, MIN_BLOCKS));
  }

  const typename Tiles::Layout layout(rows, std::min(block_cols, n), d, e);
  const AttnScratch<T> scratch(threads, own_size + layout.size);
  std::atomic<bool> failed{false};

  struct Part { // the first of each, and how many
    int64_t sample, samples, row_block, row_blocks, col_block, col_blocks;
  };
  using Grad = std::optional<AttnGradBlocks<S, Tiles>>;
  Grad q_grad, k_grad, v_grad;
  const auto rows_of = [&, m = m](const Part& part) {
    return std::min(m - part.row_block * rows, row_step * rows);
  };
  const auto cols_of = [&, n = n](const Part& part) {
    return std::min(n - part.col_block * block_cols, col_step * block_cols);
  };
  const auto add_part = [&, m = m, n = n, d = d, e = e](const Part& part) {
    const AttnTileOrder order(part.row_blocks, part.col_blocks);
    attn_in_order(
        parallel,
        part.samples * part.row_blocks * part.col_blocks,
        part.samples,
        threads,
        failed,
        [&](int64_t task, int64_t thread) {
          const auto [sample, index] =
              attn_divide(task, part.row_blocks * part.col_blocks);
          const auto tile = order[index];
          const auto b = part.sample + sample;
          const auto i = (part.row_block + tile.row_block) * rows;
          const auto j = (part.col_block + tile.col_block) * block_cols;
          const auto task_rows = std::min(rows, m - i);
          const auto cols = std::min(block_cols, n - j);

          T* own = scratch[thread];
          Tiles tiles(layout, own + own_size);
          tiles.start(
              {args.q[b].block(i, 0, task_rows, d),
               args.k[b].block(j, 0, cols, d),
               args.v[b].block(j, 0, cols, e),
               args.attn[b].block(i, j, task_rows, cols),
               args.grad_output[b].block(
                   i, 0, task_rows, args.grad_output ? e : 0),
               args.grad_attn[b].block(i, j, task_rows, cols)},
              args.grad_q || args.grad_k);
          if (args.grad_q) {
            q_grad->template add<false>(
                args.grad_q[b].block(i, 0, task_rows, d),
                sample * part.row_blocks + tile.row_block,
                (sample * rows_of(part) + tile.row_block * rows) * d,
                part.col_block + tile.row_turn,
                own,
                [&](bool first, auto* total) {
                  tiles.add_grad_q(first, total);
                },
                [](const Matrix<S>& grad, const T* total) {
                  convert(grad.data, total, grad.rows * grad.cols);
                });
          }
          const auto add_to_columns = [&, sample = sample](
                                          const MatrixBatch<S>& grads,
                                          Grad& grad,
                                          int64_t width,
                                          const auto& add) {
            if (grads) {
              grad->template add<Tiles::sums_columns>(
                  grads[b].block(j, 0, cols, width),
                  sample * part.col_blocks + tile.col_block,
                  (sample * cols_of(part) + tile.col_block * block_cols) *
                      width,
                  part.row_block + tile.col_turn,
                  own,
                  add,
                  [](const Matrix<S>& block, const T* total) {
                    Tiles::finish_block(block, total);
                  });
            }
          };
          add_to_columns(args.grad_k, k_grad, d, [&](bool first, auto* total) {
            tiles.add_grad_k(first, total);
          });
          add_to_columns(args.grad_v, v_grad, e, [&](bool first, auto* total) {
            tiles.add_grad_v(first, total);
          });
        });
  };

  Part part{};
  for (; part.sample < batch; part.sample += samples) {
    part.samples = std::min(samples, batch - part.sample);
    for (part.row_block = 0; part.row_block < row_blocks;
         part.row_block += row_step) {
      part.row_blocks = std::min(row_step, row_blocks - part.row_block);
      for (part.col_block = 0; part.col_block < col_blocks;
           part.col_block += col_step) {
        part.col_blocks = std::min(col_step, col_blocks - part.col_block);
        // New rows or new columns; the others go on.
        if (part.col_block == 0) {
          q_grad.emplace(
              part.samples * part.row_blocks,
              col_blocks,
              part.samples * rows_of(part) * row_width,
              failed);
        }
        if (part.row_block == 0) {
          const auto places = part.samples * part.col_blocks;
          const auto cols = part.samples * cols_of(part);
          k_grad.emplace(
              places, row_blocks, args.grad_k ? cols * d : 0, failed);
          v_grad.emplace(
              places, row_blocks, args.grad_v ? cols * e : 0, failed);
        }
        add_part(part);
      }
    }
  }
}

} // namespace CPU_CAPABILITY
} // namespace at::native
