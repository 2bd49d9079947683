"""Ids of a text word by word from a table: several times as fast as the tokenizer, which looks at each anew.

For byte-level BPE that cuts a text as GPT-2, Llama 3 or Qwen do. Their patterns cut ASCII in a way that Python's `re`
knows too; what is not ASCII is cut where no pattern joins, and encoded by the tokenizer itself.
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
# NFC leaves ASCII as it is, and what stands on both sides of a space.
_NORMALIZERS = (None, {"type": "NFC"})
# Before the one space between two words, and behind the one newline between two lines.
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
# Longer ones hardly come again, and the table is not to grow with the corpus: some 25 MB.
_LONGEST_WORD = 40
_MOST_WORDS = 1 << 17


class WordCache(dict[str, bytes]):
    """Word -> its ids, as the bytes of an array. It fills itself, and begins anew when it is full."""

    def __init__(self, backend: Backend, pattern: re.Pattern[str], dtype: np.dtype[Any]):
        super().__init__()
        self._backend, self._pattern, self._dtype = backend, pattern, dtype
        self._apart = _found_in_texts(backend)

    def ids(self, text: str) -> NDArray[Any]:
        """What the tokenizer gives for `text`."""
        if any(token in text for token in self._apart):
            encoded = self._encoded(text)
        else:
            encoded = b"".join(map(self.__getitem__, self._words(text)))
        return np.frombuffer(encoded, dtype=self._dtype)

    def _words(self, text: str) -> list[str]:
        if text.isascii():
            return self._pattern.findall(text)
        words: list[str] = []
        for ascii_only, group in groupby(_CUT.split(text), str.isascii):
            parts = list(group)
            words += self._pattern.findall("".join(parts)) if ascii_only else parts
        return words

    def __missing__(self, word: str) -> bytes:
        encoded = self._encoded(word)
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = encoded
        return encoded

    def _encoded(self, text: str) -> bytes:
        # One text at a time runs on this process's own core; "fast" leaves out the offsets in the text.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype).tobytes()


def word_cache(backend: Backend, dtype: np.dtype[Any]) -> WordCache | None:
    """A table for a tokenizer that treats each word by itself, cut by a pattern known here; None for others."""
    spec = json.loads(backend.to_str())
    pattern = _pattern_of(spec["pre_tokenizer"] or {})
    alike = spec["model"]["type"] == "BPE" and not spec["model"].get("dropout")
    alike &= all(map(str.isascii, _found_in_texts(backend)))  # else a normalizer may make one of a text
    if pattern not in _PATTERNS or not alike or spec["normalizer"] not in _NORMALIZERS:
        return None
    within_brackets = re.sub(r"\[[^]]*\]", lambda found: _as_ascii(found[0], "A-Za-z", "0-9"), pattern)
    # re.ASCII: to Python four control characters are spaces.
    return WordCache(backend, re.compile(_as_ascii(within_brackets, "[A-Za-z]", "[0-9]"), re.ASCII), dtype)


def _found_in_texts(backend: Backend) -> list[str]:
    """The added tokens; but the special ones are none in a text that is encoded with encode_special_tokens."""
    return [token.content for token in backend.get_added_tokens_decoder().values() if not token.special]


def _as_ascii(pattern: str, letters: str, digits: str) -> str:
    return pattern.replace(r"\p{L}", letters).replace(r"\p{N}", digits)


def _pattern_of(step: dict[str, Any]) -> str | None:
    """By which a pre-tokenizer cuts; None where it does more, or something else."""
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
