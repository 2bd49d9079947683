"""Manifest: which tensors a checkpoint holds and where each element is stored. No torch.

A checkpoint is a folder with manifest.json and one safetensors file for each rank that wrote something. The manifest
lists canonical tensors with their full shapes; the layout that wrote them is recorded for information only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import MASTER
from megalite.topology.state import WEIGHT as WEIGHT

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """A flat range of one tensor's region, stored under `key` in one safetensors file.

    offsets, shape: the region. flat: start and stop of the range in the flattened (row-major) region; None: the whole
    region, stored in its own shape. sha256: of the stored bytes.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None
    sha256: str

    @property
    def region(self) -> TensorSlice:
        return TensorSlice(self.offsets, self.shape)

    @property
    def flat_range(self) -> tuple[int, int]:
        """Start and stop of the stored elements in the flattened region."""
        return self.flat or (0, self.region.numel)


@dataclass(frozen=True)
class TensorEntry:
    """One canonical tensor, or its optimizer state under one state key: full shape, dtype ("float32"), shards."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]

    def by_slice(self) -> dict[TensorSlice, list[Shard]]:
        """Return region -> its shards."""
        groups: dict[TensorSlice, list[Shard]] = {}
        for shard in self.shards:
            groups.setdefault(shard.region, []).append(shard)
        return groups


@dataclass(frozen=True)
class Base:
    """The frozen weights of a model with an adapter: a Hugging Face folder, or org/name@commit of the Hub.

    fingerprint: a hash of samples of its files, by which other weights are noticed.
    """

    weights: str
    fingerprint: str


@dataclass(frozen=True)
class Stream:
    """The position in text that the run reads while it trains (data.streaming).

    files: name and size in bytes of each, in reading order. lanes: the fields of the LanePlace of each sequence of the
    global batch.
    """

    files: tuple[tuple[str, int], ...]
    lanes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the elements of its tensors.

    trainer_state: step, samples and tokens so far. layout, stage_layers: those of the run that wrote it.
    config: the resolved run configuration. optimizer: JSON scalars of the optimizer.
    tensors: state key -> canonical name -> entry; state keys are "weight" and the optimizer's ("exp_avg", ...).
    files: name -> size in bytes of each safetensors file.
    base: with an adapter, the frozen weights beside it, which the checkpoint does not hold.
    stream: with data.streaming, where the next step goes on.
    data: name -> fingerprint of what the samples are made of (RunData.fingerprints); empty: not recorded.
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
    base: Base | None = None
    stream: Stream | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.trainer_state["step"]

    @property
    def exact_weights(self) -> str:
        """The state key of the unrounded weights: the fp32 masters of a bf16 or fp16 run, otherwise the weights."""
        return MASTER if MASTER in self.tensors else WEIGHT

    @property
    def optimizer_state_keys(self) -> frozenset[str]:
        """The state keys other than the weights'."""
        return frozenset(self.tensors) - {WEIGHT}
