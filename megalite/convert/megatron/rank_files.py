"""Read a Megatron-LM checkpoint as canonical tensors, with the files of one pipeline stage memory-mapped at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.region_reader import TYPES
from megalite.checkpoint.regions import index_in
from megalite.checkpoint.weights import WeightReader
from megalite.convert.finite import require_finite
from megalite.convert.foreign.unpickle import Foreign, load_pickle
from megalite.convert.megatron.arguments import Arguments, megatron_shape, true_vocab_size
from megalite.convert.megatron.folder import MegatronFolder, find_megatron_folder
from megalite.convert.megatron.names import (
    flat_names,
    is_weight,
    layer_of,
    missing_name,
    parameter_name,
    part_of,
    rank_shape,
)
from megalite.errors import CheckpointError, listed
from megalite.topology.parameters import EMBEDDING, HEAD, POSITIONS, model_parameters
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

# Replicas of a tensor on several ranks may differ by rounding, up to this fraction of the largest element.
_DRIFT = 0.01
_VERSIONS = (0, 1, 2, 3)
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")

Entry = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape on one rank, and its dtype."""


@dataclass(frozen=True)
class RankFile:
    """One rank's file.

    chunks: the tensors of each model chunk (virtual stage) by Megatron-LM's names, in the order of its modules.
    optimizer: the optimizer's state as it was saved, unchecked; None without one.
    """

    path: Path
    iteration: int | None
    version: float
    arguments: Arguments
    chunks: tuple[Mapping[str, Tensor], ...]
    optimizer: Any = None

    @property
    def entries(self) -> list[dict[str, Entry]]:
        return [
            {name: (tuple(each.shape), each.dtype) for name, each in chunk.items()} for chunk in self.chunks
        ]


def open_rank(path: Path) -> RankFile:
    """Open a rank's file without reading its tensors. Raises CheckpointError if it is not such a file."""
    content = load_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no dict, so it is not a rank file of a Megatron-LM checkpoint")
    states = [content["model"]] if "model" in content else list(_virtual_stages(content))
    if not states or not all(isinstance(state, Mapping) for state in states):
        raise CheckpointError(f"{path} holds no model, so it is not a rank file of a Megatron-LM checkpoint")
    version, iteration = content.get("checkpoint_version", 0), content.get("iteration")
    if not isinstance(version, int | float) or version not in _VERSIONS:
        raise CheckpointError(
            f"{path} has checkpoint_version {version!r}; supported are {', '.join(map(str, _VERSIONS))}"
        )
    arguments = arguments_in(content, path)
    chunks = []
    for state in states:
        named = {name: value for name, value in flat_names(state).items() if is_weight(name)}
        for name, value in named.items():
            if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
                raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a dense tensor")
        chunks.append(named)
    # Bounds later allocations by the file's size: an expanded tensor can claim any shape with one stored element.
    said_bytes = sum(each.numel() * each.itemsize for chunk in chunks for each in chunk.values())
    if said_bytes > path.stat().st_size:
        raise CheckpointError(
            f"{path}: its tensors have {said_bytes} bytes, but the file {path.stat().st_size}"
        )
    whole = iteration if isinstance(iteration, int) else None
    optimizer = content.get("optimizer")
    return RankFile(path, whole, float(version), arguments, tuple(chunks), optimizer)


def arguments_in(content: Mapping[str, Any], path: Path) -> Arguments:
    """Return the args of a checkpoint's file. Raises CheckpointError where it has none."""
    arguments = content.get("args")
    if not isinstance(arguments, Foreign) or arguments.type_name not in _NAMESPACES:
        raise CheckpointError(
            f"{path} has no args, which give the model's shape; load and save it with a newer Megatron-LM"
        )
    # Tensors are dropped: comparing one with a plain value does not give a bool.
    plain = {name: value for name, value in arguments.fields.items() if not isinstance(value, Tensor)}
    return Arguments(plain, path)


def _virtual_stages(content: Mapping[str, Any]) -> Iterator[Any]:
    number = 0
    while f"model{number}" in content:
        yield content[f"model{number}"]
        number += 1


@dataclass(frozen=True)
class StoredParameter:
    """Where a registered parameter is stored: pipeline rank, model chunk, Megatron-LM's name."""

    stage: int
    chunk: int
    name: str


@dataclass
class MegatronReader(WeightReader):
    """Reads regions of canonical tensors, with the files of one pipeline stage open at a time.

    dtype: the promoted dtype of all weights. notes: messages for the user.
    """

    folder: MegatronFolder
    shape: ModelShape
    version: float
    iteration: int | None
    dtype: torch.dtype
    places: Mapping[str, StoredParameter]
    notes: list[str] = field(default_factory=list)
    _opened: tuple[int, Sequence[RankFile]] | None = None
    # A tensor at once: each read joins the shards of all ranks.
    block_elements = 1 << 62

    def __post_init__(self) -> None:
        self._parts = {
            part.name: (parameter, index)
            for parameter in model_parameters(self.shape)
            for index, part in enumerate(parameter.spec.parts)
        }

    def close(self) -> None:
        self._opened = None

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor. Raises CheckpointError if ranks hold different replicas of it."""
        parameter, _ = self._parts[name]
        shards = self._shards(parameter.name)
        if parameter.spec.dim is None:
            for tp, copy in enumerate(shards[1:], start=1):
                self._compare(f"the copy of {self.places[name].name} on tensor rank {tp}", copy, shards[0])
        whole = self.whole(name, shards)
        values = whole[index_in(region, TensorSlice((0,) * len(region.offsets), tuple(whole.shape)))]
        require_finite(values, name, self.folder.path, region.offsets)
        if name == EMBEDDING:
            self._check_tied_head(values)
        return values

    def _check_tied_head(self, embedding: Tensor) -> None:
        """Compare the last stage's copy of a tied embedding, if there is one, with `embedding`."""
        if self.shape.tie_word_embeddings and HEAD in self.places:
            head = torch.cat(list(self._shards(HEAD)))[: self.shape.vocab_size]
            self._compare(f"{self.places[HEAD].name} of the last stage", head, embedding)

    def whole(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """Return a canonical tensor, with padding rows, from all tensor ranks' tensors of its parameter."""
        parameter, index = self._parts[name]
        return part_of(parameter, index, shards, self.shape, self.version)

    def place_of(self, name: str) -> StoredParameter:
        """Return where a canonical tensor's parameter is stored."""
        return self.places[self._parts[name][0].name]

    def ranks(self, stage: int) -> Sequence[RankFile]:
        """Return the files of a stage's tensor ranks, which stay open until another stage is asked for."""
        if self._opened is None or self._opened[0] != stage:
            self._opened = None  # unmap the previous stage's files first
            self._opened = (
                stage,
                [open_rank(self.folder.files[stage, tp]) for tp in range(self.folder.tensor)],
            )
        return self._opened[1]

    def _shards(self, parameter: str) -> list[Tensor]:
        place = self.places[parameter]
        return [rank.chunks[place.chunk][place.name] for rank in self.ranks(place.stage)]

    def _compare(self, what: str, copy: Tensor, taken: Tensor) -> None:
        if torch.equal(copy, taken):
            return
        off = float((copy.double() - taken.double()).abs().max())
        if not off <= _DRIFT * float(taken.double().abs().max()):
            raise CheckpointError(
                f"{self.folder.path}: {what} differs from the first copy by up to {off:.1e}, more than rounding"
                f" explains ({_DRIFT:.0%} of the largest element); fetch the files of one iteration"
            )
        self.notes.append(f"{what} differs from the first copy, which was used, by up to {off:.1e}")


def open_megatron(path: Path, vocab_size: int | None = None) -> MegatronReader:
    """Open a checkpoint and check everything but the elements of its tensors.

    vocab_size: the size before padding, if the checkpoint's arguments do not record it. Raises CheckpointError with the
    file, argument or tensor.
    """
    folder = find_megatron_folder(path)
    first = open_rank(folder.files[0, 0])
    shape = megatron_shape(first.arguments, vocab_size=1)  # an unsupported model is refused first
    _check_layout(folder, first)
    places: dict[str, StoredParameter] = {}
    shapes: dict[str, Entry] = {}
    stages = [_entries_of_stage(folder, stage, first) for stage in range(folder.pipeline)]
    first_layer = 0
    for chunk in range(len(first.chunks)):  # layers run through a chunk of each stage, then the next chunk
        for stage, chunks in enumerate(stages):
            for name, entry in chunks[chunk].items():
                ours = parameter_name(name, first_layer, gated=shape.gated_mlp)
                if ours is None or ours in places:
                    where = folder.files[stage, 0]
                    what = (
                        "which the model lacks" if ours is None else f"a second copy of {places[ours].name}"
                    )
                    raise CheckpointError(f"{where} has {name}, {what}; correct its args")
                places[ours], shapes[ours] = StoredParameter(stage, chunk, name), entry
            first_layer += _layer_count(chunks[chunk], folder.files[stage, 0])
    if first_layer != shape.num_hidden_layers:
        raise first.arguments.problem(
            f"num_layers = {shape.num_hidden_layers}, but its files hold {first_layer} layers"
        )
    if EMBEDDING not in shapes or len(shapes[EMBEDDING][0]) != 2:
        raise CheckpointError(f"{folder.files[0, 0]} has no word_embeddings of 2 dims; fetch it again")
    rows = shapes[EMBEDDING][0][0] * folder.tensor
    shape = megatron_shape(first.arguments, true_vocab_size(first.arguments, rows, vocab_size))
    _check_tensors(folder, shape, first.version, places, shapes)
    dtype = shapes[EMBEDDING][1]
    for _, kind in shapes.values():
        dtype = torch.promote_types(dtype, kind)
    return MegatronReader(folder, shape, first.version, first.iteration, dtype, places)


def _check_layout(folder: MegatronFolder, first: RankFile) -> None:
    table = first.arguments.table
    sizes = {
        "tensor_model_parallel_size": (folder.tensor, table.get("model_parallel_size")),
        "pipeline_model_parallel_size": (folder.pipeline, None),
    }
    for name, (size, older) in sizes.items():
        said = table.get(name, older)
        if said is not None and said != size:
            raise first.arguments.problem(f"{name} = {said!r}, but there are files of {size} rank(s)")


def _entries_of_stage(folder: MegatronFolder, stage: int, first: RankFile) -> list[dict[str, Entry]]:
    """Return the entries of each chunk's tensors by name. Raises CheckpointError if the stage's ranks differ."""
    of_rank_0: list[dict[str, Entry]] | None = None
    for tp in range(folder.tensor):
        rank = open_rank(folder.files[stage, tp])
        for what, value in (("iteration", rank.iteration), ("checkpoint_version", rank.version)):
            expected = first.iteration if what == "iteration" else first.version
            if value != expected:
                raise CheckpointError(
                    f"{rank.path} has {what} {value}, but {first.path} {expected}; fetch the files of one iteration"
                )
        if len(rank.chunks) != len(first.chunks):
            raise CheckpointError(
                f"{rank.path} holds {len(rank.chunks)} model chunk(s), but {first.path} {len(first.chunks)}"
            )
        of_rank_0 = of_rank_0 or rank.entries
        for mine, other in zip(rank.entries, of_rank_0, strict=True):
            _check_alike(folder, stage, tp, mine, other)
    return of_rank_0 or []


def _check_alike(
    folder: MegatronFolder, stage: int, tp: int, mine: Mapping[str, Entry], other: Mapping[str, Entry]
) -> None:
    """Raise CheckpointError unless rank `tp` has the same tensors as rank 0."""
    own, zeros = folder.files[stage, tp], folder.files[stage, 0]
    for name in sorted(mine.keys() ^ other.keys()):
        lacking, having = (zeros, own) if name in mine else (own, zeros)
        raise CheckpointError(f"{lacking} lacks {name}, which {having} has; fetch it again")
    for name, entry in mine.items():
        if entry != other[name]:
            raise CheckpointError(f"{own}: {name} is {_said(entry)}, but {_said(other[name])} on rank 0")


def _layer_count(names: Mapping[str, Any], path: Path) -> int:
    layers = {layer for name in names if (layer := layer_of(name)) is not None}
    if layers != set(range(len(layers))):
        raise CheckpointError(
            f"{path} holds layers {sorted(layers)}, which are not numbered from 0 without gaps"
        )
    return len(layers)


def _check_tensors(
    folder: MegatronFolder,
    shape: ModelShape,
    version: float,
    places: Mapping[str, StoredParameter],
    entries: Mapping[str, Entry],
) -> None:
    """Raise CheckpointError unless the files hold exactly the model's tensors, with the expected shapes per rank."""
    expected = {parameter.name: parameter for parameter in model_parameters(shape)}
    if missing := [name for name in expected if name not in places]:
        raise _lacking(folder, missing, places)
    for name, (size, kind) in entries.items():
        place = places[name]
        path = folder.files[place.stage, 0]
        copy = name == HEAD and shape.tie_word_embeddings
        if name not in expected and not copy:
            raise CheckpointError(
                f"{path} has {place.name}, which the model of its args lacks; correct its args"
            )
        if name in (EMBEDDING, HEAD):
            expected_size: tuple[int, ...] | None = (entries[EMBEDDING][0][0], shape.hidden_size)
        else:
            expected_size = rank_shape(expected[name], folder.tensor)
        if size != expected_size:
            raise CheckpointError(
                f"{path}: {place.name} is {size} on each rank, but its args give {expected_size}"
            )
        if kind not in TYPES.values():
            raise CheckpointError(
                f"{path}: {place.name} is {kind}; save the weights as bf16, fp16, fp32 or fp64"
            )
    _check_heads(folder, shape, version)


def _lacking(
    folder: MegatronFolder, missing: Sequence[str], places: Mapping[str, StoredParameter]
) -> CheckpointError:
    """Return the error for missing tensors: the first file that lacks some, and Megatron-LM's names of these."""
    names = {ours: place.name for ours, place in places.items()}

    def stage_of(name: str) -> int:
        if name == POSITIONS:
            return 0
        layer = ".".join(name.split(".")[:3]) + "."
        return next(
            (place.stage for ours, place in places.items() if ours.startswith(layer)), folder.pipeline - 1
        )

    first = min(map(stage_of, missing))
    lacked = [missing_name(name, names) for name in missing if stage_of(name) == first]
    return CheckpointError(
        f"{folder.files[first, 0]} lacks {listed(lacked)}, which its args imply; fetch it again, or correct its args"
    )


def _check_heads(folder: MegatronFolder, shape: ModelShape, version: float) -> None:
    groups = shape.num_key_value_heads
    if version < 2 and groups != shape.num_attention_heads:
        raise CheckpointError(
            f"{folder.path} has checkpoint_version {version:g}, which cannot have grouped-query"
            " attention, but its args ask for it"
        )
    if groups % folder.tensor and folder.tensor % groups:
        raise CheckpointError(
            f"{folder.path}: {folder.tensor} tensor ranks cannot hold {groups} query groups"
        )


def _said(entry: Entry) -> str:
    return f"{entry[0]} of {str(entry[1]).removeprefix('torch.')}"
