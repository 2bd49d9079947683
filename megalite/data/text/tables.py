"""Reads rows of parquet and Arrow files and of saved `datasets` folders, a few at a time."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
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


def column_names(path: Path) -> tuple[str, ...]:
    """Return the names of the columns of a table; () if it has no row. Raises DataError."""
    return tuple(next((row for row, *_ in table_rows(path)), {}))


def parquet_rows(path: Path) -> int:
    """Return the number of rows of a parquet file; reads its footer alone. Raises DataError."""
    with _explained(path):
        from pyarrow import parquet

        rows: int = parquet.read_metadata(path).num_rows
        return rows


def table_rows(
    path: Path, text_column: str | None = None, *, first: int = 0
) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield each row, all columns or the text column alone, with its number from 0 and the bytes read so far.

    first: the row to start at, of a parquet file: the row groups before it are not read.
    Raises DataError with file, row and remedy.
    """
    with _explained(path):
        size = path.stat().st_size
        batches = partial(_parquet, first=first) if path.suffix == ".parquet" else _arrow
        number = first
        for batch, share in batches(path, text_column):
            columns = list(zip(batch.schema.names, batch.columns, strict=True))
            for index in range(batch.num_rows):
                row = {name: _value(values[index], path, name, number) for name, values in columns}
                yield row, number, int(share * size)
                number += 1


def _parquet(
    path: Path, text_column: str | None, *, first: int = 0
) -> Iterator[tuple["pyarrow.RecordBatch", float]]:
    from pyarrow import parquet

    # No threads, because ranks may be forked from this process.
    options = {"memory_map": True, "pre_buffer": False, "buffer_size": _BUFFER_BYTES}
    with parquet.ParquetFile(path, page_checksum_verification=True, **options) as file:
        names = _column_names(path, text_column, file.schema_arrow)
        groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
        ends = list(accumulate(groups))
        group = bisect_right(ends, first)
        read = ends[group] - groups[group] if group < len(groups) else 0
        row_groups = range(group, len(groups))
        for batch in file.iter_batches(
            batch_size=_ROWS, columns=names, use_threads=False, row_groups=row_groups
        ):
            skipped = min(max(0, first - read), batch.num_rows)
            read += batch.num_rows
            yield batch.slice(skipped), read / file.metadata.num_rows


def _arrow(path: Path, text_column: str | None) -> Iterator[tuple["pyarrow.RecordBatch", float]]:
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
        names = _column_names(path, text_column, schema)
        for batch in batches:
            rows, share = batch.select(names), next(shares)
            for start in range(0, rows.num_rows, _ROWS):
                yield rows.slice(start, _ROWS), share


def _column_names(path: Path, column: str | None, schema: "pyarrow.Schema") -> list[str]:
    """Return the columns to read: all, or `column`, which must hold text."""
    from pyarrow import types

    for name in schema.names if column is None else [column]:
        if schema.names.count(name) > 1:
            raise DataError(f"{path}: several columns are named {name!r}; write the file with one of them")
    if column is None:
        return list(schema.names)
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
    return [column]


def _value(value: "pyarrow.Scalar[Any]", path: Path, column: str, row: int) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, row {row}: column {column!r} is not UTF-8; write the file again") from error
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{path}, row {row}: column {column!r} has no value in Python ({error}); write the file without the column"
        ) from error


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
