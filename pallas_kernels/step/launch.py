"""A loop of launches, one a step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.equations import Equations
from pallas_kernels.step import kernels
from pallas_kernels.step.tiles import StepTiles
from pallas_kernels.tile import Tile, Tiles
from pallas_kernels.varying import vary_together


class Phase(NamedTuple):
    """A launch of a step.

    Attributes:
        kernel: what it runs.
        name: the end of its name.
        tiles: how it is cut up.
        writes: names of what it writes of the arrays that are carried from step to step; the last
            launch of a step writes all of them, the number of the step included.
        new: names of float32 arrays ``[B, ..., H]`` that it leaves to later ones, with the axes
            between.
        of_h: it makes ``h [B, S]``, others ``[B, H]``.
    """

    kernel: Callable[[kernels.Step, dict[str, Any], dict[str, Any]], None]
    name: str
    tiles: Tiles
    writes: tuple[str, ...] = ()
    new: Mapping[str, tuple[int, ...]] = {}
    of_h: bool = False


class Launch(NamedTuple):
    """A layer's run through time, as `walk.launch.Launch`, but for what is saved.

    Attributes:
        equations: the cell.
        tiles: how a step is cut up.
        reverse: from the last step to the first.
        precision: of float32 matmuls.
        interpret: run in Pallas' interpreter.
    """

    equations: Equations
    tiles: StepTiles
    reverse: bool = False
    precision: backend.Precision = "highest"
    interpret: bool = False

    def forward(self, inputs: dict[str, Any], save: bool, states: bool = False) -> dict[str, Any]:
        """Runs all steps.

        Args:
            inputs: of `walk.kernels.forward`.
            save: keep the whole state of all steps, not only the output, for `backward`.
            states: keep it for the caller.

        Returns:
            ``history {name: [T, B, H]}``, the state after each step in the dtype of ``x_pre``,
            with ``h``, the output, not masked; and ``final {name: [B, H]}`` in float32.
        """
        x_pre, state = inputs["x_pre"], inputs["state"]
        # Each row is written before it is read; NaN shows where that would not be so.
        history = {
            name: jnp.full((x_pre.shape[0], *leaf.shape), jnp.nan, x_pre.dtype)
            for name, leaf in state.items()
            if save or states or name == "h"
        }
        fixed = {name: a for name, a in inputs.items() if name != "state"} | {"initial": state}
        carry = {"k": jnp.zeros((1,), jnp.int32), "history": history, "state": state}
        carry = self._run("forward", fixed, carry, x_pre)
        return {"history": carry["history"], "final": carry["state"]}

    def backward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The adjoint of `forward`.

        Args:
            inputs: of `walk.kernels.backward`, but that ``pre`` holds ``x_pre``, since a launch
                computes the gates again, and that ``history``, ``state`` and ``restart`` stand for
                ``start``.

        Returns:
            the outputs of `walk.kernels.backward`, but that ``dstate`` and ``drestart`` lack the
            path through ``h @ r`` of the first step.
        """
        x_pre, state = inputs["pre"]["x"], inputs["state"]
        steps, batch, _, hidden = x_pre.shape
        equations = self.equations
        h_only, vectors = len(equations.h_only), len(equations.vector_names)

        def unwritten(*shape: int) -> jax.Array:
            return jnp.full((steps, batch, *shape), jnp.nan, x_pre.dtype)

        carry = {
            "k": jnp.full((1,), steps - 1, jnp.int32),
            "pre": {"x": x_pre, "h": unwritten(h_only, hidden) if h_only else None},
            "dstate": inputs["dfinal"],
            "drestart": None if inputs["resets"] is None else jax.tree.map(jnp.zeros_like, state),
            "dvectors": jnp.zeros((vectors, batch, hidden), jnp.float32) if vectors else None,
        }
        if equations.projects:
            carry |= {"output": unwritten(hidden), "dh": unwritten(state["h"].shape[1])}
        names = ("r", "p", "h_scale", "vectors", "restart", "mask", "resets", "history", "dy")
        names += ("dstates",)
        fixed = {name: inputs[name] for name in names} | {"initial": state}
        return self._run("backward", fixed, carry, x_pre)

    def _run(
        self, suffix: str, fixed: dict[str, Any], carry: dict[str, Any], x_pre: jax.Array
    ) -> dict[str, Any]:
        """The launches of all steps; what they carry is written in place."""
        steps, batch, _, hidden = x_pre.shape
        out_features = fixed["r"].shape[0]

        def launch(phase: Phase, inputs: dict[str, Any], carry: dict[str, Any]) -> dict[str, Any]:
            tiles = phase.tiles
            features = out_features if phase.of_h else hidden

            def body(in_refs: dict[str, Any], out_refs: dict[str, Any]) -> None:
                tile = Tile.of_program(tiles, batch, features)
                step = kernels.Step(
                    self.equations, steps, self.reverse, tile, self.tiles.block_k, self.precision
                )
                phase.kernel(step, in_refs, out_refs)

            new = {
                name: jax.ShapeDtypeStruct((batch, *columns, hidden), jnp.float32)
                for name, columns in phase.new.items()
            }
            types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), carry)
            return backend.call(
                body,
                inputs,
                types | new,
                name=f"step_{self.equations.name}_{phase.name}",
                grid=tiles.grid(batch, features),
                warps=tiles.warps,
                stages=tiles.stages,
                # Not k: all programs of a launch have to read the same number.
                in_place=tuple(name for name in carry if name != "k"),
                interpret=self.interpret,
            )

        *first, last = self._phases(suffix)

        def one(carry: dict[str, Any]) -> dict[str, Any]:
            inputs = fixed | carry
            for phase in first:
                written = {name: inputs[name] for name in carry if name in phase.writes}
                inputs |= launch(phase, inputs, written)
            return launch(last, inputs, {name: inputs[name] for name in carry})

        def several(_: int, carry: dict[str, Any]) -> dict[str, Any]:
            for _ in range(self.tiles.unroll):
                carry = one(carry)
            return carry

        carry, _ = vary_together(carry, fixed["r"])
        turns, rest = divmod(steps, self.tiles.unroll)
        carry = lax.fori_loop(0, turns, several, carry)
        for _ in range(rest):
            carry = one(carry)
        return carry

    def _phases(self, suffix: str) -> list[Phase]:
        """The launches of one step; the last one counts it."""
        small, rows = self.tiles.tiles, self.tiles.rows
        projects, forward = self.equations.projects, suffix == "forward"
        phases = []
        if projects and not forward:
            phases.append(
                Phase(
                    kernels.backward_of_h,
                    "backward_of_h",
                    small,
                    writes=("dh", "dstate", "drestart"),
                    of_h=True,
                )
            )
        if rows is not None:
            new: dict[str, tuple[int, ...]] = {"columns": (len(self.equations.h_gates),)}
            if not forward:
                new["doutput" if projects else "through_matmul"] = ()
            phases.append(Phase(kernels.matmuls, f"{suffix}_matmuls", small, new=new))
        if projects and forward:
            output: dict[str, tuple[int, ...]] = {"output": ()}
            written = ("history", "state")
            gates = Phase(kernels.forward, suffix, rows or small, writes=written, new=output)
            project = Phase(kernels.project, "forward_projection", small, of_h=True)
            return [*phases, gates, project]
        kernel = kernels.forward if forward else kernels.backward
        return [*phases, Phase(kernel, suffix, rows or small)]
