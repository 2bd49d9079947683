"""Messages of instruction data: each checked, with the role and the content that chat templates read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megalite.data.text.source_stream import json_type
from megalite.data.text.train_marks import take_train_mark
from megalite.errors import DataError

# The content of a message for errors; other roles may say nothing.
_NAMES = {"user": "prompt", "assistant": "answer"}


class ReadMessage(NamedTuple):
    """A checked message.

    field: of its row, for errors. message: for the template. trained: what the row says about it; None: nothing.
    unused: keys of its parts without effect.
    """

    field: str
    message: dict[str, Any]
    trained: bool | None = None
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class MessageKeys:
    """The keys of the role and of the content in a message, and the role of chat templates for each role."""

    role: str
    content: str
    roles: Mapping[str, str]


TEMPLATE_KEYS = MessageKeys(
    "role", "content", {role: role for role in ("system", "developer", "user", "assistant", "tool")}
)
SHAREGPT_KEYS = MessageKeys(
    "from",
    "value",
    {
        "system": "system",
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "model"), "assistant"),
        **dict.fromkeys(("tool", "observation", "function"), "tool"),
    },
)


def message_list(items: Any, column: str, where: str, keys: MessageKeys) -> list[ReadMessage]:
    """Return the messages of a list in a column; DataError, with place, field and remedy, for what is no message."""
    if not isinstance(items, list):
        raise DataError(
            f"{where}: {column} is {json_type(items)}, not a list of messages; "
            f"write a list of objects with {keys.role} and {keys.content}, or remove the row"
        )
    if not items:
        raise DataError(f"{where}: {column} has no messages; add them, or remove the row")
    return [_message(item, f"{column}[{index}]", where, keys) for index, item in enumerate(items)]


def _message(item: Any, field: str, where: str, keys: MessageKeys) -> ReadMessage:
    if not isinstance(item, Mapping):
        raise DataError(
            f"{where}: {field} is {json_type(item)}, not a message; "
            f"write an object with {keys.role} and {keys.content}"
        )
    # Some writers give every message all fields; null is none to a template.
    present = {key: value for key, value in item.items() if value is not None}
    named, roles = present.pop(keys.role, None), ", ".join(keys.roles)
    if named is None:
        raise DataError(f"{where}: {field}.{keys.role} is missing; set it to one of {roles}")
    role = keys.roles.get(named) if isinstance(named, str) else None
    if role is None:
        raise DataError(
            f"{where}: {field}.{keys.role} is {named!r}, an unknown role; set it to one of {roles}"
        )
    trained = take_train_mark(present, field, where)
    content_field, content = f"{field}.{keys.content}", present.pop(keys.content, None)
    calls = present.get("tool_calls", [])
    if not isinstance(calls, list):
        raise DataError(
            f"{where}: {field}.tool_calls is {json_type(calls)}, not a list; write a list of calls, or remove it"
        )
    if not calls:
        present.pop("tool_calls", None)
    unused: tuple[str, ...] = ()
    if isinstance(content, list):
        parts = (part for part in content if isinstance(part, Mapping))
        others = {key for part in parts for key, value in part.items() if value is not None}
        unused = tuple(f"{keys.content}[].{key}" for key in sorted(others - {"type", "text"}))
        content = "".join(
            _part(part, f"{content_field}[{index}]", where) for index, part in enumerate(content)
        )
    if not (role == "assistant" and calls):
        message_text(content, role, content_field, where)
    elif content is not None:
        column_text(content, content_field, where)
    return ReadMessage(field, present | {"role": role, "content": content}, trained, unused)


def _part(part: Any, field: str, where: str) -> str:
    """Return the text of one part of a content that is given as a list."""
    if not isinstance(part, Mapping):
        raise DataError(
            f'{where}: {field} is {json_type(part)}, not a part of a content; write {{"type": "text", "text": ...}}'
        )
    if part.get("type") != "text":
        raise DataError(
            f"{where}: {field}.type is {part.get('type')!r}, but only text is read; remove the part or the row"
        )
    return column_text(part.get("text"), f"{field}.text", where)


def column_text(content: Any, field: str, where: str) -> str:
    """Return `content`, the value of a field; DataError if it is not text."""
    if content is None:
        raise DataError(f"{where}: {field} is missing or null; write its text, or remove the row")
    if not isinstance(content, str):
        raise DataError(
            f"{where}: {field} is {json_type(content)}, not text; write it as text, or remove the row"
        )
    return content


def message_text(content: Any, role: str, field: str, where: str) -> str:
    """Return the content of a message; DataError if it is not text, or is the empty text of a user or an assistant."""
    text = column_text(content, field, where)
    if role in _NAMES and not text.strip():
        raise DataError(f"{where}: {field} is an empty {_NAMES[role]}; write its text, or remove the row")
    return text
