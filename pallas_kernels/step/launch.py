"""A loop of launches, one a step."""

from collections.abc import Callable
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

Kernel = Callable[[kernels.Step, dict[str, Any], dict[str, Any]], None]


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

    def forward(self, inputs: dict[str, Any], save: bool) -> dict[str, Any]:
        """Runs all steps.

        Args:
            inputs: of `walk.kernels.forward`.
            save: keep the whole state of all steps, not only the output.

        Returns:
            ``history {name: [T, B, H]}``, the state after each step in the dtype of ``x_pre``,
            with ``h``, the output, not masked; and ``final {name: [B, H]}`` in float32.
        """
        x_pre = inputs["x_pre"]
        steps, batch, _, hidden = x_pre.shape
        # Each row is written before it is read; NaN shows where that would not be so.
        history = jnp.full((steps, batch, hidden), jnp.nan, x_pre.dtype)
        fixed = {name: a for name, a in inputs.items() if name != "state"}
        carry = {
            "k": jnp.zeros((1,), jnp.int32),
            "history": dict.fromkeys(self.equations.state_names if save else ("h",), history),
            "state": inputs["state"],
        }
        fixed["initial"] = inputs["state"]
        carry = self._run(kernels.forward, "forward", fixed, carry, x_pre.shape)
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
        x_pre = inputs["pre"]["x"]
        steps, batch, _, hidden = x_pre.shape
        equations = self.equations
        h_only, vectors = len(equations.h_only), len(equations.vector_names)
        row = jnp.zeros((batch, hidden), jnp.float32)
        carry = {
            "k": jnp.full((1,), steps - 1, jnp.int32),
            "pre": {
                "x": x_pre,
                "h": jnp.full((steps, batch, h_only, hidden), jnp.nan, x_pre.dtype)
                if h_only
                else None,
            },
            "dstate": inputs["dfinal"],
            "drestart": None if inputs["resets"] is None else dict.fromkeys(inputs["state"], row),
            "dvectors": jnp.zeros((vectors, batch, hidden), jnp.float32) if vectors else None,
        }
        names = ("r", "vectors", "restart", "mask", "resets", "history", "dy")
        fixed = {name: inputs[name] for name in names} | {"initial": inputs["state"]}
        return self._run(kernels.backward, "backward", fixed, carry, x_pre.shape)

    def _run(
        self,
        kernel: Kernel,
        suffix: str,
        fixed: dict[str, Any],
        carry: dict[str, Any],
        shape: tuple[int, ...],
    ) -> dict[str, Any]:
        """``kernel`` for all steps; what it carries is written in place."""
        steps, batch, _, hidden = shape
        tiles, rows, block_k, unroll = self.tiles

        def launch(
            kernel: Kernel, name: str, tiles: Tiles, inputs: Any, outputs: Any, in_place: Any = ()
        ) -> dict[str, Any]:
            def body(in_refs: dict[str, Any], out_refs: dict[str, Any]) -> None:
                tile = Tile.of_program(tiles, batch, hidden)
                step = kernels.Step(
                    self.equations, steps, self.reverse, tile, block_k, self.precision
                )
                kernel(step, in_refs, out_refs)

            return backend.call(
                body,
                inputs,
                outputs,
                name=f"step_{self.equations.name}_{name}",
                grid=tiles.grid(batch, hidden),
                warps=tiles.warps,
                stages=tiles.stages,
                in_place=in_place,
                interpret=self.interpret,
            )

        def one(carry: dict[str, Any]) -> dict[str, Any]:
            inputs = fixed | carry
            if rows is not None:
                shapes: dict[str, tuple[int, ...]] = {
                    "columns": (batch, len(self.equations.h_gates), hidden)
                }
                if "dy" in fixed:
                    shapes["dh"] = (batch, hidden)
                outputs = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
                inputs |= launch(kernels.matmuls, f"{suffix}_matmuls", tiles, inputs, outputs)
            types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), carry)
            # Not k: all programs of a launch have to read the same number.
            in_place = tuple(name for name in carry if name != "k")
            return launch(kernel, suffix, rows or tiles, inputs, types, in_place)

        def several(_: int, carry: dict[str, Any]) -> dict[str, Any]:
            for _ in range(unroll):
                carry = one(carry)
            return carry

        carry, _ = vary_together(carry, fixed["r"])
        turns, rest = divmod(steps, unroll)
        carry = lax.fori_loop(0, turns, several, carry)
        for _ in range(rest):
            carry = one(carry)
        return carry
