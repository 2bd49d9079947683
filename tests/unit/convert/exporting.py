"""A small trained-looking model in a checkpoint, to be exported and generated from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.model.stages import build_replica
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.topology.state import OptimizerState
from tests.support.checkpoints import NoOptimizer, save_checkpoint
from tests.support.replicas import whole_replica


def lively_stage(shape: ModelShape, *, scale: float = 5.0) -> Stage:
    """Initial weights made larger, so that attention is far from uniform, and norms that are not all alike.

    A tied embedding stays small: the layers decide what comes next, not the last token itself.
    """
    stage = build_replica(shape, ParallelMesh.single(), pipeline_split(shape.num_hidden_layers), seed=3).stage
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in stage.named_parameters():
            if "norm" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif not (shape.tie_word_embeddings and "embed_tokens" in name):
                tensor.mul_(scale)
    return stage


def save_stage(
    run: Path,
    shape: ModelShape,
    stage: Stage,
    config: Mapping[str, Any] | None = None,
    *,
    step: int = 20,
    optimizer: OptimizerState | None = None,
) -> Path:
    """One checkpoint in a run's folder."""
    return save_checkpoint(
        run / "checkpoints",
        whole_replica(stage),
        optimizer or NoOptimizer(),
        trainer_state={"step": step, "samples": 8 * step, "tokens": 96 * step},
        config=config or {"optimizer": {"learning_rate": 1e-3}, "data": {"source": "stdlib"}},
    )


def our_logits(stage: Stage, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        return stage.whole.logits(stage.whole.decode(input_ids, positions))
