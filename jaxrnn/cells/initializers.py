"""Initializers of the cells' parameters.

One object for equal arguments, so that equal cells are one object too.
"""

from functools import lru_cache
from math import sqrt

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key

glorot = jax.nn.initializers.glorot_uniform()
zeros = jax.nn.initializers.zeros


def orthogonal(key: Key, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """A random matrix with orthonormal rows or columns; made in float32 at least, as QR needs."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return jax.nn.initializers.orthogonal()(key, shape, wide).astype(dtype)


@lru_cache
def uniform(low: float, high: float) -> Initializer:
    """Uniform numbers in ``[low, high)``."""

    def init(key: Key, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return jax.random.uniform(key, shape, dtype, low, high)

    return init


def torch_uniform(hidden_features: int) -> Initializer:
    """What ``torch.nn.LSTM``, ``GRU`` and ``RNN`` start all their parameters with.

    Uniform in ``[-1/sqrt(H), 1/sqrt(H))``, for kernels, recurrent matrices and biases alike: the
    bound depends on H, not on the size of the array.

    Args:
        hidden_features: H.
    """
    bound = 1 / sqrt(hidden_features)
    return uniform(-bound, bound)


@lru_cache
def chrono(max_steps: float, *, forget: int = 1, write: int | None = 0) -> Initializer:
    r"""Biases for memories of up to ``max_steps`` steps (Tallec & Ollivier 2018, arXiv:1804.11188).

    The bias of the gate that keeps the state is :math:`\log u`, u uniform in [1, max_steps - 1],
    that of the gate that writes it :math:`-\log u`, all others 0. The rows are those of the LSTM,
    whose ``forget_bias`` should then be 0; ``chrono(max_steps, write=None)`` is for the GRU, whose
    ``z`` keeps and writes, and ``chrono(max_steps, forget=0, write=None)`` for a coupled LSTM.

    Args:
        max_steps: how far back to remember, 2 at least.
        forget: row of ``b [G, H]`` of the gate that keeps the state.
        write: row of the gate that writes it; None has none of its own.

    Returns:
        an initializer of ``[G, H]``; a bias ``[H]`` that stands alone starts at 0.

    Raises:
        ValueError: for less than 2 steps, and for rows that the bias does not have.
    """
    if max_steps < 2:
        raise ValueError(f"max_steps should be 2 at least, got {max_steps}")

    def init(key: Key, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        bias = jnp.zeros(shape, dtype)
        if len(shape) == 1:
            return bias
        if shape[0] <= max(forget, write or 0) or (shape[0] == 3 and write is not None):
            raise ValueError(
                f"rows {forget} and {write} should be gates of the bias [G, H] = {list(shape)}; a "
                "cell of three gates has none that writes alone: write=None"
            )
        keep = jnp.log(jax.random.uniform(key, shape[-1:], minval=1.0, maxval=max_steps - 1.0))
        bias = bias.at[forget].set(keep.astype(dtype))
        return bias if write is None else bias.at[write].set(-keep.astype(dtype))

    return init
