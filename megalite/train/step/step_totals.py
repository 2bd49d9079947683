"""The one collective of a step for which the host waits: the loss, the norm, the next weight, and flags of any rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class StepTotals:
    """The sums over all ranks of what each rank has of a step, equal on every rank.

    figures: of the objective, in its order.
    squared_norm: of the gradients as the optimizer holds them. next_weight: the token weight of the next global batch,
    [] float64 on the device. flags: for each flag, whether any rank raised it. routers: the sum of the ranks'
    `RouterLoad.take_share`, on the device.
    """

    loss: float
    squared_norm: float
    next_weight: Tensor
    flags: tuple[bool, ...]
    figures: tuple[float, ...]
    routers: Tensor


def total_over_ranks(
    mesh: ParallelMesh,
    shares: Tensor,
    squared_norm: Tensor,
    next_weight: Tensor,
    flags: Sequence[bool],
    routers: Tensor,
) -> StepTotals:
    """Sum the shares of all ranks, float64 on the mesh's device, and the flags. Collective; the host waits once.

    shares: [1 + figures], of the loss and of the objective's figures; the others are scalars.
    """
    # A filled tensor needs no copy from the host, which a device would wait for.
    raised = [torch.full_like(squared_norm, float(flag)) for flag in flags]
    others = torch.stack((squared_norm, next_weight, *raised))
    totals = mesh.reduce_over_world(torch.cat((shares, others, routers)))
    figures, known = len(shares) - 1, len(shares) + len(others)
    loss, *rest = totals[:known].tolist()
    return StepTotals(
        loss,
        rest[figures],
        totals[figures + 2],
        tuple(count > 0 for count in rest[figures + 2 :]),
        tuple(rest[:figures]),
        totals[known:],
    )
