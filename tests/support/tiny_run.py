"""The trainer of `megalite train` on tiny token files, in any layout of a few ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.data.batches.stream_loader import TrainingLoader
from megalite.data.files.token_file import TokenFile, TokenWriter, bin_path, idx_path
from megalite.data.files.trained_tokens import DTYPE, marked
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


def write_token_files(folder: Path, documents: Sequence[int] = ()) -> None:
    """Write `train` and `held`; `held` has 11 sequences, the last one short, which batches of 4 do not divide.

    documents: the tokens of those of `train`, each with the id 0 at its end; without them there is one, of 400 tokens.
    """
    draw = np.random.default_rng(5)
    for name, tokens in (("train", sum(documents) or 400), ("held", HELD_OUT_TOKENS)):
        with (folder / f"{name}.bin").open("wb") as bin_file, (folder / f"{name}.idx").open("wb") as idx_file:
            writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
            ids = draw.integers(0, VOCABULARY, tokens)
            if name == "train" and documents:
                ids[np.cumsum(documents) - 1] = 0
            writer.add(ids)
            writer.end_document()
            writer.finish()
            writer.close()


def write_conversations(prefix: Path, longest: int) -> None:
    """Write a token file of conversations of 2 to `longest` tokens, of which the second halves are trained."""
    draw = np.random.default_rng(5)
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, DTYPE)
        for length in draw.gamma(1.5, longest / 5, size=120).astype(int).clip(2, longest):
            writer.add(marked(draw.integers(0, VOCABULARY, length), np.arange(length) >= length // 2))
            writer.end_document()
        writer.finish()
        writer.close()


def tiny_trainer(folder: Path, changes: Mapping[str, Any]) -> tuple[TrainStep, Callable[..., StepLoader]]:
    """Return the trainer of this rank of the current process group, and a function that makes loaders of other files.

    changes: settings that override SETTINGS.
    """
    return trainer_of(folder, changes, lambda config, mesh, load: load(TokenFile.open(folder / "train")))


def trainer_of(
    folder: Path,
    changes: Mapping[str, Any],
    make_loader: Callable[[RunConfig, ParallelMesh, Callable[..., StepLoader]], TrainingLoader],
) -> tuple[TrainStep, Callable[..., StepLoader]]:
    """As `tiny_trainer`, with the training loader that `make_loader` returns of run, mesh and `loader_maker`'s."""
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
    assert config.model.vocab_size != "auto"
    shape = config.model.shape(config.model.vocab_size)
    return TrainStep(config, mesh, shape, make_loader(config, mesh, load)), load


def ranks_of(changes: Mapping[str, Any]) -> int:
    sizes = [int(changes.get(f"parallel.{axis}", 1)) for axis in ("tensor", "pipeline", "context", "data")]
    return int(np.prod(sizes))
