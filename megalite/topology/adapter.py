"""Adapters: a few trained weights beside the frozen ones of a pretrained model. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from typing import Literal

PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    # Those of latent attention.
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
"""The linears of a decoder layer, by the last word of their canonical names."""
LoraBias = Literal["none", "all", "lora_only"]


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters of linears: W x + scale * B A x (Hu et al., "LoRA", 2021).

    rank: the rows of A [rank, in] and columns of B [out, rank]. alpha: scale = alpha / rank; rslora:
    alpha / sqrt(rank) (Kalajdzievski, "rsLoRA", 2023). targets: the adapted projections, see `names_module`.
    modules_to_save: whole modules that are trained beside, as "lm_head". bias: which biases of the model are trained.
    dora: the rows of W + scale * B A have a trained magnitude (Liu et al., "DoRA", 2024).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()
    bias: LoraBias = "none"
    rslora: bool = False
    dora: bool = False

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, module: str) -> bool:
        """Return whether the projection of this canonical name has an A and a B."""
        return names_module(self.targets, module)

    def trains(self, parts: Iterable[str]) -> bool:
        """Return whether a parameter of the model itself, which consists of these canonical tensors, is trained."""
        modules, kinds = zip(*(name.rsplit(".", 1) for name in parts), strict=True)
        if all(names_module(self.modules_to_save, module) for module in modules):
            return True
        if self.bias == "none" or "weight" in kinds:
            return False
        return self.bias == "all" or all(self.adapts(module) for module in modules)


@dataclass(frozen=True)
class Prefix:
    """Trained keys and values in front of the tokens' own in every layer (Li and Liang, "Prefix-tuning", 2021).

    tokens: the number of virtual tokens. They have the positions 0 to tokens - 1, their keys are not rotated, and every
    query sees all of them, whatever document masks and sliding windows hide.
    projection: the hidden width of the two-layer MLP that computes keys and values from an embedding of the virtual
    tokens; None: keys and values are trained directly.
    """

    tokens: int
    projection: int | None = None

    def trains(self, parts: Iterable[str]) -> bool:
        """Return False: the model itself stays as it is."""
        return False


Adapter = Lora | Prefix


def names_module(patterns: Iterable[str], module: str) -> bool:
    """Return whether a pattern names the module: its whole canonical name, the end of it, or a glob over the whole."""
    return any(
        module == pattern or module.endswith(f".{pattern}") or fnmatchcase(module, pattern)
        for pattern in patterns
    )
