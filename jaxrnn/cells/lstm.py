"""Long short-term memory."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, per_gate

GATES = ("i", "f", "g", "o")


class LSTMState(NamedTuple):
    """Hidden and cell state, ``[B, H]`` each."""

    h: Array
    c: Array


def lstm_gates(pre, state, vectors):
    """``c' = f c + i g``, ``h' = o tanh(c')``; ``i, f, g, o`` arrive activated."""
    c = pre["f"] * state.c + pre["i"] * pre["g"]
    return pre["o"] * jnp.tanh(c), {"c": c}


@lru_cache
def lstm(
    *,
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    recurrent_init: Initializer = initializers.orthogonal,
    bias_init: Initializer = initializers.zeros,
    forget_bias: float = 1.0,
) -> Cell:
    r"""The LSTM of Hochreiter & Schmidhuber (1997) with the forget gate of Gers et al. (2000).

    .. math::
        i, f, o &= \sigma(W_{i,f,o}\, x + R_{i,f,o}\, h + b_{i,f,o}) \\
        g &= \tanh(W_g\, x + R_g\, h + b_g) \\
        c' &= f \odot c + i \odot g \\
        h' &= o \odot \tanh(c')

    Parameters: ``w_x [I, 4, H]``, ``r [H, 4, H]``, ``b [4, H]``; gates in the order i, f, g, o,
    that of ``torch.nn.LSTM`` (whose two biases are summed here).

    Args:
        use_bias: whether there is a ``b``.
        kernel_init: initializer of each gate's ``[I, H]``.
        recurrent_init: initializer of each gate's ``[H, H]``.
        bias_init: initializer of ``b``.
        forget_bias: added to the initial bias of the forget gate (Jozefowicz et al. 2015).

    Returns:
        The cell; the same object for the same arguments.
    """

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

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> LSTMState:
        # Two arrays, not one twice: a state can be donated.
        shape = (batch, params["r"].shape[0])
        return LSTMState(h=jnp.zeros(shape, dtype), c=jnp.zeros(shape, dtype))

    return Cell(
        name="lstm",
        x_gates=GATES,
        h_gates=GATES,
        state_type=LSTMState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=affine_inputs,
        loop_weights=lambda params: LoopWeights(r=params["r"]),
        gates=lstm_gates,
        sigmoid_gates=("i", "f", "o"),
        tanh_gates=("g",),
    )
