"""Chat templates: the text of a conversation, and which parts of the text a model learns to write."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megalite.data.conversation import Conversation
from megalite.errors import DataError

TrainOn = Literal["answers", "all", "last"]
Span = tuple[int, int]

# Jinja, with the variables of Hugging Face's templates. `generation` marks the answers.
BUILT_IN = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "alpaca": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
        "{% elif message.role == 'assistant' %}{{ '### Response:\\n' }}"
        "{% generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '\\n\\n' if not loop.last }}"
        "{% else %}{{ '### Instruction:\\n' + message.content + '\\n\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
    ),
    "plain": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ message.content + '\\n' }}{% endif %}{% endfor %}"
    ),
}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SETTING = "tokenizer.chat_template"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template.

    origin: where it comes from, for messages. special_tokens: its variables such as bos_token. setting: what names
    another template, for messages.
    """

    origin: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]
    setting: str = SETTING

    @property
    def sha256(self) -> str:
        """A hash of all that the text of a conversation depends on."""
        return hashlib.sha256(json.dumps([self.text, self.special_tokens]).encode()).hexdigest()

    @property
    def for_export(self) -> str:
        """The template without its marks of the answers, which only transformers knows."""
        return _MARKS.sub("", self.text)

    def render(self, conversation: Conversation, messages: int | None = None, *, prompt: bool = False) -> str:
        """Return the text of the first `messages` messages (None: all); `prompt`: with the beginning of an answer."""
        return self._render(conversation, messages, prompt)[0]

    def trained_spans(self, conversation: Conversation, text: str, train_on: TrainOn) -> list[Span]:
        """Return the (start, end) characters of `text`, the whole conversation, that the loss is taken of.

        The spans are those that the template marks with {% generation %}, else what each assistant message adds to
        the prompt before it, with the end of its turn; answers of Conversation.prompt are left out. Raises DataError if
        they cannot be told apart.
        """
        if train_on == "all":
            return [(0, len(text))]
        spans = (
            self._render(conversation, None, False)[1]
            if self._marks_answers
            else self._added(conversation, text, train_on)
        )
        if train_on == "last":
            return spans[-1:]
        given = sum(
            message["role"] == "assistant" for message in conversation.messages[: conversation.prompt]
        )
        return spans[given:]

    @cached_property
    def _marks_answers(self) -> bool:
        return _GENERATION.search(self.text) is not None

    def _added(self, conversation: Conversation, text: str, train_on: TrainOn) -> list[Span]:
        messages = conversation.messages
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for place in places[-1:] if train_on == "last" else places:
            before = self.render(conversation, place, prompt=True) if place else ""
            until = text if place + 1 == len(messages) else self.render(conversation, place + 1)
            if not (text.startswith(before) and text.startswith(until) and len(before) < len(until)):
                raise DataError(
                    f"{conversation.where}: the chat template {self.origin} writes messages[{place}] otherwise when "
                    "others follow, so the answers cannot be told from the text; mark them in the template with "
                    '{% generation %}, or set data.train_on = "last" or "all"'
                )
            spans.append((len(before), len(until)))
        return spans

    def _render(
        self, conversation: Conversation, messages: int | None, prompt: bool
    ) -> tuple[str, list[Span]]:
        # Imported here: only workers render, and the import takes a second.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            [text], spans = render_jinja_template(
                conversations=[[dict(message) for message in conversation.messages[:messages]]],
                tools=None if conversation.tools is None else list(conversation.tools),
                chat_template=self.text,
                return_assistant_tokens_mask=self._marks_answers,
                add_generation_prompt=prompt,
                **dict(self.special_tokens),
            )
        except Exception as error:  # a template may raise whatever it likes
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"{conversation.where}: the chat template {self.origin} fails ({reason}); change this conversation to "
                f"what the template takes, or {_remedy(self.setting)}"
            ) from error
        return text, [(start, end) for start, end in spans[0]] if spans else []


def load_chat_template(
    tokenizer: Path, name: str | None, end_of_document: str = "", *, setting: str = SETTING
) -> ChatTemplate:
    """Return the template `name` for the tokenizer in folder `tokenizer`: built in, a file, or one of the tokenizer's.

    name: None: the tokenizer's default. end_of_document: the eos_token of a folder that names none. setting: the
    setting or flag that names a template, for messages. Raises DataError.
    """
    special = tuple(_special_tokens(tokenizer, end_of_document).items())
    own = _own_templates(tokenizer)
    if name is None:
        if "default" not in own:
            named = f", or to one of the tokenizer's: {', '.join(own)}" if own else ""
            raise DataError(f"the tokenizer in {tokenizer} has no chat template; {_remedy(setting)}{named}")
        return ChatTemplate(f"of {tokenizer}", own["default"], special, setting)
    if name in own:
        return ChatTemplate(f"{name!r} of {tokenizer}", own[name], special, setting)
    if name in BUILT_IN:
        return ChatTemplate(repr(name), BUILT_IN[name], special, setting)
    file = Path(name).expanduser()
    if not file.is_file():
        known = ", ".join([*BUILT_IN, *own])
        raise DataError(
            f"the chat template {name!r} is neither a file nor one of {known}; set {setting} to one of them"
        )
    return ChatTemplate(str(file), _text(file, setting), special, setting)


def has_chat_template(tokenizer: Path) -> bool:
    """Return whether the tokenizer in folder `tokenizer` has a default template. Raises DataError."""
    return "default" in _own_templates(tokenizer)


def _own_templates(folder: Path) -> dict[str, str]:
    """Return the tokenizer's templates by name, from all places where transformers saves them."""
    found: dict[str, str] = {}
    given = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, Sequence):
        found |= {each["name"]: each["template"] for each in given if isinstance(each, Mapping)}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _text(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _text(file)
    return found


def _special_tokens(folder: Path, end_of_document: str) -> dict[str, str]:
    """Return the special tokens that templates name."""
    found = {"bos_token": "", "eos_token": end_of_document}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, token in _json(folder / name).items():
            content = token.get("content") if isinstance(token, Mapping) else token
            if key in _SPECIAL and isinstance(content, str):
                found[key] = content
    return found


def _remedy(setting: str) -> str:
    return f"set {setting} to one of {', '.join(BUILT_IN)}, or to a Jinja file"


def _text(file: Path, setting: str = SETTING) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the chat template {file} cannot be read ({error}); {_remedy(setting)}") from error


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read ({error}); save the tokenizer again") from error
    return content if isinstance(content, dict) else {}
