"""A person's own text without a run file: no error on the way from the text to a sample."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = (
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "he",
    "have",
    "it",
    "that",
    "for",
    "they",
    "with",
    "as",
    "not",
    "on",
    "she",
)


def megalite(*arguments: str, folder: Path) -> str:
    """Return the output of a command, which must succeed."""
    command = [sys.executable, "-m", "megalite", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("person")
    # 20 KB in one paragraph a line; multiples of coprime numbers, so that no line is another's.
    lines = (
        " ".join(WORDS[(row * 7 + column * column) % len(WORDS)] for column in range(14))
        for row in range(400)
    )
    (folder / "book.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_a_text_alone_trains_and_its_run_continues_it(place: Path) -> None:
    flags = ["--training.steps", "4", "--training.precision", "fp32", "--training.threads", "1"]
    shown = megalite(
        "train", "--data.source", "book.txt", *flags, "--checkpoint.export", "false", folder=place
    )
    lines = shown.splitlines()
    assert lines[0].startswith("megalite ")
    assert lines[1].startswith("  model       llama, 4 layers of 128")
    assert any(
        re.match(
            r"data: [\d,]+ sequences? of [\d,]+ tokens, .* per epoch; 4 steps are .*; validation on ", line
        )
        for line in lines
    )
    assert any(line.startswith("step 4/4  loss ") for line in lines)
    assert "validation after step 4: " in shown
    assert lines[-1] == 'next: megalite generate runs/book --prompt "The" --temperature 0.8'
    assert (place / "runs/book/checkpoints/latest").read_text().strip() == "step-000004"
    sample = megalite("generate", "runs/book", "--prompt", "The", "--tokens", "4", folder=place)
    assert sample.startswith("The")
