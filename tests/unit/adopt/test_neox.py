"""GPT-NeoX's files: public configurations with their data files, and the numbers that they must give."""

from math import inf, sqrt
from pathlib import Path
from typing import Any

import pytest

from megalite.config.sections.schema import RunConfig
from megalite.convert.adopt.account import Outcome
from megalite.errors import ConfigError
from tests.unit.adopt.adopted import (
    account_of,
    adopted_run,
    answer,
    assert_every_key_is_answered,
    refused,
    write,
)
from tests.unit.adopt.neox_facts import CLUSTER, LOCAL, NAMES, REFUSED, configuration

KEPT = ("19M", "sparse")
"""The configurations of the core; the others run with the further cases."""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the configurations name, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    for name in ("enwik8_text_document", "enwik8_val_text_document"):
        for suffix in ("bin", "idx"):
            write(f"data/enwik8/{name}.{suffix}", "")
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        write(f"data/{name}", "{}")


def run_of(*tables: dict[str, Any]) -> RunConfig:
    """The run of configurations that are adopted whole."""
    return adopted_run(*(write(f"{number}.yml", table) for number, table in enumerate(tables)))


@pytest.mark.parametrize(
    "name", [each if each in KEPT else pytest.param(each, marks=pytest.mark.extended) for each in NAMES]
)
def test_public_configurations_have_an_answer_for_every_key(name: str) -> None:
    paths = write("model.yml", configuration(name)), write("local_setup.yml", LOCAL)
    assert_every_key_is_answered(*paths, changing=REFUSED.get(name, set()))


def test_pythia_1b_has_its_published_numbers() -> None:
    run = run_of(configuration("pythia-1B"), dict(LOCAL))
    model, optimizer, training = run.model, run.optimizer, run.training
    assert (model.family, model.norm_placement, model.norm) == ("gpt_neox", "parallel", "layer_norm")
    assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads) == (16, 2048, 8)
    assert (model.intermediate_size, model.partial_rotary_factor, model.rope_theta) == (8192, 0.25, 10000.0)
    assert (model.tie_word_embeddings, model.attention_bias, model.mlp_bias) == (False, True, True)
    assert model.initializer_range == sqrt(2 / (5 * 2048))
    assert (training.precision, training.micro_batch_size, training.micro_batches) == ("bf16", 4, 4)
    assert (training.steps, training.sequence_length, training.recompute) == (143000, 2048, "full")
    assert (optimizer.learning_rate, optimizer.betas, optimizer.eps) == (0.00025, (0.9, 0.95), 1e-8)
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.decay_steps) == ("cosine", 1430, 143000)
    assert optimizer.minimum_ratio == 0.00025 / 10 / 0.00025
    assert (optimizer.weight_decay, optimizer.gradient_clipping) == (0.1, 1.0)
    assert (run.zero_stage, run.run.folder, run.checkpoint.every) == (0, "checkpoints", 1000)


def test_gpt_neox_20b_has_its_published_numbers() -> None:
    run = run_of(configuration("20B"), dict(LOCAL))
    assert (run.parallel.pipeline, run.parallel.tensor) == (4, 2)
    assert (run.model.hidden_act, run.model.hidden_size) == ("gelu_pytorch_tanh", 6144)
    assert (run.training.precision, run.training.initial_loss_scale_power) == ("fp16", 12)
    assert run.training.loss_scale_hysteresis == 2
    assert run.data.split == (0.995, 0.004, 0.001)
    assert run.zero_stage == 1
    assert run.deepspeed_json()["zero_optimization"]["allgather_bucket_size"] == 500000000
    # 150,000 steps, of which 1% warm up.
    assert (run.optimizer.warmup_steps, run.optimizer.weight_decay) == (1500, 0.01)


def test_llama_2_70b_has_the_width_and_epsilon_of_metas_files() -> None:
    run = run_of(configuration("llama2-70B"), dict(LOCAL))
    model = run.model
    assert (model.family, model.intermediate_size, model.num_key_value_heads) == ("llama", 28672, 8)
    assert (model.rms_norm_eps, model.hidden_act, model.gated_mlp) == (1e-5, "silu", True)
    assert (model.attention_bias, model.mlp_bias, model.norm_placement) == (False, False, "pre")


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"intermediate_size": 32768}, 11008),
        ({"intermediate_size": 43008, "mlp_multiple_of": 1}, 14336),
        ({"intermediate_size": 14336, "mlp_multiple_of": 14336}, 14336),
        ({"activation": "gelu", "mlp_multiple_of": 1}, 16384),
        ({"activation": "gelu", "mlp_multiple_of": 1, "expansion_factor": 2.5}, 10240),
    ],
)
def test_the_width_of_the_mlp_follows_neoxs_arithmetic(changes: dict[str, Any], width: int) -> None:
    table = {**configuration("llama-7B"), **changes}
    if "intermediate_size" not in changes:
        del table["intermediate_size"]
    assert run_of(table, dict(LOCAL)).model.intermediate_size == width


def test_a_width_that_neox_itself_cannot_multiply_is_refused() -> None:
    table = {**configuration("llama-7B"), "intermediate_size": 14336, "mlp_multiple_of": 1}
    account = account_of(write("a.yml", table))
    assert "4779 columns and 4778 rows" in answer(account, "intermediate_size").reason


def test_silent_defaults_of_neox_are_written_out() -> None:
    table = configuration("19M")
    for key in ("weight_decay", "gradient_clipping", "min_lr", "lr_decay_style", "warmup", "no_weight_tying"):
        del table[key]
    table["optimizer"] = {"type": "Adam", "params": {"lr": 0.001}}
    run = run_of(table, dict(LOCAL))
    optimizer = run.optimizer
    assert (optimizer.betas, optimizer.weight_decay, optimizer.gradient_clipping) == ((0.9, 0.999), 0.1, 1.0)
    assert (optimizer.schedule, optimizer.minimum_ratio, optimizer.warmup_steps) == ("linear", 0.0, 3200)
    assert run.model.tie_word_embeddings
    assert run.data.split == (0.969, 0.03, 0.001)


def test_differences_in_the_numbers_are_said() -> None:
    account = account_of(write("a.yml", configuration("125M")), write("b.yml", LOCAL))
    wang = answer(account, "output_layer_init_method")
    # sqrt(2 / (5 * 768)) / sqrt(2 * 12) here, 2 / 12 / sqrt(768) there.
    assert wang.outcome.value == "changed"
    assert "0.00466 instead of 0.00601" in wang.reason
    notes = " ".join(account.notes)
    assert all(word in notes for word in ("warm-up", "order of samples", "padded"))


def test_linear_decay_that_stops_at_a_least_rate_is_said() -> None:
    account = account_of(write("a.yml", {**configuration("125M"), "lr_decay_style": "linear"}))
    assert answer(account, "min_lr").outcome.value == "changed"


def test_a_sliding_window_counts_the_token_itself_here() -> None:
    run = run_of(configuration("mistral-7B"), dict(LOCAL))
    assert run.model.sliding_window == 4097


def test_files_of_a_cluster_have_training_and_validation_text_of_their_own() -> None:
    run = run_of(configuration("125M"), dict(CLUSTER))
    assert run.data.source == "data/enwik8/enwik8_text_document"
    assert run.data.validation == "data/enwik8/enwik8_val_text_document"
    assert (run.data.split, run.validation.every) == (None, 1000)


def test_blends_keep_their_weights() -> None:
    paths = ["data/enwik8/enwik8_text_document", "data/enwik8/enwik8_val_text_document"]
    local = {
        "train_data_paths": paths,
        "train-data-weights": [0.3, 0.7],
        "vocab_file": "data/gpt2-vocab.json",
    }
    table = {key: value for key, value in configuration("125M").items() if not key.startswith("eval")}
    run = run_of(table, local)
    assert [(part.source, part.weight) for part in run.data.blend or ()] == list(
        zip(paths, (0.3, 0.7), strict=True)
    )


def test_a_hostfile_becomes_an_argument_of_the_launcher() -> None:
    assert account_of(write("a.yml", configuration("125M"))).launch == ["--hostfile /mock_path"]


@pytest.mark.parametrize(
    ("keys", "precision", "hysteresis"),
    [
        ({"bf16": {"enabled": True}}, "bf16", 1),
        ({"precision": "bfloat16"}, "bf16", 1),
        ({"fp16": {"enabled": True}}, "fp16", 2),
        ({"fp16": {"enabled": True, "hysteresis": 3}}, "fp16", 3),
        ({"fp16": {"enabled": True, "type": "bfloat16", "hysteresis": 3}}, "bf16", 1),
        ({}, "fp32", 1),
    ],
)
def test_number_types_and_the_loss_scale(keys: dict[str, Any], precision: str, hysteresis: int) -> None:
    table = {key: value for key, value in configuration("350M").items() if key != "fp16"}
    training = run_of({**table, **keys}, dict(LOCAL)).training
    assert (training.precision, training.loss_scale_hysteresis) == (precision, hysteresis)


def test_clipping_is_that_of_deepspeed() -> None:
    table = {**configuration("350M"), "clip_grad": 0.5}
    assert run_of({**table, "gradient_clipping": 0.25}, dict(LOCAL)).optimizer.gradient_clipping == 0.25
    del table["gradient_clipping"]
    assert run_of(table, dict(LOCAL)).optimizer.gradient_clipping == 1.0


def test_a_hostfile_beside_gives_the_ranks() -> None:
    account = account_of(write("a.yml", configuration("350M")), write("hosts", "one slots=8\n"))
    assert (account.ranks, account.launch) == (8, ["--hostfile hosts"])


def test_a_file_of_the_model_alone_says_what_is_missing() -> None:
    account = account_of(write("a.yml", {"num_layers": 2, "hidden-size": 64, "num_attention_heads": 4}))
    assert {"seq_length", "data_path", "train_iters", "train_micro_batch_size_per_gpu"} <= refused(account)


@pytest.mark.parametrize(
    ("keys", "micro_batches"),
    [
        ({"gas": 1}, 1),
        ({"gas": 4, "gradient_accumulation_steps": 4}, 4),
        ({"gas": 2, "train_batch_size": 64}, None),
    ],
)
def test_gas_repeats_the_steps_of_accumulation(keys: dict[str, int], micro_batches: int | None) -> None:
    account = account_of(write("a.yml", {**configuration("pythia-1-4B"), **keys}))
    assert answer(account, "gas").outcome.value == "without effect here"
    assert account.settings.get("training.micro_batches") == micro_batches


@pytest.mark.parametrize(
    ("keys", "used"), [({"gas": 8}, 1), ({"gas": 8, "gradient-accumulation-steps": 2}, 2)]
)
def test_gas_that_neox_overwrites_with_another_number_is_refused(keys: dict[str, int], used: int) -> None:
    account = account_of(write("a.yml", {**configuration("pythia-1-4B"), **keys}))
    refusal = answer(account, "gas")
    assert refusal.numbers and f"gradient_accumulation_steps, which is {used}" in refusal.reason
    assert refusal.remedy == f"remove it for {used}, or write gradient_accumulation_steps: 8 for its value"
    assert account.settings["training.micro_batches"] == used


def test_the_type_of_the_mlp_of_an_older_neox_is_answered() -> None:
    answers = [
        answer(account_of(write("a.yml", {**configuration("19M"), "mlp_type": value})), "mlp_type")
        for value in ("regular", "llama")
    ]
    assert [each.outcome for each in answers] == [Outcome.NO_EFFECT, Outcome.REFUSED]
    assert answers[1].numbers and "activation: swiglu" in answers[1].remedy


def test_unknown_keys_are_refused_by_name_with_the_nearest_one() -> None:
    table = configuration("19M")
    table["zero_optimization"]["algather_bucket_size"] = 1
    account = account_of(write("a.yml", {**table, "num_layer": 3, "nothing_like_it_xyz": None}))
    assert "did you mean num_layers?" in answer(account, "num_layer").remedy
    assert "allgather_bucket_size" in answer(account, "zero_optimization.algather_bucket_size").remedy
    assert answer(account, "nothing_like_it_xyz").numbers


def test_a_key_of_two_files_is_an_error_as_in_neox() -> None:
    paths = write("a.yml", {"num-layers": 2}), write("b.yml", {"num_layers": 2})
    with pytest.raises(ConfigError, match=r"num_layers: stands in a\.yml and in b\.yml"):
        account_of(*paths)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", "many"),
        ("hidden_size", [1]),
        ("optimizer", "Adam"),
        ("warmup", 7),
        ("split", "a,b"),
        ("attention_config", "flash"),
        ("zero_optimization", {"stage": 9}),
        ("zero_optimization", {"stage": 1, "param_persistence_threshold": inf}),
        ("train_data_weights", [1.0]),
        ("init_method_std", ".inf"),
        ("gradient_clipping", "much"),
        ("norm", ["layernorm"]),
        ("activation", {"swiglu": 1}),
    ],
)
def test_unusable_values_are_refused_by_name(key: str, value: Any) -> None:
    account = account_of(write("a.yml", {**configuration("19M"), key: value}))
    assert any(each == key or each.startswith(f"{key}.") for each in refused(account))
