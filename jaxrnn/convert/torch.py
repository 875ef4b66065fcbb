"""``torch.nn.LSTM``, ``GRU`` and ``RNN``: their state dicts and states."""

import re
from typing import Any

import numpy as np

from jaxrnn._typing import Params, State
from jaxrnn.convert.layout import (
    GATES,
    KINDS,
    Kind,
    cell_kind,
    join_bias,
    join_gates,
    join_states,
    refuse_merged,
    refuse_reset_before,
    split_bias,
    split_gates,
    split_states,
    stack,
    unstack,
)
from jaxrnn.convert.tensors import Weights, as_numpy, check_axes, check_names, check_shape, read

NAME = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)_l(\d+)(_reverse)?")
SUFFIXES = ("", "_reverse")


def from_torch(weights: Weights, *, kind: Kind | None = None, prefix: str = "") -> Params:
    """Parameters of ``torch.nn.LSTM``, ``torch.nn.GRU`` or ``torch.nn.RNN``.

    Layers, directions, biases and an LSTM's projection are read off the names. torch's two biases
    are summed, but for the recurrent one of a GRU's n, our ``b_hn``. Whether an RNN has tanh or
    relu is not in its weights.

    Args:
        weights: a ``state_dict()``, or any mapping of its names to arrays; or the path of a
            safetensors file. torch is not imported.
        kind: "lstm", "gru" or "elman" (torch's RNN); None reads it off the shapes.
        prefix: what the names have in front, ``"encoder.rnn."``; other names are passed over.

    Returns:
        parameters of a stack, in the dtype of the weights (float64 only where JAX has it enabled).

    Raises:
        ValueError: for names that are missing or unexpected, and for shapes that do not fit.
    """
    found = read(weights, prefix)
    tensors = {name.removeprefix(prefix): value for name, value in found.items()}
    parts = [NAME.fullmatch(name) for name in tensors]
    groups = [part.groups() for part in parts if part]
    layers = 1 + max((int(number) for _, number, _ in groups), default=0)
    suffixes = SUFFIXES[: 1 + any(reverse for _, _, reverse in groups)]
    given = {tensor for tensor, _, _ in groups}
    needed = ["weight_ih", "weight_hh"]
    needed += ["bias_ih", "bias_hh"] if given & {"bias_ih", "bias_hh"} else []
    needed += ["weight_hr"] if "weight_hr" in given else []
    wanted = [prefix + f"{t}_l{k}{s}" for t in needed for k in range(layers) for s in suffixes]
    check_names(found, wanted, "a torch.nn.LSTM, GRU or RNN")

    gates, hidden = sizes(tensors, kind, prefix)
    out = len(tensors["weight_hr_l0"]) if "weight_hr" in given else hidden
    check_axes(f"{prefix}weight_ih_l0", tensors["weight_ih_l0"], f"[{gates}H, I]")
    in_features = tensors["weight_ih_l0"].shape[1]
    result = []
    for index in range(layers):
        shapes = {
            "weight_ih": (f"[{gates}H, I]", (gates * hidden, in_features)),
            "weight_hh": (
                f"[{gates}H, {'S' if 'weight_hr' in given else 'H'}]",
                (gates * hidden, out),
            ),
            "bias_ih": (f"[{gates}H]", (gates * hidden,)),
            "bias_hh": (f"[{gates}H]", (gates * hidden,)),
            "weight_hr": ("[S, H]", (out, hidden)),
        }
        directions = []
        for suffix in suffixes:
            cell = {tensor: tensors[f"{tensor}_l{index}{suffix}"] for tensor in needed}
            for tensor, value in cell.items():
                check_shape(f"{prefix}{tensor}_l{index}{suffix}", value, *shapes[tensor])
            directions.append(cell_from_torch(cell, gates))
        result.append(directions)
        in_features = len(suffixes) * out
    return stack(result)


def sizes(tensors: dict[str, np.ndarray], kind: Kind | None, prefix: str) -> tuple[int, int]:
    """G and H of the first layer's recurrent matrix."""
    recurrent, name = tensors["weight_hh_l0"], f"{prefix}weight_hh_l0"
    check_axes(name, recurrent, "[G H, S]")
    rows, columns = recurrent.shape
    if "weight_hr_l0" in tensors:
        check_axes(f"{prefix}weight_hr_l0", tensors["weight_hr_l0"], "[S, H]")
        return GATES["lstm"], tensors["weight_hr_l0"].shape[1]
    if kind is not None:
        if kind not in KINDS.values():
            raise ValueError(f"kind should be one of {', '.join(KINDS.values())}, got {kind!r}")
        return GATES[kind], rows // GATES[kind]
    gates = rows // max(columns, 1)
    if gates not in KINDS or rows != gates * columns:
        raise ValueError(
            f"`{name}` should be [4H, H] of an LSTM, [3H, H] of a GRU or [H, H] of an RNN, "
            f"got {recurrent.shape}"
        )
    return gates, columns


def cell_from_torch(tensors: dict[str, np.ndarray], gates: int) -> Params:
    """One layer and direction; torch's order of gates is ours."""
    params = {
        "w_x": split_gates(tensors["weight_ih"].T, gates),
        "r": split_gates(tensors["weight_hh"].T, gates),
    }
    if "bias_ih" in tensors:
        biases = (split_gates(tensors[name], gates) for name in ("bias_ih", "bias_hh"))
        params |= split_bias(*biases)
    if "weight_hr" in tensors:
        params["p"] = tensors["weight_hr"].T
    return params


def to_torch(params: Params, *, prefix: str = "") -> dict[str, np.ndarray]:
    """The state dict of ``torch.nn.LSTM``, ``torch.nn.GRU`` or ``torch.nn.RNN``.

    ``module.load_state_dict({k: torch.from_numpy(v) for k, v in to_torch(params).items()})`` loads
    it, and ``safetensors.numpy.save_file(to_torch(params), path)`` writes it. The summed bias goes
    to ``bias_ih``; ``bias_hh`` is 0 but for a GRU's ``b_hn``.

    Args:
        params: parameters of a stack of plain LSTM, GRU or Elman cells. A GRU without biases is
            taken for one that resets after the matmul, as torch's does.
        prefix: put in front of the names.

    Returns:
        contiguous NumPy arrays by torch's names.

    Raises:
        ValueError: for cells that torch does not have.
    """
    tensors, in_features = {}, None
    for index, layer in enumerate(unstack(params)):
        for suffix, (path, cell) in zip(SUFFIXES, layer.items(), strict=False):
            for name, value in cell_to_torch(cell, path, in_features).items():
                # A copy: torch would share the memory of a jax array, which is for reading only.
                tensors[f"{prefix}{name}_l{index}{suffix}"] = np.array(value, order="C")
        in_features = sum(len(cell["r"]) for cell in layer.values())
    return tensors


def cell_to_torch(params: Params, path: str, in_features: int | None) -> dict[str, np.ndarray]:
    """The inverse of `cell_from_torch`; ``in_features`` are all that the layer before puts out."""
    if cell_kind(params, path, "torch.nn") == "gru":
        refuse_reset_before(params, path, "torch.nn.GRU")
    refuse_merged(f"{path}.w_x", params["w_x"], in_features)
    tensors = {
        "weight_ih": join_gates(np.asarray(params["w_x"])).T,
        "weight_hh": join_gates(np.asarray(params["r"])).T,
    }
    if "b" in params:
        tensors["bias_ih"], tensors["bias_hh"] = (join_gates(b) for b in join_bias(params))
    if "p" in params:
        tensors["weight_hr"] = np.asarray(params["p"]).T
    return tensors


def state_from_torch(
    state_type: type, state: Any, *, bidirectional: bool = False
) -> tuple[State, ...]:
    """A layer's state of torch's, which has layers and directions on one axis.

    Args:
        state_type: `jaxrnn.cells.LSTMState`, `GRUState` or `ElmanState`.
        state: ``(h, c)`` of an LSTM, each ``[L D, B, H]`` (h of a projected one ``[L D, B, S]``),
            or ``h`` alone.
        bidirectional: whether the layers have two directions.

    Returns:
        a tuple over layers of states, or of pairs (forward, backward).

    Raises:
        ValueError: for another number of arrays or axes.
    """
    fields = state_type._fields  # pyright: ignore[reportAttributeAccessIssue]
    arrays = [as_numpy(a) for a in (state if isinstance(state, tuple | list) else (state,))]
    if len(arrays) != len(fields):
        raise ValueError(
            f"the state should be {len(fields)} arrays, {', '.join(fields)}, got {len(arrays)}"
        )
    for name, array in zip(fields, arrays, strict=True):
        check_axes(name, array, "[L D, B, H]")
        if len(array) != len(arrays[0]) or len(array) % (1 + bidirectional):
            raise ValueError(
                f"the first axis of `{name}`, [L D, B, H], should have an entry for each layer and "
                f"direction, got shape {array.shape}"
            )
    states = [state_type(*entries) for entries in zip(*arrays, strict=True)]
    return join_states(states, bidirectional)


def state_to_torch(state: tuple[Any, ...]) -> Any:
    """The inverse of `state_from_torch`: ``(h, c)`` of an LSTM, else ``h``, as NumPy arrays."""
    entries = [entry for layer in split_states(state) for entry in layer]
    arrays = tuple(np.stack(leaves) for leaves in zip(*entries, strict=True))
    return arrays[0] if len(arrays) == 1 else arrays
