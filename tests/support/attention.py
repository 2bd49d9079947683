"""Reference for packed attention: computes the whole score matrix of each sequence, with its mask from a formula."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.ops.counter import MASK_LEVELS, keep_probabilities
from megalite.ops.dropout import CountedMask
from megalite.ops.packed_attention import BlockPositions


class Packed(NamedTuple):
    """Sequences laid end to end: the numbers of queries and keys of each; left, right: the window (-1: no limit)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    left: int = -1
    right: int = 0
    heads: int = 2
    kv_heads: int = 1
    head_size: int = 64
    mask: CountedMask | None = None
    positions: BlockPositions | None = None

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        """Return query, key and value; views of one packed projection if there are as many queries as keys."""
        generator = torch.Generator().manual_seed(seed)
        counts = (self.heads, self.kv_heads, self.kv_heads)
        tokens = (sum(self.queries), sum(self.keys))
        if tokens[0] == tokens[1]:
            shape = (tokens[0], sum(counts), self.head_size)
            packed = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
            return [each.requires_grad_() for each in packed.split(counts, dim=1)]
        shapes = [(tokens[min(i, 1)], count, self.head_size) for i, count in enumerate(counts)]
        drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        return [each.to(dtype).requires_grad_() for each in drawn]

    def output_grads(self, dtype: torch.dtype, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of the output and of the log-sum-exps; 0 for log-sum-exps of queries that see no key."""
        generator = torch.Generator().manual_seed(17)
        shape = (sum(self.queries), self.heads, self.head_size)
        output = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        drawn = torch.randn(lse.shape, dtype=torch.float64, generator=generator).to(lse.dtype)
        return output, drawn.masked_fill(~torch.isfinite(lse), 0.0)

    def seen(self) -> list[Tensor]:
        """Return the visible band of each sequence, bool [queries, keys]."""
        bands = []
        for count, seen_count, (query, key) in zip(self.queries, self.keys, self._places(), strict=True):
            bands.append(
                band(range(query, query + count), range(key, key + seen_count), self.left, self.right)
            )
        return bands

    def _places(self) -> list[tuple[int, int]]:
        """Return the position of each sequence's first query and first key; without `positions` aligned at the ends."""
        if self.positions is None:
            return [
                (seen_count - count, 0) for count, seen_count in zip(self.queries, self.keys, strict=True)
            ]
        rows, first_query, first_key = self.positions
        lengths = [max(1, sum(counts) // rows) for counts in (self.queries, self.keys)]
        begins = zip(accumulate(self.queries, initial=0), accumulate(self.keys, initial=0), strict=True)
        return [(first_query + q % lengths[0], first_key + k % lengths[1]) for q, k in [*begins][:-1]]


def band(queries: range, keys: range, left: int, right: int) -> Tensor:
    """Return which keys the queries see, by their positions: bool [queries, keys]; left, right: -1 for no limit."""
    places = [torch.arange(each.start, each.stop) for each in (queries, keys)]
    distance = places[1] - places[0].unsqueeze(1)
    mask = torch.ones(distance.shape, dtype=torch.bool)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def starts(lengths: Sequence[int]) -> Tensor:
    """Return the cu_seqlens [n + 1] int32 of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def counted_mask(rows: int, heads: int, dropped: int = MASK_LEVELS // 4) -> CountedMask:
    """Return a mask for `rows` rows whose first head is the model's head 5 and whose samples exceed 32 bits."""
    return CountedMask(
        (0xFEDCBA98, 0x89ABCDEF), torch.arange(rows) * 3 + 2**33 + 5, range(5, 5 + heads), dropped
    )


def kept_factors(packed: Packed) -> list[Tensor | None]:
    """Return each sequence's dropout factors [heads, queries, keys], 0 or 1 / P(keep); None without a mask."""
    mask = packed.mask
    if mask is None:
        return [None] * len(packed.queries)
    rows, queries, keys = len(mask.sample_indices), sum(packed.queries), sum(packed.keys)
    length, seen_length = queries // rows, keys // rows
    _, first, begin = packed.positions or (rows, seen_length - length, 0)
    places = range(first, first + length), range(begin, begin + seen_length + max(packed.keys))
    kept = keep_probabilities(mask.key, mask.sample_indices, mask.heads, *places, dropped=mask.dropped)
    by_token = kept.transpose(1, 2).flatten(0, 1)  # [queries, heads, places]
    scale, factors = MASK_LEVELS / (MASK_LEVELS - mask.dropped), []
    first_query = first_key = 0
    for count, seen_count in zip(packed.queries, packed.keys, strict=True):
        place = first_key % seen_length if seen_length else 0
        own = by_token[first_query : first_query + count, :, place : place + seen_count]
        factors.append(own.transpose(0, 1).double() * scale)
        first_query, first_key = first_query + count, first_key + seen_count
    return factors


def attention(packed: Packed, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exps [heads, tokens] by plain torch in the inputs' dtype; softmax at least in fp32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = packed.heads // packed.kv_heads
    outputs, sums = [], []
    pieces = zip(query.split(packed.queries), key.split(packed.keys), value.split(packed.keys), strict=True)
    for piece, factors, mask in zip(pieces, kept_factors(packed), packed.seen(), strict=True):
        q, k, v = (each.transpose(0, 1) for each in piece)
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        scores = torch.matmul(q, k.transpose(1, 2)).to(wide) * packed.scale
        scores = scores.masked_fill(~mask, float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        # Queries that see no key give 0 and have no gradient.
        base = torch.where(mask.any(dim=1), lse, torch.zeros_like(lse)).unsqueeze(-1)
        probabilities = torch.exp(torch.where(mask, scores - base, torch.full_like(scores, float("-inf"))))
        if factors is not None:
            probabilities = probabilities * factors.to(wide)
        outputs.append(torch.matmul(probabilities.to(query.dtype), v).transpose(0, 1))
        sums.append(lse)
    return torch.cat(outputs), torch.cat(sums, dim=1)


def gradients(
    packed: Packed, inputs: Sequence[Tensor], output_grad: Tensor, lse_grad: Tensor
) -> list[Tensor]:
    """Return the gradients of query, key and value by plain torch, in the dtype of `inputs`."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    output, lse = attention(packed, *leaves)
    finite = torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))
    sent = [output_grad.to(output.dtype), lse_grad.to(lse.dtype)]
    return list(torch.autograd.grad([output, finite], leaves, sent))


class WaitsRefused(TorchDispatchMode):
    """Refuses operators that would make the host wait for a "meta" device, and operators that repeat keys."""

    _WAITING = ("_local_scalar_dense", "nonzero", "item", "masked_select", "_unique2", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket._qualified_op_name.split("::")[1]
        on_device = any(each.device.type == "meta" for each in tree_leaves(args) if isinstance(each, Tensor))
        assert not (on_device and name in self._WAITING), f"{name} has the host wait, or repeats"
        output = func(*args, **kwargs or {})
        self.names.add(name)
        for each in () if func.is_view else tree_leaves(output):
            if isinstance(each, Tensor) and each.device.type == "meta":
                self.created(name, each)
        return output

    def created(self, name: str, tensor: Tensor) -> None:
        """Check the memory that an operator allocated."""
