"""A profile of one step: its files, what it costs the run when it fails, and the snapshot of a card's allocator."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.monitor.profiler import StepProfile
from tests.support.file_limit import file_size_limit

CPU = torch.device("cpu")
TABLES = ["rank-00003.memory.txt", "rank-00003.operators.txt"]


def work() -> torch.Tensor:
    return torch.ones(64, 64) @ torch.ones(64, 64)


def profiled(folder: Path, device: torch.device = CPU) -> StepProfile:
    with StepProfile(device, folder, 3) as profile:
        work()
    return profile


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_step_has_a_trace_and_tables_of_time_and_memory(tmp_path: Path) -> None:
    assert profiled(tmp_path / "profiles" / "step").failure == ""
    folder = tmp_path / "profiles" / "step"
    assert names(folder) == [*TABLES, "rank-00003.trace.json.gz"]
    with gzip.open(folder / "rank-00003.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event["name"] == "aten::mm" and event["dur"] >= 0 for event in events)
    rows = [line.split() for line in (folder / TABLES[1]).read_text().splitlines()]
    [product] = [row for row in rows if row[-1] == "aten::mm"]
    assert product[0] == "1" and product[2].endswith("%")
    assert "       1      16 KiB  aten::mm\n" in (folder / TABLES[0]).read_text()


def test_an_error_of_the_step_passes_and_the_next_step_is_profiled(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StepProfile(CPU, tmp_path / "first", 3):
        raise ZeroDivisionError
    assert not (tmp_path / "first").exists()
    assert profiled(tmp_path / "second").failure == ""


def test_a_profiler_that_does_not_start_is_a_failure_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: object) -> None:
        raise RuntimeError("another profiler is active")

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    profile = profiled(tmp_path / "step")
    assert profile.failure == "torch.profiler did not start: another profiler is active"
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize(
    ("size", "left", "reason"),
    [(100, [TABLES[1]], "File too large"), (1500, TABLES, "No space left on device")],
)
def test_a_full_disk_is_a_failure_and_leaves_no_half_of_a_trace(
    tmp_path: Path, size: int, left: list[str], reason: str
) -> None:
    """Kineto writes what it can and raises nothing."""
    with file_size_limit(size):
        profile = profiled(tmp_path / "step")
    assert profile.failure == f"{tmp_path / 'step'} is not complete: {reason}"
    assert names(tmp_path / "step") == left


def test_a_folder_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("")
    profile = profiled(tmp_path / "profiles" / "step")
    assert profile.failure == f"{tmp_path / 'profiles' / 'step'} is not complete: Not a directory"


class History:
    """In the place of torch.cuda.memory."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _record_memory_history(self, **settings: Any) -> None:
        self.calls.append(settings)

    def _dump_snapshot(self, file: str) -> None:
        self.calls.append(Path(file).name)
        Path(file).write_text("a snapshot")


def test_a_card_has_a_snapshot_of_its_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(memory=history))
    assert profiled(tmp_path, torch.device("meta")).failure == ""
    assert names(tmp_path) == ["rank-00003.memory.pickle", TABLES[1], "rank-00003.trace.json.gz"]
    on, file, off = history.calls
    assert on["max_entries"] > 0 and file == "rank-00003.memory.pickle" and off == {"enabled": None}


def test_a_card_whose_tracer_is_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: both)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.warns(UserWarning, match="CUDA is not available"):
        profile = profiled(tmp_path, torch.device("meta"))
    assert profile.failure.startswith("no work of the device was recorded")
    assert "on the device" in (tmp_path / TABLES[1]).read_text()
    assert names(tmp_path) == [*TABLES, "rank-00003.trace.json.gz"]
