"""Sequences of many lengths end to end in full rows, and their results back out of the rows.

A row holds several sequences; ``resets`` are true where one begins, so that nothing passes from one
to the next, in either direction. A few long rows replace many padded ones: almost every step that
is computed is real, and all batches have one shape, so that one program is compiled.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import tree

from jaxrnn.data.lanes import whole

# How much longer a row is tried next where the sequences do not fit: a step of 0.4 % costs less
# padding than the rounding to whole batches, and few tries reach any length.
_LONGER = 256


class Packing(NamedTuple):
    """Where each of N sequences lies in the rows of one array ``[B, T, ...]``.

    Attributes:
        sequence: its number in the list that it comes from, int32 [N].
        lengths: its steps, int32 [N].
        row: its row, int32 [N].
        start: the step of its row at which it begins, int32 [N].
        shape: (B, T).
    """

    sequence: np.ndarray
    lengths: np.ndarray
    row: np.ndarray
    start: np.ndarray
    shape: tuple[int, int]

    @property
    def resets(self) -> np.ndarray:
        """True where a sequence begins, bool [B, T]: the layers' ``resets``."""
        flags = np.zeros(self.shape, bool)
        flags[self.row, self.start] = True
        return flags

    @property
    def ends(self) -> np.ndarray:
        """True at the last step of each sequence, bool [B, T]."""
        flags = np.zeros(self.shape, bool)
        flags[self.row, self.start + self.lengths - 1] = True
        return flags

    @property
    def row_lengths(self) -> np.ndarray:
        """The real steps of each row, all at its front, int32 [B]: the layers' ``lengths``."""
        return np.bincount(self.row, self.lengths, self.shape[0]).astype(np.int32)

    @property
    def mask(self) -> np.ndarray:
        """True at real steps, bool [B, T]: the layers' ``mask``."""
        return np.arange(self.shape[1]) < self.row_lengths[:, None]

    @property
    def sequences(self) -> np.ndarray:
        """The number of the sequence that each step belongs to, int32 [B, T]; -1 in padding."""
        numbers = np.full(self.shape, -1, np.int32)
        for number, row, steps in zip(self.sequence, self.row, self._spans(), strict=True):
            numbers[row, steps] = number
        return numbers

    @property
    def real_share(self) -> float:
        """The real steps among all steps that are computed, between 0 and 1."""
        return float(self.lengths.sum() / np.prod(self.shape))

    def scatter(self, sequences: Sequence[Any]) -> Any:
        """Puts sequences into the rows.

        Args:
            sequences: N arrays ``[t_i, ...]`` in the order of ``lengths``; or N trees of such
                arrays, ``(inputs, targets)`` for example.

        Returns:
            an array ``[B, T, ...]``, or a tree of them, 0 in padding.

        Raises:
            ValueError: the lengths are not those of the plan, or the features differ.
        """

        def place(*arrays: Any) -> np.ndarray:
            arrays = tuple(map(np.asarray, arrays))
            features = arrays[0].shape[1:]
            rows = np.zeros((*self.shape, *features), np.result_type(*{a.dtype for a in arrays}))
            for array, row, steps in zip(arrays, self.row, self._spans(), strict=True):
                wanted = (steps.stop - steps.start, *features)
                if array.shape != wanted:
                    raise ValueError(
                        f"each sequence should have its planned steps and the features of the"
                        f" first one, {list(wanted)}, got {list(array.shape)}"
                    )
                rows[row, steps] = array
            return rows

        if len(sequences) != len(self.lengths):
            raise ValueError(f"the plan is for {len(self.lengths)} sequences, got {len(sequences)}")
        return tree.map(place, *sequences)

    def gather(self, outputs: Any, *, time_major: bool = False) -> list[np.ndarray]:
        """Takes each sequence's steps out of the rows, on the host.

        Args:
            outputs: ``[B, T, ...]``, or ``[T, B, ...]`` with ``time_major``.
            time_major: whether time comes first.

        Returns:
            N arrays ``[t_i, ...]``, in the order of ``lengths``.
        """
        rows = np.asarray(outputs)
        rows = np.swapaxes(rows, 0, 1) if time_major else rows
        return [rows[row, steps] for row, steps in zip(self.row, self._spans(), strict=True)]

    def at_final_steps(
        self, values: Any, *, reverse: bool = False, time_major: bool = False
    ) -> Any:
        """What stands at the step that each sequence is done with. Gradients pass through.

        Of a layer's output it is the last ``h``, where the cell's output is its ``h`` (LSTM, GRU,
        Elman) and nothing is added or dropped behind it. The two halves of a bidirectional layer's
        output are taken one by one, the second with ``reverse``.

        Args:
            values: an array ``[B, T, ...]`` or a tree of them, aligned with the inputs.
            reverse: the values are those of a loop from the last step to the first.
            time_major: they are ``[T, B, ...]``.

        Returns:
            the same tree of arrays ``[N, ...]``, in the order of ``lengths``.
        """
        step = self.start if reverse else self.start + self.lengths - 1
        place = (step, self.row) if time_major else (self.row, step)
        return tree.map(lambda a: a[place], values)

    def final_states(self, history: tuple[Any, ...], *, time_major: bool = False) -> Any:
        """The state after each sequence, for all layers and both directions.

        Args:
            history: the states after each step, aligned with the inputs, as a layer gives them with
                ``return_states``: a tuple over layers of states, or of pairs (forward, backward),
                with ``[B, T, ...]`` in every leaf.
            time_major: the leaves are ``[T, B, ...]``.

        Returns:
            the same tree with ``[N, ...]`` in every leaf: what a batch of these N sequences, one
            a row, would have returned as its final state, in the dtype of ``history``, which for a
            layer in half precision is that one.
        """

        def of_layer(states: Any) -> Any:
            if hasattr(states, "_fields"):  # a state; a pair of them has no names
                return self.at_final_steps(states, time_major=time_major)
            forward, backward = states
            return (
                self.at_final_steps(forward, time_major=time_major),
                self.at_final_steps(backward, reverse=True, time_major=time_major),
            )

        return tuple(map(of_layer, history))

    def rows(self, chosen: np.ndarray, count: int) -> "Packing":
        """Some of the rows, in a new order.

        Args:
            chosen: which rows, integers [at most count].
            count: rows of the result; those after the chosen ones are empty.
        """
        place = np.full(self.shape[0], -1, np.int32)
        place[chosen] = np.arange(len(chosen))
        kept = place[self.row] >= 0
        return Packing(
            self.sequence[kept],
            self.lengths[kept],
            place[self.row[kept]],
            self.start[kept],
            (count, self.shape[1]),
        )

    def _spans(self) -> list[slice]:
        """The steps of its row that each sequence takes."""
        ends = self.start + self.lengths
        return [slice(*span) for span in zip(self.start.tolist(), ends.tolist(), strict=True)]


def pack(lengths: Any, row_length: int | None = None) -> Packing:
    """Plans which sequences share a row: best fit, longest first.

    Each sequence goes into the row that it fills best, a new one where none has room. The same
    lengths give the same plan; it takes O(N log N).

    Args:
        lengths: steps of each sequence, integers [N], each at least 1.
        row_length: T; None is the length of the longest sequence. See `choose_row_length`.

    Returns:
        the plan, with as many rows as are needed.

    Raises:
        ValueError: there is no sequence, one is empty or longer than a row.
    """
    lengths = checked_lengths(lengths)
    longest = int(lengths.max())
    row_length = longest if row_length is None else whole(row_length, "row_length")
    if longest > row_length:
        raise ValueError(
            f"sequence {int(lengths.argmax())} has {longest:,} steps and a row has {row_length:,}:"
            f" give a row_length of {longest:,} or more, or cut the sequence"
        )
    row, start = np.zeros_like(lengths), np.zeros_like(lengths)
    free: list[tuple[int, int]] = []  # (steps, row), ascending
    rows = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        best = bisect.bisect_left(free, (length, 0))
        if best == len(free):
            room, row[i] = row_length, rows
            rows += 1
        else:
            room, row[i] = free.pop(best)
        start[i] = row_length - room
        if room > length:
            bisect.insort(free, (room - length, int(row[i])))
    return Packing(np.arange(len(lengths), dtype=np.int32), lengths, row, start, (rows, row_length))


def choose_row_length(lengths: Any, batch_size: int) -> int:
    """A row length at which the packed rows fill whole batches.

    There are as many batches as rows of the longest sequence's length would fill, and the rows are
    as much longer as it takes to leave no sequence for a batch that would be nearly empty: up to
    about twice the longest sequence. Where the sequences are too few for one batch it is the
    longest.

    Args:
        lengths: steps of each sequence, integers [N], each at least 1.
        batch_size: B.

    Returns:
        T.

    Raises:
        ValueError: there is no sequence or one is empty.
    """
    lengths = checked_lengths(lengths)
    batch_size = whole(batch_size, "batch_size")
    total, longest = int(lengths.sum(dtype=np.int64)), int(lengths.max())
    rows = batch_size * max(1, total // (longest * batch_size))
    row_length = max(longest, -(-total // rows))
    while pack(lengths, row_length).shape[0] > rows:
        row_length += 1 + row_length // _LONGER
    return row_length


class PackedBatch(NamedTuple):
    """Packed sequences; every batch of an iterator has the same shapes.

    Attributes:
        data: ``[B, T, ...]``, or a tree of them; 0 in padding.
        mask: True at real steps, bool [B, T].
        resets: True where a sequence begins, bool [B, T].
        sequences: the number of each step's sequence, counted from 0 in the order that they came
            in, int32 [B, T]; -1 in padding.
    """

    data: Any
    mask: np.ndarray
    resets: np.ndarray
    sequences: np.ndarray

    @property
    def packing(self) -> Packing:
        """Where each sequence lies, to get its results out of the rows."""
        numbers, resets = np.asarray(self.sequences), np.asarray(self.resets)
        row, start = (a.astype(np.int32) for a in np.nonzero(resets))
        first = numbers[row, start]
        order = np.argsort(first)
        _, lengths = np.unique(numbers[numbers >= 0], return_counts=True)
        shape = (numbers.shape[0], numbers.shape[1])
        return Packing(first[order], lengths.astype(np.int32), row[order], start[order], shape)


def packed_batches(
    sequences: Iterable[Any],
    row_length: int,
    batch_size: int,
    *,
    lookahead: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Iterator[PackedBatch]:
    """Packs sequences into batches of one shape. Each sequence comes once.

    The rows come in an order drawn from (seed, epoch); a plan alone has the longest sequences
    first. The last batch is filled up with empty rows.

    Args:
        sequences: arrays ``[t_i, ...]``, or trees of arrays of the same t_i.
        row_length: T.
        batch_size: B.
        lookahead: how many sequences are read before some are packed, for a stream that is long or
            has no end; the more, the fuller the rows. None reads all.
        seed: a whole number from 0.
        epoch: a whole number from 0.

    Yields:
        batches of NumPy arrays.

    Raises:
        ValueError: a sequence is empty or longer than a row, or an argument is out of range.
    """
    row_length, batch_size = whole(row_length, "row_length"), whole(batch_size, "batch_size")
    if lookahead is not None:
        lookahead = whole(lookahead, "lookahead")
    rng = np.random.default_rng([whole(seed, "seed", 0), whole(epoch, "epoch", 0)])
    # The arguments are checked now, not when the first batch is asked for.
    return _packed_batches(enumerate(sequences), row_length, batch_size, lookahead, rng)


def _packed_batches(
    numbered: Iterator[tuple[int, Any]],
    row_length: int,
    batch_size: int,
    lookahead: int | None,
    rng: np.random.Generator,
) -> Iterator[PackedBatch]:
    """`packed_batches` after its checks."""
    waiting: list[tuple[int, Any]] = []
    ended = False
    while not ended:
        new = list(itertools.islice(numbered, lookahead))
        ended = lookahead is None or len(new) < lookahead
        waiting += new
        if not waiting:
            return
        packing = pack([steps_of(sequence) for _, sequence in waiting], row_length)
        # The emptiest rows, less than a batch, wait for what may fill them.
        order = np.argsort(-packing.row_lengths, kind="stable")
        ready = len(order) if ended else len(order) - len(order) % batch_size
        rng.shuffle(order[:ready])
        for first in range(0, ready, batch_size):
            batch = packing.rows(order[first : min(first + batch_size, ready)], batch_size)
            members = [waiting[i] for i in batch.sequence]
            numbers = np.array([number for number, _ in members], np.int32)
            yield PackedBatch(
                batch.scatter([sequence for _, sequence in members]),
                batch.mask,
                batch.resets,
                batch._replace(sequence=numbers).sequences,
            )
        waiting = [waiting[i] for i in packing.rows(order[ready:], batch_size).sequence]


def steps_of(sequence: Any) -> int:
    """The steps of a sequence: an array ``[t, ...]`` or a tree of them."""
    return len(tree.leaves(sequence)[0])


def checked_lengths(lengths: Any) -> np.ndarray:
    """Lengths as int32 [N], or a ValueError in one sentence."""
    array = np.asarray(lengths)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            "lengths should be integers [N], one for each of at least one sequence,"
            f" got {array.dtype} {list(array.shape)}"
        )
    if array.min() < 1:
        raise ValueError(
            f"each sequence should have at least one step, but number {int(array.argmin())} has"
            f" {int(array.min())}"
        )
    return array.astype(np.int32)
