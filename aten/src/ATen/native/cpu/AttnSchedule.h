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

// How threads share the tasks of attn, add to the same sums, and the memory
// that each has.

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

// What the kernels ask of their caller: threads and memory.
struct Runtime {
  // How many threads share this work, which is a number of multiplications.
  int64_t (*threads)(double work);
  // Calls task(context, thread) on each of `threads` threads, and waits.
  void (*run)(
      int64_t threads,
      void (*task)(void* context, int64_t thread),
      void* context);
  void* (*allocate)(size_t bytes); // aligned to 64 bytes
  void (*release)(void* memory);
  bool may_use_brgemm; // of oneDNN
};

// The quotient and the remainder. Where the divisor is 1, as in all divisions
// for a tiny sample, they would take longer than the sample.
inline std::pair<int64_t, int64_t> divide(int64_t x, int64_t divisor) {
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

// Memory for each of some threads, or slots.
template <typename T>
class Scratch {
 public:
  Scratch(int64_t count, int64_t size, const Runtime& runtime)
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

// Whether a task has thrown, and a place to sleep for a thread that waits for
// what another task does. Nobody waits once a task has thrown.
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
  // Wakes the threads that wait, so that they look again.
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
// Tasks that run on different threads add to the same sum. An order that
// depended on the threads would give other bits from run to run, so the addends
// of a sum have an order. A task makes its addend in a slot of memory, from
// zero, and hands it in. If all addends before it are added, its thread adds
// it, and then those after it that were handed in early. So no thread waits for
// a turn; it waits, asleep, only if the slot that its task wants still holds
// the addend of the task `slots` before it. Tasks are taken in order, so the
// first task that isn't finished never waits.
template <typename T>
class OrderedSums {
 public:
  // `sums` sums of `addends` each. The tasks that add to one sum are `stride`
  // apart.
  OrderedSums(
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

  // Memory for the addend of a task.
  T* slot(int64_t task) {
    progress_.wait_until([&] { return slot_of(task).free_for == task; });
    return memory_[task % slots()];
  }

  // Hands in the addend that the task made in its slot: number `turn` of the
  // sum. Calls add(turn, addend) for each addend whose turn it is, unless
  // another thread is doing that, which then does it for this one too.
  template <typename F>
  void hand_in(int64_t task, int64_t sum, int64_t turn, const F& add) {
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
    std::atomic<int64_t> free_for{0}; // the task that may use it next
    std::atomic<int64_t> holds{-1};   // the task that has handed in its addend
  };
  struct alignas(64) Sum {
    std::atomic<int64_t> turn{0}; // the addend that is added next
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

// task(i, thread) for i = 0, 1, ...: each thread takes the next `step` tasks
// that none has taken, so a task may wait for those before it. None is begun
// after one has thrown.
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
