"""What a user may pass to `recurrence`, and what is said where it does not fit."""

import jax.numpy as jnp

from jaxrnn._typing import Array, ArrayLike, State
from jaxrnn.cells.base import Cell, LoopWeights


def floating(x: Array) -> None:
    """Refuses inputs that are no features; token ids, of any shape, are the usual case."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(
            f"x should be floating point features, got {jnp.result_type(x)}; "
            "token ids go through an embedding first, for example flax.nnx.Embed"
        )


def inputs(x: Array) -> tuple[int, int]:
    """T and B of an input ``[T, B, I]``."""
    floating(x)
    if jnp.ndim(x) != 3:
        raise ValueError(f"x should be [T, B, I], three axes, got shape {jnp.shape(x)}")
    return x.shape[0], x.shape[1]


def cell(cell: Cell, weights: LoopWeights) -> None:
    """Refuses a cell that does not keep to the contract of `jaxrnn.Cell`."""
    shared = cell.shared_gates
    if cell.x_gates[:shared] != cell.h_gates[:shared]:
        raise ValueError(
            f"the gates that {cell.name} has both in x_gates and h_gates should come first, in one "
            f"order, in both, got {cell.x_gates} and {cell.h_gates}"
        )
    names = set(cell.x_gates + cell.h_gates)
    if unknown := [g for g in cell.sigmoid_gates + cell.tanh_gates if g not in names]:
        raise ValueError(f"{cell.name} activates {unknown[0]!r}, which is none of its gates")
    if not cell.h_gates:
        return
    if "h" not in cell.state_names or weights.r is None:
        raise ValueError(
            f"{cell.name} has h_gates, so it needs a field h in its state_type and a matrix r in "
            "its loop_weights"
        )
    if weights.r.ndim != 3 or weights.r.shape[1] != len(cell.h_gates):
        raise ValueError(
            f"r of {cell.name} should be [S, Gh, H] with Gh = {len(cell.h_gates)}, "
            f"got {weights.r.shape}"
        )


def state(name: str, given: State, wanted: State) -> State:
    """A given state in the type, shapes and dtypes of the wanted one."""
    fields = wanted._fields
    if (
        not isinstance(given, tuple)
        or getattr(given, "_fields", fields) != fields
        or (len(given) != len(fields))
    ):
        raise ValueError(
            f"the state of {name} should be {type(wanted).__name__}{fields}, "
            f"got {type(given).__name__}"
        )
    leaves = []
    for field, leaf, like in zip(fields, given, wanted, strict=True):
        if jnp.shape(leaf) != like.shape:
            raise ValueError(
                f"state.{field} of {name} should be [B, ...] = {like.shape}, got {jnp.shape(leaf)}"
            )
        leaves.append(jnp.asarray(leaf, like.dtype))
    return type(wanted)(*leaves)


def flags(name: str, value: ArrayLike | None, steps: int, batch: int) -> Array | None:
    """Booleans ``[T, B]`` of booleans or integers; None stays None."""
    if value is None:
        return None
    value = jnp.asarray(value)
    if value.shape != (steps, batch):
        raise ValueError(f"{name} should be [T, B] = ({steps}, {batch}), got {value.shape}")
    if not (value.dtype == bool or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{name} should be booleans or integers, got {value.dtype}")
    return value != 0


def lengths(value: ArrayLike | None, batch: int) -> Array | None:
    """Integers ``[B]``; None stays None."""
    if value is None:
        return None
    value = jnp.asarray(value)
    if value.shape != (batch,):
        raise ValueError(f"lengths should be [B] = ({batch},), got {value.shape}")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"lengths should be integers, got {value.dtype}")
    return value


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuses a value that is neither None nor one of the names."""
    if value is not None and value not in allowed:
        names = ", ".join(f'"{option}"' for option in allowed)
        raise ValueError(f"{name} should be None or one of {names}, got {value!r}")


def bound(name: str, value: float | None) -> None:
    """Refuses a bound that leaves nothing; None is none."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} should be above 0, or None, got {value}")


def rate(name: str, value: float) -> None:
    """Refuses what is no probability."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} should be between 0 and 1, got {value}")
