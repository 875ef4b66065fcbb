"""The mesh of devices, and arrays on it."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# A whole copy on each device.
EVERYWHERE = PartitionSpec()


def make_mesh(data: int = 0, model: int = 1) -> Mesh:
    """Returns a mesh with the axes "data", whose devices share the batch, and "model".

    Args:
        data: devices along "data"; 0 takes all that are left.
        model: devices along "model".

    Raises:
        ValueError: there are not so many devices, or they cannot be divided.
    """
    count = jax.device_count()
    if model < 1 or data < 0 or (data or 1) * model > count:
        raise ValueError(
            f"{data or 1} x {model} devices are wanted (data x model), and there are {count}"
        )
    if data == 0:
        check_divides("the number of devices", count, "devices along the model axis", model)
        data = count // model
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def check_divides(name: str, size: int, parts_name: str, parts: int) -> None:
    """Checks that a size can be shared equally.

    Args:
        name: of the size, for the message.
        size: what is shared.
        parts_name: of the parts, for the message.
        parts: into how many.

    Raises:
        ValueError: it cannot; the message has the nearest sizes that can.
    """
    if size % parts:
        below, above = size // parts * parts, -(-size // parts) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"{name} is {size}, which cannot be shared equally by {parts} {parts_name}; the "
            f"nearest that can: {nearest}"
        )


def put(mesh: Mesh, tree: Any, specs: Any = EVERYWHERE) -> Any:
    """Puts arrays on the devices of a mesh, each process on its own ones.

    Args:
        mesh: the mesh.
        tree: arrays, the whole of each, the same in all processes.
        specs: `PartitionSpec`s, a prefix of the tree.
    """

    def place(spec: PartitionSpec, leaves: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: _place(leaf, sharding), leaves)

    return jax.tree.map(place, specs, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
        # A copy: a donated array is given away once, and leaves may share one.
        return jax.device_put(leaf, sharding, may_alias=False)
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
