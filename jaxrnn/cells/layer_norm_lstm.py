"""LSTM with layer normalization."""

from functools import lru_cache

import jax
import jax.numpy as jnp

from jaxrnn._typing import DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights
from jaxrnn.cells.lstm import GATES, lstm
from jaxrnn.cells.normalization import layer_norm, normalized_inputs, shares


def layer_norm_lstm_gates(pre, state, vectors):
    """The LSTM's, of ``x_pre + LN(R h)``, with ``tanh(LN(c'))``."""
    share = jax.lax.stop_gradient(vectors["share"])
    i, f, g, o = (pre[k] + layer_norm(pre["h" + k], vectors[k], share) for k in GATES)
    c = jax.nn.sigmoid(f) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    content = layer_norm(c, vectors["c"], share) + vectors["b_c"]
    return jax.nn.sigmoid(o) * jnp.tanh(content), {"c": c}


@lru_cache
def layer_norm_lstm(
    *,
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    recurrent_init: Initializer = initializers.orthogonal,
    bias_init: Initializer = initializers.zeros,
    forget_bias: float = 1.0,
) -> Cell:
    r"""The layer-normalized LSTM of Ba et al. (2016), arXiv:1607.06450, each gate on its own.

    .. math::
        i, f, o &= \sigma(LN(W_{i,f,o}\, x) + LN(R_{i,f,o}\, h) + b_{i,f,o}) \\
        g &= \tanh(LN(W_g\, x) + LN(R_g\, h) + b_g) \\
        c' &= f \odot c + i \odot g \\
        h' &= o \odot \tanh(LN(c') + b_c)

    with a gain in each LN.

    Parameters: those of `lstm`, ``gain_x [4, H]``, ``gain_h [4, H]``, ``gain_c [H]``, ``b_c [H]``.

    Args:
        use_bias: whether there is a ``b``; ``b_c`` stays.
        kernel_init: initializer of each gate's ``[I, H]``.
        recurrent_init: initializer of each gate's ``[H, H]``.
        bias_init: initializer of ``b``.
        forget_bias: added to the initial bias of the forget gate.

    Returns:
        The cell; the same object for the same arguments.
    """
    base = lstm(
        use_bias=use_bias,
        kernel_init=kernel_init,
        recurrent_init=recurrent_init,
        bias_init=bias_init,
        forget_bias=forget_bias,
    )

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        gains = {name: jnp.ones((4, hidden_features), dtype) for name in ("gain_x", "gain_h")}
        return {
            **base.init_params(key, in_features, hidden_features, dtype),
            **gains,
            "gain_c": jnp.ones((hidden_features,), dtype),
            "b_c": jnp.zeros((hidden_features,), dtype),
        }

    def loop_weights(params: Params) -> LoopWeights:
        vectors = dict(zip(GATES, params["gain_h"], strict=True))
        vectors |= {"c": params["gain_c"], "b_c": params["b_c"]}
        vectors["share"] = shares(params["b_c"])
        return LoopWeights(r=params["r"], vectors=vectors)

    return base._replace(
        name="layer norm lstm",
        h_gates=tuple("h" + gate for gate in GATES),
        init_params=init_params,
        project_inputs=normalized_inputs,
        loop_weights=loop_weights,
        gates=layer_norm_lstm_gates,
        sigmoid_gates=(),
        tanh_gates=(),
        whole_rows=True,
    )
