"""A checkpoint folder of Hugging Face's Trainer: weights, AdamW's moments, step, and the position in the data."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.tensor_header import HeaderEntry
from megalite.checkpoint.weights import WeightReader
from megalite.config.sources.huggingface import shape_of_folder
from megalite.config.sources.peft import ADAPTER_FILE
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
from megalite.convert.foreign.streamed import ImportedRun
from megalite.convert.foreign.unpickle import Foreign, load_pickle, require_undamaged
from megalite.convert.foreign.whole_tensors import WholeTensorReader
from megalite.convert.huggingface.files import header_of, headers
from megalite.convert.huggingface.load import HuggingFaceReader
from megalite.convert.huggingface.origin import read_object
from megalite.convert.trainer.folder import (
    ARGUMENTS,
    SCALER,
    STATE,
    is_adapter,
    optimizer_file,
    process_count,
)
from megalite.convert.trainer.parameters import match_parameters
from megalite.errors import CheckpointError, counted
from megalite.families.registry import FAMILIES, family_tensors
from megalite.families.tensors import FamilyTensor
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

_AGAIN = "fetch the checkpoint again"


class TrainerReader(WeightReader):
    """The weights of the folder's safetensors files, and moments from the optimizer's file, which is mapped."""

    block_elements = WholeTensorReader.block_elements

    def __init__(self, weights: HuggingFaceReader, moments: WholeTensorReader):
        self._weights, self._moments = weights, moments
        self.weight_dtypes = weights.dtypes

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor: the weights (state key WEIGHT) or a moment."""
        return (self._weights if state_key == WEIGHT else self._moments).read(state_key, name, region)

    def close(self) -> None:
        self._weights.close()


def open_checkpoint(place: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a folder's weights, moments, step and position.

    Raises CheckpointError when it does not hold exactly the model of its config.json, or not AdamW's state of it.
    """
    if is_adapter(place):
        raise CheckpointError(
            f"{place} holds an adapter, not a whole model; name it in adapter.path to go on from its weights, or"
            " merge it into its model with peft's merge_and_unload and import that"
        )
    counters = _counters(place)
    shape = shape_of_folder(str(place))
    content = _optimizer(place, checked=True)
    groups = content["param_groups"]
    require_adamw(groups, place)
    tensors = family_tensors(shape)
    keys = match_parameters(content, place, tensors, FAMILIES[shape.family].names.in_models)
    states = {name: content["state"][key] for name, key in keys.items()}
    group_of = {key: group for group in groups for key in group["params"]}
    step = common_step(((name, state[STEP]) for name, state in states.items()), place)
    samples = counters["step"] * (_sequences_of_step(place) or 0)
    run = ImportedRun(
        shape,
        {"optimizer": {"name": "adamw", **settings_of(groups)}},
        state_keys=(WEIGHT, *MOMENTS),
        trainer_state={**counters, "samples": samples},
        optimizer={STEP: step, **_loss_scale(place)},
    )
    reader = TrainerReader(HuggingFaceReader(place, shape), _moments(place, shape, states))
    vectors = [tensor.name for tensor in tensors if len(tensor.shape) == 1]
    others = group_notes({name: group_of[key] for name, key in keys.items()}, vectors)
    return ForeignCheckpoint(run, reader, counters["step"], place, [*_notes(reader, place, groups), *others])


def describe(place: Path) -> Iterator[str]:
    """Yield the lines of `megalite convert inspect`."""
    if is_adapter(place):
        yield f"{place}: a Hugging Face Trainer checkpoint of an adapter, step {_counters(place)['step']:,}"
        yield from _lines(header_of(place / ADAPTER_FILE))
        return
    counters, content = _counters(place), _optimizer(place)
    tensors = {name: entry for entries in headers(place).values() for name, entry in entries.items()}
    states = content["state"]
    keys = sorted({str(key) for state in states.values() if isinstance(state, Mapping) for key in state})
    yield f"{place}: a Hugging Face Trainer checkpoint, {len(tensors):,} tensors"
    sequences = _sequences_of_step(place)
    batch = "" if sequences is None else f", {sequences:,} sequences a step"
    yield f"  step {counters['step']:,}{batch}; {counted(process_count(place), 'random state')}"
    sizes = " and ".join(str(len(group["params"])) for group in content["param_groups"])
    yield f"  optimizer: groups of {sizes} parameters with {', '.join(keys)}"
    for name, value in settings_of(content["param_groups"]).items():
        yield f"  optimizer.{name} = {value}"
    yield from _lines(tensors)


def _lines(tensors: Mapping[str, HeaderEntry]) -> Iterator[str]:
    width = max(map(len, tensors), default=0)
    for name, entry in tensors.items():
        yield f"  {name:<{width}}  {' x '.join(map(str, entry.shape)):>16}  {entry.dtype}"


def _moments(place: Path, shape: ModelShape, states: Mapping[str, Mapping[str, Any]]) -> WholeTensorReader:
    def load(state_key: str, tensor: FamilyTensor) -> Tensor:
        values: Tensor = states[tensor.name][state_key]
        return values

    return WholeTensorReader(shape, load, optimizer_file(place))


def _optimizer(place: Path, *, checked: bool = False) -> Mapping[str, Any]:
    """Return the optimizer's state_dict; its tensors are mapped."""
    path = optimizer_file(place)
    if path is None:
        raise CheckpointError(f"{place} has no optimizer.pt; {_AGAIN}")
    if checked:
        require_undamaged(path)
    content = load_pickle(path)
    groups = content.get("param_groups") if isinstance(content, Mapping) else None
    sound = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    if not sound or not groups or not isinstance(content.get("state"), Mapping):
        raise CheckpointError(f"{path} holds no state and param_groups of an optimizer; {_AGAIN}")
    return content


def _counters(place: Path) -> dict[str, int]:
    content = read_object(place / STATE, _AGAIN)
    step, tokens = (content.get(key) for key in ("global_step", "num_input_tokens_seen"))
    if not isinstance(step, int) or not 0 <= step < 2**53:
        raise CheckpointError(f"{place / STATE} has no global_step; {_AGAIN}")
    return {"step": step, "tokens": tokens if isinstance(tokens, int) and 0 <= tokens < 2**53 else 0}


def _sequences_of_step(place: Path) -> int | None:
    """Return the global batch: sequences of a process x accumulation x processes; None where one is not known."""
    batch = read_object(place / STATE, _AGAIN).get("train_batch_size")
    arguments, processes = _arguments(place), process_count(place)
    factors = (batch, arguments.get("gradient_accumulation_steps"), processes)
    if not all(isinstance(factor, int) and 0 < factor < 2**24 for factor in factors):
        return None
    if _processes_said(arguments) not in (None, processes):
        return None
    return int(factors[0] * factors[1] * factors[2])  # type: ignore[operator]


def _arguments(place: Path) -> Mapping[str, Any]:
    """Return the fields of TrainingArguments; {} for a file that cannot be read."""
    try:
        arguments = load_pickle(place / ARGUMENTS)
    except (
        CheckpointError
    ):  # it is only asked for counts, and other libraries have classes of their own in it
        return {}
    return arguments.fields if isinstance(arguments, Foreign) else {}


def _processes_said(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of processes of the run, which Accelerate's PartialState has; None where it is not known."""
    state = arguments.get("distributed_state")
    count = state.fields.get("num_processes") if isinstance(state, Foreign) else None
    return count if isinstance(count, int) and count > 0 else None


def _loss_scale(place: Path) -> dict[str, float]:
    """Return the state of torch's GradScaler, which fp16 has; {} where it has none that can be."""
    if not (place / SCALER).is_file():
        return {}
    content = load_pickle(place / SCALER)
    scale, since = (
        number(content.get(key)) if isinstance(content, Mapping) else None
        for key in ("scale", "_growth_tracker")
    )
    if scale is None or scale <= 0 or since is None or not 0 <= since < 2**53:
        return {}
    return {"loss_scale": scale, "loss_scale_steps_since_change": int(since), "loss_scale_overflows_left": 1}


def _notes(reader: TrainerReader, place: Path, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from trained_with(settings_of(groups))
    rate = number(groups[0].get("lr"))
    if rate is not None and rate != number(groups[0].get("initial_lr", rate)):
        yield f"the scheduler's learning rate was {rate:g}; learning_rate above is the one that it starts from"
    kinds = sorted(str(dtype).removeprefix("torch.") for dtype in reader.weight_dtypes)
    if kinds != ["float32"]:
        yield f"weights of {', '.join(kinds)}; they are written as float32 with these values"
    said, random_states = _processes_said(_arguments(place)), process_count(place)
    if said is not None and said != random_states:
        yield (
            f"{ARGUMENTS} says {counted(said, 'rank')}, but the folder has {counted(random_states, 'random state')}"
            " (rng_state*.pth), as after a run whose nodes each keep their own: the global batch is not known"
        )
    elif _sequences_of_step(place) is None:
        yield f"the global batch is not known from {STATE} and {ARGUMENTS}"
    if (place / SCALER).is_file() and not _loss_scale(place):
        yield f"{SCALER} has no finite loss scale above zero: in fp16 a run begins with the one of its settings"
