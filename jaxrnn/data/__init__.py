"""Data for training: texts as corpora and windows over lanes, sequences packed into rows or sorted
into buckets, prefetch to the device.

Importing it is light: TFDS comes when a TFDS data set is read, JAX's devices come with the first
prefetch.
"""

from jaxrnn.data.buckets import BatchSize, PaddedBatch, bucket_boundaries, bucketed_batches
from jaxrnn.data.corpus import Corpus
from jaxrnn.data.embedded import load_embedded
from jaxrnn.data.errors import DataError
from jaxrnn.data.packing import PackedBatch, Packing, choose_row_length, pack, packed_batches
from jaxrnn.data.prefetch import Prefetch
from jaxrnn.data.sources import load_corpus
from jaxrnn.data.text import read_lines, tokenize
from jaxrnn.data.vocabulary import EOS, UNK, Vocabulary
from jaxrnn.data.windows import Batch, Batches, Windows, batches

__all__ = [
    "EOS",
    "UNK",
    "Batch",
    "BatchSize",
    "Batches",
    "Corpus",
    "DataError",
    "PackedBatch",
    "Packing",
    "PaddedBatch",
    "Prefetch",
    "Vocabulary",
    "Windows",
    "batches",
    "bucket_boundaries",
    "bucketed_batches",
    "choose_row_length",
    "load_corpus",
    "load_embedded",
    "pack",
    "packed_batches",
    "read_lines",
    "tokenize",
]
