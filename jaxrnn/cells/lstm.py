"""Long short-term memory."""

from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params
from jaxrnn.cells import initializers
from jaxrnn.cells.base import Cell, LoopWeights, affine_inputs, kept_update, per_gate
from jaxrnn.cells.normalization import centered, mean_by_shares, normalized_inputs, scaled, shares
from jaxrnn.cells.normalization import layer_norm as normed

GATES = ("i", "f", "g", "o")


class LSTMState(NamedTuple):
    """Hidden and cell state, ``[B, H]`` each."""

    h: Array
    c: Array


def lstm_gates(pre, state, vectors, *, cell_clip=None):
    """``c' = f c + i g``, ``h' = o tanh(c')``; without a column of its own, ``i`` is ``1 - f``.

    ``i, f, g, o`` arrive activated, but those with a peephole, which look at ``c`` first. With
    layer norm the output is ``o tanh(LN(c'))``.
    """

    def gate(name, c):
        peephole = vectors.get(f"v_{name}")
        return pre[name] if peephole is None else jax.nn.sigmoid(pre[name] + peephole * c)

    f = gate("f", state.c)
    i = gate("i", state.c) if "i" in pre else 1 - f
    c = f * state.c + i * kept_update(pre, pre["g"])
    if cell_clip is not None:
        c = jnp.clip(c, -cell_clip, cell_clip)
    content = c
    if "gain_c" in vectors:
        content = normed(c, vectors["gain_c"], mean_by_shares(vectors)) + vectors["b_c"]
    return gate("o", c) * jnp.tanh(content), {"c": c}


def layer_norm_lstm_gates(pre, state, vectors, **options):
    """The LSTM's, of ``x_pre + LN(R h)``; ``R h`` has a mean of 0."""
    mean, active = mean_by_shares(vectors), dict(pre)
    for name in (name for name in GATES if name in pre):
        gate = pre[name] + scaled(pre[f"h{name}"], vectors[f"gain_{name}"], mean)
        activation = jnp.tanh if name == "g" else jax.nn.sigmoid
        active[name] = gate if f"v_{name}" in vectors else activation(gate)
    return lstm_gates(active, state, vectors, **options)


@lru_cache
def lstm(
    *,
    use_bias: bool = True,
    proj_size: int | None = None,
    peepholes: bool = False,
    coupled: bool = False,
    layer_norm: bool = False,
    cell_clip: float | None = None,
    kernel_init: Initializer = initializers.glorot,
    recurrent_init: Initializer = initializers.orthogonal,
    bias_init: Initializer = initializers.zeros,
    forget_bias: float = 1.0,
) -> Cell:
    r"""The LSTM of Hochreiter & Schmidhuber (1997) with the forget gate of Gers et al. (2000).

    .. math::
        i, f, o &= \sigma(W_{i,f,o}\, x + R_{i,f,o}\, h + b_{i,f,o}) \\
        g &= \tanh(W_g\, x + R_g\, h + b_g) \\
        c' &= f \odot c + i \odot g \\
        h' &= o \odot \tanh(c')

    Parameters: ``w_x [I, 4, H]``, ``r [S, 4, H]``, ``b [4, H]``; gates in the order i, f, g, o,
    that of ``torch.nn.LSTM`` (whose two biases are summed here). S is H, or ``proj_size``.

    Args:
        use_bias: whether there is a ``b``.
        proj_size: size S of a projected output :math:`h' = P^T (o \odot \tanh(c'))` (Sak et al.
            2014, arXiv:1402.1128), with a parameter ``p [H, S]``; None has none.
        peepholes: i and f also see :math:`v_{i,f} \odot c`, and o :math:`v_o \odot c'` (Gers &
            Schmidhuber 2000), with parameters ``v [3, H]`` (i, f, o) that start at 0.
        coupled: :math:`i = 1 - f` (Greff et al. 2017, arXiv:1503.04069): gates f, g, o alone.
        layer_norm: each gate's :math:`W x` and :math:`R h` are normalized, each with a gain, and
            :math:`h' = o \odot \tanh(LN(c') + b_c)` (Ba et al. 2016, arXiv:1607.06450), with
            parameters ``gain_x`` and ``gain_h [4, H]``, ``gain_c`` and ``b_c [H]``.
        cell_clip: bound of the elements of :math:`c'`, on both sides; None has none.
        kernel_init: initializer of each gate's ``[I, H]``, and of ``p``.
        recurrent_init: initializer of each gate's ``[S, H]``.
        bias_init: initializer of ``b``.
        forget_bias: added to the initial bias of the forget gate (Jozefowicz et al. 2015).

    Returns:
        The cell; the same object for the same arguments.

    Raises:
        ValueError: for a projection to less than one feature, and a clip that leaves nothing.
    """
    if proj_size is not None and proj_size < 1:
        raise ValueError(
            f"proj_size should be at least 1, or None for no projection, got {proj_size}"
        )
    if cell_clip is not None and not cell_clip > 0:
        raise ValueError(f"cell_clip should be above 0, or None, got {cell_clip}")
    names = GATES[1:] if coupled else GATES
    sigmoids = tuple(name for name in names if name != "g")

    def init_params(key: Key, in_features: int, hidden_features: int, dtype: DTypeLike) -> Params:
        k_x, k_r, k_b, k_p = jax.random.split(key, 4)
        out_features, gates = proj_size or hidden_features, len(names)
        params = {
            "w_x": per_gate(kernel_init, k_x, in_features, gates, hidden_features, dtype),
            "r": per_gate(recurrent_init, k_r, out_features, gates, hidden_features, dtype),
        }
        if use_bias:
            bias = bias_init(k_b, (gates, hidden_features), dtype)
            params["b"] = bias.at[names.index("f")].add(forget_bias)
        if proj_size is not None:
            params["p"] = kernel_init(k_p, (hidden_features, proj_size), dtype)
        if peepholes:
            params["v"] = jnp.zeros((len(sigmoids), hidden_features), dtype)
        if layer_norm:
            params |= {n: jnp.ones((gates, hidden_features), dtype) for n in ("gain_x", "gain_h")}
            params["gain_c"] = jnp.ones((hidden_features,), dtype)
            params["b_c"] = jnp.zeros((hidden_features,), dtype)
        return params

    def init_state(params: Params, batch: int, dtype: DTypeLike) -> LSTMState:
        # Two arrays, not one twice: a state can be donated.
        out_features, _, hidden_features = params["r"].shape
        return LSTMState(
            h=jnp.zeros((batch, out_features), dtype), c=jnp.zeros((batch, hidden_features), dtype)
        )

    def loop_weights(params: Params) -> LoopWeights:
        vectors = {}
        if peepholes:
            vectors |= {f"v_{name}": v for name, v in zip(sigmoids, params["v"], strict=True)}
        if layer_norm:
            gains = zip(names, params["gain_h"], strict=True)
            vectors |= {f"gain_{name}": gain for name, gain in gains}
            vectors |= {name: params[name] for name in ("gain_c", "b_c")}
            vectors["share"] = shares(params["b_c"])
        r = centered(params["r"]) if layer_norm else params["r"]
        return LoopWeights(r=r, p=params.get("p"), vectors=vectors)

    kinds = {
        "projected": proj_size is not None,
        "peephole": peepholes,
        "coupled": coupled,
        "layer norm": layer_norm,
    }
    gates = layer_norm_lstm_gates if layer_norm else lstm_gates
    cell = Cell(
        name=" ".join([kind for kind, used in kinds.items() if used] + ["lstm"]),
        x_gates=names,
        h_gates=names,
        state_type=LSTMState,
        init_params=init_params,
        init_state=init_state,
        project_inputs=affine_inputs,
        loop_weights=loop_weights,
        gates=gates if cell_clip is None else partial(gates, cell_clip=cell_clip),
        sigmoid_gates=() if peepholes else sigmoids,
        tanh_gates=("g",),
        drops_updates=True,
    )
    if not layer_norm:
        return cell
    return cell._replace(
        h_gates=tuple(f"h{name}" for name in names),
        project_inputs=normalized_inputs,
        sigmoid_gates=(),
        tanh_gates=(),
        whole_rows=True,
    )
