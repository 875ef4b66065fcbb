"""One step of a tile and its adjoint, which all kernels share."""

import jax
import jax.numpy as jnp

from pallas_kernels.equations import Arrays, Equations
from pallas_kernels.tile import Tile, choose, choose_all


def restarted(tile: Tile, start: Arrays, restart: Arrays | None, reset: jax.Array | None) -> Arrays:
    """What a step starts from: ``restart`` (references) in the rows that are reset."""
    if reset is None or restart is None:
        return start
    return choose_all(reset, {name: tile.load(restart[name]) for name in start}, start)


def forward(
    tile: Tile,
    equations: Equations,
    pre: Arrays,
    start: Arrays,
    vectors: Arrays,
    state: Arrays,
    real: jax.Array | None,
) -> tuple[Arrays, Arrays]:
    """One step.

    Args:
        tile: the program's.
        equations: of the cell.
        pre: what the gates see.
        start: the state after a reset.
        vectors: of the cell.
        state: the state before a reset, which a masked row holds.
        real: ``[block_b, 1]``, False where masked.

    Returns:
        what is written into the history, and the state after the step.
    """
    after = tile.clear_outside(equations.after(pre, start, vectors))
    new = choose_all(real, {name: after[name] for name in state}, state)
    return after | new, new


def backward(
    tile: Tile,
    equations: Equations,
    pre: Arrays,
    start: Arrays,
    vectors: Arrays,
    dstate: Arrays,
    dy: jax.Array,
    real: jax.Array | None,
) -> tuple[Arrays, tuple[Arrays, Arrays, Arrays]]:
    """The adjoint of `forward`, less the path through ``h @ r``.

    Args:
        tile: the program's.
        equations: of the cell.
        pre: as in `forward`.
        start: as in `forward`.
        vectors: as in `forward`.
        dstate: cotangent of the state after the step.
        dy: cotangent of the output.
        real: as in `forward`.

    Returns:
        what the step left, not masked; and the cotangents of ``pre``, ``start`` and ``vectors``,
        0 in masked rows.
    """
    zeros = tile.zeros()
    dafter = {name: choose(real, d, zeros) for name, d in dstate.items()}
    output = equations.output_name
    dafter[output] = dafter.get(output, zeros) + choose(real, dy, zeros)
    after, pull = jax.vjp(equations.after, pre, start, vectors)
    dpre, dstart, dvectors = map(tile.clear_outside, pull(dafter))
    if (bound := equations.gradient_clip) is not None:
        dpre = {name: jnp.clip(d, -bound, bound) for name, d in dpre.items()}
    return after, (dpre, dstart, dvectors)


def split_at_reset(
    tile: Tile, dstart: Arrays, reset: jax.Array | None, real: jax.Array | None
) -> tuple[Arrays, Arrays]:
    """What of ``dstart`` goes on to the step before, and what to the restart state."""
    zeros = dict.fromkeys(dstart, tile.zeros())
    if reset is None:
        return dstart, zeros
    taken = reset if real is None else reset & real
    return choose_all(reset, zeros, dstart), choose_all(taken, dstart, zeros)
