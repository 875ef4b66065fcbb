"""Noise inside the loop and around it: what it computes, its gradient, and what it draws.

Zoneout with given masks is in the table. A mask of ``h`` before ``h @ r`` is, row by row, another
matrix ``r`` for the oracles; dropped updates have an equation here.
"""

import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import table
import user_cells
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from table import B, H, T
from tolerance import assert_close

import jaxrnn
from jaxrnn import cells, linen, recurrence, regularization
from jaxrnn.recurrence.noise import Noise
from jaxrnn.recurrence.stack import Stack
from pallas_kernels import targets

KEY = jax.random.key(0)
# "chunk" keeps the gates of its chunks, as "none" does of all steps.
HOW = [*table.HOW, "pallas"] if table.WHOLE_TABLE else ["gates", "chunk", "pallas"]


@pytest.fixture(autouse=True)
def quick_compile():
    with table.quick_compile():
        yield


def bits(seed, *shape):
    return np.random.default_rng(seed).random(shape) < 0.5


def by_library(problem, how, **options):
    """Results and gradients, one way of computing them, the interpreted kernels included."""
    if how != "pallas":
        return table.by_library(problem, **table.HOW[how], **options)
    with targets.compiling_for("interpreter"):
        return table.by_library(problem, implementation="pallas", **options)


def by_oracle(problem, state, mask, **options):
    """Results and gradients of the oracle, for some of the rows."""
    oracle = problem.row.oracle
    args = (oracle, problem.params, problem.x, state)
    y, final = oracles.run(*args, mask=mask, **options)
    d = oracles.gradients(*args, problem.dy, problem.dfinal, mask=mask, **options)
    return y, final, d.params, d.x, d.state


# Zoneout.


def test_zoneout_takes_the_mean_in_evaluation():
    problem = table.problem("lstm", "resets", np.float32)
    shares = {"h": 0.1, "c": 0.4}
    hold = {field: np.full((T, B, H), share) for field, share in shares.items()}
    want = by_oracle(problem, problem.state, None, resets=table.RESETS, hold=hold)
    assert_close(by_library(problem, "none", noise=Noise(hold=shares)), want, size=T * H)
    assert_close(by_library(problem, "pallas", noise=Noise(hold=shares)), want, size=T * H)
    layer = jaxrnn.LSTM(problem.x.shape[-1], H, zoneout=(0.1, 0.4), rngs=nnx.Rngs(0))
    layer.eval()
    x = np.swapaxes(problem.x, 0, 1)
    params = layer.parameters()["layer_0"]["forward"]
    zeros = oracles.zero_state(problem.row.oracle, B, H)
    y, _ = oracles.run(problem.row.oracle, params, problem.x, zeros, hold=hold)
    assert_close(layer(x)[0], np.swapaxes(y, 0, 1), size=T * H)
    # And so in a stream.
    state = layer.initialize_state(B)
    for t in range(T):
        y_t, state = layer.step(x[:, t], state)
        assert_close(y_t, y[t], size=T * H)


# Recurrent dropout.


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["lstm", "gru", "elman_tanh"])
def test_scaled_h_is_another_matrix_for_each_row(name, how):
    problem = table.problem(name, "mask_resets", np.float32)
    scale = 2.0 * bits(0, B, H).astype(np.float32)
    y, final, dparams, dx, dstate = by_library(problem, how, noise=Noise(h_scale=scale))
    total = jax.tree.map(np.zeros_like, problem.params)
    for b in range(B):
        row = slice(b, b + 1)
        own = problem._replace(
            params=problem.params | {"r": problem.params["r"] * scale[b][:, None, None]},
            x=problem.x[:, row],
            dy=problem.dy[:, row],
            dfinal=jax.tree.map(lambda a, row=row: a[row], problem.dfinal),
        )
        state = jax.tree.map(lambda a, row=row: a[row], problem.state)
        want = by_oracle(own, state, table.MASK[:, row], resets=table.RESETS[:, row])
        got = (y[:, row], jax.tree.map(lambda a, row=row: a[row], final), dx[:, row])
        assert_close(got, (want[0], want[1], want[3]), size=T * H)
        got_state = jax.tree.map(lambda a, row=row: a[row], dstate)
        assert_close(got_state, want[4], size=T * H)
        want[2]["r"] = want[2]["r"] * scale[b][:, None, None]
        total = jax.tree.map(np.add, total, want[2])
    assert_close(dparams, total, size=T * H)


def lstm_with_dropped_updates(params, x, state, scale):
    """Semeniuta et al. (2016), equation 9: ``c' = f c + i d(g)``."""
    h, c = state
    outputs = []
    for x_t, scale_t in zip(x, scale, strict=True):
        pre = np.einsum("bi,igh->gbh", x_t, params["w_x"]) + params["b"][:, None]
        i, f, g, o = pre + np.einsum("bs,sgh->gbh", h, params["r"])
        i, f, o = (1 / (1 + np.exp(-a)) for a in (i, f, o))
        c = f * c + i * (np.tanh(g) * scale_t)
        h = o * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs)


def gru_with_dropped_updates(params, x, state, scale):
    """The same place: ``h' = (1 - z) d(n) + z h``."""
    (h,) = state
    outputs = []
    for x_t, scale_t in zip(x, scale, strict=True):
        r, z, n = np.einsum("bi,igh->gbh", x_t, params["w_x"]) + params["b"][:, None]
        hr, hz, hn = np.einsum("bs,sgh->gbh", h, params["r"])
        r, z = 1 / (1 + np.exp(-r - hr)), 1 / (1 + np.exp(-z - hz))
        h = (1 - z) * (np.tanh(n + r * (hn + params["b_hn"])) * scale_t) + z * h
        outputs.append(h)
    return np.stack(outputs)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("name", "loop"), [("lstm", lstm_with_dropped_updates), ("gru", gru_with_dropped_updates)]
)
def test_dropped_updates(name, loop, how):
    problem = table.problem(name, "resets")
    problem = problem._replace(options={})
    keep, rate = bits(0, T, B, H), 0.3
    single = problem._replace(
        **{
            field: jax.tree.map(np.float32, getattr(problem, field))
            for field in ("params", "x", "state", "dy", "dfinal")
        }
    )
    noise = Noise(keep_update=jnp.asarray(keep), update_rate=rate)
    y, _, dparams, dx, _ = by_library(
        single._replace(dfinal=jax.tree.map(np.zeros_like, single.dfinal)), how, noise=noise
    )
    scale = keep / (1 - rate)
    args = (problem.params, problem.x, problem.state)
    assert_close(y, loop(*args, scale), size=T * H)

    def slope(of, path):
        """Along a random direction, by complex step."""
        direction = np.random.default_rng(1).normal(size=of.shape)
        moved = of + 1e-30j * direction
        given = (args[0] | {path: moved}, args[1]) if path else (args[0], moved)
        slopes = np.imag(loop(*given, args[2], scale)) / 1e-30
        return float((slopes * problem.dy).sum()), direction

    for path, got in [*dparams.items(), (None, dx)]:
        want, direction = slope(problem.params[path] if path else problem.x, path)
        assert_close(float((np.asarray(got) * direction).sum()), want, size=T * B * H, scale=10)


def test_a_little_zoneout_changes_little():
    """Of any cell; a rate of 1 leaves the state as it was."""
    x = jax.random.normal(KEY, (T, B, H))
    for name in (*table.CORE, "slstm", "qrnn", "qrnn_window", "min_lstm", "mgu"):
        cell = table.CELLS[name].cell
        outputs = []
        for rate in (0.0, 1e-7):
            stack = Stack(cell, zoneout=rate, time_major=True).check()
            params = stack.init_params(KEY, H, H, jnp.float32)
            outputs.append(stack.apply(params, x, None)[0])
        assert_close({name: outputs[1]}, {name: outputs[0]}, size=T * H)
        kept = Stack(cell, zoneout=1, time_major=True).check()
        start = jax.tree.map(lambda a: a + 1, kept.init_state(params, B))
        for key in (None, KEY):
            (state,) = kept.apply(params, x, start, key=key)[1]
            for field in cell.holds:
                np.testing.assert_array_equal(getattr(state, field), getattr(start[0], field))


# Weight drop: case C12.


def test_weight_drop():
    x = np.random.default_rng(0).normal(size=(B, T, 3)).astype(np.float32)
    layer = jaxrnn.LSTM(3, H, weight_dropout=0.5, rngs=nnx.Rngs(0))
    stored = np.asarray(layer.parameters()["layer_0"]["forward"]["r"])
    plain = jaxrnn.LSTM(3, H, rngs=nnx.Rngs(0))
    outputs = [np.asarray(layer(x)[0]) for _ in range(20)]
    assert len({y.tobytes() for y in outputs}) == 20
    np.testing.assert_array_equal(layer.parameters()["layer_0"]["forward"]["r"], stored)
    layer.eval()
    np.testing.assert_array_equal(layer(x)[0], plain(x)[0])

    def loss(params, key):
        return layer.stack.apply(params, x, None, key=key)[0].sum()

    grads = jax.grad(loss)(layer.parameters(), KEY)["layer_0"]["forward"]["r"]
    kept = np.asarray(grads) != 0
    assert 0.3 < kept.mean() < 0.7
    # What the call did is the plain loop with the matrix that was kept, scaled.
    dropped = layer.parameters()["layer_0"]["forward"] | {"r": np.where(kept, stored * 2, 0)}
    y, _ = recurrence(cells.lstm(), dropped, np.swapaxes(x, 0, 1))
    assert_close(layer.stack.apply(layer.parameters(), x, None, key=KEY)[0], y.swapaxes(0, 1))


# What is drawn: case C11.


def drawn(**rates):
    """The noise of a layer of H = 64 over 9 steps of 5 rows."""
    stack = Stack(cells.lstm(), **rates)
    params = stack.init_params(KEY, 3, 64, jnp.float32)["layer_0"]["forward"]
    return stack.rates.noise, params, jnp.zeros((9, 5, 3))


def test_masks_differ_by_step_row_and_call_as_their_definition_says():
    rates = {"zoneout": 0.25, "recurrent_dropout": 0.5, "update_dropout": 0.4}
    noise, params, x = drawn(**rates)
    first, other = (noise(key, cells.lstm(), params, x) for key in (KEY, jax.random.key(1)))
    per_step = [*first.hold.values(), first.keep_update]
    for mask, rate in zip(per_step, (0.25, 0.25, 0.6), strict=True):
        vectors = np.asarray(mask).reshape(-1, 64)
        assert len(np.unique(vectors, axis=0)) == 45
        assert abs(vectors.mean() - rate) < 0.05
    assert len(np.unique(np.asarray(first.h_scale), axis=0)) == 5
    assert set(np.unique(first.h_scale)) == {0.0, 2.0}
    assert np.any(first.hold["h"] != first.hold["c"])
    assert np.any(first.hold["h"] != other.hold["h"])
    assert np.any(first.h_scale != other.h_scale)
    assert np.any(first.keep_update != other.keep_update)


@pytest.mark.parametrize("where", ["input_dropout", "output_dropout", "dropout"])
def test_variational_dropout_has_one_mask_for_all_steps(where):
    stack = Stack(user_cells.pass_through, num_layers=2, variational=True, **{where: 0.5})
    params = stack.init_params(KEY, 16, 16, jnp.float32)
    ones = jnp.ones((4, 8, 16))
    y = np.asarray(stack.apply(params, ones, None, key=KEY)[0])
    assert set(np.unique(y)) == {0.0, 2.0}
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))
    assert len(np.unique(y[:, 0], axis=0)) == 4
    again = np.asarray(stack.apply(params, ones, None, key=jax.random.key(1))[0])
    assert np.any(again != y)
    np.testing.assert_array_equal(stack.apply(params, ones, None)[0], ones)


def test_layers_and_directions_have_masks_of_their_own():
    """Equal weights, so that outputs differ by their masks alone."""
    stack = Stack(cells.lstm(), bidirectional=True, recurrent_dropout=0.5, zoneout=0.2)
    params = stack.init_params(KEY, 3, H, jnp.float32)
    params["layer_0"]["backward"] = params["layer_0"]["forward"]
    x = jnp.broadcast_to(jax.random.normal(KEY, (B, 1, 3)), (B, T, 3))
    y = np.asarray(stack.apply(params, x, None, key=KEY)[0])
    assert np.any(y[..., :H] != y[:, ::-1, H:])
    still = np.asarray(stack.apply(params, x, None)[0])
    assert_close(still[..., :H], still[:, ::-1, H:])


@pytest.mark.parametrize(
    "rate", ["recurrent_dropout", "update_dropout", "weight_dropout", "zoneout", "output_dropout"]
)
def test_a_rate_of_one_is_finite(rate):
    x = np.random.default_rng(0).normal(size=(B, T, 3)).astype(np.float32)
    stack = Stack(cells.lstm(), **{rate: 1.0}).check()
    params = stack.init_params(KEY, 3, H, jnp.float32)

    def loss(params, x):
        y, state = stack.apply(params, x, None, key=KEY)
        return (y**2).sum() + state[0].c.sum()

    assert all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.grad(loss, (0, 1))(params, x))
    )


def test_linen_draws_from_its_dropout_stream():
    x = np.random.default_rng(0).normal(size=(B, T, 3)).astype(np.float32)
    layer = linen.GRU(H, zoneout=0.3, recurrent_dropout=0.2)
    variables = layer.init({"params": KEY, "dropout": KEY}, x)
    calls = [layer.apply(variables, x, rngs={"dropout": jax.random.key(n)})[0] for n in (1, 1, 2)]
    np.testing.assert_array_equal(calls[0], calls[1])
    assert np.any(np.asarray(calls[0]) != np.asarray(calls[2]))
    layer.apply(variables, x, deterministic=True)


# Clipped gradients.


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["lstm", "gru", "sru"])
def test_the_gradient_of_a_step_is_clipped(name, how):
    """Of one step, the cotangents of the biases are those of the pre-activations."""
    problem = table.problem(name, dtype=np.float32)
    one = problem._replace(x=problem.x[:1, :1], dy=10 * problem.dy[:1, :1])
    one = one._replace(dfinal=jax.tree.map(lambda a: a[:1], problem.dfinal))
    free = by_library(one, how)[2]["b"]
    clipped = by_library(one, how, gradient_clip=0.2)[2]["b"]
    assert np.abs(free).max() > 0.3
    assert_close(clipped, np.clip(free, -0.2, 0.2))


@pytest.mark.parametrize("how", ["none", "gates", "chunk", "pallas"])
@pytest.mark.parametrize("name", ["lstm", "gru", "sru"])
def test_clipping_is_autodiffs_with_clipped_steps(name, how):
    problem = table.problem(name, "mask_resets", np.float32)
    want = by_library(problem, "autodiff", gradient_clip=0.1)
    assert_close(by_library(problem, how, gradient_clip=0.1), want, size=T * H)
    free = by_library(problem, "autodiff")
    assert np.abs(np.asarray(free[3]) - np.asarray(want[3])).max() > 0.01


# Functions of arrays.


def test_embedding_dropout_takes_whole_words():
    ids = np.random.default_rng(0).integers(0, 50, (7, 9))
    y = np.asarray(regularization.embedding_dropout(KEY, 0.4, ids, jnp.ones((7, 9, 4)), 50))
    for word in np.unique(ids):
        values = np.unique(y[ids == word])
        assert values.tolist() in ([0.0], [np.float32(1 / 0.6)])
    dropped = [np.all(y[ids == word] == 0) for word in np.unique(ids)]
    assert 0.15 < np.mean(dropped) < 0.65


def test_penalties_are_means_over_what_counts():
    y = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    mask, resets = bits(3, 5, 3) | bits(4, 5, 3), bits(1, 5, 3)
    assert_close(regularization.activation_penalty(y), np.mean(y.astype(float) ** 2), size=60)
    rows = [y[t, b] ** 2 for t in range(5) for b in range(3) if mask[t, b]]
    assert_close(regularization.activation_penalty(y, mask), np.mean(rows), size=60)
    pairs = [
        (y[t, b] - y[t - 1, b]) ** 2
        for t in range(1, 5)
        for b in range(3)
        if mask[t, b] and mask[t - 1, b] and not resets[t, b]
    ]
    got = regularization.temporal_activation_penalty(y, mask, resets)
    assert_close(got, np.mean(pairs), size=60)
    spoiled = np.where(mask[:, :, None], y, np.nan)
    assert_close(regularization.temporal_activation_penalty(spoiled, mask, resets), np.mean(pairs))
    assert regularization.activation_penalty(y, np.zeros((5, 3), bool)) == 0
    half = regularization.activation_penalty(jnp.full((2, 1, 4), 300, jnp.float16))
    assert half == 90000


# Messages.


@pytest.mark.parametrize(
    ("match", "cell", "options"),
    [
        ("recurrent_dropout should be between 0 and 1", cells.lstm(), {"recurrent_dropout": 1.5}),
        ("zoneout should be between 0 and 1", cells.lstm(), {"zoneout": (0.1, -1.0)}),
        (r"one for each of \('h', 'c'\)", cells.lstm(), {"zoneout": (0.1,)}),
        ("sru has no h @ r for recurrent_dropout", cells.sru(), {"recurrent_dropout": 0.1}),
        ("sru has no update", cells.sru(), {"update_dropout": 0.1}),
        ("merge should be", cells.lstm(), {"merge": "max"}),
        ("merge should be", cells.lstm(), {"merge": None}),
        ("zoneout of 'm' should be 0", cells.slstm(), {"zoneout": (0.1, 0.0, 0.0, 0.1)}),
        ("gradient_clip should be above 0", cells.lstm(), {"gradient_clip": -1.0}),
    ],
)
def test_what_cannot_be_is_refused(match, cell, options):
    with pytest.raises(ValueError, match=match):
        jaxrnn.RNN(cell, 3, H, rngs=nnx.Rngs(0), **options)


def test_noise_that_does_not_fit_is_refused():
    problem = table.problem("gru", dtype=np.float32)
    run = functools.partial(recurrence, cells.gru(), problem.params, problem.x)
    with pytest.raises(ValueError, match="hold names 'c'"):
        run(noise=Noise(hold={"c": 0.5}))
    with pytest.raises(ValueError, match=r"h_scale should be \[B, S\]"):
        run(noise=Noise(h_scale=jnp.ones((1, H))))
    with pytest.raises(ValueError, match=r"keep_update should be \[T, B, H\]"):
        run(noise=Noise(keep_update=jnp.ones((T, H), bool)))
    with pytest.raises(ValueError, match="a step of its own"):
        recurrence(cells.gru(reset_after=False), problem.params, problem.x, gradient_clip=1.0)
    projected = Stack(cells.lstm(proj_size=H), zoneout=(0.1, 0.1))
    with pytest.raises(ValueError, match="zoneout cannot hold 'h'"):
        projected.apply(projected.init_params(KEY, 3, H, jnp.float32), problem.x, None, key=KEY)


# Plain transforms of jax.


@pytest.mark.parametrize("how", [{}, {"remat": "chunk"}, {"implementation": "pallas"}])
@pytest.mark.parametrize("cell", [cells.lstm(proj_size=3), cells.gru()], ids=["projected", "gru"])
def test_noise_under_vmap(cell, how):
    """One mask for each member of the axis that is mapped over."""
    params = cell.init_params(KEY, H, H, jnp.float32)
    xs = jax.random.normal(KEY, (2, T, B, H))
    state = jax.eval_shape(lambda: cell.init_state(params, B, jnp.float32))
    last = cell.state_names[-1]
    holds, scales = bits(0, 2, T, B, H), 2.0 * bits(1, 2, *state.h.shape)

    def loss(params, x, hold, scale):
        noise = Noise(h_scale=jnp.float32(scale), hold={last: hold})
        parts = recurrence(cell, params, x, resets=table.RESETS, noise=noise, **how)
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(parts))

    gradients = jax.value_and_grad(loss, (0, 1))
    with targets.compiling_for("interpreter") if "implementation" in how else nullcontext():
        got = jax.vmap(gradients, (None, 0, 0, 0))(params, xs, holds, scales)
    how = {}
    for k in range(2):
        want = gradients(params, xs[k], holds[k], scales[k])
        assert_close(jax.tree.map(lambda a, k=k: a[k], got), want, size=T * H)


def test_noise_on_a_sharded_batch_is_not_gathered():
    """Each device has its rows of the masks."""
    cell = cells.lstm()
    params = cell.init_params(KEY, H, H, jnp.float32)
    x, hold, scale = jnp.ones((T, 8, H)), bits(0, T, 8, H), 2.0 * bits(1, 8, H)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def loss(params, x, hold, scale):
        noise = Noise(h_scale=scale, hold={"c": hold})
        y, _ = recurrence(cell, params, x, noise=noise, remat="gates")
        return (y**2).sum()

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    arrays = (x, jnp.asarray(hold), jnp.float32(scale))
    specs = [PartitionSpec(None, "data"), PartitionSpec(None, "data"), PartitionSpec("data")]
    shards = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)
    ]
    compiled = gradients.lower(params, *shards).compile()
    assert_close(compiled(params, *shards), gradients(params, *arrays), size=T * 8 * H)
    assert "all-gather" not in compiled.as_text()
