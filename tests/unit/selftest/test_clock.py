"""The self-test's clock on a card times the device, not the launches of the host."""

import pytest
import torch

from megalite.selftest.clock import HELD_CYCLES, hold


@pytest.mark.parametrize(("device", "held"), [("cuda:1", [HELD_CYCLES]), ("cpu", []), ("meta", [])])
def test_a_card_is_held_until_all_is_queued(
    monkeypatch: pytest.MonkeyPatch, device: str, held: list[int]
) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    hold(torch.device(device))
    assert cycles == held
