# Owner(s): ["module: functorch"]

"""The examples of functorch/examples/attn, each against the loop that it stands for."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import torch
from torch.testing._internal.common_utils import run_tests, TestCase


ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "functorch" / "examples" / "attn" / "per_sample_gradients.py"
spec = importlib.util.spec_from_file_location("per_sample_gradients", FILE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


class TestAttnExamples(TestCase):
    def setUp(self):
        super().setUp()
        self.models = [example.AttnLayer(4, 3, dtype=torch.double) for _ in range(3)]
        self.x = torch.randn(5, 6, 4, dtype=torch.double)
        self.y = torch.randn(5, dtype=torch.double)
        named = self.models[0].named_parameters()
        self.parameters = {k: p.detach() for k, p in named}
        self.v = {k: torch.randn_like(p) for k, p in self.parameters.items()}

    def same(self, function, other, *args):
        """The loop's own numbers, without vmap's fallback to a loop."""
        enabled = torch._C._functorch._is_vmap_fallback_enabled()
        torch._C._functorch._set_vmap_fallback_enabled(False)
        try:
            found = function(*args)
        finally:
            torch._C._functorch._set_vmap_fallback_enabled(enabled)
        self.assertEqual(found, other(*args))
        return found

    def test_per_sample_gradients(self):
        about = (self.models[0], self.parameters, self.x, self.y)
        found = self.same(
            example.per_sample_gradients, example.per_sample_gradients_loop, *about
        )
        # The mean of the samples' gradients is the gradient of the batch's mean.
        model = self.models[0]
        (model(self.x) - self.y).square().mean().backward()
        for name, parameter in model.named_parameters():
            self.assertEqual(found[name].shape, (5, *parameter.shape))
            self.assertEqual(found[name].mean(0), parameter.grad)

    def test_hessian_vector_product(self):
        about = (self.models[0], self.parameters, self.v, self.x, self.y)
        found = self.same(
            example.hessian_vector_product, example.hessian_vector_product_twice, *about
        )
        # A difference of two gradients gives the same, by definition.
        eps, ends = 1e-6, []
        for sign in (1, -1):
            at = {k: p + sign * eps * self.v[k] for k, p in self.parameters.items()}
            gradient = torch.func.grad(
                lambda p: example.loss(self.models[0], p, self.x, self.y)
            )
            ends.append(gradient(at))
        for name, product in found.items():
            difference = (ends[0][name] - ends[1][name]) / (2 * eps)
            self.assertEqual(product, difference, rtol=1e-5, atol=1e-7)

    def test_ensemble(self):
        found = self.same(example.ensemble, example.ensemble_loop, self.models, self.x)
        self.assertEqual(found.shape, (3, 5))

    def test_the_script(self):
        options = ["--batch", "3", "--length", "7", "--width", "5", "--models", "2"]
        command = [sys.executable, str(FILE), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("as fast"), 3)


if __name__ == "__main__":
    run_tests()
