#pragma once

#include <ATen/native/cpu/AttnCopy.h>
#include <ATen/native/cpu/AttnSchedule.h>

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The slots of a thread hold at most so many elements, or one addend.
constexpr int64_t MAX_SLOT_ELEMENTS = 1 << 16;

// Returns how many tasks a thread takes at once, whose addends have at most
// `size` elements. If there are many tasks, it takes several, which reduces the
// cost of sharing them: one at a time, 20,000 samples of 12 x 12 take a quarter
// to two fifths longer (Zen 5). But there are slots for twice as many, or a
// thread that is ahead would sleep until the others are done.
inline int64_t tasks_at_once(int64_t tasks, int64_t threads, int64_t size = 0) {
  const auto most = MAX_SLOT_ELEMENTS / (2 * std::max<int64_t>(size, 1));
  return std::max<int64_t>(1, std::min(tasks / (64 * threads), most));
}

// Returns how many slots there are for addends of at most `size` elements: few
// enough to bound memory, enough for one thread to run ahead of another.
inline int64_t slots_for(int64_t size, int64_t threads, int64_t step) {
  const auto most = MAX_SLOT_ELEMENTS / std::max<int64_t>(size, 1);
  return threads * std::clamp<int64_t>(most, 1, 4 * step);
}

// The rows of attn in groups, one for each task. The sizes of groups are
// multiples of `step` and differ by one step at most.
class RowGroups {
 public:
  RowGroups(int64_t rows, int64_t groups, int64_t step)
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

// attn = tanh(scale q kᵀ), output = attn v
template <typename S, typename Tiles>
void forward_by(const ForwardArgs<S>& args, const Runtime& runtime) {
  using T = typename Tiles::T;
  const auto [batch, m, n, d, e] = args.sizes;
  const auto threads = runtime.threads(args.sizes.work());

  // The rows of a task. More tasks keep all threads busy. But each task packs k
  // and v, so it should have many rows, whose sums should still fit in a cache.
  // At 2100 x 2100, tasks of 512 or 2048 rows take 5% longer (Zen 5).
  constexpr int64_t MIN_ROWS = 24, MAX_ROWS = 1024, MAX_SUMS = 1 << 18;
  // If attn is causal, a thread has two tasks at least: a long and a short one.
  const int64_t min_tasks = args.form.diagonal == Form::NO_DIAGONAL ? 1 : 2;
  const auto of_thread =
      std::clamp<int64_t>(batch * m / (threads * 256), min_tasks, 4);
  const auto tasks_wanted = threads == 1 ? 1 : threads * of_thread;
  const auto rows_wanted = std::min(
      {at::ceil_div(m, at::ceil_div(tasks_wanted, batch)),
       MAX_ROWS,
       MAX_SUMS / (e + 1)});
  const auto row_groups =
      at::ceil_div(m, std::max({rows_wanted, MIN_ROWS, Tiles::ROW_STEP}));
  const RowGroups groups(m, row_groups, Tiles::ROW_STEP);
  // If there are fewer groups than threads, a task is one block of columns.
  const auto blocks = at::ceil_div(n, NC);
  const bool by_blocks = batch * row_groups < threads && blocks > 1;
  const auto col_groups = by_blocks ? blocks : 1;

  // A large attn is stored past the caches. A small one may be read soon. At
  // 1536 x 1536 floats that saves a tenth, at 4096 x 4096 nothing (Zen 5).
  constexpr int64_t STREAMED = 8 << 20;
  const bool stream =
      args.attn &&
      batch * m * n * static_cast<int64_t>(sizeof(S)) >= STREAMED &&
      reinterpret_cast<uintptr_t>(args.attn.data) % 64 == 0 &&
      n * sizeof(S) % 64 == 0;
  // The output is written directly if each element is written once, or if it
  // can be added to without rounding in between.
  const bool direct = blocks == 1 || (std::is_same_v<T, S> && !by_blocks);
  const auto acc_size =
      direct ? 0 : at::round_up<int64_t>(groups.largest() * e, 64);
  const typename Tiles::Layout layout(groups.largest(), m, n, d, e);
  const auto own_size = by_blocks ? 0 : acc_size;
  const Scratch<T> scratch(threads, own_size + layout.size, runtime);
  constexpr bool has_totals = !std::is_same_v<T, S>;
  const Scratch<T> totals(
      by_blocks && has_totals ? batch * row_groups : 0, acc_size, runtime);
  const auto tasks = batch * row_groups * col_groups;
  const auto step = tasks_at_once(tasks, threads, by_blocks ? acc_size : 0);
  Progress progress;
  OrderedSums<T> sums(
      by_blocks ? batch * row_groups : 0,
      col_groups,
      1,
      by_blocks ? slots_for(acc_size, threads, step) : 0,
      acc_size,
      runtime,
      progress);

  run_in_order(
      runtime,
      tasks,
      step,
      threads,
      progress,
      [&, m = m, n = n, d = d, e = e](int64_t task, int64_t thread) {
        const auto [place, col_group] = divide(task, col_groups);
        const auto [b, index] = divide(place, row_groups);
        // The last rows come first: if attn is causal, they keep the most
        // columns, and a long task at the end would leave other threads idle.
        const auto i = groups.first_row(row_groups - 1 - index);
        const auto rows = groups.first_row(row_groups - index) - i;
        const auto q = args.q[b].block(i, 0, rows, d);
        const auto k = args.k[b];
        const auto v = args.v[b];
        const auto attn = args.attn[b];
        const auto output = args.output[b].block(i, 0, rows, e);

        T* acc = by_blocks ? sums.slot(task) : scratch[thread];
        Tiles tiles(layout, scratch[thread] + own_size);
        const auto begin = by_blocks ? col_group * NC : 0;
        // The columns after these are masked in all rows of the task.
        const auto kept = args.form.kept(i + rows - 1, n);
        const auto end = by_blocks ? std::min(n, begin + NC) : kept;
        const auto forward = [&](auto* out) {
          for (int64_t j = begin; j < end; j += NC) {
            const auto cols = std::min(NC, n - j);
            tiles.forward(
                j > begin,
                q,
                k.block(j, 0, cols, d),
                v.block(j, 0, cols, e),
                attn.block(i, j, rows, cols),
                args.form.block(i, j),
                stream,
                out);
          }
        };
        if (direct) {
          forward(output.data);
          return;
        }
        forward(acc);
        const auto count = rows * e;
        if (!by_blocks) {
          convert(output.data, acc, count);
          return;
        }
        sums.hand_in(
            task, place, col_group, [&](int64_t turn, const T* addend) {
              if constexpr (has_totals) {
                add_sum(turn > 0, totals[place], addend, count);
                if (turn == col_groups - 1) {
                  convert(output.data, totals[place], count);
                }
              } else {
                add_sum(turn > 0, output.data, addend, count);
              }
            });
      });
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
