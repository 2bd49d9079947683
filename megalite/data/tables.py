"""Reads text columns of parquet and Arrow files and of saved `datasets` folders, a few rows at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import DataError

if TYPE_CHECKING:
    import pyarrow

# Rows decoded at once.
_ROWS = 64
_BUFFER_BYTES = 1 << 20
_ARROW_FILE = b"ARROW1"  # the magic bytes of Arrow's file format; its stream format has none


def is_saved_dataset(folder: Path) -> bool:
    """Whether Dataset.save_to_disk or DatasetDict.save_to_disk wrote `folder`."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def saved_dataset_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a saved data set, in the order of its rows.

    Raises DataError for several splits, for a damaged folder, and for a data set with an indices mapping.
    """
    if (folder / "dataset_dict.json").is_file():
        names = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(names, list):
            raise DataError(
                f"{folder / 'dataset_dict.json'} names no splits; save the data set again (save_to_disk)"
            )
        splits = [str(folder / str(name)) for name in names]
        raise DataError(f"{folder} holds several splits; name one of them as the source: {', '.join(splits)}")
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} selects rows of other files by indices; call flatten_indices() on the data set and save it again"
        )
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{folder / 'state.json'} names no data files; save the data set again (save_to_disk)"
        ) from error
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise DataError(
            f"{folder} lacks {missing or 'all data files'}; copy the whole folder, or save the data set again"
        )
    return files


def column_texts(path: Path, column: str) -> Iterator[tuple[str, int]]:
    """Yield each row's text with the bytes of the file read so far; DataError with file, row and remedy."""
    row = 0
    with _explained(path):
        for batch, position in _batches(path, column):
            for value in batch.column(column):
                yield _text(value, path, column, row), position
                row += 1


def table_rows(path: Path) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield each row as a dict, its place for messages, and the bytes read so far; DataError with file and remedy."""
    row = 0
    with _explained(path):
        for batch, position in _batches(path, None):
            for values in batch.to_pylist():
                yield values, f"{path}, row {row}", position
                row += 1


def _batches(path: Path, column: str | None) -> Iterator[tuple["pyarrow.RecordBatch", int]]:
    """Yield a few rows at a time, of one column or all, with the bytes of the file read so far."""
    table, size = (_parquet if path.suffix == ".parquet" else _arrow), path.stat().st_size
    for batch, share in table(path, column):
        yield batch, int(share * size)


def _parquet(path: Path, column: str | None) -> Iterator[tuple["pyarrow.RecordBatch", float]]:
    from pyarrow import parquet

    # No threads, because ranks may be forked from this process.
    options = {"memory_map": True, "pre_buffer": False, "buffer_size": _BUFFER_BYTES}
    with parquet.ParquetFile(path, page_checksum_verification=True, **options) as file:
        columns = None
        if column is not None:
            _check_column(path, column, file.schema_arrow)
            columns = [column]
        read = 0
        for batch in file.iter_batches(batch_size=_ROWS, columns=columns, use_threads=False):
            read += batch.num_rows
            yield batch, read / file.metadata.num_rows


def _arrow(path: Path, column: str | None) -> Iterator[tuple["pyarrow.RecordBatch", float]]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        size = max(1, source.size())
        if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
            source.seek(0)
            opened = pyarrow.ipc.open_file(source)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
            schema = opened.schema
            shares = ((index + 1) / opened.num_record_batches for index in range(opened.num_record_batches))
        else:
            source.seek(0)
            stream = pyarrow.ipc.open_stream(source)
            schema, batches = stream.schema, iter(stream)
            shares = (source.tell() / size for _ in iter(int, 1))
        if column is not None:
            _check_column(path, column, schema)
        for batch in batches:
            rows, share = batch if column is None else batch.select([column]), next(shares)
            for start in range(0, rows.num_rows, _ROWS):
                yield rows.slice(start, _ROWS), share


def _check_column(path: Path, column: str, schema: "pyarrow.Schema") -> None:
    from pyarrow import types

    if column not in schema.names:
        raise DataError(
            f"{path}: no column {column!r} (columns: {sorted(schema.names)}); set data.text_column (--text-column)"
        )
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(
            f"{path}: column {column!r} holds {kind}, not text; set another data.text_column (--text-column)"
        )


def _text(value: "pyarrow.Scalar[Any]", path: Path, column: str, row: int) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, row {row}: column {column!r} is not UTF-8; write the file again") from error
    if text is None:
        raise DataError(f"{path}, row {row}: column {column!r} has no value; remove the rows without text")
    assert isinstance(text, str)
    return text


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the errors of pyarrow, or its absence, into a DataError."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path} cannot be read without pyarrow; install it: pip install pyarrow") from error
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(
                f"{path} cannot be read ({error.strerror}); check its permissions and the disk"
            ) from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path} is not a whole {path.suffix.removeprefix('.')} file ({reason}); copy or download it again"
        ) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read ({error}); save the data set again (save_to_disk)") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a JSON object; save the data set again (save_to_disk)")
    return content
