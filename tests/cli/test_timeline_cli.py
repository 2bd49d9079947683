"""megalite timeline: its text, picture and events, of fabricated and of real traces; one error for each fault."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megalite.cli import main
from megalite.launcher.control.step_trace import TRACES, step_folder, trace_file
from megalite.topology.schedule_timeline import Costs, ideal_timeline
from megalite.topology.schedules import SCHEDULES
from tests.support.jobs import Job
from tests.support.parity import PICTURE_PERCENT, STAMP_SECONDS, about, read_off
from tests.unit.planner.traced import STEP, played, write_run

SIZE = ("interleaved_zero_bubble", 3, 6, 2)
COSTS = Costs(0.03, 0.06, 0.025, 0.035)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A run folder with the trace of one step."""
    return write_run(tmp_path / "run", played(*SIZE, COSTS))


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    assert main(["timeline", *map(str, arguments)]) == code
    output = capsys.readouterr()
    return output.err if code == 2 else output.out


def test_the_text_has_bubbles_waits_and_phases(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, traced)
    bubble = f"{ideal_timeline(*SIZE, COSTS).bubble:.1%}"
    assert f"step {STEP}: interleaved_zero_bubble, 3 stages of 2 chunks, 6 micro batches" in shown
    assert f"bubble: 5.3% by formula, {bubble} simulated, {bubble} measured" in shown
    assert re.search(
        r"^stage 2 waited 60\.0 ms for stage 1's F0 \(chunk 1\), 0\.0 ms of it after F0 had ended$",
        shown,
        re.M,
    )
    assert re.search(r"^summing the step's totals +[\d,.]+ ms +[\d,.]+ ms rank \d$", shown, re.M)
    assert max(map(len, shown.splitlines())) < 160


def boxes(picture: Path) -> tuple[ElementTree.Element, dict[str, list[ElementTree.Element]]]:
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    named: dict[str, list[ElementTree.Element]] = {}
    for box in root.iter(f"{SVG}rect"):
        # Those of the legend have no title.
        if box.find(f"{SVG}title") is not None:
            named.setdefault(box.attrib["class"], []).append(box)
    return root, named


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_the_picture_has_each_action_in_three_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    size = (name, 2, 4, SCHEDULES[name].default_chunks)
    picture = tmp_path / "picture.svg"
    said(capsys, write_run(tmp_path / "run", played(*size, COSTS)), "--out", picture)
    root, named = boxes(picture)
    timeline = ideal_timeline(*size, COSTS)
    kinds = {action.kind for _, action in timeline.starts}
    assert named.keys() - {"wait"} == kinds
    assert sum(len(named[kind]) for kind in kinds) == 3 * len(timeline.starts)
    assert root.attrib["width"] == "100%" and "viewBox" not in root.attrib
    # Nothing comes from elsewhere, and nothing runs.
    text = picture.read_text()
    assert text.count("http") == 1 and "<script" not in text and "href" not in text
    assert "prefers-color-scheme: dark" in text
    labels = root.attrib["aria-labelledby"].split()
    assert root.attrib["role"] == "img" and [child.attrib.get("id") for child in root[:2]] == labels


def test_boxes_stand_where_their_actions_ran(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, traced)
    _, named = boxes(step_folder(traced / TRACES, STEP) / "timeline.svg")
    timeline = ideal_timeline(*SIZE, COSTS)
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in (each for kind in "FBIW" for each in named.get(kind, [])):
        left, width = (float(box.attrib[side].rstrip("%")) for side in ("x", "width"))
        rows.setdefault(box.attrib["y"], []).append((left, width))
    places = [sorted(rows[y]) for y in sorted(rows, key=float)]
    assert len(places) == 3 * SIZE[1]
    ideal = ideal_timeline(*SIZE).length * 0.03
    scale = (98 - 15) / max(timeline.length, ideal)
    for stage in range(SIZE[1]):
        right = sorted(
            (15 + scale * start, scale * timeline.costs.of(action))
            for (at, action), start in timeline.starts.items()
            if at == stage
        )
        simulated, measured = places[3 * stage + 1 : 3 * stage + 3]
        for row in (simulated, measured):
            assert row == [read_off(place, PICTURE_PERCENT) for place in right]


def test_events_have_a_process_a_stage_and_a_thread_a_rank(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, traced)
    path = step_folder(traced / TRACES, STEP) / "trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    names = {(event["pid"], event["tid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert names == {(n, n, f"{what} {n}") for n in range(3) for what in ("stage", "rank")}
    timeline = ideal_timeline(*SIZE, COSTS)
    ran = {
        (event["pid"], event["name"]): (event["ts"], event["dur"])
        for event in events
        if event.get("cat") == "action"
    }
    assert ran == {
        (stage, f"{action.kind}{action.micro_batch} chunk {action.chunk}"): read_off(
            (start * 1e6, timeline.costs.of(action) * 1e6), 1e6 * STAMP_SECONDS
        )
        for (stage, action), start in timeline.starts.items()
    }
    assert any(event["name"] == "wait for F0 of stage 0" for event in events)


def test_several_pipelines_are_named_by_the_axes_in_which_they_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two context ranks, each of which is a pipeline of one stage; the second one computes for longer."""
    ranks = [
        replace(played("1f1b", 1, 2, 1, costs)[0], rank=rank, world_size=2)
        for rank, costs in enumerate((Costs(0.03, 0.06), Costs(0.04, 0.06)))
    ]
    ranks = [replace(trace, place=trace.place | {"cp": trace.rank}) for trace in ranks]
    folder = write_run(tmp_path / "run", ranks)
    said_of_them = "the slowest of 2 pipelines: cp 1, ranks 1; measured in all: 0.0% to 0.0%"
    assert said_of_them in said(capsys, folder)
    assert said_of_them in (step_folder(folder / TRACES, STEP) / "timeline.svg").read_text()
    pipelines = json.loads(said(capsys, folder, "--json"))["pipelines"]
    assert [pipeline["place"] for pipeline in pipelines] == [{"dp": 0, "cp": at, "tp": 0} for at in (1, 0)]


def test_json_has_all_figures(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(traced.rglob("*"))
    report = json.loads(said(capsys, traced, "--json"))
    assert sorted(traced.rglob("*")) == files, "it writes only with --out"
    [pipeline] = report["pipelines"]
    assert pipeline["bubble"]["measured"] == read_off(ideal_timeline(*SIZE, COSTS).bubble)
    assert pipeline["costs"]["I"]["3"] == read_off(0.025)
    largest = pipeline["waits"][0]
    assert (
        largest["made_by"]["kind"] in "FBI"
        and largest["seconds"] > 0
        and largest["source"] != largest["stage"]
    )


def no_folder(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def no_traces(run: Path) -> None:
    step_folder(run / TRACES, STEP).rename(run / "kept")


def one_rank_missing(run: Path) -> None:
    trace_file(run / TRACES, STEP, 2).unlink()


def first_rank_missing(run: Path) -> None:
    trace_file(run / TRACES, STEP, 0).unlink()


def cut_off(run: Path) -> None:
    path = trace_file(run / TRACES, STEP, 1)
    path.write_text(path.read_text()[:300])


def changed(name: str, value: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = trace_file(run / TRACES, STEP, 1)
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, name: value}))

    return change


def an_action_less(run: Path) -> None:
    rank = played(*SIZE, COSTS)[1]
    replace(rank, actions=rank.actions[:-1]).write(run / TRACES)


def of_another_run(run: Path) -> None:
    other = played("interleaved_zero_bubble", 3, 9, 2, COSTS)[1]
    other.write(run / TRACES)


NOTHING = ["RUN: ", "--monitor.trace_steps '[10, 11]'"]
AGAIN = "train that step again with monitor.trace_steps"
FAULTS: list[tuple[Callable[[Path], None], list[str], list[str]]] = [
    (no_folder, [], [*NOTHING, "no such folder"]),
    (no_traces, [], [*NOTHING, "has no traces"]),
    (lambda _: None, ["--step", "8"], ["--step: step 8 was not traced; use one of 7, or train with"]),
    (one_rank_missing, [], ["step-000007: 1 of 3 ranks left no trace: rank-00002.json; copy", AGAIN]),
    (first_rank_missing, [], ["step-000007/rank-00000.json: the file is missing", AGAIN]),
    (cut_off, [], ["step-000007/rank-00001.json: is not a trace of this version", "delete it", AGAIN]),
    (changed("actions", 3), [], ["rank-00001.json: is not a trace of this version", AGAIN]),
    (changed("schedule", "2f2b"), [], ["rank-00001.json: is not a trace of this version", AGAIN]),
    (changed("place", {"pp": 9}), [], ["rank-00001.json: is not a trace of this version", AGAIN]),
    (changed("waits", [["F", 0, 0, 0, 1]]), [], ["rank-00001.json: waits for a message that", AGAIN]),
    (an_action_less, [], ["rank-00001.json: has 35 actions where", "has 36, the first 35 alike", AGAIN]),
    (of_another_run, [], ["rank-00001.json: is the trace of another run than rank 0's", AGAIN]),
    (
        lambda _: None,
        ["--out", "/nowhere/a.svg"],
        ["--out: /nowhere/a.svg cannot be written", "name another"],
    ),
    (lambda _: None, ["--out", "a.png"], ["--out: a.png does not end in .svg", "use a.svg"]),
    (lambda _: None, ["--out", "/"], ["--out: / does not end in .svg", "use /timeline.svg"]),
]


@pytest.mark.parametrize(("fault", "options", "words"), FAULTS)
def test_one_clear_error(
    traced: Path,
    capsys: pytest.CaptureFixture[str],
    fault: Callable[[Path], None],
    options: list[str],
    words: list[str],
) -> None:
    fault(traced)
    error = said(capsys, traced, *options, code=2)
    assert error.count("\n") == 2 and "has 1 problem" in error, error
    assert all(word in error for word in words), error


@pytest.mark.extended
def test_a_real_run_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job.write(tmp_path, tensor=2, pipeline=2)
    job.run_file.write_text(
        job.run_file.read_text().replace("num_hidden_layers = 3", "num_hidden_layers = 4")
    )
    run = tmp_path / "run"
    flags = (
        "--parallel.schedule",
        "interleaved_1f1b",
        "--parallel.virtual_stages",
        "2",
        "--training.steps",
        "4",
    )
    job.run(run, *flags, "--monitor.trace_steps", "[2, 3]", "--deepspeed.zero_optimization.stage", "0")
    shown = said(capsys, run)
    assert "step 3: interleaved_1f1b, 2 stages of 2 chunks, 8 micro batches" in shown
    # Step 3 saves a checkpoint.
    for phase in (
        "forward and backward",
        "summing the step's totals",
        "updating the weights",
        "saving a checkpoint",
    ):
        assert re.search(rf"^{phase} +[\d,.]+ ms", shown, re.M), shown
    _, named = boxes(step_folder(run / TRACES, 3) / "timeline.svg")
    assert {kind: len(named[kind]) for kind in "FB"} == {"F": 3 * 8 * 4, "B": 3 * 8 * 4}
    report = json.loads(said(capsys, run, "--step", "2", "--json"))
    assert sorted(pipeline["ranks"] for pipeline in report["pipelines"]) == [[0, 2], [1, 3]]
    for pipeline in report["pipelines"]:
        bubble = pipeline["bubble"]
        assert bubble["formula"] == about(1 / 17) and 0 < bubble["simulated"] < bubble["measured"] < 1
    assert "step 9 was not traced; use one of 2, 3, or" in said(capsys, run, "--step", "9", code=2)
