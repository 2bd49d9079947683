"""Embeddings of texts: the hidden state of the last token after the final norm, of length 1. No other pooling."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from megalite.generation.slots import Running
from megalite.parallel.host_copies import on_device


def width_with_embeddings(width: int, rows: Sequence[Running], hidden_size: int) -> int:
    """Return the number of columns of `with_embeddings`. width: without embeddings."""
    return max(width, hidden_size) if any(row.request.embeds for row in rows) else width


def with_embeddings(values: Tensor, hidden_states: Tensor, rows: Sequence[Running]) -> Tensor:
    """Return values [R, C] of `sampled_rows`, in which a row that embeds has its embedding [H] instead, then zeros.

    hidden_states: [R, H] after the final norm.
    """
    padded = pad(values, (0, max(0, hidden_states.shape[1] - values.shape[1])))
    [places] = on_device([torch.tensor([row.request.embeds for row in rows])], values.device)
    # Not in bfloat16, whose sum of squares is off by a hundredth.
    vectors = normalize(hidden_states.float(), dim=-1).to(padded.dtype)
    # No masked copy: it would wait for the device.
    return torch.where(places[:, None], pad(vectors, (0, padded.shape[1] - vectors.shape[1])), padded)
