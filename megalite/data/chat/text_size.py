"""Measures a text in a moment, from its first megabytes: its length and how many words it has."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.data.chat.conversation_corpus import CORPUS_OF

_SAMPLE_CHARACTERS = 1 << 22
# Runs of letters. Byte-level BPE can make a token of each, so they bound the vocabulary of a text from below.
_WORDS = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True)
class TextMeasure:
    """The length of a text and the words of its first megabytes.

    characters: an estimate for the whole text, exact up to 4 million. words: distinct ones.
    """

    characters: int
    words: int
    documents: int


def measure_text(
    sources: Sequence[str], *, text_column: str = "text", pattern: str = "*", kind: str = "text"
) -> TextMeasure:
    """Measure a text by its first 4 million characters. kind: data.kind. Raises DataError as the corpus does."""
    corpus = CORPUS_OF[kind].open(sources, text_column=text_column, pattern=pattern, key="data.source")
    corpus.require_text()
    words: set[str] = set()
    characters = documents = 0
    for piece, place in corpus.pieces():
        characters += len(piece.text)
        documents += piece.starts_document
        words.update(_WORDS.findall(piece.text))
        if characters >= _SAMPLE_CHARACTERS:
            # bytes_read counts the blocks that the reader has taken, so the estimate is a little low.
            whole = characters * corpus.size_bytes // max(1, place.bytes_read)
            return TextMeasure(whole, len(words), documents)
    return TextMeasure(characters, len(words), documents)
