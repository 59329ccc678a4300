"""Tests of `make cuda-check`."""

import re
import subprocess

import pytest

from commands import cuda_check
from commands.cuda_check import HEADER, INCLUDES, KERNELS, Kernel, Program
from fork.graft import Nvcc, compilers

TEXT = HEADER.read_text(encoding="utf-8")
CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
LATE = Kernel("__nv_bfloat16", "kForward", 64, 128, 2, True)


def program(registers=(20, 200), tanh_at=1, extra=0):
    """What nvdisasm prints of a kernel like LATE; the tanh stands before one of two waits."""
    tanh = "MUFU.TANH R1, R1"
    lines = [
        f"HGMMA.64x128x16.F32 R24, gdesc[UR4], R{registers[1]}"
        for _ in range(LATE.products + extra)
    ]
    waits = ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    waits.insert(tanh_at, tanh)
    code = ["@P0 BRA `(.L_x_0)", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", *lines, *waits, "EXIT"]
    code += [".L_x_0:", "USETMAXREG.DEALLOC.CTAPOOL 0x18", f"MOV R{registers[0]}, R1"]
    code += [".L_x_1:", "BRA `(.L_x_1)"]
    return Program.parse(
        "\n".join(line if line.endswith(":") else f" /*0000*/  {line} ;" for line in code)
    )


# Each case is what nvcc says, what it makes, and what is found to be wrong with that.
MADE = {
    "clean": (CLEAN, program(), []),
    "spill": (CLEAN.replace("0 bytes spill l", "8 bytes spill l"), program(), ["spills [8] bytes"]),
    "serialized": (
        "(C7514) Potential Performance Loss: they are serialized in the function 'f'\n" + CLEAN,
        program(),
        ["C7514: they are serialized"],
    ),
    "for registers": (
        "(C7512) Potential Performance Loss: they are slow for the function 'f'\n" + CLEAN,
        program(),
        ["C7512: they are slow"],
    ),
    "producer": (CLEAN, program((24, 239)), ["the producer has register 24, of 24"]),
    "consumer": (CLEAN, program((23, 240)), ["the consumer has register 240, of 240"]),
    "products": (CLEAN, program(extra=1), ["58 products, not 57"]),
    "tanh": (
        CLEAN,
        program(tanh_at=2),
        ["1 of tanh's instructions follow the wait for all products"],
    ),
}


@pytest.mark.parametrize(("said", "made", "problems"), MADE.values(), ids=MADE)
def test_what_a_kernel_must_not_have(said, made, problems):
    assert list(cuda_check.faults(LATE, said, made)) == problems


def test_each_plan_is_checked():
    """Also the budgets are those of the header."""
    plans = set(re.findall(r"ATTN_PLAN\((\w+), (\w+), (\d+),", TEXT))
    plans |= {(k.sweep, k.stored, str(k.width)) for k in KERNELS if k.reads_attn}
    checked = {(k.sweep, k.stored, str(k.width)) for k in KERNELS if k.groups == 2}
    assert plans == checked and TEXT.count("using LongForward") == 1
    for name, i in (("Producer", 0), ("Consumer", 1)):
        found = re.search(rf"k{name}Registers = groups == 2 \? (\d+) : (\d+);", TEXT)
        for kernel in KERNELS:
            assert kernel.budgets[i] == int(found[1 if kernel.groups == 2 else 2])


def test_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(cuda_check, "compilers", lambda: [Nvcc("nvcc", "11.8")])
    cuda_check.cuda_check.callback()
    assert "no nvcc of 12 or newer" in capsys.readouterr().out


def test_no_body_elsewhere(tmp_path):
    """An architecture without wgmma compiles the kernels too: a source build has them all."""
    found = compilers()
    if not found or found[0].major < 12:
        pytest.skip("no nvcc")
    source = tmp_path / "kernel.cu"
    about = {**KERNELS[0]._asdict(), "late": "true", "plan": KERNELS[0].plan}
    source.write_text(cuda_check.SOURCE.format(**about), encoding="utf-8")
    command = [found[0].path, "-std=c++17", f"-I{INCLUDES}", "-arch=sm_80", "-Xptxas=-v"]
    command += ["-cubin", source]
    done = subprocess.run(
        [*command, "-o", tmp_path / "kernel.cubin"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"Used (\d+) registers", done.stderr)[1]) <= 16
