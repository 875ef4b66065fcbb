"""Prefetch: the same batches, on the device, with the consumer's position."""

import gc
import itertools
import threading
import time

import jax
import numpy as np
import pytest

from jaxrnn.data import Prefetch, batches


def source(**more):
    return batches(np.arange(1, 200), 3, 8, eos=0, seed=1, random_length=True, **more)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_same_batches_come_on_the_device_and_can_go_on_anywhere():
    plain = list(source(epochs=2))
    for k in 0, 1, 5:
        with Prefetch(source(epochs=2)) as ready:
            handed = list(itertools.islice(ready, k))
            # Ahead of the consumer the thread may be, its position is not.
            position = ready.position
        handed += Prefetch(source(epochs=2, start=position))
        assert len(handed) == len(plain)
        for one, two in zip(handed, plain, strict=True):
            assert all(isinstance(array, jax.Array) for array in one)
            assert all(map(np.array_equal, one, two))
    assert not threads()


def test_batches_go_where_they_are_wanted():
    device = jax.devices()[-1]
    with Prefetch(source(), transfer=lambda batch: jax.device_put(batch, device)) as ready:
        assert next(ready).inputs.devices() == {device}


def test_no_more_than_depth_is_made_ahead():
    made = []

    def count():
        for i in range(100):
            made.append(i)
            yield np.array(i)

    with Prefetch(count(), depth=2) as ready:
        assert ready.position is None
        assert int(next(ready)) == 0
        time.sleep(0.2)
        # Two in the queue, one in the thread's hands, and the one handed out.
        assert len(made) <= 4


def test_an_error_in_the_source_comes_where_its_batch_would_have():
    def broken():
        yield np.array(1)
        raise OSError("the disk is gone")

    ready = Prefetch(broken())
    assert int(next(ready)) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(ready)
    assert next(ready, None) is None
    assert not threads()


def test_the_time_spent_waiting_is_counted():
    def slow():
        for _ in range(3):
            time.sleep(0.05)
            yield np.array(0)

    with Prefetch(slow()) as ready:
        assert ready.waited == 0.0
        list(ready)
        assert 0.1 < ready.waited < 5.0
    with Prefetch(itertools.repeat(np.array(0))) as ready:
        next(ready)
        time.sleep(0.2)
        before = ready.waited
        next(ready)
        assert ready.waited - before < 0.1


def test_the_thread_ends_when_closed_or_forgotten():
    ready = Prefetch(source())
    next(ready)
    assert len(threads()) == 1
    ready.close()
    ready.close()
    assert not threads()
    assert next(ready, None) is None
    forgotten = Prefetch(source())
    next(forgotten)
    del forgotten
    gc.collect()
    assert not threads()


def test_depth_is_checked():
    with pytest.raises(ValueError, match="depth should be at least 1, got 0"):
        Prefetch([], depth=0)
