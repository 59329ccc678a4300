# Owner(s): ["module: cpu"]

"""How many cores attn's CPU kernel keeps busy: a model of its schedule, ATen/native/cpu/
AttnBackward.h and AttnSchedule.h, in a time that is counted, not measured."""

import ctypes
import heapq
import itertools
import sys
import unittest

from test_attn_products import CAPABILITY, FLAGS, library

from torch.testing._internal.common_utils import run_tests, TEST_WITH_ASAN, TestCase


# plan() says how threads share the backward of one matrix by FMA, in floats: the grid of tiles, how
# many tasks a thread takes at once, and the slots for addends of grad_q, grad_k and grad_v.
SOURCE = """
#include <ATen/native/cpu/AttnKernels.h>

using namespace at::native::attn_cpu;

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

    def test_busy_cores(self):
        for sizes, busy in self.BUSY.items():
            alone = backward_time(*sizes, 1)
            for threads, least in zip(self.THREADS, busy):
                with self.subTest(sizes=sizes, threads=threads):
                    self.assertGreater(alone / backward_time(*sizes, threads), least)


if __name__ == "__main__":
    run_tests()
