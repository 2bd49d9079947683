"""metrics.jsonl holds each step once, whatever moment the run was killed at."""

import json
from pathlib import Path

import pytest

from megalite.monitor import jsonl
from megalite.monitor.jsonl import MetricsFile, newest_records, read_metrics


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


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_records_are_read_from_the_end_whatever_a_block_cuts(tmp_path: Path, monkeypatch, block: int) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK", block)
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 30))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 30, "lo')
    assert list(newest_records(path)) == read_metrics(path)[::-1]
    write(path, range(0), after_step=29)
    assert path.read_bytes() == whole
    write(path, range(0), after_step=3)
    assert [record["step"] for record in newest_records(path)] == [3, 2, 1]
    write(path, range(0), after_step=0)
    assert path.read_bytes() == b"" and next(newest_records(path), None) is None


def test_the_newest_record_costs_a_block_however_long_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.seek(1 << 36)  # more than any memory here, and no room on the disk
        file.write(b'\n{"step": 7}\n')
    assert next(newest_records(path)) == {"step": 7}


def test_a_damaged_line_hides_no_record_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    path.write_bytes(path.read_bytes().replace(b'{"step": 3', b'{"\0\0\0p": 3'))
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 4, 5]
    write(path, range(6, 7), after_step=5)
    assert [record["step"] for record in newest_records(path)] == [6, 5, 4, 2, 1]


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "grad_norm": None, "mfu": None}
    ]
