"""tests/run.sh asks pytest for what it says, and ends with one line that tells how it went."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
# Tells what it was asked; FAIL names the tool that fails.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>asked
[ "$2" != "${FAIL-}" ]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("tests/launch", "examples", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(TESTS / "run.sh", tmp_path / "tests" / "run.sh")
    (tmp_path / "examples" / "setup.sh").write_text("exit ${SET_UP-0}\n")
    (tmp_path / "tests" / "launch" / "setup.sh").write_text('echo "install launchers" >> asked\n')
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str, **environ: str) -> tuple[int, list[str], str]:
    """The exit status, what the tools were asked, and the last line."""
    said = subprocess.run(
        ["bash", str(checkout / "tests" / "run.sh"), *arguments],
        env={"PATH": "/usr/bin:/bin", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    asked = checkout / "asked"
    lines = asked.read_text().splitlines() if asked.exists() else []
    return said.returncode, lines, (said.stdout.splitlines() or [""])[-1]


STYLE = ["-m ruff check --quiet .", "-m ruff format --quiet --check .", "-m mypy"]


def test_the_core_and_all_of_it(checkout: Path) -> None:
    code, asked, last = run(checkout)
    assert (code, asked) == (0, [*STYLE, "-m pytest -q --slowest-files 10"])
    assert re.fullmatch(r"passed \(set-up \d+ s, ruff \d+ s, ruff \d+ s, mypy \d+ s, pytest \d+ s\)", last)
    (checkout / "asked").unlink()
    code, asked, last = run(checkout, "--all")
    assert (code, asked[:-2]) == (0, ["install launchers", *STYLE])
    assert re.fullmatch(r"passed \(.*, mypy \d+ s, pytest \d+ s, waited \d+ s\)", last)
    pytest_all = "-m pytest -q --slowest-files 10 -m not gpu and not slow"
    assert all(line.startswith(pytest_all) for line in asked[-2:])
    parts = [part for line in asked[-2:] for part in line.removeprefix(pytest_all).split()]
    tests = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")}
    assert sorted(parts) == sorted(f"tests/{name}" for name in tests)


def test_arguments_are_given_to_pytest_alone(checkout: Path) -> None:
    assert run(checkout, "tests/unit", "-k", "layout")[1] == ["-m pytest tests/unit -k layout"]
    (checkout / "asked").unlink()
    assert run(checkout, "--all", "tests/unit")[1] == [
        "install launchers",
        "-m pytest -m not gpu and not slow tests/unit",
    ]


def test_all_that_failed_is_named_at_the_end(checkout: Path) -> None:
    code, asked, last = run(checkout, FAIL="mypy")
    assert code == 1 and len(asked) == 4 and last.startswith("failed: mypy (set-up")


@pytest.mark.parametrize("part", ["tests/unit", "tests/launch"])
def test_either_part_of_the_tests_may_fail(checkout: Path, part: str) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/usr/bin/env bash\n[[ "$*" != *{part}* ]]\n')
    code, _, last = run(checkout, "--all")
    assert code == 1 and last.startswith("failed: pytest (set-up")


def test_nothing_runs_without_the_set_up(checkout: Path) -> None:
    assert run(checkout, SET_UP="2")[:2] == (2, [])
