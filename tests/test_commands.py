"""Every command as a user runs it, in a process of its own."""

import shutil

import jax
import jax.numpy as jnp
import pytest
from train_helpers import command, tiny_flags, write_corpus

from jaxrnn.generate import Sampling, draw, generate
from jaxrnn.train.loading import load


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains with the command; returns (data, run directory, what it printed)."""
    folder = tmp_path_factory.mktemp("commands")
    data = write_corpus(folder / "data")
    done = command("jaxrnn.train", *tiny_flags(data, folder / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return data, folder / "run", done.stdout


def test_train_prints_progress_and_the_result(trained):
    _, directory, out = trained
    assert "corpus tiny" in out
    assert "step 5/34" in out
    assert "validation" in out
    assert "test perplexity" in out
    assert (directory / "report.md").is_file()


def test_evaluate_gives_the_figures_of_the_report(trained):
    data, directory, _ = trained
    report = (directory / "report.md").read_text("utf-8")
    for arguments in ([], ["--data-dir", str(data)]):
        done = command("jaxrnn.evaluate", "--checkpoint", str(directory), *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert lines[1].split()[0] == "validation"
        assert lines[2].split()[0] == "test"
        for line in lines[1:3]:
            assert line.split()[2] in report


def test_generate_goes_on_from_a_prompt(trained):
    _, directory, _ = trained
    arguments = ["--checkpoint", str(directory), "--prompt", "w1 w4", "--length", "12"]
    done = command("jaxrnn.generate", *arguments, "--seed", "3", "--top-k", "5")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("w1 w4")
    assert "tokens/s, median latency of a token" in done.stdout


def test_the_seed_fixes_the_text(trained):
    model = load(trained[1])
    texts = [generate(model, "w1", 20, Sampling(), seed).ids for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    greedy = [generate(model, "", 9, Sampling(temperature=0), seed).ids for seed in (3, 4)]
    assert greedy[0] == greedy[1]
    assert greedy[0] == generate(model, "", 9, Sampling(top_k=1), seed=5).ids
    assert greedy[0] == generate(model, "", 9, Sampling(top_p=1e-6), seed=5).ids


def test_top_k_and_top_p_narrow_the_draw():
    log_probs = jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25]))
    keys = jax.random.split(jax.random.key(0), 200)
    cases = [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_p=0.5), {1}),
        (Sampling(top_p=0.7), {1, 3}),
        (Sampling(top_k=3, top_p=0.99), {1, 2, 3}),
        (Sampling(temperature=0.01), {1}),
    ]
    for sampling, words in cases:
        drawn = jax.vmap(lambda key, s=sampling: draw(log_probs, s, key))(keys)
        assert set(drawn.tolist()) == words, sampling


@pytest.mark.parametrize("module", ["jaxrnn.train", "jaxrnn.evaluate", "jaxrnn.generate"])
def test_help_says_what_it_does_and_how(module):
    done = command(module, "--help")
    assert done.returncode == 0
    assert f"python -m {module}" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    if module == "jaxrnn.train":
        assert "learning_rate" in done.stdout
        assert "peak learning rate" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data__dir": "/no/such/folder"}, "/no/such/folder does not exist"),
        ({"data__batch_size": 10**6}, "lower batch_size"),
        ({"model__cell": "lstmm"}, "should be one of"),
        ({"model__hiden_features": 3}, "did you mean 'model.hidden_features'"),
        ({"run__steps": "ten"}, "should be of type int"),
    ],
)
def test_train_refuses_bad_input_in_one_sentence(options, message, tmp_path):
    data = write_corpus(tmp_path / "data")
    assert_refused("jaxrnn.train", tiny_flags(data, tmp_path / "run", **options), message)
    assert not (tmp_path / "run").exists()


def test_train_wants_a_config():
    assert_refused("jaxrnn.train", [], "--config is missing")


def test_train_refuses_half_a_corpus(tmp_path):
    data = write_corpus(tmp_path / "data")
    (data / "tiny" / "valid.txt").unlink()
    assert_refused("jaxrnn.train", tiny_flags(data, tmp_path / "run"), "valid.txt")


def test_generate_refuses_an_unknown_word_with_suggestions(trained):
    arguments = ["--checkpoint", str(trained[1]), "--prompt", "w1 w99"]
    assert_refused("jaxrnn.generate", arguments, "did you mean 'w9'")


@pytest.mark.parametrize("module", ["jaxrnn.evaluate", "jaxrnn.generate"])
def test_a_folder_that_is_no_run_is_refused(module, tmp_path):
    assert_refused(module, ["--checkpoint", str(tmp_path)], "no training run")


def test_a_damaged_checkpoint_is_one_sentence(trained, tmp_path):
    shutil.copytree(trained[1], tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "best").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:50])
    assert_refused("jaxrnn.generate", ["--checkpoint", str(tmp_path / "run")], "is damaged")


def test_evaluate_refuses_another_text(trained, tmp_path):
    other = write_corpus(tmp_path / "other", seed=5)
    path = other / "tiny" / "train.txt"
    path.write_text("another " + path.read_text("utf-8"), encoding="utf-8")
    arguments = ["--checkpoint", str(trained[1]), "--data-dir", str(other)]
    assert_refused("jaxrnn.evaluate", arguments, "was trained on tiny")


@pytest.mark.parametrize(
    "arguments", [["--top-p", "3"], ["--length", "0"], ["--temperature", "hot"]], ids=" ".join
)
def test_generate_refuses_a_wrong_number(arguments):
    done = command("jaxrnn.generate", "--checkpoint", ".", *arguments)
    assert done.returncode == 2
    assert "should be a" in done.stderr


def assert_refused(module: str, arguments: list[str], message: str) -> None:
    """Asserts that a command fails with one sentence on stderr."""
    done = command(module, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
