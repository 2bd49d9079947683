"""Rules over the files and folders that settings name: all problems at once, and before anything is prepared."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from megalite.config.load import load_run
from megalite.config.rules.places import is_prepared
from megalite.data.files.partial_files import partial
from megalite.errors import ConfigError
from tests.unit.config.runs import REMOVED, changed, write_run


def said(folder: Path, changes: Mapping[str, Any], *, places: bool = True) -> list[str]:
    path = write_run(folder, changed(changes))
    try:
        load_run(path, places=places)
    except ConfigError as error:
        return list(map(str, error.problems))
    return []


def test_every_unusable_place_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    changes = {
        "run.folder": str(tmp_path / "file" / "run"),
        "checkpoint.resume": str(tmp_path / "none"),
        "data.source": str(tmp_path / "book.txt"),
        "data.validation": [str(tmp_path / "file"), str(tmp_path / "other")],
        "tokenizer.vocab_size": REMOVED,
        "parallel.pipeline": 9,
    }
    found = said(tmp_path, changes)
    assert [each.split(": ")[0] for each in found] == [
        "parallel.pipeline",
        "training.micro_batches",
        "run.folder",
        "checkpoint.resume",
        "data.source",
        "data.validation",
    ]
    assert found[2] == (
        f'run.folder: "{tmp_path}/file/run" cannot be written: {tmp_path}/file is a file; '
        "name another folder, for example runs/default"
    )
    assert found[3].endswith('does not exist; name a checkpoint or a run folder, or use "auto" or "never"')
    assert found[5].startswith(f'data.validation: "{tmp_path}/other" does not exist; name a text file')
    assert said(tmp_path, changes, places=False) == found[:2]


def test_existing_places_are_no_problem(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text")
    (tmp_path / "pair.bin").write_bytes(b"")
    (tmp_path / "pair.idx").write_bytes(b"")
    assert said(tmp_path, {"run.folder": str(tmp_path / "new" / "run"), "data.source": "stdlib"}) == []
    for source in ("book.txt", ".", "pair", "pair.bin", "pair.idx"):
        settings = {"run.folder": str(tmp_path), "data.source": str(tmp_path / source)}
        assert said(tmp_path, settings) == []
    prepared = {"data.source": str(tmp_path / "pair"), "tokenizer.vocab_size": REMOVED}
    assert said(tmp_path, {**prepared, "checkpoint.resume": str(tmp_path)}) == []


def test_a_missing_text_names_the_similar_one(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("text")
    blend = [{"source": str(tmp_path / "shakespear.txt"), "weight": 1.0}]
    [problem] = said(tmp_path, {"data.source": REMOVED, "data.blend": blend})
    assert problem == (
        f'data.blend[1].source: "{tmp_path}/shakespear.txt" does not exist; did you mean {tmp_path}/shakespeare.txt?'
    )


@pytest.mark.parametrize("address", ["s3://bucket/web.jsonl", "gs://bucket/part", "https://host/text.txt"])
@pytest.mark.parametrize("key", ["data.source", "data.validation"])
def test_an_address_of_an_object_store_is_answered_with_the_way_in(
    tmp_path: Path, key: str, address: str
) -> None:
    [problem] = said(tmp_path, {key: address})
    assert problem == (
        f'{key}: "{address}" is an address, and text is read from files; '
        "mount the store as a folder (rclone mount, s3fs), or copy the files to a disk first"
    )


def test_a_preparation_that_was_cut_off_is_said(tmp_path: Path) -> None:
    partial(tmp_path / "pair.bin").write_bytes(b"")
    [problem] = said(tmp_path, {"data.source": str(tmp_path / "pair")})
    assert "is not whole: its megalite data prepare was cut off, or still runs" in problem


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    settings = {"tokenizer.vocab_size": REMOVED, "tokenizer.path": str(tmp_path / "tok")}
    [problem] = said(tmp_path, settings)
    assert problem.startswith(f'tokenizer.path: "{tmp_path}/tok" does not exist; name a Hugging Face folder')


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    [problem] = said(tmp_path, {"run.folder": str(tmp_path / "locked" / "run")})
    assert f"no folder can be made in {tmp_path}/locked (Permission denied)" in problem


def test_a_run_folder_that_cannot_be_made_is_said_even_to_root(tmp_path: Path) -> None:
    [problem] = said(tmp_path, {"run.folder": "/proc/run"})
    assert problem.startswith('run.folder: "/proc/run" cannot be written: no folder can be made in /proc (')
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("link", "link/run"):
        [problem] = said(tmp_path, {"run.folder": str(tmp_path / name)})
        assert f"{tmp_path}/link is a link to a path that does not exist" in problem
    before = set(tmp_path.iterdir())
    assert said(tmp_path, {"run.folder": str(tmp_path / "new")}) == [] and set(tmp_path.iterdir()) == before


def test_config_show_tells_of_a_run_folder_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, changed({}))
    assert main(["config", "show", str(path), "--run.folder", "/proc/run"]) == 2
    assert 'run.folder: "/proc/run" cannot be written' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 5000, "", "/"])
def test_names_that_are_no_path_are_no_crash(tmp_path: Path, name: str) -> None:
    assert not is_prepared(name)
    if name:
        settings = {"run.folder": f"{tmp_path}/{name}", "data.source": name, "tokenizer.path": name}
        keys = {each.split(":")[0] for each in said(tmp_path, settings)}
        assert keys <= {"run.folder", "data.source", "tokenizer.path", "tokenizer.vocab_size"}
