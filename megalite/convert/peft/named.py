"""Adapters that requests name: find one, and check that it can be computed beside a model's own weights. No torch."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import find_checkpoint, require_whole
from megalite.checkpoint.manifest import Base
from megalite.config.peft_names import adapted_linears, fused_with_others, peft_names
from megalite.config.sources.peft import ADAPTER_CONFIG, ADAPTER_FILE, adapter_of_folder
from megalite.convert.huggingface.files import header_of, is_folder_of_weights
from megalite.convert.peft.base import base_of, stated_base
from megalite.convert.weight_source import WeightSource
from megalite.errors import CheckpointError, ConfigError, listed
from megalite.topology.adapter import Lora, Prefix
from megalite.topology.parameters import trained_tensors
from megalite.topology.shape import ModelShape

# They change no weight.
_FREE_FIELDS = ("max_position_embeddings", "initializer_range", "adapter")
_WHOLE_MODEL = "{} holds a whole model, not an adapter; name it as MODEL"
_NAME_ITS_MODEL = "name the model that it was trained on as MODEL"


@dataclass(frozen=True)
class AdaptedModel:
    """The model that adapters stand beside. weights: its Hugging Face folder. int8: whether its linears are int8."""

    weights: Path
    shape: ModelShape
    int8: bool


def find_adapter(name: str, path: Path, model: AdaptedModel) -> WeightSource:
    """Return the low-rank adapter in a PEFT folder, a checkpoint or a run folder.

    Raises CheckpointError, with the adapter's name, if there is none, if it is damaged, if it changes more than linears
    by low ranks, or if it belongs to other weights.
    """
    try:
        if (path / ADAPTER_CONFIG).is_file():
            return _of_peft(path, model)
        if is_folder_of_weights(path):
            raise CheckpointError(_WHOLE_MODEL.format(path))
        return _of_checkpoint(find_checkpoint(path), model)
    except CheckpointError as error:
        raise CheckpointError(f"the adapter {name}: {error}") from error
    except ConfigError as error:
        problems = "; ".join(f"{each.message}; {each.remedy}" for each in error.problems)
        raise CheckpointError(f"the adapter {name}: {problems}") from error


def _of_peft(folder: Path, model: AdaptedModel) -> WeightSource:
    shape = replace(model.shape, adapter=adapter_of_folder(folder, model.shape.family))
    _require_low_ranks(shape, folder, f"name {folder} as MODEL, which merges it")
    if (fused := fused_with_others(shape)) is not None:
        raise CheckpointError(f"{folder} adapts {fused}, which holds several linears; merge it with PEFT")
    _require_base(stated_base(folder), model, folder)
    names = peft_names(shape)
    expected = {names[theirs]: size for theirs, size in trained_tensors(shape).items()}
    stored = {theirs: entry.shape for theirs, entry in header_of(folder / ADAPTER_FILE).items()}
    if differing := sorted(expected.keys() ^ stored.keys()):
        other = "lacks" if differing[0] in expected else "has, beyond the model's linears,"
        raise CheckpointError(f"{folder} {other} {listed(differing)}; {_NAME_ITS_MODEL}")
    for theirs, size in expected.items():
        if stored[theirs] != size:
            sizes = f"{list(stored[theirs])}, and the model has {list(size)}"
            raise CheckpointError(f"{folder}: {theirs} is {sizes}; {_NAME_ITS_MODEL}")
    return WeightSource(folder, "peft", shape)


def _of_checkpoint(checkpoint: Path, model: AdaptedModel) -> WeightSource:
    manifest = require_whole(checkpoint)
    check_coverage(manifest, checkpoint)
    merge = f"merge it (megalite convert export {checkpoint} OUTPUT) and name OUTPUT as MODEL"
    _require_low_ranks(manifest.model, checkpoint, merge)
    _require_base(manifest.base, model, checkpoint)
    here, there = asdict(model.shape), asdict(manifest.model)
    for field, value in here.items():
        if there.get(field) != value and field not in _FREE_FIELDS:
            sizes = f"has {field} {there.get(field)}, and the model {value}"
            raise CheckpointError(f"the model of {checkpoint} {sizes}; {_NAME_ITS_MODEL}")
    return WeightSource(checkpoint, "checkpoint", replace(model.shape, adapter=manifest.model.adapter))


def _require_low_ranks(shape: ModelShape, folder: Path, merge: str) -> None:
    """Raise CheckpointError if an adapter is more than A and B of linears. merge: how to merge it."""
    adapter = shape.adapter
    if adapter is None:
        raise CheckpointError(_WHOLE_MODEL.format(folder))
    # Rows reach experts without the adapter that their request has named.
    of_experts = isinstance(adapter, Lora) and any(of_expert for _, of_expert in adapted_linears(shape))
    if isinstance(adapter, Prefix):
        message = "is a prefix, which stands in front of every request of a model"
        raise CheckpointError(f"{folder} {message}; name it as MODEL, without --adapter")
    beyond = {
        "DoRA's magnitudes": adapter.dora,
        "adapters of experts": of_experts,
        f"whole modules ({', '.join(adapter.modules_to_save)})": bool(adapter.modules_to_save),
        f"trained biases (bias = {adapter.bias!r})": adapter.bias != "none",
    }
    if present := [each for each, is_there in beyond.items() if is_there]:
        raise CheckpointError(
            f"{folder} has {' and '.join(present)}, which no request can have alone; {merge}"
        )


def _require_base(base: Base | None, model: AdaptedModel, folder: Path) -> None:
    """Raise CheckpointError if an adapter says that it belongs to other weights than the model's."""
    # Rounded weights are no base's own: sizes alone can be compared.
    if base is None or model.int8 or base.fingerprint == base_of(str(model.weights)).fingerprint:
        return
    raise CheckpointError(
        f"{folder} was trained on other weights ({base.weights}) than those of {model.weights}; {_NAME_ITS_MODEL}"
    )
