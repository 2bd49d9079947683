"""The default number type of a loaded model, by the device and by the type of the weights on disk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megalite.convert.weight_source import WeightSource
from megalite.generation.inference_dtype import agreed_dtype, inference_dtype, inference_notes
from megalite.parallel.mesh import ParallelMesh
from tests.support.tiny import tiny_shape

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
TYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A card with instructions for bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    return monkeypatch


def weights_of(folder: Path, most: torch.dtype) -> WeightSource:
    """Write weights of one type beside norms in float32 and a packed table of integers, each of another size."""
    tensors = {
        "embedding": torch.zeros(30, 8, dtype=most),
        "norm": torch.zeros(8),
        "packed": torch.zeros(500, dtype=torch.int32),
    }
    save_file(tensors, folder / "model.safetensors")
    return WeightSource(folder, "huggingface", tiny_shape())


@pytest.mark.parametrize("stored", TYPES)
def test_a_card_runs_the_weights_own_16_bits_or_bfloat16(
    card: pytest.MonkeyPatch, tmp_path: Path, stored: str
) -> None:
    source = weights_of(tmp_path, TYPES[stored])
    chosen = torch.float16 if stored == "float16" else torch.bfloat16
    assert inference_dtype(source, CARD) == chosen
    [note] = inference_notes(source, CARD, chosen, chosen=True)
    assert f"in {str(chosen).removeprefix('torch.')} on cuda:0 (weights: {stored})" in note
    card.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert inference_dtype(source, CARD) == (torch.float16 if stored == "float16" else torch.float32)


def test_int8_on_a_card_is_said_to_cost_time(card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = replace(weights_of(tmp_path, torch.bfloat16), int8=True)
    [_, warning] = inference_notes(source, CARD, torch.bfloat16, chosen=True)
    assert warning.startswith(f"warning: {tmp_path} has int8 weights") and "cost time" in warning
    assert list(inference_notes(source, CARD, torch.bfloat16, chosen=False)) == [warning]
    assert not list(inference_notes(source, CPU, torch.float32, chosen=True))


def test_what_is_asked_is_used_and_a_cpu_computes_in_float32(
    card: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = weights_of(tmp_path, torch.bfloat16)
    for asked in TYPES.values():
        assert inference_dtype(source, CARD, asked) == inference_dtype(source, CPU, asked) == asked
    assert inference_dtype(source, CPU) == torch.float32
    assert not list(inference_notes(source, CPU, torch.float32, chosen=True))
    assert not list(inference_notes(source, CARD, torch.float32, chosen=False))


def test_ranks_with_other_cards_agree_on_float32(card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, mesh = weights_of(tmp_path, torch.bfloat16), ParallelMesh.single(CARD)
    assert agreed_dtype(source, mesh) == (torch.bfloat16, "")
    card.setattr(ParallelMesh, "gather_objects", lambda self, own: [own, torch.float32, own])
    chosen, why = agreed_dtype(source, mesh)
    assert (chosen, why) == (torch.float32, "the ranks alone would take bfloat16 and float32")
    assert agreed_dtype(source, mesh, torch.float16) == (torch.float16, "")
    [note] = inference_notes(source, CARD, chosen, chosen=True, why=why)
    assert f"runs in float32 on cuda:0 (weights: bfloat16; {why})" in note
