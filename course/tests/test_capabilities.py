"""The table of capabilities: made again and compared with its record, and what its parts do."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "course" / "capabilities")]

import probes  # noqa: E402
import record  # noqa: E402
import run  # noqa: E402

RECORDS = sorted(record.PUBLISHED.glob("*.json"))


def test_the_table_is_as_recorded():
    """Every cell of the default release."""
    own = {k: v for k, v in os.environ.items() if k not in ("BASE", "MAKEFLAGS")}
    command = [sys.executable, "-m", "fork", "capabilities"]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "220 cells, 0 differ from " in done.stdout


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_a_record_is_whole(file):
    table = json.loads(file.read_text(encoding="utf-8"))
    assert list(table["cells"]) == list(run.ROUTES)
    names = [probe.__name__ for probe in probes.PROBES]
    for route, cells in table["cells"].items():
        assert list(cells) == names, route
        for cell in cells.values():
            assert cell["outcome"] in record.WORDS
            assert bool(cell.get("says")) == (cell["outcome"] != "yes")
    measured = [name for name in run.ROUTES if run.usable(table["cells"][name])]
    assert list(table["microseconds"]) == measured
    for costs in table["microseconds"].values():
        assert 0 < costs["inference"] < costs["gradient"]
    assert table["versions"]["torch"].startswith(file.stem)


def test_twenty_probes_eleven_routes():
    assert len(probes.PROBES) == 20 and len(run.ROUTES) == 11
    assert all(vars(probes)[probe.__name__] is probe for probe in probes.PROBES)
    files = {f.stem for f in (run.HERE / "routes").glob("*.py")}
    assert files == {way.module for way in run.ROUTES.values()}


@pytest.fixture(scope="module")
def planted():
    """What the probes say of routes with planted faults."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, Path(__file__).with_name("planted_routes.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WRONG = {
    ("wrong derivatives", "gradient"): "the gradient: wrong values",
    ("wrong derivatives", "double_backward"): "the second gradient: wrong values",
    ("wrong derivatives", "forward_ad"): "the tangent: all zeros",
    (
        "wrong derivatives",
        "forward_over_reverse",
    ): "the Hessian-vector product: wrong values",
    ("wrong derivatives", "vmap"): "the batch: wrong values",
    ("wrong derivatives", "jacrev"): "the Jacobian: wrong values",
    ("twice", "compile"): "the result: wrong values",
    ("twice", "compile_gradient"): "the gradient: wrong values",
    ("twice", "compile_jvp"): "the tangent: wrong values",
    ("twice", "dynamic_shapes"): "the result: wrong values",
    ("twice", "export"): "the result: wrong values",
    ("twice", "save"): "the result: wrong values",
    ("twice", "aot_inductor"): "the result: wrong values",
    ("twice", "autocast"): "the result: wrong values",
    ("twice", "dtensor"): "the result: wrong values",
    ("no products", "flop_counter"): "0 of 140 FLOPs",
}


def test_what_is_wrong_is_found(planted):
    found = {key: planted[key[0]][key[1]] for key in WRONG}
    assert found == {
        key: {"outcome": "wrong", "says": words} for key, words in WRONG.items()
    }


def test_an_error_is_a_no(planted):
    """Its first line, without addresses and folders."""
    assert planted["raises"]
    for cell in planted["raises"].values():
        assert cell == {"outcome": "no", "says": "ValueError: at 0x... in file.py"}


def test_parts_are_no_function_of_their_own(planted):
    cell = planted["parts"]["torch_function"]
    assert cell["outcome"] == "no" and "matmul, tanh, matmul" in cell["says"]


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (lambda: signal.raise_signal(signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os._exit(3), "the process ended"),
        (lambda: signal.raise_signal(signal.SIGALRM), "still running after 300 s"),
    ],
)
def test_a_crash_is_a_no(work, says):
    assert run.in_a_process(work) == {"outcome": "no", "says": says}


YES, NO = {"outcome": "yes"}, {"outcome": "no", "says": "Error: a"}


@pytest.mark.parametrize(
    ("found", "recorded", "lines"),
    [
        (YES, YES, []),
        (NO, NO, []),
        (YES, NO, ["r, p: yes; the record has no: Error: a"]),
        ({**NO, "says": "b"}, NO, ["r, p: no: b; the record has no: Error: a"]),
        (
            {"outcome": "wrong", "says": "Error: a"},
            NO,
            ["r, p: silently wrong: Error: a; the record has no: Error: a"],
        ),
        (None, NO, ["r, p: none; the record has no: Error: a"]),
        (YES, None, ["r, p: yes; the record has none"]),
    ],
)
def test_differences(found, recorded, lines):
    tables = ({"r": {"p": cell} if cell else {}} for cell in (found, recorded))
    assert record.differences(*tables) == lines


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_each_route_is_probed_once(jobs):
    names = list(run.ROUTES)
    shares = run.shares(names, {"implicit": "a", "explicit": "b"}, jobs)
    assert sorted(n for share in shares for n in share) == sorted(names)
    assert len(shares) == jobs + 2
    assert ["implicit"] in shares and ["explicit"] in shares
