"""Gated recurrent unit."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, per_gate


class GRUState(NamedTuple):
    """Hidden state, ``[B, H]``."""

    h: Array


def interpolate(z, n, h):
    """``h' = (1 - z) n + z h``."""
    return (1 - z) * n + z * h


def gru_gates(pre, state, vectors):
    """``n = tanh(n_x + r (n_h + b_hn))``; ``r, z`` arrive activated."""
    n = jnp.tanh(pre["n"] + pre["r"] * (pre["hn"] + vectors.get("b_hn", 0)))
    return interpolate(pre["z"], n, state.h), {}


def gru_reset_before_step(pre, state, weights):
    """``n = tanh(n_x + (r h) R_n)``: the reset gate stands inside the matmul."""
    r_matrix = weights.r
    r, z = (jax.nn.sigmoid(pre[name] + state.h @ r_matrix[:, j]) for j, name in enumerate("rz"))
    n = jnp.tanh(pre["n"] + (r * state.h) @ r_matrix[:, 2])
    return interpolate(z, n, state.h), {}


@lru_cache
def gru(
    *,
    reset_after: bool = True,
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

    Parameters: ``w_x [I, 3, H]``, ``r [H, 3, H]``, ``b [3, H]`` and, with the reset after the
    matmul, ``b_hn [H]``; gates in the order r, z, n.

    Args:
        reset_after: the reset gate is applied after the matmul (as in cuDNN) or before it.
        use_bias: whether there are biases.
        kernel_init: initializer of each gate's ``[I, H]``.
        recurrent_init: initializer of each gate's ``[H, H]``.
        bias_init: initializer of ``b`` and ``b_hn``.

    Returns:
        The cell; the same object for the same arguments.
    """

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
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> GRUState:
        return GRUState(h=jnp.zeros((batch, params["r"].shape[0]), dtype))

    def loop_weights(params: Params) -> LoopWeights:
        vectors = {name: params[name] for name in ("b_hn",) if name in params}
        return LoopWeights(r=params["r"], vectors=vectors)

    return Cell(
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
        step=None if reset_after else gru_reset_before_step,
    )
