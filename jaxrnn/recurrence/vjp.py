"""The time loop's one differentiation rule."""

from functools import partial
from typing import Literal

import jax

from jaxrnn._typing import Array, State
from jaxrnn.cells.base import Cell, LoopWeights
from jaxrnn.recurrence import xla

Keep = Literal["gates", "states"]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def time_loop(
    cell: Cell,
    keep: Keep,
    reverse: bool,
    weights: LoopWeights,
    x_pre: Array,
    state: State,
    restart: State | None,
    mask: Array | None,
    resets: Array | None,
) -> tuple[Array, State]:
    """Runs a cell over time, with a backward pass that is a loop of its own.

    Without a gradient nothing is kept. With one, the states are, and with ``keep="gates"`` the
    gates too; with ``keep="states"`` one matmul over all steps makes the gates again. The weights'
    gradients are one matmul each after the loop.

    Args:
        cell: the cell.
        keep: "gates" or "states".
        reverse: from the last step to the first.
        weights: in the compute dtype.
        x_pre: ``[T, B, Gx, H]`` in the compute dtype.
        state: initial state, float32 at least.
        restart: the state that a reset restores; None without resets.
        mask: bool ``[T, B]`` or None.
        resets: bool ``[T, B]`` or None.

    Returns:
        outputs ``[T, B, S]`` and the final state.
    """
    y, final, _ = xla.forward(cell, weights, x_pre, state, restart, mask, resets, reverse=reverse)
    return y, final


def _forward(cell, keep, reverse, weights, x_pre, state, restart, mask, resets):
    save = ("start", "gates") if keep == "gates" else ("start",)
    y, final, history = xla.forward(
        cell, weights, x_pre, state, restart, mask, resets, reverse=reverse, save=save
    )
    residual = (weights, None if keep == "gates" else x_pre, history, restart, mask, resets)
    return (y, final), residual


def _backward(cell, keep, reverse, residual, cotangents):
    weights, x_pre, history, restart, mask, resets = residual
    if history.gates is None:
        h = history.start.h if cell.h_gates else None
        columns = xla.split_gates(cell.x_gates, x_pre)
        history = history._replace(gates=xla.gate_inputs(cell, weights, columns, h))
    dweights, dx_pre, dstate, drestart = xla.backward(
        cell, weights, history, restart, mask, resets, *cotangents, reverse=reverse
    )
    return dweights, dx_pre, dstate, drestart, None, None


time_loop.defvjp(_forward, _backward)
