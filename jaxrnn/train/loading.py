"""A trained model for use in another program."""

import os
from typing import NamedTuple

from flax import nnx

from jaxrnn.data import Vocabulary
from jaxrnn.models import LanguageModel
from jaxrnn.train import rundir
from jaxrnn.train.build import make_model
from jaxrnn.train.checkpoint import find_params, read_progress, restore_params
from jaxrnn.train.config import Config
from jaxrnn.train.state import Progress


class Trained(NamedTuple):
    """A trained language model.

    Attributes:
        model: the model with the best parameters of its run, or the latest where none is best yet.
        vocabulary: words to ids and back.
        corpus: name of the corpus that it was trained on.
        config: the config that it was trained with.
        progress: where the run stood when these parameters were saved.
    """

    model: LanguageModel
    vocabulary: Vocabulary
    corpus: str
    config: Config
    progress: Progress


def load(directory: str | os.PathLike) -> Trained:
    """Loads a trained model.

    Args:
        directory: the directory of a run of `jaxrnn.train`, or one of its checkpoints.

    Raises:
        UserError: it is no run, has no complete checkpoint, or a damaged one.
    """
    run_dir = rundir.find(directory)
    about, vocabulary = rundir.read(run_dir)
    folder = find_params(run_dir)
    model = make_model(about.config, len(vocabulary), seed=0)
    like = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    nnx.update(model, restore_params(folder, like))
    return Trained(model, vocabulary, about.corpus, about.config, read_progress(folder))
