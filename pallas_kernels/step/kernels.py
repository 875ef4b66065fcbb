"""Kernels that make one step: matmul, gates, mask and reset of a tile in one launch.

Or in two: for gates that need whole rows, `matmuls`, whose tiles are as small as ever, and then the
rest on whole rows; for a cell that projects its output, another one makes ``h [B, S]`` of the
``output [B, H]`` of all programs, and in the backward pass the cotangent of ``h`` before the gates.

Arrays are whole, and written in place: a launch writes row t of them and reads the row of the step
before. The number of the step lies in a buffer, so that all launches are one kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend, cell_step
from pallas_kernels.equations import Arrays, Equations
from pallas_kernels.tile import Tile, choose, choose_all, outer


class Step(NamedTuple):
    """What is fixed when a kernel is made.

    Attributes:
        equations: the cell.
        steps: T.
        reverse: from the last step to the first.
        tile: of the program.
        block_k: features that one piece of a matmul takes.
        precision: of float32 matmuls.
    """

    equations: Equations
    steps: int
    reverse: bool
    tile: Tile
    block_k: int
    precision: backend.Precision = "highest"

    def time(self, k: jax.Array) -> jax.Array:
        """The k-th step that is made, within 0 and T - 1."""
        k = jnp.clip(k, 0, self.steps - 1)
        return self.steps - 1 - k if self.reverse else k

    def piece(self, k: jax.Array, features: int) -> Tile:
        """The rows of the tile, and the k-th piece of the features that a matmul sums over."""
        return self.tile._replace(column=k * self.block_k, block_h=self.block_k, hidden=features)

    def sum_of_pieces(
        self, features: int, product: Callable[[Tile, Arrays], Arrays], names: Any
    ) -> Arrays:
        """Adds ``product(piece)`` to the sums of each name, over the pieces of all features."""
        zeros = {name: self.tile.zeros() for name in names}
        return lax.fori_loop(
            0,
            -(-features // self.block_k),
            lambda k, sums: product(self.piece(k, features), sums),
            zeros,
        )

    def matrix(self, ref: Any, gate: int, rows: Tile, columns: Tile) -> jax.Array:
        """Part of ``r [S, Gh, H]`` of one gate, or of ``p [H, 1, S]``; 0 outside."""
        shape = (rows.block_h, columns.block_h)
        inside = outer(rows.valid_columns, columns.valid_columns, shape)
        return backend.load(ref, (rows.columns, gate, columns.columns), inside)

    def before(self, history: Any, initial: Any, k: jax.Array, part: Tile) -> jax.Array:
        """What the step before left of one name, or the initial state."""
        t = self.time(k - 1)
        return part.load(history, t, when=k > 0) + part.load(initial, when=k == 0)

    def recurrent_columns(
        self, inputs: dict[str, Any], k: jax.Array, reset: jax.Array | None
    ) -> Arrays:
        """``h @ r`` of the step, this tile's columns of each gate."""
        if "columns" in inputs:
            return self.tile.load_gates(inputs["columns"], self.equations.h_gates)

        def product(piece: Tile, sums: Arrays) -> Arrays:
            h = self.before(inputs["history"]["h"], inputs["initial"]["h"], k, piece)
            if reset is not None:
                h = choose(reset, piece.load(inputs["restart"]["h"]), h)
            if inputs["h_scale"] is not None:
                h = h * piece.load(inputs["h_scale"])
            return {
                gate: sums[gate]
                + backend.dot(h, self.matrix(inputs["r"], g, piece, self.tile), self.precision)
                for g, gate in enumerate(self.equations.h_gates)
            }

        return self.sum_of_pieces(inputs["r"].shape[0], product, self.equations.h_gates)

    def through_matmul(self, inputs: dict[str, Any], k: jax.Array) -> jax.Array:
        """Cotangent of the ``h`` that step k started from, by way of its ``h @ r``; 0 behind T."""
        if "through_matmul" in inputs:
            return self.tile.load(inputs["through_matmul"])
        equations = self.equations
        t = self.time(k)

        def product(piece: Tile, sums: Arrays) -> Arrays:
            dh = sums["h"]
            for g, gate in enumerate(equations.h_gates):
                part = "x" if gate in equations.x_gates else "h"
                names = equations.x_gates if part == "x" else equations.h_only
                d = piece.load(inputs["pre"][part], t, gate=names.index(gate), when=k < self.steps)
                matrix = self.matrix(inputs["r"], g, self.tile, piece)
                dh = dh + backend.dot(d, matrix, self.precision, transpose_b=True)
            return {"h": dh}

        dh = self.sum_of_pieces(inputs["r"].shape[2], product, ("h",))["h"]
        return dh if inputs["h_scale"] is None else dh * self.tile.load(inputs["h_scale"])

    def product(self, a: Any, *before: Any, matrix: Any, transpose: bool = False) -> jax.Array:
        """The tile of ``a[*before] @ p``, or of ``a[*before] @ p.T``."""

        def product(piece: Tile, sums: Arrays) -> Arrays:
            rows, columns = (self.tile, piece) if transpose else (piece, self.tile)
            part = self.matrix(matrix, 0, rows, columns)
            here = backend.dot(piece.load(a, *before), part, self.precision, transpose_b=transpose)
            return {"sum": sums["sum"] + here}

        return self.sum_of_pieces(a.shape[-1], product, ("sum",))["sum"]

    def doutput(self, inputs: dict[str, Any], t: jax.Array) -> jax.Array:
        """Cotangent of what the gates put out, as far as it comes from this step."""
        if "doutput" in inputs:
            return self.tile.load(inputs["doutput"])
        if not self.equations.projects:
            return self.tile.load(inputs["dy"], t)
        return self.product(inputs["dh"], t, matrix=inputs["p"], transpose=True)


def add(pre: Arrays, columns: Arrays) -> Arrays:
    """What the gates see: input columns, recurrent columns, or their sum."""
    both = {name: pre[name] + column for name, column in columns.items() if name in pre}
    return {**pre, **columns, **both}


def matmuls(step: Step, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """The part of `forward` or of `backward` that has matmuls, in a launch of its own.

    Inputs: theirs. Outputs: ``columns [B, Gh, H]``, ``h @ r`` of the step; and for `backward`
    ``through_matmul [B, H]``, what the step behind it sends back by way of its own, or where the
    cell projects, ``doutput [B, H]``. With these among their inputs they multiply no more.
    """
    k = backend.load(inputs["k"], (0,))
    t = step.time(k)
    reset = step.tile.load_flags(inputs["resets"], t)
    columns = step.recurrent_columns(inputs, k, reset)
    step.tile.store_gates(outputs["columns"], step.equations.h_gates, columns)
    if "through_matmul" in outputs:
        step.tile.store(outputs["through_matmul"], value=step.through_matmul(inputs, k + 1))
    if "doutput" in outputs:
        step.tile.store(outputs["doutput"], value=step.doutput(inputs, t))


def forward(step: Step, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """One step of a tile.

    Inputs: ``k [1]``, the step's number; ``x_pre [T, B, Gx, H]``; ``r [S, Gh, H]``; ``vectors
    [N, H]`` or None; ``initial {name: [B, H]}``, the state before the first step; ``restart``
    likewise or None; ``mask`` and ``resets [T, B]``, ``h_scale [B, S]`` or None; ``history {name:
    [T, B, H]}``, at least of ``h``; ``state {name: [B, H]}`` before this step.
    Outputs: ``k`` of the next step; ``history`` and ``state``, in place. Where the cell projects,
    ``output [B, H]`` in the place of the step's ``h`` and ``k``: `project` follows.
    """
    tile, equations = step.tile, step.equations
    k = backend.load(inputs["k"], (0,))
    t = step.time(k)
    reset, real = (tile.load_flags(inputs[name], t) for name in ("resets", "mask"))
    vectors = tile.load_vectors(inputs["vectors"], equations.vector_names)
    state = tile.load_all(equations.of_state(inputs["state"]))
    start = cell_step.restarted(tile, state, inputs["restart"], reset)
    pre = tile.load_gates(inputs["x_pre"], equations.x_gates, t)
    pre = add(pre, step.recurrent_columns(inputs, k, reset))
    after, state = cell_step.forward(tile, equations, pre, start, vectors, state, real)
    tile.store_all(equations.of_state(outputs["history"]), after, t)
    tile.store_all(equations.of_state(outputs["state"]), state)
    if equations.projects:
        tile.store(outputs["output"], value=after["output"])
    else:
        backend.store(outputs["k"], (0,), k + 1, None)


def project(step: Step, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """``h = output @ p`` of a tile: the end of a step of a cell that projects.

    Inputs: those of `forward`, ``p [H, 1, S]`` and the ``output [B, H]`` of `forward`.
    Outputs: ``k`` of the next step; ``history`` and ``state`` of ``h``, in place.
    """
    tile = step.tile
    k = backend.load(inputs["k"], (0,))
    t = step.time(k)
    h = step.product(inputs["output"], matrix=inputs["p"])
    h = choose(tile.load_flags(inputs["mask"], t), h, tile.load(inputs["state"]["h"]))
    tile.store(outputs["history"]["h"], t, value=h)
    tile.store(outputs["state"]["h"], value=h)
    backend.store(outputs["k"], (0,), k + 1, None)


def backward(step: Step, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """One step of a tile, back in time.

    Inputs: those of `forward`, less ``state``, with ``x_pre`` in the part ``x`` of ``pre``; ``dy
    [T, B, S]``, or where the cell projects, ``p`` and the ``dh`` of `backward_of_h`. In place, so
    that they are outputs too: ``pre {"x": [T, B, Gx, H], "h": [T, B, ., H]}``, which takes the
    cotangents of what the gates saw; ``dstate {name: [B, H]}`` of the state after this step, less
    the path through ``h @ r`` of the step behind it; ``drestart`` likewise or None; ``dvectors [N,
    B, H]`` or None, not summed over B; ``k``, which goes down; and where the cell projects,
    ``output [T, B, H]``, what the gates put out.
    """
    tile, equations = step.tile, step.equations
    k = backend.load(inputs["k"], (0,))
    t = step.time(k)
    reset, real = (tile.load_flags(inputs[name], t) for name in ("resets", "mask"))
    dstate = tile.load_all(equations.of_state(inputs["dstate"]))
    dstate = tile.load_all_onto(dstate, equations.of_state(inputs["dstates"]), t)
    drestart = tile.load_all(equations.of_state(inputs["drestart"]))
    if not equations.projects:
        dstate, drestart = add_through_matmul(step, inputs, k, dstate, drestart)

    vectors = tile.load_vectors(inputs["vectors"], equations.vector_names)
    start = {
        name: step.before(inputs["history"][name], inputs["initial"][name], k, tile)
        for name in dstate
    }
    start = cell_step.restarted(tile, start, inputs["restart"], reset)
    pre = tile.load_gates(inputs["pre"]["x"], equations.x_gates, t)
    pre = add(pre, step.recurrent_columns(inputs, k, reset))
    after, (dpre, dstart, dvectors) = cell_step.backward(
        tile, equations, pre, start, vectors, dstate, step.doutput(inputs, t), real
    )
    if equations.projects:
        tile.store(outputs["output"], t, value=after["output"])
    for part, gates in (("x", equations.x_gates), ("h", equations.h_only)):
        tile.store_gates(outputs["pre"][part], gates, dpre, t)
    dstart, taken = cell_step.split_at_reset(tile, dstart, reset, real)
    tile.store_all(equations.of_state(outputs["dstate"]), choose_all(real, dstart, dstate))
    drestart = {name: drestart[name] + taken[name] for name in drestart}
    tile.store_all(equations.of_state(outputs["drestart"]), drestart)
    for j, name in enumerate(equations.vector_names):
        sums = tile.load(inputs["dvectors"], j) + dvectors[name]
        tile.store(outputs["dvectors"], j, value=sums)
    backend.store(outputs["k"], (0,), k - 1, None)


def add_through_matmul(
    step: Step, inputs: dict[str, Any], k: jax.Array, dstate: Arrays, drestart: Arrays
) -> tuple[Arrays, Arrays]:
    """Adds what step k + 1 sends back by way of its ``h @ r``; a reset there takes it."""
    dh = {"h": step.through_matmul(inputs, k + 1)}
    flags = (step.tile.load_flags(inputs[name], step.time(k + 1)) for name in ("resets", "mask"))
    dh, taken = cell_step.split_at_reset(step.tile, dh, *flags)
    dstate = dstate | {"h": dstate["h"] + dh["h"]}
    return dstate, drestart | {"h": drestart["h"] + taken["h"]} if drestart else drestart


def backward_of_h(step: Step, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """The cotangent of a tile of ``h``: the start of a step back of a cell that projects.

    Inputs: those of `backward`. In place: ``dh [T, B, S]``, of the step's ``h``; ``dstate`` and
    ``drestart`` of ``h``.
    """
    tile = step.tile
    k = backend.load(inputs["k"], (0,))
    t = step.time(k)
    dstate = {"h": tile.load(inputs["dstate"]["h"])}
    if inputs["dstates"] is not None:
        dstate["h"] = dstate["h"] + tile.load(inputs["dstates"]["h"], t)
    drestart = {"h": tile.load(inputs["drestart"]["h"])} if inputs["drestart"] else {}
    dstate, drestart = add_through_matmul(step, inputs, k, dstate, drestart)
    real, zeros = tile.load_flags(inputs["mask"], t), tile.zeros()
    dh = choose(real, dstate["h"] + tile.load(inputs["dy"], t), zeros)
    tile.store(outputs["dh"], t, value=dh)
    tile.store(outputs["dstate"]["h"], value=choose(real, zeros, dstate["h"]))
    if drestart:
        tile.store(outputs["drestart"]["h"], value=drestart["h"])
