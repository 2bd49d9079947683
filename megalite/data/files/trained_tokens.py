"""Marks in a token file which tokens the loss is taken of: a trained token is its id, another one is -1 - id.

One file holds both, so that they cannot come apart. The ids are int32, whatever the vocabulary.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPE = np.dtype(np.int32)


def marked(ids: NDArray[Any], trained: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the tokens of a file for ids and whether each is trained."""
    return np.where(trained, ids, -1 - ids).astype(DTYPE)


def ids_of(tokens: NDArray[Any]) -> NDArray[Any]:
    """Return the ids of marked tokens."""
    return np.where(tokens < 0, -1 - tokens, tokens)


def is_trained(tokens: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each marked token is trained."""
    return tokens >= 0
