"""What a kernel has to know of a cell, and the step that all kernels share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Arrays = dict[str, jax.Array]


class Equations(NamedTuple):
    """A cell, as kernels see it.

    Attributes:
        name: of the cell, part of the kernels' names.
        x_gates: names of the columns of ``x_pre [T, B, Gx, H]``.
        h_gates: names of the columns of ``h @ r``; those that stand in both come first in both.
        state_names: fields of the state that the gates read; ``h``, where there is one, is the
            output.
        vector_names: of the rows of ``vectors [N, H]``.
        gates: ``(pre {name: [B, H]}, state {name: [B, H]}, vectors {name: [B, H]}) ->
            (output [B, H], {field: [B, H]} without h)`` on float32 tiles.
        projects: the loop makes ``h [B, S]`` of the output by a matmul, and no gate reads it.
        gradient_clip: bound of the cotangents of what the gates see; None has none.
    """

    name: str
    x_gates: tuple[str, ...]
    h_gates: tuple[str, ...]
    state_names: tuple[str, ...]
    vector_names: tuple[str, ...]
    gates: Callable[[Arrays, Arrays, Arrays], tuple[jax.Array, Arrays]]
    projects: bool = False
    gradient_clip: float | None = None

    @property
    def h_only(self) -> tuple[str, ...]:
        """Gates without a column of ``x_pre``."""
        return tuple(gate for gate in self.h_gates if gate not in self.x_gates)

    @property
    def output_name(self) -> str:
        """``h`` where the output is part of the state."""
        return "h" if "h" in self.state_names else "output"

    def of_state(self, arrays: Mapping[str, Any] | None) -> dict[str, Any]:
        """Those of some arrays that belong to the state that the gates read; None is none."""
        return {name: a for name, a in (arrays or {}).items() if name in self.state_names}

    def after(self, pre: Arrays, start: Arrays, vectors: Arrays) -> Arrays:
        """One step: what it leaves, the state and the output where it is no part of that."""
        output, rest = self.gates(pre, start, vectors)
        return {self.output_name: output, **rest}
