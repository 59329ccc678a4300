#pragma once

#include <ATen/native/cpu/AttnCopy.h>
#include <ATen/native/cpu/AttnSchedule.h>

namespace at::native {
inline namespace CPU_CAPABILITY {

// Where the sums of a result's tiles are added: in the result itself or, if it
// is of lower precision, in memory of their own.
template <typename T, typename S>
class AttnTotals {
 public:
  explicit AttnTotals(int64_t size)
      : memory_(1, std::is_same_v<T, S> ? 0 : size) {}

  // For the part of `result` that begins with element `begin`.
  T* operator()(const Matrix<S>& result, int64_t begin) const {
    if constexpr (std::is_same_v<T, S>) {
      return result.data;
    } else {
      return memory_[0] + begin;
    }
  }

 private:
  AttnScratch<T> memory_;
};

// The rows of attn, cut into groups for tasks: each has as many steps of `step`
// rows as the others, or one more.
class AttnRowGroups {
 public:
  AttnRowGroups(int64_t rows, int64_t groups, int64_t step)
      : rows_(rows), step_(step) {
    const auto steps = at::ceil_div(rows, step);
    group_steps_ = steps / groups;
    more_ = steps % groups;
    largest_ = at::ceil_div(steps, groups) * step;
  }
  int64_t largest() const {
    return largest_;
  }
  int64_t first_row(int64_t group) const {
    const auto steps = group_steps_ * group + std::min(group, more_);
    return std::min(rows_, steps * step_);
  }

 private:
  int64_t rows_, step_, group_steps_, more_, largest_;
};

// output = attn v, for an attn that is made, in blocks of v's columns
template <typename S, typename Tiles, typename Parallel>
void attn_output_by(const AttnForwardArgs<S>& args, const Parallel& parallel) {
  using T = typename Tiles::T;
  const auto [batch, m, n, d, e] = args.sizes;
  const auto threads = parallel.threads(args.sizes.work());

  constexpr int64_t MAX_ROWS = 96, MAX_COLS = 7 * ATTN_BLOCK;
  const auto rows =
      at::round_up<int64_t>(std::min(m, MAX_ROWS), Tiles::ROW_STEP);
  const auto row_groups = at::ceil_div(m, rows);
  const auto groups_wanted = at::ceil_div(4 * threads, batch * row_groups);
  const auto width = std::min(
      MAX_COLS, at::round_up(at::ceil_div(e, groups_wanted), ATTN_BLOCK));
  const auto col_groups = at::ceil_div(e, width);
  const auto acc_size = at::round_up<int64_t>(rows * width, 64);
  const typename Tiles::Layout layout(rows, m, n, 0, width);
  const AttnScratch<T> scratch(threads, acc_size + layout.size);
  std::atomic<bool> failed{false};

  attn_in_order(
      parallel,
      batch * row_groups * col_groups,
      batch,
      threads,
      failed,
      [&, n = n, m = m, e = e](int64_t task, int64_t thread) {
        const auto [b, place] = attn_divide(task, row_groups * col_groups);
        const auto [row_group, col_group] = attn_divide(place, col_groups);
        const auto i = row_group * rows;
        const auto p = col_group * width;
        const auto task_rows = std::min(rows, m - i);
        const auto cols = std::min(width, e - p);
        const Matrix<S> attn = args.attn[b];
        T* acc = scratch[thread];
        Tiles tiles(layout, acc + acc_size);
        for (int64_t j = 0; j < n; j += ATTN_BLOCK) {
          const auto terms = std::min(ATTN_BLOCK, n - j);
          tiles.output(
              j == 0,
              attn.block(i, j, task_rows, terms),
              args.v[b].block(j, p, terms, cols),
              acc);
        }
        const auto output = args.output[b].block(i, p, task_rows, cols);
        for (const auto r : c10::irange(task_rows)) {
          convert(output.data + r * output.row_stride, acc + r * cols, cols);
        }
      });
}

// attn = tanh(q kᵀ), output = attn v
template <typename S, typename Tiles, typename Parallel>
void attn_forward_by(const AttnForwardArgs<S>& args, const Parallel& parallel) {
  using T = typename Tiles::T;
  const auto [batch, m, n, d, e] = args.sizes;
  const auto threads = parallel.threads(args.sizes.work());

  // The rows of a task: all threads shall have some, but k and v are packed for
  // each task, and the sums of its rows shall stay in a cache.
  constexpr int64_t MIN_ROWS = 24, MAX_ROWS = 1024, MAX_SUMS = 1 << 18;
  const auto tasks_wanted =
      threads == 1
          ? 1
          : threads * std::clamp<int64_t>(batch * m / (threads * 256), 1, 4);
  const auto rows_wanted = std::min(
      {at::ceil_div(m, at::ceil_div(tasks_wanted, batch)),
       MAX_ROWS,
       MAX_SUMS / (e + 1)});
  const auto row_groups = at::ceil_div(m, std::max(rows_wanted, MIN_ROWS));
  const AttnRowGroups groups(m, row_groups, Tiles::ROW_STEP);
  // If this leaves threads idle, a task is one block of columns.
  const auto blocks = at::ceil_div(n, ATTN_BLOCK);
  const bool by_blocks = batch * row_groups < threads && blocks > 1;
  const auto col_groups = by_blocks ? blocks : 1;

  // A small attn may be read soon.
  constexpr int64_t STREAMED = 8 << 20;
  const bool stream =
      batch * m * n * static_cast<int64_t>(sizeof(S)) >= STREAMED &&
      reinterpret_cast<uintptr_t>(args.attn.data) % 64 == 0 &&
      n * sizeof(S) % 64 == 0;
  // Each element of the output is written once, or can be added to.
  const bool direct = blocks == 1 || (std::is_same_v<T, S> && !by_blocks);
  // The sums of long rows would not fit in a cache, or in memory.
  constexpr int64_t MAX_COLS = 4096;
  if constexpr (Tiles::any_width) {
    if (!direct && e > MAX_COLS) {
      AttnForwardArgs<S> without_output = args;
      without_output.sizes.e = 0;
      attn_forward_by<S, Tiles>(without_output, parallel);
      attn_output_by<S, Tiles>(args, parallel);
      return;
    }
  }
  const auto acc_size =
      direct ? 0 : at::round_up<int64_t>(groups.largest() * e, 64);
  const typename Tiles::Layout layout(groups.largest(), m, n, d, e);
  const AttnScratch<T> scratch(threads, acc_size + layout.size);
  const AttnTotals<T, S> totals(by_blocks ? batch * m * e : 0);
  std::atomic<bool> failed{false};
  AttnTickets tickets(by_blocks ? batch * row_groups : 0, failed);

  attn_in_order(
      parallel,
      batch * row_groups * col_groups,
      batch,
      threads,
      failed,
      [&, m = m, n = n, d = d, e = e](int64_t task, int64_t thread) {
        const auto [place, col_group] = attn_divide(task, col_groups);
        const auto [b, row_group] = attn_divide(place, row_groups);
        const auto i = groups.first_row(row_group);
        const auto rows = groups.first_row(row_group + 1) - i;
        const auto q = args.q[b].block(i, 0, rows, d);
        const auto k = args.k[b];
        const auto v = args.v[b];
        const auto attn = args.attn[b];
        const auto output = args.output[b].block(i, 0, rows, e);

        T* acc = scratch[thread];
        Tiles tiles(layout, acc + acc_size);
        const auto begin = by_blocks ? col_group * ATTN_BLOCK : 0;
        const auto end = by_blocks ? std::min(n, begin + ATTN_BLOCK) : n;
        const auto forward = [&](auto* out) {
          for (int64_t j = begin; j < end; j += ATTN_BLOCK) {
            const auto cols = std::min(ATTN_BLOCK, n - j);
            tiles.forward(
                j == begin,
                q,
                k.block(j, 0, cols, d),
                v.block(j, 0, cols, e),
                attn.block(i, j, rows, cols),
                stream,
                out);
          }
          fence_streamed(stream);
        };
        if (direct) {
          forward(output.data);
          return;
        }
        forward(acc);
        if (by_blocks) {
          T* total = totals(output, (b * m + i) * e);
          tickets.wait(place, col_group);
          add_sum(col_group == 0, total, acc, rows * e);
          acc = total;
        }
        if (!std::is_same_v<T, S> && col_group == col_groups - 1) {
          convert(output.data, acc, rows * e);
        }
        if (by_blocks) {
          tickets.next(place);
        }
      });
}

} // namespace CPU_CAPABILITY
} // namespace at::native
