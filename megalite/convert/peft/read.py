"""Adapters that PEFT has saved: every rank reads the slices that it holds."""

from pathlib import Path

from torch import Tensor

from megalite.checkpoint.region_reader import TYPES, RegionReader
from megalite.checkpoint.weights import WeightReader, require_no_others
from megalite.config.peft_names import peft_names
from megalite.config.sources.peft import ADAPTER_FILE
from megalite.convert.finite import require_finite
from megalite.convert.huggingface.files import header_of
from megalite.errors import CheckpointError, listed
from megalite.topology.adapter import Lora, Prefix
from megalite.topology.parameters import names_tied_table, trained_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

PROMPT = "prompt_embeddings"
"""PEFT's tensor of a prefix: [virtual tokens, layers x (keys, values) x key-value heads x head_dim]."""


def open_adapter(folder: Path, shape: ModelShape) -> "LoraReader | PrefixReader":
    """Open the file of an adapter; shape: of the model with it. Raises CheckpointError."""
    return PrefixReader(folder, shape) if isinstance(shape.adapter, Prefix) else LoraReader(folder, shape)


class _PeftFile(WeightReader):
    """The file of an adapter."""

    def __init__(self, folder: Path):
        self.path = folder / ADAPTER_FILE
        self._file = RegionReader(self.path, header_of(self.path))
        self.header = self._file.header

    def close(self) -> None:
        self._file.close()

    def _values(self, name: str, region: TensorSlice) -> Tensor:
        try:
            values = self._file.read(name, region)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error}); save it again") from error
        require_finite(values, name, self.path, region.offsets)
        return values

    def _require_shape(self, name: str, size: tuple[int, ...]) -> None:
        stored = self.header[name]
        if stored.shape != size or stored.dtype not in TYPES:
            raise CheckpointError(
                f"{self.path}: {name} is {stored.dtype} {list(stored.shape)}, but the model and [adapter] have"
                f" {list(size)}; use the model that the adapter was trained on"
            )


class PrefixReader(_PeftFile):
    """Reads regions of a prefix without projection: PEFT holds keys and values of all layers in one tensor."""

    def __init__(self, folder: Path, shape: ModelShape):
        """shape: of the model with its adapter. Raises CheckpointError."""
        super().__init__(folder)
        assert isinstance(shape.adapter, Prefix)
        if shape.adapter.projection is not None:
            raise CheckpointError(
                f"{self.path} holds keys and values, not the MLP that computed them; leave out adapter.projection"
            )
        if self.header.keys() != {PROMPT}:
            raise CheckpointError(
                f"{self.path} has {listed(sorted(self.header))} instead of {PROMPT}; save it again"
            )
        sizes, self._first = trained_tensors(shape), dict[str, int]()
        columns = 0
        for name, (rows, _) in sizes.items():
            self._first[name] = columns
            columns += rows
        self._require_shape(PROMPT, (shape.adapter.tokens, columns))

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of one canonical tensor in the file's dtype; state_key is ignored. Raises CheckpointError."""
        (row, token), (rows, tokens) = region.offsets, region.shape
        stored = TensorSlice((token, self._first[name] + row), (tokens, rows))
        return self._values(PROMPT, stored).t()


class LoraReader(_PeftFile):
    """Reads regions of the trained tensors of LoRA."""

    def __init__(self, folder: Path, shape: ModelShape):
        """shape: of the model with its adapter. Raises CheckpointError."""
        super().__init__(folder)
        self._names = peft_names(shape)
        self._check(shape)

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of one canonical tensor in the file's dtype; state_key is ignored. Raises CheckpointError."""
        return self._values(self._names[name], region)

    def _check(self, shape: ModelShape) -> None:
        assert isinstance(shape.adapter, Lora)
        if copied := [each for each in shape.adapter.modules_to_save if names_tied_table(each, shape)]:
            raise CheckpointError(
                f"{self.path} has its own {listed(copied)}, but the base ties embedding and head; merge it with PEFT"
                " (merge_and_unload), save the model with config.tie_word_embeddings = False, and name that model"
            )
        expected = {self._names[name]: size for name, size in trained_tensors(shape).items()}
        missing, extra = expected.keys() - self.header.keys(), self.header.keys() - expected.keys()
        advice = "delete the settings of [adapter] beside adapter.path"
        require_no_others(self.path, missing, extra, advice, "[adapter] does not train")
        for name, size in expected.items():
            self._require_shape(name, size)
