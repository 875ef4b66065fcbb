"""The training step, the optimizer and the evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_helpers import assert_same_bits, tiny_config, write_corpus

from jaxrnn.data import Batch
from jaxrnn.train.build import make_corpus, make_devices, make_model
from jaxrnn.train.config import get_default_config
from jaxrnn.train.evaluation import make_evaluate
from jaxrnn.train.optimizer import (
    clip_by_global_norm,
    cut_rate,
    global_norm,
    make_optimizer,
    make_schedule,
)
from jaxrnn.train.state import Progress, initial_state
from jaxrnn.train.step import make_train_step
from jaxrnn.train.streams import eval_stream, training_stream


@pytest.fixture
def setup(tmp_path):
    """Returns a function from overrides to (config, corpus, state, train_step, evaluate)."""
    data = write_corpus(tmp_path / "data")

    def make(**overrides):
        config = tiny_config(data, tmp_path / "run", **overrides)
        corpus = make_corpus(config.data)
        model = make_model(config, len(corpus.vocabulary), seed=0)
        schedule = make_schedule(config.optimizer, 100)
        optimizer = make_optimizer(config.optimizer, schedule)
        graphdef = nnx.graphdef(model)
        mesh = make_devices(config)
        state = initial_state(model, optimizer, mesh, config.data.batch_size, seed=0)
        padded = config.data.random_bptt
        step = make_train_step(graphdef, optimizer, schedule, mesh, padded=padded)
        return config, corpus, state, step, make_evaluate(graphdef, mesh)

    return make


def training(config, corpus):
    return training_stream(config, corpus, Progress(), make_devices(config))


def evaluation(config, corpus, split):
    return eval_stream(config.data, corpus, split, make_devices(config))


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru", "sru"])
def test_training_lowers_the_loss_and_compiles_once(setup, cell):
    options = {"data__random_bptt": True, "optimizer__learning_rate": 0.05}
    config, corpus, state, train_step, _ = setup(model__cell=cell, **options)
    losses = []
    with training(config, corpus) as stream:
        for _ in range(40):
            state, metrics = train_step(state, next(stream))
            losses.append(float(metrics.nll / metrics.tokens))
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3
    assert train_step._cache_size() == 1
    assert int(state.step) == 40


@pytest.mark.parametrize("bptt", [6, 12])
def test_evaluating_twice_is_bit_equal_and_leaves_training_alone(setup, bptt):
    """C14."""
    config, corpus, state, train_step, evaluate = setup()
    other, _, other_state, other_step, _ = setup()
    config.data.bptt, scores = bptt, []
    with training(other, corpus) as a:
        batches = [next(a) for _ in range(4)]
    for batch in batches:
        state, metrics = train_step(state, batch)
        other_state, other_metrics = other_step(other_state, batch)
        assert_same_bits(metrics, other_metrics)
        scores = [evaluate(state.params, evaluation(config, corpus, "valid")) for _ in range(2)]
        assert scores[0] == scores[1]
    assert scores[0].tokens == corpus.valid.size


def test_perplexity_does_not_depend_on_the_window(setup):
    """C14: windows of 6 and of 12 steps."""
    config, corpus, state, _, evaluate = setup()
    short = evaluate(state.params, evaluation(config, corpus, "test"))
    config.data.bptt = 12
    long = evaluate(state.params, evaluation(config, corpus, "test"))
    assert short.perplexity == pytest.approx(long.perplexity, rel=1e-5)


def test_the_state_is_carried_and_forgotten_where_a_text_starts(setup):
    _, _, state, train_step, _ = setup(model__dropout_embedding=0.0, model__dropout_output=0.0)
    ones = np.ones((6, 4), np.int32)
    again = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    batch = Batch(ones, ones, ones.astype(bool), np.array(True))
    fresh, metrics = train_step(state, batch)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(fresh.carry))
    carried = [s._replace(carry=jax.tree.map(jnp.ones_like, s.carry)) for s in again]
    _, forgot = train_step(carried[0], batch)
    _, kept = train_step(carried[1], batch._replace(starts=np.array(False)))
    assert float(forgot.nll) == float(metrics.nll)
    assert float(kept.nll) != float(metrics.nll)


def test_the_loss_is_the_sum_over_tokens_divided_by_their_number(setup):
    """Padding changes neither loss nor gradient."""
    _, corpus, state, train_step, _ = setup(
        model__dropout_embedding=0.0, model__dropout_output=0.0, data__random_bptt=True
    )
    ids = np.resize(corpus.train, (3, 4)).astype(np.int32)
    plain = Batch(ids, ids, np.ones((3, 4), bool), np.array(True))
    padded = Batch(
        np.pad(ids, ((0, 5), (0, 0))),
        np.pad(ids, ((0, 5), (0, 0)), constant_values=1),
        np.pad(plain.mask, ((0, 5), (0, 0))),
        np.array(True),
    )
    state_a, a = train_step(jax.tree.map(jnp.copy, state), plain)
    state_b, b = train_step(state, padded)
    assert float(a.tokens) == float(b.tokens) == 12
    np.testing.assert_allclose(a.nll, b.nll, rtol=1e-6)
    np.testing.assert_allclose(a.gradient_norm, b.gradient_norm, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(state_a.carry), jax.tree.leaves(state_b.carry), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_clip_measures_in_float32_and_keeps_zeros():
    """C09."""
    clip = clip_by_global_norm(1.0)
    half = jnp.full(100, 1e3, jnp.float16)
    assert float(global_norm(half)) == 1e4
    clipped, _ = clip.update(half, clip.init(half))
    assert clipped.dtype == jnp.float16
    np.testing.assert_allclose(clipped, 0.1, rtol=1e-3)
    zero, _ = clip.update(jnp.zeros(3), clip.init(half))
    assert not np.any(zero)
    small, _ = clip.update(jnp.array([0.3, 0.4]), clip.init(half))
    np.testing.assert_array_equal(small, np.array([0.3, 0.4], np.float32))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_optimizers_and_schedules(name, schedule):
    config = get_default_config().optimizer
    config.update(name=name, schedule=schedule, warmup_steps=10, momentum=0.9, final_fraction=0.1)
    rate = make_schedule(config, 100)
    assert float(rate(0)) == 0.0
    assert float(rate(10)) == pytest.approx(config.learning_rate)
    last = 1.0 if schedule == "constant" else 0.1
    assert float(rate(100)) == pytest.approx(last * config.learning_rate)
    optimizer = make_optimizer(config, rate)
    params = {"w": jnp.array([3.0, -2.0])}
    state = optimizer.init(params)
    for _ in range(100):
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
    assert float(params["w"][0]) < 3.0
    assert float(params["w"][1]) > -2.0


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_zero_gradients_change_nothing(name):
    """C09."""
    config = get_default_config().optimizer
    config.name = name
    optimizer = make_optimizer(config, make_schedule(config, 10))
    params = {"w": jnp.array([3.0, -2.0])}
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    assert not np.any(updates["w"])


def test_a_plateau_divides_the_rate(setup):
    config, corpus, state, train_step, _ = setup(
        optimizer__plateau_factor=4.0, optimizer__plateau_patience=2
    )
    progress, scales = Progress(), []
    for loss in (3.0, 3.1, 3.2, 3.1, 2.9, 3.0):
        progress.observe(loss, epoch=0)
        state = cut_rate(config.optimizer, state, progress)
        scales.append(float(state.rate_scale))
    assert scales == [1, 1, 0.25, 0.25, 0.25, 0.25]
    with training(config, corpus) as stream:
        _, metrics = train_step(state, next(stream))
    assert float(metrics.learning_rate) == pytest.approx(config.optimizer.learning_rate / 4)
