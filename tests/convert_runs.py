"""What the tests of `jaxrnn.convert` share: a stack run from its parameters alone."""

import functools

import jax
import numpy as np
from table import quick_compile
from tolerance import leaves

from jaxrnn import linen

T, B, I, H = 5, 2, 3, 4  # noqa: E741  (the axis letters of the library)


def draw(rng, *shape, dtype=np.float64):
    """Random values large enough that a gate in the wrong place shows."""
    return rng.normal(size=shape).astype(dtype)


def redrawn(rng, params):
    """Random arrays in the place of all that are there, biases too."""
    return jax.tree.map(lambda a: jax.numpy.asarray(draw(rng, *a.shape, dtype=a.dtype)), params)


@functools.lru_cache
def program(cell, num_layers, bidirectional):
    """The layer as one compiled function, the same for the same arguments."""
    layer = linen.RNN(
        cell=cell, hidden_features=H, num_layers=num_layers, bidirectional=bidirectional
    )
    return jax.jit(layer.apply)


def run(cell, params, x, state=None):
    """Outputs and final state of ``x [B, T, I]``; the layers are those of the parameters."""
    with quick_compile():
        layer = program(cell, len(params), "backward" in params["layer_0"])
        return layer({"params": params}, x, state)


def assert_identical(got, want):
    """The same names and bits."""
    got, want = leaves(got), leaves(want)
    assert sorted(got) == sorted(want)
    for name, value in want.items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(value), err_msg=name)
        assert got[name].dtype == value.dtype, name
