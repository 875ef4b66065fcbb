"""The ``SRU`` of the package ``sru`` (2.6.0) by the paper's authors: state dicts and states."""

import re
from math import exp, log, sqrt
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrnn._typing import Params, State
from jaxrnn.cells import SRUState
from jaxrnn.convert.layout import join_states, refuse_merged, split_states, stack, unstack
from jaxrnn.convert.tensors import Weights, as_numpy, check_axes, check_names, check_shape, read

TENSORS = ("weight", "weight_c", "bias", "scale_x")
# What both directions share, and our names for it.
SHARED = {"weight_proj": "w_proj", "layer_norm.weight": "gain_x", "layer_norm.bias": "b_x"}


def from_sru(
    weights: Weights,
    *,
    bidirectional: bool = False,
    highway_bias: float = 0.0,
    rescale: bool = True,
    prefix: str = "",
) -> Params:
    """Parameters of ``sru.SRU``.

    The package scales the highway by a stored ``scale_x``, or has the scale inside its matrix;
    jaxrnn's cell computes the scale of its options. So these are needed, and checked against
    ``scale_x``. (The package has ``rescale=False`` by default, jaxrnn has True.)

    Where a layer of two directions has as many inputs as outputs, the package adds each direction
    its own half of the input; here that becomes a ``w_highway`` of ones and zeros.

    ``use_tanh``, ``has_skip_term=False`` and ``normalize_after`` are not in the weights and are
    taken not to be used.

    Args:
        weights: a ``state_dict()``, or any mapping of its names to arrays; or the path of a
            safetensors file. torch is not imported.
        bidirectional: whether the layers have two directions; the shapes do not tell.
        highway_bias: that of our layer.
        rescale: that of our layer.
        prefix: what the names have in front, ``"encoder.sru."``; other names are passed over.

    Returns:
        parameters of a stack, for a cell with ``layer_norm`` and ``proj_size`` (the package's
        ``projection_size``) where the weights have such.

    Raises:
        ValueError: for names that are missing or unexpected, for shapes that do not fit, for
            options that do not fit ``scale_x``, and for a highway that our cell does not have.
    """
    tensors = read(weights, prefix)
    numbers = [re.match(r"rnn_lst\.(\d+)\.", name.removeprefix(prefix)) for name in tensors]
    layers = 1 + max((int(number[1]) for number in numbers if number), default=0)
    paths = [f"{prefix}rnn_lst.{index}." for index in range(layers)]
    names = [*TENSORS, *(n for n in SHARED if any(path + n in tensors for path in paths))]
    check_names(tensors, [path + name for path in paths for name in names], "an sru.SRU")
    alpha, directions = highway_scale(highway_bias, rescale), 1 + bidirectional
    result, in_features = [], None
    for path in paths:
        layer = {name: tensors[path + name] for name in names}
        in_features = check_layer(layer, path, directions, in_features)
        check_scale(f"{path}scale_x", layer["scale_x"], highway_bias, rescale)
        result.append(layer_from_sru(layer, path, directions, alpha))
    return stack(result)


def highway_scale(highway_bias: float, rescale: bool) -> float:
    """The cell's alpha; see `jaxrnn.cells.sru`."""
    return sqrt(1 + 2 * exp(highway_bias)) if rescale else 1.0


def check_scale(name: str, scale: np.ndarray, highway_bias: float, rescale: bool) -> None:
    """Refuses options that do not give the ``scale_x`` that was found."""
    alpha, found = highway_scale(highway_bias, rescale), float(scale.item())
    # It was made as a float32, whatever it was cast to later.
    eps = max(float(jnp.finfo(dtype).eps) for dtype in (jnp.float32, scale.dtype))
    if abs(found - alpha) > 4 * eps * alpha:
        bias = round(log((found**2 - 1) / 2), 6) + 0.0 if found > 1 else None  # no -0.0
        fitting = "rescale=False" if bias is None else f"highway_bias={bias}"
        raise ValueError(
            f"`{name}` is {found:.4g}, but {highway_bias=} and {rescale=} make it {alpha:.4g}: "
            f"give this function and the layer {fitting}"
        )


def check_layer(
    layer: dict[str, np.ndarray], path: str, directions: int, in_features: int | None
) -> int:
    """Refuses shapes that do not fit, and returns D H, the inputs of the next layer."""
    check_axes(f"{path}weight", layer["weight"], "[I, D H G]")
    check_axes(f"{path}weight_c", layer["weight_c"], "[2 D H]")
    if in_features is None:
        in_features = len(layer.get("weight_proj", layer["weight"]))
    rows = len(layer["weight"]) if "weight_proj" in layer else in_features
    out, sides = layer["weight_c"].size // 2, "" if directions == 1 else "2"
    gates = 3 if in_features == out else 4
    shapes = {
        "weight": (f"[I, {gates * directions}H]", (rows, gates * out)),
        "weight_c": (f"[2 {sides}H]", (2 * out,)),
        "bias": (f"[2 {sides}H]", (2 * out,)),
        "scale_x": ("[1]", (1,)),
        "weight_proj": ("[I, P]", (in_features, rows)),
        "layer_norm.weight": ("[I]", (in_features,)),
        "layer_norm.bias": ("[I]", (in_features,)),
    }
    for name, value in layer.items():
        check_shape(path + name, value, *shapes[name])
    if out % directions:
        raise ValueError(f"`{path}weight_c` should be [2 2H] of two directions, got ({2 * out},)")
    return out


def layer_from_sru(
    layer: dict[str, np.ndarray], path: str, directions: int, alpha: float
) -> list[Params]:
    """Parameters of the directions of one layer."""
    in_features = len(layer.get("weight_proj", layer["weight"]))
    hidden = layer["bias"].size // (2 * directions)
    # [I, D, H, G] of u, f, r and the highway, which is only there where I is not D H.
    weight = layer["weight"].reshape(len(layer["weight"]), directions, hidden, -1)
    has_matrix = weight.shape[-1] == 4
    shared = {ours: layer[name] for name, ours in SHARED.items() if name in layer}
    v, b = (layer[name].reshape(2, directions, hidden) for name in ("weight_c", "bias"))
    result = []
    for d in range(directions):
        own = own_share(in_features, hidden, d, weight.dtype)
        matrix = (weight[:, d, :, 3] / alpha).astype(weight.dtype) if has_matrix else own
        # The cell has a matrix where I is not H, and it multiplies the normalized, projected x.
        same = has_matrix == (in_features != hidden)
        if not same and (shared or not np.array_equal(matrix, own)):
            raise ValueError(
                f"the highway of `{path}weight`, with {in_features} inputs and {hidden} features "
                "in each of two directions, is none that jaxrnn's cell has"
            )
        params = {"w_x": weight[:, d, :, :3].swapaxes(1, 2), "v": v[:, d], "b": b[:, d]}
        if in_features != hidden:
            params["w_highway"] = matrix
        result.append(params | shared)
    return result


def own_share(rows: int, hidden: int, direction: int, dtype: Any) -> np.ndarray:
    """The matrix ``[I, H]`` that takes a direction's share of the inputs, where I is D H."""
    return np.eye(rows, hidden, -hidden * direction if rows > hidden else 0, dtype=dtype)


def to_sru(
    params: Params, *, highway_bias: float = 0.0, rescale: bool = True, prefix: str = ""
) -> dict[str, np.ndarray]:
    """The state dict of ``sru.SRU``.

    Args:
        params: parameters of a stack of SRU cells. Biases that it lacks are 0 there.
        highway_bias: that of the layer that they are from.
        rescale: that of the layer that they are from, and of the package's.
        prefix: put in front of the names.

    Returns:
        contiguous NumPy arrays by the package's names.

    Raises:
        ValueError: for other cells' parameters, for two directions that do not share a layer norm
            or a projection, and for a ``w_highway`` that the package does not have: in layers of
            two directions with as many inputs as outputs (all but the first), unless it is the one
            that `from_sru` makes.
    """
    alpha, tensors, out = highway_scale(highway_bias, rescale), {}, None
    for index, layer in enumerate(unstack(params)):
        for path, cell in layer.items():
            check_cell(cell, path)
            inputs = "w_proj" if "w_proj" in cell else "w_x"
            refuse_merged(f"{path}.{inputs}", cell[inputs], out)
        out = sum(cell["v"].shape[-1] for cell in layer.values())
        for name, value in layer_to_sru(layer, alpha).items():
            tensors[f"{prefix}rnn_lst.{index}.{name}"] = np.array(value, order="C")
    return tensors


def layer_to_sru(layer: dict[str, Params], alpha: float) -> dict[str, np.ndarray]:
    """The inverse of `layer_from_sru`."""
    first = next(iter(layer.values()))
    rows, _, hidden = first["w_x"].shape
    in_features, out = len(first.get("w_proj", first["w_x"])), len(layer) * hidden
    shared = {name: np.asarray(first[ours]) for name, ours in SHARED.items() if ours in first}
    weight, v, b = [], [], []
    for d, (path, cell) in enumerate(layer.items()):
        w_x = np.asarray(cell["w_x"])
        own = own_share(in_features, hidden, d, w_x.dtype)
        matrix = np.asarray(cell.get("w_highway", own))
        has_matrix = in_features != out
        if has_matrix != ("w_highway" in cell) and (shared or not np.array_equal(matrix, own)):
            raise ValueError(
                f"the highway of {path}, with {in_features} inputs and {hidden} features in each "
                "of two directions, is none that the package has"
            )
        for name, value in shared.items():
            if not np.array_equal(cell[SHARED[name]], value):
                raise ValueError(
                    f"the package's directions share a {name}, `{path}.{SHARED[name]}` differs"
                )
        if has_matrix:
            w_x = np.concatenate([w_x, (matrix * alpha).astype(w_x.dtype)[:, None]], axis=1)
        weight.append(w_x.swapaxes(1, 2))
        v.append(np.asarray(cell["v"]))
        b.append(np.asarray(cell.get("b", np.zeros_like(v[d]))))
    return shared | {
        "weight": np.stack(weight, axis=1).reshape(rows, -1),
        "weight_c": np.stack(v, axis=1).reshape(-1),
        "bias": np.stack(b, axis=1).reshape(-1),
        "scale_x": np.array([alpha], jnp.promote_types(v[0].dtype, jnp.float32)),
    }


def check_cell(cell: Params, path: str) -> None:
    """Refuses what are not the parameters of an SRU cell."""
    optional = [name for name in ("b", "w_highway", *SHARED.values()) if name in cell]
    check_names(cell, ["w_x", "v", *optional], f"an SRU cell at {path}")
    check_axes(f"{path}.w_x", cell["w_x"], "[I, 3, H]")
    rows, _, hidden = cell["w_x"].shape
    in_features = len(cell.get("w_proj", cell["w_x"]))
    shapes = {
        "w_x": ("[I, 3, H]", (rows, 3, hidden)),
        "v": ("[2, H]", (2, hidden)),
        "b": ("[2, H]", (2, hidden)),
        "w_highway": ("[I, H]", (rows, hidden)),
        "w_proj": ("[I, P]", (in_features, rows)),
        "gain_x": ("[I]", (in_features,)),
        "b_x": ("[I]", (in_features,)),
    }
    for name, value in cell.items():
        check_shape(f"{path}.{name}", value, *shapes[name])


def state_from_sru(c: Any, *, bidirectional: bool = False) -> tuple[State, ...]:
    """A layer's state of the package's.

    Args:
        c: ``[L, B, D H]``. (For ``[L D, B, H]``, of ``nn_rnn_compatible_return=True``, there is
            `state_from_torch` with ``SRUState``.)
        bidirectional: whether the layers have two directions.

    Returns:
        a tuple over layers of `jaxrnn.cells.SRUState`, or of pairs (forward, backward).

    Raises:
        ValueError: for another number of axes.
    """
    c = jnp.asarray(as_numpy(c))
    check_axes("c", c, "[L, B, D H]")
    parts = [part for layer in c for part in jnp.split(layer, 1 + bidirectional, axis=-1)]
    return join_states([SRUState(c=part) for part in parts], bidirectional)


def state_to_sru(state: tuple[Any, ...]) -> np.ndarray:
    """The inverse of `state_from_sru`: ``c [L, B, D H]``."""
    layers = split_states(state)
    return np.stack([np.concatenate([entry.c for entry in layer], axis=-1) for layer in layers])
