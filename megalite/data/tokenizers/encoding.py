"""Encodes the pieces of a document to the same ids as the whole document."""

import json
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from megalite.data.text.corpus import DocumentPiece, cut_point
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.data.tokenizers.word_cache import word_cache

_PROBES = (
    "The first words, then more of them\nand a second line with some more words",
    "one two three four five six seven eight nine ten eleven twelve thirteen",
    "def f(x):\n    return x\nclass A:\n    pass\nprint(f(x), A())\nprint(y)",
)
_PROBE_LIMITS = (20, 36, 50)


class PieceEncoder:
    """Encodes pieces one by one. Text that spells a special token is encoded as ordinary text."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any]):
        self._dtype = dtype
        self._start = deepcopy(
            tokenizer.backend
        )  # chat templates encode their marks with the tokenizer itself
        self._start.encode_special_tokens = True
        self._after = {space: _continuation(self._start, space) for space in (True, False)}
        # A tokenizer that encodes each word by itself does not need a continuation.
        self._words = word_cache(self._start, dtype)

    def ids(self, piece: DocumentPiece) -> NDArray[Any]:
        """Return the ids of a piece, without special tokens."""
        if self._words is not None:
            return self._words.ids(piece.text)
        backend = self._start if piece.starts_document else self._after[piece.text.startswith(" ")]
        # A batch of one runs in this thread; the "fast" call skips the character offsets.
        [encoding] = backend.encode_batch_fast([piece.text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype)


def _continuation(backend: Backend, space: bool) -> Backend:
    """Return the tokenizer for pieces that continue a document: the given one, or a copy that adds no prefix.

    The prefix (sentencepiece's dummy prefix, Metaspace's, ByteLevel's) belongs to the start of a document only. A
    tokenizer that strips spaces needs the prefix for pieces that begin with a space, hence `space`.
    """
    if _joins(backend, backend, space):
        return backend
    spec = json.loads(backend.to_str())
    changed = {step: _without_prefix(spec[step]) for step in ("normalizer", "pre_tokenizer")}
    without = Backend.from_str(json.dumps({**spec, **changed}))
    without.encode_special_tokens = True
    return without if _joins(backend, without, space) else backend


def _joins(start: Backend, continuation: Backend, space: bool) -> bool:
    """Whether the ids of two parts of each probe text, cut before a space or not, are those of the whole."""

    def encode(backend: Backend, text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    cuts = [(text, cut_point(text, limit)) for text in _PROBES for limit in _PROBE_LIMITS]
    return all(
        encode(start, text[:at]) + encode(continuation, text[at:]) == encode(start, text)
        for text, at in cuts
        if text.startswith(" ", at) == space
    )


def _without_prefix(step: Any) -> Any:
    """Return a step of a tokenizer.json, including nested steps, without the prefix that it adds to a text."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Sequence":
        key = "normalizers" if "normalizers" in step else "pretokenizers"
        inner = [_without_prefix(each) for each in step[key]]
        return {**step, key: [each for each in inner if each is not None]}
    match step.get("type"):
        case "Prepend":
            return None
        case "Metaspace":
            return {**step, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**step, "add_prefix_space": False}
    return step
