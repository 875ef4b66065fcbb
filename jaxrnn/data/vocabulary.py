"""Words and their ids, the most frequent word first."""

import dataclasses
import difflib
import functools
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal

import numpy as np

EOS = "<eos>"
UNK = "<unk>"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The words of a text by falling frequency, so that a range of ids is a band of frequency.

    An adaptive softmax needs that order: each of its clusters is a range of ids.

    Attributes:
        words: the words; the place of a word is its id. Words that are equally frequent stand in
            the order of their first appearance.
    """

    words: tuple[str, ...]

    def __post_init__(self):
        if len(self._ids) != len(self.words):
            twice = Counter(self.words).most_common(1)[0][0]
            raise ValueError(f"a vocabulary should hold each word once, got {twice!r} twice")

    @classmethod
    def build(cls, tokens: Iterable[str]) -> "Vocabulary":
        """Counts the words of a text.

        Args:
            tokens: the text, word by word.
        """
        return cls.fit(tokens)[0]

    @classmethod
    def fit(cls, tokens: Iterable[str]) -> "tuple[Vocabulary, np.ndarray]":
        """Builds the vocabulary of a text and encodes the text, reading it once.

        Args:
            tokens: the text, word by word; an iterator will do.

        Returns:
            the vocabulary, and the text's ids, int32 [number of words].
        """
        # Ids by first appearance, as numbers so that the words need not be kept, then reordered.
        first: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        ids = np.fromiter(map(first.__getitem__, tokens), np.int32)
        order = np.argsort(-np.bincount(ids, minlength=len(first)), kind="stable")
        new_id = np.empty(len(first), np.int32)
        new_id[order] = np.arange(len(first), dtype=np.int32)
        words = list(first)
        return cls(tuple(words[i] for i in order)), new_id[ids]

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self._ids

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def id(self, word: str) -> int:
        """The id of one word.

        Raises:
            ValueError: the word is not in the vocabulary.
        """
        if word not in self._ids:
            raise ValueError(self._unknown(word))
        return self._ids[word]

    @property
    def eos(self) -> int:
        """The id of `<eos>`, which ends each line."""
        return self.id(EOS)

    def encode(
        self, words: Iterable[str], *, unknown: Literal["error", "unk"] = "error"
    ) -> np.ndarray:
        """Turns words into ids.

        Args:
            words: the words, one by one (a text has to be split first).
            unknown: what becomes of a word outside the vocabulary: an error, or `<unk>`'s id.

        Returns:
            ids, int32 [number of words].

        Raises:
            ValueError: a word is not in the vocabulary, or `unknown` is neither of the two.
        """
        if isinstance(words, str):
            raise ValueError(
                f"words should be a sequence of words, got the text {words[:40]!r}: split it first"
            )
        if unknown == "unk":
            get, default = self._ids.get, self.id(UNK)
            return np.fromiter((get(word, default) for word in words), np.int32)
        if unknown != "error":
            raise ValueError(f"unknown should be 'error' or 'unk', got {unknown!r}")
        try:
            return np.fromiter(map(self._ids.__getitem__, words), np.int32)
        except KeyError as error:
            raise ValueError(self._unknown(error.args[0])) from None

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Turns ids into a text: words with a space between, a line break for each `<eos>`.

        Args:
            ids: integers, [number of words].

        Raises:
            ValueError: an id is not one of 0 .. len(self) - 1.
        """
        ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids)).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"an id should be in 0 .. {len(self) - 1}, got {wrong}")
        lines: list[list[str]] = [[]]
        for word in (self.words[i] for i in ids):
            if word == EOS:
                lines.append([])
            else:
                lines[-1].append(word)
        return "\n".join(map(" ".join, lines))

    def to_json(self) -> str:
        """A JSON text that `from_json` reads: the list of words."""
        return json.dumps(self.words, ensure_ascii=False, indent=0)

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: the text is not a JSON list of words.
        """
        try:
            words = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a vocabulary should be a JSON list of words: {error}") from None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("a vocabulary should be a JSON list of words, got something else")
        return cls(tuple(words))

    def _unknown(self, word: str) -> str:
        near = difflib.get_close_matches(word, self.words, n=3)
        if word.lower() in self._ids and word.lower() not in near:
            near = [word.lower(), *near[:2]]
        hint = f"did you mean {' or '.join(map(repr, near))}" if near else "use other words"
        if UNK in self._ids:
            hint += f", or write {UNK} in its place"
        return f"the word {word!r} is not among the vocabulary's {len(self):,} words: {hint}"
