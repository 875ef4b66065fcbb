"""sLSTM, the scalar cell of xLSTM."""

from functools import lru_cache, partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, kept_update, per_gate

GATES = ("i", "f", "z", "o")

# Of m before the first step, where minus infinity is meant: f' is exactly 0 there, and finite, so
# that no difference of two of them is NaN.
NEVER = -1e30


class SLSTMState(NamedTuple):
    """Hidden, cell, normalizer and stabilizer state, ``[B, H]`` each.

    ``c`` and ``n`` are those of the unstabilized equations times ``exp(-m)``.
    """

    h: Array
    c: Array
    n: Array
    m: Array


def slstm_gates(pre, state, vectors, *, forget_gate):
    """``c' = f c + i z``, ``n' = f n + i``, ``h' = o c' / n'``; ``z, o`` arrive activated.

    ``i`` and ``f`` are divided by ``exp(m')``, so that the larger of them is 1 at most.
    """
    f = pre["f"] if forget_gate == "exp" else jax.nn.log_sigmoid(pre["f"])
    m = jnp.maximum(f + state.m, pre["i"])
    i, f = jnp.exp(pre["i"] - m), jnp.exp(f + state.m - m)
    c = f * state.c + i * kept_update(pre, pre["z"])
    n = f * state.n + i
    return pre["o"] * c / n, {"c": c, "n": n, "m": m}


@lru_cache
def slstm(
    *,
    forget_gate: Literal["sigmoid", "exp"] = "sigmoid",
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    recurrent_init: Initializer = initializers.orthogonal,
    bias_init: Initializer = initializers.zeros,
    forget_bias: float = 1.0,
) -> Cell:
    r"""The sLSTM of Beck et al. (2024), arXiv:2405.04517, with one head.

    .. math::
        i &= \exp(W_i\, x + R_i\, h + b_i) \\
        f, o &= \sigma(W_{f,o}\, x + R_{f,o}\, h + b_{f,o}) \\
        z &= \tanh(W_z\, x + R_z\, h + b_z) \\
        c' &= f \odot c + i \odot z \\
        n' &= f \odot n + i \\
        h' &= o \odot c' / n'

    or with exp in the place of sigmoid for f. A state :math:`m' = \max(\log f + m, \log i)` keeps
    the numbers in range: c and n are kept divided by :math:`e^m`, which cancels in h.

    Parameters: ``w_x [I, 4, H]``, ``r [H, 4, H]``, ``b [4, H]``; gates in the order i, f, z, o.

    Args:
        forget_gate: "sigmoid" or "exp".
        use_bias: whether there is a ``b``.
        kernel_init: initializer of each gate's ``[I, H]``.
        recurrent_init: initializer of each gate's ``[H, H]``.
        bias_init: initializer of ``b``.
        forget_bias: added to the initial bias of the forget gate.

    Returns:
        The cell; the same object for the same arguments.

    Raises:
        ValueError: for another forget gate.
    """
    if forget_gate not in ("sigmoid", "exp"):
        raise ValueError(f'forget_gate should be "sigmoid" or "exp", got {forget_gate!r}')

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_r, k_b = jax.random.split(key, 3)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, 4, hidden_features, dtype),
            "r": per_gate(recurrent_init, k_r, hidden_features, 4, hidden_features, dtype),
        }
        if use_bias:
            bias = bias_init(k_b, (4, hidden_features), dtype)
            params["b"] = bias.at[GATES.index("f")].add(forget_bias)
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> SLSTMState:
        shape = (batch, params["r"].shape[0])
        h, c, n = (jnp.zeros(shape, dtype) for _ in range(3))
        return SLSTMState(h, c, n, m=jnp.full(shape, NEVER, dtype))

    return Cell(
        name=f"slstm ({forget_gate})",
        x_gates=GATES,
        h_gates=GATES,
        state_type=SLSTMState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=affine_inputs,
        loop_weights=lambda params: LoopWeights(r=params["r"]),
        gates=partial(slstm_gates, forget_gate=forget_gate),
        sigmoid_gates=("o",),
        tanh_gates=("z",),
        # c and n are in units of exp(m): held apart they would not fit together.
        zoneout_fields=("h",),
        drops_updates=True,
    )
