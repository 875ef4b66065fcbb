"""Checkpoints of a run, as plain Orbax; the only file that imports it.

A run's directory has `checkpoints/latest/<step>` with the items `state`, `progress` and `about`,
all that the run needs to go on, and `checkpoints/best/<step>` with `params`, `progress` and
`about`, of the best validation loss. Both have `checksums` of their arrays too.
"""

import contextlib
import dataclasses
import gc
import json
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxrnn.train.disk import check_space, full_disk_said
from jaxrnn.train.errors import UserError
from jaxrnn.train.leaves import by_path, checksums, first_difference
from jaxrnn.train.state import Progress, TrainState

# Each item of a finished checkpoint has this file; Orbax writes them under a temporary name and
# renames the folder of the step last.
_MARKS = {"state": "_METADATA", "params": "_METADATA", "progress": "metadata"}


class Checkpoints:
    """Saves and restores one run.

    Saving is asynchronous: it copies the arrays on their device and returns; files appear under
    their final name when they are complete. A failed save is reported by the next call.
    """

    def __init__(self, run_dir: pathlib.Path, keep: int, about: dict[str, Any]):
        """Opens, or makes, the folders, and removes what an interrupted save left behind.

        Args:
            run_dir: the run's directory.
            keep: how many of the latest checkpoints stay.
            about: what is written beside the arrays: config and versions, as JSON can hold it.
        """
        root = run_dir.resolve() / "checkpoints"
        self._about = about
        self._folders = {"latest": root / "latest", "best": root / "best"}
        self.notes = [note for folder in self._folders.values() for note in _clear(folder)]
        self._managers = {
            "latest": _manager(self._folders["latest"], keep),
            "best": _manager(self._folders["best"], 2),
        }

    def save_latest(self, state: TrainState, progress: Progress) -> None:
        """Saves everything that the run needs to go on."""
        self._save("latest", progress, state=state)

    def save_best(self, params: Any, progress: Progress) -> None:
        """Saves the parameters as the best so far; the best before them stays too.

        First the latest state has to be on disk, so that there is never a best one without it.
        """
        with full_disk_said(self._folders["latest"]):
            self._managers["latest"].wait_until_finished()
        self._save("best", progress, params=params)

    def _save(self, which: str, progress: Progress, **arrays: Any) -> None:
        manager = self._managers[which]
        if progress.step in manager.all_steps():
            return  # Stopped before the first step after a restore: it is this very state.
        check_space(self._folders[which], arrays)
        # A copy, because the next training step takes the arrays' memory for its own results.
        arrays = jax.tree.map(jnp.copy, arrays)
        jsons = {
            "progress": dataclasses.asdict(progress),
            "about": self._about,
            "checksums": checksums(arrays),
        }
        args = ocp.args.Composite(
            **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
            **{name: ocp.args.JsonSave(value) for name, value in jsons.items()},
        )
        with full_disk_said(self._folders[which]):
            manager.save(progress.step, args=args)

    def restore_latest(self, like: TrainState) -> tuple[TrainState, Progress] | None:
        """Returns the newest complete checkpoint, or None where there is none.

        Args:
            like: a state of the run's shapes and dtypes; its values are not read.

        Raises:
            UserError: the checkpoint is damaged or another model's.
        """
        folder = newest(self._folders["latest"])
        if folder is None:
            return None
        return restore(folder, "state", like), read_progress(folder)

    def restore_best(self, like: Any) -> Any | None:
        """Returns the best parameters, or None where there are none."""
        self.wait()
        folder = newest(self._folders["best"])
        return None if folder is None else restore(folder, "params", like)

    def align_best(self, params: Any, progress: Progress) -> None:
        """Makes the best checkpoint agree with a restored state.

        Args:
            params: the state's parameters. They are the best ones where the run was killed after it
                saved the state and before it saved the best.
            progress: the state's progress. It forgets a best loss whose checkpoint is lost.
        """
        manager = self._managers["best"]
        for step in [step for step in manager.all_steps() if step > progress.step]:
            manager.delete(step)
        if progress.best_loss is None or progress.best_step in manager.all_steps():
            return
        if progress.best_step == progress.step:
            self.save_best(params, progress)
        else:
            progress.best_loss = None

    def wait(self) -> None:
        """Returns when everything saved is on disk.

        Raises:
            UserError: the disk was full.
        """
        for which, manager in self._managers.items():
            with full_disk_said(self._folders[which]):
                manager.wait_until_finished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error_type: type | None, *_: Any) -> None:
        """Waits and frees Orbax's threads; an error on its way says more than another one here."""
        with contextlib.suppress(Exception) if error_type else contextlib.nullcontext():
            self.wait()
        for manager in self._managers.values():
            with contextlib.suppress(Exception):
                manager.close()


def has_checkpoint(directory: pathlib.Path, which: str) -> bool:
    """Tells whether a run's directory holds a complete checkpoint, "latest" or "best"."""
    return newest(directory / "checkpoints" / which) is not None


def find_params(directory: pathlib.Path) -> pathlib.Path:
    """Returns the checkpoint with a run's best parameters; the latest where none is the best yet.

    Raises:
        UserError: the run has no complete checkpoint.
    """
    root = directory / "checkpoints"
    folder = newest(root / "best") or newest(root / "latest")
    if folder is None:
        raise UserError(f"{directory} has no complete checkpoint yet; train until one is saved")
    return folder


def newest(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the newest complete checkpoint in a folder of steps, or None."""
    complete = [step for step in _steps(folder) if is_complete(step)]
    return max(complete, key=lambda step: int(step.name), default=None)


def is_complete(step: pathlib.Path) -> bool:
    """Tells a finished checkpoint from an emptied or half-written folder."""
    items = [item for item in ("state", "params") if (step / item).is_dir()]
    return bool(items) and all(
        (step / item / _MARKS[item]).is_file() for item in (*items, "progress")
    )


def restore(folder: pathlib.Path, item: str, like: Any) -> Any:
    """Returns the arrays of one item of a checkpoint, in the structure of `like`.

    Args:
        folder: a complete checkpoint, `…/<step>`.
        item: "state" or "params".
        like: a tree of arrays, or of shapes and dtypes. Nothing is cast: all have to agree.

    Raises:
        UserError: a leaf differs (the message names the first), or the files are damaged.
    """
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    with _reader(item) as checkpointer:
        _check_same_leaves(folder, like, _metadata(checkpointer, folder, item))
        return _read(checkpointer, folder, item, like)


def restore_params(folder: pathlib.Path, like: Any) -> Any:
    """Returns the parameters alone, also from a checkpoint that holds a whole state.

    Args:
        folder: a complete checkpoint, `…/<step>`.
        like: the parameters' structure, shapes and dtypes.

    Raises:
        UserError: a leaf differs (the message names the first), or the files are damaged.
    """
    if (folder / "params").is_dir():
        return restore(folder, "params", like)
    with _reader("state") as checkpointer:
        metadata = _metadata(checkpointer, folder, "state")
        _check_same_leaves(folder, like, metadata["params"])
        # The optimizer that made the rest of the state is not known here, only what is on disk.
        stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), metadata)
        params = by_path(_read(checkpointer, folder, "state", stored)["params"])
    return jax.tree.unflatten(jax.tree.structure(like), [params[path] for path in by_path(like)])


def _metadata(checkpointer: ocp.Checkpointer, folder: pathlib.Path, item: str) -> Any:
    """Returns the tree of shapes and dtypes of an item on disk."""
    metadata = _attempt(lambda: cast(Any, checkpointer.metadata(folder).item_metadata)[item].tree)
    if metadata is None:
        raise _damaged(folder, "its list of arrays cannot be read")
    return metadata


def _read(checkpointer: ocp.Checkpointer, folder: pathlib.Path, item: str, like: Any) -> Any:
    """Returns the arrays of an item on disk, once their bytes are known to be right."""
    args = {item: ocp.args.StandardRestore(like), "checksums": ocp.args.JsonRestore()}
    restored = _attempt(lambda: checkpointer.restore(folder, args=ocp.args.Composite(**args)))
    if restored is None:
        raise _damaged(folder, "its arrays cannot be read")
    for path, checksum in checksums({item: restored[item]}).items():
        if checksum != restored["checksums"].get(path):
            raise _damaged(folder, f"the bytes of {path} are not those that were saved")
    return jax.tree.map(_fresh, restored[item])


def _fresh(array: jax.Array) -> jax.Array:
    """Returns a copy like an array that a step has made: in JAX's own memory, and uncommitted.

    Orbax commits an array to its device, and a function compiled for one kind is compiled again
    for the other. On a mesh both kinds are alike, and the copy is a precaution.
    """
    if isinstance(array.sharding, jax.sharding.NamedSharding):
        return jnp.copy(array)
    return jnp.array(np.asarray(array), copy=True)


def read_progress(folder: pathlib.Path) -> Progress:
    """Returns the progress saved in a checkpoint.

    Raises:
        UserError: the file is damaged or was written by another version.
    """
    try:
        return Progress(**json.loads((folder / "progress" / "metadata").read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise _damaged(folder, "its progress cannot be read") from error


def _manager(folder: pathlib.Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(folder, options=options)


def _handler(item: str) -> ocp.CompositeCheckpointHandler:
    """Names the handler of every item: Orbax warns about items that it finds and cannot read."""
    handlers: dict[str, Any] = {item: ocp.StandardCheckpointHandler()}
    for name in ("progress", "about", "checksums"):
        handlers[name] = ocp.JsonCheckpointHandler()
    return ocp.CompositeCheckpointHandler(**handlers)


def _steps(folder: pathlib.Path) -> list[pathlib.Path]:
    return [f for f in folder.glob("*") if f.name.isdecimal()] if folder.is_dir() else []


def _clear(folder: pathlib.Path) -> list[str]:
    """Removes step folders that hold no checkpoint, and says what was found unfinished."""
    notes = []
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.name.isdecimal() and not is_complete(path):
            shutil.rmtree(path)
            notes.append(f"checkpoint {path} is not complete, so it was removed and is not used")
        elif "tmp" in path.name:
            notes.append(f"{path} is what an interrupted save left, so it was removed")
    return notes


def _check_same_leaves(folder: pathlib.Path, wanted: Any, found: Any) -> None:
    if difference := first_difference(wanted, found):
        path, want, have = difference
        raise UserError(
            f"the checkpoint {folder} is not of this model or optimizer: {path} is {have} there "
            f"and {want} here; use the options it was trained with, or another run.dir"
        )


@contextlib.contextmanager
def _reader(item: str) -> Iterator[ocp.Checkpointer]:
    """Gives a reader of checkpoints that keeps its own troubles to itself.

    A failing reader leaves threads and coroutines whose errors Python prints, the last ones when
    they are collected; the user gets one sentence instead.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        with ocp.Checkpointer(_handler(item)) as checkpointer:
            yield checkpointer
    finally:
        gc.collect()
        sys.unraisablehook = hook


def _attempt(read: Callable[[], Any]) -> Any:
    """Returns what a reader returns, or None where it fails.

    The exception is gone then: it holds the coroutines that are to be collected.
    """
    with contextlib.suppress(Exception):
        return read()
    return None


def _damaged(folder: pathlib.Path, reason: str) -> UserError:
    return UserError(
        f"the checkpoint {folder} is damaged: {reason}; remove that folder to go on from the "
        "checkpoint before it"
    )
