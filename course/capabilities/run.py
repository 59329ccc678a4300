"""Runs every probe on every route, each in a process of its own, which may crash.

The routes `implicit` and `explicit` are torch.attn of commits 3 and 4, in other environments.
"""

import importlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATIENCE = 300  # seconds for a probe
ROUNDS = 5  # of the costs


@dataclass(frozen=True)
class Way:
    title: str
    module: str  # of routes/
    where: str


ROUTES = {
    "composite": Way("composite in Python", "composite", "Python"),
    "function_static": Way("Function, old style", "function_static", "Python"),
    "function": Way("Function, setup_context", "function", "Python"),
    "custom_op": Way("custom_op, register_autograd", "custom_op", "Python"),
    "define_impl": Way("define and impl, Function outside", "define_impl", "Python"),
    "impl_autograd": Way('impl for "Autograd"', "impl_autograd", "Python"),
    "cpp_extension": Way("C++ extension, Function in C++", "cpp_extension", "C++"),
    "stable_abi": Way("stable ABI, register_autograd", "stable_abi", "C++ and Python"),
    "implicit": Way("ATen, CompositeImplicit", "native", "commit 3"),
    "explicit": Way("ATen, derivatives.yaml", "native", "commit 4"),
    "native": Way("ATen, torch.attn as it is", "native", "the tip"),
}


class Route:
    """What a route's module has: `attn`, and with an operator `operator` and `library`."""

    def __init__(self, name: str):
        module = importlib.import_module(f"routes.{ROUTES[name].module}")
        self.attn = module.attn
        self.operator = getattr(module, "operator", None)
        self.library = getattr(module, "library", None)  # the path of a C++ library


def first_line(error: BaseException) -> str:
    """The kind of an error and its first line, without what differs from run to run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"0x[0-9a-f]+", "0x...", lines[0] if lines else "")
    text = re.sub(r"(?<![\w.:/])/[\w./+-]*/", "", text)  # folders
    if type(error).__name__ not in ("Lacks", "Wrong"):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def outcome(probe: Callable, route: Route) -> dict:
    """What a probe says of a route: the outcome, and words if it is not yes."""
    from probes import Wrong

    try:
        probe(route)
    except Wrong as error:
        return {"outcome": "wrong", "says": first_line(error)}
    except BaseException as error:
        return {"outcome": "no", "says": first_line(error)}
    return {"outcome": "yes"}


def in_a_process(work: Callable[[], dict]) -> dict:
    """What `work` returns in a copy of this process; a signal that ends it, or silence, is a no."""
    out, into = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(out)
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.write(into, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, encoding="utf-8") as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        words = (
            f"still running after {PATIENCE} s"
            if name == "SIGALRM"
            else f"killed by {name}"
        )
        return {"outcome": "no", "says": words}
    return json.loads(said) if said else {"outcome": "no", "says": "the process ended"}


def probe_route(name: str, probes: dict) -> dict[str, dict]:
    """What each probe says of a route, or of each what is wrong with the route itself."""
    import torch

    try:
        route = Route(name)
    except Exception as error:
        cell = {"outcome": "no", "says": first_line(error)}
        return {probe.__name__: cell for probe in probes}

    def patiently(probe: Callable) -> dict:
        signal.alarm(PATIENCE)
        # A copy makes its pool of threads anew when it is first asked for. Of a build for CUDA
        # two of autograd's threads would ask at once, which may end in an abort.
        torch.set_num_threads(1)
        return outcome(probe, route)

    return {p.__name__: in_a_process(lambda p=p: patiently(p)) for p in probes}


def prepare() -> None:
    """Makes this process one whose copies have what a compiler imports: that takes seconds."""
    import torch
    import torch._inductor
    import torch.export

    torch.set_num_threads(1)  # a process with threads cannot be copied
    torch.compile(lambda x: x.tanh() @ x)(torch.randn(3, 3))
    torch.func.jvp(torch.tanh, (torch.randn(3),), (torch.randn(3),))


def probe_routes(names: list[str]) -> dict[str, dict[str, dict]]:
    """All cells of some routes, whose processes are copies of this one."""
    from probes import PROBES

    prepare()
    return {name: in_a_process(lambda n=name: probe_route(n, PROBES)) for name in names}


def costs_of(name: str) -> dict[str, float]:
    """Microseconds a call: without a gradient, and with it, backward included."""
    import torch
    from probes import inputs
    from torch.utils.benchmark import Timer

    torch.set_num_threads(1)
    attn = Route(name).attn

    def median(call: Callable) -> float:
        timer = Timer("call()", globals={"call": call})
        return timer.blocked_autorange(min_run_time=0.3).median * 1e6

    plain, wanting = (
        inputs(dtype=torch.float),
        inputs(dtype=torch.float, requires_grad=True),
    )
    grad = torch.ones(2, 4)

    def step():
        torch.autograd.grad(attn(*wanting)[0], wanting, grad)

    with torch.no_grad():
        inference = median(lambda: attn(*plain))
    return {"inference": inference, "gradient": median(step)}


def started(python: str, *words: str) -> dict:
    """What this script, run by that Python, prints as its last line."""
    command = [python, str(HERE / "run.py"), *words]
    # AOTInductor packs the files of its cache: those that another process writes may be empty.
    cache = HERE.parents[1] / "build" / "capabilities" / "inductor" / words[1]
    env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env = {**os.environ, **env, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def shares(names: list[str], pythons: dict[str, str], jobs: int) -> list[list[str]]:
    """The routes that one process probes: those of this Python are cut into `jobs` shares."""
    here = [name for name in names if name not in pythons]
    cut = [here[start::jobs] for start in range(jobs)]
    return [
        share
        for share in (*cut, *([name] for name in names if name in pythons))
        if share
    ]


def run(pythons: dict[str, str], names: list[str], jobs: int, costs: bool) -> dict:
    """The whole table, as it is recorded."""
    import torch

    def python(name: str) -> str:
        return pythons.get(name, sys.executable)

    def probed(share: list[str]) -> dict:
        return started(python(share[0]), "--routes", *share)

    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(probed, shares(names, pythons, jobs))
        cells = {name: of for part in parts for name, of in part.items()}
    table = {
        "versions": {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "cells": {name: cells[name] for name in names},
    }
    if costs:
        table["cpu"] = cpu()
        table["microseconds"] = measure([n for n in names if usable(cells[n])], python)
    return table


def usable(cells: dict) -> bool:
    return cells["gradient"]["outcome"] == "yes"


def measure(names: list[str], python: Callable) -> dict[str, dict[str, float]]:
    """The median of some rounds, in each of which every route has its turn."""
    rounds = [
        {n: started(python(n), "--costs", n) for n in names} for _ in range(ROUNDS)
    ]
    return {
        name: {
            kind: round(statistics.median(r[name][kind] for r in rounds), 1)
            for kind in ("inference", "gradient")
        }
        for name in names
    }


def cpu() -> str:
    found = re.search(
        r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8")
    )
    return found[1] if found else platform.machine()


if __name__ == "__main__":  # as `started` calls it
    what, *chosen = sys.argv[1:]
    print(json.dumps(probe_routes(chosen) if what == "--routes" else costs_of(*chosen)))
