"""A run that was stopped goes on as if it had not been: C27 on one device, and C26's kill."""

import os
import pathlib
import shutil
import signal

import orbax.checkpoint as ocp
import pytest
from train_helpers import (
    assert_same_bits,
    records,
    start_command,
    stop_at,
    tiny_config,
    tiny_flags,
    write_corpus,
)

from jaxrnn.train.errors import UserError
from jaxrnn.train.loop import run
from jaxrnn.train.state import Progress


@pytest.fixture
def data(tmp_path):
    return write_corpus(tmp_path / "data")


def final_state(config):
    """Returns the arrays and the progress that a run has saved last, as Orbax alone reads them."""
    with ocp.CheckpointManager(pathlib.Path(config.run.dir) / "checkpoints" / "latest") as manager:
        restored = manager.restore(
            manager.latest_step(),
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(), progress=ocp.args.JsonRestore()
            ),
        )
    progress = {k: v for k, v in restored["progress"].items() if k != "seconds"}
    return restored["state"], progress


@pytest.mark.parametrize(
    ("first", "random_bptt"),
    [(5, False), (7, True), (20, True)],
    ids=["at a record", "between records", "in the second epoch"],
)
def test_a_restart_gives_the_same_bits(data, tmp_path, first, random_bptt, monkeypatch):
    """C27: parameters, moments, losses, data order, carried state."""
    options = {"data__random_bptt": random_bptt, "run__steps": 25, "run__epochs": 9}
    options |= {"optimizer__plateau_factor": 2.0, "run__log_every": 5}
    whole = tiny_config(data, tmp_path / "whole", **options)
    parts = tiny_config(data, tmp_path / "parts", **options)
    run(whole)
    interrupt_after(first, monkeypatch)
    assert run(parts).signal == signal.SIGTERM
    monkeypatch.undo()
    assert run(parts).progress.step == 25
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    (state, progress), (other, other_progress) = final_state(whole), final_state(parts)
    assert_same_bits(state, other)
    assert progress == other_progress


def interrupt_after(step, monkeypatch):
    """Sends this process a SIGTERM when so many steps are done."""
    advance = Progress.advance

    def advance_and_interrupt(self, position):
        over = advance(self, position)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return over

    monkeypatch.setattr(Progress, "advance", advance_and_interrupt)


def test_sigkill_changes_no_later_metric(data, tmp_path):
    options = {"run__epochs": 4, "run__checkpoint_every": 3, "run__log_every": 2}
    whole = tiny_config(data, tmp_path / "whole", **options)
    killed = tiny_config(data, tmp_path / "killed", **options)
    for step in (16, 32):
        process = start_command("jaxrnn.train", *tiny_flags(data, tmp_path / "killed", **options))
        code, _ = stop_at(process, tmp_path / "killed", step, signal.SIGKILL)
        assert code == -signal.SIGKILL
    run(whole)
    run(killed)
    assert records(tmp_path / "whole") == records(tmp_path / "killed")
    assert_same_bits(final_state(whole)[0], final_state(killed)[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(data, tmp_path, number):
    flags = tiny_flags(data, tmp_path / "run", run__epochs=10_000, run__checkpoint_every=10**6)
    process = start_command("jaxrnn.train", *flags)
    code, out = stop_at(process, tmp_path / "run", 10, number)
    assert code == 128 + number
    assert "the same command goes on from there" in out
    config = tiny_config(data, tmp_path / "run", run__steps=1)
    # Already past that step: nothing to train, but the end of the run is made up for.
    assert run(config).progress.step >= 10


def test_a_finished_run_changes_nothing(data, tmp_path, capsys):
    config = tiny_config(data, tmp_path / "run", run__steps=3)
    run(config)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    run(config)
    assert "finished" in capsys.readouterr().out
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert before == after


def test_killed_between_the_state_and_the_best(data, tmp_path):
    config = tiny_config(data, tmp_path / "run", run__steps=17)
    run(config)
    best = tmp_path / "run" / "checkpoints" / "best"
    shutil.rmtree(best / "17")
    assert run(tiny_config(data, tmp_path / "run", run__steps=18)).progress.best_loss is not None
    assert (best / "17").is_dir()


def test_a_best_checkpoint_without_its_state_is_made_again(data, tmp_path):
    config = tiny_config(data, tmp_path / "run", run__steps=20)
    run(config)
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "latest" / "20")
    assert run(config).progress.best_step == 20
    assert sorted(p.name for p in (checkpoints / "best").iterdir()) == ["17", "20"]
    shutil.rmtree(checkpoints / "latest")
    with pytest.raises(UserError, match="none to go on from"):
        run(config)
    assert (checkpoints / "best" / "20").is_dir()
