# Owner(s): ["module: memory usage"]

"""The memory of a large attn on a CPU: in huge pages, and else as any tensor's."""

import json
import os
import unittest

from test_attn_kernel import allocations, in_process, memory, MIB

import torch
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import (
    DeterministicGuard,
    IS_LINUX,
    parametrize,
    run_tests,
    TEST_WITH_ASAN,
    TestCase,
)


aten = torch.ops.aten


def mappings():
    """The beginning, the end and the flags of each of this process."""
    with open("/proc/self/smaps") as file:
        for line in file:
            field, *words = line.split()
            if "-" in field:
                begin, end = (int(x, 16) for x in field.split("-"))
            elif field == "VmFlags:":
                yield begin, end, words


def in_huge_pages(x):
    """Whether the memory of x is advised to be."""
    (flags,) = (f for begin, end, f in mappings() if begin <= x.data_ptr() < end)
    return "hg" in flags


def advised():
    """For a process of its own: a line of JSON, for each size of attn in MiB whether it is in
    huge pages, whether a later tensor is, and in how many mappings more than before.
    """
    before = sum("hg" in flags for _, _, flags in mappings())
    found = []
    for size in (1, 4, 8, 16, 31, 32, 64, 100):
        inputs = [torch.ones(rows, 2) for rows in (512, 512 * size, 512 * size)]
        results = torch.attn(*inputs)
        attn = in_huge_pages(results.attn)
        grads = aten._attn_backward(
            results.output, results.attn, *inputs, results.attn, (True, True, True)
        )
        del results, grads
        later = [torch.empty(512, 512 * size) for _ in range(2)]
        others = any(map(in_huge_pages, later))
        after = sum("hg" in flags for _, _, flags in mappings())
        found.append((size, attn, others, after - before))
    print(json.dumps(found))


def without_memory():
    """For a process of its own: what attn says when there is none for it."""
    import resource  # Unix only

    inputs = [torch.ones(rows, 2) for rows in (2**13, 2**13, 2**13)]
    torch.attn(*[x[:9] for x in inputs])
    used = memory("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
    try:
        torch.attn(*inputs)
        message = ""
    except RuntimeError as error:
        message = str(error)
    print(json.dumps(message))


class TestAttnPages(TestCase):
    # Whether malloc keeps such memory or gives it back.
    @unittest.skipUnless(IS_LINUX, "huge pages")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    @parametrize("kept", (False, True))
    def test_huge_pages_are_its_own(self, device, kept):
        names = ("MMAP", "TRIM") if kept else ()
        environment = {f"MALLOC_{name}_THRESHOLD_": str(2**30) for name in names}
        found, _ = in_process(advised, **environment)
        has_huge_pages = os.path.exists("/sys/kernel/mm/transparent_hugepage")
        for size, attn, others, more in found:
            with self.subTest(size=size):
                self.assertEqual(attn, has_huge_pages and size >= 32)
                self.assertFalse(others)
                self.assertEqual(more, 0)

    @unittest.skipUnless(IS_LINUX, "/proc")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    def test_large_attn_without_memory(self, device):
        message, _ = in_process(without_memory)
        self.assertIn("DefaultCPUAllocator: can't allocate memory", message)

    # It is in memory of its own, and else as any tensor.
    @dtypes(torch.float, torch.bfloat16)
    def test_large_attn(self, device, dtype):
        m, n = 1025, 32 * MIB // dtype.itemsize // 1024
        inputs = [torch.randn(rows, 2).to(dtype) for rows in (m, n, n)]
        attn = torch.attn(*inputs).attn
        expected = attn.clone()
        self.assertTrue(attn.untyped_storage().resizable())
        self.assertEqual(attn.untyped_storage().nbytes(), attn.nbytes)
        self.assertFalse(attn.is_shared() or attn.is_inference() or attn.is_pinned())
        self.assertTrue(torch.equal(torch._lazy_clone(attn), expected))
        for rows in (2 * m, m - 1, 1, m):
            self.assertTrue(torch.equal(attn.resize_(rows, n)[:1], expected[:1]))
        attn.untyped_storage().resize_(0)

        shared = torch.attn(*inputs).attn.share_memory_()
        self.assertTrue(shared.is_shared())
        self.assertTrue(torch.equal(shared, expected))
        # The array keeps the memory.
        array = torch.attn(*inputs).attn.view(torch.int16).numpy()
        self.assertTrue(torch.equal(torch.from_numpy(array).view(dtype), expected))
        with torch.inference_mode():
            self.assertTrue(torch.attn(*inputs).attn.is_inference())
        with DeterministicGuard(True, fill_uninitialized_memory=True):
            self.assertTrue(torch.equal(torch.attn(*inputs).attn, expected))

        def forget():
            torch.attn(*inputs)

        _, sizes = allocations(forget)
        self.assertIn(attn.nbytes, sizes)
        self.assertEqual(sum(sizes), 0)


instantiate_device_type_tests(TestAttnPages, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
