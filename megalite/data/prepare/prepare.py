"""Prepares token files (X.bin, X.idx, X.json) from a corpus: in parallel, atomically, and resumable after a kill."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.chat.conversation_encoding import ChatEncoding
from megalite.data.files import trained_tokens
from megalite.data.files.partial_files import (
    PartialFiles,
    journal_path,
    json_path,
    partial_files,
    publish,
    read_json,
    write_journal,
)
from megalite.data.files.prepared import PreparedFacts, prepared_facts, update_facts
from megalite.data.files.token_file import (
    TokenFile,
    TokenWriter,
    WriterState,
    bin_path,
    idx_path,
    token_dtype,
)
from megalite.data.files.workers import ordered_map
from megalite.data.prepare.encoded_batches import EncodedBatch, batch_encoder, batches
from megalite.data.prepare.split import PARTS, WHOLE, Split
from megalite.data.prepare.token_split import cut_by_tokens, part_sizes
from megalite.data.text.corpus import Corpus, Place
from megalite.data.text.row_counts import RowCounts
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError, write_remedy
from megalite.monitor.preparation import PreparationProgress

# Part of every fingerprint; incremented when the same text and tokenizer would give other files.
_FORMAT = 1
# Batches between two journal entries, about ten seconds of one core: the work that a kill loses at most.
_JOURNAL_BATCHES = 64
# The documents that a writer has counted: skipped, and conversations that were too long.
_LEFT_OUT = ("short", "dropped", "truncated")


@dataclass(frozen=True)
class Preparation:
    """The inputs and outputs of a preparation.

    outputs: a prefix for each part of `split` that gets documents. min_length: in tokens, without the end of document;
    shorter documents are skipped. sequence_length: in tokens; parts that divide a document hold whole sequences.
    chat: given, the documents are conversations (ConversationCorpus), or pairs of these (PairCorpus).
    """

    corpus: Corpus
    tokenizer: Tokenizer
    outputs: tuple[Path, ...]
    min_length: int = 0
    split: Split = WHOLE
    sequence_length: int = 1
    chat: ChatEncoding | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The number type of the tokens."""
        return token_dtype(self.tokenizer.vocab_size) if self.chat is None else trained_tokens.DTYPE

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for two preparations that write the same files from files at the same places."""
        return self._hash(self.corpus.stat_fingerprint)

    @property
    def content_fingerprint(self) -> str:
        """A hash that is equal for two preparations that write the same files, wherever the text lies; reads it all."""
        return self._hash(self.corpus.content_fingerprint)

    @property
    def journal_key(self) -> dict[str, Any]:
        """The fields by which a journal names the preparation that it belongs to."""
        return {
            "content": self.content_fingerprint,
            "outputs": [str(prefix) for prefix in self.outputs],
        }

    def done(self) -> list[PreparedFacts] | None:
        """Return the facts of all outputs if this preparation has already written them, else None.

        A text that was moved, copied or touched is read and compared by its content; the outputs then record where it
        lies now.
        """
        facts = [known for prefix in self.outputs if (known := prepared_facts(prefix)) is not None]
        if len(facts) != len(self.outputs):
            return None
        if all(each.fingerprint == self.fingerprint for each in facts):
            return facts
        recorded = {(each.content_fingerprint, each.source_bytes) for each in facts}
        # The size first, which costs nothing.
        if {size for _, size in recorded} != {self.corpus.size_bytes}:
            return None
        if {content for content, _ in recorded} != {self.content_fingerprint}:
            return None
        moved = [replace(each, fingerprint=self.fingerprint, sources=self.corpus.sources) for each in facts]
        for prefix, moved_facts in zip(self.outputs, moved, strict=True):
            update_facts(prefix, moved_facts)
        return moved

    def _hash(self, corpus: str) -> str:
        parts: list[Any] = [_FORMAT, corpus, self.tokenizer.sha256, self.tokenizer.end_of_document_id]
        if self.min_length:
            parts.append({"min_length": self.min_length})
        if len(self.outputs) > 1:
            parts.append({"split": [self.split.shares, self.split.seed]})
        if self.chat is not None:
            parts.append({"chat": self.chat.parts})
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def prepare_outputs(
    preparation: Preparation,
    *,
    workers: int = 0,
    progress: Callable[[PreparationProgress], None] | None = None,
) -> list[PreparedFacts]:
    """Encode the documents of a corpus, each followed by the end-of-document id, into one or more token files.

    Returns at once if the .json files name the same sources and tokenizer. The bytes do not depend on `workers`
    (additional processes; 0: none) or on kills and resumes. Memory does not grow with the corpus.
    Raises DataError; the files of an earlier preparation then stay as they were.
    """
    done = preparation.done()
    if done is not None:
        return done
    _check_outputs(preparation)
    preparation.corpus.require_text()
    if _has_too_few_documents(preparation):
        return _prepare_by_tokens(preparation, workers, progress)
    written = 0
    first = preparation.outputs[0]
    try:
        for prefix in preparation.outputs:
            prefix.parent.mkdir(parents=True, exist_ok=True)
        with partial_files(preparation.outputs) as files:
            state, writers = _resumed(preparation, files)
            encoded = ordered_map(
                batch_encoder(preparation.tokenizer, preparation.chat),
                batches(preparation.corpus, state.place),
                workers=workers,
            )
            for count, (batch, place) in enumerate(encoded, start=1):
                state.document = _write(batch, writers, preparation.split, state.document)
                state.counts.add(batch.counts)
                state.place = place
                written = sum(each.bin_file.tell() for each in files)
                if count % _JOURNAL_BATCHES == 0 and not any(writer.undecided for writer in writers):
                    write_journal(first, state.entry(preparation, writers))
                if progress is not None:
                    progress(_progress(preparation.corpus, place, writers))
            _check_not_empty(preparation, writers)
            return _published(preparation, files, writers, state.counts.as_json)
    except OSError as error:
        raise _cannot_write(first, written, error) from error


def _has_too_few_documents(preparation: Preparation) -> bool:
    """Whether the split by documents would leave a part empty."""
    split, corpus = preparation.split, preparation.corpus
    if len(split.parts) == 1:
        return False
    # A file that is one document need not be read to be counted.
    one_each = all(file.kind in ("text", "optional") for file in corpus.files)
    if preparation.chat is None and one_each and not split.fills_all(corpus.files):
        return True
    # Conversations are never divided: `_check_not_empty` refuses an empty part.
    return preparation.chat is None and not split.fills_all(
        piece for piece, _ in corpus.pieces() if piece.ends_document
    )


def _prepare_by_tokens(
    preparation: Preparation, workers: int, progress: Callable[[PreparationProgress], None] | None
) -> list[PreparedFacts]:
    """Prepare the whole text in a hidden file beside the first output, then cut it between two tokens."""
    first = preparation.outputs[0]
    whole = first.with_name(f".{first.name}.whole")
    alone = replace(preparation, outputs=(whole,), split=WHOLE)
    [facts] = prepare_outputs(alone, workers=workers, progress=progress)
    file, source = TokenFile.open(whole), ", ".join(preparation.corpus.sources)
    try:
        sizes = part_sizes(file.num_tokens, preparation.split, preparation.sequence_length, source)
    except DataError:
        _remove_pair(whole)
        raise
    written = 0
    try:
        with partial_files(preparation.outputs) as files:
            writers = [_DocumentWriter(file, preparation.dtype) for file in files]
            cut_by_tokens(file, sizes, writers, preparation.tokenizer.end_of_document_id)
            written = sum(each.bin_file.tell() for each in files)
            writers[0].short = facts.short_documents
            published = _published(preparation, files, writers, facts.counts, split_by_tokens=True)
        _remove_pair(whole)
    except OSError as error:
        raise _cannot_write(first, written, error) from error
    return published


class _DocumentWriter(TokenWriter):
    """Writes documents of at least `min_length` tokens, and counts the others and those cut.

    saved: the fields of `saved_fields` to resume from.
    """

    def __init__(
        self,
        files: PartialFiles,
        dtype: np.dtype[Any],
        min_length: int = 0,
        saved: Mapping[str, Any] | None = None,
    ):
        fields = dict(saved or {})
        self.short, self.dropped, self.truncated = (fields.pop(name, 0) for name in _LEFT_OUT)
        state = WriterState(**fields)
        files.cut(state.bin_bytes, state.lengths_bytes)
        super().__init__(files.bin_file, files.idx_file, dtype, lengths_file=files.lengths_file, state=state)
        self._min_length = min_length
        self._document_tokens = 0
        self._pending: list[NDArray[Any]] = []
        # An open document of a resumed writer is long enough: tokens of shorter ones are never written.
        self._passing = self.in_document

    @property
    def undecided(self) -> bool:
        """Whether the open document may still be too short."""
        return bool(self._pending)

    def saved_fields(self) -> dict[str, Any]:
        """Flush both files to the disk, and return what a journal keeps."""
        return {**{name: getattr(self, name) for name in _LEFT_OUT}, **asdict(self.saved_state())}

    def add_piece(self, tokens: NDArray[Any], *, closing: bool, too_long: bool = False) -> None:
        """Append the next tokens of a document.

        closing: they are its last ones and end in the end-of-document id. too_long: a conversation that was cut, or,
        without tokens, left out.
        """
        if too_long and not len(tokens):
            self.dropped += 1
            return
        self.truncated += too_long
        self._document_tokens += len(tokens) - closing
        self._pending.append(tokens)
        if self._passing or self._document_tokens >= self._min_length:
            self._passing = True
            for pending in self._pending:
                self.add(pending)
            self._pending = []
        if closing:
            if self._passing:
                self.end_document()
            else:
                self.short += 1
            self._document_tokens, self._pending, self._passing = 0, [], False


@dataclass
class _State:
    """The progress between two batches: the position in the corpus, the number of the next document, what was read."""

    place: Place
    document: int
    counts: RowCounts

    def entry(self, preparation: Preparation, writers: Sequence[_DocumentWriter]) -> dict[str, Any]:
        """Return the journal entry."""
        return {
            **preparation.journal_key,
            "place": asdict(self.place),
            "document": self.document,
            "counts": self.counts.as_json,
            "writers": [writer.saved_fields() for writer in writers],
        }


def _resumed(preparation: Preparation, files: Sequence[PartialFiles]) -> tuple[_State, list[_DocumentWriter]]:
    """Return the state and the writers of the journal if it is of this preparation, else those of a new one.

    The content of the text decides, which what is published records, too: chmod does not take a journal away.
    """
    journal = read_json(journal_path(preparation.outputs[0]))
    state = _State(Place(), 0, RowCounts())
    saved: list[dict[str, Any]] = [{} for _ in files]
    if preparation.journal_key.items() <= journal.items():
        sizes = [(fields["bin_bytes"], fields["lengths_bytes"]) for fields in journal["writers"]]
        if all(file.cut(*size) for file, size in zip(files, sizes, strict=True)):
            counts = RowCounts.of_json(journal.get("counts", {}))
            state, saved = _State(Place(**journal["place"]), journal["document"], counts), journal["writers"]
    writers = [
        _DocumentWriter(file, preparation.dtype, preparation.min_length, fields)
        for file, fields in zip(files, saved, strict=True)
    ]
    return state, writers


def _write(batch: EncodedBatch, writers: Sequence[_DocumentWriter], split: Split, document: int) -> int:
    """Write each piece to the part of its document, starting at number `document`; return the next number."""
    start = 0
    writer_of_part = dict(zip(split.parts, writers, strict=True))
    for place, (length, ends) in enumerate(zip(batch.lengths, batch.ends_document, strict=True)):
        writer_of_part[split.part(document)].add_piece(
            batch.tokens[start : start + length],
            # Conversations that a split keeps together are documents of their own.
            closing=ends or batch.too_long is not None,
            too_long=batch.too_long is not None and batch.too_long[place],
        )
        start += length
        document += ends
    return document


def _progress(corpus: Corpus, place: Place, writers: Sequence[_DocumentWriter]) -> PreparationProgress:
    documents = sum(each.documents for each in writers)
    return PreparationProgress(
        place.bytes_read, corpus.size_bytes, documents, sum(each.tokens for each in writers)
    )


def _check_outputs(preparation: Preparation) -> None:
    """Raise DataError if an output is one of the inputs."""
    read = {file.path for file in preparation.corpus.files} | {preparation.tokenizer.file.resolve()}
    for prefix in preparation.outputs:
        for path in (bin_path(prefix), idx_path(prefix), json_path(prefix)):
            if path.resolve() in read:
                raise DataError(
                    f"{path} is an input of this preparation and cannot be its output; choose another output (--output)"
                )


def _check_not_empty(preparation: Preparation, writers: Sequence[_DocumentWriter]) -> None:
    kept = sum(each.documents for each in writers)
    short = sum(each.short for each in writers)
    sources = ", ".join(preparation.corpus.sources)
    dropped = sum(each.dropped for each in writers)
    if not kept and dropped and (chat := preparation.chat) is not None:
        raise DataError(
            f"all {dropped // chat.documents} {chat.unit}s of {sources} are longer than training.sequence_length = "
            f'{preparation.sequence_length}; raise it, or set data.too_long = "truncate"'
        )
    if not kept and short:
        raise DataError(
            f"all {short} documents of {sources} have fewer than {preparation.min_length} tokens; "
            "lower data.min_length (--min-length)"
        )
    for part, writer in zip(preparation.split.parts, writers, strict=True):
        if not writer.documents:
            raise DataError(
                f"data.split: the {PARTS[part]} part gets none of the {kept} documents of {sources} with "
                f"{preparation.min_length} tokens or more; lower data.min_length (--min-length), or raise the part's "
                "share (--split)"
            )


def _remove_pair(prefix: Path) -> None:
    for path in (bin_path(prefix), idx_path(prefix), json_path(prefix)):
        path.unlink(missing_ok=True)


def _published(
    preparation: Preparation,
    files: Sequence[PartialFiles],
    writers: Sequence[_DocumentWriter],
    counts: dict[str, Any],
    *,
    split_by_tokens: bool = False,
) -> list[PreparedFacts]:
    facts = []
    tokenizer, chat = preparation.tokenizer, preparation.chat
    for partial, writer in zip(files, writers, strict=True):
        writer.finish()
        facts.append(
            PreparedFacts(
                fingerprint=preparation.fingerprint,
                sources=preparation.corpus.sources,
                files=len(preparation.corpus.files),
                documents=writer.documents,
                tokens=writer.tokens,
                dtype=str(preparation.dtype),
                bin_bytes=partial.bin_file.tell(),
                idx_bytes=partial.idx_file.tell(),
                tokenizer=str(tokenizer.file.resolve()),
                tokenizer_sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                end_of_document=tokenizer.end_of_document,
                end_of_document_id=tokenizer.end_of_document_id,
                min_length=preparation.min_length,
                short_documents=writer.short,
                source_bytes=preparation.corpus.size_bytes,
                content_fingerprint=preparation.content_fingerprint,
                largest_id=writer.largest_id,
                tokenizer_beside=os.path.relpath(tokenizer.file.resolve(), partial.prefix.parent.resolve()),
                split_by_tokens=split_by_tokens,
                kind="text" if chat is None else chat.kind,
                sequence_length=0 if chat is None else chat.sequence_length,
                truncated_documents=writer.truncated,
                dropped_documents=writer.dropped,
                train_on="" if chat is None else chat.train_on,
                chat_template="" if chat is None else chat.template.origin,
                chat_template_sha256="" if chat is None else chat.template.sha256,
                counts=counts,
            )
        )
    journal_path(preparation.outputs[0]).unlink(missing_ok=True)
    for partial, fact in zip(files, facts, strict=True):
        publish(partial, asdict(fact))
    return facts


def _cannot_write(prefix: Path, written_bytes: int, error: OSError) -> DataError:
    path = error.filename or prefix
    another = "choose another folder (run.folder; of megalite data prepare: --output)"
    if remedy := write_remedy(error, full=f"free space or {another}"):
        return DataError(
            f"{path}: {error.strerror} after {written_bytes} bytes of tokens, which were removed again; {remedy}"
        )
    remedy = write_remedy(error, full="", forbidden=f"check its permissions or {another}") or another
    return DataError(f"{path} cannot be written ({error.strerror or error}); {remedy}")
