"""Regularization of recurrent networks, as functions of arrays. Arrays are time-major.

What acts inside the time loop, zoneout and recurrent dropout, is in `jaxrnn.recurrence`'s `Noise`.
"""

import jax
import jax.numpy as jnp

from jaxrnn._typing import Array, Key


def random_mask(
    key: Key, probability: float, shape: tuple[int, ...], rows: Array | None = None, *, axis: int
) -> Array:
    """Draws booleans that are True with a probability.

    Args:
        key: of the mask.
        probability: of True.
        shape: of the mask.
        rows: integers ``[B]``, the numbers of the rows that ``axis`` holds. Each row's mask depends
            on its number alone, so that it stays the same where devices or micro-batches share the
            rows in another way. None: one draw for all.
        axis: the batch axis of ``shape``.

    Returns:
        bool of that shape.
    """
    if rows is None:
        return jax.random.bernoulli(key, probability, shape)
    if jnp.shape(rows) != (shape[axis],):
        raise ValueError(f"rows should be [B] = ({shape[axis]},), got {jnp.shape(rows)}")
    one_row = shape[:axis] + shape[axis + 1 :]

    def draw(row: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, row), probability, one_row)

    return jax.vmap(draw, out_axes=axis)(rows)


def dropout(
    key: Key, rate: float, x: Array, *, per_row: bool = False, rows: Array | None = None
) -> Array:
    """Zeroes each value with probability ``rate`` and scales the rest by ``1 / (1 - rate)``.

    Args:
        key: of the mask.
        rate: between 0 and 1.
        x: any shape; ``[T, B, ...]`` with ``per_row``.
        per_row: one mask for all time steps of a row, and so of one of the batch: the variational
            dropout of Gal & Ghahramani (2016), arXiv:1512.05287, also called locked.
        rows: integers ``[B]``, as in `random_mask`; ``x`` is then ``[T, B, ...]``.

    Returns:
        an array like ``x``; all 0 for a rate of 1.
    """
    if rate == 1.0:
        return jnp.zeros_like(x)
    shape = x.shape[1:] if per_row else x.shape
    keep = random_mask(key, 1 - rate, shape, rows, axis=0 if per_row else 1)
    return jnp.where(keep, x / (1 - rate), 0)


def embedding_dropout(key: Key, rate: float, ids: Array, embedded: Array, size: int) -> Array:
    """Drops whole words: each word of the vocabulary, at all its places or at none.

    Gal & Ghahramani (2016), section 4.2, as in the AWD-LSTM (Merity et al. 2017, arXiv:1708.02182):
    the words that are kept are scaled by ``1 / (1 - rate)``.

    Args:
        key: of the mask.
        rate: between 0 and 1.
        ids: integers ``[...]``, the words.
        embedded: ``[..., E]``, their rows of the embedding.
        size: V.

    Returns:
        an array like ``embedded``.
    """
    return embedded * dropout(key, rate, jnp.ones((size,), embedded.dtype))[ids][..., None]


def activation_penalty(y: Array, mask: Array | None = None, count: Array | None = None) -> Array:
    """The mean of the squared outputs, in float32 (AR of Merity et al. 2017, arXiv:1708.01009).

    Args:
        y: ``[T, B, S]`` of the last layer, after its dropout.
        mask: bool ``[T, B]``, the steps that count; None counts all.
        count: number of steps that the mean is over, ``[]``, where these are only some of them.

    Returns:
        a number to be weighed and added to the loss; 0 where nothing counts.
    """
    return _mean_square(y, mask, count)


def temporal_activation_penalty(
    y: Array,
    mask: Array | None = None,
    resets: Array | None = None,
    count: Array | None = None,
) -> Array:
    """The mean of the squared differences between neighbouring steps' outputs, in float32.

    TAR of Merity et al. (2017), arXiv:1708.01009.

    Args:
        y: ``[T, B, S]`` of the last layer, before its dropout.
        mask: bool ``[T, B]``: only pairs of steps that both count; None counts all.
        resets: bool ``[T, B]``: a pair whose later step begins a sequence does not count.
        count: number of pairs that the mean is over, ``[]``, where these are only some of them.

    Returns:
        a number to be weighed and added to the loss; 0 where nothing counts.
    """
    pairs = None if mask is None else mask[1:] & mask[:-1]
    if resets is not None:
        follows = resets[1:] == 0
        pairs = follows if pairs is None else pairs & follows
    y = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    return _mean_square(y[1:] - y[:-1], pairs, count)


def _mean_square(a: Array, counts: Array | None, count: Array | None) -> Array:
    """Over the rows of ``a [T, B, S]`` that count, whose number is ``count`` where it is given."""
    squares = jnp.square(a.astype(jnp.promote_types(a.dtype, jnp.float32)))
    if counts is None:
        counts = jnp.ones(a.shape[:2], bool)
    total = jnp.where(counts[:, :, None], squares, 0).sum()
    count = counts.sum() if count is None else count
    return total / (jnp.maximum(count, 1) * a.shape[2])
