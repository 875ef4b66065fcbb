"""Cells by the names that the scripts' tables and options have for them."""

from typing import Any

# Options of `jaxrnn.cells.lstm`; all other names are those of factories in `jaxrnn.cells`.
LSTMS: dict[str, dict[str, Any]] = {
    "layer_norm_lstm": {"layer_norm": True},
    "peephole_lstm": {"peepholes": True},
}


def named_cell(name: str, hidden: int) -> Any:
    """A cell; the projection of "projected_lstm" halves the features."""
    from jaxrnn import cells

    if name == "projected_lstm":
        return cells.lstm(proj_size=max(1, hidden // 2))
    return cells.lstm(**LSTMS[name]) if name in LSTMS else getattr(cells, name)()
