"""The gradient of a batch that devices and micro-batches share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrnn._typing import Array
from jaxrnn.parallel.mesh import EVERYWHERE
from jaxrnn.precision import in_float32

# (params, rows, shared, numbers of the rows [B]) -> (value [], (sums, state))
Objective = Callable[[Any, Any, Any, Array], tuple[Array, tuple[Any, Any]]]


def sharded_gradients(
    objective: Objective,
    mesh: Mesh,
    *,
    row_specs: Any,
    state_specs: Any,
    param_specs: Any = EVERYWHERE,
    micro_batches: int = 1,
) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """Returns ``run(params, rows, shared) -> (gradients, sums, state)``.

    Each device computes the gradient of its rows, one micro-batch after another, and what it has
    gathered is added up over the devices once. The objective has to be a sum over rows: a mean
    divides by the number of the whole batch, which comes in by ``shared``. (A mean of the devices'
    means is another number where they differ in padding.)

    Args:
        objective: ``(params, rows, shared, numbers) -> (value, (sums, state))`` of some rows, whose
            ``numbers [B]`` in the whole batch are given for what is random. ``sums``, a tree of
            numbers ``[]``, are added up likewise. ``state`` is a tree of arrays with rows in them.
        mesh: its axis "data" shares the rows.
        row_specs: where the rows are in the arrays of ``rows``: `PartitionSpec`s with "data" at the
            batch axis, a prefix of the tree. Arrays without it are for all rows.
        state_specs: the same for ``state``.
        param_specs: how the parameters are spread over the other axes; a prefix.
        micro_batches: into how many a device cuts its rows, to save memory.
    """

    def on_device(params: Any, rows: Any, shared: Any) -> tuple[Any, Any, Any]:
        # As values that may differ by device, so that no gradient is summed over them on the way.
        params = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        numbers = row_numbers(rows, row_specs)

        def piece(total: Any, part: tuple[Any, Array]) -> tuple[Any, Any]:
            gradients, aside = jax.grad(objective, has_aux=True)(params, part[0], shared, part[1])
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients), aside

        total = in_float32(jax.tree.map(jnp.zeros_like, params))
        if micro_batches == 1:
            total, (sums, state) = piece(total, (rows, numbers))
        else:
            parts = cut((rows, numbers), (row_specs, PartitionSpec("data")), micro_batches)
            total, (sums, states) = lax.scan(piece, total, parts)
            sums = jax.tree.map(lambda a: jnp.sum(a, axis=0), in_float32(sums))
            state = join(states, state_specs)
        gradients, sums = lax.psum((total, in_float32(sums)), "data")
        return gradients, sums, state

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(param_specs, row_specs, EVERYWHERE),
        out_specs=(param_specs, EVERYWHERE, state_specs),
    )


def row_numbers(rows: Any, specs: Any) -> Array:
    """The numbers of this device's rows in the whole batch, integers ``[B]``."""
    sizes = set()
    map_rows(lambda a, axis: sizes.add(a.shape[axis]), rows, specs)
    (size,) = sizes
    return lax.axis_index("data") * size + jnp.arange(size)


def cut(tree: Any, specs: Any, count: int) -> Any:
    """Cuts the batch axis of each array into ``count`` pieces, along a new leading axis."""

    def cut_one(a: Array, axis: int) -> Array:
        shape = (*a.shape[:axis], count, a.shape[axis] // count, *a.shape[axis + 1 :])
        return jnp.moveaxis(a.reshape(shape), axis, 0)

    return map_rows(cut_one, tree, specs, lambda a: jnp.broadcast_to(a, (count, *a.shape)))


def join(tree: Any, specs: Any) -> Any:
    """The inverse of `cut`."""

    def join_one(a: Array, axis: int) -> Array:
        a = jnp.moveaxis(a, 0, axis)
        return a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])

    return map_rows(join_one, tree, specs, lambda a: a[-1])


def map_rows(
    of_rows: Callable[[Array, int], Any],
    tree: Any,
    specs: Any,
    of_others: Callable[[Array], Any] = lambda a: a,
) -> Any:
    """Maps arrays with a batch axis by ``of_rows(array, axis)`` and the others by ``of_others``."""

    def of_one(spec: PartitionSpec, leaves: Any) -> Any:
        axes = [axis for axis, name in enumerate(spec) if name == "data"]
        one = (lambda a: of_rows(a, axes[0])) if axes else of_others
        return jax.tree.map(one, leaves)

    return jax.tree.map(of_one, specs, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))
