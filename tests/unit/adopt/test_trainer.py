"""TrainingArguments of Hugging Face's Trainer as JSON, and which program a file belongs to."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.adopt.adopted import account_of, adopt_and_show, answer, refused, unanswered, write

ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-5,
    "max_steps": 500,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 50,
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "max_grad_norm": 0.5,
    "bf16": True,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 100,
    "logging_steps": 0.02,
    "report_to": ["tensorboard"],
}
MISSING = {"model", "train_dataset", "max_length"}
"""Trainer takes them in Python."""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def arguments_file(**changes: Any) -> Path:
    return write("training_args.json", json.dumps({**ARGUMENTS, **changes}))


def test_arguments_become_settings() -> None:
    path = arguments_file()
    account = account_of(path)
    settings = account.settings
    assert (account.system, unanswered(account, path)) == ("Hugging Face Trainer", set())
    assert refused(account) == MISSING
    assert (settings["training.steps"], "training.epochs" in settings) == (500, False)
    assert (settings["training.micro_batch_size"], settings["training.micro_batches"]) == (4, 2)
    assert (settings["optimizer.betas"], settings["optimizer.gradient_clipping"]) == ([0.9, 0.98], 0.5)
    assert (settings["optimizer.schedule"], settings["optimizer.minimum_ratio"]) == ("linear", 0.0)
    assert (settings["optimizer.warmup_steps"], settings["optimizer.weight_decay"]) == (50, 0.01)
    # 2% of 500 steps.
    assert (settings["monitor.every"], settings["checkpoint.every"]) == (10, 100)
    assert any("warm-up" in note for note in account.notes)


def test_the_run_file_takes_the_model_and_the_data_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    adopted, _ = adopt_and_show(arguments_file())
    assert adopted == 2
    assert "model.weights" in capsys.readouterr().out
    assert "learning_rate = 3e-05" in Path("run.toml").read_text()


@pytest.mark.extended
def test_every_argument_of_transformers_has_an_answer() -> None:
    from transformers import Seq2SeqTrainingArguments

    plain = str | int | float | bool
    table = {
        field.name: field.default if isinstance(field.default, plain) else None
        for field in dataclasses.fields(Seq2SeqTrainingArguments)
    }
    path = write("training_args.json", json.dumps(table))
    account = account_of(path)
    assert unanswered(account, path) == set()
    assert refused(account) == MISSING


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"warmup_steps": 0.1}, {"optimizer.warmup_ratio": 0.1}),
        ({"warmup_steps": 1}, {"optimizer.warmup_steps": 1}),
        ({"lr_scheduler_type": "constant"}, {"optimizer.schedule": "constant"}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 3e-6}},
            {"optimizer.schedule": "cosine", "optimizer.minimum_ratio": 3e-6 / 3e-5},
        ),
        ({"optim": "sgd", "adam_beta2": 0.999}, {"optimizer.name": "sgd"}),
        ({"optim": "lion_32bit"}, {"optimizer.name": "lion", "optimizer.betas": [0.9, 0.98]}),
        ({"max_steps": -1, "num_train_epochs": 2}, {"training.epochs": 2.0}),
        ({"bf16": False, "fp16": True}, {"training.precision": "fp16"}),
        ({"bf16": False, "tf32": True}, {"training.precision": "fp32", "training.tf32": True}),
        ({"save_strategy": "epoch"}, {"checkpoint.every": "1 epoch"}),
        ({"gradient_checkpointing": True}, {"training.recompute": "full"}),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, {"deepspeed.zero_optimization.stage": 2}),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2, "cpu_offload": True}}},
            {"deepspeed.zero_optimization.offload_optimizer.device": "cpu"},
        ),
        (
            {
                "lr_scheduler_type": None,
                "deepspeed": {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6}}},
            },
            {"optimizer.schedule": "deepspeed", "deepspeed.scheduler.params.warmup_min_lr": 1e-6},
        ),
        ({"fsdp": "shard_grad_op auto_wrap"}, {"deepspeed.zero_optimization.stage": 2}),
        ({"load_best_model_at_end": True}, {"checkpoint.best": True, "checkpoint.export": "best"}),
    ],
)
def test_words_of_the_trainer_have_settings(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    account = account_of(arguments_file(**changes))
    assert {name: account.settings.get(name) for name in settings} == settings


def test_silent_defaults_are_the_trainers() -> None:
    table = {"output_dir": "out", "learning_rate": 3e-5, "per_device_train_batch_size": 4, "adam_beta1": 0.8}
    settings = account_of(write("training_args.json", json.dumps(table))).settings
    assert (settings["optimizer.betas"], settings["optimizer.gradient_clipping"]) == ([0.8, 0.999], 1.0)
    assert (settings["optimizer.schedule"], settings["optimizer.weight_decay"]) == ("linear", 0.0)
    assert (settings["training.epochs"], settings["training.precision"]) == (3.0, "fp32")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim", "adafactor"),
        ("lr_scheduler_type", "inverse_sqrt"),
        ("auto_find_batch_size", True),
        ("neftune_noise_alpha", 5.0),
        ("resume_from_checkpoint", "out/checkpoint-100"),
        ("learning_rate", float("nan")),
        ("per_device_train_batch_size", 1.5),
        ("lerning_rate", 1.0),
    ],
)
def test_what_megalite_lacks_is_refused_by_name(key: str, value: Any) -> None:
    account = account_of(arguments_file(**{key: value}))
    assert answer(account, key).numbers


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"gradient_clipping": "much"}, "gradient_clipping"),
        ({"fp16": {"enabled": True, "loss_scale_window": "x"}}, "fp16.loss_scale_window"),
        ({"zero_optimization": {"stage": 9}}, "zero_optimization.stage"),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-6, "cycle_max_lr": 3e-5}}},
            "scheduler.params.cycle_momentum",
        ),
    ],
)
def test_a_value_that_no_run_has_is_refused(table: dict[str, Any], key: str) -> None:
    assert f"deepspeed: {key}" in refused(account_of(arguments_file(deepspeed=table)))


def test_a_warm_up_of_the_constant_schedule_has_no_effect_as_there() -> None:
    account = account_of(arguments_file(lr_scheduler_type="constant"))
    assert answer(account, "warmup_steps").outcome.value == "without effect here"


@pytest.mark.parametrize(
    ("table", "system"),
    [
        ({"pipe-parallel-size": 1, "num_layers": 2}, "GPT-NeoX"),
        (
            {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {}},
            "GPT-NeoX",
        ),
        ({"base_model": "m", "adapter": "lora", "learning_rate": 1e-4}, "axolotl"),
        ({"model_name_or_path": "m", "stage": "sft", "learning_rate": 1e-4}, "LLaMA-Factory"),
        (
            {"output_dir": "out", "learning_rate": 1e-4, "per_device_train_batch_size": 1},
            "Hugging Face Trainer",
        ),
    ],
)
def test_a_file_belongs_to_the_program_that_knows_its_keys(table: dict[str, Any], system: str) -> None:
    assert account_of(write("a.yml", table)).system == system
