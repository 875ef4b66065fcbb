"""WikiText as a TFDS data set of lines, built and read without TensorFlow.

Importing this file registers the builder, so `tfds.load("wikitext/wikitext-2")` finds it. It is the
only file that imports TFDS; `jaxrnn.data` imports it when it is needed.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
from tensorflow_datasets.core.download.util import DownloadError

from jaxrnn.data import folders, text
from jaxrnn.data.errors import DataError

# A mirror by the first author of the paper; the archive is the one that the paper's own address
# had, which no longer answers. Its size and SHA-256 are in checksums.tsv, where TFDS looks for it.
URL = "https://wikitext.smerity.com/{name}-v1.zip"

# What a network that does not work raises.
NETWORK_ERRORS = (requests.RequestException, DownloadError)

# Lines read at once: one at a time takes longer than all else.
_READ = 1024

# TFDS' names of the splits.
_SPLITS = {"train": "train", "valid": "validation", "test": "test"}


class Wikitext(tfds.core.GeneratorBasedBuilder):
    """The WikiText language modelling data sets, word level, one example a line.

    Merity et al. 2016, "Pointer Sentinel Mixture Models", arXiv:1609.07843.
    """

    # TFDS 4.9.10 would look it up with importlib_resources, which it does not depend on.
    code_path = epath.Path(__file__)

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The lines as published."}  # noqa: RUF012
    BUILDER_CONFIGS = [  # noqa: RUF012
        tfds.core.BuilderConfig(name="wikitext-2", description="2 million training tokens."),
        tfds.core.BuilderConfig(name="wikitext-103", description="103 million training tokens."),
    ]

    def __init__(
        self, *, source: str | Path | None = None, file_format: str = "array_record", **kwargs: Any
    ):
        """Makes a builder; `download_and_prepare` does the work.

        Args:
            source: a folder with the three text files, see `folders.split_files`. If None, the
                archive is downloaded and checked against its SHA-256.
            file_format: array_record is what TFDS reads without TensorFlow.
            **kwargs: as any TFDS builder takes them: `config`, `data_dir`, `version`.
        """
        self._source = None if source is None else Path(source)
        super().__init__(file_format=file_format, **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Verified Good and Featured articles of the English Wikipedia.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://arxiv.org/abs/1609.07843",
            license="CC BY-SA 3.0",
            # The order of the lines is the text.
            disable_shuffling=True,
            citation=(
                "@article{merity2016pointer, title={Pointer Sentinel Mixture Models},"
                " author={Stephen Merity and Caiming Xiong and James Bradbury and Richard Socher},"
                " journal={arXiv:1609.07843}, year={2016}}"
            ),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager):
        assert self.builder_config is not None  # There are BUILDER_CONFIGS.
        name = self.builder_config.name
        if self._source is not None:
            files = folders.split_files(self._source, name)
        else:
            # Read where it lies: TFDS unpacks with TensorFlow.
            archive = dl_manager.download(URL.format(name=name))
            members = {split: f"{name}/wiki.{split}.tokens" for split in _SPLITS}
            files = {split: zipfile.Path(archive, member) for split, member in members.items()}
        return {_SPLITS[split]: self._generate_examples(file) for split, file in files.items()}

    def _generate_examples(self, path: Path | zipfile.Path):
        for number, line in enumerate(text.read_lines(path)):
            yield number, {"text": line.removesuffix("\n")}


def prepare(name: str, *, source: str | Path | None = None, data_dir: str | Path) -> Path:
    """Builds the data set in a TFDS data directory, if it is not there yet.

    Args:
        name: "wikitext-2" or "wikitext-103".
        source: a folder of text files to build it from; a download if None.
        data_dir: the TFDS data directory.

    Returns:
        the directory of the prepared version, for `read_prepared`.

    Raises:
        DataError: the archive is not the published one, or the disk refuses.
        NETWORK_ERRORS: the archive cannot be had.
    """
    try:
        builder = Wikitext(config=name, data_dir=data_dir, source=source)
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(
                force_checksums_validation=True, try_download_gcs=False
            )
        )
    except NonMatchingChecksumError:
        raise DataError(
            f"the archive from {URL.format(name=name)} does not have the published SHA-256, so it"
            " was not used: try again, or name a folder of text files as data.dir"
        ) from None
    except NETWORK_ERRORS:
        raise
    except OSError as error:
        raise DataError(
            f"{name} could not be written to {data_dir} ({error}): make room there, or set"
            " TFDS_DATA_DIR to another folder"
        ) from error
    return Path(builder.data_path)


def read_prepared(directory: Path, split: str) -> Iterator[str]:
    """Yields the lines of a split, "train", "valid" or "test", of a prepared data set, in order.

    Raises:
        DataError: the directory lacks the split, or cannot be read.
    """
    try:
        builder: Any = tfds.builder_from_directory(directory)  # Its decorators hide its types.
        lines = builder.as_data_source(split=_SPLITS[split])
        for start in range(0, len(lines), _READ):
            numbers = range(start, min(start + _READ, len(lines)))
            for example in lines.__getitems__(numbers):
                yield example["text"].decode()
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"{split} cannot be read from the TFDS directory {directory}"
            f" ({' '.join(str(error).split())[:200]}): prepare it again with a builder of the"
            " array_record format, or name a folder of text files"
        ) from error
