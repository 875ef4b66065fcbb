"""What every implementation of the time loop takes."""

from typing import Any, Literal, NamedTuple

from jaxrnn._typing import Array, State
from jaxrnn.cells.base import Cell, LoopWeights

Keep = Literal["gates", "states"]


class Loop(NamedTuple):
    """What is fixed when a loop is traced.

    Attributes:
        cell: the cell.
        reverse: from the last step to the first.
        keep: what the scan saves for its gradient: "gates", or "states", from which one matmul over
            all steps makes the gates again. The fused kernels always keep states.
        plan: of the fused kernels, a `fused.Plan`; None is the scan.
        gradient_clip: bound of the cotangents of the pre-activations; None has none.
        states: put out the state after each step.
    """

    cell: Cell
    reverse: bool = False
    keep: Keep = "gates"
    plan: Any = None
    gradient_clip: float | None = None
    states: bool = False


class Inputs(NamedTuple):
    """The arrays of a loop; also their cotangents.

    Attributes:
        weights: in the compute dtype.
        x_pre: ``[T, B, Gx, H]`` in the compute dtype; None in what is saved without it.
        state: the initial state, in float32 at least.
        restart: the state that a reset restores; None without resets.
        mask: bool ``[T, B]``, False where a step holds the state; None is all True.
        resets: bool ``[T, B]``, True where a step starts from ``restart``; None is all False.
        h_scale: ``[B, S]`` constant factors of ``h`` before ``h @ r``; None is 1.
    """

    weights: LoopWeights
    x_pre: Any
    state: State
    restart: State = None
    mask: Array | None = None
    resets: Array | None = None
    h_scale: Array | None = None


class Outputs(NamedTuple):
    """The results of a loop; also their cotangents.

    Attributes:
        y: ``[T, B, S]`` in the compute dtype, 0 where masked.
        final: the state after the last step.
        states: the state after each step, ``[T, B, ...]`` a leaf, in the compute dtype; None where
            ``Loop.states`` does not ask for it.
    """

    y: Array
    final: State
    states: State = None
