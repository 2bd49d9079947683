"""Rotary position embedding (Su et al., "RoFormer", 2021), in Llama's half-split and the interleaved layout.

Each function has two forms: plain torch, and the compiled operators of csrc/rotary.h, for rotary_dim = head_dim only.
rotary_dim, the number of values of a head that are rotated, is twice the last dim of the angles.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.ops import extension


def rotary_frequencies(head_dim: int, theta: float | Tensor) -> Tensor:
    """Return the unscaled frequency of each pair in radians per position: [head_dim / 2], float64.

    theta: one base, or float64 [..., 1], for frequencies [..., head_dim / 2].
    """
    device = theta.device if isinstance(theta, Tensor) else None
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    frequencies: Tensor = theta**-exponents
    return frequencies


def rotary_table(positions: int, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position: two tensors [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Rotation(NamedTuple):
    """The rotation of a micro batch's positions.

    cosines, sines: [B or 1, S, 1, rotary_dim / 2], of the heads' dtype; with position_ids [B or 1, S] tables of all
    positions [positions, rotary_dim / 2]. Value i of a head is paired with i + rotary_dim / 2; if interleaved, 2 i with
    2 i + 1.
    """

    cosines: Tensor
    sines: Tensor
    position_ids: Tensor | None = None
    interleaved: bool = False

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions."""
        if self.position_ids is None:
            return self.cosines, self.sines
        return self.cosines[self.position_ids].unsqueeze(2), self.sines[self.position_ids].unsqueeze(2)


def split_and_rotate(
    qkv: Tensor, heads: int, key_value_heads: int, rotation: Rotation, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the packed projection into query, key and value, and rotate query and key by their positions' angles.

    qkv: [B, S, heads + 2 key_value_heads, head_dim]. overwrite: allows in-place results in qkv's memory; the plain form
    ignores it. Returns [B, S, heads, head_dim] and twice [B, S, key_value_heads, head_dim].
    """
    parts = (heads, key_value_heads, key_value_heads)
    query: Tensor
    cosines, sines = rotation.angles()
    if torch.compiler.is_compiling():  # torch.compile cannot fuse across a custom autograd node
        query, key, value = qkv.split(parts, dim=2)
        query, key = (_rotated(each, cosines, sines, rotation.interleaved) for each in (query, key))
        return query, key, value
    query, key, value = _SplitAndRotate.apply(qkv, parts, cosines, sines, rotation.interleaved)
    return query, key, value


def compiled_split_and_rotate(
    qkv: Tensor, heads: int, key_value_heads: int, rotation: Rotation, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `split_and_rotate`, compiled for rotary_dim = head_dim.

    overwrite: rotate in place if no gradient is recorded.
    """
    if 2 * rotation.cosines.shape[-1] < qkv.shape[-1]:
        return split_and_rotate(qkv, heads, key_value_heads, rotation, overwrite=overwrite)
    query: Tensor
    if overwrite and not torch.is_grad_enabled():
        turning = qkv[:, :, : heads + key_value_heads]
        torch.ops.megalite.rotary_(turning, *rotation)
        query, key, value = qkv.split((heads, key_value_heads, key_value_heads), dim=2)
        return query, key, value
    query, key, value = _rotary_split(qkv, heads, key_value_heads, *rotation)
    return query, key, value


def rotate(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Rotate query [B, S, heads, head_dim] and key [B, S, key_value_heads, head_dim], already split.

    For models that change the heads before the rotation, e.g. normalise them.
    """
    turned: Tensor
    cosines, sines = rotation.angles()
    run = _rotated if torch.compiler.is_compiling() else _Rotate.apply
    turned, turned_key = (run(each, cosines, sines, rotation.interleaved) for each in (query, key))
    return turned, turned_key


def compiled_rotate(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Same as `rotate`, compiled for rotary_dim = head_dim."""
    if 2 * rotation.cosines.shape[-1] < query.shape[-1]:
        return rotate(query, key, rotation)
    turned: Tensor
    turned, turned_key = rotated_pair(query, key, *rotation, False)
    return turned, turned_key


class Rotary(NamedTuple):
    """One implementation: `split_and_rotate` and `rotate`."""

    split_and_rotate: Callable[..., tuple[Tensor, Tensor, Tensor]]
    rotate: Callable[..., tuple[Tensor, Tensor]]


TORCH_ROTARY = Rotary(split_and_rotate, rotate)
COMPILED_ROTARY = Rotary(compiled_split_and_rotate, compiled_rotate)


class _SplitAndRotate(torch.autograd.Function):
    """One autograd node for query, key and value: their gradients are written straight into the packed gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: tuple[int, int, int],
        cosines: Tensor,
        sines: Tensor,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cosines, sines)
        ctx.heads, ctx.interleaved = heads, interleaved
        rotated = torch.empty_like(qkv)
        query, key, value = rotated.split(heads, dim=2)
        turning = heads[0] + heads[1]
        _rotate(qkv[:, :, :turning], cosines, sines, interleaved, out=rotated[:, :, :turning])
        value.copy_(qkv[:, :, turning:])
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        batch, sequence, _, head_dim = grads[0].shape
        packed = grads[0].new_empty(batch, sequence, sum(ctx.heads), head_dim)
        query_grad, key_grad, value_grad = packed.split(ctx.heads, dim=2)
        # A rotation's transpose is the rotation by the opposite angle.
        _rotate(grads[0], cosines, -sines, ctx.interleaved, out=query_grad)
        _rotate(grads[1], cosines, -sines, ctx.interleaved, out=key_grad)
        value_grad.copy_(grads[2])
        return packed, None, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.interleaved = interleaved
        rotated = torch.empty_like(heads)
        _rotate(heads, cosines, sines, interleaved, out=rotated)
        return rotated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cosines, sines = ctx.saved_tensors
        turned_back = torch.empty_like(grad)
        _rotate(grad, cosines, -sines, ctx.interleaved, out=turned_back)
        return turned_back, None, None, None


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool, *, out: Tensor) -> None:
    rotary_dim = 2 * cosines.shape[-1]
    if rotary_dim < heads.shape[-1]:
        out[..., rotary_dim:].copy_(heads[..., rotary_dim:])
        heads, out = heads[..., :rotary_dim], out[..., :rotary_dim]
    first, second = _pairs(heads, interleaved)
    out_first, out_second = _pairs(out, interleaved)
    torch.mul(first, cosines, out=out_first)
    out_first.addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=out_second)
    out_second.addcmul_(first, sines)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    turning, unturned = heads.tensor_split((2 * cosines.shape[-1],), dim=-1)
    first, second = _pairs(turning, interleaved)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    if interleaved:
        return torch.cat((torch.stack(turned, dim=-1).flatten(-2), unturned), dim=-1)
    return torch.cat((*turned, unturned), dim=-1)


def _pairs(heads: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second values of all pairs: views [..., rotary_dim / 2]."""
    if interleaved:
        return heads[..., 0::2], heads[..., 1::2]
    first, second = heads.chunk(2, dim=-1)
    return first, second


def _split_like(
    qkv: Tensor, heads: int, key_value_heads: int, *angles: Tensor | bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, sequence, _, head_dim = qkv.shape
    query, key, value = (
        qkv.new_empty(batch, sequence, count, head_dim) for count in (heads, key_value_heads, key_value_heads)
    )
    return query, key, value


def _packed_like(query: Tensor, key: Tensor, value: Tensor, *angles: Tensor | bool | None) -> Tensor:
    batch, sequence, heads, head_dim = query.shape
    return query.new_empty(batch, sequence, heads + 2 * key.shape[2], head_dim)


def _pair_like(query: Tensor, key: Tensor, *angles: Tensor | bool | None) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _nothing(*inputs: Tensor | bool | None) -> None: ...


def _keep_split_angles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[3:6])
    ctx.interleaved = inputs[6]


def _split_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    packed = torch.ops.megalite.rotary_split_backward(*grads, *ctx.saved_tensors, ctx.interleaved)
    return packed, *(None for _ in range(6))


def _keep_angles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[2:5])
    ctx.interleaved, ctx.inverse = inputs[5:]


def _rotate_back(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    turned_back = rotated_pair(*grads, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return *turned_back, *(None for _ in range(5))


_rotary_split = extension.register("rotary_split", _split_like, _split_backward, _keep_split_angles)
extension.register("rotary_split_backward", _packed_like)
rotated_pair = extension.register("rotary", _pair_like, _rotate_back, _keep_angles)
extension.register("rotary_", _nothing)
