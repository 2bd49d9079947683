"""Turns texts into the tokens and windows to score, as lm_eval does."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megalite.data.tokenizers.tokenizer import Tokenizer, start_token_id
from megalite.evaluate.windows import Window, rolling_windows


@dataclass(frozen=True)
class TextEncoder:
    """Encodes prompts.

    adds_start: whether the tokenizer's special tokens are added, to texts that do not spell the start token; None: yes.
    """

    tokenizer: Tokenizer
    adds_start: bool | None = None

    @cached_property
    def start_id(self) -> int:
        """The token in front of a text whose first token is to be predicted."""
        return start_token_id(self.tokenizer)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a prompt, without the end token that some tokenizers add."""
        spelled = text.startswith(str(self.tokenizer.backend.id_to_token(self.start_id)))
        if spelled or self.adds_start is False:
            return self.tokenizer.encode(text)
        ids: list[int] = self.tokenizer.backend.encode(text).ids
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.end_of_document_id else ids

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of its continuation, which together are those of the whole text.

        Spaces at the end of the context go to the continuation, which is encoded alone where one token would hold it
        with the end of the context. Without a context the start token stands before.
        """
        bare = context.rstrip()
        if not bare:
            ids = self.tokenizer.encode(context + continuation)
            return (ids[:1], ids[1:]) if ids[:1] == [self.start_id] else ([self.start_id], ids)
        whole, alone = self.ids(context + continuation), self.ids(bare)
        # Otherwise nothing of the continuation would be scored, which would be the best of all scores.
        if len(whole) <= len(alone):
            return alone, self.tokenizer.encode((context + continuation)[len(bare) :])
        return whole[: len(alone)], whole[len(alone) :]


def pair_windows(context: list[int], continuation: list[int], length: int) -> list[Window]:
    """Return the window that scores the continuation after as much context as `length` inputs leave room for.

    Several that do not overlap, and together score each of its tokens once, where it has more than `length`.
    """
    if len(continuation) > length:
        ids = np.array(continuation, dtype=np.int64)
        return list(rolling_windows(ids, length=length, stride=length, prefix=context[-1]))
    ids = np.array([*context, *continuation][-(length + 1) :], dtype=np.int64)
    return [Window(ids[:-1], ids[len(ids) - len(continuation) :])]
