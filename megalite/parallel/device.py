"""The device that a rank computes on, and how numbers leave it: every accelerator through torch's common interface.

Nothing here asks for CUDA: what runs on a GPU runs on any device that torch calls an accelerator, and so in the tests
on one that has no hardware.
"""

import socket
from typing import Any

import torch
from torch import Tensor

from megalite.errors import LaunchError

CPU = torch.device("cpu")
# Without float64 and without a collective library: a Mac trains on its CPU.
_UNUSABLE = ("mps",)


def local_device(local_rank: int, local_ranks: int) -> torch.device:
    """Return the accelerator of this rank, made current, or the CPU where torch sees no accelerator.

    Each rank takes the accelerator of its local rank, among those that the launcher or CUDA_VISIBLE_DEVICES left
    visible. Where exactly one is visible it is the rank's own: `srun --gpus-per-task=1` shows every rank another one.
    Raises LaunchError where a node starts more ranks than it shows accelerators.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type in _UNUSABLE:
        return CPU
    count = torch.accelerator.device_count()
    if local_rank >= count > 1:
        raise LaunchError(
            f"this node starts {local_ranks} ranks, but only {count} accelerators are visible to them; start at most "
            f"{count} ranks a node, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    device = torch.device(accelerator.type, local_rank if count > 1 else 0)
    torch.accelerator.set_device_index(device)
    return device


def accelerator_id(device: torch.device) -> tuple[str, str] | None:
    """Return the host's name and the accelerator's UUID, which no two ranks may share; None if it has no UUID."""
    if device.type == "cpu":
        return None
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else (socket.gethostname(), str(uuid))


def require_distinct_accelerators(cards: list[tuple[str, str] | None]) -> None:
    """Raise LaunchError where two ranks compute on one accelerator; `cards`: that of each rank, in rank order."""
    first: dict[tuple[str, str], int] = {}
    for rank, card in enumerate(cards):
        if card is None:
            continue
        if card in first:
            raise LaunchError(
                f"ranks {first[card]} and {rank} share one accelerator of {card[0]} ({card[1]}); start one rank an "
                "accelerator, give each rank its own (srun --gpus-per-task=1), or set CUDA_VISIBLE_DEVICES= (empty) "
                "to train on the CPU"
            )
        first[card] = rank


class HostCopy:
    """A number on its way from its device to the host; `item` waits only for what was queued before the copy."""

    def __init__(self, number: Tensor):
        self._number, self._arrived = number.detach(), None
        if number.device.type != "cpu":
            on_host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
            self._number = on_host.copy_(self._number, non_blocking=True)
            self._arrived = torch.accelerator.current_stream(number.device).record_event()

    def item(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._number)
