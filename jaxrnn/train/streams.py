"""Batches from where a run stands, put on the devices ahead of time."""

import numpy as np
from jax.sharding import Mesh

from jaxrnn.data import Batch, Corpus, Prefetch, batches
from jaxrnn.parallel import put
from jaxrnn.train.build import eval_windows
from jaxrnn.train.config import Config
from jaxrnn.train.state import Progress
from jaxrnn.train.step import BATCH


def training_stream(
    config: Config, corpus: Corpus, progress: Progress, mesh: Mesh
) -> Prefetch[Batch]:
    """Returns the training batches, epoch after epoch."""
    source = batches(
        corpus.train,
        config.data.batch_size,
        config.data.bptt,
        eos=corpus.vocabulary.eos,
        seed=config.run.seed,
        random_length=config.data.random_bptt,
        start=(progress.epoch, progress.window),
    )
    return Prefetch(source, transfer=lambda batch: put(mesh, batch, BATCH))


def eval_stream(config: Config, corpus: Corpus, split: str, mesh: Mesh) -> Prefetch[Batch]:
    """Returns the batches of "valid" or "test".

    Args:
        config: the `data` group.
        corpus: the texts.
        split: which of them.
        mesh: the devices, whose axis "data" shares the lanes.
    """
    source = eval_windows(config, corpus, split)
    return Prefetch(source, transfer=lambda batch: put(mesh, share_lanes(batch, mesh), BATCH))


def share_lanes(batch: Batch, mesh: Mesh) -> Batch:
    """Adds empty lanes, so that the devices of the axis "data" can share them equally."""
    missing = -batch.mask.shape[1] % mesh.shape["data"]
    lanes = (np.pad(a, ((0, 0), (0, missing))) for a in batch[:3])
    return Batch(*lanes, starts=batch.starts)
