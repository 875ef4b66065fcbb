"""Lengths, masks and resets: which steps of a row are real, and where a row starts anew."""

import jax.numpy as jnp
from jax import lax

from jaxrnn._typing import Array, ArrayLike


def step_mask(steps: int, lengths: ArrayLike | None, mask: ArrayLike | None) -> Array | None:
    """Joins lengths and mask.

    Args:
        steps: T.
        lengths: integers ``[B]``, the number of real steps at the front of each row; or None.
        mask: bool ``[T, B]``, True at real steps; or None.

    Returns:
        bool ``[T, B]``, or None where all steps are real by construction.
    """
    if lengths is not None:
        real = jnp.arange(steps)[:, None] < jnp.asarray(lengths)
        return real if mask is None else real & mask
    return None if mask is None else jnp.asarray(mask)


def resets_in_reverse(resets: Array, mask: Array | None) -> Array:
    """Where a loop from the last step to the first has to start anew.

    A reset at step t is a boundary between t and the real step before it. A loop that runs
    backwards crosses it when it enters that earlier step, so the flag moves there; moving it
    by one without regard to masked steps would lose it in a hole.

    Args:
        resets: bool ``[T, B]`` for the forward direction.
        mask: bool ``[T, B]`` or None.

    Returns:
        bool ``[T, B]``.
    """
    steps = resets.shape[0]
    index = jnp.arange(steps)[:, None]
    real = index if mask is None else jnp.where(mask, index, steps)
    # For each step, the first real step behind it; `steps`, whose flag is False, if there is none.
    nearest = lax.cummin(jnp.broadcast_to(real, resets.shape), axis=0, reverse=True)
    last = jnp.full_like(nearest[:1], steps)
    following = jnp.concatenate([nearest[1:], last])
    padded = jnp.concatenate([resets, jnp.zeros_like(resets[:1])])
    return jnp.take_along_axis(padded, following, axis=0)
