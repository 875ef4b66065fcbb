"""One launch for all steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.equations import Arrays, Equations
from pallas_kernels.tile import Tile, Tiles
from pallas_kernels.walk import kernels


class Launch(NamedTuple):
    """A layer's run through time, for one tile size.

    Attributes:
        equations: the cell.
        family: of kernels, the first part of their names.
        tiles: how the work is cut up.
        reverse: from the last step to the first.
        precision: of float32 matmuls.
    """

    equations: Equations
    family: str
    tiles: Tiles
    reverse: bool = False
    precision: backend.Precision = "highest"

    def forward(self, inputs: dict[str, Any], save: bool) -> tuple[Arrays, Arrays]:
        """Runs all steps.

        Args:
            inputs: of `kernels.forward`.
            save: keep the states of all steps, for `backward`.

        Returns:
            the history, ``{name: [T, B, H]}`` in the dtype of ``x_pre`` (without ``save`` of the
            output alone), and the final state ``{name: [B, H]}`` in float32.
        """
        steps, batch, _, hidden = inputs["x_pre"].shape
        dtype = inputs["x_pre"].dtype
        names = self.equations.history_names if save else (self.equations.output_name,)
        outputs = {
            "history": {n: jax.ShapeDtypeStruct((steps, batch, hidden), dtype) for n in names},
            "final": like_state(inputs["state"]),
        }
        results = self._call(kernels.forward, "forward", inputs, outputs, inputs["x_pre"].shape)
        return results["history"], results["final"]

    def backward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The adjoint of `forward`: inputs and results are those of `kernels.backward`."""
        batch, hidden = inputs["pre"]["x"].shape[1::2]
        state = like_state(inputs["state"])
        outputs = {
            "pre": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), inputs["pre"]),
            "dstate": state,
            "drestart": None if inputs["restart"] is None else state,
            "dvectors": {
                name: jax.ShapeDtypeStruct((batch, hidden), jnp.float32)
                for name in inputs["vectors"]
            },
        }
        shape = inputs["pre"]["x"].shape
        return self._call(kernels.backward, "backward", inputs, outputs, shape, in_place=("pre",))

    def _call(
        self,
        kernel: Callable[[kernels.Walk, dict[str, Any], dict[str, Any]], None],
        suffix: str,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        shape: tuple[int, ...],
        in_place: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        steps, batch, _, hidden = shape
        block_b, block_h, warps, stages = self.tiles

        def body(in_refs: dict[str, Any], out_refs: dict[str, Any]) -> None:
            row, column = (backend.program_id(axis) for axis in (0, 1))
            tile = Tile(row * block_b, column * block_h, block_b, block_h, batch, hidden)
            run = kernels.Walk(self.equations, steps, self.reverse, tile, self.precision)
            kernel(run, in_refs, out_refs)

        return backend.call(
            body,
            inputs,
            outputs,
            name=f"{self.family}_{self.equations.name}_{suffix}",
            grid=(-(-batch // block_b), -(-hidden // block_h)),
            warps=warps,
            stages=stages,
            in_place=in_place,
        )


def like_state(state: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
    """Types of arrays like the state's, in float32."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), state)
