"""Trains a recurrent language model.

    python -m jaxrnn.train --config configs/wikitext.py [--config.KEY=VALUE ...]

A config is a Python file, or the bare name of one that comes with the library, such as `wikitext`.
Each of its options can be changed on the command line, for example

    python -m jaxrnn.train --config wikitext --config.model.cell=gru --config.run.epochs=10

The run's directory gets checkpoints, metrics.jsonl, TensorBoard files and, at the end, report.md
and perplexity.png. Ctrl-C and SIGTERM save before they stop; the same command then goes on.
"""

import re
import sys

from absl import flags, logging
from ml_collections import config_flags

from jaxrnn.train.config import Config, check_config, describe_options, get_option, load_config
from jaxrnn.train.errors import UserError, one_sentence

_CONFIG = re.compile(r"--?config(?:=(.*))?$")
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)(?:=.*)?$")


def main(argv: list[str]) -> None:
    """Runs the command.

    Args:
        argv: the command line after the program's name.
    """
    if any(re.fullmatch(r"--?(h|help|helpfull)", argument) for argument in argv):
        print(f"{__doc__}\nOptions, with their defaults:\n{describe_options()}")
        return
    # Orbax logs each save at this level; what the user needs to know is on the line of progress.
    logging.set_verbosity(logging.ERROR)
    with one_sentence():
        config = parse(argv)
        from jaxrnn.train.loop import run  # After parsing: a typing error is told at once.

        outcome = run(config)
    if outcome.signal:
        sys.exit(128 + outcome.signal)


def parse(argv: list[str]) -> Config:
    """Returns the config of a command line.

    Raises:
        UserError: there is no such file, option or value; the message has the nearest.
    """
    name, rest = _split_config(argv)
    config = load_config(name)
    for argument in rest:
        if override := _OVERRIDE.match(argument):
            get_option(override[1])
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=rest)
    try:
        extra = values(["jaxrnn.train", *rest])[1:]
    except flags.Error as error:
        raise UserError(_reason(error)) from error
    if extra:
        raise UserError(f"{extra[0]!r} is no option; options look like --config.run.epochs=10")
    check_config(config)
    return config


def _split_config(argv: list[str]) -> tuple[str, list[str]]:
    """Returns the value of --config and the other arguments."""
    rest = list(argv)
    for i, argument in enumerate(argv):
        if match := _CONFIG.match(argument):
            value = match[1] if match[1] is not None else "".join(rest[i + 1 : i + 2])
            del rest[i : i + (1 if match[1] is not None else 2)]
            return value, rest
    raise UserError("--config is missing: give a config file or a name, as in --config wikitext")


def _reason(error: flags.Error) -> str:
    """Returns one line on a flag that could not be read."""
    text = str(error).splitlines()[0]
    if wrong := re.match(r"flag --config\.([\w.]+)=(.*?): ", text):
        wanted = type(get_option(wrong[1]).default).__name__
        return f"config.{wrong[1]} should be of type {wanted}, got {wrong[2]!r}"
    return text


if __name__ == "__main__":
    main(sys.argv[1:])
