"""Arrays inside a `jax.shard_map`."""

from typing import Any

import jax
from jax import lax


def vary_together(*trees: Any) -> tuple[Any, ...]:
    """Arrays that differ from device to device over the same mesh axes, as a loop carries them.

    A replicated parameter beside a sharded input becomes one that may differ; by the transpose of
    that, its gradient is the sum over the devices, taken once. Outside of a `jax.shard_map`, and
    under ``check_vma=False``, nothing changes.
    """

    def varying(a: Any) -> frozenset[str]:
        return jax.typeof(a).manual_axis_type.varying

    axes = frozenset().union(*map(varying, jax.tree.leaves(trees)))

    def cast(a: Any) -> Any:
        missing = tuple(sorted(axes - varying(a)))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(cast, trees)
