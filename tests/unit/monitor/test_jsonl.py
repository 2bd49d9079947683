"""metrics.jsonl holds each step once, whatever moment the run was killed at."""

import json
from pathlib import Path

import pytest

from megalite.monitor.jsonl import MetricsFile, read_metrics


def write(path: Path, steps: range, *, after_step: int = 0) -> None:
    metrics = MetricsFile(path, after_step=after_step)
    for step in steps:
        metrics.append({"step": step, "loss": 1 / step})
    metrics.close()


def test_a_record_can_be_read_as_soon_as_it_was_appended(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "new" / "metrics.jsonl")
    metrics.append({"step": 1, "loss": 0.1 + 0.2})
    assert read_metrics(tmp_path / "new" / "metrics.jsonl") == [{"step": 1, "loss": 0.1 + 0.2}]
    metrics.close()


@pytest.mark.parametrize("resumed_at", [0, 3, 5])
def test_a_resumed_run_writes_what_an_undisturbed_one_would(tmp_path: Path, resumed_at: int) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    write(whole, range(1, 9))
    write(killed, range(1, 6))
    write(killed, range(resumed_at + 1, 9), after_step=resumed_at)
    assert killed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "torn", ['{"step": 4, "lo', '{"step": 4, "loss": 0.25}', "\0\0\0", "[4]\n", "4\n", "\xff\n"]
)
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    before = path.read_bytes()
    path.write_bytes(before + torn.encode("latin-1"))
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    write(path, range(4, 6), after_step=4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "grad_norm": None, "mfu": None}
    ]
