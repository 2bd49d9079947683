"""Checks of a manifest: each element of each tensor is stored once, and each file is large enough. No torch."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from megalite.checkpoint.manifest import WEIGHT, Manifest, TensorEntry
from megalite.checkpoint.regions import contains, full_slice, signed_corners
from megalite.errors import CheckpointError, listed
from megalite.topology.dtypes import FLOATS
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import state_tensors

# Above any model in use; an adapter may be in a few layers only.
_MOST_LAYERS = 1000


def check_coverage(manifest: Manifest, source: Path) -> None:
    """Raise CheckpointError unless each element of each tensor of the model is stored exactly once.

    Checked for each state key, over the tensors that have such a state: the flat ranges must cover each region without
    gap or overlap, and the regions must tile the tensor.
    """
    layers, weights = manifest.model.num_hidden_layers, manifest.tensors.get(WEIGHT, {})
    most = len(weights) if manifest.model.adapter is None else max(len(weights), _MOST_LAYERS)
    if layers > most:  # before a hostile number of names is allocated
        raise CheckpointError(
            f"{source}: its model has {layers} layers, but there are only {len(weights)} weights"
        )
    states = {WEIGHT: {}, **manifest.tensors}
    for key, expected in state_tensors(manifest.model, states.keys()).items():
        entries = states[key]
        missing, extra = expected.keys() - entries.keys(), entries.keys() - expected.keys()
        if missing or extra:
            raise CheckpointError(
                f"{source}: {key} of {listed(sorted(missing))} is missing"
                if missing
                else f"{source}: {key} of {listed(sorted(extra))} belongs to no tensor of the model"
            )
        for name, entry in entries.items():
            problem = _coverage_problem(entry, expected[name])
            if problem:
                raise CheckpointError(f"{source}: {key} of {name}: {problem}")


def check_sizes(manifest: Manifest, source: Path) -> None:
    """Raise CheckpointError unless each file is large enough for the tensors listed in it.

    Memory allocated from the manifest's shapes is then bounded by the size of the files.
    """
    said_bytes = dict.fromkeys(manifest.files, 0)
    for entries in manifest.tensors.values():
        for entry in entries.values():
            for shard in entry.shards:
                start, stop = shard.flat_range
                said_bytes[shard.file] += (stop - start) * FLOATS[entry.dtype].size_bytes
    for name, size_bytes in manifest.files.items():
        if said_bytes[name] > size_bytes:
            raise CheckpointError(
                f"{source}: its tensors in {name} have {said_bytes[name]} bytes, but the file {size_bytes}"
            )


def _coverage_problem(entry: TensorEntry, full_shape: tuple[int, ...]) -> str | None:
    if entry.shape != full_shape:
        return f"its shape is {list(entry.shape)}, but the model's is {list(full_shape)}"
    groups = entry.by_slice()
    for region, shards in groups.items():
        if not contains(full_shape, region):
            return f"region {_region(region)} lies outside {list(full_shape)}"
        reached = 0
        for start, stop in sorted(shard.flat_range for shard in shards):
            if start != reached or stop <= start:
                fault = "covered twice" if start < reached else "missing"
                low, high = sorted((start, reached))
                return f"elements {low} to {high} of region {_region(region)} are {fault}"
            reached = stop
        if reached != region.numel:
            return f"elements {reached} to {region.numel} of region {_region(region)} are missing"
    return _tiling_problem(groups, full_shape)


def _tiling_problem(regions: Iterable[TensorSlice], full_shape: tuple[int, ...]) -> str | None:
    """Name the first element that the regions do not hold exactly once; None if there is none.

    A region is the sum of orthants at its corners, with signs, and orthants are linearly independent: regions tile
    the tensor exactly if their corners add up to the tensor's. The first corner that is left over is the first element
    whose count is wrong. Linear in the number of regions.
    """
    left_over: Counter[tuple[int, ...]] = Counter()
    for region in regions:
        for corner, sign in signed_corners(region):
            left_over[corner] += sign
    for corner, sign in signed_corners(full_slice(full_shape)):
        left_over[corner] -= sign
    wrong = {corner: count for corner, count in left_over.items() if count}
    if not wrong:
        return None
    first = min(wrong)
    fault = "missing" if wrong[first] < 0 else "stored more than once"
    return f"element {list(first)} of {list(full_shape)} is {fault}"


def _region(region: TensorSlice) -> str:
    spans = (f"{low}:{low + size}" for low, size in zip(region.offsets, region.shape, strict=True))
    return f"[{', '.join(spans)}]"
