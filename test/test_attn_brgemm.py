# Owner(s): ["module: intel"]

"""attn in bfloat16 and half by products of pairs: VDPBF16PS's and oneDNN's, what it asks of
these, and how many it keeps.
"""

import ctypes
import json
import os
import random
import sys
import tempfile
import unittest
from functools import partial

from test_attn_kernel import (
    both_ways,
    by_edge,
    EDGES,
    exact,
    in_process,
    KernelTestCase,
    printed_by,
    run_edges,
    sized,
)
from test_attn_products import CAPABILITY, FLAGS

import torch
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import IS_LINUX, run_tests, TEST_WITH_ASAN
from torch.utils.cpp_extension import load


aten = torch.ops.aten
# How many kernels cpublas keeps for each thread and dtype.
MAX_KERNELS = 20
# What sizes of products the kernel asks brgemm for: how many, and a line for each product
# of which a part is missing, twice there, or cut otherwise than with other rows.
SIZES = """
#include <ATen/native/cpu/AttnBrgemm.h>

#include <cstdio>
#include <set>
#include <tuple>
#include <vector>

int main() {
  std::set<std::tuple<int64_t, int64_t, int64_t, bool>> kernels;
  for (int64_t terms = 1; terms <= 1100; ++terms) {
    std::vector<int64_t> cuts; // of one row
    for (int64_t rows = 1; rows <= at::native::attn_cpu::BRGEMM_ROWS[0]; ++rows) {
      std::vector<std::vector<int64_t>> of_row(rows);
      std::vector<int64_t> end(rows, 0);
      bool in_order = true;
      at::native::attn_cpu::for_brgemm_parts(
          rows,
          terms,
          [&](const at::native::attn_cpu::BrgemmSizes& sizes, int64_t row, int64_t term) {
            kernels.emplace(sizes.rows, sizes.cols, sizes.terms, term > 0);
            for (int64_t r = row; r < std::min(rows, row + sizes.rows); ++r) {
              in_order = in_order && end[r] == term;
              end[r] += sizes.terms;
              of_row[r].push_back(term);
            }
          });
      if (rows == 1) {
        cuts = of_row[0];
      }
      for (int64_t r = 0; r < rows; ++r) {
        if (!in_order || end[r] < terms || of_row[r] != cuts) {
          std::printf("%d x %d\\n", int(rows), int(terms));
          break;
        }
      }
    }
  }
  std::printf("%d\\n", int(kernels.size()));
}
"""
# Sources begin with this: what they include, and a matrix as the kernel takes it.
DENSE = """
#include <ATen/native/cpu/AttnKernels.h>
#include <ATen/native/cpu/AttnTensors.h>

using namespace at::native::attn_cpu;
using S = at::BFloat16;

template <typename X>
struct Dense {
  X* data;
  int64_t sizes[2], strides[2];
  Dense(void* x, int64_t rows, int64_t cols)
      : data(static_cast<X*>(x)), sizes{rows, cols}, strides{cols, 1} {}
  operator MatrixBatch<X>() const {
    return {data, sizes, strides, 2};
  }
};
"""
# These compute attn and its backward by oneDNN's products, also where attn multiplies otherwise.
BY_BRGEMM = """
extern "C" void by_brgemm(int64_t m, int64_t n, int64_t d, int64_t e, void** x) {
  const Sizes sizes{1, m, n, d, e};
  const Dense<const S> q(x[0], m, d), k(x[1], n, d), v(x[2], n, e), grad_output(x[3], m, e),
      grad_attn(x[4], m, n), given(x[6], m, n);
  const Dense<S> output(x[5], m, e), attn(x[6], m, n), grad_q(x[7], m, d), grad_k(x[8], n, d),
      grad_v(x[9], n, e);
  const auto runtime = aten_runtime();
  forward_by<S, ForwardTile<VnniTiles<Brgemm<S>>>>({sizes, output, attn, q, k, v}, runtime);
  backward_by<S, BackwardTile<VnniTiles<Brgemm<S>>>>(
      {sizes, grad_q, grad_k, grad_v, grad_output, grad_attn, q, k, v, given}, runtime);
}
"""


# This stands in for AttnVnni.h, which needs AVX-512: it does the same by any instruction set,
# slowly. With it the classes that call it are compiled for this machine. Operands are copies, row
# after row.
PLAIN = """
#pragma once

#include <ATen/native/cpu/AttnBackward.h>
#include <ATen/native/cpu/AttnBackwardTile.h>
#include <ATen/native/cpu/AttnBrgemm.h>
#include <ATen/native/cpu/AttnForward.h>
#include <ATen/native/cpu/AttnForwardTile.h>

#define CPU_CAPABILITY_AVX512

namespace at::native::attn_cpu {
inline namespace CPU_CAPABILITY {

struct Plain {
  using Element = at::BFloat16;
  struct Context {};
  static vec::Vectorized<Element> round(const Pair<float>& x) {
    return round_pair<Element>(x);
  }
};

template <typename Micro>
struct VnniProducts {
  using S = typename Micro::Element;
  using T = float;
  using Vec = vec::Vectorized<S>;
  static constexpr int64_t W = Vec::size(), MC = BRGEMM_ROWS[0], LD = BRGEMM_LD;
  static constexpr bool by_pairs = false;

  struct Left {
    S* data;
    int64_t rows, cols;
    int64_t row_stride = at::round_up(cols, W);
    S* at(int64_t row, int64_t col) const {
      return data + row * row_stride + col;
    }
  };
  using Right = Left;
  static int64_t left_size(int64_t rows, int64_t cols) {
    return rows * at::round_up(cols, W) / 2;
  }
  static int64_t right_size(int64_t rows, int64_t cols) {
    return left_size(rows, cols);
  }
  static Left left(S* copy, const Matrix<const S>& x) {
    const Left result{copy, x.rows, x.cols};
    for (const auto i : c10::irange(x.rows)) {
      for (const auto j : c10::irange(x.cols)) {
        *result.at(i, j) = x.at(i, j);
      }
    }
    return result;
  }
  static Left right(S* copy, const Matrix<const S>& x) {
    return left(copy, x);
  }
  static Left columns(S* copy, const Matrix<const S>& x) {
    return left(copy, x.t());
  }

  static float sum(const Left& a, int64_t row, const Left& b, int64_t col) {
    float found = 0;
    for (const auto i : c10::irange(a.cols)) {
      found += float(*a.at(row, i)) * float(*b.at(i, col));
    }
    return found;
  }
  static void multiply(
      const Left& a, int64_t row, const Left& b, T* c, int64_t ld = LD) {
    for (const auto i : c10::irange(std::min(MC, a.rows - row))) {
      for (const auto j : c10::irange(b.cols)) {
        c[i * ld + j] = sum(a, row + i, b, j);
      }
    }
  }
  template <typename O>
  static void add_product(bool accumulate, const Left& a, const Left& b, T*, O* out) {
    for (const auto i : c10::irange(a.rows)) {
      for (const auto j : c10::irange(b.cols)) {
        auto& x = out[i * b.cols + j];
        x = O((accumulate ? float(x) : 0) + sum(a, i, b, j));
      }
    }
  }

  static Vec load_row(const Matrix<const S>& x, int64_t row, int64_t col, int64_t count) {
    S gathered[W] = {};
    for (const auto j : c10::irange(std::min(count, W))) {
      gathered[j] = x.at(row, col + j);
    }
    return Vec::loadu(gathered);
  }
  template <typename F>
  static void for_vectors(int64_t size, const F& fn) {
    for (int64_t i = 0; i < size; i += W) {
      fn(i, std::min(W, size - i));
    }
  }
};

} // namespace CPU_CAPABILITY
} // namespace at::native::attn_cpu
"""


def compiled(folder, text, plain=False):
    """Compiles C++ that includes the kernel. Returns the library.

    If it is `plain`, PLAIN takes the place of Brgemm and of AttnVnni.h.
    """
    source = os.path.join(folder, "by_brgemm.cpp")
    if plain:
        text = text.replace("Brgemm<S>", "Plain").replace(
            "AttnKernels.h", "AttnVnniTiles.h"
        )
    with open(source, "w") as file:
        file.write(text)
    capability = [f"-DCPU_CAPABILITY={CAPABILITY}", f"-DCPU_CAPABILITY_{CAPABILITY}"]
    flags = ["-O1", "-w", *capability, *FLAGS[CAPABILITY]]
    if plain:
        os.makedirs(header := os.path.join(folder, "ATen", "native", "cpu"))
        with open(os.path.join(header, "AttnVnni.h"), "w") as file:
            file.write(PLAIN)
        flags = [f"-I{folder}", *flags]
    load(
        "by_brgemm",
        [source],
        extra_cflags=flags,
        build_directory=folder,
        is_python_module=False,
    )
    # A process's second library of a name gets a number in it.
    (library,) = (x for x in os.listdir(folder) if x.endswith(".so"))
    return ctypes.CDLL(os.path.join(folder, library))


def call(function, sizes, tensors):
    """Calls C++ with the sizes, then the tensors' data."""
    tensors = [x.contiguous() for x in tensors]
    pointers = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
    function(*map(ctypes.c_int64, sizes), pointers)


def by_brgemm(folder):
    """BY_BRGEMM, compiled: RESULTS from INPUTS and both gradients."""
    library = compiled(folder, DENSE + BY_BRGEMM)

    def run(q, k, v, grad_output, grad_attn):
        given = q, k, v, grad_output, grad_attn
        results = [torch.empty_like(x) for x in (grad_output, grad_attn, q, k, v)]
        sizes = *q.shape[:1], *k.shape, *v.shape[1:]
        call(library.by_brgemm, sizes, (*given, *results))
        return results

    return run


def kernels(seed=0):
    """For a process of its own: prints how many kernels oneDNN makes for many shapes, and for
    which of these a result is another than attn's, though all sums are exact.
    """
    torch.set_num_threads(1)  # each has kernels of its own
    sizes = random.Random(seed)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        run = by_brgemm(folder)
        os.chdir(folder)  # where oneDNN writes them to
        for _ in range(200):
            m, n = sizes.randrange(1, 700), sizes.randrange(1, 700)
            d, e = (sizes.choice((64, sizes.randrange(1, 1025))) for _ in "de")
            inputs, grads = exact(sized(m, n, d, e), torch.bfloat16)
            found = run(*inputs, *grads)
            expected = both_ways(*inputs, *grads, found[1])
            if not all(map(torch.equal, found, expected)):
                wrong.append((m, n, d, e))
        made = [file for file in os.listdir(folder) if file.startswith("dnnl_dump")]
        os.chdir("/")
    # Two more kernels configure AMX's tiles and release them: they are no products.
    products = [file for file in made if "tile" not in file]
    print(json.dumps({"products": products, "wrong": wrong}))


def multiplies_bfloat16():
    """Whether oneDNN does, by AVX-512 or AMX, and attn is compiled for AVX-512."""
    if not IS_LINUX or CAPABILITY != "AVX512":
        return False
    with open("/proc/cpuinfo") as file:
        return "avx512_bf16" in file.read() and torch.backends.mkldnn.is_available()


class TestAttnBrgemm(KernelTestCase):
    # What oneDNN multiplies in these dtypes, where it can, the kernel can as well.
    @by_edge
    @dtypes(torch.bfloat16, torch.half)
    def test_without_onednn(self, device, dtype, case):
        with torch.backends.mkldnn.flags(enabled=False):
            self.assert_results(dtype, case)
            self.assert_exact(dtype, case)

    @dtypes(torch.bfloat16, torch.half)
    def test_sums_without_terms(self, device, dtype):
        for m, n, d, e in ((20, 30, 0, 5), (20, 30, 5, 0), (40, 300, 0, 64)):
            with self.subTest(m=m, n=n, d=d, e=e):
                self.assert_results(
                    dtype, sized(m, n, 64, 64)
                )  # memory is not zero then
                self.assert_results(dtype, sized(m, n, d, e))

    @dtypes(torch.bfloat16, torch.half)
    def test_every_number(self, device, dtype):
        """Each of the 2**16, NaNs with any payload among them, is itself after rounding."""
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[:, None]
        finfo = torch.finfo(dtype)
        # FMA multiplies one column; oneDNN, where it can, 32, of which all but one are zeros.
        for n, width in ((1, 1), (32, 32)):
            with self.subTest(n=n):
                padded = partial(torch.nn.functional.pad, pad=(0, width - 1))
                q, attn = padded(numbers), numbers.new_zeros(2**16, n)
                k = padded(torch.full((n, 1), 1 / n, dtype=dtype))
                gradients = numbers.expand(-1, n)
                grad_q, _, _ = aten._attn_backward(
                    None, gradients, q, k, k, attn, (True, False, False)
                )
                # Products of pairs that are subnormal are zero, and so is what is rounded from such.
                atol = n * finfo.smallest_normal if n > 1 else 0
                self.assertEqual(grad_q[:, :1], numbers, rtol=0, atol=atol)
                _, attn = torch.attn(q, padded(torch.ones_like(k[:, :1])), k)
                self.assertEqual(attn.isnan(), gradients.isnan())

    @unittest.skipIf(TEST_WITH_ASAN, "too slow with ASan")
    def test_cpu_without_bfloat16(self, device):
        """oneDNN has AVX-512 then, but no kernel for bfloat16: attn doesn't ask for one."""
        report, log = in_process(run_edges, ONEDNN_MAX_CPU_ISA="AVX512_CORE")
        self.assertGreater(report["tests"], 5 * len(EDGES))
        self.assertTrue(report["passed"], msg=log)

    @unittest.skipIf(sys.platform == "win32", "the linker's options are those of ELF")
    def test_few_sizes(self, device):
        self.assertLessEqual(int(printed_by("sizes", SIZES)), MAX_KERNELS)

    # cpublas keeps a kernel for each set of sizes and strides as long as the thread lives.
    @unittest.skipUnless(multiplies_bfloat16(), "oneDNN has no such products here")
    @unittest.skipIf(TEST_WITH_ASAN, "the library has no sanitizer in it")
    def test_few_kernels(self, device):
        report, _ = in_process(kernels, ONEDNN_JIT_DUMP="1")
        self.assertEqual(report["wrong"], [])
        products = report["products"]
        self.assertGreater(len(products), 0)
        self.assertLessEqual(len(products), MAX_KERNELS, msg=products)


instantiate_device_type_tests(TestAttnBrgemm, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
