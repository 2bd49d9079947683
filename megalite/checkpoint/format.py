"""The manifest: what a checkpoint holds and where each element lies. No torch.

A checkpoint is a folder: manifest.json and one safetensors file a rank that wrote something. The manifest
speaks of canonical tensors with their full, true shapes only; the layout that wrote it is for people to read.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from megalite.checkpoint.regions import contains, intersection
from megalite.checkpoint.strict_json import is_int, parse, without_collections
from megalite.errors import CheckpointError, listed
from megalite.families.registry import FAMILIES
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape, RopeScaling
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import WEIGHT as WEIGHT

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""What an element of each type takes."""
_MOST_POSITIONS = 1 << 24
# Nothing that leads to another folder.
_FILE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


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
    def box(self) -> TensorSlice:
        return TensorSlice(self.offsets, self.shape)

    @property
    def run(self) -> tuple[int, int]:
        return self.flat or (0, self.box.numel)


@dataclass(frozen=True)
class TensorEntry:
    """One canonical tensor (or one kind of its optimizer state): full shape, type ("float32"), shards."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]

    def by_box(self) -> dict[TensorSlice, list[Shard]]:
        """The shards of each box."""
        groups: dict[TensorSlice, list[Shard]] = {}
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
    """The manifest in `text`, read from `source`, every field of it of its type.

    Raises CheckpointError when it is damaged or of another version, or is none that megalite would write.
    """
    with without_collections():
        return _from_json(text, source)


def _from_json(text: str, source: Path) -> Manifest:
    try:
        outer = parse(text)
        content, digest = outer["manifest"], outer["sha256"]
        version = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: not a whole manifest ({error}); use another checkpoint") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{source}: format {version} is not {FORMAT_VERSION}, the one this version of megalite reads;"
            " use the version that wrote it"
        )
    if digest != _digest_of_text(text) and digest != _digest(content):
        raise CheckpointError(f"{source}: its content does not match its own hash; use another checkpoint")
    try:
        return manifest_of({key: value for key, value in content.items() if key != "format"})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{source}: a field is missing, unknown or not of its kind ({error}); use another checkpoint"
        ) from error


def manifest_of(content: Mapping[str, Any]) -> Manifest:
    """The manifest with these fields; raises ValueError, TypeError, KeyError or AttributeError where one is wrong."""
    counters, files = content["trainer_state"], content["files"]
    for name in ("step", "samples", "tokens"):
        value = counters[name] if name == "step" else counters.get(name, 0)
        _require(is_int(value), "trainer_state", name, value)
    for table in ("trainer_state", "optimizer"):
        for name, value in content[table].items():
            _require(value is None or isinstance(value, int | float), table, name, value)
    for name, size_bytes in files.items():
        _require(_FILE_NAME.fullmatch(name) is not None and is_int(size_bytes), "files", name, size_bytes)
    for name in ("megalite", "torch"):
        _require(isinstance(content[name], str), name, "", content[name])
    for section, table in content["config"].items():
        _require(table is None or isinstance(table, dict), "config", section, table)
    for name, value in (content["config"].get("tokenizer") or {}).items():
        _require(value is None or isinstance(value, int | str), "config.tokenizer", name, value)
    layout = Layout(**content["layout"])
    for name, size in vars(layout).items():
        _require(is_int(size) and size > 0, "layout", name, size)
    for layers in content["stage_layers"]:
        _require(_are_ints(layers), "stage_layers", "", layers)
    tensors = {
        kind: {name: _entry(f"{kind} of {name}", entry, files) for name, entry in entries.items()}
        for kind, entries in content["tensors"].items()
    }
    fields = {
        "layout": layout,
        "model": _model(content["model"]),
        "stage_layers": tuple(map(tuple, content["stage_layers"])),
        "tensors": tensors,
    }
    return Manifest(**{**content, **fields})


# Fields of ModelShape by the names that older checkpoints have.
_RENAMED = {"norm_offset": "zero_centered_gamma"}


def _model(content: Mapping[str, Any]) -> ModelShape:
    given = content.get("rope_scaling")
    scaling = None
    if given is not None:
        listed: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        scaling = _checked(RopeScaling(**listed))
    fields = {_RENAMED.get(name, name): value for name, value in content.items()}
    if fields.get("qk_norm") in (True, False):
        fields["qk_norm"] = "head" if fields["qk_norm"] else None
    model = _checked(ModelShape(**{**fields, "rope_scaling": scaling}))
    _require(model.family in FAMILIES, "model", "family", model.family)
    for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        value = getattr(model, name)
        _require(value is None or value > 0, "model", name, value)
    # Of these no file has the size: a table is made of them.
    positions = model.max_position_embeddings
    _require(positions <= _MOST_POSITIONS, "model", "max_position_embeddings", positions)
    return model


T = TypeVar("T", ModelShape, RopeScaling)


def _checked(made: T) -> T:
    """The same; raises ValueError unless each of its fields is of its type."""
    for name, hint in get_type_hints(type(made)).items():
        _require(_is_of(getattr(made, name), hint), "model", name, getattr(made, name))
    return made


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_of(each, get_args(hint)[0]) for each in value)
    if get_args(hint):  # of a union
        return any(_is_of(value, each) for each in get_args(hint))
    if hint is int:
        return is_int(value)
    return isinstance(value, int | float if hint is float else hint)


def _entry(whose: str, content: Mapping[str, Any], files: Mapping[str, int]) -> TensorEntry:
    """One tensor's: what it says of types and numbers is right, be it of this model or not."""
    shape, dtype, shards = content["shape"], content["dtype"], content["shards"]
    _require(_are_ints(shape), whose, "shape", shape)
    _require(isinstance(dtype, str) and dtype in ITEM_BYTES, whose, "dtype", dtype)
    for shard in shards:
        offsets, box, flat = shard["offsets"], shard["shape"], shard["flat"]
        _require(shard["file"] in files, whose, "file", shard["file"])
        texts = isinstance(shard["key"], str) and isinstance(shard["sha256"], str)
        right = texts and len(offsets) == len(box) == len(shape) and (flat is None or len(flat) == 2)
        _require(right and _are_ints([*offsets, *box, *(flat or ())]), whose, "shard", shard)
    return TensorEntry(tuple(shape), dtype, tuple(map(shard_from_json, shards)))


def _are_ints(values: object) -> bool:
    # There are hundreds of thousands of them: one call each would take most of the time.
    if not isinstance(values, list) or {*map(type, values)} - {int}:
        return False
    return not values or (is_int(min(values)) and is_int(max(values)))


def _require(right: bool, where: str, name: str, value: object) -> None:
    if not right:
        shown = repr(value)
        raise ValueError(f"{where} {name}".rstrip() + f": {shown[:60]}{'...' * (len(shown) > 60)}")


def shard_from_json(content: Mapping[str, Any]) -> Shard:
    """A shard from its fields, whose lists become tuples."""
    flat = content["flat"]
    lists = {"offsets": tuple(content["offsets"]), "shape": tuple(content["shape"])}
    return Shard(**{**content, **lists, "flat": None if flat is None else tuple(flat)})


def check_coverage(manifest: Manifest, source: Path) -> None:
    """Raise CheckpointError unless every element of every tensor of the model is there exactly once.

    This holds for each kind: the weights and each kind of optimizer state. Each box must be covered by its
    runs without gap or overlap, and the boxes must tile the tensor.
    """
    layers, weights = manifest.model.num_hidden_layers, manifest.tensors.get(WEIGHT, {})
    if layers > len(weights):  # before so many names are made
        raise CheckpointError(
            f"{source}: its model has {layers} layers, and there are {len(weights)} weights"
        )
    expected = canonical_tensors(manifest.model)
    for kind, entries in {WEIGHT: {}, **manifest.tensors}.items():
        missing, extra = expected.keys() - entries.keys(), entries.keys() - expected.keys()
        if missing or extra:
            raise CheckpointError(
                f"{source}: {kind} of {listed(sorted(missing))} is missing"
                if missing
                else f"{source}: {kind} of {listed(sorted(extra))} belongs to no tensor of the model"
            )
        for name, entry in entries.items():
            problem = _coverage_problem(entry, expected[name])
            if problem:
                raise CheckpointError(f"{source}: {kind} of {name}: {problem}")


def check_sizes(manifest: Manifest, source: Path) -> None:
    """Raise CheckpointError unless each file is large enough for what is said to lie in it.

    What is read or built from the manifest is then no larger than the files are.
    """
    said_bytes = dict.fromkeys(manifest.files, 0)
    for entries in manifest.tensors.values():
        for entry in entries.values():
            for shard in entry.shards:
                start, stop = shard.run
                said_bytes[shard.file] += (stop - start) * ITEM_BYTES[entry.dtype]
    for name, size_bytes in manifest.files.items():
        if said_bytes[name] > size_bytes:
            raise CheckpointError(
                f"{source}: its tensors in {name} have {said_bytes[name]} bytes, and the file {size_bytes}"
            )


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


def _dump(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


def _digest(content: object) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()


def _digest_of_text(text: str) -> str:
    """That of the content as it stands in what `to_json` wrote, which need not be written again to be hashed."""
    content = text[len('{"manifest":') : text.rfind(',"sha256":')]
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()


def _region(box: TensorSlice) -> str:
    spans = (f"{low}:{low + size}" for low, size in zip(box.offsets, box.shape, strict=True))
    return f"[{', '.join(spans)}]"
