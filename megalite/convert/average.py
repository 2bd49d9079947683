"""The mean of several checkpoints' weights, read as those of one, and one tensor's rows at a time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megalite.checkpoint.format import WEIGHT, Manifest, check_coverage
from megalite.checkpoint.tensor_file import CheckpointReader
from megalite.errors import CheckpointError
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import MASTER

# It says how weights are drawn, and nothing of those that were trained.
_FREE_FIELDS = ("initializer_range",)


class AveragedWeights:
    """Reads the uniform mean of one or more checkpoints of one model; that of one are its own weights, to the bit.

    Sums are of float64, and means of float32 (of float64 where a checkpoint has it): what a mean of 16-bit weights
    gains would be lost to their type.
    """

    def __init__(self, checkpoints: Sequence[Path], weights: str | None = None):
        """weights: the kind to read; None: the weights of one checkpoint, of several each one's masters if it has any.

        Raises CheckpointError where the kind or an element is missing, models differ, or a checkpoint is named twice.
        """
        twice = [path for path, count in Counter(each.resolve() for each in checkpoints).items() if count > 1]
        if twice:
            raise CheckpointError(f"{twice[0]} is named twice; an average takes each checkpoint once")
        with ExitStack() as stack:
            self._readers = [
                stack.enter_context(_reader(each, weights, averaged=len(checkpoints) > 1))
                for each in checkpoints
            ]
            self._readers.sort(key=lambda reader: reader.manifest.step)
            self._require_one_model()
            self._stack = stack.pop_all()

    def __enter__(self) -> "AveragedWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def manifest(self) -> Manifest:
        """That of the last step's checkpoint."""
        return self._readers[-1].manifest

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(reader.manifest.step for reader in self._readers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is read as the weights: of all checkpoints the same, as a rule."""
        return tuple(dict.fromkeys(reader.weights for reader in self._readers))

    def read(self, kind: str, name: str, box: TensorSlice) -> Tensor:
        """A region of a tensor."""
        return self._mean(reader.read(kind, name, box) for reader in self._readers)

    def blocks(self, kind: str, name: str) -> Iterator[Tensor]:
        """A whole tensor, some rows at a time from the first to the last."""
        for blocks in zip(*(reader.blocks(kind, name) for reader in self._readers), strict=True):
            yield self._mean(iter(blocks))

    def _mean(self, found: Iterator[Tensor]) -> Tensor:
        first = next(found)
        if len(self._readers) == 1:
            return first
        wide = torch.promote_types(first.dtype, torch.float32)
        total = first.double()
        for each in found:
            wide = torch.promote_types(wide, each.dtype)
            total += each
        return total.div_(len(self._readers)).to(wide)

    def _require_one_model(self) -> None:
        last = self._readers[-1]
        for reader in self._readers:
            theirs, ours = asdict(reader.manifest.model), asdict(last.manifest.model)
            differing = [
                f"model.{name} is {theirs[name]} and {ours[name]}"
                for name in ours
                if theirs[name] != ours[name] and name not in _FREE_FIELDS
            ]
            if differing:
                raise CheckpointError(
                    f"{reader.checkpoint} and {last.checkpoint} are of different models, which have no average:"
                    f" {', '.join(differing)}"
                )


def _reader(checkpoint: Path, weights: str | None, *, averaged: bool) -> CheckpointReader:
    reader = CheckpointReader(checkpoint, weights=weights or WEIGHT)
    if weights is None and averaged and MASTER in reader.manifest.tensors:
        reader.weights = MASTER
    check_coverage(reader.manifest, checkpoint)
    return reader
