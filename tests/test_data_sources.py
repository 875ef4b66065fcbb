"""load_corpus: folders, TFDS directories, downloads, the fallback, and every way to be wrong."""

import functools
import hashlib
import http.server
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from jaxrnn.data import DataError, load_corpus, sources, wikitext

REAL = next(
    (
        folder
        for folder in (
            os.environ.get("JAXRNN_DATA_DIR"),
            Path(__file__).resolve().parents[2] / "shared" / "data",
        )
        if folder and (Path(folder) / "wikitext-2").is_dir()
    ),
    None,
)
TEXTS = {"train": " = A =\n\n a b <unk> b\n", "valid": " a b\n", "test": " b a <unk>\n\n"}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """No folder is named, TFDS' directory is empty, nothing leaves the machine, Python is small."""
    monkeypatch.delenv("JAXRNN_DATA_DIR", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(wikitext, "URL", "http://127.0.0.1:9/{name}-v1.zip")
    stdlib = sysconfig.get_paths()["stdlib"]
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": f"{stdlib}/asyncio"})


def write(folder, pattern="{}.txt", texts=TEXTS):
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        (folder / pattern.format(split)).write_text(text)
    return folder


@pytest.fixture
def published(monkeypatch):
    """The tiny text passes for WikiText-2."""
    counts = {split: len(text.split()) + text.count("\n") for split, text in TEXTS.items()}
    monkeypatch.setitem(sources.TOKENS, "wikitext-2", counts)


def is_tiny(corpus):
    assert corpus.vocabulary.words == ("<eos>", "=", "b", "A", "a", "<unk>")
    assert corpus.train.tolist() == [1, 3, 1, 0, 0, 4, 2, 5, 2, 0]
    assert corpus.valid.tolist() == [4, 2, 0]
    assert corpus.test.tolist() == [2, 4, 5, 0, 0]
    assert corpus.train.dtype == np.int32
    assert corpus.banner is None
    return True


@pytest.mark.skipif(REAL is None, reason="the WikiText-2 text is not on this machine")
def test_wikitext_2_has_the_published_counts():
    corpus = load_corpus("wikitext-2", REAL)
    counts = [ids.size for ids in (corpus.train, corpus.valid, corpus.test)]
    assert counts == [2_088_628, 217_646, 245_569]
    assert len(corpus.vocabulary) == 33_278
    assert corpus.vocabulary.words[:4] == ("the", ",", ".", "of")
    assert (np.diff(np.bincount(corpus.train)) <= 0).all()
    assert "unknown" not in corpus.source


@pytest.mark.parametrize("pattern", ["{}.txt", "wiki.{}.tokens", "{}.tokens"])
@pytest.mark.parametrize("inner", ["mine", "."])
def test_a_folder_of_text_or_the_one_that_holds_it(tmp_path, monkeypatch, pattern, inner):
    write(tmp_path / "data" / inner, pattern)
    corpus = load_corpus("mine", tmp_path / "data")
    assert is_tiny(corpus)
    assert corpus.name == "mine"
    assert str(tmp_path / "data") in corpus.source
    monkeypatch.setenv("JAXRNN_DATA_DIR", str(tmp_path / "data"))
    assert is_tiny(load_corpus("mine"))
    assert is_tiny(load_corpus("mine", ""))


def test_a_directory_goes_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRNN_DATA_DIR", str(tmp_path / "nowhere"))
    assert is_tiny(load_corpus("mine", write(tmp_path / "data")))
    with pytest.raises(DataError, match="nowhere does not exist"):
        load_corpus("mine")


@pytest.mark.parametrize("name", ["wikitext-2", "mine"])
def test_a_named_folder_that_is_wrong_is_an_error_and_never_a_fallback(tmp_path, name):
    def message():
        with pytest.raises(DataError) as error:
            load_corpus(name, data)
        assert "\n" not in str(error.value)
        return str(error.value)

    data = tmp_path / "data"
    assert f"the data folder {data} does not exist: name" in message()
    data.write_text("")
    assert f"{data} is a file: name the folder" in message()
    data.unlink()
    data.mkdir()
    assert f"holds no {name}: put train.txt, valid.txt and test.txt" in message()
    (data / name).mkdir()
    assert f"holds no {name}: put train.txt" in message()
    write(data / name, texts={"train": "a\n"})
    assert "half-written, it has train but not valid and test: add valid.txt and tes" in message()
    write(data / name, texts={"valid": "a\n", "test": ""})
    assert f"the file {data / name / 'test.txt'} is empty: fetch it again" in message()
    (data / name / "test.txt").write_bytes(b"\xff\n")
    assert "test.txt should be UTF-8 text, but byte 0xff is not" in message() or name != "mine"


def test_a_text_of_another_length_is_not_wikitext(tmp_path):
    write(tmp_path / "wikitext-2")
    with pytest.raises(
        DataError,
        match=r"train of wikitext-2 from the folder .* has 10 tokens where 2,088,628 are published,"
        " so it is half-written or another text: fetch it again, or call",
    ):
        load_corpus("wikitext-2", tmp_path)


def test_a_name_that_nobody_knows():
    with pytest.raises(DataError, match="no folder was named for the data set 'mine' and only"):
        load_corpus("mine")


def test_tfds_builds_from_a_folder_and_any_part_of_its_path_is_found(tmp_path, published):
    version = wikitext.prepare("wikitext-2", source=write(tmp_path / "text"), data_dir=tmp_path)
    for folder in (version, version.parent, version.parent.parent, tmp_path):
        corpus = load_corpus("wikitext-2", folder)
        assert is_tiny(corpus)
        assert corpus.source == f"the TFDS directory {version}"
    assert list(wikitext.read_prepared(version, "train")) == TEXTS["train"].split("\n")[:-1]
    # What TFDS prepared in its own directory is used without a network.
    wikitext.prepare(
        "wikitext-2", source=tmp_path / "text", data_dir=Path(os.environ["TFDS_DATA_DIR"])
    )
    assert is_tiny(load_corpus())
    record = next(version.glob("*validation*"))
    record.write_bytes(record.read_bytes()[:100])
    with pytest.raises(DataError, match="valid cannot be read from the TFDS directory"):
        load_corpus("wikitext-2", version)


@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_tfds_needs_no_tensorflow(tmp_path):
    program = """
import sys
from pathlib import Path

import jaxrnn.data
assert not {"tensorflow_datasets", "grain"} & set(sys.modules)
if "jax" in sys.modules:
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized()
from jaxrnn.data import wikitext
folder = Path(sys.argv[1])
version = wikitext.prepare("wikitext-2", source=folder, data_dir=folder / "tfds")
corpus = jaxrnn.data.load_corpus("mine", version)
assert corpus.train.tolist() == [1, 3, 1, 0, 0, 4, 2, 5, 2, 0], corpus
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, write(tmp_path)], check=True)


def test_without_the_data_and_a_network_there_is_the_standard_library():
    corpus = load_corpus()
    assert corpus.name.startswith("python-stdlib-3.")
    assert corpus.banner.startswith("This is not wikitext-2.")
    for part in ("127.0.0.1:9/wikitext-2-v1.zip could not be reached", corpus.name,
                 "wikitext-2/train.txt", "JAXRNN_DATA_DIR", "data.dir"):  # fmt: skip
        assert part in corpus.banner
    assert "a download was not asked for" in load_corpus(download=False).banner
    for name in ("python-stdlib", corpus.name):
        asked_for = load_corpus(name)
        assert asked_for.banner is None
        assert asked_for.name == corpus.name


def test_a_server_that_is_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(sources, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{{name}}"
        monkeypatch.setattr(wikitext, "URL", url)
        assert "not answer within" in (banner := load_corpus().banner) or "timed out" in banner


def test_without_tfds_the_reason_is_said(tmp_path, monkeypatch):
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    assert "the package tensorflow-datasets, which downloads it, is not" in load_corpus().banner
    with pytest.raises(DataError, match=r"which reads it, is not installed: run `pip install"):
        load_corpus("wikitext-2", tmp_path)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves the tiny text as WikiText-2's archive, and has TFDS expect its checksum."""
    folder = tmp_path / "served"
    folder.mkdir()
    with zipfile.ZipFile(folder / "wikitext-2-v1.zip", "w") as archive:
        for split, text in TEXTS.items():
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", text)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/{{name}}-v1.zip"
        monkeypatch.setattr(wikitext, "URL", url)
        data = (folder / "wikitext-2-v1.zip").read_bytes()
        info = tfds.core.download.checksums.UrlInfo(
            size=len(data), checksum=hashlib.sha256(data).hexdigest(), filename=None
        )
        monkeypatch.setattr(wikitext.Wikitext, "url_infos", {url.format(name="wikitext-2"): info})
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield folder / "wikitext-2-v1.zip"
        server.shutdown()
        thread.join()


def test_a_download_is_prepared_once(server, published):
    corpus = load_corpus()
    assert is_tiny(corpus)
    assert corpus.name == "wikitext-2"
    server.unlink()
    assert is_tiny(load_corpus())


def test_a_download_with_another_checksum_is_refused(server, published):
    with server.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="does not have the published SHA-256, so it was not used"):
        load_corpus()


def test_a_server_that_refuses_is_a_reason_for_the_banner(server):
    server.unlink()
    assert "the download failed (Failed to get url" in load_corpus().banner


def test_a_full_disk_is_said(server, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wikitext.Wikitext, "download_and_prepare", full)
    with pytest.raises(DataError, match=r"could not be written .*No space left on device.*: make"):
        load_corpus()


def test_the_checksums_of_the_archives_are_known():
    infos = wikitext.Wikitext.url_infos
    url = "https://wikitext.smerity.com/{}-v1.zip"
    assert set(infos) == {url.format("wikitext-2"), url.format("wikitext-103")}
    assert all(len(info.checksum) == 64 for info in infos.values())
