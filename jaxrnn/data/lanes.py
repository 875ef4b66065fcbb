"""A text cut into lanes: one contiguous piece for each row of the batch."""

import operator
from typing import NamedTuple

import numpy as np


class Lanes(NamedTuple):
    """Where each lane lies in the text.

    Attributes:
        first: the place of each lane's first token in the text, int64 [B].
        length: the number of tokens of each lane, int64 [B]; two lanes differ by one at most.
    """

    first: np.ndarray
    length: np.ndarray

    @property
    def steps(self) -> int:
        """The number of time steps of the longest lane."""
        return int(self.length[0])


def cut_lanes(num_tokens: int, batch_size: int) -> Lanes:
    """Cuts a text into contiguous lanes, as equal as possible; the longer ones come first.

    No token is dropped: where the text does not divide evenly, the shorter lanes end one step
    early.

    Args:
        num_tokens: tokens in the text.
        batch_size: lanes wanted, B.

    Raises:
        ValueError: the batch is below one, or larger than the text.
    """
    batch_size = whole(batch_size, "batch_size")
    if batch_size > num_tokens:
        lower = f"lower batch_size to {num_tokens:,} or less, or " if num_tokens else ""
        raise ValueError(
            f"a batch of {batch_size:,} lanes needs a text of at least {batch_size:,} tokens, one"
            f" a lane, but this one has {num_tokens:,}: {lower}give a longer text"
        )
    short, longer = divmod(num_tokens, batch_size)
    length = np.full(batch_size, short, np.int64)
    length[:longer] += 1
    return Lanes(np.cumsum(length) - length, length)


def whole(value: int, name: str, least: int = 1) -> int:
    """`value` as an int, or a ValueError in one sentence if it is no whole number or too small."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} should be a whole number of at least {least}, got {value!r}")
    return number
