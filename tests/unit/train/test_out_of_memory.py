"""The lines of a run on its memory: the settings that lower it stand there only if the card is full."""

from pathlib import Path

import pytest

from megalite.launcher.control.progress import Progress
from megalite.monitor.memory import ExhaustedCard
from megalite.train import out_of_memory
from megalite.train.out_of_memory import KnownRun
from tests.unit.config.runs import load

FULL = ExhaustedCard("card", 1 << 30, 0, 0, 0, "")
FREE = ExhaustedCard("card", 1 << 30, 1 << 29, 0, 0, "", full=False)


@pytest.mark.parametrize(("card", "advised"), [(FULL, True), (None, True), (FREE, False)])
def test_only_a_full_card_has_remedies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, card: ExhaustedCard | None, advised: bool
) -> None:
    # This process's own may stand where another test's run left it.
    monkeypatch.setattr(out_of_memory, "progress", Progress())
    config = load(tmp_path).config.in_precision("bf16")
    run = KnownRun(config, 0)
    run.resolved(config, 300)
    first, *remedies, last = run.lines(card)
    assert first.startswith("before the first step: ") and "has no checkpoint yet" in last
    assert any("this rank needs by estimate" in line for line in remedies) == advised
    assert any("--training.recompute full" in line for line in remedies) == advised
