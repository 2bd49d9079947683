"""The range of the ids in a token file, checked once before training rather than sample by sample."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from megalite.data.files.partial_files import read_json, replace_json
from megalite.data.files.prepared import prepared_facts
from megalite.data.files.token_file import TokenFile, bin_path
from megalite.errors import DataError

_CHUNK_TOKENS = 1 << 24


def require_ids(file: TokenFile, rows: int, cache: Path) -> None:
    """Raise DataError unless every id is one of range(rows). Reads the file at most once; `cache` keeps its range."""
    kind = np.iinfo(file.dtype)
    if kind.min >= 0 and kind.max < rows:
        return
    largest = largest_id(file, cache)
    if largest >= rows:
        raise DataError(
            f"{bin_path(file.prefix)}: its largest id, {largest}, is outside the model's vocabulary of {rows}; prepare "
            f"the text with the model's tokenizer, or set model.vocab_size to {largest + 1} or more"
        )


def largest_id(file: TokenFile, cache: Path) -> int:
    """Return the largest id, as recorded beside the file or in `cache`, else after one pass over the file.

    Raises DataError for a negative id.
    """
    facts = prepared_facts(file.prefix)
    if facts is not None and facts.largest_id >= 0:
        return facts.largest_id
    path = bin_path(file.prefix)
    stat = path.stat()
    known = read_json(cache)
    place, version = str(path.resolve()), [stat.st_size, stat.st_ctime_ns]
    record = known.get(place)
    if not isinstance(record, dict) or record.get("version") != version:
        smallest, largest = 0, -1
        for start in range(0, file.num_tokens, _CHUNK_TOKENS):
            chunk = file.tokens[start : start + _CHUNK_TOKENS]
            smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        record = {"version": version, "smallest": smallest, "largest": largest}
        with suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            replace_json(cache, {**known, place: record})
    if record["smallest"] < 0:
        raise DataError(f"{path}: id {record['smallest']} is negative; prepare the text again")
    return int(record["largest"])
