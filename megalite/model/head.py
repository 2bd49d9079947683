"""The output projection."""

import torch
from torch import nn


class Head(nn.Module):
    """The untied output projection: the rows of the vocabulary that this rank holds."""

    def __init__(self, rows: int, hidden_size: int, *, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=dtype))
