"""Chat templates: the text of a conversation, and which parts of the text a model learns to write."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megalite.data.chat.conversation import Conversation
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
_THINK, _END_OF_THINKING = "<think>", "</think>"


@dataclass(frozen=True)
class TrainedText:
    """The text of a conversation, or of its beginning, and the (start, end) characters that the loss is taken of."""

    text: str
    spans: tuple[Span, ...]


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

    def trained_texts(self, conversation: Conversation, train_on: TrainOn) -> list[TrainedText]:
        """Return the texts that a conversation is trained as: one, unless the template rewrites earlier answers.

        An answer is trained behind the prompt from which it would be generated: what the template marks with
        {% generation %}, else what the answer adds to that prompt, with the end of its turn. A text holds as many
        answers as its beginning allows: a template that drops earlier thinking gives a text for each answer. Answers of
        Conversation.prompt, and messages that their row says not to train, are left out. Raises DataError if an answer
        cannot be told from its prompt.
        """
        whole = self.render(conversation)
        if train_on == "all":
            return [TrainedText(whole, tuple(self._all_but_untrained(conversation, whole)))]
        places = self._trained_answers(conversation, train_on)
        if self._marks_answers:
            spans = self._marked_spans(conversation)
            return [TrainedText(whole, tuple(span for place in places for span in spans[place]))]
        return self._added(conversation, whole, places)

    def unused_keys(self, conversation: Conversation) -> list[list[str]]:
        """Return the keys of each message that the template does not read."""
        return [
            [key for key in message if key not in self._words and not self._reads(key, conversation)]
            for message in conversation.messages
        ]

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(["role", "content", *re.findall(r"\w+", self.text)])

    @cached_property
    def _read_keys(self) -> dict[str, bool]:
        return {}

    def _reads(self, key: str, conversation: Conversation) -> bool:
        """Return whether a key that the template does not name changes the first text with it, as by `tojson`."""
        if key not in self._read_keys:
            without = [
                {name: message[name] for name in message if name != key} for message in conversation.messages
            ]
            other = replace(conversation, messages=tuple(without))
            self._read_keys[key] = self.render(conversation) != self.render(other)
        return self._read_keys[key]

    def _trained_answers(self, conversation: Conversation, train_on: TrainOn) -> list[int]:
        """Return the numbers of the assistant messages to train. Raises DataError for another message to train."""
        messages, marks = conversation.messages, conversation.marks
        for place, trained in marks.items():
            if trained and messages[place]["role"] != "assistant":
                raise DataError(
                    f"{conversation.where}: messages[{place}], of {messages[place]['role']}, says to train on it "
                    f'(weight 1, train true), and data.train_on = "{train_on}" trains answers only; remove the key, '
                    'or set data.train_on = "all"'
                )
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = answers[-1:] if train_on == "last" else answers
        return [place for place in chosen if place >= conversation.prompt and marks.get(place, True)]

    def _all_but_untrained(self, conversation: Conversation, whole: str) -> Iterator[Span]:
        """Yield the spans of `whole` between the messages that their row says not to train. Raises DataError."""
        start = 0
        for place in sorted(place for place, trained in conversation.marks.items() if not trained):
            before = self.render(conversation, place) if place else ""
            until = self.render(conversation, place + 1)
            if not (whole.startswith(before) and whole.startswith(until) and len(before) <= len(until)):
                raise self._not_told(conversation, place, 'set data.train_on = "answers"')
            yield start, len(before)
            start = len(until)
        yield start, len(whole)

    @cached_property
    def _marks_answers(self) -> bool:
        return _GENERATION.search(self.text) is not None

    def _marked_spans(self, conversation: Conversation) -> dict[int, list[Span]]:
        """Return the spans that the template marks in each assistant message."""
        answers = [
            place for place, message in enumerate(conversation.messages) if message["role"] == "assistant"
        ]
        spans = self._render(conversation, None, False)[1]
        if len(spans) == len(answers):
            return {place: [span] for place, span in zip(answers, spans, strict=True)}
        # Several marks in a message: those that each message adds.
        counts = [0, *(len(self._render(conversation, place + 1, False)[1]) for place in answers)]
        if counts[-1] != len(spans) or sorted(counts) != counts:
            raise self._not_told(
                conversation, answers[0], 'mark each answer once, or set data.train_on = "all"'
            )
        parts = zip(answers, counts, counts[1:], strict=False)
        return {place: spans[first:last] for place, first, last in parts}

    def _added(self, conversation: Conversation, whole: str, places: Sequence[int]) -> list[TrainedText]:
        texts: list[TrainedText] = []
        for place in places:
            last = place + 1 == len(conversation.messages)
            written = whole if last else self.render(conversation, place + 1)
            text, start = self._answer(conversation, place, written)
            span = start, len(text)
            if texts and text.startswith(texts[-1].text) and start >= len(texts[-1].text):
                texts[-1] = TrainedText(text, (*texts[-1].spans, span))
            else:
                texts.append(TrainedText(text, (span,)))
        if texts and whole.startswith(texts[-1].text):
            texts[-1] = TrainedText(whole, texts[-1].spans)
        return texts or [TrainedText(whole, ())]

    def _answer(self, conversation: Conversation, place: int, written: str) -> tuple[str, int]:
        """Return the text up to an answer, and where the answer starts in it. written: the text as the template has it.

        DeepSeek-R1's template opens an answer's thinking in the prompt, and drops it from the text. The answer is then
        the message's own text behind the opening; an answer without thinking ends the empty thinking first.
        """
        prompt = self._prompt(conversation, place)
        if written.startswith(prompt) and len(prompt) < len(written):
            return written, len(prompt)
        opened = prompt.rstrip()
        before = opened.removesuffix(_THINK)
        if not written.startswith(before):
            before = before.rstrip()
        rest = written.removeprefix(before)
        content = str(conversation.messages[place]["content"] or "")
        thinking, mark, answer = content.rpartition(_END_OF_THINKING)
        shown, space = answer.strip(), rest[: len(rest) - len(rest.lstrip())]
        if (
            not (opened.endswith(_THINK) and written.startswith(before))
            or not shown
            or not rest.startswith(space + shown)
        ):
            raise self._not_told(
                conversation, place, 'mark the answers with {% generation %}, or set data.train_on = "all"'
            )
        if mark:
            if (begun := thinking.lstrip()).startswith(_THINK):
                opening = prompt[len(opened) - len(_THINK) :]
                thinking = begun.removeprefix(opening if begun.startswith(opening) else _THINK)
            thinking += mark + answer[: len(answer) - len(answer.lstrip())].removesuffix(space)
        else:
            thinking = f"{_END_OF_THINKING}\n\n"
        return prompt + thinking + rest, len(prompt)

    def _prompt(self, conversation: Conversation, place: int) -> str:
        """Return the text from which message `place` is generated."""
        try:
            return self.render(conversation, place, prompt=True)
        except DataError:
            if place:
                raise
            return ""  # many templates look at the first message

    def _not_told(self, conversation: Conversation, place: int, remedy: str) -> DataError:
        return DataError(
            f"{conversation.where}: the chat template {self.origin} writes messages[{place}] otherwise than its prompt "
            f"begins it, so the message cannot be told from the text; {remedy}"
        )

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
    templates: dict[str, str] = {}
    configured = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, Sequence):
        templates |= {each["name"]: each["template"] for each in configured if isinstance(each, Mapping)}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _text(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _text(file)
    return templates


def _special_tokens(folder: Path, end_of_document: str) -> dict[str, str]:
    """Return the special tokens that templates name."""
    tokens = {"bos_token": "", "eos_token": end_of_document}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, token in _json(folder / name).items():
            content = token.get("content") if isinstance(token, Mapping) else token
            if key in _SPECIAL and isinstance(content, str):
                tokens[key] = content
    return tokens


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
