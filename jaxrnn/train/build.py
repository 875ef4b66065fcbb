"""The corpus and the model that a config describes."""

import functools
from collections.abc import Callable

from flax import nnx
from jax.sharding import Mesh

from jaxrnn.data import Corpus, Windows, load_corpus
from jaxrnn.models import LanguageModel
from jaxrnn.parallel import check_divides, make_mesh
from jaxrnn.precision import Policy, policy
from jaxrnn.train.config import Config
from jaxrnn.train.errors import UserError


def make_corpus(config: Config) -> Corpus:
    """Loads the corpus of the `data` group.

    Raises:
        UserError: a folder is missing or half-written, or a split is smaller than its batch.
    """
    try:
        corpus = load_corpus(config.dataset, config.dir, download=config.download)
        Windows(corpus.train, config.batch_size, config.bptt, eos=corpus.vocabulary.eos)
        for split in ("valid", "test"):
            eval_windows(config, corpus, split)
    except ValueError as error:
        raise UserError(str(error)) from error
    return corpus


def count_windows(config: Config, corpus: Corpus) -> Callable[[int], int]:
    """Returns the function from an epoch to its number of training windows."""

    @functools.cache
    def count(epoch: int) -> int:
        windows = Windows(
            corpus.train,
            config.data.batch_size,
            config.data.bptt,
            eos=corpus.vocabulary.eos,
            seed=config.run.seed,
            epoch=epoch,
            random_length=config.data.random_bptt,
        )
        return len(windows)

    return count


def eval_windows(config: Config, corpus: Corpus, split: str) -> Windows:
    """Returns the windows of "valid" or "test"."""
    tokens = getattr(corpus, split)
    return Windows(tokens, config.eval_batch_size, config.bptt, eos=corpus.vocabulary.eos)


def make_devices(config: Config) -> Mesh:
    """Returns the mesh of the `parallel` group, whose axis "data" shares `data.batch_size` lanes.

    Raises:
        UserError: there are not so many devices, or the lanes cannot be shared equally.
    """
    try:
        mesh = make_mesh(config.parallel.data)
        parts = mesh.shape["data"] * config.parallel.accumulate
        name = "devices x micro-batches (parallel.data x parallel.accumulate)"
        check_divides("data.batch_size", config.data.batch_size, name, parts)
    except ValueError as error:
        raise UserError(str(error)) from error
    return mesh


def make_policy(config: Config) -> Policy:
    """Returns the dtypes of the `precision` group.

    Raises:
        UserError: they cannot be read.
    """
    try:
        return policy(config.policy)
    except ValueError as error:
        raise UserError(f"config.precision.policy: {error}") from error


def make_model(config: Config, vocabulary_size: int, seed: int) -> LanguageModel:
    """Returns a language model with fresh parameters.

    Args:
        config: of the run.
        vocabulary_size: words.
        seed: of the initial parameters.

    Raises:
        UserError: the options do not go together; the model says why.
    """
    options = dict(config.model)
    sizes = tuple(options.pop("layer_features"))
    if sizes and len(sizes) != config.model.num_layers:
        raise UserError(
            f"config.model.layer_features should have a size for each of model.num_layers = "
            f"{config.model.num_layers} layers, got {sizes}"
        )
    try:
        return LanguageModel(
            vocabulary_size,
            **options
            | {
                "hidden_features": sizes or config.model.hidden_features,
                "policy": make_policy(config.precision),
                "implementation": config.model.implementation or None,
                "remat": config.model.remat or None,
                "cutoffs": tuple(config.model.cutoffs),
            },
            rngs=nnx.Rngs(seed),
        )
    except ValueError as error:
        raise UserError(str(error)) from error
