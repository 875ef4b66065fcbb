"""Randomness inside the loop: drawn outside of it, and given to the gates as further columns."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrnn._typing import Array, Key, Params, State
from jaxrnn.cells.base import Cell
from jaxrnn.recurrence import checks
from jaxrnn.regularization import dropout, random_mask

HOLD = "hold_"
KEEP_UPDATE = "keep_update"


class Noise(NamedTuple):
    """What is random in a loop. Nothing here has a gradient.

    Attributes:
        h_scale: ``[B, S]`` factors of ``h`` before ``h @ r``, the same at all steps: the recurrent
            dropout of Gal & Ghahramani (2016), arXiv:1512.05287. The weights' gradient sees the
            scaled ``h``.
        keep_update: bool ``[T, B, H]``: where the update (``g`` of the LSTM, ``n`` of the GRU) is
            kept, and scaled by ``1 / (1 - update_rate)``; elsewhere it is 0: the recurrent dropout
            of Semeniuta et al. (2016), arXiv:1603.05118.
        update_rate: the probability of that 0.
        hold: for fields of the state, bool ``[T, B, H]``, True where the field keeps its value
            through the step, or a number, the share of the old value in the new one: zoneout
            (Krueger et al. 2017, arXiv:1606.01305) in training and in evaluation.
    """

    h_scale: Array | None = None
    keep_update: Array | None = None
    update_rate: float = 0.0
    hold: Mapping[str, Array | float] = {}

    def check(self, cell: Cell, params: Params, state: State, steps: int) -> None:
        """Refuses noise that a cell has no place for, or whose shape does not fit."""
        shapes = {name: leaf.shape for name, leaf in state._asdict().items()}
        if unknown := sorted(set(self.hold) - set(cell.holds)):
            raise ValueError(
                f"hold names {unknown[0]!r}, and of {cell.name} zoneout may hold {cell.holds}"
            )
        if "h" in self.hold and jax.eval_shape(cell.loop_weights, params).p is not None:
            raise ValueError(
                f"zoneout cannot hold 'h' of {cell.name}: it is projected behind the gates"
            )
        if self.keep_update is not None and not cell.drops_updates:
            raise ValueError(f"{cell.name} has no update that could be dropped")
        if self.h_scale is not None:
            if not cell.h_gates:
                raise ValueError(f"{cell.name} has no h @ r whose h could be scaled")
            if self.h_scale.shape != shapes["h"]:
                raise ValueError(
                    f"h_scale should be [B, S] = {shapes['h']}, got {self.h_scale.shape}"
                )
        want = (steps, *state[-1].shape)  # The last field is as wide as the gates.
        for name, column in self.columns().items():
            if column.shape != want:
                raise ValueError(f"{name} should be [T, B, H] = {want}, got {column.shape}")

    def columns(self) -> dict[str, Array]:
        """What differs from step to step, ``{name: bool [T, B, H]}``."""
        held: Any = {HOLD + k: v for k, v in self.hold.items() if not isinstance(v, int | float)}
        return held if self.keep_update is None else held | {KEEP_UPDATE: self.keep_update}

    def into(self, cell: Cell) -> Cell:
        """The cell with `columns` as further input gates."""
        rates = tuple((k, v) for k, v in self.hold.items() if isinstance(v, int | float))
        columns = tuple(self.columns())
        return noisy(cell, columns, self.update_rate, rates) if columns or rates else cell


@lru_cache
def noisy(
    cell: Cell,
    columns: tuple[str, ...],
    update_rate: float,
    rates: tuple[tuple[str, float], ...],
) -> Cell:
    """A cell whose gates apply the noise in ``columns`` of ``x_pre``, and ``rates`` of zoneout."""

    def around(equations):
        def with_noise(pre, state, weights):
            noise = {name: lax.stop_gradient(pre[name]) for name in columns}
            pre = {name: a for name, a in pre.items() if name not in columns}
            if KEEP_UPDATE in noise:
                scale = 0.0 if update_rate == 1 else 1 / (1 - update_rate)
                pre["update_scale"] = noise[KEEP_UPDATE] * scale
            output, after = equations(pre, state, weights)
            if "h" in cell.state_names:
                after = {"h": output, **after}
            shares = {n.removeprefix(HOLD): a for n, a in noise.items() if n.startswith(HOLD)}
            for field, share in (shares | dict(rates)).items():
                after[field] = share * getattr(state, field) + (1 - share) * after[field]
            return after.pop("h", output), after

        return with_noise

    return cell._replace(
        x_gates=cell.x_gates + columns,
        gates=around(cell.gates),
        step=None if cell.step is None else around(cell.step),
        linear=None,
    )


class Rates(NamedTuple):
    """How much of what is random in a layer; 0 is none.

    Attributes:
        recurrent_dropout: of ``h`` before ``h @ r``.
        update_dropout: of the update.
        weight_dropout: of the entries of ``r``, one mask a call (DropConnect; the weight drop of
            Merity et al. 2017, arXiv:1708.02182). The stored matrix stays as it is.
        zoneout: of each field of the state.
    """

    recurrent_dropout: float
    update_dropout: float
    weight_dropout: float
    zoneout: tuple[float, ...]

    @property
    def any(self) -> bool:
        """Whether one of them is above 0."""
        return any((*self[:3], *self.zoneout))

    @property
    def in_loop(self) -> bool:
        """Whether the equations of a step change."""
        return any((self.update_dropout, *self.zoneout))

    def check(self, cell: Cell) -> None:
        """Refuses what is no rate, or has no place in the cell."""
        if len(self.zoneout) != len(cell.state_names):
            raise ValueError(
                f"zoneout should be a rate, or one for each of {cell.state_names}, "
                f"got {self.zoneout}"
            )
        for name, rates in self._asdict().items():
            for rate in rates if isinstance(rates, tuple) else (rates,):
                checks.rate(name, rate)
        for field, rate in zip(cell.state_names, self.zoneout, strict=True):
            if rate > 0 and field not in cell.holds:
                raise ValueError(
                    f"zoneout of {field!r} should be 0: of {cell.name} it may hold {cell.holds}"
                )
        if self.recurrent_dropout > 0 and not cell.h_gates:
            raise ValueError(f"{cell.name} has no h @ r for recurrent_dropout to act on")
        if self.update_dropout > 0 and not cell.drops_updates:
            raise ValueError(f"{cell.name} has no update for update_dropout to act on")

    def drop_weights(self, key: Key | None, params: Params) -> Params:
        """Parameters of a layer whose ``r`` has a mask; without a key they stay whole."""
        if key is None or self.weight_dropout == 0:
            return params
        if "r" not in params:
            raise ValueError("weight_dropout acts on a parameter r, which this cell has not")
        return params | {"r": dropout(jax.random.fold_in(key, 0), self.weight_dropout, params["r"])}

    def noise(
        self,
        key: Key | None,
        cell: Cell,
        params: Params,
        x: Array,
        rows: Array | None = None,
    ) -> Noise:
        """Noise of one layer's call; without a key, of evaluation.

        Args:
            key: of the masks.
            cell: the cell.
            params: its parameters.
            x: ``[T, B, I]``, the input.
            rows: integers ``[B]`` or None, as in `jaxrnn.regularization.random_mask`.
        """
        rates = {n: r for n, r in zip(cell.state_names, self.zoneout, strict=True) if r > 0}
        if key is None:
            return Noise(hold={name: float(rate) for name, rate in rates.items()})
        steps, batch = x.shape[:2]
        state = jax.eval_shape(lambda: cell.init_state(params, batch, jnp.float32))
        sizes = {name: leaf.shape for name, leaf in state._asdict().items()}

        def draw(index: int, rate: float, shape: tuple[int, ...]) -> Array:
            k = jax.random.fold_in(key, index)
            return random_mask(k, float(rate), (steps, *shape), rows, axis=1)

        noise = Noise(
            update_rate=self.update_dropout,
            hold={n: draw(3 + j, rate, sizes[n]) for j, (n, rate) in enumerate(rates.items())},
        )
        if self.recurrent_dropout > 0:
            ones = jnp.ones((1, *sizes["h"]), jnp.float32)
            k = jax.random.fold_in(key, 1)
            h_scale = dropout(k, self.recurrent_dropout, ones, per_row=True, rows=rows)
            noise = noise._replace(h_scale=h_scale[0])
        if self.update_dropout > 0:
            # The last field of a state is as wide as the gates; a projected h is not.
            keep = draw(2, 1 - self.update_dropout, state[-1].shape)
            noise = noise._replace(keep_update=keep)
        return noise
