"""Initializers of the cells' matrices, as module constants so that equal cells are one object."""

import jax

glorot = jax.nn.initializers.glorot_uniform()
orthogonal = jax.nn.initializers.orthogonal()
zeros = jax.nn.initializers.zeros
