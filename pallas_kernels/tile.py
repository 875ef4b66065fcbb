"""A program's part of the batch and of the features, with what lies outside masked off."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Ref, load, program_id, span, store
from pallas_kernels.equations import Arrays


class Tiles(NamedTuple):
    """How the work is cut up.

    Attributes:
        block_b: rows a program takes.
        block_h: features a program takes.
        warps: of 32 threads a program.
        stages: of software pipelining.
    """

    block_b: int
    block_h: int
    warps: int
    stages: int = 1

    def grid(self, batch: int, hidden: int) -> tuple[int, int]:
        """How many programs cover ``[B, H]``."""
        return -(-batch // self.block_b), -(-hidden // self.block_h)


class Tile(NamedTuple):
    """``block_b`` rows and ``block_h`` columns of arrays ``[..., B, H]``.

    Both sizes are powers of two, as Triton wants them; B and H need not be multiples of them.
    """

    row: jax.Array | int
    column: jax.Array | int
    block_b: int
    block_h: int
    batch: int
    hidden: int

    @classmethod
    def of_program(cls, tiles: Tiles, batch: int, hidden: int) -> "Tile":
        """The tile of the running program of a grid."""
        row, column = (program_id(axis) for axis in (0, 1))
        block_b, block_h = tiles.block_b, tiles.block_h
        return cls(row * block_b, column * block_h, block_b, block_h, batch, hidden)

    @property
    def rows(self):
        """Slice of B."""
        return span(self.row, self.block_b)

    @property
    def columns(self):
        """Slice of H."""
        return span(self.column, self.block_h)

    @property
    def valid_rows(self) -> jax.Array | None:
        """``[block_b]``, True within the batch; None where all are by construction."""
        if self.batch % self.block_b == 0:
            return None
        return self.row + lax.iota(jnp.int32, self.block_b) < self.batch

    @property
    def valid_columns(self) -> jax.Array | None:
        """``[block_h]``, True within the features; None where all are by construction."""
        if self.hidden % self.block_h == 0:
            return None
        return self.column + lax.iota(jnp.int32, self.block_h) < self.hidden

    @property
    def valid(self) -> jax.Array | None:
        """``[block_b, block_h]``."""
        return outer(self.valid_rows, self.valid_columns, (self.block_b, self.block_h))

    def load(
        self,
        ref: Ref,
        *before: jax.Array | int,
        gate: int | None = None,
        when: jax.Array | None = None,
    ) -> jax.Array:
        """The tile of ``ref[*before, B, (gate,) H]`` in float32; 0 outside, or not ``when``."""
        middle = () if gate is None else (gate,)
        where = (*before, self.rows, *middle, self.columns)
        valid = self.valid
        if when is not None:
            when = jnp.broadcast_to(when, (self.block_b, self.block_h))
            valid = when if valid is None else valid & when
        return load(ref, where, valid).astype(jnp.float32)

    def store(
        self, ref: Ref, *before: jax.Array | int, value: jax.Array, gate: int | None = None
    ) -> None:
        """Writes the tile, in the reference's dtype."""
        middle = () if gate is None else (gate,)
        store(ref, (*before, self.rows, *middle, self.columns), value, self.valid)

    def load_gates(self, ref: Ref, names: tuple[str, ...], *before: jax.Array) -> Arrays:
        """The tile of each column of ``ref[*before, B, G, H]``."""
        return {name: self.load(ref, *before, gate=j) for j, name in enumerate(names)}

    def store_gates(
        self, ref: Ref, names: tuple[str, ...], values: Arrays, *before: jax.Array
    ) -> None:
        """Writes the tile of each column of ``ref[*before, B, G, H]``."""
        for j, name in enumerate(names):
            self.store(ref, *before, value=values[name], gate=j)

    def load_all(self, refs: dict[str, Ref], *before: jax.Array) -> Arrays:
        """The tile of each."""
        return {name: self.load(ref, *before) for name, ref in refs.items()}

    def load_all_onto(
        self, sums: Arrays, refs: dict[str, Ref] | None, *before: jax.Array
    ) -> Arrays:
        """Adds the tile of each to the sum of its name; None adds nothing."""
        found = self.load_all(refs or {}, *before)
        return sums | {name: sums[name] + a for name, a in found.items()}

    def store_all(self, refs: dict[str, Ref], values: Arrays, *before: jax.Array) -> None:
        """Writes the tile of each."""
        for name, ref in refs.items():
            self.store(ref, *before, value=values[name])

    def load_flags(self, ref: Ref | None, t: jax.Array) -> jax.Array | None:
        """Row ``t`` of flags ``[T, B]`` as bool ``[block_b, 1]``; outside all are False."""
        if ref is None:
            return None
        return (load(ref, (t, self.rows), self.valid_rows) != 0)[:, None]

    def load_vectors(self, ref: Ref | None, names: tuple[str, ...]) -> Arrays:
        """Each row of ``[N, H]``, over all rows of the tile: so its cotangent needs no sum."""
        shape = (self.block_b, self.block_h)
        rows = [load(ref, (j, self.columns), self.valid_columns) for j in range(len(names))]
        rows = [jnp.broadcast_to(row.astype(jnp.float32)[None], shape) for row in rows]
        return dict(zip(names, rows, strict=True))

    def zeros(self) -> jax.Array:
        """A tile of zeros in float32."""
        return jnp.zeros((self.block_b, self.block_h), jnp.float32)

    def clear_outside(self, arrays: Arrays) -> Arrays:
        """Zeroes what lies outside: a cell may turn padding into anything, NaN included."""
        valid = self.valid
        return {name: choose(valid, a, jnp.zeros_like(a)) for name, a in arrays.items()}


def outer(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, int]):
    """``rows[:, None] & columns[None]``, either of which may be None: all True."""
    found = [
        jnp.broadcast_to(flags, shape)
        for flags in (
            None if rows is None else rows[:, None],
            None if columns is None else columns[None],
        )
        if flags is not None
    ]
    if not found:
        return None
    return found[0] if len(found) == 1 else found[0] & found[1]


def choose(condition: jax.Array | None, on_true: jax.Array, on_false: jax.Array) -> jax.Array:
    """`jnp.where`; no condition is all True."""
    return on_true if condition is None else jnp.where(condition, on_true, on_false)


def choose_all(condition: jax.Array | None, on_true: Arrays, on_false: Arrays) -> Arrays:
    """`choose` for each name."""
    return {name: choose(condition, on_true[name], on_false[name]) for name in on_true}


def power_of_two(size: int) -> int:
    """The next power of two, 16 at least: the smallest side of a matmul's operand."""
    return max(16, 1 << (size - 1).bit_length())
