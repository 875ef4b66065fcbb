"""Gated recurrent unit."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, kept_update, per_gate
from jaxrnn.cells.normalization import centered, mean_by_shares, normalized_inputs, scaled, shares

H_GATES = ("hr", "hz", "hn")


class GRUState(NamedTuple):
    """Hidden state, ``[B, H]``."""

    h: Array


def interpolate(z, n, h):
    """``h' = (1 - z) n + z h``."""
    return (1 - z) * n + z * h


def gru_gates(pre, state, vectors):
    """``n = tanh(n_x + r (n_h + b_hn))``; ``r, z`` arrive activated."""
    n = jnp.tanh(pre["n"] + pre["r"] * (pre["hn"] + vectors.get("b_hn", 0)))
    return interpolate(pre["z"], kept_update(pre, n), state.h), {}


def layer_norm_gru_gates(pre, state, vectors):
    """The GRU's, of ``x_pre`` and ``LN(R h)``; ``R h`` has a mean of 0."""
    mean = mean_by_shares(vectors)
    hr, hz, hn = (scaled(pre[name], vectors[name], mean) for name in H_GATES)
    r, z = jax.nn.sigmoid(pre["r"] + hr), jax.nn.sigmoid(pre["z"] + hz)
    return gru_gates(pre | {"r": r, "z": z, "hn": hn}, state, vectors)


def gru_reset_before_step(pre, state, weights):
    """``n = tanh(n_x + (r h) R_n)``: the reset gate stands inside the matmul."""
    r_matrix = weights.r
    r, z = (jax.nn.sigmoid(pre[name] + state.h @ r_matrix[:, j]) for j, name in enumerate("rz"))
    n = jnp.tanh(pre["n"] + (r * state.h) @ r_matrix[:, 2])
    return interpolate(z, kept_update(pre, n), state.h), {}


@lru_cache
def gru(
    *,
    reset_after: bool = True,
    layer_norm: bool = False,
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    recurrent_init: Initializer = initializers.orthogonal,
    bias_init: Initializer = initializers.zeros,
) -> Cell:
    r"""The GRU of Cho et al. (2014), arXiv:1406.1078.

    .. math::
        r, z &= \sigma(W_{r,z}\, x + R_{r,z}\, h + b_{r,z}) \\
        n &= \tanh(W_n x + b_n + r \odot (R_n h + b_{hn})) \\
        h' &= (1 - z) \odot n + z \odot h

    With ``reset_after=False`` the published form, :math:`n = \tanh(W_n x + b_n + R_n (r \odot h))`,
    which runs on the scan only. The roles of ``z`` and ``1 - z`` are those of ``torch.nn.GRU``.

    With ``layer_norm=True`` each gate's :math:`W x` and :math:`R h` are normalized, each with a
    gain (Ba et al. 2016, arXiv:1607.06450).

    Parameters: ``w_x [I, 3, H]``, ``r [H, 3, H]``, ``b [3, H]`` and, with the reset after the
    matmul, ``b_hn [H]``; gates in the order r, z, n. With layer norm also ``gain_x [3, H]`` and
    ``gain_h [3, H]``.

    Args:
        reset_after: the reset gate is applied after the matmul (as in cuDNN) or before it.
        layer_norm: whether there is layer normalization.
        use_bias: whether there are biases.
        kernel_init: initializer of each gate's ``[I, H]``.
        recurrent_init: initializer of each gate's ``[H, H]``.
        bias_init: initializer of ``b`` and ``b_hn``.

    Returns:
        The cell; the same object for the same arguments.

    Raises:
        ValueError: for layer norm with the reset before the matmul.
    """
    if layer_norm and not reset_after:
        raise ValueError("layer_norm should go with reset_after=True, got reset_after=False")

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_r, k_b, k_hn = jax.random.split(key, 4)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, 3, hidden_features, dtype),
            "r": per_gate(recurrent_init, k_r, hidden_features, 3, hidden_features, dtype),
        }
        if use_bias:
            params["b"] = bias_init(k_b, (3, hidden_features), dtype)
            if reset_after:
                params["b_hn"] = bias_init(k_hn, (hidden_features,), dtype)
        if layer_norm:
            params |= {n: jnp.ones((3, hidden_features), dtype) for n in ("gain_x", "gain_h")}
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> GRUState:
        return GRUState(h=jnp.zeros((batch, params["r"].shape[0]), dtype))

    def loop_weights(params: Params) -> LoopWeights:
        vectors = {name: params[name] for name in ("b_hn",) if name in params}
        if layer_norm:
            vectors |= zip(H_GATES, params["gain_h"], strict=True)
            vectors["share"] = shares(params["gain_h"])
        r = centered(params["r"]) if layer_norm else params["r"]
        return LoopWeights(r=r, vectors=vectors)

    cell = Cell(
        name="gru" if reset_after else "gru (reset before)",
        x_gates=("r", "z", "n"),
        h_gates=("r", "z", "hn") if reset_after else (),
        state_type=GRUState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=affine_inputs,
        loop_weights=loop_weights,
        gates=gru_gates,
        sigmoid_gates=("r", "z") if reset_after else (),
        drops_updates=True,
        step=None if reset_after else gru_reset_before_step,
    )
    if not layer_norm:
        return cell
    return cell._replace(
        name="layer norm gru",
        h_gates=H_GATES,
        project_inputs=normalized_inputs,
        gates=layer_norm_gru_gates,
        sigmoid_gates=(),
        whole_rows=True,
    )
