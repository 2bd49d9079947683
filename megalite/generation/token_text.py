"""The text and the log-probability of single tokens, for generate and the server. No torch."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megalite.data.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megalite.generation.batch_engine import Event

_LEAST = -9999.0  # JSON has no infinity


class TokenText:
    """Shows single tokens of one tokenizer, with their leading spaces."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Many tokenizers drop the space before the first token, so each token is decoded behind another.
        before = tokenizer.encode("a")[-1:]
        self._before, self._dropped = before, len(tokenizer.decode(before))
        self.text = lru_cache(maxsize=65536)(self._text)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([*self._before, token])[self._dropped :]

    def row(self, event: "Event") -> dict[str, Any]:
        """Return the JSON object of an event: its token and the most likely tokens, which ids tell apart."""
        top = [self._item(token, value) for token, value in event.top_logprobs]
        return {**self._item(event.token, event.logprob), "top": top}

    def line(self, event: "Event") -> str:
        """Return the line of an event for a terminal: its token and the most likely tokens."""
        top = "  ".join(self._shown(token, value) for token, value in event.top_logprobs)
        return self._shown(event.token, event.logprob) + (f"   {top}" if top else "")

    def _item(self, token: int, value: float | None) -> dict[str, Any]:
        return {"id": token, "token": self.text(token), "logprob": finite(value)}

    def _shown(self, token: int, value: float | None) -> str:
        return f"{self.text(token)!r} {finite(value):.4f}"


def finite(value: float | None) -> float:
    """Return a log-probability as a number that JSON has."""
    return _LEAST if value is None else max(value, _LEAST)
