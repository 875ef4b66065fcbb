"""Which implementation runs, and why."""

import contextlib
from typing import Any, Literal, NamedTuple

import jax

from jaxrnn._typing import DTypeLike
from jaxrnn.cells.base import Cell, LoopWeights
from jaxrnn.recurrence import associative
from pallas_kernels import targets

Implementation = Literal["xla", "pallas", "associative"]

# How far each family of kernels has been checked; `scripts/gpu_check.py` is what is missing.
VERIFIED = (
    "equal to the scan in Pallas' interpreter, values and gradients; compiled for A100 and H200 "
    "without spilled registers; never run on a GPU"
)


class Explanation(NamedTuple):
    """What `recurrence` would run.

    Attributes:
        implementation: "xla", "pallas" or "associative".
        family: of the fused kernels; None for "xla".
        reason: why, in a sentence.
        verified: how those kernels have been checked; None for "xla".
    """

    implementation: Implementation
    family: str | None
    reason: str
    verified: str | None

    def __str__(self) -> str:
        if self.family is None:
            return f"{self.implementation}: {self.reason}"
        return f"{self.implementation}, {self.family} kernels: {self.reason}. {self.verified}."


def on_gpu() -> bool:
    """Whether arrays will live on a GPU, one that is compiled for included."""
    return targets.current() is not None


def plan(
    implementation: Implementation | None,
    cell: Cell,
    weights: LoopWeights,
    hidden: int,
    state: Any,
    dtype: DTypeLike,
) -> Any:
    """A `fused.Plan`, or None for the scan.

    Raises:
        NotImplementedError: the implementation that was asked for by name cannot run this.
    """
    if implementation == "associative" and (reason := associative.unfit(cell)):
        raise NotImplementedError(f'implementation="associative" cannot run this: {reason}')
    if implementation in ("xla", "associative") or (implementation is None and not on_gpu()):
        return None
    from jaxrnn.recurrence import fused

    found = fused.plan(cell, weights, hidden, state, dtype)
    if not isinstance(found, str):
        return found
    if implementation == "pallas":
        raise NotImplementedError(f'implementation="pallas" cannot run this: {found}')
    return None


def supported(
    cell: Cell, in_features: int, hidden_features: int, dtype: DTypeLike = "float32"
) -> str | None:
    """Why the fused kernels cannot run a cell on this machine's GPU; None where they can.

    Args:
        cell: the cell.
        in_features: I.
        hidden_features: H.
        dtype: of the matmuls.
    """
    found = _plan(cell, in_features, hidden_features, dtype)
    return found if isinstance(found, str) else None


def explain(
    cell: Cell | Any,
    in_features: int | None = None,
    hidden_features: int | None = None,
    *,
    dtype: DTypeLike = "float32",
    implementation: Implementation | None = None,
    gpu: str | None = None,
) -> Explanation:
    """Tells which implementation runs a cell, and why.

    Args:
        cell: a cell, or a layer of `jaxrnn` or `jaxrnn.linen`, whose options then count.
        in_features: I; a layer of `jaxrnn` knows it.
        hidden_features: H; a layer knows it; where its layers differ, the largest counts.
        dtype: of the matmuls, where a layer has none of its own.
        implementation: as given to `recurrence`.
        gpu: "a100", "h100", "h200" or "b200": as if on that GPU; None is this machine.

    Returns:
        the answer; ``str`` of it is a sentence.
    """
    if not isinstance(cell, Cell):
        layer = cell
        in_features = in_features or getattr(layer, "in_features", None)
        stack = getattr(layer, "stack", None) or layer.layer  # of an SRUPlusPlus
        hidden_features = hidden_features or max(stack.sizes(layer.hidden_features))
        cell, dtype = stack.cell, stack.dtype or dtype
        implementation = implementation or stack.implementation
    if hidden_features is None:
        raise ValueError(f"hidden_features of {cell.name} should be given, got None")
    if implementation == "associative" and (reason := associative.unfit(cell)):
        raise NotImplementedError(f'implementation="associative" cannot run this: {reason}')
    if implementation in ("xla", "associative"):
        return Explanation(implementation, None, "asked for by name", None)
    with contextlib.nullcontext() if gpu is None else targets.compiling_for(gpu):
        target = targets.current()
        found = _plan(cell, in_features or hidden_features, hidden_features, dtype)
    if isinstance(found, str) or target is None:
        return Explanation("xla", None, str(found), None)
    reason = f"{cell.name}, H = {hidden_features}, {jax.numpy.dtype(dtype).name} on {target.name}"
    return Explanation("pallas", found.family, reason, VERIFIED)


def _plan(cell: Cell, in_features: int, hidden_features: int, dtype: DTypeLike) -> Any:
    """What `fused.plan` says of a cell's own parameters."""
    from jaxrnn.recurrence import fused

    def make():
        params = cell.init_params(jax.random.key(0), in_features, hidden_features, dtype)
        return cell.loop_weights(params), cell.init_state(params, 1, "float32")

    weights, state = jax.eval_shape(make)
    return fused.plan(cell, weights, hidden_features, state, dtype)
