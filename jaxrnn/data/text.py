"""Lines of text into tokens, as WikiText's authors count them: words, and one `<eos>` a line."""

import itertools
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxrnn.data.errors import DataError
from jaxrnn.data.vocabulary import EOS


def read_lines(path: str | Path | zipfile.Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, one at a time: WikiText-103 need not fit in memory.

    Only a line feed ends a line; the published counts do not know any other.

    Args:
        path: the file, which may lie in a zip archive.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        path = Path(path) if isinstance(path, str) else path
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} should be UTF-8 text, but byte {error.object[error.start]:#04x} is not:"
            " convert it, or name the folder of another text"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): make it readable, or name another folder"
        ) from error


def tokenize(lines: Iterable[str]) -> Iterator[str]:
    """Yields the words of each line, split at white space, and `<eos>` after each line."""
    end = [EOS]
    return itertools.chain.from_iterable(line.split() + end for line in lines)
