"""Layer normalization, inside the time loop and before it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, Params
from jaxrnn.cells.base import project

EPSILON = 1e-5


def layer_norm(a, gain, share):
    """Normalizes the last axis; ``share`` is 1/H at real features, 0 where a kernel pads them."""
    deviation = (a - (a * share).sum(-1, keepdims=True)) * (share > 0)
    variance = (deviation**2 * share).sum(-1, keepdims=True)
    return deviation * jax.lax.rsqrt(variance + EPSILON) * gain


def shares(like: Array) -> Array:
    """``1/H`` for each of the H features on the last axis, in float32 at least."""
    size = like.shape[-1]
    return jnp.full((size,), 1 / size, jnp.promote_types(like.dtype, jnp.float32))


def share_of(vectors: Mapping[str, Array]) -> Array:
    """The vector that `shares` made, which is no parameter."""
    return jax.lax.stop_gradient(vectors["share"])


def normalized_inputs(params: Params, x: Array) -> Array:
    """``LN(x @ w_x) + b`` with ``gain_x``, gate by gate: ``[T, B, I] -> [T, B, Gx, H]``."""
    x_pre = project(x, params["w_x"])
    normed = layer_norm(x_pre, params["gain_x"], shares(x_pre)).astype(x_pre.dtype)
    return normed + params["b"] if "b" in params else normed
