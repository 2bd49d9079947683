"""The command line itself, and `megalite config show`, through main(argv)."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megalite.cli import main
from megalite.cli.commands import COMMANDS
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.config.sources.presets import PRESETS
from megalite.topology.optimizers import OPTIMIZERS
from tests.support.waiting import PATIENCE

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


def help_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The help that a command prints; its exit code is 0."""
    try:
        code = main(argv)
    except SystemExit as left:  # of argparse
        code = int(left.code or 0)
    assert code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"megalite {name}" in help_of([name, "--help"], capsys)


def test_help_of_train_has_every_setting_with_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(["train", "--help", "all"], capsys)
    words = " ".join(shown.split())
    for section, info in RunConfig.model_fields.items():
        for key, field in getattr(info.annotation, "model_fields", {}).items():
            assert f"--{section}.{key} " in words
            assert field.description in words
    assert f'({" | ".join(OPTIMIZERS)}, default "adamw")' in words
    assert "(INT, required)" in words
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("argv", [[name, "--help"] for name in COMMANDS] + [["--help"], ["help"]])
def test_help_is_one_screen(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of(argv, capsys).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "rare"),
    [
        ("generate", "--min-p"),
        ("evaluate", "--stride"),
        ("serve", "--drain-seconds"),
        ("verify", "--text"),
        ("chaos", "--at"),
    ],
)
def test_help_of_many_options_is_on_two_screens(
    name: str, rare: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common, everything = help_of([name, "--help"], capsys), help_of([name, "--help", "all"], capsys)
    assert f"all options: megalite {name} --help all" in common and rare not in common
    assert rare in everything and everything == help_of(["help", name, "all"], capsys)
    assert all(word in everything for word in common.split() if word.startswith("--"))


def test_help_words_are_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(["help", "data", "prepare"], capsys) == help_of(["data", "prepare", "--help"], capsys)
    assert help_of(["help", "train"], capsys) == help_of(["train", "-h"], capsys)
    section = help_of(["help", "train", "parallel"], capsys)
    assert section == help_of(["train", "run.toml", "--help", "parallel"], capsys)
    assert section.startswith("[parallel] ") and "--parallel.tensor" in section and "--run." not in section
    assert help_of(["train", "--help", "parallel.tensor"], capsys) == section
    assert main(["help", "train", "paralel"]) == 2
    assert "--help paralel: is not a section; did you mean parallel?" in capsys.readouterr().err
    assert main(["help", "trian"]) == 2
    assert capsys.readouterr().err == "error: megalite has no command trian; did you mean train?\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["config", "shw"], "megalite config has no command shw; did you mean show?"),
        (["data", "xyz"], "megalite data has no command xyz; use one of prepare, inspect"),
        (["convert", "exprot"], "megalite convert has no command exprot; did you mean export?"),
        (["tokenizer"], "megalite tokenizer needs a command; use one of train, convert"),
        (
            ["config", "show"],
            "megalite config show: the following arguments are required: RUN.toml; "
            "megalite config show --help shows the options",
        ),
    ],
)
def test_a_wrong_subcommand_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    ("argv", "close"),
    [
        (["chaos", "run.toml", "--kill", "3"], "--kill-every"),
        (["verify", "run.toml", "--toleranse", "3"], "--tolerance"),
        (["launch", "run.toml", "--hostfil", "hosts"], "--hostfile"),
        (["data", "prepare", "--source=a", "--tokenizer=b", "--output=c", "--worker", "3"], "--workers"),
        (["evaluate", "model", "--temp", "2"], ""),
    ],
)
def test_a_part_of_an_option_is_no_option_and_the_closest_is_named(
    argv: list[str], close: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    said = capsys.readouterr().err
    assert left.value.code == 2 and f"unrecognized arguments: {argv[-2]} {argv[-1]}; " in said
    assert (f"; did you mean {close}? megalite" in said) if close else "did you mean" not in said


def test_an_unknown_command_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: megalite has no command trian; did you mean train?\n"


def test_what_the_deepspeed_launcher_adds_is_no_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
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
    parallel = tomllib.loads(shown)["parallel"]
    assert (parallel["data"], parallel["virtual_stages"], "layers_per_stage" in parallel) == (2, 1, False)
    assert load_run(again).config == config


def test_config_show_resolves_for_the_ranks_of_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "show", str(QUICKSTART), "--parallel.data", "auto", "--world-size"]
    assert main([*arguments, "16"]) == 0
    assert "data = 4" in capsys.readouterr().out
    assert main([*arguments, "6"]) == 2
    assert "tensor 2 x pipeline 2 = 4 does not divide the 6 ranks" in capsys.readouterr().err


def test_config_show_says_that_deepspeed_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(QUICKSTART), "--deepspeed.config", "unset"]) == 0
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
            "  training.micro_batch_size: training.global_batch_size = 16 (run.toml) alone does not determine the batch"
            "; set one of training.micro_batch_size, training.micro_batches\n"
        )


def test_unusable_places_are_said_at_once_by_both_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    flags = ["--run.folder", str(tmp_path / "file"), "--data.source", str(tmp_path / "book.txt")]
    flags += ["--checkpoint.resume", str(tmp_path / "none")]
    for command in (["train"], ["config", "show"]):
        assert main([*command, str(QUICKSTART), *flags]) == 2
        said = capsys.readouterr().err
        assert "has 3 problems" in said
        assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == [
            "run.folder",
            "checkpoint.resume",
            "data.source",
        ]


def test_a_wrong_run_costs_little_and_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import resource, sys\nfrom megalite.cli import main\n"
        "code = main(sys.argv[1:])\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = {'torch', 'numpy', 'rich', 'transformers', 'deepspeed', 'tokenizers'} & sys.modules.keys()\n"
        "print(code, used.ru_utime + used.ru_stime, *heavy)\n"
    )
    found = []
    # Python keeps the compiled modules for a user's next command.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(5):  # the least of five: other processes' caches cost time too
        argv = [
            sys.executable,
            "-c",
            code,
            "train",
            str(QUICKSTART),
            "--checkpoint.resume",
            str(tmp_path / "no"),
        ]
        done = subprocess.run(argv, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
        exit_code, seconds, *heavy = done.stdout.split()
        assert (exit_code, heavy) == ("2", [])
        found.append(float(seconds))
    assert min(found) < 0.5


def test_config_show_counts_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(QUICKSTART)]) == 0
    shown = capsys.readouterr().out
    # Layers: 4 x (qkv 128 x 256, output 128 x 128, gate, up, down 3 x 128 x 352, two norms), a last norm; embedding.
    inner = 4 * (128 * 256 + 128 * 128 + 3 * 128 * 352 + 2 * 128) + 128
    assert f"# parameters: {inner + 512 * 128:,} ({inner:,} without embedding and head)\n" in shown
    # Tensor 2 halves the matrices and the embedding; the last of two stages has the last norm and the tied head too.
    half = 2 * ((128 * 256 + 128 * 128 + 3 * 128 * 352) // 2 + 2 * 128) + 512 * 128 // 2
    assert f"# per rank: {half + 128:,} on the largest rank, a rank of stage 1\n" in shown


def test_a_setting_without_its_section_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", str(QUICKSTART), "--steps", "3", "--learning-rate=1", "--parallel.tensor", "3"]) == 2
    )
    said = capsys.readouterr().err
    assert "has 4 problems" in said
    assert "--steps: has no section; did you mean --training.steps?" in said
    assert "--learning-rate=1: has no section; did you mean --optimizer.learning_rate?" in said
    assert "parallel.tensor: 3 does not divide" in said


def test_presets_are_listed_with_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "presets"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in lines if line} >= set(PRESETS)
    assert ["tiny", "llama", "2,835,584", "5", "MiB", "49", "MiB", "57", "M"] in lines
    assert ["gpt2", "gpt2", "124,439,808", "0.2", "GiB", "2.1", "GiB", "2.5", "B"] in lines


def test_output_that_nobody_reads_to_its_end_is_no_error() -> None:
    command = [sys.executable, "-m", "megalite", "config", "presets"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.wait(timeout=PATIENCE), process.stderr.read()) == (141, "")
    process.stderr.close()


def test_explain_shows_equations_with_lines_of_the_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(QUICKSTART), "--explain", "--training.micro_batch_size", "1"]) == 0
    shown, lines = capsys.readouterr().out, QUICKSTART.read_text().splitlines()
    [batch] = [number for number, line in enumerate(lines, start=1) if line.startswith("global_batch_size")]
    assert (
        f"training.micro_batches = 8 = global_batch_size 16 (run.toml line {batch}) / (micro_batch_size 1 "
        in shown
    )
    assert "micro_batch_size 1 (--training.micro_batch_size)" in shown
    assert "memory of the largest rank: weights " in shown and "[training]" not in shown


def test_explain_has_the_bytes_of_each_state_by_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks of bf16 with ZeRO 1: each has all weights and gradients, half of the masters, two moments of these."""
    layout = ("--parallel.tensor", "1", "--parallel.pipeline", "1", "--parallel.data", "2")
    sizes = ("--training.precision", "bf16", "--training.micro_batch_size", "1", "--model.vocab_size", "512")
    assert main(["config", "show", str(QUICKSTART), "--explain", *layout, *sizes]) == 0
    shown = capsys.readouterr().out
    [count] = re.findall(r"^parameters = (\d+)", shown, re.M)
    values = {"weights": (1, 2), "gradients": (1, 4), "masters": (1 / 2, 4), "moments": (2 / 2, 4)}
    for kind, (share, size) in values.items():
        number = int(int(count) * share)
        assert f"\n  {kind} {number * size:,} bytes = {number:,} values * {size} bytes\n" in shown, shown
