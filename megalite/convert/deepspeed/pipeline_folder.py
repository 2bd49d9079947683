"""Find the files of a checkpoint of DeepSpeed's pipeline engine. No torch.

latest                                                 global_step10
global_step10/layer_02-model_01-model_states.pt        the layer's weights, model-parallel rank 1
global_step10/layer_02-model_states.pt                 the same without model parallelism
global_step10/mp_rank_03_model_states.pt               counters and arguments, stage x model ranks + model rank = 3
global_step10/zero_pp_rank_1_mp_rank_03_optim_states.pt        its optimizer state, data-parallel rank 1
global_step10/configs/*.yml                            GPT-NeoX's settings
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megalite.convert.deepspeed.folder import LATEST
from megalite.errors import CheckpointError

_LAYER = re.compile(r"layer_(\d{2,5})(?:-model_(\d{2,5}))?-model_states\.pt", re.ASCII)
_STATE = re.compile(r"mp_rank_(\d{2,6})_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt", re.ASCII)


@dataclass(frozen=True)
class PipelineFolder:
    """The files of one step.

    layers: the index of a pipeline layer -> its file of each model-parallel rank. states: model_states of each stage
    and model rank. optimizers: the same -> the file of each data-parallel rank; empty without ZeRO's files.
    """

    path: Path
    layers: Mapping[int, tuple[Path, ...]]
    states: tuple[Path, ...]
    optimizers: Mapping[int, tuple[Path, ...]]

    @property
    def model_ranks(self) -> int:
        return len(next(iter(self.layers.values())))

    @property
    def stages(self) -> int:
        return max(1, len(self.states) // self.model_ranks)

    @property
    def files(self) -> list[Path]:
        """Every file of torch.save."""
        of_layers = [path for paths in self.layers.values() for path in paths]
        return [*of_layers, *self.states, *(path for paths in self.optimizers.values() for path in paths)]


def pipeline_place(folder: Path) -> Path | None:
    """Return the step's folder: `folder` itself, or the one its `latest` names; None for another kind of folder.

    Raises CheckpointError if `folder` has several steps' folders and no `latest`.
    """
    if _has_layers(folder):
        return folder
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if name and name != ".." and Path(name).name == name and _has_layers(folder / name):
        return folder / name
    steps = [
        each for each in _folders(folder) if each.startswith("global_step") and _has_layers(folder / each)
    ]
    if not steps:
        return None
    said = (
        f"{folder / LATEST} names {name!r}, which is no step of it"
        if name
        else f"{folder} has no {LATEST} file"
    )
    raise CheckpointError(f"{said}; name one of its folders: {', '.join(steps[:5])}")


def open_pipeline_folder(place: Path) -> PipelineFolder:
    """Return the files of a step's folder. Raises CheckpointError for a missing one."""
    layers: dict[int, dict[int, Path]] = {}
    states: dict[int, Path] = {}
    optimizers: dict[int, dict[int, Path]] = {}
    for path in sorted(place.iterdir()):
        if match := _LAYER.fullmatch(path.name):
            layers.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
        elif match := _STATE.fullmatch(path.name):
            states[int(match[1])] = path
        elif match := _OPTIMIZER.fullmatch(path.name):
            optimizers.setdefault(int(match[2]), {})[int(match[1])] = path
    ranks = 1 + max((rank for files in layers.values() for rank in files), default=0)
    whole = {
        layer: _in_order(files, ranks, place / f"layer_{layer:02d}-model_{{:02d}}-model_states.pt")
        for layer, files in layers.items()
    }
    count = 1 + max([*states, *optimizers], default=-1)
    if count % ranks:
        count += ranks - count % ranks
    in_order = _in_order(states, count, place / "mp_rank_{:02d}_model_states.pt")
    return PipelineFolder(place, whole, in_order, _optimizer_files(place, optimizers, count))


def _optimizer_files(
    place: Path, optimizers: Mapping[int, Mapping[int, Path]], count: int
) -> dict[int, tuple[Path, ...]]:
    if not optimizers:
        return {}
    data_ranks = 1 + max(rank for files in optimizers.values() for rank in files)
    return {
        state: _in_order(
            optimizers.get(state, {}),
            data_ranks,
            place / f"zero_pp_rank_{{}}_mp_rank_{state:02d}_optim_states.pt",
        )
        for state in range(count)
    }


def _in_order(files: Mapping[int, Path], count: int, pattern: Path) -> tuple[Path, ...]:
    for rank in range(count):
        if rank not in files:
            raise CheckpointError(
                f"{pattern.parent / pattern.name.format(rank)} is missing; fetch every rank's file"
            )
    return tuple(files[rank] for rank in range(count))


def _has_layers(folder: Path) -> bool:
    try:
        return any(_LAYER.fullmatch(path.name) for path in folder.iterdir())
    except OSError:
        return False


def _folders(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
