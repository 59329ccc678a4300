"""The operator's own tests with AddressSanitizer and UndefinedBehaviorSanitizer in its library."""

import os
import shlex
import subprocess
from pathlib import Path

from fork.console import run
from fork.errors import ForkError
from fork.project import PROJECT
from fork.suites.run import TWO_THREADS

# The values of ATEN_CPU_CAPABILITY. A machine that has one has those before it.
CAPABILITIES = ("default", "avx2", "avx512")
# Test files that end so are not run. The first ones start compilers and processes, to run what
# other files run too; test_*_tanh.py runs the same few lines for every number.
LEFT_OUT = ("aot_inductor", "compile", "cpp", "dtensor", "examples", "flops", "ring", "tanh")
OPTIONS = {
    # Python keeps much until it ends, so leaks mean nothing. No vector reaches across a redzone.
    "ASAN_OPTIONS": "detect_leaks=0:redzone=256",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    **TWO_THREADS,
    # Upstream's name for: skip tests that would take too long.
    "PYTORCH_TEST_WITH_ASAN": "1",
    f"{PROJECT.upper()}_FEWER_EXAMPLES": "1",  # of hypothesis
}
# Prints the path of torch's library of operators, and the best instruction set.
PROBE = """
import torch
for name in {line.split()[-1] for line in open("/proc/self/maps") if "/libtorch.so" in line}:
    print(name)
print(torch.backends.cpu.get_cpu_capability())
"""


def runtime() -> Path:
    """Returns the path of AddressSanitizer's library, from the compiler."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    for name in ("libubsan.so", "libasan.so"):
        command = [*compiler, f"-print-file-name={name}"]
        found = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
        if not found.is_absolute() or not found.exists():
            raise ForkError(
                f"{compiler[0]} has no {name}: install GCC's sanitizers "
                "(Debian: apt-get install g++ libasan8 libubsan1; "
                "Fedora: dnf install libasan libubsan)"
            )
    return found.resolve()


def environment(runtime: Path, library: Path, installed: Path) -> dict[str, str]:
    """Makes the loader take `library` for the libtorch.so of the folder `installed`, torch/lib."""
    return OPTIONS | {
        # libstdc++ as well: AddressSanitizer looks up its functions when Python starts.
        "LD_PRELOAD": f"{runtime} libstdc++.so.6",
        "LD_LIBRARY_PATH": f"{library.parent}:{installed}",
    }


def capabilities(python: Path, library: Path, log: Path, **kwargs) -> tuple[str, ...]:
    """Returns this machine's capabilities; raises ForkError unless torch runs with `library`."""
    lines: list[str] = []
    run([python, "-c", PROBE], log, "torch does not start", line=lines.append, **kwargs)
    *loaded, best = (line.strip() for line in lines)
    if loaded != [str(library)]:
        raise ForkError(f"torch runs with {', '.join(loaded) or 'nothing'}, not with {library}")
    names = [capability.upper() for capability in CAPABILITIES]
    return CAPABILITIES[: names.index(best) + 1] if best in names else CAPABILITIES[:1]
