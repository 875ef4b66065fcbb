"""Vocabulary, tokens, corpora from words, and the embedded corpus."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrnn.data import DataError, Vocabulary, load_embedded, read_lines, tokenize
from jaxrnn.data.corpus import make_corpus


def test_words_stand_by_falling_frequency_and_ties_by_first_appearance():
    vocabulary = Vocabulary.build(list("bacadca"))
    assert vocabulary.words == ("a", "c", "b", "d")
    np.testing.assert_array_equal(vocabulary.encode(["d", "a"]), np.array([3, 0], np.int32))
    assert vocabulary.encode([]).dtype == np.int32
    assert len(vocabulary) == 4
    assert "c" in vocabulary
    assert "z" not in vocabulary


@given(st.lists(st.sampled_from("abcdefgh<>"), max_size=40))
def test_fit_encodes_what_it_counts(words):
    vocabulary, ids = Vocabulary.fit(iter(words))
    assert ids.dtype == np.int32
    assert [vocabulary.words[i] for i in ids] == words
    counts = np.bincount(ids, minlength=len(vocabulary))
    assert (np.diff(counts) <= 0).all()
    places = [words.index(word) for word in vocabulary.words]
    assert all(a < b for a, b, c in zip(places, places[1:], np.diff(counts), strict=False) if not c)


def test_decode_breaks_lines_where_encode_saw_them():
    text = ["one two\n", "\n", "\n", "two\n"]
    vocabulary, ids = Vocabulary.fit(tokenize(text))
    assert vocabulary.decode(ids) == "one two\n\n\ntwo\n"
    assert vocabulary.decode(iter([vocabulary.id("two")])) == "two"
    assert vocabulary.decode([]) == ""


def test_json_round_trip():
    vocabulary = Vocabulary(("<eos>", "naïve", '"', "\\"))
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


@pytest.mark.parametrize("text", ["{", "3", '["a", 1]', '{"a": 1}'])
def test_what_is_no_vocabulary_is_refused(text):
    with pytest.raises(ValueError, match="should be a JSON list of words"):
        Vocabulary.from_json(text)


def test_an_unknown_word_is_an_error_with_near_ones_or_unk():
    vocabulary = Vocabulary(("the", "lobster", "<unk>", "lobsters"))
    with pytest.raises(
        ValueError, match=r"'lobstr' is not among .* 4 words: did you mean 'lobster' or 'lobsters'"
    ):
        vocabulary.encode(["the", "lobstr"])
    with pytest.raises(ValueError, match=r"'The' .* did you mean 'the'.*or write <unk>"):
        vocabulary.encode(["The"])
    with pytest.raises(ValueError, match=r"'zzzz' .*: use other words"):
        vocabulary.encode(["zzzz"])
    assert vocabulary.encode(["the", "lobstr"], unknown="unk").tolist() == [0, 2]
    with pytest.raises(ValueError, match="'<unk>' is not among"):
        Vocabulary(("a",)).encode(["b"], unknown="unk")
    with pytest.raises(ValueError, match="'error' or 'unk', got 'skip'"):
        vocabulary.encode(["the"], unknown="skip")
    with pytest.raises(ValueError, match="split it first"):
        vocabulary.encode("the lobster")


def test_other_mistakes_with_a_vocabulary():
    with pytest.raises(ValueError, match="each word once, got 'a' twice"):
        Vocabulary(("b", "a", "a"))
    for ids, wrong in ([0, 2], "2"), ([-1], "-1"):
        with pytest.raises(ValueError, match=rf"in 0 \.\. 1, got {wrong}"):
            Vocabulary(("a", "b")).decode(ids)
    with pytest.raises(ValueError, match="'<eos>' is not among"):
        _ = Vocabulary(("a",)).eos


def test_only_a_line_feed_ends_a_line(tmp_path):
    file = tmp_path / "text"
    file.write_bytes("a\u2028b\x0bc\r d\n\n e".encode())
    assert list(tokenize(read_lines(file))) == [*"abcd", "<eos>", "<eos>", "e", "<eos>"]


def test_text_that_is_not_utf8_is_refused(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match="should be UTF-8 text, but byte 0xe9"):
        list(read_lines(file))
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\): make it readable"):
        list(read_lines(tmp_path))


def test_words_that_only_the_other_splits_have():
    texts = {"train": ["a b", "a"], "valid": ["a c"], "test": ["c d a b"]}
    corpus = make_corpus("x", lambda split: tokenize(texts[split]), "here")
    assert corpus.vocabulary.words == ("a", "<eos>", "b", "<unk>")
    assert corpus.valid.tolist() == [0, 3, 1]
    assert corpus.test.tolist() == [3, 3, 0, 2, 1]
    assert corpus.source == (
        "here, 1 of 3 tokens of valid unknown to train, 2 of 5 tokens of test unknown to train"
    )
    known = make_corpus("x", lambda split: tokenize(["a <unk> b"]), "here")
    assert known.vocabulary.words == ("a", "<unk>", "b", "<eos>")
    assert known.source == "here"


def test_the_standard_library_is_a_corpus_on_every_machine():
    start = time.monotonic()
    corpus = load_embedded()
    assert time.monotonic() - start < 60
    assert corpus.name.startswith("python-stdlib-3.")
    assert 200_000 < corpus.train.size < 2_300_000
    assert 2_000 < len(corpus.vocabulary) <= 30_000
    for ids in corpus.valid, corpus.test:
        assert ids.dtype == np.int32
        assert 0.02 < ids.size / corpus.train.size < 0.12
        assert (ids == corpus.vocabulary.id("<unk>")).mean() < 0.1
    assert "unknown" not in corpus.source
    assert corpus.banner is None


def test_the_embedded_corpus_is_the_same_each_time_and_capped(tmp_path):
    for i in range(60):
        (tmp_path / f"m{i:02}.py").write_text(f"def f_{i}(x):\n    return x == {i % 7}\n\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("skipped " * 9)
    (tmp_path / "dangling.py").symlink_to(tmp_path / "gone.py")
    one, two = (load_embedded(tmp_path, max_train_tokens=300) for _ in range(2))
    assert one.vocabulary == two.vocabulary
    for a, b in zip(one[2:5], two[2:5], strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.vocabulary.decode(one.valid[:13]) == "def <unk> ( x ) :\nreturn x == 2\n\n"
    assert 300 <= one.train.size < 313 < load_embedded(tmp_path).train.size
    assert "skipped" not in one.vocabulary
    assert "f_1" not in one.vocabulary


def test_a_folder_without_python_files_is_no_corpus(tmp_path):
    with pytest.raises(DataError, match="too few Python source files"):
        load_embedded(tmp_path)
