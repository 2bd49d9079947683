"""DeepSpeed universal checkpoints of Hugging Face models, as ds_to_universal writes them, read tensor by tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.deepspeed.adam_settings import precision, require_adam, settings
from megalite.convert.deepspeed.folder import LATEST
from megalite.convert.foreign.adamw import common_step, trained_with
from megalite.convert.foreign.checkpoint import ForeignCheckpoint, ImportOptions
from megalite.convert.foreign.family_states import FamilyStatesReader
from megalite.convert.foreign.inspect import tensor_lines
from megalite.convert.foreign.places import find_config, named_by
from megalite.convert.foreign.streamed import ImportedRun
from megalite.convert.foreign.unpickle import load_pickle, require_undamaged
from megalite.convert.universal.folder import (
    LATEST_UNIVERSAL,
    MODEL_STATES,
    MOMENTS,
    OPTIMIZER_STATE,
    STATE_FILES,
    STEP,
    WEIGHTS,
    ZERO,
)
from megalite.errors import CheckpointError


@dataclass(frozen=True)
class UniversalFolder:
    """The files of a universal folder, whatever model they hold."""

    path: Path

    @property
    def place(self) -> Path:
        return self.path / ZERO

    @cached_property
    def names(self) -> list[str]:
        """The parameters, as they are stored."""
        return sorted(each.name for each in (self.path / ZERO).iterdir() if each.is_dir())

    def files(self, name: str) -> list[str]:
        """Return the states that a parameter has: fp32, exp_avg, ..."""
        return sorted(each.stem for each in (self.path / ZERO / name).glob("*.pt"))

    def size(self, name: str, state: str) -> tuple[int, ...]:
        """Return the shape of one state of a parameter, which is flat under ZeRO 3."""
        return tuple(self.header(name, state).shape)

    def tensor(self, name: str, state: str) -> Tensor:
        """Read one state of a parameter, a name of `files`, and verify its file's checksums."""
        values = self.header(name, state)
        require_undamaged(self.path / ZERO / name / f"{state}.pt")
        return values

    def header(self, name: str, state: str) -> Tensor:
        """Return one state of a parameter, unverified; its values are read when they are used."""
        path = self.path / ZERO / name / f"{state}.pt"
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: every parameter needs {', '.join(STATE_FILES)}, which AdamW under ZeRO saves for"
                " trained parameters; other optimizers and frozen parameters are not supported"
            )
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
        steps = [(f"{path.parent.name}/{STEP}", load_pickle(path)) for path in paths if path.is_file()]
        return common_step(steps or self._step_of_zero3(), self.place)

    def _step_of_zero3(self) -> list[tuple[str, object]]:
        try:
            return [(OPTIMIZER_STATE, self.optimizer["optimizer_state_dict"]["state"][0]["step"])]
        except (KeyError, TypeError, IndexError):
            return []

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The hyperparameters of each parameter group."""
        groups = self.optimizer.get("param_groups")
        return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The optimizer's settings in our words."""
        return settings(self.groups, self.engine.get("ds_config"), self.optimizer)

    @cached_property
    def engine(self) -> Mapping[str, Any]:
        """The content of the engine's file; empty if there is none."""
        path = next((path for name in MODEL_STATES if (path := self.path / name).is_file()), None)
        return {} if path is None else _table(path)

    @cached_property
    def counters(self) -> dict[str, int]:
        """Steps, skipped steps and samples of the engine; without its file the optimizer's steps."""
        if not self.engine:
            return {"step": int(self.step), "skipped_steps": 0, "samples": 0}
        counted = {"step": "global_steps", "skipped_steps": "skipped_steps", "samples": "global_samples"}
        return {
            ours: int(
                common_step([(theirs, self.engine.get(theirs, 0 if ours == "samples" else None))], self.path)
            )
            for ours, theirs in counted.items()
        }

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*.pt"))


def _table(path: Path) -> Mapping[str, Any]:
    content = load_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no table; convert the checkpoint again")
    return content


def describe(place: Path) -> Iterator[str]:
    """Yield the lines of `megalite convert inspect`."""
    content = UniversalFolder(place)
    tensors = ((name, content.header(name, WEIGHTS)) for name in content.names)
    entries = {name: (values.shape, values.dtype) for name, values in tensors}
    yield f"{place}: a DeepSpeed universal checkpoint, {len(entries):,} parameters"
    step, samples = (content.counters[name] for name in ("step", "samples"))
    yield f"  step {step:,}, {content.step:g} updates, {samples:,} samples; {content.size_bytes:,} bytes"
    for name, value in content.settings.items():
        yield f"  optimizer.{name} = {value}"
    yield f"{WEIGHTS}: {sum(shape.numel() for shape, _ in entries.values()):,} elements"
    yield from tensor_lines(
        {
            name: (shape, f"{dtype}  {', '.join(content.files(name))}")
            for name, (shape, dtype) in entries.items()
        }
    )


def open_checkpoint(place: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a universal folder's weights, moments, step and position in the data.

    Raises CheckpointError when it does not hold exactly the model of its config.json, or no config.json is known.
    """
    hf_config = options.hf_config or find_config(place)
    if hf_config is None:
        raise CheckpointError(
            f"{place} has no config.json, which gives the model's shape; name it with --hf-config"
        )
    content = UniversalFolder(place)
    reader = FamilyStatesReader(content, shape := shape_of_folder(str(hf_config)))
    require_adam(content.groups, content.engine.get("ds_config"), MOMENTS, place)
    run = ImportedRun(
        shape,
        {"optimizer": {"name": "adamw", **content.settings}},
        state_keys=(WEIGHT, *MOMENTS),
        trainer_state={**content.counters, "tokens": 0},
        optimizer={"step": content.step},
    )
    known = precision(content.engine.get("ds_config"))
    notes = [*trained_with(content.settings), *_newer(content)]
    return ForeignCheckpoint(run, reader, content.counters["step"], hf_config, notes, known)


def _newer(content: UniversalFolder) -> Iterator[str]:
    """Yield a note where the engine has saved a later step since this folder was made of an earlier one."""
    above, step = content.path.resolve().parent, content.counters["step"]
    tag = named_by(above / LATEST)
    if tag is None:
        return
    beside = UniversalFolder(above / tag)
    try:
        newer = beside.counters["step"] if beside.engine else 0
    except CheckpointError:  # it is not what is imported
        return
    if newer > step:
        yield (
            f"{LATEST_UNIVERSAL} is {content.path.name} of step {step:,}, but {LATEST} is {tag} of step {newer:,}; name"
            f" {beside.path} to import that"
        )
