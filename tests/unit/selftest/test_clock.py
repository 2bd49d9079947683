"""The self-test's clock on a card times the device, not the launches of the host."""

import pytest
import torch

from megalite.selftest.clock import CYCLES_PER_SECOND, HELD_CYCLES, MOST_CYCLES, hold


@pytest.mark.parametrize(("device", "held"), [("cuda:1", [HELD_CYCLES]), ("cpu", []), ("meta", [])])
def test_a_card_is_held_until_all_is_queued(
    monkeypatch: pytest.MonkeyPatch, device: str, held: list[int]
) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    hold(torch.device(device))
    assert cycles == held


@pytest.mark.parametrize(("host", "cycles"), [(0.0001, HELD_CYCLES), (0.004, 16_000_000), (1.0, MOST_CYCLES)])
def test_launches_that_take_longer_hold_it_longer(
    monkeypatch: pytest.MonkeyPatch, host: float, cycles: int
) -> None:
    assert CYCLES_PER_SECOND == 2e9
    held: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", held.append)
    hold(torch.device("cuda"), host)
    assert held == [cycles]
