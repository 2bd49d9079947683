"""Calls of tools: the form that each kind of chat template writes them in, and how a text is read in it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megalite.data.chat.chat_template import ChatTemplate
from megalite.data.chat.conversation import Conversation
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.generation.prompts import Chat
from megalite.generation.schema_trial import compile_problem
from megalite.generation.tool_calls import Call, ToolForm, learn_tool_form
from tests.support.tiny import tiny_tokenizer
from tests.support.tool_templates import HERMES, LLAMA, MISTRAL, PLAIN, XML

FORMS = {
    HERMES: ToolForm(
        "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", "name", "arguments", None
    ),
    LLAMA: ToolForm("", None, "", "name", "parameters", None),
    MISTRAL: ToolForm("[TOOL_CALLS][", ", ", "]", "name", "arguments", None),
    # Without tools, and with calls that are not JSON.
    PLAIN: None,
    XML: None,
}
NAMES = ("f", "g")
F, G = Call("f", '{"a": 1}'), Call("g", "{}")


def chat_template(text: str) -> ChatTemplate:
    return ChatTemplate("a test's", text, (("bos_token", "<s>"), ("eos_token", "</s>")))


def learned(text: str) -> ToolForm | None:
    template = chat_template(text)

    def render(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool
    ) -> str:
        return template.render(Conversation(tuple(messages), "a test", tuple(tools)), prompt=prompt)

    return learn_tool_form(render)


@pytest.mark.parametrize("text", FORMS, ids=["hermes", "llama", "mistral", "plain", "xml"])
def test_the_form_of_a_template(text: str) -> None:
    assert learned(text) == FORMS[text]


def test_a_template_that_drops_the_results_of_tools_has_none() -> None:
    assert learned(HERMES.replace("<tool_response>\n{{ message.content }}", "<tool_response>")) is None


# Form, text, its content and its calls.
TEXTS = [
    (HERMES, "Hello {} there", "Hello {} there", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    (HERMES, 'I ask.\n<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "I ask.", [F]),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        "",
        [F, G],
    ),
    (HERMES, '<tool_call>\n{"name": "g"}\n</tool_call>\nDone.', "Done.", [G]),
    (HERMES, '\nSo.\n<tool_call>\n{"name": "g"}\n</tool_call>\nDone.', "\nSo.\nDone.", [G]),
    # The end of the last call is missing; the second call was cut.
    (HERMES, '<tool_call>\n{"name": "g", "arguments": {}}', "", [G]),
    (
        HERMES,
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na',
        '<tool_call>\n{"na',
        [G],
    ),
    # No tool has that name; no JSON; arguments are no object; no end.
    (HERMES, '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>', None, []),
    (HERMES, "<tool_call>\nf(1)\n</tool_call>", None, []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>', None, []),
    (HERMES, "<tool_call>", None, []),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (LLAMA, '\n{"name": "g", "parameters": {}}', "", [G]),
    (LLAMA, 'So {"name": "g", "parameters": {}}', None, []),
    (LLAMA, '{"a": 1}', None, []),
    (LLAMA, "", None, []),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [F]),
    (MISTRAL, '[TOOL_CALLS] [ {"name": "f", "arguments": {"a": 1}} ]', "", [F]),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]',
        "",
        [F, G],
    ),
]


@pytest.mark.parametrize(("text", "answer", "content", "calls"), TEXTS)
def test_an_answer_is_divided(text: str, answer: str, content: str | None, calls: list[Call]) -> None:
    form = FORMS[text]
    assert form is not None
    expected = answer if content is None else content
    assert form.divide(answer, NAMES) == (expected, calls)
    # No text that was shown while the answer came is taken back.
    for end in range(len(answer)):
        shown = answer[: form.content_end(answer[:end])]
        assert expected.startswith(shown)


def test_every_call_of_a_form_follows_its_schema() -> None:
    form = FORMS[HERMES]
    assert form is not None
    whole = form.schema([("f", {"type": "object"}), ("g", {"type": "object"})])
    assert [each["properties"]["name"] for each in whole["anyOf"]] == [{"const": "f"}, {"const": "g"}]


def test_references_of_the_arguments_still_point_into_them() -> None:
    form = FORMS[LLAMA]
    assert form is not None
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    parameters = {"$defs": {"Node": node}, "properties": {"first": {"$ref": "#/$defs/Node"}}}
    for tools, place in ((1, "#/properties/parameters"), (2, "#/anyOf/1/properties/parameters")):
        schema = form.schema([("f", {"type": "object"}), ("g", parameters)][-tools:])
        text = json.dumps(schema)
        assert text.count(f'"$ref": "{place}/$defs/Node"') == 2
        assert compile_problem(text) is None


def test_special_tokens_of_calls_are_known(tmp_path: Path) -> None:
    file = tiny_tokenizer(tmp_path, special=("[TOOL_CALLS]", "[INST]"))
    tokenizer = load_tokenizer(file)
    ids = Chat(tokenizer, tmp_path, chat_template(MISTRAL)).tool_form_ids
    assert ids == {tokenizer.backend.token_to_id("[TOOL_CALLS]")}
    assert Chat(tokenizer, tmp_path, chat_template(PLAIN)).tool_form_ids == frozenset()
