"""The tokenizer of a run: the given one, that of the prepared data, or one that is made once in the run folder."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.sections.text_sections import TokenizerConfig
from megalite.data.files.partial_files import read_json, replace_json
from megalite.data.files.prepared import prepared_facts, recorded_tokenizer
from megalite.data.files.token_file import bin_path
from megalite.data.files.workers import ordered_map
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.tokenizer import (
    END_OF_DOCUMENT,
    SENTENCEPIECE_FILE,
    add_special_tokens,
    load_tokenizer,
    tokenizer_file,
)
from megalite.data.tokenizers.tokenizer_import import ForeignTokenizer, foreign_tokenizer, import_tokenizer
from megalite.data.tokenizers.tokenizer_training import fitting_vocab_size, train_into
from megalite.errors import DataError, counted
from megalite.monitor.preparation import PreparationConsole, megabytes

_RECORD = "trained_from.json"


@dataclass(frozen=True)
class TokenizerRequest:
    """The inputs of a run's tokenizer.

    texts: the training text. prefixes: the prepared token files. rows: the model's vocabulary, which bounds that of a
    tokenizer sized by the text; None: no bound. refuse_change: raises DataError if the run must not change.
    """

    settings: TokenizerConfig
    folder: Path
    texts: Sequence[Corpus]
    prefixes: Sequence[Path]
    rows: int | None
    refuse_change: Callable[[Path], None]


def run_tokenizer(request: TokenizerRequest, console: PreparationConsole) -> Path | None:
    """Return the Hugging Face folder of the run's tokenizer; None for prepared token files without one.

    A new one is trained, or converted from another format, and made again only if its text, its source or its settings
    changed. Raises DataError.
    """
    settings = request.settings
    if settings.path is not None:
        foreign = foreign_tokenizer(Path(settings.path))
        if foreign is None:
            added = settings.end_of_document in settings.add_tokens
            own = _folder_of(tokenizer_file(Path(settings.path)), None if added else settings.end_of_document)
            if not settings.add_tokens:
                return own
            end = settings.end_of_document or load_tokenizer(own).end_of_document
            job: _Job = _Import(own, end, request.folder, settings.add_tokens)
        else:
            end = settings.end_of_document or foreign.end_of_document
            job = _Import(foreign, end, request.folder, settings.add_tokens)
    elif request.prefixes:
        folder = _tokenizer_of(request.prefixes[0])
        _check_own_size(settings, request.prefixes[0], folder)
        return folder
    else:
        job = _training(request)
    record = _record_of(request.folder)
    if not job.made(record):
        if record is not None:
            request.refuse_change(request.folder)
        _make_in_worker(job, console)
    elif record is not None and (moved := job.moved(record)):
        # Where the text lies now, so that the next start need not read it.
        with suppress(OSError):
            replace_json(request.folder / _RECORD, {**record, **moved})
    return request.folder


@dataclass(frozen=True)
class _Training:
    """A tokenizer to train, and its folder. at_most: a short text gets fewer than `vocab_size` ids."""

    texts: tuple[Corpus, ...]
    vocab_size: int
    at_most: bool
    kind: str
    end_of_document: str
    folder: Path

    @property
    def title(self) -> str:
        size = sum(text.size_bytes for text in self.texts)
        files = sum(len(text.files) for text in self.texts)
        most = "at most " if self.at_most else ""
        return f"training a tokenizer of {most}{self.vocab_size:,} ids on {megabytes(size)} ({counted(files, 'file')})"

    def record(self) -> dict[str, Any]:
        return {
            "corpus": self._places,
            "contents": self._contents,
            "bytes": self._size_bytes,
            **self._settings,
        }

    def made(self, record: Mapping[str, Any] | None) -> bool:
        """Whether the record is of this text, wherever it lies, and of these settings."""
        if record is None or not self._settings.items() <= record.items() or self._has_other_kind(record):
            return False
        if record.get("corpus") == self._places:
            return True
        # The size first, which costs nothing.
        return record.get("bytes") == self._size_bytes and record.get("contents") == self._contents

    def moved(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {} if record.get("corpus") == self._places else {"corpus": self._places}

    def make(self) -> None:
        pieces = (piece for text in self.texts for piece, _ in text.pieces())
        train_into(
            self.folder,
            pieces,
            self.vocab_size,
            at_most=self.at_most,
            kind=self.kind,
            end_of_document=self.end_of_document,
        )

    def _has_other_kind(self, record: Mapping[str, Any]) -> bool:
        return record.get("kind", "bpe") != self.kind

    @property
    def _settings(self) -> dict[str, Any]:
        kind = {} if self.kind == "bpe" else {"kind": self.kind}
        size = f"auto, at most {self.vocab_size}" if self.at_most else self.vocab_size
        return {"vocab_size": size, "end_of_document": self.end_of_document, **kind}

    @property
    def _places(self) -> str:
        return " ".join(text.stat_fingerprint for text in self.texts)

    @property
    def _contents(self) -> str:
        return " ".join(text.content_fingerprint for text in self.texts)

    @property
    def _size_bytes(self) -> int:
        return sum(text.size_bytes for text in self.texts)


@dataclass(frozen=True)
class _Import:
    """A tokenizer to convert from another format or to copy from its folder, its new folder, and tokens to add."""

    tokenizer: ForeignTokenizer | Path
    end_of_document: str
    folder: Path
    add_tokens: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        if isinstance(self.tokenizer, Path):
            return f"adding {counted(len(self.add_tokens), 'token')} to the tokenizer {self.tokenizer}"
        return f"converting the tokenizer {self.tokenizer.files[0]}"

    def record(self) -> dict[str, Any]:
        added = {"add_tokens": list(self.add_tokens)} if self.add_tokens else {}
        return {"converted": self._fingerprint(), "end_of_document": self.end_of_document, **added}

    def made(self, record: Mapping[str, Any] | None) -> bool:
        return record == self.record()

    def moved(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def make(self) -> None:
        end = None if self.end_of_document in self.add_tokens else self.end_of_document
        if isinstance(self.tokenizer, Path):
            import_tokenizer(self.tokenizer, self.folder, end)
        else:
            self.tokenizer.write_into(self.folder, end or self.tokenizer.end_of_document)
        if self.add_tokens:
            add_special_tokens(self.folder, self.add_tokens)

    def _fingerprint(self) -> str:
        if isinstance(self.tokenizer, Path):
            return hashlib.sha256(tokenizer_file(self.tokenizer).read_bytes()).hexdigest()
        return self.tokenizer.fingerprint()


_Job = _Training | _Import


def _training(request: TokenizerRequest) -> _Training:
    settings = request.settings
    fitting = fitting_vocab_size(sum(text.text_bytes for text in request.texts))
    fitting = min(fitting, request.rows or fitting)
    size, fits = (fitting, True) if settings.vocab_size == "auto" else (settings.vocab_size, False)
    end_of_document = settings.end_of_document or END_OF_DOCUMENT
    return _Training(tuple(request.texts), size, fits, settings.kind, end_of_document, request.folder)


def _record_of(folder: Path) -> dict[str, Any] | None:
    """Return the record of the tokenizer in the run folder; {} if it has none, None without a tokenizer."""
    return read_json(folder / _RECORD) if (folder / "tokenizer.json").is_file() else None


def _make_in_worker(job: _Job, console: PreparationConsole) -> None:
    """Make the tokenizer in a process of its own, so that this one starts no thread pool and ranks can be forked."""
    console.begin(job.title)
    # The hash of the text is computed here, where the token files need it again.
    record = job.record()
    for size in ordered_map(_make, [(job, record)], workers=1, waiting=console.waiting):
        console.end(f"tokenizer: {size:,} ids")


def _make(task: tuple[_Job, dict[str, Any]]) -> int:
    job, content = task
    record = job.folder / _RECORD
    record.unlink(missing_ok=True)
    # The folder may hold a tokenizer of another kind.
    (job.folder / SENTENCEPIECE_FILE).unlink(missing_ok=True)
    job.make()
    replace_json(record, content)
    return load_tokenizer(job.folder, end_of_document=job.end_of_document).vocab_size


def _tokenizer_of(prefix: Path) -> Path | None:
    """Return the folder of the tokenizer that X.json names; None for files of another program."""
    facts = prepared_facts(prefix)
    if facts is None:
        return None
    file = recorded_tokenizer(prefix, facts)
    if file is None:
        raise DataError(
            f"{prefix} was made with {facts.tokenizer}, which does not exist any more; set tokenizer.path to its new "
            "place"
        )
    return _folder_of(file, facts.end_of_document)


def _check_own_size(settings: TokenizerConfig, prefix: Path, folder: Path | None) -> None:
    """Raise DataError if tokenizer.vocab_size asks for another tokenizer than the prepared file has."""
    if settings.vocab_size == "auto":
        return
    own = (
        None
        if folder is None
        else load_tokenizer(folder, end_of_document=settings.end_of_document).vocab_size
    )
    if own != settings.vocab_size:
        has = "no tokenizer" if own is None else f"a tokenizer of {own} ids"
        instead = "set model.vocab_size instead" if own is None else "leave it out"
        raise DataError(
            f"tokenizer.vocab_size: {settings.vocab_size} trains a tokenizer, but {bin_path(prefix)} is prepared "
            f"already, with {has}; {instead}"
        )


def _folder_of(file: Path, end_of_document: str | None) -> Path:
    if file.name != "tokenizer.json":
        raise DataError(f"{file} is not called tokenizer.json; move it to a new folder under that name")
    load_tokenizer(file, end_of_document=end_of_document)
    return file.parent
