"""Quasi-recurrent neural network."""

from functools import lru_cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, per_gate, project


class QRNNState(NamedTuple):
    """Cell state, ``[B, H]``."""

    c: Array


class QRNNWindowState(NamedTuple):
    """Cell state, and what the step before adds to this one's gates; ``[B, H]`` each."""

    c: Array
    z1: Array
    f1: Array
    o1: Array


def qrnn_linear(pre, vectors):
    """``c' = f c + (1 - f) z``; ``z, f`` arrive activated."""
    return pre["f"], (1 - pre["f"]) * pre["z"]


def qrnn_gates(pre, state, vectors):
    """``c'``, and ``h = o c'``; ``z, f, o`` arrive activated."""
    a, b = qrnn_linear(pre, vectors)
    c = a * state.c + b
    return pre["o"] * c, {"c": c}


def qrnn_window_gates(pre, state, vectors):
    """The same of gates that are this step's column and the one carried from the step before."""
    activated = {
        "z": jnp.tanh(pre["z"] + state.z1),
        "f": jax.nn.sigmoid(pre["f"] + state.f1),
        "o": jax.nn.sigmoid(pre["o"] + state.o1),
    }
    output, after = qrnn_gates(activated, state, vectors)
    return output, after | {name: pre[name] for name in ("z1", "f1", "o1")}


@lru_cache
def qrnn(
    *,
    window: Literal[1, 2] = 1,
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    bias_init: Initializer = initializers.zeros,
) -> Cell:
    r"""The QRNN of Bradbury et al. (2016), arXiv:1611.01576, with fo-pooling.

    .. math::
        z_t &= \tanh(W_z\, x_t + V_z\, x_{t-1} + b_z) \\
        f_t, o_t &= \sigma(W_{f,o}\, x_t + V_{f,o}\, x_{t-1} + b_{f,o}) \\
        c_t &= f_t \odot c_{t-1} + (1 - f_t) \odot z_t \\
        h_t &= o_t \odot c_t

    A convolution over the last ``window`` steps, without :math:`V` for a window of 1. The products
    :math:`V x_{t-1}` are part of the state, so sequences may come in pieces; at the first step and
    after a reset they are 0, and after padding they are those of the last real step.

    Parameters: ``w_x [I, 3, H]``, gates in the order z, f, o, or ``[I, 6, H]`` with those of
    :math:`V` behind; ``b [3, H]``.

    Args:
        window: 1 or 2 steps.
        use_bias: whether there is a ``b``.
        kernel_init: initializer of each gate's ``[I, H]``.
        bias_init: initializer of ``b``.

    Returns:
        The cell; the same object for the same arguments.

    Raises:
        ValueError: for another window.
    """
    if window not in (1, 2):
        raise ValueError(f"window should be 1 or 2, got {window!r}")

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_b = jax.random.split(key)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, 3 * window, hidden_features, dtype)
        }
        if use_bias:
            params["b"] = bias_init(k_b, (3, hidden_features), dtype)
        return params

    state_type = QRNNState if window == 1 else QRNNWindowState

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> QRNNState | QRNNWindowState:
        shape = (batch, params["w_x"].shape[-1])
        return state_type(*[jnp.zeros(shape, dtype) for _ in state_type._fields])

    def project_inputs(params: Params, x: Array) -> Array:
        x_pre = project(x, params["w_x"])
        if "b" not in params:
            return x_pre
        # The carried columns have no bias of their own.
        return x_pre + jnp.pad(params["b"], ((0, x_pre.shape[2] - 3), (0, 0)))

    cell = Cell(
        name="qrnn",
        x_gates=("z", "f", "o"),
        h_gates=(),
        state_type=state_type,
        init_params=init_params,
        init_state=init_state,
        project_inputs=project_inputs,
        loop_weights=lambda params: LoopWeights(),
        gates=qrnn_gates,
        sigmoid_gates=("f", "o"),
        tanh_gates=("z",),
        zoneout_fields=("c",),
        linear=qrnn_linear,
    )
    if window == 1:
        return cell
    return cell._replace(
        name="qrnn (window 2)",
        x_gates=("z", "f", "o", "z1", "f1", "o1"),
        gates=qrnn_window_gates,
        sigmoid_gates=(),
        tanh_gates=(),
        linear=None,
    )
