"""Reports of the share of peak FLOP/s and of memory, for a device that is only named."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.cli.run_status import RunFolderReader
from megalite.config.load import load_run
from megalite.launcher.rank.detect import RankInfo
from megalite.monitor.jsonl import read_metrics
from megalite.monitor.memory import MemoryUse
from megalite.monitor.metrics import AT_THE_START, is_own_metric
from megalite.planner.prediction import RunPrediction
from megalite.topology.flops import flops_per_token
from megalite.topology.parameters import parameter_count
from megalite.train import report as module
from megalite.train.report import RunReporter
from megalite.train.step import rank_measures
from megalite.train.step.precision import DTYPES
from megalite.train.step.state import StepReport
from tests.support.parity import about
from tests.support.tiny import tiny_shape

INFO = RankInfo(
    rank=0,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    master_addr="a",
    master_port=1,
    launcher="torchrun",
    node="a",
)


def trainer_on(device: str, *settings: str, **mesh: Any) -> Any:
    """Return rank 0's trainer as a reporter sees it. mesh: attributes that its mesh has too."""
    words = ["--tokenizer.path", "x", "--data.source", "x", "--training.precision", "bf16", *settings]
    words += ["--training.steps", "2", "--training.sequence_length", "12", "--training.micro_batch_size", "1"]
    words += ["--training.micro_batches", "1", "--model.preset", "tiny"]
    config = load_run(None, words).config
    on_rank = SimpleNamespace(
        rank=0,
        device=torch.device(device),
        layout=config.layout,
        max_over_world=float,
        sum_over_world=lambda values: [4 * each for each in values],
        barrier=lambda: None,
    )
    vars(on_rank).update(mesh)
    return SimpleNamespace(
        mesh=on_rank,
        config=config,
        total_steps=2,
        shape=tiny_shape(),
        state=SimpleNamespace(step=0),
        kernels=SimpleNamespace(name="fused"),
    )


def reporter_of(trainer: Any, tmp_path: Path) -> RunReporter:
    return RunReporter(trainer, INFO, tmp_path / "metrics.jsonl")


def reporter(tmp_path: Path, device: str, *settings: str) -> RunReporter:
    return reporter_of(trainer_on(device, *settings), tmp_path)


def step(number: int) -> StepReport:
    return StepReport(
        step=number,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=number,
        batch_tokens=1000,
        sequence_length=12,
        step_seconds=1.0,
        data_seconds=0.0,
        loss_scale=1.0,
        skipped_steps=0,
        overflow=None,
    )


def share(tmp_path: Path, made: RunReporter) -> float | None:
    made.step(step(1), None, {})
    share = read_metrics(tmp_path / "metrics.jsonl")[-1]["mfu"]
    return None if share is None else share / flops_per_token(tiny_shape(), 12) / 1000


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    monkeypatch.setattr(rank_measures, "CardSensors", lambda device: SimpleNamespace(missing="", last=None))
    monkeypatch.setattr(rank_measures, "device_memory", lambda device: MemoryUse(1, 2**30, 3 * 2**30))
    return monkeypatch


def test_the_share_is_of_all_devices_by_the_cards_name(
    on_gpu: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert share(tmp_path, reporter(tmp_path, "cuda")) == about(1 / (4 * 756.5e12))
    assert "1.00 GiB of 3.00 reserved" in capsys.readouterr().out


def test_a_card_that_is_not_listed_has_no_share_and_is_named_with_the_remedy(
    on_gpu: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpu.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H20")
    assert share(tmp_path, reporter(tmp_path, "cuda")) is None
    said = capsys.readouterr().out
    assert said.count("\n") == 2 and said.startswith(
        'MFU is not shown: the peak of "NVIDIA H20" in bf16 is not known; set monitor.peak_tflops to the dense bf16'
    )
    assert "%" not in said.splitlines()[1]


@pytest.mark.parametrize(("precision", "name"), [("fp32", "sgemm"), ("bf16", "bf16 gemm")])
def test_on_cpus_the_peak_is_what_all_ranks_reach_at_once_in_the_run_s_precision(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    precision: str,
    name: str,
) -> None:
    """A bf16 run was once 154% of sgemm."""
    measured: list[torch.dtype] = []
    monkeypatch.setattr(module, "gemm_flops_per_second", lambda dtype: measured.append(dtype) or 2e12)
    made = reporter(tmp_path, "cpu", "--training.precision", precision)
    assert share(tmp_path, made) == about(1 / (4 * 2e12))
    assert measured == [DTYPES[precision]]
    assert f"% of {name}" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "asked"), [("text", '--prompt "The"'), ("instruct", "--chat")])
def test_the_next_command_asks_as_the_run_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, asked: str
) -> None:
    made = reporter(tmp_path, "cpu", "--monitor.peak_tflops", "1", "--data.kind", kind)
    made.step(step(1), None, {})
    made.summary({}, has_tokenizer=True)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"next: megalite generate {tmp_path} {asked} --temperature 0.8"
    )


@pytest.mark.parametrize(("device", "places"), [("cuda", 4), ("cpu", 2)])
def test_a_peak_that_is_named_is_a_devices_or_a_nodes(
    on_gpu: pytest.MonkeyPatch, tmp_path: Path, device: str, places: int
) -> None:
    on_gpu.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H20")
    on_gpu.setattr(module, "gemm_flops_per_second", lambda _: pytest.fail("measured, though it is named"))
    made = reporter(tmp_path, device, "--monitor.peak_tflops", "148")
    assert share(tmp_path, made) == about(1 / (places * 148e12))


def test_each_group_of_parameters_has_its_rate_in_the_files(tmp_path: Path) -> None:
    groups = (
        '[{pattern = "*norm*", learning_rate_ratio = 0.5}, {pattern = "lm_head*", learning_rate_ratio = 0.0}]'
    )
    settings = ("--monitor.peak_tflops", "1.0", "--optimizer.groups", groups)
    reporter(tmp_path, "cpu", *settings, "--model.tie_word_embeddings", "false").step(step(1), None, {})
    [record] = read_metrics(tmp_path / "metrics.jsonl")
    rates = {"learning_rate": 0.1, "learning_rate/*norm*": 0.05, "learning_rate/lm_head*": 0.0}
    assert {name: record[name] for name in record if name.startswith("learning_rate")} == rates
    assert is_own_metric("learning_rate/mine") and is_own_metric("learning_rate")


def test_the_first_record_of_a_start_counts_the_parameters(tmp_path: Path) -> None:
    made = reporter(tmp_path, "cpu", "--monitor.peak_tflops", "1.0")
    for number in (1, 2):
        made.step(step(number), None, {})
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert [first[name] for name in AT_THE_START] == [parameter_count(tiny_shape())] * 2 + [0, 2]
    assert not set(AT_THE_START) & set(second) and all(map(is_own_metric, AT_THE_START))


def test_a_spike_of_the_loss_is_recorded_and_the_first_in_a_row_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = reporter(tmp_path, "cpu", "--monitor.peak_tflops", "1.0")
    for number in range(1, 29):
        spike = 6.0 if number in (25, 26) else None
        made.step(replace(step(number), loss=9.0 if spike else 3.0, loss_spike=spike), None, {})
    said = capsys.readouterr().out
    assert "warning: step 25: the loss of 9.0000 is 6.0000 above its running median" in said
    assert said.count("running median") == 1
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert {record["step"]: record["loss_spike"] for record in records if "loss_spike" in record} == {
        25: 6.0,
        26: 6.0,
    }


def test_skipped_steps_and_rollbacks_are_said_recorded_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = reporter(
        tmp_path,
        "cpu",
        "--monitor.peak_tflops",
        "1.0",
        "--training.loss_spike",
        "rollback",
        "--checkpoint.every",
        "4",
    )
    spike = replace(step(1), loss=9.0, loss_spike=6.0, skipped_for="loss_spike", skipped_steps=1)
    made.step(replace(spike, skipped_samples=(0, 16)), None, {})
    made.step(replace(spike, step=2, skipped_samples=(0, 32), rolled_back_to=0, skipped_steps=2), None, {})
    made.summary({}, has_tokenizer=False)
    output = capsys.readouterr().out
    said = "the loss of 9.0000 is 6.0000 above its running median"
    assert f"warning: step 1: {said}; the step is skipped" in output
    assert f"step 2: {said}; the weights of step 0 are back, and samples 0 to 31 have no effect" in output
    assert "\n2 steps were skipped, with 1 rollback\n" in output
    names = ("skipped_for", "first_skipped_sample", "skipped_samples", "rolled_back_to", "skipped_steps")
    records = [[record.get(name) for name in names] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert records == [["loss_spike", 0, 16, None, 1], ["loss_spike", 0, 32, 0, 2]]
    reader = RunFolderReader(tmp_path)
    reader.read()
    assert reader.history.alarms == ["2 steps were skipped, with 1 rollback"]


def test_a_slow_rank_is_a_warning_and_stands_in_the_records_and_in_top(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def beside_a_slow_one(values: list[float]) -> list[float]:
        """Add a rank whose steps and own work, the third and the sixth number, take three times as long."""
        own = values[: len(values) // 2]
        return (
            own + [value * (3 if at in (2, 5) else 1) for at, value in enumerate(own)] if own[2:] else values
        )

    places = {"sum_over_world": beside_a_slow_one, "gather_objects": lambda _: ["here", "there"]}
    settings = ("--monitor.peak_tflops", "1.0", "--parallel.data", "2", "--monitor.every", "2")
    made = reporter_of(trainer_on("cpu", *settings, **places), tmp_path)
    for number in range(1, 15):
        made.step(step(number), None, {})
    output = capsys.readouterr().out
    text = "rank 1 (pp 0, dp 1, tp 0) on there is slow: its own work takes 3 s a step, 3.0 times as long"
    assert output.count("warning: ") == output.count(f"warning: step 12: {text}") == 1
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert {record["step"]: record["slow_rank"] for record in records if "slow_rank" in record} == {
        12: 1,
        13: 1,
        14: 1,
    }
    reader = RunFolderReader(tmp_path)
    reader.read()
    assert reader.history.step == 14 and [alarm[: len(text)] for alarm in reader.history.alarms] == [text]


def profiling(tmp_path: Path, *settings: str) -> tuple[RunReporter, list[str]]:
    """Return rank 0's reporter of four ranks, and what it hands in for the others to see."""
    gathered = list[str]()

    def gather(value: str) -> list[str]:
        gathered.append(value)
        return [value, "", "", "the disk is full"]

    trainer = trainer_on("cpu", "--monitor.profile_steps", "[2]", *settings, gather_objects=gather)
    made = reporter_of(trainer, tmp_path)
    trainer.mesh.layout = SimpleNamespace(world_size=4)
    return made, gathered


def test_a_profile_says_where_it_lies_and_what_failed_on_another_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, gathered = profiling(tmp_path, "--monitor.profile_ranks", "[0, 3, 9]")
    for number in (1, 2, 3):
        with made.profiled(number):
            torch.ones(2)
    folder = tmp_path / "profiles" / "step-000002"
    assert gathered == [""], "of the profiled step alone"
    warning, line = capsys.readouterr().out.splitlines()
    assert warning == "warning: profile of step 2, rank 3: the disk is full"
    assert line.startswith(f"profiled step 2: {folder}; *.operators.txt is a table of the operators, ")
    assert {file.name[:10] for file in folder.iterdir()} == {"rank-00000"}


def test_ranks_that_are_not_profiled_take_part_in_what_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, gathered = profiling(tmp_path, "--monitor.profile_ranks", "[3]")
    with made.profiled(2):
        torch.ones(2)
    assert gathered == [""] and not (tmp_path / "profiles").exists()
    assert "profiled step 2" in capsys.readouterr().out


def test_a_step_that_fails_is_not_gathered_over_ranks(tmp_path: Path) -> None:
    made, gathered = profiling(tmp_path)
    with pytest.raises(ZeroDivisionError), made.profiled(2):
        raise ZeroDivisionError
    assert not gathered


def compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trainer: Any, seconds: list[float], at_start: MemoryUse
) -> None:
    prediction = RunPrediction(2.0**30, 2.0, 1000, "assumed", False)
    monkeypatch.setattr(module, "predict_run", lambda *_: prediction)
    made = reporter_of(trainer, tmp_path)
    made.predict(trainer)
    for number, duration in enumerate(seconds, start=1):
        made.step(replace(step(number), step_seconds=duration), None, {})
    made.compare(at_start)


def test_the_end_compares_the_median_step_and_the_peak_of_the_whole_run(
    on_gpu: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device's peaks are since the call before; neither the first step nor a profiled one counts."""
    peaks = iter([2**31, 2**20, 2**20, 2**20, 2**20, 2**20])
    on_gpu.setattr(rank_measures, "device_memory", lambda device: MemoryUse(0, next(peaks), 0))
    trainer = trainer_on("cuda", "--monitor.profile_steps", "[2]")
    compared(on_gpu, tmp_path, trainer, [9.0, 8.0, 1.0, 1.0, 3.0], MemoryUse(2**29, 2**29))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "predicted: memory of the largest rank 1.0 GiB, measured 2.0 GiB (50.0% too low); "
        "step 2 s, measured 1 s (100.0% too high)"
    )


@pytest.mark.parametrize(
    ("peak_at_start", "said"), [(2**29, "measured 1.5 GiB"), (2**31, "predicted: step 2 s")]
)
def test_a_cpu_counts_from_the_start_unless_the_inputs_took_more(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    peak_at_start: int,
    said: str,
) -> None:
    monkeypatch.setattr(rank_measures, "process_memory", lambda: MemoryUse(2**30, 2**31))
    monkeypatch.setattr(module, "gemm_flops_per_second", lambda dtype: 1e12)
    compared(monkeypatch, tmp_path, trainer_on("cpu"), [1.0, 1.0], MemoryUse(2**29, peak_at_start))
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_a_start_without_a_step_compares_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(monkeypatch, tmp_path, trainer_on("cpu"), [], MemoryUse(1, 1))
    assert "measured" not in capsys.readouterr().out
