"""Turns a row of instruction data, in one of the usual forms, into messages with the roles of chat templates."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megalite.data.chat.messages import (
    SHAREGPT_KEYS,
    TEMPLATE_KEYS,
    MessageKeys,
    ReadMessage,
    column_text,
    message_list,
    message_text,
)
from megalite.data.text.source_stream import json_fault, json_type, refuse_surrogates
from megalite.data.text.train_marks import refuse_untrained
from megalite.errors import DataError

Form = Literal["messages", "sharegpt", "prompt_completion", "alpaca"]

# The columns of each form; a row with those of several forms has the first.
_COLUMNS: dict[Form, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",), ("conversations",)),
    "sharegpt": (("conversations",),),
    "prompt_completion": (
        ("prompt", "completion"),
        ("question", "answer"),
        ("prompt", "response"),
        ("instruction", "response"),
    ),
    "alpaca": (("instruction", "output"), ("instruction", "instances")),
}
# Columns whose text follows the one of a prompt, after a blank line: Alpaca's input, Dolly's context.
_APPENDED = {"instruction": ("input", "context"), "question": ("context",)}


@dataclass(frozen=True)
class Conversation:
    """One row of instruction data.

    messages: each a dict with role, content (None only beside an assistant's tool_calls) and what else the template may
        use, the roles as in Hugging Face's chat templates.
    where: the row's place for messages of errors.
    tools: the row's column "tools", for the template.
    prompt: the number of first messages whose answers, if any, are not to be learned.
    marks: the number of a message -> whether the row says to train on it (weight 0 or 1, train false or true).
    unused: the row's columns, and keys within contents, without effect.
    """

    messages: tuple[Mapping[str, Any], ...]
    where: str
    tools: tuple[Any, ...] | None = None
    prompt: int = 0
    marks: Mapping[int, bool] = field(default_factory=dict)
    unused: tuple[str, ...] = field(default=(), compare=False)


def form_of(row: Mapping[str, Any], where: str) -> Form:
    """Return the form of a row by its columns; DataError with the columns found and those of each form."""
    if form := _form(row):
        return form
    forms = "; ".join(
        f"{name}: {' or '.join(' + '.join(each) for each in columns)}" for name, columns in _COLUMNS.items()
    )
    raise DataError(
        f"{where}: no form of instruction data has the columns {sorted(row)} ({forms}); "
        'rename the columns, or read plain text with data.kind = "text"'
    )


def conversation(row: Mapping[str, Any], form: Form, where: str) -> Conversation:
    """Convert a row of a source whose first row has `form`; `where` is the row's place for messages.

    - messages: the column messages, or conversations, a list of {role, content}.
    - sharegpt: the column conversations, a list of {from, value}.
    - prompt_completion: prompt + completion, question + answer, prompt + response or instruction + response: two texts,
      the second one the assistant's, or two lists of {role, content}, of which the second one is learned.
    - alpaca: instruction + output, or instruction + instances as in Self-Instruct, whose first instance is used.

    An instruction is followed by the texts of the columns input and context, a question by that of context. A column
    system is the first message. Raises DataError, with place, field and remedy, for a row of another form, an unknown
    role, an empty prompt or answer, no answer, and a system message that is not the first.
    """
    columns = _columns(row, form)
    prompt = 0
    if not columns:
        other = _form(row)
        raise DataError(
            f"{where}: mixed forms: the form of the source is {form!r}, by its first row, but this row has the columns "
            f"{sorted(row)}{f', the form {other!r}' if other else ''}; give all rows one form"
        )
    if form in ("messages", "sharegpt"):
        read = _listed(row, columns[0], where, TEMPLATE_KEYS if form == "messages" else SHAREGPT_KEYS)
    elif form == "prompt_completion":
        asked, answers = _prompt_completion(row, columns[0], columns[1], where)
        read, prompt = asked + answers, len(asked) if isinstance(row[columns[0]], list) else 0
    else:
        read = _alpaca(row, columns[1], where)
    return _of_messages(row, read, prompt, where, columns)


def answered(row: Mapping[str, Any], prompt: str, answer: str, where: str) -> Conversation:
    """Convert a row whose columns `prompt` and `answer` are two texts or two lists, as of "prompt_completion"."""
    asked, answers = _prompt_completion(row, prompt, answer, where)
    return _of_messages(row, asked + answers, len(asked), where, (prompt, answer))


def whole(row: Mapping[str, Any], column: str, where: str) -> Conversation:
    """Convert a row whose `column` is a list of {role, content} or {from, value}."""
    keys = SHAREGPT_KEYS if _form_of_items(row[column]) == "sharegpt" else TEMPLATE_KEYS
    return _of_messages(row, _listed(row, column, where, keys), 0, where, (column,))


def _of_messages(
    row: Mapping[str, Any], messages: list[ReadMessage], prompt: int, where: str, columns: Collection[str]
) -> Conversation:
    """Return the conversation of the messages that the `columns` of the form have, and of the row's other columns."""
    refuse_untrained(row, where)
    for system in _optional_texts(row, ["system"], where):
        messages.insert(0, ReadMessage("system", {"role": "system", "content": system}))
        prompt += prompt > 0
    for message in messages[1:]:
        if message.message["role"] == "system":
            raise DataError(
                f"{where}: {message.field} is a system message after another message; put it first, or remove it"
            )
    used = {*columns, "system", "tools"}
    if isinstance(row[next(iter(columns))], str):
        used.update(_APPENDED.get(next(iter(columns)), ()))
    unused = [column for column, value in row.items() if column not in used and value is not None]
    return Conversation(
        tuple(message.message for message in messages),
        where,
        _tools(row, where),
        prompt,
        {index: message.trained for index, message in enumerate(messages) if message.trained is not None},
        (*unused, *_unused_instances(row, columns), *(key for message in messages for key in message.unused)),
    )


def _unused_instances(row: Mapping[str, Any], columns: Collection[str]) -> list[str]:
    """Return the names of what is not read of Self-Instruct's instances: all but input and output of the first."""
    if "instances" not in columns:
        return []
    more = ["instances[1]"] if len(row["instances"]) > 1 else []
    return [f"instances[].{key}" for key in row["instances"][0] if key not in ("input", "output")] + more


def _form(row: Mapping[str, Any]) -> Form | None:
    return next((form for form in _COLUMNS if _columns(row, form)), None)


def _columns(row: Mapping[str, Any], form: Form) -> tuple[str, ...] | None:
    """Return the columns by which the row has the form; None if it lacks them."""
    for columns in _COLUMNS[form]:
        if all(column in row for column in columns):
            if columns == ("conversations",) and _form_of_items(row["conversations"]) not in (form, None):
                continue
            return columns
    return None


def _form_of_items(items: Any) -> Form | None:
    first = items[0] if isinstance(items, list) and items and isinstance(items[0], Mapping) else {}
    if first.get("role") is not None:
        return "messages"
    return "sharegpt" if first.get("from") is not None else None


def _listed(row: Mapping[str, Any], column: str, where: str, keys: MessageKeys) -> list[ReadMessage]:
    """Return the messages of a column, a list; at least one must be an assistant's."""
    messages = message_list(row[column], column, where, keys)
    if not any(message.message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{where}: {column} has no assistant message, so it teaches nothing; add the answer, or remove the row"
        )
    return messages


def _prompt_completion(
    row: Mapping[str, Any], prompt: str, completion: str, where: str
) -> tuple[list[ReadMessage], list[ReadMessage]]:
    """Return the messages of the prompt and those of the completion."""
    lists = [column for column in (prompt, completion) if isinstance(row[column], list)]
    if len(lists) == 1:
        other = completion if lists[0] == prompt else prompt
        raise DataError(
            f"{where}: {lists[0]} is a list of messages, but {other} is {json_type(row[other])}; "
            "make both texts, or both lists"
        )
    if lists:
        before = message_list(row[prompt], prompt, where, TEMPLATE_KEYS)
        return before, _listed(row, completion, where, TEMPLATE_KEYS)
    appended = _optional_texts(row, _APPENDED.get(prompt, ()), where)
    asked, answered = _pair(row, prompt, appended, row[completion], completion, where)
    return [asked], [answered]


def _alpaca(row: Mapping[str, Any], column: str, where: str) -> list[ReadMessage]:
    appended = _optional_texts(row, _APPENDED["instruction"], where)
    if column == "output":
        return _pair(row, "instruction", appended, row["output"], "output", where)
    instances = row["instances"]
    if not isinstance(instances, list) or not instances or not isinstance(instances[0], Mapping):
        raise DataError(
            f"{where}: instances is not a list of objects with input and output; write one, or remove the row"
        )
    first = {f"instances[0].{key}": value for key, value in instances[0].items()}
    appended += _optional_texts(first, ["instances[0].input"], where)
    return _pair(row, "instruction", appended, first.get("instances[0].output"), "instances[0].output", where)


def _pair(
    row: Mapping[str, Any], prompt: str, appended: list[str], answer: Any, answer_field: str, where: str
) -> list[ReadMessage]:
    """Return the messages of a column of the user's text, with the texts that belong to it, and of an answer."""
    asked = column_text(row[prompt], prompt, where)
    if appended:
        asked = "\n\n".join([asked, *appended] if asked.strip() else appended)
    return [
        ReadMessage(field, {"role": role, "content": message_text(text, role, field, where)})
        for field, role, text in ((prompt, "user", asked), (answer_field, "assistant", answer))
    ]


def _optional_texts(row: Mapping[str, Any], columns: Iterable[str], where: str) -> list[str]:
    """Return the texts of those columns that the row has; white space alone counts as none."""
    texts = [column_text(row[each], each, where) for each in columns if row.get(each) is not None]
    return [text for text in texts if text.strip()]


def _tools(row: Mapping[str, Any], where: str) -> tuple[Any, ...] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: tools is not JSON ({json_fault(error)}); fix it, or remove the column"
            ) from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(
            f"{where}: tools is {json_type(tools)}, not a list; write a list of tools, or remove the column"
        )
    for index, tool in enumerate(tools or []):
        if not isinstance(tool, Mapping):
            raise DataError(
                f"{where}: tools[{index}] is {json_type(tool)}, not an object; write each tool as an object"
            )
    refuse_surrogates({"tools": tools}, where)
    return tuple(tools) if tools else None
