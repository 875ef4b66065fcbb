"""Named tensors of other libraries: reading them, and what their names and shapes have to be."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

Weights = Mapping[str, Any] | str | os.PathLike[str]


def read(weights: Weights, prefix: str = "") -> dict[str, np.ndarray]:
    """The tensors whose names start with ``prefix``, by their whole names.

    Args:
        weights: a mapping of names to arrays or torch tensors, or the path of a safetensors file.
        prefix: what the names have in front of them, ``"encoder.rnn."``.

    Returns:
        NumPy arrays.

    Raises:
        ValueError: for a file of another kind, and where no name starts with ``prefix``.
    """
    if isinstance(weights, Mapping):
        names = list(weights)
        found = {name: as_numpy(weights[name]) for name in names if name.startswith(prefix)}
    else:
        names, found = read_safetensors(Path(weights), prefix)
    if not found:
        raise ValueError(
            f"no tensor's name starts with {prefix!r}, the names are {', '.join(sorted(names))}"
        )
    return found


def read_safetensors(path: Path, prefix: str) -> tuple[list[str], dict[str, np.ndarray]]:
    """All names of a safetensors file, and the tensors whose names start with ``prefix``."""
    if path.suffix != ".safetensors":
        raise ValueError(
            f"the weights should be in a .safetensors file, got {path.name}: pickled files can run "
            "any code and are not read"
        )
    from safetensors import safe_open  # pyright: ignore[reportMissingImports]

    with safe_open(path, framework="numpy") as file:
        names = list(file.keys())
        return names, {name: file.get_tensor(name) for name in names if name.startswith(prefix)}


def as_numpy(value: Any) -> np.ndarray:
    """A torch tensor or anything that is like an array, as a NumPy array."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    value = value.detach().cpu()
    if str(value.dtype) == "torch.bfloat16":  # which torch does not hand to NumPy
        return value.float().numpy().astype(jnp.bfloat16)
    return value.numpy()


def check_names(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Refuses sets of names that differ, and lists what is missing and what is unexpected."""
    found, wanted = set(found), set(wanted)
    if found != wanted:
        parts = {"missing": wanted - found, "unexpected": found - wanted}
        lists = [f"{word}: {', '.join(sorted(names))}" for word, names in parts.items() if names]
        raise ValueError(f"the names are not those of {what}; {'; '.join(lists)}")


def check_shape(name: str, array: Any, axes: str, wanted: tuple[int, ...]) -> None:
    """Refuses another shape than the wanted one, whose axes are named by ``axes``."""
    if tuple(array.shape) != wanted:
        raise ValueError(f"`{name}` should be {axes} = {wanted}, got {tuple(array.shape)}")


def check_axes(name: str, array: Any, axes: str) -> None:
    """Refuses an array with another number of axes than ``axes``, "[B, H]", has names."""
    if array.ndim != axes.count(",") + 1:
        raise ValueError(f"`{name}` should be {axes}, got shape {tuple(array.shape)}")
