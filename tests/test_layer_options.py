"""Options of a layer beside its cell: sizes, directions, connections, states, what a call gets."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import table
from flax import nnx
from table import B, H, I, T
from tolerance import assert_close

import jaxrnn
from jaxrnn import cells, linen, recurrence
from jaxrnn.recurrence.stack import Stack
from pallas_kernels import targets

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def quick_compile():
    with table.quick_compile():
        yield


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stack_of(cell=None, hidden=H, **options):
    """A stack and its parameters."""
    stack = Stack(cell or cells.gru(), **options).check()
    return stack, stack.init_params(KEY, I, hidden, jnp.float32)


# Sizes and connections.


def test_layers_of_different_sizes():
    stack, params = stack_of(num_layers=3, hidden=(5, 2, 4), bidirectional=True)
    x = inputs(B, T, I)
    y, state = stack.apply(params, x, None)
    assert y.shape == (B, T, 8)
    assert [entry[0].h.shape[1] for entry in state] == [5, 2, 4]
    want = [np.swapaxes(x, 0, 1)]
    for index in range(3):
        layer = {"layer_0": params[f"layer_{index}"]}
        want.append(oracles.run_layers(oracles.gru(), layer, want[-1], zero_states(layer))[0])
    assert_close(y, np.swapaxes(want[-1], 0, 1), size=3 * T * H)
    ours = jaxrnn.GRU(I, (5, 2, 4), num_layers=3, rngs=nnx.Rngs(0))
    theirs = linen.GRU((5, 2, 4), num_layers=3)
    shapes = jax.tree.map(jnp.shape, theirs.init(KEY, x)["params"])
    assert shapes == jax.tree.map(jnp.shape, ours.parameters())
    with pytest.raises(ValueError, match="one for each of 3 layers"):
        jaxrnn.GRU(I, (5, 2), num_layers=3, rngs=nnx.Rngs(0))


def zero_states(params):
    """Zero states of one layer, both directions where there are two."""
    directions = params["layer_0"].values()
    states = tuple({"h": np.zeros((B, d["r"].shape[0]))} for d in directions)
    return (states if len(states) > 1 else states[0],)


@pytest.mark.parametrize("merge", ["concat", "sum", "mean", "product"])
def test_merged_directions(merge):
    stack, params = stack_of(num_layers=2, bidirectional=True, merge=merge)
    x = inputs(B, T, I)
    lengths = np.array([7, 3, 5])
    y, _ = stack.apply(params, x, None, lengths=lengths)
    mask = oracles.mask_of_lengths(lengths, T)
    merged = np.swapaxes(x, 0, 1)
    for index in range(2):
        own = params[f"layer_{index}"]
        one, two = (
            oracles.run(
                oracles.gru(),
                own[name],
                merged,
                {"h": np.zeros((B, H))},
                mask=mask,
                reverse=name == "backward",
            )[0]
            for name in own
        )
        merged = {
            "concat": np.concatenate([one, two], -1),
            "sum": one + two,
            "mean": (one + two) / 2,
            "product": one * two,
        }[merge]
    assert_close(y, np.swapaxes(merged, 0, 1), size=2 * T * H)
    assert (
        linen.GRU(H, num_layers=2, bidirectional=True, merge=merge)
        .apply({"params": params}, x, lengths=lengths)[0]
        .shape
        == y.shape
    )


def test_residual_layers_add_their_input():
    stack, params = stack_of(num_layers=3, residual=True)
    x = inputs(B, T, I)
    lengths = np.array([7, 0, 4])
    y, state = stack.apply(params, x, None, lengths=lengths)
    mask = oracles.mask_of_lengths(lengths, T)
    want = np.swapaxes(x, 0, 1)
    for index in range(3):
        own = params[f"layer_{index}"]["forward"]
        out, final = oracles.run(oracles.gru(), own, want, {"h": np.zeros((B, H))}, mask=mask)
        want = out + want if index else out
        assert_close(state[index], final, size=3 * T * H)
    assert_close(y, np.swapaxes(want, 0, 1), size=3 * T * H)
    assert not np.any(y[~mask.T])
    unequal, params = stack_of(num_layers=2, hidden=(3, 4), residual=True)
    with pytest.raises(ValueError, match="layer 1 makes 4 features of 3"):
        unequal.apply(params, x, None)


# What a call gets.


@pytest.mark.parametrize("time_major", [False, True])
def test_one_sequence_without_a_batch_axis(time_major):
    stack, params = stack_of(cells.lstm(), num_layers=2, bidirectional=True, time_major=time_major)
    x, resets = inputs(T, I), np.arange(T) == 3
    batch_axis = 1 if time_major else 0
    rows = {name: np.expand_dims(a, batch_axis) for name, a in (("x", x), ("resets", resets))}
    start = jax.tree.map(lambda a: inputs(*a.shape), stack.init_state(params, 1))
    want = stack.apply(
        params,
        rows["x"],
        start,
        lengths=np.array([5]),
        resets=rows["resets"],
        return_states=True,
    )
    got = stack.apply(
        params,
        x,
        jax.tree.map(lambda a: a[0], start),
        lengths=5,
        resets=resets,
        return_states=True,
    )
    assert_close(got[0], np.squeeze(want[0], batch_axis))
    assert_close(got[1], jax.tree.map(lambda a: a[0], want[1]))
    assert_close(got[2], jax.tree.map(lambda a: np.squeeze(a, batch_axis), want[2]))


def test_a_reset_restores_the_state_that_is_given():
    layer = jaxrnn.LSTM(I, H, num_layers=2, rngs=nnx.Rngs(0))
    x = inputs(B, T, I)
    restart = jax.tree.map(lambda a: inputs(*a.shape, seed=1), layer.initialize_state(B))
    resets = np.zeros((B, T), np.int32)
    resets[:, 3] = [1, 0, 1]
    y, final = layer(x, resets=resets, reset_state=restart)
    tail, tail_final = layer(x[:, 3:], restart)
    plain, plain_final = layer(x)
    for b in range(B):
        want, want_final = (tail, tail_final) if resets[b, 3] else (plain[:, 3:], plain_final)
        assert_close(y[b, 3:], want[b], size=T * H)
        row = lambda a, b=b: a[b]  # noqa: E731
        assert_close(jax.tree.map(row, final), jax.tree.map(row, want_final), size=T * H)
    variables = {"params": layer.parameters()}
    given = {"resets": resets, "reset_state": restart}
    other = linen.LSTM(H, num_layers=2).apply(variables, x, **given)
    assert_close(other[0], y)


def test_a_stream_restarts_the_rows_that_are_reset():
    layer = jaxrnn.LSTM(I, H, num_layers=2, rngs=nnx.Rngs(0))
    x, resets = inputs(B, T, I), table.RESETS.T.astype(np.int32)
    want, final = layer(x, resets=resets)
    other = linen.LSTM(H, num_layers=2)
    variables, state = {"params": layer.parameters()}, layer.initialize_state(B)
    for t in range(T):
        given = (x[:, t], state, resets[:, t])
        y, state = layer.step(*given)
        assert_close(y, want[:, t], size=T * H)
        assert_close(other.apply(variables, *given, method="step")[0], y)
    assert_close(state, final, size=T * H)


def test_a_stream_of_one_sequence():
    layer = jaxrnn.LSTM(I, H, rngs=nnx.Rngs(0))
    x, resets = inputs(T, I), [0, 0, 1, 0, 1, 0, 0]
    want, final = layer(x, resets=resets)
    state = jax.tree.map(lambda a: a[0], layer.initialize_state(1))
    for t in range(T):
        y, state = layer.step(x[t], state, resets[t])
        assert_close(y, want[t], size=T * H)
    assert_close(state, final, size=T * H)


# States after all steps.

STATES = ["lstm", "gru", "sru", "qrnn_window", "min_gru"]


@pytest.mark.parametrize("name", STATES)
def test_states_are_the_final_states_of_shorter_calls(name):
    problem = table.problem(name, "mask_resets", np.float32)
    cell, args = problem.row.cell, (problem.params, problem.x, problem.state)
    y, final, states = recurrence(cell, *args, return_states=True, **problem.options)
    for t in range(T):
        flags = {key: value[: t + 1] for key, value in problem.options.items()}
        _, want = recurrence(cell, args[0], args[1][: t + 1], args[2], **flags)
        assert_close(jax.tree.map(lambda a, t=t: a[t], states), want, size=T * H)
    assert_close(final, jax.tree.map(lambda a: a[-1], states))
    if "h" in cell.state_names:
        assert_close(y, np.where(table.MASK[:, :, None], states.h, 0))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("name", [*STATES, "projected"])
def test_gradients_of_states_after_all_steps(name, reverse):
    """Every way against autodiff through the scan."""
    cell = cells.lstm(proj_size=3) if name == "projected" else table.CELLS[name].cell
    params = cell.init_params(KEY, H, H, jnp.float32)
    x = inputs(T, B, H)
    state = jax.tree.map(lambda a: inputs(*a.shape), cell.init_state(params, B, jnp.float32))

    def gradients(**how):
        def loss(params, x, state):
            options = {"mask": table.MASK, "resets": table.RESETS, "reverse": reverse}
            parts = recurrence(cell, params, x, state, return_states=True, **options, **how)
            return sum(jnp.sum(jnp.sin((2 + k) * a)) for k, a in enumerate(jax.tree.leaves(parts)))

        return jax.grad(loss, (0, 1, 2))(params, x, state)

    want = gradients(autodiff=True)
    ways = [*table.HOW.values()] if table.WHOLE_TABLE else [{"remat": "chunk"}]
    if cell.linear is not None:
        ways.append({"implementation": "associative"})
    for how in ways:
        assert_close(gradients(**how), want, size=T * H)
    with targets.compiling_for("interpreter"):
        assert_close(gradients(implementation="pallas"), want, size=T * H)


def test_states_of_stacks():
    stack, params = stack_of(cells.lstm(), num_layers=2, bidirectional=True)
    x, lengths = inputs(B, T, I), np.array([7, 0, 4])
    y, final, states = stack.apply(params, x, None, lengths=lengths, return_states=True)
    assert jax.tree.structure(states) == jax.tree.structure(final)
    top_forward, top_backward = states[1]
    real = oracles.mask_of_lengths(lengths, T).T[:, :, None]
    assert_close(y[..., :H], np.where(real, top_forward.h, 0))
    assert_close(y[..., H:], np.where(real, top_backward.h, 0))
    for b, steps in enumerate(lengths):
        if steps:
            assert_close(final[0][0].c[b], states[0][0].c[b, steps - 1])
            assert_close(final[0][1].c[b], states[0][1].c[b, 0])


# The parallel scan.


@pytest.mark.parametrize("feature", table.FEATURES)
@pytest.mark.parametrize("name", ["min_gru", "min_lstm", "qrnn"])
def test_the_parallel_scan_is_the_oracle(name, feature):
    problem = table.problem(name, feature, np.float32)
    problem.options.pop("noise", None)  # With it a step is not linear, and is refused.
    got = table.by_library(problem, implementation="associative")
    assert_close(got, table.by_oracle(problem), size=T * H)


def test_the_parallel_scan_is_for_linear_states():
    problem = table.problem("lstm", dtype=np.float32)
    with pytest.raises(NotImplementedError, match="state of lstm is not linear"):
        recurrence(cells.lstm(), problem.params, problem.x, implementation="associative")
    layer = jaxrnn.RNN(cells.min_gru(), I, H, implementation="associative", rngs=nnx.Rngs(0))
    assert str(jaxrnn.explain(layer)) == "associative: asked for by name"
    x = inputs(B, T, I)
    plain = jaxrnn.RNN(cells.min_gru(), I, H, rngs=nnx.Rngs(0))
    assert_close(layer(x), plain(x), size=T * H)
    with pytest.raises(ValueError, match="no longer be linear"):
        jaxrnn.RNN(
            cells.min_gru(), I, H, zoneout=0.5, implementation="associative", rngs=nnx.Rngs(0)
        )
