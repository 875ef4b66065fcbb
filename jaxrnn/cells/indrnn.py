"""Independently recurrent neural network."""

from functools import lru_cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, per_gate

zero_to_one = initializers.uniform(0.0, 1.0)


class IndRNNState(NamedTuple):
    """Hidden state, ``[B, H]``."""

    h: Array


def tanh_gates(pre, state, vectors):
    """``h' = tanh(a + u h)``."""
    return jnp.tanh(pre["a"] + vectors["u"] * state.h), {}


def relu_gates(pre, state, vectors):
    """``h' = relu(a + u h)``."""
    return jax.nn.relu(pre["a"] + vectors["u"] * state.h), {}


@lru_cache
def indrnn(
    *,
    activation: Literal["relu", "tanh"] = "relu",
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    recurrent_init: Initializer = zero_to_one,
    bias_init: Initializer = initializers.zeros,
) -> Cell:
    r"""The IndRNN of Li et al. (2018), arXiv:1803.04831: each feature sees only its own past.

    .. math::
        h' = \mathrm{relu}(W x + u \odot h + b)

    No matmul inside the time loop; features are mixed by the next layer.

    Parameters: ``w_x [I, 1, H]``, ``u [H]``, ``b [1, H]``.

    Args:
        activation: "relu" or "tanh".
        use_bias: whether there is a ``b``.
        kernel_init: initializer of ``w_x``.
        recurrent_init: initializer of ``u``. The paper's is uniform in :math:`[0, 2^{1/T}]` for
            relu and sequences of T steps, ``initializers.uniform(0, 2 ** (1 / T))``; the default
            is what it comes to for long ones.
        bias_init: initializer of ``b``.

    Returns:
        The cell; the same object for the same arguments.

    Raises:
        ValueError: for another activation.
    """
    if activation not in ("relu", "tanh"):
        raise ValueError(f'activation should be "relu" or "tanh", got {activation!r}')

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_u, k_b = jax.random.split(key, 3)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, 1, hidden_features, dtype),
            "u": recurrent_init(k_u, (hidden_features,), dtype),
        }
        if use_bias:
            params["b"] = bias_init(k_b, (1, hidden_features), dtype)
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> IndRNNState:
        return IndRNNState(h=jnp.zeros((batch, params["u"].shape[0]), dtype))

    return Cell(
        name=f"indrnn ({activation})",
        x_gates=("a",),
        h_gates=(),
        state_type=IndRNNState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=affine_inputs,
        loop_weights=lambda params: LoopWeights(vectors={"u": params["u"]}),
        gates=relu_gates if activation == "relu" else tanh_gates,
    )
