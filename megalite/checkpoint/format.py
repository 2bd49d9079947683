"""The manifest: what a checkpoint holds and where each element lies. No torch.

A checkpoint is a folder: manifest.json and one safetensors file a rank that wrote something. The manifest
speaks of canonical tensors with their full, true shapes only; the layout that wrote it is for people to read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

from megalite.checkpoint.regions import contains, intersection
from megalite.errors import CheckpointError
from megalite.topology.layout import Layout
from megalite.topology.parameters import ModelShape, RopeScaling, canonical_tensors
from megalite.topology.sharding import Box
from megalite.topology.state import WEIGHT as WEIGHT

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """A run of a flattened box of one tensor, as one entry `key` of one safetensors file.

    offsets, shape: the box. flat: start and stop of the run in the flattened (row-major) box; None means the
    whole box, stored in its own shape. sha256: of the stored bytes.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None
    sha256: str

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.shape)

    @property
    def run(self) -> tuple[int, int]:
        return self.flat or (0, self.box.numel)


@dataclass(frozen=True)
class TensorEntry:
    """One canonical tensor (or one kind of its optimizer state): full shape, type ("float32"), shards."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]

    def by_box(self) -> dict[Box, list[Shard]]:
        """The shards of each box."""
        groups: dict[Box, list[Shard]] = {}
        for shard in self.shards:
            groups.setdefault(shard.box, []).append(shard)
        return groups


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers.

    trainer_state: step, samples and tokens so far. layout, stage_layers: those of the run that wrote it.
    config: the resolved run configuration. optimizer: JSON scalars of the optimizer.
    tensors: kind -> canonical name -> entry; kinds are "weight" and the optimizer's ("exp_avg", ...).
    files: size in bytes of every file beside the manifest.
    """

    megalite: str
    torch: str
    trainer_state: Mapping[str, int]
    layout: Layout
    stage_layers: tuple[tuple[int, ...], ...]
    model: ModelShape
    config: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, TensorEntry]]
    files: Mapping[str, int]

    @property
    def step(self) -> int:
        return self.trainer_state["step"]

    @property
    def optimizer_kinds(self) -> frozenset[str]:
        return frozenset(self.tensors) - {WEIGHT}


def to_json(manifest: Manifest) -> str:
    """The manifest's text, which ends with a hash of itself."""
    content = {"format": FORMAT_VERSION, **asdict(manifest)}
    return _dump({"manifest": content, "sha256": _digest(content)}) + "\n"


def from_json(text: str, source: Path) -> Manifest:
    """The manifest in `text`, read from `source`.

    Raises CheckpointError when it is damaged or of another version.
    """
    try:
        outer = json.loads(text)
        content, digest = outer["manifest"], outer["sha256"]
        version = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: not a whole manifest ({error}); use another checkpoint") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{source}: format {version} is not {FORMAT_VERSION}, the one this version of megalite reads;"
            " use the version that wrote it"
        )
    if _digest(content) != digest:
        raise CheckpointError(f"{source}: its content does not match its own hash; use another checkpoint")
    fields = {key: value for key, value in content.items() if key != "format"}
    try:
        return Manifest(
            **fields
            | {
                "layout": Layout(**content["layout"]),
                "model": _model(content["model"]),
                "stage_layers": tuple(tuple(layers) for layers in content["stage_layers"]),
                "tensors": {
                    kind: {name: _entry(entry) for name, entry in entries.items()}
                    for kind, entries in content["tensors"].items()
                },
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: a field is missing or unknown ({error})") from error


def _model(content: Mapping[str, Any]) -> ModelShape:
    scaling = content.get("rope_scaling")
    return ModelShape(**{**content, "rope_scaling": RopeScaling(**scaling) if scaling else None})


def shard_from_json(content: Mapping[str, Any]) -> Shard:
    """A shard from its fields, whose lists become tuples."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }
    return Shard(**fields)


def check_coverage(manifest: Manifest, source: Path) -> None:
    """Raise CheckpointError unless every element of every tensor of the model is there exactly once.

    This holds for each kind: the weights and each kind of optimizer state. Each box must be covered by its
    runs without gap or overlap, and the boxes must tile the tensor.
    """
    expected = canonical_tensors(manifest.model)
    for kind, entries in {WEIGHT: {}, **manifest.tensors}.items():
        missing, extra = expected.keys() - entries.keys(), entries.keys() - expected.keys()
        if missing or extra:
            raise CheckpointError(
                f"{source}: {kind} of {_names(missing)} is missing"
                if missing
                else f"{source}: {kind} of {_names(extra)} belongs to no tensor of the model"
            )
        for name, entry in entries.items():
            problem = _coverage_problem(entry, expected[name])
            if problem:
                raise CheckpointError(f"{source}: {kind} of {name}: {problem}")


def _coverage_problem(entry: TensorEntry, full_shape: tuple[int, ...]) -> str | None:
    if entry.shape != full_shape:
        return f"its shape is {list(entry.shape)}, the model's is {list(full_shape)}"
    groups = entry.by_box()
    for box, shards in groups.items():
        if not contains(full_shape, box):
            return f"region {_region(box)} lies outside {list(full_shape)}"
        reached = 0
        for start, stop in sorted(shard.run for shard in shards):
            if start != reached or stop <= start:
                fault = "covered twice" if start < reached else "missing"
                low, high = sorted((start, reached))
                return f"elements {low} to {high} of region {_region(box)} are {fault}"
            reached = stop
        if reached != box.numel:
            return f"elements {reached} to {box.numel} of region {_region(box)} are missing"
    for one, other in combinations(groups, 2):
        if intersection(one, other):
            return f"regions {_region(one)} and {_region(other)} overlap"
    # Boxes that lie within the tensor and are disjoint tile it exactly when their sizes add up.
    absent = prod(full_shape) - sum(box.numel for box in groups)
    return f"{absent} of {prod(full_shape)} elements are missing" if absent else None


def _entry(entry: Mapping[str, Any]) -> TensorEntry:
    return TensorEntry(
        tuple(entry["shape"]), entry["dtype"], tuple(shard_from_json(shard) for shard in entry["shards"])
    )


def _dump(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


def _digest(content: object) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()


def _region(box: Box) -> str:
    spans = (f"{low}:{low + size}" for low, size in zip(box.offsets, box.shape, strict=True))
    return f"[{', '.join(spans)}]"


def _names(names: Iterable[str], most: int = 5) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
