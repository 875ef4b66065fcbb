"""The layout of jaxrnn's own parameters and states, as all the converters see it."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn._typing import Params, State
from jaxrnn.convert.tensors import check_axes, check_names, check_shape

Kind = Literal["lstm", "gru", "mgu", "elman"]

GATES: dict[Kind, int] = {"lstm": 4, "gru": 3, "mgu": 2, "elman": 1}
OPTIONAL = {"lstm": ("b", "p"), "gru": ("b", "b_hn"), "mgu": ("b", "b_hn"), "elman": ("b",)}
# The cells that torch and Keras have as well, by their number of gates.
KINDS: dict[int, Kind] = {GATES[kind]: kind for kind in GATES if kind != "mgu"}
DIRECTIONS = ("forward", "backward")


def stack(layers: Sequence[Sequence[Params]]) -> dict[str, dict[str, Params]]:
    """Parameters of a stack, as jax arrays, of those of its layers' directions.

    They are copies, for jax may otherwise share memory with a torch module that trains on.
    """
    forms = {(len(layer), *cell_form(cell)) for layer in layers for cell in layer}
    if len(forms) > 1:
        raise ValueError("the layers of a stack should be of one cell, with or without biases")
    return {
        f"layer_{index}": dict(
            zip(DIRECTIONS[: len(layer)], jax.tree.map(jnp.array, layer), strict=True)
        )
        for index, layer in enumerate(layers)
    }


def cell_form(params: Params) -> tuple[Any, ...]:
    """What the cells of a stack have in common; only a first layer may need a highway matrix."""
    return params["w_x"].shape[1], *sorted(set(params) - {"w_highway"})


def unstack(params: Params) -> list[dict[str, Params]]:
    """``{path: parameters}`` of the directions of each layer; the inverse of `stack`."""
    check_names(params, [f"layer_{index}" for index in range(max(len(params), 1))], "a stack")
    layers = []
    for index in range(len(params)):
        layer, name = params[f"layer_{index}"], f"layer_{index}"
        directions = DIRECTIONS[: max(len(params["layer_0"]), 1)]
        check_names(layer, directions, f"{name}'s directions")
        layers.append({f"{name}.{direction}": layer[direction] for direction in directions})
    return layers


def cell_kind(params: Params, path: str, target: str, kinds: dict[int, Kind] = KINDS) -> Kind:
    """The kind of one cell's parameters, after a look at their names and shapes.

    Args:
        params: ``w_x [I, G, H]``, ``r [S, G, H]`` and, where there are such, ``b [G, H]``,
            ``b_hn [H]`` of a GRU or MGU and ``p [H, S]`` of an LSTM.
        path: what stands in front of the names in messages.
        target: whom the parameters are for, in messages.
        kinds: what the target has, by the number of gates.

    Raises:
        ValueError: for other names, shapes and kinds.
    """
    if "w_x" not in params or "r" not in params:
        raise ValueError(f"{target} takes cells with `w_x` and `r`, {path} has {sorted(params)}")
    check_axes(f"{path}.w_x", params["w_x"], "[I, G, H]")
    _, gates, hidden = params["w_x"].shape
    if gates not in kinds:
        known = ", ".join(f"{number} ({kind})" for number, kind in kinds.items())
        raise ValueError(f"`{path}.w_x` should have {known} gates for {target}, got {gates}")
    kind = kinds[gates]
    optional = [name for name in OPTIONAL[kind] if name in params]
    check_names(params, ["w_x", "r", *optional], f"a plain {kind} cell at {path}")
    out = params["p"].shape[-1] if "p" in params else hidden
    axes = {
        "r": ("[S, G, H]", (out, gates, hidden)),
        "b": ("[G, H]", (gates, hidden)),
        "b_hn": ("[H]", (hidden,)),
        "p": ("[H, S]", (hidden, out)),
    }
    for name in ["r", *optional]:
        check_shape(f"{path}.{name}", params[name], *axes[name])
    return kind


def refuse_projection(params: Params, path: str, target: str) -> None:
    """For libraries that have none."""
    if "p" in params:
        raise ValueError(f"{target} has no projection, but there is a `{path}.p`")


def refuse_reset_before(params: Params, path: str, target: str) -> None:
    """For libraries whose GRU (and MGU) has the reset gate after the matmul alone."""
    if "b" in params and "b_hn" not in params:
        raise ValueError(
            f"{target} resets after the matmul and needs a `{path}.b_hn`; "
            "a cell with biases but none of that name resets before it"
        )


def refuse_merged(name: str, matrix: Any, in_features: int | None) -> None:
    """For libraries whose layers get the outputs of both directions side by side."""
    if in_features is not None:
        check_shape(name, matrix, "[D S, ...]", (in_features, *matrix.shape[1:]))


def split_gates(matrix: Any, gates: int) -> Any:
    """``[..., G H]`` to ``[..., G, H]``."""
    return matrix.reshape(*matrix.shape[:-1], gates, -1)


def join_gates(matrix: Any) -> Any:
    """``[..., G, H]`` to ``[..., G H]``."""
    return matrix.reshape(*matrix.shape[:-2], -1)


def split_bias(b_x: np.ndarray, b_h: np.ndarray) -> dict[str, np.ndarray]:
    """``b`` and ``b_hn`` of two biases ``[G, H]`` in our order of gates.

    A GRU keeps the recurrent bias of n apart: the reset gate multiplies it. All others are summed.
    """
    b = b_x + b_h
    if len(b) != GATES["gru"]:
        return {"b": b}
    b[2] = b_x[2]
    return {"b": b, "b_hn": b_h[2]}


def join_bias(params: Params) -> tuple[np.ndarray, np.ndarray]:
    """Two biases ``[G, H]``, of the inputs and recurrent; the inverse of `split_bias`."""
    b_x = np.asarray(params["b"])
    b_h = np.zeros_like(b_x)
    if "b_hn" in params:
        b_h[2] = params["b_hn"]
    return b_x, b_h


def join_states(states: Sequence[State], bidirectional: bool) -> tuple[Any, ...]:
    """A stack's state of all layers' and directions' states in order, as jax arrays."""
    states = jax.tree.map(jnp.array, states)
    return tuple(zip(states[::2], states[1::2], strict=True)) if bidirectional else tuple(states)


def split_states(state: tuple[Any, ...]) -> list[tuple[State, ...]]:
    """The directions' states of each layer; the inverse of `join_states`."""
    return [layer if is_pair(layer) else (layer,) for layer in state]


def is_pair(layer: Any) -> bool:
    """Whether this is (forward, backward) rather than a state, which is a named tuple."""
    return isinstance(layer, tuple) and not hasattr(layer, "_fields")
