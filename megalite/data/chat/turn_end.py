"""How a chat template ends an answer: with a token, with text that the tokenizer spells in pieces, or with nothing."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalite.config.sections.toml import shown
from megalite.data.chat.chat_template import BUILT_IN, ChatTemplate
from megalite.data.chat.conversation import Conversation
from megalite.data.files.workers import ordered_map
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.errors import DataError

_ANSWER = "answer"
_TURNS = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER})
# Templates take a system message or refuse it; some ask for one.
_PROBES = (_TURNS, ({"role": "system", "content": "system"}, *_TURNS))
# The marks that templates write around turns: <|im_end|>, </s>, [INST].
_MARK = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\]")


@dataclass(frozen=True)
class TurnEnd:
    """The end of an answer.

    ids: its token. text: what ends it where no token does. in_pieces: marks of the template that the tokenizer has no
    token for. trained: whether an answer is trained with its end.
    """

    ids: frozenset[int] = frozenset()
    text: str = ""
    in_pieces: tuple[str, ...] = ()
    trained: bool = True


def marks_in_pieces(template: ChatTemplate, tokenizer: Tokenizer) -> bool:
    """Return whether the template's source has a mark without a token, so that `turn_end` may find a text."""
    return any(_token(mark, tokenizer) is None for mark in _MARK.findall(template.text))


def turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> TurnEnd:
    """Return how the template ends the answer of a short conversation; nothing if it takes none."""
    for messages in _PROBES:
        probe = Conversation(messages, "a conversation of two messages")
        try:
            [written] = template.trained_texts(probe, "answers")
        except DataError:
            continue
        text = written.text
        start = text.rfind(_ANSWER) + len(_ANSWER)
        behind = text[start:]
        end = start + len(behind.rstrip())
        trained = bool(written.spans) and written.spans[-1][1] >= end
        in_pieces = [mark for mark in _MARK.findall(text) if _token(mark, tokenizer) is None]
        token = _first_token(behind, tokenizer)
        if token is not None:
            return TurnEnd(frozenset([token]), "", tuple(dict.fromkeys(in_pieces)), trained)
        mark = _MARK.match(behind.lstrip())
        return TurnEnd(
            frozenset(), mark.group() if mark else behind.strip(), tuple(dict.fromkeys(in_pieces)), trained
        )
    return TurnEnd()


def _first_token(behind: str, tokenizer: Tokenizer) -> int | None:
    """Return the added token, or the token of a whole mark, that stands first in a text, white space aside."""
    encoding = tokenizer.backend.encode(behind, add_special_tokens=False)
    added = tokenizer.backend.get_added_tokens_decoder()
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if token in added:
            return int(token)
        if behind[start:end].strip():
            break
    mark = _MARK.match(behind.lstrip())
    return None if mark is None else _token(mark.group(), tokenizer)


def _token(mark: str, tokenizer: Tokenizer) -> int | None:
    """Return the one token of a mark."""
    ids = tokenizer.encode(mark)
    return ids[0] if len(ids) == 1 else None


def turn_end_notes(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    may_add_tokens: bool,
    flags: bool = False,
    workers: int = 1,
) -> Iterator[str]:
    """Yield what to say of the end of answers before training on them.

    may_add_tokens: whether the run can add tokens to its tokenizer. flags: write the remedy as flags of data prepare.
    workers: processes to render the template in, which imports transformers; 0: this one.
    """
    marks_answers = "generation" in template.text and template.text not in BUILT_IN.values()
    if not marks_answers and not marks_in_pieces(template, tokenizer):
        return
    task = tokenizer.file, tokenizer.end_of_document, template
    for end in ordered_map(_probed, [task], workers=workers):
        if not end.ids and end.in_pieces:
            tokens = " ".join(map(shlex.quote, end.in_pieces)) if flags else shown(list(end.in_pieces))
            add = f"--add-tokens {tokens}" if flags else f"tokenizer.add_tokens = {tokens}"
            plain = "--chat-template plain" if flags else 'tokenizer.chat_template = "plain"'
            yield (
                f"data: the tokenizer spells {', '.join(end.in_pieces)} of the chat template {template.origin} in "
                "pieces, so answers end in text, at which other programs do not stop: "
                f"{f'{add} gives them tokens' if may_add_tokens else f'{plain} ends answers in a token'}"
            )
        elif not end.trained:
            yield (
                f"data: the chat template {template.origin} leaves the end of an answer out of {{% generation %}}, so "
                "the model does not learn to stop: move {% endgeneration %} behind it"
            )


def _probed(task: tuple[Path, str, ChatTemplate]) -> TurnEnd:
    file, end_of_document, template = task
    return turn_end(template, load_tokenizer(file, end_of_document=end_of_document))
