"""Manifest: which tensors a checkpoint holds and where each element is stored. No torch.

A checkpoint is a folder with manifest.json and one safetensors file for each rank that wrote something. The manifest
lists canonical tensors with their full shapes; the layout that wrote them is recorded for information only.
"""

import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

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


class PackedShards(Sequence[Shard]):
    """The shards of one tensor, in about 70 bytes each: a checkpoint of many ranks has hundreds of thousands."""

    def __init__(self, shards: Iterable[Shard] = ()):
        self._files, self._regions = list[str](), list[TensorSlice]()
        self._flats, self._hashes = array("q"), bytearray()
        self._prefix: str | None = None
        # Place -> a key or a hash that no rank of megalite would have written.
        self._keys, self._texts = dict[int, str](), dict[int, str]()
        regions: dict[TensorSlice, TensorSlice] = {}
        for shard in shards:
            self.append(shard, regions)

    def append(self, shard: Shard, regions: dict[TensorSlice, TensorSlice]) -> None:
        """Add a shard. regions: those of this tensor so far, so that equal ones are one object."""
        place = len(self._files)
        self._files.append(sys.intern(shard.file))
        self._regions.append(regions.setdefault(shard.region, shard.region))
        self._flats.extend(_WHOLE if shard.flat is None else shard.flat)
        if self._prefix is None:
            self._prefix = shard.key.partition("@")[0]
        if shard.key != self._key(shard.flat):
            self._keys[place] = shard.key
        if _HASH.fullmatch(shard.sha256):
            self._hashes += bytes.fromhex(shard.sha256)
        else:
            self._texts[place] = shard.sha256
            self._hashes += bytes(32)

    def _key(self, flat: tuple[int, int] | None) -> str:
        return f"{self._prefix}" if flat is None else f"{self._prefix}@{flat[0]}"

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, place: int) -> Shard: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Shard]: ...
    def __getitem__(self, place: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        place = range(len(self))[place]
        region, (start, stop) = self._regions[place], self._flats[2 * place : 2 * place + 2]
        flat = None if start < 0 else (start, stop)
        key = self._keys.get(place, self._key(flat))
        digest = self._texts.get(place, self._hashes[32 * place : 32 * place + 32].hex())
        return Shard(self._files[place], key, region.offsets, region.shape, flat, digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


_WHOLE = (-1, -1)
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorEntry:
    """One canonical tensor, or its optimizer state under one state key: full shape, dtype ("float32"), shards."""

    shape: tuple[int, ...]
    dtype: str
    shards: Sequence[Shard]

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

    trainer_state: step, samples and tokens so far, and what else a run remembers. layout, stage_layers: those of the
    run that wrote it.
    config: the resolved run configuration. optimizer: JSON scalars of the optimizer.
    tensors: state key -> canonical name -> entry; state keys are "weight" and the optimizer's ("exp_avg", ...).
    files: name -> size in bytes of each safetensors file.
    base: with an adapter, the frozen weights beside it, which the checkpoint does not hold.
    stream: with data.streaming, where the next step goes on.
    data: name -> fingerprint of what the samples are made of (RunData.fingerprints); empty: not recorded.
    """

    megalite: str
    torch: str
    trainer_state: Mapping[str, Any]
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
        return int(self.trainer_state["step"])

    @property
    def exact_weights(self) -> str:
        """The state key of the unrounded weights: the fp32 masters of a bf16 or fp16 run, otherwise the weights."""
        return MASTER if MASTER in self.tensors else WEIGHT

    @property
    def optimizer_state_keys(self) -> frozenset[str]:
        """The state keys other than the weights'."""
        return frozenset(self.tensors) - {WEIGHT}
