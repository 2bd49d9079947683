"""Words of config.json about mixtures of experts that several families share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.families.fields import shape_fields
from megalite.families.words import Config, Plain
from megalite.topology.shape import ModelShape

TOP_K = {"num_experts_per_tok": "num_experts_per_tok"}
NORMALISED = {"norm_topk_prob": "norm_topk_prob"}


@dataclass(frozen=True)
class ExpertCount(Plain):
    """The number of experts under `key`, which other versions of transformers call by the other of its two names.

    absent: transformers' number for a file that has neither.
    """

    key: str
    absent: int
    fields: tuple[str, ...] = ("num_experts",)
    config_keys: tuple[str, ...] = ("num_experts", "num_local_experts")

    def read(self, config: Config) -> dict[str, Any]:
        keys = (self.key, *self.config_keys)
        return {
            "num_experts": next((config[key] for key in keys if config.get(key) is not None), self.absent)
        }

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {self.key: shape_fields(shape)["num_experts"]}

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        if not shape_fields(shape)["num_experts"]:
            yield "num_experts", 0, self.absent
