#pragma once

#include <c10/util/irange.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

// Scheduling: how threads share the tasks of attn, how they add to the same
// sums in a fixed order, and the scratch memory of each.

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// The kernels get threads and memory from their caller, by these functions.
struct Runtime {
  // Returns how many threads should share `work` multiplications.
  int64_t (*threads)(double work);
  // Calls task(context, thread) on each of `threads` threads and waits for all.
  void (*run)(
      int64_t threads,
      void (*task)(void* context, int64_t thread),
      void* context);
  void* (*allocate)(size_t bytes); // aligned to 64 bytes
  void (*release)(void* memory);
};

// Returns how many of `most` threads should share `work` multiplications. Two
// threads that share WORK_OF_ONE take as long as one (Zen 5).
inline int64_t threads_for(double work, int64_t most) {
  constexpr double WORK_OF_ONE = 1 << 18;
  return static_cast<int64_t>(std::clamp<double>(work / WORK_OF_ONE, 1, most));
}

// Returns the quotient and the remainder. Divisors are often 1: for a tiny
// sample a division instruction would take longer than the sample.
inline std::pair<int64_t, int64_t> divide(int64_t x, int64_t divisor) {
  if (divisor == 1) {
    return {x, 0};
  }
  return {x / divisor, x % divisor};
}

// Divides scratch memory into parts and returns their offsets. Each part begins
// on a cache line if the memory does.
class ScratchLayout {
 public:
  int64_t add(int64_t count) {
    const auto begin = size_;
    size_ += (count + 63) / 64 * 64;
    return begin;
  }
  // Makes the memory as large as that of another layout.
  void extend_to(const ScratchLayout& other) {
    size_ = std::max(size_, other.size_);
  }
  int64_t size() const {
    return size_;
  }

 private:
  int64_t size_ = 0;
};

// An array of memory blocks of one size, one for each thread or slot.
template <typename T>
class Scratch {
 public:
  C10_NOINLINE Scratch(int64_t count, int64_t size, const Runtime& runtime)
      : size_((size + 63) / 64 * 64),
        release_(runtime.release),
        memory_(static_cast<T*>(runtime.allocate(count * size_ * sizeof(T)))) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    release_(memory_);
  }

  T* operator[](int64_t index) const {
    return memory_ + index * size_;
  }

 private:
  int64_t size_;
  void (*release_)(void*);
  T* memory_;
};

// Records whether a task has thrown, and lets a thread sleep until another task
// has made progress. Nobody waits once a task has thrown.
class Progress {
 public:
  bool failed() const {
    return failed_;
  }
  void fail() {
    failed_ = true;
    wake();
  }

  template <typename F>
  void wait_until(const F& done) {
    if (done()) {
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    woken_.wait(lock, [&] { return done() || failed_; });
    --waiting_;
  }
  // Wakes the waiting threads, which then check their condition again.
  void wake() {
    if (waiting_ > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_.notify_all();
    }
  }

 private:
  std::atomic<bool> failed_{false};
  std::atomic<int64_t> waiting_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
};

// Note [Ordered sums of attn]
// Tasks on different threads add to the same sum. If the order of additions
// depended on the threads, so would the rounding. So it is fixed: a task
// computes its addend in a memory slot, starting from zero, and hands it in. If
// all earlier addends have been added, its thread adds it, and then later ones
// that were handed in early. So no thread waits for its turn. A thread sleeps
// only if the slot of its task still holds the addend of the task `slots`
// before it. Tasks start in order, so the first unfinished task never waits.
template <typename T>
class OrderedSums {
 public:
  // There are `sums` sums of `addends` addends each. Tasks that add to the same
  // sum are `stride` apart.
  C10_NOINLINE OrderedSums(
      int64_t sums,
      int64_t addends,
      int64_t stride,
      int64_t slots,
      int64_t slot_size,
      const Runtime& runtime,
      Progress& progress)
      : addends_(addends),
        stride_(stride),
        sums_(sums),
        slots_(slots),
        memory_(slots, slot_size, runtime),
        progress_(progress) {
    for (const auto i : c10::irange(slots)) {
      slots_[i].free_for = i;
    }
  }

  // Returns the memory for the addend of a task.
  C10_NOINLINE T* slot(int64_t task) {
    progress_.wait_until([&] { return slot_of(task).free_for == task; });
    return memory_[task % slots()];
  }

  // Hands in the addend in the slot of `task`, which is number `turn` of its
  // sum. Calls add(turn, addend) for each addend that can be added now. If
  // another thread is adding to this sum, that thread adds this addend too.
  template <typename F>
  C10_NOINLINE void hand_in(
      int64_t task, int64_t sum, int64_t turn, const F& add) {
    auto& state = sums_[sum];
    slot_of(task).holds = task;
    const auto first = task - turn * stride_;
    const auto is_next = [&] {
      const int64_t next = first + state.turn * stride_;
      return state.turn < addends_ && slot_of(next).holds == next;
    };
    while (is_next() && !state.is_adding.exchange(true)) {
      while (is_next()) {
        const int64_t next = first + state.turn * stride_;
        add(state.turn, memory_[next % slots()]);
        ++state.turn;
        slot_of(next).free_for = next + slots();
        progress_.wake();
      }
      state.is_adding = false;
    }
  }

 private:
  struct alignas(64) Slot {
    std::atomic<int64_t> free_for{0}; // the next task that may use the slot
    std::atomic<int64_t> holds{-1};   // the task whose addend was handed in
  };
  struct alignas(64) Sum {
    std::atomic<int64_t> turn{0}; // the number of the next addend
    std::atomic<bool> is_adding{false};
  };

  int64_t slots() const {
    return static_cast<int64_t>(slots_.size());
  }
  Slot& slot_of(int64_t task) {
    return slots_[task % slots()];
  }

  int64_t addends_, stride_;
  std::vector<Sum> sums_;
  std::vector<Slot> slots_;
  Scratch<T> memory_;
  Progress& progress_;
};

// Calls task(i, thread) for each i < tasks. Each thread takes the next `step`
// tasks, in order, so a task may wait for earlier ones. No task starts after
// one has thrown.
template <typename F>
void run_in_order(
    const Runtime& runtime,
    int64_t tasks,
    int64_t step,
    int64_t threads,
    Progress& progress,
    const F& task) {
  std::atomic<int64_t> next{0};
  auto take_tasks = [&](int64_t thread) {
    try {
      while (!progress.failed()) {
        const auto begin = next.fetch_add(step, std::memory_order_relaxed);
        if (begin >= tasks) {
          break;
        }
        const auto end = std::min(begin + step, tasks);
        for (auto i = begin; i < end && !progress.failed(); ++i) {
          task(i, thread);
        }
      }
    } catch (...) {
      progress.fail();
      throw;
    }
  };
  const auto call = [](void* context, int64_t thread) {
    (*static_cast<decltype(take_tasks)*>(context))(thread);
  };
  runtime.run(threads, call, &take_tasks);
}

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
