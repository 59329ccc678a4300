"""Tests the machine code of the kernel in the installed torch."""

import importlib.util
import platform
import re
import subprocess
from pathlib import Path

import pytest

# Multiply-adds in the micro-kernel's loop, MR x 3 vectors: with AVX2 and with AVX-512.
PRODUCTS = (12, 24)
LINE = re.compile(r" +([0-9a-f]+):\s+(.*)")
JUMP = re.compile(r"j\w+ +([0-9a-f]+) <")
FUNCTION = re.compile(r"[0-9a-f]+ <(.+)>:")
TO_FUNCTION = re.compile(r"(?:call|jmp) +[0-9a-f]+ <([^+>]+)>")
STREAMED = re.compile(r"v?movnt(?!dqa)")
TO_STACK = re.compile(r"[yz]mm\d+,(-?0x[0-9a-f]+)?\(%r[bs]p\)")


def innermost_loops(disassembly):
    """Yields the instructions of each loop whose only jump is its last instruction."""
    body, places = [], {}
    for line in disassembly.splitlines():
        match = LINE.match(line)
        if match is None:
            body, places = [], {}
            continue
        address, instruction = match.groups()
        places[address] = len(body)
        body.append(instruction)
        jump = JUMP.match(instruction)
        if jump:
            if jump[1] in places:
                yield body[places[jump[1]] :]
            places = {}


def spills(disassembly):
    """Yields how many vectors each loop with PRODUCTS multiply-adds stores on the stack."""
    for loop in innermost_loops(disassembly):
        if sum("vfmadd" in instruction for instruction in loop) in PRODUCTS:
            yield sum(bool(TO_STACK.search(instruction)) for instruction in loop)


def unfenced(disassembly):
    """Returns the functions that store past the caches without a fence, and how many so store.

    A fence of the function itself counts, or one of each of its callers.
    """
    streams, fences, callers, name = set(), set(), {}, None
    for line in disassembly.splitlines():
        if match := FUNCTION.match(line):
            name = match[1]
        elif match := LINE.match(line):
            instruction = match[2]
            if STREAMED.match(instruction):
                streams.add(name)
            elif instruction.startswith("sfence"):
                fences.add(name)
            elif (to := TO_FUNCTION.match(instruction)) and to[1] != name:
                callers.setdefault(to[1], set()).add(name)

    def is_fenced(function, seen=()):
        others = callers.get(function, set()) - {*seen}
        return function in fences or (
            len(others) > 0 and all(is_fenced(other, (*seen, function)) for other in others)
        )

    return sorted(x for x in streams if not is_fenced(x)), len(streams)


def code(**functions):
    lines = []
    for name, instructions in functions.items():
        lines.append(f"0000000000001000 <{name}>:")
        lines += [f"    1000:\t{instruction}" for instruction in instructions]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "functions,wanted",
    [
        ({"f": ["vmovntps %zmm1,(%rax)", "sfence", "ret"]}, []),
        ({"f": ["vmovntps %zmm1,(%rax)", "ret"]}, ["f"]),
        ({"f": ["movntdq %xmm1,(%rax)", "ret"]}, ["f"]),
        ({"f": ["vmovntdqa (%rax),%zmm1", "ret"]}, []),
        ({"f": ["vmovntpd %zmm1,(%rax)"], "g": ["call   1000 <f>", "sfence"]}, []),
        ({"f": ["vmovntpd %zmm1,(%rax)"], "g": ["call   1000 <f>"]}, ["f"]),
        (
            {
                "f": ["vmovntpd %zmm1,(%rax)"],
                "g": ["call   1000 <f>", "sfence"],
                "h": ["jmp    1000 <f>"],
            },
            ["f"],
        ),
        ({"f": ["vmovntpd %zmm1,(%rax)", "jmp    1000 <f+0x8>"]}, ["f"]),
    ],
)
def test_unfenced(functions, wanted):
    assert unfenced(code(**functions))[0] == wanted


@pytest.fixture(scope="module")
def disassembly():
    if platform.machine() != "x86_64":
        pytest.skip("knows x86-64 only")
    torch = Path(importlib.util.find_spec("torch").origin).parent
    command = ["objdump", "-d", "--no-show-raw-insn", torch / "lib" / "libtorch.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("stored", [0, 1])
def test_spills(stored):
    lines = ["vfmadd231ps %zmm1,%zmm2,%zmm3"] * 24
    lines += ["vmovaps %zmm3,-0x40(%rbp)"] * stored + ["jne    1000 <f>", "ret"]
    shown = "".join(f"    {4096 + i:x}:\t{line}\n" for i, line in enumerate(lines))
    assert list(spills(f"0000000000001000 <f>:\n{shown}")) == [stored]


# With a function around a prefetch, GCC 12 stored every sum after every term: that takes more than
# twice as long.
def test_sums_stay_in_registers(disassembly):
    found = list(spills(disassembly))
    assert len(found) > 0
    assert sum(found) == 0


# Without a fence, later stores may overtake such a store, so another thread could read a result too
# early. No machine at hand shows that, so the test looks for the fence in the code.
def test_streamed_stores_are_fenced(disassembly):
    found, streams = unfenced(disassembly)
    assert streams > 0
    assert found == []
