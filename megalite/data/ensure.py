"""Provides the tokenizer and the token files of a run, and makes missing ones; called once, before the ranks start.

Worker processes do all heavy work: this process starts no thread pool, so that ranks can be forked from it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.schema import RunConfig
from megalite.config.text_sections import DataConfig
from megalite.data.corpus import Corpus
from megalite.data.documents import require_ends
from megalite.data.prepare import Preparation, Progress, prepare_outputs, prepared_facts
from megalite.data.split import PARTS, Split
from megalite.data.token_file import TokenFile, idx_path
from megalite.data.tokenizer import (
    END_OF_DOCUMENT,
    SENTENCEPIECE_FILE,
    Tokenizer,
    load_tokenizer,
    tokenizer_file,
)
from megalite.data.tokenizer_import import ForeignTokenizer, foreign_tokenizer
from megalite.data.tokenizer_training import train_into
from megalite.data.workers import ordered_map
from megalite.errors import DataError

_RECORD = "trained_from.json"


@dataclass(frozen=True)
class RunData:
    """The prefixes of a run's token files; weights: one per training file."""

    train: tuple[Path, ...]
    weights: tuple[float, ...]
    validation: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()


@dataclass(frozen=True)
class _Set:
    """A data set of a run: text, or the prefix of a prepared token file."""

    source: Corpus | Path
    part: str
    """One of PARTS; the first one, if data.split divides the set."""
    number: str = ""
    """The suffix of the file names of a blended set."""
    weight: float = 1.0


def ensure_tokenizer(config: RunConfig, run_folder: Path) -> Path:
    """Return the Hugging Face folder of the run's tokenizer: the given one, that of the prepared data, or a new one.

    A new one is trained, or converted from another format, in run_folder/tokenizer, and only made again if its text,
    its source or its settings changed. Raises DataError, also if they changed and the run already has checkpoints.
    """
    return _tokenizer_folder(config, run_folder, _sets(config))


def ensure_data(
    config: RunConfig, run_folder: Path, *, progress: Callable[[Progress], None] | None = None
) -> RunData:
    """Return the token files of the run: the given ones, or those in run_folder/data, prepared if out of date.

    Raises DataError, also if a given token file was made with another tokenizer, or the text changed and the run
    already has checkpoints.
    """
    sets = _sets(config)
    folder = _tokenizer_folder(config, run_folder, sets)
    tokenizer = load_tokenizer(folder, end_of_document=config.tokenizer.end_of_document)
    _check_rows(config, tokenizer)
    found: dict[str, list[Path]] = {part: [] for part in PARTS}
    for each in sets:
        if isinstance(each.source, Path):
            _check_prepared(each.source, tokenizer, config.data)
            found[each.part].append(each.source)
            continue
        preparation = _preparation(config, each, tokenizer, run_folder / "data")
        if preparation.done() is None and any(map(prepared_facts, preparation.outputs)):
            _refuse_change(config, run_folder, preparation.outputs[0])
        prepare_outputs(preparation, workers=max(1, config.data.workers), progress=progress)
        parts = (
            [each.part]
            if len(preparation.outputs) == 1
            else [PARTS[part] for part in preparation.split.parts]
        )
        for part, prefix in zip(parts, preparation.outputs, strict=True):
            found[part].append(prefix)
    return RunData(
        train=tuple(found["train"]),
        weights=tuple(each.weight for each in sets if each.part == "train"),
        validation=tuple(found["validation"]),
        test=tuple(found["test"]),
    )


def _sets(config: RunConfig) -> list[_Set]:
    """Open and return the data sets of the run; DataError if validation text is also trained on."""
    data = config.data
    sets = []
    if data.source is not None:
        sets.append(_Set(_text_or_prefix(data.source, data.text_column, data.pattern), "train"))
    for number, part in enumerate(data.blend or ()):
        source = _text_or_prefix(
            part.source, part.text_column or data.text_column, part.pattern or data.pattern
        )
        sets.append(_Set(source, "train", f"-{number}", part.weight))
    if data.validation is not None:
        sets.append(_Set(_text_or_prefix(data.validation, data.text_column, data.pattern), "validation"))
        trained = {file for each in sets[:-1] for file in _files(each)}
        shared = sorted(str(file) for file in _files(sets[-1]) & trained)
        if shared:
            raise DataError(
                f"data.validation: {shared[0]} is also training data; name other text, or set data.split"
            )
    return sets


def _files(each: _Set) -> set[Path]:
    if isinstance(each.source, Path):
        return {idx_path(each.source).resolve()}
    return {file.path for file in each.source.files}


def _preparation(config: RunConfig, each: _Set, tokenizer: Tokenizer, folder: Path) -> Preparation:
    assert isinstance(each.source, Corpus)
    shares = config.data.split if each.part == "train" and config.data.split is not None else (1.0,)
    split = Split(shares, config.run.seed)
    names = [each.part] if len(split.parts) == 1 else [PARTS[part] for part in split.parts]
    return Preparation(
        each.source,
        tokenizer,
        outputs=tuple(folder / f"{name}{each.number}" for name in names),
        min_length=config.data.min_length,
        split=split,
    )


def _check_prepared(prefix: Path, tokenizer: Tokenizer, data: DataConfig) -> None:
    """Raise DataError unless a given token file opens, has this tokenizer, and fits the settings of `data`."""
    file = TokenFile.open(prefix)
    if data.document_mask:
        require_ends(file, tokenizer.end_of_document_id)
    facts = prepared_facts(prefix)
    if facts is not None and facts.tokenizer_sha256 != tokenizer.sha256:
        raise DataError(
            f"{prefix} was prepared with {facts.tokenizer}, and the run's tokenizer is {tokenizer.file}; "
            "set tokenizer.path to the tokenizer of the file, or prepare the text again with the tokenizer of the run"
        )
    if data.split is not None and len(Split(data.split).parts) > 1:
        raise DataError(
            f"{prefix} is a prepared token file, and data.split divides text only; prepare the text with "
            "megalite data prepare --split, and name the parts as data.source and data.validation"
        )
    if data.min_length and facts is not None and facts.min_length != data.min_length:
        raise DataError(
            f"{prefix} was prepared with min_length {facts.min_length}, not data.min_length = {data.min_length}; "
            "remove the setting, or prepare the text again"
        )


def _check_rows(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise DataError if the tokenizer has more ids than the model has embedding rows."""
    rows, ids = config.model.vocab_size, tokenizer.vocab_size
    if rows != "auto" and rows < ids:
        raise DataError(
            f"model.vocab_size: {rows} is less than the {ids} ids of {tokenizer.file}; "
            f'use {ids} or more, or "auto", or name a smaller tokenizer'
        )


def _tokenizer_folder(config: RunConfig, run_folder: Path, sets: Sequence[_Set]) -> Path:
    settings = config.tokenizer
    folder = run_folder / "tokenizer"
    job: _Training | _Import
    prefixes = [each.source for each in sets if isinstance(each.source, Path)]
    texts = tuple(each.source for each in sets if isinstance(each.source, Corpus) and each.part == "train")
    if settings.path is not None:
        foreign = foreign_tokenizer(Path(settings.path))
        if foreign is None:
            return _folder_of(tokenizer_file(Path(settings.path)), settings.end_of_document)
        job = _Import(foreign, settings.end_of_document or foreign.end_of_document, folder)
    elif prefixes:
        return _tokenizer_of(prefixes[0])
    elif settings.vocab_size is None:
        raise DataError("there is no tokenizer; set tokenizer.path, or tokenizer.vocab_size to train one")
    else:
        end_of_document = settings.end_of_document or END_OF_DOCUMENT
        job = _Training(texts, settings.vocab_size, settings.kind, end_of_document, folder)
    if _is_done(job):
        return folder
    if (folder / "tokenizer.json").exists():
        _refuse_change(config, run_folder, folder)
    for _ in ordered_map(_make, [job], workers=1):
        pass
    return folder


@dataclass(frozen=True)
class _Training:
    """A tokenizer to train, and its folder."""

    texts: tuple[Corpus, ...]
    vocab_size: int
    kind: str
    end_of_document: str
    folder: Path

    def record(self) -> dict[str, str | int]:
        kind: dict[str, str | int] = {} if self.kind == "bpe" else {"kind": self.kind}
        return {
            "corpus": " ".join(text.fingerprint() for text in self.texts),
            "vocab_size": self.vocab_size,
            "end_of_document": self.end_of_document,
            **kind,
        }

    def make(self) -> None:
        pieces = (piece for text in self.texts for piece, _ in text.pieces())
        train_into(self.folder, pieces, self.vocab_size, kind=self.kind, end_of_document=self.end_of_document)


@dataclass(frozen=True)
class _Import:
    """A tokenizer to convert from another format, and its folder."""

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
    except (OSError, ValueError, RecursionError):
        return False
    return bool(found == job.record()) and (job.folder / "tokenizer.json").is_file()


def _make(job: _Training | _Import) -> None:
    record = job.folder / _RECORD
    record.unlink(missing_ok=True)
    # The folder may hold a tokenizer of another kind.
    (job.folder / SENTENCEPIECE_FILE).unlink(missing_ok=True)
    job.make()
    record.write_text(json.dumps(job.record()) + "\n", encoding="utf-8")


def _refuse_change(config: RunConfig, run_folder: Path, made: Path) -> None:
    """Raise DataError if the run has checkpoints and resumes: new data would silently change its loss curve."""
    if config.checkpoint.resume != "never" and (run_folder / "checkpoints" / "latest").exists():
        raise DataError(
            f"the text or the tokenizer settings changed since {made} was made, and the checkpoints in {run_folder} "
            "depend on it; set run.folder to a new folder, or checkpoint.resume = 'never' to start over, "
            f"or data.source = '{run_folder / 'data' / 'train'}' to go on with the old text"
        )


def _text_or_prefix(source: str | Sequence[str], text_column: str, pattern: str) -> Corpus | Path:
    """Return the corpus of a source, or the prefix if it is a prepared token file."""
    sources = [source] if isinstance(source, str) else source
    return _prepared_prefix(sources) or Corpus.open(sources, text_column=text_column, pattern=pattern)


def _prepared_prefix(sources: Sequence[str]) -> Path | None:
    """Return X if the source is X, X.bin or X.idx of a prepared pair; None if it is text."""
    for source in sources:
        path = Path(source).expanduser()
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        if path.is_dir() or (path == prefix and path.exists()) or not idx_path(prefix).exists():
            continue
        if len(sources) > 1:
            raise DataError(
                f"{source} is a prepared token file and cannot be one of several sources; name it as the only source"
            )
        return prefix
    return None


def _tokenizer_of(prefix: Path) -> Path:
    facts = prepared_facts(prefix)
    if facts is None:
        raise DataError(f"{prefix} does not record its tokenizer; set tokenizer.path")
    file = Path(facts.tokenizer)
    if not file.is_file():
        raise DataError(
            f"{prefix} was made with {file}, which does not exist any more; set tokenizer.path to its new place"
        )
    return _folder_of(file, facts.end_of_document)


def _folder_of(file: Path, end_of_document: str | None) -> Path:
    if file.name != "tokenizer.json":
        raise DataError(f"{file} is not called tokenizer.json; move it to a new folder under that name")
    load_tokenizer(file, end_of_document=end_of_document)
    return file.parent
