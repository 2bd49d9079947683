"""megalite convert export of another program's checkpoint: in one command, and refused before it is imported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from megalite.cli import convert, main
from megalite.errors import MegaliteError
from megalite.families.registry import family_tensors, hf_config
from tests.support.tiny import tiny_shape

SHAPE = tiny_shape(layers=1)


def write_dcp(folder: Path, *, weight: float, moment: float) -> Path:
    """Write a model and AdamW's state of it as FSDP2's state dicts are, with config.json beside."""
    generator = torch.Generator().manual_seed(1)
    names = {tensor.name: tensor.shape for tensor in family_tensors(SHAPE)}
    model = {name: weight * torch.randn(shape, generator=generator) for name, shape in names.items()}
    state: dict[str, Any] = {
        name: {
            "step": torch.tensor(3.0),
            **dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.full(shape, moment)),
        }
        for name, shape in names.items()
    }
    dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(hf_config(SHAPE, "float32", {})))
    return folder


def test_an_export_reads_and_writes_no_moment(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "step-3", weight=0.1, moment=float("nan"))
    assert convert.run(["export", str(folder), str(tmp_path / "out" / "hf")]) == 0
    assert [path.name for path in tmp_path.iterdir() if path != folder] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    assert load_file(tmp_path / "out" / "hf" / "model.safetensors").keys() == {
        tensor.name for tensor in family_tensors(SHAPE)
    }


REFUSED = {
    "--adapter": "not a run of megalite; leave out --adapter",
    "--average 2": "not a run of megalite; leave out --average",
    "--steps 3": "not a run of megalite; leave out --steps",
    "--base x": "not a run of megalite; leave out --base",
    "--weights ema": "exported with its weights; leave out --weights",
    "--weights master": "exported with its weights; leave out --weights",
    "--tokenizer nowhere": "tokenizer nowhere does not exist",
    "--quantise int8 --dtype float16": "float16 has too small a range",
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import finds a NaN in it: another error stands before the import."""
    return write_dcp(tmp_path_factory.mktemp("dcp") / "step-3", weight=float("nan"), moment=0.0)


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_are_refused_before_the_import(damaged: Path, tmp_path: Path, flags: str) -> None:
    with pytest.raises(MegaliteError, match=REFUSED[flags]):
        convert.run(["export", str(damaged), str(tmp_path / "out"), *flags.split()])
    assert not list(tmp_path.iterdir())


def test_a_run_with_a_checkpoint_is_refused_before_the_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither source could be read: the one is damaged, the other is on a Hub that cannot be reached."""
    folder = write_dcp(tmp_path / "step-3", weight=0.1, moment=0.0)
    convert.run(["import", str(folder), str(tmp_path / "run")])
    (folder / ".metadata").write_bytes(b"damaged")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for source in (str(folder), "nobody/no-model"):
        with pytest.raises(MegaliteError, match="step-000003 exists already; name another folder"):
            convert.run(["import", source, str(tmp_path / "run")])


def test_a_stray_metadata_file_does_not_make_hugging_face_weights_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dcp(tmp_path / "step-3", weight=0.1, moment=0.0)
    convert.run(["export", str(folder), str(tmp_path / "hf")])
    (tmp_path / "hf" / ".metadata").write_bytes(b"of a file manager")
    capsys.readouterr()
    assert convert.run(["inspect", str(tmp_path / "hf")]) == 0
    shown = capsys.readouterr().out
    assert "a Hugging Face folder" in shown and "bytes in 1 file\n" in shown
    assert convert.run(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    next((tmp_path / "hf").glob("*.safetensors")).rename(folder / "model.safetensors")
    convert.run(["inspect", str(folder)])
    assert "a torch distributed checkpoint" in capsys.readouterr().out


def test_a_folder_that_is_not_replaced_is_refused_before_the_import(damaged: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MegaliteError, match="neither empty nor a Hugging Face export"):
        convert.run(["export", str(damaged), str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_import_leaves_nothing(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(MegaliteError, match="has nan"):
        convert.run(["export", str(damaged), str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (
            ["generate", "OLD", "--prompt", "a"],
            "MODEL: OLD IS FOREIGN: megalite convert export OLD",
        ),
        (
            ["train", "--run.folder", "OLD"],
            "run.folder: OLD IS FOREIGN: megalite convert import OLD",
        ),
        (
            ["train", "--run.folder", "new", "--checkpoint.resume", "OLD"],
            "checkpoint.resume: OLD IS FOREIGN: megalite convert import OLD",
        ),
    ],
    ids=["generate", "run folder", "resume"],
)
def test_another_programs_checkpoint_is_named_where_ours_is_meant(
    tmp_path: Path, command: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in its folder would begin anew without a word, and a DeepSpeed folder's `latest` is not to be removed."""
    old = write_dcp(tmp_path / "old", weight=0.1, moment=0.0)
    before = sorted(old.rglob("*"))
    words = [word.replace("OLD", str(old)) for word in command]
    if words[0] == "train":
        (tmp_path / "text.txt").write_text("the hill and the river\n" * 50)
        words += [
            "--data.source",
            str(tmp_path / "text.txt"),
            "--model.preset",
            "tiny",
            "--training.steps",
            "1",
        ]
        words += [
            "--training.sequence_length",
            "8",
            "--training.micro_batch_size",
            "1",
            "--training.micro_batches",
            "1",
        ]
    assert main(words) == 2
    said = named.replace("IS FOREIGN", "is a torch distributed checkpoint; first write it in another folder")
    assert said.replace("OLD", str(old)) in capsys.readouterr().err
    assert sorted(old.rglob("*")) == before
