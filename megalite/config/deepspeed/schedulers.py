"""DeepSpeed's schedulers: their parameters, what each leaves out, and which ones [optimizer] holds."""

from dataclasses import dataclass
from typing import Any

REQUIRED = object()
"""A parameter without a default: DeepSpeed stops where it is missing."""


@dataclass(frozen=True)
class Scheduler:
    """One class of deepspeed.runtime.lr_schedules.

    ours: its parameter -> the key of [optimizer] that holds it. defaults: each parameter's default in DeepSpeed; None
    stands for the optimizer's own learning rate, or for the first half's value in OneCycle.
    """

    ours: dict[str, str]
    defaults: dict[str, Any]


_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}

SCHEDULERS = {
    "WarmupLR": Scheduler(
        {"warmup_max_lr": "learning_rate", "warmup_num_steps": "warmup_steps"},
        {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    ),
    "WarmupDecayLR": Scheduler(
        {
            "warmup_max_lr": "learning_rate",
            "warmup_num_steps": "warmup_steps",
            "total_num_steps": "decay_steps",
        },
        {"total_num_steps": REQUIRED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP},
    ),
    "WarmupCosineLR": Scheduler(
        {
            "warmup_num_steps": "warmup_steps",
            "total_num_steps": "decay_steps",
            "cos_min_ratio": "minimum_ratio",
        },
        {"total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_WARMUP},
    ),
    "OneCycle": Scheduler(
        {"cycle_max_lr": "learning_rate"},
        {
            "cycle_min_lr": REQUIRED,
            "cycle_max_lr": REQUIRED,
            "decay_lr_rate": 0.0,
            "cycle_first_step_size": 2000,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": None,
            "decay_step_size": 0,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
        },
    ),
    "LRRangeTest": Scheduler(
        {"lr_range_test_min_lr": "learning_rate"},
        {
            "lr_range_test_min_lr": 0.001,
            "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
    ),
}
"""Each of them also takes `last_batch_iteration`, whose only supported value is -1: a new scheduler."""

MOMENTUM = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")
"""Parameters of OneCycle without effect while cycle_momentum is false."""

TORCH_SCHEDULERS = (
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
)
"""Names that DeepSpeed looks up in torch.optim.lr_scheduler."""
