"""Cells by the names that the scripts' tables and options have for them."""

from typing import Any

# Factory and options; all other names are those of factories in `jaxrnn.cells`.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "layer_norm_lstm": ("lstm", {"layer_norm": True}),
    "layer_norm_gru": ("gru", {"layer_norm": True}),
    "peephole_lstm": ("lstm", {"peepholes": True}),
}


def named_cell(name: str, hidden: int) -> Any:
    """A cell; the projection of "projected_lstm" halves the features."""
    from jaxrnn import cells

    if name == "projected_lstm":
        return cells.lstm(proj_size=max(1, hidden // 2))
    factory, options = VARIANTS.get(name, (name, {}))
    return getattr(cells, factory)(**options)
