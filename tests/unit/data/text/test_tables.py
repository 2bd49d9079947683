"""Documents from parquet, Arrow and saved data sets, and what is said about bad ones."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megalite.data.text.corpus import Corpus
from megalite.errors import DataError
from tests.unit.data.text.test_corpus import read

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROOT = Path(__file__).parents[4]
TEXTS = ["one", "", "zwei\nZeilen ü 本", *(f"row {index}" for index in range(200))]


def table(values: list[Any] = TEXTS, kind: Any = None) -> Any:
    return pyarrow.table({"id": range(len(values)), "text": pyarrow.array(values, type=kind)})


def write_arrow(path: Path, content: Any, *, stream: bool = True, rows: int = 50) -> Path:
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, content.schema) as writer:
        writer.write_table(content, max_chunksize=rows)
    return path


def write_dataset(folder: Path, shards: int = 2) -> Path:
    """As datasets 5 writes it (save_to_disk)."""
    folder.mkdir()
    names = [f"data-{index:05}-of-{shards:05}.arrow" for index in range(shards)]
    for index, name in enumerate(names):
        write_arrow(folder / name, table(TEXTS[index::shards]))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    write_arrow(folder / "cache-0123.arrow", table(["not of the set"]))
    return folder


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()])
@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_a_row_is_a_document(tmp_path: Path, form: str, kind: Any) -> None:
    path = tmp_path / ("x.parquet" if form == "parquet" else "x.arrow")
    if form == "parquet":
        parquet.write_table(table(kind=kind), path, row_group_size=60)
    else:
        write_arrow(path, table(kind=kind), stream=form == "stream")
    assert read(path) == [text for text in TEXTS if text]


def test_words_that_recur_may_be_numbered(tmp_path: Path) -> None:
    content = pyarrow.table({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    parquet.write_table(content, tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet") == read(write_arrow(tmp_path / "x.arrow", content)) == ["a", "b", "a"]


def test_a_saved_data_set_is_its_own_files_in_order(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set")
    assert read(folder) == [text for text in TEXTS[::2] + TEXTS[1::2] if text]


def test_what_datasets_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": TEXTS})
    whole.save_to_disk(tmp_path / "set", num_shards=3)
    whole.select([5, 3]).save_to_disk(tmp_path / "selected")
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "dict")
    assert read(tmp_path / "set") == [text for text in TEXTS if text]
    assert read(tmp_path / "selected") == [TEXTS[5], TEXTS[3]]
    assert read(tmp_path / "dict" / "test") == read(tmp_path / "set")
    with pytest.raises(DataError, match=r"dict holds several splits; name one .*/dict/train, .*/dict/test"):
        read(tmp_path / "dict")


def test_another_column_and_a_folder_of_parquet_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        parquet.write_table(pyarrow.table({"body": [name]}), tmp_path / f"{name}.parquet")
    assert read(tmp_path, text_column="body") == ["a", "b"]


def test_positions_end_at_the_size_of_the_corpus(tmp_path: Path) -> None:
    parquet.write_table(table(), tmp_path / "a.parquet", row_group_size=60)
    write_arrow(tmp_path / "b.arrow", table())
    corpus = Corpus.open([str(tmp_path)])
    positions = [place.bytes_read for _, place in corpus.pieces()]
    assert positions == sorted(positions)
    assert positions[-1] > 0.9 * corpus.size_bytes


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"body": ["a"], "id": [1]},
            r"no column 'text' \(columns: \['body', 'id'\]\); set data\.text_column",
        ),
        ({"text": [1, 2]}, r"column 'text' holds int64, not text; set another data\.text_column"),
        ({"text": [["a"], ["b"]]}, r"column 'text' holds list<.*>, not text"),
        ({"text": ["a", None]}, r"row 1: column 'text' has no value; remove the rows without text"),
        ({"text": b"\xff"}, r"row 0: column 'text' is not UTF-8"),
    ],
)
def test_bad_columns_are_named(tmp_path: Path, suffix: str, content: dict[str, Any], said: str) -> None:
    if content["text" if "text" in content else "body"] == b"\xff":
        values = pyarrow.array([b"\xff"]).view(pyarrow.string())
        content = {"text": values}
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pyarrow.table(content), path)
    else:
        write_arrow(path, pyarrow.table(content))
    with pytest.raises(DataError, match=rf"x\.{suffix}.*{said}"):
        read(path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("damage", ["empty", "text", "half", "changed"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table(), path, compression="none", write_page_checksum=True)
    else:
        write_arrow(path, table())
    whole = path.read_bytes()
    content = {
        "empty": b"",
        "text": b"hello " * 50,
        "half": whole[: len(whole) // 2],
        "changed": whole.replace(b"row 100", b"row 999"),
    }
    path.write_bytes(content[damage])
    if suffix == "arrow" and damage == "changed":
        pytest.skip("Arrow has no checksums")
    with pytest.raises(
        DataError, match=rf"x\.{suffix}( is not a whole {suffix} file \(.*download it again|, row )"
    ):
        read(path)


def test_damaged_data_sets_are_named(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"set lacks \['data-00001-of-00002.arrow'\]; copy the whole folder"):
        read(folder)
    for state, said in (
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "names no data files"),
        ('{"_data_files": []}', "lacks all data files"),
        ('{"_indices_data_files": [1]}', "selects rows of other files by indices.*flatten_indices"),
    ):
        (folder / "state.json").write_text(state)
        with pytest.raises(DataError, match=said):
            read(folder)


def test_a_missing_pyarrow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(table(), tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError, match=r"x\.parquet cannot be read without pyarrow; install it: pip install pyarrow"
    ):
        read(tmp_path / "x.parquet")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    path, rows = tmp_path / f"x.{suffix}", 40_000
    content = pyarrow.table(
        {"text": [f"{index} some words in a line of text " * 30 for index in range(rows)]}
    )
    if suffix == "parquet":
        parquet.write_table(content, path, compression="none", use_dictionary=False)
    else:
        write_arrow(path, content, rows=1000)
    del content
    corpus = Corpus.open([str(path)])
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    try:
        peak = max(pyarrow.total_allocated_bytes() for _ in corpus.pieces()) - before
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
        assert peak < 8_000_000 < path.stat().st_size
    finally:
        tracemalloc.stop()


def test_reading_starts_no_thread(tmp_path: Path) -> None:
    parquet.write_table(table(), tmp_path / "x.parquet", row_group_size=60)
    write_arrow(tmp_path / "x.arrow", table())
    script = f"""if True:
        import re
        from pathlib import Path
        import numpy, pyarrow  # which have some of their own, made to be forked beside
        from megalite.data.text.corpus import Corpus
        def threads():
            return int(re.search(r"Threads:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
        before = threads()
        for _ in Corpus.open([{str(tmp_path)!r}]).pieces():
            pass
        print(threads() - before)
    """
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "0", run.stderr
