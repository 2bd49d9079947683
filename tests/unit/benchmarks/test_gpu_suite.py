"""The GPU suite on a machine without one: it checks the CPU's twins, sees planted faults, and claims nothing."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_suite
from benchmarks.gpu import checks, operators, training
from benchmarks.gpu.operators import OPERATORS, Operator
from megalite.launcher.process import available_cores
from megalite.ops.operators import COMPILED
from megalite.selftest.registry import Entry, compiled
from tests.support.kernels import needs_library

ROOT = Path(__file__).parents[3]


def doubled(
    form: Callable[[Tensor], Tensor], *needs: str, name: str = "doubled", gradients: int = 1
) -> Operator:
    """An operator that doubles, by this form."""
    entry = Entry(
        name=name,
        operator="norm",
        make=lambda shape, dtype, random: [random(*shape)],
        candidates={COMPILED: compiled(form, *needs)},
        plain=lambda x: x + x,
        gradients=gradients,
        shapes=((4, 5), (300, 7)),
    )
    return Operator(entry, timed=(4, 5))


DOUBLED = doubled(lambda x: 2 * x, "sum_of_squares")


@needs_library
def test_every_operator_is_right_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--device", "cpu", "--results", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    [path] = tmp_path.glob("*-gpu-suite-cpu.json")
    report = json.loads(path.read_text())
    assert not report["failed"]
    found = {
        (row["operator"], row["dtype"]) for row in report["checks"] if row["right"] and row["equal_repeats"]
    }
    assert found == {(each.name, str(dtype)[6:]) for each in OPERATORS for dtype in each.dtypes}
    assert (tmp_path / "gpu.md").read_text() == gpu_suite.markdown(report) == run.stdout.removesuffix("\n")


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    command = [sys.executable, "-m", "benchmarks.gpu_suite"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2 and run.stderr.startswith("no GPU: ") and not run.stdout


def test_the_tables_in_the_repository_are_the_suites_own() -> None:
    reports = sorted((ROOT / "benchmarks" / "results").glob("*-gpu-suite-*.json"))
    report = json.loads(reports[-1].read_text()) if reports else {}
    text = (ROOT / "benchmarks" / "results" / "gpu.md").read_text()
    assert text == gpu_suite.markdown(report), "run python -m benchmarks.gpu_suite (--skeleton without a GPU)"
    assert report or text.count(gpu_suite.NOT_MEASURED) > 2 * len(OPERATORS)


def _unwritten(x: Tensor) -> Tensor:
    found = torch.empty_like(x)
    found[:-1] = 2 * x[:-1]
    return found


def _unsteady(x: Tensor) -> Tensor:
    _unsteady.calls += 1  # type: ignore[attr-defined]
    return 2 * x + (torch.finfo(x.dtype).eps * x.abs().max() / 4 if _unsteady.calls % 2 else 0)  # type: ignore[attr-defined]


_unsteady.calls = 0  # type: ignore[attr-defined]


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2.01 * grad


@pytest.mark.parametrize(
    ("form", "gradients", "right"),
    [
        (lambda x: 2 * x, 1, True),
        (lambda x: 2.001 * x, 1, False),
        (lambda x: (2 * x).masked_fill(x > 2, torch.nan), 0, False),
        (_unwritten, 0, False),
        (_unsteady, 0, False),
        (_WrongGradient.apply, 1, False),
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
def test_what_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    lacking = doubled(lambda x: 2 * x, "of_another_library", name="lacking")
    listed = [doubled(broken, name="broken"), lacking, DOUBLED]
    monkeypatch.setattr(operators, "OPERATORS", listed)
    assert gpu_suite.main(["--device", "cpu", "--results", str(tmp_path)]) == 1
    [path] = tmp_path.glob("*.json")
    rows = {
        row["operator"]: row for row in json.loads(path.read_text())["checks"] if row["dtype"] == "float32"
    }
    assert rows["broken"]["failed"] == "RuntimeError: no such kernel"
    assert "of_another_library" in rows["lacking"]["failed"] and rows["doubled"]["right"]
    assert "RuntimeError: no such kernel" in capsys.readouterr().out
    monkeypatch.setitem(gpu_suite.PARTS, "checks", lambda *_: [][1])
    assert gpu_suite.main(["--device", "cpu"]) == 1


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


def test_the_training_part_trains() -> None:
    row = training.train("reference", device="cpu", product=None, tiny=True)
    assert row["tokens"] == 2 * 2 * 32 and row["tokens_per_second"] > 0 and "mfu" not in row


def test_every_layout_has_its_ranks() -> None:
    assert all(layout.world_size == ranks for ranks, layout in training.LAYOUTS.items())
    assert list(training.LAYOUTS) == [1, 2, 4, 8, 16]
    rows = training.scaling(most=0)
    assert [row["left_out"] for row in rows] == [f"this machine has {available_cores()} cores"] * 5
