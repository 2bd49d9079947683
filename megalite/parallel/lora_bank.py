"""Several low-rank adapters beside one linear: each token of a forward has its own, or none. For inference alone.

Chen et al., "Punica", 2023: requests with different adapters share the product with the linear's own weight.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megalite.parallel.device import CPU
from megalite.parallel.gradient_sums import linear
from megalite.parallel.host_copies import on_device


class Selection:
    """The adapter of each token of one forward.

    numbers: of the adapters, from the lowest to the highest that a token has; empty: no token has one.
    """

    def __init__(self, tokens: Sequence[int | None] = (), device: torch.device | None = None):
        """tokens: the adapter's number of each of the T tokens, None for no adapter."""
        of_tokens = [-1 if number is None else number for number in tokens]
        chosen = set(of_tokens) - {-1}
        self.numbers = range(min(chosen), max(chosen) + 1) if chosen else range(0)
        mixed = chosen and len(set(of_tokens)) > 1
        self._of_tokens = on_device([torch.tensor(of_tokens)], device or CPU)[0] if mixed else None
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def mask(self, widths: tuple[int, ...], owners: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return [T, columns of `numbers`]: 1 in the columns of a token's own adapter, else 0; None: all are 1.

        widths: the number of columns of each adapter. owners: the adapter of each of the columns of `numbers`.
        """
        if self._of_tokens is None:
            return None
        if widths not in self._masks:
            self._masks[widths] = (self._of_tokens.unsqueeze(1) == owners).to(dtype)
        return self._masks[widths]


NO_ADAPTER = Selection()


class LoraBank:
    """The adapters of one column- or row-parallel linear on this rank.

    A [columns, inputs here] and B^T [columns, outputs here], scaled. widths: the columns of each adapter, side by side,
    0 where it does not adapt this linear.
    """

    def __init__(
        self,
        widths: Sequence[int],
        inputs: int,
        outputs: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._widths = tuple(widths)
        self._ends = (0, *accumulate(widths))
        # Here, because a copy within a forward would have the host wait for the device.
        self._owners = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths)).to(device)
        self._a = torch.zeros(self._ends[-1], inputs, dtype=dtype, device=device)
        self._b = torch.zeros(self._ends[-1], outputs, dtype=dtype, device=device)

    def fill(self, number: int, a: Tensor, b: Tensor) -> None:
        """Set an adapter's A [width, inputs here] and scaled B [outputs here, width]."""
        columns = self._columns(range(number, number + 1))
        self._a[columns].copy_(a)
        self._b[columns].copy_(b.t())

    def add_to(self, output: Tensor, inputs: Tensor, selection: Selection) -> Tensor:
        """Add B A x of each token's own adapter to the linear's product [1, T, outputs here], in place.

        inputs: [1, T, inputs here]. Returns the sum, in the product's memory.
        """
        columns = self._columns(selection.numbers)
        if columns.start == columns.stop:
            return output
        low = linear(inputs, self._a[columns]).flatten(0, -2)
        mask = selection.mask(self._widths, self._owners[columns], low.dtype)
        if mask is not None:
            low *= mask
        return output.flatten(0, -2).addmm_(low, self._b[columns]).view(output.shape)

    def _columns(self, numbers: range) -> slice:
        return slice(self._ends[numbers.start], self._ends[numbers.stop])
