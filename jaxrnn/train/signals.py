"""Ctrl-C and SIGTERM: save, then leave."""

import signal
from types import FrameType


class StopSignal:
    """Notes the first Ctrl-C or SIGTERM for the loop to act on; a second one acts at once.

    Attributes:
        number: the signal that came, or None.
    """

    number: int | None = None

    def __enter__(self) -> "StopSignal":
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
