"""What a cell promises besides its equations: names, shapes and initial values."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from flax import linen as nn
from table import B, H, T
from tolerance import assert_close

from jaxrnn import cells, recurrence
from jaxrnn.cells import initializers
from jaxrnn.recurrence import xla
from jaxrnn.recurrence.noise import Noise
from jaxrnn.recurrence.stack import Stack

KEY = jax.random.key(0)
WITH_MATRIX = (cells.elman, cells.lstm, cells.gru, cells.mgu, cells.slstm)
WITH_VECTOR = (cells.sru, cells.indrnn)
FACTORIES = (*WITH_MATRIX, *WITH_VECTOR, cells.qrnn, cells.min_gru, cells.min_lstm)


@pytest.mark.parametrize("name", table.CELLS)
def test_a_cell_is_what_it_says(name):
    row = table.CELLS[name]
    cell = row.cell
    params = jax.eval_shape(lambda: cell.init_params(KEY, row.in_features, H, jnp.bfloat16))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    state = jax.eval_shape(functools.partial(cell.init_state, batch=B, dtype=jnp.float32), params)
    assert isinstance(state, cell.state_type)
    sizes = {"h": 3} if name == "lstm_projected" else {}
    for field, leaf in state._asdict().items():
        assert (leaf.shape, leaf.dtype) == ((B, sizes.get(field, H)), jnp.float32)
    x = jax.ShapeDtypeStruct((T, B, row.in_features), jnp.bfloat16)
    x_pre = jax.eval_shape(cell.project_inputs, params, x)
    assert (x_pre.shape, x_pre.dtype) == ((T, B, len(cell.x_gates), H), jnp.bfloat16)
    weights = jax.eval_shape(cell.loop_weights, params)
    if cell.h_gates:
        assert weights.r.shape == (sizes.get("h", H), len(cell.h_gates), H)
    assert all(vector.shape == (H,) for vector in weights.vectors.values())
    # The gates that get both an input and a recurrent column lead, in one order.
    both = cell.shared_gates
    if cell.h_gates:
        assert cell.x_gates[:both] == cell.h_gates[:both]
    assert not set(cell.x_gates[both:]) & set(cell.h_gates)


@pytest.mark.parametrize("factory", FACTORIES)
def test_equal_arguments_give_one_cell(factory):
    """Or every layer would compile its own loop."""
    assert factory() is factory()
    assert factory(use_bias=False) is factory(use_bias=False)
    assert factory(use_bias=False) is not factory()
    assert hash(factory()) == hash(factory())


@pytest.mark.parametrize("factory", FACTORIES)
def test_without_bias_there_is_none(factory):
    params = factory(use_bias=False).init_params(KEY, H, H, jnp.float32)
    assert not {"b", "b_hn"} & set(params)


@pytest.mark.parametrize("factory", WITH_MATRIX)
def test_recurrent_matrices_start_orthogonal_gate_by_gate(factory):
    r = np.asarray(factory().init_params(KEY, 3, 6, jnp.float32)["r"])
    for gate in range(r.shape[1]):
        np.testing.assert_allclose(r[:, gate].T @ r[:, gate], np.eye(6), atol=1e-6)
        assert all(np.any(r[:, gate] != r[:, other]) for other in range(gate))


def test_input_matrices_start_as_glorots_of_one_gate():
    w_x = np.asarray(cells.lstm().init_params(KEY, 40, 60, jnp.float32)["w_x"])
    bound = math.sqrt(6 / (40 + 60))
    assert 0.98 * bound < np.abs(w_x).max() <= bound
    assert w_x.std() == pytest.approx(bound / math.sqrt(3), rel=0.03)


def test_the_forget_gates_bias_starts_at_one():
    b = np.asarray(cells.lstm().init_params(KEY, 3, H, jnp.float32)["b"])
    assert b.tolist() == [[0.0] * H, [1.0] * H, [0.0] * H, [0.0] * H]
    b = np.asarray(cells.lstm(forget_bias=2.0).init_params(KEY, 3, H, jnp.float32)["b"])
    assert b[1].tolist() == [2.0] * H
    for factory, keep in (
        (cells.mgu, 1.0),
        (functools.partial(cells.mgu, reset_after=False), -1.0),
    ):
        b = np.asarray(factory().init_params(KEY, 3, H, jnp.float32)["b"])
        assert b.tolist() == [[keep] * H, [0.0] * H]
    for factory in (cells.elman, cells.gru, cells.indrnn, cells.qrnn, cells.min_gru):
        assert not np.any(factory().init_params(KEY, 3, H, jnp.float32)["b"])


def test_srus_own_initial_values():
    """Lei et al. (2018), section 3.2."""
    params = cells.sru(highway_bias=-2.0).init_params(KEY, 50, 70, jnp.float32)
    assert not np.any(params["v"])
    assert np.asarray(params["b"]).tolist() == [[0.0] * 70, [-2.0] * 70]
    for name in ("w_x", "w_highway"):
        w = np.asarray(params[name])
        assert w.var() == pytest.approx(1 / 50, rel=0.05)
        assert np.abs(w).max() <= math.sqrt(3 / 50)
    assert "w_highway" not in cells.sru().init_params(KEY, H, H, jnp.float32)
    ones = jnp.ones((1, 1, H))
    for cell, alpha in ((cells.sru(), math.sqrt(3)), (cells.sru(rescale=False), 1.0)):
        x_pre = cell.project_inputs(cell.init_params(KEY, H, H, jnp.float32), ones)
        np.testing.assert_allclose(x_pre[0, 0, 3], alpha, rtol=1e-6)


def test_initializers_given_are_used():
    def constant(value):
        return jax.nn.initializers.constant(value)

    for factory in FACTORIES:
        options = {"kernel_init": constant(2.0), "bias_init": constant(5.0)}
        if factory in WITH_MATRIX + WITH_VECTOR:
            options["recurrent_init"] = constant(3.0)
        if factory in (cells.lstm, cells.mgu, cells.slstm):
            options["forget_bias"] = 0.0
        params = factory(**options).init_params(KEY, 3, H, jnp.float32)
        wanted = dict.fromkeys(("w_x", "w_highway"), 2.0)
        wanted |= dict.fromkeys(("r", "v", "u"), 3.0) | dict.fromkeys(("b", "b_hn"), 5.0)
        for name, value in params.items():
            assert np.all(np.asarray(value) == wanted[name]), name


def test_other_options_are_refused():
    for match, make in {
        '"tanh" or "relu", got \'gelu\'': lambda: cells.elman(activation="gelu"),
        '"relu" or "tanh", got \'gelu\'': lambda: cells.indrnn(activation="gelu"),
        '"sigmoid" or "exp", got \'tanh\'': lambda: cells.slstm(forget_gate="tanh"),
        "window should be 1 or 2, got 3": lambda: cells.qrnn(window=3),
        "reset_after": lambda: cells.gru(layer_norm=True, reset_after=False),
        "max_steps should be 2 at least, got 1": lambda: initializers.chrono(1),
    }.items():
        with pytest.raises(ValueError, match=match):
            make()


def test_torchs_uniform_numbers_depend_on_the_hidden_size_alone():
    init = initializers.torch_uniform(25)
    assert init is initializers.torch_uniform(25)
    cell = cells.gru(kernel_init=init, recurrent_init=init, bias_init=init)
    for value in cell.init_params(KEY, 400, 25, jnp.float32).values():
        assert np.abs(value).max() <= 0.2
        assert np.abs(value).max() > 0.15
        assert np.min(value) < -0.15
    w_x = np.asarray(cell.init_params(KEY, 400, 25, jnp.float32)["w_x"])
    assert w_x.std() == pytest.approx(0.2 / math.sqrt(3), rel=0.03)


def test_chrono_biases_are_logarithms_of_uniform_times():
    """Tallec & Ollivier (2018), section 2."""
    hidden, steps = 2000, 50
    init = initializers.chrono(steps)
    assert init is initializers.chrono(steps)
    i, f, g, o = np.asarray(init(KEY, (4, hidden), jnp.float32))
    np.testing.assert_array_equal(i, -f)
    assert not np.any(g)
    assert not np.any(o)
    times = np.exp(f)
    assert 0.999 < times.min() < 1.5
    assert steps - 1.5 < times.max() < steps - 0.999
    assert times.mean() == pytest.approx(steps / 2, rel=0.05)

    params = cells.lstm(bias_init=init, forget_bias=0.0).init_params(KEY, 3, H, jnp.bfloat16)
    i, f, _, _ = np.asarray(params["b"], np.float32)
    np.testing.assert_array_equal(i, -f)
    gru = cells.gru(bias_init=initializers.chrono(steps, write=None))
    params = gru.init_params(KEY, 3, H, jnp.float32)
    r, z, n = np.asarray(params["b"])
    assert np.all(z > 0)
    assert not any(map(np.any, (r, n, params["b_hn"])))


def test_indrnns_recurrent_weights_start_in_the_unit_interval():
    u = np.asarray(cells.indrnn().init_params(KEY, 3, 2000, jnp.float32)["u"])
    assert 0 <= u.min() < 0.01
    assert 0.99 < u.max() < 1
    assert u.mean() == pytest.approx(0.5, rel=0.05)


def test_layer_norm_starts_as_normalization():
    params = cells.gru(layer_norm=True).init_params(KEY, 3, H, jnp.float32)
    assert params["gain_x"].shape == params["gain_h"].shape == (3, H)
    assert all(np.all(np.asarray(params[name]) == 1) for name in ("gain_x", "gain_h"))
    params = cells.sru(layer_norm=True).init_params(KEY, 3, H, jnp.float32)
    assert np.asarray(params["gain_x"]).tolist() == [1.0] * 3
    assert np.asarray(params["b_x"]).tolist() == [0.0] * 3


def test_a_factored_sru_has_the_variance_of_one_matrix():
    params = cells.sru(proj_size=40).init_params(KEY, 60, 80, jnp.float32)
    assert {name: params[name].shape for name in ("w_proj", "w_x", "w_highway")} == {
        "w_proj": (60, 40),
        "w_x": (40, 3, 80),
        "w_highway": (40, 80),
    }
    product = np.asarray(params["w_proj"]) @ np.asarray(params["w_highway"])
    assert product.var() == pytest.approx(1 / 60, rel=0.1)


@pytest.mark.parametrize("factory", [cells.qrnn, cells.min_gru, cells.min_lstm])
def test_linear_cells_are_a_parallel_scan(factory, x64):
    """What `Cell.linear` promises: states by composition, then all outputs by ``gates``."""
    cell, rng = factory(), np.random.default_rng(0)
    params = cell.init_params(KEY, 3, H, jnp.float64)
    x, first = rng.normal(size=(T, B, 3)), cell.state_type(rng.normal(size=(B, H)))
    pre = xla.split_gates(cell.x_gates, cell.project_inputs(params, x))
    pre = xla.activated(cell, pre)
    a, b = cell.linear(pre, {})
    a, b = jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b))
    states = a * first[0] + b
    starts = cell.state_type(jnp.concatenate([first[0][None], states[:-1]]))
    y, _ = cell.gates(pre, starts, {})
    want, (final,) = recurrence(cell, params, x, first)
    assert_close((y, states[-1]), (want, final), np.float64, size=T)


def test_a_window_of_two_is_a_convolution(x64):
    cell, rng = cells.qrnn(window=2), np.random.default_rng(0)
    params = cell.init_params(KEY, 3, H, jnp.float64)
    x = rng.normal(size=(T, B, 3))
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    both = params | {"w_x": np.concatenate([params["w_x"][:, :3], params["w_x"][:, 3:]])}
    want, _ = recurrence(cells.qrnn(), both, np.concatenate([x, before], axis=2))
    got, _ = recurrence(cell, params, x)
    assert_close(got, want, np.float64, size=T)


@pytest.mark.parametrize("forget_gate", ["sigmoid", "exp"])
def test_the_slstm_starts_from_nothing_exactly(forget_gate):
    """``c'/n'`` is ``z`` after one step, whatever ``i`` and ``f``, and has their gradient: none."""
    cell = cells.slstm(forget_gate=forget_gate)
    state = cell.init_state({"r": jnp.zeros((H, 4, H))}, 1, jnp.float32)
    z, o = jnp.full((1, H), 0.25), jnp.full((1, H), 0.5)

    for i in (-200.0, -3.0, 0.0, 200.0):
        pre = {"i": jnp.full((1, H), i), "f": jnp.linspace(-200, 200, H)[None], "z": z}
        y, after = cell.gates(pre | {"o": o}, state, {})
        assert np.all(np.asarray(y) == 0.125)
        assert np.all(np.asarray(after["m"]) == i)
        assert np.all(np.asarray(after["n"]) == 1)
        d = jax.grad(lambda pre: cell.gates(pre | {"o": o}, state, {})[0].sum())(pre)
        assert not np.any(d["i"])
        assert not np.any(d["f"])
        assert np.all(np.asarray(d["z"]) == 0.5)


def test_small_gates_of_the_min_lstm_have_a_ratio():
    params = cells.min_lstm().init_params(KEY, H, H, jnp.float32)
    params["b"] = jnp.array([[-200.0], [-201.0], [0.0]]) * jnp.ones((3, H))
    state = cells.MinRNNState(jnp.ones((1, H)))

    def output(params):
        return recurrence(cells.min_lstm(), params, jnp.zeros((1, 1, H)), state)[0]

    want = 1 / (1 + math.exp(-1))
    np.testing.assert_allclose(output(params), want, rtol=1e-6)
    d = jax.grad(lambda params: output(params).sum())(params)["b"]
    np.testing.assert_allclose(d[0], want * (1 - want), rtol=1e-5)


def test_the_mgu_is_that_of_flax():
    flax_cell = nn.MGUCell(H)
    x, h = jax.random.normal(KEY, (B, 3)), jax.random.normal(jax.random.key(1), (B, H))
    variables = flax_cell.init(KEY, h, x)["params"]
    dense = {name: jax.random.normal(KEY, leaf.shape) for name, leaf in variables["hn"].items()}
    w = variables | {"hn": dense}
    params = {
        "w_x": jnp.stack([w["if"]["kernel"], w["in"]["kernel"]], axis=1),
        "r": jnp.stack([w["hf"]["kernel"], w["hn"]["kernel"]], axis=1),
        "b": jnp.stack([w["if"]["bias"], w["in"]["bias"]]),
        "b_hn": w["hn"]["bias"],
    }
    want, _ = flax_cell.apply({"params": w}, h, x)
    got, _ = recurrence(cells.mgu(), params, x[None], cells.MGUState(h))
    assert_close(got[0], want, np.float32, size=H)


# The gate that makes what is added to the state.
UPDATES = {
    "lstm": "g",
    "gru": "n",
    "gru_reset_before": "n",
    "layer_norm_gru": "n",
    "layer_norm_lstm": "g",
    "lstm_coupled": "g",
    "mgu": "n",
    "mgu_reset_before": "n",
    "slstm": "z",
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_dropped_update_does_not_arrive(name):
    problem = table.problem(name, "plain", np.float32)
    cell = problem.row.cell
    assert cell.drops_updates

    def output(bias, keep):
        params = problem.params | {"b": problem.params["b"] + bias}
        noise = Noise(keep_update=jnp.full((T, B, H), keep), update_rate=0.5)
        return recurrence(cell, params, problem.x, noise=noise)[0].sum()

    update = cell.x_gates.index(UPDATES[name])
    with table.quick_compile():
        d = [jax.grad(output)(jnp.zeros_like(problem.params["b"]), keep) for keep in (False, True)]
    assert not np.any(d[0][update])
    assert np.all(d[1][update])


def test_layers_and_directions_start_differently():
    params = Stack(cells.gru(), num_layers=2, bidirectional=True).init_params(
        KEY, H, H, jnp.float32
    )
    matrices = [np.asarray(d["r"]).tobytes() for layer in params.values() for d in layer.values()]
    assert len(set(matrices)) == 4
    assert params["layer_1"]["backward"]["w_x"].shape == (2 * H, 3, H)


def test_options_of_cells_that_cannot_be():
    for factory in (cells.lstm, cells.sru):
        with pytest.raises(ValueError, match="proj_size should be at least 1"):
            factory(proj_size=0)
    with pytest.raises(ValueError, match="cell_clip should be above 0"):
        cells.lstm(cell_clip=-1.0)
    coupled = cells.lstm(coupled=True, bias_init=initializers.chrono(100), forget_bias=0.0)
    with pytest.raises(ValueError, match="write=None"):
        coupled.init_params(KEY, 3, H, jnp.float32)
    right = initializers.chrono(100, forget=0, write=None)
    b = cells.lstm(coupled=True, bias_init=right, forget_bias=0.0).init_params(
        KEY, 3, H, jnp.float32
    )
    assert np.all(b["b"][0] > 0)
