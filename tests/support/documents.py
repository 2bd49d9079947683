"""The documents that a user reads, and the commands and programs in them.

python -m tests.support.documents        # writes what their commands and programs print anew
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalite.cli import main
from tests.support.jobs import ROOT
from tests.support.tiny import tiny_tokenizer

README = ROOT / "README.md"
LESSONS = sorted((ROOT / "docs" / "learn").glob("*.md"))
PAGES = [
    README,
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *LESSONS,
    *sorted((ROOT / "examples").glob("*/README.md")),
]
TEXT = (
    "".join(
        f"In the {one} {other} of the year the river rose, and people of the {other} town went up the {one} hill.\n"
        for one in ("first", "second", "third", "fourth", "long", "cold", "warm", "last")
        for other in ("winter", "summer", "autumn", "spring", "week", "month", "day", "night")
    )
    * 8
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"^```python\n((?:(?!^```).)*)^```\n\n```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
_OUTPUT_OF = re.compile(r"[A-Z_]+=\$\((.*)\)(?:\s+#.*)?")


@dataclass(frozen=True)
class Command:
    """A command of a fenced `bash` block, with the variables before it."""

    text: str
    environ: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the content of the fenced blocks in these languages."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def prose(page: Path) -> str:
    """Return the text without fenced blocks and inline code, comments in the blocks included."""
    text = page.read_text(encoding="utf-8")
    comments = [line for block in blocks(page, "bash") for line in re.findall(r"# (.*)", block)]
    return re.sub(r"`[^`\n]*`", "code", _BLOCK.sub("", text)) + "\n\n" + "\n\n".join(comments)


def commands(page: Path) -> list[Command]:
    """Return the commands of a page's `bash` blocks, and of a lesson's sentences; a `console` block has an answer."""
    lines = [line for block in blocks(page, "bash") for line in _joined(block)]
    if page in LESSONS:
        lines += re.findall(
            r"`(megalite [a-z]+ [^`\n]*[-./][^`\n]*)`", _BLOCK.sub("", page.read_text(encoding="utf-8"))
        )
    return [command for line in lines for command in _commands(line)]


def _joined(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def _commands(line: str) -> Iterator[Command]:
    for part in line.split(" && "):
        if kept := _OUTPUT_OF.fullmatch(part.strip()):
            part = kept[1]
        words = shlex.split(part, comments=True)
        environ = []
        while words and (found := _VARIABLE.fullmatch(words[0])):
            environ.append((found[1], found[2]))
            words.pop(0)
        if words:
            yield Command(part.strip(), tuple(environ), tuple(words))


def write_place(folder: Path) -> None:
    """Make a person's folder beside the checkout's files: texts, the run file of the README, what it refers to."""
    for name in (
        "examples",
        "launch",
        "benchmarks",
        "tests",
        "docs",
        "constraints.txt",
        "setup.py",
        "megalite",
    ):
        (folder / name).symlink_to(ROOT / name)
    (folder / "book.txt").write_text(TEXT)
    (folder / "other.txt").write_text(TEXT[: len(TEXT) // 4])
    (folder / "talks.jsonl").write_text(json.dumps({"prompt": TEXT[:40], "completion": TEXT[40:80]}) + "\n")
    pair = {"prompt": TEXT[:40], "chosen": TEXT[40:80], "rejected": TEXT[80:99]}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    [run_file] = blocks(README, "toml")
    (folder / "run.toml").write_text(run_file)
    model = folder / "my-model"
    model.mkdir()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 384, **shape}))
    tiny_tokenizer(model)
    (folder / "my-tokenizer").mkdir()
    tiny_tokenizer(folder / "my-tokenizer")
    chat = "--kind instruct --chat-template plain --sequence-length 256"
    with contextlib.chdir(folder):
        for arguments in (
            "--source book.txt --tokenizer my-tokenizer --output data/corpus",
            f"--source talks.jsonl --tokenizer my-model --output prepared/talks {chat}",
        ):
            assert main(["data", "prepare", "--workers", "0", *arguments.split()]) == 0


def documented(command: str) -> tuple[set[str], set[str]]:
    """Return the facts that docs/automation.md says the --json of a command always has, and all that it may have."""
    page = (ROOT / "docs" / "automation.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"^\| `{command}` \| (.*) \|$", page, re.MULTILINE)
    groups = [set(words.split()) for words in re.findall(r"`([^`]*)`", row)]
    [run] = re.findall(r"A run is `([^`]*)`", page)
    every = set().union(*groups, run.split() if "a run" in row else ())
    return (set() if row.startswith("a run") else groups[0]), every | {"exit_code", "error"}


def answers(page: Path) -> list[tuple[str, str]]:
    """Return (line, what it prints) of each `console` block: the error of a wrong command, else its output."""
    blocks_of = (block.removeprefix("$ ") for block in blocks(page, "console"))
    return [(line, shown) for line, _, shown in (block.partition("\n") for block in blocks_of)]


def answer(line: str) -> str:
    """Run `megalite ...` in this folder, alone or into a `| grep` or `| head`, and return what a terminal shows."""
    command, *pipes = line.split(" | ", 1)
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        code = main(shlex.split(command)[1:])
    if code == 2:
        return error.getvalue()
    if not pipes:
        return output.getvalue()
    piped = subprocess.run(
        ["bash", "-c", pipes[0]], input=output.getvalue(), capture_output=True, text=True, check=True
    )
    return piped.stdout


def programs(page: Path) -> list[tuple[str, str]]:
    """Return (program, what it prints) of each `python` block that a `text` block follows."""
    return _SHOWN.findall(page.read_text(encoding="utf-8"))


def printed(program: str) -> str:
    """Run a program of a page in this process and return what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(program, "page", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def write_answers(page: Path, folder: Path) -> None:
    """Run each `console` line and each program that has its output below it in `folder`; write what they print."""
    with contextlib.chdir(folder):
        text = re.sub(
            r"```console\n\$ ([^\n]*)\n.*?```\n",
            lambda block: f"```console\n$ {block[1]}\n{answer(block[1])}```\n",
            page.read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
        text = _SHOWN.sub(
            lambda block: f"```python\n{block[1]}```\n\n```text\n{printed(block[1])}```\n", text
        )
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        write_place(Path(place))
        for each in PAGES:
            write_answers(each, Path(place))
