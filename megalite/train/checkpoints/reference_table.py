"""The losses of all samples under the model as it was before the first step, the reference of preference tuning.

They are computed once and kept in the run folder, where a resumed run finds them.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.checkpoint.durable import sync_folder, write_durably
from megalite.checkpoint.folder import read_manifest
from megalite.data.batches.loader import StepLoader
from megalite.data.files.fingerprint import content_fingerprint
from megalite.data.files.token_file import TokenFile, bin_path
from megalite.errors import CheckpointError
from megalite.launcher.control.progress import Activity, progress
from megalite.train.checkpoints.resume_check import REFERENCE

if TYPE_CHECKING:
    from megalite.train.step.train_step import TrainStep

# The loss sum of each sample, of one token file after the other.
Losses = Sequence[NDArray[np.float64]]


@dataclass(frozen=True)
class ReferenceFile:
    """The run's file of the losses: JSON, with the fingerprints of the data and of the weights that they are of.

    resumed: the checkpoint that the run goes on from, whose weights are no longer those of the reference.
    """

    path: Path
    resumed: Path | None = None

    def recorded(self, data: str, weights: str) -> Losses | None:
        """Return the losses of this data and, before the first step, of these weights; None if there are none.

        A resumed run may have them from the run that saved the checkpoint.
        """
        if self.resumed is None:
            return _read(self.path, data, weights)
        places = (self.path, self.resumed.parent.parent / self.path.name)
        return next((losses for each in places if (losses := _read(each, data, None)) is not None), None)

    def write(self, data: str, weights: str, losses: Losses) -> None:
        """Replace the file atomically."""
        partial = self.path.with_name(f".{self.path.name}.partial")
        # repr of a float64 has all of its digits.
        lists = [values.tolist() for values in losses]
        content = {"data": data, "weights": weights, "digest": _digest(losses), "losses": lists}
        write_durably(partial, json.dumps(content))
        partial.rename(self.path)
        sync_folder(self.path.parent)


def _read(path: Path, data: str, weights: str | None) -> Losses | None:
    """Return the losses in a file; None if it is missing, damaged, or of other data or weights.

    weights: None: of any, and the checkpoint tells whether they are those of the run.
    """
    try:
        content = json.loads(path.read_bytes())
        losses = [np.array(values, dtype=np.float64) for values in content["losses"]]
        whole = content["weights"] == weights and content.get("digest") == _digest(losses)
        return losses if content["data"] == data and (weights is None or whole) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def give_reference_losses(
    trainer: "TrainStep",
    loaders: Sequence[StepLoader],
    load: Callable[..., StepLoader],
    file: ReferenceFile,
    advance: Callable[[], None] = lambda: None,
) -> str:
    """Give each loader the reference's losses of its samples, from the file or computed; return a line for the start.

    load: `loaders.loader_maker`'s. advance: called after every batch.
    Collective. Raises CheckpointError if a resumed run has no losses of this data.
    """
    started, mesh = time.perf_counter(), trainer.mesh
    files = list({each.prefix: each for loader in loaders for each in loader.token_files}.values())
    recorded: tuple[str, str, Losses | None] | None = None
    if mesh.rank == 0:
        data, weights = _data_fingerprint(files), _weights_fingerprint(trainer)
        recorded = data, weights, file.recorded(data, weights)
    data, weights, losses = mesh.broadcast_object(recorded)
    if losses is None and file.resumed is not None:
        raise CheckpointError(
            f"{file.path} is missing or of other data: the log-probabilities of the pairs under the weights that the "
            f"run started from, which {file.resumed} no longer has; put the file back, or set "
            'checkpoint.resume = "never" to start over'
        )
    how = f"read from {file.path}"
    if losses is None:
        progress.begin(Activity.VALIDATING)
        losses = [_computed(trainer, load, each, advance) for each in files]
        how = f"computed in {time.perf_counter() - started:.1f} s"
        if mesh.rank == 0:
            file.write(data, weights, losses)
    elif mesh.rank == 0 and not file.path.exists():
        file.write(data, weights, losses)
    if file.resumed is not None:
        _require_same(trainer, losses, file)
    trainer.fingerprints[REFERENCE] = _digest(losses)
    losses_of = dict(zip((each.prefix for each in files), losses, strict=True))
    for loader in loaders:
        loader.reference_losses = np.concatenate([losses_of[each.prefix] for each in loader.token_files])
    return f"reference: log-probabilities of {sum(map(len, losses)) // 2:,} pairs, {how}"


def _computed(
    trainer: "TrainStep", load: Callable[..., StepLoader], file: TokenFile, advance: Callable[[], None]
) -> NDArray[np.float64]:
    """Return the loss sum of each sample of a file, on every rank. Collective."""
    mesh, loader = trainer.mesh, load(file, shuffle=False, epochs=1)
    samples, stride = loader.samples_per_epoch, loader.global_batch_size
    losses = torch.zeros(samples, dtype=torch.float64, device=mesh.device)
    steps = math.ceil(samples / stride)
    with trainer.prefetch(loader, end=steps * stride) as batches:
        for step in range(steps):
            batch = batches.step_batch(step * stride).ready()
            rows = trainer.pipeline.row_losses(batch)
            if rows is not None and mesh.counts_samples:
                # Unshuffled, a sample's place is its number; those after the last one have no labels.
                here = batch.sample_indices < samples
                losses.index_add_(
                    0, batch.sample_indices.clamp(max=samples - 1), torch.where(here, rows, 0.0)
                )
            advance()
    return mesh.reduce_over_world(losses).cpu().numpy()


def _digest(losses: Losses) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for values in losses:
        digest.update(values.tobytes())
    return digest.hexdigest()


def _require_same(trainer: "TrainStep", losses: Losses, file: ReferenceFile) -> None:
    """Raise CheckpointError if the losses are not those of the steps before the checkpoint, unless they may change."""
    assert file.resumed is not None
    before = read_manifest(file.resumed).data.get(REFERENCE)
    if before not in (None, _digest(losses)) and not trainer.config.checkpoint.resume_changed:
        raise CheckpointError(
            f"{file.path}: its losses are not those of the steps before {file.resumed}; put that run's file back, or "
            "set checkpoint.resume_changed = true to go on with these"
        )


def _data_fingerprint(files: Sequence[TokenFile]) -> str:
    """Return a hash of the tokens and of the lengths of their documents, in whatever folder they lie."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(np.ascontiguousarray(file.document_lengths).tobytes())
        with bin_path(file.prefix).open("rb") as tokens:
            while block := tokens.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _weights_fingerprint(trainer: "TrainStep") -> str:
    """Return a hash of what the start weights are made of: the content of their files, or shape and seed."""
    parts = [repr(trainer.shape), trainer.config.training.precision, str(trainer.config.run.seed)]
    adapter = trainer.config.adapter.path
    folders = [trainer.weights, None if adapter is None else Path(adapter).expanduser()]
    for folder in (each for each in folders if each is not None):
        parts.append(content_fingerprint([file for file in sorted(folder.iterdir()) if file.is_file()]))
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
