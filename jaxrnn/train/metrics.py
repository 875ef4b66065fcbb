"""What a run measures of itself.

The metrics of a step stay on the device until a record or a checkpoint is due, so that no step
waits for the one before. Perplexities are named after the corpus that they are of.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxrnn.train.errors import UserError
from jaxrnn.train.evaluation import Score, perplexity
from jaxrnn.train.records import Records
from jaxrnn.train.state import Progress
from jaxrnn.train.step import StepMetrics

# The host may be so many steps ahead of the device: enough to keep it busy, few enough that a
# stop signal is obeyed soon.
_STEPS_AHEAD = 2


class Meter:
    """Sums the metrics of steps into a `Progress` and makes records of them."""

    def __init__(
        self,
        corpus: str,
        progress: Progress,
        records: Records,
        count_windows: Callable[[int], int],
    ):
        """Starts the clocks.

        Args:
            corpus: name of the corpus.
            progress: the sums, which it updates.
            records: where records go.
            count_windows: number of windows of an epoch.
        """
        self._corpus = corpus
        self._progress = progress
        self._records = records
        self._count_windows = count_windows
        self._pending: list[StepMetrics] = []
        self._last: StepMetrics | None = None
        self._clock = time.perf_counter()
        self._started = False
        self.restart_speed(0.0)

    def add(self, metrics: StepMetrics, waited: float) -> None:
        """Takes the metrics of a step, after `Progress.advance` has counted it.

        Args:
            metrics: of the step.
            waited: seconds that the loop has waited for data so far.
        """
        self._pending.append(metrics)
        if not self._started:
            # The first step compiles, which is no measure of the steps to come, nor is its wait.
            self.collect()
            self.restart_speed(waited)
            self._started = True
        elif len(self._pending) > _STEPS_AHEAD:
            jax.block_until_ready(self._pending[-1 - _STEPS_AHEAD])

    def collect(self) -> None:
        """Fetches what is pending and adds it to the sums, in float64.

        Raises:
            UserError: a loss or gradient is not finite, and no smaller loss scale may help; the
                message names the step.
        """
        first = self._progress.step - len(self._pending) + 1
        for step, metrics in enumerate(jax.device_get(self._pending), first):
            if metrics.skipped and metrics.loss_scale > 1:
                self._progress.skipped_steps += 1
            else:
                _check_finite(step, metrics)
                self._last = metrics
            self._speed_steps += 1
            nll, tokens = float(metrics.nll), int(metrics.tokens)
            if not math.isfinite(nll):
                continue
            self._progress.interval_nll += nll
            self._progress.interval_tokens += tokens
            self._progress.epoch_nll += nll
            self._progress.epoch_tokens += tokens
            self._speed_tokens += tokens
        self._pending.clear()
        now = time.perf_counter()
        self._progress.seconds += now - self._clock
        self._clock = now

    def restart_speed(self, waited: float) -> None:
        """Measures the speed from here on, after something that was not training.

        Args:
            waited: seconds that the loop has waited for data so far.
        """
        self._speed_clock = time.perf_counter()
        self._speed_tokens = self._speed_steps = 0
        self._waited = waited

    def record_training(self, waited: float) -> dict[str, Any]:
        """Writes and returns the record of the steps since the one before.

        Args:
            waited: seconds that the loop has waited for data so far.
        """
        self.collect()
        progress, last = self._progress, self._last
        seconds = time.perf_counter() - self._speed_clock
        record = self._record() | {
            **self._losses("train", progress.interval_nll / max(progress.interval_tokens, 1)),
        }
        if last is not None:
            record |= {
                "learning_rate": float(last.learning_rate),
                "gradient_norm": float(last.gradient_norm),
                "parameter_norm": float(last.parameter_norm),
                "gradient_to_parameter_norm": float(last.gradient_norm / last.parameter_norm),
            }
            if last.loss_scale:
                record |= {
                    "loss_scale": float(last.loss_scale),
                    "skipped_steps": progress.skipped_steps,
                }
        # Right after the first step, which compiled, nothing has been timed yet.
        if self._speed_steps:
            record |= {
                "tokens_per_second": self._speed_tokens / seconds,
                "steps_per_second": self._speed_steps / seconds,
                "data_wait_share": (waited - self._waited) / seconds,
            }
        progress.interval_nll, progress.interval_tokens = 0.0, 0
        self.restart_speed(waited)
        self._records.write(record)
        return record

    def record_validation(self, score: Score) -> dict[str, Any]:
        """Writes and returns the record of the validation text and of the epoch up to here."""
        self.collect()
        if not math.isfinite(score.loss):
            raise UserError(
                f"the validation loss after step {self._progress.step:,} is {score.loss}, so the "
                "run stopped, and earlier checkpoints are kept; try a lower learning rate"
            )
        loss = self._progress.epoch_nll / max(self._progress.epoch_tokens, 1)
        record = self._record() | {
            **self._losses("train_epoch", loss),
            **self._losses("valid", score.loss),
        }
        self._records.write(record)
        if self._progress.window == 0:
            self._progress.epoch_nll, self._progress.epoch_tokens = 0.0, 0
        return record

    def record_test(self, score: Score) -> dict[str, Any]:
        """Writes and returns the record of the test text under the best parameters."""
        self.collect()
        record = self._record() | self._losses("test", score.loss)
        self._records.write(record)
        return record

    def _record(self) -> dict[str, float]:
        """Returns what every record has; "epoch" counts with a fraction, "seconds" all restarts."""
        progress = self._progress
        epoch = progress.epoch + progress.window / self._count_windows(progress.epoch)
        return {"step": progress.step, "epoch": round(epoch, 4), "seconds": progress.seconds}

    def _losses(self, split: str, loss: float) -> dict[str, float]:
        return {
            f"{self._corpus}/{split}_loss": loss,
            f"{self._corpus}/{split}_perplexity": perplexity(loss),
        }


def _check_finite(step: int, metrics: StepMetrics) -> None:
    for name, value in (("loss", metrics.nll), ("gradient norm", metrics.gradient_norm)):
        if not math.isfinite(value):
            raise UserError(
                f"the {name} of step {step:,} is {float(value)}, so the run stopped, and the "
                "checkpoints before that step are kept; try a lower learning rate or clip norm"
            )
