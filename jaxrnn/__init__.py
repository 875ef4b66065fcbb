"""jaxrnn: recurrent networks that train fast in JAX."""

from typing import Any

from jaxrnn import cells, regularization
from jaxrnn.cells import Cell, LoopWeights
from jaxrnn.nnx import GRU, LSTM, RNN, SRU, Elman, SRUPlusPlus
from jaxrnn.recurrence.api import recurrence
from jaxrnn.recurrence.choice import explain, supported
from jaxrnn.recurrence.noise import Noise

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "SRU",
    "Cell",
    "Elman",
    "LoopWeights",
    "Noise",
    "SRUPlusPlus",
    "cells",
    "explain",
    "load",
    "recurrence",
    "regularization",
    "supported",
]


def __getattr__(name: str) -> Any:
    # `load` needs the packages of the "train" extra, the layers do not.
    if name == "load":
        from jaxrnn.train.loading import load

        return load
    raise AttributeError(f"module 'jaxrnn' has no attribute {name!r}")
