"""Policies and the loss scale: C06 to C09."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_helpers import assert_same_bits, records, tiny_config, write_corpus

from jaxrnn import LSTM
from jaxrnn.data import Batch
from jaxrnn.precision import LARGEST, LossScale, Policy, policy
from jaxrnn.train.build import make_corpus, make_devices, make_model
from jaxrnn.train.errors import UserError
from jaxrnn.train.loop import run
from jaxrnn.train.optimizer import make_optimizer, make_schedule
from jaxrnn.train.state import initial_state
from jaxrnn.train.step import make_train_step

POLICIES = ["float32", "bfloat16", "float16", "compute=bfloat16,output=float32", "param=bfloat16"]


@pytest.fixture
def setup(tmp_path):
    """Returns a function from overrides to (state, train_step, a batch)."""
    data = write_corpus(tmp_path / "data")

    def make(loss_scale=0.0, **overrides):
        config = tiny_config(data, tmp_path / "run", **overrides)
        corpus = make_corpus(config.data)
        model = make_model(config, len(corpus.vocabulary), seed=0)
        mesh = make_devices(config)
        schedule = make_schedule(config.optimizer, 100)
        optimizer = make_optimizer(config.optimizer, schedule)
        state = initial_state(model, optimizer, mesh, 4, seed=0, loss_scale=loss_scale)
        step = make_train_step(nnx.graphdef(model), optimizer, schedule, mesh, padded=False)
        ids = np.resize(corpus.train, (6, 5)).astype(np.int32)
        batch = Batch(ids[:, :4], ids[:, 1:], np.ones((6, 4), bool), np.array(True))
        return state, step, batch

    return make


def test_a_policy_reads_what_it_writes():
    for text in POLICIES:
        assert policy(str(policy(text))) == policy(text)
    assert policy("bfloat16") == Policy(jnp.float32, jnp.bfloat16, jnp.bfloat16)
    for wrong in ("half", "compute=int8", "compute", "compute=float16,compute=float16", "state=x"):
        with pytest.raises(ValueError, match="a policy should be one of float32"):
            policy(wrong)


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
def test_the_policy_decides_the_dtypes_of_a_layer(text, x_dtype):
    """C06: a given state of any dtype is cast, matmuls are in the compute dtype."""
    dtypes = policy(text)
    layer = LSTM(3, 4, dtype=dtypes.compute, param_dtype=dtypes.param, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 5, 3), x_dtype)
    for state_dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        state = jax.tree.map(lambda a, d=state_dtype: a.astype(d), layer.initialize_state(2))
        y, final = layer(x, state)
        assert y.dtype == dtypes.compute
        assert {leaf.dtype for leaf in jax.tree.leaves(final)} == {jnp.dtype(jnp.float32)}
    text = jax.jit(lambda x: layer(x)[0]).lower(x).as_text()
    matmuls = re.findall(r"stablehlo.dot_general.* : \(tensor<[\dx]*(\w+)>", text)
    names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    assert set(matmuls) == {names[jnp.dtype(dtypes.compute).name]}
    parameters = jax.tree.leaves(layer.parameters())
    assert {leaf.dtype for leaf in parameters} == {jnp.dtype(dtypes.param)}


@pytest.mark.parametrize("text", POLICIES)
def test_training_keeps_every_dtype(setup, text):
    """C10's second half: parameters keep theirs after an update; the output is the policy's."""
    state, step, batch = setup(precision__policy=text, loss_scale=2.0)
    before = jax.tree.map(lambda a: (a.shape, a.dtype), state)
    after, metrics = step(state, batch)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == before
    assert np.isfinite(metrics.nll)
    assert not metrics.skipped


def test_the_scale_grows_within_bounds_and_shrinks(monkeypatch):
    """C07."""
    monkeypatch.setattr("jaxrnn.precision.GROWTH_INTERVAL", 1)
    scale = LossScale.initial(1.0)
    for _ in range(70):
        scale = scale.after(jnp.bool(True))
    assert float(scale.scale) == LARGEST
    scale = scale.after(jnp.bool(False))
    assert float(scale.scale) == LARGEST / 2
    assert int(scale.skipped) == 1
    for _ in range(70):
        scale = scale.after(jnp.bool(False))
    assert float(scale.scale) == 1.0


def test_the_scale_waits_for_enough_finite_steps(monkeypatch):
    monkeypatch.setattr("jaxrnn.precision.GROWTH_INTERVAL", 3)
    scales, scale = [], LossScale.initial(8.0)
    for finite in (1, 1, 0, 1, 1, 1, 1):
        scale = scale.after(jnp.bool(finite))
        scales.append(float(scale.scale))
    assert scales == [8, 8, 4, 4, 4, 8, 8]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_step_with_an_infinite_gradient_changes_the_scale_alone(setup, optimizer):
    """C07, C09: parameters, moments, step count and schedule stay."""
    state, step, batch = setup(
        loss_scale=2.0**10, optimizer__name=optimizer, optimizer__warmup_steps=5
    )
    state, _ = step(state, batch)
    # The gradients overflow, the loss does not.
    huge = state.loss_scale._replace(scale=jax.device_put(jnp.inf, state.step.sharding))
    kept = jax.tree.map(np.asarray, state)
    after, metrics = step(state._replace(loss_scale=huge), batch)
    assert metrics.skipped == 1
    assert np.isfinite(metrics.nll)
    for name in ("step", "params", "opt_state", "key", "rate_scale"):
        assert_same_bits(getattr(after, name), getattr(kept, name))
    assert int(after.loss_scale.skipped) == 1
    again, metrics = step(after._replace(loss_scale=LossScale.initial(4.0)), batch)
    assert metrics.skipped == 0
    assert int(again.step) == 2


def test_the_update_does_not_depend_on_the_scale(setup):
    """C08: unscaled before the clip; powers of two are exact."""
    results = []
    for scale in (1.0, 2.0**10, 2.0**16):
        state, step, batch = setup(
            loss_scale=scale, optimizer__name="sgd", optimizer__clip_norm=0.01,
            model__dropout_embedding=0.0, model__dropout_output=0.0,
        )  # fmt: skip
        after, metrics = step(state, batch)
        assert metrics.gradient_norm > 0.01  # The clip acts.
        results.append((after.params, metrics.gradient_norm))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_float16_training_skips_reports_and_learns(tmp_path):
    data = write_corpus(tmp_path / "data")
    options = {"precision__policy": "float16", "precision__loss_scale": 2.0**30, "run__steps": 40}
    run(tiny_config(data, tmp_path / "run", **options, run__log_every=10))
    found = [r for r in records(tmp_path / "run") if "loss_scale" in r]
    assert found[-1]["skipped_steps"] > 0
    assert found[-1]["loss_scale"] < 2.0**24
    assert found[-1]["tiny/train_loss"] < found[0]["tiny/train_loss"]
    with pytest.raises(UserError, match=r"config\.precision\.policy: a policy should be one of"):
        run(tiny_config(data, tmp_path / "other", precision__policy="half"))
