"""Sequences of like lengths in one batch, padded to one of a few lengths.

Every length that a batch is padded to is a program to compile. A few of them, well chosen, leave
little padding; `jaxrnn.data.packing` leaves less with a single one, where sequences may share rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrnn.data.lanes import whole
from jaxrnn.data.packing import Packing, checked_lengths, steps_of


class BatchSize(NamedTuple):
    """The rows of a batch: a number of them, or as many as make up a number of steps.

    Attributes:
        rows: the rows of every batch; None goes by ``steps``.
        steps: the steps that a batch has at most, padding included; one row may have more.
    """

    rows: int | None = None
    steps: int | None = None

    def check(self) -> "BatchSize":
        """Refuses both, neither and what is no positive whole number; returns self."""
        given = [name for name, value in self._asdict().items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                "a batch should have either a number of rows or one of steps, got"
                f" {' and '.join(given) or 'neither'}"
            )
        whole(getattr(self, given[0]), given[0])
        return self

    def at(self, boundary: int) -> int:
        """The rows of a batch that is padded to `boundary` steps."""
        return self.rows or max(1, (self.steps or 0) // boundary)


def bucket_boundaries(lengths: Any, count: int, *, batch: BatchSize | None = None) -> list[int]:
    """The lengths to pad to for which the fewest steps are padding; an exact optimum.

    It is found by dynamic programming over the D distinct lengths, in O(count D^2).

    Args:
        lengths: steps of each sequence, integers [N], each at least 1.
        count: how many boundaries there may be: the number of shapes that will be compiled.
        batch: the size of the batches; then the empty rows of each bucket's last batch count as
            padding too, and fewer boundaries than `count` may be best.

    Returns:
        ascending lengths, the last one the longest of all.

    Raises:
        ValueError: there is no sequence, one is empty, or an argument is out of range.
    """
    distinct, counts = np.unique(checked_lengths(lengths), return_counts=True)
    count = min(whole(count, "count"), len(distinct))
    batch = BatchSize(rows=1) if batch is None else batch.check()
    rows_of = [batch.at(boundary) for boundary in distinct.tolist()]
    up_to = np.concatenate([[0], np.cumsum(counts)])
    # best[j]: the steps computed for the j shortest lengths with the buckets so far.
    best = np.append(0.0, np.full(len(distinct), np.inf))
    totals, choices = [], []
    for _ in range(count):
        following, first = np.full_like(best, np.inf), np.zeros(len(best), int)
        for j in range(1, len(best)):
            # One more bucket takes the lengths from the i-th to the j-th, for every i < j.
            batches = -(-(up_to[j] - up_to[:j]) // rows_of[j - 1])
            cost = best[:j] + batches * (rows_of[j - 1] * int(distinct[j - 1]))
            first[j] = cost.argmin()
            following[j] = cost[first[j]]
        best = following
        totals.append(best[-1])
        choices.append(first)
    boundaries, end = [], len(distinct)
    for first in reversed(choices[: int(np.argmin(totals)) + 1]):
        boundaries.append(int(distinct[end - 1]))
        end = first[end]
    return boundaries[::-1]


class PaddedBatch(NamedTuple):
    """Sequences of one bucket, one a row.

    Attributes:
        data: ``[B, T, ...]``, or a tree of them; T is the bucket's boundary, padding is 0.
        lengths: the steps of each row, int32 [B]; 0 in the rows that fill up a last batch.
        sequence: the number of each row's sequence in the list, int32 [B]; -1 where there is none.
    """

    data: Any
    lengths: np.ndarray
    sequence: np.ndarray


def bucketed_batches(
    sequences: Sequence[Any],
    boundaries: Sequence[int],
    batch: BatchSize,
    *,
    seed: int = 0,
    epoch: int = 0,
) -> Iterator[PaddedBatch]:
    """Batches of sequences of like lengths, in an order drawn from (seed, epoch).

    Each sequence comes once. All batches of a bucket have one shape: the last one is filled up
    with empty rows.

    Args:
        sequences: arrays ``[t_i, ...]``, or trees of arrays of the same t_i.
        boundaries: ascending lengths to pad to, as `bucket_boundaries` gives them.
        batch: the size of a batch.
        seed: a whole number from 0.
        epoch: a whole number from 0.

    Returns:
        an iterator over batches of NumPy arrays.

    Raises:
        ValueError: a sequence is empty or longer than the last boundary, the boundaries do not
            ascend, or an argument is out of range.
    """
    batch.check()
    lengths, edges = checked_lengths([steps_of(s) for s in sequences]), checked_lengths(boundaries)
    if np.any(np.diff(edges) <= 0):
        raise ValueError(f"boundaries should ascend, got {edges.tolist()}")
    if lengths.max() > edges[-1]:
        raise ValueError(
            f"sequence {int(lengths.argmax())} has {int(lengths.max()):,} steps and the last"
            f" boundary is {int(edges[-1]):,}: add a boundary, or cut the sequence"
        )
    rng = np.random.default_rng([whole(seed, "seed", 0), whole(epoch, "epoch", 0)])
    order = rng.permutation(len(lengths))
    bucket = np.searchsorted(edges, lengths[order])
    planned = []
    for index, boundary in enumerate(edges.tolist()):
        members, rows = order[bucket == index], batch.at(boundary)
        planned += [
            (members[first : first + rows], (rows, boundary))
            for first in range(0, len(members), rows)
        ]
    shuffled = [planned[i] for i in rng.permutation(len(planned))]
    return (_padded(sequences, lengths, *plan) for plan in shuffled)


def _padded(
    sequences: Sequence[Any], lengths: np.ndarray, members: np.ndarray, shape: tuple[int, int]
) -> PaddedBatch:
    """One batch: its members, one a row."""
    rows = np.arange(len(members), dtype=np.int32)
    packing = Packing(members.astype(np.int32), lengths[members], rows, np.zeros_like(rows), shape)
    data = packing.scatter([sequences[i] for i in members])
    return PaddedBatch(data, packing.row_lengths, packing.sequences[:, 0])
