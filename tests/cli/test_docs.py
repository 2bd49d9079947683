"""README and docs/: every command in them can be typed, every link resolves, and generated pages are up to date."""

import argparse
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

import megalite
from docs import drawing, lessons, pictures, settings
from megalite.cli import main
from megalite.config.load import load_run
from megalite.monitor.console import Console
from megalite.monitor.metrics import StepMetrics
from megalite.train.run import Trainer
from tests.support.documents import (
    LESSONS,
    PAGES,
    README,
    Command,
    answer,
    answers,
    blocks,
    commands,
    printed,
    programs,
    prose,
    write_place,
)
from tests.support.jobs import ROOT

NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LONGEST_LINE = 160
README_WORDS = 700
LONGEST_LESSON = 200
SHELL = ("cd", "git", "kubectl", "ln", "mkdir", "pip", "scancel", "source", "squeue", "tail")
"""Commands that are not megalite's."""
LAUNCHERS = ("torchrun", "deepspeed")
LAUNCHER_MODULE = ["-m", "torch.distributed.launch"]
"""`python -m torch.distributed.launch` takes the options of torchrun."""
STARTERS = ("srun", "mpirun")
"""Launchers that start any program: `srun --nodes 2 python -m megalite ...`."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A person's folder beside the checkout's files."""
    folder = tmp_path_factory.mktemp("place")
    write_place(folder)
    return folder


class Reached(BaseException):
    """A command has read its arguments, and would begin to work."""


@pytest.fixture
def arguments_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read and check their arguments, and then raise Reached."""
    monkeypatch.chdir(place)
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *args: object, **more: object) -> argparse.Namespace:
        options: argparse.Namespace = parse(parser, *args, **more)  # type: ignore[call-overload]
        if not {"train", "init"} & set(parser.prog.split()):
            raise Reached
        return options

    def reached(*args: object, **more: object) -> None:
        raise Reached

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(Trainer, "run", reached)
    monkeypatch.setattr(Trainer, "train", reached)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_can_be_typed(
    name: str, arguments_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in commands(ROOT / name):
        problem = complaint(command, ROOT / name)
        assert not problem, f"{command.text}: {problem}\n{capsys.readouterr().err}"


def complaint(command: Command, page: Path) -> str:
    """Return why a command cannot be typed; "" if it can."""
    first, *rest = command.words
    first = first.removeprefix(".venv/bin/")
    if first == "megalite":
        return of_megalite(rest)
    if first in STARTERS:
        if "python" not in rest:
            return f"{first} starts no python"
        return of_a_program("python", rest[rest.index("python") + 1 :])
    if first in ("bash", "python", *LAUNCHERS):
        return of_a_program(first, rest)
    if first.startswith("launch/") or first == "sbatch":
        return of_a_launch_script(command)
    return "" if first in SHELL else f"{first} is not a known command"


def of_megalite(arguments: Sequence[str]) -> str:
    # A run file is written: the next commands of a page train it.
    again = ["--force"] if arguments[0] == "init" else []
    try:
        code = main([*arguments, *again])
    except Reached:
        return ""
    except SystemExit as left:
        return f"exit code {left.code}" if left.code else ""
    return f"exit code {code}" if code else ""


def of_a_program(program: str, arguments: Sequence[str]) -> str:
    """Programs are files of the checkout or of the reader's folder; modules have the flags that they are given."""
    rest = list(arguments)
    if rest[:2] == LAUNCHER_MODULE:
        return of_a_program("torchrun", rest[2:])
    while program in LAUNCHERS and rest[0].startswith("--") and rest[0] != "--module":
        del rest[: 1 if "=" in rest[0] else 2]
    if rest[0] in ("-m", "--module"):
        if rest[1].startswith("megalite"):
            return of_megalite(rest[2:])
        spec = importlib.util.find_spec(rest[1])
        if spec is None or spec.origin is None:
            return f"there is no module {rest[1]}"
        source = Path(spec.origin)
    else:
        if rest[0] == "script.py":
            return ""
        source = Path(rest[0])
    if not source.is_file():
        return f"there is no file {rest[0]}"
    flags = [word for word in rest[1:] if word.startswith("--") and "." not in word and program != "bash"]
    unknown = [flag for flag in flags if not re.search(rf"""["']{flag}["']""", source.read_text())]
    return f"{source.name} has no {unknown}" if unknown else ""


def of_a_launch_script(command: Command) -> str:
    """The script reads the variables that are set, and the run is right for as many ranks as it starts."""
    script = next((Path(word) for word in command.words if word.startswith("launch/")), Path("launch"))
    if not script.is_file():
        return "there is no such script"
    known = re.findall(r"^(\w+)=\$\{", script.read_text(), re.MULTILINE)
    if unknown := [name for name, _ in command.environ if name not in known]:
        return f"the script does not read {unknown}"
    given = dict(command.environ)
    flags = list(command.words[command.words.index(script.as_posix()) + 1 :])
    ranks = int(given.get("RANKS", 0)) * int(given.get("NODES", 1))
    if "sbatch" in command.words:
        values = dict(zip(command.words, command.words[1:], strict=False))
        ranks = int(values.get("--nodes", 1)) * int(values.get("--ntasks-per-node", 8))
    if "RUN" in given:
        load_run(given["RUN"], flags, world_size=ranks or None)
    return ""


ANEW = "write it anew: python -m tests.support.documents"


@pytest.mark.parametrize("name", [name for name in NAMES if answers(ROOT / name)])
def test_an_answer_in_a_page_is_the_one_that_the_command_gives(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for line, shown in answers(ROOT / name):
        assert answer(line) == shown, f"{line}: {ANEW}"


@pytest.mark.parametrize("name", [name for name in NAMES if programs(ROOT / name)])
def test_a_program_prints_what_its_page_shows(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for program, shown in programs(ROOT / name):
        assert printed(program) == shown, f"{program}: {ANEW}"


def test_the_messages_in_the_tables_of_errors_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("## While training")[2].partition("## Starting")[0]
    shown = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    # A message may be written as several literals.
    code = "".join(file.read_text() for file in (ROOT / "megalite").rglob("*.py"))
    code = re.sub(r'"\s*f?"', "", code)
    assert len(shown) >= 8 and [text for text in shown if text not in code] == []


def test_a_command_that_cannot_be_typed_is_seen(arguments_alone: None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    wrong = [
        "megalite trian run.toml",
        "megalite train run.toml --training.stepps 3",
        "megalite train absent.toml",
        "megalite generate run --promt x",
        "python -m benchmarks.absent",
        "python -m benchmarks.training_step --absent",
        "bash examples/absent.sh",
        "RANK=2 launch/torchrun.sh",
        "mpirun -n 4 python -m megalite trian run.toml",
        "srun --nodes 2 megalite",
        "make all",
        "JOB=$(REQEUE=no sbatch launch/slurm.sbatch)",
    ]
    page.write_text("".join(f"```bash\n{line}  # said\n```\n\n" for line in wrong))
    found = commands(page)
    typed = [*wrong[:-1], "REQEUE=no sbatch launch/slurm.sbatch"]
    assert [command.text.partition("  #")[0] for command in found] == typed
    assert all(complaint(command, page) for command in found)


@pytest.mark.parametrize("name", NAMES)
def test_no_sentence_begins_with_of_or_what_and_links_resolve(name: str) -> None:
    page = ROOT / name
    text = prose(page)
    sentences = re.findall(r"(?:^|[.!?:|] |\n\n|- )((?:Of|What) [a-z]\w*)", text)
    assert not sentences
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > LONGEST_LINE] == []
    words = prose(README).split()
    assert len(words) <= README_WORDS, f"{len(words)} words"


def names_of_numbers(line: str) -> str:
    """A printed line with `#` for each of its numbers."""
    return re.sub(r"\d[\d.,:e-]*", "#", " ".join(line.split()))


def test_the_steps_in_a_page_look_like_those_that_a_run_prints() -> None:
    steps = [
        line for page in PAGES for line in re.findall(r"^step +\d.*", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(steps) > 5
    stream = io.StringIO()
    metrics = StepMetrics(50, 5.8, 0.8, 9e-4, 102_400, 4803.0, 0.51, 2**28, 0.4, 0.0)
    Console(total_steps=200, every=50, peak="sgemm", stream=stream).step(metrics)
    assert {names_of_numbers(line) for line in steps} == {names_of_numbers(stream.getvalue())}
    without_rate = steps[0].replace("lr ", "")
    assert names_of_numbers(without_rate) != names_of_numbers(steps[0])


@pytest.mark.parametrize("folder", ["docs", "docs/learn"])
def test_every_page_stands_in_the_index(folder: str) -> None:
    pages = {page.name for page in (ROOT / folder).glob("*.md")} - {"README.md"}
    index = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    assert pages and {page for page in pages if f"({page})" not in index} == set()
    assert "(docs/README.md)" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.name)
def test_a_lesson_has_goals_and_exercises_and_is_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert page.name == "traps.md" or len(lines) <= LONGEST_LESSON
    sentences = [line for line in prose(page).splitlines() if not line.startswith("|")]
    assert [line for line in sentences if len(line) > LONGEST_LINE] == []
    if page.name not in ("README.md", "traps.md"):
        assert any(line.startswith("After this lesson you can") for line in lines)
        assert "## Exercises" in lines


def test_the_page_of_settings_is_that_of_the_schema() -> None:
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), (
        "write it anew: python -m docs.settings"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_tables_of_a_page_are_those_of_the_planner(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert lessons.with_tables(text) == text, "write it anew: python -m docs.lessons"


PICTURES = pictures.pictures()


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_are_those_of_the_code(name: str) -> None:
    drawn = PICTURES[name]
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == drawn, (
        "draw it anew: python -m docs.pictures"
    )
    root = ElementTree.fromstring(drawn)
    labels = root.attrib["aria-labelledby"].split()
    assert root.attrib["role"] == "img" and [child.attrib.get("id") for child in root[:2]] == labels
    # A background of its own: the texts are dark, and a page may be.
    assert root[2].attrib["fill"] == drawing.PAPER and root[2].attrib["width"] == root.attrib["width"]


@pytest.mark.parametrize("name", NAMES)
def test_every_program_in_a_page_compiles_and_its_imports_exist(name: str) -> None:
    for program in blocks(ROOT / name, "python"):
        compile(program, name, "exec")
        for module, names in re.findall(r"^from (megalite[.\w]*) import (.*)$", program, re.MULTILINE):
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin is not None
            source = Path(spec.origin).read_text(encoding="utf-8")
            for name in names.split(", "):
                assert re.search(rf'^(class|def) {name}\b|^__all__ = .*"{name}"', source, re.MULTILINE), name


def test_the_public_names_are_listed_and_exist() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for name in megalite.__all__:
        assert getattr(megalite, name) is not None
        assert re.search(rf"^\| `{name}\b", page, re.MULTILINE), f"{name} is not in docs/python.md"
        assert re.search(rf"^from megalite import .*\b{name}\b", page, re.MULTILINE), f"{name} has no example"


@pytest.mark.parametrize("name", ["125m", "1b", "8b"])
def test_the_ready_run_files_are_right(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, source = f"{ROOT}/examples/pretrain/{name}.toml", str(place / "book.txt")
    assert main(["config", "show", file, "--data.source", source]) == 0
    config = load_run(file, ["--data.source", source]).config
    assert config.layout.world_size == {"125m": 1, "1b": 8, "8b": 64}[name]
    tokens = config.batch.global_batch_size * config.training.sequence_length
    assert 0.5e6 <= tokens <= 4.2e6 and config.training.precision == "bf16"


READERS = ("generate", "evaluate", "top")
"""Commands that read a trained run."""


def test_lessons_read_the_same_trained_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    lines = [command for page in LESSONS for command in commands(page) if "runs/first" in command.words]
    typed = [command for command in lines if command.words[1] in READERS and "--tasks" not in command.words]
    assert len(typed) >= 3
    short = ["--training.steps", "2", "--tokenizer.vocab_size", "300", "--optimizer.warmup_steps", "1"]
    assert main(["train", "run.toml", *short]) == 0
    for command in typed:
        assert main(command.words[1:]) == 0, f"{command.text}\n{capsys.readouterr().err}"


@pytest.mark.extended
def test_a_student_who_types_the_lessons_sees_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_place(tmp_path)
    (tmp_path / "book.txt").write_text("".join(page.read_text() for page in PAGES))
    monkeypatch.chdir(tmp_path)
    weights_of(tmp_path / "my-model")
    pages = [*LESSONS, ROOT / "docs" / "troubleshooting.md"]
    lines = [Command("", (), ("megalite", "train", "run.toml"))]
    lines += [command for page in pages for command in commands(page)]
    for command in lines:
        words = command.words
        if "hosts" in words or "serve" in words or "NAME" in words:
            continue
        if words[:2] == ("megalite", "train"):
            words = tuple(quick(words))
        elif "train" in words and words[0] in ("python", "torchrun"):
            shell(tmp_path, shlex.join(quick(words)))
        if words[0] == "megalite" and words[1] != "doctor":
            assert main(words[1:]) in (0, 1), f"{command.text}\n{capsys.readouterr().err}"


def weights_of(folder: Path) -> None:
    """Write random weights beside the config.json of a place's model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


QUICK_STEPS = 6
NOT_RUN = ("--help", "doctor", "selftest", "presets", "megatron-checkpoint", "run.toml")
"""Words of commands that are read alone: those that test their own subject, and further trainings."""


@pytest.mark.extended
def test_a_person_who_types_the_pages_from_top_to_bottom_sees_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in ("examples", "launch"):
        (tmp_path / each).symlink_to(ROOT / each)
    # The vocabulary of the README needs a text with many words.
    (tmp_path / "book.txt").write_text("".join(page.read_text() for page in PAGES))
    [run_file] = blocks(README, "toml")
    (tmp_path / "run.toml").write_text(run_file)
    monkeypatch.chdir(tmp_path)
    for name in ("README.md", "docs/getting-started.md"):
        typed = [command for command in commands(ROOT / name) if command.words[0] == "megalite"]
        assert len(typed) >= 3
        for command in typed:
            if not {"--help", "doctor", "launch"} & set(command.words):  # launch needs hosts
                if command.words[1] == "train":
                    shell(tmp_path, shlex.join(quick(command.words)))
                else:
                    assert main(command.words[1:]) == 0, f"{command.text}\n{capsys.readouterr().err}"
        for program in blocks(ROOT / name, "python"):
            steps = f"training={{'steps': {QUICK_STEPS}}}"
            (tmp_path / "script.py").write_text(program.replace('"run.toml"', f'"run.toml", {steps}'))
            shell(tmp_path, "python script.py")
    for name in ("docs/data.md", "docs/checkpoints.md", "docs/deepspeed.md"):
        typed = [command for command in commands(ROOT / name) if command.words[0] == "megalite"]
        typed = [command for command in typed if not set(NOT_RUN) & set(command.words)]
        assert len(typed) >= 2
        for command in typed:
            if command.words[1] != "train":
                assert main(command.words[1:]) == 0, f"{command.text}\n{capsys.readouterr().err}"


def quick(words: Sequence[str]) -> list[str]:
    """Return a training with few steps and two checkpoints; more steps than another's stay more."""
    line, steps = list(words), QUICK_STEPS
    if "--training.steps" in line:
        place = line.index("--training.steps")
        steps = max(2, int(line[place + 1]) // 8)
        del line[place : place + 2]
    return [*line, "--training.steps", str(steps), "--checkpoint.every", str(steps // 2)]


def shell(place: Path, text: str, timeout: int = 300) -> None:
    """Run a line as a reader would, with this Python's commands."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environ |= {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-c", text], cwd=place, env=environ, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
