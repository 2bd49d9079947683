"""A gradient that is not finite: the step is left out on every rank or ends the run, and the tensor is named."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.errors import TrainingError
from tests.support.tiny_run import ranks_of, tiny_trainer, write_token_files

POISONED = "model.layers.2.self_attn.o_proj.weight"
SKIP = {"training.nonfinite": "skip", "training.precision": "fp32"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"parallel.pipeline": 2},
    "zero1-tp2": {"parallel.tensor": 2, "deepspeed.zero_optimization.stage": 1},
    "zero2-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 2},
    "zero3-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 3},
}


@dataclass
class Steps:
    """The results of one rank: each step's loss, the named tensor, and whether its state stayed unchanged."""

    losses: list[float] = field(default_factory=list)
    named: list[str | None] = field(default_factory=list)
    unchanged: list[bool] = field(default_factory=list)
    skipped: int = 0
    error: str = ""


def train(folder: Path, changes: dict[str, Any], poisoned: tuple[int, ...], steps: int = 4) -> Steps:
    """Train with a gradient that is nan at the steps `poisoned`, counted from 1, on one rank."""
    trainer, _ = tiny_trainer(folder, changes)
    tensors, found = dict(trainer.stage.named_parameters()), Steps()

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan if trainer.state.step + 1 in poisoned else gradient

    mesh = trainer.mesh
    if POISONED in tensors and mesh.tp.rank == mesh.tp.size - 1 and mesh.batch.rank == 0:
        tensors[POISONED].register_hook(poison)
    for _ in range(steps):
        before = _held(tensors)
        try:
            report = trainer.train_step()
        except TrainingError as error:
            found.error = str(error)
            return found
        found.losses.append(report.loss)
        found.named.append(report.overflow)
        found.unchanged.append(all(map(torch.equal, before, _held(tensors))))
        found.skipped = report.skipped_steps
    return found


def _held(tensors: dict[str, torch.nn.Parameter]) -> list[torch.Tensor]:
    return [getattr(tensor, "ds_tensor", tensor).detach().clone() for tensor in tensors.values()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_token_files(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "poisoned"), [("pp2", 2), ("zero1-tp2", 1), ("zero2-dp2", 1), ("zero3-dp2", 2)]
)
def test_the_step_is_left_out_on_every_rank_and_the_tensor_named(ranks, data, name, poisoned):
    changes = LAYOUTS[name] | SKIP
    results = ranks.run(train, ranks_of(changes), folder=data, changes=changes, poisoned=(poisoned,), steps=3)
    for result in results:
        assert not result.error
        assert result.unchanged == [step == poisoned for step in range(1, 4)]
        assert result.named == [f"{POISONED} (layer 2)" if step == poisoned else None for step in range(1, 4)]
        assert result.skipped == 1 and torch.tensor(result.losses).isfinite().all()


def test_too_many_in_a_row_end_the_run(ranks, data):
    changes = SKIP | {"training.nonfinite_limit": 2}
    [alternating] = ranks.run(train, folder=data, changes=changes, poisoned=(1, 3))
    assert not alternating.error and alternating.skipped == 2
    [result] = ranks.run(train, folder=data, changes=changes, poisoned=(2, 3, 4))
    assert len(result.losses) == 2
    assert result.error.startswith(
        "step 3: 2 steps in a row were skipped (training.nonfinite_limit): the gradient of "
        f"{POISONED} (layer 2) is not finite"
    )


def test_without_the_policy_the_run_ends_at_its_step(ranks, data):
    [result] = ranks.run(train, folder=data, changes={"training.precision": "fp32"}, poisoned=(2,))
    assert len(result.losses) == 1
    assert result.error.startswith(f"step 2: the gradient is not finite, first in {POISONED} (layer 2)")


def grad_norm_of_a_skipped_step(folder: Path, changes: dict[str, Any]) -> list[float]:
    trainer, _ = tiny_trainer(folder, changes)
    dict(trainer.stage.named_parameters())[POISONED].register_hook(lambda gradient: gradient * torch.nan)
    return [trainer.train_step().grad_norm]


@pytest.mark.parametrize("name", [None, "zero2-dp2"])
def test_a_skipped_step_has_the_same_norm_with_and_without_zero(ranks, data, name):
    changes = SKIP | (LAYOUTS[name] if name else {"parallel.data": 2})
    for [norm] in ranks.run(grad_norm_of_a_skipped_step, 2, folder=data, changes=changes):
        assert math.isnan(norm)


BROKEN = {
    "model.layers.2.mlp.down_proj": "model.layers.2.mlp.down_proj.weight",
    "model.layers.1.self_attn.qkv_proj": "model.layers.1.self_attn.k_proj.weight",
    "model.layers.3.input_layernorm": "model.layers.3.input_layernorm.weight",
}


def train_with_a_broken_weight(folder: Path, changes: dict[str, Any], weight: str) -> str:
    """Return the error of the step after a value of the weight became nan, on its last tensor-parallel rank."""
    trainer, _ = tiny_trainer(folder, changes)
    trainer.train_step()
    mesh, tensors = trainer.mesh, dict(trainer.stage.named_parameters())
    fused = weight.replace(
        "k_proj", "qkv_proj"
    )  # rows of query, of key, of value: 16, 8 and 8 on one of two ranks
    if fused in tensors and mesh.tp.rank == mesh.tp.size - 1:
        held = tensors[fused]
        # ZeRO 3 keeps small weights whole beside its parts.
        for each in {held.detach(), getattr(held, "ds_tensor", held).detach()}:
            each.view(-1)[(16 if fused != weight else 0) * each.shape[-1]] = torch.nan
    with pytest.raises(TrainingError) as caught:
        for _ in range(2):
            trainer.train_step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("pp2", "model.layers.2.mlp.down_proj"),
        ("zero1-tp2", "model.layers.2.mlp.down_proj"),
        ("zero1-tp2", "model.layers.1.self_attn.qkv_proj"),
        ("zero2-dp2", "model.layers.3.input_layernorm"),
        ("zero3-dp2", "model.layers.2.mlp.down_proj"),
    ],
)
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_broken_weight_is_named_with_its_module_and_its_rank(ranks, data, name, module, policy):
    """Not the head, whose gradient is the last one that is not finite."""
    changes = LAYOUTS[name] | {"training.precision": "fp32", "training.nonfinite": policy}
    changes |= {"training.nonfinite_limit": 1} if policy == "skip" else {}
    weight = BROKEN[module]
    messages = ranks.run(
        train_with_a_broken_weight, ranks_of(changes), folder=data, changes=changes, weight=weight
    )
    [message] = set(messages)
    where = {"pp2": "rank 1 (pp 1, dp 0, tp 0)", "zero1-tp2": "rank 1 (pp 0, dp 0, tp 1)"}
    found = f"the loss is nan: the first output that is not finite is that of {module} on {where.get(name, 'rank ')}"
    assert message.startswith("step 2: ") and found in message
    assert (
        f"whose {weight} is not finite itself; no weight was changed; name an earlier checkpoint" in message
    )


def step_with_such_a_loss(folder: Path) -> str:
    trainer, _ = tiny_trainer(folder, SKIP)
    forward_backward = trainer.pipeline.forward_backward

    def overflowing(*arguments: Any) -> torch.Tensor:
        return forward_backward(*arguments) + torch.inf

    trainer.pipeline.forward_backward = overflowing  # type: ignore[method-assign]
    with pytest.raises(TrainingError) as caught:
        trainer.train_step()
    return str(caught.value)


def test_a_loss_that_is_not_finite_where_its_gradient_is_ends_the_run(ranks, data):
    [message] = ranks.run(step_with_such_a_loss, folder=data)
    assert message.startswith("step 1: the loss is inf, but its gradient is finite")
