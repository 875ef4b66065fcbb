"""Time training on sequences of many lengths, on the CPU: padded, bucketed and packed.

    python scripts/bench_packing.py --json packing.json

One layer of LSTM, float32, over 1,000 sequences of 17 to 893 steps (log-normal, median 90, sigma
1); a step is forward, backward and an SGD update. All three run in this process and take turns, one
pass over all sequences each. Padding takes 32 sequences at a time as they come, each batch padded
to its own longest; bucketing has 8 lengths to pad to; packing has rows of one length.

What is compiled is compiled beforehand, and the batches lie on the device. That is generous to
padding: in training it would have to compile a program for almost every batch. The gradients summed
over a pass have to agree before anything is timed.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `tests`

import numpy as np

from scripts import bench

# A gradient is summed over some 30,000 steps of a batch: small enough for the weights to stay.
LEARNING_RATE = 1e-6


class Size(NamedTuple):
    """What is trained on what."""

    sequences: int
    shortest: int
    median: int
    longest: int
    batch: int
    buckets: int
    inputs: int
    hidden: int


FULL = Size(1000, 17, 90, 893, batch=32, buckets=8, inputs=64, hidden=256)
QUICK = Size(8, 3, 8, 30, batch=4, buckets=2, inputs=3, hidden=4)


class Contender(NamedTuple):
    """One way to make batches: arguments of the layer, and the seconds that making them took."""

    name: str
    batches: list[dict[str, np.ndarray]]  # x [B, T, I], lengths [B], resets [B, T]
    seconds: float

    @property
    def shapes(self) -> int:
        """How many programs are compiled."""
        return len({batch["x"].shape for batch in self.batches})

    @property
    def real_share(self) -> float:
        """Real steps among those that are computed."""
        steps = sum(int(np.prod(batch["x"].shape[:2])) for batch in self.batches)
        return float(sum(batch["lengths"].sum() for batch in self.batches) / steps)


def draw_sequences(size: Size) -> list[np.ndarray]:
    """Random sequences ``[t_i, I]`` of log-normal lengths."""
    rng = np.random.default_rng(0)
    lengths = np.round(size.median * rng.lognormal(size=size.sequences))
    lengths = lengths.clip(size.shortest, size.longest).astype(int)
    return [rng.normal(size=(n, size.inputs)).astype(np.float32) for n in lengths]


def padding(sequences: list[np.ndarray], size: Size) -> list[dict[str, np.ndarray]]:
    """Batches in the given order, each padded to its longest."""
    from jaxrnn.data import BatchSize, bucketed_batches

    batches = []
    for first in range(0, len(sequences), size.batch):
        some = sequences[first : first + size.batch]
        longest = max(map(len, some))
        (batch,) = bucketed_batches(some, [longest], BatchSize(rows=len(some)))
        batches.append({"x": batch.data, "lengths": batch.lengths})
    return batches


def bucketing(sequences: list[np.ndarray], size: Size) -> list[dict[str, np.ndarray]]:
    """Batches of like lengths."""
    from jaxrnn.data import BatchSize, bucket_boundaries, bucketed_batches

    rows = BatchSize(rows=size.batch)
    boundaries = bucket_boundaries([len(s) for s in sequences], size.buckets, batch=rows)
    batches = bucketed_batches(sequences, boundaries, rows)
    return [{"x": batch.data, "lengths": batch.lengths} for batch in batches]


def packing(sequences: list[np.ndarray], size: Size) -> list[dict[str, np.ndarray]]:
    """Full rows of one length."""
    from jaxrnn.data import choose_row_length, packed_batches

    row_length = choose_row_length([len(s) for s in sequences], size.batch)
    return [
        {"x": batch.data, "lengths": batch.packing.row_lengths, "resets": batch.resets}
        for batch in packed_batches(sequences, row_length, size.batch)
    ]


def contender(make: Callable[..., Any], sequences: list[np.ndarray], size: Size) -> Contender:
    """Makes the batches, by the clock."""
    start = time.perf_counter()
    batches = make(sequences, size)
    return Contender(make.__name__, batches, time.perf_counter() - start)


def training_step(size: Size) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``init() -> params`` and the compiled ``step(params, batch) -> (params, results)``.

    The loss is a sum over steps, so that it does not depend on how they are put into batches.
    """
    import jax
    import jax.numpy as jnp

    from jaxrnn import linen

    layer = linen.LSTM(size.hidden)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        x, lengths, resets = batch["x"], batch["lengths"], batch.get("resets")
        y: Any = layer.apply(params, x, lengths=lengths, resets=resets)[0]
        return 0.5 * jnp.sum(y**2)

    @jax.jit
    def step(params: Any, batch: dict[str, jax.Array]) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        new = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradient)
        return new, {"loss": value, "gradient": gradient}

    return lambda: layer.init(jax.random.key(0), jnp.zeros((1, 1, size.inputs))), step


def compare(size: Size, rounds: int) -> list[dict[str, Any]]:
    """Measures all three.

    Returns:
        a row for each: name, sequences a second, and so on.

    Raises:
        AssertionError: their gradients differ.
    """
    import jax

    import jaxrnn.data  # noqa: F401  (or the clock of the first contender would run over it)
    from tests.tolerance import assert_close

    sequences = draw_sequences(size)
    field = [contender(make, sequences, size) for make in (padding, bucketing, packing)]
    init, step = training_step(size)
    params = init()
    real = {one.name: sum(int(b["lengths"].sum()) for b in one.batches) for one in field}
    assert set(real.values()) == {sum(map(len, sequences))}, real

    sums = []
    for one in field:
        results = [jax.device_get(step(params, batch)[1]) for batch in one.batches]
        # In float64, or the sum over many batches would have errors of its own.
        sums.append(jax.tree.map(lambda *a: np.sum(np.asarray(a, np.float64), axis=0), *results))
    for one, got in zip(field[1:], sums[1:], strict=True):
        steps = real[one.name]
        assert_close({one.name: got}, {one.name: sums[0]}, np.float32, size=steps)

    on_device = {one.name: jax.device_put(one.batches) for one in field}

    def train_once(name: str) -> float:
        start, weights = time.perf_counter(), params
        for batch in on_device[name]:
            weights, _ = step(weights, batch)
        jax.block_until_ready(weights)
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = {one.name: [] for one in field}
    orders = itertools.cycle(itertools.permutations(seconds))
    for order in itertools.islice(orders, rounds):
        for name in order:
            time.sleep(bench.PAUSE_SECONDS)
            seconds[name].append(train_once(name))
    return [
        {
            "name": one.name,
            "sequences_per_second": size.sequences / statistics.median(seconds[one.name]),
            "ratio_to_padding": statistics.median(
                a / b for a, b in zip(seconds["padding"], seconds[one.name], strict=True)
            ),
            "real_share": one.real_share,
            "shapes": one.shapes,
            "batches": len(one.batches),
            "seconds": seconds[one.name],
            "host_seconds": one.seconds,
        }
        for one in field
    ]


def table(results: list[dict[str, Any]]) -> None:
    """Print the results."""
    print("Medians; the ratio is the median of paired ratios. host: planning and filling arrays.")
    print("           sequences/s  ratio  real steps  shapes  batches  host s")
    for row in results:
        print(
            f"{row['name']:<10} {row['sequences_per_second']:11.1f} {row['ratio_to_padding']:6.2f}"
            f" {row['real_share']:11.1%} {row['shapes']:7} {row['batches']:8}"
            f" {row['host_seconds']:7.3f}"
        )


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small problem: does it run at all")
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of XLA (default 2)")
    parser.add_argument("--json", type=Path, help="also write machine and results here")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads should be at least 1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    bench.limit_threads(options.threads)
    size = QUICK if options.quick else FULL
    report: dict[str, Any] = {"machine": bench.machine(options.threads), "size": size._asdict()}
    report["results"] = compare(size, options.rounds)
    table(report["results"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
