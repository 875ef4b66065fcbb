"""Where the text comes from: a folder, a download, or this machine's own Python sources."""

import importlib.util
import os
import threading
import urllib.error
import urllib.request
from pathlib import Path

from jaxrnn.data import embedded, folders, text
from jaxrnn.data.corpus import TOKENS, Corpus, make_corpus
from jaxrnn.data.errors import DataError

# Seconds to wait for the data set's server. Without a network the user should not wait for long.
_PATIENCE = 5.0


def load_corpus(
    name: str = "wikitext-2", directory: str | Path | None = None, *, download: bool = True
) -> Corpus:
    """Loads a corpus from the first place that has it.

    1. `directory`, or else the environment variable `JAXRNN_DATA_DIR`. It holds a folder of the
       corpus' name, or is that folder, with {train,valid,test}.txt, or with
       wiki.{train,valid,test}.tokens; or it is a TFDS data directory, or a part of one. If it is
       named, it has to be right.
    2. For "wikitext-2" and "wikitext-103": what TFDS has prepared before in its data directory,
       or a download into it, with its checksum verified.
    3. For these two: the standard library's sources on this machine, with a banner that says so.

    Args:
        name: "wikitext-2", "wikitext-103", or the name of a folder of text. "python-stdlib" is the
            third step by name, without a banner; no folder is looked at.
        directory: the folder; "" and None are the same.
        download: whether step 2 may use the network.

    Raises:
        DataError: the named folder is missing, half-written or holds another text than its name
            says, or there is no such corpus anywhere.
    """
    if name in ("python-stdlib", embedded.NAME):
        return embedded.load_embedded()
    named = directory or os.environ.get("JAXRNN_DATA_DIR")
    if named:
        return _load_found(name, folders.find(named, name))
    if name not in TOKENS:
        raise DataError(
            f"no folder was named for the data set {name!r} and only {' and '.join(TOKENS)} can be"
            " downloaded: name (data.dir or JAXRNN_DATA_DIR) a folder that holds"
            f" {name}/train.txt, valid.txt and test.txt"
        )
    prepared, reason = _prepared_or_downloaded(name, download)
    if prepared is not None:
        return _load_found(name, prepared)
    return embedded.load_embedded(banner=_banner(name, reason))


def _load_found(name: str, found: Path | dict[str, Path]) -> Corpus:
    """Loads what `folders.find` found."""
    if isinstance(found, dict):
        folder = found["train"].parent
        return make_corpus(
            name, lambda split: text.tokenize(text.read_lines(found[split])), f"the folder {folder}"
        )
    _need_tfds(found)
    from jaxrnn.data import wikitext

    return make_corpus(
        name,
        lambda split: text.tokenize(wikitext.read_prepared(found, split)),
        f"the TFDS directory {found}",
    )


def _prepared_or_downloaded(name: str, download: bool) -> tuple[Path | None, str]:
    """The TFDS directory of a data set, or None and the reason why there is none."""
    data_dir = Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    if prepared := folders.prepared_version(data_dir, name):
        return prepared, ""
    if not download:
        return None, "a download was not asked for"
    if importlib.util.find_spec("tensorflow_datasets") is None:
        return None, "the package tensorflow-datasets, which downloads it, is not installed"
    from jaxrnn.data import wikitext

    if reason := _unreachable(wikitext.URL.format(name=name)):
        return None, reason
    try:
        return wikitext.prepare(name, data_dir=data_dir), ""
    except wikitext.NETWORK_ERRORS as error:
        return None, f"the download failed ({' '.join(str(error).split())[:200]})"


def _need_tfds(found: Path):
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise DataError(
            f"{found} is a TFDS directory and the package tensorflow-datasets, which reads it, is"
            " not installed: run `pip install 'jaxrnn[train]'`, or name a folder of text files"
        )


def _unreachable(url: str) -> str | None:
    """Why an address does not answer, or None if it does; within seconds.

    TFDS tries ten times, without a time limit of its own. A name server that is silent is not bound
    by the socket's time limit either, so the question is put from a thread that can be left behind.
    """
    answer = [f"{url} did not answer within {_PATIENCE:.0f} seconds"]

    def ask():
        try:
            with urllib.request.urlopen(url, timeout=_PATIENCE):
                answer[0] = ""
        except urllib.error.HTTPError:
            answer[0] = ""  # It answers; what it says to TFDS is TFDS' business.
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            answer[0] = f"{url} could not be reached ({reason})"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answer[0] or None


def _banner(name: str, reason: str) -> str:
    return (
        f"This is not {name}. No folder was named and {reason}, so the corpus is {embedded.NAME}:"
        " the sources of the Python standard library on this machine. Its perplexities cannot be"
        f" compared with those of {name}.\n"
        f"For the real {name}, name a folder that holds {name}/train.txt, valid.txt and test.txt"
        " (--config.data.dir=FOLDER or JAXRNN_DATA_DIR), or run this once with a network."
    )
