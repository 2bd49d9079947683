"""One more step of an imported run, by the trainer of `megalite train` on the ranks of any layout."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megalite.checkpoint.folder import published_name, read_manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.shape_settings import as_settings
from megalite.data.batches.loader import StepLoader
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.topology.shape import ModelShape
from megalite.train.step.train_step import TrainStep
from tests.support.checkpoint_pairs import save
from tests.support.matrix.axes import BASE, Settings
from tests.support.matrix.rows import config_of
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.ranks import RankPool
from tests.support.training import rows_of

ONE_PROCESS: Settings = {}
TENSOR_AND_PIPELINE: Settings = {"parallel.tensor": 2, "parallel.pipeline": 2}
LAYOUTS: Mapping[str, Settings] = {"one process": ONE_PROCESS, "tensor 2 x pipeline 2": TENSOR_AND_PIPELINE}


def token_rows(shape: ModelShape, step: int, *, rows: int = 8, length: int = 12) -> Tensor:
    """Return tokens [rows, length + 1]: the inputs of a step, and as its labels the same one token later."""
    return torch.randint(
        shape.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(100 + step)
    )


@dataclass(frozen=True)
class NextStep:
    """The real program's own next step: its tokens, and what came of it. weights: canonical, after the step."""

    tokens: Tensor
    loss: float
    grad_norm: float
    weights: Mapping[str, Tensor]


class _FixedLoader:
    """Replaces StepLoader: gives this rank's rows of the same tokens."""

    def __init__(self, config: RunConfig, mesh: ParallelMesh, tokens: Tensor):
        rows, length = tokens.shape[0], tokens.shape[1] - 1
        positions = torch.arange(length).repeat(rows, 1)
        mask = torch.ones(rows, length)
        batch = StepBatch(
            tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous(), mask, torch.arange(rows)
        )
        share = rows // mesh.batch.size
        self._batch = rows_of(batch, slice(mesh.batch.rank * share, (mesh.batch.rank + 1) * share))

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> StepBatch:
        return self._batch


def _settings(shape: ModelShape, tokens: Tensor, changes: Settings) -> Settings:
    model = {
        f"model.{name}": value for name, value in as_settings(asdict(shape)).items() if value is not None
    }
    return {
        **BASE,
        **model,
        "model.family": shape.family,
        "model.kernels": "reference",
        "training.precision": "fp32",
        "training.steps": 1000,
        "training.sequence_length": tokens.shape[1] - 1,
        "training.micro_batch_size": 2,
        "training.micro_batches": tokens.shape[0] // 2,
        "optimizer.name": "adamw",
        "optimizer.schedule": "constant",
        **changes,
    }


def train_on(checkpoint: str, tokens: Tensor, changes: Settings) -> tuple[float, float]:
    """Resume on this rank of the current process group and make one step; return loss and norm; save beside it."""
    manifest = read_manifest(Path(checkpoint))
    config = config_of(_settings(manifest.model, tokens, changes))
    mesh = ParallelMesh.over_world(config.layout)
    trainer = TrainStep(config, mesh, manifest.model, cast(StepLoader, _FixedLoader(config, mesh, tokens)))
    trainer.resume(Path(checkpoint))
    report = trainer.train_step()
    save(trainer, Path(checkpoint).parent)
    return report.loss, report.grad_norm


def states_of(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Return state key -> canonical name -> tensor."""
    with CheckpointReader(checkpoint) as reader:
        tensors = reader.manifest.tensors
        return {
            key: {name: reader.read(key, name, full_slice(entry.shape)) for name, entry in entries.items()}
            for key, entries in tensors.items()
        }


def assert_next_step(
    pool: RankPool, checkpoint: Path, expected: NextStep, changes: Settings, **own: Any
) -> None:
    """Make the next step in a layout, and compare loss, norm and weights with those of the real program."""
    settings = {**changes, **{name.replace("__", "."): value for name, value in own.items()}}
    ranks = int(changes.get("parallel.tensor", 1)) * int(changes.get("parallel.pipeline", 1))
    results = pool.run(train_on, ranks, checkpoint=str(checkpoint), tokens=expected.tokens, changes=settings)
    loss, norm = results[0]
    assert_close(loss, expected.loss, rtol=FLOAT32_RTOL, what="the loss")
    assert_close(norm, expected.grad_norm, rtol=FLOAT32_RTOL, what="the gradient norm")
    step = read_manifest(checkpoint).trainer_state["step"] + 1
    weights = states_of(checkpoint.parent / published_name(step))["weight"]
    assert weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        # Softmax cancels a key's bias: its gradient is rounding noise, which AdamW divides by its own size.
        if name.endswith("k_proj.bias"):
            continue
        assert_close(weights[name], values, rtol=FLOAT32_RTOL, what=name)
