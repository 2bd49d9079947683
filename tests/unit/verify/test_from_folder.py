"""A folder is compared with transformers' own model of it, in a layout; a fault of ours is found and named."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file

from megalite.convert.huggingface.export import as_family_tensor
from megalite.errors import CheckpointError, ConfigError
from megalite.families.registry import family_tensors, hf_config
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.verify.from_folder import verify_folder
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES, tiny_shape

SHORT = ("--training.sequence_length", "12")
SWAPPED = """
from megalite.convert.huggingface.load import HuggingFaceReader
read = HuggingFaceReader.read
names = {"model.layers.1.input_layernorm.weight": "model.layers.1.post_attention_layernorm.weight"}
names |= {other: name for name, other in names.items()}
def swapped(self, state_key, name, region):
    return read(self, state_key, names.get(name, name), region)
HuggingFaceReader.read = swapped
"""
MISSING = "sys.modules['transformers'] = None"


def written(folder: Path, shape: ModelShape) -> Path:
    """A folder of random weights; its norms are not all alike."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: 0.06 * torch.randn(size, generator=generator)
        + (name.endswith("norm.weight") and not shape.zero_centered_gamma)
        for name, size in canonical_tensors(shape).items()
    }
    folder.mkdir()
    tensors = {
        tensor.name: as_family_tensor(tensor, [weights[part] for part in tensor.parts])
        for tensor in family_tensors(shape)
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    return folder


def verified(folder: Path, *flags: str, planted: str = "") -> tuple[int, dict[str, Any]]:
    """Run the command in a process of its own, which ranks are forked of; `planted` runs before."""
    words = ["verify", "--from", str(folder), "--json", *SHORT, *flags]
    program = f"import sys\n{planted}\nfrom megalite.cli import main\nsys.exit(main({words!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder.parent, check=False
    )
    return done.returncode, json.loads(done.stdout)


CASES = {
    "one process, fused tensors": (FAMILY_SHAPES["gpt_neox"], ()),
    "tensor 2": (FAMILY_SHAPES["phi3"], ("--parallel.tensor", "2")),
    "experts on two ranks": (MIXTURE_SHAPES["qwen3_moe"], ("--parallel.data", "2", "--parallel.expert", "2")),
}


@pytest.mark.parametrize("name", cases([*CASES], core=["experts on two ranks"]))
def test_transformers_and_any_layout_agree(tmp_path: Path, name: str) -> None:
    shape, flags = CASES[name]
    code, document = verified(written(tmp_path / "folder", shape), *flags)
    assert code == 0 and document["holds"], document["departure"]
    trained = document["worst"]["gradient before the sum"]
    assert trained["tensors"] == len(canonical_tensors(shape)) and trained["error"] > 0
    assert document["worst"]["initial weights"]["error"] == 0
    assert Path(tmp_path / "folder.verify.txt").read_text().startswith("holds: ")


# With 2 of 4 layers: a pattern that is cut short, a dense layer before the experts, stages of uneven layers.
FIRST_LAYERS = {
    "a window in every layer that is left": (FAMILY_SHAPES["gemma3"], ()),
    "a dense layer before the experts": (MIXTURE_SHAPES["deepseek_v3"], ()),
    "a window in one of two layers": (MIXTURE_SHAPES["gpt_oss"], ()),
    "norms of heads": (FAMILY_SHAPES["qwen3"], ("--parallel.tensor", "2")),
    "stages": (tiny_shape(), ("--parallel.pipeline", "2", "--parallel.layers_per_stage", "[3, 1]")),
}


@pytest.mark.parametrize(
    "name", cases([*FIRST_LAYERS], core=["a window in every layer that is left", "stages"])
)
def test_the_first_layers_alone_agree_and_the_certificate_names_the_others(tmp_path: Path, name: str) -> None:
    shape, flags = FIRST_LAYERS[name]
    code, document = verified(written(tmp_path / "folder", shape), "--layers", "2", *flags)
    assert code == 0 and document["holds"], document["departure"]
    assert document["worst"]["initial weights"]["tensors"] == len(
        canonical_tensors(replace(shape, num_hidden_layers=2))
    )
    assert document["changed"][0] == "model.num_hidden_layers: 4 -> 2" and not document["full_size"]
    assert ("parallel.layers_per_stage: [3, 1] -> unset" in document["changed"]) == (name == "stages")
    left_out = document["unchecked"][0]
    assert left_out.startswith("the last 2 of 4 layers")
    # Every third layer of this Gemma 3 has no window.
    assert ("--layers 3 has one of each" in left_out) == (shape.family == "gemma3_text")
    assert "computes of the first layers of " in Path(tmp_path / "folder.verify.txt").read_text()


def test_as_many_layers_as_the_model_has_change_nothing(tmp_path: Path) -> None:
    code, document = verified(written(tmp_path / "folder", tiny_shape(layers=1)), "--layers", "2")
    assert code == 0 and document["holds"] and document["full_size"] and document["changed"] == []


def test_too_few_layers_for_stages_or_experts_are_refused(tmp_path: Path) -> None:
    folder = str(written(tmp_path / "folder", MIXTURE_SHAPES["deepseek_v3"]))
    with pytest.raises(ConfigError, match=r"--layers: 1 leaves no layer with experts: .*; use 2 or more"):
        verify_folder(folder, layers=1)
    stages = ("--parallel.pipeline=3", "--training.micro_batches=3")
    with pytest.raises(ConfigError, match=r"--layers: 2 is less than the 3 chunks of .*; use 3 or more"):
        verify_folder(folder, flags=stages, layers=2)


def test_swapped_norms_are_named(tmp_path: Path) -> None:
    code, document = verified(written(tmp_path / "folder", tiny_shape(layers=2)), planted=SWAPPED)
    assert code == 1 and not document["holds"]
    names = {each["name"] for each in document["departures"] if each["quantity"] == "initial weights"}
    assert {
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    } == names


def test_another_rotary_base_departs_in_the_logits(tmp_path: Path) -> None:
    code, document = verified(written(tmp_path / "folder", tiny_shape(layers=2)), "--model.rope_theta", "77")
    assert code == 1 and document["worst"]["initial weights"]["error"] == 0
    assert document["departures"][0]["name"] == "logits"
    assert "output of logits" in document["departure"]


def test_without_transformers_the_command_says_so(tmp_path: Path) -> None:
    code, document = verified(written(tmp_path / "folder", tiny_shape(layers=1)), planted=MISSING)
    assert code == 2 and "--from compares with transformers" in document["error"]["message"]


def test_a_model_that_does_not_fit_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "folder", tiny_shape())
    free = "megalite.verify.from_folder.available_memory_bytes"
    monkeypatch.setattr(free, lambda: 1000)
    with pytest.raises(
        CheckpointError, match=r"parameters: .* takes about .* are free; use a machine with more"
    ):
        verify_folder(str(folder))
    # Its 82,000 parameters need 3.5 MB beside 400 MiB for torch, and a layer 0.7 MB.
    monkeypatch.setattr(free, lambda: (400 << 20) + 2_100_000)
    with pytest.raises(CheckpointError, match=r"4 layers of .* have .* with --layers 2, or use") as refused:
        verify_folder(str(folder))
    assert refused.value.problems[0].set == {"--layers": 2}
    with pytest.raises(CheckpointError, match="free; use a machine with more memory, or a smaller model"):
        verify_folder(str(folder), flags=("--parallel.pipeline=3", "--training.micro_batches=3"))
    monkeypatch.setattr(free, lambda: 1000)
    with pytest.raises(CheckpointError, match=r"1 layers of .* free; use a machine with more"):
        verify_folder(str(folder), layers=1)
    with pytest.raises(CheckpointError, match="is not a folder"):
        verify_folder(str(tmp_path / "nowhere"))


class FitsError(Exception):
    """The comparison would begin."""


def begins(*_: object) -> NoReturn:
    raise FitsError


def test_so_many_layers_as_fit_are_named_where_layers_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 8
    shape = MIXTURE_SHAPES["qwen3_moe, dense layers, windows, biases"]
    folder = str(written(tmp_path / "folder", replace(shape, num_hidden_layers=layers)))
    monkeypatch.setattr("megalite.verify.from_folder.write_first_layers", begins)
    named = set()
    for free in range((400 << 20) + 1_000_000, (400 << 20) + 10_000_000, 300_000):
        monkeypatch.setattr("megalite.verify.from_folder.available_memory_bytes", lambda free=free: free)
        with pytest.raises((CheckpointError, FitsError)) as refused:
            verify_folder(folder, layers=layers - 1)
        if isinstance(refused.value, FitsError):
            continue
        if (fitting := refused.value.problems[0].set.get("--layers")) is not None:
            named.add(fitting)
            with pytest.raises(FitsError):
                verify_folder(folder, layers=fitting)
            with pytest.raises(CheckpointError):
                verify_folder(folder, layers=fitting + 1)
    assert len(named) > 2
