# Owner(s): ["module: functorch"]

"""The example functorch/examples/attn/field.py: right, and solved."""

import importlib.util
import unittest
from pathlib import Path

import torch
from torch.testing._internal.common_utils import run_tests, TEST_WITH_ASAN, TestCase


ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "functorch" / "examples" / "attn" / "field.py"
spec = importlib.util.spec_from_file_location("field", FILE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


class TestAttnField(TestCase):
    def test_source_is_that_of_the_solution(self):
        x = torch.rand(50, 2, dtype=torch.double)
        self.assertEqual(-example.laplacian(example.solution, x), example.source(x))

    def test_gradients_are_those_of_the_composed_field(self):
        x = torch.rand(20, 2, dtype=torch.double)
        found = []
        for layer in (torch.attn_output, example.composed):
            torch.manual_seed(0)
            field = example.Field(8, layer)
            example.loss(field, x).backward()
            found.append([w.grad for w in field.parameters()])
        self.assertEqual(*found)
        self.assertTrue(all(x.any() for x in found[0]))

    @unittest.skipIf(TEST_WITH_ASAN, "takes long")
    def test_it_is_solved(self):
        torch.manual_seed(0)
        field = example.Field(32)
        losses = example.train(field, points=300, steps=100, iterations=150)
        self.assertLess(losses[-1], 1e-3)
        self.assertLess(example.error(field), 0.02)


if __name__ == "__main__":
    run_tests()
