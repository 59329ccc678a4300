# Owner(s): ["module: cpu"]

"""How many cores attn's CPU kernel keeps busy: a model of its schedule, ATen/native/cpu/
AttnForward.h, AttnBackward.h and AttnSchedule.h, in a time that is counted, not measured."""

import ctypes
import heapq
import itertools
import sys
import unittest

from test_attn_products import CAPABILITY, FLAGS, library

from torch.testing._internal.common_utils import run_tests, TEST_WITH_ASAN, TestCase


# forward() says what the tasks of the forward of one matrix by FMA are, in floats and in order: how
# many elements of attn each computes. It returns how many tasks there are. plan() says how threads
# share the backward: the grid of tiles, how many tasks a thread takes at once, and the slots for
# addends of grad_q, grad_k and grad_v.
SOURCE = """
#include <ATen/native/cpu/AttnKernels.h>

#include <cstdlib>
#include <vector>

using namespace at::native::attn_cpu;

std::vector<int64_t> tasks;
int64_t threads_now;

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
    int64_t m, int64_t n, int64_t d, int64_t e, int64_t threads, bool is_causal, int64_t* found) {
  std::vector<float> memory(m * e);
  const int64_t sizes[] = {m, e}, strides[] = {e, 1};
  threads_now = threads;
  tasks.clear();
  const Runtime runtime{
      [](double) { return threads_now; },
      [](int64_t, void (*task)(void*, int64_t), void* context) { task(context, 0); },
      [](size_t bytes) { return std::aligned_alloc(64, (bytes + 64) / 64 * 64); },
      std::free};
  ForwardArgs<float> args{Sizes{1, m, n, d, e}, {memory.data(), sizes, strides, 2}};
  args.form.diagonal = is_causal ? 0 : Form::NO_DIAGONAL;
  forward_by<float, Recorder>(args, runtime);
  std::copy(tasks.begin(), tasks.end(), found);
  return tasks.size();
}

extern "C" void plan(
    int64_t m, int64_t n, int64_t d, int64_t e, int64_t threads, int64_t* found) {
  const Grid<FmaBackward<float>> grid(Sizes{1, m, n, d, e});
  const auto rows = std::min(grid.rows, m), cols = std::min(grid.cols, n);
  const auto tiles = grid.row_blocks * grid.col_blocks;
  const auto step = tasks_at_once(tiles, threads, std::max({rows * d, cols * d, cols * e}));
  const int64_t all[] = {grid.row_blocks, grid.col_blocks, rows, cols, step};
  found = std::copy(std::begin(all), std::end(all), found);
  for (const auto size : {rows * d, cols * d, cols * e}) {
    *found++ = slots_for(size, threads, step);
  }
}
"""
ADDITION = 8  # multiply-adds that take as long as to add one number to a sum


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


class OrderedSums:
    """As in AttnSchedule.h: addends are handed in in slots, and added in order."""

    def __init__(self, stride, addends, slots, product, addition):
        self.stride, self.addends = stride, addends
        self.product, self.addition = product, addition  # how long they take
        self.free_for = list(range(slots))
        self.holds = [-1] * slots
        self.turns, self.adding = {}, set()

    def add(self, task, index, turn):
        """Yields how long the thread works, or None where it sleeps until another has worked."""
        if self.addends == 1:
            yield self.product
            return
        slots = len(self.holds)
        while self.free_for[task % slots] != task:
            yield None
        yield self.product
        self.holds[task % slots] = task
        first = task - turn * self.stride
        while index not in self.adding:
            next_turn = self.turns.get(index, 0)
            found = first + next_turn * self.stride
            if next_turn == self.addends or self.holds[found % slots] != found:
                return
            self.adding.add(index)
            yield self.addition
            self.adding.remove(index)
            self.turns[index] = next_turn + 1
            self.free_for[found % slots] = found + slots


def backward_time(m, n, d, e, threads):
    """How long the backward of one matrix takes, in multiply-adds of a core."""
    found = (ctypes.c_int64 * 8)()
    library("attn_schedule", SOURCE).plan(
        *map(ctypes.c_int64, (m, n, d, e, threads)), found
    )
    row_blocks, col_blocks, rows, cols, step, *slots = found
    work = rows * cols
    sums = [
        OrderedSums(1, col_blocks, slots[0], work * d, ADDITION * rows * d),
        OrderedSums(col_blocks, row_blocks, slots[1], work * d, ADDITION * cols * d),
        OrderedSums(col_blocks, row_blocks, slots[2], work * e, ADDITION * cols * e),
    ]
    tasks = iter(range(row_blocks * col_blocks))

    def thread():
        while taken := list(itertools.islice(tasks, step)):
            for task in taken:
                row, col = divmod(task, col_blocks)
                yield work * (d + e)  # the scores again, and grad_output vᵀ
                yield from sums[0].add(task, row, col)
                yield from sums[1].add(task, col, row)
                yield from sums[2].add(task, col, row)

    ready = [(0, i, thread()) for i in range(threads)]
    asleep = []
    while ready:
        now, i, at_work = heapq.heappop(ready)
        took = next(at_work, StopIteration)
        if took is None:
            asleep.append((i, at_work))
            continue
        if took is not StopIteration:
            heapq.heappush(ready, (now + took, i, at_work))
        for entry in asleep:
            heapq.heappush(ready, (now, *entry))
        asleep.clear()
    assert not asleep, "threads sleep for ever"
    return now


@unittest.skipIf(CAPABILITY not in FLAGS, "another architecture's")
@unittest.skipIf(sys.platform == "win32", "the compiler's options are GCC's")
@unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
class TestAttnSchedule(TestCase):
    # m, n, d and e, and how many of THREADS cores are busy at least.
    THREADS = (2, 8, 32, 64)
    BUSY = {
        (512, 512, 64, 64): (1.9, 7, 17, 28),
        (1024, 1024, 256, 256): (1.9, 7, 17, 30),
        (4096, 4096, 16, 16): (1.9, 7.8, 29, 53),
        (4096, 4096, 64, 64): (1.9, 7.8, 29, 53),
        (16384, 16384, 64, 64): (1.9, 7.9, 31, 62),
        (65536, 64, 64, 64): (1.9, 7.8, 29, 52),
        (64, 65536, 64, 64): (1.9, 7.8, 28, 52),
        (1, 100000, 1, 1): (1.9, 7, 21, 41),
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
            alone = backward_time(*sizes, 1)
            for threads, least in zip(self.THREADS, busy):
                with self.subTest(sizes=sizes, threads=threads):
                    self.assertGreater(alone / backward_time(*sizes, threads), least)


if __name__ == "__main__":
    run_tests()
