"""megalite data inspect: counts, lengths, repeated documents and the first documents of a token file."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from megalite.cli.results import report
from megalite.config.sections.text_sections import DataConfig
from megalite.data.batches.conversation_rows import rows_of
from megalite.data.chat.preference import ANSWERS
from megalite.data.files.prepared import PreparedFacts, prepared_facts, recorded_tokenizer, source_notes
from megalite.data.files.token_file import TokenFile
from megalite.data.files.trained_tokens import ids_of, is_trained
from megalite.data.prepare.length_summary import length_counts, repeated_documents
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.errors import counted
from megalite.monitor.work import working

_SHOWN_CHARACTERS = 200
_SHOWN_REPEATED = 3
_BAR = 40


def inspect(prefix: Path, documents: int, *, duplicates: bool) -> int:
    """Print what the token file `prefix` holds, with its first `documents`; return the exit code. Raises DataError."""
    file = TokenFile.open(prefix)
    file.check_index()
    counts = f"{file.num_documents:,} documents, {file.num_sequences:,} sequences, {file.num_tokens:,} tokens"
    print(f"{counts} of {file.dtype}")
    facts, lengths = prepared_facts(prefix), file.document_lengths
    report(
        prefix=prefix,
        documents=file.num_documents,
        sequences=file.num_sequences,
        tokens=file.num_tokens,
        dtype=str(file.dtype),
        lengths={"least": lengths.min(), "most": lengths.max(), "mean": lengths.mean()}
        if len(lengths)
        else None,
        prepared=None if facts is None else vars(facts),
    )
    if facts is not None:
        print(f"from {', '.join(facts.sources)} ({facts.files:,} files)")
        print(f"tokenizer {facts.tokenizer} ({facts.vocab_size:,} ids)")
        for note in source_notes(facts):
            print(note)
    _show_lengths(lengths)
    if facts is not None and facts.kind != "text":
        _show_conversation_facts(file, facts)
    decode = _decoder(file, facts)
    if duplicates:
        _show_repeated(file, decode)
    for index in range(min(documents, file.num_documents)):
        if facts is not None and facts.kind != "text":
            name = f"{facts.unit} {index}"
            if facts.kind == "preference":
                name = f"pair {index // 2}, {ANSWERS[index % 2]}"
            _show_conversation(name, file.document(index), decode)
        else:
            ids = file.document(index)
            print(f"--- document {index}, {len(ids):,} tokens\n{_start(ids, decode)}")
    return 0


def _show_lengths(lengths: NDArray[np.int64]) -> None:
    """Print a bar for each power of two of document lengths."""
    if not len(lengths):
        return
    print(f"tokens a document: {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.1f}")
    rows = length_counts(lengths)
    most, width = max(count for *_, count in rows), len(f"{rows[-1][1]:,}")
    for shortest, longest, count in rows:
        bar = "#" * -(-count * _BAR // most)
        print(f"  {shortest:>{width},} to {longest:>{width},}  {bar:<{_BAR}}  {count:,}")


def _show_conversation_facts(file: TokenFile, facts: PreparedFacts) -> None:
    trained = int(is_trained(file.tokens).sum())
    how = f", train_on {facts.train_on}, chat template {facts.chat_template}" if facts.train_on else ""
    print(f"in the loss: {trained:,} tokens ({trained / max(1, file.num_tokens):.1%}){how}")
    if facts.truncated_documents or facts.dropped_documents:
        lost = f"{facts.truncated_documents:,} cut, {facts.dropped_documents:,} left out"
        print(f"longer than {facts.sequence_length:,} tokens: {lost}")
    packings = get_args(DataConfig.model_fields["packing"].annotation)
    if facts.kind == "preference":
        packings = ("none",)
    elif file.num_documents and file.document_lengths.max() > facts.sequence_length + 1:
        packings = ("concatenate",)
    fills = ", ".join(f"{each} {rows_of(file, facts.sequence_length, each, 0).fill:.1%}" for each in packings)
    print(f"sequences of {facts.sequence_length:,} tokens, filled by data.packing: {fills}")


def _show_repeated(file: TokenFile, decode: Callable[[list[int]], str]) -> None:
    with working("looking for repeated documents"):
        repeats = repeated_documents(file)
    share = repeats.total() / max(1, file.num_documents)
    report(repeated=repeats.total())
    print(f"repeated: {counted(repeats.total(), 'document')} ({share:.1%}) with the tokens of an earlier one")
    for index, more in repeats.most_common(_SHOWN_REPEATED):
        print(
            f"  document {index} occurs {more + 1:,} times: {_start(ids_of(file.document(index)), decode)!r}"
        )


def _decoder(file: TokenFile, facts: PreparedFacts | None) -> Callable[[list[int]], str]:
    """Return what makes text of ids: the tokenizer if it is unchanged, else their numbers."""
    recorded = None if facts is None else recorded_tokenizer(file.prefix, facts)
    if facts is not None and recorded is not None:
        tokenizer = load_tokenizer(recorded, end_of_document=facts.end_of_document)
        if tokenizer.sha256 == facts.tokenizer_sha256:
            return tokenizer.decode
    return str


def _start(ids: NDArray[Any], decode: Callable[[list[int]], str]) -> str:
    # A token is nearly always one character or more, so these ids suffice and long documents cost nothing.
    text = decode(ids[:_SHOWN_CHARACTERS].tolist())
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _show_conversation(name: str, tokens: NDArray[Any], decode: Callable[[list[int]], str]) -> None:
    """Print a conversation with its trained tokens in green; in brackets where the output has no colours."""
    trained = is_trained(tokens)
    print(f"--- {name}, {len(tokens):,} tokens, {int(trained.sum()):,} trained")
    console, shown = Console(soft_wrap=True), Text()
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    for start, end in itertools.pairwise(borders):
        text = decode(ids_of(tokens[start:end]).tolist())
        if not trained[start]:
            shown.append(text)
        elif console.is_terminal:
            shown.append(text, style="green")
        else:
            shown.append(f"[[{text}]]")
    console.print(shown)
