"""Flags of DeepSpeed's launch convention are taken; those of Megatron-LM are answered with ours."""

import argparse
import re
from pathlib import Path

import pytest

from megalite.cli import main
from megalite.cli.arguments import options_and_settings
from megalite.config.flags import split_overrides
from megalite.config.foreign_flags import with_deepspeeds_flags
from megalite.config.load import load_config
from megalite.config.sections.describe import setting
from megalite.errors import ConfigError
from tests.unit.config.runs import changed, load, problems, write_run

ZERO = {"zero_optimization": {"stage": 1}}
KEY = re.compile(
    r"--((?:run|model|parallel|training|optimizer|tokenizer|data|validation|checkpoint|monitor)\.\w+)"
)


@pytest.mark.parametrize(
    "flags",
    [
        ["--deepspeed", "--deepspeed_config", "ds.json"],
        ["--deepspeed", "--deepspeed_config=ds.json"],
        ["--deepspeed_config", "ds.json"],
        ["--deepspeed-config", "ds.json", "--deepspeed"],
        ["--deepspeed", "ds.json"],
        ["--deepspeed=ds.json"],
        ["--deepspeed.config", "ds.json"],
    ],
)
def test_deepspeeds_flags_name_its_file(
    tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path, ds_json=ZERO)  # writes ds.json
    path = write_run(tmp_path, changed({}))
    monkeypatch.chdir(tmp_path)
    own, overrides = split_overrides(["run.toml", *flags, "--run.seed", "3"])
    assert own == ["run.toml"]
    for words in (overrides, [*flags, "--run.seed", "3"]):
        config = load_config(path, *words)
        assert (config.zero_stage, config.run.seed) == (1, 3)
    assert main(["config", "show", *flags, "run.toml", "--local_rank=0"]) == 0


def test_the_flags_are_those_that_deepspeed_adds_to_a_script() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    names = [name for action in parser._actions for name in action.option_strings if "deepspeed" in name]
    assert sorted(names) == ["--deepspeed", "--deepspeed_config"]
    assert with_deepspeeds_flags([names[0], names[1], "ds.json"]) == [
        "--deepspeed",
        "--deepspeed.config=ds.json",
    ]


def test_the_switch_takes_no_run_file() -> None:
    assert split_overrides(["--deepspeed", "run.toml"]) == (["run.toml"], ["--deepspeed"])


def test_the_switch_needs_a_configuration(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, flags=["--deepspeed"])
    assert str(problem) == (
        "--deepspeed: asks for DeepSpeed, but nothing configures it; add --deepspeed_config ds.json, or a section "
        "[deepspeed] to RUN.toml"
    )
    assert problems(tmp_path, {"deepspeed.zero_optimization.stage": 1}, flags=["--deepspeed"]) == []
    assert problems(tmp_path, flags=["--deepspeed", "--deepspeed.zero_optimization.stage=1"]) == []
    [problem] = problems(tmp_path, flags=["--deepspeed_config"])
    assert str(problem).startswith("--deepspeed.config: has no value")


TYPED = {
    "--num-layers 12": "--model.num_hidden_layers 12",
    "--hidden-size 768": "--model.hidden_size 768",
    "--num-attention-heads 12": "--model.num_attention_heads 12",
    "--ffn-hidden-size 3072": "--model.intermediate_size 3072",
    "--tensor-model-parallel-size 2": "--parallel.tensor 2",
    "--pipeline-model-parallel-size 4": "--parallel.pipeline 4",
    "--micro-batch-size 4": "--training.micro_batch_size 4",
    "--global-batch-size 64": "--training.global_batch_size 64",
    "--seq-length 1024": "--training.sequence_length 1024",
    "--max-position-embeddings 1024": "--model.max_position_embeddings 1024",
    "--train-iters 500": "--training.steps 500",
    "--lr 1e-4": "--optimizer.learning_rate 0.0001",
    "--lr-warmup-iters 10": "--optimizer.warmup_steps 10",
    "--lr-decay-iters 300": "--optimizer.decay_steps 300",
    "--lr-decay-style cosine": "--optimizer.schedule cosine",
    "--weight-decay 0.1": "--optimizer.weight_decay 0.1",
    "--clip-grad 1.0": "--optimizer.gradient_clipping 1.0",
    "--adam-beta2 0.95": "--optimizer.betas '[0.9, 0.95]'",
    "--adam-eps 1e-8": "--optimizer.eps 1e-08",
    "--bf16": "--training.precision bf16",
    "--fp16": "--training.precision fp16",
    "--swiglu": "--model.gated_mlp true --model.hidden_act silu",
    "--data-path my/text": "--data.source my/text",
    "--data-path 0.3 a 0.7 b": """--data.blend '[{source = "a", weight = 0.3}, {source = "b", weight = 0.7}]'""",
    "--tokenizer-model t/tokenizer.model": "--tokenizer.path t/tokenizer.model",
    "--save runs/a": "--run.folder runs/a",
    "--save-interval 100": "--checkpoint.every 100",
    "--log-interval 10": "--monitor.every 10",
    "--use-distributed-optimizer": "--deepspeed.zero_optimization.stage 1",
    "--attention-dropout 0.0": "--model.attention_dropout 0.0",
    "--recompute-activations": "--training.recompute selective",
    "--checkpoint-activations": "--training.recompute full",
    "--num-experts 8": "--model.num_experts 8",
    "--moe-router-topk 2": "--model.num_experts_per_tok 2",
    "--expert-model-parallel-size 2": "--parallel.expert 2",
    "--moe-aux-loss-coeff 0.01": "--training.router_balance 0.01",
}
"""Flags as people type them -> what they should have typed."""


@pytest.mark.parametrize("typed", TYPED)
def test_a_flag_of_megatron_is_answered_with_our_setting_and_value(typed: str) -> None:
    name = typed.split()[0]
    words = ["run.toml", "--init-method-std", "0.5", *typed.split(), "--run.seed=1"]
    with pytest.raises(ConfigError) as refused:
        options_and_settings(words)
    said = {problem.key: problem for problem in refused.value.problems}
    assert said.keys() == {"--init-method-std", name}
    assert said[name].message == "is a flag of Megatron-LM"
    assert said[name].remedy == f"write {TYPED[typed]}"
    for key in KEY.findall(TYPED[typed]):
        assert setting(key).description


def test_all_flags_of_megatron_are_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--num-layers 4 --num-experts 8 --data-path 0.3 a 0.7 b --lr=1e-4 --seed 1 --log-throughput --bf16"
    )
    for command in ("train", "launch"):
        assert main([command, "run.toml", *flags.split()]) == 2
        first, *lines = capsys.readouterr().err.splitlines()
        assert first == "error: the command line has 7 problems"
        assert [line.split(":")[0].strip() for line in lines] == [
            word.split("=")[0] for word in flags.split() if word.startswith("--")
        ]
        assert "write --model.num_experts 8" in lines[1] and "leave it out" in lines[5]


def test_deepspeeds_flags_beside_those_of_megatron_are_taken(tmp_path: Path) -> None:
    words = ["--deepspeed", "--deepspeed_config", "ds.json", "--num-layers", "4"]
    with pytest.raises(ConfigError) as refused:
        options_and_settings(words)
    assert [problem.key for problem in refused.value.problems] == ["--num-layers"]


def test_our_settings_with_dashes_and_without_a_section_are_answered_as_before(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, flags=["--micro-batch-size", "4"])
    assert str(problem) == "--micro-batch-size: has no section; did you mean --training.micro_batch_size?"
