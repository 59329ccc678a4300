"""What the compiler has made of the kernel in the installed torch."""

import importlib.util
import platform
import re
import subprocess
from pathlib import Path

import pytest

# A strip times a panel: MR x 2 multiply-adds, with AVX2 and AVX-512.
PRODUCTS = (12, 24)
LINE = re.compile(r" +([0-9a-f]+):\s+(.*)")
JUMP = re.compile(r"j\w+ +([0-9a-f]+) <")
TO_STACK = re.compile(r"[yz]mm\d+,(-?0x[0-9a-f]+)?\(%r[bs]p\)")


def innermost_loops(disassembly):
    """The instructions of each loop that has no other jump than its last."""
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
    """For each loop of PRODUCTS, how many of its vectors it stores on the stack."""
    for loop in innermost_loops(disassembly):
        if sum("vfmadd" in instruction for instruction in loop) in PRODUCTS:
            yield sum(bool(TO_STACK.search(instruction)) for instruction in loop)


@pytest.mark.parametrize("stored", [0, 1])
def test_spills(stored):
    lines = ["vfmadd231ps %zmm1,%zmm2,%zmm3"] * 24
    lines += ["vmovaps %zmm3,-0x40(%rbp)"] * stored + ["jne    1000 <f>", "ret"]
    code = "".join(f"    {4096 + i:x}:\t{line}\n" for i, line in enumerate(lines))
    assert list(spills(f"0000000000001000 <f>:\n{code}")) == [stored]


# A function around a prefetch was enough for GCC 12 to store every sum after every term, which
# takes more than twice as long.
@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows x86-64 only")
def test_sums_stay_in_registers():
    torch = Path(importlib.util.find_spec("torch").origin).parent
    command = ["objdump", "-d", "--no-show-raw-insn", torch / "lib" / "libtorch.so"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    found = list(spills(shown.stdout))
    assert len(found) > 0
    assert sum(found) == 0
