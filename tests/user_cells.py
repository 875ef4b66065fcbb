"""Cells as a user would write them: a few lines each, and the library does the rest."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn import Cell, LoopWeights
from jaxrnn.cells import LSTMState, affine_inputs

GATES = ("i", "f", "g", "o")


class Content(NamedTuple):
    """A state without an output."""

    c: jax.Array


def random_params(shapes):
    """An initializer of normal numbers; I and H in a shape stand for the sizes."""

    def init(key, in_features, hidden_features, dtype):
        sizes = {"I": in_features, "H": hidden_features, "S": hidden_features - 1}
        return {
            name: 0.5 * jax.random.normal(k, [sizes.get(n, n) for n in shape], dtype)
            for k, (name, shape) in zip(
                jax.random.split(key, len(shapes)), shapes.items(), strict=True
            )
        }

    return init


def peephole_gates(pre, state, vectors):
    """Gers and Schmidhuber (2000): gates that see the cell state."""
    i = jax.nn.sigmoid(pre["i"] + vectors["p_i"] * state.c)
    f = jax.nn.sigmoid(pre["f"] + vectors["p_f"] * state.c)
    c = f * state.c + i * pre["g"]
    return jax.nn.sigmoid(pre["o"] + vectors["p_o"] * c) * jnp.tanh(c), {"c": c}


# Its initial state is learned, so that a reset has a gradient.
peephole_lstm = Cell(
    name="peephole lstm",
    x_gates=GATES,
    h_gates=GATES,
    state_type=LSTMState,
    init_params=random_params(
        {
            "w_x": ("I", 4, "H"),
            "r": ("H", 4, "H"),
            "b": (4, "H"),
            "peepholes": (3, "H"),
            "start": (2, "H"),
        }
    ),
    init_state=lambda params, batch, dtype: LSTMState(
        *(jnp.tile(row, (batch, 1)).astype(dtype) for row in params["start"])
    ),
    project_inputs=affine_inputs,
    loop_weights=lambda params: LoopWeights(
        r=params["r"],
        vectors=dict(zip(("p_i", "p_f", "p_o"), params["peepholes"], strict=True)),
    ),
    gates=peephole_gates,
    tanh_gates=("g",),
)


def lstm_gates(pre, state, vectors):
    """The usual equations."""
    c = pre["f"] * state.c + pre["i"] * pre["g"]
    return pre["o"] * jnp.tanh(c), {"c": c}


# Sak et al. (2014): the output is projected to S = H - 1 features.
projected_lstm = Cell(
    name="projected lstm",
    x_gates=GATES,
    h_gates=GATES,
    state_type=LSTMState,
    init_params=random_params({"w_x": ("I", 4, "H"), "r": ("S", 4, "H"), "p": ("H", "S")}),
    init_state=lambda params, batch, dtype: LSTMState(
        *(jnp.zeros((batch, size), dtype) for size in params["p"].shape[::-1])
    ),
    project_inputs=affine_inputs,
    loop_weights=lambda params: LoopWeights(r=params["r"], p=params["p"]),
    gates=lstm_gates,
    sigmoid_gates=("i", "f", "o"),
    tanh_gates=("g",),
)


class Hidden(NamedTuple):
    """A state that is the output."""

    h: jax.Array


def minimal_gates(pre, state, vectors):
    """Zhou et al. (2016) as Flax has it: ``n = tanh(W x + f * (U h))``."""
    n = jnp.tanh(pre["n"] + pre["f"] * (pre["hn"] + vectors["b_hn"]))
    return (1 - pre["f"]) * n + pre["f"] * state.h, {}


minimal_gated = Cell(
    name="minimal gated unit",
    x_gates=("f", "n"),
    h_gates=("f", "hn"),
    state_type=Hidden,
    init_params=random_params(
        {"w_x": ("I", 2, "H"), "r": ("H", 2, "H"), "b": (2, "H"), "b_hn": ("H",)}
    ),
    init_state=lambda params, batch, dtype: Hidden(
        jnp.zeros((batch, params["b_hn"].shape[0]), dtype)
    ),
    project_inputs=affine_inputs,
    loop_weights=lambda params: LoopWeights(r=params["r"], vectors={"b_hn": params["b_hn"]}),
    gates=minimal_gates,
    sigmoid_gates=("f",),
)


def pass_gates(pre, state, vectors):
    """The output is the input, the state counts nothing."""
    return pre["x"], {"c": state.c}


# Shows what goes in: a stack of these is its dropout.
pass_through = Cell(
    name="pass through",
    x_gates=("x",),
    h_gates=(),
    state_type=Content,
    init_params=random_params({"unused": ("H",)}),
    init_state=lambda params, batch, dtype: Content(
        jnp.zeros((batch, params["unused"].shape[0]), dtype)
    ),
    project_inputs=lambda params, x: x[:, :, None],
    loop_weights=lambda params: LoopWeights(),
    gates=pass_gates,
)

ALL = {"peephole": peephole_lstm, "minimal": minimal_gated, "projected": projected_lstm}
