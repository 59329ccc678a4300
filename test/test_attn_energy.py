# Owner(s): ["module: functorch"]

"""The example functorch/examples/attn/energy.py: right, trained, and in little memory."""

import importlib.util
import resource
import subprocess
import sys
import unittest
from pathlib import Path

import torch
from torch.testing._internal.common_utils import run_tests, TEST_WITH_ASAN, TestCase


ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "functorch" / "examples" / "attn" / "energy.py"
spec = importlib.util.spec_from_file_location("energy", FILE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

MEMORY = 4 << 30


def script(*options):
    """Runs the script in a process that may have MEMORY."""

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))

    command = [sys.executable, str(FILE), *options]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)


class TestAttnEnergy(TestCase):
    def gradients(self, attend):
        torch.manual_seed(0)
        model = example.Energy(8, attend).double()
        example.loss(model, example.circles(3, 20).double()).backward()
        return [x.grad for x in model.parameters()]

    def test_gradients_are_those_of_the_composed_model(self):
        found = self.gradients(torch.attn_output)
        self.assertEqual(found, self.gradients(example.composed))
        # The last bias moves all energies alike, and no gradient.
        self.assertTrue(all(x is None or x.any() for x in found[:-1]))

    def test_the_loss_falls(self):
        torch.manual_seed(0)
        losses = example.train(example.Energy(32), sets=16, points=32, steps=120)
        first, last = sum(losses[:20]), sum(losses[-20:])
        self.assertLess(last, 0.9 * first)

    @unittest.skipUnless(sys.platform == "linux", "needs Linux's limit of memory")
    @unittest.skipIf(TEST_WITH_ASAN, "ASan has memory of its own")
    def test_sets_of_any_number_of_points(self):
        options = ("--sets", "1", "--points", "16384", "--steps", "1")
        done = script(*options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("16384 points: loss", done.stdout)
        done = script(*options, "--composed")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("allocate memory", done.stderr)


if __name__ == "__main__":
    run_tests()
