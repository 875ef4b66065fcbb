"""The cells: gate arithmetic, parameters and initial values."""

from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs
from jaxrnn.cells.elman import ElmanState, elman
from jaxrnn.cells.gru import GRUState, gru
from jaxrnn.cells.layer_norm_lstm import layer_norm_lstm
from jaxrnn.cells.lstm import LSTMState, lstm
from jaxrnn.cells.sru import SRUState, sru

__all__ = [
    "Cell",
    "ElmanState",
    "GRUState",
    "LSTMState",
    "LoopWeights",
    "SRUState",
    "affine_inputs",
    "elman",
    "gru",
    "layer_norm_lstm",
    "lstm",
    "sru",
]
