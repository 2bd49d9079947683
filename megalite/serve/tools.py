"""Tools of chat requests: the messages that a template reads, and the calls that an answer holds."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.generation.tool_calls import Call, ToolForm
from megalite.serve.errors import UNSUPPORTED_CODE, ApiError
from megalite.serve.schemas import ChatMessage, ChatRequest, ToolCall

_ID_BYTES = 6  # 9 hexadecimal digits are kept, the length that templates of Mistral ask for
_ID_LENGTH = 9


@dataclass(frozen=True)
class ToolUse:
    """How the calls of an answer are read.

    names: of the tools. forced: the answer is the JSON object of a call, and `begun` is the text of a call before it,
    with which the prompt ends. parallel: whether an answer may have several calls. finish: why an answer with calls
    ends.
    """

    form: ToolForm
    names: frozenset[str]
    begun: str = ""
    forced: bool = False
    parallel: bool = True
    finish: str = "tool_calls"

    def divide(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the calls of an answer, as OpenAI's objects."""
        content, calls = self.form.divide(self.begun + text, self.names)
        return content, [_object(call) for call in (calls if self.parallel else calls[:1])]


class ToolStream:
    """The content and the calls of an answer, as it comes. Calls are shown once the answer has ended."""

    def __init__(self, use: ToolUse):
        self._use, self._text, self._shown = use, "", 0

    def push(self, text: str, *, ends: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the content that is new with a text, and the calls."""
        self._text += text
        content, calls = self._text, list[dict[str, Any]]()
        if ends:
            content, calls = self._use.divide(self._text)
        else:
            content = "" if self._use.forced else content[: self._use.form.content_end(content)]
        new = content[self._shown :]
        self._shown = max(self._shown, len(content))
        return new, calls


def tool_use(body: ChatRequest, form: ToolForm | None) -> ToolUse | None:
    """Return how the answer to a request is read; None: without tools. ApiError for a model without them."""
    choice = body.tool_choice
    if not body.tools or choice.type == "none":
        return None
    if form is None:
        raise _without_tools("tools")
    if body.response_format.type != "text":
        message = 'response_format: this server does not support it beside tools; set tool_choice to "none"'
        raise ApiError(400, message, param="response_format", code=UNSUPPORTED_CODE)
    names = frozenset(tool.function.name for tool in body.tools)
    if choice.type == "auto":
        return ToolUse(form, names, parallel=body.parallel_tool_calls)
    if body.stop:
        message = "stop: a text of it may cut the call that tool_choice asks for; leave stop out"
        raise ApiError(400, message, param="stop", code="invalid_value")
    # OpenAI's service ends a call of a named function with "stop".
    finish = "tool_calls" if choice.function is None else "stop"
    return ToolUse(form, names, form.before, forced=True, finish=finish)


def call_schema(body: ChatRequest, form: ToolForm) -> Mapping[str, Any]:
    """Return the JSON schema of the call that tool_choice asks for."""
    name = None if body.tool_choice.function is None else body.tool_choice.function.name
    tools = [tool.function for tool in body.tools if name in (None, tool.function.name)]
    return form.schema([(tool.name, tool.parameters or {"type": "object"}) for tool in tools])


def template_messages(messages: Sequence[ChatMessage], form: ToolForm | None) -> list[dict[str, Any]]:
    """Return messages as chat templates read them. ApiError for calls and results of tools that no template takes."""
    read = []
    for index, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.name is not None:
            fields["name"] = message.name
        if message.tool_calls or message.role == "tool":
            if form is None:
                raise _without_tools(f"messages[{index}]")
            if message.tool_call_id is not None:
                fields["tool_call_id"] = message.tool_call_id
            if message.tool_calls:
                place = f"messages[{index}].tool_calls"
                fields["content"] = message.text or form.no_content
                fields["tool_calls"] = [
                    _template_call(call, f"{place}[{number}]")
                    for number, call in enumerate(message.tool_calls)
                ]
        read.append(fields)
    return read


def _template_call(call: ToolCall, place: str) -> dict[str, Any]:
    """Return a call as templates read it: with its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        name = f"{place}.function.arguments"
        raise ApiError(400, f"{name}: not the text of a JSON object", param=name, code="invalid_value")
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _without_tools(place: str) -> ApiError:
    return ApiError(
        400,
        f"{place}: the model's chat template has no tools, or writes their calls in another form than JSON with a name "
        "and arguments; leave tools and their messages out, or start the server with another --chat-template",
        param=place,
        code=UNSUPPORTED_CODE,
    )


def _object(call: Call) -> dict[str, Any]:
    return {
        "id": secrets.token_hex(_ID_BYTES)[:_ID_LENGTH],
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
