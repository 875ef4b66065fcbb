"""The corpus and the model that a config describes."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from jaxrnn.data import Corpus, Windows, load_corpus
from jaxrnn.models import LanguageModel
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


def make_model(config: Config, vocabulary_size: int, seed: int) -> LanguageModel:
    """Returns a language model with fresh parameters.

    Args:
        config: the `model` group.
        vocabulary_size: words.
        seed: of the initial parameters.

    Raises:
        UserError: the options do not go together; the model says why.
    """
    options = dict(config)
    try:
        return LanguageModel(
            vocabulary_size,
            **options
            | {
                "dtype": jnp.dtype(config.dtype),
                "implementation": config.implementation or None,
                "remat": config.remat or None,
                "cutoffs": tuple(config.cutoffs),
            },
            rngs=nnx.Rngs(seed),
        )
    except ValueError as error:
        raise UserError(str(error)) from error
