"""Read the average of several checkpoints' weights as if it were one checkpoint, in blocks of rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT, Manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensor_file import dtype_name
from megalite.checkpoint.weights import WeightReader
from megalite.config.sections.shape_settings import as_settings
from megalite.errors import CheckpointError
from megalite.topology.dtypes import FLOATS
from megalite.topology.sharding import TensorSlice

# Fields that may differ: they affect initial weights only.
_FREE_FIELDS = ("initializer_range",)


class AveragedWeights(WeightReader):
    """Reads the uniform average of one or more checkpoints of one model; for one checkpoint, its exact weights.

    Sums are float64 and averages float32 (float64 if a checkpoint is): rounding to bf16 or fp16 would lose the gain.
    """

    def __init__(self, checkpoints: Sequence[Path], weights: str | None = None):
        """weights: the state key to read; None: "master" where it exists, otherwise "weight".

        Raises CheckpointError if that state is missing or incomplete, if models differ, or if a checkpoint is named
        twice.
        """
        twice = [path for path, count in Counter(map(Path.resolve, checkpoints)).items() if count > 1]
        if twice:
            raise CheckpointError(f"{twice[0]} is named twice; an average takes each checkpoint once")
        with ExitStack() as stack:
            self._readers = [
                stack.enter_context(CheckpointReader(checkpoint, weights=weights))
                for checkpoint in checkpoints
            ]
            self._readers.sort(key=lambda reader: reader.manifest.step)
            self._require_one_model()
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint with the highest step."""
        return self._readers[-1].manifest

    @property
    def checkpoint(self) -> Path:
        """The checkpoint with the highest step."""
        return self._readers[-1].checkpoint

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(reader.manifest.step for reader in self._readers)

    def described(self, dtype: torch.dtype) -> str:
        """Return the type of an export's weights, and what they were: "float32, widened from bfloat16"."""
        keys = dict.fromkeys(reader.weights for reader in self._readers)
        entries = (
            entry for reader in self._readers for entry in reader.manifest.tensors[reader.weights].values()
        )
        narrower = {entry.dtype for entry in entries if FLOATS[entry.dtype].size_bytes < dtype.itemsize}
        words = [dtype_name(dtype)]
        if [*keys] != [WEIGHT]:
            words.append(f"from the checkpoint's {' and '.join(keys)}")
        if narrower:
            words.append(f"widened from {' and '.join(sorted(narrower))}")
        return ", ".join(words)

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a tensor."""
        return self._mean(reader.read(state_key, name, region) for reader in self._readers)

    def blocks(self, state_key: str, name: str) -> Iterator[Tensor]:
        """Yield a whole tensor in blocks of consecutive rows."""
        for blocks in zip(*(reader.blocks(state_key, name) for reader in self._readers), strict=True):
            yield self._mean(iter(blocks))

    def _mean(self, values: Iterator[Tensor]) -> Tensor:
        first = next(values)
        if len(self._readers) == 1:
            return first
        dtype = torch.promote_types(first.dtype, torch.float32)
        total = first.double()
        for more in values:
            dtype = torch.promote_types(dtype, more.dtype)
            total += more
        return total.div_(len(self._readers)).to(dtype)

    def _require_one_model(self) -> None:
        last = self._readers[-1]
        for reader in self._readers:
            theirs, ours = as_settings(vars(reader.manifest.model)), as_settings(vars(last.manifest.model))
            names = [
                name
                for name in {**theirs, **ours}
                if theirs.get(name) != ours.get(name) and name not in _FREE_FIELDS
            ]
            if differing := [f"model.{name} is {theirs.get(name)} and {ours.get(name)}" for name in names]:
                raise CheckpointError(
                    f"{reader.checkpoint} and {last.checkpoint} cannot be averaged, as their models differ:"
                    f" {', '.join(differing)}; name checkpoints of one model"
                )
