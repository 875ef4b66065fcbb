"""Weights and states of other libraries to jaxrnn's, and back.

Parameters of jaxrnn are those of a stack, ``{"layer_0": {"forward": {"w_x": ..., "r": ...}}}``, in
the form that `jaxrnn.linen` takes as ``{"params": ...}`` and that `jaxrnn.nnx.RNN.parameters`
gives. None of the other libraries is imported, and no pickle is ever read.

Which cell parameters are of is read off their names and shapes. What these do not tell is for the
caller to know: activations, and variants of a cell whose parameters look alike (an sLSTM and an
LSTM; an LSTM with coupled gates and a GRU). Each pair of functions undoes the other.
"""

from jaxrnn.convert.flax import from_flax, state_from_flax, state_to_flax, to_flax
from jaxrnn.convert.keras import from_keras, state_from_keras, state_to_keras, to_keras
from jaxrnn.convert.sru import from_sru, state_from_sru, state_to_sru, to_sru
from jaxrnn.convert.torch import from_torch, state_from_torch, state_to_torch, to_torch

__all__ = [
    "from_flax",
    "from_keras",
    "from_sru",
    "from_torch",
    "state_from_flax",
    "state_from_keras",
    "state_from_sru",
    "state_from_torch",
    "state_to_flax",
    "state_to_keras",
    "state_to_sru",
    "state_to_torch",
    "to_flax",
    "to_keras",
    "to_sru",
    "to_torch",
]
