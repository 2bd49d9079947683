"""The device of a rank.

The code uses torch.accelerator rather than torch.cuda, so tests run it on an accelerator without hardware.
"""

import socket
from typing import Any

import torch

from megalite.errors import LaunchError, MemoryExhausted

CPU = torch.device("cpu")
# mps has no float64 and no collective library, so a Mac trains on its CPU.
_UNUSABLE = ("mps",)


def local_device(local_rank: int, local_ranks: int) -> torch.device:
    """Make the accelerator of this rank current and return it; return the CPU if torch sees no accelerator.

    Local rank n takes the n-th visible accelerator. If exactly one is visible, every rank takes that one: with
    `srun --gpus-per-task=1` each rank sees a different one.
    Raises LaunchError if a node starts more ranks than it has visible accelerators, MemoryExhausted if others leave no
    memory of it for this process.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type in _UNUSABLE:
        return CPU
    count = torch.accelerator.device_count()
    if local_rank >= count > 1:
        raise LaunchError(
            f"this node starts {local_ranks} ranks, but only {count} accelerators are visible to them; start at most "
            f"{count} ranks per node, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    device = torch.device(accelerator.type, local_rank if count > 1 else 0)
    try:
        torch.accelerator.set_device_index(
            device
        )  # CUDA 12 makes its context here, for which it needs memory
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        raise MemoryExhausted(
            f"out of memory on {device}, of which this rank has used nothing yet: {str(error).splitlines()[0]}\n"
            "  end the other processes on that card, or choose another with CUDA_VISIBLE_DEVICES"
        ) from error
    return device


def accelerator_id(device: torch.device) -> tuple[str, str] | None:
    """Return (host name, UUID of the accelerator); None for the CPU and for an accelerator without a UUID."""
    if device.type == "cpu":
        return None
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else (socket.gethostname(), str(uuid))


def require_distinct_accelerators(ids: list[tuple[str, str] | None]) -> None:
    """Raise LaunchError if two ranks share an accelerator; ids: `accelerator_id` of each rank, in rank order."""
    first: dict[tuple[str, str], int] = {}
    for rank, accelerator in enumerate(ids):
        if accelerator is None:
            continue
        if accelerator in first:
            raise LaunchError(
                f"ranks {first[accelerator]} and {rank} share one accelerator of {accelerator[0]} ({accelerator[1]}); "
                "start one rank per accelerator, give each rank its own (srun --gpus-per-task=1), or set "
                "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
            )
        first[accelerator] = rank
