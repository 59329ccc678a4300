"""Tests of bench/: how it makes its figures. Nothing is measured."""

import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fork.paths import ROOT
from fork.tests.conftest import write_files

sys.path.insert(0, str(ROOT / "bench"))

torch = pytest.importorskip("torch")

import report  # noqa: E402
import results  # noqa: E402
from cases import (  # noqa: E402
    ATTN,
    COMPILE,
    CUDNN,
    EAGER,
    FIELD_MODES,
    FUNCTION,
    HIGHER_ORDER_MODES,
    JAX,
    KERNEL,
    MODES,
    OUTPUT_MODES,
    SDPA,
    TITLES,
    TRITON,
    Case,
    Target,
    rows,
)
from devices import cpu  # noqa: E402
from devices import cuda as gpu  # noqa: E402
from machine import commit_of  # noqa: E402
from roofline import NoRoofline, Peaks, build  # noqa: E402

TABLES = {"cpu": cpu.CASES, "cuda": gpu.CASES}

PEAKS = """\
flops.float32 4e9
flops.float64 2e9
store.1024 1e9
store.4096 1e8
store_nt.1024 1e8
store_nt.4096 2e8
read.1024 3e9
read.4096 5e8
fresh.4096 9e9
"""


def row(mode="forward", disturbed=0.0, target=(), **seconds):
    """Makes a row as in the JSON, in which attn took 2 s, then 3 s, then 4 s."""
    case = Case("float32", 4, d=2, e=3)
    return {
        "case": case.name,
        **case.sizes,
        "attn_bytes": case.attn_bytes,
        "mode": mode,
        "target": Target(**dict(target))._asdict(),
        "seconds": {ATTN: [2.0, 3.0, 4.0], **seconds},
        "disturbed": disturbed,
        "absent": {},
        "scratch": {},
        "roofline": 1.5,
    }


def about(rows):
    machine = {
        "cpu": "A CPU",
        "cores": 2,
        "threads": 1,
        "caches": {"L2": "1 MiB"},
        "isa": "AVX2",
        "huge pages": "never",
        "python": "3.11",
        "torch": "2.13",
    }
    return {"machine": machine, "peaks": Peaks.parse(PEAKS).as_dict(), "rows": rows}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_tables_are_sound(table):
    names = [case.name for case in table]
    assert len(set(names)) == len(names)
    assert {case.dtype for case in table} == {"float32", "float64", "bfloat16", "float16"}
    for case in table:
        assert set(case.modes) <= {*MODES, *OUTPUT_MODES}
        assert set(case.targets) <= set(case.modes), case.name
    assert len(list(rows(table))) == sum(len(case.modes) for case in table)


@pytest.mark.parametrize(
    ("name", "mode", "aims"),
    [
        ("fp32 n=4096 d=64", "forward", {"eager": 7.5, "compile": 4.5, "roofline": 0.8}),
        ("fp32 n=4096 d=64", "step", {"eager": 5, "compile": 4, "roofline": 0.7}),
        ("fp32 n=2 d=3 e=4", "step", {"eager": 1.5, "compile": 3}),
        ("fp32 n=8192 d=64", "step", {"eager": 1, "roofline": 0.7, "scratch": 0.03}),
        ("fp64 n=2048 d=64", "forward", {"eager": 3, "compile": 3}),
        ("bf16 16x n=4096 d=64", "forward", {"eager": 2.8}),
        ("bf16 16x n=4096 d=64", "step", {"eager": 2.5, "scratch": 0.02}),
        # A test below has fp32 n=8192 d=64, which is in both tables.
        ("bf16 16x n=4096 d=128", "step", {"eager": 1.55}),
    ],
)
def test_targets(name, mode, aims):
    case = next(case for case in cpu.CASES + gpu.CASES if case.name == name)
    found = case.targets[mode]._asdict()
    assert {what: aim for what, aim in found.items() if aim is not None} == aims


def test_targets_of_fp32_on_a_gpu():
    case = next(case for case in gpu.CASES if case.name == "fp32 n=8192 d=64")
    assert case.targets == {"step": Target(scratch=0.02)}


def test_tf32_is_a_case_of_its_own():
    case, plain = Case("float32", 64, tf32=True), Case("float32", 64)
    assert (case.name, plain.name) == ("tf32 n=64 d=64", "fp32 n=64 d=64")
    assert case.attn_bytes == plain.attn_bytes and case.passes("step") == plain.passes("step")
    peaks = Peaks.parse(PEAKS + "copy.1024 2e9\nflops.tf32 8e12\n")
    assert peaks.seconds(case, "forward") < peaks.seconds(plain, "forward")


def test_who_waits_for_the_host():
    found = [case.name for case in gpu.CASES if case.launch_bound]
    assert found == ["bf16 n=128 d=64", "bf16 n=512 d=64", "fp32 n=128 d=64"]


def test_names_and_shapes():
    case = Case("bfloat16", 5, d=2, m=3, e=4, batch=7)
    assert case.name == "bf16 7x m=3 n=5 d=2 e=4"
    assert case.shapes == ((7, 3, 2), (7, 5, 2), (7, 5, 4))
    assert case.output_shape == (7, 3, 4) and case.attn_shape == (7, 3, 5)
    assert case.attn_bytes == 7 * 3 * 5 * 2
    assert Case("float64", 4).shapes == ((4, 64),) * 3


def test_work():
    m, n, d, e = 3, 5, 2, 4
    (forward,) = Case("float32", n, d=d, m=m, e=e).passes("forward")
    assert forward.flops == 2 * m * n * d + 2 * m * n * e
    assert forward.read == 4 * (m * d + n * d + n * e)
    assert forward.written == 4 * (m * e + m * n)
    same, backward = Case("float32", n, d=d, m=m, e=e).passes("step")
    assert same == forward
    assert backward.flops == 4 * m * n * (d + e)
    assert backward.read == 4 * (m * e + m * d + n * d + n * e + m * n)
    assert backward.written == forward.read
    both = Case("float32", n, d=d, m=m, e=e).passes("both")[1]
    assert both.read == backward.read + 4 * m * n
    batched = Case("float64", n, d=d, m=m, e=e, batch=10).passes("step")
    assert [tuple(work) for work in batched] == [
        (10 * flops, 20 * read, 20 * written) for flops, read, written in (forward, backward)
    ]


def test_peaks():
    peaks = Peaks.parse(PEAKS)
    assert peaks.flops == {"float32": 4e9, "float64": 2e9}
    # The faster kind of store counts, as measured for the next smaller working set.
    assert peaks.at("store", 1024) == peaks.at("store", 4095) == peaks.at("store", 1) == 1e9
    assert peaks.at("store", 4096) == peaks.at("store", 1 << 30) == 2e8
    other = Peaks.parse(PEAKS.replace("float64 2e9", "float64 1e9").replace("3e9", "4e9"))
    best = peaks.best(other)
    assert best.flops["float64"] == 2e9 and best.bandwidth["read"][1024] == 4e9
    # JSON has texts as keys.
    assert json.loads(json.dumps(peaks.as_dict()))["bandwidth"]["read"] == {
        "1024": 3e9,
        "4096": 5e8,
    }


def test_roofline_is_the_larger_of_computing_and_moving():
    peaks = Peaks.parse(PEAKS + "copy.1024 2e9\n")
    computes = Case("float32", 64, d=64)
    assert peaks.seconds(computes, "forward") == pytest.approx(2 * 64 * 64 * 128 / 4e9)
    writes = Case("float32", 64, d=1)
    assert peaks.seconds(writes, "forward") == pytest.approx(4 * (64 * 64 + 64) / 2e8)
    assert peaks.seconds(writes, "step") > peaks.seconds(writes, "forward")
    # float16 has no peak of its own, so float32's counts.
    half = Case("float16", 64, d=64)
    assert peaks.seconds(half, "forward") == peaks.seconds(computes, "forward")


def test_pages_that_malloc_does_not_keep():
    peaks = Peaks.parse(PEAKS + f"fresh.{64 << 20} 5e7\nfresh_huge.{64 << 20} 1e8\n")
    assert peaks.pages_seconds(Case("float32", 2048)) == 0
    size = 4 * 4096 * 4096
    # The faster kind of page counts, minus the time that storing takes anyway.
    seconds = peaks.pages_seconds(Case("float32", 4096))
    assert seconds == pytest.approx(size / 1e8 - size / 2e8)
    found = row() | {"pages": 0.75}
    assert report.cell(found, "roofline") == "50%, with pages 75%"
    assert report.cell(row() | {"pages": 0.0}, "roofline") == "50%"


def test_no_compiler_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(NoRoofline, match="^no C\\+\\+ compiler no-such-compiler"):
        build(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NoRoofline, match="does not compile: no message"):
        build(tmp_path)


def test_a_ratio_is_the_median_of_the_rounds():
    # The ratios by round are 4, 1 and 5; the ratio of the medians would be 8 / 3.
    found = row(eager=[8.0, 3.0, 20.0])
    assert report.ratios(found, EAGER) == [4, 1, 5]
    assert report.value(found, EAGER) == 4
    assert report.value(found, COMPILE) is None
    assert report.value(found, "roofline") == 0.5
    assert report.noise(found) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("eager", "target", "met"),
    [
        ([2.0, 3.0, 4.0], {}, True),
        ([1.9, 3.1, 3.9], {}, True),  # as fast, within the noise
        ([1.9, 2.9, 3.9], {}, False),
        ([8.0, 12.0, 16.0], {"eager": 4}, True),
        ([7.9, 11.9, 16.0], {"eager": 4}, False),
    ],
)
def test_no_slower_than_eager_and_as_fast_as_the_target(eager, target, met):
    found = row(eager=eager, target=target)
    assert report.aims(found)[EAGER].met is met
    assert ("✗" in report.line(found)) is not met


def test_scratch_and_roofline_have_targets_too():
    found = row(target={"roofline": 0.6, "scratch": 0.25})
    found["scratch"] = {ATTN: 16, EAGER: 128}
    aims = report.aims(found)
    assert aims["roofline"] == (0.5, 0.6, False) and aims["scratch"] == (0.25, 0.25, True)
    assert report.cell(found, "roofline") == "50% (≥ 60% ✗)"
    assert report.cell(found, "scratch") == "25%, eager 200% (≤ 25% ✓)"
    assert (
        report.verdict([found])
        == "1 of 2 targets are met; missed: fp32 n=4 d=2 e=3 forward roofline."
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(2, "2 s"), (0.0123, "12.3 ms"), (4.567e-6, "4.57 µs"), (1e-8, "0.01 µs")]
)
def test_durations(seconds, text):
    assert report.duration(seconds) == text


def test_markdown():
    rows = [
        row(eager=[8.0, 3.0, 20.0], jax=[1.0, 1.0, 1.0], target={"eager": 3}),
        row(mode="step", eager=[2.0, 3.0, 4.0], disturbed=0.5),
    ]
    text = report.markdown(about(rows))
    assert "A CPU, 1 of 2 cores; L2 1 MiB; AVX2; huge pages: never" in text
    assert "fp32 4, fp64 2" in text and "| store | 1 | 0.1 |" in text
    assert f"| case | time | eager | {TITLES[JAX]} | roofline |" in text
    assert "| fp32 n=4 d=2 e=3 | 3 s | 4.00 (≥ 3 ✓) | 0.33 | 50% |" in text
    assert "| fp32 n=4 d=2 e=3 | 3 s | 1.00 | 50% |" in text
    assert "2 of 2 targets are met." in text
    assert "more than 5% of the machine in: fp32 n=4 d=2 e=3 step." in text
    assert "autograd.Function" not in text.partition("## Forward")[2]
    rows[1]["absent"] = {JAX: "no memory", FUNCTION: "it takes matrices only"}
    rows[1]["batch"] = 2
    text = report.markdown(about(rows))
    assert "jax left out of fp32 n=4 d=2 e=3 step: no memory" in text
    assert "matrices only" not in text


def test_the_commit_of_the_kernel(tmp_path):
    """Figures name it, so that they are of a known kernel after the next change."""
    made = write_files(tmp_path / "clone", {"aten/Attn.cpp": "1\n", "bench/a.py": "1\n"})
    assert commit_of(made) is None  # no repository
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.invalid", "-C", made]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x", "--date=2026-01-02"]):
        subprocess.run([*git, *words], check=True)
    found = commit_of(made)
    assert re.fullmatch(r"[0-9a-f]{7,} of 20\d\d-\d\d-\d\d", found)
    write_files(made, {"bench/a.py": "2\n"})
    assert commit_of(made) == found  # no part of the kernel
    write_files(made, {"aten/Attn.cpp": "2\n"})
    assert commit_of(made) == f"{found}, with changes"
    result = about([])
    result["machine"]["commit"] = found
    assert report.describe(result["machine"]).endswith(f"; kernel of commit {found}.")


def test_without_attn_and_without_peaks():
    found = row(eager=[1.0, 1.0, 1.0])
    del found["seconds"][ATTN]
    found["roofline"] = None
    result = about([found])
    del result["peaks"]
    text = report.markdown(result)
    assert "0 of 0 targets" in text and "| fp32 n=4 d=2 e=3 | - |" in text


def test_files_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "plot", None)
    result = about([row(eager=[8.0, 3.0, 20.0])])
    assert results.write(result, tmp_path / "out") == ["cpu.json", "cpu.md"]
    assert (
        json.loads((tmp_path / "out/cpu.json").read_text(encoding="utf-8"))["rows"]
        == result["rows"]
    )


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(mode, eager=[8.0, 3.0, 20.0]) for mode in MODES]
    for found in rows:
        found.update(d=64, e=64)  # which the curves over n show
    written = results.write(about(rows), tmp_path)
    assert written == ["cpu.json", "cpu.md", "cpu.svg", "cpu-narrow.svg"]
    light, narrow = ((tmp_path / name).read_text(encoding="utf-8") for name in written[2:])
    widths = [float(re.search(r'width="([\d.]+)pt"', text)[1]) for text in (light, narrow)]
    assert widths == [13 * 72, 4 * 72]
    results.write(about(rows), tmp_path)
    assert (tmp_path / "cpu.svg").read_text(encoding="utf-8") == light


def swept(*ratios, threads=2):
    rows = []
    for i, ratio in enumerate(ratios):
        case = {"case": f"case {i}", "mode": "step", "flops": 10.0**i, "disturbed": 0.0}
        rows.append(case | {"seconds": {ATTN: [1.0], EAGER: [ratio]}})
    return {"seed": 7, "threads": threads, "rows": rows}


def test_what_a_sweep_found():
    assert report.sweep_summary(swept(4, 1, 0.95)) == (
        "Of 3 random shapes (seed 7, 2 threads) none is below 0.95 of eager; "
        "geometric mean 1.56, least 0.95."
    )
    assert report.sweep_summary(swept(0.8, 1, 0.5, threads=1)) == (
        "Of 3 random shapes (seed 7, 1 thread) 2 are below 0.95 of eager; geometric mean 0.74, "
        "least 0.50. The slowest: case 2 step (0.50), case 0 step (0.80)."
    )
    assert report.sweep_summary(swept()) == "No random shape was measured."
    text = report.markdown(about([]) | {"sweeps": [swept(2, 2), swept(3, threads=1)]})
    assert "0 of 0 targets are met. Of 2 random shapes" in text and "(seed 7, 1 thread)" in text


def test_plot_of_a_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    written = results.write(about([]) | {"sweeps": [swept(2, 0.5)]}, tmp_path)
    assert written[2:] == ["cpu-sweep.svg"]
    assert "2 threads, seed 7" in (tmp_path / "cpu-sweep.svg").read_text(encoding="utf-8")


def test_random_cases_are_as_they_are_described():
    import random

    import sweep

    rng, again = random.Random(3), random.Random(3)
    found = [sweep.random_case(rng) for _ in range(2000)]
    assert found[:50] == [sweep.random_case(again) for _ in range(50)]
    cases = [case for case, _ in found]
    assert {mode for _, mode in found} == {"forward", "step", *OUTPUT_MODES}
    assert {case.dtype for case in cases} == {"float32", "float64", "bfloat16", "float16"}
    for sizes, largest in (("mn", sweep.ROWS), ("de", sweep.COLS)):
        values = [getattr(case, size) for case in cases for size in sizes]
        assert min(values) == 1 and largest // 2 < max(values) <= largest
        powers = sum(x & (x - 1) == 0 for x in values if x > 16)
        assert 0.1 < powers / sum(x > 16 for x in values) < 0.4
    assert 0 in {case.batch for case in cases} and max(case.batch for case in cases) > 500
    few = [case.d in range(2, 9) for case, mode in found if mode in FIELD_MODES]
    assert sum(few) > len(few) / 2
    for case in cases:
        assert case.passes("forward")[0].flops <= sweep.MAX_FLOPS
        assert case.bytes(1) and case.m * case.n * max(case.batch, 1) <= sweep.MAX_ELEMENTS


@pytest.mark.parametrize("ratios,rounds", [((2,), [5]), ((0.5, 2), [5, 15]), ((0.5, 0.4), [5, 15])])
def test_what_seems_slower_is_measured_again(monkeypatch, ratios, rounds):
    import sweep
    from measure import Times

    asked, answers = [], iter(ratios)

    def interleaved(runs, clock, *, seconds, rounds):
        asked.append(rounds)
        return Times({ATTN: [1.0], EAGER: [next(answers)]}, 0.0)

    monkeypatch.setattr(sweep, "RUNS", {ATTN: lambda problem: None, EAGER: lambda problem: None})
    monkeypatch.setattr(sweep, "interleaved", interleaved)
    found = sweep.measured(Case("float32", 2), "forward", 1)
    assert asked == rounds and report.value(found, EAGER) == ratios[-1]


def test_busy_processes_end(monkeypatch):
    import machine

    made = []

    class Process(subprocess.Popen):
        def __init__(self, command):
            super().__init__(command)
            made.append(self)

    monkeypatch.setattr(machine.subprocess, "Popen", Process)
    with pytest.raises(KeyboardInterrupt), machine.busy_processes(2):
        assert [process.poll() for process in made] == [None, None]
        raise KeyboardInterrupt
    assert all(process.returncode for process in made)


def test_everyone_is_first_and_follows_everyone():
    from measure import rotations

    orders = rotations("abcd", 8)
    assert sorted(order[0] for order in orders) == sorted("abcd" * 2)
    pairs = {pair for order in orders for pair in zip(order, order[1:], strict=False)}
    assert {("a", "b"), ("b", "a"), ("d", "a"), ("a", "d")} <= pairs
    assert all(sorted(order) == list("abcd") for order in orders)


def test_the_quietest_rounds_count(monkeypatch):
    import measure

    shares = iter([0.5, 0.0, 0.3, 0.01, 0.4, 0.2])

    class Disturbed(measure.Others):
        def share(self):
            return next(shares)

    class Timer:
        """Returns as time the number of the call."""

        calls = 0

        def __init__(self, *args, **kwargs):
            self.median = self.mean = 1.0

        def blocked_autorange(self, min_run_time):
            return self

        def timeit(self, number):
            Timer.calls += 1
            self.mean = float(Timer.calls)
            return self

    monkeypatch.setattr(measure, "Others", Disturbed)
    monkeypatch.setattr(measure, "Timer", Timer)
    times = measure.interleaved({"a": None}, measure.host_clock(1), seconds=1, rounds=3)
    assert times.disturbed == 0.2 and sorted(times.seconds["a"]) == [2, 4, 6]
    # If a GPU is unusable, there is no contender.
    assert measure.interleaved({}, measure.host_clock(1), seconds=1) == ({}, 0)


def test_what_others_take_of_the_machine(monkeypatch, tmp_path):
    from measure import Others

    stat = tmp_path / "stat"
    monkeypatch.setattr(Others, "STAT", stat)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    stat.write_text("cpu 100 0 0 100 0 0 0 0 0 0\n", encoding="utf-8")
    others = Others()
    stat.write_text(
        "cpu 110 5 5 130 40 0 0 10 0 0\n", encoding="utf-8"
    )  # 100 ticks: 70 idle, 10 the host's
    assert others.share() == pytest.approx(0.3)
    stat.unlink()
    assert Others().share() == 0  # as on a system without /proc/stat


def test_over_the_length(tmp_path):
    """A curve that ends early leaves its cells empty."""
    pytest.importorskip("matplotlib")
    import lengths

    def row(n, mode, **seconds):
        names = {"ours": "torch.attn_output", "eager": "eager", "attn": "torch.attn"}
        named = {names[x]: y for x, y in seconds.items()}
        same = {"memory": dict.fromkeys(named, 3 << 20), "flops": dict.fromkeys(named, 1e9)}
        return {"n": n, "mode": mode, "seconds": named, "disturbed": 0.0, **same}

    result = {
        "machine": about([])["machine"],
        "peak": 1e9,
        "errors": {"n": 512, "found": {"eager": 1e-7}},
        "rows": [
            row(512, "forward", ours=[2.0, 2.0, 2.0], eager=[4.0, 5.0, 9.0]),
            row(1024, "forward", ours=[8.0]),
            row(512, "step", ours=[4.0], eager=[4.0]),
        ],
    }
    lengths.write(result, tmp_path)
    text = (tmp_path / "cpu-lengths.md").read_text(encoding="utf-8")
    assert "| 512 | 2 s | 50% | 1.00, 3 MiB | 2.50, 3 MiB |" in text
    assert "| 1024 | 8 s | 12% | 1.00, 3 MiB |  |" in text
    assert "n = 512: eager 1.0e-07" in text
    assert "peak is 1 GFLOP/s. A figure" in text
    disturbed = lengths.markdown({**result, "peak": 4e9, "disturbed peak": 3e9})
    assert "peak is 4 GFLOP/s, by an earlier run" in disturbed and "as 3. A figure" in disturbed
    narrow = (tmp_path / "cpu-lengths-narrow.svg").read_text(encoding="utf-8")
    assert "Memory: step" in narrow
    # The bars want second derivatives, and are of the largest n at which eager has these.
    assert not [*tmp_path.glob("*bars*")]
    for n in (512, 1024, 2048):
        others = {} if n == 2048 else {"eager": [9.0]}
        result["rows"].append(row(n, "step", ours=[4.0], attn=[n / 128], **others))
        result["rows"].append(row(n, "double backward", ours=[5.0], **others))
    lengths.write(result, tmp_path)
    for end in ("", "-dark", "-narrow"):
        bars = (tmp_path / f"cpu-lengths-bars{end}.svg").read_text(encoding="utf-8")
        assert "n = m = 1024," in bars and result["machine"]["cpu"] in bars
        assert "torch.attn, step: 1.1×, 3 MiB (eager: 3 MiB)" in bars
        assert "double backward: 1.8×" in bars and ("#ffffff" in bars) == (end != "-dark")


@pytest.mark.parametrize("mode", HIGHER_ORDER_MODES)
def test_higher_derivatives(mode):
    """attn_output's are eager's, and the model counts the FLOPs that torch counts."""
    import contenders
    from torch.utils.flop_counter import FlopCounterMode

    if not hasattr(torch, "attn_output"):
        pytest.skip("this torch has no attn_output")
    case = Case("float64", 5, m=7, d=3, e=2, batch=2)
    found, expected = [
        run(contenders.Problem(case, mode)) for run in (contenders.attn_run, contenders.eager_run)
    ]
    with FlopCounterMode(display=False) as counter:
        results = found()
    torch.testing.assert_close(tuple(results), tuple(expected()))
    assert counter.get_total_flops() == sum(x.flops for x in case.passes(mode))


def test_what_is_measured_over_the_length_computes_the_same():
    pytest.importorskip("matplotlib")
    import lengths

    if not hasattr(torch, "attn_output"):
        pytest.skip("this torch has no attn_output")
    found = lengths.errors(512)
    assert tuple(found) == lengths.SAME
    assert max(found.values()) < 1e-5, found


def test_ring(tmp_path):
    """Two processes, by the clock and by the loopback device; what the model says of more."""
    pytest.importorskip("matplotlib")
    import ring

    def row(mode, n, alone, together):
        seconds = {"alone": [alone] * 3, "ring": [together] * 3}
        sent = 1 << 20
        return {"mode": mode, "n": n, "seconds": seconds, "sent": sent, "flops": 2e9}

    rows = [row(mode, 4096, 2.0, 1.25) for mode in ring.MODES]
    about_it = {"machine": about([])["machine"], "bandwidth": 1e10, "block": 1024}
    ring.write(about_it | {"rows": rows}, tmp_path)
    text = (tmp_path / "cpu-ring.md").read_text(encoding="utf-8")
    # k and v of 2048 rows are 1 MiB, which each rank sends once.
    assert "| 4096 | forward | 2 s | 1.25 s | 0.80 | 1.0 MiB | 1.00 |" in text
    assert "1 GFLOP/s" in text
    assert "By the model" in (tmp_path / "cpu-ring-narrow.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("mode", ["output", "output step", "causal", "causal step"])
def test_the_model_of_the_ring(mode):
    pytest.importorskip("matplotlib")
    import ring

    def share(n=1 << 17, ranks=8, rate=1e11, bandwidth=1e10):
        return ring.model(n, ranks, mode, rate, bandwidth, block=1024)

    assert share() > 0.95
    assert share(bandwidth=1e6) < share(bandwidth=1e7) < share()
    assert share(rate=1e14) < share()
    # No more ranks work than there are blocks, or pairs of blocks.
    homes = 128 if mode.startswith("output") else 64
    assert share(ranks=8 * homes) < 0.2 < 0.9 * share(ranks=homes)


def test_stages(tmp_path, monkeypatch):
    """They are compiled from the installed kernel, for each instruction set."""
    pytest.importorskip("matplotlib")
    import stages

    if not hasattr(torch, "attn") or not stages.available():
        pytest.skip("no kernel of attn for this machine")
    monkeypatch.setattr(stages, "WIDTHS", (1, 16))
    sets = [stages.measure(x) for x in stages.available()]
    for row in (row for found in sets for row in found["rows"]):
        assert len(row["stages"]) == len(stages.STAGES) and row["kernel"] > 0
    stages.write({"machine": about([])["machine"], "sets": sets}, tmp_path)
    text = (tmp_path / "cpu-stages.md").read_text(encoding="utf-8")
    assert all(f"## {x}, " in text for x in stages.available()) and "| 16 |" in text
    assert "AVX2" in (tmp_path / "cpu-stages-narrow.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("mode", ["Laplacian", "step"])
def test_fields(mode):
    """Each way gives the same Laplacian, and the same gradients of a loss of it."""
    pytest.importorskip("matplotlib")
    import fields

    size = fields.Size(7, 5, 2)
    expected = fields.torch_run(fields.eager, size, fields.loop, mode)()
    for way in fields.WAYS.values():
        found = fields.torch_run(fields.eager, size, way, mode)()
        torch.testing.assert_close(found, expected)
    assert fields.medians({"seconds": {"a": [3.0, 1.0, 2.0]}}) == {"a": 2.0}


def test_report_on_fields(tmp_path):
    pytest.importorskip("matplotlib")
    import fields

    def row(mode):
        seconds = {name: [2e-3 * at, 1e-3 * at] for at, name in enumerate(fields.RUNS, 1)}
        held = dict.fromkeys(fields.RUNS, 1 << 20)
        about = {"mode": mode, "size": fields.SIZES[0]._asdict(), "failed": {}}
        return about | {"seconds": seconds, "memory": held}

    ways = {f"{name}, {way}": [1.0] for way in fields.WAYS for name in ("attn", "eager")}
    run = {"seconds": 2.0, "losses": [1.0, 1e-3], "error": 0.5, "field": [0.0] * fields.SIDE**2}
    solved = {"exact": [1.0] * fields.SIDE**2, "runs": {"attn": run, "eager": run}}
    result = {
        "machine": about([])["machine"],
        "rows": [row(mode) for mode in fields.MODES],
        "ways": {"size": fields.SIZES[0]._asdict(), "seconds": ways},
        "solved": solved,
    }
    fields.write(result, tmp_path)
    text = (tmp_path / "cpu-fields.md").read_text(encoding="utf-8")
    line = "| 100,000 points, 256 hidden, 1 out | 1.5 ms, 1 MiB | 2.00, 1 MiB | 3.00, 1 MiB |"
    assert text.count(line) == 2 and "| attn_output | 2.0 | 2 | 1.0e-03 | 5.0e-01 |" in text
    assert "What it lacks" in (tmp_path / "cpu-fields-solution-narrow.svg").read_text(
        encoding="utf-8"
    )


def test_ways(tmp_path):
    pytest.importorskip("matplotlib")
    import ways

    rows = [
        {
            "case": case.name,
            "mode": mode,
            "first": {name: at + 1.0 for at, name in enumerate(ways.WAYS)},
            "seconds": {name: [3e-6, 1e-6, 2e-6] for name in ways.WAYS},
        }
        for case in ways.CASES
        for mode in ways.MODES
    ]
    ways.write({"machine": about([])["machine"], "rows": rows}, tmp_path)
    text = (tmp_path / "cpu-ways.md").read_text(encoding="utf-8")
    assert "| 1 s | 2 s | 3 s | 4 s | 5 s |" in text
    assert text.count("| 2 µs") == len(rows) * len(ways.WAYS)


def test_contenders_agree_with_eager():
    import contenders

    case = Case("float64", 5, d=2, m=3, e=4)
    for mode in MODES:
        problem = contenders.Problem(case, mode)
        expected = contenders.as_tensors(contenders.eager_run(problem)())
        shapes = [tuple(x.shape) for x in expected]
        assert shapes[:2] == [(3, 4), (3, 5)]
        assert shapes[2:] == ([] if mode == "forward" else [(3, 2), (5, 2), (5, 4)])
        results = contenders.function_run(problem)()
        assert contenders.disagreement(results, expected, case.dtype) == ""
        wrong = [*expected[:1], expected[1] + 1e-3, *expected[2:]]
        assert contenders.disagreement(wrong, expected, case.dtype).startswith("its attn differs")
        nan = [torch.full_like(x, float("nan")) for x in expected]
        assert "its output" in contenders.disagreement(nan, expected, case.dtype)
    with pytest.raises(contenders.Absent):
        contenders.function_run(contenders.Problem(Case("float32", 2, batch=3), "step"))


class Event:
    """Replaces CUDA's event; the GPU works while the host waits."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def cuda(monkeypatch):
    """Replaces torch.cuda by the CPU; records which of its functions are called, in order."""
    calls = []
    properties = {
        "name": "A GPU",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 80 << 30,
        "L2_cache_size": 1 << 10,
    }
    held = {"memory_allocated": 1000, "max_memory_allocated": 1 << 30}
    fakes = {
        "is_available": lambda: True,
        "Event": Event,
        "_sleep": lambda cycles: calls.append("sleep"),
        "synchronize": lambda: calls.append("synchronize"),
        "get_device_properties": lambda: SimpleNamespace(**properties),
        "reset_peak_memory_stats": lambda: calls.append("reset"),
        **{name: lambda n=n: n for name, n in held.items()},
    }
    for name, fake in fakes.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("Generator", "randn", "empty", "zeros"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    monkeypatch.setattr(gpu, "WORKING_SETS", [1 << 12, 1 << 14])
    monkeypatch.setattr(gpu, "SIDE", 8)
    monkeypatch.setenv("PATH", "")  # so that there is no nvidia-smi
    return SimpleNamespace(calls=calls, precisions=precisions)


def on_cpu(make):
    def made(*args, **kwargs):
        args = ["cpu" if arg == "cuda" else arg for arg in args]
        return make(*args, **{k: "cpu" if v == "cuda" else v for k, v in kwargs.items()})

    return made


def test_events_are_around_the_call_alone(cuda, monkeypatch):
    place = gpu.Device(1)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.01 * cuda.calls.count("run"))
    place.flush = lambda: cuda.calls.append("flush")
    timer = gpu.EventsTimer(lambda: cuda.calls.append("run"), place)
    del cuda.calls[:]
    found = timer.timeit(2)
    assert cuda.calls == ["sleep", "flush", "run"] * 2 + ["synchronize"]
    assert found.mean == pytest.approx(0.01) == timer.blocked_autorange(0.1).median
    assert timer.queueing == timer.LONGEST  # twice what it took


def test_peaks_of_a_gpu(cuda):
    peaks = gpu.Device(1).peaks()
    assert set(peaks.flops) == {"bfloat16", "float16", "tf32", "float32", "float64"}
    assert cuda.precisions == ["highest", "highest", "high", "highest", "highest"]
    assert {kind: list(by) for kind, by in peaks.bandwidth.items()} == dict.fromkeys(
        ("store", "store_memset", "read", "copy"), [1 << 12, 1 << 14]
    )
    for case in gpu.CASES:
        assert all(peaks.seconds(case, mode) > 0 for mode in case.modes)
        assert peaks.pages_seconds(case) == 0


def test_who_else_takes_part_on_a_gpu(cuda):
    more = gpu.Device(1).more
    large, small = Case("bfloat16", 4096, batch=16), Case("bfloat16", 512)
    assert more(large, "output step") == [SDPA, CUDNN]
    assert more(small, "causal") == [SDPA, CUDNN, KERNEL]
    assert more(large, "tangent") == more(large, "step") == []
    assert more(small, "step") == [KERNEL]


def test_triton_takes_part_beside_kernels_in_cpp(cuda, monkeypatch):
    monkeypatch.setattr(gpu, "has_cuda_kernel", lambda op: True)
    more, case = gpu.Device(1).more, Case("bfloat16", 4096, batch=16)
    assert more(case, "output step") == [SDPA, CUDNN, TRITON] and more(case, "both") == [TRITON]
    assert more(case, "tangent") == []


@pytest.mark.parametrize("mode", ["forward", "step", "both", "output step", "causal step"])
def test_the_operators_that_triton_gets(mode):
    """On a CPU they are composed, and give what eager gives."""
    import contenders

    if not hasattr(torch.ops.aten, "_portable_attn"):
        pytest.skip("no torch.attn")
    problem = contenders.Problem(Case("float64", 12, d=5, m=9, e=4, batch=2), mode)
    expected = contenders.as_tensors(contenders.eager_run(problem)())
    assert contenders.disagreement(contenders.triton_run(problem)(), expected, "float64") == ""


def bench_on_cuda(monkeypatch, out, *args):
    """Returns a function that runs bench.py: its exit status, its output and the JSON."""
    from click.testing import CliRunner

    import bench

    table = (
        Case("float32", 8, targets={"step": Target(scratch=0.02)}),
        Case("float32", 600, modes=("forward",), tf32=True),
        Case("bfloat16", 600, modes=("step",)),
    )
    monkeypatch.setattr(gpu.Device, "cases", table)
    monkeypatch.setattr(bench.memory, "LEAST", 0)
    args = ("--device", "cuda", "--out", str(out), "--quick", "--rounds", "2", *args)
    done = CliRunner().invoke(bench.main, [*args, "--no-compile"])
    file = out / "cuda.json"
    return (
        done.exit_code,
        done.output,
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else None,
    )


def test_the_whole_of_it_on_a_gpu(cuda, monkeypatch, tmp_path):
    if not hasattr(torch, "attn"):
        pytest.skip("no torch.attn")
    monkeypatch.setattr(results, "plot", None)
    status, said, result = bench_on_cuda(monkeypatch, tmp_path)
    assert status == 0, said
    found = {f"{row['case']} {row['mode']}": row for row in result["rows"]}
    assert list(found) == [
        "fp32 n=8 d=64 forward",
        "fp32 n=8 d=64 step",
        "tf32 n=600 d=64 forward",
        "bf16 n=600 d=64 step",
    ]
    assert [row["clock"] for row in found.values()] == ["host", "host", "events", "host"]
    for row in found.values():
        assert set(row["seconds"]) == {ATTN, EAGER, FUNCTION, KERNEL} and row["roofline"] > 0
    step = found["fp32 n=8 d=64 step"]
    given = 4 * (3 * 8 * 64 + 8 * 64 + 8 * 8)
    assert step["scratch"] == dict.fromkeys((ATTN, EAGER), (1 << 30) - 1000 - given)
    assert "high" in cuda.precisions
    assert result["machine"]["gpu"] == "A GPU" and "driver" not in result["machine"]
    text = (tmp_path / "cuda.md").read_text(encoding="utf-8")
    assert text.startswith("# torch.attn on a GPU")
    assert "A GPU, 132 SMs of 9.0; memory 80 GiB; L2 0 MiB; CUDA 13.0; " in text
    assert " host |" in text and "malloc" not in text and "jax" not in text
    assert "no jax" not in said


def test_what_was_not_measured(cuda, monkeypatch, tmp_path):
    import bench

    monkeypatch.setattr(results, "plot", None)
    status, said, result = bench_on_cuda(monkeypatch, tmp_path, "--minutes", "1e-9")
    assert status == 0 and result["rows"] == []
    assert list(result["unmeasured"].values()) == ["no time was left"] * 4
    assert "not measured, as no time was left: fp32 n=8 d=64 forward, fp32" in said
    assert "not measured, as no time was left: fp32" in (tmp_path / "cuda.md").read_text(
        encoding="utf-8"
    )

    def spoiled(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access\nmore of it")

    monkeypatch.setattr(bench, "Problem", spoiled)
    status, said, result = bench_on_cuda(monkeypatch, tmp_path)
    assert status == 1 and result["rows"] == []
    assert set(result["unmeasured"].values()) == {"CUDA error: an illegal memory access"}


def test_no_gpu_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, said, result = bench_on_cuda(monkeypatch, tmp_path)
    assert status == 2 and "torch sees no GPU" in said and result is None


def test_report_of_a_gpu(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(mode, eager=[8.0, 3.0, 20.0]) for mode in MODES]
    for found, clock in zip(rows, ("events", "host", "events"), strict=True):
        found.update(d=64, e=64, dtype="bfloat16", clock=clock, roofline=6.0)
    result = about(rows) | {"device": "cuda", "unmeasured": {"a": "x", "b": "y", "c": "x"}}
    result["peaks"]["flops"]["tf32"] = 4e14
    written = results.write(result, tmp_path)
    assert written == ["cuda.json", "cuda.md", "cuda.svg", "cuda-narrow.svg"]
    text = (tmp_path / "cuda.md").read_text(encoding="utf-8")
    assert "Measured peaks in TFLOP/s: fp32 0, fp64 0, tf32 400." in text
    assert "| 3 s host |" in text and "| 3 s |" in text and "200%" in text
    assert "\nnot measured, as x: a, c\n\nnot measured, as y: b\n" in text
    assert "Time of a step, bf16" in (tmp_path / "cuda.svg").read_text(encoding="utf-8")
