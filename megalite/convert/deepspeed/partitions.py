"""The optimizer states of one model-parallel rank, from the *_optim_states.pt files of its data-parallel ranks.

ZeRO 1, ZeRO 2 and BF16_Optimizer flatten each parameter group and cut the flat tensor into one partition per rank, so a
parameter is one fragment or several consecutive ones. ZeRO 3 cuts each parameter into equal shares, padded at the end,
and each rank flattens its shares of a sub-group. The layout is that of DeepSpeed's zero_to_fp32.py and
ds_to_universal.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.convert.deepspeed.rank_states import read_rank, whole_number
from megalite.convert.foreign.adamw import common_step
from megalite.convert.universal.folder import WEIGHTS
from megalite.errors import CheckpointError

ParamShapes = Sequence[Mapping[str, tuple[int, ...]]]
"""The shapes by name of each parameter group or ZeRO 3 sub-group, in the order in which it was flattened."""


def param_shapes(model_states: Mapping[str, Any], path: Path) -> ParamShapes | None:
    """Return `param_shapes` of a *_model_states.pt file; None where it has none, as without ZeRO.

    Raises CheckpointError if they are not shapes by name.
    """
    stored = model_states.get("param_shapes")
    if stored is None:
        return None
    groups = stored if isinstance(stored, list) else [stored]  # one table before DeepSpeed 0.4
    shapes = [
        {name: _shape(value) for name, value in group.items()}
        for group in groups
        if isinstance(group, Mapping)
    ]
    names = [name for group in shapes for name in group]
    readable = len(shapes) == len(groups) and all(None not in group.values() for group in shapes)
    if not readable or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path} has no readable param_shapes; save the checkpoint again")
    return [{name: shape for name, shape in group.items() if shape is not None} for group in shapes]


def _shape(value: object) -> tuple[int, ...] | None:
    sizes = tuple(value) if isinstance(value, list | tuple) else None
    return sizes if sizes is not None and all(type(size) is int and size >= 0 for size in sizes) else None


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of a parameter: where they stand in a rank's flat tensor of a group."""

    rank: int
    group: int
    start: int
    numel: int


class OptimizerPartitions:
    """Parameters by name, each put together from the fragments that the ranks' files hold of it."""

    def __init__(self, files: Sequence[Path], shapes: ParamShapes | None):
        """Open the files of data-parallel ranks 0, 1, ... of one model-parallel rank.

        shapes: as `param_shapes` returns them; where they are None the files must have `param_slice_mappings`,
        and sizes alone are known. Raises CheckpointError for files that do not belong together, and for fragments that
        are missing or outside of their flat tensor.
        """
        self.ranks = [read_rank(path) for path in files]
        self.stage, self.aliases = self.ranks[0].stage, frozenset[str]()
        self._shapes = {name: shape for group in shapes or () for name, shape in group.items()}
        self._require_one_set()
        self.fragments = self._find_fragments(shapes)
        self.numels = {name: sum(each.numel for each in parts) for name, parts in self.fragments.items()}
        self._require_shapes(shapes)
        self._require_within()

    @property
    def names(self) -> list[str]:
        return list(self.fragments)

    @property
    def table(self) -> Mapping[str, Any]:
        """The first rank's optimizer state dict, which has the loss scale."""
        return self.ranks[0].table

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        return self.ranks[0].param_groups

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a parameter's shape; flat where only its size is known."""
        return self._shapes.get(name, (self.numels[name],))

    @property
    def step(self) -> float:
        """How many updates the optimizer made. Raises CheckpointError where ranks or groups differ in it."""
        steps = ((rank.path.name, step) for rank in self.ranks for step in rank.steps)
        return common_step(steps, self.ranks[0].path.parent)

    def read(self, name: str, state: str) -> Tensor:
        """Return a parameter's values [numel] under a state key: WEIGHTS, "exp_avg", ...

        Raises CheckpointError if a file does not have that state.
        """
        pieces = [self._flat(fragment, state, name) for fragment in self.fragments[name] if fragment.numel]
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def require(self, states: Sequence[str]) -> None:
        """Raise CheckpointError for a parameter that lacks one of these states, or a part of it."""
        for name, fragments in self.fragments.items():
            for state in states:
                for fragment in fragments:
                    self._flat(fragment, state, name)

    def other_states(self) -> set[str]:
        """Return the state keys beside the weights."""
        return {state for rank in self.ranks for group in rank.states for state in group} - {WEIGHTS}

    def group_of(self, name: str) -> Mapping[str, Any]:
        """Return the hyperparameters of a parameter's group."""
        index = self.fragments[name][0].group
        groups = self.ranks[0].param_groups
        in_group = (group for group in groups if index in (group.get("params") or ()))
        return next(in_group, groups[min(index, len(groups) - 1)] if groups else {})

    def _flat(self, fragment: Fragment, state: str, name: str) -> Tensor:
        rank = self.ranks[fragment.rank]
        values, end = rank.states[fragment.group].get(state), fragment.start + fragment.numel
        if values is None or values.numel() < end:
            raise CheckpointError(
                f"{rank.path} lacks {state} of {name}; checkpoints of AdamW after its first step are supported, whose"
                " optimizer states are in the folder (ZeRO-Infinity leaves those offloaded to NVMe outside of it)"
            )
        return values[fragment.start : end]

    def _require_one_set(self) -> None:
        first = self.ranks[0]
        for rank in self.ranks:
            count = rank.partition_count
            if count is not None and count != len(self.ranks):
                raise CheckpointError(
                    f"{rank.path} is one of {count} partitions, but {rank.path.parent} has {len(self.ranks)} such"
                    " files; copy the folder again with the files of all ranks"
                )
            if rank.stage != first.stage or len(rank.states) != len(first.states):
                raise CheckpointError(
                    f"{rank.path} and {first.path} are of different ZeRO stages or parameter groups, so of different"
                    " runs; copy the folder again"
                )

    def _find_fragments(self, shapes: ParamShapes | None) -> dict[str, list[Fragment]]:
        groups = len(self.ranks[0].states)
        if shapes is not None and len(shapes) != groups:
            raise CheckpointError(
                f"{self.ranks[0].path} has {groups} parameter groups, but the model states name {len(shapes)};"
                " copy the folder again"
            )
        if shapes is not None:
            pieces = self._shares(shapes) if self.stage == 3 else self._consecutive(shapes)
        elif self.stage < 3 and all(rank.mappings is not None for rank in self.ranks):
            pieces = self._mapped()
        else:
            raise CheckpointError(
                f"{self.ranks[0].path} does not name its parameters, nor do the model states; save the checkpoint with"
                " ZeRO 1 and DeepSpeed 0.8 or later"
            )
        fragments: dict[str, list[Fragment]] = {}
        for name, fragment in pieces:
            parts = fragments.setdefault(name, [])
            if parts and parts[-1].group != fragment.group:
                raise CheckpointError(f"{self.ranks[fragment.rank].path} has {name} in two parameter groups")
            parts.append(fragment)
        return fragments

    def _mapped(self) -> Iterator[tuple[str, Fragment]]:
        """The fragments that the files themselves list."""
        zero = self.ranks[0].settings.get("zero_optimization")
        if isinstance(zero, Mapping) and zero.get("round_robin_gradients"):
            # DeepSpeed lists them in another order than it flattened them, as of 0.19.8.
            raise CheckpointError(
                f"{self.ranks[0].path} was saved with round_robin_gradients, and the model states do not say the order"
                " of its parameters; save the checkpoint again without round_robin_gradients"
            )
        for index, rank in enumerate(self.ranks):
            for group, mapping in enumerate(rank.mappings or ()):
                for name, (start, numel) in mapping.items():
                    yield name, Fragment(index, group, start, numel)

    def _consecutive(self, shapes: ParamShapes) -> Iterator[tuple[str, Fragment]]:
        """The parameters of a group follow each other through the partitions of all ranks; padding is at the end."""
        for group, members in enumerate(shapes):
            # The first element of each rank in the flat group, and the end.
            bounds = [0, *accumulate(rank.states[group][WEIGHTS].numel() for rank in self.ranks)]
            paddings = self._paddings(group, len(members))
            position = 0
            for (name, shape), padding in zip(members.items(), paddings, strict=True):
                end = position + prod(shape)
                for rank, (first, after) in enumerate(pairwise(bounds)):
                    start, stop = max(first, position), min(after, end)
                    if start < stop:
                        yield name, Fragment(rank, group, start - first, stop - start)
                position = end + padding
            # Files of BF16_Optimizer have the padding to a multiple of two elements a rank.
            if not 0 <= bounds[-1] - position < 2 * len(self.ranks):
                raise self._another_size(group, bounds[-1], position)

    def _paddings(self, group: int, count: int) -> list[int]:
        """Return the elements after each parameter that `zero_optimization.parameter_alignment` adds."""
        stored = self.ranks[0].table.get("param_alignment_paddings")
        paddings = stored[group] if isinstance(stored, list) and group < len(stored) else [0] * count
        numbers = [whole_number(each) for each in paddings] if isinstance(paddings, list) else []
        known = [number for number in numbers if number is not None and number >= 0]
        if len(known) != count:
            raise CheckpointError(
                f"{self.ranks[0].path} has other paddings than parameters; copy the folder again"
            )
        return known

    def _shares(self, shapes: ParamShapes) -> Iterator[tuple[str, Fragment]]:
        """ZeRO 3: rank r has the r-th of equal shares of each parameter."""
        count = len(self.ranks)
        for group, members in enumerate(shapes):
            start = 0
            for name, shape in members.items():
                numel = prod(shape)
                share = -(-numel // count)
                for rank in range(count):
                    yield name, Fragment(rank, group, start, max(0, min(share, numel - rank * share)))
                start += share
            for rank_states in self.ranks:
                if (size := rank_states.states[group][WEIGHTS].numel()) != start:
                    raise self._another_size(group, size, start)

    def _another_size(self, group: int, stored: int, expected: int) -> CheckpointError:
        return CheckpointError(
            f"{self.ranks[0].path.parent} has {stored} elements in parameter group {group}, but the parameters that the"
            f" model states name in it make {expected}; its files are of different runs or damaged: copy it again"
        )

    def _require_shapes(self, shapes: ParamShapes | None) -> None:
        if shapes is None:
            return
        sizes = {name: prod(shape) for name, shape in self._shapes.items()}
        for name in sizes.keys() | self.numels.keys():
            if sizes.get(name) != self.numels.get(name, 0):
                raise CheckpointError(
                    f"{self.ranks[0].path.parent} has {self.numels.get(name, 0)} elements of {name}, but its shape in"
                    f" the model states makes {sizes.get(name, 0)}; copy the folder again"
                )

    def _require_within(self) -> None:
        """Raise CheckpointError for fragments that overlap or leave their flat tensor."""
        by_place: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
        for name, fragments in self.fragments.items():
            for each in fragments:
                by_place.setdefault((each.rank, each.group), []).append((each.start, each.numel, name))
        for (rank, group), pieces in by_place.items():
            pieces.sort()
            size = (
                self.ranks[rank].states[group][WEIGHTS].numel() if group < len(self.ranks[rank].states) else 0
            )
            follow = [*pieces[1:], (size, 0, "")]
            for (start, numel, name), (after, *_) in zip(pieces, follow, strict=True):
                if not 0 <= start <= start + numel <= after:
                    raise CheckpointError(
                        f"{self.ranks[rank].path} places {name} at {start} to {start + numel} of group {group}, which"
                        f" other parameters have, or which its {size} elements lack; copy the folder again"
                    )
