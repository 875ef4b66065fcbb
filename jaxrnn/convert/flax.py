"""Flax's recurrent cells, of linen and of nnx: their parameters and carries."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrnn._typing import Array, Params, State
from jaxrnn.cells import LSTMState
from jaxrnn.convert.layout import (
    GATES,
    OPTIONAL,
    Kind,
    cell_kind,
    is_pair,
    join_gates,
    join_states,
    refuse_projection,
    refuse_reset_before,
    split_gates,
    split_states,
    stack,
    unstack,
)
from jaxrnn.convert.tensors import check_axes, check_names, check_shape


class FlaxCell(NamedTuple):
    """Names of a Flax cell's dense layers, in our order of gates.

    One that stands for all gates has their kernels side by side.

    Attributes:
        kind: the cell.
        of_x: the dense layers of the inputs.
        of_h: the recurrent ones.
        biased: those whose biases are our ``b``.
        b_hn: the one whose bias is our ``b_hn``.
    """

    kind: Kind
    of_x: tuple[str, ...]
    of_h: tuple[str, ...]
    biased: tuple[str, ...]
    b_hn: str | None = None

    def leaves(self) -> list[str]:
        """Names of all arrays."""
        biased = (*self.biased, self.b_hn) if self.b_hn else self.biased
        return [f"{d}.kernel" for d in self.of_x + self.of_h] + [f"{d}.bias" for d in biased]


H_LSTM = ("hi", "hf", "hg", "ho")
LINEN_LSTM = FlaxCell("lstm", ("ii", "if", "ig", "io"), H_LSTM, biased=H_LSTM)

CELLS = {
    "linen.LSTMCell": LINEN_LSTM,
    "linen.OptimizedLSTMCell": LINEN_LSTM,
    "linen.GRUCell": FlaxCell(
        "gru", ("ir", "iz", "in"), ("hr", "hz", "hn"), biased=("ir", "iz", "in"), b_hn="hn"
    ),
    "linen.MGUCell": FlaxCell("mgu", ("if", "in"), ("hf", "hn"), biased=("if", "in"), b_hn="hn"),
    "linen.SimpleCell": FlaxCell("elman", ("i",), ("h",), biased=("i",)),
    "nnx.LSTMCell": FlaxCell("lstm", ("ii", "if_", "ig", "io"), H_LSTM, biased=H_LSTM),
    "nnx.OptimizedLSTMCell": FlaxCell("lstm", ("dense_i",), ("dense_h",), biased=("dense_h",)),
    "nnx.GRUCell": FlaxCell("gru", ("dense_i",), ("dense_h",), biased=("dense_i",)),
    "nnx.SimpleCell": FlaxCell("elman", ("dense_i",), ("dense_h",), biased=("dense_i",)),
}


def from_flax(*layers: Any) -> Params:
    """Parameters of Flax's LSTM, GRU, MGU and simple cells, of linen or of nnx.

    Which cell it is, is read off the names and shapes. Flax's activations are taken to be the
    default ones, and a simple cell to be without ``residual``.

    Args:
        *layers: for each layer the tree of one cell, or a pair (forward, backward) of them:
            ``variables["params"]`` of a linen cell (``["params"]["cell"]`` where it is inside
            ``linen.RNN``), or ``nnx.state(cell, nnx.Param)``, as it is or as a pure dict.

    Returns:
        parameters of a stack. ``nnx.GRUCell`` has no bias at n's recurrent product (flax#5594);
        its ``b_hn`` is 0.

    Raises:
        ValueError: for names that no cell of Flax has, and for shapes that do not fit.
    """
    return stack(
        [
            [cell_from_flax(tree) for tree in (layer if isinstance(layer, Sequence) else (layer,))]
            for layer in layers
        ]
    )


def cell_from_flax(tree: Mapping[str, Any]) -> Params:
    """Parameters of one cell."""
    arrays = named_arrays(tree)
    name, cell = recognize(arrays)
    check_names(arrays, cell.leaves(), f"a {name}")
    gates = GATES[cell.kind]
    for dense in (cell.of_x[0], cell.of_h[0]):
        check_axes(f"{dense}.kernel", arrays[f"{dense}.kernel"], "[I, H]")
    in_features = len(arrays[f"{cell.of_x[0]}.kernel"])
    hidden = len(arrays[f"{cell.of_h[0]}.kernel"])
    for leaf, value in arrays.items():
        dense, _, which = leaf.rpartition(".")
        count = gates // len(cell.of_x)
        columns, axis = count * hidden, f"{count}H" if count > 1 else "H"
        if which == "bias":
            check_shape(leaf, value, f"[{axis}]", (columns,))
        elif dense in cell.of_x:
            check_shape(leaf, value, f"[I, {axis}]", (in_features, columns))
        else:
            check_shape(leaf, value, f"[H, {axis}]", (hidden, columns))

    def joined(dense_layers: tuple[str, ...], leaf: str) -> Array:
        parts = [arrays[f"{dense}.{leaf}"] for dense in dense_layers]
        return split_gates(jnp.concatenate(parts, axis=-1), gates)

    params = {
        "w_x": joined(cell.of_x, "kernel"),
        "r": joined(cell.of_h, "kernel"),
        "b": joined(cell.biased, "bias"),
    }
    if "b_hn" in OPTIONAL[cell.kind]:
        given = cell.b_hn is not None
        params["b_hn"] = arrays[f"{cell.b_hn}.bias"] if given else jnp.zeros_like(params["b"][0])
    return params


def named_arrays(tree: Mapping[str, Any], path: str = "") -> dict[str, Array]:
    """``{"ii.kernel": array}`` of a tree of arrays or of nnx' variables."""
    arrays = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            arrays |= named_arrays(value, f"{path}{key}.")
        else:
            arrays[f"{path}{key}"] = jnp.asarray(value)
    return arrays


def recognize(arrays: dict[str, Array]) -> tuple[str, FlaxCell]:
    """The cell whose names and number of gates are closest to these."""

    def likeness(item: tuple[str, FlaxCell]) -> tuple[int, bool]:
        cell = item[1]
        kernels = [arrays.get(f"{dense}.kernel") for dense in cell.of_h]
        shapes = [kernel.shape for kernel in kernels if kernel is not None and kernel.ndim == 2]
        columns = sum(columns for _, columns in shapes)
        fits = bool(shapes) and columns == GATES[cell.kind] * shapes[0][0]
        return -len(set(cell.leaves()) ^ set(arrays)), fits

    if not any(set(cell.leaves()) & set(arrays) for cell in CELLS.values()):
        raise ValueError(
            f"the names are not those of {', '.join(CELLS)}, they are {', '.join(sorted(arrays))}"
        )
    return max(CELLS.items(), key=likeness)


def to_flax(params: Params, cell: str) -> list[Any]:
    """Parameters of Flax's cells.

    Args:
        params: parameters of a stack of plain LSTM, GRU, MGU or Elman cells. Biases that it lacks
            are 0 there. A GRU without biases is taken for one that resets after the matmul.
        cell: "LSTMCell", "OptimizedLSTMCell", "GRUCell" or "SimpleCell", with "linen." or "nnx."
            in front, or "linen.MGUCell".

    Returns:
        for each layer the tree of one cell, or a pair (forward, backward) of them. In linen a tree
        goes to ``cell.apply({"params": tree}, ...)``, in nnx to ``nnx.update(cell, tree)``.

    Raises:
        ValueError: for another cell's parameters, for a projection, for a cell that resets before
            the matmul, and for a ``b_hn`` that is not 0 where the cell is "nnx.GRUCell".
    """
    if cell not in CELLS:
        raise ValueError(f"cell should be one of {', '.join(CELLS)}, got {cell!r}")
    layers = [
        tuple(cell_to_flax(params, path, cell) for path, params in layer.items())
        for layer in unstack(params)
    ]
    return [layer if len(layer) == 2 else layer[0] for layer in layers]


def cell_to_flax(params: Params, path: str, name: str) -> dict[str, dict[str, Array]]:
    """The inverse of `cell_from_flax`."""
    cell = CELLS[name]
    kind = cell_kind(params, path, name, {gates: kind for kind, gates in GATES.items()})
    if kind != cell.kind:
        raise ValueError(f"{name} takes parameters of kind {cell.kind}, {path} has {kind}")
    refuse_projection(params, path, name)
    gates, hidden = params["w_x"].shape[1:]
    dtype = params["w_x"].dtype
    bias = params["b"] if "b" in params else jnp.zeros((gates, hidden), dtype)
    b_hn = params["b_hn"] if "b_hn" in params else jnp.zeros((hidden,), dtype)
    if "b_hn" in OPTIONAL[kind]:
        refuse_reset_before(params, path, name)
    if cell.b_hn is None and jnp.any(b_hn != 0):
        raise ValueError(
            f"{name} has no bias at n's recurrent product (flax#5594), "
            f"so it cannot take `{path}.b_hn`, which is not 0"
        )
    tree: dict[str, dict[str, Array]] = {dense: {} for dense in cell.of_x + cell.of_h}

    def part(dense_layers: tuple[str, ...], leaf: str, value: Array) -> None:
        parts = jnp.split(join_gates(jnp.asarray(value)), len(dense_layers), axis=-1)
        for dense, columns in zip(dense_layers, parts, strict=True):
            tree[dense][leaf] = columns

    part(cell.of_x, "kernel", params["w_x"])
    part(cell.of_h, "kernel", params["r"])
    part(cell.biased, "bias", bias)
    if cell.b_hn is not None:
        tree[cell.b_hn]["bias"] = jnp.asarray(b_hn)
    return tree


def state_from_flax(
    state_type: type, *carries: Any, bidirectional: bool = False
) -> tuple[State, ...]:
    """A layer's state of Flax's carries, whose order is ``(c, h)`` in an LSTM.

    Args:
        state_type: `jaxrnn.cells.LSTMState`, `GRUState`, `MGUState` or `ElmanState`.
        *carries: for each layer ``(c, h)`` of an LSTM or ``h`` of the others, each ``[B, H]``; or
            a pair (forward, backward) of them.
        bidirectional: whether they are such pairs.

    Returns:
        a tuple over layers of states, or of pairs (forward, backward).
    """
    flat = [carry for pair in carries for carry in pair] if bidirectional else carries
    if state_type is LSTMState:
        return join_states([LSTMState(h=h, c=c) for c, h in flat], bidirectional)
    return join_states([state_type(h) for h in flat], bidirectional)


def state_to_flax(state: tuple[Any, ...]) -> list[Any]:
    """The inverse of `state_from_flax`: for each layer a carry or a pair of them."""

    def carry(state: State) -> Any:
        return (state.c, state.h) if isinstance(state, LSTMState) else state.h

    pairs = [tuple(carry(entry) for entry in layer) for layer in split_states(state)]
    return [pair if is_pair(layer) else pair[0] for pair, layer in zip(pairs, state, strict=True)]
