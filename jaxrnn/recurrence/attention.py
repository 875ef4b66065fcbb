r"""SRU++: attention in the place of the SRU's projection (Lei 2021, arXiv:2102.12459, section 3).

.. math::
    Q &= W^q x \qquad K = W^k Q \qquad V = W^v Q \\
    A &= \mathrm{softmax}(Q K^T / \sqrt{d}) V \\
    U &= W^o \, LN(Q + \alpha A)

and the recurrence of `jaxrnn.cells.sru` over :math:`U`. It mixes time steps, so it is no cell but a
layer with a memory: a step sees itself and the ``memory`` real steps before it of its own sequence,
also where those were in an earlier call. So one call equals any split of it into shorter ones.
"""

from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, ArrayLike, DTypeLike, Key, Params
from jaxrnn.cells import initializers, sru
from jaxrnn.cells.base import Cell, full_precision
from jaxrnn.cells.normalization import normalized
from jaxrnn.cells.sru import SRUState, columns, highway_scale, uniform_unit_variance
from jaxrnn.recurrence import checks, sequence, xla
from jaxrnn.recurrence.api import Remat, recurrence
from jaxrnn.recurrence.choice import Implementation


class SRUPlusPlusState(NamedTuple):
    """What a call leaves to the next one.

    Attributes:
        c: ``[B, H]``, the state of the SRU.
        memory: ``[B, M, D]``, ``Q`` of the last M real steps, the newest one last.
        known: bool ``[B, M]``, which of them there are.
    """

    c: Array
    memory: Array
    known: Array


def ready_columns(params: Params, x: Array) -> Array:
    """``[T, B, 4 H]`` as the columns of the gates."""
    return x.reshape(*x.shape[:2], 4, -1)


# The recurrence over columns that the attention has made.
LOOP = sru()._replace(name="sru++", project_inputs=ready_columns)


class SRUPlusPlusLayer(NamedTuple):
    """The layer as pure functions; the options are those of `jaxrnn.SRUPlusPlus`."""

    attention_features: int
    memory: int
    heads: int = 1
    highway_bias: float = 0.0
    rescale: bool = True
    time_major: bool = False
    dtype: DTypeLike | None = None
    implementation: Implementation | None = None
    remat: Remat | None = None

    def check(self) -> "SRUPlusPlusLayer":
        """Refuses option values that cannot be, and returns self."""
        if self.memory < 0:
            raise ValueError(f"memory should be at least 0 steps, got {self.memory}")
        if self.heads < 1 or self.attention_features % self.heads:
            raise ValueError(
                f"attention_features should be a multiple of heads = {self.heads}, "
                f"got {self.attention_features}"
            )
        return self

    @property
    def cell(self) -> Cell:
        """Of the recurrence."""
        return LOOP

    def sizes(self, hidden_features: int) -> tuple[int]:
        """H of the recurrence."""
        return (hidden_features,)

    def init_params(
        self, key: Key, in_features: int, hidden_features: int, dtype: DTypeLike
    ) -> dict[str, Array]:
        """Parameters.

        ``w_q [I, D]``, ``w_k`` and ``w_v [D, D]``, ``alpha []`` (0), ``gain`` and ``b_norm [D]``;
        and of the SRU ``w_x [D, 3, H]``, ``v``, ``b`` and, where ``I != H``, ``w_highway [D, H]``.
        """
        size = self.attention_features
        k_sru, k_highway, *k_attention = jax.random.split(key, 5)
        params = sru(highway_bias=self.highway_bias).init_params(
            k_sru, size, hidden_features, dtype
        )
        params.pop("w_highway", None)
        if in_features != hidden_features:
            params["w_highway"] = uniform_unit_variance(k_highway, (size, hidden_features), dtype)
        for name, rows, k in zip("qkv", (in_features, size, size), k_attention, strict=True):
            params[f"w_{name}"] = initializers.glorot(k, (rows, size), dtype)
        return params | {
            "alpha": jnp.zeros((), dtype),
            "gain": jnp.ones((size,), dtype),
            "b_norm": jnp.zeros((size,), dtype),
        }

    def init_state(self, params: Params, batch: int) -> SRUPlusPlusState:
        """The state that a sequence starts from."""
        dtype = self.compute_dtype(params)
        memory = (batch, self.memory)
        return SRUPlusPlusState(
            c=jnp.zeros((batch, params["v"].shape[-1]), xla.accumulator(dtype)),
            memory=jnp.zeros((*memory, self.attention_features), dtype),
            known=jnp.zeros(memory, bool),
        )

    def compute_dtype(self, params: Params, *others: Array) -> Any:
        """Of the matmuls and the output."""
        return jnp.dtype(self.dtype or jnp.result_type(*others, *jax.tree.leaves(params)))

    def apply(
        self,
        params: Params,
        x: Array,
        state: SRUPlusPlusState | None = None,
        *,
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        resets: ArrayLike | None = None,
    ) -> tuple[Array, SRUPlusPlusState]:
        """Runs the layer: arguments and results as of the layers in `jaxrnn`.

        Args:
            params: as `init_params` makes them.
            x: ``[B, T, I]``, or ``[T, B, I]`` with ``time_major``.
            state: of an earlier call, or None for the initial state.
            lengths: integers ``[B]``: the real steps at the front of each row.
            mask: bool ``[B, T]`` (``[T, B]``), True at real steps.
            resets: bool or integers ``[B, T]`` (``[T, B]``): no step sees across one.

        Returns:
            outputs ``[B, T, H]`` (``[T, B, H]``), 0 at masked steps, and the state.
        """
        if jnp.ndim(x) != 3:
            axes = "[T, B, I]" if self.time_major else "[B, T, I]"
            raise ValueError(f"x should be {axes}, three axes, got shape {jnp.shape(x)}")
        lengths, mask, resets = (
            None if a is None else jnp.asarray(a) for a in (lengths, mask, resets)
        )
        if self.time_major:
            return self._apply(params, x, state, lengths, mask, resets)
        x, mask, resets = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (x, mask, resets))
        y, state = self._apply(params, x, state, lengths, mask, resets)
        return jnp.swapaxes(y, 0, 1), state

    def step(
        self,
        params: Params,
        x: Array,
        state: SRUPlusPlusState,
        resets: ArrayLike | None = None,
    ) -> tuple[Array, SRUPlusPlusState]:
        """One step: ``x [B, I] -> [B, H]`` and the next state; ``resets [B]``."""
        resets = None if resets is None else jnp.asarray(resets)[None]
        y, state = self._apply(params, x[None], state, None, None, resets)
        return y[0], state

    def _apply(
        self,
        params: Params,
        x: Array,
        state: SRUPlusPlusState | None,
        lengths: ArrayLike | None,
        mask: ArrayLike | None,
        resets: ArrayLike | None,
    ) -> tuple[Array, SRUPlusPlusState]:
        steps, batch = checks.inputs(x)
        if any(axis is not None for axis in jax.typeof(x).sharding.spec):
            raise NotImplementedError(
                "SRUPlusPlus cannot run on a batch that is split over explicit axes of a mesh: use "
                "jax.shard_map, or a mesh with Auto axes"
            )
        dtype = self.compute_dtype(params, x)
        mask = checks.flags("mask", mask, steps, batch)
        resets = checks.flags("resets", resets, steps, batch)
        real = sequence.step_mask(steps, checks.lengths(lengths, batch), mask)
        x = x if real is None else jnp.where(real[:, :, None], x, 0)
        start: Any = self.init_state(params, batch)
        if state is not None:
            start = checks.state("sru++", state, start)
        params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))

        places = Places.of(steps, batch, real, resets)
        q = matmul(x, params["w_q"]).swapaxes(0, 1)
        seen = jnp.concatenate([start.memory, q], axis=1)
        attended = self._attend(params, q, seen, places.visible(start.known))
        z = normalized(q + params["alpha"] * attended, params["gain"], params["b_norm"]).swapaxes(
            0, 1
        )
        alpha = highway_scale(self.highway_bias, self.rescale)
        x_pre = columns(params, z, x, alpha)
        y, sru_state = recurrence(
            LOOP,
            {name: params[name] for name in ("v", "b")} | {"w_x": params["w_x"]},
            x_pre.reshape(steps, batch, -1),
            SRUState(start.c),
            mask=real,
            resets=resets,
            dtype=dtype,
            implementation=self.implementation,
            remat=self.remat,
        )
        memory, known = places.newest(seen, start.known)
        return y, SRUPlusPlusState(sru_state.c, memory, known)

    def _attend(self, params: Params, q: Array, seen: Array, visible: Array) -> Array:
        """``A`` of the equations, ``[B, T, D]``; ``visible [B, T, M + T]``."""
        heads = (self.heads, self.attention_features // self.heads)
        keys, values = (matmul(seen, params[f"w_{name}"]) for name in "kv")
        queries, keys, values = (a.reshape(*a.shape[:2], *heads) for a in (q, keys, values))
        precision = full_precision(q.dtype)
        scores = jnp.einsum(
            "bqhd,bkhd->bhqk",
            queries,
            keys,
            precision=precision,
            preferred_element_type=xla.accumulator(q.dtype),
        )
        scores = jnp.where(visible[:, None], scores / sqrt(heads[1]), -jnp.inf)
        weights = jax.nn.softmax(scores).astype(q.dtype)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, values, precision=precision)
        return attended.reshape(q.shape)


class Places(NamedTuple):
    """Where the steps of a call lie in their sequences.

    Attributes:
        real: bool ``[B, T]``.
        nth: ``[B, T]``, how many real steps a row has had, the step itself included.
        part: ``[B, T]``, how many resets; 0 is the sequence of the state.
    """

    real: Array
    nth: Array
    part: Array

    @classmethod
    def of(cls, steps: int, batch: int, real: Array | None, resets: Array | None) -> "Places":
        """Of a mask and resets ``[T, B]``; None is all real, and no reset."""
        real = jnp.ones((batch, steps), bool) if real is None else real.T
        resets = jnp.zeros_like(real) if resets is None else resets.T & real
        return cls(real, jnp.cumsum(real, axis=1), jnp.cumsum(resets, axis=1))

    def visible(self, known: Array) -> Array:
        """Bool ``[B, T, M + T]``: which step sees what of the memory, then of this call.

        A masked step sees itself, so that its softmax is finite; its output is not used.
        """
        slots, steps = known.shape[1], self.real.shape[1]
        age = self.nth[:, :, None] + (slots - 1 - jnp.arange(slots))
        in_memory = known[:, None] & (self.part == 0)[:, :, None] & (age <= slots)
        age = self.nth[:, :, None] - self.nth[:, None]
        in_call = self.real[:, None] & (self.part[:, :, None] == self.part[:, None])
        in_call &= (age >= 0) & (age <= slots) & jnp.tri(steps, dtype=bool)
        in_call |= jnp.eye(steps, dtype=bool)
        return jnp.concatenate([in_memory, in_call], axis=2)

    def newest(self, seen: Array, known: Array) -> tuple[Array, Array]:
        """The memory that a call leaves, of the one before and this call's ``[B, M + T, D]``."""
        slots, last = known.shape[1], self.part[:, -1:]
        kept = jnp.concatenate([known & (last == 0), self.real & (self.part == last)], axis=1)
        # A stable sort brings what is kept to the end, in its order.
        newest = jnp.argsort(kept, axis=1, stable=True)[:, kept.shape[1] - slots :]
        known = jnp.take_along_axis(kept, newest, axis=1)
        memory = jnp.take_along_axis(seen, newest[:, :, None], axis=1)
        return jnp.where(known[:, :, None], memory, 0), known


def matmul(a: Array, b: Array) -> Array:
    """``a @ b`` in their dtype."""
    return jnp.matmul(a, b, precision=full_precision(b.dtype))
