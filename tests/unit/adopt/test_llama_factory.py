"""LLaMA-Factory's files: twenty configurations from the facts of the public ones, and the numbers that they give."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megalite.config.sections.schema import RunConfig
from tests.unit.adopt.adopted import (
    account_of,
    adopted_run,
    answer,
    assert_every_key_is_answered,
    model_folder,
    refused,
    write,
)

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
_COMMON: Mapping[str, Any] = {
    "model_name_or_path": MODEL,
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "identity,alpaca_en_demo",
    "template": "qwen3_nothink",
    "cutoff_len": 2048,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "output_dir": "saves/qwen3-4b/lora/sft",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
_FULL: Mapping[str, Any] = {
    "finetuning_type": "full",
    "learning_rate": 1.0e-5,
    "gradient_accumulation_steps": 2,
}
_PAIRS: Mapping[str, Any] = {"stage": "dpo", "pref_beta": 0.1, "pref_loss": "sigmoid", "dataset": "pairs"}
# name: (what differs from the common lines, the refused keys that change the numbers).
CONFIGURATIONS: Mapping[str, tuple[Mapping[str, Any], set[str]]] = {
    "lora-sft": ({}, set()),
    "lora-sft-demo": ({"max_samples": 1000}, {"max_samples"}),
    "lora-sft-ds1": ({"deepspeed": "deepspeed/ds_z1_config.json"}, set()),
    "full-sft": (_FULL, set()),
    "lora-dpo": ({**_PAIRS, "learning_rate": 5.0e-6}, set()),
    "lora-ipo": ({**_PAIRS, "pref_loss": "ipo"}, set()),
    "lora-orpo": ({**_PAIRS, "pref_loss": "orpo"}, {"pref_loss"}),
    "lora-kto": ({"stage": "kto", "pref_beta": 0.1, "dataset": "pairs"}, {"stage"}),
    "lora-reward": ({"stage": "rm", "dataset": "pairs"}, {"stage"}),
    "lora-pretrain": ({"stage": "pt", "dataset": "c4_demo", "template": None}, set()),
    "lora-plus": ({"loraplus_lr_ratio": 16.0}, {"loraplus_lr_ratio"}),
    "pissa": ({"pissa_init": True, "pissa_iter": 16, "pissa_convert": True}, {"pissa_init"}),
    "qlora": ({"quantization_bit": 4, "quantization_method": "bnb"}, {"quantization_bit"}),
    "freeze": ({"finetuning_type": "freeze", "freeze_trainable_layers": 8}, {"finetuning_type"}),
    "galore": ({**_FULL, "use_galore": True, "galore_rank": 128}, {"use_galore"}),
    "muon": ({**_FULL, "use_muon": True}, {"use_muon"}),
    "neat-packing": ({"packing": True, "neat_packing": True, "flash_attn": "fa2"}, set()),
    "packing": ({"packing": True, "enable_liger_kernel": True}, set()),
    "dora": (
        {"use_dora": True, "lora_alpha": 32, "lora_dropout": 0.1, "lora_target": "q_proj,v_proj"},
        set(),
    ),
    "validated": ({"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 500}, set()),
    "hub-data": ({"dataset": "on_the_hub"}, set()),
}
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "talks": {
        "file_name": "talks.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content"},
    },
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "chosen": "chosen"},
    },
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "body"}},
    "on_the_hub": {"hf_hub_url": "org/on_the_hub", "subset": "all"},
    "here_and_on_the_hub": {"hf_hub_url": "org/both", "file_name": "identity.json"},
    "on_another_hub": {"ms_hub_url": "org/on_the_hub"},
    "here_and_on_another_hub": {"ms_hub_url": "org/on_the_hub", "file_name": "identity.json"},
    "folder_of_the_hub": {"hf_hub_url": "org/code", "folder": "python"},
    "revision_of_the_hub": {"hf_hub_url": "org/code", "revision": "v2"},
    "renamed": {"file_name": "identity.json", "columns": {"response": "solution"}},
}


KEPT = ("lora-sft", "lora-sft-demo")
"""The configurations of the core; the others run with the further cases."""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and the data that the configurations name, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    model_folder(MODEL)
    for name in ("identity.json", "alpaca_en_demo.json", "talks.json", "pairs.json", "c4_demo.jsonl"):
        write(f"data/{name}", "[]")
    write("data/dataset_info.json", json.dumps(INFO))
    write("deepspeed/ds_z1_config.json", '{"train_batch_size": "auto", "zero_optimization": {"stage": 1}}')


def configuration(name: str) -> dict[str, Any]:
    return {**_COMMON, **CONFIGURATIONS[name][0]}


def run_of(table: dict[str, Any]) -> RunConfig:
    return adopted_run(write("a.yaml", table))


@pytest.mark.parametrize(
    "name",
    [each if each in KEPT else pytest.param(each, marks=pytest.mark.extended) for each in CONFIGURATIONS],
)
def test_public_configurations_have_an_answer_for_every_key(name: str) -> None:
    changing = CONFIGURATIONS[name][1]
    path, shown = write("a.yaml", configuration(name)), "dataset" not in changing
    account = assert_every_key_is_answered(path, changing=changing, shown=shown)
    assert account.system == "LLaMA-Factory"


def test_a_lora_keeps_its_numbers() -> None:
    run = run_of(configuration("lora-sft"))
    adapter, optimizer = run.adapter, run.optimizer
    # lora_alpha is twice the rank where it is not set.
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 8, 16.0, 0.0)
    assert adapter.targets == "all"
    assert run.data.source == ("data/identity.json", "data/alpaca_en_demo.json")
    assert (run.data.packing, run.training.sequence_length) == ("none", 2048)
    assert (run.training.micro_batch_size, run.training.micro_batches, run.training.epochs) == (1, 8, 3.0)
    assert (run.training.precision, run.training.recompute) == ("bf16", "full")
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_ratio) == (1e-4, "cosine", 0.1)
    assert (optimizer.betas, optimizer.weight_decay, optimizer.minimum_ratio) == ((0.9, 0.999), 0.0, 0.0)
    assert (run.run.folder, run.checkpoint.every, run.monitor.every) == ("saves/qwen3-4b/lora/sft", 500, 10)


def test_silent_defaults_are_llama_factorys() -> None:
    keys = ("model_name_or_path", "dataset", "output_dir")
    run = run_of({key: _COMMON[key] for key in keys})
    assert (run.data.kind, run.adapter.kind, run.adapter.rank, run.adapter.alpha) == (
        "instruct",
        "lora",
        8,
        16.0,
    )
    assert (run.training.micro_batch_size, run.training.micro_batches, run.training.epochs) == (8, 1, 3.0)
    assert (run.training.precision, run.optimizer.learning_rate, run.optimizer.schedule) == (
        "fp32",
        5e-5,
        "linear",
    )


def test_pairs_count_both_answers() -> None:
    run = run_of(configuration("lora-dpo"))
    assert (run.data.kind, run.preference.loss, run.preference.beta) == ("preference", "sigmoid", 0.1)
    assert (run.training.micro_batch_size, run.training.micro_batches) == (2, 8)


def test_a_switch_that_disables_is_read_the_other_way_round() -> None:
    for disabled, recompute in ((True, "none"), (False, "full")):
        table = {**configuration("lora-sft"), "disable_gradient_checkpointing": disabled}
        assert account_of(write("a.yaml", table)).settings["training.recompute"] == recompute


def test_text_has_the_column_of_dataset_info() -> None:
    run = run_of(configuration("lora-pretrain"))
    assert (run.data.kind, run.data.source, run.data.text_column) == ("text", "data/c4_demo.jsonl", "body")


def test_packed_conversations_that_see_each_other_are_said() -> None:
    assert run_of(configuration("packing")).data.packing == "greedy"
    assert "see each other" in answer(account_of(write("a.yaml", configuration("packing"))), "packing").reason
    assert (
        answer(account_of(write("a.yaml", configuration("neat-packing"))), "packing").outcome.value == "taken"
    )


def test_the_info_is_found_beside_the_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.yaml", configuration("lora-sft")).absolute()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = account_of(path).settings
    names = ("identity.json", "alpaca_en_demo.json")
    assert settings["data.source"] == [str(tmp_path / "data" / name) for name in names]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "download it") for name in INFO if name.endswith(("another_hub", "of_the_hub"))),
        ("no_such", "is not in dataset_info.json"),
        ("renamed", "its column solution"),
    ],
)
def test_data_that_megalite_cannot_read_are_refused(name: str, reason: str) -> None:
    account = account_of(write("a.yaml", {**_COMMON, "dataset": name}))
    assert reason in answer(account, "dataset").reason


def test_data_of_the_hub_are_named() -> None:
    names = "on_the_hub, identity, here_and_on_the_hub"
    settings = account_of(write("a.yaml", {**_COMMON, "dataset": names})).settings
    assert settings["data.source"] == ["hf:org/on_the_hub/all", "data/identity.json", "hf:org/both"]


def test_without_dataset_info_the_names_mean_nothing() -> None:
    Path("data/dataset_info.json").unlink()
    account = account_of(write("a.yaml", configuration("lora-sft")))
    assert "data.source" in answer(account, "dataset").remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_rank", "many"),
        ("lora_rank", {"q_proj": 8}),
        ("stage", "ppo"),
        ("val_size", 100),
        ("lr_scheduler_type", "polynomial"),
        ("rope_scaling", "yarn"),
        ("optim", "adafactor"),
        ("neftune_noise_alpha", 5),
        ("add_tokens", "<a>,<b>"),
        ("mix_strategy", "interleave_under"),
        ("default_system", "You are terse."),
        ("lora_taget", "all"),
        ("dataset", {"a": 1}),
    ],
)
def test_what_megalite_lacks_is_refused_by_name(key: str, value: Any) -> None:
    assert key in refused(account_of(write("a.yaml", {**_COMMON, key: value})))
