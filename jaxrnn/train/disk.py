"""A full disk, said in one sentence."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax

from jaxrnn.train.errors import UserError

# What Orbax writes besides the arrays: some 60 KiB for a small model, with a margin.
_OVERHEAD = 2**20


def check_space(folder: pathlib.Path, arrays: Any) -> None:
    """Raises before a save that has no room: Orbax, once it writes, fails with many messages.

    Args:
        folder: where the checkpoint goes.
        arrays: the tree to be saved.

    Raises:
        UserError: the disk has not the space.
    """
    wanted = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)) + _OVERHEAD
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise _full(folder, f"{wanted / 2**20:,.1f} MiB are wanted, {free / 2**20:,.1f} are free")


@contextlib.contextmanager
def full_disk_said(folder: pathlib.Path) -> Iterator[None]:
    """Turns a failure for want of space, which Orbax raises as several types, into a sentence."""
    try:
        yield
    except Exception as error:
        if "No space left on device" not in str(error):
            raise
        raise _full(folder, "no space is left") from error


def _full(folder: pathlib.Path, what: str) -> UserError:
    return UserError(
        f"the disk is full, so no checkpoint could be saved in {folder} ({what}); free some space "
        "and run the same command again, it goes on from the checkpoint before"
    )
