# Owner(s): ["module: cpu"]

"""How many cores attn's CPU kernel keeps busy by its schedule, ATen/native/cpu/AttnForward.h,
AttnBackward.h and AttnSchedule.h, in a time that is counted, not measured."""

import ctypes
import heapq
import sys
import unittest

from test_attn_products import CAPABILITY, FLAGS, library

from torch.testing._internal.common_utils import run_tests, TEST_WITH_ASAN, TestCase


# forward() says what the tasks of the forward of one matrix by FMA are, in floats and in order: how
# many elements of attn each computes. It returns how many tasks there are. backward() runs the
# kernel's own schedule of the backward, on threads that do no work but count how long it takes. It
# returns how many of them work at once, on average, or -1 if some would sleep for ever.
SOURCE = """
#include <ucontext.h>

#include <condition_variable>
#include <cstdlib>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

// The kernel's threads, of which one runs at a time: that whose work ends first.
struct Threads {
  struct Thread {
    ucontext_t state;
    std::vector<char> stack = std::vector<char>(1 << 16);
  };
  std::vector<Thread> all;
  std::set<std::pair<int64_t, int64_t>> ready; // when, and the thread
  std::vector<int64_t> asleep;
  int64_t now = 0, running = 0, worked = 0;
  void (*task)(void* context, int64_t thread);
  void* context;
  ucontext_t main;

  void run();
  void pause() {
    swapcontext(&all[running].state, &main);
  }
  void work(int64_t duration) {
    worked += duration;
    ready.emplace(now + duration, running);
    pause();
  }
  void sleep() {
    asleep.push_back(running);
    pause();
  }
  void wake() {
    for (const auto thread : asleep) {
      ready.emplace(now, thread);
    }
    asleep.clear();
  }
} threads;

void Threads::run() {
  for (auto& [state, stack] : all) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack.data();
    state.uc_stack.ss_size = stack.size();
    state.uc_link = &main;
    makecontext(&state, [] { threads.task(threads.context, threads.running); }, 0);
    ready.emplace(now, ready.size());
  }
  while (!ready.empty()) {
    std::tie(now, running) = *ready.begin();
    ready.erase(ready.begin());
    swapcontext(&main, &all[running].state);
  }
}

namespace at::native::attn_cpu::std { // which the kernel takes for std
using namespace ::std;

struct condition_variable {
  template <typename F>
  void wait(unique_lock<mutex>& lock, const F& done) {
    while (!done()) {
      lock.unlock();
      threads.sleep();
      lock.lock();
    }
  }
  void notify_all() {
    threads.wake();
  }
};

} // namespace at::native::attn_cpu::std

#include <ATen/native/cpu/AttnBackward.h>

namespace at::native::attn_cpu {

void* allocate(size_t bytes) {
  return std::aligned_alloc(64, (bytes + 64) / 64 * 64);
}

int64_t count(double) {
  return threads.all.size();
}

std::vector<int64_t> tasks;

struct Recorder {
  using T = float;
  static constexpr int64_t ROW_STEP = 8; // AVX-512's
  struct Layout {
    int64_t size = 0;
    Layout(int64_t, int64_t, int64_t, int64_t, int64_t) {}
  };

  Recorder(const Layout&, float*) {}
  template <typename M, typename A>
  void forward(
      bool accumulate, const M& q, const M& k, const M&, const A&, const Form& form, bool, float*) {
    if (!accumulate) {
      tasks.push_back(0);
    }
    tasks.back() += q.rows * form.kept(q.rows - 1, k.rows);
  }
};

extern "C" int64_t forward(
    int64_t m, int64_t n, int64_t d, int64_t e, int64_t size, bool is_causal, int64_t* found) {
  std::vector<float> memory(m * e);
  const int64_t sizes[] = {m, e}, strides[] = {e, 1};
  threads.all = std::vector<Threads::Thread>(size);
  tasks.clear();
  const auto run = [](int64_t, void (*task)(void*, int64_t), void* context) { task(context, 0); };
  ForwardArgs<float> args{Sizes{1, m, n, d, e}, {memory.data(), sizes, strides, 2}};
  args.form.diagonal = is_causal ? 0 : Form::NO_DIAGONAL;
  forward_by<float, Recorder>(args, {count, run, allocate, std::free});
  std::copy(tasks.begin(), tasks.end(), found);
  return tasks.size();
}

// To add to one takes as long as ADDITION multiply-adds.
struct Number {
  Number(int) {}
};
constexpr int64_t ADDITION = 8;

void add_sum(bool, Number*, const Number*, int64_t count) {
  threads.work(ADDITION * count);
}
void convert(Number*, const Number*, int64_t) {}

struct Worker {
  using T = Number;
  static constexpr int64_t ROW_STEP = 8, LONGEST = 8, MIN_TILE = 96; // those of FMA with AVX-512
  struct Layout {
    int64_t size = 0;
    Layout(const BackwardArgs<Number>&, int64_t, int64_t) {}
  };

  Worker(const Layout&, Number*) {}
  // The scores again, and grad_output vᵀ.
  void start(const Tile<Number>& tile, bool) {
    d = tile.q.rows * tile.k.rows * tile.q.cols;
    e = tile.q.rows * tile.k.rows * tile.v.cols;
    threads.work(d + e);
  }
  void add(size_t gradient, bool, Number*) {
    threads.work(gradient == 2 ? e : d);
  }

  int64_t d, e;
};

extern "C" double backward(int64_t m, int64_t n, int64_t d, int64_t e, int64_t size) {
  std::vector<Number> memory((m + n) * (d + e), 0);
  const int64_t q[] = {m, d}, k[] = {n, d}, v[] = {n, e}, output[] = {m, e};
  const int64_t by_d[] = {d, 1}, by_e[] = {e, 1};
  const auto x = memory.data(), x_k = x + m * d, x_v = x_k + n * d;
  const BackwardArgs<Number> args{
      Sizes{1, m, n, d, e},
      {x, q, by_d, 2}, {x_k, k, by_d, 2}, {x_v, v, by_e, 2},
      {x_v + n * e, output, by_e, 2}, {}, {x, q, by_d, 2}, {x_k, k, by_d, 2}, {x_v, v, by_e, 2}};
  threads = {};
  threads.all = std::vector<Threads::Thread>(size);
  const auto run = [](int64_t, void (*task)(void*, int64_t), void* context) {
    threads.task = task;
    threads.context = context;
    threads.run();
  };
  backward_by<Number, Worker>(args, {count, run, allocate, std::free});
  return threads.asleep.empty() ? double(threads.worked) / threads.now : -1;
}

} // namespace at::native::attn_cpu
"""


def forward_tasks(m, n, d, e, threads, is_causal):
    """How many elements of attn each task of the forward computes, in the order of tasks."""
    found = (ctypes.c_int64 * (m + n))()
    sizes = map(ctypes.c_int64, (m, n, d, e, threads))
    count = library("attn_schedule", SOURCE).forward(*sizes, is_causal, found)
    return found[:count]


def forward_cores(*problem):
    """How many cores are busy if each takes the next task when it has done one."""
    tasks = forward_tasks(*problem)
    *_, threads, _ = problem
    ends = [0] * threads
    for task in tasks:
        heapq.heapreplace(ends, ends[0] + task)
    return sum(tasks) / max(ends)


def backward_cores(*sizes_and_threads):
    """How many cores are busy in the backward of one matrix."""
    backward = library("attn_schedule", SOURCE).backward
    backward.restype = ctypes.c_double
    return backward(*map(ctypes.c_int64, sizes_and_threads))


@unittest.skipIf(CAPABILITY not in FLAGS, "another architecture's")
@unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
@unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
class TestAttnSchedule(TestCase):
    # m, n, d and e, and how many of THREADS cores are busy at least.
    THREADS = (2, 8, 32, 64)
    BUSY = {
        (512, 512, 64, 64): (1.9, 7, 23, 23),
        (1024, 1024, 256, 256): (1.9, 7, 24, 27),
        (4096, 4096, 16, 16): (1.9, 7.9, 30, 59),
        (4096, 4096, 64, 64): (1.9, 7.9, 30, 59),
        (16384, 16384, 64, 64): (1.9, 7.9, 31, 63),
        (65536, 64, 64, 64): (1.9, 7.9, 30, 53),
        (64, 65536, 64, 64): (1.9, 7.8, 28, 54),
        (1, 100000, 1, 1): (1.9, 7, 21, 42),
        (100000, 1, 1, 1): (1.9, 7, 21, 32),
    }

    # By n, how many of THREADS cores the forward of n x n keeps busy at least, causal or not.
    FORWARD_BUSY = {
        512: (1.9, 7.8, 19, 19),
        1024: (1.9, 7.8, 22, 38),
        4096: (1.9, 7.8, 31, 62),
        16384: (1.9, 7.8, 31, 62),
    }

    def test_busy_cores_of_the_forward(self):
        for n, busy in self.FORWARD_BUSY.items():
            for threads, least in zip(self.THREADS, busy):
                for is_causal in (False, True):
                    with self.subTest(n=n, threads=threads, is_causal=is_causal):
                        cores = forward_cores(n, n, 64, 64, threads, is_causal)
                        self.assertGreater(cores, least)

    def test_busy_cores(self):
        for sizes, busy in self.BUSY.items():
            for threads, least in zip(self.THREADS, busy):
                with self.subTest(sizes=sizes, threads=threads):
                    self.assertGreater(backward_cores(*sizes, threads), least)


if __name__ == "__main__":
    run_tests()
