"""megalite report: the data and the page of whole, damaged, old and long run folders."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from megalite.config.load import load_run
from megalite.config.output.summary import context_line
from megalite.config.output.write import write_resolved
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.report.curves import RunCurves, charts_of, curve_table
from megalite.topology.schedule_timeline import Costs
from tests.cli.test_top_cli import fail, line, save, write_run
from tests.support.parity import about
from tests.support.tiny_run import SETTINGS
from tests.unit.planner.traced import played
from tests.unit.planner.traced import write_run as write_traces

START = {
    "time": 1.7e9,
    "step": 0,
    "device": "cpu",
    "host": "n0",
    "megalite": "0.1.0",
    "operators": "fused (here)",
}


def resolved_run(folder: Path, **changes: Any) -> Path:
    """Write the run.toml and three records of a run of two stages; changes: settings, with _ for the dot."""
    settings = {**SETTINGS, "data.source": "text", "parallel.pipeline": 2, "optimizer.learning_rate": 0.02}
    settings |= {
        "run.folder": folder,
        **{name.replace("_", ".", 1): value for name, value in changes.items()},
    }
    config = load_run(None, [f"--{name}={value}" for name, value in settings.items()]).config
    write_resolved(config, folder / "run.toml")
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, 4))))
    return folder


def report(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    assert main(["report", *map(str, arguments)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def data_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(report(capsys, *arguments, "--json"), parse_constant=refused)


def test_the_page_lies_in_the_first_run_and_needs_nothing_from_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = resolved_run(tmp_path / "a"), resolved_run(tmp_path / "b", optimizer_learning_rate=0.05)
    assert report(capsys, first, second) == f"report  {first / 'report.html'}\n"
    page = (first / "report.html").read_text()
    for source in ("src=", "href='http", 'href="http', "@import", "url(", "fetch("):
        assert source not in page
    assert "default-src 'none'" in page and not (second / "report.html").exists()
    assert {path.name for path in second.iterdir()} == {"run.toml", "metrics.jsonl"}


def test_the_data_has_differences_origins_layout_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = resolved_run(tmp_path / "a"), resolved_run(tmp_path / "b", optimizer_learning_rate=0.05)
    start = START | {"origins": {"optimizer.learning_rate": "--optimizer.learning_rate"}}
    (first / "starts.jsonl").write_text(json.dumps(start) + "\n")
    data = data_of(capsys, first, second)
    assert data["differences"] == {"optimizer.learning_rate": ["0.02", "0.05"]}
    [recorded, unrecorded] = data["runs"]
    origins = {
        key: recorded["origins"][key]
        for key in ("optimizer.learning_rate", "optimizer.eps", "model.head_dim")
    }
    assert origins == {
        "optimizer.learning_rate": "--optimizer.learning_rate",
        "optimizer.eps": "default",
        "model.head_dim": "derived",
    }
    assert unrecorded["origins"]["optimizer.learning_rate"] == "set or derived"
    assert unrecorded["origins"]["optimizer.eps"] == "default"
    assert recorded["layout"]["layers"] == [[0, 1], [2, 3]] and recorded["layout"]["ranks"] == 2
    config = load_run(first / "run.toml").config
    predicted = largest_rank(PlannedRun.of(config, config.model.vocab_size, on_cpu=True))
    assert recorded["memory"]["peak"] == predicted.peak and recorded["memory"]["weights"] == predicted.weights
    assert [run["name"] for run in data["runs"]] == ["a", "b"] and recorded["records"] == 3


def test_the_layout_says_how_ranks_share_sequences_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolved_run(tmp_path / "a", parallel_context=2)
    report(capsys, folder)
    page = (folder / "report.html").read_text()
    assert "rank 1: cp 1" in page
    assert f"<p>context: {context_line(load_run(folder / 'run.toml').config)}</p>" in page
    plain = resolved_run(tmp_path / "b")
    report(capsys, plain)
    assert "<p>context: " not in (plain / "report.html").read_text()


def test_alarms_checkpoints_and_restarts_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolved_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            line(4, loss_spike=3.25)
            + line(5, loss=None, validation_loss=None, checkpoint_step=4, checkpoint_write_seconds=0.75)
        )
    (folder / "starts.jsonl").write_text(
        "".join(json.dumps(START | {"step": step}) + "\n" for step in (0, 4))
    )
    save(folder, "step-000004")
    (folder / "checkpoints" / "latest").write_text("step-000004\n")
    fail(folder, 0.0)
    report(capsys, folder)
    page = (folder / "report.html").read_text()
    for text in (
        "loss or gradient was not finite in step 5",
        "the loss was a spike in 1 step (4); the largest, 3.2500 above the running median, at step 4",
        "too hot",
        "lost (a consequence of another rank&#39;s end)",
        "started 2 times, the last ones again after step 4",
        "0.75 s",
        "fused (here)",
    ):
        assert text in page, text
    [run] = data_of(capsys, folder)["runs"]
    assert run["checkpoints"][0]["marks"] == ["latest"] and run["state"] == "failed"


def test_a_trace_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_traces(tmp_path / "run", played("1f1b", 2, 4, 1, Costs()))
    (folder / "metrics.jsonl").write_text(line(1))
    report(capsys, folder)
    page = (folder / "report.html").read_text()
    assert page.count("<template shadowrootmode") == 1 and "bubble: " in page
    next(folder.rglob("rank-*.json")).write_text("{")
    report(capsys, folder)
    page = (folder / "report.html").read_text()
    assert "<template" not in page and "the timeline cannot be drawn: " in page


NO_CURVES, REFUSED = "there are no curves", "refuses run.toml"
# File, its content, and the words of the page about it; "" where nothing is missing.
DAMAGES = [
    ("metrics.jsonl", "", NO_CURVES),
    ("metrics.jsonl", '{"step": 1', NO_CURVES),
    ("metrics.jsonl", "\x00\xff", NO_CURVES),
    ("metrics.jsonl", '{"step": 2, "loss": []}\n[1]\n', "2 damaged lines"),
    ("metrics.jsonl", f'{{"step": {10**30}, "loss": 1e308, "tokens": null, "mfu": 1e308}}\n', ""),
    ("run.toml", "", "has no settings"),
    ("run.toml", "[run\n", "run.toml cannot be read"),
    ("run.toml", "[training]\nsteps = 'many'\n", REFUSED),
    ("run.toml", "[later]\nsetting = 1\n", REFUSED),
    ("starts.jsonl", "", ""),
    ("starts.jsonl", '{"time": 1, "step": 2, "origins": 3, "packages": []}\n', ""),
    ("starts.jsonl", "{}\n", "line 1 of starts.jsonl is damaged"),
    (
        "starts.jsonl",
        '{"time": 1, "step": 2}\n{"time": 1e300, "step": NaN}\n',
        "line 2 of starts.jsonl is damaged",
    ),
    ("starts.jsonl", '{"time": 1e300, "step": 1}\n', ""),
    ("starts.jsonl", "\xff\n", "starts.jsonl cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGES)
def test_a_damaged_file_leaves_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, words: str
) -> None:
    folder = resolved_run(tmp_path / "run")
    (folder / name).write_bytes(content.encode("latin-1"))
    report(capsys, folder)
    page = (folder / "report.html").read_text()
    assert "<h1>Report: run</h1>" in page and words in page
    [run] = data_of(capsys, folder)["runs"]
    assert bool([*run["notes"], *run["alarms"]]) == bool(words)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "run.toml", "starts.jsonl", "checkpoints", "export", "failures"]
)
def test_a_folder_in_place_of_a_file_or_a_file_in_place_of_a_folder_leaves_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = resolved_run(tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    if "." in name:
        (folder / name).mkdir()
    else:
        (folder / name).write_text("no folder")
    report(capsys, folder)
    assert (folder / "report.html").read_text().count("</html>") == 1


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", 0)
    report(capsys, folder)
    page = (folder / "report.html").read_text()
    assert "preparing" in page and "there are no curves" in page and 'id="charts"' not in page


def test_records_of_an_older_version_have_the_curves_that_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", 0)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n')
    [run] = data_of(capsys, folder)["runs"]
    assert run["curves"] == {
        "step": [1, 2],
        "tokens": None,
        "seconds": None,
        "curves": {"loss": [[0, 1], [2.5, 2.25]]},
    }


def test_names_with_markup_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "<script>alert(1)<\N{FRACTION SLASH}script>", 2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(3, **{"</script><b>": 1.0}))
    report(capsys, folder)
    page = (folder / "report.html").read_text()
    assert "<script>alert" not in page and page.count("</script>") == 2 and "<b>" not in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "is not a folder"),
        (["."], "has no run"),
        (["run", "--output", "absent/page.html"], "cannot be"),
    ],
)
def test_a_refusal_names_a_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run":
        write_run(tmp_path / "run", 1)
    error = report(capsys, *arguments, code=2)
    assert said in error and "name " in error


def test_long_curves_keep_their_extremes_and_gaps_and_the_page_stays_small() -> None:
    curves, steps = RunCurves(), 100_000
    special = {1: 9.0, 33_333: 7.5, 66_666: 0.5, 77_777: None, steps: 3.5}
    for step in range(1, steps + 1):
        loss = special.get(step, 2.0 + math.sin(step) / 4)
        curves.add({"step": step, "loss": loss, "tokens": 10 * step, "step_seconds": 0.5})
    charts, left_out = charts_of([curves])
    [table] = curve_table(charts, [curves])
    rows, values = table["curves"]["loss"]
    shown = dict(zip([table["step"][row] for row in rows], values, strict=True))
    assert not left_out and {step: shown[step] for step in special} == special
    # Between them, in every thousandth, the lowest and the highest.
    assert min(value for value in values if value) == 0.5 and len(values) < 1300
    place = table["step"].index(33_333)
    assert table["tokens"][place] == 333_330 and table["seconds"][place] == about(33_333 / 2)
    assert len(json.dumps(table)) < 200_000


def test_many_layers_are_thinned_more_than_other_curves_and_the_rest_is_named() -> None:
    curves = RunCurves()
    for step in range(1, 3001):
        layers = (
            {f"grad_norm/layers.{layer}": layer + 1 / step for layer in range(500)} if step % 3 == 0 else {}
        )
        curves.add({"step": step, "loss": 1 / step, **layers})
    charts, left_out = charts_of([curves])
    [table] = curve_table(charts, [curves])
    assert [chart.title for chart in charts] == ["loss", "gradient norm of each layer"]
    assert left_out[-1] == "grad_norm/layers.499" and len(left_out) + len(charts[1].metrics) == 500
    points = {metric: len(rows) for metric, (rows, _) in table["curves"].items()}
    assert points["loss"] > 5 * points["grad_norm/layers.0"] > 100
    assert len(json.dumps(table)) < 1_000_000


def test_the_measures_of_ranks_and_cards_are_drawn() -> None:
    curves = RunCurves()
    communication = {
        "communication_share": 0.25,
        "communication_share_max": 0.5,
        "communication_share/data": 0.2,
    }
    cards = {"card_utilisation": 0.9, "cards_watts": 700.0, "card_celsius_max": 60.0}
    curves.add({"step": 1, "loss": 2.0, **communication, **cards, "alarm": "rank 1 is slow"})
    charts, _ = charts_of([curves])
    [table] = curve_table(charts, [curves])
    shown = {metric: values for metric, (_, values) in table["curves"].items()}
    percent = {metric: [100 * share] for metric, share in communication.items()}
    others = {"card_utilisation": [90.0], "cards_watts": [700.0], "card_celsius_max": [60.0]}
    assert shown == {"loss": [2.0], **percent, **others}


def test_the_load_of_experts_is_drawn_over_steps_and_for_each_layer() -> None:
    curves = RunCurves()
    for step in range(1, 5):
        layers = {f"expert_load/layers.{layer}": 1.5 + layer for layer in (1, 3)} if step % 2 == 0 else {}
        curves.add({"step": step, "expert_load": 4.5, "idle_experts": 2.0, **layers})
    charts, left_out = charts_of([curves])
    assert [(chart.title, [*chart.metrics]) for chart in charts] == [
        ("fullest expert over the mean", ["expert_load"]),
        ("idle experts", ["idle_experts"]),
        ("fullest expert over the mean of each layer", ["expert_load/layers.1", "expert_load/layers.3"]),
    ]
    assert not left_out
