"""The text and the log-probability of single tokens, in both of OpenAI's forms."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megalite.generation.detokenise import Detokeniser
from megalite.generation.slots import TokenScore
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

    def completion(self, scores: Sequence[TokenScore], offsets: Sequence[int]) -> dict[str, Any]:
        """Return the logprobs of a completion's tokens. offsets: of each, the characters of the text before it."""
        tops = [{self.text(token): finite(value) for token, value in score.top_logprobs} for score in scores]
        known = [score.logprob is not None for score in scores]
        return {
            "tokens": [self.text(score.token) for score in scores],
            "token_logprobs": [
                finite(score.logprob) if score.logprob is not None else None for score in scores
            ],
            # As in OpenAI's service the first token of an echoed prompt has none.
            "top_logprobs": [top if known else None for top, known in zip(tops, known, strict=True)],
            "text_offset": list(offsets),
        }

    def prompt(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of a prompt without special tokens, and the characters of it before each token."""
        detokeniser, texts, offsets = Detokeniser(self._tokenizer, ()), list[str](), list[int]()
        length = 0
        for token in ids:
            offsets.append(length)
            texts.append(detokeniser.push(token))
            length += len(texts[-1])
        return "".join(texts) + detokeniser.finish(), offsets

    def _openai(self, token: int, value: float | None) -> dict[str, Any]:
        text = self.text(token)
        # A part of a character has no text; its bytes are not known here.
        encoded = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": finite(value), "bytes": encoded}
