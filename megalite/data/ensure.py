"""The tokenizer and the token file of a run, made when they are missing. Call it before ranks start, on one process.

All heavy work happens in worker processes: this one starts no thread, so that ranks can be forked from it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.schema import RunConfig
from megalite.data.corpus import Corpus
from megalite.data.prepare import Progress, prepare, prepared_facts, prepared_fingerprint
from megalite.data.token_file import TokenFile, idx_path
from megalite.data.tokenizer import SENTENCEPIECE_FILE, load_tokenizer, tokenizer_file
from megalite.data.tokenizer_import import ForeignTokenizer, foreign_tokenizer
from megalite.data.tokenizer_training import train_into
from megalite.data.workers import ordered_map
from megalite.errors import DataError

_RECORD = "trained_from.json"


def ensure_tokenizer(config: RunConfig, run_folder: Path) -> Path:
    """The Hugging Face folder of the run's tokenizer: the given one, that of the prepared data, or one made here.

    Trained, or converted from another form, once into run_folder/tokenizer, and again only when its text, its source
    or its settings changed.
    Raises DataError, also when they changed under a run that already has checkpoints.
    """
    return _tokenizer_folder(config, run_folder, _text_or_prefix(config))


def ensure_data(
    config: RunConfig, run_folder: Path, *, progress: Callable[[Progress], None] | None = None
) -> Path:
    """The prefix of the run's token file: the given one, or run_folder/data/train, prepared when out of date.

    Raises DataError, also when a given token file was made with another tokenizer than the run's, and when the
    text changed under a run that already has checkpoints.
    """
    source = _text_or_prefix(config)
    folder = _tokenizer_folder(config, run_folder, source)
    tokenizer = load_tokenizer(folder, end_of_document=config.tokenizer.end_of_document)
    if isinstance(source, Path):
        TokenFile.open(source)
        facts = prepared_facts(source)
        if facts is not None and facts.tokenizer_sha256 != tokenizer.sha256:
            raise DataError(
                f"{source} was prepared with {facts.tokenizer}, and the run's tokenizer is {tokenizer.file}; "
                "set tokenizer.path to the former, or prepare the text again with the latter"
            )
        return source
    prefix = run_folder / "data" / "train"
    facts = prepared_facts(prefix)
    if facts is not None and facts.fingerprint != prepared_fingerprint(source, tokenizer):
        _refuse_change(config, run_folder, prefix)
    prepare(source, tokenizer, prefix, workers=max(1, config.data.workers), progress=progress)
    return prefix


def _tokenizer_folder(config: RunConfig, run_folder: Path, source: Corpus | Path) -> Path:
    settings = config.tokenizer
    folder = run_folder / "tokenizer"
    job: _Training | _Import
    if settings.path is not None:
        foreign = foreign_tokenizer(Path(settings.path))
        if foreign is None:
            return _folder_of(tokenizer_file(Path(settings.path)), settings.end_of_document)
        job = _Import(foreign, settings.end_of_document, folder)
    elif isinstance(source, Path):
        return _tokenizer_of(source)
    elif settings.vocab_size is None:
        raise DataError("there is no tokenizer; set tokenizer.path, or tokenizer.vocab_size to train one")
    else:
        job = _Training(source, settings.vocab_size, settings.kind, settings.end_of_document, folder)
    if _is_done(job):
        return folder
    if (folder / "tokenizer.json").exists():
        _refuse_change(config, run_folder, folder)
    for _ in ordered_map(_make, [job], workers=1):
        pass
    return folder


@dataclass(frozen=True)
class _Training:
    """A tokenizer to train, and where it goes."""

    corpus: Corpus
    vocab_size: int
    kind: str
    end_of_document: str
    folder: Path

    def record(self) -> dict[str, str | int]:
        kind: dict[str, str | int] = {} if self.kind == "bpe" else {"kind": self.kind}
        return {
            "corpus": self.corpus.fingerprint(),
            "vocab_size": self.vocab_size,
            "end_of_document": self.end_of_document,
            **kind,
        }

    def make(self) -> None:
        pieces = (piece for piece, _ in self.corpus.pieces())
        train_into(self.folder, pieces, self.vocab_size, kind=self.kind, end_of_document=self.end_of_document)


@dataclass(frozen=True)
class _Import:
    """A tokenizer of another form to convert, and where it goes."""

    tokenizer: ForeignTokenizer
    end_of_document: str
    folder: Path

    def record(self) -> dict[str, str | int]:
        return {"converted": self.tokenizer.fingerprint(), "end_of_document": self.end_of_document}

    def make(self) -> None:
        self.tokenizer.write_into(self.folder, self.end_of_document)


def _is_done(job: _Training | _Import) -> bool:
    try:
        found = json.loads((job.folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == job.record()) and (job.folder / "tokenizer.json").is_file()


def _make(job: _Training | _Import) -> None:
    record = job.folder / _RECORD
    record.unlink(missing_ok=True)
    # Another kind of tokenizer may have stood there.
    (job.folder / SENTENCEPIECE_FILE).unlink(missing_ok=True)
    job.make()
    record.write_text(json.dumps(job.record()) + "\n", encoding="utf-8")


def _refuse_change(config: RunConfig, run_folder: Path, made: Path) -> None:
    """DataError when `made`, about to be made anew, carries a run that goes on: its curve would silently change."""
    if config.checkpoint.resume != "never" and (run_folder / "checkpoints" / "latest").exists():
        raise DataError(
            f"the text or the tokenizer settings changed since {made} was made, and the checkpoints in {run_folder} "
            "rest on it; set run.folder to a new folder, or checkpoint.resume = 'never' to start over, "
            f"or data.source = '{run_folder / 'data' / 'train'}' to go on with the old text"
        )


def _text_or_prefix(config: RunConfig) -> Corpus | Path:
    """The text to train on, or the prefix of a token file that was given in its place."""
    data = config.data
    sources = [data.source] if isinstance(data.source, str) else data.source
    return _prepared_prefix(sources) or Corpus.open(
        sources, text_column=data.text_column, pattern=data.pattern
    )


def _prepared_prefix(sources: Sequence[str]) -> Path | None:
    """X where the source is X, X.bin or X.idx of a prepared pair; None where it is text."""
    for source in sources:
        path = Path(source).expanduser()
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        if path.is_dir() or (path == prefix and path.exists()) or not idx_path(prefix).exists():
            continue
        if len(sources) > 1:
            raise DataError(
                f"{source} is a prepared token file and cannot be one of several sources; name it alone"
            )
        return prefix
    return None


def _tokenizer_of(prefix: Path) -> Path:
    facts = prepared_facts(prefix)
    if facts is None:
        raise DataError(f"{prefix} does not say which tokenizer it was made with; set tokenizer.path")
    file = Path(facts.tokenizer)
    if not file.is_file():
        raise DataError(
            f"{prefix} was made with {file}, which is gone; set tokenizer.path to where it is now"
        )
    return _folder_of(file, facts.end_of_document)


def _folder_of(file: Path, end_of_document: str) -> Path:
    if file.name != "tokenizer.json":
        raise DataError(
            f"{file} is not called tokenizer.json; put it under that name into a folder of its own"
        )
    load_tokenizer(file, end_of_document=end_of_document)
    return file.parent
