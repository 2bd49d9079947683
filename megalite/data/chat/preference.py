"""Turns a row of preference data into two conversations that differ in the answer: the chosen and the rejected one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megalite.data.chat.conversation import Conversation, answered, whole
from megalite.data.text.source_stream import json_type
from megalite.errors import DataError

ANSWERS = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "instruction")
# The turns of a conversation written as one text, as in Anthropic's HH-RLHF.
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_REMEDY = "write prompt, chosen and rejected, or remove the row"


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt. Both conversations begin with the same `prompt` messages, which are not learned."""

    chosen: Conversation
    rejected: Conversation

    @property
    def conversations(self) -> tuple[Conversation, Conversation]:
        return self.chosen, self.rejected

    @property
    def unused(self) -> tuple[str, ...]:
        """The columns of the row that neither conversation reads."""
        rejected = set(self.rejected.unused)
        return tuple(column for column in dict.fromkeys(self.chosen.unused) if column in rejected)


def preference_pair(row: Mapping[str, Any], where: str) -> Pair:
    """Convert a row; `where` is its place for messages.

    - prompt (or question, or instruction), chosen, rejected: three texts, or lists of {role, content}.
    - chosen, rejected: whole conversations with the same first messages: lists of {role, content} or {from, value}, or
      texts with the turns "Human:" and "Assistant:" after blank lines. A prompt that is a text may stand beside lists;
      it must then be the last question they have in common.

    A column system is the first message. Raises DataError, with place, field and remedy, for a missing, empty or
    misshapen field, for answers that are equal, and for conversations without a common beginning.
    """
    for column in ANSWERS:
        if row.get(column) is None:
            raise DataError(f"{where}: {column} is missing; {_REMEDY}")
    kinds = [json_type(row[column]) for column in ANSWERS]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"{where}: chosen is {kinds[0]}, but rejected is {kinds[1]}; make both texts, or both lists of messages"
        )
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{where}: chosen and rejected are equal, so they show no preference; remove the row")
    prompt = next((column for column in _PROMPTS if row.get(column) is not None), None)
    if prompt is not None and not (isinstance(row[prompt], str) and isinstance(row["chosen"], list)):
        return Pair(*(answered(row, prompt, column, where) for column in ANSWERS))
    if prompt is not None and _starts_with_the_answer(row):
        asked = [{"role": "user", "content": row[prompt]}]
        return Pair(*(answered({**row, prompt: asked}, prompt, column, where) for column in ANSWERS))
    turns = {**row, **{column: _turns(row[column], column, where) for column in ANSWERS}}
    pair = _with_common_prompt(*(whole(turns, column, where) for column in ANSWERS))
    if prompt is None:
        return pair
    _require_question(pair, row[prompt], prompt)
    unused = tuple(column for column in pair.chosen.unused if column != prompt)
    return replace(pair, chosen=replace(pair.chosen, unused=unused))


def _starts_with_the_answer(row: Mapping[str, Any]) -> bool:
    """Whether the first message of chosen is an assistant's: the prompt then is not repeated there."""
    first = row["chosen"][0] if row["chosen"] else None
    return isinstance(first, Mapping) and first.get("role") == "assistant"


def _turns(text: Any, column: str, where: str) -> Any:
    """Return the messages of a conversation that is written as one text; lists as they are."""
    if not isinstance(text, str):
        return text
    empty, *parts = _TURN.split(text)
    if empty.strip() or not parts:
        raise DataError(
            f'{where}: {column} is a text without a prompt column, and does not begin with "Human: "; {_REMEDY}'
        )
    return [
        {"role": _SPEAKERS[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _with_common_prompt(chosen: Conversation, rejected: Conversation) -> Pair:
    """Return the pair of two whole conversations; its prompt are the first messages that are equal."""
    where, both = chosen.where, (chosen.messages, rejected.messages)
    count = 0
    while count < min(map(len, both)) and both[0][count] == both[1][count]:
        count += 1
    for column, messages in zip(ANSWERS, both, strict=True):
        if count == len(messages):
            raise DataError(f"{where}: {column} has no answer after the messages that both have; {_REMEDY}")
    for column, messages in zip(ANSWERS, both, strict=True):
        if messages[count]["role"] != "assistant" or count == 0:
            raise DataError(
                f"{where}: the prompts of chosen and rejected differ: {column}[{count}] is the "
                f"{messages[count]['role']} message {_start(messages[count]['content'])}; give both the same prompt, "
                "or remove the row"
            )
    return Pair(replace(chosen, prompt=count), replace(rejected, prompt=count))


def _require_question(pair: Pair, question: str, column: str) -> None:
    """Raise DataError unless the text in the prompt's column is in the messages that both conversations have."""
    asked = [message["content"] for message in pair.chosen.messages[: pair.chosen.prompt]]
    if question.strip() not in (str(each).strip() for each in asked):
        raise DataError(
            f"{pair.chosen.where}: {column} is {_start(question)}, which is no message of chosen and rejected; "
            f"correct it, or remove the column {column}"
        )


def _start(text: Any) -> str:
    """Return the beginning of a text in quotation marks."""
    return repr(text if len(str(text)) <= 40 else f"{text[:40]}...")
