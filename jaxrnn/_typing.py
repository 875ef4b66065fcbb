"""Axis letters and array aliases.

Letters used in docstrings, comments and (lower case) einsum, everywhere:

=  ==========================================
T  time steps
B  batch (rows)
I  input features
H  hidden features
S  features of the recurrent output (H, or the size of a projection)
G  gates (Gx: columns of the input matmul, Gh: of the recurrent one)
E  embedding features
V  vocabulary
=  ==========================================
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

Array = jax.Array
Key = jax.Array
Params = Any  # a pytree of arrays, as the cell's init_params made it
State = Any  # a NamedTuple of arrays with the batch first: LSTMState(h, c)
Initializer = Callable[..., Array]

__all__ = ["Array", "ArrayLike", "DTypeLike", "Initializer", "Key", "Params", "State"]
