"""Buckets: the boundaries with the least padding, and each sequence in one of them, once."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrnn.data import BatchSize, bucket_boundaries, bucketed_batches

some_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=30)
batch_sizes = st.builds(lambda n: BatchSize(rows=n), st.integers(1, 5)) | st.builds(
    lambda n: BatchSize(steps=n), st.integers(1, 60)
)


def computed_steps(lengths, boundaries, batch):
    """Padding included, one sequence after another."""
    of_bucket = dict.fromkeys(boundaries, 0)
    for length in lengths:
        of_bucket[min(b for b in boundaries if b >= length)] += 1
    return sum(-(-n // batch.at(b)) * batch.at(b) * b for b, n in of_bucket.items())


@settings(deadline=None)
@given(some_lengths, st.integers(1, 4), st.none() | batch_sizes)
def test_no_other_boundaries_have_less_padding(lengths, count, batch):
    boundaries = bucket_boundaries(lengths, count, batch=batch)
    assert boundaries == sorted(set(boundaries))
    assert 1 <= len(boundaries) <= count
    assert boundaries[-1] == max(lengths)
    shorter = sorted(set(lengths) - {max(lengths)})
    size = batch or BatchSize(rows=1)
    assert computed_steps(lengths, boundaries, size) == min(
        computed_steps(lengths, [*chosen, max(lengths)], size)
        for used in range(count)
        for chosen in itertools.combinations(shorter, used)
    )


@settings(deadline=None)
@given(some_lengths, st.integers(1, 4), batch_sizes, st.integers(0, 3))
def test_each_sequence_comes_once_in_its_bucket(lengths, count, batch, seed):
    sequences = [(np.full(n, i), np.arange(n) + 0.5) for i, n in enumerate(lengths)]
    boundaries = bucket_boundaries(lengths, count)
    batches = list(bucketed_batches(sequences, boundaries, batch, seed=seed))
    seen = []
    for one in batches:
        numbers, steps = one.data
        rows, boundary = numbers.shape
        assert steps.shape == numbers.shape
        assert rows == batch.at(boundary)
        assert batch.rows is not None or rows == 1 or rows * boundary <= batch.steps
        for row, (number, length) in enumerate(zip(one.sequence, one.lengths, strict=True)):
            real = np.arange(boundary) < length
            assert (number == -1) == (length == 0)
            np.testing.assert_array_equal(numbers[row], np.where(real, number, 0))
            np.testing.assert_array_equal(steps[row], (np.arange(boundary) + 0.5) * real)
            if number >= 0:
                assert length == lengths[number]
                assert boundary == min(b for b in boundaries if b >= length)
                seen.append(number)
    assert sorted(seen) == list(range(len(lengths)))
    assert len({one.data[0].shape for one in batches}) <= len(boundaries)
    again = bucketed_batches(sequences, boundaries, batch, seed=seed)
    for one, other in zip(batches, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_order_depends_on_seed_and_epoch():
    sequences = [np.zeros(n) for n in np.random.default_rng(0).integers(1, 20, 50)]

    def order(**options):
        batches = bucketed_batches(sequences, [5, 10, 20], BatchSize(rows=4), **options)
        return str([batch.sequence.tolist() for batch in batches])

    assert order() == order(seed=0, epoch=0)
    assert len({order(seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_budget_of_steps_gives_short_sequences_more_rows():
    sequences = [np.zeros((n, 2), np.float32) for n in [3] * 20 + [10] * 4 + [50]]
    batches = bucketed_batches(sequences, [3, 10, 50], BatchSize(steps=30))
    shapes = sorted({batch.data.shape for batch in batches})
    assert shapes == [(1, 50, 2), (3, 10, 2), (10, 3, 2)]


def test_bad_buckets_are_refused():
    def refused(match, lengths, boundaries, **size):
        with pytest.raises(ValueError, match=match):
            bucketed_batches([np.zeros(n) for n in lengths], boundaries, BatchSize(**size))

    refused("sequence 1 has 9 steps and the last boundary is 5", [3, 9], [2, 5], rows=2)
    refused("boundaries should ascend", [3, 4], [5, 5], rows=2)
    refused("boundaries should ascend", [3, 4], [5, 2], rows=2)
    refused("at least one step, but number 0", [0], [5], rows=2)
    refused("either a number of rows or one of steps, got neither", [3], [5])
    refused("got rows and steps", [3], [5], rows=2, steps=3)
    refused("steps should be a whole number of at least 1", [3], [5], steps=0)
    with pytest.raises(ValueError, match="count"):
        bucket_boundaries([3], 0)
    with pytest.raises(ValueError, match="lengths should be integers"):
        bucket_boundaries([1.5], 2)
