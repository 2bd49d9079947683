"""Rotary position embedding (Su et al., "RoFormer", 2021), in the half-split form of Llama."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rotary_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """Radians a position of each pair: [head_dim / 2], float64.

    scaling: the fields of topology.parameters.RopeScaling; None leaves the frequencies as they are.
    """
    frequencies: Tensor = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequencies
    slow = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    # How many whole turns the original length held: few, and a frequency is slowed; many, and it stays.
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return slow + (frequencies - slow) * kept


def rotary_table(positions: int, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position: two tensors [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _SplitAndRotate(torch.autograd.Function):
    """One node for query, key and value: their gradients are written straight into the packed one."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, key_value_heads: int, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cosines, sines)
        ctx.heads = (heads, key_value_heads, key_value_heads)
        rotated = torch.empty_like(qkv)
        query, key, value = rotated.split(ctx.heads, dim=2)
        turning = heads + key_value_heads
        _rotate(qkv[:, :, :turning], cosines, sines, out=rotated[:, :, :turning])
        value.copy_(qkv[:, :, turning:])
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cosines, sines = ctx.saved_tensors
        batch, sequence, _, head_dim = grads[0].shape
        packed = grads[0].new_empty(batch, sequence, sum(ctx.heads), head_dim)
        query_grad, key_grad, value_grad = packed.split(ctx.heads, dim=2)
        # A rotation's transpose is the rotation by the opposite angle.
        _rotate(grads[0], cosines, -sines, out=query_grad)
        _rotate(grads[1], cosines, -sines, out=key_grad)
        value_grad.copy_(grads[2])
        return packed, None, None, None, None


def split_and_rotate(
    qkv: Tensor, heads: int, key_value_heads: int, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value from their packed projection, query and key rotated by their positions' angles.

    qkv: [B, S, heads + 2 key_value_heads, head_dim]; cosines, sines: [B or 1, S, 1, head_dim / 2], same dtype.
    Dimension i of a head is paired with i + head_dim / 2. Returns [B, S, heads, head_dim] and twice
    [B, S, key_value_heads, head_dim].
    """
    if torch.compiler.is_compiling():  # which fuses what it sees, and sees no further than a node of ours
        query, key, value = qkv.split((heads, key_value_heads, key_value_heads), dim=2)
        return _rotated(query, cosines, sines), _rotated(key, cosines, sines), value
    query, key, value = _SplitAndRotate.apply(qkv, heads, key_value_heads, cosines, sines)
    return query, key, value


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        rotated = torch.empty_like(heads)
        _rotate(heads, cosines, sines, out=rotated)
        return rotated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        turned_back = torch.empty_like(grad)
        _rotate(grad, cosines, -sines, out=turned_back)
        return turned_back, None, None


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[B, S, heads, head_dim] -> the same, rotated; for heads that something happens to before the rotation."""
    if torch.compiler.is_compiling():
        return _rotated(heads, cosines, sines)
    rotated: Tensor = _Rotate.apply(heads, cosines, sines)
    return rotated


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor, *, out: Tensor) -> None:
    first, second = heads.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cosines, out=out_first)
    out_first.addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=out_second)
    out_second.addcmul_(first, sines)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
