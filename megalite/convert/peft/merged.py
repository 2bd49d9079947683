"""Read a model with its adapter, region by region: a low-rank one merged into the weights, a prefix beside them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT, Manifest
from megalite.checkpoint.regions import full_slice, rows_of
from megalite.checkpoint.tensor_file import dtype_name
from megalite.checkpoint.weights import BLOCK_ELEMENTS, TensorTarget, WeightReader
from megalite.convert.average import AveragedWeights
from megalite.convert.huggingface.load import HuggingFaceReader
from megalite.topology.adapter import Lora
from megalite.topology.parameters import canonical_tensors, trained_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice


class AdaptedWeights(WeightReader):
    """Reads W + scale * B A in place of each adapted W, with DoRA's magnitudes, and the other weights as they are.

    Sums are float32, or float64 where a weight is. Tensors that were trained whole, and a prefix, are the adapter's.
    """

    def __init__(self, adapter: WeightReader, shape: ModelShape, base: Path):
        """adapter: reads the trained tensors. shape: of the model with its adapter. base: its Hugging Face folder."""
        self._adapter, self._form, self._base = adapter, shape.adapter, HuggingFaceReader(base, shape.base)
        self._trained, self._shapes = trained_tensors(shape), canonical_tensors(shape.base)

    def close(self) -> None:
        self._base.close()

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a tensor; raises CheckpointError. state_key: of the adapter's."""
        if name in self._trained:
            return self._adapter.read(state_key, name, region)
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in self._trained:
            return self._base.read(WEIGHT, name, region)
        width = self._shapes[name][1]
        rows, first = (region.shape[0], width), region.offsets[0]
        assert isinstance(self._form, Lora)
        weight = self._base.read(WEIGHT, name, TensorSlice((first, 0), rows))
        a = self._part(state_key, f"{module}.lora_A.weight")
        b = self._part(state_key, f"{module}.lora_B.weight", first, rows[0])
        exact = torch.promote_types(weight.dtype, torch.promote_types(a.dtype, torch.float32))
        merged = torch.addmm(weight.to(exact), b.to(exact), a.to(exact), alpha=self._form.scale)
        if self._form.dora:
            magnitude = self._part(state_key, f"{module}.lora_magnitude_vector.weight", first, rows[0])
            merged *= (magnitude.to(exact) / merged.norm(dim=1)).unsqueeze(1)
        return merged[:, region.offsets[1] : region.offsets[1] + region.shape[1]]

    def fill_all(self, targets: Iterable[TensorTarget]) -> None:
        """Fill many tensors, those of the adapter as its own reader does."""
        targets = list(targets)
        self._adapter.fill_all(target for target in targets if target.name in self._trained)
        super().fill_all(target for target in targets if target.name not in self._trained)

    def blocks(self, state_key: str, name: str) -> Iterator[Tensor]:
        """Yield a whole tensor in blocks of consecutive rows."""
        for block in rows_of(full_slice(self._shapes[name]), BLOCK_ELEMENTS):
            yield self.read(state_key, name, block)

    def _part(self, state_key: str, name: str, first: int = 0, rows: int | None = None) -> Tensor:
        shape = self._trained[name]
        size = (shape[0] if rows is None else rows, *shape[1:])
        return self._adapter.read(state_key, name, TensorSlice((first, *[0] * (len(shape) - 1)), size))


class MergedCheckpoints(AdaptedWeights):
    """The merged weights of an adapter's checkpoints, with what an export asks of checkpoints."""

    def __init__(self, adapter: AveragedWeights, base: Path):
        super().__init__(adapter, adapter.manifest.model, base)
        self.checkpoint, self.steps, self._checkpoints = adapter.checkpoint, adapter.steps, adapter
        self.manifest: Manifest = replace(adapter.manifest, model=adapter.manifest.model.base)

    def described(self, dtype: torch.dtype) -> str:
        """As of AveragedWeights, with the type of the base's weights where that is narrower."""
        narrower = sorted(dtype_name(each) for each in self._base.dtypes if each.itemsize < dtype.itemsize)
        of_base = f"; the base's weights were {' and '.join(narrower)}" if narrower else ""
        return self._checkpoints.described(dtype) + of_base
