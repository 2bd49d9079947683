"""Prompts as token ids: texts, and conversations by the tokenizer's chat template. No torch."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megalite.data.chat.chat_template import ChatTemplate, has_chat_template, load_chat_template
from megalite.data.chat.conversation import Conversation
from megalite.data.chat.messages import TEMPLATE_KEYS, message_list
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.generation.source import ModelSource
from megalite.generation.stops import chat_stops
from megalite.generation.tool_calls import ToolForm, learn_tool_form

TEMPLATE_FLAG = "--chat-template"


def chat_template(source: ModelSource, name: str | None) -> ChatTemplate | None:
    """Return the chat template that is asked for, the one of training, or the tokenizer's own; None without any.

    name: the value of --chat-template. Raises DataError for a name that no template has.
    """
    folder = _home(source.tokenizer)
    name = name or source.chat_template
    if name is None and not has_chat_template(folder):
        return None
    return load_chat_template(folder, name, source.end_of_document or "", setting=TEMPLATE_FLAG)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode the prompt as transformers does: with the tokenizer's start token, without its end token."""
    ids: list[int] = tokenizer.backend.encode(prompt).ids
    return ids[:-1] if ids[-1:] == [tokenizer.end_of_document_id] else ids


class Chat:
    """Conversations in the form of a model's chat template.

    template: None: the tokenizer's own. Raises DataError if the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path, template: ChatTemplate | None = None):
        self._tokenizer = tokenizer
        self.template = template or load_chat_template(
            _home(folder), None, tokenizer.end_of_document, setting=TEMPLATE_FLAG
        )
        self.stops = chat_stops(self.template, tokenizer)

    def prompt_ids(
        self,
        messages: Any,
        where: str = "the conversation",
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        begun: str = "",
    ) -> list[int]:
        """Return the ids of a conversation and the beginning of the answer.

        messages: a list of objects with role and content. where: its place, for errors. tools: those that the template
        shows. begun: the text that the answer begins with. Raises DataError.
        """
        text = self.prompt_text(messages, where, tools=tools) + begun
        return self._tokenizer.encode(text)

    def prompt_text(
        self,
        messages: Any,
        where: str = "the conversation",
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: bool = True,
    ) -> str:
        """As prompt_ids, the text; prompt: with the beginning of an answer."""
        checked = tuple(read.message for read in message_list(messages, "messages", where, TEMPLATE_KEYS))
        return self.template.render(Conversation(checked, where, tuple(tools) or None), prompt=prompt)

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the template writes calls of tools; None: it has no tools, or not as JSON with name and arguments."""
        return learn_tool_form(
            lambda messages, tools, prompt: self.template.render(
                Conversation(tuple(messages), "a call of a tool", tuple(tools)), prompt=prompt
            )
        )

    @cached_property
    def tool_form_ids(self) -> frozenset[int]:
        """The special tokens in the text of calls that do not end it."""
        form = self.tool_form
        text = "" if form is None else "".join((form.before, form.between or "", form.after))
        special = self._tokenizer.backend.get_added_tokens_decoder()
        shown = {token for token in special if special[token].special and special[token].content in text}
        return frozenset(shown - self.stops.ids)


def _home(tokenizer: Path) -> Path:
    """Return the folder of a tokenizer, which may be named by its tokenizer.json."""
    return tokenizer if tokenizer.is_dir() else tokenizer.parent
