"""benchmarks/start_up.py: what is reported of a command, and that each command makes a step."""

from pathlib import Path

import pytest

from benchmarks.start_up import CONTENDERS, Contender, first_step, rows_of
from tests.unit.benchmarks.test_figures import quick_rows

OURS, PEER = Contender("data 8", "megalite", {}), Contender("data 8", "peer")


def test_rows_compare_within_a_round() -> None:
    # The second round is twice as slow for both: no ratio changes.
    ours, peer = rows_of([OURS, PEER], [[(2.0, 2**30), (6.0, 2**31)], [(4.0, 2**30), (12.0, 2**31)]])
    assert (ours["seconds"], ours["over_megalite"], ours["mib"]) == (3, 1, 1024)
    assert (peer["seconds"], peer["low"], peer["over_megalite"], peer["high"]) == (9, 3, 3, 3)
    assert peer["mib"] == 2048 and peer["round_seconds"] == [6, 12]


def test_a_command_without_a_step_is_an_error_with_its_output() -> None:
    assert first_step(["echo", "step 1"])[0] < 60
    with pytest.raises(RuntimeError, match="no accelerator"):
        first_step(["echo", "no accelerator"])


@pytest.mark.extended
def test_every_command_of_the_quick_cases_makes_a_step(tmp_path: Path) -> None:
    rows = quick_rows("start_up", tmp_path)
    assert [row["contender"] for row in rows] == [
        each.name for each in CONTENDERS if each.comparison == "data 8"
    ]
