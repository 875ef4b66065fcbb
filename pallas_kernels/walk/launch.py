"""One launch for all steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.equations import Equations
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
        interpret: run in Pallas' interpreter.
    """

    equations: Equations
    family: str
    tiles: Tiles
    reverse: bool = False
    precision: backend.Precision = "highest"
    interpret: bool = False

    def forward(self, inputs: dict[str, Any], save: bool, states: bool = False) -> dict[str, Any]:
        """Runs all steps: inputs and results are those of `kernels.forward`.

        ``y``, ``start`` (None without ``save``) and ``states`` (None where it is not asked for)
        have the dtype of ``x_pre``, ``final`` float32.
        """
        steps, batch, _, hidden = inputs["x_pre"].shape
        history = jax.ShapeDtypeStruct((steps, batch, hidden), inputs["x_pre"].dtype)
        outputs = {
            "y": history,
            "start": dict.fromkeys(inputs["state"], history) if save else None,
            "states": dict.fromkeys(inputs["state"], history) if states else None,
            "final": dict.fromkeys(inputs["state"], self._row(history)),
        }
        return self._call(kernels.forward, "forward", inputs, outputs, inputs["x_pre"].shape)

    def backward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The adjoint of `forward`: inputs and results are those of `kernels.backward`."""
        pre = inputs["pre"]
        state = dict.fromkeys(inputs["dfinal"], self._row(inputs["dy"]))
        dvectors = jax.ShapeDtypeStruct(
            (len(self.equations.vector_names), *inputs["dy"].shape[1:]), jnp.float32
        )
        outputs = {
            "pre": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), pre),
            "dstate": state,
            "drestart": None if inputs["resets"] is None else state,
            "dvectors": dvectors if self.equations.vector_names else None,
        }
        return self._call(
            kernels.backward, "backward", inputs, outputs, pre["x"].shape, in_place=("pre",)
        )

    def _row(self, history: Any) -> jax.ShapeDtypeStruct:
        """One step of a history, in float32."""
        return jax.ShapeDtypeStruct(history.shape[1:], jnp.float32)

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
        tiles = self.tiles

        def body(in_refs: dict[str, Any], out_refs: dict[str, Any]) -> None:
            tile = Tile.of_program(tiles, batch, hidden)
            run = kernels.Walk(self.equations, steps, self.reverse, tile, self.precision)
            kernel(run, in_refs, out_refs)

        return backend.call(
            body,
            inputs,
            outputs,
            name=f"{self.family}_{self.equations.name}_{suffix}",
            grid=tiles.grid(batch, hidden),
            warps=tiles.warps,
            stages=tiles.stages,
            in_place=in_place,
            interpret=self.interpret,
        )
