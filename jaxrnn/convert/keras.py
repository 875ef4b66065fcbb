"""Keras 3's ``LSTM``, ``GRU`` and ``SimpleRNN``: their weights and states."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrnn._typing import Params, State
from jaxrnn.convert.layout import (
    GATES,
    KINDS,
    cell_kind,
    join_bias,
    join_gates,
    join_states,
    refuse_projection,
    split_bias,
    split_gates,
    split_states,
    stack,
    unstack,
)
from jaxrnn.convert.tensors import as_numpy, check_axes, check_shape

# Keras' order of gates by ours, and ours by Keras': of a GRU, z stands before r.
ORDER = {GATES["lstm"]: [0, 1, 2, 3], GATES["gru"]: [1, 0, 2], GATES["elman"]: [0]}
NAMES = ("kernel", "recurrent_kernel", "bias")


def from_keras(*layers: Sequence[Any]) -> Params:
    """Parameters of Keras' ``LSTM``, ``GRU`` and ``SimpleRNN``, one- or bidirectional.

    Which layer it is, is read off the shapes. A bias ``[2, 3H]`` is that of a GRU with
    ``reset_after=True``, and gives a ``b_hn``; one of ``[3H]`` is that of ``reset_after=False``.
    Keras' activations are taken to be the default ones: they are not in the weights.

    Args:
        *layers: for each layer its ``get_weights()``: ``kernel [I, G H]``,
            ``recurrent_kernel [H, G H]`` and, where there is one, ``bias``; those of a
            ``Bidirectional`` are the forward layer's and then the backward one's.

    Returns:
        parameters of a stack.

    Raises:
        ValueError: for another number of arrays, and for shapes that do not fit.
    """
    result = []
    for index, weights in enumerate(layers):
        arrays = [as_numpy(array) for array in weights]
        if len(arrays) not in (2, 3, 4, 6):
            raise ValueError(
                f"the weights of layer {index} should be kernel, recurrent_kernel and bias or only "
                f"the former two, of one direction or of two, got {len(arrays)} arrays"
            )
        directions = 1 if len(arrays) < 4 else 2
        each = len(arrays) // directions
        result.append(
            [
                cell_from_keras(arrays[start : start + each], f"layer {index} ")
                for start in range(0, len(arrays), each)
            ]
        )
    return stack(result)


def cell_from_keras(arrays: list[np.ndarray], path: str) -> Params:
    """Parameters of one layer and direction."""
    kernel, recurrent = arrays[:2]
    for name, axes, value in zip(NAMES, ("[I, G H]", "[H, G H]"), arrays, strict=False):
        check_axes(path + name, value, axes)
    hidden, columns = recurrent.shape
    gates = columns // max(hidden, 1)
    if gates not in KINDS or columns != gates * hidden:
        raise ValueError(
            f"`{path}recurrent_kernel` should be [H, 4H] of an LSTM, [H, 3H] of a GRU or [H, H] of "
            f"a SimpleRNN, got {recurrent.shape}"
        )
    check_shape(f"{path}kernel", kernel, f"[I, {gates}H]", (len(kernel), columns))

    def reordered(matrix: np.ndarray) -> np.ndarray:
        return split_gates(matrix, gates)[..., ORDER[gates], :]

    params = {"w_x": reordered(kernel), "r": reordered(recurrent)}
    if len(arrays) > len(params):
        name, bias = f"{path}bias", arrays[2]
        if gates == GATES["gru"] and bias.ndim > 1:
            check_shape(name, bias, "[2, 3H]", (2, columns))
            return params | split_bias(*reordered(bias))
        check_shape(name, bias, f"[{gates}H]", (columns,))
        params["b"] = reordered(bias)
    return params


def to_keras(params: Params) -> list[list[np.ndarray]]:
    """Weights of Keras' ``LSTM``, ``GRU`` and ``SimpleRNN``.

    Args:
        params: parameters of a stack of plain LSTM, GRU or Elman cells.

    Returns:
        for each layer the list that its ``set_weights`` takes, or that of a ``Bidirectional``. A
        GRU with a ``b_hn`` is for ``reset_after=True``, one with ``b`` alone for
        ``reset_after=False``.

    Raises:
        ValueError: for cells that Keras does not have.
    """
    return [
        [array for path, cell in layer.items() for array in cell_to_keras(cell, path)]
        for layer in unstack(params)
    ]


def cell_to_keras(params: Params, path: str) -> list[np.ndarray]:
    """The inverse of `cell_from_keras`."""
    gates = GATES[cell_kind(params, path, "Keras")]
    refuse_projection(params, path, "Keras")

    def reordered(matrix: Any) -> np.ndarray:
        return join_gates(np.asarray(matrix)[..., ORDER[gates], :])

    arrays = [reordered(params["w_x"]), reordered(params["r"])]
    if "b" in params:
        both = "b_hn" in params
        arrays.append(reordered(np.stack(join_bias(params)) if both else params["b"]))
    return arrays


def state_from_keras(state_type: type, *layers: Sequence[Any]) -> tuple[State, ...]:
    """A layer's state of the states that Keras' layers return.

    Args:
        state_type: `jaxrnn.cells.LSTMState`, `GRUState` or `ElmanState`.
        *layers: for each layer ``[h, c]`` of an LSTM or ``[h]`` of the others, each ``[B, H]``:
            what ``return_state=True`` gives after the outputs. A ``Bidirectional`` has the
            backward direction's after the forward one's.

    Returns:
        a tuple over layers of states, or of pairs (forward, backward).

    Raises:
        ValueError: for another number of arrays.
    """
    fields = state_type._fields  # pyright: ignore[reportAttributeAccessIssue]
    each, counts = len(fields), {len(layer) for layer in layers}
    if counts not in ({each}, {2 * each}):
        raise ValueError(
            f"each layer's state should be {', '.join(fields)} of one direction or of two, "
            f"got {[len(layer) for layer in layers]} arrays"
        )
    states = [
        state_type(*map(as_numpy, layer[start : start + each]))
        for layer in layers
        for start in range(0, len(layer), each)
    ]
    return join_states(states, bidirectional=counts == {2 * each})


def state_to_keras(state: tuple[Any, ...]) -> list[list[np.ndarray]]:
    """The inverse of `state_from_keras`: for each layer the list that ``initial_state`` takes."""
    return [
        [np.asarray(leaf) for entry in layer for leaf in entry] for layer in split_states(state)
    ]
