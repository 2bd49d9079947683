"""The self-test's clock on a card times the device, not the launches of the host."""

import pytest
import torch

from megalite.selftest.clock import CYCLES_PER_SECOND, HELD_CYCLES, MOST_CYCLES, TRIES, device_seconds, hold


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


class Card:
    """Stands in for a card that is held in vain for the first `in_vain` works, as while the host is slow."""

    def __init__(self, in_vain: int, monkeypatch: pytest.MonkeyPatch):
        self.in_vain, self.works = in_vain, 0
        self.held: list[int] = []
        monkeypatch.setattr(torch.cuda, "_sleep", self.held.append)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
        monkeypatch.setattr(torch, "Event", lambda device, enable_timing: self)

    def work(self) -> None:
        self.works += 1

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.works <= self.in_vain

    def elapsed_time(self, other: "Card") -> float:
        assert other is self
        return 1e3 * self.works


@pytest.mark.parametrize(
    ("in_vain", "host", "held"),
    [
        (0, 0.0, [HELD_CYCLES]),
        (2, 0.0, [HELD_CYCLES, 2 * HELD_CYCLES, 4 * HELD_CYCLES]),
        (1, 0.004, [16_000_000, 32_000_000]),
        (100, 0.004, [16_000_000, 32_000_000, MOST_CYCLES, MOST_CYCLES]),
    ],
)
def test_a_work_that_began_before_all_was_queued_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, in_vain: int, host: float, held: list[int]
) -> None:
    card = Card(in_vain, monkeypatch)
    assert device_seconds(card.work, torch.device("cuda"), host) == min(in_vain + 1, TRIES)
    assert card.held == held


def test_a_device_that_cannot_be_held_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(100, monkeypatch)
    assert device_seconds(card.work, torch.device("xpu")) == 1
    assert not card.held
