"""A spike of the loss: the update is left out, or the weights of a checkpoint come back, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.save import write_draft
from megalite.errors import TrainingError
from megalite.train.checkpoints.rollback import roll_back, rolls_back
from megalite.train.step.state import StepReport
from megalite.train.step.train_step import TrainStep
from tests.support.tiny_run import ranks_of, tiny_trainer, write_token_files

WEIGHT = "model.layers.1.mlp.down_proj.weight"
STEPS = 9
SETTINGS: dict[str, Any] = {
    "training.precision": "fp32",
    "training.steps": STEPS,
    "training.loss_spike": "skip",
    "training.spike_window": 3,
    "checkpoint.every": 2,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel.tensor": 2},
    "pp2": {"parallel.pipeline": 2},
    "dp2-bf16": {"parallel.data": 2, "training.precision": "bf16"},
    "zero1-tp2": {"parallel.tensor": 2, "deepspeed.zero_optimization.stage": 1},
    "zero1-dp2-bf16": {
        "parallel.data": 2,
        "deepspeed.zero_optimization.stage": 1,
        "training.precision": "bf16",
    },
    "zero2-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 2},
    "zero3-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 3},
    "zero2-offload": {
        "parallel.data": 2,
        "deepspeed.zero_optimization.stage": 2,
        "deepspeed.zero_optimization.offload_optimizer.device": "cpu",
    },
}
CORE = ("pp2", "zero1-tp2", "zero3-dp2")
MORE = [pytest.param(each, marks=pytest.mark.extended) for each in LAYOUTS if each not in CORE]
ROLLED_BACK = ("pp2", "zero2-dp2")
MORE_ROLLED_BACK = [
    pytest.param(each, marks=pytest.mark.extended) for each in LAYOUTS if each not in (*ROLLED_BACK, "tp2")
]


@dataclass
class RankEnd:
    """The end of one rank: all that the next step depends on, and the reports of its steps."""

    state: list[torch.Tensor]
    updates: float
    position: tuple[int, int, int]
    reports: list[StepReport] = field(default_factory=list)
    error: str = ""


def poisoned_trainer(folder: Path, changes: dict[str, Any], guilty: Sequence[int]) -> TrainStep:
    """Return a trainer in whose steps `guilty`, counted from 1, one rank has a huge loss and a huge gradient."""
    trainer, _ = tiny_trainer(folder, SETTINGS | changes)
    tensors, mesh = dict(trainer.stage.named_parameters()), trainer.mesh

    def is_guilty() -> bool:
        return trainer.state.step + 1 in guilty

    if WEIGHT in tensors and mesh.tp.rank == mesh.tp.size - 1 and mesh.batch.rank == 0:
        tensors[WEIGHT].register_hook(lambda gradient: gradient * 1e4 if is_guilty() else gradient)
    forward_backward = trainer.pipeline.forward_backward

    def poisoned(*arguments: Any) -> torch.Tensor:
        return forward_backward(*arguments) + (50.0 if is_guilty() and mesh.rank == 0 else 0.0)

    trainer.pipeline.forward_backward = poisoned  # type: ignore[method-assign]
    return trainer


def ended(trainer: TrainStep, reports: list[StepReport], error: str = "") -> RankEnd:
    weights = [getattr(each, "ds_tensor", each).detach().clone() for each in trainer.replica.tensors.values()]
    state = [shard.values.detach().clone() for shard in trainer.optimizer.state.shards()]
    position = (trainer.state.step, trainer.state.samples, trainer.state.tokens)
    return RankEnd(weights + state, trainer.optimizer.state.scalars()["step"], position, reports, error)


def pass_over(trainer: TrainStep, steps: int) -> None:
    """Go on as if these steps did not exist: their samples and tokens have passed."""
    size = trainer.config.batch.global_batch_size
    for _ in range(steps):
        trainer.state = trainer.state.advanced(samples=size, tokens=trainer.tokens_per_step, skipped=True)


def train(folder: Path, changes: dict[str, Any], guilty: Sequence[int], *, passes_over: bool) -> RankEnd:
    """Train; passes_over: the guilty steps are not made at all."""
    trainer, reports = poisoned_trainer(folder, changes, () if passes_over else guilty), []
    for step in range(1, STEPS + 1):
        if passes_over and step in guilty:
            pass_over(trainer, 1)
        else:
            reports.append(trainer.train_step())
    return ended(trainer, reports)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_token_files(folder)
    return folder


def require_equal(end: RankEnd, expected: RankEnd) -> None:
    assert all(map(torch.equal, end.state, expected.state)) and len(end.state) == len(expected.state)
    assert (end.updates, end.position) == (expected.updates, expected.position)


@pytest.mark.parametrize("layout", [*CORE, *MORE])
def test_a_skipped_step_never_was(ranks, data, layout):
    changes = LAYOUTS[layout]
    expected, ends = (
        ranks.run(
            train, ranks_of(changes), folder=data, changes=changes, guilty=(5, 6), passes_over=passes_over
        )
        for passes_over in (True, False)
    )
    for end, other in zip(ends, expected, strict=True):
        require_equal(end, other)
        assert end.updates == STEPS - 2
        skipped = {each.step: each.skipped_samples for each in end.reports if each.skipped_for}
        assert skipped == {5: (16, 20), 6: (20, 24)}
        assert {each.step for each in end.reports if each.loss_spike is not None} == {5, 6}


def test_without_the_policy_the_same_steps_change_the_weights(ranks, data):
    """So that the equality above is not that of two runs which the poison does not reach."""
    [expected], [end] = (
        ranks.run(
            train,
            folder=data,
            changes={"training.loss_spike": "report"},
            guilty=(5, 6),
            passes_over=passes_over,
        )
        for passes_over in (True, False)
    )
    assert end.updates == STEPS and not all(map(torch.equal, end.state, expected.state))
    assert not any(each.skipped_for for each in end.reports)


def test_a_rank_that_stops_names_the_spike(ranks, data):
    [message] = ranks.run(
        train_to_an_error, folder=data, changes={"training.loss_spike": "stop"}, guilty=(5,)
    )
    assert message.startswith("step 5: the loss of 5") and "above its running median" in message
    [message] = ranks.run(
        train_to_an_error, folder=data, changes={"training.nonfinite_limit": 2}, guilty=(5, 6)
    )
    assert message.startswith(
        "step 6: 2 steps in a row were skipped (training.nonfinite_limit): the loss of 5"
    )


def train_to_an_error(folder: Path, changes: dict[str, Any], guilty: Sequence[int]) -> str:
    trainer = poisoned_trainer(folder, changes, guilty)
    with pytest.raises(TrainingError) as caught:
        for _ in range(STEPS):
            trainer.train_step()
    return str(caught.value)


def save(trainer: TrainStep, folder: Path) -> Path:
    draft = trainer.draft(folder)
    write_draft(draft, trainer.mesh)
    return draft.published


def train_and_roll_back(
    folder: Path, checkpoints: Path, changes: dict[str, Any], guilty: Sequence[int]
) -> RankEnd:
    """Save after every second step, and after a rollback, as the loop does."""
    trainer, reports = poisoned_trainer(folder, {"training.loss_spike": "rollback"} | changes, guilty), []
    saved: Path | None = None
    while trainer.state.step < STEPS:
        report = trainer.train_step()
        if rolls_back(trainer, report):
            try:
                report = roll_back(trainer, saved, report)
            except TrainingError as error:
                return ended(trainer, reports, str(error))
        reports.append(report)
        if trainer.state.step % 2 == 0 or report.rolled_back_to is not None:
            saved = save(trainer, checkpoints)
    return ended(trainer, reports)


def resume_and_pass_over(folder: Path, checkpoint: Path, changes: dict[str, Any], steps: int) -> RankEnd:
    """Go on from a checkpoint as if the next `steps` steps did not exist."""
    trainer = poisoned_trainer(folder, changes, ())
    trainer.resume(checkpoint)
    pass_over(trainer, steps)
    return ended(trainer, [trainer.train_step() for _ in range(STEPS - trainer.state.step)])


@pytest.mark.parametrize("layout", [*ROLLED_BACK, *MORE_ROLLED_BACK])
def test_a_rollback_is_a_resumed_run_that_passes_over_the_samples(ranks, data, tmp_path, layout):
    """The loss of step 6 is a spike: the weights of step 4 come back, and samples 16 to 23 pass over."""
    changes = LAYOUTS[layout] | {"checkpoint.every": 2}
    place = {"folder": data, "changes": changes}
    ends = ranks.run(train_and_roll_back, ranks_of(changes), checkpoints=tmp_path, guilty=(6,), **place)
    expected = ranks.run(
        resume_and_pass_over, ranks_of(changes), checkpoint=tmp_path / "step-000004", steps=2, **place
    )
    for end, other in zip(ends, expected, strict=True):
        require_equal(end, other)
        assert end.updates == STEPS - 2
        [event] = [each for each in end.reports if each.skipped_for]
        assert (event.step, event.rolled_back_to, event.skipped_samples) == (6, 4, (16, 24))
        assert event.skipped_steps == 2
    # A run that is killed behind the rollback goes on from its checkpoint, which is that of step 6.
    resumed = ranks.run(
        resume_and_pass_over, ranks_of(changes), checkpoint=tmp_path / "step-000006", steps=0, **place
    )
    for end, other in zip(resumed, ends, strict=True):
        require_equal(end, other)


def test_rollbacks_in_a_row_go_further_back_and_end_the_run(ranks, data, tmp_path):
    """Each loss after step 6 is a spike: the weights of step 6, then 4, then 2 come back, and then the run ends."""
    [end] = ranks.run(
        train_and_roll_back, folder=data, checkpoints=tmp_path, changes={}, guilty=range(7, STEPS + 1)
    )
    events = [(each.step, each.rolled_back_to) for each in end.reports if each.skipped_for]
    assert events == [(7, 6), (8, 4), (9, 2)]
    changes = {"training.rollback_limit": 2}
    [end] = ranks.run(
        train_and_roll_back,
        folder=data,
        checkpoints=tmp_path / "2",
        changes=changes,
        guilty=range(7, STEPS + 1),
    )
    assert end.error.startswith(
        "step 9: 2 rollbacks in a row, to step 6, 4, did not help (training.rollback_limit): the loss of 5"
    )


def test_before_the_first_checkpoint_a_step_is_skipped(ranks, data, tmp_path):
    changes = {"training.nonfinite": "rollback", "training.nonfinite_limit": 2}
    [end] = ranks.run(train_on_nan, folder=data, checkpoints=tmp_path, changes=changes)
    assert [each.rolled_back_to for each in end.reports] == [None]
    assert end.error.startswith(
        f"step 2: 2 steps in a row were skipped (training.nonfinite_limit): the gradient of {WEIGHT} (layer 1) is"
    )


def train_on_nan(folder: Path, checkpoints: Path, changes: dict[str, Any]) -> RankEnd:
    """Train with a gradient that is never finite."""
    trainer, reports = poisoned_trainer(folder, changes, ()), []
    dict(trainer.stage.named_parameters())[WEIGHT].register_hook(lambda gradient: gradient * torch.nan)
    try:
        while trainer.state.step < STEPS:
            reports.append(roll_back(trainer, None, trainer.train_step()))
    except TrainingError as error:
        return ended(trainer, reports, str(error))
    return ended(trainer, reports)
