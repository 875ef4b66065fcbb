"""The time loop as `lax.scan`: a forward pass, and the backward pass that its rule needs.

Gates are kept as one array each, `{name: [T, B, H]}`: a loop that slices several gates out of one
array is compiled to scalar code by XLA for CPUs (2 to 4 times slower at B=16, H=128, jax 0.10.2).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrnn._typing import Array, State
from jaxrnn.cells.base import Cell, LoopWeights, full_precision
from jaxrnn.recurrence.loop import Inputs, Loop, Outputs

Gates = dict[str, Array]


class Saved(NamedTuple):
    """What the backward pass reads.

    Attributes:
        inputs: of the loop, less what is not needed.
        start: the state that each step started from, after its reset, ``[T, B, ...]`` a leaf.
        gates: what each step's ``cell.gates`` saw, ``{name: [T, B, H]}``; None where they are to be
            computed again.
    """

    inputs: Inputs
    start: State
    gates: Gates | None


class Cotangents(NamedTuple):
    """What a step of the backward pass leaves for the matmuls after the loop.

    Attributes:
        block: ``[B, G H]`` of the recurrent gates, or of the input's where there are none.
        x_only: ``{name: [B, H]}`` of the gates that the block lacks.
        output: the output before its projection and the cotangent behind it, where there is one.
    """

    block: Array
    x_only: Gates
    output: tuple[Array, Array] | None


def select(condition: Array | None, on_true: Any, on_false: Any) -> Any:
    """`jnp.where` over trees of ``[B, ...]`` with a ``[B]`` condition; None is all true."""
    if condition is None:
        return on_true
    return jax.tree.map(
        lambda a, b: jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - 1)), a, b),
        on_true,
        on_false,
    )


def matmul_input(cell: Cell, start: State, scale: Array | None) -> Array | None:
    """What is multiplied by ``r``: ``h [..., B, S]``, scaled; None without a recurrent matmul."""
    if not cell.h_gates:
        return None
    return start.h if scale is None else start.h * scale.astype(start.h.dtype)


def gate_inputs(loop: Loop, weights: LoopWeights, x: Gates, h: Array | None) -> Gates:
    """What ``cell.gates`` reads: input columns plus ``h @ r``, activated where the cell says so.

    Args:
        loop: the cell and how it runs.
        weights: its loop weights.
        x: ``{name: [..., H]}`` columns of ``x_pre``.
        h: ``[..., S]``, or None for a cell without a recurrent matmul.

    Returns:
        ``{name: [..., H]}`` over all gate names, in float32 at least.
    """
    cell = loop.cell
    pre: Any = {name: at_least_float32(column) for name, column in x.items()}
    if cell.h_gates:
        r = weights.r
        assert r is not None  # checks.cell
        assert h is not None
        columns = matmul(h, r.reshape(r.shape[0], -1))
        for name, column in zip(
            cell.h_gates, jnp.split(columns, len(cell.h_gates), -1), strict=True
        ):
            pre[name] = pre[name] + column if name in pre else column
    if loop.gradient_clip is not None:
        pre = {name: with_clipped_gradient(loop.gradient_clip, a) for name, a in pre.items()}
    return activated(cell, pre)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_clipped_gradient(bound: float, a: Array) -> Array:
    """The same values, whose cotangents are clipped, for autodiff through the scan."""
    return a


with_clipped_gradient.defvjp(
    lambda bound, a: (a, None), lambda bound, _, d: (jnp.clip(d, -bound, bound),)
)


def activated(cell: Cell, pre: Gates) -> Gates:
    """Pre-activations as ``cell.gates`` reads them: through a sigmoid or tanh where it says so."""
    functions = dict.fromkeys(cell.sigmoid_gates, jax.nn.sigmoid)
    functions |= dict.fromkeys(cell.tanh_gates, jnp.tanh)
    return {name: functions[name](a) if name in functions else a for name, a in pre.items()}


def activation_slopes(cell: Cell, gates: Gates) -> Gates:
    """Derivatives of the loop's activations, from their values."""
    slopes = {name: gates[name] * (1 - gates[name]) for name in cell.sigmoid_gates}
    return slopes | {name: 1 - gates[name] ** 2 for name in cell.tanh_gates}


def matmul(a: Array, b: Array) -> Array:
    """``a @ b`` with operands in the dtype of the weights ``b``, summed in float32 at least."""
    return jnp.matmul(
        a.astype(b.dtype),
        b,
        precision=full_precision(b.dtype),
        preferred_element_type=accumulator(b.dtype),
    )


def matmul_transposed(a: Array, b: Array) -> Array:
    """``a @ b.T`` as `matmul`; in a loop on a CPU a fourth faster than with a transposed copy."""
    return contract(a.astype(b.dtype), b, (1,))


def contract(a: Array, b: Array, axes: tuple[int, ...]) -> Array:
    """Sums the products over the same axes of both, in float32 at least."""
    return lax.dot_general(
        a,
        b,
        ((axes, axes), ((), ())),
        precision=full_precision(b.dtype),
        preferred_element_type=accumulator(b.dtype),
    )


def accumulator(dtype: Any) -> Any:
    """The dtype of states and sums: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def at_least_float32(a: Array) -> Array:
    """Casts bfloat16 and float16 to float32."""
    return a.astype(accumulator(a.dtype))


def split_gates(names: tuple[str, ...], block: Array) -> Gates:
    """``[T, B, G, H]`` to ``{name: [T, B, H]}``."""
    return {name: block[:, :, j] for j, name in enumerate(names)}


def forward(loop: Loop, inputs: Inputs, *, save: bool = False) -> tuple[Outputs, Saved | None]:
    """Runs the cell over time.

    Args:
        loop: the cell and how it runs.
        inputs: the arrays.
        save: keep what `backward` needs.

    Returns:
        the results, and what was saved.
    """
    cell, weights, x_pre = loop.cell, inputs.weights, inputs.x_pre
    dtype = x_pre.dtype
    save_gates = save and loop.keep == "gates" and cell.step is None
    x_columns = split_gates(cell.x_gates, x_pre)
    # What the gates see as it is: there is no need to write it down again.
    others = cell.h_gates + cell.sigmoid_gates + cell.tanh_gates
    as_given = {name: column for name, column in x_columns.items() if name not in others}

    def step(state, columns):
        x, mask, reset = columns
        start = state if reset is None else select(reset, inputs.restart, state)
        if cell.step is None:
            gates = gate_inputs(loop, weights, x, matmul_input(cell, start, inputs.h_scale))
            output, rest = cell.gates(gates, start, weights.vectors)
        else:
            gates = None
            output, rest = cell.step(x, start, weights)
        if weights.p is not None:
            output = matmul(output, weights.p)
        if "h" in cell.state_names:
            rest = {"h": output, **rest}
        new = cell.state_type(**rest)
        new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, state)
        y = output.astype(dtype)
        y = select(mask, y, jnp.zeros_like(y))
        stored = None
        if save_gates and gates is not None:
            stored = {n: a.astype(dtype) for n, a in gates.items() if n not in as_given}
        new = select(mask, new, state)
        shown = jax.tree.map(lambda a: a.astype(dtype), new) if loop.states else None
        return new, (y, shown, start if save else None, stored)

    columns = (x_columns, inputs.mask, inputs.resets)
    final, (y, states, start, stored) = lax.scan(step, inputs.state, columns, reverse=loop.reverse)
    kept = inputs._replace(x_pre=None if save_gates else x_pre, state=None)
    gates = None if stored is None else stored | as_given
    return Outputs(y, final, states), Saved(kept, start, gates) if save else None


def backward(loop: Loop, saved: Saved, d: Outputs) -> Inputs:
    """The adjoint of `forward`: the loop back in time, then one matmul for each weight.

    Args:
        loop: as given to `forward`.
        saved: by `forward`.
        d: cotangents of the results.

    Returns:
        cotangents of the loop's inputs; None for flags, and for ``restart`` without resets.
    """
    cell, inputs = loop.cell, saved.inputs
    weights, restart = inputs.weights, inputs.restart
    dtype = d.y.dtype
    vectors = jax.tree.map(at_least_float32, weights.vectors)  # their gradients are summed over T
    r = None if weights.r is None else weights.r.reshape(weights.r.shape[0], -1)
    block_names = cell.h_gates or cell.x_gates
    h = matmul_input(cell, saved.start, inputs.h_scale)
    gates = saved.gates
    if gates is None:
        columns = split_gates(cell.x_gates, inputs.x_pre)
        gates = gate_inputs(loop, weights, columns, h)

    def step(carry, columns):
        dstate, dvectors, drestart = carry
        gates, start, mask, reset, dy, dshown = columns
        if dshown is not None:
            dstate = jax.tree.map(lambda a, b: a + b, dstate, dshown)
        gates = jax.tree.map(at_least_float32, gates)
        dnew = select(mask, dstate, jax.tree.map(jnp.zeros_like, dstate))
        doutput = select(mask, at_least_float32(dy), jnp.zeros_like(dy, accumulator(dtype)))
        drest = dnew._asdict()
        if "h" in drest:
            doutput = doutput + drest.pop("h")
        (output, _), pull = jax.vjp(cell.gates, gates, start, vectors)
        dgates, dstart, dvector = pull(
            (doutput if weights.p is None else matmul_transposed(doutput, weights.p), drest)
        )
        slopes = activation_slopes(cell, gates)
        dpre = {n: d * slopes[n] if n in slopes else d for n, d in dgates.items()}
        if (bound := loop.gradient_clip) is not None:
            dpre = {name: jnp.clip(d, -bound, bound) for name, d in dpre.items()}
        dpre = jax.tree.map(lambda d: d.astype(dtype), dpre)
        block = jnp.concatenate([dpre[name] for name in block_names], axis=-1)
        if cell.h_gates:
            assert r is not None
            dh = matmul_transposed(block, r)
            dh = dh if inputs.h_scale is None else dh * inputs.h_scale
            dstart = dstart._replace(h=dstart.h + dh)
        if reset is not None:
            nothing = jax.tree.map(jnp.zeros_like, dstart)
            drestart = jax.tree.map(jnp.add, drestart, select(reset, dstart, nothing))
            dstart = select(reset, nothing, dstart)
        emitted = Cotangents(
            block=block,
            x_only={n: dpre[n] for n in cell.x_gates if n not in block_names},
            output=None if weights.p is None else (output.astype(dtype), doutput.astype(dtype)),
        )
        dvectors = jax.tree.map(jnp.add, dvectors, dvector)
        return (select(mask, dstart, dstate), dvectors, drestart), emitted

    carry = (d.final, *jax.tree.map(jnp.zeros_like, (vectors, restart)))
    columns = (gates, saved.start, inputs.mask, inputs.resets, d.y, d.states)
    (dstate, dvectors, drestart), emitted = lax.scan(step, carry, columns, reverse=not loop.reverse)
    dvectors = jax.tree.map(lambda d, v: d.astype(v.dtype), dvectors, weights.vectors)
    dr, dp = weight_gradients(weights, h, emitted)
    return Inputs(LoopWeights(dr, dp, dvectors), dx_pre(cell, emitted), dstate, drestart)


def weight_gradients(
    weights: LoopWeights, h: Array | None, d: Cotangents
) -> tuple[Array | None, Array | None]:
    """Gradients of ``r`` and ``p``, one matmul each over all steps."""
    dr = dp = None
    if weights.r is not None and h is not None:
        dr = sum_of_products(h, d.block, weights.r)
    if weights.p is not None and d.output is not None:
        dp = sum_of_products(*d.output, weights.p)
    return dr, dp


def dx_pre(cell: Cell, d: Cotangents) -> Array:
    """The cotangent of ``x_pre``: the input's part of the block, and the gates that it lacks."""
    names = cell.h_gates or cell.x_gates
    steps, batch, width = d.block.shape
    columns = d.block.reshape(steps, batch, len(names), width // len(names))
    columns = columns[:, :, : len(cell.x_gates)]
    if not d.x_only:
        return columns
    # By name: a dict comes out of a scan in another order.
    others = [d.x_only[name][:, :, None] for name in cell.x_gates if name in d.x_only]
    return jnp.concatenate([columns[:, :, : cell.shared_gates], *others], axis=2)


def sum_of_products(a: Array, b: Array, like: Array) -> Array:
    """``sum_tb a[t, b, i] b[t, b, j]`` as one matmul, in the shape and dtype of a weight.

    Contracts T and B as two axes: merged into one, a sharded B would be gathered first.
    """
    a, b = a.astype(like.dtype), b.astype(like.dtype)
    return contract(a, b, (0, 1)).reshape(like.shape).astype(like.dtype)
