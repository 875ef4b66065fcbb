"""Where a data set lies in a folder that somebody named: text files, or what TFDS prepared."""

import re
from pathlib import Path

from jaxrnn.data.errors import DataError

SPLITS = ("train", "valid", "test")

# The file names of one split, the first one found is taken: ours, and WikiText's own.
_NAMES = ("{split}.txt", "wiki.{split}.tokens", "{split}.tokens")


def find(directory: str | Path, name: str) -> Path | dict[str, Path]:
    """Finds the data set `name` in a folder, or in the folder of that name in it.

    Args:
        directory: the folder that was named.
        name: the data set, such as "wikitext-2".

    Returns:
        {split: file} for text files, or the directory of a prepared TFDS data set's version.

    Raises:
        DataError: there is no such folder, or no such data set in it, or only a part of one.
    """
    directory = Path(directory).expanduser()
    wanted = f"{directory / name} with train.txt, valid.txt and test.txt"
    if not directory.exists():
        raise DataError(
            f"the data folder {directory} does not exist: name (data.dir or JAXRNN_DATA_DIR) a"
            f" folder that holds the texts, as in {wanted}, or leave it out to use what there is"
        )
    if not directory.is_dir():
        raise DataError(
            f"the data folder {directory} is a file: name the folder that holds it, with"
            " train.txt, valid.txt and test.txt in it"
        )
    if prepared := prepared_version(directory, name):
        return prepared
    return split_files(directory, name)


def split_files(folder: Path, name: str) -> dict[str, Path]:
    """The text file of each split, in the folder `name` of `folder` or else in `folder` itself.

    Raises:
        DataError: there is none of the files, or one is missing or empty.
    """
    if (folder / name).is_dir():
        folder = folder / name
    found = {}
    for split in SPLITS:
        files = [folder / pattern.format(split=split) for pattern in _NAMES]
        if file := next(filter(Path.is_file, files), None):
            found[split] = file
    missing = [split for split in SPLITS if split not in found]
    empty = [file for file in found.values() if not file.stat().st_size]
    if not found:
        raise DataError(
            f"the folder {folder} holds no {name}: put train.txt, valid.txt and test.txt (or"
            f" wiki.train.tokens and so on) into {folder if folder.name == name else folder / name}"
        )
    if missing:
        raise DataError(
            f"the data set in {folder} is half-written, it has {' and '.join(found)} but not"
            f" {' and '.join(missing)}: add {' and '.join(f'{split}.txt' for split in missing)}"
        )
    if empty:
        raise DataError(f"the file {empty[0]} is empty: fetch it again, or write the text into it")
    return found


def prepared_version(directory: Path, name: str) -> Path | None:
    """The newest prepared version of `name` in a TFDS data directory, or in a part of its path.

    TFDS writes DATA_DIR/wikitext/wikitext-2/1.0.0; any of the four may have been named.
    """
    for place in (directory, directory / name, directory / "wikitext" / name):
        if (place / "dataset_info.json").is_file():
            return place
        versions = [path.parent for path in place.glob("*.*.*/dataset_info.json")]
        if versions:
            return max(versions, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    return None
