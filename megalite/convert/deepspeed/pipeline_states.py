"""The optimizer states of a checkpoint of DeepSpeed's pipeline engine, by pipeline layer and model-parallel rank."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.convert.deepspeed.partitions import OptimizerPartitions, param_shapes
from megalite.convert.deepspeed.pipeline_files import open_state
from megalite.convert.deepspeed.pipeline_folder import PipelineFolder
from megalite.convert.deepspeed.rank_states import FP32
from megalite.convert.foreign_pickle import Foreign
from megalite.errors import CheckpointError
from megalite.topology.optimizers import OPTIMIZERS

MOMENTS = OPTIMIZERS["adamw"].keys
_SETTINGS = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""Their name of a hyperparameter -> ours."""


class PipelineStates:
    """Masters and moments: each stage and model rank has those of its parameters, partitioned over data ranks."""

    def __init__(self, folder: PipelineFolder):
        """Open the files of all ranks. Raises CheckpointError for files that do not belong together."""
        self.folder = folder
        self._partitions = [
            OptimizerPartitions(files, param_shapes(open_state(path).content, path))
            for (_, files), path in zip(sorted(folder.optimizers.items()), folder.states, strict=True)
        ]
        for partitions in self._partitions:
            if partitions.step != self._partitions[0].step:
                raise CheckpointError(
                    f"{partitions.ranks[0].path} has {partitions.step:g} updates, but the first stage"
                    f" {self._partitions[0].step:g}; fetch the files of one step"
                )
            partitions.require(MOMENTS)

    @property
    def step(self) -> float:
        return self._partitions[0].step

    def numel(self, layer: int, rank: int, name: str) -> int:
        """Return how many elements the files have of a rank's tensor. Raises CheckpointError if they have none."""
        partitions, stored = self._find(layer, rank, name)
        return partitions.numels[stored]

    def read(self, state_key: str, layer: int, rank: int, name: str) -> Tensor:
        """Return a rank's tensor, flat. state_key: WEIGHT for the fp32 masters, or a moment."""
        partitions, stored = self._find(layer, rank, name)
        # The masters are saved as parameters, which ask for gradients.
        return partitions.read(stored, FP32 if state_key == WEIGHT else state_key).detach()

    def _find(self, layer: int, rank: int, name: str) -> tuple[OptimizerPartitions, str]:
        """Return the first stage that has a tensor, and its name there: a tied layer has no index, but a key."""
        for partitions in self._partitions[rank :: self.folder.model_ranks]:
            if f"{layer}.{name}" in partitions.numels:
                return partitions, f"{layer}.{name}"
        for partitions in self._partitions[rank :: self.folder.model_ranks]:
            for stored in partitions.names:
                if stored.startswith("tied_modules.") and stored.split(".", 2)[2] == name:
                    return partitions, stored
        raise CheckpointError(
            f"{self.folder.path} has no optimizer state of {name} of layer {layer}, model rank {rank}; import it"
            " without the optim_states files"
        )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The hyperparameters of the group with the largest weight decay, in our words, before a schedule."""
        rank = self._partitions[0].ranks[0]
        groups = [group for group in rank.param_groups if "lr" in group]
        nothing: Mapping[str, Any] = {}
        decayed = max(groups, key=lambda group: _number(group.get("weight_decay")), default=nothing)
        group = dict(decayed)
        section = rank.settings.get("optimizer")
        configured = section.get("params") if isinstance(section, Mapping) else None
        peak = _number(configured.get("lr")) if isinstance(configured, Mapping) else 0.0
        group["lr"] = peak or group.get("initial_lr") or group.get("lr")
        values = {ours: group.get(theirs) for theirs, ours in _SETTINGS.items()}
        values["gradient_clipping"] = _number(rank.settings.get("gradient_clipping")) or None
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if isinstance(value, int | float | list)}

    @property
    def scalars(self) -> dict[str, Any]:
        """The optimizer's numbers as a checkpoint of ours keeps them: its updates, and a dynamic loss scale."""
        scaler = self._partitions[0].ranks[0].table.get("loss_scaler")
        dynamic = isinstance(scaler, Foreign) and scaler.type_name.endswith("DynamicLossScaler")
        fields: Mapping[str, Any] = scaler.fields if isinstance(scaler, Foreign) and dynamic else {}
        scale, window = _number(fields.get("cur_scale")), _number(fields.get("scale_window"))
        if not scale or not window:
            return {"step": self.step}
        # Theirs doubles at a step before which as many steps without an overflow were made as a multiple of the window.
        clean = max(0.0, _number(fields.get("cur_iter")) - _number(fields.get("last_overflow_iter")) - 1)
        return {
            "step": self.step,
            "loss_scale": scale,
            "loss_scale_steps_since_change": int((clean - 1) % window) if clean else -1,
            "loss_scale_overflows_left": int(_number(fields.get("cur_hysteresis")) or 1),
        }


def _number(value: object) -> float:
    """Return a number, which may stand in a tensor; 0 for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
