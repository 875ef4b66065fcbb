"""Options: names, types, values, and the configs that come with the library."""

import pathlib

import pytest
from train_helpers import OVERRIDES, write_corpus

from jaxrnn.train.__main__ import parse
from jaxrnn.train.config import (
    OPTIONS,
    check_config,
    config_folders,
    differences,
    get_default_config,
    load_config,
)
from jaxrnn.train.errors import UserError
from jaxrnn.train.loop import run

CONFIGS = sorted({file for folder in config_folders() for file in folder.glob("[!_]*.py")})


def test_defaults_are_what_they_say():
    check_config(get_default_config())
    assert differences(get_default_config()) == {}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads_states_only_what_differs_and_takes_a_step(path, tmp_path):
    config = load_config(str(path))
    assert differences(config)
    assert "python -m jaxrnn.train" in path.read_text("utf-8")
    sizes = ("embed_features", "hidden_features")
    small = {
        k: v for k, v in OVERRIDES.items() if k.startswith(("data.", "par")) or k.endswith(sizes)
    }
    small |= {"run.steps": 1, "run.dir": str(tmp_path / "run"), "data.dir": str(tmp_path / "data")}
    write_corpus(tmp_path / "data")
    config.update_from_flattened_dict(small | {"model.cutoffs": (8, 14)})
    assert run(config).progress.step == 1


def test_a_bare_name_works_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("wikitext") == load_config("configs/wikitext.py")


def test_overrides_are_typed():
    config = parse(
        [
            "--config.model.cell=gru",
            "--config=wikitext",
            "--config.optimizer.learning_rate=3",
            "--config.model.cutoffs=(5, 9)",
            "--noconfig.run.tensorboard",
        ]
    )
    assert config.model.cell == "gru"
    assert config.optimizer.learning_rate == 3.0
    assert config.model.cutoffs == (5, 9)
    assert config.run.tensorboard is False


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.model.hiden_features=3", "did you mean 'model.hidden_features'"),
        ("--config.run.learning_rate=3", "did you mean 'optimizer.learning_rate'"),
        ("--config.run.steps=ten", "run.steps should be of type int, got 'ten'"),
        ("--config.run.tensorboard=maybe", "run.tensorboard should be of type bool"),
        ("--config.model.cell=lstmm", "should be one of 'elman', 'gru', 'indrnn', 'lstm'"),
        ("--config.data.bptt=0", "data.bptt should be at least 1, got 0"),
        ("--steps=3", "steps"),
        ("steps", "'steps' is no option"),
    ],
)
def test_a_wrong_argument_is_one_sentence(argument, message):
    with pytest.raises(UserError, match=message) as error:
        parse(["--config", "wikitext", argument])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.model.hiden = 3", "did you mean 'model.hidden_features'"),
        ("config.model.hidden_features = 'a'", "hidden_features should be of type int, got a str"),
        ("config.model.cell = 'rnn'", "should be one of"),
        ("config.model. = 3", "invalid syntax"),
    ],
)
def test_a_wrong_config_file_is_one_sentence(line, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from jaxrnn.train.config import get_default_config\n"
        f"def get_config():\n    config = get_default_config()\n    {line}\n    return config\n"
    )
    with pytest.raises(UserError, match=message) as error:
        load_config(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["wikitxt", "no/such/file.py", ""])
def test_a_missing_config_file_lists_the_known_names(name):
    with pytest.raises(UserError, match="wikitext"):
        load_config(name)


def test_no_option_is_dead():
    """Each option's name is read somewhere, as an attribute of the config."""
    package = pathlib.Path(load_config.__code__.co_filename).parent
    source = "\n".join(p.read_text("utf-8") for p in package.glob("*.py") if p.name != "config.py")
    # The whole `model` group goes to the model, which refuses what it does not know.
    options = {key for group, keys in OPTIONS.items() if group != "model" for key in keys}
    assert [key for key in sorted(options) if f".{key}" not in source] == []
