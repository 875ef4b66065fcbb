"""Records, TensorBoard's files, the report, and the runs that have to stop."""

import json

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from train_helpers import tiny_config, write_corpus

from jaxrnn.train.config import get_default_config
from jaxrnn.train.errors import UserError
from jaxrnn.train.loop import finish_reason, run
from jaxrnn.train.metrics import Meter
from jaxrnn.train.records import Records, read_records
from jaxrnn.train.report import plot
from jaxrnn.train.state import Progress
from jaxrnn.train.step import StepMetrics


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run of two epochs with TensorBoard files."""
    folder = tmp_path_factory.mktemp("finished")
    data = write_corpus(folder / "data")
    run(tiny_config(data, folder / "run", run__tensorboard=True))
    return folder / "run"


def test_records_have_what_people_watch_named_after_the_corpus(finished):
    records = read_records(finished / "metrics.jsonl")
    train = next(r for r in records if "tokens_per_second" in r)
    assert set(train) == {
        "step", "epoch", "seconds", "tiny/train_loss", "tiny/train_perplexity", "learning_rate",
        "gradient_norm", "parameter_norm", "gradient_to_parameter_norm", "tokens_per_second",
        "steps_per_second", "data_wait_share",
    }  # fmt: skip
    assert np.exp(train["tiny/train_loss"]) == pytest.approx(train["tiny/train_perplexity"])
    assert 0 <= train["data_wait_share"] <= 1
    epochs = [r for r in records if "tiny/valid_perplexity" in r]
    assert [r["epoch"] for r in epochs] == [1, 2]
    assert "tiny/test_perplexity" in records[-1]
    steps = [r["step"] for r in records]
    assert steps == sorted(steps)
    assert "wikitext" not in json.dumps(records)


def test_tensorboard_reads_the_event_files(finished):
    (path,) = (finished / "tensorboard").iterdir()
    found = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append(event.step)
    records = read_records(finished / "metrics.jsonl")
    for tag in ("tiny/train_perplexity", "tiny/valid_perplexity", "learning_rate"):
        assert found[tag] == [r["step"] for r in records if tag in r]


def test_the_report_says_what_was_reached(finished):
    text = (finished / "report.md").read_text("utf-8")
    records = read_records(finished / "metrics.jsonl")
    best = min(r["tiny/valid_perplexity"] for r in records if "tiny/valid_perplexity" in r)
    for wanted in (f"{best:,.2f}", f"{records[-1]['tiny/test_perplexity']:,.2f}", "run.epochs = 2"):
        assert wanted in text
    assert "`model.softmax`" in text
    assert "jaxlib" in text
    assert (finished / "perplexity.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_has_both_curves():
    records = [
        {"step": 1, "epoch": 0.5, "c/train_perplexity": 300.0},
        {"step": 2, "epoch": 1.0, "c/train_perplexity": 200.0},
        {"step": 2, "epoch": 1.0, "c/valid_perplexity": 210.0},
    ]
    (axes,) = plot(records, "c").axes
    train, valid = axes.lines
    np.testing.assert_array_equal(train.get_xydata(), [[0.5, 300], [1, 200]])
    np.testing.assert_array_equal(valid.get_xydata(), [[1, 210]])
    assert "210.0" in axes.get_title()


def test_records_survive_a_restart_without_doubles(tmp_path):
    with Records(tmp_path, 0, tensorboard=False) as records:
        for step in (10, 20, 30):
            records.write({"step": step})
        records.write({"step": 30, "c/test_loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "cut')
    with Records(tmp_path, 20, tensorboard=False) as records:
        records.write({"step": 30})
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [10, 20, 30]
    with Records(tmp_path, 30, tensorboard=False):
        pass
    assert len(read_records(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize("name", ["nll", "gradient_norm"])
def test_what_is_not_finite_stops_the_run_and_names_the_step(tmp_path, name):
    good = StepMetrics(*(np.float32(1) for _ in StepMetrics._fields))
    bad = good._replace(**{name: np.float32("nan")})
    progress = Progress()
    with Records(tmp_path, 0, tensorboard=False) as records:
        meter = Meter("c", progress, records, lambda epoch: 100)
        for window, metrics in enumerate((good, good, bad), 1):
            progress.advance((0, window))
            meter.add(jax.device_put(metrics), 0.0)
        with pytest.raises(UserError, match="of step 3 is nan"):
            meter.collect()


def test_the_wait_for_the_first_batch_is_not_charged_to_the_steps_behind_it(tmp_path):
    metrics = jax.device_put(StepMetrics(*(np.float32(1) for _ in StepMetrics._fields)))
    progress = Progress()
    with Records(tmp_path, 0, tensorboard=False) as records:
        meter = Meter("c", progress, records, lambda epoch: 100)
        for window in (1, 2):
            progress.advance((0, window))
            meter.add(metrics, waited=1000.0)
        assert meter.record_training(waited=1000.0)["data_wait_share"] == 0


def test_a_run_that_diverges_saves_nothing_of_it(tmp_path):
    data = write_corpus(tmp_path / "data")
    options = {"optimizer__name": "sgd", "optimizer__learning_rate": 3e38}
    with pytest.raises(UserError, match=r"of step \d+ is (nan|inf)"):
        run(tiny_config(data, tmp_path / "run", **options, run__checkpoint_every=1))
    for step in (tmp_path / "run" / "checkpoints" / "latest").iterdir():
        assert int(step.name) <= 1


def test_a_run_ends_at_its_limits():
    config = get_default_config().run
    config.update(steps=10, epochs=3, early_stop=2)
    assert not finish_reason(config, Progress(step=9, epoch=2, epochs_since_best=1))
    assert "run.steps = 10" in finish_reason(config, Progress(step=10))
    assert "run.epochs = 3" in finish_reason(config, Progress(epoch=3))
    assert "2 epochs without" in finish_reason(config, Progress(epochs_since_best=2))
