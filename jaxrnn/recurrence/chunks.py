"""A long recurrence as a scan over shorter ones."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrnn._typing import State

# Input projections above this size are made chunk by chunk on a CPU, so that they stay in the
# cache between the matmul and the loop. Measured: see docs/results/.
CPU_CACHE_BYTES = 4 * 2**20


def that_stays_in_cache(steps: int, activation_bytes: int, weight_bytes: int) -> int:
    """How many steps a chunk should have on this device.

    Args:
        steps: T.
        activation_bytes: of the input projection of all steps.
        weight_bytes: of the parameters. Each chunk reads them and adds to their gradients, which
            pays only where the chunk is not the smaller of the two.

    Returns:
        T itself where there is nothing to gain.
    """
    pieces = round(activation_bytes / max(CPU_CACHE_BYTES, weight_bytes))
    if jax.default_backend() != "cpu" or pieces <= 1:
        return max(steps, 1)
    return even_chunk(steps, math.ceil(steps / pieces))


def even_chunk(steps: int, at_most: int) -> int:
    """The largest divisor of ``steps`` in the upper half of ``at_most``, else ``at_most``."""
    for chunk in range(at_most, at_most // 2, -1):
        if steps % chunk == 0:
            return chunk
    return at_most


def scan(
    piece: Callable[[State, Any], tuple[State, Any]],
    state: State,
    inputs: Any,
    chunk: int,
    *,
    reverse: bool,
) -> tuple[State, Any]:
    """Runs ``piece(state, inputs) -> (state, y)`` chunk after chunk.

    Args:
        piece: runs any number of steps.
        state: where to start.
        inputs: a tree of ``[T, ...]``.
        chunk: steps a piece; a shorter one takes what is left of T.
        reverse: from the last chunk to the first.

    Returns:
        the final state and ``y``, a tree of ``[T, ...]``.
    """
    steps = jax.tree.leaves(inputs)[0].shape[0]
    count, rest = divmod(steps, chunk)
    if count <= 1 and not rest:
        return piece(state, inputs)
    whole = jax.tree.map(lambda a: a[: count * chunk].reshape(count, chunk, *a.shape[1:]), inputs)
    tail = jax.tree.map(lambda a: a[count * chunk :], inputs)
    y_tail = None
    if rest and reverse:
        state, y_tail = piece(state, tail)
    state, y = lax.scan(piece, state, whole, reverse=reverse)
    y = jax.tree.map(lambda a: a.reshape(count * chunk, *a.shape[2:]), y)
    if rest and not reverse:
        state, y_tail = piece(state, tail)
    if y_tail is None:
        return state, y
    return state, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), y, y_tail)
