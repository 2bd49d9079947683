"""Flags of DeepSpeed's launch convention are taken; those of Megatron-LM are answered with ours."""

import argparse
import re
from pathlib import Path

import pytest

from megalite.cli import main
from megalite.config.flags import split_overrides
from megalite.config.foreign_flags import MEGATRON, with_deepspeeds_flags
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


@pytest.mark.parametrize("flag", MEGATRON)
def test_a_flag_of_megatron_is_answered_with_settings_that_exist(flag: str) -> None:
    words = ["run.toml", "--tensor-model-parallel-size", "2", f"--{flag}", "7", "--run.seed=1"]
    with pytest.raises(ConfigError) as refused:
        split_overrides(words)
    said = {problem.key: problem for problem in refused.value.problems}
    assert said.keys() == {"--tensor-model-parallel-size", f"--{flag}"}
    problem = said[f"--{flag}"]
    assert (
        problem.message == "is a flag of Megatron-LM"
        and problem.remedy == f"write {MEGATRON[flag].format('7')}"
    )
    keys = KEY.findall(MEGATRON[flag])
    assert keys or "--deepspeed.zero_optimization.stage" in MEGATRON[flag]
    for key in keys:
        assert setting(key).description


def test_all_flags_of_megatron_are_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--num-layers",
        "4",
        "--swiglu",
        "--data-path",
        "0.3",
        "a",
        "0.7",
        "b",
        "--lr=1e-4",
        "--seed",
        "1",
    ]
    for command in ("train", "launch"):
        assert main([command, "run.toml", *flags, "--bf16"]) == 2
        assert capsys.readouterr().err.splitlines() == [
            "error: the command line has 6 problems",
            "  --num-layers: is a flag of Megatron-LM; write --model.num_hidden_layers 4",
            "  --swiglu: is a flag of Megatron-LM; write --model.gated_mlp true and --model.hidden_act silu",
            "  --data-path: is a flag of Megatron-LM; write --data.source VALUE, or [[data.blend]] with weights",
            "  --lr: is a flag of Megatron-LM; write --optimizer.learning_rate 1e-4",
            "  --seed: is a flag of Megatron-LM; write --run.seed 1",
            "  --bf16: is a flag of Megatron-LM; write --training.precision bf16",
        ]


def test_our_settings_with_dashes_and_without_a_section_are_answered_as_before(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, flags=["--micro-batch-size", "4"])
    assert str(problem) == "--micro-batch-size: has no section; did you mean --training.micro_batch_size?"
