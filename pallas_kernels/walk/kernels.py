"""Kernels that walk through all steps: a program takes its tile from the first step to the last.

With a recurrent matrix the tile has all features, and matrix and state never leave the chip;
without one, any tile of rows and features is on its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels import backend, cell_step
from pallas_kernels.equations import Arrays, Equations
from pallas_kernels.tile import Tile, choose_all, outer


class Walk(NamedTuple):
    """What is fixed when a kernel is made.

    Attributes:
        equations: the cell.
        steps: T.
        reverse: from the last step to the first.
        tile: of the program.
        precision: of float32 matmuls.
    """

    equations: Equations
    steps: int
    reverse: bool
    tile: Tile
    precision: backend.Precision = "highest"

    def time(self, k: jax.Array) -> jax.Array:
        """The k-th step that is made."""
        return self.steps - 1 - k if self.reverse else k

    def load_matrix(self, ref: Any | None) -> Arrays:
        """``{gate: [block_h, block_h]}`` of ``r [H, Gh, H]``, 0 outside; None has no gates."""
        if ref is None:
            return {}
        block = self.tile.block_h
        whole = self.tile.columns  # Starts at 0, as a traced value: the span may pass the end.
        valid = self.tile.valid_columns
        inside = outer(valid, valid, (block, block))
        return {
            gate: backend.load(ref, (whole, g, whole), inside)
            for g, gate in enumerate(self.equations.h_gates)
        }

    def load_scale(self, ref: Any | None) -> Callable[[jax.Array], jax.Array]:
        """The multiplication by ``ref [B, H]``; by 1 without."""
        if ref is None:
            return lambda a: a
        scale = self.tile.load(ref)
        return lambda a: a * scale


def forward(walk: Walk, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """All steps of a tile.

    Inputs: ``x_pre [T, B, Gx, H]``; ``r [H, Gh, H]`` or None; ``vectors [N, H]`` or None; ``state``
    and ``restart {name: [B, H]}`` (restart may be None); ``mask`` and ``resets [T, B]`` or None;
    ``h_scale [B, H]``, constant factors of ``h`` before ``h @ r``, or None.
    Outputs: ``y [T, B, H]``, not masked; ``start {name: [T, B, H]}``, what each step started from
    after its reset, or None; ``states`` likewise, what each step left; ``final {name: [B, H]}``.
    """
    equations, tile = walk.equations, walk.tile
    r = walk.load_matrix(inputs["r"])
    scale = walk.load_scale(inputs["h_scale"])
    vectors = tile.load_vectors(inputs["vectors"], equations.vector_names)

    def step(k: jax.Array, state: Arrays) -> Arrays:
        t = walk.time(k)
        reset, real = (tile.load_flags(inputs[name], t) for name in ("resets", "mask"))
        start = cell_step.restarted(tile, state, inputs["restart"], reset)
        tile.store_all(outputs["start"] or {}, start, t)
        pre = tile.load_gates(inputs["x_pre"], equations.x_gates, t)
        for gate, matrix in r.items():
            column = backend.dot(scale(start["h"]), matrix, walk.precision)
            pre[gate] = pre[gate] + column if gate in pre else column
        after, state = cell_step.forward(tile, equations, pre, start, vectors, state, real)
        tile.store(outputs["y"], t, value=after[equations.output_name])
        tile.store_all(outputs["states"] or {}, state, t)
        return state

    final = lax.fori_loop(0, walk.steps, step, tile.load_all(inputs["state"]))
    tile.store_all(outputs["final"], final)


def backward(walk: Walk, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """All steps of a tile, back in time.

    Inputs: ``pre {"x": [T, B, Gx, H], "h": [T, B, ., H]}``, what the gates saw, of the gates with a
    column of ``x_pre`` and of the others; ``start`` as `forward` left it; ``dy [T, B, H]``,
    ``dstates {name: [T, B, H]}`` or None and ``dfinal {name: [B, H]}``; ``r``, ``vectors``,
    ``mask``, ``resets`` and ``h_scale`` as in `forward`.
    Outputs: ``pre``, the cotangents over what the gates saw; ``dstate {name: [B, H]}``;
    ``drestart`` likewise, None without resets; ``dvectors [N, B, H]``, not yet summed over B.
    """
    equations, tile = walk.equations, walk.tile
    r = walk.load_matrix(inputs["r"])
    scale = walk.load_scale(inputs["h_scale"])
    vectors = tile.load_vectors(inputs["vectors"], equations.vector_names)
    columns = {"x": equations.x_gates, "h": equations.h_only}

    def step(k: jax.Array, carry: tuple[Arrays, Arrays, Arrays]) -> tuple[Arrays, Arrays, Arrays]:
        dstate, drestart, dvectors = carry
        t = walk.time(walk.steps - 1 - k)
        reset, real = (tile.load_flags(inputs[name], t) for name in ("resets", "mask"))
        start = tile.load_all(inputs["start"], t)
        pre = {}
        for part, gates in columns.items():
            pre |= tile.load_gates(inputs["pre"][part], gates, t)
        dy = tile.load(inputs["dy"], t)
        dstate = tile.load_all_onto(dstate, inputs["dstates"], t)
        _, (dpre, dstart, dvector) = cell_step.backward(
            tile, equations, pre, start, vectors, dstate, dy, real
        )
        for part, gates in columns.items():
            tile.store_gates(outputs["pre"][part], gates, dpre, t)
        for gate, matrix in r.items():
            product = backend.dot(dpre[gate], matrix, walk.precision, transpose_b=True)
            dstart["h"] = dstart["h"] + scale(product)
        dstart, taken = cell_step.split_at_reset(tile, dstart, reset, real)
        drestart = {name: drestart[name] + taken[name] for name in drestart}
        dvectors = {name: dvectors[name] + dvector[name] for name in dvectors}
        return choose_all(real, dstart, dstate), drestart, dvectors

    dfinal = tile.load_all(inputs["dfinal"])
    drestart = dict.fromkeys(dfinal if outputs["drestart"] else (), tile.zeros())
    carry = (dfinal, drestart, dict.fromkeys(vectors, tile.zeros()))
    dstate, drestart, dvectors = lax.fori_loop(0, walk.steps, step, carry)
    tile.store_all(outputs["dstate"], dstate)
    tile.store_all(outputs["drestart"] or {}, drestart)
    for j, name in enumerate(equations.vector_names):
        tile.store(outputs["dvectors"], j, value=dvectors[name])
