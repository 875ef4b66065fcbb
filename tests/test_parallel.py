"""One batch on many devices: C20 to C24 on 1, 2, 4 and 8 forced CPU devices."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from train_helpers import assert_same_bits, final_state, tiny_config, write_corpus

from jaxrnn import GRU, LSTM, SRU, Elman
from jaxrnn.data import Batch
from jaxrnn.parallel import check_divides, make_mesh, sharded_gradients
from jaxrnn.train.build import make_corpus, make_devices, make_model
from jaxrnn.train.checkpoint import Checkpoints
from jaxrnn.train.errors import UserError
from jaxrnn.train.evaluation import make_evaluate
from jaxrnn.train.leaves import by_path
from jaxrnn.train.loop import run
from jaxrnn.train.optimizer import make_optimizer, make_schedule
from jaxrnn.train.state import initial_state
from jaxrnn.train.step import make_train_step
from jaxrnn.train.streams import eval_stream

NO_DROPOUT = {"model__dropout_embedding": 0.0, "model__dropout_output": 0.0}
ALL_DROPOUT = {
    "model__num_layers": 2,
    "model__dropout_embedding": 0.5,
    "model__dropout_layers": 0.5,
    "model__dropout_output": 0.5,
    "model__dropout_words": 0.5,
    "model__dropout_recurrent": 0.5,
    "model__dropout_weights": 0.5,
    "model__zoneout": 0.5,
    "model__activation_penalty": 2.0,
    "model__temporal_penalty": 1.0,
}


@pytest.fixture
def train(tmp_path):
    """Returns a function that trains on given batches and returns (metrics, last state)."""
    data = write_corpus(tmp_path / "data")

    def make(batches, devices=1, micro_batches=1, **options):
        parts = {"parallel__data": devices, "parallel__accumulate": micro_batches}
        config = tiny_config(data, tmp_path / "run", data__batch_size=8, **parts, **options)
        model = make_model(config, len(make_corpus(config.data).vocabulary), seed=0)
        mesh = make_devices(config)
        schedule = make_schedule(config.optimizer, 100)
        optimizer = make_optimizer(config.optimizer, schedule)
        state = initial_state(model, optimizer, mesh, 8, seed=0)
        step = make_train_step(
            nnx.graphdef(model), optimizer, schedule, mesh, padded=True, micro_batches=micro_batches
        )
        metrics = []
        for batch in batches:
            state, measured = step(state, batch)
            metrics.append(measured)
        assert step._cache_size() == 1
        return metrics, state

    return make


def windows(count, lengths=(6,) * 8):
    """Windows of eight lanes with so many real steps."""
    rng = np.random.default_rng(0)
    mask = np.arange(6)[:, None] < np.array(lengths)
    draws = [rng.integers(0, 20, (2, 6, 8)).astype(np.int32) for _ in range(count)]
    return [Batch(*ids, mask, np.array(index == 0)) for index, ids in enumerate(draws)]


def assert_close(a, b, rtol=1e-6):
    """Leaf by leaf, relative to the largest value of the leaf."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(np.abs(y).max(initial=0), 1e-3))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_devices_make_the_update_of_one(train, devices, name):
    """C20. Under Adam a gradient near 0 decides by its sign, so the gradients' norm is compared."""
    options = NO_DROPOUT | {"optimizer__name": name, "optimizer__clip_norm": 0.1}
    one, one_state = train(windows(10), **options)
    many, state = train(windows(10), devices, **options)
    assert_close(one, many)
    assert_close(one_state.carry, state.carry, 1e-5 if name == "adam" else 1e-6)
    assert_close(one_state.params, state.params, 1e-5 if name == "adam" else 1e-6)
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        replicas = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(replicas) == devices
        assert set(replicas) == {replicas[0]}


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_those_of_the_whole_batch(devices, micro_batches):
    """C20: of any objective, by `sharded_gradients` alone; none of the gradients is scaled."""
    layer = LSTM(3, 4, time_major=True, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (5, 16, 3))
    weights = jnp.arange(16.0)

    def objective(params, rows, shared, numbers):
        x, state = rows
        y, final = nnx.merge(graphdef, params)(x, state)
        loss = jnp.sum(jnp.square(y) * shared * weights[numbers][None, :, None])
        return loss, (loss, final)

    state = jax.tree.map(lambda a: a + 0.1, layer.initialize_state(16))
    whole = jax.grad(objective, has_aux=True)(params, (x, state), 3.0, jnp.arange(16))
    run = sharded_gradients(
        objective,
        make_mesh(devices),
        row_specs=(P(None, "data"), P("data")),
        state_specs=P("data"),
        micro_batches=micro_batches,
    )
    gradients, loss, final = jax.jit(run)(params, (x, state), 3.0)
    assert_close((gradients, loss, final), (whole[0], *whole[1]))


@pytest.mark.parametrize(
    ("devices", "micro_batches", "lengths"),
    [
        (2, 1, (1, 0, 0, 0, 2, 2, 3, 0)),
        (2, 1, (0, 0, 0, 0, 2, 2, 3, 0)),
        (1, 2, (1, 0, 0, 0, 2, 2, 1, 0)),
        (4, 2, (0, 0, 1, 0, 6, 6, 6, 6)),
    ],
    ids=["1 and 7 tokens", "a device with none", "micro-batches of 1 and 5", "both"],
)
def test_the_loss_is_over_the_tokens_of_all(train, devices, micro_batches, lengths):
    """C21: not a mean of means, which is off where devices differ in padding."""
    options = NO_DROPOUT | {
        "optimizer__name": "sgd", "optimizer__clip_norm": 0.0, "model__activation_penalty": 2.0,
        "model__temporal_penalty": 1.0,
    }  # fmt: skip
    one, one_state = train(windows(2, lengths), **options)
    many, state = train(windows(2, lengths), devices, micro_batches, **options)
    assert float(one[0].tokens) == sum(lengths)
    assert_close(one, many)
    assert_close(one_state, state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize(("devices", "micro_batches"), [(4, 1), (8, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("variational", [False, True])
def test_dropout_does_not_depend_on_the_devices(train, devices, micro_batches, variational):
    """C23: the masks of 1 device, whoever has the rows."""
    options = ALL_DROPOUT | {"model__variational": variational, "optimizer__name": "sgd"}
    one, one_state = train(windows(3), **options)
    many, state = train(windows(3), devices, micro_batches, **options)
    assert_close(one, many, 1e-5)
    assert_close(one_state.params, state.params, 1e-5)


def test_masks_differ_by_row_and_step(train):
    """C23: with equal rows and a replicated key, each row has a mask of its own."""
    same = Batch(*(np.ones((6, 8), np.int32),) * 2, np.ones((6, 8), bool), np.array(True))
    options = {"model__dropout_embedding": 0.5, "optimizer__learning_rate": 0.0}
    metrics, state = train([same, same], 4, **options)
    h = np.asarray(jax.tree.leaves(state.carry)[0])
    assert len({row.tobytes() for row in h}) == 8
    assert float(metrics[0].nll) != float(metrics[1].nll)


@pytest.mark.parametrize("layer_type", [LSTM, GRU, SRU, Elman])
@pytest.mark.parametrize("given", ["default", "replicated", "sharded"])
def test_layers_inside_shard_map_with_default_checks(layer_type, given):
    """C22."""
    layer = layer_type(3, 4, num_layers=2, bidirectional=given == "default", rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (8, 5, 3))
    lengths = jnp.arange(8) % 6
    state = None if given == "default" else layer.initialize_state(8 if given == "sharded" else 2)
    spec = P("data") if given == "sharded" else P()

    def loss(params, x, lengths, state):
        y, final = nnx.merge(graphdef, params)(x, state, lengths=lengths)
        return jnp.sum(y**2) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(final))

    def on_device(params, x, lengths, state):
        return jax.lax.psum(loss(params, x, lengths, state), "data")

    mapped = jax.shard_map(
        on_device, mesh=make_mesh(4), in_specs=(P(), P("data"), P("data"), spec), out_specs=P()
    )
    whole_state = layer.initialize_state(8) if given == "replicated" else state
    got = jax.jit(jax.value_and_grad(mapped))(params, x, lengths, state)
    want = jax.value_and_grad(loss)(params, x, lengths, whole_state)
    assert_close(got, want, 1e-5)


def test_evaluation_pads_and_weighs(tmp_path):
    """Four lanes on eight devices, three on two: the scores of one device."""
    data = write_corpus(tmp_path / "data")
    config = tiny_config(data, tmp_path / "run", data__eval_batch_size=3)
    corpus = make_corpus(config.data)
    model = make_model(config, len(corpus.vocabulary), seed=0)
    graphdef, params = nnx.split(model)
    scores = {}
    for devices in (1, 2, 8):
        mesh = make_mesh(devices)
        score = make_evaluate(graphdef, mesh)
        scores[devices] = score(params, eval_stream(config.data, corpus, "valid", mesh))
        assert scores[devices].tokens == corpus.valid.size
    assert scores[2].nll == pytest.approx(scores[1].nll, rel=1e-6)
    assert scores[8].nll == pytest.approx(scores[1].nll, rel=1e-6)


def test_sizes_that_do_not_divide_are_refused_with_the_nearest(tmp_path):
    data = write_corpus(tmp_path / "data")
    with pytest.raises(UserError, match=r"batch_size is 10, .* by 4 .*nearest that can: 8 or 12"):
        run(tiny_config(data, tmp_path / "run", data__batch_size=10, parallel__data=4))
    with pytest.raises(UserError, match=r"99 x 1 devices are wanted .* and there are 8"):
        run(tiny_config(data, tmp_path / "run", parallel__data=99))
    with pytest.raises(ValueError, match=r"nearest that can: 4$"):
        check_divides("rows", 3, "devices", 4)


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_a_checkpoint_goes_on_with_any_number_of_devices(tmp_path, policy):
    """C24: saved on 4; the bits come back on 1, 2 and 8, and another step is equal."""
    data = write_corpus(tmp_path / "data")

    def config(name, devices, steps):
        options = {"data__batch_size": 8, "parallel__data": devices, "precision__policy": policy}
        return tiny_config(data, tmp_path / name, run__steps=steps, **options)

    run(config("first", 4, 10))
    saved, _ = final_state(config("first", 4, 10))
    after = []
    for devices in (4, 1, 2, 8):
        shutil.copytree(tmp_path / "first", tmp_path / f"on{devices}")
        goes_on = config(f"on{devices}", devices, 11)
        like = state_like(goes_on)
        with Checkpoints(tmp_path / f"on{devices}", 2, {}) as checkpoints:
            restored, progress = checkpoints.restore_latest(like)
        assert progress.step == 10
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
            assert a.sharding == b.sharding
        assert_same_bits(by_path(restored), by_path(saved))
        run(goes_on)
        after.append(final_state(goes_on)[0])
    for other in after[1:]:
        assert_close(after[0], other, 1e-6 if policy == "float32" else 2e-3)


def state_like(config):
    """A fresh state of a config's model and devices."""
    model = make_model(config, len(make_corpus(config.data).vocabulary), seed=0)
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, 100))
    scale = config.precision.loss_scale if model.policy.needs_loss_scale else 0.0
    return initial_state(model, optimizer, make_devices(config), 8, seed=1, loss_scale=scale)


def test_a_run_on_many_devices_is_that_of_one(tmp_path):
    """The whole trainer, with micro-batches, and its records."""
    data = write_corpus(tmp_path / "data")
    results = []
    for devices, micro_batches in ((1, 1), (2, 2)):
        parts = {"parallel__data": devices, "parallel__accumulate": micro_batches}
        config = tiny_config(data, tmp_path / f"run{devices}", run__steps=20, **parts)
        results.append(run(config).progress)
    assert results[0].best_loss == pytest.approx(results[1].best_loss, rel=1e-4)
