# Owner(s): ["module: aotinductor"]

"""attn in a model that AOTInductor compiled: a C function of libtorch."""

import tempfile
from pathlib import Path

from test_attn import SMALL
from test_attn_compile import BiggerModel, CompileTestCase, Messages, sized

import torch
from torch.export import Dim, export
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import run_tests


class BackwardModel(torch.nn.Module):
    def forward(self, grad_output, q, k, v, attn):
        grad_q, _, grad_v = torch.ops.aten._attn_backward(
            grad_output, None, q, k, v, attn, [True, False, True]
        )
        return grad_q.neg(), grad_v


class TestAttnAotInductor(CompileTestCase):
    def test_aot_inductor(self, device):
        model = BiggerModel().to(device).eval()
        batch = Dim("b")

        def inputs(b):
            return tuple(sized(2, 3, 4, 5, b).make(device, torch.float)[0])

        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            program = export(model, inputs(3), dynamic_shapes=[{0: batch}] * 3)
            with Messages(self, "torch._inductor") as messages:
                package = torch._inductor.aoti_compile_and_package(
                    program, package_path=str(Path(folder, "model.pt2"))
                )
            loaded = torch._inductor.aoti_load_package(package)
            for b in (3, 5, 1):
                args = inputs(b)
                self.assert_bitwise(loaded(*args), model(*args))
            q, k, v = inputs(3)
            with self.assertRaises(RuntimeError):  # 2.6 has the message on stderr only
                loaded(q, k, v[:2])
        self.assertEqual([x for x in messages if "missing a c-shim" in x], [])

    def test_aot_inductor_backward(self, device):
        """The backward as an operator: no gradient of attn, none wanted of k."""
        model = BackwardModel()
        (q, k, v), (grad_output, _) = SMALL.make(device, torch.float)
        args = (grad_output, q, k, v, torch.attn(q, k, v).attn)
        with tempfile.TemporaryDirectory() as folder:
            with Messages(self, "torch._inductor") as messages:
                package = torch._inductor.aoti_compile_and_package(
                    export(model, args), package_path=str(Path(folder, "model.pt2"))
                )
            loaded = torch._inductor.aoti_load_package(package)
            self.assert_bitwise(loaded(*args), model(*args))
        self.assertEqual([x for x in messages if "missing a c-shim" in x], [])


instantiate_device_type_tests(TestAttnAotInductor, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
