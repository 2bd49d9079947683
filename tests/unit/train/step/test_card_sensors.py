"""The sensors of a card are read beside the training; one that cannot be read is a note."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.launcher.rank.detect import RankInfo
from megalite.parallel.mesh import ParallelMesh
from megalite.train.step import card_sensors, rank_measures
from megalite.train.step.rank_measures import RankMeasures
from tests.support.parity import about
from tests.support.waiting import wait_until

CARD = torch.device("cuda")


class Card(SimpleNamespace):
    """torch's module of a card that grows warmer with each question."""

    degrees = 60

    def utilization(self, device: torch.device) -> int:
        return 93

    def power_draw(self, device: torch.device) -> int:
        return 412_500

    def temperature(self, device: torch.device) -> int:
        self.degrees += 1
        return self.degrees


def measures_on(monkeypatch: pytest.MonkeyPatch, module: Any) -> RankMeasures:
    monkeypatch.setattr(card_sensors, "SECONDS", 0.001)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(rank_measures, "device_memory", lambda _: None)
    return RankMeasures(ParallelMesh.single(CARD), RankInfo(0, 1, 0, 1, "", 0, "megalite", "here"))


def test_a_report_has_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    measures = measures_on(monkeypatch, Card())
    first = measures.report().record
    assert (first["card_utilisation"], first["cards_watts"]) == (about(0.93), about(412.5))
    wait_until(
        lambda: measures.report().record["card_celsius_max"] >= 65,
        "the thread reads the card again and again",
    )


def test_a_card_that_is_lost_has_no_reading_and_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    card, before = Card(), set(threading.enumerate())
    measures = measures_on(monkeypatch, card)
    [thread] = [each for each in threading.enumerate() if each not in before]

    def lost(device: torch.device) -> int:
        raise RuntimeError("GPU is lost")

    card.temperature = lost
    wait_until(lambda: not measures.report().record, "the lost card is noticed")
    wait_until(lambda: not thread.is_alive(), "the thread has ended")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("nvidia-ml-py does not seem to be installed"), "megalite[cards]"),
        (RuntimeError("Not Supported"), "Not Supported"),
    ],
)
def test_sensors_that_cannot_be_read_are_a_note(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def refused(device: torch.device) -> int:
        raise error

    measures = measures_on(monkeypatch, Card(utilization=refused))
    assert said in measures.note and not measures.report().record


def test_a_device_without_sensors_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measures = measures_on(monkeypatch, SimpleNamespace())
    assert measures.note == "" and not measures.report().record
    monkeypatch.setattr(torch, "get_device_module", None)
    cpu = RankMeasures(ParallelMesh.single(), RankInfo(0, 1, 0, 1, "", 0, "megalite", "here"))
    assert cpu.note == ""
