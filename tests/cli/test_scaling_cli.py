"""megalite scaling: the ladder and its fit, from runs whose losses are those of a known law."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.cli import main
from megalite.studies.scaling_fit import ScalingLaw
from tests.support.parity import FIGURE_RTOL, PUBLISHED_RTOL, about
from tests.support.studies import write_finished, write_study

TRUE = ScalingLaw(1.5, 8.0, 60.0, 0.3, 0.4)
LADDER = ["--sizes", "16x1", "32x1", "48x2", "--budgets", "480", "1k", "4k", "--held-out", "64x2"]
LADDER += ["--held-out-tokens", "10k"]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return ["scaling", str(write_study(tmp_path)), *LADDER]


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()[:1] and "x" in line.split()[0]]


def finish(folder: Path, planned: list[list[str]], held_out_factor: float) -> None:
    """Leave the runs of a plan with the losses of TRUE; the held-out one has another by a factor."""
    for row in planned:
        size, parameters, tokens = row[0], *(int(row[place].replace(",", "")) for place in (1, 3))
        # Single runs scatter by a few thousandths.
        factor = held_out_factor if "held" in row else 1 + 0.003 * math.sin(tokens + parameters)
        name = next(f"{size}-{asked}" for asked in (480, 1000, 4000, 10_000) if abs(asked - tokens) <= 12)
        write_finished(folder / name, tokens // 24, TRUE.loss(parameters, tokens) * factor)


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_the_law_of_finished_runs_is_found_and_tested_on_the_held_out_run(
    command: list[str], tmp_path: Path, factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--plan"]) == 0
    planned = rows(capsys.readouterr().out)
    assert len(planned) == 10 and planned[-1][-1] == "fit"
    folder = tmp_path / "runs" / "tiny-scaling"
    finish(folder, planned, factor)

    assert main([*command, "--flops", "1e12"]) == 0
    shown = capsys.readouterr().out
    assert "9 runs of 9 finished already" in shown and "starts" not in shown
    report = json.loads((folder / "scaling.json").read_text())
    for name, field in (("E", "irreducible"), ("alpha", "alpha"), ("beta", "beta")):
        low, high = report["intervals_95"][name]
        assert low <= getattr(TRUE, field) <= high
    best = ScalingLaw(**report["law"]).optimum(1e12)
    assert [report["optimum"][key] for key in ("parameters", "tokens")] == about(list(best), FIGURE_RTOL)
    held_out = report["held_out"]
    assert 1 + held_out["error"] == about(factor, PUBLISHED_RTOL)
    [verdict] = [line for line in shown.splitlines() if line.startswith("predicted")]
    assert ("inside of" if factor == 1.0 else "outside of") in verdict
    assert "this optimum lies outside of the ladder" in shown
    root = ElementTree.fromstring((folder / "scaling.svg").read_text())
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(f"loss {held_out['measured']:.4f}" in title for title in titles) >= 4


def test_the_plan_says_sizes_tokens_operations_and_rates(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--plan", "--rate-times-width", "0.32"]) == 0
    shown = capsys.readouterr().out
    size, parameters, every, tokens, flops, rate = rows(shown)[0]
    # One layer of width 16: four matrices of attention, three of an MLP of 64, and three norms; 101 rows of a table.
    own = 4 * 16 * 16 + 3 * 16 * 64 + 3 * 16
    assert (size, int(parameters.replace(",", "")), int(every.replace(",", ""))) == (
        "16x1",
        own,
        own + 101 * 16,
    )
    assert (tokens, rate) == ("480", "0.02")
    matrices = own - 3 * 16 + 101 * 16
    assert float(flops) == about(480 * (6 * matrices + 6 * 16 * 12), 0.01)
    assert "the longest run sees them" in shown and "processor time left" in shown
    assert not (tmp_path / "runs" / "tiny-scaling" / "runs.json").exists()


def test_what_cannot_be_a_ladder_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str) -> str:
        try:
            assert main([*command, *more]) == 2
        except SystemExit as left:
            assert left.code == 2
        return capsys.readouterr().err

    assert "not WIDTHxLAYERS with a multiple of 16" in refused("--sizes", "20x2")
    assert "not a number of tokens" in refused("--budgets", "many")
    assert "the ladder has a run twice" in refused("--sizes", "16x1", "16x1")
    assert "is needed: the law is one of the validation loss" in refused("--data.validation", "unset")
    assert main(["scaling", "--plan"]) == 2 and "data.source" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "tiny-scaling" / "runs.json").exists()
