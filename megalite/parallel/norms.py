"""RMSNorm over heads that are split over the tensor-parallel axis."""

from typing import Any

import torch
from torch import Tensor, nn

from megalite.ops.choice import Operators
from megalite.parallel.collectives import all_reduce
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.shape import ModelShape


class _ShardedNormalise(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps), the mean over the last dim of all ranks' x together.

    If `copies` ranks hold the same values, each counts 1 / copies of them. Their gradients are later summed over those
    ranks, so each rank subtracts only 1 / copies of the component along x, which is reduced over all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, total: int, copies: int, tp: RankGroup) -> Tensor:
        fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = all_reduce(fp32.square().sum(dim=-1, keepdim=True), tp).div_(copies)
        inverse_rms = squares.div_(total).add_(eps).rsqrt_()
        normalised = fp32 * inverse_rms
        ctx.save_for_backward(normalised, inverse_rms)
        ctx.tp, ctx.share, ctx.dtype = tp, total * copies, x.dtype
        return normalised

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalised, inverse_rms = ctx.saved_tensors
        along = all_reduce((grad * normalised).sum(dim=-1, keepdim=True), ctx.tp).div_(ctx.share)
        x_grad = torch.addcmul(grad, normalised, along, value=-1).mul_(inverse_rms)
        return x_grad.to(ctx.dtype), None, None, None, None


class HeadShardedNorm(nn.Module):
    """RMSNorm over all heads together (OLMo team, "2 OLMo 2 Furious", 2024, section 3), each rank with its own heads.

    weight: [heads of this rank * head_dim]. With fewer heads than ranks, several ranks hold the same head, and the
    weight's gradient is the sum over those ranks (see ShardSpec).
    """

    def __init__(
        self,
        shape: ModelShape,
        heads: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype,
        ops: Operators,
    ):
        """heads: of query or of key on all ranks."""
        super().__init__()
        self.tp, self.ops, self.eps = mesh.tp, ops, shape.rms_norm_eps
        self.zero_centered_gamma = shape.zero_centered_gamma
        self.total, self.copies = heads * shape.head_dim, max(1, mesh.tp.size // heads)
        self.weight = nn.Parameter(torch.empty(mesh.local_heads(heads) * shape.head_dim, dtype=dtype))

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise [B, S, heads of this rank, head_dim]."""
        flat = heads.flatten(2)
        if self.tp.size == 1:
            normed = self.ops.norm(flat, self.weight, None, self.eps, self.zero_centered_gamma)
            return normed.view_as(heads)
        normalised: Tensor = _ShardedNormalise.apply(flat, self.eps, self.total, self.copies, self.tp)  # type: ignore[no-untyped-call]
        # A separate torch product, so that a schedule can compute the weight's gradient at another time.
        if self.zero_centered_gamma:
            normed = (normalised * (1 + self.weight.to(normalised.dtype))).to(heads.dtype)
        else:
            normed = normalised.to(heads.dtype) * self.weight
        return normed.view_as(heads)
