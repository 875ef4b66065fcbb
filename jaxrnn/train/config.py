"""Every option of a training run: its default and what it means stand here, once."""

import difflib
import pathlib
import re
import runpy
import textwrap
from typing import Any, NamedTuple, TypeAlias

from ml_collections import ConfigDict

from jaxrnn.train.errors import UserError

# A ConfigDict; its own annotations make each value a union of everything it could hold.
Config: TypeAlias = Any


# Those of `jaxrnn.models.language_model`, which would bring JAX along.
CELLS = (
    "elman",
    "gru",
    "indrnn",
    "lstm",
    "mgu",
    "min_gru",
    "min_lstm",
    "qrnn",
    "slstm",
    "sru",
)


class Option(NamedTuple):
    """One option: its default (which fixes its type), what it means, and which values it takes."""

    default: Any
    comment: str
    choices: tuple = ()
    least: float | None = None


OPTIONS: dict[str, dict[str, Option]] = {
    "data": {
        "dataset": Option("wikitext-2", "the corpus: wikitext-2, wikitext-103 or a folder's name"),
        "dir": Option("", "folder with <dataset>/train.txt; empty: JAXRNN_DATA_DIR"),
        "download": Option(True, "fetch the corpus where no folder has it"),
        "batch_size": Option(32, "lanes that the training text is cut into", least=1),
        "bptt": Option(70, "time steps a window, through which gradients flow", least=1),
        "random_bptt": Option(False, "draw the length of each window around bptt"),
        "scale_rate": Option(False, "scale the learning rate by a window's length over bptt"),
        "eval_batch_size": Option(16, "lanes of the validation and test text", least=1),
    },
    "model": {
        "cell": Option("lstm", "the recurrent cell", choices=CELLS),
        "embed_features": Option(256, "size of a word's embedding", least=1),
        "hidden_features": Option(256, "size of a layer's output", least=1),
        "num_layers": Option(1, "recurrent layers", least=1),
        "layer_features": Option((), "sizes of the layers' outputs, where they differ"),
        "dropout_embedding": Option(0.0, "dropout on the embedding", least=0),
        "dropout_layers": Option(0.0, "dropout between layers", least=0),
        "dropout_output": Option(0.0, "dropout on the last layer's output", least=0),
        "dropout_words": Option(0.0, "dropout of whole words", least=0),
        "dropout_recurrent": Option(0.0, "dropout on h before the recurrent matmul", least=0),
        "dropout_weights": Option(0.0, "dropout on the recurrent matrix", least=0),
        "zoneout": Option(0.0, "rate at which values of the state stay as they were", least=0),
        "variational": Option(False, "embedding, layers, output: one mask for all steps"),
        "activation_penalty": Option(0.0, "weight of the mean square of the outputs", least=0),
        "temporal_penalty": Option(0.0, "weight of that of their differences in time", least=0),
        "tied": Option(True, "the output layer uses the embedding's weights"),
        "softmax": Option("adaptive", "the loss, exact either way", choices=("adaptive", "full")),
        "cutoffs": Option((2000, 10000), "word ids at which the adaptive softmax is cut"),
        "div_value": Option(4.0, "by which each further group's word vectors shrink", least=1),
        "remat": Option(
            "", "what backward recomputes; empty: by device", ("", "none", "gates", "chunk")
        ),
        "implementation": Option("", "who runs the time loop; empty: by device", ("", "xla")),
    },
    "precision": {
        "policy": Option(
            "float32", "float32, bfloat16, float16 or param=...,compute=...,output=..."
        ),
        "matmul": Option("full", "float32 matmuls: in full, or TF32", choices=("full", "tf32")),
        "loss_scale": Option(32768.0, "float16: the first loss scale; it adapts", least=1),
    },
    "parallel": {
        "data": Option(0, "devices that share the batch; 0: all there are", least=0),
        "accumulate": Option(1, "micro-batches that a device cuts its lanes into", least=1),
    },
    "optimizer": {
        "name": Option("adam", "the update rule", choices=("adam", "adamw", "sgd")),
        "learning_rate": Option(1e-3, "peak learning rate", least=0),
        "schedule": Option(
            "constant", "shape of the rate after warm-up", choices=("constant", "cosine", "linear")
        ),
        "warmup_steps": Option(0, "steps in which the rate rises from zero", least=0),
        "final_fraction": Option(0.0, "cosine, linear: last rate as a part of the peak", least=0),
        "clip_norm": Option(0.25, "largest global norm of the gradients; 0: no limit", least=0),
        "weight_decay": Option(0.0, "decay: decoupled for adamw, in the gradient else", least=0),
        "momentum": Option(0.0, "momentum of sgd", least=0),
        "b1": Option(0.9, "adam, adamw: decay of the mean of gradients", least=0),
        "b2": Option(0.999, "adam, adamw: decay of the mean of their squares", least=0),
        "plateau_factor": Option(
            1.0, "divides the rate when validation stops improving; 1: never", least=1
        ),
        "plateau_patience": Option(
            1, "epochs without improvement before the rate is divided", least=1
        ),
    },
    "run": {
        "dir": Option("", "where the run is kept; empty: runs/<corpus>-<cell>"),
        "steps": Option(0, "stop after so many steps; 0: no limit", least=0),
        "epochs": Option(40, "stop after so many passes over the text", least=1),
        "seed": Option(0, "seed of parameters, dropout and window lengths", least=0),
        "log_every": Option(50, "steps between records in metrics.jsonl", least=1),
        "checkpoint_every": Option(500, "steps between checkpoints, besides epochs' ends", least=1),
        "keep": Option(2, "how many of the latest checkpoints are kept", least=1),
        "early_stop": Option(0, "stop after so many epochs without improvement; 0: off", least=0),
        "tensorboard": Option(True, "write TensorBoard event files too"),
        "resume": Option(True, "go on with a run found in run.dir; False: refuse it"),
    },
}


def get_default_config() -> Config:
    """Returns every option at its default; unknown keys and other types are refused on setting."""
    config = ConfigDict(
        {group: {key: o.default for key, o in keys.items()} for group, keys in OPTIONS.items()}
    )
    return config.lock()


def option_names() -> list[str]:
    """Returns all options as `group.key`."""
    return [f"{group}.{key}" for group, keys in OPTIONS.items() for key in keys]


def get_option(name: str) -> Option:
    """Returns the option called `group.key`.

    Raises:
        UserError: there is none; the message has the nearest name.
    """
    group, _, key = name.partition(".")
    try:
        return OPTIONS[group][key]
    except KeyError:
        raise UserError(f"there is no option {name!r}; {nearest(name)}") from None


def nearest(name: str) -> str:
    """Returns a clause that points from a mistyped option to the nearest real one."""
    candidates = {full: full for full in option_names()}
    for full in option_names():
        key = full.split(".")[1]
        for part in (key, *key.split("_")):
            candidates.setdefault(part, full)
    key = name.split(".")[-1]
    if key in candidates:
        return f"did you mean {candidates[key]!r}?"
    for text in (name, key):
        if match := difflib.get_close_matches(text, candidates, n=1, cutoff=0.7):
            return f"did you mean {candidates[match[0]]!r}?"
    return "--help lists them all"


def describe_options() -> str:
    """Returns the options as text for --help: name, default, meaning."""
    lines = []
    for group, keys in OPTIONS.items():
        lines.append(f"\n  config.{group}")
        for key, option in keys.items():
            choices = f" ({', '.join(c for c in option.choices if c)})" if option.choices else ""
            line = f"    {key:<17} {option.default!s:<13} {option.comment}{choices}"
            lines += textwrap.wrap(line, 100, subsequent_indent=" " * 36)
    return "\n".join(lines)


def config_folders() -> list[pathlib.Path]:
    """Returns where configs with a bare name live: an installed package's, or a checkout's."""
    package = pathlib.Path(__file__).resolve().parents[1]
    folders = [package / "_configs", package.parent / "configs"]
    return [folder for folder in folders if folder.is_dir()]


def find_config(name: str) -> pathlib.Path:
    """Returns the file of a config given as a path or as a bare name like `wikitext`.

    Raises:
        UserError: there is no such file; the message lists the names that exist.
    """
    path = pathlib.Path(name)
    if path.is_file():
        return path
    stem = path.stem if path.suffix == ".py" else path.name
    known = {file.stem: file for folder in config_folders() for file in folder.glob("[!_]*.py")}
    if path.parent in (pathlib.Path("."), pathlib.Path("configs")) and stem in known:
        return known[stem]
    raise UserError(
        f"there is no config file {name!r}; give the path of one, or one of these names: "
        f"{', '.join(sorted(known))}"
    )


def load_config(name: str) -> Config:
    """Returns what `get_config()` of a config file returns, checked.

    Args:
        name: path of the file, or the bare name of one that comes with the library.

    Raises:
        UserError: no such file, or it sets an unknown option, a wrong type or a wrong value.
    """
    path = find_config(name)
    try:
        config = runpy.run_path(str(path))["get_config"]()
    except Exception as error:
        raise UserError(f"{path} could not be loaded: {_reason(error)}") from error
    check_config(config)
    return config


def check_config(config: Config) -> None:
    """Checks every value against its option.

    Raises:
        UserError: a value is not among the choices, or below what is possible.
    """
    for name in option_names():
        option, value = get_option(name), config[name.split(".")[0]][name.split(".")[1]]
        if option.choices and value not in option.choices:
            wanted = ", ".join(repr(choice) for choice in option.choices)
            raise UserError(f"config.{name} should be one of {wanted}, got {value!r}")
        if option.least is not None and not value >= option.least:
            raise UserError(f"config.{name} should be at least {option.least}, got {value!r}")


def differences(config: Config) -> dict[str, Any]:
    """Returns the options whose value is not the default, as {group.key: value}."""
    values = {name: config[name.split(".")[0]][name.split(".")[1]] for name in option_names()}
    return {name: value for name, value in values.items() if value != get_option(name).default}


def _reason(error: Exception) -> str:
    """Returns one line on why a config file failed."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if unknown := re.search(r'Key "(\w+)" does not exist', text):
        return f"there is no option {unknown[1]!r}; {nearest(unknown[1])}"
    if wrong := re.search(r"field '(\w+)'.*<class '(\w+)'>.*<class '(\w+)'>", text):
        return f"{wrong[1]} should be of type {wrong[3]}, got a {wrong[2]}"
    if isinstance(error, KeyError):
        return f"it has no {text}"
    return text
