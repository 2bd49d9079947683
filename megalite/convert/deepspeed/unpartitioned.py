"""Optimizer states that ZeRO 0 saves whole in the model states' file, by torch or by DeepSpeed's fp16 optimizers.

The file does not name the optimizer's parameters. They are found by their shapes and, where the file has fp32 masters,
by these masters' values rounded to the weights' type. Parameters alike in both are taken in the order of the model's
weights if they are all in one parameter group, as `model.parameters()` yields them; otherwise the file is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from megalite.convert.deepspeed.model_states import ModelStates
from megalite.convert.deepspeed.rank_states import whole_number
from megalite.convert.foreign.adamw import common_step
from megalite.convert.universal.folder import WEIGHTS
from megalite.errors import CheckpointError

_Key = tuple[tuple[int, ...], bytes]


@dataclass(frozen=True)
class _Entry:
    """A parameter of the optimizer. states: exp_avg, ..., and WEIGHTS if there are masters; each in its shape."""

    group: int
    states: Mapping[str, Tensor] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return next((tuple(values.shape) for values in self.states.values()), ())


class UnpartitionedOptimizer:
    """The states of the parameters that ZeRO 0's optimizer has."""

    stage = 0

    def __init__(self, model: ModelStates):
        """Raises CheckpointError if the optimizer is missing, or its parameters cannot be named."""
        self._model = model
        table = model.table.get("optimizer")
        if not isinstance(table, Mapping):
            raise CheckpointError(
                f"{model.path} has no optimizer, and no *_optim_states.pt file is beside it; copy the folder again with"
                " the files of all ranks"
            )
        self.table: Mapping[str, Any] = table
        base = table.get("optimizer_state_dict", table)
        states = base.get("state") if isinstance(base, Mapping) else None
        groups = base.get("param_groups") if isinstance(base, Mapping) else None
        if not isinstance(states, Mapping) or not isinstance(groups, list) or not groups:
            raise self._unreadable("state and param_groups of an optimizer")
        if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
            raise self._unreadable("readable param_groups")
        self.param_groups: Sequence[Mapping[str, Any]] = groups
        self._states = states
        # A tied parameter stands twice in `module`, with the same memory.
        places = {values.data_ptr(): name for name, values in reversed(model.module.items())}
        self._module = {
            name: values for name, values in model.module.items() if places[values.data_ptr()] == name
        }
        self.aliases = model.module.keys() - self._module.keys()
        self._entries = self._named(list(self._find_entries()))

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    @property
    def step(self) -> float:
        """How many updates the optimizer made. Raises CheckpointError where parameters differ in it."""
        holders = [*self._states.values(), *self.param_groups]
        steps = (whole_number(holder.get("step")) for holder in holders if isinstance(holder, Mapping))
        return common_step((("a parameter", step) for step in steps if step is not None), self._model.path)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._module[name].shape)

    def read(self, name: str, state: str) -> Tensor:
        """Return a parameter's weights (state key WEIGHTS; masters if there are any) or a moment."""
        return self._entries[name].states.get(state, self._module[name])

    def group_of(self, name: str) -> Mapping[str, Any]:
        """Return the hyperparameters of a parameter's group."""
        return self.param_groups[self._entries[name].group]

    def require(self, states: Sequence[str]) -> None:
        """Raise CheckpointError for a parameter that lacks one of these states."""
        for name, entry in self._entries.items():
            for state in set(states) - entry.states.keys() - {WEIGHTS}:
                raise CheckpointError(
                    f"{self._model.path} lacks {state} of {name}; checkpoints of Adam and AdamW after the first"
                    " step are supported"
                )

    def other_states(self) -> set[str]:
        """Return the state keys beside the weights."""
        return {state for entry in self._entries.values() for state in entry.states} - {WEIGHTS}

    def _find_entries(self) -> Iterator[_Entry]:
        whole, flat = self.table.get("fp32_groups"), self.table.get("fp32_groups_flat")
        for index, group in enumerate(self.param_groups):
            states = [_tensors(self._states.get(number)) for number in group["params"]]
            if flat is not None:
                yield from self._split(index, states[0] if states else {}, flat)
                continue
            masters = whole[index] if isinstance(whole, list) and index < len(whole) else [None] * len(states)
            if not isinstance(masters, list) or len(masters) != len(states):
                raise self._unreadable("as many masters as parameters")
            for state, master in zip(states, masters, strict=True):
                yield _Entry(index, state if master is None else {WEIGHTS: master, **state})

    def _split(self, group: int, states: Mapping[str, Tensor], flats: object) -> Iterator[_Entry]:
        """Split a flat group where consecutive masters round to the weights of consecutive parameters."""
        flat = flats[group] if isinstance(flats, list) and group < len(flats) else None
        if not isinstance(flat, Tensor) or any(values.numel() != flat.numel() for values in states.values()):
            raise self._unreadable("flat masters of the size of their moments")
        everything, position = {WEIGHTS: flat, **states}, 0
        for values in self._module.values():
            end = position + values.numel()
            if end <= flat.numel() and torch.equal(flat[position:end].to(values.dtype), values.flatten()):
                yield _Entry(
                    group, {key: part[position:end].view(values.shape) for key, part in everything.items()}
                )
                position = end
        if position != flat.numel():
            raise self._unreadable("masters that are its weights, unrounded, in the order of the weights")

    def _named(self, entries: Sequence[_Entry]) -> dict[str, _Entry]:
        """Return the entries by the names of their parameters."""
        rounded = all(WEIGHTS in entry.states for entry in entries)
        dtype = next((values.dtype for values in self._module.values()), torch.float32)
        alike: dict[_Key, list[_Entry]] = {}
        for entry in entries:
            weights = entry.states.get(WEIGHTS) if rounded else None
            key = entry.shape, b"" if weights is None else _digest(weights.to(dtype))
            alike.setdefault(key, []).append(entry)
        names: dict[_Key, list[str]] = {}
        for name, values in self._module.items():
            names.setdefault((tuple(values.shape), _digest(values) if rounded else b""), []).append(name)
        for key, members in alike.items():
            candidates = names.get(key, [])
            if len(candidates) != len(members) or len({entry.group for entry in members}) > 1:
                raise CheckpointError(
                    f"{self._model.path} does not name the parameters of its optimizer, and"
                    f" {', '.join(candidates) or 'no weights'} could each be one of {len(members)} with shape {key[0]};"
                    " save the checkpoint with ZeRO 1, which names them"
                )
        by_name = {
            name: entry
            for key, members in alike.items()
            for name, entry in zip(names[key], members, strict=True)
        }
        return {name: by_name[name] for name in self._module if name in by_name}

    def _unreadable(self, lacking: str) -> CheckpointError:
        return CheckpointError(f"{self._model.path} lacks {lacking}; save the checkpoint with ZeRO 1 instead")


def _tensors(states: object) -> dict[str, Tensor]:
    """Return the states that have an element per parameter's element."""
    items = states.items() if isinstance(states, Mapping) else ()
    return {
        str(name): values
        for name, values in items
        if isinstance(values, Tensor) and values.ndim and name != "step"
    }


def _digest(values: Tensor) -> bytes:
    # Adding 0 makes -0 a 0, which compares equal to it.
    return blake2b((values.detach() + 0).contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()
