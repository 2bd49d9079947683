"""Documents from every kind of source are the same, and bad sources are named."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megalite.cli import main
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.errors import DataError
from megalite.evaluate.documents import Document, TextSource, count_words, documents
from tests.support.tiny import tiny_corpus, tiny_tokenizer

VOCABULARY = 384


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(tiny_tokenizer(tmp_path))


def read(source: Path, tokenizer: Tokenizer, **settings: str) -> list[Document]:
    return list(documents(TextSource((str(source),), **settings), tokenizer, VOCABULARY))


def test_every_kind_of_source_has_the_same_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = tiny_corpus(5)
    rows = tmp_path / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": each, "body": each}) + "\n" for each in texts))
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    (folder / "other.md").write_text("nothing to score")
    table = tmp_path / "texts.parquet"
    parquet.write_table(pyarrow.table({"body": texts}), table)
    prepare = [
        "--source",
        str(rows),
        "--tokenizer",
        str(tokenizer.file),
        "--output",
        str(tmp_path / "prepared"),
    ]
    assert main(["data", "prepare", "--workers", "0", *prepare]) == 0
    expected = [tokenizer.encode(text) for text in texts]
    for found in (
        read(rows, tokenizer),
        read(folder, tokenizer, pattern="*.txt"),
        read(table, tokenizer, text_column="body"),
        read(tmp_path / "prepared", tokenizer),
    ):
        assert [document.ids.tolist() for document in found] == expected
        assert [(each.words, each.bytes) for each in found] == [
            (count_words(text), len(text.encode())) for text in texts
        ]


def test_only_the_trained_tokens_of_conversations_count(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = tmp_path / "talks.jsonl"
    rows.write_text(json.dumps({"prompt": "the tensor", "completion": "waits for its peers"}) + "\n")
    chat = ["--kind", "instruct", "--chat-template", "plain", "--sequence-length", "64", "--workers", "0"]
    files = ["--source", str(rows), "--tokenizer", str(tokenizer.file), "--output", str(tmp_path / "talks")]
    assert main(["data", "prepare", *chat, *files]) == 0
    [found] = read(tmp_path / "talks", tokenizer)
    assert found.counted is not None
    assert (
        tokenizer.decode(found.ids[found.counted].tolist(), skip_special_tokens=True) == "waits for its peers"
    )
    assert (found.words, found.bytes) == (4, len("waits for its peers"))


def test_words_are_counted_as_lm_eval_does() -> None:
    import re

    for text in ("", "one", " one two\n", "one  two\tthree"):
        assert count_words(text) == len(re.split(r"\s+", text))


def test_a_bad_source_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: no column 'text' .*--text-column"):
        read(rows, tokenizer)
    with pytest.raises(DataError, match=r"--data: .*absent does not exist"):
        read(tmp_path / "absent", tokenizer)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"--data: .*empty\.txt has no tokens to score"):
        read(tmp_path / "empty.txt", tokenizer)
    (tmp_path / "bytes.txt").write_bytes(b"one \xff two")
    with pytest.raises(DataError, match=r"bytes\.txt, line 1: .*UTF-8"):
        read(tmp_path / "bytes.txt", tokenizer)


def test_a_token_file_of_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "book.txt").write_text("".join(tiny_corpus(3)))
    other = tmp_path / "other"
    other.mkdir()
    tiny_tokenizer(other, vocab_size=300)
    prepare = [
        "--source",
        str(tmp_path / "book.txt"),
        "--tokenizer",
        str(other),
        "--output",
        str(tmp_path / "p"),
    ]
    assert main(["data", "prepare", "--workers", "0", *prepare]) == 0
    with pytest.raises(DataError, match=r"was prepared with .*name the text itself"):
        read(tmp_path / "p", tokenizer)
    # Another program's file, which does not say its tokenizer.
    (tmp_path / "p.json").unlink()
    largest = max(int(np.max(each.ids)) for each in read(tmp_path / "p", tokenizer))
    with pytest.raises(
        DataError, match=rf"p\.bin, document 0: id {largest} is outside .*vocabulary of {largest}"
    ):
        list(documents(TextSource((str(tmp_path / "p"),)), tokenizer, largest))
