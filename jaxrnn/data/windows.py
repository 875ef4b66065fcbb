"""The windows of truncated back-propagation through time over a text's lanes.

One window follows another in each lane, so that the state after one is the state before the next.
All windows have the same shape, so that the training step is compiled once; positions that hold no
token are masked.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from jaxrnn.data.lanes import cut_lanes, whole

# Merity et al. 2017, arXiv:1708.02182, section 4.1: the base length is bptt with probability 0.95,
# else half of it; the length is normal about it with a standard deviation of 5. Their code lets no
# window be shorter than 5.
_FULL_PROBABILITY = 0.95
_SPREAD = 5
_SHORTEST = 5
# Two standard deviations: 2 % of the windows are cut to that, and at bptt 70 an eighth of the steps
# are padding. Without a bound each window would have a shape of its own.
_LONGEST_OVER = 2 * _SPREAD


class Batch(NamedTuple):
    """One window, time-major.

    Attributes:
        inputs: ids of the tokens that are read, int32 [T, B].
        targets: ids of the tokens that follow them, int32 [T, B].
        mask: False where a position does not count, bool [T, B].
        starts: True where the carried state is to be forgotten before this window, bool [].
    """

    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    starts: np.ndarray


class Windows(Sequence[Batch]):
    """One epoch over a text as a sequence of windows; any of them can be had at once.

    Every token of the text is a target exactly once. Its input is the token before it in the text,
    also where a lane begins; the first token's is `<eos>`. The last window is padded, never cut.
    `starts` is True in the first window alone.

    With `random_length`, the lengths vary as in AWD-LSTM (Merity et al. 2017), so that the cuts of
    the gradient fall on other places in each epoch. They depend on (seed, epoch) alone. T is then
    bptt + 10 and the rest of a window is padding. (AWD-LSTM also scales the learning rate with the
    length; here that is the caller's.)

    Attributes:
        batch_size: B.
        steps: T, the same for each window.
        epoch: which epoch this is, from 0.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        bptt: int,
        *,
        eos: int,
        seed: int = 0,
        epoch: int = 0,
        random_length: bool = False,
    ):
        """Cuts a text into windows. Nothing is copied.

        Args:
            tokens: ids of the text, integers [N].
            batch_size: the number of lanes, B.
            bptt: the time steps of a window; with `random_length`, of most windows on average.
            eos: the id of `<eos>`.
            seed: a whole number from 0; matters for `random_length` only.
            epoch: a whole number from 0; matters for `random_length` only.
            random_length: draw the lengths of the windows.

        Raises:
            ValueError: the batch is larger than the text, or an argument is out of range.
        """
        self._tokens = np.asarray(tokens)
        if self._tokens.ndim != 1 or not np.issubdtype(self._tokens.dtype, np.integer):
            raise ValueError(
                "tokens should be a vector of integers,"
                f" got {self._tokens.dtype} {list(self._tokens.shape)}"
            )
        self.batch_size = whole(batch_size, "batch_size")
        bptt = whole(bptt, "bptt")
        seed, self.epoch = whole(seed, "seed", 0), whole(epoch, "epoch", 0)
        self._eos = whole(eos, "eos", 0)
        self._lanes = cut_lanes(self._tokens.size, self.batch_size)
        # _edges[i] is the step at which window i begins; the last one is the end of the lanes.
        if random_length:
            self.steps = bptt + _LONGEST_OVER
            self._edges = _random_edges(self._lanes.steps, bptt, seed, self.epoch)
        else:
            self.steps = bptt
            self._edges = np.append(np.arange(0, self._lanes.steps, bptt), self._lanes.steps)

    def __len__(self) -> int:
        return len(self._edges) - 1

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index):
        """Window `index`, or a list of windows for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        step = self._edges[index] + np.arange(self.steps)[:, None]
        mask = (step < self._lanes.length) & (step < self._edges[index + 1])
        place = self._lanes.first + step
        return Batch(
            inputs=self._take(place - 1, mask & (place > 0)),
            targets=self._take(place, mask),
            mask=mask,
            starts=np.array(index == 0),
        )

    def _take(self, place: np.ndarray, real: np.ndarray) -> np.ndarray:
        """The tokens at the places, int32, and `<eos>` where a place is not real."""
        ids = self._tokens[np.where(real, place, 0)]
        return np.where(real, ids, self._eos).astype(np.int32)


def _random_edges(total: int, bptt: int, seed: int, epoch: int) -> np.ndarray:
    """Where windows of random lengths begin, and `total` at the end; int64."""
    rng = np.random.default_rng([seed, epoch])
    shortest = min(_SHORTEST, bptt)
    enough = -(-total // shortest)
    base = np.where(rng.random(enough) < _FULL_PROBABILITY, bptt, bptt / 2)
    lengths = rng.normal(base, _SPREAD).astype(np.int64)
    ends = np.cumsum(lengths.clip(shortest, bptt + _LONGEST_OVER))
    inner = ends[: np.searchsorted(ends, total)]
    return np.concatenate([[0], inner, [total]])


class Batches(Iterator[Batch]):
    """The windows of one epoch after another, from any place on.

    Attributes:
        position: (epoch, index) of the window that comes next. An iterator begun there goes on as
            this one would have: the same bits.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        bptt: int,
        *,
        eos: int,
        seed: int = 0,
        random_length: bool = False,
        start: tuple[int, int] = (0, 0),
        epochs: int | None = None,
    ):
        """See `batches`."""
        self._one_epoch = functools.partial(
            Windows, tokens, batch_size, bptt, eos=eos, seed=seed, random_length=random_length
        )
        epoch, index = whole(start[0], "start's epoch", 0), whole(start[1], "start's index", 0)
        self._epochs = None if epochs is None else whole(epochs, "epochs", 0)
        self._windows = self._one_epoch(epoch=epoch)
        if index > len(self._windows):
            raise ValueError(
                f"start should lie in the {len(self._windows):,} windows of epoch {epoch}, got"
                f" window {index:,}: the text, batch_size, bptt or seed is not that of the run"
                " which is to go on"
            )
        self.position = (epoch, index)
        self._turn_over()

    def __next__(self) -> Batch:
        """The next window, or StopIteration after the last epoch."""
        epoch, index = self.position
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        if self._windows.epoch != epoch:
            self._windows = self._one_epoch(epoch=epoch)
        batch = self._windows[index]
        self.position = (epoch, index + 1)
        self._turn_over()
        return batch

    def _turn_over(self):
        """Writes the place behind an epoch's last window as the next epoch's first one."""
        epoch, index = self.position
        if index == len(self._windows):
            self.position = (epoch + 1, 0)


def batches(
    tokens: np.ndarray,
    batch_size: int,
    bptt: int,
    *,
    eos: int,
    seed: int = 0,
    random_length: bool = False,
    start: tuple[int, int] = (0, 0),
    epochs: int | None = None,
) -> Batches:
    """Iterates over a text's windows, epoch after epoch.

    Starting anywhere takes no longer than starting at the beginning.

    Args:
        tokens: ids of the text, integers [N].
        batch_size: the number of lanes, B.
        bptt: the time steps of a window.
        eos: the id of `<eos>`.
        seed: of the random lengths.
        random_length: draw the lengths of the windows, see `Windows`.
        start: (epoch, index) of the first window wanted, as `position` gave it.
        epochs: stop after so many, counted from epoch 0; None goes on without end.

    Returns:
        an iterator over `Batch`es of NumPy arrays, with a `position`.

    Raises:
        ValueError: the batch is larger than the text, or an argument is out of range.
    """
    return Batches(
        tokens, batch_size, bptt, eos=eos, seed=seed, random_length=random_length, start=start,
        epochs=epochs,
    )  # fmt: skip
