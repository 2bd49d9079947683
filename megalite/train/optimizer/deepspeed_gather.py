"""The gather of ZeRO 1 and 2's updated weights on CPUs, in shards."""

from collections.abc import Sequence

import deepspeed.comm as dist
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from megalite.launcher.control.progress import progress
from megalite.parallel.mesh import ProcessGroup


def gather_in_shards() -> None:
    """Have ZeRO 1 and 2 gather on CPUs in shards of `allgather_bucket_size`, as DeepSpeed did before its flat gather.

    On gloo, torch emulates the flat gather with a second buffer of the whole model, a new one at every step.
    """
    stage_1_and_2.all_gather_dp_groups = _all_gather


def _all_gather(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[ProcessGroup],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """DeepSpeed's `all_gather_dp_groups`, but for weights on a CPU."""
    for flat, partitions, group in zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True):
        if len(partitions) == 1 or flat.device.type != "cpu":
            all_gather_dp_groups([flat], [partitions], [group], start_alignment_factor, allgather_bucket_size)
            continue
        length = max(1, allgather_bucket_size // len(partitions))
        for shards in zip(*(partition.detach().split(length) for partition in partitions), strict=True):
            with progress.wait("dense_gradients"):
                dist.all_gather(list(shards), shards[dist.get_rank(group)], group)
