"""scripts/gpu_compile.py, and by it the kernels as compiled for a GPU that is not here: spilled
registers, launches, memory, collectives.

In processes of their own, since the script sets the compiler's options before JAX is imported.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Peak temporaries of Flax's LSTM in such a training step, in MiB; ours may take half of it.
FLAX_TEMPORARIES = {"flash": 426, "tagger": 138, "awd": 251}


def run(program, *arguments):
    """What a program prints that may import gpu_compile."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheels():
    """Skips where the script says that something is not installed."""
    if sentence := run("import gpu_compile; print(gpu_compile.missing() or '', end='')"):
        pytest.skip(sentence)


COMPILE = """
import json, sys
import gpu_compile
from jaxrnn.recurrence import shapes
from scripts.named_cells import named_cell
from tests import user_cells

name, names, resets = sys.argv[1:]
compiler = gpu_compile.Compiler("h200")
for shape in map(shapes.named, names.split(",")):
    cell = user_cells.ALL[name] if name in user_cells.ALL else named_cell(name, shape.H)
    report = gpu_compile.compile_layer(compiler, cell, shape, "bfloat16", resets == "resets")
    kernels = [kernel._asdict() for kernel in report.kernels]
    print(json.dumps({"kernels": kernels, "step": report.step._asdict()}))
"""


def reports(cell, shapes, resets=False):
    """What the compilers say of a layer on an H200 in bfloat16, by shape."""
    lines = run(COMPILE, cell, ",".join(shapes), "resets" if resets else "").splitlines()
    return dict(zip(shapes, map(json.loads, lines), strict=True))


def check_kernels(report, *names):
    """That these are the kernels, both directions, and that they fit the chip."""
    assert {kernel["name"] for kernel in report["kernels"]} == set(names)
    for kernel in report["kernels"]:
        assert kernel["spilled"] == 0, kernel
        assert 0 < kernel["registers"] <= 255, kernel
        assert kernel["shared"] <= 232_448, kernel
        assert kernel["blocks"] >= 1, kernel


def check_stepwise(step, a_step=1.25):
    """That a step costs no more launches than this each way, and all else 24."""
    assert step["forward"] <= a_step * step["steps"] + 24
    assert step["train"] <= 2 * a_step * step["steps"] + 24


def both_ways(kernel):
    return f"{kernel}_forward", f"{kernel}_backward"


def test_lstm(wheels):
    found = reports("lstm", ["resident", *FLAX_TEMPORARIES])
    resident = found.pop("resident")
    check_kernels(resident, *both_ways("resident_lstm"))
    assert resident["step"]["train"] <= 16
    for shape, report in found.items():
        check_kernels(report, *both_ways("step_lstm"))
        check_stepwise(report["step"])
        assert report["step"]["temporaries"] <= FLAX_TEMPORARIES[shape] / 2 * 2**20


def test_sru(wheels):
    for report in reports("sru", ["resident", "tagger"]).values():
        check_kernels(report, *both_ways("elementwise_sru"))
        assert report["step"]["train"] <= 16


def test_layer_norm_lstm(wheels):
    """A step is two launches each way: a matmul's and one over whole rows."""
    report = reports("layer_norm_lstm", ["resident"])["resident"]
    forward, backward = both_ways("step_layer_norm_lstm")
    matmuls = (f"{forward}_matmuls", f"{backward}_matmuls")
    check_kernels(report, forward, backward, *matmuls)
    check_stepwise(report["step"], a_step=2.5)


def test_projected_lstm(wheels):
    """A step is two launches each way: one makes h of all programs' outputs, or its cotangent."""
    report = reports("projected_lstm", ["tagger"])["tagger"]
    forward, backward = both_ways("step_projected_lstm")
    check_kernels(report, forward, backward, f"{forward}_projection", f"{backward}_of_h")
    check_stepwise(report["step"], a_step=2.5)


def test_a_users_cell(wheels):
    found = reports("peephole", ["resident", "tagger"])
    check_kernels(found["resident"], *both_ways("resident_peephole_lstm"))
    assert found["resident"]["step"]["train"] <= 24
    check_kernels(found["tagger"], *both_ways("step_peephole_lstm"))
    check_stepwise(found["tagger"]["step"])


def test_lengths_and_resets(wheels):
    found = reports("lstm", ["resident", "tagger"], resets=True)
    check_kernels(found["resident"], *both_ways("resident_lstm"))
    check_kernels(found["tagger"], *both_ways("step_lstm"))
    check_stepwise(found["tagger"]["step"])


def test_command(wheels, tmp_path):
    """Both tables, Flax's step beside ours, and a file of it all."""
    path = tmp_path / "report.json"
    options = ["--cells", "gru", "--shapes", "rollout", "--dtypes", "bfloat16", "--json", path]
    done = subprocess.run(
        [sys.executable, "scripts/gpu_compile.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(path.read_text())
    assert told["target"] == "NVIDIA H200"
    check_kernels(told, *both_ways("resident_gru"))
    ours, flax = told["steps"]
    assert (ours["layer"], flax["layer"]) == ("jaxrnn gru", "Flax gru")
    assert 10 * ours["train"] < flax["train"]
    rows = [[text.strip() for text in line.split("|")] for line in done.stdout.splitlines()]
    for kernel in told["kernels"]:
        assert ["", *map(str, kernel.values()), ""] in rows
    assert [row[1:6] for row in rows if row[1:2] == ["Flax gru"]] == [
        ["Flax gru", "rollout", "16", f"{flax['forward']:,}", f"{flax['train']:,}"]
    ]


SPILLING = """
import gpu_compile as script
kernel = script.Kernel("step_lstm_forward", "tagger", "float32", 255, 8, 128, 1024, 2)
script.missing = lambda: None
script.Compiler = lambda target: type("", (), {"gpu": script.GPUS[target]})
script.compile_all = lambda *_: ([kernel], [])
print(script.main([]))
"""


def test_a_spill_is_the_exit_status():
    assert run(SPILLING).splitlines()[-1] == "1"


MISSING = """
import gpu_compile as script
version = script.metadata.version
def without(package):
    if package == "jax-cuda13-pjrt":
        raise script.metadata.PackageNotFoundError(package)
    return version("jaxlib")
script.metadata.version = without
print(script.missing())
script.metadata.version = lambda package: "1.0" if package == "jaxlib" else "2.0"
print(script.missing())
print(script.main([]))
"""


def test_missing_packages():
    absent, other, status = run(MISSING).splitlines()
    assert absent == "jax-cuda13-pjrt is not installed: pip install -e '.[gpu-compile]'"
    assert other.startswith("jax-cuda13-plugin 2.0 does not go with jaxlib 1.0: pip install ")
    assert status == "2"


READ = r'''
import json
import gpu_compile as script
ptxas = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'step_a' for 'sm_90a'
ptxas info    : Function properties for step_a
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Compiling entry function 'step_b' for 'sm_90a'
ptxas info    : Function properties for step_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""
hlo = """HloModule jit_step

%body (arg: (s32[])) -> (s32[]) {
  %arg = (s32[]) parameter(0)
  %custom-call.1 = bf16[4]{0} custom-call(%arg), custom_call_target="__gpu$xla.gpu.triton"
  %loop_add_fusion = s32[] fusion(%arg), kind=kLoop, calls=%add
  ROOT %tuple.1 = (s32[]) tuple(%loop_add_fusion)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %copy.1 = f32[4]{0} copy(%x)
  %while = (s32[]) while(%copy.1), body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %bitcast = f32[4]{0} bitcast(%copy.1)
}
"""
h200 = script.GPUS["h200"]
print(json.dumps([
    script.read_ptxas(ptxas),
    script.launches(hlo),
    # Bound by registers, by threads, by shared memory, by the number of blocks.
    script.blocks_that_fit(h200, 73, 256, 0),
    script.blocks_that_fit(h200, 16, 1024, 0),
    script.blocks_that_fit(h200, 32, 128, 115_713),
    script.blocks_that_fit(h200, 32, 32, 0),
]))
'''


def test_reading_what_compilers_say():
    usage, launched, *blocks = json.loads(run(READ))
    assert usage == {"step_a": [255, 32], "step_b": [32, 0]}
    assert launched == 1 + 7 * 2
    assert blocks == [3, 2, 1, 32]


TWO_DEVICES = """
import jax
from jax.sharding import NamedSharding, PartitionSpec
import gpu_compile
from jaxrnn import cells
from jaxrnn.recurrence.shapes import Shape

batch = PartitionSpec(None, "data")
compiler = gpu_compile.Compiler("h200", devices=2)
whole = NamedSharding(compiler.mesh, PartitionSpec())
split = NamedSharding(compiler.mesh, batch)
for cell, hidden in ((cells.lstm(), 64), (cells.gru(), 256), (cells.sru(), 256)):
    shape = Shape("two", 32, 9, hidden, hidden)
    _, step = gpu_compile.our_layer(cell, shape, "bfloat16")
    shardings = (jax.tree.map(lambda _: whole, step.types[0]), split, split)
    mapped = jax.shard_map(
        step.fn,
        mesh=compiler.mesh,
        in_specs=(PartitionSpec(), batch, batch),
        out_specs=(batch, (PartitionSpec(), batch)),
    )
    for name, fn in (("jit", step.fn), ("shard_map", mapped)):
        print(f"== {cell.name} {name}")
        print(compiler.compile(step._replace(fn=fn), shardings).as_text())
"""


def test_a_sharded_batch_is_not_gathered(wheels):
    """Under plain jit, and inside shard_map with its default checks (case C22)."""
    programs = run(TWO_DEVICES).split("== ")[1:]
    assert len(programs) == 6
    for program in programs:
        title = program.splitlines()[0]
        assert "all-gather" not in program, title
        assert "all-reduce" in program, title
        rows = {
            int(rows) for rows in re.findall(r"pallas_call[\w.]* = \(.*?bf16\[9,(\d+),", program)
        }
        assert rows == {16}, f"{title}: a device should have 16 of 32 rows, has {rows}"
