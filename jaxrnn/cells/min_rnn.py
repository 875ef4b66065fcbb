"""Minimal GRU and LSTM, whose gates do not look at the state."""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, per_gate


class MinRNNState(NamedTuple):
    """Hidden state, ``[B, H]``."""

    h: Array


def min_gru_linear(pre, vectors):
    """``h' = (1 - z) h + z n``; ``z`` arrives activated."""
    return 1 - pre["z"], pre["z"] * pre["n"]


def min_lstm_linear(pre, vectors):
    """``h' = f / (f + i) h + i / (f + i) n``, of the logarithms of ``f`` and ``i``.

    ``f / (f + i)`` itself is 0/0 where both are so small that they are rounded to 0.
    """
    f = jax.nn.sigmoid(jax.nn.log_sigmoid(pre["f"]) - jax.nn.log_sigmoid(pre["i"]))
    return f, (1 - f) * pre["n"]


def linear_gates(pre, state, vectors, *, linear):
    """``h' = a h + b``."""
    a, b = linear(pre, vectors)
    return a * state.h + b, {}


def linear_cell(
    gates: tuple[str, ...],
    use_bias: bool,
    kernel_init: Initializer,
    bias_init: Initializer,
    **options: Any,
) -> Cell:
    """A cell of these input gates whose ``h`` is linear in ``h``.

    Args:
        gates: names of the columns of the input matmul.
        use_bias: whether there is a ``b``.
        kernel_init: initializer of each gate's ``[I, H]``.
        bias_init: initializer of ``b``.
        **options: the other fields of `Cell`: ``name``, ``linear``, activations.
    """

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_b = jax.random.split(key)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, len(gates), hidden_features, dtype)
        }
        if use_bias:
            params["b"] = bias_init(k_b, (len(gates), hidden_features), dtype)
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> MinRNNState:
        return MinRNNState(h=jnp.zeros((batch, params["w_x"].shape[-1]), dtype))

    return Cell(
        x_gates=gates,
        h_gates=(),
        state_type=MinRNNState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=affine_inputs,
        loop_weights=lambda params: LoopWeights(),
        gates=partial(linear_gates, linear=options["linear"]),
        **options,
    )


@lru_cache
def min_gru(
    *,
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    bias_init: Initializer = initializers.zeros,
) -> Cell:
    r"""The minGRU of Feng et al. (2024), arXiv:2410.01201: linear in its state.

    .. math::
        z &= \sigma(W_z\, x + b_z) \\
        n &= W_n\, x + b_n \\
        h' &= (1 - z) \odot h + z \odot n

    as in the paper's section 3.1, without the variant that keeps the logarithm of a positive state.

    Parameters: ``w_x [I, 2, H]``, ``b [2, H]``; gates in the order z, n.

    Args:
        use_bias: whether there is a ``b``.
        kernel_init: initializer of each gate's ``[I, H]``.
        bias_init: initializer of ``b``.

    Returns:
        The cell; the same object for the same arguments.
    """
    return linear_cell(
        ("z", "n"),
        use_bias,
        kernel_init,
        bias_init,
        name="min gru",
        sigmoid_gates=("z",),
        linear=min_gru_linear,
    )


@lru_cache
def min_lstm(
    *,
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    bias_init: Initializer = initializers.zeros,
) -> Cell:
    r"""The minLSTM of Feng et al. (2024), arXiv:2410.01201: linear in its state.

    .. math::
        f, i &= \sigma(W_{f,i}\, x + b_{f,i}) \\
        n &= W_n\, x + b_n \\
        h' &= \frac{f}{f + i} \odot h + \frac{i}{f + i} \odot n

    as in the paper's section 3.2, without the variant that keeps the logarithm of a positive state.

    Parameters: ``w_x [I, 3, H]``, ``b [3, H]``; gates in the order f, i, n.

    Args:
        use_bias: whether there is a ``b``.
        kernel_init: initializer of each gate's ``[I, H]``.
        bias_init: initializer of ``b``.

    Returns:
        The cell; the same object for the same arguments.
    """
    return linear_cell(
        ("f", "i", "n"), use_bias, kernel_init, bias_init, name="min lstm", linear=min_lstm_linear
    )
