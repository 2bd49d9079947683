"""The optimizer states of a checkpoint of DeepSpeed's pipeline engine, by pipeline layer and model-parallel rank."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.convert.deepspeed.adam_settings import require_adam, settings
from megalite.convert.deepspeed.engine_states import TrainedStates
from megalite.convert.deepspeed.model_states import ModelStates
from megalite.convert.deepspeed.partitions import OptimizerPartitions
from megalite.convert.deepspeed.pipeline_files import open_layer
from megalite.convert.deepspeed.pipeline_folder import PipelineFolder
from megalite.convert.deepspeed.training_state import loss_scale
from megalite.convert.deepspeed.unpartitioned import UnpartitionedOptimizer
from megalite.convert.foreign.adamw import MOMENTS
from megalite.convert.universal.folder import WEIGHTS
from megalite.errors import CheckpointError

_TIED = "tied_modules."


class PipelineStates:
    """Masters and moments: each stage and model rank has those of its parameters, with ZeRO cut over data ranks."""

    def __init__(self, folder: PipelineFolder):
        """Open the files of all ranks. Raises CheckpointError for files that do not belong together."""
        self.folder = folder
        self._config = ModelStates.open(folder.states[0]).settings if folder.states else None
        open_stages = _partitioned if folder.optimizers else _unpartitioned
        self._stages: list[TrainedStates] = [*open_stages(folder)]
        for path, stage in zip(folder.states, self._stages, strict=True):
            if stage.step != self._stages[0].step:
                raise CheckpointError(
                    f"{path} has {stage.step:g} updates, but the first stage {self._stages[0].step:g}; fetch the files"
                    " of one step"
                )
            require_adam(stage.param_groups, self._config, stage.other_states(), folder.path)
            stage.require(MOMENTS)

    @property
    def step(self) -> float:
        return self._stages[0].step

    def numel(self, layer: int, rank: int, name: str) -> int:
        """Return how many elements the files have of a rank's tensor. Raises CheckpointError if they have none."""
        stage, stored = self._find(layer, rank, name)
        return prod(stage.shape(stored))

    def read(self, state_key: str, layer: int, rank: int, name: str) -> Tensor:
        """Return a rank's tensor, flat or not. state_key: WEIGHT for the fp32 masters, or a moment."""
        stage, stored = self._find(layer, rank, name)
        # The masters are saved as parameters, which ask for gradients.
        return stage.read(stored, WEIGHTS if state_key == WEIGHT else state_key).detach()

    def _find(self, layer: int, rank: int, name: str) -> tuple[TrainedStates, str]:
        """Return the first stage that has a tensor, and its name there: a tied layer has no index, but a key."""
        stages = self._stages[rank :: self.folder.model_ranks]
        for stage in stages:
            if f"{layer}.{name}" in stage.names:
                return stage, f"{layer}.{name}"
        for stage in stages:
            for stored in stage.names:
                if stored.startswith(_TIED) and stored.split(".", 2)[2] == name:
                    return stage, stored
        raise CheckpointError(
            f"{self.folder.path} has no optimizer state of {name} of layer {layer}, model rank {rank}; import it"
            " without the optim_states files"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The optimizer's settings in our words."""
        first = self._stages[0]
        return settings(first.param_groups, self._config, first.table)

    @property
    def scalars(self) -> dict[str, Any]:
        """The optimizer's numbers as a checkpoint of ours keeps them: its updates, and a dynamic loss scale."""
        return {"step": self.step, **loss_scale(self._stages[0].table)}


def _partitioned(folder: PipelineFolder) -> Iterator[OptimizerPartitions]:
    for (_, files), path in zip(sorted(folder.optimizers.items()), folder.states, strict=True):
        yield OptimizerPartitions(files, ModelStates.open(path).shapes)


def _unpartitioned(folder: PipelineFolder) -> Iterator[UnpartitionedOptimizer]:
    """Yield the optimizer of each stage and model rank, which names no parameter: their layers are counted."""
    firsts = [0] * folder.model_ranks  # the next layer of each model rank that is of no stage yet
    layers = sorted(folder.layers)
    for index, path in enumerate(folder.states):
        state, rank = ModelStates.open(path), index % folder.model_ranks
        elements, last = _elements(state), index >= len(folder.states) - folder.model_ranks
        module: dict[str, Tensor] = {}
        while firsts[rank] < len(layers) and _total(module.values()) < elements:
            layer = layers[firsts[rank]]
            module |= {f"{layer}.{name}": each for name, each in _layer(folder, layer, rank)}
            firsts[rank] += 1
        if last and _total(module.values()) < elements:
            # The copy of a tied embedding is the first module of a stage.
            module = {f"{_TIED}copy.{name}": each for name, each in _layer(folder, layers[0], rank)} | module
        if _total(module.values()) != elements or (last and firsts[rank] < len(layers)):
            raise CheckpointError(
                f"{path} has the optimizer state of {elements:,} elements under ZeRO 0, which are not those of whole"
                " layers; save the checkpoint with ZeRO 1, which names its parameters"
            )
        yield UnpartitionedOptimizer(ModelStates(path, {**state.table, "module": module}))


def _layer(folder: PipelineFolder, layer: int, rank: int) -> Iterator[tuple[str, Tensor]]:
    yield from open_layer(folder.layers[layer][rank]).items()


def _total(tensors: Iterable[Tensor]) -> int:
    return sum(values.numel() for values in tensors)


def _elements(state: ModelStates) -> int:
    """Return how many elements have a first moment. Raises CheckpointError if the file has no Adam's state."""
    table = state.table.get("optimizer")
    table = table if isinstance(table, Mapping) else {}
    base = table.get("optimizer_state_dict", table)
    states = base.get("state") if isinstance(base, Mapping) else None
    entries = list(states.values()) if isinstance(states, Mapping) else []
    found = (entry.get(MOMENTS[0]) if isinstance(entry, Mapping) else None for entry in entries)
    moments = [values for values in found if isinstance(values, Tensor)]
    if not moments or len(moments) < len(entries):
        raise CheckpointError(
            f"{state.path} has no state of Adam; fetch the optim_states files of all ranks too"
        )
    return _total(moments)
