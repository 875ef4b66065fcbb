"""Batches to the device ahead of time, in a thread.

A thread of our own, not grain's: grain's data sets are indexed by one running number, ours by
(epoch, window) with epochs of different lengths; the place to go on from has to be the consumer's,
not the thread's; and importing grain takes 1.4 seconds, which the first step would wait for.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# How often the thread looks whether it is to end while the queue is full, in seconds.
_LOOK = 0.05


class Prefetch(Iterator[T], Generic[T]):
    """Iterates over batches that a thread has put on the device before they are asked for.

    An exception in the source is raised where its batch would have come. The thread ends when the
    source does, on `close`, on leaving a `with`, and when this object is forgotten.

    Attributes:
        waited: seconds that the consumer has spent waiting for batches. Divided by the time that
            has passed, it is the share of time lost to the data.
        position: the source's `position` after the last batch handed out: where to start again.
            None if the source has none.
    """

    def __init__(
        self,
        source: Iterable[T],
        *,
        depth: int = 2,
        transfer: Callable[[T], T] | None = None,
    ):
        """Starts the thread.

        Args:
            source: batches, pytrees of arrays. It belongs to the thread from now on.
            depth: how many batches are ready at most; each takes memory on the device.
            transfer: puts a batch on the device, or devices; None is `jax.device_put`.

        Raises:
            ValueError: `depth` is below one.
        """
        if depth < 1:
            raise ValueError(f"depth should be at least 1, got {depth}")
        import jax

        self.waited = 0.0
        self.position = getattr(source, "position", None)
        self._queue: queue.Queue = queue.Queue(depth)
        stop = threading.Event()
        # The thread must not hold `self`, or this object could never be forgotten.
        self._thread = threading.Thread(
            target=_fill,
            args=(source, self._queue, stop, transfer or jax.device_put),
            name="prefetch",
            daemon=True,
        )
        self._thread.start()
        # Also runs when the interpreter ends: a daemon thread inside XLA at that time crashes it.
        self._finalizer = weakref.finalize(self, _end, self._thread, stop)

    def __next__(self) -> T:
        """The next batch, on the device.

        Raises:
            StopIteration: the source has ended, or this was closed.
        """
        if not self._finalizer.alive:
            raise StopIteration
        before = time.perf_counter()
        give = self._queue.get()
        self.waited += time.perf_counter() - before
        try:
            batch, self.position = give()
        except BaseException:
            self.close()
            raise
        return batch

    def close(self):
        """Ends the thread and waits for it; batches not yet handed out are dropped."""
        self._finalizer()

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_):
        self.close()


def _fill(source: Iterable, ready: queue.Queue, stop: threading.Event, transfer: Callable):
    """The thread: puts functions into the queue that return (batch, position) or raise."""
    try:
        for batch in source:
            item = transfer(batch), getattr(source, "position", None)
            if not _put(ready, _giver(item), stop):
                return
        _put(ready, _raiser(StopIteration()), stop)
    except BaseException as error:
        _put(ready, _raiser(error), stop)


def _giver(item: Any) -> Callable[[], Any]:
    return lambda: item


def _raiser(error: BaseException) -> Callable[[], Any]:
    def give():
        raise error

    return give


def _put(ready: queue.Queue, give: Callable[[], Any], stop: threading.Event) -> bool:
    """Puts into the queue, or returns False when told to stop."""
    while not stop.is_set():
        try:
            ready.put(give, timeout=_LOOK)
            return True
        except queue.Full:
            continue
    return False


def _end(thread: threading.Thread, stop: threading.Event):
    stop.set()
    if thread is not threading.current_thread():
        thread.join()
