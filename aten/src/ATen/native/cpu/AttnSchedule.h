#pragma once

#include <c10/core/CPUAllocator.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <thread>
#include <utility>

// How threads share the tasks of attn, wait for one another, and the memory
// that each has.

namespace at::native {

// The quotient and the remainder. Where the divisor is 1, as in all divisions
// for a tiny sample, they would take longer than the sample.
inline std::pair<int64_t, int64_t> attn_divide(int64_t x, int64_t divisor) {
  if (divisor == 1) {
    return {x, 0};
  }
  return {x / divisor, x % divisor};
}

// Hands out the parts of a scratch memory, by their offsets. Each begins with a
// line of the cache if the memory does.
class ScratchLayout {
 public:
  int64_t add(int64_t count) {
    const auto begin = size_;
    size_ += (count + 63) / 64 * 64;
    return begin;
  }
  int64_t size() const {
    return size_;
  }

 private:
  int64_t size_ = 0;
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
