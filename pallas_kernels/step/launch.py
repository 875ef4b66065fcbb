"""A loop of launches, one a step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.equations import Arrays, Equations
from pallas_kernels.step import kernels
from pallas_kernels.step.tiles import StepTiles
from pallas_kernels.tile import Tile


class Launch(NamedTuple):
    """A layer's run through time: the same calls as `walk.launch.Launch`.

    Attributes:
        equations: the cell.
        tiles: how a step is cut up.
        reverse: from the last step to the first.
        precision: of float32 matmuls.
    """

    equations: Equations
    tiles: StepTiles
    reverse: bool = False
    precision: backend.Precision = "highest"

    def forward(self, inputs: dict[str, Any], save: bool) -> tuple[Arrays, Arrays]:
        """Runs all steps; see `walk.launch.Launch.forward`."""
        x_pre = inputs["x_pre"]
        steps, batch, _, hidden = x_pre.shape
        names = self.equations.history_names if save else (self.equations.output_name,)
        # Each row is written before it is read; NaN shows where that would not be so.
        history = {n: jnp.full((steps, batch, hidden), jnp.nan, x_pre.dtype) for n in names}
        initial = inputs["state"]
        fixed = {
            **{name: inputs[name] for name in ("r", "vectors", "restart", "mask", "resets")},
            "x_pre": x_pre,
            "initial": initial,
        }
        carry = {
            "k": jnp.zeros((1,), jnp.int32),
            "history": history,
            "state": {name: a.astype(jnp.float32) for name, a in initial.items()},
        }
        carry = self._run(kernels.forward, "forward", fixed, carry, x_pre.shape)
        return carry["history"], carry["state"]

    def backward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The adjoint of `forward`.

        Args:
            inputs: of `walk.launch.Launch.backward`, but that ``pre`` holds ``x_pre``: a launch
                computes the gates again.

        Returns:
            the results of `walk.launch.Launch.backward`, but that ``dstate`` and ``drestart`` lack
            the path through ``h @ r`` of the first step.
        """
        x_pre = inputs["pre"]["x"]
        steps, batch, _, hidden = x_pre.shape
        equations = self.equations
        h_only = (steps, batch, len(equations.h_only), hidden)
        names = ("r", "vectors", "restart", "mask", "resets", "history", "dy")
        fixed = {name: inputs[name] for name in names} | {"initial": inputs["state"]}

        def zeros(names: Any) -> Arrays:
            return {name: jnp.zeros((batch, hidden), jnp.float32) for name in names}

        carry = {
            "k": jnp.full((1,), steps - 1, jnp.int32),
            "pre": {
                "x": x_pre,
                "h": jnp.full(h_only, jnp.nan, x_pre.dtype) if equations.h_only else None,
            },
            "dstate": inputs["dfinal"],
            "drestart": None if inputs["restart"] is None else zeros(inputs["restart"]),
            "dvectors": zeros(inputs["vectors"]),
        }
        return self._run(kernels.backward, "backward", fixed, carry, x_pre.shape)

    def _run(
        self,
        kernel: Callable[[kernels.Step, dict[str, Any], dict[str, Any]], None],
        suffix: str,
        fixed: dict[str, Any],
        carry: dict[str, Any],
        shape: tuple[int, ...],
    ) -> dict[str, Any]:
        """``kernel`` for all steps; what it carries is written in place."""
        steps, batch, _, hidden = shape
        block_b, block_h, warps, stages = self.tiles.tiles

        def body(in_refs: dict[str, Any], out_refs: dict[str, Any]) -> None:
            row, column = (backend.program_id(axis) for axis in (0, 1))
            tile = Tile(row * block_b, column * block_h, block_b, block_h, batch, hidden)
            kernel(
                kernels.Step(
                    self.equations, steps, self.reverse, tile, self.tiles.block_k, self.precision
                ),
                in_refs,
                out_refs,
            )

        def one(carry: dict[str, Any]) -> dict[str, Any]:
            return backend.call(
                body,
                fixed | carry,
                jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), carry),
                name=f"step_{self.equations.name}_{suffix}",
                grid=(-(-batch // block_b), -(-hidden // block_h)),
                warps=warps,
                stages=stages,
                # Not k: all programs of a launch have to read the same number.
                in_place=tuple(name for name in carry if name != "k"),
            )

        def several(_: int, carry: dict[str, Any]) -> dict[str, Any]:
            for _ in range(self.tiles.unroll):
                carry = one(carry)
            return carry

        turns, rest = divmod(steps, self.tiles.unroll)
        carry = lax.fori_loop(0, turns, several, carry)
        for _ in range(rest):
            carry = one(carry)
        return carry
