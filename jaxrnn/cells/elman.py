"""The simple recurrent network."""

from functools import lru_cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, per_gate


class ElmanState(NamedTuple):
    """Hidden state, ``[B, H]``."""

    h: Array


def tanh_gates(pre, state, vectors):
    """``h' = a``; ``a`` arrives activated."""
    return pre["a"], {}


def relu_gates(pre, state, vectors):
    """``h' = relu(a)``."""
    return jax.nn.relu(pre["a"]), {}


@lru_cache
def elman(
    *,
    activation: Literal["tanh", "relu"] = "tanh",
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    recurrent_init: Initializer = initializers.orthogonal,
    bias_init: Initializer = initializers.zeros,
) -> Cell:
    r"""The simple recurrent network of Elman (1990).

    .. math::
        h' = \tanh(W x + R h + b)

    or with relu (Le et al. 2015, arXiv:1504.00941) in the place of tanh.

    Parameters: ``w_x [I, 1, H]``, ``r [H, 1, H]``, ``b [1, H]``.

    Args:
        activation: "tanh" or "relu".
        use_bias: whether there is a ``b``.
        kernel_init: initializer of ``w_x``.
        recurrent_init: initializer of ``r``.
        bias_init: initializer of ``b``.

    Returns:
        The cell; the same object for the same arguments.

    Raises:
        ValueError: for another activation.
    """
    if activation not in ("tanh", "relu"):
        raise ValueError(f'activation should be "tanh" or "relu", got {activation!r}')

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_r, k_b = jax.random.split(key, 3)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, 1, hidden_features, dtype),
            "r": per_gate(recurrent_init, k_r, hidden_features, 1, hidden_features, dtype),
        }
        if use_bias:
            params["b"] = bias_init(k_b, (1, hidden_features), dtype)
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> ElmanState:
        return ElmanState(h=jnp.zeros((batch, params["r"].shape[0]), dtype))

    return Cell(
        name=f"elman ({activation})",
        x_gates=("a",),
        h_gates=("a",),
        state_type=ElmanState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=affine_inputs,
        loop_weights=lambda params: LoopWeights(r=params["r"]),
        gates=tanh_gates if activation == "tanh" else relu_gates,
        tanh_gates=("a",) if activation == "tanh" else (),
    )
