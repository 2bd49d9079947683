"""Write a run's first checkpoint from other weights, in one process with some rows of a tensor in memory at a time."""

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.failures import Remedies, reason
from megalite.checkpoint.folder import partial_name, published_name
from megalite.checkpoint.manifest import WEIGHT, Manifest, Shard, TensorEntry
from megalite.checkpoint.publish import publish
from megalite.checkpoint.regions import full_slice, rows_of
from megalite.checkpoint.save import prepare_partial
from megalite.checkpoint.tensor_file import TensorInfo, dtype_name, write_tensor_file
from megalite.checkpoint.weights import WeightReader
from megalite.errors import CheckpointError
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.version import __version__

_FILE = "rank-00000.safetensors"
_REMEDIES = Remedies(
    full="free space there or name a RUN folder on another disk",
    forbidden="make it writable or name another RUN folder",
)


@dataclass(frozen=True)
class ImportedRun:
    """An import's statements on its run; by default weights alone, as step 0 of a new run.

    dtype: of what is written. state_keys: the states of each tensor. config: as of a run's manifest.
    """

    shape: ModelShape
    config: Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    state_keys: Sequence[str] = (WEIGHT,)
    trainer_state: Mapping[str, int] = field(default_factory=lambda: {"step": 0, "samples": 0, "tokens": 0})
    optimizer: Mapping[str, Any] = field(default_factory=dict)


def write_streamed(run_folder: Path, run: ImportedRun, reader: WeightReader) -> Path:
    """Write all canonical tensors under each state key as a checkpoint of a run; return its folder.

    Raises CheckpointError if the checkpoint cannot be written. On any error, also one of `reader`, nothing is left
    behind.
    """
    folder, step = run_folder / "checkpoints", run.trainer_state["step"]
    partial = folder / partial_name(step, secrets.token_hex(4))
    elements = sum(map(prod, canonical_tensors(run.shape).values()))
    try:
        needed_bytes = elements * len(run.state_keys) * run.dtype.itemsize
        prepare_partial(folder, partial, needed_bytes, _REMEDIES)
        tensors, size_bytes = _write(partial / _FILE, run, reader)
        manifest = Manifest(
            megalite=__version__,
            torch=torch.__version__,
            trainer_state=dict(run.trainer_state),
            layout=Layout(),
            stage_layers=(tuple(range(run.shape.num_hidden_layers)),),
            model=run.shape,
            config=run.config,
            optimizer=dict(run.optimizer),
            tensors=tensors,
            files={_FILE: size_bytes},
        )
        publish(manifest, partial, folder / published_name(step))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {reason(error, _REMEDIES)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder / published_name(step)


def _write(
    path: Path, run: ImportedRun, reader: WeightReader
) -> tuple[dict[str, dict[str, TensorEntry]], int]:
    """Write the file; return the manifest's entries, state key -> name -> entry, and the file's size in bytes."""
    shapes = canonical_tensors(run.shape)
    keys = {f"{state_key}/{name}": (state_key, name) for state_key in run.state_keys for name in shapes}
    infos = {key: TensorInfo(run.dtype, shapes[name]) for key, (_, name) in keys.items()}

    def read(key: str) -> Iterator[Tensor]:
        state_key, name = keys[key]
        for block in rows_of(full_slice(shapes[name]), reader.block_elements):
            yield reader.read(state_key, name, block).to(run.dtype)

    hashes, size_bytes = write_tensor_file(path, infos, read)
    tensors: dict[str, dict[str, TensorEntry]] = {state_key: {} for state_key in run.state_keys}
    for key, (state_key, name) in keys.items():
        full = shapes[name]
        shard = Shard(path.name, key, (0,) * len(full), full, None, hashes[key])
        tensors[state_key][name] = TensorEntry(full, dtype_name(run.dtype), (shard,))
    return tensors, size_bytes
