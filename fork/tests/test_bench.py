"""The benchmark's figures, without measuring any: benchmarks/attn."""

import json
import sys

import pytest

from fork.__main__ import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "attn"))

import report  # noqa: E402
from cases import (  # noqa: E402
    ATTN,
    CASES,
    COMPILE,
    EAGER,
    FUNCTION,
    JAX,
    MODES,
    TITLES,
    Case,
    Target,
    rows,
)
from roofline import NoRoofline, Peaks, build  # noqa: E402

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
    """A row as the JSON has it: attn took 2 s, then 3 s, then 4 s."""
    case = Case("float32", 4, d=2, e=3)
    return {
        "case": case.name,
        "dtype": case.dtype,
        **{x: getattr(case, x) for x in ("batch", "m", "n", "d", "e")},
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


def test_the_table_is_sound():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.dtype for case in CASES} == {"float32", "float64", "bfloat16", "float16"}
    for case in CASES:
        assert set(case.modes) <= set(MODES)
        assert set(case.targets) <= set(case.modes), case.name
    assert len(list(rows())) == sum(len(case.modes) for case in CASES)


@pytest.mark.parametrize(
    ("name", "mode", "aims"),
    [
        ("fp32 n=4096 d=64", "forward", {"eager": 7.5, "compile": 4.5, "roofline": 0.8}),
        ("fp32 n=4096 d=64", "step", {"eager": 5, "compile": 4, "roofline": 0.7}),
        ("fp32 n=2 d=3 e=4", "step", {"eager": 1.5, "compile": 3}),
        ("fp32 n=8192 d=64", "step", {"eager": 1, "roofline": 0.7, "scratch": 0.03}),
        ("fp64 n=2048 d=64", "forward", {"eager": 3, "compile": 3}),
    ],
)
def test_targets(name, mode, aims):
    case = next(case for case in CASES if case.name == name)
    found = case.targets[mode]._asdict()
    assert {what: aim for what, aim in found.items() if aim is not None} == aims


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
    # The kind that is faster there, at the next smaller working set.
    assert peaks.at("store", 1024) == peaks.at("store", 4095) == peaks.at("store", 1) == 1e9
    assert peaks.at("store", 4096) == peaks.at("store", 1 << 30) == 2e8
    other = Peaks.parse(PEAKS.replace("float64 2e9", "float64 1e9").replace("3e9", "4e9"))
    best = peaks.best(other)
    assert best.flops["float64"] == 2e9 and best.bandwidth["read"][1024] == 4e9
    # From JSON too, whose keys are words.
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
    # No peak of its own: float32's.
    half = Case("float16", 64, d=64)
    assert peaks.seconds(half, "forward") == peaks.seconds(computes, "forward")


def test_pages_that_malloc_does_not_keep():
    peaks = Peaks.parse(PEAKS + f"fresh.{64 << 20} 5e7\nfresh_huge.{64 << 20} 1e8\n")
    assert peaks.pages_seconds(Case("float32", 2048)) == 0
    size = 4 * 4096 * 4096
    # The faster kind, above what storing there takes anyway.
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
    # Round by round 4, 1 and 5; of the medians it would be 10 / 3.
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
        ([1.9, 3.1, 3.9], {}, True),  # equal, but for noise
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


def test_without_attn_and_without_peaks():
    found = row(eager=[1.0, 1.0, 1.0])
    del found["seconds"][ATTN]
    found["roofline"] = None
    result = about([found])
    del result["peaks"]
    text = report.markdown(result)
    assert "0 of 0 targets" in text and "| fp32 n=4 d=2 e=3 | - |" in text


def test_files_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "PLOTS", False)
    result = about([row(eager=[8.0, 3.0, 20.0])])
    assert report.write(result, tmp_path / "out") == ["cpu.json", "cpu.md"]
    assert json.loads((tmp_path / "out/cpu.json").read_text())["rows"] == result["rows"]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(mode, eager=[8.0, 3.0, 20.0]) for mode in MODES]
    for found in rows:
        found.update(d=64, e=64)  # in the curves over n
    written = report.write(about(rows), tmp_path)
    assert written == ["cpu.json", "cpu.md", "cpu.svg", "cpu.png", "cpu-dark.svg"]
    light, dark = ((tmp_path / f"cpu{x}.svg").read_text() for x in ("", "-dark"))
    assert "#ffffff" in light and "#ffffff" not in dark
    report.write(about(rows), tmp_path)
    assert (tmp_path / "cpu.svg").read_text() == light


def test_everyone_is_first_and_follows_everyone():
    pytest.importorskip("torch")
    from measure import rotations

    orders = rotations("abcd", 8)
    assert sorted(order[0] for order in orders) == sorted("abcd" * 2)
    pairs = {pair for order in orders for pair in zip(order, order[1:], strict=False)}
    assert {("a", "b"), ("b", "a"), ("d", "a"), ("a", "d")} <= pairs
    assert all(sorted(order) == list("abcd") for order in orders)


def test_the_quietest_rounds_count(monkeypatch):
    pytest.importorskip("torch")
    import measure

    shares = iter([0.5, 0.0, 0.3, 0.01, 0.4, 0.2])

    class Disturbed(measure.Others):
        def share(self):
            return next(shares)

    class Timer:
        """Its time is the number of the call."""

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
    times = measure.interleaved({"a": None}, 1, seconds=1, rounds=3)
    assert times.disturbed == 0.2 and sorted(times.seconds["a"]) == [2, 4, 6]


def test_what_others_take_of_the_machine(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    from measure import Others

    stat = tmp_path / "stat"
    monkeypatch.setattr(Others, "STAT", stat)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    stat.write_text("cpu 100 0 0 100 0 0 0 0 0 0\n")
    others = Others()
    stat.write_text("cpu 110 5 5 130 40 0 0 10 0 0\n")  # of 100 ticks 70 idle, 10 the host's
    assert others.share() == pytest.approx(0.3)
    stat.unlink()
    assert Others().share() == 0  # no Linux


def test_contenders_agree_with_eager():
    torch = pytest.importorskip("torch")
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
