"""Find checkpoints that DeepSpeed's engine saved (engine.save_checkpoint), and name their files. No torch.

TAG/mp_rank_00_model_states.pt (ZeRO 0 to 2) or TAG/zero_pp_rank_R_mp_rank_00_model_states.pt (ZeRO 3), with ZeRO
TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt of each data-parallel rank R, and next to TAG the file latest with
its name. The names are those of DeepSpeed's runtime/engine.py.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megalite.convert.foreign.places import latest_step, named_by
from megalite.errors import CheckpointError, listed

LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_PIPELINE = "layer_*-model*_states.pt"
_EXPERTS = ("*expert_*_model_states.pt", "expp_rank_*_optim_states.pt")
WEIGHTS_ONLY = (
    "import only the weights: load them into the model, call its save_pretrained(FOLDER) and name that folder"
)


@dataclass(frozen=True)
class EngineFiles:
    """The files of one model-parallel rank, in the order of its data-parallel ranks.

    model: one file, with ZeRO 3 one a rank. optimizer: empty with ZeRO 0.
    """

    place: Path
    model: tuple[Path, ...]
    optimizer: tuple[Path, ...]


def find_engine(folder: Path) -> Path | None:
    """Return the TAG folder: `folder` itself, or the one its `latest` names; None for another kind of folder.

    In an output folder of Hugging Face's Trainer it is that of the latest checkpoint-N, unless the folder has a model
    itself, of the training's end. Raises CheckpointError for a pointer to a folder without such a checkpoint, for
    several model-parallel ranks and for experts.
    """
    if _has_model_states(folder):
        return _supported(folder)
    tag = named_by(folder / LATEST)
    if tag is not None and _has_model_states(folder / tag):
        return _supported(folder / tag)
    latest = latest_step(folder)
    if latest is not None and not (folder / "config.json").is_file():
        return find_engine(latest)
    tags = sorted(path.name for path in folder.glob("*/") if _has_model_states(path))
    if not tags:
        return None
    raise CheckpointError(
        f"{folder / LATEST} names no folder that DeepSpeed's engine saved in {folder}; name one of its folders:"
        f" {listed(tags)}"
    )


def engine_files(place: Path) -> EngineFiles:
    """Return the files of a TAG folder. Raises CheckpointError if a data-parallel rank's file is missing."""
    model, optimizer = _of_first_rank(place, _MODEL), _of_first_rank(place, _OPTIMIZER)
    for paths in (model, optimizer):
        missing = sorted(set(range(len(paths))) - paths.keys())
        if missing:
            raise CheckpointError(
                f"{place} lacks the files of data-parallel rank {listed([str(rank) for rank in missing])}, beside"
                f" {listed([path.name for path in paths.values()])}; copy the folder again with the files of all ranks"
            )
    return EngineFiles(place, *(tuple(paths[rank] for rank in sorted(paths)) for paths in (model, optimizer)))


def _has_model_states(folder: Path) -> bool:
    if any(folder.glob(_PIPELINE)):
        return False
    return folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def _of_first_rank(place: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the files of model-parallel rank 0 that match a pattern, by data-parallel rank."""
    matches = ((pattern.fullmatch(path.name), path) for path in place.iterdir())
    return {int(match[1] or 0): path for match, path in matches if match is not None and int(match[2]) == 0}


def _supported(place: Path) -> Path:
    """Return a TAG folder. Raises CheckpointError for what is never read from one."""
    others = [
        path.name for path in place.iterdir() if (match := _MODEL.fullmatch(path.name)) and int(match[2])
    ]
    if others:
        raise CheckpointError(
            f"{place} has {listed(sorted(others))}: checkpoints of several model-parallel ranks (AutoTP) are not"
            f" supported; {WEIGHTS_ONLY}"
        )
    if any(any(place.glob(pattern)) for pattern in _EXPERTS):
        raise CheckpointError(
            f"{place} has the files of experts, whose checkpoints are not supported; {WEIGHTS_ONLY}"
        )
    return place
