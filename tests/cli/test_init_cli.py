"""megalite init: a run file from flags or answers, which loads, and what it refuses."""

import re
from pathlib import Path

import pytest

from megalite.cli import main
from megalite.config.first_run import SIZES
from megalite.config.load import load_run


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "book.txt"
    path.write_text(
        "".join(f"Sentence {number} has the word w{'x' * (number % 40)}.\n" for number in range(2000))
    )
    return path


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_flags_write_a_run_file_that_loads(
    size: str, processes: int, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["init", "run.toml", "--source", "book.txt", "--size", size, "--processes", str(processes)]) == 0
    )
    config = load_run("run.toml", places=True).config
    assert config.layout.world_size == processes
    assert config.run.folder == "runs/book"
    assert config.zero_stage == (1 if size != "tiny" and config.layout.data > 1 else 0)
    said = capsys.readouterr().out
    assert said.endswith("next: megalite train run.toml\n")
    assert size != "tiny" or "needs about 13 MiB and 16 M tokens: bf16 AdamW" in said
    lines = Path("run.toml").read_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert 12 <= sum(" = " in line and not line.startswith("#") for line in lines) <= 28


def test_the_page_has_the_rate_and_the_preset_that_a_size_gets(book: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([\w.-]+)` \| .* \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [size for size, _, _ in rows] == list(SIZES)
    for size, preset, rate in rows:
        assert main(["init", f"{size}.toml", "--source", "book.txt", "--size", size, "--processes", "1"]) == 0
        loaded = load_run(f"{size}.toml", places=True)
        assert loaded.config.optimizer.learning_rate == float(rate)
        assert loaded.origin("model.hidden_size") == f"preset {preset}"


def test_the_answers_in_a_terminal_decide(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["none.txt", "book.txt", "huge", "", "0", "2"])
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or next(answers))
    assert main(["init"]) == 0
    config = load_run("run.toml").config
    assert (config.data.source, config.model.hidden_size, config.layout.data) == ("book.txt", 128, 2)
    assert len(asked) == 6 and asked[2] == "size of the model (tiny, 125m, 350m, 760m, 1b, 8b) [tiny]: "
    out = capsys.readouterr().out
    assert "'none.txt' does not exist" in out and "'huge' is not one of" in out


def test_without_a_terminal_the_text_is_required(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert main(["init"]) == 2
    assert "--source: is required without a terminal; add --source book.txt" in capsys.readouterr().err


def test_a_standing_file_is_kept_unless_forced(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("mine")
    assert main(["init", "--source", "book.txt"]) == 2
    assert "run.toml exists; name another file, or add --force" in capsys.readouterr().err
    assert Path("run.toml").read_text() == "mine"
    assert main(["init", "--source", "book.txt", "--force"]) == 0
    assert Path("run.toml").read_text() != "mine"


def test_a_missing_text_is_named(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--source", "boook.txt"]) == 2
    assert 'data.source: "boook.txt" does not exist; did you mean book.txt?' in capsys.readouterr().err
    assert not Path("run.toml").exists()
