"""Canonical weights and optimizer states from tensors under the names of a transformers model."""

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.weights import require_no_others
from megalite.convert.foreign.whole_tensors import WholeTensorReader
from megalite.convert.huggingface.load import BUFFERS
from megalite.convert.universal.folder import MOMENTS, WEIGHTS
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, family_tensors
from megalite.families.tensors import FamilyTensor
from megalite.topology.parameters import EMBEDDING, HEAD
from megalite.topology.shape import ModelShape


class NamedStates(Protocol):
    """A checkpoint's tensors by parameter name and state key (WEIGHTS or one of MOMENTS)."""

    @property
    def place(self) -> Path:
        """The folder that errors name."""

    @property
    def names(self) -> Collection[str]:
        """The parameters."""

    def size(self, name: str, state: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its values; raises CheckpointError if it is missing."""

    def tensor(self, name: str, state: str) -> Tensor:
        """Read a tensor, in its shape or flat. Raises CheckpointError if it is missing or damaged."""


class FamilyStatesReader(WholeTensorReader):
    """Canonical tensors of named states, once these were seen to be exactly those of the model."""

    def __init__(self, states: NamedStates, shape: ModelShape):
        """Raises CheckpointError for what is missing, unknown or of another shape, by name."""
        super().__init__(shape, self._whole, states.place)
        self.states = states
        names, family = states.names, FAMILIES[shape.family].names
        tensors = family_tensors(shape)
        tables = [tensor.name for tensor in tensors if EMBEDDING in tensor.parts]
        self._prefix = _common_prefix(
            names, [*tables, *(family.in_models.get(name, name) for name in tables)]
        )
        # A model of transformers 5 may have other names in memory than in files.
        self._names = {
            file: self._prefix + model
            for file, model in family.in_models.items()
            if self._prefix + model in names
        }
        self._table, self._head = next(iter(tables), ""), family.of(HEAD) if shape.tie_word_embeddings else ""
        self._check({tensor.name: tensor.shape for tensor in tensors})

    def _whole(self, state_key: str, tensor: FamilyTensor) -> Tensor:
        state = WEIGHTS if state_key == WEIGHT else state_key
        return self.states.tensor(self._stored(tensor.name), state).reshape(tensor.shape)

    def _stored(self, name: str) -> str:
        """Return the name of the states' tensor that the family's files have under `name`."""
        return self._names.get(name, self._prefix + name)

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        expected = {self._stored(name): shape for name, shape in shapes.items()}
        stored = set(self.states.names)
        extra = {
            name.removeprefix(self._prefix) for name in stored - expected.keys() if not self._is_spare(name)
        }
        missing = {name.removeprefix(self._prefix) for name in expected.keys() - stored}
        advice = "use the config.json of this checkpoint (checkpoints of several tensor-parallel ranks or with adapters"
        require_no_others(self.states.place, missing, extra, f"{advice} are not supported)")
        for name, shape in expected.items():
            for state in (WEIGHTS, *MOMENTS):
                size = self.states.size(name, state)
                if size not in (shape, (prod(shape),)):
                    raise CheckpointError(
                        f"{self.states.place}: {state} of {name} has shape {size}, but its config.json gives {shape};"
                        " use the config.json of this model, with the same vocab_size"
                    )

    def _is_spare(self, name: str) -> bool:
        """Whether a tensor is a buffer, or the embedding once more under its other name."""
        if self._head and name == self._stored(self._head):
            head, table = (
                self.states.tensor(each, WEIGHTS).flatten() for each in (name, self._stored(self._table))
            )
            return torch.equal(head, table)
        return name.endswith(BUFFERS)


def _common_prefix(names: Collection[str], tables: Collection[str]) -> str:
    """Return the part before every name, such as "module." of a wrapper; tables: names of the embedding."""
    prefixes = (name.removesuffix(table) for name in names for table in tables if name.endswith(table))
    return next((prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)), "")
