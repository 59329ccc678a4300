"""Tests of `make cuda-check`, and of AttnSweep.cuh by what can be said without a GPU.

Its ring of stages is simulated in random interleavings: the producer, the warps of the consumers,
what TMA loads and wgmma reads. Its addresses are compared with the layouts of both.
"""

import random
import re
import subprocess
from itertools import product

import pytest

from commands import cuda_check
from commands.cuda_check import HEADER, KERNELS, Kernel, Program
from fork.graft import Nvcc, compilers

TEXT = HEADER.read_text(encoding="utf-8")
SEEDS = range(6)


class Fault(Exception):
    """What the ring must not do."""


def require(holds, otherwise):
    if not holds:
        raise Fault(otherwise)


class Barrier:
    """An mbarrier: a phase ends when all have arrived, and all that is expected has come."""

    def __init__(self, count):
        self.count = self.arrivals = count
        self.expected = self.phase = 0

    def change(self, arrivals=0, expected=0):
        self.arrivals -= arrivals
        self.expected += expected
        require(self.arrivals >= 0, "an arrival too many")
        if self.arrivals == 0 and self.expected == 0:
            self.phase ^= 1
            self.arrivals = self.count

    def has_ended(self, parity):
        return self.phase != parity


class Ring:
    """A block. What stands in a comment of produce() or consume() is here under its name."""

    def __init__(self, sweep, late, tight, resident, stages, groups, counts, seed, fault=""):
        self.values, self.gradients = sweep != "kRows", sweep != "kForward"
        self.late, self.tight, self.resident = late, tight, resident
        self.stages, self.groups, self.counts, self.fault = stages, groups, counts, fault
        self.random = random.Random(seed)
        self.operands = 1 + self.gradients
        self.x_full, self.x_empty = Barrier(self.operands), Barrier(4 * groups)
        self.full = [[Barrier(1), Barrier(1)] for _ in range(stages)]
        self.empty = [[Barrier(4 * groups), Barrier(4 * groups)] for _ in range(stages)]
        self.x = None
        self.asked, self.come = {}, {}  # stage and operand -> slot
        self.loads = []  # under way

    def produce(self):
        slot = fills = 0
        for work, count in enumerate(self.counts):
            ahead = min(count, self.stages) - 1 if fills else 0
            for tile in range(count):
                if tile == ahead:
                    yield lambda parity=~fills & 1: self.x_empty.has_ended(parity)
                    self.x = work
                    for _ in range(self.operands):
                        self.x_full.change(1, 1)
                        self.loads.append((self.x_full, None, None))
                    fills += 1
                stage, parity = slot % self.stages, ~(slot // self.stages) & 1
                for i in (0, 1):
                    yield lambda s=stage, i=i, parity=parity: self.empty[s][i].has_ended(parity)
                    self.full[stage][i].change(1, 1)
                    self.asked[stage, i] = slot
                    self.loads.append((self.full[stage][i], (stage, i), slot))
                slot += 1

    def consume(self):
        """A warp. Those of a group run apart, which wgmma does not let them."""
        pending = []  # groups of wgmma: what each reads

        def wait_for(most):
            while len(pending) > most:
                for check in pending.pop(0):
                    check()

        def reading_x(work):
            def check():
                require(self.x == work, "X is overwritten")

            check()
            return check

        def reading(slot, i):
            def check():
                require(self.asked[slot % self.stages, i] == slot, "Y is overwritten")

            check()
            require(self.come.get((slot % self.stages, i)) == slot, "Y has not come")
            return check

        def awaited(slot, i):
            stage, parity = slot % self.stages, slot // self.stages & 1
            return lambda: self.full[stage][i].has_ended(parity)

        def scores_awaited(slot):
            yield awaited(slot, 0)
            if self.gradients:
                yield awaited(slot, 1)

        def release(slot, i):
            self.empty[slot % self.stages][i].change(1)

        def release_products(slot):
            if self.gradients and self.fault != "early":
                release(slot, 0)
            if self.values:
                release(slot, 1)

        def issue_scores(slot, work):
            for i in range(self.operands):
                of_x = [] if self.resident else [reading_x(work)]
                pending.append([reading(slot, i), *of_x])

        def issue(wanted, slot, i):
            if wanted:
                pending.append([reading(slot, i)])

        slot = fills = 0
        results = self.values + self.gradients
        for work, count in enumerate(self.counts):
            if not count:
                continue
            yield lambda parity=fills & 1: self.x_full.has_ended(parity)
            fills += 1
            if self.resident:
                reading_x(work)
            yield from scores_awaited(slot)
            issue_scores(slot, work)
            if self.resident:
                self.x_empty.change(1)
            if self.late:
                pending.extend([] for _ in range(results))
            for tile in range(count):
                first, last = tile == 0, tile == count - 1
                before = results if self.late else 0
                if self.fault == "x" and last and not self.resident:
                    self.x_empty.change(1)
                yield None
                wait_for(self.operands - 1 + before)
                if not self.gradients or self.fault == "early":
                    release(slot, 0)
                if not self.late and not self.tight and not first:
                    release_products(slot - 1)
                yield None
                if not self.late:
                    if not self.gradients and self.fault != "unawaited":
                        yield awaited(slot, 1)
                    issue(self.values, slot, 1)
                if self.gradients:
                    yield awaited(slot, 1)
                    wait_for(before if self.late else self.values)
                    if not self.values:
                        release(slot, 1)
                if last and not self.resident and self.fault != "x":
                    self.x_empty.change(1)
                if self.late:
                    yield awaited(slot, int(self.values))
                if not last and not self.tight:
                    yield from scores_awaited(slot + 1)
                if self.late:
                    wait_for(0)
                    if not first:
                        release_products(slot - 1)
                    if not last:
                        issue_scores(slot + 1, work)
                    issue(self.values, slot, 1)
                issue(self.gradients, slot, 0)
                if self.tight and not last:
                    yield from scores_awaited(slot + 1)
                    wait_for(0)
                    release_products(slot)
                if not self.late and not last:
                    issue_scores(slot + 1, work)
                yield None
                slot += 1
            wait_for(0)
            release_products(slot - 1)

    def run(self):
        """Returns what goes wrong in one interleaving, or nothing."""
        agents = [self.produce()] + [self.consume() for _ in range(4 * self.groups)]
        waits = dict.fromkeys(range(len(agents)))
        while waits:
            ready = [agent for agent, wait in waits.items() if wait is None or wait()]
            if not ready and not self.loads:
                return "all wait"
            if self.loads and (not ready or self.random.random() < 0.2):
                barrier, place, slot = self.loads.pop(self.random.randrange(len(self.loads)))
                if place:
                    self.come[place] = slot
                barrier.change(expected=-1)
                continue
            # Mostly the first: some run far ahead of others.
            agent = self.random.choice(ready) if self.random.random() < 0.7 else ready[0]
            try:
                waits[agent] = next(agents[agent])
            except StopIteration:
                del waits[agent]
            except Fault as e:
                return str(e)
        return ""


def run(*plan, seed, fault=""):
    counts = random.Random(seed).choices((0, 1, 2, 3, 5, 8), k=4)
    return Ring(*plan, counts, seed, fault).run()


# Sweep, late, tight, resident, stages, groups: those of the table, then the fewest stages.
PLANS = [
    ("kForward", True, False, False, 4, 2),
    ("kForward", False, False, False, 4, 3),
    ("kForward", False, False, True, 2, 2),
    ("kRows", False, False, False, 3, 2),
    ("kRows", True, False, False, 3, 2),
    ("kColumns", False, False, True, 4, 2),
    ("kColumns", False, True, False, 2, 2),
    ("kForward", True, False, True, 2, 2),
    ("kRows", False, False, True, 2, 2),
    ("kColumns", False, False, False, 2, 2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_ring(plan):
    assert [run(*plan, seed=seed) for seed in SEEDS] == [""] * len(SEEDS)


@pytest.mark.parametrize(
    "fault, plan, says",
    [
        ("early", ("kRows", False, False, False, 3, 2), "Y is overwritten"),
        ("x", ("kForward", True, False, False, 4, 2), "X is overwritten"),
        ("unawaited", ("kForward", False, False, True, 2, 2), "Y has not come"),
        ("", ("kRows", True, False, False, 2, 2), "all wait"),
    ],
    ids=["early", "x", "unawaited", "stages"],
)
def test_fault_of_a_ring(fault, plan, says):
    assert says in {run(*plan, seed=seed, fault=fault) for seed in range(40)}


def swizzled(row, column):
    """The formula of the header, in Python."""
    formula = re.search(r"int swizzled\(int row, int column\) \{\s*return (.*?);", TEXT, re.S)[1]
    return eval(formula.replace("/", "//"), {"row": row, "column": column})


def by_tma(row, column, rows):
    """Where TMA writes an element: in a tile of 64 columns, swizzled by 128 bytes."""
    place = row * 128 + column % 64 * 2
    return column // 64 * rows * 128 + (place ^ (place >> 7 & 7) << 4)


def by_wgmma(address):
    return address ^ (address >> 7 & 7) << 4


def test_swizzle():
    for row, column in product(range(256), range(64)):
        assert swizzled(row, column) == by_tma(row, column, 256)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("rows", [64, 128, 192])
def test_descriptors(width, rows):
    """What wgmma reads by score()'s and accumulate()'s descriptors is what TMA wrote there."""
    # Columns are K: 8 rows of 128 bytes, then the next 8 at the stride offset, 1024.
    for group, k in product(range(rows // 64), range(width // 16)):
        start = group * 64 * 128 + k // 4 * rows * 128 + k % 4 * 32
        for row, column in product(range(64), range(16)):
            read = by_wgmma(start + row // 8 * 1024 + row % 8 * 128 + column * 2)
            assert read == by_tma(group * 64 + row, k * 16 + column, rows)
    # Columns are N: 64 of them, then the next at the leading offset, rows * 128.
    for k, row, column in product(range(rows // 16), range(16), range(width)):
        start = k * 16 * 128 + column // 64 * rows * 128
        read = by_wgmma(start + row // 8 * 1024 + row % 8 * 128 + column % 64 * 2)
        assert read == by_tma(k * 16 + row, column, rows)


def test_fragments_of_x():
    """Lane l gives ldmatrix a row; the rows of matrix i, which is register i, are 8 lanes'."""
    for i, row in product(range(4), range(8)):
        lane = 8 * i + row
        assert (lane % 16, lane // 16 * 8) == (i % 2 * 8 + row, i // 2 * 8)


CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
LATE = Kernel("__nv_bfloat16", "kForward", 64, 128, 2, True)


def program(tanh_at=1, registers=(20, 200), extra=0):
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


@pytest.mark.parametrize(
    "said, made, problems",
    [
        (CLEAN, program(), []),
        (CLEAN.replace("0 bytes spill l", "8 bytes spill l"), program(), ["spills [8] bytes"]),
        (
            "(C7514) Potential Performance Loss: they are serialized in the function 'f'\n" + CLEAN,
            program(),
            ["C7514: they are serialized"],
        ),
        (CLEAN, program(registers=(24, 239)), ["the producer has register 24, of 24"]),
        (CLEAN, program(registers=(23, 240)), ["the consumer has register 240, of 240"]),
        (CLEAN, program(extra=1), ["58 products, not 57"]),
        (CLEAN, program(tanh_at=2), ["1 of tanh's instructions follow the wait for all products"]),
    ],
    ids=["clean", "spill", "serialized", "producer", "consumer", "products", "tanh"],
)
def test_what_a_kernel_must_not_have(said, made, problems):
    assert list(cuda_check.faults(LATE, said, made)) == problems


def test_each_plan_is_checked():
    """Also the budgets are those of the header."""
    plans = re.findall(r"struct PlanOf<T, Sweep::(\w+), (\d+)>", TEXT)
    checked = {(k.sweep, str(k.width)) for k in KERNELS if k.groups == 2}
    assert sorted(plans) == sorted(checked) and TEXT.count("using LongForward") == 1
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
    source.write_text(cuda_check.SOURCE.format(header=HEADER, **about), encoding="utf-8")
    command = [found[0].path, "-std=c++17", "-arch=sm_80", "-Xptxas=-v", "-cubin", source]
    done = subprocess.run(
        [*command, "-o", tmp_path / "kernel.cubin"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"Used (\d+) registers", done.stderr)[1]) <= 16
