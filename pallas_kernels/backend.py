"""The only importer of Pallas: how a kernel is called, and what it may do.

The compiler behind it is Triton, which JAX deprecates as a backend of Pallas from 0.11 on. Another
compiler is another file with these functions.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Ref = Any  # a reference to an array in the GPU's memory
Precision = Literal["highest", "tf32"]

program_id = pl.program_id
span = pl.ds


def call(
    kernel: Callable[[dict[str, Any], dict[str, Any]], None],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    *,
    name: str,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    in_place: tuple[str, ...] = (),
    interpret: bool = False,
) -> dict[str, Any]:
    """Launches ``kernel(input_refs, output_refs)`` once for each point of the grid.

    Args:
        kernel: reads and writes references, whole arrays each.
        inputs: trees of arrays by name; None is an empty tree.
        outputs: trees of `jax.ShapeDtypeStruct` by name.
        name: of the kernel, as profilers and the HLO show it.
        grid: up to three sizes.
        warps: of 32 threads, for each program.
        stages: of the software pipeline of loops with a matmul.
        in_place: outputs that take the memory of the input of the same name.
        interpret: run in Pallas' interpreter, on any machine.

    Returns:
        arrays by the names of ``outputs``.
    """
    where = jax.typeof(jax.tree.leaves(inputs)[0])
    outputs = jax.tree.map(lambda out: varying_like(out, where), outputs)
    in_index, out_index = (
        jax.tree.unflatten(tree, range(tree.num_leaves))
        for tree in (jax.tree.structure(inputs), jax.tree.structure(outputs))
    )
    aliases = {
        i: o
        for key in in_place
        for i, o in zip(
            jax.tree.leaves(in_index[key]), jax.tree.leaves(out_index[key]), strict=True
        )
    }

    def body(*refs: Ref) -> None:
        count = jax.tree.structure(inputs).num_leaves
        kernel(
            jax.tree.unflatten(jax.tree.structure(inputs), refs[:count]),
            jax.tree.unflatten(jax.tree.structure(outputs), refs[count:]),
        )

    body.__name__ = name
    results = pl.pallas_call(
        body,
        grid=grid,
        out_shape=jax.tree.leaves(outputs),
        input_output_aliases=aliases,
        name=name,
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
    )(*jax.tree.leaves(inputs))
    return jax.tree.unflatten(jax.tree.structure(outputs), results)


def varying_like(out: jax.ShapeDtypeStruct, where: Any) -> jax.ShapeDtypeStruct:
    """The output's type, varying over the mesh axes that an input varies over in a shard_map."""
    return jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=where.manual_axis_type)


def load(ref: Ref, where: tuple[Any, ...], valid: jax.Array | None = None) -> jax.Array:
    """``ref[where]``; 0 where ``valid`` is False, whatever lies there."""
    return triton.load(ref.at[indices(where)], mask=valid, other=None if valid is None else 0)


def store(ref: Ref, where: tuple[Any, ...], value: jax.Array, valid: jax.Array | None) -> None:
    """``ref[where] = value`` in the reference's dtype, left alone where ``valid`` is False."""
    triton.store(ref.at[indices(where)], value.astype(ref.dtype), mask=valid)


def indices(where: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same indices; Pallas' interpreter wants numbers with a dtype."""
    return tuple(np.int32(i) if isinstance(i, int) else i for i in where)


def dot(
    a: jax.Array, b: jax.Array, precision: Precision = "highest", *, transpose_b: bool = False
) -> jax.Array:
    """``a @ b`` of two tiles, or ``a @ b.T``, summed in float32.

    Args:
        a: ``[M, K]`` with M and K at least 16, cast to the dtype of b.
        b: ``[K, N]``, or ``[N, K]`` to be transposed.
        precision: of float32 operands: in full, or rounded to TF32.
        transpose_b: multiply with b transposed.
    """
    how = lax.Precision.HIGHEST if precision == "highest" else lax.Precision.HIGH
    return lax.dot_general(
        a.astype(b.dtype),
        b,
        (((1,), (1 if transpose_b else 0,)), ((), ())),
        precision=how,
        preferred_element_type=jnp.float32,
    )
