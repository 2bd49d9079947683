"""A torch distributed checkpoint of FSDP2 or torchtitan: its weights, AdamW's moments, step and hyperparameters."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.weights import require_no_others
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.foreign.adamw import (
    MOMENTS,
    STEP,
    common_step,
    group_notes,
    number,
    require_adamw,
    settings_of,
    trained_with,
)
from megalite.convert.foreign.checkpoint import ForeignCheckpoint, ImportOptions
from megalite.convert.foreign.inspect import tensor_lines
from megalite.convert.foreign.places import find_config
from megalite.convert.foreign.streamed import ImportedRun
from megalite.convert.foreign.whole_tensors import WholeTensorReader
from megalite.convert.huggingface.load import BUFFERS
from megalite.convert.torch_dcp.folder import optimizer_folder
from megalite.convert.torch_dcp.metadata import StoredTensor
from megalite.convert.torch_dcp.names import StoredNames, find_names, is_titan
from megalite.convert.torch_dcp.reader import DcpFolder
from megalite.errors import CheckpointError, counted
from megalite.families.registry import family_tensors
from megalite.families.tensors import FamilyTensor
from megalite.topology.parameters import EMBEDDING
from megalite.topology.shape import ModelShape

NEW_RUN = {"step": 0, "samples": 0, "tokens": 0}
_TITAN_BUFFERS = ("freqs_cis", "rope.cache")
_STEPS = ("train_state.step", "trainer.step", "global_step", "step", "iteration")
_TOKENS = ("train_state.ntokens_seen",)
_STEP_FOLDER = re.compile(r"(?:step|checkpoint|global_step|epoch_\d+_step)[-_]?(\d{1,15})", re.ASCII)
# State of torchtitan and of common scripts that stands beside a model without a prefix.
_BESIDE = re.compile(r"(optim\w*|lr_scheduler\w*|scheduler\w*|train_state|trainer|dataloader|rng\w*|ema)\.")
_SETTINGS = (
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "decoupled_weight_decay",
)


class _States:
    """The model and its optimizer in one folder, or in two as Accelerate writes them."""

    def __init__(self, folders: Sequence[DcpFolder]):
        self.folders = folders
        self.tensors: dict[str, tuple[DcpFolder, StoredTensor]] = {}
        self.objects: dict[str, DcpFolder] = {}
        for folder in folders:
            for name, tensor in folder.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"{folder.path} has {name}, which {folders[0].path} has too")
                self.tensors[name] = folder, tensor
            self.objects |= dict.fromkeys(folder.metadata.objects, folder)

    def tensor(self, name: str) -> Tensor:
        folder, tensor = self.tensors[name]
        return folder.read(name, full_slice(tensor.shape))

    def value(self, name: str) -> Any:
        """Return a small tensor or an object; None if neither exists."""
        if name in self.tensors:
            return self.tensor(name) if prod(self.tensors[name][1].shape) == 1 else None
        return self.objects[name].object(name) if name in self.objects else None


def open_checkpoint(place: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a folder's weights, with AdamW's moments and step if it has them; its data begins anew.

    Raises CheckpointError when it does not hold exactly the model of its config.json, or no config.json is known.
    """
    model = DcpFolder(place)
    hf_config = options.hf_config or find_config(place)
    if hf_config is None:
        origin = "torchtitan" if is_titan(model.tensors) else "torch.distributed.checkpoint"
        raise CheckpointError(
            f"{place} was written by {origin} and does not describe its model; name a config.json in Hugging Face's"
            " format, with the model's sizes and rotary base, with --hf-config"
        )
    beside = optimizer_folder(place)
    states = _States([model] if beside is None else [model, DcpFolder(beside)])
    shape = shape_of_folder(str(hf_config))
    names = find_names(states.tensors, shape, place)
    tensors = family_tensors(shape)
    _check(states, names, tensors, shape)
    groups = _groups(states, names, tensors)
    config: dict[str, Any] = {"model": {"weights": str(place)}}
    optimizer: dict[str, float] = {}
    trained = names.moments is not None
    if trained:
        require_adamw([*groups.values()], place)
        steps = ((name, states.value(name)) for name in (names.state(tensor, STEP) for tensor in tensors))
        optimizer = {STEP: common_step(steps, place)}
        config = {"optimizer": {"name": "adamw", **settings_of([*groups.values()])}}
    step = _count(states, _STEPS)
    if step is None:
        step = int(optimizer[STEP]) if trained else _step_of_name(place)
    tokens = _count(states, _TOKENS) or 0
    trainer_state = {"step": step or 0, "samples": 0, "tokens": tokens} if trained else NEW_RUN
    keys = (WEIGHT, *MOMENTS) if trained else (WEIGHT,)
    run = ImportedRun(shape, config, state_keys=keys, trainer_state=trainer_state, optimizer=optimizer)
    reader = WholeTensorReader(shape, _loader(states, names, shape), place)
    return ForeignCheckpoint(run, reader, step, hf_config, list(_notes(states, names, tensors, groups)))


def describe(place: Path) -> Iterator[str]:
    """Yield the lines of `megalite convert inspect`."""
    beside = optimizer_folder(place)
    for folder in [DcpFolder(place)] + ([] if beside is None else [DcpFolder(beside)]):
        files = {chunk.bytes.file for tensor in folder.tensors.values() for chunk in tensor.chunks}
        yield f"{folder.path}: a torch distributed checkpoint, {len(folder.tensors):,} tensors"
        step = _count(_States([folder]), _STEPS)
        known = "" if step is None else f"step {step:,}; "
        yield f"  {known}{folder.size_bytes:,} bytes, tensors in {counted(len(files), 'file')}"
        chunks = {
            name: (tensor.shape, f"{tensor.dtype}  {counted(len(tensor.chunks), 'chunk')}")
            for name, tensor in folder.tensors.items()
        }
        yield from tensor_lines(chunks)
        if objects := sorted(folder.metadata.objects):
            yield f"  {counted(len(objects), 'object')}: {', '.join(objects[:8])}{', ...' * (len(objects) > 8)}"


def _loader(states: _States, names: StoredNames, shape: ModelShape) -> Callable[[str, FamilyTensor], Tensor]:
    def load(state_key: str, tensor: FamilyTensor) -> Tensor:
        name = names.weight(tensor) if state_key == WEIGHT else names.state(tensor, state_key)
        values = states.tensor(name)
        heads = names.heads(tensor, shape)
        return values if heads is None else halves_of_heads(values, heads)

    return load


def halves_of_heads(values: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from rotated pairs (0, 1), (2, 3), ... to pairs of its two halves.

    values: [heads * head_dim, ...]. Source: the conversion of Llama's weights in transformers.
    """
    pairs = values.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(values.shape)


def _check(states: _States, names: StoredNames, tensors: Sequence[FamilyTensor], shape: ModelShape) -> None:
    """Raise CheckpointError for what is missing, unknown or of another shape, by name."""
    place = states.folders[0].path
    expected = {names.weight(tensor): tensor for tensor in tensors}
    advice = "use the config.json of this model"
    extra = {name for name in states.tensors.keys() - expected.keys() if _is_of_model(name, names)}
    head = names.head(shape)
    if shape.tie_word_embeddings and head in extra and _are_tied(states, names, tensors, head):
        extra.remove(head)
    require_no_others(place, expected.keys() - states.tensors.keys(), extra, advice)
    if names.moments is not None:
        expected |= {names.state(tensor, key): tensor for tensor in tensors for key in MOMENTS}
        require_no_others(
            place, expected.keys() - states.tensors.keys(), (), "every parameter needs AdamW's state"
        )
        known = expected.keys() | {names.state(tensor, STEP) for tensor in tensors}
        more = {name for name in states.tensors if name.startswith(names.moments) and name not in known}
        more = {name for name in more if not _is_setting(name)}
        require_no_others(place, (), more, advice, "AdamW of this model does not have")
    for name, tensor in expected.items():
        folder, stored = states.tensors[name]
        if stored.shape != tensor.shape:
            raise CheckpointError(
                f"{place}: {name} has shape {stored.shape}, but its config.json gives {tensor.shape}; {advice}"
            )
        if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise CheckpointError(
                f"{place}: {name} is of {stored.dtype}; only float, bf16 and fp16 tensors are read"
            )
        folder.require_whole([name])


def _is_of_model(name: str, names: StoredNames) -> bool:
    if names.moments is not None and name.startswith(names.moments):
        return False
    inner = name.removeprefix(names.model)
    if not name.startswith(names.model) or name.endswith((*BUFFERS, *_TITAN_BUFFERS)):
        return False
    return bool(names.model) or not (_BESIDE.match(inner) or _is_setting(inner) or inner in _STEPS)


def _is_setting(name: str) -> bool:
    return "param_groups." in name


def _are_tied(states: _States, names: StoredNames, tensors: Sequence[FamilyTensor], head: str) -> bool:
    embedding = next(names.weight(tensor) for tensor in tensors if EMBEDDING in tensor.parts)
    same_shape = (
        embedding in states.tensors and states.tensors[embedding][1].shape == states.tensors[head][1].shape
    )
    return same_shape and torch.equal(states.tensor(head), states.tensor(embedding))


def _groups(
    states: _States, names: StoredNames, tensors: Sequence[FamilyTensor]
) -> dict[str, Mapping[str, Any]]:
    """Return parameter -> the settings of its group, which are stored by number, or for each parameter anew."""
    if names.moments is None:
        return {}
    before, _, inner = names.moments.rpartition("state.")
    groups: dict[str, Mapping[str, Any]] = {}
    number_of = 0
    while states.value(place := f"{before}param_groups.{number_of}.lr") is not None:
        place = place.removesuffix("lr")
        members = states.value(f"{place}params")
        known = members if isinstance(members, list) and all(isinstance(x, str) for x in members) else [place]
        groups |= dict.fromkeys(known, _group(states, place))
        number_of += 1
    if groups:
        return groups
    parameters = [inner + names.of(tensor) for tensor in tensors]
    return {name: _group(states, f"{before}param_groups.{name}.") for name in parameters}


def _group(states: _States, place: str) -> dict[str, Any]:
    group = {key: states.value(place + key) for key in _SETTINGS}
    return {key: value for key, value in group.items() if value is not None}


def _count(states: _States, endings: Sequence[str]) -> int | None:
    """Return a counter that is stored under one of these names, behind any prefix but the optimizer's."""
    for ending in endings:
        names = [*states.tensors, *states.objects]
        for name in names:
            outside = not re.search(
                r"(^|\.)(state|param_groups|\w*scheduler\w*|dataloader\w*)\.", name.removesuffix(ending)
            )
            if (name == ending or name.endswith(f".{ending}")) and outside:
                count = number(states.value(name))
                if count is not None and 0 <= count < 2**53:
                    return int(count)
    return None


def _step_of_name(place: Path) -> int | None:
    match = _STEP_FOLDER.fullmatch(place.resolve().name)
    return int(match[1]) if match else None


def _notes(
    states: _States,
    names: StoredNames,
    tensors: Sequence[FamilyTensor],
    groups: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    if names.titan is not None:
        yield "torchtitan's names; rows of query and key are reordered for a rotary embedding of halves"
    yield from trained_with(settings_of([*groups.values()]))
    vectors = [names.of(tensor) for tensor in tensors if len(tensor.shape) == 1]
    yield from group_notes(groups, [name for name in groups if name.endswith(tuple(vectors))])
    weights = {states.tensors[names.weight(tensor)][1].dtype for tensor in tensors}
    if names.moments is not None and weights != {torch.float32}:
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weights))
        yield f"weights of {kinds} without float32 masters; they are written as float32 with these values"
