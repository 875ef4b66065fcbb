"""The time loop as `lax.scan`: a forward pass, and the backward pass that its rule needs.

Gates are kept as one array each, `{name: [T, B, H]}`: a loop that slices several gates out of one
array is compiled to scalar code by XLA for CPUs (2 to 4 times slower at B=16, H=128, jax 0.10.2).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrnn._typing import Array, State
from jaxrnn.cells.base import Cell, LoopWeights

Gates = dict[str, Array]


class History(NamedTuple):
    """What the backward pass reads, all with T in front.

    Attributes:
        start: the state that each step started from, after its reset, ``[T, B, ...]`` a leaf.
        gates: what each step's ``cell.gates`` saw, ``{name: [T, B, H]}``.
    """

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


def gate_inputs(cell: Cell, weights: LoopWeights, x: Gates, h: Array | None) -> Gates:
    """What ``cell.gates`` reads: input columns plus ``h @ r``, activated where the cell says so.

    Args:
        cell: the cell.
        weights: its loop weights.
        x: ``{name: [..., H]}`` columns of ``x_pre``.
        h: ``[..., S]``, or None for a cell without a recurrent matmul.

    Returns:
        ``{name: [..., H]}`` over all gate names, in float32 at least.
    """
    pre = {name: at_least_float32(column) for name, column in x.items()}
    if cell.h_gates:
        r = weights.r
        assert r is not None  # checks.cell
        assert h is not None
        columns = matmul(h, r.reshape(r.shape[0], -1))
        for name, column in zip(
            cell.h_gates, jnp.split(columns, len(cell.h_gates), -1), strict=True
        ):
            pre[name] = pre[name] + column if name in pre else column
    for name in cell.sigmoid_gates:
        pre[name] = jax.nn.sigmoid(pre[name])
    for name in cell.tanh_gates:
        pre[name] = jnp.tanh(pre[name])
    return pre


def activation_slopes(cell: Cell, gates: Gates) -> Gates:
    """Derivatives of the loop's activations, from their values."""
    slopes = {name: gates[name] * (1 - gates[name]) for name in cell.sigmoid_gates}
    return slopes | {name: 1 - gates[name] ** 2 for name in cell.tanh_gates}


def matmul(a: Array, b: Array) -> Array:
    """``a @ b`` with operands in the dtype of the weights ``b``, summed in float32 at least."""
    return jnp.matmul(a.astype(b.dtype), b, preferred_element_type=accumulator(b.dtype))


def matmul_transposed(a: Array, b: Array) -> Array:
    """``a @ b.T`` as `matmul`; in a loop on a CPU a fourth faster than with a transposed copy."""
    contract_last = (((1,), (1,)), ((), ()))
    dtype = accumulator(b.dtype)
    return lax.dot_general(a.astype(b.dtype), b, contract_last, preferred_element_type=dtype)


def accumulator(dtype: Any) -> Any:
    """The dtype of states and sums: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def at_least_float32(a: Array) -> Array:
    """Casts bfloat16 and float16 to float32."""
    return a.astype(accumulator(a.dtype))


def split_gates(names: tuple[str, ...], block: Array) -> Gates:
    """``[T, B, G, H]`` to ``{name: [T, B, H]}``."""
    return {name: block[:, :, j] for j, name in enumerate(names)}


def forward(
    cell: Cell,
    weights: LoopWeights,
    x_pre: Array,
    state: State,
    restart: State | None,
    mask: Array | None,
    resets: Array | None,
    *,
    reverse: bool = False,
    save: tuple[str, ...] = (),
) -> tuple[Array, State, History | None]:
    """Runs the cell over time.

    Args:
        cell: the cell.
        weights: its loop weights, in the compute dtype.
        x_pre: ``[T, B, Gx, H]`` in the compute dtype.
        state: the initial state, in float32 at least.
        restart: the state that a reset restores; None without resets.
        mask: bool ``[T, B]``, False where a step holds the state; None is all True.
        resets: bool ``[T, B]``, True where a step starts from ``restart``; None is all False.
        reverse: from the last step to the first.
        save: which of "start", "gates" to keep for the backward pass.

    Returns:
        outputs ``[T, B, S]`` in the compute dtype, 0 where masked; the state after the last step;
        the history, None where ``save`` is empty.
    """
    dtype = x_pre.dtype

    def step(state, inputs):
        x, mask, reset = inputs
        start = state if reset is None else select(reset, restart, state)
        if cell.step is None:
            gates = gate_inputs(cell, weights, x, start.h if cell.h_gates else None)
            output, rest = cell.gates(gates, start, weights.vectors)
        else:
            gates = None
            output, rest = cell.step(x, start, weights)
        if weights.p is not None:
            output = matmul(output, weights.p)
        if "h" in cell.state_names:
            rest = {"h": output, **rest}
        new = cell.state_type(**rest)
        y = output.astype(dtype)
        saved = History(
            start=start if "start" in save else None,
            gates=jax.tree.map(lambda a: a.astype(dtype), gates) if "gates" in save else None,
        )
        new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, state)
        return select(mask, new, state), (select(mask, y, jnp.zeros_like(y)), saved)

    inputs = (split_gates(cell.x_gates, x_pre), mask, resets)
    final, (y, history) = lax.scan(step, state, inputs, reverse=reverse)
    return y, final, history if save else None


def backward(
    cell: Cell,
    weights: LoopWeights,
    history: History,
    restart: State | None,
    mask: Array | None,
    resets: Array | None,
    dy: Array,
    dfinal: State,
    *,
    reverse: bool = False,
) -> tuple[LoopWeights, Array, State, State | None]:
    """The adjoint of `forward`: the loop back in time, then one matmul for each weight.

    Args:
        cell: the cell.
        weights: as given to `forward`.
        history: start states and gates.
        restart: as given to `forward`.
        mask: as given to `forward`.
        resets: as given to `forward`.
        dy: ``[T, B, S]``.
        dfinal: cotangent of the final state.
        reverse: as given to `forward`.

    Returns:
        cotangents of ``weights``, ``x_pre``, ``state`` and ``restart`` (None without resets).
    """
    dtype = dy.dtype
    block_names = cell.h_gates or cell.x_gates
    vectors = jax.tree.map(at_least_float32, weights.vectors)  # their gradients are summed over T
    r = None if weights.r is None else weights.r.reshape(weights.r.shape[0], -1)

    def step(carry, inputs):
        dstate, dvectors, drestart = carry
        gates, start, mask, reset, dy = inputs
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
        dpre = {n: (d * slopes[n] if n in slopes else d).astype(dtype) for n, d in dgates.items()}
        block = jnp.concatenate([dpre[name] for name in block_names], axis=-1)
        if cell.h_gates:
            assert r is not None
            dstart = dstart._replace(h=dstart.h + matmul_transposed(block, r))
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

    zeros = jax.tree.map(jnp.zeros_like, (vectors, restart))
    carry = (dfinal, *zeros)
    inputs = (history.gates, history.start, mask, resets, dy)
    (dstate, dvectors, drestart), d = lax.scan(step, carry, inputs, reverse=not reverse)

    steps, batch, _ = dy.shape
    hidden = d.block.shape[-1] // len(block_names)
    dvectors = jax.tree.map(lambda d, v: d.astype(v.dtype), dvectors, weights.vectors)
    dr = dp = None
    if weights.r is not None:
        dr = sum_of_products(history.start.h, d.block, weights.r)
    if weights.p is not None and d.output is not None:
        output, doutput = d.output
        dp = sum_of_products(output, doutput, weights.p)
    dx_pre = d.block.reshape(steps, batch, len(block_names), hidden)[:, :, : len(cell.x_gates)]
    if d.x_only:
        shared = [dx_pre[:, :, : cell.shared_gates]]
        dx_pre = jnp.concatenate(shared + [g[:, :, None] for g in d.x_only.values()], axis=2)
    return LoopWeights(dr, dp, dvectors), dx_pre, dstate, drestart


def sum_of_products(a: Array, b: Array, like: Array) -> Array:
    """``sum_tb a[t, b, i] b[t, b, j]`` as one matmul, in the shape and dtype of a weight."""
    a, b = (v.reshape(-1, v.shape[-1]).astype(like.dtype) for v in (a, b))
    product = jnp.matmul(a.T, b, preferred_element_type=accumulator(like.dtype))
    return product.reshape(like.shape).astype(like.dtype)
