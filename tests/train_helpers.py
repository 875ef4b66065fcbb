"""A corpus of a few hundred words and a config that trains on it in seconds."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrnn.train.config import get_default_config

# The tiny runs are the same few programs again and again: compiled once, they take 2 s, not 16.
COMPILED = tempfile.TemporaryDirectory(prefix="jaxrnn-tests-")
CACHE = {
    "jax_compilation_cache_dir": COMPILED.name,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
for name, value in CACHE.items():
    jax.config.update(name, value)

# What differs from one run of the same steps to the next.
CLOCKS = {"seconds", "tokens_per_second", "steps_per_second", "data_wait_share"}

OVERRIDES = {
    "data.dataset": "tiny",
    "data.batch_size": 4,
    "data.eval_batch_size": 4,
    "data.bptt": 6,
    "model.embed_features": 8,
    "model.hidden_features": 8,
    "model.softmax": "full",
    "model.dropout_embedding": 0.1,
    "model.dropout_output": 0.2,
    "optimizer.learning_rate": 1e-2,
    "parallel.data": 1,
    "run.epochs": 2,
    "run.log_every": 5,
    "run.checkpoint_every": 10,
    "run.tensorboard": False,
}


def write_corpus(folder: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """Writes a corpus called "tiny" into a folder: each word of a line follows from the last."""
    rng = random.Random(seed)
    (folder / "tiny").mkdir(parents=True)
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        text = []
        for _ in range(lines):
            start = rng.randrange(20)
            text.append(" ".join(f"w{(start + 3 * i) % 20}" for i in range(rng.randrange(3, 9))))
        (folder / "tiny" / f"{split}.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    return folder


def tiny_config(data: pathlib.Path, run_dir: pathlib.Path, **overrides: Any) -> Any:
    """Returns a config of the tiny run; `overrides` are {group__key: value}."""
    config = get_default_config()
    values = OVERRIDES | {"data.dir": str(data), "run.dir": str(run_dir)}
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    config.update_from_flattened_dict(values)
    return config


def tiny_flags(data: pathlib.Path, run_dir: pathlib.Path, **overrides: Any) -> list[str]:
    """Returns the same as arguments of the command line, with a config file of the defaults."""
    defaults = data / "defaults.py"
    defaults.write_text("from jaxrnn.train.config import get_default_config as get_config\n")
    values = OVERRIDES | {"data.dir": str(data), "run.dir": str(run_dir)}
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    flags = [f"--config.{name}={value}" for name, value in values.items()]
    return ["--config", str(defaults), *flags]


def command(module: str, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess:
    """Runs `python -m module arguments` as a user would."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=one_device(),
    )


def start_command(module: str, *arguments: str) -> subprocess.Popen:
    """Starts `python -m module arguments`."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=one_device(),
    )


def one_device() -> dict[str, str]:
    """Returns the environment of a user: one CPU device, not the tests' eight."""
    user = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return user | {name.upper(): str(value) for name, value in CACHE.items()}


def stop_at(process: subprocess.Popen, run_dir: pathlib.Path, step: int, number: signal.Signals):
    """Sends a signal once metrics.jsonl has a step, and returns (exit code, stdout)."""
    path = run_dir / "metrics.jsonl"
    while process.poll() is None:
        if path.is_file() and f'"step": {step},' in path.read_text("utf-8"):
            process.send_signal(number)
            break
        time.sleep(0.01)
    out, _ = process.communicate(timeout=900)
    return process.returncode, out


def records(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a run without the clocks."""
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [{k: v for k, v in json.loads(x).items() if k not in CLOCKS} for x in lines]


def assert_same_bits(a: Any, b: Any) -> None:
    """Asserts that two trees have the same leaves, bit by bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, leaf in jax.tree_util.tree_leaves_with_path(a):
        other = dict(jax.tree_util.tree_leaves_with_path(b))[path]
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes(), path


def final_state(config):
    """Returns the arrays and the progress that a run has saved last, as Orbax alone reads them."""
    with ocp.CheckpointManager(pathlib.Path(config.run.dir) / "checkpoints" / "latest") as manager:
        restored = manager.restore(
            manager.latest_step(),
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(), progress=ocp.args.JsonRestore()
            ),
        )
    progress = {k: v for k, v in restored["progress"].items() if k != "seconds"}
    return restored["state"], progress
