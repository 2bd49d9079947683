"""--json: every command writes one document with the facts that docs/automation.md names, and errors as objects."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from megalite.cli.commands import COMMANDS
from tests.support.documents import blocks, documented, write_place
from tests.support.jobs import ROOT

# Command -> arguments; those that compute are in tests/end_to_end/test_automation.py.
RUNS = {
    "init": "new.toml --source book.txt",
    "launch": "run.toml --dry-run --local",
    "plan": 'llama-3.1-8b --card "H100 80GB HBM3" --write planned.toml',
    "config show": "run.toml",
    "config presets": "",
    "tokenizer convert": "my-tokenizer --output converted",
    "data prepare": "--source book.txt --tokenizer my-tokenizer --output data/again --workers 0",
    "data inspect": "data/corpus --duplicates",
    "adopt": "trainer.yaml --output adopted.toml --partial",
    "convert families": "",
    "examples": "copied",
    "doctor": "",
    "completion": "bash",
}
ELSEWHERE = {
    *(
        "train",
        "evaluate",
        "generate",
        "serve",
        "tokenizer train",
        "convert export",
    ),  # end_to_end/test_automation.py
    *(
        "verify",
        "chaos",
        "sweep",
        "scaling",
        "report",
        "top",
        "timeline",
        "selftest",
        "convert import",
        "convert universal",
        "convert inspect",
    ),  # theirs
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_place(folder)
    (folder / "trainer.yaml").write_text(
        "per_device_train_batch_size: 2\nlearning_rate: 0.001\nmax_steps: 9\n"
    )
    return folder


def run(words: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a command in this process, and return its document, which is all that it writes to stdout."""
    capfd.readouterr()
    try:
        code = main([*shlex.split(words), "--json"])
    except SystemExit as left:
        code = int(left.code or 0)
    out = capfd.readouterr().out
    document: dict[str, Any] = json.loads(out)
    assert out.count("\n") == 1 and document["exit_code"] == code
    return document


@pytest.mark.parametrize("command", RUNS)
def test_a_command_writes_the_facts_that_the_page_names(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    document = run(f"{command} {RUNS[command]}", capfd)
    always, every = documented(command)
    assert document["exit_code"] == 0 and "error" not in document
    assert always and always <= document.keys() <= every


def test_the_page_has_every_command() -> None:
    page = (ROOT / "docs" / "automation.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([a-z ]+)` \| ", page.partition("## Errors")[0], re.MULTILINE))
    assert rows == RUNS.keys() | ELSEWHERE and {row.split()[0] for row in rows} == COMMANDS.keys()


def test_an_error_has_the_fields_of_the_page_and_all_problems(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    page = (ROOT / "docs" / "automation.md").read_text(encoding="utf-8")
    fields = re.findall(r"^\| `([a-z]+)` \| ", page.partition("## Errors")[2], re.MULTILINE)
    found = run("train run.toml --parallel.tensor 3 --training.stps 5 --data.source bok.txt", capfd)
    assert found["exit_code"] == found["error"]["exit_code"] == 2
    problems = {problem["key"]: problem for problem in found["error"]["problems"]}
    assert all(list(problem) == fields for problem in problems.values())
    assert problems["training.stps"]["set"] == {"training.steps": 5, "training.stps": None}
    assert (
        problems["parallel.tensor"]["value"] == 3
        and problems["parallel.tensor"]["set"]["parallel.tensor"] < 3
    )
    [example] = blocks(ROOT / "docs" / "automation.md", "json")
    assert json.loads(example) == run("config show run.toml --data.loader_workers 9", capfd)
    assert problems["data.source"]["set"] == {"data.source": "book.txt"}
    [alone] = run("adopt examples/quickstart/ds_config.json --output other.toml", capfd)["error"]["problems"]
    assert alone["rule"] == "does not start a training by itself"
    # A failure without a key, and a fault of megalite: an object too, and the traceback.
    monkeypatch.setattr("megalite.cli.config.load_run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["config", "show", "run.toml", "--json"])
    [problem] = json.loads(capfd.readouterr().out)["error"]["problems"]
    assert problem["key"] is None and "ZeroDivisionError" in problem["rule"]


@pytest.mark.parametrize(
    ("words", "key", "cure"),
    [
        ("evalute m", "COMMAND", {"COMMAND": "evaluate"}),
        ("config shwo", "COMMAND", {"COMMAND": "show"}),
        ("plan m --crad=H100", "--crad", {"--crad": None, "--card": "H100"}),
        ("init --froce", "--froce", {"--froce": None, "--force": True}),
        # Its value stands behind it, where the parser took it for another argument.
        ("plan --crad H100", "--crad", {"--crad": None}),
        ("generate m --prompt x --dtype flaot32", "--dtype", {"--dtype": "float32"}),
        ("data prepare --output x --tokenizer y", None, {}),
    ],
)
def test_mistyped_words_have_their_cure(
    words: str, key: str | None, cure: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    [problem] = run(words, capfd)["error"]["problems"]
    assert (problem["key"], problem["set"]) == (key, cure)


@pytest.mark.parametrize("words", ["generate --help --json", "--version --json"])
def test_texts_alone_leave_stdout_to_the_document(words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megalite", *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and json.loads(done.stdout) == {"exit_code": 0} and "megalite" in done.stderr


def offered(shell: list[str], typed: list[str], script: Path) -> list[str]:
    """Return the completions of the last word, by the function that the script registers in a real shell."""
    program = f"""source {script}
COMP_WORDS=({" ".join(f"'{word}'" for word in typed)}) COMP_CWORD={len(typed) - 1}
eval "$(complete -p megalite | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        [*shell, "-c", program], capture_output=True, text=True, check=True, cwd=script.parent
    )
    return done.stdout.split()


def test_bash_completes_commands_options_settings_and_presets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "megalite.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*typed: str) -> list[str]:
        return offered(["bash", "--norc"], ["megalite", *typed], script)

    assert completed("con") == ["config", "convert"]
    assert completed("convert", "ex") == ["export"]
    assert completed("data", "prepare", "--split") == ["--split"]
    assert completed("train", "run.toml", "--parallel.pipe") == ["--parallel.pipeline"]
    assert "small" in completed("train", "--model.preset", "")
    assert completed("launch", "--model.preset", "=", "smo")[0].startswith("smollm")
    assert completed("config", "show", "--data.shuffle", "t") == ["true"]
    assert completed("train", "ru") == []  # a file, which the shell completes
    assert "--training.steps" not in completed("generate", "--")
