"""The hyperparameters and step counters of torch's AdamW, as other programs' checkpoints have them."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megalite.errors import CheckpointError, listed
from megalite.topology.optimizers import OPTIMIZERS

MOMENTS = OPTIMIZERS["adamw"].keys
STEP = "step"


def number(value: object) -> float | None:
    """Return a finite number, which may stand in a tensor; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def settings_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of parameter groups in our words: those of the first, and the largest weight decay.

    The learning rate is the one from which a scheduler starts (initial_lr), else the group's.
    """
    if not groups:
        return {}
    first = groups[0]
    betas = [number(beta) for beta in first.get("betas") or ()]
    decays = [number(group.get("weight_decay")) for group in groups]
    values = {
        "learning_rate": number(first.get("initial_lr", first.get("lr"))),
        "betas": betas if len(betas) == 2 and None not in betas else None,
        "eps": number(first.get("eps")),
        "weight_decay": max((decay for decay in decays if decay is not None), default=None),
    }
    return {name: value for name, value in values.items() if value is not None}


def trained_with(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the note that says the settings of [optimizer]; nothing without any."""
    if settings:
        yield f"trained with {', '.join(f'optimizer.{name} = {value}' for name, value in settings.items())}"


def group_notes(groups: Mapping[str, Mapping[str, Any]], vectors: Collection[str]) -> Iterator[str]:
    """Yield the learning rates and weight decays that are not those of the settings, nor the default here.

    groups: parameter -> the settings of its group. vectors: the parameters of one dimension.
    """
    rules: dict[tuple[float | None, float], list[str]] = {}
    for name, group in groups.items():
        rule = (number(group.get("lr")), number(group.get("weight_decay")) or 0.0)
        rules.setdefault(rule, []).append(name)
    if not rules:
        return
    (rate, decay), *others = sorted(rules, key=lambda rule: -rule[1])
    for other_rate, other_decay in others:
        names = rules[other_rate, other_decay]
        if other_rate == rate and other_decay == 0 and len(others) == 1 and set(names) <= set(vectors):
            continue  # norms and biases, which are not decayed here either
        different = f", learning rate {other_rate} beside {rate}" if other_rate != rate else ""
        yield f"weight decay {other_decay}{different}: {len(names)} parameters ({listed(names)})"
    if decay and set(rules[rate, decay]) & set(vectors):
        yield (
            f"weight decay {decay} applied to norms and biases too; here it does so with [[optimizer.groups]]"
            f' pattern = "*", weight_decay = {decay}'
        )


def require_adamw(groups: Sequence[Mapping[str, Any]], source: object) -> None:
    """Raise CheckpointError for a variant whose next update differs from AdamW's."""
    for key in ("amsgrad", "maximize"):
        if any(group.get(key) is True for group in groups):
            raise CheckpointError(
                f"{source} was trained with {key}, which AdamW here does not have; import the weights alone"
            )
    if any(
        group.get("decoupled_weight_decay") is False and number(group.get("weight_decay")) for group in groups
    ):
        raise CheckpointError(
            f"{source} was trained with Adam, whose weight decay is part of the gradient; only AdamW's continues here"
        )


def common_step(steps: Iterable[tuple[str, object]], source: object) -> float:
    """Return the number of updates that all parameters had. Raises CheckpointError where they differ or have none."""
    first: tuple[str, float] | None = None
    for name, value in steps:
        count = number(value)
        if count is None or not 0 <= count < 2**53:
            raise CheckpointError(f"{source}: {name} has no number of updates; write the checkpoint again")
        if first is None:
            first = (name, count)
        elif count != first[1]:
            raise CheckpointError(
                f"{source}: {first[0]} had {first[1]:g} and {name} {count:g} updates; parameters with different"
                " numbers of updates are not supported"
            )
    if first is None:
        raise CheckpointError(f"{source} has no number of updates; write the checkpoint again")
    return first[1]
