"""Encodes conversations: the ids of the chat template's text, and which of them the loss is taken of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megalite.data.chat_template import ChatTemplate, Span, TrainOn
from megalite.data.conversation import Conversation
from megalite.data.preference import Pair
from megalite.data.tokenizer import Tokenizer
from megalite.data.trained_tokens import DTYPE, is_trained, marked
from megalite.errors import DataError

TooLong = Literal["truncate", "drop", "stop", "keep"]


@dataclass(frozen=True)
class ChatEncoding:
    """How conversations become tokens. sequence_length: positions of a row; the last token of one needs none.

    too_long: "truncate" cuts the end off, "drop" leaves the conversation out, "stop" raises, "keep" lets a
    conversation have any length. kind: of the data; "preference": pairs of conversations.
    """

    template: ChatTemplate
    train_on: TrainOn
    sequence_length: int
    too_long: TooLong
    kind: Literal["instruct", "preference"] = "instruct"

    @property
    def unit(self) -> str:
        """The noun for what is one row of the data."""
        return "pair" if self.kind == "preference" else "conversation"

    @property
    def documents(self) -> int:
        """The documents of the token file for one row of the data."""
        return 2 if self.kind == "preference" else 1

    @property
    def parts(self) -> list[object]:
        """All that the tokens depend on besides text and tokenizer, for a fingerprint."""
        template = self.template
        length = 0 if self.too_long == "keep" else self.sequence_length
        parts = [template.text, template.special_tokens, self.train_on, length, self.too_long]
        return parts if self.kind == "instruct" else [*parts, self.kind]


def encode_conversation(
    conversation: Conversation, encoding: ChatEncoding, tokenizer: Tokenizer
) -> tuple[NDArray[np.int32], bool]:
    """Return the marked tokens of a conversation, and whether it was too long: then cut, or dropped (no tokens).

    A token is trained if it has a character of a trained span. Special tokens that the text spells get their ids.
    Raises DataError if no trained token follows another one.
    """
    text = encoding.template.render(conversation)
    spans = encoding.template.trained_spans(conversation, text, encoding.train_on)
    found = tokenizer.backend.encode(text, add_special_tokens=False)
    ids = np.array(found.ids, dtype=DTYPE)
    tokens = marked(ids, _in_spans(found.offsets, spans))
    most = len(tokens) if encoding.too_long == "keep" else encoding.sequence_length + 1
    too_long = len(tokens) > most
    if too_long and encoding.too_long == "drop":
        return tokens[:0], True
    if too_long and encoding.too_long == "stop":
        raise DataError(
            f"{conversation.where}: {len(tokens)} tokens, more than the {most} that training.sequence_length = "
            f'{encoding.sequence_length} holds; raise it, or set data.too_long = "truncate" or "drop"'
        )
    if not is_trained(tokens[1:most]).any():
        raise DataError(_nothing_to_learn(conversation, tokens, encoding))
    return tokens[:most], too_long


def encode_pair(
    pair: Pair, encoding: ChatEncoding, tokenizer: Tokenizer
) -> tuple[list[NDArray[np.int32]], list[bool]]:
    """Return what `encode_conversation` gives for the chosen and for the rejected conversation.

    Both are dropped (no tokens) if one of them is. Raises DataError as it does.
    """
    encoded = [encode_conversation(each, encoding, tokenizer) for each in pair.conversations]
    tokens, too_long = [each for each, _ in encoded], [long for _, long in encoded]
    if not all(map(len, tokens)):
        return [each[:0] for each in tokens], [True, True]
    return tokens, too_long


def _in_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> NDArray[np.bool_]:
    places: NDArray[Any] = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    trained = np.zeros(len(places), dtype=bool)
    for start, end in spans:
        trained |= (places[:, 0] < end) & (places[:, 1] > start)
    return trained


def _nothing_to_learn(conversation: Conversation, tokens: NDArray[np.int32], encoding: ChatEncoding) -> str:
    if is_trained(tokens[1:]).any():
        prompt = int(np.argmax(is_trained(tokens)))
        return (
            f"{conversation.where}: the prompt has {prompt} tokens and leaves no room for an answer in "
            f"training.sequence_length = {encoding.sequence_length}; raise it to {len(tokens) - 1}, or set "
            'data.too_long = "drop"'
        )
    return (
        f"{conversation.where}: the chat template {encoding.template.origin} writes no answer that could be trained; "
        "change the template or the conversation"
    )
