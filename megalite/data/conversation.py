"""Conversations of instruction data, from the forms in which data sets have them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megalite.errors import DataError

Form = Literal["messages", "prompt_completion", "alpaca", "sharegpt"]
Row = Mapping[str, Any]
Message = dict[str, Any]

_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "response"),
    ("question", "answer"),
)
_COLUMNS = (
    "messages; prompt and completion (or prompt and response, instruction and response, question and answer); "
    "instruction and output; conversations"
)
_ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's `from` -> role.
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """messages: dicts with role and content, and what else the chat template may use.

    where: the place of the row, for messages. tools: the row's, for the template.
    """

    messages: tuple[Mapping[str, Any], ...]
    where: str
    tools: tuple[Any, ...] | None = None


def form_of(row: Row, where: str) -> Form:
    """Return the form of a row by its columns. Raises DataError."""
    for form, fits in _FITS.items():
        if fits(row):
            return form
    raise DataError(
        f"{where}: no conversation in the columns {sorted(map(str, row))}; rename them to one of these: {_COLUMNS}"
    )


def conversation(row: Row, form: Form, where: str) -> Conversation:
    """Return the conversation of a row; `form`: of the file's first row. Raises DataError with place and field."""
    if not _FITS[form](row):
        raise DataError(
            f"{where}: mixed forms: the file's first row has the form {form}, this one the columns "
            f"{sorted(map(str, row))}; put rows of one form into a file"
        )
    messages = _MESSAGES[form](row, where)
    _check(messages, where)
    return Conversation(tuple(messages), where, _tools(row.get("tools"), where))


def _has(row: Row, *columns: str) -> bool:
    return all(row.get(column) is not None for column in columns)


def _pair(row: Row) -> tuple[str, str] | None:
    return next((pair for pair in _PAIRS if _has(row, *pair)), None)


def _is_alpaca(row: Row) -> bool:
    return _has(row, "instruction", "output") or _has(row, "instruction", "instances")


_FITS: dict[Form, Callable[[Row], bool]] = {
    "messages": lambda row: _has(row, "messages"),
    "sharegpt": lambda row: _has(row, "conversations"),
    "alpaca": _is_alpaca,
    "prompt_completion": lambda row: _pair(row) is not None,
}


def _of_messages(row: Row, where: str) -> list[Message]:
    return _listed(row["messages"], "messages", where)


def _of_sharegpt(row: Row, where: str) -> list[Message]:
    messages = []
    for place, turn in enumerate(_objects(row["conversations"], "conversations", where)):
        field = f"conversations[{place}]"
        if "role" in turn:
            messages.append(_message(turn, field, where))
            continue
        speaker = turn.get("from")
        if speaker not in _SPEAKERS:
            known = ", ".join(_SPEAKERS)
            raise DataError(f"{where}: {field}.from is {speaker!r}, not one of {known}; fix the row")
        said = _text(turn.get("value"), f"{field}.value", where)
        messages.append({"role": _SPEAKERS[speaker], "content": said})
    return _with_system(row, messages, where)


def _of_alpaca(row: Row, where: str) -> list[Message]:
    example = row
    if not _has(row, "output"):
        instances = _objects(row["instances"], "instances", where)
        if not instances:
            raise DataError(f"{where}: instances is empty; remove the row")
        example = instances[0]
    question = _text(row["instruction"], "instruction", where)
    more = example.get("input")
    if more is not None and _text(more, "input", where).strip():
        question = f"{question}\n\n{more}"
    answer = _text(example.get("output"), "output", where)
    return _with_system(row, _asked(question, answer), where)


def _of_pair(row: Row, where: str) -> list[Message]:
    pair = _pair(row)
    assert pair is not None
    question, answer = (row[column] for column in pair)
    if isinstance(question, str) and isinstance(answer, str):
        return _with_system(row, _asked(question, answer), where)
    if isinstance(question, str) or isinstance(answer, str):
        raise DataError(f"{where}: {pair[0]} and {pair[1]} are not both texts or both lists; fix the row")
    return _listed(question, pair[0], where) + _listed(answer, pair[1], where)


_MESSAGES: dict[Form, Callable[[Row, str], list[Message]]] = {
    "messages": _of_messages,
    "sharegpt": _of_sharegpt,
    "alpaca": _of_alpaca,
    "prompt_completion": _of_pair,
}


def _asked(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _with_system(row: Row, messages: list[Message], where: str) -> list[Message]:
    if row.get("system") in (None, ""):
        return messages
    return [{"role": "system", "content": _text(row["system"], "system", where)}, *messages]


def _listed(value: object, field: str, where: str) -> list[Message]:
    turns = _objects(value, field, where)
    return [_message(turn, f"{field}[{place}]", where) for place, turn in enumerate(turns)]


def _objects(value: object, field: str, where: str) -> list[Row]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: {field} is {type(value).__name__}, not a list; fix the row")
    for place, each in enumerate(value):
        if not isinstance(each, Mapping):
            kind = type(each).__name__
            raise DataError(f"{where}: {field}[{place}] is {kind}, not an object; fix the row")
    return list(value)


def _message(turn: Row, field: str, where: str) -> Message:
    role, content = turn.get("role"), turn.get("content")
    if role not in _ROLES:
        wrong = "is missing" if role is None else f"is {role!r}"
        raise DataError(f"{where}: {field}.role {wrong}; write one of {', '.join(_ROLES)}")
    # Tables have every key in every message.
    kept = {key: value for key, value in turn.items() if value is not None}
    if role == "assistant" and content is None and kept.get("tool_calls"):
        return {**kept, "content": ""}
    if isinstance(content, list):
        kept["content"] = "".join(
            _part(part, f"{field}.content[{place}]", where) for place, part in enumerate(content)
        )
    else:
        _text(content, f"{field}.content", where)
    return kept


def _part(part: object, field: str, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise DataError(f"{where}: {field} is not a text; megalite trains on text only: remove the row")
    return _text(part.get("text"), f"{field}.text", where)


def _text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        wrong = "is missing" if value is None else f"is {type(value).__name__}, not text"
        raise DataError(f"{where}: {field} {wrong}; fix or remove the row")
    return value


def _check(messages: Sequence[Message], where: str) -> None:
    """Raise DataError unless a model can learn an answer of these messages."""
    for place, message in enumerate(messages):
        role = message["role"]
        if not message["content"].strip() and not message.get("tool_calls") and role != "tool":
            kind = {"assistant": "answer", "user": "prompt"}.get(role, "message")
            raise DataError(
                f"{where}: messages[{place}].content: the {kind} of the {role} is empty; fix or remove the row"
            )
        if role in ("system", "developer") and place and messages[place - 1]["role"] != role:
            raise DataError(
                f"{where}: messages[{place}].role is {role!r} after other messages; move it to the front"
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{where}: no message of the assistant to learn from; add an answer or remove the row"
        )


def _tools(value: object, where: str) -> tuple[Any, ...] | None:
    """Return the tools of a row: a list, or its JSON."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: tools is not JSON ({error}); fix the row") from error
    if value is None or value == "":
        return None
    if not isinstance(value, Sequence) or not all(isinstance(each, dict) for each in value):
        raise DataError(f"{where}: tools is not a list of objects; fix the row")
    return tuple(value) or None
