"""Write a checkpoint from another project's files, in one process with one tensor in memory at a time."""

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.durable import sync_folder, write_durably
from megalite.checkpoint.folder import partial_name, published_name
from megalite.checkpoint.manifest import MANIFEST, Manifest, Shard, TensorEntry
from megalite.checkpoint.manifest_json import to_json
from megalite.checkpoint.publish import publish
from megalite.checkpoint.tensor_file import TensorInfo, write_tensor_file
from megalite.errors import CheckpointError
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.version import __version__

_FILE = "rank-00000.safetensors"


def write_streamed(
    run_folder: Path,
    shape: ModelShape,
    state_keys: Sequence[str],
    read: Callable[[str, str], Tensor],
    *,
    trainer_state: Mapping[str, int],
    optimizer: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Path:
    """Write all canonical tensors under each state key, in fp32, as a checkpoint of a run; return its folder.

    read: returns the whole tensor of (state key, canonical name). Raises CheckpointError if the checkpoint cannot be
    written. On any error, also one of `read`, nothing is left behind.
    """
    folder, step = run_folder / "checkpoints", trainer_state["step"]
    partial = folder / partial_name(step, secrets.token_hex(4))
    try:
        partial.mkdir(parents=True)
        tensors, size_bytes = _write(partial / _FILE, shape, state_keys, read)
        manifest = Manifest(
            megalite=__version__,
            torch=torch.__version__,
            trainer_state=dict(trainer_state),
            layout=Layout(),
            stage_layers=(tuple(range(shape.num_hidden_layers)),),
            model=shape,
            config=config,
            optimizer=dict(optimizer),
            tensors=tensors,
            files={_FILE: size_bytes},
        )
        check_coverage(manifest, partial)
        write_durably(partial / MANIFEST, to_json(manifest))
        sync_folder(partial)
        publish(partial, folder / published_name(step))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error}); free space or name another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder / published_name(step)


def _write(
    path: Path, shape: ModelShape, state_keys: Sequence[str], read: Callable[[str, str], Tensor]
) -> tuple[dict[str, dict[str, TensorEntry]], int]:
    """Write the file; return the manifest's entries, state key -> name -> entry, and the file's size in bytes."""
    shapes = canonical_tensors(shape)
    keys = {f"{state_key}/{name}": (state_key, name) for state_key in state_keys for name in shapes}
    infos = {key: TensorInfo(torch.float32, shapes[name]) for key, (_, name) in keys.items()}
    hashes, size_bytes = write_tensor_file(path, infos, lambda key: read(*keys[key]).float())
    tensors: dict[str, dict[str, TensorEntry]] = {state_key: {} for state_key in state_keys}
    for key, (state_key, name) in keys.items():
        full = shapes[name]
        shard = Shard(path.name, key, (0,) * len(full), full, None, hashes[key])
        tensors[state_key][name] = TensorEntry(full, "float32", (shard,))
    return tensors, size_bytes
