"""Calls of tools, in the form in which a chat template writes them. No torch.

The form is read from what the template itself writes for a conversation with calls: Hermes, Qwen, Llama and Mistral
differ in the text around a call and in the keys of its JSON object.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.errors import DataError

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, whether an answer begins behind them -> text. Raises DataError."""

_QUESTION, _CONTENT, _RESULT, _NAME = "probe question", "probe content", "probe result", "probe_tool"
_ARGUMENTS = ({"probe_key": "probe value 1"}, {"probe_key": "probe value 2"})
_ID = "probe0000"  # templates of Mistral ask for nine letters or digits
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
_ASKED = {"role": "user", "content": _QUESTION}


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolForm:
    """The text of calls: `before`, JSON objects with `between` in between (None: there is one at most), `after`.

    name_key, arguments_key: of a JSON object. no_content: the content that the template takes beside calls where an
    answer has no text.
    """

    before: str
    between: str | None
    after: str
    name_key: str
    arguments_key: str
    no_content: str | None

    def schema(self, tools: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the JSON schema of a call. tools: the name of each tool with the schema of its arguments."""
        calls = []
        for index, (name, parameters) in enumerate(tools):
            place = f"#/anyOf/{index}/properties/{self.arguments_key}" if len(tools) > 1 else ""
            place = place or f"#/properties/{self.arguments_key}"
            calls.append(
                {
                    "type": "object",
                    "properties": {
                        self.name_key: {"const": name},
                        self.arguments_key: _moved(parameters, place),
                    },
                    "required": [self.name_key, self.arguments_key],
                    "additionalProperties": False,
                }
            )
        return {"anyOf": calls} if len(calls) > 1 else calls[0]

    @property
    def _opening(self) -> tuple[str, str]:
        """The text that tells a call from content, and the beginning of a list behind it."""
        before = self.before.strip()
        marker = before.removesuffix("[").rstrip()
        return marker, before.removeprefix(marker).strip()

    def content_end(self, text: str) -> int:
        """Return how many characters of an unfinished text belong to no call, whatever follows."""
        marker, opening = self._opening
        if not marker:
            return 0 if text.strip()[:1] in ("", "{", opening) else len(text)
        end = text.find(marker)
        if end < 0:
            kept = range(min(len(marker) - 1, len(text)), 0, -1)
            end = len(text) - next((length for length in kept if text.endswith(marker[:length])), 0)
        return len(text[:end].rstrip())

    def divide(self, text: str, names: Collection[str]) -> tuple[str, list[Call]]:
        """Return the content and the calls of a whole text. names: of the tools; what calls another one is content."""
        (marker, opening), place = self._opening, 0
        contents: list[str] = []
        calls: list[Call] = []
        while (start := text.find(marker, place) if marker or not calls else -1) >= 0:
            end = _skip_space(text, start + len(marker))
            end += len(opening) if text.startswith(opening, end) else 0
            following = list(self._objects(text, end, names))
            if not following or (not marker and text[:start].strip()):
                break
            contents.append(text[place:start])
            calls += [call for call, _ in following]
            place = following[-1][1]
        if not calls:
            return text, calls
        before, behind = "".join(contents).rstrip(), text[place:].rstrip()
        return before + behind if before else behind.lstrip(), calls

    def _objects(self, text: str, place: int, names: Collection[str]) -> Iterator[tuple[Call, int]]:
        """Yield the calls from `place` on, with the place behind each and behind the text that follows it."""
        while True:
            try:
                value, place = json.JSONDecoder().raw_decode(text, _skip_space(text, place))
            except (ValueError, RecursionError):
                return
            call = self._call(value, names)
            if call is None:
                return
            following = _skip_space(text, place)
            after, between = self.after.strip(), (self.between or "").strip()
            ends = bool(after) and text.startswith(after, following)
            yield call, following + len(after) if ends else place
            if ends or not between or not text.startswith(between, following):
                return
            place = following + len(between)

    def _call(self, value: Any, names: Collection[str]) -> Call | None:
        if not isinstance(value, dict) or value.get(self.name_key) not in names:
            return None
        arguments = value.get(self.arguments_key, {})
        if not isinstance(arguments, dict):
            return None
        return Call(value[self.name_key], json.dumps(arguments, ensure_ascii=False))


def learn_tool_form(render: Render) -> ToolForm | None:
    """Return how a template writes calls; None: it has no tools, or calls are not JSON with name and arguments."""
    try:
        prompt = render([_ASKED], [_TOOL], True)
        if _NAME not in prompt:
            return None
        no_content = _no_content(render)
        content = _CONTENT if _CONTENT in _answer(render, _CONTENT, 1) else no_content
        whole = _answer(render, content, 1)
        first = _find_object(whole, whole.rfind(_QUESTION) + len(_QUESTION), _ARGUMENTS[0])
        result = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": _RESULT}
        if first is None or _RESULT not in render([_ASKED, _message(no_content, 1), result], [_TOOL], True):
            return None
        plain = render([_ASKED, {"role": "assistant", "content": _CONTENT}], [_TOOL], False)
    except DataError:
        return None
    start, end, name_key, arguments_key = first
    if content == _CONTENT:
        before = whole[whole.rfind(_CONTENT, 0, start) + len(_CONTENT) : start]
    else:
        before = whole[len(prompt) : start] if whole.startswith(prompt) else whole[start:start]
    turn_end = plain[plain.rfind(_CONTENT) + len(_CONTENT) :]
    after = whole[end:].removesuffix(turn_end)
    return ToolForm(before.lstrip(), _between(render, content), after, name_key, arguments_key, no_content)


def _no_content(render: Render) -> str | None:
    try:
        _answer(render, None, 1)
    except DataError:
        return ""
    return None


def _between(render: Render, content: str | None) -> str | None:
    """Return the text between two calls of one answer; None: the template takes one call alone."""
    try:
        whole = _answer(render, content, 2)
    except DataError:
        return None
    first = _find_object(whole, whole.rfind(_QUESTION) + len(_QUESTION), _ARGUMENTS[0])
    second = None if first is None else _find_object(whole, first[1], _ARGUMENTS[1])
    return None if first is None or second is None else whole[first[1] : second[0]]


def _answer(render: Render, content: str | None, calls: int) -> str:
    return render([_ASKED, _message(content, calls)], [_TOOL], False)


def _message(content: str | None, calls: int) -> dict[str, Any]:
    """Return an assistant's message with one or two calls."""
    listed = [
        {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        for arguments in _ARGUMENTS[:calls]
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed}


def _find_object(text: str, place: int, arguments: Mapping[str, Any]) -> tuple[int, int, str, str] | None:
    """Return start and end of the JSON object of a call of the probe, and its keys of the name and the arguments."""
    while (place := text.find("{", place)) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except ValueError:
            value, end = {}, place
        keys = [next((key for key in value if value[key] == part), None) for part in (_NAME, arguments)]
        if keys[0] is not None and keys[1] is not None:
            return place, end, keys[0], keys[1]
        place += 1
    return None


def _moved(schema: Any, place: str) -> Any:
    """Return a schema that stands at `place` of another one: its references to itself begin there."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def _skip_space(text: str, place: int) -> int:
    return len(text) - len(text[place:].lstrip())
