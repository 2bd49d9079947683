"""The command line itself, and `megalite config show`, through main(argv)."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megalite.cli import COMMANDS, main
from megalite.config.load import load_run
from megalite.config.presets import PRESETS
from megalite.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart" / "run.toml"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["-h"], []):
        assert main(argv) == 0
        shown = capsys.readouterr().out
        assert all(name in shown and line in shown for name, line in COMMANDS.items())


def test_python_m_megalite_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "megalite", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("megalite ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"megalite {name}" in capsys.readouterr().out


def test_help_of_train_has_every_setting_with_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for section, info in RunConfig.model_fields.items():
        for key, field in getattr(info.annotation, "model_fields", {}).items():
            assert f"--{section}.{key} " in words
            assert field.description in words
    assert '(adamw | sgd, default "adamw")' in words
    assert "(INT, required)" in words
    assert max(map(len, shown.splitlines())) <= 120


def test_an_unknown_command_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: megalite has no command trian; did you mean train?\n"


def test_what_the_deepspeed_launcher_adds_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--local_rank=1", "--version"]) == 0
    assert capsys.readouterr().out.startswith("megalite ")


def test_an_interrupt_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("megalite.cli.config.run", interrupted)
    assert main(["config", "show"]) == 130


def test_config_show_is_the_run_as_toml_with_origins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["config", "show", str(QUICKSTART), "--training.steps", "70"]) == 0
    shown = capsys.readouterr().out
    origins = dict(line.split("  # ") for line in shown.splitlines() if "  # " in line)
    origins = {setting.strip(): origin for setting, origin in origins.items()}
    assert origins["steps = 70"] == "--training.steps"
    assert origins["hidden_size = 128"] == str(QUICKSTART)
    assert origins["gradient_clipping = 1.0"] == "gradient_clipping in ds_config.json"
    assert origins["stage = 1"] == "ds_config.json"
    assert origins["micro_batches = 4"] == "derived"
    assert origins["workers = 2"] == "default"

    handed = shown.split("# DeepSpeed's configuration:\n")[1]
    config = load_run(QUICKSTART, ["--training.steps", "70"]).config
    assert json.loads(handed.replace("# ", "")) == config.deepspeed_json()

    again = tmp_path / "again.toml"
    again.write_text(shown)
    parallel = {"tensor": 2, "sequence": False, "pipeline": 2, "data": 2}
    parallel |= {"schedule": "1f1b", "virtual_stages": 1}
    assert tomllib.loads(shown)["parallel"] == parallel
    assert load_run(again).config == config


def test_config_show_resolves_for_the_ranks_of_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "show", str(QUICKSTART), "--parallel.data", "auto", "--world-size"]
    assert main([*arguments, "16"]) == 0
    assert "data = 4" in capsys.readouterr().out
    assert main([*arguments, "6"]) == 2
    assert "6 ranks are not a multiple of parallel.tensor 2 * parallel.pipeline 2" in capsys.readouterr().err


def test_config_show_says_that_deepspeed_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(QUICKSTART), "--deepspeed.config", "none"]) == 0
    assert "DeepSpeed is not used" in capsys.readouterr().out


def test_a_bad_run_is_one_block_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        QUICKSTART.read_text()
        .replace("tensor = 2", "tensor = 6")
        .replace("micro_batch_size", "micro_batchsize")
    )
    Path("run.toml").write_text(text.replace("num_attention_heads = 4", "num_attention_heads = 12"))
    Path("ds_config.json").write_text("{}")
    for command in (["train", "run.toml"], ["config", "show", "run.toml"]):
        assert main([*command, "--model.num_key_value_heads", "4", "--model.head_dim=8"]) == 2
        assert capsys.readouterr().err == (
            "error: run.toml has 3 problems\n"
            "  training.micro_batchsize: unknown key; did you mean training.micro_batch_size?\n"
            "  parallel.tensor: 6 neither divides model.num_key_value_heads = 4 nor is a multiple of it; "
            "use one of [1, 2, 4, 12]\n"
            "  training.micro_batch_size: training.global_batch_size = 32 (run.toml) alone does not determine the batch"
            "; set one of training.micro_batch_size, training.micro_batches\n"
        )


def test_a_setting_without_its_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(QUICKSTART), "--steps", "3"]) == 2
    assert "--steps: has no section; did you mean --training.steps?" in capsys.readouterr().err


def test_presets_are_listed_with_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "presets"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in lines if line} >= set(PRESETS)
    assert ["tiny", "llama", "2,835,584", "5", "MiB", "49", "MiB"] in lines
    assert ["gpt2", "gpt2", "124,439,808", "0.2", "GiB", "2.1", "GiB"] in lines


def test_output_that_nobody_reads_to_its_end_is_no_error() -> None:
    command = [sys.executable, "-m", "megalite", "config", "presets"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.wait(timeout=60), process.stderr.read()) == (141, "")
    process.stderr.close()
