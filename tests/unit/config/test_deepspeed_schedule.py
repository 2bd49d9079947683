"""DeepSpeed's schedulers: the rate of each update is the one that DeepSpeed's own class sets in its engine."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.deepspeed.scheduler import REQUIRED, SCHEDULERS
from megalite.config.deepspeed.scheduler_rates import DeepSpeedSchedule
from tests.support.parity import about

lr_schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
RATE = 3e-3
"""The optimizer's own."""

rates = st.floats(1e-6, 1e-2)
ratios = st.floats(0.0, 1.0)
steps = st.integers(1, 12)
warmup = {"warmup_num_steps": steps, "warmup_type": st.sampled_from(["log", "linear"])}
PARAMS = {
    "WarmupLR": {"warmup_min_lr": rates, "warmup_max_lr": rates, **warmup},
    "WarmupDecayLR": {"total_num_steps": steps, "warmup_min_lr": rates, "warmup_max_lr": rates, **warmup},
    "WarmupCosineLR": {
        "total_num_steps": steps,
        "warmup_min_ratio": ratios,
        "cos_min_ratio": ratios,
        **warmup,
    },
    "OneCycle": {
        "cycle_min_lr": rates,
        "cycle_max_lr": rates,
        "decay_lr_rate": ratios,
        "cycle_first_step_size": steps,
        "cycle_second_step_size": st.integers(0, 12),
        "cycle_first_stair_count": st.integers(0, 5),
        "cycle_second_stair_count": st.integers(0, 5),
        "decay_step_size": st.integers(0, 5),
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": rates,
        "lr_range_test_step_size": steps,
        "lr_range_test_step_rate": ratios,
        "lr_range_test_staircase": st.booleans(),
    },
}


def theirs(kind: str, params: dict[str, Any], updates: int) -> list[float]:
    """The rate of each update, as the engine drives the scheduler: one step of it after each update."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=RATE)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    found = []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return found


def ours(kind: str, params: dict[str, Any], updates: int) -> list[float]:
    names = {
        theirs: parameter.ours for theirs, parameter in SCHEDULERS[kind].parameters.items() if parameter.ours
    }
    held = {key: params[theirs] for theirs, key in names.items()}
    optimizer = {"learning_rate": RATE, "minimum_ratio": 0.0, **held}
    schedule = DeepSpeedSchedule(
        SCHEDULERS[kind].rate,
        SimpleNamespace(**optimizer),
        warmup_steps=held.get("warmup_steps", 0),
        total_steps=held.get("decay_steps", 1),
        params={key: value for key, value in params.items() if key not in names},
    )
    return [schedule(update) for update in range(updates)]


@pytest.mark.parametrize("kind", PARAMS)
def test_each_update_has_the_rate_of_deepspeeds_own_scheduler(kind: str) -> None:
    @settings(max_examples=120)
    @given(st.fixed_dictionaries(PARAMS[kind]))
    def same(params: dict[str, Any]) -> None:
        extra = {"cycle_momentum": False} if kind == "OneCycle" else {}
        assert ours(kind, params, 30) == about(theirs(kind, {**params, **extra}, 30))

    same()


@pytest.mark.parametrize("kind", PARAMS)
def test_the_first_updates_stay_at_the_lowest_rate(kind: str) -> None:
    """By hand: the scheduler has not stepped before the first update, and its first step is iteration 0."""
    params = {
        "WarmupLR": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 1.0,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
        "WarmupDecayLR": {
            "total_num_steps": 8,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 1.0,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
        "WarmupCosineLR": {
            "total_num_steps": 8,
            "warmup_min_ratio": 0.0,
            "cos_min_ratio": 0.1,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
        "OneCycle": {
            "cycle_min_lr": 0.0,
            "cycle_max_lr": 1.0,
            "decay_lr_rate": 0.0,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 4,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": 0,
            "decay_step_size": 0,
        },
        "LRRangeTest": {
            "lr_range_test_min_lr": 1.0,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
    }[kind]
    expected = {
        "WarmupLR": [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0],
        "WarmupDecayLR": [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5],
        "WarmupCosineLR": [0.0, 0.0, 0.25 * RATE, 0.5 * RATE, 0.75 * RATE],
        "OneCycle": [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5],
        "LRRangeTest": [1.0, 1.25, 1.5, 1.75],
    }[kind]
    assert ours(kind, params, len(expected)) == about(expected)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_parameters_and_their_defaults_are_those_of_the_installed_deepspeed(kind: str) -> None:
    found = dict(inspect.signature(getattr(lr_schedules, kind).__init__).parameters)
    for name in ("self", "optimizer"):
        found.pop(name)
    assert found.pop("last_batch_iteration").default == -1
    expected = {
        name: REQUIRED if each.default is inspect.Parameter.empty else each.default
        for name, each in found.items()
    }
    assert {name: parameter.default for name, parameter in SCHEDULERS[kind].parameters.items()} == expected
