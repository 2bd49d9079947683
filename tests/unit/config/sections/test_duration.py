"""Durations: their two forms, and everything else refused by name."""

from pathlib import Path
from typing import Any

import pytest

from megalite.config.load import load_run
from megalite.config.sections.duration import seconds_of
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
