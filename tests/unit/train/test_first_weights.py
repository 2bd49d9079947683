"""Weights that a load overwrites are not drawn, and every weight is drawn or loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import weights as checkpoint_weights
from megalite.checkpoint.weights import WeightReader
from megalite.convert.huggingface.export import export
from megalite.convert.huggingface.quantise import quantise_folder
from megalite.data.batches.loader import StepLoader
from megalite.generation import loaded
from megalite.generation.loaded import load_source
from megalite.generation.source import find_source
from megalite.model import stages
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.train.step import train_step
from megalite.train.step.train_step import StartingPoint, TrainStep
from tests.support.checkpoint_pairs import COMMON, save
from tests.support.matrix.rows import config_of
from tests.support.matrix.train import TinyLoader
from tests.support.parity import assert_same_tensors
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

LORA = {"adapter.kind": "lora", "adapter.rank": 3, "adapter.targets": ["q_proj", "down_proj"]}
DORA = {**LORA, "adapter.dora": True}
SETTINGS: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "optimizer.groups"},
    "model.vocab_size": 384,
    "training.micro_batch_size": 2,
    "training.micro_batches": 2,
    "data.loader_workers": 0,
}
SHAPE = config_of(SETTINGS).shape(384)


class Drawn:
    """The number of values drawn; of torch's own generator none."""

    total = 0


@contextmanager
def drawn() -> Iterator[Drawn]:
    """Count the values that are drawn within."""
    counts, draw = Drawn(), stages.normal_slice

    def counted(*what: Any, **others: Any) -> Tensor:
        values = draw(*what, **others)
        counts.total += values.numel()
        return values

    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "normal_slice", counted)
        yield counts
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator drew values"


def random_parameters(replica: Replica, *, adapter_only: bool = False) -> dict[str, int]:
    return {
        each.name: replica.tensors[each.name].numel()
        for each in replica.parameters
        if each.std is not None and (each.adapter or not adapter_only)
    }


def trainer_of(start: StartingPoint, changes: dict[str, Any]) -> TrainStep:
    settings = {**SETTINGS, **changes}
    if start.weights is not None:
        settings |= {"model.weights": str(start.weights)}
    config, mesh = config_of(settings), ParallelMesh.single()
    shape = config.shape(384)
    return TrainStep(config, mesh, shape, cast(StepLoader, TinyLoader(config, mesh, shape)), start=start)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer, and the same in int8 beside it."""
    folder = tmp_path_factory.mktemp("base")
    exported(folder, SHAPE)
    (folder / "int8").mkdir()
    quantise_folder(folder / "base", folder / "int8")
    return folder


def exported(folder: Path, shape: ModelShape) -> None:
    export(save_stage(folder / "run", shape, lively_stage(shape)), folder / "base", None)
    tiny_tokenizer(folder)


def test_a_new_run_draws_every_random_weight_once() -> None:
    with drawn() as counts:
        trainer = trainer_of(StartingPoint(), {})
    assert sum(random_parameters(trainer.replica).values()) == counts.total > 10_000


@pytest.mark.parametrize("adapter", [{}, LORA, DORA], ids=["all weights", "LoRA", "DoRA"])
def test_from_a_folder_an_adapters_own_values_alone_are_drawn(base: Path, adapter: dict[str, Any]) -> None:
    with drawn() as counts:
        trainer = trainer_of(StartingPoint(base / "base"), adapter)
    replica = trainer.replica
    own = random_parameters(replica, adapter_only=True)
    assert counts.total == sum(own.values()) and bool(own) == bool(adapter)
    # The numbers are those of a model that draws all its weights.
    whole = build_replica(replica.shape, replica.mesh, replica.split, seed=trainer.config.run.seed)
    assert_same_tensors(*({name: each.tensors[name] for name in own} for each in (replica, whole)), rtol=0)


@pytest.mark.parametrize("adapter", [{}, LORA, DORA], ids=["all weights", "LoRA", "DoRA"])
def test_a_resumed_run_draws_nothing(base: Path, tmp_path: Path, adapter: dict[str, Any]) -> None:
    weights = base / "base" if adapter else None
    before = trainer_of(StartingPoint(weights), adapter)
    before.train_step()
    checkpoint = save(before, tmp_path)
    with drawn() as counts:
        trainer = trainer_of(StartingPoint(weights, resumed=True), adapter)
        assert trainer.replica.unset == {each.name for each in trainer.replica.trained}
        trainer.resume(checkpoint)
    assert counts.total == 0 and not trainer.replica.unset
    assert_same_tensors(trainer.replica.tensors, before.replica.tensors, rtol=0)


@contextmanager
def poisoned() -> Iterator[None]:
    """Let new memory hold NaN, and -128 in int8, which no weight has."""
    empty = torch.empty

    def fill(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(-128) if tensor.dtype == torch.int8 else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", fill)
        yield


def require_written(replica: Replica) -> None:
    state = replica.stage.state_dict()
    assert state and not replica.unset
    for name, tensor in state.items():
        unwritten = tensor == -128 if tensor.dtype == torch.int8 else tensor.isnan()
        assert not unwritten.any(), name


@pytest.mark.parametrize("source", ["base", "int8", "run"])
def test_a_model_to_generate_from_draws_nothing_and_writes_all(base: Path, source: str) -> None:
    with drawn() as counts, poisoned():
        model = load_source(
            find_source(base / source, tokenizer=base / "tokenizer.json"), ParallelMesh.single()
        )
    assert counts.total == 0
    require_written(model.replica)


@pytest.mark.parametrize("family", cases(FAMILY_SHAPES, core=["gpt2"]))
def test_of_every_family(tmp_path: Path, family: str) -> None:
    exported(tmp_path, replace(FAMILY_SHAPES[family], vocab_size=384))
    with drawn() as counts, poisoned():
        model = load_source(
            find_source(tmp_path / "base", tokenizer=tmp_path / "tokenizer.json"), ParallelMesh.single()
        )
    assert counts.total == 0
    require_written(model.replica)


def test_weights_that_nobody_wrote_are_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, last = find_source(base / "base", tokenizer=base / "tokenizer.json"), "model.norm.weight"
    replica = build_replica(SHAPE, ParallelMesh.single(), pipeline_split(SHAPE.num_hidden_layers), seed=None)
    with pytest.raises(AssertionError, match=r"neither drawn nor loaded: .*model\.embed_tokens\.weight"):
        replica.require_weights()

    def all_but_the_last(replica: Replica, reader: Any, path: Path, parameters: Any = None) -> None:
        chosen = [each for each in parameters or replica.parameters if each.name != last]
        checkpoint_weights.fill(replica, reader, path, chosen)

    for module in (loaded, train_step):
        monkeypatch.setattr(module, "fill", all_but_the_last)
    with pytest.raises(AssertionError, match=rf"neither drawn nor loaded: {last}$"):
        load_source(source, ParallelMesh.single())
    with pytest.raises(AssertionError, match=rf"neither drawn nor loaded: {last}$"):
        trainer_of(StartingPoint(base / "base"), {})


def test_a_reader_that_stops_early_is_noticed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = WeightReader.fill_all
    monkeypatch.setattr(
        WeightReader, "fill_all", lambda self, targets: every(self, (next(targets) for _ in range(3)))
    )
    with pytest.raises(AssertionError, match="neither drawn nor loaded"):
        load_source(find_source(base / "base", tokenizer=base / "tokenizer.json"), ParallelMesh.single())
