"""benchmarks/peers: what is reported of a contender, and that all of them do the same work."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.cases import CASES, PICOTRON, QUICK, chosen
from benchmarks.peers.contender import Contender, Figures, PeerLayout, RankFigures, summary
from benchmarks.peers.figures import best_of, check_losses, rows_of
from benchmarks.ranks import run_fresh_ranks
from benchmarks.workload import TOKENS
from tests.support.parity import about
from tests.support.waiting import PATIENCE
from tests.unit.benchmarks.test_figures import ROOT, quick_rows

LAYOUT = PeerLayout("data 2", data=2)
SLOW, FAST = Contender("slow", "slow"), Contender("fast", "fast")
OURS, OTHER = Contender("ours", "ours", ours=True), Contender("ours, zbv", "ours", ours=True)
LOSSES = (9.7, 9.3, 9.0)


def figures(seconds: float, losses: tuple[float, ...] = LOSSES) -> Figures:
    return Figures(seconds, losses, first_step_seconds=8.0, peak_mib=700)


def rounds(*seconds: tuple[float, float, float, float]) -> list[dict[str, Figures]]:
    names = [each.name for each in (SLOW, FAST, OURS, OTHER)]
    return [dict(zip(names, map(figures, each), strict=True)) for each in seconds]


def test_rows_compare_within_a_round() -> None:
    # The second round is twice as slow for all: no ratio changes.
    found = rounds((3.0, 1.2, 1.0, 0.5), (6.0, 2.4, 2.0, 1.0), (3.0, 1.5, 1.0, 0.5))
    slow, fast, ours, other = rows_of(LAYOUT, (SLOW, FAST, OURS, OTHER), found)
    assert (slow["over_megalite"], slow["low"], slow["high"]) == (3, 3, 3)
    assert (fast["over_megalite"], fast["low"], fast["high"]) == (1.2, 1.2, 1.5)
    assert (ours["over_megalite"], other["over_megalite"]) == (1, 0.5)
    assert slow["seconds"] == 3 and slow["tokens_per_second"] == round(TOKENS / 3)
    assert slow["peak_mib"] == 700 and slow["first_step_seconds"] == 8
    assert slow["round_seconds"] == [3, 6, 3] and slow["layout"] == "data 2"


@pytest.mark.parametrize(
    ("fast", "ratio", "ahead"),
    [
        ((1.2, 1.3, 1.1), 1.2, "megalite"),
        ((1.2, 1.3, 0.9), 1.2, "megalite, not in every round"),
        ((0.9, 1.1, 0.8), 0.9, "fast, not in every round"),
        ((0.9, 0.95, 0.8), 0.9, "fast"),
    ],
)
def test_a_peer_that_is_ahead_is_said_so(fast: tuple[float, ...], ratio: float, ahead: str) -> None:
    found = rounds(*((3.0, seconds, 1.0, 0.5) for seconds in fast))
    row, other = best_of(LAYOUT, (SLOW, FAST, OURS, OTHER), found)
    assert (row["megalite"], row["best_peer"], row["peer_over_ours"]) == ("ours", "fast", ratio)
    assert (row["low"], row["high"], row["ahead"]) == (min(fast), max(fast), ahead)
    assert other["peer_over_ours"] == 2 * ratio and other["ahead"] == "megalite"


def test_losses_of_other_sequences_are_compared_apart() -> None:
    long = PeerLayout("long", context=2, sequences=1, length=2048)
    both = {LAYOUT: (OURS,), long: (FAST, OURS)}
    lower = tuple(loss - 1 for loss in LOSSES)
    found = {LAYOUT: {"ours": figures(1.0)}, long: {name: figures(1.0, lower) for name in ("fast", "ours")}}
    check_losses(both, found)
    with pytest.raises(ValueError, match="long, fast"):
        check_losses(both, {**found, long: {"ours": figures(1.0, lower), "fast": figures(1.0)}})
    [row] = rows_of(long, (OURS,), [found[long]])
    assert row["tokens_per_second"] == 2048


def test_other_work_is_an_error() -> None:
    cases = {LAYOUT: (FAST, OURS)}
    near = tuple(loss * (1 + 1e-6) for loss in LOSSES)
    check_losses(cases, {LAYOUT: {"ours": figures(1.0), "fast": figures(1.0, near)}})
    # Without clipping or with another weight decay, the first loss is the same.
    later = (*LOSSES[:2], LOSSES[2] * 1.0001)
    with pytest.raises(ValueError, match=r"data 2, fast.*9\.0009"):
        check_losses(cases, {LAYOUT: {"ours": figures(1.0), "fast": figures(1.0, later)}})


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    first = RankFigures((None, None), 7.0, (1.0, 5.0, 1.1), 600)
    last = RankFigures((9.7, 9.3), 8.0, (1.2, 1.3, 1.4), 500)
    assert summary([first, last]) == Figures(1.3, (9.7, 9.3), 8.0, 600)
    # The ranks of data parallelism know the loss of their own samples.
    both = summary([last, RankFigures((9.5, 9.1), 8.0, (1.2,), 500)])
    assert both.losses == about((9.6, 9.2))


def test_a_checkpoint_has_figures_where_the_contender_can_save() -> None:
    saving = [
        {**each, "ours": replace(each["ours"], save_seconds=save)}
        for each, save in zip(rounds((3, 2, 1, 1), (3, 2, 1, 1)), (1.0, 2.0), strict=True)
    ]
    slow, _, ours, _ = rows_of(LAYOUT, (SLOW, FAST, OURS, OTHER), saving)
    assert (ours["save_seconds"], ours["load_seconds"], slow["save_seconds"]) == (1.5, None, None)


def test_picotron_takes_part_only_where_its_folder_is_named() -> None:
    without, with_it = (chosen([], quick=False, picotron=known) for known in (False, True))
    # Nobody else has context parallelism on a CPU.
    assert with_it == CASES and without.keys() == {layout for layout in CASES if layout.context == 1}
    assert not any(PICOTRON in contenders for contenders in without.values())
    assert sum(PICOTRON in contenders for contenders in with_it.values()) == 5
    (only,) = chosen(["tensor 2"], quick=False, picotron=False)
    assert only.name == "tensor 2" and only.ranks == 2


def test_every_case_has_a_peer_and_megalite() -> None:
    for layout, contenders in CASES.items():
        assert {each.ours for each in contenders} == {True, False}, layout
        assert len({each.name for each in contenders}) == len(contenders), layout
        for each in contenders:
            assert importlib.util.find_spec(f"benchmarks.peers.{each.module}"), each
    quick = chosen([], quick=True, picotron=False)
    assert {layout.name: tuple(one.name for one in each) for layout, each in quick.items()} == QUICK


def test_fresh_ranks_have_a_launchers_variables() -> None:
    assert run_fresh_ranks(os.getenv, 2, "WORLD_SIZE") == ["2", "2"]


def test_a_contender_can_set_the_variables_that_torch_reads_once() -> None:
    seen = "import benchmarks.peers.contender, benchmarks.peers.ours, sys; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", seen], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.stdout == "False\n", run.stderr


def test_a_report_says_who_took_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = iter([1.5, 1.25, 1.0])  # DDP, FSDP2, megalite
    monkeypatch.setattr(peers, "measure", lambda *_, **__: figures(next(taken)))
    monkeypatch.setattr(peers, "run_fresh_ranks", lambda *_: [True])
    command = ["peers", "--layout", "data 2", "--rounds", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    peers.main()
    (path,) = tmp_path.glob("*-peers-cpu.json")
    written = json.loads(path.read_text())
    assert written["left_out"] == ["picotron (no --picotron FOLDER)"] and written["rounds"] == 1
    assert [row["contender"] for row in written["rows"]] == ["torch DDP", "torch FSDP2", "megalite"]
    (best,) = written["best"]
    assert (best["best_peer"], best["peer_over_ours"], best["ahead"]) == ("torch FSDP2", 1.25, "megalite")
    printed = capsys.readouterr().out
    assert "left out: picotron" in printed and "torch FSDP2" in printed


@pytest.mark.slow
def test_peers(tmp_path: Path) -> None:
    """Fails where a peer's first losses are not megalite's."""
    rows = quick_rows("peers", tmp_path)
    found = [(row["layout"], row["contender"]) for row in rows]
    assert found == [(layout, name) for layout, names in QUICK.items() for name in names]
    for row in rows:
        assert 0 < row["seconds"] < row["first_step_seconds"] and row["peak_mib"] > 300, row
        assert row["low"] <= row["over_megalite"] <= row["high"], row
        assert (row["save_seconds"] is not None) == (row["layout"] == "data 2"), row
