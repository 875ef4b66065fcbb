"""A run that was stopped goes on as if it had not been: C27, and C26's kill."""

import os
import shutil
import signal

import pytest
from train_helpers import (
    assert_same_bits,
    command,
    final_state,
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


@pytest.mark.parametrize(
    ("first", "how"),
    [
        (5, {}),
        (7, {"data__random_bptt": True}),
        (20, {"data__random_bptt": True}),
        (7, {"precision__policy": "float16", "precision__loss_scale": 2.0**30}),
        (7, {"parallel__data": 2, "parallel__accumulate": 2}),
    ],
    ids=["at a record", "between records", "in the second epoch", "float16", "two devices"],
)
def test_a_restart_gives_the_same_bits(data, tmp_path, first, how, monkeypatch):
    """C27: parameters, moments, losses, data order, carried state, loss scale."""
    options = {"run__steps": 25, "run__epochs": 9, **how}
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
    """C26: each part of both runs is a process of its own, as a user's are."""
    options = {"run__epochs": 4, "run__checkpoint_every": 3, "run__log_every": 2}
    whole = tiny_config(data, tmp_path / "whole", **options)
    killed = tiny_config(data, tmp_path / "killed", **options)
    flags = tiny_flags(data, tmp_path / "killed", **options)
    for step in (16, 32):
        process = start_command("jaxrnn.train", *flags)
        code, _ = stop_at(process, tmp_path / "killed", step, signal.SIGKILL)
        assert code == -signal.SIGKILL
    for run_flags in (flags, tiny_flags(data, tmp_path / "whole", **options)):
        finished = command("jaxrnn.train", *run_flags)
        assert finished.returncode == 0, finished.stderr
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
