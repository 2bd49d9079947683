"""Read a Megatron-LM checkpoint of `--ckpt-format torch_dist` as canonical tensors, one at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.region_reader import TYPES
from megalite.checkpoint.regions import full_slice, index_in
from megalite.checkpoint.weights import WeightReader, require_no_others
from megalite.convert.finite import require_finite
from megalite.convert.foreign.checkpoint import ForeignCheckpoint, ImportOptions
from megalite.convert.foreign.inspect import tensor_lines
from megalite.convert.foreign.streamed import ImportedRun
from megalite.convert.foreign.unpickle import load_pickle, require_undamaged
from megalite.convert.megatron.arguments import (
    OF_INTEREST,
    Arguments,
    megatron_shape,
    not_built,
    true_vocab_size,
)
from megalite.convert.megatron.folder import COMMON
from megalite.convert.megatron.names import part_of
from megalite.convert.megatron.rank_files import arguments_in
from megalite.convert.megatron.sharded_names import GlobalPlace, global_name, global_places, is_model_key
from megalite.convert.megatron.sharded_states import SavedStates, ShardedModel, find_states, read_place
from megalite.convert.megatron.training_state import (
    OptimizerNotRead,
    precision,
    require_masters_of,
    trained_run,
    training_notes,
)
from megalite.convert.torch_dcp.reader import DcpFolder
from megalite.errors import CheckpointError
from megalite.topology.parameters import EMBEDDING, HEAD, Parameter, model_parameters
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import WEIGHT

_CORE = 3.0
"""The checkpoint_version whose order of query, key and value rows megatron-core has."""


@dataclass
class GlobalReader(WeightReader):
    """Regions of canonical tensors: the float32 masters and moments where `states` has them, else the weights."""

    model: ShardedModel
    states: SavedStates | None
    # A tensor at once: its rows stand in another order.
    block_elements: int = field(default=1 << 62, init=False)

    def __post_init__(self) -> None:
        self._parts = {
            part.name: (parameter, index)
            for parameter in model_parameters(self.model.shape)
            for index, part in enumerate(parameter.spec.parts)
        }

    def close(self) -> None:
        """No file is open between two reads."""

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor. Raises CheckpointError where masters are not those of the weights."""
        parameter, index = self._parts[name]
        path, place = self.model.folder.path, self.model.places[parameter.name]
        if self.states is None:
            shards = [read_place(self.model.folder, place.key, place)]
        else:
            shards = self.states.shards(state_key, parameter.name)
        values = self._region(parameter, index, shards, region)
        if self.states is not None and state_key == WEIGHT:
            stored = [read_place(self.model.folder, place.key, place)]
            require_masters_of(self._region(parameter, index, stored, region), values, name, path)
        require_finite(
            values, name if state_key == WEIGHT else f"{state_key} of {name}", path, region.offsets
        )
        return values

    def _region(self, parameter: Parameter, index: int, shards: list[Tensor], region: TensorSlice) -> Tensor:
        whole = part_of(parameter, index, shards, self.model.shape, _CORE)
        return whole[index_in(region, full_slice(tuple(whole.shape)))]


def open_sharded(path: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a torch_dist checkpoint with its training state, or its weights alone where it has none that is read.

    path: of the iteration. Raises CheckpointError where the model is not built here, or a tensor is missing, of another
    shape, or of no parameter.
    """
    require_undamaged(path / COMMON)
    common, arguments, iteration = _common(path)
    model = _open_model(path, arguments, options.vocab_size)
    notes: list[str] = []
    try:
        found = find_states(model, common.get("optimizer"))
    except OptimizerNotRead as error:
        found = None
        notes.append(f"the optimizer's state was left: {error}")
    if found is None:
        dtype = model.folder.tensors[model.places[EMBEDDING].key].dtype
        for place in model.places.values():
            dtype = torch.promote_types(dtype, model.folder.tensors[place.key].dtype)
        run = ImportedRun(model.shape, {"model": {"weights": str(path)}}, dtype)
        return ForeignCheckpoint(run, GlobalReader(model, None), iteration, notes=notes)
    states, scalars = found
    run = trained_run(model.shape, arguments, iteration, scalars)
    notes.extend(training_notes(model.shape, arguments, scalars))
    opened = GlobalReader(model, states)
    return ForeignCheckpoint(run, opened, iteration, notes=notes, precision=precision(arguments))


def describe_sharded(path: Path) -> Iterator[str]:
    """Yield the lines on a torch_dist checkpoint; no tensor is read."""
    common, arguments, iteration = _common(path)
    folder = DcpFolder(path)
    table = arguments.table
    sizes = [table.get(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline")]
    yield f"{path}: a Megatron-LM checkpoint of global tensors (torch_dist)"
    yield f"  iteration {iteration}, saved by tensor {sizes[0]} x pipeline {sizes[1]}; {folder.size_bytes:,} bytes"
    yield f"  args: {', '.join(f'{name} {table[name]}' for name in OF_INTEREST if name in table)}"
    optimizer = common.get("optimizer")
    if isinstance(optimizer, Mapping) and "param_state_sharding_type" in optimizer:
        yield f"  distributed optimizer, {optimizer['param_state_sharding_type']}"
    if foreign := list(not_built(arguments)):
        yield f"  not supported: {', '.join(foreign)}"
    shown = {name: tensor for name, tensor in folder.tensors.items() if is_model_key(name)}
    yield f"{len(shown)} tensors of the model, {len(folder.tensors) - len(shown)} of the optimizer"
    yield from tensor_lines({name: (tensor.shape, tensor.dtype) for name, tensor in shown.items()})


def _common(path: Path) -> tuple[Mapping[str, Any], Arguments, int | None]:
    """Return the content of common.pt, its args and its iteration."""
    content = load_pickle(path / COMMON)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path / COMMON} holds no dict; fetch it again")
    iteration = content.get("iteration")
    whole = iteration if isinstance(iteration, int) and 0 <= iteration < 1 << 53 else None
    return content, arguments_in(content, path / COMMON), whole


def _open_model(path: Path, arguments: Arguments, vocab_size: int | None) -> ShardedModel:
    """Open the folder and account for each of the model's tensors."""
    shape = megatron_shape(arguments, vocab_size=1)  # an unsupported model is refused first
    folder = DcpFolder(path)
    shapes = {key: tensor.shape for key, tensor in folder.tensors.items()}
    places: dict[str, GlobalPlace] = {}
    extra: set[str] = set()
    for name, place in global_places(shapes, shape.num_hidden_layers, gated=shape.gated_mlp):
        if name is None or name in places:
            extra.add(place.key)
        else:
            places[name] = place
    if EMBEDDING not in places or len(places[EMBEDDING].shape) != 2:
        raise CheckpointError(f"{path} has no word_embeddings of 2 dims; fetch every file of the checkpoint")
    rows = places[EMBEDDING].shape[0]
    shape = megatron_shape(arguments, true_vocab_size(arguments, rows, vocab_size))
    parameters = {parameter.name: parameter for parameter in model_parameters(shape)}
    extra |= {place.key for name, place in places.items() if name not in parameters}
    missing = {global_name(name) for name in parameters if name not in places}
    require_no_others(
        path, missing, extra, "correct its args, or fetch it again", "the model of its args lacks"
    )
    folder.require_whole({place.key for place in places.values()})
    for name, place in places.items():
        full = parameters[name].spec.full_shape
        expected = (rows, *full[1:]) if name in (EMBEDDING, HEAD) else full
        tensor = folder.tensors[place.key]
        if place.shape != expected:
            stacked = expected if place.layer is None else (shape.num_hidden_layers, *expected)
            raise CheckpointError(
                f"{path}: {place.key} has shape {tensor.shape}, but its args give {stacked}"
            )
        if tensor.dtype not in TYPES.values():
            raise CheckpointError(
                f"{path}: {place.key} is {tensor.dtype}; save the weights as bf16, fp16, fp32 or fp64"
            )
    return ShardedModel(folder, shape, arguments, places, rows)
