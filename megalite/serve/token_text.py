"""The text and the log-probability of single tokens, in both of OpenAI's forms."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megalite.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megalite.generation.batch_engine import Event

_LEAST = -9999.0  # JSON has no infinity
_REPLACEMENT = "\ufffd"


class TokenText:
    """Shows tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Many tokenizers drop the space before the first token, so each token is decoded behind another.
        before = tokenizer.encode("a")[-1:]
        self._before, self._dropped = before, len(tokenizer.decode(before))
        self.text = lru_cache(maxsize=65536)(self._text)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([*self._before, token])[self._dropped :]

    def chat(self, event: "Event") -> dict[str, Any]:
        """Return an item of logprobs.content."""
        top = [self._item(token, value) for token, value in event.top_logprobs]
        return {**self._item(event.token, event.logprob), "top_logprobs": top}

    def completion(self, events: Sequence["Event"], offset: int) -> dict[str, Any]:
        """Return the logprobs of a completion's events. offset: the characters of the text before them."""
        tokens = [self.text(event.token) for event in events]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(event.logprob) for event in events],
            "top_logprobs": [
                {self.text(token): _finite(value) for token, value in event.top_logprobs} for event in events
            ],
            "text_offset": offsets,
        }

    def _item(self, token: int, value: float | None) -> dict[str, Any]:
        text = self.text(token)
        # A part of a character has no text; its bytes are not known here.
        encoded = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": _finite(value), "bytes": encoded}


def _finite(value: float | None) -> float:
    return _LEAST if value is None else max(value, _LEAST)
