"""Initializers of the cells' matrices, as module constants so that equal cells are one object."""

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Key

glorot = jax.nn.initializers.glorot_uniform()
zeros = jax.nn.initializers.zeros


def orthogonal(key: Key, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """A random matrix with orthonormal rows or columns; made in float32 at least, as QR needs."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return jax.nn.initializers.orthogonal()(key, shape, wide).astype(dtype)
