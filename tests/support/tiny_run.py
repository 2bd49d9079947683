"""The trainer of `megalite train` on tiny token files, in any layout of a few ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megalite.config.load import load_run
from megalite.data.batches.loader import StepLoader
from megalite.data.files.token_file import TokenFile, TokenWriter
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh
from megalite.train.loaders import loader_maker
from megalite.train.step.options import context_method
from megalite.train.step.train_step import TrainStep

VOCABULARY, LENGTH = 101, 12
HELD_OUT_TOKENS = 10 * LENGTH + 6
SETTINGS: dict[str, Any] = {
    "model.vocab_size": VOCABULARY,
    "model.hidden_size": 32,
    "model.intermediate_size": 56,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.residual_dropout": 0.2,
    "training.steps": 4,
    "training.sequence_length": LENGTH,
    "training.micro_batch_size": 1,
    "training.global_batch_size": 4,
    "training.precision": "fp64",
    "training.label_smoothing": 0.1,
    "training.z_loss": 0.01,
    "optimizer.learning_rate": 0.01,
    "checkpoint.export": "false",
}


def write_token_files(folder: Path) -> None:
    """Write `train` and `held`; `held` has 11 sequences, the last one short, which batches of 4 do not divide."""
    draw = np.random.default_rng(5)
    for name, tokens in (("train", 400), ("held", HELD_OUT_TOKENS)):
        with (folder / f"{name}.bin").open("wb") as bin_file, (folder / f"{name}.idx").open("wb") as idx_file:
            writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
            writer.add(draw.integers(0, VOCABULARY, tokens))
            writer.end_document()
            writer.finish()
            writer.close()


def tiny_trainer(folder: Path, changes: Mapping[str, Any]) -> tuple[TrainStep, Callable[..., StepLoader]]:
    """Return the trainer of this rank of the current process group, and a function that makes loaders of other files.

    changes: settings that override SETTINGS.
    """
    flags = [f"--{name}={value}" for name, value in {**SETTINGS, **changes}.items()]
    config = load_run(None, [*flags, f"--data.source={folder / 'train'}"]).config
    device = local_device(dist.get_rank(), dist.get_world_size())
    mesh = ParallelMesh.over_world(
        config.layout,
        device,
        sequence_parallel=config.parallel.sequence,
        context_method=context_method(config),
    )
    load = loader_maker(config, mesh, None)
    loader = load(TokenFile.open(folder / "train"))
    return TrainStep(config, mesh, config.model.shape(VOCABULARY), loader), load


def ranks_of(changes: Mapping[str, Any]) -> int:
    sizes = [int(changes.get(f"parallel.{axis}", 1)) for axis in ("tensor", "pipeline", "data")]
    return int(np.prod(sizes))
