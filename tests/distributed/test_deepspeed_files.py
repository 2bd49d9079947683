"""Other projects' DeepSpeed files train: the losses are those of a run without the file and with its settings."""

from pathlib import Path
from typing import Any, cast

import pytest

from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.parallel.mesh import ParallelMesh
from megalite.train.step.train_step import TrainStep
from tests.support.matrix.train import TinyLoader
from tests.support.parity import BF16_RTOL, ZERO_RTOL, about
from tests.support.selection import cases
from tests.unit.config.deepspeed_corpus import decided, load_beside_a_run
from tests.unit.config.runs import REMOVED, load

FILES = [
    "transformers-test-z2",
    "stanford-alpaca-z3-offload",
    "llama-factory-z1-gaudi",
    "llama-factory-sweep-bf16-sums",
    "openrlhf-z3",
    "axolotl-z3-bf16",
    "axolotl-z2",
    "sparse-gradients-off",
]
RANKS, STEPS = 2, 4


def curve(config: RunConfig) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of each step on this rank."""
    mesh = ParallelMesh.over_world(config.layout)
    shape = config.model.shape(97)
    trainer = TrainStep(config, mesh, shape, cast(StepLoader, TinyLoader(config, mesh, shape)))
    reports = [trainer.train_step() for _ in range(STEPS)]
    return [(each.loss, each.grad_norm, each.learning_rate) for each in reports]


@pytest.mark.parametrize("name", cases(FILES, core=FILES[:2]))
def test_a_file_trains_as_its_settings_do_without_it(ranks, tmp_path: Path, name: str) -> None:
    loaded = load_beside_a_run(tmp_path, name, ranks=RANKS)
    changes: dict[str, Any] = {"training.micro_batch_size": REMOVED, "training.global_batch_size": REMOVED}
    changes |= {
        "training.micro_batch_size": 2,
        "training.global_batch_size": loaded.config.batch.global_batch_size,
    }
    changes |= {key: value for key, value in decided(loaded).items() if key != "zero_optimization.stage"}
    changes.pop("training.micro_batches", None)
    if loaded.config.optimizer.schedule == "deepspeed":
        kind, params = loaded.config.deepspeed_scheduler
        changes |= {"deepspeed.scheduler.type": kind, "deepspeed.scheduler.params": dict(params)}
    precision = loaded.config.training.precision
    type_name = "fp32" if precision == "auto" else precision
    with_file = loaded.config.in_precision(type_name)
    without = load(tmp_path, changes, world_size=RANKS).config.in_precision(type_name)
    assert (with_file.zero_stage > 0, without.zero_stage) == (True, 0)
    found = ranks.run(curve, world_size=RANKS, timeout=120, config=with_file)
    expected = ranks.run(curve, world_size=RANKS, timeout=120, config=without)
    rtol = BF16_RTOL if type_name == "bf16" else ZERO_RTOL
    assert found == [[about(step, rtol) for step in of_rank] for of_rank in expected]
    assert expected[0][-1][0] != expected[0][0][0]


def rates_and_skips(config: RunConfig, steps: int) -> list[tuple[float, int]]:
    """Learning rate of each step, and how many updates were skipped up to its end."""
    mesh = ParallelMesh.over_world(config.layout)
    shape = config.model.shape(97)
    trainer = TrainStep(config, mesh, shape, cast(StepLoader, TinyLoader(config, mesh, shape)))
    return [(each.learning_rate, each.skipped_steps) for each in (trainer.train_step() for _ in range(steps))]


def test_a_skipped_update_does_not_advance_deepspeeds_scheduler(ranks, tmp_path: Path) -> None:
    linear = {"warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"}
    fp16 = {"enabled": True, "initial_scale_power": 34, "hysteresis": 1}
    ds_json = {"fp16": fp16, "scheduler": {"type": "WarmupLR", "params": linear}}
    config = load(tmp_path, ds_json=ds_json).config
    [found] = ranks.run(rates_and_skips, world_size=1, timeout=120, config=config, steps=24)
    skipped = [0, *(skips for _, skips in found)]
    made = [step - skips for step, skips in enumerate(skipped)]
    expected = [1e-3 * min(1.0, max(0, updates - 1) / 4) for updates in made[:-1]]
    assert [rate for rate, _ in found] == about(expected)
    assert 2 < skipped[-1] < 20
