"""Text for training: corpora, vocabularies, windows over lanes, prefetch to the device.

Importing it is light: TFDS comes when a TFDS data set is read, JAX's devices come with the first
prefetch.
"""

from jaxrnn.data.corpus import Corpus
from jaxrnn.data.embedded import load_embedded
from jaxrnn.data.errors import DataError
from jaxrnn.data.prefetch import Prefetch
from jaxrnn.data.sources import load_corpus
from jaxrnn.data.text import read_lines, tokenize
from jaxrnn.data.vocabulary import EOS, UNK, Vocabulary
from jaxrnn.data.windows import Batch, Batches, Windows, batches

__all__ = [
    "EOS",
    "UNK",
    "Batch",
    "Batches",
    "Corpus",
    "DataError",
    "Prefetch",
    "Vocabulary",
    "Windows",
    "batches",
    "load_corpus",
    "load_embedded",
    "read_lines",
    "tokenize",
]
