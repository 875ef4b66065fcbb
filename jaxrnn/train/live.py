"""One line of live progress: redrawn in a terminal, a plain line now and then elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from jaxrnn.train.evaluation import perplexity

# A log file wants a line rarely enough to be read, a terminal is redrawn in place.
_SECONDS_BETWEEN_LINES = 5.0


class LiveLine:
    """Shows how far a run is, how good, how fast, and how long it still takes."""

    def __init__(self, total_steps: int, console: Console | None = None):
        """Prepares the line.

        Args:
            total_steps: steps of the whole run.
            console: where to print; standard output if None.
        """
        self._total = total_steps
        self._console = console or Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("compiling the training step", total=total_steps)
        self._last_line = -float("inf")

    def __enter__(self) -> "LiveLine":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def training(self, record: dict[str, Any]) -> None:
        """Shows what `Meter.record_training` returned."""
        loss = _figure(record, "train_loss")
        # Short enough for a terminal of 80 columns, where a longer line would lose its end.
        text = f"step {record['step']}/{self._total} · loss {loss:.3f}"
        text += f" · perplexity {perplexity(loss):.1f}"
        if speed := record.get("steps_per_second"):
            left = duration((self._total - record["step"]) / speed)
            text += f" · {record['tokens_per_second']:.0f} tokens/s · {left} left"
        self._bar.update(self._task, completed=record["step"], description=text)
        if self._bar.disable and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(text)

    def validation(self, record: dict[str, Any], best: bool) -> None:
        """Prints a line on a validation record.

        Args:
            record: what `Meter.record_validation` returned.
            best: whether it is the best so far.
        """
        self.say(
            f"epoch {record['epoch']:.2f} · step {record['step']:,} · perplexity: training "
            f"{_figure(record, 'train_epoch_perplexity'):,.1f}, validation "
            f"{_figure(record, 'valid_perplexity'):,.1f}{' (best)' if best else ''} · "
            f"{duration(record['seconds'])}"
        )


def _figure(record: dict[str, Any], name: str) -> float:
    """Returns a figure whose name has the corpus in front."""
    return next(value for key, value in record.items() if key.endswith(f"/{name}"))


def duration(seconds: float) -> str:
    """Returns seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
