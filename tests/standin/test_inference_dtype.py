"""The number type in which models are loaded to run: float32 on a CPU, 16 bits on an accelerator, or what is asked."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalite.cli import convert
from megalite.generation.inference_dtype import stored_dtype
from megalite.generation.loaded import load, load_shown, load_source
from megalite.generation.source import find_source
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.ranks import RankPool
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

STORED = ("float32", "bfloat16", "float16", "int8")
ON_A_CARD = {"float32": "bfloat16", "bfloat16": "bfloat16", "float16": "float16", "int8": "bfloat16"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with a checkpoint in float32, and its exports by the type of their weights."""
    root = tmp_path_factory.mktemp("models")
    run = root / "run"
    (run / "tokenizer").mkdir(parents=True)
    tiny_tokenizer(run / "tokenizer")
    shape = replace(tiny_shape(layers=1), vocab_size=384)
    save_stage(run, shape, lively_stage(shape))
    for stored in STORED:
        flags = ["--quantise", "int8", "--dtype", "bfloat16"] if stored == "int8" else ["--dtype", stored]
        assert convert.run(["export", str(run), str(root / stored), *flags]) == 0
    return {"run": run, **{stored: root / stored for stored in STORED}}


def loaded_types(folders: dict[str, Path], dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return the type of each model, loaded on this rank's device as a user's script would."""
    models = {name: load(folder, dtype=dtype).model for name, folder in folders.items()}
    return {name: str(model.dtype).removeprefix("torch.") for name, model in models.items()}


def loaded_types_without_bf16(folders: dict[str, Path]) -> dict[str, str]:
    module = torch.get_device_module("standin")
    with mock.patch.object(module, "is_bf16_supported", lambda including_emulation: including_emulation):
        return loaded_types(folders)


def said(folder: Path, dtype: str | None) -> str:
    """Return what a command says to its user about the type of a model."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        load_shown(find_source(folder), ParallelMesh.single(local_device(0, 1)), dtype)
    return stderr.getvalue()


@pytest.mark.extended
def test_a_model_runs_in_its_own_16_bits_or_in_bfloat16_on_an_accelerator(
    devices: RankPool, folders: dict[str, Path]
) -> None:
    assert devices.run(loaded_types, folders=folders) == [{"run": "bfloat16", **ON_A_CARD}]
    exact = dict.fromkeys(folders, "float32")
    assert devices.run(loaded_types, folders=folders, dtype=torch.float32) == [exact]
    assert loaded_types(folders) == exact, "a CPU computes in float32, whatever is stored"


@pytest.mark.extended
def test_a_card_without_bfloat16_computes_in_float32_or_float16(
    devices: RankPool, folders: dict[str, Path]
) -> None:
    expected = {**dict.fromkeys(folders, "float32"), "float16": "float16"}
    assert devices.run(loaded_types_without_bf16, folders=folders) == [expected]


@pytest.mark.extended
def test_a_command_says_what_it_chose(devices: RankPool, folders: dict[str, Path]) -> None:
    [note] = devices.run(said, folder=folders["float32"], dtype=None)
    assert note == (
        f"note: {folders['float32']} runs in bfloat16 on standin:0 (weights: float32); --dtype names another type\n"
    )
    assert devices.run(said, folder=folders["float32"], dtype="float32") == [""]
    assert said(folders["float32"], None) == ""


def loaded_by_two_cards(folder: Path, without_bf16: int) -> tuple[list[torch.dtype], str]:
    """Return the types in which a rank of two loads a model, and what it says; one rank's card has no bfloat16."""
    mesh = ParallelMesh.over_world(Layout(tensor=2), local_device(dist.get_rank(), 2))
    module = torch.get_device_module("standin")
    lacks = mesh.rank == without_bf16
    with (
        mock.patch.object(module, "is_bf16_supported", lambda including_emulation: not lacks),
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        models = [load_shown(find_source(folder), mesh, None), load_source(find_source(folder), mesh)]
    return [each.model.dtype for each in models], stderr.getvalue()


@pytest.mark.extended
@pytest.mark.parametrize("without_bf16", [0, 1])
def test_cards_of_two_kinds_load_one_type(
    devices: RankPool, folders: dict[str, Path], without_bf16: int
) -> None:
    folder = folders["bfloat16"]
    [(first, note), (second, silent)] = devices.run(
        loaded_by_two_cards, 2, folder=folder, without_bf16=without_bf16
    )
    assert first == second == [torch.float32] * 2
    assert "runs in float32 on standin:0 (weights: bfloat16; the ranks alone would take " in note
    assert silent == ""


@pytest.mark.extended
def test_the_type_of_most_weights_counts(folders: dict[str, Path]) -> None:
    stored = {name: stored_dtype(find_source(folder)) for name, folder in folders.items()}
    # An int8 folder's type is that of its embedding and head, not that of its norms or packed words.
    assert stored == {
        "run": "float32",
        "float32": "float32",
        "bfloat16": "bfloat16",
        "float16": "float16",
        "int8": "bfloat16",
    }
