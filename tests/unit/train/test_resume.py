"""Settings that may change between a checkpoint and the run that resumes from it, and those that stay."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.manifest_json import manifest_of, to_json
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.files.token_file import TokenFile
from megalite.errors import CheckpointError
from megalite.launcher.control.progress import Activity, progress
from megalite.parallel.mesh import ParallelMesh
from megalite.train.step.train_step import StartingPoint, TrainStep
from tests.support.checkpoint_pairs import COMMON, save
from tests.support.matrix.rows import config_of
from tests.support.matrix.train import TinyLoader
from tests.support.museum import exhibit
from tests.support.planted import Planted
from tests.support.tiny_run import VOCABULARY, write_token_files
from tests.support.waiting import wait_until

BATCH = {"training.micro_batch_size": 2, "training.micro_batches": 2}
BEFORE = 3


def trainer_of(*, resumed: bool = False, **changes: Any) -> TrainStep:
    """`changes`: section__key. resumed: as of TrainStep."""
    given = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**COMMON, **BATCH, "model.num_hidden_layers": 1, **given}
    config = config_of({key: value for key, value in settings.items() if value is not None})
    assert config.model.vocab_size != "auto"
    shape, mesh = config.model.shape(config.model.vocab_size), ParallelMesh.single()
    start = StartingPoint(resumed=resumed)
    return TrainStep(config, mesh, shape, cast(StepLoader, _Loader(config, mesh, shape)), start=start)


class _Loader(TinyLoader):
    """Remembers what it was asked for."""

    samples_per_epoch = 40

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> Any:
        asked.append(consumed_samples)
        return super().step_batch(consumed_samples, dtype=dtype)

    def steps_for_epochs(self, epochs: float, *, after: int = 0) -> int:
        batch = self._config.batch.global_batch_size
        return int(-(-(epochs * self.samples_per_epoch - after) // batch))


asked: list[int] = []


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after three steps of four samples."""
    trainer = trainer_of(data__loader_workers=0)
    for _ in range(BEFORE):
        trainer.train_step()
    return save(trainer, tmp_path_factory.mktemp("written"))


def resumed(written: Path, **changes: Any) -> TrainStep:
    trainer = trainer_of(data__loader_workers=0, **changes)
    trainer.resume(written)
    asked.clear()
    return trainer


def state_of(trainer: TrainStep, name: str) -> Mapping[str, Any]:
    """The group and the state of a parameter."""
    optimizer = trainer.optimizer._optimizer  # type: ignore[attr-defined]
    tensor = dict(trainer.stage.named_parameters())[name]
    [group] = [group for group in optimizer.param_groups if any(each is tensor for each in group["params"])]
    return {**optimizer.state[tensor], **{key: value for key, value in group.items() if key != "params"}}


def stored(checkpoint: Path, kind: str, name: str) -> torch.Tensor:
    with CheckpointReader(checkpoint) as reader:
        return reader.read(kind, name, full_slice(reader.manifest.tensors[kind][name].shape))


def test_a_larger_batch_goes_on_behind_the_samples_that_were_seen(written: Path) -> None:
    trainer = resumed(written, training__micro_batches=5)
    for _ in range(2):
        trainer.train_step()
    assert asked == [12, 22, 32]  # the last one for a step that is not made
    assert (trainer.state.step, trainer.state.samples) == (5, 32)
    assert trainer.state.tokens == 32 * 12


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_draws_nothing_and_fills_every_element(
    written: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr("megalite.model.stages.normal_slice", None)
    with pytest.raises(TypeError):
        trainer_of()
    trainer = trainer_of(resumed=True, data__loader_workers=0, training__precision=precision)
    states = list(trainer.optimizer.state.shards())
    for tensor in [*trainer.stage.parameters(), *(state.values for state in states)]:
        tensor.detach().fill_(torch.nan)
    trainer.resume(written)
    assert {state.key for state in states} >= {
        "exp_avg",
        "exp_avg_sq",
        *(["master"] if precision == "bf16" else []),
    }
    for name, tensor in trainer.stage.named_parameters():
        if precision == "fp32" and name.endswith("embed_tokens.weight"):
            assert torch.equal(tensor, stored(written, "weight", name).to(tensor.dtype))
        assert not tensor.isnan().any()
    assert not any(state.values.isnan().any() for state in states)


@exhibit(
    "tinker-cookbook#367",
    also=("tinker-cookbook PR#448", "open-instruct PR#681"),
    subject="checkpoints",
    there="a run that resumed at the end of an epoch had an empty epoch, or passed over batches of the next",
    here="more epochs go on with the first sample of the next one",
    fault=Planted(
        "megalite.train.step.train_step:TrainStep._within_epochs",
        lambda _: lambda self, state, written: state,
    ),
)
def test_more_epochs_go_on_with_the_first_sample_of_the_next(tmp_path: Path) -> None:
    """The last step of an epoch is filled with rows of the next one, which have no labels and come again."""
    write_token_files(tmp_path)
    file = TokenFile.open(tmp_path / "held")

    def trainer(epochs: float) -> TrainStep:
        changes = {"training.steps": None, "training.epochs": epochs, "model.num_hidden_layers": 1}
        settings = {**COMMON, **BATCH, "data.loader_workers": 0, **changes}
        config = config_of({key: value for key, value in settings.items() if value is not None})
        length = config.training.sequence_length
        loader = StepLoader(file, BatchShare(length, 2, 2), SampleOrder(1, epochs=epochs))
        shape = config.model.shape(VOCABULARY)
        return TrainStep(config, ParallelMesh.single(), shape, loader)

    first = trainer(1.0)
    samples = first.loader.samples_per_epoch  # type: ignore[union-attr]
    assert samples % 4 != 0
    while first.state.step < first.total_steps:
        first.train_step()
    checkpoint = save(first, tmp_path / "run")
    second = trainer(2.0)
    second.resume(checkpoint)
    assert second.state.samples == samples < first.state.samples
    batch = second.batches.step_batch(samples).ready()
    assert (
        batch.sample_indices.tolist() == list(range(samples, samples + 4))
        and batch.loss_mask.any(dim=1).all()
    )
    assert second.total_steps == first.total_steps + -(-samples // 4)
    again = trainer(1.0)
    again.resume(checkpoint)
    assert again.total_steps == again.state.step == first.state.step


def test_a_rank_says_which_part_of_a_step_it_is_in(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, seen = trainer_of(data__loader_workers=0), []

    def noting(part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            seen.append((progress.step, progress.phase))
            return part(*arguments, **options)

        return run

    for owner, name in (
        (trainer.loader, "step_batch"),
        (trainer.pipeline, "forward_backward"),
        (trainer.optimizer, "reduce_gradients"),
        (trainer.optimizer, "step"),
    ):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    progress.restart()
    trainer.resume(written)
    trainer.train_step()
    batch, reducing = Activity.READING_BATCH, Activity.REDUCING
    parts = [batch, Activity.FORWARD_BACKWARD, reducing, batch, Activity.UPDATING]
    assert seen == [(BEFORE, part.value) for part in parts]
    assert (progress.step, progress.activity) == (BEFORE + 1, "between two steps")


def test_a_smaller_batch_is_read_ahead_too(written: Path) -> None:
    trainer = trainer_of(data__loader_workers=1, data__prefetch=2, training__micro_batches=1)
    trainer.resume(written)
    asked.clear()
    with trainer.batches:
        trainer.train_step()
        wait_until(lambda: len(asked) == 4, "not all were asked for")
    assert asked == [12, 14, 16, 18]


def test_epochs_end_where_the_data_does_whatever_the_batch(written: Path) -> None:
    epochs = {"training__steps": None, "training__epochs": 2}
    assert trainer_of(**epochs).total_steps == 20
    for micro_batches, left in ((2, 17), (1, 34), (5, 7)):
        trainer = resumed(written, training__micro_batches=micro_batches, **epochs)
        assert trainer.total_steps == BEFORE + left
        trainer.train_step()
        assert trainer.total_steps == BEFORE + left


def test_the_schedule_stands_at_the_step_in_a_run_of_another_length(written: Path) -> None:
    longer = trainer_of(training__steps=40)
    trainer = resumed(written, training__steps=40)
    assert trainer.train_step().learning_rate == longer.learning_rate(BEFORE)
    assert longer.learning_rate(BEFORE + 1) != trainer_of().learning_rate(BEFORE + 1)
    epochs = resumed(written, training__steps=None, training__epochs=2, training__micro_batches=5)
    assert epochs.learning_rate.decay_steps == 10


def with_the_written_rates(resume: Callable[..., None]) -> Callable[..., None]:
    def resumed_with_them(self: TrainStep, checkpoint: Path) -> None:
        resume(self, checkpoint)
        written = read_manifest(checkpoint).config["optimizer"]
        for group in self.optimizer._optimizer.param_groups:  # type: ignore[attr-defined]
            group["weight_decay"], group["learning_rate_ratio"] = written["weight_decay"], 1.0

    return resumed_with_them


@exhibit(
    "Megatron-LM PR#4705",
    subject="checkpoints",
    there="the rates of groups in a checkpoint took the place of those that the resumed run set",
    here="groups, rates and decay are those of the run that goes on, its moments those of the checkpoint",
    fault=Planted("megalite.train.step.train_step:TrainStep.resume", with_the_written_rates),
)
def test_groups_and_the_optimizer_s_numbers_are_those_of_the_run_that_goes_on(written: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    group = {"pattern": "*.mlp.*", "learning_rate_ratio": 0.25, "weight_decay": 0.7}
    trainer = resumed(written, optimizer__groups=[group], optimizer__betas=[0.8, 0.9])
    state = state_of(trainer, name)
    assert (state["learning_rate_ratio"], state["weight_decay"], state["betas"]) == (0.25, 0.7, (0.8, 0.9))
    for kind in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[kind], stored(written, kind, name)) and state[kind].any()
    assert state["step"] == BEFORE


def test_what_was_frozen_has_its_moments_and_moves_when_it_is_freed(written: Path) -> None:
    name = "model.layers.0.input_layernorm.weight"
    initial = dict(trainer_of().stage.named_parameters())[name].detach()
    assert torch.equal(stored(written, "weight", name), initial) and stored(written, "exp_avg", name).any()
    trainer = resumed(written, optimizer__groups=[])
    trainer.train_step()
    assert not torch.equal(dict(trainer.stage.named_parameters())[name], initial)


def test_an_average_of_the_weights_begins_with_them(written: Path, tmp_path: Path) -> None:
    name = "model.norm.weight"
    assert torch.equal(state_of(resumed(written), name)["ema"], stored(written, "ema", name))
    without = resumed(written, optimizer__ema_decay=0.0)
    assert "ema" not in state_of(without, name)
    again = resumed(save(without, tmp_path), optimizer__ema_decay=0.9)
    assert torch.equal(state_of(again, name)["ema"], stored(written, "weight", name))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_another_update_rule_is_refused_by_name(written: Path, momentum: float) -> None:
    rule = {"optimizer__name": "sgd", "optimizer__momentum": momentum}
    with pytest.raises(CheckpointError, match=r"\['ema', 'exp_avg', 'exp_avg_sq'\].*optimizer.name = adamw"):
        resumed(written, **rule)


def test_sgd_with_or_without_momentum_goes_on_as_it_was(tmp_path: Path) -> None:
    rule = {"optimizer__name": "sgd", "optimizer__ema_decay": 0.0}
    for momentum in (0.0, 0.9):
        trainer = trainer_of(**rule, optimizer__momentum=momentum)
        trainer.train_step()
        path = save(trainer, tmp_path / str(momentum))
        assert resumed(path, **rule, optimizer__momentum=momentum).state == trainer.state
        with pytest.raises(CheckpointError, match=f"optimizer.momentum = {momentum}"):
            resumed(path, **rule, optimizer__momentum=0.9 - momentum)


def test_a_counter_of_a_later_version_is_refused(written: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(written, tmp_path / written.name))
    manifest = read_manifest(copy)
    later = replace(manifest, trainer_state={**manifest.trainer_state, "moons": 2})
    (copy / "manifest.json").write_text(to_json(later))
    with pytest.raises(CheckpointError, match="trainer_state has moons, which this version"):
        resumed(copy)


def test_the_steps_that_experts_were_idle_are_counted_on(tmp_path: Path) -> None:
    """Of 64 experts most get no token in a step; some get one and others none before and after the checkpoint."""
    mixture = {
        "model__num_experts": 64,
        "model__num_experts_per_tok": 1,
        "model__moe_intermediate_size": 4,
        "training__router_balance": 0.01,
    }
    trainer = trainer_of(data__loader_workers=0, **mixture)
    for _ in range(BEFORE):
        trainer.train_step()
    path = save(trainer, tmp_path)
    again = resumed(path, **mixture)
    assert again.routers.idle_experts == trainer.routers.idle_experts
    for _ in range(2):
        trainer.train_step()
        again.train_step()
    idle = again.routers.idle_experts
    assert idle == trainer.routers.idle_experts
    assert {steps for _, _, steps in idle} >= {1, BEFORE + 2}
    copy = replace(read_manifest(path), trainer_state={"step": 1, "idle_experts": [[0, 1]]})
    with pytest.raises(ValueError, match="idle_experts"):
        manifest_of(json.loads(to_json(copy))["manifest"])
