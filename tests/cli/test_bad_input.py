"""Every wrong input ends with one clear error and exit code 2, at once, and nothing that stood there is touched."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megalite import cli
from tests.cli.bad_input import (
    checkpoints,
    configs,
    forged,
    hf_folders,
    megatron,
    texts,
    token_files,
    tokenizers,
)
from tests.cli.bad_input.case import Case, build_world

ROOT = Path(__file__).parents[2]
MODULES = (texts, token_files, tokenizers, configs, checkpoints, hf_folders, megatron, forged)
CASES: list[Case] = [case for module in MODULES for case in module.CASES]
SECONDS = 240


@pytest.fixture(scope="module")
def good_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_world(tmp_path_factory.mktemp("good"))


@pytest.fixture
def world(good_world: Path, tmp_path: Path) -> Path:
    # Under another path: the manifest goes on naming the tokenizer that the token file was made with.
    shutil.copytree(good_world, tmp_path / "world")
    return tmp_path / "world"


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def run(
    case: Case, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and stderr of the command."""
    if case.in_a_process:
        command = [sys.executable, "-m", "megalite", *argv]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        return done.returncode, done.stderr
    # What `megalite train` does to its process is for a process of its own.
    monkeypatch.setattr("megalite.train.run.prepare_process", lambda *_, **__: 1)
    if case.patch is not None:
        case.patch(monkeypatch)
    try:
        code = cli.main(argv)
    except SystemExit as ended:  # of argparse
        code = int(ended.code or 0)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_input_is_said(
    case: Case, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = case.make(world)
    if os.geteuid() == 0 and "Permission denied" in " ".join(case.said):
        pytest.skip("root may read everything")
    capsys.readouterr()
    before = contents(world)
    code, said = run(case, argv, monkeypatch, capsys)
    assert code == 2, said
    assert "Traceback" not in said and said.count("error: ") == 1, said
    for part in case.said:
        assert part in said, said
    after = contents(world)
    assert {name: after.get(name) for name in before} == before, "it changed what stood there"
    new = [name for name in set(after) - set(before) if not name.startswith("run/")]
    assert not new or argv[0] == "train", f"it left {new}"


def test_the_table_is_as_long_as_it_is_to_be() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 100
