"""Linears with int8 weights, put in place of a model's column- and row-parallel ones. For inference alone."""

import torch
from torch import Tensor, nn

from megalite.ops.dropout import Mask
from megalite.ops.linear import int8_linear
from megalite.parallel.collectives import gather_sequence, row_output
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.lora_bank import LoraBank, Selection


class Int8Linear(nn.Module):
    """The weight [this rank's output features, this rank's input features] in int8, and its bias.

    scale: float32 [this rank's output features, 1]; whole for a row-parallel weight.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, replaced: ColumnParallelLinear | RowParallelLinear):
        super().__init__()
        self.mesh, self.bias = replaced.mesh, replaced.bias
        self.bank: LoraBank | None = None
        self.register_buffer("weight", torch.empty(replaced.weight.shape, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(replaced.weight.shape[0], 1, dtype=torch.float32))

    def product(self, inputs: Tensor, adapters: Selection | None) -> Tensor:
        """Return X W^T of this rank's X and W, with that of the tokens' adapters in the bank."""
        product = int8_linear(inputs, self.weight, self.scale)
        if self.bank is None or adapters is None:
            return product
        return self.bank.add_to(product, inputs, adapters)


class Int8ColumnLinear(Int8Linear):
    """Y = X W^T with the output features split over tp, as ColumnParallelLinear."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Mask | None = None,
        adapters: Selection | None = None,
        *,
        with_bias: bool = True,
    ) -> Tensor:
        """Map [B, S or S / tp, in] to [B, S, out / tp]. with_bias: False if the caller adds the bias."""
        inputs = gather_sequence(hidden_states, self.mesh.tp) if self.mesh.splits_sequence else hidden_states
        product = self.product(inputs, adapters)
        return product if self.bias is None or not with_bias else product.add_(self.bias)


class Int8RowLinear(Int8Linear):
    """Y = X W^T with the input features split over tp, as RowParallelLinear."""

    def forward(
        self, hidden_states: Tensor, mask: Mask | None = None, adapters: Selection | None = None
    ) -> Tensor:
        """Map [B, S, in / tp] to [B, S or S / tp, out]."""
        summed = row_output(self.product(hidden_states, adapters), self.mesh)
        return summed if self.bias is None else summed.add_(self.bias)


def hold_int8(model: nn.Module) -> None:
    """Replace every column- and row-parallel linear within `model`; the int8 weights are allocated, not filled."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ColumnParallelLinear):
                setattr(parent, name, Int8ColumnLinear(child))
            elif isinstance(child, RowParallelLinear):
                setattr(parent, name, Int8RowLinear(child))
