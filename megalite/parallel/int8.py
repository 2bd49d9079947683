"""Linears with int8 weights, put in place of a model's column- and row-parallel ones and of its experts'.

For inference alone. Routers stay as they are: a few rounded scores would send tokens to other experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalite.ops.dropout import Mask
from megalite.ops.linear import int8_linear
from megalite.parallel.collectives import gather_sequence, row_output
from megalite.parallel.layers import ColumnParallelLinear, ExpertLinear, RowParallelLinear
from megalite.parallel.lora_bank import LoraBank, Selection


class Int8Weight(nn.Module):
    """This rank's shard of a weight [out, in] in int8. scale: float32 [rows of the shard, 1]."""

    weight: Tensor
    scale: Tensor

    def __init__(self, replaced: Tensor):
        super().__init__()
        self.register_buffer("weight", torch.empty(replaced.shape, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(replaced.shape[0], 1, dtype=torch.float32))


class Int8ExpertLinear(Int8Weight):
    """Y_e = X_e W_e^T of each expert e of this rank, as ExpertLinear; weight, scale: the experts' own, stacked."""

    def product(self, rows: Tensor, counts: Sequence[int], adapters: Selection | None = None) -> Tensor:
        """Map [R, in], sorted by expert, to [R, out]; an expert without rows costs nothing."""
        experts = (tensor.view(len(counts), -1, tensor.shape[1]) for tensor in (self.weight, self.scale))
        by_expert = zip(rows.split(list(counts)), *experts, strict=True)
        products = [int8_linear(own, weight, scale) for own, weight, scale in by_expert if len(own)]
        return torch.cat(products) if products else rows.new_empty(0, len(self.weight) // len(counts))


class Int8Linear(Int8Weight):
    """The weight [this rank's output features, this rank's input features] in int8, and its bias.

    scale: whole for a row-parallel weight.
    """

    def __init__(self, replaced: ColumnParallelLinear | RowParallelLinear):
        super().__init__(replaced.weight)
        self.mesh, self.bias = replaced.mesh, replaced.bias
        self.bank: LoraBank | None = None

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
    """Replace every column- and row-parallel linear and every expert's within `model`.

    The int8 weights are allocated, not filled.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ColumnParallelLinear):
                setattr(parent, name, Int8ColumnLinear(child))
            elif isinstance(child, RowParallelLinear):
                setattr(parent, name, Int8RowLinear(child))
            elif isinstance(child, ExpertLinear):
                if child.bias is not None:
                    raise AssertionError(
                        "experts with biases are refused before: their files have no int8 form"
                    )
                setattr(parent, name, Int8ExpertLinear(child.weight))
