"""The corpus that every machine carries: the sources of its own Python standard library."""

import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jaxrnn.data.corpus import Corpus, make_corpus
from jaxrnn.data.errors import DataError
from jaxrnn.data.text import tokenize
from jaxrnn.data.vocabulary import EOS, UNK

NAME = f"python-stdlib-{sys.version_info.major}.{sys.version_info.minor}"

# As large as WikiText-2, so that a run on it takes as long.
MAX_TRAIN_TOKENS = 2_000_000

_MIN_COUNT = 3
_MAX_WORDS = 30_000

# Tests repeat themselves, the encodings are tables, pydoc_data is generated, and the rest is not
# the library's or not there on every machine.
_SKIPPED = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

# A word, or a run of one and the same sign: `==`, `"""`, `...` are one token each.
_TOKEN = re.compile(r"\w+|([^\w\s])\1*")


def load_embedded(
    directory: str | Path | None = None,
    *,
    max_train_tokens: int = MAX_TRAIN_TOKENS,
    banner: str | None = None,
) -> Corpus:
    """Reads Python sources as a corpus: one `<eos>` a line, rare words as `<unk>`.

    Files are taken in the order of their names. Of each 20 files, one goes to valid and one to
    test, until train has `max_train_tokens`. The vocabulary is the words that train has three
    times or more, 30,000 at most. The same files give the same corpus.

    Args:
        directory: the folder with the sources; the standard library's by default.
        max_train_tokens: stop after the file that reaches so many.
        banner: what the user is to be told.

    Raises:
        DataError: there are not enough Python files.
    """
    directory = Path(directory or sysconfig.get_paths()["stdlib"])
    texts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for number, file in enumerate(_sources(directory)):
        split = {9: "valid", 19: "test"}.get(number % 20, "train")
        texts[split] += _tokens(file)
        if len(texts["train"]) >= max_train_tokens:
            break
    if not all(texts.values()):
        raise DataError(
            f"{directory} has too few Python source files for an embedded corpus: name a folder"
            " with train.txt, valid.txt and test.txt as data.dir"
        )
    counts = Counter(texts["train"]).most_common(_MAX_WORDS - 2)
    kept = {word for word, count in counts if count >= _MIN_COUNT} | {EOS}
    return make_corpus(
        NAME,
        lambda split: (word if word in kept else UNK for word in texts[split]),
        f"the Python sources in {directory}",
        banner,
    )


def _sources(directory: Path) -> Iterator[Path]:
    """The Python files of a folder and those in it, by name, without what is skipped."""
    for path in sorted(directory.glob("*"), key=lambda path: path.name):
        if path.name in _SKIPPED or path.name.startswith(_SKIPPED_PREFIXES):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def _tokens(file: Path) -> list[str]:
    """The tokens of one source file."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return list(tokenize(_spaced(line) for line in text.splitlines()))


def _spaced(line: str) -> str:
    """The line with a space between its tokens."""
    return " ".join(match[0] for match in _TOKEN.finditer(line))
