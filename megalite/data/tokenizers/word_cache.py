"""A cache word -> ids, which encodes a text several times as fast as the tokenizer, which caches no words.

For byte-level BPE with the pre-tokenizer patterns of GPT-2, Llama 3 and Qwen. Python's `re` splits ASCII text by an
equivalent pattern; other text is cut where no pattern joins two words, and the tokenizer encodes it.
"""

import json
import re
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS = {_GPT2, *(_LLAMA3.replace("DIGITS", digits) for digits in ("{1,3}", ""))}
# NFC changes neither ASCII nor anything across a space.
_NORMALIZERS = (None, {"type": "NFC"})
# Before a single space between two words, and after a single newline between two lines.
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
# Longer words seldom recur. The two bounds keep the cache at about 25 MB.
_LONGEST_WORD = 40
_MOST_WORDS = 1 << 17


class WordCache(dict[str, bytes]):
    """Maps a word to its ids, as the bytes of an array; fills itself on lookup, and is cleared when it is full."""

    def __init__(self, backend: Backend, pattern: re.Pattern[str], dtype: np.dtype[Any]):
        super().__init__()
        self._backend, self._pattern, self._dtype = backend, pattern, dtype
        self._added_tokens = _added_tokens(backend)

    def ids(self, text: str) -> NDArray[Any]:
        """Return the ids of `text`, the same as the tokenizer's."""
        words = [text]
        if not any(token in text for token in self._added_tokens):
            words = []
            for ascii_only, group in groupby([text] if text.isascii() else _CUT.split(text), str.isascii):
                parts = list(group)
                words += self._pattern.findall("".join(parts)) if ascii_only else parts
        return np.frombuffer(b"".join(map(self.__getitem__, words)), dtype=self._dtype)

    def __missing__(self, word: str) -> bytes:
        # A batch of one runs in this thread; the "fast" call skips the character offsets.
        [encoding] = self._backend.encode_batch_fast([word], add_special_tokens=False)
        encoded = np.array(encoding.ids, dtype=self._dtype).tobytes()
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = encoded
        return encoded


def word_cache(backend: Backend, dtype: np.dtype[Any]) -> WordCache | None:
    """Return the cache of a tokenizer that encodes words separately by one of _PATTERNS; None for other tokenizers."""
    spec = json.loads(backend.to_str())
    pattern = _pattern_of(spec["pre_tokenizer"] or {})
    cacheable = spec["model"]["type"] == "BPE" and not spec["model"].get("dropout")
    # The normalizer could turn text into an added token that is not ASCII.
    cacheable &= all(map(str.isascii, _added_tokens(backend)))
    if pattern not in _PATTERNS or not cacheable or spec["normalizer"] not in _NORMALIZERS:
        return None
    within_brackets = re.sub(r"\[[^]]*\]", lambda brackets: _as_ascii(brackets[0], "A-Za-z", "0-9"), pattern)
    # re.ASCII: without it Python counts four control characters as spaces.
    return WordCache(backend, re.compile(_as_ascii(within_brackets, "[A-Za-z]", "[0-9]"), re.ASCII), dtype)


def _added_tokens(backend: Backend) -> list[str]:
    """Return the added tokens that text can contain: with encode_special_tokens, special tokens are ordinary text."""
    return [token.content for token in backend.get_added_tokens_decoder().values() if not token.special]


def _as_ascii(pattern: str, letters: str, digits: str) -> str:
    return pattern.replace(r"\p{L}", letters).replace(r"\p{N}", digits)


def _pattern_of(step: dict[str, Any]) -> str | None:
    """Return the pattern by which a pre-tokenizer splits text; None if it does anything else."""
    if step.get("add_prefix_space"):
        return None
    match step:
        case {"type": "ByteLevel"} if step.get("use_regex", True):
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [{"type": "Split"} as split, {"type": "ByteLevel"} as mapped],
        }:
            whole = split["behavior"] == "Isolated" and not split.get("invert")
            if whole and not mapped.get("add_prefix_space") and not mapped.get("use_regex", True):
                pattern: str | None = split["pattern"].get("Regex")
                return pattern
    return None
