"""The self-test sees planted faults, survives crashes and hangs, and what it found decides which operators are used."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megalite.cli import main
from megalite.errors import KernelError
from megalite.selftest import run, trust
from megalite.selftest.decide import choices_of, combined, untested
from megalite.selftest.registry import Workload, cases_of
from megalite.selftest.run import prove_all
from megalite.selftest.table import entries_of
from megalite.selftest.trust import CaseResult, Findings, OperatorChoice
from tests.support.faulty_operators import HANGING
from tests.support.kernels import needs_library
from tests.support.waiting import PATIENCE, wait_until

FAULTY = Path(__file__).parents[2] / "support" / "faulty_operators.py"
ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
WORKLOAD = Workload(torch.float32, 2, 64, 32, 64, 4, 2, 8, 101)
FLAGS = [
    *("--model.vocab_size=101", "--model.hidden_size=32", "--model.intermediate_size=64"),
    *("--model.num_hidden_layers=1", "--model.num_attention_heads=4", "--model.num_key_value_heads=2"),
    *("--training.sequence_length=64", "--training.micro_batch_size=2", "--training.precision=fp32"),
    *("--data.source=text.txt", "--training.micro_batches=1", "--training.steps=1"),
]


@pytest.fixture(scope="module")
def proved() -> tuple[Findings, Mapping[str, OperatorChoice]]:
    """All planted faults, proved once in worker processes."""
    cases = cases_of(entries_of(FAULTY), WORKLOAD)
    found = prove_all(cases, CPU, entries=FAULTY, case_seconds=12)  # a busy machine answers late
    assert not untested(cases, found)
    return found, choices_of(cases, found)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("add_norm", "wrong: error 1.0e-02 over"),
        ("rotary", "wrong: error "),
        ("glu", "wrong: error "),
        ("bias_gelu", "wrong: values that are not finite, not written or of another shape"),
        ("cross_entropy", "wrong: values that are not finite, not written or of another shape"),
        ("attention", "wrong: a second call gives other numbers"),
        ("attention_windows", "wrong: values that are not finite, not written or of another shape"),
        ("attention_documents", "failed: it was ended by SIGABRT"),
        ("attention_dropout", "failed: it ended with code 3: it said nothing"),
        ("adamw", "failed: no answer after 12 s"),
        ("sum_of_squares", "failed: RuntimeError: an illegal memory access was encountered"),
    ],
)
def test_a_planted_fault_is_left_to_torch(
    proved: tuple[Findings, Mapping[str, OperatorChoice]], operator: str, reason: str
) -> None:
    choice = proved[1][operator]
    assert choice.name == "torch"
    assert choice.why.startswith(reason) and choice.faults["megalite"] == choice.why


def test_what_is_wrong_at_odd_sizes_alone_is_right_at_the_runs_own(
    proved: tuple[Findings, Mapping[str, OperatorChoice]],
) -> None:
    odd, own = (found["megalite"] for found in proved[0]["rotary"].values())
    assert (odd.verdict, own.verdict) == ("wrong", "right")


def test_a_right_operator_is_used_and_a_slow_one_is_not(
    proved: tuple[Findings, Mapping[str, OperatorChoice]],
) -> None:
    assert all(each["megalite"].right for each in proved[0]["norm"].values())
    assert all(each["megalite"].right for each in proved[0]["accumulate"].values())
    slow = proved[1]["accumulate"]
    assert slow.name == "torch" and slow.why.startswith("slower than torch: ") and not slow.faults


@pytest.mark.extended
def test_what_the_time_does_not_reach_is_left_untested() -> None:
    cases = [case for case in cases_of(entries_of(FAULTY), WORKLOAD) if case.entry.name == "hanging"]
    started = time.monotonic()
    found = prove_all(cases, CPU, entries=FAULTY, case_seconds=600, total_seconds=8)
    assert time.monotonic() - started < 60 and not found
    assert choices_of(cases, found)["adamw"].why == trust.UNTESTED


def test_a_device_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = cases_of(entries_of(FAULTY), WORKLOAD)
    with pytest.raises(KernelError, match="the self-test cannot start on cuda:7: it ended with code 1: "):
        prove_all(cases, torch.device("cuda:7"), entries=FAULTY)
    monkeypatch.setattr(run, "START_SECONDS", 0.01)
    with pytest.raises(KernelError, match="cannot start on cpu: no answer after 0 s"):
        prove_all(cases, CPU, entries=FAULTY)


@pytest.mark.extended
def test_an_interrupted_test_keeps_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    # A shell's background jobs, such as a batch script's, inherit an ignored SIGINT.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.path[:0] = [{str(ROOT)!r}]; from megalite.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["selftest", "--entries", str(FAULTY), "--operators", "norm", "adamw", "--device", "cpu", *FLAGS]
    marked = tmp_path / "the hanging operator runs"
    started = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={"MEGALITE_TRUST_FOLDER": str(tmp_path / "trust"), "OMP_NUM_THREADS": "1", HANGING: str(marked)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_until(lambda: marked.exists() or started.poll() is not None, "no operator runs")
    workers = _children(started.pid)
    started.send_signal(signal.SIGINT)
    output = started.communicate(timeout=PATIENCE)[0]
    assert started.returncode == 130, output
    assert workers and not any(Path(f"/proc/{each}").exists() for each in workers)
    assert [*tmp_path.iterdir()] == [marked]


def _children(process: int) -> list[str]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return path.read_text().split() if path.exists() else []


@needs_library
def test_the_command_proves_the_compiled_operators_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGALITE_TRUST_FOLDER", str(tmp_path))
    assert main(["selftest", "--device", "cpu", "--json", *FLAGS]) == 0
    report = json.loads(capsys.readouterr().out)
    shown = {each["operator"] for each in report["findings"] if each["verdict"] == "right"}
    assert shown == {"norm", "add_norm", "rotary", "glu", "attention", "cross_entropy", "sum_of_squares"}
    found = trust.read(trust.machine(CPU))
    assert Path(report["kept"]).parent == tmp_path and found.keys() == shown
    assert not untested(cases_of(entries_of(None), WORKLOAD), found)
    assert main(["doctor"]) == 0
    assert "RMSNorm, float32, 128x32" in capsys.readouterr().out


def test_the_command_fails_where_an_operator_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGALITE_TRUST_FOLDER", str(tmp_path))
    words = ["selftest", "--device", "cpu", "--entries", str(FAULTY), *FLAGS, "--operators"]
    assert main([*words, "glu", "norm"]) == 1
    said = capsys.readouterr().out
    assert "glu: torch (wrong: error " in said and "norm: " in said
    assert "wrong: error" in next(
        line for line in said.splitlines() if "wrong gradient, float32, odd" in line
    )


def test_a_device_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpux"]) == 2
    assert "--device: cpux is not a device of this machine; use cpu" in capsys.readouterr().err


def test_a_finding_that_is_no_number_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_TRUST_FOLDER", str(tmp_path))
    facts = trust.machine(CPU)
    trust.write(facts, {"norm": {"case": {"megalite": CaseResult("wrong", "wrong", float("inf"), 1.0)}}})
    assert trust.read(facts)["norm"]["case"]["megalite"].error is None


def test_ranks_with_nothing_to_test_agree_on_nothing() -> None:
    """As in float64, for which no operator is compiled on an accelerator."""
    assert combined([({"card": "a"}, {}), ({"card": "a"}, None)]) == {}
