"""What a cell promises besides its equations: names, shapes and initial values."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from table import B, H, T

from jaxrnn import cells
from jaxrnn.recurrence.stack import Stack

KEY = jax.random.key(0)
FACTORIES = (cells.elman, cells.lstm, cells.gru, cells.sru)


@pytest.mark.parametrize("row", table.CELLS.values(), ids=table.CELLS)
def test_a_cell_is_what_it_says(row):
    cell = row.cell
    params = jax.eval_shape(lambda: cell.init_params(KEY, row.in_features, H, jnp.bfloat16))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    state = jax.eval_shape(functools.partial(cell.init_state, batch=B, dtype=jnp.float32), params)
    assert isinstance(state, cell.state_type)
    assert all((leaf.shape, leaf.dtype) == ((B, H), jnp.float32) for leaf in state)
    x = jax.ShapeDtypeStruct((T, B, row.in_features), jnp.bfloat16)
    x_pre = jax.eval_shape(cell.project_inputs, params, x)
    assert (x_pre.shape, x_pre.dtype) == ((T, B, len(cell.x_gates), H), jnp.bfloat16)
    weights = jax.eval_shape(cell.loop_weights, params)
    if cell.h_gates:
        assert weights.r.shape == (H, len(cell.h_gates), H)
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


@pytest.mark.parametrize("factory", [cells.elman, cells.lstm, cells.gru])
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
    for factory in (cells.elman, cells.gru):
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
        params = factory(
            kernel_init=constant(2.0), recurrent_init=constant(3.0), bias_init=constant(5.0)
        ).init_params(KEY, 3, H, jnp.float32)
        wanted = {"w_x": 2.0, "w_highway": 2.0, "r": 3.0, "v": 3.0, "b": 5.0, "b_hn": 5.0}
        for name, value in params.items():
            given = np.asarray(value)
            if factory is cells.lstm and name == "b":
                given = given - np.array([[0], [1], [0], [0]])
            assert np.all(given == wanted[name]), name


def test_another_activation_is_refused():
    with pytest.raises(ValueError, match='"tanh" or "relu", got \'gelu\''):
        cells.elman(activation="gelu")


def test_layers_and_directions_start_differently():
    params = Stack(cells.gru(), num_layers=2, bidirectional=True).init_params(
        KEY, H, H, jnp.float32
    )
    matrices = [np.asarray(d["r"]).tobytes() for layer in params.values() for d in layer.values()]
    assert len(set(matrices)) == 4
    assert params["layer_1"]["backward"]["w_x"].shape == (2 * H, 3, H)
