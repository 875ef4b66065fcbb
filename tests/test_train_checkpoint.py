"""Checkpoints on disk: plain Orbax, mismatches, damage, and a disk without room (C25, C26)."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from train_helpers import assert_same_bits, tiny_config, write_corpus

from jaxrnn.train import disk
from jaxrnn.train.checkpoint import Checkpoints, restore_params
from jaxrnn.train.errors import UserError
from jaxrnn.train.loading import load
from jaxrnn.train.loop import run
from jaxrnn.train.state import Progress


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 20 steps; returns its data and its directory. Tests copy what they change."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_corpus(folder / "data")
    run(tiny_config(data, folder / "run", run__steps=20))
    return data, folder / "run"


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of that run, to damage."""
    data, directory = trained
    shutil.copytree(directory, tmp_path / "run")
    return data, tmp_path / "run"


def latest(directory: pathlib.Path) -> pathlib.Path:
    return directory / "checkpoints" / "latest"


def test_orbax_alone_restores_what_load_does(trained):
    _, directory = trained
    stored = ocp.StandardCheckpointer().restore(
        directory / "checkpoints" / "best" / "20" / "params"
    )
    model = load(directory).model
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert len(jax.tree.leaves(stored)) == len(jax.tree.leaves(params))
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    progress = json.loads((latest(directory) / "20" / "progress" / "metadata").read_text())
    assert progress["step"] == 20
    about = json.loads((latest(directory) / "20" / "about" / "metadata").read_text())
    assert about["config"]["run"]["steps"] == 20
    assert "jax" in about["versions"]


def test_load_works_from_any_folder_of_a_run_and_without_a_best_one(copied):
    _, directory = copied
    best = load(latest(directory) / "20").model
    shutil.rmtree(directory / "checkpoints" / "best")
    trained = load(str(directory))
    assert_same_bits(nnx.state(trained.model), nnx.state(best))
    assert trained.corpus == "tiny"
    assert trained.progress.step == 20
    assert trained.vocabulary.id("w1") >= 0


@pytest.mark.parametrize(
    ("options", "leaf"),
    [
        ({"model__hidden_features": 16}, r"params/.*\[.*16.*\] here"),
        ({"model__num_layers": 2}, "absent there"),
        ({"optimizer__name": "sgd", "optimizer__momentum": 0.9}, "opt_state/"),
        ({"data__batch_size": 5}, "config.data.batch_size is 4, and now it is 5"),
        ({"run__seed": 1}, "config.run.seed is 0, and now it is 1"),
    ],
)
def test_another_run_is_refused_by_the_first_difference(trained, options, leaf):
    """C25."""
    data, directory = trained
    with pytest.raises(UserError, match=leaf) as error:
        run(tiny_config(data, directory, run__steps=30, **options))
    assert "\n" not in str(error.value)


def test_another_text_of_that_name_is_refused(trained, tmp_path):
    _, directory = trained
    other = write_corpus(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="holds a run"):
        run(tiny_config(other, directory, run__steps=30))


def test_nothing_is_cast_and_parameters_alone_can_be_had(trained):
    """C25."""
    _, directory = trained
    params = nnx.to_pure_dict(nnx.state(load(directory).model, nnx.Param))
    assert_same_bits(restore_params(latest(directory) / "20", params), params)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(UserError, match=r"is float32\[.* there and bfloat16\["):
        restore_params(latest(directory) / "20", half)


def test_an_emptied_step_and_a_leftover_folder(copied, capsys):
    """C26: it goes on from the newest complete step and says so, and the next save works."""
    data, directory = copied
    shutil.rmtree(latest(directory) / "20")
    (latest(directory) / "20").mkdir()
    (latest(directory) / "21.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    progress = run(tiny_config(data, directory, run__steps=20)).progress
    out = capsys.readouterr().out
    assert "20 is not complete" in out
    assert "21.orbax-checkpoint-tmp is what an interrupted save left" in out
    assert "after step 17" in out
    assert progress.step == 20
    assert sorted(p.name for p in latest(directory).iterdir()) == ["17", "20"]


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_checkpoint_is_told(copied, damage):
    data, directory = copied
    # The folders called `d` have what the arrays are stored in.
    for path in (latest(directory) / "20" / "state").rglob("d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content if damage == "flipped" else content[: len(content) // 4])
    with pytest.raises(UserError, match=r"20 is damaged: .*; remove that folder") as error:
        run(tiny_config(data, directory, run__steps=30))
    assert "\n" not in str(error.value)
    shutil.rmtree(latest(directory) / "20")
    assert run(tiny_config(data, directory, run__steps=22)).progress.step == 22


@pytest.mark.parametrize("file", ["config.json", "vocabulary.json"])
def test_a_damaged_run_is_told(copied, file):
    _, directory = copied
    (directory / file).write_text((directory / file).read_text()[:40])
    with pytest.raises(UserError, match="cannot be read"):
        load(directory)


def test_no_run_is_told(tmp_path, copied):
    with pytest.raises(UserError, match="there is no directory"):
        load(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no config\.json"):
        load(tmp_path)
    shutil.rmtree(copied[1] / "checkpoints")
    with pytest.raises(UserError, match="no complete checkpoint"):
        load(copied[1])


def test_a_full_disk_is_told_and_loses_nothing(copied, monkeypatch):
    data, directory = copied
    usage = shutil._ntuple_diskusage(10**9, 10**9, 1000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UserError, match=r"the disk is full.*goes on from the checkpoint before"):
        run(tiny_config(data, directory, run__steps=40, run__checkpoint_every=3))
    monkeypatch.undo()
    assert run(tiny_config(data, directory, run__steps=22)).progress.step == 22


def test_a_disk_that_fills_while_orbax_writes_is_told(tmp_path):
    with pytest.raises(UserError, match="the disk is full"), disk.full_disk_said(tmp_path):
        raise ValueError("RESOURCE_EXHAUSTED: write: No space left on device [os_error_code='28']")
    with pytest.raises(ValueError, match="other"), disk.full_disk_said(tmp_path):
        raise ValueError("other")


def test_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, 3, {}) as checkpoints:
        for step in range(1, 7):
            checkpoints.save_best({"w": jnp.full(3, step)}, Progress(step=step))
        checkpoints.wait()
        kept = sorted(p.name for p in (tmp_path / "checkpoints" / "best").iterdir())
        assert kept == ["5", "6"]
        np.testing.assert_array_equal(checkpoints.restore_best({"w": jnp.zeros(3, int)})["w"], 6)


def test_the_saved_arrays_are_those_of_their_step(tmp_path):
    """A later step takes over the memory of the state, and what is written is not changed."""

    @functools.partial(jax.jit, donate_argnums=0)
    def add(x):
        return x + 1

    with Checkpoints(tmp_path, 10, {}) as checkpoints:
        x = jnp.zeros(300_000)
        for step in range(1, 5):
            x = add(x)
            checkpoints.save_best({"w": x}, Progress(step=step))
            for _ in range(3):
                x = add(x)
        assert int(checkpoints.restore_best({"w": x})["w"][0]) == 13
