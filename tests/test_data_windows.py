"""Lanes and windows: each token once, in order, from any place on."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrnn.data import Batches, Windows, batches
from jaxrnn.data.lanes import cut_lanes

# The text is 1, 2, 3 … and <eos> is 0, so that a token says its own place and the one before it.
sizes = st.tuples(st.integers(1, 300), st.integers(1, 12), st.integers(1, 40)).filter(
    lambda size: size[1] <= size[0]
)


def text(length):
    return np.arange(1, length + 1)


@settings(deadline=None)
@given(sizes, st.booleans(), st.integers(0, 5), st.integers(0, 3))
def test_each_token_is_predicted_once_from_the_one_before_it(size, random_length, seed, epoch):
    length, batch_size, bptt = size
    windows = Windows(
        text(length), batch_size, bptt, eos=0, seed=seed, epoch=epoch, random_length=random_length
    )
    seen = []
    for i, batch in enumerate(windows):
        for array, dtype in zip(batch, (np.int32, np.int32, np.bool_, np.bool_), strict=True):
            assert array.dtype == dtype
        shape = (windows.steps, batch_size)
        assert batch.inputs.shape == batch.targets.shape == batch.mask.shape == shape
        assert batch.starts == (i == 0)
        assert (batch.inputs[~batch.mask] == 0).all()
        assert (batch.targets[~batch.mask] == 0).all()
        np.testing.assert_array_equal(batch.inputs[batch.mask], batch.targets[batch.mask] - 1)
        # Padding comes last in each lane, so that the state before it is the one carried on.
        assert (np.diff(batch.mask.astype(int), axis=0) <= 0).all()
        seen.append(batch)
    lanes = [np.concatenate([b.targets[b.mask[:, k], k] for b in seen]) for k in range(batch_size)]
    np.testing.assert_array_equal(np.concatenate(lanes), text(length))
    assert max(map(len, lanes)) - min(map(len, lanes)) <= 1


def test_windows_without_random_lengths_are_full_but_the_last():
    windows = Windows(text(103), 4, 10, eos=0)
    assert len(windows) == 3
    assert windows.steps == 10
    assert [batch.mask.sum() for batch in windows] == [40, 40, 23]
    assert windows[0].inputs[0].tolist() == [0, 26, 52, 78]
    np.testing.assert_array_equal(windows[-1].targets, windows[2].targets)
    assert [batch.starts.item() for batch in windows[:2]] == [True, False]
    with pytest.raises(IndexError):
        windows[3]


def test_random_lengths_are_those_of_awd_lstm():
    windows = Windows(text(200_000), 1, 70, eos=0, seed=3, random_length=True)
    lengths = np.array([batch.mask.sum() for batch in windows])[:-1]
    assert windows.steps == 80
    assert lengths.max() <= 80
    assert lengths.min() >= 5
    assert abs((lengths < 53).mean() - 0.05) < 0.015
    assert abs(np.median(lengths) - 70) < 2
    assert abs(lengths[lengths > 53].std() - 5) < 0.5


def test_an_epoch_is_drawn_from_seed_and_epoch_alone():
    def ends(seed, epoch):
        windows = Windows(text(5_000), 2, 30, eos=0, seed=seed, epoch=epoch, random_length=True)
        return [int(batch.mask.sum()) for batch in windows]

    assert ends(1, 2) == ends(1, 2)
    assert ends(1, 2) != ends(1, 3)
    assert ends(1, 2) != ends(2, 2)


@pytest.mark.parametrize("random_length", [False, True])
def test_an_iterator_begun_anywhere_goes_on_bit_for_bit(random_length):
    def begin(**more):
        return batches(text(333), 5, 9, eos=0, seed=7, random_length=random_length, **more)

    through = begin(epochs=3)
    positions, expected = [], []
    for _ in range(10_000):
        positions.append(through.position)
        batch = next(through, None)
        if batch is None:
            break
        expected.append(batch)
    assert positions[-1] == (3, 0)
    assert {epoch for epoch, _ in positions[:-1]} == {0, 1, 2}
    assert sum(batch.starts for batch in expected) == 3
    for k in range(len(positions)):
        again = list(begin(epochs=3, start=positions[k]))
        assert len(again) == len(expected) - k
        for one, two in zip(again, expected[k:], strict=True):
            assert all(map(np.array_equal, one, two))


def test_without_an_end_the_epochs_go_on_and_a_full_epoch_turns_over():
    per_epoch = len(Windows(text(50), 2, 10, eos=0))
    endless = batches(text(50), 2, 10, eos=0)
    assert isinstance(endless, Batches)
    starts = [batch.starts.item() for batch in itertools.islice(endless, 3 * per_epoch)]
    assert starts == ([True] + [False] * (per_epoch - 1)) * 3
    assert endless.position == (3, 0)
    assert batches(text(50), 2, 10, eos=0, start=(1, per_epoch)).position == (2, 0)
    assert list(batches(text(50), 2, 10, eos=0, epochs=0)) == []


def test_windows_may_come_from_any_integer_array():
    one = Windows(text(50).astype(np.uint16), 3, 7, eos=0)[1]
    two = Windows(text(50), 3, 7, eos=0)[1]
    assert all(map(np.array_equal, one, two))
    assert one.inputs.dtype == np.int32


def test_lanes_are_as_equal_as_possible():
    lanes = cut_lanes(11, 4)
    assert lanes.first.tolist() == [0, 3, 6, 9]
    assert lanes.length.tolist() == [3, 3, 3, 2]
    assert lanes.steps == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch_size": 64},
            "a batch of 64 lanes needs a text of at least 64 tokens, one a lane, but this one has"
            " 50: lower batch_size to 50 or less, or give a longer text",
        ),
        ({"tokens": text(0)}, "but this one has 0: give a longer text"),
        ({"batch_size": 0}, "batch_size should be a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size should be a whole number of at least 1, got 2.5"),
        ({"bptt": -3}, "bptt should be a whole number of at least 1, got -3"),
        ({"bptt": True}, "bptt should be a whole number of at least 1, got True"),
        ({"seed": -1}, "seed should be a whole number of at least 0, got -1"),
        ({"tokens": text(50) * 1.0}, "vector of integers, got float64 [50]"),
        ({"tokens": text(50).reshape(5, 10)}, "vector of integers, got int64 [5, 10]"),
        ({"start": (0, 99)}, "the 3 windows of epoch 0, got window 99"),
        ({"start": (-1, 0)}, "start's epoch should be a whole number of at least 0, got -1"),
        ({"epochs": -1}, "epochs should be a whole number of at least 0, got -1"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared below)
        batches(**({"tokens": text(50), "batch_size": 2, "bptt": 10, "eos": 0} | arguments))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
