"""Read the layers' files of DeepSpeed's pipeline engine as canonical tensors, one layer's files mapped at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.regions import index_in
from megalite.checkpoint.weights import WeightReader
from megalite.convert.deepspeed.pipeline_files import open_layer
from megalite.convert.deepspeed.pipeline_folder import PipelineFolder
from megalite.convert.deepspeed.pipeline_names import (
    DECODER_LAYER,
    Dialect,
    LayerTensor,
    Role,
    missing_layers,
    role_of,
    stored_tensors,
)
from megalite.convert.finite import require_finite
from megalite.errors import CheckpointError, listed
from megalite.topology.parameters import EMBEDDING, HEAD
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

# Replicas of a tensor on several ranks may differ by rounding, up to this fraction of the largest element.
_DRIFT = 0.01

StateShard = Callable[[str, int, int, str], Tensor]
"""State key, pipeline layer, model rank, name in the layer -> that rank's tensor, flat."""


@dataclass
class PipelineReader(WeightReader):
    """Reads regions of canonical tensors.

    roles: decoder layer or other role -> index of the pipeline layer. states: reads what is not in the layers' files;
    None: they have the weights, and nothing else is read. notes: messages for the user.
    """

    folder: PipelineFolder
    shape: ModelShape
    stored: Mapping[str, LayerTensor]
    roles: Mapping[Role, int]
    dtype: torch.dtype
    states: StateShard | None = None
    notes: list[str] = field(default_factory=list)
    _opened: tuple[int, Sequence[Mapping[str, Tensor]]] | None = None
    # A tensor at once: each read joins the shards of all ranks.
    block_elements = 1 << 62

    def close(self) -> None:
        self._opened = None

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor. Raises CheckpointError if ranks hold different replicas of it."""
        stored = self.stored[name]
        layer = self.roles[stored.role]
        shards = [self._shard(state_key, stored, layer, rank) for rank in range(self.folder.model_ranks)]
        if stored.cut == "copies":
            for rank, copy in enumerate(shards[1:], start=1):
                self._compare(f"{state_key} of {stored.name} in layer {layer}, rank {rank}", copy, shards[0])
        whole = joined(stored, shards, state_key)
        values = whole[index_in(region, TensorSlice((0,) * len(region.offsets), tuple(whole.shape)))]
        require_finite(values, f"{state_key} of {stored.name}", self.folder.path, region.offsets)
        return values

    def _shard(self, state_key: str, stored: LayerTensor, layer: int, rank: int) -> Tensor:
        if self.states is not None:
            size = stored.rank_shape(self.folder.model_ranks) or ()
            return self.states(state_key, layer, rank, stored.name).view(size)
        if self._opened is None or self._opened[0] != layer:
            self._opened = None  # unmap the previous layer's files first
            self._opened = (layer, [open_layer(path) for path in self.folder.layers[layer]])
        return self._opened[1][rank][stored.name]

    def _compare(self, what: str, copy: Tensor, taken: Tensor) -> None:
        if torch.equal(copy, taken):
            return
        off = float((copy.double() - taken.double()).abs().max())
        if not off <= _DRIFT * float(taken.double().abs().max()):
            raise CheckpointError(
                f"{self.folder.path}: {what} differs from the copy of rank 0 by up to {off:.1e}, more than rounding"
                f" explains ({_DRIFT:.0%} of the largest element); fetch the files of one step"
            )
        self.notes.append(f"{what} differs from the copy of rank 0, which was used, by up to {off:.1e}")


def joined(stored: LayerTensor, shards: Sequence[Tensor], state_key: str = WEIGHT) -> Tensor:
    """Return a canonical tensor, whole, from all model-parallel ranks' tensors.

    A moment of a sum over ranks is that of each term, since their gradients are equal.
    """
    if stored.cut == "terms" and state_key == WEIGHT:
        return torch.stack(list(shards)).sum(0, dtype=shards[0].dtype)
    if stored.cut in ("copies", "terms"):
        return shards[0]
    if stored.cut == "columns":
        return torch.cat(list(shards), 1) if len(shards) > 1 else shards[0]
    groups = stored.groups or len(shards)
    first = sum(stored.parts[: stored.index]) // groups
    rows = stored.parts[stored.index] // groups
    taken = [
        shard.unflatten(0, (groups // len(shards), -1)).narrow(1, first, rows).flatten(0, 1)
        for shard in shards
    ]
    return torch.cat(taken) if len(taken) > 1 else taken[0]


@dataclass(frozen=True)
class Layers:
    """The tensors of the layers' files, without their elements.

    entries: pipeline layer -> name -> (shape on a rank, dtype), the same on every rank.
    """

    folder: PipelineFolder
    entries: Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]

    @property
    def decoder_layer(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of the first layer that has an attention. Raises CheckpointError if there is none."""
        for entries in self.entries.values():
            if any(name.endswith("attention.query_key_value.weight") for name in entries):
                return dict(entries)
        raise CheckpointError(
            f"{self.folder.path} has no layer with attention.query_key_value or self_attention.query_key_value; only"
            " GPT models of GPT-NeoX and Megatron-DeepSpeed are supported"
        )

    def columns(self, name: str) -> int:
        """Return the columns of a row-parallel matrix of a decoder layer, over all ranks."""
        shape = self.decoder_layer[name][0] if name in self.decoder_layer else ()
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.folder.path}: its decoder layers lack a matrix {name}; fetch it again"
            )
        return shape[1] * self.folder.model_ranks

    def vocabulary_rows(self) -> int:
        """Return the rows of the embedding, padding included."""
        for entries in self.entries.values():
            if "word_embeddings.weight" in entries and len(entries["word_embeddings.weight"][0]) == 2:
                return entries["word_embeddings.weight"][0][0] * self.folder.model_ranks
        raise CheckpointError(f"{self.folder.path} has no layer with word_embeddings.weight; fetch it again")


def survey(folder: PipelineFolder) -> Layers:
    """Open every layer's file. Raises CheckpointError if ranks differ in a tensor's name, shape or dtype."""
    entries = {}
    for layer, paths in folder.layers.items():
        of_ranks = [
            {name: (tuple(value.shape), value.dtype) for name, value in open_layer(path).items()}
            for path in paths
        ]
        for path, other in zip(paths, of_ranks, strict=True):
            for name in sorted(other.keys() ^ of_ranks[0].keys()):
                raise CheckpointError(f"{path} and {paths[0]} do not both have {name}; fetch them again")
            for name, entry in other.items():
                if entry != of_ranks[0][name]:
                    raise CheckpointError(
                        f"{path}: {name} is {entry[0]}, {entry[1]}, but {of_ranks[0][name]} in {paths[0].name}"
                    )
        entries[layer] = of_ranks[0]
    return Layers(folder, entries)


def open_reader(layers: Layers, shape: ModelShape, dialect: Dialect, padded_rows: int) -> PipelineReader:
    """Check that the layers' files hold exactly the model's tensors, and return their reader.

    padded_rows: of the embedding in the files. Raises CheckpointError by name for a tensor that is missing, of another
    shape, or of no parameter.
    """
    folder, roles = layers.folder, _roles(layers, dialect)
    if missing := list(missing_layers(roles, shape)):
        raise CheckpointError(f"{folder.path} lacks {listed(missing)}; fetch every layer's file")
    stored = stored_tensors(shape, dialect)
    needed: dict[int, dict[str, LayerTensor]] = {layer: {} for layer in layers.entries}
    for tensor in stored.values():
        needed[roles[tensor.role]][tensor.name] = tensor
    of_layers = {layer: role for role, layer in roles.items()}
    dtype = layers.decoder_layer[f"{dialect.attention}.query_key_value.weight"][1]
    for layer, entries in layers.entries.items():
        path = folder.layers[layer][0]
        if lacking := sorted(needed[layer].keys() - entries.keys()):
            raise CheckpointError(f"{path} lacks {listed(lacking)}, which the model's settings imply")
        extra = sorted(entries.keys() - needed[layer].keys())
        if layer in of_layers and extra and not _unused(extra, shape):
            raise CheckpointError(f"{path} has {listed(extra)}, of which the model's settings say nothing")
        for name, tensor in needed[layer].items():
            size, kind = entries[name]
            expected = tensor.rank_shape(folder.model_ranks)
            if tensor.name in ("word_embeddings.weight", dialect.head):
                expected = (padded_rows // folder.model_ranks, shape.hidden_size)
            if size != expected:
                raise CheckpointError(
                    f"{path}: {name} is {size} on each rank, but the settings give {expected}"
                )
            dtype = torch.promote_types(dtype, kind)
    if HEAD in stored:
        stored[HEAD] = _padded(stored[HEAD], padded_rows)
    stored[EMBEDDING] = _padded(stored[EMBEDDING], padded_rows)
    return PipelineReader(folder, shape, stored, roles, dtype)


def _padded(tensor: LayerTensor, rows: int) -> LayerTensor:
    return LayerTensor(tensor.role, tensor.name, tensor.cut, tensor.shape, (rows,))


def _unused(names: Sequence[str], shape: ModelShape) -> bool:
    """Whether a model with one norm for attention and MLP has the second one nevertheless, without use."""
    return shape.norm_placement == "parallel_shared" and all(
        name.startswith("post_attention_layernorm.") for name in names
    )


def _roles(layers: Layers, dialect: Dialect) -> dict[Role, int]:
    roles: dict[Role, int] = {}
    decoder_layers = 0
    for layer, entries in sorted(layers.entries.items()):
        role = role_of(set(entries), dialect)
        if role == DECODER_LAYER:
            role, decoder_layers = decoder_layers, decoder_layers + 1
        if (role is None and entries) or role in roles:
            path = layers.folder.layers[layer][0]
            raise CheckpointError(
                f"{path} holds {listed(sorted(entries))}, which is no layer of a GPT model of {dialect.program}"
            )
        if role is not None:
            roles[role] = layer
    return roles
