"""Time one recurrent layer of jaxrnn beside Flax's and torch's, on the CPU, in float32.

    python scripts/bench.py --cells lstm,gru --shapes small,wide --json bench.json

All contenders run in this one process and take turns, so that whatever else the machine does hits
them alike; what counts is the ratio, not the milliseconds. They get the same weights, inputs and
number of threads, and have to agree on the outputs and on the gradient of the inputs before
anything is timed. A training step is the loss, the gradients of all parameters and that of the
inputs. Flax and torch have no SRU, so that ours is timed alone there.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Workers of XLA and of OpenMP spin for about a millisecond after their work before they sleep; the
# next contender should not have to share its cores with them.
PAUSE_SECONDS = 0.01

GATES = {"lstm": "ifgo", "gru": "rzn", "sru": "ufr"}
PASSES = ("forward", "train")


class Problem(NamedTuple):
    """What every contender is given: x ``[B, T, I]``, dy ``[B, T, H]``, our parameters."""

    cell: str
    hidden: int
    x: np.ndarray
    dy: np.ndarray
    params: dict[str, np.ndarray]


class Contender(NamedTuple):
    """One implementation; both calls return when the work is done."""

    name: str
    forward: Callable[[], Any]  # -> y
    train: Callable[[], Any]  # -> (loss, gradients)
    agree: Callable[[], dict[str, Any]]  # -> y [B, T, H], loss, dx [B, T, I]


def make_problem(cell: str, shape: Any) -> Problem:
    """Weights as torch draws them: uniform, within one over the root of H."""
    rng = np.random.default_rng(0)
    _, batch, steps, inputs, hidden = shape

    def uniform(*size: int) -> np.ndarray:
        return (rng.uniform(-1, 1, size) / np.sqrt(hidden)).astype(np.float32)

    gates = len(GATES[cell])
    params = {"w_x": uniform(inputs, gates, hidden)}
    if cell == "sru":
        params |= {"v": uniform(2, hidden), "b": uniform(2, hidden)}
        if inputs != hidden:
            params["w_highway"] = uniform(inputs, hidden)
    else:
        params |= {"r": uniform(hidden, gates, hidden), "b": uniform(gates, hidden)}
    if cell == "gru":
        params["b_hn"] = uniform(hidden)
    x = rng.normal(size=(batch, steps, inputs)).astype(np.float32)
    dy = rng.normal(size=(batch, steps, hidden)).astype(np.float32)
    return Problem(cell, hidden, x, dy, params)


def jax_contender(
    name: str, apply: Callable[[Any, Any], Any], params: Any, problem: Problem
) -> Contender:
    """A contender from a pure function ``apply(params, x) -> y``."""
    import jax
    import jax.numpy as jnp

    params = jax.tree.map(jnp.asarray, params)
    x, dy = jnp.asarray(problem.x), jnp.asarray(problem.dy)
    forward = jax.jit(apply)

    def loss(params: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
        return jnp.sum(apply(params, x) * dy)

    train = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def agree() -> dict[str, Any]:
        value, (_, dx) = train(params, x, dy)
        return {"y": forward(params, x), "loss": value, "dx": dx}

    return Contender(
        name,
        lambda: jax.block_until_ready(forward(params, x)),
        lambda: jax.block_until_ready(train(params, x, dy)),
        agree,
    )


def ours(problem: Problem) -> Contender:
    """The layer of jaxrnn.linen."""
    from jaxrnn import linen

    layer = {"lstm": linen.LSTM, "gru": linen.GRU, "sru": linen.SRU}[problem.cell](problem.hidden)
    params = {"params": {"layer_0": {"forward": problem.params}}}
    return jax_contender("jaxrnn", lambda p, x: layer.apply(p, x)[0], params, problem)


def flax(problem: Problem) -> Contender:
    """flax.linen.RNN; its GRU cell has our biases, its LSTM cell keeps the only one at h."""
    from flax import linen as nn

    kind = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}[problem.cell]
    layer = nn.RNN(kind(problem.hidden))
    own = problem.params
    tree: dict[str, dict[str, np.ndarray]] = {}
    for k, gate in enumerate(GATES[problem.cell]):
        tree[f"i{gate}"] = {"kernel": own["w_x"][:, k]}
        tree[f"h{gate}"] = {"kernel": own["r"][:, k]}
        tree[f"{'h' if problem.cell == 'lstm' else 'i'}{gate}"]["bias"] = own["b"][k]
    if problem.cell == "gru":
        tree["hn"]["bias"] = own["b_hn"]
    params = {"params": {"cell": tree}}
    return jax_contender("flax", lambda p, x: layer.apply(p, x), params, problem)


def torch(problem: Problem) -> Contender:
    """torch.nn.LSTM or GRU; one of its two biases is the whole one, the other has only b_hn."""
    import torch

    own, inputs = problem.params, problem.x.shape[-1]
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[problem.cell]
    layer = kind(inputs, problem.hidden, batch_first=True)
    second = np.zeros_like(own["b"])
    if problem.cell == "gru":
        second[2] = own["b_hn"]
    weights = {
        "weight_ih_l0": own["w_x"].transpose(1, 2, 0).reshape(-1, inputs),
        "weight_hh_l0": own["r"].transpose(1, 2, 0).reshape(-1, problem.hidden),
        "bias_ih_l0": own["b"].reshape(-1),
        "bias_hh_l0": second.reshape(-1),
    }
    layer.load_state_dict({key: torch.from_numpy(w.copy()) for key, w in weights.items()})
    x, dy = torch.from_numpy(problem.x).requires_grad_(), torch.from_numpy(problem.dy)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return layer(x)[0]

    def train() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        value = (layer(x)[0] * dy).sum()
        value.backward()
        return value

    def agree() -> dict[str, Any]:
        value = train().detach().numpy()
        assert x.grad is not None
        return {"y": forward().numpy(), "loss": value, "dx": x.grad.numpy()}

    return Contender("torch", forward, train, agree)


OTHERS = {"flax": flax, "torch": torch}


def contenders(problem: Problem, against: list[str]) -> list[Contender]:
    """Ours first, then whatever of the others there is for this cell and on this machine."""
    others = [name for name in against if find_spec(name)] if problem.cell != "sru" else []
    return [ours(problem), *(OTHERS[name](problem) for name in others)]


def check_agreement(field: list[Contender], problem: Problem) -> None:
    """Raise AssertionError, naming what differs, unless all give the first one's results.

    The steps hand rounding on, so the sums behind an entry are as long as all steps together. The
    loss is a sum over all outputs that nearly cancels: its error is measured against the root of
    their number, the size that such a sum has.
    """
    from tests.tolerance import assert_close

    size = problem.x.shape[1] * max(problem.x.shape[2], problem.hidden)
    wanted = field[0].agree()
    for other in field[1:]:
        got = other.agree()
        for key, want in wanted.items():
            scale = problem.dy.size**0.5 if key == "loss" else None
            named = f"{other.name}.{key}"
            assert_close({named: got[key]}, {named: want}, np.float32, size=size, scale=scale)


def measure(field: list[Contender], which: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each pass of each contender; they take turns, in every order equally often."""
    return measure_calls({one.name: getattr(one, which) for one in field}, repeats)


def measure_calls(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, in turns."""
    for call in [*calls.values()] * 2:
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    orders = itertools.cycle(itertools.permutations(calls))
    for order in itertools.islice(orders, repeats):
        for name in order:
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in milliseconds, and how many times as long as ours each other one takes."""
    own = seconds["jaxrnn"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    others = [name for name in seconds if name != "jaxrnn"]
    return {
        "median_ms": {name: value * 1e3 for name, value in medians.items()},
        "best_ms": {name: min(values) * 1e3 for name, values in seconds.items()},
        "ratio_of_medians": {name: medians[name] / medians["jaxrnn"] for name in others},
        "median_of_ratios": {
            name: statistics.median(a / b for a, b in zip(seconds[name], own, strict=True))
            for name in others
        },
    }


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    packages = ["jaxrnn", "jax", "jaxlib", "flax", *(["torch"] if find_spec("torch") else [])]
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "load_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "commit": commit or None,
    }


def features(repeats: int) -> dict[str, Any]:
    """Measure what each feature costs, and print it."""
    from scripts import bench_features

    found = bench_features.measured(measure_calls, repeats)
    rows = [
        [
            name,
            f"{row['median_ms']:.1f}",
            f"{row['plain_ms']:.1f}",
            f"{row['ratio']:.2f}",
            "-" if row["at_most"] is None else f"{row['at_most']:.2f}",
        ]
        for name, row in found.items()
    ]
    print(
        "Training steps of one LSTM, B32 T128 I256 H256: medians, and the median of paired ratios."
    )
    print_table(["feature", "ms", "plain ms", "ratio", "target"], rows, names=1)
    return found


def packing() -> list[dict[str, Any]]:
    """Measure packing and bucketing beside padding, and print it."""
    from scripts import bench_packing

    print("\nTraining on sequences of 17 to 893 steps: python scripts/bench_packing.py --rounds 3")
    found = bench_packing.compare(bench_packing.FULL, rounds=3)
    bench_packing.table(found)
    return found


def table(results: list[dict[str, Any]]) -> None:
    """Print the results; ratios above 1 mean that ours is faster."""
    header = ["cell", "shape", "B,T,I,H", "pass", "jaxrnn ms", "flax ms", "torch ms"]
    header += ["flax/jaxrnn", "torch/jaxrnn"]
    rows = []
    for result in results:
        size = ",".join(str(n) for n in result["size"])
        for which in PASSES:
            row = [result["cell"], result["shape"], size, which]
            found = result[which]
            for name in ("jaxrnn", "flax", "torch"):
                ms = found["median_ms"].get(name)
                row.append("-" if ms is None else f"{ms:.1f}")
            for name in ("flax", "torch"):
                ratio = found["median_of_ratios"].get(name)
                medians = found["ratio_of_medians"].get(name)
                row.append("-" if ratio is None else f"{ratio:.2f} ({medians:.2f})")
            rows.append(row)
    print("Milliseconds are medians. Ratios: median of paired ratios (ratio of medians).")
    print_table(header, rows, names=4)


def print_table(header: list[str], rows: list[list[str]], names: int) -> None:
    """Print rows under a header; the first ``names`` columns are text, the others numbers."""
    if find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        grid = Table()
        for k, name in enumerate(header):
            grid.add_column(name, justify="left" if k < names else "right", no_wrap=True)
        for row in rows:
            grid.add_row(*row)
        # A log file has no width to fit into.
        Console(width=None if sys.stdout.isatty() else 140).print(grid)
        return
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def limit_threads(threads: int) -> None:
    """Give XLA and torch the same number of threads; has to come before JAX is imported."""
    # XLA takes as many threads as the process has cores, and has no setting of its own.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    if find_spec("torch"):
        import torch

        torch.set_num_threads(threads)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="lstm,gru", help="of lstm, gru, sru (default lstm,gru)")
    parser.add_argument("--shapes", default="", help="names of recurrence/shapes.py (all CPU ones)")
    parser.add_argument("--against", default="flax,torch", help="of flax, torch (default both)")
    parser.add_argument("--repeats", type=int, default=12, help="timed calls of each (default 12)")
    parser.add_argument("--threads", type=int, default=2, help="for each contender (default 2)")
    parser.add_argument(
        "--features",
        action="store_true",
        help="instead, what each feature costs beside the plain LSTM, B32 T128 I256 H256, and "
        "packing beside padding; some six minutes",
    )
    parser.add_argument("--json", type=Path, help="also write machine, medians and ratios here")
    options = parser.parse_args(argv)
    for key, known in (("cells", GATES), ("against", OTHERS)):
        names = [name for name in getattr(options, key).split(",") if name]
        for name in names:
            if name not in known:
                parser.error(f"--{key}: no {name!r} here; there are {', '.join(known)}")
        setattr(options, key, names)
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads should be at least 1")
    return options


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = arguments(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    limit_threads(options.threads)
    from jaxrnn.recurrence import shapes

    try:
        chosen = [shapes.named(name) for name in options.shapes.split(",") if name]
    except ValueError as error:
        sys.exit(f"bench.py: {error}")
    report: dict[str, Any] = {"machine": machine(options.threads), "repeats": options.repeats}
    load = report["machine"]["load_at_start"]
    if load and load > 0.5:
        # torch's threads wait for each other at every step, so another process hurts it most.
        print(f"the machine is busy (load {load:.1f}): ratios will be off", file=sys.stderr)
    if options.features:
        report["features"] = features(options.repeats)
        report["packing"] = packing()
    report["results"] = []
    for cell in [] if options.features else options.cells:
        for shape in chosen or shapes.CPU:
            problem = make_problem(cell, shape)
            field = contenders(problem, options.against)
            check_agreement(field, problem)
            result: dict[str, Any] = {"cell": cell, "shape": shape.name, "size": list(shape[1:])}
            for which in PASSES:
                result[which] = summary(measure(field, which, options.repeats))
            report["results"].append(result)
            medians = result["train"]["median_ms"]
            timings = ", ".join(f"{name} {ms:.1f}" for name, ms in medians.items())
            print(f"{cell} {shape.name}: training step, ms: {timings}", file=sys.stderr, flush=True)
    if not options.features:
        table(report["results"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
