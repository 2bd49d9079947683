"""megalite convert import and inspect on a Megatron-LM checkpoint, as a user calls them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.reader import CheckpointReader
from megalite.cli import convert
from tests.support.megatron_writer import Written, write_megatron
from tests.support.tiny import tiny_shape
from tests.support.waiting import PATIENCE
from tests.unit.convert.test_megatron import numbered

ROOT = Path(__file__).parents[2]


def said(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert convert.run(command) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_checkpoint_is_shown_and_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = tiny_shape()
    weights = {name: tensor.bfloat16() for name, tensor in numbered(shape).items()}
    folder = write_megatron(tmp_path / "megatron", shape, weights, Written(2, 2, 2))
    shown = said(capsys, "inspect", str(folder))
    for fact in (
        "iter_0001000: a Megatron-LM checkpoint of tensor 2 x pipeline 2 x 2 chunks",
        "iteration 1000, checkpoint_version 3",
        "bytes in 4 files",
        "num_layers 4, hidden_size 48,",
        "stage 1, chunk 1: 8 tensors, as tensor rank 0 has them",
        "decoder.layers.0.mlp.linear_fc2.weight 48 x 38 bfloat16",
        "embedding.word_embeddings.weight 64 x 48 bfloat16",
    ):
        assert fact in shown
    done = said(capsys, "import", str(folder), str(tmp_path / "run"))
    assert f"{folder}: a Megatron-LM checkpoint, step 1,000" in done
    assert f"{tmp_path}/run/checkpoints/step-000000: 81,552 parameters of bfloat16, a llama" in done
    assert "weights only: a run that starts from it begins with a new optimizer state" in done
    assert (
        f"next: megalite convert export {tmp_path}/run MODEL && megalite train --model.weights MODEL" in done
    )
    assert not (tmp_path / "run" / "run.toml").exists()
    with CheckpointReader(tmp_path / "run" / "checkpoints" / "step-000000") as reader:
        assert {entry.dtype for entry in reader.manifest.tensors[WEIGHT].values()} == {"bfloat16"}
        assert reader.manifest.model == shape


def test_what_it_imports_is_exported_for_transformers(tmp_path: Path) -> None:
    """The way out of Megatron-LM: export compares what transformers computes with what is computed here."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: 0.1 * torch.randn(tensor.shape, generator=generator) + (tensor.dim() == 1)
        for name, tensor in numbered(tiny_shape()).items()
    }
    folder = write_megatron(tmp_path / "megatron", tiny_shape(), weights, Written(2))
    assert convert.run(["import", str(folder), str(tmp_path / "run")]) == 0
    assert convert.run(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    # In one command, too, which leaves nothing else.
    assert convert.run(["export", str(folder), str(tmp_path / "out" / "hf")]) == 0
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["hf"]
    assert not list(tmp_path.glob("*.import-*"))
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert (tmp_path / "out" / "hf" / "model.safetensors").read_bytes() == (
        tmp_path / "hf" / "model.safetensors"
    ).read_bytes()
    assert exported.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(exported[name], tensor)


def test_neither_megatron_nor_deepspeed_is_imported(tmp_path: Path) -> None:
    folder = write_megatron(tmp_path / "megatron", tiny_shape(), numbered(tiny_shape()), Written())
    code = (
        "import sys; from megalite.cli.convert import run; run(['inspect', sys.argv[1]]);"
        " assert not {'megatron', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
