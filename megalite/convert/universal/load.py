"""DeepSpeed universal checkpoints of Hugging Face models, as ds_to_universal writes them, read tensor by tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.regions import full_slice, index_in
from megalite.checkpoint.weights import WeightReader, require_no_others
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.finite import require_finite
from megalite.convert.foreign import ForeignCheckpoint, ImportOptions
from megalite.convert.foreign_pickle import load_pickle, require_undamaged
from megalite.convert.huggingface.load import BUFFERS
from megalite.convert.streamed import ImportedRun
from megalite.convert.universal.folder import (
    MODEL_STATES,
    MOMENTS,
    OPTIMIZER_STATE,
    STATE_FILES,
    STEP,
    WEIGHTS,
    ZERO,
    find_config,
)
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, family_tensors
from megalite.topology.parameters import EMBEDDING, HEAD, canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

_WRAPPER = "module."
_SETTINGS = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""Their name of a hyperparameter -> ours."""


@dataclass(frozen=True)
class UniversalFolder:
    """The files of a universal folder, whatever model they hold."""

    path: Path

    @cached_property
    def names(self) -> list[str]:
        """The parameters, as they are stored."""
        return sorted(each.name for each in (self.path / ZERO).iterdir() if each.is_dir())

    def files(self, name: str) -> list[str]:
        """Return the states that a parameter has: fp32, exp_avg, ..."""
        return sorted(each.stem for each in (self.path / ZERO / name).glob("*.pt"))

    def tensor(self, name: str, state: str, *, checked: bool = False) -> Tensor:
        """Read one state of a parameter, a name of `files`. checked: verify the file's checksums first."""
        path = self.path / ZERO / name / f"{state}.pt"
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: every parameter needs {', '.join(STATE_FILES)}, which AdamW under ZeRO saves for"
                " trained parameters; other optimizers and frozen parameters are not supported"
            )
        if checked:
            require_undamaged(path)
        content = load_pickle(path)
        # Under ZeRO 3 it is the flat tensor itself.
        values = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise CheckpointError(f"{path} holds no tensor of a parameter; convert the checkpoint again")
        return values

    @cached_property
    def optimizer(self) -> Mapping[str, Any]:
        """Return the optimizer state that belongs to no parameter: groups, loss scale."""
        return _table(self.path / ZERO / OPTIMIZER_STATE)

    @cached_property
    def step(self) -> float:
        """How many updates AdamW made. Raises CheckpointError where parameters differ in it, or none says so."""
        paths = [self.path / ZERO / name / STEP for name in self.names]
        steps = {path: _number(load_pickle(path), path) for path in paths if path.is_file()}
        if not steps:
            return self._step_of_zero3()
        first, *others = steps
        for other in others:
            if steps[other] != steps[first]:
                raise CheckpointError(
                    f"{first} has {steps[first]:g} and {other} {steps[other]:g} updates; parameters with different"
                    " numbers of updates are not supported"
                )
        return steps[first]

    def _step_of_zero3(self) -> float:
        path = self.path / ZERO / OPTIMIZER_STATE
        try:
            step = self.optimizer["optimizer_state_dict"]["state"][0]["step"]
        except (KeyError, TypeError, IndexError):
            raise CheckpointError(
                f"{path} has no step, and no parameter a {STEP}; convert it again"
            ) from None
        return _number(step, path)

    @property
    def settings(self) -> dict[str, Any]:
        """The hyperparameters of the first group, in our words."""
        groups = self.optimizer.get("param_groups")
        first = groups[0] if isinstance(groups, list) and groups else {}
        values = {ours: _plain(first.get(theirs)) for theirs, ours in _SETTINGS.items()}
        return {name: value for name, value in values.items() if value is not None}

    @cached_property
    def counters(self) -> dict[str, int]:
        """Steps and skipped steps of the engine; without its file the optimizer's."""
        for path in (self.path / name for name in MODEL_STATES):
            if path.is_file():
                content = _table(path)
                counted = {"step": "global_steps", "skipped_steps": "skipped_steps"}
                return {ours: int(_number(content.get(theirs), path)) for ours, theirs in counted.items()}
        return {"step": int(self.step), "skipped_steps": 0}

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*.pt"))


def _table(path: Path) -> Mapping[str, Any]:
    content = load_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no table; convert the checkpoint again")
    return content


def _plain(value: object) -> float | list[float] | None:
    """A number, which may stand in a tensor, or a list of them; None for anything else."""
    if isinstance(value, list | tuple):
        numbers = [each for each in map(_plain, value) if isinstance(each, float)]
        return numbers if len(numbers) == len(value) else None
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return None


def _number(value: object, path: Path) -> float:
    """Return a number of steps."""
    number = _plain(value)
    if not isinstance(number, float) or not 0 <= number < 2**53:
        raise CheckpointError(f"{path} has no number of updates; convert the checkpoint again")
    return number


def describe(place: Path) -> Iterator[str]:
    """Yield the lines of `megalite convert inspect`."""
    content = UniversalFolder(place)
    tensors = ((name, content.tensor(name, WEIGHTS)) for name in content.names)
    entries = {name: (values.shape, values.dtype) for name, values in tensors}
    yield f"{place}: a DeepSpeed universal checkpoint, {len(entries):,} parameters"
    yield f"  step {content.counters['step']:,}, {content.step:g} updates; {content.size_bytes:,} bytes"
    for name, value in content.settings.items():
        yield f"  optimizer.{name} = {value}"
    yield f"{WEIGHTS}: {sum(shape.numel() for shape, _ in entries.values()):,} elements"
    width = max(map(len, entries), default=0)
    for name, (shape, dtype) in entries.items():
        by, shown = " x ".join(map(str, shape)), str(dtype).removeprefix("torch.")
        yield f"  {name:<{width}}  {by:>16}  {shown}  {', '.join(content.files(name))}"


class UniversalReader(WeightReader):
    """Canonical tensors from a universal folder, once it was seen to hold exactly those of the model."""

    # A tensor at once: its file holds it whole.
    block_elements = 1 << 62

    def __init__(self, folder: Path, shape: ModelShape):
        """Raises CheckpointError for what is missing, unknown or of another shape, by name."""
        self.folder = UniversalFolder(folder)
        self._shapes = canonical_tensors(shape)
        names, family = self.folder.names, FAMILIES[shape.family].names
        self._prefix = _WRAPPER if names and all(name.startswith(_WRAPPER) for name in names) else ""
        # Written from a model of transformers 5, a folder may have other names than files do.
        stored = {file: model for file, model in family.in_models.items() if self._prefix + model in names}
        tensors = [replace(each, name=stored.get(each.name, each.name)) for each in family_tensors(shape)]
        self._tensors = {part: tensor for tensor in tensors for part in tensor.parts}
        self._tied, self._head = shape.tie_word_embeddings, stored.get(family.of(HEAD), family.of(HEAD))
        self._check()

    def close(self) -> None:
        """No file is open between two reads."""

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor: the weights (state key WEIGHT) or a moment."""
        tensor = self._tensors[name]
        values = self._theirs(
            tensor.name, WEIGHTS if state_key == WEIGHT else state_key, checked=True
        ).reshape(tensor.shape)
        require_finite(values, f"{state_key} of {tensor.name}", self.folder.path)
        values = values.t() if tensor.transposed else values
        stored = tensor.slices(name, region, self._shapes)
        pieces = [values[index_in(piece, full_slice(tuple(values.shape)))] for piece in stored]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _theirs(self, name: str, state: str, *, checked: bool = False) -> Tensor:
        return self.folder.tensor(self._prefix + name, state, checked=checked)

    def _check(self) -> None:
        expected = {tensor.name: tensor.shape for tensor in self._tensors.values()}
        stored = {name.removeprefix(self._prefix) for name in self.folder.names}
        extra = {name for name in stored - expected.keys() if not self._is_spare(name)}
        advice = "use the config.json of this checkpoint (checkpoints of several tensor-parallel ranks or with adapters"
        place, advice = self.folder.path / ZERO, f"{advice} are not supported)"
        require_no_others(place, expected.keys() - stored, extra, advice)
        for name, shape in expected.items():
            for state in STATE_FILES:
                size = tuple(self._theirs(name, state).shape)
                if size not in (shape, (prod(shape),)):
                    raise CheckpointError(
                        f"{self.folder.path / ZERO / name / state}.pt has shape {size}, but its config.json gives"
                        f" {shape}; use the config.json of this model, with the same vocab_size"
                    )

    def _is_spare(self, name: str) -> bool:
        """Whether ds_to_universal added this tensor: a buffer, or the embedding once more under its other name."""
        if name == self._head and self._tied:
            return torch.equal(
                self._theirs(name, WEIGHTS), self._theirs(self._tensors[EMBEDDING].name, WEIGHTS)
            )
        return name.endswith(BUFFERS)


def open_checkpoint(place: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a universal folder's weights, moments and step; its data begins anew.

    Raises CheckpointError when it does not hold exactly the model of its config.json, or no config.json is known.
    """
    hf_config = options.hf_config or find_config(place)
    if hf_config is None:
        raise CheckpointError(
            f"{place} has no config.json, which gives the model's shape; name it with --hf-config"
        )
    reader = UniversalReader(place, shape := shape_of_folder(str(hf_config)))
    content = reader.folder
    run = ImportedRun(
        shape,
        {"optimizer": {"name": "adamw", **content.settings}},
        state_keys=(WEIGHT, *MOMENTS),
        trainer_state={**content.counters, "samples": 0, "tokens": 0},
        optimizer={"step": content.step},
    )
    settings = ", ".join(f"optimizer.{name} = {value}" for name, value in content.settings.items())
    notes = [f"trained with {settings}"] if settings else []
    return ForeignCheckpoint(run, reader, content.counters["step"], hf_config, notes)
