"""The one table of cells and features, and small problems made of them.

A row of `CELLS` is a cell of the library, its oracle and a size of the input; a row of `FEATURES`
is a set of arguments of `recurrence`. Parameters have the same names and layouts in both.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import oracles_elementwise as elementwise
import oracles_gated as gated

from jaxrnn import Cell, Noise, cells, recurrence

T, B, I, H = 7, 3, 3, 4  # noqa: E741  (the axis letters of the library)


class Row(NamedTuple):
    """A cell and what it has to agree with.

    Attributes:
        cell: the cell.
        oracle: the same from the paper.
        in_features: I.
        start: fields of the state that do not start at 0.
        divisors: fields of the state that the cell divides by: they are 1 at least.
    """

    cell: Cell
    oracle: oracles.Oracle
    in_features: int = I
    start: Mapping[str, float] = {}
    divisors: tuple[str, ...] = ()


HIGHWAY_BIAS = -1.0
ALPHA = math.sqrt(1 + 2 * math.exp(HIGHWAY_BIAS))
NEVER = {"m": -1e30}

CELLS = {
    "elman_tanh": Row(cells.elman(), oracles.elman("tanh")),
    "elman_relu": Row(cells.elman(activation="relu"), oracles.elman("relu")),
    "lstm": Row(cells.lstm(), oracles.lstm()),
    "layer_norm_lstm": Row(cells.lstm(layer_norm=True), oracles.layer_norm_lstm()),
    "gru": Row(cells.gru(), oracles.gru()),
    "gru_reset_before": Row(cells.gru(reset_after=False), oracles.gru(reset_after=False)),
    "sru": Row(cells.sru(highway_bias=HIGHWAY_BIAS), oracles.sru(ALPHA), H),
    "sru_projected": Row(cells.sru(highway_bias=HIGHWAY_BIAS), oracles.sru(ALPHA)),
    "lstm_projected": Row(cells.lstm(proj_size=3), oracles.lstm()),
    "lstm_peepholes": Row(cells.lstm(peepholes=True), oracles.lstm()),
    "lstm_coupled": Row(cells.lstm(coupled=True, peepholes=True), oracles.lstm()),
    "lstm_clipped": Row(cells.lstm(cell_clip=0.4), oracles.lstm(clip=0.4)),
    "layer_norm_gru": Row(cells.gru(layer_norm=True), gated.layer_norm_gru()),
    "mgu": Row(cells.mgu(), gated.mgu()),
    "mgu_reset_before": Row(cells.mgu(reset_after=False), gated.mgu(reset_after=False)),
    "slstm": Row(cells.slstm(), gated.slstm(), start=NEVER, divisors=("n",)),
    "slstm_exp": Row(
        cells.slstm(forget_gate="exp"), gated.slstm("exp"), start=NEVER, divisors=("n",)
    ),
    "sru_layer_norm": Row(
        cells.sru(layer_norm=True, highway_bias=HIGHWAY_BIAS), elementwise.sru_of_features(ALPHA), H
    ),
    "sru_layer_norm_factored": Row(
        cells.sru(layer_norm=True, proj_size=2, highway_bias=HIGHWAY_BIAS),
        elementwise.sru_of_features(ALPHA),
    ),
    "indrnn_relu": Row(cells.indrnn(), elementwise.indrnn("relu")),
    "indrnn_tanh": Row(cells.indrnn(activation="tanh"), elementwise.indrnn("tanh")),
    "qrnn": Row(cells.qrnn(), elementwise.qrnn()),
    "qrnn_window": Row(cells.qrnn(window=2), elementwise.qrnn(window=2)),
    "min_gru": Row(cells.min_gru(), elementwise.min_gru()),
    "min_lstm": Row(cells.min_lstm(), elementwise.min_lstm()),
}

LENGTHS = np.array([4, 0, 7], np.int32)
# Holes at the front, in the middle and at the end; no row is empty.
MASK = np.array([[0, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 1], [1, 0, 0], [0, 1, 1]], bool)
# At the first step, at the last, twice in a row, and where the mask or the lengths hide it.
RESETS = np.array(
    [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 1], [0, 1, 0]], bool
)

# "state": whether an initial state is given; without it the cell's own is used. "restart": whether
# a state is given for resets. "zoneout": whether random values of the state are held.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"lengths": LENGTHS, "state": True},
    "mask": {"mask": MASK, "state": True},
    "resets": {"resets": RESETS, "state": True},
    "mask_resets": {"mask": MASK, "resets": RESETS, "state": True},
    "reset_state": {"mask": MASK, "resets": RESETS, "state": True, "restart": True},
    "zoneout": {"mask": MASK, "resets": RESETS, "state": True, "zoneout": True},
    "reverse": {"reverse": True},
    "reverse_all": {
        "lengths": LENGTHS[[0, 2, 1]] + 1,
        "mask": MASK,
        "resets": RESETS,
        "state": True,
        "restart": True,
        "zoneout": True,
        "reverse": True,
    },
}

# How a gradient is computed: the library's rule in three ways, and plain autodiff.
HOW: dict[str, dict[str, Any]] = {
    "none": {"remat": "none"},
    "gates": {"remat": "gates"},
    "chunk": {"remat": "chunk"},
    "autodiff": {"remat": "none", "autodiff": True},
}

# One way for each cell and feature, so that every cell and every feature meets every way; or all.
WHOLE_TABLE = bool(os.environ.get("JAXRNN_WHOLE_TABLE"))


def ways(name: str, feature: str) -> dict[str, dict[str, Any]]:
    """The ways in which a test of this cell and feature computes gradients."""
    if WHOLE_TABLE:
        return HOW
    index = list(CELLS).index(name) + list(FEATURES).index(feature)
    how = list(HOW)[index % len(HOW)]
    return {how: HOW[how]}


# These meet every feature; the other cells share what they do with one of them.
CORE = tuple(CELLS)[:8]


def covering(names: Any) -> list[tuple[str, str]]:
    """Cells and features to be tried together: all, or for the cells outside of `CORE` two."""
    features = list(FEATURES)
    pairs = []
    for i, name in enumerate(names):
        some = {features[i % len(features)], "reverse_all" if i % 2 else "mask_resets"}
        chosen = features if WHOLE_TABLE or name in CORE else [f for f in features if f in some]
        pairs += [(name, feature) for feature in chosen]
    return pairs


@contextlib.contextmanager
def quick_compile():
    """Spares XLA's expensive passes, in tests whose time is all compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


class Problem(NamedTuple):
    """Arguments of a recurrence and cotangents of its results."""

    row: Row
    params: Any
    x: Any
    state: Any
    dy: Any
    dfinal: Any
    options: dict[str, Any]


def problem(name: str, feature: str = "plain", dtype: Any = np.float64, seed: int = 0) -> Problem:
    """A random problem of one cell and one feature; arrays are rounded to ``dtype``."""
    row, rng = CELLS[name], np.random.default_rng(seed)
    shapes = jax.eval_shape(
        lambda: row.cell.init_params(jax.random.key(0), row.in_features, H, jnp.float32)
    )

    def draw(*shape):
        return (0.7 * rng.normal(size=shape)).astype(dtype)

    params = jax.tree.map(lambda a: draw(*a.shape), shapes)
    initial = jax.eval_shape(lambda: row.cell.init_state(shapes, B, jnp.float32))
    out_features = initial.h.shape[1] if "h" in row.cell.state_names else H
    x, dy = draw(T, B, row.in_features), draw(T, B, out_features)
    state, dfinal = (jax.tree.map(lambda a: draw(*a.shape), initial) for _ in range(2))
    state = state._replace(**{name: 1 + np.abs(getattr(state, name)) for name in row.divisors})
    options = dict(FEATURES[feature])
    if options.pop("restart", False):
        options["reset_state"] = jax.tree.map(lambda a: -a[::-1], state)
        divisors = {name: 1 + np.abs(getattr(state, name)) for name in row.divisors}
        options["reset_state"] = options["reset_state"]._replace(**divisors)
    if options.pop("zoneout", False):
        wide = [name for name in row.cell.holds if getattr(state, name).shape == (B, H)]
        options["noise"] = Noise(hold={name: rng.random((T, B, H)) < 0.3 for name in wide})
    if not options.pop("state", False):
        state = None
    return Problem(row, params, x, state, dy, dfinal, options)


def by_library(p: Problem, **how: Any):
    """Outputs, final state and gradients of parameters, x and state, of one way to compute them."""

    def run(params, x, state):
        return recurrence(p.row.cell, params, x, state, **p.options, **how)

    results, pull = jax.vjp(run, p.params, p.x, p.state)
    return *results, *pull((p.dy, p.dfinal))


def by_oracle(p: Problem):
    """The same five by the oracle."""
    options = dict(p.options)
    mask, lengths = options.pop("mask", None), options.pop("lengths", None)
    if lengths is not None:
        real = oracles.mask_of_lengths(lengths, T)
        mask = real if mask is None else mask & real
    oracle = p.row.oracle
    start = {name: np.zeros(a.shape) for name, a in p.dfinal._asdict().items()}
    start |= {name: np.full((B, H), value) for name, value in p.row.start.items()}
    state = start if p.state is None else p.state
    options["restart"] = options.pop("reset_state", start)
    if "noise" in options:
        options["hold"] = options.pop("noise").hold
    y, final = oracles.run(oracle, p.params, p.x, state, mask=mask, **options)
    d = oracles.gradients(oracle, p.params, p.x, state, p.dy, p.dfinal, mask=mask, **options)
    return y, final, d.params, d.x, None if p.state is None else d.state
