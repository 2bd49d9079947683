"""Linears and embeddings split over the tensor-parallel axis (Shoeybi et al., "Megatron-LM", 2019, section 3).

Where the mesh splits the sequence (sequence parallelism), S / tp positions go in and come out: each rank's own.

Weights are allocated, not filled: model/stages.py fills them by name, so that every layout starts alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import column_input, row_output
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.layout import balanced_split


class ColumnParallelLinear(nn.Module):
    """Y = X W^T with the output features split over tp.

    weight: [this rank's output features, in_features], bias: [this rank's output features]; fused outputs
    (query-key-value, gate-up) are split part by part. X must be equal on every rank of tp, or split by positions;
    Y stays split, for a RowParallelLinear to consume.
    """

    def __init__(
        self,
        in_features: int,
        local_out_features: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype,
        bias: bool = False,
    ):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(torch.empty(local_out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(local_out_features, dtype=dtype)) if bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, S or S / tp, in] -> [B, S, out / tp]."""
        return F.linear(column_input(hidden_states, self.mesh), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Y = X W^T with the input features split over tp; the partial products are summed.

    Y is equal on every rank of tp, or split by positions.

    weight: [out_features, this rank's input features]; bias: [out_features], whole on every rank.
    """

    def __init__(
        self,
        local_in_features: int,
        out_features: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype,
        bias: bool = False,
    ):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(torch.empty(out_features, local_in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, S, in / tp] -> [B, S or S / tp, out]."""
        summed = row_output(F.linear(hidden_states, self.weight), self.mesh)
        # After the sum: every rank has the whole bias, and it counts once.
        return summed if self.bias is None else summed.add_(self.bias)


class VocabParallelEmbedding(nn.Module):
    """An embedding table with its rows (the vocabulary) split over tp, unevenly where it does not divide.

    weight: [this rank's rows, hidden_size]. Rows of other ranks count as zero, and the sum over tp restores them.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, mesh: ParallelMesh, dtype: torch.dtype):
        super().__init__()
        self.mesh = mesh
        self.rows = balanced_split(vocab_size, mesh.tp.size)[mesh.tp.rank]
        self.weight = nn.Parameter(torch.empty(len(self.rows), hidden_size, dtype=dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        """[B, S] -> [B, S or S / tp, hidden_size]."""
        if self.mesh.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.rows.start) | (input_ids >= self.rows.stop)
        local_ids = (input_ids - self.rows.start).masked_fill(elsewhere, 0)
        embedded = F.embedding(local_ids, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return row_output(embedded, self.mesh)
