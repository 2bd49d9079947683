"""Prefix tuning: trained keys and values in front of the tokens' own (Li and Liang, "Prefix-tuning", 2021).

As in PEFT: with a projection an MLP, embedding -> linear -> tanh -> linear, computes the keys and values of all layers.
Each layer holds its rows of the second linear; everything before is the trunk, one a stage.
"""

import torch
from torch import Tensor, nn

from megalite.model.options import ModelOptions
from megalite.parallel.gradient_sums import linear
from megalite.topology.adapter import Prefix
from megalite.topology.shape import ModelShape


class PrefixTrunk(nn.Module):
    """The part of a projected prefix that all layers have in common; each stage has a copy of it.

    embedding: [tokens, key-value width of the model]; hidden: the first linear, to `projection` values.
    """

    def __init__(self, tokens: int, width: int, projection: int, options: ModelOptions):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(tokens, width, dtype=options.dtype))
        self.hidden = _Linear(projection, width, options)

    def forward(self) -> Tensor:
        """Return the hidden values of the virtual tokens: [tokens, projection]."""
        hidden: Tensor = self.hidden(self.embedding)
        return hidden.tanh()


class _Linear(nn.Module):
    """A linear without initial values, whose weight gradient a schedule may compute at another time."""

    def __init__(self, rows: int, columns: int, options: ModelOptions):
        super().__init__()
        self.gradients = options.weight_gradients
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=options.dtype))
        self.bias = nn.Parameter(torch.empty(rows, dtype=options.dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., columns] -> [..., rows]."""
        return linear(inputs, self.weight, self.bias, self.gradients)


def build_trunk(shape: ModelShape, options: ModelOptions) -> PrefixTrunk | None:
    """Return the trunk of the model's prefix; None if it has no projected prefix."""
    prefix = shape.adapter
    if not isinstance(prefix, Prefix) or prefix.projection is None:
        return None
    return PrefixTrunk(prefix.tokens, shape.num_key_value_heads * shape.head_dim, prefix.projection, options)


class LayerPrefix(nn.Module):
    """The keys and values of one layer's virtual tokens, of this rank's key-value heads.

    weight: [2 * heads * head_dim, tokens], the keys over the values; with a projection [2 * heads * head_dim,
    projection] and bias [2 * heads * head_dim], which map the trunk's values to them.
    """

    def __init__(self, prefix: Prefix, heads: int, head_dim: int, options: ModelOptions):
        super().__init__()
        self.heads, self.head_dim, self.gradients = heads, head_dim, options.weight_gradients
        rows, projected = 2 * heads * head_dim, prefix.projection is not None
        columns = prefix.tokens if prefix.projection is None else prefix.projection
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=options.dtype))
        self.bias = nn.Parameter(torch.empty(rows, dtype=options.dtype)) if projected else None

    def forward(self, hidden: Tensor | None) -> Tensor:
        """Return keys and values, [tokens, 2, heads of this rank, head_dim]; hidden: the trunk's output, if any."""
        values = self.weight.t()
        if hidden is not None:
            values = linear(hidden, self.weight, self.bias, self.gradients)
        return values.unflatten(-1, (2, self.heads, self.head_dim))


def in_front(prefix: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value [B, S, heads, head_dim] behind those of the virtual tokens: [B, tokens + S, ...]."""
    keys, values = prefix.unsqueeze(0).expand(len(key), -1, -1, -1, -1).unbind(2)
    return torch.cat((keys, key), dim=1), torch.cat((values, value), dim=1)
