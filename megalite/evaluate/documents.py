"""Reads the documents to score: from text, .jsonl, parquet, or a prepared token file."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.files.prepared import prepared_facts
from megalite.data.files.token_file import TokenFile, bin_path, prepared_prefix
from megalite.data.files.trained_tokens import ids_of, is_trained
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.encoding import PieceEncoder
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError

_IDS = np.dtype(np.int64)
_WHITE_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Document:
    """One document to score.

    ids: [n], without an end-of-document token. words, bytes: of its text, as lm_eval counts them. counted: bool [n],
    the tokens that count; None: all.
    """

    ids: NDArray[Any]
    words: int
    bytes: int
    counted: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class TextSource:
    """Where the documents are: text files and folders, .jsonl, parquet, or one prepared token file."""

    sources: tuple[str, ...]
    text_column: str = "text"
    pattern: str = "*"


def documents(source: TextSource, tokenizer: Tokenizer, vocab_size: int) -> Iterator[Document]:
    """Yield the documents in order; empty ones are skipped.

    Raises DataError, with file, line and remedy, for a source that cannot be read, has no text, or was prepared with
    another tokenizer.
    """
    prefix = prepared_prefix(source.sources, "--data")
    has_documents = False
    read = _of_text(source, tokenizer) if prefix is None else _of_token_file(prefix, tokenizer, vocab_size)
    for document in read:
        has_documents = True
        yield document
    if not has_documents:
        raise DataError(
            f"--data: {', '.join(source.sources)} has no tokens to score; name a source with text"
        )


def count_words(text: str) -> int:
    """Return the number of words as lm_eval counts them: the parts between white space, empty ones included."""
    return sum(1 for _ in _WHITE_SPACE.finditer(text)) + 1


def _of_text(source: TextSource, tokenizer: Tokenizer) -> Iterator[Document]:
    corpus = Corpus.open(source.sources, text_column=source.text_column, pattern=source.pattern, key="--data")
    encoder = PieceEncoder(tokenizer, _IDS)
    texts: list[str] = []
    ids: list[NDArray[Any]] = []
    for piece, _ in corpus.pieces():
        texts.append(piece.text)
        ids.append(encoder.ids(piece))
        if piece.ends_document:
            text, tokens = "".join(texts), np.concatenate(ids)
            texts, ids = [], []
            if len(tokens):
                yield Document(tokens, count_words(text), len(text.encode()))


def _of_token_file(prefix: Path, tokenizer: Tokenizer, vocab_size: int) -> Iterator[Document]:
    file, facts = TokenFile.open(prefix), prepared_facts(prefix)
    kind = "text" if facts is None else facts.kind
    if kind not in ("text", "instruct"):
        raise DataError(
            f"--data: {prefix} was prepared as {kind!r}; evaluate scores text and conversations: prepare the text with "
            "megalite data prepare --kind text"
        )
    if facts is not None and facts.tokenizer_sha256 != tokenizer.sha256:
        raise DataError(
            f"--data: {prefix} was prepared with {facts.tokenizer}, and the model's tokenizer is {tokenizer.file}; "
            "name the text itself, or prepare it with the model's tokenizer"
        )
    for index in range(file.num_documents):
        tokens = np.asarray(file.document(index))
        ids, counted = tokens, None
        if kind == "instruct":
            ids, counted = ids_of(tokens), is_trained(tokens)
        elif len(ids) and ids[-1] == tokenizer.end_of_document_id:
            ids = ids[:-1]
        if not len(ids):
            continue
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise DataError(
                f"--data: {bin_path(prefix)}, document {index}: id {int(ids.max())} is outside of the model's "
                f"vocabulary of {vocab_size}; name the text, or a file prepared with the model's tokenizer"
            )
        text = tokenizer.decode((ids if counted is None else ids[counted]).tolist(), skip_special_tokens=True)
        yield Document(ids, count_words(text), len(text.encode()), counted)
