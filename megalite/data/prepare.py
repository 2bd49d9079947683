"""From a corpus to X.bin, X.idx and X.json: encoded by several processes, published whole or not at all."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.corpus import Corpus, Piece
from megalite.data.encoding import PieceEncoder
from megalite.data.token_file import TokenWriter, bin_path, idx_path, token_dtype
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.data.workers import ordered_map
from megalite.errors import DataError

# Part of every fingerprint: counted up when the same text and tokenizer would give other files.
_FORMAT = 1
# Characters that travel to a worker at once: long enough to hide the pipe, short enough to keep all workers busy.
_BATCH_CHARACTERS = 1 << 19
# File systems without locks (Lustre mounted without flock) answer so.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


@dataclass(frozen=True)
class PreparedFacts:
    """What X.json says of X.bin and X.idx: where they come from, and what they hold."""

    fingerprint: str
    sources: tuple[str, ...]
    files: int
    documents: int
    tokens: int
    dtype: str
    bin_bytes: int
    idx_bytes: int
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_of_document: str
    end_of_document_id: int


@dataclass(frozen=True)
class Progress:
    """How far `prepare` is; bytes are those of the source files on disk."""

    bytes_read: int
    bytes_total: int
    documents: int
    tokens: int


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    prefix: Path,
    *,
    workers: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> PreparedFacts:
    """Encode every document of `corpus`, each closed by the end-of-document id, into `prefix`.bin and .idx.

    Nothing is done when `prefix`.json says that these files were made from the same files with the same tokenizer.
    The bytes do not depend on `workers` (processes beside this one; 0: none). Memory does not grow with the corpus.
    Raises DataError; then, and when interrupted, files that stood there before still do, and no other.
    """
    fingerprint = prepared_fingerprint(corpus, tokenizer)
    facts = prepared_facts(prefix)
    if facts is not None and facts.fingerprint == fingerprint:
        return facts
    written = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with _partial_files(prefix) as (bin_file, idx_file):
            with contextlib.closing(
                TokenWriter(bin_file, idx_file, token_dtype(tokenizer.vocab_size))
            ) as writer:
                for encoded, position in _encoded(corpus, tokenizer, workers):
                    encoded.write(writer)
                    written = bin_file.tell()
                    if progress is not None:
                        progress(Progress(position, corpus.size_bytes, writer.documents, writer.tokens))
                if writer.tokens == 0:
                    raise DataError(f"{', '.join(corpus.sources)} has no text; name a source that has")
                writer.finish()
            facts = _facts(corpus, tokenizer, fingerprint, writer, bin_file.tell(), idx_file.tell())
            _publish(prefix, bin_file, idx_file, facts)
    except OSError as error:
        raise _cannot_write(prefix, written, error) from error
    return facts


def prepared_fingerprint(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Equal for two calls of `prepare` exactly when they would write the same files."""
    parts = [_FORMAT, corpus.fingerprint(), tokenizer.sha256, tokenizer.end_of_document_id]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def json_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def prepared_facts(prefix: Path) -> PreparedFacts | None:
    """What was prepared at `prefix`; None unless the three files are there and fit each other by their size."""
    try:
        fields = json.loads(json_path(prefix).read_text(encoding="utf-8"))
        facts = PreparedFacts(**{**fields, "sources": tuple(fields["sources"])})
        sizes = (bin_path(prefix).stat().st_size, idx_path(prefix).stat().st_size)
    except (OSError, ValueError, TypeError, KeyError):
        return None  # another program's .json, or half a set: as good as none
    return facts if sizes == (facts.bin_bytes, facts.idx_bytes) else None


@dataclass(frozen=True)
class _Batch:
    """Consecutive pieces, and how much of the corpus has been read with the last of them."""

    pieces: list[Piece]
    position: int


@dataclass(frozen=True)
class _EncodedBatch:
    """The ids of a batch end to end, the length of each piece, and which of them end a document."""

    tokens: NDArray[Any]
    lengths: list[int]
    ends_document: list[bool]

    def write(self, writer: TokenWriter) -> None:
        start = 0
        for length, ends in zip(self.lengths, self.ends_document, strict=True):
            writer.add(self.tokens[start : start + length])
            start += length
            if ends:
                writer.end_document()


@dataclass(frozen=True)
class _Encode:
    """Encodes batches in whichever process it lands; the tokenizer is loaded there, once."""

    file: Path
    end_of_document: str

    def __call__(self, batch: _Batch) -> tuple[_EncodedBatch, int]:
        encoder, end_id, dtype = self._tools
        lengths, arrays = [], []
        for piece in batch.pieces:
            ids = encoder.ids(piece)
            if piece.ends_document:
                ids.append(end_id)
            arrays.append(np.array(ids, dtype=dtype))
            lengths.append(len(ids))
        ends = [piece.ends_document for piece in batch.pieces]
        return _EncodedBatch(np.concatenate(arrays), lengths, ends), batch.position

    @cached_property
    def _tools(self) -> tuple[PieceEncoder, int, np.dtype[Any]]:
        tokenizer = load_tokenizer(self.file, end_of_document=self.end_of_document)
        return PieceEncoder(tokenizer), tokenizer.end_of_document_id, token_dtype(tokenizer.vocab_size)


def _encoded(corpus: Corpus, tokenizer: Tokenizer, workers: int) -> Iterator[tuple[_EncodedBatch, int]]:
    encode = _Encode(tokenizer.file, tokenizer.end_of_document)
    return ordered_map(encode, _batches(corpus), workers=workers)


def _batches(corpus: Corpus) -> Iterator[_Batch]:
    pieces: list[Piece] = []
    characters = position = 0
    for piece, position in corpus.pieces():
        pieces.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield _Batch(pieces, position)
            pieces, characters = [], 0
    if pieces:
        yield _Batch(pieces, position)


def _facts(
    corpus: Corpus,
    tokenizer: Tokenizer,
    fingerprint: str,
    writer: TokenWriter,
    bin_bytes: int,
    idx_bytes: int,
) -> PreparedFacts:
    return PreparedFacts(
        fingerprint=fingerprint,
        sources=corpus.sources,
        files=len(corpus.files),
        documents=writer.documents,
        tokens=writer.tokens,
        dtype=str(token_dtype(tokenizer.vocab_size)),
        bin_bytes=bin_bytes,
        idx_bytes=idx_bytes,
        tokenizer=str(tokenizer.file.resolve()),
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        end_of_document_id=tokenizer.end_of_document_id,
    )


@contextlib.contextmanager
def _partial_files(prefix: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Two files to write and publish, beside where they will stand and ours alone; removed on any exception."""
    bin_partial, idx_partial = _partial(bin_path(prefix)), _partial(idx_path(prefix))
    with _locked(bin_partial) as bin_file:
        try:
            with idx_partial.open("wb") as idx_file:
                yield bin_file, idx_file
        except BaseException:
            # Only here: once published, these names may already be another process's.
            bin_partial.unlink(missing_ok=True)
            idx_partial.unlink(missing_ok=True)
            raise


def _partial(path: Path) -> Path:
    # Always the same name: what a killed process leaves behind, the next one overwrites.
    return path.with_name(f".{path.name}.partial")


def _locked(path: Path) -> IO[bytes]:
    """Open `path` for writing, empty; DataError when another process has it open so. The lock dies with its process."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                if isinstance(error, BlockingIOError):
                    raise DataError(
                        f"another process is preparing {path.parent}; wait for it or choose another output"
                    ) from error
                raise
        # Between opening and locking, its last owner may have published it under another name: then begin anew.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            return file
        file.close()


def _publish(prefix: Path, bin_file: IO[bytes], idx_file: IO[bytes], facts: PreparedFacts) -> None:
    """Rename .bin, then .idx, then write .json: at no moment does an index stand beside another corpus's tokens."""
    json_partial = _partial(json_path(prefix))
    try:
        with json_partial.open("w", encoding="utf-8") as file:
            json.dump(asdict(facts), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        json_path(prefix).unlink(missing_ok=True)
        idx_path(prefix).unlink(missing_ok=True)
        Path(bin_file.name).replace(bin_path(prefix))
        Path(idx_file.name).replace(idx_path(prefix))
        json_partial.replace(json_path(prefix))
    finally:
        json_partial.unlink(missing_ok=True)
    folder = os.open(prefix.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _cannot_write(prefix: Path, written_bytes: int, error: OSError) -> DataError:
    place = error.filename or prefix
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"{place}: {error.strerror} after {written_bytes} bytes of tokens; free space or choose another folder"
            " (--output, run.folder); nothing is left of this attempt"
        )
    return DataError(
        f"{place} cannot be written ({error.strerror or error}); check its permissions or choose another folder"
        " (--output, run.folder)"
    )
