"""Loss and perplexity on text: per token, word and byte."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalite.data.tokenizers.tokenizer import Tokenizer, start_token_id
from megalite.errors import DataError
from megalite.evaluate.documents import Document, TextSource, documents
from megalite.evaluate.scoring import Advance, total_log_likelihood
from megalite.evaluate.windows import Window, rolling_windows
from megalite.generation.loaded import LoadedModel


@dataclass(frozen=True)
class TextFigures:
    """The figures of a model on text.

    tokens: those that were scored. words, bytes: of the documents' text. log_likelihood: the sum over the tokens, in
    nats. The word and byte perplexities divide that sum by words and bytes, as lm_eval does.
    """

    documents: int
    tokens: int
    words: int
    bytes: int
    log_likelihood: float

    @property
    def loss(self) -> float:
        return -self.log_likelihood / self.tokens

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        return _exp(-self.log_likelihood / self.words)

    @property
    def byte_perplexity(self) -> float:
        return _exp(-self.log_likelihood / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        return -self.log_likelihood / self.bytes / math.log(2)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON."""
        counts = {name: getattr(self, name) for name in ("documents", "tokens", "words", "bytes")}
        names = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
        return counts | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TextEvaluation:
    """The text to score, and how.

    window: tokens that the model reads at once. stride: tokens that each later window scores; equal to window, windows
    do not overlap. join: all documents as one stream, an end-of-document token between two, instead of each alone.
    """

    source: TextSource
    window: int
    stride: int
    join: bool = False
    batch_size: int = 8


def evaluate_text(
    loaded: LoadedModel, request: TextEvaluation, advance: Advance = lambda _: None
) -> TextFigures:
    """Return the figures on every rank of the model's mesh. Collective over the world. Raises DataError."""
    counts = _Counts()
    read = documents(request.source, loaded.tokenizer, loaded.config.vocab_size)
    windows = _windows(_counting(read, counts), request, loaded.tokenizer)
    log_likelihood, tokens = total_log_likelihood(loaded.replica, windows, request.batch_size, advance)
    if not tokens:
        raise DataError(
            f"--data: {', '.join(request.source.sources)} has no token that counts; name a source with text"
        )
    return TextFigures(counts.documents, tokens, counts.words, counts.bytes, log_likelihood)


@dataclass
class _Counts:
    documents: int = 0
    words: int = 0
    bytes: int = 0


def _counting(read: Iterator[Document], counts: _Counts) -> Iterator[Document]:
    for document in read:
        counts.documents += 1
        counts.words += document.words
        counts.bytes += document.bytes
        yield document


def _windows(read: Iterator[Document], request: TextEvaluation, tokenizer: Tokenizer) -> Iterator[Window]:
    cut = {"length": request.window, "stride": request.stride}
    start = start_token_id(tokenizer)
    if not request.join:
        for document in read:
            # A conversation begins as in training, with its own first token.
            prefix = start if document.counted is None else None
            yield from rolling_windows(document.ids, prefix=prefix, counted=document.counted, **cut)
        return
    end = np.array([tokenizer.end_of_document_id])
    parts: list[np.ndarray[Any, Any]] = []
    marks: list[np.ndarray[Any, Any]] = []
    for document in read:
        parts += [document.ids.astype(np.int32), end.astype(np.int32)]
        counted = np.ones(len(document.ids), dtype=bool) if document.counted is None else document.counted
        marks += [counted, np.array([document.counted is None])]
    yield from rolling_windows(np.concatenate(parts), prefix=start, counted=np.concatenate(marks), **cut)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
