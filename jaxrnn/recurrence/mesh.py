"""Many devices: a batch that is split over explicit axes, or under a sharded `jax.jit`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

Arrays = dict[str, Any]


def over_explicit_batch(run: Callable[[Any], Any], arrays: Any, x: Any, axes: Any) -> Any:
    """``run(arrays)``, each device on its rows where the type of ``x`` says that they are split.

    With explicit axes of a mesh (the default of `jax.make_mesh` from JAX 0.11) the split is part of
    the type, and a loop's carry and a kernel's arrays would have to have it too.

    Args:
        run: from ``arrays`` to trees of ``[T, B, ...]``, of ``[B, ...]`` and of ``[T, B, ...]``.
        arrays: a named tuple of trees.
        x: the type of an array ``[T, B, ...]``.
        axes: which axis of the leaves of each is the batch; None: none is.
    """
    split = x.sharding.spec[1] if len(x.sharding.spec) > 1 else None
    if split is None or split is PartitionSpec.UNCONSTRAINED:
        return run(arrays)

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, split)

    specs = type(arrays)(*map(spec, axes))
    whole = [
        jax.reshard(tree, jax.tree.map(lambda _, s=s: s, tree))
        for tree, s in zip(arrays, specs, strict=True)
    ]
    mapped = jax.shard_map(
        run,
        in_specs=(specs,),
        out_specs=(spec(1), spec(0), spec(1)),
        axis_names=frozenset(split if isinstance(split, tuple) else (split,)),
    )
    return mapped(type(arrays)(*whole))


def over_batch(
    run: Callable[[Arrays], Arrays], arrays: Arrays, batch_axis: Mapping[str, int | None]
) -> Arrays:
    """``run(arrays)``, where the compiler may give each device its rows of the batch.

    XLA knows nothing of what a kernel does, so it would gather the whole batch on every device.

    Args:
        run: from arrays by name to arrays by name; treats each row of the batch on its own.
        arrays: trees by name.
        batch_axis: which axis of the arrays of a name is the batch, by all names that go in or
            come out; None: none is, and every device has all of it.
    """
    types = jax.eval_shape(run, arrays)

    def axes(tree: Arrays) -> list[tuple[int, int | None]]:
        return [
            (leaf.ndim, batch_axis[name])
            for name in sorted(tree)
            for leaf in jax.tree.leaves(tree[name])
        ]

    def partition(mesh: Any, shapes: tuple[Arrays], results: Arrays) -> tuple:
        found = zip(axes(arrays), jax.tree.leaves(shapes), strict=True)
        specs = [
            leaf.sharding.spec[axis]
            for (_, axis), leaf in found
            if axis is not None and len(leaf.sharding.spec) > axis
        ]
        split = next((spec for spec in specs if spec is not None), None)

        def shardings(tree: Arrays) -> Any:
            leaves = [
                NamedSharding(
                    mesh, PartitionSpec(*(split if n == axis else None for n in range(ndim)))
                )
                for ndim, axis in axes(tree)
            ]
            return jax.tree.unflatten(jax.tree.structure(tree), leaves)

        return mesh, run, shardings(types), (shardings(arrays),)

    partitioned = custom_partitioning(run)
    partitioned.def_partition(partition, sharding_rule=sharding_rule(axes(arrays), axes(types)))

    @jax.custom_batching.custom_vmap
    def batchable(arrays: Arrays) -> Arrays:
        return partitioned(arrays)

    @batchable.def_vmap
    def _(axis_size: int, batched: Any, arrays: Arrays) -> tuple[Arrays, Any]:
        in_axes = jax.tree.map(lambda flag: 0 if flag else None, tuple(batched))
        done = jax.vmap(run, in_axes=in_axes, axis_size=axis_size)(arrays)
        return done, jax.tree.map(lambda _: True, done)

    return batchable(arrays)


def sharding_rule(
    operands: list[tuple[int, int | None]], results: list[tuple[int, int | None]]
) -> SdyShardingRule:
    """All arrays may be split along their batch axis, and along no other.

    Args:
        operands: number of axes and batch axis of each array.
        results: likewise.
    """
    others: list[str] = []

    def mapping(ndim: int, batch_axis: int | None) -> ArrayMapping:
        names = []
        for axis in range(ndim):
            if axis == batch_axis:
                names.append("batch")
            else:
                others.append(f"other{len(others)}")
                names.append(others[-1])
        return ArrayMapping(*names)

    mapped = [tuple(mapping(*array) for array in arrays) for arrays in (operands, results)]
    return SdyShardingRule(*mapped, need_replication_factors=tuple(others))
