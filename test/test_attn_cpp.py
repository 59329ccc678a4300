# Owner(s): ["module: cpp-extensions"]

import os
import subprocess
import sys
import tempfile
import unittest

import torch
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.cpp_extension import load


LIBRARY = """
#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/library.h>

#include <string>
#include <tuple>

using at::Tensor;

static std::tuple<Tensor, Tensor> function(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  return at::attn(q, k, v);
}

static std::tuple<Tensor, Tensor> dispatcher(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  return at::_ops::attn::call(q, k, v);
}

// The gradient for q of the sum of the output, and the name of its node.
static std::tuple<Tensor, std::string> gradient(
    const Tensor& q, const Tensor& k, const Tensor& v) {
  const Tensor leaf = q.detach().requires_grad_();
  const Tensor output = std::get<0>(at::attn(leaf, k, v));
  output.sum().backward();
  const auto* node = dynamic_cast<torch::autograd::generated::AttnBackward0*>(
      output.grad_fn().get());
  return {leaf.grad(), node == nullptr ? "" : node->name()};
}

TORCH_LIBRARY(attn_cpp_test, m) {
  m.def("function(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)", function);
  m.def("dispatcher(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)", dispatcher);
  m.def("gradient(Tensor q, Tensor k, Tensor v) -> (Tensor, str)", gradient);
}
"""

# A program that includes the operators' own headers only.
PROGRAM = """
#include <ATen/ops/attn.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <cstdio>

int main() {
  const at::Tensor x = at::full({1, 1}, 0.5, at::kDouble);
  const auto [output, attn] = at::attn(x, x, x);
  std::printf("%.6f %.6f", output.item<double>(), attn.item<double>());
}
"""


@unittest.skipIf(sys.platform == "win32", "the linker's options are those of ELF")
class TestAttnCpp(TestCase):
    """C++ code outside of PyTorch, built as any extension is."""

    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def build(self, name, source, **options):
        file = os.path.join(self.folder, f"{name}.cpp")
        with open(file, "w") as f:
            f.write(source)
        return load(
            name,
            [file],
            # Some distributions' compilers pass this: an unused library is not kept.
            extra_ldflags=["-Wl,--as-needed"],
            build_directory=self.folder,
            is_python_module=False,
            **options,
        )

    def test_extension(self):
        self.build("attn_cpp_test", LIBRARY)
        ops = torch.ops.attn_cpp_test
        inputs = tuple(
            torch.randn(s, dtype=torch.double) for s in ((2, 3), (5, 3), (5, 4))
        )
        expected = tuple(torch.attn(*inputs))
        self.assertEqual(ops.function(*inputs), expected, rtol=0, atol=0)
        self.assertEqual(ops.dispatcher(*inputs), expected, rtol=0, atol=0)

        q = inputs[0].clone().requires_grad_()
        torch.attn(q, *inputs[1:])[0].sum().backward()
        grad, node = ops.gradient(*inputs)
        self.assertEqual(grad, q.grad, rtol=0, atol=0)
        self.assertEqual(node, "AttnBackward0")

    def test_program_without_python(self):
        program = self.build("attn_cpp_program", PROGRAM, is_standalone=True)
        env = {**os.environ, "LD_LIBRARY_PATH": os.path.join(torch.__path__[0], "lib")}
        printed = subprocess.check_output([program], env=env, text=True)
        x = torch.tensor([[0.5]], dtype=torch.double)
        self.assertEqual(
            printed, "{:.6f} {:.6f}".format(*map(float, torch.attn(x, x, x)))
        )


if __name__ == "__main__":
    run_tests()
