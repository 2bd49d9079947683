"""How long a text is and how many words it has: the lower bound of the vocabulary that it supports."""

import gzip
from pathlib import Path

import pytest

from megalite.data.chat.text_size import measure_text
from megalite.data.text.corpus import DocumentPiece
from megalite.data.tokenizers.tokenizer_training import train_bpe
from megalite.errors import DataError


@pytest.mark.parametrize(
    "text",
    [
        "the cat's hat; the CAT sat! don't it's\n" * 50,
        "Straße über naïve 数学 物理 数学\n" * 20,
        "def f(x_1, y2): return x_1**2 + y2\n" * 30,
        "12345 !!! ---\n" * 9,
    ],
)
def test_a_tokenizer_of_a_token_a_word_can_be_trained(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = measure_text([str(tmp_path / "a.txt")])
    assert (found.characters, found.documents) == (len(text), 1)
    size = 257 + found.words
    assert train_bpe([DocumentPiece(text, ends_document=True)], size).get_vocab_size() == size


def test_a_long_text_is_estimated_from_its_beginning(tmp_path: Path) -> None:
    line = "one two three four\n"
    (tmp_path / "a.txt").write_text(line * 500_000)
    found = measure_text([str(tmp_path / "a.txt")])
    assert 0.7 * len(line) * 500_000 < found.characters <= len(line) * 500_000
    assert found.words == 4
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"five six\n\n"))
    both = measure_text([str(tmp_path / "b.txt.gz"), str(tmp_path / "a.txt")])
    assert (both.words, both.documents) == (6, 2)


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        measure_text([str(tmp_path / "none.txt")])
