"""pass@k, and the limits of the processes that generated programs run in."""

import gzip
import json
import time
from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path

import pytest

from megalite.errors import DataError
from megalite.evaluate.code import pass_rates, read_samples
from megalite.evaluate.questions import CodeProblem
from megalite.evaluate.sandbox import Limits, network_is_cut, run_program
from megalite.evaluate.statistics import Rate, pass_at_k
from megalite.evaluate.task_file import TaskFile, questions
from tests.support.parity import assert_close

LIMITS = Limits(seconds=10, memory=256 << 20)
SHORT = replace(LIMITS, seconds=1)
PROBLEM = CodeProblem(
    "T/0", "def add(a, b):\n", "def check(candidate):\n    assert candidate(2, 3) == 5\n", "add"
)


@pytest.mark.parametrize(("samples", "right", "k"), [(1, 0, 1), (1, 1, 1), (5, 2, 1), (5, 2, 3), (6, 4, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_program(samples: int, right: int, k: int) -> None:
    draws = list(combinations([True] * right + [False] * (samples - right), k))
    assert_close(pass_at_k(samples, right, k), sum(map(any, draws)) / len(draws))


def test_the_standard_error_is_that_of_the_mean() -> None:
    rate = Rate.of([1.0, 0.0, 0.0, 1.0, 1.0])
    assert_close([rate.mean, rate.error], [0.6, (0.3 / 5) ** 0.5])
    assert Rate.of([1.0]) == Rate(1.0, 0.0)


ENDS = [
    ("answer = 42", True, ""),
    ("assert False", False, "AssertionError"),
    ("import sys\nsys.exit(0)", False, "left before its last line"),
    ("import os\nos._exit(0)", False, "left before its last line"),
    ("while True: pass", False, "no end within 1 s"),
    ("import time\ntime.sleep(60)", False, "no end within 1 s"),
    ("held = bytearray(1 << 30)", False, "MemoryError"),
    ("open('large', 'wb').write(bytes(1 << 26))", False, "OSError"),
    ("def (:", False, "SyntaxError"),
    ("print('x' * (1 << 26))", False, "exit code"),
    ("input()", False, "EOFError"),
]


@pytest.mark.parametrize(("program", "passed", "reason"), ENDS, ids=[each[0] for each in ENDS])
def test_a_program_ends_within_its_limits(program: str, passed: bool, reason: str) -> None:
    outcome = run_program(program, SHORT if "no end" in reason else LIMITS)
    assert outcome.passed is passed and outcome.reason.startswith(reason)


def test_a_program_sees_an_empty_folder_and_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    lines = [
        "import os, sys",
        "assert os.listdir('.') == [] and not sys.stdin.read()",
        "assert set(os.environ) <= {'PATH', 'HOME', 'TMPDIR', 'LC_ALL', 'LC_CTYPE', 'PWD'}, os.environ",
        "open('mine', 'w').close()",
    ]
    for _ in range(2):
        assert run_program("\n".join(lines), LIMITS).reason == ""


def test_what_a_program_starts_ends_with_it(tmp_path: Path) -> None:
    """A process of root may start others; they do not outlive the time that the program has."""
    mark = tmp_path / "mark"
    child = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {late(mark)!r}])\nwhile True: pass"
    )
    assert not run_program(child, SHORT).passed
    deadline = time.monotonic() + 10
    while (left := with_argument(str(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == [] and not mark.exists()


def with_argument(text: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if text.encode() in content(path)]


def late(mark: Path) -> str:
    return f"import time; time.sleep(60); open({str(mark)!r}, 'w')"


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def test_a_program_has_no_network_where_the_system_permits_that() -> None:
    if not network_is_cut():
        pytest.skip("unshare is not permitted here")
    program = "import socket\nsocket.create_connection(('127.0.0.1', 1), timeout=1)"
    assert "Network is unreachable" in run_program(program, LIMITS).reason


def test_given_samples_are_scored(tmp_path: Path) -> None:
    rows = [("T/0", "    return a + b\n"), ("T/0", "    return a - b\n"), ("T/0", "    return a\n")]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"task_id": name, "completion": text}) + "\n" for name, text in rows))
    found = pass_rates([PROBLEM], read_samples(path, [PROBLEM]), (1, 2), LIMITS)
    assert_close([found.pass_at[1].mean, found.pass_at[2].mean], [1 / 3, 2 / 3])
    assert found.samples == 3 and found.reasons == {"AssertionError": 2}


def test_samples_of_no_problem_and_problems_without_samples_are_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"task_id": "T/0", "completion": ""}\n{"task_id": "T/9", "completion": ""}\n')
    with pytest.raises(DataError, match=r"samples\.jsonl, line 2: column 'task_id' 'T/9' is no problem"):
        read_samples(path, [PROBLEM])
    path.write_text('{"task_id": "T/0"}\n')
    with pytest.raises(DataError, match=r"line 1: no column 'completion'"):
        read_samples(path, [PROBLEM])
    path.write_text('{"task_id": "T/0", "completion": ""}\n')
    with pytest.raises(DataError, match=r"has no completion of T/1; write one row"):
        read_samples(path, [PROBLEM, CodeProblem("T/1", "", "", "f")])


@pytest.mark.extended
def test_the_solutions_of_humaneval_pass(shared_data: Path) -> None:
    file = shared_data / "humaneval" / "HumanEval.jsonl.gz"
    problems = questions(TaskFile(file, "code", limit=20))
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in islice(lines, 20)]
    found = pass_rates(problems, [[row["canonical_solution"]] for row in rows], (1,), Limits())
    assert found.pass_at[1].mean == 1.0


def test_columns_of_samples_that_are_not_read_are_named(tmp_path: Path) -> None:
    path, notes = tmp_path / "samples.jsonl", list[str]()
    path.write_text('{"task_id": "T/0", "completion": "x", "passed": true}\n')
    assert read_samples(path, [CodeProblem("T/0", "def f():", "", "f")], notes.append) == [["x"]]
    assert notes == [f"note: {path}: columns without effect, and the rows that have them: 'passed' (1)"]
