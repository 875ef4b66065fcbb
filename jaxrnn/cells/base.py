"""The contract of a cell: gate arithmetic written once, everything else done for it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, DTypeLike, Initializer, Key, Params, State


class LoopWeights(NamedTuple):
    """What the time loop itself needs of a cell's parameters.

    Attributes:
        r: ``[S, Gh, H]`` recurrent matrix, one column block a gate of ``Cell.h_gates``.
        p: ``[H, S]`` projection of the output, for cells that have one.
        vectors: per-feature parameters of the gates, ``{name: [H]}``.
    """

    r: Array | None = None
    p: Array | None = None
    vectors: Mapping[str, Array] = {}


class Cell(NamedTuple):
    """A recurrent cell as a tuple of pure functions.

    One step computes, for every gate name, a pre-activation: its column of ``x_pre``, its column
    of ``h @ r``, or the sum where the name stands in both. Then ``gates`` makes of them, of the
    state and of ``vectors`` the output and the new state. Nothing else of a cell is in the loop.

    Attributes:
        name: for messages.
        x_gates: names of the columns of ``x_pre``.
        h_gates: names of the columns of ``h @ r``; empty: no matmul in the loop. The names that
            stand in both come first, in the same order, in both.
        state_type: a NamedTuple class, the state that the next step reads. A field ``h``, where
            there is one, is the (projected) output, and the loop keeps it.
        init_params: ``(key, in_features, hidden_features, dtype) -> params``.
        init_state: ``(params, batch, dtype) -> state``: where a sequence starts and what a reset
            restores.
        project_inputs: ``(params, x [T, B, I]) -> x_pre [T, B, Gx, H]``: one matmul, never mixes
            time steps.
        loop_weights: ``(params) -> LoopWeights``.
        gates: ``(pre {name: [B, H]}, state, vectors) -> (output [B, H], {other field: [B, H]})``:
            the equations. Elementwise, or reductions over the last axis.
        sigmoid_gates: gates that the loop passes through a sigmoid before ``gates`` sees them.
        tanh_gates: likewise through a tanh.
        whole_rows: the gates reduce over H (layer norm). A kernel may pad H: all ``vectors`` are 0
            there, so one that is 1/H makes a sum a mean.
        zoneout_fields: the fields of the state that zoneout may hold; None is all.
        drops_updates: the gates pass what they add to the state through `kept_update`.
        step: ``(pre {name: [B, H]}, state, LoopWeights) -> (output, {other field})`` for cells
            that are not ``h @ r`` and then gates. They run on the scan only, by plain autodiff.
        linear: ``(pre, vectors) -> (a, b)``, arrays like those of ``pre``, where the state's first
            field becomes ``a * field + b`` and no other field is read. ``gates`` is written with
            it. Such steps compose, so all states can be made by a parallel scan over time; then
            ``gates``, elementwise, makes all outputs at once of the states that the steps start
            from. For cells without ``h_gates``; ``pre`` is what ``gates`` sees.
    """

    name: str
    x_gates: tuple[str, ...]
    h_gates: tuple[str, ...]
    state_type: type
    init_params: Callable[[Key, int, int, DTypeLike], Params]
    init_state: Callable[[Params, int, DTypeLike], State]
    project_inputs: Callable[[Params, Array], Array]
    loop_weights: Callable[[Params], LoopWeights]
    gates: Callable[[dict[str, Array], State, Mapping[str, Array]], tuple[Array, dict[str, Array]]]
    sigmoid_gates: tuple[str, ...] = ()
    tanh_gates: tuple[str, ...] = ()
    whole_rows: bool = False
    zoneout_fields: tuple[str, ...] | None = None
    drops_updates: bool = False
    step: (
        Callable[[dict[str, Array], State, LoopWeights], tuple[Array, dict[str, Array]]] | None
    ) = None
    linear: Callable[[dict[str, Array], Mapping[str, Array]], tuple[Array, Array]] | None = None

    @property
    def shared_gates(self) -> int:
        """How many gates get the sum of an input and a recurrent column."""
        return len(set(self.x_gates) & set(self.h_gates))

    @property
    def holds(self) -> tuple[str, ...]:
        """The fields of the state that zoneout may hold."""
        return self.state_names if self.zoneout_fields is None else self.zoneout_fields

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state's fields."""
        return self.state_type._fields


def asked_precision() -> str | None:
    """What `jax.default_matmul_precision` is set to."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def full_precision(dtype: DTypeLike) -> str | None:
    """Of a matmul: float32 is multiplied as float32, not as TF32, which GPUs do by default.

    `jax.default_matmul_precision` says otherwise where it is set.
    """
    return "highest" if dtype == jnp.float32 and asked_precision() is None else None


def project(x: Array, w: Array) -> Array:
    """``[T, B, I]`` times ``[I, G, H]`` as one matmul."""
    return jnp.einsum("tbi,igh->tbgh", x, w, precision=full_precision(w.dtype))


def affine_inputs(params: Params, x: Array) -> Array:
    """``x @ w_x + b`` for all gates at once: ``[T, B, I] -> [T, B, Gx, H]``."""
    x_pre = project(x, params["w_x"])
    return x_pre + params["b"] if "b" in params else x_pre


def kept_update(pre: dict[str, Array], update: Array) -> Array:
    """What a cell adds to its state, scaled where the loop drops updates (see `Noise`)."""
    return update * pre["update_scale"] if "update_scale" in pre else update


def per_gate(
    init: Initializer, key: Key, rows: int, gates: int, columns: int, dtype: DTypeLike
) -> Array:
    """Initializes ``[rows, gates, columns]`` gate by gate, as the matrices of the equations are."""
    keys = jax.random.split(key, gates)
    return jnp.stack([init(k, (rows, columns), dtype) for k in keys], axis=1)
