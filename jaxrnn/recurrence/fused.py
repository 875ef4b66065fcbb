"""The adapter to `pallas_kernels`: which kernels can run a cell, and its arrays in their form.

Imported late: a machine without a GPU never loads the kernels.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, State
from jaxrnn.cells.base import Cell, LoopWeights, asked_precision, full_precision
from jaxrnn.recurrence import xla
from jaxrnn.recurrence.loop import Inputs, Loop, Outputs
from jaxrnn.recurrence.mesh import over_batch
from pallas_kernels import targets
from pallas_kernels.backend import Precision
from pallas_kernels.equations import Equations
from pallas_kernels.step import launch as step
from pallas_kernels.step import tiles as step_tiles
from pallas_kernels.walk import launch as walk
from pallas_kernels.walk import tiles as walk_tiles

DTYPES = ("float32", "bfloat16", "float16")

# Primitives that the compiler of kernels has no code for, or that split a tile.
UNFIT = {
    "concatenate",
    "custom_vjp_call",
    "dot_general",
    "dynamic_slice",
    "gather",
    "optimization_barrier",
    "pad",
    "random_bits",
    "random_wrap",
    "scatter",
    "slice",
    "sort",
    "split",
}


# Of all arrays that kernels take and return, by name.
BATCH_AXIS = {
    "x_pre": 1,
    "pre": 1,
    "r": None,
    "p": None,
    "h_scale": 0,
    "output": 1,
    "dh": 1,
    "vectors": None,
    "dvectors": 1,
    "mask": 1,
    "resets": 1,
    "y": 1,
    "dy": 1,
    "start": 1,
    "history": 1,
    "state": 0,
    "restart": 0,
    "final": 0,
    "dfinal": 0,
    "dstate": 0,
    "states": 1,
    "dstates": 1,
    "drestart": 0,
    "k": None,
}


class Plan(NamedTuple):
    """How a cell will run.

    Attributes:
        family: of kernels: "resident", "step" or "elementwise".
        tiles: how the work is cut up.
        precision: of float32 matmuls.
        interpret: run in Pallas' interpreter.
    """

    family: str
    tiles: Any
    precision: Precision
    interpret: bool


class Saved(NamedTuple):
    """What the backward pass needs.

    Attributes:
        inputs: of the loop.
        states: ``{name: [T, B, H]}`` in the compute dtype: what each step started from, or for the
            step family, whose output it is too, what each step left.
    """

    inputs: Inputs
    states: dict[str, Array]


def plan(cell: Cell, weights: LoopWeights, hidden: int, state: State, dtype: Any) -> Plan | str:
    """The kernels that this cell runs on, or why there are none.

    Args:
        cell: the cell.
        weights: arrays or their types.
        hidden: H.
        state: arrays or their types.
        dtype: of the matmuls.
    """
    target = targets.current()
    if target is None:
        return "there is no GPU here: the fused kernels need an NVIDIA GPU"
    if target.capability < (8, 0):
        return f"the fused kernels need compute capability 8.0, and this is {target.name}"
    if cell.step is not None:
        return f"{cell.name} has a step of its own, which is not h @ r and then gates"
    if weights.p is not None and not cell.h_gates:
        return f"{cell.name} projects its output, which only kernels with a matmul do"
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        return f"the fused kernels compute in {', '.join(DTYPES)}, not in {dtype.name}"
    for name, leaf in zip(cell.state_names, state, strict=True):
        if leaf.shape[1:] != (hidden,) and not (name == "h" and weights.p is not None):
            return f"state.{name} is {leaf.shape}, and the fused kernels want [B, H = {hidden}]"
    for name, vector in weights.vectors.items():
        if vector.shape != (hidden,):
            return (
                f"the vector {name!r} is {vector.shape}, and the fused kernels want [H = {hidden}]"
            )
    equation = equations(cell, tuple(weights.vectors), weights.p is not None)
    if reason := unfit(equation, hidden):
        return f"the gates of {cell.name} {reason}"
    rows, size = cell.whole_rows, dtype.itemsize
    if rows and not cell.h_gates:
        return f"{cell.name} needs whole rows without a matmul, which no kernel does yet"
    if not cell.h_gates:
        family, tiles = "elementwise", walk_tiles.elementwise(hidden)
    elif weights.p is None and walk_tiles.resident_fits(equation, hidden, size, target, rows):
        family, tiles = "resident", walk_tiles.resident(hidden, rows)
    else:
        family, tiles = "step", step_tiles.step(hidden, size, target, rows)
    return Plan(family, tiles, precision(), target.interpret)


def precision() -> Precision:
    """Of float32 matmuls: in full, unless ``jax.default_matmul_precision`` names TF32."""
    return "tf32" if asked_precision() in ("tensorfloat32", "TF32_TF32_F32") else "highest"


def unfit(equation: Equations, hidden: int) -> str | None:
    """Why gates cannot be part of a kernel: what the compiler of kernels has no code for."""
    tile = jax.ShapeDtypeStruct((16, hidden), jnp.float32)
    names = (equation.x_gates + equation.h_only, equation.state_names, equation.vector_names)
    traced = jax.make_jaxpr(equation.after)(*(dict.fromkeys(part, tile) for part in names))
    if traced.consts:
        shapes = ", ".join(str(jnp.shape(const)) for const in traced.consts)
        return f"use arrays of shape {shapes} from outside; make them vectors of its loop_weights"
    found = {e.primitive.name for e in traced.jaxpr.eqns} & UNFIT
    return f"use {', '.join(sorted(found))}, which kernels cannot" if found else None


@lru_cache
def equations(
    cell: Cell, vector_names: tuple[str, ...], projects: bool, gradient_clip: float | None = None
) -> Equations:
    """The cell as kernels see it."""
    # h of a projected size is no tile of the gates' size: they may not read it.
    unread = {"h": None} if projects else {}

    def gates(pre, state, vectors):
        return cell.gates(xla.activated(cell, pre), cell.state_type(**unread, **state), vectors)

    return Equations(
        name=re.sub(r"\W+", "_", cell.name).strip("_"),
        x_gates=cell.x_gates,
        h_gates=cell.h_gates,
        state_names=tuple(name for name in cell.state_names if name not in unread),
        vector_names=vector_names,
        gates=gates,
        projects=projects,
        gradient_clip=gradient_clip,
    )


def launch(loop: Loop, inputs: Inputs) -> walk.Launch | step.Launch:
    """The kernels of a loop."""
    weights = inputs.weights
    equation = equations(
        loop.cell, tuple(weights.vectors), weights.p is not None, loop.gradient_clip
    )
    family, tiles, precision, interpret = loop.plan
    if family == "step":
        return step.Launch(equation, tiles, loop.reverse, precision, interpret)
    return walk.Launch(equation, family, tiles, loop.reverse, precision, interpret)


def forward(loop: Loop, inputs: Inputs, *, save: bool = False) -> tuple[Outputs, Saved]:
    """Runs the cell over time: arguments and results of `xla.forward`, by a kernel."""
    given = arrays(inputs) | {"x_pre": inputs.x_pre, "state": inputs.state._asdict()}
    kernels = launch(loop, inputs)
    done = over_batch(lambda given: kernels.forward(given, save, loop.states), given, BATCH_AXIS)
    stepwise = loop.plan.family == "step"
    y = done["history"]["h"] if stepwise else done["y"]
    if inputs.mask is not None:
        y = jnp.where(inputs.mask[:, :, None], y, 0)
    saved = Saved(inputs, done["history" if stepwise else "start"])
    states = done["history" if stepwise else "states"] if loop.states else None
    named = loop.cell.state_type
    return Outputs(y, named(**done["final"]), states and named(**states)), saved


def backward(loop: Loop, saved: Saved, d: Outputs) -> Inputs:
    """The adjoint of `forward`: arguments and results of `xla.backward`, by a kernel."""
    cell, inputs = loop.cell, saved.inputs
    weights: Any = inputs.weights
    start_h = None
    dstates = None if d.states is None else d.states._asdict()
    given = arrays(inputs) | {"dy": d.y, "dfinal": d.final._asdict(), "dstates": dstates}
    given["pre"] = {"x": inputs.x_pre, "h": None}
    match loop.plan.family:
        case "elementwise":
            given["start"] = saved.states
        case "resident":
            given["start"], start_h = saved.states, saved.states["h"]
            h = scaled(inputs, start_h)
            given["pre"] = gate_inputs(cell, weights.r, inputs.x_pre, h)
        case "step":
            given |= {"history": saved.states, "state": inputs.state._asdict()}
            start_h = starts(loop, inputs, saved.states["h"])
    back = over_batch(launch(loop, inputs).backward, given, BATCH_AXIS)
    dr = dp = None
    if weights.p is not None:
        dp = xla.sum_of_products(back["output"], back["dh"], weights.p)
    if start_h is not None:
        block = recurrent_block(cell, back["pre"])
        dr = xla.sum_of_products(scaled(inputs, start_h), block, weights.r)
        if loop.plan.family == "step":
            back = with_first_matmul(loop, inputs, back, block[-1 if loop.reverse else 0])
    drestart = None if back["drestart"] is None else cell.state_type(**back["drestart"])
    dweights = LoopWeights(dr, dp, unstacked(weights.vectors, back["dvectors"]))
    return Inputs(dweights, back["pre"]["x"], cell.state_type(**back["dstate"]), drestart)


def with_first_matmul(
    loop: Loop, inputs: Inputs, d: dict[str, Any], block: Array
) -> dict[str, Any]:
    """Adds what the initial state gets by way of ``h @ r``; no launch follows that could."""
    r: Any = inputs.weights.r
    dh = scaled(inputs, xla.matmul_transposed(block, r.reshape(r.shape[0], -1)))
    if inputs.resets is None:
        return d | {"dstate": d["dstate"] | {"h": d["dstate"]["h"] + dh}}
    reset = inputs.resets[-1 if loop.reverse else 0][:, None]
    return d | {
        name: d[name] | {"h": d[name]["h"] + jnp.where(here, dh, 0)}
        for name, here in (("dstate", ~reset), ("drestart", reset))
    }


def scaled(inputs: Inputs, h: Array) -> Array:
    """``h [..., B, S]``, or its cotangent, with the loop's factors."""
    return h if inputs.h_scale is None else h * inputs.h_scale.astype(h.dtype)


def arrays(inputs: Inputs) -> dict[str, Any]:
    """What the kernels of both passes read."""

    def flags(a: Array | None) -> Array | None:
        return None if a is None else a.astype(jnp.int8)

    return {
        "r": inputs.weights.r,
        "p": None if inputs.weights.p is None else inputs.weights.p[:, None],
        "h_scale": inputs.h_scale,
        "vectors": stacked(inputs.weights.vectors),
        "restart": None if inputs.restart is None else inputs.restart._asdict(),
        "mask": flags(inputs.mask),
        "resets": flags(inputs.resets),
    }


def stacked(vectors: Mapping[str, Array]) -> Array | None:
    """``[N, H]`` of N vectors: one array costs fewer launches to make than N."""
    return jnp.stack(list(vectors.values())) if vectors else None


def unstacked(vectors: Mapping[str, Array], d: Array | None) -> dict[str, Array]:
    """Cotangents of the vectors, of ``[N, B, H]`` per row of the batch."""
    if d is None:
        return {}
    # One reduction: XLA of JAX 0.12.1 would slice first and launch one for each vector.
    sums = jax.lax.optimization_barrier(d.sum(1))
    return {name: sums[j].astype(v.dtype) for j, (name, v) in enumerate(vectors.items())}


def starts(loop: Loop, inputs: Inputs, history: Array) -> Array:
    """The ``h`` that each step started from, ``[T, B, H]``."""
    first = inputs.state.h.astype(history.dtype)[None]
    h = [history[1:], first] if loop.reverse else [first, history[:-1]]
    h = jnp.concatenate(h)
    if inputs.resets is None:
        return h
    return jnp.where(inputs.resets[:, :, None], inputs.restart.h.astype(h.dtype), h)


def gate_inputs(cell: Cell, r: Array, x_pre: Array, h: Array) -> dict[str, Array | None]:
    """Pre-activations of all steps by one matmul: the gates with a column of x_pre, the others."""
    columns = jnp.matmul(h, r.reshape(r.shape[0], -1), precision=full_precision(r.dtype))
    columns = columns.reshape(*h.shape[:2], *r.shape[1:])
    shared = cell.shared_gates
    summed = x_pre[:, :, :shared] + columns[:, :, :shared]
    x_only, h_only = x_pre[:, :, shared:], columns[:, :, shared:]
    return {
        "x": jnp.concatenate([summed, x_only], axis=2) if x_only.shape[2] else summed,
        "h": h_only if h_only.shape[2] else None,
    }


def recurrent_block(cell: Cell, dpre: dict[str, Any]) -> Array:
    """Cotangents of ``h @ r``, ``[T, B, Gh H]``."""
    block = dpre["x"][:, :, : cell.shared_gates]
    if dpre["h"] is not None:
        block = jnp.concatenate([block, dpre["h"]], axis=2)
    return block.reshape(*block.shape[:2], -1)
