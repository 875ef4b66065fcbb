"""Trees of arrays compared leaf by leaf, so that a message can name the first that differs."""

import zlib
from typing import Any

import jax
import numpy as np


def by_path(tree: Any) -> dict[str, Any]:
    """Returns {path: leaf}; an index and an attribute look the same, as they do on disk."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "/".join(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in leaves
    }


def first_difference(wanted: Any, found: Any) -> tuple[str, str, str] | None:
    """Returns (path, wanted, found) of the first leaf of another shape or dtype, or None."""
    wanted, found = by_path(wanted), by_path(found)
    for path in [*wanted, *found]:
        pair = _describe(wanted.get(path)), _describe(found.get(path))
        if pair[0] != pair[1]:
            return path, *pair
    return None


def checksums(tree: Any) -> dict[str, int]:
    """Returns {path: CRC-32 of the bytes}: Orbax's files have none, a flipped bit goes unseen."""
    return {path: zlib.crc32(np.asarray(leaf).tobytes()) for path, leaf in by_path(tree).items()}


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "absent"
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
