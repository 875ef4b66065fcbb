"""The programs in examples/, each for a few steps, as a caller of their `main`."""

import os
import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DATA = next(
    (
        pathlib.Path(folder)
        for folder in (os.environ.get("JAXRNN_DATA_DIR"), ROOT.parent / "shared" / "data")
        if folder and pathlib.Path(folder).is_dir()
    ),
    None,
)


def main_of(name):
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


def data_file(name):
    """The path of a data set's file as an argument; without it the test is skipped."""
    if DATA is None or not (DATA / name).is_file():
        pytest.skip(f"JAXRNN_DATA_DIR names no folder with {name}")
    return str(DATA / name)


def test_forecast_beats_repeating_the_day_before(tmp_path):
    drawn = tmp_path / "forecast.png"
    arguments = ["--data", data_file("ett/ETTh1.csv"), "--plot", str(drawn), "--steps", "60"]
    results = main_of("forecast")(arguments)
    assert results["test_mse"] < 0.9 * results["test_naive_mse"]
    assert results["test_mae"] < results["test_naive_mae"]
    assert results["validation_mse"] < results["validation_naive_mse"]
    # Of the benchmark's 2,857 test windows; no program but this data set gives it.
    assert results["test_naive_mse"] == pytest.approx(0.42445, abs=1e-4)
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_shakespeare_beats_counting_pairs_of_characters(tmp_path):
    text = pathlib.Path(data_file("tinyshakespeare/input.txt")).read_text("utf-8")[:200_000]
    (tmp_path / "input.txt").write_text(text, "utf-8")
    results = main_of("shakespeare")(["--data", str(tmp_path / "input.txt"), "--steps", "80"])
    assert 1 < results["bits"] < results["bigram_bits"] < results["unigram_bits"] < 6
    assert results["last_loss"] < results["first_loss"]
    assert len(results["sample"]) == 400
    assert set(results["sample"]) <= set(text)


def test_classify_tells_the_order_and_is_blind_to_padding():
    results = main_of("classify")(["--steps", "240"])
    assert results["accuracy"] > 0.95
    assert results["last_loss"] < 0.5 * results["first_loss"]
    assert results["padding_difference"] < 1e-5


def test_rollout_learns_to_remember():
    results = main_of("rollout")(["--steps", "100"])
    assert results["before"] < 0
    assert 0.7 < results["after"] <= 1
    # The mean of some 5,000 returns of +1 or -1 has a deviation of 0.014.
    assert results["memoryless"] < 0.1
    assert results["logit_difference"] < 1e-5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_help_has_the_command_and_the_result(path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main_of(path.stem)(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"python examples/{path.name}" in out
    assert "Expect" in out
    assert {"--steps", "--seed"} <= set(out.split())


@pytest.mark.parametrize("name", ["forecast", "shakespeare"])
def test_a_missing_file_is_one_sentence(name, tmp_path):
    with pytest.raises(SystemExit, match=r"^there is no file .*nowhere: name .* with --data$"):
        main_of(name)(["--data", str(tmp_path / "nowhere")])
