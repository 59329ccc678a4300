"""The probes: one short function each, which says whether a route has a capability.

A probe returns where the route has the capability. It raises `Wrong` where the route gives a wrong
result, and any other error where the route refuses. The right result is that of the composite,
differentiated by autograd.
"""

import io
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from compiling import built
from formulas import forward

Q, K, V = (2, 3), (5, 3), (5, 4)  # the shapes
FLOPS = 2 * 2 * 3 * 5 + 2 * 2 * 5 * 4  # of both products, two for each multiplication
ALL = (0, 1, 2)


class Wrong(Exception):
    """A result that is wrong, and nobody said so."""


class Lacks(Exception):
    """The capability is not there."""


def inputs(*batch, dtype=torch.double, requires_grad=False):
    draw = torch.Generator().manual_seed(1)
    shapes = [(*batch, *shape) for shape in (Q, K, V)]
    drawn = [torch.randn(shape, generator=draw, dtype=torch.double) for shape in shapes]
    return [x.to(dtype).requires_grad_(requires_grad) for x in drawn]


def same(found, wanted, what, tolerance=1e-6):
    """Raises Wrong where a result, or one of a tuple or a list, is not what is wanted."""
    if isinstance(wanted, (tuple, list)):
        for one, other in zip(found, wanted, strict=True):
            same(one, other, what, tolerance)
        return
    if found is None:
        raise Wrong(f"{what}: None")
    if not found.any() and wanted.any():
        raise Wrong(f"{what}: all zeros")
    if found.shape != wanted.shape or not torch.allclose(
        found.double(), wanted.double(), tolerance, tolerance
    ):
        raise Wrong(f"{what}: wrong values")


def scalar(attn):
    """A function of all entries of both results, whose second derivatives are not zero."""
    return lambda *inputs: sum((result * result).sum() for result in attn(*inputs))


def gradients(attn):
    given = inputs(requires_grad=True)
    return torch.autograd.grad(scalar(attn)(*given), given)


def both(attn, function, what):
    """Compares what `function` makes of the route's attn and of the composite."""
    same(function(attn), function(forward), what)


# Derivatives


def gradient(route):
    both(route.attn, gradients, "the gradient")


def double_backward(route):
    def seconds(attn):
        given = inputs(requires_grad=True)
        first = torch.autograd.grad(scalar(attn)(*given), given, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in first), given)

    both(route.attn, seconds, "the second gradient")


def forward_ad(route):
    from torch.autograd import forward_ad as mode

    def tangents(attn):
        with mode.dual_level():
            duals = [mode.make_dual(x, x.cos()) for x in inputs()]
            return [mode.unpack_dual(result).tangent for result in attn(*duals)]

    both(route.attn, tangents, "the tangent")


def forward_over_reverse(route):
    def product(attn):
        given = tuple(inputs())
        gradients = torch.func.grad(scalar(attn), ALL)
        return torch.func.jvp(gradients, given, tuple(x.cos() for x in given))[1]

    both(route.attn, product, "the Hessian-vector product")


def vmap(route):
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        for dims in ((0, 0, 0), (0, None, None), (None, 0, 0)):
            each = zip(inputs(3), inputs(), dims, strict=True)
            given = [one if dim is None else many for many, one, dim in each]
            found = torch.vmap(route.attn, dims)(*given)
            same(found, torch.vmap(forward, dims)(*given), "the batch")
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


def jacrev(route):
    def jacobians(attn):
        return torch.func.jacrev(scalar(attn), ALL)(*inputs())

    both(route.attn, jacobians, "the Jacobian")
    both(route.attn, lambda attn: torch.func.jacrev(attn)(*inputs()), "the Jacobian")


def hessian(route):
    both(
        route.attn,
        lambda attn: torch.func.hessian(scalar(attn))(*inputs()),
        "the Hessian",
    )


# Compilers


def compile(route):
    given = inputs()
    compiled = torch.compile(route.attn, fullgraph=True)
    same(compiled(*given), forward(*given), "the result")


def compile_gradient(route):
    compiled = torch.compile(route.attn, fullgraph=True)
    same(gradients(compiled), gradients(forward), "the gradient")


def compile_jvp(route):
    def tangents(attn):
        def product(*given):
            return torch.func.jvp(attn, given, tuple(x.cos() for x in given))[1]

        return product

    compiled = torch.compile(tangents(route.attn), fullgraph=True)
    same(compiled(*inputs()), tangents(forward)(*inputs()), "the tangent")


def dynamic_shapes(route):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(route.attn, backend=counter, fullgraph=True, dynamic=True)
    for n in (5, 7, 9):
        q, k, v = torch.randn(n, 3), torch.randn(2 * n, 3), torch.randn(2 * n, 4)
        same(compiled(q, k, v), forward(q, k, v), "the result")
    if counter.frame_count > 1:
        raise Lacks(f"compiled {counter.frame_count} times for three shapes")


def exported(route):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return tuple(route.attn(q, k, v))

    n = torch.export.Dim("n", min=2, max=1000)
    given = tuple(inputs(dtype=torch.float))
    return torch.export.export(Module(), given, dynamic_shapes=({}, {0: n}, {0: n}))


LONGER = [torch.randn(2, 3), torch.randn(9, 3), torch.randn(9, 4)]


def export(route):
    same(exported(route).module()(*LONGER), forward(*LONGER), "the result")


def save(route):
    """The exported program goes through torch.export.save and load."""
    saved = io.BytesIO()
    torch.export.save(exported(route), saved)
    saved.seek(0)
    same(torch.export.load(saved).module()(*LONGER), forward(*LONGER), "the result")


def aot_inductor(route):
    program = exported(route)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/attn.pt2"
        )
        loaded = torch._inductor.aoti_load_package(path)
        same(loaded(*LONGER), forward(*LONGER), "the result", 1e-4)


# Autocast, subclasses, sharding, checks, C++


def autocast(route):
    q, k, v = inputs(dtype=torch.float, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output, attn = route.attn(q, k, v)
    dtypes = {output.dtype, attn.dtype}
    if dtypes != {torch.bfloat16}:
        raise Lacks(f"computes in {', '.join(map(str, dtypes))}")
    wanted = forward(q, k, v)
    same((output, attn), wanted, "the result", 0.05)
    found = torch.autograd.grad(output.float().sum(), (q, k, v))
    same(found, torch.autograd.grad(wanted[0].sum(), (q, k, v)), "the gradient", 0.05)


def torch_function(route):
    """A subclass of Tensor sees the call as one, and not what is called inside."""
    seen = []

    class Sees(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", str(function)))
            return super().__torch_function__(function, types, args, kwargs or {})

    route.attn(*(x.as_subclass(Sees) for x in inputs()))
    if len(seen) != 1 or "attn" not in seen[0]:
        raise Lacks(f"sees {', '.join(seen) or 'nothing'}")


def dtensor(route):
    """With the rows of q on two ranks, each computes its own without a word to the other."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    given = inputs(requires_grad=True)
    rows, placements = given[0][:1], ([Shard(0)], [Replicate()], [Replicate()])
    local = (rows, *given[1:])
    each = zip(local, placements, strict=True)
    sharded = [DTensor.from_local(x, mesh, place) for x, place in each]
    with CommDebugMode() as said:
        results = route.attn(*sharded)
    if said.get_total_counts():
        raise Lacks(f"{said.get_total_counts()} collectives")
    for result in results:
        if result.placements != (Shard(0),):
            raise Lacks(f"the result is {result.placements}")
    wanted = forward(*local)
    same([result.to_local() for result in results], wanted, "the result")
    found = torch.autograd.grad(
        sum(result.to_local().sum() for result in results), given[0]
    )
    same(
        found,
        torch.autograd.grad(sum(w.sum() for w in wanted), given[0]),
        "the gradient",
    )


def opcheck(route):
    torch.library.opcheck(
        route.operator or route.attn, tuple(inputs(requires_grad=True))
    )


def flop_counter(route):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        route.attn(*inputs())
    found = counter.get_total_flops()
    if found != FLOPS:
        raise Wrong(f"{found} of {FLOPS} FLOPs")


def cpp(route):
    """A program without Python calls it, and asks for the gradient."""
    if route.operator is None:
        raise Lacks("a function of Python, no operator")
    name = route.operator.name().removesuffix(".default")
    command = [built("caller.cpp", program=True), name, *filter(None, [route.library])]
    libraries = {"LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | libraries
    )
    if done.returncode:
        raise (Wrong if done.returncode == 2 else Lacks)(
            done.stdout.strip() or done.stderr
        )


# In the table's order, with the words of its heads.
PROBES = {
    gradient: "gradient",
    double_backward: "double backward",
    forward_ad: "forward AD",
    forward_over_reverse: "forward over reverse",
    vmap: "vmap without fallback",
    jacrev: "jacrev",
    hessian: "hessian",
    compile: "compile, full graph",
    compile_gradient: "compile with gradients",
    compile_jvp: "jvp under compile",
    dynamic_shapes: "dynamic shapes",
    export: "export",
    save: "export.save",
    aot_inductor: "AOTInductor",
    autocast: "autocast",
    torch_function: "__torch_function__",
    dtensor: "DTensor",
    opcheck: "opcheck",
    flop_counter: "FLOP counter",
    cpp: "C++ callers",
}
