"""The messages of a conversation, of which the oldest ones go where the context has no room for them. No torch."""

from collections.abc import Callable, Sequence

from megalite.errors import ConfigError, Problem

Message = dict[str, str]


class ChatHistory:
    """A conversation within the context of a model.

    prompt_ids: encodes messages and the beginning of an answer. context: the most tokens of prompt and answer.
    max_tokens: the maximum number of new tokens.
    """

    def __init__(
        self, prompt_ids: Callable[[Sequence[Message]], Sequence[int]], context: int, max_tokens: int
    ):
        self._prompt_ids, self._context, self._max_tokens = prompt_ids, context, max_tokens
        self.messages: list[Message] = []  # a message and its answer by turns, the oldest first
        self._asked: list[Message] = []

    def clear(self) -> None:
        """Forget all messages."""
        self.messages = []

    def ask(self, text: str) -> tuple[tuple[int, ...], int, int]:
        """Return the prompt of a new message, the maximum number of new tokens and how many exchanges it drops.

        The oldest exchanges go until a quarter of the context, or the wanted number of new tokens if that is less, is
        left for the answer. A message that stands alone may leave less, but at least 1. The conversation stays as it is
        until `answer`. Raises ConfigError for a message that does not fit alone, and whatever the template raises.
        """
        kept = [*self.messages, {"role": "user", "content": text}]
        least, dropped = max(1, min(self._max_tokens, self._context // 4)), 0
        while True:
            ids = tuple(self._prompt_ids(kept))
            room = self._context - len(ids)
            if room >= least or len(kept) == 1:
                break
            kept, dropped = kept[2:], dropped + 1
        if room < 1:
            rule = (
                f"has {len(ids)} tokens with the chat template, and the context has {self._context},"
                " at least 1 of them for the answer"
            )
            raise ConfigError([Problem("the message", rule, "write a shorter one")], "the conversation")
        self._asked = kept
        return ids, min(self._max_tokens, room), dropped

    def answer(self, text: str) -> None:
        """Append the last message that was asked, and its answer."""
        self.messages = [*self._asked, {"role": "assistant", "content": text}]
