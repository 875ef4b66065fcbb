"""The time loop as a parallel scan, for cells whose state is linear in the state before.

Steps ``s' = a s + b`` compose to steps of the same form, so ``log2 T`` rounds of elementwise work
take the place of T steps that wait for each other (Blelloch 1990; Martin & Cundy 2018,
arXiv:1709.04057). It is differentiated by plain autodiff.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrnn._typing import Array
from jaxrnn.cells.base import Cell
from jaxrnn.recurrence import xla
from jaxrnn.recurrence.loop import Inputs, Loop, Outputs


def unfit(cell: Cell) -> str | None:
    """Why a cell cannot be run so; None where it can."""
    if cell.linear is None:
        return f"the state of {cell.name} is not linear in the state before, or has noise in it"
    return None


def forward(loop: Loop, inputs: Inputs) -> Outputs:
    """Runs the cell over time: arguments and results of `xla.forward`, nothing saved."""
    if loop.reverse:
        columns = {"x_pre": inputs.x_pre, "mask": inputs.mask, "resets": inputs.resets}
        flipped = jax.tree.map(lambda a: jnp.flip(a, 0), columns)
        y, final, states = forward(loop._replace(reverse=False), inputs._replace(**flipped))
        y, states = jax.tree.map(lambda a: jnp.flip(a, 0), (y, states))
        return Outputs(y, final, states)
    cell, vectors = loop.cell, inputs.weights.vectors
    linear: Any = cell.linear
    (state,) = inputs.state
    pre = xla.gate_inputs(loop, inputs.weights, xla.split_gates(cell.x_gates, inputs.x_pre), None)
    a, b = linear(pre, vectors)
    restart = None
    if inputs.resets is not None:
        (restart,) = inputs.restart
        a, b = where_steps(inputs.resets, (jnp.zeros_like(a), b + a * restart), (a, b))
    a, b = where_steps(inputs.mask, (a, b), (jnp.ones_like(a), jnp.zeros_like(b)))
    # The initial state is a first step that leaves it, whatever was before.
    a = jnp.concatenate([jnp.zeros_like(state)[None], a])
    b = jnp.concatenate([state[None], b])
    _, after = lax.associative_scan(compose, (a, b))
    start = after[:-1]
    if restart is not None:
        start = where_steps(inputs.resets, jnp.broadcast_to(restart, start.shape), start)
    outputs, _ = cell.gates(pre, cell.state_type(start), vectors)
    y = outputs.astype(inputs.x_pre.dtype)
    return Outputs(
        y=where_steps(inputs.mask, y, jnp.zeros_like(y)),
        final=cell.state_type(after[-1]),
        states=cell.state_type(after[1:].astype(y.dtype)) if loop.states else None,
    )


def compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """The step that makes two steps at once."""
    (a, b), (c, d) = first, second
    return c * a, c * b + d


def where_steps(condition: Array | None, on_true: Any, on_false: Any) -> Any:
    """`xla.select` over all time steps, ``[T, B, ...]`` with a ``[T, B]`` condition."""
    if condition is None:
        return on_true
    return jax.tree.map(lambda t, f: jnp.where(condition[:, :, None], t, f), on_true, on_false)
