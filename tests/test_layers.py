"""The layers of both shells: stacks, directions, dropout, streams, transforms, messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import table
import user_cells
from flax import nnx
from tolerance import assert_close, leaves

import jaxrnn
from jaxrnn import cells, linen
from jaxrnn.recurrence.stack import Stack

B, T, I, H = 2, 7, 3, 4  # noqa: E741  (the axis letters of the library)
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def quick_compile():
    with table.quick_compile():
        yield


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make(kind, features=I, seed=0, **options):
    """A layer of nnx, as a function of its parameters, and the parameters."""
    layer = getattr(jaxrnn, kind)(features, H, rngs=nnx.Rngs(seed), **options)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def apply(params, x, state=None, **options):
        return nnx.merge(graph, params, rest)(x, state, **options)

    return apply, params, layer


KINDS = {
    "LSTM": {},
    "GRU": {},
    "Elman": {"activation": "relu"},
    "SRU": {"highway_bias": -1.0},
}


# The two shells.


@pytest.mark.parametrize("kind", [*KINDS, "RNN"])
def test_both_shells_are_one_layer(kind):
    options = {"num_layers": 2, "bidirectional": True} | KINDS.get(kind, {})
    cell = (user_cells.projected_lstm,) if kind == "RNN" else ()
    ours = getattr(jaxrnn, kind)(*cell, I, H, rngs=nnx.Rngs(0), **options)
    theirs = getattr(linen, kind)(*cell, H, **options)
    x, lengths = inputs(B, T, I), np.array([7, 3])
    shapes = jax.eval_shape(theirs.init, KEY, x)["params"]
    params = ours.parameters()
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    assert set(params["layer_1"]) == {"forward", "backward"}
    graph, state = nnx.split(ours)

    @jax.jit
    def both(state, params, x):
        return (
            nnx.merge(graph, state)(x, lengths=lengths),
            theirs.apply({"params": params}, x, lengths=lengths),
        )

    wanted, got = both(state, params, x)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    start = theirs.apply({"params": params}, B, method="initialize_state")
    assert jax.tree.structure(start) == jax.tree.structure(wanted[1])
    jax.tree.map(np.testing.assert_array_equal, start, ours.initialize_state(B))


def test_the_shells_take_the_same_options():
    assert set(jaxrnn.nnx.Options.__annotations__) <= set(linen.LSTM.__dataclass_fields__)
    assert set(jaxrnn.nnx.LayerOptions.__annotations__) <= set(linen.RNN.__dataclass_fields__)


def test_layers_stay_in_order_beyond_ten():
    """A dict that went through jit or a file is sorted, and has layer_10 before layer_2."""
    stack = Stack(cells.elman(), num_layers=11)
    params = stack.init_params(KEY, 2, 2, jnp.float32)
    params = {name: params[name] for name in sorted(params)}
    assert list(params)[2] == "layer_10"
    x = inputs(1, 2, 2)
    zero = (oracles.zero_state(oracles.elman(), 1, 2),) * 11
    want, _ = oracles.run_layers(oracles.elman(), params, np.swapaxes(x, 0, 1), zero)

    @jax.jit
    def apply(x):
        return stack.apply(params, x, None)[0]

    assert_close(apply(x), np.swapaxes(want, 0, 1), size=11 * 2)


def test_nnx_splits_and_merges():
    layer = jaxrnn.GRU(I, H, num_layers=2, dropout=0.5, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    assert {a.dtype.name for a in jax.tree.leaves(params)} == {"float32"}
    doubled = nnx.merge(graph, jax.tree.map(lambda a: 2 * a, params), rest)
    got, want = doubled.parameters(), jax.tree.map(lambda a: 2 * a, layer.parameters())
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not layer.deterministic
    layer.eval()
    assert layer.deterministic


@pytest.mark.parametrize("time_major", [False, True])
def test_axes_and_dtypes(time_major):
    options = {"time_major": time_major, "dtype": jnp.bfloat16, "bidirectional": True}
    shape, flags = ((T, B, I), (T, B)) if time_major else ((B, T, I), (B, T))
    apply, params, layer = make("LSTM", num_layers=2, **options)
    y, state = jax.eval_shape(
        functools.partial(apply, mask=np.ones(flags, bool), resets=np.zeros(flags, int)),
        params,
        inputs(*shape),
        layer.initialize_state(B),
    )
    assert (y.shape, y.dtype) == ((*flags, 2 * H), jnp.bfloat16)
    assert {(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(state)} == {
        ((B, H), "float32")
    }
    half = jax.eval_shape(
        lambda: linen.LSTM(H, param_dtype=jnp.bfloat16).init(KEY, inputs(1, 1, I))
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}


# Padding: cases C03 and C05.


@pytest.mark.parametrize(("kind", "oracle"), [("LSTM", oracles.lstm()), ("GRU", oracles.gru())])
def test_padding_does_not_reach_a_row(kind, oracle):
    apply, params, layer = make(kind, num_layers=2, bidirectional=True)
    apply, lengths = jax.jit(apply), np.array([5, 2])
    rows = [inputs(1, int(length), I, seed=seed) for seed, length in enumerate(lengths)]
    alone = []
    for row in rows:
        zero = oracles.zero_state(oracle, 1, H)
        start = ((zero, zero),) * 2
        alone.append(oracles.run_layers(oracle, layer.parameters(), np.swapaxes(row, 0, 1), start))
    for padded in (5, 8, 64):
        x = np.full((2, padded, I), np.nan, np.float32)
        for index, row in enumerate(rows):
            x[index, : lengths[index]] = row[0]
        y, state = apply(params, x, lengths=lengths)
        for index, (y_alone, final) in enumerate(alone):
            real = int(lengths[index])
            assert not np.any(y[index, real:])
            assert_close(y[index, :real], y_alone[:, 0], size=8 * H)
            got = jax.tree.map(lambda a, i=index: a[i : i + 1], state)
            assert_close(got, final, size=8 * H)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_of_masked_layers(bidirectional):
    """Two layers, holes, resets, an empty row: all gradients are the oracles'."""
    oracle = oracles.gru()
    apply, params, layer = make("GRU", num_layers=2, bidirectional=bidirectional)
    x, rng = inputs(B, T, I), np.random.default_rng(1)
    mask, resets = rng.random((B, T)) < 0.7, rng.random((B, T)) < 0.3
    mask[1] = False
    start = jax.tree.map(lambda a: inputs(*a.shape, seed=2), layer.initialize_state(B))

    @jax.jit
    def gradients(params, x, start):
        results, pull = jax.vjp(lambda *a: apply(*a, mask=mask, resets=resets), params, x, start)
        cotangents = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size)).reshape(a.shape), results)
        return cotangents, pull(cotangents)

    (dy, dfinal), got = gradients(params, x, start)
    want = oracles.gradients_layers(
        oracle,
        layer.parameters(),
        np.swapaxes(x, 0, 1),
        start,
        np.swapaxes(dy, 0, 1),
        dfinal,
        mask=mask.T,
        resets=resets.T,
    )
    named = nnx.to_pure_dict(got[0])
    assert_close(named, want.params, size=2 * T * H)
    assert_close(got[1], np.swapaxes(want.x, 0, 1), size=2 * T * H)
    assert_close(got[2], want.state, size=2 * T * H)


# Dropout: case C11.


def pass_through(num_layers, rate, **options):
    """A stack that does nothing but dropout, and its parameters."""
    stack = Stack(user_cells.pass_through, num_layers=num_layers, dropout=rate, **options).check()
    params = stack.init_params(KEY, 16, 16, jnp.float32)

    def apply(x, key):
        return stack.apply(params, x, None, key=key)[0]

    return jax.jit(apply)


def test_dropout_masks_differ_by_step_row_layer_and_call():
    ones, rate = np.ones((B, 8, 16), np.float32), 0.5
    first = np.asarray(pass_through(2, rate)(ones, KEY))
    assert set(np.unique(first)) == {0.0, 2.0}
    assert 0.35 < (first > 0).mean() < 0.65
    vectors = first.reshape(-1, 16)
    assert len(np.unique(vectors, axis=0)) == len(vectors)
    again = np.asarray(pass_through(2, rate)(ones, jax.random.key(1)))
    assert np.any(first != again)
    deeper = np.asarray(pass_through(3, rate)(ones, KEY))
    assert set(np.unique(deeper)) == {0.0, 4.0}
    assert not np.any(deeper[first == 0])
    assert 0.3 < (deeper[first > 0] > 0).mean() < 0.7
    np.testing.assert_array_equal(pass_through(1, rate)(ones, KEY), ones)
    quarter = np.asarray(pass_through(2, 0.25)(ones, KEY))
    assert 0.65 < (quarter > 0).mean() < 0.85


def test_dropout_rates_zero_and_one():
    x = inputs(B, T, I)
    plain, params, _ = make("GRU", num_layers=2)
    heavy, _, _ = make("GRU", num_layers=2, dropout=1.0)
    want = plain(params, x)
    jax.tree.map(np.testing.assert_array_equal, heavy(params, x, deterministic=True), want)

    def loss(params, x):
        y, state = heavy(params, x, rngs=nnx.Rngs(dropout=1))
        return y.sum() + state[1].h.sum(), y

    (_, y), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    # The upper layer saw zeros: what it gives does not depend on the row.
    np.testing.assert_array_equal(y[0], y[1])


def test_each_call_draws_a_new_mask_until_eval():
    x = inputs(B, 2, I)
    layer = jaxrnn.Elman(I, H, num_layers=2, dropout=0.5, rngs=nnx.Rngs(0))
    first, second = (np.asarray(layer(x)[0]) for _ in range(2))
    assert np.any(first != second)
    layer.eval()
    np.testing.assert_array_equal(layer(x)[0], layer(x)[0])
    layer.train()
    given = [layer(x, rngs=nnx.Rngs(dropout=3))[0] for _ in range(2)]
    np.testing.assert_array_equal(*given)


def test_no_random_key_is_asked_for_without_active_dropout():
    x = inputs(B, 2, I)
    for options in ({}, {"dropout": 0.5}, {"num_layers": 2}):
        layer = linen.Elman(H, **options)
        layer.apply(layer.init(KEY, x), x)
        jaxrnn.Elman(I, H, rngs=nnx.Rngs(params=0), **options)(x)
    options = {"num_layers": 2, "dropout": 0.5}
    layer = linen.Elman(H, **options)
    variables = layer.init(KEY, x)
    layer.apply(variables, x, deterministic=True)
    linen.Elman(H, deterministic=True, **options).apply(variables, x)
    state = layer.apply(variables, B, method="initialize_state")
    layer.apply(variables, x[:, 0], state, method="step")
    with pytest.raises(Exception, match="dropout"):
        layer.apply(variables, x)
    with pytest.raises(ValueError, match="deterministic"):
        linen.Elman(H, deterministic=True, **options).apply(variables, x, deterministic=True)
    layer.apply(variables, x, rngs={"dropout": KEY})
    jaxrnn.Elman(I, H, rngs=nnx.Rngs(params=0), **options)(x, deterministic=True)


# Plain transforms of jax: case C13.


@pytest.mark.parametrize("train", [False, True])
def test_plain_transforms_work_around_a_layer(train):
    apply, params, _ = make("LSTM", num_layers=2, dropout=0.5)
    xs = inputs(3, B, 4, I)

    def loss(params, x):
        options = {"rngs": nnx.Rngs(dropout=KEY)} if train else {"deterministic": True}
        y, state = apply(params, x, lengths=np.array([4, 2]), **options)
        return (y**2).sum() + state[0].c.sum()

    grad = jax.value_and_grad(loss)
    plain = [grad(params, x) for x in xs]
    want = jax.tree.map(lambda *a: jnp.stack(a), *plain)

    @jax.jit
    def transformed(params, xs):
        return {
            "checkpoint": jax.lax.map(
                functools.partial(jax.value_and_grad(jax.checkpoint(loss)), params), xs
            ),
            "scan": jax.lax.scan(lambda c, x: (c, grad(params, x)), 0, xs)[1],
            "vmap": jax.vmap(grad, (None, 0))(params, xs),
        }

    for name, got in transformed(params, xs).items():
        assert_close({name: leaves_of(got)}, {name: leaves_of(want)}, size=8 * H)


def leaves_of(tree):
    return dict(enumerate(jax.tree.leaves(tree)))


# Streams: case C16.

STREAMS = {name: row.cell for name, row in table.CELLS.items()} | user_cells.ALL


@pytest.mark.parametrize("name", STREAMS)
def test_a_sequence_may_come_in_pieces(name):
    cell = STREAMS[name]
    num_layers = 1 + list(STREAMS).index(name) % 3
    layer = jaxrnn.RNN(cell, I, H, num_layers=num_layers, rngs=nnx.Rngs(0))
    params, stack, x = layer.parameters(), layer.stack, inputs(B, T, I)
    traced = []

    lengths = np.array([T, 2])

    def whole(params, x, state, lengths=None):
        return stack.apply(params, x, state, lengths=lengths)

    @jax.jit
    def at_once_and_in_two(params, x, state):
        first, between = whole(params, x[:, :3], state)
        second, end = whole(params, x[:, 3:], between)
        some, after = whole(params, x[:, :3], state, np.minimum(lengths, 3))
        rest, last = whole(params, x[:, 3:], after, np.maximum(lengths - 3, 0))
        masked = whole(params, x, state, lengths), (jnp.concatenate([some, rest], axis=1), last)
        return whole(params, x, state), (jnp.concatenate([first, second], axis=1), end), masked

    @jax.jit
    def step(params, x, state):
        traced.append(True)
        return stack.step(params, x, state)

    start = layer.initialize_state(B)
    want, in_two, (masked, masked_in_two) = at_once_and_in_two(params, x, start)
    outputs, state = [], start
    for t in range(T):
        y, state = step(params, x[:, t], state)
        outputs.append(y)
    assert_close(in_two, want, size=T * H)
    assert_close(masked_in_two, masked, size=T * H)
    assert_close((np.stack(outputs, axis=1), state), want, size=T * H)
    assert len(traced) == 1


def test_a_bidirectional_layer_refuses_to_stream():
    layer = jaxrnn.LSTM(I, H, bidirectional=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="backward direction starts at the end"):
        layer.step(inputs(B, I), layer.initialize_state(B))


# Rematerialization: case C17.


@pytest.mark.parametrize("steps", [512, 513])
def test_long_sequences_have_one_gradient(steps):
    x = inputs(B, steps, I)
    params = make("GRU", num_layers=2)[1]

    @jax.jit
    def gradients(params, x):
        def loss(params, x, remat):
            apply = make("GRU", num_layers=2, dropout=0.5, remat=remat)[0]
            y, state = apply(params, x, rngs=nnx.Rngs(dropout=KEY))
            return (y**2).mean() + state[0].h.sum()

        return {
            remat: jax.grad(loss, argnums=(0, 1))(params, x, remat)
            for remat in ("none", "gates", "chunk")
        }

    got = gradients(params, x)
    want = leaves_of(got.pop("none"))
    for remat, parts in got.items():
        assert_close({remat: leaves_of(parts)}, {remat: want}, size=steps * H)


# Messages.


def test_bad_layers_and_arguments_are_named():
    def refused(error, match, *args, **options):
        with pytest.raises(error, match=match):
            layer(*args, **options)

    with pytest.raises(ValueError, match="num_layers should be at least 1, got 0"):
        jaxrnn.GRU(I, H, num_layers=0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"dropout should be between 0 and 1, got 1\.5"):
        linen.GRU(H, dropout=1.5).init(KEY, inputs(B, T, I))
    with pytest.raises(TypeError, match="embedding"):
        linen.GRU(H).init(KEY, np.zeros((B, T), np.int32))
    with pytest.raises(TypeError, match="layers"):
        jaxrnn.GRU(I, H, layers=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="initialize_state needs the parameters"):
        linen.GRU(H).initialize_state(B)

    layer = jaxrnn.LSTM(I, H, num_layers=2, rngs=nnx.Rngs(0))
    x, state = inputs(B, T, I), layer.initialize_state(B)
    refused(ValueError, r"x should be \[B, T, I\]", x[None])
    refused(TypeError, "embedding", np.zeros((B, T, I), np.int32))
    refused(TypeError, "embedding", np.zeros((B, T), np.int32))
    refused(ValueError, "tuple over 2 layers", x, state[:1])
    refused(ValueError, "LSTMState", x, state[0])
    refused(ValueError, r"state\.h of lstm should be", x, layer.initialize_state(B + 1))
    refused(ValueError, r"in_features = 3|I = 3", inputs(B, T, I + 1))
    refused(
        ValueError,
        r"mask should be \[B, T\] = \(2, 7\), got \(7, 2\)",
        x,
        mask=np.ones((T, B), bool),
    )
    refused(ValueError, r"resets should be \[B, T\]", x, resets=np.ones(B, bool))


def test_all_leaves_are_compared():
    """`leaves` has to see into the trees above, or they would be compared as nothing."""
    _, state = jaxrnn.LSTM(I, H, rngs=nnx.Rngs(0))(inputs(B, 2, I))
    assert set(leaves(state)) == {"0.h", "0.c"}
    assert cells.lstm().state_names == ("h", "c")
