"""A corpus: three texts as ids, their vocabulary, and where they came from."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jaxrnn.data.errors import DataError
from jaxrnn.data.folders import SPLITS
from jaxrnn.data.vocabulary import UNK, Vocabulary

# Merity et al. 2016, arXiv:1609.07843, table 1: tokens with one <eos> a line.
TOKENS = {
    "wikitext-2": {"train": 2_088_628, "valid": 217_646, "test": 245_569},
    "wikitext-103": {"train": 103_227_021, "valid": 217_646, "test": 245_569},
}


class Corpus(NamedTuple):
    """A text in three splits.

    Attributes:
        name: names run directories and metrics.
        vocabulary: the words of `train`, and `<unk>` where the other splits need it.
        train: ids, int32 [tokens].
        valid: ids, int32 [tokens].
        test: ids, int32 [tokens].
        source: where the text came from, a phrase.
        banner: a text for the user where this is not the corpus that was asked for, else None.
    """

    name: str
    vocabulary: Vocabulary
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    source: str
    banner: str | None = None


def make_corpus(
    name: str, read: Callable[[str], Iterable[str]], source: str, banner: str | None = None
) -> Corpus:
    """Builds the vocabulary of a text's training split and encodes all three.

    The training text is read word by word and need not fit in memory as words. A word that only
    the other splits have becomes `<unk>`; `source` then says how often that happens.

    Args:
        name: the corpus' name; one in `TOKENS` is checked against the published counts.
        read: gives the tokens of a split, "train", "valid" or "test".
        source: where the text comes from.
        banner: what the user is to be told.

    Raises:
        DataError: a split is empty or has not the published number of tokens.
    """
    vocabulary, train = Vocabulary.fit(read("train"))
    _check("train", train.size, name, source)
    ids = {"train": train}
    with_unk = vocabulary if UNK in vocabulary else Vocabulary((*vocabulary.words, UNK))
    notes = [source]
    for split in SPLITS[1:]:
        words = list(read(split))
        _check(split, len(words), name, source)
        ids[split] = with_unk.encode(words, unknown="unk")
        if unknown := sum(word not in vocabulary for word in words):
            notes.append(f"{unknown:,} of {len(words):,} tokens of {split} unknown to train")
    vocabulary = with_unk if len(notes) > 1 else vocabulary
    return Corpus(name, vocabulary, **ids, source=", ".join(notes), banner=banner)


def _check(split: str, found: int, name: str, source: str):
    """Raises a DataError where a split is empty or has not as many tokens as published."""
    if not found:
        raise DataError(
            f"{split} of {name} from {source} has no text: fetch it again, or name another folder"
        )
    published = TOKENS.get(name, {}).get(split, found)
    if found != published:
        raise DataError(
            f"{split} of {name} from {source} has {found:,} tokens where {published:,} are"
            " published, so it is half-written or another text: fetch it again, or call the data"
            " set by a name of its own"
        )
