"""Minimal gated unit."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, kept_update, per_gate
from jaxrnn.cells.gru import interpolate


class MGUState(NamedTuple):
    """Hidden state, ``[B, H]``."""

    h: Array


def mgu_gates(pre, state, vectors):
    """``n = tanh(n_x + f (n_h + b_hn))``, ``h' = (1 - f) n + f h``; ``f`` arrives activated."""
    n = jnp.tanh(pre["n"] + pre["f"] * (pre["hn"] + vectors.get("b_hn", 0)))
    return interpolate(pre["f"], kept_update(pre, n), state.h), {}


def mgu_reset_before_step(pre, state, weights):
    """``n = tanh(n_x + (f h) R_n)``, ``h' = (1 - f) h + f n``."""
    r_matrix = weights.r
    f = jax.nn.sigmoid(pre["f"] + state.h @ r_matrix[:, 0])
    n = jnp.tanh(pre["n"] + (f * state.h) @ r_matrix[:, 1])
    return interpolate(1 - f, kept_update(pre, n), state.h), {}


@lru_cache
def mgu(
    *,
    reset_after: bool = True,
    use_bias: bool = True,
    kernel_init: Initializer = initializers.glorot,
    recurrent_init: Initializer = initializers.orthogonal,
    bias_init: Initializer = initializers.zeros,
    forget_bias: float = 1.0,
) -> Cell:
    r"""The minimal gated unit of Zhou et al. (2016), arXiv:1603.09420, in the form of Flax.

    .. math::
        f &= \sigma(W_f\, x + R_f\, h + b_f) \\
        n &= \tanh(W_n\, x + b_n + f \odot (R_n h + b_{hn})) \\
        h' &= (1 - f) \odot n + f \odot h

    With ``reset_after=False`` the published form, in which ``f`` and ``1 - f`` change places in the
    last line and the gate stands inside the matmul; it runs on the scan only:

    .. math::
        n &= \tanh(W_n\, x + b_n + R_n (f \odot h)) \\
        h' &= (1 - f) \odot h + f \odot n

    Parameters: ``w_x [I, 2, H]``, ``r [H, 2, H]``, ``b [2, H]`` and, in the form of Flax,
    ``b_hn [H]``; gates in the order f, n.

    Args:
        reset_after: the gate is applied after the matmul or before it.
        use_bias: whether there are biases.
        kernel_init: initializer of each gate's ``[I, H]``.
        recurrent_init: initializer of each gate's ``[H, H]``.
        bias_init: initializer of ``b`` and ``b_hn``.
        forget_bias: added to the initial bias of ``f``, and subtracted from it in the published
            form: it keeps the state in both.

    Returns:
        The cell; the same object for the same arguments.
    """

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_r, k_b, k_hn = jax.random.split(key, 4)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, 2, hidden_features, dtype),
            "r": per_gate(recurrent_init, k_r, hidden_features, 2, hidden_features, dtype),
        }
        if use_bias:
            keep = forget_bias if reset_after else -forget_bias
            params["b"] = bias_init(k_b, (2, hidden_features), dtype).at[0].add(keep)
            if reset_after:
                params["b_hn"] = bias_init(k_hn, (hidden_features,), dtype)
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> MGUState:
        return MGUState(h=jnp.zeros((batch, params["r"].shape[0]), dtype))

    def loop_weights(params: Params) -> LoopWeights:
        vectors = {name: params[name] for name in ("b_hn",) if name in params}
        return LoopWeights(r=params["r"], vectors=vectors)

    return Cell(
        name="mgu" if reset_after else "mgu (reset before)",
        x_gates=("f", "n"),
        h_gates=("f", "hn") if reset_after else (),
        state_type=MGUState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=affine_inputs,
        loop_weights=loop_weights,
        gates=mgu_gates,
        sigmoid_gates=("f",) if reset_after else (),
        drops_updates=True,
        step=None if reset_after else mgu_reset_before_step,
    )
