"""The check for a day with a GPU, as far as it goes without one: scripts/gpu_check.py."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        cwd=SCRIPT.parent.parent,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def gpu_check():
    """The script as a module, which imports its neighbour."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


def test_without_a_gpu_it_says_so(tmp_path):
    done = run(SCRIPT, "--json", tmp_path / "gpu.json")
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr
    assert "--interpret" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "gpu.json").exists()


def test_in_the_interpreter(tmp_path):
    done = run(SCRIPT, "--interpret", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["finished"]
    assert told["left_out"] == told["running"] == []
    assert {row["family"] for row in told["parity"]} == {"resident", "step", "elementwise"}
    assert {row["dtype"] for row in told["parity"]} == {"float32", "bfloat16", "float16"}
    for row in told["parity"]:
        assert row["ok"], row
        assert 0 < row["error_over_bound"] <= 1, row
    (timed,) = told["timing"]
    assert timed["contender_errors"] == {}
    assert timed["agreement"]["flax"] <= 2
    for which in ("forward", "train"):
        assert set(timed[which]["median_ms"]) == {"scan", "flax"}
    for text in ("elementwise", "forward+backward", "5 of 5 parity rows ok"):
        assert text in done.stdout
    assert "FAIL" not in done.stdout


# Rows without arithmetic, of which one is wrong, one does not compile and one ends its process.
BAD_DAY = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import gpu_check

def prepare(case, interpret):
    if case.dtype == "bfloat16":
        raise RuntimeError("this does not compile")
    if case.dtype == "float16":
        os.kill(os.getpid(), signal.SIGKILL)
    wrong = case.H == 100
    return gpu_check.Prepared("step", *[lambda k=k: {{"y": 1.0 + k}} for k in (wrong, 0, 0)], 0)

gpu_check.prepare = prepare
gpu_check.SCRIPT = __file__
sys.exit(gpu_check.main())
"""


def test_a_failing_row_stops_no_other(tmp_path):
    script, path = tmp_path / "bad_day.py", tmp_path / "gpu.json"
    script.write_text(BAD_DAY.format(folder=str(SCRIPT.parent)))
    options = ["--interpret", "--only", "parity", "--workers", "2"]
    done = run(script, *options, "--json", path)
    assert done.returncode == 1, done.stderr[-3000:]
    told = json.loads(path.read_text())
    assert told["finished"]
    assert told["left_out"] == []
    failed = {row["title"]: row["error"] for row in told["parity"] if not row["ok"]}
    assert failed == {
        "parity: lstm float32 3,3,5,100 lengths, resets, reverse": None,
        "parity: gru bfloat16 3,5,8,8 lengths, resets, reverse": (
            "RuntimeError: this does not compile"
        ),
        "parity: sru float16 3,5,6,6 lengths, resets, reverse": "the process died in this row",
    }
    assert "2 of 5 parity rows ok" in done.stdout


def test_what_there_is_no_time_for_is_named(tmp_path):
    path = tmp_path / "gpu.json"
    done = run(SCRIPT, "--interpret", "--minutes", "0.001", "--json", path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the time is up" in done.stderr


def test_an_unknown_name_is_refused():
    done = run(SCRIPT, "--shapes", "flush")
    assert done.returncode == 2
    assert "no 'flush' here; there are resident, flash" in done.stderr


def test_errors_in_units_of_their_bound(gpu_check):
    def worst(got, want):
        got, want = ({"a": np.asarray(values, np.float32)} for values in (got, want))
        return gpu_check.error_over_bound(got, want, "float32", 1)[0]

    assert worst([1, 2], [1, 2]) == 0
    assert worst([1, 2.1], [1, 2]) > 1
    assert worst([0, 1e-30], [0, 0]) == np.inf
    assert worst([1, np.nan], [1, 2]) == np.inf


def test_every_timed_row_is_planned_once(gpu_check):
    options = gpu_check.arguments([])
    titles = [row.title for row in (*gpu_check.parity_cases(options), *gpu_check.timings(options))]
    assert len(titles) == len(set(titles))
    some = gpu_check.arguments(["--only", "timing", "--cells", "gru", "--shapes", "rollout"])
    assert gpu_check.parity_cases(some) == []
    assert {(row.cell, row.shape.name) for row in gpu_check.timings(some)} == {("gru", "rollout")}
