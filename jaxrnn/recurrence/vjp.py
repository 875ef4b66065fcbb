"""The time loop's one differentiation rule."""

from functools import partial
from types import ModuleType
from typing import Any

import jax

from jaxrnn._typing import Array, State
from jaxrnn.recurrence import xla
from jaxrnn.recurrence.loop import Inputs, Loop


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def time_loop(loop: Loop, inputs: Inputs) -> tuple[Array, State]:
    """Runs a cell over time, with a backward pass that is a loop of its own.

    Without a gradient nothing is kept. With one, the states are, and in the scan the gates too,
    where ``loop.keep`` says so. The weights' gradients are one matmul each after the loop.

    Returns:
        outputs ``[T, B, S]`` and the final state.
    """
    return implementation(loop).forward(loop, inputs)[:2]


def _forward(loop: Loop, inputs: Inputs) -> tuple[tuple[Array, State], Any]:
    y, final, saved = implementation(loop).forward(loop, inputs, save=True)
    return (y, final), saved


def _backward(loop: Loop, saved: Any, cotangents: tuple[Array, State]) -> tuple[Inputs]:
    return (implementation(loop).backward(loop, saved, *cotangents),)


def implementation(loop: Loop) -> ModuleType:
    """`xla`, or `fused`, which is loaded when it is needed."""
    if loop.plan is None:
        return xla
    from jaxrnn.recurrence import fused

    return fused


time_loop.defvjp(_forward, _backward)
