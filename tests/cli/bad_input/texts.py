"""Wrong texts and tables, and wrong wishes of what is to be made of them: megalite data prepare."""

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megalite.data.files.partial_files import locked, partial
from megalite.data.files.token_file import TokenWriter
from tests.cli.bad_input.case import Case, prepare, write


def of_file(name: str, content: bytes | str) -> Callable[[Path], list[str]]:
    """The preparation of one file of this content."""
    return lambda world: prepare(world, write(world, name, content))


def of_good_text(*flags: str) -> Callable[[Path], list[str]]:
    return lambda world: prepare(world, "text.jsonl", *flags)


def of_table(
    name: str, columns: dict[str, Any], spoil: Callable[[bytes], bytes] = bytes
) -> Callable[[Path], list[str]]:
    """The preparation of a parquet or Arrow file."""

    def make(world: Path) -> list[str]:
        table, path = pyarrow.table(columns), world / name
        if name.endswith(".parquet"):
            parquet.write_table(table, path)
        else:
            with (
                pyarrow.OSFile(str(path), "wb") as sink,
                pyarrow.ipc.new_stream(sink, table.schema) as writer,
            ):
                writer.write_table(table)
        path.write_bytes(spoil(path.read_bytes()))
        return prepare(world, name)

    return make


def of_saved_set(**files: object) -> Callable[[Path], list[str]]:
    """The preparation of a folder as `datasets` saves it, of these JSON files."""

    def make(world: Path) -> list[str]:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            write(world, f"set/{name}.json", text)
        return prepare(world, "set")

    return make


def empty_folder(world: Path) -> list[str]:
    (world / "empty").mkdir()
    return prepare(world, "empty")


def unreadable(world: Path) -> list[str]:
    (world / "text.jsonl").chmod(0)
    return prepare(world, "text.jsonl")


def link_to_itself(world: Path) -> list[str]:
    (world / "loop.txt").symlink_to("loop.txt")
    return prepare(world, "loop.txt")


def output_in_a_file(world: Path) -> list[str]:
    return prepare(world, "text.jsonl", "--output", str(world / "text.txt" / "x"))


def over_its_source(world: Path) -> list[str]:
    write(world, "corpus.json", "some text of which corpus.bin, corpus.idx and corpus.json would be made\n")
    return prepare(world, "corpus.json", "--output", str(world / "corpus"))


def over_anothers_files(world: Path) -> list[str]:
    for suffix in ("bin", "idx"):
        write(world, f"theirs.{suffix}", (world / f"good.{suffix}").read_bytes())
    return prepare(world, "text.jsonl", "--output", str(world / "theirs"))


def another_writer(world: Path) -> list[str]:
    (world / "out").mkdir()
    writers.append(locked(partial(world / "out" / "x.bin")))
    return prepare(world, "text.jsonl")


writers: list[Any] = []


def full_disk(patch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(TokenWriter, "add", full)


def failing_disk(patch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(TokenWriter, "finish", failing)


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


TEXTS = ["one text", "another text"]
GOOD_LINE = '{"text": "a"}\n'
ELSEWHERE = "name a text file, a folder, a .jsonl"
LEAVE_OUT = "leave it out (data.pattern, --pattern)"
COLUMN = "data.text_column (--text-column)"

CASES = [
    Case(
        "a source that is not there",
        lambda world: prepare(world, "no.txt"),
        ("no.txt does not exist", ELSEWHERE),
    ),
    Case("a link to itself", link_to_itself, ("loop.txt does not exist", ELSEWHERE)),
    Case(
        "an unreadable source",
        unreadable,
        ("text.jsonl cannot be read (Permission denied)", "check its permissions"),
    ),
    Case("a folder without files", empty_folder, ("empty has no file that matches '*'", "set data.pattern")),
    Case(
        "a pattern that nothing matches",
        lambda world: prepare(world, "tok", "--pattern", "*.md"),
        ("tok has no file that matches '*.md'", "set data.pattern (--pattern)"),
    ),
    Case("an empty text", of_file("a.txt", ""), ("a.txt has no text", "name a source with text")),
    Case(
        "a .jsonl of empty lines",
        of_file("a.jsonl", "\n\n"),
        ("a.jsonl has no text", "name a source with text"),
    ),
    Case(
        "documents without a character",
        of_file("a.jsonl", '{"text": ""}\n'),
        ("a.jsonl has no text", "name a source"),
    ),
    Case(
        "bytes",
        of_file("a.txt", b"text\n\x00\x01\x02"),
        ("a.txt, line 2: a null character", "iconv", LEAVE_OUT),
    ),
    Case(
        "UTF-16",
        of_file("a.txt", "some text".encode("utf-16-le")),
        ("a.txt, line 1: a null character", "iconv"),
    ),
    Case(
        "Latin-1",
        of_file("a.txt", "na\xefve".encode("latin1")),
        ("a.txt, line 1: not UTF-8", "iconv -f latin1"),
    ),
    Case(
        "a parquet file by another name",
        of_file("a.txt", b"PAR1...."),
        ("a.txt is a parquet file", "call it .parquet"),
    ),
    Case("a zip file", of_file("a.txt", b"PK\x03\x04...."), ("a.txt is a zip file", "unpack it")),
    Case(
        "an index in place of a text",
        lambda world: prepare(world, "good.idx"),
        ("good.idx is the index of", "prefix"),
    ),
    Case(
        "a prepared file",
        lambda world: prepare(world, "good"),
        ("good is a prepared token file", "name the text"),
    ),
    Case(
        "a line that is no JSON",
        of_file("a.jsonl", GOOD_LINE + '{"text": '),
        ("a.jsonl, line 2: not JSON", "fix"),
    ),
    Case(
        "a line cut short",
        of_file("a.jsonl", GOOD_LINE + '{"text": "ab'),
        ("a.jsonl, line 2: not JSON", "fix"),
    ),
    Case(
        "a line that is nested deeply",
        of_file("a.jsonl", "[" * 200_000),
        ("a.jsonl, line 1: not JSON", "fix"),
    ),
    Case(
        "a number of many digits",
        of_file("a.jsonl", '{"text": "a", "n": ' + "9" * 5000 + "}"),
        ("a.jsonl, line 1: not JSON", "fix"),
    ),
    Case(
        "another column",
        of_file("a.jsonl", '{"txt": "a"}\n'),
        ("a.jsonl, line 1: no column 'text'", "['txt']", COLUMN),
    ),
    Case(
        "a line that is a list", of_file("a.jsonl", '["a"]\n'), ("a.jsonl, line 1: no column 'text'", COLUMN)
    ),
    Case(
        "a text that is a number",
        of_file("a.jsonl", '{"text": 5}\n'),
        ("a.jsonl, line 1:", "holds int, not text", "fix"),
    ),
    Case(
        "half a character",
        of_file("a.jsonl", '{"text": "\\ud800"}\n'),
        ("a.jsonl, line 1: half a surrogate", "fix"),
    ),
    Case(
        "no gzip file",
        of_file("a.txt.gz", "text"),
        ("a.txt.gz is not a whole gzip file", "copy or download it again"),
    ),
    Case(
        "half a gzip file",
        of_file("a.jsonl.gz", half(gzip.compress(os.urandom(999).hex().encode()))),
        ("a.jsonl.gz is not a whole gz", "again"),
    ),
    Case(
        "a changed gzip file",
        of_file("a.txt.gz", gzip.compress(b"some text")[:-8] + bytes(8)),
        ("a.txt.gz is not a whole gzip file", "copy or download it again"),
    ),
    Case(
        "a parquet file without the column",
        of_table("a.parquet", {"body": TEXTS}),
        ("a.parquet: no column 'text'", "['body']", COLUMN),
    ),
    Case(
        "a column of numbers",
        of_table("a.parquet", {"text": [1, 2]}),
        ("a.parquet: column 'text' holds int64", COLUMN),
    ),
    Case(
        "a row without a value",
        of_table("a.parquet", {"text": ["a", None]}),
        ("a.parquet, row 1:", "has no value", "remove"),
    ),
    Case(
        "half a parquet file",
        of_table("a.parquet", {"text": TEXTS}, half),
        ("a.parquet is not a whole parquet", "again"),
    ),
    Case(
        "an empty parquet file", of_file("a.parquet", b""), ("a.parquet is not a whole parquet file", "again")
    ),
    Case(
        "an Arrow file without the column",
        of_table("a.arrow", {"body": TEXTS}),
        ("a.arrow: no column 'text'", COLUMN),
    ),
    Case(
        "half an Arrow file",
        of_table("a.arrow", {"text": TEXTS}, half),
        ("a.arrow is not a whole arrow file", "again"),
    ),
    Case(
        "several splits",
        of_saved_set(dataset_dict={"splits": ["train", "test"]}),
        ("set holds several splits", "name one of them as the source", "set/train"),
    ),
    Case(
        "a saved set without its files",
        of_saved_set(state={"_data_files": [{"filename": "a.arrow"}]}),
        ("set lacks ['a.arrow']", "copy the whole"),
    ),
    Case(
        "a saved set of nothing",
        of_saved_set(state={"_data_files": []}),
        ("set lacks all data files", "save the data set again"),
    ),
    Case(
        "a state that is no JSON",
        of_saved_set(state="{"),
        ("state.json cannot be read", "save the data set again"),
    ),
    Case(
        "splits that are no list",
        of_saved_set(dataset_dict={"splits": 5}),
        ("dataset_dict.json names no splits", "save the data set again"),
    ),
    Case(
        "files without names",
        of_saved_set(state={"_data_files": [{"filename": 5}]}),
        ("state.json names no data files", "save the data set again"),
    ),
    Case(
        "short documents only",
        of_good_text("--min-length", "9999"),
        ("40 documents of", "fewer than 9999 tokens", "--min-length"),
    ),
    Case("a minimum below nothing", of_good_text("--min-length", "-1"), ("--min-length", "-1", "0 or more")),
    Case("workers below nothing", of_good_text("--workers", "-1"), ("--workers", "-1", "0 or more")),
    Case(
        "shares that do not add up",
        of_good_text("--split", "0.5", "0.2"),
        ("--split", "adds up to 0.7, not 1", "write for example"),
    ),
    Case(
        "a share that is no number",
        of_good_text("--split", "nan", "0.5"),
        ("--split", "nan", "write for example"),
    ),
    Case(
        "parts of less than a token",
        lambda world: prepare(world, write(world, "a.txt", "a"), "--split", "0.5", "0.5"),
        ("data.split: ", "a.txt has 2 tokens, too few", "name a longer text"),
    ),
    Case("an output below a file", output_in_a_file, ("text.txt", "cannot be", "--output")),
    Case("an output over its source", over_its_source, ("corpus.json is an input", "--output")),
    Case(
        "an output over another program's",
        over_anothers_files,
        ("theirs.bin", "was not written by megalite", "--output"),
    ),
    Case(
        "an output that another process writes",
        another_writer,
        ("out", "another process is preparing", "wait for it"),
    ),
    Case(
        "a full disk",
        of_good_text(),
        ("x", "No space left on device", "free space", "were removed again"),
        patch=full_disk,
    ),
    Case(
        "a failing disk",
        of_good_text(),
        ("x cannot be written (Input/output error)", "choose another folder"),
        patch=failing_disk,
    ),
]
