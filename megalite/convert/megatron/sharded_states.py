"""The optimizer's state of a torch_dist checkpoint, in each form in which megatron-core saves it.

Model space: a global tensor a parameter, as the plain optimizer and `fully_reshardable` have it, or flattened within
each cell of a grid, as `fully_sharded_model_space` of versions before 0.14 has it. Bucket space (`dp_reshardable`,
formerly `fully_sharded_bucket_space`): the flat buffers of every tensor and pipeline rank, in which a parameter's place
follows from the order of the model's modules (`buffers.py`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from torch import Tensor

from megalite.checkpoint.regions import full_slice
from megalite.convert.megatron.arguments import Arguments
from megalite.convert.megatron.buffers import BufferedParameter, fill_buckets, in_module_order
from megalite.convert.megatron.names import rank_shape
from megalite.convert.megatron.sharded_names import OPTIMIZER, GlobalPlace
from megalite.convert.megatron.training_state import (
    MOMENTS,
    REMEDY,
    OptimizerNotRead,
    OptimizerScalars,
    optimizer_scalars,
)
from megalite.convert.torch_dcp.reader import DcpFolder
from megalite.errors import CheckpointError
from megalite.topology.parameters import EMBEDDING, FINAL_NORM, HEAD, POSITIONS, Parameter, model_parameters
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import WEIGHT

_MODEL_SPACE = f"{OPTIMIZER}state."
_MASTERS = ("fp32_param", "param")
_OF_A_GROUP = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d{1,6})\.(.+)", re.ASCII)
_BUCKET = re.compile(r"gbuf_idx_(\d{1,4})\.dtype_(.+)\.bucket_idx_(\d{1,6})\.(\w+)", re.ASCII)
# Arguments of pipelines whose stages have other layers than equal shares.
_UNEVEN = (
    *(
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    ),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("num_layers_at_start_in_bf16", "pipeline_model_parallel_split_rank"),
)


@dataclass(frozen=True)
class ShardedModel:
    """A model and its tensors in a folder. rows: of the padded vocabulary."""

    folder: DcpFolder
    shape: ModelShape
    arguments: Arguments
    places: Mapping[str, GlobalPlace]
    rows: int


class SavedStates(Protocol):
    """The optimizer's tensors, all of which are known to be there."""

    def shards(self, state_key: str, parameter: str) -> list[Tensor]:
        """Return a registered parameter's state as each tensor rank has it, or once for one rank.

        state_key: WEIGHT for the float32 masters, or a moment.
        """


def find_states(model: ShardedModel, common: Any) -> tuple[SavedStates, OptimizerScalars] | None:
    """Return the states and scalars of the optimizer; None where none was saved.

    common: the `optimizer` of common.pt. Raises OptimizerNotRead for a form that is not read, CheckpointError for one
    that is not whole.
    """
    tensors, objects = model.folder.tensors, model.folder.metadata.objects
    keys = [key for key in (*tensors, *objects) if key.startswith((OPTIMIZER, "chained_"))]
    if not keys and common is None:
        return None
    if any("chained_" in key for key in keys):
        raise OptimizerNotRead(f"{model.folder.path} has several optimizers; {REMEDY}")
    if any(key.startswith(f"{_MODEL_SPACE}exp_avg.") for key in keys):
        states: SavedStates = _model_space(model)
    elif any((match := _OF_A_GROUP.fullmatch(key)) and _BUCKET.fullmatch(match[2]) for key in tensors):
        states = _bucket_space(model)
    else:
        kind = common.get("param_state_sharding_type") if isinstance(common, Mapping) else None
        raise OptimizerNotRead(
            f"{model.folder.path} holds no moments of Adam in a known form (param_state_sharding_type = {kind!r:.60});"
            f" {REMEDY}"
        )
    return states, _scalars(model.folder, common)


def _scalars(folder: DcpFolder, common: Any) -> OptimizerScalars:
    """Return the scalars from common.pt, or from the first group's objects where each has its own."""
    tables = dict(common) if isinstance(common, Mapping) else {}
    for name in folder.metadata.objects:
        match = _OF_A_GROUP.fullmatch(name)
        key = match[2].partition("/")[0] if match and int(match[1]) == 0 else None
        if key in ("optimizer", "grad_scaler"):
            content = folder.object(name)
            tables[key] = content[0] if isinstance(content, list) and content else None
    inner = tables.get("optimizer", tables)
    inner = inner if isinstance(inner, Mapping) else {}
    state = inner.get("state")
    common_step = state.get("common_step") if isinstance(state, Mapping) else None
    steps = [] if common_step is None else [common_step]
    return optimizer_scalars(inner.get("param_groups"), steps, tables.get("grad_scaler"), folder.path)


@dataclass(frozen=True)
class ModelSpace:
    """States as global tensors under the keys of the model's. master: its name; None: the weights are the masters."""

    model: ShardedModel
    master: str | None

    def key(self, state_key: str, parameter: str) -> str:
        """Return the key of a parameter's state."""
        place = self.model.places[parameter]
        if state_key != WEIGHT:
            return f"{_MODEL_SPACE}{state_key}.{place.key}"
        return place.key if self.master is None else f"{_MODEL_SPACE}{self.master}.{place.key}"

    def shards(self, state_key: str, parameter: str) -> list[Tensor]:
        return [read_place(self.model.folder, self.key(state_key, parameter), self.model.places[parameter])]


def read_place(folder: DcpFolder, key: str, place: GlobalPlace) -> Tensor:
    """Read the tensor of `place` from `key`, which is stored as the parameter is, or flattened within a grid."""
    stored = folder.tensors[key].shape
    whole = full_slice(stored)
    if place.layer is not None:
        whole = TensorSlice((place.layer, *whole.offsets[1:]), (1, *whole.shape[1:]))
    values = folder.read(key, whole)
    values = values if place.layer is None else values[0]
    return values if values.dim() == len(place.shape) else _from_grid(values, place.shape)


def _from_grid(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return [X, Y] from [cells of X, cells of Y, flattened cell]."""
    grid = tuple(values.shape[:-1])
    cells = values.view(*grid, *(size // parts for size, parts in zip(shape, grid, strict=True)))
    order = [
        dim for pair in zip(range(len(grid)), range(len(grid), 2 * len(grid)), strict=True) for dim in pair
    ]
    return cells.permute(order).reshape(shape)


def _model_space(model: ShardedModel) -> ModelSpace:
    tensors = model.folder.tensors
    masters = [name for name in _MASTERS if any(key.startswith(f"{_MODEL_SPACE}{name}.") for key in tensors)]
    if len(masters) > 1:
        raise OptimizerNotRead(f"{model.folder.path} has two kinds of float32 copies; {REMEDY}")
    states = ModelSpace(model, masters[0] if masters else None)
    parameters = [parameter.name for parameter in model_parameters(model.shape)]
    keys = {states.key(key, name): model.places[name] for name in parameters for key in (WEIGHT, *MOMENTS)}
    model.folder.require_whole(keys)
    for key, place in keys.items():
        full = place.shape if place.layer is None else (model.shape.num_hidden_layers, *place.shape)
        stored = tensors[key].shape
        # Each layer is in cells of its own, so that one can be read alone.
        if not _holds(stored, full) or (place.layer is not None and stored[0] != full[0]):
            raise CheckpointError(
                f"{model.folder.path}: {key} has shape {stored}, but its parameter {full}; fetch it again"
            )
    return states


def _holds(stored: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether a stored shape is the tensor's, or that of a grid of its flattened cells."""
    if stored == full:
        return True
    grid = stored[:-1]
    if len(grid) != len(full) or not all(
        parts and size % parts == 0 for size, parts in zip(full, grid, strict=True)
    ):
        return False
    return prod(grid) * stored[-1] == prod(full)


@dataclass(frozen=True)
class _Shard:
    """A tensor rank's part of a parameter: a range of a bucket. key: of the bucket, without its state."""

    key: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BucketSpace:
    """States in the flat buffers of all ranks. shards_of: registered parameter -> its part on each tensor rank."""

    folder: DcpFolder
    shards_of: Mapping[str, list[_Shard]]

    def shards(self, state_key: str, parameter: str) -> list[Tensor]:
        state = "param" if state_key == WEIGHT else state_key
        return [
            self.folder.read(f"{shard.key}.{state}", TensorSlice((shard.start,), (prod(shard.shape),))).view(
                shard.shape
            )
            for shard in self.shards_of[parameter]
        ]


def _bucket_space(model: ShardedModel) -> BucketSpace:
    table, path = model.arguments.table, model.folder.path
    tensor = model.arguments.whole("tensor_model_parallel_size", 1)
    buffers = _buffers(model.folder)
    implementation = table.get("transformer_impl", "transformer_engine")
    if implementation not in ("local", "transformer_engine"):
        raise OptimizerNotRead(
            f"{path}: the modules of transformer_impl = {implementation!r:.40} are not known; {REMEDY}"
        )
    shards_of: dict[str, list[_Shard]] = {}
    for (stage, chunk), parameters in _chunks(model, implementation):
        last = stage == model.arguments.whole("pipeline_model_parallel_size", 1) - 1
        for rank in range(tensor):
            keys, sizes = buffers.pop((stage * tensor + rank, chunk), ([], []))
            buffered = [
                BufferedParameter(name, prod(shape), _is_shared(model, name))
                for name, shape in parameters.items()
            ]
            places = fill_buckets(buffered, sizes)
            if places is None:
                raise OptimizerNotRead(
                    f"{path}: the parameters of stage {stage}, chunk {chunk} of its args do not fill the {len(sizes)}"
                    f" optimizer buckets of tensor rank {rank} exactly; {REMEDY}"
                )
            for name, place in places.items():
                is_copy = name == HEAD and model.shape.tie_word_embeddings and last
                if not is_copy:
                    shard = _Shard(keys[place.bucket], place.start, parameters[name])
                    shards_of.setdefault(name, []).append(shard)
    if buffers:
        group, buffer = next(iter(buffers))
        raise OptimizerNotRead(
            f"{path} has an optimizer buffer {buffer} of group {group}, more than its args imply; {REMEDY}"
        )
    return BucketSpace(model.folder, shards_of)


def _is_shared(model: ShardedModel, name: str) -> bool:
    """Whether a parameter is an embedding that the first and the last stage have, which gets a bucket of its own."""
    tied = model.shape.tie_word_embeddings and model.arguments.whole("pipeline_model_parallel_size", 1) > 1
    return tied and name in (EMBEDDING, HEAD)


def _buffers(folder: DcpFolder) -> dict[tuple[int, int], tuple[list[str], list[int]]]:
    """Return (group of ranks, buffer) -> keys and sizes of its buckets; all states of each are there and alike."""
    found: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}
    states: dict[str, dict[str, int]] = {}
    for name, tensor in folder.tensors.items():
        match = _OF_A_GROUP.fullmatch(name)
        inner = _BUCKET.fullmatch(match[2]) if match else None
        if match is None or inner is None or len(tensor.shape) != 1:
            continue
        key = name.removesuffix(f".{inner[4]}")
        buckets = found.setdefault((int(match[1]), int(inner[1])), {})
        if buckets.setdefault(int(inner[3]), (key, tensor.shape[0]))[0] != key:
            raise OptimizerNotRead(f"{folder.path}: {name} is a second type of numbers in a buffer; {REMEDY}")
        states.setdefault(key, {})[inner[4]] = tensor.shape[0]
    for key, sizes in states.items():
        if sizes.keys() != {"param", *MOMENTS} or len(set(sizes.values())) != 1:
            raise OptimizerNotRead(f"{folder.path}: {key} has {dict(sizes)}, not the state of Adam; {REMEDY}")
    folder.require_whole(f"{key}.{state}" for key, sizes in states.items() for state in sizes)
    for place, buckets in found.items():
        if sorted(buckets) != list(range(len(buckets))):
            raise CheckpointError(
                f"{folder.path} lacks a bucket of buffer {place[1]}, group {place[0]}; fetch it again"
            )
    return {
        place: (
            [buckets[number][0] for number in range(len(buckets))],
            [buckets[i][1] for i in range(len(buckets))],
        )
        for place, buckets in found.items()
    }


def _chunks(
    model: ShardedModel, implementation: str
) -> Iterator[tuple[tuple[int, int], dict[str, tuple[int, ...]]]]:
    """Yield (stage, chunk) and its parameters in the order of its modules, name -> shape on a tensor rank."""
    arguments, path = model.arguments, model.folder.path
    if uneven := [name for name in _UNEVEN if arguments.table.get(name) not in (None, False, 0, [])]:
        raise OptimizerNotRead(
            f"{path}: {uneven[0]} = {arguments.table[uneven[0]]!r:.60} is not supported; {REMEDY}"
        )
    stages = arguments.whole("pipeline_model_parallel_size", 1)
    chunks = arguments.whole("virtual_pipeline_model_parallel_size", 1)
    layers = model.shape.num_hidden_layers
    if layers % (stages * chunks):
        raise OptimizerNotRead(
            f"{path}: {layers} layers do not make {stages} x {chunks} equal chunks; {REMEDY}"
        )
    size = layers // (stages * chunks)
    parameters = {parameter.name: parameter for parameter in model_parameters(model.shape)}
    tied = model.shape.tie_word_embeddings
    for chunk in range(chunks):
        for stage in range(stages):
            place = chunk * stages + stage
            names = [EMBEDDING, POSITIONS] if place == 0 else []
            names += in_module_order(parameters, range(place * size, (place + 1) * size), implementation)
            if place == stages * chunks - 1:
                names += [FINAL_NORM, FINAL_NORM.replace("weight", "bias"), HEAD]
            # A tied head is a parameter of its own where the embedding stands on another stage.
            known = [name for name in names if name in parameters or (name == HEAD and tied and place)]
            yield (stage, chunk), {name: _rank_shape(model, name, parameters) for name in known}


def _rank_shape(model: ShardedModel, name: str, parameters: Mapping[str, Parameter]) -> tuple[int, ...]:
    tensor = model.arguments.whole("tensor_model_parallel_size", 1)
    if name in (EMBEDDING, HEAD):
        shape: tuple[int, ...] | None = (model.rows // tensor, model.shape.hidden_size)
    else:
        shape = rank_shape(parameters[name], tensor)
    if shape is None or model.rows % tensor:
        raise OptimizerNotRead(
            f"{model.folder.path}: {tensor} tensor ranks cannot cut {name} evenly; {REMEDY}"
        )
    return shape
