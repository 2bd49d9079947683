"""axolotl's files: twenty configurations from the facts of the public ones, and the numbers that they must give."""

from collections.abc import Mapping
from json import dumps
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

_COMMON: Mapping[str, Any] = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [{"path": "data/talks.jsonl", "type": "chat_template"}],
    "dataset_prepared_path": "last_run_prepared",
    "val_set_size": 0.05,
    "output_dir": "./outputs/out",
    "sequence_len": 4096,
    "sample_packing": True,
    "wandb_project": None,
    "wandb_entity": None,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "resume_from_checkpoint": None,
    "logging_steps": 1,
    "attn_implementation": "flash_attention_2",
    "warmup_ratio": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}
_LORA: Mapping[str, Any] = {
    "adapter": "lora",
    "lora_model_dir": None,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
}
_PAIRS: Mapping[str, Any] = {
    "rl": "dpo",
    "datasets": [{"path": "data/pairs.jsonl", "type": "chatml.ultra"}],
    "sample_packing": False,
}
_HUB = [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}]
# name: (what differs from the common lines, the refused keys that change the numbers).
CONFIGURATIONS: Mapping[str, tuple[Mapping[str, Any], set[str]]] = {
    "fft": ({"micro_batch_size": 1, "learning_rate": "2e-5", "optimizer": "paged_adamw_8bit"}, set()),
    "lora": (_LORA, set()),
    "lora-hub": ({**_LORA, "datasets": _HUB}, set()),
    "lora-8bit": ({**_LORA, "load_in_8bit": True}, {"load_in_8bit"}),
    "qlora": (
        {**_LORA, "adapter": "qlora", "load_in_4bit": True, "optimizer": "paged_adamw_32bit"},
        {"load_in_4bit"},
    ),
    "lora-kernels": (
        {**_LORA, "lora_mlp_kernel": True, "lora_qkv_kernel": True, "loss_watchdog_threshold": 5.0},
        set(),
    ),
    "lora-ray": (
        {**_LORA, "use_ray": True, "ray_num_workers": 4, "deepspeed": "deepspeed_configs/zero1.json"},
        set(),
    ),
    "lora-modules": ({**_LORA, "lora_modules_to_save": ["embed_tokens", "lm_head"]}, set()),
    "lora-dora": ({**_LORA, "peft_use_dora": True, "lora_target_modules": ["q_proj", "v_proj"]}, set()),
    "lora-plus": ({**_LORA, "loraplus_lr_ratio": 16}, {"loraplus_lr_ratio"}),
    "relora": ({**_LORA, "relora": True, "relora_prune_ratio": 0.9}, {"relora"}),
    "lisa": ({"lisa_n_layers": 4, "lisa_step_interval": 20}, {"lisa_n_layers"}),
    "alpaca": ({**_LORA, "datasets": [{"path": "data/talks.jsonl", "type": "alpaca"}]}, set()),
    "completion": ({"datasets": [{"path": "data/text.jsonl", "type": "completion", "field": "body"}]}, set()),
    "pretraining": (
        {"datasets": None, "pretraining_dataset": [{"path": "data/text.jsonl"}], "max_steps": 100},
        set(),
    ),
    "dpo": ({**_LORA, **_PAIRS, "rl_beta": 0.2}, set()),
    "orpo": ({**_LORA, **_PAIRS, "rl": "orpo", "orpo_alpha": 0.1}, {"rl", "orpo_alpha", "datasets"}),
    "fsdp": (
        {
            "fsdp": ["full_shard", "auto_wrap"],
            "fsdp_config": {"fsdp_offload_params": True},
            "lr_scheduler": "linear",
        },
        set(),
    ),
    "liger": ({"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rms_norm": True}, set()),
    "context-parallel": (
        {"context_parallel_size": 4, "ring_attn_func": "varlen_llama3"},
        set(),
    ),
    "neftune": ({"neftune_noise_alpha": 5, "embedding_lr": 1e-5}, {"neftune_noise_alpha", "embedding_lr"}),
}


KEPT = ("lora", "qlora")
"""The configurations of the core; the others run with the further cases."""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and the data that the configurations name, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    model_folder("NousResearch/Llama-3.2-1B")
    for name in ("talks", "text", "pairs"):
        write(f"data/{name}.jsonl", "{}")
    write("deepspeed_configs/zero1.json", '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}')


def configuration(name: str) -> dict[str, Any]:
    return {**_COMMON, **CONFIGURATIONS[name][0]}


def run_of(table: dict[str, Any]) -> RunConfig:
    return adopted_run(write("a.yml", table))


@pytest.mark.parametrize(
    "name",
    [each if each in KEPT else pytest.param(each, marks=pytest.mark.extended) for each in CONFIGURATIONS],
)
def test_public_configurations_have_an_answer_for_every_key(name: str) -> None:
    changing = CONFIGURATIONS[name][1]
    path, shown = write("a.yml", configuration(name)), "datasets" not in changing
    account = assert_every_key_is_answered(path, changing=changing, shown=shown)
    assert account.system == "axolotl"


def test_a_lora_keeps_its_numbers() -> None:
    run = run_of(configuration("lora"))
    adapter, optimizer = run.adapter, run.optimizer
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 32, 16.0, 0.05)
    assert (adapter.targets, run.data.packing, run.data.too_long) == ("all", "best_fit", "drop")
    assert (run.training.micro_batch_size, run.training.micro_batches, run.training.epochs) == (2, 4, 4.0)
    assert (run.training.precision, run.training.recompute) == ("bf16", "full")
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("adamw", 0.0002, 0.0)
    assert (optimizer.betas, optimizer.minimum_ratio, optimizer.warmup_ratio) == ((0.9, 0.999), 0.0, 0.1)
    assert run.data.split == (0.95, 0.05, 0.0)
    assert (run.validation.every, run.checkpoint.every) == ("1/4 epochs", "1 epoch")
    assert run.run.seed == 42


def test_silent_defaults_are_axolotls() -> None:
    table = configuration("fft")
    for key in (
        "sequence_len",
        "sample_packing",
        "num_epochs",
        "micro_batch_size",
        "lr_scheduler",
        "warmup_ratio",
    ):
        del table[key]
    run = run_of(table)
    assert (run.training.sequence_length, run.training.micro_batch_size, run.training.epochs) == (512, 1, 1.0)
    assert (run.data.packing, run.optimizer.schedule, run.optimizer.warmup_ratio) == ("none", "cosine", 0.03)
    assert run.optimizer.learning_rate == 2e-5


def test_pairs_count_both_answers() -> None:
    run = run_of(configuration("dpo"))
    assert (run.data.kind, run.preference.loss, run.preference.beta) == ("preference", "sigmoid", 0.2)
    assert (run.training.micro_batch_size, run.training.micro_batches) == (4, 4)


def test_label_smoothing_and_the_order_of_data_are_taken() -> None:
    table = {**configuration("dpo"), "dpo_label_smoothing": 0.1, "shuffle_merged_datasets": False}
    settings = account_of(write("a.yml", table)).settings
    assert (settings["preference.label_smoothing"], settings["preference.beta"]) == (0.1, 0.2)
    assert settings["data.shuffle"] is False


def test_text_has_its_column_and_no_settings_of_conversations() -> None:
    run = run_of({**configuration("completion"), "train_on_inputs": False, "excess_length_strategy": "drop"})
    assert (run.data.kind, run.data.text_column, run.tokenizer.chat_template) == ("text", "body", None)


@pytest.mark.parametrize(
    ("more", "source"),
    [
        ({}, "hf:mhenrichsen/alpaca_2k_test"),
        ({"name": "en", "split": "test"}, "hf:mhenrichsen/alpaca_2k_test/en:test"),
    ],
)
def test_data_of_the_hub_are_named(more: dict[str, str], source: str) -> None:
    table = {**configuration("lora-hub"), "datasets": [{**_HUB[0], **more}]}
    assert account_of(write("a.yml", table)).settings["data.source"] == source


def test_a_part_of_a_split_is_refused_with_the_remedy() -> None:
    table = {**configuration("lora-hub"), "datasets": [{**_HUB[0], "split": "train[:10%]"}]}
    account = account_of(write("a.yml", table))
    assert "mhenrichsen/alpaca_2k_test: is on the Hub: download it" in answer(account, "datasets").reason


def test_sharded_data_parallel_becomes_zero() -> None:
    assert run_of(configuration("fsdp")).zero_stage == 3
    assert run_of({**configuration("fft"), "fsdp_config": {"reshard_after_forward": False}}).zero_stage == 2


def test_the_keys_of_deepspeeds_json_are_answered_too() -> None:
    table = {**configuration("lora-ray"), "deepspeed": "deepspeed_configs/other.json"}
    path = write("a.yml", table)
    keys = {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
        "no_such_key": 1,
    }
    account = account_of(path, write("other.json", dumps(keys)))
    assert account.settings["deepspeed.zero_optimization.overlap_comm"] is True
    assert account.settings["optimizer.gradient_clipping"] == 0.5
    assert "other.json: no_such_key" in refused(account)
    assert "name it as another PATH" in answer(account_of(path), "deepspeed").remedy


def test_a_hostfile_beside_gives_the_ranks() -> None:
    account = account_of(write("a.yml", configuration("lora")), write("hosts", "one slots=4\ntwo slots=4\n"))
    assert (account.ranks, account.launch) == (8, ["--hostfile hosts"])


@pytest.mark.parametrize(
    ("modules", "targets"),
    [
        (["query_key_value"], ("q_proj", "k_proj", "v_proj")),
        (["q_proj", "v_proj"], ("q_proj", "v_proj")),
        (["dense_h_to_4h", "dense"], ("up_proj", "o_proj")),
    ],
)
def test_targets_have_llamas_names(modules: list[str], targets: tuple[str, ...]) -> None:
    table = {**configuration("lora"), "lora_target_linear": None, "lora_target_modules": modules}
    assert run_of(table).adapter.targets == targets


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, "bf16"),
        ({"bf16": False}, "fp32"),
        ({"bf16": None}, "fp32"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": "auto", "fp16": None}, "bf16"),
    ],
)
def test_bf16_that_is_switched_off_is_fp32(keys: dict[str, Any], precision: str) -> None:
    table = {
        key: value for key, value in configuration("lora").items() if key not in ("bf16", "fp16", "tf32")
    }
    assert account_of(write("a.yml", {**table, **keys})).settings["training.precision"] == precision


@pytest.mark.parametrize(("schedule", "ratio"), [("cosine", 0.2), ("linear", 0.0)])
def test_the_least_rate_belongs_to_the_cosine(schedule: str, ratio: float) -> None:
    table = {**configuration("lora"), "lr_scheduler": schedule, "cosine_min_lr_ratio": 0.2}
    assert run_of(table).optimizer.minimum_ratio == ratio


def test_prompts_that_differ_are_said() -> None:
    account = account_of(write("a.yml", {**configuration("lora"), "chat_template": "llama3"}))
    assert "tokenizer's own template" in answer(account, "chat_template").reason
    account = account_of(write("a.yml", configuration("alpaca")))
    assert "begins with a sentence" in answer(account, "datasets").reason


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("datasets", "nothing"),
        ("datasets", [1]),
        ("datasets", [{"path": "data/talks.jsonl", "type": {"field_instruction": "x"}}]),
        ("datasets", [{"path": "data/talks.jsonl", "type": "chat_template", "roles_to_train": ["user"]}]),
        ("learning_rate", "fast"),
        ("lora_r", [8]),
        ("plugins", ["my.own.Plugin"]),
        ("adapter", "llama-adapter"),
        ("optimizer", "came_pytorch"),
        ("lr_scheduler", "rex"),
        ("chat_template", "jinja"),
        ("val_set_size", 200),
        ("lora_target_modules", ["in_proj"]),
        ("lora_tagret_linear", True),
        ("special_tokens", "<pad>"),
        ("context_parallel_size", True),
    ],
)
def test_what_megalite_lacks_is_refused_by_name(key: str, value: Any) -> None:
    table = {
        **configuration("lora"),
        "lora_target_linear": None,
        "lora_target_modules": ["q_proj"],
        key: value,
    }
    assert key in refused(account_of(write("a.yml", table)))


def test_a_misspelt_key_names_the_nearest_one() -> None:
    account = account_of(write("a.yml", {**configuration("lora"), "lora_alhpa": 3}))
    assert "did you mean lora_alpha?" in answer(account, "lora_alhpa").remedy
