"""Layers on layers and two directions, as pure functions that both shells call."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, ArrayLike, DTypeLike, Key, Params, State
from jaxrnn.cells.base import Cell
from jaxrnn.recurrence.api import Remat, recurrence
from jaxrnn.recurrence.xla import accumulator


class Stack(NamedTuple):
    """A stack of recurrent layers of one cell.

    Parameters are ``{"layer_0": {"forward": params, "backward": params}, ...}`` (no "backward"
    where there is one direction); the state is a tuple over layers of states, or of pairs
    (forward, backward).
    """

    cell: Cell
    num_layers: int = 1
    bidirectional: bool = False
    dropout: float = 0.0
    time_major: bool = False
    dtype: DTypeLike | None = None
    implementation: Any = None
    remat: Remat | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        """Names of the directions."""
        return ("forward", "backward") if self.bidirectional else ("forward",)

    def check(self) -> "Stack":
        """Refuses option values that cannot be, and returns self."""
        if self.num_layers < 1:
            raise ValueError(f"num_layers should be at least 1, got {self.num_layers}")
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout should be between 0 and 1, got {self.dropout}")
        return self

    def init_params(
        self, key: Key, in_features: int, hidden_features: int, dtype: DTypeLike
    ) -> dict[str, dict[str, Params]]:
        """Parameters of all layers."""
        params = {}
        for index in range(self.num_layers):
            layer_key = jax.random.fold_in(key, index)
            layer = self.init_layer(layer_key, in_features, hidden_features, dtype)
            in_features = self.output_features(layer, in_features)
            params[f"layer_{index}"] = layer
        return params

    def init_layer(
        self, key: Key, in_features: int, hidden_features: int, dtype: DTypeLike
    ) -> dict[str, Params]:
        """Parameters of one layer."""
        keys = jax.random.split(key, len(self.directions))
        return {
            direction: self.cell.init_params(k, in_features, hidden_features, dtype)
            for direction, k in zip(self.directions, keys, strict=True)
        }

    def layers(self, params: dict[str, dict[str, Params]]) -> list[dict[str, Params]]:
        """The layers' parameters in order (a sorted dict has layer_10 before layer_2)."""
        return [params[f"layer_{index}"] for index in range(self.num_layers)]

    def output_features(self, layer: dict[str, Params], in_features: int) -> int:
        """Features of a layer's output."""

        def run(params):
            return recurrence(self.cell, params, jnp.zeros((1, 1, in_features)))[0]

        return len(layer) * jax.eval_shape(run, layer["forward"]).shape[-1]

    def init_state(self, params: dict[str, dict[str, Params]], batch: int) -> tuple[Any, ...]:
        """The state that a sequence starts from."""
        dtype = accumulator(self.dtype or jnp.result_type(*jax.tree.leaves(params)))
        return tuple(
            self._join([self.cell.init_state(layer[d], batch, dtype) for d in self.directions])
            for layer in self.layers(params)
        )

    def apply(
        self,
        params: dict[str, dict[str, Params]],
        x: Array,
        state: tuple[Any, ...] | None,
        *,
        lengths: ArrayLike | None,
        mask: ArrayLike | None,
        resets: ArrayLike | None,
        dropout_key: Key | None,
    ) -> tuple[Array, tuple[Any, ...]]:
        """Runs all layers.

        Args:
            params: as `init_params` makes them.
            x: ``[B, T, I]``, or ``[T, B, I]`` with ``time_major``.
            state: a tuple over layers, or None for the initial state.
            lengths: integers ``[B]`` or None.
            mask: bool ``[B, T]`` (``[T, B]``) or None.
            resets: bool or integers ``[B, T]`` (``[T, B]``) or None.
            dropout_key: of the masks between layers; None is no dropout.

        Returns:
            outputs ``[B, T, D S]`` (``[T, B, D S]``) and the final state.
        """
        if state is not None and (not isinstance(state, tuple) or len(state) != self.num_layers):
            raise ValueError(
                f"state should be a tuple over {self.num_layers} layers, got "
                f"{type(state).__name__} of {len(state)}"
            )
        if jnp.ndim(x) != 3:
            axes = "[T, B, I]" if self.time_major else "[B, T, I]"
            raise ValueError(f"x should be {axes}, three axes, got shape {jnp.shape(x)}")
        if not self.time_major:
            for name, flags in (("mask", mask), ("resets", resets)):
                if flags is not None and jnp.shape(flags) != x.shape[:2]:
                    raise ValueError(
                        f"{name} should be [B, T] = {x.shape[:2]}, got {jnp.shape(flags)}"
                    )
            x = jnp.swapaxes(x, 0, 1)
            mask, resets = (None if a is None else jnp.asarray(a).T for a in (mask, resets))
        finals = []
        for index, layer in enumerate(self.layers(params)):
            if index and dropout_key is not None:
                x = dropout(jax.random.fold_in(dropout_key, index), self.dropout, x)
            given = (None,) * len(self.directions) if state is None else self._split(state[index])
            outputs = [
                recurrence(
                    self.cell,
                    layer[direction],
                    x,
                    start,
                    lengths=lengths,
                    mask=mask,
                    resets=resets,
                    reverse=direction == "backward",
                    dtype=self.dtype,
                    implementation=self.implementation,
                    remat=self.remat,
                )
                for direction, start in zip(self.directions, given, strict=True)
            ]
            x = (
                jnp.concatenate([y for y, _ in outputs], axis=-1)
                if self.bidirectional
                else outputs[0][0]
            )
            finals.append(self._join([final for _, final in outputs]))
        return x if self.time_major else jnp.swapaxes(x, 0, 1), tuple(finals)

    def step(
        self, params: dict[str, dict[str, Params]], x: Array, state: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        """One step without dropout: ``x [B, I] -> [B, S]`` and the next state."""
        if self.bidirectional:
            raise ValueError(
                "a bidirectional layer cannot stream: its backward direction starts at the end "
                "of the sequence; give it the whole sequence at once"
            )
        layer = self._replace(time_major=True)
        y, state = layer.apply(
            params, x[None], state, lengths=None, mask=None, resets=None, dropout_key=None
        )
        return y[0], state

    def _join(self, states: list[State]) -> Any:
        return tuple(states) if self.bidirectional else states[0]

    def _split(self, state: Any) -> tuple[State, ...]:
        return tuple(state) if self.bidirectional else (state,)


def dropout(key: Key, rate: float, x: Array) -> Array:
    """Zeroes each value with probability ``rate`` and scales the rest by ``1 / (1 - rate)``."""
    if rate == 1.0:
        return jnp.zeros_like(x)
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)
