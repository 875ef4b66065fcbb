"""What a kernel has to know of a cell, and the step that all kernels share."""

from collections.abc import Callable
from typing import NamedTuple

import jax

Arrays = dict[str, jax.Array]


class Equations(NamedTuple):
    """A cell, as kernels see it.

    Attributes:
        name: of the cell, part of the kernels' names.
        x_gates: names of the columns of ``x_pre [T, B, Gx, H]``.
        h_gates: names of the columns of ``h @ r``; those that stand in both come first in both.
        state_names: fields of the state; ``h``, where there is one, is the output.
        vector_names: of the rows of ``vectors [N, H]``.
        gates: ``(pre {name: [B, H]}, state {name: [B, H]}, vectors {name: [B, H]}) ->
            (output [B, H], {field: [B, H]} without h)`` on float32 tiles.
    """

    name: str
    x_gates: tuple[str, ...]
    h_gates: tuple[str, ...]
    state_names: tuple[str, ...]
    vector_names: tuple[str, ...]
    gates: Callable[[Arrays, Arrays, Arrays], tuple[jax.Array, Arrays]]

    @property
    def h_only(self) -> tuple[str, ...]:
        """Gates without a column of ``x_pre``."""
        return tuple(gate for gate in self.h_gates if gate not in self.x_gates)

    @property
    def output_name(self) -> str:
        """``h`` where the output is part of the state."""
        return "h" if "h" in self.state_names else "output"

    def after(self, pre: Arrays, start: Arrays, vectors: Arrays) -> Arrays:
        """One step: what it leaves, the state and the output where it is no part of that."""
        output, rest = self.gates(pre, start, vectors)
        return {self.output_name: output, **rest}
