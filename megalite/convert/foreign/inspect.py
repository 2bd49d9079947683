"""The lines of `megalite convert inspect` on the tensors of another program's checkpoint."""

from collections.abc import Iterator, Mapping, Sequence

import torch


def tensor_lines(entries: Mapping[str, tuple[Sequence[int], torch.dtype | str]]) -> Iterator[str]:
    """Yield name, shape and dtype of each tensor, aligned. entries: name -> shape, and its dtype or another text."""
    width = max(map(len, entries), default=0)
    for name, (shape, kind) in entries.items():
        size = " x ".join(map(str, shape))
        yield f"  {name:<{width}}  {size:>16}  {str(kind).removeprefix('torch.')}"
