"""What the package has beyond the native operators' tests, which test_as_native.py runs."""

import os
import platform
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch_attn
from torch.autograd import forward_ad
from torch_attn import composed, fused

OPS = torch.ops.torch_attn
OPTIONS = ({}, {"is_causal": True}, {"scale": 0.5}, {"is_causal": True, "scale": -2.0})


def make(*batch, m=3, n=5, d=4, e=6, dtype=torch.double, requires_grad=True, shared=None):
    torch.manual_seed(0)
    shared = batch if shared is None else shared
    sizes = (*batch, m, d), (*shared, n, d), (*shared, n, e)
    return [torch.randn(size, dtype=dtype, requires_grad=requires_grad) for size in sizes]


def python(code, **variables):
    """What a new process says."""
    env = os.environ | variables
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def gradients(op, inputs, **options):
    results = op(*inputs, **options)
    results = results if isinstance(results, tuple) else (results,)
    return *results, *torch.autograd.grad([x.square().sum() for x in results], inputs)


def gradient(q, k, v, op=fused.attn_output):
    return torch.func.grad(lambda *x: op(*x).sum(), (0, 1, 2))(q, k, v)


def second_derivative(q, k, v, op=fused.attn_output):
    return torch.func.jvp(partial(gradient, op=op), (q, k, v), (q, k, v))[1]


def gradient_of_a_second_derivative(q, k, v, op=fused.attn_output):
    def along(q, k, v):
        of_q = torch.func.grad(lambda q: op(q, k, v).sum())
        return torch.func.jvp(of_q, (q,), (q,))[1].sum()

    return torch.func.grad(along, (0, 1, 2))(q, k, v)


ORDERS = (gradient, second_derivative, gradient_of_a_second_derivative)


@pytest.mark.skipif(not torch_attn.is_native, reason="this torch has no attn of its own")
@pytest.mark.parametrize("dtype", (torch.float, torch.double, torch.bfloat16, torch.half))
def test_same_bits_as_native(dtype):
    # With AMX the native operators leave larger bfloat16 and half to oneDNN, the package does not.
    is_small = dtype.itemsize == 2 and "amx_" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    m, n = (30, 33) if is_small else (130, 200)
    inputs = make(2, m=m, n=n, d=40, e=24, dtype=dtype)
    pairs = zip(gradients(torch_attn.attn, inputs), gradients(fused.attn, inputs), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    for options in OPTIONS:
        native = gradients(torch_attn.attn_output, inputs, **options)
        own = gradients(fused.attn_output, inputs, **options)
        assert all(torch.equal(x, y) for x, y in zip(native, own, strict=True))
    for order in ORDERS:
        native, own = (order(*inputs, op) for op in (torch_attn.attn_output, fused.attn_output))
        assert all(torch.equal(x, y) for x, y in zip(native, own, strict=True))


def test_readme():
    page = Path(__file__).parents[1] / "README.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    exec(code, {})


# Options that attn_output refuses, and what it says of each.
MISTAKES = (
    ({"is_causal": 1}, "attn_output(): argument 'is_causal' must be bool, not int"),
    ({"is_causal": None}, "attn_output(): argument 'is_causal' must be bool, not NoneType"),
    (
        {"is_causal": torch.tensor(True)},
        "attn_output(): argument 'is_causal' must be bool, not Tensor",
    ),
    ({"scale": None}, "attn_output(): argument 'scale' must be float, not NoneType"),
    ({"scale": "1"}, "attn_output(): argument 'scale' must be float, not str"),
    ({"scale": 1j}, "attn_output(): argument 'scale' must be float, not complex"),
    ({"scale": torch.ones(2)}, "attn_output(): argument 'scale' must be float, not Tensor"),
    ({"mask": None}, "attn_output() got an unexpected keyword argument 'mask'"),
)


@pytest.mark.parametrize("op", {torch_attn.attn_output, fused.attn_output})
@pytest.mark.parametrize("options,said", MISTAKES)
def test_mistakes_in_options(op, options, said):
    """The native operator, where there is one, and the package's say the same."""
    with pytest.raises(TypeError) as caught:
        op(*make(), **options)
    assert str(caught.value).splitlines()[0] == said


@pytest.mark.parametrize("op", {torch_attn.attn_output, fused.attn_output})
def test_numbers_that_are_a_scale(op):
    inputs = make()
    expected = op(*inputs, scale=2.0)
    for scale in (2, np.float32(2), np.int64(2), torch.tensor(2.0), torch.tensor(2)):
        assert torch.equal(op(*inputs, scale=scale), expected)
    assert torch.equal(op(*inputs, scale=True), op(*inputs))


def test_the_command_says_what_is_used():
    done = subprocess.run(
        [sys.executable, "-m", "torch_attn"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    title, cpu, *_ = done.stdout.splitlines()
    assert title == f"torch_attn {torch_attn.__version__}, torch {torch.__version__}"
    assert cpu == f"cpu: {torch_attn.backends()['cpu']}"
    assert "self-test: 3 functions, 4 dtypes: right" in done.stdout
    assert len(re.findall(r"and [\d.]+ times as long$", done.stdout, re.M)) == 3
    assert len(re.findall(r"[\d.]+ times as long$", done.stdout, re.M)) == 6
    assert not done.stderr


def test_the_command_says_what_is_wrong(monkeypatch, capsys):
    from torch_attn import __main__ as command

    name, op, plain = command.CHECKED[1]
    off = (name, lambda q, k, v: op(q, k, v) * 1.01, plain)
    monkeypatch.setattr(command, "CHECKED", (off,))
    monkeypatch.setattr(command, "speed", list)
    assert command.main() == 1
    assert "attn_output, torch.float32: the output is wrong by 1.0e-02" in capsys.readouterr().out


USER = """\
import torch
import torch_attn

q = torch.randn(3, 4)
output: torch.Tensor = torch_attn.attn_output(q, q, q, is_causal=True)
output, attn = torch_attn.attn(q, q, q)
print(torch_attn.__version__.upper(), torch_attn.backends()["cpu"], attn.size())
"""


def test_types(tmp_path):
    """Code that uses the package is accepted, a mistake in it is found, and its own code passes.

    That for GPUs, which PyTorch has too, is not checked.
    """
    own = [f"-mtorch_attn{name}" for name in ("", ".__main__", ".composed", ".fused")]
    # A newer torch may have types where these files say that it has none.
    own.append("--no-warn-unused-ignores")
    mistaken = USER.replace("is_causal", "causal")
    for code, what, status in ((USER, ["user.py"], 0), (mistaken, ["user.py"], 1), (USER, own, 0)):
        (tmp_path / "user.py").write_text(code, encoding="utf-8")
        command = [sys.executable, "-m", "mypy", "--strict", *what]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr


def test_is_native():
    if torch_attn.is_native:
        assert torch_attn.attn is not fused.attn
    else:
        assert torch_attn.attn is fused.attn and torch_attn.attn_output is fused.attn_output


@pytest.mark.skipif(torch_attn.is_native, reason="with attn of its own, any torch will do")
def test_an_older_torch_is_refused():
    code = "import torch; torch.__version__ = '2.9.1+cpu'; import torch_attn"
    expected = "ImportError: torch_attn needs torch 2.10 or newer, and this is 2.9.1+cpu"
    assert python(code) == expected


IS_ARM = platform.machine() == "aarch64"
CAPABILITIES = ("default", "sve256") if IS_ARM else ("default", "avx2", "avx512")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_set_of_instructions(capability):
    best = torch.backends.cpu.get_cpu_capability().replace("NO AVX", "DEFAULT").lower()
    if best in CAPABILITIES and CAPABILITIES.index(capability) > CAPABILITIES.index(best):
        pytest.skip(f"PyTorch itself does not start with {capability} on a machine that has {best}")
    code = (
        "import torch; from torch_attn import fused;"
        "torchs = torch.backends.cpu.get_cpu_capability();"
        "print(fused.capability, torchs.replace('NO AVX', 'DEFAULT'), end=' ');"
        "q = torch.randn(70, 33) / 6; x = fused.attn(q, q, q); y = torch.tanh(q @ q.mT);"
        "print(torch.allclose(x.attn, y, atol=1e-5), torch.allclose(x.output, y @ q, atol=1e-5))"
    )
    chosen, torchs, *right = python(code, ATEN_CPU_CAPABILITY=capability).split()
    assert right == ["True", "True"]
    assert chosen == torchs
    assert chosen == capability.upper() or IS_ARM  # There some releases don't take SVE's name.


@pytest.mark.parametrize("options", OPTIONS)
def test_compile(options):
    """One graph, in which the operator and its backward are one call each."""
    inputs = make(2, dtype=torch.float)
    for op in (fused.attn, lambda *x: fused.attn_output(*x, **options)):
        torch._dynamo.reset()
        for dynamic in (False, True):
            found = gradients(torch.compile(op, fullgraph=True, dynamic=dynamic), inputs)
            expected = gradients(op, inputs)
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_compile_of_other_derivatives():
    """Dynamo would drop a Function's jvp."""
    q, k, v = make(requires_grad=False)
    t = torch.randn_like(q)

    def tangent(q):
        return torch.func.jvp(lambda q: tuple(fused.attn(q, k, v)), (q,), (t,))[1]

    def tangent_of_output(q):
        return torch.func.jvp(lambda q: fused.attn_output(q, k, v, scale=0.5), (q,), (t,))[1]

    def of_samples(q):
        return torch.vmap(fused.attn, (0, None, None))(q.expand(3, *q.shape), k, v).output

    def gradient(q):
        return torch.func.grad(lambda q: fused.attn_output(q, k, v).square().sum())(q)

    for op in (tangent, tangent_of_output, of_samples, gradient):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(op, fullgraph=True)(q), op(q))


def test_compile_under_forward_ad():
    """A tangent from outside of the compiled graph is not dropped silently."""
    q, k, v = make(requires_grad=False)
    torch._dynamo.reset()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        expected = forward_ad.unpack_dual(fused.attn_output(dual, k, v)).tangent
        try:
            found = torch.compile(fused.attn_output, fullgraph=True)(dual, k, v)
        except RuntimeError:
            return
        torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, expected)


def test_export():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return fused.attn(q, k, v).output + fused.attn_output(q, k, v, is_causal=True)

    inputs = tuple(make(requires_grad=False))
    for strict in (False, True):
        program = torch.export.export(Module(), inputs, strict=strict)
        assert torch.equal(program.module()(*inputs), Module()(*inputs))


@pytest.mark.parametrize("wide", (False, True))
def test_opcheck(wide):
    """Of all four operators, fused and composed."""
    q, k, v = make(2, d=1025 if wide else 4, dtype=torch.float)
    grads = torch.randn(2, 3, 6), torch.randn(2, 3, 5)
    mask = [True, False, True]
    with torch.no_grad():
        attn = OPS.attn(q, k, v)[1]
    for op, args in (
        (OPS.attn, (q, k, v)),
        (OPS._attn_backward, (*grads, q, k, v, attn, mask)),
        (OPS.attn_output, (q, k, v)),
        (OPS._attn_output_backward, (grads[0], q, k, v, True, 0.5, mask)),
    ):
        checks = torch.library.opcheck(op.default, args)
        assert set(checks.values()) == {"SUCCESS"}, (op, checks)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.half))
def test_autocast(dtype):
    inputs = make(dtype=torch.float)
    lower = [x.detach().to(dtype).requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype):
        found = *fused.attn(*inputs), fused.attn_output(*inputs)
    expected = *fused.attn(*lower), fused.attn_output(*lower)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    found[2].sum().backward()
    assert inputs[0].grad.dtype == torch.float


def test_a_gradient_that_is_not_asked_for_is_not_computed():
    q, k, v = make()
    q.requires_grad_(False)
    assert OPS._attn_backward(
        torch.ones(3, 6).double(), None, q, k, v, torch.zeros(3, 5).double(), [False, False, True]
    )[:2] == (None, None)


@pytest.mark.parametrize("run", ORDERS)
def test_memory_of_attn_output(run):
    """The m x n matrix is nowhere."""
    inputs = make(m=8192, n=8192, d=8, e=8, dtype=torch.float, requires_grad=False)
    run(*(x[:64] for x in inputs))
    with torch.profiler.profile(profile_memory=True) as profiled:
        run(*inputs)
    assert max(event.cpu_memory_usage for event in profiled.events()) < 2**22


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        output, _ = torch_attn.attn(q, k, v)
        return output, torch_attn.attn_output(q, k, v, is_causal=True)


WITHOUT_PYTHON = """\
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int, char** arguments) {
  if (!dlopen(arguments[1], RTLD_NOW)) {
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader model(arguments[2]);
  const auto q = at::ones({2, 3, 4}) / 4, k = at::ones({2, 5, 4}) / 2;
  const auto found = model.run({q, k, k});
  const auto attn = at::tanh(at::matmul(q, k.mT()));
  return !at::allclose(found[0], at::matmul(attn, k)) ||
      !at::allclose(found[1], at::matmul(at::tril(attn), k));
}
"""


def test_a_program_without_python(tmp_path):
    """One in C++ that loads the package's library runs what AOTInductor has compiled."""
    inputs = make(2, e=4, dtype=torch.float, requires_grad=False)
    model = tmp_path / "model.pt2"
    exported = torch.export.export(Layer(), tuple(inputs))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(model))
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(WITHOUT_PYTHON, encoding="utf-8")
    torch_folder = Path(torch.__file__).parent
    libraries = [f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib", "-Wl,--as-needed"]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10"]
    compiler = ["g++", "-std=c++20", "-O0", f"-I{torch_folder}/include"]
    subprocess.run([*compiler, source, *libraries, "-o", program], check=True)
    library = fused._libraries[fused.capability]
    assert subprocess.run([program, library, model], check=False).returncode == 0


BY_TRITON = """\
import torch
import test_torch_attn as tests
from torch_attn import fused, triton_impl

torch.manual_seed(0)
inputs = [torch.randn(2, n, 20, dtype=torch.half) / 4 for n in (33, 40, 40)]
found, launch, launched = [], triton_impl.Problem.launch, set()


def counted(problem, name, **matrices):
    launched.add(name)
    launch(problem, name, **matrices)


def composed(*args, **options):
    raise AssertionError("a call was not taken")


def results():
    leaves = [x.clone().requires_grad_() for x in inputs]
    output, attn = fused.attn(*leaves)
    yield from (output, attn, *torch.autograd.grad([output.sum(), attn.sum()], leaves))
    yield fused.attn_output(*inputs, is_causal=True, scale=0.5)
    for run in tests.ORDERS:
        yield from run(*inputs)
    yield torch.func.jvp(fused.attn_output, tuple(inputs), tuple(inputs))[1]


expected = [x.detach() for x in results()]
triton_impl.Problem.launch = counted
for op, kernel in triton_impl.KERNELS.items():
    fused._registrations.impl(op, fused._unless(*kernel, composed), "CPU", allow_override=True)
for x, y in zip(results(), expected, strict=True):
    torch.testing.assert_close(x.detach(), y, rtol=0.01, atol=0.01 * y.abs().max().item())
print(*sorted(launched))
"""


def test_kernels_for_gpus():
    """By Triton's interpreter on a CPU, which multiplies half, but not bfloat16."""
    # The interpreters of older ones fail with NumPy 2.3 and newer.
    is_old = tuple(map(int, np.__version__.split(".")[:2])) < (2, 3)
    pytest.importorskip("triton", minversion="3.6" if is_old else "3.9")
    variables = {
        "TRITON_INTERPRET": "1",
        "TORCH_ATTN_TRITON_LEAST_WORK": "1",
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BY_TRITON],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("attn", "grad_kv", "grad_q", "output", "stored_grad_kv", "stored_grad_q", "tangent"),
        *("tangent_grad_kv", "tangent_grad_q", "third_grad_kv", "third_grad_q"),
    ]


def test_backends():
    found = torch_attn.backends()
    if torch_attn.is_native:
        assert set(found) == {"cpu", "others"}
        return
    assert set(found) == {"cpu", "cuda", "xpu", "others"}
    if not torch.backends.cuda.is_built():
        why = "this torch is built without CUDA"
        assert found["cuda"] == f"composed of PyTorch's operators: {why}"


TRITONS = {
    "of a build for CUDA": ("triton", "3.6.0", "Triton 3.6.0"),
    "of a build for ROCm": ("triton_rocm", "3.7.0", "Triton 3.7.0"),
    "of a build for XPU": ("triton_xpu", "3.10.0+git1", "Triton 3.10.0+git1"),
    "too old": ("triton", "3.5.1", "Triton is 3.5.1, older than 3.6"),
    "of something else": ("triton_viz", "3.6.0", "there is no Triton"),
}


@pytest.mark.parametrize("what", TRITONS)
def test_which_triton_is_taken(tmp_path, monkeypatch, what):
    name, version, said = TRITONS[what]
    folder = tmp_path / f"{name}-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    kernels, why = fused._triton_of("CUDA")
    assert (why, bool(kernels)) == (said, said.startswith("Triton 3"))


BY_ANOTHER_THREAD = """\
import threading

thread = threading.Thread(target=exec, args=("import test_torch_attn",))
thread.start()
thread.join()
import test_torch_attn as tests
print(tests.is_right())
"""
BY_WORKERS = """\
import multiprocessing
import test_torch_attn as tests
from torch.utils.data import DataLoader

assert tests.is_right()  # starts the threads, which a forked process has not
loader = DataLoader(range(4), num_workers=2, collate_fn=tests.is_right,
                    multiprocessing_context=multiprocessing.get_context("fork"))
print(all(loader))
"""


def is_right(_=None):
    inputs = make(2, m=40, n=300, d=16, e=24)
    found, expected = gradients(fused.attn, inputs), gradients(composed.attn, inputs)
    return all(map(torch.allclose, found, expected))


@pytest.mark.parametrize("code", (BY_ANOTHER_THREAD, BY_WORKERS))
def test_imported_by_a_thread_and_used_by_forked_workers(code):
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    assert python(code, PYTHONPATH=path) == "True"


def test_leaks_nothing():
    q, k, v = make(dtype=torch.float)
    plain = [x.detach() for x in (q, k, v)]

    def wrong():
        with pytest.raises(RuntimeError, match="^attn: k"):
            fused.attn(q, k, v[1:])

    for run, count in (
        (lambda: fused.attn(*plain), 1_000_000),
        (lambda: torch.autograd.grad(fused.attn_output(q, k, v).sum(), q), 100_000),
        (wrong, 10_000),
    ):
        for _ in range(count // 50):
            run()
        before = psutil.Process().memory_info().rss
        for _ in range(count):
            run()
        assert psutil.Process().memory_info().rss - before < 2**20 + 16 * count


def test_audit():
    """Of PyTorch the libraries need only what is on the stable ABI, since 2.10."""
    audit = Path(sys.executable).parent / "torch-abi-audit"
    if not audit.exists():
        pytest.skip("torch-abi-audit is not installed: it needs Python 3.11")
    folder = Path(torch_attn.__file__).parent
    done = subprocess.run([audit, "--check=torch", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^ *Torch ABI: *STABLE$", done.stdout, re.M)
    assert re.search(r"^ *Min torch: *2\.10\.0$", done.stdout, re.M)


def test_size():
    wheel = os.environ.get("TORCH_ATTN_WHEEL")
    if wheel is None:
        pytest.skip("TORCH_ATTN_WHEEL does not name the wheel")
    assert Path(wheel).stat().st_size < 1.5e6
