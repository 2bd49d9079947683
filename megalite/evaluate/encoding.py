"""Turns a context and its continuation into a window to score, as lm_eval does."""

import numpy as np

from megalite.data.tokenizer import Tokenizer, start_token_id
from megalite.evaluate.windows import Window


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a prompt as transformers does: with the tokenizer's start token, without its end token."""
    ids: list[int] = tokenizer.backend.encode(text).ids
    return ids[:-1] if ids[-1:] == [tokenizer.end_of_document_id] else ids


def pair_ids(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the ids of a context and of its continuation, which belong to the ids of both together.

    Spaces at the end of the context go to the continuation. Without a context the start token stands before.
    """
    if not context:
        ids = prompt_ids(tokenizer, continuation)
        start = start_token_id(tokenizer)
        return ([start], ids) if ids[:1] != [start] else (ids[:1], ids[1:])
    bare = context.rstrip()
    whole = prompt_ids(tokenizer, context + continuation)
    first = len(prompt_ids(tokenizer, bare))
    return whole[:first], whole[first:]


def pair_window(context: list[int], continuation: list[int], length: int) -> Window:
    """Return the window that scores the continuation after as much context as `length` inputs leave room for."""
    ids = np.array([*context, *continuation][-(length + 1) :], dtype=np.int64)
    targets = min(len(continuation), length)
    return Window(ids[:-1], ids[len(ids) - targets :])
