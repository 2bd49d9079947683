"""Megatron-LM's token files: X.bin holds the ids of all documents end to end, X.idx their lengths and offsets.

X.idx, little-endian: b"MMIDIDX\\0\\0", uint64 version 1, uint8 dtype code, uint64 sequences, uint64 documents + 1;
then the int32 length of each sequence in tokens, the int64 offset of each sequence in X.bin in bytes, the int64 first
sequence of each document and, last, the number of sequences. This is the format of megatron-core's IndexedDataset. Its
multimodal data sets append an int8 mode per sequence; only mode 0, text, is supported here. The older index of Megatron
(`legacy_index`) is read too.
"""

import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.files.legacy_index import LEGACY_MAGIC, read_legacy_index
from megalite.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_ROWS = 1 << 20  # index rows per block
LONGEST_SEQUENCE = 2**31 - 1

# The threshold of Megatron-LM (DType.optimal_dtype).
_SMALL_VOCABULARY = 65500


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 for vocabularies below 65500, else int32, as Megatron-LM does."""
    return np.dtype(np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32)


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def prepared_prefix(sources: Sequence[str], key: str = "--source") -> Path | None:
    """Return X if the source is X, X.bin or X.idx of a prepared pair; None if it is text.

    Raises DataError, with the setting `key`, for a pair among several sources.
    """
    for source in sources:
        path = Path(source).expanduser()
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        if path.is_dir() or (path == prefix and path.exists()) or not idx_path(prefix).exists():
            continue
        if len(sources) > 1:
            raise DataError(
                f"{key}: {source} is a prepared token file and cannot be one of several sources; name it as the only "
                "source"
            )
        return prefix
    return None


@dataclass(frozen=True)
class WriterState:
    """The progress of a TokenWriter: documents, tokens, the bytes of its two growing files, and the open sequence.

    largest_id: of all tokens; -1 without a token.
    """

    documents: int = 0
    tokens: int = 0
    bin_bytes: int = 0
    lengths_bytes: int = 0
    open_tokens: int = 0
    continued: bool = False
    """Whether the open sequence continues the document of the previous sequence."""
    largest_id: int = -1


class TokenWriter:
    """Writes one .bin and one .idx to files opened by the caller; memory does not grow with the corpus.

    A document of more than `longest_sequence` tokens (a length is an int32) becomes several sequences.
    lengths_file: collects the sequence lengths for the index; None: an unnamed temporary file.
    state: the state to resume from; the caller has truncated `bin_file` and `lengths_file` to its sizes.
    """

    def __init__(
        self,
        bin_file: IO[bytes],
        idx_file: IO[bytes],
        dtype: np.dtype[Any],
        longest_sequence: int = LONGEST_SEQUENCE,
        *,
        lengths_file: IO[bytes] | None = None,
        state: WriterState | None = None,
    ):
        state = state or WriterState()
        self.documents, self.tokens, self.largest_id = state.documents, state.tokens, state.largest_id
        self._bin, self._idx, self._dtype = bin_file, idx_file, dtype
        self._longest = longest_sequence
        self.open_tokens = state.open_tokens  # tokens of the open sequence
        self._sign = -1 if state.continued else 1
        # One int32 per sequence; negative if the sequence continues the document of the previous one.
        self._lengths = lengths_file or tempfile.TemporaryFile(  # noqa: SIM115 - closed by close()
            dir=Path(idx_file.name).parent
        )

    @property
    def in_document(self) -> bool:
        """Whether tokens of an unfinished document were written."""
        return self.open_tokens > 0 or self._sign < 0

    def saved_state(self) -> WriterState:
        """Flush both files to the disk and return the state to resume from."""
        for file in (self._bin, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        return WriterState(
            self.documents,
            self.tokens,
            self._bin.tell(),
            self._lengths.tell(),
            self.open_tokens,
            self._sign < 0,
            self.largest_id,
        )

    def add(self, tokens: NDArray[Any]) -> None:
        """Append tokens to the open document."""
        self.tokens += len(tokens)
        self.largest_id = max(self.largest_id, int(tokens.max(initial=0)))
        if tokens.dtype.kind == "i":
            self.largest_id = max(self.largest_id, -1 - int(tokens.min(initial=0)))  # see trained_tokens
        while True:
            fitting = tokens[: self._longest - self.open_tokens]
            self._bin.write(np.ascontiguousarray(fitting, dtype=self._dtype.newbyteorder("<")).data)
            self.open_tokens += len(fitting)
            tokens = tokens[len(fitting) :]
            if not len(tokens):
                return
            self._end_sequence()
            self._sign = -1

    def end_document(self) -> None:
        """Close the open document."""
        self._end_sequence()
        self._sign = 1
        self.documents += 1

    def finish(self) -> None:
        """Write the index and flush both files to the disk."""
        sequences = self._lengths.tell() // 4
        self._idx.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[self._dtype], sequences, self.documents + 1))
        for lengths in self._read_lengths():
            self._idx.write(np.abs(lengths).astype("<i4").tobytes())
        offset = 0
        for lengths in self._read_lengths():
            sizes = np.abs(lengths.astype(np.int64)) * self._dtype.itemsize
            ends = np.cumsum(sizes) + offset
            self._idx.write((ends - sizes).astype("<i8").tobytes())
            offset = int(ends[-1])
        first = 0
        for lengths in self._read_lengths():
            self._idx.write((np.flatnonzero(lengths >= 0) + first).astype("<i8").tobytes())
            first += len(lengths)
        self._idx.write(struct.pack("<q", sequences))
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._lengths.close()

    def _end_sequence(self) -> None:
        self._lengths.write(struct.pack("<i", self._sign * self.open_tokens))
        self.open_tokens = 0

    def _read_lengths(self) -> Iterator[NDArray[np.int32]]:
        self._lengths.seek(0)
        while block := self._lengths.read(4 * _ROWS):
            yield np.frombuffer(block, dtype=np.int32)


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped token file; opening it reads the header only, but the whole of an index of the older kind.

    tokens: the ids of all documents end to end. sequence_lengths (tokens), sequence_offsets (bytes): per sequence.
    document_indices: the first sequence of each document and, last, the number of sequences.
    """

    prefix: Path
    tokens: NDArray[Any]
    sequence_lengths: NDArray[np.int32]
    sequence_offsets: NDArray[np.int64]
    document_indices: NDArray[np.int64]

    @classmethod
    def open(cls, prefix: Path | str) -> "TokenFile":
        """Map X.bin and X.idx; DataError if one is missing, is not a token file, or has a wrong size."""
        prefix = Path(prefix)
        idx, data = idx_path(prefix), bin_path(prefix)
        for path in (idx, data):
            if not path.is_file():
                raise DataError(f"{path} does not exist; prepare the corpus first (megalite data prepare)")
        try:
            dtype, lengths, offsets, starts = _read_index(idx)
            size = data.stat().st_size
            expected = int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize if len(lengths) else 0
            if size != expected:
                raise DataError(f"{data} has {size} bytes where {idx} says {expected}; {_PREPARE_AGAIN}")
            tokens = _mapped(data, dtype.newbyteorder("<"), 0, size // dtype.itemsize)
        except OSError as error:
            raise DataError(
                f"{error.filename or prefix} cannot be read ({error.strerror}); check its permissions"
            ) from error
        return cls(prefix, tokens, lengths, offsets, starts)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tokens.dtype

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """The tokens of each document: [documents]."""
        ends = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        return np.asarray(np.diff(ends[self.document_indices]))

    def document(self, index: int) -> NDArray[Any]:
        """Return the ids of one document with its end-of-document id: a view of the mapped file."""
        first, end = int(self.document_indices[index]), int(self.document_indices[index + 1])
        if first == end:
            return self.tokens[:0]
        start = int(self.sequence_offsets[first]) // self.dtype.itemsize
        stop = int(self.sequence_offsets[end - 1]) // self.dtype.itemsize + int(
            self.sequence_lengths[end - 1]
        )
        return self.tokens[start:stop]

    def check_index(self) -> None:
        """Raise DataError unless the sequences are contiguous and the documents cover them in order.

        Reads the whole index, gigabytes for a large corpus, so `open` does not call it.
        """
        expected = 0
        for start in range(0, self.num_sequences, _ROWS):
            sizes = self.sequence_lengths[start : start + _ROWS].astype(np.int64) * self.dtype.itemsize
            ends = np.cumsum(sizes) + expected
            if (sizes < 0).any() or not np.array_equal(
                self.sequence_offsets[start : start + _ROWS], ends - sizes
            ):
                raise DataError(f"{idx_path(self.prefix)}: sequences do not lie end to end; {_PREPARE_AGAIN}")
            expected = int(ends[-1])
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        # Blocks overlap by one row, to compare across their boundary too.
        ascending = all(
            (np.diff(self.document_indices[start : start + _ROWS + 1]) >= 0).all()
            for start in range(0, self.num_documents, _ROWS)
        )
        if first != 0 or last != self.num_sequences or not ascending:
            raise DataError(
                f"{idx_path(self.prefix)}: documents do not cover the sequences; {_PREPARE_AGAIN}"
            )


_PREPARE_AGAIN = "the pair is damaged or half copied: prepare or copy both files again"


def _read_index(
    idx: Path,
) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return (dtype, lengths, offsets, document_indices) of either kind of index. Raises DataError, OSError."""
    with idx.open("rb") as file:
        if file.read(len(LEGACY_MAGIC)) == LEGACY_MAGIC:
            return read_legacy_index(idx)
    dtype, sequences, documents = _read_header(idx)
    lengths = _mapped(idx, "<i4", _HEADER.size, sequences)
    offsets = _mapped(idx, "<i8", _HEADER.size + 4 * sequences, sequences)
    return dtype, lengths, offsets, _mapped(idx, "<i8", _HEADER.size + 12 * sequences, documents + 1)


def _read_header(idx: Path) -> tuple[np.dtype[Any], int, int]:
    """Return (dtype, number of sequences, number of documents); DataError unless the file size fits them."""
    with idx.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DataError(
            f"{idx} is not a Megatron index (it starts with {header[:9]!r}); name the prefix of a .bin/.idx pair"
        )
    _, version, code, sequences, rows = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(f"{idx} has version {version}; only version {_VERSION} is known")
    if code not in _DTYPES:
        raise DataError(f"{idx} has dtype code {code}, which holds no token ids; known are {sorted(_DTYPES)}")
    expected = _HEADER.size + 12 * sequences + 8 * rows
    size = idx.stat().st_size
    if rows < 1 or size - expected not in (0, sequences):
        raise DataError(f"{idx} has {size} bytes where its header says {expected}; {_PREPARE_AGAIN}")
    if size > expected and _mapped(idx, "i1", expected, sequences).any():
        raise DataError(f"{idx} has sequences of another mode than 0, text; prepare the text alone")
    return np.dtype(_DTYPES[code]), sequences, rows - 1


def _mapped(path: Path, dtype: str | np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
    if count == 0:  # mmap refuses an empty range
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
