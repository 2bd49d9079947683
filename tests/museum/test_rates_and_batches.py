"""Exhibits of learning rates of groups, of the batch in tensor-parallel layouts, and of validation losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.load import load_run
from megalite.data.files.token_file import TokenFile
from megalite.monitor.metrics import ValidationMetrics
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameter_groups import ParameterGroup
from megalite.train.loaders import loader_maker
from megalite.train.step.options import schedule_of
from megalite.train.step.train_step import TrainStep
from megalite.train.validation import held_out_set, validate
from tests.support.museum import exhibit
from tests.support.options import changed
from tests.support.parity import about, assert_close
from tests.support.planted import Planted, instead
from tests.support.tiny_run import SETTINGS, VOCABULARY, write_conversations
from tests.unit.config.runs import REMOVED, load, problems
from tests.unit.config.test_deepspeed_schedule import theirs
from tests.unit.train.optimizer.test_optimizer import NORM, SGD, made

WARMUP = {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 3}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": WARMUP,
    "WarmupDecayLR": {**WARMUP, "total_num_steps": 7},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 7},
    "OneCycle": {
        "cycle_min_lr": 1e-4,
        "cycle_max_lr": 1e-3,
        "cycle_first_step_size": 3,
        "cycle_momentum": False,
    },
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2},
}
RATIO = 0.1


def rate_of_the_first_group(_: Any) -> Callable[..., None]:
    def set_alike(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * optimizer.param_groups[0]["learning_rate_ratio"]

    return set_alike


@exhibit(
    "DeepSpeed PR#8171",
    also=("DeepSpeed PR#7969",),
    subject="optimizer",
    there="a warm-up gave every group of parameters the rate of the first one",
    here="under each of DeepSpeed's schedulers a group moves by its own share of the scheduled rate",
    fault=Planted("megalite.train.optimizer.torch:set_learning_rate", rate_of_the_first_group),
)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_group_has_its_share_of_the_rate_that_a_scheduler_sets(tmp_path: Path, kind: str) -> None:
    params = SCHEDULERS[kind]
    block = {
        "scheduler": {"type": kind, "params": params},
        "optimizer": {"type": "SGD", "params": {"lr": 3e-3}},
    }
    config = load(tmp_path, ds_json=block).config
    schedule = schedule_of(config, 10)
    optimizer, tensors = made(changed(SGD, groups=(ParameterGroup("*norm*", RATIO),)))
    expected = theirs(kind, params, 6)
    for update in range(6):
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.grad = torch.ones_like(tensor)
        optimizer.step(schedule(update), float(optimizer.squared_norm()))
        for name, ratio in ((NORM, RATIO), ("lm_head.weight", 1.0)):
            moved = before[name] - tensors[name].detach()
            assert_close(moved, torch.full_like(moved, ratio * expected[update]))


def with_the_first_of_a_list(read: Callable[..., Any]) -> Callable[..., Any]:
    def first(draft: Any, block: Any, kind: str, params: dict[str, Any]) -> Any:
        single = {key: value[0] if isinstance(value, list) else value for key, value in params.items()}
        return read(draft, block, kind, single)

    return first


def with_all_ranks(data_size: Callable[..., int]) -> Callable[..., int]:
    return lambda run: data_size(run) * run.parallel.tensor * run.parallel.pipeline * run.parallel.context


@exhibit(
    "DeepSpeed PR#8201",
    also=("DeepSpeed PR#8205",),
    subject="optimizer",
    there="OneCycle took a list of rates for its groups, as its words say, and did not use it",
    here="a list is refused by name, with the setting that gives a group its own rate",
    fault=Planted("megalite.config.deepspeed.scheduler:_read_params", with_the_first_of_a_list),
)
@pytest.mark.parametrize("key", ["cycle_min_lr", "cycle_max_lr"])
def test_rates_in_a_list_are_refused_with_the_setting_of_a_group(tmp_path: Path, key: str) -> None:
    params = SCHEDULERS["OneCycle"] | {key: [1e-3, 1e-4]}
    found = problems(tmp_path, ds_json={"scheduler": {"type": "OneCycle", "params": params}})
    assert [str(problem) for problem in found] == [
        f"ds.json: scheduler.params.{key}: megalite does not support [0.001, 0.0001], a number for each group; write "
        "one number, and set learning_rate_ratio in [[optimizer.groups]]"
    ]


@exhibit(
    "axolotl PR#3462",
    also=("axolotl PR#3444",),
    subject="data",
    there="the batch and the steps of an epoch were counted over all ranks, though ranks that share a model read alike",
    here="ranks on the tensor, pipeline and context axes add nothing to the batch",
    fault=Planted("megalite.config.rules.batch:data_size", with_all_ranks),
)
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_ranks_that_share_a_model_read_one_batch(tmp_path: Path, axis: str) -> None:
    sizes = {"training.global_batch_size": REMOVED, "training.micro_batches": 4}
    plain = load(tmp_path, {**sizes, "parallel.data": 2}, world_size=2).config.batch
    shared = load(tmp_path, {**sizes, f"parallel.{axis}": 2, "parallel.data": 2}, world_size=4).config.batch
    assert shared == plain and plain.global_batch_size == 16


def validated(prefix: Path, packing: str) -> ValidationMetrics:
    """Return the validation of an untrained model on a token file of conversations."""
    changes = {"data.kind": "instruct", "data.packing": packing, "data.source": prefix}
    flags = [f"--{name}={value}" for name, value in {**SETTINGS, **changes}.items()]
    config, mesh, file = load_run(None, flags).config, ParallelMesh.single(), TokenFile.open(prefix)
    load_file = loader_maker(config, mesh, None)
    trainer = TrainStep(config, mesh, config.model.shape(VOCABULARY), load_file(file))
    with trainer.batches:
        found = validate(trainer, {"held": held_out_set(load_file, file, None)})
    assert found is not None
    return found


def as_a_mean(evaluate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def mean_of_the_batch(self: TrainStep, batch: Any) -> torch.Tensor:
        total, tokens = evaluate(self, batch)
        return torch.stack([total / tokens * 4, torch.full_like(tokens, 4)])

    return mean_of_the_batch


@exhibit(
    "torchtitan PR#4167",
    subject="data",
    there="a validation was the mean of the means of its batches, in which a short batch counted as much as a long one",
    here="a validation is the sum over all trained tokens divided by their number",
    fault=Planted("megalite.train.step.train_step:TrainStep.evaluate", as_a_mean),
)
@exhibit(
    "axolotl PR#3478",
    subject="data",
    there="a validation of packed or split rows counted other tokens than the training, and its loss was too high",
    here="a validation is the mean over the trained tokens of the file, however the rows are packed",
    fault=Planted(
        "megalite.data.batches.conversation_rows:is_trained",
        instead(lambda tokens: np.ones(tokens.shape, dtype=bool)),
        seen_as=(IndexError,),
    ),
)
def test_a_validation_counts_the_trained_tokens_in_every_packing(tmp_path: Path) -> None:
    prefix = tmp_path / "talks"
    write_conversations(prefix, 12)
    file = TokenFile.open(prefix)
    labels = sum(int((file.document(index)[1:] >= 0).sum()) for index in range(file.num_documents))
    losses = []
    for packing in ("none", "best_fit", "concatenate"):
        found = validated(prefix, packing)
        assert found.tokens == labels
        losses.append(found.loss)
    # Only rows that keep conversations whole have their contexts.
    assert losses[:2] == about([losses[0]] * 2)
