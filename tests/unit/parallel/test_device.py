"""Which device a rank takes, and that no two ranks take one."""

from typing import Any
from unittest import mock

import pytest
import torch

from megalite.errors import LaunchError, MemoryExhausted
from megalite.parallel.device import (
    CPU,
    accelerator_id,
    local_device,
    require_distinct_accelerators,
)
from megalite.parallel.mesh import connect


def taken(kind: str, visible: int, local_rank: int, local_ranks: int) -> torch.device:
    with mock.patch.multiple(
        torch.accelerator,
        is_available=lambda: visible > 0,
        current_accelerator=lambda: torch.device(kind),
        device_count=lambda: visible,
        set_device_index=mock.DEFAULT,
    ) as patched:
        device = local_device(local_rank, local_ranks)
        made_current = patched["set_device_index"].call_args_list
    assert made_current == ([] if device.type == "cpu" else [mock.call(device)])
    return device


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_ranks", "index"),
    [(8, 0, 8, 0), (8, 7, 8, 7), (4, 1, 2, 1), (1, 0, 1, 0), (1, 5, 8, 0)],
    ids=["first", "last", "half of the cards", "alone", "srun --gpus-per-task=1"],
)
def test_a_rank_takes_the_card_of_its_local_rank_among_the_visible(
    visible: int, local_rank: int, local_ranks: int, index: int
) -> None:
    assert taken("cuda", visible, local_rank, local_ranks) == torch.device("cuda", index)


def test_without_a_usable_accelerator_it_takes_the_cpu() -> None:
    assert taken("cuda", 0, 3, 4) == CPU
    assert taken("mps", 1, 0, 1) == CPU


def test_more_ranks_than_cards_are_refused() -> None:
    said = (
        r"starts 8 ranks, but only 4 accelerators.*at most 4 ranks per node.*CUDA_VISIBLE_DEVICES= \(empty\)"
    )
    with pytest.raises(LaunchError, match=said):
        taken("cuda", 4, 4, 8)


@pytest.mark.parametrize(
    ("error", "raised"), [("CUDA error: out of memory\nhints", MemoryExhausted), ("no driver", RuntimeError)]
)
def test_a_card_that_others_have_filled_is_named(error: str, raised: type[Exception]) -> None:
    failing = mock.Mock(side_effect=RuntimeError(error))
    with (
        mock.patch.multiple(
            torch.accelerator,
            is_available=lambda: True,
            current_accelerator=lambda: torch.device("cuda"),
            device_count=lambda: 2,
            set_device_index=failing,
        ),
        pytest.raises(raised) as exhausted,
    ):
        local_device(1, 2)
    said = str(exhausted.value)
    assert type(exhausted.value) is raised and "hints" not in said
    assert raised is RuntimeError or ("out of memory on cuda:1" in said and "CUDA_VISIBLE_DEVICES" in said)


def test_ranks_that_share_a_card_are_refused() -> None:
    require_distinct_accelerators([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1"), None, None])
    with pytest.raises(
        LaunchError, match=r"ranks 0 and 2 share one accelerator of a \(GPU-1\); start one rank"
    ):
        require_distinct_accelerators([("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-1")])


@pytest.mark.parametrize(("properties", "uuid"), [({"uuid": "GPU-7"}, "GPU-7"), ({}, None)])
def test_a_card_is_told_by_its_host_and_uuid(properties: dict[str, Any], uuid: str | None) -> None:
    module = mock.Mock(
        get_device_properties=lambda device: mock.Mock(spec_set=list(properties), **properties)
    )
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        card = accelerator_id(torch.device("cuda", 3))
    assert (card and card[1]) == uuid
    assert accelerator_id(CPU) is None


def test_a_torch_without_the_devices_collectives_is_refused() -> None:
    with (
        mock.patch.object(torch.distributed, "is_backend_available", lambda name: name == "gloo"),
        pytest.raises(LaunchError, match=r"without a collective library for cuda devices; install a build"),
    ):
        connect(0, 1, device=torch.device("cuda", 0))
