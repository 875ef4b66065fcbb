"""Forecasts the next day of seven series, hour by hour, and compares with repeating the last day.

    python examples/forecast.py --data ETTh1.csv --plot forecast.png

ETTh1 (Zhou et al. 2021, arXiv:2012.07436; https://github.com/zhouhaoyi/ETDataset) has the hourly
loads and the oil temperature of an electricity transformer. The setting is the paper's: 12 months
to train on, 4 to validate, 4 to test, scaled by the mean and deviation of the training part. All 7
series are forecast (7 to 7, "multivariate"), 24 hours ahead, from each hour of the test part.

One step of the recurrent layer is a day: 24 readings of one series. One network serves all series,
and learns what has to be added to the last day. To read many short sequences side by side, series
are put into the batch.

Expect, with the defaults, on 2 cores of a shared CPU machine (2026-12-01): on the test part an MSE
of 0.307 and an MAE of 0.348, where repeating the last day has 0.424 and 0.389; 18 s of CPU time.
"""

import argparse
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxrnn import GRU

SERIES = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
DAY, DAYS = 24, 7  # Each forecast is made from a week.
MONTH = 30 * DAY  # In this benchmark.
PARTS = {"train": (0, 12), "validation": (12, 16), "test": (16, 20)}  # In months.


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the file.

    Returns:
        for each part, the windows ``[N, (DAYS + 1) * DAY, 7]``: what is known, and the day after.
        The known hours of the first ones are of the part before, as in the paper.
    """
    if not path.is_file():
        raise SystemExit(f"there is no file {path}: name ETTh1.csv with --data")
    columns = range(1, 1 + len(SERIES))
    values = np.genfromtxt(path, np.float32, delimiter=",", skip_header=1, usecols=columns)
    train = values[: 12 * MONTH]
    values = (values - train.mean(axis=0)) / train.std(axis=0)
    parts = {}
    for name, (first, last) in PARTS.items():
        part = values[max(0, first * MONTH - DAYS * DAY) : last * MONTH]
        parts[name] = np.lib.stride_tricks.sliding_window_view(part, (DAYS + 1) * DAY, axis=0)
    return {name: windows.swapaxes(1, 2) for name, windows in parts.items()}


class Forecaster(nnx.Module):
    """A GRU over days, and a linear layer that corrects the last day.

    Args:
        hidden_features: of the GRU.
        rngs: of parameters and dropout.
    """

    def __init__(self, hidden_features: int, *, rngs: nnx.Rngs):
        self.gru = GRU(DAY, hidden_features, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        # From zeros, so that training starts from the forecast that repeats the last day.
        self.head = nnx.Linear(hidden_features, DAY, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, known: jax.Array) -> jax.Array:
        """From ``[B, DAYS * DAY, 7]`` to the next day ``[B, DAY, 7]``."""
        days = known.swapaxes(1, 2).reshape(-1, DAYS, DAY)
        # Level and swing change over the two years; the network sees each week without them.
        level = days.mean(axis=(1, 2), keepdims=True)
        swing = days.std(axis=(1, 2), keepdims=True) + 0.1
        days = (days - level) / swing
        _, (final,) = self.gru(days)
        day = days[:, -1] + self.head(self.dropout(final.h))
        day = day * swing[:, 0] + level[:, 0]
        return day.reshape(-1, len(SERIES), DAY).swapaxes(1, 2)


@nnx.jit
def train_step(model: Forecaster, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """Changes the model by one step and returns the mean absolute error of the batch."""

    def loss(model: Forecaster) -> jax.Array:
        return jnp.abs(model(windows[:, :-DAY]) - windows[:, -DAY:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def errors(forecast: Callable[[jax.Array], jax.Array], windows: np.ndarray) -> tuple[float, float]:
    """The mean squared and the mean absolute error over all windows."""
    difference = np.asarray(forecast(jnp.array(windows[:, :-DAY]))) - windows[:, -DAY:]
    return float(np.mean(difference**2)), float(np.mean(np.abs(difference)))


def plot(path: pathlib.Path, window: np.ndarray, forecast: np.ndarray) -> None:
    """Draws the last two known days, the forecast and the truth of each series."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    hours = np.arange(-2 * DAY, DAY)
    for index, (name, axes) in enumerate(zip(SERIES, figure.subplots(2, 4).flat, strict=False)):
        axes.plot(hours, window[-3 * DAY :, index], label="truth")
        axes.plot(hours[-DAY:], forecast[:, index], label="forecast")
        axes.plot(hours[-DAY:], window[-2 * DAY : -DAY, index], ":", label="the day before")
        axes.set(title=name, xlabel="hour")
    figure.axes[-1].axis("off")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="lower right")
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints the results and returns them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, required=True, help="ETTh1.csv")
    parser.add_argument("--plot", type=pathlib.Path, help="file to draw one forecast in, a PNG")
    parser.add_argument("--steps", type=int, default=800, help="batches to train on")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, batches and dropout")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps should be at least 1, got {options.steps}")

    parts = read(options.data)
    rng = np.random.default_rng(options.seed)
    model = Forecaster(64, rngs=nnx.Rngs(options.seed))
    rate = optax.cosine_decay_schedule(2e-3, options.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate), wrt=nnx.Param)

    start = time.perf_counter()
    losses = []
    for step in range(1, options.steps + 1):
        batch = parts["train"][rng.integers(len(parts["train"]), size=64)]
        losses.append(train_step(model, optimizer, jnp.array(batch)))
        if step % 20 == 0 or step == options.steps:
            line = f"step {step}/{options.steps}  mean absolute error {losses[-1]:.3f}"
            print(f"\r{line}  {time.perf_counter() - start:.0f} s", end="", flush=True)
    print()

    model.eval()  # No dropout from here on.
    forecast = nnx.jit(model)
    results = {"first_loss": float(losses[0]), "last_loss": float(losses[-1])}
    for name in ("validation", "test"):
        mse, mae = errors(forecast, parts[name])
        naive_mse, naive_mae = errors(lambda known: known[:, -DAY:], parts[name])
        print(f"{name}: MSE {mse:.3f}, MAE {mae:.3f}", end="; ")
        print(f"repeating the day before: MSE {naive_mse:.3f}, MAE {naive_mae:.3f}")
        results |= {f"{name}_mse": mse, f"{name}_mae": mae}
        results |= {f"{name}_naive_mse": naive_mse, f"{name}_naive_mae": naive_mae}
    if options.plot:
        window = parts["test"][len(parts["test"]) // 2]
        drawn = forecast(jnp.array(window[None, :-DAY]))[0]
        plot(options.plot, window, np.asarray(drawn))
        print(f"drew {options.plot}")
    return results


if __name__ == "__main__":
    main()
