"""`recurrence`: checks, dtypes and the choice of how to run, made here once."""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, ArrayLike, DTypeLike, Params, State
from jaxrnn.cells.base import Cell
from jaxrnn.recurrence import associative, checks, choice, chunks, mesh, sequence, xla
from jaxrnn.recurrence.choice import Implementation
from jaxrnn.recurrence.loop import Inputs, Loop
from jaxrnn.recurrence.noise import Noise
from jaxrnn.recurrence.vjp import time_loop
from pallas_kernels.varying import vary_together

Remat = Literal["none", "gates", "chunk"]


def recurrence(
    cell: Cell,
    params: Params,
    x: Array,
    state: State | None = None,
    *,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    reset_state: State | None = None,
    noise: Noise | None = None,
    reverse: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    remat: Remat | None = None,
    gradient_clip: float | None = None,
    return_states: bool = False,
    autodiff: bool = False,
) -> tuple[Any, ...]:
    """Runs a cell over a batch of sequences, time first.

    A masked step holds the state, gives an output of exactly 0 and ignores its own reset, and
    whatever lies there, NaN included, changes nothing. A reset restores ``cell.init_state``
    before its step, and no gradient crosses it. In reverse each row starts at its last real
    step, and a boundary set by a reset stays where it is. One call over T steps equals any split
    of it into shorter calls that pass the state on; in reverse only where no piece but the first
    begins with a reset, since that boundary lies between two calls.

    Args:
        cell: the cell, from `jaxrnn.cells` or your own.
        params: its parameters.
        x: ``[T, B, I]``, floating point.
        state: initial state, each leaf ``[B, ...]``; None is ``cell.init_state``. Kept in float32
            (float64 for float64 inputs), and cast to that.
        lengths: integers ``[B]``: row b has ``lengths[b]`` real steps, at the front.
        mask: bool ``[T, B]``, True at real steps; with ``lengths``, both must hold.
        resets: bool or integers ``[T, B]``, true where a new sequence begins at that step.
        reset_state: what a reset restores, each leaf ``[B, ...]``; None is ``cell.init_state``.
        noise: dropout and zoneout inside the loop: see `Noise`.
        reverse: run from the last step to the first. Outputs stay aligned with ``x``.
        dtype: of the matmuls and the output; None is the common dtype of ``x`` and ``params``.
        implementation: "xla" is `lax.scan`, "pallas" the fused kernels, "associative" a parallel
            scan over time, for cells that are linear in their state; a name runs or raises. None is
            "pallas" on NVIDIA GPUs of compute capability 8.0 up for cells that can, and "xla"
            elsewhere. `jaxrnn.explain` tells which and why.
        remat: what a gradient keeps. "none": states and gates. "gates": states, and the gates are
            computed again, as the fused kernels do in any case. "chunk": the state every sqrt(T)
            steps, and all else is computed again. None is "none" on a CPU and "gates" on a GPU.
            Where the library's rule is not used ("associative", ``autodiff``, cells with a step of
            their own), only "chunk" acts.
        gradient_clip: bound of each element of the cotangents of the gates' pre-activations, step
            by step, before they go on into weights, inputs and the step before (Graves 2013,
            arXiv:1308.0850, section 2.1); None has none.
        return_states: also return the state after each step.
        autodiff: differentiate through the scan itself instead of by the library's rule: slower
            and with more memory, but it allows forward mode and second order.

    Returns:
        outputs ``[T, B, S]`` in ``dtype``, and the state after each row's last real step. With
        ``return_states`` a third, the states after all steps, ``[T, B, ...]`` a leaf, in ``dtype``;
        a masked step has the state that it holds.

    Raises:
        ValueError: for shapes or option values that do not fit, naming what was wanted.
        TypeError: for integer inputs.
        NotImplementedError: where the implementation asked for cannot run this, with the reason.
    """
    steps, batch = checks.inputs(x)
    dtype = dtype or jnp.result_type(x, *jax.tree.leaves(params))
    checks.choice("implementation", implementation, get_args(Implementation))
    checks.choice("remat", remat, get_args(Remat))
    if autodiff and implementation in ("pallas", "associative"):
        raise ValueError(
            f"autodiff differentiates the scan, which is not implementation {implementation!r}"
        )
    if autodiff:
        implementation = "xla"

    initial = cell.init_state(params, batch, xla.accumulator(dtype))
    state = initial if state is None else checks.state(cell.name, state, initial)
    restart = initial if reset_state is None else checks.state(cell.name, reset_state, initial)
    noise = noise or Noise()
    noise.check(cell, params, state, steps)
    checks.bound("gradient_clip", gradient_clip)
    if gradient_clip is not None and cell.step is not None:
        raise ValueError(f"{cell.name} has a step of its own, where gradient_clip cannot reach")
    mask = checks.flags("mask", mask, steps, batch)
    resets = checks.flags("resets", resets, steps, batch)
    mask = sequence.step_mask(steps, checks.lengths(lengths, batch), mask)
    run = partial(
        run_rows,
        noise.into(cell),
        reverse=reverse,
        dtype=dtype,
        implementation=implementation,
        remat=remat,
        gradient_clip=gradient_clip,
        return_states=return_states,
        autodiff=autodiff,
    )
    rows = Rows(params, x, state, restart, mask, resets, noise.columns(), noise.h_scale)
    results = mesh.over_explicit_batch(run, rows, jax.typeof(x), axes=ROW_AXES)
    return results if return_states else results[:2]


class Rows(NamedTuple):
    """The arrays of a call, checked."""

    params: Any
    x: Any
    state: Any
    restart: Any
    mask: Any
    resets: Any
    columns: Any
    h_scale: Any


ROW_AXES = Rows(None, 1, 0, 0, 1, 1, 1, 0)


def run_rows(
    cell: Cell,
    rows: Rows,
    *,
    reverse: bool,
    dtype: DTypeLike,
    implementation: Implementation | None,
    remat: Remat | None,
    gradient_clip: float | None,
    return_states: bool,
    autodiff: bool,
) -> tuple[Array, State, State]:
    """`recurrence` after its checks, on the rows of the batch that this program has."""
    params, x, state, restart, mask, resets, noise, h_scale = vary_together(*rows)
    params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
    if mask is not None:
        x = jnp.where(mask[:, :, None], x, 0)
    if resets is not None and reverse:
        resets = sequence.resets_in_reverse(resets, mask)

    restart = None if resets is None else restart
    weights = cell.loop_weights(params)
    checks.cell(cell, weights)
    x_pre = jax.eval_shape(cell.project_inputs, params, x)
    plan = choice.plan(implementation, cell, weights, x_pre.shape[-1], state, dtype)
    if not x.size:
        plan = None  # No kernel is launched over nothing.
    remat = remat or ("gates" if choice.on_gpu() else "none")
    keep = "states" if remat == "gates" else "gates"
    loop = Loop(cell, reverse, keep, plan, gradient_clip, return_states)

    def piece(state: State, columns: Any) -> tuple[State, Any]:
        x, mask, resets, noise = columns
        x_pre = cell.project_inputs(params, x)
        if noise:
            # By name: a dict comes out of a tree in another order.
            drawn = [noise[name][:, :, None] for name in cell.x_gates if name in noise]
            x_pre = jnp.concatenate([x_pre, *(a.astype(dtype) for a in drawn)], axis=2)
        inputs = Inputs(weights, x_pre, state, restart, mask, resets, h_scale)
        if implementation == "associative":
            done: Any = associative.forward(loop, inputs)
        elif autodiff or cell.step is not None:
            done, _ = xla.forward(loop, inputs)
        else:
            # pyright does not see through custom_vjp.
            done = time_loop(loop, inputs)
        return done.final, (done.y, done.states)

    steps = x.shape[0]
    if remat == "chunk":
        chunk = max(1, math.isqrt(steps))
        piece = jax.checkpoint(piece, prevent_cse=False)
    elif choice.on_gpu() or implementation == "associative":
        chunk = max(1, steps)
    else:
        weight_bytes = sum(p.nbytes for p in jax.tree.leaves(params))
        # A gate without a column of x_pre takes as much room as one with.
        gates = len(set(cell.x_gates + cell.h_gates)) / len(cell.x_gates)
        gate_bytes = int(gates * x_pre.size * x_pre.dtype.itemsize)
        chunk = chunks.that_stays_in_cache(steps, gate_bytes, weight_bytes)
    state, (y, states) = chunks.scan(piece, state, (x, mask, resets, noise), chunk, reverse=reverse)
    return y, state, states
