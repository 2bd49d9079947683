"""Canonical weights and optimizer states from tensors under the names of a transformers model."""

from collections.abc import Collection
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.regions import full_slice, index_in
from megalite.checkpoint.weights import WeightReader, require_no_others
from megalite.convert.finite import require_finite
from megalite.convert.huggingface.load import BUFFERS
from megalite.convert.universal.folder import MOMENTS, WEIGHTS
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, family_tensors
from megalite.topology.parameters import EMBEDDING, HEAD, canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice


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


class FamilyStatesReader(WeightReader):
    """Canonical tensors of named states, once these were seen to be exactly those of the model."""

    # Each tensor is read whole.
    block_elements = 1 << 62

    def __init__(self, states: NamedStates, shape: ModelShape):
        """Raises CheckpointError for what is missing, unknown or of another shape, by name."""
        self.states = states
        self._shapes = canonical_tensors(shape)
        names, family = states.names, FAMILIES[shape.family].names
        tensors = family_tensors(shape)
        tables = [tensor.name for tensor in tensors if EMBEDDING in tensor.parts]
        self._prefix = _common_prefix(
            names, [*tables, *(family.in_models.get(name, name) for name in tables)]
        )
        # A model of transformers 5 may have other names in memory than in files.
        stored = {file: model for file, model in family.in_models.items() if self._prefix + model in names}
        named = [replace(each, name=stored.get(each.name, each.name)) for each in tensors]
        self._tensors = {part: tensor for tensor in named for part in tensor.parts}
        self._tied, self._head = shape.tie_word_embeddings, stored.get(family.of(HEAD), family.of(HEAD))
        self._check()

    def close(self) -> None:
        """No file is open between two reads."""

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor: the weights (state key WEIGHT) or a moment."""
        tensor = self._tensors[name]
        state = WEIGHTS if state_key == WEIGHT else state_key
        values = self.states.tensor(self._prefix + tensor.name, state).reshape(tensor.shape)
        require_finite(values, f"{state_key} of {tensor.name}", self.states.place)
        values = values.t() if tensor.transposed else values
        stored = tensor.slices(name, region, self._shapes)
        pieces = [values[index_in(piece, full_slice(tuple(values.shape)))] for piece in stored]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _check(self) -> None:
        expected = {tensor.name: tensor.shape for tensor in self._tensors.values()}
        stored = {name.removeprefix(self._prefix) for name in self.states.names}
        extra = {name for name in stored - expected.keys() if not self._is_spare(name)}
        advice = "use the config.json of this checkpoint (checkpoints of several tensor-parallel ranks or with adapters"
        place, advice = self.states.place, f"{advice} are not supported)"
        require_no_others(place, expected.keys() - stored, extra, advice)
        for name, shape in expected.items():
            for state in (WEIGHTS, *MOMENTS):
                size = self.states.size(self._prefix + name, state)
                if size not in (shape, (prod(shape),)):
                    raise CheckpointError(
                        f"{place}: {state} of {name} has shape {size}, but its config.json gives {shape}; use the"
                        " config.json of this model, with the same vocab_size"
                    )

    def _is_spare(self, name: str) -> bool:
        """Whether a tensor is a buffer, or the embedding once more under its other name."""
        if name == self._head and self._tied:
            head, table = (
                self.states.tensor(self._prefix + each, WEIGHTS).flatten()
                for each in (name, self._tensors[EMBEDDING].name)
            )
            return torch.equal(head, table)
        return name.endswith(BUFFERS)


def _common_prefix(names: Collection[str], tables: Collection[str]) -> str:
    """Return the part before every name, such as "module." of a wrapper; tables: names of the embedding."""
    prefixes = (name.removesuffix(table) for name in names for table in tables if name.endswith(table))
    return next((prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)), "")
