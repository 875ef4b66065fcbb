"""SRU++: the layer with a memory, against the paper's equations, in pieces, and in both shells."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import table
from flax import nnx
from tolerance import assert_close

import jaxrnn
from jaxrnn import linen
from pallas_kernels import targets

B, T, I, H, D, M = 3, 9, 3, 4, 6, 4  # noqa: E741
KEY = jax.random.key(0)
MASK = np.random.default_rng(1).random((B, T)) < 0.8
MASK[2] = False
RESETS = np.random.default_rng(2).random((B, T)) < 0.25


@pytest.fixture(autouse=True)
def quick_compile():
    with table.quick_compile():
        yield


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make(in_features=I, heads=2, **options):
    """A layer and its parameters, none of which is 0."""
    layer = linen.SRUPlusPlus(H, D, memory=M, heads=heads, **options)
    variables = layer.init(KEY, inputs(B, 2, in_features))
    leaves, tree = jax.tree.flatten(variables)
    moved = [leaf + inputs(*leaf.shape, seed=k) * 0.5 for k, leaf in enumerate(leaves)]
    return layer, jax.tree.unflatten(tree, moved)


def by_hand(params, x, heads, mask, resets):
    """One row after the other, one step after the other: equations of section 3 of the paper."""
    params = {name: oracles.exact(a) for name, a in params.items()}
    rows = []
    for row in range(B):
        seen, c, outputs = [], np.zeros((1, H)), []
        for t in range(T):
            if not mask[row, t]:
                outputs.append(np.zeros(H))
                continue
            if resets[row, t]:
                seen, c = [], np.zeros((1, H))
            q = x[row, t] @ params["w_q"]
            seen = [*seen, q][-M - 1 :]
            keys, values = (np.stack(seen) @ params[name] for name in ("w_k", "w_v"))
            attended = []
            for head in np.split(np.arange(D), heads):
                scores = keys[:, head] @ q[head] / np.sqrt(len(head))
                weights = np.exp(scores - np.max(np.real(scores)))
                attended.append((weights / weights.sum()) @ values[:, head])
            mixed = q + params["alpha"] * np.concatenate(attended)
            deviation = mixed - mixed.mean()
            z = deviation / np.sqrt((deviation**2).mean() + 1e-5) * params["gain"]
            z = (z + params["b_norm"])[None]
            u, f, r = np.moveaxis(oracles.matmul(z, params["w_x"]), 1, 0)
            past = z @ params["w_highway"] if "w_highway" in params else x[row, t][None]
            f = oracles.sigmoid(f + params["v"][0] * c + params["b"][0])
            r = oracles.sigmoid(r + params["v"][1] * c + params["b"][1])
            c = f * c + (1 - f) * u
            outputs.append((r * c + (1 - r) * past * np.sqrt(3))[0])
        rows.append(np.stack(outputs))
    return np.stack(rows)


@pytest.mark.parametrize(("in_features", "heads"), [(I, 1), (H, 3)])
def test_the_equations_of_the_paper(in_features, heads):
    layer, variables = make(in_features, heads)
    params, x = variables["params"]["weights"], inputs(B, T, in_features)
    flags = {"mask": MASK, "resets": RESETS}
    y, _ = layer.apply(variables, x, **flags)
    assert_close(y, by_hand(params, x, heads, **flags), size=T * D)
    # The padding may hold anything.
    spoiled = np.where(MASK[:, :, None], x, np.nan)
    np.testing.assert_array_equal(layer.apply(variables, spoiled, **flags)[0], y)


def test_gradients_are_those_of_the_equations():
    """Along a random direction of each parameter and of x, by complex step."""
    layer, variables = make()
    params, x, dy = variables["params"]["weights"], inputs(B, T, I), inputs(B, T, H, seed=5)
    flags = {"mask": MASK, "resets": RESETS}

    def loss(params, x):
        return (layer.apply({"params": {"weights": params}}, x, **flags)[0] * dy).sum()

    dparams, dx = jax.grad(loss, (0, 1))(params, x)
    assert not np.any(np.asarray(dx)[~MASK])
    rng = np.random.default_rng(3)
    for name, got in [*dparams.items(), ("x", dx)]:
        direction = rng.normal(size=got.shape)
        moved = (x if name == "x" else params[name]) + 1e-30j * direction
        given = (params, moved) if name == "x" else (params | {name: moved}, x)
        want = np.imag((by_hand(*given, 2, **flags) * dy).sum()) / 1e-30
        got = float((np.asarray(got) * direction).sum())
        assert_close({name: got}, {name: want}, size=T * B * D, scale=10)


@pytest.mark.parametrize("pieces", [(3, 6), (1,) * T, (7, 2)])
def test_one_call_equals_shorter_ones(pieces):
    layer, variables = make()
    x = inputs(B, T, I)
    want, final = layer.apply(variables, x, mask=MASK, resets=RESETS)
    state, outputs, start = None, [], 0
    for steps in pieces:
        part = slice(start, start + steps)
        flags = {"mask": MASK[:, part], "resets": RESETS[:, part]}
        y, state = layer.apply(variables, x[:, part], state, **flags)
        outputs.append(y)
        start += steps
    assert_close(np.concatenate(outputs, axis=1), want, size=T * D)
    assert_close(state, final, size=T * D)


def test_streaming_compiles_once():
    layer = jaxrnn.SRUPlusPlus(I, H, D, memory=M, rngs=nnx.Rngs(0))
    x = inputs(B, T, I)
    want, final = layer(x)
    graph, params = nnx.split(layer)
    traced = []

    @jax.jit
    def step(params, x, state):
        traced.append(True)
        return nnx.merge(graph, params).step(x, state)

    state = layer.initialize_state(B)
    for t in range(T):
        y, state = step(params, x[:, t], state)
        assert_close(y, want[:, t], size=T * D)
    assert_close(state, final, size=T * D)
    assert len(traced) == 1


def test_both_shells_and_both_orders_of_axes():
    ours = jaxrnn.SRUPlusPlus(I, H, D, memory=M, heads=2, rngs=nnx.Rngs(0))
    x, lengths = inputs(B, T, I), np.array([9, 0, 4])
    weights = {name: leaf[...] for name, leaf in ours.weights.items()}
    variables = {"params": {"weights": weights}}
    layer = linen.SRUPlusPlus(H, D, memory=M, heads=2)
    shapes = jax.tree.map(jnp.shape, layer.init(KEY, x))
    assert shapes == jax.tree.map(jnp.shape, variables)
    y, state = ours(x, lengths=lengths)
    assert_close(layer.apply(variables, x, lengths=lengths), (y, state))
    time_major = linen.SRUPlusPlus(H, D, memory=M, heads=2, time_major=True)
    other, _ = time_major.apply(variables, np.swapaxes(x, 0, 1), lengths=lengths)
    assert_close(np.swapaxes(other, 0, 1), y)
    start = layer.apply(variables, B, method="initialize_state")
    assert_close(layer.apply(variables, x[:, 0], start, method="step")[0], ours(x[:, :1])[0][:, 0])


def test_the_recurrence_runs_on_the_kernels_too():
    layer = linen.SRUPlusPlus(H, D, memory=M, heads=2, implementation="pallas")
    x = inputs(B, T, I)
    plain, variables = make()
    with targets.compiling_for("interpreter"):
        y, state = layer.apply(variables, x, mask=MASK, resets=RESETS)
    assert_close((y, state), plain.apply(variables, x, mask=MASK, resets=RESETS), size=T * D)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="multiple of heads = 4, got 6"):
        jaxrnn.SRUPlusPlus(I, H, D, memory=M, heads=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="memory should be at least 0"):
        linen.SRUPlusPlus(H, D, memory=-1).init(KEY, inputs(B, T, I))
    layer = jaxrnn.SRUPlusPlus(I, H, D, memory=M, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"state\.c of sru\+\+"):
        layer(inputs(B, T, I), layer.initialize_state(B + 1))
    with pytest.raises(TypeError, match="embedding"):
        layer(np.zeros((B, T, I), np.int32))
    without = jaxrnn.SRUPlusPlus(I, H, D, memory=0, rngs=nnx.Rngs(0))
    y, state = without(inputs(B, T, I))
    assert y.shape == (B, T, H)
    assert state.memory.shape == (B, 0, D)


def test_what_runs_is_told():
    layer = jaxrnn.SRUPlusPlus(I, H, D, memory=M, rngs=nnx.Rngs(0))
    assert jaxrnn.explain(layer, gpu="h200").family == "elementwise"
    with pytest.raises(ValueError, match="in_features = 3"):
        layer(inputs(B, T, I + 1))
    with pytest.raises(ValueError, match=r"x should be \[B, T, I\]"):
        layer(inputs(T, I))


def test_a_stream_that_is_reset():
    layer = jaxrnn.SRUPlusPlus(I, H, D, memory=M, rngs=nnx.Rngs(0))
    x = inputs(B, T, I)
    want, _ = layer(x, resets=RESETS)
    state = layer.initialize_state(B)
    for t in range(T):
        y, state = layer.step(x[:, t], state, RESETS[:, t])
        assert_close(y, want[:, t], size=T * D)
