"""One *_optim_states.pt file of DeepSpeed's engine: its flat tensors, checked to be what the names of its keys say.

The keys are those of `state_dict` in DeepSpeed's stage_1_and_2.py, stage3.py and bf16_optimizer.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.convert.foreign.unpickle import Foreign, load_pickle
from megalite.convert.universal.folder import WEIGHTS
from megalite.errors import CheckpointError


@dataclass(frozen=True)
class RankStates:
    """A file's content.

    stage: of ZeRO; 1 for BF16_Optimizer too. partition_count: the ranks that share the parameters, None if not said.
    states: the flat tensors of each parameter group, or ZeRO 3 sub-group, by state key, WEIGHTS among them. steps: the
    updates that the optimizer made of each group. mappings: start and number of elements of each parameter's fragment,
    by group; None with ZeRO 3 and in files of old versions. param_groups: hyperparameters; their "params" are indices
    of `states`. table: the file's `optimizer_state_dict`. settings: its `ds_config`.
    """

    path: Path
    stage: int
    partition_count: int | None
    states: Sequence[Mapping[str, Tensor]]
    steps: Sequence[float]
    mappings: Sequence[Mapping[str, tuple[int, int]]] | None
    param_groups: Sequence[Mapping[str, Any]]
    table: Mapping[str, Any] = field(repr=False)
    settings: Mapping[str, Any] = field(repr=False)


def read_rank(path: Path) -> RankStates:
    """Open a file; its tensors stay on disk. Raises CheckpointError if it is not of this kind or not supported."""
    content = load_pickle(path)
    table = content.get("optimizer_state_dict") if isinstance(content, Mapping) else None
    if not isinstance(table, Mapping):
        raise _not_of_engine(path, "optimizer_state_dict")
    stage = whole_number(table.get("zero_stage", 1))
    flats = table.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    base = table.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if stage not in (0, 1, 2, 3) or not isinstance(flats, list) or not all(map(_is_flat, flats)):
        raise _not_of_engine(path, "the flat groups of master weights")
    # With `elastic_checkpoint` of old versions it is a list of the groups' states, without hyperparameters.
    base = {"state": dict(enumerate(base))} if isinstance(base, list) else base
    states = base.get("state") if isinstance(base, Mapping) else None
    if not isinstance(states, Mapping):
        raise _not_of_engine(path, "the states of its optimizer")
    groups = base.get("param_groups", []) if isinstance(base, Mapping) else []
    groups = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    if any(group.get("moe") for group in groups) or table.get("ds_zero_partition_groups"):
        raise CheckpointError(f"{path} has the states of experts, which are not supported")
    tensors = [{WEIGHTS: flat.flatten(), **_flat_tensors(states.get(i))} for i, flat in enumerate(flats)]
    steps = [*_steps(states, groups, table)]
    settings = content.get("ds_config")
    settings = settings if isinstance(settings, Mapping) else {}
    mappings = _mappings(path, table)
    return RankStates(path, stage, _count(table), tensors, steps, mappings, groups, table, settings)


def whole_number(value: object) -> int | None:
    """Return an int that may stand in an enum or a tensor of one element; None for anything else."""
    if isinstance(value, Foreign):
        value = value.arguments[0] if len(value.arguments) == 1 else None
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _flat_tensors(states: object) -> dict[str, Tensor]:
    """Return the states of a group that have an element per parameter's element: not its step."""
    items = states.items() if isinstance(states, Mapping) else ()
    return {
        name: values.flatten()
        for name, values in items
        if isinstance(values, Tensor) and values.ndim and values.is_floating_point() and isinstance(name, str)
    }


def _steps(
    states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], table: Mapping[str, Any]
) -> Iterator[float]:
    """Yield every number of updates that the file has: of states, of groups (fused Adam), of all (elastic)."""
    holders = [*states.values(), *groups, {"step": table.get("base_optimizer_state_step")}]
    for holder in holders:
        step = whole_number(holder.get("step")) if isinstance(holder, Mapping) else None
        if step is not None:
            yield float(step)


def _count(table: Mapping[str, Any]) -> int | None:
    count = table.get("partition_count")
    counts = [whole_number(each) for each in count] if isinstance(count, list) else [whole_number(count)]
    known = [each for each in counts if each is not None]
    return max(known, default=None)


def _mappings(path: Path, table: Mapping[str, Any]) -> list[dict[str, tuple[int, int]]] | None:
    stored = table.get("param_slice_mappings")
    if stored is None:
        return None
    if not isinstance(stored, list) or not all(isinstance(group, Mapping) for group in stored):
        raise _not_of_engine(path, "a readable param_slice_mappings")
    return [{str(name): _address(path, value) for name, value in group.items()} for group in stored]


def _address(path: Path, value: object) -> tuple[int, int]:
    """Return start and number of elements of a fragment_address."""
    fields = value.fields if isinstance(value, Foreign) else {}
    start, numel = whole_number(fields.get("start")), whole_number(fields.get("numel"))
    if start is None or numel is None or start < 0 or numel < 0:
        raise _not_of_engine(path, "a readable param_slice_mappings")
    return start, numel


def _not_of_engine(path: Path, lacking: str) -> CheckpointError:
    return CheckpointError(
        f"{path} lacks {lacking}, which DeepSpeed's engine writes; save the checkpoint again, or import its weights"
        " only: load them into the model, call its save_pretrained(FOLDER) and name that folder"
    )
