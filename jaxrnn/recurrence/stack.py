"""Layers on layers and two directions, as pure functions that both shells call."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, ArrayLike, DTypeLike, Key, Params, State
from jaxrnn.cells.base import Cell
from jaxrnn.recurrence import checks
from jaxrnn.recurrence.api import Remat, recurrence
from jaxrnn.recurrence.noise import Rates
from jaxrnn.recurrence.xla import accumulator
from jaxrnn.regularization import dropout

Merge = Literal["concat", "sum", "mean", "product"]
Sizes = int | tuple[int, ...]

MERGES: dict[str, Callable[[Sequence[Array]], Array]] = {
    "concat": lambda ys: jnp.concatenate(ys, axis=-1),
    "sum": lambda ys: reduce(jnp.add, ys),
    "mean": lambda ys: reduce(jnp.add, ys) / len(ys),
    "product": lambda ys: reduce(jnp.multiply, ys),
}


class Given(NamedTuple):
    """What a call gets, time-major."""

    x: Array
    lengths: ArrayLike | None = None
    mask: ArrayLike | None = None
    resets: ArrayLike | None = None
    state: tuple[Any, ...] | None = None
    reset_state: tuple[Any, ...] | None = None
    rows: Array | None = None

    def with_one_row(self) -> "Given":
        """With a batch axis, where there was none."""
        columns = {"x": self.x, "mask": self.mask, "resets": self.resets}
        others = {name: a for name, a in self._asdict().items() if name not in columns}
        return Given(
            **jax.tree.map(lambda a: jnp.asarray(a)[:, None], columns),
            **jax.tree.map(lambda a: jnp.asarray(a)[None], others),
        )

    def time_major(self) -> "Given":
        """Of arrays whose first axis is the batch."""
        batch_steps = jnp.shape(self.x)[:2]
        for name, flags in (("mask", self.mask), ("resets", self.resets)):
            if flags is not None and jnp.shape(flags) != batch_steps:
                raise ValueError(f"{name} should be [B, T] = {batch_steps}, got {jnp.shape(flags)}")
        columns = {"x": self.x, "mask": self.mask, "resets": self.resets}
        return self._replace(**jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), columns))


class Stack(NamedTuple):
    """A stack of recurrent layers of one cell. The options are those of `jaxrnn.nnx.LayerOptions`.

    Parameters are ``{"layer_0": {"forward": params, "backward": params}, ...}`` (no "backward"
    where there is one direction); the state is a tuple over layers of states, or of pairs
    (forward, backward).
    """

    cell: Cell
    num_layers: int = 1
    bidirectional: bool = False
    merge: Merge = "concat"
    residual: bool = False
    dropout: float = 0.0
    input_dropout: float = 0.0
    output_dropout: float = 0.0
    variational: bool = False
    recurrent_dropout: float = 0.0
    update_dropout: float = 0.0
    weight_dropout: float = 0.0
    zoneout: float | tuple[float, ...] = 0.0
    gradient_clip: float | None = None
    time_major: bool = False
    dtype: DTypeLike | None = None
    implementation: Any = None
    remat: Remat | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        """Names of the directions."""
        return ("forward", "backward") if self.bidirectional else ("forward",)

    @property
    def rates(self) -> Rates:
        """Of what is random inside a layer."""
        zoneout = self.zoneout
        if isinstance(zoneout, int | float):
            holds = self.cell.holds
            zoneout = [zoneout if name in holds else 0.0 for name in self.cell.state_names]
        zoneout = tuple(zoneout)
        return Rates(self.recurrent_dropout, self.update_dropout, self.weight_dropout, zoneout)

    @property
    def is_random(self) -> bool:
        """Whether training draws random numbers."""
        between = self.dropout > 0 and self.num_layers > 1
        return between or self.input_dropout + self.output_dropout > 0 or self.rates.any

    def check(self) -> "Stack":
        """Refuses option values that cannot be, and returns self."""
        if self.num_layers < 1:
            raise ValueError(f"num_layers should be at least 1, got {self.num_layers}")
        if self.merge not in MERGES:
            raise ValueError(f"merge should be one of {', '.join(MERGES)}, got {self.merge!r}")
        checks.bound("gradient_clip", self.gradient_clip)
        for name in ("dropout", "input_dropout", "output_dropout"):
            checks.rate(name, getattr(self, name))
        self.rates.check(self.cell)
        if self.implementation == "associative" and self.rates.in_loop:
            raise ValueError(
                "zoneout and update_dropout do not go with implementation='associative': a step "
                "would no longer be linear in the state"
            )
        return self

    def sizes(self, hidden_features: Sizes) -> tuple[int, ...]:
        """H of each layer, of one size for all or of one for each."""
        if isinstance(hidden_features, int):
            return (hidden_features,) * self.num_layers
        if len(hidden_features) != self.num_layers:
            raise ValueError(
                f"hidden_features should be one size or one for each of {self.num_layers} layers, "
                f"got {hidden_features}"
            )
        return tuple(hidden_features)

    def init_params(
        self, key: Key, in_features: int, hidden_features: Sizes, dtype: DTypeLike
    ) -> dict[str, dict[str, Params]]:
        """Parameters of all layers."""
        params = {}
        for index, size in enumerate(self.sizes(hidden_features)):
            layer = self.init_layer(jax.random.fold_in(key, index), in_features, size, dtype)
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

        features = jax.eval_shape(run, layer["forward"]).shape[-1]
        return len(layer) * features if self.merge == "concat" else features

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
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        resets: ArrayLike | None = None,
        reset_state: tuple[Any, ...] | None = None,
        return_states: bool = False,
        key: Key | None = None,
        rows: ArrayLike | None = None,
    ) -> tuple[Any, ...]:
        """Runs all layers.

        Args:
            params: as `init_params` makes them.
            x: ``[B, T, I]``, or ``[T, B, I]`` with ``time_major``; or one sequence ``[T, I]``, and
                then nothing else has a batch axis either.
            state: a tuple over layers, or None for the initial state.
            lengths: integers ``[B]`` or None.
            mask: bool ``[B, T]`` (``[T, B]``) or None.
            resets: bool or integers ``[B, T]`` (``[T, B]``) or None.
            reset_state: what a reset restores, like ``state``; None is the initial state.
            return_states: also return the states after all steps.
            key: of all that is random; None is evaluation, where zoneout takes the mean.
            rows: integers ``[B]``, the rows' numbers in the batch that devices share: what is
                random then depends on them, not on how they are shared.

        Returns:
            outputs ``[B, T, F]`` (``[T, B, F]``) and the final state. F is S, or 2 S for two
            directions side by side. With ``return_states`` a third, like the state, with leaves
            ``[B, T, ...]`` (``[T, B, ...]``).
        """
        self._check_state("state", state)
        self._check_state("reset_state", reset_state)
        # Lists of lists are arrays too.
        lengths, mask, resets, rows = (
            None if a is None else jnp.asarray(a) for a in (lengths, mask, resets, rows)
        )
        given = Given(x, lengths, mask, resets, state, reset_state, rows)
        if jnp.ndim(x) == 2:
            y, final, states = self._run(params, given.with_one_row(), return_states, key)
            final = jax.tree.map(lambda a: a[0], final)
            y, states = jax.tree.map(lambda a: a[:, 0], (y, states))
        elif jnp.ndim(x) != 3:
            axes = "[T, B, I]" if self.time_major else "[B, T, I]"
            raise ValueError(
                f"x should be {axes}, three axes, or one sequence [T, I], got shape {jnp.shape(x)}"
            )
        elif self.time_major:
            y, final, states = self._run(params, given, return_states, key)
        else:
            y, final, states = self._run(params, given.time_major(), return_states, key)
            y, states = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (y, states))
        return (y, final, states) if return_states else (y, final)

    def step(
        self,
        params: dict[str, dict[str, Params]],
        x: Array,
        state: tuple[Any, ...],
        resets: ArrayLike | None = None,
    ) -> tuple[Array, tuple[Any, ...]]:
        """One step as in evaluation: ``x [B, I] -> [B, S]``, or ``[I] -> [S]``, and the next state.

        ``resets [B]`` puts rows back to the initial state before the step.
        """
        if self.bidirectional:
            raise ValueError(
                "a bidirectional layer cannot stream: its backward direction starts at the end "
                "of the sequence; give it the whole sequence at once"
            )
        self._check_state("state", state)
        resets = None if resets is None else jnp.asarray(resets)[None]
        given = Given(x[None], resets=resets, state=state)
        if jnp.ndim(x) == 1:
            y, state, _ = self._run(params, given.with_one_row(), False, None)
            return y[0, 0], jax.tree.map(lambda a: a[0], state)
        y, state, _ = self._run(params, given, False, None)
        return y[0], state

    def _run(
        self,
        params: dict[str, dict[str, Params]],
        given: Given,
        return_states: bool,
        key: Key | None,
    ) -> tuple[Array, tuple[Any, ...], tuple[Any, ...] | None]:
        """`apply`, time-major."""
        x, results = given.x, []
        for index, layer in enumerate(self.layers(params)):
            layer_key = None if key is None else jax.random.fold_in(key, index)
            y, *rest = self._run_layer(index, layer, given._replace(x=x), return_states, layer_key)
            if index and self.residual:
                if x.shape != y.shape:
                    raise ValueError(
                        f"residual layers should be of one size, but layer {index} makes "
                        f"{y.shape[-1]} features of {x.shape[-1]}"
                    )
                y = y + x
            x = y
            results.append(rest)
        last_key = None if key is None else jax.random.fold_in(key, self.num_layers)
        finals, *states = zip(*results, strict=True)
        y = self._drop(last_key, self.output_dropout, x, given.rows)
        return y, finals, states[0] if states else None

    def _run_layer(
        self,
        index: int,
        params: dict[str, Params],
        given: Given,
        return_states: bool,
        key: Key | None,
    ) -> list[Any]:
        """Both directions of one layer: output, final state and, if asked for, all states."""
        rate = self.dropout if index else self.input_dropout
        x = self._drop(key, rate, given.x, given.rows)
        starts, restarts = (self._split(s, index) for s in (given.state, given.reset_state))
        results = []
        for j, direction in enumerate(self.directions):
            own, own_key = params[direction], None if key is None else jax.random.fold_in(key, j)
            result = recurrence(
                self.cell,
                self.rates.drop_weights(own_key, own),
                x,
                starts[j],
                lengths=given.lengths,
                mask=given.mask,
                resets=given.resets,
                reset_state=restarts[j],
                noise=self.rates.noise(own_key, self.cell, own, x, given.rows),
                reverse=direction == "backward",
                dtype=self.dtype,
                implementation=self.implementation,
                remat=self.remat,
                gradient_clip=self.gradient_clip,
                return_states=return_states,
            )
            results.append(result)
        ys, *states = zip(*results, strict=True)
        return [MERGES[self.merge](ys), *map(self._join, states)]

    def _drop(self, key: Key | None, rate: float, x: Array, rows: Array | None) -> Array:
        if key is None or rate == 0:
            return x
        return dropout(key, rate, x, per_row=self.variational, rows=rows)

    def _check_state(self, name: str, state: tuple[Any, ...] | None) -> None:
        if state is not None and (not isinstance(state, tuple) or len(state) != self.num_layers):
            raise ValueError(
                f"{name} should be a tuple over {self.num_layers} layers, got "
                f"{type(state).__name__} of {len(state)}"
            )

    def _join(self, states: Sequence[State]) -> Any:
        return tuple(states) if self.bidirectional else states[0]

    def _split(self, state: tuple[Any, ...] | None, index: int) -> tuple[State, ...]:
        if state is None:
            return (None,) * len(self.directions)
        return tuple(state[index]) if self.bidirectional else (state[index],)
