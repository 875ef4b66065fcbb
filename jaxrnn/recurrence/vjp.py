"""The time loop's one differentiation rule."""

from functools import partial
from types import ModuleType
from typing import Any

import jax

from jaxrnn.recurrence import xla
from jaxrnn.recurrence.loop import Inputs, Loop, Outputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def time_loop(loop: Loop, inputs: Inputs) -> Outputs:
    """Runs a cell over time, with a backward pass that is a loop of its own.

    Without a gradient nothing is kept. With one, the states are, and in the scan the gates too,
    where ``loop.keep`` says so. The weights' gradients are one matmul each after the loop.
    """
    return implementation(loop).forward(loop, inputs)[0]


def _forward(loop: Loop, inputs: Inputs) -> tuple[Outputs, Any]:
    return implementation(loop).forward(loop, inputs, save=True)


def _backward(loop: Loop, saved: Any, d: Outputs) -> tuple[Inputs]:
    return (implementation(loop).backward(loop, saved, d),)


def implementation(loop: Loop) -> ModuleType:
    """`xla`, or `fused`, which is loaded when it is needed."""
    if loop.plan is None:
        return xla
    from jaxrnn.recurrence import fused

    return fused


time_loop.defvjp(_forward, _backward)
