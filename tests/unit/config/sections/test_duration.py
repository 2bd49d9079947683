"""Durations and intervals: their forms, and everything else refused by name."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megalite.config.load import load_run
from megalite.config.sections.duration import epochs_of, seconds_of
from megalite.errors import ConfigError
from tests.unit.config.runs import changed, write_run


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("23h30m", 84600),
        ("45m", 2700),
        ("90m", 5400),
        ("1d2h3m4s", 93784),
        ("10s", 10),
        (3600, 3600),
        (0.5, 0.5),
    ],
)
def test_a_duration_has_seconds(given: float | str, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize(
    "given", ["45.0", "1.5h", "30m1h", "1 h", "1H", "-1m", "m", "1h30", "0s", "0", "٣h", 0, -1.0]
)
def test_anything_else_is_refused_with_forms_that_can_be_typed(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        load_run(write_run(tmp_path, changed({"training.stop_after": given})))
    [problem] = refused.value.problems
    assert problem.key == "training.stop_after" and '"23h30m", "45m" or a number of seconds' in problem.remedy


@pytest.mark.parametrize(
    ("text", "epochs"),
    [("1 epoch", 1), ("2 epochs", 2), ("0.1 epochs", Fraction(1, 10)), ("1/3 epochs", Fraction(1, 3))],
)
def test_an_interval_has_epochs(text: str, epochs: Fraction) -> None:
    assert epochs_of(text) == epochs


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "epoch",
        "1epoch",
        "-1 epochs",
        "0 epochs",
        "1/0 epochs",
        "1e3 epochs",
        "½ epochs",
        "٣ epochs",
        "0.5 ",
    ],
)
def test_another_interval_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no number of epochs|is not above 0|divides by 0"):
        epochs_of(text)
