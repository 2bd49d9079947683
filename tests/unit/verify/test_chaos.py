"""Faults on purpose: when they come, how each is done to a process, and what is made of what is seen."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from megalite.config.load import load_config
from megalite.errors import LaunchError
from megalite.launcher.process import is_stopped
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import canonical_tensors
from megalite.topology.stages import pipeline_split
from megalite.verify.chaos.account import goodput_of, recovery_of, step_seconds, summary_lines
from megalite.verify.chaos.disturbed import InjectedFault
from megalite.verify.chaos.equality import Equality, compare, relative, step_to_compare
from megalite.verify.chaos.faults import Fault, FaultPlan
from megalite.verify.chaos.inject import PulsedRank, drop_link, fill_disk
from megalite.verify.chaos.picture import chaos_svg, spans
from megalite.verify.chaos.watch import Attempt, SeenStep
from megalite.verify.chaos.weights import FlipsWeightBit, ask_for_flip, flipped
from tests.support.jobs import Job
from tests.support.parity import about
from tests.support.waiting import PATIENCE, wait_until

HOUR = FaultPlan(3600, kill_every=60, numbers={"stop": 3, "preempt": 1}, slow=[(1, 4.0)])


def test_the_same_seed_draws_the_same_faults_and_another_kind_moves_none() -> None:
    faults = HOUR.drawn(8, seed=5)
    assert faults == HOUR.drawn(8, seed=5) != HOUR.drawn(8, seed=6)
    assert faults == sorted(faults) and {fault.rank for fault in faults} <= set(range(8))
    without = replace(HOUR, numbers={"stop": 3}).drawn(8, seed=5)
    assert [fault for fault in faults if fault.kind != "preempt"] == without


def test_kills_come_about_every_minute_and_never_twice_within_half_of_it() -> None:
    for seed in range(20):
        kills = [fault.at for fault in HOUR.drawn(8, seed) if fault.kind == "kill"]
        assert len(kills) == 59 and max(kills) < 3600
        gaps = [later - sooner for sooner, later in pairwise(kills)]
        assert min(gaps) >= 30 and max(gaps) <= 90 and len({round(gap) for gap in gaps}) > 10


def test_chosen_times_are_kept_and_numbers_spread_over_the_time() -> None:
    faults = FaultPlan(100, numbers={"stop": 2}, chosen=[("kill", 7.5)], slow=[(3, 2.0)]).drawn(4, 0)
    assert [fault.at for fault in faults if fault.kind == "kill"] == [7.5]
    first, second = (fault.at for fault in faults if fault.kind == "stop")
    assert 10 <= first <= 40 and 60 <= second <= 90
    assert [(fault.rank, fault.factor) for fault in faults if fault.kind == "slow"] == [(3, 2.0)]


@contextmanager
def process(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    words = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


TALKS = """
import socket, sys
if sys.argv[1] == "0":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    link, _ = listener.accept()
else:
    link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("met", flush=True)
print(len(link.recv(1)), flush=True)
"""


def test_a_dropped_link_ends_at_both_ranks() -> None:
    with process(TALKS, "0") as first:
        assert first.stdout is not None
        with process(TALKS, first.stdout.readline().strip()) as second:
            assert second.stdout is not None
            assert first.stdout.readline() == second.stdout.readline() == "met\n"
            assert drop_link([first.pid, second.pid], 1) == "ranks 0 and 1"
            assert first.stdout.readline() == second.stdout.readline() == "0\n"


def test_ranks_without_a_link_are_an_error() -> None:
    with (
        process("input()") as one,
        process("input()") as other,
        pytest.raises(LaunchError, match="no TCP conn"),
    ):
        drop_link([one.pid, other.pid], 0)


def test_no_file_of_a_rank_grows_on_a_full_disk(tmp_path: Path) -> None:
    script = "import sys\nwith open(sys.argv[1], 'w') as file:\n    file.write(input())"
    with process(script, str(tmp_path / "grows")) as rank:
        fill_disk([rank.pid])
        rank.communicate("text\n", timeout=PATIENCE)
        assert rank.returncode != 0
    assert (tmp_path / "grows").stat().st_size == 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0


def test_a_slow_rank_is_stopped_again_and_again_and_goes_on_in_the_end() -> None:
    with process("input()") as rank:
        slow = PulsedRank(rank.pid, 20.0)
        for _ in range(3):
            wait_until(lambda: is_stopped(rank.pid), "never stopped", every=0.001)
            wait_until(lambda: not is_stopped(rank.pid), "never continued", every=0.001)
        slow.end()
        assert not is_stopped(rank.pid)
        rank.kill()
        rank.wait()
        PulsedRank(rank.pid, 20.0).end()


def test_a_bit_flips_in_one_tensor_that_a_self_check_would_name(tmp_path: Path) -> None:
    run_file = Job.write(tmp_path, tensor=1, pipeline=1, data=2).run_file
    config = load_config(run_file, "--run.folder", str(tmp_path))
    shape = config.shape(300)
    split = pipeline_split(shape.num_hidden_layers)
    stage = build_replica(shape, ParallelMesh.single(), split, seed=0).stage
    run: Any = SimpleNamespace(config=config, model=stage, rank=1)
    names = set()
    for seed in range(12):
        before = {name: weight.detach().clone() for name, weight in stage.named_parameters()}
        ask_for_flip(tmp_path, 1, seed)
        FlipsWeightBit().on_step_end(run, SimpleNamespace(step=seed))
        done = flipped(tmp_path)
        assert done is not None and (done["rank"], done["step"]) == (1, seed)
        changed = {name: int((weight != before[name]).sum()) for name, weight in stage.named_parameters()}
        assert {name: number for name, number in changed.items() if number} == {done["tensor"]: 1}
        names.add(done["tensor"])
    assert len(names) > 3 and names <= canonical_tensors(shape).keys()


def attempt(
    began: float, first_step: int, seconds: list[float], cause_at: float | None, cause: str
) -> Attempt:
    """Return an attempt whose ranks are there after 3 s, loaded after 4, whose steps take these seconds each."""
    at, steps = began + 4, []
    for number, each in enumerate(seconds):
        at += each
        steps.append(SeenStep(at, first_step + number, each, None))
    return Attempt(began, 2, began + 3, began + 4, first_step - 1, cause_at, cause, steps)


# Ten steps of a second; rank 1 dies in the eleventh; the run goes on behind step 6 and makes ten more.
HIT = attempt(100, 1, [1.0] * 10, 115.0, "rank 1 (pp 0, dp 1, tp 0): vanished\n  after step 10")
AFTER = attempt(116, 7, [1.0] * 10, None, "")
KILL = InjectedFault(Fault(10.5, "kill", 1), 114.5, 10, 0, outcome="recovered")


def test_goodput_is_the_product_of_its_factors_and_what_came_of_the_time() -> None:
    goodput = goodput_of([HIT, AFTER], 0.5)
    assert goodput is not None
    assert (goodput.seconds, goodput.up_seconds, goodput.steps_made, goodput.steps_kept) == (26, 20, 20, 16)
    assert (
        goodput.available == about(20 / 26)
        and goodput.kept == about(16 / 20)
        and goodput.efficiency == about(0.5)
    )
    assert goodput.share == about(16 * 0.5 / 26)
    own = goodput_of([HIT, AFTER], None)
    assert own is not None and own.efficiency == about(1.0)
    assert goodput_of([Attempt(0, 2)], None) is None and step_seconds([HIT]) == about(1.0)


def test_a_recovery_is_split_into_its_parts_and_they_are_the_whole() -> None:
    recovery = recovery_of(KILL, [HIT, AFTER], began=104.0)
    parts = (recovery.detect, recovery.start, recovery.load, recovery.first_step)
    assert parts == (0.5, 4.0, 1.0, 1.0) and recovery.seconds == sum(part or 0 for part in parts)
    assert recovery.lost_steps == 4 and recovery.named is True and recovery.at == about(10.5)
    other = recovery_of(replace(KILL, fault=replace(KILL.fault, rank=0)), [HIT, AFTER], began=104.0)
    assert other.named is False
    # A start that fails in between counts as time, not as a recovery.
    failed = Attempt(116, 2, cause_at=118.0, cause="no port")
    assert recovery_of(KILL, [HIT, failed, AFTER], began=104.0).seconds == recovery.seconds
    assert recovery_of(KILL, [HIT], began=104.0).seconds is None
    text = "\n".join(summary_lines(goodput_of([HIT, AFTER], 1.0), [recovery], ranks=2))
    assert "within 5 s: 1 of 1; the rank named: 1 of 1" in text and "in the same layout" in text


def test_the_report_says_what_is_not_counted_and_why_a_share_is_above_100_percent() -> None:
    kill = recovery_of(KILL, [HIT, AFTER], began=104.0)
    late = replace(kill, kind="stop", detect=5.8)
    text = "\n".join(summary_lines(goodput_of([HIT, AFTER], 1.1), [kill, late], ranks=2))
    assert "within 5 s: 1 of 1 (without stop: a hang shows after monitor.hang_seconds); the rank" in text
    assert "efficiency above 100%: a calm step took longer than a step of the disturbed job" in text
    text = "\n".join(summary_lines(goodput_of([HIT, AFTER], 0.9), [kill], ranks=2))
    assert "without" not in text and "above 100%" not in text


def test_the_picture_has_the_whole_time_in_parts_without_a_gap() -> None:
    parts = list(spans([HIT, Attempt(112, 2), AFTER]))
    assert [part.kind for part in parts] == ["kept", "lost", "detect", "start", "load", "kept"]
    assert parts[0].start == 0 and parts[-1].end == 26
    assert all(first.end == second.start for first, second in pairwise(parts))
    assert (parts[1].start, parts[1].end) == (6, 10)
    picture = chaos_svg("a <title> & more", ["line"], [HIT, AFTER], [recovery_of(KILL, [HIT, AFTER], 104.0)])
    root = ElementTree.fromstring(picture)
    boxes = [box for box in root.iter() if box.tag.endswith("rect") and box.get("class") in ("kept", "lost")]
    # In rows of ten seconds: the last ten steps are in two rows; and the legend.
    assert len(boxes) == 4 + 2 and "kill" in picture and "10.5 s: kill, rank 1" in picture
    ElementTree.fromstring(chaos_svg("no step", [], [Attempt(0, 2)], []))


def test_another_loss_or_a_step_twice_is_not_equal(tmp_path: Path) -> None:
    def write(name: str, *losses: float, first: int = 1) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        text = '{{"step": {}, "loss": {}, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 8}}\n'
        lines = [text.format(first + number, loss) for number, loss in enumerate(losses)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    calm = write("calm", 5.0, 4.0, 3.0)
    assert not compare(write("same", 5.0, 4.0), calm, None, bitwise=True).different
    near = write("near", 5.0, 4.0 + 1e-9)
    assert "step 2" in compare(near, calm, None, bitwise=True).different
    assert not compare(near, calm, None, bitwise=False).different
    assert "step 2" in compare(write("far", 5.0, 4.1), calm, None, bitwise=False).different
    assert "lacks a step" in compare(write("gap", 5.0, 4.0, first=2), calm, None, bitwise=False).different
    before = write("validated before", 5.0, 4.0)
    records = (before / "metrics.jsonl").read_text()
    (before / "metrics.jsonl").write_text('{"step": 0, "validation_loss": 6.0}\n' + records)
    assert compare(before, calm, None, bitwise=True).steps == 2
    assert relative(None, None) == 0 and relative(1.0, None) == float("inf")
    assert step_to_compare(calm, 3) is None
    assert (
        str(Equality(True, 2, None, 0.0, None, ""))
        == "equal to the calm run: 2 steps and no weights, bit for bit"
    )
