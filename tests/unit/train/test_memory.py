"""The memory that a run says is that of its tensors."""

from typing import Any, cast

import pytest

from megalite.data.batches.loader import StepLoader
from megalite.parallel.mesh import ParallelMesh
from megalite.planner.memory import memory_line, memory_of_stages
from megalite.train.step.train_step import TrainStep
from tests.support.matrix.axes import AXES
from tests.support.matrix.rows import config_of, settings_of
from tests.support.matrix.train import TinyLoader
from tests.support.museum import exhibit
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.planted import Planted
from tests.support.ranks import RankPool

PLAIN = {name: next(iter(axis.values)) for name, axis in AXES.items()}
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "adamw", "parallel.tensor": 2},
    "adamw, bf16, average": {
        "optimizer.name": "adamw",
        "training.precision": "bf16",
        "optimizer.ema_decay": 0.9,
    },
    "lora, bf16": {
        "optimizer.name": "adamw",
        "training.precision": "bf16",
        "adapter.kind": "lora",
        "adapter.rank": 2,
        "parallel.pipeline": 2,
    },
    "muon": {"optimizer.name": "muon"},
    "adafactor": {"optimizer.name": "adafactor", "parallel.tensor": 2},
    "sgd": {"optimizer.name": "sgd"},
    "ZeRO 1": {
        "optimizer.name": "adamw",
        "training.precision": "fp32",
        "deepspeed.zero_optimization.stage": 1,
        "parallel.data": 2,
    },
}


def held_on_rank(settings: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of this rank's weights and of its optimizer's state."""
    config = config_of(settings)
    mesh = ParallelMesh.over_world(config.layout)
    shape = config.shape(cast(int, config.model.vocab_size))
    trainer = TrainStep(config, mesh, shape, cast(StepLoader, TinyLoader(config, mesh, shape)))
    weights = sum(tensor.nbytes for tensor in trainer.replica.tensors.values())
    state = sum(shard.values.nbytes for shard in trainer.optimizer.state.shards())
    if config.zero_stage and config.training.precision == "fp32":
        # The checkpoint leaves out ZeRO's copy of fp32 weights, which has the size of a moment.
        state += state // 2
    return weights, state


def with_frozen_weights(_: Any) -> property:
    return property(lambda replica: replica.parameters)


@exhibit(
    "DeepSpeed PR#8029",
    also=("trl PR#6192",),
    subject="adapters",
    there="frozen weights beside an adapter had fp32 masters and flat buffers",
    here="the optimizer keeps state of the adapter alone",
    fault=Planted("megalite.model.replica:Replica.trained", with_frozen_weights),
    case="lora",
    costly=True,
)
@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_size_of_the_tensors(ranks: RankPool, name: str) -> None:
    settings = {**settings_of(PLAIN), **RUNS[name]}
    config = config_of(settings)
    vocabulary = cast(int, config.model.vocab_size)
    held = ranks.run(held_on_rank, world_size=config.layout.world_size, settings=settings)
    said = list(memory_of_stages(config, vocabulary))
    stages = config.layout.pipeline
    for stage, memory in enumerate(said):
        of_stage = held[stage * len(held) // stages : (stage + 1) * len(held) // stages]
        assert memory.weights == of_stage[0][0]
        state = sum(state for _, state in of_stage) / len(of_stage) if config.zero_stage else of_stage[0][1]
        assert_close([memory.optimizer], [state], rtol=FLOAT32_RTOL)
    assert f"{config.optimizer.name} " in memory_line(config, vocabulary)
