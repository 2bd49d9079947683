"""The GPU suite on a machine without one: it checks the CPU's twins, sees planted faults, and claims nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_suite
from benchmarks.gpu import checks, decoding, jobs, operators, parity, prediction, tables, training
from benchmarks.gpu.operators import OPERATORS, Operator
from megalite.cli import main as megalite
from megalite.launcher.process import available_cores
from megalite.ops.choice import COMPILED
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.selftest.registry import Entry, compiled
from megalite.train.step import calibrate
from megalite.train.step.calibrate import MeasuredMachine
from tests.support.faulty_operators import WrongGradient, unsteady, unwritten
from tests.support.kernels import needs_library
from tests.support.ranks import RankPool
from tests.unit.planner.calibrated import PROBES

ROOT = Path(__file__).parents[3]


def doubled(
    form: Callable[[Tensor], Tensor], *needs: str, name: str = "doubled", gradients: int = 1
) -> Operator:
    """An operator that doubles, by this form."""
    entry = Entry(
        name=name,
        operator="norm",
        make=lambda shape, dtype, random: [random(*shape)],
        candidates={COMPILED: compiled(*needs)},
        plain=lambda x: x + x,
        form_of=lambda operators: form,
        gradients=gradients,
        shapes=((4, 5), (300, 7)),
    )
    return Operator(entry, timed=(4, 5))


DOUBLED = doubled(lambda x: 2 * x, "sum_of_squares")


def suite(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_suite", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@needs_library
@pytest.mark.extended
def test_every_operator_is_right_on_the_cpu(tmp_path: Path) -> None:
    run = suite("--device", "cpu", "--parts", "checks", "--results", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    [path] = tmp_path.glob("*-gpu-suite-cpu.json")
    report = json.loads(path.read_text())
    assert not report["failed"] and [row["part"] for row in report["parts"]] == ["checks"]
    found = {
        (row["operator"], row["dtype"]) for row in report["checks"] if row["right"] and row["equal_repeats"]
    }
    assert found == {(each.name, str(dtype)[6:]) for each in OPERATORS for dtype in each.dtypes}
    assert (tmp_path / "gpu.md").read_text() == gpu_suite.markdown(report) == run.stdout.removesuffix("\n")


@pytest.mark.extended
def test_the_smoke_jobs_commands_do_what_it_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_this_process(*words: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
        code = megalite(words)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    monkeypatch.setattr(jobs, "megalite", in_this_process)
    rows = list(jobs.smoke(tmp_path, "cpu"))
    assert [row["step"] for row in rows] == list(jobs.SMOKE_STEPS) and all("said" in row for row in rows)


@pytest.mark.slow
def test_the_smoke_job_runs_on_the_cpu(tmp_path: Path) -> None:
    run = suite("--device", "cpu", "--parts", "smoke", "--results", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    [path] = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["smoke"]
    assert [row["step"] for row in rows] == list(jobs.SMOKE_STEPS) and all(row["said"] for row in rows)
    assert "| smoke | done |" in run.stdout and "16 tokens in" in run.stdout


@pytest.mark.slow
@needs_library
def test_training_with_chosen_operators_is_like_plain_torch(tmp_path: Path) -> None:
    run = suite("--device", "cpu", "--parts", "fused", "--results", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.count("of plain torch's") == len(jobs.OPTIONS)


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    run = suite("--device", "cpu", "--parts", "ranks", "--results", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    [path] = tmp_path.glob("*.json")
    rows = {row["step"]: row for row in json.loads(path.read_text())["ranks"]}
    assert all("of one rank's" in rows[name]["said"] for name in jobs.ON_CPU)
    assert rows["tensor 2, data 2"]["left_out"] == "needs 4 cards, 2 are here"


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    run = suite()
    assert run.returncode == 2 and run.stderr.startswith("no GPU: ") and not run.stdout


def test_the_tables_in_the_repository_are_the_suites_own() -> None:
    reports = sorted((ROOT / "benchmarks" / "results").glob("*-gpu-suite-*.json"))
    report = json.loads(reports[-1].read_text()) if reports else {}
    text = (ROOT / "benchmarks" / "results" / "gpu.md").read_text()
    assert text == gpu_suite.markdown(report), "run python -m benchmarks.gpu_suite (--skeleton without a GPU)"
    assert report or text.count(gpu_suite.NOT_MEASURED) > 2 * len(OPERATORS)
    if report:
        page = gpu_suite.PERFORMANCE.read_text()
        assert page == tables.with_summary(page, report), "run python -m benchmarks.gpu_suite --read"


@pytest.mark.parametrize(
    ("form", "gradients", "right"),
    [
        (lambda x: 2 * x, 1, True),
        (lambda x: 2.001 * x, 1, False),
        (lambda x: (2 * x).masked_fill(x > 2, torch.nan), 0, False),
        (unwritten, 0, False),
        (unsteady, 0, False),
        (WrongGradient.apply, 1, False),
    ],
    ids=["right", "off by a thousandth", "not a number", "unwritten", "unsteady", "wrong gradient"],
)
def test_a_planted_fault_is_seen(form: Callable[[Tensor], Tensor], gradients: int, right: bool) -> None:
    planted = doubled(form, gradients=gradients)
    rows = [checks.check(planted, (300, 7), dtype, "cpu") for dtype in (torch.float32, torch.bfloat16)]
    assert rows[0]["right"] == right
    if right:
        assert rows[1]["right"]


@needs_library
def test_what_would_be_left_to_torch_is_not_right() -> None:
    left = compiled("sum_of_squares", why_not=lambda inputs: f"not for {inputs[0].shape[1]} columns")
    planted = replace(DOUBLED, entry=replace(DOUBLED.entry, candidates={COMPILED: left}))
    with pytest.raises(LookupError, match="not for 7 columns"):
        checks.check(planted, (300, 7), torch.float32, "cpu")


@needs_library
def test_an_operator_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    lacking = doubled(lambda x: 2 * x, "of_another_library", name="lacking")
    listed = [doubled(broken, name="broken"), lacking, DOUBLED]
    monkeypatch.setattr(operators, "OPERATORS", listed)
    path = tmp_path / "checks.json"
    assert gpu_suite.main(["--device", "cpu", "--part", "checks", str(path)]) == 1
    rows = {row["operator"]: row for row in json.loads(path.read_text())["rows"] if row["dtype"] == "float32"}
    assert rows["broken"]["failed"] == "RuntimeError: no such kernel"
    assert "of_another_library" in rows["lacking"]["failed"] and rows["doubled"]["right"]


ENDINGS = {
    "smoke": ("raise SystemExit(3)", "it ended before it wrote anything"),
    "ranks": ("os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
    "selftest": ("time.sleep(60)", "stopped after its 1 s"),
    "checks": ("", ""),
}


def test_a_part_that_ends_badly_keeps_its_rows_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command_of(name: str, file: Path, options: Any) -> list[str]:
        ending = ENDINGS.get(name, ("", ""))[0]
        row = {"step": "first", "said": "done", "operator": "none", "dtype": "none"}
        written = json.dumps({"rows": [row], "failed": ""})
        if name != "smoke":  # here: a busy machine may not start the part within its second
            file.write_text(written)
        return [sys.executable, "-c", f"import os, time\n{ending}"]

    monkeypatch.setattr(gpu_suite, "command_of", command_of)
    monkeypatch.setattr(gpu_suite, "LEAST_SECONDS", 0)
    monkeypatch.setitem(gpu_suite.PARTS, "selftest", replace(gpu_suite.PARTS["selftest"], seconds=1))
    assert gpu_suite.main(["--device", "cpu", "--parts", *ENDINGS, "--results", str(tmp_path)]) == 1
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert {row["part"]: row["failed"] for row in report["parts"]} == {
        name: reason for name, (_, reason) in ENDINGS.items()
    }
    assert report["smoke"] == [] and len(report["ranks"]) == len(report["selftest"]) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "| selftest | FAILED | 1 | unknown | stopped after its 1 s |" in text


def test_when_the_time_is_over_the_rest_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_suite, "command_of", lambda *given: [sys.executable, "-c", ""])
    gpu_suite.main(["--device", "cpu", "--parts", "smoke", "--seconds", "1"])
    assert "| the suite's time was over |" in capsys.readouterr().out


def test_a_part_without_its_packages_is_left_out_with_what_to_carry(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    # As on a machine where it is not installed: found nowhere.
    (hidden / "sitecustomize.py").write_text(
        "import sys\nsys.modules['cupy'] = sys.modules['tokenizers'] = None\n"
    )
    words = ["--device", "cpu", "--parts", "smoke", "queues", "training", "checks", "--operators", "^none$"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_suite", *words, "--results", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(hidden)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    left_out = {row["part"]: row["left_out"] for row in report["parts"]}
    said = "needs tokenizers, which is not installed here (carry wheels:"
    assert said in left_out["smoke"] and said in left_out["training"]
    assert "needs cupy-cuda13x" in left_out["queues"] and not left_out["checks"]
    assert run.returncode == 0 and report["missing"] == ["cupy-cuda13x", "tokenizers"], run.stderr[-2000:]


def report_of(chip: str, **parts: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [{"part": name, "seconds": 1, "failed": "", "left_out": ""} for name in parts]
    facts = {
        "date": "2026-01-02",
        "chip": chip,
        "torch": "2.11.0",
        "commit": "0" * 40,
        "seconds": 1,
        "failed": {},
    }
    return facts | {"parts": rows} | parts


def test_reports_are_read_back_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = {"kernels": "reference", "step_seconds": 0.5, "tokens_per_second": 9}
    files = []
    for number, report in enumerate(
        [
            report_of("A chip", ceilings=[{"ceiling": "copy", "per_second": 1e12}], training=[row]),
            report_of("A chip", training=[row | {"tokens_per_second": 7}], decoding=[]),
        ]
    ):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(report))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables.BEGINNING}\nold\n{tables.END}\nafter\n")
    monkeypatch.setattr(gpu_suite, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu_suite, "PERFORMANCE", page)
    assert gpu_suite.main(["--read", *map(str, files)]) == 0
    [path] = (tmp_path / "results").glob("*-gpu-suite-a-chip.json")
    whole = json.loads(path.read_text())
    assert [part["part"] for part in whole["parts"]] == ["ceilings", "training", "decoding"]
    assert whole["training"][0]["tokens_per_second"] == 7 and whole["seconds"] == 2
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| reference | 0.5 | 7 |" in text
    with pytest.raises(ValueError, match="different chip: A chip, Another"):
        gpu_suite.joined([report_of("A chip"), report_of("Another")])
    with pytest.raises(ValueError, match=r"different torch: 2\.11\.0, 2\.13\.0"):
        gpu_suite.joined([report_of("A chip"), report_of("A chip") | {"torch": "2.13.0"}])


def test_a_report_read_back_keeps_what_failed_before_its_first_row() -> None:
    report = report_of("A chip", smoke=[], training=[], parity=[])
    report["failed"] = {"facts": "no nvcc"}
    report["parts"][1]["failed"] = "stopped after its 110 s"
    report["parts"][2]["left_out"] = "needs deepspeed"
    whole = gpu_suite.joined([report])
    assert whole["failed"] == {"facts": "no nvcc", "training": "stopped after its 110 s"}
    assert [(part["part"], part["left_out"]) for part in whole["parts"]] == [
        ("smoke", ""),
        ("training", ""),
        ("parity", "needs deepspeed"),
    ]


def test_a_report_without_facts_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first step may crash: the parts after it are kept all the same, and a page keeps the figures that it had."""
    page = tmp_path / "page.md"
    page.write_text(f"{tables.BEGINNING}\nold\n{tables.END}\n")
    monkeypatch.setattr(gpu_suite, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_suite, "PERFORMANCE", page)
    report = {
        name: value
        for name, value in report_of("unknown", smoke=[]).items()
        if name not in ("torch", "commit")
    }
    gpu_suite.write(report, tmp_path)
    assert "old" in page.read_text() and "| smoke | done |" in (tmp_path / "gpu.md").read_text()
    gpu_suite.write(report | {"training": [{"kernels": "reference"}]}, tmp_path)
    assert "torch unknown" in page.read_text()


def compared_with_the_cpu(folder: Path, names: tuple[str, ...], wrong: bool) -> list[dict[str, Any]]:
    """The rows of `parity` on this rank of a process group, which it would make itself."""
    with (
        mock.patch.object(parity, "join"),
        mock.patch.object(parity, "run", (lambda *given: [1.0] * 4) if wrong else parity.run),
    ):
        return list(parity.parity("cpu", folder, names))


@needs_library
@pytest.mark.extended
def test_training_on_a_device_is_compared_with_the_cpu_in_float64(ranks: RankPool, tmp_path: Path) -> None:
    names = ("AdamW", "compiled, AdamW")
    [rows] = ranks.run(compared_with_the_cpu, folder=tmp_path, names=names, wrong=False)
    assert [row["dtype"] for row in rows] == ["float64", "float32", "bfloat16"]
    assert all(row["right"] for row in rows) and rows[0]["apart"] == 0 < rows[1]["apart"] < rows[2]["apart"]
    [rows] = ranks.run(compared_with_the_cpu, folder=tmp_path, names=names, wrong=True)
    assert len(rows) == 3 and not any(row["right"] for row in rows)


class Commands:
    """megalite, of which each training writes these losses in turn."""

    def __init__(self, *runs: list[float]):
        self.runs = list(runs)

    def __call__(self, *words: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
        run = Path(words[words.index("--run.folder") + 1])
        run.mkdir(parents=True)
        records = [
            {"loss": loss, "grad_norm": 1, "tokens_per_second": 1, "memory_bytes": 1, "validation_loss": 1}
            for loss in self.runs.pop(0)
        ]
        for record in records[: len(records) - jobs.STEPS // jobs.SAVED_AT]:
            del record["validation_loss"]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return subprocess.CompletedProcess([], 0, "", "")


FALLING = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("losses", "device", "said"),
    [
        (FALLING[::-1], "cpu", "the loss did not fall"),
        ([8.0, float("nan"), *FALLING[2:]], "cpu", "the loss did not fall"),
        (FALLING[:7], "cpu", "8 steps and 2 validations were asked for"),
        (FALLING, "cuda", "the run was not on a cuda device"),
    ],
    ids=["rising", "not a number", "a step short", "on the CPU instead"],
)
def test_the_smoke_job_sees_a_run_that_went_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, losses: list[float], device: str, said: str
) -> None:
    monkeypatch.setattr(jobs, "megalite", Commands(losses))
    rows = list(jobs.smoke(tmp_path, device))
    assert len(rows) == 1 and said in rows[0]["failed"]


def test_the_smoke_job_sees_a_resume_that_went_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jobs, "megalite", Commands(FALLING, [4.0, 3.0, 2.0, 1.001]))
    rows = {row["step"]: row for row in jobs.smoke(tmp_path, "cpu")}
    assert "said" in rows["train, validate, save"] and "(1.0, 1.001)" in rows["resume"]["failed"]


@pytest.mark.parametrize(
    ("output", "errors", "code", "reason"),
    [
        ("norm  right\n", "", 0, ""),
        ("norm  wrong\n", "", 1, "StepError: an operator is wrong, crashed or hung: see its line"),
        ("", "error: no device\n", 1, "StepError: error: no device"),
    ],
)
def test_the_selftests_lines_are_kept_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, errors: str, code: int, reason: str
) -> None:
    ended = subprocess.CompletedProcess([], code, output, errors)
    monkeypatch.setattr(jobs, "megalite", lambda *words, **limits: ended)
    assert gpu_suite.main(["--device", "cpu", "--part", "selftest", str(tmp_path / "file")]) == code
    told = json.loads((tmp_path / "file").read_text())
    assert [row["said"] for row in told["rows"]] == output.splitlines() and told["failed"] == reason


def test_layouts_that_differ_from_one_rank_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jobs, "megalite", Commands(FALLING, FALLING, [*FALLING[:7], 1.001], FALLING))
    rows = {row["step"]: row for row in jobs.ranks(tmp_path, "cpu", 2)}
    assert "by more than 1e-04" in rows["pipeline 2"]["failed"]
    assert "said" in rows["tensor 2"] and "said" in rows["data 2"]
    monkeypatch.setattr(jobs, "megalite", Commands(FALLING, [8.1, *FALLING[1:]], *[FALLING] * 4))
    (tmp_path / "fused").mkdir()
    chosen = list(jobs.fused(tmp_path / "fused", "cpu"))
    assert "by more than 1e-02: losses 8.1000" in chosen[0]["failed"] and "said" in chosen[1]
    assert list(jobs.ranks(tmp_path, "cuda", 1)) == [{"step": "all layouts", "left_out": "one card is here"}]


def test_the_tables_show_what_was_measured() -> None:
    name, peer = OPERATORS[0].name, {"F.rms_norm": 0.2, "torch.compile": "RuntimeError: none"}
    times = {"operator": name, "direction": "backward", "dtype": "bfloat16", "shape": "4x5", "ms": 0.1}
    report = {
        "date": "2026-01-02",
        "chip": "A chip",
        "torch": "2.11.0",
        "commit": "0" * 40,
        "built": "built",
        "seconds": 7,
        "failed": {"scaling": "OSError: no"},
        "ceilings": [{"ceiling": "copy", "what": "", "per_second": 4.3e12}],
        "times": [times | {"per_second": 2.15e12, "unit": "B/s", "share": 0.5, "peers_ms": peer}],
    }
    text = gpu_suite.markdown(report)
    assert (
        f"| {name}, 4x5 | backward | 0.1 (2.15 TB/s) | 50% | 75% | F.rms_norm: 0.2; torch.compile: Runtime"
        in text
    )
    assert "copy, TB/s, read and written | 4.30 |" in text and "**scaling failed**: OSError: no" in text
    assert "product, TFLOP/s, bf16 | not measured |" in text


def test_the_decoding_part_generates() -> None:
    rows = list(decoding.decoding("cpu", tokens=2))
    assert [(row["way"], row["requests"]) for row in rows] == [
        *(("megalite", requests) for requests, _ in decoding.WAYS),
        ("transformers", 1),
        ("transformers", 16),
    ]
    assert all(row["ms"] > 0 and row["profile"][0]["launches"] > 0 for row in rows[: len(decoding.WAYS)])


def test_the_training_part_trains() -> None:
    row = training.train("reference", device="cpu", product=None, tiny=True)
    assert row["tokens"] == 2 * 2 * 32 and row["tokens_per_second"] > 0 and "mfu" not in row


def test_the_planner_is_compared_with_training() -> None:
    plain, adapter = prediction.prediction("cpu", ("Llama, plain torch", "Llama, LoRA"))
    for row in (plain, adapter):
        assert row["predicted_bytes"] > 0 and row["step_seconds"] > 0 and "predicted_seconds" not in row
    # An adapter's weights alone have gradients and moments.
    assert 0 < 4 * adapter["kinds"]["moments"] < plain["kinds"]["moments"]
    peak, step = f"{plain['peak_bytes'] / 2**30:.2f}", plain["step_seconds"]
    calibrated = {"case": prediction.CALIBRATION, "calibrated": {plain["case"]: 2 * step}}
    report = {"date": "2026-01-02", "chip": "CPU", "seconds": 1, "prediction": [plain, calibrated]}
    [line] = [line for line in gpu_suite.markdown(report).splitlines() if line.startswith("| Llama, plain")]
    assert line.startswith(f"| Llama, plain torch | {peak} |") and line.endswith(f"| {2 * step} | +100.0% |")


def test_a_calibration_predicts_the_cases_once_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "this_machine", lambda: MeasuredMachine(False, "cpu", 1, 2**34, {1: True}))
    config = prediction.case_config(prediction.CASES["Llama, plain torch"], tiny=True)
    runs = {"tiny": PlannedRun.of(config, int(config.model.vocab_size), on_cpu=True, plain_torch=True)}
    threads = torch.get_num_threads()
    try:
        found = prediction.calibrated(runs, config, PROBES)
    finally:
        torch.set_num_threads(threads)
    assert found["calibrated"]["tiny"] > 0 and found["calibration"]["machine"]


@pytest.mark.parametrize("name", prediction.CASES)
def test_every_case_of_the_planner_fits_the_card(name: str) -> None:
    config = prediction.case_config(prediction.CASES[name], tiny=False)
    memory = largest_rank(PlannedRun.of(config, int(config.model.vocab_size)))
    assert 2**32 < memory.peak < 60 * 2**30


def test_a_case_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prediction.CASES, "no such optimizer", {"optimizer.name": "none"})
    failed, _ = prediction.prediction("cpu", ("no such optimizer", "Llama, LoRA"))
    assert failed["failed"].startswith("ConfigError")
    text = gpu_suite.markdown({"date": "2026-01-02", "chip": "CPU", "seconds": 1, "prediction": [failed]})
    assert "| no such optimizer | ConfigError" in text


def test_every_layout_has_its_ranks() -> None:
    assert all(layout.world_size == ranks for ranks, layout in training.LAYOUTS.items())
    assert list(training.LAYOUTS) == [1, 2, 4, 8, 16]
    rows = training.scaling(most=0)
    assert [row["left_out"] for row in rows] == [f"this machine has {available_cores()} cores"] * 5
