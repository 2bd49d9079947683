"""Which documents come out of which sources, and what is said about bad ones."""

import gzip
import json
import os
import re
import sysconfig
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from megalite.data.text.corpus import PIECE_CHARACTERS, Corpus, cut_document, cut_point
from megalite.data.text.source_files import SourceFile
from megalite.errors import DataError
from megalite.monitor import work
from megalite.monitor.work import Work

# Llama 3's pre-tokenizer, as in its tokenizer.json.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

PARTS = ("a", "bc", "é本", "7", ";", "'s", " ", "\n", "\r\n", "\t", " \n", "\n ", "a\nb", ";\na", "a b")
TEXT = st.lists(st.sampled_from(PARTS), max_size=30).map("".join)


def documents(corpus: Corpus) -> Iterator[str]:
    parts: list[str] = []
    for piece, _ in corpus.pieces():
        parts.append(piece.text)
        if piece.ends_document:
            yield "".join(parts)
            parts = []
    assert not parts


def read(*sources: Path | str, text_column: str = "text", pattern: str = "*") -> list[str]:
    return list(
        documents(Corpus.open([str(each) for each in sources], text_column=text_column, pattern=pattern))
    )


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = "first line\r\nsecond: ü 本\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == [text]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n')
    assert read(tmp_path / "a.txt", tmp_path / "a.jsonl") == ["hello", "hello"]


def test_a_folder_is_one_document_a_file_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("c.txt", "a.txt", "b/z.txt", "a.md", ".hidden.txt", ".git/config.txt"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.md", "a.txt", "b/z.txt", "c.txt"]
    assert read(tmp_path, pattern="*.txt") == ["a.txt", "b/z.txt", "c.txt"]


def test_a_jsonl_is_one_document_a_line(tmp_path: Path) -> None:
    rows = [{"text": "one\ntwo"}, {"text": ""}, {"text": "drei", "id": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read(tmp_path / "a.jsonl") == ["one\ntwo", "drei"]


def test_gzip_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed text"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"body": "packed line"}\n'))
    assert read(tmp_path / "a.txt.gz", tmp_path / "a.jsonl.gz", text_column="body") == [
        "packed text",
        "packed line",
    ]


def test_the_standard_library_is_its_sources_without_installed_packages() -> None:
    corpus = Corpus.open(["stdlib"])
    root = Path(sysconfig.get_path("stdlib")).resolve()
    names = [file.path.relative_to(root).as_posix() for file in corpus.files]
    assert names == sorted(names)
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or not name.endswith(".py")]
    assert corpus.size_bytes > 5_000_000
    # Tests and tables teach nothing but themselves.
    assert not [
        name for name in names if "/test" in f"/{name}" and "unittest" not in name and "doctest" not in name
    ]
    assert not [
        name for name in names if name.startswith(("encodings/", "pydoc_data/")) or "entities" in name
    ]


def test_library_files_that_are_not_utf8_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.py").write_text("pass\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert read("stdlib") == ["pass\n"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"good\nb\xffad\n", r"a\.txt, line 2: not UTF-8 \(byte 0xff\); convert"),
        ("a.txt", b"cut off: \xc3", r"a\.txt, line 1: not UTF-8"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"txt": "b"}\n',
            r"line 2: no column 'text' \(columns: \['txt'\]\); set data\.text",
        ),
        ("a.jsonl", b'{"text": "a"}\n\n[1]\n', r"line 3: no column 'text' .*not an object"),
        ("a.jsonl", b'{"text": 5}\n', r"line 1: column 'text' holds int, not text"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', r"line 2: not JSON .*fix"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: not UTF-8"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', r"line 1: half a surrogate pair"),
        ("a.txt.gz", b"not gzip at all", r"a\.txt\.gz is not a whole gzip file"),
        ("a.txt", b"good\nb\0ad\n", r"a\.txt, line 2: a null character, .*iconv -f utf-16 .*leave it out"),
        ("a.txt", "utf-16".encode("utf-16-le") * 9, r"a\.txt, line 1: a null character"),
        ("a.txt", b"PAR1....", r"a\.txt is a parquet file; call it \.parquet, or leave it out"),
        ("a.txt", gzip.compress(b"text"), r"a\.txt is a gzip file; call it \.gz"),
        ("a.jsonl", b"PK\x03\x04...", r"a\.jsonl is a zip file; unpack it"),
        ("a.txt", b"\x28\xb5\x2f\xfd...", r"a\.txt is a zstandard file; unpack it"),
        (
            "a.txt.gz",
            gzip.compress(os.urandom(1000).hex().encode())[:-200],
            r"a\.txt\.gz is not a whole gzip file",
        ),
    ],
)
def test_bad_files_are_named_with_line_and_remedy(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        read(tmp_path / name)


def test_the_line_of_a_bad_byte_is_right_in_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\n" * 600_000 + b"\xff")
    with pytest.raises(DataError, match="line 600001:"):
        read(tmp_path / "a.txt")


def test_missing_and_empty_sources_say_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^--source: .*nowhere\.txt does not exist; name a text file"):
        read(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"no file that matches '\*'; set data\.pattern"):
        read(tmp_path)
    (tmp_path / "x.idx").write_bytes(b"")
    with pytest.raises(DataError, match="prepared token file, not text"):
        read(tmp_path / "x")
    with pytest.raises(DataError, match="--source: no source is given"):
        read()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("secret")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DataError, match=r"a\.txt cannot be read \(Permission denied\)"):
        read(tmp_path / "a.txt")


def test_positions_end_at_the_size_of_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n' * 1000))
    corpus = Corpus.open([str(tmp_path)])
    positions = [place.bytes_read for _, place in corpus.pieces()]
    assert positions == sorted(positions) and positions[-1] == corpus.size_bytes


def test_reading_goes_on_from_any_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 120_000)
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n' * 5)
    (tmp_path / "c.txt").write_text("c")
    corpus = Corpus.open([str(tmp_path)])
    whole = list(corpus.pieces())
    assert len({place for _, place in whole}) == len(whole) > 8
    for index, (_, place) in enumerate(whole, start=1):
        assert list(corpus.pieces(after=place)) == whole[index:]


def test_the_content_is_known_again_elsewhere(tmp_path: Path) -> None:
    def fingerprint(folder: str, text_column: str = "text") -> str:
        return Corpus.open([str(tmp_path / folder)], text_column=text_column).content_fingerprint

    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("text")
    os.utime(tmp_path / "there" / "a.txt", ns=(1, 1))
    seen = [fingerprint("here")]
    assert fingerprint("there") == seen[0]
    seen.append(fingerprint("here", "body"))
    (tmp_path / "there" / "a.txt").write_text("next")  # as long as before
    seen.append(fingerprint("there"))
    (tmp_path / "there" / "a.txt").rename(tmp_path / "there" / "a.jsonl")
    seen.append(fingerprint("there"))
    assert len(set(seen)) == len(seen)


def test_a_text_that_takes_long_to_compare_is_named_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = threading.Event()
    text, content_hash = Work.text, SourceFile.content_hash

    def shown(self: Work) -> str:
        drawn.set()
        return text(self)

    def slow(self: SourceFile) -> str:
        assert drawn.wait(10)
        return content_hash(self)

    monkeypatch.setattr(work, "LINE_SECONDS", 0.001)
    monkeypatch.setattr(Work, "text", shown)
    monkeypatch.setattr(SourceFile, "content_hash", slow)
    (tmp_path / "a.txt").write_text("text")
    assert Corpus.open([str(tmp_path)], key="data.source").content_fingerprint
    line = "data.source: reading 0.0 kB to compare the text by its content: "
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("content", ["", " \n\t\n", "\ufeff\n"])
def test_a_blank_text_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    corpus = Corpus.open([str(tmp_path)], key="data.source")
    with pytest.raises(
        DataError, match=r"^data\.source: .* has no text \(1 file with \d bytes, nothing but white"
    ):
        corpus.require_text()
    (tmp_path / "b.txt").write_text("b")
    Corpus.open([str(tmp_path)]).require_text()


def test_messages_have_the_paths_that_the_user_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    for source in ("texts", "texts/a.txt"):
        with pytest.raises(DataError, match=r"^texts/a\.txt, line 1: not UTF-8"):
            read(source)
    with pytest.raises(DataError, match=r"^--source: texts has no file that matches '\*\.md'"):
        read("texts", pattern="*.md")


def test_the_stat_fingerprint_sees_every_change(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")

    def fingerprint(text_column: str = "text") -> str:
        return Corpus.open([str(tmp_path)], text_column=text_column).stat_fingerprint

    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    seen.append(fingerprint("body"))
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    seen.append(fingerprint())
    (tmp_path / "b.txt").write_text("more")
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


@given(TEXT, st.lists(st.integers(0, 80), max_size=5), st.integers(2, 30))
def test_pieces_are_the_document_however_it_was_read(text: str, cuts: list[int], limit: int) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    blocks = [text[start:stop] for start, stop in pairwise(edges)]
    pieces = list(cut_document(blocks, limit))
    assert pieces == list(cut_document([text], limit))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= limit for piece in pieces)
    assert [piece.ends_document for piece in pieces] == ([False] * (len(pieces) - 1) + [True] if text else [])


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3], ids=["gpt2", "llama3"])
@settings(max_examples=300)
@given(text=TEXT.filter(lambda text: len(text) > 2), data=st.data())
def test_no_word_of_a_pre_tokenizer_spans_a_cut(pattern: str, text: str, data: st.DataObject) -> None:
    limit = data.draw(st.integers(2, len(text) - 1))
    cut = cut_point(text, limit)
    splitter = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    if cut < limit or re.fullmatch(r"\S\n\S", text[cut - 2 : cut + 1]):  # else there was no good place
        words = [word for part in (text[:cut], text[cut:]) for word, _ in splitter.pre_tokenize_str(part)]
        assert words == [word for word, _ in splitter.pre_tokenize_str(text)]


def test_a_long_line_is_cut_before_a_word() -> None:
    assert cut_point("one two three four", 15) == len("one two three")
    assert cut_point("x" * 50, 20) == 20


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    line = ("some words in a line of text " * 4 + "\n").encode()
    (tmp_path / "a.txt").write_bytes(line * 300_000)  # 35 MB
    corpus = Corpus.open([str(tmp_path / "a.txt")])
    tracemalloc.start()
    try:
        assert max(len(piece.text) for piece, _ in corpus.pieces()) <= PIECE_CHARACTERS
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_a_backend_gives_the_tokens_of_the_whole_from_its_pieces(shared_data: Path) -> None:
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text()[:100_000]
    backend = Tokenizer(models.BPE(unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitter = backend.pre_tokenizer
    pieces = list(cut_document([text], 5000))
    assert len(pieces) > 19
    words = [word for piece in pieces for word, _ in splitter.pre_tokenize_str(piece.text)]
    assert words == [word for word, _ in splitter.pre_tokenize_str(text)]


def test_words_of_chat_formats_say_nothing_about_a_row_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "masked": true, "training": false, "loss": false}\n')
    assert read(tmp_path / "a.jsonl") == ["a"]
