"""Finds the files of a source, and tells by their content whether they are the same elsewhere."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalite.config.sections.hub_dataset import HubDataset
from megalite.config.sources.hub_data import fetch_dataset
from megalite.data.text.standard_library import STANDARD_LIBRARY, library_modules
from megalite.data.text.tables import is_saved_dataset, saved_dataset_files
from megalite.errors import DataError, closest_path

Kind = Literal["text", "jsonl", "table", "optional"]


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    path: as the user wrote it, for messages. place: its absolute path without links.
    kind: "text": one document; "jsonl": one per line; "table" (parquet, Arrow): one per row; "optional": one document,
        skipped if it is not UTF-8.
    changed_ns: its ctime, which no program can set back as it can the time of the last write; chmod, too, changes it.
    """

    path: Path
    place: Path
    kind: Kind
    size_bytes: int
    changed_ns: int

    @property
    def compressed(self) -> bool:
        return self.path.suffix == ".gz"

    def content_hash(self) -> str:
        """Return a hash of the bytes on disk. Raises DataError."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise cannot_read(self.path, error) from error


def source_files(source: str, pattern: str, key: str) -> Iterator[SourceFile]:
    """Yield the files of one source in reading order; `pattern` selects among those of a folder, at any depth.

    Raises DataError, with the setting `key`, for a source that does not exist or has no files.
    """
    library = source == STANDARD_LIBRARY
    path = fetch_dataset(source, key) if HubDataset.is_named(source) else Path(source).expanduser()
    try:
        if library:
            places = [(module, module) for module in library_modules(pattern, key)]
        elif path.is_dir() and is_saved_dataset(path):
            places = [(file, file.resolve()) for file in saved_dataset_files(path)]
        elif path.is_dir():
            places = _folder_files(path, pattern, key)
        elif path.exists():
            places = [(path, path.resolve())]
        elif path.with_name(path.name + ".idx").exists():
            raise DataError(
                f"{key}: {source} is a prepared token file, not text; name the text it was made from"
            )
        else:
            close = closest_path(path)
            texts = f"name a text file, a folder, a .jsonl, a .parquet or {STANDARD_LIBRARY!r}"
            raise DataError(
                f"{key}: {source} does not exist; {f'did you mean {close}?' if close else texts}",
                key=key,
                set={key: close} if close else {},
                value=source,
            )
        for file, place in places:
            status = file.stat()
            # Optional, because a library may have wrongly encoded files.
            kind = "optional" if library else _kind(file)
            yield SourceFile(file, place, kind, status.st_size, status.st_ctime_ns)
    except OSError as error:
        raise cannot_read(Path(error.filename or source), error) from error


def cannot_read(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror or error}); check its permissions and the disk")


def _folder_files(folder: Path, pattern: str, key: str) -> list[tuple[Path, Path]]:
    """Return path and absolute path of the files of a folder that match, without hidden ones."""
    root = folder.resolve()
    names = (path.relative_to(root) for path in root.rglob(pattern) if path.is_file())
    shown = (name for name in names if not any(part.startswith(".") for part in name.parts))
    visible = sorted(shown, key=Path.as_posix)
    if not visible:
        raise DataError(
            f"{key}: {folder} has no file that matches {pattern!r}; set data.pattern (--pattern), for example '*.txt'"
        )
    return [(folder / name, root / name) for name in visible]


def _kind(path: Path) -> Kind:
    if path.suffix in (".parquet", ".arrow"):
        return "table"
    return "jsonl" if path.name.removesuffix(".gz").endswith(".jsonl") else "text"
