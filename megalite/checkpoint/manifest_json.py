"""The manifest as JSON: written with the hash of its content; read with each field checked. No torch."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from megalite.checkpoint.manifest import Base, Manifest, PackedShards, Shard, Stream, TensorEntry
from megalite.checkpoint.strict_json import is_int, parse, without_collections
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES
from megalite.topology.adapter import Adapter, Lora, Prefix
from megalite.topology.axes import Layout
from megalite.topology.dtypes import FLOATS
from megalite.topology.experts import ExpertShape, LatentAttention, MixtureShape
from megalite.topology.shape import ModelShape, RopeScaling

FORMAT_VERSION = 1
_ENTRY = {"shape", "dtype", "shards"}
_PACKED = "packed"
_ROWS = {"idle_experts": 3, "rollbacks": 2}
"""Lists of rows in trainer_state, and the numbers in a row."""
_HASHED = 2**20
_MOST_POSITIONS = 1 << 24
_MOST_EXPERTS = 1 << 16
# Epoch, file, place, document and token (data.stream_lane.LanePlace).
_LANE_FIELDS = 5
# Excludes every path into another folder.
_FILE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def to_json(manifest: Manifest) -> str:
    """Return the manifest as JSON, followed by the hash of that JSON."""
    return "".join(texts_of(manifest))


def texts_of(manifest: Manifest) -> Iterator[str]:
    """Yield the pieces of `to_json`; none is larger than one tensor's, whatever the number of ranks.

    Each tensor's entry is a line of its own, so that a reader needs no more than one of them as text.
    """
    digest = hashlib.sha256()
    yield '{"manifest":'
    for piece in _content_texts(manifest):
        digest.update(piece.encode())
        yield piece
    yield f',"sha256":"{digest.hexdigest()}"}}\n'


def _content_texts(manifest: Manifest) -> Iterator[str]:
    yield f'{{"format":{FORMAT_VERSION}'
    for name, value in asdict(replace(manifest, tensors={})).items():
        yield f',"{name}":'
        if name != "tensors":
            yield _dump(value)
            continue
        for first, (key, entries) in zip(chain("{", repeat(",")), manifest.tensors.items(), strict=False):
            yield f"{first}{_dump(key)}:"
            for start, (tensor, entry) in zip(chain("{", repeat(",")), entries.items(), strict=False):
                yield f"{start}{_dump(tensor)}:\n{_dump(_entry_content(entry))}\n"
            yield "}" if entries else "{}"
        yield "}" if manifest.tensors else "{}"
    yield "}"


def _entry_content(entry: TensorEntry) -> dict[str, Any]:
    return {"shape": entry.shape, "dtype": entry.dtype, "shards": [vars(shard) for shard in entry.shards]}


def from_json(lines: Iterable[str], source: Path) -> Manifest:
    """Parse and check a manifest, a line at a time; source: its path, for messages.

    Raises CheckpointError if it is damaged, of another format version, or has a field that megalite would not write.
    """
    with without_collections():
        return _from_json(lines, source)


def _from_json(lines: Iterable[str], source: Path) -> Manifest:
    rest, entries, actual = _pack(lines)
    try:
        outer = parse(rest, lambda table: _entry_or_table(table, entries))
        content, digest = outer["manifest"], outer["sha256"]
        version = content["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source}: not a complete manifest ({error}); use another checkpoint"
        ) from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{source}: format {version} is not {FORMAT_VERSION}, the only one that this version of megalite reads;"
            " use the version that wrote it"
        )
    # Other tools write the same content in other forms.
    if digest != actual and (entries or digest != _digest(parse(rest)["manifest"])):
        raise CheckpointError(f"{source}: its content does not match its own hash; use another checkpoint")
    try:
        return manifest_of({key: value for key, value in content.items() if key != "format"})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{source}: a field is missing, unknown or of the wrong type ({error}); use another checkpoint"
        ) from error


def _pack(lines: Iterable[str]) -> tuple[str, list[TensorEntry], str]:
    """Return the manifest's text with {"packed":place} for each entry on a line of its own, the entries, and the hash.

    The text of the shards of many ranks would take as much memory as they do.
    """
    rest, entries, digest, last = list[str](), list[TensorEntry](), hashlib.sha256(), ""
    for line in lines:
        digest.update(last.encode(errors="replace"))
        last = line if rest else line.removeprefix('{"manifest":')
        entry = None
        if line.startswith('{"shape":'):
            with suppress(ValueError):
                entry = parse(line, _packed)
        if isinstance(entry, TensorEntry):
            rest.append(_dump({_PACKED: len(entries)}))
            entries.append(entry)
        else:
            rest.append(line)
    end = last.rfind(',"sha256":')
    for start in range(0, end, _HASHED):
        digest.update(last[start : min(start + _HASHED, end)].encode(errors="replace"))
    return "".join(rest), entries, digest.hexdigest()


def _entry_or_table(table: dict[str, Any], entries: Sequence[TensorEntry]) -> Any:
    place: Any = table.get(_PACKED)
    return entries[place] if is_int(place) and place < len(entries) else _packed(table)


def manifest_of(content: Mapping[str, Any]) -> Manifest:
    """Build a manifest from its JSON fields. Raises ValueError, TypeError, KeyError or AttributeError for a bad one."""
    counters, files = content["trainer_state"], content["files"]
    for name in ("step", "samples", "tokens"):
        value = counters[name] if name == "step" else counters.get(name, 0)
        _require(is_int(value), "trainer_state", name, value)
    for table in ("trainer_state", "optimizer"):
        for name, value in content[table].items():
            if width := _ROWS.get(name):
                rows = isinstance(value, list) and all(_are_ints(row) and len(row) == width for row in value)
                _require(rows, table, name, value)
            elif name == "recent_losses":
                losses = isinstance(value, list) and all(isinstance(loss, int | float) for loss in value)
                _require(losses, table, name, value)
            else:
                _require(value is None or isinstance(value, int | float), table, name, value)
    for name, size_bytes in files.items():
        _require(_FILE_NAME.fullmatch(name) is not None and is_int(size_bytes), "files", name, size_bytes)
    for name in ("megalite", "torch"):
        _require(isinstance(content[name], str), name, "", content[name])
    for section, table in content["config"].items():
        _require(table is None or isinstance(table, dict), "config", section, table)
    for name, value in (content["config"].get("tokenizer") or {}).items():
        texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
        _require(value is None or texts or isinstance(value, int | str), "config.tokenizer", name, value)
    layout = Layout(**content["layout"])
    for name, size in vars(layout).items():
        unset = name == "expert_tensor" and size is None
        _require(unset or (is_int(size) and size > 0), "layout", name, size)
    for layers in content["stage_layers"]:
        _require(_are_ints(layers), "stage_layers", "", layers)
    tensors = {
        key: {name: _named_entry(f"{key} of {name}", entry, files) for name, entry in entries.items()}
        for key, entries in content["tensors"].items()
    }
    base = content.get("base")
    for name, value in [*(base or {}).items(), *content.get("data", {}).items()]:
        _require(isinstance(value, str), "base or data", name, value)
    fields = {
        "base": None if base is None else Base(**base),
        "stream": _stream(content.get("stream")),
        "layout": layout,
        "model": _model(content["model"]),
        "stage_layers": tuple(map(tuple, content["stage_layers"])),
        "tensors": tensors,
    }
    return Manifest(**{**content, **fields})


def _stream(content: Mapping[str, Any] | None) -> Stream | None:
    if content is None:
        return None
    for name, size in content["files"]:
        _require(isinstance(name, str) and is_int(size), "stream", "files", (name, size))
    for lane in content["lanes"]:
        _require(_are_ints(lane) and len(lane) == _LANE_FIELDS, "stream", "lanes", lane)
    files = tuple((name, size) for name, size in content["files"])
    return Stream(files, tuple(map(tuple, content["lanes"])))


def _model(content: Mapping[str, Any]) -> ModelShape:
    scaling_fields = content.get("rope_scaling")
    scaling = None
    if scaling_fields is not None:
        scaling = _checked(RopeScaling(**{name: _as_tuple(value) for name, value in scaling_fields.items()}))
    fields = {**content, "rope_scaling": scaling, "adapter": _adapter(content.get("adapter"))}
    if "experts" in fields:
        blocks = {"experts": _experts(fields["experts"]), "latent": _latent(fields.get("latent"))}
        model: ModelShape = _checked(MixtureShape(**{**fields, **blocks}))
    else:
        model = _checked(ModelShape(**fields))
    _require(model.family in FAMILIES, "model", "family", model.family)
    for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        value = getattr(model, name)
        _require(value is None or value > 0, "model", name, value)
    if scaling is not None and scaling.rope_type == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            _require(len(factors) == model.rotary_dim // 2, "model", name, factors)
    # No file's size bounds this field, and a table of that many rotary angles is allocated.
    positions = model.max_position_embeddings
    _require(positions <= _MOST_POSITIONS, "model", "max_position_embeddings", positions)
    return model


def _latent(content: Mapping[str, Any] | None) -> LatentAttention | None:
    return None if content is None else _checked(LatentAttention(**content))


def _experts(content: Mapping[str, Any] | None) -> ExpertShape | None:
    if content is None:
        return None
    experts = _checked(ExpertShape(**{name: _as_tuple(value) for name, value in content.items()}))
    number, top, groups = experts.num_experts, experts.num_experts_per_tok, experts.n_group
    _require(0 < top <= number < _MOST_EXPERTS, "model.experts", "num_experts", number)
    _require(groups > 0 and number % groups == 0, "model.experts", "n_group", groups)
    _require(0 < experts.topk_group <= groups, "model.experts", "topk_group", experts.topk_group)
    _require(experts.decoder_sparse_step > 0, "model.experts", "decoder_sparse_step", 0)
    return experts


def _adapter(content: Mapping[str, Any] | None) -> Adapter | None:
    if content is None:
        return None
    fields = {name: _as_tuple(value) for name, value in content.items()}
    if "rank" in fields:
        lora = _checked(Lora(**fields))
        _require(0 < lora.rank < _MOST_POSITIONS, "model.adapter", "rank", lora.rank)
        return lora
    prefix = _checked(Prefix(**fields))
    for name, value in (("tokens", prefix.tokens), ("projection", prefix.projection)):
        _require(value is None or 0 < value < _MOST_POSITIONS, "model.adapter", name, value)
    return prefix


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


T = TypeVar("T", ModelShape, MixtureShape, ExpertShape, LatentAttention, RopeScaling, Lora, Prefix)


def _checked(made: T) -> T:
    """Return `made`. Raises ValueError unless each field has the type of its annotation."""
    for name, hint in get_type_hints(type(made)).items():
        _require(_is_of(getattr(made, name), hint), "model", name, getattr(made, name))
    return made


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_of(each, get_args(hint)[0]) for each in value)
    if get_args(hint):  # a union
        return any(_is_of(value, each) for each in get_args(hint))
    if hint is int:
        return is_int(value)
    return isinstance(value, int | float if hint is float else hint)


def _packed(table: dict[str, Any]) -> Any:
    """Return a table, or the entry of a tensor in its place: as tables its shards take ten times the memory."""
    if table.keys() != _ENTRY:
        return table
    try:
        return _entry("", table)
    except (KeyError, TypeError, ValueError, AttributeError):
        return table  # `_named_entry` says whose it is


def _named_entry(whose: str, entry: Any, files: Mapping[str, int]) -> TensorEntry:
    if not isinstance(entry, TensorEntry):
        entry = _entry(whose, entry)
    for shard in entry.shards:
        _require(shard.file in files, whose, "file", shard.file)
    return entry


def _entry(whose: str, content: Mapping[str, Any]) -> TensorEntry:
    """Parse one tensor's entry and check types and numbers; `check_coverage` compares it with the model."""
    shape, dtype, shards = content["shape"], content["dtype"], content["shards"]
    _require(_are_ints(shape), whose, "shape", shape)
    _require(isinstance(dtype, str) and dtype in FLOATS, whose, "dtype", dtype)
    for shard in shards:
        offsets, region, flat = shard["offsets"], shard["shape"], shard["flat"]
        texts = all(isinstance(shard[name], str) for name in ("file", "key", "sha256"))
        right = texts and len(offsets) == len(region) == len(shape) and (flat is None or len(flat) == 2)
        _require(right and _are_ints([*offsets, *region, *(flat or ())]), whose, "shard", shard)
    return TensorEntry(tuple(shape), dtype, PackedShards(map(shard_from_json, shards)))


def _are_ints(values: object) -> bool:
    # A manifest has hundreds of thousands of numbers: calling is_int for each would take most of the time.
    if not isinstance(values, list) or {*map(type, values)} - {int}:
        return False
    return not values or (is_int(min(values)) and is_int(max(values)))


def _require(right: bool, where: str, name: str, value: object) -> None:
    if not right:
        shown = repr(value)
        raise ValueError(f"{where} {name}".rstrip() + f": {shown[:60]}{'...' * (len(shown) > 60)}")


def shard_from_json(content: Mapping[str, Any]) -> Shard:
    """Build a shard from its JSON fields, converting lists to tuples."""
    flat = content["flat"]
    lists = {"offsets": tuple(content["offsets"]), "shape": tuple(content["shape"])}
    return Shard(**{**content, **lists, "flat": None if flat is None else tuple(flat)})


def _dump(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


def _digest(content: object) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()
