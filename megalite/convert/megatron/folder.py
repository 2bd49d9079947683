"""Find the files of a Megatron-LM checkpoint. No torch.

latest_checkpointed_iteration.txt         1000, or release
iter_0001000/mp_rank_01/model_optim_rng.pt            --ckpt-format torch: tensor-parallel rank 1
iter_0001000/mp_rank_01_003/model_optim_rng.pt        tensor-parallel rank 1, pipeline rank 3
iter_0001000/mp_rank_01_003/distrib_optim.pt          beside it, with --use-distributed-optimizer
iter_0001000/metadata.json common.pt .metadata __0_0.distcp ...      --ckpt-format torch_dist
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from megalite.errors import CheckpointError

_TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?", re.ASCII)
_ITERATION = re.compile(r"iter_\d{7,12}|release", re.ASCII)
# The second name is of versions that kept the optimizer in a separate file.
_FILES = ("model_optim_rng.pt", "model_rng.pt")
COMMON = "common.pt"
DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"
# Files of checkpoints of global tensors: torch_dist, the older zarr, and torch_dcp.
_BACKEND = "metadata.json"
_SHARDED = (_BACKEND, COMMON, ".metadata")


@dataclass(frozen=True)
class MegatronFolder:
    """The rank files of one iteration. path: the iteration's folder. files: (pp rank, tp rank) -> file."""

    path: Path
    files: Mapping[tuple[int, int], Path]

    @property
    def pipeline(self) -> int:
        return 1 + max(pp for pp, _ in self.files)

    @property
    def tensor(self) -> int:
        return 1 + max(tp for _, tp in self.files)


def megatron_place(folder: Path) -> Path | None:
    """Return `folder` if it looks like a Megatron-LM checkpoint, complete or not; None for another kind."""
    try:
        names = {each.name for each in folder.iterdir()}
    except OSError:
        return None
    of_an_iteration = any(name.startswith("mp_rank_") for name in names) or set(_SHARDED[:2]) <= names
    one = _TRACKER in names or of_an_iteration or any(_ITERATION.fullmatch(name) for name in names)
    return folder if one else None


def find_sharded_folder(folder: Path) -> Path | None:
    """Return the iteration's folder of a `torch_dist` checkpoint; None for one of rank files.

    Raises CheckpointError for a checkpoint of another backend, or without one of its files.
    """
    path = _of_iteration(folder)
    if not any((path / name).exists() for name in _SHARDED):
        return None
    try:
        backend = json.loads((path / _BACKEND).read_text(encoding="utf-8")).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / _BACKEND} cannot be read ({error}); fetch it again") from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path / _BACKEND} names the backend {backend!r:.60}; first convert the checkpoint with Megatron-LM:"
            " --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    if absent := [name for name in _SHARDED if not (path / name).is_file()]:
        raise CheckpointError(
            f"{path} lacks {', '.join(absent)}; fetch every file of the torch_dist checkpoint"
        )
    return path


def find_megatron_folder(folder: Path) -> MegatronFolder:
    """Return the rank files of the latest iteration in `folder`, or of `folder` if that is an iteration's.

    Raises CheckpointError for a missing or unexpected file.
    """
    path = _of_iteration(folder)
    named = {name: each for name, each in _inside(path).items() if name.startswith("mp_rank_")}
    matches = {name: _RANK.fullmatch(name) for name in named}
    if unknown := sorted(name for name, match in matches.items() if match is None):
        raise CheckpointError(
            f"{path / unknown[0]} is not named by a tensor and pipeline rank alone; expert parallelism is not"
            " supported: write a mixture as Hugging Face files with Megatron-Bridge"
        )
    ranks = [(match[1], match[2], named[name]) for name, match in matches.items() if match is not None]
    if not ranks:
        raise CheckpointError(f"{path} has no mp_rank_00 folder; name a Megatron-LM checkpoint's folder")
    if len({pp is None for _, pp, _ in ranks}) > 1:
        raise CheckpointError(
            f"{path} has rank folders with and without a pipeline rank; keep those of one run"
        )
    files = {(int(pp or 0), int(tp)): _file_in(path) for tp, pp, path in ranks}
    complete = MegatronFolder(path, files)
    for pp, tp in product(range(complete.pipeline), range(complete.tensor)):
        if (pp, tp) not in files:
            name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if ranks[0][1] is not None else "")
            raise CheckpointError(f"{path / name / _FILES[0]} is missing; fetch every rank's file")
    return complete


def _of_iteration(folder: Path) -> Path:
    tracker = folder / _TRACKER
    if tracker.is_file():
        try:
            word = tracker.read_text(encoding="ascii").strip()
            name = word if word == "release" else f"iter_{int(word):07d}"
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{tracker} names no iteration ({error}); name the iteration's folder"
            ) from error
        if not (folder / name).is_dir():
            raise CheckpointError(f"{tracker} names {name}, which is not there; name the iteration's folder")
        return folder / name
    inner = sorted(name for name in _inside(folder) if _ITERATION.fullmatch(name))
    if inner:
        raise CheckpointError(f"{folder} has no {_TRACKER}; name one of its folders: {', '.join(inner[:5])}")
    return folder


def _file_in(rank: Path) -> Path:
    for name in _FILES:
        if (rank / name).is_file():
            return rank / name
    raise CheckpointError(f"{rank / _FILES[0]} is missing; fetch every rank's file")


def _inside(folder: Path) -> dict[str, Path]:
    try:
        return {each.name: each for each in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error}); name a Megatron-LM checkpoint's"
        ) from error
