#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cpu/AttnKernel.h>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/AttnBrgemmTiles.h>
#include <ATen/native/cpu/AttnFmaTiles.h>
#include <ATen/native/cpu/AttnLoopTiles.h>
#include <ATen/native/cpu/AttnRowTiles.h>
#include <ATen/native/cpu/AttnTiles.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace at::native {

namespace {

// The matrices of a tensor, whose batch dimensions have any strides. Empty ones
// if the tensor is undefined.
template <typename S>
class Batch {
 public:
  explicit Batch(const Tensor& x) : x_(x.defined() ? &x : nullptr) {
    if (x_ != nullptr) {
      if constexpr (std::is_const_v<S>) {
        data_ = x.const_data_ptr<std::remove_const_t<S>>();
      } else {
        data_ = x.mutable_data_ptr<S>();
      }
    }
  }

  explicit operator bool() const {
    return x_ != nullptr;
  }

  Matrix<S> operator[](int64_t index) const {
    if (x_ == nullptr) {
      return {};
    }
    const auto sizes = x_->sizes();
    const auto strides = x_->strides();
    const auto dim = x_->dim() - 2;
    S* data = data_;
    for (auto i = dim - 1; i > 0; --i) {
      data += index % sizes[i] * strides[i];
      index /= sizes[i];
    }
    if (dim > 0) {
      data += index * strides[0];
    }
    return {data, sizes[dim], sizes[dim + 1], strides[dim], strides[dim + 1]};
  }

 private:
  const Tensor* x_;
  S* data_ = nullptr;
};

// The shape of a call: (batch, m, d), (batch, n, d), (batch, n, e).
struct Shape {
  int64_t batch, m, n, d, e;

  Shape(const Tensor& q, const Tensor& v, const Tensor& attn)
      : m(q.size(-2)), n(v.size(-2)), d(q.size(-1)), e(v.size(-1)) {
    batch = m * n == 0 ? 0 : attn.numel() / (m * n);
  }
  // The multiplications of attn's two products, and what each sample costs
  // besides.
  double work() const {
    return batch * (static_cast<double>(m) * n * (d + e) + 1000);
  }
};

// The quotient and the remainder. Where the divisor is 1, as in all divisions
// for a tiny sample, they would take longer than the sample.
std::pair<int64_t, int64_t> divide(int64_t x, int64_t divisor) {
  if (divisor == 1) {
    return {x, 0};
  }
  return {x / divisor, x % divisor};
}

// Memory for each of some threads.
template <typename T>
class Scratch {
 public:
  Scratch(int64_t threads, int64_t size)
      : size_(round_up(size, 64)),
        memory_(c10::GetCPUAllocator()->allocate(threads * size_ * sizeof(T))) {
  }

  T* operator[](int64_t thread) const {
    return static_cast<T*>(memory_.get()) + thread * size_;
  }

 private:
  int64_t size_;
  c10::DataPtr memory_;
};

// Whether a tile is all of a sample's attn.
template <typename Tiles>
constexpr bool is_whole = false;
template <typename S>
constexpr bool is_whole<LoopTiles<S>> = true;

// Whether a tile's sums are always in float, and d and e limited.
template <typename Tiles>
constexpr bool is_brgemm = false;
#if defined(CPU_CAPABILITY_AVX512)
template <typename S>
constexpr bool is_brgemm<BrgemmTiles<S>> = true;
#endif

// Where the sums of a result's tiles are added: in the result itself or, if it
// is of lower precision, in memory of their own.
template <typename T, typename S>
class Totals {
 public:
  explicit Totals(int64_t size) : memory_(1, std::is_same_v<T, S> ? 0 : size) {}

  // For the part of `result` that begins with element `begin`.
  T* operator()(const Matrix<S>& result, int64_t begin) const {
    if constexpr (std::is_same_v<T, S>) {
      return result.data;
    } else {
      return memory_[0] + begin;
    }
  }

 private:
  Scratch<T> memory_;
};

// task(i, thread) for i = 0, 1, ...: each thread takes the next i that none has
// taken, or several if there are many samples, so a task can wait for those
// before it. `failed` tells the others of one that has thrown.
template <typename F>
void in_order(
    int64_t tasks,
    int64_t batch,
    int64_t threads,
    std::atomic<bool>& failed,
    const F& task) {
  const auto step = std::max<int64_t>(1, batch / (64 * threads));
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t thread) {
    for (;;) {
      const auto i = next.fetch_add(step, std::memory_order_relaxed);
      if (i >= tasks) {
        break;
      }
      for (const auto j : c10::irange(i, std::min(i + step, tasks))) {
        task(j, thread);
      }
    }
  };
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (const auto thread : c10::irange(begin, end)) {
      try {
        work(thread);
      } catch (...) {
        failed = true;
        throw;
      }
    }
  });
}

// Whose turn it is, at each of some places. Nobody waits once a task has
// failed.
class Turns {
 public:
  Turns(int64_t places, const std::atomic<bool>& failed)
      : memory_(1, places), turns_(memory_[0]), failed_(failed) {
    for (const auto i : c10::irange(places)) {
      new (turns_ + i) std::atomic<int64_t>(0);
    }
  }
  void wait(int64_t place, int64_t turn) const {
    for (int tries = 0;
         turns_[place].load(std::memory_order_acquire) != turn && !failed_;
         ++tries) {
      if (tries > 1000) {
        std::this_thread::yield();
      }
    }
  }
  void next(int64_t place) {
    turns_[place].fetch_add(1, std::memory_order_release);
  }

 private:
  Scratch<std::atomic<int64_t>> memory_;
  std::atomic<int64_t>* turns_;
  const std::atomic<bool>& failed_;
};

// Some blocks of rows of a gradient, to each of which some tiles add.
template <typename S, typename Tiles>
class Blocks {
  using T = typename Tiles::T;

 public:
  Blocks(int64_t places, int64_t tiles, int64_t size, std::atomic<bool>& failed)
      : tiles_(tiles),
        turns_(tiles > 1 ? places : 0, failed),
        totals_(tiles > 1 ? size : 0) {}

  // add(first, total) for the tile whose turn it is, and finish(block, total)
  // after the last if the total isn't the block itself: it begins with element
  // `begin` of the totals or, of a single tile, is in `own` memory.
  template <typename F, typename G>
  void add(
      const Matrix<S>& block,
      int64_t place,
      int64_t begin,
      int64_t turn,
      [[maybe_unused]] T* own,
      const F& add,
      const G& finish) {
    if constexpr (is_whole<Tiles>) {
      add(true, block.data);
    } else if (tiles_ == 1) {
      if constexpr (is_brgemm<Tiles>) {
        add(true, own);
        finish(block, own);
      } else {
        add(true, block.data);
      }
    } else {
      T* total = totals_(block, begin);
      turns_.wait(place, turn);
      add(turn == 0, total);
      if (!std::is_same_v<T, S> && turn == tiles_ - 1) {
        finish(block, total);
      }
      turns_.next(place);
    }
  }

 private:
  int64_t tiles_;
  Turns turns_;
  Totals<T, S> totals_;
};

// As many threads as there is work for.
int64_t threads_for(double work) {
  constexpr double WORK_OF_ONE = 1 << 18;
  if (at::in_parallel_region()) {
    return 1;
  }
  return std::clamp<int64_t>(
      static_cast<int64_t>(std::min(work / WORK_OF_ONE, 1e6)),
      1,
      at::get_num_threads());
}

// output = attn v, for an attn that is made, in blocks of v's columns
template <typename S, typename Tiles>
void output_by(
    const Shape& shape,
    const Tensor& output_tensor,
    const Tensor& attn_tensor,
    const Tensor& v_tensor) {
  using T = typename Tiles::T;
  const Batch<const S> attn_batch(attn_tensor), v_batch(v_tensor);
  const Batch<S> output_batch(output_tensor);
  const auto batch = shape.batch, m = shape.m, n = shape.n, e = shape.e;
  const auto threads = threads_for(shape.work());

  constexpr int64_t MAX_ROWS = 96, MAX_COLS = 7 * ATTN_BLOCK;
  const auto rows = round_up(std::min(m, MAX_ROWS), Tiles::ROW_STEP);
  const auto row_groups = at::divup(m, rows);
  const auto groups_wanted = at::divup(4 * threads, batch * row_groups);
  const auto width =
      std::min(MAX_COLS, round_up(at::divup(e, groups_wanted), ATTN_BLOCK));
  const auto col_groups = at::divup(e, width);
  const auto sums_size = round_up(rows * width, 64);
  const Scratch<T> scratch(
      threads, sums_size + Tiles::forward_scratch(rows, n, 0, width));
  std::atomic<bool> failed{false};

  in_order(
      batch * row_groups * col_groups,
      batch,
      threads,
      failed,
      [&](int64_t task, int64_t thread) {
        const auto [b, place] = divide(task, row_groups * col_groups);
        const auto [row_group, col_group] = divide(place, col_groups);
        const auto i = row_group * rows;
        const auto p = col_group * width;
        const auto task_rows = std::min(rows, m - i);
        const auto cols = std::min(width, e - p);
        T* sums = scratch[thread];
        Tiles tiles(sums + sums_size, n, 0, width);
        for (int64_t j = 0; j < n; j += ATTN_BLOCK) {
          const auto terms = std::min(ATTN_BLOCK, n - j);
          tiles.add_output(
              j == 0,
              attn_batch[b].block(i, j, task_rows, terms),
              v_batch[b].block(j, p, terms, cols),
              sums);
        }
        const auto output = output_batch[b].block(i, p, task_rows, cols);
        for (const auto r : c10::irange(task_rows)) {
          convert(output.data + r * output.row_stride, sums + r * cols, cols);
        }
      });
}

template <typename S, typename Tiles>
void attn_by(
    const Shape& shape,
    const Tensor& output_tensor,
    const Tensor& attn_tensor,
    const Tensor& q_tensor,
    const Tensor& k_tensor,
    const Tensor& v_tensor) {
  using T = typename Tiles::T;
  const Batch<const S> q_batch(q_tensor), k_batch(k_tensor), v_batch(v_tensor);
  const Batch<S> output_batch(output_tensor), attn_batch(attn_tensor);
  const auto batch = shape.batch, m = shape.m, n = shape.n;
  const auto d = shape.d, e = shape.e;
  const auto threads = threads_for(shape.work());

  // The rows of a task: all threads shall have some, but k and v are packed for
  // each task, and the sums of its rows shall stay in a cache.
  constexpr int64_t MIN_ROWS = 96, MAX_ROWS = 1024, MAX_SUMS = 1 << 18;
  const auto tasks_wanted =
      threads == 1
          ? 1
          : threads * std::clamp<int64_t>(batch * m / (threads * 256), 1, 4);
  const auto rows_wanted = std::min(
      {at::divup(m, at::divup(tasks_wanted, batch)),
       MAX_ROWS,
       MAX_SUMS / (e + 1)});
  const auto row_groups = at::divup(m, std::max(rows_wanted, MIN_ROWS));
  // Each has as many steps as the others, or one more.
  const auto steps = at::divup(m, Tiles::ROW_STEP);
  const auto rows = at::divup(steps, row_groups) * Tiles::ROW_STEP;
  const auto group_steps = steps / row_groups, more_steps = steps % row_groups;
  const auto first_row = [&](int64_t group) {
    const auto step = group_steps * group + std::min(group, more_steps);
    return std::min(m, step * Tiles::ROW_STEP);
  };
  // If this leaves threads idle, a task is one block of columns.
  const auto blocks = at::divup(n, ATTN_BLOCK);
  const bool wide = batch * row_groups < threads && blocks > 1;
  const auto col_groups = wide ? blocks : 1;

  // A small attn may be read soon.
  constexpr size_t STREAMED = 8 << 20;
  const bool stream =
      attn_tensor.nbytes() >= STREAMED &&
      reinterpret_cast<uintptr_t>(attn_tensor.const_data_ptr()) % 64 == 0 &&
      n * sizeof(S) % 64 == 0;
  const bool direct = std::is_same_v<T, S> && !wide;
  // The sums of long rows would not fit in a cache, or in memory.
  constexpr int64_t MAX_COLS = 4096;
  if constexpr (!is_whole<Tiles> && !is_brgemm<Tiles>) {
    if (!direct && e > MAX_COLS) {
      Shape scores = shape;
      scores.e = 0;
      attn_by<S, Tiles>(
          scores, output_tensor, attn_tensor, q_tensor, k_tensor, v_tensor);
      output_by<S, Tiles>(shape, output_tensor, attn_tensor, v_tensor);
      return;
    }
  }
  const auto sums_size = direct ? 0 : round_up(rows * e, 64);
  const Scratch<T> scratch(
      threads, sums_size + Tiles::forward_scratch(rows, n, d, e));
  const Totals<T, S> totals(wide ? batch * m * e : 0);
  std::atomic<bool> failed{false};
  Turns turns(wide ? batch * row_groups : 0, failed);

  in_order(
      batch * row_groups * col_groups,
      batch,
      threads,
      failed,
      [&](int64_t task, int64_t thread) {
        const auto [place, col_group] = divide(task, col_groups);
        const auto [b, row_group] = divide(place, row_groups);
        const auto i = first_row(row_group);
        const auto task_rows = first_row(row_group + 1) - i;
        const auto q = q_batch[b].block(i, 0, task_rows, d);
        const auto k = k_batch[b];
        const auto v = v_batch[b];
        const auto attn = attn_batch[b];
        const auto output = output_batch[b].block(i, 0, task_rows, e);

        T* sums = scratch[thread];
        Tiles tiles(sums + sums_size, n, d, e);
        if constexpr (std::is_same_v<T, S>) {
          sums = direct ? output.data : sums;
        }
        const auto begin = wide ? col_group * ATTN_BLOCK : 0;
        const auto end = wide ? std::min(n, begin + ATTN_BLOCK) : n;
        for (int64_t j = begin; j < end; j += ATTN_BLOCK) {
          const auto cols = std::min(ATTN_BLOCK, n - j);
          tiles.forward(
              j == begin,
              q,
              k.block(j, 0, cols, d),
              v.block(j, 0, cols, e),
              attn.block(i, j, task_rows, cols),
              stream,
              sums);
        }
        fence_streamed(stream);
        if (wide) {
          T* total = totals(output, (b * m + i) * e);
          turns.wait(place, col_group);
          add_sum(col_group == 0, total, sums, task_rows * e);
          sums = total;
        }
        if (!std::is_same_v<T, S> && col_group == col_groups - 1) {
          convert(output.data, sums, task_rows * e);
        }
        if (wide) {
          turns.next(place);
        }
      });
}

template <typename S, typename Tiles>
void attn_backward_by(
    const Shape& shape,
    const Tensor& grad_q_tensor,
    const Tensor& grad_k_tensor,
    const Tensor& grad_v_tensor,
    const Tensor& grad_output_tensor,
    const Tensor& grad_attn_tensor,
    const Tensor& q_tensor,
    const Tensor& k_tensor,
    const Tensor& v_tensor,
    const Tensor& attn_tensor) {
  using T = typename Tiles::T;
  const Batch<S> grad_q_batch(grad_q_tensor), grad_k_batch(grad_k_tensor),
      grad_v_batch(grad_v_tensor);
  const Batch<const S> grad_output_batch(grad_output_tensor),
      grad_attn_batch(grad_attn_tensor), q_batch(q_tensor), k_batch(k_tensor),
      v_batch(v_tensor), attn_batch(attn_tensor);
  const auto batch = shape.batch, m = shape.m, n = shape.n;
  const auto d = shape.d, e = shape.e;

  // Tiles are as large as they may be, but so that there are at least 4 x 3 for
  // threads to share, if these are worth packing k and v for them. Their size
  // depends on the shape only, lest the sums depend on the number of threads.
  constexpr int64_t MAX_ROWS = 192, COL_STEP = 96;
  constexpr int64_t MIN_ROWS = is_whole<Tiles> ? MAX_ROWS : 48;
  constexpr int64_t ROW_STEP = is_brgemm<Tiles> ? Tiles::ROW_STEP : 4;
  const auto rows = round_up(
      std::max(
          at::divup(m, std::max<int64_t>(4, at::divup(m, MAX_ROWS))),
          std::min(m, MIN_ROWS)),
      ROW_STEP);
  const auto block_cols =
      std::min(ATTN_BLOCK, round_up(at::divup(n, 3), COL_STEP));
  const auto row_blocks = at::divup(m, rows);
  const auto col_blocks = at::divup(n, block_cols);
  const auto threads = threads_for(2 * shape.work());
  // Where a single tile is all that is added, its sums need no other place.
  const bool q_shared = col_blocks > 1, columns_shared = row_blocks > 1;
  const auto row_width = grad_q_batch ? d : 0;
  const auto col_width = (grad_k_batch ? d : 0) + (grad_v_batch ? e : 0);
  constexpr bool has_totals = !std::is_same_v<T, S>;
  int64_t own_size = 0;
  if constexpr (is_brgemm<Tiles>) {
    own_size = std::max(
        q_shared ? 0 : std::min(rows, m) * d,
        columns_shared ? 0 : std::min(block_cols, n) * std::max(d, e));
    own_size = round_up(own_size, 64);
  }

  // The sums of some samples at a time are in memory, or of a part of one: of
  // some of its row blocks, or some of its column blocks.
  constexpr int64_t MAX_TOTALS = 1 << 22, MAX_TURNS = 1 << 18, MIN_BLOCKS = 8;
  const auto row_totals = has_totals && q_shared ? m * row_width : 0;
  const auto col_totals = has_totals && columns_shared ? n * col_width : 0;
  const auto turns =
      (q_shared ? row_blocks : 0) + (columns_shared ? 2 * col_blocks : 0);
  const auto samples = std::clamp<int64_t>(
      std::min(
          MAX_TOTALS / std::max<int64_t>(row_totals + col_totals, 1),
          MAX_TURNS / std::max<int64_t>(turns, 1)),
      1,
      batch);
  auto row_step = row_blocks, col_step = col_blocks;
  if (row_totals + col_totals > MAX_TOTALS) {
    const bool by_rows = row_totals > col_totals;
    const auto size = by_rows ? rows * row_width : block_cols * col_width;
    auto& step = by_rows ? row_step : col_step;
    step = std::min(step, std::max(MAX_TOTALS / size, MIN_BLOCKS));
  }

  const Scratch<T> scratch(
      threads, own_size + Tiles::backward_scratch(rows, n, d, e));
  std::atomic<bool> failed{false};

  struct Part { // the first of each, and how many
    int64_t sample, samples, row_block, row_blocks, col_block, col_blocks;
  };
  using Grad = std::optional<Blocks<S, Tiles>>;
  Grad q_grad, k_grad, v_grad;
  const auto rows_of = [&](const Part& part) {
    return std::min(m - part.row_block * rows, row_step * rows);
  };
  const auto cols_of = [&](const Part& part) {
    return std::min(n - part.col_block * block_cols, col_step * block_cols);
  };
  const auto add_part = [&](const Part& part) {
    // A task is a tile. Row blocks come in groups of some: while the first of
    // them is at column block j, the others are at further ones, so that
    // threads which add to the same sums don't meet.
    const auto groups =
        at::divup(part.row_blocks, std::min<int64_t>(part.col_blocks, 8));
    const auto group_size = at::divup(part.row_blocks, groups);
    const auto shift = part.col_blocks / group_size;

    in_order(
        part.samples * part.row_blocks * part.col_blocks,
        part.samples,
        threads,
        failed,
        [&](int64_t task, int64_t thread) {
          const auto [sample, tile] =
              divide(task, part.row_blocks * part.col_blocks);
          const auto [group_index, tile_of_group] =
              divide(tile, group_size * part.col_blocks);
          const auto group = group_index * group_size;
          const auto members = std::min(group_size, part.row_blocks - group);
          const auto [row_turn, member] = divide(tile_of_group, members);
          const auto row_block = group + member;
          const auto block =
              divide(row_turn + member * shift, part.col_blocks).second;
          // Of the members, those that began at this column block or before it
          // come to it first, the last of them soonest.
          const auto before = std::min(members, divide(block, shift).first + 1);
          const auto col_turn =
              group + divide(before - 1 - member + members, members).second;

          const auto b = part.sample + sample;
          const auto i = (part.row_block + row_block) * rows;
          const auto j = (part.col_block + block) * block_cols;
          const auto task_rows = std::min(rows, m - i);
          const auto cols = std::min(block_cols, n - j);

          T* own = scratch[thread];
          Tiles tiles(own + own_size, rows, n, d, e);
          tiles.start_tile(
              grad_q_batch || grad_k_batch,
              q_batch[b].block(i, 0, task_rows, d),
              v_batch[b].block(j, 0, cols, e),
              attn_batch[b].block(i, j, task_rows, cols),
              grad_output_batch[b].block(
                  i, 0, task_rows, grad_output_batch ? e : 0),
              grad_attn_batch[b].block(i, j, task_rows, cols));
          if (grad_q_batch) {
            const auto k = k_batch[b].block(j, 0, cols, d);
            q_grad->add(
                grad_q_batch[b].block(i, 0, task_rows, d),
                sample * part.row_blocks + row_block,
                (sample * rows_of(part) + row_block * rows) * d,
                part.col_block + row_turn,
                own,
                [&](bool first, auto* total) {
                  tiles.add_grad_q(first, k, total);
                },
                [](const Matrix<S>& grad, const T* total) {
                  convert(grad.data, total, grad.rows * grad.cols);
                });
          }
          const auto add_to_columns = [&, sample = sample, b = b](
                                          const Batch<S>& grads,
                                          Grad& grad,
                                          int64_t width,
                                          const auto& add) {
            if (grads) {
              grad->add(
                  grads[b].block(j, 0, cols, width),
                  sample * part.col_blocks + block,
                  (sample * cols_of(part) + block * block_cols) * width,
                  part.row_block + col_turn,
                  own,
                  add,
                  []([[maybe_unused]] const Matrix<S>& grad,
                     [[maybe_unused]] const T* total) {
                    if constexpr (!is_whole<Tiles>) {
                      Tiles::finish_block(grad, total);
                    }
                  });
            }
          };
          add_to_columns(grad_k_batch, k_grad, d, [&](bool first, auto* total) {
            tiles.add_grad_k(first, total);
          });
          add_to_columns(grad_v_batch, v_grad, e, [&](bool first, auto* total) {
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
              places, row_blocks, grad_k_batch ? cols * d : 0, failed);
          v_grad.emplace(
              places, row_blocks, grad_v_batch ? cols * e : 0, failed);
        }
        add_part(part);
      }
    }
  }
}

// f(the class of tiles for this shape)
template <typename S, typename F>
void with_tiles(const Shape& shape, const F& f) {
  if (LoopTiles<S>::fits(shape.m, shape.n, shape.d, shape.e)) {
    return f(static_cast<LoopTiles<S>*>(nullptr));
  }
  if (RowTiles<S>::fits(shape.m)) {
    return f(static_cast<RowTiles<S>*>(nullptr));
  }
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (!std::is_same_v<S, at::opmath_type<S>>) {
    if (BrgemmTiles<S>::fits(shape.m, shape.n, shape.d, shape.e)) {
      return f(static_cast<BrgemmTiles<S>*>(nullptr));
    }
  }
#endif
  f(static_cast<FmaTiles<S>*>(nullptr));
}

void attn_kernel(
    const Tensor& output,
    const Tensor& attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v) {
  const Shape shape(q, v, attn);
  if (shape.batch == 0) { // no attn: a sum without terms
    output.zero_();
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, q.scalar_type(), "attn", [&] {
        with_tiles<scalar_t>(shape, [&](auto* tiles) {
          attn_by<scalar_t, std::remove_pointer_t<decltype(tiles)>>(
              shape, output, attn, q, k, v);
        });
      });
}

void attn_backward_kernel(
    const Tensor& grad_q,
    const Tensor& grad_k,
    const Tensor& grad_v,
    const Tensor& grad_output,
    const Tensor& grad_attn,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& attn) {
  const Shape shape(q, v, attn);
  if (shape.batch == 0) {
    for (const auto& grad : {grad_q, grad_k, grad_v}) {
      if (grad.defined()) {
        grad.zero_();
      }
    }
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, q.scalar_type(), "_attn_backward", [&] {
        with_tiles<scalar_t>(shape, [&](auto* tiles) {
          attn_backward_by<scalar_t, std::remove_pointer_t<decltype(tiles)>>(
              shape,
              grad_q,
              grad_k,
              grad_v,
              grad_output,
              grad_attn,
              q,
              k,
              v,
              attn);
        });
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(attn_stub, &attn_kernel)
ALSO_REGISTER_AVX512_DISPATCH(attn_backward_stub, &attn_backward_kernel)

} // namespace at::native
