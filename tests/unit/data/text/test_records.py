"""Rows of instruction data from each type of file, and what is said about bad ones."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megalite.data.text.records import records
from megalite.data.text.source_files import source_files
from megalite.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": "eins", "completion": "ü 本", "id": 1},
    {"prompt": "zwei\nZeilen", "completion": "", "id": None},
    *({"prompt": f"row {index}", "completion": "b", "id": index} for index in range(150)),
]
MESSAGES = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
    {"messages": [{"role": "user", "content": "b", "name": "Ann"}]},
]


def read(source: Path) -> list[tuple[dict[str, Any], str]]:
    return [
        (row, place.removeprefix(f"{source}"))
        for file in source_files(str(source), "*", "data.train")
        for row, place, _ in records(file)
    ]


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the rows as the type of file that the name says; "x.stream.arrow" is a stream."""
    packed = gzip.compress if path.suffix == ".gz" else bytes
    if ".jsonl" in path.name:
        path.write_bytes(packed(json_lines(rows)))
    elif ".json" in path.name:
        path.write_bytes(packed(json.dumps(rows, indent=1).encode()))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=60)
        else:
            new = pyarrow.ipc.new_stream if ".stream" in path.name else pyarrow.ipc.new_file
            with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=70)
    return path


TABLES = ("x.parquet", "x.file.arrow", "x.stream.arrow")


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json", "x.json.gz", *TABLES])
def test_every_type_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    place, first = ("line", 1) if ".jsonl" in name else ("row", 0)
    assert read(path) == [(row, f", {place} {number}") for number, row in enumerate(ROWS, start=first)]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", *TABLES])
def test_a_message_has_the_fields_that_it_was_given(tmp_path: Path, name: str) -> None:
    assert [row for row, _ in read(write(tmp_path / name, MESSAGES))] == MESSAGES


def test_a_saved_data_set_is_its_rows(tmp_path: Path) -> None:
    for index in range(2):
        write(tmp_path / f"data-{index}.stream.arrow", ROWS[index::2])
    names = [{"filename": f"data-{index}.stream.arrow"} for index in range(2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": names}))
    rows = read(tmp_path)
    assert [row for row, _ in rows] == ROWS[::2] + ROWS[1::2]
    assert [place for _, place in rows][76:78] == [
        "/data-1.stream.arrow, row 0",
        "/data-1.stream.arrow, row 1",
    ]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}')
    assert read(path) == [({"a": 1}, ", line 1"), ({"a": 2}, ", line 4")]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json", *TABLES])
def test_the_bytes_read_end_at_the_size_of_the_file(tmp_path: Path, name: str) -> None:
    (file,) = source_files(str(write(tmp_path / name, ROWS)), "*", "data.train")
    positions = [position for _, _, position in records(file)]
    assert positions == sorted(positions)
    assert 0.9 * file.size_bytes < positions[-1] <= file.size_bytes


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "x.jsonl",
            b'{"a": 1}\n\n[1]\n',
            ', line 3: the row is a list, not an object; write .* "completion"',
        ),
        ("x.jsonl", b"null", ", line 1: the row is null, not an object"),
        ("x.jsonl", b'{"a": 1}\n{"a"\n', r", line 2: not JSON \(.* at column 5\); fix or remove the line"),
        ("x.jsonl", b"[" * 100_000, r", line 1: not JSON \(nested too deeply\)"),
        ("x.jsonl", b'{"a": "\xff"}\n', r", line 1: not UTF-8 \(byte 0xff\); convert the file"),
        (
            "x.jsonl",
            b'{"m": [{"c": "good"}, {"c": "a\\ud800"}]}\n',
            r", line 1: m\[1\]\.c: half a surrogate pair at character 1; fix the text or remove the row",
        ),
        ("x.jsonl", b'{"m": {"\\ud800": 1}}\n', ", line 1: a name in m: half a surrogate pair"),
        ("x.jsonl", b"PAR1", " is a parquet file; call it .parquet"),
        ("x.json", b'[{"a": 1}, "b"]', ", row 1: the row is text, not an object"),
        ("x.json", b'[{"a": 1}, {"a": "\\ud800"}]', ", row 1: a: half a surrogate pair"),
        (
            "x.json",
            b'{"data": []}',
            r" holds an object, not a list of rows; .*call the file \.jsonl if each line",
        ),
        (
            "x.json",
            b'{"a": 1}\n{"a": 2}\n',
            r", line 2: not JSON \(Extra data at column 1\); .*call it \.jsonl if each line is a row",
        ),
        ("x.json", b'[{"a": 1},\n{"a": "\xff"}]', ", line 2: not UTF-8"),
        ("x.json", b"", r", line 1: not JSON \(Expecting value at column 1\)"),
        ("x.json.gz", b"no gzip", " is not a whole gzip file .*copy or download it again"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999)[:-9], " is not a whole gzip file"),
        ("x.json.gz", gzip.compress(b'[{"a": 1}]')[:-9], " is not a whole gzip file"),
        ("x.parquet", b"PAR1 and no more", r" is not a whole parquet file \(.*copy or download it again"),
        ("x.arrow", b"no Arrow file", " is not a whole arrow file"),
        (
            "x.txt",
            b"text",
            r" is not instruction data, which is \.jsonl, \.json, \.parquet or a datasets folder; "
            r'leave the file out \(data\.pattern\), or read plain text with data\.kind = "text"',
        ),
        ("x.parquet.gz", gzip.compress(b"PAR1"), " is not instruction data"),
    ],
)
def test_bad_files_are_named_with_row_and_remedy(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"/{name}{said}"):
        read(tmp_path / name)


def test_the_rows_before_a_bad_line_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\nbad\n')
    (file,) = source_files(str(tmp_path / "x.jsonl"), "*", "data.train")
    rows = records(file)
    assert next(rows)[0] == {"a": 1}
    with pytest.raises(DataError, match="line 2"):
        next(rows)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_bad_columns_are_named(tmp_path: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    texts = pyarrow.array([b"good", b"\xff"]).view(pyarrow.string())
    # The year is beyond those of datetime; nanoseconds alone would have a value where pandas is installed.
    times = pyarrow.array([1000, 2**62], pyarrow.timestamp("us"))
    twice = pyarrow.Table.from_arrays([texts, texts], names=["a", "a"])
    for table, said in (
        (pyarrow.table({"a": texts}), "row 1: column 'a' is not UTF-8; write the file again"),
        (pyarrow.table({"a": times}), "row 1: column 'a' has no value in Python .*without the column"),
        (twice, "several columns are named 'a'; write the file with one of them"),
    ):
        if name == "x.parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / name)
        else:
            with pyarrow.ipc.new_stream(str(tmp_path / name), table.schema) as writer:
                writer.write_table(table)
        with pytest.raises(DataError, match=rf"/{name}(, |: ){said}"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet", "x.stream.arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"prompt": str(index), "completion": "b" * 2000} for index in range(2000)])
    (file,) = source_files(str(path), "*", "data.train")
    tracemalloc.start()
    try:
        assert sum(1 for _ in records(file)) == 2000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
