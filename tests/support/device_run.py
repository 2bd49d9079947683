"""A run's trainer on its rank's device: steps, an asynchronous checkpoint after each step, validation, resuming."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from megalite.checkpoint.folder import find_latest
from megalite.data.files.token_file import TokenFile
from megalite.generation.request import Sampling
from megalite.parallel import layers
from megalite.train.checkpoints.saving import RunSaver
from megalite.train.validation import held_out_set, validate
from tests.support.generation import generate_ids, load_model
from tests.support.standin import count_syncs
from tests.support.tiny_run import tiny_trainer

STEPS = 3
DRAWN = Sampling(1.5, top_k=40, top_p=0.9, seed=4)


@dataclass
class Seen:
    """The results of one rank. waits: host waits for the device, in each step and the validation, by kind and line."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    waits: list[Counter[tuple[str, str]]] = field(default_factory=list)


def train(data: Path, changes: dict[str, Any], into: Path) -> Seen:
    """Run STEPS steps on this rank, each followed by an asynchronous checkpoint; then a validation."""
    trainer, load = tiny_trainer(data, changes)
    seen, saver = Seen(), RunSaver(trainer, into)
    with trainer.batches, as_on_a_gpu():
        for _ in range(STEPS):
            with _counted(trainer.mesh.device, seen):
                report = trainer.train_step(before_update=saver.before_update)
            seen.losses.append(report.loss)
            seen.norms.append(report.grad_norm)
            saver.stepped(report)
            list(saver.save(at_once=False))
        list(saver.finish())
    held = held_out_set(load, TokenFile.open(data / "held"), None)
    with _counted(trainer.mesh.device, seen):
        seen.validation.append(validate(trainer, {"held": held}).loss)
    return seen


def resume(data: Path, changes: dict[str, Any], from_: Path) -> Seen:
    """Run one more step, from the last checkpoint."""
    trainer, _ = tiny_trainer(data, changes)
    latest = find_latest(from_)
    assert latest is not None
    trainer.resume(latest)
    with trainer.batches, as_on_a_gpu():
        report = trainer.train_step()
    return Seen([report.loss], [report.grad_norm])


def write_text(data: Path, changes: dict[str, Any], from_: Path) -> list[int]:
    """Generate tokens with the last checkpoint's model."""
    trainer, _ = tiny_trainer(data, changes)
    latest = find_latest(from_)
    assert latest is not None
    return list(generate_ids(load_model(latest, trainer.mesh), [5, 6, 7, 8], new_tokens=6, sampling=DRAWN))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let autograd sum the embedding's gradient on the CPU as on a device, so that both round alike."""
    with mock.patch.object(layers, "embedding", lambda ids, weight, _: F.embedding(ids, weight)):
        yield


@contextmanager
def _counted(device: torch.device, seen: Seen) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    with count_syncs() as syncs:
        yield
    # The checkpoint's writer waits in a separate thread.
    seen.waits.append(
        Counter({key: count for key, count in syncs.lines.items() if "staging.py" not in key[1]})
    )
