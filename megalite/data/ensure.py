"""Provides the tokenizer and the token files of a run, and makes missing ones; called once, before the ranks start.

Worker processes do all heavy work: this process starts no thread pool, so that ranks can be forked from it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megalite.config.sections.schema import RunConfig
from megalite.config.sections.text_sections import BlendPart
from megalite.data.batches.conversation_rows import ConcatenatedRows, packing_of, rows_of
from megalite.data.batches.documents import require_ends
from megalite.data.batches.length_buckets import buckets_of, fill
from megalite.data.batches.megatron_order import prepare_samples, training_order, validation_order
from megalite.data.batches.stream_files import StreamFile, first_rows, stream_files
from megalite.data.batches.stream_lane import require_documents
from megalite.data.chat.chat_settings import chat_encoding, require_same_chat
from megalite.data.chat.conversation_corpus import CORPUS_OF
from megalite.data.chat.conversation_encoding import ChatEncoding, TooLong
from megalite.data.chat.turn_end import turn_end_notes
from megalite.data.files.fingerprint import content_fingerprint
from megalite.data.files.prepared import PreparedFacts, prepared_facts, source_notes
from megalite.data.files.token_file import TokenFile, bin_path, idx_path, prepared_prefix
from megalite.data.prepare.prepare import Preparation, prepare_outputs
from megalite.data.prepare.split import PARTS, Split
from megalite.data.prepare.token_ids import largest_id, require_ids
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.run_tokenizer import TokenizerRequest, run_tokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.errors import DataError, counted
from megalite.monitor.preparation import PreparationConsole, megabytes


@dataclass(frozen=True)
class RunData:
    """The tokenizer's folder and the prefixes of a run's token files.

    tokenizer: None for prepared token files without one. weights: one per training file. notes: lines for the start.
    stream: the training text with data.streaming, in place of `train`. fingerprints: setting -> hash of what it gives:
    the ids of the tokenizer, the tokens of each set, or the streamed files.
    """

    tokenizer: Path | None
    train: tuple[Path, ...]
    weights: tuple[float, ...]
    validation: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    stream: tuple[StreamFile, ...] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Set:
    """A data set of a run: text, or the prefix of a prepared token file."""

    key: str
    """The setting that names it."""
    source: Corpus | Path
    part: str
    """One of PARTS; the first one, if data.split divides the set."""
    suffix: str = ""
    """The end of the file names of a blended set."""
    weight: float = 1.0


def ensure_data(
    config: RunConfig, run_folder: Path, console: PreparationConsole | None = None, changed: str = ""
) -> RunData:
    """Return the tokenizer and the token files of the run: the given ones, or those in run_folder, made if out of date.

    Raises DataError, also if a given token file was made with another tokenizer or does not fit the model's vocabulary,
    or if the text changed and the run already has checkpoints. console: default: one that prints to stdout.
    changed: the settings of the text that are not those of these checkpoints, for that error.
    """
    console = console or PreparationConsole()
    sets = _sets(config)
    training = [part_set for part_set in sets if part_set.part == "train"]
    for part_set in sets:
        if isinstance(part_set.source, Corpus):
            part_set.source.require_text()
    rows = None if config.model.vocab_size == "auto" else config.model.vocab_size
    refuse_change = partial(_refuse_change, config, run_folder, changed)
    request = TokenizerRequest(
        config.tokenizer,
        run_folder / "tokenizer",
        texts=[each.source for each in training if isinstance(each.source, Corpus)],
        prefixes=[each.source for each in sets if isinstance(each.source, Path)],
        rows=rows,
        refuse_change=refuse_change,
    )
    folder = run_tokenizer(request, console)
    tokenizer = None
    if folder is not None:
        tokenizer = load_tokenizer(folder, end_of_document=config.tokenizer.end_of_document)
        if config.tokenizer.add_tokens and rows is not None:
            rows = max(rows, tokenizer.vocab_size)
        _check_rows(rows, tokenizer)
    prefixes_of: dict[str, list[Path]] = {part: [] for part in PARTS}
    stream, stream_notes = _stream(config, training)
    notes = list(stream_notes)
    for part_set in sets[len(training) :] if stream else sets:
        if isinstance(part_set.source, Path):
            _check_prepared(part_set, part_set.source, tokenizer, config)
            _check_ids(part_set.source, tokenizer, rows, run_folder)
            notes += source_notes(prepared_facts(part_set.source))
            prefixes_of[part_set.part].append(part_set.source)
            continue
        preparation, facts = _prepare(
            config, part_set, tokenizer, run_folder / "data", refuse_change, console
        )
        notes += [*_notes(preparation, facts), *source_notes(facts[0])]
        is_split = len(preparation.outputs) > 1
        parts = [PARTS[part] for part in preparation.split.parts] if is_split else [part_set.part]
        for part, prefix in zip(parts, preparation.outputs, strict=True):
            prefixes_of[part].append(prefix)
    if not stream:
        notes += _samples(config, training, prefixes_of, run_folder / "data")
    return RunData(
        tokenizer=folder,
        train=tuple(prefixes_of["train"]),
        weights=() if stream else tuple(part_set.weight for part_set in training),
        validation=tuple(prefixes_of["validation"]),
        test=tuple(prefixes_of["test"]),
        notes=tuple(notes),
        stream=stream,
        fingerprints=_fingerprints(config, tokenizer, training, prefixes_of, stream),
    )


def _samples(
    config: RunConfig, training: Sequence[_Set], prefixes_of: Mapping[str, Sequence[Path]], folder: Path
) -> Iterator[str]:
    """Check that the files have samples, and yield notes about them. Raises DataError.

    folder: keeps the indices of Megatron's order.
    """
    if config.data.kind != "text":
        yield from _rows(config, prefixes_of)
    elif config.data.order == "megatron":
        samples = prepare_samples(prefixes_of["train"], training_order(config), folder)
        yield f"train: {counted(len(samples), 'sample')} in Megatron's order (data.order)"
        if config.validation.samples is not None:
            prefixes = prefixes_of["validation"] or prefixes_of["train"]
            samples = prepare_samples(prefixes, validation_order(config), folder)
            yield f"validation: {counted(len(samples), 'sample')} in Megatron's order"
    else:
        for part_set, prefix in zip(training, prefixes_of["train"], strict=True):
            _require_a_sequence(part_set, prefix, config.training.sequence_length)


def _fingerprints(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    training: Sequence[_Set],
    prefixes_of: Mapping[str, Sequence[Path]],
    stream: Sequence[StreamFile],
) -> dict[str, str]:
    """Return RunData.fingerprints. Raises DataError."""

    def of_tokens(*prefixes: Path) -> str:
        return content_fingerprint([path(each) for each in prefixes for path in (bin_path, idx_path)])

    keys = [part_set.key for part_set in training]
    if stream:
        # How documents are read and counted is part of a place in them.
        how = f"{config.data.text_column} {config.data.min_length}"
        prints = {keys[0]: f"{content_fingerprint([file.path for file in stream])} {how}"}
    else:
        prints = {key: of_tokens(prefix) for key, prefix in zip(keys, prefixes_of["train"], strict=True)}
    if prefixes_of["validation"]:
        prints["data.validation"] = of_tokens(*prefixes_of["validation"])
    if tokenizer is not None:
        prints["tokenizer.path"] = f"{tokenizer.sha256} {tokenizer.end_of_document_id}"
    return prints


def _stream(config: RunConfig, training: Sequence[_Set]) -> tuple[tuple[StreamFile, ...], Iterable[str]]:
    """Return the files that the run streams, each lane with a document, and notes; none without data.streaming."""
    if not config.data.streaming:
        return (), ()
    [source] = [part_set.source for part_set in training]
    if isinstance(source, Path):
        raise DataError(
            f"data.source: {bin_path(source)} is a prepared token file, which needs no tokenizing; "
            "set data.streaming = false, or name the text that the file was made from"
        )
    files = stream_files(source)
    batch, data = config.batch, config.data
    require_documents(
        files,
        batch.global_batch_size,
        data.text_column,
        min_length=data.min_length,
        multiple=batch.micro_batch_size * batch.data,
    )
    counts = first_rows(files, data.text_column)
    return files, counts.sentences(source.sources, "first row")


def _sets(config: RunConfig) -> list[_Set]:
    """Open and return the data sets of the run; DataError if validation text is also trained on."""
    data = config.data
    asked = [] if data.source is None else [("data.source", BlendPart(source=data.source, weight=1.0), "")]
    for number, blend_part in enumerate(data.blend or ()):
        asked.append((f"data.blend[{number + 1}].source", blend_part, f"-{number}"))
    if data.validation is not None:
        asked.append(("data.validation", BlendPart(source=data.validation, weight=1.0), ""))
    sets = []
    for key, part, suffix in asked:
        sources = [part.source] if isinstance(part.source, str) else part.source
        source = prepared_prefix(sources, key) or CORPUS_OF[data.kind].open(
            sources,
            text_column=part.text_column or data.text_column,
            pattern=part.pattern or data.pattern,
            key=key,
        )
        if isinstance(source, Corpus) and data.order == "megatron":
            raise DataError(
                f'{key}: data.order = "megatron" orders .bin/.idx files, and {", ".join(source.sources)} is text; name '
                "Megatron's files, or prepare the text (megalite data prepare)"
            )
        name = "validation" if key == "data.validation" else "train"
        sets.append(_Set(key, source, name, suffix, part.weight))
    if data.validation is not None:
        trained = {file for part_set in sets[:-1] for file in _files(part_set)}
        shared = [str(path) for file, path in _files(sets[-1]).items() if file in trained]
        if shared:
            raise DataError(
                f"data.validation: {min(shared)} is also training data; name other text, or set data.split"
            )
    return sets


def _files(part_set: _Set) -> dict[Path, Path]:
    """Return the files of a set: their absolute paths -> the paths that the user wrote."""
    if isinstance(part_set.source, Path):
        return {idx_path(part_set.source).resolve(): idx_path(part_set.source)}
    return {file.place: file.path for file in part_set.source.files}


def _prepare(
    config: RunConfig,
    part_set: _Set,
    tokenizer: Tokenizer | None,
    folder: Path,
    refuse_change: Callable[[Path], None],
    console: PreparationConsole,
) -> tuple[Preparation, list[PreparedFacts]]:
    """Make the token files of a text in `folder` unless they are up to date, and show the progress. Raises DataError.

    refuse_change: raises DataError if the files must not change.
    """
    corpus = part_set.source
    assert isinstance(corpus, Corpus)
    if tokenizer is None:
        raise DataError(
            f"{part_set.key}: {', '.join(corpus.sources)} is text, and the prepared token file beside it "
            "has no tokenizer; set tokenizer.path"
        )
    shares = config.data.split if part_set.part == "train" and config.data.split is not None else (1.0,)
    split = Split(shares, config.run.seed)
    names = [part_set.part] if len(split.parts) == 1 else [PARTS[part] for part in split.parts]
    chat = _chat(config, tokenizer)
    preparation = Preparation(
        corpus,
        tokenizer,
        outputs=tuple(folder / f"{name}{part_set.suffix}" for name in names),
        min_length=config.data.min_length,
        split=split,
        sequence_length=config.training.sequence_length,
        chat=chat,
    )
    facts = preparation.done()
    if facts is not None:
        return preparation, facts
    if any(map(prepared_facts, preparation.outputs)):
        refuse_change(preparation.outputs[0])
    if chat is not None:
        may_add = config.tokenizer.path is not None and config.adapter.kind == "none"
        for note in turn_end_notes(chat.template, tokenizer, may_add_tokens=may_add):
            console.note(note)
    console.begin(f"tokenizing {megabytes(corpus.size_bytes)} of text ({counted(len(corpus.files), 'file')})")
    facts = prepare_outputs(preparation, workers=max(1, config.data.workers), progress=console.progress)
    what, each_row = ("document", 1) if chat is None else (_unit(chat.unit, facts[0]), chat.documents)
    documents, tokens = sum(part.documents for part in facts), sum(part.tokens for part in facts)
    console.end(f"data: {counted(documents // each_row, what)}, {tokens:,} tokens")
    return preparation, facts


def _chat(config: RunConfig, tokenizer: Tokenizer) -> ChatEncoding | None:
    data = config.data
    if data.kind == "text":
        return None
    too_long: TooLong = "keep" if data.packing == "concatenate" else data.too_long
    length = config.training.sequence_length
    return chat_encoding(
        tokenizer, config.tokenizer.chat_template, data.train_on, length, too_long, kind=data.kind
    )


def _unit(unit: str, facts: PreparedFacts | None) -> str:
    """Return `unit`, or "sample" where the chat template makes several of a conversation."""
    return "sample" if facts is not None and facts.unit == "sample" else unit


def _notes(preparation: Preparation, facts: Sequence[PreparedFacts]) -> Iterator[str]:
    if facts[0].split_by_tokens:
        parts = [PARTS[part] for part in preparation.split.parts]
        counts = (f"{each.tokens:,} for {part}" for part, each in zip(parts, facts, strict=True))
        yield (
            f"data.split: {', '.join(preparation.corpus.sources)} has too few documents and is split by tokens: "
            f"{', '.join(counts)}"
        )
    cut = sum(each.truncated_documents for each in facts)
    dropped = sum(each.dropped_documents for each in facts)
    if (cut or dropped) and (chat := preparation.chat) is not None:
        whole = sum(each.documents for each in facts) + dropped
        # The two answers of a pair are cut each by itself, but left out together.
        unit, each_row = ("conversation", 1) if cut else (chat.unit, chat.documents)
        unit = _unit(unit, facts[0])
        yield (
            f"data.too_long: {(cut or dropped) // each_row:,} of the {whole // each_row:,} {unit}s in "
            f"{', '.join(preparation.corpus.sources)} are longer than training.sequence_length, "
            f"and were {'cut' if cut else 'left out'}"
        )


def _rows(config: RunConfig, prefixes_of: Mapping[str, Sequence[Path]]) -> Iterator[str]:
    """Pack the conversations of every set, and say how full their sequences are. Raises DataError."""
    length, data = config.training.sequence_length, config.data
    for part, prefixes in prefixes_of.items():
        for prefix in prefixes:
            if data.length_buckets and part == "train":
                yield _buckets(config, TokenFile.open(prefix))
                continue
            rows = rows_of(TokenFile.open(prefix), length, packing_of(data), config.run.seed)
            cut = f", {rows.cut:,} cut at its end" if isinstance(rows, ConcatenatedRows) else ""
            unit = _unit("conversation", prepared_facts(prefix))
            what = counted(rows.token_file.num_documents, unit)
            packed = f"(data.packing = {data.packing!r})"
            if data.kind == "preference":
                _require_pairs(rows.token_file)
                what, packed = counted(rows.token_file.num_documents // 2, "pair"), "(an answer in each)"
            sequences = f"{counted(len(rows), 'sequence')} of {length} tokens"
            yield f"{part}: {what} in {sequences}, {rows.fill:.1%} filled{cut} {packed}"


def _require_pairs(file: TokenFile) -> None:
    """Raise DataError for a token file of preferences that is not the one which was written."""
    if file.num_documents % 2:
        raise DataError(
            f"{file.prefix} has {file.num_documents} documents, which are no pairs of a chosen and a rejected answer; "
            "prepare the data again"
        )


def _buckets(config: RunConfig, file: TokenFile) -> str:
    """Say which lengths the buckets of a training file have. Raises DataError for too long conversations."""
    size, count = config.batch.global_batch_size, config.data.length_buckets
    buckets = buckets_of(file, config.training.sequence_length, size, count)
    lengths = ", ".join(str(bucket.length) for bucket in buckets)
    unit = _unit("conversation", prepared_facts(file.prefix))
    return (
        f"train: {counted(file.num_documents, unit)} in {counted(len(buckets), 'bucket')} of {lengths} "
        f"tokens, {fill(file.document_lengths - 1, buckets):.1%} filled (data.length_buckets = {count})"
    )


def _check_prepared(part_set: _Set, prefix: Path, tokenizer: Tokenizer | None, config: RunConfig) -> None:
    """Raise DataError unless a given token file opens, has this tokenizer, and fits the settings of the data."""
    file, data = TokenFile.open(prefix), config.data
    if data.document_mask and data.kind == "text":
        if tokenizer is None:
            raise DataError(
                f"data.document_mask looks for the end-of-document id, and {bin_path(prefix)} has no tokenizer to take "
                "it from; set tokenizer.path, or data.document_mask = false"
            )
        require_ends(file, tokenizer.end_of_document_id)
    facts = prepared_facts(prefix)
    kind = "text" if facts is None else facts.kind
    if kind != data.kind:
        raise DataError(
            f"{prefix} was prepared as {kind!r}, and data.kind is {data.kind!r}; set data.kind = {kind!r}, or name "
            "other data"
        )
    if facts is not None and tokenizer is not None and facts.tokenizer_sha256 != tokenizer.sha256:
        raise DataError(
            f"{prefix} was prepared with {facts.tokenizer}, and the run's tokenizer is {tokenizer.file}; "
            "set tokenizer.path to the tokenizer of the file, or prepare the text again with the tokenizer of the run"
        )
    if facts is not None and kind == "instruct":
        require_same_chat(prefix, facts, tokenizer, config.tokenizer.chat_template, data)
    if data.split is not None and len(Split(data.split).parts) > 1 and data.order != "megatron":
        raise DataError(
            f"{prefix} is a prepared token file, and data.split divides text only; prepare the text with "
            f"megalite data prepare --split, and name the parts as {part_set.key} and data.validation"
        )
    if data.min_length and facts is not None and facts.min_length != data.min_length:
        raise DataError(
            f"{prefix} was prepared with min_length {facts.min_length}, not data.min_length = {data.min_length}; "
            "remove the setting, or prepare the text again"
        )


def _check_ids(prefix: Path, tokenizer: Tokenizer | None, rows: int | None, run_folder: Path) -> None:
    """Raise DataError unless the model has an embedding row for every id of a prepared token file."""
    file, cache = TokenFile.open(prefix), run_folder / "data" / "checked-ids.json"
    if rows is None and tokenizer is None:
        least = largest_id(file, cache) + 1
        raise DataError(
            f'model.vocab_size: "auto" takes the size of the tokenizer, but {bin_path(prefix)} has none; set it '
            f"to {least} or more (the largest id is {least - 1}), or set tokenizer.path"
        )
    if rows is None:
        assert tokenizer is not None
        rows = tokenizer.vocab_size
    require_ids(file, rows, cache)


def _check_rows(rows: int | None, tokenizer: Tokenizer) -> None:
    """Raise DataError if the tokenizer has more ids than the model has embedding rows."""
    ids = tokenizer.vocab_size
    if rows is not None and rows < ids:
        raise DataError(
            f"model.vocab_size: {rows} is less than the {ids} ids of {tokenizer.file}; "
            f'use {ids} or more, or "auto", or name a smaller tokenizer'
        )


def _require_a_sequence(part_set: _Set, prefix: Path, sequence_length: int) -> None:
    """Raise DataError if a training set is shorter than one sequence, which padding would fill."""
    tokens = TokenFile.open(prefix).num_tokens
    if tokens - 1 < sequence_length:
        source = prefix if isinstance(part_set.source, Path) else ", ".join(part_set.source.sources)
        remedy = f", or set training.sequence_length to {tokens - 1} or less" if tokens > 1 else ""
        raise DataError(
            f"{part_set.key}: {source} has {counted(tokens, 'token')}, fewer than one sequence of {sequence_length} "
            f"(training.sequence_length) and its last label; name a longer text{remedy}"
        )


def _refuse_change(config: RunConfig, run_folder: Path, changed: str, made: Path) -> None:
    """Raise DataError if the run has checkpoints and resumes: new data would silently change its loss curve.

    made: the token file or the tokenizer that is out of date. checkpoint.resume_changed allows other text, but no other
    tokenizer, for which the weights are of no use.
    """
    is_tokenizer = made == run_folder / "tokenizer"
    if config.checkpoint.resume == "never" or (config.checkpoint.resume_changed and not is_tokenizer):
        return
    if (run_folder / "checkpoints" / "latest").exists():
        remedy = f"data.source = '{run_folder / 'data' / 'train'}' to go on with the old text"
        new_remedy = "checkpoint.resume_changed = true to go on with the new text"
        if is_tokenizer:
            new_remedy += f" and tokenizer.path = '{made}'"
        raise DataError(
            f"{changed or 'the text or the tokenizer settings'} changed since {made} was made, and the checkpoints in "
            f"{run_folder} depend on the earlier version; set run.folder to a new folder, or "
            f"checkpoint.resume = 'never' to start over, or {remedy}, or {new_remedy}"
        )
