"""Optimizer and scheduler of DeepSpeed's JSON as ours, with DeepSpeed's defaults."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.runs import load, problems


@pytest.mark.parametrize(
    ("block", "ours", "rest"),
    [
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}},
            {"decay_steps": 8, "warmup_steps": 2, "learning_rate": 0.001},
            {"warmup_min_lr": 0.0, "warmup_type": "log"},
        ),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_type": "linear"}},
            {"decay_steps": 9, "warmup_steps": 1000, "minimum_ratio": 0.0001, "learning_rate": 3e-4},
            {"warmup_min_ratio": 0.0, "warmup_type": "linear"},
        ),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "cos_min_ratio": 0.01}},
            {"decay_steps": None, "minimum_ratio": 0.01},
            {"warmup_min_ratio": 0.0, "warmup_type": "log"},
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": "auto"}},
            {"learning_rate": 0.5, "warmup_steps": 0},
            {"warmup_min_lr": 0.0, "warmup_type": "log"},
        ),
        (
            {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 5}},
            {"learning_rate": 0.001},
            {
                "lr_range_test_step_size": 5,
                "lr_range_test_step_rate": 1.0,
                "lr_range_test_staircase": False,
            },
        ),
    ],
)
def test_a_scheduler_has_deepspeeds_defaults_for_what_it_leaves_out(
    tmp_path: Path, block: dict[str, Any], ours: dict[str, Any], rest: dict[str, Any]
) -> None:
    config = load(tmp_path, ds_json={"scheduler": block}).config
    assert config.optimizer.schedule == "deepspeed"
    assert {key: getattr(config.optimizer, key) for key in ours} == ours
    kind, params = config.deepspeed_scheduler
    assert kind == block["type"]
    assert {key: value for key, value in params.items() if value != "auto"} == rest
    assert "scheduler" not in config.deepspeed_json()


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "AdamW"}, (1e-3, (0.9, 0.999), 1e-8, 0.0)),
        ({"type": "Adam", "params": {"lr": 0.5, "adam_w_mode": False}}, (0.5, (0.9, 0.999), 1e-8, 0.0)),
        ({"type": "AdamW", "params": {"torch_adam": True, "eps": 0.25}}, (1e-3, (0.9, 0.999), 0.25, 0.01)),
        ({"type": "AdamW", "params": {"betas": "auto", "lr": "auto"}}, (3e-4, (0.9, 0.95), 1e-8, 0.0)),
    ],
)
def test_an_optimizer_has_deepspeeds_defaults_for_what_it_leaves_out(
    tmp_path: Path, optimizer: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    found = load(tmp_path, ds_json={"optimizer": optimizer}).config.optimizer
    assert (found.learning_rate, found.betas, found.eps, found.weight_decay) == expected


@pytest.mark.parametrize(
    "kind", ["FusedAdam", "DeepSpeedCPUAdam", "fusedadam", "FusedLion", "DeepSpeedCPULion"]
)
def test_the_name_of_a_class_of_deepspeed_is_its_update_with_a_note(tmp_path: Path, kind: str) -> None:
    name = "lion" if "lion" in kind.lower() else "adamw"
    params = {"lr": 0.5, "weight_decay": 0.25, **({"adam_w_mode": True} if name == "adamw" else {})}
    loaded = load(tmp_path, ds_json={"optimizer": {"type": kind, "params": params}})
    optimizer = loaded.config.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == (name, 0.5, 0.25)
    assert optimizer.betas == (0.9, 0.999)
    called = "Lion" if name == "lion" else "AdamW"
    said = f'ds.json: optimizer.type "{kind}" is taken as {called}, whose update this class of DeepSpeed computes'
    assert said in loaded.notes


def test_a_warm_up_by_share_stands_beside_a_scheduler_that_does_not_say_its_own(tmp_path: Path) -> None:
    ours = {"optimizer.warmup_ratio": 0.25}
    for params in ({}, {"warmup_num_steps": "auto"}):
        optimizer = load(
            tmp_path, ours, ds_json={"scheduler": {"type": "WarmupLR", "params": params}}
        ).config.optimizer
        assert (optimizer.warmup_ratio, optimizer.warmup_steps) == (0.25, 0)
    block = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}
    [problem] = problems(tmp_path, ours, ds_json=block)
    assert str(problem) == (
        "optimizer.warmup_ratio: 0.25 is set together with optimizer.warmup_steps = 7 "
        "(scheduler.params.warmup_num_steps in ds.json); set only one of them"
    )


def test_the_run_file_comes_before_a_default_of_deepspeed(tmp_path: Path) -> None:
    changes = {"optimizer.weight_decay": 0.25, "optimizer.warmup_steps": 3}
    ds_json = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    loaded = load(tmp_path, changes, ds_json=ds_json)
    assert (loaded.config.optimizer.weight_decay, loaded.config.optimizer.warmup_steps) == (0.25, 3)
    assert loaded.origin("optimizer.betas") == "DeepSpeed's default of optimizer.params.betas"
    assert loaded.origin("optimizer.weight_decay") == "run.toml"


def test_a_scheduler_replaces_the_rate_of_the_optimizer(tmp_path: Path) -> None:
    """As in DeepSpeed; a scheduler without its own rate keeps it."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.5}}
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
    loaded = load(tmp_path, ds_json={"optimizer": optimizer, "scheduler": decay})
    assert loaded.config.optimizer.learning_rate == 0.001
    said = "ds.json: optimizer.params.lr has no effect: scheduler.params.warmup_max_lr replaces it, as in DeepSpeed"
    assert said in loaded.notes
    loaded = load(tmp_path, ds_json={"optimizer": optimizer, "scheduler": {"type": "WarmupLR"}})
    assert loaded.config.optimizer.learning_rate == 0.5


def test_sgd_is_read(tmp_path: Path) -> None:
    optimizer = load(
        tmp_path, ds_json={"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}
    ).config.optimizer
    assert (optimizer.name, optimizer.momentum) == ("sgd", 0.9)


def test_lion_is_read_with_deepspeeds_defaults(tmp_path: Path) -> None:
    ds_json = {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 2}}
    optimizer = load(tmp_path, ds_json=ds_json).config.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.betas) == ("lion", 1e-4, (0.9, 0.999))
