"""Simple recurrent unit."""

from functools import lru_cache
from math import exp, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, per_gate, project


class SRUState(NamedTuple):
    """Cell state, ``[B, H]``."""

    c: Array


def sru_gates(pre, state, vectors):
    """``f, r = sigmoid(f_x + v_f c), sigmoid(r_x + v_r c)``, then the two weighted sums."""
    f = jax.nn.sigmoid(pre["f"] + vectors["f"] * state.c)
    r = jax.nn.sigmoid(pre["r"] + vectors["r"] * state.c)
    c = f * state.c + (1 - f) * pre["u"]
    return r * c + (1 - r) * pre["x"], {"c": c}


def uniform_unit_variance(key: Key, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Uniform with variance ``1 / rows`` (section 3.2 of the paper)."""
    bound = sqrt(3.0 / shape[0])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


@lru_cache
def sru(
    *,
    use_bias: bool = True,
    highway_bias: float = 0.0,
    rescale: bool = True,
    kernel_init: Initializer = uniform_unit_variance,
    recurrent_init: Initializer = initializers.zeros,
    bias_init: Initializer = initializers.zeros,
) -> Cell:
    r"""The SRU of Lei et al. (2018), arXiv:1709.02755: no matmul inside the time loop.

    .. math::
        u &= W x \\
        f &= \sigma(W_f x + v_f \odot c + b_f) \\
        r &= \sigma(W_r x + v_r \odot c + b_r) \\
        c' &= f \odot c + (1 - f) \odot u \\
        h &= r \odot c' + (1 - r) \odot \alpha x

    with :math:`\alpha = \sqrt{1 + 2 e^{b}}` for the initial highway bias :math:`b`, which keeps the
    variance of the layers equal at the start. Where the sizes of input and output differ,
    :math:`x` of the last line is :math:`W_h x`.

    Parameters: ``w_x [I, 3, H]`` (u, f, r), ``v [2, H]`` (f, r), ``b [2, H]`` (f, r) and, where
    ``I != H``, ``w_highway [I, H]``.

    Args:
        use_bias: whether there is a ``b``.
        highway_bias: initial bias of the reset gate, added to ``bias_init``'s.
        rescale: whether the highway is scaled by alpha.
        kernel_init: initializer of each ``[I, H]``.
        recurrent_init: initializer of ``v``.
        bias_init: initializer of ``b``.

    Returns:
        The cell; the same object for the same arguments.
    """
    alpha = sqrt(1 + 2 * exp(highway_bias)) if rescale else 1.0

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_v, k_b, k_h = jax.random.split(key, 4)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, 3, hidden_features, dtype),
            "v": recurrent_init(k_v, (2, hidden_features), dtype),
        }
        if use_bias:
            params["b"] = bias_init(k_b, (2, hidden_features), dtype).at[1].add(highway_bias)
        if in_features != hidden_features:
            params["w_highway"] = kernel_init(k_h, (in_features, hidden_features), dtype)
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> SRUState:
        return SRUState(c=jnp.zeros((batch, params["v"].shape[-1]), dtype))

    def project_inputs(params: Params, x: Array) -> Array:
        w_x = params["w_x"]
        if "w_highway" in params:
            w_x = jnp.concatenate([w_x, params["w_highway"][:, None] * alpha], axis=1)
        x_pre = project(x, w_x)
        u, gates, highway = x_pre[:, :, :1], x_pre[:, :, 1:3], x_pre[:, :, 3:]
        if "w_highway" not in params:
            highway = x[:, :, None] * alpha
        if "b" in params:
            gates = gates + params["b"]
        return jnp.concatenate([u, gates, highway], axis=2)

    return Cell(
        name="sru",
        x_gates=("u", "f", "r", "x"),
        h_gates=(),
        state_type=SRUState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=project_inputs,
        loop_weights=lambda params: LoopWeights(vectors={"f": params["v"][0], "r": params["v"][1]}),
        gates=sru_gates,
    )
