"""Simple recurrent unit."""

from functools import lru_cache
from math import exp, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, full_precision, per_gate, project
from jaxrnn.cells.normalization import normalized


class SRUState(NamedTuple):
    """Cell state, ``[B, H]``."""

    c: Array


def sru_gates(pre, state, vectors):
    """``f, r = sigmoid(f_x + v_f c), sigmoid(r_x + v_r c)``, then the two weighted sums."""
    f = jax.nn.sigmoid(pre["f"] + vectors["f"] * state.c)
    r = jax.nn.sigmoid(pre["r"] + vectors["r"] * state.c)
    c = f * state.c + (1 - f) * pre["u"]
    return r * c + (1 - r) * pre["x"], {"c": c}


def highway_scale(highway_bias: float, rescale: bool) -> float:
    """The alpha that keeps the variance of the layers equal at the start."""
    return sqrt(1 + 2 * exp(highway_bias)) if rescale else 1.0


def columns(params: Params, x: Array, highway: Array, alpha: float) -> Array:
    """Columns u, f, r and x of the gates, ``[T, B, 4, H]``.

    Args:
        params: ``w_x``, and ``b`` and ``w_highway`` where there are any.
        x: ``[T, B, I]``, what the matrices multiply.
        highway: ``[T, B, H]``, what goes past them where there is no ``w_highway``.
        alpha: the factor of the highway.
    """
    w_x = params["w_x"]
    if "w_highway" in params:
        w_x = jnp.concatenate([w_x, params["w_highway"][:, None] * alpha], axis=1)
    x_pre = project(x, w_x)
    u, gates, past = x_pre[:, :, :1], x_pre[:, :, 1:3], x_pre[:, :, 3:]
    if "w_highway" not in params:
        past = highway[:, :, None] * alpha
    if "b" in params:
        gates = gates + params["b"]
    return jnp.concatenate([u, gates, past], axis=2)


def uniform_unit_variance(key: Key, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Uniform with variance ``1 / rows`` (section 3.2 of the paper)."""
    bound = sqrt(3.0 / shape[0])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


@lru_cache
def sru(
    *,
    use_bias: bool = True,
    layer_norm: bool = False,
    proj_size: int | None = None,
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

    With ``layer_norm``, :math:`x` is normalized first, with gain and bias, but for the highway that
    has no matrix; with ``proj_size``, all matrices share a first factor, :math:`W = W' P`. Both as
    in the package ``sru``, whose highway matrix however contains :math:`\alpha`.

    Parameters: ``w_x [I, 3, H]`` (u, f, r), ``v [2, H]`` (f, r), ``b [2, H]`` (f, r) and, where
    ``I != H``, ``w_highway [I, H]``. With ``layer_norm`` also ``gain_x [I]`` and ``b_x [I]``, with
    ``proj_size`` also ``w_proj [I, proj_size]``, and then the matrices are ``[proj_size, ...]``.

    Args:
        use_bias: whether there is a ``b``.
        layer_norm: whether the layer's input is normalized.
        proj_size: size of the factor that the matrices share; None has none. The package's
            ``n_proj``, which it ignores unless smaller than I and H.
        highway_bias: initial bias of the reset gate, added to ``bias_init``'s.
        rescale: whether the highway is scaled by alpha.
        kernel_init: initializer of each ``[I, H]``.
        recurrent_init: initializer of ``v``.
        bias_init: initializer of ``b``.

    Returns:
        The cell; the same object for the same arguments.
    """
    if proj_size is not None and proj_size < 1:
        raise ValueError(f"proj_size should be at least 1, or None for no factor, got {proj_size}")
    alpha = highway_scale(highway_bias, rescale)

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_v, k_b, k_h, k_p = jax.random.split(key, 5)
        rows = proj_size or in_features
        params = {
            "w_x": per_gate(kernel_init, k_x, rows, 3, hidden_features, dtype),
            "v": recurrent_init(k_v, (2, hidden_features), dtype),
        }
        if use_bias:
            params["b"] = bias_init(k_b, (2, hidden_features), dtype).at[1].add(highway_bias)
        if in_features != hidden_features:
            params["w_highway"] = kernel_init(k_h, (rows, hidden_features), dtype)
        if proj_size is not None:
            params["w_proj"] = kernel_init(k_p, (in_features, proj_size), dtype)
        if layer_norm:
            params["gain_x"] = jnp.ones((in_features,), dtype)
            params["b_x"] = jnp.zeros((in_features,), dtype)
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> SRUState:
        return SRUState(c=jnp.zeros((batch, params["v"].shape[-1]), dtype))

    def matmul_input(params: Params, x: Array) -> Array:
        if layer_norm:
            x = normalized(x, params["gain_x"], params["b_x"])
        if proj_size is None:
            return x
        w_proj = params["w_proj"]
        return jnp.matmul(x, w_proj, precision=full_precision(w_proj.dtype))

    return Cell(
        name="sru",
        x_gates=("u", "f", "r", "x"),
        h_gates=(),
        state_type=SRUState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=lambda params, x: columns(params, matmul_input(params, x), x, alpha),
        loop_weights=lambda params: LoopWeights(vectors={"f": params["v"][0], "r": params["v"][1]}),
        gates=sru_gates,
    )
