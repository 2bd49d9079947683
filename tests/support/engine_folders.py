"""Folders as DeepSpeed's engine saves them, written without DeepSpeed for any number of data-parallel ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.families.registry import family_tensors
from megalite.topology.shape import ModelShape

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
States = dict[str, dict[str, Tensor]]


@dataclass
class EngineFolder:
    """The content of a folder, before it is written. model, optimizer: keys that replace those of each file."""

    states: States
    stage: int = 2
    ranks: int = 2
    prefix: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, tag: str = "global_step7") -> Path:
        """Write the files and `latest`; return the TAG folder."""
        place = folder / tag
        place.mkdir(parents=True)
        (folder / "latest").write_text(tag)
        names = list(self.states)
        groups = [names[: len(names) // 3], names[len(names) // 3 :]]
        cuts = [self._shares(group) if self.stage == 3 else self._partitions(group) for group in groups]
        for rank in range(self.ranks):
            name = f"zero_pp_rank_{rank}_mp_rank_00"
            torch.save(self._optimizer([cut[rank] for cut in cuts]), place / f"{name}_optim_states.pt")
            if self.stage == 3:
                torch.save(self._model(groups), place / f"{name}_model_states.pt")
        if self.stage < 3:
            torch.save(self._model(groups), place / "mp_rank_00_model_states.pt")
        return place

    def _partitions(self, group: Sequence[str]) -> list[dict[str, Tensor]]:
        """One flat tensor of a group, padded to a multiple of two elements a rank, in equal partitions."""
        flats = {key: torch.cat([self.states[name][key].flatten() for name in group]) for key in KEYS}
        numel = flats["fp32"].numel()
        size = 2 * ceil(numel / (2 * self.ranks))
        padded = {
            key: torch.cat([flat, torch.zeros(size * self.ranks - numel)]) for key, flat in flats.items()
        }
        cuts = [
            {key: flat[rank * size :][:size] for key, flat in padded.items()} for rank in range(self.ranks)
        ]
        # The masters are saved without the padding, the moments with it.
        return [{**cut, "fp32": cut["fp32"][: max(0, numel - i * size)]} for i, cut in enumerate(cuts)]

    def _shares(self, group: Sequence[str]) -> list[dict[str, Tensor]]:
        """Equal shares of each parameter, whose last one is padded; a rank's shares in one flat tensor."""

        def share(values: Tensor, rank: int) -> Tensor:
            size = ceil(values.numel() / self.ranks)
            return torch.cat([values.flatten(), torch.zeros(size * self.ranks)])[rank * size :][:size]

        return [
            {key: torch.cat([share(self.states[name][key], rank) for name in group]) for key in KEYS}
            for rank in range(self.ranks)
        ]

    def _optimizer(self, groups: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        masters = [group["fp32"].clone() for group in groups]
        states = {
            index: {"step": torch.tensor(5.0)} | {key: group[key].clone() for key in KEYS[1:]}
            for index, group in enumerate(groups)
        }
        hyperparameters = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
        param_groups = [
            {**hyperparameters, "weight_decay": 0.1 * i, "params": [i]} for i in range(len(groups))
        ]
        base = {"state": states, "param_groups": param_groups}
        kind = {3: ("fp32_flat_groups", "optimizer_state_dict")}.get(
            self.stage, ("single_partition_of_fp32_groups", "base_optimizer_state")
        )
        table = dict(zip(kind, (masters, base), strict=True))
        table |= {"zero_stage": self.stage, "partition_count": self.ranks, **self.optimizer}
        return {"optimizer_state_dict": table, "ds_config": {}}

    def _model(self, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        shapes = [{self.prefix + name: self.states[name]["fp32"].shape for name in group} for group in groups]
        counters = {"global_steps": 7, "skipped_steps": 2, "global_samples": 56}
        return {
            "module": {},
            "buffer_names": [],
            "param_shapes": shapes,
            **counters,
            "ds_config": {},
            **self.model,
        }


def random_states(shape: ModelShape) -> States:
    """Return random weights and moments under the names of the family's files."""
    generator = torch.Generator().manual_seed(0)
    return {
        tensor.name: {key: torch.randn(tensor.shape, generator=generator) for key in KEYS}
        for tensor in family_tensors(shape)
    }
