// CUDA on a CPU, as far as linear_cuda.cu goes: a block's threads take turns,
// each until it comes to a barrier.
#pragma once

#include <csetjmp>
#include <ucontext.h>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __shared__
#define C10_CUDA_KERNEL_LAUNCH_CHECK() emulator::check()

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx;

namespace emulator {

inline int launches = 0;

// The current device, and the one that all tensors are on.
constexpr int kDevice = 1;
inline int device = 0;

struct Thread {
  ucontext_t context; // where it begins
  jmp_buf place; // where it goes on: a switch by it asks nothing of the kernel
  std::vector<char> stack;
  bool begun, done;
};

inline std::vector<Thread> threads; // of the block
inline jmp_buf scheduler;
inline int current;     // thread
inline int alive;       // threads that have not ended
inline int come, times; // how many are at the barrier; how often all came
inline bool moved;      // since all threads had their last turn
inline std::function<void()> body;
inline std::string error;

inline void check() {
  const std::string what = std::exchange(error, {});
  TORCH_CHECK(what.empty(), what);
}

inline void barrier() {
  const int before = times;
  if (++come == alive) {
    come = 0;
    ++times;
  }
  while (times == before) {
    if (!_setjmp(threads[current].place)) {
      _longjmp(scheduler, 1);
    }
  }
  moved = true;
}

inline void run_thread() {
  body();
  threads[current].done = true;
  --alive;
  _longjmp(scheduler, 1);
}

// Lets a thread run until it waits for the others, or ends.
inline void take_turn(Thread& thread) {
  if (_setjmp(scheduler)) {
    return;
  }
  threadIdx.x = current;
  if (thread.begun) {
    _longjmp(thread.place, 1);
  }
  thread.begun = true;
  setcontext(&thread.context);
}

template <typename Args>
auto launch(
    void (*kernel)(Args),
    int blocks,
    int size,
    int /*shared*/,
    int /*stream*/) {
  return [=](const Args& args) {
    TORCH_CHECK(
        device == kDevice,
        "a launch: the tensors are not on the current device");
    ++launches;
    threads.resize(size);
    body = [&] { kernel(args); };
    for (int i = 0; i < blocks; ++i) {
      blockIdx.x = i;
      alive = size;
      come = 0;
      for (Thread& t : threads) {
        t.stack.resize(128 << 10);
        t.begun = t.done = false;
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data();
        t.context.uc_stack.ss_size = t.stack.size();
        t.context.uc_link = nullptr;
        makecontext(&t.context, run_thread, 0);
      }
      while (alive) {
        moved = false;
        for (current = 0; current < size; ++current) {
          if (!threads[current].done) {
            take_turn(threads[current]);
            moved = moved || threads[current].done;
          }
        }
        if (!moved) {
          error = "deadlock: not all threads came to a barrier";
          return;
        }
      }
    }
  };
}

} // namespace emulator

inline void __syncthreads() {
  emulator::barrier();
}

namespace c10::cuda {
inline int getCurrentCUDAStream() {
  return 0;
}

class CUDAGuard {
  const int before = std::exchange(emulator::device, emulator::kDevice);

 public:
  explicit CUDAGuard(c10::Device /*of a tensor*/) {}
  ~CUDAGuard() {
    emulator::device = before;
  }
};
} // namespace c10::cuda
