"""tests/run.sh asks pytest for what it says and ends with one line on the outcome; .ci/run calls it in a clone."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE, wait_until

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


STYLE = ["-m ruff check --quiet .", "-m ruff format --quiet --check ."]


@pytest.mark.parametrize(
    ("arguments", "first", "chosen"),
    [((), [], ""), (("--all",), ["install launchers"], " -m not gpu and not slow")],
)
def test_the_core_and_all_of_it_run_in_groups(checkout: Path, arguments, first, chosen) -> None:
    code, asked, last = run(checkout, *arguments)
    style, beside = [*first, *STYLE], asked[len(first) + len(STYLE) :]
    assert (code, asked[: len(style)]) == (0, style) and beside.count("-m mypy") == 1
    times = "set-up N s, tests N s, processors N s"
    assert re.fullmatch(rf"passed \({times.replace('N', '[0-9]+')}\)", last)
    command = f"-m pytest -q --slowest-files 10{chosen}"
    groups = [line for line in beside if line != "-m mypy"]
    assert len(groups) > 2 and all(line.startswith(command) for line in groups)
    folders = [folder for line in groups for folder in line.removeprefix(command).split()]
    tests = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")}
    assert sorted(folders) == sorted(f"tests/{name}" for name in tests)


def test_no_more_than_three_groups_run_at_once_and_each_shows_its_output(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.write_text("""#!/usr/bin/env bash
[ "$2" = pytest ] || exit 0
touch "runs-$$"
ls -d runs-* | wc -l >>at-once
sleep 0.2
rm "runs-$$"
echo "said by $*"
""")
    said = subprocess.run(
        ["bash", str(checkout / "tests" / "run.sh")],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    at_once = (checkout / "at-once").read_text().split()
    assert 1 < max(map(int, at_once)) <= 3
    assert said.stdout.count("said by -m pytest") == len(at_once)


def test_arguments_are_given_to_pytest_alone(checkout: Path) -> None:
    assert run(checkout, "tests/unit", "-k", "layout")[1] == ["-m pytest tests/unit -k layout"]
    (checkout / "asked").unlink()
    assert run(checkout, "--all", "tests/unit")[1] == [
        "install launchers",
        "-m pytest -m not gpu and not slow tests/unit",
    ]


def test_all_that_failed_is_named_at_the_end(checkout: Path) -> None:
    code, asked, last = run(checkout, FAIL="mypy")
    assert code == 1 and len(asked) > 5 and last.startswith("failed: mypy (set-up")


@pytest.mark.parametrize("part", ["tests/unit", "tests/launch"])
def test_any_group_of_the_tests_may_fail(checkout: Path, part: str) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/usr/bin/env bash\n[[ "$*" != *{part}* ]]\n')
    for arguments in ((), ("--all",)):
        code, _, last = run(checkout, *arguments)
        assert code == 1 and last.startswith("failed: pytest (set-up")


def test_a_group_whose_result_cannot_be_written_is_a_failure(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.write_text("""#!/usr/bin/env bash
[[ "$*" != *tests/parity* ]] || rm -r "$(dirname "$(readlink /proc/$$/fd/1)")"
""")
    code, _, last = run(checkout)
    assert code == 1 and "a part without a result" in last


def test_a_run_that_is_ended_shows_what_its_groups_have_printed(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.write_text("""#!/usr/bin/env bash
[ "$2" = pytest ] || exit 0
echo "half of $*"
echo $$ >>hanging
exec sleep 1000
""")
    script = subprocess.Popen(
        ["bash", str(checkout / "tests" / "run.sh")],
        env={"PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )
    hanging = checkout / "hanging"
    wait_until(lambda: hanging.exists() and len(hanging.read_text().split()) == 3, "no three groups run")
    script.terminate()
    said, _ = script.communicate(timeout=PATIENCE)
    assert script.returncode == 143 and said.count("half of -m pytest") == 3
    assert not [pid for pid in hanging.read_text().split() if Path("/proc", pid).exists()]


def test_nothing_runs_without_the_set_up(checkout: Path) -> None:
    assert run(checkout, SET_UP="2")[:2] == (2, [])


@pytest.mark.parametrize("status", [0, 3])
def test_a_change_is_tested_in_a_clone_as_a_strangers(tmp_path: Path, status: int) -> None:
    """Its folder has the repository's name and one above it a space; corpora stand beside it; it goes at the end."""
    repository = tmp_path / "submitted"
    for folder in (
        repository / ".ci",
        repository / "tests",
        tmp_path / "shared" / "data",
        tmp_path / "temporary",
    ):
        folder.mkdir(parents=True)
    shutil.copy(TESTS.parent / ".ci" / "run", repository / ".ci" / "run")
    script = f'echo "$0 $*" >"{tmp_path}/asked"; ls "$(dirname "$0")/../../shared"; exit {status}'
    (repository / "tests" / "run.sh").write_text(script)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost", "-C", str(repository)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    (repository / "tests" / "run.sh").write_text("exit 9")  # not committed
    done = subprocess.run(
        ["bash", str(repository / ".ci" / "run")],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "temporary"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, "data\n"), done.stderr
    script = (tmp_path / "asked").read_text().removesuffix(" --all\n")
    assert re.search(r" [^/]*/megalite/tests/run\.sh$", script), script
    assert list((tmp_path / "temporary").iterdir()) == []
