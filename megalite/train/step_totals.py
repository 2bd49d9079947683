"""The one collective of a step for which the host waits: the loss, the norm, the next weight, and flags of any rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class StepTotals:
    """The sums over all ranks of what each rank has of a step, equal on every rank.

    squared_norm: of the gradients as the optimizer holds them. next_weight: the token weight of the next global batch,
    [] float64 on the device. flags: for each flag, whether any rank raised it.
    """

    loss: float
    squared_norm: float
    next_weight: Tensor
    flags: tuple[bool, ...]


def total_over_ranks(
    mesh: ParallelMesh, loss: Tensor, squared_norm: Tensor, next_weight: Tensor, flags: Sequence[bool]
) -> StepTotals:
    """Sum the shares of all ranks, [] float64 on the mesh's device, and the flags. Collective; the host waits once."""
    # A filled tensor needs no copy from the host, which a device would wait for.
    raised = [torch.full_like(loss, float(flag)) for flag in flags]
    totals = mesh.reduce_over_world(torch.stack((loss, squared_norm, next_weight, *raised)))
    total_loss, total_norm, _, *counts = totals.tolist()
    return StepTotals(total_loss, total_norm, totals[2], tuple(count > 0 for count in counts))
