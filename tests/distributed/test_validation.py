"""The validation loss: every held-out token counted once, the same number in every layout, no trace in the training."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megalite.data.batches.packing import PackedSamples
from megalite.data.files.token_file import TokenFile
from megalite.monitor.metrics import ValidationMetrics
from megalite.train.validation import held_out_set, validate
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL, assert_close
from tests.support.tiny_run import HELD_OUT_TOKENS, LENGTH, ranks_of, tiny_trainer, write_token_files


@dataclass(frozen=True)
class Task:
    """A run's data, what differs from SETTINGS, and after which steps it is validated."""

    folder: Path
    changes: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    validated: tuple[int, ...] = (0,)
    samples: int | None = None
    sets: tuple[str, ...] = ("held",)


def train(task: Task) -> tuple[list[float], list[ValidationMetrics]]:
    """The losses of the training's steps, and the validations."""
    trainer, load = tiny_trainer(task.folder, task.changes)
    held_out = {
        name: held_out_set(load, TokenFile.open(task.folder / name), task.samples) for name in task.sets
    }
    losses, found = [], []
    for step in range(task.steps + 1):
        if step in task.validated:
            found.append(validate(trainer, held_out))
        if step < task.steps:
            losses.append(trainer.train_step().loss)
    return losses, found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_token_files(folder)
    return folder


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-sequence": {"parallel.tensor": 2, "parallel.sequence": "true"},
    "pp2": {"parallel.pipeline": 2},
    "dp2": {"parallel.data": 2},
    "zbv-dp2": {"parallel.pipeline": 2, "parallel.schedule": "zbv", "parallel.data": 2},
    "wide-micro-batch": {"training.micro_batch_size": 4},
    "zero1-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 1},
    "zero2-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 2},
    "zero3-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 3},
}


@pytest.fixture(scope="module")
def reference(ranks: Any, data: Path) -> ValidationMetrics:
    [(_, [found])] = ranks.run(train, task=Task(data))
    return found


def test_it_is_the_mean_over_every_held_out_token(ranks, data, reference):
    """Against sums over single sequences, in a loader of their own."""
    samples = PackedSamples(TokenFile.open(data / "held"), LENGTH)
    assert len(samples) == 11
    assert reference.tokens == HELD_OUT_TOKENS - 1
    [(_, [alone])] = ranks.run(train, task=Task(data, {"training.global_batch_size": 1}))
    assert_close(alone.loss, reference.loss, what="loss of one sequence at a time")
    # Neither what shapes the training's loss nor dropout is in it.
    plain = {name: 0.0 for name in ("training.label_smoothing", "training.z_loss", "model.residual_dropout")}
    [([trained], [before])] = ranks.run(train, task=Task(data, plain | {"training.steps": 1}, steps=1))
    assert_close(before.loss, reference.loss, rtol=0, what="loss without what shapes the training")
    assert abs(trained - reference.loss) > 1e-4


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_finds_the_number_of_one_process(ranks, data, reference, name):
    changes = LAYOUTS[name]
    for _, [found] in ranks.run(train, ranks_of(changes), task=Task(data, changes)):
        rtol = ZERO_RTOL if "zero" in name else LAYOUT_RTOL
        assert_close(found.loss, reference.loss, rtol=rtol, what="validation loss")
        assert found.tokens == reference.tokens


@pytest.mark.parametrize("name", ["zbv-dp2", "zero3-dp2"])
def test_the_training_is_the_same_to_the_bit_without_it(ranks, data, name):
    changes = LAYOUTS[name]
    with_it, without = (
        ranks.run(train, ranks_of(changes), task=Task(data, changes, steps=3, validated=validated))
        for validated in ((0, 1, 3), ())
    )
    for (losses, found), (undisturbed, _) in zip(with_it, without, strict=True):
        assert losses == undisturbed
        assert len({each.loss for each in found}) == 3


def test_a_few_samples_are_the_same_ones_in_every_layout(ranks, data, reference):
    [(_, [few])] = ranks.run(train, task=Task(data, samples=5))
    assert few.tokens <= 5 * LENGTH < reference.tokens and few.loss != reference.loss
    for _, [found] in ranks.run(train, 2, task=Task(data, {"parallel.data": 2}, samples=5)):
        assert_close(found.loss, few.loss, what="loss of five samples")
        assert found.tokens == few.tokens
    [(_, [whole])] = ranks.run(train, task=Task(data, samples=1000))
    assert whole.loss == reference.loss


def test_of_several_sets_each_has_its_mean_and_all_tokens_count_alike(ranks, data, reference):
    [(_, [both])] = ranks.run(train, task=Task(data, sets=("train", "held")))
    [(_, [other])] = ranks.run(train, task=Task(data, sets=("train",)))
    assert both.sets == {"train": other.loss, "held": reference.loss}
    total = other.loss * other.tokens + reference.loss * reference.tokens
    assert_close(both.loss, total / both.tokens, what="loss of both sets")
    assert {"validation_loss_train", "validation_loss_held"} < both.record().keys()
    assert "validation_loss_held" not in reference.record()
