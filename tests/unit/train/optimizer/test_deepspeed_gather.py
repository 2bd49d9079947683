"""Which weights DeepSpeed gathers in one piece, and which megalite gathers in shards."""

from typing import Any

import pytest
import torch

from megalite.train.optimizer import deepspeed_gather


@pytest.mark.parametrize(("device", "partitions"), [("meta", 2), ("cpu", 1)])
def test_on_an_accelerator_and_without_copies_deepspeed_gathers(
    monkeypatch: pytest.MonkeyPatch, device: str, partitions: int
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(deepspeed_gather, "all_gather_dp_groups", lambda *given: calls.append(given))
    flat = torch.zeros(6, device=device)
    split = list(flat.chunk(partitions))
    deepspeed_gather._all_gather([flat], [split], ["a group"], 2, 100)  # type: ignore[list-item]
    ((flats, splits, groups, alignment, bucket),) = calls
    assert flats[0] is flat and splits[0] is split
    assert (groups, alignment, bucket) == (["a group"], 2, 100)
