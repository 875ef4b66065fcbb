"""Check the fused kernels on a GPU and time them, in eight minutes and with one command.

    python scripts/gpu_check.py --json gpu.json

First the parity of every family of kernels with the scan: outputs, final state and the gradients of
parameters, inputs and state, in float32, bfloat16 and float16. An error of 1.00 is the bound of
tests/tolerance.py; half precision is held against a scan in float32, the scan's own error beside.

Then one layer timed, forward and forward+backward (y and the gradients of parameters and inputs
from a given dy): ours beside our own scan, Flax, the cuDNN LSTM of JAX (float32) and cuDNN through
torch, where torch has CUDA. All hold the same weights in the compute dtype, get the same
time-major inputs (JAX's cuDNN LSTM: batch-major) and take turns; figures are medians, each call
followed by a synchronization of the device. float32 is multiplied in full, not as TF32, by all.

Every row is written to the JSON file at once. Rows run in a process of their own: where one takes
the GPU down, it counts as failed and the others go on in a new process. What there is no time
for is named. The exit status is 1 where a row failed, 2 where there is no GPU.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # ROOT, below
# torch needs some of the GPU's memory too. Read when JAX first touches the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import bench
import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn import explain, recurrence
from jaxrnn.recurrence import shapes
from jaxrnn.recurrence.shapes import Shape
from pallas_kernels import targets
from scripts.named_cells import named_cell

ROOT = Path(__file__).resolve().parent.parent
# What a process of its own runs.
SCRIPT = __file__

PASSES = {"forward": "forward", "train": "forward+backward"}
PARTS = ("y", "final", "dparams", "dx", "dstate")
CELLS = ("lstm", "gru", "elman", "sru", "layer_norm_lstm")

# Exit statuses. The last is between the processes of this script: a row broke the GPU's context.
FAILED, NO_GPU, BROKEN = 1, 2, 75

# Of each minute; the rest is for the tables.
SECONDS = 58
# A row that reports nothing for so long is taken for hung; compiling one takes seconds.
STUCK_SECONDS = 120
# What a timed row, with its dozen compilations, is taken to cost before one has been seen.
TIMED_ROW_SECONDS = 20

NO_GPU_HERE = (
    "there is no GPU here that the fused kernels run on (NVIDIA, compute capability 8.0 up); "
    "--interpret runs the parity part in Pallas' interpreter at small sizes"
)


# The rows.


class Case(NamedTuple):
    """A row of the parity part."""

    cell: str
    dtype: str
    B: int
    T: int
    I: int  # noqa: E741  (the axis letter of the whole library)
    H: int
    feature: str

    @property
    def title(self) -> str:
        """What it is called in the report."""
        return f"parity: {self.cell} {self.dtype} {self.size} {self.feature}"

    @property
    def size(self) -> str:
        """The axes as the tables show them."""
        return f"{self.B},{self.T},{self.I},{self.H}"


class Timing(NamedTuple):
    """A row of the timing part."""

    cell: str
    dtype: str
    shape: Shape
    resets: bool = False

    @property
    def title(self) -> str:
        """What it is called in the report."""
        return f"timing: {self.cell} {self.dtype} {self.shape.name}{' resets' * self.resets}"


PLAIN, RAGGED, REVERSED = "plain", "lengths, resets", "lengths, resets, reverse"

# dtype, B, T, I, H and feature, the most telling first. Which family a size belongs to depends on
# the GPU's shared memory. T and B are no multiples of the steps and rows that a launch takes.
RECURRENT = (
    ("float32", 64, 17, 64, 64, RAGGED),
    ("bfloat16", 64, 33, 128, 128, RAGGED),
    ("float32", 64, 9, 256, 256, RAGGED),
    ("bfloat16", 33, 9, 650, 650, REVERSED),
    ("float32", 33, 9, 100, 100, REVERSED),
    ("bfloat16", 33, 9, 100, 100, REVERSED),
    ("bfloat16", 16, 17, 768, 768, PLAIN),
    ("float16", 64, 17, 128, 128, RAGGED),
    ("float16", 33, 9, 256, 256, REVERSED),
    ("float32", 33, 9, 650, 650, REVERSED),
    ("float32", 33, 9, 40, 64, REVERSED),
    ("bfloat16", 64, 9, 256, 256, RAGGED),
    ("bfloat16", 5, 1, 256, 256, PLAIN),
    ("float32", 16, 17, 768, 768, PLAIN),
    ("float16", 16, 17, 768, 768, PLAIN),
)
ELEMENTWISE = (
    ("float32", 64, 33, 512, 512, RAGGED),
    ("bfloat16", 64, 33, 512, 512, REVERSED),
    ("float32", 33, 9, 40, 100, REVERSED),
    ("bfloat16", 33, 9, 40, 100, RAGGED),
    ("float16", 64, 33, 512, 512, RAGGED),
    ("float16", 33, 9, 100, 100, PLAIN),
)
WHOLE_ROWS = (
    ("float32", 33, 9, 64, 64, REVERSED),
    ("bfloat16", 64, 17, 64, 64, RAGGED),
    ("bfloat16", 33, 9, 650, 650, RAGGED),
    ("float32", 33, 9, 256, 256, REVERSED),
)
SIZES = {
    "lstm": RECURRENT,
    "gru": RECURRENT,
    "elman": RECURRENT,
    "sru": ELEMENTWISE,
    "layer_norm_lstm": WHOLE_ROWS,
}

# A few rows for the interpreter. Four matrices of 100 rows in float32 do not fit on the chip.
INTERPRETED = (
    Case("lstm", "float32", 3, 5, 4, 8, RAGGED),
    Case("gru", "bfloat16", 3, 5, 8, 8, REVERSED),
    Case("lstm", "float32", 3, 3, 5, 100, REVERSED),
    Case("sru", "float32", 3, 5, 4, 6, RAGGED),
    Case("sru", "float16", 3, 5, 6, 6, REVERSED),
)

SRU_SHAPE = Shape("sru", 64, 256, 512, 512)
TIMED_SHAPES = {shape.name: shape for shape in (*shapes.GPU, SRU_SHAPE)}

# The most telling first: whatever there is no time for is at the end. True is with resets.
TIMED = (
    ("lstm", "bfloat16", "flash"),
    ("lstm", "bfloat16", "resident"),
    ("lstm", "float16", "flash"),
    ("lstm", "bfloat16", "tagger"),
    ("lstm", "bfloat16", "awd"),
    ("sru", "bfloat16", "sru"),
    ("gru", "bfloat16", "rollout", True),
    ("lstm", "float32", "tagger"),
    ("gru", "bfloat16", "tagger"),
    ("gru", "bfloat16", "flash"),
    ("gru", "float32", "rollout", True),
    ("lstm", "float32", "flash"),
    ("gru", "float16", "rollout", False),
    ("lstm", "float16", "resident"),
    ("gru", "bfloat16", "resident"),
    ("lstm", "float16", "awd"),
    ("lstm", "float32", "awd"),
    ("lstm", "bfloat16", "rollout", True),
    ("gru", "bfloat16", "awd"),
    ("lstm", "float16", "tagger"),
    ("gru", "float16", "tagger"),
    ("sru", "float32", "sru"),
)
INTERPRETED_TIMED = (Timing("gru", "float32", Shape("tiny", 3, 8, 4, 8)),)


class Published(NamedTuple):
    """A figure of others, in milliseconds, read and not measured here."""

    cell: str
    shape: str
    what: str
    forward: str
    train: str
    source: str


FLASHRNN = "figure in the README of NX-AI/flashrnn"
PUBLISHED = (
    Published("lstm", "flash", "cuDNN through torch, fp16, H100", "2.01", "5.19", FLASHRNN),
    Published("lstm", "flash", "FlashRNN CUDA fused, bf16, H100", "4.87", "13.61", FLASHRNN),
    Published("lstm", "flash", "FlashRNN Triton, 12 heads, H100", "1.99", "18.94", FLASHRNN),
    Published("lstm", "flash", "Haste, float32, H100", "18.41", "43.86", FLASHRNN),
    Published("gru", "rollout", "cuDNN, no resets, GPU not told", "0.38", "", "pytorch/rl#3725"),
    Published("gru", "rollout", "the same with resets", "1.55 to 1.74", "", "pytorch/rl#3725"),
)


def parity_cases(options: argparse.Namespace) -> list[Case]:
    """Rows of the parity part: the first size of each cell, then the second, and so on."""
    if options.only == "timing":
        return []
    rounds = max(map(len, SIZES.values()))
    chosen = [
        Case(cell, *SIZES[cell][k]) for k in range(rounds) for cell in CELLS if k < len(SIZES[cell])
    ]
    chosen = INTERPRETED if options.interpret else chosen
    return [case for case in chosen if case.cell in options.cells]


def timings(options: argparse.Namespace) -> list[Timing]:
    """Rows of the timing part."""
    if options.only == "parity":
        return []
    chosen = [Timing(cell, dtype, TIMED_SHAPES[name], *more) for cell, dtype, name, *more in TIMED]
    if options.interpret:
        return [row for row in INTERPRETED_TIMED if row.cell in options.cells]
    return [row for row in chosen if row.cell in options.cells and row.shape.name in options.shapes]


# The report.


class Report:
    """The JSON file, written after every change; a later process goes on where one ended.

    Attributes:
        data: what the file has.
        careful: whether a process died with several rows under way: one at a time, then.
    """

    def __init__(self, path: Path, options: argparse.Namespace):
        self.path = path
        self.planned = {row.title: row for row in (*parity_cases(options), *timings(options))}
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if not self.data:
            empty: dict[str, Any] = {"running": [], "died": [], "parity": [], "timing": []}
            self.data = {"finished": False, **empty}
        self.careful = False

    def take_over(self) -> None:
        """Blames what was running when an earlier process died, where it was a single row.

        A timed row gets a second try, without the contenders of other libraries' kernels.
        """
        running = self.data["running"]
        self.careful = len(running) > 1
        if len(running) != 1 or self.second_try(running[0]):
            return
        row = self.planned[running[0]]._asdict()
        told = {"title": running[0], "ok": False, "error": "the process died in this row"}
        self.add({name: row[name] for name in Case._fields if name in row} | told)

    def second_try(self, title: str) -> bool:
        """Whether a row that took its process down is to be run again; notes that it did."""
        again = title.startswith("timing:") and title not in self.data["died"]
        if again:
            self.data["died"].append(title)
            self.running([])
        return again

    def suspects(self, title: str) -> bool:
        """Whether other libraries' kernels may have taken down this row, or one after another."""
        return title in self.data["died"] or len(self.data["died"]) > 1

    @property
    def done(self) -> set[str]:
        """Titles of the rows that there are."""
        return {row["title"] for part in ("parity", "timing") for row in self.data[part]}

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Rows that failed."""
        return [row for part in ("parity", "timing") for row in self.data[part] if not row["ok"]]

    def running(self, titles: list[str]) -> None:
        """Notes what is under way."""
        self.data["running"] = titles
        self.write()

    def add(self, row: dict[str, Any]) -> None:
        """Adds a finished row to the part that its title begins with."""
        self.data[row["title"].partition(":")[0]].append(row)
        self.data["running"] = [title for title in self.data["running"] if title != row["title"]]
        self.write()
        print(sentence(row), file=sys.stderr, flush=True)

    def write(self) -> None:
        """Writes the file, in one piece."""
        done = self.done
        self.data["left_out"] = [title for title in self.planned if title not in done]
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        part.replace(self.path)


def sentence(row: dict[str, Any]) -> str:
    """A row as a line of progress."""
    if row.get("error"):
        return f"{row['title']}: FAIL, {row['error']}"
    if "error_over_bound" in row:
        told = f"{row['error_over_bound']:.2f} of the bound, {row['worst']}"
        return f"{row['title']}: {'ok' if row['ok'] else 'FAIL'}, {told}"
    parts = [
        f"{label} " + ", ".join(f"{name} {ms:.2f}" for name, ms in row[which]["median_ms"].items())
        for which, label in PASSES.items()
    ]
    return f"{row['title']}, ms: {'; '.join(parts)}"


def first_line(error: BaseException) -> str:
    """An exception in a sentence."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"


class Budget:
    """The time that a part has; a row is begun where the dearest so far would fit.

    Args:
        until: on the clock of `time.time`.
        guess: seconds of a row, before one has been seen.
    """

    def __init__(self, until: float, guess: float = 0):
        self.until = until
        self.dearest = guess

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.time()

    def has_room(self) -> bool:
        """Whether another row may begin."""
        return self.dearest < self.left

    def spent(self, seconds: float) -> None:
        """Learns what a row took."""
        self.dearest = max(self.dearest, seconds)


# Parity.


@lru_cache
def tolerance_module() -> Any:
    """tests/tolerance.py, by its path: other packages are called `tests` too."""
    spec = importlib.util.spec_from_file_location("tolerance", ROOT / "tests" / "tolerance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_over_bound(got: Any, want: Any, dtype: str, size: int) -> tuple[float, str]:
    """The worst error over its bound, and the leaf that has it; what is not finite is infinite."""
    tools = tolerance_module()
    bound = tools.tolerance(dtype, size)
    got, want = tools.leaves(got), tools.leaves(want)
    worst, where = 0.0, "all leaves equal"
    for name, expected in want.items():
        expected = np.asarray(expected).astype(np.float64)
        error = np.abs(np.asarray(got[name]).astype(np.float64) - expected)
        unit = np.abs(expected).max(initial=0.0)
        allowed = bound["rtol"] * np.abs(expected) + bound["atol"] * unit
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(error == 0, 0.0, error / allowed)
        ratio = float(np.where(np.isfinite(ratio), ratio, np.inf).max(initial=0.0))
        if ratio > worst:
            worst, where = ratio, name
    return worst, where


def draw(case: Case) -> tuple[Any, ...]:
    """Parameters, x, state, dy and dfinal, in float32.

    For half precision their values are rounded to those that both kinds have, so that the scan in
    float32 gets the very same.
    """
    cell, rng = named_cell(case.cell, case.H), np.random.default_rng(0)

    def rounded(a: np.ndarray) -> np.ndarray:
        if case.dtype != "float32":
            a = a.astype(jnp.bfloat16).astype(np.float16)
        return a.astype(np.float32)

    def parameter(path: Any, like: Any) -> np.ndarray:
        name = path[-1].key
        matrix = name == "r" or name.startswith("w_")
        scale = like.shape[0] ** -0.5 if matrix else 0.5
        middle = 1 if name.startswith("gain") else 0
        return rounded(middle + scale * rng.uniform(-1, 1, like.shape))

    def normal(*shape: int) -> np.ndarray:
        return rounded(rng.normal(size=shape))

    like = jax.eval_shape(lambda: cell.init_params(jax.random.key(0), case.I, case.H, "float32"))
    params = jax.tree_util.tree_map_with_path(parameter, like)
    state, dfinal = (
        cell.state_type(*(normal(case.B, case.H) for _ in cell.state_names)) for _ in range(2)
    )
    x, dy = normal(case.T, case.B, case.I), normal(case.T, case.B, case.H)
    return params, x, state, dy, dfinal


def features(case: Case) -> dict[str, Any]:
    """Arguments of `recurrence`; one row has no real steps, one has all of them."""
    if case.feature == PLAIN:
        return {}
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, case.T + 1, case.B).astype(np.int32)
    lengths[:2] = 0, case.T
    resets = rng.random((case.T, case.B)) < 0.15
    return {"lengths": lengths, "resets": resets, "reverse": case.feature == REVERSED}


@contextlib.contextmanager
def settings(interpret: bool, precision: str | None) -> Iterator[None]:
    """What tracing has to see: the interpreter, and the precision of float32."""
    with contextlib.ExitStack() as stack:
        if interpret:
            stack.enter_context(targets.compiling_for("interpreter"))
        if precision:
            stack.enter_context(jax.default_matmul_precision(precision))
        yield


def compiled_parts(
    case: Case, dtype: str, implementation: Any, interpret: bool, problem: Any
) -> Callable[[], Any]:
    """Compiles values and gradients of one implementation; the call runs it."""
    cell, options = named_cell(case.cell, case.H), features(case)
    params, x, state, dy, dfinal = problem
    params, x, dy = jax.tree.map(lambda a: jnp.asarray(a, dtype), (params, x, dy))

    def parts(params: Any, x: Any, state: Any, dy: Any, dfinal: Any) -> Any:
        def run(params: Any, x: Any, state: Any) -> Any:
            return recurrence(cell, params, x, state, implementation=implementation, **options)

        results, pull = jax.vjp(run, params, x, state)
        return dict(zip(PARTS, (*results, *pull((dy, dfinal))), strict=True))

    # Ours multiplies float32 in full of itself.
    with settings(interpret, "highest" if implementation == "xla" else None):
        compiled = jax.jit(parts).lower(params, x, state, dy, dfinal).compile()
    return lambda: jax.block_until_ready(compiled(params, x, state, dy, dfinal))


class Prepared(NamedTuple):
    """A parity row, compiled."""

    family: str | None
    ours: Callable[[], Any]
    scan: Callable[[], Any]
    reference: Callable[[], Any]
    seconds: float


def prepare(case: Case, interpret: bool) -> Prepared:
    """Compiles a row; runs in a thread, where it finds its own settings."""
    started = time.perf_counter()
    problem = draw(case)
    with settings(interpret, None):
        told = explain(named_cell(case.cell, case.H), case.I, case.H, dtype=case.dtype)
    ours = compiled_parts(case, case.dtype, "pallas", interpret, problem)
    reference = compiled_parts(case, "float32", "xla", interpret, problem)
    scan = reference
    if case.dtype != "float32":
        scan = compiled_parts(case, case.dtype, "xla", interpret, problem)
    return Prepared(told.family, ours, scan, reference, time.perf_counter() - started)


def compare(case: Case, prepared: Prepared) -> dict[str, Any]:
    """Runs a row: ours, and in half precision the scan too, beside a scan in float32."""
    size = case.T * max(case.B, case.I, case.H)
    want = prepared.reference()
    worst, where = error_over_bound(prepared.ours(), want, case.dtype, size)
    scan = None
    if case.dtype != "float32":
        scan = error_over_bound(prepared.scan(), want, case.dtype, size)[0]
    found = {"family": prepared.family, "worst": where, "ok": worst <= 1}
    found |= {"error_over_bound": finite(worst), "scan_error_over_bound": finite(scan)}
    if not math.isfinite(worst):
        found["error"] = f"{where} is not finite, or not 0 where it should be"
    return found


def finite(number: float | None) -> float | None:
    """The number, or None where JSON has none for it."""
    return number if number is not None and math.isfinite(number) else None


def check_case(case: Case, future: "Future[Prepared]", budget: Budget) -> dict[str, Any]:
    """A row of the report, whatever happens."""
    row = {"title": case.title, **case._asdict(), "family": None, "error": None}
    try:
        prepared = future.result()
        budget.spent(prepared.seconds)
        row |= compare(case, prepared)
    except Exception as error:  # Compilers and drivers raise what they like.
        row |= {"ok": False, "error": first_line(error)}
    return row


def run_parity(report: Report, options: argparse.Namespace, budget: Budget) -> None:
    """All parity rows that there is time for; some are compiled while another runs."""
    workers = 1 if report.careful else options.workers
    suspects = set(report.data["running"])
    rows = [case for case in parity_cases(options) if case.title not in report.done]
    rows = deque(sorted(rows, key=lambda case: case.title not in suspects))
    waiting: deque[tuple[Case, Future[Prepared]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        while waiting or (rows and budget.has_room()):
            while rows and len(waiting) < workers and budget.has_room():
                case = rows.popleft()
                # Noted before it begins: it may be the end of this process.
                report.running([*(one.title for one, _ in waiting), case.title])
                waiting.append((case, pool.submit(prepare, case, options.interpret)))
            row = check_case(*waiting.popleft(), budget)
            report.add(row)
            if not row["ok"] and broken():
                start_afresh(report)


def broken() -> bool:
    """Whether the GPU answers no more, as after an illegal address, until the process ends."""
    try:
        jax.block_until_ready(jnp.arange(8) + 1)
    except Exception:  # XLA's own type is not public.
        return True
    return False


def start_afresh(report: Report) -> None:
    """Ends this process; the next one does the rows that are not done."""
    report.running([])
    # A broken GPU would only fail at what Python cleans up, and threads would be waited for.
    os._exit(BROKEN)


# Timing.


class Layer(NamedTuple):
    """What the contenders of a row are made from: weights and time-major arrays in its dtype."""

    row: Timing
    params: dict[str, np.ndarray]  # float32
    x: np.ndarray
    dy: np.ndarray
    resets: np.ndarray | None


def make_layer(row: Timing) -> Layer:
    """The problem of `bench.py` at that size; a reset in one of eight steps."""
    problem = bench.make_problem(row.cell, row.shape)
    x, dy = (np.ascontiguousarray(a.transpose(1, 0, 2)) for a in (problem.x, problem.dy))
    resets = None
    if row.resets:
        resets = np.random.default_rng(2).random(x.shape[:2]) < 1 / 8
    return Layer(row, problem.params, x, dy, resets)


def jax_contender(
    name: str,
    apply: Callable[[Any, Any], Any],
    params: Any,
    layer: Layer,
    batch_major: bool = False,
) -> bench.Contender:
    """A contender from a pure ``apply(params, x) -> y``, compiled and run once."""
    dtype = layer.row.dtype
    axes = (1, 0, 2) if batch_major else (0, 1, 2)
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
    x, dy = (jnp.asarray(a.transpose(axes), dtype) for a in (layer.x, layer.dy))

    def both(params: Any, x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(apply, params, x)
        return y, pull(dy)

    with settings(False, "highest" if dtype == "float32" else None):
        forward = jax.jit(apply).lower(params, x).compile()
        train = jax.jit(both).lower(params, x, dy).compile()

    def agree() -> dict[str, Any]:
        y, (_, dx) = train(params, x, dy)
        return {name: np.asarray(a).transpose(axes) for name, a in (("y", y), ("dx", dx))}

    return bench.Contender(
        name,
        lambda: jax.block_until_ready(forward(params, x)),
        lambda: jax.block_until_ready(train(params, x, dy)),
        agree,
    )


def own(name: str, implementation: Any, layer: Layer) -> bench.Contender:
    """`recurrence`, by kernels or as a scan."""
    cell = named_cell(layer.row.cell, layer.row.shape.H)

    def apply(params: Any, x: Any) -> Any:
        return recurrence(cell, params, x, resets=layer.resets, implementation=implementation)[0]

    return jax_contender(name, apply, layer.params, layer)


def flax(layer: Layer) -> bench.Contender:
    """flax.linen.RNN; its GRU cell has our biases, its LSTM cell keeps the only one at h."""
    from flax import linen

    cell, dtype, weights = layer.row.cell, jnp.dtype(layer.row.dtype), layer.params
    kind = {"lstm": linen.OptimizedLSTMCell, "gru": linen.GRUCell}[cell]
    module = linen.RNN(kind(layer.row.shape.H, dtype=dtype, param_dtype=dtype), time_major=True)
    tree: dict[str, dict[str, np.ndarray]] = {}
    for k, gate in enumerate(bench.GATES[cell]):
        tree[f"i{gate}"] = {"kernel": weights["w_x"][:, k]}
        tree[f"h{gate}"] = {"kernel": weights["r"][:, k]}
        tree[f"{'h' if cell == 'lstm' else 'i'}{gate}"]["bias"] = weights["b"][k]
    if cell == "gru":
        tree["hn"]["bias"] = weights["b_hn"]
    apply: Any = module.apply
    return jax_contender("flax", apply, {"params": {"cell": tree}}, layer)


def torch_weights(layer: Layer) -> dict[str, np.ndarray]:
    """The parameters of torch.nn.LSTM or GRU: of its two biases one is zero, b_hn apart."""
    weights = layer.params
    inputs, _, hidden = weights["w_x"].shape
    second = np.zeros_like(weights["b"])
    if layer.row.cell == "gru":
        second[2] = weights["b_hn"]
    return {
        "weight_ih_l0": weights["w_x"].transpose(1, 2, 0).reshape(-1, inputs),
        "weight_hh_l0": weights["r"].transpose(1, 2, 0).reshape(-1, hidden),
        "bias_ih_l0": weights["b"].reshape(-1),
        "bias_hh_l0": second.reshape(-1),
    }


def jax_cudnn(layer: Layer) -> bench.Contender:
    """JAX's own binding of cuDNN's LSTM: batch first, its weights in one vector."""
    from jax.experimental import rnn

    shape = layer.row.shape
    flat = np.concatenate([w.reshape(-1) for w in torch_weights(layer).values()])
    lengths = jnp.full(shape.B, shape.T, jnp.int32)
    zeros = jnp.zeros((1, shape.B, shape.H))

    def apply(weights: Any, x: Any) -> Any:
        sizes = (shape.I, shape.H, 1, 0.0, False, jax.lax.Precision.HIGHEST)
        results: Any = rnn.lstm(x, zeros, zeros, weights, lengths, *sizes)
        return results[0]

    return jax_contender("cudnn (jax)", apply, flat, layer, batch_major=True)


def torch(layer: Layer) -> bench.Contender:
    """torch.nn.LSTM or GRU on the GPU, which is cuDNN."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch has no CUDA here")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[layer.row.cell]
    module = kind(layer.row.shape.I, layer.row.shape.H)
    weights = {key: torch.from_numpy(w.copy()) for key, w in torch_weights(layer).items()}
    module.load_state_dict(weights)
    dtype = getattr(torch, layer.row.dtype)
    module = module.to("cuda", dtype)
    x, dy = (torch.from_numpy(a).to("cuda", dtype) for a in (layer.x, layer.dy))
    x.requires_grad_()

    def forward() -> None:
        module.eval()  # In training mode cuDNN saves what a backward pass would need.
        with torch.no_grad():
            module(x)
        torch.cuda.synchronize()

    def train() -> Any:
        module.train()
        module.zero_grad(set_to_none=True)
        x.grad = None
        y = module(x)[0]
        y.backward(dy)
        torch.cuda.synchronize()
        return y

    def agree() -> dict[str, Any]:
        y = train().detach()
        assert x.grad is not None
        return {"y": y.float().cpu().numpy(), "dx": x.grad.float().cpu().numpy()}

    return bench.Contender("torch", forward, train, agree)


OF_OTHERS = ("cudnn (jax)", "torch")


def builders(row: Timing, interpret: bool) -> dict[str, Callable[[Layer], bench.Contender]]:
    """Contenders by name, ours first and the scan, which the others are held against, next."""
    found: dict[str, Callable[[Layer], bench.Contender]] = {}
    if not interpret:
        found["jaxrnn"] = partial(own, "jaxrnn", "pallas")
    found["scan"] = partial(own, "scan", "xla")
    if row.cell in ("lstm", "gru") and importlib.util.find_spec("flax"):
        found["flax"] = flax
    if interpret:
        return found
    if row.cell == "lstm" and row.dtype == "float32":
        found["cudnn (jax)"] = jax_cudnn
    if row.cell in ("lstm", "gru") and importlib.util.find_spec("torch"):
        found["torch"] = torch
    return found


def build(
    layer: Layer, options: argparse.Namespace, report: Report
) -> tuple[list[bench.Contender], dict[str, str]]:
    """The contenders that compile and run, and why the others do not."""
    field, errors = [], {}
    makers = builders(layer.row, options.interpret)
    if report.suspects(layer.row.title):
        for name in makers.keys() & set(OF_OTHERS):
            errors[name] = "left out, since a process died that may have died of it"
            del makers[name]
    workers = 1 if report.careful else options.workers
    with ThreadPoolExecutor(workers) as pool:
        futures = {name: pool.submit(make, layer) for name, make in makers.items()}
        for name, future in futures.items():
            try:
                contender = future.result()
                contender.forward()
                contender.train()
                field.append(contender)
            except Exception as error:  # Compilers and drivers raise what they like.
                errors[name] = first_line(error)
    return field, errors


def agreement(field: list[bench.Contender], layer: Layer) -> dict[str, float | None]:
    """Errors over their bound, against the scan; only ours resets the state in its midst."""
    row = layer.row
    size = row.shape.T * max(row.shape.I, row.shape.H)
    known = {one.name: one for one in field if not row.resets or one.name in ("jaxrnn", "scan")}
    if "scan" not in known:
        return {}
    want = known.pop("scan").agree()
    return {
        name: finite(error_over_bound(one.agree(), want, row.dtype, size)[0])
        for name, one in known.items()
    }


def measured(field: list[bench.Contender], which: str, seconds: float) -> dict[str, Any]:
    """Medians, in as many turns as there is time for, and their ratios to the first contender's."""
    once = sum(values[0] for values in bench.measure(field, which, 1).values())
    turns = round(seconds / max(once + len(field) * bench.PAUSE_SECONDS, 1e-3))
    taken = bench.measure(field, which, min(max(turns, 5), 50))
    medians = {name: statistics.median(values) * 1e3 for name, values in taken.items()}
    return {
        "turns": len(next(iter(taken.values()))),
        "median_ms": medians,
        "best_ms": {name: min(values) * 1e3 for name, values in taken.items()},
        "ratio": {name: ms / medians[field[0].name] for name, ms in medians.items()},
    }


def time_row(
    row: Timing, options: argparse.Namespace, report: Report, seconds: float
) -> dict[str, Any]:
    """A row of the report, whatever happens."""
    told: dict[str, Any] = {"title": row.title, "cell": row.cell, "dtype": row.dtype}
    told |= {"shape": row.shape.name, "size": list(row.shape[1:]), "resets": row.resets}
    told |= {"ok": True, "error": None, "contender_errors": {}, "agreement": {}}
    try:
        layer = make_layer(row)
        field, told["contender_errors"] = build(layer, options, report)
        first = "scan" if options.interpret else "jaxrnn"
        if first in told["contender_errors"]:
            raise RuntimeError(told["contender_errors"][first])
        told["agreement"] = agreement(field, layer)
        for which in bench.PASSES:
            told[which] = measured(field, which, seconds / 2)
    except Exception as error:  # Compilers and drivers raise what they like.
        return told | {"ok": False, "error": first_line(error)}
    # Each of the two may be off by one bound.
    off = [name for name, error in told["agreement"].items() if error is None or error > 2]
    told["disagrees"] = off
    if "jaxrnn" in off:
        told |= {"ok": False, "error": "ours disagrees with the scan"}
    return told


def run_timing(report: Report, options: argparse.Namespace, budget: Budget) -> None:
    """All timing rows that there is time for."""
    rows = [row for row in timings(options) if row.title not in report.done]
    for k, row in enumerate(rows):
        if not budget.has_room():
            break
        report.running([row.title])
        started = time.time()
        # Most of a row is compilation; this is the part that takes turns.
        seconds = min(max(budget.left / (len(rows) - k) / 3, 1), 4)
        told = time_row(row, options, report, seconds)
        budget.spent(time.time() - started)
        gone = bool(told["error"] or told["contender_errors"]) and broken()
        if not (gone and report.second_try(row.title)):
            report.add(told)
        if gone:
            start_afresh(report)


# The machine, the tables, the command.


def output_of(*command: str) -> str | None:
    """What a program prints; None where there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "jax-cuda13-plugin", "jax-cuda12-plugin")
PACKAGES += ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cuda-nvcc")


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were measured on."""
    query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "")) or None,
        "nvidia_smi": output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "workers": options.workers,
        "versions": {name: found for name in PACKAGES if (found := version(name))},
        "commit": output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }


def grid(title: str, left: list[str], right: list[str], rows: list[list[str]]) -> None:
    """Prints a table that Markdown understands."""
    print()
    if importlib.util.find_spec("rich"):
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, box=box.MARKDOWN)
        for name in left:
            table.add_column(name, no_wrap=True)
        for name in right:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(width=160).print(table)
        return
    print(title)
    for row in [left + right, ["---"] * len(left + right), *rows]:
        print(f"| {' | '.join(row)} |")


def number(value: float | None) -> str:
    """Two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def show_parity(rows: list[dict[str, Any]]) -> None:
    """Prints the first table."""
    lines = []
    for row in rows:
        size = ",".join(str(row[axis]) for axis in "BTIH")
        told = [row.get(name) or "-" for name in ("family", "cell", "dtype")]
        errors = [row.get("error_over_bound"), row.get("scan_error_over_bound")]
        result = "ok" if row["ok"] else "FAIL"
        told += [size, row["feature"], row.get("worst", "-"), result]
        lines.append(told + [number(error) for error in errors])
    left = ["family", "cell", "dtype", "B,T,I,H", "feature", "worst leaf", "result"]
    right = ["error/bound", "scan's"]
    grid("Parity with the scan: values and gradients", left, right, lines)


CONTENDERS = ("jaxrnn", "scan", "flax", "cudnn (jax)", "torch")


def show_timing(rows: list[dict[str, Any]], device: str) -> None:
    """Prints the second table; without resets, others than ours are marked."""
    lines = []
    for row in rows:
        for which in bench.PASSES:
            if which not in row:
                continue
            shape = row["shape"] + " resets" * row["resets"]
            line = [row["cell"], shape, row["dtype"], PASSES[which]]
            first = next(iter(row[which]["median_ms"]))
            for name in CONTENDERS:
                ms = row[which]["median_ms"].get(name)
                text = "-" if ms is None else f"{ms:.2f}"
                if ms is not None and name != first:
                    text += f" ({row[which]['ratio'][name]:.2f})"
                text += "*" * (ms is not None and row["resets"] and name not in CONTENDERS[:2])
                text += "!" * (name in row.get("disagrees", ()))
                line.append(text)
            lines.append(line)
    title = f"One layer on {device}: median ms (times ours; the scan's where ours is left out)"
    grid(title, ["cell", "shape", "dtype", "pass"], list(CONTENDERS), lines)
    if any("*" in text for line in lines for text in line):
        print("* without the resets, which it does not have")
    if any("!" in text for line in lines for text in line):
        print("! its results are not the scan's")


def show(report: Report) -> None:
    """Prints everything."""
    data = report.data
    device = data["machine"]["device"]
    if data["parity"]:
        show_parity(data["parity"])
    if data["timing"]:
        show_timing(data["timing"], device)
        timed = {(row.get("cell"), row.get("shape")) for row in data["timing"]}
        known = [list(one) for one in PUBLISHED if (one.cell, one.shape) in timed]
        if known:
            left = ["cell", "shape", "what"]
            right = ["forward ms", "forward+backward ms", "read in"]
            grid("Published, not measured here", left, right, known)
    print()
    for row in data["timing"]:
        for name, error in row.get("contender_errors", {}).items():
            print(f"{row['title']}: without {name}: {error}")
    for row in report.failed:
        print(f"FAIL {row['title']}: {row.get('error') or 'beyond the bound'}")
    if data["left_out"]:
        print(f"not run: {'; '.join(data['left_out'])}")
    passed = f"{sum(row['ok'] for row in data['parity'])} of {len(data['parity'])} parity rows ok"
    print(f"{passed}, {len(data['timing'])} timed, in {data['seconds']:.0f} s")
    print(f"{device}, {data['date']}: {data['command']}")


def fit_gpu() -> bool:
    """Whether there is a GPU that the kernels run on."""
    try:
        target = targets.current()
    except RuntimeError:  # JAX_PLATFORMS asks for one that is not there.
        return False
    return target is not None and target.capability >= (8, 0)


def work(options: argparse.Namespace) -> int:
    """Runs rows, in a process that may end at any of them."""
    # The process that started this one is interrupted too, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.interpret:
        jax.config.update("jax_platforms", "cpu")
    elif not fit_gpu():
        print(NO_GPU_HERE, file=sys.stderr)
        return NO_GPU
    else:
        # The pause is for threads that spin on after their work, and a GPU has none.
        bench.PAUSE_SECONDS = 0
    warnings.simplefilter("ignore")  # Pallas' Triton backend tells in each call that it will go.
    report = Report(options.json, options)
    report.data.setdefault("machine", machine(options))
    report.take_over()
    seconds = options.minutes * SECONDS
    parity_until = options.started + seconds / (2 if timings(options) else 1)
    run_parity(report, options, Budget(parity_until))
    run_timing(report, options, Budget(options.started + seconds, TIMED_ROW_SECONDS))
    report.data |= {"finished": True, "running": []}
    report.write()
    return FAILED if report.failed else 0


def wait(child: "subprocess.Popen[bytes]", options: argparse.Namespace) -> int | None:
    """The exit status of the process that runs the rows; None where its time was up."""
    end = options.started + options.minutes * SECONDS
    changed, seen = time.time(), None
    while child.poll() is None:
        time.sleep(0.1)
        now = options.json.stat().st_mtime_ns if options.json.exists() else None
        if now != seen:
            changed, seen = time.time(), now
        if time.time() > end:
            return None
        if time.time() - changed > STUCK_SECONDS:
            print("no news for two minutes: a new process takes over", file=sys.stderr)
            return -signal.SIGKILL
    return child.returncode


def supervise(options: argparse.Namespace, argv: list[str]) -> int:
    """Starts processes that run the rows until all are done or the time is up."""
    extra = ["--json", str(options.json), "--started", str(options.started)]
    before = None
    while True:
        child = subprocess.Popen([sys.executable, SCRIPT, *argv, *extra])
        try:
            status = wait(child, options)
        finally:
            child.kill()
            child.wait()
        if status is not None and 0 <= status < BROKEN:
            return status
        data = json.loads(options.json.read_text()) if options.json.exists() else {"running": []}
        if status is None:
            told = "; ".join(data["running"]) or "nothing"
            print(f"the time is up; still running: {told}", file=sys.stderr)
            return FAILED if Report(options.json, options).failed else 0
        if data == before:
            print("the process died and had done nothing new", file=sys.stderr)
            return FAILED
        before = data


def names(value: str, known: tuple[str, ...], what: str) -> list[str]:
    """A list on the command line; a name that there is none of is an error."""
    found = [name for name in value.split(",") if name]
    for name in found:
        if name not in known:
            raise ValueError(f"--{what}: no {name!r} here; there are {', '.join(known)}")
    return found or list(known)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes, cores = tuple(TIMED_SHAPES), os.cpu_count() or 1
    parser.add_argument("--json", type=Path, help="write it here, in place of what is there")
    parser.add_argument("--minutes", type=float, default=8, help="for all of it (default 8)")
    parser.add_argument("--only", choices=("parity", "timing"), help="one of the two parts")
    parser.add_argument("--cells", default="", help=f"of {', '.join(CELLS)} (all)")
    parser.add_argument("--shapes", default="", help=f"to time, of {', '.join(sizes)} (all)")
    workers = max(1, min(8, cores // 2))
    parser.add_argument(
        "--workers",
        type=int,
        default=workers,
        help=f"programs that are compiled at a time (here {workers}); 1 if that gives trouble",
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="no GPU: a few small parity rows in Pallas' interpreter, and one timed on the CPU",
    )
    # When the first process began; given to those that it starts.
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        options.cells = names(options.cells, CELLS, "cells")
        options.shapes = names(options.shapes, sizes, "shapes")
    except ValueError as error:
        parser.error(str(error))
    if options.minutes <= 0 or options.workers < 1:
        parser.error("--minutes should be more than 0 and --workers at least 1")
    return options


def main() -> int:
    """The command."""
    argv = sys.argv[1:]
    options = arguments(argv)
    if options.started is not None:
        return work(options)
    # `timeout` and batch systems end a command so; what there is should still be printed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.started = time.time()
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        options.json = options.json or Path(folder) / "report.json"
        # A report of an earlier run is not one to go on with.
        options.json.unlink(missing_ok=True)
        try:
            status = supervise(options, argv)
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        if options.json.exists():
            report = Report(options.json, options)
            command = shlex.join(["python", "scripts/gpu_check.py", *argv])
            seconds = time.time() - options.started
            date = datetime.datetime.now().astimezone().isoformat(timespec="minutes")
            report.data |= {"command": command, "date": date, "seconds": seconds}
            report.data["published"] = [one._asdict() for one in PUBLISHED]
            report.write()
            show(report)
    return status


if __name__ == "__main__":
    sys.exit(main())
