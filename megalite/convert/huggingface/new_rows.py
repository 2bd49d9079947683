"""Rows of the vocabulary for tokens that a run adds to the tokenizer of its weights."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor

from megalite.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class NewRows:
    """The rows that begin as the mean of others (Hewitt, "Initializing New Word Embeddings for Pretrained Language
    Models", 2021).

    added: ids of the new tokens, which may lie in the files' padding. used: ids of the tokens that the weights were
    trained with, whose rows the mean is of: padding has none. Rows that the files lack are new too.
    """

    added: frozenset[int]
    used: frozenset[int]

    def used_in(self, start: int, count: int) -> Tensor:
        """Return which of `count` rows from `start` on the mean is of: bool [count]."""
        return torch.tensor([start + row in self.used for row in range(count)])

    def added_in(self, start: int, count: int) -> list[int]:
        """Return the new rows among `count` rows from `start` on, counted from there."""
        return sorted(row - start for row in self.added if start <= row < start + count)


def new_rows(tokenizer: Tokenizer, add_tokens: Sequence[str], sources: Collection[Path]) -> NewRows | None:
    """Return the new rows of a run that adds tokens; None if it adds none.

    sources: folders of which the first with a tokenizer.json has the tokenizer of the weights. Raises DataError.
    """
    if not add_tokens:
        return None
    files = (place if place.is_file() else place / "tokenizer.json" for place in sources)
    file = next((each for each in files if each.name == "tokenizer.json" and each.is_file()), None)
    # Without one, tokens of a vocabulary that was converted are the model's own, not added ones.
    backend, added_too = (tokenizer.backend, False) if file is None else (Backend.from_file(str(file)), True)
    known = backend.get_vocab(with_added_tokens=added_too)
    ids = tokenizer.backend.get_vocab(with_added_tokens=True)
    added = frozenset(ids[token] for token in add_tokens if token not in known)
    used = frozenset(ids.values()) - added
    return NewRows(added, used)
