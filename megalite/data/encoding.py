"""Ids of a document in pieces: those of the whole, also where a tokenizer treats a beginning in its own way."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from megalite.data.corpus import Piece, cut_point
from megalite.data.tokenizer import Tokenizer
from megalite.data.word_cache import word_cache

_PROBES = (
    "The first words, then more of them\nand a second line with some more words",
    "one two three four five six seven eight nine ten eleven twelve thirteen",
    "def f(x):\n    return x\nclass A:\n    pass\nprint(f(x), A())\nprint(y)",
)
_PROBE_LIMITS = (20, 36, 50)


class PieceEncoder:
    """Encodes pieces one by one. A text that spells a special token, as code about language models does, gives none."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any]):
        self._dtype = dtype
        self._start = tokenizer.backend
        self._start.encode_special_tokens = True
        self._after = {space: _continuation(self._start, space) for space in (True, False)}
        # Where words are encoded by themselves, it makes no difference what stands before them.
        self._words = word_cache(self._start, dtype)

    def ids(self, piece: Piece) -> NDArray[Any]:
        if self._words is not None:
            return self._words.ids(piece.text)
        backend = self._start if piece.starts_document else self._after[piece.text.startswith(" ")]
        # One text at a time runs on this process's own core; "fast" leaves out the offsets in the text.
        [encoding] = backend.encode_batch_fast([piece.text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype)


def _continuation(backend: Backend, space: bool) -> Backend:
    """What encodes pieces that go on from others, with a space or without: the tokenizer itself, or it less its prefix.

    A prefix (sentencepiece's dummy prefix, Metaspace's, ByteLevel's) belongs to the beginning of a text alone. But
    where the spaces around a text are taken off, it stands for the space that a piece begins with.
    """
    if _joins(backend, backend, space):
        return backend
    spec = json.loads(backend.to_str())
    changed = {step: _without_prefix(spec[step]) for step in ("normalizer", "pre_tokenizer")}
    without = Backend.from_str(json.dumps({**spec, **changed}))
    without.encode_special_tokens = True
    return without if _joins(backend, without, space) else backend


def _joins(start: Backend, continuation: Backend, space: bool) -> bool:
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
    """One step of a tokenizer.json, and those in it, with nothing put before a text."""
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
