"""Compile the fused kernels for a GPU on a machine that has none, and tell what the compilers say.

    python scripts/gpu_compile.py --target h200 --json h200.json

First table: our kernels by shape and dtype, with the registers of a thread, spilled bytes (stores
and loads), shared memory of a block in bytes, and how many blocks a multiprocessor holds. Second:
one layer's training step (y, and the gradients of parameters and x from a given dy) in bfloat16
with float32 parameters: launches of the forward pass alone and of the whole step, counted in the
optimized HLO (a while body's times its trip count), and XLA's peak temporaries, ours beside
Flax's. Nothing is run. The exit status is 1 where a kernel of ours spills, and 2 where something
is missing.

Needs `pip install -e '.[gpu-compile]'`: JAX's CUDA plugin and ptxas, no CUDA libraries, no driver.
"""

import argparse
import datetime
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Before JAX is imported: no client for a GPU, no look at cuDNN, and a folder that gets the PTX and
# the list of launches of every program. To dump all emitters' output takes 25 times as long.
DIRECTORY = tempfile.TemporaryDirectory(prefix="gpu_compile_")
DUMP = DIRECTORY.name
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"

CELLS = ("lstm", "gru", "elman", "sru", "layer_norm_lstm", "projected_lstm")
# By name only: "indrnn" and the like are compiled as SRU is, these as LSTM and GRU are.
MORE = ("peephole_lstm", "layer_norm_gru", "mgu", "slstm", "indrnn", "qrnn", "min_gru", "min_lstm")
DTYPES = ("bfloat16", "float16", "float32")
FAMILIES = ("resident_", "step_", "elementwise_")  # what our kernels' names begin with
STEP_DTYPE = "bfloat16"  # of the second table

# Fields of XLA's GpuTargetConfigProto.
CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {core_bytes} threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: {block_bytes}
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 name: "{name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
ACCELERATED = "feature_extension: ACCELERATED_FEATURES"


class Gpu(NamedTuple):
    """What the compilers are told of a GPU; sizes in bytes."""

    name: str
    arch: str  # as ptxas calls it
    capability: str
    core_bytes: int  # shared memory of a multiprocessor
    block_bytes: int  # and what one block may have of it
    cores: int
    fpus: int
    bandwidth: int
    l2: int
    clock: float
    memory: int


GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        arch="sm_80",
        capability="major: 8",
        core_bytes=167_936,
        block_bytes=166_912,
        cores=108,
        fpus=64,
        bandwidth=2_039_040_000_000,
        l2=41_943_040,
        clock=1.41,
        memory=85_100_068_864,
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        arch="sm_90a",
        capability=f"major: 9 {ACCELERATED}",
        core_bytes=233_472,
        block_bytes=232_448,
        cores=132,
        fpus=128,
        bandwidth=4_800_000_000_000,
        l2=52_428_800,
        clock=1.98,
        memory=151_397_597_184,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        arch="sm_100a",
        capability=f"major: 10 {ACCELERATED}",
        core_bytes=233_472,
        block_bytes=232_448,
        cores=148,
        fpus=128,
        bandwidth=7_672_320_000_000,
        l2=132_644_864,
        clock=1.965,
        memory=191_514_411_008,
    ),
}


class Kernel(NamedTuple):
    """A kernel as compiled."""

    name: str
    shape: str
    dtype: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread: stores and loads
    threads: int  # of a block
    shared: int  # bytes of a block
    blocks: int  # that fit a multiprocessor at once


class Step(NamedTuple):
    """A layer's training step as compiled."""

    layer: str
    shape: str
    dtype: str
    steps: int  # T
    forward: int  # launches of the forward pass alone
    train: int  # launches of the whole step
    temporaries: int  # bytes, of the whole step


class Report(NamedTuple):
    """What the compilers say of a layer; no kernels where it is not ours."""

    kernels: list[Kernel]
    step: Step


class Program(NamedTuple):
    """A function and the types of its arguments."""

    fn: Callable[..., Any]
    types: tuple[Any, ...]


def missing() -> str | None:
    """What has to be installed first, in a sentence; None where all is there."""
    install = "pip install -e '.[gpu-compile]'"
    jaxlib = metadata.version("jaxlib")
    for package in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed: {install}"
        if version != jaxlib:
            return f"{package} {version} does not go with jaxlib {jaxlib}: {install}"
    return None if ptxas() else f"nvidia-cuda-nvcc, which has ptxas, is not installed: {install}"


def ptxas() -> Path | None:
    """The ptxas of NVIDIA's wheel: one on PATH may be too old for the PTX of this JAX."""
    spec = find_spec("nvidia")  # a namespace package
    places = (spec.submodule_search_locations if spec else None) or []
    return next((p for place in places for p in Path(place).glob("cu*/bin/ptxas")), None)


class Compiler:
    """Compiles functions for one GPU, or several of a host.

    Args:
        target: a name of `GPUS`.
        devices: how many of them; the axis of the mesh is "data".
    """

    def __init__(self, target: str, devices: int = 1):
        import jax
        import numpy as np
        from jax.experimental import topologies

        self.target = target
        self.gpu = GPUS[target]
        topology = topologies.get_topology_desc(
            target,
            "cuda",
            topology=f"1x1x{devices}",
            target_config=CONFIG.format(**self.gpu._asdict()),
        )
        self.mesh = jax.sharding.Mesh(np.array(topology.devices), ("data",))

    def compile(self, program: Program, shardings: Any = None) -> Any:
        """A compiled program; arguments replicated unless ``shardings`` says otherwise."""
        import jax

        from pallas_kernels import targets

        shutil.rmtree(DUMP)
        os.makedirs(DUMP)
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        # From JAX 0.11 on Pallas asks the mesh which GPU it lowers for.
        with jax.set_mesh(self.mesh), targets.compiling_for(self.target):
            jitted = jax.jit(program.fn, in_shardings=whole if shardings is None else shardings)
            return jitted.lower(*program.types).compile()

    def kernels(self, shape: str, dtype: str) -> dict[str, Kernel]:
        """Our kernels in the program that was compiled last, by name."""
        found = {}
        blocks = dumped_blocks()
        for path in Path(DUMP).glob("*.ptx"):
            names = re.findall(r"\.entry (\w+)", path.read_text())
            if not any(name.startswith(FAMILIES) for name in names):
                continue
            for name, (registers, spilled) in assemble(path, self.gpu.arch).items():
                if name not in blocks:
                    raise RuntimeError(f"XLA's list of launches lacks {name}")
                threads, shared = blocks[name]
                fit = blocks_that_fit(self.gpu, registers, threads, shared)
                found[name] = Kernel(name, shape, dtype, registers, spilled, threads, shared, fit)
        return found


# A launch in XLA's list, as written before JAX 0.12.1 and since.
LAUNCHES = (
    re.compile(r"(\w+) grid: \[[\d, ]+\] threads: \[(\d+), 1, 1\]\s+shared_memory: (\d+) bytes"),
    re.compile(r"kernel=(\w+),.* threads/block: \{(\d+), 1, 1\},.* shmem_bytes=(\d+)"),
)


def dumped_blocks() -> dict[str, tuple[int, int]]:
    """Threads and bytes of shared memory of a block, by kernel: PTX does not have the latter."""
    paths = list(Path(DUMP).glob("*.thunk_sequence.txt"))
    if not paths:
        raise RuntimeError("XLA left no list of launches; was JAX in use before this script?")
    found = {}
    for path in paths:
        for launch in LAUNCHES:
            for name, threads, shared in launch.findall(path.read_text()):
                found[name] = (int(threads), int(shared))
    return found


def assemble(path: Path, arch: str) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of the kernels in a file of PTX."""
    done = subprocess.run(
        [str(ptxas()), "-v", f"-arch={arch}", str(path), "-o", os.devnull],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr}")
    return read_ptxas(done.stderr)


def read_ptxas(text: str) -> dict[str, tuple[int, int]]:
    """The same, from what ptxas prints."""
    found = {}
    for block in text.split("Compiling entry function")[1:]:
        name = re.findall(r"'(\w+)'", block)[0]
        registers = re.findall(r"Used (\d+) registers", block)[0]
        spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", block)
        found[name] = (int(registers), sum(map(int, spilled)))
    return found


def blocks_that_fit(gpu: Gpu, registers: int, threads: int, shared: int) -> int:
    """Blocks that a multiprocessor holds at once, as CUDA's occupancy calculator has it.

    Each quarter of a multiprocessor has 16,384 registers for its warps, given out in eights a
    thread. Shared memory goes by 128 bytes, and the system keeps a kilobyte of each block.
    """
    warps = threads // 32
    by_registers = 4 * (16_384 // (32 * 8 * math.ceil(registers / 8))) // warps
    by_shared = gpu.core_bytes // (128 * math.ceil(shared / 128) + 1024)
    return min(by_registers, 64 // warps, 32, by_shared)


def our_layer(cell: Any, shape: Any, dtype: str, resets: bool = False) -> tuple[Program, Program]:
    """Our layer's forward pass and its training step.

    Args:
        cell: of `jaxrnn.cells`, or one's own.
        shape: of `jaxrnn.recurrence.shapes`.
        dtype: of the matmuls, x and y.
        resets: hand in lengths and resets too.
    """
    import jax
    import jax.numpy as jnp

    from jaxrnn import recurrence

    def forward(params: Any, x: Any, *flags: Any) -> Any:
        given: dict[str, Any] = dict(zip(("lengths", "resets"), flags, strict=False))
        # By name, so that a cell without a kernel is an error with the reason.
        return recurrence(cell, params, x, dtype=dtype, implementation="pallas", **given)[0]

    params = jax.eval_shape(
        lambda: cell.init_params(jax.random.key(0), shape.I, shape.H, jnp.float32)
    )
    lengths = jax.ShapeDtypeStruct((shape.B,), jnp.int32)
    flags = jax.ShapeDtypeStruct((shape.T, shape.B), jnp.bool_)
    return programs(forward, params, shape, dtype, (lengths, flags) if resets else ())


def flax_layer(name: str, shape: Any, dtype: str) -> tuple[Program, Program]:
    """Flax's, time first as ours: "lstm" or "gru"."""
    import jax
    from flax import linen

    cell = {"lstm": linen.OptimizedLSTMCell, "gru": linen.GRUCell}[name](
        shape.H, dtype=jax.numpy.dtype(dtype)
    )
    rnn = linen.RNN(cell, time_major=True)
    x = jax.ShapeDtypeStruct((shape.T, shape.B, shape.I), dtype)
    params = jax.eval_shape(rnn.init, jax.random.key(0), x)
    return programs(rnn.apply, params, shape, dtype)


def programs(
    forward: Callable[..., Any], params: Any, shape: Any, dtype: str, flags: tuple[Any, ...] = ()
) -> tuple[Program, Program]:
    """``(params, x, *flags) -> y``, and ``(params, x, dy, *flags) -> (y, gradients)``."""
    import jax

    def step(params: Any, x: Any, dy: Any, *flags: Any) -> Any:
        y, pull = jax.vjp(lambda params, x: forward(params, x, *flags), params, x)
        return y, pull(dy.astype(y.dtype))  # Flax's y is float32, as its cell state is.

    out_features = params["p"].shape[-1] if "p" in params else shape.H
    sizes = (shape.I, out_features)
    x, dy = (jax.ShapeDtypeStruct((shape.T, shape.B, size), dtype) for size in sizes)
    return Program(forward, (params, x, *flags)), Program(step, (params, x, dy, *flags))


def compile_layer(
    compiler: Compiler, cell: Any, shape: Any, dtype: str, resets: bool = False
) -> Report:
    """Compiles our layer: its kernels, its launches and its memory; arguments as `our_layer`'s.

    The kernel of a forward pass alone, which saves nothing, can differ from the training step's. Of
    two that have one name, the row is of the one with more spilled bytes, then more registers.
    """
    forward, step = our_layer(cell, shape, dtype, resets)
    alone = compiler.compile(forward).as_text()
    kernels = compiler.kernels(shape.name, dtype)
    compiled = compiler.compile(step)
    for name, kernel in compiler.kernels(shape.name, dtype).items():
        kernels[name] = max(
            kernel, kernels.get(name, kernel), key=lambda k: (k.spilled, k.registers)
        )
    layer = f"jaxrnn {cell.name}"
    return Report(sorted(kernels.values()), told(layer, shape, dtype, alone, compiled))


def compile_flax(compiler: Compiler, name: str, shape: Any, dtype: str) -> Report:
    """The same of Flax's."""
    forward, step = flax_layer(name, shape, dtype)
    alone = compiler.compile(forward).as_text()
    return Report([], told(f"Flax {name}", shape, dtype, alone, compiler.compile(step)))


def told(layer: str, shape: Any, dtype: str, forward: str, step: Any) -> Step:
    """Launches and memory, from the HLO of the forward pass and the compiled step."""
    temporaries = step.memory_analysis().temp_size_in_bytes
    train = launches(step.as_text())
    return Step(layer, shape.name, dtype, shape.T, launches(forward), train, temporaries)


# Ops that become a launch or a copy on the device. Others are free: tuples, bitcasts, parameters.
LAUNCHED = {
    "convolution",
    "copy",
    "copy-start",
    "custom-call",
    "dot",
    "dynamic-update-slice",
    "fusion",
    "reduce",
    "scatter",
    "sort",
    "transpose",
}


def launches(hlo: str) -> int:
    """Launches of an optimized program: its ops, a while body's times its trip count."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = start[2]
            entry = name if start[1] else entry
            bodies[name] = []
        elif name and line.startswith("  "):
            bodies[name].append(line)

    def count(computation: str) -> int:
        total = 0
        for line in bodies.get(computation, []):
            op = re.search(r" = .*? ([\w\-]+)\(", line)
            if op is None:
                continue
            if op[1] == "while":
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                body = re.search(r"body=%?([\w.\-]+)", line)
                if trips is None or body is None:
                    raise ValueError(f"a loop of unknown length: {line.strip()[:200]}")
                total += int(trips[1]) * count(body[1])
            elif op[1] in LAUNCHED:
                total += 1
            elif op[1] in ("call", "conditional"):
                called = re.search(r"(?:to_apply|calls)=%?([\w.\-]+)", line)
                total += count(called[1]) if called else 0
        return total

    return count(entry)


def compile_all(
    compiler: Compiler, shapes: list[Any], options: argparse.Namespace
) -> tuple[list[Kernel], list[Step]]:
    """The rows of both tables."""
    from scripts.named_cells import named_cell

    kernels, steps = [], []
    flax = [("flax", STEP_DTYPE)] if options.against == "flax" and not options.resets else []
    for name in options.cells:
        for shape in shapes:
            for which, dtype in [*(("jaxrnn", dtype) for dtype in options.dtypes), *flax]:
                if which == "flax" and name not in ("lstm", "gru"):
                    continue
                start = time.perf_counter()
                if which == "flax":
                    report = compile_flax(compiler, name, shape, dtype)
                else:
                    cell = named_cell(name, shape.H)
                    report = compile_layer(compiler, cell, shape, dtype, options.resets)
                kernels += report.kernels
                steps += [report.step] if dtype == STEP_DTYPE else []
                seconds = time.perf_counter() - start
                line = f"{which} {name}, {shape.name}, {dtype}: {seconds:.0f} s"
                print(line, file=sys.stderr, flush=True)
    return kernels, steps


def table(header: list[str], rows: list[list[str]], names: int) -> str:
    """A table in Markdown; the first columns are names, the others numbers."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width if k < names else "-" * (width - 1) + ":" for k, width in enumerate(widths)]

    def line(row: list[str]) -> str:
        cells = [
            text.ljust(width) if k < names else text.rjust(width)
            for k, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    return "\n".join(map(line, [header, rule, *rows]))


def kernel_table(kernels: list[Kernel]) -> str:
    """The first table."""
    rows = [list(map(str, kernel)) for kernel in kernels]
    return table(["kernel", *Kernel._fields[1:]], rows, names=3)


def step_table(steps: list[Step]) -> str:
    """The second table."""
    header = ["layer", "shape", "T", "forward", "training", "forward/T", "backward/T"]
    rows = [
        [
            step.layer,
            step.shape,
            str(step.steps),
            f"{step.forward:,}",
            f"{step.train:,}",
            f"{step.forward / step.steps:.2f}",
            f"{(step.train - step.forward) / step.steps:.2f}",
            f"{step.temporaries / 2**20:.1f}",
        ]
        for step in steps
    ]
    return table([*header, "temporaries MiB"], rows, names=2)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
        def names(text: str) -> list[str]:
            for name in text.split(","):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
            return text.split(",")

        return names

    add = parser.add_argument
    add("--target", choices=GPUS, default="h200", help="the GPU (default h200)")
    add("--json", type=Path, metavar="FILE", help="also write both tables there")
    add(
        "--cells",
        type=names_of(CELLS + MORE),
        default=list(CELLS),
        help=f"of {', '.join(CELLS)} (default these) and {', '.join(MORE)}",
    )
    add("--shapes", help="names of recurrence/shapes.py (default all GPU ones)")
    add(
        "--dtypes",
        type=names_of(DTYPES),
        default=list(DTYPES),
        help=f"of {', '.join(DTYPES)} (default all); the second table is of {STEP_DTYPE}",
    )
    add("--against", choices=("flax", "none"), default="flax", help="(default flax)")
    add("--resets", action="store_true", help="hand in lengths and resets; leaves out Flax")
    options = parser.parse_args(argv)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    return options


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = arguments(argv)
    if sentence := missing():
        print(f"gpu_compile.py: {sentence}", file=sys.stderr)
        return 2
    import jax

    from jaxrnn.recurrence import shapes as named

    warnings.simplefilter("ignore")  # of JAX: its Triton backend will go one day
    try:
        names = options.shapes.split(",") if options.shapes else [shape.name for shape in named.GPU]
        shapes = [named.named(name) for name in names]
    except ValueError as error:
        print(f"gpu_compile.py: {error}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    compiler = Compiler(options.target)
    kernels, steps = compile_all(compiler, shapes, options)
    seconds = time.perf_counter() - start
    given = ", with lengths and resets" if options.resets else ""
    print(f"Kernels compiled for {compiler.gpu.name} by JAX {jax.__version__}{given}\n")
    print(kernel_table(kernels))
    if steps:
        print(f"\nTraining steps of one layer, {STEP_DTYPE}, for {compiler.gpu.name}{given}\n")
        print(step_table(steps))
    print(f"\n{seconds:.0f} s", file=sys.stderr)
    if options.json:
        record = {
            "target": compiler.gpu.name,
            "resets": options.resets,
            "date": datetime.date.today().isoformat(),
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
            "seconds": round(seconds),
            "kernels": [kernel._asdict() for kernel in kernels],
            "steps": [step._asdict() for step in steps],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    spilling = [kernel for kernel in kernels if kernel.spilled]
    for kernel in spilling:
        what = f"{kernel.name} at {kernel.shape} in {kernel.dtype} spills {kernel.spilled} bytes"
        print(what, file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
