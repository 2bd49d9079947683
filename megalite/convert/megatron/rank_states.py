"""The optimizer's state in one rank's files of `--ckpt-format torch`, of the plain and the distributed optimizer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.convert.foreign.unpickle import load_pickle
from megalite.convert.megatron.arguments import Arguments
from megalite.convert.megatron.buffers import BufferedParameter, bucket_sizes, fill_buckets
from megalite.convert.megatron.training_state import (
    MOMENTS,
    REMEDY,
    OptimizerNotRead,
    OptimizerScalars,
    optimizer_scalars,
)
from megalite.errors import CheckpointError
from megalite.topology.state import WEIGHT

ParameterKey = tuple[int, str]
"""Model chunk, and Megatron-LM's name."""
_MASTERS = "fp32_from_fp16_params"


@dataclass(frozen=True)
class RankParameters:
    """The parameters of one rank's file, in the order of its modules.

    shared: those that the first and the last stage have. stage: the pipeline rank. distributed: the path of the
    distributed optimizer's file, whether it exists or not.
    """

    path: Path
    distributed: Path
    arguments: Arguments
    stage: int
    chunks: Sequence[Mapping[str, Tensor]]
    shared: frozenset[ParameterKey]

    @property
    def all(self) -> dict[ParameterKey, Tensor]:
        return {
            (number, name): each for number, chunk in enumerate(self.chunks) for name, each in chunk.items()
        }


@dataclass(frozen=True)
class SavedRankStates:
    """state_key -> tensor of each parameter, as this rank has it; WEIGHT is the float32 master."""

    tensors: Mapping[ParameterKey, Mapping[str, Tensor]]
    scalars: OptimizerScalars


def open_states(saved: Any, parameters: RankParameters) -> SavedRankStates:
    """Open the optimizer's state without reading its tensors.

    saved: the `optimizer` of the rank's file. Raises OptimizerNotRead for a kind that is not read, CheckpointError for
    a damaged one.
    """
    if not isinstance(saved, Mapping):
        raise OptimizerNotRead(f"{parameters.path}: its optimizer is no single one; {REMEDY}")
    inner = saved.get("optimizer", saved)
    if not isinstance(inner, Mapping) or "param_groups" not in inner:
        raise OptimizerNotRead(f"{parameters.path}: its optimizer has no param_groups; {REMEDY}")
    groups, scaler = inner["param_groups"], saved.get("grad_scaler")
    if parameters.distributed.is_file():
        tensors, steps = _distributed(parameters), []
    else:
        state = inner.get("state")
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"{parameters.distributed} is missing: {parameters.path} is of a distributed optimizer, whose moments"
                " stand there; fetch it"
            )
        tensors = _plain(saved.get(_MASTERS), state, groups, parameters)
        steps = [entry["step"] for entry in state.values() if isinstance(entry, Mapping) and "step" in entry]
    return SavedRankStates(tensors, optimizer_scalars(groups, steps, scaler, parameters.path))


def _plain(
    masters: Any, state: Mapping[Any, Any], groups: Any, parameters: RankParameters
) -> dict[ParameterKey, dict[str, Tensor]]:
    """Assign the entries of the state to parameters: in a group they have the order of the modules."""
    path, weights = parameters.path, parameters.all
    without_decay = {key for key, tensor in weights.items() if tensor.dim() == 1 or key[1].endswith(".bias")}
    tensors: dict[ParameterKey, dict[str, Tensor]] = {}
    for number, group in enumerate(groups if isinstance(groups, list | tuple) else ()):
        ids = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(ids, list):
            raise OptimizerNotRead(f"{path}: its optimizer's groups list no params; {REMEDY}")
        decays = group.get("wd_mult", 1.0) != 0.0
        keys = [key for key in weights if (key not in without_decay) == decays] if ids else []
        copies = [weights[key] for key in keys]
        if masters is not None:
            copies = masters[number] if isinstance(masters, list) and len(masters) == len(groups) else []
        if len(ids) != len(keys) or len(copies) != len(keys) or any(key in tensors for key in keys):
            raise OptimizerNotRead(
                f"{path}: group {number} of its optimizer has {len(ids)} parameters, not the {len(keys)} with or"
                f" without weight decay; {REMEDY}"
            )
        for key, identity, copy in zip(keys, ids, copies, strict=True):
            entry = state.get(identity)
            moments = {name: entry.get(name) if isinstance(entry, Mapping) else None for name in MOMENTS}
            tensors[key] = _checked({WEIGHT: copy, **moments}, key, tuple(weights[key].shape), path)
    return _complete(tensors, weights, path)


def _distributed(parameters: RankParameters) -> dict[ParameterKey, dict[str, Tensor]]:
    """Cut the parameters out of the buffers, which are saved without the padding behind each bucket."""
    path = parameters.distributed
    content = load_pickle(path)
    if not isinstance(content, Mapping) or content.get("buckets_coalesced") is not True:
        raise OptimizerNotRead(
            f"{path} is of a Megatron-LM before February 2024 (no buckets_coalesced); save it again with"
            " --ckpt-convert-update-legacy-dist-opt-format"
        )
    tensors: dict[ParameterKey, dict[str, Tensor]] = {}
    for number, chunk in enumerate(parameters.chunks):
        buffers = content.get(number)
        if not isinstance(buffers, Mapping) or len(buffers) != 1:
            raise OptimizerNotRead(f"{path} has not one buffer for model chunk {number}; {REMEDY}")
        [buffer] = buffers.values()
        if not isinstance(buffer, Mapping):
            raise CheckpointError(f"{path}: buffer {number} holds no tensors; fetch it again")
        world: dict[str, Any] = {WEIGHT: buffer.get("param"), **{name: buffer.get(name) for name in MOMENTS}}
        numel = _require_flat(world, path)
        buffered = [
            BufferedParameter(name, tensor.numel(), (number, name) in parameters.shared)
            for name, tensor in chunk.items()
        ]
        sizes = bucket_sizes(buffered, _smallest_bucket(parameters, number))
        places = fill_buckets(buffered, sizes)
        if places is None or numel != {sum(sizes)}:
            raise OptimizerNotRead(
                f"{path} has {sorted(numel)} elements for chunk {number}, whose buckets have {sum(sizes)};"
                f" {REMEDY}"
            )
        for name, tensor in chunk.items():
            start = sum(sizes[: places[name].bucket]) + places[name].start
            tensors[number, name] = {
                key: values[start : start + tensor.numel()].view(tensor.shape)
                for key, values in world.items()
            }
    return tensors


def _smallest_bucket(parameters: RankParameters, chunk: int) -> int | None:
    """Return the elements that close a bucket of DistributedDataParallel, by the arguments; None: all are one."""
    arguments = parameters.arguments
    if not arguments.is_on("overlap_grad_reduce") or parameters.stage or chunk:
        return None
    if arguments.table.get("ddp_num_buckets") is not None:
        raise OptimizerNotRead(f"{parameters.distributed}: ddp_num_buckets is not supported; {REMEDY}")
    if arguments.is_on("overlap_param_gather_with_optimizer_step"):
        return None
    ranks = arguments.whole("tensor_model_parallel_size", 1) * arguments.whole(
        "pipeline_model_parallel_size", 1
    )
    data = arguments.whole("world_size", ranks) // ranks
    return arguments.whole("ddp_bucket_size", max(40_000_000, 1_000_000 * data))


def _require_flat(world: Mapping[str, Any], path: Path) -> set[int]:
    """Return the sizes of a buffer's states; raises CheckpointError unless they are flat and fit in the file."""
    for name, values in world.items():
        if not isinstance(values, Tensor) or values.dim() != 1 or not values.is_floating_point():
            raise CheckpointError(f"{path}: {name} is no flat tensor; fetch it again")
    _require_within(world.values(), path)
    return {values.numel() for values in world.values()}


def _checked(
    values: Mapping[str, Any], key: ParameterKey, shape: tuple[int, ...], path: Path
) -> dict[str, Tensor]:
    for name, tensor in values.items():
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or not tensor.is_floating_point():
            size = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise OptimizerNotRead(
                f"{path}: the optimizer's {name} of {key[1]} is {size}, not {shape} as its weights; {REMEDY}"
            )
    return dict(values)


def _complete(
    tensors: dict[ParameterKey, dict[str, Tensor]], weights: Mapping[ParameterKey, Tensor], path: Path
) -> dict[ParameterKey, dict[str, Tensor]]:
    if missing := [name for chunk, name in weights if (chunk, name) not in tensors]:
        raise OptimizerNotRead(f"{path}: its optimizer has no state of {missing[0]}; {REMEDY}")
    _require_within((tensor for states in tensors.values() for tensor in states.values()), path)
    return tensors


def _require_within(tensors: Iterable[Tensor], path: Path) -> None:
    """Raise CheckpointError if tensors claim more than the file: an expanded one can have any shape."""
    claimed = sum(prod(tensor.shape) * tensor.itemsize for tensor in tensors)
    if claimed > path.stat().st_size:
        raise CheckpointError(
            f"{path}: its optimizer has {claimed:,} bytes, but the file {path.stat().st_size:,}"
        )
