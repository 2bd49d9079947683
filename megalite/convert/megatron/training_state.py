"""The parts of Megatron-LM's training state that belong to no parameter: step, samples, loss scale, settings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.convert.foreign.adamw import MOMENTS, number, trained_with
from megalite.convert.foreign.streamed import ImportedRun
from megalite.convert.megatron.arguments import Arguments
from megalite.errors import CheckpointError
from megalite.topology.shape import ModelShape
from megalite.topology.state import WEIGHT

STATE_KEYS = (WEIGHT, *MOMENTS)
REMEDY = (
    "load the checkpoint with Megatron-LM and save it again as torch_dist with --dist-ckpt-optim-fully-reshardable, or"
    " with --no-save-optim for the weights alone"
)
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


class OptimizerNotRead(CheckpointError):
    """An optimizer's state of a kind that is not read; its weights can be taken alone."""


@dataclass(frozen=True)
class OptimizerScalars:
    """step: updates of Adam. group: the hyperparameters of the first group. loss_scale: in this runtime's names."""

    step: float
    group: Mapping[str, Any]
    loss_scale: Mapping[str, float]


def optimizer_scalars(groups: Any, steps: Iterable[Any], scaler: Any, source: Path) -> OptimizerScalars:
    """Return the scalars of an optimizer.

    groups: its param_groups. steps: numbers of updates of its parameters, where the groups have none. scaler: the
    state of its gradient scaler, or None. Raises CheckpointError where they are damaged or differ.
    """
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError(f"{source}: its optimizer has no param_groups; fetch it again")
    used = [group for group in groups if group.get("params") != []]
    counted = {number(step) for step in steps} | {
        number(group["step"]) for group in used if group.get("step") is not None
    }
    if len(counted) != 1 or None in counted:
        raise CheckpointError(
            f"{source}: its optimizer's parameters have {sorted(map(str, counted)) or 'no'} numbers of updates;"
            f" one number for all is supported; {REMEDY}"
        )
    [step] = counted
    if step is None or not 0 <= step < 2**53:
        raise CheckpointError(f"{source}: {step} is no number of updates; fetch it again")
    return OptimizerScalars(step, used[0] if used else {}, _loss_scale(scaler, source))


def _loss_scale(scaler: Any, source: Path) -> dict[str, float]:
    """Return the dynamic loss scale; a constant one is a setting and no state."""
    if not isinstance(scaler, Mapping) or "growth_tracker" not in scaler:
        return {}
    names = ("scale", "growth_tracker", "hysteresis_tracker")
    scale, steps, overflows = (number(scaler.get(name)) for name in names)
    if scale is None or steps is None or overflows is None or scale <= 0:
        raise CheckpointError(f"{source}: its grad_scaler has no {', '.join(names)}; fetch it again")
    return {
        "loss_scale": scale,
        "loss_scale_steps_since_change": int(steps),
        # Theirs goes on counting below 1 while the scale is halved at each overflow.
        "loss_scale_overflows_left": max(1, int(overflows)),
    }


def trained_run(
    shape: ModelShape, arguments: Arguments, iteration: int | None, scalars: OptimizerScalars
) -> ImportedRun:
    """Return an import of weights and moments, all in float32, that goes on where the training was."""
    step = int(scalars.step) if iteration is None else iteration
    samples = _count(arguments.table.get("consumed_train_samples"))
    tokens = samples * _count(arguments.table.get("seq_length"))
    skipped = {"skipped_steps": max(0, step - int(scalars.step))}
    return ImportedRun(
        shape,
        {"optimizer": settings_of(arguments, scalars)},
        torch.float32,
        STATE_KEYS,
        {"step": step, "samples": samples, "tokens": tokens, **skipped},
        {"step": scalars.step, **scalars.loss_scale},
    )


def precision(arguments: Arguments) -> str:
    """Return training.precision of the arguments."""
    return next((name for name in ("bf16", "fp16") if arguments.table.get(name) is True), "fp32")


def settings_of(arguments: Arguments, scalars: OptimizerScalars) -> dict[str, Any]:
    """Return the settings of [optimizer] that the arguments and the first group say."""
    table, group = arguments.table, scalars.group
    rate, least = _positive(table.get("lr")), number(table.get("min_lr"))
    betas = group.get("betas", (table.get("adam_beta1"), table.get("adam_beta2")))
    settings = {
        "name": "adamw",
        "learning_rate": rate,
        "betas": _numbers(betas),
        "eps": _positive(group.get("eps", table.get("adam_eps"))),
        "weight_decay": number(table.get("weight_decay", group.get("weight_decay"))),
        "gradient_clipping": number(table.get("clip_grad")),
        "schedule": _SCHEDULES.get(str(table.get("lr_decay_style"))),
        "warmup_steps": _count(table.get("lr_warmup_iters")) or None,
        "decay_steps": _count(table.get("lr_decay_iters")) or None,
        "minimum_ratio": least / rate if rate and least is not None and 0 <= least <= rate else None,
    }
    return {name: value for name, value in settings.items() if value is not None}


def training_notes(shape: ModelShape, arguments: Arguments, scalars: OptimizerScalars) -> Iterator[str]:
    """Yield the settings that a run needs to go on alike, and what would be computed otherwise."""
    settings = settings_of(arguments, scalars)
    yield from trained_with(settings)
    if arguments.table.get("decoupled_weight_decay") is False and settings.get("weight_decay"):
        yield "its weight decay was a term of the gradient (Adam with L2); adamw here decays the weights themselves"
    rows = _count(arguments.table.get("padded_vocab_size"))
    if rows > shape.vocab_size:
        yield (
            f"its loss was over the {rows} rows of the padded vocabulary, here it is over {shape.vocab_size};"
            f" --vocab-size {rows} keeps all rows and so the loss"
        )


def require_masters_of(weights: Tensor, masters: Tensor, name: str, path: Path) -> None:
    """Raise CheckpointError unless float32 masters round to the weights: both are of one step and one parameter."""
    if not torch.equal(masters.to(weights.dtype), weights):
        raise CheckpointError(
            f"{path}: the optimizer's float32 copy of {name} does not round to its {_shown(weights.dtype)} weights, so"
            f" it is of another step, or lies elsewhere in its file than is known here; {REMEDY}"
        )


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else 0


def _positive(value: Any) -> float | None:
    figure = number(value)
    return figure if figure is not None and figure > 0 else None


def _numbers(values: Any) -> Sequence[float] | None:
    figures = [number(value) for value in values] if isinstance(values, list | tuple) else []
    return [figure for figure in figures if figure is not None] if figures and None not in figures else None
