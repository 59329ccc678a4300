#pragma once

#include <c10/core/CPUAllocator.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <thread>
#include <utility>

// How threads share the tiles of attn, and in what order they add to a sum.
// See Note [Schedule of attn's backward].

namespace at::native {

// The quotient and the remainder. Where the divisor is 1, as in all divisions
// for a tiny sample, they would take longer than the sample.
inline std::pair<int64_t, int64_t> attn_divide(int64_t x, int64_t divisor) {
  if (divisor == 1) {
    return {x, 0};
  }
  return {x / divisor, x % divisor};
}

// Note [Schedule of attn's backward]
// A tile adds to the rows of grad_q that it shares with the tiles right and
// left of it, and to the rows of grad_k and grad_v that it shares with those
// above and below. Sums whose order depended on the threads would differ from
// run to run, so each row block and each column block has an order of its
// tiles, and a tile waits for its turn, by a ticket.
//
// Threads take tiles in one order, and so a tile only ever waits for one that
// was taken before it: somebody is always at work. Tiles that are worked on at
// the same time should share neither rows nor columns. So row blocks come in
// groups, at most as many as there are column blocks, and the members of a
// group go through the columns shifted. Of 3 row blocks and 6 column blocks,
// the order in which tiles are taken, and the turns at their column block:
//
//   0  3  6  9 12 15        0  0  1  1  2  2
//  13 16  1  4  7 10        2  2  0  0  1  1
//   8 11 14 17  2  5        1  1  2  2  0  0
//
// The turn at its row block is the number of tiles that the row block has had.
class AttnTileOrder {
 public:
  struct Tile {
    int64_t row_block, col_block;
    int64_t row_turn; // among the tiles of this row block
    int64_t col_turn; // among those of this column block
  };

  AttnTileOrder(int64_t row_blocks, int64_t col_blocks)
      : row_blocks_(row_blocks), col_blocks_(col_blocks) {
    const auto most = std::min<int64_t>(col_blocks, MAX_MEMBERS);
    const auto groups = (row_blocks + most - 1) / most;
    members_ = (row_blocks + groups - 1) / groups;
    shift_ = col_blocks / members_;
  }

  // The tile that is taken as the ith.
  Tile operator[](int64_t i) const {
    const auto [group, in_group] = attn_divide(i, members_ * col_blocks_);
    const auto first = group * members_;
    const auto members = std::min(members_, row_blocks_ - first);
    const auto [row_turn, member] = attn_divide(in_group, members);
    const auto col_block =
        attn_divide(row_turn + member * shift_, col_blocks_).second;
    // Of the members, those that began at this column block or before it come
    // to it first, the last of them soonest.
    const auto before =
        std::min(members, attn_divide(col_block, shift_).first + 1);
    const auto place = attn_divide(before - 1 - member + members, members);
    return {first + member, col_block, row_turn, first + place.second};
  }

 private:
  static constexpr int64_t MAX_MEMBERS = 8;
  int64_t row_blocks_, col_blocks_, members_, shift_;
};

// Memory for each of some threads.
template <typename T>
class AttnScratch {
 public:
  AttnScratch(int64_t threads, int64_t size)
      : size_((size + 63) / 64 * 64),
        memory_(c10::GetCPUAllocator()->allocate(threads * size_ * sizeof(T))) {
  }

  T* operator[](int64_t thread) const {
    return static_cast<T*>(memory_.get()) + thread * size_;
  }

 private:
  int64_t size_;
  c10::DataPtr memory_;
};

// Tickets: whose turn it is, at each of some places. Nobody waits once a task
// has failed.
class AttnTickets {
 public:
  AttnTickets(int64_t places, const std::atomic<bool>& failed)
      : memory_(1, places), serving_(memory_[0]), failed_(failed) {
    for (const auto i : c10::irange(places)) {
      new (serving_ + i) std::atomic<int64_t>(0);
    }
  }
  void wait(int64_t place, int64_t turn) const {
    for (int tries = 0;
         serving_[place].load(std::memory_order_acquire) != turn && !failed_;
         ++tries) {
      if (tries > 1000) {
        std::this_thread::yield();
      }
    }
  }
  void next(int64_t place) {
    serving_[place].fetch_add(1, std::memory_order_release);
  }

 private:
  AttnScratch<std::atomic<int64_t>> memory_;
  std::atomic<int64_t>* serving_;
  const std::atomic<bool>& failed_;
};

// task(i, thread) for i = 0, 1, ...: each thread takes the next i that none has
// taken, or several if there are many samples, so a task can wait for those
// before it. `failed` tells the others of one that has thrown.
template <typename Parallel, typename F>
void attn_in_order(
    const Parallel& parallel,
    int64_t tasks,
    int64_t batch,
    int64_t threads,
    std::atomic<bool>& failed,
    const F& task) {
  const auto step = std::max<int64_t>(1, batch / (64 * threads));
  std::atomic<int64_t> next{0};
  parallel.run(threads, [&](int64_t thread) {
    try {
      for (;;) {
        const auto i = next.fetch_add(step, std::memory_order_relaxed);
        if (i >= tasks) {
          break;
        }
        for (const auto j : c10::irange(i, std::min(i + step, tasks))) {
          task(j, thread);
        }
      }
    } catch (...) {
      failed = true;
      throw;
    }
  });
}

} // namespace at::native
