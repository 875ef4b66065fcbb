"""The cells: gate arithmetic, parameters and initial values."""

from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs
from jaxrnn.cells.elman import ElmanState, elman
from jaxrnn.cells.gru import GRUState, gru
from jaxrnn.cells.indrnn import IndRNNState, indrnn
from jaxrnn.cells.lstm import LSTMState, lstm
from jaxrnn.cells.mgu import MGUState, mgu
from jaxrnn.cells.min_rnn import MinRNNState, min_gru, min_lstm
from jaxrnn.cells.qrnn import QRNNState, QRNNWindowState, qrnn
from jaxrnn.cells.slstm import SLSTMState, slstm
from jaxrnn.cells.sru import SRUState, sru

__all__ = [
    "Cell",
    "ElmanState",
    "GRUState",
    "IndRNNState",
    "LSTMState",
    "LoopWeights",
    "MGUState",
    "MinRNNState",
    "QRNNState",
    "QRNNWindowState",
    "SLSTMState",
    "SRUState",
    "affine_inputs",
    "elman",
    "gru",
    "indrnn",
    "initializers",
    "lstm",
    "mgu",
    "min_gru",
    "min_lstm",
    "qrnn",
    "slstm",
    "sru",
]
