"""Encodes conversations: the ids of the chat template's text, and which of them the loss is taken of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megalite.data.chat.chat_template import ChatTemplate, Span, TrainedText, TrainOn
from megalite.data.chat.conversation import Conversation
from megalite.data.chat.preference import Pair
from megalite.data.files.trained_tokens import DTYPE, is_trained, marked
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError

TooLong = Literal["truncate", "drop", "stop", "keep"]
# Part of every fingerprint; incremented when the same conversation and template would give other tokens.
_VERSION = 2


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
        parts = [_VERSION, template.text, template.special_tokens, self.train_on, length, self.too_long]
        return parts if self.kind == "instruct" else [*parts, self.kind]


def encode_conversation(
    conversation: Conversation, encoding: ChatEncoding, tokenizer: Tokenizer
) -> list[tuple[NDArray[np.int32], bool]]:
    """Return the marked tokens of each text of a conversation (`ChatTemplate.trained_texts`), and whether it was too
    long: then cut, or dropped (no tokens).

    A token is trained if it has a character of a trained span. Special tokens that the text spells get their ids.
    Raises DataError if no trained token follows another one.
    """
    texts = encoding.template.trained_texts(conversation, encoding.train_on)
    return [_encoded(text, conversation, encoding, tokenizer) for text in texts]


def _encoded(
    text: TrainedText, conversation: Conversation, encoding: ChatEncoding, tokenizer: Tokenizer
) -> tuple[NDArray[np.int32], bool]:
    encoded = tokenizer.backend.encode(text.text, add_special_tokens=False)
    ids = np.array(encoded.ids, dtype=DTYPE)
    tokens = marked(ids, _in_spans(encoded.offsets, text.spans))
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

    Both are dropped (no tokens) if one of them is. Raises DataError as it does, and for an answer of several texts.
    """
    encoded = []
    for conversation in pair.conversations:
        first, *more = encode_conversation(conversation, encoding, tokenizer)
        if more:
            raise DataError(
                f"{conversation.where}: the chat template {encoding.template.origin} rewrites earlier answers, so the "
                f"{1 + len(more)} answers behind the prompt are no one text; keep the last one, and write the others "
                "into the prompt"
            )
        encoded.append(first)
    tokens, too_long = [each for each, _ in encoded], [long for _, long in encoded]
    if not all(map(len, tokens)):
        return [each[:0] for each in tokens], [True, True]
    return tokens, too_long


def _in_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> NDArray[np.bool_]:
    places: NDArray[Any] = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    # A byte-level tokenizer trims white space off its offsets, so that a token of nothing else has no character.
    before = np.maximum.accumulate(np.concatenate([[0], places[:-1, 1]])) if len(places) else places[:, 1]
    empty = places[:, 0] == places[:, 1]
    places[:, 0] = np.where(empty, np.minimum(places[:, 0], before), places[:, 0])
    trained = np.zeros(len(places), dtype=bool)
    for start, end in spans:
        trained |= (places[:, 0] < end) & (places[:, 1] > start)
    return trained


def _nothing_to_learn(conversation: Conversation, tokens: NDArray[np.int32], encoding: ChatEncoding) -> str:
    if conversation.marks and not any(
        conversation.marks.get(place, True)
        for place, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and place >= conversation.prompt
    ):
        return (
            f"{conversation.where}: every answer says not to train on it (weight 0, train false), so the row teaches "
            "nothing; remove the row"
        )
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
