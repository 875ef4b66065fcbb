"""A run's directory: what belongs to the run as a whole, written once at its start."""

import json
import os
import pathlib
import platform
from importlib import metadata
from typing import Any, NamedTuple

import jax

from jaxrnn.data import Corpus, Vocabulary
from jaxrnn.train.config import Config, differences, get_default_config, get_option
from jaxrnn.train.errors import UserError

_PACKAGES = ("jaxrnn", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

# A data position or a carried state means nothing under other values of these.
_FIXED = ("data.batch_size", "data.bptt", "data.random_bptt", "run.seed")


class About(NamedTuple):
    """What `config.json` says.

    Attributes:
        config: the config the run was started with.
        corpus: its corpus' name.
        source: where the corpus came from.
        versions: {package: version}.
        machine: a line on the machine.
    """

    config: Config
    corpus: str
    source: str
    versions: dict[str, str]
    machine: str

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON can hold it."""
        return self._asdict() | {"config": self.config.to_dict()}


def describe(config: Config, corpus: Corpus) -> About:
    """Returns what this process would write."""
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return About(
        config=config,
        corpus=corpus.name,
        source=corpus.source,
        versions={name: metadata.version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs, {devices}",
    )


def run_directory(config: Config, corpus: Corpus) -> pathlib.Path:
    """Returns `run.dir`, or a directory named after the corpus that is really used."""
    return pathlib.Path(config.run.dir or f"runs/{corpus.name}-{config.model.cell}")


def write(run_dir: pathlib.Path, about: About, vocabulary: Vocabulary) -> None:
    """Writes `config.json` and `vocabulary.json`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_text(run_dir / "config.json", json.dumps(about.to_dict(), indent=2) + "\n")
    write_text(run_dir / "vocabulary.json", vocabulary.to_json())


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a whole file or, where that fails, leaves the one before it as it is."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def find(directory: str | os.PathLike) -> pathlib.Path:
    """Returns the run's directory that `directory` is, or lies in.

    Raises:
        UserError: it is not part of a run.
    """
    path = pathlib.Path(directory).resolve()
    if not path.is_dir():
        raise UserError(f"there is no directory {str(directory)!r}; give that of a training run")
    for folder in (path, *path.parents):
        if (folder / "config.json").is_file() and (folder / "vocabulary.json").is_file():
            return folder
    raise UserError(
        f"{str(directory)!r} has no config.json and vocabulary.json, so it is no training run; "
        "give the directory that `python -m jaxrnn.train` named"
    )


def read(run_dir: pathlib.Path) -> tuple[About, Vocabulary]:
    """Reads what `write` wrote.

    Raises:
        UserError: a file is damaged, or has options that this version does not know.
    """
    try:
        about = json.loads((run_dir / "config.json").read_text("utf-8"))
        config = get_default_config()
        config.update(about.pop("config"))
        vocabulary = Vocabulary.from_json((run_dir / "vocabulary.json").read_text("utf-8"))
        return About(config=config, **about), vocabulary
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"config.json or vocabulary.json of {run_dir} cannot be read ({reason}); copy them "
            "from a backup, or train into another run.dir"
        ) from error


def check_same_run(run_dir: pathlib.Path, about: About, vocabulary: Vocabulary) -> None:
    """Checks that the run in a directory can go on under another config.

    The optimizer and the model are compared array by array when the checkpoint is read.

    Raises:
        UserError: it cannot; the message names the first difference.
    """
    before, words = read(run_dir)
    pairs: dict[str, tuple] = {"the corpus": (before.corpus, about.corpus)}
    for name in _FIXED:
        group, key = name.split(".")
        pairs[f"config.{name}"] = (before.config[group][key], about.config[group][key])
    pairs["the number of words"] = (len(words), len(vocabulary))
    for name, (old, new) in pairs.items():
        if old != new:
            raise UserError(
                f"{run_dir} holds a run in which {name} is {old!r}, and now it is {new!r}; set it "
                "back, or start another run with --config.run.dir"
            )
    if words != vocabulary:
        raise UserError(
            f"{run_dir} holds a run on another text of the name {about.corpus!r}; give that text, "
            "or start another run with --config.run.dir"
        )


def option_lines(config: Config) -> list[str]:
    """Returns a line for each option that is not at its default."""
    return [
        f"{name} = {value!r} (default {get_option(name).default!r})"
        for name, value in differences(config).items()
    ]
