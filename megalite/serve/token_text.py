"""The text and the log-probability of single tokens, in both of OpenAI's forms."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megalite.generation.token_text import TokenText, finite

if TYPE_CHECKING:
    from megalite.generation.batch_engine import Event

_REPLACEMENT = "\ufffd"


class ServedTokenText(TokenText):
    """Shows tokens of one tokenizer as OpenAI's interface does."""

    def chat(self, event: "Event") -> dict[str, Any]:
        """Return an item of logprobs.content."""
        top = [self._openai(token, value) for token, value in event.top_logprobs]
        return {**self._openai(event.token, event.logprob), "top_logprobs": top}

    def completion(self, events: Sequence["Event"], offset: int) -> dict[str, Any]:
        """Return the logprobs of a completion's events. offset: the characters of the text before them."""
        tokens = [self.text(event.token) for event in events]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(event.logprob) for event in events],
            "top_logprobs": [
                {self.text(token): finite(value) for token, value in event.top_logprobs} for event in events
            ],
            "text_offset": offsets,
        }

    def _openai(self, token: int, value: float | None) -> dict[str, Any]:
        text = self.text(token)
        # A part of a character has no text; its bytes are not known here.
        encoded = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": finite(value), "bytes": encoded}
